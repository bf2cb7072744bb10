r"""Reads the equations of Countdown: which numbers an expression uses, and its exact value.

An expression is written with non-negative integers, + - * / and parentheses, in plain text or in
LaTeX: `(3+5)/2`, `(3 + 5) ÷ 2` and `\frac{3+5}{2}` are the same. The text comes from a policy, so
its length and its depth are bounded, and it is never evaluated as code: Python's parser makes a
syntax tree, and `_value` computes the value of the few kinds of node that an expression may have.
"""

import ast
import itertools
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST_EQUATION = 200  # characters
DEEPEST_NESTING = 32  # parentheses or braces within each other; Python's parser fails at about 200

# Integers have no leading zeros, as in Python.
_TOKEN = re.compile(
    r"[ \t\r\n]*"
    r"(0|[1-9][0-9]*|[-+*/(){}×·⋅÷−]|\\(?:times|cdot|div|d?frac)(?![a-zA-Z]))"
    r"[ \t\r\n]*"
)
# Tokens that Python writes in another way. A LaTeX fraction \frac{a}{b} becomes frac[a][b], which
# Python's parser reads as an index of an index.
_PYTHON_TOKENS = {
    "×": "*",
    "·": "*",
    "⋅": "*",
    "÷": "/",
    "−": "-",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\\frac": "frac",
    "\\dfrac": "frac",
    "{": "[",
    "}": "]",
}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class MalformedEquation(ValueError):
    """The text is not an expression of the game."""


def parse_expression(text: str) -> tuple[list[int], Fraction | None]:
    """Returns the numbers that an expression uses, in order, and its exact value.

    The value is None where the expression divides by zero.

    Raises:
        MalformedEquation: the text is not an expression, or nests too deeply.
    """
    tokens: list[str] = _TOKEN.findall(text)
    if _TOKEN.sub("", text):
        raise MalformedEquation(f"characters outside of numbers and operators in {text!r}")
    changes_of_depth = ((token in "({") - (token in ")}") for token in tokens)
    if max(itertools.accumulate(changes_of_depth), default=0) > DEEPEST_NESTING:
        raise MalformedEquation(f"more than {DEEPEST_NESTING} nested parentheses")

    numbers = [int(token) for token in tokens if token.isdigit()]
    # Spaces keep "1 2" two numbers, which Python's parser refuses.
    source = " ".join(_PYTHON_TOKENS.get(token, token) for token in tokens)
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        raise MalformedEquation(text) from error
    try:
        return numbers, _value(tree.body)
    except ZeroDivisionError:
        return numbers, None


def _value(node: ast.AST) -> Fraction:
    """Returns the value of a syntax tree's node."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.Subscript(  # frac[numerator][denominator]
            value=ast.Subscript(value=ast.Name(), slice=numerator),
            slice=denominator,
        ):
            return _value(numerator) / _value(denominator)
    raise MalformedEquation(ast.dump(node))
