"""The platform that a test session runs on. It is chosen before JAX is imported."""

from itertools import pairwise

PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # of the marks, by JAX's names


def platform_asked_for(arguments: list[str]) -> str:
    """Returns the platform that pytest's arguments ask for with `-m gpu` or `-m tpu`, or "cpu"."""
    for option, value in pairwise(arguments):
        if option == "-m" and value in PLATFORMS:
            return PLATFORMS[value]
    return "cpu"
