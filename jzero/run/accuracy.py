"""How every command prints an accuracy: "71.5 ± 0.4 %", or "3 of 4" where a percentage misleads.

A percentage and its standard error describe many problems. Of four problems, or if almost none or
almost all are solved, the standard error is far too small (0.0 without a solved problem), and the
count says more.
"""

import math

FEW_PROBLEMS = 20  # fewer are counted
FEW_SOLVED = 5  # fewer solved or unsolved problems are counted


def percent(share: float) -> str:
    """Returns a share as "71.5 %"."""
    return f"{100 * share:.1f} %"


def points(gain: float) -> str:
    """Returns the difference of two shares in percentage points, as "+21.9 points"."""
    return f"{100 * gain:+.1f} points"


def accuracy_text(share: float, problems: float | None = None, error: float | None = None) -> str:
    """Returns an accuracy as "71.5 ± 0.4 %" or "3 of 4".

    Args:
        share: the mean over problems of the share of correct samples.
        problems: the number of problems, if it is known.
        error: the standard error over problems; None if it is unknown, as for one problem.
    """
    if problems and _is_count(share, problems, error):
        solved = round(share * problems)
        if problems < FEW_PROBLEMS or min(solved, problems - solved) < FEW_SOLVED:
            return f"{solved:,} of {problems:,.0f}"
    return percent(share) if error is None else f"{100 * share:.1f} ± {100 * error:.1f} %"


def _is_count(share: float, problems: float, error: float | None) -> bool:
    """Returns whether each problem is solved or not, as with one sample of each.

    Several samples of a problem may be solved in part. Their standard error over problems is then
    smaller than that of problems which are solved or not.
    """
    if not math.isclose(share * problems, round(share * problems), abs_tol=1e-6):
        return False
    if error is None or problems < 2:
        return True
    binary_error = math.sqrt(share * (1 - share) / (problems - 1))
    return math.isclose(error, binary_error, rel_tol=1e-3, abs_tol=1e-9)
