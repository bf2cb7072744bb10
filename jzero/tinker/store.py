"""Checkpoints of adapters on disk, by `tinker://RUN/KIND/NAME`.

    STORE/RUN/KIND/NAME/
      adapter_config.json, adapter_model.safetensors    the adapter as `peft` loads it
      optimizer.safetensors                             Adam's moments, of KIND=weights only
      record.json                                       what it is of, and when it expires

A checkpoint is written to a temporary directory, flushed to the disk, and renamed: whatever kills
the server, there is the old checkpoint, the new one, or none. A checkpoint is never changed after
that, except for its time of expiry.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors_numpy

from jzero.errors import UserError
from jzero.model.huggingface.writing import write_tensors
from jzero.tinker.bodies import KINDS, PATH, Metadata
from jzero.types import JsonValue

RECORD = "record.json"
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

    @property
    def path(self) -> str:
        """Returns the address of the checkpoint."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires < time.time()

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

    def __init__(self, root: Path) -> None:
        """Removes what an earlier server left half written."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        # A server that ended between the two renames of `commit` has left only the old checkpoint.
        for old in root.glob(f"*/*/{REPLACED}*"):
            target = old.parent / old.name.removeprefix(REPLACED)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for half in root.glob(f"*/*/{TEMPORARY}*"):
            shutil.rmtree(half, ignore_errors=True)

    def directory(self, path: str) -> Path:
        """Returns the directory of a checkpoint. Raises UserError if `path` is no address."""
        match = PATH.fullmatch(path)
        if match is None:
            raise UserError(
                f"{path!r} is no path of a checkpoint: they are tinker://RUN/KIND/NAME, where KIND "
                f"is {', '.join(KINDS)}"
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
        target = self.directory(record.path)
        # An expired checkpoint is invisible to its owner, so its name is free before the sweep
        # removes it.
        if target.exists() and not overwrite and not is_expired(target):
            raise UserError(f"{record.path} exists: choose another name, or send overwrite=true")
        temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, temporary: Path, record: Record) -> Record:
        """Makes the checkpoint in `temporary` appear under its name, and returns its record."""
        size = sum(file.stat().st_size for file in temporary.iterdir())
        record = replace(record, size=size)
        write_record(temporary, record)
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        target = self.directory(record.path)
        if target.exists():
            # A directory cannot replace another: move the old one away first.
            old = target.parent / f"{REPLACED}{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(target)
        flush(target.parent)
        return record

    def delete(self, path: str) -> None:
        """Removes a checkpoint."""
        target = self.directory(path)
        # Renamed first: a reader sees the whole checkpoint or none, and a server that dies in
        # between removes the rest at its next start.
        gone = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def set_lifetime(self, record: Record, seconds: int | None) -> None:
        """Sets when a checkpoint expires, from now; None: never."""
        expires = None if seconds is None else time.time() + seconds
        write_record(self.directory(record.path), replace(record, expires=expires))

    def sweep(self) -> None:
        """Removes the checkpoints whose time is over."""
        for directory in self.root.glob("*/*/*"):
            if is_expired(directory):
                record = read_record(directory)
                if record is not None:
                    self.delete(record.path)


def is_expired(directory: Path) -> bool:
    """Whether a checkpoint's time is over."""
    record = read_record(directory)
    return record is not None and record.is_expired


def read_record(directory: Path) -> Record | None:
    """Returns the record in a directory, or None if it is no complete checkpoint."""
    if directory.name.startswith((TEMPORARY, REPLACED)):
        return None
    try:
        fields = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Record(**{**fields, "targets": tuple(fields["targets"])})


def write_record(directory: Path, record: Record) -> None:
    """Writes a record, which appears when it is complete."""
    half = directory / f"{RECORD}.new"
    half.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    flush(half)
    half.rename(directory / RECORD)


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
