"""Runs programs on a remote server, over HTTP, instead of a sandbox on this machine.

Supports three protocols, all of them documented by their servers:
- "piston": POST URL/execute (github.com/engineer-man/piston, API v2)
- "sandbox_fusion": POST URL/run_code (github.com/bytedance/SandboxFusion)
- "e2b": POST URL/execute_batch, the router of open-r1 in front of E2B (scripts/e2b_router.py)

Only the program and its input are sent. Expected outputs stay here. `jzero.http` bounds and retries
the requests. A malformed reply, or one that is longer than the limits of the program allow, is not
a verdict on the program.
"""

import inspect
import json
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from jzero import http, json_values
from jzero.sandbox import program as inside
from jzero.sandbox.client import WALL_SECONDS_PER_CPU_SECOND, Limits, Outcome, Program, SandboxError
from jzero.types import JsonValue

_RETRIES = 2
_MAX_STATUS = 2**31
# A reply holds the output once or twice, and JSON writes a control character in 6 bytes.
_REPLY_BYTES_PER_OUTPUT_BYTE = 12
NETWORK_SECONDS = 10.0  # for the round trip, and for a queue
_MEBIBYTE = 2**20

# A script that answers the question about a program on the last line of its output.
_QUESTION_SCRIPT = """
import json, sys
from typing import Any
{encode}
{find}
values = {{"__name__": "program"}}
question = json.loads({question!r})
exec(compile({source!r}, "<program>", "exec"), values)
if "expression" in question:
    value = eval(question["expression"], values)
else:
    value = find(values, question["function"])(*question["arguments"])
sys.stdout.flush()
print("\\n" + {mark!r} + json.dumps(encode(value)))
"""

# E2B's interpreter has no standard input, so the script starts a process.
_E2B_SCRIPT = """
import json, subprocess, sys
try:
    done = subprocess.run([sys.executable, "-c", {source!r}], input={stdin!r}, text=True,
                          capture_output=True, timeout={seconds!r})
    outcome = dict(end="exit", status=done.returncode, stdout=done.stdout, stderr=done.stderr)
except subprocess.TimeoutExpired:
    outcome = dict(end="wall", status=1, stdout="", stderr="")
print(json.dumps(outcome))
"""


class _Ended(NamedTuple):
    """The end of a program, as reported by the server."""

    end: str
    status: int
    stdout: str
    stderr: str


class _Protocol(NamedTuple):
    """The request and the reply of a kind of server."""

    path: str  # below the URL
    request: Callable[[str, str, float, Limits], JsonValue]  # source, stdin, wall seconds, limits
    read: Callable[[JsonValue], _Ended]  # raises ValueError for a malformed reply


