"""The gated delta net: its definition against a loop in NumPy, and every other form against it."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.model import delta_net
from jzero.model.architecture import DeltaNetConfig
from jzero.model.delta_net import DeltaInputs, DeltaState
from jzero.types import RowLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, kernel_size=4)


def random_inputs(seed: int, rows: int, tokens: int, dtype: type = np.float32) -> DeltaInputs:
    random = np.random.default_rng(seed)
    heads = (rows, tokens, SIZES.num_value_heads)
    return DeltaInputs(
        channels=jnp.asarray(random.normal(size=(rows, tokens, SIZES.num_channels)), dtype),
        kernel=jnp.asarray(random.uniform(-0.5, 0.5, (SIZES.num_channels, 4)), dtype),
        log_decay=jnp.asarray(-random.exponential(0.3, heads), dtype),
        strength=jnp.asarray(random.uniform(0, 1, heads), dtype),
        sizes=SIZES,
    )


def arrays_of(inputs: DeltaInputs) -> dict[str, jax.Array]:
    return {name: getattr(inputs, name) for name in inputs._fields if name != "sizes"}


@cache
def compiled(recur: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `recur` as one program: called as it is, it compiles each operation by itself."""

    @jax.jit
    def run_on_arrays(arrays: dict[str, jax.Array], *rest: Any) -> Any:
        return recur(DeltaInputs(**arrays, sizes=SIZES), *rest)

    def run(inputs: DeltaInputs, *rest: Any) -> Any:
        return run_on_arrays(arrays_of(inputs), *rest)

    return run


def random_state(seed: int, rows: int, dtype: type = np.float32) -> DeltaState:
    random = np.random.default_rng(seed)
    shapes = delta_net.empty_state(SIZES, rows)
    return DeltaState(*(jnp.asarray(random.normal(size=x.shape), dtype) for x in shapes))


class Slow(NamedTuple):
    outputs: np.ndarray  # [T, H, V]
    recurrent: np.ndarray
    convolution: np.ndarray


def slow_sequence(inputs: DeltaInputs, row: int, first: int, last: int, state: DeltaState) -> Slow:
    """Computes tokens first..last of a row by the formulas, one after the other, in fp64."""
    channels = np.asarray(inputs.channels, np.float64)[row, first:last]
    kernel = np.asarray(inputs.kernel, np.float64)
    decay = np.exp(np.asarray(inputs.log_decay, np.float64)[row, first:last])
    strength = np.asarray(inputs.strength, np.float64)[row, first:last]
    memory = np.array(state.recurrent[row], np.float64)
    window = list(np.asarray(state.convolution[row], np.float64))
    outputs = []
    for t in range(last - first):
        window = [*window, channels[t]]
        mixed = sum(kernel[:, tap] * window[tap] for tap in range(4))
        mixed = mixed / (1 + np.exp(-mixed))
        window = window[1:]
        q, k, v = np.split(mixed, [16, 32])
        output = np.zeros((4, 6))
        for head in range(4):
            q_head = q.reshape(2, 8)[head // 2]
            k_head = k.reshape(2, 8)[head // 2]
            q_head = q_head / np.sqrt(np.sum(q_head**2) + 1e-6) / np.sqrt(8)
            k_head = k_head / np.sqrt(np.sum(k_head**2) + 1e-6)
            S = decay[t, head] * memory[head]
            change = strength[t, head] * (v.reshape(4, 6)[head] - S.T @ k_head)
            memory[head] = S + np.outer(k_head, change)
            output[head] = memory[head].T @ q_head
        outputs.append(output)
    return Slow(np.array(outputs), memory, np.array(window))


def close(actual: jax.Array, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def packed(lengths: list[int], tokens: int) -> np.ndarray:
    """Returns the segments of one row that holds sequences of these lengths."""
    ids = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return np.array(ids + [0] * (tokens - len(ids)))


FORMS = [
    pytest.param(delta_net.recur_tokens, id="tokens"),
    pytest.param(delta_net.recur_chunks, id="chunks"),
]
ROWS = [[5, 1, 2, 9], [20], [], [3, 14]]  # lengths of the sequences; padding behind them


@pytest.mark.parametrize("recur", FORMS)
@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "goes_on"])
def test_every_sequence_of_a_row_is_the_formula_alone(recur, goes_on):
    inputs = random_inputs(0, len(ROWS), 20)
    state = random_state(1, len(ROWS)) if goes_on else delta_net.empty_state(SIZES, len(ROWS))
    segments = jnp.asarray(np.stack([packed(lengths, 20) for lengths in ROWS]))

    outputs, after = compiled(recur)(inputs, segments, state if goes_on else None)

    for row, lengths in enumerate(ROWS):
        first, last_state = 0, (state.recurrent[row], state.convolution[row])
        for length in lengths:
            slow = slow_sequence(inputs, row, first, first + length, state)
            close(outputs[row, first : first + length], slow.outputs)
            first, last_state = first + length, (slow.recurrent, slow.convolution)
        close(after.recurrent[row], last_state[0])
        close(after.convolution[row], last_state[1])
    assert np.isfinite(np.asarray(outputs)).all()


def test_steps_of_decoding_go_on_where_a_prompt_ended():
    inputs = random_inputs(2, 3, 12)
    lengths = np.array([7, 1, 4])
    segments = jnp.asarray(np.arange(12) < lengths[:, None], jnp.int32)
    recur_tokens, recur_step = compiled(delta_net.recur_tokens), compiled(delta_net.recur_step)
    whole, _ = recur_tokens(inputs, jnp.ones((3, 12), jnp.int32))
    _, state = recur_tokens(inputs, segments)

    for step in range(5):
        columns = lengths + step
        one = inputs._replace(
            channels=inputs.channels[np.arange(3), columns][:, None],
            log_decay=inputs.log_decay[np.arange(3), columns][:, None],
            strength=inputs.strength[np.arange(3), columns][:, None],
        )
        out, state = recur_step(one, state, jnp.ones(3, bool))
        close(out[:, 0], np.asarray(whole)[np.arange(3), columns])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 17])
