"""Scores of given tokens under a model: log-probs, filters, entropies, and what rounding changes.

    hidden = hidden_states(model, contexts, "float32")       # once per model and context
    scores = measure(model, hidden, targets, samplings, margin)

The hidden states are kept, so that other temperatures and filters need only the head again. All
numbers are computed in fp32, on one device.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jzero import attention
from jzero.audits.log import Sampling
from jzero.blueprint import describe_on_one_device
from jzero.model import experts, qwen
from jzero.model.architecture import Params, QwenConfig
from jzero.model.arithmetic import PLAIN
from jzero.model.run_model import ModelInputs, run_model
from jzero.numerics.sizes import power_of_two
from jzero.training.packed_rows import PackedRows
from jzero.types import RowLayout

CALL_TOKENS = 4096  # of a call of the model, with padding
SHORTEST_ROW = 64  # tokens; longer rows have the next power of two
LOGITS = 1 << 24  # that exist at a time

# Factors of the temperature of the alternatives in `Scores.tilts`. The last one is nearly uniform.
TILTS = (0.5, 0.7, 0.85, 1.2, 1.5, 2.5, 100.0)


class Model(NamedTuple):
    """A model with its fp32 parameters."""

    config: QwenConfig
    params: Params


class Context(NamedTuple):
    """The tokens of a sequence, and where its response starts."""

    tokens: Int32[np.ndarray, " tokens"]
    start: int  # at least 1
    # Positions are counted from here again; 0: the sequence has one text.
    restart: int = 0


class Scores(NamedTuple):
    """Scores of N tokens. `log q` is after the filters, and `log p` before them."""

    raw: Float32[np.ndarray, " N"]  # log p at temperature 1
    unfiltered: Float32[np.ndarray, " N"]  # log p at the temperature of the row
    filtered: Float32[np.ndarray, " N"]  # log q
    # Bounds of log q, because rounding may move a token across the edge of top-p.
    lowest: Float32[np.ndarray, " N"]
    highest: Float32[np.ndarray, " N"]
    is_outside: Bool[np.ndarray, " N"]  # the filters exclude the token, whatever rounding does
    rank: Int32[np.ndarray, " N"]  # 1 for the most probable token
    mass: Float32[np.ndarray, " N"]  # of q on more probable tokens
    mean: Float32[np.ndarray, " N"]  # of log q under q
    variance: Float32[np.ndarray, " N"]
    # log(q_f / q) of the token, where q_f is q at a temperature that is f times as high.
    tilts: Float32[np.ndarray, "N F"]

    def rows(self, lengths: Sequence[int]) -> "list[Scores]":
        """Splits the scores into rows of these lengths."""
        edges = np.cumsum(lengths)[:-1]
        columns = [np.split(column, edges) for column in self]
        return [Scores(*row) for row in zip(*columns, strict=True)]


def concatenate(rows: Sequence[Scores]) -> Scores:
    """Returns the scores of several rows as one: the inverse of `Scores.rows`."""
    return Scores(*(np.concatenate(column) for column in zip(*rows, strict=True)))


# -- hidden states ---------------------------------------------------------------------------------


def hidden_states(
    model: Model,
    contexts: Sequence[Context],
    dtype: str,
) -> Float32[np.ndarray, "N E"]:
    """Returns the hidden states that predict the responses' tokens, one row after another.

    dtype: type of the activations.
    """
    outputs: dict[int, np.ndarray] = {}
    # Contexts of one width share a compiled program.
    by_width: dict[int, list[int]] = {}
    for place, context in enumerate(contexts):
        width = power_of_two(len(context.tokens), SHORTEST_ROW)
        by_width.setdefault(width, []).append(place)
    for width, places in sorted(by_width.items()):
        # Calls have as many rows as fit; a short log does not pay for empty ones.
        rows = min(max(1, CALL_TOKENS // width), power_of_two(len(places)))
        for begin in range(0, len(places), rows):
            chosen = places[begin : begin + rows]
            tokens = np.zeros((rows, width), np.int32)
            positions = np.zeros((rows, width), np.int32)
            is_token = np.zeros((rows, width), np.bool_)
            for row, place in enumerate(chosen):
                context = contexts[place]
                length = len(context.tokens)
                tokens[row, :length] = context.tokens
                positions[row, :length] = np.arange(length)
                positions[row, context.restart : length] -= context.restart
                is_token[row, :length] = True
            # Accelerators round the inputs of fp32 products by default.
            inputs = map(jnp.asarray, (tokens, positions, is_token))
            with jax.default_matmul_precision("highest"):
                hidden = _forward(model.config, dtype, model.params, *inputs)
            hidden = np.asarray(hidden, np.float32)
            for row, place in enumerate(chosen):
                context = contexts[place]
                # The state at a token predicts the next one.
                outputs[place] = hidden[row, context.start - 1 : len(context.tokens) - 1]
    return np.concatenate([outputs[place] for place in range(len(contexts))])


@partial(jax.jit, static_argnums=(0, 1))
def _forward(
    config: QwenConfig,
    dtype: str,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    is_token: Bool[Array, "B T"],
) -> Float[Array, "B T E"]:
    mesh = describe_on_one_device(config).mesh
    # The reference implementation: kernels round in other ways.
    backend = attention.choose(
        "xla", mesh, window=config.sliding_window, soft_cap=config.attn_logit_softcapping
    )
    segments = is_token.astype(jnp.int32)
    layout = RowLayout(0, 1, tokens.shape[1])
    cache = PackedRows(
        config, backend.packed, PLAIN.recurrence, segments, positions, layout, context_mesh=None
    )
    outputs = run_model(
        config,
        params,
        ModelInputs(tokens, positions, is_token),
        cache,
        PLAIN,
        dtype=jnp.dtype(dtype),
        placement=experts.training_placement(mesh),
    )
    return outputs.hidden


# -- scores ----------------------------------------------------------------------------------------


def measure(
    model: Model,
    hidden: Float32[np.ndarray, "N E"],
    targets: Int32[np.ndarray, " N"],
    samplings: Sequence[Sampling],
    margin: float,
    dtype: str = "float32",
) -> Scores:
    """Scores tokens from the hidden states before them.

    samplings: of every token.
    margin: by which rounding may change the difference of two log-probs.
    dtype: type of the head's inputs and of the logits.
    """
    # A power of two, and for short logs a smaller one.
    chunk = 1 << (max(8, min(256, LOGITS // model.config.vocab_size)).bit_length() - 1)
    has_filters = any(sampling.has_filters for sampling in samplings)
    # float64 holds every top-k and every temperature exactly.
    columns = np.array(samplings, np.float64).reshape(-1, 3)
    parts = []
    for begin in range(0, len(targets), chunk):
        end = min(begin + chunk, len(targets))
        # All chunks have one size, so that the head is compiled once.
        padding = (0, chunk - (end - begin))
        temperature, top_k, top_p = columns[begin:end].T
        # Greedy decoding is top-1, at any temperature.
        top_k = np.where(temperature == 0, 1, top_k)
        temperature = np.where(temperature == 0, 1.0, temperature)
        inputs = (
            np.pad(hidden[begin:end], (padding, (0, 0))),
            np.pad(targets[begin:end], padding),
            np.pad(temperature.astype(np.float32), padding, constant_values=1),
            np.pad(top_k.astype(np.int32), padding),
            np.pad(top_p.astype(np.float32), padding, constant_values=1),
        )
        with jax.default_matmul_precision("highest"):
            scores = _measure(model.config, dtype, has_filters, model.params, *inputs, margin)
        parts.append(Scores(*(np.asarray(column)[: end - begin] for column in scores)))
    return concatenate(parts)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    config: QwenConfig,
    dtype: str,
    has_filters: bool,
    params: Params,
    hidden: Float[Array, "N E"],
    targets: Int[Array, " N"],
    temperature: Float[Array, " N"],
    top_k: Int[Array, " N"],
    top_p: Float[Array, " N"],
    margin: Float[Array, ""],
) -> tuple[jax.Array, ...]:
    logits = qwen.head(config, params, hidden, jnp.dtype(dtype))
    # Other stacks round their logits to the type of the activations.
    logits = logits.astype(dtype).astype(jnp.float32)
    scaled = logits / temperature[:, None]

    def at_target(x: Float[Array, "N V"]) -> Float[Array, " N"]:
        return jnp.take_along_axis(x, targets[:, None], axis=-1)[:, 0]

    target = at_target(scaled)
    unfiltered = target - jax.nn.logsumexp(scaled, axis=-1)
    raw = at_target(logits) - jax.nn.logsumexp(logits, axis=-1)
    rank = 1 + jnp.sum(scaled > target[:, None], axis=-1, dtype=jnp.int32)

    kept = widest = narrowest = jnp.ones_like(scaled, jnp.bool_)
    is_outside = jnp.zeros_like(targets, jnp.bool_)
    if has_filters:
        within_k = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        kth = jnp.take_along_axis(ordered, within_k[:, None] - 1, axis=-1)
        # Top-p is applied to what top-k has kept.
        probabilities = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        before = jnp.where(ordered >= kth, before, jnp.inf)

        def at_least(edge: Float[Array, "N 1"]) -> Bool[Array, "N V"]:
            # The lowest logit before which there is less mass than `edge`.
            lowest = jnp.min(jnp.where(before < edge, ordered, jnp.inf), axis=-1, keepdims=True)
            return (scaled >= lowest) & (scaled >= kth)

        # Without top-p everything is kept, although the sum of the mass may round to 1.
        edge = jnp.where(top_p < 1, top_p, jnp.float32(2))[:, None]
        kept = at_least(edge)
        widest = at_least(jnp.where(edge < 1, shift_share(edge, margin), edge))
        narrowest = at_least(jnp.where(edge < 1, shift_share(edge, -margin), edge))
        # A token is excluded if tokens that beat it by more than the margin fill the filter.
        beats = scaled > target[:, None] + margin
        num_better = jnp.sum(beats, axis=-1)
        share_of_k = jax.nn.softmax(jnp.where(scaled >= kth, scaled, -jnp.inf), axis=-1)
        better = jnp.sum(jnp.where(beats, share_of_k, 0), axis=-1)
        is_outside = num_better >= within_k
        is_outside |= (top_p < 1) & (shift_share(better, -margin) >= top_p)

    def log_total(x: Float[Array, "N V"], tokens: Bool[Array, "N V"]) -> Float[Array, " N"]:
        return jax.nn.logsumexp(jnp.where(tokens, x, -jnp.inf), axis=-1)

    logz = log_total(scaled, kept)
    log_q = jnp.where(kept, scaled - logz[:, None], 0.0)
    q = jnp.where(kept, jnp.exp(log_q), 0.0)
    mean = jnp.sum(q * log_q, axis=-1)
    variance = jnp.sum(q * jnp.square(log_q - mean[:, None]), axis=-1)
    # Strictly more probable: a token among equals takes its part of their mass at random.
    mass = jnp.sum(jnp.where(scaled > target[:, None], q, 0), axis=-1)

    def tilt(factor: jax.Array) -> Float[Array, " N"]:
        other = target / factor - log_total(scaled / factor, kept)
        # The ratio of a token outside of q is not defined; `is_outside` counts these.
        return jnp.where(at_target(kept), other - (target - logz), 0.0)

    # One tilt after another: each needs a copy of the logits.
    return (
        raw,
        unfiltered,
        target - logz,
        target - log_total(scaled, widest),
        target - log_total(scaled, narrowest),
        is_outside,
        rank,
        mass,
        mean,
        variance,
        lax.map(tilt, jnp.asarray(TILTS)).T,
    )


def shift_share(mass: jax.Array, margin: jax.Array) -> jax.Array:
    """Returns a share of the mass after the log of its odds changes by `margin`.

    If no difference of two log-probs changes by more than that, no share changes by more.
    """
    return jax.nn.sigmoid(jnp.log(mass) - jnp.log1p(-jnp.minimum(mass, 1 - 1e-7)) + margin)
