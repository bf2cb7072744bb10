"""What a command shows while it works: lines, and the current phases with bars, rates and times.

    with terminal.phase("evaluate"):
        with terminal.phase("sample", total=512) as phase:
            for sequence in sequences:
                ...
                phase.advance()
    terminal.say("a line")

`say` prints notices, and `write` the result of a command. Commands whose result is read by other
programs keep stdout for it (`keep_stdout_for_answers`).

On a terminal, rich draws the phases below the lines, and removes them when they end. In a pipe, a
log file or a notebook, a phase of more than a few seconds prints a line on stderr now and then, and
nothing has control characters.

Only the main thread has phases, and only the first process of a run shows them (`mute`).
"""

import contextlib
import itertools
import logging
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

STATUS_OF_CTRL_C = 128 + signal.SIGINT  # as a shell reports a process that the signal ended
STATUS_OF_BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell reports it, too
WIDTH = 80  # columns that every table and box fits into
BAR_WIDTH = 20  # columns
REFRESHES_PER_SECOND = 4
FIRST_LINE_SECONDS = 10.0  # a log has a line of a phase when nothing was printed for this long,
LONGEST_PAUSE = 60.0  # and pauses between further lines of a phase double up to this length
TICK_SECONDS = 1.0


class Phase:
    """The count of a phase: finished items of a total, and the tokens in them."""

    def __init__(self, name: str, total: int | None = None, done: int = 0, unit: str = "") -> None:
        self.name = name
        self.total = total  # None if it is unknown
        self.done = done
        self.unit = unit
        self.tokens = 0  # sets the rate, if it is not 0
        self.began = time.monotonic()
        self.pause = FIRST_LINE_SECONDS  # before the next line in a log
        self.last_inner = ""  # name of the last phase inside of this one
        self._done_earlier = done  # by an earlier process: not part of the rate
        self._ends_at: float | None = None

    def advance(self, count: int = 1) -> None:
        """Counts finished items."""
        self.done += count

    def set_seconds_left(self, seconds: float) -> None:
        """Sets the remaining time, which is otherwise estimated from the rate of all items."""
        self._ends_at = time.monotonic() + seconds

    def seconds_left(self) -> float | None:
        """Returns the estimated remaining time, or None if nothing is known."""
        if self._ends_at is not None:
            return max(0.0, self._ends_at - time.monotonic())
        done_here = self.done - self._done_earlier
        if self.total is None or not done_here:
            return None
        return (self.total - self.done) * (time.monotonic() - self.began) / done_here

    def count(self) -> str:
        """Returns the finished items, such as "210/512", or "" if there is nothing to count."""
        if self.total is None:
            return f"{self.done:,} {self.unit}".rstrip() if self.done else ""
        return f"{self.done:,}/{self.total:,} {self.unit}".rstrip()

    def speed(self) -> str:
        """Returns the rate and the remaining time, or the elapsed time if neither is known."""
        seconds = time.monotonic() - self.began
        parts = []
        if self.tokens and seconds > 0:
            parts.append(f"{self.tokens / seconds:,.0f} tok/s")
        left = self.seconds_left()
        parts.append(duration(seconds) if left is None else f"{duration(left)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Returns a duration as "0:07", "12:05", "1:12:05", "11h 06m" or "3d 04h"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    if hours >= 10:
        return f"{hours}h {minutes:02}m"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def escaped(text: str) -> str:
    r"""Returns `text` with every character that is not printable as its escape, such as \x1b.

    The escaped characters are control characters, line breaks, and those that change the direction
    of text. A model's answer can therefore not write into the terminal.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


# Control characters other than tabs and line feeds, overrides of the direction of text, lone
# surrogates and line breaks of Unicode. Joiners and wide spaces stay, as emoji and East Asian text
# have them.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Returns text of any origin with its control characters as escapes, such as \x1b.

    Unlike `escaped`, the text keeps its lines and tabs.
    """
    return _CONTROLS.sub(lambda found: _escape(found[0]), text)


def write(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Prints text of any origin, with its control characters made `visible`.

    Every line that jzero prints comes through here. `stream` is stdout by default. A stream in
    ASCII or Latin-1 gets escapes for the characters that it cannot take.
    """
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = visible(text).encode(encoding, "backslashreplace").decode(encoding)
    print(text, file=stream, end=end, flush=True)


def show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints the traceback of an exception, as `sys.excepthook` does, with visible text."""
    write("".join(traceback.format_exception(kind, error, trace)), sys.stderr, end="")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def width() -> int:
    """Returns the columns of the terminal; WIDTH in a pipe or a log."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def wrap(text: str, limit: int, indent: str = "") -> list[str]:
    """Returns the text as lines of at most `limit` columns, broken between words.

    A word that does not fit a line, such as a path, loses its beginning.

    indent: begins all lines after the first.
    """
    most = max(20, limit - len(indent))
    for word in text.split():
        if len(word) > most:
            text = text.replace(word, f"...{word[3 - most :]}")
    return textwrap.wrap(
        text,
        max(limit, len(indent) + 20),
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def fit_lines(text: str) -> str:
    """Returns a text whose lines have at most `width()` columns: longer ones are broken."""
    limit = width()
    lines: list[str] = []
    for line in text.split("\n"):
        lines += wrap(line, limit, "  ") if columns(line) > limit else [line]
    return "\n".join(lines)


def wrapped(text: str, indent: str = "  ") -> str:
    """Returns a notice with lines that fit the terminal. In a pipe or a log its lines stay whole.

    indent: begins the further lines of a line that is broken.
    """
    if not sys.stdout.isatty():
        return text
    limit = shutil.get_terminal_size((WIDTH, 24)).columns
    lines = []
    for line in text.splitlines():
        leading = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            max(limit, 20),
            subsequent_indent=leading + indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def columns(text: str) -> int:
    """Returns how many columns printable text has on a terminal."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    combined = sum(unicodedata.combining(char) > 0 for char in text)
    return len(text) + wide - combined


class Terminal:
    """The standard output of a process, and the phases that it is in."""

    def __init__(self) -> None:
        self.is_muted = False
        self.has_answers_on_stdout = False
        # Reentrant, because `_tick` prints while it holds the lock.
        self._lock = threading.RLock()
        self._phases: list[Phase] = []  # from the outermost to the innermost
        self._note = ""
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None  # prints the lines of a log
        self._last_line = time.monotonic()

    def say(self, text: str, style: str = "", *, is_error: bool = False) -> None:
        """Prints a line above the bars; to stderr if `is_error`, or if stdout has answers."""
        is_error = is_error or self.has_answers_on_stdout
        with self._lock:
            self._last_line = time.monotonic()
            # Errors that are redirected to a file go there, and not above the bars.
            if self._live is not None and (not is_error or sys.stderr.isatty()):
                self._print_above_bars(text, style)
                return
            stream = sys.stderr if is_error else sys.stdout
            # A run does not end because nobody reads its log any more.
            with contextlib.suppress(BrokenPipeError):
                write(text, stream)

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        total: int | None = None,
        done: int = 0,
        unit: str = "",
        *,
        has_bar: bool = True,
    ) -> Iterator[Phase]:
        """Shows a phase while the body runs.

        Args:
            name: the name of the phase; phases inside of others are shown as "evaluate: sample".
            total: number of items, if it is known.
            done: items that are done at the start.
            unit: the plural of the items, if the name does not say it.
            has_bar: False if a library draws bars of its own meanwhile, such as a download's. The
                phase is then shown only in a log.
        """
        phase = Phase(name, total, done, unit)
        is_drawn = self._is_terminal()
        is_shown = threading.current_thread() is threading.main_thread() and not self.is_muted
        if not is_shown or (is_drawn and not has_bar):
            yield phase
            return
        with self._lock:
            if self._phases:
                self._phases[-1].last_inner = name
            self._phases.append(phase)
            if not is_drawn:
                self._start_ticker()
            elif self._live is None:
                self._start_live()
        try:
            yield phase
        finally:
            with self._lock:
                self._phases.remove(phase)
                if not self._phases:
                    self.close()

    def set_note(self, note: str) -> None:
        """Shows a note next to the innermost phase, such as "compiling"; "" removes it."""
        # Without the lock: a single assignment, and JAX's listeners may call this in any thread.
        self._note = note

    def close(self) -> None:
        """Removes the bars, so that the process can end at any place."""
        with self._lock:
            if self._live is not None:
                live, self._live = self._live, None
                live.stop()

    def status(self) -> str:
        """Returns the current phases as a line, "" without any."""
        with self._lock:
            phases = list(self._phases)
        if not phases:
            return ""
        innermost = phases[-1]
        details = ", ".join(filter(None, [innermost.speed(), self._note]))
        after = f": after {innermost.last_inner}" if innermost.last_inner else ""
        return f"{_path(phases)} {innermost.count()}".rstrip() + f"{after}, {details}"

    # -- A terminal --------------------------------------------------------------------------------

    def _is_terminal(self) -> bool:
        if self._live is not None:
            return True
        # A notebook's stream may call itself a terminal.
        is_notebook = "ipykernel" in sys.modules
        # A dumb terminal, such as the shell of Emacs, has no control sequences.
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not is_notebook

    def _start_live(self) -> None:
        # Not at the top: only a terminal needs rich.
        from rich.console import Console
        from rich.live import Live

        class VisibleCursor(Console):
            """A console that never hides the cursor: a killed process could not show it again."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        self._live = Live(
            get_renderable=self._draw,
            console=VisibleCursor(),
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            # What user-defined code prints appears above the bars, too.
            redirect_stdout=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _draw(self) -> "Table":
        """Returns the outermost phase and, in a second row, the phases inside of it.

        There are always two rows: while a line is printed, rich's thread may draw another number of
        rows, and the line would then erase the one above it.
        """
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(width=BAR_WIDTH)
        table.add_column(no_wrap=True)
        phases = list(self._phases)
        for shown in (phases[:1], phases[1:]):
            if not shown:
                table.add_row(" ")
                continue
            phase = shown[-1]
            note = f", {self._note}" if self._note and phase is phases[-1] else ""
            bar = None
            if phase.total:
                bar = ProgressBar(phase.total, min(phase.done, phase.total), BAR_WIDTH)
            details = Text(visible(f"{phase.speed()}{note}"), "dim")
            name = Text(visible(f"{_path(shown)} {phase.count()}".rstrip()))
            table.add_row(name, bar, details)
        return table

    def _print_above_bars(self, text: str, style: str) -> None:
        from rich.text import Text

        assert self._live is not None
        self._live.console.print(Text(visible(text), style), soft_wrap=True)

    # -- A log -------------------------------------------------------------------------------------

    def _start_ticker(self) -> None:
        # A fork has no threads of its parent.
        if self._ticker is None or not self._ticker.is_alive():
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        """Prints the current phase whenever nothing was printed for a while: a thread's body."""
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:
                phase = self._phases[-1] if self._phases else None
                if phase is None or self._live is not None:
                    continue
                # Any line counts: a loop that prints its steps needs no further lines of progress.
                quiet_since = max(self._last_line, phase.began)
                if time.monotonic() - quiet_since >= phase.pause:
                    phase.pause = min(2 * phase.pause, LONGEST_PAUSE)
                    # The stream may be closed while the process ends.
                    with contextlib.suppress(OSError, ValueError):
                        self.say(self.status(), is_error=True)


def _path(phases: list[Phase]) -> str:
    """Returns the distinct names of phases, such as "RL 3/20: evaluate: sample"."""
    names = [phases[0].name]
    if phases[0].total is not None and len(phases) > 1:
        names = [f"{phases[0].name} {phases[0].count()}"]
    for outer, inner in itertools.pairwise(phases):
        if inner.name != outer.name:
            names.append(inner.name)
    return ": ".join(filter(None, names))


_TERMINAL = Terminal()
say = _TERMINAL.say
phase = _TERMINAL.phase
set_note = _TERMINAL.set_note
close = _TERMINAL.close


def mute() -> None:
    """Hides the phases of this process, which is not the first of its run."""
    _TERMINAL.is_muted = True


@contextlib.contextmanager
def keep_stdout_for_answers() -> Iterator[None]:
    """Sends notices (`say`) to stderr while the body runs: a pipe gets what `write` prints.

    Decorates the `main` of a command whose output is read by other programs, such as `jzero chat`.
    A caller of `main` that goes on in the same process has its notices on stdout again.
    """
    shown = _TERMINAL
    before = shown.has_answers_on_stdout
    shown.has_answers_on_stdout = True
    try:
        yield
    finally:
        shown.has_answers_on_stdout = before


def quiet_libraries() -> None:
    """Stops libraries from drawing bars and writing notes between the lines of a command.

    Has to be called before they are imported. A variable that the user has set is kept.
    """
    import absl.logging

    # Orbax reports as a warning that a save waits for the one before.
    absl.logging.set_verbosity(absl.logging.ERROR)
    # The hub's client retries for half a minute, with two lines for each attempt. The error at the
    # end of them says everything.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.stdout.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


# -- The end of a command --------------------------------------------------------------------------


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """A block that imports modules: Ctrl-C ends the process at once, without an exception.

    An exception in the middle of an import of a C extension would end the process with a traceback
    of it, or with an abort.
    """
    # A handler that a parent has set, such as nohup's, stays.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Only the main thread may change a handler, and only it receives Ctrl-C.
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _send_lost_ctrl_c_again(lost: "sys.UnraisableHookArgs") -> None:
    """Handles an exception that Python cannot pass on, because a finalizer or callback raised it.

    Ctrl-C in a callback of the garbage collector would otherwise be printed and forgotten.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    # The callback has ended by then. A signal to another thread would not end a wait of this one.
    main_thread = threading.main_thread().ident
    timer = threading.Timer(0.05, signal.pthread_kill, [main_thread, signal.SIGINT])
    timer.daemon = True
    timer.start()


def run_command(function: Callable[[], None]) -> None:
    """Runs the main function of a command.

    Ctrl-C and a closed pipe, such as that of `head`, end it without a traceback. Ctrl-C during the
    imports has no handler (see `jzero/__init__.py`); here it gets Python's.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hook_before = sys.unraisablehook
    sys.unraisablehook = _send_lost_ctrl_c_again
    try:
        try:
            function()
        finally:
            sys.unraisablehook = hook_before
            sys.stdout.flush()
    except KeyboardInterrupt:  # of a command that does not handle it
        write("stopped", sys.stderr)
        sys.exit(STATUS_OF_CTRL_C)
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):
            raise  # another pipe
        # The reader of the output, such as `head`, has ended. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(STATUS_OF_BROKEN_PIPE)
