"""Gemma 2 and 3: their layer, and the entries of their config.json.

A layer differs from `DenseLayer` in four points. Norms multiply by 1 + weight, and the outputs of
attention and MLP pass through a norm of their own before they are added. The MLP has a GELU. Some
layers attend to a sliding window. The embedding is multiplied by the square root of its width
(`Family.scales_embedding`).

    Gemma 2   every other layer has a window; scores and logits are bounded (`soft_capped`)
    Gemma 3   five of six layers have a window, with another base of RoPE; heads of q and k are
              normed

Sources: Gemma 2 (arXiv:2408.00118), section 2; Gemma 3 Technical Report (arXiv:2503.19786),
sections 2 and 2.1; Gemma2Model and Gemma3TextModel in transformers.
"""

import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jzero.errors import shown
from jzero.files import JsonObject
from jzero.model.architecture import (
    ATTENTION,
    NO_WINDOW,
    SLIDING,
    QwenConfig,
    layers_with_windows,
)
from jzero.model.arithmetic import Arithmetic
from jzero.model.layers import (
    ZEROS,
    DenseLayer,
    ForwardPass,
    Rotary,
    parameter,
    window_of_layer,
    zero_centered_norm,
)
from jzero.model.linear import products
from jzero.model.rope_entries import HuggingFaceConfig, read_rope, rope_refusals, write_rope

ACTIVATION = "gelu_pytorch_tanh"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
LOCAL_BASE = 10_000.0  # of the layers with a window, the default of transformers
GEMMA2_PATTERN, GEMMA3_PATTERN = 2, 6  # layers from one with full attention to the next
LOCAL_ROPE = "rope_parameters.sliding_attention"  # of a `flat` file

# The defaults of `transformers`.
GEMMA2_DEFAULTS: HuggingFaceConfig = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": GEMMA2_PATTERN,
    "tie_word_embeddings": True,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS: HuggingFaceConfig = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": LOCAL_BASE,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 131_072,
}


