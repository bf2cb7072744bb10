r"""The trusted side of a session: an interpreter in the sandbox that keeps its variables.

    with Session(sandbox, Limits(seconds=2.0)) as session:
        session.run("x = 6")
        assert session.run("x * 7").output == "42\n"

One sandbox holds any number of sessions. Each is a separate process, with the protection of a
program. A cell that exceeds a limit ends its interpreter, and with it the session.
"""

import contextlib
import functools
import resource
from dataclasses import dataclass

from jzero.sandbox import messages
from jzero.sandbox.client import Limits, Sandbox, SandboxError, max_reply_bytes

MAX_SOURCE = 50_000  # bytes of a cell as JSON; fits into the buffer of a pipe
_GRACE_SECONDS = 10.0  # for the watcher's own work, after a cell's limit


@dataclass(frozen=True)
class CellOutcome:
    """The result of a cell."""

    # "" if the session continues. Otherwise the reason of the interpreter's end: "exit", or a
    # limit, which is "time" (CPU time), "wall" (wall time) or "output".
    end: str
    output: str  # the text that the cell printed, and its traceback
    failed: bool  # whether the cell raised


class Session(contextlib.AbstractContextManager["Session"]):
    """An interpreter that runs one cell after the other.

    Raises:
        SandboxError: the sandbox cannot start a session.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, max_cells: int = 1000) -> None:
        """`limits` apply to one cell; a session runs at most `max_cells` cells."""
        self._limits = limits
        self._wall_seconds = limits.wall_seconds or limits.seconds
        self._max_reply = max_reply_bytes(limits)
        _allow_many_sockets()
        session_limits = {
            # The kernel's limit covers all cells; the watcher enforces the limit of each.
            "seconds": limits.seconds * max_cells,
            "memory": int(limits.memory_gib * 2**30),
            "files": int(limits.files_mib * 2**20),
        }
        self._connection = sandbox.begin_session(session_limits)

    def run(self, source: str) -> CellOutcome:
        """Runs a cell: statements, with an optional expression at the end, which is printed.

        Raises:
            ValueError: the source is too long.
            SandboxError: the outcome of the cell is unknown.
        """
        cell = {
            # Replaces unpaired surrogates, which are not valid source code.
            "source": source.encode("utf-8", "replace").decode("utf-8"),
            "seconds": self._limits.seconds,
            "wall_seconds": self._wall_seconds,
            "output": int(self._limits.output_mib * 2**20),
        }
        # As JSON, a character may take six bytes.
        if 6 * len(source) > MAX_SOURCE and len(messages.encode(cell)) > MAX_SOURCE:
            raise ValueError(f"the code is longer than {MAX_SOURCE} bytes")
        try:
            self._connection.settimeout(self._wall_seconds + _GRACE_SECONDS)
            messages.send(self._connection, cell)
        except OSError as error:
            raise SandboxError(f"the session has ended: {error}") from None
        reply = self._receive(self._wall_seconds + _GRACE_SECONDS)
        if "error" in reply:
            raise SandboxError(reply["error"])
        return CellOutcome(**reply)

    def close(self, *_: object) -> None:
        """Ends the interpreter."""
        self._connection.close()  # the watcher sees the end of its socket

    __exit__ = close

    def _receive(self, seconds: float) -> messages.Message:
        try:
            return messages.receive(self._connection, seconds, self._max_reply)
        except TimeoutError:
            raise SandboxError(f"the session is silent for {seconds:g} s") from None
        except (EOFError, OSError, ValueError) as error:
            raise SandboxError(f"the session has ended: {error}") from None


@functools.cache
def _allow_many_sockets() -> None:
    """Raises this process's limit of open files: each session needs a socket."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
