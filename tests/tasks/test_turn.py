"""A turn of an episode: every task is an environment that takes a step and may reply."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jzero.config import TaskConfig, ToolsConfig
from jzero.tasks import turn
from jzero.types import Grade
from jzero.workers.pipe import TurnRequest

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


def ask(name: str, response: str, gold: Any, **changes: Any) -> TurnRequest:
    task = TaskConfig(name=name, template="qwen_math")
    return TurnRequest(name, response, gold, task, **changes)


def test_a_single_turn_task_is_an_environment_of_one_step() -> None:
    asked = ask("gsm8k", r"It is \boxed{7}.", {"answer": "7", "question": ""})
    assert isinstance(turn.find_environment(asked, unguarded), turn.SingleTurn)
    grade = turn.take_turn(asked, unguarded)
    assert (grade.score, grade.correct, grade.reply) == (1.0, True, None)


@pytest.mark.parametrize(("answer", "is_right"), [("7", True), ("8", False)])
def test_math_multiturn_replies_to_what_its_step_is_worth(answer: str, is_right: bool) -> None:
    response = rf"It is \boxed{{{answer}}}."
    gold = {"answer": "7", "question": ""}
    grade = turn.take_turn(ask("math_multiturn", response, gold, is_last=False), unguarded)
    words = TaskConfig().feedback.right if is_right else TaskConfig().feedback.wrong
    assert (grade.correct, grade.reply) == (is_right, words)
    last = turn.take_turn(ask("math_multiturn", response, gold, is_last=True), unguarded)
    assert (last.correct, last.reply) == (is_right, None)


def test_a_task_of_ones_own_keeps_its_parts_and_replies_with_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters_task.py").write_text(OWN_TASK)
    (tmp_path / "broken_task.py").write_text(OWN_TASK.replace("BROKEN =", "TASK ="))
    monkeypatch.syspath_prepend(str(tmp_path))

    earlier = [("a", Grade(1.0, False, "seen"))]
    asked = ask("letters_task", "abc", "abc", earlier=earlier, is_last=False)
    grade = turn.take_turn(asked, unguarded)
    assert (grade.score, grade.parts) == (3.0, {"letters": 3.0})
    assert grade.reply == [{"role": "user", "content": "2 3.0"}]

    with pytest.raises(TypeError, match="the reply is 3: it has to be text, chat messages"):
        turn.take_turn(ask("broken_task", "abc", "abc", is_last=False), unguarded)


def test_an_instance_elsewhere_has_taken_the_step() -> None:
    taken = Grade(0.5, True, "stepped", reply="go on", parts={"environment.x": 1.0})
    asked = ask("environment", "left", {}, is_last=False, episode="1/0", step=taken)
    grade = turn.take_turn(asked, unguarded)
    assert (grade.score, grade.reply, grade.parts) == (0.5, "go on", {"environment.x": 1.0})


def test_an_episode_that_ends_with_a_call_has_no_answer() -> None:
    calls = """
        <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>
        <tool_call>{"name": "calculator", "arguments": {"expression": "6*"}}</tool_call>
        \\boxed{42}
    """
    task = TaskConfig(name="gsm8k", template="chat", tools=ToolsConfig(names=("calculator",)))
    gold = {"answer": "42", "question": ""}
    asked = TurnRequest("gsm8k", calls, gold, task, episode="1/0", has_tools=True)
    goes_on = turn.take_turn(replace(asked, is_last=False), unguarded)
    grade = turn.take_turn(asked, unguarded)
    assert isinstance(goes_on.reply, list)
    assert [message["role"] for message in goes_on.reply] == ["tool", "tool"]
    assert (grade.score, grade.correct, grade.reason) == (0.0, False, "called tools")
    assert (grade.tool_calls, grade.failed_tool_calls, grade.reply) == (2, 1, None)
