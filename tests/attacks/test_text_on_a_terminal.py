"""Foreign text on a terminal: no control character of a response, a log or a name reaches it."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jzero import audit, chat, cli, compare, grade, play, terminal
from jzero.errors import UserError
from jzero.hosts import processes
from jzero.run import samples
from jzero.workers.pool import Pool
from tests.attacks.conftest import Tries
from tests.hostile_values import CONTROLS, TEXTS

# Line feeds and tabs are part of the form of a text.
OBEYED = set(CONTROLS) - set("\n\t")
SEQUENCES = {
    **{name: text for name, text in TEXTS.items() if isinstance(text, str) and len(text) < 1000},
    **{f"U+{ord(char):04X}": f"a{char}b" for char in sorted(OBEYED)},
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "hyperlink": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "query": "\x1b[6n\x05",
}
ORDINARY = [
    "plain text",
    "\u4e2d\u6587\u3000\u5168\u89d2",  # Chinese with a wide space
    "e\u0301",
    "a\nb\tc",
    "caf\u00e9 \u2014\u00a0",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",  # emoji with joiners
]


def answer_row(text: str) -> dict[str, object]:
    """Returns a row of an evaluation in which every text is `text`."""
    return {
        "id": text,
        "prompt": text,
        "gold": text,
        "accuracy": 0.0,
        "samples": [{"response": text}],
    }


def show_comparison(text: str) -> None:
    better = answer_row(text) | {"accuracy": 1.0}
    terminal.write("\n".join(compare.flips([answer_row(text)], [better], 5)))


class Answering:
    """A model that answers every message with one text."""

    is_chat = True

    def __init__(self, text: str) -> None:
        self.system_prompt = text
        self._text = text

    def answer(self, _: str, write: Callable[[str], None]) -> None:
        for char in self._text:
            write(char)
        raise UserError(self._text)


def show_chat(text: str) -> None:
    for is_terminal in (True, False):
        source = io.StringIO("hello\n")
        chat.talk(Answering(text), source, sys.stdout, is_terminal=is_terminal)  # type: ignore[arg-type]


def show_audit(text: str) -> None:
    example = {"outside": False, "line": 1, "position": 0, "token": 1, "rank": 1, "computed": 0.0}
    finding = {"cause": text, "lines": [1], "versions": [text], "numbers": text, "example": example}
    report = {"responses": 1, "tokens": 1, "with_logprobs": 0, "rejected": 1, "dtype": "float32"}
    audit.write_text(report | {"noise": 0.1, "findings": [finding]})


def show_error(text: str) -> None:
    with contextlib.suppress(SystemExit), cli.user_errors():
        raise UserError(f"file {text}")


def show_note(text: str) -> None:
    with Pool(0) as pool:
        pool.show_note(text, "printed", text)


def show_phase(text: str) -> None:
    with terminal.phase(text, total=2) as phase:
        terminal.set_note(text)
        phase.advance()
        terminal.say(terminal._TERMINAL.status(), is_error=True)
    terminal.set_note("")


def show_play(text: str) -> None:
    terminal.write(f"observation\n{play.indented(text)}")
    terminal.write(play.shown(text))


SHOWN: dict[str, Callable[[str], None]] = {
    "compare": show_comparison,
    "chat": show_chat,
    "play": show_play,
    "audit": show_audit,
    "an error": show_error,
    "a reward's output": show_note,
    "a phase": show_phase,
    "say": terminal.say,
    "an error above bars": lambda text: terminal.say(text, is_error=True),
    "print_once": processes.print_once,
    "print_everywhere": processes.print_everywhere,
    "samples of a run": lambda text: terminal.write("\n".join(samples._wrapped(text))),
    "grade": lambda text: terminal.write(grade.Agreement([text, text]).table()),
}


@pytest.mark.parametrize("surface", SHOWN)
def test_no_control_character_reaches_the_terminal(
    surface: str, capsys: pytest.CaptureFixture[str], tries: Tries
) -> None:
    for name, text in SEQUENCES.items():
        with tries.attempt("terminal", f"{surface}: {name}"):
            SHOWN[surface](text)
            written = "".join(capsys.readouterr())
            assert not OBEYED & set(written), repr(written)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_shown_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(text)
    assert capsys.readouterr().out == text + "\n"


def test_a_live_terminal_shows_escapes() -> None:
    from rich.console import Console

    shown = terminal.Terminal()
    stream = io.StringIO()
    shown._live = SimpleNamespace(console=Console(file=stream))  # type: ignore[assignment]
    shown.say("a\x1b[31m\u202eb")
    assert stream.getvalue() == "a\\x1b[31m\\u202eb\n"


def test_a_stream_of_ascii_takes_every_text() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.write("caf\u00e9 \ud800", stream)
    stream.seek(0)
    assert stream.read() == "caf\\xe9 \\ud800\n"


def test_files_of_hostile_names_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tries: Tries
) -> None:
    for name, text in SEQUENCES.items():
        if "\0" in text or "/" in text or not text.isascii():
            continue
        path = tmp_path / text
        path.write_text("{")
        with tries.attempt("terminal", f"file name: {name}"):
            with contextlib.suppress(SystemExit), cli.user_errors():
                compare.read_jsonl(path.parent / (text + "\n"))
                raise UserError(f"{path} is damaged")
            written = "".join(capsys.readouterr())
            assert not OBEYED & set(written)
            assert len(written.splitlines()) == 1


def test_the_traceback_of_a_fault_has_escapes() -> None:
    code = "from jzero import cli\nwith cli.user_errors(): raise ValueError('\\x1b[2J')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: \\x1b[2J\n")
