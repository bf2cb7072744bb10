"""The routes of the Tinker API: authentication, bounded bodies, and errors as the SDK reads them.

400, 404, 413, 422  refused at once; the client goes on with the next command
401                 the key is missing or wrong
408                 a poll without a result so far: the client polls again
410                 the promise of a sample is gone: the client sends it anew
429                 too busy: the client sends the same call again, later
"""

import asyncio
import contextlib
import itertools
import os
import sys
import traceback
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from jzero import terminal
from jzero.errors import UserError, shown
from jzero.http import parse_json
from jzero.servers.bodies import Bodies
from jzero.servers.connections import admit
from jzero.servers.rules import JSON_TYPE, Hosts, Rules, refuse_as_detail
from jzero.tinker import bodies, wire
from jzero.tinker.commands import PROTOBUF, Failure, TooBusyError
from jzero.tinker.datums import number_of, text_of
from jzero.tinker.service import SAMPLE_PREFIX, Answer, NotFoundError, Service
from jzero.tinker.sessions import Keys
from jzero.types import JsonValue

PREFIX = "/api/v1"
HOUSEKEEPING_SECONDS = 1.0
SWEEP_EVERY = 60  # housekeepings: expired checkpoints are hidden at once, and removed later
MOST_LISTED = 1000  # entries of a page
BODIES_HELD = 64  # full-size bodies at once, which are on disk
SMALL_BODY_BYTES = 1 << 16  # of all calls but those with data or prompts
TELEMETRY_BYTES = 1 << 20

PLAIN_BYTES = 1 << 20  # decompressed at once
# Bodies are decoded in threads: polls wait in the event loop, for everybody. Each thread keeps the
# memory of the largest bodies.
READING_THREADS = 2
# Smaller bodies are parsed in the event loop: a few milliseconds, less than a thread would cost.
INLINE_BYTES = 16 << 10
MOST_CONTAINERS = 20_000  # lists and objects of a JSON body
BYTES_A_VALUE = 16  # of a JSON body: a token of 10 digits, with a comma and spaces
FIELDS_A_DATUM = 64  # of a protobuf body: chunks, tensors and their fields

AnyBody = TypeVar("AnyBody", bound=BaseModel)
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
Handler = Callable[[Request], Awaitable[Response]]


