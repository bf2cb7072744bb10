"""Samplers that lie about grades, texts, log-probs, counters, sizes, versions and their names."""

import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lying_samplers import (
    MAX_NEW_TOKENS,
    SNAPSHOT,
    Lie,
    Trainer,
    changed_turn,
    lies_of,
    mutated_values,
    receiving_stream,
    sealed_body,
)

from jzero import sample
from jzero.config import Jobs
from jzero.decoder.sequence import Sequence
from jzero.jobs.leases import Leases
from jzero.jobs.progress import Progress
from jzero.jobs.requests import ANY_VERSION, Request, Result
from jzero.jobs.sealed import BadResultError, seal, unseal
from jzero.jobs.store import FolderStore

SURFACE = "results of lying samplers"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with receiving_stream(tmp_path) as receiving:
        yield receiving


@pytest.mark.parametrize(
    "number",
    [3, 20],
    ids=["some values", "many values"],
)
def test_a_lie_is_refused_or_changes_nothing(trainer: Trainer, tries, number: int) -> None:
    honest = trainer.honest()
    assert trainer.receive(trainer.honest_file())
    for lie in lies_of(honest, trainer.honest(trainer.older), number):
        with tries.attempt(SURFACE, lie.name):
            trainer.check_refused_or_harmless(lie)


