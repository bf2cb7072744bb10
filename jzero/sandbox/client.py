"""The trusted side of a sandbox: starts its server, sends programs, and receives their output.

    with Sandbox("namespaces") as sandbox:
        outcome = sandbox.run(Program("print(input()[::-1])", stdin="abc"), Limits())

A sandbox runs one program at a time; use several sandboxes to run programs in parallel. A server
that ends, or that does not answer in time, is replaced. Expected outputs are never sent. A program
and its input are sent only to the process that becomes the program, never to the server that forks
all of these processes.
"""

import atexit
import contextlib
import functools
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from jzero.sandbox import messages
from jzero.types import JsonValue

WALL_SECONDS_PER_CPU_SECOND = 3.0  # a program that sleeps takes no CPU time
_START_SECONDS = 60.0  # on a busy machine, with packages to import
_GRACE_SECONDS = 10.0  # for the server's own work, after a program's limit
_MAX_START_BYTES = 1 << 17  # of a message without output: field names, an error
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# No variable of the user's environment, such as an API key, reaches a program.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the order of sets is the same in every run
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # an arena for each thread would take most of the address space
    "LANG": "C.UTF-8",
}

# The server imports its modules from jzero's directory, and removes the directory from the path
# before a program runs.
_START = """
import sys
root, descriptor, settings = sys.argv[1:]
sys.path.insert(0, root)
from jzero.sandbox import server
sys.path.remove(root)
server.main(int(descriptor), settings)
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed: the outcome of the program is unknown."""


@dataclass(frozen=True)
class Program:
    """A Python program, its input, and an optional function call or expression to evaluate.

    Without `function` and `expression`, only the program runs, and reads `stdin`.
    """

    source: str
    stdin: str = ""
    function: str = ""  # to call after the program, with `arguments`
    arguments: tuple[JsonValue, ...] = ()
    expression: str = ""  # to evaluate after the program


@dataclass(frozen=True)
class Limits:
    """The resource limits of one run of a program."""

    seconds: float = 5.0  # of CPU time, over all threads
    wall_seconds: float = 0.0  # 0: WALL_SECONDS_PER_CPU_SECOND times `seconds`
    memory_gib: float = 1.0  # of address space
    output_mib: float = 1.0  # of standard output, standard error and value together
    files_mib: float = 64.0  # in the program's own directory


