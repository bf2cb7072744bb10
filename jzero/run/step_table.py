"""The terminal's table of a run: a row for every step, within 80 columns.

          reward accuracy length   cut mismatch   tok/s seconds    left
step  1/20  0.312    0.250  1,043  0.12  4.1e-04    1812     9.4   29:20
"""

from collections.abc import Mapping, Sequence

from jzero.run.metrics import METRICS, STEP_LINE
from jzero.terminal import WIDTH, duration

ROWS_BETWEEN_HEADERS = 20
NARROWEST = 6  # columns of a number
LEFT = "left"  # the last column: the remaining time of the run
LEFT_WIDTH = 7  # columns of "1:12:05" and "11h 06m"

# The first of these metrics are left out of a row that is too wide.
LESS_IMPORTANT = (
    "update/tokens_per_second",
    "optimizer/grad_norm",
    "policy/entropy",
    "policy/mismatch",
    "policy/kl",
    "rollout/tokens_per_second",
    "rollout/truncated",
)


class StepTable:
    """Makes the rows of one process, and repeats the header now and then."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
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
        names = _choose(values, WIDTH - len(first))
        lines = []
        # A step that trains on no token lacks metrics: its row has gaps.
        if not set(names) <= set(self._names) or not self._rows_left:
            self._names = names
            self._rows_left = ROWS_BETWEEN_HEADERS
            labels = [METRICS[name].label.rjust(_width(name)) for name in names]
            lines.append(" ".join([" " * len(first), *labels, LEFT.rjust(LEFT_WIDTH)]))
        self._rows_left -= 1

        numbers = []
        for name in self._names:
            numbers.append(_number(name, values[name]) if name in values else " " * _width(name))
        left = "" if seconds_left is None else duration(seconds_left)
        lines.append(" ".join([first, *numbers, left.rjust(LEFT_WIDTH)]).rstrip())
        return lines


def _choose(values: Mapping[str, float], width: int) -> list[str]:
    """Returns the metrics of a row, with at most `width` columns for them and the time left."""
    # An evaluation has a line of its own.
    names = [name for name in STEP_LINE if name in values and not name.startswith("eval/")]
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
    text = f"{value:{METRICS[name].format}}"
    for digits in range(width, 0, -1):
        if len(text) <= width:
            break
        text = f"{value:.{digits}g}"
    return text.rjust(width)


def _width(name: str) -> int:
    return max(NARROWEST, len(METRICS[name].label))
