"""One fused TPU kernel for the attention of a decode step: RoPE, KV cache write and attention.

See `backend.Decode` for the interface. Without the kernel XLA runs some thirty small operations for
this work between the matrix products of a layer, and on a TPU even the smallest operation takes a
microsecond or two (lab/log.md, 2026-11-22).

The kernel computes one part of the slots at a time:

1. It rotates queries and keys of all slots and groups the query heads by rows of the pool. A row
   holds n = width // D KV heads. A query head is zero outside the lanes of its KV head.
2. It reads the pages of the slots in blocks, with double buffering: while a block is computed, the
   next block, possibly of the next slot, is copied from HBM.
3. The new token belongs to the last block of its slot. The kernel inserts the token into the
   block in VMEM and writes a tile of rows around the token back to the token's page. Shared pages
   are never written, because the scheduler shares only full pages.

Prefix sharing: samples of one prompt are neighboring slots and have the prompt's full pages in
common. These pages are read once for all neighbors, and the queries of all neighbors form one
product with a block. Then every slot reads its private pages.

On devices with two cores (TPU v4, v5p) each core has a part of the slots, if there are more than 16
slots.

The values of an 8-bit KV cache (rollout.kv_dtype=int8 or fp8) are not dequantized: the scores of a
head are multiplied by the scales of its keys, and the softmax weights by the scales of its values.
A page's scales are read and written together with the page.
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

from jzero.attention.pools import Pool, QuantizedPool, finite_or_zero, number_of
from jzero.errors import UserError
from jzero.numerics.eight_bits import Format, round_quotient

SUBLANES = 8  # rows of fp32 in a vector register
LANES = 128  # numbers in such a row
MASKED = -1e30  # finite, as in `xla.py`
BLOCK_TOKENS = 512  # tokens of a slot that are computed at a time
# Bytes in VMEM for two blocks of keys and two blocks of values: a quarter of the 16 MiB that XLA
# allows an operation by default.
BLOCK_BYTES = 4 * 2**20
# Maximum slots of a part. VMEM holds their queries and outputs in fp32: 2 MB for 64 slots of 32
# heads.
MOST_SLOTS = 64
# Maximum queries that read shared pages together. The softmax of each takes 1.5 KB in VMEM, twice:
# 3 MB.
MOST_QUERIES = 1024

Ref = Any  # a reference to memory inside a kernel; Pallas has no public type for it


class Sizes(NamedTuple):
    """The compile-time constants of the kernel."""

    slots: int  # slots of a part
    sharing: int  # neighboring slots that can have their first pages in common
    neighbors: int  # neighboring slots that read their shared pages together; 1: no joint reads
    heads: int  # query heads; q has `heads_per_row` of them in every `width` lanes
    group: int  # query heads of a KV head
    rows: int  # rows of the pool
    width: int  # lanes of a row
    lanes_per_head: int  # in a row; D, or more if heads are padded to a full row
    head_dim: int  # D
    page_size: int  # tokens of a page
    max_pages: int  # pages of a slot in the table
    block_pages: int  # pages of a block
    tile: int  # tokens written at once, including the new token
    product_dtype: DTypeLike  # dtype of the factors of products
    number: Format | None  # the numbers of an 8-bit KV cache; None: the KV cache has no scales

    @property
    def heads_per_row(self) -> int:
        return self.width // self.lanes_per_head

    @property
    def queries_per_row(self) -> int:
        """Query heads of a row of the pool, rounded up to full registers."""
        return round_up(self.heads_per_row * self.group, SUBLANES)

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size

    def place_of(self, head: int) -> tuple[int, int]:
        """Returns the row in VMEM and the part of the lanes of a query head of slot 0.

        The same head of the next slot is `queries_per_row` rows further down.
        """
        row, part = divmod(head // self.group, self.heads_per_row)
        return row * self.slots * self.queries_per_row + part * self.group + head % self.group, part

    def query_rows(self, row: int, slot: jax.Array, num_slots: int) -> Any:
        """Returns the rows of VMEM with the queries of `num_slots` slots from `slot` on.

        These are the queries for one row of the pool.
        """
        first = (row * self.slots + slot) * self.queries_per_row
        return pl.ds(pl.multiple_of(first, SUBLANES), num_slots * self.queries_per_row)


class Pages(NamedTuple):
    """Consecutive pages of a slot that are read together, at most `Sizes.block_pages`."""

    slot: jax.Array  # index among the slots of all parts
    first: jax.Array  # index of the first page in the slot's row of the table
    num_pages: jax.Array


class Softmax(NamedTuple):
    """The online softmax of some queries over the blocks computed so far."""

    largest: jax.Array  # f32[queries, 1] the largest score
    total: jax.Array  # f32[queries, 1] sum of the weights, relative to the largest score
    mixed: jax.Array  # f32[queries, width] sum of the weighted values


class Scratch(NamedTuple):
    """Scratch memory of a core.

    An axis of 2 is keys and values, except in "2 blocks": a double buffer, in which one block is
    computed while the other block is read. The last four exist only with an 8-bit KV cache.
    """

    q: Ref  # f32[rows * slots * queries, width] rotated queries
    new: Ref  # f32[2, rows, slots, width] the new keys and values; numbers of an 8-bit KV cache
    out: Ref  # f32[rows * slots * queries, width]
    # The softmax over the shared pages. Every lane has the same number.
    largest: Ref  # f32[rows * neighbors * queries, LANES]
    total: Ref
    k_blocks: Ref  # [2 blocks, rows, block_pages, page, width]
    v_blocks: Ref
    tiles: Ref  # [2, rows, tile, width] the source of the write to a page
    read: Ref  # semaphores of the two blocks
    written: Ref  # semaphores of the tile of keys and the tile of values
    new_scales: Ref = None  # f32[2, rows, heads_per_row, slots, page] each scale in all lanes
    k_scales: Ref = None  # f32[2 blocks, rows, block_pages, heads_per_row, page]
    v_scales: Ref = None
    scale_tiles: Ref = None  # f32[2, rows, heads_per_row, page] the source of the write to a page


def round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def choose(condition: jax.Array, first: Pages, second: Pages) -> Pages:
    return Pages(*(jnp.where(condition, x, y) for x, y in zip(first, second, strict=True)))


# -- the kernel ------------------------------------------------------------------------------------


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, sizes: Sizes) -> jax.Array:
    """Rotates the heads of a row [slots, width] in fp32. `sin` has the sign of the rotation."""
    width, half = sizes.width, sizes.head_dim // 2
    shifted = pltpu.roll(x, half, 1)  # lane i has the number from lane i - half
    partner = shifted
    if sizes.head_dim < width:
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) % sizes.lanes_per_head
        partner = jnp.where(lane < half, pltpu.roll(x, width - half, 1), shifted)
    return x * cos + partner * sin


def move_head(x: jax.Array, source: int, target: int, sizes: Sizes) -> jax.Array:
    """Moves the head in part `source` of a row to part `target`; other lanes are undefined."""
    shift = (target - source) * sizes.lanes_per_head % sizes.width
    return pltpu.roll(x, shift, 1) if shift else x


def in_part(part: int, shape: tuple[int, ...], sizes: Sizes) -> jax.Array:
    """Returns a mask of the lanes that belong to a part of a row."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) // sizes.lanes_per_head == part


