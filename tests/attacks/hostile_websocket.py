"""Hostile sessions of an OpenEnv server over a WebSocket, by kind, for hostile_servers.py."""

import asyncio
import base64
import hashlib
import json
import struct

from hostile_http import (
    ANSWERED,
    KEY,
    REFUSED,
    RIGHT,
    Handler,
    Request,
    at_once_the_end,
    binary,
    drip_headers,
    endless_headers,
    redirect,
    silence,
    text,
)

from jzero.types import JsonValue

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
OBSERVATION = {"observation": {"text": "hello"}, "reward": 0.5, "done": False}
MESSAGE: JsonValue = {"type": "observation", "data": OBSERVATION}


def frame(kind: int, payload: bytes, is_final: bool = True) -> bytes:
    """Returns a frame of a server, which masks nothing."""
    first = (0x80 if is_final else 0) | kind
    length = len(payload)
    if length < 126:
        return struct.pack(">BB", first, length) + payload
    if length < 1 << 16:
        return struct.pack(">BBH", first, 126, length) + payload
    return struct.pack(">BBQ", first, 127, length) + payload


def message(value: JsonValue) -> bytes:
    return frame(TEXT, json.dumps(value).encode())


async def shake_hands(request: Request) -> None:
    """Accepts a WebSocket connection."""
    for line in request.head.split(b"\r\n"):
        if line.lower().startswith(b"sec-websocket-key:"):
            key = line.split(b":", 1)[1].strip()
            guid = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key + guid).digest())
            await request.send(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )


async def read_frame(request: Request) -> None:
    """Reads a frame of the client, of at most 64 KiB."""
    _, second = await request.reader.readexactly(2)
    length = second & 0x7F
    if length == 126:
        length = int.from_bytes(await request.reader.readexactly(2), "big")
    await request.reader.readexactly(4 + length)


def frames(*sent: bytes, stays: bool = True) -> Handler:
    """Returns a handler that sends bytes in reply to `reset`, and then reads nothing."""

    async def reply(request: Request) -> None:
        await read_frame(request)
        await request.send(*sent)
        if stays:
            await asyncio.sleep(8)

    return reply


def flood(sent: bytes, times: int) -> Handler:
    """Returns a handler that sends the same bytes many times."""

    async def reply(request: Request) -> None:
        await read_frame(request)
        for _ in range(times):
            await request.send(sent)
        await asyncio.sleep(8)

    return reply


async def ws_bytes_drip(request: Request) -> None:
    await read_frame(request)
    for byte in message(MESSAGE):
        await request.send(bytes([byte]))
        await asyncio.sleep(0.2)


async def ws_after_close(request: Request) -> None:
    """Answers the closing handshake with further messages, and never with a close frame."""
    await read_frame(request)
    await request.send(message(MESSAGE))
    for _ in range(400):
        await request.send(message(MESSAGE) * 10)
        await asyncio.sleep(0.02)


async def ws_never_closes(request: Request) -> None:
    """Plays on, and then answers no closing handshake but pings."""
    for _ in range(2):
        await read_frame(request)
        await request.send(message(MESSAGE))
    for _ in range(400):
        await request.send(frame(PING, b"x" * 100))
        await asyncio.sleep(0.02)


def ws_step(reply: bytes) -> Handler:
    """Returns a handler that answers `reset` rightly, and the step with this message."""

    async def play(request: Request) -> None:
        await read_frame(request)
        await request.send(message(MESSAGE))
        await read_frame(request)
        await request.send(frame(TEXT, reply))
        await asyncio.sleep(8)

    return play


