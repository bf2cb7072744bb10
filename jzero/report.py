"""`python -m jzero.report WORKDIR [WORKDIR ...] [--out FILE]`: runs as one HTML page.

The page shows curves, evaluations, sampled rollouts, settings and versions. A run may have ended,
may have been killed, or may still be running; the curves of several runs are overlaid. The page is
one file that needs no network: report.html next to this module is its template, and a script in it
draws the JSON that `render_page` inserts.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import numpy as np

from jzero import cli, config
from jzero.errors import UserError
from jzero.files import JsonObject, parse_json, read_jsonl, write_atomic
from jzero.run import history
from jzero.run.metrics import STEP_LINE, find_metric

MAX_POINTS = 500  # per curve
MAX_ROLLOUTS = 300  # on the page, for all runs together
MAX_ROLLOUT_BYTES = 2_000_000  # of JSON, for all runs together
MAX_TEXT = 20_000  # characters of a prompt, response or gold answer

MARK = "<title>jzero report</title>"  # identifies pages of this command

# A point of a curve: first step, last step, mean, minimum and maximum over these steps.
Point = list[float]


def render_page(workdirs: Sequence[Path]) -> str:
    """Returns the HTML of the page, as ASCII. Characters with a meaning in HTML are escaped."""
    runs = [read_run(workdir, len(workdirs)) for workdir in workdirs]
    data = {
        "runs": runs,
        "main": list(STEP_LINE),
        "units": metric_units(name for run in runs for name in metric_names(run)),
        "defaults": config.flatten(json.loads(config.to_json(config.Config()))),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return jinja2.Template(template, autoescape=True).render(data=data)


def read_run(workdir: Path, num_runs: int) -> JsonObject:
    """Returns the data of a workdir for the page, as one of `num_runs` runs."""
    if not (workdir / "metrics.jsonl").exists():
        raise UserError(f"{workdir} has no metrics.jsonl: give the --workdir of a run")
    steps = read_jsonl(workdir / "metrics.jsonl")
    samples = read_jsonl(workdir / "samples.jsonl")
    names = dict.fromkeys(name for row in steps for name in row if name != "step")
    return {
        "name": str(workdir),
        "config": config.flatten(read_json(workdir / "config.json")),
        "training": describe_training(workdir / "config.json"),
        "versions": read_json(workdir / "versions.json"),
        "summary": read_json(workdir / "summary.json"),
        "curves": {name: make_curve(steps, name) for name in names},
        "sampled": len(samples),
        "samples": choose_samples(samples, num_runs),
    }


def describe_training(path: Path) -> str:
    """Returns the kind of training of a run's config.json, and its teachers."""
    try:
        settings = config.from_json(path.read_text(encoding="utf-8"), str(path))
        stage = history.stage_of(settings, 0)
    except (OSError, UserError):
        # Runs of other versions of jzero may have settings with other names.
        return ""
    if not stage.teachers:
        return stage.kind
    return f"{stage.kind}, teacher: {' and '.join(stage.teachers)}"


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object; {} if the file does not exist (yet)."""
    return parse_json(path.read_text(encoding="utf-8"), path) if path.exists() else {}


def metric_names(run: JsonObject) -> set[str]:
    """Returns the metrics of a run's steps and of its evaluations before the first step."""
    evaluations = run["summary"].get("eval_all", {})
    return set(run["curves"]).union(*evaluations.values())


def metric_units(names: Iterable[str]) -> dict[str, str]:
    """Returns the unit of each metric; "" for a metric of another version of jzero."""
    units = {}
    for name in sorted(set(names)):
        metric = find_metric(name)
        units[name] = metric.unit if metric else ""
    return units


def make_curve(steps: Sequence[JsonObject], name: str) -> list[Point]:
    """Returns a metric over the steps of a run, in at most MAX_POINTS points."""
    steps_and_values = []
    for row in steps:
        # A step without a phase spent 0 seconds in it. Other metrics of a step may be missing.
        if name in row or name.startswith("time/"):
            steps_and_values.append((row["step"], row.get(name, 0)))
    points = []
    # Each point covers an equal share of the steps.
    for part in np.array_split(np.array(steps_and_values), min(len(steps_and_values), MAX_POINTS)):
        values = part[:, 1]
        numbers = (values.mean(), values.min(), values.max())
        rounded = [float(f"{number:.5g}") for number in numbers]
        points.append([int(part[0, 0]), int(part[-1, 0]), *rounded])
    return points


def choose_samples(samples: Sequence[JsonObject], num_runs: int) -> list[JsonObject]:
    """Returns the rollouts of one run for the page, as one of `num_runs` runs.

    Selects the last step, and as many evenly spaced earlier steps as the limits allow.
    """
    rows_by_step: dict[int, list[JsonObject]] = {}
    for row in samples:
        texts = {name: shorten(row[name]) for name in ("prompt", "response", "gold")}
        rows_by_step.setdefault(row["step"], []).append(row | texts)

    steps = sorted(rows_by_step)
    max_rows = MAX_ROLLOUTS // num_runs
    kept: list[JsonObject] = []
    # Try fewer and fewer steps until the rollouts fit the limits.
    for count in range(min(len(steps), max_rows), 0, -1):
        # Start at the last step, so that it is always included.
        positions = np.linspace(len(steps) - 1, 0, count)
        chosen = sorted(steps[round(position)] for position in positions)
        kept = [row for step in chosen for row in rows_by_step[step][:max_rows]]
        if len(kept) <= max_rows and len(json.dumps(kept)) <= MAX_ROLLOUT_BYTES // num_runs:
            break
    return kept


def shorten(value: object) -> str:
    """Returns a prompt, response or gold answer as text, without the middle of a long one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    note = f"\n[... {len(text) - MAX_TEXT} characters are left out here ...]\n"
    return text[:half] + note + text[-half:]


def is_report(path: Path) -> bool:
    """Returns whether a file is a page that this command wrote."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.read(10_000)


def main() -> None:
    parser = cli.make_parser("jzero.report", __doc__)
    parser.add_argument(
        "workdirs", nargs="+", metavar="WORKDIR", type=Path, help="workdir of a run"
    )
    parser.add_argument(
        "--out", type=Path, help="file to write; default report.html in the first WORKDIR"
    )
    args = parser.parse_args(sys.argv[1:])
    with cli.user_errors():
        out = args.out or args.workdirs[0] / "report.html"
        page = render_page(args.workdirs)
        # Only pages of this command may be overwritten.
        if out.exists() and not (out.is_file() and is_report(out)):
            raise UserError(f"--out {out} exists and is no report: give another")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
