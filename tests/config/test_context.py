"""No run may have sequences that are longer than its model: it is refused before anything loads."""

import json
from pathlib import Path

import pytest
from settings_by_name import RECIPES, load_recipe

from jzero import config
from jzero.commands import evaluate
from jzero.config import context_mistakes
from jzero.errors import UserError
from jzero.model import qwen, tokenizer
from jzero.model.base_model import BaseModel, read_base_model
from jzero.setup import check_context

MODEL = qwen.QwenConfig("mistral", 112, 64, 96, 2, 4, 2, 16, False, 10000.0, 1e-5)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Returns a directory with nothing of a model but a config.json, of 4096 positions."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return str(tmp_path)


def settings(model: str, **rollout: int) -> config.Config:
    return config.Config(
        model=config.ModelConfig(path=model), rollout=config.RolloutConfig(**rollout)
    )


def test_an_episode_as_long_as_the_model_is_fine(model: str) -> None:
    config.validate(settings(model, max_prompt_tokens=1096, max_new_tokens=3000))


def test_an_evaluation_longer_than_the_model_is_refused(model: str) -> None:
    values = settings(model, max_prompt_tokens=1096, max_new_tokens=1000)
    values.eval.max_new_tokens = 3000
    config.validate(values)

    values.eval.max_new_tokens = 3001
    message = "eval.max_new_tokens=3001 makes sequences of 4097 tokens.*lower eval.max_new_tokens"
    with pytest.raises(UserError, match=message):
        config.validate(values)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"max_prompt_tokens": 1096, "max_new_tokens": 3001},
            "make sequences of 4097 tokens, and .* has max_position_embeddings=4096: "
            "set rollout.max_new_tokens=3000 ",
        ),
        (
            {"max_prompt_tokens": 96, "max_new_tokens": 2000, "max_turns": 3},
            "make sequences of 6224 tokens.*set rollout.max_episode_tokens=4096",
        ),
        (
            {"max_prompt_tokens": 5000, "max_new_tokens": 10},
            "lower rollout.max_prompt_tokens and rollout.max_new_tokens",
        ),
        ({"max_new_tokens": 8000}, "YaRN would stretch its positions to 8256"),
        ({"max_new_tokens": 8000}, "model.max_position_embeddings=8256 allows them without"),
    ],
)
def test_a_longer_episode_is_refused_with_what_to_do(
    model: str, rollout: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config.validate(settings(model, **rollout))


def test_what_the_message_says_helps(model: str) -> None:
    multi_turn = {"max_prompt_tokens": 96, "max_new_tokens": 2000, "max_turns": 3}
    config.validate(settings(model, **multi_turn, max_episode_tokens=4096))
    stretched = settings(model, max_new_tokens=8000)
    stretched.model.max_position_embeddings = 8256
    config.validate(stretched)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 99.0}},
    ],
)
def test_yarn_multiplies_the_positions_that_a_model_was_first_trained_with(
    rope: dict[str, object], tmp_path: Path
) -> None:
    entries = {"max_position_embeddings": 2048} | rope
    (tmp_path / "config.json").write_text(json.dumps(entries))
    positions = 2048 if "llama3" in str(rope) else 4096

    config.validate(settings(str(tmp_path), max_prompt_tokens=48, max_new_tokens=positions - 48))
    with pytest.raises(UserError, match=f"max_position_embeddings={positions}"):
        config.validate(settings(str(tmp_path), max_prompt_tokens=48, max_new_tokens=positions))


