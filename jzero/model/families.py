"""The one table of model families.

A family is what `model_type` names in a Hugging Face config.json: which layer the model stacks,
which tensors a checkpoint holds, how a config.json is read and written, which of its settings are
refused because the layer would compute something else, and which sizes the hub has. Everything else
in the package works on any entry. A new family is one more entry, from outside of this package too:

    from dataclasses import replace
    from jzero.model.families import FAMILIES

    FAMILIES["my_family"] = replace(FAMILIES["qwen2"], architecture="MyFamilyForCausalLM")
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import jax
from flax import nnx
from jaxtyping import PyTree

from jzero.errors import UserError, shown
from jzero.model.architecture import QwenConfig
from jzero.model.known_models import LLAMA_MODELS, QWEN2_MODELS, QWEN3_MODELS, KnownModels
from jzero.model.layers import Attend, DenseLayer, Rotary
from jzero.model.rope_entries import HuggingFaceConfig, rope_refusals


class Layer(Protocol):
    """A Flax module that computes one decoder layer: x [N, E] -> x [N, E] and `carry`."""

    def __call__(
        self,
        x: jax.Array,
        rope: Rotary,
        attend: Attend,
        layer: jax.Array,
        carry: PyTree,
    ) -> tuple[jax.Array, PyTree]: ...


class StoredTensor(NamedTuple):
    """Name and layout of a parameter in a Hugging Face checkpoint.

    name    the tensor's name; "{}" stands for the number of the layer.
    layout  "same": the tensor has our shape. "flat": the tensor is our array, flattened.
            "linear": the tensor is a torch Linear weight [outputs, inputs]. Our array is
            [*inputs, *outputs] with the heads kept apart, so it is transposed and reshaped.
    inputs  how many leading axes of our array are the inputs of a "linear" tensor.
    """

    name: str
    layout: Literal["same", "flat", "linear"] = "same"
    inputs: int = 1


def no_limit(hf_config: HuggingFaceConfig) -> int | None:
    """Returns None: the layers of most families attend to all tokens of any sequence."""
    return None


@dataclass(frozen=True)
class Family:
    """What differs from one model family to the next.

    architecture  the class of `transformers` that config.json names.
    layer         makes the Flax module of one layer, whose parameters draw keys from the Rngs.
    tensors       name of a parameter ("embed", "layers.q", ...) -> its tensor in a checkpoint. The
                  table may name more parameters than the family has.
    refusals      yields a phrase for every setting of a config.json that `layer` does not follow.
    defaults      entries that a config.json of the family may lack, with the values that
                  `transformers` takes then.
    written       entries of a config.json beside those of `QwenConfig`, without which
                  `transformers` would compute something else.
    window        returns the tokens to which a layer attends at most, as a config.json says, or
                  None. `layer` attends to all of them, so longer sequences are refused.
    known_models  the sizes that can be planned without a download.
    is_exact      `layer` multiplies by weights with `linear`, norms with `rms_norm` and mixes
                  tokens with its `attend` alone, so that it can have the bits of `model.exact`.
    """

    architecture: str
    layer: Callable[[QwenConfig, nnx.Rngs], Layer]
    tensors: Mapping[str, StoredTensor]
    refusals: Callable[[HuggingFaceConfig], Iterator[str]]
    defaults: HuggingFaceConfig = field(default_factory=dict)
    written: HuggingFaceConfig = field(default_factory=dict)
    window: Callable[[HuggingFaceConfig], int | None] = no_limit
    known_models: KnownModels = field(default_factory=dict)
    is_exact: bool = False


DENSE_TENSORS = {
    "embed": StoredTensor("model.embed_tokens.weight"),
    "norm": StoredTensor("model.norm.weight"),
    "lm_head": StoredTensor("lm_head.weight", "linear"),
    "layers.attn_norm": StoredTensor("model.layers.{}.input_layernorm.weight"),
    "layers.q": StoredTensor("model.layers.{}.self_attn.q_proj.weight", "linear"),
    "layers.k": StoredTensor("model.layers.{}.self_attn.k_proj.weight", "linear"),
    "layers.v": StoredTensor("model.layers.{}.self_attn.v_proj.weight", "linear"),
    "layers.q_bias": StoredTensor("model.layers.{}.self_attn.q_proj.bias", "flat"),
    "layers.k_bias": StoredTensor("model.layers.{}.self_attn.k_proj.bias", "flat"),
    "layers.v_bias": StoredTensor("model.layers.{}.self_attn.v_proj.bias", "flat"),
    "layers.q_norm": StoredTensor("model.layers.{}.self_attn.q_norm.weight"),
    "layers.k_norm": StoredTensor("model.layers.{}.self_attn.k_norm.weight"),
    "layers.o": StoredTensor("model.layers.{}.self_attn.o_proj.weight", "linear", inputs=2),
    "layers.mlp_norm": StoredTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.gate": StoredTensor("model.layers.{}.mlp.gate_proj.weight", "linear"),
    "layers.up": StoredTensor("model.layers.{}.mlp.up_proj.weight", "linear"),
    "layers.down": StoredTensor("model.layers.{}.mlp.down_proj.weight", "linear"),
}


def dense_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields what `DenseLayer` would silently compute differently from `transformers`."""
    yield from rope_refusals(hf_config)
    hidden_act = hf_config.get("hidden_act") or "silu"
    if hidden_act != "silu":
        yield f"hidden_act={shown(hidden_act)}: only silu is implemented"
    other_types = set(hf_config.get("layer_types") or ()) - {"full_attention"}
    if hf_config.get("use_sliding_window") or "sliding_attention" in other_types:
        yield "sliding-window attention: set use_sliding_window to false"
    elif other_types:
        yield f"layer_types with {shown(min(other_types))}: only full_attention is implemented"
    if hf_config.get("per_layer_config"):
        yield "per_layer_config: all layers have the same settings here"
    if hf_config.get("quantization_config"):
        yield "quantization_config: load the unquantized checkpoint"
    if hf_config.get("auto_map"):
        yield (
            "auto_map: the model has Python code of its own, and jzero runs no code of a model "
            "directory"
        )


