"""One server on two hosts: real processes, which compute as one process with as many devices."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from runs import ROOT, started
from tinker_client import NAME, SETTINGS, Client, process

from benchmarks.tinker.scripted_loop import datum

PROMPT = [72, 101, 108, 108, 111]
DATA = [datum([72, 101, 108, 108, 111, 32, 119]), datum([116, 104, 101, 32])]
# Fewer places than there are tenants and snapshots: states and snapshots go to the host and back.
FLAGS = [
    "--config.mesh.tensor=2",
    "--resident=1",
    "--adapters=3",
    "--resident-snapshots=1",
    "--session-seconds=3600",  # these clients have no heartbeat
]
TOGETHER = [*FLAGS, "--config.rollout.hosts_per_decoder=2"]
SECONDS = 20.0  # within which a host ends after the other one


class Hosts(NamedTuple):
    """Two processes of one server, and its address."""

    first: subprocess.Popen
    second: subprocess.Popen
    url: str


@contextlib.contextmanager
def launched(
    model: str, folder: Path, *flags: str, second_flags: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen, subprocess.Popen]]:
    """Starts two processes of one device each. Only the first one's store is used."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        servers = []
        for index in range(2):
            arguments = [f"--model={model}", f"--name={NAME}", "--port=0", *SETTINGS, *flags]
            arguments += [f"--coordinator=localhost:{port}", "--num_processes=2"]
            arguments += [f"--process_id={index}", f"--store={folder}/store{index}"]
            server = started(
                [
                    sys.executable,
                    "-m",
                    "jzero.tinker",
                    *arguments,
                    *(second_flags if index else ()),
                ],
                cwd=ROOT,
                env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            servers.append(stack.enter_context(server))
        yield servers[0], servers[1]


@contextlib.contextmanager
def hosts(model: str, folder: Path) -> Iterator[Hosts]:
    """Runs a server on two hosts."""
    with launched(model, folder, *TOGETHER) as (first, second):
        assert first.stdout is not None
        line = ""
        while "TINKER_BASE_URL=" not in line:
            line = first.stdout.readline()
            assert line, first.communicate()[1][-3000:]
        yield Hosts(first, second, line.partition("TINKER_BASE_URL=")[2].split()[0])


class Facts(NamedTuple):
    """What a client has been answered."""

    first: list[bytes]  # log-probs under the first weights
    trained: list[np.ndarray]  # log-probs before each step
    tokens: list[list[list[int]]]  # samples of each sampler
    logprobs: list[np.ndarray]  # of these samples, and of their prompts


def drive(url: str) -> Facts:
    """Trains two tenants at once, samples, saves, and continues from a checkpoint."""
    ann, bob = Client(url).begin(seed=1), Client(url).begin(seed=2)
    base = ann.sampler(base_model=NAME)
    begun = ann.sample(base, PROMPT, num_samples=2, prompt_logprobs=True)
    first = [logps.tobytes() for client in (ann, bob) for logps in client.forward(DATA)]
    first += [logps.tobytes() for logps in begun.logprobs] + [begun.message["prompt_logprobs"]]

    def live(client: Client) -> list[np.ndarray]:
        return [logps for _ in range(3) for logps in client.train(DATA)]

    with ThreadPoolExecutor(2) as threads:
        trained = [logps for one in threads.map(live, (ann, bob)) for logps in one]

    promise = ann.command("save_weights", path="a")
    saved = ann.done(promise)["path"]
    promise = bob.command("save_weights_for_sampler", path="b", ttl_seconds=600)
    samplers = [
        (ann, ann.snapshot()),
        (bob, bob.sampler(model_path=bob.done(promise)["path"])),
        (bob, bob.snapshot()),
        (ann, base),
    ]
    continued = ann.train(DATA)

    def sample(place: tuple[Client, str]) -> tuple[list[list[int]], list[np.ndarray]]:
        client, sampler = place
        more = {"prompt_logprobs": True, "topk_sample_logprobs": 2}
        sampled = client.sample(sampler, PROMPT, num_samples=3, **more)
        prompt = np.frombuffer(sampled.message["prompt_logprobs"], "<f4")[1:]
        return sampled.tokens, [*sampled.logprobs, prompt]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(sample, samplers))
    # By path and by snapshot: the same weights and seeds.
    assert answers[1][0] == answers[2][0]

    promise = ann.post(
        "load_weights", session_id=ann.session, model_seq_id=7, path=saved, optimizer=True
    )
    loaded = Client(url)
    loaded.session, loaded.model = ann.session, ann.done(promise)["model_id"]
    resumed = loaded.train(DATA)
    assert [logps.tobytes() for logps in resumed] == [logps.tobytes() for logps in continued]
    # The next update has seen the moments of the checkpoint.
    again = [one.forward(DATA) for one in (ann, loaded)]
    assert [x.tobytes() for x in again[0]] == [x.tobytes() for x in again[1]]
    for client in (ann, bob):
        client.http.post(f"sessions/{client.session}/finish", json={})
    tokens = [answer[0] for answer in answers]
    logprobs = [logps for answer in answers for logps in answer[1]]
    return Facts(first, [*trained, *continued, *again[0]], tokens, logprobs)


