"""Measures what a sampler in 8 bits changes: accuracy, and the mismatch that training corrects.

    python benchmarks/int8_sampler.py              # the model of countdown:tiny-long, warm-started
    python benchmarks/int8_sampler.py --model DIR --config configs/gsm8k.py:tiny
    python benchmarks/int8_sampler.py --steps 10 --config.eval.problems=500

The same model is trained as a whole, by four samplers: with its weights as they are or with
rollout.weights=int8, and with rollout.kv_dtype as the recipe has it or int8. Truncated importance
sampling (algorithm.correction=token_truncate) corrects for each. Without --model the weights are
those of the recipe after its warm start.

The table has a row for each sampler:

    weights MB   the decoder's copy of the model on one device
    cache bytes  keys and values of one token on one device
    accuracy     of held-out problems before training, one column for each kind of evaluation
    mismatch     mean |log p of the sampler - log p of the trainer| over the sampled tokens, in the
                 first and, behind the slash, in the last of --steps steps of training
    correction   the mean of the factors that truncated importance sampling multiplies the loss of a
                 token with, in the same steps; 1 without a mismatch
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import int8_base
import jax

from jzero import cli, setup
from jzero.config import Config
from jzero.hosts import interrupt
from jzero.loops.rl import sample_rollouts
from jzero.model import qwen
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.service.weights import load_model
from jzero.sharding.publish import bytes_of_one_device
from jzero.training.step import update_on_rollouts
from jzero.workers.pool import Pool

METRICS = ("policy/mismatch", "policy/correction")


@dataclass(frozen=True)
class Result:
    """What was measured of one sampler."""

    weights: str
    kv_dtype: str
    weight_bytes: int
    cache_bytes: float
    accuracies: dict[str, float]
    metrics: list[dict[str, float]]  # METRICS of each step


def measure(settings: Config, steps: int) -> list[Result]:
    """Returns the results of all samplers."""
    results: list[Result] = []
    params: qwen.Params = {}
    kv_dtypes = settings.rollout.kv_dtype, "int8"
    with TemporaryDirectory() as workdir, Pool(settings.task.grade_workers) as pool:
        for weights, kv_dtype in product(("native", "int8"), kv_dtypes):
            settings.rollout.weights = weights
            settings.rollout.kv_dtype = kv_dtype
            run = setup.build(setup.resolve(settings), pool)
            params = params or trained_model(run, Path(workdir))
            published = run.publish(params)
            weight_bytes = bytes_of_one_device(published)
            accuracies, _ = int8_base.held_out_accuracies(run, params)
            del published
            result = Result(
                weights=weights,
                kv_dtype=kv_dtype,
                weight_bytes=weight_bytes,
                cache_bytes=kv_bytes_per_token(run.sampler.engine),
                accuracies=accuracies,
                metrics=metrics_of(run, params, steps),
            )
            results.append(result)
    return results


def trained_model(run: setup.Run, workdir: Path) -> qwen.Params:
    """Returns the model that all samplers start from."""
    config, policy = run.config, run.trainer.policy
    weights = setup.initial_weights(config, run.base, workdir)
    params = load_model(weights, run.blueprint, policy, config.train.seed)
    if not weights.is_warm_started:
        return params
    return setup.warm_started(config, policy, run.base.tokenizer, params, interrupt.never_stop)


def metrics_of(run: setup.Run, params: qwen.Params, steps: int) -> list[dict[str, float]]:
    """Trains a copy of `params` for some steps, and returns the metrics of those that trained."""
    state = setup.initial_state(run, jax.tree.map(lambda leaf: leaf.copy(), params))
    found = []
    for step in range(1, steps + 1):
        rollouts, _ = sample_rollouts(run, run.trainer.policy.weights(state), step)
        result = update_on_rollouts(run.trainer, state, rollouts, step, None)
        state = result.state
        if METRICS[0] in result.metrics:  # absent if all rewards of every group are equal
            found.append({name: result.metrics[name] for name in METRICS})
    return found


def format_table(results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table."""
    header = ["weights", "cache", "weights MB", "cache bytes", *results[0].accuracies]
    header += [name.removeprefix("policy/") for name in METRICS]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for result in results:
        accuracies = [f"{value:.3f}" for value in result.accuracies.values()]
        ends = [result.metrics[0], result.metrics[-1]]
        of_steps = [" / ".join(f"{end[name]:.4g}" for end in ends) for name in METRICS]
        size = f"{result.weight_bytes / 1e6:.2f}"
        cells = [result.weights, result.kv_dtype, size, f"{result.cache_bytes:.0f}"]
        lines.append(" | ".join([*cells, *accuracies, *of_steps]))
    return "\n".join(f"| {line} |" for line in lines)


def parse(arguments: Sequence[str]) -> tuple[Config, int]:
    """Returns the settings, and the number of steps."""
    options, rest = int8_base.make_parser(__doc__).parse_known_args(arguments)
    correct = "--config.algorithm.correction=token_truncate"
    return int8_base.settings_of(options, [correct, *rest]), options.steps


if __name__ == "__main__":
    with cli.user_errors():
        SETTINGS, STEPS = parse(cli.start_jax(sys.argv[1:]))
        setup.check_task(SETTINGS)
        print(format_table(measure(SETTINGS, STEPS)))
