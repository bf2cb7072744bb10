"""Checkpoints: atomic, immutable, owned, and gone when their time is over."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import hostile_values
import pytest

from jzero.errors import UserError
from jzero.tinker import store as stores
from jzero.tinker.store import GRACE_SECONDS, RECORD, REPLACED, TEMPORARY, Record, Store

RUN = "00000000-0000-0000-0000-000000000000:train:0"


def record(name: str = "a", owner: str = "me") -> Record:
    return Record(
        run=RUN,
        kind="weights",
        name=name,
        owner=owner,
        base_model="m",
        base_hash="h",
        rank=8,
        targets=("q",),
        seed=0,
        step=1,
        created=time.time(),
    )


def save(store: Store, item: Record, text: str = "x", overwrite: bool = False) -> Record:
    temporary = store.begin(item, overwrite)
    (temporary / "data").write_text(text)
    return store.commit(temporary, item)


def test_a_checkpoint_is_found_by_its_owner_only(tmp_path) -> None:
    store = Store(tmp_path)
    saved = save(store, record())
    assert saved.size == 1
    assert store.find(saved.path, "me") == saved
    assert store.find(saved.path, "you") is None
    assert store.records("me") == [saved] and store.records("you") == []


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path) -> None:
    store = Store(tmp_path)
    path = save(store, record()).path
    with pytest.raises(UserError, match="overwrite"):
        store.begin(record(), overwrite=False)
    save(store, record(), "y", overwrite=True)
    assert (store.directory(path) / "data").read_text() == "y"
    store.delete(path)
    assert store.find(path, "me") is None
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / "lock"]


@pytest.mark.parametrize(
    "path",
    [
        "tinker://x/weights/a",
        f"tinker://{RUN}/weights/../../a",
        f"tinker://{RUN}/weights/.hidden",
        f"tinker://{RUN}/other/a",
        f"tinker://{RUN}/weights/a/b",
        f"tinker://{RUN}/weights/a\n",
        "/etc/passwd",
    ],
)
def test_a_path_cannot_leave_the_store(tmp_path, path) -> None:
    with pytest.raises(UserError, match="is not the path of a checkpoint"):
        Store(tmp_path).directory(path)


def test_checkpoints_expire(tmp_path) -> None:
    store = Store(tmp_path)
    saved = save(store, record())
    store.set_lifetime(saved, 3600)
    kept = store.find(saved.path, "me")
    assert kept is not None and kept.expires is not None
    store.set_lifetime(replace(saved, expires=None), None)
    store.sweep()
    assert store.find(saved.path, "me") is not None
    save(store, replace(record("b"), expires=time.time() - 1))
    assert [one.name for one in store.records("me")] == ["a"]
    save(store, replace(record("b"), expires=time.time() - GRACE_SECONDS - 1))
    store.sweep()
    assert not store.directory(record("b").path).exists()
    save(store, record("b"))  # the name is free again


def test_a_server_that_ended_between_two_renames_loses_nothing(tmp_path) -> None:
    store = Store(tmp_path)
    path = save(store, record()).path
    directory = store.directory(path)
    directory.rename(directory.parent / f"{REPLACED}{directory.name}")
    (directory.parent / f"{TEMPORARY}half").mkdir()

    again = Store(tmp_path)

    assert again.find(path, "me") is not None
    assert [one.name for one in directory.parent.iterdir()] == ["a"]


SAVER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_tinker_store import Store, record, save
store = Store(Path({root!r}))
number = 0
while True:
    number += 1
    save(store, record(), str(number) * 100_000, overwrite=True)
    print(number, flush=True)
"""


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_in_the_middle_of_saves_leaves_a_whole_checkpoint(tmp_path, moment) -> None:
    here = Path(__file__).parent
    source = SAVER.format(
        paths=[str(path) for path in (here, *here.parents[:2])], root=str(tmp_path)
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as saver:
        assert saver.stdout is not None
        saver.stdout.readline()
        time.sleep(0.003 * moment)
        os.kill(saver.pid, signal.SIGKILL)

    store = Store(tmp_path)

    found = store.find(record().path, "me")
    assert found is not None
    text = (store.directory(found.path) / "data").read_text()
    assert len(text) == found.size
    assert text == text[: len(text) // 100_000] * 100_000
    assert [one.name for one in store.directory(found.path).parent.iterdir()] == ["a"]


# -- several servers, clocks and full disks --------------------------------------------------------

HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from jzero.tinker.store import Store
store = Store(Path({path!r}))
print("has it", flush=True)
time.sleep(60)
"""


def test_a_second_server_of_a_store_is_refused_until_the_first_one_ends(tmp_path) -> None:
    source = HOLDER.format(root=str(Path(__file__).parents[2]), path=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match="is in use by another process"):
            Store(tmp_path)
        holder.kill()
    Store(tmp_path)


def test_a_store_leaves_what_its_own_process_writes(tmp_path) -> None:
    first = Store(tmp_path)
    temporary = first.begin(record(), overwrite=False)
    Store(tmp_path)
    (temporary / "data").write_text("x")
    assert first.commit(temporary, record()).size == 1


def test_a_failed_save_leaves_nothing(tmp_path) -> None:
    store = Store(tmp_path)
    with pytest.raises(OSError, match="disk"), store.writing(record(), overwrite=False) as half:
        (half / "data").write_text("x")
        raise OSError("the disk is full")
    assert list(tmp_path.glob("*/*/*")) == []


def test_a_name_that_appeared_meanwhile_is_not_overwritten(tmp_path) -> None:
    store = Store(tmp_path)
    first, second = (store.begin(record(), overwrite=False) for _ in range(2))
    store.commit(first, record(), overwrite=False)
    with pytest.raises(UserError, match="exists"):
        store.commit(second, record(), overwrite=False)


def test_a_clock_that_is_hours_ahead_removes_nothing(tmp_path, monkeypatch) -> None:
    store, now = Store(tmp_path), time.time()
    path = save(store, replace(record(), expires=now + 3600)).path
    with monkeypatch.context() as patched:
        patched.setattr(stores.time, "time", lambda: now + 2 * 3600)
        assert store.find(path, "me") is None
        store.sweep()
    assert store.find(path, "me") is not None


def test_saves_over_an_expired_name_during_sweeps_all_stay(tmp_path) -> None:
    """The sweep removes only what it has found expired, and never the new checkpoint."""
    store = Store(tmp_path)
    has_ended = threading.Event()

    def sweep() -> None:
        while not has_ended.is_set():
            store.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(60):
            expired = replace(record(), expires=time.time() - GRACE_SECONDS - 1)
            save(store, expired, overwrite=True)
            temporary = store.begin(record(), overwrite=False)
            (temporary / "data").write_text(str(number))
            path = store.commit(temporary, record(), overwrite=False).path
            assert (store.directory(path) / "data").read_text() == str(number)
    finally:
        has_ended.set()
        sweeper.join()


# -- records that are none -------------------------------------------------------------------------


def valid_record(directory: Path) -> dict:
    return json.loads((directory / RECORD).read_text())


@pytest.mark.parametrize("change", [{"a_new_field": 1}, {"expires": 1e12}, {"rank": 10**30}])
def test_a_record_of_another_version_is_skipped_with_one_line(tmp_path, capsys, change) -> None:
    store = Store(tmp_path)
    kept, other = save(store, record("kept")), save(store, record("other"))
    directory = store.directory(other.path)
    (directory / RECORD).write_text(json.dumps(valid_record(directory) | change))

    for _ in range(3):
        assert store.records("me") == [kept]
        store.sweep()

    assert store.find(other.path, "me") is None
    assert directory.exists(), "only its own version may remove it"
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and str(directory) in printed[0], printed


def test_hostile_records_are_skipped(tmp_path) -> None:
    store = Store(tmp_path / "store")
    kept = save(store, record("kept"))
    other = store.directory(save(store, record("other")).path)
    document = valid_record(other)
    for mutation in hostile_values.mutations(document):
        (other / RECORD).write_text(hostile_values.to_json(mutation.document))
        for one in store.records("me"):
            json.dumps(one.body, allow_nan=False).encode()
        assert kept in store.records("me")
    (other / RECORD).unlink()
    for hostile in hostile_values.hostile_files(tmp_path / "files", RECORD):
        if hostile.path.is_symlink() or hostile.path.exists():
            os.rename(hostile.path, other / RECORD)
            assert store.records("me") == [kept], hostile.name
            store.sweep()
            os.rename(other / RECORD, hostile.path)
