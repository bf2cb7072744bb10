r"""Layout of answers: what TeX only arranges is dropped, and nothing else is."""

import time

import pytest

from jzero.answers.layout import MAX_DEPTH, simplified
from jzero.answers.verdict import grade


def credited(answer: str, gold: str) -> bool:
    return grade(answer, gold, template="answer").correct


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\displaystyle\frac12", r"\frac12"),
        (r"{\large 12}", "{12}"),
        (r"\hspace*{-1em}12", "12"),
        (r"\kern1em12", "12"),
        (r"\mskip 3mu plus 1mu 12", "12"),
        (r"\rule[1pt]{2em}{3ex}12", "12"),
        (r"\textcolor[rgb]{1,0,0}{12}", "{12}"),
        (r"\color{red}12", "12"),
        (r"\fcolorbox{red}{white}{12}", "{12}"),
        (r"\underline 12", "12"),
        (r"x^\mathbf{2}", "x^{2}"),
        (r"\phantom{0}12", "12"),
        (r"12\label{eq:1}\tag*{3}", "12"),
        (r"\begin{aligned}[t]x&=5\end{aligned}", "x=5"),
        (r"\begin{aligned}x&=1\\[4pt]&=2\end{aligned}", "x=1=2"),
        (r"\begin{aligned}x&=1\\y&=2\end{aligned}", "x=1,y=2"),
        (r"\begin{array}{c}12\end{array}", "{12}"),
        (r"\begin{array}{rl}x&=5\end{array}", "x=5"),
        (r"\begin{bmatrix}1&2\\[1ex]3&4\\\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\pmatrix{1&2\cr3&4}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (
            r"\left|\begin{array}{cc}1&2\\3&4\end{array}\right|",
            r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
        ),
        (
            r"\left\{\begin{array}{ll}1,&x>0\\2,&x\le0\end{array}\right.",
            r"\begin{cases}1,&x>0\\2,&x\le0\end{cases}",
        ),
        (r"{1\over2}", r"{\frac{1}{2}}"),
        (r"\left({n\choose k}\right)", r"({\binom{n}{k}})"),
        (r"\root 3\of{2}", r"\sqrt[3]{2}"),
        (r"\left.5\right.", "5"),
        (r"\left.\frac12\right|", r"\frac12|"),
        ("{}^2", "^2"),
        ("1{,}5", "1{,}5"),
        (r"1,\!000", "1,000"),
        (r"\text{5 cm$^{2}$}", r"\text{5cm}^{2}"),
        (r"{\rm cm}", r"\text{cm}"),
        (r"\textbf{(B) }7", r"\text{(B)}7"),
        (r"\underbrace{12}_{\text{answer}}", "{12}"),
        (r"5\not=7", r"5\ne7"),
        (r"\medskip\mathsurround 12", "12"),
        (r"\nobreakspace\allowbreak 12", "12"),
        (r"\mathnormal{x}\symbfit{y}", "{x}{y}"),
        (r"\abs{x}", "|x|"),
        ("“yes”".replace("“", '"').replace("”", '"'), "yes"),
    ],
)
def test_layout_is_dropped_by_its_arity(text, plain) -> None:
    assert "".join(simplified(text).split()) == plain.replace(" ", "")


@pytest.mark.parametrize(
    "answer",
    [
        r"\unknown 12",
        r"\unknown{12}",
        r"\cancel{12}",
        r"\phantom{12}",
        r"\overset{!}{12}",
        r"\begin{unknown}12\end{unknown}",
        r"12\Rightarrow",
        r"\mathchoice{12}{1}{1}{1}",
        r"\begin{array}{c}12\\13\end{array}",
        r"12\quad 13",
        r"1\quad 2",
        r"1\phantom{0}2",
        r"\hspace{12}",
        r"\color{12}",
        r"{\textcolor{12}",
        r"12\over1\over1",
        r"\left.12",
        r"\begin{aligned}12",
        r"\begin",
        r"\begin{",
        r"\text",
        r"\textcolor{red}",
        r"\kern",
        r"\left",
        r"\right",
        r"\not",
        r"\underline",
        r"\root",
        r"\pmatrix",
    ],
)
def test_what_is_more_than_layout_is_not_dropped(answer) -> None:
    # A bracket that is not closed, and \left with no \right, are the layout of a hurried writer.
    assert not credited(answer, "12") or answer == r"\left.12"


CONSTRUCTS = [
    r"\underline{",
    r"\textcolor{red}{",
    r"\phantom{",
    r"\hspace{1em}",
    r"\left(",
    r"\begin{aligned}",
    r"\begin{array}{c}",
    r"\begin{cases}",
    r"{1\over",
    r"\text{",
    r"\quad",
    r"\\[4pt]",
    r"\kern1em",
    r"\color{",
    "{",
    "$",
    "&",
    '"',
    r"\not",
    r"\left.",
    r"\root",
    "1,",
    "1 ",
    "0.(3)",
    r"0.\dot3",
    "Answer: ",
    "answer ",
    "the area is ",
    "(A) ",
    r"\angle ABC ",
    r"\bar{x",
    "½",
    "x²",
    "1\u0305",
    " ",
    "\n",
    r"\boxed{",
    "A} ",
]


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_long_repetitions_cost_little(construct) -> None:
    answer = construct * (1190 // len(construct))
    start = time.process_time()
    for text in (answer, f"{answer}12", f"12{answer}", answer + "}" * answer.count("{")):
        grade(text, "12", template="answer")
    assert time.process_time() - start < 1


def test_groups_beyond_the_limit_are_left_as_they_are() -> None:
    text = r"\underline{" * (MAX_DEPTH + 5) + "1" + "}" * (MAX_DEPTH + 5)
    assert simplified(text) == text
    assert not credited(text, "1")
