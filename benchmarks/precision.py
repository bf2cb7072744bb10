"""Measures how far each precision of the sampler is from the trainer in fp32, on one model.

    python benchmarks/precision.py --model DIR --texts test.jsonl
    python benchmarks/precision.py --model DIR --texts test.jsonl --only "fp8 weights" --limit 16

The texts are lines of JSON with a "problem" and its "solution", as in GSM8K. Without --only the
table has a row for each precision of PRECISIONS:

    mismatch     mean |log p of the sampler - log p of the fp32 trainer| over the tokens that the
                 sampler draws at temperature 1: `policy/mismatch` of a run in fp32
    99 %         its 99th percentile
    k3           the estimate of the KL divergence: the mean of exp(d) - 1 - d, where d is
                 log p of the trainer - log p of the sampler
    perplexity   of the solutions by the decoder, which reads their tokens from its KV cache; in
                 brackets the difference to the first row
    weights MB   the decoder's weights on one device
    cache bytes  keys and values of one token on one device
"""

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

from jzero import cli, main, recipe_files, setup
from jzero.config import Config
from jzero.decoder.scoring import Scoring, score_all
from jzero.distillation.in_process import only_scored, scored_sequence
from jzero.hosts import collectives
from jzero.model import qwen
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.rollout.sampler import EncodedProblem
from jzero.service.weights import load_model
from jzero.sharding.publish import bytes_of_one_device
from jzero.training.packing import pack
from jzero.training.trainer import row_shapes
from jzero.types import JsonValue, Problem, Rollout
from jzero.workers.pool import Pool

# One response a row: a device's rows are short, and each text is in a group of its own.
IN_FP32: dict[str, str | int] = {
    "model.dtype": "float32",
    "rollout.kv_dtype": "float32",
    "train.packs_per_row": 1,
}
# The settings of each precision. All others are in fp32.
PRECISIONS: dict[str, dict[str, str | int]] = {
    "fp32": {},
    "bf16": {"model.dtype": "bfloat16", "rollout.kv_dtype": "bfloat16"},
    "bf16 KV cache": {"rollout.kv_dtype": "bfloat16"},
    "int8 KV cache": {"rollout.kv_dtype": "int8"},
    "fp8 KV cache": {"rollout.kv_dtype": "fp8"},
    "int8 weights": {"rollout.weights": "int8"},
    "fp8 weights": {"rollout.weights": "fp8"},
    "int8 base": {"model.base": "int8", "model.adapter.rank": 1},
    "int8 weights and KV cache": {"rollout.weights": "int8", "rollout.kv_dtype": "int8"},
    "fp8 weights and KV cache": {"rollout.weights": "fp8", "rollout.kv_dtype": "fp8"},
    "int8 weights, fp8 KV cache": {"rollout.weights": "int8", "rollout.kv_dtype": "fp8"},
    "bf16, int8 weights and KV cache": {
        "model.dtype": "bfloat16",
        "rollout.weights": "int8",
        "rollout.kv_dtype": "int8",
    },
    "bf16, fp8 weights and KV cache": {
        "model.dtype": "bfloat16",
        "rollout.weights": "fp8",
        "rollout.kv_dtype": "fp8",
    },
}


@dataclass(frozen=True)
class Text:
    """A problem, and the solution whose perplexity is measured."""

    problem: Problem
    solution: str


@dataclass(frozen=True)
class Result:
    """What was measured of one precision."""

    precision: str
    differences: np.ndarray  # log p of the sampler - log p of the trainer of each sampled token
    perplexity: float
    weight_bytes: int
    cache_bytes: float

    @property
    def mismatch(self) -> float:
        return float(np.mean(np.abs(self.differences)))

    @property
    def percentile(self) -> float:
        return float(np.quantile(np.abs(self.differences), 0.99))

    @property
    def k3(self) -> float:
        return float(np.mean(np.expm1(-self.differences) + self.differences))


def measure(
    settings: Config, texts: Sequence[Text], samples: int, names: Sequence[str]
) -> list[Result]:
    """Returns the results of the precisions called `names`.

    Responses to the first `samples` of the texts are sampled.
    """
    results = []
    in_fp32 = with_settings(settings, IN_FP32)
    with TemporaryDirectory() as workdir, Pool(settings.task.grade_workers) as pool:
        trainer = setup.build(setup.resolve(in_fp32), pool)
        weights = setup.initial_weights(in_fp32, trainer.base, Path(workdir))
        params = load_model(weights, trainer.blueprint, trainer.trainer.policy, settings.train.seed)
        for name in names:
            run = setup.build(setup.resolve(with_settings(in_fp32, PRECISIONS[name])), pool)
            # `freeze` consumes what it gets.
            base = jax.tree.map(jnp.copy, params) if run.config.model.is_base_quantized else params
            published = run.publish(run.trainer.policy.freeze(base))
            rollouts = sample(run, published, texts[:samples])
            result = Result(
                precision=name,
                differences=differences(trainer, params, rollouts),
                perplexity=perplexity(run, published, texts),
                weight_bytes=bytes_of_one_device(published),
                cache_bytes=kv_bytes_per_token(run.sampler.engine),
            )
            results.append(result)
            # Each row takes minutes.
            print(format_row(result, results[0]), file=sys.stderr, flush=True)
            del published
    return results


