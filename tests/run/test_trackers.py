"""Experiment trackers: what they get, and that none of them stops a run."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jzero.config import TrainConfig
from jzero.errors import UserError
from jzero.files import read_jsonl
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.tracker_process import columns_and_data, markdown_table
from jzero.run.trackers import (
    LOG,
    LONGEST_QUEUE,
    Tracker,
    check_trackers,
    git_commit,
    parse_tracker,
)

ROOT = Path(__file__).resolve().parents[2]


# -- The setting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("wandb", "wandb", {"project": "jzero"}),
        ("wandb(project=my runs)", "wandb", {"project": "my runs"}),
        ("wandb(project=7)", "wandb", {"project": "7"}),
        ("trackio(project='a, b', space=me/x)", "trackio", {"project": "a, b", "space": "me/x"}),
        ("mlflow(uri=http://host:5000)", "mlflow", {"project": "jzero", "uri": "http://host:5000"}),
        ("a/my.py:Tracker(depth=2, name=x)", "a/my.py:Tracker", {"depth": 2, "name": "x"}),
        ("package.module:Class()", "package.module:Class", {}),
    ],
)
def test_a_tracker_is_a_name_with_arguments(text: str, name: str, arguments: dict) -> None:
    spec = parse_tracker(text)

    assert (spec.name, spec.arguments, spec.sends_completions) == (name, arguments, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wand", "give one of wandb, trackio, tensorboard, mlflow, a module:Class"),
        ("wandb,mlflow", "the flag once for each"),
        ("wandb(project=x", "close the bracket"),
        ("wandb(name=x)", "the arguments of wandb are project, completions"),
        ("wandb(x)", "write each argument as NAME=VALUE"),
        ("wandb(completions=no)", "completions must be True or False"),
        ("absent.py:Tracker", "there is no file absent.py"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        check_trackers([text])
    assert "\n" not in str(raised.value)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    for text, package in (("wandb", "wandb"), ("mlflow(project=x)", "mlflow")):
        with pytest.raises(UserError, match=f"needs the package: pip install {package}"):
            check_trackers([text])


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(UserError, match="names tensorboard 2 times"):
        check_trackers(["tensorboard", "tensorboard(directory=x)"])


# -- A user-defined tracker ------------------------------------------------------------------------

USERS_TRACKER = """
import json
from pathlib import Path

class Tracker:
    def __init__(self, run, file, fails_at=0):
        self.file = Path(run["workdir"], file)
        self.fails_at = fails_at
        self.write(run)

    def write(self, value):
        with self.file.open("a") as file:
            file.write(json.dumps(value) + "\\n")

    def log(self, step, metrics, tables):
        print("printed by the tracker")
        if step == self.fails_at:
            raise RuntimeError("no luck")
        self.write({"step": step, "metrics": metrics, "tables": tables})

    def finish(self, summary):
        self.write(summary)
