"""An OpenAI-compatible endpoint that serves the policy's responses as completions.

Some environments are programs that drive a conversation themselves: they send the messages so far
to a chat endpoint and continue with its answer. Each such program is a `Conversation` in an event
loop. A request waits until the policy has responded:

    program   POST /v1/chat/completions, with messages     -> conversation.next() returns it
    sampler   conversation.answer(response)                -> the program's request is answered
    program   ends with an outcome                         -> conversation.next() returns it

The header X-Session-ID selects the conversation. The tokens of a response never leave the sampler:
the program receives only the text, and the text is not tokenized again. A conversation may
therefore only grow, and `new_messages` rejects a request that changes earlier messages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Generic, TypeVar, cast

from jzero import http, json_values
from jzero.environments.tools import parsing
from jzero.errors import shown
from jzero.types import JsonValue

SESSION_HEADER = "X-Session-ID"
PATH = "/chat/completions"
MODEL = "policy"  # the name of the model in requests and completions
IDLE_SECONDS = 600.0  # how long a connection may wait for its next request
REQUEST_SECONDS = 30.0  # limit for reading a request, from its first byte to its last
MAX_BODY_BYTES = 16 << 20
_FORBIDDEN = ("response_format", "logit_bias", "stop")  # fields that would change the sampling

Outcome = TypeVar("Outcome")
Message = dict[str, JsonValue]


class RequestError(ValueError):
    """A request that the policy cannot answer."""


@dataclass(frozen=True)
class Request:
    """A program's request: the messages so far, and the tools that the policy may call."""

    messages: list[Message]
    tools: list[JsonValue]  # schemas in the form that chat templates take


class Conversation(Generic[Outcome]):
    """A program that requests responses until it ends. All methods run in one event loop."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self._program: asyncio.Task[Outcome] | None = None

    def start(self, program: Awaitable[Outcome]) -> None:
        """Starts the program as a task of the event loop."""
        self._program = asyncio.ensure_future(program)

    async def ask(self, request: Request) -> Message:
        """Queues a request and waits for the assistant's message.

        Raises:
            RequestError: another request of the conversation is waiting.
        """
        if self._answer is not None:
            raise RequestError("a conversation asks for one response at a time")
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    async def next(self) -> Request | Outcome:
        """Returns the program's next request, or its outcome if it has ended.

        Raises:
            Exception: any exception of the program.
        """
        assert self._program is not None, "start runs the program"
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait([request, self._program], return_when=asyncio.FIRST_COMPLETED)
            # If both are done, the request came first.
            return request.result() if request.done() else self._program.result()
        finally:
            request.cancel()  # no effect on a finished task

    def answer(self, message: Message) -> None:
        """Answers the waiting request.

        Raises:
            RequestError: no request is waiting, because the program has given up.
        """
        if self._answer is None or self._answer.done():
            raise RequestError("the program no longer waits for the response that it has asked for")
        self._answer.set_result(message)

    async def stop(self) -> None:
        """Cancels the program and its waiting request, and waits until the program has ended."""
        if self._answer is not None:
            self._answer.cancel()
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait([self._program])


class _BoundedReader(io.RawIOBase):
    """Reads a connection and raises TimeoutError if a request is incomplete at its deadline.

    A deadline for the complete request, unlike a timeout for each read, also stops a client that
    sends one byte at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline: float | None = None  # None until the first byte of a request

    def begin_request(self) -> None:
        """Resets the deadline: REQUEST_SECONDS count from the next byte."""
        self._deadline = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        now = time.monotonic()
        seconds = IDLE_SECONDS if self._deadline is None else self._deadline - now
        if seconds <= 0:
            raise TimeoutError(f"a request took more than {REQUEST_SECONDS:g} s")
        self._connection.settimeout(seconds)
        size = self._connection.recv_into(cast(bytearray, buffer))
        if self._deadline is None:
            self._deadline = time.monotonic() + REQUEST_SECONDS
        return size


