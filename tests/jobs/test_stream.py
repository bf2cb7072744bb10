"""The trainer's side and a sampler in one process: what the stream takes, refuses and repairs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
import runs
import tiny

from jzero import config, sample, setup
from jzero.config import Config
from jzero.hosts.interrupt import Interrupted
from jzero.jobs.leases import Leases
from jzero.jobs.requests import Result
from jzero.jobs.store import FolderStore
from jzero.jobs.stream import STREAMS, ArrivalStream, FixedStream, JobSettings, JobStream, run_id
from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler
from jzero.sharding.mesh import param_shardings, train_mesh
from jzero.types import Rollout
from jzero.workers.pool import Pool

STEPS = 6


def settings_of(folder: Path, schedule: str = "fixed", max_staleness: int = 1) -> Config:
    """Returns settings of a run with 2 requests a step."""
    settings = tiny.tiny_settings(
        rollout={"max_turns": 1, "max_new_tokens": 8},
        mesh={"data": 1},
        eval={"every": 0, "problems": 0},
    )
    arguments = f"store='{folder / 'store'}',schedule='{schedule}',max_staleness={max_staleness}"
    config.set_part(settings, "rollout.placement", f"jobs({arguments},groups_per_request=2)")
    config.validate(settings, is_training=True)
    return settings


@dataclass
class Jobs:
    """A trainer's stream, and a sampler that works whenever the trainer waits."""

    settings: Config
    workdir: Path
    decoder: Sampler
    params: list[qwen.Params]  # of each version
    publish: Callable[[qwen.Params], qwen.Params]  # to the decoder's layout
    worker: sample.Worker | None = None

    @property
    def store(self) -> FolderStore:
        assert isinstance(self.settings.rollout.placement, config.Jobs)
        return FolderStore(Path(self.settings.rollout.placement.store))

    def stream(self) -> JobStream:
        """Returns a new stream of the run, as after a start of the trainer."""
        self.workdir.mkdir(exist_ok=True)
        rollout = self.settings.rollout
        assert isinstance(rollout.placement, config.Jobs)
        values = JobSettings(config.to_json(self.settings), self.workdir, "float32", STEPS, None)
        problems = setup.training_problems(self.settings)
        kind = STREAMS[rollout.placement.schedule]
        return kind(self.decoder, problems, rollout, rollout.placement, values)

    def work(self) -> None:
        """Answers one request, as a sampler does."""
        if self.worker is None:
            self.worker = self.new_worker("s")
        request = self.worker.take()
        if request is not None:
            self.worker.work_on(request)

    def new_worker(self, name: str) -> sample.Worker:
        reader = sample.Reader(self.store, run_id(self.workdir))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params[0])
        weights = sample.Weights(reader, self.publish, shardings, None, 0.0)
        leases = Leases(self.store, name, 5.0)
        return sample.Worker(self.store, leases, self.decoder, weights, name, lambda: None)

    def collect(
        self, stream: JobStream, version: int, work: Callable[[], None] | None = None
    ) -> list[Rollout]:
        rollouts, _ = stream.collect(self.params[version], version, work or self.work)
        return rollouts


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Sampler, Callable, list[qwen.Params]]]:
    """A decoder with its publisher, and the weights of some versions."""
    settings = tiny.tiny_settings(rollout={"max_turns": 1, "max_new_tokens": 8})
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    base = read_base_model(settings.model)
    places = param_shardings(base.model, mesh)
    # Not `init_params`, which takes half a minute to compile.
    params = []
    for number in range(STEPS):
        params.append(
            jax.device_put(reference.random_params(base.model, 0.1 + number / 50), places)
        )
    with Pool(1) as pool:
        decoder, publish = tiny.sampler_and_publish(settings, base, mesh, pool)
        yield decoder, publish, params


@pytest.fixture
def make_jobs(parts, tmp_path: Path, quick_compilation: None) -> Callable[..., Jobs]:
    decoder, publish, params = parts

    def make(schedule: str = "fixed", max_staleness: int = 1) -> Jobs:
        settings = settings_of(tmp_path, schedule, max_staleness)
        return Jobs(settings, tmp_path / "run", decoder, params, publish)

    return make


def bits(rollouts: list[Rollout]) -> list[bytes]:
    return [values.tobytes() for r in rollouts for values in r.tokens.to_dict().values()]


def versions_of(rollouts: list[Rollout]) -> set[int]:
    return {int(v) for r in rollouts for v in r.tokens.versions[r.tokens.sampled]}


def test_a_step_has_its_own_problems_and_the_version_of_the_schedule(make_jobs) -> None:
    jobs = make_jobs(max_staleness=1)
    stream = jobs.stream()
    assert isinstance(stream, FixedStream)
    for version in range(4):
        rollouts = jobs.collect(stream, version)
        problems = setup.training_problems(jobs.settings).draw(version + 1)
        assert [r.problem.id for r in rollouts[::4]] == [p.id for p in problems]
        assert versions_of(rollouts) == {max(0, version - 1)}
        values = stream.metrics(rollouts, version, stream_counters())
        assert values["async/staleness"] == (version > 0)
    log = runs.read_jsonl(jobs.workdir / "jobs.jsonl")
    assert [row["step"] for row in log] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert not jobs.store.names("results")