@dataclass(frozen=True)
class Outcome:
    """The end of a program, as reported by the server, and its output."""

    # "exit": the program exited; "signal": a signal killed it; or it hit a limit: "time" (CPU
    # time), "wall" (wall time) or "output".
    end: str
    status: int  # the exit status, or minus the signal
    stdout: str
    stderr: str  # the last part only
    result: str  # JSON of the requested value; "" without one
    seconds: float  # of CPU time
    wall_seconds: float

    @property
    def has_succeeded(self) -> bool:
        """Whether the program exited without an error."""
        return self.end == "exit" and self.status == 0


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """A server of programs at one level of protection, a name of `levels.LEVELS`.

    Raises:
        SandboxError: this machine does not support the level.
    """

    def __init__(self, level: str, packages: tuple[str, ...] = ()) -> None:
        """`packages` are modules that programs may import in addition to the standard library."""
        self.level = level
        self.num_starts = 0  # number of servers started so far
        self._packages = packages
        self._start()

    @property
    def server_pid(self) -> int:
        """The ID of the server process, the ancestor of all programs."""
        return self._process.pid

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program and returns its outcome.

        Raises:
            SandboxError: the sandbox failed twice, the second time with a new server.
        """
        try:
            return self._run(program, limits)
        except SandboxError:
            self._replace()
            return self._run(program, limits)

    def begin_session(self, limits: messages.Message) -> socket.socket:
        """Starts a session (`session`) on the server, and returns the socket of its watcher.

        Raises:
            SandboxError: the server failed, and so did its replacement.
        """
        try:
            return self._begin_session(limits)
        except SandboxError:
            self._replace()
            return self._begin_session(limits)

    def _begin_session(self, limits: messages.Message) -> socket.socket:
        connection = self._begin(messages.SESSION, [limits], _GRACE_SECONDS)
        try:
            reply = _receive(connection, _START_SECONDS, _MAX_START_BYTES)
            if "error" in reply:
                raise SandboxError(reply["error"])
        except SandboxError:
            connection.close()
            raise
        return connection

    def close(self, *_: object) -> None:
        """Ends the server and all its programs."""
        self._connection.close()  # the server sees the end of its socket
        try:
            self._process.wait(_GRACE_SECONDS)
        except TimeoutExpired:
            self._kill()

    __exit__ = close

    def _kill(self) -> None:
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(TimeoutExpired):  # the kernel may delay the end
            self._process.wait(_GRACE_SECONDS)

    def _replace(self) -> None:
        """Ends a server that failed, in any state, and starts another one."""
        self._kill()
        self._start()

    def _start(self) -> None:
        self.num_starts += 1
        self._connection, server_end = socket.socketpair()
        settings = json.dumps({"level": self.level, "packages": self._packages})
        # The server has a copy of its end. If this one stayed open, the end of the server would
        # go unnoticed.
        with server_end:
            descriptor = server_end.fileno()
            start = [_START, str(_PACKAGE_ROOT), str(descriptor), settings]
            self._process = Popen(
                # -s -S -P: no user site directory, no installed packages, no current directory.
                # They cost time, and programs need none of them.
                [sys.executable, "-s", "-S", "-P", "-c", *start],
                stdin=DEVNULL,
                stdout=DEVNULL,
                env=_ENVIRONMENT,
                pass_fds=[descriptor],
                cwd="/",
            )
        try:
            reply = _receive(self._connection, _START_SECONDS, _MAX_START_BYTES)
        except SandboxError:
            self._kill()
            raise
        if "ready" not in reply:
            self.close()
            raise SandboxError(reply["error"])

    def _begin(
        self,
        kind: bytes,
        contents: Sequence[messages.Message | bytes],
        seconds: float,
    ) -> socket.socket:
        """Starts a request, sends `contents`, and returns this process's end of its socket."""
        connection, watcher_end = socket.socketpair()
        with watcher_end:
            try:
                # A stopped server receives nothing, so the send needs a time limit.
                self._connection.settimeout(_GRACE_SECONDS)
                socket.send_fds(self._connection, [kind], [watcher_end.fileno()])
                connection.settimeout(seconds)
                messages.send(connection, *contents)
            except OSError as error:
                connection.close()
                raise SandboxError(f"the sandbox's server has ended: {error}") from None
        return connection

    def _run(self, program: Program, limits: Limits) -> Outcome:
        wall_seconds = limits.wall_seconds or limits.seconds * WALL_SECONDS_PER_CPU_SECOND
        watcher_limits = {
            "seconds": limits.seconds,
            "wall_seconds": wall_seconds,
            "memory": int(limits.memory_gib * 2**30),
            "output": int(limits.output_mib * 2**20),
            "files": int(limits.files_mib * 2**20),
        }
        content = {"source": program.source, "question": _question(program)}
        # The watcher enforces the limit, so the client waits a little longer.
        seconds = wall_seconds + _GRACE_SECONDS
        # Input from JSON may have lone surrogates, which strict UTF-8 refuses.
        stdin = program.stdin.encode("utf-8", "surrogatepass")
        contents = [watcher_limits, content, stdin]
        with self._begin(messages.PROGRAM, contents, seconds) as connection:
            reply = _receive(connection, seconds, max_reply_bytes(limits))
        if "error" in reply:
            raise SandboxError(reply["error"])
        return Outcome(**reply)


def max_reply_bytes(limits: Limits) -> int:
    """Returns the maximum size of a reply in bytes: in JSON, a byte of output takes at most six."""
    return int(6 * limits.output_mib * 2**20) + _MAX_START_BYTES


def _receive(connection: socket.socket, seconds: float, max_bytes: int) -> messages.Message:
    try:
        return messages.receive(connection, seconds, max_bytes)
    except TimeoutError:
        raise SandboxError(f"the sandbox's server is silent for {seconds:g} s") from None
    except (EOFError, OSError, ValueError) as error:
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

    A grader process runs its responses one after the other, in one sandbox. The server is not a
    child of any program; if a program ever managed to end the server, a new server would be
    started.
    """
    sandbox = Sandbox(level, packages)
    atexit.register(sandbox.close)
    return sandbox
