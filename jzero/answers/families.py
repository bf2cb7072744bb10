r"""Answers with parameters: constants of integration, free constants, and k in x = 2k\pi.

The letter of a parameter does not matter, and neither does its scale: C and 1 - 2c run through the
same numbers. Two answers are the same if their parameters make them the same set of answers. That
is decided for formulas that are linear in their parameters, by sampling, and for renamed ones.

A letter is a parameter if the answer declares it (k \in Z), if the question does not have it, or,
without a question, if it is a usual constant in a usual place: + C, y = C_1 e^x + C_2 e^{-x}.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from jzero.answers import sampling
from jzero.answers.evaluation import (
    MP,
    NEGLIGIBLE,
    Place,
    Value,
    is_close,
    is_exact,
    is_real,
    nodes,
    place,
    symbol_names,
    value,
)
from jzero.answers.expressions import (
    REAL_LINE,
    Node,
    mentions,
    negative,
    num_nodes,
    replaced,
    symbol,
)
from jzero.answers.formulas import same_formula, sample_points
from jzero.answers.latex_blocks import is_statement
from jzero.answers.linear import matrix_rank
from jzero.answers.matrices import rows_of
from jzero.answers.sampling import BASIC_POINTS, is_index
from jzero.answers.statements import is_name, solutions
from jzero.answers.vocabulary import FUNCTIONS

_LEVEL = symbol("level")  # the name of an equation that is not solved for a name
MAX_PARAMETERS = 4
MAX_ITEMS = 8
MAX_NODES = 120
MAX_POINTS = 16
LEAST_PARALLEL = 4  # points at which gradients of implicit solutions must be parallel
# Slopes by this step are wrong by less than the error, because values have 140 digits.
STEP, ERROR_OF_SLOPES = MP.mpf(10) ** -70, MP.mpf(10) ** -40
_USUAL_IN_SOLUTIONS = frozenset("CcKABDE") | {"alpha", "beta"}
_USUAL_PHASES = frozenset(("phi", "delta"))
_USUAL_IN_LEVELS = frozenset("CcK")
_USUAL_IN_BOTH = _USUAL_IN_LEVELS | frozenset("AB")
_USUAL_IN_FUNCTIONS = _USUAL_IN_SOLUTIONS | frozenset("abdk")
_USUAL_IN_LINES = frozenset("tsuvrknc") | {"lambda", "mu"}
_BEFORE_C = frozenset("ab")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_MARKED = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\[.+?\\\]|\\\(.+?\\\)", re.DOTALL)
_COMMANDS = re.compile(r"\\[A-Za-z]+")


class Item(NamedTuple):
    """One formula or vector of an answer: x and y of x = 1+2t, y = 3t."""

    names: tuple[Node, ...]  # empty for a formula without a name
    vector: tuple[Node, ...]
    declared: dict[str, str]  # {parameter: domain} that the answer declares


@functools.lru_cache(1024)
def given_names(question: str) -> frozenset[str]:
    """Returns the letters and Greek letters of a question, which are not free to be renamed."""
    formulas = " ".join(_MARKED.findall(question))
    letters = set(_LETTERS.findall(question)) | set(_COMMANDS.sub(" ", formulas))
    return frozenset(letters | {command[1:] for command in _COMMANDS.findall(formulas)})


def same_up_to_parameters(prediction: Node, gold: Node, question: str) -> bool:
    """Returns whether two answers are the same set of answers as their parameters vary."""
    # Most wrong answers are numbers, which have no parameters.
    if not symbol_names(prediction) and not symbol_names(gold):
        return False
    if num_nodes(prediction) + num_nodes(gold) > MAX_NODES:
        return False
    items, gold_items = _items(prediction), _items(gold)
    if items is None or gold_items is None or max(len(items), len(gold_items)) > MAX_ITEMS:
        return False
    given = given_names(question) if question else None
    if len(items) != len(gold_items):
        # y = ±\sqrt{C-x^2} are two branches of x^2 + y^2 = C.
        return _are_branches(items, gold_items, given) or _are_branches(gold_items, items, given)
    unmatched = list(gold_items)
    for item in items:
        for gold_item in unmatched:
            if _same_item(item, gold_item, given):
                unmatched.remove(gold_item)
                break
        else:
            return False
    return True


# Reading


def _items(node: Node) -> list[Item] | None:
    """Returns the items of an answer, None for inequalities and several unsolved equations."""
    inside, declared = _declarations(node)
    if not is_statement(inside):
        parts = inside.parts if inside.kind in ("list", "set") else (inside,)
        return [Item((), _vector(part), declared) for part in parts]
    line = _symmetric_line(inside) or _named_column(inside, declared)
    if line is not None:
        return [line]
    given_solutions = solutions(inside)
    if given_solutions is None:
        if inside.kind != "relation" or inside.name != "=":
            return None
        left, right = inside.parts
        return [_level(left, right, declared)]
    items = []
    for solution in given_solutions:
        names = tuple(solution)
        # In C = x^2 + y^2, the name is the parameter.
        if len(names) == 1 and _is_unsolved(names[0], solution[names[0]]):
            items.append(_level(names[0], solution[names[0]], declared))
        else:
            items.append(_spread(Item(names, tuple(solution.values()), declared)))
    return items


def _symmetric_line(node: Node) -> Item | None:
    """Returns the points of a line (x-1)/2 = y/3 = (z+1)/4, None for other trees."""
    if node.kind != "relation" or node.name != "==" or len(node.parts) != 3:
        return None
    names = [symbol_names(side) for side in node.parts]
    if names != [{"x"}, {"y"}, {"z"}]:
        return None
    vector = []
    for side, name in zip(node.parts, "xyz", strict=True):
        numbers = [value(side, place(0, name, Fraction(at))) for at in (0, 1, 3)]
        exact = [number for number in numbers if number is not None and is_exact(number)]
        if len(exact) < len(numbers):
            return None
        at_zero, at_one, at_three = exact
        slope = at_one - at_zero
        if not slope or at_three != at_zero + 3 * slope:
            return None
        # The coordinate at which the side is t: (t - a) / b.
        start = Node("number", value=-at_zero / slope)
        step = Node("number", value=1 / slope)
        vector.append(Node("add", (start, Node("multiply", (step, symbol("t"))))))
    return Item(tuple(map(symbol, "xyz")), tuple(vector), {"t": "ℝ"})


def _named_column(node: Node, declared: dict[str, str]) -> Item | None:
    r"""Returns the entries of \binom xy = s \binom 12, written as columns; None for others."""
    if node.kind != "relation" or node.name != "=" or node.parts[0].kind != "matrix":
        return None
    names, vector = _vector(node.parts[0]), _vector(node.parts[-1])
    are_names = all(name.kind == "symbol" for name in names) and len(names) == len(vector)
    return Item(names, vector, declared) if are_names else None


def _is_unsolved(name: Node, number: Node) -> bool:
    """Returns whether an equation is not solved for a function: C = xy, xy = C, ln|y| = x + C."""
    if _is_usual(name.name, _USUAL_IN_LEVELS) or name.kind in ("abs", "divide", "log", *FUNCTIONS):
        return True
    if name.kind == "multiply" and _is_usual(name.parts[0].name, _USUAL_IN_LEVELS):
        return True  # x^2 + y^2 = Cy
    # y(t) is read as a product, too.
    return name.kind == "multiply" and not symbol_names(name) & symbol_names(number)


def _spread(item: Item) -> Item:
    """Returns an item with the entries of its only value: (x, y) = (1+2t, 3t)."""
    return item._replace(vector=_vector(item.vector[0])) if len(item.vector) == 1 else item


def _vector(node: Node) -> tuple[Node, ...]:
    if node.kind == "tuple":
        return node.parts
    rows = rows_of(node)
    if rows is None:
        return (node,)
    return tuple(itertools.chain(*rows))


def _level(left: Node, right: Node, declared: dict[str, str]) -> Item:
    """Returns the difference of the sides of an equation such as x^2 + y^2 = C."""
    return Item((_LEVEL,), (Node("add", (left, negative(right))),), declared)


def _is_level(item: Item) -> bool:
    return item.names == (_LEVEL,)


def _declarations(node: Node) -> tuple[Node, dict[str, str]]:
    """Returns an answer without its k in Z and k >= 0, and the domains of the parameters."""
    if node.kind == "or":  # x = ±1 + 2kπ, k ∈ ℤ
        parts = [_declarations(part) for part in node.parts]
        if any(declared != parts[0][1] for _, declared in parts):
            return node, {}
        return node._replace(parts=tuple(part for part, _ in parts)), parts[0][1]
    if node.kind not in ("list", "and"):
        return node, {}
    declared: dict[str, str] = {}
    remaining: list[Node] = []
    for part in node.parts:
        domain = _domain(part)
        if domain is None:
            remaining.append(part)
            continue
        name, restriction = domain
        declared[name] = restriction
        # In "f(x) = ax+b, a, b ∈ ℝ" the letters before b have its domain, too.
        while len(remaining) > 1 and remaining[-1].kind == "symbol":
            declared[remaining.pop().name] = restriction
    used = frozenset[str]().union(*map(symbol_names, remaining))
    if not declared or not remaining or not declared.keys() <= used:
        return node, {}
    is_single = len(remaining) == 1
    return remaining[0] if is_single else node._replace(parts=tuple(remaining)), declared


def _domain(node: Node) -> tuple[str, str] | None:
    """Returns the name and the domain that k in Z or k >= 0 declares, None for other trees."""
    if node.kind != "relation" or len(node.parts) != 2:
        return None
    # k ≥ 0 is read as 0 ≤ k.
    if node.parts[0].kind == "number" and node.name in "<≤":
        node = node._replace(parts=node.parts[::-1], name=">" if node.name == "<" else "≥")
    if node.parts[0].kind != "symbol":
        return None
    name, other = node.parts[0].name, node.parts[1]
    if node.name == "∈":
        if other == REAL_LINE:
            return name, "ℝ"
        return (name, other.name) if other.kind == "domain" and other.name != "ℂ" else None
    if not is_index(name) or other.kind != "number":
        return None
    if node.name == "≥":
        return name, f"≥{other.value}"
    return (name, f"≥{other.value + 1}") if node.name == ">" else None


# Comparison


def _same_item(item: Item, gold: Item, given: frozenset[str] | None) -> bool:
    """Returns whether two items are the same.

    `given` are the names in the question, None without a question.
    """
    if len(item.vector) != len(gold.vector):
        return False
    written = item
    item = _with_argument_of(item, gold)
    if _is_level(item) != _is_level(gold):
        return _same_implicit(item, gold, given)
    if item.names and gold.names:
        if not _same_names(item.names, gold.names):
            return False
        item = _in_order_of(item, gold)
    # f(t) = 2t is f(x) = 2x, and y = 3t, x = 1+2t is x = 1+2t, y = 3t.
    if item is not written and all(map(_same, item.vector, gold.vector)):
        return True
    is_undeclared = not item.declared and not gold.declared
    if is_undeclared and item.vector == gold.vector and _leaves_arguments_out(item, gold):
        return True
    if _is_one_letter(item) or _is_one_letter(gold):
        return False
    return _same_family(item, gold, given)


def _in_order_of(item: Item, gold: Item) -> Item:
    """Returns an item with its components in the order of the gold's names."""
    if item.names == gold.names or len(item.names) < 2:
        return item
    by_name = dict(zip(item.names, item.vector, strict=False))
    if len(by_name) != len(item.vector) or not all(name in by_name for name in gold.names):
        return item
    return item._replace(vector=tuple(by_name[name] for name in gold.names))