def qwen3_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields what `dense_refusals` does, and what else Qwen3's layer lacks here."""
    yield from dense_refusals(hf_config)
    if hf_config.get("attention_bias"):
        yield "attention_bias=true on qwen3: only false is implemented"
    if hf_config.get("head_dim") is None:
        yield "no head_dim on qwen3: transformers takes 128 then, write the number that is meant"


def llama_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields what `dense_refusals` does, and the biases that Llama's layer may have."""
    yield from dense_refusals(hf_config)
    for name in ("attention_bias", "mlp_bias"):
        if hf_config.get(name):
            yield f"{name}=true on {hf_config['model_type']}: only false is implemented"


def sliding_window(hf_config: HuggingFaceConfig) -> int | None:
    """Returns `sliding_window`, or None where all positions of the model are in the window.

    The entries may be of a config.json that nobody has checked yet.
    """
    window, positions = hf_config.get("sliding_window"), hf_config.get("max_position_embeddings")
    if not isinstance(window, int) or (isinstance(positions, int) and window >= positions):
        return None
    return window


plain_layer = partial(DenseLayer, attention_bias=False, query_key_norm=False)

FAMILIES: dict[str, Family] = {
    "qwen2": Family(  # Qwen2 and Qwen2.5
        architecture="Qwen2ForCausalLM",
        layer=partial(DenseLayer, attention_bias=True, query_key_norm=False),
        tensors=DENSE_TENSORS,
        refusals=dense_refusals,
        written={"use_sliding_window": False},
        known_models=QWEN2_MODELS,
        is_exact=True,
    ),
    "qwen3": Family(  # the dense models of Qwen3
        architecture="Qwen3ForCausalLM",
        layer=partial(DenseLayer, attention_bias=False, query_key_norm=True),
        tensors=DENSE_TENSORS,
        refusals=qwen3_refusals,
        written={"use_sliding_window": False},
        known_models=QWEN3_MODELS,
        is_exact=True,
    ),
    "llama": Family(  # Llama 1, 2, 3, 3.1, 3.2 and 3.3, and what was made from them
        architecture="LlamaForCausalLM",
        layer=plain_layer,
        tensors=DENSE_TENSORS,
        refusals=llama_refusals,
        defaults={"num_key_value_heads": None},  # as many as query heads
        known_models=LLAMA_MODELS,
        is_exact=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        layer=plain_layer,
        tensors=DENSE_TENSORS,
        refusals=llama_refusals,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        written={"sliding_window": None},
        window=sliding_window,
        is_exact=True,
    ),
}


def with_defaults(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a config.json with the entries that its family takes where they are absent."""
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return {**family.defaults, **hf_config} if family else hf_config


def window_of(hf_config: HuggingFaceConfig) -> int | None:
    """Returns the tokens that a sequence of this model may have, where its family has a limit."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    return family.window(with_defaults(hf_config)) if family else None


def family_of(model_type: str | None) -> Family:
    """Returns the family of a `model_type`; raises UserError when the table has no such entry."""
    if model_type is None or model_type not in FAMILIES:
        raise UserError(
            f"model_type={shown(repr(model_type))} is not one of {', '.join(FAMILIES)}: choose a "
            "model of these families, or add its family to jzero.model.families.FAMILIES"
        )
    return FAMILIES[model_type]