def websocket_kinds(times: int) -> dict[str, tuple[Handler, str]]:
    """Returns the kinds of OpenEnv's sessions; floods are `times` as long."""
    empty = frame(0, b"", is_final=False)
    start = frame(TEXT, b"{", is_final=False)
    codes = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    return {
        "ws right": (ws_step(json.dumps(MESSAGE).encode()), ANSWERED),
        "ws 60,000 empty frames at once": (frames(start + empty * 60_000), REFUSED),
        "ws empty frames without end": (flood(start + empty * 20_000, 20 * times), REFUSED),
        "ws fragments of one byte": (
            frames(start + frame(0, b" ", is_final=False) * 60_000),
            REFUSED,
        ),
        "ws pings without end": (flood(frame(PING, b"x" * 100) * 1000, 200 * times), REFUSED),
        "ws pongs without end": (flood(frame(PONG, b"") * 1000, 200 * times), REFUSED),
        "ws bytes that drip": (ws_bytes_drip, REFUSED),
        "ws silence": (frames(), REFUSED),
        "ws messages after the close": (ws_after_close, ANSWERED),
        "ws pings instead of a close": (ws_never_closes, ANSWERED),
        "ws message of 20 MB": (frames(message({"data": "x" * 20_000_000})), REFUSED),
        "ws length 2^62": (frames(b"\x81\x7f" + struct.pack(">Q", 2**62)), REFUSED),
        "ws length 2^63": (frames(b"\x81\x7f" + struct.pack(">Q", 2**63)), REFUSED),
        "ws binary message": (frames(frame(BINARY, json.dumps(MESSAGE).encode())), REFUSED),
        "ws binary garbage": (frames(bytes(range(256)) * 100), REFUSED),
        "ws masked frame": (frames(b"\x81\x85abcdhello"), REFUSED),
        "ws reserved opcode": (frames(frame(5, b"x") * 5), REFUSED),
        "ws reserved bits": (frames(b"\xf1\x05hello"), REFUSED),
        "ws compressed frame": (frames(b"\xc1\x05hello"), REFUSED),
        "ws continuation first": (frames(frame(0, b"x")), REFUSED),
        "ws message within a message": (frames(start + message(MESSAGE)), REFUSED),
        "ws ping of 200 bytes": (frames(frame(PING, b"x" * 200)), REFUSED),
        "ws close": (frames(frame(CLOSE, b"\x03\xe8bye")), REFUSED),
        "ws close of one byte": (frames(frame(CLOSE, b"\x03")), REFUSED),
        "ws close within a message": (frames(start, frame(CLOSE, b"\x03\xe8")), REFUSED),
        "ws end within a message": (frames(start, stays=False), REFUSED),
        "ws end within a frame": (frames(b"\x81\x7e\xff\xffabc", stays=False), REFUSED),
        "ws end at once": (frames(stays=False), REFUSED),
        "ws invalid UTF-8": (frames(frame(TEXT, b"\xff\xfe")), REFUSED),
        "ws no JSON": (frames(frame(TEXT, b"hello")), REFUSED),
        "ws deep JSON": (frames(frame(TEXT, b"[" * 200_000)), REFUSED),
        "ws list": (frames(frame(TEXT, b"[]")), REFUSED),
        "ws data null": (frames(message({"type": "observation", "data": None})), REFUSED),
        "ws no observation": (frames(message({"type": "observation", "data": {}})), REFUSED),
        "ws error without data": (frames(message({"type": "error"})), REFUSED),
        "ws error of lists": (
            frames(message({"type": "error", "data": {"code": [], "errors": [1, [2]]}})),
            REFUSED,
        ),
        "ws error of many lines": (
            frames(message({"type": "error", "data": {"code": "X\nY", "message": "a\nb\r"}})),
            REFUSED,
        ),
        "ws lone surrogate": (
            ws_step(json.dumps(MESSAGE).replace("hello", "\\ud800").encode()),
            ANSWERED,
        ),
        "ws duplicated key": (ws_step(b'{"type": "observation", "type": "error"}'), REFUSED),
        "ws NaN": (ws_step(b'{"type": "observation", "data": NaN}'), REFUSED),
        "ws escaped text": (ws_step(f'{{"type": "{codes}", "data": {{}}}}'.encode()), REFUSED),
    }


def over_websocket(handler: Handler, shakes_hands: bool = True) -> Handler:
    """Returns a handler that also has the schema of actions, and shakes hands before the rest."""

    async def serve(request: Request) -> None:
        if b"/schema " in request.head:
            await request.reply(json.dumps(RIGHT["openenv"]).encode())
            return
        if shakes_hands:
            await shake_hands(request)
        await handler(request)

    return serve


async def refuse_handshake(request: Request) -> None:
    await request.reply(b"{}", "403 Forbidden")


HANDSHAKES: dict[str, tuple[Handler, str]] = {
    "ws handshake 403": (refuse_handshake, REFUSED),
    "ws handshake redirect": (redirect, REFUSED),
    "ws handshake silence": (silence, REFUSED),
    "ws handshake drip": (drip_headers, REFUSED),
    "ws handshake endless headers": (endless_headers, REFUSED),
    "ws handshake garbage": (binary, REFUSED),
    "ws handshake of nothing": (at_once_the_end, REFUSED),
    "ws handshake wrong accept": (
        text(b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
        REFUSED,
    ),
}
