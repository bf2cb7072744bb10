"""Runs whose workdir is in a bucket: gs://bucket/run, s3://bucket/run, or what else fsspec opens.

    with buckets.open_workdir(Path("gs://bucket/run")) as workdir:  # a run
        train(config, workdir)
    workdir = buckets.fetch_run("gs://bucket/run", leave_out=(CHECKPOINTS,))  # a reader

A run appends to its files, renames and locks them, which objects in a bucket cannot do. It
therefore works in a local directory, the mirror (in ~/.cache/jzero/workdirs, or below
$XDG_CACHE_HOME), and a thread copies new and changed files to the bucket: after each checkpoint,
every `COPY_SECONDS`, and once more at the end of the process. A process on another machine starts
from the copy in the bucket. After a lost machine a run therefore continues from the last checkpoint
that was copied completely.

The bucket has one more file, `MANIFEST`. It lists all files, and is written after them: a file that
it does not list belongs to a copy that was interrupted, and is not read. A file that was removed
from the mirror is removed from the bucket only after the next manifest is there.

The mirror remembers the manifest that it was copied to or from. If the bucket has another one at a
start, a process on another machine has continued the run, and its files replace the mirror's. If
the bucket has another one while the run goes on, two processes write to the same address: the
second one stops copying, and says so.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import fsspec

from jzero import terminal
from jzero.errors import UserError, reason_of
from jzero.files import JsonObject, naming_full_disk, parse_json, read_text, write_atomic
from jzero.run import lock

# The start of an address such as gs://bucket/run. A Path joins several slashes into one.
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+")
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}

MANIFEST = "jzero-manifest.json"  # in the bucket
STATE = ".jzero-manifest.json"  # in the mirror: the manifest of the last copy
CHECKPOINTS = "checkpoints"
PROGRAMS = "programs"  # compiled programs, which only fit the machine that compiled them
# What `watch` and `report` do not read.
PAGE_LEAVES_OUT = (CHECKPOINTS, "export-")
COPY_SECONDS = 60.0
POLL_SECONDS = 1.0  # between two looks for a new checkpoint
FOLLOW_SECONDS = 10.0
LAST_TRIES = 3  # to copy, at the end of a process

# Folders and parts of names that are never copied: files that are being written, and locks.
NEVER_COPIED = (PROGRAMS,)
UNFINISHED = (".orbax-checkpoint-tmp", ".tmp")

Stamp = tuple[int, int]  # size in bytes, and time of the last change in nanoseconds


@dataclass(frozen=True)
class Manifest:
    """The files of one copy."""

    number: str  # differs between copies; "" if there is no copy
    files: dict[str, Stamp] = field(default_factory=dict)  # path in the workdir -> its stamp

    @classmethod
    def parse(cls, text: str, path: str) -> "Manifest":
        """Reads a manifest. Raises UserError if the file is damaged."""
        try:
            values = parse_json(text, Path(path))
            files = {str(name): (int(size), int(time)) for name, (size, time) in values["files"]}
            for name in files:
                check_name(name)
            return cls(str(values["number"]), files)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{path} is damaged ({reason_of(error)}): delete it") from None

    def to_json(self) -> str:
        """Returns the text of the file."""
        files = [[name, list(stamp)] for name, stamp in sorted(self.files.items())]
        values: JsonObject = {"number": self.number, "files": files}
        return json.dumps(values)


NO_COPY = Manifest("")


def check_name(name: str) -> None:
    """Raises ValueError unless the name is a path below the workdir."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name} is not a path below the workdir")


