"""Tables of the limits of devices, and of the known topologies, for plans and benchmarks."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from jzero.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """The limits of one device, as JAX counts devices: a TPU7x chip has two devices.

    The HBM of a TPU is the amount that its compiler leaves to a program. The HBM of a GPU is all of
    its memory.
    """

    hbm_bytes: int
    flops: float  # peak bf16 FLOPs a second
    bandwidth: float  # bytes of HBM a second


# Keyed by the `device_kind` that JAX reports.
CHIPS = {
    "TPU v5 lite": Chip(hbm_bytes=16_911_433_728, flops=197e12, bandwidth=819e9),
    "TPU v6 lite": Chip(hbm_bytes=33_554_432_000, flops=918e12, bandwidth=1640e9),
    "TPU v5": Chip(hbm_bytes=102_800_042_229, flops=459e12, bandwidth=2765e9),
    "TPU7x": Chip(hbm_bytes=101_737_037_824, flops=1153e12, bandwidth=3690e9),
    # The FLOPs of a T4 are those of float16: it has no products of bfloat16.
    "Tesla T4": Chip(hbm_bytes=15_828_320_256, flops=65e12, bandwidth=320e9),
    "NVIDIA L4": Chip(hbm_bytes=23_681_105_920, flops=121e12, bandwidth=300e9),
    "NVIDIA GeForce RTX 4090": Chip(hbm_bytes=25_386_352_640, flops=165e12, bandwidth=1008e9),
    "NVIDIA A100-SXM4-40GB": Chip(hbm_bytes=42_298_834_944, flops=312e12, bandwidth=1555e9),
    "NVIDIA A100-SXM4-80GB": Chip(hbm_bytes=85_100_068_864, flops=312e12, bandwidth=2039e9),
    "NVIDIA H100 80GB HBM3": Chip(hbm_bytes=84_942_979_072, flops=989e12, bandwidth=3352e9),
    "NVIDIA H200 141GB HBM3e": Chip(hbm_bytes=151_397_597_184, flops=989e12, bandwidth=4800e9),
}


@dataclass(frozen=True)
class TpuFamily:
    """The slices of one kind of TPU."""

    device_kind: str
    num_dimensions: int  # of a slice's shape: v5e:2x4 has two
    host_topology: str  # the slice of one host
    devices_per_chip: int = 1


TPUS = {
    "v5e": TpuFamily("TPU v5 lite", num_dimensions=2, host_topology="v5e:2x2"),
    "v6e": TpuFamily("TPU v6 lite", num_dimensions=2, host_topology="v6e:2x2"),
    "v5p": TpuFamily("TPU v5", num_dimensions=3, host_topology="v5p:2x2x1"),
    "tpu7x": TpuFamily("TPU7x", num_dimensions=3, host_topology="tpu7x:2x2x1", devices_per_chip=2),
}
HOST_TOPOLOGIES = {family.device_kind: family.host_topology for family in TPUS.values()}

# Slices of two dimensions that are one host without having 2x2 chips -> the chips of that host.
CHIPS_PER_HOST = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}


@dataclass(frozen=True)
class Gpu:
    """The properties that XLA needs to compile for an absent GPU. Fields have XLA's names."""

    device_kind: str
    core_count: int  # streaming multiprocessors
    fpus_per_core: int
    shared_memory_per_block_optin: int  # bytes
    shared_memory_per_core: int  # bytes
    l2_cache_size: int  # bytes
    clock_rate_ghz: float
    capability: int  # the major CUDA compute capability

    def target_config(self) -> str:
        """Returns XLA's GpuTargetConfig as a text proto."""
        chip = CHIPS[self.device_kind]
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: {self.clock_rate_ghz}
  l2_cache_size: {self.l2_cache_size}
  memory_bandwidth: {chip.bandwidth:.0f}
  device_memory_size: {chip.hbm_bytes}
  cuda_compute_capability {{ major: {self.capability} }}
}}
platform_name: "CUDA"
device_description_str: "{self.device_kind}"
"""


GPUS = {
    "l4": Gpu(
        "NVIDIA L4",
        core_count=58,
        fpus_per_core=128,
        shared_memory_per_block_optin=101_376,
        shared_memory_per_core=102_400,
        l2_cache_size=50_331_648,
        clock_rate_ghz=2.04,
        capability=8,
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090",
        core_count=128,
        fpus_per_core=128,
        shared_memory_per_block_optin=101_376,
        shared_memory_per_core=102_400,
        l2_cache_size=75_497_472,
        clock_rate_ghz=2.52,
        capability=8,
    ),
    "a100-40gb": Gpu(
        "NVIDIA A100-SXM4-40GB",
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_block_optin=166_912,
        shared_memory_per_core=167_936,
        l2_cache_size=41_943_040,
        clock_rate_ghz=1.41,
        capability=8,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_block_optin=166_912,
        shared_memory_per_core=167_936,
        l2_cache_size=41_943_040,
        clock_rate_ghz=1.41,
        capability=8,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_block_optin=232_448,
        shared_memory_per_core=233_472,
        l2_cache_size=52_428_800,
        clock_rate_ghz=1.98,
        capability=9,
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e",
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_block_optin=232_448,
        shared_memory_per_core=233_472,
        l2_cache_size=52_428_800,
        clock_rate_ghz=1.98,
        capability=9,
    ),
}


# -- described devices -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DescribedDevice:
    """The attributes of a device that meshes and plans read. Nothing can be compiled for it."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    slice_index: int = 0


