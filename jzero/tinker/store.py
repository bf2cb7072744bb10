"""Checkpoints of adapters on disk, by `tinker://RUN/KIND/NAME`.

    STORE/RUN/KIND/NAME/
      adapter_config.json, adapter_model.safetensors    the adapter as `peft` loads it
      optimizer.safetensors                             Adam's moments, of KIND=weights only
      record.json                                       its run, owner and shape, and its expiry
    STORE/lock                                          held by the server

A checkpoint is written to a temporary directory, flushed to the disk, and renamed: whatever kills
the server, there is the old checkpoint, the new one, or none. A checkpoint is never changed after
that, except for its time of expiry, and an adapter whose file was changed is refused.

A store belongs to one server process, which locks the directory. A checkpoint whose record.json
cannot be read, or has another version, is neither changed nor listed.
"""

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, TextIO, cast

import numpy as np
from safetensors import numpy as safetensors_numpy

from jzero import json_values, terminal
from jzero.errors import UserError, shown
from jzero.files import read_text
from jzero.model import peft
from jzero.model.huggingface.writing import write_tensors
from jzero.run.lock import lock_directory
from jzero.tinker.bodies import KINDS, PATH, Metadata
from jzero.types import JsonValue

RECORD = "record.json"
MAX_RECORD_BYTES = 64 << 10  # two texts of metadata of 4 KB, with escapes, and the rest
LATEST_TIME = 253402300799  # the last second that ISO 8601 can write with four digits of a year
# A checkpoint is hidden as soon as it has expired, and removed later: a clock that was wrong for a
# while must not remove what has hours left.
GRACE_SECONDS = 6 * 3600
OPTIMIZER = "optimizer.safetensors"
# Names of checkpoints begin with a letter, a digit or _.
TEMPORARY = ".tmp-"
REPLACED = ".old-"  # + NAME: a checkpoint that is being replaced


