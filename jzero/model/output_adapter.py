"""An adapter of the output layer, which computes the logits: h W + scale * (h A) B.

W is the model's lm_head, or its embedding if they are tied. W stays frozen and unchanged, also as
the embedding: the adapter is next to W in the parameters, `params[NAME]`, and `qwen.head` adds its
product to the logits. All products accumulate in fp32, and the sum is not rounded.

    OutputAdapter          one adapter, which may be trained
    BankedOutputAdapters   many adapters of a decoder (`decoder.adapter_bank`): every row uses one
                           of them or none
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jzero.model.linear import BankedFactors, RowAdapters
from jzero.numerics.products import linear_product

TARGET = "lm_head"  # the name of the output layer among the targets of an adapter
NAME = "lm_head_adapter"  # the name of its adapter among the parameters of the whole model


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class OutputAdapter:
    """The adapter of the output layer. The leaves may also be other values, such as shardings."""

    a: Float[Array, "E R"]
    b: Float[Array, "R V"]
    scale: float  # alpha / R

    def change(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """Returns scale * (h A) B in fp32. The factors have the type of `hidden`."""
        batch = "abcd"[: hidden.ndim - 1]
        low_rank = linear_product(f"{batch}e,er->{batch}r", hidden, self.a).astype(hidden.dtype)
        return self.scale * linear_product(f"{batch}r,rv->{batch}v", low_rank, self.b)


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=[])
@dataclass(frozen=True)
class BankedOutputAdapters:
    """The adapters of many sequences, [E, n, R] and [n, R, V] of every shape of adapters."""

    groups: tuple[BankedFactors, ...]


AnyOutputAdapter: TypeAlias = OutputAdapter | BankedOutputAdapters


def of_words(adapter: AnyOutputAdapter, part: slice, dtype: DTypeLike) -> AnyOutputAdapter:
    """Returns the adapter of a part of the vocabulary, in the type of the computation."""

    def cut(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return a.astype(dtype), b[..., part].astype(dtype)

    return map_factors(cut, adapter)


def specs(adapter: AnyOutputAdapter, axis: str) -> AnyOutputAdapter:
    """Returns the tree of an adapter whose vocabulary a mesh axis splits, with a spec at leaves."""

    def spec(a: jax.Array, b: jax.Array) -> tuple[P, P]:
        words_last = [None] * (b.ndim - 1) + [axis]
        return P(), P(*words_last)

    return map_factors(spec, adapter)


def map_factors(
    change: Callable[[jax.Array, jax.Array], tuple[PyTree, PyTree]], adapter: AnyOutputAdapter
) -> AnyOutputAdapter:
    """Applies a function to A and B of every group of a bank, or of the only adapter."""
    if isinstance(adapter, OutputAdapter):
        a, b = change(adapter.a, adapter.b)
        return replace(adapter, a=a, b=b)
    groups = []
    for group in adapter.groups:
        a, b = change(group.a, group.b)
        groups.append(replace(group, a=a, b=b))
    return BankedOutputAdapters(tuple(groups))


def by_token(rows: RowAdapters, batch: tuple[int, ...]) -> RowAdapters:
    """Returns the adapters of tokens [rows, *others], from the adapters of the rows."""

    def spread(column: jax.Array) -> jax.Array:
        return jnp.broadcast_to(column.reshape(-1, *[1] * (len(batch) - 1)), batch)

    return RowAdapters(spread(rows.slot), spread(rows.scale))
