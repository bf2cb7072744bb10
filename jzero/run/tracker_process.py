"""Runs one experiment tracker as a process: `python -m jzero.run.tracker_process`.

`run.trackers` starts this process, so that a tracker with a hanging server cannot delay the run.
Messages are lines of JSON:

    stdin   {"tracker": a name of TRACKERS or "module:Class", "arguments", "run"}
    stdout  {"event": "ready", "url"}, or {"event": "failed", "reason", "is_mistake"} and the end
    stdin   {"step", "metrics": {name: number}, "tables": {name: [row, ...]}}, any number of times
    stdout  {"event": "error", "reason"} whenever a step cannot be logged
    stdin   {"summary": content of summary.json}

At the end of its standard input, the process sends its remaining data and ends. The run allows
CLOSE_SECONDS for that. A process with a killed run limits itself to the same time.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from jzero.config import flatten
from jzero.errors import reason_of
from jzero.files import JsonObject, write_atomic
from jzero.run.tensorboard import TensorBoard

CLOSE_SECONDS = 60.0
TABLE = "completions"  # name of the table of rollouts
MLFLOW_PARAMS = 100  # parameters of one request to MLflow
LONGEST_PARAM = 500  # characters of a parameter that every version of MLflow takes

Metrics = Mapping[str, float]
Tables = Mapping[str, Sequence[JsonObject]]  # name -> rows


class RunTracker(Protocol):
    """A run at an experiment tracker.

    A tracker is made by `Class(run, **arguments)`. `run` is a dict of JSON values:

        name        the name of the workdir
        id          the same for all processes of a run, also after it was resumed
        workdir     the path of the workdir
        first_step  the first step that this process logs; it repeats later steps of an earlier one
        config      the settings of the run, nested as in config.json
        commit      the git commit of the directory in which the run was started, or ""

    A tracker may have an attribute `url`, which the run prints.
    """

    def log(self, step: int, metrics: Metrics, tables: Tables) -> None:
        """Logs the metrics of a step, and tables of it.

        `tables` has at most the table "completions": the rows of samples.jsonl, where the parts of
        a reward are under "rewards".
        """

    def finish(self, summary: JsonObject) -> None:
        """Ends the run. `summary` is the content of summary.json, empty if there is none."""


class LoggedSteps:
    """Keeps the last logged step in a file, for a tracker that keeps every value of a step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = int(path.read_text()) if path.exists() else -1

    def has(self, step: int) -> bool:
        """Returns whether an earlier process has logged a step, which a resumed run repeats."""
        return step <= self._last

    def add(self, step: int) -> None:
        self._last = step
        write_atomic(self._path, str(step))


class WandbTracker:
    """A run of Weights & Biases. If a step is logged twice, W&B keeps the first values."""

    def __init__(self, run: JsonObject, project: str) -> None:
        import wandb  # an extra

        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            id=run["id"],
            # A new run begins under this id, and a resumed one continues.
            resume="allow",
            # An argument takes precedence over W&B's variable, so the variable is read here.
            name=os.environ.get("WANDB_NAME") or run["name"],
            dir=run["workdir"],
            config=run["config"] | {"commit": run["commit"]},
        )
        self.url = getattr(self._run, "url", None) or ""

    def log(self, step: int, metrics: Metrics, tables: Tables) -> None:
        values: dict[str, object] = dict(metrics)
        for name, rows in tables.items():
            columns, cells = columns_and_data(step, rows)
            values[name] = self._wandb.Table(columns=[*columns], data=[*cells])
        self._run.log(values, step=step)

    def finish(self, summary: JsonObject) -> None:
        self._run.summary.update(results_of(summary))
        self._run.finish()


class TrackioTracker:
    """A run of Trackio, which keeps every value of a step."""

    def __init__(self, run: JsonObject, project: str, space: str) -> None:
        import pandas
        import trackio  # an extra

        self._pandas = pandas
        self._trackio = trackio
        self._steps = LoggedSteps(Path(run["workdir"], "trackio_step"))
        trackio.init(
            project=project,
            # The name identifies a run. Part of the id keeps workdirs with one name apart.
            name=f"{run['name']}-{run['id'][:4]}",
            space_id=space or None,
            resume="allow",
            config=run["config"] | {"commit": run["commit"]},
            embed=False,
        )

    def log(self, step: int, metrics: Metrics, tables: Tables) -> None:
        if self._steps.has(step):
            return
        values: dict[str, object] = dict(metrics)
        for name, rows in tables.items():
            columns, cells = columns_and_data(step, rows)
            frame = self._pandas.DataFrame(cells, columns=columns)
            values[name] = self._trackio.Table(dataframe=frame)
        # Before the step is noted: after a kill, a step twice is better than a missing one.
        self._trackio.log(values, step=step)
        self._steps.add(step)

    def finish(self, summary: JsonObject) -> None:
        self._trackio.finish()


class TensorBoardTracker:
    """Event files with the metrics, and with tables, config, commit and summary as texts."""

    def __init__(self, run: JsonObject, directory: str) -> None:
        path = Path(directory or Path(run["workdir"], "tensorboard"))
        # Several runs may share a directory, as TensorBoard expects.
        if directory:
            path = path / f"{run['name']}-{run['id'][:4]}"
        self._board = TensorBoard(path, run["first_step"])
        self._last_step = run["first_step"]
        config = as_code(run["config"])
        self._board.write_text(self._last_step, "config", f"commit {run['commit']}\n\n{config}")

    def log(self, step: int, metrics: Metrics, tables: Tables) -> None:
        self._board.write(step, metrics)
        for name, rows in tables.items():
            self._board.write_text(step, name, markdown_table(*columns_and_data(step, rows)))
        self._last_step = step

    def finish(self, summary: JsonObject) -> None:
        self._board.write_text(self._last_step, "summary", as_code(results_of(summary)))
        self._board.close()


