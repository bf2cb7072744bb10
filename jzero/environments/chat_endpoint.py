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
import json
import threading
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import starlette.requests
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jzero import http, json_values
from jzero.environments.tools import parsing
from jzero.errors import shown
from jzero.servers.bodies import Bodies, client_disconnected
from jzero.servers.connections import admit
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import Rules, make_hosts
from jzero.servers.running import HttpServer
from jzero.types import JsonValue

SESSION_HEADER = "X-Session-ID"
PATH = "/chat/completions"
MODEL = "policy"  # the name of the model in requests and completions
# All episodes of a step may ask at once, and tools may take minutes between two requests.
LIMITS = ConnectionLimits(
    max_connections=4096,
    max_address_connections=4096,
    request_seconds=30.0,
    idle_seconds=600.0,
    grace_seconds=0.0,
)
MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 1 << 30  # of all bodies that arrive, which are on disk
READING_THREADS = 2
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


class ChatEndpoint:
    """An HTTP server in a thread that passes requests to the event loop of the conversations.

    `url` is the base URL for an OpenAI client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits = LIMITS) -> None:
        self.conversations: dict[str, Conversation] = {}  # by session
        self._loop = loop
        self._bodies = Bodies(MAX_HELD_BYTES)
        # For bodies of megabytes, whose JSON would keep the other programs waiting.
        self._threads = ThreadPoolExecutor(READING_THREADS, "endpoint")
        app = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["POST"])],
            exception_handlers={HTTPException: _refuse, ClientDisconnect: client_disconnected},
        )
        # Only programs on this machine can connect. The system chooses a free port.
        host = "127.0.0.1"
        self._server = HttpServer(app, host, 0, limits, Rules(make_hosts(host)))
        self.url = f"{self._server.url}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server. Waiting requests stay unanswered."""
        self._server.shutdown()
        self._threads.shutdown(wait=False)

    async def _answer(self, request: starlette.requests.Request) -> Response:
        """Answers a request once the policy has responded."""
        path = request.scope["path"]
        if not path.endswith(PATH):
            raise HTTPException(404, f"unknown path {path}: use {PATH}")
        session = request.headers.get(SESSION_HEADER, "")
        conversation = self.conversations.get(session)
        if conversation is None:
            raise HTTPException(404, f"{SESSION_HEADER}={session} names no conversation")
        admit(request.scope)
        async with self._bodies.spool(request, MAX_BODY_BYTES, "") as file:
            loop = asyncio.get_running_loop()
            try:
                asked = await loop.run_in_executor(self._threads, lambda: read_body(file.read()))
                asking = conversation.ask(read_request(asked))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise HTTPException(400, f"{type(error).__name__}: {error}") from None
        message = await self._ask(asking)
        if asked.get("stream"):
            return Response(completion_events(message), media_type="text/event-stream")
        return JSONResponse(completion(message))

    async def _ask(self, asking: Coroutine[None, None, Message]) -> Message:
        """Returns the message of the policy. Raises HTTPException."""
        # Conversations run in another event loop.
        try:
            future = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:
            asking.close()
            raise HTTPException(503, f"RuntimeError: {error}: the episode has ended") from None
        await asyncio.wait([asyncio.wrap_future(future)])
        if future.cancelled():
            raise HTTPException(503, "CancelledError: the episode has ended")
        try:
            return future.result()
        except RequestError as error:
            raise HTTPException(400, f"RequestError: {error}") from None


def read_body(body: bytes) -> dict[str, JsonValue]:
    """Returns the JSON object of a request. Raises ValueError."""
    return json_values.as_object(http.parse_json(body), "the body")


async def _refuse(_: starlette.requests.Request, error: Exception) -> Response:
    """Answers a request that is wrong."""
    assert isinstance(error, HTTPException), f"{error=}"
    content = {"error": {"message": error.detail, "type": "jzero"}}
    return JSONResponse(content, error.status_code, error.headers)


# The wire format.


def read_request(body: Mapping[str, JsonValue]) -> Request:
    """Validates the body of a request and returns its messages and tools.

    Sampling settings in the body, such as the temperature, are ignored: the run's settings apply.

    Raises:
        RequestError: the request needs an unsupported feature.
    """
    for name in _FORBIDDEN:
        if body.get(name):
            raise RequestError(f"{name} is not supported: the rollout.* settings control sampling")
    if body.get("n", 1) != 1:
        raise RequestError(f"n={body['n']}: a request has one response: use rollout.group_size")
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
        raise RequestError("a program asks again without a message after the policy's response")
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
