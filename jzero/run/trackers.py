"""Sends a run to the experiment trackers of train.trackers, each in a separate process.

    wandb(project=NAME)                 Weights & Biases
    trackio(project=NAME, space=S)      Trackio, in local files or in a space of the hub
    tensorboard(directory=DIR)          TensorBoard, with the table of completions
    mlflow(project=NAME, uri=URI)       MLflow
    FILE.py:Class(argument=1)           a class with the two methods of `tracker_process.RunTracker`
    module:Class

Every tracker takes `completions=False`, which keeps the table of completions on this machine.

A tracker never stops or delays a run: messages wait in a bounded queue, a thread passes them to the
process (`run.tracker_process`), and every wait has a deadline. Each kind of failure prints one
line. Only a user mistake that is detected at the start, such as a missing key, is an error.
"""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jzero import terminal
from jzero.errors import UserError, shown
from jzero.files import JsonObject, parse_json, read_text, write_atomic
from jzero.notation import read_arguments
from jzero.run.tracker_process import CLOSE_SECONDS, TABLE

START_SECONDS = 30.0  # maximum wait for a tracker before the first step
LONGEST_QUEUE = 1000  # waiting messages; further messages are lost
GIT_SECONDS = 5.0  # maximum wait for git
LOG = "trackers.log"  # in the workdir: what the trackers print

# The trackers of jzero, with the defaults of their arguments.
ARGUMENTS: dict[str, JsonObject] = {
    "wandb": {"project": "jzero"},
    "trackio": {"project": "jzero", "space": ""},
    "tensorboard": {"directory": ""},
    "mlflow": {"project": "jzero", "uri": ""},
}
# The packages that they need: (module, argument of pip install).
PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "'trackio>=0.43'"),
    "mlflow": ("mlflow", "mlflow"),
}
COMPLETIONS = "completions"  # the argument of every tracker that sends the table, or not


class TrackerSpec(NamedTuple):
    """A tracker of train.trackers."""

    text: str  # as in the setting
    name: str  # one of ARGUMENTS, or "module:Class" or "FILE.py:Class"
    arguments: JsonObject
    sends_completions: bool

    @property
    def short_name(self) -> str:
        """The name of the tracker's file in a workdir: "wandb", or the name of a class."""
        return self.name.rpartition(":")[2]


def parse_tracker(text: str) -> TrackerSpec:
    """Parses an item of train.trackers, such as "wandb(project=reasoning)".

    Raises UserError if there is no such tracker or argument.
    """
    where = f"train.trackers={shown(text)}"
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if name not in ARGUMENTS and not all(name.rpartition(":")):
        raise UserError(
            f"{where}: give one of {', '.join(ARGUMENTS)}, a module:Class or a FILE.py:Class, and "
            "the flag once for each"
        )
    if bracket and not rest.endswith(")"):
        raise UserError(f"{where}: close the bracket")
    arguments = _parse_arguments(where, rest[:-1])
    sends_completions = arguments.pop(COMPLETIONS, True)
    if name in ARGUMENTS:
        defaults = ARGUMENTS[name]
        if not arguments.keys() <= defaults.keys():
            known = ", ".join([*defaults, COMPLETIONS])
            raise UserError(f"{where}: the arguments of {name} are {known}, each as NAME=VALUE")
        arguments = defaults | {key: str(value) for key, value in arguments.items()}
    if not isinstance(sends_completions, bool):
        raise UserError(f"{where}: {COMPLETIONS} must be True or False")
    return TrackerSpec(text, name, arguments, sends_completions)


def _parse_arguments(where: str, text: str) -> JsonObject:
    try:
        positional, named = read_arguments(text, bare_text=True)
    except ValueError:
        positional, named = [text], {}
    if positional:
        raise UserError(f"{where}: write each argument as NAME=VALUE, with commas in between")
    return named


def check_trackers(specs: Sequence[str]) -> None:
    """Raises UserError if train.trackers has a mistake, or a package is not installed."""
    names = [parse_tracker(text).short_name for text in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"train.trackers names {name} {names.count(name)} times: name it once")
    for text in specs:
        name = parse_tracker(text).name
        if name in PACKAGES:
            module, package = PACKAGES[name]
            if importlib.util.find_spec(module) is None:
                raise UserError(f"train.trackers={text} needs the package: pip install {package}")
        path = name.rpartition(":")[0]
        if path.endswith(".py") and not Path(path).is_file():
            raise UserError(f"train.trackers={text}: there is no file {path}")


def writes_tensorboard(text: str) -> bool:
    """Returns whether a tracker writes the event files of the workdir itself."""
    spec = parse_tracker(text)
    return spec.name == "tensorboard" and not spec.arguments["directory"]


