"""The gradient of `exact.py`'s attention of packed rows.

The gradient need not be bitwise reproducible, so it is computed by FlashAttention-2's backward pass
(Dao 2023, arXiv:2307.08691, algorithm 2): the weights of a tile of queries and a block of keys are
recomputed from the log sum exp of the scores. Blocks of keys are cut by position in the row. A tile
skips the blocks in which none of its queries sees a key (`needed_blocks`).

See `backend.py` for the dimension letters. G = H / K query heads share a KV head, m = G * tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jzero.attention.xla import RowWindow, soft_capped
from jzero.numerics.products import product_in_fp32

NO_SEGMENT = jnp.iinfo(jnp.int32).max  # above every segment


class Residuals(NamedTuple):
    """The residuals for the backward pass: inputs and results of the forward pass."""

    q: Float[Array, "R N H D"]
    k: Float[Array, "R M K D"]
    v: Float[Array, "R M K D"]
    q_segments: Int[Array, "R N"]
    k_segments: Int[Array, "R M"]
    out: Float[Array, "R N H D"]
    log_totals: Float[Array, "tiles R K m"]  # log sum exp of the scores; 0 for padding
    window: RowWindow | None = None  # for a model with sliding windows

    @property
    def tile(self) -> int:
        """The number of queries of a tile."""
        return self.log_totals.shape[3] // (self.q.shape[2] // self.k.shape[2])


def needed_blocks(residuals: Residuals) -> Bool[Array, "tiles blocks"]:
    """Returns which blocks of `tile` keys have a key that a query of a tile can see, in any row.

    The result is conservative: it includes every block that a query sees, and possibly others.
    """
    q_segments, k_segments, tile = residuals.q_segments, residuals.k_segments, residuals.tile
    prefix = k_segments.shape[1] - q_segments.shape[1]
    is_slot_key = jnp.arange(k_segments.shape[1]) >= prefix
    has_shared_key = by_block(jnp.where(is_slot_key, 0, k_segments), tile).max(axis=2) > 0

    # Slot keys: a tile can see a block if their ranges of segments overlap and the block does not
    # start after the tile's last query.
    query_segments = by_block(q_segments, tile)
    key_segments = by_block(jnp.where(is_slot_key, k_segments, 0), tile)
    first_query_segment, last_query_segment = segment_bounds(query_segments)  # [R, tiles]
    first_key_segment, last_key_segment = segment_bounds(key_segments)  # [R, blocks]
    meets_slot_keys = first_key_segment[:, None] <= last_query_segment[:, :, None]
    meets_slot_keys &= first_query_segment[:, :, None] <= last_key_segment[:, None]
    first_key = jnp.arange(key_segments.shape[1]) * tile - prefix
    last_query = jnp.arange(query_segments.shape[1]) * tile + tile - 1
    meets_slot_keys &= first_key <= last_query[:, None]

    # Shared keys: every query sees all of them.
    has_query = last_query_segment > 0
    meets_shared_keys = has_query[:, :, None] & has_shared_key[:, None]
    return (meets_slot_keys | meets_shared_keys).any(axis=0)


def by_block(segments: Int[Array, "R N"], tile: int) -> Int[Array, "R blocks tile"]:
    """Cuts rows of segments into blocks and pads the last block with 0."""
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % tile)))
    return padded.reshape(len(segments), -1, tile)


def segment_bounds(
    segments: Int[Array, "R blocks tile"],
) -> tuple[Int[Array, "R blocks"], Int[Array, "R blocks"]]:
    """Returns the smallest and the largest segment of a block; NO_SEGMENT and 0 for padding."""
    smallest = jnp.where(segments > 0, segments, NO_SEGMENT).min(axis=2)
    return smallest, segments.max(axis=2)


# The accumulated gradients of the tile's queries f32[R, K, m, D], of all keys and of all values
# f32[R, K, blocks * tile, D].
Gradients = tuple[jax.Array, jax.Array, jax.Array]


def gradients_of_rows(
    residuals: Residuals,
    gradient: Float[Array, "R N H D"],
    needed: Bool[Array, "tiles blocks"],
    soft_cap: float = 0.0,
) -> tuple[Float[Array, "R N H D"], Float[Array, "R M K D"], Float[Array, "R M K D"]]:
    """Returns the gradients of q, k and v from the gradient of the output.

    needed: for every tile of queries, the blocks of keys to compute (`needed_blocks`).
    """
    R, N, H, D = residuals.q.shape
    M, K = residuals.k.shape[1:3]
    G = H // K  # query heads of a KV head
    prefix, tile = M - N, residuals.tile
    scale = D**-0.5

    def by_tile(x: Float[Array, "R N H width"]) -> Float[Array, "tiles R K m width"]:
        # [R, N, H, width] -> [tiles, R, K, G, tile, width]
        padded = jnp.pad(x, ((0, 0), (0, -N % tile), (0, 0), (0, 0)))
        split = padded.reshape(R, -1, tile, K, G, x.shape[3])
        by_group = split.transpose(1, 0, 3, 4, 2, 5)
        return by_group.reshape(-1, R, K, G * tile, x.shape[3])

    def keys_by_head(x: Float[Array, "R M K D"]) -> Float[Array, "R K padded D"]:
        padded = jnp.pad(x, ((0, 0), (0, -M % tile), (0, 0), (0, 0)))
        return padded.swapaxes(1, 2)

    keys, values = keys_by_head(residuals.k), keys_by_head(residuals.v)
    k_segments = by_block(residuals.k_segments, tile)
    window = residuals.window
    q_positions = k_positions = None
    if window is not None:
        q_positions = by_block(window.q_positions, tile).swapaxes(0, 1)
        k_positions = by_block(window.k_positions, tile)
    # g o for every query, which is the same for all its keys.
    out_products = gradient.astype(jnp.float32) * residuals.out.astype(jnp.float32)
    out_products = out_products.sum(axis=-1, keepdims=True)
    # The needed blocks come first, in their original order.
    orders = jnp.argsort(~needed, axis=1)
    counts = needed.sum(axis=1)

    def add_tile(
        so_far: tuple[jax.Array, jax.Array], inputs: tuple[tuple[jax.Array, ...], jax.Array | None]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        arrays, q_places = inputs
        number, q, out_grads, out_product, log_total, q_segments, order, count = arrays

        def add_block(turn: jax.Array, gradients: Gradients) -> Gradients:
            q_grads, k_grads, v_grads = gradients
            block = order[turn]
            k = lax.dynamic_slice_in_dim(keys, block * tile, tile, axis=2)
            v = lax.dynamic_slice_in_dim(values, block * tile, tile, axis=2)
            segments = lax.dynamic_index_in_dim(k_segments, block, 1, keepdims=False)
            key = block * tile + jnp.arange(tile) - prefix  # below 0: a shared key
            is_visible = visible_in_block(q_segments, segments, number * tile, key)
            if window is not None and q_places is not None:
                k_places = lax.dynamic_index_in_dim(k_positions, block, 1, keepdims=False)
                is_visible &= q_places[:, :, None] - k_places[:, None] < window.size
            is_visible = jnp.tile(is_visible, (1, G, 1))[:, None]  # [R, 1, m, tile]

            # With weights p, output o and the gradient g of o, the gradient of a score is
            # p (g v - g o).
            scores = product_in_fp32("rkmd,rkpd->rkmp", q, k) * scale
            scores = soft_capped(scores, soft_cap)
            weights = jnp.where(is_visible, jnp.exp(scores - log_total[..., None]), 0)
            weight_grads = product_in_fp32("rkmd,rkpd->rkmp", out_grads, v)
            score_grads = weights * (weight_grads - out_product) * scale
            if soft_cap:
                score_grads *= 1 - jnp.square(scores / soft_cap)
            weights, score_grads = weights.astype(v.dtype), score_grads.astype(q.dtype)
            v_grads = add_at(
                v_grads, block * tile, product_in_fp32("rkmp,rkmd->rkpd", weights, out_grads)
            )
            k_grads = add_at(
                k_grads, block * tile, product_in_fp32("rkmp,rkmd->rkpd", score_grads, q)
            )
            return q_grads + product_in_fp32("rkmp,rkpd->rkmd", score_grads, k), k_grads, v_grads

        start = (jnp.zeros(q.shape, jnp.float32), *so_far)
        q_grads, k_grads, v_grads = lax.fori_loop(0, count, add_block, start)
        return (k_grads, v_grads), q_grads

    zero_grads = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    inputs = (
        jnp.arange(len(counts)),
        by_tile(residuals.q),
        by_tile(gradient),
        by_tile(out_products),
        residuals.log_totals,
        by_block(residuals.q_segments, tile).swapaxes(0, 1),
        orders,
        counts,
    )
    (k_grads, v_grads), q_grads = lax.scan(add_tile, zero_grads, (inputs, q_positions))

    # [tiles, R, K, m, D] -> [R, tiles, tile, K, G, D]
    q_grads = q_grads.reshape(-1, R, K, G, tile, D).transpose(1, 0, 4, 2, 3, 5)
    q_grads = q_grads.reshape(R, -1, H, D)[:, :N]
    return (
        q_grads.astype(residuals.q.dtype),
        k_grads.swapaxes(1, 2)[:, :M].astype(residuals.k.dtype),
        v_grads.swapaxes(1, 2)[:, :M].astype(residuals.v.dtype),
    )


def visible_in_block(
    q_segments: Int[Array, "R tile"],
    k_segments: Int[Array, "R block"],
    first_query: Int[Array, ""],
    key: Int[Array, " block"],
) -> Bool[Array, "R tile block"]:
    """Returns a mask of the keys of a block that each query of a tile sees. See `xla.visible`.

    first_query, key: positions of the tile's first token and of the keys, counted from the end of
        the prefix; keys of the prefix have negative positions. Unlike in `xla.visible`, padding
        sees no key.
    """
    query = first_query + jnp.arange(q_segments.shape[1])
    is_in_segment = (q_segments[:, :, None] == k_segments[:, None]) & (key >= 0)
    is_shared = (k_segments[:, None] > 0) & (key < 0)
    is_past = key <= query[:, None]
    return (is_in_segment | is_shared) & is_past & (q_segments[:, :, None] > 0)


def add_at(
    total: Float[Array, "R K padded D"], start: Int[Array, ""], x: Float[Array, "R K block D"]
) -> Float[Array, "R K padded D"]:
    current = lax.dynamic_slice_in_dim(total, start, x.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, current + x, start, axis=2)
