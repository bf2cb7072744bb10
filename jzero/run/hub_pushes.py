"""Pushes the models of a run to the Hugging Face hub in the background: `hub.push`.

    pushes = HubPushes(config.hub.push, workdir, resume_step)    # finishes interrupted pushes
    pushes.add(Push(step, branch, directory))               # returns at once
    while not pushes.wait(1.0): ...                         # after the last step
    pushes.close()                                          # stops running pushes

Two threads serve two queues. The first pushes, with one process per attempt (`run.push_process`),
which is killed at its deadline. The second runs the command `hub.push.on_push` for each pushed
checkpoint, also with a deadline. Neither thread ever raises into the run: a failure prints one line
and is counted in summary.json. `run.hub_ledger` records finished work.
"""

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import huggingface_hub

from jzero import http, terminal
from jzero.config import MOST_WAITING_PUSHES
from jzero.config import Push as PushSettings
from jzero.errors import UserError
from jzero.fields import part_name
from jzero.files import JsonObject
from jzero.run.hub_ledger import Ledger, Push

FOLDER = "hub"  # of the workdir, with the logs
# A command that submits a job ends in seconds, and one that evaluates a model within the hour.
COMMAND_MINUTES = 60.0
FIRST_PAUSE = 5.0  # seconds between the first two attempts, at most
POLL_SECONDS = 0.1
LONGEST_MESSAGE = 1 << 16  # bytes read from a process at once
LONGEST_REASON = 200  # characters of a reason that are printed


def check_token(settings: PushSettings | None) -> None:
    """Raises UserError if the run pushes to the hub and there is no hub token."""
    if settings is not None and not huggingface_hub.get_token():
        raise UserError(
            f"hub.push={part_name(type(settings))} needs a token of the hub: run `hf auth login`, "
            "or set HF_TOKEN"
        )


def branch_of_step(settings: PushSettings, step: int) -> str:
    """Returns the branch of a checkpoint, as opposed to the finished model."""
    return f"{settings.revision}-step-{step}"


def push_line(summary: JsonObject) -> str:
    """Returns the line about all pushes that is printed at the end of a run."""
    count = len(summary["pushed"])
    line = f"hub: pushed {count} {'model' if count == 1 else 'models'} to {summary['repo']}"
    if summary["failed"]:
        steps = ", ".join(summary["failed"])
        line += f"; step {steps} failed: the same command pushes again"
    if summary["waiting"]:
        steps = ", ".join(str(step) for step in summary["waiting"])
        line += f"; step {steps} still waits: the same command pushes again"
    if summary["dropped"]:
        line += f"; {summary['dropped']} given up"
    if summary["commands"]["failed"]:
        line += f"; {summary['commands']['failed']} commands failed: see the folder {FOLDER}"
    return line


