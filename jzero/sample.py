"""Samples for a run on another machine: a stateless sampler that comes and goes.

    python -m jzero.sample --join STORE [--idle-minutes 30] [--config.mesh.tensor=N ...]

STORE is `rollout.placement.store` of the run: a directory that both machines see, or a bucket. The
sampler reads the settings of the run there, takes requests, decodes them with the weights that each
names, grades the responses, and writes the rollouts to the store. It ends when the run has all of
its rollouts. Any number of samplers may join, leave and crash at any time: after lease_seconds
without a sign of life their requests go to others. On SIGTERM, or the notice of a spot machine
(train.preemption_notice), a sampler hands its request back at once and ends with status 0.

The settings are those of the run. A machine may change those that say where things are: the mesh,
model.path, task.data, task.grade_workers, and the limits of memory.
"""

import argparse
import hashlib
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax

from jzero import cli, command_flags, config, terminal
from jzero.blueprint import with_needed_slots
from jzero.config import Config, Jobs, Together
from jzero.cores import num_cores
from jzero.decoder.driver import Phase
from jzero.decoder.sequence import Groups, groups_to_decode
from jzero.errors import UserError, shown
from jzero.files import JsonObject
from jzero.hosts import interrupt, peers
from jzero.hosts.interrupt import StopSignal
from jzero.jobs.checks import Limits, WeightsId
from jzero.jobs.leases import FOLDER as LEASES
from jzero.jobs.leases import Leases
from jzero.jobs.progress import PARTIALS, Progress
from jzero.jobs.regrading import Regrader
from jzero.jobs.requests import (
    ANY_VERSION,
    REQUESTS,
    RESULTS,
    Request,
    Result,
    is_name,
    request_of,
)
from jzero.jobs.sealed import BadResultError
from jzero.jobs.snapshots import Reader, SnapshotError
from jzero.jobs.store import (
    BadFileError,
    RetryingStore,
    Store,
    open_store,
    read_if_exists,
    read_note,
)
from jzero.jobs.stream import BROKEN, END, REFUSED, RUN, STORE_SECONDS, read_run
from jzero.jobs.weights import Weights
from jzero.json_values import as_object, as_text
from jzero.json_values import parse as parse_json
from jzero.model import qwen
from jzero.model.base_model import BaseModel
from jzero.rollout.sampler import GradedBatch, Sampler, to_rollout
from jzero.run.environment import versions
from jzero.service.decoders import open_decoder
from jzero.sharding.mesh import adapter_shardings, param_shardings
from jzero.training.frozen_base import hash_weights
from jzero.types import Rollout
from jzero.workers.pool import Pool

DECODER = "decoder.json"
MAX_REQUEST_BYTES = 1 << 30
# Settings that say where things are on a machine. All others are those of the run.
MAY_DIFFER = (
    "mesh.",
    "memory.",
    "model.path",
    "task.data",
    "task.eval_data",
    "task.grade_workers",
    "train.preemption_notice",
)


# -- the decoder -----------------------------------------------------------------------------------


def build(settings: Config, run: str, store: Store, pool: Pool) -> tuple[Sampler, Weights]:
    """Returns the sampler of a run on this machine, and its weights.

    Raises UserError if the machine cannot sample for the run.
    """
    # The decoder of a run that samples synchronously: separate jobs decode one request at a time.
    rollout = replace(settings.rollout, placement=Together())
    rollout = with_needed_slots(rollout, settings.eval)
    # The trainer may have several slices; a sampler is one process on one of them.
    mesh = replace(settings.mesh, slices=1)
    decoder = open_decoder(
        replace(settings, rollout=rollout, mesh=mesh), pool, caches_prefixes=False
    )
    sampler, publish, base = decoder.sampler, decoder.publish, decoder.base

    reader = Reader(store, run)
    placement = settings.rollout.placement
    # The requests of schedule=fixed name their version; others want the newest one.
    takes_newest = isinstance(placement, Jobs) and placement.schedule == "arrival"
    adapter = settings.model.adapter
    loading_mesh = decoder.blueprint.mesh
    if not adapter.rank:
        shardings = param_shardings(base.model, loading_mesh)
        return sampler, Weights(reader, publish, shardings, None, 0.0, takes_newest)
    check_base(reader, base)
    shardings = adapter_shardings(base.model, adapter, loading_mesh)
    frozen = decoder.load_model()
    return sampler, Weights(reader, publish, shardings, frozen, adapter.scale, takes_newest)


