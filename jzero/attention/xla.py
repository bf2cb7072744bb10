"""Attention in plain XLA: the definition, and the CPU path. H query heads in K groups of G = H/K share a KV head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jzero.types import RowLayout

MASKED = -1e30  # finite, so that a row without any visible key gives no NaN
QUERY_BLOCK = 512  # queries whose scores exist at a time


def packed(
    q, k, v, segments: jax.Array, layout: RowLayout, attend: Callable[..., jax.Array] | None = None
) -> jax.Array:
    """Causal attention within segments; slots also see their row's prefix. q [B, T, H, D], k and v [B, T, K, D],
    segments i32[B, T] (0 = padding), T = layout.tokens -> [B, T, H, D]. Kernels bring their own `attend`."""
    P, S, N = layout
    B, _, H, D = q.shape
    attend = attend or attend_blocks
    slots = lambda x: x[:, P:].reshape(B * S, N, *x.shape[2:])
    with_prefix = lambda x: (
        jnp.concatenate([jnp.repeat(x[:, :P], S, axis=0), slots(x)], axis=1) if P else slots(x)
    )
    body = attend(slots(q), with_prefix(k), with_prefix(v), slots(segments), with_prefix(segments))
    body = body.reshape(B, S * N, H, D)
    if not P:
        return body
    return jnp.concatenate(
        [attend(*(x[:, :P] for x in (q, k, v, segments, segments))), body], axis=1
    )


def visible(q_segments, k_segments, prefix: int, start=0) -> jax.Array:
    """bool[R, n, M]: queries start..start+n of those that follow the `prefix` shared ones of M keys. Padding sees
    padding, itself at least: kernels make NaN of a row without a key."""
    key = jnp.arange(k_segments.shape[1])
    own = (q_segments[:, :, None] == k_segments[:, None]) & (key >= prefix)
    shared = (k_segments[:, None] > 0) & (key < prefix)
    return (own | shared) & (key <= prefix + start + jnp.arange(q_segments.shape[1])[:, None])


def attend_blocks(q, k, v, q_segments, k_segments) -> jax.Array:
    """q [R, N, H, D], of the last N of M tokens; k and v [R, M, K, D], of which the first M - N are shared."""
    R, N, H, D = q.shape
    block = lambda q, segments, start: attend_block(
        q, k, v, segments, k_segments, k.shape[1] - N, start
    )
    if N <= QUERY_BLOCK or N % QUERY_BLOCK:
        return block(q, q_segments, 0)
    blocks = lambda x: x.reshape(R, N // QUERY_BLOCK, QUERY_BLOCK, *x.shape[2:]).swapaxes(0, 1)
    out = lax.map(
        lambda x: jax.checkpoint(block)(*x),
        (blocks(q), blocks(q_segments), jnp.arange(0, N, QUERY_BLOCK)),
    )
    return out.swapaxes(0, 1).reshape(R, N, H, D)


def attend_block(q, k, v, q_segments, k_segments, prefix: int, start) -> jax.Array:
    """Queries start..start+N of the own part against every key; softmax in fp32."""
    R, N, H, D = q.shape
    M, K = k.shape[1:3]
    G = H // K
    grouped = q.reshape(R, N, K, G, D).transpose(0, 2, 3, 1, 4).reshape(R, K, G * N, D)
    scores = jnp.einsum(
        "rknd,rkmd->rknm", grouped, k.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32
    )
    seen = visible(q_segments, k_segments, prefix, start)[:, None, None]
    scores = jnp.where(seen, scores.reshape(R, K, G, N, M) * D**-0.5, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(R, K, G * N, M)
    out = jnp.einsum("rknm,rkmd->rknd", probs, v.transpose(0, 2, 1, 3))
    return out.reshape(R, K, G, N, D).transpose(0, 3, 1, 2, 4).reshape(R, N, H, D)


# (kernels may ask for other rows: pool_rows of them a token, with several heads in one, and zeros where nothing is)


def pool_rows(K: int, D: int) -> tuple[int, int]:
    return K, D


def to_rows(x: jax.Array, rows: int, width: int) -> jax.Array:
    """x [..., K, D] -> [..., rows, width]: width // D neighbouring heads a row."""
    *lead, K, D = x.shape
    together = width // D
    pad = lambda x, *last: jnp.pad(x, [(0, 0)] * len(lead) + [(0, n) for n in last])
    return pad(
        pad(x, rows * together - K, 0).reshape(*lead, rows, together * D), 0, width - together * D
    )


