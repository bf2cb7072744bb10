"""Whole runs of `python -m jzero.main` as processes, their files, and stand-ins for servers."""

import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jzero.config import tiny_arch

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ["-m", "jzero.main"]
STEPS = 14

# A run that takes a second once its programs are compiled. Its warm start makes rewards differ, and
# its evaluations take half of the time, so that signals of a test arrive during them, too.
ARCH = tiny_arch(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
SETTINGS = f"""
model.arch={ARCH} task.options=numbers_min=2 task.options=numbers_max=2
task.options=value_max=9 task.options=target_max=60 task.options=format_score=0.3
rollout.num_prompts=4 rollout.group_size=4 rollout.max_prompt_tokens=16
rollout.max_new_tokens=24 rollout.num_slots=32 rollout.page_size=8
warm_start.steps=60 warm_start.lr=2e-2 warm_start.batch_size=8 warm_start.tries=1
train.microbatch_tokens=256 train.steps={STEPS} train.checkpoint_every=4 train.logged_rollouts=2
optimizer.lr=1e-3
eval.problems=16 eval.samples=2 eval.every=2
"""
RUN = [
    f"--config={ROOT}/configs/countdown.py:tiny",
    *(f"--config.{setting}" for setting in SETTINGS.split()),
]


def launch(environment: dict[str, str], workdir: Path, *changes: str) -> subprocess.Popen:
    """Starts the run `RUN` in `workdir`; `changes` are further arguments."""
    return subprocess.Popen(
        [sys.executable, *PROGRAM, *RUN, f"--workdir={workdir}", *changes],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch_hosts(
    environment: dict[str, str],
    workdir: Path,
    *changes: str,
    number: int = 2,
    devices: int = 2,
    last_changes: Sequence[str] = (),
) -> list[subprocess.Popen]:
    """Starts the run `RUN` as one process for each of `number` hosts with as many devices.

    `last_changes` are further arguments of the last process.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = environment | {"JAX_NUM_CPU_DEVICES": str(devices)}
    joining = [*changes, f"--coordinator=localhost:{port}", f"--num_processes={number}"]
    launched = []
    for index in range(number):
        own_changes = last_changes if index == number - 1 else ()
        process_id = f"--process_id={index}"
        launched.append(launch(environment, workdir, *joining, process_id, *own_changes))
    return launched


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Starts a process that does not outlive the block, also if the block fails."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:  # Popen would wait for ever for a server that nobody stops
            process.kill()


def finish(process: subprocess.Popen, code: int = 0, seconds: int = 300) -> tuple[str, str]:
    """Waits for a process and checks its exit status; returns its stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err[-3000:]
    return out, err


def rows(path: Path) -> list[dict]:
    """Reads the complete lines of a file of JSON lines, which may not exist yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def timeless(path: Path) -> list[dict]:
    """Reads metrics without those of the clock, of compilations and of the process's memory."""

    def is_timed(name: str) -> bool:
        groups = ("time/", "compile/", "memory/")
        return name.startswith(groups) or name.endswith(("tokens_per_second", "/seconds"))

    kept = []
    for row in rows(path):
        kept.append({name: value for name, value in row.items() if not is_timed(name)})
    return kept


def wait_for(process: subprocess.Popen, path: Path, count: int) -> None:
    """Waits until a file that `process` writes has `count` complete lines."""
    while len(rows(path)) < count:
        if process.poll() is not None:
            pytest.fail(f"ended before line {count}: {process.communicate()}")
        time.sleep(0.005)


class Stand(ThreadingHTTPServer):
    """A stand-in for a server, which serves on a free port in a thread while it is entered."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self):
        # `shutdown` waits for the end of an interval.
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Metadata(Stand):
    """A stand-in for the metadata server of Google. `answer` is the text, or None for an error."""

    def __init__(self) -> None:
        metadata = self
        self.answer: str | None = "FALSE"
        self.requests: list[tuple[str, str | None]] = []  # path, and the header Metadata-Flavor

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                metadata.requests.append((self.path, self.headers["Metadata-Flavor"]))
                self.send_response(200 if metadata.answer is not None else 503)
                self.end_headers()
                self.wfile.write((metadata.answer or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, every line of which is complete."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes a file of JSON lines and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


Answer = tuple[int, object]  # status, and JSON


class Hub(Stand):
    """Answers the requests of a push as the hub does, for the model or the data set me/tiny.

    Attributes:
        kind: "models" or "datasets".
        branches: the files of every branch, by the file's path. No branch: no model yet.
        is_private: whether the model is private; None: no model yet.
        failures: how many of the next requests fail, with a status that its client does not retry.
        is_stalled: whether requests get no answer at all.
        commits: the branch of every commit, in their order.
    """

    def __init__(self, kind: str = "models") -> None:
        super().__init__(Handler)
        self.kind = kind
        self.branches: dict[str, dict[str, bytes]] = {}
        self.is_private: bool | None = None
        self.failures = 0
        self.is_stalled = False
        self.commits: list[str] = []
        self.requests = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a process that may push to this hub."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_secret",
        }

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if parts[:4] != ["api", self.kind, "me", "tiny"]:
            return 404, {"error": f"no {path}"}
        match method, *parts[4:]:
            case "GET", "refs":
                return self.list_branches()
            case "POST", "branch", branch:
                self.branches[branch] = dict(self.branches["main"])
                return 200, {}
            case "GET", "tree", branch:
                return self.list_files(branch)
            case "POST", "preupload", _:
                return self.upload_modes(json.loads(body)["files"])
            case "POST", "commit", branch:
                return self.commit(branch, [json.loads(line) for line in body.splitlines()])
        names = [{"rfilename": path} for path in self.branches.get("main", {})]
        return 200, {
            "id": "me/tiny",
            "sha": "0" * 40,
            "siblings": names,
            "private": bool(self.is_private),
        }

    def create(self, request: dict[str, Any]) -> Answer:
        """Makes the branch main; the status is 409 if there is one."""
        status = 409 if self.branches else 200
        if not self.branches:
            self.is_private = request.get("visibility") == "private"
        self.branches.setdefault("main", {})
        return status, {"url": f"{self.address}/me/tiny"}

    def list_branches(self) -> Answer:
        branches = []
        for name in self.branches:
            branches.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0" * 40})
        return 200, {"branches": branches, "converts": [], "tags": []}

    def list_files(self, branch: str) -> Answer:
        files = []
        for path, data in self.branches[branch].items():
            files.append({"type": "file", "path": path, "size": len(data), "oid": "0" * 40})
        return 200, files

    def upload_modes(self, files: list[dict[str, Any]]) -> Answer:
        """Says that every file comes in the commit itself."""
        modes = []
        for file in files:
            mode = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            modes.append(mode)
        return 200, {"files": modes}

    def commit(self, branch: str, operations: list[dict[str, Any]]) -> Answer:
        self.commits.append(branch)
        files = self.branches[branch]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = "1" * 40
        return 200, {
            "commitUrl": f"{self.address}/me/tiny/commit/{commit}",
            "commitOid": commit,
        }


class Handler(BaseHTTPRequestHandler):
    """Passes requests with the right token to the hub."""

    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests += 1
        while self.server.is_stalled:
            time.sleep(0.05)
        if self.server.failures > 0:
            self.server.failures -= 1
            status, value = 408, {"error": "the hub is busy"}
        elif self.headers.get("authorization") == "Bearer hf_secret":
            status, value = self.server.answer(self.command, self.path, body)
        else:
            status, value = 401, {"error": "who are you?"}
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET
