"""The metrics of a run by column, and curves of a bounded number of points."""

import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from jzero import json_values
from jzero.files import JsonObject
from jzero.run.doctor import Doctor
from jzero.types import JsonValue
from jzero.watching.lines import LineFile

MAX_POINTS = 500  # per curve
MAX_METRICS = 1000  # names; a file with more is not of a run
MAX_NAME = 200  # characters of the name of a metric
MAX_STEP = 2**53 - 1  # the largest integer of a page
# Sums and squares of metrics are finite. A metric is a float32, so a larger number is damage.
MAX_METRIC = 1e100
TOKEN_METRICS = ("rollout/tokens", "sft/tokens")  # how many tokens a step has

# A point of a curve: first step, last step, mean, minimum and maximum over these steps.
Point = list[float]


class MetricTable:
    """The rows of a metrics.jsonl that may still grow, and the doctor's remarks about them."""

    def __init__(self, path: Path, settings: dict[str, JsonValue]) -> None:
        self._file = LineFile(path)
        self._settings = settings
        self._generation = -1
        self._clear()

    def _clear(self) -> None:
        self._num_read = 0  # lines
        self.num_skipped = 0  # lines that are damaged, or have no step
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.doctor = Doctor(self._settings)

    @property
    def version(self) -> str:
        """A text that changes with the content."""
        return f"{self._file.generation}.{self._num_read}"

    def poll(self, samples: Callable[[int], Sequence[JsonObject]]) -> None:
        """Reads the rows that were appended. `samples` returns the logged rollouts of a step."""
        self._file.poll()
        if self._generation != self._file.generation:
            self._generation = self._file.generation
            self._clear()
        while self._num_read < len(self._file):
            # A few lines at a time: a line may be as long as LineFile allows.
            for line in self._file.read(self._num_read, self._num_read + 16):
                self._num_read += 1
                self._add(line, samples)

    def _add(self, line: bytes, samples: Callable[[int], Sequence[JsonObject]]) -> None:
        row = parse_row(line)
        step = row.get("step")
        if not _is_step(step):
            self.num_skipped += 1
            return
        # A step that a resumed run writes again keeps its first row: curves need increasing steps.
        if self.steps and step <= self.steps[-1]:
            return
        numbers = read_metrics(row)
        self.steps.append(step)
        for name, number in numbers.items():
            if name not in self.columns and len(self.columns) >= MAX_METRICS:
                continue
            column = self.columns.setdefault(name, array("d"))
            # Steps without the metric are NaN.
            column.extend([math.nan] * (len(self.steps) - 1 - len(column)))
            column.append(number)
        self.doctor.check(step, numbers, lambda: samples(step))

    def curves(self) -> dict[str, list[Point]]:
        """Returns each metric over the steps, in at most MAX_POINTS points."""
        steps = np.array(self.steps, np.int64)
        curves = {}
        for name, column in self.columns.items():
            values = np.full(len(steps), np.nan)
            values[: len(column)] = column
            if name.startswith("time/"):
                # A step without a phase spent 0 seconds in it.
                values = np.nan_to_num(values)
            curves[name] = make_curve(steps, values)
        return curves

    def axes(self) -> list[list[float]]:
        """Returns [step, tokens, hours] since the start of the run, at up to MAX_POINTS steps."""
        steps = np.array(self.steps, np.int64)
        tokens, hours = np.zeros(len(steps)), np.zeros(len(steps))
        for name in TOKEN_METRICS:
            column = self.columns.get(name, array("d"))
            tokens[: len(column)] += np.nan_to_num(np.array(column))
        column = self.columns.get("time/step", array("d"))
        hours[: len(column)] = np.nan_to_num(np.array(column)) / 3600
        # Time and tokens are summed over all steps before points are chosen, so no point misses
        # any.
        rows = np.stack([steps, np.cumsum(tokens), np.cumsum(hours)], axis=1)
        chosen = np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int)
        # Seven digits are more than a curve can show, and keep the reply short.
        return [[float(f"{number:.7g}") for number in row] for row in rows[chosen]]


def _is_step(value: JsonValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP


def read_metrics(row: object) -> dict[str, float]:
    """Returns the metrics of a row by name, without the step and entries of other types.

    A file of another version may have texts and lists among the metrics.
    """
    metrics = {}
    for name, value in row.items() if isinstance(row, dict) else ():
        is_number = json_values.is_finite_number(value) and abs(value) <= MAX_METRIC
        if is_number and name != "step" and len(name) <= MAX_NAME:
            metrics[name] = float(value)
    return metrics


def parse_row(line: bytes) -> JsonObject:
    """Returns the JSON object of a line; {} if the line is damaged."""
    try:
        row = json_values.parse(line.decode(errors="replace"), allows_nan=True)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def make_curve(steps: np.ndarray, values: np.ndarray) -> list[Point]:
    """Returns the points of values [N] at steps [N], in ascending order, without those of NaN."""
    has_value = ~np.isnan(values)
    steps, values = steps[has_value], values[has_value]
    points: list[Point] = []
    # Each point covers an equal share of the steps.
    for part in np.array_split(np.arange(len(steps)), max(1, min(len(steps), MAX_POINTS))):
        if not len(part):
            continue
        covered = values[part]
        # Minimum and maximum keep a spike of one step visible in a long run.
        numbers = (covered.mean(), covered.min(), covered.max())
        rounded = [float(f"{number:.5g}") for number in numbers]
        points.append([int(steps[part[0]]), int(steps[part[-1]]), *rounded])
    return points
