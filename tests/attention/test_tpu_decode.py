"""The fused decode kernel against its definition: a loop over slots, heads and tokens in NumPy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jzero.attention import pools, tpu, tpu_decode
from jzero.errors import UserError
from jzero.numerics.eight_bits import FP8, INT8, Format

Heads = tuple[int, int, int]  # (query heads, KV heads, head dim)

PAGE = 16
PAGE_IN_8_BITS = 128  # the kernel's smallest page in 8 bits
MAX_PAGES = 5
FIRST_PAGE = 31  # of the layer; the pages before belong to another one
SCRATCH = 0
IDLE = -1  # a slot that holds no sequence

# One token, both sides of the boundaries of a page and of a block of two pages, an idle slot at the
# start, in between and at the end, and a full slot beside short ones.
LENGTHS = (IDLE, 1, 15, 16, 17, IDLE, 32, 33, 80, 2, 64, IDLE)
LENGTHS_IN_8_BITS = (IDLE, 1, 127, 128, 385, 512, 640, IDLE)
SHARED_IN_8_BITS = (0, 3)

HEADS: dict[str, Heads] = {
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-3b": (16, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-4b": (32, 8, 128),
    "a KV head of 64 a device": (7, 1, 64),
    "three KV heads of 64": (6, 3, 64),
    "four heads in a row": (4, 4, 32),
    "a head in part of a row": (6, 2, 80),
    "a head in two registers": (3, 1, 256),
}


class Case(NamedTuple):
    """Arguments of the kernel, with keys and values apart from how pools hold them."""

    q: np.ndarray  # [S, H, D]
    k: np.ndarray  # [S, K, D]
    v: np.ndarray
    cos: np.ndarray  # [S, D]
    sin: np.ndarray
    keys: np.ndarray  # [pages, page, K, D]
    values: np.ndarray
    table: np.ndarray
    lengths: np.ndarray  # 1 for idle slots
    shared: np.ndarray  # of each block of neighboring slots, the pages that they have in common
    owners: np.ndarray  # the slot of each block whose row of the table has these pages

    @property
    def page(self) -> int:
        return self.keys.shape[1]


def rounded(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32))


def make_case(heads: Heads, dtype: DTypeLike, lengths: tuple[int, ...], page: int = PAGE) -> Case:
    """Returns random numbers of `dtype`, in fp32. Pages that no slot has are noise."""
    H, K, D = heads
    S = len(lengths)
    rng = np.random.default_rng(H)

    def normal(*shape: int) -> np.ndarray:
        return rounded(rng.standard_normal(shape), dtype)

    is_idle = np.array(lengths) == IDLE
    num_pages = FIRST_PAGE + 1 + S * MAX_PAGES
    table = 1 + rng.permutation(S * MAX_PAGES).reshape(S, MAX_PAGES)
    table[is_idle] = SCRATCH
    present = np.where(is_idle, 1, lengths)
    table[np.arange(MAX_PAGES) * page >= present[:, None]] = SCRATCH
    angle = rng.uniform(0, 6, (S, D // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    return Case(
        q=normal(S, H, D),
        k=normal(S, K, D),
        v=normal(S, K, D),
        cos=np.concatenate([cos, cos], axis=1).astype(np.float32),
        sin=np.concatenate([-sin, sin], axis=1).astype(np.float32),
        keys=normal(num_pages, page, K, D),
        values=normal(num_pages, page, K, D),
        table=table.astype(np.int32),
        lengths=present.astype(np.int32),
        shared=np.zeros(S, np.int32),
        owners=np.arange(S, dtype=np.int32),
    )


def share_pages(case: Case, shared: tuple[int, ...]) -> Case:
    """Gives every slot of a block that is not idle the first pages of the first of them."""
    table = case.table.copy()
    blocks = np.split(np.arange(len(table)), len(shared))
    owners = np.array([block[0] for block in blocks], np.int32)
    for number, (block, count) in enumerate(zip(blocks, shared, strict=True)):
        present = block[table[block, 0] != SCRATCH]
        if count:
            owners[number] = present[0]
            table[present, :count] = table[present[0], :count]
    return case._replace(table=table, shared=np.array(shared, np.int32), owners=owners)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates one head: element i and element i + D / 2 are a pair."""
    half = len(x) // 2
    pair = np.concatenate([x[half:], x[:half]])
    return x * cos + pair * sin


