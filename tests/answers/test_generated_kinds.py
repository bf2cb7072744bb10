"""Pairs that are generated from the parts of a kind: units, products, curves and real golds."""

import itertools
import random

import pytest

from jzero.answers.quantities import _SYMBOLS, same_unit
from jzero.answers.verdict import grade

CURVES = (r"e^{2x}", r"e^{-x}", "x^3", r"\frac{1}{x}", "(x+1)^2", r"(x^2+1)", r"\sqrt{x}")
FORMS = (
    "y=C{f}",
    r"y=A{f}",
    r"\ln|y|=\ln|{f}|+C",
    r"\frac{{y}}{{{f}}}=K",
    "y=2C{f}",
    r"\ln|y|-\ln|{f}|=c",
)


def is_credited(answer: str, gold: str) -> bool:
    return grade(answer, gold, template="answer").correct


def test_symbols_of_units_that_differ_in_case_are_different_units() -> None:
    symbols = [symbol for symbol in _SYMBOLS if symbol.isascii() and symbol.isalpha()]
    by_letters: dict[str, list[str]] = {}
    for symbol in symbols:
        by_letters.setdefault(symbol.lower(), []).append(symbol)
    pairs = [pair for group in by_letters.values() for pair in itertools.permutations(group, 2)]
    assert len(pairs) > 100
    for symbol, other in pairs:
        is_same = same_unit(_SYMBOLS[symbol], _SYMBOLS[other])
        credited = is_credited(rf"5\text{{ {symbol}}}", rf"5\text{{ {other}}}")
        assert credited == is_same, (symbol, other)


@pytest.mark.parametrize("prefix, power", [("m", -3), (r"\mu", -6), ("n", -9), ("p", -12)])
@pytest.mark.parametrize("unit", ["C", "m", "F", "s", "A"])
def test_a_prefix_is_its_power_of_ten(prefix, power, unit) -> None:
    written = rf"\mu\mathrm{{{unit}}}" if prefix == r"\mu" else rf"\mathrm{{{prefix}{unit}}}"
    prefixed = rf"35\ {written}"  # 5 pm is a time
    answers = [rf"35\times10^{{{power}}}\text{{ {unit}}}", rf"3.5e{power + 1}\text{{ {unit}}}"]
    for answer in answers[: 2 if power < -3 else 1]:  # 0.035 C is not 35 mC
        assert is_credited(prefixed, answer), (prefixed, answer)
        assert is_credited(answer, prefixed), (answer, prefixed)
    for other in (power + 3, power - 3, -power):
        assert not is_credited(prefixed, rf"35\times10^{{{other}}}\text{{ {unit}}}")


@pytest.mark.parametrize("letters", ["ABC", "PAQ", "ABCD", "XYX"])
@pytest.mark.parametrize("operation", ["{-1}", "T", r"\top"])
def test_only_the_reversed_product_is_the_inverse_or_transposed_one(letters, operation) -> None:
    gold = f"({letters})^{operation}"
    for order in {*itertools.permutations(letters)}:
        answer = "".join(f"{letter}^{{{operation.strip('{}')}}}" for letter in order)
        assert is_credited(answer, gold) == (list(order) == list(letters[::-1])), answer


@pytest.mark.parametrize("function", CURVES)
def test_solutions_are_the_same_in_all_forms_of_their_constant(function) -> None:
    forms = [form.format(f=function) for form in FORMS]
    rng = random.Random(function)
    for answer, gold in rng.sample([*itertools.permutations(forms, 2)], 12):
        assert is_credited(answer, gold), (answer, gold)
    for other in CURVES:
        if other != function:
            answer, gold = rng.choice(FORMS).format(f=other), rng.choice(forms)
            assert not is_credited(answer, gold), (answer, gold)


def test_antiderivatives_with_another_derivative_are_not_credited() -> None:
    functions = (
        r"\frac13\ln|3x+1|",
        r"\ln|x+\frac12|",
        r"\frac{(x+1)^2}{2}",
        r"\tan^2x",
        "|x-3|",
        r"\sqrt{x+2}",
        "e^{2x}",
        r"x\ln|x|",
        r"\arctan\frac x2",
        r"\lfloor x\rfloor",
    )
    for answer, gold in itertools.combinations(functions, 2):
        assert not is_credited(f"{answer}+C", f"{gold}+C"), (answer, gold)
        assert not is_credited(f"f(x)={gold}+c", f"{answer}+C"), (answer, gold)
    for function in functions:
        assert is_credited(f"1+{function}+K", f"{function}+C"), function


UNITS = ("m/s", "m/s^2", "kg", "N/m", "J", "J/s", "kg/m^3", "C/s", "K", "V/m")


def test_a_unit_in_letters_is_not_another_unit() -> None:
    for answer, gold in itertools.permutations(UNITS, 2):
        quantity = rf"9.8\text{{ {gold}}}"
        assert not is_credited(rf"9.8\text{{ {answer}}}", quantity), (answer, gold)
        if "/" in answer:  # 9.8 J is also a product
            assert not is_credited(f"9.8 {answer}", quantity), (answer, gold)
    for unit in UNITS:
        assert is_credited(f"9.8 {unit}", rf"9.8\text{{ {unit}}}"), unit
