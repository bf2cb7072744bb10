"""The table of model families.

A family is one `model_type` of a Hugging Face config.json. Its entry in `FAMILIES` defines the
layer that the model stacks, the tensors of a checkpoint, how config.json is read and written, the
settings that are refused because the layer would compute something else, and the model sizes on the
hub. The other modules work with any entry. Code outside of this package can add a family, too:

    from dataclasses import replace
    from jzero.model.families import FAMILIES

    FAMILIES["my_family"] = replace(FAMILIES["qwen2"], architecture="MyFamilyForCausalLM")
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import jax
from flax import nnx
from jax.nn.initializers import Initializer
from jaxtyping import PyTree

from jzero.errors import UserError, shown
from jzero.files import JsonObject
from jzero.model import expert_entries, gemma, hybrid, hybrid_config
from jzero.model.architecture import QwenConfig
from jzero.model.arithmetic import Arithmetic
from jzero.model.experts import ExpertLayer
from jzero.model.layers import (
    ONES,
    ZEROS,
    DenseLayer,
    ForwardPass,
    plain_norm,
    zero_centered_norm,
)
from jzero.model.rope_entries import HuggingFaceConfig, rope_refusals


class Layer(Protocol):
    """A Flax module that computes one decoder layer: x [N, E] -> x [N, E] and `carry`."""

    def __call__(
        self,
        x: jax.Array,
        forward_pass: ForwardPass,
        layer: jax.Array,
        carry: PyTree,
    ) -> tuple[jax.Array, PyTree]: ...


class StoredTensor(NamedTuple):
    """Name and layout of a parameter in a Hugging Face checkpoint.

    name    the tensor's name; "{}" stands for the number of the layer, and a second "{}" for the
            number of the expert.
    layout  "same": the tensor has the shape of our parameter. "flat": the tensor is our array,
            flattened. "linear": the tensor is a torch Linear weight [outputs, inputs]. Our array is
            [*inputs, *outputs] with separate axes for the heads, so it is transposed and reshaped.
            "router": the tensor is [outputs, inputs] as well, and never has an adapter or int8
            values. "expert": one tensor [outputs, inputs] for every expert; our array leads with
            the experts. "experts": one tensor [experts, outputs, inputs] of a whole layer.
    part    (number, count): an "experts" tensor concatenates the outputs of `count` of our arrays,
            and this array is the number-th of them.
    inputs  how many leading axes of our array are the inputs of a "linear" tensor.
    is_adaptable  whether a "linear" tensor may have an adapter or be quantized to int8.
    """

    name: str
    layout: Literal["same", "flat", "linear", "router", "expert", "experts"] = "same"
    inputs: int = 1
    is_adaptable: bool = True
    part: tuple[int, int] = (0, 1)


class Stack(NamedTuple):
    """All layers of a family that mixes several kinds of layers.

    layers            creates the Flax module of the stacked parameters of all layers.
    forward           computes all layers; see `hybrid.forward`.
    layer_numbers     returns the numbers of the layers that have a parameter, in the order of its
                      stack.
    """

    layers: Callable[[QwenConfig, nnx.Rngs], nnx.Module]
    forward: Callable[..., tuple[jax.Array, PyTree]]
    layer_numbers: Callable[[QwenConfig, str], tuple[int, ...]]


def no_limit(hf_config: HuggingFaceConfig) -> int | None:
    """Returns None: the layers of most families attend to all tokens of any sequence."""
    return None


def no_fields(hf_config: HuggingFaceConfig) -> JsonObject:
    """Returns no fields: most families need none besides the shared ones."""
    return {}


def no_entries(config: QwenConfig, extra: HuggingFaceConfig) -> JsonObject:
    """Returns no entries: most families write none besides the shared ones."""
    return {}


def unchanged(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns config.json unchanged: in most families its entries are at the top level."""
    return hf_config


def keep_entries(entries: JsonObject, extra: HuggingFaceConfig) -> JsonObject:
    """Returns `entries` unchanged: in most families they are the complete file."""
    return entries


