"""Kernels, engine and update on a real GPU or TPU, against the definition in float32.

    pytest -m gpu        on a machine with a GPU
    pytest -m tpu        on a machine with a TPU

The same tests run on a CPU at tiny shapes. There the kernels are those of the GPU, interpreted, in
bfloat16 as on the GPU, and the TPU's kernel that does all of a decode step's attention. What they
print with -s are the errors that they found.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.attention import gpu, tpu, tpu_decode, xla
from jzero.attention.backend import Backend, Packed
from jzero.attention.pools import read
from jzero.config import Config
from jzero.decoder.engine import Engine
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Sequence, make_groups
from jzero.model import qwen
from jzero.model.grouped_products import (
    PRODUCTS,
    GroupedProduct,
    block_product,
    product_of_platform,
)
from jzero.model.grouped_triton import triton_product
from jzero.sharding.mesh import decode_mesh, train_mesh
from jzero.sharding.publish import publisher
from jzero.sharding.side_by_side import weight_layout
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import divide_groups, make_minibatch, score_and_credit
from jzero.training.trainer import make_trainer
from jzero.types import RowLayout

Heads = tuple[int, int, int]  # (query heads, KV heads, head dim)

# Entries of attention.BACKENDS that the tests on a CPU choose.
INTERPRETED = "interpreted"
INTERPRETED_FUSED = "interpreted_fused"
GROUP_SIZE = 4
# A step so long that the parameters before it are lost in rounding: what is left is the gradient.
FAR = 2.0**40


@dataclass(frozen=True)
class Shapes:
    """How large the tests of a device are."""

    attention: str  # model.attention of what is tested
    fused: str  # that of a kernel which does all of a decode step's attention; "" where none is
    model: qwen.QwenConfig
    heads: tuple[Heads, ...]  # of the kernels
    layouts: tuple[RowLayout, ...]
    longest: int  # tokens of a slot in paged attention
    page_size: int
    max_prompt: int
    max_new: int


TINY = Shapes(
    attention=INTERPRETED,
    fused=INTERPRETED_FUSED,
    model=qwen.QwenConfig("qwen2", 64, 32, 48, 2, 2, 1, 16, True, 10000.0, 1e-6),
    heads=((4, 2, 16),),
    layouts=(RowLayout(8, 2, 12),),
    longest=37,
    page_size=16,
    max_prompt=6,
    max_new=6,
)
REAL = Shapes(
    attention="",
    fused="",
    model=qwen.QwenConfig("qwen2", 1024, 256, 512, 2, 4, 2, 64, True, 10000.0, 1e-6),
    # Those of Qwen2.5 0.5B, 3B and 7B, and of Qwen3 4B.
    heads=((14, 2, 64), (16, 2, 128), (28, 4, 128), (32, 8, 128)),
    # Those of recipes, and one that no block of a kernel divides.
    layouts=(RowLayout(256, 4, 1024), RowLayout(0, 1, 512), RowLayout(70, 3, 90)),
    longest=2000,
    page_size=64,
    max_prompt=64,
    max_new=128,
)
ON_DEVICES = [
    pytest.param(TINY, id="cpu"),
    pytest.param(REAL, id="gpu", marks=pytest.mark.gpu),
    pytest.param(replace(REAL, fused="tpu_fused"), id="tpu", marks=pytest.mark.tpu),
]
on_devices = pytest.mark.parametrize("shapes", ON_DEVICES)
# Whole programs, which compile for seconds on a CPU.
on_devices_thorough = pytest.mark.parametrize(
    "shapes", [pytest.param(TINY, id="cpu"), *ON_DEVICES[1:]]
)
pytestmark = pytest.mark.usefixtures("interpreted")


def paged_by_interpreter(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, *others: jax.Array | int
) -> jax.Array:
    """Interprets the GPU's kernel. On a CPU the pools of an engine hold the bits of bfloat16."""
    k_pool, v_pool = (attention.decode_kv(pool, jnp.bfloat16) for pool in (k_pool, v_pool))
    return gpu.paged(q, k_pool, v_pool, *others, interpret=True)


