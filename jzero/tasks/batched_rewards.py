"""Reward functions of the user's that are called once for all responses of a step.

    def diversity(responses, golds): ...      returns one reward for each response

A function is batched if its parameters have names of `user_functions.PLURALS`. The lists have an
entry for each turn of each episode of the step, in order, those of all hosts. The function runs in
a grader process of one host, within task.reward.seconds and task.reward.memory_gib.

If the function fails, no response of the step has a score. If one of its rewards is no finite
number, that response has none.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jzero.grading.pool import Pool
from jzero.tasks import rewards, user_functions
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

Episode = tuple[Problem, Sequence[tuple[str, Grade]]]  # with the text and the grade of each turn

CALLER = "jzero.tasks.batched_rewards:call_in_worker"
MAX_REASON = 200  # characters


def call_all(pool: Pool, task: TaskConfig, episodes: Sequence[Episode]) -> JsonValue:
    """Returns what the batched functions say to the turns of `episodes`, as JSON.

    For each function either a dict that has for the number of each turn [value, parts], null or
    the reason why there is no reward; or the reason why the function failed.
    """
    results: dict[str, JsonValue] = {}
    for name in rewards.batched(task.reward):
        gold = {"function": name, "lists": _lists(name, episodes)}
        grade = pool.call(CALLER, gold, task)
        results[name] = grade.reason if grade.failed else grade.parts
    return results


def add(grades: Sequence[Grade], results: Mapping[str, JsonValue]) -> list[Grade]:
    """Returns the grades of turns with the rewards that `call_all` has returned."""
    done = list(grades)
    for name, result in results.items():
        for i, grade in enumerate(done):
            reward = result if isinstance(result, str) else result[str(i)]
            if isinstance(reward, str):
                if not grade.failed:
                    done[i] = replace(grade, reason=reward[:MAX_REASON], failed=True, reply=None)
            elif reward is not None:
                value, parts = reward
                named = {f"{name}.{part}": number for part, number in parts.items()}
                done[i] = replace(grade, parts=grade.parts | {name: value} | named)
    return done


def _lists(name: str, episodes: Sequence[Episode]) -> dict[str, list[JsonValue]]:
    """Returns the lists that a function asks for, with grades as their fields."""
    asked = user_functions.asked_in_lists(name)
    entries: list[dict[str, JsonValue]] = []
    for problem, turns in episodes:
        for count, (text, _) in enumerate(turns):
            values = user_functions.episode_values(problem, text, turns[:count], asked)
            if "turns" in values:
                values["turns"] = [(said, vars(grade)) for said, grade in turns[: count + 1]]
            entries.append(values | {"response": text, "gold": problem.gold})
    parameters = user_functions.parameter_names(name) or ()
    plurals = user_functions.PLURALS
    return {
        parameter: [entry[plurals[parameter]] for entry in entries]
        for parameter in parameters
        if parameter in plurals
    }


# In a grader process.


def call_in_worker(name: str, lists: Mapping[str, list[JsonValue]], task: TaskConfig) -> Grade:
    """Calls a function, and returns a grade whose parts are its rewards by the number of a turn.

    Raises:
        TypeError: it returned something else than one reward for each response.
        Exception: whatever the function raises.
    """
    values: dict[str, object] = {"task": task, **lists}
    if "episodes" in lists:
        values["episodes"] = [
            [(text, Grade(**fields)) for text, fields in turns] for turns in lists["episodes"]
        ]
    returned = user_functions.invoke(name, values)
    if inspect.isawaitable(returned):
        returned = asyncio.run(user_functions.wait_for(returned))
    count = len(next(iter(lists.values())))
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise TypeError(f"returned {returned!r:.80}: it has to return a list with {count} rewards")
    given = list(returned)  # type: ignore[call-overload]  # it has a length
    if len(given) != count:
        raise TypeError(f"returned {len(given)} rewards for {count} responses")
    parts: dict[str, JsonValue] = {}
    for i, reward in enumerate(given):
        parts[str(i)] = None if reward is None else _read(name, i, reward)
    return Grade(0.0, False, "", parts=parts)


def _read(name: str, i: int, reward: object) -> JsonValue:
    try:
        return list(user_functions.read_result(reward))
    except (TypeError, ValueError) as error:
        return f"error: {name}: {type(error).__name__}: entry {i} {error}"