def test_a_sequence_beyond_the_window_is_refused_in_words(tmp_path: Path) -> None:
    entries = {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
    base = BaseModel(tmp_path, MODEL, entries, tokenizer.countdown())
    fits = settings(str(tmp_path), max_prompt_tokens=96, max_new_tokens=4000)
    check_context(fits, base)

    fits.rollout.max_new_tokens = 4001
    fits.model.max_position_embeddings = 8192  # which goes beyond positions, and not a window
    with pytest.raises(
        UserError, match="sliding_window=4096, and jzero always attends to all"
    ) as caught:
        check_context(fits, base)
    assert "set rollout.max_new_tokens=4000" in str(caught.value)
    assert "YaRN" not in str(caught.value)


def test_default_lengths_fit_the_window(tmp_path: Path) -> None:
    entries = {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(entries))

    lengths = evaluate.defaults(str(tmp_path)).rollout

    assert lengths.max_prompt_tokens + lengths.max_new_tokens == 4096


def test_examples_of_fine_tuning_are_no_longer_than_the_model(model: str) -> None:
    long_rollouts = settings(model, max_new_tokens=8000)  # nothing is sampled
    long_rollouts.sft = config.Sft(data="traces.jsonl", pack_length=4096)
    config.validate(long_rollouts)

    long_rollouts.sft = config.Sft(data="traces.jsonl", pack_length=8192)
    with pytest.raises(UserError, match="set sft.pack_length=4096"):
        config.validate(long_rollouts)

    long_rollouts.sft = config.Sft(data="traces.jsonl", pack_length=4096)
    long_rollouts.eval.suites = ("math500",)  # whose problems are answered
    with pytest.raises(UserError, match="rollout.max_new_tokens=8000"):
        config.validate(long_rollouts)


def test_a_model_from_random_weights_has_the_positions_of_its_architecture() -> None:
    """And not those of the longest episode of the run that trained it."""
    short = config.Config(rollout=config.RolloutConfig(max_prompt_tokens=8, max_new_tokens=8))
    base = read_base_model(short.model)
    assert base.hf_config["max_position_embeddings"] == 32768
    check_context(short, base)
    # So the defaults of evaluate, serve and generate work on what the run exports.
    check_context(evaluate.defaults(), base)

    short.rollout.max_new_tokens = 40000
    with pytest.raises(UserError, match="max_position_embeddings=32768"):
        check_context(short, base)


@pytest.mark.parametrize(
    ("positions", "prompt", "response"),
    [(32768, 2048, 3000), (4096, 1096, 3000), (1024, 256, 768), (192, 48, 144)],
)
def test_default_lengths_fit_the_model(
    positions: int,
    prompt: int,
    response: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(entries))

    defaults = evaluate.defaults(str(tmp_path))

    lengths = defaults.rollout.max_prompt_tokens, defaults.rollout.max_new_tokens
    assert lengths == (prompt, response)
    assert ("positions: the default lengths are" in capsys.readouterr().out) == (positions < 5048)
    defaults.model.path = str(tmp_path)
    config.validate(defaults)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"max_position_embeddings": null}'])
def test_a_model_that_does_not_say_is_not_checked_here(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    config.validate(settings(str(tmp_path), max_new_tokens=10**6))


# max_position_embeddings in the config.json of the models of the recipes.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 32768,
    "Qwen/Qwen2.5-1.5B": 32768,
    "Qwen/Qwen2.5-3B": 32768,
    "Qwen/Qwen2.5-7B": 131072,
    "Qwen/Qwen2.5-Math-1.5B": 4096,
    "Qwen/Qwen2.5-Math-7B": 4096,
    "open-r1/Qwen2.5-Math-7B-RoPE-300k": 32768,
    "Qwen/Qwen2.5-0.5B-Instruct": 32768,
    "Qwen/Qwen2.5-1.5B-Instruct": 32768,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 131072,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 131072,
    "lkevinzc/rho-1b-sft-GSM8K": 2048,
    "lkevinzc/Llama-3.2-3B-NuminaQA": 131072,
    "Qwen/Qwen3-8B": 40960,
    "Qwen/Qwen3-4B": 40960,
    "Qwen/Qwen3-1.7B": 40960,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 8192,
    "google/gemma-3-270m": 32768,
    "Qwen/Qwen3-0.6B": 40960,
    "google/gemma-3-1b-pt": 32768,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_fit_their_models(recipe: str) -> None:
    module = load_recipe(recipe)
    for preset in module.HUB:
        preset_settings = module.get_config(preset)
        positions = PUBLISHED[preset_settings.model.path]
        assert list(context_mistakes(preset_settings, positions)) == [], preset
