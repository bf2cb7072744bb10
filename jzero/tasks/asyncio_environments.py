"""Environments that wait for something else: thousands at once, in an event loop of the run.

    task.environment_mode=asyncio

An environment of a grader process takes one step at a time and can be killed. One that waits for
a server, a database or a browser needs no process: its methods are async, and they are awaited in
the event loop of the pool (`grading.event_loop`), with a limit of task.reward.seconds for each
call. What `environment.Environment` says of instances holds here, too.

A call that takes too long, or loses its connection, gets a second try with a new instance, as a
step does whose grader process ended. Whatever else a class raises fails the episode at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from jzero.grading.pool import Pool, Stepped, Stepping
from jzero.tasks import environment, rewards, user_functions
from jzero.tasks.environment import Calls, Instances, Turns
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

T = TypeVar("T")

MAX_INSTANCES = 65536  # of one pool; the oldest are closed, and built again if they go on
MAX_REASON = 200  # characters
TRIES = 2
CLOSE_SECONDS = 1.0  # for each instance that is left at the end of a run

_NO_GRADE = Grade(0.0, False, "")
_EVERYTHING = frozenset(user_functions.FROM_EPISODE)


class TookTooLong(Exception):
    """A call that task.reward.seconds has ended."""


# The instances of each pool, which are closed with it.
_INSTANCES: weakref.WeakKeyDictionary[Pool, Instances] = weakref.WeakKeyDictionary()


def stepping(
    pool: Pool,
    problem: Problem,
    sample_index: int,
    response: str,
    earlier: Turns,
    task: TaskConfig,
    *,
    is_last: bool,
) -> Stepping | None:
    """Returns what `Pool.submit` awaits for a turn, None where no event loop is needed.

    `earlier` are the turns before this one, and no turn may follow if `is_last`.
    """
    if problem.task != environment.NAME or environment.mode(task) != "asyncio":
        return None
    episode = f"{problem.id}/{sample_index}"
    return functools.partial(_step, pool, problem, episode, response, earlier, task, is_last)


def forget(pool: Pool, problem: Problem, sample_index: int, task: TaskConfig) -> None:
    """Closes the instance of an episode that ends though its environment would have gone on."""
    if problem.task == environment.NAME and environment.mode(task) == "asyncio":
        pool.start(_forget(pool, f"{problem.id}/{sample_index}", task.reward.seconds))


async def _forget(pool: Pool, episode: str, seconds: float) -> None:
    instances = _instances_of(pool)
    with contextlib.suppress(Exception):  # the episode has its score
        instances[episode].is_over = True
        await await_calls(environment.end_calls(instances, episode), seconds)


def resetting(pool: Pool, gold: JsonValue, task: TaskConfig) -> Stepping:
    """Returns what `Pool.submit` awaits for a prompt: an instance is reset, and closed."""

    async def reset() -> Stepped:
        def reset_once() -> Calls[Grade]:
            return environment.reset_calls(task.environment, gold)

        grade = await _grade_of_calls(pool, task, reset_once)
        return Stepped(grade, needs_worker=False)

    return reset


async def _step(
    pool: Pool,
    problem: Problem,
    episode: str,
    response: str,
    earlier: Turns,
    task: TaskConfig,
    is_last: bool,
) -> Stepped:
    """Returns the grade of a turn, with the rewards that ask for the environment."""
    start = time.perf_counter()
    instances = _instances_of(pool)

    def step_once() -> Calls[Grade]:
        result = yield from environment.step_calls(
            task.environment,
            instances,
            episode,
            problem.gold,
            earlier,
            response,
            is_last,
            MAX_INSTANCES,
        )
        return environment.to_grade(result)

    grade = await _grade_of_calls(pool, task, step_once)
    called: list[str] = []
    if not grade.failed:
        values = user_functions.episode_values(problem, response, earlier, _EVERYTHING)
        values["turns"] = [*earlier, (response, grade)]
        values |= {"response": response, "gold": problem.gold, "task": task}
        values[user_functions.ENVIRONMENT] = instances[episode].environment
        for name in rewards.asking_for_environment(task.reward):
            called.append(name)
            grade = await _add_reward(pool, task, name, grade, values)
            if grade.failed:
                break
        grade = await _end(pool, task, episode, grade)
    grade = replace(grade, seconds=time.perf_counter() - start)
    return Stepped(grade, rewards.need_worker(task.reward, called), tuple(called))


async def _end(pool: Pool, task: TaskConfig, episode: str, grade: Grade) -> Grade:
    """Closes the instance of an episode that is over, or that has failed."""
    instances = _instances_of(pool)
    if grade.failed:
        instances[episode].is_over = True

    def end_once() -> Calls[Grade]:
        yield from environment.end_calls(instances, episode)
        return grade

    return await _grade_of_calls(pool, task, end_once, grade)


async def _add_reward(
    pool: Pool, task: TaskConfig, name: str, grade: Grade, values: Mapping[str, object]
) -> Grade:
    """Returns the grade with the reward of a function of the user's."""

    def call() -> Calls[Grade]:
        returned = yield user_functions.invoke(name, values)
        if returned is None:
            return grade
        reward = user_functions.read_result(returned)
        parts = {f"{name}.{part}": value for part, value in reward.parts.items()}
        return replace(grade, parts=grade.parts | {name: reward.value} | parts)

    return await _grade_of_calls(pool, task, call, grade, name)


