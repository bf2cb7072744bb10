"""The heads of a `Learner`: outputs and losses of the policy and the critic.

A `Learner` runs the model's body and is independent of the head. The head converts hidden states to
outputs for each target, and outputs to weighted loss terms:

    policy head   log-probability of every target and entropy  -> the policy loss
    critic head   value of the state before every target       -> the value loss
    token head    log-probability of K targets of a position   -> a loss that is data
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jzero import algorithms
from jzero.algorithms.losses import (
    environment_loss,
    mismatch_metrics,
    policy_loss,
    value_loss,
)
from jzero.algorithms.metrics import loss_metric
from jzero.algorithms.ratios import SequenceSum
from jzero.config import ModelConfig, RolloutConfig, drafts
from jzero.model import output_adapter, qwen
from jzero.model.arithmetic import choose as choose_arithmetic
from jzero.model.logprobs import token_logps
from jzero.model.softmax import by_index, by_mask
from jzero.sharding.mesh import is_data_parallel, num_slices, weight_shards
from jzero.types import Batch, RowLayout

# Sums over trained tokens, by name. See `Learner.update`.
Stats = dict[str, jax.Array]
HostStats = Mapping[str, np.ndarray]  # the same, fetched from the devices

# The number of tokens that a metric counts, by `LossMetric.tokens`.
COUNTS = {"trained": "tokens", "environment": "environment_tokens"}
SQUARED = "_squared"  # the end of the name of a sum of squares

# (outputs of the head, batch [B, T], sequence_sum, is_on_policy) -> weighted loss terms f32[B, T],
# and values of f32[B, T] each, which `summed_stats` reduces. The terms of a batch are only summed:
# `Batch.weights` are normalized over the whole optimizer step.
Loss = Callable[
    [tuple[jax.Array, ...], Batch[jax.Array], SequenceSum, jax.Array],
    tuple[jax.Array, Mapping[str, jax.Array]],
]


class Head(NamedTuple):
    """Two functions that are traced into the programs of a `Learner`."""

    # (params, hidden [B, T, E], targets i32[B, T], kept i32[B, T, K] or None) -> f32[B, T] each;
    # `score` returns the first output.
    outputs: Callable[[qwen.Params, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, ...]]
    loss: Loss
    # Whether targets in the prefix of a row count as well, once for the row.
    reads_prefix: bool = False
    # Whether a gradient also returns the loss terms and the first output of every target.
    returns_terms: bool = False


class Objective(NamedTuple):
    """The loss of a policy, and the distribution whose log-probabilities it reads."""

    algorithm: algorithms.Algorithm  # its correction is resolved
    temperature: float = 1.0
    replays_routes: bool = False  # router replay: tokens go to the experts in `Batch.routes`
    draft_weight: float = 0.0  # of the loss of the head for drafts (`draft_head.py`)


def draft_weight(draft: drafts.Draft | None) -> float:
    """Returns the weight of the loss of the head for drafts; 0: no head is trained."""
    return draft.weight if isinstance(draft, drafts.Mtp) else 0.0


def rl_objective(algorithm: algorithms.Algorithm, rollout: RolloutConfig) -> Objective:
    """Returns the objective of RL on rollouts that are sampled with these settings."""
    resolved = algorithms.resolve_correction(algorithm, rollout.max_staleness)
    return Objective(
        resolved, rollout.temperature, rollout.routing_replay, draft_weight(rollout.draft)
    )


def policy_head(
    model: qwen.QwenConfig,
    compute: ModelConfig,
    objective: Objective,
    mesh: Mesh,
) -> Head:
    """Returns the policy's head: log-probs at the objective's temperature and the policy loss."""
    dtype = jnp.dtype(compute.dtype)
    algorithm = objective.algorithm

    # If fsdp splits the weight of the head, the head splits it by vocabulary, and every device
    # computes the tokens of all devices in a chunk. A chunk has few tokens. The alternative is to
    # gather the weight for every chunk of logits, and to sum its gradient over devices for every
    # chunk.
    vocabulary_axes = tuple(axis for axis in ("fsdp", "context", "tensor") if axis in mesh.shape)
    if model.tie_word_embeddings:
        weight_name, weight_spec = "embed", P(vocabulary_axes)
    else:
        weight_name, weight_spec = "lm_head", P(None, vocabulary_axes)
    vocabulary_shards = weight_shards(mesh) * mesh.shape["tensor"]
    is_split = weight_shards(mesh) > 1 and model.vocab_size % vocabulary_shards == 0

    # The number of devices that split the tokens of a chunk. If the vocabulary is split, devices
    # along the fsdp and context axes compute the same tokens.
    token_shards = mesh.shape["data"] * (1 if is_split else weight_shards(mesh))

    # Under shard_map (data parallelism only) every device sees only its rows.
    row_shards = 1 if is_data_parallel(mesh) else token_shards
    arithmetic = choose_arithmetic(compute.exact, mesh, row_shards)

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if is_split else x

    def place_hidden(hidden: jax.Array) -> jax.Array:
        return constrain(hidden, P("data"))

    def place_logits(logits: jax.Array) -> jax.Array:
        # Without this constraint XLA splits the gradient of the logits by rows and then gathers all
        # of it.
        if mesh.shape["data"] > 1 or num_slices(mesh) > 1:
            return constrain(logits, P("data", None, vocabulary_axes))
        return logits

    def outputs(
        params: qwen.Params,
        hidden: jax.Array,
        targets: jax.Array,
        kept: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        weight = constrain(params[weight_name].astype(dtype), weight_spec)
        params = params | {weight_name: weight}
        if output_adapter.NAME in params:
            # B is split as the weight is.
            adapter = params[output_adapter.NAME]
            a = constrain(adapter.a, P())
            b = constrain(adapter.b, P(None, vocabulary_axes))
            params = params | {output_adapter.NAME: replace(adapter, a=a, b=b)}
        return token_logps(
            model,
            params,
            hidden,
            targets,
            temperature=objective.temperature,
            # Of the tokens that one program sees.
            chunk=compute.logit_chunk * row_shards,
            dtype=dtype,
            place=place_hidden,
            place_logits=place_logits,
            # Over the axis of slices, XLA would split a lookup by moving logits between slices.
            look_up=by_mask if num_slices(mesh) > 1 else by_index,
            kept=kept,
            arithmetic=arithmetic,
        )

    def loss(
        outputs: tuple[jax.Array, ...],
        batch: Batch[jax.Array],
        sequence_sum: SequenceSum,
        is_on_policy: jax.Array,
    ) -> tuple[jax.Array, Stats]:
        # If the sampler's filters kept only some tokens, `logps` are normalized over these tokens,
        # and the log-probs over the full vocabulary are the last output.
        logps, entropy, *full_logps = outputs
        # Before the first optimizer step the policy is pi_old. With its current log-probs as the
        # old ones, the ratio is exactly 1. Log-probs from the score program would differ in the
        # last bits, because XLA compiles the same model differently in another program.
        current = lax.stop_gradient(logps)
        old = current
        if batch.old_logps is not None:
            old = jnp.where(is_on_policy, current, batch.old_logps)
        terms, metrics = policy_loss(
            logps,
            entropy,
            replace(batch, old_logps=old),
            sequence_sum,
            algorithm,
            full_logps[0] if full_logps else logps,
        )
        metrics |= {"entropy": entropy, "nll": -logps}
        metrics |= mismatch_metrics(current, batch.sampler_logps)
        if batch.environment_weights is not None:
            is_environment = batch.environment_weights != 0
            cross_entropy = environment_loss(logps, batch.environment_weights, algorithm)
            terms = jnp.where(is_environment, cross_entropy, terms)
            metrics["environment_nll"] = -logps
        return terms, metrics

    return Head(outputs, loss)


def token_head(model: qwen.QwenConfig, compute: ModelConfig, mesh: Mesh) -> Head:
    """Returns the head of K targets of a position, [B, T, K], at temperature 1.

    It has no loss of its own: `Learner.gradient` gets one (`algorithms.token_losses`).
    """
    one_target = policy_head(model, compute, Objective(algorithms.supervised()), mesh)

    def outputs(
        params: qwen.Params,
        hidden: jax.Array,
        targets: jax.Array,
        kept: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        def score(targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
            return one_target.outputs(params, hidden, targets, kept)[0]

        by_target = jnp.moveaxis(targets, -1, 0)
        if len(by_target) == 1:
            return (score(by_target[0])[..., None],)
        # The backward pass recomputes the logits of each target instead of keeping K of them.
        return (jnp.moveaxis(lax.map(qwen.keep_nothing(score), by_target), 0, -1),)

    def loss(
        outputs: tuple[jax.Array, ...],
        batch: Batch[jax.Array],
        sequence_sum: SequenceSum,
        is_on_policy: jax.Array,
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        raise AssertionError("pass a loss: Learner.gradient(..., loss)")

    return Head(outputs, loss, reads_prefix=True, returns_terms=True)


def critic_head(algorithm: algorithms.Algorithm) -> Head:
    """Returns the critic's head: the value of the state before each target and the value loss."""
    part = algorithm.advantage
    assert isinstance(part, algorithms.GAE), f"{part=} has no numbers of a value loss"

    def outputs(
        params: qwen.Params,
        hidden: jax.Array,
        targets: jax.Array,
        kept: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        # In fp32: values are regressed on returns, and bf16 has 8 significant bits.
        return (jnp.einsum("bte,e->bt", hidden.astype(jnp.float32), params["value"]),)

    def loss(
        outputs: tuple[jax.Array, ...],
        batch: Batch[jax.Array],
        sequence_sum: SequenceSum,
        is_on_policy: jax.Array,
    ) -> tuple[jax.Array, Stats]:
        (values,) = outputs
        terms, metrics = value_loss(values, batch, part)
        # The critic is not trained on the environment's tokens.
        return jnp.where(trained_targets(batch), terms, 0), metrics

    return Head(outputs, loss)


def trained_targets(batch: Batch[jax.Array]) -> Bool[Array, "B T"]:
    """Returns which targets the policy loss trains: all whose weight is not 0.

    A weight may be negative, as in losses that lower the probability of a response (DPO). Of a
    position with several targets one must have a weight.
    """
    is_trained = batch.weights != 0
    return is_trained.any(axis=-1) if is_trained.ndim > batch.segments.ndim else is_trained


def tokens_with_loss(batch: Batch[jax.Array]) -> Bool[Array, "B T"]:
    """Returns a mask of the targets with a loss: trained tokens and the environment's tokens."""
    if batch.environment_weights is None:
        return trained_targets(batch)
    return trained_targets(batch) | (batch.environment_weights != 0)


def summed_stats(values: Mapping[str, jax.Array], batch: Batch[jax.Array]) -> Stats:
    """Reduces the values [B, T] that a loss returns, each to one number.

    A metric is reduced as `algorithms.metrics` defines it; other values are summed over the trained
    targets. `tokens` and `environment_tokens` count the tokens.
    """
    masks = {"trained": trained_targets(batch)}
    if batch.environment_weights is not None:
        masks["environment"] = batch.environment_weights != 0
    sums: Stats = {}
    for name, x in values.items():
        metric = loss_metric(name)
        counted = masked(x, masks[metric.tokens])
        sums[name] = counted.max() if metric.reduction == "max" else counted.sum()
        if metric.reduction == "effective_share":
            sums[name + SQUARED] = masked(x**2, masks[metric.tokens]).sum()
    for kind, mask in masks.items():
        sums[COUNTS[kind]] = masked(jnp.ones(mask.shape), mask).sum()
    return sums


def masked(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns constants that are 0 where the mask is False."""
    # `where` instead of a product: values of untrained tokens can be infinite or NaN, and 0 * NaN
    # is NaN.
    return jnp.where(mask, lax.stop_gradient(x), 0)


def is_maximum(name: str) -> bool:
    """Returns whether stats of this name are combined by maximum instead of by sum."""
    return loss_metric(name).reduction == "max"


def combine_stats(a: Stats, b: Stats) -> Stats:
    """Combines the stats of two parts of a batch."""
    return {
        name: jnp.maximum(x, b[name]) if is_maximum(name) else x + b[name] for name, x in a.items()
    }


def combine_stats_over(stats: Stats, axis: str | tuple[str, ...]) -> Stats:
    """Combines the stats of all devices along mesh axes. For use under shard_map or vmap."""
    maxima = {name: lax.pmax(x, axis) for name, x in stats.items() if is_maximum(name)}
    sums = {name: x for name, x in stats.items() if not is_maximum(name)}
    return lax.psum(sums, axis) | maxima


def loss_metrics(stats: Sequence[HostStats]) -> dict[str, float]:
    """Returns the metrics of the loss from the stats of optimizer steps of one learner.

    Metrics of tokens are missing if there was no such token: a mean of 0 would be mistaken for an
    entropy of 0.
    """
    metrics: dict[str, float] = {}
    for name in stats[0] if stats else ():
        metric = loss_metric(name)
        steps = stats[:1] if metric.steps == "first" else stats
        if not metric.name:
            continue
        tokens = sum(sums[COUNTS[metric.tokens]] for sums in steps)
        if not tokens:
            continue
        values = [sums[name] for sums in steps]
        match metric.reduction:
            case "mean":
                metrics[metric.name] = float(sum(values) / tokens)
            case "sum":
                metrics[metric.name] = float(sum(values))
            case "max":
                metrics[metric.name] = float(max(values))
            case "effective_share":
                total = sum(map(float, values))
                squares = sum(float(sums[name + SQUARED]) for sums in steps)
                metrics[metric.name] = total**2 / (float(tokens) * squares)
    return metrics


def make_sequence_sum(
    segments: Int[Array, "B T"],
    trained: Bool[Array, "B T"],
    layout: RowLayout,
) -> SequenceSum:
    """Returns a function that sums x f32[B, T] over the trained tokens of each token's sequence.

    T = slots * slot: the rows have no prefix here. With a prefix of several sequences there is no
    such sum, and calling the function is a mistake.
    """
    if segments.shape[-1] != layout.slots * layout.slot:

        def no_sum(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
            raise AssertionError(f"{layout=}: the tokens of a prefix are in several sequences")

        return no_sum

    # A segment's number is at most the length of its slot, so the sequence numbers are unique in a
    # row.
    slot = jnp.arange(layout.slots * layout.slot) // layout.slot
    sequence = slot * (layout.slot + 1) + segments
    num_sequences = layout.slots * (layout.slot + 1)

    def sum_row(x: Float[Array, " T"], sequence: Int[Array, " T"]) -> Float[Array, " T"]:
        # [T] -> one sum for each sequence number -> [T], the sum of every token's own sequence.
        return jax.ops.segment_sum(x, sequence, num_sequences)[sequence]

    def sequence_sum(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return jax.vmap(sum_row)(jnp.where(trained, x, 0), sequence)

    return sequence_sum


def expert_metrics(stats: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns how evenly the tokens of an update are spread over the experts of a model.

    `stats` are those of optimizer steps, on the host. The metrics are empty for a dense model, and
    where no token went through the model. A layer's violation is the load of its busiest expert
    divided by the mean load, minus 1 (Wang et al. 2024, arXiv:2408.15664, their MaxVio).
    """
    loads = [sums["expert_load"] for sums in stats if "expert_load" in sums]
    load = np.sum(loads, axis=0, dtype=np.float64)  # [L, X]
    if not np.any(load):
        return {}
    largest = load.max(axis=1)
    violations = largest / load.mean(axis=1) - 1
    return {
        "experts/violation": float(violations.mean()),
        "experts/violation_max": float(violations.max()),
        "experts/largest_load": float((largest / load.sum(axis=1)).max()),
        "experts/unused": float(np.mean(load == 0)),
    }
