"""Recipes: every preset is a config of its own that passes the checks."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from settings_by_name import RECIPES, load_recipe

from jzero import algorithms, config
from jzero.config.presets import keep_truncation_rule
from jzero.errors import UserError
from jzero.fields import is_written, kind_of
from jzero.planning.models import architecture
from jzero.problems.problem_sets import Row
from jzero.tasks.math_problems import to_problem
from jzero.training.examples import add_system_prompt, turns_of

PRESETS = [
    (recipe, preset)
    for recipe in RECIPES
    for preset in ("tiny", *load_recipe(recipe).HUB, "tiny,dr_grpo")
]


PRESETS += [("countdown", "tiny-moe"), ("countdown", "tiny-moe,dr_grpo")]


@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_every_preset_is_possible(recipe, preset) -> None:
    settings = load_recipe(recipe).get_config(preset)

    config.validate(settings)

    assert settings.name.startswith(recipe.replace("_", "-"))
    written = json.loads(config.to_json(settings))
    assert written["rollout"]["group_size"] == settings.rollout.group_size
    for setting in config.list_settings(settings):
        # An int where a float belongs could not be changed to 0.5.
        if not setting.parts and not is_written(setting.field):
            assert type(setting.value) is kind_of(setting.field), setting.name


def test_every_recipe_loads_without_jax() -> None:
    """A mistake in a command with a recipe is reported before seconds of imports."""
    script = (
        "import sys; from jzero import main\n"
        "for path in main.recipe_files(): main.load_recipe(f'{path}:tiny')\n"
        "print(len(main.recipe_files()), {'jax', 'transformers', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{len(RECIPES)} set()\n", done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_preset_is_a_new_config_in_each_call(recipe) -> None:
    module = load_recipe(recipe)
    module.get_config("tiny").rollout.num_slots = 0
    assert module.get_config("tiny").rollout.num_slots > 0


@pytest.mark.parametrize("name", algorithms.PRESETS)
def test_an_algorithm_after_the_preset_replaces_that_of_the_recipe(name) -> None:
    settings = load_recipe("countdown").get_config(f"tiny,{name}")
    assert settings.algorithm == algorithms.PRESETS[name]()
    assert settings.name == f"countdown-tiny-{name}"


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("tyni", "no preset 'tyni'.*tiny, qwen2.5-0.5b"),
        ("tiny,gpro", "no algorithm 'gpro'.*grpo, dr_grpo"),
    ],
)
def test_unknown_presets_are_refused_with_the_names_there_are(preset, message) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("countdown").get_config(preset)


def test_the_rule_for_truncated_responses_stays_with_the_recipe() -> None:
    recipe = load_recipe("math").get_config("qwen2.5-math-1.5b").algorithm
    grpo = load_recipe("math").get_config("qwen2.5-math-1.5b,grpo").algorithm

    assert recipe.truncated == algorithms.Fixed()
    assert grpo == replace(algorithms.PRESETS["grpo"](), truncated=algorithms.Fixed())


@pytest.mark.parametrize("name", algorithms.PRESETS)
def test_a_truncated_response_scores_0_with_every_algorithm_of_oat_zero(name: str) -> None:
    algorithm = load_recipe("math").get_config(f"oat-zero-1.5b,{name}").algorithm
    assert algorithms.shape_score(1.0, 3000, True, replace(algorithm, overlong_share=0), 3000) == 0


def test_an_algorithm_with_a_rule_of_its_own_keeps_it() -> None:
    recipe = algorithms.Algorithm(truncated=algorithms.Mask(), truncated_penalty=0.5)
    chosen = algorithms.Algorithm(truncated=algorithms.Fixed(-1.0))
    kept = keep_truncation_rule(recipe, chosen)
    assert (kept.truncated, kept.truncated_penalty) == (algorithms.Fixed(-1.0), 0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_models_of_all_recipes_can_be_planned(recipe: str) -> None:
    module = load_recipe(recipe)
    for preset in module.HUB:
        assert architecture(module.get_config(preset).model.path).num_hidden_layers > 0


def test_gsm8k_is_asked_with_the_prompts_of_its_supervised_examples() -> None:
    """SmolLM2 learns the solutions first, and would have to find them again for other prompts."""
    supervised = load_recipe("sft").get_config("smollm2-135m")
    question, _ = turns_of({"question": "How many?", "answer": "1 + 1 = 2\n#### 2"})
    asked = add_system_prompt([question], supervised.sft.system_prompt)
    for settings in (supervised, load_recipe("gsm8k").get_config("smollm2-135m")):
        problem = to_problem(settings.task, "gsm8k", "0", Row("How many?", "2"))
        assert problem.prompt == asked
