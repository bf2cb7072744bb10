"""The levels of protection, and which of them a machine supports.

A level is probed by running a program in it. docs/environments.md explains the protection of each
level.
"""

import functools
from typing import Protocol

from jzero.errors import UserError
from jzero.sandbox.client import Limits, Outcome, Program, Sandbox, SandboxError

# From the weakest to the strongest. The index of a level is the metric sandbox/level.
LEVELS = ("none", "seccomp", "landlock", "namespaces")
# The levels that "auto" may choose: in these, a program cannot reach the user's files.
AUTO_LEVELS = ("namespaces", "landlock")
AUTO = "auto"
REMOTE = -1  # the value of the metric if programs run on a remote server

# Warnings that the run prints for levels that "auto" never chooses.
WARNINGS = {
    "seccomp": "programs may read every file that this user may read",
    "none": "nothing keeps programs from what this user may do",
}


class Executor(Protocol):
    """Runs programs: a sandbox on this machine, or a remote server."""

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program. Raises SandboxError if the outcome of the program is unknown."""
        ...


_PROBE = Program("print(int(input()) * 7)", stdin="6")
_PROBE_OUTPUT = "42\n"


@functools.cache
def failure(level: str) -> str:
    """Returns why this machine does not support a level, "" if it does."""
    try:
        with Sandbox(level) as sandbox:
            outcome = sandbox.run(_PROBE, Limits())
    except SandboxError as error:
        return str(error)
    if outcome.stdout != _PROBE_OUTPUT:
        return f"a program ended with {outcome.end} {outcome.status}: {outcome.stderr[-200:]}"
    return ""


def reached_level(requested: str) -> str:
    """Returns the level at which programs run with `task.sandbox.level=requested`.

    Raises:
        UserError: this machine does not support the level or, for "auto", supports no level that
            keeps programs from the user's files.
    """
    candidates = AUTO_LEVELS if requested == AUTO else (requested,)
    failures = []
    for level in candidates:
        reason = failure(level)
        if not reason:
            return level
        failures.append(f"{level}: {reason}")
    advice = (
        "use a machine that allows user namespaces, or a server with task.sandbox=remote(url=URL)"
    )
    if requested == AUTO:
        # Levels that only the user may choose, by name.
        weaker = [level for level in ("seccomp",) if not failure(level)]
        choices = " or ".join(f"task.sandbox.level={level}" for level in [*weaker, "none"])
        advice += f"; {choices} accepts less protection explicitly (docs/environments.md)"
    raise UserError(
        f"task.sandbox.level={requested}: this machine cannot isolate programs "
        f"({'; '.join(failures)}): {advice}"
    )
