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

from jzero.answers.evaluation import MP, Place, Value, is_real, near, symbol_names, value
from jzero.answers.expressions import REAL_LINE, Node, negative, num_nodes, replaced, symbol
from jzero.answers.formulas import same_formula, sample_points
from jzero.answers.latex_blocks import is_statement
from jzero.answers.linear import matrix_rank
from jzero.answers.matrices import rows_of
from jzero.answers.sampling import is_index
from jzero.answers.statements import is_name, solutions

MAX_PARAMETERS = 4
MAX_ITEMS = 8
MAX_NODES = 120
MAX_POINTS = 16
_SMALL = MP.mpf(10) ** -60
_USUAL_IN_SOLUTIONS = frozenset("CcKABDE") | {"alpha", "beta"}
_USUAL_IN_LEVELS = frozenset("CcK")
_USUAL_IN_BOTH = _USUAL_IN_LEVELS | frozenset("AB")
_USUAL_IN_FUNCTIONS = _USUAL_IN_SOLUTIONS | frozenset("abdk")
_USUAL_IN_LINES = frozenset("tsuvrkn") | {"lambda", "mu"}
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_MARKED = re.compile(r"\$\$.+?\$\$|\$[^$]+\$|\\\[.+?\\\]|\\\(.+?\\\)", re.DOTALL)
_COMMANDS = re.compile(r"\\[A-Za-z]+")


class Item(NamedTuple):
    """One formula or vector with its names: x and y of x = 1+2t, y = 3t."""

    names: tuple[Node, ...]
    vector: tuple[Node, ...]


class Family(NamedTuple):
    """The items of an answer, and the domains of the parameters that it declares."""

    items: tuple[Item, ...]
    declared: dict[str, str]


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
    family, gold_family = _family(prediction), _family(gold)
    if family is None or gold_family is None or len(family.items) != len(gold_family.items):
        return False
    if len(family.items) > MAX_ITEMS:
        return False
    given = given_names(question) if question else None
    unmatched = list(gold_family.items)
    for item in family.items:
        for other in unmatched:
            if _same_item(item, family.declared, other, gold_family.declared, given):
                unmatched.remove(other)
                break
        else:
            return False
    return True


# Reading


def _family(node: Node) -> Family | None:
    inside, declared = _declarations(node)
    if is_statement(inside):
        given_solutions = solutions(inside)
        if given_solutions is None:
            level = _level(inside)
            return None if level is None else Family((level,), declared)
        items = []
        for found in given_solutions:
            item = Item(tuple(found), tuple(found.values()))
            is_level = len(found) == 1 and _is_usual(item.names[0].name, _USUAL_IN_LEVELS)
            items.append(_level_of(item.names[0], item.vector[0]) if is_level else item)
    else:
        parts = inside.parts if inside.kind in ("list", "set") else (inside,)
        items = [Item((), _vector(part)) for part in parts]
    return Family(tuple(map(_spread, items)), declared)


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


def _level(node: Node) -> Item | None:
    """Returns the difference of the sides of an equation such as x^2 + y^2 = C."""
    if node.kind != "relation" or node.name != "=":
        return None
    return _level_of(*node.parts)


def _level_of(left: Node, right: Node) -> Item:
    return Item((symbol("level"),), (Node("add", (left, negative(right))),))


def _declarations(node: Node) -> tuple[Node, dict[str, str]]:
    """Returns an answer without its k in Z and k >= 0, and the domains of the parameters."""
    if node.kind not in ("list", "and"):
        return node, {}
    declared: dict[str, str] = {}
    remaining = []
    for part in node.parts:
        domain = _domain(part)
        if domain is None:
            remaining.append(part)
        else:
            name, restriction = domain
            declared[name] = restriction
    used = frozenset[str]().union(*map(symbol_names, remaining))
    if not declared or not remaining or not declared.keys() <= used:
        return node, {}
    is_single = len(remaining) == 1
    return remaining[0] if is_single else node._replace(parts=tuple(remaining)), declared


def _domain(node: Node) -> tuple[str, str] | None:
    if node.kind != "relation" or len(node.parts) != 2:
        return None
    if node.parts[0].kind == "number" and node.name in "<≤":  # k ≥ 0 is read as 0 ≤ k
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


