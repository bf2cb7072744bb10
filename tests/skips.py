"""The reasons for which a test may be skipped, and an option that fails the session at any other.

A test that is skipped because its package is missing looks like a test that passed. `.ci/run`
therefore runs `pytest --strict-skips`: a reason that `ALLOWED_SKIPS` does not list fails the
session. The list names no package that the extra `dev` of pyproject.toml brings.

`pytest --strict-skips --without torch` also allows the tests of the package torch to be skipped, in
an environment that was set up without torch on purpose.

The platform of the session is chosen here, too, before JAX is imported.
"""

import math
import re
import time
from itertools import pairwise
from typing import NamedTuple

import pytest
import tiers

STARTED = time.monotonic()  # of this worker
TIME_IS_OVER = "thorough: the time for these tests is over"
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # of the marks, by JAX's names


def platform_asked_for(arguments: list[str]) -> str:
    """Returns the platform that pytest's arguments ask for with `-m gpu` or `-m tpu`, or "cpu"."""
    for option, value in pairwise(arguments):
        if option == "-m" and value in PLATFORMS:
            return PLATFORMS[value]
    return "cpu"


class AllowedSkip(NamedTuple):
    """A reason for which a test may be skipped in `.ci/run`."""

    reason: str  # a regular expression that the whole reason has to match
    why: str  # why `.ci/run` may do without the test


ALLOWED_SKIPS = [
    AllowedSkip(TIME_IS_OVER, "on a slow machine `.ci/run` has to end, too; it says how many"),
    AllowedSkip("downloads: run with --network", "the tests run without a network"),
    AllowedSkip("needs a (TPU|GPU), this is .*", "the machine has no such device"),
    AllowedSkip(
        "XLA has no product of bf16 for this CPU",
        "the product is computed in fp32 there, and other tests compare its values",
    ),
    AllowedSkip(
        r".*[/\\]shared([/\\].*)? does not exist",
        "reference material beside the repository is not part of it",
    ),
    AllowedSkip(
        "could not import "
        "'(peft|trl|lm_eval|verifiers|math_verify|wandb|trackio|mlflow|jetstream|grpc|dockerfile_parse)"
        "[a-z0-9_.]*'.*",
        "these packages belong to other extras than dev: each is large or has a conflict",
    ),
    AllowedSkip(
        "could not import '(agents|smolagents)'.*",
        "the agents of other projects bring a hundred packages; tests/environments has their part",
    ),
    AllowedSkip("wandb is not installed: .*", "wandb belongs to the extra wandb"),
    AllowedSkip(r"pip install -e '\.\[jetstream\]'", "JetStream belongs to the extra jetstream"),
    AllowedSkip(
        "jax-cuda12-plugin(, whose compiler this is,)? is not installed",
        "JAX for NVIDIA GPUs belongs to the extra cuda12 and takes gigabytes",
    ),
    AllowedSkip(
        "gated delta nets are exact with JAX before 0.12",
        "model.exact refuses them with newer versions, whose compiler rounds them otherwise",
    ),
    AllowedSkip("cuDNN is not installed", "cuDNN comes with JAX for NVIDIA GPUs"),
    AllowedSkip(
        "SKYPILOT_PATH is not set: .*",
        "SkyPilot needs other versions than jzero, and half a gigabyte",
    ),
    AllowedSkip(
        "OPENENV_PYTHON is not set: .*",
        "OpenEnv's server needs eighty packages that jzero does not",
    ),
    AllowedSkip(
        "TINKER_SDK_PYTHONS is not set: .*",
        "the SDK of Tinker belongs to its clients, and every version is tried in its own place",
    ),
    AllowedSkip("no browser: .*", "a browser is not a Python package"),
    AllowedSkip("no node: install nodejs", "Node is not a Python package"),
    AllowedSkip(r"needs flock \(util-linux\)", "macOS does not have the program flock"),
    AllowedSkip(
        "this machine has no sandbox of level (namespaces|landlock|seccomp): .*",
        "containers and older kernels forbid some of the levels",
    ),
    AllowedSkip(
        "the level seccomp does not keep programs from reading",
        "docs/environments.md says so, and a config has to name the level",
    ),
    AllowedSkip(
        "needs the right to read the memory of a process that forbids it",
        "only root looks into the sandbox's server from outside; programs look from inside, too",
    ),
    AllowedSkip("root may write anywhere", "no directory can be closed to root"),
]


def is_allowed(reason: str, without: list[str]) -> bool:
    """Returns whether a test may be skipped for `reason`.

    Args:
        reason: what the test said, without pytest's "Skipped: ".
        without: names of packages that are missing on purpose.
    """
    if any(re.fullmatch(allowed.reason, reason, re.DOTALL) for allowed in ALLOWED_SKIPS):
        return True
    for package in without:
        missing = rf"could not import '{re.escape(package)}[a-z0-9_.]*'.*"
        if re.fullmatch(missing, reason, re.DOTALL) or reason == f"{package} is not installed":
            return True
    return False


def add_options(parser: pytest.Parser) -> None:
    """Adds the options of this module to pytest's command line."""
    parser.addoption(
        "--thorough-minutes",
        type=float,
        default=math.inf,
        metavar="N",
        help="with --thorough: begin no thorough test after N minutes; all others run",
    )
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail if a test is skipped for a reason that tests/skips.py does not list",
    )
    parser.addoption(
        "--without",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="with --strict-skips: tests of this package may be skipped",
    )


def skip_late(item: pytest.Item) -> None:
    """Skips a thorough test that would begin after --thorough-minutes."""
    minutes = (time.monotonic() - STARTED) / 60
    is_late = minutes > item.config.getoption("--thorough-minutes")
    if is_late and tiers.is_of_later_tier(item):
        pytest.skip(TIME_IS_OVER)


class StrictSkips:
    """A pytest plugin that fails the session if a test is skipped for an unlisted reason.

    Under pytest-xdist it belongs in the process that collects the workers' reports.
    """

    def __init__(self, without: list[str]) -> None:
        self.without = without
        self.unexpected: dict[str, str] = {}  # test or module -> reason
        self.num_late = 0  # thorough tests that would have begun too late

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keeps the reason of a report of a skipped test or module, unless the reason is listed."""
        is_expected_failure = hasattr(report, "wasxfail")  # pytest calls this skipped, too
        if not report.skipped or is_expected_failure:
            return
        assert isinstance(report.longrepr, tuple), f"{report.longrepr=}"
        reason = report.longrepr[2].removeprefix("Skipped: ")
        self.num_late += reason == TIME_IS_OVER
        if not is_allowed(reason, self.without):
            self.unexpected[report.nodeid] = reason

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.num_late:
            terminalreporter.line(f"{self.num_late} thorough tests were not run: too late")
        if not self.unexpected:
            return
        terminalreporter.section("unexpected skips", red=True)
        for test, reason in sorted(self.unexpected.items()):
            terminalreporter.line(f"{test}: {reason}")
        terminalreporter.line(
            "Install what is missing (pip install -c constraints.txt -e '.[dev]'), or list the "
            "reason in tests/skips.py with why it is allowed."
        )
