"""A server on a tiny model, and a client that speaks the wire without the SDK."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
from runs import started

from jzero.servers import sockets
from jzero.tinker import __main__ as command
from jzero.tinker import wire
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.service import Service
from jzero.tinker.sessions import Keys

NAME = "Qwen/Qwen3-8B-Base"  # a name that clients know, of whatever model
CONTEXT = 128
SETTINGS = [
    "--exact",
    f"--context={CONTEXT}",
    "--config.model.dtype=float32",
    "--config.model.remat=none",
    "--config.rollout.kv_dtype=float32",
    "--config.rollout.num_slots=16",
    "--config.rollout.page_size=64",
    "--config.train.microbatch_tokens=256",
    "--config.mesh.fsdp=1",
    "--config.mesh.data=-1",  # exact: whole weights on every device
]
LIMITS = TinkerLimits(
    max_body_bytes=200_000,
    max_datums=64,
    max_targets=4,
    # Of two keys: each has half of it.
    max_waiting_sequences=128,
    max_samples=8,
    max_snapshots=12,
    resident_snapshots=2,
    poll_seconds=20,
    hole_seconds=2,
    session_seconds=3600,  # clients of the tests send no heartbeats, and a slow machine compiles
)
OWNERS = {"tml-ann": "ann", "tml-bob": "bob"}


def load_service(model: str, store: Path, limits: TinkerLimits = LIMITS) -> Service:
    """Loads the model of a directory into a service that does not run yet."""
    options, settings = command.parse([f"--model={model}", *SETTINGS])
    parsed = command.Options(
        name=NAME, store=store, adapters=6, resident=1, max_rank=16, limits=limits
    )
    assert options.exact
    return command.make_service(settings, parsed)


@contextlib.contextmanager
def serving(service: Service, keys: Keys) -> Iterator[str]:
    """Serves a service in threads. Yields its address."""
    bound = sockets.bind("127.0.0.1", 0)
    sockets.listen("127.0.0.1", 0, bound)
    is_listening = threading.Event()
    server = command.make_server(service, keys, is_listening.set)
    thread = threading.Thread(target=server.run, args=(bound,), daemon=True)
    thread.start()
    if not service.worker.thread.is_alive():
        service.worker.thread.start()
    assert is_listening.wait(60)
    try:
        yield sockets.url(bound[0])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def process(
    model: str,
    store: Path,
    *flags: str,
    devices: int = 1,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[tuple[subprocess.Popen, str]]:
    """Runs the server as a process, with further flags. Yields it and its address."""
    arguments = [f"--model={model}", f"--name={NAME}", f"--store={store}", "--port=0"]
    arguments += [*SETTINGS, *flags]
    with started(
        [sys.executable, "-m", "jzero.tinker", *arguments],
        cwd=Path(__file__).parents[1],
        env={**environment, "JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "TINKER_BASE_URL=" in line:
                break
        assert "TINKER_BASE_URL=" in lines[-1], lines
        yield server, lines[-1].partition("TINKER_BASE_URL=")[2].split()[0]


@dataclass
class Client:
    """A client with a session and a model."""

    url: str
    key: str = "tml-ann"
    http: httpx.Client = field(init=False)
    session: str = ""
    model: str = ""
    seq_id: int = 0
    samplers: int = 0

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"X-API-Key": self.key},
            timeout=120,
            # No connection outlives its request, so that no test has to close its clients.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    # -- calls -------------------------------------------------------------------------------------

    def post(self, path: str, /, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def result(self, promise: httpx.Response) -> httpx.Response:
        """Polls until there is a result."""
        assert promise.status_code == 200, promise.text
        while True:
            answer = self.post("retrieve_future", request_id=promise.json()["request_id"])
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer

    def done(self, promise: httpx.Response) -> dict:
        """Returns a JSON result that is no error."""
        answer = self.result(promise).json()
        assert "error" not in answer, answer
        return answer

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def command(self, path: str, /, **body: object) -> httpx.Response:
        """Sends the next numbered command of the model, and returns the promise."""
        return self.post(path, model_id=self.model, seq_id=self.next(), **body)

    # -- training ----------------------------------------------------------------------------------

    def begin(self, number: int = 0, rank: int = 4, seed: int = 1, **lora: object) -> "Client":
        """Opens a session if there is none, and creates a model."""
        if not self.session:
            self.session = self.post("create_session", sdk_version="0").json()["session_id"]
        promise = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=NAME,
            lora_config={"rank": rank, "seed": seed, **lora},
        )
        self.model = self.done(promise)["model_id"]
        self.seq_id = 0
        return self

    def send(self, data: list[wire.Message], **fields: wire.Value) -> httpx.Response:
        """Sends forward_backward, and returns the promise."""
        message: wire.Message = {
            "model_id": self.model,
            "seq_id": fields.pop("seq_id", None) or self.next(),
            "data": [*data],
            "loss_fn": "cross_entropy",
            **fields,
        }
        return self.http.post(
            "forward_backward",
            content=wire.encode("ForwardBackwardRequest", message),
            headers={"Content-Type": "application/x-protobuf"},
        )

    def forward(self, data: list[wire.Message], **fields: wire.Value) -> list[np.ndarray]:
        """Returns the log-probs of each datum, without a gradient."""
        return logprobs_of(self.result(self.send(data, forward_only=True, **fields)))

    def train(self, data: list[wire.Message], **fields: wire.Value) -> list[np.ndarray]:
        """Makes a step, with both commands sent before the first result."""
        promise = self.send(data, **fields)
        step = self.step()
        logps = logprobs_of(self.result(promise))
        self.done(step)
        return logps

    def step(self, learning_rate: float = 1e-2, seq_id: int = 0) -> httpx.Response:
        adam = {"learning_rate": learning_rate}
        number = seq_id or self.next()
        return self.post("optim_step", model_id=self.model, seq_id=number, adam_params=adam)

    # -- sampling ----------------------------------------------------------------------------------

    def snapshot(self) -> str:
        """Returns a sampling session of the weights of now."""
        self.samplers += 1
        promise = self.command("save_weights_for_sampler", sampling_session_seq_id=self.samplers)
        return self.done(promise)["sampling_session_id"]

    def sampler(self, **of: object) -> str:
        """Returns a sampling session of a path or of the base model."""
        self.samplers += 1
        answer = self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=self.samplers,
            **of,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["sampling_session_id"]

    def ask(
        self, sampler: str, prompt: list[int], seq_id: int, num_samples: int = 1, **more: object
    ) -> httpx.Response:
        """Sends asample, and returns the promise."""
        own = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
        params = {"max_tokens": 8, "seed": 5, **{k: more.pop(k) for k in own if k in more}}
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            sampling_params=params,
            **more,
        )

    def sample(self, sampler: str, prompt: list[int], **more: object) -> "Sampled":
        self.samples = getattr(self, "samples", 0) + 1
        return sampled_of(self.result(self.ask(sampler, prompt, self.samples, **more)))


@dataclass
class Sampled:
    """A decoded SampleResponse."""

    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    stops: list[int]
    message: wire.Message


def sampled_of(answer: httpx.Response) -> Sampled:
    assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    message = wire.decode("SampleResponse", answer.content)
    sequences = message["sequences"]
    return Sampled(
        tokens=[wire.integers("tokens", one.get("tokens")).tolist() for one in sequences],
        logprobs=[np.frombuffer(one["logprobs"], "<f4") for one in sequences],
        stops=[one.get("stop_reason", 0) for one in sequences],
        message=message,
    )


def logprobs_of(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    message = wire.decode("ForwardBackwardOutput", answer.content)
    arrays = []
    for record in message["loss_fn_outputs"]:
        batched = record["fields"]["logprobs"]
        offsets = np.frombuffer(batched["offsets"], "<i8")
        trailing = batched.get("trailing_shape", [])
        for start, end in pairwise(offsets):
            arrays.append(np.frombuffer(batched["data"][start:end], "<f4").reshape(-1, *trailing))
    return arrays


def loss_of(answer: httpx.Response) -> float:
    return wire.decode("ForwardBackwardOutput", answer.content)["metrics"]["loss:sum"]
