"""Says which operations the time of a benchmark goes to, as JSON lines.

    python -m benchmarks.gpu.profile decode --model Qwen2.5-3B --slots 256
    python -m benchmarks.gpu.profile update --model Qwen2.5-3B --rows 4

What follows the name goes to benchmarks/decode.py or benchmarks/update.py. Its first measurement is
made once more under JAX's profiler. For each line of the profile, a line of JSON has the busy time,
and then there is one for each of the operations that took longest. Without an accelerator, the
lines are those of XLA's threads on the host.
"""

import importlib
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import jax

BENCHMARKS = Path(__file__).resolve().parents[1]
MOST_OPERATIONS = 15  # of a line


class Event(Protocol):
    """One execution of an operation, as JAX's profile has it."""

    @property
    def name(self) -> str: ...

    @property
    def duration_ns(self) -> float: ...


def without_number(name: str) -> str:
    """Returns an operation's name without the numbers that XLA appends: fusion.12 is fusion."""
    return re.sub(r"[._]\d+(?=[._]|$)", "", name)


def summary(path: Path) -> Iterator[dict[str, object]]:
    """Yields what a profile says about the devices, or about XLA's threads if there are none."""
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in of_devices or planes:
        for line in plane.lines:
            if not of_devices and "XLA" not in line.name:
                continue
            yield from summary_of_line(plane.name, line.name, line.events)


def summary_of_line(plane: str, line: str, events: Iterable[Event]) -> Iterator[dict[str, object]]:
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in events:
        name = without_number(event.name)
        seconds[name] += event.duration_ns / 1e9
        counts[name] += 1
    busy = sum(seconds.values())
    if not busy:
        return
    yield {"plane": plane, "line": line, "busy_ms": round(1e3 * busy, 3)}
    longest_first = sorted(seconds.items(), key=itemgetter(1), reverse=True)
    for name, spent in longest_first[:MOST_OPERATIONS]:
        yield {
            "line": line,
            "operation": name[:120],
            "ms": round(1e3 * spent, 3),
            "count": counts[name],
            "share": round(spent / busy, 4),
        }


def main() -> None:
    name, *arguments = sys.argv[1:]
    sys.path.insert(0, str(BENCHMARKS))  # scripts of that folder import each other by name
    sys.argv = [name, *arguments]
    measure = importlib.import_module("measure")
    median_seconds = measure.median_seconds
    profiles: list[Path] = []

    with tempfile.TemporaryDirectory() as scratch:

        def and_profile(run: Callable[[], object], repeat: int) -> float:
            seconds = median_seconds(run, repeat)
            if not profiles:
                with jax.profiler.trace(scratch):
                    jax.block_until_ready(run())
                profiles.extend(Path(scratch).rglob("*.xplane.pb"))
            return seconds

        vars(measure)["median_seconds"] = and_profile
        importlib.import_module(name).main()
        for values in summary(profiles[0]):
            print(json.dumps(values))


if __name__ == "__main__":
    main()
