"""Tenant B does anything, and tenant A has the bits and the latency of a server without B.

    pytest --thorough tests/attacks/test_tenants.py                      # a short one, as in CI
    TENANT_TRIES=5000 pytest --thorough tests/attacks/test_tenants.py    # minutes to an hour

A real server with a tiny model runs as a process, exact, with a key for each tenant. A's life is a
fixed list of calls: training, losses, snapshots, samples of all kinds, log-probs and a saved
adapter. It is lived alone first. Then a thread of B sends what a seeded grammar generates, and A
lives on. Her results must be the same bytes.
"""

import contextlib
import gzip
import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import hostile_values
import httpx
import numpy as np
import pytest
import servers
from test_tinker_values import BODIES, BOMBS, JSON_BOMBS, check
from tinker_client import NAME, Client, logprobs_of, loss_of, process, sampled_of

from benchmarks.tinker.scripted_loop import datum, tensor
from jzero.tinker import wire

TRIES = int(os.environ.get("TENANT_TRIES", "60"))
SEED = int(os.environ.get("TENANT_SEED", "0"))
SURFACE = "Tinker: tenants"
PROMPT = [72, 101, 108, 108, 111]
DATA = [datum([72, 101, 108, 108, 111, 32, 119]), datum(list(range(30, 60)))]
FLAGS = (
    "--adapters=6",
    "--max-rank=16",
    "--max-sessions=16",
    "--max-snapshots=12",
    "--max-samplers=32",
    "--max-samples=16",
    "--resident-snapshots=2",
    "--poll-seconds=5",
    "--hole-seconds=2",
    "--session-seconds=3600",
)
EXTREMES = (0.0, 1e-45, 1e-30, 1.0, 1e10, 1e20, 1e30, 3e38, -3e38, float("inf"), float("nan"))
RANKS = (4, 8)  # of B's adapters


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tenants")
    model = servers.save_model(folder / "model")
    keys = folder / "keys"
    keys.write_text("ann tml-ann\nbob tml-bob\n")
    flags = (f"--keys={keys}", *FLAGS)
    with process(model, folder / "store", *flags, environment=environment) as (_, address):
        yield address


# -- tenant A --------------------------------------------------------------------------------------


@dataclass
class Ann:
    """The tenant whose results must not change."""

    url: str
    client: Client = field(init=False)
    base: str = ""
    snapshot: str = ""
    latencies: list[float] = field(default_factory=list)
    number: int = 0

    def live(self) -> list[bytes]:
        """Trains, samples and saves in a new session. Returns all results."""
        self.client = Client(self.url, "tml-ann").begin(rank=4, seed=7)
        client, results = self.client, []
        for _ in range(2):
            gradient, step = client.send(DATA), client.step()
            answer = client.result(gradient)
            results += [one.tobytes() for one in logprobs_of(answer)]
            results.append(str((loss_of(answer), client.done(step))).encode())
        self.snapshot = client.snapshot()
        self.base = client.sampler(base_model=NAME)
        saved = client.command("save_weights_external", path="mine")
        client.done(saved)
        run = f"training_runs/{client.model}/checkpoints/external_weights/mine"
        links = client.http.get(f"{run}/external_weights_urls").json()["urls"]
        weights = client.http.get(links["adapter_model.safetensors"]).content
        results.append(hashlib.sha256(weights).digest())
        return results + self.probe()

    def probe(self) -> list[bytes]:
        """Samples the base and the snapshot, and computes log-probs. Returns the results."""
        results = []
        for sampler in (self.base, self.snapshot):
            for params in ({"temperature": 0}, {"seed": 3, "top_k": 20, "prompt_logprobs": True}):
                self.number += 1
                begun = time.monotonic()
                promise = self.client.ask(sampler, PROMPT, self.number, num_samples=2, **params)
                answer = self.client.result(promise)
                self.latencies.append(time.monotonic() - begun)
                sampled = sampled_of(answer)
                assert all(np.isfinite(logps).all() for logps in sampled.logprobs)
                results.append(answer.content)
        results += [one.tobytes() for one in self.client.forward(DATA)]
        return results

    def end(self) -> None:
        self.client.http.post(f"sessions/{self.client.session}/finish", json={})


def percentile95(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 95))


# -- tenant B --------------------------------------------------------------------------------------


