"""The mesh, and the one table from a parameter's logical axes to mesh axes. Training runs on (data, fsdp, tensor),
decoding on (slots, tensor) over the same devices; `publish` takes weights from one to the other."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.errors import UserError
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
        raise UserError(f"{named}: sizes are positive, and at most one is -1")
    try:
        train = make_mesh(devices, sizes)
    except ValueError:
        raise UserError(f"{named} does not fill the {len(devices)} devices") from None
    tensor = train.shape["tensor"]
    local = sum(device.process_index == devices[0].process_index for device in devices)
    if local % tensor:
        raise UserError(
            f"mesh.tensor={tensor} must divide the {local} devices of a host, which decode together"
        )
    return train


def split_devices(decode: int) -> tuple[list, list]:
    """Devices that train, and this host's that decode at the same time: the last `decode` of each host's."""
    devices = sorted(jax.devices(), key=lambda device: device.id)
    hosts = [
        [device for device in devices if device.process_index == n]
        for n in range(jax.process_count())
    ]
    if decode >= (least := min(map(len, hosts))):
        raise UserError(
            f"mesh.decode_devices={decode} leaves none of the {least} devices of a host to train"
        )
    here = hosts[jax.process_index()]
    return [device for each in hosts for device in each[: len(each) - decode]], here[
        len(here) - decode :
    ]


def decode_mesh(train: Mesh, process: int | None = None) -> Mesh:
    """The devices of one host (default: this one); tensor as in training, the rest are slots."""
    process = jax.process_index() if process is None else process
    local = [device for device in train.devices.flat if device.process_index == process]
    return make_mesh(local, {"slots": -1, "tensor": train.shape["tensor"]})


def make_mesh(devices: Sequence, sizes: dict[str, int]) -> Mesh:
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
