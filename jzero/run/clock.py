"""Moved from jzero.metrics."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Wall seconds per phase: `with clock("sample"): ...`. Phases do not nest."""

    def __init__(self):
        self.totals: dict[str, float] = defaultdict(
            float
        )  # phase -> seconds since the start of the run
        self._step: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._step[phase] += seconds
            self.totals[phase] += seconds

    def move(self, seconds: float, phase: str, other: str) -> None:
        for sums in (self._step, self.totals):
            sums[phase] -= seconds
            sums[other] += seconds

    def pop(self) -> dict[str, float]:
        """{"time/<phase>": seconds} since the last pop."""
        values = {f"time/{phase}": seconds for phase, seconds in self._step.items()}
        self._step.clear()
        return values


@functools.cache
def compilations() -> Callable[[], dict[str, float]]:
    """A function: programs compiled since its last call, and the seconds that took. A steady run compiles none."""
    import jax

    seconds: list[float] = []

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    def pop() -> dict[str, float]:
        values = {"compile/programs": float(len(seconds)), "compile/seconds": sum(seconds)}
        seconds.clear()
        return values

    jax.monitoring.register_event_duration_secs_listener(hear)
    return pop
