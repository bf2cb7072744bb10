"""Countdown: problems, published sets, grading, and the warm start's text."""

import itertools
import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import config
from jzero.model import tokenizer
from jzero.tasks import TASKS, countdown, countdown_equations, countdown_warm_start
from jzero.tasks.prompts import COUNTDOWN_TEMPLATES

DATA = Path(__file__).resolve().parents[3] / "shared/data"
SMALL = config.TaskConfig(template="plain", value_max=12, target_max=30)
NO_FORMAT = config.TaskConfig(format_score=0.0)


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of every expression that uses all the numbers: the slow definition."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        a, b = numbers[i], numbers[j]
        for value in {a + b, a - b, a * b, *([a / b] if b else [])}:
            values |= reachable((*rest, value))
    return values


def key(problem):
    return tuple(sorted(problem.gold["numbers"])), problem.gold["target"]


def test_problems_are_solvable_and_within_the_limits():
    task = config.TaskConfig(numbers_min=2, numbers_max=4, value_max=25, target_max=40)
    for problem in countdown.train_problems(task, seed=3, step=5, count=40):
        numbers, target = problem.gold["numbers"], problem.gold["target"]
        assert (
            2 <= len(numbers) <= 4
            and min(numbers) >= 1
            and max(numbers) <= 25
            and 1 <= target <= 40
        )
        assert target in reachable(tuple(map(Fraction, numbers)))


def test_problems_are_a_function_of_seed_step_and_index():
    problems = countdown.train_problems(SMALL, 1, 2, 8)
    assert problems == countdown.train_problems(SMALL, 1, 2, 8)
    assert problems[3] == countdown.train_problems(SMALL, 1, 2 * 8 + 3, 1)[0]
    assert problems != countdown.train_problems(SMALL, 2, 2, 8)
    assert (
        len({p.id for step in range(3) for p in countdown.train_problems(SMALL, 1, step, 8)}) == 24
    )


def test_held_out_problems_are_distinct_and_never_trained_on():
    held_out = {key(p) for p in countdown.eval_problems(SMALL, 300)}
    assert len(held_out) == 300
    trained = {key(p) for step in range(40) for p in countdown.train_problems(SMALL, 0, step, 64)}
    shown = {countdown_warm_start.example(SMALL, 0, i, 3)[0] for i in range(2000)}
    warm = {
        (tuple(sorted(map(int, n.split()))), int(t))
        for n, t in (p.strip().split("=") for p in shown)
    }
    assert not held_out & (trained | warm)
    share = sum(
        map(
            lambda k: countdown.is_held_out(*k),
            itertools.product([(1, 2, n) for n in range(99)], range(99)),
        )
    )
    assert abs(share / 99**2 - 1 / countdown.HELD_OUT_ONE_IN) < 0.025


def test_a_space_that_is_too_small_is_an_error():
    tiny = config.TaskConfig(numbers_min=2, numbers_max=2, value_max=3, target_max=3)
    with pytest.raises(ValueError, match=r"eval.problems=50 is more than the \d+ distinct"):
        countdown.eval_problems(tiny, 50)
    with pytest.raises(ValueError, match="no countdown problem found"):
        countdown.train_problems(
            config.TaskConfig(value_max=1, numbers_min=2, numbers_max=2, target_max=0), 0, 0, 1
        )


@pytest.mark.parametrize("template", COUNTDOWN_TEMPLATES)
def test_a_prompt_states_the_problem_and_ends_where_the_response_begins(template):
    prompt = countdown.render_prompt(template, [3, 7, 12], 16)
    assert all(n in prompt for n in ("3", "7", "12", "16"))
    assert prompt.endswith("\n" if template == "plain" else "<think>")


# Published sets


def rows(count: int) -> list[dict]:
    return [{"nums": [i + 1, i + 2, 3], "target": 2 * i + 6} for i in range(count)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "directory", "splits"])