def error_of(errors: str) -> str:
    """Returns the one line of an error."""
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    return line


def check_end_after_kill(killed: subprocess.Popen, other: subprocess.Popen, index: int) -> None:
    """Kills a host: the other one ends at once, with one line that says what to do."""
    killed.kill()
    start = time.monotonic()
    _, errors = other.communicate(timeout=60)
    assert time.monotonic() - start < SECONDS
    assert other.returncode == 1
    line = error_of(errors)
    assert f"host {index} of 2 (" in line
    assert "is gone" in line
    assert line.endswith("clients resume from their checkpoints")
    assert "--workdir" not in errors


def test_two_hosts_are_one_host(model, tmp_path) -> None:
    with process(model, tmp_path / "one", *FLAGS, devices=2) as (_, url):
        want = drive(url)
    with hosts(model, tmp_path) as (_, _, url):
        got = drive(url)
    assert got.first == want.first
    for got_logps, want_logps in zip(got.trained, want.trained, strict=True):
        np.testing.assert_allclose(got_logps, want_logps, rtol=0, atol=2e-3)
    assert got.tokens == want.tokens
    for got_logps, want_logps in zip(got.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(got_logps, want_logps, rtol=0, atol=2e-3)
    # Only the serving host writes.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "store0"]


def test_two_hosts_train_and_sample_with_the_same_bits_rest_and_end_in_order(
    model, tmp_path
) -> None:
    with hosts(model, tmp_path) as (first, second, url):
        client = Client(url).begin()
        client.train(DATA)
        promise = client.command("save_weights", path="a")
        path = client.done(promise)["path"]
        snapshot = client.snapshot()
        sampled = client.sample(snapshot, PROMPT, stop=[])
        client.train(DATA)
        promise = client.command("load_weights", path=path, optimizer=True)
        client.done(promise)

        # Longer than the limits of collectives of a CPU, and without a busy process.
        before = [cpu_seconds(server.pid) for server in (first, second)]
        time.sleep(35)
        after = [cpu_seconds(server.pid) for server in (first, second)]
        assert np.subtract(after, before).max() < 5

        # The loaded weights are those of the snapshot, and the trainer has the sampler's bits.
        text = [*PROMPT, *sampled.tokens[0]]
        rows = client.forward([datum(text)])
        assert rows[0][len(PROMPT) - 1 :].tobytes() == sampled.logprobs[0].tobytes()
        named = {"data": text[1:], "dtype": "int64", "shape": [len(text) - 1, 1]}
        answer = client.sample(
            snapshot, text, max_tokens=1, target_prompt_logprobs=named, prompt_alt_tokens_k=2
        )
        assert answer.message["target_prompt_logprobs"]["dense"] == rows[0].tobytes()
        assert answer.message["prompt_alt_tokens"]["tokens"]["shape"] == [len(text) - 1, 2]

        first.send_signal(signal.SIGINT)
        for server in (first, second):
            _, errors = server.communicate(timeout=60)
            assert server.returncode == 0, errors
            assert "error: " not in errors
            assert "Traceback" not in errors


def cpu_seconds(pid: int) -> float:
    """Returns the time for which a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_end_of_the_serving_host_ends_the_idle_one(model, tmp_path) -> None:
    with hosts(model, tmp_path) as (first, second, _):
        check_end_after_kill(first, second, 0)


def test_the_end_of_another_host_ends_the_busy_server(model, tmp_path) -> None:
    with hosts(model, tmp_path) as (first, second, url):
        client = Client(url).begin()
        sampler = client.sampler(base_model=NAME)
        for number in range(20):
            client.ask(sampler, PROMPT, number, num_samples=2, max_tokens=120, stop=[])
            client.send(DATA)
        check_end_after_kill(second, first, 1)


@pytest.mark.parametrize(
    ("flags", "second_flags", "reason"),
    [
        ([], (), "--config.rollout.hosts_per_decoder=2 --config.mesh.tensor=2"),
        (TOGETHER, ("--max-rank=8",), "--max-rank is 64 on host 0 and 8 on host 1"),
    ],
    ids=["apart", "differently"],
)
def test_hosts_that_cannot_serve_together_end_at_the_start(
    model, tmp_path, flags: list[str], second_flags: tuple[str, ...], reason: str
) -> None:
    with launched(model, tmp_path, *flags, second_flags=second_flags) as servers:
        for server in servers:
            _, errors = server.communicate(timeout=120)
            assert server.returncode != 0
            assert reason in error_of(errors)