"""


def log_two_steps(workdir: Path, tracker: str) -> None:
    """Logs two steps of a run to a tracker, and ends the run."""
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text('{"train": {"seed": 12345}}')
    writer = MetricsWriter(workdir, None, TrainConfig(trackers=(tracker,)))
    for step in (1, 2):
        row = {"response": f"words {step}", "score": 1.5, "rewards": {"format": 0.5}}
        writer.write_samples(step, [row])
        writer.write(step, {"reward/mean": step})
    writer.finish({"steps": 2, "eval": {"gsm8k": {"after": 0.5}}})
    writer.close()


def users_tracker(tmp_path: Path, arguments: str) -> str:
    path = tmp_path / "my_tracker.py"
    path.write_text(USERS_TRACKER)
    return f"{path}:Tracker({arguments})"


def test_a_users_class_gets_the_run_its_steps_and_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_two_steps(tmp_path / "run", users_tracker(tmp_path, "file=out.jsonl"))

    run, *steps, summary = read_jsonl(tmp_path / "run" / "out.jsonl")
    assert run["config"] == {"train": {"seed": 12345}}
    assert (run["name"], run["first_step"], run["commit"]) == ("run", 0, git_commit())
    assert run["id"] == (tmp_path / "run" / "Tracker_id").read_text()
    row = {"response": "words 1", "score": 1.5, "rewards": {"format": 0.5}}
    assert steps[0] == {
        "step": 1,
        "metrics": {"reward/mean": 1.0},
        "tables": {"completions": [row]},
    }
    assert len(steps) == 2
    assert summary == {"steps": 2, "eval": {"gsm8k": {"after": 0.5}}}
    # What it prints is in a file.
    assert capsys.readouterr().out == ""
    assert "printed by the tracker" in (tmp_path / "run" / LOG).read_text()


def test_completions_stay_here_if_the_setting_says_so(tmp_path: Path) -> None:
    log_two_steps(tmp_path / "run", users_tracker(tmp_path, "file=out.jsonl, completions=False"))

    assert [row["tables"] for row in read_jsonl(tmp_path / "run" / "out.jsonl")[1:3]] == [{}, {}]


def test_a_users_class_that_raises_loses_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_two_steps(tmp_path / "run", users_tracker(tmp_path, "file=out.jsonl, fails_at=1"))

    assert "a step is missing: no luck" in capsys.readouterr().out
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "out.jsonl")[1:2]] == [2]


def test_a_users_class_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.trackers=.*: TypeError: .*nothing"):
        log_two_steps(tmp_path / "run", users_tracker(tmp_path, "nothing=1"))


# -- TensorBoard and MLflow ------------------------------------------------------------------------


def test_tensorboard_gets_numbers_and_texts(tmp_path: Path) -> None:
    log_two_steps(tmp_path / "run", "tensorboard")

    [events] = (tmp_path / "run" / "tensorboard").iterdir()
    content = events.read_bytes()
    for text in (b"reward/mean", b"words 2", b"reward/format", b"12345", b"eval.gsm8k.after"):
        assert text in content


def test_tensorboard_in_another_directory_leaves_the_workdirs_own(tmp_path: Path) -> None:
    log_two_steps(tmp_path / "run", f"tensorboard(directory={tmp_path / 'boards'})")

    [own] = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"reward/mean" in own.read_bytes() and b"words" not in own.read_bytes()
    [events] = (tmp_path / "boards").glob("run-*/events*")
    assert b"words 1" in events.read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own libraries
def test_mlflow_gets_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    # MLflow puts the files of a run next to the database of the directory in which it started.
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        log_two_steps(tmp_path / "run", f"mlflow(project=reasoning, uri={uri})")

    client = mlflow.MlflowClient(uri)
    run = client.get_run((tmp_path / "run" / "mlflow_run").read_text())
    assert run.data.params["train.seed"] == "12345"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(item.step, item.value) for item in history] == [(1, 1.0), (2, 2.0)]
    files = {path.name for path in tmp_path.glob("mlruns/**/*.json")}
    assert files == {"config.json", "summary.json", "step_1.json", "step_2.json"}


def test_a_table_has_a_column_for_each_part_of_a_reward() -> None:
    rows = [
        {"response": "a|b\nc", "rewards": {"format": 0.5}},
        {"response": "d", "turns": [1], "rewards": {"length": 0.25}},
    ]

    columns, cells = columns_and_data(3, rows)

    assert columns == ["step", "response", "reward/format", "turns", "reward/length"]
    assert cells == [[3, "a|b\nc", 0.5, None, None], [3, "d", None, "[1]", 0.25]]
    assert markdown_table(columns[:2], [row[:2] for row in cells]).splitlines() == [
        "| step | response |",
        "| --- | --- |",
        "| 3 | a\\|b c |",
        "| 3 | d |",
    ]


# -- W&B and Trackio -------------------------------------------------------------------------------

# Writes the steps argv[2] to argv[3] of a run that is resumed before them.
WANDB_RUN = """
import sys
from pathlib import Path
from jzero import cli
from jzero.run.metrics_writer import MetricsWriter
from jzero.config import TrainConfig
workdir, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with cli.user_errors():
    settings = TrainConfig(trackers=("wandb(project=reasoning)",))
    writer = MetricsWriter(workdir, first - 1, settings)
    for step in range(first, last + 1):
        row = {"prompt": [{"role": "user"}], "response": "two words", "rewards": {"format": 0.5}}
        writer.write_samples(step, [row])
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
    assert table["columns"] == ["step", "prompt", "response", "reward/format"]
    assert table["data"] == [[1, '[{"role": "user"}]', "two words", 0.5]]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


