"""Which skipped tests fail a session with --strict-skips."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import ROOT
from skips import is_allowed

CONFTEST = """
from pathlib import Path

import skips
import tiers


def pytest_addoption(parser):
    skips.add_options(parser)
    tiers.add_options(parser)


def pytest_configure(config):
    tiers.register(config, Path(__file__).with_name("times.txt"))
    if config.getoption("--strict-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(skips.StrictSkips(config.getoption("--without")))


def pytest_runtest_setup(item):
    skips.skip_late(item)
"""
SKIPPED_TEST = """
import pytest


def test_passes():
    pass


@pytest.mark.xfail(reason="is known")
def test_fails_as_expected():
    assert False


def test_of_a_package():
    pytest.importorskip("no_such_package")


@pytest.mark.skip(reason="root may write anywhere")
def test_that_may_be_skipped():
    pass
"""
SKIPPED_MODULE = """
import pytest

pytest.importorskip("no_such_package")
"""


def session(
    folder: Path, test: str, *options: str, times: str = "", workers: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one test module in a process of its own.

    times: the recorded times of its tests.
    """
    (folder / "times.txt").write_text(times)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    (folder / "test_other.py").write_text("def test_passes():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", str(workers), *options]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some plugins take a second to import
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("test", "workers"), [(SKIPPED_TEST, 0), (SKIPPED_MODULE, 1)], ids=["test", "module"]
)
def test_a_missing_package_fails_a_strict_session(tmp_path: Path, test: str, workers: int) -> None:
    done = session(tmp_path, test, "--strict-skips", workers=workers)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    [line] = [line for line in done.stdout.splitlines() if "no_such_package" in line]
    assert line.startswith("test_it.py"), done.stdout
    assert "tests/skips.py" in done.stdout


@pytest.mark.parametrize("options", [(), ("--strict-skips", "--without", "no_such_package")])
def test_other_sessions_pass(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = session(tmp_path, SKIPPED_TEST, *options)

    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_no_package_of_the_extra_dev_is_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    # The name ends where the marker, the extra or the version begins.
    packages = [requirement.split(";")[0].split(">")[0].strip() for requirement in requirements]
    assert {"jax", "torch", "httpx", "libtpu"} <= set(packages)

    for package in packages:
        for name in (package, package.replace("-", "_")):
            assert not is_allowed(f"{name} is not installed", []), package
            assert not is_allowed(f"could not import '{name}': No module named '{name}'", [])


THOROUGH_TEST = """
def test_that_takes_seconds():
    assert False


def test_that_is_fast():
    pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_thorough_tests_begin_only_in_their_time(tmp_path: Path, workers: int) -> None:
    times = "test_it.py\n  5.0 - test_that_takes_seconds\n"
    options = ("--thorough", "--strict-skips")
    late = session(
        tmp_path, THOROUGH_TEST, *options, "--thorough-minutes=0", times=times, workers=workers
    )
    in_time = session(tmp_path, THOROUGH_TEST, *options, "--thorough-minutes=60", times=times)

    assert late.returncode == pytest.ExitCode.OK, late.stdout
    assert "1 thorough tests were not run: too late" in late.stdout
    assert "2 passed, 1 skipped" in late.stdout
    assert in_time.returncode == pytest.ExitCode.TESTS_FAILED
    assert "not run" not in in_time.stdout
