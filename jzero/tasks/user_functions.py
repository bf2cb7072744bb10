"""Reward functions of the user's: finding them, what they ask for, calling them, reading results.

    task.reward.functions=module:function        a module that can be imported where the run starts
    task.reward.functions=FILE.py:function       a file

A function is called by the names of its parameters, any of ARGUMENTS. The trainer process sends a
grader process what is in FROM_EPISODE only where a function asks for it. A function of TRL's takes
lists (`trl_rewards`). A function whose parameters have other names takes (response, gold, task) by
position. A function whose parameters have names of PLURALS is called once for all responses of a
step (`batched_rewards`). Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, cast

from jzero.errors import UserError
from jzero.tasks import trl_rewards
from jzero.types import Grade, JsonValue, Problem, Prompt

BY_POSITION = ("response", "gold", "task")
FROM_EPISODE = ("prompt", "messages", "row", "turns")
ENVIRONMENT = "environment"  # the instance, where there is one: it never leaves its process
ARGUMENTS = (*BY_POSITION, *FROM_EPISODE, ENVIRONMENT)
# The names of lists with one value for each response of a step, and whose lists they are.
PLURALS = {
    "responses": "response",
    "golds": "gold",
    "prompts": "prompt",
    "conversations": "messages",
    "rows": "row",
    "episodes": "turns",
}
# A part of this name is the reward, and the other parts of the result are metrics alone.
SCORE = "score"

Turns = Sequence[tuple[str, Grade | None]]  # the text and the grade of each turn, oldest first


class Reward(NamedTuple):
    """What a function returned: the reward, and the named parts if it returned a dict."""

    value: float
    parts: dict[str, float]


# Finding a function.


@functools.cache
def find_function(name: str) -> Callable[..., object]:
    """Returns the function "module:function" or "FILE.py:function".

    Raises:
        Exception: whatever the import of the user's module raises, or TypeError for no function.
    """
    path, _, function_name = name.rpartition(":")
    if path.endswith(".py"):
        function = getattr(_load_file(path), function_name)
    else:
        function = pkgutil.resolve_name(name)
    if not callable(function):
        raise TypeError("no function")
    return cast(Callable[..., object], function)


@functools.cache
def _load_file(path: str) -> ModuleType:
    """Imports a file as a module of its own, whose name no other module has."""
    file = Path(path).resolve(strict=True)
    module_name = f"jzero_user_file_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, f"{file=}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses of the file look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@functools.cache
def parameter_names(name: str) -> tuple[str, ...] | None:
    """Returns the names in ARGUMENTS that a function asks for; None: it takes BY_POSITION.

    Raises:
        UserError: the function has a parameter that nothing is passed for.
        Exception: the function cannot be found.
    """
    function = find_function(name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions that are not written in Python have none
        return None
    has_our_lists = not (PLURALS.keys() - set(trl_rewards.BATCHED)).isdisjoint(signature.parameters)
    if trl_rewards.is_batched(signature) and not has_our_lists:
        return trl_rewards.ASKED
    asked = []
    others = []
    for parameter in signature.parameters.values():
        can_be_named = parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        is_collection = parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if can_be_named and parameter.name in (*ARGUMENTS, *PLURALS):
            asked.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty and not is_collection:
            others.append(parameter.name)
    if set(asked) & set(PLURALS) and (mixed := set(asked) - set(PLURALS) - {"task"}):
        raise UserError(
            f"task.reward.functions: {name} has the parameter {min(mixed)} of one response beside "
            f"lists of all: name its parameters {', '.join(PLURALS)} and task"
        )
    if asked and not others:
        return tuple(asked)
    try:
        signature.bind(*BY_POSITION)
    except TypeError:
        takes_position = False
    else:
        # A gold answer in a parameter called `prompt` would be a quiet mistake.
        takes_position = not set(asked) - set(BY_POSITION)
    if not takes_position:
        unknown = f"the parameter {others[0]}" if others else "no parameter that is filled"
        raise UserError(
            f"task.reward.functions: {name} has {unknown}: name its parameters "
            f"{', '.join(ARGUMENTS)}, as many as it needs, or {', '.join(PLURALS)} for lists of "
            "all responses of a step"
        )
    return None


def asked_for(names: Sequence[str]) -> frozenset[str]:
    """Returns which of FROM_EPISODE any of the user's functions `names` asks for."""
    asked: set[str] = set()
    for name in names:
        if not is_batched(name):
            asked |= set(parameter_names(name) or ())
    return frozenset(asked & set(FROM_EPISODE))


