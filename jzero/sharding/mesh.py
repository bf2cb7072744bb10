"""Builds device meshes, and maps a parameter's logical axes to mesh axes in one table.

Training runs on a mesh (data, fsdp, tensor) over all devices, or on (data, fsdp, context, tensor)
with context parallelism (`context.py`). Several slices have an axis "slices" before these: each
slice holds a copy of the parameters. Decoding runs on a mesh (slots, tensor) over the devices of
one host: the same devices or, with rollout.placement=apart, others. With
rollout.hosts_per_decoder above 1, "tensor" spans the devices of several hosts, which decode
together. `publish.py` copies weights from one mesh to the other.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jzero.config import AdapterConfig, MeshConfig
from jzero.errors import UserError
from jzero.model import adapters, qwen

# Logical axis of a parameter -> the mesh axes that split it; None: never split.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": "tensor",
    # The devices of a context group compute with the same weights, so "context" splits them, too.
    "embed": ("fsdp", "context"),
    "mlp": "tensor",
    "experts": "tensor",  # expert parallelism: the columns of an expert are not split
    "expert_mlp": None,
    "router": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "channels": None,  # a gated delta net's convolution: the heads of q, then of k, then of v
    "layers": None,
    "norm": None,
    "rank": None,
}
SLICES = "slices"  # the first axis of a mesh over several slices
ROW_AXES = ("data", "fsdp")  # the mesh axes that split rows within a slice


class Device(Protocol):
    """The attributes of a `jax.Device` that are used here: type checkers cannot see its class."""

    @property
    def id(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


def configured_mesh(
    settings: MeshConfig,
    devices: Sequence[Device] | None = None,
    hosts_per_decoder: int = 1,
) -> Mesh:
    """Returns `train_mesh` with the sizes in the settings."""
    return train_mesh(
        settings.data,
        settings.fsdp,
        settings.tensor,
        devices,
        context=settings.context,
        slices=settings.slices,
        hosts_per_decoder=hosts_per_decoder,
    )


def train_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices: Sequence[Device] | None = None,
    context: int = 1,
    slices: int = 1,
    hosts_per_decoder: int = 1,
) -> Mesh:
    """Returns the mesh (data, fsdp, tensor) over `devices`, by default all devices.

    The mesh has an axis "context" before "tensor" if `context` is not 1, and an axis "slices"
    before all others if `slices` is not 1; then the other sizes are those of one slice. One of the
    sizes may be -1, which fills the remaining devices. Raises UserError if the sizes do not fill
    the devices, or if `tensor` neither divides the devices of a host nor spans the devices of
    `hosts_per_decoder` hosts (rollout.hosts_per_decoder).
    """
    devices = in_slices(list(devices or jax.devices()), slices)
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    if context == 1:
        del sizes["context"]
    size_texts = (f"{name}={size}" for name, size in sizes.items())
    settings = f"mesh {' '.join(size_texts)}"

    num_open = sum(size == -1 for size in sizes.values())
    if num_open > 1 or any(size == 0 or size < -1 for size in sizes.values()):
        raise UserError(f"{settings}: sizes are positive, and at most one is -1")
    outer = {SLICES: slices} if slices > 1 else {}
    try:
        mesh = make_mesh(devices, outer | sizes)
    except ValueError:  # NumPy cannot reshape the devices to these sizes
        of_slice = " of a slice" if slices > 1 else ""
        number = len(devices) // slices
        raise UserError(f"{settings} does not fill the {number} devices{of_slice}") from None

    check_decoders(devices, mesh.shape["tensor"], hosts_per_decoder)
    return mesh


def check_decoders(devices: Sequence[Device], tensor: int, hosts_per_decoder: int) -> None:
    """Raises UserError unless groups of `tensor` devices are decoders of that many hosts.

    devices: in the order of the training mesh.
    """
    counts = Counter(device.process_index for device in devices)
    per_host = counts[devices[0].process_index]
    if hosts_per_decoder == 1:
        # A host decodes with all of its devices, in groups of `tensor`.
        if per_host % tensor:
            raise UserError(
                f"mesh.tensor={tensor} must divide the {per_host} devices of a host, which decode "
                "together, unless several hosts do (rollout.hosts_per_decoder)"
            )
        return

    setting = f"rollout.hosts_per_decoder={hosts_per_decoder}"
    if len(counts) % hosts_per_decoder:
        raise UserError(f"{setting} does not divide the number of hosts, {len(counts)}")
    num_devices = per_host * hosts_per_decoder
    if tensor != num_devices:
        raise UserError(
            f"{setting} splits every layer over all {num_devices} devices of these hosts: set "
            f"mesh.tensor={num_devices}, not {tensor}"
        )
    for start in range(0, len(devices), tensor):
        hosts = sorted({device.process_index for device in devices[start : start + tensor]})
        # The hosts' shares of the prompts have to be neighbors, too (`Sampler.sample_rollouts`).
        if hosts != list(range(hosts[0], hosts[0] + hosts_per_decoder)):
            raise UserError(
                f"{setting}: hosts {', '.join(map(str, hosts))} would decode together, which "
                "takes neighboring hosts with equal numbers of devices: set it to 1"
            )


def decode_mesh(train: Mesh, process: int | None = None) -> Mesh:
    """Returns the mesh (slots, tensor) that one host decodes on, by default this one.

    "tensor" has the same size as in the training mesh `train`; the other devices of the host are
    slots. If "tensor" spans several hosts, the mesh has the devices of all of them.
    """
    process = jax.process_index() if process is None else process
    tensor = train.shape["tensor"]
    # Hosts sample by themselves if they can, so that no collective of a decoder waits for another
    # host.
    devices: list[Device] = []
    for shard in train.devices.reshape(-1, tensor):
        if any(device.process_index == process for device in shard):
            devices += list(shard)
    return make_mesh(devices, {"slots": -1, "tensor": tensor})


def with_devices(mesh: Mesh, devices: Sequence[Device]) -> Mesh:
    """Returns a mesh of the same shape over as many other devices."""
    return make_mesh(devices, dict(mesh.shape))


def hosts_of(mesh: Mesh) -> list[int]:
    """Returns the numbers of the processes that have devices of a mesh, in order."""
    return sorted({device.process_index for device in mesh.devices.flat})


def num_decoders(mesh_for_decoding: Mesh) -> int:
    """Returns the number of decoders of the run, one of which has the mesh."""
    return jax.process_count() // len(hosts_of(mesh_for_decoding))


def split_devices(
    decode: int, devices: Sequence[Device], process: int
) -> tuple[list[Device], list[Device]]:
    """Returns the training devices, and the devices of a host that decode at the same time.

    decode: rollout.placement.devices, the number of decoding devices per host, taken from the end
    of each host. process: that host. Raises UserError if a host would have no device left to train.
    """
    hosts: dict[int, list[Device]] = {}
    for device in sorted(devices, key=host_and_id):
        hosts.setdefault(device.process_index, []).append(device)
    # Every host gives away the same number of devices, so the smallest host decides.
    fewest = min(map(len, hosts.values()))
    if decode >= fewest:
        raise UserError(
            f"rollout.placement.devices={decode} leaves none of the {fewest} devices of a host to "
            "train"
        )

    training: list[Device] = []
    for host in hosts.values():
        training += host[: len(host) - decode]
    this_host = hosts[process]
    return training, this_host[len(this_host) - decode :]


def mesh_of_decoders(devices: Sequence[Device], tensor: int) -> Mesh:
    """Returns the mesh of devices that only decode (rollout.placement=apart).

    tensor: of the training mesh. Raises UserError if it does not divide the devices.
    """
    if len(devices) % tensor:
        raise UserError(
            f"mesh.tensor={tensor} does not divide rollout.placement.devices={len(devices)}: "
            "set rollout.placement.devices to a multiple of mesh.tensor"
        )
    return make_mesh(devices, {"slots": -1, "tensor": tensor})


def host_and_id(device: Device) -> tuple[int, int]:
    """Returns the sort key of devices, which makes the devices of a host neighbors."""
    return device.process_index, device.id


def slice_of(device: Device) -> int:
    """Returns the number of a TPU's slice. Other devices report none that a mesh could use."""
    # A GPU's slice_index is the number of its host, and a single TPU slice may have none.
    number = getattr(device, "slice_index", None) if device.platform == "tpu" else None
    return number or 0


