r"""Whether an answer only repeats a formula of the question.

"Factor x^2-1" is not answered by x^2-1, by (-1+x^2) or by x\cdot x-1, although they equal the gold.
Formulas are therefore compared by their `shape`, which ignores brackets, order, factors of 1 and
terms of 0, and does no other work.

A question may contain its answer, like the choices of a multiple-choice question, and the gold may
have another form. So a formula of the question is an echo only if the question required work: if
the gold is simpler, or if the question asks for another form.
"""

import functools
import math
import re
from collections import Counter
from fractions import Fraction

from jzero.answers.applications import function_names
from jzero.answers.equivalence import equal
from jzero.answers.evaluation import nodes, symbol_names
from jzero.answers.expressions import Node, plainly_named, split_unit
from jzero.answers.formulas import LENIENT, is_literal
from jzero.answers.latex_blocks import is_statement
from jzero.answers.latex_parser import Reading, parse
from jzero.answers.quantities import same_unit
from jzero.answers.statements import is_name
from jzero.answers.vocabulary import FUNCTIONS

_ASKS_FOR_A_FORM = re.compile(
    r"\b(?:factor|expand|simplif|rationali|rewrit|express|convert|reduc|decompos|writ|lowest"
    r"|form\b|in terms of|as an? (?:product|sum|fraction|decimal|percent))",
    re.IGNORECASE,
)
# The words of a question that ask for a fraction, a decimal or a percentage.
_ASKS_FOR_A_NUMERAL = {
    "fraction": re.compile(r"fraction|lowest terms|mixed number|simplest form", re.IGNORECASE),
    "decimal": re.compile("decimal", re.IGNORECASE),
    "percent": re.compile("percent", re.IGNORECASE),
}
_MARK_OF_CHOICE = re.compile(r"(?:\\text(?:bf|rm)?\s*\{\s*)?\(?\b[A-H]\)\s*\}?|\b[A-H][.:]\s")
_MARKED_FORMULA = re.compile(
    r"\$\$(.{1,300}?)\$\$|\$([^$]{1,300})\$|\\\[(.{1,300}?)\\\]|\\\((.{1,300}?)\\\)", re.DOTALL
)
# A run without words of two letters, in a question that does not mark its formulas.
_UNMARKED_FORMULA = re.compile(
    r"(?:\\[A-Za-z]+|[^A-Za-z\s]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[ ])+"
)
_NUMERAL = re.compile(r"[0-9]{1,30}(?:\.[0-9]{1,30})?")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_MAX_FORMULAS = 60  # of a question
_LEAST_DIFFERENCE = 0.5  # in the effort of two formulas
# The sine of a number is work that a radical has done. A radical of any length is simpler.
_EFFORT_OF_FUNCTION = 60.0
_LARGEST_EFFORT = 1e6

Shape = tuple[object, ...]


def is_echo(tree: Node, gold_tree: Node, question: str) -> bool:
    """Returns whether an answer that equals the gold is a formula of the question.

    A name or a whole number may occur in the question, also with its unit.
    """
    if not question:
        return False
    tree, gold_tree = plainly_named(tree), plainly_named(gold_tree)
    if _is_unconverted(tree, gold_tree, question):
        return True
    bare = _without_name(tree)
    if bare != tree and _repeats(bare, _without_name(gold_tree), question):
        return True
    return _repeats(tree, gold_tree, question)


def _is_unconverted(tree: Node, gold_tree: Node, question: str) -> bool:
    """Returns whether a quantity has its number from the question, and another unit than the gold.

    "Convert 589 nm to meters" is not answered by 589 nm.
    """
    (inside, unit), (_, gold_unit) = split_unit(tree), split_unit(gold_tree)
    if not unit or not gold_unit or same_unit(unit, gold_unit):
        return False
    number = next((node for node in nodes(inside) if node.kind == "number"), None)
    numerals = _NUMERAL.findall(question)
    return number is not None and any(Fraction(text) == abs(number.value) for text in numerals)


def _without_name(node: Node) -> Node:
    """Returns x^2-1 for y = x^2-1, {x^2-1}, x^2-1 = x^2-1, and the list x^2-1, x^2-1."""
    inside = node
    if node.kind == "relation" and set(node.name) <= {"=", "≈", "∈"}:
        first, last = node.parts[0], node.parts[-1]
        if is_name(first) or shape(first) == shape(last):
            inside = last
        elif is_name(last):
            inside = first
    elif node.kind in ("set", "list") and len(set(map(shape, node.parts))) == 1:
        inside = node.parts[0]
    return node if inside is node else _without_name(inside)


