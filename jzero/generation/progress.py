"""Progress of a generation: lines with the rate and the remaining time."""

import time
from datetime import timedelta

from jzero.hosts import processes

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Prints lines such as "40 of 1,000 responses, 3 errors, 812 tokens/s, 0:12:05 left"."""

    def __init__(self, unit: str, total: int, done: int, seconds: float) -> None:
        """Starts the clock.

        Args:
            unit: the counted items, such as "responses".
            total: number of items to make.
            done: number of items that earlier processes have made.
            seconds: minimum time between two lines.
        """
        self._unit = unit
        self._total = total
        self._done_earlier = done
        self._done = done
        self._errors = 0
        self._tokens = 0
        # Rate and remaining time measure this process only, without the work of earlier processes.
        self._began = time.monotonic()
        self._seconds = seconds
        self._last_line = self._began

    def add(self, count: int, tokens: int, errors: int = 0) -> None:
        """Counts finished items, and prints a line if the last one was printed long enough ago."""
        self._done += count
        self._tokens += tokens
        self._errors += errors
        current_time = time.monotonic()
        if current_time - self._last_line >= self._seconds or self._done == self._total:
            self._last_line = current_time
            processes.print_once(self.line(current_time - self._began))

    def line(self, seconds: float) -> str:
        """Returns the line after `seconds` seconds."""
        done_here = self._done - self._done_earlier
        parts = [f"{self._done:,} of {self._total:,} {self._unit}"]
        if self._errors:
            parts.append("1 error" if self._errors == 1 else f"{self._errors:,} errors")
        # The first line may come within the resolution of the clock.
        seconds = max(seconds, 1e-6)
        parts.append(f"{done_here / seconds:.1f} {self._unit}/s")
        parts.append(f"{self._tokens / seconds:.0f} tokens/s")
        if self._done < self._total and done_here:
            left = round((self._total - self._done) * seconds / done_here)
            parts.append(f"{timedelta(seconds=left)} left")
        return ", ".join(parts)
