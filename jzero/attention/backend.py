"""The interface of attention: which functions a backend consists of, and what they compute.

Dimension letters: B rows, T tokens of a row, N queries of a row, S slots, H query heads, K KV
heads, D dimensions of a head. H / K neighboring query heads share a KV head. Queries arrive
unscaled; every function scales the scores by D**-0.5.
"""

from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Float, Int

from jzero.attention.pools import Pool
from jzero.types import RowLayout


class Packed(Protocol):
    """Attention of training, scoring and prefill: rows that hold several sequences each.

    segments numbers the sequences of a row; 0 is padding. A token sees the tokens before it in its
    own segment of its own slot, and the whole prefix of its row (`RowLayout`). Each segment of a
    slot is one run of tokens. What padding receives is finite and means nothing.

    q may leave out the prefix: N is T, or T without the prefix. Then nothing asks for gradients.
    """

    def __call__(
        self,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        segments: Int[Array, "B T"],
        layout: RowLayout,
        /,
    ) -> Float[Array, "B N H D"]: ...


class Paged(Protocol):
    """Attention of decoding: one query per slot against the slot's pages of keys and values.

    k_pool, v_pool: pages of all slots, with `pool_rows` rows of `width` numbers per token.
    table: the pages of each slot, in the order of its tokens.
    lengths: the number of tokens of each slot, at least 1, the query's own token included.
    shared: for each block of neighboring slots, how many of their first pages are full and the
        same. A backend may read these pages once for the block, or ignore the number.
    kv_heads: K, which the shape of a pool does not always tell.
    """

    def __call__(
        self,
        q: Float[Array, "S H D"],
        k_pool: Pool,
        v_pool: Pool,
        table: Int[Array, "S max_pages"],
        lengths: Int[Array, " S"],
        shared: Int[Array, " blocks"],
        kv_heads: int,
        /,
    ) -> Float[Array, "S H D"]: ...


class Decode(Protocol):
    """Attention of a decode step in one call: rotation, write of the new token, attention.

    q, k, v: of each slot's new token, not rotated.
    cos, sin: of its position; element i and element i + D / 2 are a pair, and become
        x * cos + (x with the halves of D exchanged) * sin. sin has the sign of the rotation.
    table, first_page: page p of a slot is page first_page + table[slot, p] of the pools.
    lengths: the number of tokens of each slot, at least 1, the new token included. An idle slot has
        one token, and its pages are page 0, the scratch page, whose content means nothing.
    shared: as in `Paged`. The new token of a slot that is not idle lies behind the shared pages.
    owners: for each block of neighboring slots that share pages, the slot whose row of the table
        has these pages. The row of an idle slot does not.
    Returns the output, and the pools with the new tokens.
    """

    def __call__(
        self,
        q: Float[Array, "S H D"],
        k: Float[Array, "S K D"],
        v: Float[Array, "S K D"],
        cos: Float[Array, "S D"],
        sin: Float[Array, "S D"],
        k_pool: Pool,
        v_pool: Pool,
        table: Int[Array, "S max_pages"],
        lengths: Int[Array, " S"],
        first_page: Int[Array, ""],
        shared: Int[Array, " blocks"],
        owners: Int[Array, " blocks"],
        /,
    ) -> tuple[Float[Array, "S H D"], Pool, Pool]: ...


class PoolRows(Protocol):
    """Returns (rows, width) of one token in the pools of a device that holds K heads of size D."""

    def __call__(self, num_heads: int, head_dim: int, /) -> tuple[int, int]: ...


class Write(Protocol):
    """Writes keys or values into a pool, by whole pages or by single tokens. See `pools.write`."""

    def __call__(
        self,
        pool: Pool,
        x: jax.Array,
        pages: Int[Array, " W"],
        offsets: Int[Array, " W"] | None = None,
        /,
    ) -> Pool: ...


class Backend(NamedTuple):
    """The attention functions of one kind of device."""

    packed: Packed
    paged: Paged
    pool_rows: PoolRows
    write: Write
    decode: Decode | None = None  # None: decoding calls `write` and then `paged`
    # Whether decoding, by `decode` or else by `paged`, takes a pools.QuantizedPool as its pools.
    reads_int8: bool = False