def _same_family(item: Item, gold: Item, given: frozenset[str] | None) -> bool:
    """Returns whether two items run through the same formulas as their parameters vary."""
    parameters, gold_parameters = _parameters(item, gold, given), _parameters(gold, item, given)
    if not parameters or not gold_parameters:
        return False
    if max(len(parameters), len(gold_parameters)) > MAX_PARAMETERS:
        return False
    variables = _names(item.vector) - parameters
    if variables != _names(gold.vector) - gold_parameters:
        return False
    first, second = sorted(parameters), sorted(gold_parameters)

    if given is None and _are_other_constants(item, first, gold, second):
        return False
    domains = {item.declared[name] for name in first if name in item.declared}
    gold_domains = {gold.declared[name] for name in second if name in gold.declared}
    if domains or gold_domains:
        return _same_domains(item, first, domains, gold, second, gold_domains)

    if _is_level(item):
        return _same_levels(item, first, gold, second)
    has_name = bool(item.names or gold.names)
    if not has_name and (_is_any_vector(item) or _is_any_vector(gold)):
        return False
    # K is an index elsewhere, and here a usual constant.
    counted = [is_index(name) and name != "K" for name in (*first, *second)]
    # Letters without a variable, such as AB or 2c, are themselves.
    if not (variables or all(counted) or has_name) and len(item.vector) == 1:
        return False

    # Where no question shows which letters are given, only x + C is the family x - C.
    may_change_sign = given is not None or (
        _is_usual(second[0], _USUAL_IN_LEVELS)
        and any(second[0] in _names_in_sums(part) for part in gold.vector)
    )
    if _is_renamed(item.vector, first, gold.vector, second, may_change_sign):
        return True
    # Two lines with different letters may have different scales, too. Elsewhere the letters n and
    # k are whole, and a formula without a variable is a number for each value of its parameter.
    is_line = len(item.vector) > 1 and not (parameters & gold_parameters)
    if (any(counted) or not variables) and not is_line:
        return False
    return _same_spans(item, first, gold, second)


