"""The next version is read while a sampler decodes, and errors wait for the main thread."""

import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jzero.jobs.prefetch import Prefetch
from jzero.jobs.snapshots import Publisher, Reader, SnapshotError
from jzero.jobs.store import FolderStore, StoreError
from jzero.jobs.weights import Weights

SECONDS = 30.0  # on a busy machine


class Source:
    """Versions of one tensor in a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.publisher = Publisher(FolderStore(folder), "r", "", every=4, keep=0, window=2)

    def publish(self, version: int) -> str:
        """Publishes a version whose numbers are all its number."""
        return self.publisher.publish(version, {"w": np.full(5, version, np.float32)})

    def reader(self) -> Reader:
        return Reader(FolderStore(self.folder), "r")

    def lose_files(self) -> None:
        for file in (self.folder / "snapshots").iterdir():
            file.unlink()


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_version_is_read_once_it_is_published(tmp_path: Path) -> None:
    source = Source(tmp_path)
    reader = source.reader()
    reader.load(0, source.publish(0))
    prefetch = Prefetch(reader)

    prefetch.start(1)
    identity = source.publish(1)
    wait_until(lambda: reader.identity == identity)
    prefetch.stop()

    # Nothing is read any more.
    source.lose_files()
    assert reader.load(1, identity)["w"].tolist() == [1.0] * 5


def test_the_wait_for_a_version_can_be_ended(tmp_path: Path) -> None:
    source = Source(tmp_path)
    reader = source.reader()
    prefetch = Prefetch(reader)
    start = time.monotonic()

    prefetch.start(1)
    prefetch.stop()

    # Far below the time between two looks for the version, so that no sampler waits for it.
    assert time.monotonic() - start < 10 * reader.store.poll_seconds
    # It can wait for another version afterwards.
    identity = source.publish(2)
    prefetch.start(2)
    wait_until(lambda: reader.identity == identity)


def test_a_damaged_version_leaves_the_one_before(tmp_path: Path) -> None:
    source = Source(tmp_path)
    reader = source.reader()
    first = source.publish(0)
    reader.load(0, first)
    second = source.publish(1)
    [file] = (tmp_path / "snapshots").glob("00000001-*")
    file.write_bytes(b"torn")
    prefetch = Prefetch(reader)

    prefetch.start(1)
    wait_until(lambda: not prefetch.is_running)

    assert reader.identity == first
    # The main thread gets the error.
    prefetch.stop()
    with pytest.raises(SnapshotError):
        reader.load(1, second)


def test_an_error_of_the_store_ends_the_thread(tmp_path: Path) -> None:
    class BrokenStore(FolderStore):
        def read(self, name: str) -> bytes:
            raise StoreError(name)

    prefetch = Prefetch(Reader(BrokenStore(tmp_path), "r"))

    prefetch.start(0)
    wait_until(lambda: not prefetch.is_running)


def test_weights_of_a_sampler_are_read_ahead(tmp_path: Path) -> None:
    source = Source(tmp_path)
    identities = [source.publish(version) for version in range(3)]
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = Weights(source.reader(), lambda params: params, {"w": device}, None, 0.0)

    weights.load(0, identities[0])
    weights.prefetch()
    # Requests of the same version do not read anything.
    weights.load(0, identities[0])
    wait_until(lambda: weights.reader.identity == identities[1])
    source.lose_files()

    assert weights.load(1, identities[1])["w"].tolist() == [1.0] * 5
    with pytest.raises(SnapshotError):
        weights.load(2, identities[2])
