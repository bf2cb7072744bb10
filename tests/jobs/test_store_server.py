"""The trainer's store over HTTP: its key, its bounds, and what samplers may change."""

import http.client
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.responses import Response

from jzero.errors import UserError
from jzero.jobs import store_server
from jzero.jobs.http_store import HttpStore
from jzero.jobs.store import FolderStore, RetryingStore, StoreError, open_store
from jzero.jobs.store_server import KEY_FILE, KEY_VARIABLE, StoreServer, serve


@pytest.fixture(autouse=True)
def without_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "FAREWELL_SECONDS", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with serve("127.0.0.1:0", str(tmp_path / "store"), tmp_path / "run") as served:
        yield served


@contextmanager
def started(server: StoreServer) -> Iterator[StoreServer]:
    """Runs a server in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server


@pytest.fixture
def key(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of the server, in the environment of the sampler."""
    monkeypatch.setenv(KEY_VARIABLE, server.key.decode())
    return server.key.decode()


def ask(
    server: StoreServer, method: str, path: str, key: str = "", body: bytes | None = None
) -> tuple[int, bytes]:
    """Sends a request that `HttpStore` would not send."""
    host, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=20)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, content


def test_a_sampler_shares_the_directory_of_the_trainer(
    server: StoreServer, key: str, tmp_path: Path
) -> None:
    trainer, sampler = FolderStore(tmp_path / "store"), open_store(server.url)
    assert isinstance(sampler, HttpStore)
    snapshot = bytes(range(256)) * 40_000
    trainer.write("snapshots/00000000-w", snapshot)
    assert sampler.read("snapshots/00000000-w") == snapshot

    assert sampler.create("leases/one", b"sampler")
    assert not trainer.create("leases/one", b"trainer")
    sampler.write("results/one-1", snapshot)
    assert trainer.read("results/one-1") == snapshot
    sampler.write("partials/one", snapshot)
    assert trainer.read("partials/one") == snapshot
    assert sampler.now("sampler") == pytest.approx(time.time(), abs=60)
    sampler.delete("leases/one")
    assert trainer.names("leases") == []


def test_a_new_key_is_for_the_owner_of_the_workdir_alone(
    server: StoreServer, tmp_path: Path
) -> None:
    path = tmp_path / "run" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) >= 32
    # A trainer that starts again keeps it.
    assert store_server.read_key(tmp_path / "run") == server.key.decode()


def test_nothing_is_answered_without_the_key(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FolderStore(tmp_path / "store").write("run.json", b"settings")
    for method in ("GET", "PUT", "POST", "DELETE"):
        for sent in ("", "wrong"):
            status, content = ask(server, method, "/files/run.json", sent, b"x")
            assert status == 401 and b"settings" not in content
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"set {KEY_VARIABLE} to the trainer's key"):
        open_store(server.url)
    # A wrong key is an error at once, and not retried.
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(UserError, match="the key is wrong"):
        RetryingStore(open_store(server.url), 60).read("run.json")


def test_mistakes_of_the_server_are_printed_and_clients_that_leave_are_not(
    server: StoreServer,
    key: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, port = server.server_address[:2]
    request = (
        f"GET /names/results HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
    )
    for _ in range(10):
        with socket.create_connection((str(host), int(port)), timeout=20) as connection:
            connection.sendall(request.encode())
            # Closes without waiting for the reply.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(server, "GET", "/names/results", key)[0] == 200
    assert "Traceback" not in caplog.text + capfd.readouterr().err

    monkeypatch.setattr(server.store, "names", lambda folder: 1 / 0)
    assert ask(server, "GET", "/names/results", key)[0] == 500
    deadline = time.monotonic() + 30  # the reply comes before the report
    while "ZeroDivisionError" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "name",
    [
        "../run/store.key",
        "%2e%2e/run/store.key",
        "..%2frun%2fstore.key",
        "/etc/passwd",
        "a/b/c",
        ".hidden",
        "results/.hidden",
        "",
        "a" * 300,
        "a%00b",
    ],
)
def test_no_name_leaves_the_directory(server: StoreServer, key: str, name: str) -> None:
    for method in ("GET", "PUT", "POST", "DELETE"):
        status, content = ask(server, method, f"/files/{name}", key, b"x")
        assert status in (400, 404), content
        assert server.key not in content


