"""2,000 samples in flight at once: each is answered, once, with its own tokens, in bounded memory.

The clients repeat what the SDK repeats: a submit whose answer was lost, a poll whose answer was
lost, and a submit that got 429.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tinker_client import NAME, Client, process, sampled_of

from jzero.tinker import wire

REQUESTS = 2000
MOST_WAITING = 1500  # samples: the others get 429 until there is room
NEW = 8  # tokens of a sample
PROMPTS = [[72, 101, 108, 108, 111, 32, number] for number in range(40, 72)]
BACKOFF_SECONDS = 1.0  # of the SDK after 429
RETRY_SECONDS = 0.4  # of the SDK after a lost connection
ALONE = 24  # requests that are compared with the same request alone
MIB = 2**20
# Results, promises, connections and buffers of 2,000 requests take some 30 MiB. A server that kept
# a KV cache or a thread for each would need gigabytes.
MOST_GROWTH = 256 * MIB
KEYS = {"tml-ann": "ann", "tml-bob": "bob", "tml-eve": "eve"}


@dataclass
class Connection:
    """One HTTP/1.1 connection for one call. httpx takes seconds to manage thousands of them."""

    host: str
    port: int
    key: str

    async def post(self, path: str, body: dict[str, object], loses_answer: bool = False) -> "Reply":
        """Sends a call, and returns its reply, or an empty one if the answer is to be lost.

        A server with too many connections closes the one that has waited longest; the SDK then
        sends its call again.
        """
        while True:
            reply = await self._post_once(path, body, loses_answer)
            if reply is not None and reply.status != 503:
                return reply
            await asyncio.sleep(RETRY_SECONDS)

    async def _post_once(
        self, path: str, body: dict[str, object], loses_answer: bool
    ) -> "Reply | None":
        """Returns None if the connection was closed without an answer."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        payload = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: server\r\nX-API-Key: {self.key}\r\n"
            f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + payload)
            await writer.drain()
            if loses_answer:
                # The server has read the call, and its answer meets a closed connection.
                await asyncio.sleep(0.2)
                return Reply(0, {}, b"")
            received = await reader.read()
        except ConnectionError:
            return None
        finally:
            writer.close()
        if not received:
            return None
        answer_head, _, content = received.partition(b"\r\n\r\n")
        status, *lines = answer_head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return Reply(int(status.split()[1]), headers, content)


@dataclass(frozen=True)
class Reply:
    """The reply to a call."""

    status: int
    headers: dict[str, str]
    content: bytes


@dataclass
class Crowd:
    """The clients of one key, with what they have counted."""

    connection: Connection
    sampler: str
    counts: Counter = field(default_factory=Counter)

    def body(self, number: int) -> dict[str, object]:
        chunk = {"type": "encoded_text", "tokens": PROMPTS[number % len(PROMPTS)]}
        return {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "num_samples": 1,
            "prompt": {"chunks": [chunk]},
            "sampling_params": {"max_tokens": NEW, "seed": number, "stop": []},
        }

    async def submit(self, number: int, loses_answer: bool) -> str | None:
        """Submits a sample as the SDK does. Returns its promise; None if the answer is lost."""
        while True:
            reply = await self.connection.post("asample", self.body(number), loses_answer)
            if loses_answer:
                return None
            if reply.status != 429:
                assert reply.status == 200, reply
                promise = json.loads(reply.content)
                assert promise["sample_sequence_ids"] == [f"{self.sampler}:{number}:0"]
                return promise["request_id"]
            assert reply.headers["x-tinker-sampling-backpressure"] == "1"
            self.counts["429"] += 1
            await asyncio.sleep(BACKOFF_SECONDS)

    async def result(self, request_id: str, loses_answer: bool) -> bytes:
        """Polls until there is a result. With `loses_answer` the first poll is given up."""
        while True:
            body = {"request_id": request_id}
            reply = await self.connection.post("retrieve_future", body, loses_answer)
            if reply.status == 200:
                assert reply.headers["content-type"] == "application/x-protobuf", reply
                return reply.content
            assert loses_answer or reply.status == 408, reply
            loses_answer = False

    async def sample(self, number: int, rng: random.Random) -> bytes:
        """Samples with faults. Asserts that all submits have one promise, and all polls one result.

        A fifth of the submits come twice, a twentieth of the answers are lost.
        """
        is_repeated, loses_promise, loses_result = (
            rng.random() < share for share in (0.2, 0.05, 0.05)
        )
        if loses_promise:
            self.counts["lost promises"] += 1
            await self.submit(number, loses_answer=True)
        submits = [self.submit(number, False) for _ in range(2 if is_repeated else 1)]
        self.counts["repeated submits"] += is_repeated
        self.counts["lost results"] += loses_result
        promises = set(await asyncio.gather(*submits))
        assert len(promises) == 1, promises
        (request_id,) = promises
        assert request_id is not None
        polls = [self.result(request_id, loses_result) for _ in range(2 if is_repeated else 1)]
        answers = set(await asyncio.gather(*polls))
        assert len(answers) == 1
        (answer,) = answers
        self.counts["answers"] += 1
        return answer


