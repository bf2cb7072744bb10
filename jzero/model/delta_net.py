"""The gated delta net (Yang et al. 2024, arXiv:2412.06464): linear attention with a state.

Three of four layers of Qwen3.5 mix the tokens of a sequence with it. A value head has a matrix S
[key_dim, value_dim] as its memory. At every token the memory fades, and what it holds under the
token's key moves toward the token's value:

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    out = S^T q

The queries, keys and values come from one causal convolution over the last few inputs, so a
sequence that goes on needs two arrays in every such layer: `DeltaState`.

    out, state = recur_tokens(inputs, segments, state)    # the definition: token by token
    out, state = recur_chunks(inputs, segments, state)    # the same in chunks: training and prefill
    out, state = recur_step(inputs, state, active)        # one token of every slot: decoding

`hybrid.py` has the layer around these functions, and calls one of them through a function that the
caller brings along (`Recur`). Everything here is computed in fp32 at least, whatever the type of
the activations.

Dimension letters: B rows   T tokens of a row   C channels of the convolution   W its width
H value heads   G key heads   K key_dim   V value_dim
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jzero.model.architecture import DeltaNetConfig

CHUNK = 64  # tokens that `recur_chunks` computes at once
NORM_EPS = 1e-6  # of the lengths of q and k

# A TPU would multiply in bf16 by default; the state would lose what the model has learned to keep.
EXACT = lax.Precision.HIGHEST


class DeltaState(NamedTuple):
    """What a sequence that goes on needs of one gated delta net, or of several with an axis [L].

    A sequence without tokens has zeros. The state does not grow with the sequence, and it is
    overwritten by every token: whoever wants to go back to an earlier token keeps a copy.
    """

    recurrent: Float[Array, "B H K V"]  # fp32 always
    convolution: Float[Array, "B W-1 C"]  # the last inputs of the convolution, oldest first


class DeltaInputs(NamedTuple):
    """What a layer computes of every token for its gated delta net."""

    channels: Float[Array, "B T C"]  # q | k | v of all heads, before the convolution
    kernel: Float[Array, "C W"]  # of the convolution; the last column multiplies the token itself
    log_decay: Float[Array, "B T H"]  # g, at most 0; fp32
    strength: Float[Array, "B T H"]  # beta, between 0 and 1; fp32
    sizes: DeltaNetConfig


@runtime_checkable  # so that tests check annotations
class Recur(Protocol):
    """A gated delta net from the outside: inputs of all tokens in, one vector a value head out.

    Shapes: inputs [B, T, ...], layer i32[], output [B, T, H, V]. `layer` counts the gated delta
    nets alone. `carry` is the same tree as that of attention (`layers.Attend`).
    """

    def __call__(
        self, inputs: DeltaInputs, layer: jax.Array, carry: PyTree, /
    ) -> tuple[jax.Array, PyTree]: ...


def empty_state(sizes: DeltaNetConfig, *leading: int) -> DeltaState:
    """Returns the state of sequences without tokens, fp32. `leading`: the axes [B], or [L, B]."""
    recurrent = (*leading, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    convolution = (*leading, sizes.kernel_size - 1, sizes.num_channels)
    return DeltaState(jnp.zeros(recurrent, jnp.float32), jnp.zeros(convolution, jnp.float32))


# -- segments --------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The sequences of packed rows. Padding belongs to the sequence before it, and is not valid."""

    ids: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    places: Int[Array, "B T"]  # of the tokens in their own segments, from 0 on
    lengths: Int[Array, " B"]  # valid tokens of a row


def read_segments(segments: Int[Array, "B T"]) -> Segments:
    """Returns where the sequences of packed rows begin.

    segments: 1, 2, 3, ... for the tokens of the first, second, third sequence of a row, and 0 for
        padding, which stands at the end of the row.
    """
    valid = segments > 0
    ids = lax.cummax(segments, axis=1)
    before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    columns = jnp.arange(segments.shape[1])
    starts = lax.cummax(jnp.where(ids != before, columns, 0), axis=1)
    return Segments(ids, valid, columns - starts, valid.sum(axis=1))


# -- the convolution -------------------------------------------------------------------------------


def convolve(
    inputs: DeltaInputs, segments: Segments, before: Float[Array, "B W-1 C"] | None
) -> Float[Array, "B T C"]:
    """Computes the causal convolution of every channel with its own kernel, and SiLU.

    No token sees one of another segment. Every segment goes on after the inputs `before`.
    """
    channels, kernel = in_fp32(inputs.channels), in_fp32(inputs.kernel)
    T, W = channels.shape[1], kernel.shape[1]
    taps = [kernel[:, W - 1 - distance] for distance in range(W)]

    out = channels * taps[0]
    for distance in range(1, min(W, T)):
        earlier = jnp.pad(channels[:, :-distance], ((0, 0), (distance, 0), (0, 0)))
        is_seen = segments.places >= distance
        out = out + jnp.where(is_seen[..., None], earlier, 0) * taps[distance]

    if before is not None:
        before = in_fp32(before)
        for place in range(W - 1):  # the first tokens of a segment still see inputs before it
            seen = range(place + 1, W)  # distances
            of_before = sum(before[:, W - 1 + place - far] * taps[far] for far in seen)
            is_there = segments.places == place
            out = out + jnp.where(is_there[..., None], of_before[:, None], 0)
    return jax.nn.silu(out)


