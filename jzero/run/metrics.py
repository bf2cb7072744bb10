"""What a run reports: files, trackers, one readable line a step, clocks, versions. Names are flat, `group/name`."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from jzero.errors import UserError
from jzero.files import write_atomic

# metric -> [label, format] on the step line, in this order; a metric the step does not have is left out.
STEP_LINE = json.loads(Path(__file__).with_name("line.json").read_text())


def step_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """`step  12/200  reward 0.312  accuracy 0.250 ...`"""
    shown = [
        f"{label} {values[name]:{form}}"
        for name, (label, form) in STEP_LINE.items()
        if name in values
    ]
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *shown])


class MetricsWriter:
    """Appends to `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a workdir; a line survives a kill once written.

    Without a workdir (a host that is not the first) nothing is written, and a bad value still raises.
    `resume_step` is the checkpoint the run goes on from: what was written of later steps is dropped, so that a killed
    and resumed run leaves the same lines as one that was not. None is a run from its start: everything is dropped."""

    def __init__(self, workdir: str | os.PathLike | None, resume_step: int | None, project: str):
        from tensorboardX import SummaryWriter  # 1 s to import

        self._files, self._tensorboard, self._wandb, self._ends = [], None, None, ExitStack()
        if workdir is None:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        last = -1 if resume_step is None else resume_step
        keep = self._ends.enter_context
        self._files = [
            keep(_open_after(workdir / f"{name}.jsonl", last)) for name in ("metrics", "samples")
        ]
        # purge_step: TensorBoard hides the events of this step and later that are already in the directory.
        self._tensorboard = keep(SummaryWriter(str(workdir / "tensorboard"), purge_step=last + 1))
        if project:
            import wandb

            settings, name = json.loads((workdir / "config.json").read_text()), workdir / "wandb_id"
            if not name.exists():
                write_atomic(name, os.urandom(8).hex())
            of = {
                "id": name.read_text(),
                "resume": "allow",
                "name": workdir.name,
                "dir": workdir,
                "config": settings,
            }
            try:
                self._wandb = keep(wandb.init(project=project, **of))
            except wandb.Error as error:
                raise UserError(
                    f"train.wandb_project={project}: {error} Or set WANDB_MODE=offline"
                ) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line {"step": step, name: number, ...}. A value that is not finite stops the run."""
        numbers = {name: float(value) for name, value in values.items()}
        if bad := [
            f"{name}={number}" for name, number in numbers.items() if not math.isfinite(number)
        ]:
            raise UserError(f"step {step}: not finite: {', '.join(bad)}")
        _append(self._files[:1], step, [numbers])
        if self._tensorboard:
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        if self._wandb:  # which keeps the first of a step that was repeated: the same numbers
            self._wandb.log(numbers, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line {"step": step, **row} a row; rows are plain JSON values."""
        _append(self._files[1:], step, rows)

    def close(self) -> None:
        self._ends.close()


def _append(files: Sequence[TextIO], step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    for file in files:
        lines = [
            json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False) + "\n"
            for row in rows
        ]
        file.write("".join(lines))
        file.flush()


def _open_after(path: Path, last: int):
    """Opens for appending, without the lines of steps > last and without a line that a kill cut short."""
    if path.exists():
        # errors: the cut may fall within a character. newline: a response may hold a lone "\r".
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            kept = [row for row in file if row.endswith("\n") and json.loads(row)["step"] <= last]
        write_atomic(path, "".join(kept))
    return path.open("a", encoding="utf-8", newline="\n")
