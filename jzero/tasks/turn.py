"""One turn of an episode, in a grader process. Every task takes the same path:

    tools         if the response calls tools, their answers are the reply and the turn is over
    environment   takes a step and grades the response
    rewards       reward functions add their parts to the grade
    reply         the environment returns the policy's next input, or None to end the episode

Single-turn tasks and `math_multiturn` are environments, too: `TaskEnvironment` wraps a task's
functions `grade` and `reply`. User-defined code runs within a `Guard`, which limits it.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from jzero.answers import same_answer
from jzero.environments import batched_rewards, environment
from jzero.environments.tools import episodes as tool_episodes
from jzero.environments.tools.calling import ToolUse
from jzero.environments.tools.episodes import ToolTurn
from jzero.errors import quoted
from jzero.problems import bounds
from jzero.rewards import rewards, user_functions
from jzero.tasks.task import TASKS, find_task
from jzero.types import Grade, JsonValue, Prompt

if TYPE_CHECKING:
    from jzero.config import TaskConfig

# guard(function, grade) is a context manager around user-defined code. `function` is the name of
# the code, and `grade` the grade so far. It raises `FunctionFailedError` if the code raises.
Guard = Callable[[str, Grade], AbstractContextManager[None]]

_NO_GRADE = Grade(0.0, False, "")
_NO_TOOLS = ToolTurn([], ToolUse(0, 0, 0.0), None)


class FunctionFailedError(Exception):
    """A user-defined function raised, or returned no reward. `__cause__` is the original error."""

    def __init__(self, function: str, grade: Grade) -> None:
        super().__init__(function)
        self.function = function
        self.grade = grade  # from before the call of the function


@dataclass(frozen=True)
class Item:
    """A request of the pool to a grader process: a response and the state of its episode."""

    name: str  # a task, "module:function" of a grader, or a key of CALLS
    response: str
    gold: JsonValue
    task: TaskConfig
    earlier: list[tuple[str, Grade]] | None  # earlier turns; None: this turn is the last
    episode: dict[str, JsonValue]  # the keys are documented in `worker`

    @property
    def is_of_users(self) -> bool:
        """Whether the grader is user-defined: a task or a function from outside of jzero."""
        return is_of_users(self.name)

    @property
    def turns_before(self) -> list[tuple[str, Grade]]:
        """The earlier turns of an episode that has tools or a user-defined environment."""
        return read_turns(self.episode["turns"])


@functools.cache
def is_of_users(name: str) -> bool:
    """Returns whether a grader is user-defined: a task or a function from outside of jzero."""
    return name not in TASKS and not name.startswith("jzero.")


def read_turns(fields: list[list[JsonValue]]) -> list[tuple[str, Grade]]:
    """Returns turns from the (response, fields of its grade) pairs of a message to the worker."""
    return [(text, Grade(**grade)) for text, grade in fields]


# Requests to a grader process besides turns: calls of user-defined code that have no response, and
# comparisons of two answers for maj@k.


def _call_batched(item: Item, guard: Guard) -> Grade:
    function = item.gold["function"]
    with guard(function, _NO_GRADE):
        return batched_rewards.call_in_worker(function, item.gold["lists"], item.task)


def _compare(item: Item, guard: Guard) -> Grade:
    return same_answer.same_answer(*item.gold)


def _reset(item: Item, guard: Guard) -> Grade:
    with guard(item.task.environment, _NO_GRADE):
        return environment.reset_for_prompt(item.response, item.gold, item.task)


CALLS: dict[str, Callable[[Item, Guard], Grade]] = {
    batched_rewards.CALLER: _call_batched,
    same_answer.COMPARER: _compare,
    environment.RESETTER: _reset,
}


# Environments: each takes the step of a turn.


class TurnEnvironment(Protocol):
    """The environment of an episode, in one of its turns."""

    def step(self) -> Grade:
        """Returns the grade of the response."""
        ...

    def values(self) -> dict[str, object]:
        """Returns the environment's arguments for user-defined reward functions, by name."""
        ...

    def end(self) -> None:
        """Closes the environment if the episode is over. Called after the reward functions."""
        ...

    def reply(self, grade: Grade) -> Prompt | None:
        """Returns the policy's next input, None to end the episode.

        `grade` is the grade of the step with all rewards.
        """
        ...


@dataclass(frozen=True)
class TaskEnvironment:
    """The functions of a task as an environment. Its only state is the list of turns so far."""

    item: Item

    def step(self) -> Grade:
        grade = find_grader(self.item.name)
        graded = grade(self.item.response, self.item.gold, self.item.task)
        return check_grade(graded, bounds.reply_bytes(self.item.task))

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
        if said is None:
            return None
        read = bounds.read_prompt(said, bounds.reply_bytes(item.task), "the reply")
        if read is None:
            raise TypeError(
                f"the reply is {quoted(said)}: it has to be text, chat messages or None"
            )
        return read


