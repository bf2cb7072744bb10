"""Compares the speed of two checkouts: a step, generation, the two servers.

    python benchmarks/same_speed.py OLD NEW [--rounds 5] [--only NAME] [--model DIR]

OLD and NEW are checkouts of jzero, measured with the same Python and the same packages. They take
turns, and the median of the ratios of neighbors counts: other work on the machine slows both down.
Programs are compiled before anything is measured.

    step        seconds of a step of configs/countdown.py:tiny, the median of a run
    generate    `jzero.open(MODEL).generate` of 64 prompts with 4 responses each
    serve 1     32 completions of 64 tokens, one after the other, from `python -m jzero.serve`
    serve 16    64 completions, 16 at a time
    tinker      8 requests at once to `sample` 8 responses of 64 tokens (`python -m jzero.tinker`)

A line of the table has the seconds of both checkouts, the processor seconds of both, and the
ratios NEW / OLD of the two. The model is the export of the measured run, unless --model names one.
"""

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import same_numbers
from real import processor_seconds
from soak_serve import HOST, free_port, wait_until_open

ROUNDS = 5
STEPS = 16
FIRST_STEP = 6  # earlier ones compile
NEW_TOKENS = 64
REQUEST_SECONDS = 120.0
MOST_REPLY_BYTES = 1 << 24

# Opens the model, and generates once for each line of its input.
GENERATE = """
import sys, time
import jzero
prompts = [f"Using the numbers [{n % 9 + 1}, {n % 7 + 2}], create an equation" for n in range(64)]
with jzero.open(sys.argv[1]) as model:
    model.generate(prompts, n=4, max_new_tokens=64)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        model.generate(prompts, n=4, max_new_tokens=64)
        print(time.perf_counter() - start, flush=True)
"""


@dataclass(frozen=True)
class Cost:
    """What a measured piece took: seconds by the clock, and of all processors."""

    seconds: float
    processor: float


Measure = Callable[[], Cost]


def environment_of(checkout: Path, programs: Path) -> dict[str, str]:
    """Returns the environment variables of a process of a checkout, with its own devices."""
    variables = same_numbers.environment_of(checkout, programs, is_optimized=True)
    return {name: value for name, value in variables.items() if name != "JAX_NUM_CPU_DEVICES"}


def timed(process: subprocess.Popen, work: Callable[[], object]) -> Cost:
    """Returns what a piece of work takes by the clock, and of the process that does it."""
    processor, start = processor_seconds(process.pid), time.perf_counter()
    work()
    return Cost(time.perf_counter() - start, processor_seconds(process.pid) - processor)


