"""Sends metrics to experiment trackers (Weights & Biases, Trackio), each in a separate process.

A tracker never stops or delays a run: messages wait in a bounded queue, a thread passes them to the
process (`run.tracker_process`), and every wait has a deadline. Each kind of failure prints one
line. Only a user mistake that is detected at the start, such as a missing key, is an error.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jzero import terminal
from jzero.config import TrainConfig
from jzero.errors import UserError
from jzero.files import JsonObject, write_atomic
from jzero.run.tracker_process import CLOSE_SECONDS

START_SECONDS = 30.0  # maximum wait for a tracker before the first step
LONGEST_QUEUE = 1000  # waiting messages; further messages are lost


class Tracker:
    """The process of one tracker, and its message queue."""

    def __init__(
        self,
        kind: str,
        name: str,
        arguments: JsonObject,
        start_seconds: float = START_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Starts the tracker, and waits up to `start_seconds` for its answer.

        Args:
            kind: an entry of `tracker_process.KINDS`.
            name: the prefix of messages to the user, such as "train.wandb_project=reasoning".
            arguments: the arguments of the tracker's `init`.
            start_seconds: the maximum wait for the tracker at the start.
            close_seconds: the maximum wait for the tracker at the end of the run.

        Raises:
            UserError: the tracker rejects the settings.
        """
        self.name = name
        self._close_seconds = close_seconds
        self._queue: queue.Queue[JsonObject | None] = queue.Queue(LONGEST_QUEUE)
        self._is_started = threading.Event()  # or has failed
        self._mistake = ""
        self._has_failed = False
        self._num_lost = 0
        self._errors: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jzero.run.tracker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the run, which closes its trackers
        )
        # The first message configures the process; its answer sets `_is_started`.
        self._queue.put({"kind": kind, "arguments": arguments})
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer.start()
        self._reader.start()
        # Without an answer the run starts anyway, and the queue holds its messages meanwhile.
        if not self._is_started.wait(start_seconds):
            _print(f"{name}: no answer in {start_seconds:g} seconds; the run continues meanwhile")
        if self._mistake:
            self.close()
            raise UserError(f"{name}: {self._mistake}")

    def log(self, step: int, numbers: Mapping[str, float], rows: Sequence[JsonObject] = ()) -> None:
        """Queues the numbers of a step and a table of its rollouts; returns at once."""
        try:
            self._queue.put_nowait({"step": step, "numbers": dict(numbers), "rows": list(rows)})
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Waits, with a deadline, until the tracker has sent everything."""
        deadline = time.monotonic() + self._close_seconds
        try:
            # None ends the writer thread, which closes the pipe. The process then sends its
            # remaining data.
            self._queue.put(None, timeout=self._close_seconds)
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            _print(f"{self.name}: not everything was sent within {self._close_seconds:g} seconds")
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
            _print(f"{self.name}: {self._num_lost} messages were lost")

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
                _print(f"{self.name}: a step is missing: {message['reason']}")
            self._is_started.set()
        # The process may end without a message.
        self._is_started.set()

    def _fail(self, reason: str) -> None:
        """Prints, once, that the tracker has failed."""
        if not self._has_failed:
            self._has_failed = True
            _print(f"{self.name}: {reason}; the run continues without it")


def start_trackers(settings: TrainConfig, workdir: Path) -> list[Tracker]:
    """Starts the trackers of a run, or continues the tracker runs of an earlier process.

    Raises UserError if a tracker rejects its settings.
    """
    trackers = []
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    if project := settings.wandb_project:
        arguments: JsonObject = {
            "project": project,
            "id": _read_or_make_id(workdir / "wandb_id"),
            "resume": "allow",
            "name": os.environ.get("WANDB_NAME") or workdir.name,
            "dir": str(workdir),
            "config": config,
        }
        name = f"train.wandb_project={project}"
        try:
            trackers.append(Tracker("wandb", name, arguments))
        # W&B can also record a run without an account.
        except UserError as error:
            raise UserError(f"{error} Or set WANDB_MODE=offline") from None
    # The name identifies a Trackio run. Part of a random id keeps workdirs with one name apart.
    if project := settings.trackio_project:
        arguments = {
            "project": project,
            "name": f"{workdir.name}-{_read_or_make_id(workdir / 'trackio_id')[:4]}",
            "space_id": settings.trackio_space or None,
            "resume": "allow",
            "config": config,
            "embed": False,
            "last_step_file": str(workdir / "trackio_step"),
        }
        trackers.append(Tracker("trackio", f"train.trackio_project={project}", arguments))
    return trackers


def _read_or_make_id(path: Path) -> str:
    """Returns the tracker's id of this run, which a file in the workdir stores."""
    if not path.exists():
        write_atomic(path, os.urandom(8).hex())
    return path.read_text()


def _print(text: str) -> None:
    terminal.say(text)
