"""Requests in progress: weights are switched between tokens, and samplers hand sequences over."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import runs
from job_streams import (
    Jobs,
    Parts,
    assert_continued,
    bits,
    make_parts,
    sequences_in,
    settings_of,
    versions_of,
)

from jzero import sample
from jzero.decoder.sequence import Sequence
from jzero.files import JsonObject
from jzero.hosts import preemption
from jzero.hosts.interrupt import Interrupted, StopSignal
from jzero.jobs import prefetch, progress
from jzero.jobs.requests import BadResultError, Limits, Request, Result, seal, unseal
from jzero.jobs.snapshots import Publisher
from jzero.jobs.stream import JobStream, run_id
from jzero.jobs.weights import to_tensors
from jzero.types import Rollout

# Episodes of several turns, each of several decode calls.
TURNS: dict[str, object] = {
    "max_turns": 3,
    "max_new_tokens": 12,
    "decode_steps": 2,
    "kv_dtype": "float32",
}
SECONDS = 30.0  # on a busy machine


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    yield from make_parts(TURNS)


@pytest.fixture
def make_jobs(
    parts: Parts, tmp_path: Path, quick_compilation: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Jobs]:
    monkeypatch.setattr(prefetch, "LOOKS", 0.1)

    def make(switch: str = "requests", schedule: str = "arrival", max_staleness: int = 1) -> Jobs:
        settings = settings_of(
            tmp_path, TURNS, switch=switch, schedule=schedule, max_staleness=max_staleness
        )
        return Jobs(settings, tmp_path / "run", *parts)

    return make


class AtTick:
    """Does something once, when a sampler has checked some times whether it should stop.

    It checks twice before every decode call, and once after every turn.
    """

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.number = number
        self.action = action

    def __call__(self) -> None:
        self.number -= 1
        if self.number == 0:
            self.action()


def stop() -> None:
    raise Interrupted("SIGTERM")


def opened(jobs: Jobs) -> JobStream:
    """Returns a stream that has published version 0 and requests for two steps."""
    stream = jobs.stream()
    with pytest.raises(Interrupted):
        jobs.collect(stream, 0, stop)
    return stream


def publish(jobs: Jobs, version: int) -> str:
    """Publishes a version, as the trainer does in its next step."""
    publisher = Publisher(jobs.store, run_id(jobs.workdir), "", every=1, keep=0, window=9)
    return publisher.publish(version, to_tensors(jobs.params[version], "float32"))


def answer_while_publishing(jobs: Jobs, version: int) -> tuple[Request, Result]:
    """Returns the first request, answered by a sampler that finds a new version in the middle."""

    def publish_and_wait() -> None:
        publish(jobs, version)
        deadline = time.monotonic() + SECONDS
        while worker.weights.newer() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    worker = jobs.new_worker("s", AtTick(7, publish_and_wait))
    request = worker.take()
    assert request is not None
    worker.work_on(request)
    return request, result_of(jobs, request)


def result_of(jobs: Jobs, request: Request) -> Result:
    [name] = [name for name in jobs.store.names("results") if name.startswith(request.id)]
    return Result.parse(jobs.store.read(f"results/{name}"))


def undisturbed(jobs: Jobs, request: Request, version: int) -> Result:
    """Returns what one sampler answers with one version."""
    jobs.decoder.pool.drain()
    params = jobs.publish(jobs.params[version])
    return sample.answer(jobs.decoder, params, request, (version, ""), "u")


def logps(jobs: Jobs, rollout: Rollout) -> np.ndarray:
    """Returns the log-prob of every sampled token under its own version, without any cache."""
    tokens = rollout.tokens
    # One width for all, because every width compiles.
    padded = np.zeros((1, jobs.settings.rollout.longest_episode), np.int32)
    padded[0, : len(tokens)] = tokens.ids
    values = np.zeros(len(tokens), np.float32)
    for version in np.unique(tokens.versions[tokens.sampled]):
        params = jobs.params[version]
        rows, _ = reference.rows_logps(jobs.decoder.engine.model, params, padded, 1.0)
        is_of_version = tokens.versions == version
        values[is_of_version] = np.asarray(rows)[0, : len(tokens)][is_of_version]
    return values


# -- switches of weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["requests", "turns", "tokens"])
def test_a_sampler_takes_newer_weights_as_the_setting_says(make_jobs, switch: str) -> None:
    jobs = make_jobs(switch)
    stream = opened(jobs)
    request, result = answer_while_publishing(jobs, 1)

    mixed = [rollout for rollout in result.rollouts if len(versions_of([rollout])) == 2]
    assert bool(mixed) == (switch != "requests")
    for rollout in result.rollouts:
        tokens = rollout.tokens
        assert (np.diff(tokens.versions[tokens.sampled]) >= 0).all()
        np.testing.assert_allclose(tokens.logps, logps(jobs, rollout), atol=1e-4)
        for turn in rollout.turns:
            of_turn = tokens.versions[turn.start : turn.end]
            assert switch == "tokens" or len(set(of_turn.tolist())) == 1
    if switch == "tokens":
        of_turns = [r.tokens.versions[t.start : t.end] for r in mixed for t in r.turns]
        assert any(len(set(versions.tolist())) == 2 for versions in of_turns)

    # The trainer takes it, and logs all weights.
    rollouts = jobs.collect(stream, 1)
    assert bits(result.rollouts)[0] in bits(rollouts)
    [row] = [r for r in runs.read_jsonl(jobs.workdir / "jobs.jsonl") if r["request"] == request.id]
    assert row["version"] == 0
    versions = [version for version, _ in row["later_weights"]]
    assert versions == ([] if switch == "requests" else [1])
    assert all(stream.identities[v] == identity for v, identity in row["later_weights"])


def test_a_request_that_the_trainer_would_refuse_begins_again(make_jobs) -> None:
    jobs = make_jobs("tokens", max_staleness=1)
    opened(jobs)
    request, result = answer_while_publishing(jobs, 2)
    assert versions_of(result.rollouts) == {2}
    assert bits(result.rollouts) == bits(undisturbed(jobs, request, 2).rollouts)


def test_a_snapshot_from_before_a_kill_of_the_trainer_is_not_taken(make_jobs) -> None:
    """Version 1 is in the store, but the resumed trainer has not come to it yet."""
    jobs = make_jobs("tokens")
    opened(jobs)
    publish(jobs, 1)
    publish(jobs, 0)
    worker = jobs.new_worker("s", lambda: time.sleep(0.02))
    request = worker.take()
    worker.work_on(request)
    assert versions_of(result_of(jobs, request).rollouts) == {0}


# -- sequences that are handed over ----------------------------------------------------------------


def hand_over(jobs: Jobs, ticks: int, name: str = "first") -> Request:
    """Returns a request whose sampler was stopped at a check."""
    worker = jobs.new_worker(name, AtTick(ticks, stop))
    request = worker.take()
    assert request is not None
    with pytest.raises(Interrupted):
        worker.work_on(request)
    assert not jobs.store.names("leases")
    return request


def answer_of_the_next(jobs: Jobs, newest: int) -> tuple[Request, Result]:
    """Returns a request that one sampler began with version 0 and the next one answered.

    newest: the version that the trainer published in between.
    """
    request = hand_over(jobs, 9)
    publish(jobs, newest)
    worker = jobs.new_worker("second")
    worker.work_on(worker.take())
    return request, result_of(jobs, request)


def test_the_next_samplers_continue_what_was_begun(make_jobs) -> None:
    jobs = make_jobs()
    stream = opened(jobs)
    handed_over: list[Sequence] = []
    for number in range(2):
        request = hand_over(jobs, 9, f"sampler-{number}")
        handed_over += sequences_in(jobs.store.read(f"partials/{request.id}"))
    last = handed_over[-1:] and sequences_in(jobs.store.read(f"partials/{request.id}"))
    assert any(sequence.turns for sequence in last)
    assert any(sequence.is_in_turn for sequence in last)

    worker = jobs.new_worker("last")
    assert worker.work_on(worker.take())

    result = result_of(jobs, request)
    assert len(result.rollouts) == 8
    assert_continued(result, handed_over)
    num_continued = sum(int(sequence.tokens.sampled.sum()) for sequence in last)
    assert result.continued_tokens == num_continued > 0
    # The noise belongs to the request and the position, whoever samples.
    expected = undisturbed(jobs, request, 0)
    for ours, theirs in zip(result.rollouts, expected.rollouts, strict=True):
        assert ours.tokens.ids.tolist() == theirs.tokens.ids.tolist()
        np.testing.assert_allclose(ours.tokens.logps, theirs.tokens.logps, atol=1e-4)
        assert [t.text for t in ours.turns] == [t.text for t in theirs.turns]
        assert [t.grade.score for t in ours.turns] == [t.grade.score for t in theirs.turns]
    decoded = result.counters["decoded_tokens"] - result.counters["wasted_tokens"]
    whole = expected.counters["decoded_tokens"] - expected.counters["wasted_tokens"]
    assert decoded < whole - num_continued / 2

    rollouts = jobs.collect(stream, 0)
    assert not jobs.store.names("partials")
    [row, _] = runs.read_jsonl(jobs.workdir / "jobs.jsonl")
    assert row["continued_tokens"] == num_continued
    values = stream.metrics(rollouts, 0, progress.DecodeCounters())
    assert values["jobs/continued_tokens"] == num_continued


def test_a_forged_grade_that_is_handed_over_is_found(
    make_jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer would blame the sampler that continues the request."""
    jobs = make_jobs()
    opened(jobs)
    graded: list[JsonObject] = []
    # A turn has a grade once the next sampler has continued it.
    for number in range(4):
        request = hand_over(jobs, 9, f"liar-{number}")
        name = f"partials/{request.id}"
        values = unseal(jobs.store.read(name))
        graded = [s for s in values["sequences"] if s["turns"] and s["turns"][0]["grade"]]
        if graded:
            break
    graded[0]["turns"][0]["grade"]["score"] += 0.5
    jobs.store.write(name, seal(values))
    worker = jobs.new_worker("honest")
    assert worker.work_on(worker.take())
    assert "graded again, the score was" in capsys.readouterr().out
    assert result_of(jobs, request).continued_tokens == 0


