r"""Parses the equations of Countdown: the numbers in an expression, and its exact value.

An expression consists of non-negative integers, + - * / and parentheses, in plain text or in LaTeX:
`(3+5)/2`, `(3 + 5) ÷ 2` and `\frac{3+5}{2}` are equivalent. The text comes from a policy, so its
length and its depth are bounded, and it is never evaluated as code: Python's parser builds a syntax
tree, and `_value` evaluates the few kinds of nodes that an expression may have.
"""

import ast
import itertools
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST_EQUATION = 200  # characters
DEEPEST_NESTING = 32  # nested parentheses or braces; Python's parser fails at about 200

# As in Python, integers have no leading zeros.
_TOKEN = re.compile(
    r"[ \t\r\n]*"
    r"(0|[1-9][0-9]*|[-+*/(){}×·⋅÷−]|\\(?:times|cdot|div|d?frac)(?![a-zA-Z]))"
    r"[ \t\r\n]*"
)
# Translates tokens to Python syntax. Python's parser reads frac[a][b], the translation of the LaTeX
# fraction \frac{a}{b}, as two subscripts.
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


# Delimiters that may surround an expression: formulas, Markdown's code and bold type, and a box.
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("```", "```"),
    ("`", "`"),
    ("**", "**"),
    ("*", "*"),
    ("\\boxed{", "}"),
)
_MOST_WRAPPERS = 8  # nested
_SPACING = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]")
# The left side of "x = 2+3": a name of up to four words.
NAME_OF_RESULT = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){0,3}")


class MalformedEquation(ValueError):
    """The text is not an expression of the game."""


def unwrapped(text: str) -> str:
    """Strips the surrounding delimiters and a full stop at the end from an expression."""
    # Each round strips a full stop and one pair of delimiters, until neither is left.
    text = _SPACING.sub(" ", text).strip()
    for _ in range(_MOST_WRAPPERS):
        text = text.removesuffix(".").strip()
        for opening, closing in _WRAPPERS:
            is_longer = len(text) > len(opening) + len(closing)
            if is_longer and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)].strip()
                break
        else:
            return text
    return text


def parse_expression(text: str) -> tuple[list[int], Fraction | None]:
    """Returns the numbers in an expression, in order, and the expression's exact value.

    The value is None if the expression divides by zero.

    Raises:
        MalformedEquation: the text is not an expression, or nests too deeply.
    """
    # Every character has to belong to a token.
    tokens: list[str] = _TOKEN.findall(text)
    if _TOKEN.sub("", text):
        raise MalformedEquation(f"characters outside of numbers and operators in {text!r}")
    # Check the depth before parsing: Python's parser would fail on deep nesting.
    changes_of_depth = ((token in "({") - (token in ")}") for token in tokens)
    if max(itertools.accumulate(changes_of_depth), default=0) > DEEPEST_NESTING:
        raise MalformedEquation(f"more than {DEEPEST_NESTING} nested parentheses")

    numbers = [int(token) for token in tokens if token.isdigit()]
    # Spaces keep the numbers of "1 2" apart; Python's parser then rejects the expression.
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
    """Evaluates a node of the syntax tree."""
    match node:
        case ast.Constant(value=int(number)):
            # Exact: 8/3*3 is 8, which floats only approximate.
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
