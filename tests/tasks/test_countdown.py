"""Countdown: problems, published sets, grading, and the examples of the warm start."""

import functools
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import read_jsonl

from jzero import config
from jzero.model import tokenizer
from jzero.problems.prompts import COUNTDOWN_TEMPLATES
from jzero.tasks import TASKS, countdown, countdown_equations, countdown_warm_start
from jzero.types import Grade, Problem

ROOT = Path(__file__).resolve().parents[2]


def countdown_task(**options: float) -> config.TaskConfig:
    """Returns settings of the task with options."""
    return config.TaskConfig(options=tuple(f"{name}={value}" for name, value in options.items()))


SMALL = config.TaskConfig(template="plain", options=("value_max=12", "target_max=30"))
NO_FORMAT = config.TaskConfig(options=("format_score=0",))

# What makes two puzzles the same: the numbers in order of size, and the target.
Key = tuple[tuple[int, ...], int]


def key_of(numbers: list[int], target: int) -> Key:
    return tuple(sorted(numbers)), target


def keys_of(problems: list[Problem]) -> list[Key]:
    return [key_of(problem.gold["numbers"], problem.gold["target"]) for problem in problems]


# Problems


def results_of(a: Fraction, b: Fraction) -> set[Fraction]:
    """Returns the value of every operation on a and b, in this order."""
    results = {a + b, a - b, a * b}
    if b:
        results.add(a / b)
    return results


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Returns the values of all expressions that use all the numbers: the slow definition."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        others = tuple(number for k, number in enumerate(numbers) if k not in (i, j))
        for result in results_of(numbers[i], numbers[j]):
            values |= reachable((*others, result))
    return values


def test_problems_are_solvable_and_within_the_limits() -> None:
    task = countdown_task(numbers_min=2, numbers_max=4, value_max=25, target_max=40)

    problems = countdown.train_problems(task, seed=3, step=5, count=40)

    assert len(problems) == 40
    for problem in problems:
        numbers, target = problem.gold["numbers"], problem.gold["target"]
        assert 2 <= len(numbers) <= 4
        assert min(numbers) >= 1
        assert max(numbers) <= 25
        assert 1 <= target <= 40
        assert target in reachable(tuple(map(Fraction, numbers)))


def test_problems_are_a_function_of_seed_step_and_index() -> None:
    problems = countdown.train_problems(SMALL, seed=1, step=2, count=8)

    assert problems == countdown.train_problems(SMALL, seed=1, step=2, count=8)
    # Index 3 of step 2 is number 2 * 8 + 3 of all problems, however large the steps are.
    assert [problems[3]] == countdown.train_problems(SMALL, seed=1, step=2 * 8 + 3, count=1)
    assert problems != countdown.train_problems(SMALL, seed=2, step=2, count=8)


def test_ids_of_problems_do_not_repeat() -> None:
    problems = []
    for step in range(3):
        problems += countdown.train_problems(SMALL, seed=1, step=step, count=8)

    assert len({problem.id for problem in problems}) == 24


@pytest.fixture(scope="module")
def held_out() -> set[Key]:
    keys = set(keys_of(countdown.eval_problems(SMALL, 300)))
    assert len(keys) == 300, "held-out problems are not distinct"
    return keys


def test_held_out_problems_are_never_trained_on(held_out: set[Key]) -> None:
    trained: set[Key] = set()
    for step in range(40):
        trained.update(keys_of(countdown.train_problems(SMALL, 0, step, 64)))

    assert not held_out & trained


def test_held_out_problems_are_never_in_the_warm_start(held_out: set[Key]) -> None:
    shown: set[Key] = set()
    for index in range(2000):
        prompt, _ = countdown_warm_start.example(SMALL, seed=0, index=index, tries=3)
        shown.add(key_of(*read_prompt(prompt)))

    assert not held_out & shown


def test_the_held_out_share_is_as_stated() -> None:
    num_held_out = 0
    for last_number, target in itertools.product(range(99), range(99)):
        num_held_out += countdown.is_held_out((1, 2, last_number), target)

    assert abs(num_held_out / 99**2 - 1 / countdown.HELD_OUT_ONE_IN) < 0.025


