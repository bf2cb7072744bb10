"""Publishes the trainer's weights to the decoder without a copy through the host.

One jitted program casts and gathers the weights, so that the devices of every host hold all
weights, split only over "tensor". Each host then views its shards as arrays on its decode mesh.

With rollout.weights=int8 or fp8, each publication quantizes the weights of linear layers, and the
devices exchange the 8-bit values.

Decoders on accelerators use fused weights, such as fused QKV, and on GPUs one tree of weights for
each layer (`side_by_side.py`).

If an adapter is trained, only the adapter is published every time. Its frozen base has the
decoder's layout and is published once. If both meshes split the base alike, the decoder reads the
trainer's own arrays; otherwise the decoder has a copy that lasts as long as the base.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jzero.config import AdapterConfig
from jzero.model import adapters, qwen
from jzero.model.linear import as_matrix
from jzero.model.quantized import QuantizedWeight, is_quantized, quantize_on_device
from jzero.numerics.eight_bits import FORMATS
from jzero.sharding.mesh import adapter_shardings, decode_mesh, make_mesh, param_shardings
from jzero.sharding.side_by_side import (
    AS_TRAINED,
    WeightLayout,
    join_layers,
    join_places,
    layers_apart,
    neighbors,
)

FLAT = ("q", "k", "v")  # weights that the decoder holds as [L, E, heads * D]
Publish = Callable[[qwen.Params], qwen.Params]  # training parameters -> the decoder's


def decoder_shardings(
    config: qwen.QwenConfig,
    mesh: Mesh,
    has_scales: bool = False,
    layout: WeightLayout = AS_TRAINED,
) -> qwen.Params:
    """Returns the shardings of the decoder's weights.

    has_scales: whether the weights of linear layers are quantized.
    """
    place = stack_shardings(config, mesh, has_scales, layout.joins)
    if not layout.apart:
        return place
    layer_shardings = jax.tree.map(without_layers, place["layers"])
    return place | {"layers": (layer_shardings,) * config.num_hidden_layers}


def without_layers(place: NamedSharding) -> NamedSharding:
    """Returns the sharding of one layer's weight, without the axis of layers."""
    return NamedSharding(place.mesh, P(*place.spec[1:]))


def stack_shardings(
    config: qwen.QwenConfig, mesh: Mesh, has_scales: bool, joins: bool
) -> qwen.Params:
    """Returns the shardings of the decoder's weights with stacks of all layers."""
    # q, k and v are [L, E, heads * D] in the decoder. With an axis of heads whose number does not
    # fill TPU's tiles of 8, XLA would copy these weights of all layers to another layout in every
    # call.
    place = param_shardings(config, mesh)
    layers = dict(place["layers"])
    for name in FLAT:
        without_head_dim = layers[name].spec[:-1]
        layers[name] = NamedSharding(mesh, P(*without_head_dim))
    place = place | {"layers": layers}
    if has_scales:
        place = adapters.map_linear(config, place, quantized_places)
    if joins:
        place = place | {"layers": join_places(place["layers"], neighbors(config, mesh))}
    return place


def quantized_places(place: NamedSharding, target: adapters.Target) -> QuantizedWeight:
    """Returns the shardings of an 8-bit weight [*stacked, *inputs, *outputs].

    The values are split like the weight, the scales like its stacked axes and outputs.
    """
    num_stacked, num_inputs = len(target.stacked), len(target.inputs)
    stacked_axes = place.spec[:num_stacked]
    output_axes = place.spec[num_stacked + num_inputs :]
    spec = P(*stacked_axes, *[None] * num_inputs, *output_axes)
    return QuantizedWeight(place, NamedSharding(place.mesh, spec))


def abstract_quantized(
    weight: jax.ShapeDtypeStruct, target: adapters.Target, dtype: DTypeLike
) -> QuantizedWeight:
    """Returns shapes, types and shardings of an 8-bit weight [*stacked, *inputs, *outputs]."""
    places = quantized_places(weight.sharding, target)
    num_stacked, num_inputs = len(target.stacked), len(target.inputs)
    outputs = weight.shape[num_stacked + num_inputs :]
    scales = (*target.stacked, *[1] * num_inputs, *outputs)
    return QuantizedWeight(
        jax.ShapeDtypeStruct(weight.shape, dtype, sharding=places.values),
        jax.ShapeDtypeStruct(scales, jnp.float32, sharding=places.scale),
    )


