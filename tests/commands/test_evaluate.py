"""The scores of samples against their definitions, mistakes on the command line, and filters."""

import collections
import itertools
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
import reference
import servers
from hypothesis import given
from hypothesis import strategies as st
from runs import write_jsonl

from jzero import config, filter
from jzero.commands import evaluate
from jzero.rollout.evaluation import accuracy_metrics, evaluation_kinds, majority_vote, pass_at_k
from jzero.run.samples import problem_rows
from jzero.types import Grade, Problem, Rollout


def make_rollout(rollout: Rollout, text: str, is_correct: bool) -> Rollout:
    """Returns a rollout of one turn with the text and the grade."""
    turn = replace(rollout.turns[0], text=text)
    return replace(rollout, turns=(turn,), grade=Grade(float(is_correct), is_correct, ""))


def make_rollouts(texts: list[str], correct: list[bool]) -> list[Rollout]:
    random_rollouts = reference.random_rollouts(0, len(texts), 1)
    rollouts = []
    for rollout, text, is_correct in zip(random_rollouts, texts, correct, strict=True):
        rollouts.append(make_rollout(rollout, text, is_correct))
    return rollouts


# pass@k


@st.composite
def samples_and_k(draw: st.DrawFn) -> tuple[list[bool], int]:
    """Draws which samples of a problem are correct, and a k that is not above their number."""
    num_samples = draw(st.integers(1, 7))
    samples = draw(st.lists(st.booleans(), min_size=num_samples, max_size=num_samples))
    return samples, draw(st.integers(1, num_samples))


@given(samples_and_k())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(
    drawn: tuple[list[bool], int],
) -> None:
    samples, k = drawn

    estimate = pass_at_k(np.array([samples]), k)

    subsets = itertools.combinations(samples, k)
    expected = float(np.mean([any(subset) for subset in subsets]))
    assert estimate == pytest.approx(expected)


@given(samples_and_k())
def test_pass_at_k_is_the_closed_form_averaged_over_problems(
    drawn: tuple[list[bool], int],
) -> None:
    samples, k = drawn
    n, c = len(samples), sum(samples)

    estimate = pass_at_k(np.array([samples, [False] * n]), k)

    closed_form = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert estimate == pytest.approx(float(closed_form) / 2)


# maj@k


@pytest.mark.parametrize(
    ("answers", "correct", "chance"),
    [
        pytest.param(["1", "1", "2"], [True, True, False], 1.0, id="correct majority"),
        pytest.param(["1", "2", "2"], [True, False, False], 0.0, id="wrong majority"),
        pytest.param(
            ["0.5", "1/2", "3"], [True, True, False], 1.0, id="correct answers written otherwise"
        ),
        pytest.param(["1", "2"], [True, False], 0.5, id="tie of two"),
        pytest.param(
            ["1", "2", "3", ""], [True, False, False, False], 1 / 3, id="tie of three and no answer"
        ),
        pytest.param(["", "", "1"], [False, False, True], 1.0, id="no answer is not a vote"),
        pytest.param(["", ""], [False, False], 0.0, id="no votes"),
    ],
)
def test_majority_vote_is_the_chance_of_the_correct_answer(
    answers: list[str], correct: list[bool], chance: float
) -> None:
    assert majority_vote(answers, correct) == pytest.approx(chance)


@given(st.lists(st.sampled_from(["0", "1", "2", ""]), min_size=1, max_size=6))
def test_majority_vote_is_the_mean_over_random_ties(answers: list[str]) -> None:
    chance = majority_vote(answers, [answer == "0" for answer in answers])

    votes = collections.Counter(answer for answer in answers if answer)
    most_votes = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most_votes]
    expected = float(np.mean([winner == "0" for winner in winners])) if winners else 0
    assert chance == pytest.approx(expected)


# Metrics


def test_metrics_of_several_samples() -> None:
    correct = [[True, False, False, True], [False] * 4, [True] * 4]
    flat = list(itertools.chain.from_iterable(correct))
    texts = ["\\boxed{1}" if is_correct else "\\boxed{2}" for is_correct in flat]

    votes = ["1" if is_correct else "2" for is_correct in flat]
    metrics = accuracy_metrics(make_rollouts(texts, flat), 4, votes)

    means = np.array([0.5, 0.0, 1.0])
    assert metrics["accuracy"] == means.mean()
    assert metrics["stderr"] == pytest.approx(means.std(ddof=1) / 3**0.5)
    one_problem = accuracy_metrics(make_rollouts(texts[:4], flat[:4]), 4, votes[:4])
    assert "stderr" not in one_problem
    # Of the six pairs of samples of the first problem, one has no correct sample.
    assert metrics["pass@2"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert metrics["pass@4"] == pytest.approx(2 / 3)
    assert metrics["maj@4"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_metrics_of_single_samples_have_no_pass_at_k() -> None:
    rollouts = make_rollouts(["\\boxed{1}"] * 2, [True, False])

    metrics = accuracy_metrics(rollouts, 1)

    assert metrics["accuracy"] == 0.5
    assert not [name for name in metrics if "@" in name]


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (config.EvalConfig(samples=4), {"eval": (4, 0.6), "eval_greedy": (1, 0.0)}),
        (config.EvalConfig(samples=0), {"eval_greedy": (1, 0.0)}),
        (config.EvalConfig(samples=2, greedy=False), {"eval": (2, 0.6)}),
    ],
    ids=["both", "greedy only", "samples only"],
)
def test_kinds_of_evaluation_follow_the_settings(
    settings: config.EvalConfig, kinds: dict[str, tuple[int, float]]
) -> None:
    assert evaluation_kinds(settings, 0.6) == kinds


