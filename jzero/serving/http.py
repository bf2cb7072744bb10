"""OpenAI's HTTP API: routes, admission of requests, and errors."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, TypeVar

import jinja2
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from jzero.decoder.sequence import Sequence
from jzero.servers.bodies import Bodies, client_disconnected
from jzero.servers.connections import RETRY_SECONDS
from jzero.servers.rules import JSON_TYPE, Hosts, Rules
from jzero.serving import metrics
from jzero.serving.keys import KeyCheck
from jzero.serving.limits import Limits
from jzero.serving.replies import Reply, ReplyStream, error_body
from jzero.serving.requests import RequestReader
from jzero.serving.scored import ReplyOptions
from jzero.serving.worker import DecodingWorker

Result = TypeVar("Result")

# For parsing and tokenizing, so that one long request does not block the others
READING_THREADS = 2
BODIES_HELD = 1024  # maximum number of full-size request bodies, which are on disk
POLL_SECONDS = 0.2  # polling interval for disconnected clients while their request is read


def make_app(server: "Server", key: str | None = None) -> Starlette:
    """Returns the application. With a key it requires the key in every request."""
    base, created = server.reader.model_name, int(time.time())
    models = []
    for name in server.reader.models:
        model = {"id": name, "object": "model", "created": created, "owned_by": "jzero"}
        # As vLLM names the base of an adapter.
        models.append(model if name == base else model | {"parent": base})

    async def list_models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": models})

    async def retrieve_model(http_request: Request) -> JSONResponse:
        wanted = http_request.path_params["name"]
        for model in models:
            if model["id"] == wanted:
                return JSONResponse(model)
        known = ", ".join(server.reader.models)
        raise HTTPException(404, f"there is no model {wanted}, only {known}")

    async def report_metrics(_: Request) -> Response:
        return Response(server.metrics(), media_type=metrics.CONTENT_TYPE)

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    middleware = []
    if key is not None:
        middleware = [
            Middleware(AuthenticationMiddleware, backend=KeyCheck(key), on_error=refuse_key)
        ]
    return Starlette(
        routes=[
            Route("/v1/completions", server.answer_completion, methods=["POST"]),
            Route("/v1/chat/completions", server.answer_chat, methods=["POST"]),
            Route("/v1/models", list_models),
            # Names of models have slashes.
            Route("/v1/models/{name:path}", retrieve_model),
            Route("/metrics", report_metrics),
            Route("/health", health),  # open without a key, and reveals nothing about the model
        ],
        # A chat template may raise on messages. UserError and ValidationError are ValueErrors.
        exception_handlers={
            ValueError: refuse,
            HTTPException: refuse,
            jinja2.TemplateError: refuse,
            ClientDisconnect: client_disconnected,
        },
        middleware=middleware,
    )


def make_rules(hosts: Hosts) -> Rules:
    """Returns what requests to the application must have."""

    def refusal(status: int, reason: str) -> tuple[str, bytes]:
        return JSON_TYPE, bytes(JSONResponse(error_body(reason, status)).body)

    return Rules(hosts, body_types=(JSON_TYPE,), refusal=refusal)


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Returns an error response in OpenAI's format."""
    status, message, parameter = 400, str(error), None
    headers = None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    if isinstance(error, ValidationError):
        # Without the input, which may be as large as the body.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        parameter = ".".join(str(name) for name in first["loc"])
        message = first["msg"]
    return JSONResponse(error_body(message, status, parameter), status, headers)


def refuse_key(_: HTTPConnection, error: Exception) -> JSONResponse:
    """Returns the response to a request with a missing or wrong key."""
    return JSONResponse(error_body(str(error), 401), 401, {"WWW-Authenticate": "Bearer"})


def overloaded(status: int, message: str) -> HTTPException:
    """Returns an error with a Retry-After header."""
    return HTTPException(status, message, {"Retry-After": str(RETRY_SECONDS)})


