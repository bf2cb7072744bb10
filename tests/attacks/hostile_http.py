"""A hostile HTTP server of hostile_servers.py: what it sends to each client, by kind."""

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from jzero import http, json_values
from jzero.types import JsonValue

KEY = "sk-SECRET/0123456789abcdef"
SESSION = "openenv session"  # the client of WebSockets
MAX_DRIPS = 60

# What has to come of a case.
REFUSED, ANSWERED = "refused", "answered"
HARMLESS = "refused, or answered as a right reply"


@dataclass(frozen=True)
class Request:
    """A client's request, as the server has read it, and where to send the reply."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    client: str
    number: int  # of this case: 1 for the first try
    head: bytes
    thief_port: int  # where redirects lead

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def reply(self, content: bytes, status: str = "200 OK", headers: str = "") -> None:
        """Sends a well-formed HTTP reply."""
        if "content-type" not in headers.lower():
            headers += "Content-Type: application/json\r\n"
        head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
        await self.send(head.encode(), content)

    async def right(self) -> None:
        await self.reply(json.dumps(RIGHT[self.client]).encode())

    def reset(self) -> None:
        """Ends the connection with RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Handler = Callable[[Request], Awaitable[None]]

# The reply that each client takes for right.
RIGHT: dict[str, JsonValue] = {
    "teacher": {
        "choices": [
            {
                "text": "abcd",
                "logprobs": {
                    "token_logprobs": [None, -1.5, -0.25, -3.0, -0.5],
                    "tokens": ["a", "b", "c", "d", "e"],
                },
            }
        ]
    },
    "judge": {"choices": [{"message": {"role": "assistant", "content": "Score: 7"}}]},
    "sandbox": {"run": {"stdout": "1\n", "stderr": "", "code": 0, "signal": None}},
    "openenv": {"action": {"properties": {"message": {"type": "string"}}, "required": ["message"]}},
    "generate": {
        "choices": [{"text": "it is 4", "finish_reason": "stop"}],
        "usage": {"completion_tokens": 3},
    },
}

# -- Kinds of HTTP ---------------------------------------------------------------------------------


