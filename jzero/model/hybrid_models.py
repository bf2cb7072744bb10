"""Known models of Qwen3.5, and of what has its architecture: their sizes on the hub."""

from dataclasses import replace

from jzero.model.architecture import ATTENTION, DELTA_NET, DeltaNetConfig, QwenConfig


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
