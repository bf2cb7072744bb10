"""A dense decoder layer: its parameters, and what it computes.

`families.py` names the functions `dense_parameters` and `dense_layer` in the entries of Qwen2 and
Qwen3. A layer receives its attention as a function, so the same layer serves packed training rows,
the prefill of prompts and paged decoding. See `architecture.py` for the dimension letters.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jaxtyping import Array, Float, Int, PyTree

from jzero.model.architecture import Parameter, Params, QwenConfig

NORMAL = initializers.normal(0.02)  # the standard deviation that Hugging Face draws weights with
ONES = initializers.ones
ZEROS = initializers.zeros


@runtime_checkable  # so that tests check annotations
class Attend(Protocol):
    """Attention from the outside: queries, keys and values in, mixed values out.

    Shapes: q [B, T, H, D], k and v [B, T, K, D], layer i32[], output [B, T, H, D]. q and k are
    rotated already; q is not scaled. `carry` is any tree of arrays that attention reads and
    changes, such as pages of keys and values.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree, /
    ) -> tuple[jax.Array, PyTree]: ...


class Rotary(NamedTuple):
    """Cosines and sines of the rotary position embedding, for every position of a batch."""

    cos: Float[Array, "B T 1 half"]
    sin: Float[Array, "B T 1 half"]


def rotary(config: QwenConfig, positions: Int[Array, "B T"]) -> Rotary:
    """Computes the angles of RoPE (Su et al. 2021, eq. 34) for every position, in fp32."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return Rotary(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "B T heads D"], rope: Rotary) -> Float[Array, "B T heads D"]:
    """Rotates the heads of q or k by their positions, in fp32.

    A pair is element i of the first half of D and element i of the second half, which is Hugging
    Face's order of the weights. The RoPE paper pairs neighboring elements.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_first = first * rope.cos - second * rope.sin
    rotated_second = second * rope.cos + first * rope.sin
    return jnp.concatenate([rotated_first, rotated_second], axis=-1).astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, " width"], eps: float
) -> Float[Array, "*batch width"]:
    """Divides x by its root mean square over the last axis and multiplies by `scale`, in fp32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def project(
    x: Float[Array, "N E"], weight: Float[Array, "E ..."], head_dim: int
) -> Float[Array, "N heads D"]:
    """Multiplies x by a weight [E, heads, D] or [E, heads * D] and splits the result into heads.

    The product is one plain matrix product. A product that is batched over heads is slow on CPU,
    and on TPU the decoder would lay out all weights anew for it: the barrier keeps XLA from
    merging the reshape into the product.
    """
    flat_weight = weight.reshape(weight.shape[0], -1)
    out = jax.lax.optimization_barrier(jnp.einsum("ne,ef->nf", x, flat_weight))
    return out.reshape(-1, out.shape[1] // head_dim, head_dim)


def dense_parameters(
    config: QwenConfig, *, attention_bias: bool, query_key_norm: bool
) -> dict[str, Parameter]:
    """Returns the parameters of one dense layer.

    attention_bias: q, k and v have biases (Qwen2).
    query_key_norm: an RMSNorm acts on every head of q and k (Qwen3).
    The order matters: parameter i draws its first values with key i of the layer.
    """
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, K = config.num_attention_heads, config.num_key_value_heads
    parameters = {
        "attn_norm": Parameter((E,), ("norm",), ONES),
        "q": Parameter((E, H, D), ("embed", "heads", "head_dim"), NORMAL),
        "k": Parameter((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL),
        "v": Parameter((E, K, D), ("embed", "kv_heads", "head_dim"), NORMAL),
        "o": Parameter((H, D, E), ("heads", "head_dim", "embed"), NORMAL),
        "mlp_norm": Parameter((E,), ("norm",), ONES),
        "gate": Parameter((E, F), ("embed", "mlp"), NORMAL),
        "up": Parameter((E, F), ("embed", "mlp"), NORMAL),
        "down": Parameter((F, E), ("mlp", "embed"), NORMAL),
    }
    if attention_bias:
        parameters |= {
            "q_bias": Parameter((H, D), ("heads", "head_dim"), ZEROS),
            "k_bias": Parameter((K, D), ("kv_heads", "head_dim"), ZEROS),
            "v_bias": Parameter((K, D), ("kv_heads", "head_dim"), ZEROS),
        }
    if query_key_norm:
        parameters |= {
            "q_norm": Parameter((D,), ("norm",), ONES),
            "k_norm": Parameter((D,), ("norm",), ONES),
        }
    return parameters


def dense_layer(
    config: QwenConfig,
    weights: Params,
    x: Float[Array, "N E"],
    rope: Rotary,
    attend: Attend,
    layer: Int[Array, ""],
    carry: PyTree,
) -> tuple[Float[Array, "N E"], PyTree]:
    """Computes one decoder layer; returns the hidden states after it, and attention's `carry`.

    `weights` is the layer's slice of `Params["layers"]`, in the dtype of the activations. Biases
    and norms of q, k and v apply where the weights have them. Tokens are flat, so the gradient of
    every weight is one plain matrix product: XLA:CPU takes 2.4 times as long to contract the two
    axes of B and T.
    """
    B, T = rope.cos.shape[:2]
    N, E = x.shape
    D, eps = config.head_dim, config.rms_norm_eps

    # Attention. q is [N, H, D]; k and v are [N, K, D].
    h = rms_norm(x, weights["attn_norm"], eps)
    q = project(h, weights["q"], D)
    k = project(h, weights["k"], D)
    v = project(h, weights["v"], D)
    if "q_bias" in weights:
        q = q + weights["q_bias"]
        k = k + weights["k_bias"]
        v = v + weights["v_bias"]
    if "q_norm" in weights:
        q = rms_norm(q, weights["q_norm"], eps)
        k = rms_norm(k, weights["k_norm"], eps)
    q = rotate(q.reshape(B, T, -1, D), rope)
    k = rotate(k.reshape(B, T, -1, D), rope)
    v = v.reshape(B, T, -1, D)
    mixed, carry = attend(q, k, v, layer, carry)
    flat_mixed = mixed.reshape(N, -1)  # [N, H * D]
    flat_o = weights["o"].reshape(-1, E)
    x = x + jnp.einsum("nf,fe->ne", flat_mixed, flat_o)

    # The gated MLP (Shazeer 2020, SwiGLU).
    h = rms_norm(x, weights["mlp_norm"], eps)
    gate = jax.nn.silu(jnp.einsum("ne,ef->nf", h, weights["gate"]))
    up = jnp.einsum("ne,ef->nf", h, weights["up"])
    x = x + jnp.einsum("nf,fe->ne", gate * up, weights["down"])
    return x, carry
