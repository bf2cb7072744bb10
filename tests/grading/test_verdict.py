"""Verdicts: a table each way, published and adversarial cases, golds of MATH, and what must hold for any text."""

import functools
import json
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.grading.extract import TEMPLATES, extract_answer
from jzero.grading.verdict import grade
from jzero.tasks import math_problems

EQUAL = [  # prediction, gold
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
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "((((9^9)^9)^9)^9)^9",
    "(10^{9})!",
    "1000000!!",
    "10^{10^{10}}",
    "1e400000000",
    "0.1^{1000000000}",
    r"\sqrt{10^{10^{10}}+1}",
    "e^{e^{e^{e^{e}}}}",
    r"\binom{10^9}{5\cdot10^8}",
    "(x+y+z)^{1000000}",
    "(" * 5000 + "1" + ")" * 5000,
    "{" * 300 + "1" + "}" * 300,
    "-" * 1000 + "1",
    "+".join(["1"] * 500),
    "*".join(["x"] * 500),
    "^".join(["2"] * 400),
    "/".join(["x"] * 400),
    r"\sqrt" * 200 + "2",
    r"\frac{1}{" * 60 + "x" + "}" * 60,
    ",".join(["1"] * 590),
    "9" * 1199,
    "0." + "3" * 1190,
    "|" * 600,
    "+".join(f"1/{base}^{{{9000 // base}}}" for base in range(3, 90)),
    "+".join(f"1/{base}^{{{40000 // base}}}" for base in range(3, 90)),
    "x+" + "*".join(f"{base}^{{9999}}" for base in range(3, 90)),
    "*".join("(1-x^{900})" for _ in range(60)),
    "^{99}".join("x" for _ in range(6)),
    r"\sqrt[99]{" * 25 + "x" + "}" * 25,
    r"\log_{" * 20 + "x" + "}{x}" * 20,
    r"\sin(" * 25 + "10^{3000}" + ")" * 25,
    r"\binom{2999}{1500}" * 40 + "+x",
    ",".join(rf"{k}\pm\sqrt{{{k}}}" for k in range(60)),
    ",".join(rf"\sqrt{{{k}}}" for k in range(60)),
    "9^{90000.599}+2^{100000}",
    "(99999x)^{1000000}",
    "(2^{90000}x)^{1000000}",
    "(1+i)^{10^{9}}",
    "((x+2)^{99999}+1)^{99999}",
    functools.reduce(lambda inside, _: rf"\{{{inside},2{inside}\}}", range(5), "1"),
    "x" + "!°" * 149,
    "x" + "/x*x" * 70,
    "__import__('os')._exit(0)",
    "().__class__.__base__.__subclasses__()",
]


def score(answer, gold, **settings):
    found = grade(answer, gold, template="answer", **settings)
    assert found.score == float(found.correct) and found.correct == (found.reason == "correct")
    return found.score


@pytest.mark.parametrize("answer, gold", EQUAL)
def test_equal(answer, gold):
    assert score(answer, gold) == 1
    assert score(gold, gold) == 1 and score(answer, answer) == 1


@pytest.mark.parametrize("answer, gold", UNEQUAL)
def test_unequal(answer, gold):
    assert score(answer, gold) == 0


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:20])
def test_hostile_answers_are_cheap_and_wrong(answer):
    for gold in (
        "5",
        r"\frac37",
        r"\sqrt2",
        "x+1",
        r"\{1\}",
        "2^{50000}-1",
        "x^{50000}+1",
        "(x+y+z)^{1000000}+1",
    ):
        start = time.process_time()
        assert score(answer, gold) == 0
        assert (
            time.process_time() - start < 1.5
        )  # the first formula beyond the limits imports sympy