@pytest.mark.parametrize(
    "name", ["run.json", "end", "requests/one", "snapshots/00000000.json", "refused/me", "clock/x"]
)
def test_samplers_change_only_their_own_files(
    server: StoreServer, key: str, tmp_path: Path, name: str
) -> None:
    FolderStore(tmp_path / "store").write(name, b"the trainer's")
    for method in ("PUT", "POST"):
        assert ask(server, method, f"/files/{name}", key, b"x")[0] == 403
    is_request = name.startswith("requests/")  # a damaged one, which the trainer writes again
    assert ask(server, "DELETE", f"/files/{name}", key)[0] == (200 if is_request else 403)
    if not is_request:
        assert FolderStore(tmp_path / "store").read(name) == b"the trainer's"


def test_no_link_leads_out_of_the_directory(server: StoreServer, key: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    server.store.write("results/one", b"x")
    (server.store.directory / "results" / "link").symlink_to(tmp_path / "secret")
    assert ask(server, "GET", "/files/results/link", key) == (404, b"the file does not exist")


def test_samplers_join_by_the_names_of_the_trainer(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.write("run.json", b"{}")
    for allowed, status in ([], 403), (["trainer.svc"], 200):
        with started(StoreServer("127.0.0.1", 0, store, "secret", allowed)) as server:
            host, port = server.server_address
            connection = http.client.HTTPConnection(host, port, timeout=20)
            headers = {"Authorization": "Bearer secret", "Host": "trainer.svc:8400"}
            connection.request("GET", "/files/run.json", headers=headers)
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
            assert reply.status == status
            assert status == 200 or b"add it to rollout.placement.allowed_hosts" in content


def test_files_have_a_bound(server: StoreServer, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store_server.WRITTEN, "results", 1000)
    assert ask(server, "PUT", "/files/results/one", key, bytes(1000))[0] == 200
    assert ask(server, "PUT", "/files/results/one", key, bytes(1001))[0] == 413
    assert HttpStore(server.url).read("results/one") == bytes(1000)


def test_half_a_file_is_not_written_and_silent_clients_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(store_server.LIMITS, max_connections=2)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    store = FolderStore(tmp_path / "store")
    with started(StoreServer("127.0.0.1", 0, store, "secret", limits=limits)) as server:
        address = server.server_address[:2]
        silent = [socket.create_connection(address) for _ in range(4)]
        half = socket.create_connection(address)
        half.sendall(
            b"PUT /files/results/half HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
            b"Host: localhost\r\nContent-Length: 1000\r\n\r\nhalf"
        )
        half.close()
        # Silent connections make room.
        assert HttpStore(server.url).names("results") == []
        for each in silent:
            each.close()


def test_a_full_disk_is_tried_again(
    server: StoreServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(temporary: Path, name: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(server.store, "put", fail)
        full.setattr("jzero.http.FIRST_PAUSE", 0.0)
        with pytest.raises(StoreError, match="No space left on device"):
            HttpStore(server.url).write("results/one", b"x")
    HttpStore(server.url).write("results/one", b"x")


@pytest.mark.parametrize("reply", [b"", b"[", b"<html>", b"NaN", b"-1", b'{"a": 1}', b"[1]"])
def test_a_wrong_reply_is_an_error_of_the_store(
    server: StoreServer, key: str, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    """Something else may answer at the address; `RetryingStore` asks again."""

    async def read(kind: str, name: str) -> Response:
        return Response(reply)

    monkeypatch.setattr(server, "read", read)
    store = HttpStore(server.url)
    for ask_store in (store.names, store.modified, store.now):
        with pytest.raises(StoreError, match="answers with a wrong reply"):
            ask_store("results")


def test_mistakes_are_one_line(tmp_path: Path, server: StoreServer) -> None:
    port = server.server_address[1]
    with (
        pytest.raises(UserError, match=f"serve=127.0.0.1:{port}: cannot listen"),
        serve(f"127.0.0.1:{port}", str(tmp_path / "store"), tmp_path),
    ):
        pass
    with (
        pytest.raises(UserError, match="is not a directory, and samplers can join it directly"),
        serve("127.0.0.1:0", "memory://bucket/run", tmp_path),
    ):
        pass
