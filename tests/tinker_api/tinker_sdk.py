"""Where the SDK of Tinker is, for the tests that need it."""

import os

import pytest

SDK_PYTHONS = "TINKER_SDK_PYTHONS"


def sdk_pythons() -> list[str]:
    """Returns interpreters with the Tinker SDK, or skips the test."""
    pythons = os.environ.get(SDK_PYTHONS, "")
    if not pythons:
        pytest.skip(f"{SDK_PYTHONS} is not set: interpreters with the Tinker SDK, A:B")
    return pythons.split(":")
