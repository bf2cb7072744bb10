"""The test session: eight CPU devices, no network, and a reason for every test that is skipped.

Fixtures for tests that compile programs:
  quick_compilation  switches XLA's optimizations off while a test runs, and compiles each program
                     once for the whole machine
  quick_runs         the same, by the name that tests of whole runs use
  quickly            the same as a context, for fixtures of a module
  programs           the directory in which the worker keeps the compiled programs
  environment        the environment variables of a run that a test starts as a process
Fixture for tests of whole runs in this process:
  explicit_transfers forbids copies between the host and the devices that the code does not ask for
Fixture for tests of clients whose servers fail:
  quick_retries      shortens the pauses between two tries
Fixture for tests that want reference material:
  shared             the folder beside the repository; the test is skipped where there is none
"""

import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from skips import platform_asked_for

# A shell ignores Ctrl-C in what it starts in the background, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Workers of pytest-xdist inherit the variable.
os.environ.setdefault("JAX_PLATFORMS", platform_asked_for(sys.argv[1:]))
# Grader processes, of which the suite starts hundreds, take a third less with compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# XLA has two ways of generating code for CPUs. The older one compiles the programs of the tests
# three times as fast. JAX 0.12 no longer has it, and an unknown flag would end the process.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()
# Tests import recipes of the folder configs.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hypothesis
import jax
import jaxtyping
import pytest
import skips
import tiers
from compiled_programs import common_directory, link_programs, open_directory
from jax.experimental.compilation_cache import compilation_cache

# Modules of pure array functions. Beartype checks their jaxtyping annotations in every call that a
# test makes. The hook has to be installed before anything imports one of these modules.
JAXTYPED = (
    "jzero.algorithms.advantages",
    "jzero.algorithms.corrections",
    "jzero.algorithms.kl",
    "jzero.algorithms.losses",
    "jzero.algorithms.ratios",
    "jzero.algorithms.surrogates",
    "jzero.algorithms.weights",
    "jzero.model.layers",
    "jzero.decoder.sampling",
)
jaxtyping.install_import_hook(JAXTYPED, "beartype.beartype")

jax.config.update("jax_num_cpu_devices", 8)

# On a busy machine any example may take long: no property fails by the clock.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-tries",
        action="store_true",
        help="make all generated tries of tests/attacks instead of a seeded sample of them",
    )
    parser.addoption("--network", action="store_true", help="run the tests marked network")
    skips.add_options(parser)
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    # huggingface_hub reads this variable when it is imported, which happens after this call.
    os.environ["HF_HUB_OFFLINE"] = "0" if config.getoption("--network") else "1"
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--strict-skips") and not is_worker:
        config.pluginmanager.register(skips.StrictSkips(config.getoption("--without")))
    tiers.register(config)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Returns one worker where the tests run on an accelerator: one process takes all of it."""
    return None if os.environ["JAX_PLATFORMS"] == "cpu" else 1


def default_backend() -> str:
    """Returns JAX's default backend, or "a machine without one" where JAX finds no such device."""
    try:
        return jax.default_backend()
    except RuntimeError:
        return "a machine without one"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the tests whose mark asks for something that this session does not have."""
    missing = {}
    if not config.getoption("--network"):
        missing["network"] = "downloads: run with --network"
    if importlib.util.find_spec("torch") is None:
        missing["peer"] = "torch is not installed"
    for backend in ("tpu", "gpu"):
        is_asked_for = any(item.get_closest_marker(backend) for item in items)
        if is_asked_for and default_backend() != backend:
            missing[backend] = f"needs a {backend.upper()}, this is {default_backend()}"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    skips.skip_late(item)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collections.

    Libraries are some hundred thousand objects. A collection that looks at all of them takes a
    tenth of a second, and tests that trace programs cause many.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jzero.http.FIRST_PAUSE", 0.01)


TRACED: list[str] = []  # an event of JAX for each program that this process has traced


def note_trace(event: str, *_: object, **__: object) -> None:
    if event.endswith("jaxpr_trace_duration"):
        TRACED.append(event)


jax.monitoring.register_event_duration_secs_listener(note_trace)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs(request: pytest.FixtureRequest, programs: str) -> Iterator[None]:
    """Frees the programs of a test module once it has run, and shares their files.

    JAX keeps every program that it compiled: without this a worker grows to several GiB. What
    cached functions of the module, or of a module of helpers beside it, returned holds programs,
    too.
    """
    common, own = common_directory(), Path(programs)
    link_programs(common, own, checked=True)
    num_traced = len(TRACED)
    yield
    link_programs(own, common, checked=False)
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and tiers.is_of_tests(value):
            value.cache_clear()
    # Half of the modules trace nothing, and looking at all objects takes a tenth of a second.
    if len(TRACED) == num_traced:
        return
    jax.clear_caches()
    with warnings.catch_warnings():
        # What the module's tests left open is not a fault of the test that happened to be last.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    # XLA's compiler leaves much freed memory with the allocator, which keeps it by default.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the directory in which this worker keeps compiled programs.

    It has links to those that other workers and earlier sessions compiled on this machine.
    """
    open_directory(common_directory())
    return str(tmp_path_factory.mktemp("programs"))


@contextlib.contextmanager
def compiling_quickly(programs: str) -> Iterator[None]:
    """Switches XLA's optimizations off, and compiles each program once on the machine.

    For programs that compile for longer than they run, however many tests build them anew.
    programs: the directory that keeps them.
    """
    during = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": programs,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in during}
    for name, value in during.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX opens the cache once: it would keep the old directory
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def quick_compilation(programs: str) -> Iterator[None]:
    """Compiles as `compiling_quickly` during a test."""
    with compiling_quickly(programs):
        yield


@pytest.fixture(scope="session")
def quickly(programs: str) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context of `quick_compilation`, for fixtures of a module: they come before it."""
    return partial(compiling_quickly, programs)


@pytest.fixture
def quick_runs(quick_compilation: None) -> None:
    """The same as `quick_compilation`, by the name that tests of whole runs use."""


@pytest.fixture
def explicit_transfers() -> Iterator[None]:
    """Forbids JAX to copy between the host and the devices unless the code asks for the copy.

    On a TPU or a GPU such a copy may wait for the device. JAX 0.12 finds more of them on CPUs than
    JAX 0.10 does.
    """
    with jax.transfer_guard("disallow"):
        yield


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, programs: str) -> dict[str, str]:
    """Returns the environment of a run that is a process of its own.

    The run has two devices and no network, and compiles each program once, without optimizations.
    """
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
    }


@pytest.fixture
def shared() -> Path:
    """Returns the folder of reference material beside the repository, which is not part of it."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} does not exist")
    return SHARED
