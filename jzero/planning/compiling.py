"""Compiles programs for devices that are not attached, and measures their memory.

JAX can describe the devices of a TPU slice or of a GPU host without having one, and XLA compiles
for them. A compiled program reports its HBM. Measurements are cached in files, because a
compilation takes minutes, and JAX's own compilation cache cannot be read without a device.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

from jzero.errors import UserError
from jzero.extras import install_command
from jzero.files import parse_json, read_text, user_cache, write_atomic
from jzero.planning.chips import CHIPS_PER_HOST, GPUS, TPUS, Topology, split_topology
from jzero.planning.crossing import crossing
from jzero.sharding.mesh import Device, num_slices

# A jitted function, and its arguments: jax.ShapeDtypeStructs with shardings, and static values.
Program = tuple[jax.stages.Wrapped, Sequence[object]]


# libtpu requests these from a Cloud TPU's metadata server, which does not exist here.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another compiling process may hold libtpu's lock
}


@dataclass(frozen=True)
class Measurement:
    """The memory that one program takes on one device."""

    argument_bytes: float
    temp_bytes: float
    peak_bytes: float  # arguments, results and temporaries together
    compile_s: float
    kv_bytes: float = 0.0  # the part of the arguments that is the KV cache
    slice_bytes: float = 0.0  # of the results of collectives between slices, once in a call
    repeated_slice_bytes: float = 0.0  # the same, in a pass of a loop such as over microbatches
    error: str | None = None  # the first line of the compiler's error, if it rejected the program

    def as_json(self) -> dict[str, float | str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def compile_only_devices(topology: str) -> list[Device]:
    """Returns the devices of a topology, such as "v5e:2x4" or "h100:8", for compilation only.

    Raises:
        UserError: The topology is unknown, or the package that compiles for it is not installed.
    """
    parts = split_topology(topology)
    if parts.family in GPUS:
        return _gpu_host(parts.family, int(parts.shape))
    return _tpu_slices(parts)


def _tpu_slices(topology: Topology) -> list[Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compiling for TPUs needs libtpu: {install_command('tpu')}")
    # Existing variables take precedence. libtpu reads them when it is loaded.
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, int | tuple[int, ...]] = {}
    family, shape, num_slices = topology
    if shape in CHIPS_PER_HOST:
        # libtpu would otherwise assume hosts of 2x2 chips.
        options["chips_per_host_bounds"] = CHIPS_PER_HOST[shape]
    if num_slices > 1:
        options["num_slices"] = num_slices
    name = f"{family}:{shape}"
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={name}: {error}") from error


def _gpu_host(family: str, count: int) -> list[Device]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            f"compiling for {family} needs CUDA's compiler: {install_command('cuda12')}"
        )
    description = topologies.get_topology_desc(
        "",
        "cuda",
        target_config=GPUS[family].target_config(),
        topology=f"1x1x{count}",
    )
    return list(description.devices)


def cache_directory() -> Path:
    """Returns the directory of cached measurements of compiled programs."""
    return user_cache() / "plan"


def device_bytes(tree: object) -> float:
    """Returns the bytes that abstract arrays take on one device. Other leaves count as 0."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert leaf.sharding is not None, f"{leaf=}"
            # A device holds one shard of each array.
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return float(total)


def measure(program: Program, topology: str, cache: Path | None) -> Measurement:
    """Compiles a program, or reads its earlier measurement from the directory `cache`."""
    function, arguments = program
    lowered = function.lower(*arguments)
    file = cache / f"{_cache_key(lowered, arguments, topology)}.json" if cache else None
    if file and file.exists():
        return Measurement(**parse_json(read_text(file), file))
    measurement = _compile(lowered, arguments)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(measurement.as_json()))
    return measurement


def _cache_key(lowered: jax.stages.Lowered, arguments: Sequence[object], topology: str) -> str:
    """Returns a digest of everything that the compiled program depends on."""
    # Another version of the compiler may allocate differently.
    family, _, num_slices = split_topology(topology)
    compiler = "libtpu" if family in TPUS else "jax-cuda12-plugin"
    versions = [importlib.metadata.version(package) for package in ("jax", compiler)]
    # The program's text contains the number of its devices, but not their kind and their slices.
    device_kind = jax.tree.leaves(arguments)[0].sharding.mesh.devices.flat[0].device_kind
    slices = [f"{num_slices} slices"] if num_slices > 1 else []
    text = "\n".join([device_kind, *slices, *versions, lowered.as_text()])
    return hashlib.sha256(text.encode()).hexdigest()


def _compile(lowered: jax.stages.Lowered, arguments: Sequence[object]) -> Measurement:
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A program that is too large is a result of the plan, and not an error.
        needed = _bytes_in_refusal(str(error))
        if needed is None:
            raise
        argument_bytes = device_bytes(arguments)
        return Measurement(
            argument_bytes=argument_bytes,
            temp_bytes=needed - argument_bytes,
            peak_bytes=needed,
            compile_s=_seconds_since(start),
            error=str(error).split("\n")[0],
        )
    compile_s = _seconds_since(start)
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    mesh = jax.tree.leaves(arguments)[0].sharding.mesh
    collectives = []
    if num_slices(mesh) > 1:
        collectives = crossing(compiled.as_text() or "", mesh.size // num_slices(mesh))
    return Measurement(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        compile_s=compile_s,
        slice_bytes=sum(one.bytes for one in collectives if not one.is_repeated),
        repeated_slice_bytes=sum(one.bytes for one in collectives if one.is_repeated),
    )


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _bytes_in_refusal(message: str) -> float | None:
    """Returns the bytes that a program needs, from XLA's out-of-memory error.

    The error contains text such as "Used 17.50G of 15.75G hbm". Returns None for any other error.
    """
    sizes = re.findall(r"(?:[Uu]sed |\()([\d.]+)([KMG])", message)
    if "RESOURCE_EXHAUSTED" not in message or not sizes:
        return None
    return max(float(size) * 1024 ** "_KMG".index(unit) for size, unit in sizes)
