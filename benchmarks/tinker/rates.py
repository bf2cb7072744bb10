"""Measures the Tinker server against jzero's own decoder and learner, in one process.

    python benchmarks/tinker/rates.py --model DIR [--prompts 8 --group 8 --new 64 --repeat 5]

Three figures:

- tokens a second of `sample` through HTTP, from the base, one adapter, and two adapters in
  one batch, divided by those of the scheduler that `jzero.generate` runs, on the same engine;
- tokens a second of `forward_backward` with `optim_step`, divided by those of an optimizer step of
  a GRPO run on the same sequences with an adapter of the same shape;
- seconds of the start, and of the first request of each kind, which compiles.

Both sides of a ratio alternate, and the median of the ratios of neighbors counts: other work on the
machine slows both down.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import jax
import numpy as np

from jzero import algorithms, cli
from jzero.config import Config, RolloutConfig, TrainConfig
from jzero.decoder.driver import Batch, Phase
from jzero.decoder.engine import Samples
from jzero.decoder.sequence import make_groups
from jzero.servers import sockets
from jzero.tinker import __main__ as command
from jzero.tinker import wire
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.service import Service
from jzero.tinker.sessions import Keys
from jzero.tokens import Tokens
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import Minibatch
from jzero.training.trainer import make_trainer

NAME = "model"
POLL = 408  # the status of a promise without a result


@dataclass
class Client:
    """One session, with its models and samplers."""

    http: httpx.Client
    session: str
    num_models: int = 0
    num_samples: int = 0

    def post(self, path: str, **body: object) -> dict:
        return self.http.post(path, json=body).raise_for_status().json()

    def result(self, promise: dict) -> httpx.Response:
        """Polls until there is a result."""
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != POLL:
                return answer.raise_for_status()

    def create_model(self, rank: int) -> str:
        self.num_models += 1
        lora = {"rank": rank, "seed": self.num_models, "train_unembed": False}
        promise = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=self.num_models,
            base_model=NAME,
            lora_config=lora,
        )
        return self.result(promise).json()["model_id"]

    def snapshot(self, model: str, seq_id: int, number: int) -> str:
        promise = self.post(
            "save_weights_for_sampler",
            model_id=model,
            seq_id=seq_id,
            sampling_session_seq_id=number,
        )
        return self.result(promise).json()["sampling_session_id"]

    def sample(self, sampler: str, prompt: list[int], group: int, new: int) -> int:
        """Returns the number of sampled tokens."""
        self.num_samples += 1
        promise = self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=self.num_samples,
            num_samples=group,
            prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            sampling_params={"max_tokens": new, "temperature": 1.0, "stop": []},
        )
        message = wire.decode("SampleResponse", self.result(promise).content)
        sequences = message["sequences"]
        assert isinstance(sequences, list)
        return sum(len(tokens_of(sequence)) for sequence in sequences)

    def train(self, model: str, seq_id: int, request: bytes) -> None:
        """Sends a gradient and a step, and waits for both."""
        headers = {"Content-Type": "application/x-protobuf"}
        sent = self.http.post("forward_backward", content=request, headers=headers)
        step = self.post(
            "optim_step", model_id=model, seq_id=seq_id + 1, adam_params={"learning_rate": 1e-6}
        )
        self.result(sent.raise_for_status().json())
        self.result(step)


def tokens_of(sequence: wire.Value) -> np.ndarray:
    """Returns the tokens of a SampledSequence."""
    assert isinstance(sequence, dict)
    return wire.integers("tokens", sequence.get("tokens"))


def serve(service: Service) -> str:
    """Serves a service in threads until the process ends. Returns its address."""
    bound = sockets.bind("127.0.0.1", 0)
    sockets.listen("127.0.0.1", 0, bound)
    is_listening = threading.Event()
    server = command.make_server(service, Keys({}), is_listening.set)
    threading.Thread(target=server.run, args=(bound,), daemon=True).start()
    service.worker.thread.start()
    is_listening.wait()
    return sockets.url(bound[0])


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def ratio(server: Callable[[], object], own: Callable[[], object], repeat: int) -> list[float]:
    """Returns the medians of the server's seconds, of the own ones, and of own / server."""
    pairs = [(seconds(server), seconds(own)) for _ in range(repeat + 1)][1:]
    server_times, own_times = zip(*pairs, strict=True)
    ratios = [own_time / server_time for server_time, own_time in pairs]
    return [statistics.median(values) for values in (server_times, own_times, ratios)]


