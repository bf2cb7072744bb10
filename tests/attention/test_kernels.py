"""The kernels against the XLA definition, in interpret mode, and the choice of a backend.

`test_compiled_kernels.py` compiles the same kernels for their hardware.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jzero import attention
from jzero.attention import exact, gpu, tpu, xla
from jzero.attention.backend import Packed, Paged, Window
from jzero.errors import UserError
from jzero.model.architecture import NO_WINDOW
from jzero.sharding.mesh import make_mesh, train_mesh
from jzero.types import RowLayout

Value = TypeVar("Value")

Heads = tuple[int, int, int]  # (query heads, KV heads, head dim)

MODELS: dict[str, Heads] = {
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-3b": (16, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-0.6b and 1.7b": (16, 8, 128),
    "qwen3-4b and 8b": (32, 8, 128),
}
SHARDS: dict[str, Heads] = {
    "qwen2.5-0.5b over 2": (7, 1, 64),
    "three heads of 64": (6, 3, 64),
    "four in a row": (4, 4, 32),
}
SMALL: Heads = (4, 2, 16)

# No length is a multiple of the blocks of the kernels, but those of the last layout.
LAYOUTS = [
    RowLayout(0, 1, 300),
    RowLayout(0, 3, 75),
    RowLayout(70, 3, 90),
    RowLayout(33, 1, 101),
    RowLayout(130, 2, 20),
    RowLayout(128, 2, 128),
]

splash: Packed = partial(tpu.packed, interpret=True)
# cuDNN has no CPU path: XLA runs the same call with the same mask.
cudnn_by_xla: Packed = partial(gpu.packed, implementation="xla")
gpu_paged: Paged = partial(gpu.paged, interpret=True)

quick = pytest.mark.usefixtures("quick_compilation")
every_packed = pytest.mark.parametrize("packed", [splash, cudnn_by_xla], ids=["tpu", "gpu"])


def by_name(table: Mapping[str, Value]) -> list:
    """Returns the values of a table as test parameters with their names."""
    return [pytest.param(value, id=name) for name, value in table.items()]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes splash cut even short rows into several blocks."""
    monkeypatch.setattr(tpu, "BLOCKS", (128,))


# -- packed rows -----------------------------------------------------------------------------------


