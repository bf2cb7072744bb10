"""User-defined reward functions: imports them, reads their signatures, calls them, reads results.

    task.reward.functions=module:function        a module that can be imported where the run starts
    task.reward.functions=FILE.py:function       a file
    task.reward.functions=FILE.py:factory(x=1)   the function that factory(x=1) returns
    task.reward.functions=trl:module:function    the same with the signature of a function of TRL

The names of a function's parameters decide how it is called:

- Names in ARGUMENTS: one response at a time. The trainer process sends the values in FROM_EPISODE
  to a grader process only if a function has such a parameter.
- Names in PLURALS, or TRL's form (`trl_rewards`): lists of all responses of a batch
  (`batched_rewards`). TRL's form is recognized by its names; the prefix "trl:" requests it.
- Other names: (response, gold, task) by position.

Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from jzero import notation
from jzero.errors import UserError
from jzero.problems import bounds
from jzero.problems.bounds import Reward
from jzero.rewards import trl_rewards
from jzero.types import JsonValue, Problem, Prompt, Turns

BY_POSITION = ("response", "gold", "task")
FROM_EPISODE = ("prompt", "messages", "row", "turns")
ENVIRONMENT = "environment"  # the instance, if there is one: it never leaves its process
ARGUMENTS = (*BY_POSITION, *FROM_EPISODE, ENVIRONMENT)
# Parameters that need an episode with an environment.
INSTANCES = (ENVIRONMENT, trl_rewards.ENVIRONMENTS)
_COPIED = ("gold", "prompt", "messages", "row", "turns")  # a function may change lists and dicts
# Parameters that are lists with one value for each response of a step: list -> name of one value.
PLURALS = {
    "responses": "response",
    "golds": "gold",
    "prompts": "prompt",
    "conversations": "messages",
    "rows": "row",
    "episodes": "turns",
}
TRL = "trl:"  # prefix of a function with TRL's signature
# "module:factory(arguments)". The path may contain brackets, too.
_FACTORY = re.compile(r"(.+?:[A-Za-z_][\w.]*)\((.*)\)", re.DOTALL)


# Finding a function.


class Place(NamedTuple):
    """The parts of a function's name."""

    prefix: str  # TRL or ""
    module: str  # a module, or a file that ends in .py; "" in a name without a colon
    attribute: str  # the function, with the arguments of a factory

    def __str__(self) -> str:
        """Returns the name."""
        return f"{self.prefix}{self.module}:{self.attribute}" if self.module else self.attribute


def split_name(name: str) -> Place:
    """Returns the parts of "module:function", "FILE.py:factory(x=1)" or "trl:module:function"."""
    prefix = TRL if _requests_trl(name) else ""
    text = name.removeprefix(prefix)
    arguments = ""
    if factory := _FACTORY.fullmatch(text):
        text = factory[1]
        arguments = name.removeprefix(prefix)[len(text) :]
    module, _, attribute = text.rpartition(":")
    return Place(prefix, module, attribute + arguments)


def file_of_module(module: str) -> str | None:
    """Returns the file that a user may mean by a module: my.py in the current directory.

    Returns None if there is no such file, or another module of this name can be imported.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    file = Path(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # its package cannot be imported
        spec = None
    # With `python -m` the current directory has modules, too.
    is_other = spec is not None and (not spec.origin or Path(spec.origin) != file.resolve())
    return None if is_other else str(file)


@functools.cache
def find_function(name: str) -> Callable[..., object]:
    """Returns the function "module:function" or "FILE.py:function".

    For "FILE.py:factory(1, length=2)" the factory is called with these arguments and its result is
    returned. The arguments are Python literals: numbers, strings, True, False, None, and lists,
    tuples and dicts of them.

    Raises:
        UserError: the arguments are not literals.
        TypeError: the result cannot be called.
        Exception: any exception from importing the user's module.
    """
    if _requests_trl(name):
        name = name.removeprefix(TRL)
    if factory := _FACTORY.fullmatch(name):
        positional, named = read_arguments(name, factory[2])
        function = _find_attribute(factory[1])(*positional, **named)
    else:
        function = _find_attribute(name)
    if not callable(function):
        raise TypeError("no function")
    return cast(Callable[..., object], function)


def read_arguments(name: str, text: str) -> tuple[list[object], dict[str, object]]:
    """Returns the positional and the keyword arguments of a factory from the text of its call.

    Args:
        name: the full name of the function, for the error message.
        text: the text between the brackets.

    Raises:
        UserError: an argument is not a literal.
    """
    try:
        return notation.read_arguments(text)
    except ValueError:
        raise UserError(
            f"task.reward.functions={name}: the arguments of a factory are numbers, texts in "
            "quotes, True, False, None, and lists or dicts of them, as in factory(1, length=2)"
        ) from None


def _find_attribute(name: str) -> Any:

    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        return pkgutil.resolve_name(name)
    module = _load_file(path)
    if not hasattr(module, attribute):
        defined = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
        ]
        raise AttributeError(f"no {attribute}; there are {', '.join(defined) or 'no functions'}")
    return getattr(module, attribute)


def reason_of_import(name: str, error: Exception) -> str:
    """Returns why a function or class could not be found, with the line of the user's file."""
    file = name.removeprefix(TRL).rpartition(":")[0]
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if file.endswith(".py") and Path(frame.filename) == Path(file).resolve()
    ]
    place = f", line {lines[-1]}" if lines else ""
    text = error.strerror if isinstance(error, FileNotFoundError) else str(error)
    return f"{type(error).__name__}{place}: {text}"