def own_decoder(service: Service, prompts: list[list[int]], group: int, new: int) -> Callable:
    """Returns a function that samples as jzero.generate does."""
    decoder = service.sampling.decoder
    arrays = [np.array(prompt, np.int32) for prompt in prompts]

    def run() -> None:
        base = service.sampling.snapshots.base
        phase = Phase(base, (0, 0), group, samples=Samples(is_trained=False))
        decoder.run(phase, Batch(make_groups(arrays, group, new)))

    return run


def own_learner(service: Service, options: argparse.Namespace, rows: np.ndarray) -> Callable:
    """Returns a function that makes an optimizer step of a GRPO run."""
    tenants = service.tenants
    shape = tenants.shape_of(options.rank, {"mlp", "attn"})
    length = rows.shape[1]
    settings = Config(
        model=replace(tenants.compute, adapter=shape.settings),
        rollout=RolloutConfig(
            num_prompts=options.prompts,
            group_size=options.group,
            max_prompt_tokens=options.prompt,
            max_new_tokens=length - options.prompt,
        ),
        algorithm=algorithms.grpo(),
        train=TrainConfig(microbatch_tokens=tenants.microbatch_tokens),
    )
    trainer = make_trainer(settings, tenants.base.model, None, tenants.mesh)
    state = trainer.policy.start_on(tenants.frozen, 0)
    is_prompt = np.arange(length) < options.prompt
    weights = np.where(is_prompt, 0, 1 / rows.size).astype(np.float32)
    sequences = [TrainingSequence(Tokens(row), options.prompt, weights) for row in rows]
    size = options.group
    groups = [sequences[start : start + size] for start in range(0, len(sequences), size)]
    advantages = [np.full(length, value, np.float32) for value in np.linspace(-1, 1, len(rows))]

    def run() -> object:
        nonlocal state
        # As in a run, packing and the copy to the device belong to the step.
        packed = pack(groups, trainer.layouts, trainer.rows, trainer.microbatches)
        batches, counts = trainer.policy.put(packed)
        indices = list(range(len(sequences)))
        minibatch = Minibatch(indices, indices, packed, batches, counts)
        minibatch.set_values(trainer.policy, "advantages", advantages)
        state, stats = trainer.policy.update(
            state, minibatch.batches, minibatch.counts, trainer.layouts, 1e-6
        )
        return stats

    return run


def tensor(values: np.ndarray, dtype: str, code: int) -> wire.Message:
    array = values.astype(dtype)
    return {"dense": array.tobytes(), "dtype": code, "shape": [*array.shape]}


def gradient_request(model: str, seq_id: int, rows: np.ndarray, num_prompt: int) -> bytes:
    """Returns a forward_backward of importance_sampling over the responses of rows."""
    data: list[wire.Value] = []
    is_response = np.arange(1, rows.shape[1]) >= num_prompt
    for row, advantage in zip(rows, np.linspace(-1, 1, len(rows)), strict=True):
        inputs: wire.Message = {
            "target_tokens": tensor(row[1:], "<i8", wire.INT64),
            "logprobs": tensor(np.where(is_response, -5.0, 0.0), "<f4", wire.FLOAT32),
            "advantages": tensor(np.where(is_response, advantage, 0.0), "<f4", wire.FLOAT32),
        }
        text: wire.Message = {"tokens": row[:-1].astype("<i4").tobytes()}
        datum: wire.Message = {
            "model_input": [{"encoded_text": text}],
            "loss_fn_inputs": inputs,
        }
        data.append(datum)
    message: wire.Message = {
        "model_id": model,
        "seq_id": seq_id,
        "data": data,
        "loss_fn": "importance_sampling",
    }
    return wire.encode("ForwardBackwardRequest", message)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of a model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_known_args()


