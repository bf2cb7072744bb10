"""Architectures of models with random weights: the values of the setting `model.arch`.

    model.arch=tiny-qwen3-moe                                    a name in TINY_MODELS
    model.arch=tiny-qwen2(hidden_size=64,num_hidden_layers=2)    the same with other entries
    model.arch.num_hidden_layers=2                               one entry, as a flag
    model.arch=DIRECTORY/config.json                             the architecture of any model

Such models exist for tests and for recipes on a laptop. Their entries have the names of Hugging
Face's config.json. Imports no jax.
"""

import functools
from pathlib import Path

from jzero.errors import UserError, shown
from jzero.fields import Field, build, fields_of, record
from jzero.notation import read_value, read_values

ARCH = "model.arch"


@record
class Architecture:
    """The entries of config.json that describe a model. The defaults make one of 1M parameters."""

    # All families.
    model_type: str = "qwen2"
    """Model family, a key of jzero.model.families.FAMILIES. qwen2 has biases on q, k and v; qwen3
    normalizes q and k instead; llama and mistral do neither; qwen3_5_text mixes gated delta nets
    with attention; gemma2 and gemma3_text have sliding windows; qwen3_moe is qwen3 with experts,
    and qwen3_5_moe_text is qwen3_5_text with experts."""
    hidden_size: int = Field(default=128, ge=1)
    """Width of the residual stream."""
    intermediate_size: int = Field(default=512, ge=1)
    """Width of the MLP's hidden layer."""
    num_hidden_layers: int = Field(default=4, ge=1, le=4096)
    """Number of layers."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_key_value_heads: int = Field(default=2, ge=1)
    """Number of key and value heads, a divisor of num_attention_heads."""
    head_dim: int = Field(default=32, ge=1)
    """Width of one head, an even number."""
    tie_word_embeddings: bool = True
    """Uses the embedding matrix as the output matrix, too."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""

    # Hybrids of attention and gated delta nets: qwen3_5_text and qwen3_5_moe_text.
    full_attention_interval: int = Field(default=4, ge=2)
    """For qwen3_5_text: layers from one attention layer to the next; all others are gated delta
    nets."""
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    """For qwen3_5_text: share of a head that RoPE rotates."""
    linear_num_key_heads: int = Field(default=4, ge=1)
    """For qwen3_5_text: number of query and key heads of a gated delta net."""
    linear_num_value_heads: int = Field(default=4, ge=1)
    """For qwen3_5_text: number of value heads of a gated delta net, a multiple of
    linear_num_key_heads."""
    linear_key_head_dim: int = Field(default=32, ge=1)
    """For qwen3_5_text: width of a query or key head of a gated delta net."""
    linear_value_head_dim: int = Field(default=32, ge=1)
    """For qwen3_5_text: width of a value head of a gated delta net."""
    linear_conv_kernel_dim: int = Field(default=4, ge=2)
    """For qwen3_5_text: tokens that the causal convolution of a gated delta net sees."""

    # Sliding windows: gemma2 and gemma3_text.
    sliding_window: int = 0
    """For gemma2 and gemma3_text: tokens that a layer with a sliding window attends to, with the
    token itself. 0: other families."""
    sliding_window_pattern: int = Field(default=6, ge=1)
    """For gemma2 and gemma3_text: layers from one with full attention to the next; all others have
    a sliding window."""
    rope_local_base_freq: float = 10000.0
    """For gemma3_text: base of the rotary position embedding in layers with a sliding window."""
    attn_logit_softcapping: float = 0.0
    """For gemma2: bound of the scores of attention. 0: no bound."""
    final_logit_softcapping: float = 0.0
    """For gemma2: bound of the logits. 0: no bound."""

    # MoE families: qwen3_moe and qwen3_5_moe_text.
    num_experts: int = Field(default=0, le=2**15 - 1)
    """Number of experts in a layer, for MoE families (qwen3_moe, qwen3_5_moe_text). 0: a dense MLP.
    """
    num_experts_per_tok: int = 0
    """Number of experts that every token is routed to. 0: no experts."""
    moe_intermediate_size: int = 0
    """Width of the hidden layer of one expert. 0: no experts."""
    norm_topk_prob: bool = False
    """Normalizes the router's weights of a token's experts to a sum of 1."""
    shared_expert_intermediate_size: int = 0
    """For qwen3_5_moe_text: width of the shared MLP, which processes every token besides its
    experts. 0: other families."""


# The entries of each model that differ from the defaults of `Architecture`.
TINY_MODELS: dict[str, dict[str, str | int | float | bool]] = {
    "tiny-qwen2": {},
    "tiny-qwen3": {"model_type": "qwen3"},
    "tiny-llama": {"model_type": "llama"},
    "tiny-qwen3.5": {"model_type": "qwen3_5_text"},
    "tiny-gemma2": {
        "model_type": "gemma2",
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "tiny-gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "rope_theta": 1000000.0,
    },
    # Two of the experts are as wide as the MLP of tiny-qwen2, so that a token costs the same.
    "tiny-qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "tiny-qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 256,
    },
}


def config_file(arch: str) -> Path | None:
    """Returns the config.json that `model.arch` names, None if it names a tiny model."""
    return Path(arch).expanduser() if arch.endswith(".json") else None


def tiny_arch(name: str = "tiny-qwen2", **entries: object) -> str:
    """Returns the value of `model.arch` for a tiny model with other entries.

    tiny_arch(hidden_size=64) is "tiny-qwen2(hidden_size=64)".
    """
    arguments = ",".join(f"{key}={value}" for key, value in entries.items())
    return f"{name}({arguments})" if entries else name


@functools.cache
def read_architecture(arch: str) -> Architecture:
    """Returns the architecture of "NAME" or "NAME(entry=value,...)", a tiny model.

    Raises:
        UserError: there is no such tiny model or entry, or a value is wrong.
    """
    name, entries = _split(arch)
    try:
        return build(Architecture, TINY_MODELS[name] | entries)
    except UserError as error:
        raise UserError(f"{ARCH}={shown(arch)}: {error}") from None


def change_entry(arch: str, entry: str, text: str) -> str:
    """Returns the value of `model.arch` with another value of an entry, given as in a flag.

    Raises:
        UserError: `arch` is the path of a config.json, or the text is not a value of the entry.
    """
    if config_file(arch):
        raise UserError(
            f"{ARCH}.{entry}={shown(text)} changes a tiny model, and {ARCH}={shown(arch)} is a "
            "file: change the entry there"
        )
    name, entries = _split(arch)
    value = read_value(f"{ARCH}.{entry}", fields_of(Architecture)[entry], text)
    changed = tiny_arch(name, **entries | {entry: value})
    read_architecture(changed)
    return changed


def _split(arch: str) -> tuple[str, dict[str, object]]:
    """Returns the name of a tiny model, and the entries that are given for it.

    Raises UserError if there is no such tiny model or entry.
    """
    name, bracket, arguments = arch.partition("(")
    if name not in TINY_MODELS:
        raise UserError(
            f"{ARCH}={shown(arch)} is not a tiny model: give one of {', '.join(TINY_MODELS)}, or "
            "the path of a config.json"
        )
    if bracket and not arguments.endswith(")"):
        raise UserError(f"{ARCH}={shown(arch)}: close the bracket")
    try:
        return name, read_values(Architecture, arguments.removesuffix(")"))
    except UserError as error:
        raise UserError(f"{ARCH}={shown(arch)}: {error}") from None
