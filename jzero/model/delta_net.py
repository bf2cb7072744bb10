"""The gated delta net (Yang et al. 2024, arXiv:2412.06464): linear attention with a state.

Three of four layers of Qwen3.5 mix the tokens of a sequence with a gated delta net. Every value
head has a matrix S [key_dim, value_dim] as its memory. At every token the memory decays, and the
value that it stores under the token's key moves toward the token's value:

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    out = S^T q

The queries, keys and values come from one causal convolution over the last few inputs. To continue
a sequence, every such layer needs two arrays: `DeltaState`.

    out, state = recur_tokens(inputs, segments, state)    # the definition: token by token
    out, state = recur_chunks(inputs, segments, state)    # the same in chunks: training and prefill
    out, state = recur_step(inputs, state, active)        # one token of every slot: decoding
    out, state = recur_few(inputs, segments, state)       # a few tokens of every slot: drafts

`hybrid.py` has the layer around these functions, and calls one of them through a function that its
caller passes in (`Recur`). All computations are in fp32 or wider, for any type of activations.

Dimension letters: B rows   T tokens of a row   C channels of the convolution   W its width
H value heads   G key heads   K key_dim   V value_dim
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jzero.model.architecture import DeltaNetConfig
from jzero.types import RowLayout

# A power of two, as `inverse_of_unit_lower` requires; also the chunk of `transformers`.
CHUNK = 64  # tokens that `recur_chunks` computes at once
# The epsilon of `transformers`.
NORM_EPS = 1e-6  # in the normalization of q and k

# A TPU would multiply in bf16 by default; the state would lose information that the model has
# learned to keep.
FP32_PRECISION = lax.Precision.HIGHEST


class DeltaState(NamedTuple):
    """The state from which one gated delta net, or several with an axis [L], continues a sequence.

    A sequence without tokens has a state of zeros. The state does not grow with the sequence. Every
    token overwrites it, so a caller that returns to an earlier token has to keep a copy.
    """

    recurrent: Float[Array, "B H K V"]  # fp32 always
    convolution: Float[Array, "B W-1 C"]  # the last inputs of the convolution, oldest first


class DeltaInputs(NamedTuple):
    """The inputs that a layer computes from every token for its gated delta net."""

    channels: Float[Array, "B T C"]  # q | k | v of all heads, before the convolution
    kernel: Float[Array, "C W"]  # the last column multiplies the token itself
    log_decay: Float[Array, "B T H"]  # g, at most 0; fp32
    strength: Float[Array, "B T H"]  # beta, between 0 and 1; fp32
    sizes: DeltaNetConfig


@runtime_checkable  # so that tests check annotations
class Recur(Protocol):
    """Interface of a gated delta net: takes the inputs of all tokens, returns one vector per head.

    Shapes: inputs [B, T, ...], layer i32[], output [B, T, H, V]. `layer` counts only the layers
    with a gated delta net. `carry` is the same tree as in attention (`layers.Attend`).
    """

    def __call__(
        self,
        inputs: DeltaInputs,
        layer: jax.Array,
        carry: PyTree,
        /,
    ) -> tuple[jax.Array, PyTree]: ...


def empty_state(sizes: DeltaNetConfig, *leading: int) -> DeltaState:
    """Returns the fp32 state of sequences without tokens. `leading`: the axes [B], or [L, B]."""
    recurrent = (*leading, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    convolution = (*leading, sizes.kernel_size - 1, sizes.num_channels)
    return DeltaState(jnp.zeros(recurrent, jnp.float32), jnp.zeros(convolution, jnp.float32))


# -- segments --------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The sequences of packed rows. Padding belongs to the sequence before it, and is not valid."""

    ids: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    places: Int[Array, "B T"]  # position of every token in its segment, from 0
    lengths: Int[Array, " B"]  # valid tokens of a row


def read_segments(segments: Int[Array, "B T"]) -> Segments:
    """Returns the boundaries of the sequences in packed rows.

    segments: 1, 2, 3, ... for the tokens of the first, second, third sequence of a row, and 0 for
        padding, which is at the end of the row.
    """
    valid = segments > 0
    # Segments ascend and padding is 0, so the running maximum gives padding the number of the
    # sequence before it.
    ids = lax.cummax(segments, axis=1)
    # No segment has the number -1: the first column starts one.
    previous_ids = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    columns = jnp.arange(segments.shape[1])
    # The first column of a segment, carried on to all of its tokens.
    starts = lax.cummax(jnp.where(ids != previous_ids, columns, 0), axis=1)
    return Segments(ids, valid, columns - starts, valid.sum(axis=1))


