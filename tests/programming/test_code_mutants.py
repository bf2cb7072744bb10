"""tests/attacks/mutants.py: wrong mutants get no credit, and right ones do."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/attacks"))

import mutants  # noqa: E402
from mutant_rows import rows  # noqa: E402


@pytest.fixture
def oracle() -> Iterator[mutants.Oracle]:
    made = mutants.Oracle()
    yield made
    made.close()


def test_the_oracle_knows_right_from_wrong(oracle: mutants.Oracle) -> None:
    for row in rows()[::20]:
        assert all(oracle.passed(row, row.source)), row
        name = row.function or (row.left_sides[0].split("(")[0] if row.left_sides else "")
        assert not all(oracle.passed(row, f"def {name or 'f'}(*_): return object()")), row


def test_there_are_rows_of_each_layout_and_mutants_of_each_kind() -> None:
    all_rows = rows()
    assert len({row.source for row in all_rows}) >= 60
    layouts = {row.layout.partition(",")[0] for row in all_rows}
    assert layouts == {"MBPP", "APPS", "TACO", "DeepCoder", "LiveCodeBench"}
    kinds = {mutant.kind for row in all_rows[::20] for mutant in mutants.mutants_of(row)}
    assert kinds == {
        "first item",
        "constant",
        "off by one",
        "another type",
        "swapped branch",
        "partial loop",
    }


@pytest.mark.parametrize(
    ("every", "most"),
    [
        (9, 20),
        (3, 130),
        (1, 400),
    ],
)
def test_wrong_mutants_get_no_credit_and_right_ones_do(
    every: int, most: int, oracle: mutants.Oracle
) -> None:
    counts = mutants.run(mutants.choose(rows()[::every], most), oracle)
    assert [note for count in counts.values() for note in count.false_credits] == []
    assert [note for count in counts.values() for note in count.false_refusals] == []
    assert sum(count.wrong for count in counts.values()) > most / 2