@dataclass(frozen=True)
class Family:
    """Everything that differs from one model family to the next.

    architecture  the class of `transformers` that config.json names.
    layer         creates the Flax module of one layer; its parameters draw their keys from the
                  Rngs.
    tensors       name of a parameter ("embed", "layers.q", ...) -> its tensor in a checkpoint. The
                  table may name more parameters than the family has.
    refusals      yields a phrase for every setting of a config.json that `layer` does not follow.
    defaults      values that `transformers` uses for entries that a config.json of the family may
                  lack.
    written       entries of a config.json besides the fields of `QwenConfig`, without which
                  `transformers` would compute something else.
    has_experts   whether the layers have experts (MoE) instead of one MLP.
    other_tensors  entries of `tensors` that some checkpoints store in another form. A checkpoint
                  that has the first of these names is read, and later exported, in this form.
    window        returns the largest number of tokens that a layer attends to according to
                  config.json, or None. `layer` attends to all tokens, so longer sequences are
                  refused.
    stack         the layers of a family that mixes several kinds of layers; `layer` is None then.
    norm          the norm after the last layer: arithmetic, x [N, E], weight [E], eps -> [N, E].
    norm_initializer  the initializer of that norm's weight.
    scales_embedding  the embedding is multiplied by the square root of its width.
    extra_fields  returns the fields of `QwenConfig` that only this family reads.
    extra_entries  returns the entries of a config.json that only this family has; the second
                  argument holds the entries of the config.json that the model came from.
    flat          returns a config.json with the model's entries at the top level.
    nested        undoes `flat`: (entries of the model, original config.json) -> config.json.
    skipped       name prefixes of tensors that are not read, such as a vision tower. An export
                  copies these tensors from the checkpoint that the model came from.
    exact_names   parameters that an export in bfloat16 leaves in fp32, unless the original
                  checkpoint has them in bfloat16 itself.
    is_exact      `layer` computes only with the functions of its `ForwardPass`, so it supports the
                  exact bits of `model.exact`.
    """

    architecture: str
    layer: Callable[[QwenConfig, nnx.Rngs], Layer] | None
    tensors: Mapping[str, StoredTensor]
    refusals: Callable[[HuggingFaceConfig], Iterator[str]]
    defaults: HuggingFaceConfig = field(default_factory=dict)
    written: HuggingFaceConfig = field(default_factory=dict)
    window: Callable[[HuggingFaceConfig], int | None] = no_limit
    stack: Stack | None = None
    norm: Callable[[Arithmetic, jax.Array, jax.Array, float], jax.Array] = plain_norm
    norm_initializer: Initializer = ONES
    scales_embedding: bool = False
    extra_fields: Callable[[HuggingFaceConfig], JsonObject] = no_fields
    extra_entries: Callable[[QwenConfig, HuggingFaceConfig], JsonObject] = no_entries
    flat: Callable[[HuggingFaceConfig], HuggingFaceConfig] = unchanged
    nested: Callable[[JsonObject, HuggingFaceConfig], JsonObject] = keep_entries
    skipped: tuple[str, ...] = ()
    exact_names: frozenset[str] = frozenset()
    has_experts: bool = False
    other_tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
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


HYBRID_TENSORS = DENSE_TENSORS | {
    "layers.delta_qkv": StoredTensor("model.layers.{}.linear_attn.in_proj_qkv.weight", "linear"),
    "layers.delta_z": StoredTensor("model.layers.{}.linear_attn.in_proj_z.weight", "linear"),
    # One output per head: an adapter would be as large as the weight.
    "layers.delta_b": StoredTensor(
        "model.layers.{}.linear_attn.in_proj_b.weight", "linear", is_adaptable=False
    ),
    "layers.delta_a": StoredTensor(
        "model.layers.{}.linear_attn.in_proj_a.weight", "linear", is_adaptable=False
    ),
    "layers.delta_out": StoredTensor("model.layers.{}.linear_attn.out_proj.weight", "linear"),
    "layers.delta_kernel": StoredTensor("model.layers.{}.linear_attn.conv1d.weight"),
    "layers.delta_decay": StoredTensor("model.layers.{}.linear_attn.A_log"),
    "layers.delta_step_bias": StoredTensor("model.layers.{}.linear_attn.dt_bias"),
    "layers.delta_norm": StoredTensor("model.layers.{}.linear_attn.norm.weight"),
}