def test_a_turn_without_a_grade_is_graded_by_the_next_sampler(make_jobs) -> None:
    jobs = make_jobs()
    opened(jobs)
    ungraded: list[Sequence] = []
    # At the end of a turn its grade is missing, unless the grader is very fast.
    for ticks in range(7, 60):
        request = hand_over(jobs, ticks)
        data = jobs.store.read(f"partials/{request.id}")
        ungraded = [s for s in sequences_in(data) if s.turns and s.turns[-1].grade is None]
        if ungraded:
            break
        jobs.store.delete(f"partials/{request.id}")
    assert ungraded
    worker = jobs.new_worker("second")
    worker.work_on(worker.take())
    result = result_of(jobs, request)
    expected = undisturbed(jobs, request, 0)
    assert [[t.grade.score for t in r.turns] for r in result.rollouts] == [
        [t.grade.score for t in r.turns] for r in expected.rollouts
    ]


def test_tokens_of_a_handed_over_request_continue_under_the_newest_weights(make_jobs) -> None:
    jobs = make_jobs("tokens")
    opened(jobs)
    _, result = answer_of_the_next(jobs, newest=1)
    assert [version for version, _ in result.weights] == [0, 1]
    for rollout in result.rollouts:
        np.testing.assert_allclose(rollout.tokens.logps, logps(jobs, rollout), atol=1e-4)


