"""Which tests run by default, with --thorough and with --all: chosen by the time they took.

tests/times.txt has the seconds of every test that is not fast, and nothing else says how long a
test takes. A test that is not in the file counts as fast, so a new test runs by default.

    pytest              tests below DEFAULT_SECONDS, and those of WHOLE_RUNS; of the cases of a test
                        the first that take no more than CASES_SECONDS together
    pytest --thorough   tests below THOROUGH_SECONDS, and those of WHOLE_RUNS
    pytest --all        every test
    pytest FILE::NAME   the test that is named, whatever its time

The commands of the file:

    pytest --thorough --record-times=NEW   measures the tests of a session
    python tests/tiers.py --move NEW       puts these times into tests/times.txt and prints which
                                           tests have moved to another tier
    python tests/tiers.py                  prints the seconds and the slowest tests of each tier

A fixture of a module, a folder or a session, and a cached function of the tests, are measured apart
from the tests that share them. A test is as expensive as it is by itself, with all that it
shares. Otherwise the fixture would be paid for by whichever of its tests comes first, and again by
the next one where that test is left out.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from whole_runs import WHOLE_RUNS

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

TESTS = Path(__file__).resolve().parent
FILE = TESTS / "times.txt"
DEFAULT_SECONDS = 0.5  # a test that takes longer runs by default only if WHOLE_RUNS names it
CASES_SECONDS = 0.5  # nearly every fault that a hundred cases find is found by the first few
THOROUGH_SECONDS = 120.0
RECORDED_SECONDS = 0.1  # times below are not recorded
DEFAULT_BUDGET = 440.0  # processor seconds of all tests of the default tier
TIERS = ("default", "thorough", "all")
NAMED = frozenset(name for names in WHOLE_RUNS.values() for name in names)
HEADER = """\
# The seconds of every test that takes more than 0.1 s, written by tests/tiers.py:
# seconds, what the test shares with others of its file (- for nothing), and its name.
# "8.1 = served" is the time of the fixture or the cached function served.
# 2.0 and 200.0 are estimates, of tests in the tiers thorough and all that nobody has measured yet.
"""


@dataclass
class Times:
    """The seconds of the tests of one file.

    `shares` has the names in `shared` that a test uses. Their seconds are not part of `tests`.
    """

    tests: dict[str, float] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)
    shares: dict[str, list[str]] = field(default_factory=dict)

    def seconds(self, test: str, paid: Collection[str] = ()) -> float:
        """Returns the seconds of a test by itself, without the shared things in `paid`."""
        shared = [self.shared[name] for name in self.shares.get(test, ()) if name not in paid]
        return self.tests.get(test, 0.0) + sum(shared)


def read(path: Path = FILE) -> dict[str, Times]:
    """Returns the recorded times of each test file, by its path below the repository."""
    files: dict[str, Times] = {}
    times = Times()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            times = files[line] = Times()
            continue
        seconds, shares, name = line.split(maxsplit=2)
        if shares == "=":
            times.shared[name] = float(seconds)
            continue
        times.tests[name] = float(seconds)
        if shares != "-":
            times.shares[name] = shares.split(",")
    return files


def write(
    files: dict[str, Times], path: Path = FILE, least_seconds: float = RECORDED_SECONDS
) -> None:
    """Writes times for `read`. Leaves out what takes less than `least_seconds`."""
    lines = [HEADER]
    for file, times in sorted(files.items()):
        shared = {name: took for name, took in times.shared.items() if took >= least_seconds}
        body = [f"  {took:.1f} = {name}\n" for name, took in sorted(shared.items())]
        for test, took in sorted(times.tests.items()):
            shares = ",".join(name for name in times.shares.get(test, ()) if name in shared)
            if shares or took >= least_seconds:
                body.append(f"  {took:.1f} {shares or '-'} {test}\n")
        lines += [f"{file}\n", *body] if body else []
    path.write_text("".join(lines), encoding="utf-8")


def split(node: str) -> tuple[str, str]:
    """Returns the file and the rest of the id of a test."""
    file, _, test = node.partition("::")
    return file, test


def is_whole_run(file: str, test: str) -> bool:
    """Returns whether WHOLE_RUNS names a test, by its whole id or without its case."""
    function, _, _ = test.partition("[")
    return not NAMED.isdisjoint((f"{file}::{test}", f"{file}::{function}"))


def tier_of(seconds: float) -> str:
    if seconds < DEFAULT_SECONDS:
        return "default"
    return "thorough" if seconds < THOROUGH_SECONDS else "all"


def is_of_tests(function: object, folder: Path = TESTS) -> bool:
    """Returns whether a function is defined in the folder of the tests."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = getattr(module, "__file__", None)
    return path is not None and folder in Path(path).parents