class ChatEndpoint:
    """An HTTP server with threads that pass requests to the event loop of the conversations.

    `url` is the base URL for an OpenAI client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.conversations: dict[str, Conversation] = {}  # by session
        self._loop = loop
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                # Replace the default reader with a reader that enforces the deadline of a request.
                self.bounded = _BoundedReader(self.connection)
                self.rfile.close()
                self.rfile = io.BufferedReader(self.bounded)

            def handle_one_request(self) -> None:
                self.bounded.begin_request()
                # A program that resets its connection is not an error of the run.
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def do_POST(self) -> None:
                # Only ASCII digits: int() would also accept signs, spaces and underscores.
                length = self.headers.get("Content-Length", "0")
                is_number = length.isascii() and length.isdecimal() and len(length) < 16
                if not is_number or int(length) > MAX_BODY_BYTES:
                    # Close the connection, because the body is left unread.
                    self.close_connection = True
                    reason = f"Content-Length has to be a number up to {MAX_BODY_BYTES}"
                    self.reply(413, *_as_error(reason))
                    return
                body = self.rfile.read(int(length))
                if len(body) < int(length):  # the program has disconnected
                    self.close_connection = True
                    return
                session = self.headers.get(SESSION_HEADER, "")
                self.reply(*endpoint.respond(self.path, session, body))

            def reply(self, status: int, kind: str, text: str) -> None:
                content = text.encode(errors="replace")
                # The last read has left the rest of its deadline as the timeout of the connection.
                self.connection.settimeout(REQUEST_SECONDS)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                # The base class would write a line to stderr for every request.
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024  # all episodes of a step may ask at once

        # Only programs on this machine can connect. The system chooses a free port.
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        # `shutdown` waits for the end of an interval.
        serve = partial(self._server.serve_forever, poll_interval=0.05)
        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server. Waiting requests stay unanswered."""
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, session: str, body: bytes) -> tuple[int, str, str]:
        """Returns the HTTP status, the content type and the body of the answer to a request.

        Runs in a thread of the server and blocks until the policy has responded.
        """
        if not path.endswith(PATH):
            return 404, *_as_error(f"there is no {path} here, only {PATH}")
        conversation = self.conversations.get(session)
        if conversation is None:
            return 404, *_as_error(f"{SESSION_HEADER}={session} names no conversation")
        try:
            # Conversations run in the event loop; this thread of the server only waits.
            asked = json_values.as_object(http.parse_json(body), "the body")
            asking = conversation.ask(read_request(asked))
            message = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return 400, *_as_error(f"{type(error).__name__}: {error}")
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            return 503, *_as_error(f"{type(error).__name__}: the episode has ended")
        if asked.get("stream"):
            return 200, "text/event-stream", completion_events(message)
        return 200, "application/json", json.dumps(completion(message))


def _as_error(message: str) -> tuple[str, str]:
    return "application/json", json.dumps({"error": {"message": message, "type": "jzero"}})


# The wire format.


def read_request(body: Mapping[str, JsonValue]) -> Request:
    """Validates the body of a request and returns its messages and tools.

    Sampling settings in the body, such as the temperature, are ignored: the run's settings apply.

    Raises:
        RequestError: the request needs an unsupported feature.
    """
    for name in _FORBIDDEN:
        if body.get(name):
            raise RequestError(f"{name} is not supported: jzero samples as rollout.* says")
    if body.get("n", 1) != 1:
        raise RequestError(f"n={body['n']}: a response is one, rollout.group_size says how many")
    messages = [plain_message(message) for message in json_values.member(body, ("messages",), list)]
    tools = json_values.optional_member(body, ("tools",), list, [])
    for tool in tools:
        json_values.member(tool, ("function", "name"), str)
        json_values.optional_member(tool, ("function", "parameters"), dict, {})
    return Request(messages, tools)


