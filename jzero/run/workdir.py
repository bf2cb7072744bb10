"""Moved from jzero.checkpoint."""

import json
import os
from pathlib import Path

from jzero import config
from jzero.distributed import processes
from jzero.errors import UserError

# What a resumed run may change of its config; anything else is another run.
MAY_CHANGE = (
    "train.steps",
    "sft.epochs",
    "train.checkpoint_every",
    "train.export_every",
    "train.wandb_project",
    "eval.every",
)


def check_workdir(workdir: str | os.PathLike, config_json: str) -> None:
    """Ties a workdir to its first run's config, `config.json`; a resumed run may change `MAY_CHANGE` only."""
    path = Path(workdir) / "config.json"
    values = lambda text: {
        name: json.dumps(value) for name, value in config.flatten(json.loads(text)).items()
    }
    new = values(config_json)
    if path.exists():
        saved = config.flatten(json.loads(path.read_text(encoding="utf-8")))
        config.check_renamed(saved, str(path))
    old = values(path.read_text(encoding="utf-8")) if path.exists() else new
    changes = [
        f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}"
        for name in sorted(old.keys() | new.keys())
        if name not in MAY_CHANGE and old.get(name) != new.get(name)
    ]
    if changes:
        raise UserError(
            f"{path} is of another run ({'; '.join(changes)}): use another --workdir, or the same config to resume"
        )
    if old != new or not path.exists():
        processes.write_once(path, config_json)