def tiers(files: dict[str, Times]) -> dict[str, str]:
    """Returns the tier of every recorded test.

    What a whole run shares with other tests of its file is paid for.
    """
    found = {}
    for file, times in files.items():
        whole = [test for test in times.tests if is_whole_run(file, test)]
        paid = {name for test in whole for name in times.shares.get(test, ())}
        by_function: dict[str, float] = defaultdict(float)  # seconds of the cases that are chosen
        for test in times.tests:
            if test in whole:
                found[f"{file}::{test}"] = "default"
                continue
            seconds = times.seconds(test, paid)
            tier, function = tier_of(seconds), test.partition("[")[0]
            if tier == "default" and by_function[function]:
                is_over = by_function[function] + seconds > CASES_SECONDS
                tier = "thorough" if is_over else tier
            if tier == "default":
                by_function[function] += seconds
            found[f"{file}::{test}"] = tier
    return found


# Choosing the tests of a session.


def add_options(parser: pytest.Parser) -> None:
    """Adds the options of this module to pytest's command line."""
    parser.addoption("--thorough", action="store_true", help="run slower tests, too")
    parser.addoption("--all", action="store_true", help="run every test, however slow")
    parser.addoption(
        "--record-times",
        metavar="FILE",
        help="write the seconds of each test to a file, for python tests/tiers.py --move FILE",
    )


def register(config: pytest.Config, times: Path = FILE) -> None:
    """Registers the plugins of this module, of tests beside the recorded `times`."""
    config.pluginmanager.register(Tiers(config, times))
    if path := config.getoption("--record-times"):
        new = config.invocation_params.dir / path
        config.pluginmanager.register(Recorder(new, times.parent))


TIER = pytest.StashKey[str]()
COLLECTED = pytest.StashKey[list[str]]()


def is_of_later_tier(item: pytest.Item) -> bool:
    """Returns whether a test is not part of the default tier."""
    return item.stash.get(TIER, "default") != "default"


def is_asked_for(item: pytest.Item) -> bool:
    """Returns whether the command line names the test itself, and not its file or folder."""
    folder = item.config.invocation_params.dir
    for argument in item.config.args:
        file, test = split(argument)
        is_same_file = bool(test) and (folder / file).resolve() == item.path
        name = split(item.nodeid)[1]
        if is_same_file and (name == test or name.startswith((f"{test}[", f"{test}::"))):
            return True
    return False


