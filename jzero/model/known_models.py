"""The sizes of known models of every family on the hub, so that planning needs no download.

The values are from each model's config.json. Every entry of `families.py` uses a table of this
module; `planning.models` looks up a model in all of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from jzero.model.architecture import (
    ATTENTION,
    DELTA_NET,
    DeltaNetConfig,
    QwenConfig,
    layers_with_windows,
)
from jzero.model.rope import LinearScaling, Llama3Scaling

KnownModels = Mapping[str, QwenConfig]  # hub id -> architecture

QWEN2_MODELS = {
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
}
# The base model of OpenR1-Distill-7B: Qwen2.5-Math-7B with another rope_theta.
QWEN2_MODELS["open-r1/Qwen2.5-Math-7B-RoPE-300k"] = replace(
    QWEN2_MODELS["Qwen/Qwen2.5-Math-7B"], rope_theta=3e5
)
QWEN2_MODELS["Qwen/Qwen2.5-1.5B-Instruct"] = QWEN2_MODELS["Qwen/Qwen2.5-1.5B"]
# Descendants of Qwen2.5-Math, the smaller one with an untied output head.
QWEN2_MODELS["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"] = replace(
    QWEN2_MODELS["Qwen/Qwen2.5-Math-1.5B"], tie_word_embeddings=False
)
QWEN2_MODELS["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"] = QWEN2_MODELS["Qwen/Qwen2.5-Math-7B"]

QWEN3_MODELS = {
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

QWEN3_MOE_MODELS = {
    "Qwen/Qwen3-30B-A3B": QwenConfig(
        model_type="qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
QWEN3_MOE_MODELS["Qwen/Qwen3-30B-A3B-Base"] = QWEN3_MOE_MODELS["Qwen/Qwen3-30B-A3B"]

LLAMA_3_1_SCALING = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LLAMA_3_2_SCALING = replace(LLAMA_3_1_SCALING, factor=32.0)

LLAMA_MODELS = {
    # A TinyLlama-1.1B with further training: a small Llama 2.
    "microsoft/rho-math-1b-v0.1": QwenConfig(
        model_type="llama",
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    ),
    "meta-llama/Llama-3.2-1B": QwenConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        rope_scaling=LLAMA_3_2_SCALING,
    ),
    "meta-llama/Llama-3.2-3B": QwenConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        rope_scaling=LLAMA_3_2_SCALING,
    ),
    "meta-llama/Llama-3.1-8B": QwenConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        rope_scaling=LLAMA_3_1_SCALING,
    ),
}
LLAMA_MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"] = QwenConfig(
    model_type="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
)
# The starting points of two published runs: configs/gsm8k.py and configs/math.py.
LLAMA_MODELS["lkevinzc/rho-1b-sft-GSM8K"] = LLAMA_MODELS["microsoft/rho-math-1b-v0.1"]
LLAMA_MODELS["lkevinzc/Llama-3.2-3B-NuminaQA"] = LLAMA_MODELS["meta-llama/Llama-3.2-3B"]


def qwen3_5(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    num_value_heads: int,
    tie_word_embeddings: bool,
) -> QwenConfig:
    """Returns a dense model of Qwen3.5: all of them have attention in every fourth layer."""
    return QwenConfig(
        model_type="qwen3_5",
        vocab_size=248_320,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=256,
        tie_word_embeddings=tie_word_embeddings,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        layer_types=(DELTA_NET, DELTA_NET, DELTA_NET, ATTENTION) * (num_hidden_layers // 4),
        delta_net=DeltaNetConfig(
            num_key_heads=16,
            num_value_heads=num_value_heads,
            key_dim=128,
            value_dim=128,
            kernel_size=4,
        ),
        partial_rotary_factor=0.25,
    )


QWEN3_5_MODELS = {
    "Qwen/Qwen3.5-0.8B": qwen3_5(1024, 3584, 24, 8, 2, 16, tie_word_embeddings=True),
    "Qwen/Qwen3.5-2B": qwen3_5(2048, 6144, 24, 8, 2, 16, tie_word_embeddings=True),
    "Qwen/Qwen3.5-4B": qwen3_5(2560, 9216, 32, 16, 4, 32, tie_word_embeddings=True),
    "Qwen/Qwen3.5-9B": qwen3_5(4096, 12_288, 32, 16, 4, 32, tie_word_embeddings=False),
    "Qwen/Qwen3.5-27B": qwen3_5(5120, 17_408, 64, 24, 4, 48, tie_word_embeddings=False),
}
QWEN3_5_MODELS["Qwen/Qwen3.5-9B-Base"] = QWEN3_5_MODELS["Qwen/Qwen3.5-9B"]
QWEN3_5_MODELS["Qwen/Qwen3.6-27B"] = QWEN3_5_MODELS["Qwen/Qwen3.5-27B"]
QWEN3_5_MODELS["Qwen/Qwen3.8-27B"] = QWEN3_5_MODELS["Qwen/Qwen3.5-27B"]

# 40 layers with 256 experts of width 512, of which a token goes to 8, and one MLP of that width.
QWEN3_5_35B_A3B = replace(
    qwen3_5(2048, 512, 40, 16, 2, 32, tie_word_embeddings=False),
    model_type="qwen3_5_moe",
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    norm_topk_prob=True,
    shared_expert_intermediate_size=512,
)
QWEN3_5_MOE_MODELS = {
    "Qwen/Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "Qwen/Qwen3.6-35B-A3B": QWEN3_5_35B_A3B,
}


def gemma2(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    *,
    head_dim: int = 256,
    query_scale: int = 0,
) -> QwenConfig:
    """Returns a model of Gemma 2: every other layer has a window of 4,096 tokens."""
    return QwenConfig(
        model_type="gemma2",
        vocab_size=256_000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        layer_types=layers_with_windows(num_hidden_layers, 2),
        sliding_window=4096,
        query_scale=query_scale,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )


def gemma3(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    *,
    is_text: bool = False,
    head_dim: int = 256,
    query_scale: int = 0,
) -> QwenConfig:
    """Returns a model of Gemma 3: every sixth layer has full attention.

    The text models have a window of 512 tokens, and a context that is not stretched.
    """
    older = gemma2(
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim=head_dim,
        query_scale=query_scale,
    )
    return replace(
        older,
        model_type="gemma3_text" if is_text else "gemma3",
        vocab_size=262_144 if is_text else 262_208,
        rope_theta=1e6,
        rope_scaling=None if is_text else LinearScaling(factor=8.0),
        layer_types=layers_with_windows(num_hidden_layers, 6),
        sliding_window=512 if is_text else 1024,
        local_rope_theta=1e4,
        attn_logit_softcapping=0.0,
        final_logit_softcapping=0.0,
    )


def with_instruct(models: KnownModels) -> KnownModels:
    """Returns the models under their ids, and under those of their instruct models."""
    return {**models, **{f"{name.removesuffix('-pt')}-it": model for name, model in models.items()}}


GEMMA2_MODELS = with_instruct(
    {
        "google/gemma-2-2b": gemma2(2304, 9216, 26, 8, 4),
        "google/gemma-2-9b": gemma2(3584, 14_336, 42, 16, 8),
        "google/gemma-2-27b": gemma2(4608, 36_864, 46, 32, 16, head_dim=128, query_scale=144),
    }
)
GEMMA3_TEXT_MODELS = with_instruct(
    {
        "google/gemma-3-270m": gemma3(640, 2048, 18, 4, 1, is_text=True),
        "google/gemma-3-1b-pt": gemma3(1152, 6912, 26, 4, 1, is_text=True),
    }
)
GEMMA3_MODELS = with_instruct(
    {
        "google/gemma-3-4b-pt": gemma3(2560, 10_240, 34, 8, 4),
        "google/gemma-3-12b-pt": gemma3(3840, 15_360, 48, 16, 8),
        "google/gemma-3-27b-pt": gemma3(5376, 21_504, 62, 32, 16, head_dim=128, query_scale=168),
    }
)
