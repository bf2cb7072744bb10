"""One GRPO step on a fixed workload: 32 prompts x 8 samples x exactly 128 new tokens, then one update. One JSON line.

    python benchmarks/step.py --workload DIR [--steps 6] [--warmup 2]

DIR holds a small Qwen2 in fp32 (config.json, model.safetensors), its tokenizer, prompts.json {"rows": [{"ids": [...]}]}
whose end-of-sequence id no logit can reach. Reward: how many times "7" appears. Rollout, update and step are medians
over the measured steps, in seconds; the step includes rewards, packing and the decoder's copy of the weights."""

import argparse
import json
import os
import resource
import statistics
import time

import jax
import numpy as np

from jzero import cli, setup
from jzero.algorithms import grpo
from jzero.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from jzero.grading.pool import Pool
from jzero.rollout.sampler import make_seed, to_rollout, with_turn_grades
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import make_groups
from jzero.run.environment import versions
from jzero.training.step import update_on_rollouts
from jzero.types import Grade, Problem

PROMPTS, SAMPLES, NEW = 32, 8, 128


def workload_config(directory: str) -> Config:
    return Config(
        name="benchmark",
        model=ModelConfig(path=directory, dtype="float32", remat="full", logit_chunk=1 << 20),
        rollout=RolloutConfig(
            num_prompts=PROMPTS,
            group_size=SAMPLES,
            max_prompt_tokens=64,
            max_new_tokens=NEW,
            num_slots=256,
            page_size=16,
            decode_steps=32,
        ),
        algorithm=grpo(std_eps=1e-4),
        optimizer=OptimizerConfig(lr=1e-5, b1=0.9, b2=0.999),
        train=TrainConfig(microbatch_tokens=2 * (64 + 8 * NEW), pack_buckets=1, packs_per_row=8),
        mesh=MeshConfig(data=-1, fsdp=1),
    )


def process_started() -> float:
    """Wall-clock time at which this process began, interpreter start included (Linux)."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
        return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")


def step(run: setup.Run, state, number: int, prompts: list[np.ndarray]):
    """-> state, seconds of rollout, of update, of the whole step."""
    config, engine = run.config, run.sampler.engine
    begin = time.perf_counter()
    driver = Scheduler(engine, run.publish(state.params), lambda ids: "")
    seed = make_seed(engine, (0, number))
    done = {
        (s.prompt_id, s.sample_index): s
        for s in driver.run(make_groups(prompts, SAMPLES, NEW), SAMPLES, 1.0, seed)
    }
    rolled = time.perf_counter()
    sequences = [done[i, j] for i in range(PROMPTS) for j in range(SAMPLES)]
    texts = run.sampler.tokenizer.batch_decode([s.tokens for s in sequences])
    problem = Problem("benchmark", "benchmark", "", None)
    grades = [Grade(float(text.count("7")), False, "") for text in texts]
    rollouts = [to_rollout(problem, s) for s in sequences]
    rollouts = [
        with_turn_grades(rollout, [grade]) for rollout, grade in zip(rollouts, grades, strict=True)
    ]
    assert (
        all(len(s.tokens) == NEW for s in sequences)
        and len(rollouts) == config.rollout.num_prompts * SAMPLES
    )
    graded = time.perf_counter()
    state = update_on_rollouts(run.trainer, state, rollouts, number).state
    jax.block_until_ready(state.params)
    end = time.perf_counter()
    return state, rolled - begin, end - graded, end - begin


def measure(arguments: argparse.Namespace) -> dict:
    started = process_started()
    cli.start_jax([])
    with open(os.path.join(arguments.workload, "prompts.json")) as file:
        rows = json.load(file)["rows"]
    times, cpu = [], []
    first = 0.0
    with Pool(0) as pool:
        run = setup.build(workload_config(arguments.workload), pool)
        state = run.trainer.policy.start(
            run.trainer.policy.load_params(run.base.directory, run.config.train.seed)
        )
        tokens = 0
        for number in range(1, arguments.warmup + arguments.steps + 1):
            chosen = [rows[((number - 1) * PROMPTS + i) % len(rows)]["ids"] for i in range(PROMPTS)]
            before = time.process_time()
            state, *seconds = step(run, state, number, [np.array(ids, np.int32) for ids in chosen])
            if number == 1:
                first = time.time() - started
            times.append(seconds)
            cpu.append(time.process_time() - before)
            tokens = SAMPLES * sum(map(len, chosen)) + PROMPTS * SAMPLES * NEW
    rollout, update, whole = (
        statistics.median(column) for column in zip(*times[arguments.warmup :], strict=True)
    )
    new = PROMPTS * SAMPLES * NEW
    return {
        "peer": "jzero",
        "rollout_s": round(rollout, 3),
        "new_tok_s": round(new / rollout),
        "update_s": round(update, 3),
        "trained_tok_s": round(tokens / update),
        "step_s": round(whole, 3),
        "step_cpu_s": round(statistics.median(cpu[arguments.warmup :]), 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "time_to_first_step_s": round(first, 2),
        "steps": [[round(x, 3) for x in seconds] for seconds in times],
        "versions": versions(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", required=True)
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (compilation)")
    print(json.dumps(measure(parser.parse_args())), flush=True)
