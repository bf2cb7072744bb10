"""Every field of every body of the Tinker API with hostile values, on a server without a model.

    pytest tests/attacks/test_tinker_values.py [--thorough]    # some hundreds; all of them

No answer is a 5xx, every refusal is one line, and the lists of the key and of others still work.
"""

import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import hostile_values
import httpx
import numpy as np
import pytest
from tinker_client import NAME, OWNERS, Client
from tinker_stub import Stub, one_line, stub_server

from benchmarks.tinker.scripted_loop import datum, tensor
from jzero.tinker import wire

SESSION = "00000000-0000-0000-0000-000000000000"
RUN = f"{SESSION}:train:0"
TARGETS = {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [4, 1]}
CSR = {
    "data": [1],
    "dtype": "int64",
    "shape": [4, 2],
    "sparse_crow_indices": [0, 0, 0, 0, 1],
    "sparse_col_indices": [1],
}
# Valid bodies with every field. Ids in capitals are those of the client.
BODIES: dict[str, list[dict]] = {
    "create_session": [{"tags": ["a"], "user_metadata": {"a": [1, "b"]}, "sdk_version": "1"}],
    "session_heartbeat": [{"session_id": "SESSION"}],
    "create_model": [
        {
            "session_id": "SESSION",
            "model_seq_id": 1,
            "base_model": NAME,
            "lora_config": {
                "rank": 4,
                "seed": 3,
                "train_unembed": True,
                "train_mlp": True,
                "train_attn": True,
            },
            "optimizer_config": {"type": "adamw"},
            "user_metadata": {"a": 1},
        }
    ],
    "get_info": [{"model_id": "MODEL"}],
    "optim_step": [
        {
            "model_id": "MODEL",
            "seq_id": 1,
            "adam_params": {
                "learning_rate": 1e-4,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-12,
                "weight_decay": 0.0,
                "grad_clip_norm": 1.0,
            },
            "optimizer_params": {"a": 1},
        }
    ],
    "save_weights": [
        {
            "model_id": "MODEL",
            "seq_id": 1,
            "path": "a",
            "ttl_seconds": 100,
            "overwrite": True,
            "user_metadata": {"a": 1},
        }
    ],
    "save_weights_for_sampler": [
        {"model_id": "MODEL", "seq_id": 1, "path": "b", "ttl_seconds": 100},
        {"model_id": "MODEL", "seq_id": 1, "sampling_session_seq_id": 7},
    ],
    "load_weights": [
        {"path": "PATH", "optimizer": False, "model_id": "MODEL", "seq_id": 1},
        {"path": "PATH", "session_id": "SESSION", "model_seq_id": 2, "user_metadata": {"a": 1}},
    ],
    "create_sampling_session": [
        {"session_id": "SESSION", "sampling_session_seq_id": 8, "base_model": NAME},
        {"session_id": "SESSION", "sampling_session_seq_id": 9, "model_path": "PATH"},
    ],
    "asample": [
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4, 5]}]},
            "sampling_params": {
                "max_tokens": 4,
                "seed": 1,
                "stop": stop,
                "temperature": 1.0,
                "top_k": 3,
                "top_p": 0.9,
            },
            "num_samples": 2,
            "sampling_session_id": "SAMPLER",
            "seq_id": 1,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 1,
            "target_prompt_logprobs": targets,
            "prompt_alt_tokens_k": 1,
            "prompt_logprobs_last_n": 2,
        }
        for stop, targets in (([1], TARGETS), (["a"], CSR))
    ],
    "retrieve_future": [{"request_id": "none"}],
    "weights_info": [{"tinker_path": "PATH"}],
}
SHORT = 500  # mutations without --thorough


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    limits = {"max_waiting_sequences": 1000, "max_snapshots": 16, "poll_seconds": 5}
    with stub_server(tmp_path / "store", OWNERS, hole_seconds=0.5, **limits) as running:
        yield running


@pytest.fixture
def ann(stub: Stub) -> Client:
    return Client(stub.url, "tml-ann").begin()


