"""config.json of a Hugging Face checkpoint: read into a `QwenConfig`, and written from one."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jzero.errors import UserError
from jzero.model.architecture import EXPERT_FIELDS, QwenConfig
from jzero.model.expert_entries import read_experts, write_experts
from jzero.model.families import HuggingFaceConfig, family_of, with_defaults
from jzero.model.gemma import LOCAL_ROPE
from jzero.model.huggingface.schema import problems, shape_problems
from jzero.model.rope_entries import read_rope, write_rope

# Fields of QwenConfig that config.json does not have under the same names. `rope_entries`,
# `expert_entries` and `Family.extra_entries` write the corresponding entries.
HYBRID_FIELDS = ("layer_types", "delta_net", "partial_rotary_factor")
GEMMA_FIELDS = (
    "sliding_window",
    "local_rope_theta",
    "local_rope_scaling",
    "query_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
OMITTED_FIELDS = {
    "value_head",
    "mtp",
    "rope_scaling",
    *HYBRID_FIELDS,
    *GEMMA_FIELDS,
    *EXPERT_FIELDS,
}


def parse_config(hf_config: HuggingFaceConfig, source: str | Path = "config.json") -> QwenConfig:
    """Returns the model that a config.json describes.

    `source` is the file, for messages. Raises UserError if the model's family is unknown, if an
    entry is missing or invalid, or if a setting would silently be computed differently from
    `transformers`.
    """
    hf_config = with_defaults(hf_config)
    # Types and ranges first: the later checks calculate with the entries.
    wrong = list(problems(hf_config))
    if wrong:
        raise UserError(f"{source} {'; '.join(wrong)}: fix the file or download it again")
    try:
        family = family_of(hf_config["model_type"])
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    # Settings that are valid for the family but not supported by its layer here.
    reasons = list(family.refusals(hf_config))
    if reasons:
        raise UserError(f"{source} has settings that are not implemented: {'; '.join(reasons)}")
    wrong = list(shape_problems(hf_config))
    if wrong:
        raise UserError(f"{source}: {'; '.join(wrong)}")

    num_heads = hf_config["num_attention_heads"]
    rope = read_rope(hf_config)
    return QwenConfig(
        model_type=hf_config["model_type"],
        vocab_size=hf_config["vocab_size"],
        hidden_size=hf_config["hidden_size"],
        intermediate_size=hf_config["intermediate_size"],
        num_hidden_layers=hf_config["num_hidden_layers"],
        num_attention_heads=num_heads,
        num_key_value_heads=hf_config["num_key_value_heads"] or num_heads,
        head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // num_heads,
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings")),
        rope_theta=rope.theta,
        rms_norm_eps=float(hf_config["rms_norm_eps"]),
        rope_scaling=rope.scaling,
        **family.extra_fields(hf_config),
        **read_experts(hf_config, family.has_experts),
    )


def config_json(
    config: QwenConfig,
    dtype: str,
    extra: HuggingFaceConfig | None = None,
) -> dict[str, Any]:
    """Returns a config.json for `transformers`, as a dict.

    dtype: the type of the checkpoint's tensors, "bfloat16" or "float32".
    extra: further entries, such as eos_token_id. The entries of the model take precedence.
    """
    model = {name: value for name, value in asdict(config).items() if name not in OMITTED_FIELDS}
    family = family_of(config.model_type)
    extra = extra or {}
    entries = {
        **family.written,
        **with_defaults(extra),
        **model,
        **write_experts(config),
        "architectures": [family.architecture],
        "hidden_act": "silu",
        # transformers 5 reads rope_parameters and dtype; version 4 reads rope_theta, rope_scaling
        # and torch_dtype.
        **write_rope(config.rope_theta, config.rope_scaling),
        "dtype": dtype,
        "torch_dtype": dtype,
        **family.extra_entries(config, with_defaults(extra)),
    }
    entries.pop(LOCAL_ROPE, None)
    return family.nested(entries, extra)