@pytest.mark.parametrize(
    "template, response, answer",
    [
        ("boxed", r"first \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{1} then \boxed{2", None),
        ("boxed", r"\boxed{1} then \boxed{}", None),
        ("boxed", r"<think> \boxed{1} </think> the answer is 1", None),
        ("boxed", "boxed{1}", None),
        ("boxed", r"\boxed 5.", "5"),
        ("boxed", r"\boxed{" + "1" * 2000 + "}", None),
        ("think_boxed", r"\boxed{1}", None),
        ("think_boxed", r"<think> \boxed{2} </think> \boxed{1}", "1"),
        ("r1", "<think> a </think> <answer> 5 </answer>", "5"),
        ("r1", "a </think>\n<answer>\\boxed{5}</answer><|im_end|>\n", "5"),
        ("r1", "a </think> <answer> 5 </answer> or 6", None),
        ("r1", "a </think> <answer> 5 </answer> <answer> 6 </answer>", None),
        ("r1", "<answer> 5 </answer>", None),
        ("r1", "<think> <answer> 5 </answer> </think> done", None),
        ("gsm8k", "#### 1\n#### 2", "2"),
        ("gsm8k", "so 5\n#### 5 red apples.\nDone", r"5\text{ red apples}"),
        ("gsm8k", "the answer is 5", None),
        ("number", "we get 1,234.5 apples", "1,234.5"),
        ("number", "none", None),
        ("answer", "  5 ", "5"),
    ],
)
def test_extract(template, response, answer):
    assert extract_answer(response, template) == answer


def test_gsm8k_takes_one_number():
    for line in ("18", "$18", r"\$18.00", "18 eggs", "18.", "18%", "1.8e1", r"\boxed{18}"):
        assert grade(f"so\n#### {line}", "18", template="gsm8k").correct, line
    for line in ("18 or 19", "18, 19", "18/19", "9*2", "18-19", "1_8", "١٨", "", "180", "not 18"):
        assert not grade(f"so\n#### {line}", "18", template="gsm8k").correct, line


def test_reasons():
    reasons = {
        r"\boxed{5}": "correct",
        r"\boxed{6}": "wrong value",
        "5": "no answer",
        r"\boxed{\sum k}": "unparsed",
    }
    for response, reason in reasons.items():
        assert grade(response, "5", template="boxed").reason == reason
    assert grade(r"\boxed{5}", None, template="boxed").reason == "no gold"
    assert grade(r"\boxed{2}", ["1", "2"], template="boxed").correct
    assert grade(r"\boxed{142}", 142.0, template="boxed").correct
    with pytest.raises(ValueError, match="template='none' is not one of"):
        extract_answer("5", "none")


def test_the_question_is_no_answer():
    question = r"Factor $x^2-1$ over the integers."
    assert score("x^2-1", "(x-1)(x+1)") == 1
    for same in ("x^2-1", "x^{2} - 1"):
        assert grade(same, "(x-1)(x+1)", template="answer", question=question).reason == "echo"
    assert score("(x+1)(x-1)", "(x-1)(x+1)", question=question) == 1
    assert score("x^{2} - 1", "x^2-1", question=question) == 1


def test_a_problem_carries_its_question():
    class Task:
        template, verifier = "boxed", "fast"

    gold = {"answer": "(x-1)(x+1)", "question": "Factor $x^2-1$."}
    assert math_problems.grade(r"\boxed{x^2-1}", gold, Task).reason == "echo"
    assert math_problems.grade(r"\boxed{(x+1)(x-1)}", gold, Task).correct


def test_math_verify_only_notes_that_it_disagrees():
    pytest.importorskip("math_verify")
    found = grade("2r+R", "2R+r", template="answer", verifier="math_verify")
    assert found.score == 0 and found.reason == "wrong value; math-verify disagrees"
    assert score(r"6\cdot7", "42", verifier="math_verify", question=r"What is $6\cdot 7$?") == 0
    assert grade(r"\frac12", "0.5", template="answer", verifier="math_verify").reason == "correct"


# Shared sets


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def verdicts(path, tier):
    """(row, its grade, CPU seconds) of a tier."""
    for row in rows(path):
        if row["tier"] == tier and row["task"] != "countdown":
            text = (
                row["prediction"]
                if "prediction" in row
                else "".join(a * b for a, b in row["prediction_rle"])
            )
            template = row.get("template") or {"math": "boxed", "gsm8k": "gsm8k"}[row["task"]]
            template = "answer" if row.get("mode") == "answer" else template
            start = time.process_time()
            yield row, grade(text, row["gold"], template=template), time.process_time() - start


