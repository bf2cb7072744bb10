"""Sampling against NumPy's sorts and sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jzero.decoder import sampling
from jzero.decoder.sampling import Filters, SlotFilters

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCABULARY = 300  # the third block of 128 tokens is mostly padding
ALLOW_ALL = Filters()

uniforms = jax.jit(sampling.uniforms, static_argnums=3)
restrict = jax.jit(sampling.restrict, static_argnums=1)
restrict_slots = jax.jit(sampling.restrict)


def parts_of(vocabulary: int, width: int) -> list[slice]:
    """Cuts a vocabulary into parts of `width` tokens; the last part may be shorter."""
    starts = range(0, vocabulary, width)
    return [slice(start, min(start + width, vocabulary)) for start in starts]


@functools.partial(jax.jit, static_argnums=(3, 4))
def sample(
    logits: jax.Array,
    noise: jax.Array,
    temperature: jax.Array,
    filters: Filters = ALLOW_ALL,
    width: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples from given logits, in parts of `width` tokens (None: in one part)."""
    vocabulary = logits.shape[1]

    def head(logits: jax.Array, part: slice) -> jax.Array:
        return logits[:, part]

    parts = parts_of(vocabulary, width or vocabulary)
    return sampling.sample(head, parts, logits, noise, temperature, filters)


