"""Sends every hostile value to every field of every body and file format that jzero reads.

    pytest tests/attacks/test_values_fields.py                     # a seeded sample
    pytest tests/attacks/test_values_fields.py --all-tries         # every value in every field

The fields are those of valid documents, which the code itself writes where it can: a new field is
attacked without a new test. A reader may use the value or refuse it in one line: with a UserError,
or with a status of 4xx. A traceback, a 5xx, a NaN that is used as a number, or a read without an
end breaks a try.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jzero import config
from jzero.errors import UserError
from jzero.types import JsonValue
from jzero.watching.runs import WatchedRun, Watcher
from tests.attacks.conftest import Tries
from tests.hostile_values import Mutation, hostile_files, mutations, sampled, to_json

SAMPLED = 100  # tries per document without --all-tries


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Callable[[Iterator[Mutation]], list[Mutation]]:
    """Returns a function that takes the tries of this session out of all mutations."""
    if request.config.getoption("--all-tries"):
        return list
    return lambda tries: sampled(tries, SAMPLED)


Chosen = Callable[[Iterator[Mutation]], list[Mutation]]


@contextmanager
def one_line_allowed() -> Iterator[None]:
    """Lets a UserError pass that is one short printable line."""
    try:
        yield
    except UserError as error:
        assert str(error).isprintable(), repr(str(error))
        assert len(str(error)) < 1000, f"{len(str(error))} characters"


# -- The settings of a run -------------------------------------------------------------------------


def test_the_settings_of_a_run(chosen: Chosen, tries: Tries) -> None:
    for mutation in chosen(mutations(WATCHED["config.json"])):
        with tries.attempt("config.json", str(mutation)), one_line_allowed():
            settings = config.from_json(to_json(mutation.document), "runs/a/config.json")
            for value in config.flatten(json.loads(config.to_json(settings))).values():
                assert not isinstance(value, float) or math.isfinite(value)


# -- watch and report ------------------------------------------------------------------------------

METRICS_ROW: JsonValue = {
    "step": 3,
    "reward/mean": 0.5,
    "time/step": 1.0,
    "time/sample": 0.5,
    "rollout/tokens": 100,
    "rollout/slot_utilization": 0.1,
    "rollout/length": 10.0,
    "update/padding": 0.9,
    "update/left_out": 0.0,
    "policy/entropy": 0.1,
    "compile/seconds": 0.5,
}
SAMPLE_ROW: JsonValue = {
    "step": 3,
    "id": "p",
    "sample": 0,
    "group": 0,
    "prompt": "q",
    "response": "r",
    "gold": {"answer": 5},
    "score": 1.0,
    "correct": True,
    "failed": False,
    "reason": "correct",
    "finish": "stop",
    "tokens": 3,
    "advantage": 0.5,
    "rewards": {"accuracy": 1.0, "length": 0.5},
    "token_texts": ["a", "b"],
    "logps": [-0.5, -0.25],
    "ages": [0, 0],
    "token_advantages": [0.5, 0.5],
}
SUMMARY: JsonValue = {
    "steps": 5,
    "seconds": 10.0,
    "seconds_by_phase": {"sample": 5.0},
    "peak_rss_bytes": 1 << 30,
    "eval_all": {"before": {"eval/accuracy": 0.5}, "after": {"eval/accuracy": 0.75}},
    "export": None,
    "remarks": [],
}
VERSIONS: JsonValue = {"jzero": "1", "jax": "2", "device": "cpu"}
WATCHED: dict[str, JsonValue] = {
    "metrics.jsonl": METRICS_ROW,
    "samples.jsonl": SAMPLE_ROW,
    "samples.1.jsonl": SAMPLE_ROW,
    "summary.json": SUMMARY,
    "versions.json": VERSIONS,
    "config.json": json.loads(config.to_json(config.Config())),
}


def write_run(workdir: Path) -> None:
    """Writes the files of a healthy run."""
    workdir.mkdir(parents=True, exist_ok=True)
    assert isinstance(METRICS_ROW, dict)
    assert isinstance(SAMPLE_ROW, dict)
    for name, document in WATCHED.items():
        if not name.endswith(".jsonl"):
            (workdir / name).write_text(json.dumps(document))
    for name, row in (("metrics.jsonl", METRICS_ROW), ("samples.jsonl", SAMPLE_ROW)):
        rows = [json.dumps(row | {"step": step}) + "\n" for step in (1, 2)]
        (workdir / name).write_text("".join(rows))


def follow(workdir: Path, *, describes: bool = False) -> WatchedRun:
    """Reads a run as the page does. Raises if the page would get anything that is not JSON."""
    run = WatchedRun(workdir)
    if describes:  # takes a hundredth of a second
        run.describe()
    run.refresh()
    run.rollouts.index_some(math.inf)
    replies = [
        run.state()[1],
        [block.to_json() for block in run.rollouts.blocks],
        run.rollouts.rows(range(5)),
        run.rollouts.rows([10**30, -(10**30), 2**63]),
        run.rollouts.search("a"),
    ]
    json.dumps(replies, allow_nan=False)
    return run


@pytest.mark.parametrize("filename", WATCHED)
def test_a_watched_run(filename: str, tmp_path: Path, chosen: Chosen, tries: Tries) -> None:
    workdir = tmp_path / "run"
    write_run(workdir)
    healthy = (workdir / filename).read_text() if (workdir / filename).exists() else ""
    assert isinstance(METRICS_ROW, dict)
    last = json.dumps(METRICS_ROW | {"step": 500}) + "\n"
    for mutation in chosen(mutations(WATCHED[filename])):
        with tries.attempt("watch", f"{filename}: {mutation}"):
            text = to_json(mutation.document) + "\n"
            is_log = filename.endswith(".jsonl")
            (workdir / filename).write_text(healthy + text if is_log else text)
            run = follow(workdir, describes=filename == "config.json")
            # The run is followed after the hostile line.
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(last)
            run.refresh()
            assert "curves" in run.state()[1]
            if filename == "metrics.jsonl":
                is_ahead = run.metrics.steps[-1] > 500
                assert is_ahead or run.metrics.steps[-1] == 500
                (workdir / filename).write_text(healthy)
            else:
                assert run.metrics.steps[-1] == 500
    assert json.loads(last)["step"] == 500


@pytest.mark.parametrize("filename", WATCHED)
def test_a_watched_run_with_a_hostile_file(filename: str, tmp_path: Path, tries: Tries) -> None:
    for name, path in hostile_files(tmp_path, filename):
        with tries.attempt("watch", f"{filename} is {name}"):
            workdir = path.parent
            path.rename(workdir / "kept")
            write_run(workdir)
            (workdir / filename).unlink(missing_ok=True)
            (workdir / "kept").rename(path)
            healthy = tmp_path / "healthy"
            write_run(healthy)
            watcher = Watcher([workdir, healthy])
            watcher.stop()
            state = watcher.state("")
            assert state["runs"][1]["axes"], "the run beside it is shown"
            follow(workdir, describes=True)
            for file in workdir.iterdir():
                if file != path:
                    file.unlink()
