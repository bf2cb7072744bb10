"""Locks a directory so that only one process at a time writes to it.

The lock is an operating system lock (flock), which ends with the process that holds it, however the
process ends: neither a leftover file nor a reused process number keeps the directory locked. NFS
forwards the lock to other hosts. Some file systems have no locks, for example some that present an
object store as files, and cannot keep a second run away: the run then prints a warning with the
last owner.
"""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TextIO

from jzero import terminal
from jzero.errors import UserError, shown
from jzero.files import naming_full_disk

NAME = "lock"  # the file in the directory
LONGEST_OWNER = 200  # characters
# Errors with which a file system reports that it has no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def lock_directory(directory: Path, flag: str) -> TextIO:
    """Locks `directory`, and creates it if it does not exist.

    The lock is held until the returned file is closed, or until this process ends, even if it is
    killed. The file contains the host and the process that hold the lock. `flag` names the
    directory in messages, as in "--workdir runs/a".

    Raises UserError if another process holds the lock.
    """
    path = directory / NAME
    with naming_full_disk(path):
        directory.mkdir(parents=True, exist_ok=True)
        # Mode "a+" keeps the owner's entry until this process holds the lock.
        file = path.open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(file)
        file.close()
        raise UserError(
            f"{flag} is in use by another process ({owner}): wait until it ends, stop it, or give "
            "another directory"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        terminal.say(
            f"{flag} is on a file system without locks ({error.strerror}): make sure that no other "
            f"run writes there; the last one was {_owner(file)}"
        )
    with naming_full_disk(path):
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
    return file


def _owner(file: TextIO) -> str:
    """Returns the owner that the file names: the process that holds the lock, or held it last."""
    file.seek(0)
    return shown(file.read(LONGEST_OWNER).strip() or "unknown")
