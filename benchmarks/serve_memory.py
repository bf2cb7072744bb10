"""Shows the memory of the server and the hits of its prefix cache over many mixed requests.

    python benchmarks/serve_memory.py [--model DIR] [--requests 1000] [-- FLAGS of jzero.serve]

Clients hold conversations: each begins with one of some long shared prefixes, and every turn sends
the whole text so far. Requests differ in length, number of samples, temperature, filters, stops and
log-probs, and half of them stream. Without --model the server has a tiny model with random weights.

Prints a Markdown table after every tenth of the requests: the server's resident memory now and at
most, and the share of prompt tokens whose KV the cache had. Exits with status 1 if a request fails.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from real import peak_gib, resident_gib
from soak_serve import HOST, free_port, save_tiny_model, wait_until_open

PREFIXES, PREFIX_SUMS = 6, 60
MOST_TURNS = 5
MOST_NEW_TOKENS = 24
REQUEST_SECONDS = 300
MOST_REPLY_BYTES = 1 << 22


def sums(rng: random.Random, count: int) -> str:
    """Returns some sums, which every tokenizer here can read."""
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return "".join(f"{a} + {b} = {a + b} " for a, b in pairs)


@dataclass
class Totals:
    """What the answers of the server count up to."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, usage: dict) -> int:
        """Counts an answer, and returns its number."""
        with self.lock:
            self.requests += 1
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            self.new_tokens += usage["completion_tokens"]
            return self.requests


def conversation(rng: random.Random, prefixes: list[str]) -> Iterator[dict]:
    """Yields the requests of one conversation. Each includes the text of those before."""
    text = rng.choice(prefixes)
    for _ in range(rng.randint(1, MOST_TURNS)):
        text += sums(rng, rng.randint(1, 8)) + f"{rng.randrange(100)} + {rng.randrange(100)} = "
        request = {
            "prompt": text,
            "max_tokens": rng.randint(1, MOST_NEW_TOKENS),
            "n": rng.choice((1, 1, 1, 4)),
            "temperature": rng.choice((0, 0.7, 1)),
            "top_p": rng.choice((0.9, 1)),
            "stream": rng.random() < 0.5,
        }
        # A stream has no log-probs of alternatives.
        if not request["stream"] and rng.random() < 0.4:
            request["logprobs"] = 3
        if rng.random() < 0.2:
            request["stop"] = ["="]
        yield request
        text += f"{rng.randrange(200)} "


def ask(port: int, model: str, request: dict) -> dict:
    """Sends a completion request and returns its usage. Raises RuntimeError if it failed."""
    body = request | {"model": model}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        text = reply.read(MOST_REPLY_BYTES).decode()
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {text[:300]}")
    if body["stream"]:
        # The last event before [DONE] has the usage.
        text = text.split("data: ")[-2]
    return json.loads(text)["usage"]


def measure(args: argparse.Namespace, server: subprocess.Popen, port: int, model: str) -> None:
    """Sends the requests and prints the table."""
    rng = random.Random(args.seed)
    prefixes = [sums(rng, PREFIX_SUMS) for _ in range(PREFIXES)]
    totals = Totals()
    tenth = max(1, args.requests // 10)
    started = time.monotonic()
    print(f"idle: {resident_gib(server.pid):.2f} GiB\n")
    print("| requests | seconds | GiB now | GiB at most | prompt tokens | cached | new tokens |")
    print("|---|---|---|---|---|---|---|", flush=True)

    def client(seed: int) -> None:
        own = random.Random(seed)
        while totals.requests < args.requests:
            for request in conversation(own, prefixes):
                number = totals.add(ask(port, model, request))
                if number % tenth == 0:
                    print(
                        f"| {number:,} | {time.monotonic() - started:.0f} "
                        f"| {resident_gib(server.pid):.2f} | {peak_gib(server.pid):.2f} "
                        f"| {totals.prompt_tokens:,} "
                        f"| {totals.cached_tokens / totals.prompt_tokens:.0%} "
                        f"| {totals.new_tokens:,} |",
                        flush=True,
                    )

    with ThreadPoolExecutor(args.clients) as threads:
        for result in [threads.submit(client, args.seed + 1 + n) for n in range(args.clients)]:
            result.result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory of a model (default: a tiny one)")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="of jzero.serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or save_tiny_model(Path(folder, "model"))
        port = free_port()
        command = [sys.executable, "-m", "jzero.serve", f"--model={model}", f"--port={port}"]
        with Path(folder, "log").open("w", encoding="utf-8") as log:
            server = subprocess.Popen([*command, *args.flags], stdout=log, stderr=log)
        try:
            wait_until_open(server, port)
            measure(args, server, port, model)
        except (OSError, RuntimeError) as error:
            print(Path(folder, "log").read_text(encoding="utf-8")[-2000:], file=sys.stderr)
            sys.exit(f"error: {error}")
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
