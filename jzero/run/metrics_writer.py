"""Writes the metrics and sampled rollouts of a run: files, TensorBoard, Weights & Biases."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, TextIO

from jzero.errors import UserError
from jzero.files import JsonObject, parse_json, write_atomic
from jzero.run.metrics import find_metric


class WandbRun(Protocol):
    """What is used of a run of Weights & Biases, which is an extra and may not be installed."""

    def log(self, data: dict[str, float], *, step: int) -> None: ...


class MetricsWriter:
    """Appends to `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a workdir.

    A line that is written survives a kill. `resume_step` is the checkpoint that the run goes on
    from: lines of later steps are dropped, so that a killed and resumed run leaves the same lines
    as one that nothing stopped. `resume_step=None` starts a run and drops all old lines.

    `workdir` is None in every process but the first. Such a writer writes nothing, and still
    raises on a value that is not finite, so that all processes stop together.
    """

    def __init__(
        self,
        workdir: Path | None,
        resume_step: int | None,
        wandb_project: str = "",
        wandb_entity: str = "",
        wandb_group: str = "",
        wandb_name: str = "",
    ) -> None:
        self._files_to_close = ExitStack()
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None
        self._tensorboard = None
        self._wandb: WandbRun | None = None
        if workdir is None:
            return

        from tensorboardX import SummaryWriter  # not at the top: the import takes a second

        workdir.mkdir(parents=True, exist_ok=True)
        last_step = -1 if resume_step is None else resume_step
        keep_open = self._files_to_close.enter_context
        self._metrics = keep_open(_open_after(workdir / "metrics.jsonl", last_step))
        self._samples = keep_open(_open_after(workdir / "samples.jsonl", last_step))
        # TensorBoard hides what the directory already holds of step `purge_step` and later steps.
        directory = str(workdir / "tensorboard")
        self._tensorboard = keep_open(SummaryWriter(directory, purge_step=last_step + 1))
        if wandb_project:
            self._wandb = self._start_wandb(
                workdir, wandb_project, wandb_entity, wandb_group, wandb_name
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line {"step": step, name: number, ...} to metrics.jsonl.

        Every name has to be in the table of `jzero.run.metrics`. Raises UserError if a value is
        not finite.
        """
        numbers = {name: float(value) for name, value in values.items()}
        unknown = [name for name in numbers if find_metric(name) is None]
        assert not unknown, f"{unknown=}: jzero.run.metrics.METRICS does not define them"
        not_finite = [f"{name}={x}" for name, x in numbers.items() if not math.isfinite(x)]
        if not_finite:
            raise UserError(f"step {step}: not finite: {', '.join(not_finite)}")

        if self._metrics is not None:
            _append_rows(self._metrics, step, [numbers])
        if self._tensorboard is not None:
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            # Of a step that is repeated W&B keeps the first values, which are the same numbers.
            self._wandb.log(numbers, step=step)

    def write_samples(self, step: int, rows: Sequence[JsonObject]) -> None:
        """Appends one line {"step": step, **row} to samples.jsonl for every row."""
        if self._samples is not None:
            _append_rows(self._samples, step, rows)

    def close(self) -> None:
        self._files_to_close.close()

    def _start_wandb(
        self, workdir: Path, project: str, entity: str, group: str, name: str
    ) -> WandbRun:
        """Starts the W&B run of the workdir, or goes on with it: its id is in the file wandb_id."""
        import wandb  # an extra

        id_file = workdir / "wandb_id"
        if not id_file.exists():
            write_atomic(id_file, os.urandom(8).hex())
        try:
            run = wandb.init(
                project=project,
                entity=entity or None,
                group=group or None,
                id=id_file.read_text(),
                resume="allow",
                name=name or workdir.name,
                dir=workdir,
                config=json.loads((workdir / "config.json").read_text()),
            )
        except wandb.Error as error:
            raise UserError(
                f"train.wandb_project={project}: {error} Or set WANDB_MODE=offline"
            ) from error
        return self._files_to_close.enter_context(run)


def _append_rows(file: TextIO, step: int, rows: Sequence[Mapping[str, object]]) -> None:
    lines = []
    for row in rows:
        line = json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False)
        lines.append(line + "\n")
    file.write("".join(lines))
    file.flush()


def _open_after(path: Path, last_step: int) -> TextIO:
    """Opens a file of JSON lines for appending, without the lines of steps after `last_step`.

    A last line that a kill cut short is dropped, too.
    """
    if path.exists():
        # The line may be cut within a character, hence errors="replace". A response may hold a
        # lone carriage return, which is not the end of a line, hence newline="\n".
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = [line for line in file if line.endswith("\n")]
        kept = []
        for number, line in enumerate(lines, 1):
            if parse_json(line, path, number)["step"] <= last_step:
                kept.append(line)
        write_atomic(path, "".join(kept))
    return path.open("a", encoding="utf-8", newline="\n")