def check_base(reader: Reader, base: BaseModel) -> None:
    """Raises UserError if this machine has other weights under the adapter than the trainer."""
    newest = reader.newest()
    assert newest is not None and base.directory is not None, f"{newest=} {base.directory=}"
    expected = reader.manifest(newest[0]).base
    if hash_weights(base.directory) != expected:
        raise UserError(
            f"{base.directory} holds other weights than the trainer's base (SHA-256 "
            f"{expected[:12]}): set --config.model.path to the same model"
        )


def describe_decoder(sampler: Sampler) -> JsonObject:
    """Returns everything that may change the bits of a rollout besides the request."""
    engine = sampler.engine
    device = engine.mesh.devices.flat[0]
    values: JsonObject = {
        "device": device.device_kind,
        "mesh": dict(engine.mesh.shape),
        "slots": engine.slots_per_shard,
        "pages": engine.pages_per_shard,
        "software": {name: versions()[name] for name in ("jax", "jaxlib", "jzero")},
    }
    if device.platform == "cpu":
        # XLA compiles for the processor at hand, and splits work among its cores.
        cpu_info = Path("/proc/cpuinfo")
        flags = ""
        if cpu_info.exists():
            lines = cpu_info.read_text(encoding="utf-8").splitlines()
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        values["cpu"] = {
            "machine": platform.machine(),
            "cores": num_cores(),
            "flags": hashlib.sha256(flags.encode()).hexdigest()[:12],
        }
    return values


def check_decoder(store: Store, sampler: Sampler) -> None:
    """Raises UserError unless this machine decodes as the first sampler of the run does."""
    values = describe_decoder(sampler)
    # The first sampler of a run decides what the others have to be like.
    if store.create(DECODER, json.dumps(values).encode()):
        return
    try:
        expected = config.flatten(
            as_object(parse_json((read_note(store, DECODER) or b"").decode()))
        )
    except ValueError:
        # No sampler has written it so.
        store.write(DECODER, json.dumps(values).encode())
        return
    actual = config.flatten(values)
    names = sorted(expected.keys() | actual.keys())
    different = [
        f"{name}: {actual.get(name)} instead of {expected.get(name)}"
        for name in names
        if actual.get(name) != expected.get(name)
    ]
    if different:
        raise UserError(
            f"this machine decodes differently from the other samplers ({'; '.join(different)}), "
            "and rollout.placement.schedule=fixed needs the same bits of all: use a machine like "
            "theirs, or start the run with schedule=arrival"
        )


class RequestBatch(GradedBatch):
    """The groups of a request that decode with one version of the weights.

    They decode to their ends, or until there are newer weights.
    """

    is_whole = False

    def __init__(
        self,
        sampler: Sampler,
        progress: Progress,
        tick: Callable[[], None],
        has_newer: Callable[[], bool],
        ends_turns: bool,
    ) -> None:
        """See `decode`."""
        waiting = set(progress.in_grading)
        to_decode = [[s for s in group if s not in waiting] for group in progress.groups]
        super().__init__(
            sampler,
            groups_to_decode(to_decode),
            progress.request.problems.__getitem__,
            check_stop=tick,
            in_grading=progress.in_grading,
        )
        self.has_newer = has_newer
        self.ends_turns = ends_turns
        self.num_calls = 0

    def more(self) -> Groups | None:
        """Returns no groups; None if newer weights end the run."""
        # The decoder asks for more groups before every call: the time to renew the lease.
        self.check_stop()
        self.num_calls += 1
        return None if self.is_over() and not self.ends_turns else []

    def is_over(self) -> bool:
        """Whether newer weights take the place of these."""
        # Every version decodes at least once, however fast versions follow each other.
        return self.num_calls > 1 and self.has_newer()

    def drains(self) -> bool:
        """See `Source.drains`."""
        return self.ends_turns and self.is_over()


