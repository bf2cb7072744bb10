"""Moved from jzero.sharding."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.distributed.mesh import decode_mesh, make_mesh, param_shardings
from jzero.model import qwen


def decoder_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """Of the decoder's weights: q, k and v are [L, E, H*D], as numbers of heads that do not fill TPU's tiles of 8 would
    have all of them laid out anew in every call."""
    place = param_shardings(config, mesh)
    flat = {
        name: NamedSharding(mesh, P(*place["layers"][name].spec[:-1])) for name in ("q", "k", "v")
    }
    return place | {"layers": place["layers"] | flat}


def gather_program(config: qwen.QwenConfig, train: Mesh, dtype):
    """Jitted: training params -> the decoder's, cast, whole on every host's devices but for tensor. Layer by layer:
    XLA:TPU copies what an all-gather returns, and would hold all weights twice."""
    every = make_mesh(list(train.devices.flat), {"slots": -1, "tensor": train.shape["tensor"]})
    place = decoder_shardings(config, every)
    layer = jax.tree.map(lambda whole: NamedSharding(every, P(*whole.spec[1:])), place["layers"])
    gather = lambda tree, place: jax.lax.with_sharding_constraint(qwen.cast(tree, dtype), place)

    def one(weights: qwen.Params) -> qwen.Params:
        flat = {name: weights[name].reshape(config.hidden_size, -1) for name in ("q", "k", "v")}
        return gather(weights | flat, layer)

    def program(params: qwen.Params) -> qwen.Params:
        rest = {name: gather(x, place[name]) for name, x in params.items() if name != "layers"}
        return rest | {"layers": jax.lax.map(one, params["layers"])}

    return jax.jit(program, out_shardings=place)


def publisher(config: qwen.QwenConfig, train: Mesh, decode: Mesh, dtype):
    """A function from training params to the decoder's: `gather_program`, then this host's own shards."""
    gather, here = gather_program(config, train, dtype), decode_mesh(train)
    local, target = decoder_shardings(config, here), decoder_shardings(config, decode)
    make = jax.make_array_from_single_device_arrays
    view = lambda x, place: make(x.shape, place, [shard.data for shard in x.addressable_shards])
    made = lambda params: jax.tree.map(view, gather(params), local)
    return made if here == decode else lambda params: jax.device_put(made(params), target)
