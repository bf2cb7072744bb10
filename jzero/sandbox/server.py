"""The server of a sandbox: restricts its own privileges, and forks a watcher for each request.

The client starts it with a socket as `python -c "... server.main(...)"`. A request to the server is
one byte, its kind, and one end of a socket pair. The server forks a watcher that serves the socket,
and closes its own copy. Sources, inputs and values are sent through that socket, so that the
process that all programs are forked from never holds any of them.

The watcher of a program receives the program's limits and forks. Its child receives the source and
the input and becomes the program (`program.run`), and the watcher sends the reply:

    limits    seconds, wall_seconds, memory, output, files
    content   source, question (or null)
    input     bytes of the standard input
    reply     end, status, stdout, stderr, result, seconds, wall_seconds; or error

`end` is "exit", "signal", "time", "wall" or "output". The watcher of a session serves an
interpreter instead (`cells`). If the client closes its socket, the server and all programs end.
Runs inside of the sandbox, and imports only the standard library.
"""

import contextlib
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from jzero.sandbox import (
    cells,
    landlock,
    messages,
    namespaces,
    processes,
    program,
    seccomp,
    system_calls,
)
from jzero.sandbox.pipes import Output

_SMALLEST_WAIT = 0.002  # seconds
_ERRORS = 1 << 13  # bytes of standard error that are reported
_OOM_SCORE = "500"  # if memory runs out, the kernel ends programs before other processes


def main(descriptor: int, settings: str) -> None:
    """Serves requests from the socket `descriptor` until the client closes it.

    `settings` is JSON: level, and the packages to import before the first program.
    """
    connection = socket.socket(fileno=descriptor)
    values = json.loads(settings)
    try:
        rights = _confine(values["level"], values["packages"])
        # Imported once here, so that the programs, which are forks, share the memory.
        for name in values["packages"]:
            importlib.import_module(name)
        # Programs of the same user must not read or trace the server.
        system_calls.prctl(system_calls.PR_SET_DUMPABLE, 0)
    except Exception as error:  # the client reports the reason
        messages.send(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    gc.freeze()  # no collection touches existing objects, so forks keep sharing their memory
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _collect_children)
    try:
        messages.send(connection, {"ready": values["level"]})
        while True:
            kind, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if not kind:
                return  # the client is gone
            _begin(connection, kind, descriptors[0], rights)
    except OSError:
        return


def _collect_children(*_: object) -> None:
    """Collects watchers that have ended, so that none of them stays a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _begin(connection: socket.socket, kind: bytes, descriptor: int, rights: program.Rights) -> None:
    """Forks the watcher of a request, which serves the socket `descriptor`."""
    if os.fork():
        os.close(descriptor)
        return
    status = 1
    try:
        # The watcher must not read the requests of the server.
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=descriptor) as client:
            _serve(client, kind, rights)
        status = 0
    except (OSError, EOFError):  # the client has gone
        pass
    finally:
        os._exit(status)


def _serve(connection: socket.socket, kind: bytes, rights: program.Rights) -> None:
    """Serves one request. Raises OSError or EOFError if the client has gone."""
    try:
        if kind == messages.PROGRAM:
            messages.send(connection, _watch(connection, rights))
        else:
            cells.watch(connection, rights)
    except _ClientGone:
        raise
    except OSError as error:  # the machine refuses a resource, such as a process
        messages.send(connection, {"error": f"the watcher failed: {error}"})


class _ClientGone(OSError):
    """The client has closed its end of the request's socket."""


# The privileges of programs on this machine.


def _confine(level: str, packages: Sequence[str]) -> program.Rights:
    """Restricts this process to the level of its programs. Returns the privileges of programs."""
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        _, hard_limit = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard_limit, hard_limit))  # a grader process has small soft limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)

    paths = readable_paths(packages)
    sys.path[:] = [path for path in sys.path if path] + _package_paths(packages)
    if level == "none":
        return program.Rights(level, paths, becomes_nobody=False)
    if not seccomp.is_supported():
        raise OSError(f"the filter of system calls does not support {platform.machine()}")
    if level == "namespaces":
        # From here on, this is the first process of the new process namespace.
        has_nobody = namespaces.enter(paths)
        return program.Rights(level, paths, becomes_nobody=has_nobody)
    if level not in ("landlock", "seccomp"):
        raise OSError(f"unknown level {level}")
    if level == "landlock" and not landlock.version():
        raise OSError("the kernel has no Landlock")
    is_root = os.geteuid() == 0
    return program.Rights(level, paths, becomes_nobody=is_root and _all_open_to_others(paths))


