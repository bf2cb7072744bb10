"""The trainer's side of separate jobs: publishes weights and requests, and collects rollouts.

    weights of version v --> a snapshot --> samplers
    problems of a step --> requests ------> samplers --> results --validate--> the training step

`FixedStream`: step n trains on the problems of step n, sampled by version max(0, n - 1 - eta),
where eta is rollout.max_staleness. Which samplers take part, and when, changes nothing: the run is
a function of its settings. `ArrivalStream`: a step trains on the requests that are answered first,
by weights that are at most eta versions old.

Every result that a step trains on is kept in `<workdir>/rollouts`, and `<workdir>/jobs.jsonl` lists
the weights, the seed and the sampler of each. A trainer that was killed finds the results there
that it had already taken.

No sampler is trusted. A result that fails validation, or whose grades the trainer's own contradict,
is dropped with a line that names its sampler, and another sampler gets the request.
"""

import contextlib
import hashlib
import json
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jzero import json_values, terminal
from jzero.config import Jobs, RolloutConfig
from jzero.decoder.sequence import DecodeCounters
from jzero.errors import UserError, shown
from jzero.files import (
    JsonObject,
    naming_full_disk,
    parse_json,
    read_bytes,
    read_jsonl,
    read_text,
    write_atomic,
)
from jzero.hosts import interrupt
from jzero.jobs.checks import MAX_NUMBER, Limits, decode_counters
from jzero.jobs.leases import FOLDER as LEASES
from jzero.jobs.leases import Leases, SlowLeases
from jzero.jobs.progress import PARTIALS
from jzero.jobs.regrading import FailedThereError, Regrader
from jzero.jobs.requests import (
    ANY_VERSION,
    REQUESTS,
    RESULTS,
    Request,
    Result,
    check_name,
    check_result,
    is_name,
    is_request_id,
    request_of,
)
from jzero.jobs.sealed import BadResultError
from jzero.jobs.snapshots import Publisher, Reader, SnapshotError, is_version
from jzero.jobs.store import BadFileError, RetryingStore, open_store, read_if_exists, read_note
from jzero.jobs.weights import to_tensors
from jzero.model import qwen
from jzero.rollout.async_stream import TrainingProblems
from jzero.rollout.sampler import EncodedProblem, Sampler
from jzero.training.frozen_base import hash_weights
from jzero.types import Rollout

RUN = "run.json"
END = "end"
BROKEN = "broken"
REFUSED = "refused"
RUN_FILE = "jobs.json"  # in the workdir: the id of the run
LOG = "jobs.jsonl"  # in the workdir
ROLLOUTS = "rollouts"  # folder of the workdir
TRAINER = "trainer"  # its name in the store, and the file that names the trainer of the run
STORE_SECONDS = 600.0  # for which a store may fail before the run stops
MOST_REFUSALS = 3  # results of one sampler, after which the others of it are not read any more
MOST_NAMES = 1000  # of samplers with refused results that are remembered
MOST_LINES = 20  # of refused results per step
MOST_FILES = 1000  # of results that are looked at before anything else
MAX_TEXT = 1000  # characters of a name in the log
REPAIR_SECONDS = 3.0  # between two looks for what samplers need, while results arrive


@dataclass(frozen=True)
class JobSettings:
    """The values that a stream needs besides the sections of the config."""

    config_json: str  # for the samplers
    workdir: Path
    dtype: str  # of the snapshots
    steps: int  # of the run
    base: Path | None  # the directory of the weights under an adapter; None for a full model


@dataclass(frozen=True)
class Answer:
    """A validated result."""

    request: Request
    result: Result
    rollouts: list[Rollout]


