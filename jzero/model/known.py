"""The shapes of the models that recipes name, from their config.json: what is compiled without the weights."""

import json
from pathlib import Path

from jzero.model import hf
from jzero.model.qwen import QwenConfig

KNOWN: dict[str, dict] = json.loads(Path(__file__).with_suffix(".json").read_text())  # hub id: as QwenConfig has it


def named(name: str) -> str:
    """The hub id of "qwen2.5-3b", "Qwen2.5-3B" or "Qwen/Qwen2.5-3B"."""
    ids = {key: hub for hub in KNOWN for key in (hub.lower(), hub.split("/")[1].lower())}
    if name.lower() not in ids:
        raise ValueError(f"no known model {name!r}; there are {', '.join(hub.split('/')[1] for hub in KNOWN)}")
    return ids[name.lower()]


def architecture(path: str) -> QwenConfig:
    """Of a local directory, or of a hub id above; nothing is downloaded."""
    if Path(path).expanduser().is_dir():
        return hf.load_config(Path(path).expanduser())[0]
    return QwenConfig(**KNOWN[named(path)])
