"""The recipes of open-r1 and of AReaL's agent, besides the values in their tables."""

from settings_by_name import load_recipe, shown_value

from jzero import config
from jzero.problems.prompts import MATH_TEMPLATES
from jzero.rewards import rewards
from jzero.tasks import check_task_settings

# The defaults of realhf/impl/agent/math_multi_turn_agent.py of AReaL.
AREAL = {
    "task.name": "mixed",
    "task.stop_on_success": False,
    "task.turn_reward": "success",
    "task.turn_reward.bias": 0.0,
    "task.turn_reward.scaling": 1.0,
    "task.turn_discount": 1.0,
    "rollout.max_turns": 5,
    "rollout.max_new_tokens": 1024,
    "train.sequence_per_turn": True,
    "train.all_trajectories": True,  # the monitor's files
}


def test_the_agent_on_both_tasks_is_the_asynchronous_run_with_the_agents_defaults() -> None:
    recipe = load_recipe("mixed")
    settings = recipe.get_config("areal-agent-qwen3-1.7b")
    asynchronous = recipe.get_config("areal-async-qwen3-1.7b")
    settings.task.data = "rows.jsonl"  # no set is the recipe's own

    config.validate(settings)
    check_task_settings(settings.task, settings.rollout.max_turns)
    rewards.check_rewards(settings.task.reward)
    assert {name: shown_value(settings, name) for name in AREAL} == AREAL
    assert settings.optimizer == asynchronous.optimizer
    assert settings.algorithm == asynchronous.algorithm
    assert settings.rollout.max_staleness == asynchronous.rollout.max_staleness == 4


def test_a_step_of_open_r1_is_the_published_batch() -> None:
    rollout = load_recipe("open_r1").get_config("qwen2.5-1.5b-instruct").rollout
    gpus, responses_of_a_gpu, accumulated = 8, 16, 4
    assert rollout.num_prompts * rollout.group_size == gpus * responses_of_a_gpu * accumulated


def test_the_recipes_of_february_are_their_published_batches() -> None:
    """One of 8 GPUs samples. A response's KL is a mean over its tokens, as the rest of its loss."""
    recipe = load_recipe("open_r1")
    for preset, accumulated in (
        ("numina-qwen2.5-1.5b-instruct", 16),
        ("numina-r1-distill-qwen-7b", 16),
        ("simple-rl-qwen2.5-math-7b", 8),
    ):
        settings = recipe.get_config(preset)
        config.validate(settings)
        check_task_settings(settings.task, settings.rollout.max_turns)
        rewards.check_rewards(settings.task.reward)
        rollout = settings.rollout
        assert rollout.num_prompts * rollout.group_size == 7 * 2 * accumulated
        assert settings.eval.samples == rollout.group_size
        assert settings.algorithm.kl.weight is None


def test_other_presets_of_several_turns_are_as_they_were() -> None:
    settings = load_recipe("math_multiturn").get_config("qwen2.5-math-7b")
    assert (settings.rollout.max_turns, settings.task.stop_on_success) == (2, True)
    assert not settings.train.sequence_per_turn


def test_the_template_of_the_distilled_models_leaves_the_thoughts_to_the_policy() -> None:
    prompt = MATH_TEMPLATES["r1_distill_tags"].render({"question": "Q?", "instruction": ""})
    assert str(prompt).endswith("<｜User｜>Q?<｜Assistant｜>")
    for tag in ("<think>\n", "\n</think>", "\n<answer>\n", "\n</answer>"):
        assert tag in prompt
