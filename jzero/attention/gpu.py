"""Attention on NVIDIA GPUs: cuDNN for `packed`, JAX's Triton paged attention for `paged`. xla.py has the meanings."""

import warnings
from typing import Literal

import jax
import jax.numpy as jnp

from jzero.attention import xla
from jzero.types import Layout

with warnings.catch_warnings():  # deprecated in JAX 0.11, without a successor in JAX
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

pool_rows = xla.pool_rows
SPLITS = 8  # programs that share a sequence
COMPUTE_TOKENS = 64  # that one of them reads at a time


def packed(q, k, v, segments, layout: Layout, implementation: Literal["xla", "cudnn"] = "cudnn") -> jax.Array:
    """A slot's queries against the prefix and the slot, under a mask: cuDNN's own causal mask knows no segments. It
    takes 16-bit types and at most 128 dimensions a head; anything else is left to XLA."""
    P, S, N = layout
    B, _, H, D = q.shape
    if implementation == "cudnn" and (q.dtype not in (jnp.bfloat16, jnp.float16) or D % 8 or D > 128):
        return xla.packed(q, k, v, segments, layout)
    even = lambda x, axis: jnp.pad(x, [(0, x.shape[axis] % 2 if i == axis else 0) for i in range(x.ndim)])
    prefix = lambda x: even(x[:, :P], 1)  # cuDNN differentiates even lengths only
    slots = lambda x: even(x[:, P:].reshape(B * S, N, *x.shape[2:]), 1)
    beside = lambda x: jnp.concatenate([jnp.repeat(prefix(x), S, axis=0), slots(x)], axis=1)

    def attend(q, k, v, q_segments, k_segments):
        mask = visible(q_segments, k_segments)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    body = attend(slots(q), beside(k), beside(v), slots(segments), beside(segments))[:, :N].reshape(B, S * N, H, D)
    if not P:
        return body
    own = attend(prefix(q), prefix(k), prefix(v), prefix(segments), prefix(segments))
    return jnp.concatenate([own[:, :P], body], axis=1)


def visible(q_segments, k_segments) -> jax.Array:
    """bool[R, N, M] of the last N of M tokens, the others their prefix. Padding sees padding, itself at least: a row
    without a key would be NaN."""
    N, M = q_segments.shape[1], k_segments.shape[1]
    key = jnp.arange(M)
    same = (q_segments[:, :, None] == k_segments[:, None]) & (key >= M - N)
    shared = (k_segments[:, None] > 0) & (key < M - N)
    return (same | shared) & (key <= M - N + jnp.arange(N)[:, None])


def paged(q, k_pool, v_pool, table, lengths, shared, kv_heads: int, interpret: bool = False) -> jax.Array:
    page, D = k_pool.shape[2:]
    if page & (page - 1) or D & (D - 1) or D < 16:
        needs = "the GPU's paged attention needs powers of two, head_dim of at least 16; set model.attention=xla"
        raise ValueError(f"rollout.page={page}, head_dim={D}: {needs}")
    block = max(1, COMPUTE_TOKENS // page)
    out = paged_attention(
        (q.astype(jnp.float32) * D**-0.5).astype(k_pool.dtype),
        k_pool,
        v_pool,
        jnp.pad(table, ((0, 0), (0, -table.shape[1] % (SPLITS * block)))),
        lengths.astype(jnp.int32),
        pages_per_compute_block=block,
        k_splits=SPLITS,
        interpret=interpret,
    )
    return out.astype(jnp.float32)
