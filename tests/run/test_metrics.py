"""What a run writes about its steps: metrics, samples, W&B, the clock, and the table of metrics."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jsonl import read_jsonl

from jzero.files import write_atomic
from jzero.run import metrics
from jzero.run.clock import Clock
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
    writer = MetricsWriter(tmp_path, None, "")

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


# -- W&B -------------------------------------------------------------------------------------------

# Writes the steps argv[2] to argv[3] of a run that is resumed before them.
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


def run_with_wandb(
    workdir: Path, first: int, last: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Writes steps in a process of its own, because W&B reads the environment only once.

    The process knows no key of the user's.
    """
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    (workdir / "config.json").write_text('{"train": {"seed": 12345}}')
    keyless = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    keyless |= {"NETRC": str(workdir / "netrc"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WANDB_RUN, str(workdir), str(first), str(last)]
    return subprocess.run(
        command, env=keyless | environment, capture_output=True, text=True, timeout=120
    )


def test_wandb_gets_one_run_however_often_it_is_resumed(tmp_path: Path) -> None:
    for first, last in ((1, 4), (3, 5)):
        done = run_with_wandb(tmp_path, first, last, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr

    run_id = (tmp_path / "wandb_id").read_text()
    logs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [log.stem for log in logs] == [f"run-{run_id}", f"run-{run_id}"]
    for log in logs:
        assert b"reward/mean" in log.read_bytes()
        assert b"12345" in log.read_bytes(), "the config is missing"
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


STAND_IN_FOR_WANDB = """
import json
from pathlib import Path

class Error(Exception):
    pass

class Run:
    def log(self, data, *, step):
        pass
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass

def init(**arguments):
    Path(arguments["dir"], "wandb_arguments.json").write_text(json.dumps(arguments, default=str))
    return Run()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("", "", ""), (None, None, "run")),
        (("team", "ablations", "seed 1"), ("team", "ablations", "seed 1")),
    ],
)
def test_wandb_is_told_of_entity_group_and_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, str, str],
    expected: tuple[str | None, str | None, str],
) -> None:
    path = tmp_path / "wandb.py"
    path.write_text(STAND_IN_FOR_WANDB)
    spec = importlib.util.spec_from_file_location("wandb", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "wandb", module)
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")

    MetricsWriter(workdir, None, "reasoning", *given).close()

    arguments = json.loads((workdir / "wandb_arguments.json").read_text())
    assert arguments["project"] == "reasoning"
    assert (arguments["entity"], arguments["group"], arguments["name"]) == expected


def test_wandb_without_a_key_is_one_line(tmp_path: Path) -> None:
    done = run_with_wandb(tmp_path, 1, 1)

    assert done.returncode == 2
    assert re.fullmatch("error: train.wandb_project=reasoning: No API key .*\n", done.stderr)


# -- The printed line, the clock and the environment -----------------------------------------------


def test_the_step_line_shows_what_the_step_has() -> None:
    values = {"reward/mean": 0.5, "time/step": 12.34, "time/sample": 9.0}

    line = metrics.step_line(3, 200, values)

    assert line == "step   3/200  reward 0.500  seconds 12.3"


def test_the_step_line_shows_all_of_its_metrics() -> None:
    line = metrics.step_line(3, 200, dict.fromkeys(metrics.STEP_LINE, 0.1))

    for name in metrics.STEP_LINE:
        label = metrics.METRICS[name].label
        assert label
        assert label in line


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
    return (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_the_page_lists_every_metric_as_the_table_defines_it(page: str) -> None:
    listed = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)

    defined = []
    for name, metric in metrics.METRICS.items():
        meaning = metric.meaning.replace("|", "\\|")  # Markdown's escape in a table
        defined.append((name, metric.unit, meaning))
    assert listed == defined


def test_the_page_lists_the_labels_of_the_step_line(page: str) -> None:
    listed = re.findall(r"^\| ([a-z/ -]+) \| `(.*?)` \|$", page, re.MULTILINE)

    assert listed == [(metrics.METRICS[name].label, name) for name in metrics.STEP_LINE]


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
def test_a_name_is_found_under_its_entry(name: str, entry: str) -> None:
    assert metrics.find_metric(name) is metrics.METRICS[entry]


@pytest.mark.parametrize("name", ["loss", "reward", "eval/accuracy2", "async/staleness_", "x/mean"])
def test_a_name_that_the_table_does_not_define_is_refused(tmp_path: Path, name: str) -> None:
    assert metrics.find_metric(name) is None
    writer = MetricsWriter(tmp_path, None)

    with pytest.raises(AssertionError, match=name):
        writer.write(1, {name: 1.0})

    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
