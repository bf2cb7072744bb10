"""The `Trainer` of a run: its learners and the shapes of their packed rows.

Every shape is fixed before the first step. A run therefore compiles each program once, and
`jzero.plan` can compile the same programs on a machine without the devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero import algorithms
from jzero.clock import Clock
from jzero.config import (
    Config,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    num_kept,
)
from jzero.errors import UserError
from jzero.model import qwen
from jzero.model.architecture import track_sizes
from jzero.sharding.mesh import row_shards
from jzero.tokens import TRACKS, TrackShapes, recorded_tracks
from jzero.training.credit import CreditSettings
from jzero.training.exactness import check_can_be_exact, with_exact_ratio
from jzero.training.heads import Objective, rl_objective
from jzero.training.learner import Learner, critic_learner, policy_learner
from jzero.training.packing import (
    INTEGER_FIELDS,
    PackedBatch,
    TrainingSequence,
    layouts_of_lengths,
    make_layouts,
    num_rows,
    pack,
)
from jzero.types import Batch, RowLayout


class RowShapes(NamedTuple):
    """The shapes of packed rows, each with one entry for every layout."""

    layouts: list[RowLayout]
    rows: list[int]  # rows of a microbatch (B)
    microbatches: list[int]  # maximum microbatches of an optimizer step (M)


@dataclass(frozen=True)
class UpdateSettings:
    """The optimizer steps of a run."""

    policy: OptimizerConfig
    critic: OptimizerConfig
    minibatches: int = 1  # of every pass over the rollouts of an RL step
    epochs: int = 1  # passes over the rollouts of an RL step
    total_steps: int = 1  # optimizer steps of the run, for the learning rate
    seed: int = 0  # of the order of groups
    critic_warmup: int = 0  # RL steps that train only the critic
    checks_logps: bool = False  # model.exact: log-probs must equal the sampler's


@dataclass(frozen=True)
class Trainer:
    """The constant context of all training steps: settings, learners and row shapes."""

    credit: CreditSettings
    updates: UpdateSettings
    objective: Objective  # of the policy
    policy: Learner
    critic: Learner | None  # None if the algorithm's advantage needs no critic
    layouts: list[RowLayout]
    rows: list[int]  # rows of a microbatch (B), for each layout
    microbatches: list[int]  # maximum microbatches of an optimizer step (M), for each layout
    tracks: TrackShapes = ()  # the optional tracks of rollouts
    clock: Clock = field(default_factory=Clock)

    @property
    def algorithm(self) -> algorithms.Algorithm:
        """The algorithm as this run trains: in exact mode without a correction."""
        return self.credit.algorithm

    @property
    def needs_old_logps(self) -> bool:
        """Whether the log-probs under pi_old are computed before the first optimizer step."""
        # With a single optimizer step the policy is identical to pi_old, and the loss needs no old
        # log-probs. A KL penalty in the reward and a teacher always need them.
        algorithm = self.algorithm
        has_several_steps = self.updates.minibatches * self.updates.epochs > 1
        credit_needs_them = algorithm.kl_reward > 0 or algorithms.needs_teacher(algorithm)
        return algorithm.old_policy == "trainer" and (has_several_steps or credit_needs_them)

    def pack(self, groups: Sequence[Sequence[TrainingSequence]]) -> list[PackedBatch]:
        """Packs groups of sequences of one prompt each into the rows of an optimizer step."""
        return pack(groups, self.layouts, self.rows, self.microbatches, self.tracks)


def make_trainer(
    config: Config,
    model: qwen.QwenConfig,
    critic: qwen.QwenConfig | None,
    mesh: Mesh,
) -> Trainer:
    """Returns the trainer of a run. Compiles nothing.

    Raises UserError if train.microbatch_tokens is less than one row for each device, if model.exact
    is not supported for this model or mesh, or if router replay is on for a model without routes.
    """
    check_can_be_exact(config.model, model, mesh)
    check_routing_replay(model, config.rollout.routing_replay)
    shapes = row_shapes(config.train, config.rollout, mesh, config.rollout.max_prompt_tokens)
    credit = credit_settings(config)
    objective = rl_objective(credit.algorithm, config.rollout)
    seed = config.train.seed
    return Trainer(
        credit=credit,
        updates=update_settings(config),
        objective=objective,
        policy=policy_learner(model, config.model, config.optimizer, objective, mesh, seed),
        critic=critic_learner(
            critic, config.model, config.critic_optimizer, config.algorithm, mesh, seed
        )
        if critic
        else None,
        layouts=shapes.layouts,
        rows=shapes.rows,
        microbatches=shapes.microbatches,
        tracks=recorded_tracks(
            track_sizes(
                model, num_kept(credit.algorithm, config.rollout), config.rollout.routing_replay
            )
        ),
    )


def credit_settings(config: Config) -> CreditSettings:
    """Returns the settings of credit assignment of a run."""
    rewards = config.task.reward
    weights = rewards.weights or (1.0,) * len(rewards.functions)
    return CreditSettings(
        algorithm=with_exact_ratio(config.algorithm, config.model, config.rollout),
        group_size=config.rollout.group_size,
        max_turns=config.rollout.max_turns,
        max_new_tokens=config.rollout.max_new_tokens,
        sequence_per_turn=config.train.sequence_per_turn,
        unit=credit_unit(config.task),
        turn_discount=config.task.turn_discount,
        reward_weights=dict(zip(rewards.functions, weights, strict=True)),
    )


def credit_unit(task: TaskConfig) -> Literal["turn", "episode", "branch"]:
    """Returns what an advantage belongs to."""
    if not task.agent:
        return "turn"
    return "branch" if task.agent_credit == "branch" else "episode"


def update_settings(config: Config) -> UpdateSettings:
    """Returns the optimizer steps of a run."""
    train = config.train
    return UpdateSettings(
        policy=config.optimizer,
        critic=config.critic_optimizer,
        minibatches=train.minibatches,
        epochs=train.epochs,
        total_steps=train.steps * train.epochs * train.minibatches,
        seed=train.seed,
        critic_warmup=config.critic.warmup_steps,
        checks_logps=config.model.exact,
    )


def row_shapes(
    train: TrainConfig,
    rollout: RolloutConfig,
    mesh: Mesh,
    max_prompt_tokens: int,
) -> RowShapes:
    """Returns the shapes of the rows of an optimizer step for prompts of `max_prompt_tokens`.

    Raises UserError if train.microbatch_tokens is less than one row for each device.
    """
    layouts = row_layouts(train, rollout, max_prompt_tokens)
    # The worst case of packing: every sequence needs a separate slot.
    groups = rollout.num_prompts // train.minibatches
    sequences = sequences_of_group(train, rollout)
    max_rows = [groups * num_rows(sequences, layout) for layout in layouts]
    rows = [
        microbatch_rows(train, mesh, layout, most)
        for layout, most in zip(layouts, max_rows, strict=True)
    ]
    microbatches = [-(-row_count // size) for row_count, size in zip(max_rows, rows, strict=True)]
    return RowShapes(layouts, rows, microbatches)


def row_layouts(
    train: TrainConfig,
    rollout: RolloutConfig,
    max_prompt_tokens: int,
) -> list[RowLayout]:
    """Returns the layouts of rows for prompts of `max_prompt_tokens`, longest first."""
    # A row holds sequences of one group, so more packs than the group has would stay empty.
    packs = min(train.packs_per_row, sequences_of_group(train, rollout))
    if lengths := train.pack_lengths:
        return layouts_of_lengths(max_prompt_tokens, lengths, packs)
    longest = rollout.longest_continuation
    # Two lengths and not more: a program is compiled for every length.
    num_lengths = 2 if train.pack == "auto" and longest > 1 else 1
    return make_layouts(max_prompt_tokens, longest, num_lengths, packs)


def sequences_of_group(train: TrainConfig, rollout: RolloutConfig) -> int:
    """Returns the largest number of sequences that a group of rollouts trains on."""
    # With train.sequence_per_turn a rollout has up to max_turns sequences. Those of agents are not
    # counted: `packing.pack` makes room for more.
    return rollout.group_size * (rollout.max_turns if train.sequence_per_turn else 1)


def microbatch_rows(train: TrainConfig, mesh: Mesh, layout: RowLayout, most: int) -> int:
    """Returns the number of rows of a microbatch: the most that fit in train.microbatch_tokens.

    There are no more than `most`, the rows that an optimizer step can have, rounded up to a
    multiple of the number of devices that split rows. With train.microbatch_tokens=0 there are as
    many. Raises UserError if a microbatch would have no rows.
    """
    shards = row_shards(mesh)
    rows_of_step = -(-most // shards) * shards
    if not train.microbatch_tokens:
        return rows_of_step
    rows = min(rows_of_step, train.microbatch_tokens // (layout.tokens * shards) * shards)
    if rows == 0:
        raise UserError(
            f"train.microbatch_tokens={train.microbatch_tokens} holds less than one row of "
            f"{layout.tokens} tokens on each of {shards} devices; set it to at least "
            f"{layout.tokens * shards}, or lower train.packs_per_row"
        )
    return rows


def abstract_scored(
    shapes: RowShapes,
    sharding: NamedSharding,
) -> tuple[Batch[jax.ShapeDtypeStruct], ...]:
    """Returns the shapes of batches for scoring only, one for each layout."""
    batches = []
    for layout, rows, microbatches in zip(*shapes, strict=True):
        shape = (microbatches, rows, layout.tokens)
        integers = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        batches.append(Batch(**dict.fromkeys(INTEGER_FIELDS, integers)))
    return tuple(batches)


def has_ce_weights(algorithm: algorithms.Algorithm) -> bool:
    """Returns whether the cross-entropy has other token weights than the RL loss."""
    part = algorithm.cross_entropy
    return part.coef > 0 and (part.weight is not None or part.tokens == "correct")


def abstract_batches(trainer: Trainer) -> tuple[Batch[jax.ShapeDtypeStruct], ...]:
    """Returns the shapes of the batches of an optimizer step, one for each layout.

    The batches have the fields that `step.make_minibatches` and `step.score_and_credit` set.
    """
    # The fields that are None are part of a program's signature: they must be the same as in a
    # step, or the step compiles another program.
    algorithm = trainer.algorithm
    float_fields = ["weights", "sampler_logps"]
    if algorithm.rl_coef:
        float_fields.append("advantages")
    if algorithm.old_policy == "sampler" or trainer.needs_old_logps:
        float_fields.append("old_logps")
    if algorithms.needs_reference(algorithm):
        float_fields.append("ref_logps")
    if algorithm.kl.coef and algorithm.kl.weight is not None:
        float_fields.append("kl_weights")
    if algorithm.environment_coef:
        float_fields.append("environment_weights")
    if has_ce_weights(algorithm):
        float_fields.append("ce_weights")
    if trainer.critic is not None:
        float_fields += ["old_values", "returns"]

    batches = []
    for layout, rows, microbatches in zip(
        trainer.layouts, trainer.rows, trainer.microbatches, strict=True
    ):
        shape = (microbatches, rows, layout.tokens)
        integers = jax.ShapeDtypeStruct(shape, np.int32)
        floats = jax.ShapeDtypeStruct(shape, np.float32)
        fields = dict.fromkeys(INTEGER_FIELDS, integers) | dict.fromkeys(float_fields, floats)
        tracks = {
            name: jax.ShapeDtypeStruct((*shape, *track_shape), TRACKS[name].dtype)
            for name, track_shape in trainer.tracks
        }
        batches.append(Batch(**fields, tracks=tracks))
    return tuple(batches)


def check_routing_replay(model: qwen.QwenConfig, replays_routes: bool) -> None:
    """Raises UserError if the routes of a model without experts shall be replayed."""
    if replays_routes and not model.num_experts:
        raise UserError(
            f"rollout.routing_replay=True: model_type={model.model_type} has no experts; set it to "
            "False"
        )
