"""Remarks about ill runs: each is planted once, and runs that learn get none."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_settings

from jzero import config
from jzero.config import Config, Rows, flatten, to_json
from jzero.config.flags import names_sources
from jzero.config.turns import Score
from jzero.errors import UserError
from jzero.fields import fields_of
from jzero.files import read_jsonl
from jzero.loops import rl
from jzero.run import doctor
from jzero.run.doctor import REMARKS, Doctor, Finding
from jzero.run.metrics import find_metric

ROOT = Path(__file__).resolve().parents[2]
# Metrics of the first steps of tiny recipes, by recipe: what the doctor reads, and their settings.
HEALTHY = json.loads(Path(__file__).with_name("healthy_runs.json").read_text(encoding="utf-8"))
# The same of runs of 12 steps on a busy machine, whose times are uneven: a list for each metric.
BUSY = json.loads(Path(__file__).with_name("healthy_busy_runs.json").read_text(encoding="utf-8"))

NUM_PROMPTS, GROUP_SIZE = 16, 8
SETTINGS = flatten(json.loads(to_json(Config()))) | {
    "rollout.num_prompts": NUM_PROMPTS,
    "rollout.group_size": GROUP_SIZE,
    "rollout.max_new_tokens": 32,
    "task.template": "r1",
    "task.reward.functions": ["accuracy", "rewards.py:short"],
}
WELL = {
    "reward/mean": 0.4,
    "reward/accuracy": 0.4,
    "reward/zero_variance_groups": 0.2,
    "reward/failed": 0.0,
    "reward/rewards.py.short": 0.3,
    "rollout/length": 100.0,
    "rollout/truncated": 0.05,
    "rollout/preempted": 0.0,
    "rollout/slot_utilization": 0.8,
    "grade/no_answer": 3.0,
    "policy/entropy": 0.6,
    "policy/mismatch": 1e-3,
    "policy/kl": 0.01,
    "optimizer/grad_norm": 0.3,
    "optimizer/skipped": 0.0,
    "update/left_out": 0.2,
    "update/padding": 0.3,
    "time/step": 10.0,
    "time/sample": 6.0,
    "time/update": 3.0,
    "time/grade": 0.1,
    "compile/seconds": 0.0,
}


@dataclass(frozen=True)
class Illness:
    """What is different from a healthy run, and what the remark about it has to contain."""

    changes: Callable[[int], Mapping[str, float]]  # of the metrics of a step
    words: str
    first_step: int  # when the remark is made
    setting: str  # that the remark names
    samples: list[dict[str, Any]] = field(default_factory=list)


def always(**values: float) -> Callable[[int], Mapping[str, float]]:
    """Returns the same changes for every step: `rollout__truncated` is rollout/truncated."""
    return lambda step: {name.replace("__", "/"): value for name, value in values.items()}


NO_ANSWER = {"reason": "no answer", "response": "let me see.\n So\x1b the sum is 7.\u202e"}
ILL: dict[str, Illness] = {
    "no_answer": Illness(
        always(grade__no_answer=126),
        "126 of 128 responses have no answer in <answer> tags; they end in "
        '"let me see. So\ufffd the sum is 7.\ufffd"',
        1,
        "task.template",
        [{"reason": "correct", "response": "fine"}, NO_ANSWER],
    ),
    "no_score": Illness(
        always(reward__failed=0.5), "50 % of the responses", 1, "task.reward.seconds"
    ),
    "reward_none": Illness(
        lambda step: {"reward/rewards.py.short": float("nan")},  # removed below
        "the reward function rewards.py:short has returned None",
        1,
        "task.reward.functions",
    ),
    "constant_reward": Illness(
        always(reward__mean=0.5, reward__zero_variance_groups=1),
        "every response has the reward 0.5",
        3,
        "task.reward.functions",
    ),
    "one_score": Illness(
        always(reward__mean=0, reward__accuracy=0, reward__zero_variance_groups=1),
        "no group has two different scores",
        3,
        "rollout.group_size",
    ),
    "truncated": Illness(
        always(rollout__truncated=0.87),
        "87 % of the responses are cut at 32 tokens",
        1,
        "rollout.max_new_tokens",
    ),
    "length_collapse": Illness(
        lambda step: {"rollout/length": 100.0 if step < 6 else 9.0},
        "from 100 to 9 tokens",
        10,
        "optimizer.lr",
    ),
    "entropy_collapse": Illness(
        lambda step: {"policy/entropy": 0.6 if step < 12 else 0.001},
        "from 0.6 to 0.001 nats",
        20,
        "algorithm.entropy_coef",
    ),
    "mismatch": Illness(
        always(policy__mismatch=0.2), "differ by 0.2 nats", 1, "algorithm.correction"
    ),
    "kl": Illness(always(policy__kl=2.5), "2.5 nats a token away", 1, "algorithm.kl.coef"),
    "nothing_trained": Illness(
        always(optimizer__skipped=1), "nothing was trained in the last 5", 10, "optimizer.skip_norm"
    ),
    "padding": Illness(
        always(update__padding=0.9), "90 % of the rows of an update", 3, "train.pack"
    ),
    "sampler_idle": Illness(
        always(rollout__slot_utilization=0.1),
        "uses 10 % of its slots",
        3,
        "rollout.placement.max_staleness",
    ),
    "grading_slow": Illness(
        always(time__grade=8), "waits 8 of 10 seconds", 1, "task.grade_workers"
    ),
    "preempted": Illness(
        always(rollout__preempted=100), "100 of 128 sequences", 1, "rollout.num_slots"
    ),
    "compiling": Illness(
        always(compile__seconds=9), "90 % of a step is compilation", 10, "train.microbatch_tokens"
    ),
}


def findings_of(illness: Illness | None, last_step: int = 20) -> list[Finding]:
    """Returns the remarks about a run that is healthy but for one illness."""
    checked = Doctor(SETTINGS)
    for step in range(1, last_step + 1):
        metrics = WELL | {"reward/mean": 0.4 - 0.001 * step}
        metrics |= illness.changes(step) if illness else {}
        metrics = {name: value for name, value in metrics.items() if value == value}  # no NaN
        checked.check(step, metrics, lambda: illness.samples if illness else [])
    return checked.findings


@pytest.mark.parametrize("name", REMARKS)
def test_a_planted_illness_gets_its_remark_once_and_no_other(name: str) -> None:
    illness = ILL[name]

    [finding] = findings_of(illness)

    assert (finding.name, finding.step) == (name, illness.first_step)
    assert illness.words in finding.sentence
    assert illness.setting in finding.advice
    lines = str(finding).splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)


def test_a_healthy_run_gets_no_remark() -> None:
    assert findings_of(None, last_step=200) == []


@pytest.mark.parametrize("recipe", HEALTHY)
def test_tiny_recipes_get_no_remark(recipe: str) -> None:
    run = HEALTHY[recipe]
    checked = Doctor(run["settings"])
    for row in run["metrics"]:
        is_last = row is run["metrics"][-1]
        checked.check(row["step"], row, is_last=is_last)
    assert checked.findings == []
    assert len(run["metrics"]) >= 10


@pytest.mark.parametrize("name", BUSY)
def test_runs_of_all_recipes_get_no_remark(name: str) -> None:
    run = BUSY[name]
    checked = Doctor(run["settings"])
    columns = run["metrics"]
    steps = zip(*columns.values(), strict=True)
    # A step that trained on no token lacks the metrics of the policy.
    rows = [
        {metric: value for metric, value in zip(columns, values, strict=True) if value is not None}
        for values in steps
    ]
    for row in rows:
        checked.check(row["step"], row, is_last=row is rows[-1])
    assert checked.findings == []
    assert len(rows) >= 6


def test_there_are_twenty_healthy_runs() -> None:
    assert len(HEALTHY) + len(BUSY) >= 20


def test_a_shape_that_is_new_in_one_step_is_no_fault() -> None:
    once = Illness(lambda step: {"compile/seconds": 9.0 * (step == 11)}, "", 0, "")
    assert findings_of(once) == []


def test_empty_rows_of_sequences_that_are_left_out_are_no_fault() -> None:
    """Groups of one score leave their rows empty, and no other train.pack would fill them."""
    left_out = Illness(always(update__padding=0.9, update__left_out=0.75), "", 0, "")
    assert findings_of(left_out) == []


@pytest.mark.parametrize(
    ("functions", "metric", "num_remarks"),
    [
        (["/home/me/rewards.py:short"], "reward/rewards.py.short", 0),
        (["/a/my.py:f", "/b/my.py:f"], "reward//a/my.py.f", 1),
        (["/a/my.py:f", "/b/my.py:f"], "reward/my.py.f", 0),  # of one of them
        (["/a/my.py:f"], "reward/other", 1),
    ],
)
def test_a_reward_with_a_folder_is_found_by_its_metric(
    functions: list[str], metric: str, num_remarks: int
) -> None:
    checked = Doctor(SETTINGS | {"task.reward.functions": functions})
    checked.check(1, WELL | {metric: 0.1})
    assert [finding.name for finding in checked.findings] == ["reward_none"] * num_remarks


@pytest.mark.parametrize(("mismatch", "num_remarks"), [(0.11, 0), (0.3, 1)])
@pytest.mark.parametrize("setting", ["rollout.weights", "rollout.kv_dtype"])
def test_a_sampler_in_8_bits_may_differ_more(
    setting: str, mismatch: float, num_remarks: int
) -> None:
    checked = Doctor(SETTINGS | {setting: "fp8"})
    for step in range(1, 4):
        checked.check(step, WELL | {"policy/mismatch": mismatch})
    assert [finding.name for finding in checked.findings] == ["mismatch"] * num_remarks


def test_a_solved_task_is_no_collapse() -> None:
    solved = {"reward/accuracy": 1.0, "reward/mean": 1.0, "policy/entropy": 0.001}
    solved |= {"rollout/length": 9.0}
    illness = Illness(lambda step: solved if step > 5 else {}, "", 0, "")
    assert findings_of(illness) == []


def test_a_quoted_response_is_short_and_on_one_line() -> None:
    illness = Illness(
        always(grade__no_answer=128), "", 1, "", [NO_ANSWER | {"response": "a\nb " * 10**6}]
    )
    [finding] = findings_of(illness)
    assert len(finding.sentence) < 200


def test_advice_names_settings_and_symptoms_name_metrics_that_exist() -> None:
    settings = {setting.name for setting in config.list_settings(Config())}
    # task.data.level_min is a flag: an argument of all data sets.
    sources = [name for name in settings if names_sources(name)]
    settings |= {f"{setting}.{name}" for setting in sources for name in fields_of(Rows)}
    for remark in REMARKS.values():
        named = re.findall(r"`(\w+\.\w[\w.]*)", remark.advice)
        assert not [name for name in named if name not in settings], remark.advice
        metrics = re.findall(r"`(\w+/\w+)`", remark.symptom)
        assert not [name for name in metrics if find_metric(name) is None], remark.symptom
        assert metrics or "task.reward.functions" in remark.symptom


def test_the_page_of_symptoms_has_the_table() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert doctor.markdown_table() in page, "run docs/reference.py"


def test_stop_on_names_remarks() -> None:
    assert doctor.stop_names("one_score, kl") == ["one_score", "kl"]
    assert doctor.stop_names("") == []
    with pytest.raises(UserError, match="train.stop_on=one_scroe: there is no remark one_scroe"):
        doctor.stop_names("one_scroe")


def half(response: str, gold: object, task: object) -> float:
    """A reward function that says the same of every response."""
    return 0.5


def nothing(response: str, gold: object, task: object) -> None:
    """A reward function that forgot its return statement."""


@pytest.mark.usefixtures("quick_runs")
def test_a_run_says_what_is_wrong_and_stops_where_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_settings(
        train={"steps": 5, "logged_rollouts": 4, "stop_on": "constant_reward"},
        warm_start={"steps": 1},
        eval={"problems": 0},
        rollout={"num_prompts": 4, "group_size": 4},
    )
    settings.task.reward.functions = ("test_doctor:half", "test_doctor:nothing")
    settings.task.turn_reward = Score()

    with pytest.raises(UserError, match=r"(?s)every response has the reward.*train.stop_on=const"):
        rl.train(settings, tmp_path / "run")

    said = capsys.readouterr().out
    assert "the reward function test_doctor:nothing has returned None for every response" in said
    assert said.count("reward_none") == 1
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 3
    assert (tmp_path / "run" / "checkpoints" / "3").exists()

    settings.train.stop_on = ""
    summary = rl.train(settings, tmp_path / "run")
    names = [remark["name"] for remark in summary["remarks"]]
    # The task's verdict has no part in the reward: no remark says that answers are missing.
    assert {"reward_none", "constant_reward", "truncated"} <= set(names)
    assert "no_answer" not in names
    assert len(names) == len(set(names))
    assert "reward_none" not in capsys.readouterr().out  # a resumed run does not repeat it
