"""config.json of Qwen3.5: reads and writes the entries that only this family has.

A checkpoint with a vision tower has the language model's entries below `text_config`
(model_type=qwen3_5); a checkpoint without one has them at the top level (qwen3_5_text). `flat`
converts the first form into the second, so all other code reads one format. MoE models are
qwen3_5_moe and qwen3_5_moe_text; `expert_entries.py` reads their entries about experts.
"""

from collections.abc import Iterator, Mapping

from jzero.errors import shown
from jzero.files import JsonObject
from jzero.model.architecture import ATTENTION, DELTA_NET, DeltaNetConfig, QwenConfig
from jzero.model.expert_entries import expert_refusals
from jzero.model.rope_entries import HuggingFaceConfig, read_entries, read_rope, rope_refusals

TEXT = "_text"  # suffix of the language model's model_type
SHARE = "partial_rotary_factor"
DEFAULT_SHARE = 0.25
DEFAULT_INTERVAL = 4  # layers from one attention layer to the next
# Entries of rope_parameters about images. For text, the three positions of a token are equal.
IMAGE_ENTRIES = {"mrope_section", "mrope_interleaved"}
NUM_MTP_LAYERS = "mtp_num_hidden_layers"  # of the head for multi-token prediction (`mtp.py`)

SIZES = {  # fields of DeltaNetConfig -> entries of config.json
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
DEFAULTS: HuggingFaceConfig = {  # the defaults of `transformers`
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
}


def flat(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a config.json with the entries of text_config at the top level.

    model_type and tie_word_embeddings keep the values of the complete file.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        return hf_config
    top_level = {name: value for name, value in hf_config.items() if name != "text_config"}
    return {**text, **top_level}


def layer_types(hf_config: HuggingFaceConfig) -> tuple[str, ...]:
    """Returns the kind of every layer, as `transformers` reads them."""
    listed = hf_config.get("layer_types")
    if listed is not None:
        return tuple(listed)
    interval = hf_config.get("full_attention_interval") or DEFAULT_INTERVAL
    numbers = range(1, hf_config["num_hidden_layers"] + 1)
    return tuple(DELTA_NET if number % interval else ATTENTION for number in numbers)


def rotated_share(hf_config: HuggingFaceConfig) -> float:
    """Returns the share of a head's dimensions that RoPE rotates."""
    share = read_entries(hf_config).get(SHARE, hf_config.get(SHARE, DEFAULT_SHARE))
    # With null, transformers does not know a share, and rotates the complete head.
    return 1.0 if share is None else float(share)


def extra_fields(hf_config: HuggingFaceConfig) -> JsonObject:
    """Returns the fields of `QwenConfig` that only a hybrid has."""
    sizes = {name: hf_config[entry] for name, entry in SIZES.items()}
    return {
        "layer_types": layer_types(hf_config),
        "delta_net": DeltaNetConfig(**sizes),
        "partial_rotary_factor": rotated_share(hf_config),
    }


def extra_entries(config: QwenConfig, extra: HuggingFaceConfig) -> JsonObject:
    """Returns the entries of config.json that only a hybrid has, with image entries of `extra`."""
    assert config.delta_net is not None and config.layer_types is not None
    sizes = {entry: getattr(config.delta_net, name) for name, entry in SIZES.items()}
    old_rope = read_entries(extra)
    image_entries = {name: value for name, value in old_rope.items() if name in IMAGE_ENTRIES}
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        SHARE: config.partial_rotary_factor,
        **image_entries,
    }
    entries = {
        **sizes,
        "layer_types": list(config.layer_types),
        "rope_parameters": rope,
        # transformers would read the original's first.
        "rope_scaling": None,
    }
    # Without the head, the entry of the original file remains, as its tensors do.
    return {**entries, NUM_MTP_LAYERS: 1} if config.mtp else entries


def nested(entries: JsonObject, extra: HuggingFaceConfig) -> JsonObject:
    """Undoes `flat`: returns the file `extra` with the entries of the language model replaced.

    Entries that were below text_config are written there again.
    """
    text = extra.get("text_config")
    if not isinstance(text, Mapping):
        return entries
    # Entries at the top level of the original file stay there, with the values of the model.
    top = {name: entries.get(name, value) for name, value in extra.items()}
    for name in ("architectures", "model_type", "dtype", "torch_dtype", "eos_token_id"):
        if name in entries:
            top[name] = entries[name]
    top["tie_word_embeddings"] = entries["tie_word_embeddings"]
    # Entries that the original file has only at the top level are not repeated below text_config,
    # except eos_token_id.
    only_top = {"architectures", "torch_dtype", *(extra.keys() - text.keys() - {"eos_token_id"})}
    below = {name: value for name, value in entries.items() if name not in only_top}
    top["text_config"] = {**text, **below, "model_type": entries["model_type"] + TEXT}
    return top


def refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields the settings that the layers of `hybrid.py` would silently compute differently."""
    # A hybrid rotates only a part of each head, and may have RoPE entries about images.
    yield from rope_refusals(without_hybrid_rope(hf_config))
    if hf_config.get("hidden_act") not in (None, "silu"):
        yield f"hidden_act={shown(hf_config['hidden_act'])}: only silu is implemented"
    if hf_config.get("attention_bias"):
        yield "attention_bias=true on qwen3_5: only false is implemented"
    if hf_config.get("attn_output_gate") is False:
        yield "attn_output_gate=false: attention has a gate on its output here"
    if (kind := read_rope(hf_config).kind) != "default":
        yield f"rope_type={shown(kind)} on qwen3_5: only default is implemented"
    kinds = set(layer_types(hf_config))
    if other := kinds - {ATTENTION, DELTA_NET}:
        yield (
            f"layer_types with {shown(min(other))}: only {ATTENTION} and {DELTA_NET} are "
            "implemented"
        )
    elif kinds != {ATTENTION, DELTA_NET}:
        place = "layer_types"
        if hf_config.get(place) is None:
            place = f"full_attention_interval, {hf_config['num_hidden_layers']} num_hidden_layers"
        yield f"{place} with only {shown(min(kinds))}: a hybrid has both kinds of layer"
    if hf_config.get("quantization_config"):
        yield "quantization_config: load the unquantized checkpoint"
    if hf_config.get("auto_map"):
        yield "auto_map: the model needs Python code from its directory, which jzero does not run"
    # Every key head is repeated for the same number of value heads.
    key_heads, value_heads = (
        hf_config[SIZES[name]] for name in ("num_key_heads", "num_value_heads")
    )
    if value_heads % key_heads:
        yield f"linear_num_key_heads={key_heads} does not divide {value_heads} value heads"
    # RoPE rotates pairs of dimensions.
    rotated = hf_config["head_dim"] * rotated_share(hf_config)
    if rotated % 2 or not 0 < rotated <= hf_config["head_dim"]:
        yield f"{SHARE}={rotated_share(hf_config)} of head_dim={hf_config['head_dim']}: no pairs"


def refusals_with_experts(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields `refusals`, and the settings that the experts would compute differently."""
    yield from refusals(hf_config)
    yield from expert_refusals(hf_config)


def without_hybrid_rope(hf_config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Returns a config.json without the RoPE entries that only hybrids support."""
    entries = {name: value for name, value in hf_config.items() if name != SHARE}
    for place in ("rope_parameters", "rope_scaling"):
        rope = entries.get(place)
        if isinstance(rope, Mapping):
            hybrid_entries = IMAGE_ENTRIES | {SHARE}
            entries[place] = {
                name: value for name, value in rope.items() if name not in hybrid_entries
            }
    return entries
