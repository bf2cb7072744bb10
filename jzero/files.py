"""Files that a run writes and reads while it may be killed at any moment."""

import json
import os
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]  # a JSON object as `json` reads it


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` to `path` so that the file is never half written.

    Whenever the process or the machine dies, the file holds either all of its old content or all
    of `text`.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # the content reaches the disk before the name does
    temporary.replace(path)


def read_jsonl(path: Path) -> list[JsonObject]:
    """Reads a file of JSON lines that another process may still be writing.

    A last line without its newline is not complete and is left out. `errors="replace"` is needed
    because such a line may end within a character, and `newline="\\n"` because a response may hold
    a lone carriage return.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
