"""Measures wall time by phase, and counts the programs that JAX compiles.

The train loops wrap each phase of a step: `with clock("sample"): ...`. The seconds of a step become
its `time/<phase>` metrics. The sums over the full run go into checkpoints and summary.json.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from jzero import terminal

# The phases that the terminal shows by another name.
SHOWN_NAMES = {"eval": "evaluate", "warm_start": "warm start"}
# Events of `jax.monitoring`. JAX has no public constants for them.
COMPILATION_STARTS = "/jax/compilation_cache/compile_requests_use_cache"
COMPILATION_ENDS = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Adds up wall seconds by phase: `with clock("sample"): ...`.

    Phases do not nest: the seconds of an inner phase would count twice.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)  # phase -> seconds in the run
        self._step: dict[str, float] = defaultdict(float)  # phase -> seconds since the last pop

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the body to `phase`, even if the body raises.

        The terminal shows the phase meanwhile.
        """
        start = time.perf_counter()
        try:
            with terminal.phase(SHOWN_NAMES.get(phase, phase)):
                yield
        finally:
            self._add(phase, time.perf_counter() - start)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves `seconds` that were measured as the phase `source` to the phase `target`."""
        # `source` may still be running: its own seconds are added at its end.
        self._add(source, -seconds)
        self._add(target, seconds)

    def pop(self) -> dict[str, float]:
        """Returns {"time/<phase>": seconds} since the last call, and resets them."""
        values = {f"time/{phase}": seconds for phase, seconds in self._step.items()}
        self._step.clear()
        return values

    def _add(self, phase: str, seconds: float) -> None:
        self._step[phase] += seconds
        self.totals[phase] += seconds


class CompilationCounter:
    """Counts the programs that XLA compiled, and the seconds spent, since the last `pop`.

    A run compiles nothing more once it has seen all of its shapes.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []  # one entry for every program

    def listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        """Receives every event that JAX times, with the signature of `jax.monitoring` listeners."""
        if event == COMPILATION_ENDS:
            self._seconds.append(duration_secs)
            terminal.set_note("")

    def listen_for_start(self, event: str, **details: str | int) -> None:
        """Receives every event that JAX counts, and shows on the terminal that it compiles."""
        if event == COMPILATION_STARTS:
            terminal.set_note("compiling")

    def pop(self) -> dict[str, float]:
        """Returns the metrics `compile/programs` and `compile/seconds` since the last call."""
        values = {
            "compile/programs": float(len(self._seconds)),
            "compile/seconds": sum(self._seconds),
        }
        self._seconds.clear()
        return values


@functools.cache
def compilation_counter() -> CompilationCounter:
    """Returns the counter of this process. Only one exists, because JAX keeps listeners forever."""
    import jax  # not at the top: jzero.clock is imported by processes that hold no device

    counter = CompilationCounter()
    jax.monitoring.register_event_duration_secs_listener(counter.listen)
    jax.monitoring.register_event_listener(counter.listen_for_start)
    return counter
