"""Resumes from a checkpoint that is not the newest: `train.resume_from`.

The steps after that checkpoint are abandoned. They are removed from the workdir, but only with
`train.resume_from.discard_later`. The same command may be repeated after a kill: it then resumes
from its own newest checkpoint, and discards nothing again.
"""

import shutil
from pathlib import Path

from jzero.config import TrainConfig, from_json
from jzero.errors import UserError
from jzero.files import read_text
from jzero.hosts import processes
from jzero.run.hub_ledger import forget_later_steps


def steps_to_discard(workdir: Path, train: TrainConfig) -> list[int]:
    """Returns the steps of the checkpoints after `train.resume_from`. Changes nothing.

    Raises UserError if there is no such checkpoint, or if there are later checkpoints and
    it does not discard them.
    """
    chosen = train.resume_from
    if chosen is None or _has_gone_back(workdir, train):
        return []
    steps = sorted(_numbered(workdir / "checkpoints"))
    if chosen.step not in steps:
        existing = ", ".join(str(step) for step in steps) or "none"
        raise UserError(
            f"train.resume_from.step={chosen.step}: {workdir} has no checkpoint of this step, it "
            f"has {existing}; train.keep_checkpoints says how many a run keeps"
        )
    later = [step for step in steps if step > chosen.step]
    # Removing checkpoints needs explicit consent.
    if later and not chosen.discard_later:
        raise UserError(
            f"train.resume_from.step={chosen.step}: {workdir} has steps up to {later[-1]}, which "
            "would be lost: set train.resume_from.discard_later=True to remove them, or copy the "
            "workdir first"
        )
    return later


def go_back(workdir: Path, train: TrainConfig) -> None:
    """Makes the checkpoint `train.resume_from` the newest of the workdir.

    Removes the checkpoints, exports and references of later steps. The metrics writer drops their
    lines from metrics.jsonl and samples.jsonl when it opens these files. Every process calls this
    function; the first process removes the files.
    """
    chosen = train.resume_from
    if chosen is not None and _has_gone_back(workdir, train):
        processes.print_once(
            f"{workdir} has already resumed from train.resume_from.step={chosen.step}: it "
            "continues from its newest checkpoint"
        )
    later = steps_to_discard(workdir, train)
    if chosen is None or not later or not processes.is_first_process():
        return
    forget_later_steps(workdir, chosen.step)
    # The newest goes first: after a kill in between, the same command can resume the workdir.
    for step in reversed(later):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    for folder, prefix in ((workdir, "export-"), (workdir / "reference", "")):
        for step, path in _numbered(folder, prefix).items():
            if step > chosen.step:
                shutil.rmtree(path)
    processes.print_once(
        f"train.resume_from.step={chosen.step}: removed the checkpoints of steps "
        f"{', '.join(str(step) for step in later)}"
    )


def _has_gone_back(workdir: Path, train: TrainConfig) -> bool:
    """Returns whether the last command in the workdir resumed from the same step."""
    path = workdir / "config.json"
    if not path.exists():
        return False
    written = from_json(read_text(path), str(path))
    # `claim_workdir` writes config.json after the removal, so equal settings mean that it has been
    # done.
    return written.train.resume_from == train.resume_from


def _numbered(folder: Path, prefix: str = "") -> dict[int, Path]:
    """Returns the directories in `folder` named `prefix` plus a number, keyed by the number."""
    directories = {}
    for path in folder.glob(f"{prefix}*"):
        number = path.name.removeprefix(prefix)
        if number.isdigit() and path.is_dir():
            directories[int(number)] = path
    return directories