def test_with_requests_the_weights_of_a_handed_over_request_stay(make_jobs) -> None:
    jobs = make_jobs("requests")
    opened(jobs)
    _, result = answer_of_the_next(jobs, newest=1)
    assert versions_of(result.rollouts) == {0}
    assert result.continued_tokens


def test_fixed_hands_over_nothing(make_jobs) -> None:
    """Its bits must not depend on how many samplers made a rollout."""
    jobs = make_jobs(schedule="fixed")
    opened(jobs)
    hand_over(jobs, 9)
    assert not jobs.store.names("partials")


def change_values(data: bytes, **changes: object) -> bytes:
    return seal(unseal(data) | changes)


def change_sequence(data: bytes, change: Callable[[Sequence], None]) -> bytes:
    """Changes the longest sequence that has not finished."""
    sequences = sequences_in(data)
    change(next(sequence for sequence in sequences if sequence.is_in_turn))
    return change_values(data, sequences=sequences)


def change_prompt(sequence: Sequence) -> None:
    ids = sequence.tokens.ids.copy()
    ids[0] += 1
    sequence.tokens = sequence.tokens.replaced(ids=ids)


def change_version(sequence: Sequence) -> None:
    versions = sequence.tokens.versions.copy()
    versions[sequence.tokens.sampled] += 1
    sequence.tokens = sequence.tokens.replaced(versions=versions)


def setting(**values: object) -> Callable[[Sequence], None]:
    def change(sequence: Sequence) -> None:
        for name, value in values.items():
            setattr(sequence, name, value)

    return change