def test_a_few_tokens_are_those_of_the_formula(tokens):
    """Of a draft, and the state after any of its tokens; a row without tokens keeps its state."""
    rows = tokens + 1
    inputs, state = random_inputs(3, rows, tokens), random_state(4, rows)
    segments = jnp.asarray(np.arange(tokens) < np.arange(rows)[:, None], jnp.int32)

    outputs, after = compiled(delta_net.recur_few)(inputs, segments, state)

    np.testing.assert_array_equal(after.recurrent[0], state.recurrent[0])
    np.testing.assert_array_equal(after.convolution[0], state.convolution[0])
    for length in range(1, rows):
        slow = slow_sequence(inputs, length, 0, length, state)
        close(outputs[length, :length], slow.outputs)
        close(after.recurrent[length], slow.recurrent)
        close(after.convolution[length], slow.convolution)
    assert np.isfinite(np.asarray(outputs)).all()


def test_a_step_leaves_the_state_of_idle_slots_alone():
    inputs, state = random_inputs(3, 2, 1), random_state(4, 2)

    _, after = compiled(delta_net.recur_step)(inputs, state, jnp.array([False, True]))

    for old, new in zip(state, after, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[0], np.asarray(old)[0])
        assert (np.asarray(new)[1] != np.asarray(old)[1]).any()


# Sequences that begin and end anywhere in chunks of 64, and exactly between two of them.
LONG_ROWS = [[64, 1, 63, 10], [3, 130], [100, 30, 20], []]
LONG = 150


@pytest.mark.parametrize("goes_on", [False, True], ids=["new", "goes_on"])
def test_chunks_are_the_definition_forward_and_backward(goes_on):
    rows = len(LONG_ROWS)
    with jax.enable_x64(True):
        inputs = random_inputs(5, rows, LONG, np.float64)
        state = random_state(6, rows, np.float64) if goes_on else None
        segments = jnp.asarray(np.stack([packed(lengths, LONG) for lengths in LONG_ROWS]))
        random = np.random.default_rng(7)
        weights = jnp.asarray(random.normal(size=(rows, LONG, 4, 6)))
        weights = weights * (segments > 0)[..., None, None]
        state_weights = random_state(8, rows, np.float64)

        def loss(recur, arrays, state):
            given = inputs._replace(**arrays)
            out, after = recur(given, segments, state)
            of_state = sum(jnp.sum(x * w) for x, w in zip(after, state_weights, strict=True))
            return jnp.sum(out * weights) + of_state, (out, after)

        arrays = arrays_of(inputs)
        argnums = (0, 1) if goes_on else 0
        results = []
        for recur in (delta_net.recur_tokens, delta_net.recur_chunks):
            gradient_of = jax.value_and_grad(partial(loss, recur), argnums, has_aux=True)
            (_, (out, after)), gradient = jax.jit(gradient_of)(arrays, state)
            results.append(jax.tree.map(np.asarray, (out * (weights != 0), after, gradient)))
    expected, actual = results
    jax.tree.map(near, actual, expected)


