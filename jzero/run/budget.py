"""Limits the time of a process: `train.minutes`.

A run with a budget stops early, with a checkpoint, and the same command continues from there. The
longest step, evaluation and checkpoint so far decide whether another step still fits.

    budget = TimeBudget(config.train.minutes)
    for step in ...:
        ...
        budget.add("step", seconds)
        budget.raise_if_over(has_evaluation=...)
"""

import time

from jzero.hosts.interrupt import Interrupted, raise_if_any_host_stopped

LAST_SAVE = 2.0  # longest save so far -> the last save, which the run waits for


class TimeBudget:
    """Records the longest duration of each part of a run, and decides whether another step fits."""

    def __init__(self, minutes: float) -> None:
        """Starts the clock. `minutes` is 0 for a run without a limit."""
        self.minutes = minutes
        self._started = time.monotonic()
        self._longest: dict[str, float] = {}  # part -> seconds

    def add(self, part: str, seconds: float) -> None:
        """Records that a part of the run, "step", "evaluation" or "checkpoint", took `seconds`."""
        # The longest and not the mean: a run that exceeds its limit is killed and loses the step.
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))

    def reserve(self, has_evaluation: bool) -> float:
        """Returns the seconds to reserve for another step and the end of the run after it."""
        evaluation = self._longest.get("evaluation", 0.0) if has_evaluation else 0.0
        # Saves during a run return while they are being written; the run waits for the last one.
        checkpoint = LAST_SAVE * self._longest.get("checkpoint", 0.0)
        return self._longest.get("step", 0.0) + evaluation + checkpoint

    def reason_to_stop(self, has_evaluation: bool = False) -> str:
        """Returns the reason why no further step fits, or "" if one does."""
        elapsed = time.monotonic() - self._started
        needed = self.reserve(has_evaluation)
        if not self.minutes or elapsed + needed <= 60 * self.minutes:
            return ""
        return (
            f"train.minutes={self.minutes:g}: {elapsed / 60:.1f} minutes have passed, and another "
            f"step may take {needed:.0f} seconds"
        )

    def raise_if_over(self, has_evaluation: bool = False) -> None:
        """Raises Interrupted on all hosts if no further step fits on one. All must call it."""
        if self.minutes:
            raise_if_any_host_stopped(self.reason_to_stop(has_evaluation))

    def raise_if_over_in_warm_start(self) -> None:
        """The same as `raise_if_over`, before a step of the warm start."""
        if not self.minutes:
            return
        try:
            self.raise_if_over()
        except Interrupted as reason:
            # The warm start saves no checkpoints, so the next process repeats it from its first
            # step.
            raise Interrupted(
                f"{reason}; the warm start is not over, and begins anew: give more minutes"
            ) from None