def lay_out_queries(q: Ref, cos: jax.Array, sin: jax.Array, scratch: Scratch, sizes: Sizes) -> None:
    """Rotates the queries of all slots and stores every head at its `Sizes.place_of`."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    if sizes.heads < sizes.rows * sizes.queries_per_row:
        scratch.q[...] = jnp.zeros_like(scratch.q)
    for first in range(0, sizes.heads, n):
        start = first // n * width
        row = q[:, start : start + width]
        # Rotated in fp32, then rounded to the layer's dtype as the layer itself would.
        row = rotate(row.astype(jnp.float32), cos, sin, sizes).astype(q.dtype)
        row = row.astype(jnp.float32)
        for head in range(first, min(first + n, sizes.heads)):
            place, part = sizes.place_of(head)
            x = move_head(row, head - first, part, sizes)
            if n > 1:
                # A product sums over all lanes of a row, so the lanes of other heads must be 0.
                x = jnp.where(in_part(part, x.shape, sizes), x, 0)
            scratch.q[pl.ds(place, slots, stride=sizes.queries_per_row), :] = x


def write_out(out: Ref, scratch: Scratch, sizes: Sizes) -> None:
    """Writes the outputs of all slots in the order of the heads."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    for first in range(0, sizes.heads, n):
        # A row of the output collects n neighboring heads, each in its part of the lanes.
        row = None
        for head in range(first, min(first + n, sizes.heads)):
            place, part = sizes.place_of(head)
            x = scratch.out[pl.ds(place, slots, stride=sizes.queries_per_row), :]
            x = move_head(x, part, head - first, sizes)
            row = x if row is None else jnp.where(in_part(head - first, x.shape, sizes), x, row)
        assert row is not None
        start = first // n * width
        out[:, start : start + width] = row.astype(out.dtype)