def test_a_row_has_all_responses_of_a_problem() -> None:
    problem = Problem("math500/3", "math", [{"role": "user", "content": "Q"}], "1")
    rollouts = make_rollouts(["\\boxed{1}", "x"], [True, False])
    rollouts = [replace(rollout, problem=problem) for rollout in rollouts]

    [row] = problem_rows(rollouts, 2)

    assert json.loads(json.dumps(row)) == row
    assert row["id"] == "math500/3"
    assert row["accuracy"] == 0.5
    samples = row["samples"]
    assert isinstance(samples, list)
    assert [sample["correct"] for sample in samples] == [True, False]


def test_rewards_and_further_verifiers_have_a_line_and_tasks_of_rows_have_none() -> None:
    metrics = {"accuracy": 0.5, "accuracy/math": 0.25, "accuracy_by/open_r1": 0.75}
    metrics |= {"reward/cosine": 0.125, "length": 9.0}
    suite = {"problems": 4, "dropped": 0, "graded_by": "", "kinds": {"avg@4": metrics}}

    lines = evaluate.further_lines({"math500": cast(evaluate.SuiteSummary, suite)})

    assert lines == ["math500 avg@4: 75.0 % by open_r1", "math500 avg@4: reward/cosine 0.125"]


def test_the_table_has_a_line_for_every_suite_and_the_average() -> None:
    metrics = {"accuracy": 0.5, "stderr": 0.1, "length": 7.0, "pass@2": 1.0, "maj@2": 0.25}
    kinds, fast = {"avg@2": metrics}, "task.verifier=fast"
    first = evaluate.SuiteSummary(problems=3, dropped=0, graded_by=fast, kinds=kinds)
    second = evaluate.SuiteSummary(problems=4, dropped=0, graded_by=fast, kinds=kinds)

    lines = evaluate.table({"a": first, "b": second}).split("\n")

    assert lines[1].split() == [
        "a",
        "3",
        "avg@2",
        *["50.0", "±", "10.0", "%", "100.0", "%", "25.0", "%", "7"],
    ]
    assert lines[-2].split() == ["average", "avg@2", "50.0", "%"]
    assert lines[-1] == "a, b: graded by task.verifier=fast"


# Mistakes

ONE_SUITE = "--model /nope --suite countdown"


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (evaluate, "--suite math500", "give one model: jzero evaluate RUN, or"),
        (evaluate, "--model /nope --suite math501", "no suite 'math501': there are aime24"),
        (evaluate, ONE_SUITE, "no such directory: /nope"),
        (evaluate, f"{ONE_SUITE},countdown", "give every suite once"),
        (evaluate, "--model /nope --suite x=/nope.jsonl", "data /nope.jsonl cannot be loaded"),
        (
            evaluate,
            f"{ONE_SUITE} --config.eval.sample=3",
            "there is no setting eval.sample; did you mean eval.samples?",
        ),
        (
            evaluate,
            f"{ONE_SUITE} --config.rollout.top_p=2",
            "rollout.top_p=2.0 must be at most 1",
        ),
        (
            evaluate,
            f"{ONE_SUITE} --config.model.adapter.rank=8",
            "model.adapter.rank=8 is a setting of training runs: remove it",
        ),
        (
            evaluate,
            f"{ONE_SUITE} --config.model.base=int8",
            "model.base=int8 needs a frozen model, and without an adapter nothing is frozen",
        ),
        (
            evaluate,
            f"{ONE_SUITE} --adapter /nope",
            "no such directory: /nope",
        ),
        (evaluate, f"{ONE_SUITE} --oot=x", "--oot=x: did you mean --out=x?"),
        (filter, "--data x --out y", "nothing to filter by: give --rates or --against"),
        (filter, "--data x --out y --against math500 --ngram 0", "--ngram=0 must be at least 1"),
        (
            filter,
            "--data /nope.jsonl --out y --against math500",
            "data /nope.jsonl cannot be loaded",
        ),
    ],
)
def test_a_mistake_is_one_line(
    program: ModuleType,
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.__name__, *arguments.split()])
    monkeypatch.setattr("jzero.cli.start_jax", list)  # JAX runs already: it cannot start again

    with pytest.raises(SystemExit) as stop:
        program.main()

    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not out
    assert not list(tmp_path.iterdir())


