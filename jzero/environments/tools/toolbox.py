"""The tools of an episode: functions, and the public methods of the episode's objects.

    task.tools.names=calculator               a key of BUILT_IN, such as search(corpus="FILE")
    task.tools.names=module:function          or FILE.py:function
    task.tools.names=module:Class             or FILE.py:Class

A function has no state. For a class, each episode creates an instance without arguments: its public
methods are tools, and `close`, if there is one, is called at the end of the episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jzero.environments.tools.calculator import calculator
from jzero.environments.tools.interpreter import Python
from jzero.environments.tools.schemas import Schema, function_schema
from jzero.environments.tools.search import Search
from jzero.errors import UserError
from jzero.json_values import member
from jzero.notation import read_arguments
from jzero.rewards.user_functions import find_function

if TYPE_CHECKING:
    from jzero.config import TaskConfig

# Public methods of an object that are not tools.
NO_TOOLS = ("reset", "step", "close")


class BuiltIn(NamedTuple):
    """A built-in tool."""

    item: Callable[..., object]  # a function, or a class: item(task, **arguments)
    # check(task, **arguments) raises UserError if the settings rule out the tool.
    check: Callable[..., None]
    limits_itself: bool = False  # whether the tool enforces `task.tools.seconds` itself


class Tool(NamedTuple):
    """A function that the policy may call."""

    name: str
    schema: Schema
    function: Callable[..., object]
    limits_itself: bool = False

    @property
    def parameters(self) -> Schema:
        """The schema of the tool's parameters."""
        return member(self.schema, ("function", "parameters"), dict)


class Toolbox(NamedTuple):
    """The tools of one episode, by name."""

    tools: Mapping[str, Tool]
    objects: Sequence[object]  # live as long as the episode

    def close(self) -> None:
        """Calls the method `close` of every object that has one."""
        for item in self.objects:
            close = getattr(item, "close", None)
            if close is not None:
                close()


def _no_check(task: TaskConfig) -> None:
    pass


INTERPRETER = "python"

BUILT_IN: dict[str, BuiltIn] = {
    "calculator": BuiltIn(calculator, _no_check),
    INTERPRETER: BuiltIn(Python, Python.check, limits_itself=True),
    "search": BuiltIn(Search, Search.check),
}


def find_built_in(entry: str) -> tuple[BuiltIn | None, dict[str, object]]:
    """Returns the built-in tool of an entry "NAME" or "NAME(argument=value)", and its arguments.

    The tool is None for a user-defined one. Raises UserError if the arguments cannot be read.
    """
    name, bracket, text = entry.partition("(")
    if name not in BUILT_IN:
        return None, {}
    if not bracket:
        return BUILT_IN[name], {}
    try:
        positional, arguments = read_arguments(text.removesuffix(")"))
    except ValueError:
        positional, arguments = [text], {}
    if positional or not text.endswith(")"):
        raise UserError(
            f"task.tools.names={entry} cannot be read: write the arguments as in "
            'search(corpus="FILE", results=3)'
        )
    return BUILT_IN[name], arguments


def make_toolbox(task: TaskConfig, owner: object = None) -> Toolbox:
    """Creates the tools of an episode.

    Args:
        task: the section `task` of the config; `tools.names` lists the tools.
        owner: an object of the episode. Its public methods come first among the tools.

    Raises:
        UserError: a tool has no schema, or two tools have the same name.
        Exception: any exception from importing or creating a user-defined tool.
    """
    tools = _methods_as_tools(owner) if owner is not None else []
    objects = []
    for name in task.tools.names:
        built_in, arguments = find_built_in(name)
        limits_itself = built_in is not None and built_in.limits_itself
        item = built_in.item if built_in else find_function(name)
        if inspect.isclass(item):
            instance = built_in.item(task, **arguments) if built_in is not None else item()
            objects.append(instance)
            tools += _methods_as_tools(instance, limits_itself)
        else:
            tools.append(_make_tool(item, limits_itself))
    return Toolbox(_by_name(tools), objects)


def tool_schemas(task: TaskConfig, owner: object = None) -> list[Schema]:
    """Returns the schemas of the tools, without creating instances.

    `owner` is the class of the argument `owner` of `make_toolbox`. Raises like `make_toolbox`.
    """
    names = task.tools.names
    items = []
    for name in names:
        built_in, _ = find_built_in(name)
        items.append(built_in.item if built_in else find_function(name))
    tools = _methods_as_tools(owner) if owner is not None else []
    for item in items:
        tools += _methods_as_tools(item) if inspect.isclass(item) else [_make_tool(item)]
    return [tool.schema for tool in _by_name(tools).values()]


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        names = [tool.name for tool in tools]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"task.tools.names: two tools are called {twice}: rename one of them")
    return by_name


def _make_tool(function: Callable[..., object], limits_itself: bool = False) -> Tool:
    schema = function_schema(function)
    return Tool(member(schema, ("function", "name"), str), schema, function, limits_itself)


def _methods_as_tools(item: object, limits_itself: bool = False) -> list[Tool]:
    """Returns the public methods of a class, or of an object, as tools."""
    kind = item if inspect.isclass(item) else type(item)
    names = public_methods(kind)
    if not names:
        raise UserError(f"the class {kind.__name__} has no public method that could be a tool")
    return [_make_tool(getattr(item, name), limits_itself) for name in names]


def public_methods(kind: type) -> list[str]:
    """Returns the sorted names of the public methods of a class, without NO_TOOLS."""
    names = []
    for name in dir(kind):
        # getattr_static does not run properties.
        method = inspect.getattr_static(kind, name)
        is_method = inspect.isfunction(method) or isinstance(method, classmethod)
        if is_method and not name.startswith("_") and name not in NO_TOOLS:
            names.append(name)
    return names


def check_names(task: TaskConfig) -> None:
    """Raises UserError if an entry of `task.tools.names` is not a tool or cannot work."""
    for name in task.tools.names:
        built_in, arguments = find_built_in(name)
        if built_in is not None:
            try:
                # Bound first and not simply called: a TypeError inside of `check` would be a fault
                # of jzero.
                inspect.signature(built_in.check).bind(task, **arguments)
            except TypeError as error:
                raise UserError(f"task.tools.names={name}: {error}") from None
            built_in.check(task, **arguments)
            continue
        try:
            find_function(name)
        except Exception as error:  # importing the user's module may raise any exception
            raise UserError(
                f"task.tools.names={name} is not one of {', '.join(BUILT_IN)}, nor module:function "
                f"or FILE.py:function ({type(error).__name__}: {error})"
            ) from None
