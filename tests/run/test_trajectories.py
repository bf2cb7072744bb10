"""Files of episodes: the versions of every turn, and which episodes are written."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import servers

from jzero import config
from jzero.files import read_jsonl
from jzero.loops import rl
from jzero.model import tokenizer
from jzero.run import metrics_writer, samples
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.samples import logged_rows
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
        tokens=Tokens(
            np.zeros(len(sampled)),
            sampled=sampled,
            logps=np.where(sampled, -0.25, 0.0).astype(np.float32),
            versions=versions,
        ),
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
    base = SimpleNamespace(tokenizer=tokenizer.load(settings.model.tokenizer))
    run = cast(Any, SimpleNamespace(config=settings, base=base))
    session = cast(Any, SimpleNamespace(write_samples=writer.write_samples, workdir=workdir))
    rl.log_rollouts(run, session, [episode(i) for i in range(6)], step=1)
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

    folder = tmp_path / "trajectories"
    write_trajectories(folder, [replace(rollout, turns=(answered, second))])

    text = (tmp_path / "trajectories/3/math_0.txt").read_text()
    assert "\n".join(["--- reply", *lines, "--- turn 2"]) in text


def test_a_line_of_a_file_may_be_a_turn(tmp_path: Path) -> None:
    rollouts = [episode(0), episode(1)]

    write_trajectories(tmp_path / "lines", rollouts)
    write_trajectories(tmp_path / "turns", rollouts, "turn")

    whole = read_jsonl(tmp_path / "lines/3/math_0.jsonl")
    rows = read_jsonl(tmp_path / "turns/3/math_0.jsonl")
    turns = [(number, turn) for row in whole for number, turn in enumerate(row["turns"], 1)]
    assert len(rows) == len(turns) == sum(row["turns"] for row in rows if row["turn"] == 1)
    for row, (number, turn) in zip(rows, turns, strict=True):
        assert row == row | turn | {"turn": number, "id": "math/0", "prompt": whole[0]["prompt"]}
    texts = [(tmp_path / name / "3/math_0.txt").read_text() for name in ("lines", "turns")]
    assert texts[0] == texts[1]


def test_a_logged_row_has_its_group_and_the_log_prob_of_every_token(tmp_path: Path) -> None:
    rollout = replace(episode(0), advantages=np.linspace(0, 0.8, 9, dtype=np.float32))
    vocabulary = servers.byte_tokenizer()
    text = "é3!€y"  # 2 + 1 + 1 + 3 bytes and one that is missing
    ids = vocabulary.encode(text)[:7]
    tracks = rollout.tokens.to_dict() | {"ids": np.array([0, 0, *ids], np.int32)}
    rollout = replace(rollout, tokens=Tokens(**tracks))

    rows = logged_rows([rollout] * 3, group_size=2, step=5, tokenizer=vocabulary)

    assert [row["group"] for row in rows] == [0, 0, 1]
    assert rows[0]["token_texts"] == ["é", "", "3", "!", "€", "", ""]
    assert rows[0]["logps"] == [-0.25, -0.25, -0.25, None, None, -0.25, -0.25]
    assert rows[0]["ages"] == [1, 1, 1, 0, 0, 0, -1]
    assert rows[0]["token_advantages"] == [0.2, 0.3, 0.4, 0, 0, 0.7, 0.8]
    assert rows[0]["response"] == "seven" and rows[0]["correct"]


def test_the_tokens_of_a_logged_row_are_bounded() -> None:
    length = 3 * samples.MAX_TOKENS
    sampled = np.arange(length) > 0
    rollout = replace(
        episode(0),
        tokens=Tokens(
            np.full(length, 65, np.int32),
            sampled=sampled,
            logps=np.full(length, -1.23456, np.float32),
            versions=np.where(sampled, 4, -1),
        ),
        turns=(Turn(1, length, "long", "length", Grade(0.0, False, "no answer")),),
    )
    [row] = logged_rows([rollout], group_size=1, step=5, tokenizer=servers.byte_tokenizer())
    assert len(row["token_texts"]) == len(row["logps"]) == samples.MAX_TOKENS
    assert row["logps"][0] == -1.235
    assert row["ages"] == 0
    assert "token_advantages" not in row


def test_samples_are_rotated_and_a_resumed_run_finds_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_writer, "MAX_SAMPLES_BYTES", 100)

    def steps_of(name: str) -> list[int]:
        return [row["step"] for row in read_jsonl(tmp_path / name)]

    writer = MetricsWriter(tmp_path, None)
    for step in range(1, 8):
        writer.write_samples(step, [{"response": "x" * 20}])
    writer.close()
    assert steps_of("samples.1.jsonl") == [4, 5, 6] and steps_of("samples.jsonl") == [7]

    writer = MetricsWriter(tmp_path, 5)
    writer.write_samples(6, [{"response": "again"}])
    writer.close()
    assert steps_of("samples.1.jsonl") == [4, 5] and steps_of("samples.jsonl") == [6]

    MetricsWriter(tmp_path, None).close()
    assert steps_of("samples.1.jsonl") == steps_of("samples.jsonl") == []