class PackedInputs(NamedTuple):
    """Arguments of packed attention, and the cotangent of its output."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    segments: np.ndarray
    cotangent: np.ndarray  # zero at padding


def random_segments(rng: np.random.Generator, layout: RowLayout) -> np.ndarray:
    """Returns one row: a padded prompt, and in each slot up to three sequences and padding.

    Of three slots, one sequence fills each of the last two: their segments have the same number.
    """
    row = np.zeros(layout.tokens, np.int32)
    if layout.prefix:
        prompt_tokens = rng.integers(1, layout.prefix + 1)
        row[:prompt_tokens] = 1

    position = np.arange(layout.slot)
    for start in range(layout.prefix, layout.tokens, layout.slot):
        ends = np.sort(rng.choice(np.arange(1, layout.slot + 1), 3, replace=False))
        segments = 1 + np.searchsorted(ends, position, side="right")
        row[start : start + layout.slot] = np.where(position < ends[-1], segments, 0)
    if layout.slots == 3:
        row[-2 * layout.slot :] = 1
    return row


def packed_inputs(layout: RowLayout, heads: Heads, rows: int) -> PackedInputs:
    """Returns random inputs. Of several rows, the last one has no response."""
    rng = np.random.default_rng(layout.tokens)
    H, K, D = heads
    segments = np.stack([random_segments(rng, layout) for _ in range(rows)])
    if rows > 1:
        segments[-1, layout.prefix :] = 0

    def normal(num_heads: int) -> np.ndarray:
        return rng.standard_normal((rows, layout.tokens, num_heads, D)).astype(np.float32)

    q, k, v, cotangent = normal(H), normal(K), normal(K), normal(H)
    return PackedInputs(q, k, v, segments, cotangent * per_head(segments > 0))


def per_head(is_token: np.ndarray) -> np.ndarray:
    """Returns [B, T] as [B, T, 1, 1], which broadcasts over heads."""
    return is_token[..., None, None]


def output_and_gradients(
    packed: Packed, inputs: PackedInputs, layout: RowLayout
) -> tuple[jax.Array, ...]:
    """Returns the output, zero at padding, and the gradients of q, k and v.

    What padding receives means nothing, but it has to be finite.
    """
    q, k, v, segments, cotangent = inputs

    @jax.jit
    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def output(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return packed(q, k, v, segments, layout)

        out, pullback = jax.vjp(output, q, k, v)
        return out, pullback(cotangent)

    out, gradients = run(q, k, v, cotangent)
    assert np.isfinite(out).all()
    return np.where(per_head(segments > 0), out, 0), *gradients


def assert_all_close(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    """Compares results of `output_and_gradients`."""
    for array, expected_array in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, atol=2e-5)


# Splash takes a whole row of this layout in one block.
ONE_BLOCK = LAYOUTS[2]


@functools.cache
def splash_in_one_block() -> tuple[jax.Array, ...]:
    """Returns what splash computes on one device. Two tests compare with it."""
    return output_and_gradients(splash, packed_inputs(ONE_BLOCK, SMALL, rows=2), ONE_BLOCK)


MODELS_AND_LAYOUTS = {
    name: (heads, layout) for (name, heads), layout in zip(MODELS.items(), LAYOUTS, strict=True)
}


@quick
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("heads_and_layout", by_name(MODELS_AND_LAYOUTS))
def test_splash_equals_the_definition(heads_and_layout: tuple[Heads, RowLayout]) -> None:
    heads, layout = heads_and_layout
    inputs = packed_inputs(layout, heads, rows=1)

    by_splash = output_and_gradients(splash, inputs, layout)

    assert_all_close(by_splash, output_and_gradients(xla.packed, inputs, layout))


def positions_of(segments: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Returns the position of every token of the rows in its sequence."""
    positions = np.zeros_like(segments)
    prefix = layout.prefix
    positions[:, :prefix] = np.arange(prefix)
    for row, tokens in enumerate(segments):
        shared = (tokens[:prefix] > 0).sum()
        for start in range(prefix, layout.tokens, layout.slot):
            first = start
            for place in range(start, start + layout.slot):
                if tokens[place] != tokens[first]:
                    first = place
                positions[row, place] = shared + place - first
    return positions


WINDOW = 40  # shorter than a block and than most sequences, and reaches into prefixes
SOFT_CAP = 2.0
every_packed_with_windows = pytest.mark.parametrize(
    "packed",
    [partial(splash, width=WINDOW), exact.packed, cudnn_by_xla],
    ids=["tpu", "exact", "gpu"],
)


@quick
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [WINDOW, NO_WINDOW], ids=["window", "all tokens"])
@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=str)
@every_packed_with_windows
def test_windows_equal_the_definition(packed: Packed, layout: RowLayout, size: int) -> None:
    assert_windows_equal_the_definition(packed, xla.packed, layout, size)


@quick
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [WINDOW, NO_WINDOW], ids=["window", "all tokens"])
@every_packed_with_windows
def test_bounded_scores_equal_the_definition(packed: Callable[..., jax.Array], size: int) -> None:
    """As in Gemma 2. The bound is below the largest of 2,000 random scores."""
    bounded, defined = (partial(kernel, soft_cap=SOFT_CAP) for kernel in (packed, xla.packed))
    assert_windows_equal_the_definition(bounded, defined, LAYOUTS[2], size)


