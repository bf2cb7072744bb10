"""The layers of Qwen3.5: gated delta nets, and gated attention in every fourth layer.

Both kinds of layer have the same MLP or, in models such as Qwen3.5-35B-A3B, experts (MoE) and a
shared MLP that all tokens go to. The parameters of all layers are in one dict of stacks, of three
lengths: parameters that every layer has lead with an axis [L], attention parameters with [number of
attention layers], and `delta_*` with [number of gated delta nets].

    x, carry = forward(config, weights, x, forward_pass, carry, remat)

As in `layers.py`, a `ForwardPass` has the functions that mix tokens: `attend` is `layers.Attend`,
`recur` is `delta_net.Recur`. Their argument `layer` counts only layers of the same kind, so a KV
cache has room for `config.attention_layers` only, and the states are [len(config.delta_layers),
slots, ...]. For every sequence, a decoder keeps:

    keys and values of the attention layers     in the paged KV cache, as for any model
    delta_net.DeltaState of every delta layer   `recurrent` and `convolution`, both in fp32

With prefix sharing, every sequence also needs its own copy of the state after the prompt.

Norms multiply by 1 + weight, except for the norm after a gated delta net, which multiplies by its
weight. Sources: Qwen3-Next's model in transformers, Yang et al. 2024 (arXiv:2412.06464), and for
the gate after attention Qiu et al. 2025 (arXiv:2505.06708).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jzero.model.architecture import (
    ATTENTION,
    DELTA_NET,
    FP32_PARAMETERS,
    DeltaNetConfig,
    Params,
    QwenConfig,
)
from jzero.model.arithmetic import Arithmetic
from jzero.model.delta_net import DeltaInputs, in_fp32
from jzero.model.expert_arithmetic import ExpertMlps
from jzero.model.experts import (
    ExpertWeights,
    mix,
    mixer_carry,
    routing_of,
    with_mixer_carry,
)
from jzero.model.layers import (
    NORMAL,
    ONES,
    ZEROS,
    ForwardPass,
    Rotary,
    project,
    rotate,
    unrolls_layers,
    zero_centered_norm,
)

ATTENTION_NAMES = frozenset({"q", "k", "v", "o", "q_norm", "k_norm"})
DELTA_PREFIX = "delta_"
EXACT_NAMES = FP32_PARAMETERS | {"delta_norm"}  # fp32 in the hub's checkpoints
FASTEST_DECAY = 16.0  # A of a head of a new model, as in `transformers`
SLOWEST_DECAY = 0.01


# -- parameters ------------------------------------------------------------------------------------


def log_of_decay(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Draws log A with A from U(0.01, 16), so that heads forget at different speeds."""
    return jnp.log(jax.random.uniform(key, shape, dtype, SLOWEST_DECAY, FASTEST_DECAY))


def kernel_initializer(kernel_size: int) -> Initializer:
    """Returns torch's initializer of a depthwise convolution, U(-1/sqrt(W), 1/sqrt(W))."""
    bound = 1 / math.sqrt(kernel_size)

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return cast(Initializer, draw)  # it is always called by position