@dataclass(frozen=True)
class InstanceHere:
    """An instance of a user-defined environment class, in this process."""

    item: Item
    guard: Guard

    def step(self) -> Grade:
        item = self.item
        # Tools answered these turns, so the environment took no step for them.
        earlier = [turn for turn in item.turns_before if not turn[1].tool_calls]
        with self.guard(item.task.environment, _NO_GRADE):
            result = environment.step(
                item.task.environment,
                item.episode["episode"],
                item.gold,
                earlier,
                item.response,
                is_last=item.earlier is None,
                most_bytes=bounds.reply_bytes(item.task),
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
    """An environment instance in the event loop of the run's main process.

    It has taken its step before the turn is sent to this process. Reward functions with the
    parameter `environment` have been called there, too.
    """

    graded: dict[str, JsonValue]  # the fields of the step's grade

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
    """A turn without a step of an environment: its score is 0 before the reward functions.

    Either the last turn calls tools, so that the episode has no answer, or the tools are the
    methods of an environment class. Rewards of such a class come only from reward functions.
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
    """Returns the environment that takes the step of a turn, after its tools have been called."""
    if tools.messages or tools.environment is not None:
        return ToolsAlone(tools)
    if "graded" in item.episode:
        return InstanceInEventLoop(item.episode["graded"])
    if item.name == environment.NAME and "episode" in item.episode:
        return InstanceHere(item, guard)
    return TaskEnvironment(item)


# The turn.


def answer(item: Item, guard: Guard) -> Grade:
    """Returns the grade for a request of the pool.

    Raises:
        FunctionFailedError: user-defined code failed.
        Exception: any exception of a grader.
    """
    if item.name in CALLS:
        return CALLS[item.name](item, guard)
    return take_turn(item, guard)


def take_turn(item: Item, guard: Guard) -> Grade:
    """Returns the grade of a response, with its rewards and with the reply to it."""
    tools = call_tools(item, guard)
    # Calls on the last turn get no reply: the response is passed to the reward functions.
    if tools.messages and item.earlier is not None:
        return replace(grade_of_tools(tools), reply=tools.messages)

    taker = find_environment(item, tools, guard)
    step = taker.step()
    # Reward functions may read the environment, so it is closed after them, even if they raise.
    try:
        grade = add_rewards(item, step, taker.values(), guard)
    finally:
        taker.end()
    if tools.environment is not None:
        # Such an episode is scored only by reward functions, so `correct` follows from its score.
        grade = batched_rewards.with_verdict(grade, item.task)
    return replace(grade, reply=None if item.earlier is None else taker.reply(grade))


def call_tools(item: Item, guard: Guard) -> ToolTurn:
    """Executes the tool calls of a response. Returns an empty turn if the episode has no tools."""
    if "has_tools" not in item.episode:
        return _NO_TOOLS
    with guard("the tools", _NO_GRADE):
        turn = tool_episodes.step(
            item.episode["episode"], item.gold, item.turns_before, item.response, item.task
        )
        # task.tools.max_output limits one answer. The reply limit applies to all answers together.
        bounds.read_json(turn.messages, bounds.reply_bytes(item.task), "what the tools answer")
        return turn


def grade_of_tools(turn: ToolTurn) -> Grade:
    """Returns the grade of a turn that no environment has scored: score 0, with the tool use."""
    return Grade(
        score=0.0,
        correct=False,
        reason="called tools" if turn.messages else "answered",
        tool_calls=turn.use.calls,
        failed_tool_calls=turn.use.failed,
        tool_seconds=turn.use.seconds,
    )


def add_rewards(
    item: Item, step: Grade, environment_values: dict[str, object], guard: Guard
) -> Grade:
    """Adds the rewards that depend on this response only to the grade of a step.

    `environment_values` holds the arguments that the environment provides to reward functions.
    """

    def call(
        function: str, response: str, gold: JsonValue, task: TaskConfig
    ) -> user_functions.Reward | None:
        """Calls a user-defined reward function."""
        if function in item.episode.get("called", ()):  # already called, in the event loop
            return None
        # `call_function` passes only the values that the function has parameters for.
        values = {
            "response": response,
            "gold": gold,
            "task": task,
            **item.episode,
            **environment_values,
        }
        if "turns" in item.episode:
            values["turns"] = [*item.turns_before, (response, step)]
        with guard(function, step):
            rewards.check_function(function)
            return user_functions.call_function(function, values)

    grade = rewards.add_response_rewards(step, item.response, item.gold, item.task, call)
    return replace(grade, parts=step.parts | grade.parts)


@functools.cache
def find_grader(name: str) -> Callable[[str, JsonValue, TaskConfig], object]:
    """Returns the grader of a task, or the function "module:function"."""
    return pkgutil.resolve_name(name) if ":" in name else find_task(name).grade


def check_grade(grade: object, most_bytes: int) -> Grade:
    """Checks the result of a grader and returns it.

    Raises:
        TypeError, ValueError: the result is not a grade, or a field is out of its bounds.
    """
    if not isinstance(grade, Grade):
        raise TypeError(
            f"the grader returned {quoted(grade)}: it has to return a jzero.types.Grade"
        )
    return bounds.read_grade(grade, most_bytes)