# Filters


def test_rows_by_rate_are_those_strictly_between_the_bounds() -> None:
    rates = {0: 0.0, 1: 0.1, 2: 0.5, 3: 0.9, 4: 1.0}

    assert filter.rows_by_rate(rates, 6, 0.1, 0.9) == {2}
    assert filter.rows_by_rate(rates, 6, -1.0, 2.0) == {0, 1, 2, 3, 4}


def test_rates_of_another_set_are_refused() -> None:
    with pytest.raises(ValueError, match="--rates has none of the 3 rows"):
        filter.rows_by_rate({}, 3, 0.1, 0.9)


def runs_of_words(text: str, size: int) -> list[list[str]]:
    words = text.split()
    return [words[start : start + size] for start in range(len(words) - size + 1)]


def share_a_run(problem: str, known: str, n: int) -> bool:
    """Whether n words in a row are in both texts, or all words of a shorter known text."""
    size = min(n, len(known.split()))
    runs_of_problem = runs_of_words(problem, size)
    return any(run in runs_of_problem for run in runs_of_words(known, size))


TEXTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(" ".join)


@given(st.lists(TEXTS, max_size=4), st.lists(TEXTS, max_size=3), st.integers(1, 4))
def test_rows_without_overlap_share_no_run_of_words(
    problems: list[str], known: list[str], n: int
) -> None:
    rows = filter.rows_without_overlap(problems, known, n)

    expected = set()
    for row, problem in enumerate(problems):
        if not any(share_a_run(problem, text, n) for text in known):
            expected.add(row)
    assert rows == expected


def test_the_filter_writes_the_rows_that_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, object]] = []
    rates: list[dict[str, object]] = []
    for i in range(6):
        problem = f"how many is {i} and {i}"
        rows.append({"problem": problem, "answer": str(2 * i), "another column": i})
        rates.append({"id": f"mine/{i}", "accuracy": i / 5})
    write_jsonl(tmp_path / "data.jsonl", rows)
    write_jsonl(tmp_path / "rates.jsonl", rates)
    write_jsonl(tmp_path / "suite.jsonl", [{"problem": "Tell me: how many IS 3, and 3?"}])
    monkeypatch.chdir(tmp_path)
    arguments = ["--data=data.jsonl", "--out=kept.jsonl", "--rates=rates.jsonl"]
    arguments += ["--against=amc=suite.jsonl", "--ngram=4"]
    monkeypatch.setattr(sys, "argv", ["filter", *arguments])

    filter.main()

    out, _ = capsys.readouterr()
    assert out == "6 rows, 2 too easy or too hard, 1 in a suite, 3 kept\n"
    kept = [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()]
    assert kept == [rows[1], rows[2], rows[4]]


# a whole evaluation


def test_the_suites_are_answered_and_written(tmp_path: Path, quick_runs: None) -> None:
    """Two sets of problems of the user's, by a model that knows nothing."""
    specs = []
    for name, sign in (("sums", "+"), ("products", "*")):
        lines = [json.dumps({"problem": f"{i} {sign} 1 =", "answer": "2"}) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        specs.append(f"{name}={tmp_path / name}.jsonl")
    model = servers.save_model(tmp_path / "model")
    arguments = ["--model", model, "--suite", ",".join(specs), "--out", str(tmp_path / "out")]
    changes = [
        "task.template=no",
        "rollout.max_new_tokens=4",
        "rollout.max_prompt_tokens=16",
        "rollout.num_slots=8",
        "rollout.page_size=8",
        "rollout.decode_steps=4",
        "eval.samples=2",
    ]
    arguments += [f"--config.{change}" for change in changes]

    found_specs, out, settings, *_ = evaluate.parse(arguments)
    summaries = evaluate.run(found_specs, out, settings)

    assert found_specs == specs
    assert list(summaries) == ["sums", "products"]
    for name, summary in summaries.items():
        assert summary["kinds"].keys() == {"avg@2", "greedy"}
        assert summary["problems"] == 3
        for kind, num_samples in (("avg@2", 2), ("greedy", 1)):
            text = (out / f"{name}-{kind}.jsonl").read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.splitlines()]
            assert [len(row["samples"]) for row in rows] == [num_samples] * 3
    written = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert written["suites"] == json.loads(json.dumps(summaries))