class Tiers:
    """A pytest plugin that leaves out the tests of slower tiers than the session's."""

    def __init__(self, config: pytest.Config, times: Path) -> None:
        self.times = times
        self.left_out: dict[str, int] = dict.fromkeys(TIERS, 0)
        self.tier = "default"
        if config.getoption("--thorough"):
            self.tier = "thorough"
        if config.getoption("--all"):
            self.tier = "all"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        config.stash[COLLECTED] = [item.nodeid for item in items]
        files = read(self.times)
        recorded = tiers(files)
        chosen, left_out = [], []
        for item in items:
            item.stash[TIER] = tier = recorded.get(item.nodeid, "default")
            # A device measures its own times, and its tests are chosen by their marks.
            is_of_device = any(item.get_closest_marker(mark) for mark in ("gpu", "tpu"))
            is_chosen = TIERS.index(tier) <= TIERS.index(self.tier)
            if is_chosen or is_of_device or is_asked_for(item):
                chosen.append(item)
            else:
                left_out.append(item)
                self.left_out[tier] += 1
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = chosen
        if hasattr(config, "workerinput"):
            # The longest files first: a long one that begins last keeps one worker busy alone.
            seconds: dict[str, float] = defaultdict(float)
            for item in items:
                file, test = split(item.nodeid)
                seconds[file] += files.get(file, Times()).tests.get(test, 0.02)
            items.sort(key=lambda item: (-seconds[split(item.nodeid)[0]], split(item.nodeid)[0]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: "WorkerController") -> None:
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self.left_out.values()):
            thorough, slow = self.left_out["thorough"], self.left_out["all"]
            terminalreporter.line(
                f"left out by their recorded times: {thorough} tests that run with --thorough, "
                f"{slow} more that run with --all"
            )


# Measuring the tests of a session.


def processor_seconds() -> float:
    """Returns the processor time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass
class Stopwatch:
    """Measures a piece of a session: processor seconds, or wall seconds where they are more.

    Where more processes run than there are processors, wall seconds are reduced by their ratio: the
    piece waited for processors, too.
    """

    seconds: float = 0.0  # without the pieces that were measured inside

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        processor, wall = processor_seconds(), time.monotonic()
        try:
            yield
        finally:
            busy = max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)
            waited = (time.monotonic() - wall) / busy
            self.seconds += max(processor_seconds() - processor, waited)


class Recorder:
    """A pytest plugin that measures each test of a session, and what tests share."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder  # of the tests
        self.files: dict[str, Times] = defaultdict(Times)
        self.file = ""  # of the test that runs
        self.shared_in_test = 0.0
        self.uses: list[str] = []
        self.depth = 0
        self.skipped: set[str] = set()

    @contextlib.contextmanager
    def measuring_shared(self, name: str) -> Iterator[None]:
        """Measures something that the running test shares with others of its file."""
        self.uses.append(name)
        self.depth += 1
        watch = Stopwatch()
        try:
            with watch.running():
                yield
        finally:
            self.depth -= 1
            shared = self.files[self.file].shared
            shared[name] = max(shared.get(name, 0.0), watch.seconds)
            if self.depth == 0:
                self.shared_in_test += watch.seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.file, test = split(item.nodeid)
        self.shared_in_test = 0.0
        self.uses = []
        watch = Stopwatch()
        try:
            with watch.running():
                return (yield)
        finally:
            self.record(item, test, watch.seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.add(report.nodeid)

    def record(self, item: pytest.Item, test: str, seconds: float) -> None:
        """Keeps the time of a test that was not skipped."""
        if item.nodeid in self.skipped:
            return
        times = self.files[self.file]
        times.tests[test] = max(seconds - self.shared_in_test, 0.0)
        # A fixture that an earlier test has set up is not set up again.
        used = {*self.uses, *(name for name in item.fixturenames if name in times.shared)}
        times.shares[test] = sorted(used)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        if fixturedef.scope == "function":
            return (yield)
        with self.measuring_shared(fixturedef.argname):
            return (yield)

    def pytest_collection_finish(self) -> None:
        """Replaces the cached functions of the tests by measured ones."""
        measured: dict[object, object] = {}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path is None or self.folder not in Path(path).parents:
                continue
            for name, value in list(vars(module).items()):
                if hasattr(value, "cache_info") and is_of_tests(value, self.folder):
                    if value not in measured:
                        measured[value] = self.measured(value)
                    setattr(module, name, measured[value])

    def measured(self, cached: Callable[..., object]) -> Callable[..., object]:
        """Returns a cached function that measures its calls, each argument apart."""

        @functools.wraps(cached, updated=())
        def call(*args: object, **kwargs: object) -> object:
            arguments = repr((args, kwargs)) if args or kwargs else ""
            suffix = f".{zlib.crc32(arguments.encode()):08x}" if arguments else ""
            with self.measuring_shared(cached.__name__ + suffix):
                return cached(*args, **kwargs)

        for name in ("cache_clear", "cache_info", "cache_parameters"):
            setattr(call, name, getattr(cached, name))
        return call

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        times = {
            file: (times.tests, times.shared, times.shares) for file, times in self.files.items()
        }
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["times"] = times
        else:
            # A test that has become fast has to be in the file, too.
            write(self.files, self.path, least_seconds=0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: "WorkerController") -> None:
        """Takes the times of a worker, which has run whole files."""
        for file, times in getattr(node, "workeroutput", {}).get("times", {}).items():
            self.files[file] = Times(*times)


# The commands of the file of times.


def collected() -> set[str]:
    """Returns the ids of all tests of the suite, however slow."""
    command = [sys.executable, "-m", "pytest", "--all", "--collect-only", "--numprocesses=0"]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=TESTS.parent, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}The tests cannot be collected.")
    return {line for line in done.stdout.splitlines() if "::" in line}