class Bob:
    """The tenant who does anything. Every method that begins with `try_` is a kind of try."""

    def __init__(self, url: str, ann: Ann, rng: random.Random) -> None:
        self.url, self.ann, self.rng = url, ann, rng
        self.client = Client(url, "tml-bob")
        self.samplers: list[str] = []
        self.paths: list[str] = []
        self.models: list[Client] = []
        self.number = 0
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": "tml-bob"},
            timeout=120,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.begin()

    def begin(self) -> None:
        """Opens a session with a model, a snapshot and a checkpoint."""
        self.client = Client(self.url, "tml-bob").begin(rank=self.rng.choice(RANKS))
        self.samplers = [self.client.snapshot(), self.client.sampler(base_model=NAME)]
        saved = self.client.command("save_weights", path="p", overwrite=True)
        self.paths = [self.client.done(saved)["path"]]

    def end(self) -> None:
        self.http.post(f"sessions/{self.client.session}/finish", json={})
        self.http.close()

    # -- what is sent ------------------------------------------------------------------------------

    def poll(self, answer: httpx.Response) -> None:
        """Checks a call, and the result of its promise."""
        check(answer)
        body = answer.json()
        if answer.status_code != 200 or not isinstance(body, dict) or "request_id" not in body:
            return
        result = self.http.post("retrieve_future", json={"request_id": body["request_id"]})
        assert result.status_code in (200, 408, 410), result.text[:300]
        if "json" in result.headers["content-type"]:
            assert "the server failed" not in result.text, result.text[:300]

    def value(self) -> float:
        return self.rng.choice([*EXTREMES, self.rng.gauss(0, 1) * 10 ** self.rng.randint(-30, 38)])

    def try_hostile_body(self) -> None:
        """A body of any call with a hostile value in one field."""
        call = self.rng.choice([*BODIES])
        document = self.rng.choice(BODIES[call])
        mutation = self.rng.choice([*hostile_values.mutations(document)])
        ids = {
            "SESSION": self.client.session,
            "MODEL": self.client.model,
            "SAMPLER": self.samplers[-1],
            "PATH": self.paths[-1],
        }

        def named(value: object) -> object:
            if isinstance(value, dict):
                return {key: named(item) for key, item in value.items()}
            return ids.get(value, value) if isinstance(value, str) else value

        body = named(mutation.document)
        if isinstance(body, dict) and body.get("seq_id") == 1:
            body["seq_id"] = self.client.next() if "model_id" in body else self.next_sample()
        text = hostile_values.to_json(body)  # type: ignore[arg-type]
        headers = {"Content-Type": "application/json"}
        self.poll(self.http.post(call, content=text, headers=headers))

    def next_sample(self) -> int:
        self.number += 1
        return self.number

    def try_extreme_training(self) -> None:
        """Gradients and steps of extreme numbers, and samples of what they leave."""
        ids = [self.rng.randrange(256) for _ in range(self.rng.randint(2, 40))]
        count = len(ids) - 1
        loss = self.rng.choice(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
        names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
        with np.errstate(over="ignore"):
            inputs = {name: tensor(np.full(count, self.value())) for name in names}
        one = datum(ids, **inputs)
        self.poll(self.client.send([one] * self.rng.randint(1, 4), loss_fn=loss))
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        adam = {name: self.value() for name in self.rng.sample(names, self.rng.randint(1, 4))}
        body = {"model_id": self.client.model, "seq_id": self.client.next(), "adam_params": adam}
        text = hostile_values.to_json(body)  # type: ignore[arg-type]
        headers = {"Content-Type": "application/json"}
        self.poll(self.http.post("optim_step", content=text, headers=headers))
        self.try_snapshot()

    def try_huge_adapter(self) -> None:
        """Steps within all bounds that make the adapter huge, finite, and then refused."""
        adam = {"learning_rate": 1e3, "weight_decay": self.rng.choice([0.0, 1e3])}
        for _ in range(self.rng.randint(1, 16)):
            self.poll(self.client.send(DATA[:1]))
            number = self.client.next()
            body = {"model_id": self.client.model, "seq_id": number, "adam_params": adam}
            self.poll(self.http.post("optim_step", json=body))
        self.try_snapshot()

    def try_snapshot(self) -> None:
        """A snapshot, and a sample of it."""
        self.client.samplers += 1
        answer = self.client.command(
            "save_weights_for_sampler", sampling_session_seq_id=self.client.samplers
        )
        self.poll(answer)
        self.samplers.append(f"{self.client.session}:sample:{self.client.samplers}")
        self.try_sample()

    def try_sample(self) -> None:
        """A sample with random parameters, long and many."""
        prompt = [self.rng.randrange(256) for _ in range(self.rng.choice([1, 5, 64, 127]))]
        prompt = self.rng.choice([prompt, PROMPT])
        params = {
            "max_tokens": self.rng.choice([1, 8, 60, 128]),
            "temperature": self.rng.choice([0, 1e-40, 1e-3, 1.0, 1000.0]),
            "top_k": self.rng.choice([-1, 0, 1, 2**31 - 1, 2**31, 10**30]),
            "top_p": self.rng.choice([1.0, 1e-40, 0.5]),
            "seed": self.rng.choice([0, -1, 2**62, None]),
            "stop": self.rng.choice([[], [0], ["a"], [2**31 - 1], None]),
        }
        more = {
            "prompt_logprobs": self.rng.random() < 0.3,
            "topk_prompt_logprobs": self.rng.choice([0, 0, 3]),
            "topk_sample_logprobs": self.rng.choice([0, 0, 2]),
            "prompt_alt_tokens_k": self.rng.choice([0, 0, 4]),
        }
        count = self.rng.choice([1, 2, 16])
        sampler = self.rng.choice(self.samplers)
        number = self.next_sample()
        self.poll(self.client.ask(sampler, prompt, number, count, **params, **more))

    def try_flood(self) -> None:
        """Many long samples at once, whose results nobody reads."""
        for _ in range(self.rng.randint(5, 40)):
            answer = self.client.ask(
                self.rng.choice(self.samplers), PROMPT, self.next_sample(), 16, max_tokens=120
            )
            check(answer)

    def try_samplers(self) -> None:
        """Many sampling sessions of a checkpoint."""
        for _ in range(self.rng.randint(1, 20)):
            self.client.samplers += 1
            answer = self.client.post(
                "create_sampling_session",
                session_id=self.client.session,
                sampling_session_seq_id=self.client.samplers,
                model_path=self.rng.choice(self.paths),
            )
            check(answer)
        self.samplers.append(f"{self.client.session}:sample:{self.client.samplers}")
        self.try_sample()

    def try_sessions(self) -> None:
        """Sessions and models up to the limits, and the end of one with requests in it."""
        opened = []
        for _ in range(self.rng.randint(1, 12)):
            answer = self.client.post("create_session")
            check(answer)
            if answer.status_code == 200:
                opened.append(answer.json()["session_id"])
        for session in opened:
            body = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
            rank = self.rng.choice(RANKS)
            check(self.client.post("create_model", **body, lora_config={"rank": rank}))
        if self.rng.random() < 0.3:
            self.client.ask(self.samplers[0], PROMPT, self.next_sample(), 16, max_tokens=100)
            opened.append(self.client.session)
        for session in opened:
            check(self.http.post(f"sessions/{session}/finish", json={}))
        if self.client.session in opened:
            self.begin()

    def try_checkpoints(self) -> None:
        """Saves over names, links, lifetimes, loads and deletions."""
        name = self.rng.choice("abc")
        ttl = self.rng.choice([None, 1, 3600])
        call = self.rng.choice(["save_weights", "save_weights_external"])
        is_new = self.rng.random() < 0.7
        saved = self.client.command(call, path=name, ttl_seconds=ttl, overwrite=is_new)
        self.poll(saved)
        kind = "weights" if call == "save_weights" else "external_weights"
        path = f"tinker://{self.client.model}/{kind}/{name}"
        place = f"training_runs/{self.client.model}/checkpoints/{kind}/{name}"
        check(self.http.get(f"{place}/external_weights_urls"))
        check(self.http.put(f"{place}/ttl", json={"ttl_seconds": self.rng.choice([1, 10**9])}))
        loaded = self.client.command("load_weights", path=path)
        self.poll(loaded)
        if self.rng.random() < 0.3:
            check(self.http.delete(place))
        for page in ("checkpoints", "training_runs", "sessions"):
            check(self.http.get(page))

    def try_ids_of_ann(self) -> None:
        """Calls with the ids of the other tenant."""
        model, session = self.ann.client.model, self.ann.client.session
        calls = [
            self.client.post("optim_step", model_id=model, seq_id=9, adam_params={}),
            self.client.post("save_weights", model_id=model, seq_id=9, path="x"),
            self.client.ask(self.ann.base, PROMPT, 10**6),
            self.http.post(f"sessions/{session}/finish", json={}),
            self.http.delete(f"training_runs/{model}/checkpoints/external_weights/mine"),
            self.client.post("create_model", session_id=session, model_seq_id=5, base_model=NAME),
        ]
        assert [answer.status_code for answer in calls] == [404] * len(calls)

    def try_bomb(self) -> None:
        """A small body that would cost much."""
        kind = "application/x-protobuf"
        name, body = self.rng.choice([*BOMBS.items()])
        if self.rng.random() < 0.5:
            kind = "application/json"
            name, body = self.rng.choice([(name, t.encode()) for name, t in JSON_BOMBS.items()])
        call = "create_session" if "json" in kind else "forward_backward"
        headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        packed = gzip.compress(body[: 1 << 22], compresslevel=1)
        answer = self.http.post(call, content=packed, headers=headers)
        assert 400 <= answer.status_code < 500, name

    def try_random_batch(self) -> None:
        """A batch with some bytes that are random."""
        message: wire.Message = {"model_id": self.client.model, "seq_id": self.client.next()}
        message |= {"loss_fn": "cross_entropy", "data": DATA}
        body = bytearray(wire.encode("ForwardBackwardRequest", message))
        for _ in range(self.rng.randint(1, 4)):
            body[self.rng.randrange(len(body))] = self.rng.randrange(256)
        headers = {"Content-Type": "application/x-protobuf"}
        self.poll(self.http.post("forward_backward", content=bytes(body), headers=headers))

    def try_cut_requests(self) -> None:
        """Connections that end in the middle of a request, or before its answer."""
        address = urlsplit(self.url)
        assert address.hostname and address.port
        body = b'{"request_id": "none"}'
        head = (
            b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: server\r\nX-API-Key: tml-bob\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        for _ in range(self.rng.randint(1, 30)):
            sent = (head + body)[: self.rng.randint(1, len(head) + len(body))]
            place = address.hostname, address.port
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(place, 10) as opened,
            ):
                opened.sendall(sent)

    @property
    def kinds(self) -> list[Callable[[], None]]:
        return [getattr(self, name) for name in sorted(dir(self)) if name.startswith("try_")]


# -- both ------------------------------------------------------------------------------------------


def test_nothing_that_one_tenant_does_changes_another_one(url: str, tries, capsys) -> None:
    ann = Ann(url)
    expected = ann.live()
    ann.end()
    results = ann.live()
    # B's programs are compiled: the first call of a shape delays everybody, as docs/tinker.md says.
    warm = Bob(url, ann, random.Random(SEED + 1))
    for kind in [*warm.kinds, warm.try_flood, *[warm.try_sample] * 4]:
        kind()
    warm.end()
    with tries.attempt(SURFACE, "A alone, again"):
        assert results == expected
    probe = results[-len(ann.probe()) :]
    ann.latencies.clear()
    for _ in range(10):
        assert ann.probe() == probe
    alone, ann.latencies = ann.latencies, []

    bob = Bob(url, ann, random.Random(SEED))
    has_ended = threading.Event()

    def attack() -> None:
        try:
            for number in range(TRIES):
                kind = bob.rng.choice(bob.kinds)
                name = f"seed {SEED}, number {number}: {kind.__name__}"
                with tries.attempt(f"{SURFACE}: B's calls", name):
                    kind()
        finally:
            has_ended.set()

    thread = threading.Thread(target=attack)
    thread.start()
    probes = 0
    while not has_ended.is_set():
        probes += 1
        with tries.attempt(SURFACE, f"seed {SEED}, probe {probes}"):
            assert ann.probe() == probe
    thread.join()
    beside = ann.latencies
    with tries.attempt(SURFACE, "A's session after B"):
        assert ann.probe() == probe
    ann.end()
    with tries.attempt(SURFACE, "a new session of A after B"):
        assert ann.live() == expected
    with tries.attempt(SURFACE, "A's latency"):
        assert percentile95(beside) <= 2 * percentile95(alone) + 0.5
    bob.end()
    with capsys.disabled():
        print(
            f"\n{TRIES} tries of B beside {probes} probes of A: A's 95th percentile is "
            f"{percentile95(alone):.2f} s alone and {percentile95(beside):.2f} s beside B"
        )


def test_a_server_that_is_killed_in_saves_has_whole_checkpoints(
    tmp_path: Path, tries, environment: dict[str, str]
) -> None:
    model = servers.save_model(tmp_path / "model")
    store = tmp_path / "store"
    rng = random.Random(SEED)
    with process(model, store, environment=environment) as (server, address):
        client = Client(address).begin()
        for number in range(3):
            client.done(client.command("save_weights", path=f"s{number}", overwrite=True))
        for number in range(40):
            client.command("save_weights", path=f"s{number % 5}", overwrite=True)
        time.sleep(rng.random() * 0.3)
        server.kill()
        server.wait()
    with process(model, store, environment=environment) as (_, address):
        client = Client(address).begin()
        listed = client.http.get("checkpoints").json()["checkpoints"]
        assert len(listed) >= 3
        for checkpoint in listed:
            with tries.attempt("Tinker: killed in a save", checkpoint["tinker_path"]):
                loaded = client.command(
                    "load_weights", path=checkpoint["tinker_path"], optimizer=True
                )
                client.done(loaded)
        assert not list(store.glob("*/*/.tmp-*")) and not list(store.glob("*/*/.old-*"))
