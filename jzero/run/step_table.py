"""The terminal's table of a run: a row for every step, within 80 columns.

          reward accuracy length   cut mismatch   tok/s seconds    left
step  1/20  0.312   25.0 %   1043   0.12  4.1e-04   1812     9.4   29:20

The columns are those of the kind of run, RL or fine-tuning. They do not depend on a step: a step
that trains on no token lacks metrics, and its row has gaps.
"""

from collections.abc import Collection, Mapping, Sequence

from jzero.algorithms.algorithm import Algorithm
from jzero.run.metrics import STEP_LINE
from jzero.terminal import WIDTH, duration

ROWS_BETWEEN_HEADERS = 20
NARROWEST = 6  # columns of a number
LEFT = "left"  # the last column: the remaining time of the run
LEFT_WIDTH = 7  # columns of "1:12:05" and "11h 06m"

RL_COLUMNS = (
    "reward/mean",
    "reward/accuracy",
    "rollout/length",
    "rollout/truncated",
    "policy/mismatch",
    "rollout/tokens_per_second",
    "time/step",
)
SFT_COLUMNS = ("sft/loss", "optimizer/grad_norm", "update/tokens_per_second", "time/step")
# Columns of runs that measure them.
FURTHER_COLUMNS = ("policy/kl", "distill/kl")
# The first of these metrics are left out if a row is too wide.
LESS_IMPORTANT = (
    "policy/mismatch",
    "policy/kl",
    "rollout/tokens_per_second",
    "rollout/truncated",
)


def expected_columns(algorithm: Algorithm) -> tuple[str, ...]:
    """Returns the further columns of a run, which its first steps may lack."""
    expected = []
    if algorithm.kl.coef or algorithm.kl_reward:
        expected.append("policy/kl")
    if algorithm.distillation.coef:
        expected.append("distill/kl")
    return tuple(expected)


class StepTable:
    """Makes the rows of one process, and repeats the header now and then.

    expected: those of FURTHER_COLUMNS that the run will measure.
    """

    def __init__(self, last_step: int, expected: Sequence[str] = ()) -> None:
        self._last_step = last_step
        self._expected = tuple(expected)
        self._names: list[str] = []  # of the columns of the last row
        self._rows_left = 0  # until the next header

    def rows(
        self,
        step: int,
        values: Mapping[str, float],
        seconds_left: float | None = None,
    ) -> list[str]:
        """Returns the row of a step, after a header if one is due.

        A header is due if the step has further columns, and after ROWS_BETWEEN_HEADERS rows.
        """
        first = f"step {step:>{len(str(self._last_step))}}/{self._last_step}"
        names = _choose({*values, *self._expected}, WIDTH - len(first))
        lines = []
        if not set(names) <= set(self._names) or not self._rows_left:
            self._names = names
            self._rows_left = ROWS_BETWEEN_HEADERS
            labels = [STEP_LINE[name].label.rjust(_width(name)) for name in names]
            lines.append(" ".join([" " * len(first), *labels, LEFT.rjust(LEFT_WIDTH)]))
        self._rows_left -= 1

        numbers = []
        for name in self._names:
            numbers.append(_number(name, values[name]) if name in values else " " * _width(name))
        left = "" if seconds_left is None else duration(seconds_left)
        lines.append(" ".join([first, *numbers, left.rjust(LEFT_WIDTH)]).rstrip())
        return lines


def _choose(measured: Collection[str], width: int) -> list[str]:
    """Returns the metrics of a row, with at most `width` columns for them and the time left."""
    columns = SFT_COLUMNS if "sft/loss" in measured else RL_COLUMNS
    further = [name for name in FURTHER_COLUMNS if name in measured]
    names = [name for name in STEP_LINE if name in columns or name in further]
    for name in LESS_IMPORTANT:
        if _total_width(names) <= width:
            break
        if name in names:
            names.remove(name)
    return names


def _total_width(names: Sequence[str]) -> int:
    return sum(1 + _width(name) for name in names) + 1 + LEFT_WIDTH


def _number(name: str, value: float) -> str:
    """Returns the number of a column, with fewer digits if it has no room for all of them."""
    width = _width(name)
    text = f"{value:{STEP_LINE[name].format}}".replace("%", " %")
    for digits in range(width, 0, -1):
        if len(text) <= width:
            break
        text = f"{value:.{digits}g}"
    return text.rjust(width)


def _width(name: str) -> int:
    return max(NARROWEST, len(STEP_LINE[name].label))
