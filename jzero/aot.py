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
    """What one device has, as aot.json says. TPU: the HBM that the compiler leaves to a program; a TPU7x is half a
    chip."""

    hbm: int  # bytes
    flops: float  # bf16 a second
    bandwidth: float  # bytes of HBM a second


DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
CHIPS = {kind: Chip(**values) for kind, values in DATA["chips"].items()}
TPUS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}  # dimensions of a slice
HOSTS = {"TPU v5 lite": "v5e:2x2", "TPU v6 lite": "v6e:2x2", "TPU v5": "v5p:2x2x1", "TPU7x": "tpu7x:2x2x1"}
ONE_HOST = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}  # two-dimensional slices that are not hosts of 2x2 chips


def devices(topology: str) -> list[Any]:
    """Compile-only devices."""
    family, _, shape = topology.partition(":")
    if family in DATA["gpus"] and shape.isdigit():
        return cuda(family, int(shape))
    sizes = re.fullmatch(r"\d+(x\d+)+", shape)
    if family not in TPUS or not sizes or shape.count("x") + 1 != TPUS[family]:
        raise ValueError(
            f"--topology={topology!r} is not known: v5e:2x4 (also 1x1 2x2 4x4 4x8 8x8 8x16 16x16), v6e:2x4 (as v5e), "
            f"v5p:2x2x2 (also 2x2x1 2x2x4 ...), tpu7x:2x2x1, {', '.join(f'{name}:8' for name in DATA['gpus'])}"
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
    gpu = DATA["gpus"][family]
    chip = CHIPS[gpu["kind"]]
    target = Path(__file__).with_name("gpu_target.txt").read_text()
    target = target.format(**gpu, memory_bandwidth=chip.bandwidth, device_memory_size=chip.hbm)
    slice = topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{count}")
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
