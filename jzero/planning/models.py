"""The architectures of models that can be planned without a download."""

from dataclasses import replace
from pathlib import Path

from jzero.errors import UserError
from jzero.model import huggingface
from jzero.model.qwen import QwenConfig

# By hub id; the values are those of each model's config.json.
KNOWN_MODELS = {
    "Qwen/Qwen2.5-0.5B": QwenConfig(
        model_type="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen2.5-1.5B": QwenConfig(
        model_type="qwen2",
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen2.5-3B": QwenConfig(
        model_type="qwen2",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen2.5-7B": QwenConfig(
        model_type="qwen2",
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen2.5-Math-1.5B": QwenConfig(
        model_type="qwen2",
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen2.5-Math-7B": QwenConfig(
        model_type="qwen2",
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen3-0.6B": QwenConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen3-1.7B": QwenConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen3-4B": QwenConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "Qwen/Qwen3-8B": QwenConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
}
# The base of OpenR1-Distill-7B: the architecture of Qwen2.5-Math-7B with another base of RoPE.
KNOWN_MODELS["open-r1/Qwen2.5-Math-7B-RoPE-300k"] = replace(
    KNOWN_MODELS["Qwen/Qwen2.5-Math-7B"], rope_theta=3e5
)
KNOWN_MODELS["Qwen/Qwen2.5-1.5B-Instruct"] = KNOWN_MODELS["Qwen/Qwen2.5-1.5B"]
# A descendant of Qwen2.5-Math-1.5B with an output head of its own.
KNOWN_MODELS["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"] = replace(
    KNOWN_MODELS["Qwen/Qwen2.5-Math-1.5B"], tie_word_embeddings=False
)


def short_names() -> list[str]:
    """Returns the names of the known models without their organization: "Qwen2.5-3B"."""
    return [hub_id.split("/")[1] for hub_id in KNOWN_MODELS]


def hub_id_of(name: str) -> str:
    """Returns the hub id of a known model: of "qwen2.5-3b", "Qwen2.5-3B" or "Qwen/Qwen2.5-3B".

    Raises:
        UserError: There is no known model of that name.
    """
    for hub_id in KNOWN_MODELS:
        if name.lower() in (hub_id.lower(), hub_id.split("/")[1].lower()):
            return hub_id
    raise UserError(f"no known model {name!r}; there are {', '.join(short_names())}")


def is_known(path: str) -> bool:
    """Returns whether `architecture` knows the model: a local directory, or one of the table."""
    names = {name.lower() for hub_id in KNOWN_MODELS for name in (hub_id, hub_id.split("/")[1])}
    return Path(path).expanduser().is_dir() or path.lower() in names


def architecture(path: str) -> QwenConfig:
    """Returns the architecture of a local model directory, or of a known model.

    Raises:
        UserError: The directory has no config.json that is implemented, or the model is not known.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        model, _ = huggingface.load_config(directory)
        return model
    return KNOWN_MODELS[hub_id_of(path)]