def is_address(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is an address such as gs://bucket/run."""
    return ADDRESS.match(str(path)) is not None


class Bucket:
    """The workdir at one address.

    Raises UserError if the address cannot be opened.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        match = ADDRESS.match(str(address))
        assert match is not None, f"{address=}"
        scheme = match[1]
        self.address = f"{scheme}://{str(address)[match.end() :]}".rstrip("/")
        # The third slash of file:///tmp/run belongs to the path.
        if scheme in ("file", "local"):
            self.address = f"{scheme}:///{str(address)[match.end() :]}".rstrip("/")
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.address)
        except ImportError:
            package = PACKAGES.get(scheme, "the package of fsspec for it")
            raise UserError(f"{self.address}: install {package}: pip install {package}") from None
        except Exception as error:  # every file system has its own errors
            raise self.error("cannot be opened", error) from error

    def error(self, problem: str, error: BaseException) -> UserError:
        """Returns the error of an operation."""
        return UserError(f"{self.address} {problem} ({type(error).__name__}: {reason_of(error)})")

    def path(self, name: str) -> str:
        """Returns the path of a file of the workdir for `self.files`."""
        return f"{self.root}/{name}"

    def read_manifest(self) -> Manifest:
        """Returns the manifest, or `NO_COPY`. Raises UserError if it cannot be read."""
        try:
            # fsspec caches listings, and would not see a file of another machine.
            self.files.invalidate_cache()
            text = self.files.cat_file(self.path(MANIFEST)).decode()
        except FileNotFoundError:
            return NO_COPY
        except Exception as error:  # every file system has its own errors
            raise self.error("cannot be read", error) from error
        return Manifest.parse(text, f"{self.address}/{MANIFEST}")

    # -- from the bucket ---------------------------------------------------------------------------

    def download(self, mirror: Path, leave_out: tuple[str, ...] = ()) -> None:
        """Makes a mirror equal to the bucket's copy, if it is of another copy.

        leave_out: beginnings of the names that are not copied.
        """
        manifest, state = self.read_manifest(), read_state(mirror)
        # A machine that continues its own run has these files already.
        if manifest.number == state.number:
            return
        wanted = {
            name: stamp for name, stamp in manifest.files.items() if not name.startswith(leave_out)
        }
        for name in local_files(mirror).keys() - wanted.keys():
            (mirror / name).unlink()
        for name, stamp in wanted.items():
            if stamp_of(mirror / name) != stamp:
                self._download_file(name, stamp, mirror / name)
        remove_empty_folders(mirror)
        write_state(mirror, Manifest(manifest.number, wanted))

    def _download_file(self, name: str, stamp: Stamp, target: Path) -> None:
        partial = target.with_name(target.name + ".tmp")
        with naming_full_disk(target, stamp[0]):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.files.get_file(self.path(name), str(partial))
            except Exception as error:
                raise self.error(f"lacks {name}, or it cannot be read", error) from error
            partial.replace(target)
            # The next copy recognizes the file by its size and time.
            os.utime(target, ns=(stamp[1], stamp[1]))

    # -- to the bucket -----------------------------------------------------------------------------

    def upload(self, mirror: Path) -> None:
        """Copies what has changed in the mirror. Raises UserError if another process writes there.

        Errors of the network are raised as they are.
        """
        state = read_state(mirror)
        files = local_files(mirror)
        if files == state.files:
            return
        # Object stores have no locks. A number that this mirror has not written means another
        # writer.
        if self.read_manifest().number != state.number:
            raise UserError(
                f"{self.address} was written by another process: this run copies nothing more to "
                f"it. Stop one of them. The files of this run are in {mirror}"
            )
        copied = {}
        for name, stamp in files.items():
            if state.files.get(name) == stamp or self._upload_file(mirror / name, name):
                copied[name] = stamp
        # The manifest comes after all files and before any deletion, so that every file that it
        # lists exists.
        manifest = Manifest(uuid.uuid4().hex, copied)
        self.files.pipe_file(self.path(MANIFEST), manifest.to_json().encode())
        write_state(mirror, manifest)
        for name in state.files.keys() - copied.keys():
            with contextlib.suppress(FileNotFoundError):
                self.files.rm_file(self.path(name))

    def _upload_file(self, source: Path, name: str) -> bool:
        """Copies a file. Returns False if the run has removed it meanwhile."""
        target = self.path(name)
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self.files.put_file(str(source), target)
        except FileNotFoundError:
            if source.exists():
                raise
            return False
        return True


def mirror_of(address: str, kind: str) -> Path:
    """Returns the local directory of an address for a `kind` of process."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    scheme, _, rest = address.partition("://")
    # One folder an address: the mirror of gs://bucket/a does not contain that of gs://bucket/a/b.
    # tpu_scripts/remote.sh has the same rule.
    return cache / "jzero" / kind / scheme / rest.strip("/").replace("/", "+")


# -- the mirror ------------------------------------------------------------------------------------


def stamp_of(path: Path) -> Stamp | None:
    """Returns the stamp of a file, or None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def local_files(mirror: Path) -> dict[str, Stamp]:
    """Returns the files of a mirror that belong into the bucket, by their path in the workdir.

    The files of the workdir itself come first, so that the newest metrics are copied even if the
    copy of a large checkpoint is interrupted.
    """
    files: dict[str, Stamp] = {}
    for folder, folders, names in os.walk(mirror):
        relative = Path(folder).relative_to(mirror)
        folders[:] = sorted(
            name
            for name in folders
            if not any(mark in name for mark in UNFINISHED)
            and (relative / name).as_posix() not in NEVER_COPIED
        )
        for name in sorted(names):
            if name.endswith(UNFINISHED) or (relative == Path() and name in (lock.NAME, STATE)):
                continue
            stamp = stamp_of(Path(folder) / name)
            if stamp is not None:
                files[(relative / name).as_posix()] = stamp
    return files


def complete_checkpoints(mirror: Path) -> set[str]:
    """Returns the names of the complete checkpoints of a mirror."""
    return {path.name for path in (mirror / CHECKPOINTS).glob("*") if path.name.isdigit()}


def remove_empty_folders(mirror: Path) -> None:
    """Removes folders without files, such as those of a checkpoint that is not there any more."""
    for folder, _, _ in os.walk(mirror, topdown=False):
        if Path(folder) != mirror and not os.listdir(folder):
            os.rmdir(folder)


def read_state(mirror: Path) -> Manifest:
    """Returns the manifest of the mirror's last copy, or `NO_COPY`."""
    path = mirror / STATE
    if not path.exists():
        return NO_COPY
    return Manifest.parse(read_text(path), str(path))


def write_state(mirror: Path, manifest: Manifest) -> None:
    mirror.mkdir(parents=True, exist_ok=True)
    write_atomic(mirror / STATE, manifest.to_json())


# -- runs and readers ------------------------------------------------------------------------------


@contextlib.contextmanager
def open_workdir(workdir: Path, copy_seconds: float = COPY_SECONDS) -> Iterator[Path]:
    """Yields the directory in which a run works: `workdir`, or the mirror of an address.

    Raises UserError if the address cannot be read or written, and at the end if the last files
    could not be copied.
    """
    from jzero.hosts import peers  # not at the top: imports JAX, which jzero.watch does not need

    if not is_address(workdir):
        yield workdir
        return
    bucket = Bucket(workdir)
    if peers.has_peers():
        raise UserError(
            f"--workdir {bucket.address}: the hosts of a run share one directory: give a directory "
            "on a file system that all of them see, such as NFS or Filestore"
        )
    mirror = mirror_of(bucket.address, "workdirs")
    # The run locks its workdir later: hold a lock of the mirror's parent meanwhile.
    with lock.lock_directory(mirror.with_name(mirror.name + ".mirror"), f"--workdir {workdir}"):
        bucket.download(mirror)
        terminal.say(f"{bucket.address} is copied from and to {mirror}")
        uploads = Uploads(bucket, mirror, copy_seconds)
        try:
            yield mirror
        finally:
            uploads.finish()


class Uploads:
    """A thread that copies a mirror to its bucket from time to time, until `finish`."""

    def __init__(self, bucket: Bucket, mirror: Path, seconds: float) -> None:
        self.bucket = bucket
        self.mirror = mirror
        self.seconds = seconds
        self._checkpoints = complete_checkpoints(mirror)  # as of the last copy
        self._is_failing = False
        self._conflict: UserError | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="copies to the bucket")
        self._thread.start()

    def _run(self) -> None:
        next_copy = time.monotonic() + self.seconds
        while not self._has_ended.wait(POLL_SECONDS) and self._conflict is None:
            newest = complete_checkpoints(self.mirror)
            # A checkpoint is copied at once: it is what a lost machine would lose.
            if newest != self._checkpoints or time.monotonic() > next_copy:
                self._upload()
                next_copy = time.monotonic() + self.seconds
                self._checkpoints = newest

    def _upload(self) -> Exception | None:
        """Copies once. Returns an error that another attempt may not have."""
        try:
            self.bucket.upload(self.mirror)
        except UserError as error:
            self._conflict = error
            terminal.say(f"warning: {error}")
            return None
        except Exception as error:  # of the network: every file system has its own
            if not self._is_failing:
                reason = f"{type(error).__name__}: {reason_of(error)}"
                terminal.say(
                    f"warning: {self.bucket.address} is not written ({reason}): tries go on"
                )
            self._is_failing = True
            return error
        if self._is_failing:
            terminal.say(f"{self.bucket.address} is written again")
        self._is_failing = False
        return None

    def finish(self) -> None:
        """Copies what is left. Raises UserError if that fails."""
        self._has_ended.set()
        self._thread.join()
        error: Exception | None = None
        for number in range(LAST_TRIES):
            if self._conflict is not None:
                raise self._conflict
            time.sleep(number)
            error = self._upload()
            if error is None and self._conflict is None:
                return
        if error is None:
            assert self._conflict is not None
            raise self._conflict
        problem = self.bucket.error("lacks the newest files of the run", error)
        raise UserError(f"{problem}. They are in {self.mirror}: the same command copies them")


