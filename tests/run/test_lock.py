"""A workdir has one writer, keeps its history, and names its damaged files."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jzero.config import Config, to_json
from jzero.errors import UserError
from jzero.files import read_jsonl
from jzero.run.lock import NAME, NO_LOCKS, lock_directory
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.workdir import check_history, check_workdir

HOLDER = """
import sys
from pathlib import Path
from jzero.run.lock import NAME, NO_LOCKS, lock_directory
file = lock_directory(Path(sys.argv[1]), "--workdir")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def write_metrics(workdir: Path, last_step: int) -> None:
    """Writes metrics.jsonl with a line for each step."""
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, last_step + 1)]
    (workdir / "metrics.jsonl").write_text("".join(rows))


def test_a_second_process_is_refused_with_the_first_ones_number(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--workdir W is in use .*{holder.pid}"):
        lock_directory(tmp_path, "--workdir W")


def test_a_killed_process_leaves_no_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()

    with lock_directory(tmp_path, "--workdir W"):
        pass


@pytest.mark.parametrize("left", ["", '{"host": "x", "pid": 1}', "\x00" * 5000, '{"pid": PID}'])
def test_a_file_that_was_left_behind_locks_nothing(tmp_path: Path, left: str) -> None:
    """Also one with the number of a process that lives: numbers are given anew."""
    (tmp_path / NAME).write_text(left.replace("PID", str(os.getpid())))
    with lock_directory(tmp_path, "--workdir W"):
        owner = json.loads((tmp_path / NAME).read_text())
    assert owner["pid"] == os.getpid()


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_file_system_without_locks_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    for last in ("unknown", f'"pid": {os.getpid()}'):
        with lock_directory(tmp_path, "--workdir W"):
            pass
        [line] = capsys.readouterr().out.splitlines()
        assert line.startswith(
            f"--workdir W is on a file system without locks ({os.strerror(number)})"
        )
        assert last in line


def test_metrics_whose_checkpoints_are_gone_are_not_cut(tmp_path: Path) -> None:
    write_metrics(tmp_path, 5)

    with pytest.raises(UserError, match="metrics up to step 5 and no checkpoint: bring"):
        check_history(tmp_path, checkpoint_every=4)

    (tmp_path / "checkpoints").mkdir()
    check_history(tmp_path, checkpoint_every=4)  # a kill may come while the first one is written
    write_metrics(tmp_path, 8)
    with pytest.raises(UserError, match="metrics up to step 8 and no checkpoint"):
        check_history(tmp_path, checkpoint_every=4)
    (tmp_path / "checkpoints" / "4").mkdir()
    check_history(tmp_path, checkpoint_every=4)


@pytest.mark.parametrize("checkpoint_every", [0, -1])
def test_a_run_without_regular_checkpoints_does_not_start_over(
    tmp_path: Path, checkpoint_every: int
) -> None:
    (tmp_path / "checkpoints").mkdir()
    check_history(tmp_path, checkpoint_every)
    write_metrics(tmp_path, 1)
    with pytest.raises(UserError, match="or delete its metrics.jsonl to start over"):
        check_history(tmp_path, checkpoint_every)


def test_a_damaged_line_is_named_and_the_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = '{"step": 1}\n{"step": 2,,}\n{"step": 3}\n'
    path.write_text(damaged)

    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is damaged .*restore or remove it"):
        read_jsonl(path)
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is damaged"):
        MetricsWriter(tmp_path, resume_step=3)

    assert path.read_text() == damaged


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"'])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(UserError, match=r"config.json is damaged"):
        check_workdir(tmp_path, to_json(Config()))


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long, give another"):
        check_workdir(tmp_path / ("x" * 300), to_json(Config()))
