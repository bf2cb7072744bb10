"""Measures one GRPO step on a fixed workload, and prints one JSON line.

    python benchmarks/step.py --workload DIR [--dtype float32] [--steps 6] [--warmup 2]

The workload is 32 prompts with 8 samples each of exactly 128 new tokens, and then one update. DIR
holds a small Qwen2 in fp32 (config.json, model.safetensors), its tokenizer, and prompts.json, which
is {"rows": [{"ids": [...]}]}. No logit of the model can reach its end-of-sequence id. The reward is
how often "7" appears in a response. With --dtype bfloat16 the model computes in bf16, and the
trained weights stay in fp32.

The line has the seconds of the rollout, of the update and of the step, as medians over the measured
steps, and what follows from them; the CPU seconds of a step; the largest resident memory of the
process; the seconds from the start of the process to the end of the first step; the seconds of
every step; and the versions. The step includes rewards, packing, and the decoder's copy of the
weights.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jzero import cli, setup
from jzero.algorithms import GroupMeanStd, grpo
from jzero.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from jzero.config.schema import Dtype
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import Engine
from jzero.decoder.sequence import Sequence, make_groups
from jzero.files import JsonObject
from jzero.model import huggingface, tokenizer
from jzero.model.base_model import BaseModel
from jzero.rollout.sampler import to_rollout, with_turn_grades
from jzero.run.environment import versions
from jzero.service.weights import load_full
from jzero.training.step import update_on_rollouts
from jzero.types import Grade, Params, Problem, Rollout, State
from jzero.workers.pool import Pool

NUM_PROMPTS = 32
GROUP_SIZE = 8
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE
MAX_PROMPT_TOKENS = 64
NEW_TOKENS = 128
PROBLEM = Problem("benchmark", "benchmark", "", None)


class StepSeconds(NamedTuple):
    """The seconds that a step took, and its parts. The step has more parts than these two."""

    rollout: float
    update: float
    step: float


def workload_config(directory: str, dtype: Dtype) -> Config:
    row_tokens = MAX_PROMPT_TOKENS + GROUP_SIZE * NEW_TOKENS
    return Config(
        name="benchmark",
        model=ModelConfig(path=directory, dtype=dtype, remat="dots", logit_chunk=1 << 20),
        rollout=RolloutConfig(
            num_prompts=NUM_PROMPTS,
            group_size=GROUP_SIZE,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_new_tokens=NEW_TOKENS,
            num_slots=NUM_SAMPLES,
            page_size=16,
            decode_steps=32,
        ),
        algorithm=grpo(advantage=GroupMeanStd(1e-4)),
        optimizer=OptimizerConfig(lr=1e-5, b1=0.9, b2=0.999),
        train=TrainConfig(
            microbatch_tokens=2 * row_tokens, pack="longest", packs_per_row=GROUP_SIZE
        ),
        mesh=MeshConfig(data=-1, fsdp=1),
    )


def base_model(directory: str) -> BaseModel:
    """Returns the model of a workload.

    `model.base_model` would refuse it: its end-of-sequence token has no embedding, on purpose, so
    that no system samples it and all do the same work.
    """
    model, hf_config = huggingface.load_config(Path(directory))
    return BaseModel(Path(directory), model, hf_config, tokenizer.load(directory))


def process_start() -> float:
    """Returns the wall-clock time at which this process began, before its interpreter (Linux)."""
    # Field 22 of stat is the start in clock ticks since the boot. The fields are split behind the
    # second one, the name of the program in parentheses, which may hold spaces.
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + start_ticks / os.sysconf("SC_CLK_TCK")


def step_prompts(rows: list[JsonObject], number: int) -> list[np.ndarray]:
    """Returns the tokens of the prompts of step `number` >= 1; the rows repeat after the last."""
    first = (number - 1) * NUM_PROMPTS
    chosen = [rows[(first + i) % len(rows)] for i in range(NUM_PROMPTS)]
    return [np.array(row["ids"], np.int32) for row in chosen]


def decode(
    engine: Engine, weights: Params, prompts: list[np.ndarray], number: int
) -> list[Sequence]:
    """Decodes all samples of the prompts of step `number`, and returns them in their order."""
    groups = make_groups(prompts, GROUP_SIZE, NEW_TOKENS)
    Decoder(engine, lambda ids: "").run(Phase(weights, (0, number), GROUP_SIZE), Batch(groups))
    return [sequence for group in groups for sequence in group]


def grade(run: setup.Run, sequences: list[Sequence]) -> list[Rollout]:
    """Returns the rollouts of sequences, with how often "7" appears as reward."""
    assert len(sequences) == NUM_SAMPLES, f"{len(sequences)=}"
    rollouts = []
    texts = run.sampler.tokenizer.batch_decode([sequence.new_tokens for sequence in sequences])
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.num_new == NEW_TOKENS, f"{sequence.num_new=}"
        turn_grade = Grade(float(text.count("7")), False, "")
        rollouts.append(with_turn_grades(to_rollout(PROBLEM, sequence), [turn_grade]))
    return rollouts


def train_step(
    run: setup.Run, state: State, number: int, prompts: list[np.ndarray]
) -> tuple[State, StepSeconds]:
    begin = time.perf_counter()
    # The decoder's copy of the weights lives to the end of the step. So it counts in the peak
    # memory, as it always did in this benchmark.
    weights = run.publish(state.params)
    sequences = decode(run.sampler.engine, weights, prompts, number)
    end_of_rollout = time.perf_counter()

    rollouts = grade(run, sequences)
    begin_of_update = time.perf_counter()
    state = update_on_rollouts(run.trainer, state, rollouts, number).state
    jax.block_until_ready(state.params)
    end = time.perf_counter()

    seconds = StepSeconds(
        rollout=end_of_rollout - begin,
        update=end - begin_of_update,
        step=end - begin,
    )
    return state, seconds


def measure(workload: str, dtype: Dtype, num_steps: int, num_warmup: int) -> JsonObject:
    """Returns the figures of `num_steps` steps, which follow `num_warmup` others."""
    start = process_start()
    cli.start_jax([])
    rows = json.loads((Path(workload) / "prompts.json").read_text())["rows"]

    seconds_of_steps: list[StepSeconds] = []
    cpu_seconds: list[float] = []
    seconds_to_first_step = 0.0
    num_prompt_tokens = 0
    with Pool(0) as pool:
        config, base = workload_config(workload, dtype), base_model(workload)
        run = setup.build(setup.resolve(config, base=base), pool)
        policy = run.trainer.policy
        seed = run.config.train.seed
        state = policy.start(load_full(run.blueprint, policy, run.base.directory, seed))
        for number in range(1, num_warmup + num_steps + 1):
            cpu_begin = time.process_time()
            prompts = step_prompts(rows, number)
            state, seconds = train_step(run, state, number, prompts)
            if number == 1:
                seconds_to_first_step = time.time() - start
            seconds_of_steps.append(seconds)
            cpu_seconds.append(time.process_time() - cpu_begin)
            num_prompt_tokens = sum(map(len, prompts))

    measured = seconds_of_steps[num_warmup:]
    rollout_seconds = statistics.median(seconds.rollout for seconds in measured)
    update_seconds = statistics.median(seconds.update for seconds in measured)
    step_seconds = statistics.median(seconds.step for seconds in measured)
    num_new_tokens = NUM_SAMPLES * NEW_TOKENS
    # The prompts of the last step stand for those of all steps.
    num_trained_tokens = GROUP_SIZE * num_prompt_tokens + num_new_tokens
    return {
        "peer": "jzero",
        "dtype": dtype,
        "rollout_s": round(rollout_seconds, 3),
        "new_tok_s": round(num_new_tokens / rollout_seconds),
        "update_s": round(update_seconds, 3),
        "trained_tok_s": round(num_trained_tokens / update_seconds),
        "step_s": round(step_seconds, 3),
        "step_cpu_s": round(statistics.median(cpu_seconds[num_warmup:]), 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "time_to_first_step_s": round(seconds_to_first_step, 2),
        "steps": [[round(value, 3) for value in seconds] for seconds in seconds_of_steps],
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", required=True, help="directory of the model and the prompts")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="model.dtype"
    )
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (compilation)")
    args = parser.parse_args()
    print(json.dumps(measure(args.workload, args.dtype, args.steps, args.warmup)), flush=True)


if __name__ == "__main__":
    main()
