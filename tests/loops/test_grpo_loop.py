"""The page of GRPO: it trains as `jzero.train` does, and it stays one page."""

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from jzero import algorithms
from jzero.algorithms.presets import dapo
from jzero.config import Config
from jzero.errors import UserError
from jzero.loops import grpo_loop, rl

MOST_LINES = 200


def tiny_run() -> Config:
    return tiny.countdown_settings(
        algorithm=vars(algorithms.grpo()),
        optimizer={"lr": 1e-2},
        train={"steps": 4},
        eval={"problems": 0},
    )


@pytest.mark.thorough  # two whole runs
@pytest.mark.usefixtures("quick_runs", "explicit_transfers")
def test_rewards_equal_those_of_the_training_loop(tmp_path: Path) -> None:
    page = grpo_loop.grpo(tiny_run())
    rl.train(tiny_run(), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    loop = [json.loads(line)["reward/mean"] for line in lines]
    assert page == loop
    assert len(set(page)) > 1  # the policy changes


def test_advantages_are_deviations_in_units_of_the_standard_deviation() -> None:
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [0.1, 0.1, 0.1, 0.1], [3.0, 0.5, 1.0, 2.0]])
    advantages = grpo_loop.group_advantages(rewards)
    expected = [
        [(r - np.mean(group)) / (np.std(group, ddof=1) + 1e-6) for r in group] for group in rewards
    ]
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-9)
    assert not advantages[1].any()  # exactly 0


def test_recipe_with_other_parts_is_refused() -> None:
    config = replace(tiny_run(), algorithm=dapo())
    with pytest.raises(UserError, match="set algorithm=grpo, or use python -m jzero.main"):
        grpo_loop.grpo(config)


def test_loop_is_one_page() -> None:
    assert len(Path(grpo_loop.__file__).read_text().splitlines()) <= MOST_LINES


def test_readme_shows_the_loop_as_it_is() -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    section = readme.read_text().split("## GRPO on one page")[1]
    excerpt = section.split("```python\n")[1].split("```")[0]
    page = Path(grpo_loop.__file__).read_text()
    assert textwrap.indent(excerpt, " " * 8) in page
