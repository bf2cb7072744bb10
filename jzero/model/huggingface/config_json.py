"""config.json of a Hugging Face checkpoint: read into a `QwenConfig`, and written from one."""

from dataclasses import asdict, fields
from typing import Any

from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.families import HuggingFaceConfig, family_of, rope_settings

OUR_OWN = {"value_head"}  # fields of QwenConfig that a config.json does not have
DEFAULT_ROPE_THETA = 10000.0  # of transformers, where config.json names none


def parse_config(hf_config: HuggingFaceConfig) -> QwenConfig:
    """Returns the model that a config.json describes.

    Raises UserError where the model's family is unknown, where the file has a setting that the
    family's layer would silently compute differently, and where an entry is missing.
    """
    family = family_of(hf_config.get("model_type"))
    reasons = list(family.refusals(hf_config))
    if reasons:
        raise UserError(f"config.json has settings that are not implemented: {'; '.join(reasons)}")

    values = dict(hf_config)
    values["rope_theta"] = rope_settings(hf_config).get("rope_theta") or DEFAULT_ROPE_THETA
    values.setdefault("tie_word_embeddings", False)
    if not values.get("head_dim") and "hidden_size" in values and "num_attention_heads" in values:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]

    names = [field.name for field in fields(QwenConfig) if field.name not in OUR_OWN]
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    return QwenConfig(**{name: values[name] for name in names})


def config_json(
    config: QwenConfig, dtype: str, extra: HuggingFaceConfig | None = None
) -> dict[str, Any]:
    """Returns a config.json for `transformers`, as a dict.

    dtype: the type of the checkpoint's tensors, "bfloat16" or "float32".
    extra: entries beside the model's own, such as eos_token_id. The model's own entries win.
    """
    model = {name: value for name, value in asdict(config).items() if name not in OUR_OWN}
    return {
        **(extra or {}),
        **model,
        "architectures": [family_of(config.model_type).architecture],
        "hidden_act": "silu",
        "use_sliding_window": False,
        # transformers 5 reads rope_parameters and dtype, version 4 rope_theta and torch_dtype.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