def in_slices(devices: Sequence[Device], slices: int) -> list[Device]:
    """Returns the devices slice by slice, and in a slice host by host.

    Devices that are no TPUs form `slices` parts of as many neighboring hosts or devices. Raises
    UserError if the devices are not that many slices of equal size.
    """
    # Not in the order of mesh_utils.create_hybrid_device_mesh: it arranges a slice by the torus,
    # and may put devices of several hosts on an axis "tensor", which has to stay within a host.
    ordered = sorted(devices, key=lambda device: (slice_of(device), *host_and_id(device)))
    sizes = Counter(map(slice_of, ordered))
    if ordered[0].platform == "tpu":
        if len(sizes) != slices:
            raise UserError(
                f"mesh.slices={slices}: the devices belong to {len(sizes)} slices; set "
                f"mesh.slices={len(sizes)}"
            )
        if len(set(sizes.values())) > 1:
            raise UserError(f"mesh.slices={slices}: the slices have different numbers of devices")
        return ordered
    num_hosts = len({device.process_index for device in ordered})
    number, kind = (num_hosts, "hosts") if num_hosts > 1 else (len(ordered), "devices")
    if number % slices:
        raise UserError(f"mesh.slices={slices} does not divide the {number} {kind}")
    return ordered


def num_slices(mesh: Mesh) -> int:
    """Returns the number of slices, each with a copy of the parameters."""
    return mesh.shape.get(SLICES, 1)


