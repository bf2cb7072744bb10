"""Shared parts of the recipes: models on the hub, tiny models, adapters, choice of a preset."""

from collections.abc import Callable, Collection
from dataclasses import replace

from jzero import algorithms, terminal
from jzero.config.architecture import tiny_arch
from jzero.config.schema import Config, ModelConfig
from jzero.errors import UserError

# Preset -> hub id.
QWEN25_HUB_IDS = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
}

# Presets that train an adapter on a frozen model, on one device: `with_adapter`.
QWEN3_ADAPTER_HUB_IDS = {
    "qwen3-8b-lora-int8": "Qwen/Qwen3-8B",
    "qwen3-4b-lora": "Qwen/Qwen3-4B",
    "qwen3-1.7b-lora": "Qwen/Qwen3-1.7B",
}

# The presets with -lora train an adapter, the others the whole model.
GEMMA3_HUB_IDS = {
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-1b-lora": "google/gemma-3-1b-pt",
    "gemma-3-270m": "google/gemma-3-270m",
}

# Presets of a recipe, in the order in which the default for an accelerator is chosen. An adapter on
# a larger model can learn tasks that a small model cannot. Presets with an int8 base are never
# chosen by default.
QWEN_LARGEST_FIRST = (
    "qwen2.5-7b",
    "qwen2.5-3b",
    "qwen2.5-1.5b",
    "qwen3-4b-lora",
    "qwen3-1.7b-lora",
    "qwen2.5-0.5b",
)

# An adapter of this rank learns RL tasks as well as full fine-tuning, with a learning rate that is
# this many times larger (Schulman et al., LoRA Without Regret, 2025).
ADAPTER_RANK = 32
ADAPTER_LR_FACTOR = 10


def tiny_model() -> ModelConfig:
    """Returns a model of 2 layers of width 64, from random weights, for recipes on a laptop."""
    return ModelConfig(
        arch=tiny_arch(hidden_size=64, intermediate_size=256, num_hidden_layers=2, head_dim=16),
        dtype="float32",
        logit_chunk=65536,
    )


def tiny_model_of_qwen_tokens() -> ModelConfig:
    """Returns a model from random weights with the tokenizer and the vocabulary of Qwen2.5.

    Nearly all of its parameters are in the embedding. The model learns nothing: it only shows that
    a recipe runs.
    """
    return ModelConfig(
        tokenizer="Qwen/Qwen2.5-0.5B",
        arch=tiny_arch(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        ),
        dtype="float32",
    )


def add_adapter(config: Config) -> None:
    """Changes a recipe's config to train an adapter on the frozen model, at its learning rate."""
    config.model.adapter.rank = ADAPTER_RANK
    config.optimizer.lr *= ADAPTER_LR_FACTOR


def with_adapter(config: Config, preset: str = "") -> Config:
    """Changes a recipe's config to train an adapter on one device, and returns the config.

    Presets that end with -int8 hold the linear layers of the frozen model in int8.
    """
    add_adapter(config)
    if preset.endswith("-int8"):
        config.model.base = "int8"
    config.rollout.num_prompts = 16  # with more prompts a step would take too long on one device
    # A 4B model fits into 16 GiB with 4 responses decoded at a time, and with microbatches of one
    # row with one response.
    config.rollout.num_slots = 4
    config.train.pack = "longest"
    config.train.packs_per_row = 1
    config.train.microbatch_tokens = (
        config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    )
    return config


def has_adapter(preset: str) -> bool:
    """Returns whether a preset trains an adapter (`with_adapter`)."""
    return preset.endswith(("-lora", "-lora-int8"))


def choose_preset(
    argument: str,
    tiny: Callable[[], Config],
    qwen: Callable[[str], Config],
    hub: Collection[str],
    accelerator: str,
) -> Config:
    """Returns the config for a recipe's argument: `--config configs/countdown.py:tiny,dr_grpo`.

    Args:
        argument: the text after the colon: "", "preset" or "preset,algorithm". The algorithm is a
            key of `algorithms.PRESETS` and replaces the recipe's algorithm, except for the score of
            truncated responses (`keep_truncation_rule`).
        tiny: makes the config of the preset "tiny".
        qwen: makes the config of a preset in `hub`.
        hub: names of the other presets.
        accelerator: the default preset if an accelerator is attached. Otherwise the default is
            "tiny".

    Raises:
        UserError: there is no such preset or algorithm.
    """
    preset, _, algorithm = argument.partition(",")
    if not preset:
        import jax  # not at the top: `jzero.config` is imported by processes without jax

        platform = jax.default_backend()
        preset = "tiny" if platform == "cpu" else accelerator
        terminal.say(f"no preset given and platform {platform} attached: using {preset}")

    names = ("tiny", *hub)
    if preset not in names:
        raise UserError(f"no preset {preset!r} in this recipe; there are {', '.join(names)}")
    config = tiny() if preset == "tiny" else qwen(preset)

    if algorithm:
        if algorithm not in algorithms.PRESETS:
            names = ", ".join(algorithms.PRESETS)
            raise UserError(f"no algorithm {algorithm!r}; there are {names}")
        chosen = algorithms.PRESETS[algorithm]()
        config.algorithm = keep_truncation_rule(config.algorithm, chosen)
        config.name += f"-{algorithm}"
    return config


def keep_truncation_rule(
    recipe: algorithms.Algorithm,
    chosen: algorithms.Algorithm,
) -> algorithms.Algorithm:
    """Returns the chosen algorithm with the recipe's rule for truncated responses.

    A rule that the chosen algorithm sets itself, to other than the default, stays.
    """
    default = algorithms.Algorithm()
    # A value other than the default means that the chosen algorithm sets it.
    if chosen.truncated == default.truncated:
        chosen = replace(chosen, truncated=recipe.truncated)
    if chosen.truncated_penalty == default.truncated_penalty:
        chosen = replace(chosen, truncated_penalty=recipe.truncated_penalty)
    return chosen
