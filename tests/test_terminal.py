"""The terminal: phases with bars on a terminal, plain lines in a log."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jzero import terminal
from jzero.errors import UserError
from jzero.run.doctor import Finding
from jzero.run.samples import sample_lines
from jzero.terminal import Phase, Terminal

ROOT = Path(__file__).resolve().parents[1]

WORK = """
import sys, time
from jzero import terminal
with terminal.phase("RL", total=3, done=1) as run:
    with terminal.phase("evaluate"), terminal.phase("sample", total=512) as phase:
        phase.advance(210)
        time.sleep(0.6)
        terminal.say("a line")
        print("of a user's function")
        print("on stderr", file=sys.stderr)
    {ending}
terminal.say("the end")
"""


# Makes the terminal of stdin the one whose Ctrl-C the program gets, and runs the program.
IN_A_SESSION = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


def run_on_terminal(program: str, ctrl_c_after: str = "") -> tuple[int, str]:
    """Runs a program on a pseudo-terminal; returns its exit status and what the terminal gets.

    Ctrl-C is pressed half a second after the terminal has got the text `ctrl_c_after`: the program
    has then left the call that printed it.
    """
    file, side_of_program = pty.openpty()
    # `pty.fork` would fork this process, which JAX has filled with threads.
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_SESSION, program],
        stdin=side_of_program,
        stdout=side_of_program,
        stderr=side_of_program,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    os.close(side_of_program)
    output = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([file], [], [], 0.1)[0]:
            try:
                output += os.read(file, 65536)
            except OSError:  # the program has ended
                break
        if ctrl_c_after and ctrl_c_after.encode() in output:
            time.sleep(0.5)
            os.write(file, b"\x03")
            ctrl_c_after = ""
    status = process.wait(60)
    os.close(file)
    return status, output.decode()


def final_screen(output: str) -> list[str]:
    """Returns the lines that remain on a terminal after `output`."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\r":
            continue
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part.endswith("K"):
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] += part
    return [line for line in lines if line]


def test_notices_leave_stdout_to_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = terminal.Terminal()
    monkeypatch.setattr(terminal, "_TERMINAL", shown)
    shown.say("before")

    @terminal.keep_stdout_for_answers()
    def main() -> None:
        shown.say("KV cache: 1 GiB")
        terminal.write("an answer")
        raise UserError("the command failed")

    with pytest.raises(UserError):
        main()
    shown.say("after")

    out, err = capsys.readouterr()
    assert (out, err) == ("before\nan answer\nafter\n", "KV cache: 1 GiB\n")


def test_a_terminal_shows_bars_and_keeps_only_the_lines() -> None:
    status, output = run_on_terminal(WORK.format(ending="pass"))

    assert status == 0
    assert "RL 1/3" in output and "evaluate: sample 210/512" in output
    lines = ["a line", "of a user's function", "on stderr", "the end"]
    assert final_screen(output) == lines
    assert "\x1b[?25l" not in output, "a killed process could not show the cursor again"


PHASES = """
import time
from jzero import terminal
terminal.REFRESHES_PER_SECOND = 500
with terminal.phase("RL", total=300) as run:
    for number in range(300):
        with terminal.phase("sample"):
            time.sleep(0.003)
        terminal.say(f"line {number}")
        run.advance()
"""


def test_no_line_is_erased_by_phases_that_come_and_go() -> None:
    _, output = run_on_terminal(PHASES)

    assert final_screen(output) == [f"line {number}" for number in range(300)]


def test_an_error_leaves_the_terminal_clean() -> None:
    status, output = run_on_terminal(WORK.format(ending="raise SystemExit(3)"))

    assert status == 3
    assert final_screen(output) == ["a line", "of a user's function", "on stderr"]


def test_ctrl_c_leaves_the_terminal_clean() -> None:
    ending = "print('ready', flush=True); time.sleep(60)"
    work = textwrap.indent(WORK.format(ending=ending), "  ")
    program = f"try:{work}except KeyboardInterrupt: print('stopped')"

    status, output = run_on_terminal(program, ctrl_c_after="ready")

    assert status == 0
    lines = ["a line", "of a user's function", "on stderr", "ready", "stopped"]
    assert [line.removeprefix("^C") for line in final_screen(output)] == lines


def test_a_log_has_no_control_characters() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(ending="pass")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "a line\nof a user's function\nthe end\n"
    assert done.stderr == "on stderr\n"


def test_a_long_phase_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "FIRST_LINE_SECONDS", 0.1)

    shown = Terminal()
    with shown.phase("RL", total=9, done=2), shown.phase("sample", total=4, unit="rows") as phase:
        phase.advance()
        time.sleep(0.9)

    lines = capfd.readouterr().err.splitlines()
    # The pauses double: 0.1, 0.2 and 0.4 seconds.
    assert 2 <= len(lines) <= 3
    for line in lines:
        assert re.fullmatch(r"RL 2/9: sample 1/4 rows, 0:0\d left", line), line


