"""Moved from jzero.metrics."""

import json
import os
from pathlib import Path
from typing import Any

import jinja2


def fill_template(template: str, **values: Any) -> str:
    """A text file of this package, filled in (Jinja)."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return jinja2.Environment(trim_blocks=True).from_string(text).render(values).rstrip("\n")


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """The file holds either what it held or all of `text`, whenever the process or the machine dies."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Of a .jsonl that may still be written: a last line that is not whole (yet) is left out."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
