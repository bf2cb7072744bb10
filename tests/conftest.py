"""Test session: 8 fake CPU devices, no network, and a reason for everything that is skipped."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # JAX_PLATFORMS=cuda pytest -m gpu: the tests that need one
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # configs.tasks

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow")
    parser.addoption("--network", action="store_true", help="run the tests marked network")


def pytest_configure(config):
    # Read by huggingface_hub when it is imported, which is after this.
    os.environ["HF_HUB_OFFLINE"] = "0" if config.getoption("--network") else "1"


def pytest_collection_modifyitems(config, items):
    missing = {}
    if not config.getoption("--slow"):
        missing["slow"] = "slow: run with --slow"
    if not config.getoption("--network"):
        missing["network"] = "downloads: run with --network"
    if importlib.util.find_spec("torch") is None:
        missing["peer"] = "torch is not installed"
    for mark, backend in (("tpu", "tpu"), ("gpu", "gpu")):
        if (
            any(item.get_closest_marker(mark) for item in items)
            and jax.default_backend() != backend
        ):
            missing[mark] = f"needs a {backend.upper()}, this is {jax.default_backend()}"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def quick_compilation():
    """For programs that compile for longer than they run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> str:
    """A directory where compiled programs are kept. Of this worker alone: JAX does not write them atomically."""
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def quick_runs(quick_compilation, programs):
    """And each of them is compiled once, however many runs make it anew."""
    options = {
        "jax_compilation_cache_dir": (programs, None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
        "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
    }
    for name, (during, _) in options.items():
        jax.config.update(name, during)
    compilation_cache.reset_cache()
    yield
    for name, (_, after) in options.items():
        jax.config.update(name, after)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def environment(tmp_path_factory, programs):
    """Of a run as a process: two devices, no network, and programs that are compiled once, and quickly."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    return os.environ | cache | offline | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}


@pytest.fixture
def shared() -> Path:
    """The folder of reference material beside the repository; not part of it."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} does not exist")
    return SHARED