def groups_per_request(placement: Jobs, rollout: RolloutConfig) -> int:
    """Returns the number of prompts in a request: a divisor of num_prompts unless it is set."""
    # The setting may leave a smaller last request; the automatic choice divides evenly.
    if placement.groups_per_request:
        return min(placement.groups_per_request, rollout.num_prompts)
    # Fewer prompts than slots would leave slots empty, and more would only make a request longer.
    most = rollout.num_prompts
    if rollout.num_slots:
        most = min(most, max(1, rollout.num_slots // rollout.group_size))
    return next(number for number in range(most, 0, -1) if rollout.num_prompts % number == 0)


class JobStream(ABC):
    """The requests of a run, from their publication to their training step."""

    def __init__(
        self,
        sampler: Sampler,
        problems: TrainingProblems,
        rollout: RolloutConfig,
        placement: Jobs,
        settings: JobSettings,
    ) -> None:
        self.sampler = sampler
        self.problems = problems
        self.rollout = rollout
        self.placement = placement
        self.settings = settings
        self.groups = groups_per_request(placement, rollout)
        self.limits = Limits.of(sampler, placement)
        self.regrader = Regrader(sampler, placement.regrade_share, key_of(settings.workdir))
        self.check_stop: interrupt.StopCheck = interrupt.never_stop
        self.store = RetryingStore(
            open_store(placement.store), STORE_SECONDS, lambda: self.check_stop()
        )
        self.leases = Leases(self.store, TRAINER, placement.lease_seconds)
        self.slow_leases = SlowLeases(self.leases)

        self.open: dict[str, Request] = {}  # published, not trained on
        self.ready: dict[str, Answer] = {}  # of open requests
        self.identities: dict[int, str] = {}  # of the snapshots of the last versions
        self.publisher: Publisher | None = None  # None before the first `collect`
        self.log: list[JsonObject] = []  # the lines of LOG
        self.refusals: Counter[str] = Counter()  # results by sampler
        self.refused_answers: Counter[str] = Counter()  # results by open request
        self.opened: dict[str, float] = {}  # request -> time.monotonic() of its publication
        self.differing: set[str] = set()  # requests with a line about two different answers
        # What names the trainer in the store: this process, and the one before it.
        self.claims = [uuid.uuid4().hex.encode()]
        self.repaired: dict[int, float] = {}  # version -> time.monotonic() of the last report
        # Since the last `metrics`:
        self.num_refused = 0  # results
        self.num_given_again = 0  # requests of slow samplers
        self.num_continued = 0  # tokens that samplers have handed over
        self.seconds_waited = 0.0
        self._saved = self.to_bytes()

    # -- one step ----------------------------------------------------------------------------------

    def collect(
        self,
        weights: qwen.Params,
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Publishes the trainer's `weights`, and returns the rollouts of the step after `version`.

        Also returns the decode counters of the samplers.
        """
        self.check_stop = check_stop
        publisher = self.publisher or self._start(version)
        tensors = to_tensors(weights, self.settings.dtype)
        self.identities[version] = publisher.publish(version, tensors)
        # No request that is still open names an older version.
        for old in [v for v in self.identities if v < version - self.rollout.max_staleness]:
            del self.identities[old]
        # After the weights: a sampler that reads a request finds the snapshot that it names.
        self.publish_requests(version)
        self._remove_strangers()

        start = time.monotonic()
        self._wait(lambda: self.has_enough(version))
        self.seconds_waited += time.monotonic() - start
        answers = self.take(version)
        self._end_step(version + 1, answers)
        if version % self.placement.snapshot_every == 0:
            self._remove_old(publisher)
        # A run that resumes from this step's checkpoint must not train on its rollouts again.
        self._saved = self.to_bytes()

        counters = DecodeCounters()
        rollouts: list[Rollout] = []
        for answer in answers:
            rollouts += answer.rollouts
            # Samplers wait for grades while the trainer does something else.
            counters.add(replace(decode_counters(answer.result.counters), grading_seconds=0.0))
            self.num_continued += answer.result.continued_tokens
            for name, number in answer.result.grading.items():
                if name in self.sampler.pool.counters:
                    self.sampler.pool.counters[name] += number
        return rollouts, counters

    @abstractmethod
    def publish_requests(self, version: int) -> None:
        """Opens the requests that may be sampled once `version` is published."""

    @abstractmethod
    def has_enough(self, version: int) -> bool:
        """Whether the step after `version` can begin."""

    @abstractmethod
    def take(self, version: int) -> list[Answer]:
        """Removes the answers of the step after `version` from the stream and returns them."""

    @abstractmethod
    def accepts(self, request: Request, result: Result) -> bool:
        """Whether a valid result is recent enough to be trained on."""

    # -- the store ---------------------------------------------------------------------------------

    def _start(self, version: int) -> Publisher:
        """Claims the store, and reads the log of the run."""
        run = run_id(self.settings.workdir)
        values = {"run": run, "config": json.loads(self.settings.config_json)}
        content = json.dumps(values).encode()
        if not self.store.create(RUN, content):
            if read_run(self.store.read(RUN), self.store.address)[0] != run:
                raise UserError(
                    f"rollout.placement.store={self.placement.store} has the files of another run: "
                    "give a store of its own to every run"
                )
            # The same run, resumed: samplers that join now read its present settings.
            self.store.write(RUN, content)
        # A trainer of the same run that still works, such as one in a copy of the workdir, ends.
        self.claims.append(read_note(self.store, TRAINER) or b"")
        self.store.write(TRAINER, self.claims[0])
        # A resumed run may have more steps than it had when it ended.
        self.store.delete(END)
        # Steps after the checkpoint are done again.
        path = self.settings.workdir / LOG
        self.log = [row for row in read_log(self.settings.workdir) if row["step"] <= version]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.log))
        base = self.settings.base
        self.publisher = Publisher(
            self.store,
            run,
            "" if base is None else hash_weights(base),
            self.placement.snapshot_every,
            self.placement.keep_snapshots,
            self.rollout.max_staleness + 1,
        )
        self._read_versions(self.publisher)
        if not self.placement.serve:
            terminal.say(
                f"samplers join with: python -m jzero.sample --join {self.store.address}", "bold"
            )
        return self.publisher

    def _read_versions(self, publisher: Publisher) -> None:
        """Reads the versions from before a kill, so that their snapshots can be repaired."""
        reader = Reader(self.store, publisher.run)
        for version, identity in sorted(self.identities.items()):
            # A damaged one matters only if a sampler asks for it, and is reported then.
            with contextlib.suppress(SnapshotError):
                publisher.publish(version, reader.load(version, identity))

    def open_request(self, request: Request) -> None:
        """Publishes a request, unless the workdir has its result from before a kill."""
        self.open[request.id] = request
        # Sampled again, the answer would be the same.
        answer = self._kept_answer(request)
        if answer is not None:
            self.ready[request.id] = answer
            return
        self.opened[request.id] = time.monotonic()
        self.store.write(f"{REQUESTS}/{request.id}", request.to_json())

    def _kept_answer(self, request: Request) -> Answer | None:
        """Returns the answer in the workdir's file of a result, if it is still of use.

        A file that is not is removed: the request is answered again.
        """
        path = result_file(self.settings.workdir, request.id)
        try:
            limits = request.file_limits(self.limits)
            data = read_bytes(path, limits.most_bytes)
            result = Result.parse(data, limits.most_items)
            rollouts = check_result(request, result, self.limits)
            self.regrader.check(result.digest, rollouts)
        except FileNotFoundError:
            return None
        except (UserError, BadResultError) as error:
            terminal.say(f"{path}: {error}: its request is answered again")
        else:
            if self.accepts(request, result):
                return Answer(request, result, rollouts)
        remove_kept(path)
        return None

    def close_request(self, request: str) -> None:
        """Removes the files of a request, so that no sampler takes it."""
        # The request first: without its lease alone, a sampler would begin it again.
        self.store.delete(f"{REQUESTS}/{request}")
        self.store.delete(f"{LEASES}/{request}")
        self.store.delete(f"{PARTIALS}/{request}")
        self.opened.pop(request, None)
        self.refused_answers.pop(request, None)
        self.differing.discard(request)

    def _remove_strangers(self) -> None:
        """Removes requests from before a kill that the run does not make again."""
        # A sampler may hand over a request at the moment in which it is closed.
        for request in {*self.store.names(REQUESTS), *self.store.names(PARTIALS)}:
            if request not in self.open:
                self.close_request(request)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        last_news = last_repair = time.monotonic()
        while not is_done():
            has_news = self._poll()
            now = time.monotonic()
            if has_news:
                last_news = now
            # While results arrive, nothing is wrong. But a sampler may write files all the time.
            if has_news and now - last_repair < REPAIR_SECONDS:
                continue
            last_repair = now
            self._check_claim()
            self._repair()
            self._restore_requests()
            self._give_slow_requests_again()
            self.check_stop()
            if has_news:
                continue
            time.sleep(self.store.poll_seconds)
            # By then the leases of dead samplers have expired, and the report counts living ones.
            if time.monotonic() - last_news > self.placement.lease_seconds:
                last_news = time.monotonic()
                self._report_wait()

    def _check_claim(self) -> None:
        """Raises UserError if another trainer has taken the store since this one started."""
        claim = read_note(self.store, TRAINER)
        # A bucket may return an older content for a while.
        if claim is not None and claim not in self.claims:
            raise UserError(
                f"rollout.placement.store={self.placement.store}: another trainer of this run has "
                "started and taken the store. Two trainers cannot share a store: end the other "
                "one and start this command again, or give this run a store of its own"
            )

    def _restore_requests(self) -> None:
        """Writes requests again whose files are gone, such as damaged ones."""
        names = set(self.store.names(REQUESTS))
        for request in self.waiting:
            if request not in names:
                self.store.write(f"{REQUESTS}/{request}", self.open[request].to_json())

    @property
    def waiting(self) -> list[str]:
        """The open requests without an answer."""
        return [request for request in self.open if request not in self.ready]

    def _give_slow_requests_again(self) -> None:
        """Lets a second sampler work on a request that a living sampler does not finish.

        The first answer counts. With schedule=fixed both are equal.
        """
        for request, sampler, seconds in self.slow_leases.find(self.waiting):
            self.num_given_again += 1
            terminal.say(
                f"{shown(sampler)} has worked on request {request} for {seconds:.0f} seconds: "
                "another sampler may take it as well"
            )
            # Its sampler does not take a lease again that it has lost.
            self.store.delete(f"{LEASES}/{request}")
        for request, sampler in self.slow_leases.holders.items():
            if self.refusals[sampler] >= MOST_REFUSALS:
                self.store.delete(f"{LEASES}/{request}")

    def _report_wait(self) -> None:
        waiting = self.waiting
        now = self.store.now(TRAINER)
        leased = sum(not self.leases.is_expired(request, now) for request in waiting)
        advice = "" if leased else f": start python -m jzero.sample --join {self.store.address}"
        terminal.say(
            f"waiting for {len(waiting)} requests, of which samplers work on {leased}{advice}"
        )

    def _poll(self) -> bool:
        """Reads the results that have arrived. Returns whether there were any."""
        names = self.store.names(RESULTS)
        if len(names) > MOST_FILES:
            # At random: files of one request must not keep those of others waiting.
            names = random.sample(names, MOST_FILES)
        for name in names:
            request = self.open.get(request_of(name))
            # Late and second answers of requests that are closed are only removed.
            if request is not None:
                self._receive(request, name)
            # After the result is on disk: a kill in between only reads it twice.
            self.store.delete(f"{RESULTS}/{name}")
        return bool(names)

    def _receive(self, request: Request, name: str) -> None:
        """Takes a result, or refuses it and gives its request to another sampler."""
        limits = request.file_limits(self.limits)
        data, sampler = b"", ""
        try:
            data = read_if_exists(self.store, f"{RESULTS}/{name}", limits.most_bytes) or b""
            result = Result.parse(data, limits.most_items)
            sampler = result.sampler if is_name(result.sampler) else ""
            # The result may be right, but the trainer cannot check all of it.
            if self.refusals[sampler] >= MOST_REFUSALS:
                self.num_refused += 1
                self._end_lease(request, sampler)
                return
            rollouts = check_result(request, result, self.limits)
            check_name(result, name)
            # An expired lease may have had two samplers.
            if request.id in self.ready:
                self._compare(self.ready[request.id].result, result)
                return
            if not self.accepts(request, result):
                # The lease ends, and a sampler takes the request with newer weights.
                self._end_lease(request, sampler)
                return
            # Last, because grading takes longer than everything else.
            self.regrader.check(result.digest, rollouts)
        except BadFileError as error:
            self._refuse(request, "", error, data)
            return
        except BadResultError as error:
            named = sampler or error.sampler
            self._refuse(request, named if is_name(named) else "", error, data)
            return
        path = result_file(self.settings.workdir, request.id)
        # On disk before the request is closed, so that a kill in between loses nothing.
        path.parent.mkdir(exist_ok=True)
        write_atomic(request_file(self.settings.workdir, request.id), request.to_json())
        write_atomic(path, data)
        self.ready[request.id] = Answer(request, result, rollouts)
        # A sampler that reports more than that would make all others seem fast.
        most_seconds = time.monotonic() - self.opened.get(request.id, 0.0)
        self.slow_leases.count_answer(min(result.seconds, most_seconds))
        self.close_request(request.id)

    def _refuse(
        self,
        request: Request,
        sampler: str,
        error: BadFileError | BadResultError,
        data: bytes,
    ) -> None:
        """Reports a refused result, and tells its sampler; "" if the result does not name one."""
        self.num_refused += 1
        if self.num_refused <= MOST_LINES:
            terminal.say(f"refused a result of {sampler or 'a sampler'}: {error}")
        if self.num_refused == MOST_LINES:
            terminal.say("further refused results of this step are only counted")
        self.refused_answers[request.id] += 1
        self._end_lease(request, sampler)
        if not sampler or (sampler not in self.refusals and len(self.refusals) >= MOST_NAMES):
            return
        self.refusals[sampler] += 1
        if self.refusals[sampler] == MOST_REFUSALS:
            terminal.say(
                f"{sampler}: {MOST_REFUSALS} of its results were refused, and all others are now"
            )
        # A busy machine may fail to grade now and then.
        if isinstance(error, FailedThereError) and self.refusals[sampler] < MOST_REFUSALS:
            return
        # The sampler reads this file, and ends if the result was its own: any sampler can write
        # any name into a result.
        note = {"file": hashlib.sha256(data).hexdigest(), "reason": str(error)}
        self.store.write(f"{REFUSED}/{sampler}", json.dumps(note).encode())

    def _end_lease(self, request: Request, sampler: str) -> None:
        """Lets another sampler take a request at once.

        Any name can be in a result, so the lease may be that of an honest sampler. It does not lose
        it again and again.
        """
        holder = self.leases.holder_of(request.id)
        is_lost = holder == sampler or self.refusals[holder or ""] >= MOST_REFUSALS
        if is_lost or self.refused_answers[request.id] <= MOST_REFUSALS:
            self.store.delete(f"{LEASES}/{request.id}")

    def _compare(self, first: Result, second: Result) -> None:
        """Reports two different answers to one request, which a sampler's fault must have made."""
        are_comparable = first.is_repeatable and second.is_repeatable
        are_comparable &= first.version == second.version
        if are_comparable and first.digest != second.digest and first.request not in self.differing:
            self.differing.add(first.request)
            terminal.say(
                f"{first.sampler} and {second.sampler} gave different answers to request "
                f"{first.request}: python -m jzero.replay shows which one is wrong"
            )

    def _repair(self) -> None:
        """Writes snapshots again that samplers could not read."""
        assert self.publisher is not None
        for name in self.store.names(BROKEN):
            reason = read_note(self.store, f"{BROKEN}/{name}") or b""
            if is_version(name) and self._is_broken(int(name)):
                reason_text = shown(reason.decode(errors="replace"))
                terminal.say(f"snapshot {name}: {reason_text}: written again")
                if not self.publisher.repair(int(name)):
                    raise UserError(
                        f"{self.store.address} has lost the weights of version {int(name)}, which "
                        "the next steps need: bring its files back, or start in another --workdir"
                    )
            self.store.delete(f"{BROKEN}/{name}")

    def _is_broken(self, version: int) -> bool:
        """Returns whether a snapshot that a sampler reports has to be written again.

        Looks at a snapshot only once in the time of a lease: a large one takes long to read.
        """
        assert self.publisher is not None
        now = time.monotonic()
        last = self.repaired.get(version, -self.placement.lease_seconds)
        if version not in self.identities or now - last < self.placement.lease_seconds:
            return False
        self.repaired[version] = now
        try:
            Reader(self.store, self.publisher.run).load(version, self.identities[version])
        except SnapshotError:
            return True
        return False

    def _end_step(self, step: int, answers: list[Answer]) -> None:
        """Writes where the rollouts of a step come from."""
        rows: list[JsonObject] = []
        for answer in answers:
            request, result = answer.request, answer.result
            rows.append(
                {
                    "step": step,
                    "request": request.id,
                    "version": result.version,
                    "snapshot": result.snapshot,
                    "later_weights": result.later_weights,
                    "continued_tokens": result.continued_tokens,
                    "seed": [request.seed, request.step],
                    "sampler": result.sampler,
                    "digest": result.digest,
                }
            )
        self.log += rows
        path = self.settings.workdir / LOG
        with naming_full_disk(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        # Samplers end when they read it.
        if step == self.settings.steps:
            self.store.write(END, b"")

    def _remove_old(self, publisher: Publisher) -> None:
        """Removes old snapshots, and the rollouts that need them to be replayed."""
        oldest = publisher.remove_old()
        # Without its snapshot a rollout cannot be sampled again.
        for row in self.log:
            if row["version"] < oldest:
                result_file(self.settings.workdir, row["request"]).unlink(missing_ok=True)
                request_file(self.settings.workdir, row["request"]).unlink(missing_ok=True)

    # -- metrics and checkpoints -------------------------------------------------------------------

    def metrics(
        self,
        rollouts: list[Rollout],
        version: int,
        counters: DecodeCounters,
    ) -> dict[str, float]:
        """Returns the async/ and jobs/ metrics of the step after `version`."""
        assert self.publisher is not None
        staleness = np.concatenate(
            [version - rollout.tokens.versions[rollout.tokens.sampled] for rollout in rollouts]
        )
        values: dict[str, float] = {}
        for versions_old in range(self.rollout.max_staleness + 1):
            values[f"async/staleness_{versions_old}"] = float((staleness == versions_old).mean())
        values["async/staleness"] = float(staleness.mean())
        values["async/wasted_tokens"] = counters.wasted_tokens
        values["jobs/wait_seconds"] = self.seconds_waited
        values["jobs/refused_results"] = self.num_refused
        values["jobs/given_again"] = self.num_given_again
        values["jobs/continued_tokens"] = self.num_continued
        values["jobs/snapshot_bytes"] = self.publisher.bytes_written
        # Counted from one step to the next.
        self.seconds_waited = 0.0
        self.num_refused = self.num_given_again = self.num_continued = 0
        return values

    def to_bytes(self) -> bytes:
        """Returns the state of the stream between two steps."""
        return json.dumps(self.saved_values()).encode()

    def saved_values(self) -> JsonObject:
        """Returns the JSON values of `to_bytes`."""
        return {"identities": list(self.identities.items())}

    def restore_values(self, values: JsonObject) -> None:
        """Undoes `saved_values`."""
        self.identities = {int(version): str(name) for version, name in values["identities"]}

    def state(self) -> bytes:
        """Returns the bytes for a checkpoint: the stream when the last step took its rollouts."""
        return self._saved

    def restore(self, data: bytes) -> None:
        """Restores the stream from the `state` of a checkpoint."""
        self.restore_values(json.loads(data))
        self._saved = data

    def halt(self) -> None:  # noqa: B027 (all streams have it, and this one needs none)
        """Does nothing: samplers use their own devices."""


class FixedStream(JobStream):
    """The rollouts of a step are a function of the seed, the step and max_staleness."""

    def version_for(self, step: int) -> int:
        """Returns the policy version that samples the rollouts of a step."""
        return max(0, step - 1 - self.rollout.max_staleness)

    def publish_requests(self, version: int) -> None:
        last = min(version + 1 + self.rollout.max_staleness, self.settings.steps)
        published = {request.step for request in self.open.values()}
        for step in range(version + 1, last + 1):
            # Opened by an earlier step, or restored from a checkpoint.
            if step in published:
                continue
            encoded = self.sampler.encode_problems(self.problems.draw(step))
            if not encoded:
                raise UserError(
                    f"step {step}: every prompt is longer than rollout.max_prompt_tokens="
                    f"{self.rollout.max_prompt_tokens}; raise it"
                )
            sampled_by = self.version_for(step)
            for number, first in enumerate(range(0, len(encoded), self.groups)):
                group = encoded[first : first + self.groups]
                self.open_request(
                    make_request(
                        self, step, number, first, group, sampled_by, self.identities[sampled_by]
                    )
                )

    def _of_step(self, step: int) -> list[str]:
        # Ids are in the order of the prompts.
        return sorted(request.id for request in self.open.values() if request.step == step)

    def has_enough(self, version: int) -> bool:
        return all(request in self.ready for request in self._of_step(version + 1))

    def take(self, version: int) -> list[Answer]:
        requests = self._of_step(version + 1)
        for request in requests:
            del self.open[request]
        return [self.ready.pop(request) for request in requests]

    def accepts(self, request: Request, result: Result) -> bool:
        return True  # the request names the weights


class ArrivalStream(JobStream):
    """A step trains on the requests that are answered first."""

    num_published: int = 0  # requests
    num_drawn: int = 0  # problems, including prompts that were too long
    version: int = 0  # of the newest weights

    @property
    def per_step(self) -> int:
        """The number of requests of a step."""
        return self.rollout.num_prompts // self.groups

    def publish_requests(self, version: int) -> None:
        self.version = version
        for request in list(self.open.values()):
            answer = self.ready.get(request.id)
            # An answer that waited too long is sampled again, with newer weights.
            if answer is not None and not self.accepts(request, answer.result):
                del self.ready[request.id]
                remove_kept(result_file(self.settings.workdir, request.id))
            if request.id not in self.ready:
                self.open_request(request)
        # As in `async_stream.admission_capacity`: no rollout is older than max_staleness versions
        # when it is trained on, if it was sampled at once.
        steps = min(version + self.rollout.max_staleness + 1, self.settings.steps)
        while self.num_published < steps * self.per_step:
            step, number = divmod(self.num_published, self.per_step)
            group = self._draw()
            self.num_published += 1
            first = number * self.groups
            self.open_request(make_request(self, step + 1, number, first, group, ANY_VERSION, ""))

    def _draw(self) -> list[EncodedProblem]:
        """Returns the next problems that are not too long, as many as a request has."""
        group: list[EncodedProblem] = []
        num_too_long = 0
        while len(group) < self.groups:
            step, index = divmod(self.num_drawn, self.rollout.num_prompts)
            self.num_drawn += 1
            encoded = self.sampler.encode_problems([self.problems.draw(step + 1)[index]])
            group += encoded
            num_too_long += not encoded
            if num_too_long > self.rollout.num_prompts:
                raise UserError(
                    f"rollout.max_prompt_tokens={self.rollout.max_prompt_tokens}: {num_too_long} "
                    "prompts are longer; raise it, or choose another data set"
                )
        return group

    def has_enough(self, version: int) -> bool:
        return len(self.ready) >= self.per_step

    def take(self, version: int) -> list[Answer]:
        # The oldest weights first, so that fewer answers become too old.
        by_age = sorted(self.ready.values(), key=lambda a: (a.result.version, a.request.id))
        chosen = by_age[: self.per_step]
        for answer in chosen:
            del self.ready[answer.request.id], self.open[answer.request.id]
        return chosen

    def accepts(self, request: Request, result: Result) -> bool:
        # The weights of the oldest token decide.
        oldest = self.version - self.rollout.max_staleness
        return all(
            oldest <= version <= self.version
            # A version from before a kill may have had other weights.
            and self.identities.get(version) == snapshot
            for version, snapshot in result.weights
        )

    def saved_values(self) -> JsonObject:
        requests = [json.loads(request.to_json()) for request in self.open.values()]
        return super().saved_values() | {
            "num_published": self.num_published,
            "num_drawn": self.num_drawn,
            "open": requests,
        }

    def restore_values(self, values: JsonObject) -> None:
        super().restore_values(values)
        self.num_published = values["num_published"]
        self.num_drawn = values["num_drawn"]
        requests = [Request.parse(json.dumps(row).encode()) for row in values["open"]]
        self.open = {request.id: request for request in requests}


STREAMS: dict[str, type[JobStream]] = {"fixed": FixedStream, "arrival": ArrivalStream}


def make_request(
    stream: JobStream,
    step: int,
    number: int,
    first_prompt: int,
    encoded: list[EncodedProblem],
    version: int,
    snapshot: str,
) -> Request:
    """Returns the request for a bundle of prompts."""
    assert stream.publisher is not None
    return Request(
        run=stream.publisher.run,
        step=step,
        number=number,
        seed=stream.problems.seed,
        first_prompt=first_prompt,
        group_size=stream.rollout.group_size,
        temperature=stream.rollout.temperature,
        version=version,
        snapshot=snapshot,
        problems=tuple(item.problem for item in encoded),
        prompts=tuple(tuple(item.prompt_tokens.tolist()) for item in encoded),
    )


# -- files -----------------------------------------------------------------------------------------


def run_id(workdir: Path) -> str:
    """Returns the id of the run in a workdir, a new one for a new run."""
    return run_values(workdir)["run"]


def key_of(workdir: Path) -> str:
    """Returns the key that chooses rollouts to grade again, which samplers do not know."""
    return run_values(workdir)["key"]


def run_values(workdir: Path) -> dict[str, str]:
    """Returns the id of the run in a workdir and the key of its random choices.

    Both are random, because two runs may have the same settings, and made once.
    """
    path = workdir / RUN_FILE
    values = {name: uuid.uuid4().hex for name in ("run", "key")}
    kept = parse_json(read_text(path), path) if path.exists() else {}
    for name in values:
        if isinstance(kept.get(name), str):
            values[name] = kept[name]
    if values != kept:
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(values))
    return values


def read_log(workdir: Path) -> list[JsonObject]:
    """Returns the lines of the log of a run.

    Raises UserError if one of them was not written by a trainer.
    """
    path = workdir / LOG
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        try:
            for name in ("step", "version"):
                json_values.bounded_int(row.get(name), 0, MAX_NUMBER, name)
            for name in ("snapshot", "sampler", "digest"):
                json_values.bounded_text(row.get(name), MAX_TEXT, name)
            if not is_request_id(row.get("request")):
                raise ValueError(f"request is {shown(row.get('request'))}")
        except ValueError as error:
            raise UserError(
                f"{path} line {number} is damaged ({error}): restore or remove it"
            ) from None
    return rows


def remove_kept(path: Path) -> None:
    """Removes a file of the folder of results, or moves aside whatever is in its place."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        path.rename(path.with_name(f"{path.name}.bad-{uuid.uuid4().hex[:8]}"))


def result_file(workdir: Path, request: str) -> Path:
    """Returns the file in a workdir that keeps the result of a request."""
    return workdir / ROLLOUTS / request


def request_file(workdir: Path, request: str) -> Path:
    """Returns the file in a workdir that keeps a request with a result."""
    return workdir / ROLLOUTS / f"{request}.json"


def read_run(data: bytes, address: str) -> tuple[str, str]:
    """Returns the id of the run in the content of run.json, and its settings as JSON.

    Raises UserError if the file is damaged.
    """
    try:
        values = json_values.as_object(json_values.parse(data.decode(), allows_nan=True))
        return json_values.as_text(values["run"]), json.dumps(values["config"])
    except (ValueError, KeyError, RecursionError):
        raise UserError(f"{address}/{RUN} is damaged: remove it, start the trainer again") from None
