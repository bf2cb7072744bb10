"""Describes the environment of a run: versions of packages, devices, and process memory."""

import importlib.metadata
import platform
import resource

import jzero

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process, without its children."""
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    # RUSAGE_CHILDREN is useless here: on Linux a child that was spawned starts with the peak of its
    # parent.
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def versions() -> dict[str, str]:
    """Returns the versions of jzero, its main packages, Python and the system, and the devices."""
    import jax  # not at the top: processes that hold no device import this module

    return {
        "jzero": jzero.__version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
