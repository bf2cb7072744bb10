"""Labels beside values: generated from labels, values and the ways to write both."""

import itertools

import pytest

from jzero.answers.verdict import grade

LABELS = ("vertex", "center", "focus", "saddle point", "local maximum", "point of intersection")
VALUES = ("(1,-4)", r"\left(\frac{1}{2},3\right)", "(0,0)")
FORMS = (
    r"\text{{{label} at }}{value}",
    r"\text{{The {label} is }}{value}",
    r"\text{{the {label} is at }}{value}",
    r"\text{{{label}: }}{value}",
    "{label} {value}",
    r"{value}\text{{ is a {label}}}",
)
PAIRS = (
    r"\text{{center }}{point}\text{{ and radius }}{number}",
    r"\text{{Center: }}{point}\text{{, radius: }}{number}",
    r"center {point}, radius {number}",
    r"\text{{The center is }}{point}\text{{, the radius is }}{number}",
)


def is_credited(answer: str, gold: str) -> bool:
    return grade(answer, gold, template="answer").correct


@pytest.mark.parametrize("form", FORMS)
def test_a_labeled_value_is_the_value_and_no_value_of_another_label(form) -> None:
    for (label, other_label), (value, other) in itertools.product(
        itertools.pairwise(LABELS), itertools.pairwise(VALUES)
    ):
        answer = form.format(label=label, value=value)
        assert is_credited(answer, value)
        assert is_credited(value, answer)
        assert is_credited(answer, FORMS[0].format(label=label, value=value))
        assert not is_credited(answer, other)
        assert not is_credited(answer, FORMS[0].format(label=label, value=other))
        assert not is_credited(answer, FORMS[0].format(label=other_label, value=value))


@pytest.mark.parametrize("form", PAIRS)
def test_labels_of_several_values_each_have_their_own(form) -> None:
    answer = form.format(point="(2,-1)", number="3")
    assert is_credited(answer, "(2,-1), 3")
    for gold_form in PAIRS:
        assert is_credited(answer, gold_form.format(point="(2,-1)", number="3"))
        assert not is_credited(answer, gold_form.format(point="(2,1)", number="3"))
        assert not is_credited(answer, gold_form.format(point="(2,-1)", number="2"))
    assert not is_credited(answer, r"\text{center }(2,-1)\text{ and diameter }3")


@pytest.mark.parametrize("label", ["line ", "the line ", "tangent line: ", "the equation is "])
def test_the_equation_of_a_curve_needs_no_label(label) -> None:
    for equation, other in itertools.permutations(("y=2x+1", "2x-y=1", "x^2+y^2=4"), 2):
        assert is_credited(rf"\text{{{label}}}{equation}", equation)
        assert not is_credited(rf"\text{{{label}}}{equation}", other)
    assert is_credited("l: 3x-4y+5=0", "3x-4y+5=0")
    assert not is_credited("a:b=2:3", "b=2:3")


@pytest.mark.parametrize(
    "answer, gold",
    [
        (r"\text{half }5", "5"),
        (r"\text{not }5", "5"),
        (r"\text{radius }3\text{ or }4", "3"),
        (r"\text{remainder }3", "4"),
        (r"\text{maximum }5,\text{ minimum }-3", r"\text{minimum }5,\text{ maximum }-3"),
        (r"x\text{-intercept }(2,0)", r"y\text{-intercept }(2,0)"),
    ],
)
def test_words_that_change_a_value_are_no_labels(answer, gold) -> None:
    assert not is_credited(answer, gold)
