"""The page of runs as one file: what it holds, its size, text that stays text, and how it looks."""

import json
import os
import random
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from browser import open_browser

from jzero import config, report
from jzero.run import metrics
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.samples import sample_row
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn
from jzero.watching.metric_table import MAX_POINTS, make_curve
from jzero.watching.rollouts import MAX_TEXT, RolloutIndex, shorten_text

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\"><!-- <script>",
    "a lone \ud800, a NUL \0, a \r return, \u2028 and \u202e",
    "{{ 7 * 7 }} {% raw %} ${7 * 7} &lt;b&gt; &amp;",
    "long" * 50_000,
]


def write(
    workdir: Path,
    steps: int,
    samples: int = 2,
    responses=("1+1",),
    lr: float = 1e-3,
    ended: bool = True,
) -> Path:
    """A workdir as a run leaves it."""
    workdir.mkdir()
    settings = config.Config(name="test")
    settings.optimizer.lr, settings.train.steps = lr, steps
    (workdir / "config.json").write_text(config.to_json(settings))
    (workdir / "versions.json").write_text(json.dumps({"jax": "1.2.3", "device": "2 x cpu"}))
    writer, chance = MetricsWriter(workdir, None), random.Random(0)
    for step in range(1, steps + 1):
        values = {name: chance.random() for name in metrics.STEP_LINE} | {
            "time/sample": 0.5,
            "grade/errors": 0.0,
        }
        values |= (
            {"time/eval": 2.0, "eval/accuracy": 0.25, "eval/stderr": 0.01} if step % 5 == 0 else {}
        )
        writer.write(step, values)
        rows = []
        for sample in range(samples):
            text = responses[(step + sample) % len(responses)]
            grade = Grade(
                score=sample, correct=bool(sample), reason="correct" if sample else "wrong value"
            )
            turns = (Turn(3, 3 + len(text), text, "stop", grade),)
            problem = Problem(
                f"test/{step}", "countdown", [{"role": "user", "content": text}], {"target": step}
            )
            rows.append(
                sample_row(
                    Rollout(
                        problem,
                        sample,
                        Tokens([0] * len(text)),
                        turns,
                        grade,
                        advantage=sample - 0.5,
                    )
                )
            )
        with (workdir / "samples.jsonl").open(
            "a"
        ) as file:  # with escapes: a lone surrogate is no UTF-8
            file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
    writer.close()
    if ended:
        summary = {
            "steps": steps,
            "seconds": 90.0,
            "seconds_by_phase": {"sample": 60.5},
            "peak_rss_bytes": 2**30,
        }
        summary["eval_all"] = {
            "before": {"eval/accuracy": 0.125, "eval/stderr": 0.02},
            "after_warm_start": {},
        }
        (workdir / "summary.json").write_text(json.dumps(summary))
    return workdir


def scripts(page: str) -> list[str]:
    """What a parser of HTML takes for scripts."""
    found: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs) -> None:
            found.extend([""] if tag == "script" else [])

        def handle_data(self, data) -> None:
            if self.lasttag == "script" and data.strip():
                found[-1] += data

    Parser().feed(page)
    return found


def data(page: str) -> dict:
    return json.loads(scripts(page)[0])


def rows_of(page: str, run: int = 0) -> list[dict]:
    return data(page)["rollouts"][run]["rows"]


@pytest.mark.parametrize("steps", [1, 499, 500, 501, 2003])
def test_a_point_is_of_every_step_in_its_bin(steps) -> None:
    chance = random.Random(1)
    values = {step: chance.gauss(0, 1) for step in range(1, steps + 1)}
    points = make_curve(np.array([*values]), np.array([*values.values()]))
    assert len(points) == min(steps, MAX_POINTS)
    covered = []
    for first, last, *numbers in points:
        inside = [values[step] for step in range(int(first), int(last) + 1)]
        covered += range(int(first), int(last) + 1)
        assert numbers == pytest.approx(
            [sum(inside) / len(inside), min(inside), max(inside)], rel=1e-4
        )
    assert covered == list(range(1, steps + 1))


