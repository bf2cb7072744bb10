"""A server that speaks OpenEnv's protocol, for tests: a game in which a number has to be guessed.

It is written from the protocol alone and shares no code with jzero's client: the handshake and the
frames of WebSocket, the messages of openenv-core 0.3, and its schema of actions.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import struct
import threading
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "message": {"type": "string"},
    },
    "required": ["message"],
}


class Game:
    """A session."""

    def __init__(self) -> None:
        self.number: int | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        data = message.get("data", {})
        if message["type"] == "reset":
            self.number = data["start"] if "start" in data else data["seed"] % 10
            return observation("guess a number")
        if message["type"] != "step":
            return error("UNKNOWN_TYPE", f"Unknown message type: {message['type']}")
        if set(data) != {"message"}:
            errors = [{"loc": ["message"], "msg": "Field required", "type": "missing"}]
            return error("VALIDATION_ERROR", "Invalid message", errors=errors)
        if data["message"] == "crash":
            return error("EXECUTION_ERROR", "division by zero")
        assert self.number is not None, "a session begins with reset"
        guess = int(data["message"])
        if guess == self.number:
            return observation("right", reward=1.0, done=True)
        return observation("higher" if guess < self.number else "lower", reward=0.25)


def observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"echoed": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: object) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class OpenEnvServer:
    """Runs in a thread. `sessions` counts those that are open, `drop` breaks the next steps."""

    def __init__(self, schema: dict[str, Any] = SCHEMA) -> None:
        self.schema = schema
        self.sessions = 0
        self.drop = 0
        self.is_closing = False
        self.seen: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end_sessions(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.close()

    async def _end_sessions(self) -> None:
        self.is_closing = True
        sessions = asyncio.all_tasks() - {asyncio.current_task()}
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        await asyncio.sleep(0.01)  # in which the transports close their sockets

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # `close` cancels the sessions that are left, and clients may leave at any moment.
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, EOFError):
            await self._answer(reader, writer)
        if self.is_closing:
            writer.transport.abort()
        else:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        if path == "/schema":
            body = json.dumps({"action": self.schema, "observation": {}, "state": {}})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        elif path == "/ws" and "upgrade: websocket" in head.lower():
            writer.write(handshake(head))
            self.sessions += 1
            try:
                await self._play(reader, writer)
            finally:
                self.sessions -= 1
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        game = Game()
        while True:
            try:
                kind, payload = await read_frame(reader)
            except asyncio.IncompleteReadError:
                return
            if kind == 8:
                writer.write(b"\x88\x02\x03\xe8")
                return
            if kind != 1:
                continue
            message = json.loads(payload)
            self.seen.append(message)
            if message["type"] == "close":
                writer.write(b"\x88\x02\x03\xe8")
                return
            if message["type"] == "step" and self.drop:
                self.drop -= 1
                return
            answer = json.dumps(game.answer(message)).encode()
            # A ping, and a message in two frames with another ping between them.
            writer.write(frame(0x89, b"?"))
            writer.write(frame(0x01, answer[:5]) + frame(0x89, b"") + frame(0x80, answer[5:]))
            await writer.drain()


def handshake(head: str) -> bytes:
    """Returns the reply to a client's request for a WebSocket."""
    before = head.lower().partition("sec-websocket-key:")[0]
    key = head[len(before) :].split("\r\n")[0].partition(":")[2].strip()
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    accept = base64.b64encode(digest).decode()
    return (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accepts a WebSocket connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.write(handshake(head))


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns the kind and the payload of a frame of a client."""
    first, second = await reader.readexactly(2)
    assert first & 0x80 and second & 0x80, "a client masks, and this one sends whole messages"
    length = second & 0x7F
    if length == 126:
        length = int.from_bytes(await reader.readexactly(2), "big")
    elif length == 127:
        length = int.from_bytes(await reader.readexactly(8), "big")
    mask = await reader.readexactly(4)
    payload = await reader.readexactly(length)
    return first & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def frame(first: int, payload: bytes) -> bytes:
    """Returns a frame of a server, which masks nothing."""
    length = len(payload)
    if length < 126:
        return struct.pack(">BB", first, length) + payload
    if length < 1 << 16:
        return struct.pack(">BBH", first, 126, length) + payload
    return struct.pack(">BBQ", first, 127, length) + payload