def abstract_decoder_weights(
    config: qwen.QwenConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    precision: str = "native",
    layout: WeightLayout = AS_TRAINED,
) -> qwen.Params:
    """Returns shapes, types and shardings of weights in the decoder's layout, on any mesh.

    precision: of the linear layers' weights: a key of FORMATS, or "native" for `dtype`.
    """
    has_scales = precision in FORMATS

    def place(
        path: tuple,
        leaf: jax.ShapeDtypeStruct,
        sharding: NamedSharding,
    ) -> jax.ShapeDtypeStruct:
        shape = leaf.shape
        if len(sharding.spec) < len(shape):  # heads and head_dim are one axis
            shape = (*shape[:-2], shape[-2] * shape[-1])
        leaf_dtype = qwen.dtype_of(path, dtype)
        return jax.ShapeDtypeStruct(shape, leaf_dtype, sharding=sharding)

    weights = jax.tree.map_with_path(place, qwen.abstract(config), decoder_shardings(config, mesh))
    if has_scales:
        quantized = partial(abstract_quantized, dtype=FORMATS[precision].dtype)
        weights = adapters.map_linear(config, weights, quantized)
    # `eval_shape` returns shapes without shardings, which are added below.
    layers = weights["layers"]
    if layout.joins:
        layers = jax.eval_shape(partial(join_layers, together=neighbors(config, mesh)), layers)
    if layout.apart:
        layers = jax.eval_shape(layers_apart, layers)
    places = decoder_shardings(config, mesh, has_scales, layout)
    return jax.tree.map(
        lambda leaf, place: leaf.update(sharding=place), weights | {"layers": layers}, places
    )


def gather_program(
    config: qwen.QwenConfig,
    train: Mesh,
    dtype: DTypeLike,
    precision: str = "native",
    is_quantized_base: bool = False,
    layout: WeightLayout = AS_TRAINED,
) -> jax.stages.Wrapped:
    """Returns the jitted program from training parameters to the decoder's weights on all hosts.

    The weights are cast to `dtype`, and every host's devices hold all of them, split over "tensor".

    precision: of the decoder's linear layers: a key of FORMATS, or "native" for `dtype`.
    is_quantized_base: whether the parameters are a frozen base that is in this precision already.
    """
    has_scales = precision in FORMATS
    mesh = all_decoders_mesh(train)
    places = decoder_shardings(config, mesh, has_scales, layout)
    stack_places = stack_shardings(config, mesh, has_scales, layout.joins)
    train_places = param_shardings(config, train)["layers"]
    quantizes = has_scales and not is_quantized_base
    linear_layers = adapters.linear_layers(config) if quantizes else {}

    together = neighbors(config, mesh) if layout.joins else []
    layer_places = jax.tree.map(without_layers, stack_places["layers"])

    def quantize_layer(name: str, weight: jax.Array) -> jax.Array | QuantizedWeight:
        """Quantizes one layer's weight on its shards, if it belongs to a linear layer."""
        if name not in linear_layers:
            return weight
        target = linear_layers[name]
        num_experts_axes = len(target.stacked) - 1  # without the axis of layers
        quantized = quantize_on_device(
            weight, len(target.inputs), num_experts_axes, FORMATS[precision]
        )
        # Without this constraint, XLA might gather the weight in higher precision and quantize it
        # after.
        train_place = NamedSharding(train, P(*train_places[name].spec[1:]))
        values = jax.lax.with_sharding_constraint(quantized.values, train_place)
        return QuantizedWeight(values, quantized.scale)

    def gather(weights: qwen.Params, places: qwen.Params) -> qwen.Params:
        return jax.lax.with_sharding_constraint(qwen.cast(weights, dtype), places)

    def gather_layer(weights: qwen.Params) -> qwen.Params:
        weights = {name: quantize_layer(name, weight) for name, weight in weights.items()}
        if not is_quantized_base:  # which is flat already
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
        if layout.apart:
            each = layers_apart(params["layers"])
            return outer | {"layers": tuple(map(gather_layer, each))}
        layers = {}
        # One layer at a time: XLA:TPU copies the result of an all-gather, and would hold all
        # weights twice.
        for stacks in by_length(params["layers"]):
            layers |= jax.lax.map(gather_layer, stacks)
        return outer | {"layers": layers}

    return jax.jit(program, out_shardings=places)