class Bob:
    """A client whose ids replace the capitals of bodies."""

    def __init__(self, url: str) -> None:
        self.client = Client(url, "tml-bob").begin()
        saved = self.client.command("save_weights", path="p")
        self.ids = {
            "PATH": self.client.done(saved)["path"],
            "SESSION": self.client.session,
            "MODEL": self.client.model,
            "SAMPLER": self.client.sampler(base_model=NAME),
        }
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-bob"}, timeout=60
        )
        self.number = 0

    def named(self, body: object) -> object:
        """Returns a body with the client's ids, and a seq_id that is new."""
        if isinstance(body, dict):
            return {key: self.named(value) for key, value in body.items()}
        return self.ids.get(body, body) if isinstance(body, str) else body

    def send(self, call: str, body: object) -> httpx.Response:
        text = hostile_values.to_json(body)
        return self.http.post(call, content=text, headers={"Content-Type": "application/json"})

    def poll(self, answer: httpx.Response) -> httpx.Response | None:
        """Returns the result of a promise, if the answer has one."""
        body = answer.json()
        if answer.status_code != 200 or not isinstance(body, dict) or "request_id" not in body:
            return None
        return self.http.post("retrieve_future", json={"request_id": body["request_id"]})

    def end(self) -> None:
        self.http.post(f"sessions/{self.client.session}/finish", json={})
        self.http.close()

    def check_lists(self) -> None:
        """Asserts that every list and page of the key answers."""
        session, model = self.client.session, self.client.model
        pages = ("sessions", "training_runs", "checkpoints", f"sessions/{session}")
        for page in (*pages, f"training_runs/{model}", f"training_runs/{model}/checkpoints"):
            answer = self.http.get(page)
            assert answer.status_code == 200, (page, answer.text)
            json.loads(answer.text, parse_constant=refuse_constant)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} in an answer")


def check(answer: httpx.Response) -> None:
    """Asserts that a call was answered, or refused with one line."""
    assert answer.status_code < 500, answer.text[:300]
    if answer.status_code >= 400:
        one_line(answer.text)


def all_mutations() -> list[tuple[str, hostile_values.Mutation]]:
    return [
        (call, mutation)
        for call, documents in BODIES.items()
        for document in documents
        for mutation in hostile_values.mutations(document)
    ]


def test_hostile_values_in_every_field(stub: Stub, ann: Client, tries, request) -> None:
    bob = Bob(stub.url)
    mutations = all_mutations()
    if not request.config.getoption("--thorough"):
        mutations = random.Random(0).sample(mutations, SHORT)
    for number, (call, mutation) in enumerate(mutations):
        with tries.attempt("Tinker: values x fields", f"{call} {mutation}"):
            answer = bob.send(call, bob.named(mutation.document))
            check(answer)
            if (result := bob.poll(answer)) is not None:
                assert result.status_code in (200, 408), result.text[:300]
                assert "the server failed" not in result.text, result.text[:300]
        if number % 100 == 0:
            # A model that ended with its session, or met its share, is made anew.
            bob.end()
            bob = Bob(stub.url)
    bob.check_lists()
    bob.end()
    assert ann.http.get("training_runs").status_code == 200
    ann.done(ann.step())


# -- protobuf --------------------------------------------------------------------------------------

FIELD = bytes([3 << 3 | wire.BYTES, 0])  # an empty datum
UNKNOWN = bytes([15 << 3 | wire.VARINT, 1])


def header(client: Client) -> bytes:
    fields: wire.Message = {"model_id": client.model, "seq_id": client.next()}
    return wire.encode("ForwardBackwardRequest", fields | {"loss_fn": "cross_entropy"})


def shape_of_many() -> bytes:
    packed = b"\x08" + b"\x01" * (1 << 20)
    shape = wire.length_delimited(4, packed)
    entry = wire.length_delimited(1, b"weights") + wire.length_delimited(2, shape)
    return wire.length_delimited(3, wire.length_delimited(2, entry))


BOMBS: dict[str, bytes] = {
    "7 million empty datums": FIELD * (7 << 20),
    "7 million unknown fields": UNKNOWN * (7 << 20),
    "a shape of a million lengths": shape_of_many(),
    "a million nests": b"\x1a\x80\x80\x40" * (1 << 20),
}


def post_protobuf(client: Client, body: bytes, encoding: str = "identity") -> httpx.Response:
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": encoding}
    return client.http.post("forward_backward", content=body, headers=headers)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_request_costs_little(stub: Stub, ann: Client, tries, name: str) -> None:
    bob = Client(stub.url, "tml-bob").begin()
    packed = gzip.compress(header(bob) + BOMBS[name], compresslevel=1)
    started = time.process_time()
    with tries.attempt("Tinker: bodies that cost", name):
        answer = post_protobuf(bob, packed, "gzip")
        check(answer)
        assert answer.status_code in (400, 413)
        # Also of the client, which is in this process, and of the compression.
        assert time.process_time() - started < 2
    with tries.attempt("Tinker: bodies that cost", f"{name}: the next command is not delayed"):
        begun = time.monotonic()
        bob.done(bob.step())
        ann.done(ann.step())
        assert time.monotonic() - begun < 5


