"""OpenAI's HTTP API: routes, answers and errors."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import jinja2
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jzero.rollout.sequence import Sequence
from jzero.serving.choices import Choice, ChoiceWriter
from jzero.serving.requests import CompletionRequest, RequestReader, parse_request
from jzero.serving.worker import DecodingWorker, Progress, Submission


def make_app(reader: RequestReader, worker: DecodingWorker) -> Starlette:
    """Returns the application, whose answers come from the thread that runs `worker`."""
    server = Server(reader, worker)
    model = {
        "id": reader.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jzero",
    }

    async def list_models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    return Starlette(
        routes=[
            Route("/v1/completions", server.answer_completion, methods=["POST"]),
            Route("/v1/chat/completions", server.answer_chat, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/health", list_models),
        ],
        # A chat template may refuse messages. UserError and ValidationError are ValueErrors.
        exception_handlers={
            ValueError: refuse,
            HTTPException: refuse,
            jinja2.TemplateError: refuse,
        },
    )


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Says what is wrong with a request, in OpenAI's shape."""
    status, message, parameter = 400, str(error), None
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        parameter = ".".join(str(name) for name in first["loc"])
        message = first["msg"]
    fields = {
        "message": message,
        "type": "invalid_request_error",
        "param": parameter,
        "code": None,
    }
    return JSONResponse({"error": fields}, status)


class Server:
    """Answers requests. Its methods run in the event loop, beside the thread that decodes."""

    def __init__(self, reader: RequestReader, worker: DecodingWorker) -> None:
        self.reader = reader
        self.worker = worker

    async def answer_completion(self, http_request: Request) -> Response:
        """Answers POST /v1/completions."""
        return await self.answer(http_request, is_chat=False)

    async def answer_chat(self, http_request: Request) -> Response:
        """Answers POST /v1/chat/completions."""
        return await self.answer(http_request, is_chat=True)

    async def answer(self, http_request: Request, is_chat: bool) -> Response:
        """Submits the sequences of a request.

        The response is a StreamingResponse also where the client asked for no stream: it ends the
        iterator of the body when the client leaves, and `write_reply` then frees the slots.
        """
        request = parse_request(await http_request.body())
        sequences = self.reader.make_sequences(request, is_chat)
        reports = self.submit(request, sequences)
        media_type = "text/event-stream" if request.stream else "application/json"
        body = self.write_reply(request, is_chat, sequences, reports)
        return StreamingResponse(body, media_type=media_type)

    def submit(
        self, request: CompletionRequest, sequences: list[Sequence]
    ) -> "asyncio.Queue[Progress]":
        """Gives sequences to the worker. The queue that is returned gets its reports."""
        loop = asyncio.get_running_loop()
        reports: asyncio.Queue[Progress] = asyncio.Queue()

        def listener(progress: Progress) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, progress)

        self.worker.submit(Submission(sequences, listener, request.stream))
        return reports

    async def write_reply(
        self,
        request: CompletionRequest,
        is_chat: bool,
        sequences: list[Sequence],
        reports: "asyncio.Queue[Progress]",
    ) -> AsyncIterator[str]:
        """Yields the body: events of a stream, or one JSON value at the end."""
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head: dict[str, object] = {
            "id": f"{kind}-{time.time_ns()}",
            "object": kind,
            "created": int(time.time()),
            "model": self.reader.model_name,
        }
        writers = [
            ChoiceWriter(
                request,
                is_chat,
                sequence,
                self.reader.tokenizer,
                self.reader.engine.settings.stop,
            )
            for sequence in sequences
        ]
        choices: list[Choice | None] = [None] * len(sequences)
        num_unfinished = len(sequences)
        try:
            while num_unfinished:
                progress = await reports.get()
                choice = writers[progress.sample_index].write(progress)
                choices[progress.sample_index] = choice
                if progress.finish_reason:
                    num_unfinished -= 1
                if request.stream and choice:
                    yield to_event(head | {"choices": [choice]})
        finally:
            # If the client has left, each of its sequences ends with its next token.
            for sequence in sequences:
                sequence.length_limit = 0

        usage = count_tokens(request, sequences)
        if not request.stream:
            yield json.dumps(head | {"choices": choices, "usage": usage})
            return
        if request.stream_options.get("include_usage"):
            yield to_event(head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def to_event(value: dict[str, object]) -> str:
    """Returns a JSON value as a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def count_tokens(request: CompletionRequest, sequences: list[Sequence]) -> dict[str, int]:
    """Returns the usage of a request. A prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(sequence.prompt_tokens) for sequence in sequences[:: request.n])
    completion_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
