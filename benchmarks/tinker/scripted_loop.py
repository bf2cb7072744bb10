"""Starts a Tinker server on a tiny model, and trains an adapter through its API with fixed calls.

    python benchmarks/tinker/scripted_loop.py --model DIR --workdir DIR [--steps 3]

Every step samples a group of answers to one prompt from a snapshot of the adapter, takes a step of
reinforcement learning on them (loss importance_sampling) and a supervised one (cross_entropy), and
scores fixed tokens before and after. The advantages are a function of the sampled tokens. All
numbers of the answers go to metrics.jsonl and samples.jsonl in --workdir, as those of a run do.

The client speaks the API's wire without the SDK: the same bytes go to the server of any checkout.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import cast

import httpx
import numpy as np

from jzero.files import JsonObject
from jzero.tinker import wire

NAME = "Qwen/Qwen3-8B-Base"  # a name that clients know; the model is another one
SETTINGS = (
    "--context=96",
    "--adapters=1",
    "--resident=1",
    "--max-rank=4",
    "--config.model.dtype=float32",
    "--config.model.remat=none",
    "--config.rollout.num_slots=8",
    "--config.rollout.page_size=8",
    "--config.train.microbatch_tokens=192",
    "--config.mesh.fsdp=1",
    "--config.mesh.data=-1",
)
PROMPT = [5 + 7 * number % 60 for number in range(42)]
TEXTS = [[5 + 11 * number % 60 for number in range(24)], [9, 8, 7, 11, 12, 13]]
GROUP, NEW_TOKENS = 4, 12
LEARNING_RATE = 5e-3
REQUEST_SECONDS = 300.0  # the first call of a kind compiles its program


class Client:
    """A session with one adapter."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-local"}, timeout=REQUEST_SECONDS
        )
        self.num_commands = 0
        self.num_samplers = 0
        self.num_asked = 0
        self.session = self._post("create_session", sdk_version="0").json()["session_id"]
        created = self._post(
            "create_model",
            session_id=self.session,
            model_seq_id=0,
            base_model=NAME,
            lora_config={"rank": 2, "seed": 1},
        )
        self.model = self._result(created).json()["model_id"]

    def _post(self, path: str, /, **body: object) -> httpx.Response:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer

    def _result(self, promise: httpx.Response) -> httpx.Response:
        """Polls until a promised answer is there."""
        while True:
            body = {"request_id": promise.json()["request_id"]}
            answer = self.http.post("retrieve_future", json=body)
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                answer.raise_for_status()
                if "json" in answer.headers["content-type"]:
                    assert "error" not in answer.json(), answer.text
                return answer

    def _next(self) -> int:
        self.num_commands += 1
        return self.num_commands

    def forward_backward(
        self, data: list[wire.Message], loss: str, forward_only: bool = False
    ) -> tuple[float, list[list[float]]]:
        """Returns the sum of the losses, and the log-probs of each datum."""
        message: wire.Message = {
            "model_id": self.model,
            "seq_id": self._next(),
            "data": [*data],
            "loss_fn": loss,
        }
        if forward_only:
            message["forward_only"] = True
        answer = self.http.post(
            "forward_backward",
            content=wire.encode("ForwardBackwardRequest", message),
            headers={"Content-Type": "application/x-protobuf"},
        )
        answer.raise_for_status()
        output = decoded("ForwardBackwardOutput", self._result(answer))
        logps: list[list[float]] = []
        for record in output["loss_fn_outputs"]:
            batched = record["fields"]["logprobs"]
            for start, end in pairwise(np.frombuffer(batched["offsets"], "<i8")):
                logps.append(np.frombuffer(batched["data"][start:end], "<f4").tolist())
        return float(output["metrics"]["loss:sum"]), logps

    def optim_step(self) -> None:
        promise = self._post(
            "optim_step",
            model_id=self.model,
            seq_id=self._next(),
            adam_params={"learning_rate": LEARNING_RATE},
        )
        self._result(promise)

    def snapshot(self) -> str:
        """Returns a sampling session of the adapter as it is now."""
        self.num_samplers += 1
        promise = self._post(
            "save_weights_for_sampler",
            model_id=self.model,
            seq_id=self._next(),
            sampling_session_seq_id=self.num_samplers,
        )
        return self._result(promise).json()["sampling_session_id"]

    def sample(self, sampler: str, seed: int) -> tuple[list[list[int]], list[list[float]]]:
        """Returns the tokens and the log-probs of a group of answers to the prompt."""
        self.num_asked += 1
        promise = self._post(
            "asample",
            sampling_session_id=sampler,
            seq_id=self.num_asked,
            num_samples=GROUP,
            prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            sampling_params={"max_tokens": NEW_TOKENS, "seed": seed, "temperature": 1.0},
        )
        sequences = decoded("SampleResponse", self._result(promise))["sequences"]
        tokens = [wire.integers("tokens", one.get("tokens")).tolist() for one in sequences]
        logps = [np.frombuffer(one["logprobs"], "<f4").tolist() for one in sequences]
        return tokens, logps