class MlflowTracker:
    """A run of MLflow, which keeps every value of a step."""

    def __init__(self, run: JsonObject, project: str, uri: str) -> None:
        import mlflow  # an extra

        self._mlflow = mlflow
        workdir = Path(run["workdir"])
        self._steps = LoggedSteps(workdir / "mlflow_step")
        if uri:
            mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(project)
        run_file = workdir / "mlflow_run"
        # MLflow chooses the id of a run, so a resumed run reads it from the workdir.
        if run_file.exists():
            mlflow.start_run(run_id=run_file.read_text())
            return
        started = mlflow.start_run(run_name=run["name"])
        write_atomic(run_file, started.info.run_id)
        mlflow.set_tag("commit", run["commit"])
        mlflow.log_dict(run["config"], "config.json")
        settings = list(flatten(run["config"]).items())
        for start in range(0, len(settings), MLFLOW_PARAMS):
            chunk = settings[start : start + MLFLOW_PARAMS]
            mlflow.log_params({name: str(value)[:LONGEST_PARAM] for name, value in chunk})

    def log(self, step: int, metrics: Metrics, tables: Tables) -> None:
        if self._steps.has(step):
            return
        # MLflow refuses a name such as pass@4.
        values = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        self._mlflow.log_metrics(values, step=step)
        for name, rows in tables.items():
            columns, cells = columns_and_data(step, rows)
            table = {"columns": columns, "data": cells}
            self._mlflow.log_dict(table, f"{name}/step_{step}.json")
        self._steps.add(step)

    def finish(self, summary: JsonObject) -> None:
        self._mlflow.log_dict(summary, "summary.json")
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[..., RunTracker]] = {
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
}
# Error types by which a tracker rejects its settings, such as a missing key.
MISTAKES = {"UsageError", "AuthenticationError", "ValueError"}


def results_of(summary: JsonObject) -> JsonObject:
    """Returns the results of a run as flat values: all of the summary except the settings."""
    results = {name: value for name, value in summary.items() if name not in ("config", "versions")}
    return flatten(results)


def columns_and_data(
    step: int,
    rows: Sequence[JsonObject],
) -> tuple[list[str], list[list[str | float | None]]]:
    """Returns the columns of a table of rollouts, and its cells as texts and numbers.

    Each part of a reward has a column of its own, such as "reward/format".
    """
    flat_rows = []
    for row in rows:
        flat = {name: value for name, value in row.items() if name != "rewards"}
        parts = row.get("rewards") or {}
        flat_rows.append(flat | {f"reward/{name}": value for name, value in parts.items()})
    # Rows may have different columns, as those of a task with several turns.
    columns = list(dict.fromkeys(name for row in flat_rows for name in row))
    cells = [[step, *(to_cell(row.get(name)) for name in columns)] for row in flat_rows]
    return ["step", *columns], cells


def to_cell(value: object) -> str | float | None:
    """Returns a value as a cell of a table. Messages and lists become JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)


def markdown_table(columns: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown. A line break in a cell becomes a space."""
    lines = [[*columns], ["---"] * len(columns)]
    for row in cells:
        lines.append(["" if cell is None else " ".join(str(cell).split()) for cell in row])
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def as_code(values: JsonObject) -> str:
    """Returns JSON values as an indented block of code in Markdown."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    return "\n".join(f"    {line}" for line in text.splitlines())


def make_tracker(name: str, arguments: JsonObject, run: JsonObject) -> RunTracker:
    """Returns a tracker of TRACKERS, or an instance of a user-defined class."""
    if name in TRACKERS:
        return TRACKERS[name](run, **arguments)
    from jzero.rewards.user_functions import find_function

    make = cast(Callable[..., RunTracker], find_function(name))
    return make(run, **arguments)


def main() -> None:
    # Output of the libraries goes to stderr, so that it does not mix with the messages.
    sys.stdout = sys.stderr
    request = json.loads(sys.stdin.readline())
    name = request["tracker"]
    try:
        tracker = make_tracker(name, request["arguments"], request["run"])
    except Exception as error:  # a library, the network, or user-defined code
        # Whatever a user-defined class raises at the start, its author wants to know.
        is_mistake = type(error).__name__ in MISTAKES or name not in TRACKERS
        reason = reason_of(error)
        if name not in TRACKERS:
            reason = f"{type(error).__name__}: {reason}"
        _send({"event": "failed", "reason": reason, "is_mistake": is_mistake})
        os._exit(1)  # does not wait for threads of the library
    _send({"event": "ready", "url": str(getattr(tracker, "url", ""))})
    summary: dict[str, Any] = {}
    for line in sys.stdin:
        message = json.loads(line)
        if "summary" in message:
            summary = message["summary"]
            continue
        try:
            tracker.log(message["step"], message["metrics"], message["tables"])
        except Exception as error:
            _send({"event": "error", "reason": reason_of(error)})
    # `finish` may hang. The timer also ends a process that no run is waiting for.
    threading.Timer(CLOSE_SECONDS, os._exit, [1]).start()
    try:
        tracker.finish(summary)
    except Exception as error:
        _send({"event": "error", "reason": f"the end of the run: {reason_of(error)}"})
    # Without waiting for threads of the library, as above.
    os._exit(0)


def _send(message: JsonObject) -> None:
    with contextlib.suppress(OSError):  # the run was killed
        print(json.dumps(message), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
