"""A trainer's stream with an honest sampler, beside liars, lost answers and other trainers."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from job_streams import SINGLE_TURN, Jobs, Parts, bits, make_parts, settings_of
from lying_samplers import (
    UNDETECTED,
    Lie,
    file_of,
    lies_of_arrays,
    lies_of_bytes,
    lies_of_values,
    values_or_none,
    whole_lies,
)

from jzero.errors import UserError
from jzero.jobs.requests import Request, Result
from jzero.jobs.store import RetryingStore
from jzero.jobs.stream import ROLLOUTS, JobStream

STEPS = 3
LIES_AT_ONCE = 8  # for each open request
LIES_OF_A_KIND = 20


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    yield from make_parts(SINGLE_TURN)


@pytest.fixture
def make_jobs(parts: Parts, tmp_path: Path, quick_compilation: None) -> Callable[..., Jobs]:
    def make(name: str, schedule: str = "fixed", **placement: object) -> Jobs:
        """Returns a run in a folder of its own. All runs of a test have one id."""
        folder = tmp_path / name
        settings = settings_of(
            folder, SINGLE_TURN, schedule=schedule, regrade_share=1.0, **placement
        )
        workdir = folder / "run"
        workdir.mkdir(parents=True)
        (workdir / "jobs.json").write_text('{"run": "r", "key": "k"}')
        return Jobs(settings, workdir, *parts)

    return make


def train(jobs: Jobs, stream: JobStream, work: Callable[[], None] | None = None) -> list[bytes]:
    """Returns the bytes of all rollouts of a run."""
    taken: list[bytes] = []
    for version in range(STEPS):
        taken += bits(jobs.collect(stream, version, work))
    return taken


def kept_results(jobs: Jobs) -> dict[str, Result]:
    """Returns the results that a trainer has kept, by request."""
    files = [path for path in (jobs.workdir / ROLLOUTS).iterdir() if not path.suffix]
    return {path.name: Result.parse(path.read_bytes()) for path in files}


@dataclass(frozen=True)
class HonestRun:
    """What a run without faults has trained on."""

    taken: list[bytes]  # the bytes of all rollouts
    kept: dict[str, Result]  # by request


@pytest.fixture(scope="module")
def honest_runs() -> list[HonestRun]:
    """Keeps the honest run for all tests of the module, once one of them has made it."""
    return []


@pytest.fixture
def quiet(make_jobs: Callable[..., Jobs], honest_runs: list[HonestRun]) -> HonestRun:
    if not honest_runs:
        jobs = make_jobs("quiet")
        honest_runs.append(HonestRun(train(jobs, jobs.stream()), kept_results(jobs)))
    return honest_runs[0]


class Liar:
    """Writes lies about every open request before the honest sampler works on one."""

    def __init__(self, jobs: Jobs, honest: dict[str, Result]) -> None:
        self.jobs = jobs
        self.honest = honest
        self.rng = random.Random(0)
        self.lies: dict[str, list[Lie]] = {}
        self.num_told = 0

    def lies_about(self, request: str) -> list[Lie]:
        """Returns the lies about a request in a random order."""
        honest = self.honest[request]
        older = self.honest[min(self.honest)]
        whole = [
            (name, result)
            for name, result in whole_lies(honest, older).items()
            # About the oldest request, the older result is the honest one.
            if honest is not older or "older" not in name
        ]
        named = [(n, values_or_none(r)) for n, r in self.rng.sample(whole, LIES_OF_A_KIND)]
        arrays = [lie for lie in lies_of_arrays(honest) if not lie[0].endswith(UNDETECTED)]
        named += self.rng.sample(arrays, LIES_OF_A_KIND)
        named += self.rng.sample(list(lies_of_values(honest, 1)), LIES_OF_A_KIND)
        files = [file_of(name, honest, values) for name, values in named]
        files += self.rng.sample(list(lies_of_bytes(honest)), LIES_OF_A_KIND)
        lies = [lie for lie in files if lie is not None]
        self.rng.shuffle(lies)
        return lies

    def __call__(self) -> None:
        # The honest run has no answers to the requests of later steps.
        for request in set(self.jobs.store.names("requests")) & set(self.honest):
            if request not in self.lies:
                self.lies[request] = self.lies_about(request)
            for _ in range(min(LIES_AT_ONCE, len(self.lies[request]))):
                lie = self.lies[request].pop()
                self.jobs.store.write(f"results/{lie.file}", lie.data)
                self.num_told += 1
            # It also takes what belongs to others, and reports what is not broken.
            self.jobs.store.write(f"broken/{self.rng.randrange(4):08d}", b"\x1b[2Jbroken")
        self.jobs.work()


def test_a_run_beside_a_liar_has_the_numbers_of_an_honest_run(
    make_jobs, quiet: HonestRun, tries, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = make_jobs("lied")
    liar = Liar(jobs, quiet.kept)
    stream = jobs.stream()
    assert train(jobs, stream, liar) == quiet.taken
    assert liar.num_told > 100
    for number in range(liar.num_told):
        with tries.attempt("a liar beside a trainer", f"lie {number}"):
            pass  # the run would have ended, or have other numbers
    out = capsys.readouterr().out
    assert "refused a result of" in out and "\x1b" not in out.replace("\x1b[0m", "")
    # No lie is left in the workdir to be taken by the next start of the trainer.
    kept = kept_results(jobs)
    for request, result in quiet.kept.items():
        assert kept[request].digest == result.digest


def test_the_sampler_whose_name_a_liar_used_continues(make_jobs, quiet: HonestRun) -> None:
    jobs = make_jobs("framed", lease_seconds=0.5)
    kept = quiet.kept

    def frame_and_work() -> None:
        if jobs.worker is None:
            jobs.worker = jobs.new_worker("honest-1")
        for request in set(jobs.store.names("requests")) & set(kept):
            bad = replace(kept[request], sampler=jobs.worker.name, seconds=-1.0)
            jobs.store.write(f"results/{bad.name[:-1]}x", bad.to_bytes())
        jobs.worker.check_refusal()
        jobs.work()

    assert train(jobs, jobs.stream(), frame_and_work) == quiet.taken


def test_a_poisoned_file_of_the_workdir_is_asked_for_again(
    make_jobs, quiet: HonestRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever an earlier version of the trainer has kept, nobody has to delete it by hand."""
    jobs = make_jobs("poisoned")
    folder = jobs.workdir / ROLLOUTS
    folder.mkdir()
    for number, (request, honest) in enumerate(sorted(quiet.kept.items())):
        lies = whole_lies(honest, honest)
        path = folder / request
        if number == 0:
            os.mkfifo(path)
        elif number == 1:
            path.mkdir()
        elif number == 2:
            with path.open("wb") as file:
                file.truncate(10 << 30)
        else:
            names = ("rollout 0: score 1e308", "rollout 0: part with a line break", "no rollouts")
            path.write_bytes(lies[names[number % 3]].to_bytes())
    assert train(jobs, jobs.stream()) == quiet.taken
    assert capsys.readouterr().out.count("its request is answered again") == 2 * STEPS