def decode_by_interpreter(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *others: jax.Array,
) -> tuple[jax.Array, ...]:
    """Interprets the TPU's kernel of a decode step, for the same pools as above."""
    stored = k_pool.dtype
    pools = [attention.decode_kv(pool, jnp.bfloat16) for pool in (k_pool, v_pool)]
    out, *pools = tpu_decode.decode(q, k, v, cos, sin, *pools, *others, interpret=True)
    return out, *(attention.encode_kv(pool, stored) for pool in pools)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the GPU's kernels, interpreted, a backend of its own, and compiles quickly on a CPU."""
    backend = Backend(
        partial(gpu.packed, implementation="xla"),
        paged_by_interpreter,
        gpu.pool_rows,
        attention.write,
    )
    fused = backend._replace(pool_rows=tpu.pool_rows, decode=decode_by_interpreter)
    monkeypatch.setitem(attention.BACKENDS, INTERPRETED, lambda: backend)
    monkeypatch.setitem(attention.BACKENDS, INTERPRETED_FUSED, lambda: fused)
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def one_device() -> Mesh:
    return train_mesh(1, 1, 1, jax.devices()[:1])


def error(found: jax.Array, expected: jax.Array) -> float:
    """Returns the norm of the difference, relative to that of what is expected."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def cosine(found: qwen.Params, expected: qwen.Params) -> float:
    """Returns the cosine of the angle between two trees of parameters."""
    a, b = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (found, expected)
    )
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# -- kernels ---------------------------------------------------------------------------------------


def random_segments(rng: np.random.Generator, layout: RowLayout, num_rows: int) -> np.ndarray:
    """Returns rows with a padded prompt, and two sequences and padding in each slot."""
    segments = np.zeros((num_rows, layout.tokens), np.int32)
    for row in segments:
        if layout.prefix:
            row[: rng.integers(1, layout.prefix + 1)] = 1
        for start in range(layout.prefix, layout.tokens, layout.slot):
            first, second = np.sort(rng.choice(np.arange(1, layout.slot), 2, replace=False))
            row[start : start + first] = 1
            row[start + first : start + second] = 2
    return segments


def output_and_gradients(
    packed: Packed, inputs: list[jax.Array], segments: np.ndarray, layout: RowLayout
) -> list[jax.Array]:
    """Returns the output, and the gradients of q, k and v, where there is no padding."""
    is_token = (segments > 0)[..., None, None]

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> list[jax.Array]:
        def output(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(is_token, packed(q, k, v, jnp.asarray(segments), layout), 0)

        out, pullback = jax.vjp(output, q, k, v)
        return [out, *pullback(w)]

    return run(*inputs)


@on_devices
def test_packed_attention_is_the_definition(shapes: Shapes) -> None:
    packed = attention.choose(shapes.attention, one_device()).packed
    for H, K, D in shapes.heads:
        for layout in shapes.layouts:
            rng = np.random.default_rng(layout.tokens)
            segments = random_segments(rng, layout, 2)
            inputs = [
                jnp.asarray(rng.standard_normal((2, layout.tokens, n, D)), jnp.bfloat16)
                for n in (H, K, K, H)
            ]

            found = output_and_gradients(packed, inputs, segments, layout)

            exact = [x.astype(jnp.float32) for x in inputs]
            with jax.default_matmul_precision("highest"):
                expected = output_and_gradients(xla.packed, exact, segments, layout)
            errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
            print("packed", (H, K, D), layout, errors)
            assert 0 < max(errors) < 2e-2  # bfloat16 is never exact


@on_devices
def test_paged_attention_is_the_definition(shapes: Shapes) -> None:
    """Of slots with one token, with whole pages, with one token more, and of random lengths."""
    backend = attention.choose(shapes.attention, one_device())
    num_slots, page_size = 8, shapes.page_size
    width = -(-shapes.longest // page_size)
    for H, K, D in shapes.heads:
        rng = np.random.default_rng(H)
        fixed = [1, page_size, page_size + 1, shapes.longest]
        lengths = np.array([*fixed, *rng.integers(1, shapes.longest + 1, num_slots - 4)], np.int32)
        table = 1 + rng.permutation(num_slots * width).reshape(num_slots, width).astype(np.int32)
        table[np.arange(width) * page_size >= lengths[:, None]] = 0
        num_pages = num_slots * width + 1
        pages = rng.standard_normal((2, num_pages, page_size, K, D)).astype(np.float32)
        q = rng.standard_normal((num_slots, H, D)).astype(np.float32)

        def attend(backend: Backend, q: np.ndarray = q, pages: np.ndarray = pages) -> jax.Array:
            kv_heads, head_dim = pages.shape[-2:]
            rows, row_width = backend.pool_rows(kv_heads, head_dim)
            empty = jnp.zeros((rows, pages.shape[1], page_size, row_width), jnp.bfloat16)
            numbers = jnp.arange(pages.shape[1])
            k_pool, v_pool = (backend.write(empty, jnp.asarray(x), numbers) for x in pages)
            shared = jnp.zeros(num_slots, jnp.int32)
            paged = jax.jit(backend.paged, static_argnums=6)
            return paged(q, k_pool, v_pool, table, lengths, shared, kv_heads)  # noqa: B023

        found = attend(backend)

        with jax.default_matmul_precision("highest"):
            expected = attend(Backend(xla.packed, xla.paged, xla.pool_rows, attention.write))
        print("paged", (H, K, D), error(found, expected))
        assert found.dtype == jnp.float32
        assert 0 < error(found, expected) < 2e-2


@on_devices
def test_grouped_products_are_the_definition(shapes: Shapes) -> None:
    """Of few rows, as in decoding, and of many; the gradients, too."""
    kind = product_of_platform(jax.default_backend())
    product = partial(triton_product, interpret=True) if shapes is TINY else PRODUCTS[kind]
    inputs, outputs, groups = (32, 20, 3) if shapes is TINY else (512, 384, 16)
    for num_rows in (groups, 40) if shapes is TINY else (groups, 5000):
        rng = np.random.default_rng(num_rows)
        shares = rng.dirichlet(np.full(groups, 2.0))
        sizes = jnp.asarray(rng.multinomial(num_rows - 1, shares), jnp.int32)  # one has no group
        arrays = [
            jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
            for shape in ((num_rows, inputs), (groups, inputs, outputs), (num_rows, outputs))
        ]

        def run(
            product: GroupedProduct,
            arrays: list[jax.Array],
            sizes: jax.Array = sizes,
        ) -> tuple[jax.Array, ...]:
            rows, weights, cotangent = arrays
            call = partial(product, sizes=sizes, dtype=rows.dtype)
            out, pullback = jax.vjp(lambda rows, weights: call(rows, weights), rows, weights)
            return out, *pullback(cotangent)

        found = jax.jit(partial(run, product))(arrays)

        exact = [x.astype(jnp.float32) for x in arrays]
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(partial(run, block_product))(exact)
        errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
        print("grouped", kind, num_rows, errors)
        assert 0 < max(errors) < 1e-2


class Step(NamedTuple):
    """What `Backend.decode` takes, for 8 slots in two blocks of neighbors, on layer 0."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cos: jax.Array
    sin: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    table: jax.Array
    lengths: jax.Array
    first_page: jax.Array
    shared: jax.Array
    owners: jax.Array


