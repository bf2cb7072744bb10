"""tests/attacks/escapes.py: the tester sees what it should, and nothing escapes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/attacks"))

import escapes  # noqa: E402
from escape_tries import TRIES  # noqa: E402

from jzero.sandbox import levels  # noqa: E402

# What a program was able to do once, and its neighbors.
FOUND = ("datagram to a path", "message to a path", "datagram to an abstract name",
         "message to an abstract name", "descriptor to a path", "pair of IPv4", "after a source",
         "after an input", "after a large source", "the server's own memory")  # fmt: skip


@pytest.fixture(scope="module")
def outside() -> Iterator[escapes.Outside]:
    with escapes.Outside() as made:
        yield made


def test_there_are_enough_tries_with_names_of_their_own() -> None:
    names = [(each.family, each.name) for each in TRIES]
    assert len(set(names)) == len(names) >= escapes.MIN_TRIES


def test_without_protection_the_tester_sees_every_control(outside: escapes.Outside) -> None:
    assert escapes.check_controls(outside) == []


@pytest.mark.parametrize("level", escapes.LEVELS)
def test_what_once_escaped_does_not(level: str, outside: escapes.Outside) -> None:
    check(level, [each for each in escapes.known_tries() if each.name in FOUND], outside)


@pytest.mark.parametrize("level", escapes.LEVELS)
def test_nothing_escapes(level: str, outside: escapes.Outside) -> None:
    check(level, escapes.known_tries(), outside)


def check(level: str, tries: list[escapes.Try], outside: escapes.Outside) -> None:
    if reason := levels.failure(level):
        pytest.skip(f"this machine has no sandbox of level {level}: {reason}")
    results = escapes.run_level(level, tries, outside)
    assert len(results) >= len(tries)
    escaped = [
        (each.family, each.name, evidence)
        for each, evidence in results
        if evidence and not escapes.is_documented(escapes.Result(each, evidence), level)
    ]
    assert escaped == []