def store_new(which: int, row: int, x: jax.Array, scratch: Scratch, sizes: Sizes) -> None:
    """Stores the new keys (`which` 0) or values (1) of a row [slots, width] in the scratch memory.

    For an 8-bit KV cache they are rounded like `eight_bits.round_to_8_bits`.
    """
    x = finite_or_zero(x.astype(jnp.float32))
    if sizes.number is None:
        scratch.new[which, row] = x
        return
    divisors = jnp.ones_like(x)
    for part in range(sizes.heads_per_row):
        is_head = in_part(part, x.shape, sizes)
        largest = jnp.where(is_head, jnp.abs(x), 0).max(axis=1, keepdims=True)
        scale = largest / sizes.number.largest
        divisors = jnp.where(is_head & (scale > 0), scale, divisors)
        place = scratch.new_scales.at[which, row, part]
        place[...] = jnp.broadcast_to(scale, (sizes.slots, sizes.page_size))
    scratch.new[which, row] = round_quotient(x / divisors, sizes.number).astype(jnp.float32)


def scales_by_query(scales: Ref, num_queries: int, sizes: Sizes) -> jax.Array:
    """Returns the scales of a block's tokens for each query of a row.

    scales: f32[block_pages, heads_per_row, page]. Returns f32[num_queries, block], or f32[1, block]
    if the row has one KV head.
    """
    part_scales = [
        jnp.concatenate([scales[page, pl.ds(part, 1)] for page in range(sizes.block_pages)], axis=1)
        for part in range(sizes.heads_per_row)
    ]
    query = (
        lax.broadcasted_iota(jnp.int32, (num_queries, sizes.block_tokens), 0)
        % sizes.queries_per_row
    )
    selected = part_scales[0]
    for part, scales_of_part in enumerate(part_scales[1:], start=1):
        selected = jnp.where(query // sizes.group == part, scales_of_part, selected)
    return selected


def kernel(
    lengths: Ref,  # i32[S] in SMEM, including the new token
    table: Ref,  # i32[S * max_pages] in SMEM
    first_page: Ref,  # i32[1] in SMEM
    shared: Ref,  # i32[S / sharing] in SMEM
    owners: Ref,  # i32[S / sharing] in SMEM
    q: Ref,  # [slots, q_rows * width]
    k: Ref,  # [slots, rows * width]
    v: Ref,
    cos: Ref,  # f32[slots, width]
    sin: Ref,
    *refs: Ref,
    sizes: Sizes,
) -> None:
    """Computes a part of the slots. See the module's docstring.

    refs: the input pools; the output [slots, q_rows * width]; the output pools, which alias the
        input pools in HBM; and the scratch memory. The pools are the keys and the values
        [rows, pages, page, width], followed by their scales if the KV cache has 8 bits.
    """
    num_pools = 4 if sizes.number else 2
    out, *outputs_and_scratch = refs[num_pools:]
    pools, scale_pools = outputs_and_scratch[:2], outputs_and_scratch[2:num_pools]
    scratch = Scratch(*outputs_and_scratch[num_pools:])
    blocks = scratch.k_blocks, scratch.v_blocks
    scale_blocks = (scratch.k_scales, scratch.v_scales) if sizes.number else ()
    slots, rows, width, page = sizes.slots, sizes.rows, sizes.width, sizes.page_size
    base = pl.program_id(0) * slots  # the first slot of this part
    cosines, sines = cos[...], sin[...]

    # Rotate the queries and the new keys of all slots once, before the loop over pages.
    lay_out_queries(q, cosines, sines, scratch, sizes)
    for row in range(rows):
        lanes = slice(row * width, (row + 1) * width)
        new_key = rotate(k[:, lanes].astype(jnp.float32), cosines, sines, sizes)
        store_new(0, row, new_key.astype(k.dtype), scratch, sizes)
        store_new(1, row, v[:, lanes], scratch, sizes)
    # Pages of a block that were never read are uninitialized. The weights of their tokens are 0,
    # but 0 times NaN is NaN.
    if jnp.issubdtype(scratch.v_blocks.dtype, jnp.floating):
        scratch.v_blocks[...] = jnp.zeros_like(scratch.v_blocks)
    if sizes.number:
        scratch.v_scales[...] = jnp.zeros_like(scratch.v_scales)

    def page_of(slot: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the pool's page for page `number` of `slot`, an index into all parts' slots."""
        return first_page[0] + table[slot * sizes.max_pages + number]

    def shared_pages(slot: jax.Array) -> jax.Array:
        """Returns the number of first pages that the neighbors of a slot have in common."""
        if sizes.neighbors == 1:
            return jnp.int32(0)
        return shared[(base + slot) // sizes.sharing]

    def pages_of_neighbors(slot: jax.Array, block: jax.Array) -> Pages:
        """Returns one block of the pages that a slot shares with its neighbors."""
        owner = owners[(base + slot) // sizes.sharing]
        first = block * sizes.block_pages
        return Pages(owner, first, jnp.clip(shared_pages(slot) - first, 0, sizes.block_pages))

    def first_private_page(slot: jax.Array) -> jax.Array:
        """Returns a slot's first private page: the first one that its neighbors do not share."""
        count = shared_pages(slot)
        # An idle slot has one token in the scratch page, and its row of the table does not list
        # the pages that its neighbors share. It reads from page 0 on; its output is not used.
        return jnp.where(lengths[base + slot] > count * page, count, 0)

    def private_pages(slot: jax.Array, block: jax.Array) -> Pages:
        """Returns one block of a slot's private pages."""
        first = first_private_page(slot) + block * sizes.block_pages
        count = pl.cdiv(lengths[base + slot], page) - first
        return Pages(base + slot, first, jnp.clip(count, 0, sizes.block_pages))

    def pages_at_start(slot: jax.Array) -> Pages:
        """Returns the first pages to read for the neighbors that start at `slot`."""
        zero = jnp.int32(0)
        if sizes.neighbors == 1:
            return private_pages(slot, zero)
        return choose(
            shared_pages(slot) > 0, pages_of_neighbors(slot, zero), private_pages(slot, zero)
        )

    sources, targets = (*pools, *scale_pools), (*blocks, *scale_blocks)

    def start_reading(pages: Pages, buffer: jax.Array) -> None:
        def start_page(number: jax.Array, _: None) -> None:
            source = page_of(pages.slot, pages.first + number)
            # Starting and awaiting the copy of a page takes 21 bundles of instructions, whatever
            # its size: large pages are cheaper (lab/log.md, 2026-11-24).
            for pool, target in zip(sources, targets, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, source], target.at[buffer, :, number], scratch.read.at[buffer]
                ).start()

        lax.fori_loop(0, pages.num_pages, start_page, None)

    def finish_reading(pages: Pages, buffer: jax.Array) -> None:
        def finish_page(_: jax.Array, __: None) -> None:
            # A wait counts bytes, and all pages have the same size, so the source can be page 0.
            for pool, target in zip(sources, targets, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, 0], target.at[buffer, :, 0], scratch.read.at[buffer]
                ).wait()

        lax.fori_loop(0, pages.num_pages, finish_page, None)

    def page_writes(which: int, target: jax.Array | int, offset: jax.Array | int) -> list:
        """Returns the copies that write a tile to a page: of keys (`which` 0) or values (1)."""
        written = scratch.written.at[which]
        place = pools[which].at[:, target, pl.ds(offset, sizes.tile)]
        copies = [pltpu.make_async_copy(scratch.tiles.at[which], place, written)]
        if sizes.number:
            place = scale_pools[which].at[:, target]
            copies.append(pltpu.make_async_copy(scratch.scale_tiles.at[which], place, written))
        return copies

    def finish_writing() -> None:
        for which in (0, 1):
            for copy in page_writes(which, 0, 0):
                copy.wait()

    def put_new_token(pages: Pages, buffer: jax.Array) -> None:
        """Inserts the new key and value into a slot's last block and starts the write to HBM."""
        slot = pages.slot - base
        position = lengths[pages.slot] - 1
        inside = position - pages.first * page
        number, offset = inside // page, inside % page
        start = pl.multiple_of(offset // sizes.tile * sizes.tile, sizes.tile)
        token = lax.broadcasted_iota(jnp.int32, (sizes.tile, width), 0)
        is_new = token == offset % sizes.tile
        target = page_of(pages.slot, position // page)
        # There is only one tile, so the write of the previous slot has to finish first.
        pl.when(slot > 0)(finish_writing)
        # Only the tile with the new token is written back, not the page.
        for which, block_of_pool in enumerate(blocks):
            for row in range(rows):
                tokens = (buffer, row, number, pl.ds(start, sizes.tile))
                old_tokens = block_of_pool[tokens].astype(jnp.float32)
                new_token = scratch.new[which, row, pl.ds(slot, 1), :]
                # The tile goes to the block, which this step reads, and to the page in HBM.
                tile = jnp.where(is_new, new_token, old_tokens).astype(block_of_pool.dtype)
                block_of_pool[tokens] = tile
                scratch.tiles[which, row] = tile
            if sizes.number:
                put_new_scales(which, slot, buffer, number, offset)
            for copy in page_writes(which, target, start):
                copy.start()

    def put_new_scales(
        which: int, slot: jax.Array, buffer: jax.Array, number: jax.Array, offset: jax.Array
    ) -> None:
        """Inserts the scales of the new token into page `number` of a block."""
        is_new = lax.broadcasted_iota(jnp.int32, (1, page), 1) == offset
        for row in range(rows):
            for part in range(sizes.heads_per_row):
                place = (buffer, row, number, pl.ds(part, 1))
                new_scale = scratch.new_scales[which, row, part, pl.ds(slot, 1), :]
                scales = jnp.where(is_new, new_scale, scale_blocks[which][place])
                scale_blocks[which][place] = scales
                scratch.scale_tiles[which, row, pl.ds(part, 1)] = scales

    def factor(x: jax.Array) -> jax.Array:
        # Keys or values to the dtype of products; 8-bit numbers are converted by way of fp32.
        if sizes.number:
            x = x.astype(jnp.float32)
        return x.astype(sizes.product_dtype)

    def attend_block(
        softmax: tuple[Softmax, ...], q: list[jax.Array], tokens: jax.Array, buffer: jax.Array
    ) -> tuple[Softmax, ...]:
        """Folds the first `tokens` tokens of a block into the softmax of every row."""
        num_queries = len(q[0])
        is_visible = lax.broadcasted_iota(jnp.int32, (num_queries, sizes.block_tokens), 1) < tokens
        updated = []
        for row, (largest, total, mixed) in enumerate(softmax):
            keys, values = (
                factor(x[buffer, row].reshape(sizes.block_tokens, width)) for x in blocks
            )
            scores = product(q[row], keys, 1, sizes) * sizes.head_dim**-0.5
            if sizes.number:
                scores *= scales_by_query(scratch.k_scales.at[buffer, row], num_queries, sizes)
            scores = jnp.where(is_visible, scores, MASKED)
            new_largest = jnp.maximum(largest, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - new_largest)
            rescale = jnp.exp(largest - new_largest)
            # The total is summed before the weights are multiplied by the scales of the values.
            total = total * rescale + weights.sum(axis=1, keepdims=True)
            if sizes.number:
                weights *= scales_by_query(scratch.v_scales.at[buffer, row], num_queries, sizes)
            values = product(weights.astype(sizes.product_dtype), values, 0, sizes)
            updated.append(Softmax(new_largest, total, mixed * rescale + values))
        return tuple(updated)

    def load_queries(slot: jax.Array, num_slots: int) -> list[jax.Array]:
        """Returns the queries of neighboring slots, one array for each row."""
        places = [sizes.query_rows(row, slot, num_slots) for row in range(rows)]
        return [scratch.q[place, :].astype(sizes.product_dtype) for place in places]

    def empty_softmax(num_slots: int) -> tuple[Softmax, ...]:
        """Returns the softmax over no tokens, for every row."""
        num_queries = num_slots * sizes.queries_per_row
        column = (num_queries, 1)
        empty = Softmax(
            jnp.full(column, MASKED), jnp.zeros(column), jnp.zeros((num_queries, width))
        )
        return (empty,) * rows

    def attend_shared(first: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes the shared pages, if any, of the neighbors that start at slot `first`.

        Stores the softmax of each neighbor in the scratch memory. Returns the next buffer.
        """
        num_tokens = shared_pages(first) * page
        num_blocks = pl.cdiv(shared_pages(first), sizes.block_pages)
        queries = load_queries(first, sizes.neighbors)

        def step(block: jax.Array, carry: tuple) -> tuple:
            buffer, softmax = carry
            pages = pages_of_neighbors(first, block)
            # Prefetch the next shared block, or the first private block of the first slot.
            is_last = block + 1 == num_blocks
            next_shared = pages_of_neighbors(first, block + 1)
            start_reading(
                choose(is_last, private_pages(first, jnp.int32(0)), next_shared), 1 - buffer
            )
            finish_reading(pages, buffer)
            # Counted from the start of the block; the last block can have fewer tokens.
            visible = num_tokens - pages.first * page
            return 1 - buffer, attend_block(softmax, queries, visible, buffer)

        start = buffer, empty_softmax(sizes.neighbors)
        buffer, softmax = lax.fori_loop(0, num_blocks, step, start)
        num_queries = sizes.neighbors * sizes.queries_per_row
        for row, row_softmax in enumerate(softmax):
            place = pl.ds(row * num_queries, num_queries)
            scratch.largest[place, :] = jnp.broadcast_to(row_softmax.largest, (num_queries, LANES))
            scratch.total[place, :] = jnp.broadcast_to(row_softmax.total, (num_queries, LANES))
            scratch.out[sizes.query_rows(row, first, sizes.neighbors), :] = row_softmax.mixed
        return buffer

    def load_shared_softmax(slot: jax.Array) -> tuple[Softmax, ...]:
        """Returns the softmax of a slot that `attend_shared` stored."""
        if sizes.neighbors == 1:
            return empty_softmax(1)
        states = []
        for row in range(rows):
            first = (row * sizes.neighbors + slot % sizes.neighbors) * sizes.queries_per_row
            place = pl.ds(pl.multiple_of(first, SUBLANES), sizes.queries_per_row)
            mixed = scratch.out[sizes.query_rows(row, slot, 1), :]
            states.append(Softmax(scratch.largest[place, :1], scratch.total[place, :1], mixed))
        return tuple(states)

    def attend_slot(slot: jax.Array, end: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes a slot's private pages; the copy of the first block to `buffer` has started.

        end: the first slot after its neighbors. Returns the next buffer.
        """
        private_tokens = lengths[base + slot] - first_private_page(slot) * page
        num_blocks = pl.cdiv(private_tokens, sizes.block_tokens)
        queries = load_queries(slot, 1)

        def step(block: jax.Array, carry: tuple) -> tuple:
            buffer, softmax = carry
            pages = private_pages(slot, block)
            # Prefetch this slot's next block, or the first block of the next slot. After the last
            # slot of the part there is no block to read.
            is_last = block + 1 == num_blocks
            next_slot = jnp.minimum(slot + 1, slots - 1)
            next_slot_pages = choose(
                next_slot == end, pages_at_start(next_slot), private_pages(next_slot, jnp.int32(0))
            )
            to_read = choose(is_last, next_slot_pages, private_pages(slot, block + 1))
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

        start = buffer, load_shared_softmax(slot)
        buffer, softmax = lax.fori_loop(0, num_blocks, step, start)
        for row, (_, total, mixed) in enumerate(softmax):
            scratch.out[sizes.query_rows(row, slot, 1), :] = mixed / total
        return buffer

    def attend_neighbors(number: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes the slots that read their shared pages together. Returns the next buffer."""
        first = number * sizes.neighbors
        end = first + sizes.neighbors
        if sizes.neighbors == 1:
            return attend_slot(first, end, buffer)
        buffer = attend_shared(first, buffer)
        return lax.fori_loop(
            first, end, lambda slot, buffer: attend_slot(slot, end, buffer), buffer
        )

    # The first read has no computation to overlap with. All later reads are prefetched.
    start_reading(pages_at_start(jnp.int32(0)), jnp.int32(0))
    lax.fori_loop(0, slots // sizes.neighbors, attend_neighbors, jnp.int32(0))
    finish_writing()  # of the last slot
    write_out(out, scratch, sizes)


def product(first: jax.Array, second: jax.Array, axis: int, sizes: Sizes) -> jax.Array:
    """Contracts the last axis of `first` with `axis` of `second` and accumulates in fp32."""
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

    With bfloat16 queries and bfloat16 or 8-bit pools, the softmax weights are bfloat16 in products.
    If queries or pools are fp32, all factors are fp32. `slots_that_read_together` determines how
    many neighbors read their shared pages together.

    Raises UserError if the page size is not a multiple of the tokens written at once: 16 tokens for
    16-bit pools, 8 for 32-bit pools, and 128 for 8-bit pools, because the scales of 128 tokens fill
    one row of a register.
    """
    S, H, D = q.shape
    check_page_size(k_pool)
    cores = 1 if interpret else pltpu.get_tpu_info().num_cores
    sizes = sizes_of(q, k.shape[1], k_pool, table.shape[1], len(shared), cores)
    padding = (0, -S % sizes.slots)  # padding slots have one token, in the scratch page

    # Heads are padded to full lanes, and their number to full rows.
    def flat(x: jax.Array) -> jax.Array:
        """[S, heads, D] -> [slots of all parts, rows * width]"""
        missing = -x.shape[1] % sizes.heads_per_row
        x = jnp.pad(x, (padding, (0, missing), (0, sizes.lanes_per_head - D)))
        return x.reshape(len(x), -1)

    # Cosines and sines are repeated for every head of a row.
    def by_lane(x: jax.Array) -> jax.Array:
        """[S, D] -> [slots of all parts, width]"""
        x = jnp.pad(x, (padding, (0, sizes.lanes_per_head - D)))
        return jnp.concatenate([x] * sizes.heads_per_row, axis=1)

    # All pages of padding slots are page 0, the scratch page, and padding blocks share no pages.
    table = jnp.pad(table, (padding, (0, 0))).reshape(-1)
    lengths = jnp.pad(lengths, padding, constant_values=1)
    padding_blocks = (0, math.ceil(len(lengths) / sizes.sharing) - len(shared))
    shared = jnp.pad(shared, padding_blocks)
    owners = jnp.pad(owners, padding_blocks)
    scalars = lengths, table, first_page.reshape(1), shared, owners
    out, *arrays = call(
        tuple(scalar.astype(jnp.int32) for scalar in scalars),
        (flat(q), flat(k), flat(v), by_lane(cos), by_lane(sin)),
        pool_arrays(k_pool, v_pool),
        sizes,
        interpret,
    )
    out = out[:S].reshape(S, -1, sizes.lanes_per_head)[:, :H, :D]
    k_pool, v_pool = make_pools(arrays)
    return out, k_pool, v_pool


def check_page_size(k_pool: Pool) -> None:
    """Raises UserError for pages that the kernel cannot write; see `decode`."""
    has_scales = isinstance(k_pool, QuantizedPool)
    numbers = k_pool.values if has_scales else k_pool
    num_bytes = numbers.dtype.itemsize
    page_size = numbers.shape[2]
    multiple = LANES if has_scales else tile_tokens(num_bytes)
    if page_size % multiple:
        raise UserError(
            f"rollout.page_size={page_size}: the TPU's decode kernel requires a multiple of "
            f"{multiple} for a KV cache of {num_bytes}-byte numbers; set "
            f"rollout.page_size={multiple} or remove model.attention=tpu_fused"
        )


def tile_tokens(num_bytes: int) -> int:
    """Returns how many tokens are written at once for numbers of `num_bytes` bytes."""
    # A tile of the memory has 8 rows of 32 bits: 16 tokens of 16 bits, and 32 of 8 bits.
    return 4 * SUBLANES // num_bytes


def sizes_of(
    q: Float[Array, "S H D"] | jax.ShapeDtypeStruct,
    kv_heads: int,
    k_pool: Pool | jax.ShapeDtypeStruct,
    max_pages: int,
    num_blocks: int,
    cores: int,
) -> Sizes:
    """Returns the sizes of the kernel from the shapes and dtypes of queries and a pool.

    max_pages: pages of a slot in the table. num_blocks: the number of blocks of neighboring slots
    that can share pages. cores: cores of a device.
    """
    S, H, D = q.shape
    has_scales = isinstance(k_pool, QuantizedPool)
    numbers = k_pool.values if has_scales else k_pool
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
        product_dtype=q.dtype if has_scales else jnp.promote_types(q.dtype, numbers.dtype),
        number=number_of(numbers.dtype) if has_scales else None,
    )
    # The number of neighbors depends on the other sizes.
    return sizes._replace(neighbors=slots_that_read_together(sizes))


def pool_arrays(k_pool: Pool, v_pool: Pool) -> tuple[jax.Array, ...]:
    """Returns the arrays of two pools: keys and values, followed by the scales of 8-bit pools."""
    if isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool):
        return k_pool.values, v_pool.values, k_pool.scales, v_pool.scales
    assert isinstance(k_pool, jax.Array) and isinstance(v_pool, jax.Array)
    return k_pool, v_pool


def make_pools(arrays: Sequence[jax.Array]) -> tuple[Pool, Pool]:
    """Returns the pools of `pool_arrays`: its inverse."""
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
    """Calls the kernel for all parts; the arguments are in the order of the kernel's arguments."""
    q = by_slot[0]
    dtype = pools[0].dtype
    rows, width = sizes.rows, sizes.width

    def part_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((sizes.slots, x.shape[1]), lambda part, *_: (part, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    all_queries = pltpu.VMEM((rows * sizes.slots * sizes.queries_per_row, width), jnp.float32)
    neighbor_state = pltpu.VMEM(
        (rows * sizes.neighbors * sizes.queries_per_row, LANES), jnp.float32
    )
    block = pltpu.VMEM((2, rows, sizes.block_pages, sizes.page_size, width), dtype)
    scratch = Scratch(
        q=all_queries,
        new=pltpu.VMEM((2, rows, sizes.slots, width), jnp.float32),
        out=all_queries,
        largest=neighbor_state,
        total=neighbor_state,
        k_blocks=block,
        v_blocks=block,
        tiles=pltpu.VMEM((2, rows, sizes.tile, width), dtype),
        read=pltpu.SemaphoreType.DMA((2,)),
        written=pltpu.SemaphoreType.DMA((2,)),
    )
    if sizes.number:
        scratch = with_scales(scratch, sizes)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(len(q) // sizes.slots,),
        in_specs=[*map(part_spec, by_slot), *[in_hbm] * len(pools)],
        out_specs=[part_spec(q), *[in_hbm] * len(pools)],
        scratch_shapes=[shape for shape in scratch if shape is not None],
    )
    # Input and output pools are aliased: the kernel updates the pages in place.
    first_pool = len(scalars) + len(by_slot)
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)],
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pools))},
        interpret=interpret,
        name="decode_attention",
        # Parts are independent, so that two cores of a device can compute them at the same time.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
    )(*scalars, *by_slot, *pools)


