"""Attention on TPU: JAX's splash attention for `packed`, its paged attention for `paged`; neither scales the queries.
The pools are [Kp, R, page, 128 n]: the kernel reads rows of 128 lanes, 128 // D neighbouring KV heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jzero.errors import UserError
from jzero.types import RowLayout

LANES = 128
BLOCKS = (
    512,
    384,
    256,
    128,
)  # of queries and of keys, fastest first; 2048 does not fit the scratch memory
COMPUTE_TOKENS = 512  # that paged attention reads at a time


class RowMask(masks.Mask):
    """Which blocks of a row the kernel visits, by the layout alone; which keys a query sees is `visible`, from a number
    that every query carries: splash computes a mask from (q_sequence[query], key)."""

    def __init__(self, layout: RowLayout, length: int):
        self.layout, self.length = layout, length
        self.q_sequence = np.zeros(length, np.int32)  # given with every call
        self.mask_function = functools.partial(visible, layout.prefix)

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    def __getitem__(self, index) -> np.ndarray:
        P, _, N = self.layout
        t, s = (np.arange(self.length)[i] for i in index)
        own = (t[:, None] - P) // N == (s - P) // N
        return (s <= t[:, None]) & (own | (s < P))


def visible(prefix: int, code: jax.Array, key: jax.Array) -> jax.Array:
    """A query at `position` sees the keys from `start` (of its segment) on and, from the body, the prefix."""
    start, position = lax.shift_right_logical(code, 16), code & 0xFFFF
    return (key <= position) & ((key >= start) | ((key < prefix) & (position >= prefix)))


@functools.cache
def kernel(layout: RowLayout, length: int, block: int, heads: int, interpret: bool) -> Any:
    """Splash for one row. Held as NumPy arrays: it outlives the trace that made it."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        mask = masks.MultiHeadMask([RowMask(layout, length)] * heads)
        backward = dict.fromkeys(
            ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block
        )
        sizes = splash.BlockSizes(block, block, **backward)
        make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1)
        return jax.device_get(make(mask, block_sizes=sizes, interpret=interpret))


def packed(q, k, v, segments, layout: RowLayout, interpret: bool = False) -> jax.Array:
    """Needs each segment of a slot to be one run of tokens, as packing makes them."""
    P, _, N = layout
    _, T, H, D = q.shape
    block = next(
        b for b in (T + -T % LANES, *BLOCKS) if b <= BLOCKS[0] and -T % b <= max(T // 8, LANES - 1)
    )
    length = T + -T % block
    if length >= 1 << 16:
        raise UserError(
            f"a row of {T} tokens: splash attention here takes fewer than 65536; set model.attention=xla"
        )
    by_head = lambda x: jnp.pad(x, ((0, 0), (0, length - T), (0, 0), (0, 0))).swapaxes(1, 2)
    segments = jnp.pad(segments, ((0, 0), (0, length - T)))
    t = np.arange(length)
    opens = (segments != jnp.roll(segments, 1, axis=1)) | (t == 0) | ((t >= P) & ((t - P) % N == 0))
    codes = lax.cummax(jnp.where(opens, t, 0), axis=1) << 16 | t
    real = (segments > 0).astype(
        jnp.int32
    )  # padding sees padding, itself at least: no row without a key
    of = kernel(layout, length, block, H, interpret)

    def row(q, k, v, code, real) -> Any:
        infos = [
            info._replace(q_sequence=code)
            for info in (of.fwd_mask_info, of.dq_mask_info, of.dkv_mask_info)
        ]
        return splash.SplashAttentionKernel(*infos, **of.kwargs)(
            q, k, v, splash.SegmentIds(real, real)
        )

    out: jax.Array = jax.vmap(row)(
        by_head(q * D**-0.5), by_head(k), by_head(v), codes.astype(jnp.int32), real
    )
    return out.swapaxes(1, 2)[:, :T].astype(q.dtype)


def pool_rows(K: int, D: int) -> tuple[int, int]:
    """(rows, width) of a token in the pool."""
    n = max(1, LANES // D)
    return -(-K // n), -(-n * D // LANES) * LANES


def paged(q, k_pool, v_pool, table, lengths, shared, kv_heads: int) -> jax.Array:
    """The query of a head is zero outside its head's part of the row, and takes that part of the output."""
    S, H, D = q.shape
    rows, _, page, width = k_pool.shape
    n, G = max(1, width // D), H // kv_heads
    q = (q.astype(jnp.float32) * D**-0.5).reshape(S, kv_heads, G, D)
    q = jnp.pad(q, ((0, 0), (0, rows * n - kv_heads), (0, 0), (0, 0))).reshape(S, rows, n, G, D)
    parts = [jnp.pad(q[:, :, i], ((0, 0),) * 3 + ((i * D, width - (i + 1) * D),)) for i in range(n)]
    block = min(table.shape[1], max(1, COMPUTE_TOKENS // page))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block)))
    out = paged_attention(
        jnp.stack(parts, axis=2).reshape(S, rows * n * G, width),
        k_pool,
        v_pool,
        lengths.astype(jnp.int32),
        table,
        pages_per_compute_block=block,
    ).reshape(S, rows, n, G, width)
    out = jnp.stack([out[:, :, i, :, i * D : (i + 1) * D] for i in range(n)], axis=2)
    return out.reshape(S, rows * n * G, D)[:, :H]