def _same_item(
    item: Item,
    declared: dict[str, str],
    gold: Item,
    gold_declared: dict[str, str],
    given: frozenset[str] | None,
) -> bool:
    if len(item.vector) != len(gold.vector):
        return False
    original = item
    item = _with_argument_of(item, gold)
    if item.names and gold.names and not _same_names(item.names, gold.names):
        return False
    if item.names and gold.names and item.names != gold.names and len(item.names) > 1:
        by_name = dict(zip(item.names, item.vector, strict=False))
        if len(by_name) == len(item.vector) and all(name in by_name for name in gold.names):
            item = item._replace(vector=tuple(by_name[name] for name in gold.names))
    if item is not original and all(map(_same, item.vector, gold.vector)):
        return True
    is_undeclared = not declared and not gold_declared
    if is_undeclared and item.vector == gold.vector and _leaves_arguments_out(item, gold):
        return True
    if _is_one_letter(item) or _is_one_letter(gold):
        return False
    names, gold_names = _names(item.vector), _names(gold.vector)
    parameters = _parameters(names - gold_names, names, item, declared, given, gold_declared)
    gold_parameters = _parameters(
        gold_names - names, gold_names, gold, gold_declared, given, declared
    )
    if not gold_parameters or not parameters:
        return False
    if names - parameters != gold_names - gold_parameters:
        return False
    if max(len(parameters), len(gold_parameters)) > MAX_PARAMETERS:
        return False
    domains = {declared.get(name, "") for name in parameters} - {""}
    gold_domains = {gold_declared.get(name, "") for name in gold_parameters} - {""}
    first, second = sorted(parameters), sorted(gold_parameters)
    if domains or gold_domains:
        return _same_domains(item.vector, first, domains, gold.vector, second, gold_domains)
    if not (item.names or gold.names) and (_is_any_vector(item) or _is_any_vector(gold)):
        return False
    counted = [is_index(name) for name in (*first, *second)]
    others = names - parameters
    # Letters without a variable, such as AB or 2c, are themselves.
    if not (others or all(counted) or item.names or gold.names) and len(item.vector) == 1:
        return False
    # Where no question shows which letters are given, only x + C is the family x - C.
    may_change_sign = given is not None or (
        _is_usual(second[0], _USUAL_IN_LEVELS)
        and any(second[0] in _names_in_sums(part) for part in gold.vector)
    )
    if _is_renamed(item.vector, first, gold.vector, second, may_change_sign):
        return True
    is_line = len(item.vector) > 1 and not (parameters & gold_parameters)
    if (any(counted) and not is_line) or (not others and not is_line):
        return False
    return _same_spans(item, first, gold, second)


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
    return has_one_symbol and not any(_has_kind(name, "number") for name in names)


def _has_kind(node: Node, kind: str) -> bool:
    return node.kind == kind or any(_has_kind(part, kind) for part in node.parts)


def _with_argument_of(item: Item, gold: Item) -> Item:
    """Returns f(t) = 2t as f(x) = 2x, if the gold is about f(x)."""
    argument, gold_argument = _argument(item), _argument(gold)
    if argument is None or gold_argument is None or argument == gold_argument:
        return item
    if gold_argument.name in _names(item.vector):
        return item
    vector = tuple(replaced(part, argument, gold_argument) for part in item.vector)
    return Item(gold.names, vector) if item.names[0].name == gold.names[0].name else item


def _argument(item: Item) -> Node | None:
    if len(item.names) != 1 or item.names[0].kind != "apply" or len(item.names[0].parts) != 1:
        return None
    (argument,) = item.names[0].parts
    return argument if argument.kind == "symbol" and is_name(argument) else None


def _parameters(
    own: frozenset[str],
    names: frozenset[str],
    item: Item,
    declared: dict[str, str],
    given: frozenset[str] | None,
    other_declared: dict[str, str],
) -> frozenset[str]:
    """Returns the parameters of an item; `own` are names that the other answer does not have."""
    found = {name for name in names if name in declared}
    if found:
        return frozenset(found)
    if item.names and not _is_function(item.names[0]):
        return frozenset()
    arguments = {part.name for name in item.names for part in name.parts}
    free = frozenset(name for name in names - arguments if _may_be_free(name, given))
    if other_declared:
        # The other answer declares its parameters, so that this one may leave it out.
        candidates = free & (other_declared.keys() | own)
        return candidates if given is None else candidates - given
    if given is not None:
        usual = {name for name in free if _is_usual(name, _USUAL_IN_SOLUTIONS)}
        # Where the question has no letter of the answer, mc^2 is another formula than mv^2.
        may_have_any = len(item.vector) > 1 or bool(names & given)
        own = frozenset(
            name
            for name in free & own
            if may_have_any or is_index(name) or _is_usual(name, _USUAL_IN_FUNCTIONS)
        )
        return (own | usual) - given
    if len(item.vector) > 1:
        return frozenset(name for name in free if name in _USUAL_IN_LINES)
    is_function = bool(item.names) and item.names[0].kind == "apply"
    letters = _USUAL_IN_FUNCTIONS if is_function else _USUAL_IN_SOLUTIONS
    usual = frozenset(name for name in free if _is_usual(name, letters))
    # A letter of both answers is itself, unless it is the usual constant: F = -kx is not F = kx.
    shared = frozenset(name for name in usual - own if _is_usual(name, _USUAL_IN_BOTH))
    constants = (usual & own) | shared
    added = _added_names(next(iter(item.vector))) & constants
    if shared and len(constants) == 1 and not (constants & added or constants <= {"C", "K"}):
        return frozenset()
    if item.names:
        return constants
    # Without a name, an added constant is one of integration.
    added = frozenset(name for name in added if _is_usual(name, _USUAL_IN_LEVELS))
    indexed = frozenset(name for name in constants if "_" in name)
    own_constants = constants & own if len(constants & own) > 1 else frozenset()
    return added or indexed or own_constants


