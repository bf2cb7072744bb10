"""Environments: the protocol, the adapter of user-defined classes, and the store of episodes.

    task.name=environment task.environment=module:Class      or FILE.py:Class, openenv:URL, or
                                                             verifiers:ENV

`UserEnvironment` turns an instance of a user-defined class, synchronous or async, into an
`Environment`; docs/environments.md describes the class. Every episode has a separate instance,
which is constructed without arguments and stays in one process: a grader process, or the event loop
of the pool (`asyncio_environments`). `Episodes` stores the running episodes there.

`reset` must be deterministic in `row` and `seed`: one reset produces the prompt of a group, and
every episode of the group starts with another reset. If the process of an episode has ended, or the
run has resumed from a checkpoint, the episode is rebuilt: a new instance is reset and steps through
the previous responses. The rebuilt instance must return the same replies; any difference raises an
error, so that no episode changes silently.

Imports no jax: grader processes load this module. `environment_task` is the trainer's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, cast

from jzero.environments import openenv, verifiers
from jzero.environments.tools import classes
from jzero.errors import quoted
from jzero.json_values import as_list, as_object, to_integer
from jzero.problems import bounds
from jzero.problems.bounds import Reward
from jzero.rewards import user_functions
from jzero.types import Grade, JsonValue, Prompt, Turns
from jzero.workers.pipe import TurnRequest

if TYPE_CHECKING:
    from jzero.config import TaskConfig

T = TypeVar("T")

NAME = "environment"  # the task's name
CORRECT = "correct"  # the reward part that marks the episode as solved
# Per grader process. The oldest instances are closed, and rebuilt if their episodes continue.
MAX_INSTANCES = 4096


# The protocol.


class Observation(NamedTuple):
    """The result of a reset."""

    prompt: Prompt
    tools: list[JsonValue]  # schemas of the tools that the environment itself answers


class Step(NamedTuple):
    """The result of a step, for one response."""

    reply: Prompt | None  # what the policy reads next; None if the episode is over
    rewards: Reward
    is_correct: bool
    has_verdict: bool = False  # the environment returned the part `correct`

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.reply is None


class Environment(Protocol):
    """An environment of one episode."""

    async def reset(self, row: dict[str, JsonValue], seed: int) -> Observation:
        """Starts the episode."""
        ...

    async def step(self, response: str) -> Step:
        """Applies a response of the policy."""
        ...

    async def close(self) -> None:
        """Releases the state of the episode."""
        ...


# Calls of user-defined code. This is the only place that tells synchronous from async code.


async def call(function: Callable[..., object], *arguments: object) -> object:
    """Calls a function that may be synchronous or async, and returns its result."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    with outside_of_loop():
        returned = function(*arguments)
    return await returned if inspect.isawaitable(returned) else returned


