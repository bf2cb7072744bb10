"""The generated neighbors of tests/attacks/neighbors_layout.py, in their quick form."""

import importlib
import random
from pathlib import Path

import pytest


@pytest.mark.parametrize(("num_golds", "num_numbers"), [(8, 6), (None, 60)])
def test_neighbors_are_told_from_the_gold(monkeypatch, num_golds, num_numbers, tries) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    neighbors = importlib.import_module("neighbors_layout")

    pairs = neighbors.neighbors(neighbors.GOLDS[:num_golds], num_numbers)
    messy = neighbors.responses(random.Random(neighbors.SEED), num_numbers)
    counts, wrong = neighbors.graded([*pairs, *messy])

    credited = [pair for pair in wrong if not pair.is_same]
    refused = [pair for pair in wrong if pair.is_same]
    num_same = sum(count for (_, is_same, _), count in counts.items() if is_same)
    assert sum(counts.values()) > 2500
    tries.count("grader", sum(counts.values()), credited)
    assert not credited
    assert len(refused) <= neighbors.MOST_REFUSED * num_same, refused
