"""Files that the trainer and the samplers of a run share, in a directory or in a bucket.

Both kinds have the same few operations. Writes are atomic: a reader sees all of a file or none of
it. `now` is the clock of the store, which stamps the files: the clocks of hosts may differ.

Errors are OSError, FileNotFoundError among them. `RetryingStore` repeats operations that fail.
"""

import contextlib
import datetime
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, ParamSpec, Protocol, TypeVar

import fsspec

from jzero import terminal
from jzero.errors import UserError, reason_of
from jzero.run import buckets

P = ParamSpec("P")
T = TypeVar("T")

TEMPORARY = ".tmp"  # ends the names of files that are being written
FIRST_PAUSE = 0.1  # seconds before the first repetition, doubled for each further one
LONGEST_PAUSE = 5.0
MAX_NOTE_BYTES = 1 << 16  # of a file with a name or a sentence
# A FIFO is opened without a wait for its writer, and no link leads out of the directory.
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class Store(Protocol):
    """The operations of a store. Names are relative paths with at most one folder."""

    address: str
    poll_seconds: float  # between two looks for new files

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        """Returns the content of a file.

        Raises BadFileError for a file of more than `most_bytes` bytes, before it is read.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Writes a file atomically, and replaces an existing one."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Writes a new file. Returns False if the file exists."""
        ...

    def names(self, folder: str) -> list[str]:
        """Returns the sorted names of the files in a folder; none if there is no folder."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file, if it exists."""
        ...

    def modified(self, name: str) -> float:
        """Returns the time of the last change in seconds, by the clock of the store."""
        ...

    def now(self, who: str) -> float:
        """Returns the clock of the store. `who` is a name that no other process uses."""
        ...


class StoreError(OSError):
    """An operation of a bucket that failed."""


class BadFileError(Exception):
    """A file that is too large for its reader, or a folder, a pipe or a device in place of a file.

    It stays that, so `RetryingStore` does not try again.
    """


def check_size(content: bytes, most_bytes: int | None) -> bytes:
    """Returns the content of a file. Raises BadFileError if it is too large."""
    if most_bytes is not None and len(content) > most_bytes:
        raise BadFileError(f"the file has more than {most_bytes:,} bytes")
    return content


def end_of(most_bytes: int | None) -> int | None:
    """Returns the bytes to read, so that `check_size` detects a larger file."""
    return None if most_bytes is None else most_bytes + 1


class FolderStore:
    """A store in a directory, which may be on a network file system.

    Only regular files count. A process that can write to the directory may have made others.
    """

    poll_seconds = 0.1

    def __init__(self, directory: Path) -> None:
        self.address = str(directory)
        self.directory = directory

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        with self.open(name) as file:
            # Before the memory for the content is allocated.
            if most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes:
                raise BadFileError(f"the file has more than {most_bytes:,} bytes")
            return check_size(file.read(end_of(most_bytes)), most_bytes)

    def open(self, name: str) -> BufferedReader:
        """Opens a file for reading. A writer replaces the file, and does not change it.

        Raises BadFileError for a link, a socket, a folder, a pipe or a device.
        """
        # Errors of the file system stay OSErrors, which `RetryingStore` repeats.
        try:
            descriptor = os.open(self.directory / name, READ_FLAGS)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BadFileError("the file is a link or a socket") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadFileError("the file is a folder, a pipe or a device")
        return open(descriptor, "rb")

    @contextlib.contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """Yields a path next to that of a file, for its new content: see `put` and `link`.

        What is there at the end of the block is removed, which frees the room for other files.
        """
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, temporary: Path, name: str) -> None:
        """Gives the file at a temporary path its name. Replaces an existing file."""
        temporary.replace(self.directory / name)

    def link(self, temporary: Path, name: str) -> bool:
        """Gives the file at a temporary path its name. Returns False if the name exists."""
        try:
            # Unlike a rename, a link fails if the name exists, also on NFS.
            os.link(temporary, self.directory / name)
        except FileExistsError:
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        with self.temporary(name) as temporary:
            write_durably(temporary, data)
            self.put(temporary, name)

    def create(self, name: str, data: bytes) -> bool:
        with self.temporary(name) as temporary:
            write_durably(temporary, data)
            return self.link(temporary, name)

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.directory / folder) as entries:
                found = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.endswith(TEMPORARY))

    def delete(self, name: str) -> None:
        path = self.directory / name
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):
            # Unlinking a folder fails with either error, which depends on the system.
            if not path.is_dir():
                raise
            # Out of the way: nobody but a faulty process makes a folder there.
            path.rename(temporary_path(path))

    def modified(self, name: str) -> float:
        return (self.directory / name).stat().st_mtime

    def now(self, who: str) -> float:
        # The file server stamps the file, not this host.
        self.write(f"clock/{who}", b"")
        return self.modified(f"clock/{who}")


def temporary_path(path: Path) -> Path:
    """Returns a new path next to another one, which `names` does not list."""
    # Several processes may write the same name.
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}{TEMPORARY}")


