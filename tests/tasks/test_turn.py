"""A turn of an episode: every task is an environment that takes a step and may reply."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jzero.config import TaskConfig
from jzero.environments.tools.calling import ToolUse
from jzero.environments.tools.episodes import ToolTurn
from jzero.tasks import turn
from jzero.types import Grade

OWN_TASK = """
from jzero.tasks import TASKS
from jzero.types import Grade

def grade(response, gold, task):
    return Grade(float(len(response)), response == gold, "seen", parts={"letters": len(response)})

def reply(gold, turns, task):
    return [{"role": "user", "content": f"{len(turns)} {turns[-1][1].score}"}]

def broken(gold, turns, task):
    return 3

TASK = TASKS["gsm8k"]._replace(grade=grade, reply=reply)
BROKEN = TASK._replace(reply=broken)
"""


@contextlib.contextmanager
def unguarded(function: str, grade: Grade) -> Iterator[None]:
    yield


def item(name: str, response: str, gold: Any, **changes: Any) -> turn.Item:
    values = {"earlier": None, "episode": {}} | changes
    task = TaskConfig(name=name, template="qwen_math")
    return turn.Item(name, response, gold, task, **values)


def test_a_single_turn_task_is_an_environment_of_one_step() -> None:
    asked = item("gsm8k", r"It is \boxed{7}.", {"answer": "7", "question": ""})
    taker = turn.find_environment(asked, turn.call_tools(asked, unguarded), unguarded)
    assert isinstance(taker, turn.TaskEnvironment)
    grade = turn.answer(asked, unguarded)
    assert (grade.score, grade.correct, grade.reply) == (1.0, True, None)


@pytest.mark.parametrize(("answer", "is_right"), [("7", True), ("8", False)])
def test_math_multiturn_replies_to_what_its_step_is_worth(answer: str, is_right: bool) -> None:
    response = rf"It is \boxed{{{answer}}}."
    grade = turn.answer(
        item("math_multiturn", response, {"answer": "7", "question": ""}, earlier=[]), unguarded
    )
    words = TaskConfig().feedback_right if is_right else TaskConfig().feedback_wrong
    assert (grade.correct, grade.reply) == (is_right, words)
    last = turn.answer(
        item("math_multiturn", response, {"answer": "7", "question": ""}, earlier=None), unguarded
    )
    assert (last.correct, last.reply) == (is_right, None)


def test_a_task_of_ones_own_keeps_its_parts_and_replies_with_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters_task.py").write_text(OWN_TASK)
    (tmp_path / "broken_task.py").write_text(OWN_TASK.replace("BROKEN =", "TASK ="))
    monkeypatch.syspath_prepend(str(tmp_path))

    earlier = [("a", Grade(1.0, False, "seen"))]
    grade = turn.answer(item("letters_task", "abc", "abc", earlier=earlier), unguarded)
    assert (grade.score, grade.parts) == (3.0, {"letters": 3.0})
    assert grade.reply == [{"role": "user", "content": "2 3.0"}]

    with pytest.raises(TypeError, match="the reply is 3: it has to be text, chat messages"):
        turn.answer(item("broken_task", "abc", "abc", earlier=[]), unguarded)


def test_an_instance_elsewhere_has_taken_the_step() -> None:
    graded = vars(Grade(0.5, True, "stepped", reply="go on", parts={"environment.x": 1.0}))
    asked = item("environment", "left", {}, earlier=[], episode={"graded": graded, "turns": []})
    grade = turn.answer(asked, unguarded)
    assert (grade.score, grade.reply, grade.parts) == (0.5, "go on", {"environment.x": 1.0})


def test_an_episode_that_ends_with_a_call_has_no_answer() -> None:
    message = {"role": "tool", "content": "42"}
    called = ToolTurn([message], ToolUse(2, 1, 0.25), None)
    taker = turn.find_environment(
        item("gsm8k", "<tool_call>", {"answer": "7", "question": ""}), called, unguarded
    )
    assert isinstance(taker, turn.ToolsAlone)
    grade = taker.step()
    assert (grade.score, grade.correct, grade.reason) == (0.0, False, "called tools")
    assert (grade.tool_calls, grade.failed_tool_calls, grade.tool_seconds) == (2, 1, 0.25)
    assert taker.reply(grade) is None
