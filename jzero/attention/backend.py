"""The attention interface: the functions of a backend and their definitions.

Dimension letters: B rows, T tokens of a row, N queries of a row, S slots, H query heads, K KV
heads, D dimensions of a head. H / K neighboring query heads share a KV head. Queries are unscaled;
every function scales the scores by D**-0.5.
"""

from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Float, Int

from jzero.attention.pools import Pool
from jzero.types import RowLayout


class Window(NamedTuple):
    """A sliding window: a token sees only keys that are less than `size` positions before it.

    size: of one layer. A layer without a window has one that no sequence fills.
    positions: of every token of a row in its sequence.
    """

    size: Int[Array, ""]
    positions: Int[Array, "B T"]


def given(window: tuple | jax.Array | None) -> tuple:
    """Returns the last argument of `Packed` and `Paged`, or none for a model without windows.

    A kernel that has no windows does not take the argument.
    """
    return () if window is None else (window,)


class Packed(Protocol):
    """Attention of training, scoring and prefill, on rows of several packed sequences.

    segments: the number of each token's sequence in its row, 0 for padding. A segment of a slot is
        contiguous.

    A token sees itself, the previous tokens of its segment in its slot, and the complete prefix of
    its row (`RowLayout`). The output of padding is finite and undefined.

    q has N = T queries, or N = T - prefix if the prefix is left out. Gradients are needed only with
    N = T.

    window: only for a backend that `has_windows`.
    """

    def __call__(
        self,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        segments: Int[Array, "B T"],
        layout: RowLayout,
        window: Window | None = None,
        /,
    ) -> Float[Array, "B N H D"]: ...


class Paged(Protocol):
    """Attention of decoding: one query per slot over the slot's pages of the KV cache.

    k_pool, v_pool: pages of all slots, with `pool_rows` rows of `width` numbers per token.
    table: the pages of each slot, in the order of its tokens.
    lengths: the number of tokens of each slot, at least 1, including the query's token.
    shared: prefix sharing: for each block of neighboring slots, the number of first pages that are
        full and identical. A backend can read these pages once for the block, or ignore `shared`.
    kv_heads: K, which does not always follow from the shape of a pool.
    window: the newest tokens of each slot that are visible, for a backend that `has_windows`. The
        pages before them may have other tokens, and `shared` is then 0.
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
        window: Int[Array, ""] | None = None,
        /,
    ) -> Float[Array, "S H D"]: ...


class Decode(Protocol):
    """Attention of a decode step in one call: RoPE, KV cache write and attention.

    q, k, v: each slot's new token, not rotated.
    cos, sin: for the new token's position. Elements i and i + D / 2 are a pair. A head x becomes
        x * cos + (x with the halves of D exchanged) * sin. sin has the sign of the rotation.
    table, first_page: page p of a slot is page first_page + table[slot, p] of the pools.
    lengths: the number of tokens of each slot, at least 1, including the new token. An idle slot
        has one token, and its pages are page 0, the scratch page, which has undefined content.
    shared: as in `Paged`. The new token of an active slot comes after the shared pages.
    owners: for each block of neighboring slots that share pages, a slot with these pages in its row
        of the table. The row of an idle slot does not have them.
    Returns the output and the updated pools.
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
    """Writes keys or values into a pool, as full pages or single tokens. See `pools.write`."""

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
    # Whether decoding (`decode` if present, else `paged`) supports an int8 or fp8 KV cache
    # (`pools.QuantizedPool`).
    reads_8_bits: bool = False
    # Whether `packed` and `paged` support sliding windows, and decoding uses them.
    has_windows: bool = False
    # Whether they take the tokens of a window as the argument `width`, because it has to be known
    # when they are compiled.
    needs_width: bool = False
    # Whether they take the bound of scores as the argument `soft_cap`.
    has_soft_cap: bool = False
