"""Compiling ahead of time, for accelerators that need not be there: what a device has, descriptions of slices and hosts
that XLA's compilers take instead of hardware, and what a compiled program takes of a device."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jzero import metrics

GIB = 2**30


class Chip(NamedTuple):
    """What one device has. TPU: the HBM that the compiler leaves to a program."""

    hbm: float  # bytes
    flops: float  # bf16 a second
    bandwidth: float  # bytes of HBM a second


CHIPS = {
    "TPU v5 lite": Chip(15.75 * GIB, 197e12, 819e9),
    "TPU v6 lite": Chip(31.25 * GIB, 918e12, 1640e9),
    "TPU v5": Chip(95.74 * GIB, 459e12, 2765e9),
    "TPU7x": Chip(94.75 * GIB, 1153e12, 3690e9),  # half a chip
    "NVIDIA A100-SXM4-80GB": Chip(85100068864, 312e12, 2039e9),
    "NVIDIA H100 80GB HBM3": Chip(84942979072, 989e12, 3352e9),
    "NVIDIA H200 141GB HBM3e": Chip(151397597184, 989e12, 4800e9),
}
TPUS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # dimensions of a slice
HOSTS = {"TPU v5 lite": "v5e:2x2", "TPU v6 lite": "v6e:2x2", "TPU v5": "v5p:2x2x1", "TPU7x": "tpu7x:2x2x1"}
ONE_HOST = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}  # two-dimensional slices that are not hosts of 2x2 chips
GPUS = {  # device kind; multiprocessors, their fp32 units, shared memory of a block and of one, L2, GHz, capability
    "a100": ("NVIDIA A100-SXM4-80GB", 108, 64, 166912, 167936, 41943040, 1.41, 8),
    "h100": ("NVIDIA H100 80GB HBM3", 132, 128, 232448, 233472, 52428800, 1.98, 9),
    "h200": ("NVIDIA H200 141GB HBM3e", 132, 128, 232448, 233472, 52428800, 1.98, 9),
}


def devices(topology: str) -> list[Any]:
    """Compile-only devices."""
    family, _, shape = topology.partition(":")
    if family in GPUS and shape.isdigit():
        return cuda(family, int(shape))
    sizes = re.fullmatch(r"\d+(x\d+)+", shape)
    if family not in TPUS or not sizes or shape.count("x") + 1 != TPUS[family]:
        raise ValueError(
            f"--topology={topology!r} is not known: v5e:2x4 (also 1x1 2x2 4x4 4x8 8x8 8x16 16x16), v6e:2x4 (as v5e), "
            f"v5p:2x2x2 (also 2x2x1 2x2x4 ...), tpu7x:2x2x1, {', '.join(f'{name}:8' for name in GPUS)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for TPUs needs libtpu: pip install 'jzero[tpu]'")
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process that compiles holds libtpu's lock
    } | os.environ
    bounds = {"chips_per_host_bounds": ONE_HOST[shape]} if shape in ONE_HOST else {}
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **bounds).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology={topology}: {error}") from error


def cuda(family: str, count: int) -> list[Any]:
    """GPUs of one host, as XLA describes them."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(f"compiling for {family} needs CUDA's compiler: pip install 'jzero[cuda12]'")
    kind, cores, units, block, core, cache, clock, capability = GPUS[family]
    description = f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048
      shared_memory_per_core: {core} shared_memory_per_block_optin: {block} core_count: {cores} fpus_per_core: {units}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 clock_rate_ghz: {clock} l2_cache_size: {cache}
      memory_bandwidth: {int(CHIPS[kind].bandwidth)} device_memory_size: {int(CHIPS[kind].hbm)}
      cuda_compute_capability {{ major: {capability} }} }}
      platform_name: "CUDA" device_description_str: "{kind}" """
    slice = topologies.get_topology_desc("", "cuda", target_config=description, topology=f"1x1x{count}")
    return list(slice.devices)


def device_bytes(tree: Any) -> float:
    """Of abstract arrays; what is not one takes nothing."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    return float(sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays))


def measure(program: tuple[Any, tuple], topology: str, cache: Path | None) -> dict[str, Any]:
    """Compile, or remember: seconds and bytes of HBM. JAX's own cache cannot be read without a device."""
    lowered = program[0].lower(*program[1])
    packages = ("jax", "libtpu" if topology.partition(":")[0] in TPUS else "jax-cuda12-plugin")
    versions = [importlib.metadata.version(name) for name in packages]
    kind = jax.tree.leaves(program[1])[0].sharding.mesh.devices.flat[0].device_kind  # the program says how many
    key = hashlib.sha256("\n".join([kind, *versions, lowered.as_text()]).encode()).hexdigest()
    file = cache / f"{key}.json" if cache else None
    if file and file.exists():
        return json.loads(file.read_text())
    start = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
        found = {
            "argument_bytes": memory.argument_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": memory.peak_memory_in_bytes,
        }
    except jax.errors.JaxRuntimeError as error:
        sizes = re.findall(r"(?:[Uu]sed |\()([\d.]+)([KMG])", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
            raise
        needed, given = max(float(size) * 1024 ** "_KMG".index(unit) for size, unit in sizes), device_bytes(program[1])
        found = {"argument_bytes": given, "temp_bytes": needed - given, "peak_bytes": needed}
        found["error"] = str(error).split("\n")[0]
    found["compile_s"] = round(time.perf_counter() - start, 2)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_atomic(file, json.dumps(found))
    return found