def assert_windows_equal_the_definition(
    packed: Packed, defined: Packed, layout: RowLayout, size: int
) -> None:
    inputs = packed_inputs(layout, SMALL, rows=2)
    positions = jnp.asarray(positions_of(inputs.segments, layout))

    def with_window(kernel: Packed) -> Packed:
        def run(
            q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, layout: RowLayout
        ) -> jax.Array:
            return kernel(q, k, v, segments, layout, Window(jnp.int32(size), positions))

        return run

    found = output_and_gradients(with_window(packed), inputs, layout)

    assert_all_close(found, output_and_gradients(with_window(defined), inputs, layout))


@quick
def test_a_window_without_the_queries_of_the_prefix() -> None:
    layout = LAYOUTS[2]
    q, k, v, segments, _ = packed_inputs(layout, SMALL, rows=2)
    window = Window(jnp.int32(WINDOW), jnp.asarray(positions_of(segments, layout)))
    run = jax.jit(partial(splash, width=WINDOW), static_argnums=4)

    found = run(q[:, layout.prefix :], k, v, segments, layout, window)

    every = run(q, k, v, segments, layout, window)[:, layout.prefix :]
    is_token = segments[:, layout.prefix :] > 0
    np.testing.assert_allclose(found[is_token], every[is_token], atol=2e-5)


@quick
def test_one_block_of_splash_equals_the_definition() -> None:
    inputs = packed_inputs(ONE_BLOCK, SMALL, rows=2)

    by_splash = splash_in_one_block()

    assert_all_close(by_splash, output_and_gradients(xla.packed, inputs, ONE_BLOCK))


@quick
@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_the_mask_of_cudnn_equals_the_definition(layout: RowLayout) -> None:
    inputs = packed_inputs(layout, SMALL, rows=3)

    by_cudnn = output_and_gradients(cudnn_by_xla, inputs, layout)

    assert_all_close(by_cudnn, output_and_gradients(xla.packed, inputs, layout))


@quick
@pytest.mark.usefixtures("small_blocks")
@every_packed
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_a_segment_sees_no_other(packed: Packed, layout: RowLayout) -> None:
    q, k, v, segments, _ = packed_inputs(layout, SMALL, rows=1)
    position = np.arange(layout.tokens)
    in_first_slot = (position >= layout.prefix) & (position < layout.prefix + layout.slot)
    is_first_segment = in_first_slot & (segments == 1)
    is_changed = per_head(is_first_segment | (segments == 0))  # padding too

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return packed(q, k, v, segments, layout)

    before = np.asarray(run(q, k, v))
    changed = [np.where(is_changed, x + 3, x) for x in (q, k, v)]
    after = np.asarray(run(*changed))

    is_other = ~is_first_segment & (segments > 0)
    assert is_other.any()
    assert is_first_segment.any()
    np.testing.assert_array_equal(after[is_other], before[is_other])
    assert not np.allclose(after[is_first_segment], before[is_first_segment])


@quick
@every_packed
def test_responses_see_the_prefix_and_not_its_padding(packed: Packed) -> None:
    layout = LAYOUTS[2]
    q, k, v, segments, _ = packed_inputs(layout, SMALL, rows=1)
    is_token = segments[0] > 0
    is_response = is_token & (np.arange(layout.tokens) >= layout.prefix)
    first_padding = is_token[: layout.prefix].sum()

    @jax.jit
    def run(k: jax.Array) -> jax.Array:
        return packed(q, k, v, segments, layout)

    before = np.asarray(run(k))

    def depends_on(key: int) -> np.ndarray:
        """Says which tokens' outputs change with a key."""
        changed = k.copy()
        changed[:, key] += 3
        return (np.asarray(run(changed)) != before).any(axis=(0, 2, 3))

    assert depends_on(0)[is_response].all()
    assert not depends_on(first_padding)[is_token].any()


