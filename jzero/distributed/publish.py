"""Publishing: the weights of the trainer become the weights of the decoder, without a host copy.

One jitted program casts and gathers the weights, so that the devices of every host hold all of
them, split over "tensor" only. Each host then looks at its own shards as arrays of its own decode
mesh.

With rollout.weights=int8 the weights of linear layers are rounded to 8 bits on the way, anew in
every publication, and it is their integers that devices send to each other.

Decoders on accelerators hold weights of the same inputs side by side (`side_by_side.py`).

Where an adapter is trained, the adapter alone goes this way. Its frozen base lies as the decoder's
weights do and is published once: where both meshes split it alike, the decoder's weights are the
trainer's own arrays, and else they are a copy that lasts as long as the base.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jzero.config import AdapterConfig
from jzero.distributed.mesh import adapter_shardings, decode_mesh, make_mesh, param_shardings
from jzero.distributed.side_by_side import join_layers, join_places, neighbors
from jzero.model import adapters, qwen
from jzero.model.linear import as_matrix
from jzero.model.quantized import QuantizedWeight, is_quantized, quantize_on_device

FLAT = ("q", "k", "v")  # weights that the decoder holds as [L, E, heads * D]
Publish = Callable[[qwen.Params], qwen.Params]  # training parameters -> the decoder's


def decoder_shardings(
    config: qwen.QwenConfig, mesh: Mesh, is_int8: bool = False, joins: bool = False
) -> qwen.Params:
    """Returns the shardings of the decoder's weights, a tree like the parameters.

    is_int8: whether the weights of linear layers are in 8 bits.
    joins: whether neighbors are joined.

    q, k and v are [L, E, heads * D] in the decoder. With an axis of heads whose number does not
    fill TPU's tiles of 8, XLA would lay out these weights of all layers anew in every call.
    """
    place = param_shardings(config, mesh)
    layers = dict(place["layers"])
    for name in FLAT:
        without_head_dim = layers[name].spec[:-1]
        layers[name] = NamedSharding(mesh, P(*without_head_dim))
    place = place | {"layers": layers}
    if is_int8:
        place = adapters.map_linear(config, place, quantized_places)
    if joins:
        place = place | {"layers": join_places(place["layers"], neighbors(config, mesh))}
    return place


def quantized_places(place: NamedSharding, target: adapters.Target) -> QuantizedWeight:
    """Returns the shardings of a weight [*stacked, *inputs, *outputs] in 8 bits.

    The values are split as the weight is, and the scales as what is stacked and the outputs.
    """
    num_stacked, num_inputs = len(target.stacked), len(target.inputs)
    of_stack, of_outputs = place.spec[:num_stacked], place.spec[num_stacked + num_inputs :]
    spec = P(*of_stack, *[None] * num_inputs, *of_outputs)
    return QuantizedWeight(place, NamedSharding(place.mesh, spec))


def abstract_quantized(weight: jax.ShapeDtypeStruct, target: adapters.Target) -> QuantizedWeight:
    """Returns shapes, types and shardings of a weight [*stacked, *inputs, *outputs] in 8 bits."""
    places = quantized_places(weight.sharding, target)
    num_stacked, num_inputs = len(target.stacked), len(target.inputs)
    outputs = weight.shape[num_stacked + num_inputs :]
    scales = (*target.stacked, *[1] * num_inputs, *outputs)
    return QuantizedWeight(
        jax.ShapeDtypeStruct(weight.shape, jnp.int8, sharding=places.values),
        jax.ShapeDtypeStruct(scales, jnp.float32, sharding=places.scale),
    )


def abstract_decoder_weights(
    config: qwen.QwenConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    is_int8: bool = False,
    joins: bool = False,
) -> qwen.Params:
    """Returns shapes, types and shardings of weights that lie as the decoder's, on any mesh."""

    def place(
        path: tuple, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        if len(sharding.spec) < len(shape):  # heads and head_dim are one axis
            shape = (*shape[:-2], shape[-2] * shape[-1])
        kept = qwen.dtype_of(path, dtype)
        return jax.ShapeDtypeStruct(shape, kept, sharding=sharding)

    weights = jax.tree.map_with_path(place, qwen.abstract(config), decoder_shardings(config, mesh))
    if is_int8:
        weights = adapters.map_linear(config, weights, abstract_quantized)
    if not joins:
        return weights
    join = partial(join_layers, together=neighbors(config, mesh))
    joined = weights | {"layers": jax.eval_shape(join, weights["layers"])}
    places = decoder_shardings(config, mesh, is_int8, joins)
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), joined, places)