def test_too_few_distinct_held_out_problems_are_an_error() -> None:
    task = countdown_task(numbers_min=2, numbers_max=2, value_max=3, target_max=3)

    with pytest.raises(ValueError, match=r"eval.problems=50 is more than the \d+ distinct"):
        countdown.eval_problems(task, 50)


def test_limits_that_no_problem_meets_are_an_error() -> None:
    task = countdown_task(value_max=1, numbers_min=2, numbers_max=2, target_max=0)

    with pytest.raises(ValueError, match="no countdown problem found"):
        countdown.train_problems(task, 0, 0, 1)


@pytest.mark.parametrize("template", COUNTDOWN_TEMPLATES)
def test_a_prompt_states_the_problem_and_ends_where_the_response_begins(template: str) -> None:
    prompt = countdown.render_prompt(template, [3, 7, 12], 16)

    assert isinstance(prompt, str)
    for number in ("3", "7", "12", "16"):
        assert number in prompt
    assert prompt.endswith("\n" if template == "plain" else "<think>")


# Published sets


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the files that `datasets` writes out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def puzzle_rows(count: int) -> list[dict[str, Any]]:
    return [{"nums": [i + 1, i + 2, 3], "target": 2 * i + 6} for i in range(count)]


def keys_of_rows(rows: list[dict[str, Any]]) -> set[Key]:
    return {key_of(row["nums"], row["target"]) for row in rows}


TRAIN_ROWS = puzzle_rows(100)
TEST_ROWS = puzzle_rows(15)[5:]  # which the train rows hold, too


def write_jsonl(path: Path) -> Path:
    """Writes the set with the other name of the column of numbers."""
    lines = []
    for row in TRAIN_ROWS:
        lines.append(json.dumps({"numbers": row["nums"], "target": row["target"]}))
    file = path.with_suffix(".jsonl")
    file.write_text("\n".join(lines))
    return file


def write_parquet(path: Path) -> Path:
    file = path.with_suffix(".parquet")
    datasets.Dataset.from_list(TRAIN_ROWS).to_parquet(file)
    return file


def write_directory(path: Path) -> Path:
    datasets.Dataset.from_list(TRAIN_ROWS).save_to_disk(path)
    return path


def write_arrow(path: Path) -> Path:
    [file] = write_directory(path).glob("*.arrow")
    return file


def write_splits(path: Path) -> Path:
    train = datasets.Dataset.from_list(TRAIN_ROWS)
    test = datasets.Dataset.from_list(TEST_ROWS)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    "write", [write_jsonl, write_parquet, write_arrow, write_directory, write_splits]
)
def test_a_published_set_is_split_and_shuffled(
    write: Callable[[Path], Path], tmp_path: Path, datasets_cache: None
) -> None:
    task = config.TaskConfig(data=str(write(tmp_path / "set")))
    all_keys = keys_of_rows(TRAIN_ROWS)
    if write is write_splits:
        held_out = keys_of_rows(TEST_ROWS)
    else:
        held_out = {key for key in all_keys if countdown.is_held_out(*key)}
    epoch_size = len(all_keys - held_out)

    evaluated = keys_of(countdown.eval_problems(task, len(held_out)))
    first_epoch = keys_of(countdown.train_problems(task, 0, 1, epoch_size))
    second_epoch = keys_of(countdown.train_problems(task, 0, 2, epoch_size))

    assert set(evaluated) == held_out
    assert set(first_epoch) == set(second_epoch) == all_keys - held_out
    assert first_epoch != second_epoch
    with pytest.raises(ValueError, match="is more than the"):
        countdown.eval_problems(task, 100)

    # The problems of a step are the same as those of as many steps of one problem.
    quarter = epoch_size // 4
    steps_of_one = []
    for index in range(3 * quarter + 1, 4 * quarter + 1):
        steps_of_one += countdown.train_problems(task, 0, index, 1)
    assert countdown.train_problems(task, 0, 4, quarter) == steps_of_one


def test_the_rows_to_train_on_can_be_chosen_and_counted(
    tmp_path: Path, datasets_cache: None
) -> None:
    task = config.TaskConfig(data=f"rows('{write_splits(tmp_path / 'set')}',limit=10)")
    first_ten = keys_of_rows(TRAIN_ROWS[:10]) - keys_of_rows(TEST_ROWS)

    trained = keys_of(countdown.train_problems(task, 0, 0, 100))

    assert set(trained) == first_ten
    assert TASKS["countdown"].num_train_problems(task) == len(first_ten)
    assert TASKS["countdown"].num_train_problems(config.TaskConfig()) is None