@quick
@every_packed
@pytest.mark.parametrize(
    "layout", [RowLayout(130, 1, 70), RowLayout(256, 1, 128), RowLayout(70, 3, 90)], ids=str
)
def test_queries_of_the_prefix_may_be_left_out(
    packed: Packed, layout: RowLayout, small_blocks: None
) -> None:
    """As where a chunk attends to the pages before it."""
    inputs = packed_inputs(layout, SMALL, rows=2)
    is_token = (inputs.segments > 0)[:, layout.prefix :, None, None]

    def output(q: np.ndarray) -> jax.Array:
        return packed(
            jnp.asarray(q),
            jnp.asarray(inputs.k),
            jnp.asarray(inputs.v),
            jnp.asarray(inputs.segments),
            layout,
        )

    of_all = output(inputs.q)[:, layout.prefix :]
    of_body = output(inputs.q[:, layout.prefix :])

    assert of_body.shape == of_all.shape
    np.testing.assert_allclose(of_body * is_token, of_all * is_token, atol=1e-5)


def test_a_row_too_long_for_its_codes_is_refused() -> None:
    tokens = 1 << 16
    q = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def run(q: jax.Array, segments: jax.Array) -> jax.Array:
        return tpu.packed(q, q, q, segments, RowLayout(0, 1, tokens))

    with pytest.raises(ValueError, match="65536 tokens"):
        jax.eval_shape(run, q, segments)


# -- paged decoding --------------------------------------------------------------------------------