def decode(
    sampler: Sampler,
    params: qwen.Params,
    progress: Progress,
    tick: Callable[[], None] = interrupt.never_stop,
    has_newer: Callable[[], bool] = lambda: False,
    ends_turns: bool = False,
) -> None:
    """Decodes and grades the sequences of a request, until they are done or there are new weights.

    Args:
        sampler: the decoder.
        params: the last one of `progress.weights`.
        progress: the request with its sequences, which change in place.
        tick: is called before every decode call, and may raise.
        has_newer: whether there are newer weights.
        ends_turns: newer weights wait for the end of the turns that have begun.
    """
    request = progress.request
    # The pool counts over all requests, and a result reports only its own.
    graded_before = dict(sampler.pool.counters)
    batch = RequestBatch(sampler, progress, tick, has_newer, ends_turns)
    phase = Phase(
        params,
        (request.seed, request.step),
        request.group_size,
        request.temperature,
        version=progress.weights[-1][0],
    )
    counters = sampler.decode(phase, batch)
    progress.counters.add(counters)
    for name, number in sampler.pool.counters.items():
        count = number - graded_before[name]
        progress.grading[name] = progress.grading.get(name, 0) + count


def answer(
    sampler: Sampler, params: qwen.Params, request: Request, weights: WeightsId, name: str
) -> Result:
    """Returns the result of a request that one version of the weights samples."""
    progress = Progress.begin(request, sampler.engine.settings.max_new_tokens, weights)
    decode(sampler, params, progress)
    return progress.result(name)


# -- requests --------------------------------------------------------------------------------------


@dataclass
class _Answers:
    """The files of results of an open request, as a sampler sees them."""

    since: float  # time.monotonic() of the first look at one
    names: set[str]  # of all of them
    were_refused: bool = False