def test_a_published_set_may_have_prompts_of_its_own(tmp_path: Path, datasets_cache: None) -> None:
    lines = []
    for row in puzzle_rows(50):
        gold = json.dumps({"target": row["target"], "numbers": row["nums"]})
        lines.append(json.dumps({"input": f"prompt {gold}", "gt_answer": gold}))
    data = tmp_path / "set.json"
    data.write_text("\n".join(lines))

    [problem] = countdown.train_problems(config.TaskConfig(data=str(data)), 0, 0, 1)

    assert isinstance(problem.prompt, str)
    assert json.loads(problem.prompt.removeprefix("prompt ")) == problem.gold


def test_a_published_set_that_does_not_exist_is_an_error(datasets_cache: None) -> None:
    task = config.TaskConfig(data="/no/such.jsonl")

    with pytest.raises(ValueError, match="data /no/such.jsonl cannot be loaded"):
        countdown.train_problems(task, 0, 0, 1)


def test_a_published_set_of_another_task_is_an_error(tmp_path: Path, datasets_cache: None) -> None:
    data = tmp_path / "set.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')

    with pytest.raises(ValueError, match="countdown needs nums"):
        countdown.eval_problems(config.TaskConfig(data=str(data)), 1)


# Grading


def grade(
    response: str, numbers: list[int], target: int, task: config.TaskConfig = NO_FORMAT
) -> Grade:
    return countdown.grade(response, {"numbers": numbers, "target": target}, task)


@pytest.mark.parametrize(
    ("response", "score", "reason"),
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
def test_a_response_has_the_score_and_the_reason(response: str, score: float, reason: str) -> None:
    task = countdown_task(format_score=0.1)

    result = grade(response, [3, 7, 12], 16, task)

    assert result.score == score
    assert result.correct == (score == 1.0)
    assert result.reason == reason


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>12+(7-3)</answer>", 1.0),
        ("<answer>12+7+3</answer>", 0.1),
        ("<answer>twelve</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>" + "1+" * 500 + "1</answer>", 0.1),
        ("12+(7-3)", 0.0),
    ],
)
def test_the_rewards_of_oat_pay_for_any_answer_in_its_tags(response: str, score: float) -> None:
    task = countdown_task(format_score=0.1, malformed_score=0.1)
    assert grade(response, [3, 7, 12], 16, task).score == score


def test_division_is_exact() -> None:
    # In floating point the first value misses its target. A tolerance that forgives this would
    # accept the second value, which is wrong by 1.1e-6.
    exact = grade("<answer>8/(3-8/3)</answer>", [8, 3, 8, 3], 24)
    near = grade("<answer>98-1/(96*97*95)</answer>", [98, 1, 96, 97, 95], 98)
    by_zero = grade("<answer>5/(3-3)</answer>", [5, 3, 3], 0)

    assert exact.correct
    assert not near.correct
    assert by_zero.reason == "wrong value"


def response_of_case(case: dict[str, Any]) -> str:
    """Returns the response of a case: a text, or pieces of text with how often they repeat."""
    if "prediction_rle" not in case:
        return case["prediction"]
    return "".join(text * count for text, count in case["prediction_rle"])


def test_hard_cases_have_the_expected_scores(shared: Path) -> None:
    cases = read_jsonl(shared / "data/grader/hard_cases.jsonl")
    cases = [case for case in cases if case["task"] == "countdown"]

    assert len(cases) == 133
    for case in cases:
        result = countdown.grade(response_of_case(case), case["meta"], NO_FORMAT)
        assert result.score == case["expected"], case


def test_known_solutions_are_correct(shared: Path) -> None:
    rows = read_jsonl(shared / "data/countdown/test.jsonl")

    assert rows
    for row in rows:
        result = grade(f"<answer>{row['solution']}</answer>", row["numbers"], row["target"])
        assert result.score == 1.0, row


class Negation(NamedTuple):
    operand: "Expression"


class Operation(NamedTuple):
    left: "Expression"
    symbol: str
    right: "Expression"


Expression = int | Negation | Operation


