"""Measures throughput where a few responses are much longer than the rest, by bounds of staleness.

    python benchmarks/tail.py [--max_staleness 0 1 2] [--steps 12] [--alpha 1.1] \\
        [--config.section.field=value ...]

The lengths of responses are drawn from a Pareto distribution, P(length > x) = (SHORT / x)^alpha up
to rollout.max_new_tokens. They depend on the problem only, so they are the same for every bound eta
(rollout.placement.max_staleness). Every eta runs twice from the same state. The second run, for
which all programs are compiled, is measured.

The script prints one JSON line for every eta: tokens per second over whole steps, the median
seconds of a step and of its parts, the use of the slots, the lengths of responses, what staleness
there was, the throughput as a multiple of that of the first eta (times_first), and the versions.
"""

import argparse
import json
import time
from dataclasses import replace

import numpy as np

from jzero import cli, config, setup
from jzero.decoder.sequence import EpisodeGroup
from jzero.loops.rl import sample_rollouts
from jzero.rollout.async_stream import RolloutStream
from jzero.rollout.sampler import Sampler
from jzero.run.environment import versions
from jzero.service.weights import load_full
from jzero.training.step import update_on_rollouts
from jzero.workers.pool import Pool

SHORT = 16  # tokens of the shortest response

Metrics = dict[str, float]


def defaults() -> config.Config:
    arch = config.tiny_arch(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
    )
    return config.Config(
        name="tail",
        model=config.ModelConfig(arch=arch, dtype="float32", logit_chunk=65536),
        task=config.TaskConfig(name="countdown", template="plain"),
        rollout=config.RolloutConfig(
            num_prompts=16,
            group_size=4,
            max_prompt_tokens=64,
            max_new_tokens=512,
            num_slots=64,
            page_size=16,
            decode_steps=16,
        ),
        train=config.TrainConfig(microbatch_tokens=2304, pack="longest", packs_per_row=0),
        eval=config.EvalConfig(every=0, problems=0),
        mesh=config.MeshConfig(data=-1, fsdp=1),
    )


class HeavyTailStream(RolloutStream):
    """A stream whose responses end at the length that is drawn for them, and nowhere else."""

    def __init__(self, sampler: Sampler, settings: config.Config, alpha: float) -> None:
        super().__init__(sampler, setup.training_problems(settings), settings.rollout)
        self.alpha = alpha

    def admit(self, version: int) -> list[EpisodeGroup]:
        admitted = super().admit(version)
        for group in admitted:
            lengths = self.response_lengths(group.problem_number, len(group.sequences))
            for sequence, length in zip(group.sequences, lengths, strict=True):
                sequence.length_limit = len(sequence.prompt_tokens) + length
        return admitted

    def response_lengths(self, problem_number: int, group_size: int) -> list[int]:
        """Draws the number of tokens of every response of a group."""
        generator = np.random.default_rng((0, problem_number))
        # NumPy draws from the Lomax distribution, which is Pareto's moved from 1 to 0.
        multiples = generator.pareto(self.alpha, group_size) + 1
        lengths = np.minimum(SHORT * multiples, self.rollout.max_new_tokens)
        return lengths.astype(int).tolist()


def run_steps(run: setup.Run, num_steps: int, alpha: float) -> list[Metrics]:
    """Trains `num_steps` steps from the initial state, and returns the metrics of every step."""
    run = replace(run, stream=HeavyTailStream(run.sampler, run.config, alpha))
    params = load_full(run.blueprint, run.trainer.policy, run.base.directory, run.config.train.seed)
    state = setup.initial_state(run, params)

    metrics_of_steps: list[Metrics] = []
    for step in range(1, num_steps + 1):
        begin = time.perf_counter()
        rollouts, metrics = sample_rollouts(run, state.params, step)
        result = update_on_rollouts(run.trainer, state, rollouts, step)
        state = result.state
        metrics |= result.metrics
        metrics |= run.clock.pop()
        metrics["seconds"] = time.perf_counter() - begin
        metrics_of_steps.append(metrics)
    return metrics_of_steps


def summarize(metrics_of_steps: list[Metrics]) -> Metrics:
    """Returns the figures that are printed, of the steps of one run."""

    def values(name: str) -> list[float]:
        # A step that trains on no token has no metrics of the policy.
        return [metrics[name] for metrics in metrics_of_steps if name in metrics]

    def mean(name: str) -> float:
        return float(np.mean(values(name)))

    def median(name: str) -> float:
        return float(np.median(values(name)))

    return {
        "tokens_per_second": sum(values("rollout/tokens")) / sum(values("seconds")),
        "step_seconds": median("seconds"),
        "sample_seconds": median("time/sample"),
        "update_seconds": median("time/update"),
        "slot_use": mean("rollout/slot_utilization"),
        "length": mean("rollout/length"),
        "longest": max(values("rollout/length_max")),
        "lag": mean("async/staleness"),
        "carried_tokens": mean("async/carried_tokens"),
        "mismatch": mean("policy/mismatch"),
    }


def measure(settings: config.Config, num_steps: int, alpha: float) -> Metrics:
    """Returns the figures of the bound of staleness in `settings`."""
    with Pool(settings.task.grade_workers) as pool:
        run = setup.build(setup.resolve(settings), pool)
        engine = run.sampler.engine
        # No token ends a response.
        engine.program_settings = replace(engine.program_settings, stop_ids=())
        run_steps(run, num_steps, alpha)  # compiles
        metrics_of_steps = run_steps(run, num_steps, alpha)
    return {"eta": settings.rollout.max_staleness} | summarize(metrics_of_steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--max_staleness", type=int, nargs="+", default=[0, 1, 2], help="bounds to measure"
    )
    parser.add_argument("--steps", type=int, default=12, help="measured steps of every bound")
    parser.add_argument("--alpha", type=float, default=1.1, help="of the tail; smaller is heavier")
    args, rest = parser.parse_known_args()
    settings = cli.parse_settings(defaults(), rest)
    cli.start_jax([])

    first_throughput = None
    for max_staleness in args.max_staleness:
        rollout = replace(settings.rollout, placement=config.Together(max_staleness))
        figures = measure(replace(settings, rollout=rollout), args.steps, args.alpha)
        throughput = figures["tokens_per_second"]
        if first_throughput is None:
            first_throughput = throughput
        times_first = {"times_first": throughput / first_throughput}
        print(json.dumps(figures | times_first | {"versions": versions()}))


if __name__ == "__main__":
    main()