async def wait_until_left(receive: Receive) -> None:
    """Returns when the client has disconnected. The request body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


class Server:
    """Answers requests. Its methods run in the event loop; another thread decodes."""

    def __init__(self, reader: RequestReader, worker: DecodingWorker, limits: Limits) -> None:
        self.reader = reader
        self.worker = worker
        self.limits = limits
        self.reading_threads = ThreadPoolExecutor(READING_THREADS, "read")
        self.bodies = Bodies(BODIES_HELD * limits.max_body_bytes)
        self.replies: set[Reply] = set()  # replies that are being sent
        self.is_stopping = False  # rejects further requests
        self.num_requests: Counter[str] = Counter()  # by endpoint
        self.num_refused = 0

    def metrics(self) -> str:
        """Returns the server's counters in the text format of Prometheus."""
        return metrics.write(metrics.metrics_of(self.worker, self.num_requests, self.num_refused))

    async def answer_completion(self, http_request: Request) -> Response:
        """Answers POST /v1/completions."""
        return await self.answer(http_request, is_chat=False)

    async def answer_chat(self, http_request: Request) -> Response:
        """Answers POST /v1/chat/completions."""
        return await self.answer(http_request, is_chat=True)

    def stop(self) -> None:
        """Rejects further requests. Admitted requests continue."""
        self.is_stopping = True

    def end_replies(self, reason: HTTPException) -> None:
        """Ends all running replies with an error."""
        for reply in self.replies:
            reply.end(reason)

    # -- one request -------------------------------------------------------------------------------

    async def answer(self, http_request: Request, is_chat: bool) -> Response:
        """Submits the sequences of a request, and returns the reply or its stream.

        Raises ClientDisconnect if the client disconnects before a non-streamed reply.
        """
        self.num_requests["chat" if is_chat else "completion"] += 1
        try:
            options, sequences = await self.admit(http_request, is_chat)
        except (HTTPException, ValueError, jinja2.TemplateError):
            self.num_refused += 1
            raise
        reply = Reply(self.reader, options, sequences)
        self.replies.add(reply)
        self.worker.submit(reply.submission)
        if options.is_streamed:
            return ReplyStream(reply, self.replies.discard)

        # Wait for the reply or for the client to disconnect, whichever comes first.
        body = asyncio.ensure_future(reply.body())
        left = asyncio.ensure_future(wait_until_left(http_request.receive))
        try:
            await asyncio.wait((body, left), return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise ClientDisconnect
            return Response(body.result(), media_type="application/json")
        finally:
            body.cancel()
            left.cancel()
            # Cancelling has no effect on sequences that have finished.
            reply.submission.cancel()
            self.replies.discard(reply)

    async def admit(
        self, http_request: Request, is_chat: bool
    ) -> tuple[ReplyOptions, list[Sequence]]:
        """Reads a request, and returns its sequences. The worker has reserved room for them.

        Raises HTTPException, ValueError or jinja2.TemplateError if the request is rejected.
        """
        # The body and the parsed request are released on return: sequences may wait for long, and
        # their texts may be large.
        limit = self.limits.max_body_bytes
        advice = ": send several requests, or start the server with a larger --max-body-bytes"
        async with self.bodies.spool(http_request, limit, advice) as body:
            if self.is_stopping:
                raise overloaded(503, "the server is shutting down: retry when it is back")
            return await self.make_sequences(http_request, body, is_chat)

    async def make_sequences(
        self, http_request: Request, body: BinaryIO, is_chat: bool
    ) -> tuple[ReplyOptions, list[Sequence]]:
        """Parses and tokenizes a request in a reading thread, and reserves room in between."""
        # Read into memory in the thread, so that as many bodies are there as threads.
        request = await self.in_thread(
            http_request, lambda _: self.reader.read(body.read(), is_chat)
        )
        count = request.count_sequences(is_chat)
        # Reserve before tokenizing: a request without room is rejected early.
        if not self.worker.reserve(count):
            raise overloaded(
                429,
                f"{self.limits.max_waiting_sequences} sequences wait already, and this request has "
                f"{count}: ask again later, or start the server with a larger "
                "--max-waiting-sequences",
            )
        try:
            sequences = await self.in_thread(
                http_request,
                lambda is_wanted: self.reader.make_sequences(request, is_chat, is_wanted),
            )
            if await http_request.is_disconnected():
                raise ClientDisconnect
        except BaseException:
            self.worker.release(count)
            raise
        return self.reader.reply_options(request, is_chat), sequences

    async def in_thread(
        self, http_request: Request, work: Callable[[Callable[[], bool]], Result]
    ) -> Result:
        """Returns the result of `work`, which runs in a reading thread.

        `work` gets a function that returns false once the client has disconnected. In that case
        raises ClientDisconnect, and does not start work that is still queued.
        """
        has_left = threading.Event()

        def is_wanted() -> bool:
            return not has_left.is_set()

        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self.reading_threads, work, is_wanted)
        try:
            while not future.done():
                await asyncio.wait((future,), timeout=POLL_SECONDS)
                if not future.done() and await http_request.is_disconnected():
                    raise ClientDisconnect
            return future.result()
        finally:
            # Also after an error or a cancellation: a thread that is still working stops at the
            # next prompt.
            has_left.set()
            future.cancel()
