"""Counts the tries of the generated attacks and prints them as a table.

    pytest tests/attacks

A test of this folder makes many tries. Each is one `with` block of the fixture `tries`:

    def test_metrics_files(tries):
        for value in VALUES:
            with tries.attempt("watch", f"metrics.jsonl: step={value}"):
                ...  # raises if the attack gets through

A try that raises is counted as broken, and the others still run. The test fails at its end if any
try is broken. After the session a table shows tries, held and broken for each surface.
"""

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

SHOWN_BROKEN = 10  # broken tries of one test that are printed with their tracebacks
PROPERTY = "attack tries"


class Tries:
    """The tries of one test: how many per surface, and which of them got through."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.reports: list[str] = []

    @contextmanager
    def attempt(self, surface: str, name: str) -> Iterator[None]:
        """Counts one try on `surface`. An exception of the block makes the try a broken one."""
        self.tried[surface] += 1
        try:
            yield
        except (Exception, pytest.fail.Exception):
            self.broken[surface] += 1
            self.reports.append(f"{surface}: {name}\n{traceback.format_exc(limit=-4)}")

    def count(self, surface: str, tried: int, broken: Sequence[object] = ()) -> None:
        """Counts tries of a command or a loop that makes its tries itself, and its failures."""
        self.tried[surface] += tried
        self.broken[surface] += len(broken)
        self.reports += [f"{surface}: {failure}" for failure in broken]


@pytest.fixture
def tries(request: pytest.FixtureRequest) -> Iterator[Tries]:
    """Counts the tries of a test, and fails the test if one of them is broken."""
    counted = Tries()
    yield counted
    rows = [(name, count, counted.broken[name]) for name, count in counted.tried.items()]
    # Properties of a report travel from the workers of pytest-xdist to the session.
    request.node.user_properties.append((PROPERTY, rows))
    if counted.reports:
        shown = "\n".join(counted.reports[:SHOWN_BROKEN])
        total = sum(counted.tried.values())
        pytest.fail(f"{len(counted.reports)} of {total} tries got through:\n{shown}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of tries per surface."""
    tried: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            for name, rows in report.user_properties:
                if name != PROPERTY:
                    continue
                for surface, count, failed in rows:
                    tried[surface] += count
                    broken[surface] += failed
    if not tried:
        return
    terminalreporter.section("attacks")
    width = max(len("surface"), *map(len, tried))
    terminalreporter.write_line(f"{'surface':{width}}  {'tries':>7}  {'held':>7}  {'broken':>7}")
    for surface in sorted(tried):
        count, failed = tried[surface], broken[surface]
        terminalreporter.write_line(
            f"{surface:{width}}  {count:7,}  {count - failed:7,}  {failed:7,}"
        )
    total, lost = sum(tried.values()), sum(broken.values())
    terminalreporter.write_line(f"{'all':{width}}  {total:7,}  {total - lost:7,}  {lost:7,}")