MTP_PREFIX = "mtp."

# The head for multi-token prediction: one layer with attention, and what is before and after it.
MTP_TENSORS = {
    "mtp.embedding_norm": StoredTensor("mtp.pre_fc_norm_embedding.weight"),
    "mtp.hidden_norm": StoredTensor("mtp.pre_fc_norm_hidden.weight"),
    "mtp.fc": StoredTensor("mtp.fc.weight", "linear"),
    "mtp.norm": StoredTensor("mtp.norm.weight"),
} | {
    leaf.replace("layers.", MTP_PREFIX): stored._replace(
        name=stored.name.replace("model.layers.{}", "mtp.layers.0")
    )
    for leaf, stored in DENSE_TENSORS.items()
    if leaf.startswith("layers.") and not leaf.endswith("bias")
}
HYBRID_TENSORS |= MTP_TENSORS


GEMMA_TENSORS = DENSE_TENSORS | {
    "layers.attn_out_norm": StoredTensor("model.layers.{}.post_attention_layernorm.weight"),
    "layers.mlp_norm": StoredTensor("model.layers.{}.pre_feedforward_layernorm.weight"),
    "layers.mlp_out_norm": StoredTensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


def below_language_model(
    tensors: Mapping[str, StoredTensor],
    prefix: str = "model.language_model.",
) -> dict[str, StoredTensor]:
    """Returns the table of a checkpoint that holds a vision tower next to its language model."""
    below = {}
    for leaf, stored in tensors.items():
        name = stored.name
        if name.startswith("model."):
            name = f"{prefix}{name.removeprefix('model.')}"
        below[leaf] = stored._replace(name=name)
    return below


def without_mlp(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the table of a family without its dense MLP."""
    mlp_names = ("layers.gate", "layers.up", "layers.down")
    return {leaf: stored for leaf, stored in tensors.items() if leaf not in mlp_names}


ROUTER = {"layers.router": StoredTensor("model.layers.{}.mlp.gate.weight", "router")}

# One tensor per matrix and expert: Qwen3.
SINGLE_EXPERTS = {
    "layers.experts_gate": StoredTensor(
        "model.layers.{}.mlp.experts.{}.gate_proj.weight", "expert"
    ),
    "layers.experts_up": StoredTensor("model.layers.{}.mlp.experts.{}.up_proj.weight", "expert"),
    "layers.experts_down": StoredTensor(
        "model.layers.{}.mlp.experts.{}.down_proj.weight", "expert"
    ),
}

# Two tensors for all experts of a layer: Qwen3.5.
FUSED_EXPERTS = {
    "layers.experts_gate": StoredTensor(
        "model.layers.{}.mlp.experts.gate_up_proj", "experts", part=(0, 2)
    ),
    "layers.experts_up": StoredTensor(
        "model.layers.{}.mlp.experts.gate_up_proj", "experts", part=(1, 2)
    ),
    "layers.experts_down": StoredTensor("model.layers.{}.mlp.experts.down_proj", "experts"),
}

EXPERT_TENSORS = without_mlp(DENSE_TENSORS) | ROUTER | SINGLE_EXPERTS

HYBRID_EXPERT_TENSORS = {
    **without_mlp(HYBRID_TENSORS),
    **ROUTER,
    **FUSED_EXPERTS,
    "layers.shared_gate": StoredTensor(
        "model.layers.{}.mlp.shared_expert.gate_proj.weight", "linear"
    ),
    "layers.shared_up": StoredTensor("model.layers.{}.mlp.shared_expert.up_proj.weight", "linear"),
    "layers.shared_down": StoredTensor(
        "model.layers.{}.mlp.shared_expert.down_proj.weight", "linear"
    ),
    # One output per token: an adapter would be larger than the weight.
    "layers.shared_router": StoredTensor(
        "model.layers.{}.mlp.shared_expert_gate.weight", "linear", is_adaptable=False
    ),
}


def dense_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields the settings that `DenseLayer` would compute differently from `transformers`."""
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
        yield "auto_map: the model needs Python code from its directory, which jzero does not run"


def qwen3_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields `dense_refusals`, and the further settings of Qwen3 that are not supported."""
    yield from dense_refusals(hf_config)
    if hf_config.get("attention_bias"):
        yield "attention_bias=true on qwen3: only false is implemented"
    # jzero would take hidden_size / num_attention_heads, and `transformers` takes 128.
    if hf_config.get("head_dim") is None:
        yield "no head_dim on qwen3: transformers defaults to 128, write the number explicitly"


def qwen3_moe_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields `dense_refusals`, and the settings of Qwen3's MoE layer that are not supported.

    Where head_dim is absent, `transformers` and jzero both use hidden_size / num_attention_heads.
    """
    yield from dense_refusals(hf_config)
    if hf_config.get("attention_bias"):
        yield "attention_bias=true on qwen3_moe: only false is implemented"
    yield from expert_entries.expert_refusals(hf_config)


def llama_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields `dense_refusals`, and the biases that a Llama layer may have."""
    yield from dense_refusals(hf_config)
    for name in ("attention_bias", "mlp_bias"):
        if hf_config.get(name):
            yield f"{name}=true on {hf_config['model_type']}: only false is implemented"


def sliding_window(hf_config: HuggingFaceConfig) -> int | None:
    """Returns `sliding_window`, or None if the window covers all positions of the model."""
    # `schema.problems` may not have checked this config.json yet, so the values can have any type.
    window, positions = hf_config.get("sliding_window"), hf_config.get("max_position_embeddings")
    if not isinstance(window, int) or (isinstance(positions, int) and window >= positions):
        return None
    return window


HYBRID_STACK = Stack(
    layers=hybrid.HybridLayers,
    forward=hybrid.forward,
    layer_numbers=hybrid.layer_numbers,
)

plain_layer = partial(DenseLayer, attention_bias=False, query_key_norm=False)

FAMILIES: dict[str, Family] = {
    "qwen2": Family(  # Qwen2 and Qwen2.5
        architecture="Qwen2ForCausalLM",
        layer=partial(DenseLayer, attention_bias=True, query_key_norm=False),
        tensors=DENSE_TENSORS,
        refusals=dense_refusals,
        written={"use_sliding_window": False},
        is_exact=True,
    ),
    "qwen3": Family(  # the dense models of Qwen3
        architecture="Qwen3ForCausalLM",
        layer=partial(DenseLayer, attention_bias=False, query_key_norm=True),
        tensors=DENSE_TENSORS,
        refusals=qwen3_refusals,
        written={"use_sliding_window": False},
        is_exact=True,
    ),
    "qwen3_moe": Family(  # the MoE models of Qwen3, such as Qwen3-30B-A3B
        architecture="Qwen3MoeForCausalLM",
        layer=ExpertLayer,
        tensors=EXPERT_TENSORS,
        refusals=qwen3_moe_refusals,
        defaults=expert_entries.DEFAULTS,
        # Every layer has experts, and none a dense MLP.
        written={"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
        has_experts=True,
        other_tensors=FUSED_EXPERTS,
        is_exact=True,
    ),
    "llama": Family(  # Llama 1, 2, 3, 3.1, 3.2 and 3.3, and models derived from them
        architecture="LlamaForCausalLM",
        layer=plain_layer,
        tensors=DENSE_TENSORS,
        refusals=llama_refusals,
        defaults={"num_key_value_heads": None},  # as many as query heads
        is_exact=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        layer=plain_layer,
        tensors=DENSE_TENSORS,
        refusals=llama_refusals,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        # Without this entry `transformers` would limit attention to the window of `defaults`.
        written={"sliding_window": None},
        window=sliding_window,
        is_exact=True,
    ),
    "qwen3_5_text": Family(  # Qwen3.5, 3.6 and 3.8, without the vision tower
        architecture="Qwen3_5ForCausalLM",
        layer=None,
        stack=HYBRID_STACK,
        norm=zero_centered_norm,
        norm_initializer=ZEROS,
        tensors=HYBRID_TENSORS,
        refusals=hybrid_config.refusals,
        defaults=hybrid_config.DEFAULTS,
        extra_fields=hybrid_config.extra_fields,
        extra_entries=hybrid_config.extra_entries,
        # The head for multi-token prediction is read only for rollout.draft=mtp (`mtp.py`).
        skipped=(MTP_PREFIX,),
        exact_names=hybrid.EXACT_NAMES,
        is_exact=True,
    ),
}

# The MoE models of Qwen3.5, such as Qwen3.5-35B-A3B.
FAMILIES["qwen3_5_moe_text"] = replace(
    FAMILIES["qwen3_5_text"],
    architecture="Qwen3_5MoeForCausalLM",
    tensors=HYBRID_EXPERT_TENSORS,
    other_tensors=SINGLE_EXPERTS,
    refusals=hybrid_config.refusals_with_experts,
    defaults={**hybrid_config.DEFAULTS, **expert_entries.HYBRID_DEFAULTS},
    has_experts=True,
)


def with_vision(family: Family, architecture: str) -> Family:
    """Returns the family of the same models with a vision tower, the form that the hub has."""
    return replace(
        family,
        architecture=architecture,
        tensors=below_language_model(family.tensors),
        other_tensors=below_language_model(family.other_tensors),
        flat=hybrid_config.flat,
        nested=hybrid_config.nested,
        skipped=(MTP_PREFIX, "model.visual."),
    )


FAMILIES["qwen3_5"] = with_vision(FAMILIES["qwen3_5_text"], "Qwen3_5ForConditionalGeneration")
FAMILIES["qwen3_5_moe"] = with_vision(
    FAMILIES["qwen3_5_moe_text"], "Qwen3_5MoeForConditionalGeneration"
)


FAMILIES["gemma2"] = Family(  # 2B, 9B and 27B
    architecture="Gemma2ForCausalLM",
    layer=partial(gemma.GemmaLayer, query_key_norm=False),
    tensors=GEMMA_TENSORS,
    refusals=gemma.refusals,
    defaults=gemma.GEMMA2_DEFAULTS,
    norm=zero_centered_norm,
    norm_initializer=ZEROS,
    scales_embedding=True,
    is_exact=True,
    extra_fields=gemma.gemma2_fields,
    extra_entries=gemma.gemma2_entries,
)
FAMILIES["gemma3_text"] = replace(  # the text models of Gemma 3: 270M and 1B
    FAMILIES["gemma2"],
    architecture="Gemma3ForCausalLM",
    layer=partial(gemma.GemmaLayer, query_key_norm=True),
    defaults=gemma.GEMMA3_DEFAULTS,
    extra_fields=gemma.gemma3_fields,
    extra_entries=gemma.gemma3_entries,
    flat=gemma.flat,
)
FAMILIES["gemma3"] = replace(  # with a vision tower: 4B, 12B and 27B
    FAMILIES["gemma3_text"],
    architecture="Gemma3ForConditionalGeneration",
    tensors=below_language_model(GEMMA_TENSORS, "language_model.model."),
    nested=hybrid_config.nested,
    skipped=("vision_tower.", "multi_modal_projector."),
)


def with_defaults(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a config.json in which absent entries have the defaults of the family."""
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return {**family.defaults, **family.flat(hf_config)} if family else hf_config


def window_of(hf_config: HuggingFaceConfig) -> int | None:
    """Returns the longest sequence that the attention window allows, or None without a limit."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    return family.window(with_defaults(hf_config)) if family else None


def family_of(model_type: str | None) -> Family:
    """Returns the family of a `model_type`; raises UserError if the table has no such entry."""
    if model_type is None or model_type not in FAMILIES:
        raise UserError(
            f"model_type={shown(repr(model_type))} is not one of {', '.join(FAMILIES)}: choose a "
            "model of these families, or add its family to jzero.model.families.FAMILIES"
        )
    return FAMILIES[model_type]
