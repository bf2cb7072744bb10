"""The weights of policy versions in a store: full snapshots, and differences between versions.

The identity of a snapshot is a hash of the run, the version, and the SHA-256 of every tensor. It
does not depend on how the tensors are stored, and a reader checks every tensor before it uses one:
a file that is torn, that belongs to another version or to another run is never sampled from.

Between two full snapshots, a tensor is stored as the XOR of its bytes with those of the version
before, by byte planes (first the first byte of every number, then the second), and compressed by
zlib. An optimizer step changes few high bytes, so these planes are almost 0.
`benchmarks/jobs_snapshots.py` measures it.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import ml_dtypes
import numpy as np

from jzero.errors import reason_of, shown
from jzero.jobs.store import BadFileError, Store, read_if_exists, read_note
from jzero.json_values import as_list, as_object, as_text, bounded_int, from_fields, parse
from jzero.types import JsonValue

FOLDER = "snapshots"
NEWEST = f"{FOLDER}/newest"
LEVEL = 1  # of zlib: higher levels are slower and save little on these bytes
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int8": np.int8}

MAX_VERSION = 2**31 - 1
MAX_DIGITS = 10  # of a version in the name of a file
MAX_SIZE = 2**40  # numbers of a tensor
MAX_MANIFEST_BYTES = 64 << 20

Tensors = dict[str, np.ndarray]


class SnapshotError(Exception):
    """A snapshot that is missing, damaged, or not the one that was asked for."""


# -- Tensors as bytes ------------------------------------------------------------------------------


def bytes_of(tensor: np.ndarray) -> np.ndarray:
    """Returns the bytes u8[size] of a tensor."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def digest(tensor: np.ndarray) -> str:
    """Returns the SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(bytes_of(tensor).data).hexdigest()


def encode(tensor: np.ndarray, previous: np.ndarray | None = None) -> bytes:
    """Compresses a tensor, or its difference to `previous`, which has the same shape and type."""
    data = bytes_of(tensor)
    if previous is not None:
        # XOR, because it is exact for every type, and undoes itself.
        data = data ^ bytes_of(previous)
    planes = data.reshape(-1, tensor.itemsize).T
    return zlib.compress(np.ascontiguousarray(planes).data, LEVEL)


def decode(
    data: bytes,
    dtype: str,
    shape: tuple[int, ...],
    previous: np.ndarray | None = None,
) -> np.ndarray:
    """Undoes `encode`. Raises SnapshotError if the data do not have the size of such a tensor."""
    kind = np.dtype(DTYPES[dtype])
    size = math.prod(shape) * kind.itemsize
    try:
        # Bounded: damaged or hostile data must not fill the memory.
        plain = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise SnapshotError(f"a tensor cannot be decompressed ({error})") from None
    if len(plain) != size:
        raise SnapshotError(f"a tensor has {len(plain)} bytes instead of {size}")
    planes = np.frombuffer(plain, np.uint8).reshape(kind.itemsize, -1)
    # A copy, because the bytes are read-only.
    result = planes.T.copy().reshape(-1)
    if previous is not None:
        result ^= bytes_of(previous)
    return result.view(kind).reshape(shape)


# -- Manifests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A tensor of a snapshot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of the bytes of the tensor
    file: str  # in the folder of snapshots

    @classmethod
    def parse(cls, row: dict[str, JsonValue]) -> "Entry":
        """Reads a row of a manifest. Raises ValueError, KeyError or TypeError if it is damaged."""
        shape = [bounded_int(size, 0, MAX_SIZE, "a size") for size in as_list(row["shape"])]
        entry = from_fields(cls, {**row, "shape": tuple(shape)})
        for name in ("name", "dtype", "sha256", "file"):
            as_text(getattr(entry, name), name)
        if entry.dtype not in DTYPES or "/" in entry.file or math.prod(shape) > MAX_SIZE:
            raise ValueError(f"tensor {shown(entry.name)}")
        return entry


@dataclass(frozen=True)
class Manifest:
    """The description of a snapshot."""

    run: str
    version: int
    base: str  # SHA-256 of the weights under an adapter; "" for a full model
    entries: tuple[Entry, ...]
    # The identity of the version before, if the tensors are stored as differences to it.
    previous: str | None = None

    @property
    def identity(self) -> str:
        """A hash of everything but the way in which the tensors are stored."""
        tensors = [[e.name, e.dtype, list(e.shape), e.sha256] for e in self.entries]
        text = json.dumps([self.run, self.version, self.base, tensors])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Reads the content of the file. Raises SnapshotError if it is damaged."""
        try:
            values = as_object(parse(data.decode()))
            entries = [Entry.parse(as_object(row)) for row in as_list(values["entries"])]
            manifest = from_fields(cls, {**values, "entries": tuple(entries)})
            bounded_int(manifest.version, 0, MAX_VERSION, "version")
            for name in ("run", "base", "previous"):
                if getattr(manifest, name) is not None:
                    as_text(getattr(manifest, name), name)
            return manifest
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SnapshotError(f"the manifest is damaged ({reason_of(error)})") from None