LENGTHS = np.array([1, 33, 16, 75], np.int32)
PAGE_SIZE = 16
MAX_PAGES = 5  # of a slot; no block of two pages divides them


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets the TPU's paged attention, which has no such argument, in several blocks a slot.

    The GPU's paged attention gets several blocks, too.
    """
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(tpu, "COMPUTE_TOKENS", 2 * PAGE_SIZE)
    monkeypatch.setattr(gpu, "COMPUTE_TOKENS", 2 * PAGE_SIZE)
    monkeypatch.setattr(gpu, "SHORTEST_SPLIT", 2 * PAGE_SIZE)


def paged_inputs(
    heads: Heads, dtype: DTypeLike, pool_rows: tuple[int, int]
) -> tuple[np.ndarray | jax.Array, ...]:
    """Returns q, both pools, the table, the lengths and `shared`.

    The pools have `pool_rows` = (rows, width) of a token. What no sequence holds is noise.
    """
    H, K, D = heads
    rows, width = pool_rows
    rng = np.random.default_rng(H)
    S = len(LENGTHS)
    num_pages = S * MAX_PAGES + 1
    all_k, all_v = rng.standard_normal((2, num_pages, PAGE_SIZE, K, D)).astype(np.float32)
    last_k, last_v = rng.standard_normal((2, S, K, D)).astype(np.float32)
    table = 1 + rng.permutation(S * MAX_PAGES).reshape(S, MAX_PAGES).astype(np.int32)
    last_pages = table[np.arange(S), (LENGTHS - 1) // PAGE_SIZE]

    @jax.jit
    def make_pool(pages: jax.Array, last_tokens: jax.Array) -> jax.Array:
        """Writes whole pages, and then the last token of every sequence by itself."""
        pool = jnp.zeros((rows, num_pages, PAGE_SIZE, width), dtype)
        pool = attention.write(pool, pages, jnp.arange(num_pages))
        return attention.write(pool, last_tokens, last_pages, (LENGTHS - 1) % PAGE_SIZE)

    k_pool, v_pool = make_pool(all_k, last_k), make_pool(all_v, last_v)
    table[np.arange(MAX_PAGES) * PAGE_SIZE >= LENGTHS[:, None]] = 0
    q = rng.standard_normal((S, H, D)).astype(np.float32)
    return q, k_pool, v_pool, table, LENGTHS, jnp.zeros(S, jnp.int32)


def paged_by_definition(heads: Heads, dtype: DTypeLike) -> jax.Array:
    _, K, D = heads
    return jax.jit(xla.paged)(*paged_inputs(heads, dtype, xla.pool_rows(K, D)))


def paged_by(
    kernel: Paged, heads: Heads, dtype: DTypeLike, pool_rows: tuple[int, int]
) -> jax.Array:
    """Runs a kernel on `paged_inputs`, and checks the shape and the type of its output."""
    H, K, D = heads
    inputs = paged_inputs(heads, dtype, pool_rows)
    out = jax.jit(kernel, static_argnums=6)(*inputs, K)
    assert out.shape == (len(LENGTHS), H, D)
    assert out.dtype == jnp.float32
    return out


@quick
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("heads", by_name(MODELS))
def test_paged_kernels_equal_the_definition(heads: Heads) -> None:
    _, K, D = heads
    expected = paged_by_definition(heads, jnp.bfloat16)

    by_tpu = paged_by(tpu.paged, heads, jnp.bfloat16, tpu.pool_rows(K, D))
    by_gpu = paged_by(gpu_paged, heads, jnp.bfloat16, gpu.pool_rows(K, D))

    # The TPU's kernel rounds nothing but what the pool holds. The GPU's multiplies in bfloat16:
    # queries, weights and its output are rounded by 2^-9 of themselves.
    np.testing.assert_allclose(by_tpu, expected, atol=1e-5)
    np.testing.assert_allclose(by_gpu, expected, atol=2e-2)


@quick
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(1, 0), (17, 0), (33, 0), (500, 0), (NO_WINDOW, 0), (33, SOFT_CAP), (NO_WINDOW, SOFT_CAP)],
)
def test_paged_windows_equal_the_definition(window: int, soft_cap: float) -> None:
    heads = (4, 2, 64)
    inputs = paged_inputs(heads, jnp.bfloat16, xla.pool_rows(2, 64))
    change = {"window": jnp.int32(window), "soft_cap": soft_cap}
    expected = jax.jit(partial(xla.paged, kv_heads=2, **change))(*inputs)
    by_exact = paged_by(partial(exact.paged, **change), heads, jnp.bfloat16, (1, 128))
    change["width"] = window if window < NO_WINDOW else WINDOW

    by_tpu = paged_by(partial(tpu.paged, **change), heads, jnp.bfloat16, tpu.pool_rows(2, 64))
    by_gpu = paged_by(partial(gpu_paged, **change), heads, jnp.bfloat16, gpu.pool_rows(2, 64))

    np.testing.assert_allclose(by_tpu, expected, atol=1e-5)
    np.testing.assert_allclose(by_gpu, expected, atol=2e-2)
    np.testing.assert_allclose(by_exact, expected, atol=1e-5)


WINDOW_KERNELS: dict[str, tuple[Paged, tuple[int, int]]] = {
    "xla": (xla.paged, xla.pool_rows(2, 64)),
    "exact": (exact.paged, (1, 128)),
    "tpu": (partial(tpu.paged, width=17), tpu.pool_rows(2, 64)),
    "gpu": (partial(gpu_paged, width=17), gpu.pool_rows(2, 64)),
}


@quick
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", WINDOW_KERNELS)
def test_pages_before_a_window_may_hold_other_tokens(kernel: str) -> None:
    """A ring has newer pages there. No bit of the output changes."""
    paged, pool_rows = WINDOW_KERNELS[kernel]
    q, k_pool, v_pool, table, lengths, shared = paged_inputs((4, 2, 64), jnp.bfloat16, pool_rows)
    run = jax.jit(partial(paged, kv_heads=2, window=jnp.int32(17)))
    expected = run(q, k_pool, v_pool, table, lengths, shared)
    page_ends = (np.arange(MAX_PAGES) + 1) * PAGE_SIZE
    is_before = page_ends <= lengths[:, None] - 17
    newest = np.take_along_axis(table, (lengths[:, None] - 1) // PAGE_SIZE, axis=1)

    found = run(q, k_pool, v_pool, np.where(is_before, newest, table), lengths, shared)

    assert is_before.any()
    np.testing.assert_array_equal(found, expected)


@quick
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("heads", by_name(SHARDS))
def test_rows_of_several_heads_equal_the_definition(heads: Heads) -> None:
    _, K, D = heads
    expected = paged_by_definition(heads, jnp.bfloat16)

    by_tpu = paged_by(tpu.paged, heads, jnp.bfloat16, tpu.pool_rows(K, D))

    np.testing.assert_allclose(by_tpu, expected, atol=1e-5)


@quick
@pytest.mark.usefixtures("interpreted")
def test_paged_kernels_with_a_float32_pool_equal_the_definition() -> None:
    heads = (4, 2, 64)
    expected = paged_by_definition(heads, jnp.float32)

    by_tpu = paged_by(tpu.paged, heads, jnp.float32, (1, 128))
    by_gpu = paged_by(gpu_paged, heads, jnp.float32, (2, 64))

    # The TPU's kernel rounds keys and values to bfloat16, whatever the pool holds.
    np.testing.assert_allclose(by_tpu, expected, atol=2e-2)
    np.testing.assert_allclose(by_gpu, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "expected"),
    [
        (2, 64, (1, 128)),
        (1, 64, (1, 128)),
        (3, 64, (2, 128)),
        (8, 128, (8, 128)),
        (2, 32, (1, 128)),
        (2, 80, (2, 128)),
    ],
)
def test_rows_of_the_tpu_pool_are_whole_lanes(
    num_heads: int, head_dim: int, expected: tuple[int, int]
) -> None:
    assert tpu.pool_rows(num_heads, head_dim) == expected


def test_page_sizes_that_the_gpu_cannot_read_are_refused() -> None:
    q = jnp.zeros((1, 2, 64))
    pool = jnp.zeros((2, 4, 48, 64))
    table = jnp.zeros((1, 1), jnp.int32)
    lengths = jnp.ones(1, jnp.int32)
    shared = jnp.zeros(1, jnp.int32)

    with pytest.raises(ValueError, match=r"rollout.page_size=48.*model.attention=xla"):
        gpu.paged(q, pool, pool, table, lengths, shared, 2)


# -- the choice of a backend, and a mesh -----------------------------------------------------------


def one_device_mesh() -> Mesh:
    return make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})


def test_a_backend_from_outside_is_one_entry_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = attention.Backend(xla.packed, xla.paged, xla.pool_rows, attention.write)

    monkeypatch.setitem(attention.BACKENDS, "mine", lambda: mine)

    assert attention.choose("mine", one_device_mesh()) is mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("splash", "model.attention='splash' is not one of xla, tpu, gpu"),
        ("tpu", "model.attention=tpu does not run on a device of platform cpu"),
        ("tpu_fused", "model.attention=tpu_fused does not run on a device of platform cpu"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention.choose(name, one_device_mesh())


@pytest.mark.parametrize("name", ["", "xla"])
def test_a_mesh_of_cpus_chooses_xla(name: str) -> None:
    backend = attention.choose(name, one_device_mesh())

    assert backend == attention.Backend(
        xla.packed,
        xla.paged,
        xla.pool_rows,
        attention.write,
        reads_8_bits=True,
        has_windows=True,
        has_soft_cap=True,
    )
    assert backend.decode is None


@quick
@pytest.mark.parametrize("tensor", [2, 4])
def test_heads_split_over_a_mesh_equal_whole_ones(tensor: int) -> None:
    """Over 4 devices each of the two KV heads is on two of them."""
    inputs = packed_inputs(ONE_BLOCK, SMALL, rows=2)
    mesh = train_mesh(1, 2, tensor, jax.devices()[: 2 * tensor])
    split_splash = attention.split_over_mesh(splash, tensor, ("data", "fsdp"), mesh)

    split = output_and_gradients(split_splash, inputs, ONE_BLOCK)

    assert_all_close(split, splash_in_one_block())
