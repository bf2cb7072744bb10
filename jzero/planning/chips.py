"""What one device can do, and which topologies there are: tables for plans and benchmarks."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """The limits of one device, as JAX counts devices: a TPU7x chip is two of them.

    The HBM of a TPU is what its compiler leaves to a program; that of a GPU is all of it.
    """

    hbm_bytes: int
    flops: float  # peak bf16 FLOPs a second
    bandwidth: float  # bytes of HBM a second


# By the `device_kind` that JAX reports.
CHIPS = {
    "TPU v5 lite": Chip(hbm_bytes=16_911_433_728, flops=197e12, bandwidth=819e9),
    "TPU v6 lite": Chip(hbm_bytes=33_554_432_000, flops=918e12, bandwidth=1640e9),
    "TPU v5": Chip(hbm_bytes=102_800_042_229, flops=459e12, bandwidth=2765e9),
    "TPU7x": Chip(hbm_bytes=101_737_037_824, flops=1153e12, bandwidth=3690e9),
    "NVIDIA A100-SXM4-80GB": Chip(hbm_bytes=85_100_068_864, flops=312e12, bandwidth=2039e9),
    "NVIDIA H100 80GB HBM3": Chip(hbm_bytes=84_942_979_072, flops=989e12, bandwidth=3352e9),
    "NVIDIA H200 141GB HBM3e": Chip(hbm_bytes=151_397_597_184, flops=989e12, bandwidth=4800e9),
}


@dataclass(frozen=True)
class TpuFamily:
    """The slices of one kind of TPU."""

    device_kind: str
    num_dimensions: int  # of a slice: v5e:2x4 has two
    host_topology: str  # the slice of one host


TPUS = {
    "v5e": TpuFamily("TPU v5 lite", num_dimensions=2, host_topology="v5e:2x2"),
    "v6e": TpuFamily("TPU v6 lite", num_dimensions=2, host_topology="v6e:2x2"),
    "v5p": TpuFamily("TPU v5", num_dimensions=3, host_topology="v5p:2x2x1"),
    "tpu7x": TpuFamily("TPU7x", num_dimensions=3, host_topology="tpu7x:2x2x1"),
}
HOST_TOPOLOGIES = {family.device_kind: family.host_topology for family in TPUS.values()}

# Slices of two dimensions that are one host, but not of 2x2 chips: the chips of that host.
CHIPS_PER_HOST = {"1x1": (1, 1, 1), "2x4": (2, 4, 1)}


@dataclass(frozen=True)
class Gpu:
    """What XLA wants to know of a GPU that is not there. The fields have XLA's names."""

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
