"""Files that a run writes and reads while it may be killed at any moment."""

import json
import os
from pathlib import Path
from typing import Any

from jzero.errors import UserError

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


def check_output(out: Path, force: bool) -> None:
    """Raises UserError if a command may not write its file `out`.

    A file that exists is only replaced with --force, and its folder has to exist.
    """
    if out.is_dir():
        raise UserError(f"--out {out} is a directory: give a file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}, create it or fix --out")
    if out.exists() and not force:
        raise UserError(f"--out {out} exists: give another, or --force to replace it")


def check_not_input(out: Path, source: Path, flag: str) -> None:
    """Raises UserError if the output would replace the input, which `flag` named."""
    if out.exists() and source.exists() and out.samefile(source):
        raise UserError(f"--out {out} is the file that {flag} reads: give another")


def parse_json(text: str, path: Path, line: int | None = None) -> JsonObject:
    """Parses a JSON object that stands in the file `path`.

    Raises UserError, with the name of the file and the number of the line, if it is damaged.
    """
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        place = f"{path} line {line}" if line else str(path)
        raise UserError(f"{place} is damaged ({error}): restore or remove it") from None
    return value


def read_jsonl(path: Path) -> list[JsonObject]:
    """Reads a file of JSON lines that another process may still be writing.

    A file that does not exist has no lines. A last line without its newline is not complete and is
    left out. `errors="replace"` is needed because such a line may end within a character, and
    `newline="\\n"` because a response may hold a lone carriage return.

    Raises UserError if another line is damaged.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [
            parse_json(line, path, number)
            for number, line in enumerate(file, 1)
            if line.endswith("\n")
        ]
