"""The gated delta net of model.exact: it is the same function, and rows and slots have one result.

Programs are compiled as in runs, with all optimizations: these may change the order of sums.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jzero.model import delta_net, exact_delta_net
from jzero.model.architecture import DeltaNetConfig
from jzero.model.arithmetic import EXACT
from jzero.model.delta_net import DeltaInputs, DeltaState

SIZES = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, kernel_size=4)
ROWS, TOKENS, PROMPT = 3, 40, 20


def random_inputs() -> DeltaInputs:
    rng = np.random.default_rng(0)
    channels = rng.standard_normal((ROWS, TOKENS, SIZES.num_channels))
    kernel = 0.5 * rng.standard_normal((SIZES.num_channels, SIZES.kernel_size))
    log_decay = -rng.uniform(0, 2, (ROWS, TOKENS, SIZES.num_value_heads))
    strength = rng.uniform(0, 1, (ROWS, TOKENS, SIZES.num_value_heads))
    return DeltaInputs(*map(jnp.float32, (channels, kernel, log_decay, strength)), SIZES)


def part(inputs: DeltaInputs, rows: slice, tokens: slice) -> DeltaInputs:
    return inputs._replace(
        channels=inputs.channels[rows, tokens],
        log_decay=inputs.log_decay[rows, tokens],
        strength=inputs.strength[rows, tokens],
    )


INPUTS = random_inputs()
# Two sequences in a row, one and padding, and one alone.
SEGMENTS = jnp.array([[1] * 17 + [2] * 23, [1] * 30 + [0] * 10, [1] * 40])
STATE = DeltaState(
    jnp.float32(np.random.default_rng(1).standard_normal((ROWS, 4, 16, 24))),
    jnp.float32(np.random.default_rng(2).standard_normal((ROWS, 3, SIZES.num_channels))),
)


def test_it_is_the_definition() -> None:
    for state in (None, STATE):
        out, after = exact_delta_net.recur_rows(INPUTS, SEGMENTS, state)
        expected, expected_after = delta_net.recur_tokens(INPUTS, SEGMENTS, state)
        is_token = SEGMENTS > 0
        np.testing.assert_allclose(out[is_token], expected[is_token], atol=2e-6)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), after, expected_after
        )


def test_its_gradient_is_that_of_the_chunks() -> None:
    def gradient(recur: object) -> object:
        def loss(channels: jax.Array, state: DeltaState) -> jax.Array:
            assert callable(recur)
            out, _ = recur(INPUTS._replace(channels=channels), SEGMENTS, state)
            return jnp.where((SEGMENTS > 0)[..., None, None], jnp.sin(out), 0).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(INPUTS.channels, STATE)

    found = gradient(exact_delta_net.recur_rows)
    expected = gradient(delta_net.recur_chunks)

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def test_rows_and_slots_have_the_same_bits() -> None:
    """A prompt is prefilled alone and decoded in 8 slots; the whole sequence is one of 3 rows."""

    @jax.jit
    def of_rows(arrays: tuple, segments: jax.Array) -> tuple[jax.Array, DeltaState]:
        return exact_delta_net.recur_rows(DeltaInputs(*arrays, SIZES), segments)

    @jax.jit
    def of_slots(arrays: tuple, state: DeltaState) -> tuple[jax.Array, DeltaState]:
        inputs = DeltaInputs(*arrays, SIZES)
        return exact_delta_net.recur_slots(inputs, state, jnp.ones(8, bool))

    whole, _ = of_rows(INPUTS[:4], jnp.ones((ROWS, TOKENS), jnp.int32))
    first, prompt = slice(0, 1), slice(0, PROMPT)
    out, state = of_rows(part(INPUTS, first, prompt)[:4], jnp.ones((1, PROMPT), jnp.int32))
    np.testing.assert_array_equal(out[0], whole[0, :PROMPT])

    def for_slots(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (8, *x.shape[1:]))

    states = jax.tree.map(for_slots, state)
    for token in range(PROMPT, TOKENS):
        inputs = part(INPUTS, first, slice(token, token + 1))
        arrays = for_slots(inputs[0]), inputs[1], for_slots(inputs[2]), for_slots(inputs[3])
        out, states = of_slots(arrays, states)
        np.testing.assert_array_equal(out[0, 0], whole[0, token])


def test_a_draft_has_the_bits_of_its_tokens_one_by_one() -> None:
    """Its outputs, and the state after the first n tokens: of none in the first slot."""
    slots, width = 4, 3

    @jax.jit
    def of_draft(arrays: tuple, segments: jax.Array, state: DeltaState) -> object:
        return EXACT.recurrence.drafts(DeltaInputs(*arrays, SIZES), segments, state)

    @jax.jit
    def of_slots(arrays: tuple, state: DeltaState, active: jax.Array) -> object:
        return EXACT.recurrence.slots(DeltaInputs(*arrays, SIZES), state, active)

    def for_slots(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x[:1]])

    inputs = INPUTS._replace(
        channels=for_slots(INPUTS.channels[:, :width]),
        log_decay=for_slots(INPUTS.log_decay[:, :width]),
        strength=for_slots(INPUTS.strength[:, :width]),
    )
    states = jax.tree.map(for_slots, STATE)
    is_token = np.arange(width) < np.arange(slots)[:, None]

    out, after = of_draft(inputs[:4], jnp.int32(is_token), states)

    for token in range(width):
        arrays = part(inputs, slice(None), slice(token, token + 1))[:4]
        expected, states = of_slots(arrays, states, jnp.array(is_token[:, token]))
        rows = is_token[:, token]
        np.testing.assert_array_equal(out[rows, token], expected[rows, 0])
    jax.tree.map(np.testing.assert_array_equal, after, states)