def _are_other_constants(item: Item, names: list[str], gold: Item, gold_names: list[str]) -> bool:
    """Returns whether y = 2x + B and y = 2x + D have letters that may be given constants."""
    are_undeclared = not item.declared and not gold.declared
    is_single = len(names) == len(gold_names) == 1 == len(gold.vector)
    is_applied = any(name.kind == "apply" for name in (*item.names, *gold.names))
    if not (are_undeclared and is_single) or is_applied or names == gold_names:
        return False
    if is_index(names[0]) and is_index(gold_names[0]):  # x = kπ is x = nπ
        return False
    return not any(_is_usual(name, _USUAL_IN_LEVELS) for name in (*names, *gold_names))


def _is_one_letter(item: Item) -> bool:
    """Returns whether an item is a letter, which is an answer of its own, and not any number."""
    is_letter = len(item.vector) == 1 and item.vector[0].kind == "symbol"
    return is_letter and not (item.names and item.names[0].kind == "apply")


def _is_any_vector(item: Item) -> bool:
    """Returns whether an item is a point of different letters and numbers, such as (a, 0)."""
    letters = [part for part in item.vector if part.kind == "symbol"]
    is_plain = all(part.kind == "symbol" or not symbol_names(part) for part in item.vector)
    return len(item.vector) > 1 and is_plain and len(set(letters)) == len(letters)


