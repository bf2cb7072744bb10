"""A tiny model for tests of the server, the same model without a server, and the server as a
process or as a thread of this process."""

import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import jax
import numpy as np
import reference
from runs import started
from starlette.types import ASGIApp
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero import cli
from jzero.commands import evaluate
from jzero.decoder.driver import make_seed
from jzero.decoder.engine import Engine
from jzero.decoder.inbox import REQUESTS
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Sequence
from jzero.model import huggingface, qwen, tokenizer
from jzero.servers import sockets
from jzero.servers.connections import BoundedConfig
from jzero.servers.rules import make_hosts
from jzero.serving.ending import GracefulServer
from jzero.serving.http import Server, make_app, make_rules
from jzero.serving.limits import Limits
from jzero.serving.requests import RequestReader
from jzero.serving.worker import DecodingWorker
from jzero.workers.pool import Pool

ROOT = Path(__file__).resolve().parents[1]
ROOM = 96  # tokens of a prompt and its answer
NUM_SLOTS = 16
SETTINGS = [
    "--config.model.dtype=float32",
    "--config.rollout.max_prompt_tokens=32",
    "--config.rollout.max_new_tokens=64",
    f"--config.rollout.num_slots={NUM_SLOTS}",
    "--config.rollout.page_size=32",
    "--config.rollout.decode_steps=4",
    "--config.rollout.kv_dtype=float32",
]
TEMPLATE = """{% for message in messages %}\
{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}\
<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@cache
def byte_tokenizer() -> Qwen2Tokenizer:
    """Every byte is a token, so that incomplete characters are common."""
    special = ["<|endoftext|>", "<|pad|>", *(f"<|{i}|>" for i in range(14))]
    pieces = [*bytes_to_unicode().values(), *special]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tok = Qwen2Tokenizer(ids, [], eos_token="<|endoftext|>")
    tok.add_special_tokens({"pad_token": AddedToken("<|pad|>")})
    tok.chat_template = TEMPLATE
    return tok


def byte_level_tokenizer(
    special: list[str], pad: str | None = None, eos: str | None = None
) -> PreTrainedTokenizerFast:
    """Every byte is a token; `special` has the control tokens. For models of any family."""
    pieces = bytes_to_unicode().values()
    inner = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevelDecoder()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, eos_token=eos)


def save_model(path: Path) -> str:
    """Writes a tiny model with random weights. Returns its directory."""
    tok = byte_tokenizer()
    arch = qwen.QwenConfig("qwen2", len(tok), 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
    huggingface.save(path, arch, reference.random_params(arch), dtype="float32", hf_config_extra={})
    tok.save_pretrained(path)
    return str(path)


@dataclass
class Alone:
    """The same model in this process, where the scheduler is called without a server."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    params: qwen.Params
    key: tuple[int, int] = (0, 0)  # of the noise

    @functools.cached_property
    def seed(self) -> jax.Array:
        """The key as an array, which a scheduler takes."""
        return make_seed(self.engine, self.key)

    def new_scheduler(self) -> Scheduler:
        """Returns a scheduler as the server's, whose calls may be short."""
        return Scheduler(
            self.engine, self.params, lambda ids: tokenizer.decode(self.tokenizer, ids), REQUESTS
        )

    def complete_all(self, prompts: list[str], limits: list[int]) -> list[Sequence]:
        """Decodes prompts greedily, each up to `limits` new tokens."""
        sequences = []
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            ids = np.array(tokenizer.encode(self.tokenizer, prompt), np.int32)
            sequences.append(Sequence(i, 0, i, ids, len(ids) + limit))
        groups = [[sequence] for sequence in sequences]
        list(self.new_scheduler().run(groups, 1, 0.0, self.seed))
        return sequences

    def complete(self, prompt: str, limit: int) -> Sequence:
        return self.complete_all([prompt], [limit])[0]

    def new_reader(self, limits: Limits) -> RequestReader:
        return RequestReader(
            "m",
            self.engine,
            self.tokenizer,
            limits.max_request_sequences,
            limits.max_request_logprobs,
        )

    def new_worker(self, limits: Limits) -> DecodingWorker:
        return DecodingWorker(self.engine, self.tokenizer, limits.max_waiting_sequences)

    def new_server(self, limits: Limits) -> Server:
        """Returns the parts that answer requests; nothing is decoded before a thread does it."""
        return Server(self.new_reader(limits), self.new_worker(limits), limits)


def load_alone(model: str) -> Alone:
    """Loads the model of a directory."""
    values = cli.parse_settings(evaluate.defaults(), SETTINGS)
    values.model.path = model
    sampler, params = evaluate.load(values, Pool(0))
    return Alone(sampler.engine, sampler.tokenizer, params)


# -- the server as a process ----------------------------------------------------------------------


def free_port() -> int:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def server_process(
    model: str, environment: dict[str, str], *arguments: str
) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "jzero.serve", "--model", model, *SETTINGS, *arguments]
    with started(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        yield server


def wait_until_healthy(server: subprocess.Popen, address: str) -> None:
    """Waits until a server answers, or has ended."""
    while server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"{address}/health").raise_for_status()
            break
        time.sleep(0.1)


# -- the server as a thread -----------------------------------------------------------------------


@dataclass
class Threaded:
    """A server of this process, on a port of its own."""

    uvicorn: GracefulServer
    thread: threading.Thread
    address: tuple[str, int]

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"

    def connect(self, sent: bytes = b"") -> socket.socket:
        """Opens a connection, and sends the beginning of a request."""
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(sent)
        return connection

    def is_healthy(self) -> bool:
        with httpx.Client(timeout=60) as client:
            return client.get(f"{self.url}/health").status_code == 200


@contextlib.contextmanager
def threaded_server(
    server: Server, limits: Limits, key: str | None = None, app: ASGIApp | None = None
) -> Iterator[Threaded]:
    """Runs a server in a thread. `app` takes the place of the API of `server`."""
    bound = sockets.bind("127.0.0.1", 0)
    sockets.listen("127.0.0.1", 0, bound)
    is_listening = threading.Event()
    configuration = BoundedConfig(
        app or make_app(server, key), limits, make_rules(make_hosts("127.0.0.1"))
    )
    uvicorn_server = GracefulServer(configuration, server, is_listening.set)
    thread = threading.Thread(target=uvicorn_server.run, args=(bound,), daemon=True)
    thread.start()
    assert is_listening.wait(60)
    try:
        yield Threaded(uvicorn_server, thread, bound[0].getsockname()[:2])
    finally:
        uvicorn_server.should_exit = True
        uvicorn_server.force_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def decoding_server(alone: "Alone", limits: Limits) -> Iterator[Threaded]:
    """Runs a server whose decoding thread answers requests for the model "m"."""
    server = alone.new_server(limits)
    decoding = threading.Thread(
        target=server.worker.serve, args=(alone.params, alone.key), daemon=True
    )
    decoding.start()
    with threaded_server(server, limits) as served:
        yield served


def read_all(connection: socket.socket) -> bytes:
    """Returns what a connection receives until the server closes it."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def read_until(connection: socket.socket, end: bytes) -> None:
    """Reads an answer that ends with `end`, and leaves the connection open."""
    received = b""
    while not received.endswith(end):
        part = connection.recv(1 << 16)
        assert part, received
        received += part


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Waits until `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition has not become true"
        time.sleep(0.01)
