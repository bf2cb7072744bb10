"""Which tests run by default, and that the recorded times are those of tests that exist."""

import ast
from pathlib import Path

import pytest
import tiers
from runs import ROOT
from test_skips import session
from tiers import Times
from whole_runs import WHOLE_RUNS

TESTS = """
import functools
import time

import pytest

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture(scope="module")
def server():
    work(0.4)


@functools.cache
def weights(size):
    work(0.5)


def test_fast():
    pass


@pytest.mark.parametrize("seconds", [0.01, 0.6])
def test_case(seconds):
    work(seconds)


@pytest.mark.skip(reason="root may write anywhere")
def test_that_is_skipped():
    pass


def test_first_of_the_server(server):
    weights(2)


def test_second_of_the_server(server):
    weights(2)
"""
TIMES = """# seconds, shared, test
test_it.py
  5.0 = server
  2.0 - test_case[0.01]
  500.0 - test_case[0.6]
  0.0 server test_first_of_the_server
  0.1 server test_second_of_the_server
"""


@pytest.mark.parametrize(
    ("options", "passed", "deselected"),
    [
        ((), 2, 4),
        (("--thorough",), 5, 1),
        (("--all",), 6, 0),
        (("test_it.py::test_case[0.6]",), 1, 0),
        (("test_it.py::test_case",), 2, 0),
        (("test_it.py",), 1, 4),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_recorded_times_choose_the_tests(
    tmp_path: Path, options: tuple[str, ...], passed: int, deselected: int, workers: int
) -> None:
    done = session(tmp_path, TESTS, *options, times=TIMES, workers=workers)

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert f"{passed} passed" in done.stdout
    # The process that starts workers counts no tests itself.
    assert ("left out by their recorded times: " in done.stdout) == bool(deselected)
    if workers == 0 and deselected:
        assert f"{deselected} deselected" in done.stdout


def test_a_record_has_what_tests_share_apart_from_the_tests(tmp_path: Path) -> None:
    new = tmp_path / "new.txt"
    done = session(tmp_path, TESTS, "--record-times", str(new), workers=1)
    assert done.returncode == pytest.ExitCode.OK, done.stdout

    times = tiers.read(new)["test_it.py"]

    cached = next(name for name in times.shared if name.startswith("weights."))
    assert times.shared["server"] == pytest.approx(0.4, abs=0.3)
    assert times.shared[cached] == pytest.approx(0.5, abs=0.3)
    assert "test_that_is_skipped" not in times.tests
    for test in ("test_first_of_the_server", "test_second_of_the_server"):
        assert times.shares[test] == ["server", cached]
        assert times.tests[test] < 0.3
        assert times.seconds(test) == pytest.approx(0.9, abs=0.5)
    assert times.tests["test_fast"] < 0.3
    assert times.tests["test_case[0.6]"] > 0.3


def test_what_is_written_is_read(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": Times(
            {"test_x[a = b]": 2.5}, {"server": 7.0}, {"test_x[a = b]": ["server"]}
        )
    }

    tiers.write(files, tmp_path / "times.txt")

    assert tiers.read(tmp_path / "times.txt") == files


def test_of_many_cases_the_first_run_by_default() -> None:
    cases = {f"test_x[{number}]": 0.2 for number in range(4)}
    times = Times(cases | {"test_x[none]": 0.0, "test_y[0]": 0.2, "test_z": 0.2})

    found = tiers.tiers({"tests/test_a.py": times})

    default = {name.partition("::")[2] for name, tier in found.items() if tier == "default"}
    assert default == {"test_x[0]", "test_x[1]", "test_x[none]", "test_y[0]", "test_z"}
    assert set(found.values()) == {"default", "thorough"}


def test_a_whole_run_pays_for_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"test_run": ["model"], "test_detail": ["model"], "test_other": ["server"]}
    times = Times(dict.fromkeys(shares, 0.1), {"model": 9.0, "server": 9.0}, shares)
    monkeypatch.setattr(tiers, "NAMED", frozenset(["tests/test_a.py::test_run"]))

    found = tiers.tiers({"tests/test_a.py": times})

    assert found == {
        "tests/test_a.py::test_run": "default",
        "tests/test_a.py::test_detail": "default",
        "tests/test_a.py::test_other": "thorough",
    }


def test_a_time_that_hardly_differs_is_kept() -> None:
    old = {"tests/test_a.py": Times({"test_x": 2.0, "test_y": 2.0})}

    tiers.merge(old, {"tests/test_a.py": Times({"test_x": 2.4, "test_y": 4.0, "test_z": 1.0})})

    assert old["tests/test_a.py"].tests == {"test_x": 2.0, "test_y": 4.0, "test_z": 1.0}


def test_the_default_tier_is_within_its_budget() -> None:
    assert tiers.seconds_of_tier(tiers.read(), "default") < tiers.DEFAULT_BUDGET


def functions(file: Path) -> set[str]:
    """Returns the names of the functions of a test file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named_tests() -> dict[str, set[str]]:
    """Returns the tests that times.txt and whole_runs.py name, by file."""
    named = {file: set(times.tests) for file, times in tiers.read().items()}
    for names in WHOLE_RUNS.values():
        for name in names:
            file, test = tiers.split(name)
            named.setdefault(file, set()).add(test)
    return named


def test_every_recorded_test_and_whole_run_exists(request: pytest.FixtureRequest) -> None:
    """The cases of a parametrized test are compared where this session has collected their file."""
    collected = set(request.config.stash[tiers.COLLECTED])
    collected_files = {tiers.split(node)[0] for node in collected}
    functions_of_cases = {node.partition("[")[0] for node in collected}

    missing = []
    for file, tests in named_tests().items():
        present = functions(ROOT / file) if (ROOT / file).exists() else set()
        for test in tests:
            node = f"{file}::{test}"
            is_function = test.partition("[")[0] in present
            is_case = node in collected | functions_of_cases or file not in collected_files
            if not is_function or not is_case:
                missing.append(node)

    assert not missing, "run python tests/tiers.py --move, or mend tests/whole_runs.py"
