"""A turn of an episode, in a grader process. All tasks take this one path:

    tools         answer a response that calls them, and the turn is over
    environment   takes a step: it says what the response is worth
    rewards       reward functions add their parts
    reply         the environment says what the policy reads next, or None

Single-turn tasks and `math_multiturn` are environments, too: `TaskEnvironment` makes one of the
functions `grade` and `reply` of a task. Code of the user's runs within a `Guard`, which limits it.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from jzero.tasks import batched_rewards, environment, rewards, user_functions
from jzero.tasks.task import TASKS, find_task
from jzero.tasks.tools import episodes as tool_episodes
from jzero.tasks.tools.calling import ToolUse
from jzero.tasks.tools.episodes import ToolTurn
from jzero.types import Grade, JsonValue, Prompt

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_REASON = 200  # characters: a reason may quote the response

# guard(function, grade) is a context in which code of the user's runs. `function` is its name, and
# `grade` the verdict so far. It raises `FunctionFailedError` if the code raises.
Guard = Callable[[str, Grade], AbstractContextManager[None]]

Turns = list[tuple[str, Grade]]

_NO_GRADE = Grade(0.0, False, "")
_NO_TOOLS = ToolTurn([], ToolUse(0, 0, 0.0), None)


class FunctionFailedError(Exception):
    """A function of the user's raised, or returned no reward. Its cause says more."""

    def __init__(self, function: str, grade: Grade) -> None:
        super().__init__(function)
        self.function = function
        self.grade = grade  # the verdict before the function was called


@dataclass(frozen=True)
class Item:
    """What the pool asks a grader process: a response, and what is known of its episode."""

    name: str  # of a task, or "module:function" of a grader
    response: str
    gold: JsonValue
    task: TaskConfig
    earlier: Turns | None  # None: no turn may follow
    episode: dict[str, JsonValue]  # see `worker`

    @property
    def is_of_users(self) -> bool:
        """Whether the grader is the user's: a task or a function that jzero does not have."""
        return is_of_users(self.name)

    @property
    def turns_before(self) -> Turns:
        """The turns of an episode that has tools, or an environment of the user's."""
        return read_turns(self.episode["turns"])


@functools.cache
def is_of_users(name: str) -> bool:
    """Returns whether a grader is the user's: a task or a function that jzero does not have."""
    return name not in TASKS and not name.startswith("jzero.")


def read_turns(fields: list[list[JsonValue]]) -> Turns:
    """Returns turns from the pairs that a message has: a text, and the fields of its grade."""
    return [(text, Grade(**grade)) for text, grade in fields]


# What the run asks a grader process for besides turns: code of the user's that has no response.


def _call_batched(item: Item, guard: Guard) -> Grade:
    function = item.gold["function"]
    with guard(function, _NO_GRADE):
        return batched_rewards.call_in_worker(function, item.gold["lists"], item.task)


def _reset(item: Item, guard: Guard) -> Grade:
    with guard(item.task.environment, _NO_GRADE):
        return environment.reset_for_prompt(item.response, item.gold, item.task)


CALLS: dict[str, Callable[[Item, Guard], Grade]] = {
    batched_rewards.CALLER: _call_batched,
    environment.RESETTER: _reset,
}


# What takes the step of a turn.


class TurnEnvironment(Protocol):
    """The environment of an episode, in one of its turns."""

    def step(self) -> Grade:
        """Returns what the response is worth."""
        ...

    def values(self) -> dict[str, object]:
        """Returns what reward functions of the user's may ask for of the environment."""
        ...

    def end(self) -> None:
        """Closes what the episode has, if the episode is over. Rewards have been computed."""
        ...

    def reply(self, grade: Grade) -> Prompt | None:
        """Returns what the policy reads next; `grade` is the step's, with all rewards."""
        ...


@dataclass(frozen=True)
class TaskEnvironment:
    """The functions of a task as an environment, whose state is the turns so far."""

    item: Item

    def step(self) -> Grade:
        grade = find_grader(self.item.name)
        return check_grade(grade(self.item.response, self.item.gold, self.item.task))

    def values(self) -> dict[str, object]:
        return {}

    def end(self) -> None:
        pass

    def reply(self, grade: Grade) -> Prompt | None:
        item = self.item
        reply = None if ":" in item.name else find_task(item.name).reply
        if reply is None:
            return None
        said = reply(item.gold, [*(item.earlier or []), (item.response, grade)], item.task)
        if said is not None and not isinstance(said, str | list):
            raise TypeError(f"the reply is {said!r:.80}: it has to be text, chat messages or None")
        return said


@dataclass(frozen=True)
class InstanceHere:
    """An instance of the user's class, in this process."""

    item: Item
    guard: Guard

    def step(self) -> Grade:
        item = self.item
        # The environment has not seen the turns that called tools.
        earlier = [turn for turn in item.turns_before if not turn[1].tool_calls]
        with self.guard(item.task.environment, _NO_GRADE):
            result = environment.step(
                item.task.environment,
                item.episode["episode"],
                item.gold,
                earlier,
                item.response,
                is_last=item.earlier is None,
            )
        return environment.to_grade(result)

    def values(self) -> dict[str, object]:
        return {user_functions.ENVIRONMENT: environment.instance_of(self.item.episode["episode"])}

    def end(self) -> None:
        with self.guard(self.item.task.environment, _NO_GRADE):
            environment.end(self.item.episode["episode"])

    def reply(self, grade: Grade) -> Prompt | None:
        return grade.reply