def test_a_phase_that_did_not_happen_took_no_time_and_an_evaluation_is_no_zero(
    tmp_path: Path,
) -> None:
    rows = [{"step": 1, "time/eval": 2.0, "eval/accuracy": 0.5}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [run] = data(report.make_report([tmp_path]))["state"]["runs"]
    assert [point[2] for point in run["curves"]["time/eval"]] == [2.0, 0.0]
    assert run["curves"]["eval/accuracy"] == [[1, 1, 0.5, 0.5, 0.5]]


def test_a_run_that_goes_on_and_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 5, ended=False)
    for name in ("metrics", "samples"):
        with (run / f"{name}.jsonl").open("ab") as file:
            file.write('{"step": 6, "é'.encode()[:-1])
    for name in ("config", "versions"):
        (run / f"{name}.json").unlink()
    page = data(report.make_report([run]))
    (found,) = page["state"]["runs"]
    assert found["curves"]["reward/mean"][-1][:2] == [5, 5]
    assert page["rollouts"][0]["rows"][-1]["step"] == 5
    assert found["config"] == found["versions"] == found["summary"] == {}
    (run / "metrics.jsonl").write_text("")
    assert data(report.make_report([run]))["state"]["runs"][0]["curves"] == {}


def test_text_stays_text(tmp_path: Path) -> None:
    run = write(tmp_path / "run", len(HOSTILE), responses=HOSTILE)
    page = report.make_report([run])
    assert page.isascii() and "\0" not in page and len(scripts(page)) == 2
    rows = rows_of(page)
    assert sorted(map(shorten_text, HOSTILE * 2)) == sorted(row["response"] for row in rows)
    cut = shorten_text(HOSTILE[-1])
    assert len(cut) < MAX_TEXT + 100
    assert "180000 characters are left out" in cut and cut.endswith("long")
    assert rows[0]["gold"] == {"target": 1}


