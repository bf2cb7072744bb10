"""Measures what model.base=int8 changes: logits, held-out accuracy, and the mismatch in training.

    python benchmarks/int8_base.py                # the model of countdown:tiny-long, warm-started
    python benchmarks/int8_base.py --model DIR --config configs/gsm8k.py:tiny
    python benchmarks/int8_base.py --steps 10 --rank 32 --config.eval.problems=500

The same weights are the base of an adapter twice: in the type of the computation (native), and with
linear layers in 8 bits. The adapter is new, and changes nothing until it is trained. Without
--model the weights are those of the recipe after its warm start.

The table has a row for each base:

    base GiB     the base on one device
    logits       root mean square of the difference to the native logits, in units of their standard
                 deviation over the vocabulary; of the last tokens of held-out responses
    same token   share of these positions where the likeliest token is that of the native base
    accuracy     of held-out problems, one column for each kind of evaluation of the recipe
    mismatch     mean |log p of the sampler - log p of the trainer| over the sampled tokens, at the
                 start and, behind the slash, in the last of --steps steps of training
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

from jzero import algorithms, cli, main, recipe_files, setup
from jzero.attention import xla
from jzero.config import Config
from jzero.hosts import interrupt
from jzero.loops.rl import sample_rollouts
from jzero.model import qwen
from jzero.rollout.evaluation import evaluate, evaluation_metrics
from jzero.service.weights import load, load_model
from jzero.sharding.publish import bytes_of_one_device
from jzero.training.frozen_base import freeze_model
from jzero.training.step import update_on_rollouts
from jzero.types import Rollout, RowLayout
from jzero.workers.pool import Pool

BASES = ("native", "int8")
GIB = 2**30
NUM_RESPONSES = 16  # whose logits are compared
NUM_POSITIONS = 64  # of each of them


@dataclass(frozen=True)
class Result:
    """What was measured of one base."""

    base: str
    base_bytes: int
    accuracies: dict[str, float]
    mismatches: list[float]  # of each step
    logits: np.ndarray  # f32[positions, V]


def measure(settings: Config, steps: int) -> list[Result]:
    """Returns the results of all bases."""
    results: list[Result] = []
    texts: list[Rollout] = []  # of the first base, whose logits all bases are compared by
    with TemporaryDirectory() as workdir, Pool(settings.task.grade_workers) as pool:
        for base in BASES:
            settings.model.base = base
            run = setup.build(setup.resolve(settings), pool)
            frozen = frozen_base(run, Path(workdir), is_first=not results)
            accuracies, rollouts = held_out_accuracies(run, frozen)
            texts = texts or rollouts[:NUM_RESPONSES]
            result = Result(
                base=base,
                base_bytes=bytes_of_one_device(frozen),
                accuracies=accuracies,
                logits=logits_of(run, frozen, texts),
                mismatches=mismatches_of(run, frozen, steps),
            )
            results.append(result)
    return results


def frozen_base(run: setup.Run, workdir: Path, is_first: bool) -> qwen.Params:
    """Returns the base. The first one makes the weights, if no directory has them."""
    config, policy = run.config, run.trainer.policy
    weights = setup.initial_weights(config, run.base, workdir)
    if not is_first:
        return load(run.blueprint, weights.directory)
    params = load_model(weights, run.blueprint, policy, config.train.seed)
    if not weights.is_warm_started:
        return params
    params = setup.warm_started(config, policy, run.base.tokenizer, params, interrupt.never_stop)
    return freeze_model(weights, policy, params)


def held_out_accuracies(
    run: setup.Run, base: qwen.Params
) -> tuple[dict[str, float], list[Rollout]]:
    """Returns the accuracies on held-out problems, and the responses."""
    problems = setup.evaluation_problems(run)
    settings = run.config.eval
    with run.sampling(base, version=0) as policy:
        evaluated = evaluate(policy, problems, settings, run.config.rollout.temperature)
    metrics = evaluation_metrics(evaluated)
    accuracies = {name: value for name, value in metrics.items() if name.endswith("accuracy")}
    return accuracies, [rollout for part in evaluated for rollout in part.rollouts]


def logits_of(run: setup.Run, base: qwen.Params, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns the logits of the last positions of every rollout."""
    longest = run.config.rollout.longest_episode
    program = jax.jit(partial(logits_at_the_end, run.base.model, run.config.model.dtype))
    logits = []
    for rollout in rollouts:
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(rollout.tokens)] = rollout.tokens.ids
        last = np.arange(len(rollout.tokens))[-NUM_POSITIONS:]
        logits.append(np.asarray(program(base, tokens, len(rollout.tokens)))[-len(last) :])
    return np.concatenate(logits)


