"""One RL step of training: from graded rollouts to the next State.

    pack     distributes whole groups over minibatches and packs each minibatch into rows, without
             the sequences that have no gradient
    score    computes log-probabilities under pi_old, the reference policy and a teacher, and the
             critic's values
    credit   computes advantages and returns on the host, over all rollouts of the step
    update   makes train.epochs passes over the minibatches, with one optimizer step for each
             minibatch

`update_on_rollouts` runs all four. Tests and benchmarks call the parts separately.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jzero import algorithms, terminal
from jzero.hosts import collectives, processes
from jzero.model import qwen
from jzero.training.credit import (
    Source,
    can_have_gradient,
    compute_credit,
    environment_weights,
    has_top_entropy,
    token_weights,
    training_sequences,
    zeros_like_tokens,
)
from jzero.training.draft_head import head_metrics
from jzero.training.exactness import check_exact
from jzero.training.heads import HostStats, Stats, expert_metrics, loss_metrics
from jzero.training.learner import Learner, fetch_rows
from jzero.training.offload import at_rest, on_device
from jzero.training.optimizer import learning_rate
from jzero.training.packing import PackedBatch, TrainingSequence
from jzero.training.teacher import Teacher, TeacherScores, credit_of_teacher, teacher_metrics
from jzero.training.trainer import Trainer, UpdateSettings, has_ce_weights
from jzero.types import Batch, Rollout, State


@dataclass
class Minibatch:
    """The sequences of one optimizer step, packed and on the mesh.

    The stages of an RL step fill the batches: packing sets tokens and weights, scoring adds
    log-probabilities and values, credit adds advantages.

    Weights are normalized over all members, including members that are not packed.
    """

    members: list[int]  # indices of its sequences among all sequences of the RL step
    chosen: list[int]  # the members that are packed because they can have a gradient
    packed: list[PackedBatch]  # on the host, one for each layout
    batches: tuple[Batch[jax.Array], ...]  # the batches of `packed`, on the mesh
    counts: jax.Array  # i32[layouts], the number of non-empty microbatches

    def set_rows(self, name: str, rows: Sequence[jax.Array | None]) -> None:
        """Sets a field of the batches from arrays [M, B, T] on the mesh, one for each layout."""
        self.batches = tuple(
            replace(batch, **{name: field}) for batch, field in zip(self.batches, rows, strict=True)
        )

    def set_values(
        self,
        learner: Learner,
        name: str,
        values: Sequence[np.ndarray] | Mapping[int, np.ndarray],
    ) -> None:
        """Sets a field of the batches from one f32[T] on the host for each chosen sequence."""
        chosen = [values[index] for index in self.chosen]
        rows = [
            collectives.put_global(packed.to_rows(chosen), learner.row_sharding)
            for packed in self.packed
        ]
        self.set_rows(name, rows)

    def get_values(self, name: str, values: Sequence[np.ndarray]) -> None:
        """Copies a field of the batches to the host, into one f32[T] for each sequence.

        `values` has an array for every sequence of the RL step. Only the arrays of chosen sequences
        are written.
        """
        self.copy_rows([getattr(batch, name) for batch in self.batches], values)

    def copy_rows(self, rows: Sequence[jax.Array], values: Sequence[np.ndarray]) -> None:
        """Copies arrays [M, B, T] on the mesh, one for each layout, into `values` on the host.

        `values` has the same form as in `get_values`.
        """
        chosen = [values[index] for index in self.chosen]
        fetch_rows(self.packed, rows, chosen)


@dataclass(frozen=True)
class Scores:
    """The models' outputs for every sequence before the first optimizer step.

    Each list has one f32[T] for each sequence, over its tokens. Arrays that the algorithm does not
    need on the host are 0.
    """

    old_logps: list[np.ndarray]
    ref_logps: list[np.ndarray]
    values: list[np.ndarray]
    entropies: list[np.ndarray]  # of the policy's distributions
    teacher: TeacherScores | None = None  # None without a teacher


@dataclass(frozen=True)
class Credit:
    """The result of scoring and credit for the rollouts of an RL step."""

    rollouts: list[Rollout]  # with their advantages
    metrics: dict[str, float]  # the teacher's metrics


@dataclass(frozen=True)
class UpdateResult:
    """The result of one RL step of training."""

    state: State
    metrics: dict[str, float]
    rollouts: list[Rollout]  # with their advantages
    batches: list[Batch[jax.Array]]  # all batches of the step's minibatches


def update_on_rollouts(
    trainer: Trainer,
    state: State,
    rollouts: list[Rollout],
    step: int,
    reference: qwen.Params | None = None,
    teacher: Teacher | None = None,
) -> UpdateResult:
    """Trains on the graded rollouts of RL step `step` >= 1.

    `rollouts` are whole groups in order, `group_size` for each prompt. `reference` has the
    parameters of the reference policy, and `teacher` scores tokens for distillation. Each is None
    if the algorithm does not use it. `state` is donated.
    """
    with trainer.clock("pack"):
        minibatches = make_minibatches(trainer, rollouts, step)

    with trainer.clock("score"):
        credit = score_and_credit(trainer, state, minibatches, rollouts, reference, teacher)

    with trainer.clock("update"):
        # With optimizer.offload the moments are on the devices only during the update.
        state = on_device(state)
        state, metrics = run_optimizer_steps(trainer, state, minibatches, step, rollouts)
        state = at_rest(trainer, state)

    metrics |= packing_metrics(minibatches) | credit.metrics
    batches = [batch for minibatch in minibatches for batch in minibatch.batches]
    return UpdateResult(state, metrics, credit.rollouts, batches)


# -- pack ------------------------------------------------------------------------------------------


def make_minibatches(trainer: Trainer, rollouts: list[Rollout], step: int) -> list[Minibatch]:
    """Distributes whole groups over minibatches, in random order, and packs each minibatch.

    Sequences that cannot have a gradient are left out of the rows.
    """
    sequences, sources = training_sequences(rollouts, trainer.credit.sequence_per_turn)
    is_packed = can_have_gradient(rollouts, sequences, sources, trainer.credit)
    return [
        make_minibatch(trainer, sequences, groups, is_packed)
        for groups in divide_groups(
            trainer.updates,
            trainer.credit.group_size,
            [source.rollout for source in sources],
            step,
        )
    ]


def divide_groups(
    updates: UpdateSettings,
    group_size: int,
    sources: Sequence[int],
    step: int,
) -> list[list[list[int]]]:
    """Returns the groups of each minibatch. A group is a list of indices of sequences.

    `sources` has the index of the rollout that each sequence is taken from. Rollouts come in whole
    groups.
    """
    num_groups = (max(sources) + 1) // group_size
    group_members: list[list[int]] = [[] for _ in range(num_groups)]
    for index, source in enumerate(sources):
        group_members[source // group_size].append(index)

    # The order depends only on seed and step, so all hosts and a resumed run draw the same one.
    order = np.arange(num_groups)
    if updates.minibatches > 1:
        order = np.random.default_rng((updates.seed, step)).permutation(order)
    return [
        [group_members[group] for group in groups]
        for groups in np.array_split(order, updates.minibatches)
    ]


def make_minibatch(
    trainer: Trainer,
    sequences: list[Rollout],
    groups: list[list[int]],
    is_packed: np.ndarray | None = None,
) -> Minibatch:
    """Packs the sequences of `groups` (indices of `sequences`) and copies them to the mesh.

    `is_packed` is bool[S] over all sequences. Sequences where it is False count in the weights but
    have no place in a row. If it is None, all sequences are packed.
    """
    # Weights are computed before the members without a gradient are left out: leaving them out
    # must not change the weights of the others.
    members = [index for group in groups for index in group]
    weights = token_weights(sequences, members, trainer.algorithm.weight, trainer.credit)
    if is_packed is not None:
        groups = [[index for index in group if is_packed[index]] for group in groups]
        groups = [group for group in groups if group]
    chosen = [index for group in groups for index in group]

    def training_sequence(index: int) -> TrainingSequence:
        sequence = sequences[index]
        return TrainingSequence(
            tokens=sequence.tokens,
            prompt_length=sequence.prompt_length,
            weights=weights[index],
        )

    packed = trainer.pack([[training_sequence(index) for index in group] for group in groups])
    batches, counts = trainer.policy.put(packed)
    return Minibatch(members, chosen, packed, batches, counts)


# -- score and credit ------------------------------------------------------------------------------


def score_and_credit(
    trainer: Trainer,
    state: State,
    minibatches: Sequence[Minibatch],
    rollouts: list[Rollout],
    reference: qwen.Params | None = None,
    teacher: Teacher | None = None,
) -> Credit:
    """Scores all minibatches and sets the remaining fields that the loss reads.

    All scores are computed before the first optimizer step. Returns the rollouts with their
    advantages.
    """
    sequences, sources = training_sequences(rollouts, trainer.credit.sequence_per_turn)
    scores = score_minibatches(trainer, state, minibatches, sequences, reference)
    metrics: dict[str, float] = {}
    if algorithms.needs_teacher(trainer.algorithm):
        assert teacher is not None, "the algorithm needs a teacher"
        # `Clock` has no nested phases, so the teacher's time is moved out of "score" afterwards.
        start = time.perf_counter()
        teacher_scores = teacher.score(state, reference, minibatches, sequences)
        scores = replace(scores, teacher=teacher_scores)
        trainer.clock.move(time.perf_counter() - start, "score", "teacher")
        packed = [index for minibatch in minibatches for index in minibatch.chosen]
        metrics = teacher_metrics(teacher_scores, scores.old_logps, sequences, packed)
    rollouts = assign_credit(trainer, minibatches, rollouts, sequences, sources, scores)
    # Dispatch is asynchronous: without waiting, the clock would count this time as "update".
    jax.block_until_ready([minibatch.batches for minibatch in minibatches])
    return Credit(rollouts, metrics)


def score_minibatches(
    trainer: Trainer,
    state: State,
    minibatches: Sequence[Minibatch],
    sequences: list[Rollout],
    reference: qwen.Params | None,
) -> Scores:
    """Sets the old_logps, ref_logps and old_values that the algorithm reads in the minibatches.

    Returns the scores that `assign_credit` reads on the host.
    """
    algorithm = trainer.algorithm
    scores = Scores(
        old_logps=zeros_like_tokens(sequences),
        ref_logps=zeros_like_tokens(sequences),
        values=zeros_like_tokens(sequences),
        entropies=zeros_like_tokens(sequences),
    )

    def score(
        learner: Learner,
        params: qwen.Params,
        minibatch: Minibatch,
        replays_sampler: bool = False,
    ) -> list[jax.Array]:
        batches = minibatch.batches
        # Only the policy repeats the sampler's choices (kept tokens and routes). The reference
        # policy and the critic use the full vocabulary and their own MoE routing.
        if trainer.tracks and not replays_sampler:
            batches = tuple(replace(batch, tracks={}) for batch in batches)
        return learner.score(params, batches, minibatch.counts, trainer.layouts)

    def score_policy(minibatch: Minibatch) -> list[jax.Array]:
        return score(trainer.policy, trainer.policy.weights(state), minibatch, replays_sampler=True)

    for minibatch in minibatches:
        # The sampler's log-probs are already packed and need no forward pass.
        if algorithm.old_policy == "sampler":
            sampler_logps = [batch.sampler_logps for batch in minibatch.batches]
            minibatch.set_rows("old_logps", sampler_logps)
        elif trainer.needs_old_logps:
            minibatch.set_rows("old_logps", score_policy(minibatch))
        if algorithms.needs_reference(algorithm):
            assert reference is not None, "the algorithm needs a reference policy"
            minibatch.set_rows("ref_logps", score(trainer.policy, reference, minibatch))
        if trainer.critic is not None and state.critic is not None:
            values = score(trainer.critic, trainer.critic.weights(state.critic), minibatch)
            minibatch.set_rows("old_values", values)

        # Copies to the host wait for the devices, so only what credit needs is copied.
        if algorithm.kl_reward or algorithms.needs_teacher(algorithm):
            minibatch.get_values("old_logps", scores.old_logps)
        if algorithm.kl_reward:
            minibatch.get_values("ref_logps", scores.ref_logps)
        if trainer.critic is not None:
            minibatch.get_values("old_values", scores.values)
        if algorithm.top_entropy < 1:
            weights = trainer.policy.weights(state)
            data = minibatch.batches, minibatch.counts, trainer.layouts
            minibatch.copy_rows(trainer.policy.entropies(weights, *data), scores.entropies)
    return scores


def assign_credit(
    trainer: Trainer,
    minibatches: Sequence[Minibatch],
    rollouts: list[Rollout],
    sequences: list[Rollout],
    sources: list[Source],
    scores: Scores,
) -> list[Rollout]:
    """Sets advantages, returns, and the weights of the other loss terms in the minibatches.

    Returns the rollouts with the mean of their advantages.
    """
    algorithm, settings = trainer.algorithm, trainer.credit

    # The KL penalty is the estimator k1, log pi_old - log pi_ref.
    penalties = [
        algorithm.kl_reward * (old - ref)
        for old, ref in zip(scores.old_logps, scores.ref_logps, strict=True)
    ]
    # Credit is computed over rollouts, scores and minibatches are over sequences: with
    # train.sequence_per_turn a rollout has several sequences.
    advantages, returns = compute_credit(
        rollouts,
        settings,
        join_sequences(penalties, sequences, sources, rollouts),
        join_sequences(scores.values, sequences, sources, rollouts),
    )
    if scores.teacher is not None:
        parts = credit_of_teacher(
            scores.teacher, scores.old_logps, sequences, algorithm.distillation
        )
        teacher_parts = join_sequences(parts, sequences, sources, rollouts)
        advantages = [
            advantage + part for advantage, part in zip(advantages, teacher_parts, strict=True)
        ]

    sequence_advantages = split_rollouts(advantages, sequences, sources)
    sequence_returns = split_rollouts(returns, sequences, sources)
    for minibatch in minibatches:
        if algorithm.rl_coef and algorithm.top_entropy < 1:
            # An advantage of 0 removes a token: its loss and gradient are then 0.
            is_top = has_top_entropy(sequences, minibatch.members, scores.entropies, algorithm)
            top_advantages = {
                index: sequence_advantages[index] * mask for index, mask in is_top.items()
            }
            minibatch.set_values(trainer.policy, "advantages", top_advantages)
        elif algorithm.rl_coef:
            minibatch.set_values(trainer.policy, "advantages", sequence_advantages)
        if trainer.critic is not None:
            minibatch.set_values(trainer.policy, "returns", sequence_returns)
        # Loss terms with other weights than the RL loss.
        if algorithm.kl.coef and algorithm.kl.weight is not None:
            weights = token_weights(sequences, minibatch.members, algorithm.kl.weight, settings)
            minibatch.set_values(trainer.policy, "kl_weights", weights)
        if algorithm.environment_coef:
            weights = environment_weights(sequences, minibatch.members, settings.sequence_per_turn)
            minibatch.set_values(trainer.policy, "environment_weights", weights)
        if has_ce_weights(algorithm):
            weight = algorithm.cross_entropy.weight or algorithm.weight
            only_correct = algorithm.cross_entropy.tokens == "correct"
            weights = token_weights(sequences, minibatch.members, weight, settings, only_correct)
            minibatch.set_values(trainer.policy, "ce_weights", weights)

    return [
        replace(rollout, advantage=mean_of_sampled(rollout, values), advantages=values)
        for rollout, values in zip(rollouts, advantages, strict=True)
    ]


def mean_of_sampled(rollout: Rollout, values: np.ndarray) -> float:
    """Returns the mean over the sampled tokens; 0 if an agent has failed without any."""
    sampled = rollout.tokens.sampled
    return float(values[sampled].mean()) if sampled.any() else 0.0


def join_sequences(
    values: Sequence[np.ndarray],
    sequences: Sequence[Rollout],
    sources: Sequence[Source],
    rollouts: Sequence[Rollout],
) -> list[np.ndarray]:
    """Moves values of the sampled tokens of sequences to the rollouts they are taken from.

    With train.sequence_per_turn the sequences of one rollout overlap, but each token is sampled in
    only one sequence.
    """
    joined = zeros_like_tokens(rollouts)
    for sequence_values, sequence, source in zip(values, sequences, sources, strict=True):
        target = source.part(joined, len(sequence_values))
        sampled = sequence.tokens.sampled
        target[sampled] = sequence_values[sampled]
    return joined


def split_rollouts(
    values: Sequence[np.ndarray],
    sequences: Sequence[Rollout],
    sources: Sequence[Source],
) -> list[np.ndarray]:
    """Returns each rollout's values for its sequences: the reverse of `join_sequences`.

    A sequence is the beginning of its rollout, or a branch of it.
    """
    return [
        source.part(values, len(sequence.tokens))
        for sequence, source in zip(sequences, sources, strict=True)
    ]


# -- update ----------------------------------------------------------------------------------------


def run_optimizer_steps(
    trainer: Trainer,
    state: State,
    minibatches: Sequence[Minibatch],
    step: int,
    rollouts: list[Rollout] | None = None,
) -> tuple[State, dict[str, float]]:
    """Makes train.epochs passes over the minibatches. Returns the next State and metrics.

    During the first critic.warmup_steps RL steps only the critic is trained. With model.exact and
    `rollouts`, the log-probabilities of the first minibatch are compared with the sampler's.

    Raises:
        InexactError: with model.exact, a log-probability differs from the sampler's.
    """
    updates = trainer.updates
    trains_policy = trainer.critic is None or step > updates.critic_warmup

    # Each learner updates, and donates, only its part of the state.
    policy_state, critic_state = replace(state, critic=None), state.critic
    policy_stats: list[Stats] = []
    critic_stats: list[Stats] = []
    policy_lr = 0.0
    first_logps: list[jax.Array | None] = []
    for epoch in range(updates.epochs):
        for number, minibatch in enumerate(minibatches):
            data = minibatch.batches, minibatch.counts, trainer.layouts
            # Learning rates depend on the number of optimizer steps since the start of the run.
            optimizer_step = ((step - 1) * updates.epochs + epoch) * updates.minibatches + number

            if trains_policy:
                policy_lr = learning_rate(updates.policy, optimizer_step, updates.total_steps)
                is_first = epoch == 0 and number == 0
                # The sampler's log-probs differ from the trainer's, even before the first step.
                is_on_policy = is_first and trainer.algorithm.old_policy == "trainer"
                policy_state, stats, logps = trainer.policy.update_with_logps(
                    policy_state, *data, policy_lr, is_on_policy
                )
                policy_stats.append(stats)
                first_logps = first_logps or logps

            if trainer.critic is not None and critic_state is not None:
                critic_lr = learning_rate(updates.critic, optimizer_step, updates.total_steps)
                critic_state, stats = trainer.critic.update(critic_state, *data, critic_lr)
                critic_stats.append(stats)

    # The steps above are only dispatched: the devices finish them one after the other.
    all_stats = critic_stats if trainer.critic is not None else policy_stats
    with terminal.phase("update", total=len(all_stats)) as phase:
        for stats in all_stats:
            jax.block_until_ready(stats)
            phase.advance()
    host_stats = jax.device_get((policy_stats, critic_stats))
    metrics = update_metrics(*host_stats) | {"optimizer/lr": policy_lr}
    if updates.checks_logps and rollouts is not None and first_logps:
        metrics |= compare_with_sampler(trainer, minibatches[0], first_logps, rollouts, step)
    return replace(policy_state, critic=critic_state), metrics


def compare_with_sampler(
    trainer: Trainer,
    minibatch: Minibatch,
    logps: Sequence[jax.Array | None],
    rollouts: list[Rollout],
    step: int,
) -> dict[str, float]:
    """Compares the log-probabilities of the first optimizer step with the sampler's.

    Returns the number of compared tokens as a metric. Raises InexactError if any token differs.
    """
    rows = [collectives.fetch_global(part) for part in logps if part is not None]
    sequences, _ = training_sequences(rollouts, trainer.credit.sequence_per_turn)
    compared = check_exact(minibatch.packed, rows, minibatch.chosen, sequences, step)
    return {"policy/exact_tokens": compared}


# -- metrics ---------------------------------------------------------------------------------------


def update_metrics(
    policy_stats: Sequence[HostStats],
    critic_stats: Sequence[HostStats],
) -> dict[str, float]:
    """Returns the metrics of an RL step from the stats of its optimizer steps.

    Those of the losses are as `algorithms.metrics` defines them. Norms and losses are means over
    optimizer steps.
    """
    metrics = loss_metrics(policy_stats) | loss_metrics(critic_stats)
    if critic_stats:
        metrics["critic/grad_norm"] = step_mean(critic_stats, "grad_norm")
        metrics["critic/skipped"] = step_mean(critic_stats, "skipped")
    if policy_stats:
        metrics["optimizer/grad_norm"] = step_mean(policy_stats, "grad_norm")
        metrics["optimizer/skipped"] = step_mean(policy_stats, "skipped")
        metrics["optimizer/loss"] = step_mean(policy_stats, "loss")
    return metrics | expert_metrics(policy_stats) | head_metrics(policy_stats)


def step_mean(stats: Sequence[HostStats], name: str) -> float:
    """Returns the mean of stat `name` over optimizer steps."""
    return float(np.mean([sums[name] for sums in stats]))


def packing_metrics(minibatches: Sequence[Minibatch]) -> dict[str, float]:
    """Returns an epoch's input tokens, share of padding, and share of sequences left out."""
    packed = [batch for minibatch in minibatches for batch in minibatch.packed]
    inputs = sum(batch.num_inputs for batch in packed)
    computed = sum(batch.computed_inputs for batch in packed)
    num_members = sum(len(minibatch.members) for minibatch in minibatches)
    num_packed = sum(len(minibatch.chosen) for minibatch in minibatches)
    return {
        "update/tokens": inputs,
        # If all sequences are left out, no input is computed.
        "update/padding": 1 - inputs / computed if computed else 0.0,
        "update/left_out": 1 - num_packed / num_members,
    }


def save_batches(path: Path, batches: Sequence[Batch[jax.Array]]) -> None:
    """Writes batches to an .npz file, to debug a loss that was not finite.

    Array `<field>_<number of the batch>` is [M, B, T]. Every process must call this function.
    """
    arrays: dict[str, np.ndarray] = {}
    for number, batch in enumerate(batches):
        fields = vars(batch) | batch.tracks
        del fields["tracks"]
        for name, array in fields.items():
            if array is not None:
                arrays[f"{name}_{number}"] = collectives.fetch_global(array)
    if processes.is_first_process():
        np.savez(path, allow_pickle=False, **arrays)
