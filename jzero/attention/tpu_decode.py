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

With two cores a device (TPU v4, v5p) each core has a part of the slots.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jzero.errors import UserError

SUBLANES = 8  # rows of fp32 in a vector register
MASKED = -1e30  # finite, as in `xla.py`
BLOCK_TOKENS = 512  # tokens of a slot that are computed at a time
# Bytes in VMEM for blocks of keys and values, two blocks of each: a quarter of a v5e's.
BLOCK_BYTES = 4 * 2**20
# Slots of one part. Their queries and outputs are in VMEM as fp32: 2 MB for 64 slots of 32 heads.
MOST_SLOTS = 64

Ref = Any  # a reference to memory inside of a kernel; Pallas has no public type for it


class Sizes(NamedTuple):
    """What is fixed when the kernel is compiled."""

    slots: int  # of a part
    heads: int  # query heads, in `q_rows` rows of n
    group: int  # query heads of a KV head
    rows: int  # rows of the pool
    width: int  # lanes of a row
    lanes: int  # of a head in a row; D, or more where heads are padded to a whole row
    head_dim: int  # D
    page: int  # tokens of a page
    max_pages: int  # of a slot, in the table
    block_pages: int
    tile: int  # tokens around the new one that are written
    product: DTypeLike  # the type of the factors of products

    @property
    def heads_per_row(self) -> int:
        return self.width // self.lanes

    @property
    def queries(self) -> int:
        """Query heads of a row of the pool, in whole registers."""
        return round_up(self.heads_per_row * self.group, SUBLANES)

    @property
    def slot_queries(self) -> int:
        """Query heads of a slot, as they lie in VMEM."""
        return self.rows * self.queries

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.block_pages * self.page

    def place_of(self, head: int) -> tuple[int, int]:
        """Returns where a query head lies in VMEM: its row there, and its part of the lanes."""
        row, part = divmod(head // self.group, self.heads_per_row)
        return row * self.queries + part * self.group + head % self.group, part


class Scratch(NamedTuple):
    """Memory of a core."""

    q: Ref  # f32[slots * slot_queries, width] rotated queries
    new: Ref  # f32[2, rows, slots, width] the new keys and values
    out: Ref  # f32[slots * slot_queries, width]
    k_blocks: Ref  # [2, rows, block_pages, page, width]
    v_blocks: Ref
    tiles: Ref  # [2, rows, tile, width] what is being written
    read: Ref  # semaphores of the two blocks
    written: Ref  # semaphores of the key's tile and the value's


def round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


# -- the kernel ------------------------------------------------------------------------------------


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, sizes: Sizes) -> jax.Array:
    """Rotates the heads of a row [slots, width] in fp32. `sin` has the sign of the rotation."""
    width, half = sizes.width, sizes.head_dim // 2
    behind = pltpu.roll(x, half, 1)  # lane i has what was in lane i - half
    partner = behind
    if sizes.head_dim < width:
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) % sizes.lanes
        partner = jnp.where(lane < half, pltpu.roll(x, width - half, 1), behind)
    return x * cos + partner * sin


def moved(x: jax.Array, source: int, target: int, sizes: Sizes) -> jax.Array:
    """Moves the head in part `source` of a row to part `target`; what else is there is left."""
    shift = (target - source) * sizes.lanes % sizes.width
    return pltpu.roll(x, shift, 1) if shift else x


def in_part(part: int, shape: tuple[int, ...], sizes: Sizes) -> jax.Array:
    """Says which lanes belong to a part of a row."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) // sizes.lanes == part


def lay_out_queries(q: Ref, cos: jax.Array, sin: jax.Array, scratch: Scratch, sizes: Sizes) -> None:
    """Rotates the queries of all slots, and puts every head where `Sizes.place_of` says."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    if sizes.heads < sizes.slot_queries:
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
            scratch.q[pl.ds(place, slots, stride=sizes.slot_queries), :] = x


