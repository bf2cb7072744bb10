"""The page of runs: what it holds, its size, text that stays text, and a browser that draws it."""

import html
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from jzero import config, report
from jzero.run import metrics
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.samples import sample_row
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn

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


@pytest.mark.parametrize("steps", [1, 499, 500, 501, 2003])
def test_a_point_is_of_every_step_in_its_bin(steps) -> None:
    chance = random.Random(1)
    rows = [{"step": step, "a": chance.gauss(0, 1)} for step in range(1, steps + 1)]
    points = report.make_curve(rows, "a")
    assert len(points) == min(steps, report.MAX_POINTS)
    covered = []
    for first, last, *numbers in points:
        inside = [row["a"] for row in rows if first <= row["step"] <= last]
        covered += range(first, last + 1)
        assert numbers == pytest.approx(
            [sum(inside) / len(inside), min(inside), max(inside)], rel=1e-4
        )
    assert covered == list(range(1, steps + 1))


def test_a_phase_that_did_not_happen_took_no_time_and_an_evaluation_is_no_zero() -> None:
    rows = [{"step": 1, "time/eval": 2.0, "eval/accuracy": 0.5}, {"step": 2}]
    assert [point[2] for point in report.make_curve(rows, "time/eval")] == [2.0, 0.0]
    assert report.make_curve(rows, "eval/accuracy") == [[1, 1, 0.5, 0.5, 0.5]]


def test_a_run_that_goes_on_and_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 5, ended=False)
    for name in ("metrics", "samples"):
        with (run / f"{name}.jsonl").open("ab") as file:
            file.write('{"step": 6, "é'.encode()[:-1])
    for name in ("config", "versions"):
        (run / f"{name}.json").unlink()
    (found,) = data(report.render_page([run]))["runs"]
    assert found["curves"]["reward/mean"][-1][:2] == [5, 5] and found["samples"][-1]["step"] == 5
    assert found["config"] == found["versions"] == found["summary"] == {}
    (run / "metrics.jsonl").write_text("")
    assert data(report.render_page([run]))["runs"][0]["curves"] == {}  # before the first step


def test_text_stays_text(tmp_path: Path) -> None:
    run = write(tmp_path / "run", len(HOSTILE), responses=HOSTILE)
    page = report.render_page([run])
    assert page.isascii() and "\0" not in page and len(scripts(page)) == 2
    texts = [row["response"] for row in data(page)["runs"][0]["samples"]]
    assert sorted(map(report.shorten, HOSTILE * 2)) == sorted(texts)
    cut = report.shorten(HOSTILE[-1])
    assert (
        len(cut) < report.MAX_TEXT + 100
        and "180000 characters are left out" in cut
        and cut.endswith("long")
    )
    assert data(page)["runs"][0]["samples"][0]["gold"] == '{"target": 1}'


@pytest.mark.parametrize(("steps", "each"), [(10, 2), (400, 3), (7, 400), (1, 2)])
def test_samples_are_of_steps_evenly_apart_and_of_the_last(steps, each) -> None:
    row = {"prompt": "p", "response": "r", "gold": 1}
    kept = report.choose_samples(
        [row | {"step": step} for step in range(steps) for _ in range(each)], num_runs=2
    )
    chosen = sorted({row["step"] for row in kept})
    assert len(kept) <= report.MAX_ROLLOUTS // 2 and chosen[-1] == steps - 1
    apart = [b - a for a, b in pairwise(chosen)]
    assert max(apart, default=0) - min(apart, default=0) <= 1
    assert len(kept) == min(
        steps * each, report.MAX_ROLLOUTS // 2 // each * each or report.MAX_ROLLOUTS // 2
    )


