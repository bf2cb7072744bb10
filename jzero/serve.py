"""`python -m jzero.serve --model DIR [--host HOST] [--port PORT] [--jetstream PORT] [--config.section.field=value ...]`

OpenAI's HTTP API over the decoder (extra `serve`): completions and chat. One thread decodes all requests together, new
ones from its next call on; another speaks HTTP. --jetstream: JetStream's gRPC instead, greedy (extra `jetstream`)."""

import asyncio
import itertools
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Generator
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import jax
import jinja2
import numpy as np
import uvicorn
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette import applications, exceptions, requests, responses, routing

from jzero import cli, config, evaluate
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import tokenizer
from jzero.rollout.engine import Engine, Placement
from jzero.rollout.prefill import prefill_shape
from jzero.rollout.sampler import make_seed
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import Sequence

LABELS = (
    "user",
    "metadata",
    "store",
)  # options that change nothing; these do not with this value, or the engine's:
SAME: dict[str, Any] = {
    "top_p": 1,
    "suffix": "",
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
}
SAME |= dict.fromkeys(
    ("top_k", "min_p", "frequency_penalty", "presence_penalty", "top_logprobs", "echo"), 0
)
Text = Annotated[str, Field(min_length=1)]


class Asked(BaseModel, strict=True, extra="allow"):
    model: str
    prompt: Text | list[Text] | list[int] | list[list[int]] = []
    messages: list[Annotated[dict[Literal["role", "content"], Text], Field(min_length=2)]] = []
    n: int = Field(1, ge=1, le=128)
    max_tokens: int = Field(0, ge=1)  # 0: 16, in a chat what fits
    max_completion_tokens: int = Field(0, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    stop: Text | list[Text] = []
    seed: int | None = None
    logprobs: bool | Literal[0, 1] = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}


async def refuse(_: requests.Request, error: Any) -> responses.JSONResponse:
    """Say what is wrong with a request."""
    status, message, where = (
        getattr(error, "status_code", 400),
        getattr(error, "detail", str(error)),
        None,
    )
    if isinstance(error, ValidationError):
        where, message = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
    said = {"message": message, "type": "invalid_request_error", "param": where, "code": None}
    return responses.JSONResponse({"error": said}, status)


