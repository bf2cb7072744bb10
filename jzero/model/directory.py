"""The files of a model directory from an untrusted source.

    path = file_in(directory, "config.json")      # None if there is no such file
    entries = read_json(path)

Nothing in a model directory is trusted: a name or a link must not lead out of the directory, files
have a size limit, and a file that cannot be read raises a UserError of one line with its name.
"""

import os
from pathlib import Path

from jzero import json_values
from jzero.errors import UserError, reason_of, shown
from jzero.files import JsonObject, read_bytes

MAX_JSON_BYTES = 16 << 20  # a config.json has kilobytes, the index of a large model has megabytes
AGAIN = "download or export the model again"


def file_in(directory: Path, name: str) -> Path | None:
    """Returns the path of the file `name` in a model directory, or None if there is no such file.

    Raises UserError if `name` is not the plain name of a file, if it is a link that leads out of
    the directory, or if it is something other than a file. The links of the Hugging Face cache,
    from a snapshot to the blobs of the same model, are followed.
    """
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise UserError(
            f"{directory} names the file {shown(name)}, which is not a plain file name: {AGAIN}"
        )
    path = Path(directory, name)
    # Not `exists`, which is false for a dangling link: `check_inside` reports it.
    if not os.path.lexists(path):
        return None
    check_inside(path, directory)
    if not path.is_file():
        raise UserError(f"{path} is not a file: {AGAIN}")
    return path


def check_inside(path: Path, directory: Path) -> None:
    """Raises UserError if a path in a model directory leads out of the directory through links."""
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:  # a dangling link, or a cycle of links
        raise UserError(f"{path} is a broken link ({error.strerror}): {AGAIN}") from None
    if not any(target.is_relative_to(root) for root in roots_of(directory)):
        raise UserError(
            f"{path} is a link that leads out of its directory, to {shown(str(target))}: "
            "give the directory that it leads to, or replace the link by a copy or a hard link"
        )


def roots_of(directory: Path) -> list[Path]:
    """Returns the directories that may contain the files of a model directory."""
    root = Path(os.path.realpath(directory))
    if root.parent.name == "snapshots":  # Hugging Face cache: <model>/snapshots/<revision>
        return [root, Path(os.path.realpath(root.parent.parent / "blobs"))]
    return [root]


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Returns the text of a file. Raises UserError if it is not UTF-8 or exceeds `max_bytes`."""
    try:
        return read_bytes(path, max_bytes).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}): {AGAIN}") from None


def read_json(path: Path) -> JsonObject:
    """Returns the JSON object in a file. Raises UserError if the file holds anything else."""
    try:
        value = json_values.parse(read_text(path))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({reason_of(error)}): {AGAIN}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {shown(value)} instead of a JSON object: {AGAIN}")
    return value
