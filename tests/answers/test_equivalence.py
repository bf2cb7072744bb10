"""Which answers are the same: a table of pairs each way, and rationals in every spelling."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.answers.verdict import grade

# (prediction, gold)
EQUAL = [
    ("42", "42"),
    ("042", "42"),
    ("42.0", "42"),
    ("+42", "42"),
    ("$42$ .", "42"),
    ("$x+1.$", "x+1"),
    (r"42\,", "42"),
    (r"42\\", "42"),
    (r"\text{42}", "42"),
    (r"\mathbf{42}.", "42"),
    ("12,345", "12345"),
    (r"12{,}345", "12345"),
    (r"12,\!345", "12345"),
    ("12 345", "12345"),
    ("4.2e1", "42"),
    (r"4.2\times10^{1}", "42"),
    ("2^{10}", "1024"),
    ("7/3", r"\frac{7}{3}"),
    (r"\frac73", r"\dfrac{7}{3}"),
    (r"\frac{14}{6}", r"\frac73"),
    (r"-\frac{7}{3}", r"\frac{-7}{3}"),
    (r"2\frac13", r"\frac73"),
    ("-2 1/3", r"-\frac73"),
    ("0.35", r"\frac{7}{20}"),
    (r"2.\overline{3}", r"\frac73"),
    ("2.333333", r"\frac73"),
    ("2.66666", r"\frac83"),
    ("2.66667", r"\frac83"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"35\%", r"35"),
    ("35 percent", r"35\%"),
    ("0.35", r"35\%"),
    (r"12\text{ cm}", "12"),
    (r"12\mathrm{~cm}", r"12\text{ centimeters}"),
    ("12 square feet", r"12\text{ ft}^2"),
    (r"\$12.50", "12.5"),
    (r"60^\circ", "60"),
    ("60°", r"60^{\circ}"),
    (r"3\sqrt{8}", r"6\sqrt2"),
    (r"\frac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\sin 75^\circ", r"\frac{\sqrt6+\sqrt2}{4}"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\frac{3\pi}{2}", r"1.5\pi"),
    (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"),
    ("2.23606798", r"\sqrt5"),
    ("2^{50000}-1", "-1+2^{50000}"),
    ("(x-1)(x+1)", "x^2-1"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"(a+b)^3", "a^3+3a^2b+3ab^2+b^3"),
    (r"\cos 2x", r"1-2\sin^2 x"),
    (r"\frac{n!}{2!(n-2)!}", r"\binom{n}{2}"),
    (r"\frac{52!}{5!\cdot47!}", r"\binom{52}{5}"),
    ("x_1x_2", r"x_{2} \cdot x_{1}"),
    ("|x|", r"\sqrt{x^2}"),
    ("(n-2)2^n", "n 2^n-2^{n+1}"),
    ("( 1 , -2 )", "(1,-2)"),
    ("(0.5, 2)", r"\left(\frac12, 2\right)"),
    (r"\{3,1,2\}", r"\{1,2,3\}"),
    ("3, 1, 2", "1,2,3"),
    (r"1 \text{ and } 2", "2,1"),
    (r"x=\pm 2", "2,-2"),
    ("x = 1 or x = 2", "1,2"),
    (r"{n \choose 2}", "n(n-1)/2"),
    (r"20^\circ\text{C}", "20"),
    (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("**42**", "42"),
    (r"\text{all real numbers}", r"\mathbb{R}"),
    (r"1\pm\sqrt2", r"1-\sqrt2, 1+\sqrt2"),
    (r"(-\infty, 2] \cup (3, 4)", r"(3,4)\cup(-\infty,2]"),
    (r"x \in [0,1)", "[0,1)"),
    ("0 \\le x < 1", "[0,1)"),
    ("x > 2", r"(2,\infty)"),
    ("2 < x", "x > 2"),
    ("x < -1 or x \\ge 1", r"(-\infty,-1)\cup[1,\infty)"),
    ("-2x < -4", "x > 2"),
    ("2x+4y=6", "x+2y-3=0"),
    ("y=2x+1", "2x+1"),
    ("x=3", "3"),
    ("3", "n=3"),
    ("b", "a=b"),
    (
        r"\begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix}",
    ),
    ("3:4", "6:8"),
    ("121_3", "121_{3}"),
    (r"\text{Tuesday}", "tuesday"),
    ("an ellipse", r"\text{ellipse}"),
    (r"\textbf{(B)}", "B"),
    (r"\emptyset", r"\{\}"),
    (r"x = \frac13 \approx 0.333", r"\frac13"),
]
UNEQUAL = [
    ("41", "42"),
    ("4 2", "42"),
    ("42.0001", "42"),
    ("420", "42"),
    ("", "42"),
    ("six times seven", "42"),
    (r"6\cdot7", "42"),
    ("40+2", "42"),
    (r"\sqrt{1764}", "42"),
    (r"42\text{ or }43", "42"),
    ("42, 43", "42"),
    ("42=43", "42"),
    ("x=42=43", "43"),
    (r"42\pm1", "43"),
    (r"42 \text{ is wrong, } 41", "42"),
    (r"\text{42 maybe}", "42"),
    ("[0,100]", "42"),
    ("x", "42"),
    (r"42\cdot\frac{x}{x}", "42"),
    (r"\infty", "42"),
    (r"\frac{42}{0}", "42"),
    ("1,20", "120"),
    ("(1,200)", "1200"),
    ("9007199254740993", "9007199254740992"),
    ("2.33", r"\frac73"),
    ("2.333333", "2.333334"),
    ("2.333334", r"\frac73"),
    ("1000.00", r"\frac{399001}{399}"),
    ("109.875", r"\frac{109875001}{1000000}"),
    ("1.000001", "1"),
    ("0.999999", "1"),
    ("10^{-30}", "10^{-31}"),
    ("0", "10^{-30}"),
    (r"3\cdot\frac12", r"3\frac12"),
    (r"35\%", "3500"),
    ("35", "0.35"),
    (r"12\text{ cm}", r"12\text{ m}"),
    (r"12^\circ", r"12\text{ cm}"),
    ("121_3", "121_4"),
    (r"3\sqrt2", r"2\sqrt3"),
    (r"\sqrt[3]{2}", r"\sqrt2"),
    (r"\sqrt{10^{30}+1}", "10^{15}"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"\sin 1", r"\sin 1^\circ"),
    (r"\ln 2", r"\log_{10} 2"),
    ("x+1", "x+2"),
    ("x+a", "x+c"),
    ("X", "x"),
    ("2r+R", "2R+r"),
    (r"\sqrt{x^2}", "x"),
    ("(x+1)^{100000}", "(x+1)^{100000}+1"),
    ("2^{50000}", "2^{50000}+1"),
    ("2^{10000}+1", "2^{10000}"),
    ("x+2^{4000}", "2x+2^{4000}"),
    ("x^{5000}+1", "2x^{5000}+1"),
    ("100!", "100!+1"),
    ("(1,2)", "(2,1)"),
    ("1,2", "(1,2)"),
    ("1,2", "1,2,3"),
    ("1,2,3", "1,2"),
    ("[0,1)", "[0,1]"),
    ("(0,1)", "(0,2)"),
    (r"(0,1)\cup(2,3)", "(0,3)"),
    ("x \\ge 2", r"(2,\infty)"),
    ("x<2", "x>2"),
    ("-x<2", "x<-2"),
    ("x=2", "y=2"),
    ("x+y=2", "2"),
    ("2", "x+y=2"),
    ("x=1, x=2", "2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("3:4", "4:3"),
    ("1:00", "12:00"),
    (r"\text{Tuesday}", r"\text{Thursday}"),
    (r"\text{Tuesday or Thursday}", r"\text{Tuesday}"),
    ("ABCD", r"\text{DCBA}"),
    ("(A)", "(B)"),
    (r"\text{A or B}", "A"),
    ("f(a)", "f(c)"),
    (r"\max(42,43)", "43"),
    (r"42 \pmod{5}", "42"),
    ("nan", "nan!"),
    ("1_000", "1000"),
    ("٤٢", "42"),
    ("0x2A", "42"),
    (r"\frac7+2", r"\frac72"),
    (r"\frac-{7}{2}", r"-\frac72"),
    (r"\sqrt-{2}", r"\sqrt{-2}"),
    (r"42\text{ or}", "42"),
    (r"42\$", r"42\%"),
    (r"\text{set}", r"\emptyset"),
]


def is_correct(answer: str, gold: str) -> bool:
    return grade(answer, gold, template="answer").correct


@pytest.mark.parametrize("answer, gold", EQUAL)
def test_equal(answer, gold) -> None:
    assert is_correct(answer, gold)
    assert is_correct(gold, gold)
    assert is_correct(answer, answer)


@pytest.mark.parametrize("answer, gold", UNEQUAL)
def test_unequal(answer, gold) -> None:
    assert not is_correct(answer, gold)


def spellings(value: Fraction) -> Iterator[str]:
    """Yields ways to write a rational."""
    numerator, denominator = value.numerator, value.denominator
    sign, size = "-" if numerator < 0 else "", abs(numerator)
    yield f"{numerator}/{denominator}"
    yield rf"\frac{{{numerator}}}{{{denominator}}}"
    yield rf"{sign}\dfrac{{{3 * size}}}{{{3 * denominator}}}"
    if denominator == 1:
        yield f"{numerator}"
        yield f"{numerator:,}"
        yield f"{numerator}.00"
        yield f"x = {numerator}"
        yield rf"{numerator}\text{{ cm}}"
        yield f"{sign}0{size}"
    elif size > denominator:
        whole, rest = divmod(size, denominator)
        yield rf"{sign}{whole}\frac{{{rest}}}{{{denominator}}}"
    # Decimals that nine places hold, as long as a float holds them.
    if 10**9 % denominator == 0 and size * 10**9 < 2**52 * denominator:
        yield f"{numerator * (10**9 // denominator) / 10**9:.9f}"


RATIONALS = st.fractions(min_value=-3000, max_value=3000, max_denominator=400)


@settings(max_examples=60, deadline=None)
@given(RATIONALS, RATIONALS)
def test_rationals_are_equal_in_any_spelling_and_to_no_other(a, b) -> None:
    close = a + Fraction(1, 10**9)
    for text in spellings(a):
        assert all(is_correct(text, gold) for gold in spellings(a))
        assert all(is_correct(text, gold) == (a == b) for gold in spellings(b))
        assert not is_correct(text, f"{close.numerator}/{close.denominator}")
