"""Weights of a decoder that lie side by side, so that one product takes the place of several.

A decode step multiplies few rows by each weight, so that it takes as long as reading the weights.
One large weight is read faster than several small ones: by XLA's estimate gate and up of
Qwen2.5-3B, each [2048, 11008], take 12 % less on a v5e as one (docs/log.md, 2026-11-23).

Which weights a layer multiplies by together is in its class: `layers.DenseLayer.SIDE_BY_SIDE`.
`linear.products` multiplies by them, joined or not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jzero.config import ModelConfig
from jzero.distributed.mesh import param_shardings
from jzero.model import adapters, qwen
from jzero.model.linear import JoinedWeight, PartOfJoined, join_outputs


class Neighbors(NamedTuple):
    """Weights of a layer that a decoder may hold as one `JoinedWeight`."""

    names: tuple[str, ...]
    biases: tuple[str, ...]  # as many, or none
    sizes: tuple[int, ...]  # outputs of each weight
    shards: int  # parts of the outputs: one for each device of `tensor`, or 1


def joins_weights(model: ModelConfig, mesh: Mesh) -> bool:
    """Returns whether the decoder of a run on `mesh` holds weights of the same inputs as one.

    It does on accelerators. Not so with an adapter, whose frozen base the decoder shares with the
    trainer, nor with model.exact, where products have the same bits as the trainer's.
    """
    is_accelerator = mesh.devices.flat[0].platform != "cpu"
    return is_accelerator and not model.adapter.rank and not model.exact


def neighbors(config: qwen.QwenConfig, mesh: Mesh) -> list[Neighbors]:
    """Returns the weights that a decoder on `mesh` can hold as one.

    They are those that the family's layer multiplies by together. Heads of keys and values that
    `tensor` does not divide are on every device, and cannot be beside the split queries.
    """
    linear_layers = adapters.linear_layers(config)
    places = param_shardings(config, mesh)["layers"]
    found = []
    for names in qwen.side_by_side(config):
        split_by = {places[name].spec[2] for name in names}  # behind the layers and the inputs
        if len(split_by) == 1:
            [axis] = split_by
            found.append(
                Neighbors(
                    names=names,
                    biases=tuple(f"{name}_bias" for name in names if f"{name}_bias" in places),
                    sizes=tuple(math.prod(linear_layers[name].outputs) for name in names),
                    shards=mesh.shape[axis] if axis else 1,
                )
            )
    return found


def join_layers(layers: qwen.Params, together: Sequence[Neighbors]) -> dict[str, PyTree]:
    """Joins neighbors, with their biases, in parameters of one layer or of the stack of all.

    The weights are [..., inputs, outputs], and the biases [..., heads, D].
    """
    joined: dict[str, PyTree] = dict(layers)
    for names, biases, sizes, shards in together:

        def side_by_side(*arrays: jax.Array, shards: int = shards) -> jax.Array:
            return join_outputs(arrays, shards)

        flat_biases = [layers[name].reshape(*layers[name].shape[:-2], -1) for name in biases]
        joined |= dict.fromkeys([*names, *biases], PartOfJoined())
        joined[names[0]] = JoinedWeight(
            weight=jax.tree.map(side_by_side, *[layers[name] for name in names]),
            bias=side_by_side(*flat_biases) if biases else None,
            sizes=sizes,
            shards=shards,
        )
    return joined


def join_places(places: dict[str, PyTree], together: Sequence[Neighbors]) -> dict[str, PyTree]:
    """Returns the shardings of what `join_layers` returns, of those of the stack of all layers."""
    joined: dict[str, PyTree] = dict(places)
    for names, biases, sizes, shards in together:
        bias = None
        if biases:
            of_heads = places[biases[0]]
            bias = NamedSharding(of_heads.mesh, P(*of_heads.spec[:-1]))
        joined |= dict.fromkeys([*names, *biases], PartOfJoined())
        joined[names[0]] = JoinedWeight(places[names[0]], bias, sizes, shards)
    return joined