def with_settings(settings: Config, values: dict[str, str | int]) -> Config:
    """Returns a copy of the settings with other values."""
    changed = copy.deepcopy(settings)
    for name, value in values.items():
        *sections, last = name.split(".")
        setattr(reduce(getattr, sections, changed), last, value)
    return changed


def encoded(run: setup.Run, texts: Sequence[Text]) -> list[np.ndarray]:
    """Returns the tokens of the prompts."""
    return [run.sampler.encode_prompt(text.problem) for text in texts]


def sample(run: setup.Run, published: qwen.Params, texts: Sequence[Text]) -> list[Rollout]:
    """Samples one response to each problem."""
    prompts = encoded(run, texts)
    problems = [EncodedProblem(text.problem, ids) for text, ids in zip(texts, prompts, strict=True)]
    rollouts, _ = run.sampler.sample_rollouts(
        published, problems, group_size=1, temperature=1.0, key=(0, 0), version=0
    )
    return rollouts


def differences(run: setup.Run, params: qwen.Params, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns log p of the sampler - log p of the trainer of all sampled tokens."""
    config, learner = run.config, run.trainer.policy
    one_each = replace(config.rollout, num_prompts=len(rollouts), group_size=1)
    train = replace(config.train, minibatches=1)
    shapes = row_shapes(train, one_each, learner.mesh, config.rollout.max_prompt_tokens)
    texts = [scored_sequence(item.tokens.ids, item.prompt_length) for item in rollouts]
    packed = pack([[text] for text in texts], *shapes)
    batches, counts = learner.put([only_scored(part) for part in packed])
    rows = learner.score(params, batches, counts, shapes.layouts)
    logps = [np.zeros(len(text.tokens), np.float32) for text in texts]
    for part, values in zip(packed, rows, strict=True):
        part.from_rows(collectives.fetch_global(values), logps)
    return np.concatenate(
        [
            item.tokens.logps[item.prompt_length :] - values[item.prompt_length :]
            for item, values in zip(rollouts, logps, strict=True)
        ]
    )


def perplexity(run: setup.Run, published: qwen.Params, texts: Sequence[Text]) -> float:
    """Returns the perplexity of the solutions after their prompts, by the decoder."""
    longest = run.config.rollout.max_new_tokens
    scorings = []
    for text, prompt in zip(texts, encoded(run, texts), strict=True):
        solution = run.sampler.tokenizer.encode(text.solution, add_special_tokens=False)
        tokens = np.concatenate([prompt, solution[:longest]]).astype(np.int32)
        scorings.append(Scoring(tokens, first=len(prompt)))
    score_all(run.sampler.engine, published, scorings)
    logps = np.concatenate([scoring.scores.logps for scoring in scorings])
    return float(np.exp(-np.mean(logps, dtype=np.float64)))


# -- the table -------------------------------------------------------------------------------------


def format_table(results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table."""
    header = ["precision", "mismatch", "99 %", "k3", "perplexity", "weights MB", "cache bytes"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *(format_row(result, results[0]) for result in results)])


def format_row(result: Result, first: Result) -> str:
    """Returns a result as a row of the table."""
    change = result.perplexity - first.perplexity
    cells = [
        result.precision,
        f"{result.mismatch:.2g}",
        f"{result.percentile:.2g}",
        f"{result.k3:.1e}",
        f"{result.perplexity:.3f} ({change:+.3f})",
        f"{result.weight_bytes / 1e6:.1f}",
        f"{result.cache_bytes:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def read_texts(path: Path, limit: int) -> list[Text]:
    """Returns the first `limit` texts of a file."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["problem"]}]
        gold: dict[str, JsonValue] = {"answer": row["answer"], "question": row["problem"]}
        texts.append(Text(Problem(row["id"], "gsm8k", prompt, gold), row["solution"]))
    return texts


def parse(arguments: Sequence[str]) -> tuple[Config, list[Text], int, list[str]]:
    """Returns the settings, the texts, the number of samples, and the precisions to measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--texts", required=True, type=Path, help="JSON lines")
    parser.add_argument("--limit", type=int, default=64, help="number of solutions")
    parser.add_argument("--samples", type=int, default=16, help="number of sampled responses")
    parser.add_argument("--only", nargs="+", choices=PRECISIONS, default=[], metavar="PRECISION")
    recipe = f"{recipe_files.RECIPES / 'gsm8k.py'}:smollm2-135m"
    parser.add_argument("--config", default=recipe, help="recipe")
    options, rest = parser.parse_known_args(arguments)
    settings = main.parse([f"--config={options.config}", *rest]).settings
    settings = with_settings(settings, {"model.path": options.model})
    texts = read_texts(options.texts, options.limit)
    return settings, texts, options.samples, options.only or list(PRECISIONS)


if __name__ == "__main__":
    with cli.user_errors():
        print(format_table(measure(*parse(cli.start_jax(sys.argv[1:])))))
