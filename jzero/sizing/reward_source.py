"""Writes a reward function of a notebook cell to a file, from which grader processes import it.

A function in a file is named by its file: "my.py:f". A function of a notebook or of a running
script has no file that another process could import, so its source is written to one, together with
the modules, the functions and the plain values that it uses. Nothing is pickled.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

from jzero.errors import UserError, quoted
from jzero.files import write_atomic

FILE = "reward.py"  # in the workdir
PLAIN = (bool, int, float, str, bytes, type(None))
RewardFunction = Callable[..., object]


def names_of_rewards(rewards: Sequence[str | RewardFunction], workdir: Path) -> tuple[str, ...]:
    """Returns "FILE.py:function" for each reward; a name is returned as it is.

    Writes WORKDIR/reward.py with all functions that have no file.

    Raises UserError if a function is a lambda, a method or within another function, if its source
    is not available, or if it uses a value that has no source.
    """
    path = (workdir / FILE).absolute()
    names = []
    without_file: list[FunctionType] = []
    for reward in rewards:
        if isinstance(reward, str):
            names.append(reward)
            continue
        function = checked_function(reward)
        file = file_of(function)
        if file is None:
            without_file.append(function)
        names.append(f"{file or path}:{function.__name__}")
    if without_file:
        source = module_source(*without_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, source)
    return tuple(names)


def checked_function(reward: object) -> FunctionType:
    """Returns a function that a file can define. Raises UserError as `names_of_rewards` does."""
    if not isinstance(reward, FunctionType):
        raise UserError(
            f"reward={quoted(reward)} is of type {type(reward).__name__}: write a function with "
            "def, or give a list of functions and names such as 'FILE.py:function'"
        )
    if reward.__name__ == "<lambda>":
        raise UserError("reward is a lambda: write it with def, so that its source can be saved")
    if "." in reward.__qualname__ or reward.__code__.co_freevars:
        raise UserError(
            f"reward={reward.__qualname__} is within a class or another function: move it to the "
            "top level of a cell or of a file"
        )
    return reward


def file_of(function: FunctionType) -> Path | None:
    """Returns the file from which another process can import a function; None without one."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    # Importing the file of a running script would run the script again.
    if file is None or function.__module__ == "__main__":
        return None
    return Path(file).resolve()


def module_source(*functions: FunctionType) -> str:
    """Returns a module with functions and whatever they use. Raises UserError as above."""
    names = [function.__name__ for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward: two functions are called {name}: rename one of them")
    parts: dict[str, str] = {}
    for function in functions:
        add_function(function, parts)
    return (
        "\n\n".join(['"""The rewards of a run, written by jzero.train."""', *parts.values()]) + "\n"
    )


def add_function(function: FunctionType, parts: dict[str, str]) -> None:
    """Adds the source of a function to `parts`, after the sources of the names that it uses."""
    name = function.__name__
    if name in parts:
        return
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UserError(
            f"reward: the source of {name} is not available: write it to a file and give "
            f"reward='FILE.py:{name}'"
        ) from None
    parts[name] = ""  # functions may call each other
    for used in names_in(source):
        if used != name and used in function.__globals__:
            add_value(used, function.__globals__, parts, name)
    # The function comes after its decorators and the defaults of its parameters.
    del parts[name]
    parts[name] = source.rstrip()


def names_in(source: str) -> list[str]:
    """Returns the names that a source reads, in their order."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node.ctx, ast.Load)))


def add_value(
    name: str,
    values: Mapping[str, object],
    parts: dict[str, str],
    function: str,
) -> None:
    """Adds the source of a global value: a module, a function, or a plain value."""
    if name in parts:
        return
    value = values[name]
    module = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, FunctionType) and module == "__main__":
        if value.__name__ != name:
            raise UserError(f"reward: {function} uses {name}, another name of {value.__name__}")
        add_function(value, parts)
    elif is_plain(value):
        parts[name] = f"{name} = {value!r}"
    elif is_importable(value, module):
        parts[name] = f"from {module} import {value.__name__} as {name}"  # type: ignore
    else:
        raise UserError(
            f"reward: {function} uses {name}, {quoted(value)}, which cannot be written to a file: "
            f"write both to a file and give reward='FILE.py:{function}'"
        )


def is_plain(value: object) -> bool:
    """Returns whether the `repr` of a value is its source."""
    if isinstance(value, tuple | list | set | frozenset):
        return type(value) in (tuple, list, set) and all(map(is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_plain, [*value, *value.values()]))
    return type(value) in PLAIN


def is_importable(value: object, module: object) -> bool:
    """Returns whether another process can import a function or a class from its module."""
    if not isinstance(module, str) or module == "__main__" or module not in sys.modules:
        return False
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and getattr(sys.modules[module], name, None) is value
