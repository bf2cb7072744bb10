"""Verifiers that use the package math-verify.

- `open_r1`: open-r1's accuracy reward (huggingface/open-r1 at e4ac3ae). The gold is the first LaTeX
  formula of its text; a gold without one pays 1.0. The answer is the first box of the response or,
  without a box, its first formula that follows a word such as "answer".
- `open_r1_1416fa0`: the same reward at 1416fa0, the commit of its recipes. The gold may also be a
  plain number. A gold that math-verify does not read pays 0.
- `math_verify`: the package's defaults on the whole response and on the gold. A gold without a mark
  of formulas is treated as a formula.

The package reads text of a policy with its own parser and has no limit of memory: these verifiers
run in the pool's processes, which are killed at `task.grade_seconds`.
"""

import re

from jzero.types import Grade, JsonValue

# The package measures wall time, which passes faster on a busy machine. The pool limits processor
# time instead.
NO_LIMIT = 3600
_FORMULA = re.compile(r"(?<!\\)\$[^$]+\$|\\boxed|\\\(|\\\[")
_MARKS_OF_FORMULAS = ("$", r"\boxed", r"\(", r"\[")


def grade_open_r1(response: str, gold: JsonValue) -> Grade:
    """Grades the first formula of a response that is marked as an answer."""
    import math_verify  # an extra

    parsed_gold = math_verify.parse(
        _first(gold),
        extraction_mode="first_match",
        extraction_config=[math_verify.LatexExtractionConfig()],
        parsing_timeout=NO_LIMIT,
    )
    # The original skips such rows with a reward of 1.
    if not parsed_gold:
        return Grade(1.0, False, "no gold")
    answer = _parse_marked_formula(response)
    # The original passes the answer first, although math-verify expects the gold there.
    is_right = math_verify.verify(answer, parsed_gold, timeout_seconds=NO_LIMIT)
    return _verdict(bool(answer), is_right)


def grade_open_r1_1416fa0(response: str, gold: JsonValue) -> Grade:
    """Grades the first formula of a response against a gold of LaTeX or of a plain number."""
    import math_verify  # an extra

    parsed_gold = math_verify.parse(
        _first(gold), extraction_mode="first_match", parsing_timeout=NO_LIMIT
    )
    # The original has no reward for such a row. In a group, one reward for all is no advantage.
    if not parsed_gold:
        return Grade(0.0, False, "no gold")
    answer = _parse_marked_formula(response)
    is_right = math_verify.verify(parsed_gold, answer, timeout_seconds=NO_LIMIT)
    return _verdict(bool(answer), is_right)


def has_formula(gold: JsonValue) -> bool:
    """Returns whether a gold has LaTeX, without which `open_r1` pays every response.

    Escaped dollars are money.
    """
    return _FORMULA.search(_first(gold)) is not None


def _first(gold: JsonValue) -> str:
    return str(gold[0] if isinstance(gold, list) and gold else gold)


def _parse_marked_formula(response: str) -> list:
    """Returns what math-verify reads from the first formula that is marked as an answer."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    reading = NormalizationConfig(
        basic_latex=True,
        units=True,
        malformed_operators=False,
        nits=False,
        boxed="all",
        equations=True,  # deprecated, but it changes how some answers are read
    )
    return math_verify.parse(
        response,
        extraction_mode="first_match",
        extraction_config=[
            math_verify.LatexExtractionConfig(
                normalization_config=reading,
                boxed_match_priority=0,
                try_extract_without_anchor=False,
            )
        ],
        parsing_timeout=NO_LIMIT,
    )


def grade_math_verify(response: str, gold: JsonValue) -> Grade:
    """Grades by the package's defaults. Any gold of a list is accepted."""
    import math_verify  # an extra

    answer = math_verify.parse(response, parsing_timeout=NO_LIMIT)
    golds = gold if isinstance(gold, list) else [gold]
    is_right = any(_verifies(answer, str(item)) for item in golds)
    return _verdict(bool(answer), is_right)


def _verifies(answer: list, gold: str) -> bool:
    import math_verify

    parsed_gold = math_verify.parse(_as_formula(gold), parsing_timeout=NO_LIMIT)
    return math_verify.verify(parsed_gold, answer, timeout_seconds=NO_LIMIT)


def _as_formula(gold: str) -> str:
    is_marked = any(mark in gold for mark in _MARKS_OF_FORMULAS)
    return gold if is_marked else f"${gold}$"


def _verdict(has_answer: bool, is_right: bool) -> Grade:
    if is_right:
        return Grade(1.0, True, "correct")
    return Grade(0.0, False, "wrong value" if has_answer else "no answer")
