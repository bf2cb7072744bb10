"""Runs the jobs of a stage one after the other, and turns what they print into JSON lines."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, TextIO

SMALLEST_SHARE = 0.25  # a job starts if this share of its seconds is left


class Job(NamedTuple):
    """A process of a stage."""

    name: str
    seconds: float  # after which the process is killed
    command: list[str]


def run_stage(stage: str, jobs: list[Job], seconds: float, out: Path, is_tiny: bool) -> int:
    """Runs the jobs within `seconds`; prints and keeps their lines. Returns how many failed."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    failures = 0
    lines_path, log_path = out / f"{stage}.jsonl", out / f"{stage}.log"
    with lines_path.open("a") as lines, log_path.open("a") as log:
        for job in jobs:
            left = deadline - time.monotonic()
            if left < SMALLEST_SHARE * job.seconds:
                say(lines, {"job": job.name, "left_out": f"{left:.0f} seconds are left"})
                continue
            log.write(f"\n== {job.name}: {' '.join(job.command)}\n")
            status = run_job(job, min(left, job.seconds), lines, log, is_tiny)
            failures += status != 0
    return failures


def run_job(job: Job, seconds: float, lines: TextIO, log: TextIO, is_tiny: bool) -> int:
    """Runs one job, and returns its exit status, which is negative for a signal.

    A job that fails, for example because a model is too large, is a line as well.
    """
    start = time.monotonic()
    platform = "cpu" if is_tiny else "cuda"
    process = subprocess.Popen(
        job.command,
        env={"JAX_PLATFORMS": platform, "HF_HUB_OFFLINE": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a job has children of its own, such as graders
    )

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    last_lines: list[str] = []
    with process:
        assert process.stdout is not None
        for values in json_lines(process.stdout, log, last_lines):
            say(lines, {"job": job.name, **values})
    status = process.returncode
    is_out_of_time = not timer.is_alive()
    timer.cancel()

    end: dict[str, object] = {"job": job.name, "status": status}
    end["seconds"] = round(time.monotonic() - start, 1)
    if is_out_of_time:
        end["killed_after"] = round(seconds)
    if status:
        end["last_lines"] = last_lines[-5:]
    say(lines, end)
    return status


def json_lines(output: IO[str], log: TextIO, last_lines: list[str]) -> Iterator[dict[str, object]]:
    """Yields what a job measured, as soon as it is printed, and keeps all lines.

    A line that is a JSON object counts, and a row of a Markdown table, with the table's headings as
    names.
    """
    headings: list[str] = []
    above: list[str] = []  # the cells of the line before: headings, if rules stand below them
    for line in output:
        log.write(line)
        log.flush()
        text = line.strip()
        if text:
            last_lines.append(text)
            del last_lines[:-20]
        if text.startswith("{"):
            yield json.loads(text)
        is_row = text.startswith("| ") and text.endswith(" |")
        cells = [cell.strip() for cell in text.strip("|").split("|")] if is_row else []
        if is_row and set(cells) == {"---"}:
            headings = above
        elif len(cells) == len(headings):
            if cells:
                yield dict(zip(headings, cells, strict=True))
        else:
            headings = []
        above = cells


def say(lines: TextIO, values: dict[str, object]) -> None:
    """Prints a line of JSON and keeps it."""
    text = json.dumps(values)
    print(text, flush=True)
    lines.write(text + "\n")
    lines.flush()