def _names(vector: Sequence[Node]) -> frozenset[str]:
    return frozenset[str]().union(*map(symbol_names, vector))


def _same_names(names: tuple[Node, ...], gold_names: tuple[Node, ...]) -> bool:
    return {_called(name) for name in names} == {_called(name) for name in gold_names}


def _called(name: Node) -> str:
    """Returns y for y and for y(t)."""
    first = name.parts[0] if name.kind == "multiply" else name  # y(t), read as a product
    return first.name if first.kind in ("symbol", "apply") else repr(name)


def _leaves_arguments_out(item: Item, gold: Item) -> bool:
    """Returns whether one item is about u, and the other one about u(x, t)."""
    if not len(item.names) == len(gold.names) == 1 or not _same_names(item.names, gold.names):
        return False
    names = item.names[0], gold.names[0]
    has_one_symbol = [name.kind for name in names].count("symbol") == 1
    # u(0) is a value of u.
    has_number = any(part.kind == "number" for name in names for part in nodes(name))
    return has_one_symbol and not has_number


def _with_argument_of(item: Item, gold: Item) -> Item:
    """Returns f(t) = 2t as f(x) = 2x, if the gold is about f(x)."""
    argument, gold_argument = _argument(item), _argument(gold)
    if argument is None or gold_argument is None or argument == gold_argument:
        return item
    if gold_argument.name in _names(item.vector):
        return item
    if item.names[0].name != gold.names[0].name:
        return item
    vector = tuple(replaced(part, argument, gold_argument) for part in item.vector)
    return item._replace(names=gold.names, vector=vector)


def _argument(item: Item) -> Node | None:
    """Returns x of an item about f(x), None for other items."""
    if len(item.names) != 1 or item.names[0].kind != "apply" or len(item.names[0].parts) != 1:
        return None
    (argument,) = item.names[0].parts
    return argument if argument.kind == "symbol" and is_name(argument) else None


# Parameters


def _parameters(item: Item, other: Item, given: frozenset[str] | None) -> frozenset[str]:
    """Returns the parameters of an item, whose letters partly also occur in the other item."""
    names = _names(item.vector)
    declared = frozenset(name for name in names if name in item.declared)
    if declared:
        return declared
    if item.names and not _is_function(item.names[0]):
        return frozenset()
    arguments = {part.name for name in item.names for part in name.parts}
    free = frozenset(name for name in names - arguments if _may_be_free(name, given))
    unshared = names - _names(other.vector)
    if other.declared:
        # The other answer declares its parameters, so this one may omit the declaration.
        candidates = free & (other.declared.keys() | unshared)
        if "ℝ" not in other.declared.values():  # the x of y = x^2 is no k of k^2, k ∈ ℕ
            candidates = frozenset(filter(is_index, candidates))
        return candidates if given is None else candidates - given
    if given is None:
        names_of_other = _names(other.vector) - names
        other_has_level = any(_is_usual(name, _USUAL_IN_LEVELS) for name in names_of_other)
        return _usual_parameters(item, free, unshared, other_has_level)
    usual = frozenset(name for name in free if _is_usual(name, _USUAL_IN_SOLUTIONS))
    # Where the question has no letter of the answer, mc^2 is another formula than mv^2.
    may_have_any = len(item.vector) > 1 or bool(names & given)
    renamed = frozenset(
        name
        for name in free & unshared
        if may_have_any or is_index(name) or _is_usual(name, _USUAL_IN_FUNCTIONS)
    )
    return (renamed | usual) - given


