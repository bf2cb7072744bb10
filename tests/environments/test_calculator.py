"""The tool `calculator`: arithmetic, and nothing else."""

import math
import random
import time
from fractions import Fraction

import pytest

from jzero.environments.tools.calculator import calculator


def test_integers_are_exact() -> None:
    rng = random.Random(0)
    for _ in range(200):
        a, b, c = (rng.randint(-999, 999) for _ in range(3))
        assert calculator(f"{a} * ({b} - {c})") == str(a * (b - c))
        if c:
            assert calculator(f"({a}) // ({c})") == str(a // c)
            assert Fraction(calculator(f"({a} * {c}) / ({c})")) == a


@pytest.mark.parametrize(
    "expression, value",
    [
        ("2 ** 10", "1024"),
        ("1/4", "0.25"),
        ("6/3", "2"),
        (" -3 + 5 ", "2"),
        ("7 % 3", "1"),
        ("sqrt(2)**2 > 1", None),
        ("round(2.567, 1)", "2.6"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("gcd(12, 18)", "6"),
        ("1e3", "1000"),
        ("floor(pi)", "3"),
    ],
)
def test_what_it_knows(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match="not allowed"):
            calculator(expression)
    else:
        assert calculator(expression) == value
    assert float(calculator("sin(pi/6)")) == pytest.approx(math.sin(math.pi / 6))


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "().__class__",
        "'a' * 9",
        "[1] * 9",
        "(lambda: 1)()",
        "open('x')",
        "x",
        "True",
        "1 if 1 else 2",
        "abs(x=1)",
        "abs()",
        "gcd(1.5, 2)",
        "9**9**9",
        "9**(9**9)",
        "10**5000",
        "2.0**5000",
        "(-8)**0.5",
        "1/0",
        "log(0)",
        "exp(1e6)",
        "round(5, -10**9)",
        "1j",
        "-" * 900 + "1",
        "(" * 300 + "1" + ")" * 300,
        "1" * 1001,
        "1 +",
        "",
        "1\n2",
        "\0",
        "0 ** -1",
        "99999**800 * 99999**800",
    ],
)
def test_everything_else_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    with pytest.raises((ValueError, ArithmeticError)):
        calculator(expression)
    assert time.process_time() - start < 1