def _repeats(tree: Node, gold_tree: Node, question: str) -> bool:
    inside, gold_inside = split_unit(tree)[0], split_unit(gold_tree)[0]
    if inside.kind in ("symbol", "text"):
        return False
    if shape(inside) == shape(gold_inside):
        return False
    is_simple = effort(inside) <= effort(gold_inside) + _LEAST_DIFFERENCE
    is_formula = shape(inside) in _shapes(question)
    if _numeral(tree) in ("whole", "decimal", "fraction", "percent") and is_simple:
        return is_formula and _asks_for_numeral(tree, gold_tree, question)
    if _is_choice(inside, question):
        return False
    # A relation that the question gives is not the value of what it asks for.
    if is_formula and inside.kind == "relation" and not is_statement(gold_inside):
        return True
    if is_formula:
        return not is_simple or _ASKS_FOR_A_FORM.search(question) is not None
    return any(
        _leaves_work(inside, gold_inside, formula)
        for formula in _formulas(question)
        if formula.parts and not is_statement(formula) and equal(formula, gold_inside, LENIENT)
    )


def _leaves_work(answer: Node, gold: Node, formula: Node) -> bool:
    """Returns whether an answer is no simpler than a formula of the question, and the gold is.

    A product that replaces a sum, or the other way around, is work, too.
    """
    if effort(formula) > effort(gold) + _LEAST_DIFFERENCE and effort(answer) >= effort(formula):
        return True
    kind, gold_kind, formula_kind = (shape(node)[0] for node in (answer, gold, formula))
    return kind == formula_kind != gold_kind and {kind, gold_kind} == {"sum", "product"}


def _asks_for_numeral(tree: Node, gold_tree: Node, question: str) -> bool:
    """Returns whether a question asks for the gold's kind of numeral, which the answer has not."""
    numeral = _numeral(gold_tree)
    asked = _ASKS_FOR_A_NUMERAL.get(numeral)
    return numeral != _numeral(tree) and asked is not None and bool(asked.search(question))


def _numeral(node: Node) -> str:
    """Returns the kind of a written number, "" for other trees."""
    inside, unit = split_unit(node)
    if unit == "percent":
        return "percent"
    if not is_literal(inside):
        return ""
    kind = shape(inside)[0]
    return "fraction" if kind in ("product", "mixed") else str(kind)


def _is_choice(answer: Node, question: str) -> bool:
    """Returns whether the question lists the answer as one of its choices: "(A) x (B) 2x"."""
    choices = _MARK_OF_CHOICE.split(question)[1:]
    if len(choices) < 2:
        return False
    trees = [_read(choice.strip(" $\n.;,")) for choice in choices]
    return any(tree is not None and shape(tree) == shape(answer) for tree in trees)


def _read(formula: str) -> Node | None:
    return parse(formula, Reading(function_names(formula, formula)))


@functools.lru_cache(1024)
def _formulas(question: str) -> tuple[Node, ...]:
    """Returns the formulas of a question, and the sides of its relations."""
    question = _DRAWING.sub(" ", question)
    texts = [text for match in _MARKED_FORMULA.findall(question) for text in match if text]
    texts = texts or [text.strip() for text in _UNMARKED_FORMULA.findall(question)]
    formulas: dict[Node, None] = {}
    for text in texts[:_MAX_FORMULAS]:
        tree = _read(text.strip().rstrip(".,;:?!"))
        if tree is not None:
            formulas[tree] = None
            formulas |= dict.fromkeys(tree.parts if tree.kind == "relation" else ())
    return tuple(formulas)


@functools.lru_cache(1024)
def _shapes(question: str) -> frozenset[Shape]:
    """Returns the shapes of all formulas of a question, and of the formulas in them."""
    numerals = [
        tree
        for text in re.findall(r"\\?[0-9]*\.?[0-9]*\\overline\{?[0-9]+\}?|[0-9]*\.[0-9]+", question)
        if (tree := parse(text)) is not None
    ]
    shapes = set(map(shape, numerals))
    stack = list(_formulas(question))
    while stack:
        node = stack.pop()
        shapes.add(shape(node))
        stack += node.parts
    return frozenset(shapes)


@functools.lru_cache(4096)
def shape(node: Node) -> Shape:
    """Returns the form of a tree without brackets, order, and operations that change nothing.

    x+1, (1+x), 1·(1+x), 1+x+0 and -(-1-x) have one shape. 6/8 and 3/4 have two.
    """
    if node.kind == "number":
        return ("decimal" if node.value.denominator != 1 else "whole", node.value)
    if node.kind == "add":
        sign, inside = _sum(node)
        return inside if sign > 0 else ("product", -1, frozenset((((inside, 1), 1),)))
    if node.kind in ("multiply", "divide", "negative", "power"):
        return _product(node)
    parts = tuple(map(shape, node.parts))
    if node.kind == "root" and parts[0] == ("whole", 1):
        return parts[1]
    if node.kind == "relation" and set(node.name) == {"="}:
        return "equation", frozenset(Counter(parts).items())
    if node.kind == "tuple" and node.name == "[]" and len(parts) == 1:
        return parts[0]
    return node.kind, node.name, parts


