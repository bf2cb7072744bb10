"""The mesh, and the one table from a parameter's logical axes to mesh axes.

Training runs on (data, fsdp, tensor): rows are split over data and fsdp, gradients are summed over data once a step.
Decoding runs on (slots, tensor) over the same devices. `publish` takes weights from one to the other."""

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
    devices = list(devices or jax.devices())
    sizes = [data, fsdp, tensor]
    named = f"mesh data={data} fsdp={fsdp} tensor={tensor}"
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise ValueError(f"{named}: sizes are positive, and at most one is -1")
    known = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise ValueError(f"{named} does not fill the {len(devices)} devices")
    return mesh(devices, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))


def decode_mesh(train: Mesh) -> Mesh:
    """This host's devices; tensor as in training, the rest are slots."""
    return over_slots([x for x in train.devices.flat if x.process_index == jax.process_index()], train)


def over_slots(devices: Sequence, train: Mesh) -> Mesh:
    tensor = train.shape["tensor"]
    return mesh(devices, {"slots": len(devices) // tensor, "tensor": tensor})


def mesh(devices: Sequence, sizes: dict[str, int]) -> Mesh:
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """A NamedSharding for every parameter; an axis the mesh lacks, or that does not divide, is left whole."""

    def place(axes: tuple[str, ...], leaf) -> NamedSharding:
        names = [RULES[axis] if RULES[axis] in mesh.shape else None for axis in axes]
        fits = [
            name if name and size % mesh.shape[name] == 0 else None
            for name, size in zip(names, leaf.shape, strict=True)
        ]
        return NamedSharding(mesh, P(*fits))

    is_axes = lambda x: isinstance(x, tuple)
    return jax.tree.map(place, qwen.logical_axes(config), qwen.abstract(config), is_leaf=is_axes)


def like_params(tree, params, shardings, mesh: Mesh):
    """Shardings for a tree that holds copies of the params (Optax moments): leaves of a parameter's path and shape
    take its sharding, scalars are replicated."""
    by_path = dict(
        zip(
            [path for path, _ in jax.tree.leaves_with_path(params)],
            zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True),
            strict=True,
        )
    )

    def place(path, leaf):
        for start in range(len(path)):
            match = by_path.get(path[start:])
            if match and match[0].shape == leaf.shape:
                return match[1]
        return NamedSharding(mesh, P())

    return jax.tree.map_with_path(place, tree)


def publish_program(config: qwen.QwenConfig, train: Mesh, dtype):
    """Training params -> the decoder's on every device: cast, then all-gather over data and fsdp."""
    cast = lambda params: jax.tree.map(lambda x: x.astype(dtype), params)
    everywhere = over_slots(list(train.devices.flat), train)
    return jax.jit(cast, out_shardings=param_shardings(config, everywhere))


def publisher(config: qwen.QwenConfig, train: Mesh, decode: Mesh, dtype):
    """A function from training params to the decoder's, on device."""
    program, shardings = publish_program(config, train, dtype), param_shardings(config, decode)
    return lambda params: jax.device_put(program(params), shardings)