def _usual_parameters(
    item: Item, free: frozenset[str], unshared: frozenset[str], other_has_level: bool
) -> frozenset[str]:
    """Returns the usual constants in usual places, for an answer without a question."""
    formula, *other_components = item.vector
    if other_components:
        return frozenset(name for name in free if name in _USUAL_IN_LINES)
    is_function = bool(item.names) and item.names[0].kind == "apply"
    letters = _USUAL_IN_FUNCTIONS if is_function else _USUAL_IN_SOLUTIONS
    usual = frozenset(name for name in free if _is_usual(name, letters))
    # y = kx is y = Cx.
    if item.names and not is_function and other_has_level:
        usual |= free & unshared & {"k"}
    # A letter of both answers is itself, unless it is the usual constant: F = -kx is not F = kx.
    shared = frozenset(name for name in usual - unshared if _is_usual(name, _USUAL_IN_BOTH))
    # In a + b - c, the c is a variable like a and b, and no constant of integration.
    if not item.names and _names(item.vector) & _BEFORE_C:
        shared -= {"c"}
    constants = (usual & unshared) | shared
    if item.names and constants:
        constants |= free & unshared & _USUAL_PHASES
    # The k of x = π/6 + 2kπ is whole, also where no answer declares it.
    if item.names and not constants and _is_angle(formula):
        constants = frozenset(name for name in free & unshared if is_index(name))
    added = _added_names(formula) & constants
    if shared and len(constants) == 1 and not (added or constants <= {"C", "K"}):
        return frozenset()
    if item.names:
        return constants
    # Without a name, an added constant is one of integration. Otherwise constants have indices,
    # C_1 and C_2, or at least two of them are letters that the other answer does not have.
    integration_constants = frozenset(name for name in added if _is_usual(name, _USUAL_IN_LEVELS))
    indexed = frozenset(name for name in constants if "_" in name)
    several_unshared = constants & unshared if len(constants & unshared) > 1 else frozenset()
    if len(indexed) > 1:  # C_1 + C_2 e^x
        return indexed | integration_constants
    return integration_constants or indexed or several_unshared


def _is_angle(formula: Node) -> bool:
    is_in_degrees = any(part.kind == "degree" for part in nodes(formula))
    return is_in_degrees or mentions(formula, symbol("pi"))


def _may_be_free(name: str, given: frozenset[str] | None) -> bool:
    r"""Returns whether a symbol may be a parameter: not pi, \vec v, a matrix, or y_0 beside y."""
    if name in ("e", "pi", "i") or " " in name.partition("_")[0]:
        return False
    base, index, _ = name.partition("_")
    return not index or given is None or base in _USUAL_IN_LEVELS or base not in given


def _is_function(name: Node) -> bool:
    """Returns whether a name is a function such as y, u(x, t) or f(x), and not AB or E."""
    called = _called(name)
    return name.kind == "apply" or name == _LEVEL or called[:1].islower()


def _is_usual(name: str, letters: frozenset[str]) -> bool:
    return name.partition("_")[0] in letters


def _added_names(node: Node) -> frozenset[str]:
    """Returns the symbols that are terms of a sum: C of x^2 + C."""
    if node.kind != "add":
        return frozenset()
    terms = [part.parts[0] if part.kind == "negative" else part for part in node.parts]
    names = set()
    for term in terms:
        # The term may be scaled: 2C.
        last = term.parts[-1] if term.kind == "multiply" else term
        is_scaled = term.kind != "multiply" or len(symbol_names(term)) == 1
        if last.kind == "symbol" and is_scaled:
            names.add(last.name)
    return frozenset(names)


def _names_in_sums(node: Node) -> frozenset[str]:
    """Returns the symbols that are terms of a sum anywhere in a tree."""
    return _added_names(node).union(*map(_names_in_sums, node.parts))


# Renamed parameters


def _is_renamed(
    vector: tuple[Node, ...],
    names: list[str],
    gold: tuple[Node, ...],
    gold_names: list[str],
    may_change_sign: bool = True,
) -> bool:
    """Returns whether an exchange of names makes a vector the gold."""
    if len(names) != len(gold_names) or len(names) > 3:
        return False
    for order in itertools.permutations(gold_names):
        renamed = vector
        # Two steps, because a name of one answer may be another name of the gold.
        for index, name in enumerate(names):
            renamed = _renamed(renamed, name, f"parameter {index}")
        for index, name in enumerate(order):
            renamed = _renamed(renamed, f"parameter {index}", name)
        if all(map(_same, renamed, gold)):
            return True
        # 1/(x - C) runs through the functions of 1/(x + C).
        if len(order) == 1 and may_change_sign:
            parameter = symbol(order[0])
            negated = [replaced(part, parameter, negative(parameter)) for part in renamed]
            if all(map(_same, negated, gold)):
                return True
    return False


def _renamed(vector: tuple[Node, ...], name: str, other: str) -> tuple[Node, ...]:
    return tuple(replaced(part, symbol(name), symbol(other)) for part in vector)


