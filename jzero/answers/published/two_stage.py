"""The two-stage comparison of answers: normalized texts, then sympy on their difference.

This is how PRM800K grades (Lightman et al. 2023, arXiv:2305.20050) and, after it, the fast verifier
of understand-r1-zero. An answer is normalized to text that sympy can read. Answers with the same
text are equal. Otherwise tuples are compared item by item, and two items are equal if sympy
simplifies their difference to zero. An integer must be written as an integer, and a fraction must
be reduced to the same form as the gold.

The original passes the text to sympy's parser, which evaluates it as Python. Here sympy's own
transformations turn the text into Python source, and `_value` walks the syntax tree of that source.
`_value` knows only numbers, symbols, arithmetic and a few functions. A text of any other kind is
equal to no answer.

sympy may take very long on a hostile answer: run this in a process that can be killed.
"""

import ast
import functools
import operator
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

_ENCLOSED_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_FACTORS = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_UNITS = (
    "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
)
# In this order and without word boundaries, as in the original: a unit is also removed inside of
# a word.
_UNIT_PATTERNS = [re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS.split("|")]
_GROUPED_DIGITS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
# The dots match any character, as in the original.
_PLAIN_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_HARD_POWERS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_BRACKETS = "()[]"
_LARGEST_BITS = 200_000  # of a power; a larger one is equal to no answer
_LARGEST_FACTORIAL = 20_000


def is_equal(answer: str, gold: str) -> bool:
    """Returns whether an answer equals the gold by the two stages."""
    gold_text, text = normalize(gold), normalize(answer)
    if text == gold_text:
        return True
    if not text:
        return False
    gold_items, items = _items(gold_text), _items(text)
    if len(items) != len(gold_items):
        return False
    # [0, 1) is another interval than (0, 1).
    if len(gold_items) > 1 and (gold_text[0], gold_text[-1]) != (text[0], text[-1]):
        return False
    return all(map(_is_equal_item, items, gold_items))


