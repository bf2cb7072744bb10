"""Asks a server for /health without end, and writes how long each answer took.

    python benchmarks/soak_health.py HOST PORT FILE

A process of its own, so that what attacks the server does not slow the clock down. Every line of
the file has the monotonic time at which the question was asked and the seconds to the answer, which
are infinite if there was none within MOST_SECONDS.
"""

import http.client
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 120.0
SECONDS_BETWEEN = 0.1


def ask(host: str, port: int) -> float:
    """Returns the seconds that the server took to answer, infinity if it did not."""
    start = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=MOST_SECONDS)
    try:
        connection.request("GET", "/health")
        is_well = connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        is_well = False
    finally:
        connection.close()
    return time.monotonic() - start if is_well else math.inf


@dataclass(frozen=True)
class HealthRecord:
    """What `main` has written, as another process reads it."""

    path: Path

    def samples(self) -> list[tuple[float, float]]:
        """Returns when /health was asked for and the seconds to the answer."""
        rows = []
        for line in self.path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                asked, seconds = line.split()
                rows.append((float(asked), float(seconds)))
        return rows

    def worst(self, start: float) -> float:
        """Returns the longest wait of what was asked between `start` and now.

        Waits for the answer to what has been asked before now.
        """
        now = time.monotonic()
        while True:
            samples = self.samples()
            if samples and samples[-1][0] >= now:
                break
            time.sleep(SECONDS_BETWEEN)
            if time.monotonic() > now + 2 * MOST_SECONDS:
                return math.inf
        return max(seconds for asked, seconds in samples if asked + seconds >= start)


def main() -> None:
    host, port, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with path.open("w") as file:
        while True:
            asked = time.monotonic()
            file.write(f"{asked} {ask(host, port)}\n")
            file.flush()
            time.sleep(SECONDS_BETWEEN)


if __name__ == "__main__":
    main()
