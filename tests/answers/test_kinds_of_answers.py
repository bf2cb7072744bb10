r"""Kinds of answers that a grader easily credits or refuses by mistake: a table of pairs for each.

Every table holds pairs that are the same answer and pairs that are not, (prediction, gold), so that
a rule that is too wide fails as surely as one that is too narrow.
"""

import pytest

from jzero.answers.evaluation import value
from jzero.answers.latex_parser import Reading, parse
from jzero.answers.sampling import POINTS
from jzero.answers.verdict import grade

SAME = {
    "applications of functions": [
        ("f(y)+f(x)", "f(x)+f(y)"),
        ("f(y+x)", "f(x+y)"),
        ("f(x)+f(x)", "2f(x)"),
        ("f(2x+2)", "f(2(x+1))"),
        (r"\frac{f(x)+f(-x)}{2}", r"\frac12f(x)+\frac12f(-x)"),
        ("f(x)^2-1", "(f(x)-1)(f(x)+1)"),
        ("P(B)+P(A)-P(AB)", "P(A)+P(B)-P(AB)"),
        ("f(g(x+0))", "f(g(x))"),
        (r"P(B)P(A\mid B)", "P(A|B)P(B)"),
        ("f_1(x)+f_2(x)", "f_2(x)+f_1(x)"),
        (r"\gcd(m,n)+1", r"1+\gcd(m,n)"),
        (r"\text{Var}(X)+\text{Var}(Y)", r"\operatorname{Var}(Y)+\operatorname{Var}(X)"),
        (r"1+2\text{Cov}(X,Y)", r"2\operatorname{Cov}(X,Y)+1"),
        (r"P(B)+P(A)-P(A\cap B)", r"P(A)+P(B)-P(A\cap B)"),
        ("f(x)=x+1", "f(x)=1+x"),
        ("x+1", "f(x)=x+1"),
        ("f(2)=3", "3"),
    ],
    "products with brackets": [
        ("x(x+1)", "x^2+x"),
        ("ab+ac", "a(b+c)"),
        (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
        (r"\frac{h(a+b)}{2}", r"\frac12(a+b)h"),
        ("P(1+r)(1+r)", "P(1+r)^2"),
        ("-a(1-b)", "a(b-1)"),
        (r"2\pi r(h+r)", r"2\pi r^2+2\pi rh"),
        ("k(2m+2)", "2k(m+1)"),
        ("f(x+1)", "fx+f"),
    ],
    "absolute values": [
        ("|x-12|", "|12-x|"),
        ("|-x-10|", "|x+10|"),
        (r"\sqrt{(x-20)^2}", "|x-20|"),
        ("y=|12-x|", "y=|x-12|"),
        ("|x^2+1|", "x^2+1"),
        (r"\sqrt{x^6+2x^3+1}", "|x^3+1|"),
    ],
    "whole numbers": [
        (r"\lceil n/2\rceil", r"\lfloor (n+1)/2\rfloor"),
        (r"\lfloor\frac{2n}{3}\rfloor+1", r"\lceil\frac{2n+1}{3}\rceil"),
        (r"\lfloor n/2\rfloor+\lceil n/2\rceil", "n"),
        (r"\lfloor n^2/4\rfloor", r"\lfloor n/2\rfloor\lceil n/2\rceil"),
        (r"\lfloor\log_2 n\rfloor+1", r"\lceil\log_2(n+1)\rceil"),
        (r"mn-\lfloor m/2\rfloor", r"mn-m+\lceil m/2\rceil"),
        (r"\lceil x\rceil", r"-\lfloor -x\rfloor"),
        (r"\lfloor x+1\rfloor", r"\lfloor x\rfloor+1"),
        ("(-1)^n", "(-1)^{-n}"),
        ("(-1)^{n+1}", "(-1)^{n-1}"),
        (r"\cos(n\pi)", "(-1)^n"),
        (r"\frac{1+(-1)^n}{2}", r"\frac{1+(-1)^{3n}}{2}"),
        ("(-1)^nx", "x(-1)^{-n}"),
    ],
    "words after a number": [
        ("5 million", "5,000,000"),
        ("5000000", "5 million"),
        (r"1.5\text{ million}", "1500000"),
        (r"\$3\text{ billion}", "3000000000"),
        ("2 hundred thousand", "200000"),
        (r"2\frac12\text{ million}", "2500000"),
        ("3 squared", "9"),
        ("2 thirds", r"\frac23"),
        ("7 hundredths", "0.07"),
        ("3 dozen", "36"),
        ("5 million dollars", r"\$5000000"),
        (r"12\text{ feet squared}", r"12\text{ ft}^2"),
        (r"12\text{ square units}", "12"),
        ("5 people", "5"),
        ("12 cookies", "12"),
        ("60 km/h", "60"),
        (r"18\text{ eggs}", "18"),
        (r"12\text{ miles per hour}", "12"),
        (r"40\text{ kilometers}", "40"),
    ],
    "ratios and times": [
        ("6:4:2", "3:2:1"),
        ("3:8", "9:24"),
        ("2:1", "4:2"),
        ("4:30", r"4\!:\!30\text{ p.m.}"),
        ("05:00", r"5\!:\!00"),
        ("x:2y", "2x:4y"),
        ("1:2", r"\frac12"),
    ],
    "repeated members": [
        ("1,2,1", "1,1,2"),
        (r"\{1,1,2\}", r"\{1,2\}"),
        ("1,1,2", r"\{1,2\}"),
        ("5,5", "5"),
        ("(1,2),(3,4),(1,2)", "(3,4),(1,2)"),  # a gold without repetitions is a set of solutions
    ],
    "percentages": [
        (r"50\%", "0.5"),
        (r"0.5\%", "0.005"),
        (r"35\%", "35"),
        ("35", r"35\%"),
        (r"100\%", "1"),
        (r"0.5\%", r"0.5\%"),
        (r"12.5\%", r"\frac18"),
        ("0.56 = 56\\%", "0.56"),
    ],
    "scientific notation": [
        ("1e-3", "0.001"),
        ("2.5e-3", "0.0025"),
        ("2E-3", "0.002"),
        ("4e-5", "0.00004"),
        ("2e-3", "-3+2e"),
    ],
    "factors side by side": [
        ("n^2 2^n", r"n^2\cdot2^n"),
        ("5n^2 2^n", r"5\cdot 2^n n^2"),
        ("2^{3} 3^{2} 5", r"2^3\cdot3^2\cdot5"),
        ("2^3 3^2", r"3^2\cdot2^3"),
        ("x_1 2^n", r"2^n\cdot x_1"),
    ],
    "chains of equations": [
        (r"\frac34 = 0.75", r"\frac34"),
        (r"0.75=\frac{3}{4}=75\%", "0.75"),
        (r"x=\frac{6}{8}=0.75", "0.75"),
        (r"6\cdot7=42", "42"),
        (r"2\sqrt{2}=\sqrt8", r"\sqrt{8}"),
    ],
    "unions of intervals": [
        (r"(0,2)\cup(1,3)", "(0,3)"),
        ("(0,3)", r"(0,2)\cup(1,3)"),
        (r"[1,2]\cup[2,3]", "[1,3]"),
        (r"(0,1]\cup(1,2)", "(0,2)"),
        (r"(0,1)\cup\{1\}", "(0,1]"),
        (r"(-\infty,2)\cup(1,\infty)", r"\mathbb{R}"),
        (r"(3,4)\cup(0,1)\cup(\frac12,2)", r"(0,2)\cup(3,4)"),
    ],
    "characters": [
        ("x²", "x^2"),
        ("x²y³", "x^2y^3"),
        ("10⁻³", "0.001"),
        ("2ⁿ⁺¹", "2^{n+1}"),
        ("x₁+x₂", "x_1+x_2"),
        ("½", r"\frac12"),
        ("2½", r"\frac52"),
        ("-¾", "-0.75"),
        ("⅔x", r"\frac{2x}{3}"),
        ("1⁄2", "0.5"),
        ("€5", "5"),
        ("5€", "€5"),
        ("£12.50", "12.5"),
        ("5 euros", "€5"),
        ("2√3", r"2\sqrt{3}"),
        ("α+β", r"\beta+\alpha"),
        ("（1，2）", "(1,2)"),
    ],
    "sets by a condition": [
        (r"\{x\mid x>2\}", r"(2,\infty)"),
        (r"\{x : x>2\}", "x>2"),
        (r"\left\{x\,\middle|\,x>2\right\}", r"(2,\infty)"),
        (r"\{x | x>2\}", r"(2,\infty)"),
        (r"\{x\in\mathbb{R}\mid 0\le x<1\}", "[0,1)"),
        (r"\{x\mid x\ne 2\}", r"x\neq2"),
        (r"\{x\mid x\in\mathbb{R}, x\ne 2\}", r"x\neq2"),
        (r"\{x \mid |x|<2\}", "|x|<2"),
        (r"\{t\mid t\le -1\}", r"(-\infty,-1]"),
    ],
}
DIFFERENT = {
    "applications of functions": [
        ("f(x)+f(y)", "f(x+y)"),
        ("2f(x)", "f(2x)"),
        ("-f(x)", "f(-x)"),
        ("P(A)+P(B)", "P(A+B)"),
        ("P(A)P(B)", "P(AB)"),
        ("f(y,x)", "f(x,y)"),
        ("f(g(x))", "f(x)g(x)"),
        (r"\frac{x}{f}", "f^{-1}(x)"),
        (r"\frac{1}{f(x)}", "f^{-1}(x)"),
        ("f(x)^2", "f(x^2)"),
        ("fx+fy", "f(x+y)"),
        ("f(4)", "2f(2)"),
        (r"\phi(m)\phi(n)", r"\phi(mn)"),
        (r"2\text{Var}(X)", r"\text{Var}(2X)"),
        (r"\gcd(m,n)", r"\gcd(m,k)"),
        ("T(n-1)+T(1)", "T(n)"),
        ("f_1(x)", "f_2(x)"),
        (r"3\text{Var}(X)", r"(1+2)X\text{Var}(1)"),
        (r"P(A\cup B)", r"P(A\cap B)"),
    ],
    "products with brackets": [
        ("x(x+1)", "x^2+1"),
        ("a(b+c)", "ab+c"),
        ("P(1+r)^2", "P(1+r^2)"),
    ],
    "absolute values": [
        ("12-x", "|12-x|"),
        ("x+10", "|x+10|"),
        ("|x+10|", "x+10"),
        ("x-1000", "|x-1000|"),
        ("x-10^9", "|x-10^9|"),
        ("x-10^{15}", "|x-10^{15}|"),
        (r"x-20", r"\sqrt{(x-20)^2}"),
        ("(x-10)(x-20)", "|(x-10)(x-20)|"),
        ("y=12-x", "y=|12-x|"),
        ("|x+y|+50", "|x+y+50|"),
    ],
    "whole numbers": [
        (r"\lceil n/2\rceil-1", r"\lfloor n/2\rfloor"),
        (r"\lceil n^2/4\rceil-1", r"\lfloor n^2/4\rfloor"),
        (r"\lceil n/7\rceil-1", r"\lfloor n/7\rfloor"),
        (r"\lceil x\rceil-1", r"\lfloor x\rfloor"),
        (r"\lfloor x\rfloor", "x"),
        (r"\lfloor x+1/2\rfloor", r"\lceil x-1/2\rceil"),
        (r"\lceil x/2\rceil", r"\lfloor (x+1)/2\rfloor"),
        (r"\frac{n-1}{2}", r"\lfloor n/2\rfloor"),
        (r"\lfloor n/2\rfloor", r"\lfloor n/3\rfloor"),
        (r"\lfloor n^{9000}\rfloor", r"\lfloor n^{8000}\rfloor"),
        (r"\lceil (m+n)/2\rceil", r"\lfloor (m+n)/2\rfloor"),
        ("(-1)^n", "(-1)^{n+1}"),
        ("(-1)^{2n}", "(-1)^n"),
        ("(-1)^{n(n+1)/2}", "(-1)^n"),
    ],
    "words after a number": [
        ("3 squared", "3"),
        ("2 thirds", "2"),
        ("7 hundredths", "7"),
        ("5 million", "5"),
        ("5 million", "5000"),
        ("4 cubed", "4"),
        ("3 dozen", "3"),
        ("3 halves", "3"),
        (r"5\text{ thousand}", "5"),
        ("5 factorial", "5"),
        ("5 minus", "5"),
        ("5 trillion dollars", r"\$5"),
        (r"5\text{ blorks}", "5"),
        ("7 negative", "7"),
        (r"12\text{ square}", "12"),
        (r"12\text{ feet squared}", r"12\text{ ft}"),
    ],
    "ratios and times": [
        ("2:15", "4:30"),
        ("4:30", "2:15"),
        ("1:2", "4:08"),
        ("3:00", "1:00"),
        ("6:4:2", "3:2:2"),
        ("6:4", "3:2:1"),
        (r"2:15\text{ p.m.}", r"4:30\text{ p.m.}"),
        (r"4:30\text{ a.m.}", r"4:30\text{ p.m.}"),
    ],
    "repeated members": [
        ("1,2", "1,1,2"),
        ("1,1,2", "1,2,2"),
        ("1,1,2,2", "1,1,2"),
        ("(1,2)", "(1,1,2)"),
        ("1", "1,1"),
        (r"\{1,2\}", r"\{1,2,3\}"),
    ],
    "percentages": [
        (r"0.5\%", "0.5"),
        (r"\frac12\%", r"\frac12"),
        (r"0.25\%", r"\frac14"),
        (r"5\%", "0.5"),
        (r"50\%", r"0.5\%"),
    ],
    "scientific notation": [
        ("1e-3", "0.01"),
        ("1e-3", "e-3"),
        ("2e-3", "-0.003+2"),
        ("0.002", "2e-3"),
    ],
    "factors side by side": [
        ("n^2 2^n", "n^{22^n}"),
        ("4 2", "8"),
        ("3^2 5", "45"),
        ("1/2 2^3", "4"),
    ],
    "chains of equations": [
        (r"\frac34 = 0.76", r"\frac34"),
        (r"0.75=75", "0.75"),
        ("6=42", "42"),
        ("x+1=x+2", "x+1"),
        (r"2=4\%", "2"),
    ],
    "unions of intervals": [
        (r"(0,1)\cup(1,2)", "(0,2)"),
        (r"(0,2)\cup(1,3)", "(0,3]"),
        (r"(0,2)\cup(1,3)", "(0,4)"),
        (r"(0,2)\cup(3,4)", "(0,4)"),
        (r"(0,1)\cup\{2\}", "(0,2]"),
    ],
    "characters": [
        ("x²", "2x"),
        ("½", "1"),
        ("€5", r"\$5"),
        ("x³", "x^2"),
        ("2½", "1"),
        ("4²", "42"),
    ],
    "sets by a condition": [
        (r"\{x\mid x>2\}", r"[2,\infty)"),
        (r"\{x\mid x>2\}", r"(-\infty,2)"),
        (r"\{x\in\mathbb{Z}\mid x>2\}", r"(2,\infty)"),
        (r"\{x\mid y>2\}", r"(2,\infty)"),
    ],
}


def _rows(table: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str, str]]:
    rows = []
    for kind, pairs in table.items():
        rows += [(kind, answer, gold) for answer, gold in pairs]
    return rows