@pytest.mark.parametrize(
    ("letter", "runs"),
    [
        pytest.param("a", 1, marks=pytest.mark.thorough),
        pytest.param("数", 1, marks=pytest.mark.thorough),
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
    page = report.render_page(written)
    assert len(page) < 5e6
    for found in data(page)["runs"]:
        assert (
            found["sampled"] == 16_000
            and len(found["samples"]) > 100
            and found["samples"][-1]["step"] == 2000
        )
        assert len(found["curves"]) == 45 and {
            len(points) for points in found["curves"].values()
        } == {500}


def command(*arguments) -> subprocess.CompletedProcess:
    """Without a device: JAX would fail as soon as one is asked for."""
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
    full = [sys.executable, "-m", "jzero.report", *map(str, arguments)]
    return subprocess.run(full, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 3), write(tmp_path / "two", 2, lr=2e-3, ended=False)
    done = command(one)
    assert done.returncode == 0 and done.stdout == f"{one / 'report.html'}: 0.0 MB\n", done.stderr
    done = command(one, two, "--out", tmp_path / "new" / "both.html")
    assert done.returncode == 0 and not (two / "report.html").exists()
    found = data((tmp_path / "new" / "both.html").read_text())
    assert [run["name"] for run in found["runs"]] == [str(one), str(two)]
    assert [run["config"]["optimizer.lr"] for run in found["runs"]] == [1e-3, 2e-3]
    assert found["defaults"] == json.loads(json.dumps(config.flatten(asdict(config.Config()))))
    for arguments, message in (
        ([tmp_path], "has no metrics.jsonl: give the --workdir"),
        ([], "required: WORKDIR"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and re.fullmatch(f"error: .*{message}.*\n", done.stderr)


# -- in a browser ----------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browse(page: Path, scratch: Path) -> tuple[str, list[str], list[str]]:
    """Opens a page in a browser without a network.

    Returns the document after its scripts ran, what the console said, and the addresses that the
    page asked for.
    """
    chrome = os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if chrome is None:
        pytest.skip("no browser: install chromium, or set CHROME to one")
    log = scratch / "net.json"
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --enable-logging=stderr "
        "--virtual-time-budget=5000"
    )
    hosts, profile = (
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={scratch / 'profile'}",
    )
    full = [
        chrome,
        *flags.split(),
        hosts,
        profile,
        f"--log-net-log={log}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(full, capture_output=True, timeout=60)
    said = re.findall(r"CONSOLE[^\n]*", done.stderr.decode(errors="replace"))
    asked = re.findall(
        r'"network_isolation_key":"file://.{,400}?"url":"([^"]*)"', log.read_text(errors="replace")
    )
    return done.stdout.decode(errors="replace"), said, asked


def test_a_browser_draws_it_without_a_network(tmp_path: Path) -> None:
    control = tmp_path / "control.html"  # that the test would see a request and an error
    control.write_text(
        '<p>a</p><script>fetch("http://example.com/a").catch(() => {}); nonsense()</script>'
    )
    document, said, asked = browse(control, tmp_path)
    assert (
        "<p>a</p>" in document
        and "http://example.com/a" in asked
        and "nonsense is not defined" in said[0]
    )

    one = write(tmp_path / "one", 10, responses=HOSTILE)
    two = write(tmp_path / "two", 1200, lr=2e-3, ended=False)
    page = tmp_path / "both.html"
    page.write_text(report.render_page([one, two]))
    document, said, asked = browse(page, tmp_path)
    assert (said, asked) == ([], [])
    assert (
        "<title>jzero report</title>" in document
        and "document.title = 'taken'" in html.unescape(document)
    )
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "|", drawn))
    captions = re.findall(r"<figcaption>(.*?)<span>(.*?)</span>", drawn)
    assert ("reward/accuracy", "  %") in captions and ("rollout/length", "  tokens") in captions
    assert [unit for title, unit in captions if title in (str(one), str(two))] == [
        "  s",
        "  s",
    ]  # stacked phases
    assert "|10 of 10|" in text and "|1200 of 1200, not ended|" in text
    assert "|12.5 ± 2.0||" in text and "|step 10 (after)|" in text and "grade/errors = 0" in text
    assert "a point of a long run is the mean of several steps" in text.lower()
    assert re.search(r"\|optimizer\.lr\|+0\.000001\|+0\.001\|+0\.002\|", text)
    assert (
        "advantage |+0.500|" in text
        and "advantage |\u22120.500|" in text
        and "grade |wrong value|" in text
    )
    assert not re.search("NaN|undefined|Infinity", drawn)


def test_units_are_those_of_the_table(tmp_path: Path) -> None:
    """A count of groups is no share, though its name ends like one: it was drawn in per cent."""
    workdir = write(tmp_path / "run", 2)
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "async/ready_groups": 2.0, "of/another_version": 1.0}\n')
    units = data(report.render_page([workdir]))["units"]
    assert units["async/ready_groups"] == "groups"
    assert units["reward/accuracy"] == units["eval/accuracy"] == "share"
    assert units["time/sample"] == "seconds"
    assert units["of/another_version"] == ""
