"""The gated delta net of `model.exact`: the bits of a token do not depend on the other tokens.

Training, prefill and decoding compute token by token (`delta_net.recur_tokens`), with the same
operations for every token: the order of sums is written out, and every product is rounded before it
is added. The backward pass differentiates the chunked form (`delta_net.recur_chunks`), which is
mathematically the same function.

    out, state = recur_rows(inputs, segments, state)      # like recur_chunks: training and prefill,
                                                          # and like recur_few: drafts
    out, state = recur_slots(inputs, state, active)       # like recur_step: decoding

Programs call both as `Arithmetic.recurrence`. See `delta_net.py` for the dimension letters.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jzero.attention.exact import sum_by_halves
from jzero.model.architecture import DeltaNetConfig
from jzero.model.delta_net import (
    NORM_EPS,
    DeltaInputs,
    DeltaState,
    Heads,
    Segments,
    empty_state,
    in_fp32,
    keep_inactive,
    last_inputs,
    read_segments,
    recur_chunks,
    split_heads,
    time_first,
)
from jzero.model.exact import rounded


def recur_rows(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    state: DeltaState | None = None,
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes packed rows token by token. Arguments and results are as in `recur_chunks`."""
    sizes = inputs.sizes
    arrays = inputs.channels, inputs.kernel, inputs.log_decay, inputs.strength
    return rows_from_arrays(sizes, arrays, segments, state)


Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # the array fields of DeltaInputs
RowsKept = tuple[Arrays, jax.Array, DeltaState | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_from_arrays(
    sizes: DeltaNetConfig,
    arrays: Arrays,
    segments: Int[Array, "B T"],
    state: DeltaState | None,
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes `recur_rows`."""
    inputs = DeltaInputs(*arrays, sizes)
    segment_info = read_segments(segments)
    if state is None:
        state = empty_state(sizes, len(segments))
    start, history = in_fp32(state.recurrent), in_fp32(state.convolution)
    convolved = convolve(windows_of_rows(inputs, segment_info, history), inputs.kernel)
    heads = split_heads(inputs, convolved, segment_info.valid, normalize)
    is_first = segment_info.places == 0

    def step(running: jax.Array, token: tuple[Heads, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_heads, begins = token
        # The first token of a segment must not see the state of the segment before it.
        running = jnp.where(begins[:, None, None, None], start, running)
        return advance(running, token_heads)

    by_token = jax.tree.map(time_first, (heads, is_first))
    recurrent, out = lax.scan(step, start, by_token)
    return time_first(out), DeltaState(recurrent, last_inputs(inputs, segment_info, history))


def rows_forward(
    sizes: DeltaNetConfig,
    arrays: Arrays,
    segments: Int[Array, "B T"],
    state: DeltaState | None,
) -> tuple[tuple[Float[Array, "B T H V"], DeltaState], RowsKept]:
    return rows_from_arrays(sizes, arrays, segments, state), (arrays, segments, state)


def rows_backward(
    sizes: DeltaNetConfig,
    kept: RowsKept,
    gradient: tuple[jax.Array, DeltaState],
) -> tuple[Arrays, None, DeltaState | None]:
    arrays, segments, state = kept

    def in_chunks(
        arrays: Arrays,
        state: DeltaState | None,
    ) -> tuple[Float[Array, "B T H V"], DeltaState]:
        return recur_chunks(DeltaInputs(*arrays, sizes), segments, state)

    _, backward = jax.vjp(in_chunks, arrays, state)
    array_gradients, state_gradient = backward(gradient)
    return array_gradients, None, state_gradient


rows_from_arrays.defvjp(rows_forward, rows_backward)


def recur_slots(
    inputs: DeltaInputs,
    state: DeltaState,
    active: Bool[Array, " B"],
) -> tuple[Float[Array, "B 1 H V"], DeltaState]:
    """Computes one token of every slot. Arguments and results are as in `recur_step`."""
    window = jnp.concatenate([in_fp32(state.convolution), in_fp32(inputs.channels)], axis=1)
    convolved = convolve(window[:, None], inputs.kernel)
    heads = split_heads(inputs, convolved, jnp.ones(convolved.shape[:2], bool), normalize)
    token_heads = jax.tree.map(lambda x: x[:, 0], heads)
    recurrent, out = advance(state.recurrent, token_heads)
    return out[:, None], keep_inactive(state, DeltaState(recurrent, window[:, 1:]), active)


# -- shared by rows and slots ----------------------------------------------------------------------


def windows_of_rows(
    inputs: DeltaInputs,
    segments: Segments,
    history: Float[Array, "B W-1 C"],
) -> Float[Array, "B T W C"]:
    """Returns the inputs of the convolution that every token sees, oldest first."""
    channels = in_fp32(inputs.channels)
    T, W = channels.shape[1], inputs.kernel.shape[1]
    joined = jnp.concatenate([history, channels], axis=1)
    # The window of a token near the start of its segment reaches into `history`, which occupies the
    # first W - 1 columns of `joined`.
    distances = jnp.arange(W - 1, -1, -1)
    places = segments.places[..., None] - distances  # [B, T, W]
    in_segment = jnp.arange(T)[:, None] - distances + (W - 1)
    indices = jnp.where(places >= 0, in_segment, W - 1 + places)
    B, C = len(channels), channels.shape[2]
    windows = jnp.take_along_axis(joined, indices.reshape(B, T * W)[..., None], axis=1)
    return windows.reshape(B, T, W, C)


def convolve(
    windows: Float[Array, "B T W C"],
    kernel: Float[Array, "C W"],
) -> Float[Array, "B T C"]:
    """Computes the convolution of every channel, and SiLU."""
    products = rounded(jnp.swapaxes(windows, 2, 3) * in_fp32(kernel))  # [B, T, C, W]
    return rounded(jax.nn.silu(sum_by_halves(products)))


def normalize(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Divides vectors by their lengths."""
    total = sum_by_halves(rounded(x * x))
    return x * lax.rsqrt(total + NORM_EPS)[..., None]


def advance(
    state: Float[Array, "B H K V"],
    token: Heads,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Computes one token: returns the next state and the output (Yang et al. 2024, eq. 10)."""

    def times_state(x: Float[Array, "B H K"], state: jax.Array) -> Float[Array, "B H V"]:
        return sum_by_halves(jnp.swapaxes(rounded(state * x[..., None]), 2, 3))

    q, k, v, log_decay, strength = token
    # The same equations as `delta_net.advance`, with every product rounded before it is added.
    left = rounded(jnp.exp(log_decay)[..., None, None] * state)
    change = strength[..., None] * (v - times_state(k, left))
    state = left + rounded(k[..., None] * change[..., None, :])
    return state, times_state(q, state)
