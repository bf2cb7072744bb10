"""The entries of a config.json that jzero reads: their types and ranges, and which are required.

`problems` validates a complete config.json before any entry is used. The limits are far beyond any
model; they prevent a damaged number from allocating an array of terabytes.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jzero.errors import shown
from jzero.model.families import HuggingFaceConfig
from jzero.model.gemma import LOCAL_ROPE

Kind = Literal["whole number", "number", "true or false", "text", "object", "list of texts"]
WITH_ARTICLES = {
    "whole number": "a whole number",
    "number": "a number",
    "object": "an object",
    "list of texts": "a list of texts",
}


class Entry(NamedTuple):
    """The type and range of an entry of config.json.

    is_required  the entry must be present. Every other entry may also be null, which means the same
                 as absent.
    """

    kind: Kind
    is_required: bool = False
    lowest: float = -math.inf
    highest: float = math.inf


ENTRIES = {
    "model_type": Entry("text", True),
    "vocab_size": Entry("whole number", True, 1, 2**24),
    "hidden_size": Entry("whole number", True, 1, 2**18),
    "intermediate_size": Entry("whole number", True, 1, 2**20),
    "num_hidden_layers": Entry("whole number", True, 1, 1024),
    "num_attention_heads": Entry("whole number", True, 1, 4096),
    # For Qwen, `transformers` defaults to 32 if the entry is absent, and to num_attention_heads if
    # it is null. Other families have their default in `Family.defaults`.
    "num_key_value_heads": Entry("whole number", False, 1, 4096),
    "head_dim": Entry("whole number", False, 2, 4096),
    "rms_norm_eps": Entry("number", True, 0, 1),
    "rope_theta": Entry("number", False, 1, 1e15),
    "rope_parameters": Entry("object"),
    "rope_scaling": Entry("object"),
    "partial_rotary_factor": Entry("number"),
    "tie_word_embeddings": Entry("true or false"),
    "attention_bias": Entry("true or false"),
    "mlp_bias": Entry("true or false"),
    "num_experts": Entry("whole number", False, 0, 2**16),
    "num_local_experts": Entry("whole number", False, 0, 2**16),
    "num_experts_per_tok": Entry("whole number", False, 0, 2**16),
    "moe_intermediate_size": Entry("whole number", False, 1, 2**20),
    "shared_expert_intermediate_size": Entry("whole number", False, 0, 2**20),
    "norm_topk_prob": Entry("true or false"),
    "decoder_sparse_step": Entry("whole number", False, 0, 2**16),
    "hidden_act": Entry("text"),
    "hidden_activation": Entry("text"),
    "query_pre_attn_scalar": Entry("whole number", False, 1, 2**20),
    "rope_local_base_freq": Entry("number", False, 1, 1e15),
    "attn_logit_softcapping": Entry("number", False, 0, 1e9),
    "final_logit_softcapping": Entry("number", False, 0, 1e9),
    "use_bidirectional_attention": Entry("true or false"),
    "sliding_window_pattern": Entry("whole number", False, 1, 1024),
    "_sliding_window_pattern": Entry("whole number", False, 1, 1024),
    "use_sliding_window": Entry("true or false"),
    "sliding_window": Entry("whole number", False, 0, 2**40),
    "layer_types": Entry("list of texts"),
    "max_position_embeddings": Entry("whole number", False, 1, 2**40),
    "original_max_position_embeddings": Entry("whole number", False, 1, 2**40),
}

ROPE_ENTRIES = {  # entries of rope_parameters and rope_scaling
    "rope_theta": Entry("number", False, 1, 1e15),
    "rope_type": Entry("text"),
    "type": Entry("text"),
    "partial_rotary_factor": Entry("number"),
    "factor": Entry("number", False, 1, 2**20),
    "original_max_position_embeddings": Entry("whole number", False, 1, 2**40),
    # Entries of llama3, in turns of a pair.
    "low_freq_factor": Entry("number", False, 1e-6, 1e6),
    "high_freq_factor": Entry("number", False, 1e-6, 1e6),
    # Entries of yarn. For a beta or a scale of 0, `transformers` uses the default.
    "attention_factor": Entry("number", False, 0, 1e6),
    "beta_fast": Entry("number", False, 0, 1e6),
    "beta_slow": Entry("number", False, 0, 1e6),
    "mscale": Entry("number", False, 0, 1e6),
    "mscale_all_dim": Entry("number", False, 0, 1e6),
    "truncate": Entry("true or false"),
}


def problems(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for every entry of a config.json that is missing or invalid."""
    missing = [name for name, entry in ENTRIES.items() if entry.is_required]
    missing = [name for name in missing if hf_config.get(name) is None]
    # This entry may be null (as many as query heads) but not absent.
    if "num_key_value_heads" not in hf_config:
        missing.append("num_key_value_heads")
    if missing:
        yield f"lacks {', '.join(missing)}"

    yield from wrong_values(hf_config, ENTRIES)
    for name in ("rope_parameters", "rope_scaling", LOCAL_ROPE):
        rope = hf_config.get(name)
        if isinstance(rope, dict):
            for problem in wrong_values(rope, ROPE_ENTRIES):
                yield f"{name}.{problem}"


def wrong_values(values: HuggingFaceConfig, entries: dict[str, Entry]) -> Iterator[str]:
    """Yields a phrase for every value of the wrong type or outside its limits."""
    for name, entry in entries.items():
        value = values.get(name)
        if value is None:
            continue
        if not has_kind(value, entry.kind):
            yield f"{name}={shown(value)} is not {WITH_ARTICLES.get(entry.kind, entry.kind)}"
        elif "number" in entry.kind and not entry.lowest <= value <= entry.highest:
            yield f"{name}={shown(value)} is not between {entry.lowest} and {entry.highest}"


def has_kind(value: object, kind: Kind) -> bool:
    """Returns whether a value of a JSON file has a type."""
    # In Python, true and false are integers, so numbers have to exclude them.
    if kind == "whole number":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if kind == "object":
        return isinstance(value, dict)
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def shape_problems(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for sizes that do not fit each other, in a config.json without `problems`."""
    hidden_size, num_heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    num_kv_heads = hf_config["num_key_value_heads"] or num_heads
    if num_heads % num_kv_heads:
        yield f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}"
    # Without head_dim, the hidden size is divided among the query heads.
    head_dim = hf_config.get("head_dim")
    if head_dim is None and hidden_size % num_heads:
        yield f"num_attention_heads={num_heads} does not divide {hidden_size=}, and no head_dim"
    elif (head_dim or hidden_size // num_heads) % 2:
        yield f"head_dim={head_dim or hidden_size // num_heads} is odd: rotation takes pairs"
    num_layers, layer_types = hf_config["num_hidden_layers"], hf_config.get("layer_types")
    if layer_types is not None and len(layer_types) != num_layers:
        yield f"layer_types has {len(layer_types)} entries, num_hidden_layers={num_layers}"
