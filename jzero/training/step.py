"""From graded rollouts to the next state: rewards, advantages, packed batches, scores, optimizer steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jzero import algorithms, config
from jzero.distributed import collectives
from jzero.errors import UserError
from jzero.model import qwen
from jzero.run.clock import Clock
from jzero.training import learner
from jzero.training.credit import (
    make_episodes,
    spread_over_tokens,
    token_weights,
    training_sequences,
)
from jzero.training.optimizer import learning_rate
from jzero.training.packing import INTEGER_FIELDS, PackedBatch, TrainingSequence, make_layouts, pack
from jzero.types import Batch, Rollout, RowLayout, State


@dataclass
class Trainer:
    """What an update uses and does not change."""

    config: config.Config
    policy: learner.Learner
    critic: learner.Learner | None
    layouts: list[RowLayout]
    rows: list[int]  # of a microbatch, by layout
    microbatches: list[int]  # of an optimizer step at most, by layout
    reference: qwen.Params | None = None
    clock: Clock = field(default_factory=Clock)


@dataclass
class Minibatch:
    """One optimizer step's share of the sequences of `sequences`, which are the rollouts but where train.sequence_per_turn."""

    chosen: list[int]  # their indices
    packed: list[PackedBatch]
    batches: tuple[Batch, ...]  # of `packed`, on the mesh
    counts: jax.Array

    def fill(
        self,
        learner: learner.Learner,
        name: str,
        arrays: Sequence[np.ndarray] | Mapping[int, np.ndarray],
    ) -> None:
        """Set a field of the batches from one f32[T] a sequence, of all of them or of the part's own."""
        mine = [arrays[i] for i in self.chosen]
        self.set(name, [collectives.put_global(p.fill(mine), learner.rows) for p in self.packed])

    def set(self, name: str, values) -> None:
        self.batches = tuple(
            replace(b, **{name: x}) for b, x in zip(self.batches, values, strict=True)
        )


