"""Workdirs in a bucket: copies that are interrupted, two writers, and the life of a run.

fsspec's file systems `memory` and `file` have the interface of those of gs:// and s3://.
"""

import json
import os
import time
import uuid
from pathlib import Path

import fsspec
import pytest
from runs import STEPS, finish, launch, timeless

from jzero.errors import UserError
from jzero.run import buckets
from jzero.run.buckets import CHECKPOINTS, MANIFEST, Bucket
from jzero.run.finished import find_model


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket in memory. Mirrors are in `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bucket(f"memory://bucket-{uuid.uuid4().hex}/run")


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def read(directory: Path) -> dict[str, str]:
    return {name: (directory / name).read_text() for name in buckets.local_files(directory)}


FILES = {
    "config.json": "{}",
    "metrics.jsonl": "1\n",
    "checkpoints/4/params/a": "four",
    "export-4/model.safetensors": "weights",
}


def test_a_copy_has_what_a_run_wrote_and_nothing_unfinished(bucket, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    unfinished = {
        "lock": "{}",
        "programs/compiled": "x",
        "config.json.tmp": "x",
        "checkpoints/8.orbax-checkpoint-tmp-0/a": "half",
    }
    write(here, FILES | unfinished)
    bucket.upload(here)
    bucket.download(there)
    assert read(there) == FILES
    assert not any((there / name).exists() for name in unfinished)


def test_what_is_removed_or_appended_to_is_so_in_the_next_copy(bucket, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, FILES)
    bucket.upload(here)
    bucket.download(there)
    (here / "checkpoints/4/params/a").unlink()
    write(here, {"metrics.jsonl": "1\n2\n", "checkpoints/8/params/a": "eight"})
    bucket.upload(here)
    write(there, {"programs/compiled": "x"})
    bucket.download(there)
    assert read(there) == read(here)
    assert not (there / "checkpoints/4").exists()
    assert (there / "programs/compiled").exists()
    assert not bucket.files.exists(bucket.path("checkpoints/4/params/a"))


def test_a_part_of_a_run_is_copied(bucket, tmp_path: Path) -> None:
    write(tmp_path / "here", FILES)
    bucket.upload(tmp_path / "here")
    bucket.download(tmp_path / "there", leave_out=(CHECKPOINTS,))
    assert "export-4/model.safetensors" in read(tmp_path / "there")
    assert not (tmp_path / "there" / CHECKPOINTS).exists()


@pytest.mark.parametrize("num_written", range(5))
def test_an_interrupted_copy_leaves_the_one_before(
    bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    here = tmp_path / "here"
    write(here, FILES)
    bucket.upload(here)
    write(here, {"checkpoints/8/params/a": "eight", "checkpoints/8/host": "8", "new": "n"})
    (here / "checkpoints/4/params/a").unlink()
    names: list[str] = []
    put_file, pipe_file = bucket.files.put_file, bucket.files.pipe_file

    def count(name: str) -> None:
        if len(names) == num_written:
            raise ConnectionError("the network is gone")
        names.append(name)

    def put_counted(source: str, target: str) -> None:
        count(target)
        put_file(source, target)

    def pipe_counted(target: str, data: bytes) -> None:
        count(target)
        pipe_file(target, data)

    monkeypatch.setattr(bucket.files, "put_file", put_counted)
    monkeypatch.setattr(bucket.files, "pipe_file", pipe_counted)
    if num_written < 4:
        with pytest.raises(ConnectionError):
            bucket.upload(here)
    else:
        bucket.upload(here)
    monkeypatch.undo()

    bucket.download(tmp_path / "there")
    assert read(tmp_path / "there") == (FILES if num_written < 4 else read(here))
    # The same machine continues.
    bucket.upload(here)
    bucket.download(tmp_path / "third")
    assert read(tmp_path / "third") == read(here)


def test_a_second_writer_is_told_so_and_overwrites_nothing(bucket, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, FILES)
    bucket.upload(first)
    bucket.download(second)
    write(second, {"metrics.jsonl": "second\n"})
    bucket.upload(second)
    write(first, {"metrics.jsonl": "first, and later\n"})
    with pytest.raises(UserError, match=r"was written by another process"):
        bucket.upload(first)
    assert bucket.files.cat_file(bucket.path("metrics.jsonl")) == b"second\n"


def test_a_workdir_is_copied_at_its_end_and_by_a_thread(bucket) -> None:
    with buckets.open_workdir(Path(bucket.address)) as directory:
        write(directory, FILES)
        deadline = time.monotonic() + 20
        while not bucket.read_manifest().files and time.monotonic() < deadline:
            time.sleep(0.05)
        assert bucket.read_manifest().files.keys() == FILES.keys()
        write(directory, {"summary.json": "{}"})
    assert bucket.read_manifest().files.keys() == {*FILES, "summary.json"}
    fetched = Path(buckets.fetch_run(bucket.address))
    assert fetched != directory
    assert read(fetched).keys() == FILES.keys() - {"checkpoints/4/params/a"} | {"summary.json"}


def test_one_process_at_a_time_has_the_mirror(bucket) -> None:
    with (
        buckets.open_workdir(Path(bucket.address)),
        pytest.raises(UserError, match="is in use by another process"),
        buckets.open_workdir(Path(bucket.address)),
    ):
        pass


def test_a_bucket_that_fails_stops_no_run_and_is_told_at_the_end(
    bucket, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(buckets, "LAST_TRIES", 1)
    workdir = buckets.open_workdir(Path(bucket.address))
    expected = pytest.raises(UserError, match=r"lacks the newest files of the run \(ConnectionErr")
    with expected, workdir as directory:
        monkeypatch.setattr(type(bucket.files), "put_file", fail)
        write(directory, FILES)
    monkeypatch.undo()
    assert read(directory) == FILES


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gs://bucket/run", "install gcsfs: pip install gcsfs"),
        ("nosuch://bucket/run", "cannot be opened"),
        ("memory://nothing-here/run", "has no run of jzero"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_line(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        find_model(address)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"number": "1", "files": [["../../x", [1, 2]]]}'])
def test_a_damaged_manifest_is_one_line_and_leaves_the_workdir(bucket, tmp_path, text) -> None:
    bucket.files.pipe_file(bucket.path(MANIFEST), text.encode())
    with pytest.raises(UserError, match=f"{MANIFEST} is damaged"):
        bucket.download(tmp_path / "there")


def test_a_run_continues_on_another_machine(environment: dict[str, str], tmp_path: Path) -> None:
    """A machine is lost after a checkpoint was copied. Its run has the metrics of any other."""
    finish(launch(environment, tmp_path / "whole"))
    address = f"file://{tmp_path}/bucket/run"
    files, root = fsspec.core.url_to_fs(address)

    first = launch(environment | {"XDG_CACHE_HOME": str(tmp_path / "first")}, Path(address))
    while True:
        assert first.poll() is None, first.communicate()
        if files.exists(f"{root}/{MANIFEST}"):
            manifest = json.loads(files.cat_file(f"{root}/{MANIFEST}"))
            if any(name.startswith("checkpoints/4/") for name, _ in manifest["files"]):
                break
        time.sleep(0.05)
    first.kill()
    first.communicate()

    second = environment | {"XDG_CACHE_HOME": str(tmp_path / "second")}
    out, _ = finish(launch(second, Path(address)))
    assert "warm start" not in out
    assert timeless(Path(root) / "metrics.jsonl") == timeless(tmp_path / "whole" / "metrics.jsonl")
    names = os.listdir(root)
    assert f"export-{STEPS}" in names and "lock" not in names and "programs" not in names