def write_durably(path: Path, data: bytes) -> None:
    """Writes a new file."""
    with path.open("xb") as file:
        file.write(data)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Waits until the content of a file is on the disk."""
    file.flush()
    # Without it, a power cut may leave an empty file under the final name.
    os.fsync(file.fileno())


class BucketStore:
    """A store in a bucket, through fsspec.

    `create` is exclusive where the file system supports it. Elsewhere two processes may both
    succeed. That costs the work of one of them: both give the same answer.
    """

    poll_seconds = 1.0  # every look is a paid request

    def __init__(self, address: str) -> None:
        bucket = buckets.Bucket(address)
        self.address = bucket.address
        self.files: fsspec.AbstractFileSystem = bucket.files
        self.root: str = bucket.root

    def _call(self, name: str, operation: Callable[[str], T]) -> T:
        try:
            return operation(f"{self.root}/{name}")
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # every file system has its own errors
            problem = f"{self.address}/{name}: {type(error).__name__}: {reason_of(error)}"
            raise StoreError(problem) from error

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        def read(path: str) -> str | bytes:
            return self.files.cat_file(path, start=None, end=end_of(most_bytes))

        data = self._call(name, read)
        assert isinstance(data, bytes), f"{type(data)=}"
        return check_size(data, most_bytes)

    def write(self, name: str, data: bytes) -> None:
        self._call(name, lambda path: self.files.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        def create(path: str) -> None:
            self.files.invalidate_cache()
            self.files.pipe_file(path, data, mode="create")

        try:
            self._call(name, create)
        except FileExistsError:
            return False
        # Without exclusive creation, the last writer owns the file.
        return self.read(name) == data

    def names(self, folder: str) -> list[str]:
        def names(path: str) -> list[str]:
            # fsspec caches listings, and would not see files of other machines.
            self.files.invalidate_cache()
            return [str(found).rpartition("/")[2] for found in self.files.ls(path, detail=False)]

        try:
            return sorted(name for name in self._call(folder, names) if name)
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(name, self.files.rm_file)

    def modified(self, name: str) -> float:
        def modified(path: str) -> float:
            self.files.invalidate_cache()
            stamp: datetime.datetime = self.files.modified(path)
            # fsspec's stamps are in UTC, some of them without a time zone.
            return (stamp if stamp.tzinfo else stamp.replace(tzinfo=datetime.UTC)).timestamp()

        return self._call(name, modified)

    def now(self, who: str) -> float:
        # A bucket has no clock to ask; the time of an own file is one.
        self.write(f"clock/{who}", b"")
        return self.modified(f"clock/{who}")


class RetryingStore:
    """Repeats operations that fail, such as those on a full disk or over a cut connection.

    Raises UserError once an operation has failed for `seconds`. `check_stop` is called between
    two attempts, and may raise.
    """

    def __init__(
        self,
        store: Store,
        seconds: float,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.address = store.address
        self.poll_seconds = store.poll_seconds
        self.seconds = seconds
        self.check_stop = check_stop

    def _repeat(self, operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        deadline = time.monotonic() + self.seconds
        pause = FIRST_PAUSE
        while True:
            try:
                return operation(*args, **kwargs)
            # Answers of the store, not failures of it.
            except (FileNotFoundError, FileExistsError):
                raise
            except OSError as error:
                problem = f"{self.address}: {reason_of(error)}"
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{problem}, for {self.seconds:g} seconds: repair the store and start the "
                        "same command again"
                    ) from error
                # Short failures are normal on network file systems, and are not reported.
                if pause > LONGEST_PAUSE / 2:
                    terminal.say(f"{problem}: trying again")
            self.check_stop()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        return self._repeat(self.store.read, name, most_bytes)

    def write(self, name: str, data: bytes) -> None:
        self._repeat(self.store.write, name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._repeat(self.store.create, name, data)

    def names(self, folder: str) -> list[str]:
        return self._repeat(self.store.names, folder)

    def delete(self, name: str) -> None:
        self._repeat(self.store.delete, name)

    def modified(self, name: str) -> float:
        return self._repeat(self.store.modified, name)

    def now(self, who: str) -> float:
        return self._repeat(self.store.now, who)


def open_store(address: str) -> Store:
    """Returns the store at a directory or an address. Raises UserError if it cannot be opened."""
    if not address:
        raise UserError("rollout.placement.store is empty: give a directory or a bucket")
    if address.startswith(("http://", "https://")):
        from jzero.jobs.http_store import HttpStore  # which imports this module

        return HttpStore(address)
    if buckets.is_address(address):
        return BucketStore(address)
    return FolderStore(Path(address))


def read_if_exists(store: Store, name: str, most_bytes: int | None = None) -> bytes | None:
    """Returns the content of a file, or None if it does not exist. Raises as `Store.read` does."""
    try:
        return store.read(name, most_bytes)
    except FileNotFoundError:
        return None


def read_note(store: Store, name: str) -> bytes | None:
    """Returns the content of a small file; None if it does not exist or no process wrote it so."""
    try:
        return read_if_exists(store, name, MAX_NOTE_BYTES)
    except BadFileError:
        return None