def stream_counters():
    from jzero.decoder.sequence import DecodeCounters

    return DecodeCounters()


def test_garbage_is_refused_and_its_request_given_again(make_jobs) -> None:
    jobs = make_jobs(max_staleness=0)
    expected = bits(jobs.collect(jobs.stream(), 0))
    jobs = replace(jobs, workdir=jobs.workdir.with_name("second"), worker=None)
    for path in jobs.store.directory.iterdir():
        if path.name == "run.json":
            path.unlink()
    spoiled: list[str] = []

    def spoil_first() -> None:
        jobs.work()
        for name in jobs.store.names("results"):
            if spoiled:
                return
            result = Result.parse(jobs.store.read(f"results/{name}"))
            first = result.rollouts[0]
            tokens = first.tokens.replaced(logps=first.tokens.logps - np.inf)
            bad = replace(result, sampler="liar", rollouts=[replace(first, tokens=tokens)] * 8)
            jobs.store.delete(f"results/{name}")
            jobs.store.write(f"results/{bad.name}", bad.to_bytes())
            spoiled.append(bad.name)

    stream = jobs.stream()
    rollouts = jobs.collect(stream, 0, spoil_first)
    assert spoiled
    assert bits(rollouts) == expected
    assert stream.metrics(rollouts, 0, stream_counters())["jobs/refused_results"] == 1
    assert jobs.store.names("refused") == ["liar"]


def test_a_broken_snapshot_is_written_again(make_jobs) -> None:
    jobs = make_jobs(max_staleness=0)
    stream = jobs.stream()
    broken: list[str] = []

    def break_first() -> None:
        if not broken:
            file = next(n for n in jobs.store.names("snapshots") if n.startswith("00000000-0003"))
            jobs.store.write(f"snapshots/{file}", b"torn")
            broken.append(file)
        jobs.work()

    rollouts = jobs.collect(stream, 0, break_first)
    assert broken and versions_of(rollouts) == {0}
    assert not jobs.store.names("broken")


def test_a_resumed_trainer_takes_the_results_that_it_had(make_jobs) -> None:
    jobs = make_jobs(max_staleness=1)
    stream = jobs.stream()
    jobs.collect(stream, 0)
    state = stream.state()
    expected = bits(jobs.collect(stream, 1))

    def never() -> None:
        raise AssertionError("the results are in the workdir")

    resumed = jobs.stream()
    resumed.restore(state)
    assert bits(jobs.collect(resumed, 1, never)) == expected
    # Also without the results, and with a damaged snapshot of the version before.
    for path in (jobs.workdir / "rollouts").iterdir():
        path.unlink()
    resumed = jobs.stream()
    resumed.restore(state)
    assert bits(jobs.collect(resumed, 1)) == expected


def test_a_signal_ends_the_wait(make_jobs) -> None:
    jobs = make_jobs()

    def stop() -> None:
        raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        jobs.collect(jobs.stream(), 0, stop)


def test_arrival_takes_what_is_not_too_old(make_jobs) -> None:
    jobs = make_jobs("arrival", max_staleness=1)
    stream = jobs.stream()
    assert isinstance(stream, ArrivalStream)
    seen: set[str] = set()
    for version in range(STEPS):
        rollouts = jobs.collect(stream, version)
        assert len(rollouts) == 16
        assert versions_of(rollouts) <= {version - 1, version}
        # The queue is bounded.
        assert len(stream.open) <= 2 * stream.per_step
    for row in runs.read_jsonl(jobs.workdir / "jobs.jsonl"):
        assert row["request"] not in seen
        seen.add(row["request"])
    assert len(seen) == 2 * STEPS
    assert (jobs.store.directory / "end").exists()


def test_arrival_drops_answers_that_became_too_old(make_jobs) -> None:
    jobs = make_jobs("arrival", max_staleness=1)
    stream = jobs.stream()

    def work_ahead() -> None:
        for _ in range(4):
            jobs.work()

    jobs.collect(stream, 0, work_ahead)
    # Two answers of version 0 are left, which step 3 may not use any more.
    assert isinstance(stream, ArrivalStream)
    stream._poll()
    assert {answer.result.version for answer in stream.ready.values()} == {0}
    left = set(stream.ready)
    stream.publish_requests(1)
    assert set(stream.ready) == left
    stream.identities[2] = "other"
    stream.publish_requests(2)
    assert not stream.ready
    assert left <= set(jobs.store.names("requests"))


def test_arrival_resumes_with_its_open_requests(make_jobs) -> None:
    jobs = make_jobs("arrival", max_staleness=1)
    stream = jobs.stream()
    jobs.collect(stream, 0)
    state = stream.state()
    resumed = jobs.stream()
    resumed.restore(state)
    assert isinstance(resumed, ArrivalStream) and isinstance(stream, ArrivalStream)
    assert resumed.open == stream.open
    assert json.loads(resumed.state()) == json.loads(state)
    rollouts = jobs.collect(resumed, 1)
    assert len(rollouts) == 16
