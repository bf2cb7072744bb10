"""Pairs of answers that are the same by construction, or differ by construction, of many kinds.

Each function of KINDS makes pairs of one kind from a source of random numbers. Labels follow from
how a pair was made; where a pair says something of numbers, the label is checked by arithmetic on
fractions, by counting, or by truth tables, which share no code with the grader.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple


class Pair(NamedTuple):
    """An answer and a gold, and whether they are the same."""

    is_equal: bool
    answer: str
    gold: str


Pairs = Iterator[Pair]


def same(answer: str, gold: str) -> Pair:
    return Pair(True, answer, gold)


def different(answer: str, gold: str) -> Pair:
    return Pair(False, answer, gold)


def fraction(number: Fraction) -> str:
    sign = "-" if number < 0 else ""
    above, below = abs(number.numerator), number.denominator
    return f"{sign}{above}" if below == 1 else rf"{sign}\frac{{{above}}}{{{below}}}"


def other(rng: random.Random, number: int, low: int = -20, high: int = 60) -> int:
    """Returns an integer that is not `number`."""
    changed = rng.randint(low, high)
    return changed if changed != number else number + 1


# Numbers


def rationals(rng: random.Random) -> Pairs:
    number = Fraction(rng.randint(-900, 900), rng.randint(2, 60))
    factor = rng.randint(2, 9)
    above, below = number.numerator, number.denominator
    yield same(rf"\frac{{{above * factor}}}{{{below * factor}}}", fraction(number))
    yield same(f"{above}/{below}", fraction(number))
    if below > 1 and number > 1:
        whole, rest = divmod(above, below)
        yield same(rf"{whole}\frac{{{rest}}}{{{below}}}", fraction(number))
        yield different(rf"{whole}\cdot\frac{{{rest}}}{{{below}}}", fraction(number))
    changed = number + Fraction(rng.choice((1, -1)), rng.randint(2, 60))
    yield different(fraction(changed), fraction(number))
    if number:
        yield different(fraction(-number), fraction(number))
    decimal = Fraction(rng.randint(1, 99999), 10 ** rng.randint(1, 4))
    written = str(float(decimal))
    assert Fraction(written) == decimal
    yield same(written, fraction(decimal))
    yield different(written + "1", fraction(decimal))


def powers(rng: random.Random) -> Pairs:
    base, above, below = rng.choice((2, 3, 5, 6, 7)), rng.randint(1, 7), rng.randint(2, 5)
    if math.gcd(above, below) > 1:
        above = 1
    root = rf"\sqrt[{below}]{{{base**above}}}"
    power = rf"{base}^{{{above}/{below}}}"
    yield same(root, power)
    yield same(power, root)
    yield same(rf"{base**below}^{{\frac{{{above}}}{{{below**2}}}}}", power)
    yield different(rf"{base}^{{{above + 1}/{below}}}", root)
    yield different(rf"\sqrt[{below + 1}]{{{base**above}}}", power)
    factor, radicand = rng.randint(2, 9), rng.choice((2, 3, 5, 6, 7, 10, 11))
    yield same(rf"\sqrt{{{factor**2 * radicand}}}", rf"{factor}\sqrt{{{radicand}}}")
    yield same(
        rf"\frac{{{radicand * factor}}}{{\sqrt{{{radicand}}}}}",
        rf"{factor}\sqrt{radicand}" if radicand < 10 else rf"{factor}\sqrt{{{radicand}}}",
    )
    yield different(rf"\sqrt{{{factor**2 * radicand + 1}}}", rf"{factor}\sqrt{{{radicand}}}")
    yield (
        different(rf"{radicand}\sqrt{{{factor}}}", rf"{factor}\sqrt{{{radicand}}}")
        if (factor * radicand**2 != radicand * factor**2)
        else same(rf"{factor}\sqrt{{{radicand}}}", rf"{factor}\sqrt{{{radicand}}}")
    )


def large_numbers(rng: random.Random) -> Pairs:
    n = rng.randint(500, 3000)
    yield same(rf"{n}\cdot{n - 1}!", f"{n}!")
    yield same(rf"\frac{{{n}!}}{{{n}}}", f"{n - 1}!")
    yield different(rf"{n + 1}\cdot{n - 1}!", f"{n}!")
    yield different(f"{n}!+1", f"{n}!")
    k = rng.randint(200, 400)
    assert math.comb(n, k) * math.factorial(k) * math.factorial(n - k) == math.factorial(n)
    yield same(rf"\frac{{{n}!}}{{{k}!\cdot{n - k}!}}", rf"\binom{{{n}}}{{{k}}}")
    yield same(rf"\binom{{{n}}}{{{n - k}}}", rf"\binom{{{n}}}{{{k}}}")
    yield different(rf"\frac{{{n}!}}{{{k}!\cdot{n - k - 1}!}}", rf"\binom{{{n}}}{{{k}}}")
    base, exponent = rng.randint(2, 9), rng.randint(3000, 9000)
    yield same(f"{base}^{{{2 * exponent}}}", f"{base**2}^{{{exponent}}}")
    yield different(f"{base}^{{{2 * exponent + 1}}}", f"{base**2}^{{{exponent}}}")
    yield different(f"{base}^{{{2 * exponent}}}-1", f"{base**2}^{{{exponent}}}")


def complex_numbers(rng: random.Random) -> Pairs:
    a, b = rng.randint(1, 30), rng.randint(2, 30)
    yield same(f"{b}i+{a}", f"{a}+{b}i")
    yield same(f"{a}-({-b})i", f"{a}+{b}i")
    yield different(f"{a}-{b}i", f"{a}+{b}i")
    yield different(f"{b}+{a}i", f"{a}+{b}i") if a != b else same(f"{a}+{b}i", f"{a}+{b}i")
    yield different(f"{a}+{b + 1}i", f"{a}+{b}i")
    angle = rng.choice((3, 4, 6))
    yield same(rf"{a}e^{{i\pi/{angle}}}", rf"{a}\operatorname{{cis}}\frac{{\pi}}{{{angle}}}")
    yield different(rf"{a}e^{{-i\pi/{angle}}}", rf"{a}\operatorname{{cis}}\frac{{\pi}}{{{angle}}}")


def percentages(rng: random.Random) -> Pairs:
    number = rng.randint(2, 99)
    yield same(rf"{number}\%", f"{number} percent")
    yield same(str(Fraction(number, 100)), rf"{number}\%")
    yield different(rf"{number + 1}\%", rf"{number}\%")
    yield different(rf"{Fraction(number, 100)}\%", rf"{number}\%")


def bases(rng: random.Random) -> Pairs:
    base = rng.randint(3, 9)
    digits = "".join(str(rng.randrange(base)) for _ in range(4)).lstrip("0") or "1"
    yield same(f"{digits}_{{{base}}}", f"{digits}_{base}")
    word = ("three", "four", "five", "six", "seven", "eight", "nine")[base - 3]
    yield same(rf"{digits}_{{\text{{{word}}}}}", f"{digits}_{base}")
    yield different(f"{digits}_{{{base + 1}}}", f"{digits}_{base}")
    yield different(f"1{digits}_{{{base}}}", f"{digits}_{base}")


# Formulas


def _polynomial(coefficients: dict[str, int], order: list[str]) -> str:
    written = ""
    for power in order:
        number = coefficients[power]
        sign = "-" if number < 0 else ("+" if written else "")
        size = "" if abs(number) == 1 and power else str(abs(number))
        written += sign + size + power
    return written


def polynomials(rng: random.Random) -> Pairs:
    name = rng.choice("xyzt")
    a, b, c, d = (rng.choice((1, 2, 3, 5, 7)) * rng.choice((1, -1)) for _ in range(4))
    coefficients = {f"{name}^2": a * c, name: a * d + b * c, "": b * d}
    coefficients = {power: number for power, number in coefficients.items() if number}
    order = list(coefficients)
    gold = _polynomial(coefficients, order)
    factored = f"({a}{name}{b:+})({c}{name}{d:+})"
    for value in (Fraction(3, 7), Fraction(-5, 2), Fraction(11)):
        expanded = a * c * value**2 + (a * d + b * c) * value + b * d
        assert (a * value + b) * (c * value + d) == expanded
    yield same(factored, gold)
    yield same(_polynomial(coefficients, order[::-1]), gold)
    changed = {**coefficients, order[0]: coefficients[order[0]] + rng.choice((1, -1, 2))}
    if all(changed.values()):
        yield different(_polynomial(changed, order), gold)
    yield different(f"({a}{name}{b:+})({c}{name}{d + 1:+})", gold)
    yield different(gold.replace(name, "w"), gold)


def roots_and_logarithms(rng: random.Random) -> Pairs:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    yield same(rf"\ln({a}x)", rf"\ln x+\ln {a}")
    yield same(rf"{a}\ln x", rf"\ln(x)\cdot {a}")
    yield same(rf"\log_{{{a}}} x", rf"\frac{{\ln x}}{{\ln {a}}}")
    yield same(rf"\sqrt{{{a}x}}", rf"\sqrt{{{a}}}\sqrt{{x}}")
    yield same(rf"x^{{1/{2 * a + 1}}}", rf"\sqrt[{2 * a + 1}]{{x}}")
    yield different(rf"\ln({a}x)", rf"{a}\ln x")
    yield different(rf"\log_{{{a}}} x", rf"\log_{{{a + 1}}} x")
    yield different(rf"\sqrt{{{a}x+{b}}}", rf"\sqrt{{{a}x}}+\sqrt{{{b}}}")
    yield different(rf"\sqrt{{x+{a}}}", rf"\sqrt{{x+{a + 1}}}")


def domains(rng: random.Random) -> Pairs:
    a = rng.randint(2, 9)
    inside = rng.choice(("x", f"x-{a}", f"{a}-x", f"{a}x", f"x+{a}"))
    gold = rf"\sqrt{{|{inside}|}}"
    yield different(rf"\sqrt{{{inside}}}", gold)
    yield different(rf"\sqrt{{-({inside})}}", gold)
    yield same(rf"|{inside}|^{{1/2}}", gold)
    yield different(rf"({inside})^{{{2 * a + 1}/2}}", rf"|{inside}|^{{{2 * a + 1}/2}}")
    yield same(rf"({inside})^{{2/{2 * a + 1}}}", rf"|{inside}|^{{2/{2 * a + 1}}}")
    yield different(rf"\ln({inside})", rf"\ln|{inside}|")
    yield same(rf"\frac12\ln(({inside})^2)", rf"\ln|{inside}|")
    yield same(rf"\frac{{({inside})^2}}{{{inside}}}", inside)


def rounding(rng: random.Random) -> Pairs:
    size = rng.choice((3, 7, 10, 1000, 10**6, 10**9))
    yield same(rf"\lfloor\frac{{n}}{{{size}}}+1\rfloor", rf"\lfloor\frac n{{{size}}}\rfloor+1")
    yield same(rf"-\lceil-\frac{{n}}{{{size}}}\rceil", rf"\lfloor\frac n{{{size}}}\rfloor")
    yield different(
        rf"\lfloor\frac{{n}}{{{2 * size}}}\rfloor+n", rf"\lfloor\frac n{{{size}}}\rfloor+n"
    )
    yield different(rf"\lceil\frac{{n}}{{{size}}}\rceil", rf"\lfloor\frac n{{{size}}}\rfloor")
    yield different(rf"|x-{size}|", f"x-{size}")
    yield same(rf"|{size}-x|", rf"|x-{size}|")
    yield same(rf"\max(x,{size})", rf"\max({size},x)")
    yield same(rf"\frac{{x+{size}+|x-{size}|}}2", rf"\max({size},x)")
    yield different(rf"\min(x,{size})", rf"\max({size},x)")


# Functions


def values_of_functions(rng: random.Random) -> Pairs:
    name = rng.choice(("f", "g", "P", "T", "h"))
    at, result = rng.randint(0, 9), rng.randint(-30, 30)
    gold = f"{name}({at})={result}"
    yield same(f"{result}={name}({at})", gold)
    yield same(f"{name}({at})={result}.0", gold)
    yield same(str(result), gold)
    yield different(f"{name}({at})={other(rng, result)}", gold)
    yield different(f"{name}({at + 1})={result}", gold)
    if result:
        yield different(f"-{name}({at})={result}", gold)
    yield different(f"{name}({at})>{result}", gold)
    yield different(f"{name}({at})>{result}", f"{name}({at})>{other(rng, result)}")
    yield same(f"{name}({at})+{name}({at})", f"2{name}({at})")
    yield different(f"{name}({2 * at + 2})", f"2{name}({at + 1})")


def operators(rng: random.Random) -> Pairs:
    operator = rng.choice(("Re", "Im", "arg"))
    number = rng.randint(2, 99)
    gold = rf"\operatorname{{{operator}}} z"
    yield different(f"{number}{gold}", gold)
    yield different(f"{number}{gold}", f"{number + 1}{gold}")
    yield same(rf"\operatorname{{{operator}}}(z)\cdot {number}", f"{number}{gold}")
    for function, spelling in (("tan", r"\operatorname{tg}"), ("arcsin", r"\sin^{-1}")):
        yield same(rf"{number}{spelling} x", rf"{number}\{function} x")
        yield different(rf"{number + 1}{spelling} x", rf"{number}\{function} x")


def sums(rng: random.Random) -> Pairs:
    low, power, shift = rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 3)
    gold = rf"\sum_{{k={low}}}^{{n}} k^{power}"
    yield same(rf"\sum_{{j={low}}}^{{n}} j^{{{power}}}", gold)
    shifted = rf"\sum_{{k={low - shift}}}^{{n-{shift}}}(k+{shift})^{power}"
    for n in range(low, 9):
        total = sum(k**power for k in range(low, n + 1))
        assert total == sum((k + shift) ** power for k in range(low - shift, n - shift + 1))
    yield same(shifted, gold)
    yield different(rf"\sum_{{k={low + 1}}}^{{n+1}} k^{power}", gold)
    yield different(rf"\sum_{{k={low}}}^{{n}} k^{power + 1}", gold)
    yield different(rf"2\sum_{{k={low}}}^{{n}} k^{power}", gold)
    closed = {1: r"\frac{n(n+1)}2", 2: r"\frac{n(n+1)(2n+1)}6", 3: r"\frac{n^2(n+1)^2}4"}
    yield same(closed[power], rf"\sum_{{k=1}}^n k^{power}")
    yield different(rf"\sum_{{k=1}}^n k^{power}", closed[power])  # nothing has been summed
    letter = rng.choice("tuvs")
    integral = rf"\int_0^{{{shift}}} x^{power}\,dx"
    yield same(rf"\int_0^{{{shift}}} {letter}^{{{power}}}\,d{letter}", integral)
    yield different(rf"\int_0^{{{shift + 1}}} x^{power}\,dx", integral)
    yield different(rf"\int_0^{{{shift}}} x^{power + 1}\,dx", integral)
    yield same(rf"-\int_{{{shift}}}^0 x^{power}\,dx", integral)
    limit = rf"\lim_{{n\to\infty}} \frac{{a_n}}{{n^{power}}}"
    yield same(rf"\lim_{{m\to\infty}} \frac{{a_n}}{{m^{{{power}}}}}", limit)
    yield different(rf"\lim_{{n\to 0}} \frac{{a_n}}{{n^{power}}}", limit)


def combinations(rng: random.Random) -> Pairs:
    n = rng.randint(5, 40)
    k = rng.randint(2, n - 2)
    gold = rf"\binom{{{n}}}{{{k}}}"
    for spelling in (f"C({n},{k})", f"{{}}_{{{n}}}C_{{{k}}}", rf"\frac{{{n}!}}{{{k}!{n - k}!}}"):
        yield same(spelling, gold)
    yield same(str(math.comb(n, k)), gold)
    yield different(f"C({n + 1},{k})", gold)
    yield different(f"{{}}_{{{n}}}P_{{{k}}}", gold)
    yield different(str(math.comb(n, k) + 1), gold)


# Sets of numbers


class Interval(NamedTuple):
    low: int | None
    high: int | None
    has_low: bool
    has_high: bool

    def contains(self, number: Fraction) -> bool:
        above = self.low is None or number > self.low or (self.has_low and number == self.low)
        below = self.high is None or number < self.high or (self.has_high and number == self.high)
        return above and below

    def brackets(self) -> str:
        opening = "[" if self.has_low else "("
        closing = "]" if self.has_high else ")"
        low = r"-\infty" if self.low is None else self.low
        high = r"\infty" if self.high is None else self.high
        return f"{opening}{low},{high}{closing}"

    def relation(self, name: str) -> str:
        low_sign, high_sign = (r"\le " if has else "<" for has in (self.has_low, self.has_high))
        before = "" if self.low is None else f"{self.low}{low_sign}"
        after = "" if self.high is None else f"{high_sign}{self.high}"
        return f"{before}{name}{after}"


def _interval(rng: random.Random, low: int, high: int) -> Interval:
    return Interval(low, high, rng.random() < 0.5, rng.random() < 0.5)


_NUMBERS = [Fraction(number, 2) for number in range(-60, 61)]


def intervals(rng: random.Random) -> Pairs:
    a, b, c, d = sorted(rng.sample(range(-25, 25), 4))
    name = rng.choice("xyt")
    first, second = _interval(rng, a, b), _interval(rng, c, d)
    gold = first.brackets()
    yield same(first.relation(name), gold)
    yield same(gold, first.relation(name))
    turned = first._replace(has_low=not first.has_low)
    yield different(turned.relation(name), gold)
    yield different(turned.brackets(), gold)
    yield different(_interval(rng, a, b + 1).relation(name), gold)
    union = rf"{first.brackets()}\cup {second.brackets()}"
    yield same(rf"{first.relation(name)}\text{{ or }}{second.relation(name)}", union)
    yield same(rf"{second.brackets()}\cup{first.brackets()}", union)
    yield different(rf"{first.relation(name)}\text{{ and }}{second.relation(name)}", union)
    low, high = Interval(None, b, False, first.has_high), Interval(a, None, first.has_low, False)
    both = [number for number in _NUMBERS if low.contains(number) and high.contains(number)]
    assert both == [number for number in _NUMBERS if first.contains(number)]
    yield same(rf"{low.relation(name)}\text{{ and }}{high.relation(name)}", gold)
    yield same(rf"{low.brackets()}\cap {high.brackets()}", gold)
    yield different(rf"{low.relation(name)}\text{{ or }}{high.relation(name)}", gold)
    overlapping = _interval(rng, a, c), _interval(rng, b, d)
    whole = Interval(a, d, overlapping[0].has_low, overlapping[1].has_high)
    for number in _NUMBERS:
        assert whole.contains(number) == any(part.contains(number) for part in overlapping)
    yield same(r"\cup ".join(part.brackets() for part in overlapping), whole.brackets())
    outside = rf"\mathbb{{R}}\setminus {first.brackets()}"
    lower = Interval(None, a, False, not first.has_low)
    upper = Interval(b, None, not first.has_high, False)
    yield same(rf"{lower.relation(name)}\text{{ or }}{upper.relation(name)}", outside)
    yield different(gold, outside)


def absolute_values(rng: random.Random) -> Pairs:
    center, radius = rng.randint(-9, 9), rng.randint(1, 9)
    inside = f"x-{center}" if center >= 0 else f"x+{-center}"
    low, high = center - radius, center + radius
    for number in _NUMBERS:
        assert (abs(number - center) < radius) == (low < number < high)
    yield same(rf"|{inside}|<{radius}", f"({low},{high})")
    yield same(rf"|{inside}|\le {radius}", rf"{low}\le x\le {high}")
    yield same(rf"|{inside}|>{radius}", rf"(-\infty,{low})\cup({high},\infty)")
    yield different(rf"|{inside}|\le {radius}", f"({low},{high})")
    yield different(rf"|{inside}|<{radius}", rf"(-\infty,{low})\cup({high},\infty)")
    yield different(rf"|{inside}|<{radius + 1}", f"({low},{high})")


def exceptions(rng: random.Random) -> Pairs:
    a, b = sorted(rng.sample(range(-20, 20), 2))
    without = rf"\mathbb{{R}}\setminus\{{{a}\}}"
    yield same(rf"x\ne {a}", without)
    yield same(rf"(-\infty,{a})\cup({a},\infty)", without)
    yield same(rf"x<{a}\text{{ or }}x>{a}", rf"x\neq {a}")
    yield different(rf"x\ne {b}", without)
    yield different(f"x={a}", without)
    yield same(rf"x\ne {b},{a}", rf"\mathbb{{R}}\setminus\{{{a},{b}\}}")
    yield different(rf"x\ne {a}", rf"\mathbb{{R}}\setminus\{{{a},{b}\}}")
    yield same(rf"x>{a},x\ne {b}", rf"({a},{b})\cup({b},\infty)")
    yield different(rf"x>{a}", rf"({a},{b})\cup({b},\infty)")


def inequalities(rng: random.Random) -> Pairs:
    a, b, scale = rng.randint(-20, 20), rng.randint(2, 9), rng.randint(2, 5)
    yield same(f"{scale}x<{scale * a}", f"x<{a}")
    yield same(f"-{scale}x<{-scale * a}", f"x>{a}")
    yield different(f"-{scale}x<{-scale * a}", f"x<{a}")
    yield different(f"{scale}x<{scale * a + 1}", f"x<{a}")
    yield same(f"{scale}x+{scale * b}y<{scale * a}", f"x+{b}y<{a}")
    yield different(f"{scale}x+{scale * b}y>{scale * a}", f"x+{b}y<{a}")
    yield same(f"y<{a}-{b}x", f"{b}x+y<{a}")
    yield same("0<x<y", r"0<x\text{ and }x<y")
    yield same("a<x<a+1", "(a,a+1)")
    yield different(r"a\le x<a+1", "(a,a+1)")


# Solutions


def solutions(rng: random.Random) -> Pairs:
    a, b, c, d = rng.sample(range(-30, 30), 4)
    gold = f"x={a},y={b}"
    yield same(f"y={b},x={a}", gold)
    yield same(f"(x,y)=({a},{b})", gold)
    yield same(f"({a},{b})", gold)
    yield same(f"{a},{b}", gold)
    yield same(rf"x={a}\text{{ and }}y={b}", gold)
    yield same(rf"\begin{{cases}}x={a}\\y={b}\end{{cases}}", gold)
    yield different(f"{b},{a}", gold)
    yield different(f"({b},{a})", gold)
    yield different(rf"\{{{a},{b}\}}", gold)
    yield different(f"x={b},y={a}", gold)
    yield different(rf"x={a}\text{{ or }}y={b}", gold)
    yield different(f"x={a}", gold)
    yield different(f"x={a},z={b}", gold)
    two = f"({a},{b}),({c},{d})"
    yield same(f"({c},{d}),({a},{b})", two)
    yield same(rf"(x,y)=({a},{b})\text{{ or }}({c},{d})", two)
    yield same(f"x={a},y={b};x={c},y={d}", two)
    yield same(rf"x={c},y={d}\text{{ or }}x={a},y={b}", f"x={a},y={b};x={c},y={d}")
    yield different(f"x={a},y={d};x={c},y={b}", two)
    yield different(f"({a},{b})", two)
    yield same(rf"x={a}\text{{ or }}x={b}", f"{a},{b}")
    yield same(f"x={b},{a}", rf"\{{{a},{b}\}}")
    yield different(rf"x={a}\text{{ or }}x={c}", f"{a},{b}")
    root = rf"\sqrt{{{rng.choice((2, 3, 5, 7))}}}"
    yield same(rf"{a}\pm {root}", f"{a}-{root},{a}+{root}")
    yield different(rf"{a}\pm {root}", f"{a}+{root}")


def curves(rng: random.Random) -> Pairs:
    slope, shift, scale = rng.randint(2, 9), rng.randint(1, 20), rng.randint(2, 5)
    gold = f"y={slope}x+{shift}"
    yield same(f"{slope}x-y+{shift}=0", gold)
    yield same(f"{scale * slope}x-{scale}y=-{scale * shift}", gold)
    yield same(f"{slope}x+{shift}", gold)
    yield different(f"{slope}x+y+{shift}=0", gold)
    yield different(f"y={slope}x-{shift}", gold)
    yield different(f"x={slope}y+{shift}", gold)
    yield same(f"xy={shift}", rf"y=\frac{{{shift}}}{{x}}")
    yield different(f"xy={shift + 1}", rf"y=\frac{{{shift}}}{{x}}")
    yield same(f"x^2+y^2={shift}", f"y^2={shift}-x^2")
    yield different(f"x^2-y^2={shift}", f"y^2={shift}-x^2")
    yield different("x=y^2", r"y=\sqrt{x}")


def families(rng: random.Random) -> Pairs:
    part = rng.choice((3, 4, 6))
    start = rf"\frac{{\pi}}{{{part}}}"
    gold = rf"x={start}+k\pi,k\in\mathbb{{Z}}"
    yield same(rf"x={start}+n\pi, n\in\mathbb{{Z}}", gold)
    yield same(rf"{start}-k\pi, k\in\mathbb{{Z}}", gold)
    yield same(rf"x=\frac{{{part + 1}\pi}}{{{part}}}+k\pi,k\in\mathbb{{Z}}", gold)
    yield different(rf"x={start}+2k\pi,k\in\mathbb{{Z}}", gold)
    yield different(rf"x=-{start}+k\pi,k\in\mathbb{{Z}}", gold) if part != 2 else same(gold, gold)
    yield different(rf"x={start}", gold)


def congruences(rng: random.Random) -> Pairs:
    modulus, scale = rng.randint(3, 30), rng.randint(2, 5)
    rest = rng.randrange(1, modulus)
    gold = rf"x\equiv {rest}\pmod{{{modulus}}}"
    assert (rest + scale * modulus) % modulus == rest
    yield same(rf"x\equiv {rest + scale * modulus}\pmod {{{modulus}}}", gold)
    yield same(rf"x\equiv {rest - modulus} \mod {modulus}", gold)
    yield same(rf"x={rest}\ (\text{{mod }}{modulus})", gold)
    yield same(rf"{rest}\pmod{{{modulus}}}", gold)
    yield different(rf"x\equiv {rest + 1}\pmod{{{modulus}}}", gold)
    yield different(rf"x\equiv {rest}\pmod{{{modulus + 1}}}", gold)
    yield different(rf"y\equiv {rest}\pmod{{{modulus}}}", gold)
    second = (rest + 1) % modulus
    yield same(
        rf"x\equiv {second},{rest}\pmod{{{modulus}}}",
        rf"x\equiv {rest}\pmod{{{modulus}}}\text{{ or }}x\equiv {second}\pmod{{{modulus}}}",
    )
    doubled = [n for n in range(60) if (2 * n - 2 * rest) % (2 * modulus) == 0]
    assert doubled == [n for n in range(60) if (n - rest) % modulus == 0]
    yield same(rf"2x\equiv {2 * rest}\pmod{{{2 * modulus}}}", gold)


def piecewise(rng: random.Random) -> Pairs:
    at, a, b = rng.randint(-9, 9), rng.randint(2, 5), rng.randint(6, 9)
    first = rf"{a}x, & x<{at}"
    second = rf"{b}x, & x\ge {at}"
    gold = rf"f(x)=\begin{{cases}}{first}\\{second}\end{{cases}}"
    yield same(rf"\begin{{cases}}{second}\\{first}\end{{cases}}", gold)
    yield same(
        rf"\begin{{cases}}{a}x & \text{{if }}x<{at}\\{b}x & \text{{otherwise}}\end{{cases}}", gold
    )
    yield different(rf"\begin{{cases}}{b}x & x<{at}\\{a}x & x\ge {at}\end{{cases}}", gold)
    yield different(rf"\begin{{cases}}{a}x & x<{at + 1}\\{b}x & x\ge {at + 1}\end{{cases}}", gold)
    turned = rf"\begin{{cases}}{a}x & x\le {at}\\{b}x & x>{at}\end{{cases}}"
    yield same(turned, gold) if at == 0 else different(turned, gold)
    yield same(rf"\begin{{cases}}x-{a} & x\ge {a}\\{a}-x & x<{a}\end{{cases}}", rf"|x-{a}|")
    yield different(rf"\begin{{cases}}x-{a} & x\ge {b}\\{a}-x & x<{b}\end{{cases}}", rf"|x-{a}|")


# Sets and propositions of letters


def _random_formula(
    rng: random.Random, depth: int
) -> tuple[str, Callable[[tuple[bool, ...]], bool]]:
    if depth == 0:
        index = rng.randrange(3)
        return "ABC"[index], lambda row: row[index]
    left, of_left = _random_formula(rng, depth - 1)
    right, of_right = _random_formula(rng, depth - 1)
    operator = rng.choice((r"\cup", r"\cap", r"\setminus"))
    if operator == r"\cup":
        return rf"({left}\cup {right})", lambda row: of_left(row) or of_right(row)
    if operator == r"\cap":
        return rf"({left}\cap {right})", lambda row: of_left(row) and of_right(row)
    return rf"({left}\setminus {right})", lambda row: of_left(row) and not of_right(row)


_ROWS = tuple(itertools.product((False, True), repeat=3))


def sets_of_letters(rng: random.Random) -> Pairs:
    written, holds = _random_formula(rng, 2)
    other_written, other_holds = _random_formula(rng, 2)
    is_equal = all(holds(row) == other_holds(row) for row in _ROWS)
    yield Pair(is_equal, written, other_written)
    a, b, c = rng.sample("ABCDE", 3)
    yield same(rf"({a}\cup {b})\cap {c}", rf"({b}\cap {c})\cup({a}\cap {c})")
    yield same(rf"P({a}\cup {b})", rf"P({b}\cup {a})")
    yield different(rf"P({a}\cup {b})", rf"P({b}\cap {a})")
    yield different(rf"{a}\cup {b}", rf"{a}\cup {c}")


def propositions(rng: random.Random) -> Pairs:
    p, q, r = rng.sample("pqrst", 3)
    yield same(rf"{p}\to {q}", rf"\neg {p}\vee {q}")
    yield same(rf"\neg {q}\to\neg {p}", rf"{p}\rightarrow {q}")
    yield same(rf"\neg({p}\wedge {q})", rf"\neg {p}\lor\neg {q}")
    yield same(rf"{p}\wedge({q}\vee {r})", rf"({p}\wedge {q})\vee({r}\land {p})")
    yield different(rf"{q}\to {p}", rf"{p}\to {q}")
    yield different(rf"{p}\wedge {q}", rf"{p}\vee {q}")
    yield different(rf"\neg {p}\wedge {q}", rf"\neg({p}\wedge {q})")


# Matrices


def matrices(rng: random.Random) -> Pairs:
    a, b, c, d = rng.sample(range(-20, 20), 4)
    scale = rng.randint(2, 5)
    gold = rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}"
    yield same(rf"\begin{{bmatrix}}{a} & {b} \\[4pt] {c} & {d}\end{{bmatrix}}", gold)
    times = rf"\begin{{pmatrix}}{a * scale}&{b * scale}\\{c * scale}&{d * scale}\end{{pmatrix}}"
    yield same(rf"\frac{{1}}{{{scale}}}{times}", gold)
    yield same(rf"\begin{{pmatrix}}{a}&{c}\\{b}&{d}\end{{pmatrix}}^T", gold)
    yield different(rf"\begin{{pmatrix}}{a}&{c}\\{b}&{d}\end{{pmatrix}}", gold)
    yield different(times, gold)
    yield different(rf"{scale}{times}", gold)
    yield different(rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d + 1}\end{{pmatrix}}", gold)
    column = rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}"
    yield same(f"({a},{b})", column)
    yield different(f"({b},{a})", column)
    yield different(rf"\begin{{pmatrix}}{a}&{b}\end{{pmatrix}}", column)
    yield same(rf"\begin{{vmatrix}}{a}&x\\{c}&y\end{{vmatrix}}", f"{a}y-({c})x")
    yield (
        different(rf"\begin{{vmatrix}}{a}&x\\{c}&y\end{{vmatrix}}", f"{a}y+({c})x")
        if c
        else same("y", "y")
    )


# Lists


def lists(rng: random.Random) -> Pairs:
    a, b, c = rng.sample(range(-40, 40), 3)
    yield same(f"{c},{a},{b}", f"{a},{b},{c}")
    yield same(rf"{a},{b}\text{{ and }}{c}", f"{a},{b},{c}")
    yield same(rf"{a},{b},\text{{ or }}{c}", rf"\{{{a},{b},{c}\}}")
    yield different(f"{a},{b}", f"{a},{b},{c}")
    yield different(f"{a},{b},{c + 1}", f"{a},{b},{c}") if c + 1 not in (a, b) else same("1", "1")
    yield same(f"({a}, {b})", f"({a},{b})")
    yield different(f"({b},{a})", f"({a},{b})")
    yield different(f"({a},{b})", rf"\{{{a},{b}\}}")
    x, y, scale = rng.randint(1, 30), rng.randint(61, 90), rng.randint(2, 9)
    yield same(f"{x * scale}:{y * scale}", f"{x}:{y}")
    yield different(f"{y}:{x}", f"{x}:{y}")
    yield different(f"{x}:{y + 1}", f"{x}:{y}")


# Quantities

_UNITS = (
    ("N", "newtons", "J"),
    ("J", "joules", "N"),
    ("V", "volts", "W"),
    ("eV", "electronvolts", "J"),
    ("Pa", "pascals", "N"),
    ("kPa", "kilopascals", "Pa"),
    ("mol", "moles", "g"),
    ("Hz", "hertz", "J"),
    ("GHz", "gigahertz", "MHz"),
    ("kWh", "kilowatt-hours", "kW"),
    ("atm", "atmospheres", "Pa"),
    ("L", "liters", "mL"),
    ("mW", "milliwatts", "MW"),
    ("mg", "milligrams", "Mg"),
    ("m/s", "meters per second", r"m/s^2"),
    (r"m/s^2", "meters per second squared", "m/s"),
    (r"kg m s^{-2}", "newtons", "kg m/s"),
    ("km/h", "kilometers per hour", "m/s"),
    ("mph", "miles per hour", "km/h"),
    ("cm^2", "square centimeters", "cm"),
    ("ft", "feet", "in"),
    ("lb", "pounds", "oz"),
    ("K", "kelvins", "J"),
    ("C", "coulombs", "V"),
)


def quantities(rng: random.Random) -> Pairs:
    number = rng.randint(2, 500)
    symbol, words, unit = rng.choice(_UNITS)
    gold = rf"{number}\text{{ {words}}}"
    yield same(rf"{number}\text{{ {symbol}}}", gold)
    yield same(rf"{number}\,\mathrm{{{symbol}}}", gold)
    yield same(str(number), gold)
    yield different(rf"{number}\text{{ {unit}}}", gold)
    yield different(rf"{number + 1}\text{{ {symbol}}}", gold)
    yield different(rf"{number}\text{{ {unit}}}", rf"{number}\text{{ {symbol}}}")
    letters = symbol.replace(r"\,", "")
    yield same(f"{number} {letters}", gold)
    feet, inches = rng.randint(4, 6), rng.randint(1, 11)
    height = rf"{feet}\text{{ feet }}{inches}\text{{ inches}}"
    yield same(f"{feet} ft {inches} in", height)
    yield different(f"{feet} ft {inches + 1} in", height)
    yield different(f"{feet + 1} ft {inches} in", height)
    yield same(rf"{number}^\circ\text{{C}}", rf"{number}\text{{ degrees Celsius}}")
    yield different(rf"{number}^\circ\text{{C}}", rf"{number}^\circ\text{{F}}")
    yield same(rf"\${number}", rf"{number}\text{{ dollars}}")
    yield different(f"€{number}", rf"\${number}")
    yield different(r"\pi^\circ", r"\pi")


def times(rng: random.Random) -> Pairs:
    hour, minute = rng.randint(1, 11), rng.randint(0, 59)
    gold = f"{hour}:{minute:02} PM"
    yield same(rf"{hour}:{minute:02}\text{{ p.m.}}", gold)
    yield same(f"{hour}:{minute:02}pm", gold)
    yield same(f"{hour + 12}:{minute:02}", gold)
    yield same(f"{hour}:{minute:02}", gold)
    yield different(f"{hour}:{minute:02} AM", gold)
    yield different(f"{hour % 11 + 1}:{minute:02} PM", gold)
    yield different(f"{hour}:{(minute + 7) % 60:02} PM", gold)
    yield different(f"{hour + 12}:{minute:02} PM", gold)
    yield different(f"-{hour}:{minute:02} PM", gold)


def texts(rng: random.Random) -> Pairs:
    word = rng.choice(("even", "Tuesday", "parabola", "increasing", "Yes", "isosceles"))
    yield same(rf"\text{{{word.upper()}}}", rf"\text{{{word.lower()}}}")
    yield same(word.lower(), rf"\text{{{word}}}")
    yield different(rf"\text{{{word}}}(\text{{odd}})", rf"\text{{{word}}}")
    yield different(rf"\text{{{word}}}(2)", rf"\text{{{word}}}")
    yield different(rf"7\text{{{word}}} x", rf"\text{{{word}}} x")
    letter = rng.choice("BCDFGHKLMQRST")
    gold = rf"\text{{{letter}{letter.lower()}}}"
    yield different(rf"\text{{{letter}{letter}}}", gold)
    yield different(rf"\text{{{letter.lower() * 2}}}", gold)
    yield same(f"{gold}", gold)


def approximations(rng: random.Random) -> Pairs:
    below = rng.choice((3, 7, 9, 11, 13))
    number = Fraction(rng.randint(1, below - 1), below)
    places = rng.randint(2, 4)
    rounded = f"{round(number * 10**places) / 10**places:.{places}f}"
    yield same(rf"{fraction(number)}\approx {rounded}", fraction(number))
    yield same(rf"x={fraction(number)}\approx {rounded}", fraction(number))
    yield different(rounded, fraction(number))
    whole = rng.randint(3, 90)
    yield different(rf"{whole}\approx {whole}.04", str(whole))
    yield different(rf"{whole}\approx {whole}.04", f"{whole}.04")
    yield different(rf"{whole}={whole + 1}", str(whole))
    yield different(rf"{whole}\text{{ less}}", str(whole))


KINDS: dict[str, Callable[[random.Random], Pairs]] = {
    "absolute values": absolute_values,
    "approximations": approximations,
    "bases": bases,
    "combinations": combinations,
    "complex numbers": complex_numbers,
    "congruences": congruences,
    "curves": curves,
    "domains": domains,
    "exceptions": exceptions,
    "families of solutions": families,
    "inequalities": inequalities,
    "intervals": intervals,
    "large numbers": large_numbers,
    "lists": lists,
    "matrices": matrices,
    "operators": operators,
    "percentages": percentages,
    "piecewise": piecewise,
    "polynomials": polynomials,
    "powers": powers,
    "propositions": propositions,
    "quantities": quantities,
    "rationals": rationals,
    "roots and logarithms": roots_and_logarithms,
    "rounding": rounding,
    "sets of letters": sets_of_letters,
    "solutions": solutions,
    "sums and integrals": sums,
    "texts": texts,
    "times of day": times,
    "values of functions": values_of_functions,
}