# -- the convolution -------------------------------------------------------------------------------


def convolve(
    inputs: DeltaInputs,
    segments: Segments,
    history: Float[Array, "B W-1 C"] | None,
) -> Float[Array, "B T C"]:
    """Computes the causal convolution of every channel with its kernel, and SiLU.

    A token sees only tokens of its segment. Every segment continues after the inputs `history`.
    """
    channels, kernel = in_fp32(inputs.channels), in_fp32(inputs.kernel)
    T, W = channels.shape[1], kernel.shape[1]
    # taps[d] multiplies the input d tokens before the current one.
    taps = [kernel[:, W - 1 - distance] for distance in range(W)]

    out = channels * taps[0]
    # With fewer tokens than the kernel is wide, the earliest taps see nothing.
    for distance in range(1, min(W, T)):
        earlier = jnp.pad(channels[:, :-distance], ((0, 0), (distance, 0), (0, 0)))
        is_seen = segments.places >= distance
        out = out + jnp.where(is_seen[..., None], earlier, 0) * taps[distance]

    if history is not None:
        history = in_fp32(history)
        # The kernel of the first W - 1 tokens of a segment reaches inputs before the segment.
        for place in range(W - 1):
            from_history = jnp.zeros_like(history[:, 0])
            for distance in range(place + 1, W):
                column = W - 1 + place - distance
                from_history = from_history + history[:, column] * taps[distance]
            is_there = segments.places == place
            out = out + jnp.where(is_there[..., None], from_history[:, None], 0)
    return jax.nn.silu(out)


def last_inputs(
    inputs: DeltaInputs,
    segments: Segments,
    history: Float[Array, "B W-1 C"] | None,
) -> Float[Array, "B W-1 C"]:
    """Returns the W - 1 inputs of the convolution that the next token after the valid ones sees."""
    channels = in_fp32(inputs.channels)
    B, _, C = channels.shape
    W = inputs.kernel.shape[1]
    if history is None:
        history = jnp.zeros((B, W - 1, C), channels.dtype)

    # The columns of the row that the next token sees, and the column where its segment starts.
    lengths = segments.lengths[:, None]
    columns = lengths + jnp.arange(1 - W, 0)  # [B, W-1]
    last = jnp.maximum(segments.lengths - 1, 0)[:, None]
    last_place = jnp.take_along_axis(segments.places, last, axis=1)
    start = jnp.where(lengths > 0, last - last_place, 0)

    # In the array [inputs before the segment | inputs of the row], an input of the row is W - 1
    # columns further to the right. Columns left of the segment's start are inputs before it.
    joined = jnp.concatenate([in_fp32(history), channels], axis=1)
    place = columns - start
    indices = jnp.where(place >= 0, W - 1 + columns, W - 1 + place)
    return jnp.take_along_axis(joined, indices[..., None], axis=1)


# -- heads -----------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The convolved channels as heads, and the two gates, in fp32. Padding keeps the state."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_decay: Float[Array, "B T H"]
    strength: Float[Array, "B T H"]