STAND_IN_FOR_WANDB = """
import json
import os
import time
from pathlib import Path

class CommError(Exception):
    pass

class Run:
    url = "https://wandb.test/run"
    summary = {}
    def log(self, data, *, step):
        if os.environ.get("TRACKER") == "raises":
            raise CommError("the server is gone")
        if os.environ.get("TRACKER") == "dies":
            os._exit(3)
        if os.environ.get("TRACKER") == "hangs":
            time.sleep(600)
        path.with_name("wandb_steps").open("a").write(f"{step}\\n")
    def finish(self):
        path.with_name("wandb_summary").write_text(json.dumps(self.summary))

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
    settings = TrainConfig(trackers=("wandb(project=reasoning)",))

    writer = MetricsWriter(stand_in, None, settings)
    writer.write(1, {"reward/mean": 1.0})
    writer.finish({"steps": 1, "eval": {"gsm8k": {"after": 0.5}}, "config": {"train": {}}})
    writer.close()

    arguments = json.loads((stand_in / "wandb_arguments.json").read_text())
    assert (arguments["project"], arguments["name"]) == ("reasoning", name)
    assert not {"entity", "group"} & arguments.keys()
    assert (stand_in / "wandb_steps").read_text() == "1\n"
    assert json.loads((stand_in / "wandb_summary").read_text()) == {
        "steps": 1,
        "eval.gsm8k.after": 0.5,
    }
    assert arguments["config"].keys() == {"commit"}


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
@pytest.mark.parametrize("num_steps", [1, 2 * LONGEST_QUEUE])
def test_a_tracker_that_fails_neither_stops_nor_blocks_the_run(
    stand_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    behavior: str,
    message: str,
    num_steps: int,
) -> None:
    monkeypatch.setenv("TRACKER", behavior)
    run = {"workdir": str(stand_in), "name": "run", "id": "1", "config": {}, "commit": ""}
    start_seconds = 4.0 if behavior == "never starts" else 60.0

    tracker = Tracker(parse_tracker("wandb"), run, start_seconds, close_seconds=1.0)
    start = time.monotonic()
    for step in range(1, 1 + num_steps):
        tracker.log(step, {"reward/mean": 1.0})
    assert time.monotonic() - start < 1, "a step waited for the tracker"
    tracker.close({})

    lines = capsys.readouterr().out.splitlines()
    assert sum(message in line for line in lines) == 1, lines
    assert len(lines) <= 4, "each kind of failure is one line, and the address another"
    if any("not everything was sent" in line for line in lines):
        assert not any("has ended" in line for line in lines), "close ended it, nothing else did"


TRACKIO_RUN = """
import sys
from pathlib import Path
from jzero.config import TrainConfig
from jzero.run.metrics_writer import MetricsWriter
workdir = Path(sys.argv[1])
settings = TrainConfig(trackers=("trackio(project=reasoning)",))
for first, last in ((1, 3), (2, 4)):
    writer = MetricsWriter(workdir, first - 1, settings)
    for step in range(first, last + 1):
        writer.write_samples(step, [{"response": f"words {step}"}])
        writer.write(step, {"reward/mean": step})
    writer.close()
"""


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
    assert re.fullmatch(r"error: train.trackers=wandb\(.*: No API key .*\n", done.stderr)
