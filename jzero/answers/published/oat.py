"""The verifiers of oat and understand-r1-zero (Liu et al. 2025, arXiv:2503.20783).

- `oat_fast`: the last box, compared by MATH's normal form or by the two stages of PRM800K.
- `oat_full`: the same, and then math-verify on the two answers.
- `oat_r1`, `oat_r1_full`: the text of the last <answer>, which must follow a literal
  "</think> <answer>" somewhere in the response. If that text has a box, the box's content.
- `sympy`: the last box, compared by the two stages only.
- `oat_countdown`: TinyZero's score of a Countdown equation, as in oat.
- `last_number`: the last number of the response, the reward of oat's PPO on GSM8K.

Source: sail-sg/understand-r1-zero at 8d31b35, sail-sg/oat at 56b9b57 and, for `last_number`, at
b966394. The originals limit a response to one second; here the pool's `task.grade_seconds` applies.
"""

import ast
import json
import operator
import re
from collections.abc import Callable

from jzero.answers.published import hendrycks, two_stage
from jzero.answers.published.packages import NO_LIMIT
from jzero.json_values import as_object, member, to_integer
from jzero.types import Grade, JsonValue

# The original's limits.
_LONG = 128  # characters; longer answers are checked for repetitions
_REPETITIVE = 0.2
FORMAT_SCORE = 0.1  # of an equation that is wrong or malformed
_BOX = r"\boxed{"
# 1.5, 2., .5, 3e8 and 42, each with or without a sign.
_NUMBER = re.compile(r"[+-]?\d+\.\d*|[+-]?\.\d+|[+-]?\d+e[-+]?\d+|[+-]?\d+")
LONGEST_RESPONSE = 200_000  # characters that are searched for numbers, at the end of the response


def grade_fast(response: str, gold: JsonValue) -> Grade:
    """Grades the last box by text and by sympy."""
    return _grade_answer(last_box(response), gold, _is_equal_fast)


def grade_full(response: str, gold: JsonValue) -> Grade:
    """Grades the last box by text, by sympy and by math-verify."""
    return _grade_answer(last_box(response), gold, _is_equal_full)


def grade_r1(response: str, gold: JsonValue) -> Grade:
    """Grades the last <answer> by text and by sympy."""
    return _grade_tagged(response, gold, _is_equal_fast)


def grade_r1_full(response: str, gold: JsonValue) -> Grade:
    """Grades the last <answer> by text, by sympy and by math-verify."""
    return _grade_tagged(response, gold, _is_equal_full)


def grade_sympy(response: str, gold: JsonValue) -> Grade:
    """Grades the last box by the two stages of PRM800K only."""
    return _grade_answer(last_box(response), gold, two_stage.is_equal)


def _grade_tagged(response: str, gold: JsonValue, is_equal: Callable[[str, str], bool]) -> Grade:
    """Grades the last <answer>, or the last box in it."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return Grade(0.0, False, "no answer")
    answer = response.split("<answer>")[-1].replace("</answer>", "")
    if r"\boxed" in answer:
        answer = last_box(answer)
    # Tags around a box without an end have the form of an answer, and no value.
    if answer is None:
        return Grade(0.0, False, "wrong value")
    return _grade_answer(answer, gold, is_equal)


def _grade_answer(
    answer: str | None,
    gold: JsonValue,
    is_equal: Callable[[str, str], bool],
) -> Grade:
    if answer is None:
        return Grade(0.0, False, "no answer")
    golds = [_without_box(str(item)) for item in (gold if isinstance(gold, list) else [gold])]
    if any(is_equal(answer, item) for item in golds if item is not None):
        return Grade(1.0, True, "correct")
    return Grade(0.0, False, "wrong value")


def _without_box(gold: str) -> str | None:
    """Returns the content of the gold's last box, the gold without a box, None for an open box."""
    return last_box(gold) if r"\boxed" in gold else gold


def _is_equal_fast(answer: str, gold: str) -> bool:
    if hendrycks.normal_form(answer) == hendrycks.normal_form(gold):
        return True
    return two_stage.is_equal(answer, gold)


def _is_equal_full(answer: str, gold: str) -> bool:
    if _is_equal_fast(answer, gold):
        return True
    if any(len(text) > _LONG and is_repetitive(text) for text in (answer, gold)):
        return False
    return _verifies(answer, gold)


def _verifies(answer: str, gold: str) -> bool:
    """Returns the verdict of math-verify on the first formula of each."""
    import math_verify  # an extra

    parsed = []
    for text in (gold, answer):
        formula = text if "$" in text else f"${text}$"
        parsed.append(
            math_verify.parse(
                formula,
                extraction_config=(
                    math_verify.LatexExtractionConfig(boxed_match_priority=0),
                    math_verify.ExprExtractionConfig(),
                ),
                fallback_mode="no_fallback",
                extraction_mode=["first_match"],  # type: ignore  # any value but "any_match"
                parsing_timeout=NO_LIMIT,
            )
        )
    return math_verify.verify(*parsed, timeout_seconds=NO_LIMIT)


