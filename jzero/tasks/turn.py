"""One turn of an episode, in a grader process. Every task takes the same path:

    step          the environment grades the response. Tools wrap an environment: if the response
                  calls tools, their answers are the reply and the turn is over
    rewards       reward functions add their parts to the grade
    reply         the environment returns the policy's next input, or None to end the episode

A task with a grader is an environment, too (`SingleTurn`). User-defined code runs within a `Guard`,
which limits it.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from jzero.environments import batched_rewards, environment
from jzero.environments.environment import MAX_INSTANCES, Episodes, UserEnvironment
from jzero.environments.tools import episodes as tool_episodes
from jzero.environments.tools.episodes import ToolTurn
from jzero.errors import quoted
from jzero.problems import bounds
from jzero.problems.bounds import Reward
from jzero.rewards import rewards, user_functions
from jzero.tasks.task import TASKS, find_task
from jzero.types import Grade, JsonValue, Prompt, Turns
from jzero.workers.pipe import TurnRequest

if TYPE_CHECKING:
    from jzero.config import TaskConfig

# guard(function, grade) is a context manager around user-defined code. `function` is the name of
# the code, and `grade` the grade so far. It raises `FunctionFailedError` if the code raises.
Guard = Callable[[str, Grade], AbstractContextManager[None]]

_NO_GRADE = Grade(0.0, False, "")
# The environments of the running episodes in this process.
_INSTANCES: Episodes[UserEnvironment] = Episodes(MAX_INSTANCES)


class FunctionFailedError(Exception):
    """A user-defined function raised, or returned no reward. `__cause__` is the original error."""

    def __init__(self, function: str, grade: Grade) -> None:
        super().__init__(function)
        self.function = function
        self.grade = grade  # from before the call of the function


@functools.cache
def is_of_users(name: str) -> bool:
    """Returns whether a grader is user-defined: a task or a function from outside of jzero."""
    return name not in TASKS and not name.startswith("jzero.")


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


Grader = Callable[[str, JsonValue, "TaskConfig"], object]
Replier = Callable[[JsonValue, "list[tuple[str, Grade]]", "TaskConfig"], "Prompt | None"]


@dataclass(frozen=True)
class SingleTurn:
    """A grader as an environment whose only state is the list of turns.

    Without `replier` the first step ends the episode, as in countdown or MATH.
    """

    grader: Grader
    replier: Replier | None
    request: TurnRequest

    def step(self) -> Grade:
        request = self.request
        graded = self.grader(request.response, request.gold, request.task)
        return check_grade(graded, bounds.reply_bytes(request.task))

    def values(self) -> dict[str, object]:
        return {}

    def end(self) -> None:
        pass

    def reply(self, grade: Grade) -> Prompt | None:
        if self.replier is None:
            return None
        request = self.request
        turns = [*graded_turns(request.earlier), (request.response, grade)]
        said = self.replier(request.gold, turns, request.task)
        if said is None:
            return None
        read = bounds.read_prompt(said, bounds.reply_bytes(request.task), "the reply")
        if read is None:
            raise TypeError(
                f"the reply is {quoted(said)}: it has to be text, chat messages or None"
            )
        return read


@dataclass(frozen=True)
class InProcess:
    """An environment of a user-defined class, in this process."""

    request: TurnRequest
    guard: Guard

    def step(self) -> Grade:
        with self.guard(self.request.task.environment, _NO_GRADE):
            return environment.run(environment.take_step(_INSTANCES, self.request))

    def values(self) -> dict[str, object]:
        taken = _INSTANCES.get(self.request.episode)
        assert taken is not None, f"{self.request.episode=}"
        return {user_functions.ENVIRONMENT: taken.instance}

    def end(self) -> None:
        with self.guard(self.request.task.environment, _NO_GRADE):
            environment.run(environment.end_step(_INSTANCES, self.request.episode))

    def reply(self, grade: Grade) -> Prompt | None:
        return grade.reply


@dataclass(frozen=True)
class InEventLoop:
    """An environment of a user-defined class in the event loop of the run's main process.

    It has taken its step before the turn is sent to this process. Reward functions with the
    parameter `environment` have been called there, too.
    """

    taken: Grade

    def step(self) -> Grade:
        return self.taken

    def values(self) -> dict[str, object]:
        return {}

    def end(self) -> None:
        pass

    def reply(self, grade: Grade) -> Prompt | None:
        return grade.reply


class WithTools:
    """An environment whose policy may call tools.

    A turn that calls tools takes no step of the environment: its score is 0. Neither does a turn of
    an environment class with tools as methods, whose rewards come only from reward functions.
    """

    def __init__(self, inner: TurnEnvironment, request: TurnRequest, guard: Guard) -> None:
        self._inner = inner
        self._request = request
        self._guard = guard
        self._turn: ToolTurn | None = None  # set if the inner environment takes no step

    def step(self) -> Grade:
        with self._guard("the tools", _NO_GRADE):
            turn = tool_episodes.step(self._request)
        if not turn.messages and turn.environment is None:
            return self._inner.step()
        self._turn = turn
        grade = grade_of_tools(turn)
        # Calls on the last turn get no reply: the response is passed to the reward functions.
        is_answered = turn.messages and not self._request.is_last
        return replace(grade, reply=turn.messages) if is_answered else grade

    def values(self) -> dict[str, object]:
        if self._turn is None:
            return self._inner.values()
        owner = self._turn.environment
        return {} if owner is None else {"environments": [owner]}

    def end(self) -> None:
        if self._turn is None:
            self._inner.end()

    def reply(self, grade: Grade) -> Prompt | None:
        return self._inner.reply(grade) if self._turn is None else None


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


def find_environment(request: TurnRequest, guard: Guard) -> TurnEnvironment:
    """Returns the environment that takes the step of a turn."""
    if request.step is not None:
        return InEventLoop(request.step)
    if request.grader == environment.NAME and request.episode:
        inner: TurnEnvironment = InProcess(request, guard)
    else:
        inner = SingleTurn(*find_functions(request.grader), request)
    return WithTools(inner, request, guard) if request.has_tools else inner


@functools.cache
def find_functions(name: str) -> tuple[Grader, Replier | None]:
    """Returns the grader and the reply function of a task, or the grader "module:function"."""
    # Only jzero passes such names (suites, ungraded problems); a response has no influence on them.
    if ":" in name:
        return pkgutil.resolve_name(name), None
    task = find_task(name)
    return task.grade, task.reply


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


def graded_turns(turns: Turns) -> list[tuple[str, Grade]]:
    """Returns turns that a grader has seen, as the functions of a task get them."""
    return [(text, grade) for text, grade in turns if grade is not None]


# The turn.


def take_turn(request: TurnRequest, guard: Guard) -> Grade:
    """Returns the grade of a response, with its rewards and with the reply to it.

    Raises:
        FunctionFailedError: user-defined code failed.
        Exception: any exception of a grader.
    """
    taker = find_environment(request, guard)
    step = taker.step()
    # The tools have answered, and the episode continues without rewards.
    if step.tool_calls and step.reply is not None:
        return step
    # Reward functions may read the environment, so it is closed after them, even if they raise.
    try:
        values = taker.values()
        grade = add_rewards(request, step, values, guard)
    finally:
        taker.end()
    if "environments" in values:
        # Such an episode is scored only by reward functions, so `correct` follows from its score.
        grade = batched_rewards.with_verdict(grade, request.task)
    reply = None if request.is_last else taker.reply(grade)
    return grade if reply is grade.reply else replace(grade, reply=reply)


def end_tools(request: TurnRequest, guard: Guard, grade: Grade) -> None:
    """Ends the tools of an episode that is over."""
    with guard("the tools", grade):
        tool_episodes.end(request.episode)


def add_rewards(
    request: TurnRequest,
    step: Grade,
    environment_values: dict[str, object],
    guard: Guard,
) -> Grade:
    """Adds the rewards that depend on this response only to the grade of a step.

    `environment_values` holds the arguments that the environment provides to reward functions.
    """
    # The score of the grader is this reward already.
    if tuple(request.task.reward.functions) == rewards.DEFAULT:
        return step

    def call(function: str, response: str, gold: JsonValue, task: TaskConfig) -> Reward | None:
        """Calls a user-defined reward function."""
        if function in request.called:  # in the event loop
            return None
        # `call_function` passes only the values that the function has parameters for.
        values = {
            "response": response,
            "gold": gold,
            "task": task,
            **request.values,
            "turns": [*request.earlier, (response, step)],
            **environment_values,
        }
        with guard(function, step):
            rewards.check_function(function)
            return user_functions.call_function(function, values)

    grade = rewards.add_response_rewards(step, request.response, request.gold, request.task, call)
    return replace(grade, parts=step.parts | grade.parts)