def random_step(backend: Backend, shapes: Shapes, heads: Heads) -> Step:
    """Neighbors of the first block share all pages but one; those of the second share nothing."""
    H, K, D = heads
    S, page_size = 8, shapes.page_size
    width = -(-shapes.longest // page_size)
    num_shared = width - 1
    rng = np.random.default_rng(H)
    lengths = rng.integers(num_shared * page_size + 1, shapes.longest + 1, S)
    lengths[0], lengths[4:6] = shapes.longest, (1, page_size)
    table = 1 + rng.permutation(S * width).reshape(S, width)
    table[:4, :num_shared] = table[0, :num_shared]
    angle = rng.uniform(0, 6, (S, D // 2))

    def random_pool() -> jax.Array:
        rows, row_width = backend.pool_rows(K, D)
        pages = jnp.arange(S * width + 1)
        empty = jnp.zeros((rows, len(pages), page_size, row_width), jnp.bfloat16)
        numbers = rng.standard_normal((len(pages), page_size, K, D))
        pool = backend.write(empty, jnp.asarray(numbers, jnp.float32), pages)
        assert isinstance(pool, jax.Array)
        return pool

    def random_heads(number: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((S, number, D)), jnp.bfloat16)

    return Step(
        q=random_heads(H),
        k=random_heads(K),
        v=random_heads(K),
        cos=jnp.asarray(np.tile(np.cos(angle), 2), jnp.float32),
        sin=jnp.asarray(np.concatenate([-np.sin(angle), np.sin(angle)], 1), jnp.float32),
        k_pool=random_pool(),
        v_pool=random_pool(),
        table=jnp.asarray(table, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        first_page=jnp.int32(0),
        shared=jnp.array([num_shared, 0], jnp.int32),
        owners=jnp.array([0, 4], jnp.int32),
    )


def step_by_definition(backend: Backend, step: Step) -> list[jax.Array]:
    """Returns the output in fp32, and the pools with the new tokens."""
    S, K, D = step.k.shape

    def rotated(x: jax.Array) -> jax.Array:
        exact = x.astype(jnp.float32)
        halves_exchanged = jnp.roll(exact, D // 2, axis=-1)
        turned = exact * step.cos[:, None] + halves_exchanged * step.sin[:, None]
        return turned.astype(jnp.bfloat16).astype(jnp.float32)

    def by_head(pool: jax.Array) -> jax.Array:
        pages = jnp.arange(pool.shape[1])
        numbers = read(pool, pages, K, D, jnp.float32)
        empty = jnp.zeros((K, *numbers.shape[:2], D))
        written = attention.write(empty, numbers, pages)
        assert isinstance(written, jax.Array)
        return written

    last = step.lengths - 1
    page_size = step.k_pool.shape[2]
    page = step.table[jnp.arange(S), last // page_size]
    new = rotated(step.k), step.v.astype(jnp.float32)
    pools = []
    for pool, token in zip((step.k_pool, step.v_pool), new, strict=True):
        pool = backend.write(pool, token, page, last % page_size)
        assert isinstance(pool, jax.Array)
        pools.append(pool)
    nothing_shared = jnp.zeros(1, jnp.int32)
    with jax.default_matmul_precision("highest"):
        out = jax.jit(xla.paged)(
            rotated(step.q), *map(by_head, pools), step.table, step.lengths, nothing_shared
        )
    return [out, *pools]


@pytest.mark.parametrize("shapes", [ON_DEVICES[0], ON_DEVICES[2]])
def test_one_kernel_of_a_decode_step_is_the_definition(shapes: Shapes) -> None:
    backend = attention.choose(shapes.fused, one_device())
    assert backend.decode is not None
    for heads in shapes.heads:
        step = random_step(backend, shapes, heads)

        found = jax.jit(backend.decode)(*step)

        expected = step_by_definition(backend, step)
        errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
        print("decode", heads, errors)
        of_output, of_keys, of_values = errors
        assert 0 < of_output < 2e-2
        assert of_keys < 2e-3  # a rotated key may be rounded otherwise
        assert of_values == 0


# -- the engine ------------------------------------------------------------------------------------


def settings(shapes: Shapes, attention_name: str, dtype: str) -> Config:
    longest_row = shapes.max_prompt + 2 * shapes.max_new
    return reference.settings(
        model={"dtype": dtype, "attention": attention_name},
        rollout={
            "max_prompt_tokens": shapes.max_prompt,
            "max_new_tokens": shapes.max_new,
            "num_slots": 8,
            "page_size": shapes.page_size,
            "decode_steps": 4,
            "temperature": 1.0,
        },
        train={"microbatch_tokens": 2 * longest_row},
        mesh={"data": 1, "fsdp": 1},
    )


def sampled(config: Config, shapes: Shapes, params: qwen.Params) -> list[Sequence]:
    """Returns two samples of each of four prompts, in the order of the prompts."""
    mesh = one_device()
    model = shapes.model
    dtype = config.model.dtype
    engine = Engine(model, config.rollout, decode_mesh(mesh), (), dtype, config.model.attention)
    layout = weight_layout(model, config.model, engine.mesh)
    weights = publisher(model, mesh, engine.mesh, engine.dtype, layout=layout)(params)
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, shapes.max_prompt, 4).astype(int)
    prompts = [rng.integers(0, model.vocab_size, length).astype(np.int32) for length in lengths]
    seed = jax.device_put(jax.random.key(0), NamedSharding(engine.mesh, P()))
    scheduler = Scheduler(engine, weights, lambda ids: "")
    found = list(scheduler.run(make_groups(prompts, 2, shapes.max_new), 2, 1.0, seed))
    return sorted(found, key=lambda sequence: (sequence.prompt_id, sequence.sample_index))


def scores_of(config: Config, shapes: Shapes, sequences: list[Sequence]) -> list[np.ndarray]:
    """Returns the trainer's log-probs of every token of the sequences."""
    trainer = make_trainer(config, shapes.model, None, one_device())
    items = []
    for sequence in sequences:
        is_sampled = np.arange(len(sequence)) >= len(sequence.prompt_tokens)
        length = len(sequence.prompt_tokens)
        weights = is_sampled.astype(np.float32)
        items.append(TrainingSequence(sequence.tokens, length, weights))
    groups = [items[i : i + 2] for i in range(0, len(items), 2)]
    packed = pack(groups, trainer.layouts, trainer.rows, trainer.microbatches)
    batches, counts = trainer.policy.put(packed)
    params = reference.placed(trainer.policy, reference.random_params(shapes.model))
    scores = [np.zeros(len(sequence), np.float32) for sequence in sequences]
    by_layout = trainer.policy.score(params, batches, counts, trainer.layouts)
    for batch, rows in zip(packed, by_layout, strict=True):
        batch.from_rows(np.asarray(rows), scores)
    return scores


@on_devices_thorough
def test_sampled_log_probs_are_those_of_the_trainer(shapes: Shapes) -> None:
    """Decoding by pages, scoring by packed rows: both with kernels in bfloat16.

    The mean gap is compared with that of the definition in bfloat16, which rounds as often.
    """
    gaps = {}
    tested = [shapes.attention, shapes.fused] if shapes.fused else [shapes.attention]
    for name in (*tested, "xla"):
        config = settings(shapes, name, "bfloat16")
        trainer = make_trainer(config, shapes.model, None, one_device())
        params = reference.placed(trainer.policy, reference.random_params(shapes.model))
        sequences = sampled(config, shapes, params)
        assert all(sequence.num_new == shapes.max_new for sequence in sequences)

        scores = scores_of(config, shapes, sequences)

        pairs = zip(sequences, scores, strict=True)
        differences = [
            np.abs(row[len(sequence.prompt_tokens) :] - sequence.new_logps)
            for sequence, row in pairs
        ]
        gaps[name] = np.concatenate(differences)
    print("log-probs", {name: (gap.mean(), gap.max()) for name, gap in gaps.items()})
    for name in tested:
        assert 0 < gaps[name].mean() < 2 * gaps["xla"].mean() + 2e-3
        assert gaps[name].max() < 0.5


# -- the update ------------------------------------------------------------------------------------


def gradient(config: Config, shapes: Shapes) -> tuple[qwen.Params, float]:
    """Returns the gradient of one optimizer step on random rollouts, and the loss."""
    trainer = make_trainer(config, shapes.model, None, one_device())
    policy = trainer.policy
    policy.optimizer = optax.identity()
    rollouts = reference.random_rollouts(0, 4, GROUP_SIZE, shapes.max_prompt, shapes.max_new)
    [groups] = divide_groups(trainer.updates, trainer.credit.group_size, range(len(rollouts)), 1)
    minibatch = make_minibatch(trainer, rollouts, groups)
    score_and_credit(trainer, policy.abstract_state(), [minibatch], rollouts)
    state = policy.start(reference.placed(policy, reference.random_params(shapes.model)))
    state, stats = policy.update(state, minibatch.batches, minibatch.counts, trainer.layouts, FAR)
    found = jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params)
    return found, float(jax.device_get(stats["loss"]))


@on_devices_thorough
def test_the_update_is_the_definition(shapes: Shapes) -> None:
    found, found_loss = gradient(settings(shapes, shapes.attention, "bfloat16"), shapes)
    rounded, _ = gradient(settings(shapes, "xla", "bfloat16"), shapes)
    with jax.default_matmul_precision("highest"):
        exact, exact_loss = gradient(settings(shapes, "xla", "float32"), shapes)

    by_kernels, by_rounding = cosine(found, exact), cosine(rounded, exact)
    print("gradient", by_kernels, by_rounding, "loss", found_loss, exact_loss)
    assert 0.98 < by_kernels < 1
    assert by_kernels > by_rounding - 0.01  # as exact as the definition in bfloat16
    norms = [float(optax.tree.norm(tree)) for tree in (found, exact)]
    assert abs(norms[0] / norms[1] - 1) < 0.05
