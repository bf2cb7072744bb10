"""The entries of config.json about experts (MoE): reads them into a `QwenConfig` and writes them.

For Qwen3, `transformers` 5 writes the number of experts as `num_local_experts`; version 4 and the
hub write `num_experts`. Both names are read and written. Qwen3.5 has only `num_experts`, and no
`norm_topk_prob`: it always divides the weights of a token's experts by their sum.
"""

from collections.abc import Iterator

from jzero.errors import shown
from jzero.files import JsonObject
from jzero.model.architecture import EXPERT_FIELDS, QwenConfig
from jzero.model.rope_entries import HuggingFaceConfig

# The defaults of `transformers` for entries that a qwen3_moe config.json lacks.
DEFAULTS: HuggingFaceConfig = {
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_key_value_heads": 4,
}
NUM_EXPERTS = 128  # the default of num_experts and num_local_experts
# The defaults for a qwen3_5_moe. It has no dense MLP, so its intermediate_size is never read.
HYBRID_DEFAULTS: HuggingFaceConfig = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
}


def read_num_experts(hf_config: HuggingFaceConfig) -> int:
    """Returns the number of experts of a layer, from either of its two entries."""
    for name in ("num_experts", "num_local_experts"):
        if hf_config.get(name) is not None:
            return hf_config[name]
    return NUM_EXPERTS


def expert_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields a phrase for every setting of experts that `ExpertLayer` does not support."""
    names = ("num_experts", "num_local_experts")
    numbers = {hf_config[name] for name in names if hf_config.get(name) is not None}
    if len(numbers) > 1:
        yield (
            f"num_experts={hf_config['num_experts']} and "
            f"num_local_experts={hf_config['num_local_experts']}: both are the number of experts, "
            "remove one of them"
        )
        return
    # The two names agree from here on.
    num_experts, num_chosen = read_num_experts(hf_config), hf_config["num_experts_per_tok"]
    if num_experts < 1:
        dense = hf_config["model_type"].replace("_moe", "")
        yield f"num_experts={num_experts}: such a model is dense, its model_type is {dense}"
    elif not 1 <= num_chosen <= num_experts:
        yield f"num_experts_per_tok={num_chosen} is not between 1 and num_experts={num_experts}"
    if hf_config["model_type"].startswith("qwen3_5"):
        yield from shared_expert_refusals(hf_config)
    # Layers with a dense MLP between the MoE layers are not implemented.
    if hf_config.get("mlp_only_layers"):
        yield (
            f"mlp_only_layers={shown(hf_config['mlp_only_layers'])}: a model whose layers are "
            "partly dense is not implemented, only experts in every layer are"
        )
    step = hf_config.get("decoder_sparse_step")
    if step is not None and step != 1:
        yield f"decoder_sparse_step={shown(step)}: only 1, experts in every layer, is implemented"


def shared_expert_refusals(hf_config: HuggingFaceConfig) -> Iterator[str]:
    """Yields the settings of shared experts that Qwen3.5 cannot have."""
    if not hf_config.get("shared_expert_intermediate_size"):
        yield (
            "shared_expert_intermediate_size=0: Qwen3.5 requires a shared MLP, which every token "
            "goes to"
        )
    if not hf_config["norm_topk_prob"]:
        yield "norm_topk_prob=false: Qwen3.5 divides the weights of a token's experts by their sum"


def read_experts(hf_config: HuggingFaceConfig, has_experts: bool) -> JsonObject:
    """Returns the fields of `QwenConfig` about experts; empty for a dense family."""
    if not has_experts:
        return {}
    return {
        "num_experts": read_num_experts(hf_config),
        "num_experts_per_tok": hf_config["num_experts_per_tok"],
        "moe_intermediate_size": hf_config["moe_intermediate_size"],
        "norm_topk_prob": bool(hf_config["norm_topk_prob"]),
        "shared_expert_intermediate_size": hf_config.get("shared_expert_intermediate_size") or 0,
    }


def write_experts(config: QwenConfig) -> HuggingFaceConfig:
    """Returns the entries of config.json about experts; empty for a dense model."""
    if not config.num_experts:
        return {}
    entries = {name: getattr(config, name) for name in EXPERT_FIELDS}
    if config.shared_expert_intermediate_size:
        # Qwen3.5's config.json has no norm_topk_prob, and Qwen3 has no shared MLP.
        del entries["norm_topk_prob"]
        return entries
    del entries["shared_expert_intermediate_size"]
    return entries | {"num_local_experts": config.num_experts}
