"""The architecture with which stages are rehearsed: small enough for any machine."""

import json
from pathlib import Path

from jzero.model import huggingface
from jzero.model.qwen import QwenConfig

TINY = QwenConfig("qwen2", 512, 64, 128, 1, 4, 2, 16, True, 10000.0, 1e-6)


def write_tiny_model(directory: Path) -> str:
    """Writes the config.json of `TINY`, from which benchmarks take random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    values = huggingface.config_json(TINY, "float32")
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)
