"""The levels of protection, and which of them a machine has.

A level is probed by running a program in it. docs/sandbox.md says what each protects against.
"""

import functools
from typing import Protocol

from jzero.errors import UserError
from jzero.sandbox.client import Limits, Outcome, Program, Sandbox, SandboxError

# From the weakest to the strongest. A level's number is the metric sandbox/level.
LEVELS = ("none", "seccomp", "landlock", "namespaces")
# The levels that "auto" may choose: at these, a program reaches no file of the user's.
CHOSEN_BY_ITSELF = ("namespaces", "landlock")
AUTO = "auto"
REMOTE = -1  # the number where programs run on a server elsewhere

# What the run says of a level that had to be named.
WARNINGS = {
    "seccomp": "programs may read every file that this user may read",
    "none": "nothing keeps programs from what this user may do",
}


class Executor(Protocol):
    """What runs programs: a sandbox of this machine, or a server elsewhere."""

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program. Raises SandboxError if nothing is known about it afterwards."""
        ...


_PROBE = Program("print(int(input()) * 7)", stdin="6")
_PROBE_OUTPUT = "42\n"


@functools.cache
def failure(level: str) -> str:
    """Returns why this machine does not have a level, "" if it has."""
    try:
        with Sandbox(level) as sandbox:
            outcome = sandbox.run(_PROBE, Limits())
    except SandboxError as error:
        return str(error)
    if outcome.stdout != _PROBE_OUTPUT:
        return f"a program ended with {outcome.end} {outcome.status}: {outcome.stderr[-200:]}"
    return ""


def reached_level(wanted: str) -> str:
    """Returns the level at which programs run where `task.sandbox.level=wanted`.

    Raises:
        UserError: this machine does not have the level or, for "auto", none that keeps programs
            from the user's files.
    """
    candidates = CHOSEN_BY_ITSELF if wanted == AUTO else (wanted,)
    failures = []
    for level in candidates:
        reason = failure(level)
        if not reason:
            return level
        failures.append(f"{level}: {reason}")
    advice = "use a machine that allows user namespaces, or a server with task.sandbox.url"
    if wanted == AUTO:
        weaker = [level for level in ("seccomp",) if not failure(level)]
        choices = " or ".join(f"task.sandbox.level={level}" for level in [*weaker, "none"])
        advice += f"; {choices} accepts less protection in words (docs/sandbox.md)"
    raise UserError(
        f"task.sandbox.level={wanted}: this machine cannot shut programs in "
        f"({'; '.join(failures)}): {advice}"
    )
