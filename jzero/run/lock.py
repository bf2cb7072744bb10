"""A lock on a directory: only one process at a time writes to it."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TextIO

from jzero.errors import UserError

NAME = "lock"  # of the file in the directory


def lock_directory(directory: Path, flag: str) -> TextIO:
    """Locks `directory`, and creates it if it does not exist.

    The lock is held until the file that is returned is closed, or until this process ends, also if
    it is killed. The file says who holds the lock. `flag` names the directory in the message, as
    in "--workdir runs/a".

    Raises UserError if another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / NAME).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise UserError(
            f"{flag} is in use by another process ({owner}): wait until it ends, stop it, or give "
            "another directory"
        ) from None
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    file.flush()
    return file
