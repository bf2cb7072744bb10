"""An OpenAI-compatible endpoint that serves the policy's responses as completions.

Some environments are programs that drive a conversation themselves: they send the messages so far
to a chat endpoint and continue with its answer. The endpoint finds the `Responder` of a request by
its API key or by the header X-Session-ID, and the request waits until the policy has responded.
There are two kinds of responders: the session of an agent (`environments.agents`), and the
conversation of a program of verifiers, which lives in an event loop:

    program   POST /v1/chat/completions, with messages     -> conversation.next() returns it
    sampler   conversation.answer(response)                -> the program's request is answered
    program   ends with an outcome                         -> conversation.next() returns it

The tokens of a response never leave the sampler: the program receives only the text, and the text
is not tokenized again. A conversation may therefore only grow, and `new_messages` rejects a request
that changes earlier messages. The requests of an agent may form a tree (`rollout.agents`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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
MODELS_PATH = "/models"
REWARD_PATH = "/reward"  # not of OpenAI's API: a program reports its reward here
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
MAX_CHOICES = 64  # of a request
MAX_STOP_STRINGS = 16  # of a request
_FORBIDDEN = ("response_format", "logit_bias")  # fields that would change the sampling

Outcome = TypeVar("Outcome")
Message = dict[str, JsonValue]


class RequestError(ValueError):
    """A request that the policy cannot answer."""

    def __init__(self, message: str, status: int = 400, code: str = "") -> None:
        """status: of HTTP. code: `code` of OpenAI's error, such as context_length_exceeded."""
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Request:
    """A program's request: the messages so far, and the tools that the policy may call."""

    messages: list[Message]
    tools: list[JsonValue]  # schemas in the form that chat templates take
    num_choices: int = 1  # responses to the same messages (`n` of OpenAI's API)
    stop: tuple[str, ...] = ()  # strings that end a response, besides those of the settings
    max_tokens: int | None = None  # of a response; None: rollout.max_new_tokens


@dataclass(frozen=True)
class Choice:
    """A response to a request."""

    message: Message
    is_truncated: bool = False  # it has reached its longest length

    @property
    def finish_reason(self) -> str:
        """The finish reason of OpenAI's API."""
        if self.is_truncated:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    choices: Sequence[Choice]
    id: str = "jzero"
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of all choices


class Responder(Protocol):
    """Answers the requests of one key."""

    def respond(self, request: Request) -> Future[Answer]:
        """Queues a request. Its answer may be a RequestError. Does not block.

        Raises:
            RequestError: the request is refused.
        """
        ...

    def take_reward(self, reward: JsonValue) -> None:
        """Takes a reward that the program reports.

        Raises:
            RequestError: the program's reward comes from elsewhere.
        """
        ...


class Conversation(Generic[Outcome]):
    """A program that requests responses until it ends. All methods run in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None
        self._program: asyncio.Task[Outcome] | None = None

    def start(self, program: Awaitable[Outcome]) -> None:
        """Starts the program as a task of the event loop."""
        self._program = asyncio.ensure_future(program)

    async def ask(self, request: Request) -> Message:
        """Queues a request and waits for the assistant's message.

        Raises:
            RequestError: another request of the conversation is waiting, or the request asks for
                another kind of sampling than that of the settings.
        """
        if request.num_choices != 1:
            raise RequestError(
                f"n={request.num_choices}: a request has one response: use rollout.group_size"
            )
        if request.stop:
            raise RequestError("stop is not supported: the rollout.* settings control sampling")
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

    # -- the thread of the endpoint ----------------------------------------------------------------

    def respond(self, request: Request) -> Future[Answer]:
        """See `Responder.respond`."""
        answering = self._respond(request)
        try:
            return asyncio.run_coroutine_threadsafe(answering, self._loop)
        except RuntimeError as error:
            answering.close()
            raise RequestError(f"RuntimeError: {error}: the episode has ended", 503) from None

    async def _respond(self, request: Request) -> Answer:
        return Answer([Choice(await self.ask(request))])

    def take_reward(self, reward: JsonValue) -> None:
        """See `Responder.take_reward`."""
        raise RequestError("the program's own outcome is the reward", 404)


class ChatEndpoint:
    """An HTTP server in a thread that passes requests to the responders of its programs.

    `url` is the base URL for an OpenAI client.
    """

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        # By API key, or by the header X-Session-ID.
        self.responders: dict[str, Responder] = {}
        self._bodies = Bodies(MAX_HELD_BYTES)
        # For bodies of megabytes, whose JSON would keep the other programs waiting.
        self._threads = ThreadPoolExecutor(READING_THREADS, "endpoint")
        app = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])],
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
        """Answers a request, of a completion once the policy has responded."""
        path = request.scope["path"]
        is_models = path.endswith(MODELS_PATH)
        if not is_models and not path.endswith((PATH, REWARD_PATH)):
            raise HTTPException(404, f"unknown path {path}: use {PATH}")
        responder = self._find_responder(request)
        admit(request.scope)
        if is_models:
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jzero"}
            return JSONResponse({"object": "list", "data": [model]})
        async with self._bodies.spool(request, MAX_BODY_BYTES, "") as file:
            loop = asyncio.get_running_loop()
            try:
                body = await loop.run_in_executor(self._threads, lambda: read_body(file.read()))
                if path.endswith(REWARD_PATH):
                    responder.take_reward(body)
                    return JSONResponse({})
                answering = responder.respond(read_request(body))
            except RequestError as error:
                raise Refusal(error) from None
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise HTTPException(400, f"{type(error).__name__}: {error}") from None
        answer = await _wait(answering)
        if body.get("stream"):
            return Response(completion_events(answer), media_type="text/event-stream")
        return JSONResponse(completion(answer))

    def _find_responder(self, request: starlette.requests.Request) -> Responder:
        """Returns the responder of a request. Raises HTTPException."""
        session = request.headers.get(SESSION_HEADER)
        if session is not None:
            responder = self.responders.get(session)
            if responder is None:
                raise HTTPException(404, f"{SESSION_HEADER}={session} names no conversation")
            return responder
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        responder = self.responders.get(key.strip()) if scheme.lower() == "bearer" else None
        if responder is None:
            raise HTTPException(
                401,
                "the API key is not that of a running session: send the key that the agent was "
                "started with",
            )
        return responder


async def _wait(answering: Future[Answer]) -> Answer:
    """Returns the answer of a responder. Raises HTTPException."""
    waiting = asyncio.wrap_future(answering)
    await asyncio.wait([waiting])
    if waiting.cancelled():
        raise HTTPException(503, "CancelledError: the episode has ended")
    try:
        return waiting.result()
    except RequestError as error:
        raise Refusal(error) from None


class Refusal(HTTPException):
    """The refusal of a request by its responder."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.status, f"RequestError: {error}")
        self.code = error.code


