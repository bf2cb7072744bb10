"""The four servers of jzero as targets of attacks: serve, tinker, store and watch.

Each is the real application behind the real connections, in a thread of this process. Nothing is
computed: where a model would be, there is only its name. `in_process` runs the commands with their
default limits, serve and tinker with a tiny model.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
from runs import started as started_process

from jzero.jobs import store_server
from jzero.jobs.store import FolderStore
from jzero.servers import sockets
from jzero.servers.limits import ConnectionLimits
from jzero.servers.running import BoundedServer, HttpServer
from jzero.watching import server as watching
from jzero.watching.runs import Watcher

KEY = "tml-attacked"
ROOT = Path(__file__).resolve().parents[2]
BIG = 300_000  # bytes of an answer that fills the buffers of a connection


@dataclass
class Target:
    """A server that is attacked."""

    name: str
    address: tuple[str, int]
    honest_path: str  # of a GET that is answered with 200
    big_path: str  # of a GET whose answer is long; "" if there is none
    post: tuple[str, str]  # method and path that take a body; "" for a server that takes none
    content_type: str
    end: Callable[[], None]  # returns once the server has ended
    pid: int = 0  # of the process of the server; 0: this one
    body_bytes: int = 1_000_000  # of a large body that is not refused at once
    # Method, path, media type and body of an honest request with a body; "" if there is none.
    honest_post: tuple[str, str, str, bytes] = ("", "", "", b"")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a client with a key."""
        return {"Authorization": f"Bearer {KEY}"}

    def head(
        self, method: str = "GET", path: str = "", has_key: bool = True, **changes: str | None
    ) -> bytes:
        """Returns the head of a request. `changes` add or replace headers; None removes one."""
        fields: dict[str, str | None] = {"Host": f"localhost:{self.address[1]}"}
        if has_key:
            fields |= self.headers
        if method != "GET":
            fields["Content-Type"] = self.content_type
        for name, value in changes.items():
            fields[name.replace("_", "-")] = value
        lines = [f"{method} {path or self.honest_path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def ask(self, client: httpx.Client) -> list[int]:
        """Sends the honest requests. Returns their statuses."""
        url = f"http://{self.address[0]}:{self.address[1]}"
        answers = [client.get(url + self.honest_path, headers=self.headers)]
        method, path, kind, body = self.honest_post
        if method:
            headers = self.headers | {"Content-Type": kind}
            answers.append(client.request(method, url + path, headers=headers, content=body))
        return [answer.status_code for answer in answers]


def limits_of_test(limits: ConnectionLimits, request_seconds: float) -> ConnectionLimits:
    """Returns limits of a server with few connections, which ends its clients early."""
    return replace(
        limits,
        max_connections=48,
        max_address_connections=40,
        request_seconds=request_seconds,
        idle_seconds=2.0,
        grace_seconds=2.0,
    )


@contextlib.contextmanager
def in_thread(name: str, folder: Path, request_seconds: float = 5.0) -> Iterator[Target]:
    """Runs a server in a thread."""
    starts = {"serve": serve, "tinker": tinker, "store": store, "watch": watch}
    with starts[name](folder, request_seconds) as target:
        yield target


# A store without a trainer, which would need a model and samplers.
STORE_COMMAND = """
import sys, threading
from pathlib import Path
from jzero.jobs.store_server import serve
with serve("127.0.0.1:0", sys.argv[1], Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
SIZES = """
--config.model.dtype=float32 --config.rollout.kv_dtype=float32 --config.rollout.num_slots=8
--config.rollout.page_size=32 --config.rollout.decode_steps=4
"""


@contextlib.contextmanager
def in_process(name: str, folder: Path) -> Iterator[Target]:
    """Runs a server as a process, whose memory is its own, with its default limits."""
    target = TARGETS[name]()
    command = [sys.executable, "-m", f"jzero.{name}"]
    if name == "store":
        write_store(folder / "store")
        command = [sys.executable, "-c", STORE_COMMAND, str(folder / "store")]
        target.body_bytes = 16_000_000
    elif name == "watch":
        command += [str(write_run(folder / "run")), "--port=0"]
    else:
        import servers  # of the tests of serve; imports JAX

        command += [f"--model={servers.save_model(folder / 'model')}", "--port=0", *SIZES.split()]
    if name == "tinker":
        (folder / "keys").write_text(f"ann {KEY}\n")
        command += [f"--keys={folder / 'keys'}", f"--store={folder / 'tinker'}", "--context=128"]
        command += ["--config.train.microbatch_tokens=256"]
        target.body_bytes = 16_000_000
    environment = os.environ | {"JZERO_API_KEY": KEY, "JZERO_STORE_KEY": KEY}
    log = folder / "log"
    with (
        log.open("w") as errors,
        started_process(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                target.address = "127.0.0.1", int(found[1])
                break
        assert target.address[1], log.read_text()
        # The pipe must not fill up.
        threading.Thread(target=process.stdout.read, daemon=True).start()

        def end() -> None:
            if name == "store":
                assert process.stdin is not None
                process.stdin.close()
            else:
                process.send_signal(signal.SIGTERM)
            process.wait(60)

        target.end, target.pid = end, process.pid
        yield target
    assert "Traceback" not in log.read_text(), log.read_text()


@contextlib.contextmanager
def running(target: Target, server: HttpServer) -> Iterator[Target]:
    """Runs a server that binds its own address."""
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target.address = server.server_address
        target.end = server.shutdown
        yield target


@contextlib.contextmanager
def running_bound(
    target: Target, make: Callable[[Callable[[], None]], BoundedServer]
) -> Iterator[Target]:
    """Runs a server for sockets that are bound here."""
    bound = sockets.bind("127.0.0.1", 0)
    sockets.listen("127.0.0.1", 0, bound)
    is_listening = threading.Event()
    server = make(is_listening.set)
    thread = threading.Thread(target=server.run, args=(bound,), daemon=True)
    thread.start()
    assert is_listening.wait(30)

    def end() -> None:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()

    target.address = bound[0].getsockname()[:2]
    target.end = end
    try:
        yield target
    finally:
        end()


def new_target(
    name: str, honest: str, big: str, post: tuple[str, str], kind: str = "application/json"
) -> Target:
    """Returns a target without an address."""
    return Target(name, ("", 0), honest, big, post, kind, lambda: None)


def store_target() -> Target:
    target = new_target(
        "store",
        "/files/run.json",
        "/files/snapshots/00000000-w",
        ("PUT", "/files/results/a"),
        "application/octet-stream",
    )
    target.honest_post = "PUT", "/files/results/honest", target.content_type, bytes(300_000)
    return target


def watch_target() -> Target:
    rows = ",".join(map(str, range(32)))
    return new_target("watch", "/state", f"/rows?run=0&lines={rows}", ("", ""))


def serve_target() -> Target:
    return new_target("serve", "/v1/models", "", ("POST", "/v1/completions"))


def tinker_target() -> Target:
    path = "/api/v1/forward_backward"
    target = new_target("tinker", "/api/v1/sessions", "", ("POST", path), "application/x-protobuf")
    target.honest_post = "POST", "/api/v1/client/config", "application/json", b"{}"
    return target


TARGETS = {
    "serve": serve_target,
    "tinker": tinker_target,
    "store": store_target,
    "watch": watch_target,
}


def write_store(folder: Path) -> FolderStore:
    """Writes the files that a trainer has in its store."""
    files = FolderStore(folder)
    files.write("run.json", b"{}")
    files.write("snapshots/00000000-w", bytes(64 * BIG))
    return files


def write_run(folder: Path) -> Path:
    """Writes the files of a run."""
    folder.mkdir()
    (folder / "config.json").write_text('{"train": {"steps": 9}}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    row = {"step": 1, "id": "p", "response": "x" * 20_000, "score": 1.0, "reason": "correct"}
    (folder / "samples.jsonl").write_text((json.dumps(row) + "\n") * 40)
    return folder


@contextlib.contextmanager
def store(folder: Path, request_seconds: float) -> Iterator[Target]:
    files = write_store(folder / "store")
    limits = limits_of_test(store_server.LIMITS, request_seconds)
    server = store_server.StoreServer("127.0.0.1", 0, files, KEY, limits=limits)
    with running(store_target(), server) as started:
        yield started


@contextlib.contextmanager
def watch(folder: Path, request_seconds: float) -> Iterator[Target]:
    watcher = Watcher([write_run(folder / "run")])
    limits = limits_of_test(watching.LIMITS, request_seconds)
    try:
        server = watching.page_server("127.0.0.1", 0, watcher, limits=limits)
        with running(watch_target(), server) as started:
            yield started
    finally:
        watcher.stop()


@contextlib.contextmanager
def serve(folder: Path, request_seconds: float) -> Iterator[Target]:
    from jzero.servers.connections import BoundedConfig
    from jzero.servers.rules import make_hosts
    from jzero.serving.ending import GracefulServer
    from jzero.serving.http import Server, make_app, make_rules
    from jzero.serving.limits import Limits
    from jzero.serving.requests import RequestReader

    limits = limits_of_test(Limits(), request_seconds)
    engine = SimpleNamespace(max_sequence_tokens=64)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    worker = SimpleNamespace(has_ended=False, reserve=lambda count: False)
    server = Server(RequestReader("m", engine, tokenizer, 8), worker, limits)
    configuration = BoundedConfig(
        make_app(server, KEY), limits, make_rules(make_hosts("127.0.0.1"))
    )

    def make(announce: Callable[[], None]) -> BoundedServer:
        return GracefulServer(configuration, server, announce)

    with running_bound(serve_target(), make) as started:
        yield started


@contextlib.contextmanager
def tinker(folder: Path, request_seconds: float) -> Iterator[Target]:
    from jzero.tinker.__main__ import make_server
    from jzero.tinker.limits import TinkerLimits
    from jzero.tinker.service import Served, Service
    from jzero.tinker.sessions import Keys
    from jzero.tinker.store import Store

    devices = SimpleNamespace(
        tenants=SimpleNamespace(longest=64, max_rank=8),
        sampling=SimpleNamespace(engine=SimpleNamespace(max_sequence_tokens=64)),
    )
    worker = SimpleNamespace()
    service = Service(
        Served("m", "qwen2", (0,)), devices, worker, Store(folder / "tinker"), TinkerLimits()
    )
    limits = limits_of_test(ConnectionLimits(), request_seconds)

    def make(announce: Callable[[], None]) -> BoundedServer:
        return make_server(service, Keys({KEY: "ann"}), announce, connection_limits=limits)

    with running_bound(tinker_target(), make) as started:
        yield started
