"""What the page shows of a run, read from the files of its workdir."""

import functools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jzero import config
from jzero.errors import UserError, reason_of
from jzero.files import JsonObject, parse_json, read_bytes, read_text
from jzero.json_values import is_finite_number
from jzero.run.metrics import STEP_LINE, find_metric
from jzero.run.record import EVALUATIONS_FILE
from jzero.watching.metric_table import MetricTable, read_metrics
from jzero.watching.rollouts import RolloutIndex, shorten

POLL_SECONDS = 1.0  # between two looks at the files
INDEX_SECONDS = 0.2  # of indexing rollouts between two other tasks
MAX_JSON_BYTES = 16 * 2**20  # of config.json and of the other files that are read whole
MAX_RUNS = 20


class WatchedRun:
    """The files of one workdir, as they were at the last `refresh`."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.settings = config.flatten(self._read_json("config.json"))
        self.metrics = MetricTable(workdir / "metrics.jsonl", self.settings)
        self.rollouts = RolloutIndex(workdir)
        # "grpo", for example; "" if it is unknown, None before `describe`.
        self.training: str | None = None
        self._lock = threading.Lock()  # of a refresh, and of reading its result
        self._state: JsonObject = {}
        self._version = ""

    def _read_json(self, name: str) -> JsonObject:
        """Returns a JSON object of the workdir; {} if it is not there, or not complete yet."""
        path = self.workdir / name
        try:
            return parse_json(read_bytes(path, MAX_JSON_BYTES), path)
        except (OSError, UserError):
            return {}

    def _read_summary(self) -> JsonObject:
        """Returns summary.json; of a run that is going on, with its evaluations so far."""
        evaluations = self._read_json(EVALUATIONS_FILE)
        return self._read_json("summary.json") | ({"eval_all": evaluations} if evaluations else {})

    def refresh(self) -> None:
        """Reads what has been written since the last time."""
        with self._lock:
            self._refresh()

    def follow(self, seconds: float) -> None:
        """Refreshes, and indexes rollouts for about `seconds`.

        A failure is shown on the page of the run, and does not end the thread that follows all
        runs.
        """
        try:
            with self._lock:
                self._refresh()
            self.rollouts.index_some(seconds)
        except Exception as error:
            with self._lock:
                fault = f"the files cannot be read ({reason_of(error)})"
                self._state = self._empty_state() | self._state
                self._state |= {"remarks": [_remark("not_read", fault)]}
                self._version = fault

    def _refresh(self) -> None:
        if not self.settings:
            # The workdir was still empty, or is being copied.
            settings = config.flatten(self._read_json("config.json"))
            if settings:
                self.settings = settings
                self.metrics = MetricTable(self.workdir / "metrics.jsonl", settings)
        self.rollouts.poll()
        self.metrics.poll(self.rollouts.rows_of_step)
        results = f"{self._stat('summary.json')}.{self._stat(EVALUATIONS_FILE)}"
        # The state is built again only if its inputs have changed: curves of a long run take a
        # while.
        version = f"{self.metrics.version}.{results}.{bool(self.settings)}.{self.training}"
        if version != self._version:
            self._state = self._make_state()
            self._version = version

    def _stat(self, name: str) -> int:
        try:
            return (self.workdir / name).stat().st_mtime_ns
        except OSError:
            return 0

    def describe(self) -> None:
        """Finds out the kind of training. Its imports take a second."""
        self.training = describe_training(self.workdir / "config.json")

    def _make_state(self) -> JsonObject:
        findings = [finding.to_json() for finding in self.metrics.doctor.findings]
        if self.metrics.num_skipped:
            count = (
                f"{self.metrics.num_skipped:,} lines of metrics.jsonl are damaged or have no step"
            )
            findings.append(_remark("skipped", f"{count}, and are not shown"))
        return self._empty_state() | {
            "config": shorten(self.settings),
            "versions": shorten(self._read_json("versions.json")),
            "summary": shorten(shown_summary(self._read_summary())),
            "curves": self.metrics.curves(),
            "axes": self.metrics.axes() if self.metrics.steps else [],
            "remarks": findings,
        }

    def _empty_state(self) -> JsonObject:
        """Returns the state of a run whose files have nothing to show."""
        return {
            "name": str(self.workdir),
            "config": {},
            "training": self.training,
            "versions": {},
            "summary": {},
            "curves": {},
            "axes": [],
            "remarks": [],
        }

    def state(self) -> tuple[str, JsonObject]:
        """Returns the version of the state, and the state, as of the last refresh."""
        return self._version, self._state

    def seconds_since_change(self) -> float | None:
        """Returns how long ago the run has written a step; None before the first."""
        changed = self._stat("metrics.jsonl")
        return max(0.0, time.time() - changed / 1e9) if changed else None


def _remark(name: str, sentence: str) -> JsonObject:
    """Returns a remark about the files of a run, in the form of a doctor's finding."""
    return {"step": 0, "name": name, "sentence": sentence, "advice": "Restore the files."}


def shown_summary(summary: JsonObject) -> JsonObject:
    """Returns the members of summary.json that the page shows, without those of a wrong type.

    The file may be of another version or of another program.
    """
    shown: JsonObject = {
        name: summary[name]
        for name in ("steps", "seconds", "peak_rss_bytes")
        if is_finite_number(summary.get(name))
    }
    if isinstance(seconds := summary.get("seconds_by_phase"), dict):
        shown["seconds_by_phase"] = read_metrics(seconds)
    if isinstance(stages := summary.get("eval_all"), dict):
        shown["eval_all"] = {stage: read_metrics(metrics) for stage, metrics in stages.items()}
    return shown


def describe_training(path: Path) -> str:
    """Returns the kind of training of a run's config.json, and its teachers."""
    from jzero.run import history  # not at the top: its imports take a second

    try:
        settings = config.from_json(read_text(path, MAX_JSON_BYTES), str(path))
        stage = history.stage_of(settings, 0)
    except (OSError, UserError):
        # Runs of other versions of jzero may have settings with other names.
        return ""
    if not stage.teachers:
        return stage.kind
    return f"{stage.kind}, teacher: {' and '.join(stage.teachers)}"


def find_runs(paths: Sequence[Path], *, is_started: bool) -> list[Path]:
    """Returns the workdirs in `paths`: runs, or folders of runs, the newest runs last.

    `is_started` asks for a metrics.jsonl; otherwise a config.json is enough. Raises UserError for a
    path without a run.
    """
    marks = ["metrics.jsonl"] if is_started else ["metrics.jsonl", "config.json"]
    workdirs: list[Path] = []
    for path in paths:
        if any((path / mark).exists() for mark in marks):
            workdirs.append(path)
            continue
        inside = [file.parent for file in path.glob("*/metrics.jsonl")]
        inside.sort(key=lambda workdir: (workdir / "metrics.jsonl").stat().st_mtime)
        if not inside:
            raise UserError(f"{path} has no metrics.jsonl: give the --workdir of a run")
        workdirs += inside
    if len(workdirs) > MAX_RUNS:
        raise UserError(f"{len(workdirs)} runs are too many for one page: give up to {MAX_RUNS}")
    # A run may be given by itself and by its folder.
    return list(dict.fromkeys(workdirs))


def metric_units(names: Iterable[str]) -> dict[str, str]:
    """Returns the unit of each metric; "" for a metric of another version of jzero."""
    units = {}
    for name in sorted(set(names)):
        metric = find_metric(name)
        units[name] = metric.unit if metric else ""
    return units


def metric_names(run: JsonObject) -> set[str]:
    """Returns the metrics of a run's steps and of its evaluations before the first step."""
    evaluations = run["summary"].get("eval_all", {})
    return set(run["curves"]).union(*evaluations.values())


def page_state(runs: Sequence[JsonObject]) -> JsonObject:
    """Returns the part of the page that changes with the metrics of its runs."""
    return {
        "runs": list(runs),
        "main": list(STEP_LINE),
        "units": metric_units(name for run in runs for name in metric_names(run)),
        "defaults": default_settings(),
    }


@functools.cache
def default_settings() -> JsonObject:
    return config.flatten(json.loads(config.to_json(config.Config())))


class Watcher:
    """Follows runs in a thread until `stop`."""

    def __init__(self, workdirs: Sequence[Path]) -> None:
        self.runs = [WatchedRun(workdir) for workdir in workdirs]
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        for run in self.runs:
            run.follow(0.0)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_stopped.is_set():
            started = time.monotonic()
            for run in self.runs:
                run.follow(INDEX_SECONDS)
            is_done = all(run.rollouts.is_done for run in self.runs)
            spent = time.monotonic() - started
            if is_done:
                # After the index is complete, so that the page shows rollouts before it waits for
                # these imports.
                self._describe_runs()
                # A large run is looked at less often.
                self._is_stopped.wait(max(POLL_SECONDS, 4 * spent))

    def _describe_runs(self) -> None:
        for run in self.runs:
            if run.training is None and run.settings:
                run.describe()

    def state(self, known_version: str) -> JsonObject:
        """Returns the state of all runs, without the runs if their version is the known one."""
        versions_and_runs = [run.state() for run in self.runs]
        version = "|".join(version for version, _ in versions_and_runs)
        ages = [run.seconds_since_change() for run in self.runs]
        status: JsonObject = {"version": version, "seconds_since_change": ages}
        if version == known_version:
            return status
        return status | page_state([state for _, state in versions_and_runs])
