"""The tool `python`: a sandboxed interpreter that keeps its state for the whole episode.

The process starts with the first call and is killed at the end of the episode. A call that takes
more than `task.tools.seconds` kills it, too, and the next call starts a new process. `task.sandbox`
sets the limits of memory and output and the importable packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jzero.config import Local
from jzero.errors import UserError
from jzero.fields import show_part
from jzero.sandbox import levels
from jzero.sandbox.client import Limits, shared_sandbox
from jzero.sandbox.session import Session

if TYPE_CHECKING:
    from jzero.config import TaskConfig

_ENDS = {
    "exit": "the interpreter has ended",
    "output": "the code printed too much",
}


class ToolFailedError(Exception):
    """A failed call. The message is the error that the policy reads."""


class Python:
    """The interpreter of an episode, as a tool."""

    def __init__(self, task: TaskConfig) -> None:
        assert isinstance(task.sandbox, Local), f"{task.sandbox=}"
        self._settings = task.sandbox
        self._seconds = task.tools.seconds
        self._max_calls = task.tools.max_calls
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """Runs Python code, and returns what it prints and the value of its last line.

        Variables, functions and imports stay for the next call.

        Args:
            code: The code.
        """
        if self._session is None:
            self._session = self._begin()
        outcome = self._session.run(code)
        if not outcome.end:
            return outcome.output
        # The process has ended or was killed: the next call starts a new one without variables.
        self.close()
        reason = _ENDS.get(outcome.end, f"the code took more than {self._seconds:g} seconds")
        printed = f"\n{outcome.output}" if outcome.output else ""
        raise ToolFailedError(f"{reason}, and all variables are gone{printed}")

    def close(self) -> None:
        """Ends the interpreter."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _begin(self) -> Session:
        level = levels.reached_level(self._settings.level)
        sandbox = shared_sandbox(level, tuple(self._settings.packages))
        limits = Limits(
            seconds=self._seconds,
            # A program may take three times its CPU time. A call may not: its episode and a grader
            # process wait for it.
            wall_seconds=self._seconds,
            memory_gib=self._settings.memory_gib,
            output_mib=self._settings.output_mib,
        )
        return Session(sandbox, limits, self._max_calls)

    @staticmethod
    def check(task: TaskConfig) -> None:
        """Raises UserError if no interpreter can run with these settings."""
        if not isinstance(task.sandbox, Local):
            raise UserError(
                f"task.tools.names=python does not run with task.sandbox="
                f"{show_part(task.sandbox)}: a server elsewhere keeps no variables. Set "
                "task.sandbox=local"
            )
        levels.reached_level(task.sandbox.level)