def split_heads(
    inputs: DeltaInputs,
    convolved: Float[Array, "B T C"],
    valid: Bool[Array, "B T"],
    normalize: Callable[[jax.Array], jax.Array],
) -> Heads:
    """Splits channels into q, k and v, normalizes q and k, and repeats them for the value heads."""
    sizes = inputs.sizes
    B, T, _ = convolved.shape
    width = sizes.num_key_heads * sizes.key_dim
    q = convolved[..., :width].reshape(B, T, -1, sizes.key_dim)
    k = convolved[..., width : 2 * width].reshape(B, T, -1, sizes.key_dim)
    v = convolved[..., 2 * width :].reshape(B, T, -1, sizes.value_dim)

    # The scale of attention, applied to unit vectors.
    q = normalize(q) * sizes.key_dim**-0.5
    k = normalize(k)
    values_per_key = sizes.num_value_heads // sizes.num_key_heads
    is_valid = valid[..., None]  # [B, T, 1]
    return Heads(
        q=jnp.repeat(q, values_per_key, axis=2),
        k=jnp.repeat(k, values_per_key, axis=2),
        v=v,
        # With both gates at 0, padding neither decays the state nor writes to it.
        log_decay=jnp.where(is_valid, in_fp32(inputs.log_decay), 0),
        strength=jnp.where(is_valid, in_fp32(inputs.strength), 0),
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
    """Computes one token: returns the next state and the output (Yang et al. 2024, eq. 10)."""
    state = jnp.exp(log_decay)[..., None, None] * state
    held = jnp.einsum("bhkv,bhk->bhv", state, k, precision=FP32_PRECISION)
    change = strength[..., None] * (v - held)
    state = state + k[..., None] * change[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=FP32_PRECISION)


def recur_tokens(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    state: DeltaState | None = None,
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes packed rows token by token. This function defines the gated delta net.

    segments: see `read_segments`. A row may consist of padding only.
    state: the state from which every segment of a row starts, [B, ...]; None: zeros.
    Returns the outputs, and the state after the last valid token of every row, which is `state` in
    a row without valid tokens. The outputs of padding are finite but have no meaning.
    """
    segment_info = read_segments(segments)
    heads, start, convolution = prepare(inputs, segment_info, state)
    is_first = segment_info.places == 0

    def step(running: jax.Array, token: tuple[Heads, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token_heads, begins = token
        # The first token of a segment must not see the state of the segment before it.
        running = jnp.where(begins[:, None, None, None], start, running)
        return advance(running, *token_heads)

    by_token = jax.tree.map(time_first, (heads, is_first))
    recurrent, out = lax.scan(step, start, by_token)
    return time_first(out), DeltaState(recurrent, convolution)


def recur_step(
    inputs: DeltaInputs,
    state: DeltaState,
    active: Bool[Array, " B"],
) -> tuple[Float[Array, "B 1 H V"], DeltaState]:
    """Computes one token of every slot. Inactive slots keep their state."""
    # The window has exactly the W inputs that the kernel covers, so the convolution is one product.
    window = jnp.concatenate([in_fp32(state.convolution), in_fp32(inputs.channels)], axis=1)
    kernel = in_fp32(inputs.kernel)
    convolved = jax.nn.silu(jnp.sum(window * kernel.T, axis=1, keepdims=True))
    heads = split_heads(inputs, convolved, jnp.ones(convolved.shape[:2], bool), normalize)
    recurrent, out = advance(state.recurrent, *(x[:, 0] for x in heads))
    return out[:, None], keep_inactive(state, DeltaState(recurrent, window[:, 1:]), active)


def keep_inactive(
    previous: DeltaState,
    updated: DeltaState,
    active: Bool[Array, " B"],
) -> DeltaState:
    """Returns the `updated` states of active slots, and the `previous` states of the others."""
    convolution = updated.convolution.astype(previous.convolution.dtype)
    return DeltaState(
        recurrent=jnp.where(active[:, None, None, None], updated.recurrent, previous.recurrent),
        convolution=jnp.where(active[:, None, None], convolution, previous.convolution),
    )


def prepare(
    inputs: DeltaInputs,
    segments: Segments,
    state: DeltaState | None,
) -> tuple[Heads, Float[Array, "B H K V"], Float[Array, "B W-1 C"]]:
    """Returns the heads, the recurrent state before every segment, and the last inputs."""
    history = None if state is None else state.convolution
    convolved = convolve(inputs, segments, history)
    heads = split_heads(inputs, convolved, segments.valid, normalize)
    convolution = last_inputs(inputs, segments, history)
    if state is not None:
        return heads, in_fp32(state.recurrent), convolution
    B, _, H, K = heads.k.shape
    V = heads.v.shape[-1]
    return heads, jnp.zeros((B, H, K, V), heads.v.dtype), convolution


def time_first(x: jax.Array) -> jax.Array:
    """Swaps the axes of rows and tokens."""
    return jnp.swapaxes(x, 0, 1)


# -- in chunks -------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Tokens that are computed together. In `recur_chunks` the arrays lead with [chunks].

    N tokens of a row, a power of two: CHUNK, or fewer in `recur_few`.
    """

    heads: Heads
    ids: Int[Array, "B N"]
    places: Int[Array, "B N"]


def recur_chunks(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    state: DeltaState | None = None,
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes `recur_tokens` with matrix products, a chunk of tokens at a time.

    This is the parallel form of Yang et al. 2024 (arXiv:2412.06464, section 3.3), for chunks in
    which segments begin and end anywhere. The backward pass recomputes each chunk and keeps only
    the states between the chunks.
    """
    segment_info = read_segments(segments)
    heads, start, convolution = prepare(inputs, segment_info, state)
    B, T = segments.shape
    missing = -T % CHUNK

    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [chunks, B, CHUNK, ...]
        return time_first(x.reshape(B, -1, CHUNK, *x.shape[2:]))

    def extend(x: jax.Array) -> jax.Array:  # tokens that change no state: all gates are 0
        padding = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
        return split(jnp.pad(x, padding))

    # Like padding, the added tokens belong to the row's last segment.
    ids = split(jnp.pad(segment_info.ids, ((0, 0), (0, missing)), mode="edge"))
    last_places = segment_info.places[:, -1:] + jnp.arange(1, missing + 1)
    places = split(jnp.concatenate([segment_info.places, last_places], axis=1))
    chunks = Chunk(jax.tree.map(extend, heads), ids, places)

    # Without a state every segment starts from zeros, and `advance_chunk` skips products with it.
    given_start = None if state is None else start

    def step(carry: tuple, chunk: Chunk) -> tuple[tuple, jax.Array]:
        running, previous = carry
        running, out = advance_chunk(running, previous, chunk, given_start)
        return (running, chunk.ids[:, -1]), out

    # No id is -1, so the first segment of a row does not continue from `begin`.
    no_segment = jnp.full(B, -1, segments.dtype)
    begin = (jnp.zeros_like(start), no_segment)
    # prevent_cse=False: the scan already keeps XLA from merging the recomputation with the forward
    # pass.
    recomputed = jax.checkpoint(step, prevent_cse=False)
    (recurrent, _), out = lax.scan(recomputed, begin, chunks)
    out = time_first(out).reshape(B, T + missing, *out.shape[3:])[:, :T]
    return out, DeltaState(recurrent, convolution)


def recur_few(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    state: DeltaState,
) -> tuple[Float[Array, "B T H V"], DeltaState]:
    """Computes a few tokens of one sequence in every row, all in one chunk.

    Reads and writes the states, most of the bytes of a decode step, once for all tokens.

    segments: 1 for tokens, 0 for the padding after them. A row may consist of padding only.
    state: before the tokens. Returns the outputs, and the states after the tokens.
    """
    segment_info = read_segments(segments)
    heads, start, convolution = prepare(inputs, segment_info, state)
    B, T = segments.shape
    size = 1 << (T - 1).bit_length()  # `inverse_of_unit_lower` requires a power of two

    def extend(x: jax.Array) -> jax.Array:  # tokens that change no state: all gates are 0
        return jnp.pad(x, [(0, 0), (0, size - T)] + [(0, 0)] * (x.ndim - 2))

    # All tokens of a row belong to the sequence of its state.
    ids = jnp.zeros((B, size), segments.dtype)
    places = jnp.broadcast_to(jnp.arange(size), ids.shape)
    chunk = Chunk(jax.tree.map(extend, heads), ids, places)
    recurrent, out = advance_chunk(start, ids[:, 0], chunk, None)
    return out[:, :T], DeltaState(recurrent, convolution)


def advance_chunk(
    running: Float[Array, "B H K V"],
    previous: Int[Array, " B"],
    chunk: Chunk,
    start: Float[Array, "B H K V"] | None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B N H V"]]:
    """Computes one chunk: returns the next state and the outputs.

    running, previous: the state before the chunk, and the segment that it belongs to.
    start: the state from which every segment that begins in the chunk starts; None: zeros.
    """
    q, k, v, log_decay, strength = (jnp.swapaxes(x, 1, 2) for x in chunk.heads)  # [B, H, N, .]
    ids, columns = chunk.ids, jnp.arange(chunk.ids.shape[1])
    total = jnp.cumsum(log_decay, axis=-1)  # [B, H, N] log decay of the chunk up to a token

    # decay[i, j]: the share of token j's update that is left when token i reads the state.
    is_before = columns[:, None] >= columns
    in_one_segment = ids[:, :, None] == ids[:, None]
    is_seen = (in_one_segment & is_before)[:, None]  # [B, 1, i, j]
    # Every exponent is a sum of log decays, so it is at most 0. Masked exponents are set to 0
    # before exp, because the gradient through an infinite value would be NaN.
    difference = jnp.where(is_seen, total[..., :, None] - total[..., None, :], 0)
    decay = jnp.where(is_seen, jnp.exp(difference), 0)  # [B, H, i, j]

    # The shares of two states that are left at every token: of the state before the chunk, for
    # segments that continue from it, and of `start`, for segments that begin in the chunk.
    continues = (ids == previous[:, None])[:, None]
    kept = jnp.where(continues, jnp.exp(total), 0)
    first = jnp.maximum(columns - chunk.places, 0)[:, None]  # [B, 1, N]
    before_first = jnp.take_along_axis(total - log_decay, first, axis=-1)
    since_first = jnp.where(continues, 0, total - before_first)
    kept_start = jnp.where(continues, 0, jnp.exp(since_first))

    def read(x: jax.Array) -> jax.Array:  # x^T S for queries or keys [B, H, N, K]
        from_running = multiply(x * kept[..., None], running)
        if start is None:
            return from_running
        return from_running + multiply(x * kept_start[..., None], start)

    # The changes of all tokens depend on each other: (I + A) changes = beta (v - S^T k), where S is
    # the decayed state from before the chunk or the segment.
    weighted = k * strength[..., None]
    overlap = multiply(weighted, jnp.swapaxes(k, -1, -2)) * decay
    overlap = jnp.where(columns[:, None] > columns, overlap, 0)
    # The rest of each value after the states from before the chunk are read.
    targets = v * strength[..., None] - read(weighted)
    changes = multiply(inverse_of_unit_lower(overlap), targets)

    # The output has a part from the state before the chunk, and a part from updates within the
    # chunk.
    scores = multiply(q, jnp.swapaxes(k, -1, -2)) * decay
    out = read(q) + multiply(scores, changes)

    # decay[i = last] is the share of every update that is left at the end of the chunk.
    written = k * decay[:, :, -1, :, None]
    added = multiply(jnp.swapaxes(written, -1, -2), changes)
    next_state = kept[:, :, -1, None, None] * running + added
    if start is not None:
        next_state = next_state + kept_start[:, :, -1, None, None] * start
    return next_state, jnp.swapaxes(out, 1, 2)


def inverse_of_unit_lower(A: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Returns (I + A)^-1 of strictly lower triangular A, whose size is a power of two.

    Inverses of diagonal blocks are combined into inverses of blocks of twice the size:
    [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]].
    """
    # From blocks of size 1, which are the ones of the diagonal.
    *batch, n, _ = A.shape
    # A series in powers of A would take fewer products, but the powers reach 1e18 where a text
    # repeats itself, and fp32 would lose all digits.
    inverse = jnp.ones((*batch, n, 1, 1), A.dtype)  # [..., blocks, size, size]
    size = 1
    while size < n:
        pairs = n // (2 * size)
        blocks = A.reshape(*batch, pairs, 2 * size, pairs, 2 * size)
        lower = jnp.einsum("...iaib->...iab", blocks)[..., size:, :size]
        upper_left, lower_right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -multiply(multiply(lower_right, lower), upper_left)
        top = jnp.concatenate([upper_left, jnp.zeros_like(corner)], axis=-1)
        bottom = jnp.concatenate([corner, lower_right], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def multiply(first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiplies matrices in the last two axes, in fp32 on every platform."""
    return jnp.matmul(first, second, precision=FP32_PRECISION)


# -- packed rows -----------------------------------------------------------------------------------


def recur_packed(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    layout: RowLayout,
    recur: Callable[..., tuple[jax.Array, DeltaState]] = recur_chunks,
) -> Float[Array, "B T H V"]:
    """Computes packed rows of training.

    Every sequence in a slot continues from the state after the row's prefix, as
    `attention.xla.packed` lets the sequence attend to the prefix.

    recur: `recur_chunks`, or a function with the same results.
    """
    prefix, num_slots, slot_tokens = layout
    B = len(segments)

    def to_slots(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * slots, slot, ...]
        return x[:, prefix:].reshape(B * num_slots, slot_tokens, *x.shape[2:])

    def map_tokens(take: Callable[[jax.Array], jax.Array]) -> DeltaInputs:
        return inputs._replace(
            channels=take(inputs.channels),
            log_decay=take(inputs.log_decay),
            strength=take(inputs.strength),
        )

    def for_slots(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_slots, axis=0)

    def to_prefix(x: jax.Array) -> jax.Array:
        return x[:, :prefix]

    state = None
    head: list[jax.Array] = []
    if prefix:
        # The prefix is computed once per row; all slots of the row continue from its final state.
        out, prefix_state = recur(map_tokens(to_prefix), to_prefix(segments))
        head, state = [out], jax.tree.map(for_slots, prefix_state)
    body, _ = recur(map_tokens(to_slots), to_slots(segments), state)
    slot_outputs = body.reshape(B, num_slots * slot_tokens, *body.shape[2:])
    return jnp.concatenate([*head, slot_outputs], axis=1)