def is_repetitive(text: str) -> bool:
    """Returns whether the longest common prefixes of neighboring sorted suffixes are long.

    Their sum is compared with the number of pairs of positions. Time is O(n log² n).
    """
    length = len(text)
    ranks = _suffix_ranks(text)
    order = [0] * length
    for position, rank in enumerate(ranks):
        order[rank] = position
    total = common = 0
    for position, rank in enumerate(ranks):  # Kasai et al. 2001: `common` falls by at most one
        if rank == length - 1:
            common = 0
            continue
        other = order[rank + 1]
        while max(position, other) + common < length and (
            text[position + common] == text[other + common]
        ):
            common += 1
        total += common
        common = max(common - 1, 0)
    return 2 * total > _REPETITIVE * length * (length + 1)


def _suffix_ranks(text: str) -> list[int]:
    """Returns the place of every suffix among the sorted suffixes, by doubling prefixes."""
    ranks = [ord(char) for char in text]
    width = 1
    while True:
        # Pairs of the ranks of two neighboring pieces; a piece beyond the end ranks before all.
        following = [*ranks[width:], *[-1] * width]
        keys = list(zip(ranks, following, strict=False))
        in_order = sorted(set(keys))
        places = {key: place for place, key in enumerate(in_order)}
        ranks = [places[key] for key in keys]
        if len(places) == len(text):
            return ranks
        width *= 2


# --- Countdown ------------------------------------------------------------------------------------

_TAGGED = re.compile(r"<answer>(.*?)</answer>")
_ARITHMETIC = re.compile(r"^[\d+\-*/().\s]+$")
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LARGEST_BITS = 100_000  # of a power; a larger one has no value


def grade_countdown(response: str, gold: JsonValue) -> Grade:
    """Grades the last <answer> of the last line: 1, FORMAT_SCORE or 0.

    `gold` is {"numbers": [...], "target": ...}, or the same as JSON. Any answer in its tags scores
    at least FORMAT_SCORE.
    """
    problem = as_object(json.loads(gold) if isinstance(gold, str) else gold, "gold")
    numbers = member(problem, ("numbers",), list)
    target = to_integer(problem["target"], "target")
    answers = _TAGGED.findall(response.split("\n")[-1])
    if not answers:
        return Grade(0.0, False, "no answer")
    equation = answers[-1].strip()
    # Each number must be used exactly once.
    # The digits of 3.5 count as the numbers 3 and 5, as in the original.
    if sorted(int(number) for number in re.findall(r"\d+", equation)) != sorted(numbers):
        return Grade(FORMAT_SCORE, False, "wrong numbers")
    try:
        value = _arithmetic_value(equation)
        # The original's tolerance.
        is_right = abs(value - target) < 1e-5
    except Exception:  # malformed, a division by zero, too large, or nested too deeply
        return Grade(FORMAT_SCORE, False, "unparsed")
    if is_right:
        return Grade(1.0, True, "correct")
    return Grade(FORMAT_SCORE, False, "wrong value")


def _arithmetic_value(equation: str) -> float:
    """Returns the value of an equation in Python's arithmetic, without evaluating it as Python."""
    if not _ARITHMETIC.match(equation):
        raise ValueError(f"no arithmetic: {equation[:80]!r}")
    # The original evaluates the text as Python, which ignores spaces and tabs in front.
    return _node_value(ast.parse(equation.lstrip(" \t"), mode="eval").body)


def _node_value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_node_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _node_value(node.left), _node_value(node.right)
        if isinstance(node.op, ast.Pow):
            if isinstance(left, int) and abs(right) * left.bit_length() > _LARGEST_BITS:
                raise ValueError("a large power")
            return left**right
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"no arithmetic: {ast.dump(node)[:80]}")


def last_box(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, None if it is not closed.

    Every brace counts, even an escaped one. \boxed 5 has no content.
    """
    start = text.rfind(r"\boxed")
    if start < 0 or not text.startswith(_BOX, start):
        return None
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len(_BOX) : position]
    return None


def grade_last_number(response: str, gold: object) -> Grade:
    """Grades a response by its last number, which needs no mark: the score is 1.0 or 0.0.

    `gold` is an answer, or a list of accepted answers. The number is compared as text, so that
    "72.0" is not "72". Commas are ignored in the response and in the gold.
    """
    numbers: list[str] = _NUMBER.findall(response[-LONGEST_RESPONSE:].replace(",", ""))
    if not numbers:
        return Grade(0.0, False, "no answer")
    candidates = gold if isinstance(gold, list) else [gold]
    golds = [_number_text(item) for item in candidates if item is not None]
    if not golds:
        return Grade(0.0, False, "no gold")
    # A full stop at the end belongs to the sentence.
    if numbers[-1].rstrip(".") in golds:
        return Grade(1.0, True, "correct")
    return Grade(0.0, False, "wrong value")


def _number_text(gold: object) -> str:
    return str(gold).strip().lower().replace(",", "")
