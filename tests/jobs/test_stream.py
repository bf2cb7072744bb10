"""The trainer's side and a sampler in one process: what the stream takes, refuses and repairs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
from job_streams import (
    SINGLE_TURN,
    STEPS,
    Jobs,
    Parts,
    bits,
    make_parts,
    settings_of,
    versions_of,
)

from jzero import setup
from jzero.hosts.interrupt import Interrupted
from jzero.jobs import leases
from jzero.jobs.requests import Request, Result
from jzero.jobs.stream import ArrivalStream, FixedStream


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    yield from make_parts(SINGLE_TURN)


@pytest.fixture
def make_jobs(parts: Parts, tmp_path: Path, quick_compilation: None) -> Callable[..., Jobs]:
    def make(schedule: str = "fixed", max_staleness: int = 1, **placement: object) -> Jobs:
        settings = settings_of(
            tmp_path, SINGLE_TURN, schedule=schedule, max_staleness=max_staleness, **placement
        )
        return Jobs(settings, tmp_path / "run", *parts)

    return make


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


def test_a_slow_sampler_does_not_hold_a_step(
    make_jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It renews its lease for ever; another sampler answers, and its own answer is dropped."""
    # A few tenths of a second, without a lease that expires.
    monkeypatch.setattr(leases, "SLOW_LEASES", 0.005)
    monkeypatch.setattr(leases, "SLOW_FACTOR", 0.0)
    monkeypatch.setattr(leases, "RENEWALS", 1000)
    jobs = make_jobs(max_staleness=0, lease_seconds=60.0)
    stream = jobs.stream()
    slow = jobs.new_worker("slow")
    held: list[Request] = []

    def work() -> None:
        if not held:
            request = slow.take()
            assert request is not None
            held.append(request)
        slow.leases.renew(held[0].id)
        jobs.work()

    rollouts = jobs.collect(stream, 0, work)
    assert "slow has worked on request" in capsys.readouterr().out
    assert stream.metrics(rollouts, 0, stream_counters())["jobs/given_again"] == 1
    log = runs.read_jsonl(jobs.workdir / "jobs.jsonl")
    assert [row["sampler"] for row in log] == ["s", "s"]
    slow.work_on(held[0])
    assert not jobs.store.names("results")


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


def test_what_a_sampler_hands_over_too_late_is_removed(make_jobs) -> None:
    jobs = make_jobs("arrival")
    stream = jobs.stream()
    jobs.collect(stream, 0)
    jobs.store.write("partials/closed", b"tokens")
    jobs.collect(stream, 1)
    assert not jobs.store.names("partials")


def test_arrival_accepts_by_the_oldest_token(make_jobs) -> None:
    jobs = make_jobs("arrival", max_staleness=1, switch="tokens")
    stream = jobs.stream()
    jobs.collect(stream, 0)
    jobs.collect(stream, 1)
    jobs.collect(stream, 2)
    request = next(iter(stream.open.values()))
    one, two = ((version, stream.identities[version]) for version in (1, 2))

    def accepts(*weights: tuple[int, str]) -> bool:
        first, *later = weights
        result = Result(request.id, *first, "s", [], later_weights=tuple(later))
        return stream.accepts(request, result)

    assert accepts(one) and accepts(two) and accepts(one, two)
    assert not accepts((0, "gone"), one, two)
    # Weights from before a kill of the trainer, and of the future.
    assert not accepts(one, (2, "other"))
    assert not accepts(two, (3, "x"))


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
