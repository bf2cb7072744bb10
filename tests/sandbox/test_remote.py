"""Programs on a server elsewhere: a small server speaks each protocol and really runs them."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

import pytest
from runs import Stand

from jzero.sandbox import comparison, remote
from jzero.sandbox.client import Limits, Program, SandboxError


def run_source(source: str, stdin: str, seconds: float) -> dict[str, object]:
    command = [sys.executable, "-I", "-S", "-c", source]
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "stdout": "", "stderr": "", "late": True}
    return {
        "code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "late": False,
    }


def piston(request: dict) -> object:
    assert request["language"] == "python"
    seconds = request["run_timeout"] / 1000
    run = run_source(request["files"][0]["content"], request["stdin"], seconds)
    is_late = run.pop("late")
    run |= {"signal": "SIGKILL" if is_late else None, "status": "TO" if is_late else None}
    return {"language": "python", "version": "3.12.0", "run": run}


def fusion(request: dict) -> object:
    run = run_source(request["code"], request["stdin"], request["run_timeout"])
    status = "TimeLimitExceeded" if run.pop("late") else "Finished"
    result = {"status": status, "execution_time": 0.1, "return_code": run["code"]}
    result |= {"stdout": run["stdout"], "stderr": run["stderr"]}
    is_success = status == "Finished" and run["code"] == 0
    return {
        "status": "Success" if is_success else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": result,
    }


def e2b(request: dict) -> object:
    [script] = request["scripts"]
    assert request["languages"] == ["python"]
    run = run_source(script, "", request["timeout"])
    logs = {"stdout": [run["stdout"]], "stderr": [run["stderr"]]}
    execution = {"results": [], "logs": logs, "error": None, "execution_count": 1}
    return [{"execution": execution}]


SERVERS = {"/execute": piston, "/run_code": fusion, "/execute_batch": e2b}


class Handler(BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []
    failures_left = 0

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        Handler.requests.append(content.decode())
        if Handler.failures_left:
            Handler.failures_left -= 1
            self.send_error(503)
            return
        reply = json.dumps(SERVERS[self.path](json.loads(content))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(quick_retries: None):
    Handler.requests = []
    Handler.failures_left = 0
    with Stand(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("protocol", remote.PROTOCOLS)
def test_a_server_runs_programs_and_calls(protocol: str, url: str) -> None:
    there = remote.RemoteSandbox(url, protocol)

    outcome = there.run(Program("print(int(input()) + 1)", stdin="6"), Limits())
    assert (outcome.stdout, outcome.end, outcome.status) == ("7\n", "exit", 0)

    call = Program("print('noise')\ndef f(a): return (a, {a})", function="f", arguments=(1,))
    outcome = there.run(call, Limits())
    assert comparison.same_result(outcome.result, [1, {"set": [1]}]), outcome
    assert outcome.has_succeeded

    outcome = there.run(Program("def g(): return 4", expression="g() * 2"), Limits())
    assert comparison.same_result(outcome.result, 8), outcome

    outcome = there.run(Program("1 / 0"), Limits())
    assert not outcome.has_succeeded
    assert "ZeroDivisionError" in outcome.stderr

    slow = Program("import time\ntime.sleep(99)")
    assert there.run(slow, Limits(wall_seconds=0.3)).end == "wall"


def test_a_server_that_is_busy_is_asked_again_and_one_that_fails_is_no_verdict(url: str) -> None:
    there = remote.RemoteSandbox(url, "piston")
    Handler.failures_left = 1
    assert there.run(Program("print(1)"), Limits()).stdout == "1\n"
    assert len(Handler.requests) == 2

    Handler.failures_left = 99
    with pytest.raises(
        SandboxError, match=r"task\.sandbox\.url=http.*not answered in 3 tries.*503"
    ):
        there.run(Program("print(1)"), Limits())


def test_a_reply_of_another_kind_is_no_verdict(url: str) -> None:
    there = remote.RemoteSandbox(f"{url}/", "piston")
    SERVERS["/execute"] = fusion_reply_to_anything
    try:
        with pytest.raises(SandboxError, match="answers with a wrong reply .run is missing"):
            there.run(Program("print(1)"), Limits())
    finally:
        SERVERS["/execute"] = piston


def fusion_reply_to_anything(request: dict) -> object:
    return {"status": "Success", "run_result": {}}
