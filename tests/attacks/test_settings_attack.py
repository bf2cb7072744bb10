"""Hostile values of every setting end in one line or in a run: no traceback, hang or silence."""

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from jzero import config
from tests.attacks.conftest import Tries

# Of the report on the attacks: what passed every check and then sat, or ended in a traceback.
FOUND = [
    ("rollout.num_prompts", "1000000000000"),
    ("rollout.num_prompts", "9999999999999999999999"),
    ("rollout.group_size", "1000000000000"),
    ("warm_start.batch_size", "9999999999999999999999"),
    ("eval.samples", "1000000000000"),
    ("rollout.num_prompts", "2147483647"),
    ("rollout.group_size", "2147483647"),
    ("warm_start.batch_size", "2147483647"),
    ("eval.samples", "2147483647"),
    ("rollout.num_slots", "2147483647"),
    ("rollout.num_slots", "9999999999999999999999"),
    ("rollout.num_pages", "2147483647"),
    ("rollout.placement.max_staleness", "9999999999999999999999"),
    ("task.grade_workers", "1000000"),
    ("task.options", "numbers_min=1000000"),
    ("teacher.retries", "1000000"),
    ("teacher.seconds", "1e300"),
    ("model.adapter.targets", "-1"),
    ("task.tools.names", "1e400"),
    ("eval.suites", "-1"),
    ("train.pack", "x"),
    ("model.path", "a" * 5000),
    ("critic.path", "a" * 5000),
    ("sft.chat_template", "a" * 300),
    ("teacher.prompt", "a" * 300),
    ("sft.data", "\n"),
    ("sft.data", ","),
    ("algorithm.kl.coef", "1e300"),
    ("algorithm.entropy_coef", "-1e300"),
    ("optimizer.lr", "1e-320"),
]


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("hostile_settings")


def outcomes(attack: ModuleType, cases: Sequence, tries: Tries) -> Counter[str]:
    """Checks cases. One that is neither refused nor accepted is a broken try."""
    counts: Counter[str] = Counter()
    for case, outcome in attack.check_all(cases):
        with tries.attempt("settings", str(case)):
            assert outcome.kind in ("refused", "accepted"), f"{outcome.kind} {outcome.line}"
        counts[outcome.kind] += 1
    return counts


def test_every_setting_is_attacked(attack: ModuleType) -> None:
    """The command takes its settings from the schema, and there are as many values as before."""
    cases = attack.all_cases()
    attacked = {case.name for case in cases}
    for setting in config.list_settings(config.Config()):
        assert setting.name in attacked
    assert {"model.arch.head_dim", "task.reward.judge.url"} <= attacked
    assert len(cases) >= 1221
    assert len(set(cases)) == len(cases)


def test_what_was_found_is_refused_in_one_line(attack: ModuleType, tries: Tries) -> None:
    cases = [attack.Case(name, value) for name, value in FOUND]
    assert outcomes(attack, cases, tries) == {"refused": len(FOUND)}


def test_the_run_of_every_recipe_starts_and_hostile_values_of_it_end_in_one_line(
    attack: ModuleType, tries: Tries
) -> None:
    for recipe in attack.RECIPES:
        cases = attack.all_cases(recipe)
        assert outcomes(attack, [attack.Case("name", "x", recipe)], tries) == {"accepted": 1}
        outcomes(attack, cases[::97], tries)


def test_a_process_that_hangs_or_dies_is_found_and_replaced(attack: ModuleType) -> None:
    """The instrument itself: a setting that is none, a slow check and a dead process are seen."""
    good = attack.Case("rollout.num_prompts", "1")
    assert attack.outcome_of_exit(2, "error: a\nerror: b\n").kind == "traceback"
    assert attack.outcome_of_exit(2, "error: a\n").kind == "refused"
    assert attack.outcome_of_exit(1, "").kind == "traceback"
    worker = attack.Worker()
    try:
        assert worker.check(good).kind == "accepted"
        process = worker._process
        process.kill()
        process.wait()
        assert worker.check(good).kind == "hang"
        assert worker.check(good).kind == "accepted"
    finally:
        worker.close()


@pytest.mark.parametrize("stride", [4, 1])
def test_hostile_values_of_all_settings_end_in_one_line_or_in_a_run(
    attack: ModuleType, stride: int, tries: Tries
) -> None:
    """Every setting has four values or more, so a stride of 4 leaves out none."""
    counts = outcomes(attack, attack.all_cases()[::stride], tries)
    assert counts["refused"] > 1000 // stride
    assert counts["accepted"] > 200 // stride