class HubPushes:
    """Pushes exports to the hub in the background. Only a run's first process has an instance."""

    def __init__(
        self,
        settings: PushSettings,
        workdir: Path,
        resume_step: int | None = None,
        first_pause: float = FIRST_PAUSE,
        command_minutes: float = COMMAND_MINUTES,
    ) -> None:
        """Starts the threads, and queues the unfinished pushes of earlier processes of the run.

        `resume_step` is the checkpoint that the run resumes from. Later steps are repeated, and
        queue their pushes again.
        """
        self._settings = settings
        self._workdir = workdir
        self._first_pause = first_pause
        self._command_minutes = command_minutes
        self._ledger = Ledger(workdir)
        self._is_closing = threading.Event()
        self._changed = threading.Condition()
        # `_changed` guards the following attributes.
        self._waiting: list[Push] = []
        self._failed: dict[Push, str] = {}  # with the reason
        self._commands: list[Push] = []
        self._num_busy = 0  # threads that are working on a push or a command
        self._num_commands = {"ran": 0, "failed": 0}
        self._num_dropped = 0

        (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
        self._recover(-1 if resume_step is None else resume_step)
        self._threads = [
            threading.Thread(target=self._work, args=(self._waiting, self._push), daemon=True),
            threading.Thread(target=self._work, args=(self._commands, self._command), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, push: Push) -> None:
        """Queues a push and returns at once. A finished push is not repeated.

        Pushes that failed before are retried, too, in the order of their steps.
        """
        if self.is_done(push):
            return
        self._ledger.queue(push)
        with self._changed:
            queued = {*self._waiting, *self._failed, push}
            # Time has passed since they failed: the hub may be back.
            self._failed.clear()
            self._waiting[:] = sorted(queued, key=lambda item: item.step)
            # The oldest exports are dropped, so that waiting exports do not fill the disk.
            while len(self._waiting) > MOST_WAITING_PUSHES:
                self._drop(self._waiting.pop(0))
            self._changed.notify_all()

    def is_done(self, push: Push) -> bool:
        """Returns whether the hub has the files of a push."""
        return self._ledger.has(push, "pushed")

    def wait(self, seconds: float) -> bool:
        """Waits until every push has succeeded or failed; returns whether this is the case."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, seconds)

    def close(self) -> None:
        """Stops the running pushes and commands."""
        with self._changed:
            self._is_closing.set()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def summary(self) -> JsonObject:
        """Returns the results of the pushes, for summary.json."""
        with self._changed:
            failed = {str(push.step): reason for push, reason in self._failed.items()}
            unfinished = self._ledger.unfinished()
            waiting = [push.step for push in unfinished if push not in self._failed]
            return {
                "repo": self._settings.repo,
                "pushed": self._ledger.pushed_steps(),
                "failed": failed,
                "waiting": waiting,
                "dropped": self._num_dropped,
                "commands": dict(self._num_commands),
            }

    # -- The queues --------------------------------------------------------------------------------

    def _recover(self, last_step: int) -> None:
        """Queues the interrupted work of the steps up to `last_step`."""
        for push in self._ledger.unfinished():
            if push.step <= last_step and push.directory.is_dir():
                self._waiting.append(push)
        if self._waiting:
            steps = ", ".join(str(push.step) for push in self._waiting)
            terminal.say(f"hub: pushes step {steps}, which an earlier process did not finish")
        if not self._settings.on_push:
            return
        self._commands += self._ledger.without_command()
        # An interrupted command is reported, and is not run again.
        for push in self._ledger.interrupted_commands():
            self._ledger.note(push, "ended", status=None)
            terminal.say(
                f"hub: the command of step {push.step} was interrupted, and is not run again"
            )

    def _is_idle(self) -> bool:
        return not (self._waiting or self._commands or self._num_busy)

    def _work(self, queue: list[Push], act: Callable[[Push], None]) -> None:
        """Runs `act` on the items of a queue until the end of the run: the body of a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._is_closing.is_set())
                if self._is_closing.is_set():
                    return
                push = queue.pop(0)
                self._num_busy += 1
            try:
                act(push)
            except Exception as error:  # the run continues, and so does the queue
                reason = f"{type(error).__name__}: {error}"
                terminal.say(f"hub: step {push.step}: {reason[:LONGEST_REASON]}")
                if not self.is_done(push):
                    self._fail(push, reason)
            finally:
                with self._changed:
                    self._num_busy -= 1
                    self._changed.notify_all()

    def _drop(self, push: Push) -> None:
        """Gives up a push, and deletes its temporary export."""
        self._num_dropped += 1
        self._ledger.note(push, "dropped")
        terminal.say(
            f"hub: step {push.step} is not pushed, because more than {MOST_WAITING_PUSHES} "
            "exports wait"
        )
        _remove(push)

    def _fail(self, push: Push, reason: str) -> None:
        with self._changed:
            self._failed[push] = reason[:LONGEST_REASON]

    # -- Pushes ------------------------------------------------------------------------------------

    def _push(self, push: Push) -> None:
        """Makes the attempts of one push."""
        if self.is_done(push):
            return
        attempts = self._settings.retries + 1
        for attempt in range(1, attempts + 1):
            result = self._attempt(push)
            # The end of the run is not a failure: the push stays queued for the next process of the
            # run.
            if self._is_closing.is_set() and result["event"] != "pushed":
                with self._changed:
                    self._waiting.insert(0, push)
                return
            if result["event"] == "pushed":
                self._ledger.note(push, "pushed", address=result["address"])
                terminal.say(
                    f"hub: pushed step {push.step} to {self._settings.repo}, {push.branch}"
                )
                if self._settings.on_push:
                    with self._changed:
                        self._commands.append(push)
                _remove(push)
                return
            reason = " ".join(str(result["reason"]).split())[:LONGEST_REASON]
            terminal.say(
                f"hub: step {push.step} is not pushed (attempt {attempt} of {attempts}): {reason}"
            )
            self._fail(push, reason)
            # The hub has rejected the push, so another attempt would be rejected, too.
            if result["is_refusal"]:
                return
            if attempt < attempts:
                self._is_closing.wait(http.pause_after(attempt - 1, self._first_pause))
                with self._changed:
                    # The push does not count as failed while it is retried.
                    self._failed.pop(push, None)

    def _attempt(self, push: Push) -> JsonObject:
        """Pushes once, in a process; returns the process's last message, or an equivalent one."""
        request = {
            "directory": str(push.directory.absolute()),
            "name": self._settings.repo,
            "branch": push.branch,
            "is_private": self._settings.private,
            "replace": self._settings.overwrite or self._ledger.is_own_branch(push.branch),
        }
        failure = {"event": "failed", "is_refusal": False}
        deadline = time.monotonic() + 60 * self._settings.minutes
        # A process, because a thread that hangs in an upload cannot be stopped.
        command = [sys.executable, "-m", "jzero.run.push_process"]
        with self._log(push, "push") as log, _process(command, log) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, json.dumps(request) + "\n")
                for message in self._messages(process.stdout, deadline):
                    if message["event"] == "claim":
                        # The ledger is written first: after a kill, the resumed run knows that the
                        # branch is its own.
                        self._ledger.note(push, "claimed")
                        _write(process.stdin, "go\n")
                        continue
                    return message
            except OSError as error:
                return failure | {"reason": f"the process of the push ended: {error}"}
            if self._is_closing.is_set():
                return failure | {"reason": "the run has ended"}
            if time.monotonic() >= deadline:
                minutes = self._settings.minutes
                return failure | {"reason": f"no answer within hub.push.minutes={minutes:g}"}
            return failure | {"reason": f"the process of the push ended: see {log.name}"}

    def _messages(self, pipe: IO[bytes], deadline: float) -> Iterator[JsonObject]:
        """Yields the messages of a process until its end, the deadline, or the end of the run."""
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while time.monotonic() < deadline and not self._is_closing.is_set():
                if not selector.select(POLL_SECONDS):
                    continue
                data = os.read(pipe.fileno(), LONGEST_MESSAGE)
                # The pipe has closed, or a line never ends.
                if not data or len(text) > LONGEST_MESSAGE:
                    return
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    # -- Commands ----------------------------------------------------------------------------------

    def _command(self, push: Push) -> None:
        """Runs the command of one pushed checkpoint, without a shell."""
        values = {
            "repo": self._settings.repo,
            "revision": push.branch,
            "step": str(push.step),
        }
        command = [part.format(**values) for part in shlex.split(self._settings.on_push)]
        self._ledger.note(push, "started")
        with self._log(push, "on_push") as log:
            try:
                status = self._run_command(command, log)
                problem = "" if status == 0 else f"ended with status {status}"
                if status is None:
                    problem = f"took more than {self._command_minutes:g} minutes"
            except OSError as error:
                status = None
                problem = f"did not start: {error.strerror}"
        # Without the event "ended", the next process of the run reports the command as interrupted.
        if self._is_closing.is_set() and status is None:
            return
        self._ledger.note(push, "ended", status=status)
        with self._changed:
            self._num_commands["failed" if problem else "ran"] += 1
        if problem:
            terminal.say(f"hub: the command of step {push.step} {problem}: see {log.name}")

    def _run_command(self, command: list[str], log: IO[bytes]) -> int | None:
        """Returns the exit status of a command; None if it was stopped at its deadline."""
        deadline = time.monotonic() + 60 * self._command_minutes
        with _process(command, log, has_pipes=False) as process:
            while time.monotonic() < deadline and not self._is_closing.is_set():
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        return None

    def _log(self, push: Push, name: str) -> IO[bytes]:
        return (self._workdir / FOLDER / f"{name}-{push.step}.log").open("ab")


@contextlib.contextmanager
def _process(
    command: list[str],
    log: IO[bytes],
    has_pipes: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process in its own process group, which is killed at the end of the block."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
        stdout=subprocess.PIPE if has_pipes else log,
        stderr=log,
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        start_new_session=True,  # Ctrl-C must reach only the run, which decides about its pushes
    )
    with process:
        try:
            yield process
        finally:
            # The signal also reaches the children of the process.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _write(pipe: IO[bytes], text: str) -> None:
    pipe.write(text.encode())
    pipe.flush()


def _remove(push: Push) -> None:
    """Removes an export that exists only for its push."""
    if push.is_temporary:
        shutil.rmtree(push.directory, ignore_errors=True)
