"""Collects the graded rollouts of one RL step, from a stream or from newly drawn problems.

Synchronous runs draw the step's problems and sample them here. If algorithm.dynamic_sampling_rounds
is not 0, they continue with further problems until enough groups have differing rewards (DAPO,
arXiv:2503.14476 §3.2). Asynchronous runs take the ready groups of their stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jzero.algorithms import Algorithm, Fixed, Ignore
from jzero.clock import Clock
from jzero.config import RolloutConfig
from jzero.decoder.sequence import DecodeCounters
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import UserError
from jzero.hosts import collectives, interrupt
from jzero.model import qwen
from jzero.rewards.trl_rewards import TrainerState
from jzero.rollout.async_stream import Stream, TrainingProblems
from jzero.rollout.failed_gradings import check_gradings
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.rollout.sampler import Sampler, with_turn_grades
from jzero.tasks import task_metrics
from jzero.types import Rollout, grade_of

# Round r of step s draws the problems of step s + r * ROUND_STRIDE: more steps than any run has.
ROUND_STRIDE = 10**6

# The rollouts of one problem.
Group = list[Rollout]


@dataclass(frozen=True)
class Collection:
    """The settings that collect the rollouts of a run's steps."""

    problems: TrainingProblems
    rollout: RolloutConfig
    algorithm: Algorithm
    steps: int  # of the run


def collect_rollouts(
    sampler: Sampler,
    stream: Stream | None,
    settings: Collection,
    weights: qwen.Params,
    step: int,
    clock: Clock,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
) -> tuple[list[Rollout], dict[str, float]]:
    """Returns the rollouts for RL step `step`, and metrics of all rollouts that were sampled.

    `weights` are of version `step - 1`: the decoder's, or the trainer's for separate jobs. If
    `check_stop` raises Interrupted on one host while sequences are decoded, all hosts raise.

    The rollouts are complete groups of all hosts, in order: num_prompts * group_size rollouts,
    minus the groups of prompts that were too long.

    If the rounds run out before enough groups have differing rewards, uniform groups fill up the
    batch, so that the number of groups and the shapes of the programs stay the same.
    """
    num_prompts, group_size = settings.rollout.num_prompts, settings.rollout.group_size
    task, rounds = settings.problems.task, settings.algorithm.dynamic_sampling_rounds
    # The pool counts over the whole run; a step reports the difference.
    grading_at_start = dict(sampler.pool.counters)
    state = trainer_state(settings.problems, settings.steps, step - 1)
    counters = DecodeCounters()

    # Sample until enough groups have differing rewards.
    groups: list[Group] = []
    num_rounds = 0
    while num_rounds <= rounds and count_mixed(groups) < num_prompts:
        with clock("sample"):
            rollouts, round_counters = sample_round(
                sampler, stream, settings, weights, step, num_rounds, check_stop
            )
        # Waiting for grades without anything to decode counts as grading time, not sampling time.
        clock.move(round_counters.grading_seconds, "sample", "grade")
        with clock("grade"):
            rollouts = sampler.gather_rollouts(rollouts, group_size, state)
        rollouts = with_truncation_rule(rollouts, settings.algorithm)
        counters.add(round_counters)
        groups += [rollouts[i : i + group_size] for i in range(0, len(rollouts), group_size)]
        num_rounds += 1

    # Metrics cover all sampled rollouts, including groups that are dropped below.
    sampled = [rollout for group in groups for rollout in group]
    metrics = rollout_metrics(sampled, group_size)
    if stream is not None:
        metrics |= stream.metrics(sampled, step - 1, counters)
    metrics |= task_metrics(task, sampled)
    metrics |= tool_episodes.metrics(task)
    metrics["rollout/dropped_prompts"] = num_rounds * num_prompts - len(groups)
    grading = {
        f"grade/{name}": count - grading_at_start[name]
        for name, count in sampler.pool.counters.items()
    }
    metrics |= host_metrics(counters, grading)
    check_gradings(f"step {step}", sampled, task.max_failed_share)

    # Groups with differing rewards come first; the sort is stable, so their order is kept.
    if rounds:
        metrics["rollout/rounds"] = num_rounds
        groups = sorted(groups, key=is_uniform)[:num_prompts]
    return [rollout for group in groups for rollout in group], metrics