def near(actual: np.ndarray, expected: np.ndarray) -> None:
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=1e-12)


def test_a_sequence_does_not_see_its_neighbors_in_a_chunk():
    segments = jnp.asarray(packed([20, 30, 14], 64))[None]
    inputs = random_inputs(9, 1, 64)
    other = random_inputs(10, 1, 64)
    is_second = (segments == 2)[..., None]
    mixed = inputs._replace(
        channels=jnp.where(is_second, inputs.channels, other.channels),
        log_decay=jnp.where(is_second, inputs.log_decay, other.log_decay),
        strength=jnp.where(is_second, inputs.strength, other.strength),
    )

    def second(inputs: DeltaInputs) -> jax.Array:
        out, _ = delta_net.recur_chunks(inputs, segments)
        return jnp.where(is_second[..., None], out, 0)

    def loss(channels: jax.Array) -> jax.Array:
        return jnp.sum(second(inputs._replace(channels=channels)) ** 2)

    outputs = compiled(second)
    np.testing.assert_allclose(outputs(inputs), outputs(mixed), rtol=0, atol=1e-6)
    gradient = np.asarray(jax.jit(jax.grad(loss))(inputs.channels))
    assert (gradient[~np.asarray(segments == 2)] == 0).all()
    assert (gradient[np.asarray(segments == 2)] != 0).any()


def test_a_text_that_repeats_itself_is_computed_in_fp32():
    # All keys are alike and nothing fades: powers of the matrix of their products reach 1e18.
    inputs = random_inputs(11, 1, 128)
    same = inputs._replace(
        channels=jnp.broadcast_to(inputs.channels[:, :1], inputs.channels.shape),
        log_decay=jnp.zeros_like(inputs.log_decay),
        strength=jnp.full_like(inputs.strength, 0.98),
    )
    segments = jnp.ones((1, 128), jnp.int32)

    expected, _ = compiled(delta_net.recur_tokens)(same, segments)
    actual, _ = compiled(delta_net.recur_chunks)(same, segments)

    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_strong_decay_gives_finite_gradients():
    inputs = random_inputs(12, 1, 70)
    segments = jnp.asarray(packed([33, 30], 70))[None]

    def loss(log_decay: jax.Array) -> jax.Array:
        out, _ = delta_net.recur_chunks(inputs._replace(log_decay=log_decay), segments)
        return jnp.sum(out**2)

    gradient = jax.jit(jax.grad(loss))(inputs.log_decay * 300)

    assert np.isfinite(np.asarray(gradient)).all()


def test_responses_go_on_after_the_prefix_of_their_row():
    layout = RowLayout(prefix=10, slots=2, slot=12)
    prompt, responses = 7, [[5, 6], [12]]
    slots = [packed(lengths, 12) for lengths in responses]
    row = np.concatenate([packed([prompt], 10), *slots])
    inputs = random_inputs(13, 1, len(row))

    recur = compiled(partial(delta_net.recur_packed, layout=layout))
    out = recur(inputs, jnp.asarray(row)[None])

    for slot, lengths in enumerate(responses):
        first = 10 + 12 * slot
        for length in lengths:
            columns = np.r_[0:prompt, first : first + length]
            alone = inputs._replace(
                channels=inputs.channels[:, columns],
                log_decay=inputs.log_decay[:, columns],
                strength=inputs.strength[:, columns],
            )
            expected = slow_sequence(alone, 0, 0, len(columns), delta_net.empty_state(SIZES, 1))
            close(out[0, first : first + length], expected.outputs[prompt:])
            first += length
