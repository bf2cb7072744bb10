"""Verifiers that reproduce the rewards of published runs: `VERIFIERS`, the values of
`task.verifier`.

jzero's own grader (`task.verifier=fast`) is the better judge of mathematics. A reproduction must
use the original's grading, including its faults. Each verifier reads the whole response with the
extraction of its original, and pays the scores of its original. The file
tests/answers/test_published_verifiers.py compares both on 12,000 rows.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

from jzero.answers.published import oat, packages
from jzero.errors import UserError
from jzero.extras import install_command
from jzero.types import Grade, JsonValue


class Verifier(NamedTuple):
    """A published verifier."""

    grade: Callable[[str, JsonValue], Grade]  # arguments: response, gold
    source: str
    packages: tuple[str, ...]  # modules that must be importable
    is_of_countdown: bool = False  # if false, the verifier grades mathematics


_MATH_VERIFY = ("math_verify", "latex2sympy2_extended", "antlr4")
_UNDERSTAND_R1_ZERO = "understand-r1-zero 8d31b35"

VERIFIERS = {
    "oat_fast": Verifier(oat.grade_fast, _UNDERSTAND_R1_ZERO, ("pylatexenc",)),
    "oat_full": Verifier(oat.grade_full, _UNDERSTAND_R1_ZERO, ("pylatexenc", *_MATH_VERIFY)),
    "oat_r1": Verifier(oat.grade_r1, _UNDERSTAND_R1_ZERO, ("pylatexenc",)),
    "oat_r1_full": Verifier(oat.grade_r1_full, _UNDERSTAND_R1_ZERO, ("pylatexenc", *_MATH_VERIFY)),
    "last_number": Verifier(oat.grade_last_number, "oat b966394", ()),
    "oat_countdown": Verifier(oat.grade_countdown, "oat 56b9b57", (), is_of_countdown=True),
    "open_r1": Verifier(packages.grade_open_r1, "open-r1 e4ac3ae", _MATH_VERIFY),
    "open_r1_1416fa0": Verifier(packages.grade_open_r1_1416fa0, "open-r1 1416fa0", _MATH_VERIFY),
    "math_verify": Verifier(packages.grade_math_verify, "math-verify's defaults", _MATH_VERIFY),
    "sympy": Verifier(oat.grade_sympy, "PRM800K, two stages", ("pylatexenc",)),
}


OWN_VERIFIER = "fast"  # the other value of `task.verifier`


def grades(verifier: str, task: str) -> bool:
    """Returns whether a verifier grades the responses to a task of that name."""
    if verifier not in VERIFIERS:
        return True
    return VERIFIERS[verifier].is_of_countdown == (task == "countdown")


@functools.cache
def load(verifier: str) -> None:
    """Imports a verifier's packages and grades one correct answer with it, which takes seconds.

    Returns at once for a verifier that needs no package.

    Raises:
        UserError: a package is missing or broken, or refuses the answer.
    """
    if verifier not in VERIFIERS or not VERIFIERS[verifier].packages:
        return
    missing = [name for name in VERIFIERS[verifier].packages if not _is_installed(name)]
    if missing:
        raise UserError(
            f"task.verifier={verifier} needs {', '.join(missing)}: {install_command('verify')}"
        )
    for package in _MATH_VERIFY:  # they log each hostile answer
        logging.getLogger(package).setLevel(logging.CRITICAL)
    # Every verifier must accept this answer: its tags and box serve all extractions.
    answer, gold = r"\boxed{\frac{1}{2}+\frac{1}{4}}", r"$\frac{3}{4}$"
    try:
        grade = VERIFIERS[verifier].grade(f"</think> <answer>{answer}</answer>", gold)
    except Exception as error:  # a broken package may raise anything
        raise UserError(
            f"task.verifier={verifier} does not work: {type(error).__name__}: {error}. "
            f"Install its packages again: {install_command('verify', again=True)}"
        ) from error
    if not grade.correct:
        raise UserError(
            f"task.verifier={verifier} rejects a correct answer ({grade.reason}): its packages are "
            f"broken. Install them again: {install_command('verify', again=True)}"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