@dataclass(frozen=True)
class InstanceInEventLoop:
    """An instance in the run's own process, which has taken its step before this turn came here.

    Reward functions that ask for the instance have been called there, too.
    """

    graded: dict[str, JsonValue]  # the fields of its grade

    def step(self) -> Grade:
        return Grade(**self.graded)

    def values(self) -> dict[str, object]:
        return {}

    def end(self) -> None:
        pass

    def reply(self, grade: Grade) -> Prompt | None:
        return grade.reply


@dataclass(frozen=True)
class ToolsAlone:
    """No environment but tools: the turn has no reward of its own.

    Either the episode ends with a call, so that it has no answer, or the tools are the methods of
    an environment class, whose rewards come from functions alone.
    """

    turn: ToolTurn

    def step(self) -> Grade:
        return grade_of_tools(self.turn)

    def values(self) -> dict[str, object]:
        return {} if self.turn.environment is None else {"environments": [self.turn.environment]}

    def end(self) -> None:
        pass

    def reply(self, grade: Grade) -> Prompt | None:
        return None


def find_environment(item: Item, tools: ToolTurn, guard: Guard) -> TurnEnvironment:
    """Returns what takes the step of a turn, after its tools have been called."""
    if tools.messages or tools.environment is not None:
        return ToolsAlone(tools)
    if "graded" in item.episode:
        return InstanceInEventLoop(item.episode["graded"])
    if item.name == environment.NAME and "episode" in item.episode:
        return InstanceHere(item, guard)
    return TaskEnvironment(item)


# The turn.


def answer(item: Item, guard: Guard) -> Grade:
    """Returns the grade of what the pool asks.

    Raises:
        FunctionFailedError: code of the user's failed.
        Exception: whatever a grader raises.
    """
    if item.name in CALLS:
        return CALLS[item.name](item, guard)
    return take_turn(item, guard)


def take_turn(item: Item, guard: Guard) -> Grade:
    """Returns the grade of a response, with its rewards and with the reply to it."""
    tools = call_tools(item, guard)
    if tools.messages and item.earlier is not None:
        return replace(grade_of_tools(tools), reply=tools.messages)

    taker = find_environment(item, tools, guard)
    step = taker.step()
    try:
        grade = add_rewards(item, step, taker.values(), guard)
    finally:
        taker.end()
    if tools.environment is not None:
        # Functions alone say what such an episode is worth, and so whether it is right.
        values = [grade.parts.get(function, 0.0) for function in item.task.reward.functions]
        grade = replace(grade, correct=sum(values) > 0)
    return replace(grade, reply=None if item.earlier is None else taker.reply(grade))


def call_tools(item: Item, guard: Guard) -> ToolTurn:
    """Returns what the calls of a response came to, if the episode has tools."""
    if "has_tools" not in item.episode:
        return _NO_TOOLS
    with guard("the tools", _NO_GRADE):
        return tool_episodes.step(
            item.episode["episode"], item.gold, item.turns_before, item.response, item.task
        )


def grade_of_tools(turn: ToolTurn) -> Grade:
    """Returns the grade of a turn that tools alone have answered."""
    return Grade(
        score=0.0,
        correct=False,
        reason="called tools" if turn.messages else "answered",
        tool_calls=turn.use.calls,
        failed_tool_calls=turn.use.failed,
        tool_seconds=turn.use.seconds,
    )


def add_rewards(item: Item, step: Grade, of_step: dict[str, object], guard: Guard) -> Grade:
    """Returns the grade of a step with the rewards that this response alone decides.

    `of_step` are the values of the environment that reward functions may ask for.
    """

    def call(
        function: str, response: str, gold: JsonValue, task: TaskConfig
    ) -> user_functions.Reward | None:
        """Calls a reward function of the user's."""
        if function in item.episode.get("called", ()):  # in the event loop
            return None
        values = {"response": response, "gold": gold, "task": task, **item.episode, **of_step}
        if "turns" in item.episode:
            values["turns"] = [*item.turns_before, (response, step)]
        with guard(function, step):
            rewards.check_function(function)
            return user_functions.call_function(function, values)

    grade = rewards.add_response_rewards(step, item.response, item.gold, item.task, call)
    return replace(grade, parts=step.parts | grade.parts)


@functools.cache
def find_grader(name: str) -> Callable[[str, JsonValue, TaskConfig], object]:
    """Returns the function that grades: a task's, or that of "module:function"."""
    return pkgutil.resolve_name(name) if ":" in name else find_task(name).grade


def check_grade(grade: object) -> Grade:
    """Returns what a grader returned, if it is a grade with a finite score.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(grade, Grade):
        raise TypeError(f"the grader returned {grade!r:.80}: it has to return a jzero.types.Grade")
    score = float(grade.score)
    parts = {str(name): float(part) for name, part in grade.parts.items()}
    if not all(math.isfinite(number) for number in (score, *parts.values())):
        raise ValueError(f"the grader returned the score {score} and the parts {parts}: not finite")
    reason = str(grade.reason)[:MAX_REASON]
    return replace(grade, score=score, correct=bool(grade.correct), reason=reason, parts=parts)
