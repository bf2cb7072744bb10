"""Hostile clients of the four servers: serve, tinker, store and watch.

While an attack goes on, an honest client is answered within two seconds; after it the process has
grown by less than 200 MB, and the server ends within five seconds, with all hostile connections
still open. `python -m pytest tests/attacks/test_servers.py --thorough -s` attacks the commands as
processes with their default limits, and prints latencies, memory and the time to the end.
"""

import contextlib
import gzip
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attacked_servers
import httpx
import pytest
from attacked_servers import Target

NAMES = ("serve", "tinker", "store", "watch")
HONEST_SECONDS = 2.0
GROWTH_BYTES = 200 << 20
BYTES_OF_CLIENTS = 200 << 20  # of the hostile clients, where they share a process with the server
END_SECONDS = 5.0
CLIENTS = 64
MANY = 16 << 20  # bytes of garbage and of bombs

Sockets = list[socket.socket]


def resident_bytes(pid: int | str = "self") -> int:
    """Returns the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def connect(target: Target, sent: bytes = b"") -> socket.socket:
    """Opens a connection and sends bytes."""
    opened = socket.create_connection(target.address, timeout=10)
    opened.sendall(sent)
    return opened


def send_all(opened: socket.socket, data: bytes) -> None:
    """Sends bytes, of which a server may refuse the rest."""
    with contextlib.suppress(OSError):
        opened.sendall(data)


def answer_of(target: Target, sent: bytes, seconds: float = 3.0) -> bytes:
    """Returns all that a server answers until it closes the connection or is silent."""
    received = b""
    with connect(target) as opened, contextlib.suppress(OSError):
        opened.settimeout(seconds)
        opened.sendall(sent)
        while part := opened.recv(1 << 16):
            received += part
            opened.settimeout(0.2)
    return received


def statuses_of(answer: bytes) -> list[int]:
    """Returns the statuses of all answers of a connection."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


# -- attacks on time and memory --------------------------------------------------------------------


def body_head(target: Target, num_bytes: int, has_key: bool = True, **headers: str) -> bytes:
    """Returns the head of a request with a body; a watch server takes it for one, too."""
    method, path = target.post
    length = {"Content-Length": str(num_bytes)} | headers
    return target.head(method or "POST", path or "/state", has_key, **length)


def slow_headers(target: Target) -> Sockets:
    return [connect(target, b"GET /health HTTP/1.1\r\nX: ") for _ in range(CLIENTS)]


def silence(target: Target) -> Sockets:
    return [connect(target) for _ in range(CLIENTS)]


def slow_bodies_without_key(target: Target) -> Sockets:
    return [connect(target, body_head(target, 100_000, has_key=False)) for _ in range(CLIENTS)]


def slow_bodies_with_key(target: Target) -> Sockets:
    return [connect(target, body_head(target, 100_000) + b"a") for _ in range(CLIENTS)]