def read_body(body: bytes) -> dict[str, JsonValue]:
    """Returns the JSON object of a request. Raises ValueError."""
    return json_values.as_object(http.parse_json(body), "the body")


async def _refuse(_: starlette.requests.Request, error: Exception) -> Response:
    """Answers a request that is wrong."""
    assert isinstance(error, HTTPException), f"{error=}"
    content = {"error": {"message": error.detail, "type": "jzero"}}
    if isinstance(error, Refusal) and error.code:
        content["error"]["code"] = error.code
    return JSONResponse(content, error.status_code, error.headers)


# The wire format.


def read_request(body: Mapping[str, JsonValue]) -> Request:
    """Validates the body of a request and returns its messages and tools.

    Sampling settings in the body, such as the temperature, are ignored: the run's settings apply.

    Raises:
        RequestError: the request needs an unsupported feature.
    """
    for name in _FORBIDDEN:
        if body.get(name) and body[name] != {"type": "text"}:
            raise RequestError(f"{name} is not supported: the rollout.* settings control sampling")
    messages = [plain_message(message) for message in json_values.member(body, ("messages",), list)]
    tools = json_values.optional_member(body, ("tools",), list, [])
    for tool in tools:
        json_values.member(tool, ("function", "name"), str)
        json_values.optional_member(tool, ("function", "parameters"), dict, {})
    num_choices = _read_count(body, "n", MAX_CHOICES) or 1
    max_tokens = _read_count(body, "max_completion_tokens") or _read_count(body, "max_tokens")
    return Request(messages, tools, num_choices, _read_stop(body), max_tokens)


def _read_count(body: Mapping[str, JsonValue], name: str, most: int = 1 << 31) -> int | None:
    """Returns a positive integer of a body, None if it is missing. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise RequestError(f"{name}={shown(value)} is not an integer from 1 to {most}")
    return value


def _read_stop(body: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Returns the stop strings of a body. Raises RequestError."""
    stop = body.get("stop") or []
    strings = [stop] if isinstance(stop, str) else json_values.as_list(stop, "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings, more than {MAX_STOP_STRINGS}")
    texts = [json_values.as_text(text, "stop") for text in strings]
    return tuple(filter(None, texts))


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


def assistant_message(response: str, tools: Sequence[JsonValue], prefix: str = "call") -> Message:
    """Returns a response as an assistant message with tool calls, whose ids begin with `prefix`.

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
        tool_calls.append({"id": f"{prefix}_{number}", "type": "function", "function": function})
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


def completion(answer: Answer) -> JsonValue:
    """Returns a chat completion."""
    choices = [
        {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
        for index, choice in enumerate(answer.choices)
    ]
    return _head(answer, "chat.completion") | {"choices": choices, "usage": _usage(answer)}


def completion_events(answer: Answer) -> str:
    """Returns a completion as server-sent events: the messages, their ends, the usage, [DONE]."""
    head = _head(answer, "chat.completion.chunk")
    chunks: list[JsonValue] = []
    for index, choice in enumerate(answer.choices):
        ends: list[tuple[Message, str | None]] = [
            (_delta(choice.message), None),
            ({}, choice.finish_reason),
        ]
        for delta, reason in ends:
            part = {"index": index, "delta": delta, "finish_reason": reason}
            chunks.append(head | {"choices": [part]})
    chunks[-1] = json_values.as_object(chunks[-1]) | {"usage": _usage(answer)}
    lines = [*map(json.dumps, chunks), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)


def _delta(message: Message) -> Message:
    """Returns a message as the only delta of a stream, in which every tool call has an index."""
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **json_values.as_object(call)}
            for index, call in enumerate(json_values.as_list(delta["tool_calls"]))
        ]
    return delta


def _usage(answer: Answer) -> dict[str, JsonValue]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _head(answer: Answer, kind: str) -> dict[str, JsonValue]:
    return {"id": answer.id, "object": kind, "created": 0, "model": MODEL}
