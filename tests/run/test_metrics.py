"""What a run writes about its steps: metrics, samples, W&B, the clock, and the table of metrics."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import read_jsonl

from jzero.config import TrainConfig
from jzero.files import write_atomic
from jzero.run import metrics
from jzero.run.clock import Clock
from jzero.run.environment import versions
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.trackers import LONGEST_QUEUE, Tracker

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


# -- W&B -------------------------------------------------------------------------------------------

# Writes the steps argv[2] to argv[3] of a run that is resumed before them.
WANDB_RUN = """
import sys
from pathlib import Path
from jzero import cli
from jzero.run.metrics_writer import MetricsWriter
from jzero.config import TrainConfig
workdir, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with cli.user_errors():
    settings = TrainConfig(wandb_project="reasoning", log_completions=True)
    writer = MetricsWriter(workdir, first - 1, settings)
    for step in range(first, last + 1):
        writer.write_samples(step, [{"prompt": [{"role": "user"}], "response": "two words"}])
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
    tables = sorted((tmp_path / "wandb").glob("offline-run-*/files/media/table/completions*"))
    assert len(tables) == 7, "one table for each step that was logged"
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["step", "prompt", "response"]
    assert table["data"] == [[1, '[{"role": "user"}]', "two words"]]
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


STAND_IN_FOR_WANDB = """
import json
import os
import time
from pathlib import Path

class CommError(Exception):
    pass

class Run:
    def log(self, data, *, step):
        if os.environ.get("TRACKER") == "raises":
            raise CommError("the server is gone")
        if os.environ.get("TRACKER") == "dies":
            os._exit(3)
        if os.environ.get("TRACKER") == "hangs":
            time.sleep(600)
        path.with_name("wandb_steps").open("a").write(f"{step}\\n")
    def finish(self):
        pass

def init(**arguments):
    global path
    path = Path(arguments["dir"], "wandb_arguments.json")
    path.write_text(json.dumps(arguments, default=str))
    if os.environ.get("TRACKER") == "unreachable":
        raise CommError("no route to the server")
    if os.environ.get("TRACKER") == "never starts":
        time.sleep(600)
    return Run()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a workdir whose tracker processes find a stand-in for the package wandb."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(STAND_IN_FOR_WANDB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(ROOT)]))
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    return workdir


@pytest.mark.parametrize(("variable", "name"), [("", "run"), ("seed 1", "seed 1")])
def test_wandb_has_the_name_of_its_environment_variable_or_of_the_workdir(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    """W&B itself reads WANDB_ENTITY and WANDB_RUN_GROUP where it is told neither."""
    monkeypatch.setenv("WANDB_NAME", variable)
    settings = TrainConfig(wandb_project="reasoning")

    writer = MetricsWriter(stand_in, None, settings)
    writer.write(1, {"reward/mean": 1.0})
    writer.close()

    arguments = json.loads((stand_in / "wandb_arguments.json").read_text())
    assert (arguments["project"], arguments["name"]) == ("reasoning", name)
    assert not {"entity", "group"} & arguments.keys()
    assert (stand_in / "wandb_steps").read_text() == "1\n"


@pytest.mark.parametrize(
    ("behavior", "message"),
    [
        ("unreachable", "no route to the server; the run continues without it"),
        ("never starts", "no answer in 4 seconds; the run continues meanwhile"),
        ("raises", "a step is missing: the server is gone"),
        ("dies", "the tracker has ended; the run continues without it"),
        ("hangs", "not everything was sent within 1 seconds"),
    ],
)
@pytest.mark.quick_cases("unreachable", "hangs")
def test_a_tracker_that_fails_neither_stops_nor_blocks_the_run(
    stand_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    behavior: str,
    message: str,
) -> None:
    monkeypatch.setenv("TRACKER", behavior)
    arguments = {"dir": str(stand_in)}
    start_seconds = 4.0 if behavior == "never starts" else 60.0

    tracker = Tracker("wandb", "W&B", arguments, start_seconds, close_seconds=1.0)
    start = time.monotonic()
    for step in range(1, 2 * LONGEST_QUEUE):
        tracker.log(step, {"reward/mean": 1.0})
    assert time.monotonic() - start < 1, "a step waited for the tracker"
    tracker.close()

    lines = capsys.readouterr().out.splitlines()
    assert sum(message in line for line in lines) == 1, lines
    assert len(lines) <= 3, "each kind of failure is one line"
    if any("not everything was sent" in line for line in lines):
        assert not any("has ended" in line for line in lines), "close ended it, nothing else did"


TRACKIO_RUN = """
import sys
from pathlib import Path
from jzero.config import TrainConfig
from jzero.run.metrics_writer import MetricsWriter
workdir = Path(sys.argv[1])
settings = TrainConfig(trackio_project="reasoning", log_completions=True)
for first, last in ((1, 3), (2, 4)):
    writer = MetricsWriter(workdir, first - 1, settings)
    for step in range(first, last + 1):
        writer.write_samples(step, [{"response": f"words {step}"}])
        writer.write(step, {"reward/mean": step})
    writer.close()
"""


@pytest.mark.thorough
def test_trackio_gets_each_step_once_with_its_table(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "trackio"
    environment = os.environ | {
        "TRACKIO_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", TRACKIO_RUN, str(tmp_path)]

    subprocess.run(command, env=environment, check=True, timeout=240)

    [database] = folder.glob("*.db")
    query = "select step, run_name, metrics from metrics order by id"
    logged = sqlite3.connect(database).execute(query).fetchall()
    assert [row[0] for row in logged] == [1, 2, 3, 4]
    assert len({row[1] for row in logged}) == 1
    for step, _, metrics_json in logged:
        assert json.loads(metrics_json)["reward/mean"] == step
        assert f"words {step}".encode() in metrics_json


def test_wandb_without_a_key_is_one_line(tmp_path: Path) -> None:
    done = run_with_wandb(tmp_path, 1, 1)

    assert done.returncode == 2
    assert re.fullmatch("error: train.wandb_project=reasoning: No API key .*\n", done.stderr)


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
    for name, metric in metrics.METRICS.items():
        meaning = metric.meaning.replace("|", "\\|")  # Markdown's escape in a table
        defined.append((name, metric.unit, meaning))
    assert listed == defined


def test_the_page_lists_the_labels_of_the_table(page: str) -> None:
    listed = re.findall(r"^\| ([a-z/ -]+) \| `(.*?)` \|$", page, re.MULTILINE)

    assert listed == [(metrics.METRICS[name].label, name) for name in metrics.STEP_LINE]


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
def test_a_name_that_the_table_does_not_define_is_refused(tmp_path: Path, name: str) -> None:
    assert metrics.find_metric(name) is None
    writer = MetricsWriter(tmp_path, None)

    with pytest.raises(AssertionError, match=name):
        writer.write(1, {name: 1.0})

    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