JSON_BOMBS = {
    "5 million empty lists": '{"user_metadata": {"a": [' + "[]," * 5_000_000 + "[]]}}",
    "5 million numbers": '{"user_metadata": {"a": [' + "1," * 5_000_000 + "1]}}",
    "long numbers": '{"user_metadata": {"a": [' + ("1" * 300 + ",") * 50_000 + "1]}}",
    "a long text": '{"user_metadata": {"a": "' + "a" * 15_000_000 + '"}}',
    "100,000 lists in each other": '{"user_metadata": {"a": '
    + "[" * 100_000
    + "]" * 100_000
    + "}}",
}


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_a_small_json_body_costs_little(stub: Stub, tries, name: str) -> None:
    bob = Client(stub.url, "tml-bob")
    packed = gzip.compress(JSON_BOMBS[name].encode(), compresslevel=1)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with tries.attempt("Tinker: bodies that cost", name):
        started = time.process_time()
        answer = bob.http.post("create_session", content=packed, headers=headers)
        assert time.process_time() - started < 1
        assert 400 <= answer.status_code < 500
        one_line(answer.text)


def test_metadata_of_a_session_is_bounded(stub: Stub) -> None:
    bob = Client(stub.url, "tml-bob")
    assert bob.post("create_session", user_metadata={"a": "x" * 4000}).status_code == 200
    refused = bob.post("create_session", user_metadata={"a": "x" * 4200})
    assert refused.status_code == 422 and "4096" in refused.text


EMPTY = {"model_input": [], "loss_fn_inputs": {"target_tokens": tensor([], "<i8")}}
WRONG_TENSORS: dict[str, wire.Message] = {
    "shape [0, 2**62]": {"dense": b"", "dtype": wire.INT64, "shape": [0, 2**62]},
    "shape [2**62, 2**62]": {"dense": b"", "dtype": wire.INT64, "shape": [2**62, 2**62]},
    "negative": {"dense": b"", "dtype": wire.INT64, "shape": [-1]},
    "70 axes": {"dense": b"12345678", "dtype": wire.INT64, "shape": [1] * 70},
    "sparse of 2**26": {
        "dtype": wire.INT64,
        "shape": [1, 1 << 26],
        "sparse_csr": {"crow_indices": bytes(16)},
    },
    "no dtype": {"dense": bytes(8), "shape": [1]},
    "three floats": tensor([1.0, 2.0, 3.0]),
    "NaN": tensor([np.nan, 1.0]),
}


def test_datums_that_are_none_are_refused_and_use_their_number_up(stub: Stub, tries) -> None:
    bob = Client(stub.url, "tml-bob").begin()
    wrong = [("no tokens", EMPTY)]
    for name, value in WRONG_TENSORS.items():
        for field in ("target_tokens", "weights"):
            one = datum([1, 2, 3])
            inputs = one["loss_fn_inputs"]
            assert isinstance(inputs, dict)
            inputs[field] = value
            wrong.append((f"{field}: {name}", one))
    for name, one in wrong:
        with tries.attempt("Tinker: datums", name):
            answer = bob.send([one])
            assert 400 <= answer.status_code < 500, answer.text[:300]
            one_line(answer.text)
            begun = time.monotonic()
            bob.done(bob.step())
            assert time.monotonic() - begun < 2, "the next command waits for the refused one"


def test_random_bytes_of_a_batch_are_no_error_of_the_server(stub: Stub, tries, request) -> None:
    bob = Client(stub.url, "tml-bob").begin()
    rng = random.Random(1)
    message: wire.Message = {"loss_fn": "cross_entropy", "data": [datum([1, 2, 3])] * 3}
    for number in range(3000 if request.config.getoption("--thorough") else 150):
        message |= {"model_id": bob.model, "seq_id": bob.next()}
        body = bytearray(wire.encode("ForwardBackwardRequest", message))
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        with tries.attempt("Tinker: random batches", f"seed 1, number {number}"):
            check(post_protobuf(bob, bytes(body)))
        if number % 30 == 0:
            bob.http.post(f"sessions/{bob.session}/finish", json={})
            bob = Client(stub.url, "tml-bob").begin()