def last_inputs(
    inputs: DeltaInputs, segments: Segments, before: Float[Array, "B W-1 C"] | None
) -> Float[Array, "B W-1 C"]:
    """Returns the inputs of the convolution that the token after the last valid one sees."""
    channels = in_fp32(inputs.channels)
    B, T, C = channels.shape
    W = inputs.kernel.shape[1]
    if before is None:
        before = jnp.zeros((B, W - 1, C), channels.dtype)
    columns = segments.lengths[:, None] + jnp.arange(1 - W, 0)  # [B, W-1]
    last = jnp.maximum(segments.lengths - 1, 0)[:, None]
    last_place = jnp.take_along_axis(segments.places, last, axis=1)
    start = jnp.where(segments.lengths[:, None] > 0, last - last_place, 0)

    # In the array [inputs before the segment | inputs of the row], an input of the row stands
    # W - 1 columns further to the right.
    joined = jnp.concatenate([in_fp32(before), channels], axis=1)
    place = columns - start
    indices = jnp.where(place >= 0, W - 1 + columns, W - 1 + place)
    return jnp.take_along_axis(joined, indices[..., None], axis=1)


# -- heads -----------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The convolved channels as heads, and the two gates, in fp32. Padding changes no state."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H"]
    strength: Float[Array, "B T H"]


def split_heads(
    inputs: DeltaInputs, convolved: Float[Array, "B T C"], valid: Bool[Array, "B T"]
) -> Heads:
    """Splits channels into q, k and v, normalizes q and k, and repeats them for the value heads."""
    sizes = inputs.sizes
    B, T, _ = convolved.shape
    width = sizes.num_key_heads * sizes.key_dim
    q = normalize(convolved[..., :width].reshape(B, T, -1, sizes.key_dim)) * sizes.key_dim**-0.5
    k = normalize(convolved[..., width : 2 * width].reshape(B, T, -1, sizes.key_dim))
    v = convolved[..., 2 * width :].reshape(B, T, -1, sizes.value_dim)
    served = sizes.num_value_heads // sizes.num_key_heads
    return Heads(
        q=jnp.repeat(q, served, axis=2),
        k=jnp.repeat(k, served, axis=2),
        v=v,
        log_decay=jnp.where(valid[..., None], in_fp32(inputs.log_decay), 0),
        strength=jnp.where(valid[..., None], in_fp32(inputs.strength), 0),
    )


def normalize(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Divides vectors by their lengths."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def in_fp32(x: jax.Array) -> jax.Array:
    """Converts an array to fp32, unless it is wider, as in tests."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# -- token by token --------------------------------------------------------------------------------


def advance(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H"],
    strength: Float[Array, "B H"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Computes one token: the state after it, and its output (Yang et al. 2024, eq. 10)."""
    state = jnp.exp(log_decay)[..., None, None] * state
    held = jnp.einsum("bhkv,bhk->bhv", state, k, precision=EXACT)
    change = strength[..., None] * (v - held)
    state = state + k[..., None] * change[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=EXACT)


def recur_tokens(
    inputs: DeltaInputs, segments: Int[Array, "B T"], state: DeltaState | None = None
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes packed rows token by token. This is the definition of the gated delta net.

    segments: as `read_segments` takes them. A row may be padding alone.
    state: the state after which every segment of a row begins, [B, ...]; None: that of no tokens.
    Returns the outputs, and the state after the last valid token of every row. In rows without
    valid tokens that is `state`. Outputs of padding are finite, and mean nothing.
    """
    found = read_segments(segments)
    heads, start, convolution = prepare(inputs, found, state)
    is_first = found.places == 0

    def step(running: jax.Array, token: tuple[Heads, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_token, begins = token
        running = jnp.where(begins[:, None, None, None], start, running)
        return advance(running, *of_token)

    by_token = jax.tree.map(time_first, (heads, is_first))
    recurrent, out = lax.scan(step, start, by_token)
    return time_first(out), DeltaState(recurrent, convolution)


def recur_step(
    inputs: DeltaInputs, state: DeltaState, active: Bool[Array, " B"]
) -> tuple[Float[Array, "B 1 H V"], DeltaState]:
    """Computes one token of every slot. The state of a slot that is not active stays as it is."""
    window = jnp.concatenate([in_fp32(state.convolution), in_fp32(inputs.channels)], axis=1)
    kernel = in_fp32(inputs.kernel)
    convolved = jax.nn.silu(jnp.sum(window * kernel.T, axis=1, keepdims=True))
    heads = split_heads(inputs, convolved, jnp.ones(convolved.shape[:2], bool))
    recurrent, out = advance(state.recurrent, *(x[:, 0] for x in heads))
    return out[:, None], DeltaState(
        recurrent=jnp.where(active[:, None, None, None], recurrent, state.recurrent),
        convolution=jnp.where(
            active[:, None, None], window[:, 1:].astype(state.convolution.dtype), state.convolution
        ),
    )


def prepare(
    inputs: DeltaInputs, segments: Segments, state: DeltaState | None
) -> tuple[Heads, Float[Array, "B H K V"], Float[Array, "B W-1 C"]]:
    """Returns the heads, the recurrent state before every segment, and the last inputs."""
    before = None if state is None else state.convolution
    heads = split_heads(inputs, convolve(inputs, segments, before), segments.valid)
    convolution = last_inputs(inputs, segments, before)
    if state is not None:
        return heads, in_fp32(state.recurrent), convolution
    B, _, H, K = heads.k.shape
    return heads, jnp.zeros((B, H, K, heads.v.shape[-1]), heads.v.dtype), convolution


def time_first(x: jax.Array) -> jax.Array:
    """Swaps the axes of rows and of tokens."""
    return jnp.swapaxes(x, 0, 1)