def is_data_parallel(mesh: Mesh) -> bool:
    """Returns whether devices split only rows, so that each has all parameters."""
    return num_slices(mesh) * mesh.shape["data"] == mesh.size


def summed_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes that a training program itself sums over, once, after all microbatches.

    XLA splits along the other axes, and sums over them in every microbatch.
    """
    slices = (SLICES,) if num_slices(mesh) > 1 else ()
    return (*slices, "data") if is_data_parallel(mesh) else slices


def rows_spec(mesh: Mesh) -> P:
    """Returns how the rows of a batch [M, B, T] are split."""
    slices = (SLICES,) if num_slices(mesh) > 1 else ()
    return P(None, (*slices, *ROW_AXES))


def row_shards(mesh: Mesh) -> int:
    """Returns how many parts the rows of a microbatch are split into."""
    return num_slices(mesh) * row_shards_of_slice(mesh)


def row_shards_of_slice(mesh: Mesh) -> int:
    """Returns how many parts a slice splits its rows of a microbatch into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def context_shards(mesh: Mesh) -> int:
    """Returns how many devices share the tokens of a row."""
    return mesh.shape.get("context", 1)


def weight_shards(mesh: Mesh) -> int:
    """Returns how many parts a weight is split into before "tensor" splits it further."""
    return mesh.shape["fsdp"] * context_shards(mesh)