@pytest.mark.parametrize(("steps", "each"), [(10, 2), (400, 3), (7, 400), (1, 2)])
def test_samples_are_of_steps_evenly_apart_and_of_the_last(tmp_path: Path, steps, each) -> None:
    row = {"prompt": "p", "response": "r", "gold": 1}
    with (tmp_path / "samples.jsonl").open("w") as file:
        for step in range(steps):
            file.writelines(json.dumps({"step": step} | row) + "\n" for _ in range(each))
    index = RolloutIndex(tmp_path)
    index.poll()
    frozen = report.freeze_rollouts(index, num_runs=2)
    kept = frozen["rows"]
    assert frozen["total"] == steps * each
    assert frozen["blocks"][0]["step"] == [row["step"] for row in kept]
    assert [row["line"] for row in kept] == list(range(len(kept)))
    chosen = sorted({row["step"] for row in kept})
    most = report.MAX_ROLLOUTS // 2
    assert len(kept) <= most and chosen[-1] == steps - 1
    apart = [b - a for a, b in pairwise(chosen)]
    assert max(apart, default=0) - min(apart, default=0) <= 1
    assert len(kept) == min(steps * each, most // each * each or most)


@pytest.mark.parametrize(
    ("letter", "runs"),
    [
        ("a", 1),
        ("数", 1),
        ("<", 2),
    ],
)
def test_a_run_of_2000_steps_stays_under_5_megabytes(tmp_path: Path, letter, runs) -> None:
    chance, written = random.Random(0), []
    for number in range(runs):
        workdir = tmp_path / str(number)
        workdir.mkdir()
        with (workdir / "metrics.jsonl").open("w") as file:
            for step in range(1, 2001):
                values = {
                    f"group{i % 6}/metric_of_some_length_{i}": chance.random() * 10 ** (i % 9)
                    for i in range(45)
                }
                file.write(json.dumps({"step": step} | values) + "\n")
        row = {
            "id": "x/1",
            "sample": 0,
            "prompt": letter * 200,
            "response": letter * 1000,
            "gold": {"target": 1},
        }
        row |= {
            "score": 1.0,
            "advantage": 0.5,
            "reason": "correct",
            "tokens": 250,
            "finish": "stop",
        }
        with (workdir / "samples.jsonl").open("w") as file:
            file.writelines(
                json.dumps({"step": step} | row) + "\n" for step in range(1, 2001) for _ in range(8)
            )
        written.append(workdir)
    page = report.make_report(written)
    assert len(page) < 5e6
    for frozen in data(page)["rollouts"]:
        assert frozen["total"] == 16_000 and len(frozen["rows"]) > 100
        assert frozen["rows"][-1]["step"] == 2000
    for found in data(page)["state"]["runs"]:
        assert len(found["curves"]) == 45 and {
            len(points) for points in found["curves"].values()
        } == {500}


def command(*arguments) -> subprocess.CompletedProcess:
    """Without a device: JAX would fail as soon as one is asked for."""
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
    full = [sys.executable, "-m", "jzero.report", *map(str, arguments)]
    return subprocess.run(full, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 3), write(tmp_path / "two", 2, lr=2e-3, ended=False)
    done = command(one)
    assert done.returncode == 0 and done.stdout == f"{one / 'report.html'}: 0.1 MB\n", done.stderr
    done = command(one, two, "--out", tmp_path / "new" / "both.html")
    assert done.returncode == 0 and not (two / "report.html").exists()
    found = data((tmp_path / "new" / "both.html").read_text())["state"]
    assert [run["name"] for run in found["runs"]] == [str(one), str(two)]
    assert [run["config"]["optimizer.lr"] for run in found["runs"]] == [1e-3, 2e-3]
    assert found["defaults"] == config.flatten(json.loads(config.to_json(config.Config())))
    for arguments, message in (
        ([tmp_path / "new"], "has no metrics.jsonl: give the --workdir"),
        ([], "required: WORKDIR"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and re.fullmatch(f"error: .*{message}.*\n", done.stderr)


def test_units_are_those_of_the_table(tmp_path: Path) -> None:
    """A count of groups is no share, though its name ends like one: it was drawn in per cent."""
    workdir = write(tmp_path / "run", 2)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "async/ready_groups": 2.0, "of/another_version": 1.0}\n')
    units = data(report.make_report([workdir]))["state"]["units"]
    assert units["async/ready_groups"] == "groups"
    assert units["reward/accuracy"] == units["eval/accuracy"] == "share"
    assert units["time/sample"] == "seconds"
    assert units["of/another_version"] == ""


def test_a_browser_draws_it_without_a_network(tmp_path: Path) -> None:
    one = write(tmp_path / "one", 10, responses=HOSTILE)
    two = write(tmp_path / "two", 1200, lr=2e-3, ended=False)
    page = tmp_path / "both.html"
    page.write_text(report.make_report([one, two]))
    with open_browser(tmp_path / "profile") as tab:
        tab.evaluate("setTimeout(() => { nonsense() })")
        time.sleep(0.2)
        tab.evaluate("1")
        assert "nonsense is not defined" in tab.errors.pop()  # that the test would see an error

        tab.open(page.as_uri())
        tab.wait_for("document.querySelectorAll('article').length > 0")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []
        assert tab.evaluate("document.title") == "jzero runs"
        captions = tab.evaluate(
            "[...document.querySelectorAll('figcaption')].map(e => e.innerText)"
        )
        assert "reward/accuracy %" in captions and "rollout/length tokens" in captions
        assert f"{one} s" in captions and f"{two} s" in captions  # stacked phases
        text = tab.evaluate("document.documentElement.textContent")
        assert "10 of 10" in text and "1200 of 1200, not ended" in text
        assert "12.5 ± 2.0" in text and "step 10 (after)" in text and "grade/errors = 0" in text
        assert "a point of a long run is the mean of several steps" in text.lower()
        shown = tab.evaluate(
            "[...document.querySelectorAll('article')].map(e => e.innerText).join()"
        )
        assert "advantage +0.500" in shown and "advantage \u22120.500" in shown
        assert "wrong value" in shown
        drawn = tab.evaluate("document.querySelector('main').innerHTML")
        assert not re.search("NaN|undefined|Infinity", drawn)