def test_published_set(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / f"set.{kind}"
    dataset = datasets.Dataset.from_list(rows(100))
    if kind == "jsonl":
        data.write_text(
            "\n".join(json.dumps({"numbers": r["nums"], "target": r["target"]}) for r in rows(100))
        )
    elif kind == "parquet":
        dataset.to_parquet(data)
    elif kind == "arrow":
        dataset.save_to_disk(tmp_path / "saved")
        data = next((tmp_path / "saved").glob("*.arrow"))
    elif kind == "directory":
        dataset.save_to_disk(data)
    else:
        test = datasets.Dataset.from_list(rows(15)[5:])
        datasets.DatasetDict({"train": dataset, "test": test}).save_to_disk(data)
    task = config.TaskConfig(data=str(data))
    every = {key_of(r["nums"], r["target"]) for r in rows(100)}
    if kind == "splits":
        held_out = {key_of(r["nums"], r["target"]) for r in rows(15)[5:]}
    else:
        held_out = {k for k in every if countdown.is_held_out(*k)}
    assert {key(p) for p in countdown.eval_problems(task, len(held_out))} == held_out
    epoch = len(every - held_out)
    first, second = (
        countdown.train_problems(task, 0, 0, epoch),
        countdown.train_problems(task, 0, 1, epoch),
    )
    assert {key(p) for p in first} == {key(p) for p in second} == every - held_out
    assert [key(p) for p in first] != [key(p) for p in second]
    assert countdown.train_problems(task, 0, 3, epoch // 4) == [
        countdown.train_problems(task, 0, i, 1)[0]
        for i in range(3 * (epoch // 4), 4 * (epoch // 4))
    ]
    with pytest.raises(ValueError, match="is more than the"):
        countdown.eval_problems(task, 100)


def key_of(numbers, target):
    return tuple(sorted(numbers)), target


def test_published_set_with_its_own_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "set.json"
    golds = [json.dumps({"target": r["target"], "numbers": r["nums"]}) for r in rows(50)]
    data.write_text("\n".join(json.dumps({"input": f"prompt {g}", "gt_answer": g}) for g in golds))
    problem = countdown.train_problems(config.TaskConfig(data=str(data)), 0, 0, 1)[0]
    assert json.loads(problem.prompt.removeprefix("prompt ")) == problem.gold


def test_published_set_errors_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ValueError, match="data /no/such.jsonl cannot be loaded"):
        countdown.train_problems(config.TaskConfig(data="/no/such.jsonl"), 0, 0, 1)
    data = tmp_path / "set.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(ValueError, match="countdown needs nums"):
        countdown.eval_problems(config.TaskConfig(data=str(data)), 1)


# Grading


def grade(response, numbers, target, task=NO_FORMAT):
    return countdown.grade(response, {"numbers": numbers, "target": target}, task)


@pytest.mark.parametrize(
    "response, score, reason",
    [
        ("<answer>12+(7-3)</answer>", 1.0, "correct"),
        ("x</think><answer> 12 + 7 - 3 = 16 </answer> done", 1.0, "correct"),
        ("<answer>16=12+7−3</answer>", 1.0, "correct"),
        ("<answer>1</answer><answer>12+7-3</answer>", 1.0, "correct"),
        ("<answer>12+7-3</answer><answer>12", 1.0, "correct"),
        ("<answer>12+7+3</answer>", 0.1, "wrong value"),
        ("<answer>12+4</answer>", 0.1, "wrong numbers"),
        ("<answer>12/(7-7)*3</answer>", 0.1, "wrong numbers"),
        ("<answer>12+7-3=17</answer>", 0.0, "malformed"),
        ("<answer>12+7-3=16=16</answer>", 0.0, "malformed"),
        ("<answer>12 7 3</answer>", 0.0, "malformed"),
        ("<answer></answer>", 0.0, "malformed"),
        ("<answer>" + "(" * 40 + "12" + ")" * 40 + "+7-3</answer>", 0.0, "malformed"),
        ("<answer>12+7-3" + " " * 500 + "*1</answer>", 0.0, "too long"),
        ("12+7-3", 0.0, "no answer"),
        ("</answer>12+7-3<answer>", 0.0, "no answer"),
        ("<answer>12+7-3</answer></think>", 0.0, "no answer"),
        ("", 0.0, "no answer"),
    ],
)
def test_scores(response, score, reason):
    result = grade(response, [3, 7, 12], 16, config.TaskConfig(format_score=0.1))
    assert (result.score, result.correct, result.reason) == (score, score == 1.0, reason)


def test_division_is_exact():
    assert grade("<answer>8/(3-8/3)</answer>", [8, 3, 8, 3], 24).correct
    assert not grade("<answer>98-1/(96*97*95)</answer>", [98, 1, 96, 97, 95], 98).correct
    assert grade("<answer>5/(3-3)</answer>", [5, 3, 3], 0).reason == "wrong value"


def load_jsonl(path):
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_hard_cases():
    cases = [c for c in load_jsonl(DATA / "grader/hard_cases.jsonl") if c["task"] == "countdown"]
    assert len(cases) == 133
    for case in cases:
        response = (
            "".join(a * b for a, b in case["prediction_rle"])
            if "prediction_rle" in case
            else case["prediction"]
        )
        assert countdown.grade(response, case["meta"], NO_FORMAT).score == case["expected"], case


def test_known_solutions():
    for row in load_jsonl(DATA / "countdown/test.jsonl"):
        assert (
            grade(f"<answer>{row['solution']}</answer>", row["numbers"], row["target"]).score == 1.0
        )


trees = st.recursive(
    st.integers(0, 99),
    lambda t: st.tuples(t, st.sampled_from("+-*/"), t) | st.tuples(st.just("-"), t),
    max_leaves=8,
)


def written(tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    return (
        "-" + written(tree[1])
        if len(tree) == 2
        else f"({written(tree[0])}{tree[1]} {written(tree[2])})"
    )


def leaves(tree) -> list[int]:
    return (
        [tree]
        if isinstance(tree, int)
        else [n for part in tree if not isinstance(part, str) for n in leaves(part)]
    )


@given(trees)
def test_grading_agrees_with_python_on_fractions(tree):
    """Python's own parser over the same text, integers turned into Fractions."""
    text = written(tree)
    try:
        value = eval(re.sub(r"\d+", r"F(\g<0>)", text), {"F": Fraction})
    except ZeroDivisionError:
        value = None
    numbers, parsed = countdown_equations.parse_expression(text)
    assert parsed == value and sorted(numbers) == sorted(leaves(tree))


@given(st.text(alphabet="0123456789+-*/()= \n{}\\fractimesdvo<>answer", max_size=60))
def test_grading_never_raises(text):
    assert grade(f"<answer>{text}</answer>", [3, 7, 12], 16).score in (0.0, 1.0)
    assert grade(text, [3, 7, 12], 16).score == 0.0


# Warm start


@pytest.mark.parametrize("tries", [1, 3])
def test_warm_start_examples_are_right_about_everything_but_the_solution(tries):
    tok = tokenizer.countdown()
    solved = repeated = 0
    for i in range(500):
        prompt, response = countdown_warm_start.example(SMALL, 7, i, tries)
        assert (prompt, response) == countdown_warm_start.example(SMALL, 7, i, tries)
        numbers, target = prompt.strip().split("=")
        *lines, answer = response.split("\n")
        assert 1 <= len(lines) <= (1 if tries == 1 else countdown_warm_start.MOST_TRIES)
        repeated += len(lines) - len(set(lines))
        for line in lines:
            steps, verdict = line.split(" ")
            assert steps.endswith(f"?{target}")
            left = sorted(map(int, numbers.split()))
            for a, op, b, value in re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", steps):
                left.remove(int(a))
                left.remove(int(b))
                exact = {
                    "+": Fraction.__add__,
                    "-": Fraction.__sub__,
                    "*": Fraction.__mul__,
                    "/": Fraction.__truediv__,
                }
                assert (
                    exact[op](Fraction(a), Fraction(b))
                    == int(value)
                    <= countdown_warm_start.LARGEST_INTERMEDIATE
                )
                left.append(int(value))
            assert len(left) == 1 and verdict == ("yes" if left[0] == int(target) else "no")
            assert verdict == "no" or line == lines[-1]
        result = grade(response, list(map(int, numbers.split())), int(target))
        assert answer == f"<answer>{countdown.extract_answer(response)}</answer>"
        assert result.reason == ("correct" if verdict == "yes" else "wrong value")
        solved += result.correct
        assert len(tokenizer.encode(tok, response)) <= countdown_warm_start.max_tokens(SMALL, 3)
    assert 100 < solved < 250 and repeated <= 2


def test_warm_start_closes_the_thoughts_that_the_template_opens():
    prompt, response = countdown_warm_start.example(config.TaskConfig(template="r1"), 0, 0, 2)
    assert prompt.endswith("<think>") and "\n</think>\n<answer>" in response


def test_attempts_stay_within_bounds():
    rng = random.Random(0)
    for _ in range(300):
        found = countdown.random_attempt([99, 98, 97, 5], rng, 999)
        assert 0 <= found.value <= 999 and len(found.steps) == 3
        assert countdown_equations.parse_expression(found.expression)[1] == found.value


def test_tasks_and_graders_import_no_jax():
    code = "import sys, jzero.tasks, jzero.grading.pool; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(TASKS) >= {"countdown"}