@contextlib.contextmanager
def outside_of_loop() -> Iterator[None]:
    """Hides the running event loop from synchronous code within a coroutine.

    Synchronous code may start an event loop itself, for example with `asyncio.run`, which refuses
    to run inside of another one.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    # asyncio has no public functions for this.
    asyncio._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio._enter_task(loop, task)


@functools.cache
def _process_loop() -> asyncio.AbstractEventLoop:
    # `asyncio.run` would close its loop, and an instance may keep connections that belong to it.
    return asyncio.new_event_loop()


def run(coroutine: Coroutine[None, None, T]) -> T:
    """Runs a coroutine in the event loop of this process, which all calls share.

    Between two calls no event loop runs, because the process waits for messages.
    """
    task = _process_loop().create_task(coroutine)
    try:
        return _process_loop().run_until_complete(task)
    except BaseException:
        # SystemExit in a task that user-defined code has started leaves the coroutine unfinished.
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # marks it as read
        raise


class TookTooLong(Exception):
    """User-defined code exceeded its time limit."""


class RaisedExit(Exception):
    """User-defined code raised SystemExit or the like, which would end the event loop or the run.

    The message describes the original exception, which is `__cause__`.
    """


async def limited(seconds: float, function: Callable[..., object], *arguments: object) -> object:
    """Calls a function that may be async, and waits for at most `seconds` for its result.

    The caller does not wait for a coroutine that ignores its cancellation.

    Raises:
        TookTooLong: the result was not ready. The coroutine is cancelled.
        RaisedExit: the code raised a BaseException that is not an Exception.
        Exception: any exception of the function.
    """
    try:
        returned = function(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise RaisedExit(bounds.describe(error)) from error
    if not inspect.isawaitable(returned):
        return returned
    # asyncio.wait_for would wait until a cancelled task ends, and a hostile task may never end.
    task = asyncio.ensure_future(_contained(returned))
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TookTooLong(f"took more than {seconds:g} seconds")
    finally:
        task.cancel()  # no effect on a finished task
    if task.cancelled():
        raise RaisedExit("CancelledError: the task cancelled itself")
    error = task.exception()
    if isinstance(error, GeneratorExit):  # user-defined code raised it
        raise RaisedExit(bounds.describe(error)) from error
    return task.result()


async def _contained(returned: Awaitable[object]) -> object:
    """Awaits an awaitable from user-defined code and turns exits into RaisedExit.

    SystemExit in a task would end the event loop.
    """
    try:
        return await returned
    except (Exception, GeneratorExit):
        raise
    except asyncio.CancelledError:
        # Distinguish a real cancellation from a CancelledError that user-defined code raised.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RaisedExit("CancelledError") from None
    except BaseException as error:
        raise RaisedExit(bounds.describe(error)) from error


# The adapter of user-defined classes.


# Calls a method of the class: call(method, *arguments).
Call = Callable[..., Awaitable[object]]


@dataclass
class UserEnvironment:
    """An instance of a user-defined class as an `Environment` and as an `Episode`.

    Checks every value that the instance returns.
    """

    instance: object
    most_bytes: int  # limit on an observation or a reply
    call: Call = call  # with limits of time in an event loop
    responses: list[str] = field(default_factory=list)  # the responses that it has received
    is_over: bool = False  # True after the last step

    async def reset(self, row: dict[str, JsonValue], seed: int) -> Observation:
        """Starts an episode and returns the first observation."""
        # The environment may change its row, and in an event loop the group shares one row object.
        returned = await self._call("reset", copy.deepcopy(row), seed)
        prompt = bounds.read_prompt(returned, self.most_bytes, "the observation of reset")
        if prompt is None:
            raise TypeError(
                f"reset returned {quoted(returned)}: it has to be text or chat messages"
            )
        return Observation(prompt, self._tools())

    async def step(self, response: str) -> Step:
        """Sends a response to the environment and returns the validated result.

        Raises:
            TypeError: the result is not (reply, reward, done), or one of the three has a wrong
                type.
            ValueError: the reply or the reward is out of bounds.
            Exception: any exception of the user-defined method.
        """
        result = await self._call("step", response)
        # Only after the method has returned: a step that raised is not part of the episode.
        self.responses.append(response)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise TypeError(f"step returned {quoted(result)}: it has to be (reply, reward, done)")
        returned, reward, is_done = result
        if not isinstance(is_done, bool):
            raise TypeError(f"step returned {quoted(is_done)} as done: it has to be True or False")
        # The reply of a finished episode is ignored.
        reply = None
        if not is_done:
            reply = bounds.read_prompt(returned, self.most_bytes, "the reply")
            if reply is None:
                raise TypeError(
                    f"the reply is {quoted(returned)}: it has to be text or chat messages, unless "
                    "the episode is over"
                )
        # The part "correct" is a verdict and does not count towards the reward. Without the part,
        # a positive reward means that the episode is solved.
        is_correct = None
        if isinstance(reward, dict) and CORRECT in reward:
            is_correct = bool(reward[CORRECT])
            reward = {name: part for name, part in reward.items() if name != CORRECT} or 0.0
        read = bounds.read_reward(reward)
        if is_correct is None:
            return Step(reply, read, read.value > 0)
        return Step(reply, read, is_correct, has_verdict=True)

    async def replay(self, gold: JsonValue, earlier: Turns) -> None:
        """Resets the environment and steps through the earlier turns.

        Raises:
            ValueError: the observation or a reply differs from the original episode.
        """
        first = as_object(gold, "gold")
        prompt, _ = await self.reset(
            as_object(first["row"], "row"), to_integer(first["seed"], "seed")
        )
        if prompt != first["observation"]:
            raise ValueError(
                f"reset has to be a function of row and seed: it said {quoted(prompt)}, "
                f"and before {quoted(first['observation'])}"
            )
        for response, grade in earlier:
            result = await self.step(response)
            if grade is not None:
                check_same("step", result.reply, grade.reply)

    async def close(self) -> None:
        """Calls the environment's `close` method, if it has one."""
        close = getattr(self.instance, "close", None)
        if close is not None:
            await self.call(close)

    async def _call(self, method: str, *arguments: object) -> object:
        return await self.call(getattr(self.instance, method), *arguments)

    def _tools(self) -> list[JsonValue]:
        tools = getattr(self.instance, "tools", None) or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise TypeError(f"tools is {quoted(tools)}: it has to be a list of schemas")
        return as_list(bounds.read_json(tools, self.most_bytes, "the attribute tools"))


