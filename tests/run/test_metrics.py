"""What a run writes about its steps: metrics, samples, W&B, the clock, and the table of metrics."""

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import read_jsonl

from jzero.algorithms.metrics import LOSS_METRICS
from jzero.clock import Clock
from jzero.files import write_atomic
from jzero.run import metrics
from jzero.run.environment import versions
from jzero.run.metrics_writer import MetricsWriter

ROOT = Path(__file__).resolve().parents[2]


def steps_in(workdir: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(workdir / "metrics.jsonl")]


# -- The files -------------------------------------------------------------------------------------


def write_steps(workdir: Path, first: int, last: int, resume_step: int | None = None) -> None:
    """Writes the steps first..last of a run that is resumed after `resume_step`, None if new."""
    writer = MetricsWriter(workdir, resume_step)
    for step in range(first, last + 1):
        writer.write(step, {"reward/mean": step / 3, "sft/loss": np.float32(step)})
        # Python's splitlines and universal newlines would split a line at these characters.
        writer.write_samples(step, [{"text": f"\u2028\r {step} é"}, {"text": "b"}])
    writer.close()


def test_the_files_of_a_killed_and_resumed_run_equal_those_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    uninterrupted = tmp_path / "uninterrupted"
    killed = tmp_path / "killed"
    write_steps(uninterrupted, 1, 6)

    write_steps(killed, 1, 5)
    with (killed / "metrics.jsonl").open("ab") as file:
        # The kill fell within a line, and within a character of two bytes.
        file.write('{"step": 6, "é'.encode()[:-1])
    write_steps(killed, 4, 6, resume_step=3)

    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert steps_in(uninterrupted) == [1, 2, 3, 4, 5, 6]


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 2)

    write_steps(tmp_path, 0, 1)

    assert steps_in(tmp_path) == [0, 1]


def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)

    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_raises_with_the_step(tmp_path: Path, value: float) -> None:
    writer = MetricsWriter(tmp_path, None)

    with pytest.raises(ValueError, match="step 7: not finite: sft/loss="):
        writer.write(7, {"sft/loss": value, "reward/mean": 1.0})

    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_write_atomic_replaces_a_file_and_leaves_no_other(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_atomic(tmp_path / "a.json", text)

        [path] = tmp_path.iterdir()
        assert path.name == "a.json"
        assert path.read_text() == text


# -- The clock and the environment -----------------------------------------------------------------


def test_the_clock_adds_up_by_phase_and_keeps_totals() -> None:
    clock = Clock()
    for _ in range(2):
        with clock("sample"):
            time.sleep(0.01)
    # A phase counts even if it ends with an exception.
    with pytest.raises(KeyError), clock("update"):
        raise KeyError

    first = clock.pop()
    assert first.keys() == {"time/sample", "time/update"}
    assert first["time/sample"] >= 0.02
    assert clock.pop() == {}

    with clock("sample"):
        pass
    second = clock.pop()
    total = first["time/sample"] + second["time/sample"]
    assert clock.totals["sample"] == pytest.approx(total)


ALLOCATION = """
import numpy as np
from jzero.run.environment import peak_rss_bytes

before = peak_rss_bytes()
block = np.ones(before + 2**26, np.uint8)
assert peak_rss_bytes() >= block.nbytes
"""


def test_the_peak_of_the_memory_counts_the_process_once() -> None:
    """On Linux a child starts with the peak of its parent, however small it is."""
    code = (
        "import subprocess, sys; from jzero.run.environment import peak_rss_bytes\n"
        "block = bytearray(b'1' * (200 << 20)); before = peak_rss_bytes()\n"
        "subprocess.run(['sleep', '0']); sys.exit(peak_rss_bytes() > before + (50 << 20))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_peak_of_the_memory_sees_an_allocation() -> None:
    # A process of its own: the peak of this one may be gigabytes by now.
    done = subprocess.run([sys.executable, "-c", ALLOCATION], cwd=ROOT)

    assert done.returncode == 0


def test_versions_are_strings() -> None:
    found = versions()

    assert "x" in found["device"]
    for value in found.values():
        assert isinstance(value, str)
        assert value


# -- The table of metrics --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")


def test_the_page_lists_every_metric_as_the_table_defines_it(page: str) -> None:
    listed = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    defined = []
    for name, metric in metrics.all_metrics().items():
        meaning = metric.meaning.replace("|", "\\|")  # Markdown's escape in a table
        defined.append((name, metric.unit, meaning))
    # The page is in the order of its groups.
    assert sorted(listed) == sorted(defined)


def test_the_page_lists_the_labels_of_the_table(page: str) -> None:
    listed = re.findall(r"^\| ([a-z/ -]+) \| `(.*?)` \|$", page, re.MULTILINE)

    assert listed == [(column.label, name) for name, column in metrics.STEP_LINE.items()]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/my_rewards.brevity", "reward/<function>"),
        ("reward/mean/code", "reward/mean/<task>"),
        ("reward/accuracy/math", "reward/accuracy/<task>"),
        ("time/step", "time/step"),
        ("time/sample", "time/<phase>"),
        ("async/staleness_3", "async/staleness_<n>"),
        ("eval/pass@4", "eval[/<suite>]/pass@<k>"),
        ("eval/math500/pass@4", "eval[/<suite>]/pass@<k>"),
        ("eval/accuracy/code", "eval[/<suite>]/accuracy/<task>"),
        ("eval/mine/accuracy_by/fast", "eval[/<suite>]/accuracy_by/<verifier>"),
        ("eval/mine/accuracy/code", "eval[/<suite>]/accuracy/<task>"),
        ("eval_greedy/accuracy", "eval_greedy[/<suite>]/accuracy"),
    ],
)
def test_a_name_is_found_under_its_entry(name: str, entry: str) -> None:
    assert metrics.find_metric(name) is metrics.METRICS[entry]


@pytest.mark.parametrize("name", ["loss", "reward", "eval/accuracy2", "async/staleness_", "x/mean"])
def test_a_name_that_no_table_defines_is_written(tmp_path: Path, name: str) -> None:
    assert metrics.find_metric(name) is None
    writer = MetricsWriter(tmp_path, None)

    writer.write(1, {name: 1.0})

    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, name: 1.0}]


@pytest.mark.parametrize("name", LOSS_METRICS)
def test_a_metric_of_the_loss_has_one_definition(name: str) -> None:
    metric = LOSS_METRICS[name]
    assert metric.name not in metrics.METRICS
    assert [other.name for other in LOSS_METRICS.values()].count(metric.name) == 1
    assert metrics.find_metric(metric.name) == metrics.Metric(metric.meaning, metric.unit)
