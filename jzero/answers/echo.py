"""Whether an answer only repeats a formula of the question.

"Factor x^2-1" is not answered by x^2-1, although it equals the gold. But a question may contain its
answer, like the choices of a multiple-choice question, and the gold may have another form. So a
formula of the question is an echo only if the question required work: if the gold is simpler, or if
the question asks for another form.
"""

import functools
import math
import re

from jzero.answers.expressions import Node, split_unit
from jzero.answers.formulas import is_literal
from jzero.answers.latex_lexer import tokenize

_ASKS_FOR_A_FORM = re.compile(
    r"\b(?:factor|expand|simplif|rationali|rewrit|express|convert|reduc|decompos|writ|lowest"
    r"|standard form|in the form|in terms of|as an? (?:product|sum|fraction|decimal|percent))",
    re.IGNORECASE,
)
_MARK_OF_CHOICE = re.compile(r"(?:\\text(?:bf|rm)?\s*\{\s*)?\(?\b[A-H]\)\s*\}?|\b[A-H][.:]\s")
_LEAST_DIFFERENCE = 0.5  # in the effort of two formulas


def is_echo(answer: str, tree: Node, gold_tree: Node, question: str) -> bool:
    """Returns whether an answer that equals the gold is a formula of the question.

    A number or a name may occur in the question, also with its unit.
    """
    if tree == gold_tree or split_unit(tree)[0].kind in ("number", "symbol", "text"):
        return False
    if not question or _written(answer) not in _written(question):
        return False
    if _is_choice(answer, question):
        return False
    was_asked = _ASKS_FOR_A_FORM.search(question) is not None
    return was_asked or effort(tree) > effort(gold_tree) + _LEAST_DIFFERENCE


def _is_choice(answer: str, question: str) -> bool:
    """Returns whether the question lists the answer as one of its choices: "(A) x (B) 2x"."""
    choices = _MARK_OF_CHOICE.split(question)[1:]
    return len(choices) > 1 and _written(answer) in map(_written, choices)


@functools.lru_cache(4096)
def _written(text: str) -> str:
    # Spaces around each token let a formula match whole tokens only: 12 is not in 123. Without
    # the braces x^{2} is written like x^2.
    tokens = [token for token in tokenize(text) if token not in "{}"]
    return "".join(f" {token} " for token in tokens)


@functools.lru_cache(4096)
def effort(node: Node) -> float:
    """Returns the remaining work in a formula: its operations, and the length of its numbers.

    A decimal counts like its fraction, and a fraction or ratio of numbers like one number: 0.5x and
    x/2 are equally simple, and 3/4 is simpler than 6/8.
    """
    if node.kind == "number":
        numerator = max(1, abs(node.value.numerator))
        return math.log2(numerator) + math.log2(node.value.denominator)
    inside = sum(map(effort, node.parts))
    is_one_number = is_literal(node) and node.kind in ("divide", "ratio", "negative", "mixed")
    return inside + (0 if is_one_number else 1)