def _may_be_free(name: str, given: frozenset[str] | None) -> bool:
    r"""Returns whether a symbol may be a parameter: not pi, \vec v, a matrix, or y_0 beside y."""
    if name in ("e", "pi", "i") or " " in name.partition("_")[0]:
        return False
    base, index, _ = name.partition("_")
    return not index or given is None or base in _USUAL_IN_LEVELS or base not in given


def _is_function(name: Node) -> bool:
    """Returns whether a name is a function such as y, u(x, t) or f(x), and not AB or E."""
    called = _called(name)
    return name.kind == "apply" or called == "level" or called[:1].islower()


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


def _is_renamed(
    vector: tuple[Node, ...],
    names: list[str],
    gold: tuple[Node, ...],
    gold_names: list[str],
    may_change_sign: bool = True,
) -> bool:
    if len(names) != len(gold_names) or len(names) > 3:
        return False
    for order in itertools.permutations(gold_names):
        renamed = vector
        for index, name in enumerate(names):
            renamed = _renamed(renamed, name, f"parameter {index}")
        for index, name in enumerate(order):
            renamed = _renamed(renamed, f"parameter {index}", name)
        if all(map(_same, renamed, gold)):
            return True
        # 1/(x - C) runs through the functions of 1/(x + C).
        for name in order if len(order) == 1 and may_change_sign else ():
            scaled = (replaced(part, symbol(name), negative(symbol(name))) for part in renamed)
            if all(map(_same, scaled, gold)):
                return True
    return False


def _renamed(vector: tuple[Node, ...], name: str, other: str) -> tuple[Node, ...]:
    return tuple(replaced(part, symbol(name), symbol(other)) for part in vector)


def _same(formula: Node, gold: Node) -> bool:
    return formula == gold or same_formula(formula, gold, strict=False)


class Affine(NamedTuple):
    """A vector of functions that is linear in its parameters, at sampled points."""

    base: list[Value]
    directions: list[list[Value]]


def _affine(
    vector: tuple[Node, ...], parameters: list[str], points: Sequence[int | Place]
) -> Affine | None:
    """Returns the values at 0 and the slopes, None if the vector is not linear or has no values."""

    def values(settings: Sequence[Fraction]) -> list[Value] | None:
        pairs = tuple(zip(parameters, settings, strict=True))
        result = []
        for point in points:
            inside = point.values if isinstance(point, Place) else ()
            number = point.point if isinstance(point, Place) else point
            for part in vector:
                sample = value(part, Place(number, (*pairs, *inside)))
                if sample is None or not is_real(sample):
                    return None
                result.append(MP.convert(sample))
        return result

    zeros = [Fraction(0)] * len(parameters)
    base = values(zeros)
    check_at = [Fraction(3 + 2 * index, 2) for index in range(len(parameters))]
    check = values(check_at)
    if base is None or check is None:
        return None
    directions = []
    for index in range(len(parameters)):
        unit = zeros.copy()
        unit[index] = Fraction(1)
        at_one = values(unit)
        if at_one is None:
            return None
        directions.append([one - zero for one, zero in zip(at_one, base, strict=True)])
    for row, expected in enumerate(check):
        total = base[row]
        for size, direction in zip(check_at, directions, strict=True):
            total += MP.convert(size) * direction[row]
        if abs(total - expected) > _SMALL * (1 + abs(expected)):
            return None
    return Affine(base, directions)


