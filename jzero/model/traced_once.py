"""Trees that follow from the config of a model alone, each of which is traced once.

To know the shapes of a model, JAX traces all of its modules, which takes a tenth of a second or
more. Planning, adapters, checkpoints and every compilation ask for the same few trees again and
again.
"""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from jzero.model.architecture import QwenConfig
from jzero.model.families import Family, family_of

Tree = TypeVar("Tree")


def traced_once(trace: Callable[[QwenConfig], Tree]) -> Callable[[QwenConfig], Tree]:
    """Returns a function that calls `trace` once for every config, and remembers the tree.

    Its leaves must not change. The dicts of the tree are copied, so that a caller may change them.
    """
    remembered: dict[tuple[QwenConfig, int], tuple[Family, Tree]] = {}

    @functools.wraps(trace)
    def look_up(config: QwenConfig) -> Tree:
        # The table of families may get another entry of the same name. Each family is kept beside
        # its tree, so that no later family can have its id.
        family = family_of(config.model_type)
        key = config, id(family)
        if key not in remembered:
            remembered[key] = family, trace(config)
        _, tree = remembered[key]
        return copy_of_dicts(tree)

    return look_up


def copy_of_dicts(tree: Tree) -> Tree:
    """Returns a tree of new dicts in the same order, with the same leaves."""
    if not isinstance(tree, dict):
        return tree
    return cast(Tree, {name: copy_of_dicts(branch) for name, branch in tree.items()})
