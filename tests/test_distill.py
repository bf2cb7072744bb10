"""On-policy distillation as whole runs: the recipe, its export and report, and resuming."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
from huggingface_hub import ModelCard
from test_train import exported_weights, reproducible_metrics, tiny_run

from jzero import algorithms, export, report
from jzero.algorithms.presets import distill
from jzero.config import Config, teachers
from jzero.export import Options
from jzero.loops import rl
from jzero.run import history

pytestmark = pytest.mark.usefixtures("quick_runs", "explicit_transfers")


def distillation_run(steps: int, teacher: teachers.Model | teachers.Reference) -> Config:
    config = tiny_run(1, algorithms.grpo())
    config.algorithm = distill()
    config.teacher = teacher
    config.train.steps = steps
    return config


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory, quickly: Callable[[], AbstractContextManager[None]]
) -> str:
    """Returns the export of a run of RL whose model is larger than the student."""
    workdir = tmp_path_factory.mktemp("teacher")
    config = tiny_run(1, algorithms.grpo())
    config.model.arch = config.model.arch.replace("num_hidden_layers=1", "num_hidden_layers=2")
    config.warm_start = replace(config.warm_start, steps=40)
    with quickly():
        return str(rl.train(config, workdir / "run")["export"])


def test_a_student_comes_nearer_to_its_teacher(teacher: str, tmp_path: Path) -> None:
    """And its card and its report say that it was distilled, and from whom."""
    config = distillation_run(20, teachers.Model(path=teacher))
    config.optimizer.lr = 4e-3
    config.train.minibatches = 1
    config.name = "pupil"

    summary = rl.train(config, tmp_path / "run")

    distances = [row["distill/kl"] for row in reproducible_metrics(tmp_path / "run")]
    assert np.mean(distances[-4:]) < 0.8 * np.mean(distances[:4]), distances
    [stage] = history.read_history(Path(summary["export"]))
    assert (stage.kind, stage.teachers) == (history.DISTILLATION, ["export-1"])

    export.run(Options(tmp_path / "run", tmp_path / "out"))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (
        "1. 20 of 20 steps of on-policy distillation from random weights: distill on countdown "
        "with the teacher export-1, after 30 supervised steps on examples of the task."
    ) in card.text
    assert "distillation" in card.data.tags
    assert "reinforcement-learning" not in card.data.tags

    page = report.read_run(tmp_path / "run", 1)
    assert page["training"] == "on-policy distillation, teacher: export-1"


def test_a_run_with_its_first_policy_as_teacher_resumes_to_the_same_numbers(
    tmp_path: Path,
) -> None:
    """A run of rewards and a teacher, behind a prompt of its own, in two optimizer steps."""

    def run(steps: int, workdir: Path) -> None:
        prompt = teachers.Reference(prompt="{target}={prompt}")
        config = distillation_run(steps, prompt)
        config.algorithm = algorithms.PRESETS["distill_grpo"](
            distillation=algorithms.Distillation(coef=1.0)
        )
        config.train.microbatch_tokens = 512  # its prompts make longer rows
        rl.train(config, workdir)

    run(4, tmp_path / "whole")
    run(2, tmp_path / "resumed")
    run(4, tmp_path / "resumed")

    metrics = reproducible_metrics(tmp_path / "whole")
    assert reproducible_metrics(tmp_path / "resumed") == metrics
    assert all(row["distill/kl"] != 0 for row in metrics)
    assert exported_weights(tmp_path / "resumed", 4) == exported_weights(tmp_path / "whole", 4)


def test_the_recipe_runs_from_the_export_of_countdown(teacher: str, tmp_path: Path) -> None:
    from configs import distill as recipe

    config = recipe.get_config("tiny")
    small = distillation_run(1, config.teacher)
    for section in ("model", "rollout", "warm_start", "train", "eval", "task"):
        setattr(config, section, getattr(small, section))
    config.teacher = teachers.Model(path=teacher)

    summary = rl.train(config, tmp_path / "run")

    assert summary["steps"] == 1
    assert json.loads((tmp_path / "run/config.json").read_text())["name"] == "distill-tiny"


def test_an_algorithm_without_a_teacher_turns_the_recipes_teacher_off() -> None:
    from configs import distill as recipe

    assert isinstance(recipe.get_config("tiny").teacher, teachers.Model)
    assert recipe.get_config("tiny,grpo").teacher is None
    assert isinstance(recipe.get_config("tiny,distill_grpo").teacher, teachers.Model)


def test_the_settings_of_a_card_have_no_directory_of_the_teacher(tmp_path: Path) -> None:
    settings = reference.settings(
        algorithm=vars(distill()), teacher={"kind": "model", "path": f"{tmp_path}/teacher"}
    )

    stage = history.stage_of(settings, 3)

    assert stage.teachers == ["teacher"]
    assert str(tmp_path) not in json.dumps(stage.settings)
