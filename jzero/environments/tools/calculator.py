"""The tool `calculator`: numbers, + - * / // % **, parentheses, and a few functions.

Expressions come from the policy and are never passed to `eval`. The tool walks the syntax tree and
rejects every node that is not in its tables. Intermediate results are bounded, too.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096  # of an integer
MAX_DIGITS = 300  # of round

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "log": math.log,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (17 + 4) * 2. The
            functions abs, ceil, cos, exp, floor, gcd, log, max, min, round, sin, sqrt and tan and
            the constants pi and e are known.

    Returns:
        The value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an expression") from None
    # 6 / 2 is "3", not "3.0". Above 2^53, floats are not exact integers.
    value = _value(tree.body, 0)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr, depth: int) -> Number:
    """Returns the value of a syntax tree; raises ValueError or ArithmeticError without a value."""
    if depth > MAX_DEPTH:
        raise ValueError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left, depth + 1), _value(right, depth + 1)
            # Powers are checked first: computing a huge integer takes long.
            if isinstance(op, ast.Pow):
                _check_power(first, second)
            return _bounded(_OPERATORS[type(op)](first, second))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(argument, depth + 1) for argument in arguments])
    raise ValueError(f"{ast.unparse(node)[:60]!r} is not allowed in an expression")


def _call(name: str, arguments: list[Number]) -> Number:
    # With an integer, round computes a power of ten with as many digits.
    if name == "round" and len(arguments) > 1 and abs(arguments[1]) > MAX_DIGITS:
        raise OverflowError("round takes too many digits")
    try:
        return _bounded(_FUNCTIONS[name](*arguments))
    except TypeError:
        raise ValueError(f"{name} does not take {arguments}") from None


def _check_power(base: Number, exponent: Number) -> None:
    """Rejects a power with a huge or complex result, before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        # An upper bound of the result's bits.
        if base.bit_length() * exponent > MAX_BITS:
            raise OverflowError("the number is too large")
    elif isinstance(exponent, float) and base < 0 and not exponent.is_integer():
        raise ValueError("the power is not a real number")


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError("the number is too large")
    elif not math.isfinite(value):
        raise OverflowError("the number is too large")
    return value
