"""Reward functions of notebook cells: what is written to a file, and what is refused."""

import linecache
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from jzero import api
from jzero.errors import UserError
from jzero.rewards.user_functions import find_function
from jzero.sizing.reward_source import module_source, names_of_rewards

CELL = '''
import re as regex
from math import sqrt
BONUS = {"right": 1.5}
PATTERN = regex.compile("a")

def length(text):
    return sqrt(len(text))

def reward(response, gold):
    """Uses a module, an imported function, another function and a plain value."""
    return length(response) + BONUS["right"] * bool(regex.search(gold, response))

def with_object(response, gold):
    return bool(PATTERN.search(response))

quick = lambda response, gold: 1.0

def outer():
    def inner(response, gold):
        return 1.0
    return inner

def forth(n): return back(n - 1) if n else 0
def back(n): return forth(n - 1) if n else 1
'''


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Runs CELL as IPython runs a cell: in __main__, with its source in `linecache`."""
    name = "<cell 1>"
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    lines = CELL.splitlines(keepends=True)
    linecache.cache[name] = (len(CELL), None, lines, name)
    exec(compile(CELL, name, "exec"), main.__dict__)
    yield main
    del linecache.cache[name]


def test_a_function_of_a_cell_gives_the_same_values_from_its_file(
    cell: ModuleType, tmp_path: Path
) -> None:
    (name,) = names_of_rewards([cell.reward], tmp_path / "run")

    written = find_function(name)

    assert name == f"{tmp_path / 'run' / 'reward.py'}:reward"
    assert written is not cell.reward
    for response in ("", "yes", "no yes"):
        assert written(response, "yes") == cell.reward(response, "yes")


def test_a_list_has_functions_of_cells_and_names(cell: ModuleType, tmp_path: Path) -> None:
    names = names_of_rewards([cell.reward, "accuracy", cell.forth], tmp_path)

    assert names == (f"{tmp_path}/reward.py:reward", "accuracy", f"{tmp_path}/reward.py:forth")
    assert find_function(names[0])("yes", "yes") == cell.reward("yes", "yes")
    assert find_function(names[2])(3) == cell.forth(3)
    assert api.list_of_rewards([cell.reward, "accuracy"]) == [cell.reward, "accuracy"]
    assert api.list_of_rewards("my.py:f") == ["my.py:f"]
    assert api.list_of_rewards(cell.reward) == [cell.reward]
    assert api.list_of_rewards(None) == []
    with pytest.raises(UserError, match="two functions are called reward: rename one"):
        names_of_rewards([cell.reward, cell.reward], tmp_path)


def test_functions_may_call_each_other(cell: ModuleType) -> None:
    source = module_source(cell.forth)
    assert "def forth" in source
    assert "def back" in source


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: cell.with_object, "with_object uses PATTERN"),
        (lambda cell: cell.quick, "reward is a lambda: write it with def"),
        (lambda cell: cell.outer(), "is within a class or another function"),
        (lambda cell: math.sqrt, "is of type builtin_function_or_method: write a function"),
    ],
)
def test_what_cannot_be_written_is_refused(cell, make, message, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        names_of_rewards([make(cell)], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_without_source_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile("def reward(response, gold): return 1.0", "<none>", "exec"), main.__dict__)

    with pytest.raises(UserError, match=r"source of reward is not available.*FILE.py:reward"):
        names_of_rewards([main.reward], tmp_path)


def reward_of_this_file(response: str, gold: object) -> float:
    return 0.5


def test_a_function_of_a_file_is_named_by_its_file(tmp_path: Path) -> None:
    names = names_of_rewards([reward_of_this_file], tmp_path)
    assert names == (f"{__file__}:reward_of_this_file",)
    assert not list(tmp_path.iterdir())
