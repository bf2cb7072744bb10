"""The gradient of `exact.py`'s attention of packed rows.

It need not have the same bits in every program, so it is computed as FlashAttention-2 does it (Dao
2023, arXiv:2307.08691, algorithm 2): the weights of a tile of queries and a block of keys are
recomputed from the log of the softmax's total. Blocks of keys are cut by their place in the row. A
block is left out where no query of the tile sees any of its keys (`needed_blocks`).

See `backend.py` for the dimension letters. G = H / K query heads share a KV head, m = G * tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jzero.products import product_in_fp32

NO_SEGMENT = jnp.iinfo(jnp.int32).max  # above every segment


class Kept(NamedTuple):
    """What the backward pass reads: the inputs and the results of the forward pass."""

    q: Float[Array, "R N H D"]
    k: Float[Array, "R M K D"]
    v: Float[Array, "R M K D"]
    q_segments: Int[Array, "R N"]
    k_segments: Int[Array, "R M"]
    out: Float[Array, "R N H D"]
    log_totals: Float[Array, "tiles R K m"]  # log sum exp of the scores; 0 for padding

    @property
    def tile(self) -> int:
        """The queries of a tile."""
        return self.log_totals.shape[3] // (self.q.shape[2] // self.k.shape[2])


def needed_blocks(kept: Kept) -> Bool[Array, "tiles blocks"]:
    """Says for which blocks of `tile` keys a query of the tile may see a key, in any row.

    It may say so of a block that no query sees, but never leaves one out that a query sees.
    """
    q_segments, k_segments, tile = kept.q_segments, kept.k_segments, kept.tile
    prefix = k_segments.shape[1] - q_segments.shape[1]
    is_own = jnp.arange(k_segments.shape[1]) >= prefix
    has_shared_key = by_block(jnp.where(is_own, 0, k_segments), tile).max(axis=2) > 0

    of_queries = by_block(q_segments, tile)
    of_keys = by_block(jnp.where(is_own, k_segments, 0), tile)
    first_of_queries, last_of_queries = segment_bounds(of_queries)  # [R, tiles]
    first_of_keys, last_of_keys = segment_bounds(of_keys)  # [R, blocks]
    meets_own = first_of_keys[:, None] <= last_of_queries[:, :, None]
    meets_own &= first_of_queries[:, :, None] <= last_of_keys[:, None]
    first_key = jnp.arange(of_keys.shape[1]) * tile - prefix
    last_query = jnp.arange(of_queries.shape[1]) * tile + tile - 1
    meets_own &= first_key <= last_query[:, None]

    has_query = last_of_queries > 0
    meets_shared = has_query[:, :, None] & has_shared_key[:, None]
    return (meets_own | meets_shared).any(axis=0)


def by_block(segments: Int[Array, "R N"], tile: int) -> Int[Array, "R blocks tile"]:
    """Cuts rows of segments into blocks, of which the last one is padded with 0."""
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % tile)))
    return padded.reshape(len(segments), -1, tile)


def segment_bounds(
    segments: Int[Array, "R blocks tile"],
) -> tuple[Int[Array, "R blocks"], Int[Array, "R blocks"]]:
    """Returns the smallest and the largest segment of a block; NO_SEGMENT and 0 for padding."""
    smallest = jnp.where(segments > 0, segments, NO_SEGMENT).min(axis=2)
    return smallest, segments.max(axis=2)


# The gradients so far: of the tile's queries f32[R, K, m, D], of all keys and of all values
# f32[R, K, blocks * tile, D].
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def gradients_of_rows(
    kept: Kept, gradient: Float[Array, "R N H D"], needed: Bool[Array, "tiles blocks"]
) -> tuple[Float[Array, "R N H D"], Float[Array, "R M K D"], Float[Array, "R M K D"]]:
    """Returns the gradients of q, k and v from that of the output.

    needed: for every tile of queries, the blocks of keys that are computed (`needed_blocks`).
    """
    R, N, H, D = kept.q.shape
    M, K = kept.k.shape[1:3]
    prefix, tile = M - N, kept.tile
    scale = D**-0.5

    def by_tile(x: Float[Array, "R N H width"]) -> Float[Array, "tiles R K m width"]:
        padded = jnp.pad(x, ((0, 0), (0, -N % tile), (0, 0), (0, 0)))
        split = padded.reshape(R, -1, tile, K, H // K, x.shape[3]).transpose(1, 0, 3, 4, 2, 5)
        return split.reshape(-1, R, K, H // K * tile, x.shape[3])

    def keys_by_head(x: Float[Array, "R M K D"]) -> Float[Array, "R K padded D"]:
        return jnp.pad(x, ((0, 0), (0, -M % tile), (0, 0), (0, 0))).swapaxes(1, 2)

    keys, values = keys_by_head(kept.k), keys_by_head(kept.v)
    k_segments = by_block(kept.k_segments, tile)
    out_products = gradient.astype(jnp.float32) * kept.out.astype(jnp.float32)
    out_products = out_products.sum(axis=-1, keepdims=True)
    # Blocks that are needed come first, in their own order.
    orders = jnp.argsort(~needed, axis=1)
    counts = needed.sum(axis=1)

    def of_tile(
        so_far: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        number, q, of_out, out_product, log_total, q_segments, order, count = inputs

        def add_block(turn: jax.Array, gradients: Gradients) -> Gradients:
            of_q, of_keys, of_values = gradients
            block = order[turn]
            k = lax.dynamic_slice_in_dim(keys, block * tile, tile, axis=2)
            v = lax.dynamic_slice_in_dim(values, block * tile, tile, axis=2)
            segments = lax.dynamic_index_in_dim(k_segments, block, 1, keepdims=False)
            key = block * tile + jnp.arange(tile) - prefix  # below 0: a shared key
            is_visible = visible_in_block(q_segments, segments, number * tile, key)
            is_visible = jnp.tile(is_visible, (1, H // K, 1))[:, None]  # [R, 1, m, tile]

            scores = product_in_fp32("rkmd,rkpd->rkmp", q, k) * scale
            weights = jnp.where(is_visible, jnp.exp(scores - log_total[..., None]), 0)
            of_weights = product_in_fp32("rkmd,rkpd->rkmp", of_out, v)
            of_scores = weights * (of_weights - out_product) * scale
            weights, of_scores = weights.astype(v.dtype), of_scores.astype(q.dtype)
            of_values = add_at(
                of_values, block * tile, product_in_fp32("rkmp,rkmd->rkpd", weights, of_out)
            )
            of_keys = add_at(
                of_keys, block * tile, product_in_fp32("rkmp,rkmd->rkpd", of_scores, q)
            )
            return of_q + product_in_fp32("rkmp,rkpd->rkmd", of_scores, k), of_keys, of_values

        start = (jnp.zeros(q.shape, jnp.float32), *so_far)
        of_q, of_keys, of_values = lax.fori_loop(0, count, add_block, start)
        return (of_keys, of_values), of_q

    nothing = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    inputs = (
        jnp.arange(len(counts)),
        by_tile(kept.q),
        by_tile(gradient),
        by_tile(out_products),
        kept.log_totals,
        by_block(kept.q_segments, tile).swapaxes(0, 1),
        orders,
        counts,
    )
    (of_keys, of_values), of_q = lax.scan(of_tile, nothing, inputs)

    of_q = of_q.reshape(-1, R, K, H // K, tile, D).transpose(1, 0, 4, 2, 3, 5)
    of_q = of_q.reshape(R, -1, H, D)[:, :N]
    return (
        of_q.astype(kept.q.dtype),
        of_keys.swapaxes(1, 2)[:, :M].astype(kept.k.dtype),
        of_values.swapaxes(1, 2)[:, :M].astype(kept.v.dtype),
    )


def visible_in_block(
    q_segments: Int[Array, "R tile"],
    k_segments: Int[Array, "R block"],
    first_query: Int[Array, ""],
    key: Int[Array, " block"],
) -> Bool[Array, "R tile block"]:
    """Says which keys of a block each query of a tile sees. See `xla.visible`.

    first_query, key: the places of the tile's first token and of the keys among a row's own tokens;
        a key of the prefix is below 0. Padding sees nothing.
    """
    query = first_query + jnp.arange(q_segments.shape[1])
    is_own = (q_segments[:, :, None] == k_segments[:, None]) & (key >= 0)
    is_shared = (k_segments[:, None] > 0) & (key < 0)
    is_past = key <= query[:, None]
    return (is_own | is_shared) & is_past & (q_segments[:, :, None] > 0)


def add_at(
    total: Float[Array, "R K padded D"], start: Int[Array, ""], x: Float[Array, "R K block D"]
) -> Float[Array, "R K padded D"]:
    """Adds x to the columns of `total` from `start` on."""
    before = lax.dynamic_slice_in_dim(total, start, x.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, before + x, start, axis=2)
