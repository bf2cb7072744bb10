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
"""

import contextlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jzero import terminal
from jzero.config import Jobs, RolloutConfig
from jzero.decoder.sequence import DecodeCounters
from jzero.errors import UserError
from jzero.files import JsonObject, naming_full_disk, read_jsonl, write_atomic
from jzero.hosts import interrupt
from jzero.jobs.leases import FOLDER as LEASES
from jzero.jobs.leases import Leases, SlowLeases
from jzero.jobs.progress import PARTIALS
from jzero.jobs.requests import (
    ANY_VERSION,
    REQUESTS,
    RESULTS,
    BadResultError,
    Limits,
    Request,
    Result,
    check_name,
    check_result,
    request_of,
)
from jzero.jobs.snapshots import Publisher, Reader, SnapshotError
from jzero.jobs.store import RetryingStore, open_store, read_if_exists
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
TRAINER = "trainer"  # its name in the store
STORE_SECONDS = 600.0  # for which a store may fail before the run stops


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
        self.limits = Limits.of(sampler.engine, placement)
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
            counted = DecodeCounters()
            for name, number in answer.result.counters.items():
                # Samplers wait for grades while the trainer does something else.
                if name in vars(counted) and name != "grading_seconds":
                    setattr(counted, name, number)
            counters.add(counted)
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
        # A resumed run may have more steps than it had when it ended.
        self.store.delete(END)
        # Steps after the checkpoint are done again.
        path = self.settings.workdir / LOG
        self.log = [row for row in read_jsonl(path) if row["step"] <= version]
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
        path = result_file(self.settings.workdir, request.id)
        if path.exists() and (answer := self._read_answer(request, path.read_bytes())):
            self.ready[request.id] = answer
            return
        self.store.write(f"{REQUESTS}/{request.id}", request.to_json())

    def _read_answer(self, request: Request, data: bytes) -> Answer | None:
        """Returns the answer in the workdir's file of a result, if it is still of use."""
        try:
            result = Result.parse(data)
            rollouts = check_result(request, result, self.limits)
        except BadResultError:
            return None
        return Answer(request, result, rollouts) if self.accepts(request, result) else None

    def close_request(self, request: str) -> None:
        """Removes the files of a request, so that no sampler takes it."""
        # The request first: without its lease alone, a sampler would begin it again.
        self.store.delete(f"{REQUESTS}/{request}")
        self.store.delete(f"{LEASES}/{request}")
        self.store.delete(f"{PARTIALS}/{request}")

    def _remove_strangers(self) -> None:
        """Removes requests from before a kill that the run does not make again."""
        # A sampler may hand over a request at the moment in which it is closed.
        for request in {*self.store.names(REQUESTS), *self.store.names(PARTIALS)}:
            if request not in self.open:
                self.close_request(request)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        last_news = time.monotonic()
        while not is_done():
            # While results arrive, nothing is wrong, and nothing else needs a look.
            if self._poll():
                last_news = time.monotonic()
                continue
            self._repair()
            self._restore_requests()
            self._give_slow_requests_again()
            self.check_stop()
            time.sleep(self.store.poll_seconds)
            # By then the leases of dead samplers have expired, and the report counts living ones.
            if time.monotonic() - last_news > self.placement.lease_seconds:
                last_news = time.monotonic()
                self._report_wait()

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
                f"{sampler} has worked on request {request} for {seconds:.0f} seconds: another "
                "sampler may take it as well"
            )
            # Its sampler does not take a lease again that it has lost.
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
        for name in names:
            request = self.open.get(request_of(name))
            data = read_if_exists(self.store, f"{RESULTS}/{name}")
            # Late and second answers of requests that are closed are only removed.
            if request is not None and data is not None:
                self._receive(request, name, data)
            # After the result is on disk: a kill in between only reads it twice.
            self.store.delete(f"{RESULTS}/{name}")
        return bool(names)

    def _receive(self, request: Request, name: str, data: bytes) -> None:
        """Takes a result, or refuses it and gives its request to another sampler."""
        sampler = ""
        try:
            result = Result.parse(data)
            sampler = result.sampler
            rollouts = check_result(request, result, self.limits)
            check_name(result, name)
        except BadResultError as error:
            self._refuse(request, sampler, str(error))
            return
        # An expired lease may have had two samplers.
        if request.id in self.ready:
            self._compare(self.ready[request.id].result, result)
            return
        if not self.accepts(request, result):
            # The lease ends, and a sampler takes the request with newer weights.
            self.store.delete(f"{LEASES}/{request.id}")
            return
        path = result_file(self.settings.workdir, request.id)
        # On disk before the request is closed, so that a kill in between loses nothing.
        path.parent.mkdir(exist_ok=True)
        write_atomic(request_file(self.settings.workdir, request.id), request.to_json())
        write_atomic(path, data)
        self.ready[request.id] = Answer(request, result, rollouts)
        self.slow_leases.count_answer(result.seconds)
        self.close_request(request.id)

    def _refuse(self, request: Request, sampler: str, reason: str) -> None:
        self.num_refused += 1
        terminal.say(f"refused a result of {sampler or 'a sampler'}: {reason}")
        # Another sampler can take the request at once.
        self.store.delete(f"{LEASES}/{request.id}")
        if is_name(sampler):
            # The sampler reads this file and ends.
            self.store.write(f"{REFUSED}/{sampler}", reason.encode())

    def _compare(self, first: Result, second: Result) -> None:
        """Reports two different answers to one request, which a sampler's fault must have made."""
        are_comparable = first.is_repeatable and second.is_repeatable
        if are_comparable and first.digest != second.digest and first.version == second.version:
            terminal.say(
                f"{first.sampler} and {second.sampler} gave different answers to request "
                f"{first.request}: python -m jzero.replay shows which one is wrong"
            )

    def _repair(self) -> None:
        """Writes snapshots again that samplers could not read."""
        assert self.publisher is not None
        for name in self.store.names(BROKEN):
            reason = read_if_exists(self.store, f"{BROKEN}/{name}") or b""
            if name.isdigit() and int(name) in self.identities:
                terminal.say(f"snapshot {name}: {reason.decode(errors='replace')}: written again")
                if not self.publisher.repair(int(name)):
                    raise UserError(
                        f"{self.store.address} has lost the weights of version {int(name)}, which "
                        "the next steps need: bring its files back, or start in another --workdir"
                    )
            self.store.delete(f"{BROKEN}/{name}")

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
                result_file(self.settings.workdir, request.id).unlink(missing_ok=True)
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
    path = workdir / RUN_FILE
    if not path.exists():
        # Random, because two runs may have the same settings.
        write_atomic(path, json.dumps({"run": uuid.uuid4().hex}))
    return str(json.loads(path.read_text(encoding="utf-8"))["run"])


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
        values = json.loads(data)
        return str(values["run"]), json.dumps(values["config"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{address}/{RUN} is damaged: remove it, start the trainer again") from None


def is_name(text: object) -> bool:
    """Returns whether a text can be the name of a sampler, which is a file name."""
    return isinstance(text, str) and 0 < len(text) <= 200 and "/" not in text and text[0] != "."