BAD: dict[str, Callable[[bytes], bytes]] = {
    "is torn": lambda data: data[:-1],
    "belong to another request": lambda data: change_values(data, request="other"),
    "cannot be read": lambda data: seal({"request": unseal(data)["request"]}),
    "no sequences": lambda data: change_values(data, sequences=[]),
    "version 7 is not one of 0 to 0": lambda data: change_values(data, weights=[[7, "x"]]),
    "version 0 has other weights": lambda data: change_values(data, weights=[[0, "x"]]),
    "a field has the wrong type": lambda data: change_values(data, weights=[["0", "x"]]),
    "has another prompt": lambda data: change_sequence(data, change_prompt),
    "tokens have other versions": lambda data: change_sequence(data, change_version),
    "sequence 0: ": lambda data: change_sequence(data, setting(prompt_id=99)),
    "last turn is missing": lambda data: change_sequence(data, setting(is_finished=True)),
    "current turn is out of place": lambda data: change_sequence(data, setting(turn_start=1)),
    "has no room": lambda data: change_sequence(data, setting(length_limit=3)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_no_sampler_can_have_left_is_sampled_from_the_beginning(
    make_jobs, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = make_jobs()
    opened(jobs)
    # So early that no turn has ended, and the first sequence in the file is in its turn.
    request = hand_over(jobs, 7)
    name = f"partials/{request.id}"
    jobs.store.write(name, BAD[message](jobs.store.read(name)))
    worker = jobs.new_worker("second")
    begun = worker.begin(request)
    assert message in capsys.readouterr().out
    assert not begun.continued_tokens
    assert not any(sequence.num_new for sequence in begun.sequences)


def test_tokens_that_are_too_old_are_sampled_again(
    make_jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = make_jobs("tokens", max_staleness=1)
    opened(jobs)
    request, result = answer_of_the_next(jobs, newest=2)
    assert "version 0 is not one of 1 to 2: sampled again" in capsys.readouterr().out
    assert bits(result.rollouts) == bits(undisturbed(jobs, request, 2).rollouts)
    assert not result.continued_tokens


def test_a_file_is_bounded_and_has_the_longest_sequences(
    make_jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = make_jobs()
    opened(jobs)
    request = hand_over(jobs, 15)
    lengths = [s.num_new for s in sequences_in(jobs.store.read(f"partials/{request.id}"))]
    begun = jobs.new_worker("second").begin(request)
    one = sum(v.nbytes for v in begun.sequences[0].tokens.to_dict().values())
    monkeypatch.setattr(progress, "MOST_BYTES", 3 * one)
    data = begun.to_bytes()
    assert data is not None
    kept = [sequence.num_new for sequence in sequences_in(data)]
    assert 0 < len(kept) < len(lengths)
    assert kept == sorted(lengths, reverse=True)[: len(kept)]


def test_of_turns_a_running_turn_has_the_last_weights() -> None:
    fresh = Sequence(0, 0, 0, np.array([1, 2], np.int32), length_limit=10)
    begun = Sequence(0, 0, 0, np.array([1, 2], np.int32), length_limit=10)
    begun.tokens.append([3], sampled=True, logps=[-1.0], versions=4)
    limits = Limits(vocab_size=9, max_turns=2, longest_continuation=8, tracks=(), switch="turns")
    progress.check_sequence(begun, fresh, [3, 4], limits)
    with pytest.raises(BadResultError, match="older weights"):
        progress.check_sequence(begun, fresh, [4, 5], limits)
    begun.tokens.append([3], sampled=True, logps=[-1.0], versions=5)
    with pytest.raises(BadResultError, match="several versions"):
        progress.check_sequence(begun, fresh, [4, 5], limits)
    progress.check_sequence(begun, fresh, [4, 5], replace(limits, switch="tokens"))


def test_a_preemption_notice_makes_a_sampler_hand_over(
    make_jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = make_jobs()
    opened(jobs)
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    with runs.Metadata() as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
        with StopSignal("gce", reaction="handing back its request") as stop_signal:

            def preempt() -> None:
                metadata.answer = "TRUE"
                deadline = time.monotonic() + SECONDS
                while not stop_signal.reason:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)

            at_tick = AtTick(9, preempt)

            def check_stop() -> None:
                at_tick()
                stop_signal.raise_if_stopped_here()

            worker = jobs.new_worker("spot", check_stop)
            request = worker.take()
            assert request is not None
            with pytest.raises(Interrupted, match="preemption notice"):
                worker.work_on(request)
    assert not jobs.store.names("leases")
    assert jobs.store.names("partials") == [request.id]