class HybridLayers(nnx.Module):
    """The stacked parameters of all layers. `forward` computes with them."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        sizes = sizes_of(config)
        heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
        channels, width = sizes.num_channels, sizes.kernel_size

        def stacked(
            layers: int,
            shape: tuple[int, ...],
            axes: tuple[str, ...],
            initializer: Initializer,
        ) -> nnx.Param[jax.Array]:
            value = initializer(rngs.params(), (layers, *shape), jnp.float32)
            return nnx.Param(value, axes=axes)

        # Parameters of every layer, then of the attention layers, then of the gated delta nets: the
        # three stacks have different lengths.
        every = partial(stacked, config.num_hidden_layers)
        self.attn_norm = every((E,), ("norm",), ZEROS)  # before the attention or the delta net
        self.mlp_norm = every((E,), ("norm",), ZEROS)
        if config.num_experts:
            X, F, shared = (
                config.num_experts,
                config.moe_intermediate_size,
                config.shared_expert_intermediate_size,
            )
            self.router = every((E, X), ("embed", "router"), NORMAL)
            self.experts_gate = every((X, E, F), ("experts", "embed", "expert_mlp"), NORMAL)
            self.experts_up = every((X, E, F), ("experts", "embed", "expert_mlp"), NORMAL)
            self.experts_down = every((X, F, E), ("experts", "expert_mlp", "embed"), NORMAL)
            self.shared_gate = every((E, shared), ("embed", "mlp"), NORMAL)
            self.shared_up = every((E, shared), ("embed", "mlp"), NORMAL)
            self.shared_down = every((shared, E), ("mlp", "embed"), NORMAL)
            self.shared_router = every((E, 1), ("embed", "router"), NORMAL)
        else:
            F = config.intermediate_size
            self.gate = every((E, F), ("embed", "mlp"), NORMAL)
            self.up = every((E, F), ("embed", "mlp"), NORMAL)
            self.down = every((F, E), ("mlp", "embed"), NORMAL)

        attention = partial(stacked, len(config.attention_layers))
        # The query and the gate of each head are adjacent: [query | gate].
        self.q = attention((E, H, 2 * D), ("embed", "heads", "head_dim"), NORMAL)
        self.k = attention((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.v = attention((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.o = attention((H, D, E), ("heads", "head_dim", "embed"), NORMAL)
        self.q_norm = attention((D,), ("norm",), ZEROS)
        self.k_norm = attention((D,), ("norm",), ZEROS)

        delta = partial(stacked, len(config.delta_layers))
        kernel_init = kernel_initializer(width)
        # The logical axis is "channels", not "heads": q, k and v have different numbers of heads,
        # so sharding the joined channels would split heads.
        self.delta_qkv = delta((E, channels), ("embed", "channels"), NORMAL)
        self.delta_z = delta((E, values), ("embed", "heads"), NORMAL)
        self.delta_b = delta((E, heads), ("embed", "heads"), NORMAL)
        self.delta_a = delta((E, heads), ("embed", "heads"), NORMAL)
        self.delta_out = delta((values, E), ("heads", "embed"), NORMAL)
        self.delta_kernel = delta((channels, 1, width), ("channels", "norm", "norm"), kernel_init)
        self.delta_decay = delta((heads,), ("norm",), cast(Initializer, log_of_decay))
        self.delta_step_bias = delta((heads,), ("norm",), ONES)
        self.delta_norm = delta((sizes.value_dim,), ("norm",), ONES)


def sizes_of(config: QwenConfig) -> DeltaNetConfig:
    """Returns the sizes of the gated delta nets."""
    assert config.delta_net is not None, f"{config.model_type} has no gated delta net"
    return config.delta_net


def layer_numbers(config: QwenConfig, name: str) -> tuple[int, ...]:
    """Returns the numbers of the layers that have the parameter `name`, in stack order."""
    if name in ATTENTION_NAMES:
        return config.attention_layers
    if name.startswith(DELTA_PREFIX):
        return config.delta_layers
    return tuple(range(config.num_hidden_layers))


# -- the forward pass ------------------------------------------------------------------------------


def forward(
    config: QwenConfig,
    weights: Params,
    x: Float[Array, "N E"],
    forward_pass: ForwardPass,
    carry: PyTree,
    remat: Callable[[Callable], Callable],
) -> tuple[Float[Array, "N E"], PyTree]:
    """Computes all layers: returns the hidden states and the final `carry`.

    The layers repeat in blocks, such as three gated delta nets and one attention layer. A scan runs
    over the blocks, and the layers of a block are unrolled.

    remat: an entry of `qwen.REMAT`, applied to every layer.
    """
    kinds = repeated_kinds(config)
    blocks = config.num_hidden_layers // len(kinds)

    def in_blocks(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(blocks, -1, *leaf.shape[1:])

    # One step of the scan computes one block. The kinds differ within a block but are the same in
    # all blocks, so the compiled code does not grow with the number of layers.
    def step(state: tuple, scanned: tuple) -> tuple[tuple, None]:
        x, carry = state
        block, block_weights = scanned
        for place, kind in enumerate(kinds):
            place_in_kind = kinds[:place].count(kind)
            index = block * kinds.count(kind) + place_in_kind  # among the layers of this kind
            number = block * len(kinds) + place  # among all layers
            layer = partial(one_layer, config, forward_pass, kind, place, place_in_kind)
            x, carry = remat(layer)(block_weights, x, index, number, carry)
        return (x, carry), None

    indices = jnp.arange(blocks, dtype=jnp.int32)
    stacked = jax.tree.map(in_blocks, weights)
    (x, carry), _ = jax.lax.scan(step, (x, carry), (indices, stacked), unroll=unrolls_layers())
    return x, carry


def repeated_kinds(config: QwenConfig) -> tuple[str, ...]:
    """Returns the shortest list of layer kinds whose repetition gives all layers."""
    kinds = config.layer_types or (ATTENTION,) * config.num_hidden_layers
    for period in range(1, len(kinds) + 1):
        if kinds == kinds[:period] * (len(kinds) // period):
            return kinds[:period]
    raise AssertionError(f"no period in {kinds=}")


def weights_of_layer(block_weights: Params, kind: str, place: int, place_in_kind: int) -> Params:
    """Returns the weights of one layer of a block: the shared ones and the ones of its mixer."""

    def take(leaf: jax.Array, index: int) -> jax.Array:
        return leaf[index]

    chosen = {}
    # A stack of the block has one entry per layer, or one per layer of its kind.
    for name, stack in block_weights.items():
        is_delta, is_attention = name.startswith(DELTA_PREFIX), name in ATTENTION_NAMES
        if not is_delta and not is_attention:
            chosen[name] = jax.tree.map(partial(take, index=place), stack)
        elif is_delta == (kind == DELTA_NET):
            chosen[name] = jax.tree.map(partial(take, index=place_in_kind), stack)
    return chosen


def one_layer(
    config: QwenConfig,
    forward_pass: ForwardPass,
    kind: str,
    place: int,
    place_in_kind: int,
    block_weights: Params,
    x: Float[Array, "N E"],
    index: jax.Array,
    number: jax.Array,
    carry: PyTree,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Computes a layer: attention or a gated delta net, then the MLP or the experts.

    place, place_in_kind: of the layer in its block, and among the block's layers of its kind.
    block_weights: the weights of all layers of the block. This function selects the layer's,
        because the backward pass keeps its arguments: selected before, weights would be kept twice.
    index: the number of the layer among the layers of its kind. number: among all layers.
    """
    weights = weights_of_layer(block_weights, kind, place, place_in_kind)
    mixer = add_delta_net if kind == DELTA_NET else add_attention
    x, mixer_part = mixer(config, forward_pass, weights, x, index, mixer_carry(carry))
    carry = with_mixer_carry(carry, mixer_part)
    if config.num_experts:
        return add_experts(config, forward_pass.arithmetic, weights, x, number, carry)
    return add_mlp(config, forward_pass.arithmetic, weights, x), carry


