"""The lenient verifier of GSM8K: the last number of a response, compared as text."""

import time

import pytest

from jzero.answers.published.oat import grade_last_number as grade
from jzero.config import TaskConfig
from jzero.tasks import TASKS


@pytest.mark.parametrize(
    ("response", "gold", "correct"),
    [
        ("There are 72", "72", True),
        ("There are 72.", "72", True),  # the end of a sentence
        ("First 5, then 72 apples", "72", True),
        ("It is 72, not 5", "72", False),
        ("It costs $1,234", "1234", True),
        ("It costs 1234", "1,234", True),
        ("-3", "-3", True),
        ("It is .5", ".5", True),
        ("2e-3", "2e-3", True),
        ("72.0", "72", False),  # compared as text
        ("#### 72", 72, True),
        ("\\boxed{72}", ["71", "72"], True),
    ],
)
def test_the_last_number_is_the_answer(response: str, gold: object, correct: bool) -> None:
    assert grade(response, gold).correct == correct
    assert grade(response, gold).score == float(correct)


def test_a_response_without_a_number_has_no_answer() -> None:
    assert grade("I do not know.", "72").reason == "no answer"
    assert grade("72", None).reason == "no gold"


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_it_is_a_verifier_that_needs_no_mark(task: str) -> None:
    gold = {"answer": "72", "question": "How many?"}
    lenient = TaskConfig(name=task, template="qwen_math", verifier="last_number")
    strict = TaskConfig(name=task, template="qwen_math")

    assert TASKS[task].grade("She has 72 apples.", gold, lenient).correct
    assert not TASKS[task].grade("She has 72 apples.", gold, strict).correct


@pytest.mark.parametrize("text", ["1" * 10**6, "1e" * 10**6, "+-" * 10**6, "1," * 10**6])
def test_long_responses_take_linear_time(text: str) -> None:
    start = time.process_time()
    grade(text, "1")
    assert time.process_time() - start < 5
