"""Which pushes of a run to the hub are done: the file hub.jsonl of its workdir.

Each line is {"step", "branch", "event", ...}. The events of a step, in their order:

    queued   its export is complete, in "directory"; with "is_temporary" it is only for the push
    claimed  the branch was free, and is now this run's own
    pushed   the hub has the files, at "address"
    started  the command hub.push.on_push was started
    ended    that command has ended, with "status" (null: it was stopped)
    dropped  the push was given up, because too many were waiting

A line is written before the act that it announces, and survives a kill. A run that resumes finds
the pushes that are queued and not pushed, and makes up for them.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from jzero.files import JsonObject, naming_full_disk, read_jsonl, write_atomic

FILE = "hub.jsonl"


@dataclass(frozen=True)
class Push:
    """An export that goes to a branch on the hub."""

    step: int
    branch: str
    directory: Path
    is_temporary: bool = False  # the export is deleted once the hub has it


class Ledger:
    """The events of all pushes of a workdir."""

    def __init__(self, workdir: Path) -> None:
        self._path = workdir / FILE
        self._workdir = workdir
        self._lock = threading.Lock()
        self._events = read_jsonl(self._path)
        _write(self._path, self._events)  # drops a line that a kill truncated

    def note(self, push: Push, event: str, **values: object) -> None:
        """Appends an event of a push."""
        row: JsonObject = {"step": push.step, "branch": push.branch, "event": event, **values}
        line = json.dumps(row) + "\n"
        with self._lock:
            self._events.append(row)
            with naming_full_disk(self._path, len(line)), self._path.open("a") as file:
                file.write(line)
                # A flushed line survives a kill of this process.
                file.flush()

    def queue(self, push: Push) -> None:
        """Records that the export of a push is complete. The directory is stored by name."""
        self.note(push, "queued", directory=push.directory.name, is_temporary=push.is_temporary)

    def has(self, push: Push, event: str) -> bool:
        """Returns whether a push has an event of this kind."""
        return any(row["event"] == event for row in self._push_rows(push))

    def is_own_branch(self, branch: str) -> bool:
        """Returns whether this run has created the branch."""
        return any(row["event"] == "claimed" and row["branch"] == branch for row in self._events)

    def pushed_steps(self) -> list[int]:
        """Returns the steps that are on the hub, in order."""
        return sorted({row["step"] for row in self._events if row["event"] == "pushed"})

    def unfinished(self) -> list[Push]:
        """Returns the queued pushes that are neither pushed nor dropped, in order of steps."""
        pushes = [push for push in self._queued() if not self.has(push, "pushed")]
        return [push for push in pushes if not self.has(push, "dropped")]

    def without_command(self) -> list[Push]:
        """Returns the finished pushes that still need their command to be started."""
        pushes = [push for push in self._queued() if self.has(push, "pushed")]
        return [push for push in pushes if not self.has(push, "started")]

    def interrupted_commands(self) -> list[Push]:
        """Returns the pushes with a command that started but did not report its end."""
        pushes = [push for push in self._queued() if self.has(push, "started")]
        return [push for push in pushes if not self.has(push, "ended")]

    def _queued(self) -> list[Push]:
        pushes = {}
        for row in self._events:
            if row["event"] == "queued":
                directory = self._workdir / row["directory"]
                push = Push(row["step"], row["branch"], directory, row["is_temporary"])
                # A step that was repeated after a kill is queued twice; the later line counts.
                pushes[push.step, push.branch] = push
        return sorted(pushes.values(), key=lambda push: push.step)

    def _push_rows(self, push: Push) -> list[JsonObject]:
        key = (push.step, push.branch)
        return [row for row in self._events if (row["step"], row["branch"]) == key]


def forget_later_steps(workdir: Path, step: int) -> None:
    """Removes the pushes of steps after `step`, which the run abandons (train.resume_from).

    The run still owns the branches, so that new weights of the same step may replace the old ones.
    """
    path = workdir / FILE
    events = read_jsonl(path)
    if events:
        kept = [row for row in events if row["step"] <= step or row["event"] == "claimed"]
        _write(path, kept)


def _write(path: Path, events: list[JsonObject]) -> None:
    if events or path.exists():
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in events))