def text_of(expression: Expression) -> str:
    if isinstance(expression, int):
        return str(expression)
    if isinstance(expression, Negation):
        return f"-{text_of(expression.operand)}"
    return f"({text_of(expression.left)}{expression.symbol} {text_of(expression.right)})"


def numbers_in(expression: Expression) -> list[int]:
    if isinstance(expression, int):
        return [expression]
    if isinstance(expression, Negation):
        return numbers_in(expression.operand)
    return numbers_in(expression.left) + numbers_in(expression.right)


def larger_expressions(
    smaller: st.SearchStrategy[Expression],
) -> st.SearchStrategy[Expression]:
    operations = st.builds(Operation, smaller, st.sampled_from("+-*/"), smaller)
    return operations | st.builds(Negation, smaller)


EXPRESSIONS = st.recursive(st.integers(0, 99), larger_expressions, max_leaves=8)


def value_by_python(text: str) -> Fraction | None:
    """Evaluates the text with Python's own parser, with Fractions in place of its integers."""
    fractions = re.sub(r"\d+", r"Fraction(\g<0>)", text)
    try:
        return eval(fractions, {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


@given(EXPRESSIONS)
def test_parsing_agrees_with_python_on_fractions(expression: Expression) -> None:
    text = text_of(expression)

    numbers, value = countdown_equations.parse_expression(text)

    assert value == value_by_python(text)
    assert sorted(numbers) == sorted(numbers_in(expression))


WRAPPINGS = [
    "{e}.",
    "${e}$",
    "$${e}$$.",
    "\\({e}\\)",
    "\\[ {e} \\]",
    "`{e}`",
    "**{e}**",
    "\\boxed{{{e}}}",
    "$\\boxed{{{e}}}$.",
    "```\n{e}\n```",
    "x = {e}",
    "Answer = {e} = {t}",
    "{e} = {t}.",
    "{t} = {e}",
    "${e} = {t}$",
    "**${e}$** = {t}",
    "$x = {e}$",
]


@given(EXPRESSIONS, st.sampled_from(WRAPPINGS))
def test_a_wrapped_expression_is_paid_if_it_is_the_solution(
    expression: Expression, wrapping: str
) -> None:
    text = text_of(expression)
    value = value_by_python(text)
    numbers = numbers_in(expression)
    is_solvable = value is not None and value.denominator == 1 and value >= 0
    target = int(value) if value is not None and is_solvable else 7

    def is_paid(target: int, numbers: list[int], named: int) -> bool:
        answer = wrapping.format(e=text, t=named)
        return grade(f"<answer>{answer}</answer>", numbers, target).correct

    assert is_paid(target, numbers, target) == is_solvable
    assert not is_paid(target + 1, numbers, target)
    assert not is_paid(target + 1, numbers, target + 1)
    assert not is_paid(target, [*numbers, 1], target)


@pytest.mark.parametrize(
    "answer",
    [
        "x=y=12+7-3",
        "16=16=12+7-3",
        "$12$+7-3",
        "12.+7-3",
        "\\boxed{12}+7-3",
        "1\\,2+7-3",
        "12+7-3 16",
        "x = 16",
        "16",
        "x16 = 12+7-3",
        "12+7-3 or 16",
    ],
)
def test_another_text_around_an_expression_is_not_paid(answer: str) -> None:
    assert grade(f"<answer>{answer}</answer>", [3, 7, 12], 16).score == 0.0


@given(st.text(alphabet="0123456789+-*/()= \n{}\\fractimesdvo<>answer", max_size=60))
def test_grading_never_raises(text: str) -> None:
    answer = grade(f"<answer>{text}</answer>", [3, 7, 12], 16)
    no_answer = grade(text, [3, 7, 12], 16)

    assert answer.score in (0.0, 1.0)
    assert no_answer.score == 0.0


# Warm start


class Example(NamedTuple):
    """An example of the warm start, in its parts."""

    numbers: list[int]
    target: int
    response: str
    lines: list[str]  # of the response: one for every try
    answer: str  # the last line of the response

    @property
    def claims_success(self) -> bool:
        return self.lines[-1].endswith(" yes")


def read_prompt(prompt: str) -> tuple[list[int], int]:
    """Returns the numbers and the target of a prompt of template plain."""
    numbers, _, target = prompt.strip().partition("=")
    return [int(number) for number in numbers.split()], int(target)


@functools.cache
def examples(tries: int) -> list[Example]:
    """Returns 500 examples with about `tries` tries."""
    found = []
    for index in range(500):
        prompt, response = countdown_warm_start.example(SMALL, 7, index, tries)
        numbers, target = read_prompt(prompt)
        *lines, answer = response.split("\n")
        found.append(Example(numbers, target, response, lines, answer))
    return found


def calculate(a: int, symbol: str, b: int) -> Fraction:
    if symbol == "+":
        return Fraction(a) + b
    if symbol == "-":
        return Fraction(a) - b
    if symbol == "*":
        return Fraction(a) * b
    return Fraction(a) / b


def check_steps(steps: str, numbers: list[int]) -> int:
    """Asserts that the steps of a try are right and use every number; returns the try's value."""
    remaining = list(numbers)
    for left, symbol, right, result in re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", steps):
        a, b, value = int(left), int(right), int(result)
        remaining.remove(a)
        remaining.remove(b)
        assert calculate(a, symbol, b) == value
        assert value <= countdown_warm_start.LARGEST_INTERMEDIATE
        remaining.append(value)
    assert len(remaining) == 1
    return remaining[0]


@pytest.mark.parametrize("tries", [1, 3])
def test_warm_start_examples_are_a_function_of_seed_and_index(tries: int) -> None:
    for index in range(500):
        example = countdown_warm_start.example(SMALL, 7, index, tries)
        assert example == countdown_warm_start.example(SMALL, 7, index, tries)


@pytest.mark.parametrize(("tries", "most_lines"), [(1, 1), (3, countdown_warm_start.MOST_TRIES)])
def test_warm_start_examples_have_some_distinct_tries(tries: int, most_lines: int) -> None:
    num_repeated = 0
    for example in examples(tries):
        assert 1 <= len(example.lines) <= most_lines
        num_repeated += len(example.lines) - len(set(example.lines))

    # A try may repeat where a few draws found no other one.
    assert num_repeated <= 2


@pytest.mark.parametrize("tries", [1, 3])
def test_warm_start_tries_are_right_about_their_steps_and_verdicts(tries: int) -> None:
    for example in examples(tries):
        for line in example.lines:
            steps, verdict = line.split(" ")
            value = check_steps(steps, example.numbers)
            assert steps.endswith(f"?{example.target}")
            assert verdict == ("yes" if value == example.target else "no")
            assert verdict == "no" or line == example.lines[-1]


@pytest.mark.parametrize("tries", [1, 3])
def test_warm_start_answers_are_graded_as_the_last_verdict_says(tries: int) -> None:
    num_solved = 0
    for example in examples(tries):
        result = grade(example.response, example.numbers, example.target)
        assert example.answer == f"<answer>{countdown.extract_answer(example.response)}</answer>"
        assert result.reason == ("correct" if example.claims_success else "wrong value")
        num_solved += result.correct

    assert 100 < num_solved < 250


@pytest.mark.parametrize("tries", [1, 3])
def test_warm_start_responses_are_no_longer_than_the_bound(tries: int) -> None:
    tok = tokenizer.countdown()
    most_tokens = countdown_warm_start.max_tokens(SMALL, 3)

    for example in examples(tries):
        assert len(tokenizer.encode(tok, example.response)) <= most_tokens


def test_warm_start_closes_the_thoughts_that_the_template_opens() -> None:
    task = config.TaskConfig(template="r1")

    prompt, response = countdown_warm_start.example(task, 0, 0, 2)

    assert prompt.endswith("<think>")
    assert "\n</think>\n<answer>" in response


def test_attempts_stay_within_bounds() -> None:
    rng = random.Random(0)
    for _ in range(300):
        attempt = countdown.random_attempt([99, 98, 97, 5], rng, 999)

        assert 0 <= attempt.value <= 999
        assert len(attempt.steps) == 3
        _, value = countdown_equations.parse_expression(attempt.expression)
        assert value == attempt.value


# The module


def test_tasks_and_graders_import_no_jax() -> None:
    code = "import sys, jzero.tasks, jzero.workers.pool; sys.exit('jax' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)

    assert done.returncode == 0


def test_countdown_is_in_the_table_of_tasks() -> None:
    assert "countdown" in TASKS