def gather_program(
    config: qwen.QwenConfig,
    train: Mesh,
    dtype: DTypeLike,
    is_int8: bool = False,
    quantizes: bool = False,
    joins: bool = False,
) -> jax.stages.Wrapped:
    """Returns the jitted program from training parameters to the decoder's on all hosts.

    The weights are cast to `dtype`, and every host's devices hold all of them, split over "tensor".
    The program goes layer by layer: XLA:TPU copies what an all-gather returns, and would hold all
    weights twice.

    is_int8: whether the weights of linear layers are in 8 bits already: those of a frozen base.
    quantizes: whether the program puts them into 8 bits.
    joins: whether it joins neighbors.
    """
    mesh = mesh_of_all_decoders(train)
    places = decoder_shardings(config, mesh, is_int8 or quantizes, joins)
    train_places = param_shardings(config, train)["layers"]
    linear_layers = adapters.linear_layers(config) if quantizes else {}

    def in_one_layer(place: NamedSharding) -> NamedSharding:
        """Returns the sharding of one layer's weight, without the axis of layers."""
        return NamedSharding(mesh, P(*place.spec[1:]))

    together = neighbors(config, mesh) if joins else []
    layer_places = jax.tree.map(in_one_layer, places["layers"])

    def quantize_layer(name: str, weight: jax.Array) -> jax.Array | QuantizedWeight:
        """Puts one layer's weight into 8 bits where it lies, if it is one of a linear layer."""
        if name not in linear_layers:
            return weight
        target = linear_layers[name]
        num_experts_axes = len(target.stacked) - 1  # without the axis of layers
        quantized = quantize_on_device(weight, len(target.inputs), num_experts_axes)
        # Without this XLA might gather the weight in more bits, and then round it.
        here = NamedSharding(train, P(*train_places[name].spec[1:]))
        values = jax.lax.with_sharding_constraint(quantized.values, here)
        return QuantizedWeight(values, quantized.scale)

    def gather(weights: qwen.Params, places: qwen.Params) -> qwen.Params:
        return jax.lax.with_sharding_constraint(qwen.cast(weights, dtype), places)

    def gather_layer(weights: qwen.Params) -> qwen.Params:
        weights = {name: quantize_layer(name, weight) for name, weight in weights.items()}
        if not is_int8:  # which is flat already
            names = [name for name in FLAT if name in weights]
            weights = weights | {
                name: as_matrix(weights[name], config.hidden_size) for name in names
            }
        weights = join_layers(weights, together)
        return gather(weights, {name: layer_places[name] for name in weights})

    def program(params: qwen.Params) -> qwen.Params:
        outer = {
            name: gather(weight, places[name])
            for name, weight in params.items()
            if name != "layers"
        }
        layers = {}
        for stacks in by_length(params["layers"]):
            layers |= jax.lax.map(gather_layer, stacks)
        return outer | {"layers": layers}

    return jax.jit(program, out_shardings=places)


def by_length(stacks: qwen.Params) -> list[qwen.Params]:
    """Returns the stacks of layers in dicts of stacks of one length.

    There is one dict, unless a parameter belongs to some of the layers alone.
    """
    groups: dict[int, qwen.Params] = {}
    for name, stack in stacks.items():
        length = len(jax.tree.leaves(stack)[0])
        groups.setdefault(length, {})[name] = stack
    return list(groups.values())


