"""Moved from jzero.metrics."""

import importlib.metadata
import platform
import resource

import jzero


def peak_rss_bytes() -> int:
    """Peak resident bytes of this process plus those of its largest child that has ended (live children: not seen)."""
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return unit * sum(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def versions() -> dict[str, str]:
    """What ran: package versions, Python, operating system, devices."""
    import jax  # this module is imported by processes that hold no device

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "jzero": jzero.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