class Server:
    def __init__(self, name: str, engine: Engine, tok: tokenizer.PreTrainedTokenizerFast):
        self.name, self.engine, self.tokenizer, self.text = (
            name,
            engine,
            tok,
            partial(tokenizer.decode, tok),
        )
        self.inbox: queue.SimpleQueue[tuple] = (
            queue.SimpleQueue()
        )  # sequences, whom to tell, whether as they grow
        self.live: dict[Sequence, tuple] = {}  # of the driver: the same
        self.numbers = itertools.count()

    def decode(self, params: Any, seed: Any) -> None:
        """In a thread of its own, whose end is that of the process."""
        try:
            for sequence in Scheduler(self.engine, params, self.text).run(
                [], 1, 1.0, seed, admit_more=self.more
            ):
                self.live.pop(sequence)[0](sequence)
        finally:
            signal.raise_signal(signal.SIGINT)

    def more(self) -> list[list[Sequence]]:
        """As `Scheduler.run` asks for groups; waits where there is nothing else to do."""
        for sequence, (tell, growing) in self.live.items():
            if growing:
                tell(sequence)
        new: list[list[Sequence]] = []
        while not self.live or not self.inbox.empty():
            sequences, *hears = self.inbox.get()
            self.live |= dict.fromkeys(sequences, hears)
            new += [[sequence] for sequence in sequences]
        return new

    def sequences(self, given: Asked, chat: bool) -> list[Sequence]:
        """One a choice. A seed names the noise; without one it is no other request's."""
        longest, out, several = self.engine.max_sequence_tokens, [], given.prompt
        for name, x in (given.model_extra or {}).items():
            if name not in LABELS and x not in (
                SAME.get(name),
                getattr(self.engine.settings, name, None),
            ):
                raise UserError(
                    f"{name}={x}: leave it out; filters are the server's, as --config.rollout.top_p"
                )
        if given.model != self.name:
            raise exceptions.HTTPException(
                404, f"there is no model {given.model}, only {self.name}"
            )
        if given.logprobs == 1 and given.temperature and not chat:
            raise UserError(
                "logprobs=1: the likeliest token is known with temperature=0 only; ask for logprobs=0"
            )
        if chat:
            messages = [{str(key): text for key, text in item.items()} for item in given.messages]
            several = tokenizer.render(self.tokenizer, messages)
        many = isinstance(several, list) and several and not isinstance(several[0], int)
        prompts: Any = several if many else [several]
        for i, prompt in enumerate(prompts):
            ids = tokenizer.encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
            number, room = next(self.numbers), longest - len(ids)
            new = (
                given.max_completion_tokens or given.max_tokens or (room if chat else min(16, room))
            )
            if (
                not 0 < new <= room
                or not ids
                or not 0 <= min(ids) <= max(ids) < self.engine.model.vocab_size
            ):
                sizes = f"has {len(ids)} tokens and {new} to follow, of {longest} in all (--config.rollout.max_episode_tokens)"
                raise UserError(
                    f"prompt {i} {sizes}: it needs one of the vocabulary at least, and one to follow"
                )
            for j in range(i * given.n, (i + 1) * given.n):
                seeded = 2**30 + zlib.crc32(f"{given.seed}/{j}".encode()) % 2**30
                noise = (number * 128 + j % given.n) % 2**30 if given.seed is None else seeded
                stop = [given.stop] if isinstance(given.stop, str) else given.stop
                sizes = np.array(ids, np.int32), len(ids) + new
                out.append(
                    Sequence(
                        number, j, noise, *sizes, temperature=given.temperature, stop_strings=stop
                    )
                )
        return out

    async def answer(self, http: requests.Request) -> responses.Response:
        fields = TypeAdapter(dict[str, Any]).validate_json(await http.body())
        given = Asked.model_validate({name: x for name, x in fields.items() if x is not None})
        chat, loop, heard = "chat" in http.url.path, asyncio.get_running_loop(), asyncio.Queue()
        sequences = self.sequences(given, chat)
        tell = lambda s: loop.call_soon_threadsafe(
            heard.put_nowait, (s.sample_index, len(s.tokens), s.finish_reason)
        )
        self.inbox.put((sequences, tell, given.stream))
        kind = "text/event-stream" if given.stream else "application/json"
        return responses.StreamingResponse(
            self.reply(given, chat, sequences, heard), media_type=kind
        )

    async def reply(
        self, given: Asked, chat: bool, sequences: list[Sequence], heard: Any
    ) -> AsyncIterator[str]:
        kind = "chat.completion" + ".chunk" * given.stream if chat else "text_completion"
        head = {
            "id": f"{kind}-{time.time_ns()}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }
        event = lambda **said: f"data: {json.dumps(head | said)}\n\n"
        choices = [self.choice(given, chat, sequence) for sequence in sequences]
        said, left = list(map(next, choices)), len(choices)
        try:
            while left:
                index, *now = await heard.get()
                said[index], left = choices[index].send(now), left - bool(now[1])
                if given.stream and said[index]:
                    yield event(choices=[said[index]])
        finally:
            for sequence in sequences:  # of a client that left: it ends with its next token
                sequence.length_limit = 0
        prompt = sum(len(sequence.prompt_tokens) for sequence in sequences[:: given.n])
        new = sum(len(sequence.tokens) for sequence in sequences)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        last = event(choices=[], usage=usage) if given.stream_options.get("include_usage") else ""
        yield (
            f"{last}data: [DONE]\n\n"
            if given.stream
            else json.dumps(head | {"choices": said, "usage": usage})
        )

    def choice(self, given: Asked, chat: bool, sequence: Sequence) -> Generator[Any, Any, None]:
        """Sent (tokens, finish) gives what a client lacks: no half character, nor what may become a stop string."""
        said, read, text, sent = None, 0, "", 0
        held = max(map(len, (*sequence.stop_strings, *self.engine.settings.stop)), default=1) - 1
        piece = lambda token: self.tokenizer.backend_tokenizer.decode(
            [token], skip_special_tokens=False
        )
        while True:
            count, finish = yield said
            ids, new = sequence.tokens[read:count], self.text(sequence.tokens[read:count])
            if said := (finish or (new and not new.endswith("\ufffd"))) or None:
                at, logps, text = len(text), sequence.logps[read:count], text + new
                sure = sequence.turn_text if finish else text[: max(sent, len(text) - held)]
                new, role = sure[sent:], {"role": "assistant"} if not read else {}
                said = {
                    "index": sequence.sample_index,
                    "finish_reason": finish or None,
                    "logprobs": None,
                }
                if given.logprobs is not False and chat:
                    row = lambda s, x: {"token": s, "logprob": x, "bytes": None, "top_logprobs": []}
                    said["logprobs"] = {
                        "content": list(map(row, map(piece, ids), logps)),
                        "refusal": None,
                    }
                elif given.logprobs is not False:
                    tokens = list(map(piece, ids))
                    best = [{token: logp} for token, logp in zip(tokens, logps, strict=True)]
                    at = list(itertools.accumulate(map(len, tokens[:-1]), initial=at))
                    said["logprobs"] = dict(
                        tokens=tokens, token_logprobs=logps, text_offset=at, top_logprobs=best
                    )
                body = role | {"content": new}
                said |= (
                    {"text": new}
                    if not chat
                    else {"delta": body}
                    if given.stream
                    else {"message": body}
                )
                read, sent = count, len(sure)


def jetstream(port: int, server: Server, params: Any, seed: Any) -> None:
    """Its orchestrator takes a token a call, puts an end of text before a prompt, and frees no slot."""
    from jetstream.core import config_lib, server_lib
    from jetstream.engine import engine_api

    jax.__dict__["tree_map"] = jax.tree.map  # as JetStream calls it
    logging.getLogger().setLevel(logging.WARNING)
    engine, lock, end = server.engine, threading.Lock(), server.engine.stop_ids[0]
    steps = np.zeros(
        (2, engine.max_concurrent_decodes), np.int32
    )  # calls since a slot was filled, and at most

    def prefill(*, params, padded_tokens, true_length):
        tokens = padded_tokens[:true_length][true_length > 1 :][1 - engine.max_sequence_tokens :]
        padded, size = (
            np.pad(tokens, (0, prefill_shape(engine, len(tokens))[0] - len(tokens))),
            len(tokens),
        )
        with lock:
            prefix = engine.prefill(
                params=params, padded_tokens=padded, true_length=size, temperature=0.0, seed=seed
            )
        return prefix, size

    def insert(prefix, decode_state, slot: int):
        with lock:
            if slot in engine.placements:
                engine.free_resource(slot)
            steps[:, slot] = 0, engine.max_sequence_tokens - prefix[1]
            placement = Placement(
                slot,
                0,
                0,
                prefix[1],
                engine.max_sequence_tokens,
                request=0,
                group=slot,
                shared_tokens=0,
            )
            return engine.insert(prefix[0], decode_state, placement, 0.0)

    def generate(params, decode_state):
        """Gives the tokens that the last call, or the prefill, made."""
        with lock:
            steps[0] += 1
            columns = decode_state.tokens, steps[0] <= steps[1], steps[0].copy()
            said = engine_api.ResultTokens(
                jax.numpy.stack(columns, axis=1), (0, 1), (1, 2), (2, 3), 1
            )
            return engine.generate(params, decode_state, seed)[0], said

    encode = lambda text, **_: (
        np.array([end, *(ids := tokenizer.encode(server.tokenizer, text))]),
        1 + len(ids),
    )
    text = SimpleNamespace(
        encode=encode, decode=server.text, stop_tokens={*engine.stop_ids}, bos_id=end, pad_id=0
    )
    made: Any = SimpleNamespace(
        prefill=prefill, insert=insert, generate=generate, load_params=lambda: params
    )
    made.init_decode_state, made.get_tokenizer, made.build_tokenizer = (
        engine.init_decode_state,
        str,
        lambda _: text,
    )
    made.samples_per_slot, made.max_concurrent_decodes = 1, engine.max_concurrent_decodes
    made.max_prefill_length = 1 << min(
        15, engine.max_sequence_tokens.bit_length() - 1
    )  # of the lengths that it pads to
    own: Any = {
        "interleaved_slices": ("all=1",),
        "interleaved_engine_create_fns": (lambda _: made,),
    }
    _server = server_lib.run(
        port, config_lib.ServerConfig(**own), [None], jax_padding=False
    )  # lives while it is held
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))  # its threads would go on
    threading.Event().wait()


