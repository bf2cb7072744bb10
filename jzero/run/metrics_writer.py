"""Writes the metrics and sampled rollouts of a run to files, and sends them to trackers."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from jzero import terminal
from jzero.config import TrainConfig
from jzero.errors import UserError
from jzero.files import (
    JsonObject,
    naming_full_disk,
    parse_json,
    read_jsonl,
    rotated,
    step_of,
    write_atomic,
)
from jzero.run.samples import TOKEN_COLUMNS
from jzero.run.tensorboard import TensorBoard
from jzero.run.trackers import Tracker, start_trackers, writes_tensorboard

# samples.jsonl becomes samples.1.jsonl, in place of an earlier one, once it is this large.
MAX_SAMPLES_BYTES = 256 * 2**20


class MetricsWriter:
    """Appends to `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a workdir.

    A written line survives a kill. `resume_step` is the checkpoint from which the run resumes:
    lines of later steps are dropped, so that a killed and resumed run leaves the same lines as an
    uninterrupted run. `resume_step=None` starts a run and drops all old lines.

    `workdir` is None in every process except the first. Such a writer writes nothing, but still
    raises on a value that is not finite, so that all processes stop together.
    """

    def __init__(
        self,
        workdir: Path | None,
        resume_step: int | None,
        settings: TrainConfig | None = None,
    ) -> None:
        """Opens the files, and starts the trackers that `settings` name.

        Raises UserError if a tracker rejects its settings, such as a missing key.
        """
        self._files_to_close = ExitStack()
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        self._tensorboard: TensorBoard | None = None
        self._trackers: list[Tracker] = []
        self._completions: Sequence[JsonObject] = ()  # for the next `write`
        self._summary: JsonObject = {}  # for the end of the trackers
        trackers = settings.trackers if settings is not None else ()
        if workdir is None:
            return

        workdir.mkdir(parents=True, exist_ok=True)
        # Lines of later steps are dropped: the resumed run writes these steps again.
        last_step = -1 if resume_step is None else resume_step
        keep_open = self._files_to_close.enter_context
        metrics, samples = workdir / "metrics.jsonl", workdir / "samples.jsonl"
        # The run can continue without the lines of some steps, but the user should know.
        for line in _missing_steps(metrics, resume_step or 0):
            terminal.say(line)
        self._metrics = keep_open(_open_after(metrics, last_step))
        # The lines of a step are in samples.1.jsonl if the file was rotated after the checkpoint.
        older = rotated(samples)
        if older.exists():
            _drop_after(older, last_step)
        self._samples = _open_after(samples, last_step)
        self._files_to_close.callback(self._close_samples)
        # The tracker `tensorboard` writes the same numbers there, and more.
        if not any(map(writes_tensorboard, trackers)):
            self._tensorboard = TensorBoard(workdir / "tensorboard", last_step + 1)
            self._files_to_close.callback(self._tensorboard.close)
        if trackers:
            try:
                self._trackers = start_trackers(trackers, workdir, last_step + 1)
            except UserError:
                self.close()
                raise
            for tracker in self._trackers:
                self._files_to_close.callback(self._close_tracker, tracker)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line {"step": step, name: number, ...} to metrics.jsonl.

        Raises UserError if a value is not finite.
        """
        numbers = {name: float(value) for name, value in values.items()}
        # A NaN in a metric is the first sign of a NaN in the parameters, which later checkpoints
        # would keep.
        not_finite = [f"{name}={x}" for name, x in numbers.items() if not math.isfinite(x)]
        if not_finite:
            raise UserError(f"step {step}: not finite: {', '.join(not_finite)}")

        if self._metrics is not None:
            _append_rows(self._metrics, step, [numbers])
        if self._tensorboard is not None:
            self._tensorboard.write(step, numbers)
        for tracker in self._trackers:
            tracker.log(step, numbers, self._completions)
        self._completions = ()

    def write_samples(self, step: int, rows: Sequence[JsonObject]) -> None:
        """Appends one line {"step": step, **row} to samples.jsonl for every row.

        The rows also go to the trackers as a table. They are sent together with the metrics of the
        step, which are written afterwards.
        """
        if self._samples is not None:
            _append_rows(self._samples, step, rows)
            if self._samples.tell() >= MAX_SAMPLES_BYTES:
                self._samples = _rotate(self._samples)
        # A table of completions has a row for each rollout, and no column for its tokens.
        self._completions = [
            {name: row[name] for name in row if name not in TOKEN_COLUMNS} for row in rows
        ]

    def finish(self, summary: JsonObject) -> None:
        """Keeps the summary of the run for its trackers, which get it when they are closed."""
        self._summary = summary

    def _close_tracker(self, tracker: Tracker) -> None:
        tracker.close(self._summary)

    def _close_samples(self) -> None:
        if self._samples is not None:
            self._samples.close()

    def close(self) -> None:
        self._files_to_close.close()


def _rotate(samples: TextIO) -> TextIO:
    """Renames a full file of samples, and opens a new one under its name."""
    path = Path(samples.name)
    samples.close()
    path.replace(rotated(path))
    return path.open("a", encoding="utf-8", newline="\n")


def _append_rows(file: TextIO, step: int, rows: Sequence[Mapping[str, object]]) -> None:
    lines = []
    for row in rows:
        # NaN is not JSON, and other programs could not read the file.
        line = json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False)
        lines.append(line + "\n")
    text = "".join(lines)
    with naming_full_disk(file.name, len(text.encode())):
        file.write(text)
        # A flushed line survives a kill of this process.
        file.flush()


def _missing_steps(path: Path, resume_step: int) -> list[str]:
    """Returns a line that names the steps up to `resume_step` without metrics in `path`.

    Raises UserError if a step has two lines: the run did not write such a file.
    """
    steps = set()
    for number, row in enumerate(read_jsonl(path), 1):
        step = step_of(row, path, number)
        if step in steps:
            raise UserError(
                f"{path} line {number} is damaged (a second line of step {step}): restore or "
                "remove it"
            )
        steps.add(step)
    missing = [step for step in range(1, resume_step + 1) if step not in steps]
    if not missing:
        return []
    named = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return [f"{path} has no line of step {named}, which are lost: the run continues without them"]


def _open_after(path: Path, last_step: int) -> TextIO:
    """Opens a JSON Lines file for appending, without the lines of steps after `last_step`.

    A last line that a kill truncated is dropped, too.
    """
    _drop_after(path, last_step)
    return path.open("a", encoding="utf-8", newline="\n")


def _drop_after(path: Path, last_step: int) -> None:
    """Rewrites a JSON Lines file without the lines of steps after `last_step`."""
    if path.exists():
        # The last line may be truncated within a character, hence errors="replace". A response may
        # contain a lone carriage return, which does not end the line, hence newline="\n".
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = [line for line in file if line.endswith("\n")]
        kept = []
        for number, line in enumerate(lines, 1):
            if step_of(parse_json(line, path, number), path, number) <= last_step:
                kept.append(line)
        # Rewritten even if no line is dropped, because the last one may be incomplete.
        write_atomic(path, "".join(kept))