def publisher(
    config: qwen.QwenConfig,
    train: Mesh,
    decode: Mesh,
    dtype: DTypeLike,
    adapter: AdapterConfig | None = None,
    quantizes: bool = False,
    joins: bool = False,
) -> Publish:
    """Returns a function from training parameters to the decoder's on the mesh `decode`.

    The parameters are those of the whole model: plain, a frozen base, or a base with its adapter as
    `adapters.join` returns it. `adapter` says which adapter, if there may be one. `quantizes` puts
    the weights of linear layers into 8 bits, and `joins` puts neighbors side by side; both ask for
    plain parameters.

    Every host calls the function, as the gathering programs run on all of them. The training
    parameters stay as they are. Where `decode` has other devices than this host's part of `train`,
    the weights are copied from device to device.
    """
    gather = gather_program(config, train, dtype, quantizes=quantizes, joins=joins)
    gather_adapter = None
    here = decode_mesh(train)
    local_adapter_places: qwen.Params = {"layers": {}}
    decode_adapter_places: qwen.Params = {"layers": {}}
    if adapter is not None and adapter.rank:
        gather_adapter = gather_adapter_program(config, adapter, train, dtype)
        local_adapter_places = adapter_shardings(config, adapter, here)
        decode_adapter_places = adapter_shardings(config, adapter, decode)

    def own_shards(x: jax.Array, place: NamedSharding) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, place, shards)

    def on_decoder(gathered: qwen.Params, local: qwen.Params, places: qwen.Params) -> qwen.Params:
        weights = jax.tree.map(own_shards, gathered, local)
        return weights if here == decode else jax.device_put(weights, places)

    def publish_whole(params: qwen.Params) -> qwen.Params:
        """Publishes a model without an adapter."""
        is_base = is_frozen_base(params)
        assert not (quantizes and is_base), "a frozen base has its own bits: model.base"
        assert not (joins and is_base), "a frozen base lies as it does in the trainer"
        is_int8 = quantizes or has_quantized(params)
        if is_base and lies_as_decoder(config, params, train):
            gathered = params
        elif has_quantized(params):  # once in a run: the program is not kept
            gathered = gather_program(config, train, dtype, is_int8=True)(params)
        else:
            gathered = gather(params)
        local_places = decoder_shardings(config, here, is_int8, joins)
        places = decoder_shardings(config, decode, is_int8, joins)
        return on_decoder(gathered, local_places, places)

    # The arrays of the last base, and the decoder's weights that were made of them.
    last_base: list[jax.Array] = []
    last_weights: qwen.Params = {}

    def publish_base(base: qwen.Params) -> qwen.Params:
        """Publishes a frozen base, unless it was the last one to be published."""
        nonlocal last_base, last_weights
        leaves = jax.tree.leaves(base)
        is_published = len(leaves) == len(last_base) and all(map(is_same, leaves, last_base))
        if not is_published:
            last_base, last_weights = leaves, publish_whole(base)
        return last_weights

    def publish(params: qwen.Params) -> qwen.Params:
        base, changes = adapters.split(params)
        if not is_frozen_base(base):
            # The next update donates these parameters: the decoder must not read the same arrays.
            assert not changes["layers"], "an adapter needs a frozen base"
            return publish_whole(base)
        weights = publish_base(base)
        if gather_adapter is None or not changes["layers"]:
            return weights
        published = on_decoder(gather_adapter(changes), local_adapter_places, decode_adapter_places)
        return adapters.join(weights, published, adapters.scale_of(params))

    return publish


def gather_adapter_program(
    config: qwen.QwenConfig, adapter: AdapterConfig, train: Mesh, dtype: DTypeLike
) -> jax.stages.Wrapped:
    """Returns the jitted program from a trainer's adapter to the decoder's on all hosts."""
    places = adapter_shardings(config, adapter, mesh_of_all_decoders(train))

    def program(adapter: qwen.Params) -> qwen.Params:
        return qwen.cast(adapter, dtype)

    return jax.jit(program, out_shardings=places)


def mesh_of_all_decoders(train: Mesh) -> Mesh:
    """Returns the mesh (slots, tensor) of the decoders of all hosts together."""
    return make_mesh(list(train.devices.flat), {"slots": -1, "tensor": train.shape["tensor"]})


def is_frozen_base(params: qwen.Params) -> bool:
    """Returns whether parameters are a frozen base: it lies as the decoder's weights do."""
    flat_axes = 3  # [L, E, heads * D]
    weight = params["layers"][FLAT[0]]
    return is_quantized(weight) or weight.ndim == flat_axes


def has_quantized(params: qwen.Params) -> bool:
    """Returns whether weights of linear layers are in 8 bits."""
    return any(map(is_quantized, params["layers"].values()))


def lies_as_decoder(config: qwen.QwenConfig, base: qwen.Params, train: Mesh) -> bool:
    """Returns whether every device holds the part of a base that its decoder needs."""
    places = decoder_shardings(config, mesh_of_all_decoders(train), has_quantized(base))

    def lies_there(x: jax.Array, place: NamedSharding) -> bool:
        return x.sharding.is_equivalent_to(place, x.ndim)

    return all(jax.tree.leaves(jax.tree.map(lies_there, base, places)))


def is_same(first: object, second: object) -> bool:
    return first is second


def published_bytes(weights: qwen.Params) -> int:
    """Returns the bytes on one device of what is published anew: an adapter, or else the model."""
    _, adapter = adapters.split(weights)
    return bytes_of_one_device(adapter if adapter["layers"] else weights)


def bytes_of_one_device(weights: qwen.Params) -> int:
    """Returns the bytes that the weights take on one device, the first of this host."""
    leaves = jax.tree.leaves(weights)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
