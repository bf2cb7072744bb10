"""The life of a model on the hub, against a stand-in for the hub: what arrives, and what fails.

    python benchmarks/hub_life.py [--quick]

Pushes exports through `run.hub_pushes`, the code that a run with hub.push uses, and prints a row
for each case: a private model with a branch for each checkpoint, a public model that is refused, a
branch of another run, a hub that is busy, a hub that never answers, and a push that a kill
interrupted and that a resumed run makes up for. The columns are the commits that the hub got, those
that were expected, the models that failed, and the longest that `add` kept the run waiting. Exits
with 1 if a count is wrong or the run waited for more than half a second. Takes about a minute of
processor time; --quick runs the first two cases only.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runs import Hub

from jzero.config import EveryCheckpoint
from jzero.run.hub_ledger import Ledger, Push
from jzero.run.hub_pushes import HubPushes

SETTINGS = EveryCheckpoint(repo="me/tiny", retries=1)
LONGEST_WAIT = 0.5  # seconds that a step may wait for the hub
WAIT_SECONDS = 240.0  # for the pushes of one case
STEPS = (2, 4)


class Result(NamedTuple):
    """What one case came to."""

    commits: list[str]
    num_failed: int
    waited: float  # seconds, the longest


class Case(NamedTuple):
    """A state of the hub, and what has to come of pushes to it."""

    name: str
    run: Callable[[Hub, Path], Result]
    commits: list[str]
    num_failed: int = 0


def make_push(workdir: Path, step: int) -> Push:
    """Returns a push of an export that holds its step."""
    directory = workdir / f"export-{step}"
    directory.mkdir()
    (directory / "model.safetensors").write_text(f"weights of step {step}")
    return Push(step, f"main-step-{step}", directory, is_temporary=True)


def push_steps(workdir: Path, hub: Hub, settings: EveryCheckpoint, seconds: float) -> Result:
    """Pushes STEPS as a run does; waits for the hub for at most `seconds` at the end."""
    pushes = HubPushes(settings, workdir, first_pause=0.1)
    with contextlib.closing(pushes):
        waited = 0.0
        for step in STEPS:
            push = make_push(workdir, step)
            start = time.monotonic()
            pushes.add(push)
            waited = max(waited, time.monotonic() - start)
        pushes.wait(seconds)
        num_failed = len(pushes.summary()["failed"])
    return Result(hub.commits, num_failed, waited)


def push_to_new_model(hub: Hub, workdir: Path) -> Result:
    result = push_steps(workdir, hub, SETTINGS, WAIT_SECONDS)
    assert hub.is_private, "the model is public"
    return result


def push_to_public_model(hub: Hub, workdir: Path) -> Result:
    hub.branches["main"] = {}
    hub.is_private = False
    return push_steps(workdir, hub, SETTINGS, WAIT_SECONDS)


def push_to_branch_of_another_run(hub: Hub, workdir: Path) -> Result:
    hub.branches |= {"main": {}, "main-step-2": {"model.safetensors": b"of another run"}}
    hub.is_private = True
    return push_steps(workdir, hub, SETTINGS, WAIT_SECONDS)


def push_to_busy_hub(hub: Hub, workdir: Path) -> Result:
    hub.failures = 2
    return push_steps(workdir, hub, SETTINGS, WAIT_SECONDS)


def push_to_stalled_hub(hub: Hub, workdir: Path) -> Result:
    hub.is_stalled = True
    return push_steps(workdir, hub, replace(SETTINGS, minutes=0.1, retries=0), WAIT_SECONDS)


def resume_after_kill(hub: Hub, workdir: Path) -> Result:
    """Stops a run's pushes while the hub does not answer, and resumes the run."""
    hub.is_stalled = True
    killed = push_steps(workdir, hub, SETTINGS, seconds=3.0)
    assert hub.commits == [], "the kill came too late"
    hub.is_stalled = False
    pushes = HubPushes(SETTINGS, workdir, resume_step=STEPS[-1], first_pause=0.1)
    with contextlib.closing(pushes):
        pushes.wait(WAIT_SECONDS)
        num_failed = len(pushes.summary()["failed"])
    assert Ledger(workdir).pushed_steps() == [*STEPS], "the ledger lacks a push"
    return Result(hub.commits, num_failed, killed.waited)


BOTH = [f"main-step-{step}" for step in STEPS]
CASES = [
    Case("new model, private", push_to_new_model, BOTH),
    Case("public model", push_to_public_model, [], num_failed=2),
    Case("branch of another run", push_to_branch_of_another_run, BOTH[1:], num_failed=1),
    Case("hub busy for two requests", push_to_busy_hub, BOTH),
    Case("hub that never answers", push_to_stalled_hub, [], num_failed=2),
    Case("killed, then resumed", resume_after_kill, BOTH),
]


@contextlib.contextmanager
def hub_of_processes() -> Iterator[Hub]:
    """Starts a hub that the processes of pushes find in their environment."""
    with Hub() as hub:
        os.environ |= hub.environment()
        yield hub
        hub.is_stalled = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the first two cases")
    args = parser.parse_args()
    print(f"{'case':28}{'commits':>8}{'expected':>9}{'failed':>7}{'expected':>9}{'waited':>8}")
    is_right = True
    for case in CASES[:2] if args.quick else CASES:
        with tempfile.TemporaryDirectory() as folder, hub_of_processes() as hub:
            result = case.run(hub, Path(folder))
        numbers = (len(result.commits), len(case.commits), result.num_failed, case.num_failed)
        print("{:28}{:8}{:9}{:7}{:9}".format(case.name, *numbers), f"{result.waited:5.2f} s")
        is_right &= sorted(result.commits) == sorted(case.commits)
        is_right &= result.num_failed == case.num_failed and result.waited < LONGEST_WAIT
    print("all counts are as expected" if is_right else "a count differs")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
