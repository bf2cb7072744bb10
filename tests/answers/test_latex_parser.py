"""Trees of answers, and the limits of the grammar."""

from fractions import Fraction

import pytest

from jzero.answers.expressions import Node, symbol
from jzero.answers.latex_lexer import tokenize
from jzero.answers.latex_parser import MAX_TOKENS, parse

X, Y = symbol("x"), symbol("y")


def number(value: int | Fraction) -> Node:
    return Node("number", value=Fraction(value))


@pytest.mark.parametrize(
    "text, tokens",
    [
        (r"\dfrac12", ["\\frac", "{", "1", "}", "{", "2", "}"]),
        (r"2 \cdot x \times y", ["2", "*", "x", "×", "y"]),
        (r"12\text{ square feet}", ["12", '"square', '"feet']),
        ("1,200", ["1200"]),
        ("(1,200)", ["(", "1", ",", "200", ")"]),
        (r"0.1\overline{6}", ["0.1¯6"]),
        ("xyz", ["x", "y", "z"]),
        ("SAS", ['"SAS']),
    ],
)
def test_tokens(text, tokens) -> None:
    assert tokenize(text) == tokens


@pytest.mark.parametrize(
    "text, tree",
    [
        ("x+y", Node("add", (X, Y))),
        ("-x", Node("negative", (X,))),
        ("2xy", Node("multiply", (number(2), X, Y))),
        ("x^y", Node("power", (X, Y))),
        (r"2\frac13", Node("mixed", (number(2), Node("divide", (number(1), number(3)))))),
        ("0.25", Node("number", value=Fraction(1, 4), decimal_place=Fraction(1, 100))),
        (r"0.1\overline{6}", number(Fraction(1, 6))),
        (r".\overline{6}", number(Fraction(2, 3))),
        (r"\sqrt[3]{x}", Node("root", (number(3), X))),
        (r"\sin^2 x", Node("power", (Node("sin", (X,)), number(2)))),
        (r"\sin^{-1} x", Node("asin", (X,))),
        (r"\log_2 x", Node("log", (X, number(2)))),
        (r"-5\text{ cm}", Node("unit", (Node("negative", (number(5),)),), name="centimeter")),
        (r"12\text{ ft}^2", Node("unit", (number(12),), name="foot 2")),
        ("[x,y)", Node("tuple", (X, Y), name="[)")),
        ("|x|", Node("abs", (X,))),
        (r"x\pm y", Node("list", (Node("add", (X, Y)), Node("add", (X, Node("negative", (Y,))))))),
        ("x>y", Node("relation", (Y, X), name="<")),
        ("an ellipse", Node("text", name="ellipse")),
    ],
)
def test_trees(text, tree) -> None:
    assert parse(text) == tree


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x+",
        "4 2",
        "(x",
        r"42\text{ maybe}",
        "1e9999",
        "x!!!",
        "9" * 5000,
        "(" * 70 + "x" + ")" * 70,
        "+".join(["x"] * 50),
        "x " * (MAX_TOKENS + 1),
    ],
)
def test_text_beyond_the_grammar_or_its_limits_has_no_tree(text) -> None:
    assert parse(text) is None