class BodyError(Exception):
    """A body that is refused, with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The handlers of the routes."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self.service = service
        self.keys = keys
        self.bodies = Bodies(BODIES_HELD * service.limits.max_body_bytes)
        service.divide(keys.num_owners)
        self.threads = ThreadPoolExecutor(READING_THREADS, "read")
        # One body of an owner is read at a time: the threads are for all owners.
        self.turns: dict[str, asyncio.Lock] = {}
        limits = service.limits
        room = service.sampling.engine.max_sequence_tokens
        # A prompt, and the named tokens of every position of it.
        self.most_values = MOST_CONTAINERS + room * (limits.max_targets + 4)
        self.most_fields = 1000 + FIELDS_A_DATUM * limits.max_datums

    # -- bodies ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def content(self, request: Request, most: int = SMALL_BODY_BYTES) -> AsyncIterator[bytes]:
        """Yields the decompressed body, whose bytes count for its owner until the block ends.

        A large body stays on disk until it is the owner's turn, which lasts for the block.

        Raises an error if it has more than `most` bytes, and TooBusyError if the bodies of its
        owner have too many.
        """
        owner, held = owner_of(request), self.service.held
        most = min(most, self.service.limits.max_body_bytes)
        encoding = request.headers.get("content-encoding", "identity")
        async with self.bodies.spool(request, most, " (--max-body-bytes)") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            is_large = size > INLINE_BYTES or encoding != "identity"
            async with self.turn(owner) if is_large else contextlib.nullcontext():
                with held.held(owner, size):
                    data = file.read()
                    if encoding == "identity":
                        yield data
                        return
                    plain = await self.in_thread(decompress, data, encoding, most)
                    with held.held(owner, len(plain)):
                        yield plain

    def turn(self, owner: str) -> asyncio.Lock:
        """Returns the lock of an owner: the threads are for all owners."""
        return self.turns.setdefault(owner, asyncio.Lock())

    async def in_thread(
        self,
        work: Callable[Arguments, Result],
        *given: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Returns the result of `work`, which runs in a thread. It has to be the owner's turn."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: work(*given, **named))

    def parse(self, raw: bytes) -> dict[str, JsonValue]:
        """Returns the object of a JSON body. Raises BodyError. Any thread may call this."""
        num_containers = raw.count(b"[") + raw.count(b"{")
        num_values = num_containers + raw.count(b",")
        if num_containers > MOST_CONTAINERS or num_values > self.most_values:
            raise BodyError(
                413,
                f"the body has {num_values} values in {num_containers} lists and objects: send at "
                f"most {self.most_values} in {MOST_CONTAINERS}",
            )
        if len(raw) > BYTES_A_VALUE * self.most_values:
            raise BodyError(413, f"the body has more than {BYTES_A_VALUE * self.most_values} bytes")
        try:
            fields = parse_json(raw or b"{}")
        except (ValueError, RecursionError) as error:
            raise BodyError(400, f"the body cannot be parsed: {shown(str(error))}") from None
        if not isinstance(fields, dict):
            raise BodyError(422, "the body is not a JSON object")
        return fields

    async def body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """Returns the JSON body as an object. Raises BodyError or ValidationError."""
        fields: dict[str, JsonValue] = {}

        def read(raw: bytes) -> AnyBody:
            fields.update(self.parse(raw))
            return kind.model_validate(fields)

        # A prompt may be long; all other bodies in JSON are short.
        most = self.service.limits.max_body_bytes if kind is bodies.Sample else SMALL_BODY_BYTES
        try:
            async with self.content(request, most) as raw:
                if len(raw) <= INLINE_BYTES:
                    return read(raw)
                return await self.in_thread(read, raw)
        # A refused call uses up its seq_id: the SDK continues with the next one, and without this
        # the model would wait for the refused number forever.
        except ValidationError:
            self.consume(request, fields)
            raise

    def consume(self, request: Request, fields: Mapping[str, object]) -> None:
        """Counts the number of a refused command as used, if it has one."""
        model_id, number = fields.get("model_id"), fields.get("seq_id")
        if isinstance(model_id, str) and isinstance(number, int):
            self.service.refuse(owner_of(request), model_id, number)

    # -- handlers --------------------------------------------------------------------------------

    def json_call(self, kind: type[AnyBody], answer: Callable[[str, AnyBody], Answer]) -> Handler:
        """Returns the handler of a call with a JSON body."""

        async def handle(request: Request) -> Response:
            body = await self.body(request, kind)
            try:
                return JSONResponse(answer(owner_of(request), body))
            except TooBusyError:
                raise  # the client sends the same number again
            except Exception:
                self.consume(request, body.model_dump())
                raise

        return handle

    def listing(self, answer: Callable[[Request, str, int, int], Answer]) -> Handler:
        """Returns the handler of a list with offset and limit."""

        async def handle(request: Request) -> Response:
            offset, limit = (
                query_number(request, name, default)
                for name, default in (("offset", 0), ("limit", 100))
            )
            limit, owner = min(limit, MOST_LISTED), owner_of(request)
            # Lists read every record of the store.
            async with self.turn(owner):
                listed = await self.in_thread(answer, request, owner, offset, limit)
            return JSONResponse(listed)

        return handle

    async def forward_backward(self, request: Request) -> Response:
        """Answers POST forward_backward, the one call with a protobuf body."""
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise BodyError(400, f"forward_backward has a body of {PROTOBUF}: update the SDK")
        owner, message = owner_of(request), wire.Message()
        most = {"data": self.service.limits.max_datums}
        try:
            async with self.content(request, self.service.limits.max_body_bytes) as data:
                await self.in_thread(
                    wire.decode_into,
                    message,
                    "ForwardBackwardRequest",
                    data,
                    self.most_fields,
                    most,
                )
                # The same for a call that is repeated after a lost answer.
                model_id, number = text_of(message, "model_id"), number_of(message, "seq_id")
                answer = self.service.promised(owner, model_id, number)
                if answer is None:
                    call = await self.in_thread(self.service.read_batch, message)
                    answer = self.service.forward_backward(owner, call, len(data))
                return JSONResponse(answer)
        except (UserError, wire.WireError):
            self.consume(request, message)
            raise

    async def retrieve_future(self, request: Request) -> Response:
        """Answers a poll, which waits for the result for a while."""
        body = await self.body(request, bodies.RetrieveFuture)
        futures = self.service.futures
        future = futures.by_id.get(body.request_id)
        if future is None or future.owner != owner_of(request):
            is_sample = body.request_id.startswith(SAMPLE_PREFIX)
            # The SDK submits a sample anew after 410; 404 ends its call with an error.
            status = 410 if is_sample else 404
            return JSONResponse({"detail": f"there is no request {shown(body.request_id)}"}, status)
        # The SDK polls again at once after 408, so the server holds the poll. The SDK gives up on a
        # poll after 45 seconds, which the default of 30 stays below.
        result = await futures.wait(future, self.service.limits.poll_seconds)
        if result is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        # A failure has status 200 too: the SDK then raises an error for this call only, and its
        # client stays usable.
        return JSONResponse(result.body if isinstance(result, Failure) else result)

    async def discard(self, request: Request, most: int = SMALL_BODY_BYTES) -> None:
        """Reads a body that has nothing to say."""
        async with self.content(request, most):
            pass

    async def config(self, request: Request) -> Response:
        """Answers the flags by which the server bounds its clients."""
        await self.discard(request)
        limits, shares = self.service.limits, self.service.shares
        # These are flags of the SDK, with its own defaults as upper bounds. Half a body leaves room
        # for the encoding around the data of a chunk.
        return JSONResponse(
            {
                "fwdbwd_max_chunk_len": limits.max_datums,
                "fwdbwd_max_chunk_bytes_count": min(5_000_000, limits.max_body_bytes // 2),
                "sample_max_concurrent_requests": min(
                    2000, shares.of("max_waiting_sequences"), shares.of("max_requests")
                ),
            }
        )

    async def no_dynamic_config(self, request: Request) -> Response:
        """There are no dynamic flags; clients expect this status."""
        return JSONResponse({"detail": "not served"}, 404)

    async def telemetry(self, request: Request) -> Response:
        """Drops what clients report."""
        await self.discard(request, TELEMETRY_BYTES)
        return JSONResponse({"status": "accepted"})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        return JSONResponse(self.service.capabilities())

    async def finish_session(self, request: Request) -> Response:
        await self.discard(request)
        owner = owner_of(request)
        self.service.end_session(self.service.session(owner, request.path_params["session"]))
        return JSONResponse({})

    async def get_session(self, request: Request) -> Response:
        session = request.path_params["session"]
        return JSONResponse(self.service.get_session(owner_of(request), session))

    async def get_sampler(self, request: Request) -> Response:
        sampler = request.path_params["sampler"]
        return JSONResponse(self.service.get_sampler(owner_of(request), sampler))

    async def training_run(self, request: Request) -> Response:
        run = request.path_params["run"]
        return JSONResponse(self.service.training_run(owner_of(request), run))

    async def set_lifetime(self, request: Request) -> Response:
        body = await self.body(request, bodies.Lifetime)
        path = checkpoint_path(request)
        return JSONResponse(self.service.set_lifetime(owner_of(request), path, body))

    async def delete(self, request: Request) -> Response:
        self.service.delete(owner_of(request), checkpoint_path(request))
        return JSONResponse(None)

    async def links(self, request: Request) -> Response:
        path, base = checkpoint_path(request), str(request.base_url)
        return JSONResponse(self.service.links_of(owner_of(request), path, base))

    async def file(self, request: Request) -> Response:
        names = request.path_params
        return FileResponse(self.service.linked_file(names["secret"], names["name"]))

    async def not_served(self, request: Request) -> Response:
        """Answers every other path."""
        return JSONResponse({"detail": f"{shown(request.url.path)} is not served"}, 404)

    # -- the application ---------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Returns all routes."""
        service = self.service

        def post(path: str, handler: Handler) -> Route:
            return Route(f"{PREFIX}/{path}", self.checked(handler), methods=["POST"])

        def get(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(f"{PREFIX}/{path}", self.checked(handler), methods=[method])

        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        runs = self.listing(lambda _, owner, *page: service.training_runs(owner, *page))
        sessions = self.listing(lambda _, owner, *page: service.list_sessions(owner, *page))
        all_checkpoints = self.listing(
            lambda _, owner, *page: service.checkpoints(owner, "", *page)
        )
        checkpoints = self.listing(
            lambda request, owner, *page: service.checkpoints(
                owner, request.path_params["run"], *page
            )
        )

        def heartbeat(owner: str, body: bodies.SessionId) -> Answer:
            service.session(owner, body.session_id)
            return {"type": "session_heartbeat"}

        def save(owner: str, body: bodies.SaveWeights) -> Answer:
            return service.save_weights(owner, body, "weights")

        def save_external(owner: str, body: bodies.SaveWeights) -> Answer:
            return service.save_weights(owner, body, "external_weights")

        return [
            post("client/config", self.config),
            post("client/dynamic_config", self.no_dynamic_config),
            post("telemetry", self.telemetry),
            post("create_session", self.json_call(bodies.CreateSession, service.create_session)),
            post("session_heartbeat", self.json_call(bodies.SessionId, heartbeat)),
            post("sessions/{session}/finish", self.finish_session),
            get("sessions/{session}", self.get_session),
            get("sessions", sessions),
            post("create_model", self.json_call(bodies.CreateModel, service.create_model)),
            post("get_info", self.json_call(bodies.ModelId, service.get_info)),
            post("forward_backward", self.forward_backward),
            post("optim_step", self.json_call(bodies.OptimStep, service.optim_step)),
            post("save_weights", self.json_call(bodies.SaveWeights, save)),
            post("save_weights_external", self.json_call(bodies.SaveWeights, save_external)),
            post(
                "save_weights_for_sampler",
                self.json_call(bodies.SaveForSampler, service.save_for_sampler),
            ),
            post("load_weights", self.json_call(bodies.LoadWeights, service.load_weights)),
            post(
                "create_sampling_session",
                self.json_call(bodies.CreateSampler, service.create_sampler),
            ),
            get("samplers/{sampler}", self.get_sampler),
            post("asample", self.json_call(bodies.Sample, service.sample)),
            post("retrieve_future", self.retrieve_future),
            post("weights_info", self.json_call(bodies.TinkerPath, service.weights_info)),
            get("get_server_capabilities", self.capabilities),
            get("training_runs", runs),
            get("training_runs/{run}", self.training_run),
            get("training_runs/{run}/checkpoints", checkpoints),
            get("checkpoints", all_checkpoints),
            get(f"{checkpoint}/external_weights_urls", self.links),
            get(f"{checkpoint}/ttl", self.set_lifetime, "PUT"),
            get(checkpoint, self.delete, "DELETE"),
            # Without a key: probes, and links whose secret is the key.
            Route(f"{PREFIX}/healthz", self.answered(self.health)),
            Route(f"{PREFIX}/files/{{secret}}/{{name}}", self.answered(self.file)),
            Route("/{path:path}", self.not_served, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    def checked(self, handler: Handler) -> Handler:
        """Returns a handler that checks the key first."""

        async def handle(request: Request) -> Response:
            key = request.headers.get("x-api-key", "")
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if not key and scheme.lower() == "bearer":
                key = token.strip()
            owner = self.keys.owner_of(key)
            if owner is None:
                return JSONResponse({"detail": "the API key is missing or wrong"}, 401)
            request.state.owner = owner
            admit(request.scope)
            # uvicorn creates the loop, so the service learns it from the first request. No result
            # of the worker can come before that.
            self.service.loop = asyncio.get_running_loop()
            with self.service.requests.held(owner):
                return await handler(request)

        return self.answered(handle)

    def answered(self, handler: Handler) -> Handler:
        """Returns a handler that turns exceptions into answers."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except NotFoundError as error:
                return JSONResponse({"detail": str(error)}, 404)
            except TooBusyError as error:
                headers = {"X-Tinker-Sampling-Backpressure": "1", "Retry-After": "1"}
                # The SDK sends a sample again after a second. With the first header it treats the
                # status as backpressure.
                return JSONResponse({"detail": str(error)}, 429, headers)
            except BodyError as error:
                return JSONResponse({"detail": str(error)}, error.status)
            except HTTPException as error:
                return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            except ValidationError as error:
                return JSONResponse({"detail": validation_message(error)}, 422)
            except (UserError, wire.WireError) as error:
                return JSONResponse({"detail": str(error)}, 400)
            # The connection is gone. Without this the server would log a traceback.
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:
                terminal.write(traceback.format_exc(), sys.stderr)
                detail = f"the server failed ({type(error).__name__}): see its log"
                return JSONResponse({"detail": detail}, 500)

        return handle

    async def keep_house(self) -> None:
        """Runs the housekeeping until it is cancelled."""
        for second in itertools.count():
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            # An error, such as a full disk, must not end the housekeeping: sessions would stay.
            with printed_errors():
                self.service.keep_house()
            if second % SWEEP_EVERY == 0:
                with printed_errors():
                    # Deleting files may take seconds, and polls wait in this loop.
                    await asyncio.to_thread(self.service.store.sweep)


@contextlib.contextmanager
def printed_errors() -> Iterator[None]:
    """Prints the traceback of an error in the block, and continues after it."""
    try:
        yield
    except Exception:
        terminal.write(traceback.format_exc(), sys.stderr)


def make_rules(hosts: Hosts) -> Rules:
    """Returns what requests to the application must have."""
    return Rules(hosts, body_types=(JSON_TYPE, PROTOBUF), refusal=refuse_as_detail)


def make_app(api: Api) -> Starlette:
    """Returns the application."""
    return Starlette(routes=api.routes())


def owner_of(request: Request) -> str:
    """Returns the owner of the request's key."""
    owner = request.state.owner
    assert isinstance(owner, str)
    return owner


def checkpoint_path(request: Request) -> str:
    """Returns the address of the checkpoint in the URL."""
    names = request.path_params
    return f"tinker://{names['run']}/{names['kind']}/{names['name']}"


def query_number(request: Request, name: str, default: int) -> int:
    """Returns a number of the query. Raises BodyError if it is none."""
    text = request.query_params.get(name, str(default))
    # isdigit also accepts digits of other scripts and superscripts.
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BodyError(422, f"{name}={shown(text)} is not a number")
    return int(text)


def validation_message(error: ValidationError) -> str:
    """Returns the first mistake of a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(shown(str(part)) for part in first["loc"])
    return f"{place}: {' '.join(first['msg'].split())}"


def decompress(data: bytes, encoding: str, most: int) -> bytes:
    """Returns a body without its Content-Encoding. Raises BodyError if it is longer than `most`."""
    too_large = BodyError(413, f"the body has more than {most} bytes when it is decompressed")
    if encoding == "identity":
        return data
    if encoding == "gzip":
        stream = zlib.decompressobj(wbits=31)
        plain = bytearray()
        rest = data
        try:
            while rest and not stream.eof:
                # In parts: a single call would hold twice the bytes of a decompression bomb.
                plain += stream.decompress(rest, PLAIN_BYTES)
                rest = stream.unconsumed_tail
                if len(plain) > most:
                    raise too_large
            plain += stream.flush()
        except zlib.error:
            raise BodyError(400, "the body is not gzip") from None
        if len(plain) > most:
            raise too_large
        if not stream.eof:
            raise BodyError(400, "the body is truncated gzip")
        return bytes(plain)
    if encoding == "zstd":
        try:
            import zstandard  # of the extra tinker; clients send zstd only if the server asks
        except ImportError:
            raise BodyError(415, "zstd needs the package zstandard on the server") from None
        try:
            # The window is memory that a frame of a few bytes can ask for.
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
                plain = reader.read(most + 1)
        except zstandard.ZstdError:
            raise BodyError(400, "the body is not zstd") from None
        if len(plain) > most:
            raise too_large
        return plain
    raise BodyError(415, f"Content-Encoding {shown(encoding)} is not served: send gzip")
