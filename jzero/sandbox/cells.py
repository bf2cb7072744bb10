"""The watcher of a session: an interpreter that runs one cell of code after the other.

The interpreter (`program.run_session`) keeps its variables between cells. The watcher forwards each
cell, collects its output, and kills the interpreter if a cell exceeds a limit.

    limits    seconds (of the interpreter), memory, files
    cell      source, seconds, wall_seconds, output
    reply     end, output, failed

`end` is "" while the interpreter continues, otherwise the reason of its end: "exit", "time", "wall"
or "output". If the client closes its socket, the interpreter ends. Runs inside of the sandbox, and
imports only the standard library.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import NamedTuple

from jzero.sandbox import messages, namespaces, processes, program, system_calls
from jzero.sandbox.pipes import Output, give_files, sealed_file

_SMALLEST_WAIT = 0.002  # seconds


class _Interpreter(NamedTuple):
    """A process, and the watcher's ends of its pipes."""

    pid: int
    process: int  # a descriptor that can be read once the process has ended
    output: int
    results: int  # a byte for each cell: whether it raised
    cells: int


def watch(connection: socket.socket, rights: program.Rights) -> None:
    """Serves one session. Raises OSError or EOFError if the client has gone.

    The interpreter is forked before the first cell arrives, so that it holds only the cells that it
    runs.
    """
    limits = messages.receive(connection)
    if rights.level == "namespaces":
        namespaces.isolate(limits["files"])
    elif rights.level == "none":
        # Programs of this level may fork: adopts their orphans, so that they can be found and
        # killed.
        system_calls.prctl(system_calls.PR_SET_CHILD_SUBREAPER, 1)
    interpreter = _start(limits, rights)
    try:
        messages.send(connection, {"ready": True})
        end = ""
        while not end:
            reply = _run_cell(connection, interpreter, messages.receive(connection))
            end = reply["end"]
            if end:
                _kill(interpreter)
            messages.send(connection, reply)
    finally:
        _kill(interpreter)
        if rights.level == "none":
            processes.end_descendants()


def _start(limits: messages.Message, rights: program.Rights) -> _Interpreter:
    stdin = sealed_file(b"")
    output, child_output = os.pipe()
    results, child_results = os.pipe()
    child_cells, cells = os.pipe()
    pid = os.fork()
    if pid == 0:
        give_files([stdin, child_output, child_output, child_results, child_cells])
        program.run_session(limits, rights)
    for descriptor in (stdin, child_output, child_results, child_cells):
        os.close(descriptor)
    # The interpreter's own code may misuse these pipes, and must not block the watcher.
    for descriptor in (results, cells):
        os.set_blocking(descriptor, False)
    return _Interpreter(pid, os.pidfd_open(pid), output, results, cells)


def _kill(interpreter: _Interpreter) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(interpreter.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(interpreter.pid, 0)


def _run_cell(
    connection: socket.socket,
    interpreter: _Interpreter,
    cell: messages.Message,
) -> messages.Message:
    """Runs a cell to its end or to its limit. Returns the reply."""
    output = Output([interpreter.output], cell["output"])
    end, failed, used_before = "", False, 0.0
    try:
        # The limit is for one cell: earlier cells do not count.
        used_before = processes.cpu_seconds(interpreter.pid)
        # A line of the pipe is a cell, and JSON has no line breaks.
        content = json.dumps({"source": cell["source"]}).encode() + b"\n"
        # The pipe is empty, because the interpreter has read all earlier cells.
        if os.write(interpreter.cells, content) < len(content):
            end = "exit"
    except OSError:  # the interpreter has ended, or has closed its end of the pipe
        end = "exit"
    start = time.monotonic()
    while not end:
        seconds_left = cell["seconds"] - _cpu_seconds(interpreter) + used_before
        wall_left = cell["wall_seconds"] - (time.monotonic() - start)
        if seconds_left <= 0:
            end = "time"
            break
        if wall_left <= 0:
            end = "wall"
            break
        wait = max(min(seconds_left, wall_left), _SMALLEST_WAIT)
        waiting = [interpreter.process, connection, interpreter.results, *output.open]
        ready, _, _ = select.select(waiting, [], [], wait)
        if connection in ready:
            raise EOFError("the client has gone")
        for pipe in output.open.intersection(ready):
            output.read(pipe)
        if output.is_full:
            end = "output"
        elif interpreter.process in ready:
            end = "exit"
        elif interpreter.results in ready:
            result = os.read(interpreter.results, 1 << 16)
            failed = result.endswith(program.FAILED)
            if result:
                break
            end = "exit"  # the pipe ends before the process
    output.read_rest()
    if output.is_full:
        end = end or "output"
    return {"end": end, "output": output.text(interpreter.output), "failed": failed}


def _cpu_seconds(interpreter: _Interpreter) -> float:
    try:
        return processes.cpu_seconds(interpreter.pid)
    except OSError:  # the interpreter has just ended
        return 0.0