MIB = 1 << 20
# Bodies of 16 MiB, each with the largest number of some items.
BOMBS = {
    "lists": b"\x90" * (16 * MIB),
    "a list of lists": b"\xdd\x00\xff\xff\xf0" + b"\x90" * (16 * MIB - 16),
    "maps": b"\xdd\x00\xff\xff\xf0" + b"\x80" * (16 * MIB - 16),
    "lists of lists": b"\xdc\x40\x00" + (b"\xdc\x03\xfc" + b"\x90" * 1020) * (16 * 1024),
    "numbers": b"\xdd\x00\xff\xff\xf0" + b"\xc3" * (16 * MIB - 16),
    "an array of lists": b"\xc9\x00\xff\xff\xf0\x01" + b"\x90" * (16 * MIB - 16),
    "a text": b"\xdb\x00\xff\xff\xf0" + b"a" * (16 * MIB - 16),
    "arrays without items": b"\xdc\xff\xff" + b"\xc7\x01\x01\x90" * 65535,
    "announced": b"\xdd\xff\xff\xff\xff" * (3 * MIB),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_of_16_mib_takes_4_times_its_size_and_a_second(name: str, tries) -> None:
    data = sealed_body(BOMBS[name])
    with tries.attempt("memory bombs", name):
        tracemalloc.start()
        start = time.process_time()
        try:
            with pytest.raises(BadResultError):
                Result.parse(data)
            seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 4 * 16 * MIB, f"{peak / MIB:.0f} MiB"
        assert seconds < 2, f"{seconds:.1f} s, of which tracing takes a half"


def test_the_size_of_a_file_is_bounded_before_it_is_read(trainer: Trainer, tries, capsys) -> None:
    """The bound follows from the request, and holds for whatever is in the place of a file."""
    most = trainer.request.file_limits(trainer.stream.limits).most_bytes
    assert most < 2 * MIB
    honest = trainer.honest()
    with tries.attempt("memory bombs", "a long text"):
        lie = changed_turn(honest, 0, text="x" * most)
        assert not trainer.receive(Lie("", lie.name, lie.to_bytes()))
        assert "refused a result of a sampler: the file has more than" in capsys.readouterr().out
    with tries.attempt("memory bombs", "a sparse file of 10 GiB"):
        trainer.reset()
        path = trainer.store.directory / "results" / honest.name
        with path.open("wb") as file:
            file.truncate(10 << 30)
        trainer.stream._poll()
        assert not trainer.stream.ready and not path.exists()


def test_only_regular_files_are_results(trainer: Trainer, tries, tmp_path: Path) -> None:
    honest = trainer.honest_file()
    folder = trainer.store.directory / "results"
    folder.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_bytes(honest.data)
    makers = {
        "FIFO": os.mkfifo,
        "folder": lambda path: path.mkdir(),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "link": lambda path: path.symlink_to(secret),
    }
    for name, make in makers.items():
        with tries.attempt("files that are not regular", name):
            trainer.reset()
            make(folder / f"{trainer.request.id}-{name.replace('/', '_')}")
            trainer.stream._poll()
            assert not trainer.stream.ready
            assert not FolderStore(trainer.store.directory).names("results")
    assert trainer.receive(honest)


def test_a_sampler_that_lies_three_times_is_not_read_any_more(trainer: Trainer, capsys) -> None:
    trainer.reset()
    honest = trainer.honest()
    bad = replace(honest, seconds=-1.0)
    for _ in range(3):
        trainer.store.write(f"results/{bad.name}", bad.to_bytes())
        trainer.stream._poll()
    assert "3 of its results were refused, and all others are now" in capsys.readouterr().out
    trainer.store.write(f"results/{honest.name}", honest.to_bytes())
    trainer.stream._poll()
    assert not trainer.stream.ready and not trainer.store.names("results")
    other = replace(honest, sampler="honest-1")
    trainer.store.write(f"results/{other.name}", other.to_bytes())
    trainer.stream._poll()
    assert trainer.stream.ready[trainer.request.id].result.sampler == "honest-1"


def test_a_flood_of_lies_prints_a_bounded_number_of_lines(trainer: Trainer, capsys) -> None:
    trainer.reset()
    honest = trainer.honest()
    for number in range(100):
        bad = replace(honest, sampler=f"liar-{number}", seconds=-1.0)
        trainer.store.write(f"results/{bad.name}{number}", bad.to_bytes())
    trainer.stream._poll()
    assert trainer.stream.num_refused == 100
    assert len(capsys.readouterr().out.splitlines()) < 30


def test_the_largest_honest_result_is_within_the_bounds(trainer: Trainer) -> None:
    """Of the longest responses, each of the longest text that its tokens can have."""
    limits = trainer.stream.limits
    honest = trainer.honest()
    text = "\N{GRINNING FACE}" * 10
    ids = trainer.stream.sampler.tokenizer.encode(text)
    assert len(ids) == limits.longest_continuation
    rollouts = []
    for rollout in honest.rollouts:
        tokens = rollout.tokens.first(rollout.prompt_length)
        tokens.append(ids, sampled=True, logps=np.full(len(ids), -1.0), versions=0)
        turn = replace(rollout.turns[0], end=len(tokens), text=text, finish_reason="length")
        rollouts.append(replace(rollout, tokens=tokens, turns=(turn,)))
    result = replace(honest, rollouts=rollouts)
    bounds = trainer.request.file_limits(limits)
    data = result.to_bytes()
    assert len(data) < bounds.most_bytes
    Result.parse(data, bounds.most_items)


def test_false_results_do_not_keep_a_request_from_honest_samplers(tmp_path: Path) -> None:
    """A sampler does not take a request with a result, which the trainer may read later."""
    store = FolderStore(tmp_path)
    leases = Leases(store, "s", 0.2)
    worker = sample.Worker(store, leases, None, None, "s", lambda: None, Jobs())  # type: ignore[arg-type]
    for request in ("refused", "rewritten", "waiting"):
        store.write(f"results/{request}-1", b"")
    assert worker.find_answered() == {"refused", "rewritten", "waiting"}
    # The trainer has removed a result, and its request is still there.
    store.delete("results/refused-1")
    store.write("results/refused-2", b"")
    assert worker.find_answered() == {"rewritten", "waiting"}
    # For longer than a lease there is a result, but never an old one.
    time.sleep(0.25)
    os.utime(tmp_path / "results" / "waiting-1", (1, 1))
    store.write("results/rewritten-1", b"")
    assert worker.find_answered() == {"waiting"}


def handed_over(trainer: Trainer) -> tuple[Request, dict]:
    """Returns a request of any weights, and the values in a file of its unfinished sequences."""
    request = replace(trainer.request, version=ANY_VERSION, snapshot="")
    progress = Progress.begin(request, MAX_NEW_TOKENS, (0, SNAPSHOT))
    for sequence, rollout in zip(progress.sequences, trainer.honest().rollouts, strict=True):
        sequence.tokens = rollout.tokens
        if sequence.sample_index:
            turn = rollout.turns[0]
            sequence.turns, sequence.is_finished = [turn], True
            sequence.turn_text, sequence.finish_reason = turn.text, turn.finish_reason
        else:
            sequence.tokens = rollout.tokens.first(len(rollout.tokens) - 5)
    data = progress.to_bytes()
    assert data is not None
    return request, unseal(data)


def test_what_a_liar_hands_over_is_refused_or_changes_nothing(trainer: Trainer, tries) -> None:
    """The next sampler would continue the tokens, and give them its name."""
    request, values = handed_over(trainer)
    limits = trainer.stream.limits
    manifest = SimpleNamespace(identity=SNAPSHOT)
    reader = SimpleNamespace(manifest=lambda version: manifest)

    def take_over(data: bytes) -> Progress:
        progress = Progress.begin(request, MAX_NEW_TOKENS, (0, SNAPSHOT))
        progress.take_over(data, limits, reader, 0, 1)  # type: ignore[arg-type]
        return progress

    honest = take_over(seal(values))
    assert honest.continued_tokens > 0
    for name, changed in mutated_values(values, 3):
        try:
            data = seal(changed) if isinstance(changed, dict) else sealed_body(b"\xc0")
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError):
            continue
        with tries.attempt("sequences that a liar hands over", name):
            try:
                taken = take_over(data)
            except BadResultError:
                continue
            for ours, theirs in zip(taken.sequences, honest.sequences, strict=True):
                # Sequences that are not in the file are sampled from their beginning.
                if ours.num_new:
                    assert_same_sequence(ours, theirs)


def assert_same_sequence(ours: Sequence, theirs: Sequence) -> None:
    """Asserts that a sampler continues a sequence as it would continue another one.

    The grades of finished turns are checked by the trainer.
    """
    for name, values in theirs.tokens.to_dict().items():
        assert ours.tokens[name].tobytes() == values.tobytes(), name
    for name in ("turn_start", "turn_text", "finish_reason", "is_finished", "request_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) < ours.length_limit <= theirs.length_limit or ours.is_finished
    assert [replace(turn, grade=None) for turn in ours.turns] == [
        replace(turn, grade=None) for turn in theirs.turns
    ]