def kv_storage(dtype: str, platform: str):
    """Element type of the pools. On CPU bf16 is stored as its bits: XLA would convert the pool around every write."""
    return jnp.uint16 if dtype == "bfloat16" and platform == "cpu" else jnp.dtype(dtype)


def encode_kv(x: jax.Array, storage) -> jax.Array:
    if storage == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def decode_kv(x: jax.Array, dtype) -> jax.Array:
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)
    return x.astype(dtype)


def write(
    pool: jax.Array, x: jax.Array, pages: jax.Array, offsets: jax.Array | None = None
) -> jax.Array:
    """Put whole pages x [W, page, heads, dim] at pages[W] of the pool, or tokens x [S, heads, dim] at (pages[S],
    offsets[S]). By rows of a flattened view: any other spelling makes XLA re-lay-out the whole pool."""
    K, _, page, D = pool.shape
    entry, at = ((page, D), pages) if offsets is None else ((D,), pages * page + offsets)
    flat = pool.reshape(-1, *entry)
    rows = jnp.arange(K)[:, None] * (len(flat) // K) + at[None]
    values = encode_kv(jnp.moveaxis(to_rows(x, K, D), -2, 0).reshape(-1, *entry), pool.dtype)
    return flat.at[rows.ravel()].set(values, mode="promise_in_bounds").reshape(pool.shape)


def paged(q, k_pool, v_pool, table, lengths, shared, kv_heads: int = 0) -> jax.Array:
    """One query a slot against its pages: an online softmax over pages, as many as the longest slot has. q [S, H, D],
    pools [K, R, page, D], table i32[S, M], lengths i32[S] >= 1 -> f32[S, H, D]. shared i32[S / B]: the first so many
    pages of every B neighbouring slots are full and the same, and read once; kernels may ignore it."""
    S, H, D = q.shape
    K, _, page, _ = k_pool.shape
    G, N = H // K, shared.shape[0]
    B = S // N

    def read(rows, visible, q, carry):
        """Fold one page a row into the softmax: q [n, K, m, D], rows i32[n], visible bool[n, page]."""
        best, total, out = carry
        keys, values = (
            decode_kv(pool[:, rows], jnp.float32) for pool in (k_pool, v_pool)
        )  # [K, n, page, D]
        scores = jnp.einsum("nkmd,knpd->nkmp", q, keys)
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        new = jnp.maximum(best, scores.max(-1))
        probs, keep = jnp.exp(scores - new[..., None]), jnp.exp(best - new)
        out = out * keep[..., None] + jnp.einsum("nkmp,knpd->nkmd", probs, values)
        return new, total * keep + probs.sum(-1), out

    def block_page(carry):
        j, *softmax = carry
        visible = jnp.broadcast_to((j < shared)[:, None], (N, page))
        return j + 1, *read(
            lax.dynamic_index_in_dim(table[::B], j, 1, keepdims=False), visible, of_block, softmax
        )

    def own_page(carry):
        j, *softmax = carry
        at = first + j
        rows = jnp.take_along_axis(table, jnp.minimum(at, table.shape[1] - 1)[:, None], axis=1)[
            :, 0
        ]
        visible = at[:, None] * page + jnp.arange(page)[None] < lengths[:, None]
        return j + 1, *read(rows, visible, of_slot, softmax)

    of_slot = (q.astype(jnp.float32) * D**-0.5).reshape(S, K, G, D)
    of_block = of_slot.reshape(N, B, K, G, D).swapaxes(1, 2).reshape(N, K, B * G, D)
    init = (
        0,
        jnp.full(of_block.shape[:3], MASKED),
        jnp.zeros(of_block.shape[:3]),
        jnp.zeros(of_block.shape),
    )
    _, *softmax = lax.while_loop(lambda carry: carry[0] < shared.max(), block_page, init)
    to_slots = lambda x: (
        x.reshape(N, K, B, G, *x.shape[3:]).swapaxes(1, 2).reshape(S, K, G, *x.shape[3:])
    )
    first = jnp.repeat(shared, B)
    most = (lengths - first * page).max()
    _, _, total, out = lax.while_loop(
        lambda carry: carry[0] * page < most, own_page, (0, *map(to_slots, softmax))
    )
    return (out / total[..., None]).reshape(S, H, D)
