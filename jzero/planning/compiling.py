"""Compiles programs for devices that are not there, and measures the memory that they take.

JAX describes the devices of a TPU slice or of a GPU host without having one, and XLA compiles for
them. A compiled program says how much HBM it takes. Measurements are kept in files, because a
compilation takes minutes, and JAX's own cache cannot be read without a device.
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
from typing import Protocol

import jax
from jax.experimental import topologies

from jzero.errors import UserError
from jzero.files import write_atomic
from jzero.planning.chips import CHIPS_PER_HOST, GPUS, TPUS, split_topology

# A jitted function, and its arguments: jax.ShapeDtypeStructs with shardings, and static values.
Program = tuple[jax.stages.Wrapped, Sequence[object]]


class Device(Protocol):
    """What is read of a `jax.Device`, which is a variable to type checkers."""

    @property
    def device_kind(self) -> str: ...

    @property
    def platform(self) -> str: ...

    @property
    def process_index(self) -> int: ...

    @property
    def id(self) -> int: ...


# libtpu asks a Cloud TPU's metadata server for these, and there is none.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process that compiles holds libtpu's lock
}


@dataclass(frozen=True)
class Measurement:
    """What one program takes of one device."""

    argument_bytes: float
    temp_bytes: float
    peak_bytes: float  # arguments, results and temporaries together
    compile_s: float
    kv_bytes: float = 0.0  # the part of the arguments that is the pool of keys and values
    error: str | None = None  # the compiler's first line, where it refused the program

    def as_json(self) -> dict[str, float | str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def compile_only_devices(topology: str) -> list[Device]:
    """Returns the devices of a topology, such as "v5e:2x4" or "h100:8", for compilation alone.

    Raises:
        UserError: The topology is unknown, or the package that compiles for it is not installed.
    """
    family, shape = split_topology(topology)
    if family in GPUS:
        return _gpus_of_one_host(family, int(shape))
    return _tpu_slice(topology, shape)


def _tpu_slice(topology: str, shape: str) -> list[Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("compiling for TPUs needs libtpu: pip install 'jzero[tpu]'")
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = {}
    if shape in CHIPS_PER_HOST:
        options["chips_per_host_bounds"] = CHIPS_PER_HOST[shape]
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology={topology}: {error}") from error


def _gpus_of_one_host(family: str, count: int) -> list[Device]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            f"compiling for {family} needs CUDA's compiler: pip install 'jzero[cuda12]'"
        )
    description = topologies.get_topology_desc(
        "",
        "cuda",
        target_config=GPUS[family].target_config(),
        topology=f"1x1x{count}",
    )
    return list(description.devices)


def device_bytes(tree: object) -> float:
    """Returns the bytes that abstract arrays take on one device. Other leaves take nothing."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert leaf.sharding is not None, f"{leaf=}"
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return float(total)


def measure(program: Program, topology: str, cache: Path | None) -> Measurement:
    """Compiles a program, or reads from the directory `cache` what it took before."""
    function, arguments = program
    lowered = function.lower(*arguments)
    file = cache / f"{_cache_key(lowered, arguments, topology)}.json" if cache else None
    if file and file.exists():
        return Measurement(**json.loads(file.read_text()))
    measurement = _compile(lowered, arguments)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(measurement.as_json()))
    return measurement


def _cache_key(lowered: jax.stages.Lowered, arguments: Sequence[object], topology: str) -> str:
    """Returns a digest of all that the compiled program depends on.

    The program's text says how many devices it has, but not of which kind they are.
    """
    family = topology.partition(":")[0]
    compiler = "libtpu" if family in TPUS else "jax-cuda12-plugin"
    versions = [importlib.metadata.version(package) for package in ("jax", compiler)]
    device_kind = jax.tree.leaves(arguments)[0].sharding.mesh.devices.flat[0].device_kind
    text = "\n".join([device_kind, *versions, lowered.as_text()])
    return hashlib.sha256(text.encode()).hexdigest()


def _compile(lowered: jax.stages.Lowered, arguments: Sequence[object]) -> Measurement:
    start = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        needed = _bytes_in_refusal(str(error))
        if needed is None:
            raise
        given = device_bytes(arguments)
        return Measurement(
            argument_bytes=given,
            temp_bytes=needed - given,
            peak_bytes=needed,
            compile_s=_seconds_since(start),
            error=str(error).split("\n")[0],
        )
    assert memory is not None, "XLA reports no memory for this platform"
    return Measurement(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        compile_s=_seconds_since(start),
    )


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def _bytes_in_refusal(message: str) -> float | None:
    """Returns the bytes that a program needs, from XLA's refusal: "Used 17.50G of 15.75G hbm".

    Returns None for a message that refuses for another reason.
    """
    sizes = re.findall(r"(?:[Uu]sed |\()([\d.]+)([KMG])", message)
    if "RESOURCE_EXHAUSTED" not in message or not sizes:
        return None
    return max(float(size) * 1024 ** "_KMG".index(unit) for size, unit in sizes)
