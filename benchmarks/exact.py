"""Runs RL with and without model.exact on the same problems, and prints what both compute and cost.

    python benchmarks/exact.py [--dtype float32] [--steps 3] [--warm_start 60] \\
        [--config.rollout.num_prompts=16 ...]

The run is configs/countdown.py:tiny-long with 16 prompts and two minibatches, so that old log-probs
are needed. Both arms start from the same weights, after a warm start of a few supervised steps.
Each line of the table is a step:

    differ      tokens of the first minibatch whose log-probability by the trainer's score program
                has other bits than the sampler's, of all of them; this score is not in the times
    largest     the largest of these differences
    |ratio-1|   its mean over both minibatches; --config.optimizer.lr=0 leaves what is not learned
    accuracy    of the step's rollouts
    score, sample, update, step   seconds
    cpu         seconds of all processor cores in the step's own programs. Other work on the machine
                does not add to them, as it does to the others.

The first step compiles. The last lines compare the medians of the steps after it.
"""

import importlib.util
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import numpy as np

from jzero import cli, setup
from jzero.config import Config, WarmStart
from jzero.config.schema import Dtype
from jzero.hosts import interrupt
from jzero.loops.rl import sample_rollouts
from jzero.model import qwen
from jzero.service.weights import load_model
from jzero.training.step import make_minibatches, update_on_rollouts
from jzero.types import Rollout
from jzero.workers.pool import Pool

ROOT = Path(__file__).resolve().parents[1]
HEADING = (
    "model.exact  step        differ   largest  |ratio-1|  accuracy   score  sample  update"
    "    step     cpu"
)


class StepResult(NamedTuple):
    """What a line of the table says."""

    differ: int
    compared: int
    largest: float
    ratio_shift: float
    accuracy: float
    score: float  # seconds, as the others below
    sample: float
    update: float
    step: float
    cpu: float


def benchmark_config(dtype: Dtype) -> Config:
    """Returns the tiny recipe, smaller, in one dtype."""
    path = ROOT / "configs/countdown.py"
    spec = importlib.util.spec_from_file_location("countdown", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    config: Config = recipe.tiny()
    config.model.dtype = dtype
    config.rollout.kv_dtype = dtype
    config.rollout.num_prompts = 16
    config.rollout.num_slots = 64
    # With an entropy bonus no response is left out, whatever the scores are.
    config.algorithm.entropy_coef = 1e-6
    config.train.minibatches = 2
    return config


def first_params(config: Config, steps: int) -> qwen.Params:
    """Returns weights after some supervised steps, on the host."""
    warm = replace(config.warm_start or WarmStart(), steps=steps) if steps else None
    config = replace(config, warm_start=warm)
    with Pool(0) as pool, TemporaryDirectory() as workdir:
        run = setup.build(setup.resolve(config), pool)
        policy = run.trainer.policy
        weights = setup.initial_weights(config, run.base, Path(workdir))
        params = load_model(weights, run.blueprint, policy, config.train.seed)
        if steps:
            params = setup.warm_started(
                config, policy, run.base.tokenizer, params, interrupt.never_stop
            )
        return jax.device_get(params)


def difference(
    run: setup.Run, weights: qwen.Params, rollouts: list[Rollout], step: int
) -> tuple[int, int, float]:
    """Returns how many log-probs of the first minibatch differ, of how many, and by how much."""
    trainer = run.trainer
    minibatch = make_minibatches(trainer, rollouts, step)[0]
    rows = trainer.policy.score(weights, minibatch.batches, minibatch.counts, trainer.layouts)
    trained = [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]
    chosen = [trained[index] for index in minibatch.chosen]
    for packed, part in zip(minibatch.packed, rows, strict=True):
        packed.from_rows(np.asarray(jax.device_get(part)), chosen)
    differ, compared, largest = 0, 0, 0.0
    for index in minibatch.chosen:
        sampled = rollouts[index].tokens.sampled
        ours, theirs = trained[index][sampled], rollouts[index].tokens.logps[sampled]
        differ += int((ours.view(np.int32) != theirs.view(np.int32)).sum())
        compared += int(sampled.sum())
        largest = max(largest, float(np.abs(ours - theirs).max()))
    return differ, compared, largest


def run_steps(config: Config, params: qwen.Params, steps: int, pool: Pool) -> list[StepResult]:
    """Makes RL steps from `params` and prints a line for each."""
    run = setup.build(setup.resolve(config), pool)
    policy = run.trainer.policy
    state = setup.initial_state(run, jax.device_put(params, policy.model_shardings))
    results = []
    for step in range(1, steps + 1):
        run.clock.pop()
        weights = policy.weights(state)
        started = time.process_time()
        rollouts, metrics = sample_rollouts(run, weights, step)
        seconds = run.clock.pop()
        cpu = time.process_time() - started
        counts = difference(run, weights, rollouts, step)
        run.clock.pop()
        started = time.process_time()
        updated = update_on_rollouts(run.trainer, state, rollouts, step)
        state = updated.state
        jax.block_until_ready(state.params)
        seconds |= run.clock.pop()
        cpu += time.process_time() - started
        result = StepResult(
            *counts,
            updated.metrics["policy/ratio_shift"],
            metrics["reward/accuracy"],
            seconds["time/score"],
            seconds["time/sample"],
            seconds["time/update"],
            sum(seconds.values()),
            cpu,
        )
        share = f"{result.differ}/{result.compared}"
        print(
            f"{config.model.exact!s:11}  {step:4}  {share:>12}  {result.largest:8.1e}  "
            f"{result.ratio_shift:9.1e}  {result.accuracy:8.3f}  {result.score:6.2f}  "
            f"{result.sample:6.2f}  {result.update:6.2f}  {result.step:6.2f}  {result.cpu:6.2f}",
            flush=True,
        )
        results.append(result)
    return results


def main() -> None:
    parser = cli.make_parser("benchmarks/exact.py", __doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm_start", type=int, default=60, help="supervised steps")
    args, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
    with cli.user_errors():
        config = cli.parse_settings(benchmark_config(args.dtype), rest)
        config = setup.with_stop_strings(config)
        params = first_params(config, args.warm_start)
        print(HEADING)
        medians = []
        with Pool(config.task.grade_workers) as pool:
            for is_exact in (False, True):
                model = replace(config.model, exact=is_exact)
                results = run_steps(replace(config, model=model), params, args.steps, pool)
                measured = results[1:] or results
                step = statistics.median(item.step for item in measured)
                medians.append((step, statistics.median(item.cpu for item in measured)))
        (step, cpu), (exact_step, exact_cpu) = medians
        print(f"a step with model.exact takes {exact_step / step:.2f} times as long")
        print(f"and {exact_cpu / cpu:.2f} times the processor seconds")


if __name__ == "__main__":
    main()