def logits_at_the_end(
    model: qwen.QwenConfig, dtype: str, params: qwen.Params, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    """Returns the logits of the NUM_POSITIONS positions before `length`, f32[positions, V]."""
    width = tokens.shape[1]
    segments = (jnp.arange(width)[None] < length).astype(jnp.int32)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array, carry: None
    ) -> tuple[jax.Array, None]:
        return xla.packed(q, k, v, segments, RowLayout(0, 1, width)), carry

    positions = jnp.arange(width)[None]
    hidden, _ = qwen.forward(model, params, tokens, positions, attend, dtype=jnp.dtype(dtype))
    last = jnp.maximum(length - NUM_POSITIONS + jnp.arange(NUM_POSITIONS), 0)
    return qwen.head(model, params, hidden[0, last], dtype)


def mismatches_of(run: setup.Run, base: qwen.Params, steps: int) -> list[float]:
    """Trains an adapter for some steps, and returns the mismatch of those that trained."""
    policy = run.trainer.policy
    state = setup.initial_state(run, base)
    reference = base if algorithms.needs_reference(run.config.algorithm) else None
    mismatches = []
    for step in range(1, steps + 1):
        rollouts, _ = sample_rollouts(run, policy.weights(state), step)
        result = update_on_rollouts(run.trainer, state, rollouts, step, reference)
        state = result.state
        if "policy/mismatch" in result.metrics:  # absent if all rewards of every group are equal
            mismatches.append(result.metrics["policy/mismatch"])
    return mismatches


# -- the table -------------------------------------------------------------------------------------


def format_table(results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table."""
    native = results[0]
    header = ["base", "base GiB", "logits", "same token", *native.accuracies, "mismatch"]
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    for result in results:
        error, same = compare(result.logits, native.logits)
        accuracies = [f"{value:.3f}" for value in result.accuracies.values()]
        ends = [f"{value:.2e}" for value in (result.mismatches[:1] + result.mismatches[-1:])]
        cells = [result.base, f"{result.base_bytes / GIB:.4f}", f"{error:.4f}", f"{same:.4f}"]
        lines.append(" | ".join([*cells, *accuracies, " / ".join(ends)]))
    return "\n".join(f"| {line} |" for line in lines)


def compare(logits: np.ndarray, native: np.ndarray) -> tuple[float, float]:
    """Returns the error of logits, and how often the likeliest token is the same."""
    # A number that is added to all logits of a position changes no probability.
    centered = [rows - rows.mean(axis=1, keepdims=True) for rows in (logits, native)]
    error = np.sqrt(np.mean((centered[0] - centered[1]) ** 2)) / np.sqrt(np.mean(centered[1] ** 2))
    return float(error), float(np.mean(logits.argmax(axis=1) == native.argmax(axis=1)))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a model, the recipe of its training, and the number of steps."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory or hub id; default: the recipe's warm start")
    parser.add_argument(
        "--config", default=f"{recipe_files.RECIPES / 'countdown.py'}:tiny-long", help="recipe"
    )
    parser.add_argument("--steps", type=int, default=4, help="of training, for the mismatch")
    return parser


def settings_of(options: argparse.Namespace, flags: Sequence[str]) -> Config:
    """Returns the settings of the recipe with `flags`, of the model that the options name."""
    settings = main.parse([f"--config={options.config}", *flags]).settings
    if options.model:
        settings.model.path = options.model
        settings.warm_start = None
    return settings


def parse(arguments: Sequence[str]) -> tuple[Config, int]:
    """Returns the settings, and the number of steps."""
    parser = make_parser(__doc__)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    options, rest = parser.parse_known_args(arguments)
    settings = settings_of(options, rest)
    settings.model.adapter.rank = options.rank
    return settings, options.steps


if __name__ == "__main__":
    with cli.user_errors():
        SETTINGS, STEPS = parse(cli.start_jax(sys.argv[1:]))
        setup.check_task(SETTINGS)
        print(format_table(measure(SETTINGS, STEPS)))
