"""What the hidden states of a model become, and the loss of that.

A `Learner` runs the model's body and knows nothing of probabilities or values. Its head turns
hidden states into numbers for each target, and those numbers into weighted loss terms:

    policy head   log-probability of every target and entropy  -> the policy loss
    critic head   value of the state before every target       -> the value loss
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jzero import algorithms
from jzero.config import Config
from jzero.distributed.mesh import weight_shards
from jzero.model import qwen
from jzero.model.exact import exact_rows
from jzero.model.logprobs import token_logps
from jzero.types import Batch, RowLayout

# Sums over trained tokens, by name. See `Learner.update`.
Stats = dict[str, jax.Array]


class Head(NamedTuple):
    """Two functions that are traced into the programs of a `Learner`."""

    # (params, hidden [B, T, E], targets i32[B, T], kept i32[B, T, K] or None) -> f32[B, T] each;
    # `score` returns the first.
    outputs: Callable[[qwen.Params, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, ...]]
    # (outputs, batch [B, T], sequence_sum, fresh) -> weighted loss terms f32[B, T], and stats of
    # f32[B, T] each
    loss: Callable[
        [tuple[jax.Array, ...], Batch[jax.Array], algorithms.SequenceSum, jax.Array],
        tuple[jax.Array, Stats],
    ]


def policy_head(model: qwen.QwenConfig, config: Config, mesh: Mesh) -> Head:
    """Returns the head of the policy: log-probabilities at the rollouts' temperature, policy loss.

    Where fsdp splits the weight of the head, the weight is split by vocabulary here, and every
    device takes the chunk's tokens of all devices. Those tokens are few. The alternative is to
    gather the weight for every chunk of logits, and to sum its gradient over devices for every
    chunk.
    """
    dtype = jnp.dtype(config.model.dtype)
    algorithm = algorithms.resolve_correction(config.algorithm, config.rollout.max_staleness)
    vocabulary_axes = tuple(axis for axis in ("fsdp", "context", "tensor") if axis in mesh.shape)
    if model.tie_word_embeddings:
        weight_name, weight_spec = "embed", P(vocabulary_axes)
    else:
        weight_name, weight_spec = "lm_head", P(None, vocabulary_axes)
    vocabulary_shards = weight_shards(mesh) * mesh.shape["tensor"]
    is_split = weight_shards(mesh) > 1 and model.vocab_size % vocabulary_shards == 0

    # The devices that share the tokens of a chunk: where the vocabulary is split over fsdp, devices
    # along fsdp take the same tokens, and so do those that share rows.
    token_shards = mesh.shape["data"] * (1 if is_split else weight_shards(mesh))

    # In a program under shard_map every device has its rows to itself.
    is_data_parallel = mesh.shape["data"] == mesh.size
    row_shards = 1 if is_data_parallel else token_shards
    exact = exact_rows(mesh, row_shards) if config.model.exact else None

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if is_split else x

    def place_hidden(hidden: jax.Array) -> jax.Array:
        return constrain(hidden, P("data"))

    def place_logits(logits: jax.Array) -> jax.Array:
        # Left alone, XLA splits the gradient of the logits by rows and gathers all of it again.
        if mesh.shape["data"] > 1:
            return constrain(logits, P("data", None, vocabulary_axes))
        return logits

    def outputs(
        params: qwen.Params,
        hidden: jax.Array,
        targets: jax.Array,
        kept: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        weight = constrain(params[weight_name].astype(dtype), weight_spec)
        return token_logps(
            model,
            params | {weight_name: weight},
            hidden,
            targets,
            temperature=config.rollout.temperature,
            chunk=config.model.logit_chunk * token_shards,
            dtype=dtype,
            place=place_hidden,
            place_logits=place_logits,
            kept=kept,
            exact=exact,
        )

    def loss(
        outputs: tuple[jax.Array, ...],
        batch: Batch[jax.Array],
        sequence_sum: algorithms.SequenceSum,
        fresh: jax.Array,
    ) -> tuple[jax.Array, Stats]:
        # Where the sampler's filters kept some tokens, `logps` are over these, and those over the
        # full vocabulary come last.
        logps, entropy, *full_logps = outputs
        # Before any optimizer step pi_old is the policy itself. The ratio of these log-probs to
        # themselves is exactly 1. Log-probs from the score program would differ in the last bits,
        # because XLA compiles the same model differently in another program.
        current = lax.stop_gradient(logps)
        old = current
        if batch.old_logps is not None:
            old = jnp.where(fresh, current, batch.old_logps)
        terms, stats = algorithms.policy_loss(
            logps,
            entropy,
            replace(batch, old_logps=old),
            sequence_sum,
            algorithm,
            full_logps[0] if full_logps else logps,
        )
        stats |= {"entropy": entropy, "nll": -logps}
        stats |= mismatch_stats(current, batch.sampler_logps)
        if batch.environment_weights is not None:
            is_environment = batch.environment_weights > 0
            cross_entropy = algorithms.environment_loss(logps, batch.environment_weights, algorithm)
            terms = jnp.where(is_environment, cross_entropy, terms)
            stats |= {"environment_nll": -logps, "environment_tokens": jnp.ones_like(logps)}
        return terms, stats

    return Head(outputs, loss)


def critic_head(algorithm: algorithms.Algorithm) -> Head:
    """Returns the head of the critic: the value of the state before each target, value loss."""

    def outputs(
        params: qwen.Params,
        hidden: jax.Array,
        targets: jax.Array,
        kept: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        return (jnp.einsum("bte,e->bt", hidden.astype(jnp.float32), params["value"]),)

    def loss(
        outputs: tuple[jax.Array, ...],
        batch: Batch[jax.Array],
        sequence_sum: algorithms.SequenceSum,
        fresh: jax.Array,
    ) -> tuple[jax.Array, Stats]:
        (values,) = outputs
        terms, stats = algorithms.value_loss(values, batch, algorithm)
        # The targets that the environment replied are none of the critic's.
        return jnp.where(batch.weights > 0, terms, 0), stats

    return Head(outputs, loss)


def mismatch_stats(
    logps: Float[Array, "B T"], sampler_logps: Float[Array, "B T"]
) -> dict[str, Float[Array, "B T"]]:
    """Returns how the log-probs of the policy differ from the sampler's, token by token.

    With d = log pi - log pi_sampler, k1 = -d and k3 = exp(d) - d - 1 estimate the KL divergence
    KL(pi_sampler || pi) from the tokens that were sampled (Schulman, "Approximating KL
    divergence", 2020). `importance` is the ratio exp(d).
    """
    d = jnp.clip(logps - sampler_logps, -algorithms.MAX_LOG_RATIO, algorithms.MAX_LOG_RATIO)
    importance = jnp.exp(d)
    return {
        "mismatch": jnp.abs(sampler_logps - logps),
        "mismatch_max": jnp.abs(sampler_logps - logps),
        "mismatch_k1": sampler_logps - logps,
        "mismatch_k3": jnp.expm1(d) - d,
        "mismatch_tokens": (logps != sampler_logps).astype(jnp.float32),
        "importance": importance,
        "importance_squared": importance**2,
    }


def tokens_with_loss(batch: Batch[jax.Array]) -> Bool[Array, "B T"]:
    """Returns which targets have a loss: those that are trained, and the environment's."""
    is_trained = batch.weights > 0
    if batch.environment_weights is None:
        return is_trained
    return is_trained | (batch.environment_weights > 0)


def summed_stats(stats: Stats, batch: Batch[jax.Array]) -> Stats:
    """Returns one number for each of the stats [B, T]: its sum over the trained targets.

    Those whose name begins with "environment" are summed over the targets that the environment
    replied. Those whose name ends in "_max" are not summed: the number is the largest one.
    """
    is_trained = batch.weights > 0
    sums = {}
    for name, x in stats.items():
        counts = is_trained
        if name.startswith("environment"):
            assert batch.environment_weights is not None, f"{name=}"
            counts = batch.environment_weights > 0
        # `where` and not a product: what is not trained may be infinite or NaN, and 0 * NaN is NaN.
        counted = jnp.where(counts, lax.stop_gradient(x), 0)
        sums[name] = counted.max() if is_maximum(name) else counted.sum()
    return sums


def is_maximum(name: str) -> bool:
    """Returns whether stats of this name are combined by their maximum, not by their sum."""
    return name.endswith("_max")


def combine_stats(a: Stats, b: Stats) -> Stats:
    """Returns the stats of two parts of a batch together."""
    return {
        name: jnp.maximum(x, b[name]) if is_maximum(name) else x + b[name] for name, x in a.items()
    }


def combine_stats_over(stats: Stats, axis: str) -> Stats:
    """Returns the stats of all devices along a mesh axis together. For use under shard_map."""
    maxima = {name: lax.pmax(x, axis) for name, x in stats.items() if is_maximum(name)}
    sums = {name: x for name, x in stats.items() if not is_maximum(name)}
    return lax.psum(sums, axis) | maxima


def make_sequence_sum(
    segments: Int[Array, "B T"],
    trained: Bool[Array, "B T"],
    layout: RowLayout,
) -> algorithms.SequenceSum:
    """Returns a function that gives every token the sum of x f32[B, T] over the trained tokens of
    the token's own sequence.

    T = slots * slot: the prefix of the rows has been left out.
    """
    # A segment's number is at most the length of its slot, so these numbers are unique in a row.
    slot = jnp.arange(layout.slots * layout.slot) // layout.slot
    sequence = slot * (layout.slot + 1) + segments
    num_sequences = layout.slots * (layout.slot + 1)

    def sum_row(x: Float[Array, " T"], sequence: Int[Array, " T"]) -> Float[Array, " T"]:
        return jax.ops.segment_sum(x, sequence, num_sequences)[sequence]

    def sequence_sum(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        return jax.vmap(sum_row)(jnp.where(trained, x, 0), sequence)

    return sequence_sum