def is_batched(name: str) -> bool:
    """Returns whether a function takes lists, with a value for each response of a step."""
    return bool(set(parameter_names(name) or ()) & set(PLURALS))


def asked_in_lists(name: str) -> frozenset[str]:
    """Returns which of FROM_EPISODE a batched function asks for, in the names of one value."""
    asked = {PLURALS.get(parameter, parameter) for parameter in parameter_names(name) or ()}
    return frozenset(asked & set(FROM_EPISODE))


# What a function is called with.


def episode_values(
    problem: Problem, response: str, earlier: Turns, asked: frozenset[str]
) -> dict[str, JsonValue]:
    """Returns the values in FROM_EPISODE that are `asked` for, as JSON values.

    Args:
        problem: the problem that the episode is about.
        response: the response that is graded.
        earlier: the turns before it. Their grades have the replies.
        asked: names in FROM_EPISODE. `turns` are the earlier ones alone, with the fields of their
            grades: the grader process adds the turn that it has graded.
    """
    values: dict[str, JsonValue] = {}
    if "prompt" in asked:
        values["prompt"] = problem.prompt
    if "messages" in asked:
        values["messages"] = conversation(problem.prompt, response, earlier)
    if "row" in asked:
        values["row"] = problem.row
    if "turns" in asked:
        values["turns"] = [(text, vars(grade) if grade else None) for text, grade in earlier]
    return values


def conversation(prompt: Prompt, response: str, earlier: Turns) -> list[dict[str, str]]:
    """Returns an episode as chat messages that end with `response`."""
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else list(prompt)
    for text, grade in earlier:
        messages.append({"role": "assistant", "content": text})
        if grade is not None and isinstance(grade.reply, str):
            messages.append({"role": "user", "content": grade.reply})
        elif grade is not None and isinstance(grade.reply, list):
            messages.extend(grade.reply)
    return [*messages, {"role": "assistant", "content": response}]


# Calling a function.


def call_function(name: str, values: Mapping[str, object]) -> Reward | None:
    """Calls the function `name`, and waits for it if it is async. None: it does not apply.

    `values` are those of ARGUMENTS that are there.

    Raises:
        TypeError, ValueError: the function returned something else than a finite number, a dict of
            them, or None; or it asks for a value that is not there.
        Exception: whatever the function raises.
    """
    result = invoke(name, values)
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    return None if result is None else read_result(result)


def invoke(name: str, values: Mapping[str, object]) -> object:
    """Calls the function `name` and returns what it returns, which may have to be awaited."""
    function = find_function(name)
    asked = parameter_names(name)
    if asked is trl_rewards.ASKED:
        return trl_rewards.call(function, values)
    if asked is None:
        return function(*(values[argument] for argument in BY_POSITION))
    if missing := [argument for argument in asked if argument not in values]:
        raise TypeError(f"asks for {missing[0]}, which is not known where it is called")
    return function(**{argument: values[argument] for argument in asked})


async def wait_for(result: Awaitable[object]) -> object:
    """Awaits anything that can be awaited, which `asyncio.run` does not."""
    return await result


def read_result(result: object) -> Reward:
    """Returns what a function returned as a reward.

    A number is the reward. A dict has named parts: the reward is their sum, or the part "score" if
    there is one.

    Raises:
        TypeError, ValueError: `result` is neither, or a number is not finite.
    """
    if not isinstance(result, Mapping):
        return Reward(_finite_number(result), {})
    parts = {str(part): _finite_number(value) for part, value in result.items()}
    if not parts:
        raise TypeError("returned an empty dict: a dict has the named parts of a reward")
    return Reward(parts.get(SCORE, sum(parts.values())), parts)


def _finite_number(value: object) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"returned {value!r:.80}: a reward is a number or None")
    try:
        number = float(value)  # type: ignore[arg-type]  # what cannot be converted raises
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.80}: a reward is a number or None") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: a reward is a finite number or None")
    return number
