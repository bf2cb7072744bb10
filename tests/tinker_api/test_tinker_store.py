"""Checkpoints: atomic, immutable, owned, and gone when their time is over."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jzero.errors import UserError
from jzero.tinker.store import REPLACED, TEMPORARY, Record, Store

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
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


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
    with pytest.raises(UserError, match="is no path of a checkpoint"):
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
    source = SAVER.format(paths=[str(here), str(here.parents[1])], root=str(tmp_path))
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
