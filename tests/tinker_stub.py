"""A Tinker server whose devices compute nothing: all else is real, from HTTP to the store.

    with stub_server(tmp_path, keys) as stub:
        client = Client(stub.url, "tml-ann")

It starts in a moment, compiles nothing, and answers hundreds of calls a second.
"""

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tinker_client import NAME, serving

from jzero.decoder.inbox import Inbox
from jzero.errors import UserError
from jzero.model import peft, qwen
from jzero.tinker import wire
from jzero.tinker.datums import FwdBwd
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.sampling import BASE, GONE, Request, Sampling
from jzero.tinker.service import Served, Service
from jzero.tinker.sessions import Keys
from jzero.tinker.store import Record, Store
from jzero.tinker.tenants import Checkpoint, FwdBwdResult, Shape, Tenants
from jzero.tinker.worker import Worker
from jzero.training.optimizer import AdamW

MODEL = qwen.QwenConfig("qwen2", 272, 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
CONTEXT = 128


@dataclass(eq=False)
class StubTenants:
    """Models by id. A checkpoint is a file with the id."""

    most: int = 4
    longest: int = CONTEXT
    max_rank: int = 64
    base_hash: str = "hash"
    base: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(model=MODEL))
    by_id: set[str] = field(default_factory=set)
    shape_of = Tenants.shape_of
    write_error: Exception | None = None  # raised by `write`, such as a full disk

    def write(self, checkpoint: Checkpoint, directory: Path, base_name: str) -> None:
        (directory / peft.WEIGHTS).write_bytes(b"adapter")
        if self.write_error is not None:
            raise self.write_error
        (directory / peft.CONFIG).write_text("{}")

    def read(self, record: Record, directory: Path, has_optimizer: bool) -> Checkpoint:
        shape, params = self.read_adapter(record, directory)
        return Checkpoint(shape, record.seed, record.step, params, None)

    def read_adapter(self, record: Record, directory: Path) -> tuple[Shape, dict]:
        assert (directory / peft.WEIGHTS).read_bytes() == b"adapter"
        return Shape(record.rank, record.targets), {}


class StubSampling(Inbox):
    """Requests that wait, and snapshots without weights."""

    def __init__(self) -> None:
        engine = SimpleNamespace(
            max_sequence_tokens=CONTEXT,
            model=MODEL,
            max_concurrent_decodes=16,
            scoring_rows=1,
            num_shards=1,
        )
        super().__init__(engine, sys.maxsize)  # type: ignore[arg-type]
        self.snapshots = SimpleNamespace(readers={}, bank=None)
        self.taken: set[str] = set()
        self.seconds = 0.0  # of a call

    check = Sampling.check


class StubDevices:
    """The calls of `devices.Devices`."""

    def __init__(self) -> None:
        self.tenants = StubTenants()
        self.sampling = StubSampling()

    def create(self, model_id: str, shape: Shape, seed: int) -> None:
        if len(self.tenants.by_id) >= self.tenants.most:
            raise UserError(f"{self.tenants.most} adapters are trained already: --adapters")
        self.tenants.by_id.add(model_id)

    def forward_backward(self, call: FwdBwd) -> FwdBwdResult:
        shapes = [(len(one.tokens), *one.targets.shape[1:][: one.is_matrix]) for one in call.data]
        return FwdBwdResult([np.zeros(shape, np.float32) for shape in shapes], 0.0)

    def optim_step(self, model_id: str, settings: AdamW) -> dict[str, float]:
        return {"grad_norm:mean": float(np.float32(settings.learning_rate))}

    def fetch(self, model_id: str, has_optimizer: bool) -> SimpleNamespace:
        return SimpleNamespace(step=1)

    def load(self, model_id: str, checkpoint: Checkpoint) -> None:
        self.create(model_id, checkpoint.shape, checkpoint.seed)

    def take_snapshot(self, key: str, model_id: str) -> None:
        self.sampling.taken.add(key)

    def evict_snapshot(self, key: str) -> None:
        self.sampling.taken.discard(key)

    def end_session(self, session_id: str, models: list[str], samplers: list[str]) -> None:
        self.tenants.by_id -= set(models)
        self.sampling.taken -= set(samplers)

    def queue(self, request: Request) -> None:
        self.sampling.waiting.append(request)

    def sample(self, between_calls: Callable[[], None]) -> None:
        time.sleep(self.sampling.seconds)
        between_calls()
        requests, self.sampling.waiting = self.sampling.waiting, deque()
        for request in requests:
            snapshots = self.sampling.snapshots
            known = {BASE, *self.sampling.taken, *snapshots.readers}
            if request.snapshot not in known:
                request.done(UserError(GONE))
                continue
            # As in a program: int32 and float32 of all live requests.
            np.array([request.top_k, *request.stop_ids, *request.noise]).astype(np.int32)
            one: wire.Message = {
                "tokens": np.zeros(1, "<i4").tobytes(),
                "logprobs": np.zeros(1, "<f4").tobytes(),
            }
            samples: list[wire.Value] = [one] * request.num_samples
            request.done(wire.encode("SampleResponse", {"sequences": samples}))

    def end(self) -> None:
        pass


@dataclass
class Stub:
    """A running server."""

    url: str
    service: Service
    devices: StubDevices


@contextlib.contextmanager
def stub_server(store: Path, keys: dict[str, str], **limits: float) -> Iterator[Stub]:
    """Serves in threads of this process. keys: key -> name; limits: of TinkerLimits."""
    devices = StubDevices()
    service = Service(
        Served(NAME, "qwen2", (256,)),
        devices,  # type: ignore[arg-type]
        Worker(devices),  # type: ignore[arg-type]
        Store(store),
        TinkerLimits(**limits),  # type: ignore[arg-type]
    )
    try:
        with serving(service, Keys(keys)) as url:
            yield Stub(url, service, devices)
    finally:
        service.worker.stop()


def one_line(text: str) -> str:
    """Returns the reason of a refusal. Asserts that the answer is JSON with one line."""
    detail = json.loads(text)["detail"]
    assert isinstance(detail, str) and detail.isprintable() and len(detail) < 1000, detail
    return detail
