"""Reads and writes files safely: foreign files of any kind, and the files of a killed run.

    for number, line in read_lines(path):    # regular files only, lines of a bounded length
        row = parse_json(line, path, number)
    settings = parse_json(read_text(path), path)

`open_file` is the only way to open a file that another program or user has written: a FIFO, a
device or a folder is refused before anything is read, and a size is bounded before it is allocated.
"""

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from jzero import json_values, terminal
from jzero.errors import UserError, causes

JsonObject = dict[str, Any]  # a JSON object as `json` reads it

MAX_TEXT_BYTES = 64 << 20  # of a file that is read whole, such as config.json
MAX_LINE_BYTES = 64 << 20  # of a line of a log

# Full disk, exceeded quota, file size limit.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A read-only disk, missing rights, a broken disk, and paths that no file can have.
NO_ACCESS = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


@contextlib.contextmanager
def naming_full_disk(path: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Turns the error of a disk without room for `path` into a UserError; passes other errors on.

    `needed` is the number of bytes to write, if known.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_full_disk(error):
            raise
        raise no_room(path, needed, error) from error


def is_full_disk(error: BaseException) -> bool:
    """Returns whether an error or one of its causes reports a disk without room."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in NO_ROOM:
            return True
        # TensorStore and safetensors raise other types, with the system's error in their text.
        if any(os.strerror(number) in str(cause) for number in NO_ROOM):
            return True
    return False


def no_room(
    path: str | os.PathLike[str] | None,
    needed: int | None,
    error: BaseException,
) -> UserError:
    """Returns the error of a disk that has no room for `path`, in one line."""
    texts = [os.strerror(number) for number in NO_ROOM]
    whole_text = " ".join(map(str, causes(error)))
    reason = next((text for text in texts if text in whole_text), texts[0])
    sizes = [] if needed is None else [f"{needed:,} bytes are needed"]
    if path is not None:
        absolute = Path(path).absolute()
        # `disk_usage` needs a folder that exists.
        folder = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
        sizes.append(f"{shutil.disk_usage(folder).free:,} bytes are free there")
    facts = f" ({', '.join(sizes)})" if sizes else ""
    return UserError(
        f"{path or 'a file'} cannot be written: {reason}{facts}: make room and start the same "
        "command again. What was complete before stays as it is"
    )


def mistake(error: BaseException) -> str | None:
    """Returns the line of an error that the user can fix; None for a fault of the program.

    These are a UserError, and a file that the disk, its rights or its path do not allow.
    """
    if isinstance(error, UserError):
        # One line, even if the text of a library is a part of the message.
        return " ".join(str(error).split())
    path = getattr(error, "filename", None)
    if is_full_disk(error):
        return str(no_room(path, None, error))
    if isinstance(error, OSError) and error.errno in NO_ACCESS and path is not None:
        reason = os.strerror(error.errno)
        return f"{path} cannot be opened or written: {reason}: fix its rights, or give another path"
    return None


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turns a `mistake` in the body into one line and status 2. Other exceptions are raised.

    For commands that do not load JAX. The others use `cli.user_errors`, which knows other hosts.
    """
    try:
        yield
    except Exception as error:
        message = mistake(error)
        if message is None:
            raise
        terminal.write(f"error: {message}", sys.stderr)
        sys.exit(2)


def user_cache() -> Path:
    """Returns the directory for what can be made again: $XDG_CACHE_HOME/jzero or ~/.cache/jzero."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jzero"


def write_atomic(
    path: str | os.PathLike[str],
    content: str | bytes,
    mode: int = 0o666,
) -> None:
    """Writes `content` to `path` so that the file is never half written.

    If the process or the machine dies, the file holds either its old content or the new one. Raises
    UserError if the disk is full.

    mode: who may read and write the file, less what the umask of the process denies.
    """
    path = Path(path)
    # The temporary file is in the same folder, because only a rename within a file system is
    # atomic.
    temporary = path.with_name(path.name + ".tmp")
    data = content.encode() if isinstance(content, str) else content
    with naming_full_disk(path, len(data)):
        try:
            with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # the content reaches the disk before the name does
        except OSError:
            temporary.unlink(missing_ok=True)  # frees the room for other files
            raise
    temporary.replace(path)


def split_commas(*lists: str) -> list[str]:
    """Returns the parts of comma-separated lists: "aime24,math500=FILE" has two."""
    parts = [part.strip() for part in ",".join(lists).split(",")]
    return [part for part in parts if part]


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns the id and the revision of "USER/NAME#REVISION": a branch, a tag or a commit.

    The revision is None if `name` has none, or if `name` is an existing path.
    """
    repository, mark, revision = name.partition("#")
    if not mark or not revision or repository.count("/") != 1 or Path(name).exists():
        return name, None
    return repository, revision


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form of a hub id, such as Qwen/Qwen2.5-3B."""
    name, _ = split_revision(name)
    return name.count("/") == 1 and name[0] not in "./~"


def is_file(path: Path) -> bool:
    """Returns whether the file exists; False also for names that are too long or invalid."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_output(out: Path, force: bool) -> None:
    """Raises UserError if a command may not write its file `out`.

    An existing file is replaced only with --force. The folder has to exist.
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


def open_file(
    path: str | os.PathLike[str],
    most_bytes: int | None = None,
    name: str = "",
) -> BinaryIO:
    """Opens an existing file that somebody else may have written.

    Args:
        path: the file.
        most_bytes: the size that is allowed, None for every size.
        name: what errors call the file, such as "data FILE"; its path by default.

    Raises:
        FileNotFoundError: there is no file of this name.
        UserError: the file is not a regular file, cannot be opened, or is too large.
    """
    name = name or str(path)
    try:
        # Without O_NONBLOCK, opening a FIFO waits for somebody who writes to it.
        file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise _irregular(name) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{name} cannot be opened ({reason}): fix its name or its rights") from None
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise _irregular(name)
    if most_bytes is not None and status.st_size > most_bytes:
        file.close()
        raise _too_large(name, most_bytes)
    return file


def _irregular(name: str) -> UserError:
    return UserError(f"{name} is a folder, a pipe or a device: name a file")


def _too_large(name: str, most_bytes: int) -> UserError:
    return UserError(f"{name} has more than {most_bytes:,} bytes: name a smaller file")


def read_bytes(
    path: str | os.PathLike[str],
    most_bytes: int = MAX_TEXT_BYTES,
    name: str = "",
) -> bytes:
    """Returns the content of a file. Raises as `open_file` does."""
    with open_file(path, most_bytes, name) as file:
        # `read` allocates what it is asked for. The size of a file in /proc is 0, and another
        # process may append meanwhile.
        content = file.read(os.fstat(file.fileno()).st_size + 1)
        while len(content) <= most_bytes and (more := file.read(1 << 16)):
            content += more
    if len(content) > most_bytes:
        raise _too_large(name or str(path), most_bytes)
    return content


def read_text(
    path: str | os.PathLike[str],
    most_bytes: int = MAX_TEXT_BYTES,
    name: str = "",
) -> str:
    """Returns the content of a text file in UTF-8. Raises as `open_file` does.

    Raises:
        UserError: the file is not in UTF-8.
    """
    try:
        return read_bytes(path, most_bytes, name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name or path} is not in UTF-8 (byte {error.start}): save the file in UTF-8"
        ) from None


def read_lines(
    path: str | os.PathLike[str],
    most_bytes: int = MAX_LINE_BYTES,
    name: str = "",
) -> Iterator[tuple[int, bytes]]:
    """Yields the number, from 1, and the bytes of each line, with its line break.

    Only a line feed ends a line. Raises as `open_file` does.

    Raises:
        UserError: a line has more than `most_bytes` bytes.
    """
    with open_file(path, name=name) as file:
        number = 0
        # The limit of `readline` bounds the memory for a file without line breaks.
        while line := file.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise UserError(
                    f"{name or path} line {number} has more than {most_bytes:,} bytes: remove it"
                )
            yield number, line


def parse_json(text: str | bytes, path: Path, line: int | None = None) -> JsonObject:
    """Parses a JSON object from the file `path`, which may hold NaN.

    Raises UserError, with the file name and the line number, if the text is damaged or exceeds the
    bounds of `json_values.parse`. Bytes that are not UTF-8 become U+FFFD.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        value = json_values.parse(text, allows_nan=True)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        place = f"{path} line {line}" if line else str(path)
        raise UserError(f"{place} is damaged ({error}): restore or remove it") from None
    return value


def step_of(row: JsonObject, path: Path, line: int) -> int:
    """Returns the step of a row of metrics.jsonl or samples.jsonl. Raises UserError without one."""
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise UserError(f"{path} line {line} is damaged (no step): restore or remove it")
    return step


def read_jsonl(path: Path) -> list[JsonObject]:
    """Reads a file of JSON lines that another process may still be writing.

    A file that does not exist has no lines. A last line without its newline is incomplete and is
    dropped.

    Raises UserError if another line is damaged, or if the file is not a regular file.
    """
    try:
        return [
            parse_json(line, path, number)
            for number, line in read_lines(path)
            if line.endswith(b"\n")
        ]
    except FileNotFoundError:
        return []


def rotated(samples: Path) -> Path:
    """Returns the file that keeps the older rollouts of a run with a large samples.jsonl."""
    return samples.with_name("samples.1.jsonl")
