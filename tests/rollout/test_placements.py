"""What can be sampled where: every placement with every feature of a run, and pairs of features.

A cell is impossible by shape (two values of one setting), refused by the name of a setting, or
allowed. The first two tests read no model and compile nothing.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import tiny

from configs import calculator, code
from jzero import setup
from jzero.algorithms import GAE, Distillation, TokenMean
from jzero.config import Apart, Config, Jobs, Together, drafts, teachers
from jzero.errors import UserError
from jzero.loops import rl

PLACES: dict[str, Callable[[], Together | Apart | Jobs]] = {
    "here": Together,
    "asynchronous": lambda: Together(max_staleness=1),
    "apart": lambda: Apart(devices=4),
    "jobs": lambda: Jobs(store="store"),
}


def countdown() -> Config:
    return tiny.countdown_settings()


# The first setting of a run that has one of these. A run has one task.
TASKS: dict[str, Callable[[], Config]] = {
    "environment": tiny.tiny_settings,
    "tools": calculator.tiny,
    "code": code.tiny,
}


def with_critic(config: Config) -> None:
    algorithm = config.algorithm
    config.algorithm = replace(algorithm, advantage=GAE(), whiten=True, weight=TokenMean())


def with_teacher(config: Config, teacher: teachers.Teacher) -> None:
    config.algorithm = replace(config.algorithm, distillation=Distillation(coef=0.1))
    config.teacher = teacher


def with_dynamic_sampling(config: Config) -> None:
    config.algorithm = replace(config.algorithm, dynamic_sampling_rounds=2)


def with_drafts(config: Config) -> None:
    config.rollout = replace(config.rollout, draft=drafts.Ngram(cost=1.2))


def with_adapter(config: Config, base: str = "native") -> None:
    adapter = replace(config.model.adapter, rank=2)
    config.model = replace(config.model, adapter=adapter, base=base)
    config.warm_start = None


def with_exact(config: Config) -> None:
    config.model = replace(config.model, exact=True, dtype="float32")
    config.rollout = replace(config.rollout, kv_dtype="float32")


FEATURES: dict[str, Callable[[Config], None]] = {
    "critic": with_critic,
    "teacher": lambda config: with_teacher(config, teachers.Model(path="teacher")),
    "teacher server": lambda config: with_teacher(config, teachers.Server(url="http://x:1/v1")),
    "dynamic sampling": with_dynamic_sampling,
    "drafts": with_drafts,
    "adapter": with_adapter,
    "int8 base": lambda config: with_adapter(config, "int8"),
    "exact": with_exact,
}
NAMES = (*TASKS, *FEATURES)

# By place and feature: what the refusal names. All other cells are allowed.
REFUSED = {
    # A step that trains on groups as they come cannot replace any.
    ("asynchronous", "dynamic sampling"): "algorithm.dynamic_sampling_rounds",
    ("apart", "dynamic sampling"): "algorithm.dynamic_sampling_rounds",
    ("jobs", "dynamic sampling"): "algorithm.dynamic_sampling_rounds",
}
# Two values of one setting.
ONE_SETTING = ({*TASKS}, {"teacher", "teacher server"}, {"adapter", "int8 base"})


def settings_of(place: str, *names: str) -> Config:
    """Returns the settings of a run at a place, with features."""
    tasks = [name for name in names if name in TASKS]
    config = TASKS[tasks[0]]() if tasks else countdown()
    config.model = replace(config.model, path="model")
    config.warm_start = None
    for name in names:
        if name in FEATURES:
            FEATURES[name](config)
    config.rollout = replace(config.rollout, placement=PLACES[place]())
    return config


def refusal(place: str, *names: str) -> str:
    """Returns why a run is refused, or "" if it is not."""
    try:
        setup.check_task(settings_of(place, *names))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_feature_is_allowed_at_a_place_or_refused_by_name(place: str, name: str) -> None:
    reason = refusal(place, name)
    expected = REFUSED.get((place, name), "")
    assert expected in reason and bool(reason) == bool(expected), reason


@pytest.mark.parametrize("place", [place for place in PLACES if place != "here"])
def test_a_place_refuses_no_pair_of_features_that_it_takes_one_by_one(place: str) -> None:
    """What two features cannot do together, they cannot do here either."""
    for pair in itertools.combinations(NAMES, 2):
        if any(set(pair) <= group for group in ONE_SETTING):
            continue  # impossible by shape
        is_expected = any((place, name) in REFUSED for name in pair) or bool(refusal("here", *pair))
        assert bool(refusal(place, *pair)) == is_expected, (pair, refusal(place, *pair))


# -- whole runs, pairwise. tests/jobs/test_runs.py has those with separate jobs --------------------

RUNS = [
    ("here", "dynamic sampling", "drafts"),
    ("here", "dynamic sampling", "environment"),
    ("here", "critic", "tools"),
    ("asynchronous", "critic", "drafts"),
    ("asynchronous", "environment", "adapter"),
    ("asynchronous", "tools", "exact"),
    ("asynchronous", "int8 base", "drafts"),
    ("apart", "critic", "exact"),
    ("apart", "tools", "adapter"),
]
STEPS = 3


def run_of(place: str, *names: str) -> Config:
    """Returns the settings of a run that takes seconds: a model of one layer, and three steps."""
    config = settings_of(place, *names)
    small = tiny.tiny_settings()
    config.model = replace(config.model, path="", arch=small.model.arch)
    config.model = replace(config.model, tokenizer=small.model.tokenizer, dtype="float32")
    config.mesh = replace(config.mesh, data=-1, fsdp=1)
    config.rollout = replace(config.rollout, num_prompts=8, group_size=4, num_slots=32, num_pages=0)
    config.train = replace(config.train, steps=STEPS, checkpoint_every=STEPS)
    config.eval = replace(config.eval, problems=0, every=0)
    if "tools" in names:
        # The rewards of a group differ after a few examples.
        config.warm_start = small.warm_start
    # The lengths of responses differ, so that every step has something to train on.
    rewards = replace(config.task.reward, functions=("accuracy", "length"), weights=())
    config.task = replace(config.task, reward=rewards, grade_workers=2)
    return config


@pytest.mark.parametrize("cell", RUNS, ids=" ".join)
def test_a_run_trains_with_two_features_at_a_place(cell: tuple[str, ...], tmp_path: Path) -> None:
    place, *names = cell
    rl.train(run_of(place, *names), tmp_path)

    rows = runs.rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
    happened = {
        "critic": "critic/loss",
        "drafts": "rollout/tokens_per_pass",
        "dynamic sampling": "rollout/rounds",
        "environment": "turns/mean",
        "exact": "policy/exact_tokens",
    }
    for name in names:
        if name in happened:
            assert all(happened[name] in row for row in rows), name
    if place != "here":
        assert all("async/staleness" in row for row in rows)