class RemoteSandbox:
    """A server that runs programs. It has the methods of `client.Sandbox` that graders use."""

    def __init__(self, url: str, protocol: str, network_seconds: float = NETWORK_SECONDS) -> None:
        """`network_seconds`, for the round trip, is added to a program's own limit."""
        self._network_seconds = network_seconds
        self._client = http.Client(
            "task.sandbox.url",
            url,
            seconds=network_seconds,
            retries=_RETRIES,
        )
        self._protocol = PROTOCOLS[protocol]

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program and returns its outcome.

        Raises:
            SandboxError: the server cannot be reached, or does not follow the protocol.
        """
        wall_seconds = limits.wall_seconds or limits.seconds * WALL_SECONDS_PER_CPU_SECOND
        # A random mark cannot occur in the program's own output by accident.
        mark = secrets.token_hex(8)
        source = _with_question(program, mark)
        request = self._protocol.request(source, program.stdin, wall_seconds, limits)
        start = time.monotonic()
        output_bytes = int(limits.output_mib * _MEBIBYTE)
        try:
            ended = self._client.ask(
                self._protocol.path,
                request,
                self._protocol.read,
                max_bytes=_REPLY_BYTES_PER_OUTPUT_BYTE * output_bytes + _MEBIBYTE,
                seconds=wall_seconds + self._network_seconds,
            )
        except http.RemoteError as error:
            raise SandboxError(str(error)) from None
        # The last mark counts: the answer is written after all output of the program.
        stdout, has_mark, result = ended.stdout.rpartition(mark)
        if not has_mark:  # no value was requested, or the program ended before its answer
            stdout, result = ended.stdout, ""
        seconds = time.monotonic() - start
        if len(ended.stdout.encode()) + len(ended.stderr.encode()) > output_bytes + _MEBIBYTE:
            return Outcome("output", 1, "", "", "", 0.0, seconds)
        # The wall time includes the network; the CPU time is unknown.
        return Outcome(ended.end, ended.status, stdout, ended.stderr, result, 0.0, seconds)


def _with_question(program: Program, mark: str) -> str:
    """Returns the source of a script that runs the program and answers the question about it."""
    if program.expression:
        question = {"expression": program.expression}
    elif program.function:
        question = {"function": program.function, "arguments": program.arguments}
    else:
        return program.source
    return _QUESTION_SCRIPT.format(
        encode=inspect.getsource(inside.encode),
        find=inspect.getsource(inside.find),
        question=json.dumps(question),
        source=program.source,
        mark=mark,
    )


def _status_of(run: JsonValue, path: tuple[str, ...]) -> int:
    """Returns an exit status, 1 if a signal or a limit has left none."""
    status = json_values.optional_member(run, path, int, 1)
    if abs(status) >= _MAX_STATUS:
        raise ValueError(f"{path[-1]} is not an exit status")
    return status


def _text_of(run: JsonValue, name: str) -> str:
    return json_values.member(run, (name,), str)


def _piston_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    milliseconds = int(seconds * 1000)
    return {
        "language": "python",
        "version": "*",  # the newest that is installed
        "files": [{"name": "main.py", "content": source}],
        "stdin": stdin,
        "run_timeout": milliseconds,
        "run_cpu_time": int(limits.seconds * 1000),
        "run_memory_limit": int(limits.memory_gib * 1024) * _MEBIBYTE,
    }


def _read_piston(reply: JsonValue) -> _Ended:
    run = json_values.member(reply, ("run",), dict)
    end_code = json_values.optional_member(run, ("status",), str, "")
    is_late = end_code == "TO"  # Piston's code of a timeout
    signal = json_values.optional_member(run, ("signal",), str, "")
    end = "wall" if is_late else "signal" if signal else "exit"
    status = _status_of(run, ("code",))
    return _Ended(end, status, _text_of(run, "stdout"), _text_of(run, "stderr"))


def _fusion_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    return {
        "code": source,
        "language": "python",
        "stdin": stdin,
        "run_timeout": seconds,
        "memory_limit_MB": int(limits.memory_gib * 1024),
    }


def _read_fusion(reply: JsonValue) -> _Ended:
    if json_values.member(reply, ("status",), str) == "SandboxError":
        raise ValueError(
            json_values.optional_member(reply, ("message",), str, "") or "SandboxError"
        )
    run = json_values.member(reply, ("run_result",), dict)
    is_late = json_values.member(run, ("status",), str) == "TimeLimitExceeded"
    end = "wall" if is_late else "exit"
    status = _status_of(run, ("return_code",))
    return _Ended(end, status, _text_of(run, "stdout"), _text_of(run, "stderr"))


def _e2b_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    script = _E2B_SCRIPT.format(source=source, stdin=stdin, seconds=seconds)
    allowed = int(seconds + NETWORK_SECONDS)
    return {
        "scripts": [script],
        "languages": ["python"],
        "timeout": allowed,
        "request_timeout": allowed,
    }


def _read_e2b(reply: JsonValue) -> _Ended:
    execution = json_values.member(reply, (0, "execution"), dict)
    if execution.get("error"):
        raise ValueError(f"the script failed: {execution['error']}")
    lines = json_values.member(execution, ("logs", "stdout"), list)
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("logs.stdout has a line that is not text")
    run = http.parse_json("".join(lines).encode())
    end = json_values.member(run, ("end",), str)
    if end not in ("exit", "wall"):
        raise ValueError(f"end is {end}")
    status = json_values.member(run, ("status",), int)
    return _Ended(end, status, _text_of(run, "stdout"), _text_of(run, "stderr"))


PROTOCOLS: dict[str, _Protocol] = {
    "piston": _Protocol("execute", _piston_request, _read_piston),
    "sandbox_fusion": _Protocol("run_code", _fusion_request, _read_fusion),
    "e2b": _Protocol("execute_batch", _e2b_request, _read_e2b),
}