def with_scales(scratch: Scratch, sizes: Sizes) -> Scratch:
    """Returns the scratch memory with the arrays that an 8-bit KV cache adds."""
    rows, heads_per_row, page = sizes.rows, sizes.heads_per_row, sizes.page_size
    block = pltpu.VMEM((2, rows, sizes.block_pages, heads_per_row, page), jnp.float32)
    return scratch._replace(
        new_scales=pltpu.VMEM((2, rows, heads_per_row, sizes.slots, page), jnp.float32),
        k_scales=block,
        v_scales=block,
        scale_tiles=pltpu.VMEM((2, rows, heads_per_row, page), jnp.float32),
    )


def slots_that_read_together(sizes: Sizes) -> int:
    """Returns how many neighboring slots read their shared pages together."""
    # These slots have to be in one part, and the softmax of all their queries has to fit in VMEM.
    max_neighbors = max(1, MOST_QUERIES // (sizes.rows * sizes.queries_per_row))
    divisible = math.gcd(sizes.sharing, sizes.slots)
    divisors = [n for n in range(1, divisible + 1) if divisible % n == 0]
    return max(n for n in divisors if n <= max_neighbors)


def slots_of_part(num_slots: int, cores: int, sharing: int) -> int:
    """Returns the number of slots in a part: all slots, or a multiple of 16.

    16 slots fill a register of 16-bit numbers. A part has at most MOST_SLOTS slots. Each core of
    the device has a part, unless there are too few slots. A block of slots that share pages is not
    divided between parts, unless the block is too large.
    """
    # One part for each core, or more if VMEM cannot hold the slots.
    parts = max(cores, math.ceil(num_slots / MOST_SLOTS))
    smallest = 2 * SUBLANES
    if parts == 1 or num_slots <= smallest:
        return num_slots
    slots = math.ceil(num_slots / parts)
    # The smallest part that is a multiple of 16 slots and does not divide a block of sharing slots.
    whole_blocks = math.lcm(smallest, sharing)
    if whole_blocks > MOST_SLOTS:
        return round_up(slots, smallest)
    max_slots = MOST_SLOTS // whole_blocks * whole_blocks
    return min(round_up(slots, whole_blocks), max_slots)


def pages_per_block(pool: jax.Array | jax.ShapeDtypeStruct, max_pages: int) -> int:
    """Returns the number of pages in a block: at most BLOCK_TOKENS tokens and BLOCK_BYTES."""
    rows, _, page_size, width = pool.shape
    # Keys and values, each in two buffers.
    page_bytes = 2 * 2 * rows * page_size * width * pool.dtype.itemsize
    pages = min(BLOCK_TOKENS // page_size, BLOCK_BYTES // page_bytes, max_pages)
    return max(1, pages)
