"""Shows a progress bar over the remaining steps of a process, and measures each step's time."""

import time
from collections.abc import Iterator

from tqdm import tqdm

from jzero.distributed import processes
from jzero.run.clock import Clock, compilation_counter

SLOW_COMPILATION = 1.0  # seconds of compilation per step above which a line is printed


class Progress:
    """Iterates over the steps `first_step` to `last_step` with a bar, and measures each of them.

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

    def __iter__(self) -> Iterator[int]:
        steps = tqdm(
            range(self.first_step, self.last_step + 1),
            desc=self.label,
            initial=self.first_step - 1,
            total=self.last_step,
            mininterval=1,
            disable=not processes.is_first_process(),
        )
        for step in steps:
            # Time measured between two steps (checkpoints, exports) belongs to neither step.
            self._clock.pop()
            self._compilations.pop()
            self._step = step
            self._step_began = time.perf_counter()
            yield step

    def step_metrics(self) -> dict[str, float]:
        """Returns `time/<phase>`, `time/step` and `compile/...` since the current step began.

        From the third step of a process on, nothing should be compiled. A step that compiles for
        longer than a second is reported on the terminal.
        """
        values = self._clock.pop()
        values["time/step"] = time.perf_counter() - self._step_began
        values |= self._compilations.pop()
        # The first two steps of a process compile its programs.
        is_steady = self._step > self.first_step + 1
        if is_steady and values["compile/seconds"] > SLOW_COMPILATION:
            programs = values["compile/programs"]
            processes.print_once(
                f"step {self._step}: {programs:.0f} programs compiled: shapes are still new"
            )
        return values