def _same(formula: Node, gold: Node) -> bool:
    return formula == gold or same_formula(formula, gold, strict=False)


# Parameters in which a formula is linear


class Affine(NamedTuple):
    """A vector of functions that is linear in its parameters, at sampled points."""

    base: list[Value]
    directions: list[list[Value]]  # of each parameter


def _affine(
    vector: tuple[Node, ...], parameters: list[str], points: Sequence[int | Place]
) -> Affine | None:
    """Returns the values at 0 and the slopes, None if the vector is not linear or has no values."""

    def values(numbers: Sequence[Fraction]) -> list[Value] | None:
        settings = list(zip(parameters, numbers, strict=True))
        result = []
        for point in points:
            for part in vector:
                sample = value(part, _with_settings(point, settings))
                if sample is None or not is_real(sample):
                    return None
                result.append(MP.convert(sample))
        return result

    zeros = [Fraction(0)] * len(parameters)
    base = values(zeros)
    if base is None:
        return None
    directions = []
    for index in range(len(parameters)):
        unit = zeros.copy()
        unit[index] = Fraction(1)
        at_unit = values(unit)
        if at_unit is None:
            return None
        directions.append([one - zero for one, zero in zip(at_unit, base, strict=True)])

    # A linear vector has these values at any other numbers, too.
    numbers = [Fraction(3 + 2 * index, 2) for index in range(len(parameters))]
    samples = values(numbers)
    if samples is None:
        return None
    for row, sample in enumerate(samples):
        expected = base[row]
        for number, direction in zip(numbers, directions, strict=True):
            expected += MP.convert(number) * direction[row]
        if abs(expected - sample) > NEGLIGIBLE * (1 + abs(sample)):
            return None
    return Affine(base, directions)


def _with_settings(point: int | Place, settings: Sequence[tuple[str, Fraction]]) -> int | Place:
    for name, number in settings:
        point = place(point, name, number)
    return point


def _same_spans(item: Item, names: list[str], gold: Item, gold_names: list[str]) -> bool:
    """Returns whether two families, linear in real parameters, are the same set of functions."""
    points = _points(item, names, gold, gold_names)
    if points is None:
        return False
    first, second = _affine(item.vector, names, points), _affine(gold.vector, gold_names, points)
    if first is None and second is not None:
        return _same_waves(item, names, second, points)
    if first is not None and second is None:
        return _same_waves(gold, gold_names, first, points)
    if first is None or second is None:
        return False
    # At few points, any two families span the same values.
    num_unknowns = len(names) + len(gold_names) + 1
    if len(first.base) < num_unknowns + 2 and len(item.vector) == 1:
        return False
    rank = matrix_rank(second.directions)
    if rank != len(gold_names) or matrix_rank(first.directions) != rank:
        return False
    # Both families have the same directions, and lead from one base to the other.
    shift = [a - b for a, b in zip(first.base, second.base, strict=True)]
    return matrix_rank([*second.directions, *first.directions, shift]) == rank


def _same_waves(
    item: Item, names: list[str], family: Affine, points: Sequence[int | Place]
) -> bool:
    """Returns whether A sin(x + p) is the family of c_1 sin x + c_2 cos x.

    The waves are linear in their amplitude, and change their sign if the phase grows by π. So they
    have all directions of a plane, and the family must be that plane.
    """
    if len(names) != 2 or len(item.vector) != 1 or len(family.directions) != 2:
        return False
    if matrix_rank(family.directions) != 2 or any(map(abs, family.base)):
        return False
    (formula,) = item.vector
    return any(
        _are_waves(formula, amplitude, phase, family, points)
        for amplitude, phase in (names, names[::-1])
    )


def _are_waves(
    formula: Node, amplitude: str, phase: str, family: Affine, points: Sequence[int | Place]
) -> bool:
    samples = []
    for size, angle in ((1, 0), (1, 1), (1, 2), (1, 1 + MP.pi), (3, 1), (0, 1)):
        settings = [(amplitude, MP.convert(size)), (phase, MP.convert(angle))]
        values = [value(formula, _with_settings(point, settings)) for point in points]
        if any(number is None or not is_real(number) for number in values):
            return False
        samples.append([MP.convert(number) for number in values])
    at_zero, at_one, at_two, opposite, larger, smallest = samples
    is_linear = not any(smallest) and all(map(is_close, larger, [3 * one for one in at_one]))
    is_wave = all(map(is_close, opposite, [-one for one in at_one]))
    is_in_plane = matrix_rank([*family.directions, at_zero, at_one, at_two]) == 2
    return is_linear and is_wave and is_in_plane and matrix_rank([at_zero, at_one]) == 2


# Implicit solutions