def stalled_large_bodies(target: Target) -> Sockets:
    """Bodies of which all but a few bytes arrive at once."""
    opened = [connect(target, body_head(target, target.body_bytes)) for _ in range(CLIENTS)]
    part = bytes(100_000)
    for one in opened:
        for _ in range(target.body_bytes // len(part) - 1):
            send_all(one, part)
    return opened


def large_bodies(target: Target) -> Sockets:
    """Complete bodies, all at once."""
    opened = [connect(target, body_head(target, target.body_bytes)) for _ in range(CLIENTS)]
    part = b"\xff" * 100_000
    for _ in range(target.body_bytes // len(part)):
        for one in opened:
            send_all(one, part)
    return opened


def slow_chunks(target: Target) -> Sockets:
    head = body_head(target, 0, Transfer_Encoding="chunked", **{"Content-Length": None})
    return [connect(target, head + b"ffff\r\n") for _ in range(CLIENTS)]


def clients_that_do_not_read(target: Target) -> Sockets:
    opened = []
    for _ in range(CLIENTS):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(target.address)
        one.sendall(target.head(path=target.big_path))
        opened.append(one)
    return opened


def garbage(target: Target) -> Sockets:
    opened = connect(target)
    for _ in range(MANY >> 16):
        send_all(opened, bytes(range(256)) * 256)
    return [opened]


def endless_header(target: Target) -> Sockets:
    opened = connect(target, b"GET / HTTP/1.1\r\nX: ")
    for _ in range(MANY >> 16):
        send_all(opened, b"a" * (1 << 16))
    return [opened]


def many_headers(target: Target) -> Sockets:
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 12_000 + b"\r\n"
    return [connect(target, head) for _ in range(8)]


def tiny_chunks(target: Target) -> Sockets:
    """A body of millions of chunks of one byte."""
    head = body_head(target, 0, Transfer_Encoding="chunked", **{"Content-Length": None})
    opened = [connect(target, head) for _ in range(8)]
    chunks = b"1\r\na\r\n" * 10_000
    for one in opened:
        for _ in range(MANY // 8 // len(chunks)):
            send_all(one, chunks)
    return opened


def gzip_bombs(target: Target) -> Sockets:
    bomb = gzip.compress(bytes(4 * MANY), 9)
    head = body_head(target, len(bomb), Content_Encoding="gzip")
    return [connect(target, head + bomb) for _ in range(8)]


def large_garbage_bodies(target: Target) -> Sockets:
    opened = connect(target, body_head(target, MANY))
    for _ in range(MANY >> 16):
        send_all(opened, b"\xff" * (1 << 16))
    return [opened]


def pipelined_requests(target: Target) -> Sockets:
    """Many requests whose answers nobody reads."""
    opened = connect(target)
    opened.settimeout(0.5)
    send_all(opened, target.head() * 5_000)
    return [opened]


def churn(target: Target) -> Sockets:
    """Connections that come faster than a server may hold them."""
    opened = []
    for _ in range(8 * CLIENTS):
        opened.append(connect(target, b"GET /"))
    return opened


ATTACKS: tuple[Callable[[Target], Sockets], ...] = (
    slow_headers,
    silence,
    slow_bodies_without_key,
    slow_bodies_with_key,
    stalled_large_bodies,
    large_bodies,
    slow_chunks,
    clients_that_do_not_read,
    garbage,
    endless_header,
    many_headers,
    tiny_chunks,
    gzip_bombs,
    large_garbage_bodies,
    pipelined_requests,
    churn,
)


@contextlib.contextmanager
def dripping(opened: Sockets, seconds: float) -> Iterator[None]:
    """Sends one byte on every connection, again and again, while the block runs."""
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(seconds):
            for one in opened:
                with contextlib.suppress(OSError):
                    one.send(b"a", socket.MSG_DONTWAIT)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def honest_seconds(target: Target, count: int, pause: float) -> list[float]:
    """Returns how long answers to an honest client take, each over a new connection."""
    seconds = []
    for _ in range(count):
        with httpx.Client(timeout=30) as client:
            start = time.monotonic()
            # A server that is full may ask to come back: the time until the answers counts.
            while set(statuses := target.ask(client)) & {429, 503}:
                assert time.monotonic() - start < 20, statuses
                time.sleep(0.05)
            seconds.append(time.monotonic() - start)
            assert set(statuses) == {200}, statuses
        time.sleep(pause)
    return seconds


def attack_all(target: Target, tries, count: int) -> None:
    """Makes all attacks, with `count` honest requests during each, and ends the server."""
    name = target.name
    honest_seconds(target, 1, 0)
    before = resident_bytes(target.pid or "self")
    slowest, growth = 0.0, 0
    most_growth = GROWTH_BYTES if target.pid else GROWTH_BYTES + BYTES_OF_CLIENTS
    for attack in ATTACKS:
        if attack is clients_that_do_not_read and not target.big_path:
            continue
        with tries.attempt(name, attack.__name__):
            opened = attack(target)
            try:
                with dripping(opened, 0.1):
                    seconds = max(honest_seconds(target, count, 0.05))
            finally:
                for one in opened:
                    one.close()
            slowest = max(slowest, seconds)
            growth = max(growth, resident_bytes(target.pid or "self") - before)
            assert seconds < HONEST_SECONDS and growth < most_growth, f"{seconds=} {growth=}"
    with tries.attempt(name, "end with slow clients"):
        opened = slow_headers(target)
        opened += slow_bodies_with_key(target)
        if target.big_path:
            opened += clients_that_do_not_read(target)
        with dripping(opened, 0.1):
            start = time.monotonic()
            target.end()
            end_seconds = time.monotonic() - start
        for one in opened:
            one.close()
        print(
            f"{name}: slowest honest answer {slowest:.2f} s, memory grew by "
            f"{growth / 2**20:.0f} MiB, ended within {end_seconds:.1f} s"
        )
        assert end_seconds < END_SECONDS


@pytest.mark.parametrize("name", NAMES)
def test_no_client_keeps_others_waiting(name: str, tmp_path: Path, tries) -> None:
    with attacked_servers.in_thread(name, tmp_path) as target:
        attack_all(target, tries, count=2)


@pytest.mark.parametrize("name", NAMES)
def test_no_client_keeps_others_of_a_command_waiting(name: str, tmp_path: Path, tries) -> None:
    with attacked_servers.in_process(name, tmp_path) as target:
        attack_all(target, tries, count=10)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_has_one_deadline(name: str, tmp_path: Path, tries) -> None:
    """Bytes that drip do not extend it."""
    with attacked_servers.in_thread(name, tmp_path, request_seconds=0.4) as target:
        attacks = (slow_headers, silence, slow_bodies_without_key, slow_bodies_with_key)
        for attack in attacks:
            with tries.attempt(name, f"deadline of {attack.__name__}"):
                opened = attack(target)
                with dripping(opened, 0.05):
                    time.sleep(0.7)
                deadline = time.monotonic() + 5  # a body that is refused has two seconds
                while sum(map(is_open, opened)):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                for one in opened:
                    one.close()


def is_open(opened: socket.socket) -> bool:
    """Returns whether the server has left a connection open. Reads all that it has sent."""
    opened.setblocking(False)
    try:
        while opened.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


# -- whose requests are answered -------------------------------------------------------------------

HOSTILE_HOSTS = (
    "evil.example",
    "evil.example:{port}",
    "localhost.evil.example:{port}",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example#localhost",
    "evil.example/localhost",
    "127.0.0.2.nip.io:{port}",
    "10.0.0.1:{port}",
    "0x7f.1",
    "2130706433",
    "[::ffff:10.0.0.1]",
    "localhost:{port}:80",
    "localhost, evil.example",
    "lo\u00e7alhost",
    "",
)
HOSTILE_ORIGINS = (
    "http://evil.example",
    "https://evil.example:{port}",
    "null",
    "",
    "http://localhost.evil.example:{port}",
    "http://127.0.0.1.evil.example",
    "http://localhost:1",
    "http://localhost",
    "https://127.0.0.1:{port}@evil.example",
    "file://",
    "file://localhost:{port}",
    "chrome-extension://abc",
    "http://localhost:{port} http://evil.example",
)
SIMPLE_TYPES = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
    "text/plain; application/json",
    "application/jsonp",
    None,
)


def in_port(target: Target, text: str) -> str:
    return text.replace("{port}", str(target.address[1]))


@pytest.mark.parametrize("name", NAMES)
def test_other_sites_reach_no_server(name: str, tmp_path: Path, tries) -> None:
    """Neither pages of other sites nor names that resolve to this machine."""
    with attacked_servers.in_thread(name, tmp_path) as target:
        method, path = target.post
        body = b"{}"
        for host in HOSTILE_HOSTS:
            with tries.attempt(name, f"Host: {host}"):
                head = target.head(Host=in_port(target, host), Connection="close")
                assert statuses_of(answer_of(target, head)) in ([403], [400])
        for origin in HOSTILE_ORIGINS:
            changes = {"Origin": in_port(target, origin), "Connection": "close"}
            with tries.attempt(name, f"GET, Origin: {origin}"):
                assert statuses_of(answer_of(target, target.head(**changes))) == [403]
            if method:
                with tries.attempt(name, f"{method}, Origin: {origin}"):
                    sent = target.head(method, path, Content_Length=str(len(body)), **changes)
                    assert statuses_of(answer_of(target, sent + body)) == [403]
        for site in ("cross-site", "same-site"):
            with tries.attempt(name, f"Sec-Fetch-Site: {site}"):
                head = target.head(Sec_Fetch_Site=site, Connection="close")
                assert statuses_of(answer_of(target, head)) == [403]
        if name in ("serve", "tinker"):
            for kind in SIMPLE_TYPES:
                with tries.attempt(name, f"Content-Type: {kind}"):
                    sent = target.head(
                        method, path, Content_Length="2", Content_Type=kind, Connection="close"
                    )
                    assert statuses_of(answer_of(target, sent + body)) == [415]
        # Its own page, and names of this machine.
        port = target.address[1]
        for host in ("localhost", f"127.0.0.1:{port}", f"LOCALHOST:{port}", "[::1]:1"):
            with tries.attempt(name, f"honest Host: {host}"):
                head = target.head(Host=host, Origin=f"http://{host}", Connection="close")
                assert statuses_of(answer_of(target, head)) == [200]


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("name", NAMES)
def test_no_request_hides_in_another(name: str, tmp_path: Path, tries) -> None:
    """Whatever a proxy takes for the end of a body: there is one answer, and it is a refusal."""
    with attacked_servers.in_thread(name, tmp_path) as target:
        chunked = b"0\r\n\r\n" + SMUGGLED
        framings = {
            "CL and TE": ("Content-Length: {n}", "Transfer-Encoding: chunked"),
            "TE and CL": ("Transfer-Encoding: chunked", "Content-Length: {n}"),
            "CL of 0 and TE": ("Content-Length: 0", "Transfer-Encoding: chunked"),
            "two CL": ("Content-Length: 5", "Content-Length: {n}"),
            "list of CL": ("Content-Length: 5, {n}",),
            "negative CL": ("Content-Length: -1",),
            "CL with sign": ("Content-Length: +5",),
            "CL in hex": ("Content-Length: 0x5",),
            "CL with digits of other scripts": ("Content-Length: \u00b2",),
            "unknown TE": ("Transfer-Encoding: xchunked",),
            "two TE": ("Transfer-Encoding: identity", "Transfer-Encoding: chunked"),
            "list of TE": ("Transfer-Encoding: chunked, identity",),
            "TE with a space before the colon": ("Transfer-Encoding : chunked",),
            "CL with a NUL": ("Content-Length: 5\x00",),
            "bare LF": ("Content-Length: 5\nTransfer-Encoding: chunked",),
        }
        method, path = target.post
        for kind, lines in framings.items():
            with tries.attempt(name, kind):
                head = target.head(method or "POST", path or "/state", Content_Length=None)
                added = "\r\n".join(lines).replace("{n}", str(len(chunked)))
                sent = head[:-2] + added.encode("latin-1") + b"\r\n\r\n" + chunked
                answers = statuses_of(answer_of(target, sent))
                assert all(400 <= status < 500 for status in answers), answers
                assert len(answers) <= 1, answers


def test_cut_uploads_leave_nothing(tmp_path: Path, tries) -> None:
    """Uploads to the store that are cut at any byte write no file and leave none."""
    with attacked_servers.in_thread("store", tmp_path) as target:
        results = tmp_path / "store" / "results"
        head = body_head(target, 500_000)
        sent = head + bytes(500_000)
        for cut in (len(head), len(head) + 1, len(head) + 270_000, len(sent) - 1) * 8:
            with tries.attempt("store", f"upload that is cut after {cut} bytes"):
                opened = connect(target, sent[:cut])
                reset = struct.pack("ii", 1, 0)
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                opened.close()
        with tries.attempt("store", "files after cut uploads"):
            deadline = time.monotonic() + 10
            while results.exists() and list(results.iterdir()):
                assert time.monotonic() < deadline, list(results.iterdir())
                time.sleep(0.05)
        with tries.attempt("store", "a complete upload"):
            assert statuses_of(answer_of(target, sent)) == [200]
            assert (results / "a").read_bytes() == bytes(500_000)


def test_names_of_the_store_are_exact(tmp_path: Path, tries) -> None:
    with attacked_servers.in_thread("store", tmp_path) as target, httpx.Client() as client:
        url = f"http://{target.address[0]}:{target.address[1]}"

        def ask(method: str, path: str) -> int:
            return client.request(
                method, url + path, headers=target.headers, content=b"x"
            ).status_code

        (tmp_path / "store" / "results").mkdir()
        cases = [
            ("POST", "/files/decoder.json", 200),
            ("POST", "/files/decoder.json", 412),
            ("PUT", "/files/decoder.json", 403),
            ("POST", "/files/decoder.jsonX", 403),
            ("PUT", "/files/decoder.json.x", 403),
            ("PUT", "/files/results", 403),
            ("PUT", "/files/resultsX", 403),
            ("PUT", "/files/results%2fa", 200),
            ("GET", "/files/run.json%0a", 400),
            ("GET", "/now/a%2fb", 404),
            ("GET", "/now/a", 200),
            ("GET", "/names/run.json", 404),
            ("GET", "/names/results%2fa", 404),
            ("GET", "/names/none", 200),
            ("GET", "/files/results", 404),
            ("GET", "/files/none", 404),
            ("DELETE", "/files/leases", 403),
            ("DELETE", "/names/leases", 405),
            ("PUT", "/now/a", 405),
        ]
        for method, path, status in cases:
            with tries.attempt("store", f"{method} {path}"):
                assert ask(method, path) == status
        with tries.attempt("store", "folders after /now/a%2fb"):
            assert [one.name for one in (tmp_path / "store" / "clock").iterdir()] == ["a"]


@pytest.mark.parametrize("number", ["9" * 13, "9" * 30, "9" * 5000, "1e3", "\u0663", "+1", "1_0"])
def test_numbers_of_queries_are_bounded(number: str, tmp_path: Path, tries) -> None:
    with attacked_servers.in_thread("watch", tmp_path) as target, httpx.Client() as client:
        url = f"http://{target.address[0]}:{target.address[1]}"
        queries = (
            ("/rows", {"run": "0", "lines": number}),
            ("/rows", {"run": "0", "lines": f"0,{number}"}),
            ("/rows", {"run": number, "lines": "0"}),
            ("/index", {"run": "0", "generation": "", "cursor": number, "texts": "0"}),
            ("/index", {"run": "0", "generation": "", "cursor": "0", "texts": number}),
            ("/search", {"run": number, "text": "a"}),
        )
        for path, fields in queries:
            with tries.attempt("watch", f"{path} with {number[:40]!r}"):
                assert client.get(url + path, params=fields).status_code == 400