def _same_spans(item: Item, names: list[str], gold: Item, gold_names: list[str]) -> bool:
    """Returns whether two families, linear in real parameters, are the same set of functions."""
    points = _points(item, names, gold, gold_names)
    if points is None:
        return False
    first, second = _affine(item.vector, names, points), _affine(gold.vector, gold_names, points)
    if first is None or second is None:
        return False
    num_rows = len(first.base)
    num_unknowns = len(names) + len(gold_names) + 1
    if num_rows < num_unknowns + 2 and len(item.vector) == 1:
        return False
    if item.names and item.names[0].name == "level":
        return _same_levels(first, second)
    rank = matrix_rank(second.directions)
    if rank != len(gold_names) or matrix_rank(first.directions) != rank:
        return False
    shift = [a - b for a, b in zip(first.base, second.base, strict=True)]
    return matrix_rank([*second.directions, *first.directions, shift]) == rank


def _same_levels(first: Affine, second: Affine) -> bool:
    """Returns whether u = C and v = C are the same curves: u is linear in v."""
    if len(first.directions) != 1 or len(second.directions) != 1:
        return False
    levels = []
    for family in (first, second):
        if not all(family.directions[0]):
            return False
        pairs = zip(family.base, family.directions[0], strict=True)
        levels.append([base / slope for base, slope in pairs])
    ones = [MP.mpf(1)] * len(levels[0])
    return matrix_rank([levels[1], ones]) == 2 and matrix_rank([levels[1], ones, levels[0]]) == 2


def _points(
    item: Item, names: list[str], gold: Item, gold_names: list[str]
) -> list[int | Place] | None:
    """Returns points at which both families are real; None if only one is real somewhere."""
    parameters = {*names, *gold_names}
    ones = tuple((name, Fraction(1)) for name in parameters)
    total = Node("add", (*item.vector, *gold.vector))
    if not symbol_names(total) - parameters:
        return [0]
    points: list[int | Place] = []
    for point in sample_points(total, total):
        if len(points) >= MAX_POINTS:
            break
        inside = point.values if isinstance(point, Place) else ()
        number = point.point if isinstance(point, Place) else point
        at_point = Place(number, (*ones, *inside))
        defined = [_are_real(vector, at_point) for vector in (item.vector, gold.vector)]
        if all(defined):
            points.append(point)
        elif any(defined):
            return None
    return points


def _are_real(vector: tuple[Node, ...], point: Place) -> bool:
    samples = [value(part, point) for part in vector]
    return all(sample is not None and is_real(sample) for sample in samples)


# Parameters with a domain


def _same_domains(
    vector: tuple[Node, ...],
    names: list[str],
    domains: set[str],
    gold: tuple[Node, ...],
    gold_names: list[str],
    gold_domains: set[str],
) -> bool:
    if len(domains) > 1 or len(gold_domains) > 1:
        return False
    # One of the answers may leave its domain out, if it has no other letter.
    if not (domains and gold_domains) and _names(vector) != {*names}:
        return False
    gold_domain = next(iter(gold_domains or domains))
    domain = next(iter(domains or gold_domains))
    if "ℝ" in (domain, gold_domain):
        if domain != gold_domain:
            return False
        return _same_spans(Item((), vector), names, Item((), gold), gold_names)
    starts = _starts(domain), _starts(gold_domain)
    has_start_of_gold = len(names) == len(gold_names) and starts[0] & starts[1]
    if has_start_of_gold and _is_renamed(vector, names, gold, gold_names):
        return True
    if len(names) != 1 or len(gold_names) != 1 or _names(vector) != {names[0]}:
        return False
    first, second = _affine(vector, names, [0]), _affine(gold, gold_names, [0])
    if first is None or second is None:
        return False
    return _same_steps(first, second, *starts)


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
    pivot = max(range(len(gold_step)), key=lambda row: abs(gold_step[row]))
    if not gold_step[pivot]:
        return False
    sign = 1 if step[pivot] * gold_step[pivot] > 0 else -1
    if not all(_near(sign * a, b) for a, b in zip(step, gold_step, strict=True)):
        return False
    shift = (first.base[pivot] - second.base[pivot]) / gold_step[pivot]
    whole = MP.nint(shift)
    moved = [base + whole * size for base, size in zip(second.base, gold_step, strict=True)]
    if not all(map(_near, first.base, moved)):
        return False
    if starts == gold_starts == {None}:
        return True
    return sign > 0 and any(
        start is not None and gold_start is not None and start + int(whole) == gold_start
        for start in starts
        for gold_start in gold_starts
    )


def _near(x: Value, y: Value) -> bool:
    return near(x, y) or bool(abs(x - y) < _SMALL)
