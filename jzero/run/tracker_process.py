"""Runs one experiment tracker as a process: `python -m jzero.run.tracker_process`.

`run.trackers` starts this process, so that a tracker with a hanging server cannot delay the run.
Messages are lines of JSON:

    stdin   {"kind": "wandb" or "trackio", "arguments": for the tracker's `init`}
    stdout  {"event": "ready"}, or {"event": "failed", "reason", "is_mistake"} and the end
    stdin   {"step", "numbers": {name: number}, "rows": [row, ...]}, any number of times
    stdout  {"event": "error", "reason"} whenever a step cannot be logged

At the end of its standard input, the process sends its remaining data and ends. The run allows
CLOSE_SECONDS for that. A process with a killed run limits itself to the same time.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jzero.errors import reason_of
from jzero.files import JsonObject, write_atomic

CLOSE_SECONDS = 60.0
TABLE = "completions"  # name of the table of rollouts


class TrackedRun(Protocol):
    """A run at a tracker."""

    def log(self, step: int, numbers: Mapping[str, float], rows: Sequence[JsonObject]) -> None: ...

    def finish(self) -> None: ...


class WandbRun:
    """A run of Weights & Biases. If a step is logged twice, W&B keeps the first values."""

    def __init__(self, arguments: JsonObject) -> None:
        import wandb  # an extra

        self._wandb = wandb
        self._run = wandb.init(**arguments)

    def log(self, step: int, numbers: Mapping[str, float], rows: Sequence[JsonObject]) -> None:
        values: dict[str, object] = dict(numbers)
        if rows:
            columns, cells = columns_and_data(step, rows)
            values[TABLE] = self._wandb.Table(columns=[*columns], data=cells)
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


class TrackioRun:
    """A run of Trackio. Trackio keeps every value of a step, so a file stores the last step."""

    def __init__(self, arguments: JsonObject) -> None:
        import pandas
        import trackio  # an extra

        self._pandas = pandas
        self._trackio = trackio
        self._last_step_file = Path(arguments.pop("last_step_file"))
        self._last_step = -1
        if self._last_step_file.exists():
            self._last_step = int(self._last_step_file.read_text())
        trackio.init(**arguments)

    def log(self, step: int, numbers: Mapping[str, float], rows: Sequence[JsonObject]) -> None:
        # A resumed run repeats steps that Trackio already has.
        if step <= self._last_step:
            return
        values: dict[str, object] = dict(numbers)
        if rows:
            columns, cells = columns_and_data(step, rows)
            frame = self._pandas.DataFrame(cells, columns=columns)
            values[TABLE] = self._trackio.Table(dataframe=frame)
        self._trackio.log(values, step=step)
        self._last_step = step
        write_atomic(self._last_step_file, str(step))

    def finish(self) -> None:
        self._trackio.finish()


KINDS = {"wandb": WandbRun, "trackio": TrackioRun}
# Error types by which a tracker rejects its settings, such as a missing key.
MISTAKES = {"UsageError", "AuthenticationError", "ValueError"}


def columns_and_data(step: int, rows: Sequence[JsonObject]) -> tuple[list[str], Any]:
    """Returns the columns of a table of rollouts, and its cells as lists of text and numbers."""
    columns = ["step", *rows[0]]
    cells = []
    for row in rows:
        cells.append([step, *(to_cell(row.get(name)) for name in columns[1:])])
    return columns, cells


def to_cell(value: object) -> str | float | None:
    """Returns a value as a cell of a table. Messages and lists become JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    # Output of the libraries goes to stderr, so that it does not mix with the messages.
    sys.stdout = sys.stderr
    request = json.loads(sys.stdin.readline())
    try:
        run: TrackedRun = KINDS[request["kind"]](request["arguments"])
    except Exception as error:  # a library, and the network
        is_mistake = type(error).__name__ in MISTAKES
        _send({"event": "failed", "reason": reason_of(error), "is_mistake": is_mistake})
        os._exit(1)  # does not wait for threads of the library
    _send({"event": "ready"})
    for line in sys.stdin:
        message = json.loads(line)
        try:
            run.log(message["step"], message["numbers"], message["rows"])
        except Exception as error:
            _send({"event": "error", "reason": reason_of(error)})
    # `finish` may hang. The timer also ends a process that no run is waiting for.
    threading.Timer(CLOSE_SECONDS, os._exit, [1]).start()
    run.finish()
    os._exit(0)


def _send(message: JsonObject) -> None:
    with contextlib.suppress(OSError):  # the run was killed
        print(json.dumps(message), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
