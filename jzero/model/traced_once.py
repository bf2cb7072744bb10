"""A cache for trees that depend only on a model's config.

JAX has to trace all modules of a model to get its shapes, which takes a tenth of a second or more.
Planning, adapters, checkpoints and every compilation need the same few trees again and again.
"""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from jzero.model.architecture import QwenConfig
from jzero.model.families import Family, family_of

Tree = TypeVar("Tree")


def traced_once(trace: Callable[[QwenConfig], Tree]) -> Callable[[QwenConfig], Tree]:
    """Returns a function that calls `trace` once for every config, and caches the tree.

    The leaves must not be modified. The dicts are copied, so the caller may modify them.
    """
    remembered: dict[tuple[QwenConfig, int], tuple[Family, Tree]] = {}

    @functools.wraps(trace)
    def look_up(config: QwenConfig) -> Tree:
        # The key has the family's id, because an entry of the table of families may be replaced.
        # The cache keeps the family alive, so no later family can get the same id.
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