def memory(process_id: int, name: str) -> int:
    """Returns a figure of a process's memory in bytes: VmRSS of now, or VmHWM, the peak."""
    status = Path(f"/proc/{process_id}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def tokens_and_logprobs(answer: bytes) -> tuple[list[int], bytes]:
    (sequence,) = wire.decode("SampleResponse", answer)["sequences"]
    return wire.integers("tokens", sequence["tokens"]).tolist(), sequence["logprobs"]


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The process id and the address of a server with keys."""
    directory = tmp_path_factory.mktemp("load")
    keys = directory / "keys"
    keys.write_text("".join(f"{owner} {key}\n" for key, owner in KEYS.items()))
    keys.chmod(0o600)
    flags = (f"--max-waiting-sequences={MOST_WAITING}", f"--keys={keys}")
    slots = "--config.rollout.num_slots=64"
    with process(model, directory / "store", *flags, slots) as (popen, url):
        yield popen.pid, url


def test_two_thousand_samples_at_once_are_answered_once_each(server, record_property) -> None:
    process_id, url = server
    address = urlsplit(url)
    assert address.hostname and address.port
    clients, crowds = [], []
    for key in KEYS:
        client = Client(url, key).begin()
        client.step()
        # Half of the crowds sample an adapter, and the others the base.
        sampler = client.snapshot() if len(clients) % 2 else client.sampler(base_model=NAME)
        clients.append(client)
        crowds.append(Crowd(Connection(address.hostname, address.port, key), sampler))
    for client, crowd in zip(clients, crowds, strict=True):
        client.sample(crowd.sampler, PROMPTS[0], max_tokens=NEW)  # compiles
    before = memory(process_id, "VmRSS")
    rng = random.Random(0)

    async def everything() -> list[bytes]:
        samples = [
            crowds[number % len(crowds)].sample(number, random.Random(number))
            # Number 1 was the sample that compiled.
            for number in range(2, REQUESTS + 2)
        ]
        return await asyncio.gather(*samples)

    answers = asyncio.run(asyncio.wait_for(everything(), 500))

    counts = sum((crowd.counts for crowd in crowds), Counter())
    growth = memory(process_id, "VmHWM") - before
    figures = f"{dict(counts)}, memory {before / MIB:.0f} MiB, at the peak {growth / MIB:.0f} more"
    record_property("load", figures)
    print(figures)
    assert counts["answers"] == REQUESTS == len(answers)
    assert min(counts[name] for name in ("429", "lost promises", "lost results")) > 10
    assert all(len(tokens_and_logprobs(answer)[0]) == NEW for answer in answers)
    assert growth < MOST_GROWTH, figures
    # The same request on an idle server has the same bits: no answer belongs to another request.
    for number in rng.sample(range(2, REQUESTS + 2), ALONE):
        which = number % len(crowds)
        prompt = PROMPTS[number % len(PROMPTS)]
        request = clients[which].ask(
            crowds[which].sampler, prompt, REQUESTS + number, max_tokens=NEW, seed=number, stop=[]
        )
        alone = sampled_of(clients[which].result(request))
        tokens, logprobs = tokens_and_logprobs(answers[number - 2])
        assert alone.tokens == [tokens], number
        assert alone.logprobs[0].tobytes() == logprobs, number