def read_file(store: Store, name: str, most_bytes: int | None = None) -> bytes | None:
    """Returns the content of a file of the store, None if it does not exist.

    Raises SnapshotError if it is no file, or has more than `most_bytes` bytes.
    """
    try:
        return read_if_exists(store, name, most_bytes)
    except BadFileError as error:
        raise SnapshotError(f"{name}: {error}") from None


def manifest_name(version: int) -> str:
    """Returns the name of the manifest of a version in the store."""
    return f"{FOLDER}/{version:08d}.json"


def version_of(file: str) -> int | None:
    """Returns the version that a file in the folder of snapshots belongs to."""
    digits = file[:8]
    return int(digits) if len(digits) == 8 and is_version(digits) else None


def is_version(name: str) -> bool:
    """Returns whether the name of a file is the number of a version."""
    # isdigit also accepts digits of other scripts and superscripts.
    return len(name) <= MAX_DIGITS and name.isascii() and name.isdigit()


# -- The trainer's side ----------------------------------------------------------------------------


class Publisher:
    """Writes the snapshots of a run.

    Keeps the tensors of the newest version, and the differences to the versions of the last
    `window` publications, in host memory: `repair` can write any of these versions again.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        base: str,
        every: int,
        keep: int,
        window: int,
    ) -> None:
        """`every` and `keep` are the settings snapshot_every and keep_snapshots."""
        self.store = store
        self.run = run
        self.base = base
        self.every = every
        self.keep = keep
        self.window = window
        self.manifests: dict[int, Manifest] = {}  # of the versions in memory
        self.bytes_written = 0  # by the last `publish`
        self._tensors: Tensors = {}  # of the newest version
        # Version -> differences to the version before, by tensor.
        self._differences: dict[int, dict[str, bytes]] = {}

    def publish(self, version: int, tensors: Tensors) -> str:
        """Writes the snapshot of a version, and returns its identity.

        A snapshot with the same identity, from before a kill, is not written again.
        """
        previous = self.manifests.get(version - 1)
        differences = {}
        if previous is not None:
            for name, tensor in tensors.items():
                differences[name] = encode(tensor, self._tensors[name])
        # A fixed rhythm: a resumed run writes the same snapshots again.
        is_full = previous is None or version % self.every == 0
        blobs = differences
        if is_full:
            blobs = {name: encode(tensor) for name, tensor in tensors.items()}
        manifest = self._manifest(version, tensors, blobs, None if is_full else previous)
        self.bytes_written = 0
        if self._identity_in_store(version) != manifest.identity:
            self.bytes_written = self._write(manifest, blobs)
        # After the manifest: a sampler that reads the name finds the snapshot.
        self.store.write(NEWEST, json.dumps([version, manifest.identity]).encode())

        self._tensors = tensors
        self.manifests[version] = manifest
        self._differences[version] = differences
        for old in [v for v in self.manifests if v < version - self.window]:
            del self.manifests[old], self._differences[old]
        return manifest.identity

    def _identity_in_store(self, version: int) -> str | None:
        try:
            data = read_file(self.store, manifest_name(version), MAX_MANIFEST_BYTES)
            return None if data is None else Manifest.parse(data).identity
        except SnapshotError:
            return None

    def _manifest(
        self,
        version: int,
        tensors: Tensors,
        blobs: Mapping[str, bytes],
        previous: Manifest | None,
    ) -> Manifest:
        entries = []
        for number, (name, tensor) in enumerate(tensors.items()):
            # Named by content: a repair never replaces a file that a sampler is reading.
            file = f"{version:08d}-{number:04d}-{hashlib.sha256(blobs[name]).hexdigest()[:16]}"
            dtype = str(tensor.dtype)
            entries.append(Entry(name, dtype, tensor.shape, digest(tensor), file))
        identity = None if previous is None else previous.identity
        return Manifest(self.run, version, self.base, tuple(entries), identity)

    def _write(self, manifest: Manifest, blobs: Mapping[str, bytes]) -> int:
        for entry in manifest.entries:
            self.store.write(f"{FOLDER}/{entry.file}", blobs[entry.name])
        # Last: a reader of the manifest finds all of its files.
        self.store.write(manifest_name(manifest.version), manifest.to_json())
        return sum(map(len, blobs.values()))

    def tensors_of(self, version: int) -> Tensors | None:
        """Returns the tensors of a version, or None if they are not in memory any more."""
        if version not in self.manifests:
            return None
        tensors = dict(self._tensors)
        # XOR undoes itself: a difference leads back, too.
        for later in range(max(self.manifests), version, -1):
            # The first version after a start has no difference to the one before it.
            if not self._differences.get(later):
                return None
            for name, tensor in tensors.items():
                data = self._differences[later][name]
                tensors[name] = decode(data, str(tensor.dtype), tensor.shape, tensor)
        return tensors

    def repair(self, version: int) -> bool:
        """Writes a version again, as a full snapshot. Returns False if it is not in memory."""
        tensors = self.tensors_of(version)
        if tensors is None:
            return False
        blobs = {name: encode(tensor) for name, tensor in tensors.items()}
        repaired = self._manifest(version, tensors, blobs, None)
        assert repaired.identity == self.manifests[version].identity, f"{version=}"
        self._write(repaired, blobs)
        self.manifests[version] = repaired
        return True

    def remove_old(self) -> int:
        """Removes snapshots beyond `keep` full ones. Returns the oldest version that remains."""
        files = self.store.names(FOLDER)
        versions = sorted({v for v in map(version_of, files) if v is not None})
        if not versions:
            return 0
        oldest = versions[0]
        # Repairs add full snapshots, which do not count.
        full = [v for v in versions if v % self.every == 0]
        if self.keep and len(full) > self.keep:
            # Samplers may still need the versions of the window.
            oldest = min(full[-self.keep], *self.manifests)
            oldest -= oldest % self.every
        for file in files:
            version = version_of(file)
            if version is not None and version < oldest:
                self.store.delete(f"{FOLDER}/{file}")
        return oldest


# -- The samplers' side ----------------------------------------------------------------------------


class Reader:
    """Reads the snapshots of a run, and keeps the last one in host memory."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self.identity = ""  # of the tensors in memory
        self._tensors: Tensors = {}

    def newest(self) -> tuple[int, str] | None:
        """Returns the newest version and its identity, or None before the first."""
        data = read_note(self.store, NEWEST)
        if data is None:
            return None
        try:
            version, identity = as_list(parse(data.decode()))
            return bounded_int(version, 0, MAX_VERSION), as_text(identity)
        # A damaged file counts as none: the trainer replaces it with its next version.
        except ValueError:
            return None

    def manifest(self, version: int) -> Manifest:
        """Returns the manifest of a version. Raises SnapshotError if it cannot be read."""
        data = read_file(self.store, manifest_name(version), MAX_MANIFEST_BYTES)
        if data is None:
            raise SnapshotError(f"version {version} is not in the store")
        manifest = Manifest.parse(data)
        # Two runs may have used the same store, one after the other.
        if manifest.run != self.run:
            raise SnapshotError(f"version {version} belongs to another run")
        return manifest

    def load(self, version: int, identity: str) -> Tensors:
        """Returns the tensors of a version.

        Raises SnapshotError unless the store has exactly the snapshot with this identity.
        """
        if identity != self.identity:
            # From the newest manifest back; the tensors are built in the other direction.
            chain = self._chain(version, identity)
            # A chain that ends in a difference continues from the version in memory.
            tensors = self._tensors if chain[-1].previous is not None else {}
            for manifest in reversed(chain):
                tensors = {
                    entry.name: self._read(entry, tensors.get(entry.name), manifest)
                    for entry in manifest.entries
                }
            # Only the wanted version is checked: an error in a difference before it shows here,
            # too.
            for entry in chain[0].entries:
                if digest(tensors[entry.name]) != entry.sha256:
                    raise SnapshotError(f"version {version}: {entry.name} has other bytes")
            self._tensors, self.identity = tensors, identity
        return self._tensors

    def _chain(self, version: int, identity: str) -> list[Manifest]:
        """Returns the manifests from a version back to a full one, or to the one in memory."""
        chain: list[Manifest] = []
        wanted: str | None = identity
        while wanted is not None and wanted != self.identity:
            manifest = self.manifest(version)
            # A resumed run may have written other weights under this version.
            if (manifest.version, manifest.identity) != (version, wanted):
                raise SnapshotError(f"version {version} holds other weights")
            chain.append(manifest)
            version, wanted = version - 1, manifest.previous
        return chain

    def _read(self, entry: Entry, previous: np.ndarray | None, manifest: Manifest) -> np.ndarray:
        data = read_file(self.store, f"{FOLDER}/{entry.file}")
        if data is None:
            raise SnapshotError(f"{entry.file} is not in the store")
        if manifest.previous is None:
            return decode(data, entry.dtype, entry.shape)
        if previous is None or (str(previous.dtype), previous.shape) != (entry.dtype, entry.shape):
            raise SnapshotError(f"version {manifest.version}: {entry.name} has no version before")
        return decode(data, entry.dtype, entry.shape, previous)