def make_environment(name: str, most_bytes: int, call: Call = call) -> UserEnvironment:
    """Returns an environment of `task.environment=name`, before its reset.

    Raises:
        Exception: any exception from importing or constructing the user-defined class.
    """
    instance = find_class(name)()
    # The methods of a class without `step` are tools.
    adapted = instance if hasattr(instance, "step") else classes.Resetting(instance)
    return UserEnvironment(adapted, most_bytes, call)


def find_class(name: str) -> Callable[[], object]:
    """Returns the constructor of `task.environment=name`.

    Raises:
        Exception: any exception from importing the user-defined module, or TypeError if the name is
            not callable.
    """
    if name.startswith(openenv.PREFIX):
        return functools.partial(openenv.OpenEnv, name.removeprefix(openenv.PREFIX))
    if name.startswith(verifiers.PREFIX):
        return functools.partial(verifiers.VerifiersEpisode, name.removeprefix(verifiers.PREFIX))
    return cast(Callable[[], object], user_functions.find_function(name))


# The store of running episodes.


class Episode(Protocol):
    """The state of an episode, such as an environment or an interpreter."""

    responses: list[str]  # the responses that it has received

    async def close(self) -> None:
        """Releases the state of the episode."""
        ...


EpisodeType = TypeVar("EpisodeType", bound=Episode)


class _Stored(NamedTuple, Generic[EpisodeType]):
    episode: EpisodeType
    last_used: float  # by time.monotonic


class Episodes(Generic[EpisodeType]):
    """The running episodes of a process or an event loop by name, least recently used first.

        episodes = Episodes(max_episodes=4096)
        result = await episodes.step(name, responses, build, take)
        await episodes.end(name)

    An episode that is missing is rebuilt: its process has ended, or the run has resumed from a
    checkpoint. A grader process has a store for environments and a store for tools, and an event
    loop has a store for environments.
    """

    def __init__(self, max_episodes: int, idle_seconds: float = math.inf) -> None:
        """Makes an empty store.

        The store closes the least recently used episodes above `max_episodes`, and episodes that
        are unused for `idle_seconds`. A closed episode is rebuilt if it continues.
        """
        self._max_episodes = max_episodes
        self._idle_seconds = idle_seconds
        self._stored: OrderedDict[str, _Stored[EpisodeType]] = OrderedDict()

    def get(self, name: str) -> EpisodeType | None:
        """Returns an episode, None if it is not in the store."""
        stored = self._stored.get(name)
        return stored.episode if stored is not None else None

    async def step(
        self,
        name: str,
        responses: Sequence[str],
        build: Callable[[], Awaitable[EpisodeType]],
        take: Callable[[EpisodeType], Awaitable[T]],
    ) -> T:
        """Takes a step of an episode. The episode stays in the store until `end` or an error.

        Args:
            name: unique among the running episodes.
            responses: the responses that the episode has received before this step.
            build: makes an episode that has received `responses`.
            take: takes the step.

        Raises:
            Exception: any exception of `build` or `take`. The episode is closed and removed.
        """
        await self._close_oldest(time.monotonic() - self._idle_seconds)
        # Reuse the episode only if it has received exactly the earlier responses. The first step
        # always builds a new episode. The episode is out of the store during the step: it returns
        # to the end of the order, and stays out if the step fails.
        stored = self._stored.pop(name, None)
        if stored is not None and responses and stored.episode.responses == list(responses):
            episode = stored.episode
        else:
            if stored is not None:
                await close_quietly(stored.episode)
            episode = await build()
        async with closed_on_error(episode):
            result = await take(episode)
        self._stored[name] = _Stored(episode, time.monotonic())
        await self._close_oldest()
        return result

    async def end(self, name: str) -> None:
        """Closes an episode and removes it from the store, if it is in the store."""
        stored = self._stored.pop(name, None)
        if stored is not None:
            await stored.episode.close()

    async def close(self) -> None:
        """Closes all episodes."""
        while self._stored:
            _, stored = self._stored.popitem()
            await close_quietly(stored.episode)

    async def _close_oldest(self, used_before: float = -math.inf) -> None:
        """Closes the episodes above the maximum number, or last used before `used_before`."""
        while self._stored:
            # The first episode is the least recently used: if it stays, all others stay.
            name, stored = next(iter(self._stored.items()))
            if stored.last_used >= used_before and len(self._stored) <= self._max_episodes:
                return
            del self._stored[name]
            # The error of another episode must not fail the current step.
            await close_quietly(stored.episode)


