"""The page of GRPO: it trains as `jzero.train` does, and it stays one page."""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs
import tiny
from servers import free_port

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


# A question of someone who has not seen the page, and the words of the page that answer it.
ANSWERS = {
    "where does the noise come from": "The noise of a token is a function of `key`",
    "what is detached": "old_logps = jax.lax.stop_gradient(logps)",
    "which numbers are constants": "Advantages and weights are constants.",
    "what is an advantage normalized by": "with mean and std over each group of G.",
    "what is a token normalized by": "1 / (N |o_i|)",
    "where would a KL term go": "batch.weights * (-gain + beta * kl)",
    "which tokens have a gradient": "the end of the answer included, has the weight",
    "which answers have no gradient": "Answers whose advantage is 0 have no gradient",
    "what is on the host": "token weights are on the host, as NumPy arrays.",
    "which weights sampled the rollouts": "with the weights that it then updates",
    "where does the length of an answer enter": "the length bias of GRPO (arXiv:2503.20783)",
    "what is done with a group that is all right": "A group of equal rewards has the advantage 0",
    "what is done if all groups are": "only the optimizer's moments make the step",
    "how is the reward changed": "task.reward.functions: `module:function` adds one of your own",
    "what changes for rollouts of older weights": "batch.sampler_logps has the log-probabilities",
    "where would a reference's log-probabilities be set": "would set like the advantages",
    "at which temperature are log-probabilities": "the policy at rollout.temperature",
    "what clips the gradient": "It clips the gradient at optimizer.clip_norm",
    "what is fp32": "log-probabilities and gradients are fp32.",
    "what happens with truncated answers": "is graded and trained like the others.",
    "what is pi_old": "pi_old is the policy before this update, a constant.",
    "what changes for two hosts": "From here on all hosts have all rollouts and do the same",
    "what is donated": "one jitted program, which donates the old state.",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_page_answers_a_question(question: str) -> None:
    lines = Path(grpo_loop.__file__).read_text().splitlines()
    text = " ".join(line.strip().removeprefix("# ") for line in lines)
    assert ANSWERS[question] in text


def test_two_hosts_print_the_rewards_of_one(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jzero.loops.grpo_loop", *runs.RUN]
    command += ["--config.train.steps=3", "--config.warm_start.steps=10"]

    def launch(devices: int, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, *flags],
            cwd=runs.ROOT,
            env=environment | {"JAX_NUM_CPU_DEVICES": str(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rewards(out: str) -> list[str]:
        return re.findall(r"reward (\S+),", out)

    one, _ = runs.finish(launch(2))
    joining = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    hosts = [launch(1, *joining, f"--process_id={number}") for number in range(2)]
    printed = [rewards(runs.finish(host)[0]) for host in hosts]

    assert len(rewards(one)) == 3
    assert printed == [rewards(one)] * 2


def test_loop_is_one_page() -> None:
    assert len(Path(grpo_loop.__file__).read_text().splitlines()) <= MOST_LINES


def test_readme_shows_the_loop_as_it_is() -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    section = readme.read_text().split("## GRPO on one page")[1]
    excerpt = section.split("```python\n")[1].split("```")[0]
    page = Path(grpo_loop.__file__).read_text()
    assert textwrap.indent(excerpt, " " * 8) in page
