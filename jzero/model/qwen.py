"""Qwen2, Qwen2.5 (bias on q, k, v) and Qwen3 dense (RMSNorm on q and k): structure in Flax NNX, functions over values.

Dimensions: B rows, T tokens, L layers, E hidden, H heads, K kv heads, D head dim, F mlp, V vocab. `params` is a plain
nested dict of arrays, {"embed", "layers": {...}, "norm", "lm_head" when untied}; leaves of "layers" lead with [L].
`forward` does not know what attention is: packed rows, dense prefill and paged decoding each inject their `attend`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import UserError

Params = dict[str, Any]  # nested dict of arrays
# (q [B,T,H,D], k [B,T,K,D], v [B,T,K,D], layer i32[], carry) -> (out, carry)
Attend = Callable[..., tuple[jax.Array, Any]]


@dataclass(frozen=True)
class QwenConfig:
    """What shapes the computation, under Hugging Face's names."""

    model_type: str  # qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    value_head: bool = (
        False  # a scalar of every hidden state (critic) instead of logits; not of Hugging Face
    )

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "QwenConfig":
        """Read a config.json; refuse what `forward` would silently compute differently."""
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        windowed = hf.get("use_sliding_window") or "sliding_attention" in (
            hf.get("layer_types") or ()
        )
        model_type = hf.get("model_type")
        refusals = {
            f"{model_type=}: only qwen2 and qwen3": model_type not in ("qwen2", "qwen3"),
            f"{rope_type=}: only default": rope_type != "default",
            f"hidden_act={hf.get('hidden_act')!r}: only silu": hf.get("hidden_act", "silu")
            != "silu",
            "sliding-window attention: set use_sliding_window to false": windowed,
            "attention_bias=true on qwen3": model_type == "qwen3" and hf.get("attention_bias"),
            "quantization_config: load the unquantized checkpoint": hf.get("quantization_config"),
        }
        if reasons := [reason for reason, refused in refusals.items() if refused]:
            raise UserError(f"config.json is not implemented here: {'; '.join(reasons)}")
        values = hf | {
            "head_dim": hf.get("head_dim")
            or hf.get("hidden_size", 0) // hf.get("num_attention_heads", 1),
            "rope_theta": rope.get("rope_theta") or hf.get("rope_theta", 10000.0),
            "tie_word_embeddings": hf.get("tie_word_embeddings", False),
        }
        names = [name for name in cls.__dataclass_fields__ if name != "value_head"]
        if missing := [name for name in names if name not in values]:
            raise UserError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})

    def to_hf(self, dtype: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """A config.json for `transformers`; `extra` are entries beside ours: eos_token_id, ..."""
        ours = asdict(self) | {
            "architectures": [
                {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
            ],
            "hidden_act": "silu",
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "dtype": dtype,  # transformers 5; torch_dtype and rope_theta are what 4 reads
            "torch_dtype": dtype,
        }
        del ours["value_head"]
        return (extra or {}) | ours


def param(
    rngs: nnx.Rngs, init: Callable, shape: tuple[int, ...], axes: tuple[str, ...]
) -> nnx.Param:
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


normal, ones, zeros = (
    jax.nn.initializers.normal(0.02),
    jax.nn.initializers.ones,
    jax.nn.initializers.zeros,
)


class Layer(nnx.Module):
    """One decoder layer. Its params may be one layer's slice in any dtype; the activations take that dtype."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs):
        E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.eps, self.head_dim = config.rms_norm_eps, config.head_dim
        self.attn_norm = param(rngs, ones, (E,), ("norm",))
        self.q = param(rngs, normal, (E, H, D), ("embed", "heads", "head_dim"))
        self.k = param(rngs, normal, (E, K, D), ("embed", "kv_heads", "head_dim"))
        self.v = param(rngs, normal, (E, K, D), ("embed", "kv_heads", "head_dim"))
        self.o = param(rngs, normal, (H, D, E), ("heads", "head_dim", "embed"))
        self.mlp_norm = param(rngs, ones, (E,), ("norm",))
        self.gate = param(rngs, normal, (E, F), ("embed", "mlp"))
        self.up = param(rngs, normal, (E, F), ("embed", "mlp"))
        self.down = param(rngs, normal, (F, E), ("mlp", "embed"))
        self.biased = config.model_type == "qwen2"
        if self.biased:
            self.q_bias = param(rngs, zeros, (H, D), ("heads", "head_dim"))
            self.k_bias = param(rngs, zeros, (K, D), ("kv_heads", "head_dim"))
            self.v_bias = param(rngs, zeros, (K, D), ("kv_heads", "head_dim"))
        else:
            self.q_norm = param(rngs, ones, (D,), ("norm",))
            self.k_norm = param(rngs, ones, (D,), ("norm",))

    def __call__(
        self, x, rope: tuple, attend: Attend, layer: jax.Array, carry: Any
    ) -> tuple[jax.Array, Any]:
        """x [B*T,E] -> x [B*T,E], carry; rope holds the batch's shape. Flat, so that the gradient of every weight is
        one plain matmul: XLA:CPU takes 2.4 times as long to contract two axes."""
        h = rms_norm(x, self.attn_norm[...], self.eps)
        q, k, v = (project(h, weight[...], self.head_dim) for weight in (self.q, self.k, self.v))
        if self.biased:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        else:
            q, k = rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps)
        shaped = lambda x: x.reshape(*rope[0].shape[:2], *x.shape[1:])  # [B*T,H,D] -> [B,T,H,D]
        out, carry = attend(
            rotate(shaped(q), rope), rotate(shaped(k), rope), shaped(v), layer, carry
        )
        x = x + out.reshape(x.shape[0], -1) @ self.o[...].reshape(-1, x.shape[-1])
        h = rms_norm(x, self.mlp_norm[...], self.eps)
        return x + (jax.nn.silu(h @ self.gate[...]) * (h @ self.up[...])) @ self.down[...], carry


class Qwen(nnx.Module):
    """The tree of parameters: Layer under vmap is the stacked [L, ...] that `forward` scans."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs):
        V, E = config.vocab_size, config.hidden_size
        stack = nnx.vmap(Layer, in_axes=(None, 0), transform_metadata={nnx.PARTITION_NAME: None})
        self.embed = param(rngs, normal, (V, E), ("vocab", "embed"))
        self.layers = stack(config, rngs.split(config.num_hidden_layers))
        self.norm = param(rngs, ones, (E,), ("norm",))
        if config.value_head:
            self.value = param(rngs, jax.nn.initializers.normal(1 / (E + 1)), (E,), ("embed",))
        elif not config.tie_word_embeddings:
            self.lm_head = param(rngs, normal, (E, V), ("embed", "vocab"))


def project(x: jax.Array, weight: jax.Array, head_dim: int) -> jax.Array:
    """[N,E] x [E,H,D] or [E,H*D] -> [N,H,D] as one plain matmul: a batch over heads is slow on CPU, and on TPU the
    decoder would lay out all weights anew for it."""
    out = jax.lax.optimization_barrier(x @ weight.reshape(weight.shape[0], -1))
    return out.reshape(-1, out.shape[1] // head_dim, head_dim)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in fp32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def rope_angles(config: QwenConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """positions i32[B,T] -> cos, sin f32[B,T,1,D/2]."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE of x [B,T,H,D] with the halves of D as the pairs (Hugging Face's order), in fp32."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def init(config: QwenConfig, key: jax.Array) -> Params:
    """Random fp32 params as Hugging Face draws them: normal(0.02), norms 1, biases 0."""
    return nnx.to_pure_dict(nnx.state(Qwen(config, nnx.Rngs(params=key))))


def abstract(config: QwenConfig) -> Params:
    """The tree of `init` as ShapeDtypeStructs; allocates nothing."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


@cache
def logical_axes(config: QwenConfig) -> Params:
    """The tree of `init` with a tuple of logical axis names, one per dimension, at every leaf."""
    state = nnx.state(nnx.eval_shape(lambda: Qwen(config, nnx.Rngs(0))))
    axes = nnx.to_pure_dict(
        jax.tree.map(lambda p: p.axes, state, is_leaf=lambda p: isinstance(p, nnx.Param))
    )
    return axes | {"layers": {name: ("layers", *names) for name, names in axes["layers"].items()}}


def num_params(config: QwenConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))


@cache
def layer_graph(config: QwenConfig) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(0))))


def cast(tree: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


same = lambda x: x
recomputed = partial(jax.checkpoint, prevent_cse=False)
REMAT: dict[str, Callable] = {  # what the backward pass of a layer recomputes
    "none": same,
    "dots": partial(recomputed, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": recomputed,
}


def forward(
    config: QwenConfig,
    params: Params,
    tokens,
    positions,
    attend: Attend,
    carry: Any = None,
    *,
    dtype,
    remat="none",
) -> tuple[jax.Array, Any]:
    """tokens, positions i32[B,T] -> hidden [B,T,E] after the final norm, and `carry` (any pytree: KV pages) as `attend`
    left it. Its q and k are rotated, its q is not scaled."""
    rope = rope_angles(config, positions)

    def layer(state, xs):
        index, weights = xs
        x, carry = state
        return nnx.merge(layer_graph(config), weights)(x, rope, attend, index, carry), None

    layers = cast(params["layers"], dtype)  # once, so that a sharded stack is gathered in `dtype`
    x = params["embed"][tokens.ravel()].astype(dtype)
    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, carry), _ = jax.lax.scan(REMAT[remat](layer), (x, carry), (indices, layers))
    x = rms_norm(x, params["norm"].astype(dtype), config.rms_norm_eps)
    return x.reshape(*tokens.shape, -1), carry


def head(
    config: QwenConfig, params: Params, hidden: jax.Array, dtype: Any, part: slice = slice(None)
) -> jax.Array:
    """hidden [..., E] -> fp32 logits [..., part of V]; the product is in `dtype`, its accumulation in fp32."""
    tied = config.tie_word_embeddings
    spec, weight = (
        ("...e,ve->...v", params["embed"][part])
        if tied
        else ("...e,ev->...v", params["lm_head"][:, part])
    )
    return jnp.einsum(
        spec, hidden.astype(dtype), weight.astype(dtype), preferred_element_type=jnp.float32
    )


def token_logps(
    config: QwenConfig,
    params,
    hidden,
    targets,
    *,
    temperature,
    chunk,
    dtype,
    place=same,
    place_logits=same,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and entropy, f32[B,T] both, of p = softmax(logits / temperature); hidden [B,T,E], targets i32[B,T].

    Logits exist for about `chunk` tokens at a time, forward and backward. A chunk is some positions of every row, at
    least one: chunks of the flattened [B*T] would undo a sharding of B. Its hidden states go through `place`, its
    logits [B,width,V] through `place_logits`."""

    def score(hidden, targets):
        logits = place_logits(head(config, params, place(hidden), dtype) / temperature)
        logz = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        entropy = logz - jnp.sum(jnp.exp(logits - logz[..., None]) * logits, axis=-1)
        return target - logz, entropy

    B, T = targets.shape
    width = min(T, max(1, chunk // B))
    if width == T:
        return score(hidden, targets)

    def split(x):  # [B,T,...] -> [chunks,B,width,...], padded
        x = jnp.pad(x, [(0, 0), (0, -T % width)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, width, *x.shape[2:]), 1, 0)

    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T]  # [chunks,B,width] -> [B,T]
    logps, entropy = jax.lax.map(lambda xs: recomputed(score)(*xs), (split(hidden), split(targets)))
    return join(logps), join(entropy)