def merge(old: dict[str, Times], new: dict[str, Times]) -> None:
    """Puts new times into old ones. A time that hardly differs keeps its old value."""
    for file, measured in new.items():
        times = old.setdefault(file, Times())
        for name, seconds in measured.shared.items():
            times.shared[name] = steady(times.shared.get(name), seconds)
        for test, seconds in measured.tests.items():
            times.tests[test] = steady(times.tests.get(test), seconds)
            times.shares[test] = measured.shares.get(test, [])


def steady(old: float | None, new: float) -> float:
    """Returns `old` if it is within a third of `new`, so that a new record changes few lines."""
    return old if old is not None and abs(new - old) < max(old, new) / 3 else new


def forget(files: dict[str, Times], existing: Collection[str]) -> None:
    """Drops the times of tests that do not exist any more, and what only they shared."""
    for file, times in list(files.items()):
        times.tests = {
            test: took for test, took in times.tests.items() if f"{file}::{test}" in existing
        }
        used = {name for test in times.tests for name in times.shares.get(test, ())}
        times.shared = {name: took for name, took in times.shared.items() if name in used}
        if not times.tests:
            del files[file]


def seconds_of_tier(files: dict[str, Times], tier: str) -> float:
    """Returns the recorded seconds of the tests of a tier, with each shared thing once."""
    tier_of_test = tiers(files)
    total = 0.0
    for file, times in files.items():
        chosen = [test for test in times.tests if tier_of_test[f"{file}::{test}"] == tier]
        shared = {name for test in chosen for name in times.shares.get(test, ())}
        total += sum(times.tests[test] for test in chosen)
        total += sum(times.shared[name] for name in shared)
    return total


def move(new: Path) -> None:
    """Puts the times of a session into the file, and prints which tests have moved."""
    files = read()
    before = tiers(files)
    merge(files, read(new))
    forget(files, collected())
    write(files)
    for test, tier in sorted(tiers(read()).items()):
        if tier != before.get(test, "default"):
            print(f"{before.get(test, 'default')} -> {tier}: {test}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which tests are in which tier, by their times.")
    parser.add_argument("--move", metavar="NEW", type=Path, help="a file of --record-times")
    new = parser.parse_args().move
    if new is not None:
        move(new)
    files = read()
    recorded = tiers(files)
    for tier in TIERS:
        tests = [test for test in recorded if recorded[test] == tier]
        seconds = {test: files[split(test)[0]].seconds(split(test)[1]) for test in tests}
        total = seconds_of_tier(files, tier)
        print(f"\n{tier}: {total:.0f} s in {len(tests)} recorded tests, of which the slowest are")
        for test in sorted(tests, key=lambda test: -seconds[test])[:10]:
            print(f"  {seconds[test]:6.1f} {test}")
    over = seconds_of_tier(files, "default") - DEFAULT_BUDGET
    if over > 0:
        sys.exit(f"The default tier is {over:.0f} s over its budget of {DEFAULT_BUDGET:.0f} s.")


if __name__ == "__main__":
    main()