def _sum(node: Node) -> tuple[int, Shape]:
    """Returns the sign and the shape of a sum; the sign makes a - b and b - a one shape."""
    counts: Counter[Shape] = Counter()
    constant: Fraction | int = 0
    stack = list(node.parts)
    while stack:
        part = stack.pop()
        if part.kind == "add":
            stack += part.parts
            continue
        term, sign = shape(part), 1
        if term[0] == "product" and term[1] == -1:
            term, sign = _positive(term), -1
        if term[0] == "whole" and isinstance(term[1], int | Fraction):
            constant += sign * term[1]
        else:
            counts[term] += sign
    terms = [(term, count) for term, count in counts.items() if count]
    if constant:
        terms.append((("whole", abs(constant)), 1 if constant > 0 else -1))
    if not terms:
        return 1, ("whole", 0)
    if len(terms) == 1 and abs(terms[0][1]) == 1:
        return terms[0][1], terms[0][0]
    sign = 1 if min(terms, key=repr)[1] > 0 else -1
    return sign, ("sum", frozenset((term, sign * count) for term, count in terms))


def _positive(product: Shape) -> Shape:
    """Returns a product without its minus sign."""
    _, _, factors = product
    assert isinstance(factors, frozenset), f"{product=}"
    if len(factors) == 1:
        (((base, exponent), count),) = factors
        return base if exponent == count == 1 else ("product", 1, factors)
    return ("product", 1, factors) if factors else ("whole", 1)


def _product(node: Node) -> Shape:
    singles: Counter[Shape] = Counter()  # x\cdot x is x^2
    powers: Counter[tuple[Shape, int]] = Counter()  # but x^2\cdot x^3 is not yet x^5
    sign = 1
    stack = [(node, 1)]
    while stack:
        part, exponent = stack.pop()
        power = _whole_exponent(part)
        if part.kind == "multiply":
            stack += [(factor, exponent) for factor in part.parts]
            continue
        if part.kind == "divide":
            above, below = part.parts
            stack += [(above, exponent), (below, -exponent)]
            continue
        if part.kind == "negative" or power is not None:
            sign *= -1 if part.kind == "negative" and exponent % 2 else 1
            stack.append((part.parts[0], exponent * (1 if power is None else power)))
            continue
        if part.kind == "add":
            sign_of_sum, base = _sum(part)
            sign *= sign_of_sum if exponent % 2 else 1
        elif part.kind == "power":
            base = ("power", shape(part.parts[0]), shape(part.parts[1]))
        else:
            base = shape(part)
        if base == ("whole", 1):
            continue
        if abs(exponent) == 1:
            singles[base] += exponent
        else:
            powers[base, exponent] += 1
    for base, exponent in singles.items():
        powers[base, exponent] += 1
    factors = frozenset(item for item in powers.items() if item[0][1])
    product = ("product", sign, factors)
    return _positive(product) if sign > 0 else product


def _whole_exponent(node: Node) -> int | None:
    """Returns n of a power x^n with a whole number n, None for other trees."""
    if node.kind != "power":
        return None
    exponent, sign = node.parts[1], 1
    if exponent.kind == "negative":
        exponent, sign = exponent.parts[0], -1
    if exponent.kind != "number" or exponent.value.denominator != 1:
        return None
    return sign * int(exponent.value)


@functools.lru_cache(4096)
def effort(node: Node) -> float:
    """Returns the remaining work in a formula: its operations, and the length of its numbers.

    A decimal counts like its fraction, and a fraction or ratio of numbers like one number: 0.5x and
    x/2 are equally simple, and 3/4 is simpler than 6/8. A power of numbers counts like its digits,
    and a function of a number more than any radical.
    """
    if node.kind == "number":
        numerator = max(1, abs(node.value.numerator))
        return math.log2(numerator) + math.log2(node.value.denominator)
    inside = sum(map(effort, node.parts))
    exponent = _whole_exponent(node)
    if exponent is not None and not symbol_names(node):
        return min(_LARGEST_EFFORT, abs(exponent) * effort(node.parts[0])) + 1
    if node.kind in FUNCTIONS and not symbol_names(node):
        return inside + _EFFORT_OF_FUNCTION
    is_one_number = is_literal(node) and node.kind in ("ratio", "negative", "mixed")
    is_fraction = node.kind == "divide" and all(part.kind == "number" for part in node.parts)
    return inside + (0 if is_one_number or is_fraction else 1)