@functools.partial(jax.jit, static_argnums=3)
def sample_kept(
    logits: jax.Array, noise: jax.Array, temperature: jax.Array, filters: Filters
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples from given logits, and returns the tokens that the filters kept as well."""

    def head(logits: jax.Array, part: slice) -> jax.Array:
        return logits[:, part]

    return sampling.sample_kept(head, slice(0, VOCABULARY), logits, noise, temperature, filters)


def random_logits(rows: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal((rows, VOCABULARY))
    return (scale * normal).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    return exp / exp.sum(-1, keepdims=True)


def count_of_each_token(
    logits: np.ndarray,
    temperature: float,
    filters: Filters = ALLOW_ALL,
    width: int = VOCABULARY,
    draws: int = 20_000,
) -> np.ndarray:
    """Draws from one distribution, each time for another request, and counts the tokens."""
    parts = len(parts_of(VOCABULARY, width))
    noise = uniforms(jax.random.key(1), jnp.arange(draws), jnp.full(draws, 5), parts)
    rows = jnp.broadcast_to(jnp.asarray(logits), (draws, VOCABULARY))
    tokens, _ = sample(rows, noise, jnp.full(draws, temperature), filters, width)
    return np.bincount(np.asarray(tokens), minlength=VOCABULARY)


def chi_square_p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns the p-value of `counts` under `expected`.

    The chi-square test needs at least five expected counts in every cell, so the rarer tokens are
    put together into one cell.
    """
    is_rare = expected < 5

    def fold(values: np.ndarray) -> np.ndarray:
        return np.append(values[~is_rare], values[is_rare].sum())

    return stats.chisquare(fold(counts), fold(expected)).pvalue


@pytest.mark.parametrize("width", [VOCABULARY, 128, 90])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_follow_the_softmax(temperature: float, width: int) -> None:
    logits = random_logits(1)[0]

    counts = count_of_each_token(logits, temperature, width=width)

    expected = softmax(logits / temperature) * counts.sum()
    assert counts.size == VOCABULARY
    assert chi_square_p_value(counts, expected) > 0.01


@pytest.mark.parametrize(
    ("filters", "width"),
    [
        (ALLOW_ALL, VOCABULARY),
        (ALLOW_ALL, 70),
        (ALLOW_ALL, 256),
        (Filters(top_k=5, top_p=0.9, min_p=0.1), VOCABULARY),
    ],
)
def test_logps_are_at_the_sampling_temperature_over_the_full_vocabulary(
    filters: Filters, width: int
) -> None:
    logits = random_logits(64)
    rows = np.arange(64)
    temperature = np.where(rows % 2, 0.7, 0.0).astype(np.float32)
    parts = len(parts_of(VOCABULARY, width))
    noise = uniforms(jax.random.key(0), jnp.arange(64), jnp.arange(64), parts)

    tokens, logps = sample(logits, noise, temperature, filters, width)

    temperature_of_logps = np.where(temperature == 0, 1, temperature)
    expected = np.log(softmax(logits / temperature_of_logps[:, None]))
    np.testing.assert_allclose(logps, expected[rows, tokens], atol=1e-5)
    # Even rows have temperature 0: they are greedy, whatever the noise.
    assert (np.asarray(tokens)[::2] == logits[::2].argmax(-1)).all()


@pytest.mark.parametrize("width", [VOCABULARY, 100])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_low_temperature_and_extreme_logits_stay_finite(scale: float, width: int) -> None:
    logits = random_logits(16, scale=scale)
    noise = jnp.full((16, len(parts_of(VOCABULARY, width))), 0.999)

    tokens, logps = sample(logits, noise, jnp.full(16, 1e-4), ALLOW_ALL, width)

    assert np.isfinite(logps).all()
    assert (np.asarray(logps) <= 0).all()
    if scale >= 1:
        assert (np.asarray(tokens) == logits.argmax(-1)).all()


def sorted_top_k(probs: np.ndarray, k: int) -> np.ndarray:
    """Returns the mask of the k largest probabilities; of all for k=0 or k > the vocabulary."""
    if not 0 < k < VOCABULARY:
        return np.ones(VOCABULARY, bool)
    return probs >= np.sort(probs)[-k]


def sorted_top_p(probs: np.ndarray, p: float) -> np.ndarray:
    """Returns the mask of the shortest run of the sorted tokens that holds p of the mass."""
    order = np.argsort(-probs, kind="stable")
    mass_before = np.cumsum(probs[order]) - probs[order]
    is_kept = np.zeros(VOCABULARY, bool)
    is_kept[order[mass_before < p * probs.sum()]] = True
    return is_kept


def sorted_filters(probs: np.ndarray, filters: Filters) -> np.ndarray:
    """Returns the mask of top-k, then of top-p of what is left, then of min-p."""
    is_kept = sorted_top_k(probs, filters.top_k)
    if filters.top_p < 1:
        is_kept &= sorted_top_p(np.where(is_kept, probs, 0), filters.top_p)
    return is_kept & (probs >= filters.min_p * probs.max())


@pytest.mark.parametrize(
    "filters",
    [
        ALLOW_ALL,
        Filters(top_k=1),
        Filters(top_k=7),
        Filters(top_k=VOCABULARY + 1),
        Filters(top_p=0.9),
        Filters(top_p=0.5),
        Filters(top_p=1e-6),
        Filters(min_p=0.05),
        Filters(min_p=1.0),
        Filters(top_k=20, top_p=0.8, min_p=0.02),
    ],
    ids=str,
)
def test_restrict_equals_sorting(filters: Filters) -> None:
    flat = random_logits(40, seed=0, scale=0.1)
    usual = random_logits(40, seed=1, scale=1.0)
    peaked = random_logits(40, seed=2, scale=4.0)
    logits = np.concatenate([flat, usual, peaked])
    probs = np.exp(logits - logits.max(-1, keepdims=True))

    restricted = np.asarray(restrict(probs, filters))

    is_kept = np.stack([sorted_filters(row.astype(np.float64), filters) for row in probs])
    np.testing.assert_array_equal(restricted, np.where(is_kept, probs, 0))


SLOT_FILTERS = [
    Filters(),
    Filters(top_k=1),
    Filters(top_k=7, min_p=0.02),
    Filters(top_p=0.9),
    Filters(top_p=0.5, min_p=0.001),
    Filters(top_k=VOCABULARY + 1, top_p=1e-6),
    Filters(min_p=0.05),
    Filters(top_k=20, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("filters", [SLOT_FILTERS, [Filters()] * len(SLOT_FILTERS)])
def test_filters_of_slots_equal_sorting_and_the_filters_of_a_program(filters) -> None:
    """One compiled function serves all values."""
    logits = np.random.default_rng(0).normal(0, 3, (len(filters), VOCABULARY)).astype(np.float32)
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    columns = zip(*filters, strict=True)
    dtypes = (np.int32, np.float32, np.float32)
    arrays = [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]

    restricted = np.asarray(restrict_slots(probs, SlotFilters(*arrays)))

    for row, item in enumerate(filters):
        one = probs[row : row + 1]
        is_kept = sorted_filters(probs[row].astype(np.float64), item)
        np.testing.assert_array_equal(restricted[row : row + 1], np.where(is_kept, one, 0))
        np.testing.assert_array_equal(restricted[row : row + 1], restrict(one, item))


@pytest.mark.parametrize(
    "filters",
    [Filters(top_k=20), Filters(top_k=VOCABULARY + 1, min_p=0.02), Filters(top_k=30, top_p=0.8)],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_the_tokens_that_were_kept_are_returned_and_hold_all_of_the_mass(
    filters: Filters, temperature: float
) -> None:
    logits = random_logits(50)
    noise = np.random.default_rng(3).random(50).astype(np.float32)
    temperatures = np.full(50, temperature, np.float32)

    tokens, logps, kept = sample_kept(logits, noise, temperatures, filters)

    same_tokens, _ = sample(logits, noise[:, None], temperatures, filters)
    np.testing.assert_array_equal(tokens, same_tokens)
    for row, token, logp, kept_row in zip(logits, tokens, logps, np.asarray(kept), strict=True):
        scaled = row.astype(np.float64) / (temperature or 1.0)
        probs = np.exp(scaled - scaled.max())
        is_kept = sorted_filters(probs, filters)
        assert sorted(kept_row[kept_row >= 0]) == np.flatnonzero(is_kept).tolist()
        assert is_kept[token]
        assert logp == pytest.approx(np.log(probs[token] / probs[is_kept].sum()), abs=1e-5)


def test_filtered_tokens_stay_inside_the_mask_and_keep_their_proportions() -> None:
    logits = random_logits(1)[0]
    filters = Filters(top_k=20, top_p=0.8)

    counts = count_of_each_token(logits, 1.0, filters)

    probs = softmax(logits)
    is_kept = sorted_filters(probs, filters)
    expected = probs[is_kept] / probs[is_kept].sum() * counts.sum()
    assert is_kept.sum() > 3
    assert counts[~is_kept].sum() == 0
    assert stats.chisquare(counts[is_kept], expected).pvalue > 0.01


@pytest.mark.parametrize("width", [1, 5, 128, 129, VOCABULARY])
def test_a_token_without_mass_is_never_drawn(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = np.arange(400)
    probs = np.where(rng.random((400, width)) < 0.9, 0, rng.random((400, width)))
    probs = probs.astype(np.float32)
    probs[rows, rng.integers(0, width, 400)] = 1.0
    # The first row has one token only, the last one, with the smallest of masses.
    probs[0] = 0
    probs[0, -1] = 1e-30
    logits = np.log(probs, where=probs > 0, out=np.full_like(probs, -np.inf))

    for uniform in (0.0, 0.5, 1 - 2**-24):
        noise = jnp.full((400, 1), uniform)
        tokens = np.asarray(sample(logits, noise, np.ones(400, np.float32))[0])

        assert (probs[rows, tokens] > 0).all()
        if uniform == 0.0:
            assert (tokens == (probs > 0).argmax(-1)).all()


def test_a_token_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = random_logits(200)
    noise = np.random.default_rng(3).random(200, np.float32)

    tokens = np.asarray(sample(logits, noise[:, None], np.ones(200, np.float32))[0])

    probs = np.exp(logits).astype(np.float64)
    cumulative = np.cumsum(probs, axis=-1) / probs.sum(-1, keepdims=True)
    expected = (cumulative > noise[:, None]).argmax(-1)
    # Sums in fp32 may differ from these where the noise falls on the edge of a token.
    is_clear = np.abs(cumulative - noise[:, None]).min(-1) > 1e-6
    np.testing.assert_array_equal(tokens[is_clear], expected[is_clear])
    assert is_clear.mean() > 0.98
    assert (np.abs(tokens - expected) <= 1).all()


def test_uniforms_depend_on_seed_request_and_position_only() -> None:
    requests = jnp.arange(6) // 2 + 7
    positions = jnp.arange(6) % 2 + 3
    key = jax.random.key(0)

    numbers = np.asarray(uniforms(key, requests, positions))[:, 0]

    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(set(numbers.tolist())) == 6
    order = np.array([4, 2, 5, 0, 3, 1, 0, 0])
    reordered = uniforms(key, requests[order], positions[order])[:, 0]
    np.testing.assert_array_equal(reordered, numbers[order])
    with_another_seed = np.asarray(uniforms(jax.random.key(1), requests, positions))[:, 0]
    assert not set(numbers.tolist()) & set(with_another_seed.tolist())
    with_swapped_arguments = np.asarray(uniforms(key, positions, requests))[:, 0]
    assert not set(numbers.tolist()) & set(with_swapped_arguments.tolist())


def test_many_draws_of_a_position_have_its_distribution() -> None:
    """Evenly spaced numbers draw each token as often as its probability says, to one draw."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (2, 3, 300)).astype(np.float32)
    temperature = np.array([[1.0, 0.5, 0.0], [2.0, 1.0, 0.7]], np.float32)
    count = 2000
    uniform = np.broadcast_to((np.arange(count, dtype=np.float32) + 0.5) / count, (2, 3, count))

    tokens = np.asarray(sampling.draw_many(*map(jnp.asarray, (logits, uniform, temperature))))

    for place in np.ndindex(2, 3):
        if temperature[place] == 0:
            assert set(tokens[place]) == {logits[place].argmax()}
            continue
        scaled = logits[place].astype(np.float64) / temperature[place]
        wanted = np.exp(scaled - scaled.max())
        wanted *= count / wanted.sum()
        found = np.bincount(tokens[place], minlength=300)
        assert np.abs(found - wanted).max() <= 1.01
