"""The rows of steps, the lines of evaluations, and the box at the end of a run."""

from pathlib import Path

import pytest

from jzero.run import closing, metrics
from jzero.run.accuracy import accuracy_text
from jzero.run.record import RunRecord, in_order
from jzero.run.step_table import ROWS_BETWEEN_HEADERS, StepTable
from jzero.terminal import WIDTH

RL_STEP = {
    "reward/mean": 0.3124,
    "reward/accuracy": 0.25,
    "rollout/length": 1043.2,
    "rollout/truncated": 0.117,
    "policy/mismatch": 4.1e-4,
    "policy/entropy": 0.51,
    "optimizer/grad_norm": 1.2,
    "rollout/tokens_per_second": 1812.4,
    "update/tokens_per_second": 912.4,
    "time/step": 9.44,
}


def test_a_row_has_the_numbers_below_their_labels() -> None:
    header, row = StepTable(200).rows(12, RL_STEP, seconds_left=1760)

    assert header.split() == [
        *("reward", "accuracy", "length", "cut", "mismatch", "tok/s", "seconds", "left")
    ]
    assert row.startswith("step  12/200 ")
    assert row.split()[2:] == [
        *("0.312", "25.0", "%", "1043", "0.12", "4.1e-04", "1812", "9.4", "29:20")
    ]
    assert len(header) == len(row)
    assert header.index("seconds") + len("seconds") == row.index("9.4") + len("9.4")


@pytest.mark.parametrize("last_step", [9, 200, 1_000_000])
def test_a_row_of_all_metrics_fits(last_step: int) -> None:
    values = dict.fromkeys(metrics.STEP_LINE, 1234.5)

    for line in StepTable(last_step).rows(3, values, seconds_left=40_000):
        assert len(line) <= WIDTH


UNTRAINED_STEP = {
    name: RL_STEP[name] for name in RL_STEP if not name.startswith(("policy/", "opt"))
}


@pytest.mark.parametrize("first", [RL_STEP, UNTRAINED_STEP])
def test_the_columns_do_not_depend_on_the_first_step(first: dict[str, float]) -> None:
    columns = ["reward", "accuracy", "length", "cut", "mismatch", "tok/s", "seconds", "left"]
    for steps in (20, 200, 20_000):
        table = StepTable(steps)
        header, _ = table.rows(1, first)
        assert header.split() == columns
        assert len(table.rows(2, RL_STEP)) == 1
    with_kl = StepTable(20, ["policy/kl"])
    header, _ = with_kl.rows(1, first)
    assert "kl" in header.split()
    assert len(with_kl.rows(2, RL_STEP | {"policy/kl": 0.1})) == 1


def test_the_header_returns_now_and_then_and_with_further_columns() -> None:
    table = StepTable(100)

    counts = [len(table.rows(step, RL_STEP)) for step in range(1, ROWS_BETWEEN_HEADERS + 2)]

    assert counts == [2] + [1] * (ROWS_BETWEEN_HEADERS - 1) + [2]
    [gap] = table.rows(30, {"reward/mean": 0.5, "time/step": 1.0})
    assert gap.split() == ["step", "30/100", "0.500", "1.0"]
    assert len(table.rows(31, RL_STEP | {"policy/kl": 0.01})) == 2


def evaluation(accuracy: float, **more: float) -> dict[str, float]:
    return {
        "eval/problems": 16.0,
        "eval/accuracy": accuracy,
        "eval/stderr": 0.083,
        "eval/length": 21.7,
        "eval/truncated": 0.06,
        **more,
    }


def test_an_evaluation_is_a_line_with_the_change() -> None:
    before = evaluation(0.125)

    assert closing.evaluation_lines("before", before, {}) == [
        "eval before: accuracy 12.5 ± 8.3 %, length 22, cut 0.06"
    ]
    assert closing.evaluation_lines("step_20", evaluation(0.344), before) == [
        "eval step 20: accuracy 34.4 ± 8.3 % (+21.9), length 22, cut 0.06"
    ]


@pytest.mark.parametrize(
    ("share", "problems", "error", "text"),
    [
        (0.0, 4, 0.0, "0 of 4"),
        (0.5, 4, (0.25 / 3) ** 0.5, "2 of 4"),
        (1.0, 1, None, "1 of 1"),
        (0.0, 1319, 0.0, "0 of 1,319"),
        (1316 / 1319, 1319, None, "1,316 of 1,319"),
        (0.715, 1319, 0.0124, "71.5 ± 1.2 %"),
        (0.5, 4, 0.1, "50.0 ± 10.0 %"),  # several samples of a problem
        (0.375, None, None, "37.5 %"),
    ],
)
def test_an_accuracy_of_few_problems_is_a_count(
    share: float, problems: float | None, error: float | None, text: str
) -> None:
    assert accuracy_text(share, problems, error) == text


def with_score(values: dict[str, float], score: float) -> dict[str, float]:
    return values | {"eval/score": score, "eval/reward/my.py.f": score}


