"""Iterates over the remaining steps of a process, measures each, and estimates the time left."""

import statistics
import time
from collections import deque
from collections.abc import Iterator

from jzero import terminal
from jzero.clock import Clock, compilation_counter
from jzero.hosts import processes

SLOW_COMPILATION = 1.0  # seconds of compilation per step above which a line is printed
STEPS_OF_ESTIMATE = 20  # the estimate of the time left is the mean of this many newest steps


class Progress:
    """Iterates over the steps `first_step` to `last_step`, and measures each of them.

    The terminal shows the count of steps and the time left.

    progress = Progress("RL", 1, 200, clock)
    for step in progress:
        ...
        values |= progress.step_metrics()
    """

    def __init__(self, label: str, first_step: int, last_step: int, clock: Clock) -> None:
        self.label = label
        self.first_step = first_step
        self.last_step = last_step
        self._step = first_step
        self._step_began = 0.0
        self._clock = clock
        self._compilations = compilation_counter()
        # Seconds of the newest steps, with their evaluations and checkpoints, without compilation.
        self._seconds: deque[float] = deque(maxlen=STEPS_OF_ESTIMATE)
        self._compile_seconds = 0.0  # of the current step

    def __iter__(self) -> Iterator[int]:
        done = self.first_step - 1
        with terminal.phase(self.label, total=self.last_step, done=done) as phase:
            for step in range(self.first_step, self.last_step + 1):
                # Time measured between two steps (checkpoints, exports) belongs to neither step.
                self._clock.pop()
                self._compilations.pop()
                self._step = step
                self._step_began = time.perf_counter()
                yield step
                # Evaluations compile programs, too.
                self._compile_seconds += self._compilations.pop()["compile/seconds"]
                if step == self.first_step + 1:
                    self._seconds.clear()  # the first step also traces its programs
                self._seconds.append(self._seconds_without_compilation())
                self._compile_seconds = 0.0
                phase.advance()
                phase.set_seconds_left(self.seconds_left())

    def seconds_left(self) -> float:
        """Returns the estimated seconds of the steps after the current one."""
        steps = [*self._seconds] or [self._seconds_without_compilation()]
        return (self.last_step - self._step) * statistics.mean(steps)

    def step_metrics(self) -> dict[str, float]:
        """Returns `time/<phase>`, `time/step` and `compile/...` since the current step began.

        From the third step of a process on, nothing should be compiled. A step that compiles for
        longer than a second is reported on the terminal.
        """
        values = self._clock.pop()
        values["time/step"] = time.perf_counter() - self._step_began
        values |= self._compilations.pop()
        self._compile_seconds = values["compile/seconds"]
        # The first two steps of a process compile its programs.
        is_steady = self._step > self.first_step + 1
        if is_steady and values["compile/seconds"] > SLOW_COMPILATION:
            programs = values["compile/programs"]
            processes.print_once(
                f"step {self._step}: {programs:.0f} programs compiled: shapes are still new"
            )
        return values

    def _seconds_without_compilation(self) -> float:
        # Only the first steps compile, so their compilation is no measure of the remaining steps.
        return max(0.0, time.perf_counter() - self._step_began - self._compile_seconds)
