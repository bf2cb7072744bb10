"""A disk without room: one line with the file and the bytes, and what was there stays whole.

The limit of the size of a process's files stands for the disk: a write behind it fails as on a full
disk, with another number of the same kind.
"""

import errno
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero import cli
from jzero.errors import UserError
from jzero.files import is_full_disk, naming_full_disk, read_jsonl, write_atomic
from jzero.model.huggingface.writing import write_tensors
from jzero.run.checkpoint import Checkpoints
from jzero.run.metrics_writer import MetricsWriter
from jzero.types import State

LIMIT = 20_000  # bytes of a file
SIZE = 100_000  # bytes that are written
LONG = "x" * SIZE


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets no file of this process grow beyond LIMIT."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state_of(step: int) -> State:
    """Returns a state that fits on the disk only if `step` is 1, as its bits do not repeat."""
    size = 8 if step == 1 else SIZE // 4
    return State({"w": jax.random.normal(jax.random.key(step), (size,))}, (), jnp.int32(step))


def save_text(workdir: Path) -> None:
    write_atomic(workdir / "summary.json", LONG)


def save_metrics(workdir: Path) -> None:
    rows = [f'{{"step": {step}}}\n' for step in range(1, LIMIT // 16)]
    (workdir / "metrics.jsonl").write_text("".join(rows))
    writer = MetricsWriter(workdir, len(rows))
    with full_disk():
        for step in range(len(rows) + 1, LIMIT):
            writer.write(step, {"reward/mean": 1.0})


def save_samples(workdir: Path) -> None:
    writer = MetricsWriter(workdir, None)
    with full_disk():
        writer.write_samples(1, [{"response": LONG}])


def save_weights(workdir: Path) -> None:
    write_tensors(workdir / "model.safetensors", {"w": np.ones(SIZE, np.uint8)})


def save_checkpoint(workdir: Path) -> None:
    checkpoints = Checkpoints(workdir, 2)
    checkpoints.save(2, state_of(2), {"step": 2}, wait=True)


def save_checkpoint_in_the_background(workdir: Path) -> None:
    checkpoints = Checkpoints(workdir, 2)
    checkpoints.save(2, state_of(2), {"step": 2})
    checkpoints.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files left open
@pytest.mark.parametrize(
    ("save", "path"),
    [
        (save_text, "summary.json"),
        (save_metrics, r"metrics.jsonl|tensorboard"),
        (save_samples, "samples.jsonl"),
        (save_weights, "model.safetensors"),
        (save_checkpoint, "checkpoints/2"),
        (save_checkpoint_in_the_background, "checkpoints(/2)?"),
    ],
)
def test_a_full_disk_is_one_line_and_earlier_files_stay(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path], None],
    path: str,
) -> None:
    first = Checkpoints(tmp_path, 2)
    first.save(1, state_of(1), {"step": 1}, wait=True)
    first.close()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    needs_limit = save not in (save_metrics, save_samples)

    monkeypatch.setattr(os, "_exit", sys.exit)  # it would end the tests
    with pytest.raises(SystemExit) as ended, cli.user_errors():
        if needs_limit:
            with full_disk():
                save(tmp_path)
        else:
            save(tmp_path)

    assert ended.value.code == 2
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert re.search(rf"/({path}) cannot be written: File too large", line), line
    assert re.search(r"[\d,]+ bytes are free there\): make room and start the same command", line)
    for file, content in before.items():
        assert file.read_bytes() == content

    resumed = Checkpoints(tmp_path, 2)  # the same command again, with room
    assert resumed.steps() == [1]
    state, _ = resumed.restore(1, state_of(1))
    np.testing.assert_array_equal(state.params["w"], state_of(1).params["w"])
    resumed.save(2, state_of(2), {"step": 2}, wait=True)
    assert resumed.steps() == [1, 2]
    resumed.close()
    assert all(row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl"))


def test_a_full_disk_leaves_no_unfinished_file(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(UserError, match="100,000 bytes are needed"):
        write_atomic(tmp_path / "a.json", LONG)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_known_by_its_number_or_its_text(number: int, tmp_path: Path) -> None:
    assert is_full_disk(OSError(number, os.strerror(number)))
    error = RuntimeError("a library's")
    error.__cause__ = ValueError(f'RESOURCE_EXHAUSTED: writing "x" [{os.strerror(number)}]')
    assert is_full_disk(error)
    text = re.escape(os.strerror(number))
    with pytest.raises(UserError, match=text), naming_full_disk(tmp_path / "x"):
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "x"), ValueError("x"), UserError("y")])
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, naming_full_disk(tmp_path):
        raise error
    assert raised.value is error