def write_out(out: Ref, scratch: Scratch, sizes: Sizes) -> None:
    """Puts the outputs of all slots into the order of the heads."""
    n, width, slots = sizes.heads_per_row, sizes.width, sizes.slots
    for first in range(0, sizes.heads, n):
        row = None
        for head in range(first, min(first + n, sizes.heads)):
            place, part = sizes.place_of(head)
            x = scratch.out[pl.ds(place, slots, stride=sizes.slot_queries), :]
            x = moved(x, part, head - first, sizes)
            row = x if row is None else jnp.where(in_part(head - first, x.shape, sizes), x, row)
        assert row is not None
        out[:, first // n * width : (first // n + 1) * width] = row.astype(out.dtype)


def kernel(
    lengths: Ref,  # i32[S] in SMEM, with the new token
    table: Ref,  # i32[S * max_pages] in SMEM
    first_page: Ref,  # i32[1] in SMEM
    q: Ref,  # [slots, q_rows * width]
    k: Ref,  # [slots, rows * width]
    v: Ref,
    cos: Ref,  # f32[slots, width]
    sin: Ref,
    k_input: Ref,  # the pools before; the outputs are the same memory
    v_input: Ref,
    out: Ref,  # [slots, q_rows * width]
    k_pool: Ref,  # [rows, pages, page, width] in HBM
    v_pool: Ref,
    *memory: Ref,
    sizes: Sizes,
) -> None:
    """Computes a part of the slots. See the module's docstring."""
    del k_input, v_input
    scratch = Scratch(*memory)
    pools, blocks = (k_pool, v_pool), (scratch.k_blocks, scratch.v_blocks)
    slots, rows, width, page = sizes.slots, sizes.rows, sizes.width, sizes.page
    base = pl.program_id(0) * slots  # the first slot of this part
    cosines, sines = cos[...], sin[...]

    lay_out_queries(q, cosines, sines, scratch, sizes)
    for row in range(rows):
        lanes = slice(row * width, (row + 1) * width)
        new_key = rotated(k[:, lanes].astype(jnp.float32), cosines, sines, sizes)
        scratch.new[0, row] = new_key.astype(k.dtype).astype(jnp.float32)
        scratch.new[1, row] = v[:, lanes].astype(jnp.float32)
    # Of a block that is not full, the weights of what was never read are 0, and 0 times NaN is NaN.
    scratch.v_blocks[...] = jnp.zeros_like(scratch.v_blocks)

    def page_of(slot: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the page of the pool that is page `number` of a slot of this part."""
        return first_page[0] + table[(base + slot) * sizes.max_pages + number]

    def num_pages(slot: jax.Array, block: jax.Array) -> jax.Array:
        """Returns how many pages of a block a slot has."""
        pages = pl.cdiv(lengths[base + slot], page) - block * sizes.block_pages
        return jnp.clip(pages, 0, sizes.block_pages)

    def start_reading(slot: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        def start_page(number: jax.Array, _: None) -> None:
            source = page_of(slot, block * sizes.block_pages + number)
            for pool, target in zip(pools, blocks, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, source], target.at[buffer, :, number], scratch.read.at[buffer]
                ).start()

        lax.fori_loop(0, num_pages(slot, block), start_page, None)

    def finish_reading(slot: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        def finish_page(_: jax.Array, __: None) -> None:
            # What is waited for is as many bytes as these, whichever page they are of.
            for pool, target in zip(pools, blocks, strict=True):
                pltpu.make_async_copy(
                    pool.at[:, 0], target.at[buffer, :, 0], scratch.read.at[buffer]
                ).wait()

        lax.fori_loop(0, num_pages(slot, block), finish_page, None)

    def write_of(which: int, target: jax.Array | int, offset: jax.Array | int) -> Any:
        """Returns the copy of a tile to its page: 0 is the key's, 1 the value's."""
        place = pools[which].at[:, target, pl.ds(offset, sizes.tile)]
        return pltpu.make_async_copy(scratch.tiles.at[which], place, scratch.written.at[which])

    def finish_writing() -> None:
        for which in (0, 1):
            write_of(which, 0, 0).wait()

    def put_new_token(slot: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        """Puts the new key and value into a slot's last block, and starts to write them."""
        position = lengths[base + slot] - 1
        inside = position - block * sizes.block
        number, offset = inside // page, inside % page
        start = pl.multiple_of(offset // sizes.tile * sizes.tile, sizes.tile)
        token = lax.broadcasted_iota(jnp.int32, (sizes.tile, width), 0)
        is_new = token == offset % sizes.tile
        target = page_of(slot, position // page)
        pl.when(slot > 0)(finish_writing)  # of the slot before: there is one tile
        for which, block_of_pool in enumerate(blocks):
            for row in range(rows):
                tokens = (buffer, row, number, pl.ds(start, sizes.tile))
                old = block_of_pool[tokens].astype(jnp.float32)
                new = scratch.new[which, row, pl.ds(slot, 1), :]
                tile = jnp.where(is_new, new, old).astype(block_of_pool.dtype)
                block_of_pool[tokens] = tile
                scratch.tiles[which, row] = tile
            write_of(which, target, start).start()

    def attend_block(
        block: jax.Array, softmax: tuple, slot: jax.Array, buffer: jax.Array, q: list[jax.Array]
    ) -> tuple:
        """Folds a block into the softmax of every row: the largest score, the sum, the output."""
        token = lax.broadcasted_iota(jnp.int32, (sizes.queries, sizes.block), 1)
        is_visible = block * sizes.block + token < lengths[base + slot]
        after = []
        for row, (largest, total, mixed) in enumerate(softmax):
            keys, values = (
                x[buffer, row].reshape(sizes.block, width).astype(sizes.product) for x in blocks
            )
            scores = product(q[row], keys, 1, sizes) * sizes.head_dim**-0.5
            scores = jnp.where(is_visible, scores, MASKED)
            new_largest = jnp.maximum(largest, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - new_largest)
            rescale = jnp.exp(largest - new_largest)
            total = total * rescale + weights.sum(axis=1, keepdims=True)
            values = product(weights.astype(sizes.product), values, 0, sizes)
            after.append((new_largest, total, mixed * rescale + values))
        return tuple(after)

    def attend_slot(slot: jax.Array, buffer: jax.Array) -> jax.Array:
        """Computes a slot, whose first block is on its way to `buffer`. Returns the next buffer."""
        num_blocks = pl.cdiv(lengths[base + slot], sizes.block)
        first_query = slot * sizes.slot_queries
        queries = [
            scratch.q[pl.ds(first_query + row * sizes.queries, sizes.queries), :].astype(
                sizes.product
            )
            for row in range(rows)
        ]

        def step(block: jax.Array, carry: tuple) -> tuple:
            buffer, softmax = carry
            is_last = block + 1 == num_blocks
            next_slot = jnp.where(is_last, slot + 1, slot)
            next_block = jnp.where(is_last, 0, block + 1)

            @pl.when(next_slot < slots)
            def _() -> None:
                start_reading(next_slot, next_block, 1 - buffer)

            finish_reading(slot, block, buffer)

            @pl.when(is_last)
            def _() -> None:
                put_new_token(slot, block, buffer)

            return 1 - buffer, attend_block(block, softmax, slot, buffer, queries)

        column = (sizes.queries, 1)
        nothing = (
            jnp.full(column, MASKED),
            jnp.zeros(column),
            jnp.zeros((sizes.queries, width)),
        )
        buffer, softmax = lax.fori_loop(0, num_blocks, step, (buffer, (nothing,) * rows))
        for row, (_, total, mixed) in enumerate(softmax):
            place = pl.ds(first_query + row * sizes.queries, sizes.queries)
            scratch.out[place, :] = mixed / total
        return buffer

    start_reading(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    lax.fori_loop(0, slots, attend_slot, jnp.int32(0))
    finish_writing()
    write_out(out, scratch, sizes)


def product(first: jax.Array, second: jax.Array, axis: int, sizes: Sizes) -> jax.Array:
    """Contracts the last axis of `first` with `axis` of `second`; the result is in fp32."""
    is_fp32 = sizes.product == jnp.float32
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
    k_pool: Shaped[Array, "rows pages page width"],
    v_pool: Shaped[Array, "rows pages page width"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    first_page: Int[Array, ""],
    shared: Int[Array, " blocks"],
    interpret: bool = False,
) -> tuple[Float[Array, "S H D"], Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Rotates, writes and attends in one kernel; see `backend.Decode`.

    Products of bfloat16 with bfloat16 pools have the weights of the softmax in bfloat16. With fp32
    in either place all factors are in fp32. Every slot reads all of its pages, shared or not.

    Raises UserError for pages that are no multiple of a tile: of 16 tokens in 16 bits, 8 in 32.
    """
    S, H, D = q.shape
    K = k.shape[1]
    rows, _, page_size, width = k_pool.shape
    tile = 4 * SUBLANES // k_pool.dtype.itemsize
    if page_size % tile:
        raise UserError(
            f"rollout.page_size={page_size}: the TPU's decode kernel writes {tile} tokens at once; "
            f"set a multiple of {tile}, or model.attention=tpu"
        )
    lanes = D if width % D == 0 else width
    heads_per_row = width // lanes
    slots = slots_of_part(S, interpret)
    block_pages = pages_per_block(k_pool, table.shape[1])
    sizes = Sizes(
        slots=slots,
        heads=H,
        group=H // K,
        rows=rows,
        width=width,
        lanes=lanes,
        head_dim=D,
        page=page_size,
        max_pages=round_up(table.shape[1], block_pages),
        block_pages=block_pages,
        tile=tile,
        product=jnp.promote_types(q.dtype, k_pool.dtype),
    )
    padding = (0, -S % slots)  # slots of one token, in the scratch page

    def flat(x: jax.Array) -> jax.Array:
        """[S, heads, D] -> [slots of all parts, rows * width]"""
        missing = -x.shape[1] % heads_per_row
        x = jnp.pad(x, (padding, (0, missing), (0, lanes - D)))
        return x.reshape(len(x), -1)

    def by_lane(x: jax.Array) -> jax.Array:
        """[S, D] -> [slots of all parts, width]"""
        x = jnp.pad(x, (padding, (0, lanes - D)))
        return jnp.concatenate([x] * heads_per_row, axis=1)

    # The pages of slots that are padding are those of the scratch page, which is page 0.
    table = jnp.pad(table, (padding, (0, sizes.max_pages - table.shape[1]))).reshape(-1)
    lengths = jnp.pad(lengths, padding, constant_values=1)
    out, k_pool, v_pool = call(
        (lengths.astype(jnp.int32), table.astype(jnp.int32), first_page.reshape(1)),
        (flat(q), flat(k), flat(v), by_lane(cos), by_lane(sin)),
        (k_pool, v_pool),
        sizes,
        interpret,
    )
    out = out[:S].reshape(S, -1, lanes)
    return out[:, :H, :D], k_pool, v_pool


def call(
    scalars: tuple[jax.Array, ...],
    by_slot: tuple[jax.Array, ...],
    pools: tuple[jax.Array, jax.Array],
    sizes: Sizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Calls the kernel for all parts; the arguments are its own, in their order."""
    q = by_slot[0]
    dtype = pools[0].dtype
    rows, width = sizes.rows, sizes.width

    def of_part(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((sizes.slots, x.shape[1]), lambda part, *_: (part, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    all_queries = pltpu.VMEM((sizes.slots * sizes.slot_queries, width), jnp.float32)
    block = pltpu.VMEM((2, rows, sizes.block_pages, sizes.page, width), dtype)
    scratch = Scratch(
        q=all_queries,
        new=pltpu.VMEM((2, rows, sizes.slots, width), jnp.float32),
        out=all_queries,
        k_blocks=block,
        v_blocks=block,
        tiles=pltpu.VMEM((2, rows, sizes.tile, width), dtype),
        read=pltpu.SemaphoreType.DMA((2,)),
        written=pltpu.SemaphoreType.DMA((2,)),
    )
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(len(q) // sizes.slots,),
        in_specs=[*map(of_part, by_slot), in_hbm, in_hbm],
        out_specs=[of_part(q), in_hbm, in_hbm],
        scratch_shapes=list(scratch),
    )
    first_pool = len(scalars) + len(by_slot)
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)],
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        interpret=interpret,
        name="decode_attention",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
    )(*scalars, *by_slot, *pools)


def slots_of_part(num_slots: int, interpret: bool) -> int:
    """Returns how many slots are computed at a time: all, or whole registers of 16 bits.

    They are at most MOST_SLOTS, and every core of the device has a part. Interpreted, a device has
    one core.
    """
    cores = 1 if interpret else pltpu.get_tpu_info().num_cores
    parts = max(cores, math.ceil(num_slots / MOST_SLOTS))
    smallest = 2 * SUBLANES
    if parts == 1 or num_slots <= smallest:
        return num_slots
    return round_up(math.ceil(num_slots / parts), smallest)


def pages_per_block(pool: jax.Array, max_pages: int) -> int:
    """Returns how many pages of a slot are computed at a time, so that VMEM holds the blocks."""
    rows, _, page_size, width = pool.shape
    bytes_of_page = 2 * 2 * rows * page_size * width * pool.dtype.itemsize
    pages = min(BLOCK_TOKENS // page_size, BLOCK_BYTES // bytes_of_page, max_pages)
    return max(1, pages)
