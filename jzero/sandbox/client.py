"""The trusted side of a sandbox: starts its server, sends programs, and receives what they printed.

    with Sandbox("namespaces") as sandbox:
        outcome = sandbox.run(Program("print(input()[::-1])", stdin="abc"), Limits())

A sandbox runs one program at a time; for several at once have several. A server that ends, or that
does not answer, is replaced. Expected outputs are never sent.
"""

import atexit
import contextlib
import functools
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from jzero.sandbox import messages
from jzero.types import JsonValue

WALL_SECONDS_PER_CPU_SECOND = 3.0  # a program that sleeps takes no CPU time
_START_SECONDS = 60.0  # on a busy machine, with packages to import
_GRACE_SECONDS = 10.0  # for the server's own work, after a program's limit
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# Nothing of the user's environment, such as keys, reaches a program.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets is the same in every run
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # an arena for each thread would take most of the address space
    "LANG": "C.UTF-8",
}

# The server imports its modules from jzero's directory, and takes the directory off the path before
# a program runs.
_START = """
import sys
root, descriptor, settings = sys.argv[1:]
sys.path.insert(0, root)
from jzero.sandbox import server
sys.path.remove(root)
server.main(int(descriptor), settings)
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed, and nothing is known about the program."""


@dataclass(frozen=True)
class Program:
    """A program in Python, its input, and what to ask it for.

    Without `function` and `expression` the program is a whole one that reads `stdin`.
    """

    source: str
    stdin: str = ""
    function: str = ""  # to call after the program, with `arguments`
    arguments: tuple[JsonValue, ...] = ()
    expression: str = ""  # to evaluate after the program


@dataclass(frozen=True)
class Limits:
    """What one run of a program may take."""

    seconds: float = 5.0  # of CPU time, over all threads
    wall_seconds: float = 0.0  # 0: WALL_SECONDS_PER_CPU_SECOND times `seconds`
    memory_gib: float = 1.0  # of address space
    output_mib: float = 1.0  # of standard output, standard error and value together
    files_mib: float = 64.0  # in the program's own directory


@dataclass(frozen=True)
class Outcome:
    """How a program ended, as the server saw it, and what it printed."""

    # "exit": by itself, or "signal"; at a limit, of CPU time ("time"), of wall time ("wall") or of
    # the output ("output").
    end: str
    status: int  # the exit status, or minus the signal
    stdout: str
    stderr: str  # its end
    result: str  # JSON of the value that was asked for, "" if there was none
    seconds: float  # of CPU time
    wall_seconds: float

    @property
    def has_succeeded(self) -> bool:
        """Whether the program ended by itself without an error."""
        return self.end == "exit" and self.status == 0


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """A server of programs at one level of protection, a name of `levels.LEVELS`.

    Raises:
        SandboxError: this machine does not have the level.
    """

    def __init__(self, level: str, packages: tuple[str, ...] = ()) -> None:
        """`packages` are modules that programs may import beside the standard library."""
        self.level = level
        self.num_starts = 0  # of servers, each after the end of the one before
        self._packages = packages
        self._start()

    @property
    def server_pid(self) -> int:
        """The process that all programs are below."""
        return self._process.pid

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program and returns how it ended.

        Raises:
            SandboxError: the sandbox failed twice, the second time with a new server.
        """
        try:
            return self._run(program, limits)
        except SandboxError:
            self.close()
            self._start()
            return self._run(program, limits)

    def begin_session(self, request: messages.Message) -> socket.socket:
        """Has the server begin a session (`session`), and returns the socket of its watcher.

        Raises:
            SandboxError: the server has ended, and so has a new one.
        """
        try:
            return self._begin_session(request)
        except OSError:
            self.close()
            self._start()
        try:
            return self._begin_session(request)
        except OSError as error:
            raise SandboxError(f"the sandbox's server has ended: {error}") from None

    def _begin_session(self, request: messages.Message) -> socket.socket:
        ours, its_end = socket.socketpair()
        with its_end:
            try:
                messages.send(self._connection, request)
                socket.send_fds(self._connection, [b" "], [its_end.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def close(self, *_: object) -> None:
        """Ends the server and what runs in it."""
        self._connection.close()  # the server sees the end of its socket
        try:
            self._process.wait(_GRACE_SECONDS)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()

    __exit__ = close

    def _start(self) -> None:
        self.num_starts += 1
        self._connection, its_end = socket.socketpair()
        settings = json.dumps({"level": self.level, "packages": self._packages})
        with its_end:
            descriptor = its_end.fileno()
            start = [_START, str(_PACKAGE_ROOT), str(descriptor), settings]
            self._process = Popen(
                # -s -S -P: no directories of the user's, no installed packages, not the current
                # directory. They cost time, and programs need none of them.
                [sys.executable, "-s", "-S", "-P", "-c", *start],
                stdin=DEVNULL,
                stdout=DEVNULL,
                env=_ENVIRONMENT,
                pass_fds=[descriptor],
                cwd="/",
            )
        reply = self._receive(_START_SECONDS)
        if "ready" not in reply:
            self.close()
            raise SandboxError(reply["error"])

    def _run(self, program: Program, limits: Limits) -> Outcome:
        wall_seconds = limits.wall_seconds or limits.seconds * WALL_SECONDS_PER_CPU_SECOND
        request = {
            "source": program.source,
            "stdin": program.stdin,
            "question": _question(program),
            "seconds": limits.seconds,
            "wall_seconds": wall_seconds,
            "memory": int(limits.memory_gib * 2**30),
            "output": int(limits.output_mib * 2**20),
            "files": int(limits.files_mib * 2**20),
        }
        try:
            messages.send(self._connection, request)
        except OSError as error:
            raise SandboxError(f"the sandbox's server has ended: {error}") from None
        reply = self._receive(wall_seconds + _GRACE_SECONDS)
        if "error" in reply:
            raise SandboxError(reply["error"])
        return Outcome(**reply)

    def _receive(self, seconds: float) -> messages.Message:
        self._connection.settimeout(seconds)
        try:
            return messages.receive(self._connection)
        except TimeoutError:
            raise SandboxError(f"the sandbox's server is silent for {seconds:g} s") from None
        except (EOFError, OSError) as error:
            raise SandboxError(f"the sandbox's server has ended: {error}") from None


def _question(program: Program) -> messages.Message | None:
    if program.expression:
        return {"expression": program.expression}
    if program.function:
        return {"function": program.function, "arguments": program.arguments}
    return None


@functools.cache
def shared_sandbox(level: str, packages: tuple[str, ...]) -> Sandbox:
    """Returns the sandbox of this process, which ends with the process.

    A grader process runs its responses one after the other, in one sandbox. The server is no child
    of a program's, and a program that ends it, if one ever could, costs a new server.
    """
    sandbox = Sandbox(level, packages)
    atexit.register(sandbox.close)
    return sandbox
