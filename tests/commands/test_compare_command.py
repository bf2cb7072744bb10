"""Paired comparisons against their definitions."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import compare
from jzero.errors import UserError
from jzero.files import JsonObject


@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_is_the_share_of_signs_that_are_as_uneven(gained: int, lost: int) -> None:
    number = gained + lost
    uneven = 0
    for signs in itertools.product((0, 1), repeat=number):
        uneven += abs(2 * sum(signs) - number) >= abs(gained - lost)

    assert compare.mcnemar(gained, lost) == pytest.approx(uneven / 2**number)


def test_the_interval_is_that_of_paired_problems() -> None:
    rng = np.random.default_rng(0)
    base = (rng.random(400) < 0.5).astype(float)
    # The same problems but for 40 that are gained: pairing leaves only their noise.
    run = base.copy()
    run[np.flatnonzero(base == 0)[:40]] = 1.0

    found = compare.paired_difference(base, run)

    assert found.gain == pytest.approx(0.1)
    stderr = math.sqrt(0.1 * 0.9 / 400)
    assert found.low == pytest.approx(0.1 - 1.96 * stderr, abs=0.006)
    assert found.high == pytest.approx(0.1 + 1.96 * stderr, abs=0.006)
    assert found.p_value == compare.mcnemar(40, 0)


def test_the_interval_needs_little_memory_and_is_that_of_all_resamples_at_once() -> None:
    rng = np.random.default_rng(0)
    base, run = rng.random(6000).round(), rng.random(6000).round()

    tracemalloc.start()
    found = compare.paired_difference(base, run)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 64 << 20, "the resamples are 480 MB"
    few = slice(0, 150)
    drawn = np.random.default_rng(0).integers(0, 150, (compare.RESAMPLES, 150))
    means = (run - base)[few][drawn].mean(axis=1)
    found = compare.paired_difference(base[few], run[few])
    assert (found.low, found.high) == tuple(np.quantile(means, (0.025, 0.975)))


def test_equal_models_have_no_difference() -> None:
    found = compare.paired_difference(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert (found.gain, found.low, found.high, found.p_value) == (0, 0, 0, 1.0)


def test_several_samples_have_an_interval_and_no_test() -> None:
    found = compare.paired_difference(np.array([0.5, 0.25]), np.array([1.0, 0.5]))
    assert found.p_value is None
    assert (found.low, found.high) == (0.25, 0.5)


def row(id: str, accuracy: float, response: str = "4") -> dict:
    return {
        "id": id,
        "prompt": [{"role": "user", "content": f"question {id}"}],
        "gold": {"answer": "4", "question": "?"},
        "accuracy": accuracy,
        "samples": [{"response": response}],
    }


def test_problems_are_paired_by_id_and_flips_are_listed() -> None:
    base = [row("a", 0, "5"), row("b", 1), row("c", 1), row("only base", 1)]
    run = [row("c", 0, "9"), row("b", 1), row("a", 1), row("only run", 1)]

    pairs = compare.paired_rows(base, run)
    lines = compare.flips(*pairs, shown=5)

    assert [one["id"] for one in pairs[0]] == [one["id"] for one in pairs[1]] == ["a", "b", "c"]
    assert lines == [
        "gained: 1",
        "  a: question a",
        "    gold 4",
        "    base 5",
        "    run  4",
        "lost: 1",
        "  c: question c",
        "    gold 4",
        "    base 4",
        "    run  9",
    ]
    assert compare.flips(*pairs, shown=0)[:2] == ["gained: 1", "  and 1 more (--show)"]


def test_models_without_a_common_problem_are_refused() -> None:
    with pytest.raises(UserError, match="no problem in common"):
        compare.paired_rows([row("a", 1)], [row("b", 1)])


def test_few_flips_show_no_difference() -> None:
    solved = np.array([1.0, 1.0, 0.0, 0.0])

    lines = compare.describe("mine", compare.paired_difference(np.zeros(4), solved), 4)

    assert lines == [
        "mine: 0 of 4 -> 2 of 4 problems, +50.0 points",
        "  no difference is shown: 2 problems gained or lost, and a test needs 6",
    ]


def test_many_flips_have_an_interval_and_a_test() -> None:
    base = np.repeat([1.0, 0.0], [40, 60])
    run = np.repeat([1.0, 0.0], [70, 30])

    first, second = compare.describe("mine", compare.paired_difference(base, run), 100)

    assert first == "mine: 40.0 % -> 70.0 % of 100 problems, +30.0 points"
    assert second.startswith("  95 % interval +2")
    assert second.endswith("McNemar p = 1.86e-09")


def row_of(accuracy: float, score: float | None, rewards: dict[str, float]) -> JsonObject:
    sample: JsonObject = {"rewards": rewards} if rewards else {}
    row: JsonObject = {"accuracy": accuracy, "samples": [sample]}
    return row if score is None else row | {"score": score}


def test_scores_are_compared_if_a_reward_gives_them() -> None:
    own = [row_of(0.0, score, {"my.py:f": score}) for score in (0.0, 0.5)]
    better = [row_of(0.0, score, {"my.py:f": score}) for score in (0.5, 0.75)]
    graded = [row_of(float(i), float(i), {}) for i in range(2)]

    found = compare.scores_of(own, better)
    assert found is not None
    lines = compare.describe_scores("mine", compare.paired_difference(*found), 2)
    assert lines == ["mine: score 0.250 -> 0.625 of 2 problems, +0.375"]
    assert compare.scores_of(graded, graded) is None  # the accuracies again
    assert compare.scores_of([row_of(0.0, None, {})], own[:1]) is None
