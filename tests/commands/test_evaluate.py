"""What is said of samples, against its definition; the command's mistakes; the filters."""

import collections
import itertools
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from jzero import config, evaluate, filter
from jzero.rollout.evaluation import accuracy_metrics, evaluation_kinds, majority_vote, pass_at_k
from jzero.tasks import suites
from jzero.types import Grade, Problem


def rollouts(texts: list[str], correct: list[bool]):
    made = zip(reference.random_rollouts(0, len(texts), 1), texts, correct, strict=True)
    said = lambda rollout, text: (replace(rollout.turns[0], text=text),)
    return [replace(r, turns=said(r, t), grade=Grade(float(c), c, "")) for r, t, c in made]


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n))
    )
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(drawn):
    samples, k = drawn
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(np.array([samples]), k) == pytest.approx(
        float(np.mean([any(s) for s in subsets]))
    )
    n, c = len(samples), sum(samples)
    closed = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(np.array([samples, [False] * n]), k) == pytest.approx(float(closed) / 2)


@pytest.mark.parametrize(
    "answers, correct, value",
    [
        (["1", "1", "2"], [True, True, False], 1.0),
        (["1", "2", "2"], [True, False, False], 0.0),
        (["0.5", "1/2", "3"], [True, True, False], 1.0),  # right answers are one, however written
        (["1", "2"], [True, False], 0.5),
        (["1", "2", "3", ""], [True, False, False, False], 1 / 3),
        (["", "", "1"], [False, False, True], 1.0),  # no answer is no vote
        (["", ""], [False, False], 0.0),
    ],
)
def test_majority(answers, correct, value):
    assert majority_vote(answers, correct) == pytest.approx(value)


@given(st.lists(st.sampled_from(["0", "1", "2", ""]), min_size=1, max_size=6))
def test_majority_is_the_mean_over_random_ties(answers):
    correct = [answer == "0" for answer in answers]
    votes = collections.Counter(answer for answer in answers if answer)
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    assert majority_vote(answers, correct) == pytest.approx(
        float(np.mean([a == "0" for a in top])) if top else 0
    )


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so \\boxed{ \\frac{1}{2} } done", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "2"),
        ("<think>\\boxed{1}</think> it is 3 or 4,000.", "4000"),
        ("<answer>1 + 2</answer>", "1+2"),
        ("nothing", ""),
    ],
)
def test_answers_for_votes(text, answer):
    assert suites.vote(text) == answer


def test_scores_of_samples():
    correct = [[True, False, False, True], [False] * 4, [True] * 4]
    flat = [c for row in correct for c in row]
    found = accuracy_metrics(rollouts(["\\boxed{1}" if c else "\\boxed{2}" for c in flat], flat), 4)
    means = np.array([0.5, 0.0, 1.0])
    assert found["accuracy"] == means.mean() and found["stderr"] == pytest.approx(
        means.std() / 3**0.5
    )
    assert found["pass@4"] == pytest.approx(2 / 3) and found["pass@2"] == pytest.approx(
        (1 - 1 / 6 + 1) / 3
    )
    assert found["maj@4"] == pytest.approx((0.5 + 0 + 1) / 3)
    single = accuracy_metrics(rollouts(["\\boxed{1}"] * 2, [True, False]), 1)
    assert single["accuracy"] == 0.5 and not any("@" in name for name in single)


def test_kinds():
    kinds = lambda **changes: evaluation_kinds(config.EvalConfig(**changes), 0.6)
    assert kinds(samples=4) == {"eval": (4, 0.6), "eval_greedy": (1, 0.0)}
    assert kinds(samples=0) == {"eval_greedy": (1, 0.0)} and kinds(samples=2, greedy=False) == {
        "eval": (2, 0.6)
    }


def test_problem_rows_and_table():
    made = rollouts(["\\boxed{1}", "x"], [True, False])
    problem = Problem("math500/3", "math", [{"role": "user", "content": "Q"}], "1")
    row = evaluate.problem_rows([replace(r, problem=problem) for r in made], 2)[0]
    assert (
        json.loads(json.dumps(row)) == row and row["accuracy"] == 0.5 and row["id"] == "math500/3"
    )
    assert [sample["correct"] for sample in row["samples"]] == [True, False]
    kinds = {"avg@2": {"accuracy": 0.5, "stderr": 0.1, "length": 7.0, "pass@2": 1.0, "maj@2": 0.25}}
    lines = evaluate.table(
        {"a": {"problems": 3, "kinds": kinds}, "b": {"problems": 4, "kinds": kinds}}
    ).split("\n")
    assert lines[1].split() == ["a", "3", "avg@2", "50.0", "±", "10.0", "100.0", "25.0", "7"]
    assert lines[-1].split() == ["average", "avg@2", "50.0"]


