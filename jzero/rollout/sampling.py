"""Sampling: one uniform number per (request, position), so that a completion depends on nothing else in the batch. The
token is the inverse of the cumulative distribution there, in two levels: no sort, no noise over the vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax

from jzero.config import Rollout as Settings

BLOCK = 128


def uniforms(seed: jax.Array, requests: jax.Array, positions: jax.Array) -> jax.Array:
    """f32[S] in [0, 1): a function of (seed, request, position) alone."""
    one = lambda r, p: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(seed, r), p))
    return jax.vmap(one)(requests, positions)


def sample(logits: jax.Array, u: jax.Array, temperature: jax.Array, filter: Settings) -> tuple[jax.Array, jax.Array]:
    """logits f32[S, V], u f32[S], temperature f32[S] (0: greedy) -> tokens i32[S], logps f32[S] at that temperature (at
    1 when greedy) over the full vocabulary, whatever the filter."""
    greedy = temperature == 0
    best = logits.max(axis=-1, keepdims=True)
    scaled = (logits - best) / jnp.where(greedy, 1.0, temperature)[:, None]  # in the other order fp32 loses digits
    probs = jnp.exp(scaled)
    drawn = invert(restrict(probs, filter), u)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - jnp.log(probs.sum(axis=-1))


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
    S, V = probs.shape
    probs = jnp.pad(probs, ((0, 0), (0, -V % BLOCK)))
    windows = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, BLOCK), (1, BLOCK), "valid")
    # The blocks as an array would be a copy of the logits on TPUs; CPUs sum them faster.
    sums = lax.platform_dependent(probs, tpu=windows, default=lambda x: x.reshape(S, -1, BLOCK).sum(axis=-1))
    threshold = u * sums.sum(axis=-1)
    block, before = first_above(sums, threshold)
    inner = jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (BLOCK,)))(probs, block * BLOCK)
    token, _ = first_above(inner, threshold - before)
    return block * BLOCK + token


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