def main() -> None:
    parser = cli.make_parser("jzero.serve", __doc__)
    parser.add_argument(
        "--model", required=True, help="directory or hub id of a model, as a run exports it"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--jetstream",
        type=int,
        metavar="PORT",
        help="serve gRPC there, on every interface; no HTTP",
    )
    with cli.user_errors():
        given, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
        defaults = evaluate.defaults()
        defaults.rollout.decode_steps, defaults.rollout.keep_stop = (
            8,
            False,
        )  # tokens of a stream come so many at a time
        settings = cli.parse_settings(defaults, rest)
        if given.jetstream:
            settings.rollout.decode_steps, settings.rollout.num_pages = (
                1,
                0,
            )  # it knows no preemption
        settings.model.path = given.model
        config.validate(settings)
        sampler, params = evaluate.load(settings, Pool(0))
        server = Server(given.model, sampler.engine, sampler.tokenizer)
        seed = make_seed(sampler.engine, (settings.train.seed, 0))
    if given.jetstream:
        jetstream(given.jetstream, server, params, seed)
    errors = (ValueError, exceptions.HTTPException, jinja2.TemplateError)
    model = {"id": given.model, "object": "model", "created": int(time.time()), "owned_by": "jzero"}
    models = lambda _: responses.JSONResponse({"object": "list", "data": [model]})
    asked = ("/v1/completions", "/v1/chat/completions")
    routes = [routing.Route(path, server.answer, methods=["POST"]) for path in asked]
    routes += [routing.Route(path, models) for path in ("/v1/models", "/health")]
    app = applications.Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, refuse))
    thread = threading.Thread(target=server.decode, args=(params, seed), daemon=True)
    thread.start()
    print(f"{given.model} on http://{given.host}:{given.port}/v1 until Ctrl-C", flush=True)
    uvicorn.run(
        app, host=given.host, port=given.port, log_level="warning", timeout_graceful_shutdown=1
    )
    os._exit(not thread.is_alive())  # it may be inside a call


if __name__ == "__main__":
    main()
