"""The process of a judged program: it gives up its privileges and runs the program.

A program reads a file as its standard input, and its standard output goes to the watcher. If a
value is requested, a function call or an expression is evaluated after the program, and its value
is written to the descriptor RESULT as JSON. The program may write there, too: all output of this
process is only the program's claim, and the client compares it.

Runs inside of the sandbox, and imports only the standard library. This is the only module of jzero
that runs text of a policy as code.
"""

import ast
import atexit
import json
import linecache
import os
import random
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from jzero.sandbox import landlock, messages, namespaces, pipes, seccomp, system_calls

RESULT = 3  # the descriptor for values
STARTED = 4  # the descriptor that gets a byte before the first line of a program runs
CELLS = 4  # the descriptor from which a session reads its cells
SUCCEEDED, FAILED = b"0", b"1"  # a session writes one of these to RESULT after a cell
_STACK = 64 << 20  # bytes, for deep recursions of the program
_OPEN_FILES = 64
_THREADS = 64
_FILE = "<program>"


class Rights(NamedTuple):
    """The privileges that a program of a sandbox keeps. `level` is a name of `levels.LEVELS`."""

    level: str
    paths: tuple[str, ...]  # paths that the program may read
    becomes_nobody: bool  # whether the program changes to an unprivileged user


def run(
    connection: socket.socket,
    ends: Sequence[int],
    limits: messages.Message,
    rights: Rights,
) -> None:
    """Receives a program and its input, and runs it in this process, which ends with the program.

    `ends` become the descriptors 1 to STARTED. No other process of the sandbox receives the source
    or the input, and `connection` is closed before the first line of the program runs.
    """
    try:
        request = messages.receive(connection)
        stdin = pipes.sealed_file(messages.receive_bytes(connection))
        # `give_files` closes the descriptor with all others.
        connection.detach()
    except (EOFError, OSError):  # the client has gone
        os._exit(NOT_CONFINED)
    pipes.give_files([stdin, *ends])
    _confine(limits, rights)
    os.write(STARTED, b"1")
    os.close(STARTED)
    os._exit(_run_and_answer(request))


def run_session(limits: messages.Message, rights: Rights) -> None:
    """Runs the cells that come through CELLS, as `cells` writes them, until the pipe ends.

    All cells share their variables. Their output and their errors go to descriptor 1.
    """
    _confine(limits, rights)
    values = vars(_become_main())
    random.seed(0)  # a replayed episode draws the same random numbers
    status = 1
    try:
        with open(CELLS, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                has_failed = _run_cell(json.loads(line)["source"], f"<cell {number}>", values)
                os.write(RESULT, FAILED if has_failed else SUCCEEDED)
        status = 0
    finally:  # this process must exit here, even if a cell closed these files
        os._exit(status)


def _run_cell(source: str, name: str, values: dict[str, object]) -> bool:
    """Runs a cell and prints the value of its final expression. Returns whether the cell raised."""
    # Tracebacks show the lines of a cell only if linecache has them.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    has_failed = False
    try:
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, name, "exec"), values)
        if isinstance(last, ast.Expr):
            # Like the interactive interpreter, prints the value of a final expression.
            value = eval(compile(ast.Expression(last.value), name, "eval"), values)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # also SystemExit: a cell does not end the session
        has_failed = True
        _print_error_of_cell(error)
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except (OSError, ValueError, AttributeError):  # the cell closed or replaced it
            has_failed = True
            _open_files()
    return has_failed


def _print_error_of_cell(error: BaseException) -> None:
    """Prints a traceback without the frame of this module."""
    try:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # the printing of a hostile error may fail, too
        print("the cell failed, and so did the printing of its error", file=sys.__stderr__)


def _confine(limits: messages.Message, rights: Rights) -> None:
    """Gives up privileges, or ends this process."""
    try:
        os.setsid()
        _limit(limits)
        give_up_rights(rights)
        _reset_signals()
    except BaseException:  # no program may run with privileges that could not be given up
        traceback.print_exc()
        os._exit(NOT_CONFINED)


NOT_CONFINED = 250  # the exit status of a program that never started