class GemmaLayer(DenseLayer):
    """A layer with full attention or with a sliding window; its number decides."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs, *, query_key_norm: bool) -> None:
        super().__init__(config, rngs, attention_bias=False, query_key_norm=query_key_norm)
        E, D = config.hidden_size, config.head_dim
        self.config = config
        # 1 + 0: the norms of a new model multiply by 1.
        self.attn_norm = parameter(rngs, (E,), ("norm",), ZEROS)
        self.mlp_norm = parameter(rngs, (E,), ("norm",), ZEROS)
        if query_key_norm:
            self.q_norm = parameter(rngs, (D,), ("norm",), ZEROS)
            self.k_norm = parameter(rngs, (D,), ("norm",), ZEROS)
        self.attn_out_norm = parameter(rngs, (E,), ("norm",), ZEROS)
        self.mlp_out_norm = parameter(rngs, (E,), ("norm",), ZEROS)

    def __call__(
        self,
        x: Float[Array, "N E"],
        forward_pass: ForwardPass,
        layer: Int[Array, ""],
        carry: PyTree,
    ) -> tuple[Float[Array, "N E"], PyTree]:
        """Returns the hidden states after the layer, and the `carry` of its attention."""
        arithmetic = forward_pass.arithmetic

        def norm(x: jax.Array, weight: nnx.Param[jax.Array]) -> jax.Array:
            return zero_centered_norm(arithmetic, x, weight.get_value(), self.norm_eps)

        h = norm(x, self.attn_norm)
        rope = rope_of_layer(self.config, forward_pass, layer)
        q, k, v = self.queries_keys_values(h, rope, arithmetic)
        mixed, carry = forward_pass.attend(q, k, v, layer, carry)
        attended = arithmetic.product(mixed.reshape(len(x), -1), self.o.get_value())
        # Unlike Qwen, Gemma norms the output of a block, too, before it is added.
        x = x + arithmetic.unfused(norm(attended, self.attn_out_norm))

        h = norm(x, self.mlp_norm)
        gate_and_up = [self.gate.get_value(), self.up.get_value()]
        gate, up = products(h, gate_and_up, arithmetic.product)
        activated = gelu(arithmetic, gate)
        out = arithmetic.product(activated * up, self.down.get_value())
        return x + arithmetic.unfused(norm(out, self.mlp_out_norm)), carry

    def queries_keys_values(
        self,
        h: Float[Array, "N E"],
        rope: Rotary,
        arithmetic: Arithmetic,
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Returns q, in the scale of attention, k and v; q and k are rotated."""
        q, k, v = super().queries_keys_values(h, rope, arithmetic)
        if not self.query_key_norm and self.config.query_scale:
            q = (q.astype(jnp.float32) * query_factor(self.config)).astype(q.dtype)
        return q, k, v

    def normed_heads(
        self,
        arithmetic: Arithmetic,
        q: jax.Array,
        k: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the heads of q and k after their norms, with q in the scale of attention."""
        # The factor is exact in the fp32 of the norm, where bf16 queries would be rounded once
        # more.
        q_scale = query_factor(self.config) * (1 + self.q_norm.get_value().astype(jnp.float32))
        q = arithmetic.norm(q, q_scale, self.norm_eps)
        k = zero_centered_norm(arithmetic, k, self.k_norm.get_value(), self.norm_eps)
        return q, k


def query_factor(config: QwenConfig) -> float:
    """Returns the factor of queries: attention itself divides scores by the root of head_dim."""
    return math.sqrt(config.head_dim / config.query_scale) if config.query_scale else 1.0


def gelu(arithmetic: Arithmetic, x: Float[Array, "N F"]) -> Float[Array, "N F"]:
    """Computes `jax.nn.gelu` with the tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    cubic = arithmetic.unfused(0.044715 * x**3)
    # As in `jax.nn.gelu`, the constant has the type of x.
    root = np.sqrt(2 / np.pi).astype(x.dtype)
    return x * (0.5 * (1 + jnp.tanh(root * (x + cubic))))


def rope_of_layer(config: QwenConfig, forward_pass: ForwardPass, layer: Int[Array, ""]) -> Rotary:
    """Returns the angles of a layer: those of its window, or of full attention."""
    rope, local = forward_pass.rope, forward_pass.local_rope
    window = window_of_layer(config, layer)
    if window is None or local is None:
        return rope
    # All layers are one loop, so the number of a layer, and with it its kind, is not known when the
    # loop is compiled.
    is_local = window < NO_WINDOW
    return rope._replace(
        cos=jnp.where(is_local, local.cos, rope.cos), sin=jnp.where(is_local, local.sin, rope.sin)
    )


# -- config.json -----------------------------------------------------------------------------------


def flat(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a config.json with the entries of text_config at the top level, in version 4 form.

    transformers 5 writes rope_parameters with an object for each kind of layer; version 4 writes
    rope_theta and rope_scaling for full attention, and rope_local_base_freq for windows. Version 4
    has no scaling for windows: it is at LOCAL_ROPE, which no file has.
    """
    text = hf_config.get("text_config")
    if isinstance(text, Mapping):
        top_level = {name: value for name, value in hf_config.items() if name != "text_config"}
        hf_config = {**GEMMA3_DEFAULTS, **text, **top_level}
    ropes = hf_config.get("rope_parameters")
    if not isinstance(ropes, Mapping) or not ropes.keys() & {ATTENTION, SLIDING}:
        return hf_config
    entries = {name: value for name, value in hf_config.items() if name != "rope_parameters"}
    full, local = ropes.get(ATTENTION) or {}, ropes.get(SLIDING) or {}
    scaling = hf_config.get("rope_scaling") or {}
    if not all(isinstance(rope, Mapping) for rope in (full, local, scaling)):
        return hf_config  # `schema.problems` and `refusals` name what is wrong
    # With both forms, transformers takes the entries of rope_scaling.
    full = {**full, **scaling}
    entries["rope_theta"] = full.pop("rope_theta", entries.get("rope_theta"))
    entries["rope_scaling"] = full
    entries["rope_local_base_freq"] = local.get("rope_theta", entries.get("rope_local_base_freq"))
    entries[LOCAL_ROPE] = {name: value for name, value in local.items() if name != "rope_theta"}
    return entries


def with_local_rope(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a flat config.json in which the layers with a window have the only RoPE."""
    return {
        **hf_config,
        "rope_theta": hf_config["rope_local_base_freq"],
        "rope_scaling": hf_config.get(LOCAL_ROPE),
    }


def layer_types(hf_config: HuggingFaceConfig) -> tuple[str, ...]:
    """Returns the kind of every layer, as `transformers` reads them.

    transformers writes the entry _sliding_window_pattern and never reads it.
    """
    listed = hf_config.get("layer_types")
    if listed is not None:
        return tuple(listed)
    pattern = hf_config.get("sliding_window_pattern")
    return layers_with_windows(hf_config["num_hidden_layers"], pattern or GEMMA3_PATTERN)


def shared_fields(hf_config: HuggingFaceConfig) -> JsonObject:
    """Returns the fields of `QwenConfig` that Gemma 2 and 3 have."""
    scale = hf_config.get("query_pre_attn_scalar") or hf_config["head_dim"]
    return {
        "layer_types": layer_types(hf_config),
        "sliding_window": hf_config["sliding_window"],
        "query_scale": 0 if scale == hf_config["head_dim"] else scale,
    }


def gemma2_fields(hf_config: HuggingFaceConfig) -> JsonObject:
    """Returns the fields of `QwenConfig` that are specific to Gemma 2."""
    return shared_fields(hf_config) | {name: float(hf_config[name] or 0) for name in SOFT_CAPS}


def gemma3_fields(hf_config: HuggingFaceConfig) -> JsonObject:
    """Returns the fields of `QwenConfig` that are specific to Gemma 3."""
    local = read_rope(with_local_rope(hf_config))
    return shared_fields(hf_config) | {
        "local_rope_theta": local.theta,
        "local_rope_scaling": local.scaling,
    }


def shared_entries(config: QwenConfig) -> JsonObject:
    """Returns the entries of config.json that Gemma 2 and 3 have, for transformers 4 and 5."""
    assert config.layer_types is not None
    return {
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "query_pre_attn_scalar": config.query_scale or config.head_dim,
        "hidden_activation": ACTIVATION,
        "hidden_act": ACTIVATION,
    }


def gemma2_entries(config: QwenConfig, extra: HuggingFaceConfig) -> JsonObject:
    """Returns the entries of config.json that are specific to Gemma 2."""
    return shared_entries(config) | {name: getattr(config, name) or None for name in SOFT_CAPS}


def gemma3_entries(config: QwenConfig, extra: HuggingFaceConfig) -> JsonObject:
    """Returns the entries of config.json that are specific to Gemma 3."""
    full = write_rope(config.rope_theta, config.rope_scaling)
    local = write_rope(config.local_rope_theta, config.local_rope_scaling)
    return shared_entries(config) | {
        "rope_parameters": {
            ATTENTION: full["rope_parameters"],
            SLIDING: local["rope_parameters"],
        },
        "rope_scaling": full.get("rope_scaling"),
        "rope_local_base_freq": config.local_rope_theta,
    }


def refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields the settings that `GemmaLayer` would compute differently from `transformers`."""
    model_type = hf_config["model_type"]
    yield from rope_refusals(hf_config)
    if model_type != "gemma2":
        for reason in rope_refusals(with_local_rope(hf_config)):
            yield f"{SLIDING}: {reason}"
        if hf_config.get("rope_parameters"):
            yield (
                f"rope_parameters without {ATTENTION} and {SLIDING}: {model_type} has an object for"
                " each kind of layer"
            )
    elif hf_config.get("sliding_window_pattern") not in (None, GEMMA2_PATTERN):
        yield (
            f"sliding_window_pattern={shown(hf_config['sliding_window_pattern'])} on gemma2: "
            f"transformers always takes {GEMMA2_PATTERN}, list the layers in layer_types"
        )
    if (activation := hf_config.get("hidden_activation")) != ACTIVATION:
        yield f"hidden_activation={shown(activation)}: only {ACTIVATION} is implemented"
    for name in SOFT_CAPS:
        bound = hf_config.get(name)
        # transformers reads the bound of scores of a Gemma 3, and does not apply it.
        if bound is not None and model_type != "gemma2":
            yield f"{name}={shown(bound)} on {model_type}: only gemma2 has soft caps"
        elif bound == 0:
            yield f"{name}=0: transformers makes everything 0, set it to null for no bound"
    for name in ("attention_bias", "use_bidirectional_attention"):
        if hf_config.get(name):
            yield f"{name}=true on {model_type}: only false is implemented"
    if other := set(layer_types(hf_config)) - {ATTENTION, SLIDING}:
        yield f"layer_types with {shown(min(other))}: only {ATTENTION} and {SLIDING}"
    if not hf_config.get("sliding_window"):
        yield f"no sliding_window: a model of {model_type} has layers with a window"
    if hf_config.get("quantization_config"):
        yield "quantization_config: load the unquantized checkpoint"
    if hf_config.get("auto_map"):
        yield "auto_map: the model needs Python code from its directory, which jzero does not run"