async def _grade_of_calls(
    pool: Pool,
    task: TaskConfig,
    make_calls: Callable[[], Calls[Grade]],
    before: Grade = _NO_GRADE,
    function: str = "",
) -> Grade:
    """Returns the grade that calls of the user's code come to; `before` as failed if they fail.

    `function` is whose code it is; empty for the environment.
    """
    function = function or task.environment
    reason = ""
    for _ in range(TRIES):
        try:
            return await await_calls(make_calls(), task.reward.seconds)
        except TookTooLong:
            pool.count("timeouts")
            limit = f"task.reward.seconds={task.reward.seconds:g}"
            reason = f"timeout: {function} took more than {limit}"
        except (ConnectionError, EOFError) as error:
            pool.count("killed")
            reason = f"killed: {function}: {type(error).__name__}: {error}"
        except Exception as error:  # whatever code of the user's raises
            text = "".join(traceback.format_exception(error))
            pool.show_note(function, f"raised {type(error).__name__}", text)
            reason = f"error: {function}: {type(error).__name__}: {error}"
            break
    return replace(before, reason=reason[:MAX_REASON], failed=True, reply=None)


async def await_calls(calls: Calls[T], seconds: float) -> T:
    """Makes calls one after the other, and awaits each for `seconds` at most.

    Raises:
        TookTooLong: an awaitable took longer. It is cancelled.
        Exception: whatever the calls raise.
    """
    try:
        returned = next(calls)
        while True:
            try:
                value = await _await_for(returned, seconds)
            except Exception as error:
                returned = calls.throw(error)
            else:
                returned = calls.send(value)
    except StopIteration as end:
        return end.value
    except asyncio.CancelledError:  # the run has ended: an instance in the middle is closed, too
        await _abandon(calls)
        raise


async def _abandon(calls: Calls[T]) -> None:
    """Lets calls end as after an error."""
    with contextlib.suppress(Exception):
        returned = calls.throw(ConnectionAbortedError("the run has ended"))
        while True:
            returned = calls.send(await _await_for(returned, CLOSE_SECONDS))


async def _await_for(returned: object, seconds: float) -> object:
    """Awaits what may be awaited. Does not wait for the end of what it has to cancel."""
    if not inspect.isawaitable(returned):
        return returned
    task = asyncio.ensure_future(returned)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TookTooLong(f"took more than {seconds:g} seconds")
    finally:
        task.cancel()  # of no effect where it is done
    return task.result()


def _instances_of(pool: Pool) -> Instances:
    """Returns the instances of a pool, which are closed with it."""
    if pool not in _INSTANCES:
        instances: Instances = OrderedDict()
        _INSTANCES[pool] = instances

        async def close() -> None:
            await await_calls(environment.close_calls(instances), CLOSE_SECONDS)

        pool.at_end(close)
    return _INSTANCES[pool]
