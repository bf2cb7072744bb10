"""What one key takes of the limits of a Tinker server, another one still has."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker_client import NAME, OWNERS, Client, sampled_of
from tinker_stub import Stub, one_line, stub_server

PROMPT = [1, 2, 3]
LIMITS = {
    "max_sessions": 8,
    "max_snapshots": 8,
    "max_samplers": 16,
    "max_futures": 64,
    "max_waiting_sequences": 32,
    "max_requests": 16,
    "max_held_bytes": 1 << 20,
    "poll_seconds": 2,
}
SURFACE = "Tinker: shares of keys"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with stub_server(tmp_path / "store", OWNERS, **LIMITS) as running:
        yield running


def save(client: Client, name: str = "p") -> str:
    promise = client.command("save_weights_for_sampler", path=name)
    return client.done(promise)["path"]


def test_sessions(stub: Stub, tries) -> None:
    bob = Client(stub.url, "tml-bob")
    statuses = [bob.post("create_session").status_code for _ in range(10)]
    with tries.attempt(SURFACE, "sessions"):
        assert statuses == [200] * 4 + [429] * 6
        assert "--max-sessions" in one_line(bob.post("create_session").text)
        ann = Client(stub.url, "tml-ann")
        assert [ann.post("create_session").status_code for _ in range(4)] == [200] * 4


def test_adapters(stub: Stub, tries) -> None:
    bob = Client(stub.url, "tml-bob").begin()
    bob.begin(1)
    body = {"session_id": bob.session, "model_seq_id": 2, "base_model": NAME}
    refused = bob.post("create_model", **body, lora_config={"rank": 4})
    with tries.attempt(SURFACE, "adapters"):
        assert refused.status_code == 429 and "--adapters" in one_line(refused.text)
        Client(stub.url, "tml-ann").begin().begin(1)


def test_snapshots_of_another_key_stay(stub: Stub, tries) -> None:
    ann, bob = Client(stub.url, "tml-ann").begin(), Client(stub.url, "tml-bob").begin()
    snapshots = [ann.snapshot() for _ in range(4)]
    path = save(bob)
    samplers = [bob.sampler(model_path=path) for _ in range(40)]
    taken = [bob.snapshot() for _ in range(6)]
    for snapshot in snapshots:
        with tries.attempt(SURFACE, "snapshots"):
            ann.sample(snapshot, PROMPT)
    with tries.attempt(SURFACE, "her own snapshots are those that leave"):
        assert bob.ask(taken[0], PROMPT, 1).status_code == 400
        bob.sample(taken[-1], PROMPT)
    with tries.attempt(SURFACE, "sampling sessions"):
        assert bob.ask(samplers[0], PROMPT, 1).status_code == 404, "dropped: 16 of two keys"
        assert len(stub.service.samplers.by_owner["bob"]) == 8
    with tries.attempt(SURFACE, "a snapshot of a path is read again, and counted again"):
        for _ in range(3):
            bob.sampler(model_path=path)
        assert len(stub.service.snapshots.by_owner["bob"]) == 4


def test_waiting_samples(stub: Stub, tries) -> None:
    stub.devices.sampling.seconds = 0.5
    ann, bob = Client(stub.url, "tml-ann").begin(), Client(stub.url, "tml-bob").begin()
    base, of_ann = bob.sampler(base_model=NAME), ann.sampler(base_model=NAME)
    answers = [bob.ask(base, PROMPT, number) for number in range(30)]
    with tries.attempt(SURFACE, "samples that wait"):
        assert {answer.status_code for answer in answers} == {200, 429}
        ann.sample(of_ann, PROMPT, num_samples=16)


def test_results(stub: Stub, tries) -> None:
    ann, bob = Client(stub.url, "tml-ann").begin(), Client(stub.url, "tml-bob").begin()
    base, of_ann = bob.sampler(base_model=NAME), ann.sampler(base_model=NAME)
    promises = [ann.ask(of_ann, PROMPT, number) for number in range(10)]
    for number in range(200):
        bob.ask(base, PROMPT, number)
    with tries.attempt(SURFACE, "promises and results"):
        for promise in promises:
            assert sampled_of(ann.result(promise)).tokens
        assert len(stub.service.futures.ledgers["bob"].by_id) <= 32


def test_requests_and_bytes(stub: Stub, tries) -> None:
    ann, bob = Client(stub.url, "tml-ann").begin(), Client(stub.url, "tml-bob").begin()
    ann.http.timeout = bob.http.timeout = 20
    # Results that never come: every poll is held.
    lost = bob.step(seq_id=bob.seq_id + 2)
    request_id = lost.json()["request_id"]
    polls = [
        threading.Thread(
            target=bob.post, args=["retrieve_future"], kwargs={"request_id": request_id}
        )
        for _ in range(20)
    ]
    for poll in polls:
        poll.start()
    time.sleep(0.5)
    with tries.attempt(SURFACE, "requests that are answered"):
        refused = bob.http.get("sessions")
        assert refused.status_code == 429 and "--max-requests" in one_line(refused.text)
        assert ann.http.get("sessions").status_code == 200
    for poll in polls:
        poll.join()
    with tries.attempt(SURFACE, "bytes of bodies"):
        headers = {"Content-Type": "application/json"}
        large = bob.http.post("telemetry", content=bytes(600_000), headers=headers)
        assert large.status_code == 429 and "--max-held-bytes" in one_line(large.text)
        small = ann.http.post("telemetry", content=bytes(500_000), headers=headers)
        assert small.status_code == 200
        assert stub.service.held.by_owner == {} or sum(stub.service.held.by_owner.values()) == 0


def test_without_keys_everybody_is_one_owner(tmp_path: Path) -> None:
    with stub_server(tmp_path / "store", {}, **LIMITS) as running:
        client = Client(running.url, "tml-anything")
        statuses = [client.post("create_session").status_code for _ in range(9)]
        assert statuses == [200] * 8 + [429]


def test_commands_of_two_keys_take_turns(stub: Stub) -> None:
    """A queue of commands of one key delays another key by one command."""
    order: list[str] = []
    ann, bob = Client(stub.url, "tml-ann").begin(), Client(stub.url, "tml-bob").begin()
    bob.begin(1)
    stub.devices.optim_step = lambda model, _: (time.sleep(0.02), order.append(model), {})[-1]
    models = [bob.model.replace(":1", ":0"), bob.model]
    for number in range(1, 11):
        for model in models:
            bob.post("optim_step", model_id=model, seq_id=number, adam_params={})
    num_before = len(order)
    ann.done(ann.step())
    assert order.index(ann.model) <= num_before + 2 < 19
    assert {*order[:4]} >= {*models}