@pytest.mark.parametrize("seed", range(3))
def test_a_store_with_lost_late_and_doubled_answers(make_jobs, quiet: HonestRun, seed: int) -> None:
    jobs = make_jobs("faulty", lease_seconds=1.0)
    stream = jobs.stream()
    faulty = FaultyStore(stream.store.store, random.Random(seed))
    stream.store.store = faulty
    worker = jobs.new_worker("s")
    worker.store = worker.leases.store = RetryingStore(faulty, 60.0)
    worker.weights.reader.store = worker.store
    jobs.worker = worker
    assert train(jobs, stream) == quiet.taken
    assert faulty.num_faults.total() > 20


def test_a_second_trainer_of_a_run_ends_the_first(make_jobs, quiet: HonestRun) -> None:
    first = make_jobs("first")
    stream = first.stream()
    taken = bits(first.collect(stream, 0))
    copy = first.workdir.with_name("copy")
    shutil.copytree(first.workdir, copy)
    second = Jobs(first.settings, copy, first.decoder, first.publish, first.params)
    assert train(second, second.stream()) == quiet.taken
    with pytest.raises(UserError, match="another trainer of this run has started"):
        first.collect(stream, 1)
    assert taken == quiet.taken[: len(taken)]


def test_a_trainer_of_another_run_is_refused(make_jobs, tmp_path: Path) -> None:
    first = make_jobs("first")
    train(first, first.stream())
    workdir = tmp_path / "other"
    other = Jobs(first.settings, workdir, first.decoder, first.publish, first.params)
    with pytest.raises(UserError, match="has the files of another run"):
        other.collect(other.stream(), 0)


def test_a_sampler_that_was_suspended_changes_nothing_when_it_wakes(
    make_jobs, quiet: HonestRun
) -> None:
    jobs = make_jobs("suspended")
    suspended = jobs.new_worker("suspended")
    held: list[Request] = []
    holders: set[str | None] = set()

    def work() -> None:
        if not held:
            request = suspended.take()
            assert request is not None
            held.append(request)
            # Its lease expires while it is suspended.
            os.utime(jobs.store.directory / "leases" / request.id, (0, 0))
        jobs.work()
        holder = suspended.leases.holder_of(held[0].id)
        if holder == "suspended":
            return
        # It wakes: its lease belongs to another sampler now, or to nobody.
        holders.add(holder)
        suspended.leases.seconds = 0.0
        suspended.leases.renew(held[0].id)
        assert suspended.leases.holder_of(held[0].id) == holder

    stream = jobs.stream()
    assert train(jobs, stream, work) == quiet.taken
    assert holders
    suspended.work_on(held[0])
    assert not jobs.store.names("results") and not jobs.store.names("leases")
