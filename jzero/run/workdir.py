"""Guards a workdir: it belongs to one run, with the settings in its config.json."""

import contextlib
import json
import os
from pathlib import Path

from jzero import config
from jzero.errors import UserError, shown
from jzero.files import parse_json, read_jsonl, read_text, step_of
from jzero.hosts import processes
from jzero.run import buckets

# The settings that may change when a run is resumed. Any other difference means another run.
MAY_CHANGE = (
    "train.steps",
    "train.prompt_epochs",
    "sft.epochs",
    "train.checkpoint_every",
    "train.checkpoint_epochs",
    "train.export_every",
    "train.trajectories",
    "train.trajectory_lines",
    "train.callbacks",
    "train.all_trajectories",
    "train.stop_on",
    "train.resume_from",
    "train.trackers",
    "train.keep_checkpoints",
    "train.save",
    "train.export_merged",
    "train.price",
    "train.minutes",
    "train.preemption_notice",
    "eval.every",
    "memory.check",
    "memory.device_gib",
    "memory.disk_gb",
    "hub.push",
    "hub.card",
)

MOST_CHANGES = 3  # settings of another run that its message names


def check_workdir(workdir: Path, config_json: str) -> None:
    """Raises UserError if a run with these settings cannot use `workdir`. Writes nothing.

    An existing config.json has to belong to this run.
    """
    check_directory(workdir)
    _check_same_run(workdir / "config.json", config_json)


def check_directory(workdir: Path) -> None:
    """Raises UserError unless `workdir`, or its nearest existing parent, is writable."""
    assert not buckets.is_address(workdir), f"{workdir=}: `buckets.open_workdir` opens an address"
    # A new workdir does not exist yet, so its nearest existing parent is checked.
    parents = (workdir, *workdir.absolute().parents)
    try:
        existing = next(path for path in parents if path.exists())
    except OSError as error:  # a name that is too long, or a symlink loop
        raise UserError(f"workdir {workdir}: {error.strerror}, give another") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"workdir {workdir}: {existing} is not a directory that can be written to")


def check_history(workdir: Path, checkpoint_every: int) -> None:
    """Raises UserError if the workdir has metrics of steps with missing checkpoints.

    Without a checkpoint a run starts over, and drops the existing metrics. That is right after a
    kill before the first checkpoint, and wrong if the checkpoints were removed. A run without
    regular checkpoints (`checkpoint_every` below 1) never starts over by itself.
    """
    checkpoints = workdir / "checkpoints"
    path = workdir / "metrics.jsonl"
    rows = read_jsonl(path)
    if not rows or any(path.name.isdigit() for path in checkpoints.glob("*")):
        return
    last_step = step_of(rows[-1], path, len(rows))
    # The first checkpoint is complete, at the latest, when the second one starts. From then on its
    # absence means that it was removed.
    if not checkpoints.is_dir() or last_step >= 2 * max(checkpoint_every, 0):
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
        written = read_text(path)
        # Other formatting of the same values is no change.
        if _flat_values(written, path) == _flat_values(config_json, path):
            return
    processes.write_once(path, config_json)


def _check_same_run(path: Path, config_json: str) -> None:
    """Raises UserError if `path` exists and differs from `config_json` in more than MAY_CHANGE."""
    if not path.exists():
        return
    written = read_text(path)
    written_values = _flat_values(written, path)
    values = _flat_values(config_json, path)
    changes = []
    for name in sorted(written_values.keys() | values.keys()):
        # hub.push.repo is an argument of hub.push.
        is_free = any(name == free or name.startswith(f"{free}.") for free in MAY_CHANGE)
        if not is_free and written_values.get(name) != values.get(name):
            before, now = (found.get(name, "(absent)") for found in (written_values, values))
            changes.append(f"{shown(name)}: {shown(before)} -> {shown(now)}")
    if changes:
        shown_changes = "; ".join(changes[:MOST_CHANGES])
        if len(changes) > MOST_CHANGES:
            shown_changes += f"; and {len(changes) - MOST_CHANGES} more settings"
        raise UserError(
            f"{path} belongs to a run with other settings ({shown_changes}): resume with the same "
            f"settings, or use another --workdir, {_weights_of(path.parent)}"
        )


def _weights_of(workdir: Path) -> str:
    """Returns how a new run starts from the weights of the run in a workdir."""
    exports = [export for export in workdir.glob("export-*") if export.name[7:].isdecimal()]
    if not exports:
        return "and jzero export to start from its weights"
    newest = max(exports, key=lambda export: int(export.name[7:]))
    return f"and model.path={newest} to start from its weights"


def _flat_values(config_json: str, path: Path) -> dict[str, str]:
    """Returns {"section.field": value as JSON} of the config in the file `path`.

    Settings of an earlier version have the names and values of today.
    """
    values = parse_json(config_json, path)
    with contextlib.suppress(UserError):  # a version that this one cannot read: compared as it is
        values = parse_json(config.to_json(config.from_json(config_json, str(path))), path)
    fields = config.flatten(values)
    return {name: json.dumps(value) for name, value in fields.items()}
