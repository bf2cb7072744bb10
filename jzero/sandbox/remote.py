"""Runs programs on a server elsewhere, over HTTP, in place of a sandbox on this machine.

Three protocols are spoken, all of them documented by their servers:
- "piston": POST URL/execute (github.com/engineer-man/piston, API v2)
- "sandbox_fusion": POST URL/run_code (github.com/bytedance/SandboxFusion)
- "e2b": POST URL/execute_batch, the router of open-r1 before E2B (scripts/e2b_router.py)

Only the program and its input are sent. Expected outputs stay here.
"""

import inspect
import json
import secrets
import time
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

from jzero.sandbox import program as inside
from jzero.sandbox.client import WALL_SECONDS_PER_CPU_SECOND, Limits, Outcome, Program, SandboxError
from jzero.types import JsonValue

_TRIES = 3
_FIRST_PAUSE = 0.5  # seconds before the second try; twice as long before the next
_NETWORK_SECONDS = 10.0  # for the way there and back, and for a queue
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

# E2B's interpreter has no standard input, so that a script there starts a process.
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
    """What a server says of a program."""

    end: str
    status: int
    stdout: str
    stderr: str


class _Protocol(NamedTuple):
    """How a kind of server is asked, and how its reply is read."""

    path: str  # below the URL
    request: Callable[[str, str, float, Limits], JsonValue]  # source, stdin, wall seconds, limits
    read: Callable[[JsonValue], _Ended]


class RemoteSandbox:
    """A server that runs programs. It has the methods of `client.Sandbox` that graders use."""

    def __init__(self, url: str, protocol: str) -> None:
        self._url = url.rstrip("/")
        self._protocol = PROTOCOLS[protocol]

    def run(self, program: Program, limits: Limits) -> Outcome:
        """Runs a program and returns how it ended.

        Raises:
            SandboxError: the server cannot be reached, or does not speak the protocol.
        """
        wall_seconds = limits.wall_seconds or limits.seconds * WALL_SECONDS_PER_CPU_SECOND
        mark = secrets.token_hex(8)
        source = _with_question(program, mark)
        request = self._protocol.request(source, program.stdin, wall_seconds, limits)
        start = time.monotonic()
        reply = self._post(request, wall_seconds + _NETWORK_SECONDS)
        try:
            ended = self._protocol.read(reply)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise SandboxError(
                f"task.sandbox.url={self._url} replied {reply!r:.200}, which is not of the "
                f"protocol ({type(error).__name__}: {error})"
            ) from None
        stdout, found, result = ended.stdout.rpartition(mark)
        if not found:  # nothing was asked for, or the program ended before its answer
            stdout, result = ended.stdout, ""
        seconds = time.monotonic() - start
        # The time of the network is in this, and the CPU time is not known.
        return Outcome(ended.end, ended.status, stdout, ended.stderr, result, 0.0, seconds)

    def _post(self, request: JsonValue, seconds: float) -> JsonValue:
        url = self._url + self._protocol.path
        content = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        pause = _FIRST_PAUSE
        failure = ""
        for number in range(_TRIES):
            if number:
                time.sleep(pause)
                pause *= 2
            try:
                call = urllib.request.Request(url, content, headers)
                with urllib.request.urlopen(call, timeout=seconds) as reply:
                    return json.loads(reply.read())
            except (OSError, ValueError) as error:  # HTTPError and URLError are OSErrors
                failure = f"{type(error).__name__}: {error}"
        raise SandboxError(f"task.sandbox.url={self._url}: {_TRIES} tries failed, {failure}")


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


def _piston_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    milliseconds = int(seconds * 1000)
    return {
        "language": "python",
        "version": "*",
        "files": [{"name": "main.py", "content": source}],
        "stdin": stdin,
        "run_timeout": milliseconds,
        "run_cpu_time": int(limits.seconds * 1000),
        "run_memory_limit": int(limits.memory_gib * 1024) * _MEBIBYTE,
    }


def _read_piston(reply: JsonValue) -> _Ended:
    run = reply["run"]
    is_late = run.get("status") == "TO"
    signal = run.get("signal")
    end = "wall" if is_late else "signal" if signal else "exit"
    status = run["code"]
    return _Ended(end, 1 if status is None else int(status), run["stdout"], run["stderr"])


def _fusion_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    return {
        "code": source,
        "language": "python",
        "stdin": stdin,
        "run_timeout": seconds,
        "memory_limit_MB": int(limits.memory_gib * 1024),
    }


def _read_fusion(reply: JsonValue) -> _Ended:
    run = reply["run_result"]
    if reply["status"] == "SandboxError" or run is None:
        raise ValueError(reply.get("message") or "no run_result")
    is_late = run["status"] == "TimeLimitExceeded"
    status = run["return_code"]
    end = "wall" if is_late else "exit"
    return _Ended(end, 1 if status is None else int(status), run["stdout"], run["stderr"])


def _e2b_request(source: str, stdin: str, seconds: float, limits: Limits) -> JsonValue:
    script = _E2B_SCRIPT.format(source=source, stdin=stdin, seconds=seconds)
    allowed = int(seconds + _NETWORK_SECONDS)
    return {
        "scripts": [script],
        "languages": ["python"],
        "timeout": allowed,
        "request_timeout": allowed,
    }


def _read_e2b(reply: JsonValue) -> _Ended:
    execution = reply[0]["execution"]
    if execution is None or execution["error"]:
        raise ValueError(f"the script failed: {execution and execution['error']}")
    return _Ended(**json.loads("".join(execution["logs"]["stdout"])))


PROTOCOLS: dict[str, _Protocol] = {
    "piston": _Protocol("/execute", _piston_request, _read_piston),
    "sandbox_fusion": _Protocol("/run_code", _fusion_request, _read_fusion),
    "e2b": _Protocol("/execute_batch", _e2b_request, _read_e2b),
}