def test_a_reward_of_the_user_is_shown_next_to_the_accuracy(tmp_path: Path) -> None:
    before = with_score(evaluation(0.125), 0.125)
    after = with_score(evaluation(0.125), 0.75)
    record = RunRecord(step=4, evaluations={"before": before, "after": after})

    rows = dict(
        line.strip().split(None, 1)
        for line in closing.closing_lines("t", tmp_path, record, 4)[1:-1]
    )
    assert rows["accuracy"] == "12.5 ± 8.3 % -> 12.5 ± 8.3 % (+0.0), 16 problems"
    assert rows["score"] == "0.125 -> 0.750 (+0.625)"
    assert "score 0.125" in closing.evaluation_lines("before", before, {})[0]

    # Without answers every accuracy is 0, and says nothing.
    lines = closing.closing_lines("t", tmp_path, record, 4, has_answers=False)
    rows = dict(line.strip().split(None, 1) for line in lines[1:-1])
    assert "accuracy" not in rows
    assert rows["score"] == "0.125 -> 0.750 (+0.625), 16 problems"
    [line] = closing.evaluation_lines("after", after, before, has_answers=False)
    assert line == "eval after: score 0.750 (+0.625), length 22, cut 0.06"


def test_suites_and_kinds_have_lines_that_fit() -> None:
    values = {}
    for prefix in ("eval/a_suite_with_a_long_name", "eval_greedy/math500", "eval_greedy"):
        for name, value in evaluation(0.5, **{"eval/score": 0.25}).items():
            values[name.replace("eval", prefix)] = value

    lines = closing.evaluation_lines("after_warm_start", values, values | {})

    labels = ["a_suite_with_a_long_name", "math500 greedy", "greedy"]
    starts = [line.split(": ")[0] for line in lines if not line.startswith("  ")]
    assert starts == [f"eval after warm start, {label}" for label in labels]
    assert all(len(line) <= WIDTH for line in lines)
    # What has no room is on the next line: cut responses explain a low accuracy.
    assert "\n".join(lines).count("cut 0.06") == len(labels)
    assert lines[1] == "  score 0.250 (+0.000), length 22, cut 0.06"


def test_a_finished_run_that_continues_ends_with_its_last_evaluation(tmp_path: Path) -> None:
    record = RunRecord(step=3, evaluations={"before": evaluation(0.1), "after": evaluation(0.2)})
    record.continue_to(3)
    assert list(record.evaluations) == ["before", "after"]

    # Two further runs, of 5 and of 6 steps, which are evaluated after each step.
    record.continue_to(5)
    for name, accuracy in (("step_4", 0.3), ("after", 0.4)):
        record.evaluations[name] = evaluation(accuracy)
    record.step = 5
    record.continue_to(6)
    record.evaluations["after"] = evaluation(0.6)
    record.step = 6

    accuracies = {name: row["eval/accuracy"] for name, row in record.evaluations.items()}
    assert accuracies == {"before": 0.1, "step_3": 0.2, "step_4": 0.3, "step_5": 0.4, "after": 0.6}
    lines = closing.closing_lines("tiny", tmp_path, record, 6)
    assert "10.0 ± 8.3 % -> 60.0 ± 8.3 % (+50.0)" in lines[1]

    # A record that an earlier version continued has "after" before the steps that came later.
    mixed_up = ("before", "after", "step_10", "step_4", "after_warm_start")
    ordered = in_order({name: {} for name in mixed_up})
    assert list(ordered) == ["before", "after_warm_start", "step_4", "step_10", "after"]


def test_the_box_says_what_was_reached_and_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "export-14").mkdir()
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "samples.jsonl").write_text("{}")
    evaluations = {
        "before": evaluation(0.125),
        "step_10": evaluation(0.5),
        "after": evaluation(0.344),
    }
    record = RunRecord(step=14, evaluations=evaluations, seconds=72.0)

    first, *lines, last = closing.closing_lines("tiny", tmp_path, record, 14)

    assert first.startswith("\u2500\u2500 tiny: 14 steps in 1:12 \u2500")
    assert len(first) == len(last) == WIDTH
    rows = dict(line.split(None, 1) for line in lines)
    assert rows == {
        "accuracy": "12.5 ± 8.3 % -> 34.4 ± 8.3 % (+21.9), 16 problems",
        "best": "step 10, accuracy 50.0 %, in checkpoints/10",
        "model": f"{tmp_path}/export-14",
        "metrics": f"{tmp_path}/metrics.jsonl",
        "samples": f"{tmp_path}/samples.jsonl",
        "watch": f"jzero watch {tmp_path}",
        "chat": f"jzero chat {tmp_path}",
    }


def test_a_stopped_run_says_how_it_continues(tmp_path: Path) -> None:
    record = RunRecord(step=3, evaluations={"before": {"eval/loss": 2.0}}, seconds=5.0)

    lines = closing.closing_lines("tiny", tmp_path, record, 14)

    assert "tiny: stopped after step 3 of 14 in 0:05" in lines[0]
    assert "  loss      2.0000" in lines
    assert "  continue  the same command continues from the last checkpoint" in lines
    assert not any("model" in line for line in lines)