def put_new_tokens(case: Case, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns all keys and values with those of the new tokens."""
    keys, values = case.keys.copy(), case.values.copy()
    for slot, last in enumerate(case.lengths - 1):
        cos, sin = case.cos[slot], case.sin[slot]
        place = FIRST_PAGE + case.table[slot, last // case.page], last % case.page
        for head, key in enumerate(case.k[slot]):
            keys[*place, head] = rounded(rotate(key, cos, sin), dtype)
        values[place] = case.v[slot]
    return keys, values


def by_definition(case: Case, dtype: DTypeLike, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the output, slot by slot. The keys and values have those of the new tokens."""
    S, H, D = case.q.shape
    K = case.k.shape[1]
    out = np.zeros((S, H, D), np.float32)
    for slot in range(S):
        cos, sin, last = case.cos[slot], case.sin[slot], case.lengths[slot] - 1
        pages = FIRST_PAGE + case.table[slot]
        for head in range(H):
            query = rounded(rotate(case.q[slot, head], cos, sin), dtype)
            kv_head = head // (H // K)
            places = [(pages[t // case.page], t % case.page, kv_head) for t in range(last + 1)]
            scores = np.array([query @ keys[place] for place in places]) / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            mixed = sum(
                weight * values[place] for weight, place in zip(weights, places, strict=True)
            )
            out[slot, head] = mixed / weights.sum()
    return out


def by_kernel(
    case: Case, dtype: DTypeLike, number: Format | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what the kernel computes, as `by_definition` does."""
    K, D = case.k.shape[1:]
    rows, width = tpu.pool_rows(K, D)
    num_pages = len(case.keys)

    @jax.jit
    def run(case: Case) -> tuple[jax.Array, ...]:
        shape = (rows, num_pages, case.page, width)
        empty: pools.Pool = jnp.zeros(shape, dtype)
        if number is not None:
            scales = jnp.zeros(pools.scales_shape(shape, D))
            empty = pools.QuantizedPool(jnp.zeros(shape, number.dtype), scales)
        every_page = jnp.arange(num_pages)
        q, k, v = (x.astype(dtype) for x in (case.q, case.k, case.v))
        out, k_pool, v_pool = tpu_decode.decode(
            q,
            k,
            v,
            case.cos,
            case.sin,
            pools.write(empty, case.keys, every_page),
            pools.write(empty, case.values, every_page),
            case.table,
            case.lengths,
            jnp.int32(FIRST_PAGE),
            case.shared,
            case.owners,
            interpret=True,
        )
        read = [pools.read(pool, every_page, K, D, jnp.float32) for pool in (k_pool, v_pool)]
        return out, *read

    out, keys, values = (np.asarray(x, np.float32) for x in run(case))
    return out, keys, values


def assert_equal_to_definition(case: Case, dtype: DTypeLike) -> None:
    """Compares outputs, and every page but those that no sequence has.

    In bfloat16 the weights of the softmax, at most 1 and of sum l, are rounded by 2^-9 of
    themselves, and the output, at most 4 here, by 2^-9 of itself.
    """
    out, keys, values = by_kernel(case, dtype)
    expected_keys, expected_values = put_new_tokens(case, dtype)
    expected_out = by_definition(case, dtype, expected_keys, expected_values)
    tolerance = 1e-5 if dtype == jnp.float32 else 2 * 4 * 2.0**-9
    is_idle = case.table[:, 0] == SCRATCH
    np.testing.assert_allclose(out[~is_idle], expected_out[~is_idle], atol=tolerance)
    assert np.isfinite(out).all()
    of_slots = np.arange(len(keys)) != FIRST_PAGE + SCRATCH
    # XLA:CPU may fuse a product and a sum, which is another rounding of a key in the last bit.
    atol = 1e-5 if dtype == jnp.float32 else 2.0**-6
    np.testing.assert_allclose(keys[of_slots], expected_keys[of_slots], atol=atol)
    np.testing.assert_array_equal(values[of_slots], expected_values[of_slots])
    # Nothing but the new tokens has changed.
    changed = (keys != case.keys).any(axis=(2, 3)) & of_slots[:, None]
    assert changed.sum() <= (~is_idle).sum()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a block two pages, so that slots have several."""
    monkeypatch.setattr(tpu_decode, "BLOCK_TOKENS", 2 * PAGE)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "heads",
    [pytest.param(heads, id=name) for name, heads in HEADS.items()],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
def test_the_kernel_equals_the_definition(heads: Heads, dtype: DTypeLike) -> None:
    assert_equal_to_definition(make_case(heads, dtype, LENGTHS), dtype)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "heads",
    [pytest.param(heads, id=name) for name, heads in HEADS.items()],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
def test_int8_pages_equal_the_definition(
    heads: Heads, dtype: DTypeLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new tokens are rounded to the nearest of 127 steps, and attention is of what is stored.

    A number in the middle between two steps may go to either one.
    """
    compare_in_8_bits(heads, dtype, INT8, monkeypatch)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
def test_fp8_pages_equal_the_definition(dtype: DTypeLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new tokens are rounded to float8, whose numbers are 1/16 of the largest one apart."""
    compare_in_8_bits(HEADS["a KV head of 64 a device"], dtype, FP8, monkeypatch)


def compare_in_8_bits(
    heads: Heads, dtype: DTypeLike, number: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares pages of 8-bit numbers and their attention with the definition."""
    monkeypatch.setattr(tpu_decode, "BLOCK_TOKENS", 2 * PAGE_IN_8_BITS)
    case = make_case(heads, dtype, LENGTHS_IN_8_BITS, PAGE_IN_8_BITS)
    case = share_pages(case, SHARED_IN_8_BITS)
    # To round a second time changes nothing but last digits.
    old = [
        np.asarray(pools.as_stored(jnp.asarray(x), number.dtype, jnp.float32))
        for x in (case.keys, case.values)
    ]
    case = case._replace(keys=old[0], values=old[1])

    out, *stored = by_kernel(case, dtype, number)

    exact = put_new_tokens(case, dtype)
    is_idle = case.table[:, 0] == SCRATCH
    last = case.lengths - 1
    of_slots = (
        FIRST_PAGE + case.table[np.arange(len(last)), last // PAGE_IN_8_BITS],
        last % PAGE_IN_8_BITS,
    )
    # XLA:CPU rounds a rotated key in bfloat16 in another place.
    of_rotation = 1e-5 if dtype == jnp.float32 else 2.0**-6
    for before, found, wanted in zip(old, stored, exact, strict=True):
        largest = np.abs(wanted[of_slots]).max(axis=-1, keepdims=True)
        # The largest float8 numbers are 32 apart, and smaller ones 1/8 of the power of 2 below.
        steps = largest / 127
        if number == FP8:
            steps = np.maximum(np.abs(wanted[of_slots]) / 8, largest / 448 * 2.0**-9)
        differences = np.abs(found[of_slots] - wanted[of_slots])
        assert (differences <= 0.5 * steps + of_rotation)[~is_idle].all()
        is_old = np.ones(found.shape[:2], bool)
        is_old[of_slots] = False
        np.testing.assert_allclose(found[is_old], before[is_old], rtol=1e-6)
    expected_out = by_definition(case, dtype, *stored)
    tolerance = 1e-5 if dtype == jnp.float32 else 2 * 4 * 2.0**-9
    np.testing.assert_allclose(out[~is_idle], expected_out[~is_idle], atol=tolerance)
    assert np.isfinite(out).all()


# Two blocks of shared pages, of which the second one is not full; none; one page.
SHARED = (3, 0, 1)
# Each block has slots whose own pages are in one block and in two. One slot of each is idle: in the
# first block it is the first one, which has ended before the others.
LENGTHS_OF_SHARING = (IDLE, 64, 49, 80, 1, 33, 16, IDLE, 17, 65, 40, IDLE)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_neighbors_read_shared_pages_together(name: str, dtype: DTypeLike) -> None:
    case = share_pages(make_case(HEADS[name], dtype, LENGTHS_OF_SHARING), SHARED)

    assert_equal_to_definition(case, dtype)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("sharing", [2, 3, 6])
def test_parts_hold_some_of_the_slots_that_share(
    sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 16 slots hold eight pairs. Of blocks of six or three they hold pairs, or none.

    One of every six slots is idle: the second one, or with blocks of six the first one of a pair.
    """
    monkeypatch.setattr(tpu_decode, "MOST_SLOTS", 16)
    lengths = (49, IDLE, 80, 64, 70, 50) if sharing < 6 else (49, 80, IDLE, 64, 70, 50)
    case = make_case((6, 2, 64), jnp.float32, lengths * 3)
    shared = tuple(number % 4 for number in range(1, 1 + 18 // sharing))

    assert_equal_to_definition(share_pages(case, shared), jnp.float32)


@pytest.mark.usefixtures("quick_compilation")
def test_few_slots_read_together_where_they_have_many_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four slots of two rows of eight queries: two read together."""
    monkeypatch.setattr(tpu_decode, "MOST_QUERIES", 2 * 2 * 8)
    case = make_case((4, 2, 128), jnp.float32, (49, 64, IDLE, 70))

    assert_equal_to_definition(share_pages(case, (3,)), jnp.float32)


@pytest.mark.usefixtures("quick_compilation")
def test_shared_pages_are_read_once() -> None:
    """The pages that the others' tables have in their place are not read."""
    case = share_pages(make_case((4, 2, 64), jnp.float32, (49, 64, 80, 70)), (3,))
    expected, _, _ = by_kernel(case, jnp.float32)
    elsewhere = case.table.copy()
    elsewhere[1:, :3] = SCRATCH
    keys = case.keys.copy()
    keys[FIRST_PAGE + SCRATCH] = np.nan

    out, _, _ = by_kernel(case._replace(table=elsewhere, keys=keys), jnp.float32)

    np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("num_slots", [1, 20])
def test_slots_are_divided_into_parts(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 slots in parts of 16 the last part is padded with slots that are not there."""
    monkeypatch.setattr(tpu_decode, "MOST_SLOTS", 16)
    lengths = (33, 1, 80, 16, IDLE, *range(1, 16))[:num_slots]

    assert_equal_to_definition(make_case((6, 2, 64), jnp.float32, lengths), jnp.float32)


@pytest.mark.parametrize(
    ("num_slots", "cores", "sharing", "slots"),
    [
        (32, 1, 8, 32),
        (32, 2, 8, 16),
        (10, 2, 8, 10),  # fewer than a register of 16 bits has rows
        (128, 1, 8, 64),
        (100, 1, 6, 48),  # whole blocks of six, and whole registers
        (80, 1, 5, 48),  # 80 slots would be whole blocks of five, and are too many
    ],
)
def test_parts_have_whole_blocks_where_these_fit(
    num_slots: int, cores: int, sharing: int, slots: int
) -> None:
    assert tpu_decode.slots_of_part(num_slots, cores, sharing) == slots


def test_what_a_slot_does_not_hold_does_not_matter() -> None:
    """Not even where it is not a number: pages of others, and what was never written."""
    case = make_case((4, 2, 64), jnp.float32, (1, 40))
    expected, _, _ = by_kernel(case, jnp.float32)
    is_own = np.zeros(len(case.keys), bool)
    is_own[FIRST_PAGE + case.table] = True
    is_own[FIRST_PAGE + SCRATCH] = False
    keys, values = case.keys.copy(), case.values.copy()
    keys[~is_own], values[~is_own] = np.nan, np.nan

    out, _, _ = by_kernel(case._replace(keys=keys, values=values), jnp.float32)

    np.testing.assert_array_equal(out, expected)


def test_pages_that_are_no_whole_tiles_are_refused() -> None:
    q, cos = jnp.zeros((1, 2, 64), jnp.bfloat16), jnp.zeros((1, 64))
    pool = jnp.zeros((1, 4, 24, 128), jnp.bfloat16)
    table = jnp.zeros((1, 1), jnp.int32)
    ones = jnp.ones(1, jnp.int32)

    with pytest.raises(UserError, match=r"rollout.page_size=24.*multiple of 16"):
        tpu_decode.decode(q, q, q, cos, cos, pool, pool, table, ones, ones[0], ones, ones)
