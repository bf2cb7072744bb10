"""The reply to one request: events of a stream, or one JSON value at the end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jzero.decoder.sequence import Sequence
from jzero.serving.choices import Choice, ChoiceWriter
from jzero.serving.requests import RequestReader
from jzero.serving.scored import ReplyOptions
from jzero.serving.worker import Progress, Submission


class Reply:
    """Waits for the sequences of a request, and converts them to OpenAI's format.

    Create it in the event loop, pass its `submission` to the worker, and read either `events` or
    `body`. Cancel the submission if the reply is no longer read.
    """

    def __init__(
        self, reader: RequestReader, options: ReplyOptions, sequences: list[Sequence]
    ) -> None:
        self.options = options
        self.sequences = sequences
        self.loop = asyncio.get_running_loop()
        self.reports: asyncio.Queue[Progress | HTTPException] = asyncio.Queue()
        self.submission = Submission(sequences, self.on_progress, options.is_streamed, options)
        self.num_unfinished = len(sequences)

        kind = "text_completion"
        if options.is_chat:
            kind = "chat.completion.chunk" if options.is_streamed else "chat.completion"
        self.head: dict[str, object] = {
            "id": f"{kind}-{time.time_ns()}",
            "object": kind,
            "created": int(time.time()),
            "model": options.model,
        }
        self.writers = [
            ChoiceWriter(options, sequence, reader.tokenizer, reader.engine.settings.stop)
            for sequence in sequences
        ]

    def on_progress(self, progress: Progress) -> None:
        """Receives a progress report. The worker calls this in its thread."""
        # The queue belongs to the event loop and is not thread-safe.
        self.loop.call_soon_threadsafe(self.reports.put_nowait, progress)

    def end(self, reason: HTTPException) -> None:
        """Ends the reply with an error, because its sequences will not be decoded further."""
        self.reports.put_nowait(reason)

    async def progress(self) -> AsyncIterator[Progress]:
        """Yields progress reports of the choices until every choice has ended.

        Raises HTTPException if the server ends the reply.
        """
        while self.num_unfinished:
            progress = await self.reports.get()
            if isinstance(progress, HTTPException):
                raise progress
            if progress.finish_reason:
                self.num_unfinished -= 1
            yield progress

    async def body(self) -> str:
        """Returns the JSON value of a reply that is not streamed."""
        ends = {
            progress.sample_index: progress
            async for progress in self.progress()
            if progress.finish_reason
        }
        if self.options.is_scored:
            # Formatting the log-probabilities of a long prompt takes long: do not block the event
            # loop.
            return await asyncio.to_thread(self.write_body, ends)
        return self.write_body(ends)

    def write_body(self, ends: dict[int, Progress]) -> str:
        """Returns the JSON value of finished choices. `ends` is keyed by index."""
        choices = [self.write(ends[index]) for index in range(len(self.sequences))]
        fields: dict[str, object] = {"choices": choices, "usage": self.count_tokens()}
        if self.options.is_chat:
            first, scores = self.writers[0], self.submission.scored[0]
            if self.options.prompt_alternatives is not None:
                fields["prompt_logprobs"] = first.write_prompt_logprobs(scores)
            if self.options.returns_token_ids:
                fields["prompt_token_ids"] = self.sequences[0].prompt_tokens.tolist()
        return json.dumps(self.head | fields)

    def write(self, progress: Progress) -> Choice | None:
        """Returns the next chunk of a choice, or None if nothing can be sent yet."""
        index = progress.sample_index
        scored = self.submission.scored
        # The prompt was scored together with its first choice.
        first_choice = index - index % self.options.num_choices
        return self.writers[index].write(progress, scored[first_choice], scored[index])

    async def events(self) -> AsyncIterator[str]:
        """Yields the events of a stream. The last one is an error if the server ends the reply."""
        is_first = True
        try:
            async for progress in self.progress():
                choice = self.write(progress)
                if not choice:
                    continue
                fields: dict[str, object] = {"choices": [choice]}
                if is_first and self.options.is_chat and self.options.returns_token_ids:
                    fields["prompt_token_ids"] = self.sequences[0].prompt_tokens.tolist()
                is_first = False
                yield to_event(self.head | fields)
        except HTTPException as error:
            yield to_event(error_body(error.detail, error.status_code))
            return
        # OpenAI sends the usage in a last chunk without choices.
        if self.options.wants_usage:
            yield to_event(self.head | {"choices": [], "usage": self.count_tokens()})
        # OpenAI's marker for the end of a stream.
        yield "data: [DONE]\n\n"

    def count_tokens(self) -> dict[str, object]:
        """Returns the usage. A prompt counts once, regardless of the number of its choices."""
        # The choices of a prompt are adjacent.
        one_of_each = self.sequences[:: self.options.num_choices]
        prompt_tokens = sum(len(sequence.prompt_tokens) for sequence in one_of_each)
        completion_tokens = sum(sequence.num_new for sequence in self.sequences)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(sequence.cached_tokens for sequence in one_of_each)
            },
        }


class ReplyStream(StreamingResponse):
    """Sends the events of a reply, and cancels its submission at the end of the stream."""

    def __init__(self, reply: Reply, on_end: Callable[[Reply], None]) -> None:
        # The iterator of the events cannot cancel the submission: if the client has already
        # disconnected, the iterator is never started.
        super().__init__(reply.events(), media_type="text/event-stream")
        self.reply = reply
        self.on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.submission.cancel()
            self.on_end(self.reply)


def to_event(value: dict[str, object]) -> str:
    """Returns a JSON value as a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


# OpenAI's error types, by status, except the type for mistakes in a request.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
MOST_ERROR_CHARACTERS = 1000  # of a message, which may contain a value of the request


def error_body(message: str, status: int, parameter: str | None = None) -> dict[str, object]:
    """Returns an error in OpenAI's shape. `parameter` is the field of the request."""
    if len(message) > MOST_ERROR_CHARACTERS:
        message = f"{message[:MOST_ERROR_CHARACTERS]}..."
    fields = {
        "message": message,
        "type": ERROR_TYPES.get(status, "invalid_request_error"),
        "param": parameter,
        "code": "invalid_api_key" if status == 401 else None,
    }
    return {"error": fields}