async def close_quietly(episode: Episode) -> None:
    """Closes an episode and ignores errors."""
    with contextlib.suppress(Exception):
        await episode.close()


@contextlib.asynccontextmanager
async def closed_on_error(episode: Episode) -> AsyncIterator[None]:
    """Closes an episode if the block fails. An error of closing is ignored."""
    try:
        yield
    except GeneratorExit:  # nothing can be awaited any more
        raise
    except BaseException:  # also a cancellation: the run ends in the middle of a step
        await close_quietly(episode)
        raise


def check_same(who: str, reply: JsonValue, earlier_reply: JsonValue) -> None:
    """Raises ValueError if the reply of a rebuilt episode differs from the original reply."""
    if reply != earlier_reply:
        raise ValueError(
            f"an episode that is built again has to go the same way: {who} said {quoted(reply)}, "
            f"and before {quoted(earlier_reply)}"
        )


# Turns of an environment.


async def reset_once(
    task: TaskConfig,
    row: dict[str, JsonValue],
    seed: int,
    call: Call = call,
) -> Observation:
    """Resets an environment to obtain a prompt, and closes it.

    Every episode of the group resets another instance.
    """
    environment = make_environment(task.environment, bounds.reply_bytes(task), call)
    async with closed_on_error(environment):
        observation = await environment.reset(row, seed)
    await environment.close()
    return observation


async def take_step(
    episodes: Episodes[UserEnvironment],
    request: TurnRequest,
    call: Call = call,
) -> Grade:
    """Takes the step of a turn in a user-defined environment and returns its grade.

    The environment stays in `episodes` even if the episode is over, because rewards may still read
    it; `end_step` then closes it. An environment that fails is closed and removed.

    Raises:
        TypeError, ValueError: a method returned an invalid value, or a rebuilt episode returned
            another value than the original.
        Exception: any exception of the user-defined class.
    """
    # Tools answered these turns, so the environment took no step for them.
    earlier = [turn for turn in request.earlier if turn[1] is None or not turn[1].tool_calls]

    async def build() -> UserEnvironment:
        task = request.task
        environment = make_environment(task.environment, bounds.reply_bytes(task), call)
        async with closed_on_error(environment):
            await environment.replay(request.gold, earlier)
        return environment

    async def take(environment: UserEnvironment) -> Step:
        step = await environment.step(request.response)
        # No reply ends the episode.
        if request.is_last:
            step = step._replace(reply=None)
        environment.is_over = step.done
        return step

    responses = [text for text, _ in earlier]
    return to_grade(await episodes.step(request.episode, responses, build, take))


async def end_step(episodes: Episodes[UserEnvironment], episode: str) -> None:
    """Closes and removes the environment of an episode if the episode is over."""
    environment = episodes.get(episode)
    if environment is not None and environment.is_over:
        await episodes.end(episode)


def to_grade(step: Step) -> Grade:
    """Returns a step's reward as a grade. Its named parts become metrics environment.<part>."""
    parts = {f"{NAME}.{name}": value for name, value in step.rewards.parts.items()}
    reason = "correct" if step.is_correct else "stepped"
    return Grade(step.rewards.value, step.is_correct, reason, parts=parts, reply=step.reply)


def mode(task: TaskConfig) -> str:
    """Returns where the instances live: in grader "processes", or in one event loop, "asyncio"."""
    if task.environment_mode != "auto":
        return task.environment_mode
    # OpenEnv waits for a server, and programs of verifiers wait for the policy.
    waits = task.environment.startswith((openenv.PREFIX, verifiers.PREFIX))
    return "asyncio" if waits else "processes"