def by_length(stacks: qwen.Params) -> list[qwen.Params]:
    """Groups the stacks of layers by their length.

    There is one group, unless a parameter belongs to only some of the layers.
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
    precision: str = "native",
    layout: WeightLayout = AS_TRAINED,
) -> Publish:
    """Returns a function from training parameters to the decoder's weights on the mesh `decode`.

    The parameters cover the full model: plain, a frozen base, or a base with its adapter as
    returned by `adapters.join`. `adapter` describes the adapter, if there may be one. `precision`
    is a key of FORMATS if the weights of linear layers are quantized. This requires plain
    parameters, and so does any `layout` but the trainer's.

    Every host calls the function, because the gathering programs run on all hosts. The training
    parameters are not changed. If `decode` has other devices than this host's part of `train`, the
    weights are copied from device to device.
    """
    quantizes = precision in FORMATS
    gather = gather_program(config, train, dtype, precision, layout=layout)
    gather_adapter = None
    local_mesh = decode_mesh(train)
    local_adapter_places: qwen.Params = {"layers": {}}
    decode_adapter_places: qwen.Params = {"layers": {}}
    if adapter is not None and adapter.rank:
        gather_adapter = gather_adapter_program(config, adapter, train, dtype)
        local_adapter_places = adapter_shardings(config, adapter, local_mesh)
        decode_adapter_places = adapter_shardings(config, adapter, decode)

    def local_shards(x: jax.Array, place: NamedSharding) -> jax.Array:
        # The new array shares the buffers of the old one; only its mesh is different.
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, place, shards)

    def on_decoder(gathered: qwen.Params, local: qwen.Params, places: qwen.Params) -> qwen.Params:
        weights = jax.tree.map(local_shards, gathered, local)
        return weights if local_mesh == decode else jax.device_put(weights, places)

    def publish_whole(params: qwen.Params) -> qwen.Params:
        """Publishes a model without an adapter."""
        is_base = is_frozen_base(params)
        assert not (quantizes and is_base), "a frozen base has its own bits: model.base"
        assert not (is_base and layout != AS_TRAINED), (
            "a frozen base lies as it does in the trainer"
        )
        has_scales = quantizes or has_quantized(params)
        # Every device already holds the part that its decoder needs.
        if is_base and has_decoder_layout(config, params, train):
            gathered = params
        elif has_quantized(params):  # once per run, so the program is not cached
            gathered = gather_program(config, train, dtype, "int8", is_quantized_base=True)(params)
        else:
            gathered = gather(params)
        local_places = decoder_shardings(config, local_mesh, has_scales, layout)
        places = decoder_shardings(config, decode, has_scales, layout)
        return on_decoder(gathered, local_places, places)

    # The arrays of the last published base, and the decoder's weights made from them.
    last_base: list[jax.Array] = []
    last_weights: qwen.Params = {}

    def publish_base(base: qwen.Params) -> qwen.Params:
        """Publishes a frozen base, unless the last call published the same base."""
        # Identity of the arrays is enough, because a base is never changed in place.
        nonlocal last_base, last_weights
        leaves = jax.tree.leaves(base)
        is_published = len(leaves) == len(last_base) and all(map(is_same, leaves, last_base))
        if not is_published:
            last_base, last_weights = leaves, publish_whole(base)
        return last_weights

    def publish(params: qwen.Params) -> qwen.Params:
        base, changes = adapters.split(params)
        if not is_frozen_base(base):
            # The next update donates these parameters, so the decoder must not read the same
            # arrays.
            assert not adapters.factors_of(changes), "an adapter needs a frozen base"
            return publish_whole(base)
        # A frozen base does not change, so only the adapter is gathered each time.
        weights = publish_base(base)
        if gather_adapter is None or not adapters.factors_of(changes):
            return weights
        published = on_decoder(gather_adapter(changes), local_adapter_places, decode_adapter_places)
        return adapters.join(weights, published, adapters.scale_of(params))

    return publish


def gather_adapter_program(
    config: qwen.QwenConfig,
    adapter: AdapterConfig,
    train: Mesh,
    dtype: DTypeLike,
) -> jax.stages.Wrapped:
    """Returns the jitted program from a trainer's adapter to the decoder's on all hosts."""
    places = adapter_shardings(config, adapter, all_decoders_mesh(train))

    def program(adapter: qwen.Params) -> qwen.Params:
        return qwen.cast(adapter, dtype)

    return jax.jit(program, out_shardings=places)


def all_decoders_mesh(train: Mesh) -> Mesh:
    """Returns the mesh (slots, tensor) of the decoders of all hosts together."""
    return make_mesh(list(train.devices.flat), {"slots": -1, "tensor": train.shape["tensor"]})


def is_frozen_base(params: qwen.Params) -> bool:
    """Returns whether parameters are a frozen base, which has the decoder's layout."""
    flat_axes = 3  # [L, E, heads * D]
    weight = params["layers"][FLAT[0]]
    return is_quantized(weight) or weight.ndim == flat_axes


def has_quantized(params: qwen.Params) -> bool:
    """Returns whether weights of linear layers are quantized."""
    return any(map(is_quantized, params["layers"].values()))


def has_decoder_layout(config: qwen.QwenConfig, base: qwen.Params, train: Mesh) -> bool:
    """Returns whether every device holds the part of a base that its decoder needs."""
    places = decoder_shardings(config, all_decoders_mesh(train), has_quantized(base))

    def has_place(x: jax.Array, place: NamedSharding) -> bool:
        return x.sharding.is_equivalent_to(place, x.ndim)

    return all(jax.tree.leaves(jax.tree.map(has_place, base, places)))


def is_same(first: object, second: object) -> bool:
    return first is second


def published_bytes(weights: qwen.Params) -> int:
    """Returns the bytes on one device that each publication writes: an adapter or a model."""
    if isinstance(weights["layers"], tuple):  # apart: without an adapter
        return bytes_of_one_device(weights)
    return bytes_of_one_device(adapters.trained_part(weights))


def bytes_of_one_device(weights: qwen.Params) -> int:
    """Returns the bytes of the weights on one device, the first of this host."""
    leaves = jax.tree.leaves(weights)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