def _same_implicit(item: Item, gold: Item, given: frozenset[str] | None) -> bool:
    r"""Returns whether y = Ce^x and \ln|y| = x + C are the same curves; one of them is solved."""
    parameters, gold_parameters = _parameters(item, gold, given), _parameters(gold, item, given)
    if len(parameters) != 1 or len(gold_parameters) != 1:
        return False
    first, second = sorted(parameters), sorted(gold_parameters)
    return _same_levels(_as_level(item), first, _as_level(gold), second)


def _as_level(item: Item) -> Item:
    """Returns y - Ce^x = 0 for y = Ce^x."""
    if _is_level(item) or len(item.names) != 1 or len(item.vector) != 1:
        return item
    return _level(symbol(_called(item.names[0])), item.vector[0], item.declared)


def _same_levels(item: Item, names: list[str], gold: Item, gold_names: list[str]) -> bool:
    """Returns whether two equations with one free constant each are the same curves.

    Solved for their constants, they are u(x, y) = C and v(x, y) = C. Their curves are the same if
    the gradients of u and v are parallel everywhere.
    """
    if not (_is_level(item) and _is_level(gold) and len(names) == len(gold_names) == 1):
        return False
    variables = sorted(_names(item.vector) - {*names})
    if len(variables) < 2 or variables != sorted(_names(gold.vector) - {*gold_names}):
        return False
    num_parallel = 0
    for point in BASIC_POINTS:
        gradients = []
        for level, name in ((item, names[0]), (gold, gold_names[0])):
            gradients.append(_gradient(level.vector[0], name, variables, point))
        if None in gradients:
            continue
        if not _are_parallel(*gradients):
            return False
        num_parallel += 1
    return num_parallel >= LEAST_PARALLEL


