"""The guards of a landing: what each of them refuses. The last tests kill whole runs."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from runs import ROOT

from benchmarks import landing, plan
from tests.attacks import kills

README = """# title

```sh
python3 -m venv .venv && pip install . && jzero train countdown
```

Accuracy is printed at first (0 %), after the warm start
(46 %), and at the end (63 %).

Another paragraph: 99 %.
"""


def test_the_first_command_is_read_from_the_readme() -> None:
    installation, training, accuracies = landing.first_command(README)

    assert installation == "python3 -m venv .venv && pip install ."
    assert training == "jzero train countdown"
    assert accuracies == [0, 46, 63]


def test_the_readme_has_a_first_command_and_three_accuracies() -> None:
    _, training, accuracies = landing.first_command((ROOT / "README.md").read_text())

    assert training == "jzero train countdown"
    assert accuracies[0] == 0
    assert len(accuracies) == 3


OUTPUT = """eval before: accuracy 0 of 128, length 64, cut 0.42
eval before, greedy: accuracy 1 of 128, length 78, cut 0.70
eval after warm start: accuracy 45.9 ± 2.7 % (+45.9 points), length 21, cut 0.00
eval after: accuracy 69.1 ± 3.4 % (+69.1 points), length 25, cut 0.01
"""


def test_accuracies_are_those_that_a_run_printed() -> None:
    assert landing.evaluated_accuracies(OUTPUT) == [0.0, 45.9, 69.1]


@pytest.mark.parametrize(
    ("stated", "is_good"), [([0, 46, 63], True), ([0, 46, 50], False), ([0, 46], False)]
)
def test_accuracies_are_those_of_the_readme_within_their_errors(
    stated: Sequence[int], is_good: bool
) -> None:
    reached = landing.evaluated_accuracies(OUTPUT)

    assert (not landing.compare_accuracies(reached, stated)) == is_good


def test_a_traceback_or_a_warning_in_the_output_is_found() -> None:
    text = "step 1\n/x.py:3: DeprecationWarning: old\nTraceback (most recent call last):\n"

    assert len(landing.check_output(text)) == 2
    assert not landing.check_output(OUTPUT)


BYTES = {"phase update": 1_000_000, "peak of update": 900_000}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, ""),
        ({"peak of update": 908_000}, ""),
        ({"peak of update": 910_000}, "H100, peak of update: 900,000 -> 910,000 bytes, +1.1 %"),
        ({"peak of update": 890_000}, "H100, peak of update: 900,000 -> 890,000 bytes, -1.1 %"),
        ({"peak of score": 5}, "H100, peak of score: None -> 5 bytes"),
    ],
)
def test_bytes_may_differ_by_one_percent(values: dict[str, int], found: str) -> None:
    lines = plan.compare_bytes("H100", BYTES, BYTES | values)

    assert lines == ([found] if found else [])


def test_a_figure_that_is_gone_is_found() -> None:
    [line] = plan.compare_bytes("H100", BYTES, {"phase update": 1_000_000})

    assert line == "H100, peak of update: 900000 -> None bytes"


def test_every_checked_machine_has_recorded_figures() -> None:
    recorded = json.loads(plan.RECORDED.read_text())

    assert recorded.keys() == plan.CHECKED.keys()
    for cell in recorded.values():
        assert cell["versions"]["jax"]
        assert {"phase rollout", "phase update", "peak of generate"} <= cell["bytes"].keys()


REFUSAL = (
    "status 2: error: w/config.json belongs to a run with other settings (optimizer.b2: 1 -> 2)"
)


@pytest.mark.parametrize(
    ("failure", "reason", "is_good"),
    [
        (REFUSAL, "the default of optimizer.b2 is that of the paper", True),
        (REFUSAL, "", False),
        ("status 2: error: --config.task.form=2: there is no setting task.form", "gone", True),
        ("status 2: error: w/config.json: bring its file back", "a new layout", False),
        ("status 2: error: the checkpoint is damaged", "a new layout", False),
        ("status 1: KeyError: 'optimizer.b2'", "a new layout", False),
        ("it started anew instead of continuing from its checkpoint", "a new layout", False),
    ],
)
def test_an_older_run_is_refused_for_a_setting_and_a_reason(
    failure: str, reason: str, is_good: bool
) -> None:
    result = landing.judge_refusal("killed after step 4", failure, reason)

    assert (not result.failures) == is_good
    assert failure in " ".join(result.failures) or is_good


def test_the_reasons_are_in_the_messages_of_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "ROOT", tmp_path)
    messages = ["first", "second\n\nOlder-runs: the moments have another type", "third"]
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    commit = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--allow-empty"]
    for message in messages:
        subprocess.run([*commit, "-m", message], cwd=tmp_path, check=True)

    assert landing.reason_between("HEAD~2") == "the moments have another type"
    assert landing.reason_between("HEAD~1") == ""
    assert landing.old_commit("main") == landing.git("rev-parse", "HEAD~1")


def test_all_kinds_of_runs_and_all_machines_have_a_guard() -> None:
    names = list(landing.guards())

    assert len(names) == 1 + 2 * len(landing.KINDS) + len(plan.CHECKED)
    assert set(landing.KINDS.values()) <= set(kills.MODES)


def test_a_run_is_continued_only_if_it_says_from_where() -> None:
    assert landing.resumed_step(["config x", "resumed /tmp/run at step 4"]) == 4
    with pytest.raises(landing.RunFailed, match="started anew"):
        landing.resumed_step(["config x", "step 1/8"])


# -- Whole runs ------------------------------------------------------------------------------------


@pytest.fixture
def checkouts(tmp_path: Path) -> landing.Landing:
    """Returns a landing that changes nothing yet: both checkouts are copies of the code."""
    for name in ("old", "new"):
        for folder in ("jzero", "configs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, tmp_path / name / folder, ignore=ignored)
    return landing.Landing(
        old=tmp_path / "old",
        new=tmp_path / "new",
        folder=tmp_path,
        reason="",
        renamed={},
        seed=1,
        is_whole=False,
    )


def change(checkout: Path, path: str, old: str, new: str) -> None:
    """Replaces a text that the file of a checkout has once."""
    file = checkout / path
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, text.count(old))
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("guard", [landing.check_kill, landing.check_older])
def test_runs_of_the_same_code_hold(
    guard: Callable[[str, landing.Landing], landing.Result], checkouts: landing.Landing
) -> None:
    result = guard("SFT", checkouts)

    assert not result.failures
    assert "resumed from " in result.figure


@pytest.mark.parametrize("guard", [landing.check_kill, landing.check_older])
def test_moments_that_a_resumed_run_loses_are_found(
    guard: Callable[[str, landing.Landing], landing.Result], checkouts: landing.Landing
) -> None:
    restored = 'item["opt_state"] if has_moments else _zeros(like.opt_state)'
    change(checkouts.new, "jzero/run/checkpoint.py", restored, "_zeros(like.opt_state)")

    result = guard("SFT", checkouts)

    # Of metrics, or of the exported weights.
    assert "differs" in result.failures[0]


def test_another_default_is_refused_by_its_name_and_needs_a_reason(
    checkouts: landing.Landing,
) -> None:
    change(checkouts.new, "jzero/config/schema.py", "eps: float = 1e-8", "eps: float = 2e-8")

    result = landing.check_older("synchronous", checkouts)
    excused = landing.judge_refusal("", result.failures[0], "")

    assert "optimizer.eps: " in result.failures[0]
    assert "give the reason in a commit: Older-runs: " in result.failures[0]
    assert excused.failures
    with_reason = dataclasses.replace(
        checkouts, reason="doubled", folder=checkouts.folder / "again"
    )
    assert not landing.check_older("synchronous", with_reason).failures
