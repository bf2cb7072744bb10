"""Collects the graded rollouts of one RL step, from a stream or from new problems.

Synchronous runs draw the step's problems and sample them here. If algorithm.dynamic_sampling_rounds
is not 0, they go on with further problems until enough groups have rewards that differ (DAPO,
arXiv:2503.14476 §3.2). Asynchronous runs take the groups that their stream has ready.
"""

from collections.abc import Sequence

from jzero.config import Config
from jzero.distributed import collectives, interrupt
from jzero.errors import UserError
from jzero.model import qwen
from jzero.rollout.async_stream import RolloutStream
from jzero.rollout.failed_gradings import check_gradings
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.rollout.sampler import Sampler
from jzero.rollout.sequence import DecodeCounters
from jzero.run.clock import Clock
from jzero.tasks import find_task
from jzero.tasks.tools import episodes as tool_episodes
from jzero.types import Rollout, grade_of

# Round r of step s draws the problems of step s + r * ROUND_STRIDE. No run has so many steps.
ROUND_STRIDE = 10**6

# The rollouts of one problem.
Group = list[Rollout]


def collect_rollouts(
    sampler: Sampler,
    stream: RolloutStream | None,
    config: Config,
    weights: qwen.Params,
    step: int,
    clock: Clock,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
) -> tuple[list[Rollout], dict[str, float]]:
    """Returns the rollouts that RL step `step` trains on, and metrics of everything it sampled.

    `weights` are the decoder's, of version `step - 1`. If `check_stop` raises Interrupted while
    sequences are decoded, so do all hosts.

    The rollouts are whole groups of all hosts, in order: num_prompts * group_size of them, less the
    groups whose prompt was too long.

    If rounds of sampling run out before enough groups differ in their rewards, uniform groups fill
    the batch up: the number of groups stays the same, and so do the shapes of the programs.
    """
    num_prompts, group_size = config.rollout.num_prompts, config.rollout.group_size
    rounds = config.algorithm.dynamic_sampling_rounds
    grading_before = dict(sampler.pool.counters)
    counters = DecodeCounters()

    # Sample until enough groups differ.
    groups: list[Group] = []
    num_rounds = 0
    while num_rounds <= rounds and count_mixed(groups) < num_prompts:
        with clock("sample"):
            rollouts, round_counters = sample_round(
                sampler, stream, config, weights, step, num_rounds, check_stop
            )
        # Waiting for grades with nothing left to decode is time of grading, not of sampling.
        clock.move(round_counters.grading_seconds, "sample", "grade")
        with clock("grade"):
            rollouts = sampler.gather_rollouts(rollouts)
        counters.add(round_counters)
        groups += [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        num_rounds += 1

    # Metrics count everything that was sampled.
    sampled = [rollout for group in groups for rollout in group]
    metrics = rollout_metrics(sampled, group_size)
    if stream is not None:
        metrics |= stream.metrics(sampled, step - 1, counters)
    grades = [grade_of(rollout) for rollout in sampled]
    metrics |= find_task(config.task.name).metrics(config.task, grades)
    metrics |= tool_episodes.metrics(config.task)
    metrics["rollout/dropped_prompts"] = num_rounds * num_prompts - len(groups)
    grading = {
        f"grade/{name}": count - grading_before[name]
        for name, count in sampler.pool.counters.items()
    }
    metrics |= host_metrics(counters, grading)
    check_gradings(f"step {step}", sampled, config.task.max_failed_share)

    # Groups that differ come first; the sort is stable, so the order is otherwise kept.
    if rounds:
        metrics["rollout/rounds"] = num_rounds
        groups = sorted(groups, key=is_uniform)[:num_prompts]
    return [rollout for group in groups for rollout in group], metrics


def sample_round(
    sampler: Sampler,
    stream: RolloutStream | None,
    config: Config,
    weights: qwen.Params,
    step: int,
    round_number: int,
    check_stop: interrupt.StopCheck,
) -> tuple[list[Rollout], DecodeCounters]:
    """Returns this host's rollouts of one round, and what was decoded for them.

    Raises UserError if no prompt of the round fits rollout.max_prompt_tokens.
    """
    version = step - 1
    if stream is not None:
        return stream.collect(weights, version, check_stop)

    task, rollout = find_task(config.task.name), config.rollout
    key = (config.train.seed, step + round_number * ROUND_STRIDE)
    problems = task.train_problems(config.task, *key, rollout.num_prompts)
    encoded = sampler.encode_problems(problems)
    if not encoded:
        raise UserError(
            f"step {step}: every prompt is longer than "
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; raise it"
        )
    return sampler.sample_rollouts(
        weights,
        encoded,
        rollout.group_size,
        rollout.temperature,
        key,
        version,
        check_stop,
    )


def is_uniform(group: Group) -> bool:
    """Returns whether all rollouts of a group have the same score, so that no advantage differs.

    Rollouts whose grading failed have no score, and a group of such rollouts teaches nothing.
    """
    grades = [grade_of(rollout) for rollout in group]
    return len({grade.score for grade in grades if not grade.failed}) <= 1


def count_mixed(groups: Sequence[Group]) -> int:
    """Returns the number of groups that are not uniform."""
    return sum(not is_uniform(group) for group in groups)


def host_metrics(counters: DecodeCounters, grading: dict[str, int]) -> dict[str, float]:
    """Returns metrics of decoding and grading, summed over all hosts."""
    counts = collectives.sum_over_hosts(vars(counters) | grading)
    metrics = {
        "rollout/preempted": counts["preempted"],
        "rollout/slot_utilization": counts["decoded_tokens"] / max(counts["slot_steps"], 1),
    }
    # The number of gradings says nothing that the other metrics do not say.
    return metrics | {name: counts[name] for name in grading if name != "grade/graded"}
