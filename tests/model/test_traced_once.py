"""Shapes and axes of a model are traced once, and nobody can change what others get."""

from collections.abc import Callable

import pytest
from test_adapters import CONFIGS

from jzero.model import qwen
from jzero.model.families import FAMILIES
from jzero.model.qwen import QwenConfig

QWEN2 = CONFIGS["qwen2"]

trees = pytest.mark.parametrize("tree_of", [qwen.abstract, qwen.logical_axes])


@trees
def test_the_leaves_are_those_of_the_first_call(tree_of: Callable[[QwenConfig], dict]) -> None:
    first, second = tree_of(QWEN2), tree_of(QWEN2)

    assert second["layers"]["q"] is first["layers"]["q"]
    assert second["embed"] is first["embed"]


@trees
def test_a_caller_may_change_its_dicts(tree_of: Callable[[QwenConfig], dict]) -> None:
    first = tree_of(QWEN2)
    names = list(first), list(first["layers"])
    del first["embed"], first["layers"]["q"]

    second = tree_of(QWEN2)

    assert (list(second), list(second["layers"])) == names


def test_the_structure_of_a_layer_is_traced_once() -> None:
    assert qwen.layer_graph(QWEN2) is qwen.layer_graph(QWEN2)
    assert qwen.layer_graph(QWEN2) != qwen.layer_graph(CONFIGS["qwen3"])


@trees
def test_another_family_of_the_same_name_has_its_own_tree(
    tree_of: Callable[[QwenConfig], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "q_norm" not in tree_of(QWEN2)["layers"]

    monkeypatch.setitem(FAMILIES, "qwen2", FAMILIES["qwen3"])

    assert "q_norm" in tree_of(QWEN2)["layers"]