def trainer_state(problems: TrainingProblems, steps: int, steps_done: int) -> TrainerState:
    """Returns the trainer state for reward functions in TRL's form.

    steps_done: RL steps of the `steps` of the run.
    """
    number = problems.number
    epoch = steps_done * problems.num_prompts / number if number else None
    return TrainerState(steps_done, steps, epoch)


def sample_round(
    sampler: Sampler,
    stream: Stream | None,
    settings: Collection,
    weights: qwen.Params,
    step: int,
    round_number: int,
    check_stop: interrupt.StopCheck,
) -> tuple[list[Rollout], DecodeCounters]:
    """Returns this host's rollouts of one round, and the decode counters.

    Raises UserError if no prompt of the round fits rollout.max_prompt_tokens.
    """
    version = step - 1
    if stream is not None:
        return stream.collect(weights, version, check_stop)

    rollout = settings.rollout
    # Each round draws different problems and different noise.
    source = step + round_number * ROUND_STRIDE
    encoded = sampler.encode_problems(settings.problems.draw(source))
    if not encoded:
        raise UserError(
            f"step {step}: every prompt is longer than "
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; raise it"
        )
    return sampler.sample_rollouts(
        weights,
        encoded,
        group_size=rollout.group_size,
        temperature=rollout.temperature,
        key=(settings.problems.seed, source),
        version=version,
        check_stop=check_stop,
    )


def with_truncation_rule(rollouts: list[Rollout], algorithm: Algorithm) -> list[Rollout]:
    """Returns rollouts whose truncated turns have the score that algorithm.truncated gives them.

    Metrics, samples and the choice of groups then show the scores that are trained on. The verdicts
    and the values of reward functions stay as they are.
    """
    rule = algorithm.truncated
    if not isinstance(rule, Fixed | Ignore):
        return rollouts
    scored = []
    for rollout in rollouts:
        grades = [grade_of(turn) for turn in rollout.turns]
        for number, turn in enumerate(rollout.turns):
            if turn.finish_reason == "length":
                grades[number] = replace(grades[number], score=rule.score)
        scored.append(with_turn_grades(rollout, grades))
    return scored


def is_uniform(group: Group) -> bool:
    """Returns whether all rollouts of a group have the same score, so that no advantages differ."""
    # Rollouts without a score because their grading failed do not count: they provide no training
    # signal.
    grades = [grade_of(rollout) for rollout in group]
    return len({grade.score for grade in grades if not grade.failed}) <= 1


def count_mixed(groups: Sequence[Group]) -> int:
    """Returns the number of groups that are not uniform."""
    return sum(not is_uniform(group) for group in groups)


def host_metrics(counters: DecodeCounters, grading: dict[str, int]) -> dict[str, float]:
    """Returns metrics of decoding and grading, summed over all hosts."""
    counts = collectives.sum_over_hosts(vars(counters) | grading)
    # With drafts a slot may produce several tokens in one pass of the model.
    used_steps = counts["draft_passes"] or counts["decoded_tokens"]
    metrics = {
        "rollout/preempted": counts["preempted"],
        "rollout/slot_utilization": used_steps / max(counts["slot_steps"], 1),
    }
    if counts["draft_passes"]:
        metrics["rollout/drafts_accepted"] = counts["accepted_tokens"] / max(
            counts["drafted_tokens"], 1
        )
        metrics["rollout/tokens_per_pass"] = counts["decoded_tokens"] / counts["draft_passes"]
    if counts["cached_tokens"]:
        num_tokens = counts["cached_tokens"] + counts["prefill_tokens"]
        metrics["rollout/prefix_cache_hits"] = counts["cached_tokens"] / num_tokens
    if counts["agent_branches"]:
        names = ("responses", "branches", "refused", "unread_tokens", "repeated_tokens")
        metrics |= {f"agent/{name}": counts[f"agent_{name}"] for name in names}
    # grade/graded is left out: the other metrics already imply the number of gradings.
    return metrics | {name: counts[name] for name in grading if name != "grade/graded"}
