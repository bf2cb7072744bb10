"""Publishing: the weights of the trainer become the weights of the decoder, without a host copy.

One jitted program casts and gathers the weights, so that the devices of every host hold all of
them, split over "tensor" only. Each host then looks at its own shards as arrays of its own decode
mesh.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jzero.distributed.mesh import decode_mesh, make_mesh, param_shardings
from jzero.model import qwen

FLAT = ("q", "k", "v")  # weights that the decoder holds as [L, E, heads * D]
Publish = Callable[[qwen.Params], qwen.Params]  # training parameters -> the decoder's


def decoder_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """Returns the shardings of the decoder's weights, a tree like the parameters.

    q, k and v are [L, E, heads * D] in the decoder. With an axis of heads whose number does not
    fill TPU's tiles of 8, XLA would lay out these weights of all layers anew in every call.
    """
    place = param_shardings(config, mesh)
    layers = dict(place["layers"])
    for name in FLAT:
        without_head_dim = layers[name].spec[:-1]
        layers[name] = NamedSharding(mesh, P(*without_head_dim))
    return place | {"layers": layers}


def gather_program(config: qwen.QwenConfig, train: Mesh, dtype: DTypeLike) -> Publish:
    """Returns the jitted program from training parameters to the decoder's on all hosts.

    The weights are cast to `dtype`, and every host's devices hold all of them, split over "tensor".
    The program goes layer by layer: XLA:TPU copies what an all-gather returns, and would hold all
    weights twice.
    """
    all_devices = list(train.devices.flat)
    mesh = make_mesh(all_devices, {"slots": -1, "tensor": train.shape["tensor"]})
    places = decoder_shardings(config, mesh)

    def in_one_layer(place: NamedSharding) -> NamedSharding:
        """Returns the sharding of one layer's weight, without the axis of layers."""
        return NamedSharding(mesh, P(*place.spec[1:]))

    layer_places = jax.tree.map(in_one_layer, places["layers"])

    def gather(weights: qwen.Params, places: qwen.Params) -> qwen.Params:
        return jax.lax.with_sharding_constraint(qwen.cast(weights, dtype), places)

    def gather_layer(weights: qwen.Params) -> qwen.Params:
        flat = {name: weights[name].reshape(config.hidden_size, -1) for name in FLAT}
        return gather(weights | flat, layer_places)

    def program(params: qwen.Params) -> qwen.Params:
        outer = {
            name: gather(weight, places[name])
            for name, weight in params.items()
            if name != "layers"
        }
        return outer | {"layers": jax.lax.map(gather_layer, params["layers"])}

    return jax.jit(program, out_shardings=places)


def publisher(config: qwen.QwenConfig, train: Mesh, decode: Mesh, dtype: DTypeLike) -> Publish:
    """Returns a function from training parameters to the decoder's on the mesh `decode`.

    Every host calls the function, as the gathering program runs on all of them. The training
    parameters stay as they are. Where `decode` has other devices than this host's part of `train`,
    the weights are copied from device to device.
    """
    gather = gather_program(config, train, dtype)
    here = decode_mesh(train)
    local_places = decoder_shardings(config, here)
    decode_places = decoder_shardings(config, decode)

    def own_shards(x: jax.Array, place: NamedSharding) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, place, shards)

    def publish(params: qwen.Params) -> qwen.Params:
        weights = jax.tree.map(own_shards, gather(params), local_places)
        return weights if here == decode else jax.device_put(weights, decode_places)

    return publish