def token_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that split the tokens of a slice: its rows, and their parts."""
    return tuple(axis for axis in (*ROW_AXES, "context") if axis in mesh.shape)


def over_slices(
    function: Callable,
    mesh: Mesh,
    in_specs: Sequence[P],
    out_specs: P | Sequence[P],
) -> Callable:
    """Returns `function` as a program of every slice, which may sum over the axis "slices".

    As `jax.shard_map` over that axis only, with XLA splitting along the others. The rows of fields
    [M, B, ...] with a spec P(None, ...) are split, and everything with the spec P() is the same in
    all slices.
    """
    # XLA's partitioner fails at lookups under a shard_map over some of the axes (JAX 0.10), so
    # this is a vmap over an array's axis of slices, which XLA splits.
    slices = num_slices(mesh)

    def is_split(spec: P) -> bool:
        return len(spec) > 0

    def split(field: jax.Array) -> jax.Array:
        parts = field.reshape(len(field), slices, -1, *field.shape[2:])
        place = NamedSharding(mesh, P(None, SLICES, ROW_AXES))
        return lax.with_sharding_constraint(parts, place)

    def join(parts: jax.Array) -> jax.Array:
        rows = parts.reshape(len(parts), -1, *parts.shape[3:])
        return lax.with_sharding_constraint(rows, NamedSharding(mesh, rows_spec(mesh)))

    def axis(spec: P) -> int | None:
        return 1 if is_split(spec) else None

    def joined(results: PyTree, spec: P) -> PyTree:
        return jax.tree.map(join, results) if is_split(spec) else results

    mapped = jax.vmap(
        function,
        in_axes=tuple(map(axis, in_specs)),
        out_axes=axis(out_specs) if isinstance(out_specs, P) else tuple(map(axis, out_specs)),
        axis_size=slices,
        axis_name=SLICES,
        spmd_axis_name=SLICES,
    )

    def program(*arguments: PyTree) -> PyTree:
        inputs = [
            jax.tree.map(split, argument) if is_split(spec) else argument
            for argument, spec in zip(arguments, in_specs, strict=True)
        ]
        results = mapped(*inputs)
        if isinstance(out_specs, P):
            return joined(results, out_specs)
        return tuple(map(joined, results, out_specs))

    return program


def make_mesh(devices: Sequence[Device], sizes: dict[str, int]) -> Mesh:
    """Returns a mesh with the axes of `sizes`. A size of -1 fills the remaining devices.

    Raises ValueError if the sizes do not fill the devices.
    """
    grid = np.array(devices).reshape(tuple(sizes.values()))
    # Auto: XLA places the collectives along all axes, except inside a shard_map.
    axis_types = (AxisType.Auto,) * len(sizes)
    return Mesh(grid, tuple(sizes), axis_types=axis_types)


def param_shardings(config: qwen.QwenConfig, mesh: Mesh) -> qwen.Params:
    """Returns the tree of the parameters with a NamedSharding at every leaf, following RULES."""
    axes, shapes = _axes_and_shapes(config)
    return shardings_of(axes, shapes, mesh)


def adapter_shardings(config: qwen.QwenConfig, adapter: AdapterConfig, mesh: Mesh) -> qwen.Params:
    """Returns the tree of an adapter with a NamedSharding at every leaf, following RULES."""
    axes = adapters.logical_axes(config, adapter)
    return shardings_of(axes, adapters.abstract(config, adapter), mesh)


def shardings_of(logical_axes: qwen.Params, abstract: qwen.Params, mesh: Mesh) -> qwen.Params:
    """Returns a tree of NamedShardings from the names and sizes of the axes of every leaf.

    An axis is not split if the mesh lacks its mesh axes, or if the sizes do not divide.
    """

    def mesh_axis(logical_axis: str, size: int) -> str | tuple[str, ...] | None:
        rule = RULES[logical_axis] or ()
        names = (rule,) if isinstance(rule, str) else rule
        present = tuple(name for name in names if name in mesh.shape)
        shards = math.prod(mesh.shape[name] for name in present)
        # For example, two key-value heads on four devices: each device has a copy.
        if size % shards:
            return None
        return present[0] if len(present) == 1 else present or None

    def place(logical_axes: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        mesh_axes = map(mesh_axis, logical_axes, leaf.shape)
        return NamedSharding(mesh, P(*mesh_axes))

    def is_leaf(x: object) -> bool:
        # The axes of a parameter are a tuple, which JAX would treat as a subtree.
        return isinstance(x, tuple)

    return jax.tree.map(place, logical_axes, abstract, is_leaf=is_leaf)


@functools.cache
def _axes_and_shapes(config: qwen.QwenConfig) -> tuple[qwen.Params, qwen.Params]:
    """Returns the trees of the parameters' logical axes and shapes, which must not be changed."""
    return qwen.logical_axes(config), qwen.abstract(config)