async def drip_headers(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(MAX_DRIPS):
        await request.send(b"X-%d: y\r\n" % number)
        await asyncio.sleep(0.2)


async def drip_body(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(MAX_DRIPS):
        await request.send(b" ")
        await asyncio.sleep(0.2)


async def drip_refusal(request: Request) -> None:
    await request.send(b"HTTP/1.1 400 Bad\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(MAX_DRIPS):
        await request.send(b"x")
        await asyncio.sleep(0.2)


async def silence(request: Request) -> None:
    await asyncio.sleep(12)


async def redirect(request: Request) -> None:
    target = f"http://127.0.0.1:{request.thief_port}/thief/x/{request.client}/{KEY}"
    await request.reply(b"", "302 Found", f"Location: {target}\r\n")


async def redirect_307(request: Request) -> None:
    target = f"http://127.0.0.1:{request.thief_port}/thief/x/{request.client}/"
    await request.reply(b"", "307 Temporary Redirect", f"Location: {target}\r\n")


async def redirect_to_file(request: Request) -> None:
    await request.reply(b"", "302 Found", "Location: file:///etc/hostname\r\n")


async def redirect_to_nonsense(request: Request) -> None:
    await request.reply(b"", "301 Moved", "Location: http://[::1:x/\r\n")


async def cut_body(request: Request) -> None:
    await request.send(b'HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"choices": [{"logpr')


async def cut_once(request: Request) -> None:
    await (cut_body(request) if request.number == 1 else request.right())


async def cut_chunk(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{")


async def reset_in_body(request: Request) -> None:
    await cut_body(request)
    request.reset()


async def reset_once(request: Request) -> None:
    await (reset_in_body(request) if request.number == 1 else request.right())


async def too_long(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 400000000\r\n\r\n")
    for _ in range(400):
        await request.send(b"[" * 1_000_000)


async def endless_chunks(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(400):
        await request.send(b"F4240\r\n" + b" " * 1_000_000 + b"\r\n")


async def tiny_chunks(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await request.send(b"1\r\n \r\n" * 2000, b"0\r\n\r\n")


GZIP_BOMB = gzip.compress(b" " * 10_000_000)


async def gzip_bomb(request: Request) -> None:
    await request.reply(GZIP_BOMB, headers="Content-Encoding: gzip\r\n")


async def endless_headers(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\n")
    for _ in range(10):
        await request.send(b"X: y\r\n" * 10_000)


async def long_status_line(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 " + b"x" * 1_000_000 + b"\r\n\r\n")


async def endless_continue(request: Request) -> None:
    await request.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


async def negative_length(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}")


async def two_lengths(request: Request) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}}")


async def no_http(request: Request) -> None:
    await request.send(b"SSH-2.0-OpenSSH_9.9\r\n" * 10)


async def binary(request: Request) -> None:
    await request.send(bytes(range(256)) * 100)


async def at_once_the_end(request: Request) -> None:
    pass


async def slow_close(request: Request) -> None:
    await request.right()
    await asyncio.sleep(12)


async def until_closed(request: Request) -> None:
    content = json.dumps(RIGHT[request.client]).encode()
    await request.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", content)


async def wrong_content_type(request: Request) -> None:
    content = json.dumps(RIGHT[request.client]).encode()
    await request.reply(content, headers="Content-Type: text/html\r\n")


async def duplicated_keys(request: Request) -> None:
    content = json.dumps(RIGHT[request.client])
    await request.reply(f"{content[:-1]}, {content[1:]}".encode())


async def utf_16(request: Request) -> None:
    await request.reply(json.dumps(RIGHT[request.client]).encode("utf-16"))


async def byte_order_mark(request: Request) -> None:
    await request.reply(b"\xef\xbb\xbf" + json.dumps(RIGHT[request.client]).encode())


async def deep_and_right(request: Request) -> None:
    content = json.dumps(RIGHT[request.client])
    await request.reply(f'{content[:-1]}, "x": {"[" * 100}{"]" * 100}}}'.encode())


async def many_containers(request: Request) -> None:
    content = json.dumps(RIGHT[request.client])
    await request.reply(f'{content[:-1]}, "x": [{"[]," * 1_200_000}1]}}'.encode())


async def key_in_a_refusal(request: Request) -> None:
    padding = "x" * (http.SHOWN_BYTES - 10)
    await request.reply(f"{padding}{KEY} {KEY}".encode(), "401 Unauthorized")


async def key_in_the_reply(request: Request) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    key = KEY if request.number == 1 else escaped
    await request.reply(f'{{"choices": ["{key}"], "run": "{key}", "action": "{key}"}}'.encode())


async def key_in_headers(request: Request) -> None:
    await request.reply(b"{}", headers=f"Content-Type: {KEY}\r\nContent-Encoding: {KEY}\r\n")


async def retry_after_ages(request: Request) -> None:
    await request.reply(b"{}", "503 Busy", "Retry-After: 1000000000\r\n")


async def retry_after_nonsense(request: Request) -> None:
    await request.reply(b"{}", "429 Slow", "Retry-After: 1e9\r\n")


async def busy_once(request: Request) -> None:
    if request.number == 1:
        await request.reply(b"busy", "503 Busy", "Retry-After: 0\r\n")
    else:
        await request.right()


def text(content: bytes) -> Handler:
    """Returns a handler that replies with this content."""

    async def reply(request: Request) -> None:
        await request.reply(content)

    return reply


def status(line: str) -> Handler:
    """Returns a handler that replies with this status."""

    async def reply(request: Request) -> None:
        await request.reply(b'{"error": {"message": "no"}}', line)

    return reply


HTTP_KINDS: dict[str, tuple[Handler, str]] = {
    "right": (Request.right, ANSWERED),
    "drip in the headers": (drip_headers, REFUSED),
    "drip in the body": (drip_body, REFUSED),
    "drip in a refusal": (drip_refusal, REFUSED),
    "silence": (silence, REFUSED),
    "redirect with the key": (redirect, REFUSED),
    "redirect 307": (redirect_307, REFUSED),
    "redirect to a file": (redirect_to_file, REFUSED),
    "redirect to nonsense": (redirect_to_nonsense, REFUSED),
    "cut in the body": (cut_body, REFUSED),
    "cut in the body once": (cut_once, ANSWERED),
    "cut in a chunk": (cut_chunk, REFUSED),
    "reset in the body": (reset_in_body, REFUSED),
    "reset in the body once": (reset_once, ANSWERED),
    "too long a body": (too_long, REFUSED),
    "endless chunks": (endless_chunks, REFUSED),
    "2,000 tiny chunks": (tiny_chunks, REFUSED),
    "gzip bomb": (gzip_bomb, REFUSED),
    "endless headers": (endless_headers, REFUSED),
    "1 MB status line": (long_status_line, REFUSED),
    "1,000 times 100 Continue": (endless_continue, REFUSED),
    "negative length": (negative_length, REFUSED),
    "two lengths": (two_lengths, REFUSED),
    "another protocol": (no_http, REFUSED),
    "binary garbage": (binary, REFUSED),
    "closed at once": (at_once_the_end, REFUSED),
    "slow close": (slow_close, ANSWERED),
    "no length": (until_closed, ANSWERED),
    "wrong content type": (wrong_content_type, REFUSED),
    "duplicated keys": (duplicated_keys, REFUSED),
    "UTF-16": (utf_16, REFUSED),
    "byte order mark": (byte_order_mark, REFUSED),
    "invalid UTF-8": (text(b'{"choices": "\xff\xfe", "run": "\xff"}'), REFUSED),
    "NUL bytes": (text(b"\0" * 100), REFUSED),
    "deep JSON": (text(b"[" * 100_000), REFUSED),
    "deep JSON objects": (text(b'{"a":' * 100_000), REFUSED),
    "deep JSON after a right reply": (deep_and_right, REFUSED),
    "a million lists": (many_containers, REFUSED),
    "a number of 5,000 digits": (text(b'{"choices": ' + b"1" * 5000 + b"}"), REFUSED),
    "NaN": (text(b'{"choices": NaN}'), REFUSED),
    "HTML": (text(b"<html>It works!</html>"), REFUSED),
    "empty": (text(b""), REFUSED),
    "null": (text(b"null"), REFUSED),
    "a list": (text(b"[1]"), REFUSED),
    "key in a refusal": (key_in_a_refusal, REFUSED),
    "key in the reply": (key_in_the_reply, REFUSED),
    "key in headers": (key_in_headers, REFUSED),
    "Retry-After 1000000000": (retry_after_ages, REFUSED),
    "Retry-After 1e9": (retry_after_nonsense, REFUSED),
    "busy once": (busy_once, ANSWERED),
} | {
    f"status {line.split()[0]}": (status(line), REFUSED)
    for line in (
        "201 Created",
        "204 No Content",
        "400 Bad",
        "401 Unauthorized",
        "404 Not Found",
        "418 Teapot",
        "429 Slow Down",
        "500 Error",
        "503 Busy",
        "999 X",
    )
}


# -- Wrong types and numbers -----------------------------------------------------------------------

NO_JSON = ["1e400", "-1e400", "NaN", "-Infinity", "1" * 400, "-" + "1" * 5000]
RAW_NUMBERS = [*NO_JSON, "-1e39", "1e39"]  # the last two fit a float64, and no float32
OTHER_TYPES = ["true", "7.5", '"text"', "[]", "[[]]", "{}", '{"a": 1}']
PLACEHOLDER = "@@@"
# By client, the places where a value of another type is right, too, and where any value is.
ALSO_RIGHT = {
    "sandbox": {"run.signal": ['"text"']},
    SESSION: {"data.reward": ["true"], "data.observation": ['{"a": 1}']},
}
ANYTHING = {SESSION: ["data.observation.text"]}


def places(value: JsonValue, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the path of every value inside of a reply."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for name, item in items:
        yield from places(item, (*path, name))


def replaced(value: JsonValue, path: tuple[str | int, ...], raw: str) -> str:
    """Returns the JSON of a reply with `raw` at a place."""
    return json.dumps(with_placeholder(value, path)).replace(f'"{PLACEHOLDER}"', raw)


def with_placeholder(value: JsonValue, path: tuple[str | int, ...]) -> JsonValue:
    """Returns a copy of a value with PLACEHOLDER at a place."""
    if not path:
        return PLACEHOLDER
    step, *further = path
    if isinstance(step, int):
        items = json_values.as_list(value)
        changed = with_placeholder(items[step], tuple(further))
        return [*items[:step], changed, *items[step + 1 :]]
    fields = json_values.as_object(value)
    return fields | {step: with_placeholder(fields[step], tuple(further))}


def is_same_kind(value: object, raw: str) -> bool:
    """Returns whether `raw` is JSON of the type of a value, and so may be right in its place."""
    try:
        other = json.loads(raw)
    except ValueError:
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isinstance(other, int | float) and not isinstance(other, bool):
        return raw in OTHER_TYPES
    return type(value) is type(other)


def mutants(client: str, reply: JsonValue) -> Iterator[tuple[str, str]]:
    """Yields a name and the JSON of replies that are wrong in one place.

    They have a value of another type, or a number that no float32 holds.
    """
    for path in places(reply):
        name = ".".join(map(str, path))
        value = json_values.member(reply, path, object)
        for raw in [*OTHER_TYPES, *RAW_NUMBERS]:
            also_right = ALSO_RIGHT.get(client, {}).get(name, [])
            is_free = name in ANYTHING.get(client, []) and raw not in NO_JSON
            if is_same_kind(value, raw) or raw in also_right or is_free:
                continue
            yield f"{name}={raw[:12]}", replaced(reply, path, raw)


# -- The server ------------------------------------------------------------------------------------


class Server:
    """Serves the cases that are added to it, each below a path of its own, in a thread."""

    def __init__(self, thief_port: int = 0) -> None:
        self.thief_port = thief_port
        self.handlers: dict[str, Handler] = {}  # by the first part of the path
        self.counts: Counter[str] = Counter()
        self.seen: list[bytes] = []  # heads of requests for no case
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._loop.set_exception_handler(lambda loop, context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, client: str, handler: Handler) -> str:
        """Returns the address at which a handler answers a client."""
        name = f"case{len(self.handlers)}"
        self.handlers[name] = handler
        return f"http://127.0.0.1:{self.port}/{name}/{client.replace(' ', '_')}"

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            _, name, client, *_ = head.split(b" ")[1].decode().split("/")
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            handler = self.handlers.get(name)
            if handler is None:
                self.seen.append(head)
            else:
                self.counts[name] += 1
                client = client.replace("_", " ")
                number = self.counts[name]
                request = Request(reader, writer, client, number, head, self.thief_port)
                await handler(request)
        writer.close()
