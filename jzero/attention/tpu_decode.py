"""One kernel for the attention of a decode step on TPUs: RoPE, the write of a token, attention.

See `backend.Decode` for the interface. Between the products of a layer XLA would run some thirty
small operations for the same work, and on a TPU an operation takes a microsecond or two however
small it is (docs/log.md, 2026-11-22).

How the kernel works, for a part of the slots at a time:

1. It rotates queries and keys of all slots, and puts the query heads of a row of the pool together.
   A row holds n = width // D KV heads; a query head is zero outside of its own KV head's lanes.
2. It reads the pages of the slots in blocks. While a block is computed, the next block, which may
   be the next slot's, is on its way from HBM.
3. The last block of a slot is where the new token belongs. The token is put into the block in VMEM,
   and a tile of rows around the token is written back to its page. A page that slots share is never
   written, because the scheduler shares full pages alone.

Samples of one prompt are neighbors and have the prompt's full pages in common. These pages are read
once for all of them, and the queries of all of them make one product with a block. Every slot then
goes on with its own pages.

With two cores a device (TPU v4, v5p) each core has a part of the slots, if there are more than 16.

Pages in 8 bits (rollout.kv_dtype=int8) stay integers on their way: the scores of a head are
multiplied by the scales of its keys, and the weights of the softmax by those of its values. The
scales of a page are read and written with it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jzero import int8
from jzero.attention.pools import Pool, QuantizedPool
from jzero.errors import UserError

SUBLANES = 8  # rows of fp32 in a vector register
LANES = 128  # numbers of such a row
MASKED = -1e30  # finite, as in `xla.py`
BLOCK_TOKENS = 512  # tokens of a slot that are computed at a time
# Bytes in VMEM for blocks of keys and values, two blocks of each: a quarter of the 16 MiB that XLA
# lets an operation use if nobody asks for more.
BLOCK_BYTES = 4 * 2**20
# Slots of one part. Their queries and outputs are in VMEM as fp32: 2 MB for 64 slots of 32 heads.
MOST_SLOTS = 64
# Queries that read pages together. Their softmax takes 1.5 KB each in VMEM, twice: 3 MB.
MOST_QUERIES = 1024

Ref = Any  # a reference to memory inside of a kernel; Pallas has no public type for it


class Sizes(NamedTuple):
    """What is fixed when the kernel is compiled."""

    slots: int  # of a part
    sharing: int  # neighboring slots that may have their first pages in common
    neighbors: int  # those of them that read these pages together; 1: every slot reads all its own
    heads: int  # query heads; q has `heads_per_row` of them in every `width` lanes
    group: int  # query heads of a KV head
    rows: int  # rows of the pool
    width: int  # lanes of a row
    lanes_per_head: int  # in a row; D, or more where heads are padded to a whole row
    head_dim: int  # D
    page_size: int  # tokens of a page
    max_pages: int  # of a slot, in the table
    block_pages: int
    tile: int  # tokens around the new one that are written
    product_dtype: DTypeLike  # of the factors of products
    is_int8: bool  # whether the pools are in 8 bits

    @property
    def heads_per_row(self) -> int:
        return self.width // self.lanes_per_head

    @property
    def queries_per_row(self) -> int:
        """Query heads of a row of the pool, in whole registers."""
        return round_up(self.heads_per_row * self.group, SUBLANES)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.block_pages * self.page_size

    def place_of(self, head: int) -> tuple[int, int]:
        """Returns where a query head of slot 0 lies in VMEM: its row, and its part of the lanes.

        The same head of the next slot lies `queries_per_row` rows further down.
        """
        row, part = divmod(head // self.group, self.heads_per_row)
        return row * self.slots * self.queries_per_row + part * self.group + head % self.group, part

    def query_rows(self, row: int, slot: jax.Array, num_slots: int) -> Any:
        """Returns the rows of VMEM with the queries of `num_slots` slots from `slot` on.

        They are those of one row of the pool.
        """
        first = (row * self.slots + slot) * self.queries_per_row
        return pl.ds(pl.multiple_of(first, SUBLANES), num_slots * self.queries_per_row)


class Pages(NamedTuple):
    """Pages of a slot that are read together: at most as many as a block has."""

    slot: jax.Array  # among the slots of all parts
    first: jax.Array  # the first of them, as a page of the slot's table
    num_pages: jax.Array


class Softmax(NamedTuple):
    """The softmax of the scores of some queries, as far as it is computed."""

    largest: jax.Array  # f32[queries, 1] score
    total: jax.Array  # f32[queries, 1] sum of the weights, relative to the largest score
    mixed: jax.Array  # f32[queries, width] sum of the weighted values


class Scratch(NamedTuple):
    """Memory of a core.

    An axis of 2 is keys and values, except where it says "2 blocks": one of these is computed while
    the other one is read. The last four are there with pages in 8 bits alone.
    """

    q: Ref  # f32[rows * slots * queries, width] rotated queries
    new: Ref  # f32[2, rows, slots, width] the new keys and values, integers with pages in 8 bits
    out: Ref  # f32[rows * slots * queries, width]
    largest: Ref  # f32[rows * neighbors * queries, LANES] of the shared pages, in all lanes
    total: Ref
    k_blocks: Ref  # [2 blocks, rows, block_pages, page, width]
    v_blocks: Ref
    tiles: Ref  # [2, rows, tile, width] what is being written
    read: Ref  # semaphores of the two blocks
    written: Ref  # semaphores of the key's tile and the value's
    new_scales: Ref = None  # f32[2, rows, heads_per_row, slots, page] each scale in all lanes
    k_scales: Ref = None  # f32[2 blocks, rows, block_pages, heads_per_row, page]
    v_scales: Ref = None
    scale_tiles: Ref = None  # f32[2, rows, heads_per_row, page] what is being written


def round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def choose(condition: jax.Array, first: Pages, second: Pages) -> Pages:
    """Returns `first` where the condition holds, else `second`."""
    return Pages(*(jnp.where(condition, x, y) for x, y in zip(first, second, strict=True)))


# -- the kernel ------------------------------------------------------------------------------------


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, sizes: Sizes) -> jax.Array:
    """Rotates the heads of a row [slots, width] in fp32. `sin` has the sign of the rotation."""
    width, half = sizes.width, sizes.head_dim // 2
    behind = pltpu.roll(x, half, 1)  # lane i has what was in lane i - half
    partner = behind
    if sizes.head_dim < width:
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) % sizes.lanes_per_head
        partner = jnp.where(lane < half, pltpu.roll(x, width - half, 1), behind)
    return x * cos + partner * sin


def moved(x: jax.Array, source: int, target: int, sizes: Sizes) -> jax.Array:
    """Moves the head in part `source` of a row to part `target`. The other lanes mean nothing."""
    shift = (target - source) * sizes.lanes_per_head % sizes.width
    return pltpu.roll(x, shift, 1) if shift else x


def in_part(part: int, shape: tuple[int, ...], sizes: Sizes) -> jax.Array:
    """Says which lanes belong to a part of a row."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) // sizes.lanes_per_head == part


