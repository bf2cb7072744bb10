"""The guard of a workdir: it belongs to one run, whose settings are in its config.json."""

import json
import os
from pathlib import Path

from jzero import config
from jzero.distributed import processes
from jzero.errors import UserError
from jzero.files import parse_json, read_jsonl

# The settings that may differ when a run is resumed. Any other difference is another run.
MAY_CHANGE = (
    "train.steps",
    "train.prompt_epochs",
    "sft.epochs",
    "train.checkpoint_every",
    "train.export_every",
    "train.all_trajectories",
    "train.resume_from",
    "train.discard_later_steps",
    "train.wandb_project",
    "train.wandb_entity",
    "train.wandb_group",
    "train.wandb_name",
    "train.minutes",
    "train.preemption_notice",
    "eval.every",
    "memory.check",
    "memory.device_gib",
    "memory.max_growth",
    "memory.growth_steps",
)


def check_workdir(workdir: Path, config_json: str) -> None:
    """Raises UserError if a run with these settings cannot use `workdir`. Writes nothing.

    The directory, or the nearest parent that exists, has to be writable, and a config.json in it
    has to be the one of this run.
    """
    parents = (workdir, *workdir.absolute().parents)
    try:
        existing = next(path for path in parents if path.exists())
    except OSError as error:  # a name that is too long, or a loop of links
        raise UserError(f"workdir {workdir}: {error.strerror}, give another") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"workdir {workdir}: {existing} is not a directory that can be written to")
    _check_same_run(workdir / "config.json", config_json)


def check_history(workdir: Path, checkpoint_every: int) -> None:
    """Raises UserError if the workdir has metrics of steps whose checkpoints are gone.

    Without a checkpoint a run starts over, and drops the metrics that are there. That is right
    after a kill before the first checkpoint, and wrong where somebody removed the checkpoints.
    """
    checkpoints = workdir / "checkpoints"
    rows = read_jsonl(workdir / "metrics.jsonl")
    if not rows or any(path.name.isdigit() for path in checkpoints.glob("*")):
        return
    last_step = rows[-1]["step"]
    # The first checkpoint is complete, at the latest, when the second one is begun.
    if not checkpoints.is_dir() or last_step >= 2 * checkpoint_every:
        raise UserError(
            f"{workdir} has metrics up to step {last_step} and no checkpoint: bring its folder "
            "checkpoints back, give another --workdir, or delete its metrics.jsonl to start over"
        )


def claim_workdir(workdir: Path, config_json: str) -> None:
    """Ties `workdir` to the run with these settings: checks config.json, then writes it.

    A new config.json replaces an old one that differs only in settings of `MAY_CHANGE`.
    """
    path = workdir / "config.json"
    _check_same_run(path, config_json)
    if path.exists():
        written = path.read_text(encoding="utf-8")
        if _flat_values(written) == _flat_values(config_json):
            return
    processes.write_once(path, config_json)


def _check_same_run(path: Path, config_json: str) -> None:
    """Raises UserError if `path` exists and differs from `config_json` in more than MAY_CHANGE."""
    if not path.exists():
        return
    written = path.read_text(encoding="utf-8")
    config.check_renamed(config.flatten(parse_json(written, path)), str(path))
    old = _flat_values(written)
    new = _flat_values(config_json)
    changes = []
    for name in sorted(old.keys() | new.keys()):
        if name not in MAY_CHANGE and old.get(name) != new.get(name):
            changes.append(f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}")
    if changes:
        raise UserError(
            f"{path} is of another run ({'; '.join(changes)}): "
            "use another --workdir, or the same config to resume"
        )


def _flat_values(config_json: str) -> dict[str, str]:
    """Returns {"section.field": value as JSON} of a config."""
    fields = config.flatten(json.loads(config_json))
    return {name: json.dumps(value) for name, value in fields.items()}