def make_trainer(
    config: config.Config, model: qwen.QwenConfig, critic: qwen.QwenConfig | None, mesh: Mesh
) -> Trainer:
    train = config.train
    shapes = make_layouts(
        config.rollout.max_prompt_tokens,
        train.pack_length or config.rollout.longest_continuation,
        train.pack_buckets,
        train.packs_per_row,
    )
    groups = config.rollout.num_prompts // train.minibatches
    each = config.rollout.group_size * (config.rollout.max_turns if train.sequence_per_turn else 1)
    most = [
        groups * -(-each // layout.slots) for layout in shapes
    ]  # rows: a slot for every sequence
    rows = [microbatch_rows(config, mesh, layout) for layout in shapes]
    microbatches = [-(-m // r) for m, r in zip(most, rows, strict=True)]
    learners = (
        learner.policy_learner(model, config, mesh),
        learner.critic_learner(critic, config, mesh) if critic else None,
    )
    return Trainer(config, *learners, shapes, rows, microbatches)


def microbatch_rows(config: config.Config, mesh: Mesh, layout: RowLayout) -> int:
    """Rows of a microbatch: as many as train.microbatch_tokens hold, a multiple of the devices that split rows."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.train.microbatch_tokens // (layout.tokens * shards) * shards
    if rows == 0:
        raise UserError(
            f"train.microbatch_tokens={config.train.microbatch_tokens} holds less than one row of {layout.tokens} tokens on each of {shards} "
            f"devices; set it to at least {layout.tokens * shards}, or lower train.packs_per_row"
        )
    return rows


def abstract_batches(trainer: Trainer) -> tuple[Batch, ...]:
    """Shapes of the batches that an optimizer step sees: what `make_parts` packs and `score` sets."""
    algorithm = trainer.config.algorithm
    named = {
        "old_logps": algorithm.old_policy == "sampler" or needs_old_logps(trainer.config),
        "ref_logps": algorithms.needs_reference(algorithm),
        "kl_weights": algorithm.kl_coef and algorithm.kl_weight,
        "old_values": trainer.critic,
        "returns": trainer.critic,
    }
    floats = [
        "weights",
        "sampler_logps",
        "advantages",
        *(name for name, used in named.items() if used),
    ]
    types = dict.fromkeys(INTEGER_FIELDS, np.int32) | dict.fromkeys(floats, np.float32)
    shapes = zip(
        trainer.microbatches,
        trainer.rows,
        (layout.tokens for layout in trainer.layouts),
        strict=True,
    )
    struct = jax.ShapeDtypeStruct
    return tuple(
        Batch(**{name: struct(shape, dtype) for name, dtype in types.items()}) for shape in shapes
    )


def needs_old_logps(config: config.Config) -> bool:
    """Whether the trainer computes log-probs before the first optimizer step."""
    algorithm, train = config.algorithm, config.train
    return algorithm.old_policy == "trainer" and (
        train.minibatches * train.epochs > 1 or algorithm.kl_reward > 0
    )


def update_on_rollouts(trainer: Trainer, state: State, rollouts: list[Rollout], step: int):
    """`epochs` passes over the rollouts, `minibatches` optimizer steps each -> state, metrics, batches, rollouts."""
    train, clock = trainer.config.train, trainer.clock
    with clock("pack"):
        parts = make_minibatches(trainer, rollouts, step)
    with clock("score"):
        rollouts = score_minibatches(trainer, state, parts, rollouts)
    with clock("update"):
        critic_only = trainer.critic is not None and step <= trainer.config.critic.warmup_steps
        policy_state, critic_state = replace(state, critic=None), state.critic
        stats, critic_stats, lr = [], [], 0.0
        horizon = train.steps * train.epochs * train.minibatches
        for epoch in range(train.epochs):
            for n, part in enumerate(parts):
                index = ((step - 1) * train.epochs + epoch) * train.minibatches + n
                rate = lambda settings: learning_rate(settings, index, horizon)  # noqa: B023
                arguments = part.batches, part.counts, trainer.layouts
                if not critic_only:
                    lr = rate(trainer.config.optimizer)
                    fresh = epoch == n == 0 and trainer.config.algorithm.old_policy == "trainer"
                    policy_state, sums = trainer.policy.update(policy_state, *arguments, lr, fresh)
                    stats.append(sums)
                if trainer.critic is not None and critic_state is not None:
                    settings = trainer.config.critic.optimizer
                    critic_state, sums = trainer.critic.update(
                        critic_state, *arguments, rate(settings)
                    )
                    critic_stats.append(sums)
        values = update_metrics(*jax.device_get((stats, critic_stats)))
    packed = [p for part in parts for p in part.packed]
    real, paid = sum(p.real for p in packed), sum(p.count * p.batch.tokens[0].size for p in packed)
    values |= {"optimizer/lr": lr, "update/tokens": real, "update/padding": 1 - real / paid}
    batches = [b for part in parts for b in part.batches]
    return replace(policy_state, critic=critic_state), values, batches, rollouts


def make_minibatches(trainer: Trainer, rollouts: list[Rollout], step: int) -> list[Minibatch]:
    """Whole groups in random order, packed, on the mesh."""
    train, group = trainer.config.train, trainer.config.rollout.group_size
    order = np.arange(len(rollouts) // group)
    rows, source = training_sequences(rollouts, trainer.config)
    of_prompt = [np.flatnonzero(np.array(source) // group == p).tolist() for p in order]
    if train.minibatches > 1:
        order = np.random.default_rng((train.seed, step)).permutation(order)
    parts = []
    for prompts in np.array_split(order, train.minibatches):
        chosen = [i for p in prompts for i in of_prompt[p]]
        weights = token_weights(rows, chosen, trainer.config.algorithm.weight, trainer.config)
        item = lambda i: TrainingSequence(
            rows[i].tokens, rows[i].prompt_length, weights[i], rows[i].logps
        )  # noqa: B023
        groups = [list(map(item, of_prompt[p])) for p in prompts]
        packed = pack(groups, trainer.layouts, trainer.rows, trainer.microbatches)
        parts.append(Minibatch(chosen, packed, *trainer.policy.put(packed)))
    return parts


def score_minibatches(
    trainer: Trainer, state: State, parts: list[Minibatch], rollouts: list[Rollout]
) -> list[Rollout]:
    """Set what the loss needs to know before the first optimizer step. -> the rollouts with their advantages."""
    algorithm, policy = trainer.config.algorithm, trainer.policy
    rows, source = training_sequences(rollouts, trainer.config)
    blank = lambda each: [np.zeros(len(rollout.tokens), np.float32) for rollout in each]
    old, ref, values = blank(rows), blank(rows), blank(rows)
    for part in parts:
        run = lambda learner, params: learner.score(
            params, part.batches, part.counts, trainer.layouts
        )  # noqa: B023
        if algorithm.old_policy == "sampler":
            part.set("old_logps", [batch.sampler_logps for batch in part.batches])
        elif needs_old_logps(trainer.config):
            part.set("old_logps", run(policy, state.params))
        if trainer.reference is not None:
            part.set("ref_logps", run(policy, trainer.reference))
        if trainer.critic is not None and state.critic is not None:
            part.set("old_values", run(trainer.critic, state.critic.params))
        wanted = {"old_logps": old, "ref_logps": ref} if algorithm.kl_reward else {}
        wanted |= {"old_values": values} if trainer.critic is not None else {}
        for name, arrays in wanted.items():
            mine = [arrays[i] for i in part.chosen]
            for p, batch in zip(part.packed, part.batches, strict=True):
                p.read(collectives.fetch_global(getattr(batch, name)), mine)
    joined = []
    for arrays in ([algorithm.kl_reward * (o - r) for o, r in zip(old, ref, strict=True)], values):
        joined.append(blank(rollouts))
        for x, row, i in zip(arrays, rows, source, strict=True):
            joined[-1][i][: len(x)][row.sampled] = x[row.sampled]
    A, returns = algorithms.compute_advantages(make_episodes(rollouts, trainer.config, *joined), algorithm)
    cut = lambda x: [x[i][: len(row.tokens)] for row, i in zip(rows, source, strict=True)]
    each = spread_over_tokens(A, rollouts)
    fields = {"advantages": cut(each)}
    if trainer.critic is not None:
        fields["returns"] = cut(spread_over_tokens(returns, rollouts))
    for part in parts:
        for name, arrays in fields.items():
            part.fill(policy, name, arrays)
        if algorithm.kl_coef and algorithm.kl_weight:
            part.fill(
                policy,
                "kl_weights",
                token_weights(rows, part.chosen, algorithm.kl_weight, trainer.config),
            )
    jax.block_until_ready([part.batches for part in parts])
    return [
        replace(r, advantage=float(a[r.sampled].mean()))
        for r, a in zip(rollouts, each, strict=True)
    ]


def update_metrics(
    stats: list[dict[str, Any]], critic_stats: list[dict[str, Any]]
) -> dict[str, float]:
    """Means over trained tokens of all optimizer steps of the RL step; the mismatch is the first's, before any."""
    values: dict[str, float] = {}
    table = (  # of these steps: means over tokens, means over steps
        ("policy", stats, ("entropy", "clip_fraction", "ratio_shift", "correction", "kl"), ()),
        ("policy", stats[:1], ("mismatch",), ()),
        ("critic", critic_stats, ("value_loss", "value_clip_fraction"), ("grad_norm", "skipped")),
        ("optimizer", stats, (), ("grad_norm", "skipped", "loss")),
    )
    for prefix, steps, by_tokens, by_steps in table:
        tokens = max(sum(s["tokens"] for s in steps), 1.0)
        for name in (n for n in by_tokens if steps and n in steps[0]):
            values[f"{prefix}/{name.removeprefix('value_')}"] = float(
                sum(s[name] for s in steps) / tokens
            )
        for name in by_steps if steps else ():
            values[f"{prefix}/{name}"] = float(np.mean([s[name] for s in steps]))
    return values
