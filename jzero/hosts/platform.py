"""Chooses the platform that JAX runs on, and its CPU devices, before JAX looks for devices.

JAX loads every installed accelerator library and queries it for devices. libtpu is installed on
many machines without a TPU, because it compiles for TPUs (`python -m jzero.plan`). On such a
machine libtpu searches for a TPU, prints about eight lines on stderr when it finds none, and takes
seconds.
"""

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
from pathlib import Path

import jax
from jax.sharding import Mesh

from jzero.cores import num_cores

GOOGLE = "0x1ae0"  # the PCI vendor
NO_TPUS = {"0x001f", "0x0042"}  # Google's PCI devices on every VM: disk and network

# Variables that a Cloud TPU, its manager or a user sets to describe a TPU.
VARIABLES = (
    "CLOUD_TPU_TASK_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "TPU_PROCESS_ADDRESSES",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
)


LOCK_FILE = "/tmp/libtpu_lockfile"  # of the process that has the TPU
CPU_DEVICES_VARIABLE = "JAX_NUM_CPU_DEVICES"


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of the devices of `mesh`: "tpu", "gpu" or "cpu".

    GPUs that are described and not attached call themselves "cuda".
    """
    platform = mesh.devices.flat[0].platform
    return "gpu" if platform == "cuda" else platform


def choose_platform() -> None:
    """Selects the CPU platform on a machine without any sign of an accelerator.

    Has to be called before any device is used. Does nothing if JAX_PLATFORMS or
    `jax.config.update("jax_platforms", ...)` names a platform, or if the plugin of an accelerator
    other than a TPU is installed.
    """
    if jax.config.values["jax_platforms"] or may_have_tpu(Path("/")) or has_plugins():
        return
    jax.config.update("jax_platforms", "cpu")


def default_cpu_devices() -> int:
    """Returns the number of devices that a CPU is split into: one per usable core, at most two.

    Decoding with a small model is faster on two devices than on two threads inside one.
    """
    return min(2, num_cores())


def busy_device(error: BaseException) -> str | None:
    """Returns the line for a TPU that another process has; None for any other error.

    JAX raises libtpu's message as a RuntimeError without a type of its own.
    """
    text = str(error)
    is_busy = "TPU is already in use" in text or LOCK_FILE in text
    if not isinstance(error, RuntimeError) or not is_busy:
        return None
    process = re.search(r"process with pid (\d+)", text)
    return (
        f"the TPU is in use by another process{f', pid {process[1]}' if process else ''}: stop it "
        "first, or set JAX_PLATFORMS=cpu; if no such process exists, one was killed: remove "
        f"{LOCK_FILE}"
    )


def set_default_cpu_devices() -> None:
    """Splits the CPU into devices, unless JAX_NUM_CPU_DEVICES says how many.

    Has to be called before any device is used.
    """
    if CPU_DEVICES_VARIABLE not in os.environ:
        jax.config.update("jax_num_cpu_devices", default_cpu_devices())


def has_default_cpu_devices() -> bool:
    """Returns whether `set_default_cpu_devices` chose the number of CPU devices."""
    number = jax.config.values["jax_num_cpu_devices"]
    return CPU_DEVICES_VARIABLE not in os.environ and number == default_cpu_devices()


def is_cpu_chosen() -> bool:
    """Returns whether JAX runs on the CPU, without starting it."""
    return jax.config.values["jax_platforms"] == "cpu"


def may_have_tpu(root: Path) -> bool:
    """Returns whether the machine may have a TPU. `root` is the root of its file system."""
    if any(os.environ.get(name) for name in VARIABLES):
        return True
    if [*root.glob("dev/accel*"), *root.glob("dev/vfio/[0-9]*")]:
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == GOOGLE:
            device = (vendor.parent / "device").read_text().strip()
            # Any other Google device on the PCI bus may be a TPU.
            if device not in NO_TPUS:
                return True
    return False


def has_plugins() -> bool:
    """Returns whether JAX finds an accelerator plugin, such as the GPU plugin."""
    if importlib.metadata.entry_points(group="jax_plugins"):
        return True
    spec = importlib.util.find_spec("jax_plugins")  # a namespace package that only plugins create
    places = spec.submodule_search_locations if spec is not None else None
    return any(pkgutil.iter_modules(places or []))
