"""What happens in the process of a judged program: it gives up its rights, and runs.

A program reads a file as its standard input, and its standard output goes to the watcher. Where a
value is asked for, a call of a function or an expression is evaluated after the program, and the
value is written to the descriptor RESULT as JSON. The program may write there, too: whatever comes
out of this process is nothing but the program's claim, and the client compares it.

Runs inside of the sandbox, and imports the standard library alone. This is the one module of jzero
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
import sys
import threading
import traceback
import types
from typing import Any, NamedTuple

from jzero.sandbox import landlock, messages, namespaces, seccomp, system_calls

RESULT = 3  # the descriptor for values
CELLS = 4  # the descriptor from which a session reads its cells
SUCCEEDED, FAILED = b"0", b"1"  # what a session writes to RESULT after a cell
_STACK = 64 << 20  # bytes; deep recursions of the program
_OPEN_FILES = 64
_THREADS = 64
_FILE = "<program>"


class Rights(NamedTuple):
    """What a program of a sandbox is left with. `level` is a name of `levels.LEVELS`."""

    level: str
    paths: tuple[str, ...]  # that it may read
    becomes_nobody: bool  # whether it runs as the user NOBODY


def run(request: dict[str, Any], rights: Rights) -> None:
    """Runs a program in this process, which ends with it. Descriptors 0 to RESULT are its files."""
    _shut_in(request, rights)
    status = _run_and_answer(request)
    os._exit(status)


def run_session(request: messages.Message, rights: Rights) -> None:
    """Runs the cells that come through CELLS, as `cells` writes them, until the pipe ends.

    All cells share their variables. What they print, and what they raise, goes to descriptor 1.
    """
    _shut_in(request, rights)
    values = vars(_become_main())
    random.seed(0)  # an episode that is built again goes the same way
    status = 1
    try:
        with open(CELLS, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                has_failed = _run_cell(json.loads(line)["source"], f"<cell {number}>", values)
                os.write(RESULT, FAILED if has_failed else SUCCEEDED)
        status = 0
    finally:  # whatever a cell did to these files, this process goes nowhere else
        os._exit(status)


def _run_cell(source: str, name: str, values: dict[str, object]) -> bool:
    """Runs a cell, and prints the value of the expression that it ends with. Returns whether it
    raised.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    has_failed = False
    try:
        tree = ast.parse(source, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, name, "exec"), values)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), values)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # SystemExit, too: a cell does not end the session
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


def _shut_in(request: messages.Message, rights: Rights) -> None:
    """Gives up what this process shall not have, or ends it."""
    try:
        os.setsid()
        _limit(request)
        give_up_rights(rights)
        _reset_signals()
    except BaseException:  # nothing may run with rights that could not be given up
        traceback.print_exc()
        os._exit(NOT_SHUT_IN)


NOT_SHUT_IN = 250  # the exit status of a program that never began


def _limit(request: dict[str, Any]) -> None:
    # The watcher ends a program at its limit of CPU time; the kernel does where the watcher fails.
    seconds = int(request["seconds"]) + 2
    limits = {
        resource.RLIMIT_AS: request["memory"],
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: request["files"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_STACK: _STACK,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def give_up_rights(rights: Rights) -> None:
    """Leaves this process with the rights of its level, for ever. Raises OSError if it cannot."""
    if rights.becomes_nobody:
        os.setgroups([])
        os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
        os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
    if rights.level == "none":
        return
    # Threads count against this limit, and there are no other processes. Without a process
    # namespace the limit would count everything that the user runs.
    if rights.level == "namespaces":
        resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    system_calls.drop_capabilities()
    system_calls.prctl(system_calls.PR_SET_NO_NEW_PRIVS, 1)
    if rights.level == "landlock":
        landlock.restrict_to_reading(rights.paths)
    seccomp.install(os.getpid(), may_write_files=rights.level == "namespaces")


def _reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _become_main() -> types.ModuleType:
    """Returns a new module `__main__`, whose files are the descriptors 0, 1 and 2."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    _open_files()
    return module


def _open_files() -> None:
    # These are the program's for as long as it runs.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _run_and_answer(request: dict[str, Any]) -> int:
    """Runs the program as `__main__`, and answers the question about it. Returns the status."""
    module = _become_main()
    question = request.get("question")
    if question is not None:
        # The guard of a main program is not what is asked for.
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
    except BaseException:  # KeyboardInterrupt, MemoryError, whatever the program raises
        status = 1
        _print_error()
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
    """Returns a value as JSON that `comparison.decode` reads: tuples and sets are marked."""
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
    if hasattr(value, "__iter__"):
        return [encode(item) for item in value]
    return {"other": repr(value)}