@pytest.mark.parametrize(
    "name, tier, least", [("public", "core", 0.99), ("hard", "must", 1.0), ("hard", "hostile", 1.0)]
)
def test_shared_cases(shared, name, tier, least):
    found = list(verdicts(shared / f"data/grader/{name}_cases.jsonl", tier))
    wrong = [row["id"] for row, grade, _ in found if grade.score != row["expected"]]
    assert len(wrong) <= (1 - least) * len(found), wrong
    assert max(seconds for *_, seconds in found) < 1


def golds(shared):
    found = []
    for name in ("math/math12k_train", "math/math500", "eval/olympiadbench"):
        for row in rows(shared / f"data/{name}.jsonl"):
            answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            found += [answer for answer in answers if answer]
    return found


def test_golds_equal_themselves_and_no_other(shared):
    all_golds = golds(shared)
    wrong = [
        gold
        for gold in all_golds
        if not grade(rf"so $\boxed{{{gold}}}$.", gold, template="boxed").correct
    ]
    assert len(wrong) <= len(all_golds) // 1000, wrong
    different = sorted({gold for gold in all_golds if not gold.lstrip("-").isdigit()})
    rng = random.Random(0)
    pairs = [rng.sample(different, 2) for _ in range(5000)]
    same = [(a, b) for a, b in pairs if score(a, b)]
    assert len(same) <= 10, same  # other spellings, as 1.25 and 1\frac14


# Any text

PIECES = r"""\frac \sqrt \left( \right) \{ \} \text{ \boxed{ \pi \infty \pm \cup \in \le \approx \sin \log_ \binom
\lfloor \rfloor \begin{pmatrix} \end{pmatrix} \\ & \% ^\circ \$ \overline{ \mathbb{R}
or and cm é ² ٣ 9^9 10 0.5 { } ( ) [ ]
^ _ + - * / ! | = < > , . ; : ' 1 2 3 e x y i $ <answer> </answer> </think> ####"""
TEXT = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from([*PIECES.split(), " ", "\n"]), max_size=40).map("".join),
)
RATIONAL = st.fractions(min_value=-3000, max_value=3000, max_denominator=400)


@settings(max_examples=1500, deadline=None)
@given(TEXT, TEXT, st.sampled_from(sorted(TEMPLATES)))
def test_any_text_has_a_verdict_and_always_the_same(text, gold, template):
    assert grade(text, gold, template=template) == grade(text, gold, template=template)
    if extract_answer(text, "answer"):
        assert grade(text, extract_answer(text, "answer"), template="answer").reason in (
            "correct",
            "unparsed",
            "wrong value",
        )


def spellings(value):
    n, d = value.numerator, value.denominator
    sign, size = "-" if n < 0 else "", abs(n)
    yield f"{n}/{d}"
    yield rf"\frac{{{n}}}{{{d}}}"
    yield rf"{sign}\dfrac{{{3 * size}}}{{{3 * d}}}"
    if d == 1:
        yield from (f"{n}", f"{n:,}", f"{n}.00", f"x = {n}", rf"{n}\text{{ cm}}", f"{sign}0{size}")
    elif size > d:
        yield rf"{sign}{size // d}\frac{{{size % d}}}{{{d}}}"
    if not 10**9 % d:
        yield f"{n * (10**9 // d) / 10**9:.9f}" if size * 10**9 < 2**52 * d else f"{n}/{d}"


@settings(max_examples=120, deadline=None)
@given(RATIONAL, RATIONAL)
def test_rationals_are_what_they_are(a, b):
    near = a + Fraction(1, 10**9)
    for text in spellings(a):
        assert all(score(text, gold) == 1 for gold in spellings(a))
        assert all(score(text, gold) == (a == b) for gold in spellings(b))
        assert score(text, f"{near.numerator}/{near.denominator}") == 0
