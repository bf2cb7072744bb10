"""`python -m jzero.report WORKDIR [WORKDIR ...] [--out FILE]`: runs as one HTML page that needs no network.

Curves, evaluations, sampled rollouts, settings and versions of a run that ended, was killed or still goes on; those of
several are laid over each other. The page is `report.html` beside this file; it draws the JSON that `page` puts in."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from jzero import cli, config
from jzero.errors import UserError
from jzero.files import read_jsonl, write_atomic
from jzero.run import metrics

POINTS = 500  # of a curve
ROWS, BYTES = 300, 2_000_000  # of sampled rollouts, all runs together
LONGEST = 20_000  # characters of a text


def curve(steps: list[dict[str, Any]], name: str) -> list[list[float]]:
    """[first step, last step, mean, least, greatest] of every point. A phase that a step does not have took 0 s."""
    found = np.array(
        [
            (row["step"], row.get(name, 0))
            for row in steps
            if name in row or name.startswith("time/")
        ]
    )
    points = []
    for part in np.array_split(found, min(len(found), POINTS)):
        numbers = part[:, 1].mean(), part[:, 1].min(), part[:, 1].max()
        points.append([int(part[0, 0]), int(part[-1, 0]), *(float(f"{x:.5g}") for x in numbers)])
    return points


def shown(value: Any) -> str:
    """A prompt, a response or a gold answer as text, without the middle of a long one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f"\n[... {len(text) - LONGEST} characters are left out here ...]\n"
    return text if len(text) <= LONGEST else text[: LONGEST // 2] + cut + text[-LONGEST // 2 :]


def spread(samples: list[dict[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Those of the last step, and of as many before it, evenly apart, as one of `runs` has room for."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in samples:
        steps.setdefault(row["step"], []).append(
            row | {n: shown(row[n]) for n in ("prompt", "response", "gold")}
        )
    order, kept, room = sorted(steps), [], ROWS // runs
    for count in range(min(len(steps), room), 0, -1):
        chosen = sorted(order[round(i)] for i in np.linspace(len(order) - 1, 0, count))
        kept = [row for step in chosen for row in steps[step][:room]]
        if len(kept) <= room and len(json.dumps(kept)) <= BYTES // runs:
            break
    return kept


def read(workdir: Path, runs: int) -> dict[str, Any]:
    """What the page has of one of `runs` workdirs."""
    if not (workdir / "metrics.jsonl").exists():
        raise UserError(f"{workdir} has no metrics.jsonl: give the --workdir of a run")
    steps, samples = (read_jsonl(workdir / f"{name}.jsonl") for name in ("metrics", "samples"))
    files = {name: workdir / f"{name}.json" for name in ("config", "versions", "summary")}
    run = {
        name: json.loads(file.read_text("utf-8")) if file.exists() else {}
        for name, file in files.items()
    }
    names = dict.fromkeys(name for row in steps for name in row if name != "step")
    run |= {"name": str(workdir), "config": config.flatten(run["config"]), "sampled": len(samples)}
    return run | {
        "curves": {name: curve(steps, name) for name in names},
        "samples": spread(samples, runs),
    }


def page(workdirs: list[Path]) -> str:
    """All of it as ASCII: what JSON and HTML would take for markup is escaped."""
    data = {
        "runs": [read(workdir, len(workdirs)) for workdir in workdirs],
        "main": list(metrics.STEP_LINE),
    }
    data |= {
        "defaults": config.flatten(dataclasses.asdict(config.Config())),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }
    source = Path(__file__).with_name("report.html").read_text("utf-8")
    return jinja2.Template(source, autoescape=True).render(data=data)


def main() -> None:
    parser = cli.make_parser("jzero.report", __doc__)
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", type=Path, help="of a run")
    parser.add_argument(
        "--out", type=Path, help="file to write; default: report.html in the first WORKDIR"
    )
    given = parser.parse_args(sys.argv[1:])
    with cli.user_errors():
        out = given.out or given.workdirs[0] / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page(given.workdirs))
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
