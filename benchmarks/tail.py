"""Whole-step throughput where a few responses are much longer than the rest, for several bounds of staleness.

    python benchmarks/tail.py [--max_staleness 0 1 2] [--steps 12] [--alpha 1.1] [--config.section.field=value ...]

Response lengths are drawn from a Pareto distribution, P(length > x) = (SHORT / x)^alpha up to rollout.max_new_tokens, by
request: the same for every eta. Every eta runs twice from the same state; the second time, when all programs are
compiled, is measured."""

import argparse
import json
import time
from dataclasses import replace

import numpy as np

from jzero import cli, config, setup, train
from jzero.grading.pool import Pool
from jzero.rollout.async_stream import RolloutStream
from jzero.rollout.sequence import EpisodeGroup
from jzero.run.environment import versions
from jzero.training.step import update_on_rollouts

SHORT = 16  # tokens of the shortest response


def defaults() -> config.Config:
    arch = config.ArchitectureConfig(
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
        train=config.TrainConfig(microbatch_tokens=2304, pack_buckets=1, packs_per_row=0),
        eval=config.EvalConfig(every=0, problems=0),
        mesh=config.MeshConfig(data=-1, fsdp=1),
    )


class HeavyTail(RolloutStream):
    """A stream whose responses end where a draw for their request says, and nowhere else."""

    alpha = 1.0

    def admit(self, version: int) -> list[EpisodeGroup]:
        new = super().admit(version)
        for group in new:
            draws = (
                np.random.default_rng((0, group.problem_number)).pareto(
                    self.alpha, len(group.sequences)
                )
                + 1
            )
            lengths = np.minimum(SHORT * draws, self.rollout.max_new_tokens).astype(int)
            for sequence, length in zip(group.sequences, lengths, strict=True):
                sequence.length_limit = len(sequence.prompt_tokens) + int(length)
        return new


def measure(settings: config.Config, steps: int, alpha: float) -> dict[str, float]:
    with Pool(settings.task.grade_workers) as pool:
        run = setup.build(settings, pool)
        engine = run.sampler.engine
        engine.program_settings = replace(engine.program_settings, stop_ids=())
        HeavyTail.alpha = alpha
        rows: list[dict[str, float]] = []
        for _ in range(2):
            run = replace(run, stream=HeavyTail(run.sampler, settings))
            state = setup.initial_state(
                run, run.trainer.policy.load_params(run.base.directory, run.config.train.seed)
            )
            rows = []
            for step in range(1, steps + 1):
                begin = time.perf_counter()
                rollouts, values = train.sample_rollouts(run, state.params, step)
                result = update_on_rollouts(run.trainer, state, rollouts, step)
                state = result.state
                values |= result.metrics
                rows.append(values | run.clock.pop() | {"seconds": time.perf_counter() - begin})
    mean = lambda name: float(np.mean([row[name] for row in rows]))
    return {
        "eta": settings.rollout.max_staleness,
        "tokens_per_second": sum(row["rollout/tokens"] for row in rows)
        / sum(row["seconds"] for row in rows),
        "step_seconds": float(np.median([row["seconds"] for row in rows])),
        "sample_seconds": float(np.median([row["time/sample"] for row in rows])),
        "update_seconds": float(np.median([row["time/update"] for row in rows])),
        "slot_use": mean("rollout/slot_utilization"),
        "length": mean("rollout/length"),
        "longest": max(row["rollout/length_max"] for row in rows),
        "lag": mean("async/staleness"),
        "carried_tokens": mean("async/carried_tokens"),
        "mismatch": mean("policy/mismatch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--alpha", type=float, default=1.1, help="of the tail; smaller is heavier")
    given, rest = parser.parse_known_args()
    settings = cli.parse_settings(defaults(), rest)
    cli.start_jax([])
    found = []
    for eta in given.max_staleness:
        found.append(
            measure(
                replace(settings, rollout=replace(settings.rollout, max_staleness=eta)),
                given.steps,
                given.alpha,
            )
        )
        ratio = found[-1]["tokens_per_second"] / found[0]["tokens_per_second"]
        print(json.dumps(found[-1] | {"times_first": ratio} | {"versions": versions()}))


if __name__ == "__main__":
    main()