def add_attention(
    config: QwenConfig,
    forward_pass: ForwardPass,
    weights: Params,
    x: Float[Array, "N E"],
    layer: jax.Array,
    carry: PyTree,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Adds gated attention: every output of a head is multiplied by sigmoid(gate)."""
    rope, arithmetic = forward_pass.rope, forward_pass.arithmetic
    product = arithmetic.product
    B, T = rope.cos.shape[:2]
    N, D, eps = len(x), config.head_dim, config.rms_norm_eps
    h = zero_centered_norm(arithmetic, x, weights["attn_norm"], eps)

    queries_and_gates = project(product, h, weights["q"], 2 * D)  # [query | gate] in every head
    q, gate = jnp.split(queries_and_gates, 2, axis=-1)
    k = project(product, h, weights["k"], D)
    v = project(product, h, weights["v"], D).reshape(B, T, -1, D)
    q = zero_centered_norm(arithmetic, q, weights["q_norm"], eps)
    k = zero_centered_norm(arithmetic, k, weights["k_norm"], eps)
    q = rotate_part(q.reshape(B, T, -1, D), rope)
    k = rotate_part(k.reshape(B, T, -1, D), rope)

    # Norms and RoPE come before attention; the gate is applied to its output, before the projection
    # `o`.
    mixed, carry = forward_pass.attend(q, k, v, layer, carry)
    gated = mixed.reshape(N, -1) * jax.nn.sigmoid(gate.reshape(N, -1))
    return x + product(gated, weights["o"]), carry


def rotate_part(x: Float[Array, "B T heads D"], rope: Rotary) -> Float[Array, "B T heads D"]:
    """Rotates the leading dimensions of every head, as many as `rope` has angles for."""
    rotary_dim = 2 * rope.cos.shape[-1]
    rotated = rotate(x[..., :rotary_dim], rope)
    return jnp.concatenate([rotated, x[..., rotary_dim:]], axis=-1)


def add_delta_net(
    config: QwenConfig,
    forward_pass: ForwardPass,
    weights: Params,
    x: Float[Array, "N E"],
    layer: jax.Array,
    carry: PyTree,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Adds the output of a gated delta net. No RoPE: the recurrence itself is ordered."""
    arithmetic, product = forward_pass.arithmetic, forward_pass.arithmetic.product
    B, T = forward_pass.rope.cos.shape[:2]
    N = len(x)
    sizes = sizes_of(config)
    h = zero_centered_norm(arithmetic, x, weights["attn_norm"], config.rms_norm_eps)

    # The two gates of a head (delta_net.py): log_decay (g) is how fast its memory fades, strength
    # (beta) how far the stored value moves toward the token's value.
    step = in_fp32(product(h, weights["delta_a"])) + weights["delta_step_bias"]
    log_decay = -jnp.exp(weights["delta_decay"]) * jax.nn.softplus(step)
    strength = jax.nn.sigmoid(in_fp32(product(h, weights["delta_b"])))
    inputs = DeltaInputs(
        channels=product(h, weights["delta_qkv"]).reshape(B, T, -1),
        kernel=weights["delta_kernel"][:, 0],
        log_decay=log_decay.reshape(B, T, -1),
        strength=strength.reshape(B, T, -1),
        sizes=sizes,
    )
    assert forward_pass.recur is not None, "a hybrid needs `recur`"
    mixed, carry = forward_pass.recur(inputs, layer, carry)

    by_head = mixed.reshape(-1, sizes.value_dim)  # the norm is per head and token
    # This norm multiplies by its weight, not by 1 + weight like the other norms of a hybrid.
    normed = arithmetic.norm(by_head, weights["delta_norm"], config.rms_norm_eps)
    z = in_fp32(product(h, weights["delta_z"]))
    gated = in_fp32(normed).reshape(N, -1) * jax.nn.silu(z)
    return x + product(gated.astype(x.dtype), weights["delta_out"]), carry


def add_mlp(
    config: QwenConfig,
    arithmetic: Arithmetic,
    weights: Params,
    x: Float[Array, "N E"],
) -> Float[Array, "N E"]:
    """Adds the gated MLP (Shazeer 2020, SwiGLU) with its norm."""
    h = zero_centered_norm(arithmetic, x, weights["mlp_norm"], config.rms_norm_eps)
    gate = jax.nn.silu(arithmetic.product(h, weights["gate"]))
    up = arithmetic.product(h, weights["up"])
    return x + arithmetic.product(gate * up, weights["down"])


def add_experts(
    config: QwenConfig,
    arithmetic: Arithmetic,
    weights: Params,
    x: Float[Array, "N E"],
    number: jax.Array,
    carry: PyTree,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Adds every token's experts, and the shared MLP times sigmoid(shared router)."""
    h = zero_centered_norm(arithmetic, x, weights["mlp_norm"], config.rms_norm_eps)
    mlps = ExpertMlps(
        gate=weights["experts_gate"], up=weights["experts_up"], down=weights["experts_down"]
    )
    # The experts that the router chose, and the shared MLP that every token goes to.
    expert_weights = ExpertWeights(weights["router"], mlps)
    chosen, carry = mix(h, expert_weights, routing_of(config), number, carry, arithmetic)

    gate = jax.nn.silu(arithmetic.product(h, weights["shared_gate"]))
    up = arithmetic.product(h, weights["shared_up"])
    shared = arithmetic.product(gate * up, weights["shared_down"])
    share = jax.nn.sigmoid(arithmetic.single_output(h, weights["shared_router"]))
    return x + chosen + arithmetic.unfused(share * shared), carry
