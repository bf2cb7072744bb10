"""Environments of the package verifiers: its own harness and servers, played by the sampler."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import TEMPLATE, byte_tokenizer
from test_asyncio_environments import Episode, play

from jzero.config import TaskConfig, turns
from jzero.environments import environment_task, verifiers
from jzero.errors import UserError
from jzero.tasks.task import check_task_settings
from jzero.types import Problem
from jzero.workers.pool import Pool

pytest.importorskip("verifiers")

ROOT = Path(__file__).resolve().parents[2]
SETS = Path(__file__).with_name("verifiers_sets")
CALL = '<tool_call>\n{"name": "sums_add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SETS))
    monkeypatch.setenv("PYTHONPATH", str(SETS))  # of the servers of tools


def settings(name: str, **changes: Any) -> TaskConfig:
    defaults = {"name": "environment", "template": "chat", "turn_reward": turns.Score()}
    task = TaskConfig(environment=f"verifiers:{name}", grade_workers=1, **defaults | changes)
    task.reward.seconds = 120.0
    return task


def first_problem(name: str) -> Problem:
    """Returns the problem of the first task."""
    task = settings(name)
    problems = environment_task.train_problems(task, 0, 0, 10)
    [first] = [problem for problem in problems if problem.row and problem.row["idx"] == 0]
    return first


def test_an_episode_is_graded_as_verifiers_does() -> None:
    problem = first_problem("letters_env")
    assert problem.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write abc backwards."},
    ]
    episodes: list[Episode] = [[] for _ in range(4)]
    with Pool(0) as pool:
        right, *wrong = play(
            pool, settings("letters_env"), problem, episodes, ["cba", "abc", "", "c"]
        )
    assert right.correct and right.score == 2.0 and right.reply is None
    assert right.parts["environment.backwards"] == 2.0
    assert right.parts["environment.length"] == 3.0
    for grade, length in zip(wrong, (3.0, 0.0, 1.0), strict=True):
        assert (grade.correct, grade.score, grade.failed) == (False, 0.0, False)
        assert grade.parts["environment.length"] == length


def test_every_tenth_task_is_held_out() -> None:
    task = settings("letters_env")
    trained = environment_task.train_problems(task, 0, 0, 10)
    held_out = environment_task.eval_problems(task, 5)
    assert environment_task.num_train_problems(task) == 10
    assert sorted(problem.row["idx"] for problem in trained if problem.row) == [*range(9), 10]
    assert [problem.row["idx"] for problem in held_out if problem.row] == [9]

    endless = settings("sums_env")
    assert environment_task.num_train_problems(endless) is None
    rows = verifiers.endless_train_rows("sums_env", range(8, 20))
    assert [row["idx"] for row in rows] == [8, *range(10, 19), 20, 21]


def test_a_tool_of_the_environment_is_shown_called_and_answered() -> None:
    problem = first_problem("sums_env")
    [schema] = problem.tools or []
    assert schema["function"]["name"] == "sums_add"
    task = settings("sums_env")

    with Pool(0) as pool:
        [called] = play(pool, task, problem, [[]], [CALL])
        [answered] = play(pool, task, problem, [[(CALL, called)]], ["2"])
    [reply] = called.reply or []
    assert isinstance(reply, dict)
    assert (reply["role"], reply["content"]) == ("tool", "2")
    assert (called.score, called.correct) == (0.0, False)
    assert (answered.score, answered.correct, answered.reply) == (1.0, True, None)

    # An episode that is built again goes the same way.
    with Pool(0) as pool:
        [again] = play(pool, task, problem, [[(CALL, called)]], ["2"])
    assert again.score == 1.0


def test_a_call_of_no_tool_is_the_answer() -> None:
    problem = first_problem("sums_env")
    with Pool(0) as pool:
        [grade] = play(
            pool, settings("sums_env"), problem, [[]], [CALL.replace("sums_add", "subtract")]
        )
    assert (grade.score, grade.reply, grade.failed) == (0.0, None, False)


def test_settings_of_verifiers_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "letters.toml"
    file.write_text(
        '[env.taskset]\nid = "letters_env"\n[env.agent]\nmax_turns = 3\n'
        '[env.agent.runtime]\ntype = "subprocess"\n[env.agent.harness]\nid = "null"\n'
    )
    check_task_settings(settings(str(file)), max_turns=3)
    assert verifiers.read_settings(str(file)).agent.max_turns == 3

    file.write_text(file.read_text().replace('"null"', '"bash"'))
    with pytest.raises(UserError, match="bash of agent would run the policy's commands"):
        check_task_settings(settings(str(file)), max_turns=3)
    file.write_text("[env]\nnothing = 1\n")
    with pytest.raises(UserError, match="letters.toml cannot be loaded"):
        check_task_settings(settings(str(file)), max_turns=3)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nowhere_env", {}, "verifiers:nowhere_env cannot be loaded.*not found"),
        ("letters_env", {"data": "gsm8k"}, "has tasks of its own, set task.data="),
        ("letters_env", {"environment_mode": "processes"}, "set task.environment_mode=auto"),
    ],
)
def test_mistakes_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_task_settings(settings(name, **changes), max_turns=3)


def test_a_run_trains_on_such_an_environment(environment: dict[str, str], tmp_path: Path) -> None:
    """The shorthand of the command line; tools, several turns, evaluation and samples."""
    tokenizer = tmp_path / "tokenizer"
    shows_tools = copy.deepcopy(byte_tokenizer())
    shows_tools.chat_template = "{{ tools | tojson }}\n" + TEMPLATE
    shows_tools.save_pretrained(tokenizer)
    arguments = """
        --config.task.name=verifiers:sums_env --config.task.template=chat
        --config.task.turn_reward=score --config.task.reward.seconds=120
        --config.rollout.num_prompts=2 --config.rollout.group_size=2 --config.rollout.max_turns=2
        --config.rollout.max_prompt_tokens=1024 --config.rollout.max_new_tokens=16
        --config.rollout.max_reply_tokens=64 --config.rollout.num_slots=4
        --config.warm_start=none --config.train.steps=2 --config.eval.problems=1
        --config.eval.samples=1 --config.eval.every=0 --config.train.logged_rollouts=4
    """
    subprocess.run(
        [
            *(sys.executable, "-m", "jzero.main"),
            f"--config={ROOT}/configs/countdown.py:tiny",
            f"--config.model.tokenizer={tokenizer}",
            f"--workdir={tmp_path / 'run'}",
            *arguments.split(),
        ],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": f"{ROOT}:{SETS}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert len(rows) >= 8
    assert all(row["reason"] in ("stepped", "correct") for row in rows)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["task"]["name"] == "environment"
    assert saved["task"]["environment"] == "verifiers:sums_env"