def lay_out_queries(q: Ref, cos: jax.Array, sin: jax.Array, scratch: Scratch, sizes: Sizes) -> None:
    """Rotates the queries of all slots, and puts every head where `Sizes.place_of` says."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    if sizes.heads < sizes.rows * sizes.queries_per_row:
        scratch.q[...] = jnp.zeros_like(scratch.q)
    for first in range(0, sizes.heads, n):
        row = q[:, first // n * width : (first // n + 1) * width]
        # Rounded as the layer would round it.
        row = rotated(row.astype(jnp.float32), cos, sin, sizes).astype(q.dtype)
        row = row.astype(jnp.float32)
        for head in range(first, min(first + n, sizes.heads)):
            place, part = sizes.place_of(head)
            x = moved(row, head - first, part, sizes)
            if n > 1:
                x = jnp.where(in_part(part, x.shape, sizes), x, 0)
            scratch.q[pl.ds(place, slots, stride=sizes.queries_per_row), :] = x


def write_out(out: Ref, scratch: Scratch, sizes: Sizes) -> None:
    """Puts the outputs of all slots into the order of the heads."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    for first in range(0, sizes.heads, n):
        row = None
        for head in range(first, min(first + n, sizes.heads)):
            place, part = sizes.place_of(head)
            x = scratch.out[pl.ds(place, slots, stride=sizes.queries_per_row), :]
            x = moved(x, part, head - first, sizes)
            row = x if row is None else jnp.where(in_part(head - first, x.shape, sizes), x, row)
        assert row is not None
        out[:, first // n * width : (first // n + 1) * width] = row.astype(out.dtype)


def put_new(which: int, row: int, x: jax.Array, scratch: Scratch, sizes: Sizes) -> None:
    """Puts the new keys (0) or values (1) of a row [slots, width] where blocks take them from.

    With pages in 8 bits they are rounded as `int8.round_to_int8` does.
    """
    x = x.astype(jnp.float32)
    if not sizes.is_int8:
        scratch.new[which, row] = x
        return
    divisors = jnp.ones_like(x)
    for part in range(sizes.heads_per_row):
        is_head = in_part(part, x.shape, sizes)
        largest = jnp.where(is_head, jnp.abs(x), 0).max(axis=1, keepdims=True)
        scale = largest / int8.LARGEST
        divisors = jnp.where(is_head & (scale > 0), scale, divisors)
        place = scratch.new_scales.at[which, row, part]
        place[...] = jnp.broadcast_to(scale, (sizes.slots, sizes.page_size))
    scratch.new[which, row] = jnp.round(x / divisors)


def scales_of_queries(scales: Ref, num_queries: int, sizes: Sizes) -> jax.Array:
    """Returns the scale of every token of a block for every query head of a row, of some slots.

    scales: f32[block_pages, heads_per_row, page]. Returns f32[num_queries, block], or [1, block].
    """
    of_parts = [
        jnp.concatenate([scales[page, pl.ds(part, 1)] for page in range(sizes.block_pages)], axis=1)
        for part in range(sizes.heads_per_row)
    ]
    query = (
        lax.broadcasted_iota(jnp.int32, (num_queries, sizes.block_tokens), 0)
        % sizes.queries_per_row
    )
    chosen = of_parts[0]
    for part, of_part in enumerate(of_parts[1:], start=1):
        chosen = jnp.where(query // sizes.group == part, of_part, chosen)
    return chosen


def kernel(
    lengths: Ref,  # i32[S] in SMEM, with the new token
    table: Ref,  # i32[S * max_pages] in SMEM
    first_page: Ref,  # i32[1] in SMEM
    shared: Ref,  # i32[S / sharing] in SMEM
    owners: Ref,  # i32[S / sharing] in SMEM
    q: Ref,  # [slots, q_rows * width]
    k: Ref,  # [slots, rows * width]
    v: Ref,
    cos: Ref,  # f32[slots, width]
    sin: Ref,
    *others: Ref,
    sizes: Sizes,
) -> None:
    """Computes a part of the slots. See the module's docstring.

    others: the pools before; the output [slots, q_rows * width]; the pools, which are the same
        memory as those before, in HBM; and the scratch memory. The pools are those of the keys and
        of the values [rows, pages, page, width], and with pages in 8 bits their scales.
    """
    num_pools = 4 if sizes.is_int8 else 2
    out, *others_behind = others[num_pools:]
    pools, scale_pools = others_behind[:2], others_behind[2:num_pools]
    scratch = Scratch(*others_behind[num_pools:])
    blocks = scratch.k_blocks, scratch.v_blocks
    scale_blocks = (scratch.k_scales, scratch.v_scales) if sizes.is_int8 else ()
    slots, rows, width, page = sizes.slots, sizes.rows, sizes.width, sizes.page_size
    base = pl.program_id(0) * slots  # the first slot of this part
    cosines, sines = cos[...], sin[...]

    lay_out_queries(q, cosines, sines, scratch, sizes)
    for row in range(rows):
        lanes = slice(row * width, (row + 1) * width)
        new_key = rotated(k[:, lanes].astype(jnp.float32), cosines, sines, sizes)
        put_new(0, row, new_key.astype(k.dtype), scratch, sizes)
        put_new(1, row, v[:, lanes], scratch, sizes)
    # Pages of a block that were never read hold anything. The weights of their tokens are 0, but 0
    # times NaN is NaN.
    never_read = scratch.v_scales if sizes.is_int8 else scratch.v_blocks
    never_read[...] = jnp.zeros_like(never_read)

    def page_of(slot: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the page of the pool that is page `number` of a slot of all parts."""
        return first_page[0] + table[slot * sizes.max_pages + number]

    def shared_pages(slot: jax.Array) -> jax.Array:
        """Returns how many first pages the neighbors of a slot have in common."""
        if sizes.neighbors == 1:
            return jnp.int32(0)
        return shared[(base + slot) // sizes.sharing]

    def pages_of_neighbors(slot: jax.Array, block: jax.Array) -> Pages:
        """Returns the pages of one block among those that a slot shares with its neighbors."""
        owner = owners[(base + slot) // sizes.sharing]
        first = block * sizes.block_pages
        return Pages(owner, first, jnp.clip(shared_pages(slot) - first, 0, sizes.block_pages))

    def first_own_page(slot: jax.Array) -> jax.Array:
        """Returns the first page that a slot reads alone.

        That of an idle slot is its first one, the scratch page: it has one token, and its row of
        the table has none of the pages that its neighbors share. Its output means nothing.
        """
        count = shared_pages(slot)
        return jnp.where(lengths[base + slot] > count * page, count, 0)

    def own_pages(slot: jax.Array, block: jax.Array) -> Pages:
        """Returns the pages of one block among those that a slot reads alone."""
        first = first_own_page(slot) + block * sizes.block_pages
        count = pl.cdiv(lengths[base + slot], page) - first
        return Pages(base + slot, first, jnp.clip(count, 0, sizes.block_pages))

    def pages_at_start(slot: jax.Array) -> Pages:
        """Returns the pages that are read first for neighbors whose first slot is `slot`."""
        zero = jnp.int32(0)
        if sizes.neighbors == 1:
            return own_pages(slot, zero)
        return choose(shared_pages(slot) > 0, pages_of_neighbors(slot, zero), own_pages(slot, zero))

    sources, targets = (*pools, *scale_pools), (*blocks, *scale_blocks)

    def start_reading(pages: Pages, buffer: jax.Array) -> None:
        def start_page(number: jax.Array, _: None) -> None:
            source = page_of(pages.slot, pages.first + number)
            for pool, target in zip(sources, targets, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, source], target.at[buffer, :, number], scratch.read.at[buffer]
                ).start()

        lax.fori_loop(0, pages.num_pages, start_page, None)

    def finish_reading(pages: Pages, buffer: jax.Array) -> None:
        def finish_page(_: jax.Array, __: None) -> None:
            # To wait is to wait for a number of bytes. All pages have as many as page 0.
            for pool, target in zip(sources, targets, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, 0], target.at[buffer, :, 0], scratch.read.at[buffer]
                ).wait()

        lax.fori_loop(0, pages.num_pages, finish_page, None)

    def writes_of(which: int, target: jax.Array | int, offset: jax.Array | int) -> list:
        """Returns the copies of what is written to a page: 0 is of the key, 1 of the value."""
        written = scratch.written.at[which]
        place = pools[which].at[:, target, pl.ds(offset, sizes.tile)]
        copies = [pltpu.make_async_copy(scratch.tiles.at[which], place, written)]
        if sizes.is_int8:
            place = scale_pools[which].at[:, target]
            copies.append(pltpu.make_async_copy(scratch.scale_tiles.at[which], place, written))
        return copies

    def finish_writing() -> None:
        for which in (0, 1):
            for copy in writes_of(which, 0, 0):
                copy.wait()

    def put_new_token(pages: Pages, buffer: jax.Array) -> None:
        """Puts the new key and value into a slot's last pages, and starts to write them."""
        slot = pages.slot - base
        position = lengths[pages.slot] - 1
        inside = position - pages.first * page
        number, offset = inside // page, inside % page
        start = pl.multiple_of(offset // sizes.tile * sizes.tile, sizes.tile)
        token = lax.broadcasted_iota(jnp.int32, (sizes.tile, width), 0)
        is_new = token == offset % sizes.tile
        target = page_of(pages.slot, position // page)
        pl.when(slot > 0)(finish_writing)  # of the slot before: there is one tile
        for which, block_of_pool in enumerate(blocks):
            for row in range(rows):
                tokens = (buffer, row, number, pl.ds(start, sizes.tile))
                old = block_of_pool[tokens].astype(jnp.float32)
                new = scratch.new[which, row, pl.ds(slot, 1), :]
                tile = jnp.where(is_new, new, old).astype(block_of_pool.dtype)
                block_of_pool[tokens] = tile
                scratch.tiles[which, row] = tile
            if sizes.is_int8:
                put_new_scales(which, slot, buffer, number, offset)
            for copy in writes_of(which, target, start):
                copy.start()

    def put_new_scales(
        which: int, slot: jax.Array, buffer: jax.Array, number: jax.Array, offset: jax.Array
    ) -> None:
        """Puts the scales of the new token into page `number` of a block."""
        is_new = lax.broadcasted_iota(jnp.int32, (1, page), 1) == offset
        for row in range(rows):
            for part in range(sizes.heads_per_row):
                place = (buffer, row, number, pl.ds(part, 1))
                new = scratch.new_scales[which, row, part, pl.ds(slot, 1), :]
                scales = jnp.where(is_new, new, scale_blocks[which][place])
                scale_blocks[which][place] = scales
                scratch.scale_tiles[which, row, pl.ds(part, 1)] = scales

    def factor(x: jax.Array) -> jax.Array:
        """Converts keys or values for a product."""
        if sizes.is_int8:
            x = x.astype(jnp.float32)
        return x.astype(sizes.product_dtype)

    def attend_block(
        softmax: tuple[Softmax, ...], q: list[jax.Array], tokens: jax.Array, buffer: jax.Array
    ) -> tuple[Softmax, ...]:
        """Folds the first `tokens` tokens of a block into the softmax of every row."""
        num_queries = len(q[0])
        is_visible = lax.broadcasted_iota(jnp.int32, (num_queries, sizes.block_tokens), 1) < tokens
        after = []
        for row, (largest, total, mixed) in enumerate(softmax):
            keys, values = (
                factor(x[buffer, row].reshape(sizes.block_tokens, width)) for x in blocks
            )
            scores = product(q[row], keys, 1, sizes) * sizes.head_dim**-0.5
            if sizes.is_int8:
                scores *= scales_of_queries(scratch.k_scales.at[buffer, row], num_queries, sizes)
            scores = jnp.where(is_visible, scores, MASKED)
            new_largest = jnp.maximum(largest, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - new_largest)
            rescale = jnp.exp(largest - new_largest)
            total = total * rescale + weights.sum(axis=1, keepdims=True)
            if sizes.is_int8:
                weights *= scales_of_queries(scratch.v_scales.at[buffer, row], num_queries, sizes)
            values = product(weights.astype(sizes.product_dtype), values, 0, sizes)
            after.append(Softmax(new_largest, total, mixed * rescale + values))
        return tuple(after)

    def queries_of(slot: jax.Array, num_slots: int) -> list[jax.Array]:
        """Returns the queries of neighboring slots, for every row."""
        places = [sizes.query_rows(row, slot, num_slots) for row in range(rows)]
        return [scratch.q[place, :].astype(sizes.product_dtype) for place in places]

    def empty_softmax(num_slots: int) -> tuple[Softmax, ...]:
        """Returns the softmax of every row before the first token."""
        num_queries = num_slots * sizes.queries_per_row
        column = (num_queries, 1)
        empty = Softmax(
            jnp.full(column, MASKED), jnp.zeros(column), jnp.zeros((num_queries, width))
        )
        return (empty,) * rows

    def attend_shared(first: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes the shared pages of neighbors, of which `first` is the first slot, if any.

        Leaves the softmax of each of them in the scratch memory, and returns the next buffer.
        """
        num_tokens = shared_pages(first) * page
        num_blocks = pl.cdiv(shared_pages(first), sizes.block_pages)
        queries = queries_of(first, sizes.neighbors)

        def step(block: jax.Array, carry: tuple) -> tuple:
            buffer, softmax = carry
            pages = pages_of_neighbors(first, block)
            is_last = block + 1 == num_blocks
            next_shared = pages_of_neighbors(first, block + 1)
            start_reading(choose(is_last, own_pages(first, jnp.int32(0)), next_shared), 1 - buffer)
            finish_reading(pages, buffer)
            visible = num_tokens - pages.first * page
            return 1 - buffer, attend_block(softmax, queries, visible, buffer)

        start = buffer, empty_softmax(sizes.neighbors)
        buffer, softmax = lax.fori_loop(0, num_blocks, step, start)
        num_queries = sizes.neighbors * sizes.queries_per_row
        for row, of_row in enumerate(softmax):
            kept = pl.ds(row * num_queries, num_queries)
            scratch.largest[kept, :] = jnp.broadcast_to(of_row.largest, (num_queries, LANES))
            scratch.total[kept, :] = jnp.broadcast_to(of_row.total, (num_queries, LANES))
            scratch.out[sizes.query_rows(row, first, sizes.neighbors), :] = of_row.mixed
        return buffer

    def softmax_of_shared(slot: jax.Array) -> tuple[Softmax, ...]:
        """Returns what `attend_shared` has left of a slot."""
        if sizes.neighbors == 1:
            return empty_softmax(1)
        found = []
        for row in range(rows):
            first = (row * sizes.neighbors + slot % sizes.neighbors) * sizes.queries_per_row
            kept = pl.ds(pl.multiple_of(first, SUBLANES), sizes.queries_per_row)
            mixed = scratch.out[sizes.query_rows(row, slot, 1), :]
            found.append(Softmax(scratch.largest[kept, :1], scratch.total[kept, :1], mixed))
        return tuple(found)

    def attend_slot(slot: jax.Array, end: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes the own pages of a slot, the first of which are on their way to `buffer`.

        end: the first slot behind its neighbors. Returns the next buffer.
        """
        own_tokens = lengths[base + slot] - first_own_page(slot) * page
        num_blocks = pl.cdiv(own_tokens, sizes.block_tokens)
        queries = queries_of(slot, 1)

        def step(block: jax.Array, carry: tuple) -> tuple:
            buffer, softmax = carry
            pages = own_pages(slot, block)
            is_last = block + 1 == num_blocks
            next_slot = jnp.minimum(slot + 1, slots - 1)
            of_next_slot = choose(
                next_slot == end, pages_at_start(next_slot), own_pages(next_slot, jnp.int32(0))
            )
            to_read = choose(is_last, of_next_slot, own_pages(slot, block + 1))
            is_end = is_last & (slot + 1 == slots)
            start_reading(
                to_read._replace(num_pages=jnp.where(is_end, 0, to_read.num_pages)), 1 - buffer
            )
            finish_reading(pages, buffer)

            @pl.when(is_last)
            def _() -> None:
                put_new_token(pages, buffer)

            visible = lengths[base + slot] - pages.first * page
            return 1 - buffer, attend_block(softmax, queries, visible, buffer)

        start = buffer, softmax_of_shared(slot)
        buffer, softmax = lax.fori_loop(0, num_blocks, step, start)
        for row, (_, total, mixed) in enumerate(softmax):
            scratch.out[sizes.query_rows(row, slot, 1), :] = mixed / total
        return buffer

    def attend_neighbors(number: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes slots that read their shared pages together. Returns the next buffer."""
        first = number * sizes.neighbors
        end = first + sizes.neighbors
        if sizes.neighbors == 1:
            return attend_slot(first, end, buffer)
        buffer = attend_shared(first, buffer)
        return lax.fori_loop(
            first, end, lambda slot, buffer: attend_slot(slot, end, buffer), buffer
        )

    start_reading(pages_at_start(jnp.int32(0)), jnp.int32(0))
    lax.fori_loop(0, slots // sizes.neighbors, attend_neighbors, jnp.int32(0))
    finish_writing()
    write_out(out, scratch, sizes)


def product(first: jax.Array, second: jax.Array, axis: int, sizes: Sizes) -> jax.Array:
    """Contracts the last axis of `first` with `axis` of `second`; the result is in fp32."""
    is_fp32 = sizes.product_dtype == jnp.float32
    return lax.dot_general(
        first,
        second,
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if is_fp32 else None,
    )


# -- the call --------------------------------------------------------------------------------------


def decode(
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
    interpret: bool = False,
) -> tuple[Float[Array, "S H D"], Pool, Pool]:
    """Rotates, writes and attends in one kernel; see `backend.Decode`.

    Products of bfloat16 with pools of bfloat16 or of 8 bits have the weights of the softmax in
    bfloat16. With fp32 in either place all factors are in fp32. Neighbors read their shared pages
    together, as many of them as `slots_that_read_together` says.

    Raises UserError for pages that are no multiple of what is written at once: 16 tokens in 16
    bits, 8 in 32, and in 8 bits the 128 tokens whose scales are one row of a register.
    """
    S, H, D = q.shape
    check_page_size(k_pool)
    cores = 1 if interpret else pltpu.get_tpu_info().num_cores
    sizes = sizes_of(q, k.shape[1], k_pool, table.shape[1], len(shared), cores)
    padding = (0, -S % sizes.slots)  # slots of one token, in the scratch page

    def flat(x: jax.Array) -> jax.Array:
        """[S, heads, D] -> [slots of all parts, rows * width]"""
        missing = -x.shape[1] % sizes.heads_per_row
        x = jnp.pad(x, (padding, (0, missing), (0, sizes.lanes_per_head - D)))
        return x.reshape(len(x), -1)

    def by_lane(x: jax.Array) -> jax.Array:
        """[S, D] -> [slots of all parts, width]"""
        x = jnp.pad(x, (padding, (0, sizes.lanes_per_head - D)))
        return jnp.concatenate([x] * sizes.heads_per_row, axis=1)

    # The pages of slots that are padding are those of the scratch page, which is page 0.
    table = jnp.pad(table, (padding, (0, 0))).reshape(-1)
    lengths = jnp.pad(lengths, padding, constant_values=1)
    padding_blocks = (0, math.ceil(len(lengths) / sizes.sharing) - len(shared))
    shared = jnp.pad(shared, padding_blocks)
    owners = jnp.pad(owners, padding_blocks)
    scalars = lengths, table, first_page.reshape(1), shared, owners
    out, *arrays = call(
        tuple(scalar.astype(jnp.int32) for scalar in scalars),
        (flat(q), flat(k), flat(v), by_lane(cos), by_lane(sin)),
        arrays_of(k_pool, v_pool),
        sizes,
        interpret,
    )
    out = out[:S].reshape(S, -1, sizes.lanes_per_head)[:, :H, :D]
    k_pool, v_pool = pools_of(arrays)
    return out, k_pool, v_pool


def check_page_size(k_pool: Pool) -> None:
    """Raises UserError for pages that the kernel cannot write; see `decode`."""
    is_int8 = isinstance(k_pool, QuantizedPool)
    numbers = k_pool.values if is_int8 else k_pool
    num_bytes = numbers.dtype.itemsize
    page_size = numbers.shape[2]
    multiple = LANES if is_int8 else tile_tokens(num_bytes)
    if page_size % multiple:
        raise UserError(
            f"rollout.page_size={page_size}: with numbers of {num_bytes} bytes the "
            f"pages of the TPU's decode kernel have a multiple of {multiple} tokens; set "
            f"rollout.page_size={multiple}, or leave out model.attention=tpu_fused"
        )


def tile_tokens(num_bytes: int) -> int:
    """Returns how many tokens are written at once, where a number has `num_bytes` bytes."""
    return 4 * SUBLANES // num_bytes


def sizes_of(
    q: Float[Array, "S H D"] | jax.ShapeDtypeStruct,
    kv_heads: int,
    k_pool: Pool | jax.ShapeDtypeStruct,
    max_pages: int,
    num_blocks: int,
    cores: int,
) -> Sizes:
    """Returns the sizes of the kernel for queries and a pool, whose shapes and types alone count.

    max_pages: of a slot. num_blocks: of neighboring slots that may share pages. cores: of a device.
    """
    S, H, D = q.shape
    is_int8 = isinstance(k_pool, QuantizedPool)
    numbers = k_pool.values if is_int8 else k_pool
    rows, _, page_size, width = numbers.shape
    sharing = S // num_blocks
    sizes = Sizes(
        slots=slots_of_part(S, cores, sharing),
        sharing=sharing,
        neighbors=1,
        heads=H,
        group=H // kv_heads,
        rows=rows,
        width=width,
        lanes_per_head=D if width % D == 0 else width,
        head_dim=D,
        page_size=page_size,
        max_pages=max_pages,
        block_pages=pages_per_block(numbers, max_pages),
        tile=tile_tokens(numbers.dtype.itemsize),
        product_dtype=q.dtype if is_int8 else jnp.promote_types(q.dtype, numbers.dtype),
        is_int8=is_int8,
    )
    return sizes._replace(neighbors=slots_that_read_together(sizes))


def arrays_of(k_pool: Pool, v_pool: Pool) -> tuple[jax.Array, ...]:
    """Returns the arrays of two pools: keys and values, and then their scales if there are any."""
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        return k_pool.values, v_pool.values, k_pool.scales, v_pool.scales
    assert isinstance(k_pool, jax.Array) and isinstance(v_pool, jax.Array)
    return k_pool, v_pool


def pools_of(arrays: Sequence[jax.Array]) -> tuple[Pool, Pool]:
    """Does the reverse of `arrays_of`."""
    k, v, *scales = arrays
    if not scales:
        return k, v
    k_scales, v_scales = scales
    return QuantizedPool(k, k_scales), QuantizedPool(v, v_scales)


def call(
    scalars: tuple[jax.Array, ...],
    by_slot: tuple[jax.Array, ...],
    pools: tuple[jax.Array, ...],
    sizes: Sizes,
    interpret: bool,
) -> list[jax.Array]:
    """Calls the kernel for all parts; the arguments are its own, in their order."""
    q = by_slot[0]
    dtype = pools[0].dtype
    rows, width = sizes.rows, sizes.width

    def of_part(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((sizes.slots, x.shape[1]), lambda part, *_: (part, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    all_queries = pltpu.VMEM((rows * sizes.slots * sizes.queries_per_row, width), jnp.float32)
    of_neighbors = pltpu.VMEM((rows * sizes.neighbors * sizes.queries_per_row, LANES), jnp.float32)
    block = pltpu.VMEM((2, rows, sizes.block_pages, sizes.page_size, width), dtype)
    scratch = Scratch(
        q=all_queries,
        new=pltpu.VMEM((2, rows, sizes.slots, width), jnp.float32),
        out=all_queries,
        largest=of_neighbors,
        total=of_neighbors,
        k_blocks=block,
        v_blocks=block,
        tiles=pltpu.VMEM((2, rows, sizes.tile, width), dtype),
        read=pltpu.SemaphoreType.DMA((2,)),
        written=pltpu.SemaphoreType.DMA((2,)),
    )
    if sizes.is_int8:
        scratch = with_scales(scratch, sizes)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(len(q) // sizes.slots,),
        in_specs=[*map(of_part, by_slot), *[in_hbm] * len(pools)],
        out_specs=[of_part(q), *[in_hbm] * len(pools)],
        scratch_shapes=[shape for shape in scratch if shape is not None],
    )
    first_pool = len(scalars) + len(by_slot)
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)],
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pools))},
        interpret=interpret,
        name="decode_attention",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
    )(*scalars, *by_slot, *pools)


def with_scales(scratch: Scratch, sizes: Sizes) -> Scratch:
    """Returns the scratch memory with what pages in 8 bits need beside it."""
    rows, heads_per_row, page = sizes.rows, sizes.heads_per_row, sizes.page_size
    block = pltpu.VMEM((2, rows, sizes.block_pages, heads_per_row, page), jnp.float32)
    return scratch._replace(
        new_scales=pltpu.VMEM((2, rows, heads_per_row, sizes.slots, page), jnp.float32),
        k_scales=block,
        v_scales=block,
        scale_tiles=pltpu.VMEM((2, rows, heads_per_row, page), jnp.float32),
    )


def slots_that_read_together(sizes: Sizes) -> int:
    """Returns how many of the slots that share pages read them together.

    Parts hold them as a whole, and VMEM holds the softmax of all their queries.
    """
    most = max(1, MOST_QUERIES // (sizes.rows * sizes.queries_per_row))
    divisible = math.gcd(sizes.sharing, sizes.slots)
    return max(n for n in range(1, divisible + 1) if divisible % n == 0 and n <= most)


def slots_of_part(num_slots: int, cores: int, sharing: int) -> int:
    """Returns the number of slots in a part: all, or whole registers of 16 bits.

    A part has at most MOST_SLOTS. Each core of the device has a part, unless there are too few
    slots. Parts hold blocks of slots that share pages as a whole, if blocks are small enough.
    """
    parts = max(cores, math.ceil(num_slots / MOST_SLOTS))
    smallest = 2 * SUBLANES
    if parts == 1 or num_slots <= smallest:
        return num_slots
    slots = math.ceil(num_slots / parts)
    whole_blocks = math.lcm(smallest, sharing)
    if whole_blocks > MOST_SLOTS:
        return round_up(slots, smallest)
    most = MOST_SLOTS // whole_blocks * whole_blocks
    return min(round_up(slots, whole_blocks), most)


def pages_per_block(pool: jax.Array | jax.ShapeDtypeStruct, max_pages: int) -> int:
    """Returns how many pages of a slot are computed at a time, so that VMEM holds the blocks."""
    rows, _, page_size, width = pool.shape
    bytes_of_page = 2 * 2 * rows * page_size * width * pool.dtype.itemsize
    pages = min(BLOCK_TOKENS // page_size, BLOCK_BYTES // bytes_of_page, max_pages)
    return max(1, pages)
