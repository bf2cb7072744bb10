"""An OpenAI-compatible endpoint whose completions are the policy's responses.

Some environments are programs that hold a conversation themselves: they send the messages so far to
a chat endpoint, and go on with what it answers. Here each such program is a `Conversation`, in an
event loop. A request waits until the policy has responded:

    program   POST /v1/chat/completions, with messages     -> conversation.next() returns it
    sampler   conversation.answer(response)                -> the program's request is answered
    program   ends with an outcome                         -> conversation.next() returns that

A program says with the header X-Session-ID which conversation it speaks for. The tokens of a
response never leave the sampler: the program reads its text, and nothing is tokenized again. So a
conversation may only grow, and `new_messages` refuses a request that has changed what was said.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Generic, TypeVar

from jzero.tasks.tools import parsing
from jzero.types import JsonValue

SESSION_HEADER = "X-Session-ID"
PATH = "/chat/completions"
MODEL = "policy"  # the name of the model in requests and completions
_FORBIDDEN = ("response_format", "logit_bias", "stop")  # that would change what the policy samples

Outcome = TypeVar("Outcome")
Message = dict[str, JsonValue]


class RequestError(ValueError):
    """A request that the policy cannot answer."""


@dataclass(frozen=True)
class Request:
    """What a program asks: the messages so far, and the tools that the policy may call."""

    messages: list[Message]
    tools: list[JsonValue]  # schemas, as a chat template takes them


class Conversation(Generic[Outcome]):
    """A program that asks for responses until it ends. All methods run in one event loop."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self._program: asyncio.Task[Outcome] | None = None

    def start(self, program: Awaitable[Outcome]) -> None:
        """Runs the program."""
        self._program = asyncio.ensure_future(program)

    async def ask(self, request: Request) -> Message:
        """Returns the assistant's message, once there is one.

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
            Exception: whatever the program raises.
        """
        assert self._program is not None, "start runs the program"
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait([request, self._program], return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else self._program.result()
        finally:
            request.cancel()  # of no effect where it is done

    def answer(self, message: Message) -> None:
        """Answers the request that waits.

        Raises:
            RequestError: none waits any more: the program has given it up.
        """
        if self._answer is None or self._answer.done():
            raise RequestError("the program no longer waits for the response that it has asked for")
        self._answer.set_result(message)

    async def stop(self) -> None:
        """Ends the program, whatever it is doing. A request that waits is refused."""
        if self._answer is not None:
            self._answer.cancel()
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait([self._program])


class ChatEndpoint:
    """The server. Its threads hand requests over to the event loop of the conversations.

    `url` is the address that a client of OpenAI's protocol takes as its base.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.conversations: dict[str, Conversation] = {}  # by session
        self._loop = loop
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                session = self.headers.get(SESSION_HEADER, "")
                status, kind, text = endpoint.respond(self.path, session, body)
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024  # all episodes of a step may ask at once

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server. Requests that wait are not answered."""
        self._server.shutdown()
        self._server.server_close()

    def respond(self, path: str, session: str, body: bytes) -> tuple[int, str, str]:
        """Returns the status, the type and the text of the answer to a request.

        It is called in a thread of the server, and waits there for the policy.
        """
        if not path.endswith(PATH):
            return 404, *_as_error(f"there is no {path} here, only {PATH}")
        conversation = self.conversations.get(session)
        if conversation is None:
            return 404, *_as_error(f"{SESSION_HEADER}={session} names no conversation")
        try:
            asked = json.loads(body)
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


# What goes over the wire.


def read_request(body: JsonValue) -> Request:
    """Returns what a request asks. How the policy samples, the run's settings say.

    Raises:
        RequestError: the request asks for what the policy does not do.
    """
    for name in _FORBIDDEN:
        if body.get(name):
            raise RequestError(f"{name} is not supported: jzero samples as rollout.* says")
    if body.get("n", 1) != 1:
        raise RequestError(f"n={body['n']}: a response is one, rollout.group_size says how many")
    messages = [plain_message(message) for message in body["messages"]]
    return Request(messages, body.get("tools") or [])


def plain_message(message: Message) -> Message:
    """Returns a message whose content is text, without what is None.

    Raises:
        RequestError: the content has parts that are not text.
    """
    kept = {name: value for name, value in message.items() if value is not None}
    content = kept.get("content", "")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise RequestError("a message has parts that are not text: the policy reads text alone")
        content = "\n".join(part["text"] for part in content)
    return kept | {"content": content}


def assistant_message(response: str, tools: Sequence[JsonValue]) -> Message:
    """Returns a response as an assistant's message, with its calls of tools.

    Where the policy writes a call that is not well formed, or that no tool takes, the whole
    response is text.
    """
    parameters = {
        tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
    }
    syntax = parsing.syntax_of(response)
    calls = parsing.parse_calls(response, syntax, parameters) if tools else []
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
        RequestError: the request is no continuation: what was said before has changed, or other
            tools are shown.
    """
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
    return content or ""


def _calls(tool_calls: JsonValue) -> list[tuple[str, JsonValue]]:
    """Returns what calls say, without what clients of OpenAI's protocol leave out or add."""
    functions = [call["function"] for call in tool_calls or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def completion(message: Message) -> JsonValue:
    """Returns a chat completion with this message."""
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(message)}
    return _head("chat.completion") | {"choices": [choice]}


def completion_events(message: Message) -> str:
    """Returns the same completion as server-sent events: the message, its end, and [DONE]."""
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
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