def normalize(text: str) -> str:
    """Returns the text of an answer as the first stage compares it."""
    if enclosed := _ENCLOSED_TEXT.search(text):
        text = enclosed[1]
    # First the escaped marks: without its % a \% would leave a backslash.
    for mark in (r"\%", r"\$", "$", "%"):
        text = text.replace(mark, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _FACTORS:
        text = text.replace(word, factor)
    for pattern in _UNIT_PATTERNS:
        text = pattern.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    # LaTeX sets the comma of 1,\!000 without a space after it.
    text = re.sub(r",\\! *", "", text)
    # Numbers close to an integer become that integer.
    number = _float(text)
    if number is not None and _is_near_integer(number):
        text = str(round(number))
    if "\\" in text:
        text = _without_latex(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    if _is_integer_text(text):
        text = str(int(float(text.replace(",", ""))))
    return text


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_near_integer(number: float) -> bool:
    try:
        return abs(number - round(number)) <= 1e-7
    except (OverflowError, ValueError):  # infinite or not a number
        return False


def _is_integer_text(text: str) -> bool:
    number = _float(_without_group_commas(text))
    return number is not None and _is_near_integer(number)


def _without_group_commas(text: str) -> str:
    """Removes the commas of 1,234,567 but not those between the items of a tuple."""
    # A match takes the character after its group, so the group after it needs another pass.
    while True:
        shorter = _GROUPED_DIGITS.sub(r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def _without_latex(text: str) -> str:
    """Returns LaTeX as plain text by pylatexenc, or the text itself if pylatexenc fails."""
    from pylatexenc import latex2text  # an extra

    spaced = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac")
    spaced = spaced.replace(r"\frac", r" \frac")  # 2\frac12 is a mixed number
    try:
        plain = latex2text.LatexNodes2Text().latex_to_text(spaced)
    except Exception:  # the package may raise anything on a hostile answer
        return text
    for symbol, name in zip("√π∞∪·×", ("sqrt", "pi", "inf", "U", "*", "*"), strict=True):
        plain = plain.replace(symbol, name)
    return plain.strip()


def _items(text: str) -> list[str]:
    """Returns the items of a tuple or interval without inner brackets, or the text itself."""
    text = _without_group_commas(text)
    if not text:
        return []
    inside = text[1:-1]
    has_brackets = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if has_brackets and not any(bracket in inside for bracket in _BRACKETS):
        return [item.strip() for item in inside.split(",")]
    return [text]


def _is_equal_item(item: str, gold: str) -> bool:
    if _PLAIN_FRACTION.search(gold) and _PLAIN_FRACTION.search(item):
        return item == gold
    # 6/2 is not 3: an integer must be written out.
    if _is_integer_text(gold) != _is_integer_text(item):
        return False
    return _is_zero(f"({gold})-({item})")


def _is_zero(difference: str) -> bool:
    """Returns whether sympy reads the text and simplifies it to zero."""
    # The original does not try formulas of more than two letters, or with hard powers.
    letters = {char for char in re.sub("sqrt|frac", "", difference) if char.isalpha()}
    if len(letters) > 2 or _HARD_POWERS.search(difference):
        return False
    import sympy

    try:
        value = _value(ast.parse(_python_source(difference), mode="eval").body)
        return bool(sympy.simplify(value) == 0)
    except Exception:  # sympy may raise anything on a text that is not a formula
        return False


@functools.cache
def _sympy_names() -> dict[str, object]:
    """Returns the names that sympy's parser does not treat as symbols."""
    import builtins

    import sympy

    # The table that sympy's `parse_expr` builds.
    names: dict[str, object] = {name: getattr(sympy, name) for name in sympy.__all__}
    for name, value in vars(builtins).items():
        if isinstance(value, types.BuiltinFunctionType):
            names[name] = value
    return names


def _python_source(text: str) -> str:
    """Returns the Python source that sympy's parser makes of a text, without evaluating it."""
    from sympy.parsing import sympy_parser

    transformations = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )
    return sympy_parser.stringify_expr(
        text.replace("^", "**"), {}, dict(_sympy_names()), transformations
    )


_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_CONSTANTS = ("pi", "oo", "zoo", "nan")
_ATOMS = ("Integer", "Float", "Rational", "Symbol")
_FUNCTIONS = ("sqrt", "ln", "re", "im", "li", "ff", "rf")
_FACTORIALS = ("factorial", "factorial2")


def _value(node: ast.expr) -> "sympy.Expr":
    """Returns the value of a node of the source that sympy's parser makes.

    Raises:
        ValueError: `_python_source` makes no such node of a formula, or the value is too large.
    """
    import sympy

    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return getattr(sympy, node.id)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = node.func.id
        if function in _ATOMS and all(isinstance(item, ast.Constant) for item in node.args):
            return getattr(sympy, function)(*map(ast.literal_eval, node.args))
        arguments = list(map(_value, node.args))
        if function in _FUNCTIONS:
            return getattr(sympy, function)(*arguments)
        # Larger factorials take too long. The comparison of a symbol raises TypeError, so its
        # factorial equals no answer.
        if function in _FACTORIALS and all(item < _LARGEST_FACTORIAL for item in arguments):
            return getattr(sympy, function)(*arguments)
    raise ValueError(f"no formula: {ast.dump(node)[:80]}")


def _power(base: "sympy.Expr", exponent: "sympy.Expr") -> "sympy.Expr":
    """Returns base ** exponent, unless it is a number of more than _LARGEST_BITS bits."""
    import sympy

    if isinstance(base, sympy.Rational) and isinstance(exponent, sympy.Rational):
        bits = max(abs(base.p), base.q).bit_length() * abs(exponent)
        if bits > _LARGEST_BITS:
            raise ValueError(f"a power of {bits} bits")
    return base**exponent
