"""The decoder's layout of the weights: fused weights, and layers apart.

Weights with the same inputs are fused (fused QKV), so that one product replaces several.

A decode step multiplies only a few rows by each weight, so it takes as long as reading the weights.
One large weight is read faster than several small ones: by XLA's estimate, gate and up of
Qwen2.5-3B, each [2048, 11008], take 12 % less time on a v5e as one weight (lab/log.md,
2026-11-23).

The class of a layer lists the weights that it can fuse: `layers.DenseLayer.SIDE_BY_SIDE`.
`linear.products` multiplies by them, fused or not.

On a GPU every layer is a tree of its own, and the loop over the layers is unrolled. cuBLAS
multiplies only by whole arrays, so in a loop over stacks XLA would copy every layer's weights
before each product: a third of a decode step of Qwen2.5-3B on an H200 (lab/gpu.md).
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jzero.config import ModelConfig
from jzero.hosts.platform import platform_of
from jzero.model import adapters, qwen
from jzero.model.families import family_of
from jzero.model.linear import JoinedWeight, PartOfJoined, join_outputs
from jzero.sharding.mesh import param_shardings


class Neighbors(NamedTuple):
    """Weights of a layer that a decoder may hold as one `JoinedWeight`."""

    names: tuple[str, ...]
    biases: tuple[str, ...]  # one per name, or empty
    sizes: tuple[int, ...]  # number of outputs of each weight
    shards: int  # parts that the outputs are split into: one per device of `tensor`, or 1


class WeightLayout(NamedTuple):
    """How the decoder's weights differ from the trainer's, besides their types."""

    joins: bool = False  # weights with the same inputs are fused
    apart: bool = False  # params["layers"] is a tuple with the weights of each layer


AS_TRAINED = WeightLayout()


def weight_layout(config: qwen.QwenConfig, model: ModelConfig, mesh: Mesh) -> WeightLayout:
    """Returns the layout of the decoder of a run on `mesh`.

    It is the trainer's on CPUs, with adapters and in exact mode.
    """
    # With an adapter, the decoder shares the frozen base with the trainer. With model.exact,
    # products must have the same bits as the trainer's.
    platform = platform_of(mesh)
    if platform == "cpu" or model.adapter.rank or model.exact:
        return AS_TRAINED
    is_one_kind = family_of(config.model_type).stack is None  # a hybrid has a loop of its own
    return WeightLayout(joins=True, apart=platform == "gpu" and is_one_kind)


def layers_apart(stacks: qwen.Params) -> tuple[qwen.Params, ...]:
    """Returns the weights of each layer, from the stacks of all layers."""
    num_layers = len(jax.tree.leaves(stacks)[0])
    return tuple(jax.tree.map(itemgetter(layer), stacks) for layer in range(num_layers))


def neighbors(config: qwen.QwenConfig, mesh: Mesh) -> list[Neighbors]:
    """Returns the groups of weights that a decoder on `mesh` can fuse.

    The groups come from the layer of the model's family.
    """
    linear_layers = adapters.linear_layers(config)
    places = param_shardings(config, mesh)["layers"]
    groups = []
    for names in qwen.side_by_side(config):
        split_by = {places[name].spec[2] for name in names}  # axis 2: after layers and inputs
        # KV heads that `tensor` does not divide are replicated on every device, and cannot be fused
        # with the split queries.
        if len(split_by) == 1:
            [axis] = split_by
            all_biases = (f"{name}_bias" for name in names)
            biases = tuple(bias for bias in all_biases if bias in places)
            sizes = tuple(math.prod(linear_layers[name].outputs) for name in names)
            shards = mesh.shape[axis] if axis else 1
            groups.append(Neighbors(names, biases, sizes, shards))
    return groups


def join_layers(layers: qwen.Params, together: Sequence[Neighbors]) -> dict[str, PyTree]:
    """Fuses neighbors and their biases, in the parameters of one layer or of all layers stacked.

    The weights are [..., inputs, outputs], and the biases [..., heads, D].
    """
    joined: dict[str, PyTree] = dict(layers)
    for names, biases, sizes, shards in together:

        def side_by_side(*arrays: jax.Array, shards: int = shards) -> jax.Array:
            return join_outputs(arrays, shards)

        flat_biases = []
        for name in biases:
            bias = layers[name]
            flat_biases.append(bias.reshape(*bias.shape[:-2], -1))
        # The first name holds the fused weight. The other names are placeholders.
        joined |= dict.fromkeys([*names, *biases], PartOfJoined())
        joined[names[0]] = JoinedWeight(
            weight=jax.tree.map(side_by_side, *[layers[name] for name in names]),
            bias=side_by_side(*flat_biases) if biases else None,
            sizes=sizes,
            shards=shards,
        )
    return joined


def join_places(places: dict[str, PyTree], together: Sequence[Neighbors]) -> dict[str, PyTree]:
    """Returns the shardings of the result of `join_layers` for the stack of all layers."""
    joined: dict[str, PyTree] = dict(places)
    for names, biases, sizes, shards in together:
        bias = None
        if biases:
            bias_place = places[biases[0]]
            bias = NamedSharding(bias_place.mesh, P(*bias_place.spec[:-1]))
        joined |= dict.fromkeys([*names, *biases], PartOfJoined())
        joined[names[0]] = JoinedWeight(places[names[0]], bias, sizes, shards)
    return joined
