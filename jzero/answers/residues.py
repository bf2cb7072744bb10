"""Compares rational formulas by residues if their values are too large to compute.

2^{10000} and 4^{5000}, or 2024! and 2024 · 2023!, have too many digits for `evaluation`, and so has
(x+1)^{100000} at most points. Modulo a large number they are computed in microseconds. Two rational
formulas with equal residues are considered equal: unequal ones of bounded size have equal residues
modulo a prime of 128 bits for at most a few of the 2^120 primes, and three are used.
"""

import functools
import math
import random

from jzero.answers.evaluation import is_exact, symbol_names, value
from jzero.answers.expressions import Node

# The first primes after the leading 128 bits of pi, e and the golden ratio. They must not have a
# special form, such as 2^n - 1: modulo that prime, 2^n is 1.
PRIMES = (
    0xC90FDAA22168C234C4C6628B80DC1DAF,
    0xB7E151628AED2A6ABF7158809CF4F441,
    0x9E3779B97F4A7C15F39CC0605CEDC839,
)
MODULUS = math.prod(PRIMES)
# Factorials are computed in full before their residue is taken.
LARGEST_FACTORIAL = 20000
MAX_BITS_OF_EXPONENT = 4096


@functools.lru_cache(4096)
def residue(node: Node) -> int | None:
    """Returns the residue of a rational formula, at random residues of its symbols.

    Returns None if the formula has operations that are not rational, or has no residue.
    """
    if node.kind == "number":
        return _divided(node.value.numerator, node.value.denominator)
    # i is not a rational number.
    if node.kind == "symbol":
        return None if node.name == "i" else _symbol_residue(node.name)
    if node.kind == "power":
        return _power_residue(*node.parts)
    if node.kind in ("factorial", "binomial"):
        return _factorial_residue(node)
    parts = []
    for part in node.parts:
        number = residue(part)
        if number is None:
            return None
        parts.append(number)
    match node.kind:
        case "add" | "mixed":
            return sum(parts) % MODULUS
        case "multiply" | "scaled":
            return functools.reduce(_multiplied, parts, 1)
        case "negative":
            return -parts[0] % MODULUS
        case "divide":
            return _divided(*parts)
    return None


def _multiplied(a: int, b: int) -> int:
    return a * b % MODULUS


def _divided(above: int, below: int) -> int | None:
    # There is no inverse.
    if math.gcd(below, MODULUS) != 1:
        return None
    return above * pow(below, -1, MODULUS) % MODULUS


@functools.lru_cache(1024)
def _symbol_residue(name: str) -> int:
    return random.Random(f"{name}/residue").randrange(MODULUS)


def _whole_value(node: Node) -> int | None:
    if symbol_names(node):
        return None
    number = value(node)
    if number is None or not is_exact(number) or number.denominator != 1:
        return None
    return int(number)


def _power_residue(base: Node, exponent: Node) -> int | None:
    number, integer = residue(base), _whole_value(exponent)
    if number is None or integer is None or integer.bit_length() > MAX_BITS_OF_EXPONENT:
        return None
    if integer < 0 and math.gcd(number, MODULUS) != 1:
        return None
    return pow(number, integer, MODULUS)


def _factorial_residue(node: Node) -> int | None:
    numbers = []
    for part in node.parts:
        integer = _whole_value(part)
        if integer is None or not 0 <= integer <= LARGEST_FACTORIAL:
            return None
        numbers.append(integer)
    if node.kind == "factorial":
        return math.factorial(numbers[0]) % MODULUS
    return math.comb(*numbers) % MODULUS
