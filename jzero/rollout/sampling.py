"""Sampling: one uniform number per (request, position), so that a completion depends on nothing else in the batch. The
token is the inverse of the cumulative distribution there, in two levels: no sort, no noise over the vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jzero.config import RolloutConfig as Settings

BLOCK = 128
PART = 396 * BLOCK  # a third of Qwen's vocabulary


def uniforms(
    seed: jax.Array, requests: jax.Array, positions: jax.Array, count: int = 1
) -> jax.Array:
    """f32[S, count] in [0, 1): a function of (seed, request, position) alone."""
    one = lambda r, p: jax.random.uniform(
        jax.random.fold_in(jax.random.fold_in(seed, r), p), (count,)
    )
    return jax.vmap(one)(requests, positions)


def sample(
    head: Callable, parts: list[slice], hidden, noise, temperature, filter: Settings, axis: str = ""
) -> tuple[jax.Array, jax.Array]:
    """head(hidden, part) -> logits f32[S, .] of that part of the vocabulary (of all of it where `filter` restricts);
    noise f32[S, parts] uniform, temperature f32[S] (0: greedy) -> tokens i32[S], logps f32[S] at that temperature (at 1
    when greedy) over the full vocabulary. The logits of one part exist at a time: what is drawn there takes the place
    of an earlier token with the part's share of the mass so far. The logits may be split over a mesh axis."""
    greedy, device = temperature == 0, lax.axis_index(axis) if axis else 0
    heat = jnp.where(greedy, 1.0, temperature)
    token, logit, mass, best = (jnp.full(heat.shape, x) for x in (0, 0.0, 0.0, -jnp.inf))
    for part, u in zip(parts, noise.T, strict=True):
        hidden, token, logit, mass, best = lax.optimization_barrier(
            (hidden, token, logit, mass, best)
        )  # one by one
        logits = head(hidden, part)
        first = part.start + device * logits.shape[1]
        logits = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % BLOCK)), constant_values=-jnp.inf)
        top = logits.max(axis=-1)
        probs = jnp.exp(
            (logits - top[:, None]) / heat[:, None]
        )  # in the other order fp32 loses digits
        here = top, block_sums(probs).sum(axis=-1)
        tops, masses = lax.all_gather(here, axis) if axis else (x[None] for x in here)
        most = jnp.maximum(best, tops.max(axis=0))
        upto = jnp.cumsum(
            masses * jnp.exp((tops - most) / heat), axis=0
        )  # of each device, then what was before
        total = upto[-1] + mass * jnp.exp((best - most) / heat)
        below = jnp.where(device > 0, upto[device - 1], 0)
        drawn = invert(restrict(probs, filter), (u * total - below) / (upto[device] - below))
        drawn = jnp.where(greedy, logits.argmax(axis=-1), drawn).astype(jnp.int32)
        value = jnp.take_along_axis(cut(logits, drawn // BLOCK), drawn[:, None] % BLOCK, axis=1)[
            :, 0
        ]
        owner = jnp.where(greedy, tops.argmax(axis=0), (upto <= u * total).sum(axis=0))
        taken = jnp.where(greedy, tops.max(axis=0) > best, owner < len(upto))
        new = jnp.where(owner == device, first + drawn, 0), jnp.where(owner == device, value, 0)
        new = lax.psum(new, axis) if axis else new
        token, logit = (jnp.where(taken, *pair) for pair in zip(new, (token, logit), strict=True))
        best, mass = most, total
    return token, (logit - best) / heat - jnp.log(mass)


def restrict(probs: jax.Array, filter: Settings) -> jax.Array:
    """Zero what top-k, then top-p, then min-p exclude. probs [S, V] unnormalised, largest 1; ties are kept together."""
    if 0 < filter.top_k < probs.shape[-1]:
        smallest = lax.top_k(probs, filter.top_k)[0][:, -1:]
        probs = jnp.where(probs >= smallest, probs, 0)
    if filter.top_p < 1:
        probs = jnp.where(probs >= nucleus_threshold(probs, filter.top_p), probs, 0)
    if filter.min_p > 0:
        probs = jnp.where(probs >= filter.min_p, probs, 0)
    return probs


def nucleus_threshold(probs: jax.Array, top_p: float) -> jax.Array:
    """[S, 1] largest threshold whose survivors hold top_p of the mass, by bisection on the bits: no sort of V."""
    mass = top_p * probs.sum(axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        threshold = lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.where(probs >= threshold, probs, 0).sum(axis=-1, keepdims=True) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    low = jnp.zeros((probs.shape[0], 1), jnp.int32)
    low, _ = lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one)))
    return lax.bitcast_convert_type(low, jnp.float32)


def invert(probs: jax.Array, u: jax.Array) -> jax.Array:
    """The first token whose cumulative mass exceeds u of the total; never one of mass 0."""
    sums = block_sums(probs)
    threshold = u * sums.sum(axis=-1)
    block, before = first_above(sums, threshold)
    token, _ = first_above(cut(probs, block), threshold - before)
    return block * BLOCK + token


def block_sums(x: jax.Array) -> jax.Array:
    """[S, n * BLOCK] -> [S, n]. The blocks as an array would be a copy on TPUs; CPUs sum them faster."""
    windows = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, BLOCK), (1, BLOCK), "valid")
    return lax.platform_dependent(
        x, tpu=windows, default=lambda x: x.reshape(len(x), -1, BLOCK).sum(axis=-1)
    )


def cut(x: jax.Array, block: jax.Array) -> jax.Array:
    """[S, n * BLOCK], i32[S] -> [S, BLOCK]. Of vmap TPUs make a loop whose turns take longer than the softmax."""
    at = lambda x, row, block: lax.dynamic_slice(x, (row, block * BLOCK), (1, BLOCK))[0]
    rows = lambda x, block: jnp.stack([at(x, row, block[row]) for row in range(len(x))])
    mapped = lambda x, block: jax.vmap(at, (None, 0, 0))(x, jnp.arange(len(x)), block)
    return lax.platform_dependent(x, block, tpu=rows if len(x) <= 512 else mapped, default=mapped)


def first_above(mass: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the running sum of mass [S, n] first exceeds threshold [S], at a positive entry, and the sum before."""
    n = mass.shape[-1]
    running = jnp.cumsum(mass, axis=-1)
    index = jnp.arange(n)
    first = jnp.where((running > threshold[:, None]) & (mass > 0), index, n).min(axis=-1)
    last = jnp.where(mass > 0, index, 0).max(axis=-1)
    found = jnp.minimum(first, last)
    at = lambda x: jnp.take_along_axis(x, found[:, None], axis=1)[:, 0]
    return found, at(running) - at(mass)
