"""Prints how fast the sandbox runs programs, and what becomes of hostile ones, as JSON lines.

    python benchmarks/sandbox.py              # both
    python benchmarks/sandbox.py --programs 500 --no-hostile
    python benchmarks/sandbox.py --baseline ../before      # speed and another checkout's

Speed is of programs of one line, one after the other in one sandbox, so that it is the speed of one
core: "per_second" by the clock of the wall, "cpu_ms" the time of all processes for one program. The
hostile programs are those of tests/sandbox/hostile_programs.py. A line says how each ended, and
whether it escaped.

With --baseline the two checkouts take turns, because a machine that other work keeps busy is not as
fast in one minute as in the next. Printed are the medians of the rounds: programs per second by the
wall clock, CPU time of a program, and this checkout's share of the baseline's CPU time.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/sandbox"))

from hostile_programs import (  # pyright: ignore[reportMissingImports]
    CASES,
    ESCAPED,
    LIMITS,
    fill_in,
)

from jzero.sandbox import levels
from jzero.sandbox.client import Limits, Program, Sandbox

TRIVIAL = Program("print(sum(map(int, input().split())))", stdin="20 22")


def cpu_seconds() -> float:
    """Returns the CPU time of the processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def speed(level: str, programs: int) -> dict[str, object]:
    before = cpu_seconds()
    with Sandbox(level) as sandbox:
        sandbox.run(TRIVIAL, Limits())
        start = time.perf_counter()
        for _ in range(programs):
            outcome = sandbox.run(TRIVIAL, Limits())
            assert outcome.stdout == "42\n", outcome
        seconds = time.perf_counter() - start
    cpu = cpu_seconds() - before
    return {
        "level": level,
        "per_second": round(programs / seconds, 1),
        "cpu_ms": round(1e3 * cpu / programs, 2),
    }


def hostile(level: str) -> Iterator[dict[str, object]]:
    """Yields how each hostile program ended."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        Sandbox(level) as sandbox,
    ):
        canary = Path(folder) / "expected.txt"
        canary.write_text("not to be read")
        for case in CASES:
            outcome = sandbox.run(fill_in(case, canary, server.getsockname()[1]), LIMITS)
            has_escaped = ESCAPED in outcome.stdout + outcome.result
            yield {
                "level": level,
                "case": case.name,
                "end": outcome.end,
                "status": outcome.status,
                "escaped": has_escaped or canary.read_text() != "not to be read",
            }
        yield {"level": level, "servers": sandbox.num_starts, "cases": len(CASES)}


def _speed_of(checkout: Path, level: str, programs: int) -> dict[str, float]:
    """Returns the speed of a checkout's sandbox, in a process that imports that checkout."""
    command = [sys.executable, __file__, "--programs", str(programs), "--only", level]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout)
    used = Path(found["package"]).parents[1].resolve()
    assert used == checkout.resolve(), f"{used=}"
    return found


def compare(level: str, baseline: Path, programs: int, rounds: int) -> dict[str, object]:
    """Returns the medians of both checkouts at a level."""
    here = Path(__file__).resolve().parents[1]
    found: dict[Path, list[dict[str, float]]] = {baseline: [], here: []}
    for number in range(rounds):
        order = (baseline, here) if number % 2 else (here, baseline)
        for checkout in order:
            found[checkout].append(_speed_of(checkout, level, programs))

    def median(checkout: Path, name: str) -> float:
        return statistics.median(each[name] for each in found[checkout])

    shares = [
        ours["cpu_ms"] / theirs["cpu_ms"]
        for ours, theirs in zip(found[here], found[baseline], strict=True)
    ]
    return {
        "level": level,
        "per_second": median(here, "per_second"),
        "baseline_per_second": median(baseline, "per_second"),
        "cpu_ms": median(here, "cpu_ms"),
        "baseline_cpu_ms": median(baseline, "cpu_ms"),
        "cpu_share": round(statistics.median(shares), 3),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--no-hostile", action="store_true")
    parser.add_argument("--baseline", type=Path, help="another checkout, to compare the speed with")
    parser.add_argument("--rounds", type=int, default=5, help="of --baseline")
    parser.add_argument("--only", choices=levels.LEVELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(
            json.dumps(
                speed(args.only, args.programs) | {"package": os.path.dirname(levels.__file__)}
            )
        )
        return
    for level in levels.LEVELS:
        if reason := levels.failure(level):
            print(json.dumps({"level": level, "missing": reason}), flush=True)
            continue
        if args.baseline:
            row = compare(level, args.baseline, args.programs, args.rounds)
            print(json.dumps(row), flush=True)
            continue
        print(json.dumps(speed(level, args.programs)), flush=True)
        if not args.no_hostile and level in levels.AUTO_LEVELS:
            for row in hostile(level):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
