import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jzero.files import write_atomic
from jzero.run import metrics
from jzero.run.clock import Clock
from jzero.run.environment import versions
from jzero.run.metrics_writer import MetricsWriter


def rows(path):
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def run(workdir, first, last, resume_step, project=""):
    writer = MetricsWriter(workdir, resume_step, project)
    for step in range(first, last + 1):
        writer.write(step, {"reward/mean": step / 3, "sft/loss": np.float32(step)})
        writer.write_samples(step, [{"text": f"\u2028\r {step} é"}, {"text": "b"}])
    writer.close()


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    run(tmp_path / "whole", 1, 6, None)
    run(tmp_path / "killed", 1, 5, None)
    with (tmp_path / "killed/metrics.jsonl").open("ab") as file:
        file.write(
            '{"step": 6, "é'.encode()[:-1]
        )  # the kill fell within a line, and within a character
    run(tmp_path / "killed", 4, 6, 3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [row["step"] for row in rows(tmp_path / "whole/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_run_without_a_checkpoint_starts_over(tmp_path):
    run(tmp_path, 0, 2, None)
    run(tmp_path, 0, 1, None)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]


def test_tensorboard_gets_the_scalars(tmp_path):
    run(tmp_path, 1, 2, None)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


# Steps argv[2] to argv[3] of a run that is resumed before them. A process of its own: W&B reads the environment once.
WANDB_RUN = """
import sys
from pathlib import Path
from jzero import cli
from jzero.run.metrics_writer import MetricsWriter
workdir, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with cli.user_errors():
    writer = MetricsWriter(workdir, first - 1, "reasoning")
    for step in range(first, last + 1):
        writer.write(step, {"reward/mean": step})
    writer.close()
"""


def run_with_wandb(workdir, first, last, **environment):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    (workdir / "config.json").write_text('{"train": {"seed": 12345}}')
    keyless = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    keyless |= {
        "NETRC": str(workdir / "netrc"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-c", WANDB_RUN, str(workdir), str(first), str(last)]
    return subprocess.run(
        command, env=keyless | environment, capture_output=True, text=True, timeout=120
    )


def test_wandb_gets_one_run_however_often_it_is_resumed(tmp_path):
    for first, last in ((1, 4), (3, 5)):
        done = run_with_wandb(tmp_path, first, last, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
    logs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [log.stem for log in logs] == [f"run-{(tmp_path / 'wandb_id').read_text()}"] * 2
    assert all(b"reward/mean" in log.read_bytes() and b"12345" in log.read_bytes() for log in logs)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_wandb_without_a_key_is_one_line(tmp_path):
    done = run_with_wandb(tmp_path, 1, 1)
    assert done.returncode == 2 and re.fullmatch(
        "error: train.wandb_project=reasoning: No API key .*\n", done.stderr
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_raises_with_the_step(tmp_path, value):
    writer = MetricsWriter(tmp_path, None, "")
    with pytest.raises(ValueError, match="step 7: not finite: sft/loss="):
        writer.write(7, {"sft/loss": value, "reward/mean": 1.0})
    writer.close()
    assert rows(tmp_path / "metrics.jsonl") == []


def test_write_atomic_leaves_no_temporary(tmp_path):
    for text in ("one", "two"):
        write_atomic(tmp_path / "a.json", text)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", text)]


def test_line_shows_what_the_step_has():
    text = metrics.step_line(3, 200, {"reward/mean": 0.5, "time/step": 12.34, "time/sample": 9.0})
    assert text == "step   3/200  reward 0.500  seconds 12.3"
    whole = metrics.step_line(3, 200, dict.fromkeys(metrics.STEP_LINE, 0.1))
    assert all(metrics.METRICS[name].label in whole for name in metrics.STEP_LINE)


def test_clock_adds_up_by_phase_and_keeps_totals():
    clock = Clock()
    for _ in range(2):
        with clock("sample"):
            time.sleep(0.01)
    with pytest.raises(KeyError), clock("update"):
        raise KeyError
    first = clock.pop()
    assert first.keys() == {"time/sample", "time/update"} and first["time/sample"] >= 0.02
    assert clock.pop() == {}
    with clock("sample"):
        pass
    assert clock.totals["sample"] == pytest.approx(
        first["time/sample"] + clock.pop()["time/sample"]
    )


def test_peak_rss_sees_an_allocation():
    """In a process of its own: this one's peak may be gigabytes by now."""
    grows = "before = peak_rss_bytes(); block = np.ones(before + 2**26, np.uint8); assert peak_rss_bytes() >= block.nbytes"
    code = f"import numpy as np; from jzero.run.environment import peak_rss_bytes; {grows}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_are_strings():
    found = versions()
    assert found["device"].startswith("8 x ") or "x" in found["device"]
    assert all(isinstance(value, str) and value for value in found.values())


# -- The table of metrics --------------------------------------------------------------------------


def test_the_page_lists_every_metric_as_the_table_defines_it():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    defined = [
        (name, metric.unit, metric.meaning.replace("|", "\\|"))
        for name, metric in metrics.METRICS.items()
    ]
    assert listed == defined
    on_the_step_line = re.findall(r"^\| ([a-z/ -]+) \| `(.*?)` \|$", page, re.MULTILINE)
    assert on_the_step_line == [(metrics.METRICS[name].label, name) for name in metrics.STEP_LINE]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my_rewards.brevity", "reward/<function>"),
        ("time/step", "time/step"),
        ("time/sample", "time/<phase>"),
        ("async/staleness_3", "async/staleness_<n>"),
        ("eval/pass@4", "eval[/<suite>]/pass@<k>"),
        ("eval/math500/pass@4", "eval[/<suite>]/pass@<k>"),
        ("eval_greedy/accuracy", "eval_greedy[/<suite>]/accuracy"),
    ],
)
def test_a_name_is_found_under_its_entry(name, entry):
    assert metrics.find_metric(name) is metrics.METRICS[entry]


@pytest.mark.parametrize("name", ["loss", "reward", "eval/accuracy2", "async/staleness_", "x/mean"])
def test_a_name_that_the_table_does_not_define_is_refused(tmp_path, name):
    assert metrics.find_metric(name) is None
    writer = MetricsWriter(tmp_path, None)
    with pytest.raises(AssertionError, match=name):
        writer.write(1, {name: 1.0})
    writer.close()
    assert rows(tmp_path / "metrics.jsonl") == []