def fetch_run(
    run: str | os.PathLike[str],
    leave_out: tuple[str, ...] = (CHECKPOINTS,),
) -> str | os.PathLike[str]:
    """Returns a directory with the files of the run at an address; any other `run` as it is.

    leave_out: beginnings of the names that are not copied.
    """
    if not is_address(run):
        return run
    bucket = Bucket(run)
    # Readers of different files have different mirrors, and none of them is a run's.
    kind = "readers" + "".join(f"-without-{name}" for name in leave_out)
    mirror = mirror_of(bucket.address, kind)
    bucket.download(mirror, leave_out)
    if not (mirror / "config.json").exists():
        shutil.rmtree(mirror, ignore_errors=True)
        raise UserError(f"{bucket.address} has no run of jzero")
    return mirror


def follow_run(run: Path) -> Path:
    """Returns a directory with the small files of a run, and keeps it as new as the bucket."""
    directory = Path(fetch_run(run, PAGE_LEAVES_OUT))
    if is_address(run):
        bucket = Bucket(run)

        def follow() -> None:
            while True:
                time.sleep(FOLLOW_SECONDS)
                # The next attempt may find the bucket again.
                with contextlib.suppress(UserError):
                    bucket.download(directory, PAGE_LEAVES_OUT)

        threading.Thread(target=follow, daemon=True, name=f"follows {run}").start()
    return directory