def readable_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns the files and directories that programs may read: Python and its libraries."""
    libraries = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    # The interpreter may be installed through a link, and uses both paths.
    real_prefix = os.path.realpath(sys.base_prefix)
    interpreter = [os.path.join(real_prefix, "lib"), f"{sys.base_prefix}/lib"]
    devices = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    candidates = [*libraries, *interpreter, *_package_paths(packages), *devices]
    return tuple(path for path in dict.fromkeys(candidates) if os.path.exists(path))


def _package_paths(packages: Sequence[str]) -> list[str]:
    """Returns the directory of installed packages; empty if programs may import none."""
    if not packages:
        return []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [os.path.join(sys.prefix, "lib", version, "site-packages")]


def _all_open_to_others(paths: Sequence[str]) -> bool:
    """Returns whether every user can read these directories."""
    for path in paths:
        parent = os.path.realpath(path)
        while parent != "/":
            # Without this bit, other users cannot pass through a directory.
            if not os.stat(parent).st_mode & 0o001 and os.path.isdir(parent):
                return False
            parent = os.path.dirname(parent)
    return True


# The watcher of a program.


class _Pipes(NamedTuple):
    """The ends of a program's pipes that the watcher reads."""

    stdout: int
    stderr: int
    result: int
    started: int  # receives a byte once the program has given up its privileges


def _watch(connection: socket.socket, rights: program.Rights) -> messages.Message:
    """Runs a program to its end or to its limit. Returns the reply."""
    limits = messages.receive(connection)
    if rights.level == "namespaces":
        namespaces.isolate(limits["files"])
    elif rights.level == "none":
        # Programs of this level may fork: adopts their orphans, so that they can be found and
        # killed.
        system_calls.prctl(system_calls.PR_SET_CHILD_SUBREAPER, 1)
    pipes = [os.pipe() for _ in _Pipes._fields]
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        program.run(connection, [write_end for _, write_end in pipes], limits, rights)
    for _, write_end in pipes:
        os.close(write_end)

    reading = _Pipes(*(read_end for read_end, _ in pipes))
    output = Output(reading[:3], limits["output"])
    try:
        end, has_started = _wait_for_end(connection, pid, reading.started, output, limits, start)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Killed in any case, so that wait4 cannot block.
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        if rights.level == "none":
            processes.end_descendants()
    if end == "exit":
        # The program may have written after the last read.
        output.read_rest()
        has_started = has_started or bool(os.read(reading.started, 1))
    if not has_started:
        # A process that could not give up its privileges never ran the program.
        return {"error": f"the program never started: {output.text(reading.stderr)[-_ERRORS:]}"}
    if output.is_full:
        end = "output"
    # The CPU time is final only after the exit: the program may have exceeded its limit unnoticed.
    used = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and end == "exit":
        end = "signal"
    if used > limits["seconds"] and end in ("exit", "signal"):
        end = "time"
    return {
        "end": end,
        "status": os.waitstatus_to_exitcode(status),
        "stdout": output.text(reading.stdout),
        "stderr": output.text(reading.stderr)[-_ERRORS:],
        "result": output.text(reading.result),
        "seconds": used,
        "wall_seconds": time.monotonic() - start,
    }


def _wait_for_end(
    connection: socket.socket,
    pid: int,
    started: int,
    output: Output,
    limits: messages.Message,
    start: float,
) -> tuple[str, bool]:
    """Waits until a program ends or is at a limit. Returns its end, and whether it started.

    Raises:
        OSError: the client has gone.
    """
    process = os.pidfd_open(pid)
    end, has_started = "", False
    while not end:
        seconds_left = limits["seconds"] - processes.cpu_seconds(pid)
        wall_left = limits["wall_seconds"] - (time.monotonic() - start)
        if seconds_left <= 0:
            end = "time"
        elif wall_left <= 0:
            end = "wall"
        else:
            wait = max(min(seconds_left, wall_left), _SMALLEST_WAIT)
            # Until the program starts, the connection carries its source and input. After that, it
            # becomes readable only when the client closes it.
            signs = connection if has_started else started
            ready, _, _ = select.select([process, signs, *output.open], [], [], wait)
            if connection in ready:
                raise _ClientGone("the client has gone")
            for pipe in output.open.intersection(ready):
                output.read(pipe)
            if output.is_full:
                end = "output"
            elif process in ready:
                end = "exit"
            elif started in ready:
                has_started = bool(os.read(started, 1))
                if not has_started:
                    end = "exit"  # the pipe ends before the process
    os.close(process)
    return end, has_started
