"""The four servers of jzero as targets of attacks: serve, tinker, store and watch.

Each is the real application behind the real connections, in a thread of this process. Nothing is
computed: where a model would be, there is only its name. With `--thorough` the commands run as
processes too (see `processes`).
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import httpx

from jzero.jobs import store_server
from jzero.jobs.store import FolderStore
from jzero.servers import sockets
from jzero.servers.limits import ConnectionLimits
from jzero.servers.running import BoundedServer, HttpServer
from jzero.watching import server as watching
from jzero.watching.runs import Watcher

KEY = "tml-attacked"
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

    def ask(self, client: httpx.Client) -> httpx.Response:
        """Sends the honest request."""
        url = f"http://{self.address[0]}:{self.address[1]}{self.honest_path}"
        return client.get(url, headers=self.headers)


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
def in_thread(
    name: str, folder: Path, request_seconds: float = 5.0, has_test_limits: bool = True
) -> Iterator[Target]:
    """Runs a server in a thread."""
    starts = {"serve": serve, "tinker": tinker, "store": store, "watch": watch}
    with starts[name](folder, request_seconds if has_test_limits else 0.0) as target:
        yield target


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


@contextlib.contextmanager
def store(folder: Path, request_seconds: float) -> Iterator[Target]:
    files = FolderStore(folder / "store")
    files.write("run.json", b"{}")
    files.write("snapshots/00000000-w", bytes(64 * BIG))
    limits = store_server.LIMITS
    if request_seconds:
        limits = limits_of_test(limits, request_seconds)
    target = new_target(
        "store",
        "/files/run.json",
        "/files/snapshots/00000000-w",
        ("PUT", "/files/results/a"),
        "application/octet-stream",
    )
    server = store_server.StoreServer("127.0.0.1", 0, files, KEY, limits=limits)
    with running(target, server) as started:
        yield started


@contextlib.contextmanager
def watch(folder: Path, request_seconds: float) -> Iterator[Target]:
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text('{"train": {"steps": 9}}')
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    row = {"step": 1, "id": "p", "response": "x" * 20_000, "score": 1.0, "reason": "correct"}
    (run / "samples.jsonl").write_text((json.dumps(row) + "\n") * 40)
    watcher = Watcher([run])
    limits = watching.LIMITS
    if request_seconds:
        limits = limits_of_test(limits, request_seconds)
    rows = ",".join(map(str, range(32)))
    target = new_target("watch", "/state", f"/rows?run=0&lines={rows}", ("", ""))
    try:
        server = watching.page_server("127.0.0.1", 0, watcher, limits=limits)
        with running(target, server) as started:
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

    limits = Limits()
    if request_seconds:
        limits = limits_of_test(limits, request_seconds)
    engine = SimpleNamespace(max_sequence_tokens=64)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    worker = SimpleNamespace(has_ended=False, reserve=lambda count: False)
    server = Server(RequestReader("m", engine, tokenizer, 8), worker, limits)
    configuration = BoundedConfig(
        make_app(server, KEY), limits, make_rules(make_hosts("127.0.0.1"))
    )
    target = new_target("serve", "/v1/models", "", ("POST", "/v1/completions"))

    def make(announce: Callable[[], None]) -> BoundedServer:
        return GracefulServer(configuration, server, announce)

    with running_bound(target, make) as started:
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
    defaults = ConnectionLimits()
    limits = limits_of_test(defaults, request_seconds) if request_seconds else defaults
    path = "/api/v1/forward_backward"
    target = new_target("tinker", "/api/v1/sessions", "", ("POST", path), "application/x-protobuf")

    def make(announce: Callable[[], None]) -> BoundedServer:
        return make_server(service, Keys({KEY: "ann"}), announce, connection_limits=limits)

    with running_bound(target, make) as started:
        yield started
