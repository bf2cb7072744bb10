"""The trusted side of a session: an interpreter in the sandbox that keeps its variables.

    with Session(sandbox, Limits(seconds=2.0)) as session:
        session.run("x = 6")
        assert session.run("x * 7").output == "42\\n"

Any number of sessions live in one sandbox. Each is a process of its own, with the protection of a
program. A cell that exceeds a limit ends its interpreter, and the session with it.
"""

import contextlib
import functools
import resource
from dataclasses import dataclass

from jzero.sandbox import messages
from jzero.sandbox.client import Limits, Sandbox, SandboxError

MAX_SOURCE = 50_000  # bytes of a cell as JSON: what a pipe takes at once
_GRACE_SECONDS = 10.0  # for the watcher's own work, after a cell's limit
_START_SECONDS = 60.0  # on a busy machine


@dataclass(frozen=True)
class CellOutcome:
    """What came of a cell."""

    # "" while the session goes on. Otherwise how the interpreter ended: by itself ("exit"), or at
    # a limit, of CPU time ("time"), of wall time ("wall") or of the output ("output").
    end: str
    output: str  # what the cell printed and raised
    failed: bool  # whether it raised


class Session(contextlib.AbstractContextManager["Session"]):
    """An interpreter that runs one cell after the other.

    Raises:
        SandboxError: the sandbox does not begin a session.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, max_cells: int = 1000) -> None:
        """`limits` are those of one cell, of which there are `max_cells` at most."""
        self._limits = limits
        self._wall_seconds = limits.wall_seconds or limits.seconds
        _allow_many_sockets()
        request = {
            "session": True,
            "seconds": limits.seconds * max_cells,
            "memory": int(limits.memory_gib * 2**30),
            "files": int(limits.files_mib * 2**20),
        }
        self._connection = sandbox.begin_session(request)
        self._receive(_START_SECONDS)

    def run(self, source: str) -> CellOutcome:
        """Runs a cell: statements, and an expression at their end whose value is printed.

        Raises:
            ValueError: the source is too long.
            SandboxError: nothing is known about the cell.
        """
        cell = {
            # Half of a pair of surrogates is no source.
            "source": source.encode("utf-8", "replace").decode("utf-8"),
            "seconds": self._limits.seconds,
            "wall_seconds": self._wall_seconds,
            "output": int(self._limits.output_mib * 2**20),
        }
        # As JSON, a character may take six bytes.
        if 6 * len(source) > MAX_SOURCE and len(messages.encode(cell)) > MAX_SOURCE:
            raise ValueError(f"the code is longer than {MAX_SOURCE} bytes")
        try:
            messages.send(self._connection, cell)
        except OSError as error:
            raise SandboxError(f"the session has ended: {error}") from None
        reply = self._receive(self._wall_seconds + _GRACE_SECONDS)
        return CellOutcome(**reply)

    def close(self, *_: object) -> None:
        """Ends the interpreter."""
        self._connection.close()  # the watcher sees the end of its socket

    __exit__ = close

    def _receive(self, seconds: float) -> messages.Message:
        self._connection.settimeout(seconds)
        try:
            return messages.receive(self._connection)
        except TimeoutError:
            raise SandboxError(f"the session is silent for {seconds:g} s") from None
        except (EOFError, OSError) as error:
            raise SandboxError(f"the session has ended: {error}") from None


@functools.cache
def _allow_many_sockets() -> None:
    """Lets this process have a socket for each session."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