class Topology(NamedTuple):
    """Equal slices of TPUs, or the GPUs of a host."""

    family: str
    shape: str  # of a slice, such as "2x4", or the number of GPUs
    num_slices: int = 1


def split_topology(topology: str) -> Topology:
    """Returns the parts of a topology: "2xv5e:2x4" are 2 slices of 2x4 chips of "v5e".

    Raises:
        UserError: The topology is unknown.
    """
    family, _, shape = topology.partition(":")
    num_slices = 1
    number, _, name = family.partition("x")
    if number.isdigit() and int(number) > 0:
        num_slices, family = int(number), name
    # GPUs have a number of devices, and TPUs have the shape of a slice.
    if family in GPUS and shape.isdigit() and int(shape) > 0 and num_slices == 1:
        return Topology(family, shape)
    has_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape) is not None
    if family in TPUS and has_shape and shape.count("x") + 1 == TPUS[family].num_dimensions:
        return Topology(family, shape, num_slices)
    gpus = ", ".join(f"{name}:8" for name in GPUS)
    raise UserError(
        f"--topology={topology!r} is not known: "
        "v5e:2x4 (also 1x1 2x2 4x4 4x8 8x8 8x16 16x16), v6e:2x4 (as v5e), 2xv5e:2x4 (two slices), "
        f"v5p:2x2x2 (also 2x2x1 2x2x4 ...), tpu7x:2x2x1, {gpus}"
    )


def described_devices(topology: str) -> list[DescribedDevice]:
    """Returns the devices of a topology, such as "v5e:2x4" or "h100:8", as descriptions.

    Unlike `compile_only_devices`, this function needs no compiler, and accepts any shape of a
    slice.

    Raises:
        UserError: The topology is unknown.
    """
    family, shape, num_slices = split_topology(topology)
    if family in GPUS:
        kind = GPUS[family].device_kind
        return [DescribedDevice(index, 0, "gpu", kind) for index in range(int(shape))]
    num_devices = _num_devices(family, shape)
    # Slices in CHIPS_PER_HOST are one host. Larger slices consist of hosts of the family's usual
    # shape.
    num_of_host = num_devices
    if shape not in CHIPS_PER_HOST:
        num_of_host = _num_devices(family, TPUS[family].host_topology.partition(":")[2])
    kind = TPUS[family].device_kind
    return [
        DescribedDevice(index, index // num_of_host, "tpu", kind, index // num_devices)
        for index in range(num_slices * num_devices)
    ]


def smaller_slice(device_kind: str, num_devices: int) -> str:
    """Returns a slice with this many devices, a host or more: "v5e:2x2", "v5e:2x4".

    Raises:
        UserError: There is no such slice.
    """
    family, _, shape = HOST_TOPOLOGIES[device_kind].partition(":")
    if num_devices == 1 and TPUS[family].num_dimensions == 2:
        shape = "1x1"
    # The next larger slice is twice as long in its shortest dimension: 2x2, 2x4, 4x4, 4x8.
    while _num_devices(family, shape) < num_devices:
        shortest, *others = sorted(map(int, shape.split("x")))
        shape = "x".join(map(str, sorted([2 * shortest, *others])))
    if _num_devices(family, shape) != num_devices:
        raise UserError(f"no slice of {family} has the {num_devices} devices of a decoder")
    return f"{family}:{shape}"


def _num_devices(family: str, shape: str) -> int:
    """Returns the number of JAX devices in a slice of this shape."""
    chips = math.prod(int(size) for size in shape.split("x"))
    return chips * TPUS[family].devices_per_chip