def test_a_muted_process_and_other_threads_show_nothing() -> None:
    shown = Terminal()

    def status_of_phase() -> str:
        with shown.phase("sample"):
            return shown.status()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(status_of_phase).result() == ""
    assert status_of_phase() == "sample, 0:00"
    with shown.phase("RL", total=2):
        status_of_phase()
        # Between two phases of a step.
        assert shown.status() == "RL 0/2: after sample, 0:00"
    shown.is_muted = True
    assert status_of_phase() == ""


def test_the_time_left_is_of_the_items_of_this_process() -> None:
    phase = Phase("RL", total=100, done=90)
    phase.began -= 10

    assert phase.seconds_left() is None, "nothing is known before the first item"
    phase.advance()

    assert phase.seconds_left() == pytest.approx(90, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7.4, "0:07"),
        (725, "12:05"),
        (4325, "1:12:05"),
        (40_000, "11h 06m"),
        (3 * 86400 + 4 * 3600, "3d 04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_a_closed_pipe_does_not_end_the_process() -> None:
    program = "from jzero import terminal\nfor _ in range(9): terminal.say('x' * 99999)\nprint()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    process.wait()

    # Only the program's own print fails.
    assert "terminal.py" not in error


# -- Sampled answers -------------------------------------------------------------------------------

HOSTILE = [
    "\x1b[2J\x1b]0;title\x07",
    "\u202e reversed \u2066",
    "x" * 10_000_000,
    "\n" * 100_000 + "end",
    "e" + "\u0301" * 50_000,
    "\u6570" * 5_000,
    "\r\x00\x85\u2028",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_shown_escaped_and_bounded(text: str) -> None:
    row = {
        "id": text[:300],
        "prompt": [{"role": "user", "content": text}],
        "response": text,
        "score": None,
        "tokens": 10**7,
        "finish": "length",
    }

    lines = sample_lines(20, row)

    assert len(lines) <= 12
    for line in lines:
        assert line.isprintable()
        assert terminal.columns(line) <= 80
        assert len(line) <= 250


def test_an_answer_is_shown_with_the_end_of_its_prompt() -> None:
    row = {
        "id": "17",
        "prompt": "What is 2 + 3?",
        "response": "2 + 3 = 5\n\nThe answer is 5.",
        "score": 1.0,
        "tokens": 12,
        "finish": "stop",
    }

    long = row | {"id": f"math_multiturn/{'x' * 60}/train/17", "prompt": "word " * 60 + "last?"}
    heading, *question = sample_lines(20, long)[:3]
    assert heading.endswith("/train/17: score 1.000, 12 tokens, stop")
    assert heading.startswith("  sample of step 20, problem ...")
    # A prompt that is cut at its start says so.
    assert question[0].startswith("  | ...") and question[1].endswith("last?")

    assert sample_lines(20, row) == [
        "  sample of step 20, problem 17: score 1.000, 12 tokens, stop",
        "  | What is 2 + 3?",
        "  |",
        "  | 2 + 3 = 5",
        "  | The answer is 5.",
    ]


def test_lines_are_broken_between_words_and_paths_lose_their_beginning() -> None:
    path = "/" + "directory/" * 12 + "data.jsonl"

    lines = terminal.wrap(f"task.data  rows({path}) of task.options=answer_mark=number", 40, "  ")

    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("  ...") and lines[1].endswith("data.jsonl)")
    assert "task.options=answer_mark=number" in lines[-1]


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_remarks_fit_a_terminal_and_stay_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    remark = str(Finding(3, "truncated", "100 % are cut at their limit", "Raise the limit. " * 9))
    monkeypatch.setenv("COLUMNS", "80")

    monkeypatch.setattr(sys, "stdout", Screen())
    lines = terminal.wrapped(remark, indent="").splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal.wrapped(remark) == remark


@pytest.mark.parametrize("place", ["collection", "finalizer", "weak reference"])
def test_ctrl_c_is_not_lost_in_a_callback(place: str) -> None:
    """Python only prints an exception of a finalizer, or of a callback of the collector."""
    program = f"""
import gc, signal, time, weakref
from jzero import terminal

class Item:
    pass

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def interrupt(*_):
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGINT)

def command():
    if {place!r} == "collection":
        gc.callbacks.append(interrupt)
        gc.collect()
    elif {place!r} == "finalizer":
        Finalized()
    else:
        item = Item()
        kept = weakref.ref(item, interrupt)
        del item
    time.sleep(50)
    print("went on")

terminal.run_command(command)
"""
    # The wait of the command ends at once.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=40
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
