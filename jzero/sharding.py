"""The mesh, and the one table from a parameter's logical axes to mesh axes. Training runs on (data, fsdp, tensor),
decoding on (slots, tensor) over the same devices; `publish` takes weights from one to the other."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.model import qwen

RULES = {  # logical axis -> mesh axis
    "vocab": "tensor",
    "embed": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "layers": None,
    "norm": None,
}
ROWS = P(None, ("data", "fsdp"))  # of a batch [M, B, T]


def train_mesh(data: int, fsdp: int, tensor: int, devices: Sequence | None = None) -> Mesh:
    """One of the sizes may be -1: what the others leave of the devices."""
    devices = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    named = f"mesh data={data} fsdp={fsdp} tensor={tensor}"
    if [*sizes.values()].count(-1) > 1 or any(size == 0 or size < -1 for size in sizes.values()):
        raise ValueError(f"{named}: sizes are positive, and at most one is -1")
    try:
        train = mesh(devices, sizes)
    except ValueError:
        raise ValueError(f"{named} does not fill the {len(devices)} devices") from None
    tensor = train.shape["tensor"]
    local = sum(device.process_index == devices[0].process_index for device in devices)
    if local % tensor:
        raise ValueError(f"mesh.tensor={tensor} must divide the {local} devices of a host, which decode together")
    return train


def split(decode: int) -> tuple[list, list]:
    """Devices that train, and this host's that decode at the same time: the last `decode` of each host's."""
    devices = sorted(jax.devices(), key=lambda device: device.id)
    hosts = [[device for device in devices if device.process_index == n] for n in range(jax.process_count())]
    if decode >= (least := min(map(len, hosts))):
        raise ValueError(f"mesh.decode={decode} leaves none of the {least} devices of a host to train")
    here = hosts[jax.process_index()]
    return [device for each in hosts for device in each[: len(each) - decode]], here[len(here) - decode :]


def decode_mesh(train: Mesh, process: int | None = None) -> Mesh:
    """The devices of one host (default: this one); tensor as in training, the rest are slots."""
    process = jax.process_index() if process is None else process
    local = [device for device in train.devices.flat if device.process_index == process]
    return mesh(local, {"slots": -1, "tensor": train.shape["tensor"]})


def mesh(devices: Sequence, sizes: dict[str, int]) -> Mesh:
    """A size of -1 is what the others leave."""
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """A NamedSharding for every parameter; an axis the mesh lacks, or that does not divide, is left whole."""

    def place(axes: tuple[str, ...], leaf) -> NamedSharding:
        names = [(RULES[axis], size) for axis, size in zip(axes, leaf.shape, strict=True)]
        fits = lambda name, size: name in mesh.shape and size % mesh.shape[name] == 0
        return NamedSharding(mesh, P(*(name if fits(name, size) else None for name, size in names)))

    is_axes = lambda x: isinstance(x, tuple)
    return jax.tree.map(place, qwen.logical_axes(config), qwen.abstract(config), is_leaf=is_axes)


def decoder_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """Of the decoder's weights: q, k and v are [L, E, H*D], as numbers of heads that do not fill TPU's tiles of 8 would
    have all of them laid out anew in every call."""
    place = param_shardings(config, mesh)
    flat = {name: NamedSharding(mesh, P(*place["layers"][name].spec[:-1])) for name in ("q", "k", "v")}
    return place | {"layers": place["layers"] | flat}


def gather_program(config: qwen.QwenConfig, train: Mesh, dtype):
    """Jitted: training params -> the decoder's, cast, whole on every host's devices but for tensor. Layer by layer:
    XLA:TPU copies what an all-gather returns, and would hold all weights twice."""
    every = mesh(list(train.devices.flat), {"slots": -1, "tensor": train.shape["tensor"]})
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