@contextlib.contextmanager
def started(arguments: Sequence[str], checkout: Path, folder: Path) -> Iterator[subprocess.Popen]:
    """Runs Python with these arguments in a checkout until the end of the block."""
    log = folder / "log"
    with (
        log.open("wb") as err,
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=checkout,
            env=environment_of(checkout, folder / "programs"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as process,
    ):
        try:
            yield process
        except (OSError, RuntimeError, ValueError) as error:
            end = log.read_text(encoding="utf-8")[-2000:]
            sys.exit(f"{end}\nerror: {checkout}: {error}")
        finally:
            process.kill()


def train(checkout: Path, folder: Path, workdir: Path) -> Cost:
    """Returns what a step of a tiny run costs, the median of its later steps."""
    flags = [f"train.steps={STEPS}", "warm_start.steps=1", "eval.every=0", "eval.problems=0"]
    flags += ["rollout.num_prompts=16", "rollout.num_slots=128"]
    run = [
        *("-m", "jzero.main", f"--config={checkout}/configs/countdown.py:tiny"),
        *(f"--config.{flag}" for flag in flags),
        f"--workdir={workdir}",
    ]
    before = os.times()
    subprocess.run(
        [sys.executable, *run],
        cwd=checkout,
        env=environment_of(checkout, folder / "programs"),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    seconds = [row["time/step"] for row in rows if "time/step" in row and row["step"] >= FIRST_STEP]
    return Cost(statistics.median(seconds), used / STEPS)


@contextlib.contextmanager
def generation(checkout: Path, model: Path, folder: Path) -> Iterator[Measure]:
    with started(["-c", GENERATE, str(model)], checkout, folder) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None
        # The command may say before what it has opened.
        if "ready\n" not in answers:
            raise RuntimeError("the model was not opened")

        def generate() -> None:
            print(file=questions, flush=True)
            float(answers.readline())

        yield lambda: timed(process, generate)


def post(port: int, path: str, body: object) -> tuple[int, bytes]:
    """Returns the status and the body of the answer to a request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    headers = {"Content-Type": "application/json", "X-API-Key": "tml-local"}
    try:
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read(MOST_REPLY_BYTES)
    finally:
        connection.close()


def answer(port: int, path: str, body: object) -> dict:
    status, text = post(port, path, body)
    if status != 200:
        raise RuntimeError(f"{path}: status {status}: {text[:300]!r}")
    return json.loads(text)


@contextlib.contextmanager
def completions(checkout: Path, model: Path, folder: Path) -> Iterator[dict[str, Measure]]:
    """Serves the model, and yields the measurements with one request and with 16 at a time."""
    port = free_port()
    command = ["-m", "jzero.serve", f"--model={model}", f"--port={port}"]
    with started(command, checkout, folder) as process:
        wait_until_open(process, port)
        name = json.loads(get(port, "/v1/models"))["data"][0]["id"]

        def ask(number: int) -> None:
            body = {"model": name, "prompt": f"{number}+{number}=", "max_tokens": NEW_TOKENS}
            answer(port, "/v1/completions", body | {"temperature": 1.0, "seed": number})

        def one_by_one() -> None:
            for number in range(32):
                ask(number)

        def together() -> None:
            with ThreadPoolExecutor(16) as clients:
                list(clients.map(ask, range(64)))

        for _ in range(3):  # the sizes of prefills depend on arrival, and each is compiled
            together()
            one_by_one()
        yield {
            "serve 1": lambda: timed(process, one_by_one),
            "serve 16": lambda: timed(process, together),
        }


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(MOST_REPLY_BYTES)
    finally:
        connection.close()


@contextlib.contextmanager
def tinker(checkout: Path, model: Path, folder: Path) -> Iterator[Measure]:
    """Serves the Tinker API, and yields the measurement of eight requests at once."""
    port = free_port()
    command = ["-m", "jzero.tinker", f"--model={model}", "--name=model", f"--port={port}"]
    command += [f"--store={folder / 'store'}", "--context=256", "--config.rollout.num_slots=64"]
    with started(command, checkout, folder) as process:
        wait_until_open(process, port)
        session = answer(port, "/api/v1/create_session", {"tags": [], "sdk_version": "0"})
        sampler = answer(
            port,
            "/api/v1/create_sampling_session",
            {
                "session_id": session["session_id"],
                "sampling_session_seq_id": 1,
                "base_model": "model",
            },
        )["sampling_session_id"]
        numbers = iter(range(1, 1 << 30))

        def sample(number: int) -> None:
            tokens = [(number + place) % 90 + 5 for place in range(32)]
            promise = answer(
                port,
                "/api/v1/asample",
                {
                    "sampling_session_id": sampler,
                    "seq_id": number,
                    "num_samples": 8,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
                    "sampling_params": {
                        "max_tokens": NEW_TOKENS,
                        "temperature": 1.0,
                        "seed": number % 8,
                        "stop": [],
                    },
                },
            )
            wanted = {"request_id": promise["request_id"]}
            while (reply := post(port, "/api/v1/retrieve_future", wanted))[0] == 408:
                pass
            if reply[0] != 200:
                raise RuntimeError(f"sample: {reply[1][:300]!r}")

        def together() -> None:
            with ThreadPoolExecutor(8) as clients:
                list(clients.map(sample, [next(numbers) for _ in range(8)]))

        for _ in range(3):
            together()
        yield lambda: timed(process, together)


def alternate(old: Measure, new: Measure, rounds: int) -> list[tuple[Cost, Cost]]:
    """Measures in turns, and the second of a round first in the next."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second, first = new(), old()
        else:
            first, second = old(), new()
        pairs.append((first, second))
    return pairs


def show(name: str, pairs: Sequence[tuple[Cost, Cost]]) -> None:
    """Prints a line of the table."""
    costs = []
    for read in (lambda cost: cost.seconds, lambda cost: cost.processor):
        values = [(read(old), read(new)) for old, new in pairs]
        olds, news = zip(*values, strict=True)
        ratio = statistics.median(new / max(old, 1e-9) for old, new in values)
        costs.append((statistics.median(olds), statistics.median(news), ratio))
    (old, new, ratio), (old_used, new_used, used_ratio) = costs
    print(
        f"{name:<10} {old:8.3f} {new:8.3f} {ratio:6.3f}   {old_used:8.2f} {new_used:8.2f} "
        f"{used_ratio:6.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=("step", "generate", "serve", "tinker"))
    parser.add_argument("--model", type=Path, help="directory of a model, with its tokenizer")
    args = parser.parse_args()
    checkouts = [args.old.resolve(), args.new.resolve()]
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [root / "old", root / "new"]
        for folder in folders:
            folder.mkdir()
        names = iter(range(1 << 30))
        print(
            "            seconds: old, new, ratio    processor seconds: old, new, ratio", flush=True
        )

        def run(place: int) -> Cost:
            return train(checkouts[place], folders[place], root / f"run{next(names)}")

        if args.only == "step" or (args.only is None or args.model is None):
            run(0)
            run(1)
        if args.only in (None, "step"):
            show("step", alternate(lambda: run(0), lambda: run(1), args.rounds))
        model = args.model.resolve() if args.model else root / "run0" / f"export-{STEPS}"
        if args.only in (None, "generate"):
            with (
                generation(checkouts[0], model, folders[0]) as old,
                generation(checkouts[1], model, folders[1]) as new,
            ):
                show("generate", alternate(old, new, args.rounds))
        if args.only in (None, "serve"):
            with (
                completions(checkouts[0], model, folders[0]) as olds,
                completions(checkouts[1], model, folders[1]) as news,
            ):
                for name in olds:
                    show(name, alternate(olds[name], news[name], args.rounds))
        if args.only in (None, "tinker"):
            with (
                tinker(checkouts[0], model, folders[0]) as old,
                tinker(checkouts[1], model, folders[1]) as new,
            ):
                show("tinker", alternate(old, new, args.rounds))


if __name__ == "__main__":
    main()