def _are_parallel(gradient: list[Value], other: list[Value]) -> bool:
    pairs = list(zip(gradient, other, strict=True))
    minors = [a * d - b * c for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    are_zero = not any(gradient) or not any(other)
    return not are_zero and all(abs(minor) < ERROR_OF_SLOPES for minor in minors)


def _gradient(
    difference: Node, parameter: str, variables: list[str], point: int
) -> list[Value] | None:
    """Returns the gradient of the value that a parameter has at a point, scaled to length 1."""
    start = [MP.convert(sampling.sample(name, point)) for name in variables]
    at_start = _solved_for(difference, parameter, variables, start, point)
    slopes = []
    for index in range(len(variables)):
        step = [number + STEP * (place == index) for place, number in enumerate(start)]
        at_step = _solved_for(difference, parameter, variables, step, point)
        if at_start is None or at_step is None:
            return None
        slopes.append((at_step - at_start) / STEP)
    largest = max(map(abs, slopes))
    return [slope / largest for slope in slopes] if largest else slopes


def _solved_for(
    difference: Node, parameter: str, variables: list[str], numbers: list[Value], point: int
) -> Value | None:
    """Returns the parameter's value, None if the difference is not linear in the parameter."""
    settings = list(zip(variables, numbers, strict=True))
    samples = []
    for number in (0, 1, 3):
        place = _with_settings(point, [*settings, (parameter, Fraction(number))])
        result = value(difference, place)
        if result is None or not is_real(result):
            return None
        samples.append(MP.convert(result))
    at_zero, at_one, at_three = samples
    slope = at_one - at_zero
    if not slope or not is_close(at_three - at_zero, 3 * slope):
        return None
    return -at_zero / slope


def _are_branches(branches: list[Item], curves: list[Item], given: frozenset[str] | None) -> bool:
    """Returns whether solved equations with one constant are the branches of one equation.

    On each branch the constant of the equation must be a linear function of the branch's own.
    """
    if len(curves) != 1 or not _is_level(curves[0]):
        return False
    (curve,) = curves
    for branch in branches:
        parameters, constants = _parameters(branch, curve, given), _parameters(curve, branch, given)
        is_solved = len(branch.names) == len(branch.vector) == 1 and not _is_level(branch)
        if not is_solved or len(parameters) != 1 or len(constants) != 1:
            return False
        (parameter,), (constant,) = parameters, constants
        if not _is_branch(branch, parameter, curve.vector[0], constant):
            return False
    return len(branches) == len({branch.vector for branch in branches}) == 2


def _is_branch(branch: Item, parameter: str, difference: Node, constant: str) -> bool:
    variables = sorted(_names((difference,)) - {constant})
    name = _called(branch.names[0])
    if name not in variables or _names(branch.vector) - {parameter} != {*variables} - {name}:
        return False
    constants: dict[int, Value] = {}
    num_samples = 0
    for number in (70, 90, 130):
        for point in BASIC_POINTS:
            place = _with_settings(point, [(parameter, Fraction(number))])
            solved = value(branch.vector[0], place)
            if solved is None or not is_real(solved):
                continue
            others = [MP.convert(sampling.sample(other, point)) for other in variables]
            numbers = [
                solved if other == name else at for other, at in zip(variables, others, strict=True)
            ]
            found = _solved_for(difference, constant, variables, numbers, point)
            if found is None or not is_close(constants.setdefault(number, found), found):
                return False
            num_samples += 1
    if len(constants) < 3 or num_samples < 3 * LEAST_PARALLEL:
        return False
    low, middle, high = constants.values()
    return low != middle and is_close(2 * (middle - low), high - middle)


def _points(
    item: Item, names: list[str], gold: Item, gold_names: list[str]
) -> list[int | Place] | None:
    """Returns points at which both families are real; None if only one is real somewhere."""
    parameters = {*names, *gold_names}
    ones = [(name, Fraction(1)) for name in parameters]
    vectors = item.vector, gold.vector
    total = Node("add", (*item.vector, *gold.vector))
    if not symbol_names(total) - parameters:
        return [0]
    points: list[int | Place] = []
    # A place fixes one symbol only, and the others have the same values at all places.
    for point in sorted(sample_points(total, total), key=lambda point: isinstance(point, Place)):
        if isinstance(point, Place) and {name for name, _ in point.values} <= parameters:
            continue
        if len(points) >= MAX_POINTS:
            break
        at_ones = _with_settings(point, ones)
        samples = [[value(part, at_ones) for part in vector] for vector in vectors]
        # A value may only be too large to compute.
        if any(None in values for values in samples):
            continue
        are_real = [all(map(is_real, values)) for values in samples]
        if all(are_real):
            points.append(point)
        elif any(are_real):
            return None
    return points


# Parameters with a domain


def _same_domains(
    item: Item,
    names: list[str],
    domains: set[str],
    gold: Item,
    gold_names: list[str],
    gold_domains: set[str],
) -> bool:
    """Returns whether two items are the same family, if an answer declares the parameters."""
    if len(domains) > 1 or len(gold_domains) > 1:
        return False
    # One of the answers may leave its domain out, if it has no other letter, or is a function
    # with real constants.
    has_other_letters = _names(item.vector) != {*names}
    is_function = any(name.kind == "apply" for name in item.names) and domains | gold_domains == {
        "ℝ"
    }
    if not (domains and gold_domains) and has_other_letters and not is_function:
        return False
    gold_domain = next(iter(gold_domains or domains))
    domain = next(iter(domains or gold_domains))
    if "ℝ" in (domain, gold_domain):
        if domain != gold_domain:
            return False
        return _same_spans(item._replace(names=()), names, gold._replace(names=()), gold_names)

    starts, gold_starts = _starts(domain), _starts(gold_domain)
    has_start_of_gold = len(names) == len(gold_names) and starts & gold_starts
    if has_start_of_gold and _is_renamed(item.vector, names, gold.vector, gold_names):
        return True
    if len(names) != 1 or len(gold_names) != 1 or has_other_letters:
        return False
    first, second = _affine(item.vector, names, [0]), _affine(gold.vector, gold_names, [0])
    if first is None or second is None:
        return False
    return _same_steps(first, second, starts, gold_starts)


_STARTS = {"ℕ": (0, 1), "ℕ₀": (0,), "ℤ₊": (1,)}


def _starts(domain: str) -> frozenset[int | None]:
    """Returns the possible first numbers of a domain, None for one without a first number."""
    if domain.startswith("≥"):
        return frozenset((int(Fraction(domain[1:])),))
    return frozenset(_STARTS.get(domain, (None,)))


def _same_steps(
    first: Affine, second: Affine, starts: frozenset[int | None], gold_starts: frozenset[int | None]
) -> bool:
    """Returns whether two progressions have the same members."""
    (step,), (gold_step,) = first.directions, second.directions
    largest = max(range(len(gold_step)), key=lambda row: abs(gold_step[row]))
    if not gold_step[largest]:
        return False
    sign = 1 if step[largest] * gold_step[largest] > 0 else -1
    if not all(is_close(sign * a, b) for a, b in zip(step, gold_step, strict=True)):
        return False

    # The first progression starts at this member of the second.
    shift = (first.base[largest] - second.base[largest]) / gold_step[largest]
    number = MP.nint(shift)
    member = [base + number * size for base, size in zip(second.base, gold_step, strict=True)]
    if not all(map(is_close, first.base, member)):
        return False
    if starts == gold_starts == {None}:
        return True
    # Progressions with a first member must have the same one.
    return sign > 0 and any(
        start is not None and gold_start is not None and start + int(number) == gold_start
        for start in starts
        for gold_start in gold_starts
    )