def _limit(limits: messages.Message) -> None:
    # The watcher ends a program at its limit of CPU time. The kernel's limit, 2 seconds later,
    # applies only if the watcher fails.
    seconds = int(limits["seconds"]) + 2
    kernel_limits = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits["files"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_STACK: _STACK,
    }
    for kind, limit in kernel_limits.items():
        _, hard_limit = resource.getrlimit(kind)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(kind, (limit, limit))


def give_up_rights(rights: Rights) -> None:
    """Permanently reduces this process to the privileges of its level.

    Raises:
        OSError: the kernel refuses a call.
    """
    if rights.becomes_nobody:
        os.setgroups([])
        # The groups first: an unprivileged user may not change them.
        os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
        os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
    # If the watcher is killed, no process enforces the limits, so the kernel ends the program. A
    # change of the user resets this setting, so it comes after the change.
    system_calls.prctl(system_calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if rights.level == "none":
        return
    # Threads count against this limit, and the namespace has no other processes. Without a process
    # namespace the limit would count all processes of this user.
    if rights.level == "namespaces":
        resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    system_calls.drop_capabilities()
    system_calls.prctl(system_calls.PR_SET_NO_NEW_PRIVS, 1)
    if rights.level == "landlock":
        landlock.restrict_to_reading(rights.paths)
    # Only in namespaces does a program have a directory that it may write to.
    seccomp.install(os.getpid(), may_write_files=rights.level == "namespaces")


def _reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _become_main() -> types.ModuleType:
    """Returns a new module `__main__`, and opens the standard files at descriptors 0, 1 and 2."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    _open_files()
    return module


def _open_files() -> None:
    # These files stay open as long as the program runs.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _run_and_answer(request: dict[str, Any]) -> int:
    """Runs the program as `__main__`, answers the question about it, returns the exit status."""
    module = _become_main()
    question = request.get("question")
    if question is not None:
        # The body of `if __name__ == "__main__"` must not run if a value is requested.
        module.__name__ = "program"
    try:
        code = compile(request["source"], _FILE, "exec")
        exec(code, vars(module))
        if question is not None:
            answer(vars(module), question)
        # Waits for the program's threads, as the interpreter does.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:  # also KeyboardInterrupt and MemoryError
        status = 1
        _print_error()
    # The process ends with os._exit, which does not call these functions.
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except (OSError, ValueError, AttributeError):  # the program closed or replaced it
            status = status or 1
    return status


def _status_of(end: SystemExit) -> int:
    """Returns the exit status that the interpreter gives to sys.exit(...)."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _print_error() -> None:
    try:
        traceback.print_exc()
    except BaseException:  # the printing of a hostile error may fail, too
        print("the program failed, and so did the printing of its error", file=sys.__stderr__)


def answer(values: dict[str, Any], question: dict[str, Any]) -> None:
    """Writes the value of a call or of an expression to the descriptor RESULT.

    `question` is {"function": name, "arguments": [...]} or {"expression": text}. A function may be
    a method of a class Solution, as in LeetCode's form.
    """
    if "expression" in question:
        value = eval(compile(question["expression"], _FILE, "eval"), values)
    else:
        value = find(values, question["function"])(*question["arguments"])
    content = json.dumps(encode(value)).encode()
    with open(RESULT, "wb", closefd=False) as file:
        file.write(content)


def find(values: dict[str, Any], name: str) -> Any:
    """Returns the function `name` of the program, or the method of its class Solution."""
    name = name.rpartition(".")[2]
    if name in values:
        return values[name]
    if "Solution" in values:
        return getattr(values["Solution"](), name)
    raise NameError(f"the program defines no function {name}")


def encode(value: Any) -> object:
    """Returns a value as JSON. Types that JSON does not have are marked."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    if hasattr(value, "__iter__"):  # an iterator or a range: not equal to any list
        return {"iterable": [encode(item) for item in value]}
    return {"other": repr(value)}


def decode(value: Any) -> Any:
    """Returns the value that `encode` wrote. An object of the program becomes its `repr`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "other":
        return content
    items = [decode(item) for item in content]
    return {"tuple": tuple, "set": set, "iterable": iter}[kind](items)
