"""Files of JSON lines, which data sets, metrics and rollouts are."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, every line of which is complete."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes a file of JSON lines and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
