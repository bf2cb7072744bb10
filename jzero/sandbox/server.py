"""The server of a sandbox: shuts itself in, and forks a watcher and a program for each request.

The client starts it with a socket as `python -c "... server.main(...)"`. It runs one program at a
time. It has no expected outputs: it reports what a program printed, and how the program ended.

    request   source, stdin, question (or null), seconds, wall_seconds, memory, output, files
    reply     end, status, stdout, stderr, result, truncated, seconds, wall_seconds

A request with "session" asks for an interpreter instead (`cells`). Its watcher serves a socket of
its own, which comes behind the request; any number of them run beside the programs.

`end` is "exit", "signal", "time", "wall" or "output". If the client goes away, the server ends, and
with it every program. Runs inside of the sandbox, and imports the standard library alone.
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
from typing import Any, NamedTuple

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
from jzero.sandbox.pipes import Output, give_files, sealed_file

_SMALLEST_WAIT = 0.002  # seconds
_ERRORS = 1 << 13  # bytes of standard error that are reported
_OOM_SCORE = "500"  # the kernel ends programs before anything else where memory runs out


def main(descriptor: int, settings: str) -> None:
    """Serves requests from the socket `descriptor` until the client goes away.

    `settings` is JSON: level, and the packages to import before the first program.
    """
    connection = socket.socket(fileno=descriptor)
    values = json.loads(settings)
    try:
        rights = _shut_in(values["level"], values["packages"])
        for name in values["packages"]:
            importlib.import_module(name)
        system_calls.prctl(system_calls.PR_SET_DUMPABLE, 0)
    except Exception as error:  # the reason is for the client, which knows what to do
        messages.send(connection, {"error": f"{type(error).__name__}: {error}"})
        return
    gc.freeze()  # what was made so far stays shared with the programs: no collection looks at it
    messages.send(connection, {"ready": values["level"]})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        while True:
            _serve(connection, messages.receive(connection), rights)
    except (EOFError, OSError):
        return  # the client is gone


def _serve(connection: socket.socket, request: dict[str, Any], rights: program.Rights) -> None:
    """Has a watcher run one program and send the reply, or begin a session."""
    processes.forget_ended_children()
    if "session" in request:
        _begin_session(connection, request, rights)
        return
    watcher = os.fork()
    if watcher == 0:
        status = 1
        try:
            reply = _watch(connection, request, rights)
            messages.send(connection, reply)
            status = 0
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"sandbox: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    _, status = os.waitpid(watcher, 0)
    if status:
        messages.send(connection, {"error": f"the watcher ended with status {status}"})


def _begin_session(
    connection: socket.socket, request: dict[str, Any], rights: program.Rights
) -> None:
    """Has a watcher serve an interpreter at the socket that comes with the request."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    own = socket.socket(fileno=descriptors[0])
    with own:
        watcher = os.fork()
        if watcher == 0:
            status = 1
            try:
                connection.close()
                cells.watch(own, request, rights)
                status = 0
            except (OSError, EOFError):  # the client has gone
                pass
            finally:
                os._exit(status)


# What this machine gives to programs.


def _shut_in(level: str, packages: Sequence[str]) -> program.Rights:
    """Puts this process where its programs shall be. Returns the rights that they are left with."""
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (most, most))  # a grader process has small soft limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)

    paths = readable_paths(packages)
    sys.path[:] = [path for path in sys.path if path] + _package_paths(packages)
    if level == "none":
        return program.Rights(level, paths, becomes_nobody=False)
    if not seccomp.is_supported():
        raise OSError(f"the system calls of {platform.machine()} are not known here")
    if level == "namespaces":
        has_nobody = namespaces.enter(paths)
        return program.Rights(level, paths, becomes_nobody=has_nobody)
    if level not in ("landlock", "seccomp"):
        raise OSError(f"there is no level {level}")
    if level == "landlock" and not landlock.version():
        raise OSError("the kernel has no Landlock")
    is_root = os.geteuid() == 0
    return program.Rights(level, paths, becomes_nobody=is_root and _all_open_to_others(paths))


def readable_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Returns the files and directories that programs may read: Python, and what it is made of."""
    libraries = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]
    own = [os.path.join(os.path.realpath(sys.base_prefix), "lib"), f"{sys.base_prefix}/lib"]
    devices = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    found = [*libraries, *own, *_package_paths(packages), *devices]
    return tuple(path for path in dict.fromkeys(found) if os.path.exists(path))


def _package_paths(packages: Sequence[str]) -> list[str]:
    """Returns the directory of installed packages, if programs may import some of them."""
    if not packages:
        return []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [os.path.join(sys.prefix, "lib", version, "site-packages")]


def _all_open_to_others(paths: Sequence[str]) -> bool:
    """Returns whether every user can read these directories."""
    for path in paths:
        parent = os.path.realpath(path)
        while parent != "/":
            if not os.stat(parent).st_mode & 0o001 and os.path.isdir(parent):
                return False
            parent = os.path.dirname(parent)
    return True


# The watcher.


class _Pipes(NamedTuple):
    """The ends of a program's pipes that the watcher reads."""

    stdout: int
    stderr: int
    result: int


def _watch(
    connection: socket.socket, request: dict[str, Any], rights: program.Rights
) -> dict[str, Any]:
    """Runs a program to its end or to its limit. Returns the reply."""
    if rights.level == "namespaces":
        namespaces.isolate(request["files"])
    elif rights.level == "none":
        system_calls.prctl(system_calls.PR_SET_CHILD_SUBREAPER, 1)
    stdin = sealed_file(request["stdin"].encode("utf-8", "surrogateescape"))
    pipes = [os.pipe() for _ in range(3)]
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        ends = [stdin, *(write_end for _, write_end in pipes)]
        give_files(ends)
        program.run(request, rights)
    os.close(stdin)
    for _, write_end in pipes:
        os.close(write_end)

    reading = _Pipes(*(read_end for read_end, _ in pipes))
    output = Output(reading, request["output"])
    end = _wait_for_end(connection, pid, output, request, start)
    _, status, usage = os.wait4(pid, 0)
    if rights.level == "none":
        processes.end_descendants()
    if end == "exit":
        output.read_rest()
    if output.is_full:
        end = "output"
    used = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and end == "exit":
        end = "signal"
    if used > request["seconds"] and end in ("exit", "signal"):
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
    connection: socket.socket, pid: int, output: Output, request: dict[str, Any], start: float
) -> str:
    """Waits until a program ends, and kills it at its limits. Returns how it ended.

    Raises:
        OSError: the client has gone.
    """
    process = os.pidfd_open(pid)
    end = ""
    while not end:
        seconds_left = request["seconds"] - processes.cpu_seconds(pid)
        wall_left = request["wall_seconds"] - (time.monotonic() - start)
        if seconds_left <= 0:
            end = "time"
        elif wall_left <= 0:
            end = "wall"
        else:
            wait = max(min(seconds_left, wall_left), _SMALLEST_WAIT)
            ready, _, _ = select.select([process, connection, *output.open], [], [], wait)
            if connection in ready:
                raise OSError("the client has gone")
            for pipe in output.open.intersection(ready):
                output.read(pipe)
            if output.is_full:
                end = "output"
            elif process in ready:
                end = "exit"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.close(process)
    return end