@dataclass(frozen=True)
class Record:
    """What a checkpoint is of."""

    run: str
    kind: str  # one of KINDS
    name: str
    owner: str
    base_model: str
    base_hash: str
    rank: int
    targets: tuple[str, ...]
    seed: int
    step: int
    created: float  # seconds since 1970
    expires: float | None = None
    size: int = 0  # bytes of its files
    user_metadata: Metadata | None = None
    run_metadata: Metadata | None = None
    digest: str = ""  # SHA-256 of the adapter's file; "" in records of older servers

    @property
    def path(self) -> str:
        """Returns the address of the checkpoint."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.has_expired_for(0)

    def has_expired_for(self, seconds: float) -> bool:
        """Whether its time has been over for `seconds`."""
        return self.expires is not None and self.expires + seconds < time.time()

    @property
    def body(self) -> dict[str, JsonValue]:
        """Returns the checkpoint as the API describes it."""
        # The API's names of the kinds.
        types = {"weights": "training", "sampler_weights": "sampler"}
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": types.get(self.kind, "external"),
            "time": iso_time(self.created),
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": False,
            "expires_at": None if self.expires is None else iso_time(self.expires),
            "user_metadata": self.user_metadata,
        }


def iso_time(seconds: float) -> str:
    """Returns a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Store:
    """The checkpoints in a directory. Methods may be called by any thread."""

    # Directories that are being written, of all stores of this process.
    in_progress: ClassVar[set[Path]] = set()

    def __init__(self, root: Path) -> None:
        """Removes what an earlier server left half written.

        Raises UserError if another process has the store.
        """
        self.root = root
        take_lock(root)
        # Held while names appear and disappear, so that they do so one after the other.
        self.names = threading.RLock()
        # A server that ended between the two renames of `commit` has left only the old checkpoint.
        for old in root.glob(f"*/*/{REPLACED}*"):
            target = old.parent / old.name.removeprefix(REPLACED)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for half in root.glob(f"*/*/{TEMPORARY}*"):
            if half not in self.in_progress:
                shutil.rmtree(half, ignore_errors=True)

    def directory(self, path: str) -> Path:
        """Returns the directory of a checkpoint. Raises UserError if `path` is not valid."""
        match = PATH.fullmatch(path)
        if match is None:
            raise UserError(
                f"{shown(path)} is not the path of a checkpoint: use tinker://RUN/KIND/NAME, where "
                f"KIND is {', '.join(KINDS)}"
            )
        return self.root / match["run"] / match["kind"] / match["name"]

    def find(self, path: str, owner: str) -> Record | None:
        """Returns the record of a checkpoint of `owner`, or None."""
        record = read_record(self.directory(path))
        if record is None or record.owner != owner or record.is_expired:
            return None
        return record

    def records(self, owner: str, run: str = "") -> list[Record]:
        """Returns the checkpoints of `owner`, of one run or of all, the oldest first."""
        found = []
        for directory in self.root.glob(f"{run or '*'}/*/*"):
            record = read_record(directory)
            if record is not None and record.owner == owner and not record.is_expired:
                found.append(record)
        return sorted(found, key=lambda record: record.created)

    def begin(self, record: Record, overwrite: bool) -> Path:
        """Returns a new temporary directory for a checkpoint.

        Raises UserError if the checkpoint exists, unless `overwrite`.
        """
        self.check_free(record, overwrite)
        temporary = self.directory(record.path).parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        self.in_progress.add(temporary)
        temporary.mkdir(parents=True)
        return temporary

    def check_free(self, record: Record, overwrite: bool) -> None:
        """Raises UserError if the checkpoint exists, unless `overwrite`."""
        target = self.directory(record.path)
        # An expired checkpoint is invisible to its owner, so its name is free before the sweep
        # removes it.
        with self.names:
            if target.exists() and not overwrite and not is_expired(target):
                raise UserError(
                    f"{record.path} exists: choose another name, or send overwrite=true"
                )

    @contextlib.contextmanager
    def writing(self, record: Record, overwrite: bool) -> Iterator[Path]:
        """Begins a checkpoint, and removes what the block has written unless it commits.

        Raises as `begin` does.
        """
        temporary = self.begin(record, overwrite)
        try:
            yield temporary
        finally:
            # Renamed by `commit`; after an error, such as a full disk, it is still there.
            shutil.rmtree(temporary, ignore_errors=True)
            self.in_progress.discard(temporary)

    def commit(self, temporary: Path, record: Record, overwrite: bool = True) -> Record:
        """Makes the checkpoint in `temporary` appear under its name, and returns its record.

        Raises UserError if the checkpoint exists by now, unless `overwrite`.
        """
        size = sum(file.stat().st_size for file in temporary.iterdir())
        record = replace(record, size=size, digest=digest_of(temporary / peft.WEIGHTS))
        write_record(temporary, record)
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        target = self.directory(record.path)
        with self.names:
            self.check_free(record, overwrite)
            if target.exists():
                # A directory cannot replace another: move the old one away first.
                old = target.parent / f"{REPLACED}{target.name}"
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
                temporary.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                temporary.rename(target)
        self.in_progress.discard(temporary)
        flush(target.parent)
        return record

    def delete(self, path: str) -> None:
        """Removes a checkpoint, if it is there."""
        target = self.directory(path)
        # Renamed first: a reader sees the whole checkpoint or none, and a server that dies in
        # between removes the rest at its next start.
        gone = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        with self.names, contextlib.suppress(FileNotFoundError):
            target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def set_lifetime(self, record: Record, seconds: int | None) -> None:
        """Sets when a checkpoint expires, from now; None: never."""
        expires = None if seconds is None else time.time() + seconds
        with self.names:
            write_record(self.directory(record.path), replace(record, expires=expires))

    def sweep(self) -> None:
        """Removes the checkpoints whose time has been over for GRACE_SECONDS."""
        for directory in self.root.glob("*/*/*"):
            # The record is read again under the lock: its owner may save a new one by this name.
            with self.names:
                record = read_record(directory)
                if record is not None and record.has_expired_for(GRACE_SECONDS):
                    self.delete(record.path)


LOCKED: dict[Path, TextIO] = {}  # the locks of the stores of this process


def take_lock(root: Path) -> None:
    """Locks a store until this process ends. Raises UserError if another process has it."""
    path = root.resolve()
    if path not in LOCKED:
        LOCKED[path] = lock_directory(root, f"--store {root}")
        atexit.register(LOCKED[path].close)  # an open file at the exit is a ResourceWarning


