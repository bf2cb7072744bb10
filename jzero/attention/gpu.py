"""Attention on NVIDIA GPUs: cuDNN for `packed`, JAX's Triton paged attention for `paged`. xla.py has the meanings."""

import warnings
from typing import Literal

import jax
import jax.numpy as jnp

from jzero.attention import xla
from jzero.errors import UserError
from jzero.types import RowLayout

with warnings.catch_warnings():  # deprecated in JAX 0.11, without a successor in JAX
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

pool_rows = xla.pool_rows
SPLITS = 8  # programs that share a sequence
COMPUTE_TOKENS = 64  # that one of them reads at a time


def packed(
    q, k, v, segments, layout: RowLayout, implementation: Literal["xla", "cudnn"] = "cudnn"
) -> jax.Array:
    """Under a mask, as cuDNN's own knows no segments; 16-bit types and at most 128 dimensions a head, else XLA."""

    def attend(q, k, v, q_segments, k_segments):
        N, prefix = q.shape[1], k.shape[1] - q.shape[1]
        front = prefix % 2  # cuDNN differentiates even lengths only
        even = lambda x, front=front: jnp.pad(
            x, [(0, 0), (front, N % 2), *((0, 0),) * (x.ndim - 2)]
        )
        mask = xla.visible(even(q_segments, 0), even(k_segments), prefix + front)[:, None]
        out = jax.nn.dot_product_attention(
            even(q, 0), even(k), even(v), mask=mask, implementation=implementation
        )
        return out[:, :N]

    unfit = q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] % 8 or q.shape[-1] > 128
    return xla.packed(
        q, k, v, segments, layout, None if implementation == "cudnn" and unfit else attend
    )


def paged(
    q, k_pool, v_pool, table, lengths, shared, kv_heads: int, interpret: bool = False
) -> jax.Array:
    page, D = k_pool.shape[2:]
    if page & (page - 1) or D & (D - 1) or D < 16:
        needs = "the GPU's paged attention needs powers of two, head_dim of at least 16; set model.attention=xla"
        raise UserError(f"rollout.page_size={page}, head_dim={D}: {needs}")
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
