"""Texts written backwards: problems, scores, and the examples of the warm start."""

import difflib
import random

import pytest

from jzero.config import TaskConfig
from jzero.errors import UserError
from jzero.tasks import check_task_settings, find_task, reverse_text
from jzero.tasks.reverse_text import WORDS
from jzero.types import JsonValue

PLAIN = TaskConfig(name="reverse_text", template="plain")
CHAT = TaskConfig(name="reverse_text", template="chat")


def texts(seed: int, step: int, task: TaskConfig = PLAIN) -> list[str]:
    return [
        str(problem.gold)[::-1] for problem in reverse_text.train_problems(task, seed, step, 64)
    ]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 5), (40, 40)])
def test_a_text_has_as_many_words_as_the_options_say(least: int, most: int) -> None:
    options = (f"words_min={least}", f"words_max={most}")
    numbers = set()
    for text in texts(0, 3, TaskConfig(name="reverse_text", template="plain", options=options)):
        words = text.split(" ")
        assert set(words) <= set(WORDS)
        numbers.add(len(words))
    assert min(numbers) >= least and max(numbers) <= most
    assert numbers == set(range(least, most + 1))


def test_steps_seeds_and_splits_have_other_texts() -> None:
    assert texts(0, 1) == texts(0, 1)
    held_out = [str(problem.gold)[::-1] for problem in reverse_text.eval_problems(PLAIN, 64)]
    for other in (texts(0, 2), texts(1, 1), held_out):
        assert not set(other) & set(texts(0, 1))


def test_contradicting_options_are_refused() -> None:
    options = ("words_min=4", "words_max=3")
    task = TaskConfig(name="reverse_text", template="plain", options=options)
    with pytest.raises(UserError, match="words_min=4 is above words_max=3: lower words_min"):
        check_task_settings(task, 1)


def test_the_prompt_has_the_text_and_the_gold_is_its_reverse() -> None:
    for task in (PLAIN, CHAT):
        for problem in reverse_text.train_problems(task, 0, 0, 8):
            assert str(problem.gold)[::-1] in str(problem.prompt)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("won aet", 1.0),
        (" won aet\n", 1.0),
        ("won", 2 * 3 / (3 + 7)),
        ("tea now", difflib.SequenceMatcher(None, "tea now", "won aet").ratio()),
        ("", 0.0),
        ("xyz", 0.0),
        ("won aet" * 3, 0.0),
    ],
)
def test_the_score_is_the_similarity(response: str, expected: float) -> None:
    plain = reverse_text.grade(response, "won aet", PLAIN)
    assert plain.score == pytest.approx(expected)
    assert plain.correct == (response.strip() == "won aet")
    tagged = f"So:\n<reversed_text>{response}</reversed_text>"
    assert reverse_text.grade(tagged, "won aet", CHAT).score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("won aet", 0.0),  # no tags
        ("<reversed_text>won aet", 0.0),
        ("<reversed_text>x</reversed_text> no: <reversed_text>won aet</reversed_text>", 1.0),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_in_a_chat_the_last_text_between_tags_counts(response: str, score: float) -> None:
    assert reverse_text.grade(response, "won aet", CHAT).score == score


def test_random_responses_are_scored_from_zero_to_one_and_only_the_answer_is_right() -> None:
    rng = random.Random(0)
    for problem in reverse_text.train_problems(PLAIN, 0, 0, 200):
        gold: JsonValue = problem.gold
        shuffled = "".join(rng.sample(str(gold), len(str(gold))))
        grade = reverse_text.grade(shuffled, gold, PLAIN)
        assert 0 <= grade.score <= 1
        assert grade.correct == (shuffled.strip() == gold) == (grade.score == 1)


def test_a_warm_start_example_is_right_and_fits() -> None:
    task = find_task("reverse_text")
    assert task.warm_start is not None
    for index in range(200):
        prompt, response = task.warm_start(PLAIN, 0, index, 1.0)
        assert reverse_text.grade(response, prompt.rstrip("\n")[::-1], PLAIN).correct
        assert len(response) + 1 <= task.warm_start_tokens(PLAIN, 1.0)
