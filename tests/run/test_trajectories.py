"""Files of episodes: the versions of every turn, and which episodes are written."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jzero import config, train
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.trajectories import write_trajectories
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Prompt, Rollout, Turn, grade_of


def episode(number: int) -> Rollout:
    """Returns an episode of two turns: a policy sampled the first, two others the second."""
    #                   prompt  turn 0     reply   turn 1
    sampled = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
    versions = np.array([-1, -1, 3, 3, 3, -1, -1, 4, 5])
    wrong, right = Grade(0.0, False, "wrong value", reply="No."), Grade(1.0, True, "correct")
    turns = (Turn(2, 5, "six", "stop", wrong), Turn(7, 9, "seven", "stop", right))
    return Rollout(
        problem=Problem(f"math/{number}", "math_multiturn", "3 + 4?", {}),
        sample_index=0,
        tokens=Tokens(np.zeros(len(sampled)), sampled=sampled, versions=versions),
        turns=turns,
        grade=right,
    )


def files_after_a_step(workdir: Path, **train_settings: Any) -> list[str]:
    """Logs a step of 6 episodes; returns the names of the trajectory files."""
    workdir.mkdir()
    settings = config.Config(
        rollout=config.RolloutConfig(max_turns=2),
        train=config.TrainConfig(logged_rollouts=2, **train_settings),
    )
    writer = MetricsWriter(workdir, None)
    run = cast(Any, SimpleNamespace(config=settings))
    session = cast(Any, SimpleNamespace(writer=writer, workdir=workdir))
    train.log_rollouts(run, session, [episode(i) for i in range(6)], step=1)
    writer.close()
    assert len((workdir / "samples.jsonl").read_text().splitlines()) == 2
    return sorted(path.name for path in (workdir / "trajectories/3").glob("*.jsonl"))


def test_all_episodes_are_written_only_when_asked(tmp_path: Path) -> None:
    logged = ["math_0.jsonl", "math_1.jsonl"]
    assert files_after_a_step(tmp_path / "logged") == logged
    every = [f"math_{i}.jsonl" for i in range(6)]
    assert files_after_a_step(tmp_path / "all", all_trajectories=True) == every


def test_every_turn_has_the_versions_that_sampled_it(tmp_path: Path) -> None:
    files_after_a_step(tmp_path / "run")

    folder = tmp_path / "run/trajectories/3"
    row = json.loads((folder / "math_0.jsonl").read_text())
    assert (row["version_head"], row["version_tail"]) == (3, 5)
    versions = [(turn["version_head"], turn["version_tail"]) for turn in row["turns"]]
    assert versions == [(3, 3), (4, 5)]
    text = (folder / "math_0.txt").read_text()
    assert "(stop), versions 3 to 3, reward 0, wrong value" in text
    assert "(stop), versions 4 to 5, reward 1, correct" in text


@pytest.mark.parametrize(
    ("reply", "lines"),
    [
        ("No.", ["No."]),
        ([{"role": "user", "content": "Again."}], ["[user] Again."]),
        ([{"role": "tool", "name": "add", "content": "7"}], ["[add] 7"]),
        (
            [{"role": "user", "name": "", "content": "a"}, {"role": "tool", "content": "b"}],
            ["[user] a", "[tool] b"],
        ),
    ],
)
def test_every_form_of_a_reply_is_text_in_the_file(
    tmp_path: Path, reply: Prompt, lines: list[str]
) -> None:
    rollout = episode(0)
    first, second = rollout.turns
    answered = replace(first, grade=replace(grade_of(first), reply=reply))

    write_trajectories(tmp_path, [replace(rollout, turns=(answered, second))])

    text = (tmp_path / "trajectories/3/math_0.txt").read_text()
    assert "\n".join(["--- reply", *lines, "--- turn 2"]) in text