def is_expired(directory: Path) -> bool:
    """Whether a checkpoint's time is over."""
    record = read_record(directory)
    return record is not None and record.is_expired


NOTICED: set[Path] = set()  # records that are skipped with a line that has been printed


def read_record(directory: Path) -> Record | None:
    """Returns the record in a directory, or None if it is no complete checkpoint.

    A record that cannot be read, such as one of a newer version, is skipped with one line.
    """
    if directory.name.startswith((TEMPORARY, REPLACED)):
        return None
    try:
        text = read_text(directory / RECORD, MAX_RECORD_BYTES)
        record = record_of(json_values.as_object(json_values.parse(text)))
        if directory.parts[-3:] != (record.run, record.kind, record.name):
            raise ValueError(f"it is the record of {shown(record.path)}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # also UserError
        if directory not in NOTICED:
            NOTICED.add(directory)
            reason = shown(" ".join(str(error).split()))
            terminal.write(f"{directory}: the checkpoint is skipped: {RECORD}: {reason}")
        return None
    return record


def record_of(values: dict[str, JsonValue]) -> Record:
    """Returns the record that JSON describes. Raises ValueError for what no record has."""
    names = {item.name for item in fields(Record)}
    if unknown := sorted(values.keys() - names):
        raise ValueError(f"{shown(unknown[0])} is an unknown field, of a newer version")
    if missing := sorted(names - values.keys() - {"digest"}):
        raise ValueError(f"{missing[0]} is missing")

    def text(name: str) -> str:
        return json_values.bounded_text(values[name], 1 << 10, name)

    def number(name: str) -> int:
        return json_values.bounded_int(values[name], 0, 2**63 - 1, name)

    def seconds(name: str) -> float:
        return json_values.bounded_number(values[name], 0, LATEST_TIME, name)

    def metadata(name: str) -> Metadata | None:
        if values[name] is None:
            return None
        # Pydantic has its own name for JSON.
        return cast(Metadata, json_values.as_object(values[name], name))

    targets = json_values.bounded_list(values["targets"], 1 << 10, "targets")
    record = Record(
        run=text("run"),
        kind=text("kind"),
        name=text("name"),
        owner=text("owner"),
        base_model=text("base_model"),
        base_hash=text("base_hash"),
        rank=json_values.bounded_int(values["rank"], 1, 2**16, "rank"),
        targets=tuple(json_values.bounded_text(one, 1 << 10, "targets") for one in targets),
        seed=number("seed"),
        step=json_values.bounded_int(values["step"], 0, 2**31 - 1, "step"),
        created=seconds("created"),
        expires=None if values["expires"] is None else seconds("expires"),
        size=number("size"),
        user_metadata=metadata("user_metadata"),
        run_metadata=metadata("run_metadata"),
        digest=json_values.bounded_text(values.get("digest", ""), 1 << 10, "digest"),
    )
    if PATH.fullmatch(record.path) is None:
        raise ValueError(f"{shown(record.path)} is not the path of a checkpoint")
    return record


def write_record(directory: Path, record: Record) -> None:
    """Writes a record, which appears when it is complete."""
    half = directory / f"{RECORD}.new"
    half.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    flush(half)
    half.rename(directory / RECORD)


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file, or "" if there is none."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Waits until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_moments(directory: Path, moments: dict[str, np.ndarray]) -> None:
    """Writes the moments of Adam by name."""
    write_tensors(directory / OPTIMIZER, moments)


def read_moments(directory: Path) -> dict[str, np.ndarray]:
    """Returns the moments of Adam. Raises UserError if the checkpoint has none."""
    file = directory / OPTIMIZER
    if not file.exists():
        raise UserError(
            "the checkpoint has no optimizer state: load it without, or one of kind weights"
        )
    return safetensors_numpy.load_file(file)


def hash_of_model(directory: Path) -> str:
    """Returns a SHA-256 of a model: its config.json and its weights."""
    digest = hashlib.sha256()
    for file in files_of_model(directory):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def files_of_model(directory: Path) -> Iterator[Path]:
    """Yields the files that define a model, in order."""
    yield directory / "config.json"
    yield from sorted(directory.glob("*.safetensors"))