@pytest.mark.parametrize(
    "command, message",
    [
        ("evaluate --suite math500", "the following arguments are required: --model"),
        ("evaluate --model /nope --suite math501", "no suite 'math501': there are aime24"),
        ("evaluate --model /nope --suite countdown", "no such directory: /nope"),
        ("evaluate --model /nope --suite countdown,countdown", "give every suite once"),
        ("evaluate --model /nope --suite x=/nope.jsonl", "data /nope.jsonl cannot be loaded"),
        (
            "evaluate --model /nope --suite countdown --config.eval.sample=3",
            "no field eval.sample; did you mean eval.s",
        ),
        (
            "evaluate --model /nope --suite countdown --config.rollout.top_p=2",
            "rollout.top_p=2.0 must be in (0, 1]",
        ),
        ("evaluate --model /nope --suite countdown --oot=x", "Unknown command line flag 'oot'"),
        ("filter --data x --out y", "nothing to filter by: give --rates or --against"),
        ("filter --data x --out y --against math500 --ngram 0", "--ngram=0 must be at least 1"),
        (
            "filter --data /nope.jsonl --out y --against math500",
            "data /nope.jsonl cannot be loaded",
        ),
    ],
)
def test_a_mistake_is_one_line(command, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr("jzero.cli.start_jax", list)
    with pytest.raises(SystemExit) as stop:
        {"evaluate": evaluate, "filter": filter}[name].main()
    out, err = capsys.readouterr()
    assert (
        stop.value.code == 2
        and err.startswith("error: ")
        and err.count("\n") == 1
        and message in err
        and not out
    )
    assert not list(tmp_path.iterdir())


def test_by_rate_keeps_what_lies_strictly_between():
    rates = {0: 0.0, 1: 0.1, 2: 0.5, 3: 0.9, 4: 1.0}
    assert filter.rows_by_rate(rates, 6, 0.1, 0.9) == {2}
    assert filter.rows_by_rate(rates, 6, -1.0, 2.0) == {0, 1, 2, 3, 4}
    with pytest.raises(ValueError, match="--rates knows none of the 3 rows"):
        filter.rows_by_rate({}, 3, 0.1, 0.9)


words = st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(" ".join)


@given(st.lists(words, max_size=4), st.lists(words, max_size=3), st.integers(1, 4))
def test_apart_is_what_shares_no_run_of_words(problems, known, n):
    runs = lambda text, size: [
        text.split()[i : i + size] for i in range(len(text.split()) - size + 1)
    ]
    meet = lambda a, b: any(run in runs(a, len(run)) for run in runs(b, min(n, len(b.split()))))
    assert filter.rows_without_overlap(problems, known, n) == {
        i for i, problem in enumerate(problems) if not any(meet(problem, other) for other in known)
    }


def test_filters_write_what_is_kept(tmp_path, capsys, monkeypatch):
    lines = lambda path, table: path.write_text("".join(json.dumps(row) + "\n" for row in table))
    table = [
        {"problem": f"how many is {i} and {i}", "answer": str(2 * i), "more": i} for i in range(6)
    ]
    lines(tmp_path / "data.jsonl", table)
    lines(tmp_path / "rates.jsonl", [{"id": f"mine/{i}", "accuracy": i / 5} for i in range(6)])
    lines(tmp_path / "suite.jsonl", [{"problem": "Tell me: how many IS 3, and 3?"}])
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--data data.jsonl --out kept.jsonl --rates rates.jsonl --against amc=suite.jsonl --ngram 4"
    )
    monkeypatch.setattr(sys, "argv", ["filter", *arguments.split()])
    filter.main()
    assert capsys.readouterr().out == "6 rows, 2 too easy or too hard, 1 in a suite, 3 kept\n"
    assert [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()] == [
        table[1],
        table[2],
        table[4],
    ]