def plain_message(message: Message) -> Message:
    """Returns a message with text as its content and without fields that are None.

    Raises:
        RequestError: the content has parts that are not text.
    """
    kept = {name: value for name, value in message.items() if value is not None}
    content = kept.get("content", "")
    if isinstance(content, list):
        if any(json_values.as_object(part).get("type") != "text" for part in content):
            raise RequestError("a message has parts that are not text: the policy reads text only")
        content = "\n".join(json_values.member(part, ("text",), str) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"the content of a message is {shown(content)} and not text")
    return {**kept, "content": content}


def assistant_message(response: str, tools: Sequence[JsonValue]) -> Message:
    """Returns a response as an assistant message with tool calls.

    If a call is malformed or does not match any tool, the complete response becomes text.
    """
    parameters = {}
    for tool in tools:
        # `read_request` has checked the types.
        name = json_values.member(tool, ("function", "name"), str)
        parameters[name] = json_values.optional_member(tool, ("function", "parameters"), dict, {})
    syntax = parsing.syntax_of(response)
    calls = parsing.parse_calls(response, syntax, parameters) if tools else []
    # A harness executes only valid calls. As text, the program sees the policy's words and can
    # reply.
    if not calls or any(isinstance(call, parsing.BadCall) for call in calls):
        return {"role": "assistant", "content": response}
    content, _, _ = response.partition(parsing.BEGIN)
    tool_calls = []
    for number, call in enumerate(calls):
        assert isinstance(call, parsing.Call), f"{call=}"
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        tool_calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": content.rstrip(), "tool_calls": tool_calls}


def new_messages(before: Request, response: Message, after: Request) -> list[Message]:
    """Returns the messages that follow a response in the next request.

    Raises:
        RequestError: the request does not continue the conversation: earlier messages, the response
            or the tools have changed, or no message follows the response.
    """
    # The next request repeats the earlier messages, then the response, then adds new messages.
    number = len(before.messages)
    if after.messages[:number] != before.messages or after.tools != before.tools:
        raise RequestError(
            "a program has changed its earlier messages or its tools; the policy is trained on "
            "conversations that only grow"
        )
    said, *new = after.messages[number:] or [{}]
    for name, read in (("role", str), ("content", _text), ("tool_calls", _calls)):
        sent, sampled = read(said.get(name)), read(response.get(name))
        if sent != sampled:
            raise RequestError(
                f"a program has changed the {name} of the policy's response: it sent "
                f"{sent!r:.80}, and the response was {sampled!r:.80}"
            )
    if not new:
        raise RequestError("a program asks again and has said nothing to the policy's response")
    return new


def _text(content: JsonValue) -> str:
    return json_values.as_text(content or "", "content")


def _calls(tool_calls: JsonValue) -> list[tuple[str, JsonValue]]:
    """Returns the names and arguments of tool calls: OpenAI clients omit or add other fields."""
    calls = []
    for call in json_values.as_list(tool_calls or [], "tool_calls"):
        name = json_values.member(call, ("function", "name"), str)
        arguments = json_values.member(call, ("function", "arguments"), str)
        calls.append((name, json.loads(arguments)))
    return calls


def completion(message: Message) -> JsonValue:
    """Returns a chat completion with the message as its only choice."""
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(message)}
    return _head("chat.completion") | {"choices": [choice]}


def completion_events(message: Message) -> str:
    """Returns the completion as server-sent events: the message, the finish reason, and [DONE]."""
    delta = dict(message)
    # In events every tool call has an index.
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **json_values.as_object(call)}
            for index, call in enumerate(json_values.as_list(delta["tool_calls"]))
        ]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _finish_reason(message)},
    ]
    head = _head("chat.completion.chunk")
    chunks = [json.dumps(head | {"choices": [choice]}) for choice in choices]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])


def _head(kind: str) -> dict[str, JsonValue]:
    return {"id": "jzero", "object": kind, "created": 0, "model": MODEL}


def _finish_reason(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
