"""Stores: atomic files, exclusive creation, one clock, and operations that fail for a while."""

import datetime
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from jzero.errors import UserError
from jzero.hosts.interrupt import Interrupted
from jzero.jobs import store_server
from jzero.jobs.leases import SLOW_FACTOR, SLOW_LEASES, Leases, SlowLeases
from jzero.jobs.store import (
    MAX_NOTE_BYTES,
    BadFileError,
    BucketStore,
    FolderStore,
    RetryingStore,
    Store,
    open_store,
    read_note,
)
from jzero.jobs.store_server import KEY_VARIABLE, serve


@pytest.fixture(params=["folder", "bucket", "http"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A store of each kind; fsspec's own file system in memory is the bucket."""
    if request.param == "bucket":
        yield open_store(f"memory://{tmp_path}/store")
    elif request.param == "folder":
        yield open_store(str(tmp_path / "store"))
    else:
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        monkeypatch.setattr(store_server, "FAREWELL_SECONDS", 0.0)
        # The trainer's own folders, which samplers only read.
        folders = ("requests", "results", "leases", "clock", "x", "a")
        monkeypatch.setattr(store_server, "WRITTEN", dict.fromkeys(folders, 1 << 30))
        monkeypatch.setattr(store_server, "REMOVED", folders)
        with serve("127.0.0.1:0", str(tmp_path / "store"), tmp_path) as server:
            yield open_store(server.url)


def test_an_address_has_the_store_of_its_kind(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), FolderStore)
    assert isinstance(open_store("memory://x"), BucketStore)
    with pytest.raises(UserError, match=r"rollout\.placement\.store is empty"):
        open_store("")


def test_a_file_that_is_too_large_is_not_read(store: Store) -> None:
    """Nor is it tried again and again: it stays too large."""
    store.write("results/a", b"1" * 100)
    assert store.read("results/a", 100) == b"1" * 100
    for reader in (store, RetryingStore(store, 600.0)):
        with pytest.raises(BadFileError):
            reader.read("results/a", 99)
    store.write("leases/a", b"1" * (MAX_NOTE_BYTES + 1))
    assert read_note(store, "leases/a") is None


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "link", "socket"])
def test_only_regular_files_of_a_folder_are_read_and_listed(tmp_path: Path, kind: str) -> None:
    store = FolderStore(tmp_path / "store")
    store.write("results/b", b"1")
    path = tmp_path / "store" / "results" / "a"
    makers = {
        "FIFO": os.mkfifo,
        "folder": Path.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "link": lambda path: path.symlink_to(path.with_name("b")),
        "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    }
    makers[kind](path)
    assert store.names("results") == ["b"]
    with pytest.raises(BadFileError):
        store.read("results/a", 100)
    with pytest.raises(BadFileError):
        store.open("results/a")
    store.delete("results/a")
    assert store.create("results/a", b"1")


def test_files_are_written_listed_and_removed(store: Store) -> None:
    assert store.names("requests") == []
    store.write("requests/b", b"1")
    store.write("requests/a", b"2")
    store.write("requests/a", b"3")
    assert store.names("requests") == ["a", "b"]
    assert store.read("requests/a") == b"3"
    store.delete("requests/a")
    store.delete("requests/a")
    assert store.names("requests") == ["b"]
    with pytest.raises(FileNotFoundError):
        store.read("requests/a")


def test_a_file_is_created_once(store: Store) -> None:
    assert store.create("leases/x", b"first")
    assert not store.create("leases/x", b"second")
    assert store.read("leases/x") == b"first"


def test_one_of_many_threads_creates_a_file(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    winners: list[int] = []

    def create(number: int) -> None:
        if store.create("leases/x", str(number).encode()):
            winners.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in winners] == [store.read("leases/x")]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Another process writes two contents in turn, until it is killed."""
    script = (
        "import sys; from pathlib import Path; from jzero.jobs.store import FolderStore\n"
        "store = FolderStore(Path(sys.argv[1]))\n"
        "while True:\n"
        "    store.write('x', b'a' * 300_000)\n"
        "    store.write('x', b'b' * 200_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    store = FolderStore(tmp_path)
    try:
        while not (tmp_path / "x").exists():
            assert writer.poll() is None
            time.sleep(0.01)
        seen = {store.read("x") for _ in range(300)}
    finally:
        writer.kill()
        writer.wait()
    assert seen <= {b"a" * 300_000, b"b" * 200_000}
    # What the kill left over is not a file of the store.
    assert store.names("") == ["x"]


def test_a_full_disk_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    store.write("x", b"old")

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        store.write("x", b"new")
    assert store.read("x") == b"old"
    assert os.listdir(tmp_path) == ["x"]


class FailingFiles(FolderStore):
    """A directory whose next operations fail."""

    failures = 0

    def write(self, name: str, data: bytes) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(name, data)


def test_operations_are_repeated_until_they_succeed(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    files.failures = 2
    store = RetryingStore(files, seconds=60)
    store.write("x", b"1")
    assert store.read("x") == b"1"
    # A missing file is an answer, not a failure.
    with pytest.raises(FileNotFoundError):
        store.read("y")


def test_a_store_that_stays_broken_is_an_error_of_one_line(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    files.failures = 10**6
    with pytest.raises(UserError, match="No space left on device, for 0.2 seconds: repair"):
        RetryingStore(files, seconds=0.2).write("x", b"1")


def test_a_signal_ends_the_repetitions(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    files.failures = 10**6

    def stop() -> None:
        raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        RetryingStore(files, 60, stop).write("x", b"1")


def test_errors_of_a_bucket_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system of fsspec has errors of its own."""
    bucket = BucketStore("memory://retries")
    bucket.write("x", b"1")
    failures = [RuntimeError("connection reset"), ConnectionError("no route")]
    read = type(bucket.files).cat_file

    def cat_file(files: fsspec.AbstractFileSystem, path: str, **options: object) -> bytes:
        if failures:
            raise failures.pop()
        data = read(files, path, **options)
        assert isinstance(data, bytes)
        return data

    monkeypatch.setattr(type(bucket.files), "cat_file", cat_file)
    assert RetryingStore(bucket, 60).read("x") == b"1"
    assert not failures


# -- leases ----------------------------------------------------------------------------------------


def test_a_lease_has_one_holder(store: Store) -> None:
    ours, theirs = Leases(store, "a", 60), Leases(store, "b", 60)
    assert ours.take("r")
    assert not theirs.take("r")
    assert ours.holder_of("r") == theirs.holder_of("r") == "a"
    ours.give_back("r")
    assert theirs.take("r")
    # The lease of another sampler stays.
    ours.give_back("r")
    assert ours.holder_of("r") == "b"


def test_taking_a_lease_twice_succeeds(store: Store) -> None:
    """As after a connection that was cut when the lease had been written."""
    leases = Leases(store, "a", 60)
    assert leases.take("r")
    assert leases.take("r")


def test_an_expired_lease_is_taken(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    lost, other = Leases(store, "lost", 5), Leases(store, "other", 5)
    assert lost.take("r")
    assert not other.is_expired("r", store.now("other"))
    past = store.modified("leases/r") - 6
    os.utime(tmp_path / "leases" / "r", (past, past))
    assert other.is_expired("r", store.now("other"))
    assert other.take("r")
    assert lost.holder_of("r") == "other"


def test_a_renewed_lease_does_not_expire(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    leases = Leases(store, "a", 0.6)
    assert leases.take("r")
    for _ in range(10):
        time.sleep(0.1)
        leases.renew("r")
        assert not leases.is_expired("r", store.now("b"))


def test_a_lost_lease_is_not_renewed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    leases = Leases(store, "a", 0.01)
    assert leases.take("r")
    store.write("leases/r", b"other")
    time.sleep(0.02)
    leases.renew("r")
    assert store.read("leases/r") == b"other"


def test_the_clock_of_a_host_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    assert Leases(store, "a", 60).take("r")
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 10**6)
    other = Leases(store, "b", 60)
    assert not other.take("r")
    assert abs(store.now("b") - clock()) < 30


def test_a_living_sampler_is_slow_after_several_times_of_its_lease(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    slow = SlowLeases(Leases(store, "trainer", 0.05))
    sampler = Leases(store, "a", 0.05)
    assert sampler.take("r")
    assert slow.find(["r", "free"]) == []
    time.sleep(1.2 * SLOW_LEASES * 0.05)
    [(request, holder, seconds)] = slow.find(["r", "free"])
    assert (request, holder) == ("r", "a") and seconds > SLOW_LEASES * 0.05

    # Another sampler has its own time.
    sampler.give_back("r")
    assert Leases(store, "b", 0.05).take("r")
    time.sleep(0.05)
    assert slow.find(["r"]) == []


def test_long_requests_have_more_time_before_their_sampler_is_slow(tmp_path: Path) -> None:
    slow = SlowLeases(Leases(FolderStore(tmp_path), "trainer", 1.0))
    assert slow.limit == SLOW_LEASES
    for seconds in (20.0, 1000.0, 30.0):
        slow.count_answer(seconds)
    assert slow.limit == SLOW_FACTOR * 30


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize("has_zone", [False, True])
def test_a_time_of_a_bucket_is_in_utc(
    zone: str, has_zone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of fsspec's file systems return their time without a zone."""
    stamp = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC if has_zone else None)
    store = BucketStore("memory://times")
    monkeypatch.setattr(store.files, "modified", lambda path: stamp)
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert store.modified("a") == 1772366400.0
    finally:
        monkeypatch.undo()
        time.tzset()