@dataclass
class Worker:
    """Takes requests and answers them, until the run ends."""

    store: Store
    leases: Leases
    sampler: Sampler
    weights: Weights
    name: str
    check_stop: Callable[[], None]
    placement: Jobs
    idle_seconds: float = 0.0  # without a request, after which the sampler ends; 0: never
    num_answered: int = 0
    sent: set[str] = field(default_factory=set)  # SHA-256 of the files of results
    answers: dict[str, _Answers] = field(default_factory=dict)  # by open request
    idle_share: float = 0.0  # of the time since the first look for a request

    def run(self) -> None:
        """Answers requests.

        Raises Interrupted on a signal or without work, and UserError if the sampler is refused.
        """
        started = last_work = time.monotonic()
        busy_seconds = 0.0
        while read_if_exists(self.store, END) is None:
            self.check_stop()
            self.check_refusal()
            request = self.take()
            taken = time.monotonic()
            if request is not None and self.work_on(request):
                last_work = time.monotonic()
                busy_seconds += last_work - taken
                self.idle_share = 1 - busy_seconds / (last_work - started)
                continue
            # A cloud machine without work costs as much as one with work.
            if 0 < self.idle_seconds < time.monotonic() - last_work:
                raise interrupt.Interrupted(f"no request for {self.idle_seconds / 60:g} minutes")
            time.sleep(self.store.poll_seconds)

    def check_refusal(self) -> None:
        """Raises UserError if the trainer refused a result of this sampler.

        Every sampler can write any name into its results. If another one has used this name, this
        sampler takes a new one, which the trainer does not know from refused results.
        """
        data = read_note(self.store, f"{REFUSED}/{self.name}")
        if data is None:
            return
        try:
            note = as_object(parse_json(data.decode()))
            file, reason = as_text(note["file"]), as_text(note["reason"])
        except (ValueError, KeyError):
            file, reason = "", ""
        if file in self.sent:
            raise UserError(
                f"the trainer refused a result of this sampler: {shown(reason)}. Check its "
                "hardware and its version of jzero"
            )
        old, prefix = self.name, self.name.rpartition("-")[0] or self.name
        self.name = self.leases.holder = f"{prefix}-{uuid.uuid4().hex[:8]}"
        terminal.say(
            f"the trainer refused a result that another process has written under the name {old}: "
            f"this sampler continues as {self.name}"
        )

    def take(self) -> Request | None:
        """Returns a request with its lease: the first one that nobody works on."""
        # The trainer may be in an update and read results later.
        answered = self.find_answered()
        requests = self.store.names(REQUESTS)
        self.answers = {name: self.answers[name] for name in requests if name in self.answers}
        waiting = [name for name in requests if name not in answered]
        leased = set(self.store.names(LEASES))
        # Requests without a lease first: they cost no look at the clock.
        for name in waiting:
            if name not in leased and (request := self.take_one(name)):
                return request
        held = [name for name in waiting if name in leased]
        if not held:
            return None
        now = self.store.now(self.name)
        for name in held:
            if self.leases.is_expired(name, now) and (request := self.take_one(name, now)):
                return request
        return None

    def find_answered(self) -> set[str]:
        """Returns the requests with results that the trainer has not read yet.

        The trainer closes a request before it removes the result that it accepts. If a result is
        gone and its request is open, or if results come again and again, they are those of a
        faulty sampler, and must not keep this one from its work.
        """
        files: dict[str, set[str]] = {}
        for name in self.store.names(RESULTS):
            files.setdefault(request_of(name), set()).add(name)
        answered: set[str] = set()
        for request, names in files.items():
            known = self.answers.setdefault(request, _Answers(time.monotonic(), names))
            known.were_refused |= not known.names <= names or self.are_rewritten(known, names)
            known.names |= names
            if not known.were_refused:
                answered.add(request)
        return answered

    def are_rewritten(self, known: _Answers, names: set[str]) -> bool:
        """Returns whether a request has had results for the time of a lease, but only new ones."""
        if time.monotonic() - known.since < self.leases.seconds:
            return False
        try:
            newest = max(self.store.modified(f"{RESULTS}/{name}") for name in names)
        except FileNotFoundError:
            return True
        return newest + self.leases.seconds > self.store.now(self.name)

    def take_one(self, name: str, now: float | None = None) -> Request | None:
        """Returns a request if this sampler got its lease."""
        if not self.leases.take(name, now):
            return None
        try:
            data = read_if_exists(self.store, f"{REQUESTS}/{name}", MAX_REQUEST_BYTES)
        except BadFileError:
            data = b""
        if data is not None:
            try:
                request = Request.parse(data)
                if request.id == name:
                    return request
            except ValueError:
                pass
            # The trainer writes its requests again if one is damaged.
            self.store.delete(f"{REQUESTS}/{name}")
        self.leases.give_back(name)
        return None

    def work_on(self, request: Request) -> bool:
        """Answers a request. Returns False, and hands it back, if its weights cannot be read."""
        started = time.monotonic()
        version, progress = request.version, None
        try:
            progress = self.begin(request)
            while not progress.is_done:
                version = progress.weights[-1][0]
                self.decode(progress)
        except SnapshotError as error:
            # The trainer writes it again.
            self.store.write(f"{BROKEN}/{version:08d}", str(error).encode())
            self.leases.give_back(request.id)
            return False
        except BaseException as error:
            # Whatever ends this process, another sampler can start at once.
            try:
                if isinstance(error, interrupt.Interrupted) and progress is not None:
                    self.hand_over(progress)
            finally:
                self.leases.give_back(request.id)
            raise
        # A late answer to a request that another sampler has answered.
        if self.is_open(request):
            self.check_refusal()
            result = progress.result(self.name, time.monotonic() - started)
            data = result.to_bytes()
            self.sent.add(hashlib.sha256(data).hexdigest())
            self.store.write(f"{RESULTS}/{result.name}", data)
        self.num_answered += 1
        return True

    def begin(self, request: Request) -> Progress:
        """Returns the sequences of a request: those of an earlier sampler, or new ones.

        Raises SnapshotError if there are no weights yet.
        """
        max_new_tokens = self.sampler.engine.settings.max_new_tokens
        if request.version != ANY_VERSION:
            return Progress.begin(request, max_new_tokens, (request.version, request.snapshot))
        newest = self.weights.reader.newest()
        if newest is None:
            raise SnapshotError("there are no weights yet")
        progress = Progress.begin(request, max_new_tokens, newest)
        limits = Limits.of(self.sampler, self.placement)
        try:
            most_bytes = request.file_limits(limits).most_bytes
            data = read_if_exists(self.store, f"{PARTIALS}/{request.id}", most_bytes)
            if data is None:
                return progress
            progress.take_over(
                data, limits, self.weights.reader, newest[0], self.placement.max_staleness
            )
            self.check_grades(progress)
        except (BadFileError, BadResultError) as error:
            terminal.say(f"rollouts that a sampler has handed over: {error}: sampled again")
            progress = Progress.begin(request, max_new_tokens, newest)
        else:
            terminal.say(f"continues {progress.continued_tokens} tokens of another sampler")
        # The weights that sampled last may still have turns to end.
        if self.placement.switch == "tokens" and newest[0] > progress.weights[-1][0]:
            progress.weights.append(newest)
        return progress

    def check_grades(self, progress: Progress) -> None:
        """Grades the turns again that another sampler has handed over.

        The trainer would blame this sampler for them. Raises BadResultError if a grade differs.
        """
        rollouts: list[Rollout] = []
        for sequence in progress.sequences:
            rollout = to_rollout(progress.request.problems[sequence.prompt_id], sequence)
            turns = tuple(turn for turn in rollout.turns if turn.grade is not None)
            if turns:
                rollouts.append(replace(rollout, turns=turns))
        Regrader(self.sampler, 1.0, "").check("", rollouts)

    def decode(self, progress: Progress) -> None:
        """Decodes until the sequences are done, or until they take newer weights."""
        switch = self.placement.switch
        self.weights.load(*progress.weights[-1])
        # The requests of the next step name the version after this one, or a newer one.
        self.weights.prefetch()

        def has_newer() -> bool:
            return switch != "requests" and self.weights.newer() is not None

        # No name refers to the parameters here: they are freed before newer ones are loaded.
        decode(
            self.sampler,
            self.weights.params,
            progress,
            self.tick(progress.request),
            has_newer,
            ends_turns=switch == "turns",
        )
        if progress.is_done:
            return
        newer = self.weights.newer()
        assert newer is not None, "only newer weights end decoding early"
        used = progress.used_weights
        progress.weights.append(newer)
        # The trainer would refuse the tokens of weights that are too old.
        if used and newer[0] - used[0][0] > self.placement.max_staleness:
            progress.restart(self.sampler.engine.settings.max_new_tokens)

    def hand_over(self, progress: Progress) -> None:
        """Writes the sequences of a request for the sampler that takes it next."""
        request = progress.request
        # With schedule=fixed, no bit of a rollout may depend on how many samplers made it.
        if request.version != ANY_VERSION:
            return
        data = progress.to_bytes()
        if data is not None and self.is_open(request):
            self.store.write(f"{PARTIALS}/{request.id}", data)

    def is_open(self, request: Request) -> bool:
        """Whether the trainer still wants a request to be answered."""
        try:
            data = read_if_exists(self.store, f"{REQUESTS}/{request.id}", MAX_REQUEST_BYTES)
        except BadFileError:
            return False
        return data is not None

    def tick(self, request: Request) -> Callable[[], None]:
        """Returns a function that renews the lease of a request, and raises Interrupted."""

        def renew() -> None:
            self.check_stop()
            self.leases.renew(request.id)

        return renew


