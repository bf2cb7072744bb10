"""Attacks jzero for minutes, and says what held.

    python benchmarks/soak.py [--parts serve ...] [--minutes 5]

Every part repeats its attacks until its minutes are over, at least once each. The script prints one
row for every attack: how often it was made, the memory of the attacked process before the first and
after the last time, the longest wait for /health, and a verdict. The status is 1 if an attack did
not hold. A part is one line of PARTS: a function that makes its attacks and yields their outcomes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
import soak_hosts
import soak_serve
from soak_outcomes import HEADINGS, Outcome, rows


@dataclass(frozen=True)
class Part:
    """One subject of attacks."""

    what: str
    # Gets a directory for its files, and the monotonic time at which to begin no further round.
    attack: Callable[[Path, float], Iterator[Outcome]]


PARTS = {
    "serve": Part("the HTTP server: too much, too slow, gone, ended", soak_serve.attack),
    "hosts": Part("runs of two processes: stopped, killed, resumed", soak_hosts.attack),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(f"{name} ({part.what})" for name, part in PARTS.items())
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help=f"default all: {known}"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of every part (default 5)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    outcomes: list[Outcome] = []
    for name in args.parts:
        with tempfile.TemporaryDirectory(prefix=f"soak-{name}-") as directory:
            deadline = time.monotonic() + 60 * args.minutes
            for outcome in PARTS[name].attack(Path(directory), deadline):
                verdict = outcome.failure or "held"
                print(f"{name}: {outcome.attack}: {verdict}", file=sys.stderr, flush=True)
                outcomes.append(outcome)
    print(measure.table(HEADINGS, rows(outcomes)))
    sys.exit(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    main()