class Tracker:
    """The process of one tracker, and its message queue."""

    def __init__(
        self,
        spec: TrackerSpec,
        run: JsonObject,
        start_seconds: float = START_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Starts the tracker, and waits up to `start_seconds` for its answer.

        Args:
            spec: the tracker.
            run: what the tracker gets to know of the run (`tracker_process.RunTracker`).
            start_seconds: the maximum wait for the tracker at the start.
            close_seconds: the maximum wait for the tracker at the end of the run.

        Raises:
            UserError: the tracker rejects the settings.
        """
        self.name = name = f"train.trackers={shown(spec.text)}"
        self._sends_completions = spec.sends_completions
        self._close_seconds = close_seconds
        self._queue: queue.Queue[JsonObject | None] = queue.Queue(LONGEST_QUEUE)
        self._is_started = threading.Event()  # or has failed
        self._mistake = ""
        self._has_failed = False
        self._num_lost = 0
        self._errors: set[str] = set()
        # What a tracker prints would land between the lines and bars of the terminal.
        with Path(run["workdir"], LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jzero.run.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only the run, which closes its trackers
            )
        # The first message configures the process; its answer sets `_is_started`.
        self._queue.put({"tracker": spec.name, "arguments": spec.arguments, "run": run})
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer.start()
        self._reader.start()
        # Without an answer the run starts anyway, and the queue holds its messages meanwhile.
        if not self._is_started.wait(start_seconds):
            terminal.say(
                f"{name}: no answer in {start_seconds:g} seconds; the run continues meanwhile"
            )
        if self._mistake:
            self.close({})
            # W&B can also record a run without an account.
            advice = " Or set WANDB_MODE=offline" if spec.name == "wandb" else ""
            raise UserError(f"{name}: {self._mistake}{advice}")

    def log(self, step: int, numbers: Mapping[str, float], rows: Sequence[JsonObject] = ()) -> None:
        """Queues the numbers of a step and the table of its rollouts; returns at once."""
        tables = {TABLE: list(rows)} if rows and self._sends_completions else {}
        try:
            self._queue.put_nowait({"step": step, "metrics": dict(numbers), "tables": tables})
        except queue.Full:
            # The step is dropped: a slow tracker must not slow down the run.
            self._num_lost += 1

    def close(self, summary: JsonObject) -> None:
        """Waits, with a deadline, until the tracker has sent everything.

        `summary` is the content of summary.json; empty for a run that has ended without one.
        """
        deadline = time.monotonic() + self._close_seconds
        try:
            self._queue.put({"summary": summary}, timeout=self._close_seconds)
            # None ends the writer thread, which closes the pipe. The process then sends its
            # remaining data.
            self._queue.put(None, timeout=self._close_seconds)
            self._process.wait(max(0.0, deadline - time.monotonic()))
            self._reader.join(1.0)  # its last report says why it has failed
            # The pipe takes messages even after the process has died.
            if self._process.returncode:
                self._fail("the tracker has ended")
        except (queue.Full, subprocess.TimeoutExpired):
            terminal.say(
                f"{self.name}: not everything was sent within {self._close_seconds:g} seconds"
            )
            self._has_failed = True  # the threads see the killed process; one line is enough
        # The process has ended by itself, or has passed its deadline.
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(queue.Full):  # the writer drains the queue and ends
            self._queue.put(None, timeout=1.0)
        self._writer.join(1.0)
        self._reader.join(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._num_lost:
            terminal.say(f"{self.name}: {self._num_lost} messages were lost")

    def _write(self) -> None:
        """Passes messages to the process: the body of a thread."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            with pipe:
                while (message := self._queue.get()) is not None:
                    pipe.write(json.dumps(message).encode() + b"\n")
                    pipe.flush()
        except OSError:
            self._fail("the tracker has ended")
            # Empties the queue and counts the lost messages, until `close` adds None.
            while self._queue.get() is not None:
                self._num_lost += 1

    def _read(self) -> None:
        """Reads the reports of the process: the body of a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if message["event"] == "failed" and message["is_mistake"]:
                self._has_failed = True  # `__init__` raises this mistake
                self._mistake = message["reason"]
            elif message["event"] == "failed":
                self._fail(message["reason"])
            elif message["event"] == "error" and message["reason"] not in self._errors:
                self._errors.add(message["reason"])
                terminal.say(f"{self.name}: a step is missing: {message['reason']}")
            elif message["event"] == "ready" and message["url"]:
                terminal.say(f"{self.name}: {message['url']}")
            self._is_started.set()
        # The process may end without a message.
        self._is_started.set()

    def _fail(self, reason: str) -> None:
        """Prints, once, that the tracker has failed."""
        if not self._has_failed:
            self._has_failed = True
            terminal.say(f"{self.name}: {reason}; the run continues without it")


def start_trackers(specs: Sequence[str], workdir: Path, first_step: int) -> list[Tracker]:
    """Starts the trackers of a run, or continues the tracker runs of an earlier process.

    `specs` is the setting train.trackers, and `first_step` the first step that this process logs.
    Raises UserError if a tracker rejects its settings.
    """
    path = workdir / "config.json"
    config = parse_json(read_text(path), path)
    trackers = []
    try:
        for text in specs:
            spec = parse_tracker(text)
            run: JsonObject = {
                "name": workdir.name,
                # Kept in the workdir, so that a resumed run continues its run at the tracker.
                "id": _read_or_make_id(workdir / f"{spec.short_name}_id"),
                "workdir": str(workdir),
                "first_step": first_step,
                "config": config,
                "commit": git_commit(),
            }
            trackers.append(Tracker(spec, run))
    except UserError:
        for tracker in trackers:
            tracker.close({})
        raise
    return trackers


def git_commit() -> str:
    """Returns the commit of the directory that the run was started in, "" outside of git.

    The commit ends in "-dirty" if files differ from it.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read_or_make_id(path: Path) -> str:
    """Returns the tracker's id of this run, which a file in the workdir stores."""
    if not path.exists():
        write_atomic(path, os.urandom(8).hex())
    return path.read_text()