def measure(options: argparse.Namespace, flags: list[str], store: Path) -> None:
    """Measures and prints the figures."""
    started = time.perf_counter()
    # A row of the learner, which is no longer than the context, holds a prompt and its samples.
    context = f"--context={options.prompt + options.group * options.new}"
    slots = f"--config.rollout.num_slots={options.prompts * options.group}"
    _, settings = command.parse([f"--model={options.model}", context, slots, *flags])
    service = command.make_service(
        settings, command.Options(NAME, store, 4, 2, options.rank, TinkerLimits())
    )
    url = serve(service)
    print(f"start: {time.perf_counter() - started:.1f} s", flush=True)

    limits = httpx.Limits(max_connections=None)
    headers = {"X-API-Key": "tml-local"}
    http = httpx.Client(base_url=f"{url}/api/v1/", timeout=3600, limits=limits, headers=headers)
    session = http.post("create_session", json={"sdk_version": "0"}).json()["session_id"]
    client = Client(http, session)
    rng = np.random.default_rng(0)
    rows = rng.integers(
        10, 200, (options.prompts * options.group, options.prompt + options.new)
    ).astype(np.int32)
    prompts = rows[:: options.group, : options.prompt].tolist()
    rows[:, : options.prompt] = np.repeat(prompts, options.group, axis=0)

    base = client.post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=NAME,
    )["sampling_session_id"]
    first = seconds(lambda: client.sample(base, prompts[0], 1, 8))
    print(f"first sample of the base: {first:.1f} s", flush=True)

    models = [client.create_model(options.rank) for _ in range(2)]
    numbers = dict.fromkeys(models, 1)

    def train() -> None:
        number = numbers[models[0]]
        numbers[models[0]] += 2
        request = gradient_request(models[0], number, rows, options.prompt)
        client.train(models[0], number, request)

    print(f"first forward_backward and optim_step: {seconds(train):.1f} s", flush=True)
    samplers = [
        client.snapshot(model, numbers[model], number)
        for number, model in enumerate(models, start=1)
    ]
    for model in models:
        numbers[model] += 1
    first = seconds(lambda: client.sample(samplers[0], prompts[0], 1, 8))
    print(f"first sample of an adapter: {first:.1f} s", flush=True)

    threads = ThreadPoolExecutor(options.prompts)

    def sample(from_samplers: list[str]) -> None:
        def one(index: int) -> int:
            sampler = from_samplers[index % len(from_samplers)]
            return client.sample(sampler, prompts[index], options.group, options.new)

        sampled = sum(threads.map(one, range(options.prompts)))
        assert sampled == num_sampled, f"{sampled=} {num_sampled=}"

    num_sampled = options.prompts * options.group * options.new
    own = own_decoder(service, prompts, options.group, options.new)
    cases = {"base": [base], "one adapter": samplers[:1], "two adapters": samplers}
    for name, chosen in cases.items():

        def through_server(chosen: list[str] = chosen) -> None:
            sample(chosen)

        server_time, own_time, share = ratio(through_server, own, options.repeat)
        print(
            f"sample, {name}: {num_sampled / server_time:,.0f} tokens/s, scheduler with the base "
            f"{num_sampled / own_time:,.0f} tokens/s, ratio {share:.2f}",
            flush=True,
        )
    server_time, own_time, share = ratio(train, own_learner(service, options, rows), options.repeat)
    print(
        f"forward_backward and optim_step: {rows.size / server_time:,.0f} tokens/s, optimizer step "
        f"of a run {rows.size / own_time:,.0f} tokens/s, ratio {share:.2f}"
    )


def main() -> None:
    options, flags = parse()
    with cli.user_errors(), TemporaryDirectory() as store:
        measure(options, cli.start_jax(flags), Path(store))


if __name__ == "__main__":
    main()