@functools.cache
def _load_file(path: str) -> ModuleType:
    """Imports a file as a module with a unique name."""
    file = Path(path).resolve(strict=True)
    # Two files in different directories may have the same name.
    module_name = f"jzero_user_file_{len(sys.modules)}"
    package = file.with_name("__init__.py")
    # A file next to an __init__.py is loaded as part of a package, so that it can import its
    # neighbors, as in `from .utils import x`.
    if package.is_file() and file != package:
        _load_module(module_name, package)
        module_name = f"{module_name}.{file.stem}"
    return _load_module(module_name, file)


def _load_module(module_name: str, file: Path) -> ModuleType:
    search = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(
        module_name, file, submodule_search_locations=search
    )
    assert spec is not None and spec.loader is not None, f"{file=}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the file look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@functools.cache
def parameter_names(name: str) -> tuple[str, ...] | None:
    """Returns the parameters of a function that jzero fills, None if it takes BY_POSITION.

    They are names in ARGUMENTS or PLURALS. For a function of TRL's form they are
    `trl_rewards.ASKED` or `trl_rewards.ASKED_IN_LISTS`.

    Raises:
        UserError: a required parameter has a name that jzero has no value for.
        Exception: the function cannot be found.
    """
    function = find_function(name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    if _requests_trl(name) or _is_of_trl(signature):
        each = trl_rewards.needs_instances(signature)
        return trl_rewards.ASKED if each else trl_rewards.ASKED_IN_LISTS
    # Collect parameters with known names, and required parameters with other names.
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
    # A function is called either per response or per batch. Only `task` fits both.
    if set(asked) & set(PLURALS) and (mixed := set(asked) - set(PLURALS) - {"task"}):
        raise UserError(
            f"task.reward.functions: {name} has the parameter {min(mixed)} of one response beside "
            f"lists of all: name its parameters {', '.join(PLURALS)} and task"
        )
    if asked and not others:
        return tuple(asked)
    # Parameters with other names: the function has to accept three positional arguments.
    try:
        signature.bind(*BY_POSITION)
    except TypeError:
        takes_position = False
    else:
        # By position, a parameter called `prompt` could silently receive the gold answer.
        takes_position = not set(asked) - set(BY_POSITION)
    if not takes_position:
        unknown = f"the parameter {others[0]}" if others else "no parameter that is filled"
        raise UserError(
            f"task.reward.functions: {name} has {unknown}: name its parameters "
            f"{', '.join(ARGUMENTS)}, as many as it needs, or {', '.join(PLURALS)} for lists of "
            "all responses of a step"
        )
    return None


def _requests_trl(name: str) -> bool:
    # "trl:function" is a function of the module trl.
    return name.startswith(TRL) and ":" in name.removeprefix(TRL)


def _is_of_trl(signature: inspect.Signature) -> bool:
    """Returns whether a function has TRL's form."""
    parameters = signature.parameters.keys()
    # `prompts` is a name of both forms. A list that only jzero has decides for jzero's form.
    if not parameters.isdisjoint(PLURALS.keys() - set(trl_rewards.NAMES)):
        return False
    if trl_rewards.has_form(signature):
        return True
    if not trl_rewards.takes_all(signature) or not parameters.isdisjoint(ARGUMENTS):
        return False
    # With **kwargs, a function that accepts three positional arguments has jzero's form.
    try:
        signature.bind(*BY_POSITION)
    except TypeError:
        return True
    return False


def is_of_trl(name: str) -> bool:
    """Returns whether a function has TRL's form and is called with the lists of a batch."""
    return parameter_names(name) is trl_rewards.ASKED_IN_LISTS


def is_of_each_episode(name: str) -> bool:
    """Returns whether a function has TRL's form and is called per episode, with lists of one."""
    return parameter_names(name) is trl_rewards.ASKED


def missing_from(name: str, columns: Set[str], *, has_environment: bool) -> str:
    """Returns a required parameter of a function that has no value, "" if all have one.

    Args:
        name: a user-defined function.
        columns: the columns of the rows.
        has_environment: whether the episodes have an environment.
    """
    asked = parameter_names(name)
    if not has_environment:
        instances = {ENVIRONMENT} & set(asked or ())
        if asked is trl_rewards.ASKED:
            instances = {trl_rewards.ENVIRONMENTS}
        if instances:
            return min(instances)
    if asked is not trl_rewards.ASKED and asked is not trl_rewards.ASKED_IN_LISTS:
        return ""
    needed = trl_rewards.required_columns(inspect.signature(find_function(name)))
    there = columns - set(trl_rewards.NOT_COLUMNS)
    return next((column for column in needed if column not in there), "")


def asked_for(names: Sequence[str]) -> frozenset[str]:
    """Returns the parameters in FROM_EPISODE of the unbatched functions among `names`."""
    asked: set[str] = set()
    for name in names:
        if not is_batched(name):
            asked |= set(parameter_names(name) or ())
    return frozenset(asked & set(FROM_EPISODE))


def is_batched(name: str) -> bool:
    """Returns whether a function takes lists with one value for each response of a step."""
    return bool(set(parameter_names(name) or ()) & set(PLURALS))


def asked_in_lists(name: str) -> frozenset[str]:
    """Returns the values in FROM_EPISODE that a batched function needs ("prompt" for `prompts`)."""
    asked = {PLURALS.get(parameter, parameter) for parameter in parameter_names(name) or ()}
    return frozenset(asked & set(FROM_EPISODE))


# The arguments of a function.


def episode_values(
    problem: Problem, response: str, earlier: Turns, asked: frozenset[str]
) -> dict[str, JsonValue]:
    """Returns the values in FROM_EPISODE that are named in `asked`, as JSON values.

    Args:
        problem: the problem of the episode.
        response: the response to grade.
        earlier: the earlier turns. Their grades hold the replies.
        asked: names in FROM_EPISODE. `turns` holds only the earlier turns, with the fields of their
            grades: the grader process appends the current turn once it is graded.
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
    """Calls the function `name` and returns its reward, None if the function does not apply.

    An async function is awaited. `values` holds the available values by name, see ARGUMENTS.

    Raises:
        TypeError, ValueError: the function returned something other than a finite number, a dict
            of numbers, or None; or a parameter has no value.
        Exception: any exception of the function.
    """
    if parameter_names(name) is trl_rewards.ASKED:
        return _call_for_episode(name, values)
    result = invoke(name, values)
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    return None if result is None else bounds.read_reward(result)


def _call_for_episode(name: str, values: Mapping[str, object]) -> Reward | None:
    """Calls a function of TRL's form for one episode, in the process of its environment."""
    copies = {argument: _copied(argument, values) for argument in values}
    result, logs = trl_rewards.call_for_episode(find_function(name), copies)
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    result = trl_rewards.only_entry(result)
    if result is None:
        return None
    reward = bounds.read_reward(result)
    return reward._replace(parts=reward.parts | logs.metrics)


def invoke(name: str, values: Mapping[str, object]) -> object:
    """Calls the function `name` and returns its result, which is an awaitable if it is async.

    The function gets copies of lists and dicts, because it may change them.
    """
    function = find_function(name)
    asked = parameter_names(name)
    if asked is None:
        return function(*(_copied(argument, values) for argument in BY_POSITION))
    if missing := [argument for argument in asked if argument not in values]:
        raise TypeError(f"asks for {missing[0]}, which is not known where it is called")
    return function(**{argument: _copied(argument, values) for argument in asked})


def _copied(argument: str, values: Mapping[str, object]) -> object:
    value = values[argument]
    # The environment is not copied: a reward reads the live instance.
    return copy.deepcopy(value) if argument in _COPIED else value


async def wait_for(result: Awaitable[object]) -> object:
    """Awaits any awaitable. `asyncio.run` accepts only coroutines."""
    return await result