def decoded(kind: str, answer: httpx.Response) -> JsonObject:
    """Returns a protobuf message of a kind of the API."""
    return cast(JsonObject, wire.decode(kind, answer.content))


def tensor(values: object, dtype: str = "<f4") -> wire.Message:
    array = np.asarray(values, dtype)
    code = {"<f4": wire.FLOAT32, "<i8": wire.INT64}[dtype]
    return {"dense": array.tobytes(), "dtype": code, "shape": [*array.shape]}


def datum(ids: list[int], **inputs: wire.Message) -> wire.Message:
    """Returns a datum that predicts each next token."""
    tokens = np.asarray(ids[:-1], "<i4").tobytes()
    return {
        "model_input": [{"encoded_text": {"tokens": tokens}}],
        "loss_fn_inputs": {"target_tokens": tensor(ids[1:], "<i8"), **inputs},
    }


def sampled_datum(tokens: list[int], logps: list[float]) -> wire.Message:
    """Returns a sampled answer with an advantage, for the loss importance_sampling."""
    zeros = [0.0] * (len(PROMPT) - 1)
    advantage = sum(tokens) % 5 - 2.0
    return datum(
        [*PROMPT, *tokens],
        logprobs=tensor([*zeros, *logps]),
        advantages=tensor([*zeros, *[advantage] * len(tokens)]),
    )


@contextmanager
def server(model: str, workdir: Path) -> Iterator[str]:
    """Runs the server as a process, whose log is in `workdir`. Yields its address."""
    command = [sys.executable, "-m", "jzero.tinker", f"--model={model}", f"--name={NAME}"]
    command += [f"--store={workdir}/store", "--port=0", *SETTINGS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ, cwd=workdir
    ) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                print(line, end="")
                if "TINKER_BASE_URL=" in line:
                    url = line.partition("TINKER_BASE_URL=")[2].split()[0]
                    break
            if not url:
                raise SystemExit("error: the server ended before it listened")
            yield url
        finally:
            process.kill()


def run(url: str, steps: int) -> Iterator[tuple[JsonObject, list[JsonObject]]]:
    """Yields the metrics and the samples of every step."""
    client = Client(url)
    texts = [datum(ids) for ids in TEXTS]
    for step in range(1, steps + 1):
        tokens, logps = client.sample(client.snapshot(), seed=step)
        _, scores_before = client.forward_backward(texts, "cross_entropy", forward_only=True)
        answers = [
            sampled_datum(ids, values) for ids, values in zip(tokens, logps, strict=True) if ids
        ]
        policy_loss, policy_scores = client.forward_backward(answers, "importance_sampling")
        client.optim_step()
        text_loss, _ = client.forward_backward(texts, "cross_entropy")
        client.optim_step()
        _, scores_after = client.forward_backward(texts, "cross_entropy", forward_only=True)
        moved = [
            abs(after - before)
            for old, new in zip(scores_before, scores_after, strict=True)
            for before, after in zip(old, new, strict=True)
        ]
        metrics: JsonObject = {
            "step": step,
            "tinker/policy_loss": policy_loss,
            "tinker/text_loss": text_loss,
            "tinker/sampled_tokens": sum(map(len, tokens)),
            "tinker/moved": max(moved),
            "tinker/policy_scores": policy_scores,
            "tinker/text_scores": scores_after,
        }
        samples: list[JsonObject] = [
            {"step": step, "tokens": ids, "logps": values}
            for ids, values in zip(tokens, logps, strict=True)
        ]
        yield metrics, samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of the base model")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    args.workdir.mkdir(parents=True)
    with (
        server(args.model, args.workdir) as url,
        (args.workdir / "metrics.jsonl").open("w", encoding="utf-8") as metrics_file,
        (args.workdir / "samples.jsonl").open("w", encoding="utf-8") as samples_file,
    ):
        for metrics, samples in run(url, args.steps):
            print(json.dumps(metrics), file=metrics_file)
            for sample in samples:
                print(json.dumps(sample), file=samples_file)


if __name__ == "__main__":
    main()