def _is_correct(answer: str, gold: str, question: str = "") -> bool:
    return grade(answer, gold, template="answer", question=question).correct


@pytest.mark.parametrize("kind, answer, gold", _rows(SAME))
def test_the_same_answer_is_credited(kind, answer, gold) -> None:
    assert _is_correct(answer, gold)
    assert _is_correct(gold, gold)
    assert _is_correct(answer, answer)


@pytest.mark.parametrize("kind, answer, gold", _rows(DIFFERENT))
def test_another_answer_is_not_credited(kind, answer, gold) -> None:
    assert not _is_correct(answer, gold)


@pytest.mark.parametrize(
    "answer, gold, question",
    [
        ("3 dozen", "3", "How many dozen eggs does she need?"),
        ("5 quarters", "5", "How many quarters are left?"),
        ("5 blorks", "5", "A tree has 5 blorks. How many blorks are on it?"),
        ("5 blorks", "5 blorks", ""),
    ],
)
def test_the_question_and_the_gold_say_what_is_counted(answer, gold, question) -> None:
    assert _is_correct(answer, gold, question)


@pytest.mark.parametrize(
    "answer, gold, question",
    [
        ("3 dozen", "3", "A dozen eggs cost $4. How many eggs does she need?"),
        ("3 squared", "3", "What is 3 squared, less 6?"),
        ("5 or maybe", "5", "Is it 5 or maybe 6?"),
    ],
)
def test_a_word_of_the_question_is_no_unit_if_it_changes_the_number(answer, gold, question) -> None:
    assert not _is_correct(answer, gold, question)


def test_samples_do_not_depend_on_what_was_graded_before() -> None:
    answer, gold = r"\lceil n/2\rceil+f(|x|)", r"f(|-x|)+\lfloor (n+1)/2\rfloor"

    def values() -> list[object]:
        return [value(parse(gold, Reading(frozenset("f"))), point) for point in range(len(POINTS))]

    first = values()
    value.cache_clear()
    _is_correct("|x|+n", "n+f(x)")
    assert values() == first
    assert any(number is not None for number in first)
    assert _is_correct(answer, gold)
