"""Commands that end at a bad moment: signals, a full disk, a read-only folder, a broken disk.

A command ends with one line or by the signal, without a traceback. A file has its complete content
or its earlier one under its name, and the same command succeeds afterwards.

The disk fails in this process: the n-th call that opens, flushes or renames a file of the output's
folder raises an error, for every n until the command succeeds.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jzero import filter as filter_command
from jzero import grade, report
from tests.attacks.conftest import Tries
from tests.attacks.test_values_fields import write_run

ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
)
MOST_CALLS = 40  # of one command
ROOT = Path(__file__).resolve().parents[2]


class Disk:
    """Counts the calls that change files of a folder; the call number `fails_at` raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.fails_at = 0
        self.error = 0
        self.calls = 0

    def call(self, path: object) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(self.folder):
            return
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(self.error, os.strerror(self.error), str(path))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that fails for the files of the folder "out"."""
    folder = tmp_path / "out"
    folder.mkdir()
    found = Disk(folder)
    real_open, real_replace, real_fsync = builtins.open, os.replace, os.fsync

    def opening(path: object, mode: str = "r", *arguments: object, **options: object) -> object:
        if set(mode) & set("wax+"):
            found.call(path)
        return real_open(path, mode, *arguments, **options)  # type: ignore[call-overload]

    def replacing(source: str, target: str) -> None:
        found.call(target)
        real_replace(source, target)

    def flushing(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            found_path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.call(found_path)
        real_fsync(descriptor)

    monkeypatch.setattr(builtins, "open", opening)
    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(os, "fsync", flushing)
    return found


def write_inputs(folder: Path) -> None:
    rows = [{"problem": f"{number} + 1?", "answer": str(number + 1)} for number in range(5)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rates = [{"id": f"mine/{number}", "accuracy": 0.5} for number in range(5)]
    (folder / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rates))
    answers = [
        {"id": number, "task": "math", "gold": "2", "prediction": "\\boxed{2}"}
        for number in range(3)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    write_run(folder / "run")


def filter_arguments(folder: Path) -> list[str]:
    return [
        f"--data={folder}/data.jsonl",
        f"--rates={folder}/rates.jsonl",
        f"--out={folder}/out/kept.jsonl",
        "--force",
    ]


def grade_arguments(folder: Path) -> list[str]:
    source, out = folder / "answers.jsonl", folder / "out/grades.jsonl"
    return [f"--in={source}", f"--out={out}", "--force", "--workers=1"]


def report_arguments(folder: Path) -> list[str]:
    return [f"{folder}/run", f"--out={folder}/out/report.html"]


COMMANDS: dict[str, tuple[Callable[[], None], Callable[[Path], list[str]], str]] = {
    "filter": (filter_command.main, filter_arguments, "kept.jsonl"),
    "grade": (grade.main, grade_arguments, "grades.jsonl"),
    "report": (report.main, report_arguments, "report.html"),
}


def run_here(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a command in this process; returns its exit status."""
    main, arguments, _ = COMMANDS[command]
    monkeypatch.setattr(sys, "argv", [command, *arguments(folder)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def normalized(content: bytes) -> object:
    """Returns an output without what differs between two equal runs: seconds and nonces."""
    if content.startswith(b"{"):
        return [json.loads(line) | {"seconds": 0} for line in content.splitlines()]
    return len(content) // 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_fails(
    command: str,
    tmp_path: Path,
    disk: Disk,
    tries: Tries,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # `cli.exit_at_once` would end this process.
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    write_inputs(tmp_path)
    out = tmp_path / "out" / COMMANDS[command][2]
    assert run_here(command, tmp_path, monkeypatch) == 0
    complete = normalized(out.read_bytes())
    num_calls = disk.calls
    assert 0 < num_calls < MOST_CALLS
    for number in range(1, num_calls + 1):
        # A grader process starts for each try: one error for each of its calls.
        for error in ERRORS if command != "grade" else ERRORS[number % 2 :: 4]:
            name = f"{command}: call {number} fails with {errno.errorcode[error]}"
            with tries.attempt("ends", name):
                capsys.readouterr()
                disk.calls, disk.fails_at, disk.error = 0, number, error
                status = run_here(command, tmp_path, monkeypatch)
                written = capsys.readouterr().err
                disk.fails_at = 0
                assert status in (0, 2), status
                if status:
                    assert written.startswith("error: ")
                    assert len(written.splitlines()) == 1, written
                assert normalized(out.read_bytes()) == complete
    assert run_here(command, tmp_path, monkeypatch) == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name], "no other file is left"


# -- Signals ---------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_SECONDS = 60


def moments(count: int, seed: str) -> Iterator[float]:
    """Yields seconds after the start of a process: imports, its work, its end."""
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.uniform(0.05, 4.0)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("command", [*COMMANDS, "watch"])
def test_a_signal_at_any_moment(
    command: str,
    number: signal.Signals,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    tries: Tries,
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "out").mkdir()
    count = 8 if request.config.getoption("--all-tries") else 1
    for seconds in moments(count, f"{command} {number.name}"):
        if command == "watch":
            arguments = [str(tmp_path / "run"), "--port=0"]
        else:
            arguments = COMMANDS[command][1](tmp_path)
        with tries.attempt("ends", f"{command}: {number.name} after {seconds:.2f} s"):
            # A process inherits the signals that its parent ignores.
            before = signal.signal(number, signal.SIG_DFL)
            process = subprocess.Popen(
                [sys.executable, "-m", "jzero", command, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            signal.signal(number, before)
            time.sleep(seconds)
            process.send_signal(number)
            _, errors = process.communicate(timeout=LONGEST_SECONDS)
            # Ended by the signal, stopped, or finished before it.
            assert process.returncode in (-number, 130, 0), (process.returncode, errors)
            # Python reports a signal during its own start.
            assert "Traceback" not in errors or seconds < 0.5, errors
            if command != "watch":
                out = tmp_path / "out" / COMMANDS[command][2]
                assert not out.exists() or out.stat().st_size > 100


PROGRAMS = [
    path.stem
    for path in sorted((ROOT / "jzero").glob("*.py"))
    if path.stem != "__main__" and 'if __name__ == "__main__":' in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", [*PROGRAMS, "tinker/__main__", "config/__main__"])
def test_every_program_ends_as_a_command_does(name: str) -> None:
    body = (ROOT / f"jzero/{name}.py").read_text("utf-8").partition('if __name__ == "__main__":')[2]
    assert body.strip().startswith("terminal.run_command(")


@pytest.mark.parametrize("name", [*PROGRAMS, "tinker", "config"])
def test_ctrl_c_during_the_imports_of_a_program(name: str, tries: Tries) -> None:
    # After the package itself come the imports of the command, which take seconds.
    with tries.attempt("ends", f"python -m jzero.{name}: SIGINT during the imports"):
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", f"jzero.{name}", "--help"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr
        lines = []
        for line in process.stderr:  # a line for each module
            lines.append(line)
            if line.rpartition("|")[2].strip() == "jzero":
                process.send_signal(signal.SIGINT)
                break
        lines += process.communicate(timeout=LONGEST_SECONDS)[1].splitlines(keepends=True)
        written = [line for line in lines if not line.startswith("import time:")]
        assert process.returncode in (-signal.SIGINT, 130, 0), "".join(written)
        assert "Traceback" not in "".join(written)
