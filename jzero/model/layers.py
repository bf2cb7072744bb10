"""A dense decoder layer: a Flax NNX module with its parameters and its computation.

`families.py` uses the class `DenseLayer` in the entries of Qwen, Llama and Mistral. A layer
receives its attention as a function, so the same layer serves packed training rows, the prefill of
prompts and paged decoding. See `architecture.py` for the dimension letters.
"""

from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int, PyTree

from jzero.attention.backend import Window
from jzero.model.architecture import QwenConfig
from jzero.model.arithmetic import Arithmetic
from jzero.model.delta_net import Recur
from jzero.model.linear import LinearWeight, Product, plus_bias, products

NORMAL = initializers.normal(0.02)  # the standard deviation of Hugging Face's initializer
ONES = initializers.ones
ZEROS = initializers.zeros


@runtime_checkable  # so that tests check annotations
class Attend(Protocol):
    """The interface of attention: takes queries, keys and values, returns mixed values.

    Shapes: q [B, T, H, D], k and v [B, T, K, D], layer i32[], output [B, T, H, D]. q and k are
    already rotated, unless `Rotary.is_left_to_attention`; q is not scaled. `carry` is any tree of
    arrays that attention reads and changes, such as the paged KV cache.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        carry: PyTree,
        /,
    ) -> tuple[jax.Array, PyTree]: ...


class Rotary(NamedTuple):
    """Cosines and sines of the rotary position embedding, for every position of a batch."""

    cos: Float[Array, "B T 1 half"]
    sin: Float[Array, "B T 1 half"]
    is_left_to_attention: bool = False  # layers pass unrotated q and k to `attend`
    by_product: bool = False  # see `rotate_by_product`


def rotary(config: QwenConfig, positions: Int[Array, "B T"]) -> Rotary:
    """Computes the angles of RoPE (Su et al. 2021, eq. 34) for every position, in fp32.

    `config.rope_scaling` changes the frequencies; YaRN also changes the amplitude of cos and sin.
    """
    # Without scaling, JAX computes the frequencies; scaled ones come from NumPy, in the order of
    # operations of `transformers`.
    scaling = config.rope_scaling
    if scaling is None:
        half = config.rotary_dim // 2
        exponents = -jnp.arange(half, dtype=jnp.float32) / half
        frequencies = config.rope_theta**exponents
    else:
        frequencies = jnp.asarray(scaling.frequencies(config.rope_theta, config.rotary_dim))
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    if scaling is None:
        return Rotary(jnp.cos(angles), jnp.sin(angles))
    return Rotary(scaling.amplitude * jnp.cos(angles), scaling.amplitude * jnp.sin(angles))


def local_rotary(config: QwenConfig, positions: Int[Array, "B T"]) -> Rotary | None:
    """Computes the angles of layers with a sliding window, or None if they have none of their own.

    Their frequencies have another base, and in published models no scaling: a window is never
    longer than the context of pretraining.
    """
    if not config.local_rope_theta:
        return None
    local = replace(
        config, rope_theta=config.local_rope_theta, rope_scaling=config.local_rope_scaling
    )
    return rotary(local, positions)


def window_of_layer(config: QwenConfig, layer: Int[Array, ""]) -> Int[Array, ""] | None:
    """Returns the window of a layer in tokens, or None for a model without sliding windows."""
    return jnp.asarray(config.window_sizes)[layer] if config.sliding_window else None


def window_in_rows(
    config: QwenConfig,
    layer: Int[Array, ""],
    positions: Int[Array, "B T"],
) -> Window | None:
    """Returns the window of a layer for rows of tokens with these positions."""
    size = window_of_layer(config, layer)
    return None if size is None else Window(size, positions)


def rotate(x: Float[Array, "B T heads D"], rope: Rotary) -> Float[Array, "B T heads D"]:
    """Rotates the heads of q or k by their positions, in fp32.

    Element i of the first half of D is paired with element i of the second half, because Hugging
    Face's weights have this order. The RoPE paper pairs neighboring elements. With
    `rope.is_left_to_attention`, x is returned unchanged, because attention will rotate it.
    """
    if rope.is_left_to_attention:
        return x
    if rope.by_product:
        return rotate_by_product(x, rope)
    # x has pairs (first[i], second[i]); each pair is rotated by its angle.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_first = first * rope.cos - second * rope.sin
    rotated_second = second * rope.cos + first * rope.sin
    return jnp.concatenate([rotated_first, rotated_second], axis=-1).astype(x.dtype)


def rotate_by_product(x: Float[Array, "B T heads D"], rope: Rotary) -> Float[Array, "B T heads D"]:
    """Computes `rotate`, with the other element of each pair from a product with a matrix.

    On a TPU, half a head does not fill the lanes of a register, so splitting heads into halves and
    joining them takes several passes over the array. The matrix has one entry in each column, 1 or
    -1, so the product is exact. lab/log.md, 2026-11-23, has the measured speed-up.
    """
    D = x.shape[-1]
    # turn[i, i + D / 2] = 1 moves each element to the position of its partner.
    turn = np.roll(np.eye(D, dtype=np.float32), D // 2, axis=1)
    turn[D // 2 :] *= -1  # element i of the first half is paired with minus element i + D / 2
    partner = jnp.einsum(
        "bthd,de->bthe",
        x,
        jnp.asarray(turn, x.dtype),
        precision=jax.lax.Precision.HIGHEST,  # for fp32 inputs; the gradient of x is fp32, too
        preferred_element_type=jnp.float32,
    )
    cos = jnp.concatenate([rope.cos, rope.cos], axis=-1)
    sin = jnp.concatenate([rope.sin, rope.sin], axis=-1)
    return (x.astype(jnp.float32) * cos + partner * sin).astype(x.dtype)


class ForwardPass(NamedTuple):
    """What all layers of one forward pass have in common."""

    rope: Rotary
    attend: Attend
    recur: Recur | None  # None in a model without gated delta nets
    arithmetic: Arithmetic
    local_rope: Rotary | None = None  # of layers with a sliding window


def project(
    product: Product,
    x: Float[Array, "N E"],
    weight: LinearWeight,
    head_dim: int,
) -> Float[Array, "N heads D"]:
    """Multiplies x by a weight [E, heads, D] or [E, heads * D] and splits the result into heads.

    The product is one plain matrix product. A product that is batched over heads is slow on CPU,
    and on TPU the decoder would change the memory layout of all weights for it: the barrier in
    `in_heads` keeps XLA from merging the reshape into the product.
    """
    return in_heads(product(x, weight), head_dim)


def in_heads(x: Float[Array, "N outputs"], head_dim: int) -> Float[Array, "N heads D"]:
    """Splits the result of a product into heads. See `project`."""
    x = jax.lax.optimization_barrier(x)
    return x.reshape(-1, x.shape[1] // head_dim, head_dim)


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer,
) -> nnx.Param[jax.Array]:
    """Returns an fp32 parameter, drawn with the next key of `rngs`.

    `axes` are the logical names of its axes; `sharding.mesh.RULES` maps them to mesh axes.
    """
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32), axes=axes)


def plain_norm(
    arithmetic: Arithmetic,
    x: Float[Array, "*batch width"],
    weight: Float[Array, " width"],
    eps: float,
) -> Float[Array, "*batch width"]:
    """Divides x by its root mean square over the last axis and multiplies by the weight."""
    return arithmetic.norm(x, weight, eps)


def zero_centered_norm(
    arithmetic: Arithmetic,
    x: Float[Array, "*batch width"],
    weight: Float[Array, " width"],
    eps: float,
) -> Float[Array, "*batch width"]:
    """Divides x by its root mean square over the last axis and multiplies by 1 + weight."""
    return arithmetic.norm(x, 1 + weight.astype(jnp.float32), eps)


class DenseLayer(nnx.Module):
    """A decoder layer: attention and a gated MLP (Shazeer 2020, SwiGLU), each after an RMSNorm.

    The order of the parameters matters: parameter i draws its initial values with key i of the
    layer. `qwen.forward` calls the layer with a slice of the stacked parameters, in the dtype of
    the activations. The layer computes with the functions of `ForwardPass.arithmetic`, and reads
    weights with `get_value`, because a weight may be another type than an array: see `linear.py`.
    """

    # Groups of weights that the layer passes to `products`, so that the decoder can fuse them
    # (fused QKV). The bias of a weight q is called q_bias, and is added with `plus_bias`.
    SIDE_BY_SIDE: ClassVar[tuple[tuple[str, ...], ...]] = (("q", "k", "v"), ("gate", "up"))

    def __init__(
        self,
        config: QwenConfig,
        rngs: nnx.Rngs,
        *,
        attention_bias: bool,
        query_key_norm: bool,
    ) -> None:
        """attention_bias: q, k and v have biases. query_key_norm: heads of q and k are normed."""
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = D
        self.norm_eps = config.rms_norm_eps
        self.attention_bias = attention_bias
        self.query_key_norm = query_key_norm

        self.attn_norm = parameter(rngs, (E,), ("norm",), ONES)
        # Grouped-query attention: K key-value heads serve H query heads.
        self.q = parameter(rngs, (E, H, D), ("embed", "heads", "head_dim"), NORMAL)
        self.k = parameter(rngs, (E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.v = parameter(rngs, (E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL)
        self.o = parameter(rngs, (H, D, E), ("heads", "head_dim", "embed"), NORMAL)
        self.mlp_norm = parameter(rngs, (E,), ("norm",), ONES)
        self.make_mlp(config, rngs)
        if attention_bias:
            self.q_bias = parameter(rngs, (H, D), ("heads", "head_dim"), ZEROS)
            self.k_bias = parameter(rngs, (K, D), ("kv_heads", "head_dim"), ZEROS)
            self.v_bias = parameter(rngs, (K, D), ("kv_heads", "head_dim"), ZEROS)
        if query_key_norm:
            self.q_norm = parameter(rngs, (D,), ("norm",), ONES)
            self.k_norm = parameter(rngs, (D,), ("norm",), ONES)

    def make_mlp(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        """Creates the parameters of the MLP."""
        E, F = config.hidden_size, config.intermediate_size
        self.gate = parameter(rngs, (E, F), ("embed", "mlp"), NORMAL)
        self.up = parameter(rngs, (E, F), ("embed", "mlp"), NORMAL)
        self.down = parameter(rngs, (F, E), ("mlp", "embed"), NORMAL)

    def __call__(
        self,
        x: Float[Array, "N E"],
        forward_pass: ForwardPass,
        layer: Int[Array, ""],
        carry: PyTree,
    ) -> tuple[Float[Array, "N E"], PyTree]:
        """Returns the hidden states after the layer, and the `carry` of its attention.

        Tokens are flat, so the gradient of every weight is one plain matrix product: on a CPU, XLA
        takes 2.4 times as long to contract the two axes B and T.
        """
        arithmetic = forward_pass.arithmetic
        x, carry = self.with_attention(x, forward_pass, layer, carry)
        h = arithmetic.norm(x, self.mlp_norm.get_value(), self.norm_eps)
        gate_and_up = [self.gate.get_value(), self.up.get_value()]
        gate, up = products(h, gate_and_up, arithmetic.product)
        x = x + arithmetic.product(jax.nn.silu(gate) * up, self.down.get_value())
        return x, carry

    def with_attention(
        self,
        x: Float[Array, "N E"],
        forward_pass: ForwardPass,
        layer: Int[Array, ""],
        carry: PyTree,
    ) -> tuple[Float[Array, "N E"], PyTree]:
        """Returns the hidden states after the attention, and its `carry`."""
        N, _ = x.shape
        arithmetic = forward_pass.arithmetic
        h = arithmetic.norm(x, self.attn_norm.get_value(), self.norm_eps)
        q, k, v = self.queries_keys_values(h, forward_pass.rope, arithmetic)
        mixed, carry = forward_pass.attend(q, k, v, layer, carry)
        flat_mixed = mixed.reshape(N, -1)  # [N, H * D]
        return x + arithmetic.product(flat_mixed, self.o.get_value()), carry

    def queries_keys_values(
        self,
        h: Float[Array, "N E"],
        rope: Rotary,
        arithmetic: Arithmetic,
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Returns q and k, rotated by their positions, and v."""
        B, T = rope.cos.shape[:2]
        D = self.head_dim
        weights = [self.q.get_value(), self.k.get_value(), self.v.get_value()]
        q, k, v = (in_heads(out, D) for out in products(h, weights, arithmetic.product))
        if self.attention_bias:
            q = plus_bias(q, self.q_bias.get_value())
            k = plus_bias(k, self.k_bias.get_value())
            v = plus_bias(v, self.v_bias.get_value())
        # Before the rotation, as in the models that have these norms.
        if self.query_key_norm:
            q, k = self.normed_heads(arithmetic, q, k)
        q = rotate(q.reshape(B, T, -1, D), rope)
        k = rotate(k.reshape(B, T, -1, D), rope)
        return q, k, v.reshape(B, T, -1, D)

    def normed_heads(
        self,
        arithmetic: Arithmetic,
        q: jax.Array,
        k: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the heads of q and k [N, heads, D] after their norms."""
        q = arithmetic.norm(q, self.q_norm.get_value(), self.norm_eps)
        k = arithmetic.norm(k, self.k_norm.get_value(), self.norm_eps)
        return q, k


def unrolls_layers() -> bool:
    """Returns whether the loop over the layers is unrolled: true for multi-process CPU runs."""
    # On CPU, XLA may start a collective while an earlier loop with collectives in its body is still
    # running. If one process does so and another does not, the run fails with "Received data size
    # doesn't match expected size". Collectives outside of loops are started in program order.
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
