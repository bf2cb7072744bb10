"""The recipes of open-r1 and of AReaL's agent have the values that were published."""

import pytest
from settings_by_name import get, load_recipe

from jzero import config
from jzero.tasks import check_task_settings, rewards
from jzero.tasks.prompts import MATH_TEMPLATES

# recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml of open-r1, and the defaults of TRL 0.18 and
# of transformers for what the file leaves out.
INSTRUCT = {
    "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "task.data": "open-r1/OpenR1-Math-220k",
    "task.problem_column": "problem",
    "task.reward.functions": ("accuracy", "format", "tag_count"),
    "task.reward.weights": (1.0, 1.0, 1.0),
    "rollout.group_size": 16,
    "rollout.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 1024,
    "rollout.temperature": 1.0,
    "optimizer.lr": 2e-5,
    "optimizer.schedule": "cosine",
    "optimizer.min_lr_ratio": 0.0,
    "optimizer.warmup_ratio": 0.1,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.clip_norm": 1.0,
    "optimizer.weight_decay": 0.0,
    "algorithm.name": "trl_018",
    "algorithm.kl_coef": 0.04,
    "train.minibatches": 1,
    "train.seed": 42,
}
# recipes/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml
DISTILLED = INSTRUCT | {
    "model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "rollout.max_new_tokens": 2048,
    "rollout.temperature": 0.7,
    "optimizer.lr": 1e-6,
    "optimizer.min_lr_ratio": 0.1,
}
# The defaults of realhf/impl/agent/math_multi_turn_agent.py of AReaL.
AREAL = {
    "task.name": "math_multiturn",
    "task.stop_on_success": False,
    "task.turn_reward": "success",
    "task.reward_bias": 0.0,
    "task.reward_scaling": 1.0,
    "task.turn_discount": 1.0,
    "rollout.max_turns": 5,
    "rollout.max_new_tokens": 1024,
    "train.sequence_per_turn": True,
}
RECIPES = [
    ("open_r1", "qwen2.5-1.5b-instruct", INSTRUCT),
    ("open_r1", "r1-distill-qwen-1.5b", DISTILLED),
    ("math_multiturn", "areal-qwen2.5-1.5b-instruct", AREAL),
]


@pytest.mark.parametrize(("recipe", "preset", "published"), RECIPES)
def test_a_recipe_has_the_published_values(recipe: str, preset: str, published: dict) -> None:
    settings = load_recipe(recipe).get_config(preset)

    config.validate(settings)
    check_task_settings(settings.task, settings.rollout.max_turns)
    rewards.check_rewards(settings.task.reward)
    assert {name: get(settings, name) for name in published} == published


def test_a_step_of_open_r1_is_the_published_batch() -> None:
    rollout = load_recipe("open_r1").get_config("qwen2.5-1.5b-instruct").rollout
    gpus, responses_of_a_gpu, accumulated = 8, 16, 4
    assert rollout.num_prompts * rollout.group_size == gpus * responses_of_a_gpu * accumulated


def test_other_presets_of_several_turns_are_as_they_were() -> None:
    settings = load_recipe("math_multiturn").get_config("qwen2.5-math-7b")
    assert (settings.rollout.max_turns, settings.task.stop_on_success) == (2, True)
    assert not settings.train.sequence_per_turn


def test_the_template_of_the_distilled_models_leaves_the_thoughts_to_the_policy() -> None:
    prompt = MATH_TEMPLATES["r1_distill_tags"].render({"question": "Q?", "instruction": ""})
    assert str(prompt).endswith("<｜User｜>Q?<｜Assistant｜>")
    for tag in ("<think>\n", "\n</think>", "\n<answer>\n", "\n</answer>"):
        assert tag in prompt
