"""Describes the environment of a run: versions of packages, devices, and process memory."""

import importlib.metadata
import platform
import resource

import jzero

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process plus the peak of its largest ended child.

    Children that are still alive are not counted.
    """
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    process_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The system reports the largest child, and only children that have ended.
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return unit * (process_peak + largest_child)


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