# -- the command -----------------------------------------------------------------------------------


def read_settings(
    store: Store,
    flags: list[str],
    check_stop: Callable[[], None],
) -> tuple[str, Config]:
    """Returns the id and the settings of the run, with the changes of this machine.

    Waits until the trainer has started. Raises UserError for a change of the rollouts.
    """
    data = read_if_exists(store, RUN)
    if data is None:
        terminal.say(f"{store.address}: waiting for the trainer")
    while data is None:
        check_stop()
        time.sleep(store.poll_seconds)
        data = read_if_exists(store, RUN)
    run, config_json = read_run(data, store.address)
    return run, local_settings(config_json, flags, store.address)


def local_settings(config_json: str, flags: list[str], source: str) -> Config:
    """Returns the settings of a run with the changes in `flags`.

    Raises UserError for a change that does not belong to a machine.
    """
    # Compared after parsing, because two notations of a flag may mean the same.
    settings = config.from_json(config_json, source)
    before = config.flatten(json.loads(config.to_json(settings)))
    changed = cli.parse_settings(settings, flags)
    after = config.flatten(json.loads(config.to_json(changed)))
    for name, value in after.items():
        if value != before.get(name) and not name.startswith(MAY_DIFFER):
            raise UserError(f"{name}={value}: the trainer has {before.get(name)}: remove it")
    config.validate(changed)
    return changed


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of the command, and the flags of settings."""
    parser = command_flags.sample(__doc__)
    return parser.parse_known_args(arguments)


def main() -> None:
    """Runs the command."""
    options, flags = parse(cli.start_jax(sys.argv[1:]))
    with cli.user_errors(), StopSignal(reaction="handing back its request") as stop:
        if peers.has_peers():
            raise UserError("a sampler is one process: start jzero.sample once on every host")
        prefix = options.name or f"{socket.gethostname()}-{os.getpid()}"
        if not is_name(prefix):
            raise UserError(f"--name {prefix}: give a file name")
        # Two samplers with one name would renew each other's leases.
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        if options.programs:
            cli.keep_compiled_programs(Path(options.programs))
        store = RetryingStore(open_store(options.join), STORE_SECONDS, stop.raise_if_stopped_here)
        try:
            sample(store, name, flags, stop, options.idle_minutes)
        except interrupt.Interrupted as reason:
            terminal.say(f"{reason}: {name} ends, and holds no request")


def sample(
    store: Store,
    name: str,
    flags: list[str],
    stop: StopSignal,
    idle_minutes: float = 0.0,
) -> None:
    """Joins the run of a store, and answers requests until it ends."""
    check_stop = stop.raise_if_stopped_here
    run, settings = read_settings(store, flags, check_stop)
    # Before the settings are known, only signals end the sampler.
    stop.watch_notices(settings.train.preemption_notice)
    placement = settings.rollout.placement
    if not isinstance(placement, Jobs):
        raise UserError(f"{store.address}: the run has no rollout.placement=jobs")
    # The first snapshot names the base under an adapter.
    while settings.model.adapter.rank and Reader(store, run).newest() is None:
        check_stop()
        time.sleep(store.poll_seconds)
    with Pool(settings.task.grade_workers) as pool:
        sampler, weights = build(settings, run, store, pool)
        if placement.schedule == "fixed":
            check_decoder(store, sampler)
        leases = Leases(store, name, placement.lease_seconds)
        idle_seconds = 60 * idle_minutes
        worker = Worker(store, leases, sampler, weights, name, check_stop, placement, idle_seconds)
        terminal.say(f"{name} samples for {settings.name} on {jax.device_count()} devices")
        worker.run()
    terminal.say(
        f"{name}: the run has all of its rollouts, {worker.num_answered} requests of mine, "
        f"{worker.idle_share:.0%} of the time without a request"
    )


if __name__ == "__main__":
    terminal.run_command(main)
