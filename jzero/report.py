"""`python -m jzero.report WORKDIR [WORKDIR ...] [--out FILE]`: runs as one HTML page.

The page is the one of `python -m jzero.watch`, frozen into one file that needs no network. A run
may have ended, may have been killed, or may still be running; the curves of several runs are
overlaid. The file has the rollouts of the last step, and of evenly spaced earlier steps.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jzero import cli, terminal
from jzero.errors import UserError
from jzero.files import JsonObject, write_atomic
from jzero.run import buckets
from jzero.run.buckets import PAGE_LEAVES_OUT
from jzero.watching.rollouts import MAX_ROWS, RolloutIndex, TextTable, add_row, empty_block
from jzero.watching.runs import WatchedRun, find_runs, page_state
from jzero.watching.server import render_page

MAX_ROLLOUTS = 300  # on the page, for all runs together
MAX_ROLLOUT_BYTES = 3_000_000  # of JSON, for all runs together

MARK = "<title>jzero "  # identifies pages of this command


def make_report(workdirs: Sequence[Path]) -> str:
    """Returns the HTML of the page, as ASCII."""
    states, rollouts = [], []
    for workdir in find_runs(workdirs, is_started=True):
        run = WatchedRun(workdir)
        run.describe()
        run.refresh()
        _, state = run.state()
        states.append(state)
        rollouts.append(freeze_rollouts(run.rollouts, len(workdirs)))
    data = {
        "is_live": False,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "state": page_state(states),
        "rollouts": rollouts,
    }
    return render_page(data)


def freeze_rollouts(index: RolloutIndex, num_runs: int) -> JsonObject:
    """Returns some rollouts of one of `num_runs` runs, and the index of these rollouts."""
    index.index_some(math.inf)
    lines_by_step: dict[int, list[int]] = {}
    for block in index.blocks:
        for number, step in enumerate(block.step, block.start):
            lines_by_step.setdefault(step, []).append(number)
    lines_by_step.pop(-1, None)  # damaged lines

    rows = choose_rows(index, lines_by_step, num_runs)
    block, texts = empty_block(0), TextTable()
    for number, row in enumerate(rows):
        add_row(block, row, texts)
        # A row of the page is found by its place in `rows`, not by its line in samples.jsonl.
        row["line"] = number
    return {
        "rows": rows,
        "blocks": [block.to_json()],
        "texts": texts.texts,
        "total": len(index),
    }


def choose_rows(
    index: RolloutIndex,
    lines_by_step: dict[int, list[int]],
    num_runs: int,
) -> list[JsonObject]:
    """Returns the rows of the last step, and of as many earlier steps as the limits allow."""
    max_rows, max_bytes = MAX_ROLLOUTS // num_runs, MAX_ROLLOUT_BYTES // num_runs
    steps = sorted(lines_by_step)
    kept: list[JsonObject] = []
    rows_by_step: dict[int, list[JsonObject]] = {}
    # Try fewer and fewer steps until the rollouts fit the limits.
    for count in range(min(len(steps), max_rows), 0, -1):
        # Start at the last step, so that it is always included.
        positions = np.linspace(len(steps) - 1, 0, count)
        chosen = sorted(steps[round(position)] for position in positions)
        # Lines are counted before any row is read, because reading takes the time.
        if sum(len(lines_by_step[step][:max_rows]) for step in chosen) > max_rows and count > 1:
            continue
        for step in chosen:
            if step not in rows_by_step:
                rows_by_step[step] = read_rows(index, sorted(lines_by_step[step])[:max_rows])
        kept = [row for step in chosen for row in rows_by_step[step]]
        if len(json.dumps(kept)) <= max_bytes:
            break
    # The last step may exceed the limit on its own.
    while len(kept) > 1 and len(json.dumps(kept)) > max_bytes:
        kept = kept[: len(kept) // 2]
    return kept


def read_rows(index: RolloutIndex, lines: Sequence[int]) -> list[JsonObject]:
    """Returns the shortened rows of any number of lines."""
    rows: list[JsonObject] = []
    for start in range(0, len(lines), MAX_ROWS):
        rows += index.rows(lines[start : start + MAX_ROWS])
    return rows


def is_report(path: Path) -> bool:
    """Returns whether a file is a page that this command wrote."""
    with path.open(encoding="utf-8", errors="replace") as file:
        # The title is in the head of the page, and a page may have megabytes.
        return MARK in file.read(10_000)


def make_parser() -> cli.Parser:
    """Returns the parser of the command."""
    parser = cli.make_parser("jzero.report", __doc__)
    parser.add_argument(
        "workdirs", nargs="+", metavar="WORKDIR", type=Path, help="workdir of a run"
    )
    parser.add_argument(
        "--out", type=Path, help="file to write; default report.html in the first WORKDIR"
    )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with cli.user_errors():
        out = args.out or args.workdirs[0] / "report.html"
        if buckets.is_address(out):
            raise UserError(f"--out {out}: give a file on this machine")
        page = make_report(
            [Path(buckets.fetch_run(path, PAGE_LEAVES_OUT)) for path in args.workdirs]
        )
        # Only pages of this command may be overwritten.
        if out.exists() and not (out.is_file() and is_report(out)):
            raise UserError(f"--out {out} exists and is not a report: give another")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page)
        terminal.write(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    terminal.run_command(main)
