"""Generated neighbors of golds, of both signs, and pairs that once were judged wrongly."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def neighbors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/attacks"))
    return importlib.import_module("neighbors")


@pytest.mark.parametrize("rounds", [1, 12])
def test_neighbors_of_every_kind_are_told_apart(neighbors, rounds) -> None:
    rows = {}
    for kind, make in neighbors.KINDS.items():
        rows[kind] = neighbors.judged(neighbors.pairs_of_kind(make, rounds, seed=rounds))
        assert rows[kind].credited > 0 and rows[kind].rightly_refused > 0, kind
    missed = [pair for row in rows.values() for pair in row.missed]
    # The time of a pair means something in a process of its own alone: here, a collection of all
    # that other tests left may fall into it.
    assert neighbors.is_judged_right(neighbors.total(rows.values())), missed


def test_a_missed_pair_fails_the_table(neighbors) -> None:
    wrong = neighbors.judged([neighbors.Pair(False, "5.0", "5")])
    right = neighbors.judged([neighbors.Pair(True, "5.0", "5")])
    assert not neighbors.passes(wrong)
    assert neighbors.passes(right)
    assert "1" in neighbors.table({"numbers": wrong})


def test_pairs_of_a_file_are_judged(neighbors, tmp_path, capsys) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"answer": "1/2", "gold": "0.5", "equal": true}\n')
    assert neighbors.main(["--pairs", str(path)]) == 0
    path.write_text('{"answer": "1/2", "gold": "0.5", "equal": false}\n')
    assert neighbors.main(["--pairs", str(path)]) == 1
    assert "missed, different" in capsys.readouterr().out


def test_found_pairs_are_right(neighbors, shared: Path) -> None:
    assert neighbors.main(["--pairs", str(shared / "data/grader/found_pairs.py")]) == 0


@pytest.mark.parametrize("count", [600, 20_000], ids=["few", "many"])
def test_no_gold_with_one_character_exchanged_is_credited(neighbors, shared: Path, count) -> None:
    golds = neighbors.real_golds(shared / "data")
    row = neighbors.judged(neighbors.mutations(golds, count, seed=count))
    assert row.wrongly_credited == 0, row.missed
