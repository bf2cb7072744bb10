"""The statements of an answer: its solutions, or the set of numbers that a name is in.

A statement consists of relations that are joined by "and", "or" and commas. Its `alternatives` are
conjunctions of relations between two sides. A statement of equations is a list of solutions, each
of which gives values to names. A statement of inequalities about one name is a set of real numbers,
and one of congruences a set of residues. `equivalence` compares the results of this module.

Commas and "and" are ambiguous, because they join the parts of one solution as well as several
solutions. The rules are:
- An equation for a name that the solution already has starts the next solution: x=1, x=2.
- A value without a name is one more value of the last name: x=1, 2.
- Inequalities hold together, unless no number fulfills them all and a comma joins them.
"""

import functools
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

from jzero.answers.evaluation import (
    CONSTANTS,
    MP,
    NEGLIGIBLE,
    Place,
    Value,
    is_exact,
    is_real,
    near,
    symbol_names,
    value,
)
from jzero.answers.expressions import (
    COMPLEX,
    REAL_LINE,
    Node,
    Refused,
    mentions,
    negative,
    replaced,
    split_unit,
    symbol,
)
from jzero.answers.intervals import (
    ALL_REALS,
    HIGHEST,
    LOWEST,
    End,
    Piece,
    Pieces,
    complement,
    end,
    intersection,
    interval,
    pieces_of,
    union,
)
from jzero.answers.latex_blocks import is_statement
from jzero.answers.sampling import is_index
from jzero.answers.vocabulary import FUNCTIONS

# The alternatives multiply if "and" joins several "or".
MAX_ALTERNATIVES = 40
# Congruences are solved by trying each residue.
MAX_MODULUS = 2000
MAX_EVALUATIONS = 6000  # of congruences, one for each residue
MAX_MEMBERS = 1000  # of an enumerated set of whole numbers
_NEGATED = str.maketrans("<>≤≥=≠", "≥≤><≠=")
_MIRRORED = str.maketrans("<>≤≥", "><≥≤")
_UNKNOWN = symbol("#")  # replaces the name of a statement while its relations are solved

Conjunction = tuple[Node, ...]  # of relations between two sides
Solution = dict[Node, Node]  # {name: value}, in the order of the answer


# Alternatives


@functools.lru_cache(1024)
def alternatives(node: Node) -> tuple[Conjunction, ...] | None:
    """Returns the conjunctions of which one must hold. None if the tree is not a statement."""
    try:
        return tuple(_alternatives(node))
    except Refused:
        return None


def _alternatives(node: Node) -> list[Conjunction]:
    if node.kind == "relation":
        return [_links(node)]
    if node.kind == "congruence":
        return [(node,)]
    if node.kind == "not":
        return _negation(node.parts[0])
    if node.kind == "or":
        items = [_alternatives(part) for part in _completed(node.parts)]
        return _limited(list(itertools.chain.from_iterable(items)))
    if node.kind in ("and", "list"):
        parts = _completed(_flat(node))
        items = [_alternatives(part) for part in parts]
        return _joined(items, is_list=node.kind == "list")
    raise Refused("no statement")


def _flat(node: Node) -> tuple[Node, ...]:
    """Returns the items of a list and of the lists in it."""
    items: list[Node] = []
    for part in node.parts:
        is_inner_list = part.kind in ("and", "list")
        items += _flat(part) if is_inner_list else [part]
    return tuple(items)


def _limited(conjunctions: list[Conjunction]) -> list[Conjunction]:
    if len(conjunctions) > MAX_ALTERNATIVES:
        raise Refused("too many alternatives")
    return conjunctions


def _links(relation: Node) -> Conjunction:
    """Returns the links of a chain, a < b and b < c, and the coordinates of (x, y) = (1, 2)."""
    if set(relation.name) <= {"=", "≈"} and len(relation.parts) > 2:
        return (relation,)  # all sides are values of one name
    links = []
    pairs = itertools.pairwise(relation.parts)
    for operator, (left, right) in zip(relation.name, pairs, strict=True):
        is_of_tuples = left.kind == right.kind == "tuple" and operator == "="
        if is_of_tuples and len(left.parts) == len(right.parts) and _are_names(left.parts):
            coordinates = zip(left.parts, right.parts, strict=True)
            links += [Node("relation", pair, name="=") for pair in coordinates]
        else:
            links.append(Node("relation", (left, right), name=operator))
    return tuple(links)


def _are_names(parts: tuple[Node, ...]) -> bool:
    return all(map(is_name, parts))


def _completed(items: tuple[Node, ...]) -> list[Node]:
    """Returns the items of a list with the name in front of each value: x=1, 2 is x=1, x=2."""
    completed: list[Node] = []
    last: Node | None = None
    for item in items:
        if item == REAL_LINE or (item.kind == "symbol" and not completed):
            if item.kind == "symbol":  # the first of x, y ∈ ℝ
                raise Refused("a list of names")
            continue
        if not is_statement(item):
            # In "3, x = 1" the 3 belongs to no name.
            if last is None:
                raise Refused("a value before its name")
            # A value without a name takes the name and the operator of the last relation.
            item = last._replace(parts=(*last.parts[:-1], item))
        elif item.kind == "relation" and item.name in ("=", "≠", "≡", "≈"):
            last = item
        completed.append(item)
    return completed


def _negation(node: Node) -> list[Conjunction]:
    conjunctions = _alternatives(node)
    # The negation of "a and b" is "not a or not b". Alternatives would multiply.
    if len(conjunctions) != 1:
        raise Refused("the negation of alternatives")
    negated: list[Conjunction] = []
    for relation in conjunctions[0]:
        if relation.kind != "relation" or relation.name not in "<>≤≥=≠":
            raise Refused("no negation")
        negated.append((relation._replace(name=relation.name.translate(_NEGATED)),))
    return negated


def _joined(items: list[list[Conjunction]], is_list: bool) -> list[Conjunction]:
    """Returns the alternatives of statements that a comma or "and" joins."""
    solutions = _solutions_in_order(items, is_list)
    if solutions is not None:
        return _limited(solutions)
    combined: list[Conjunction] = [()]
    for item in items:
        pairs = itertools.product(combined, item)
        combined = _limited([(*first, *second) for first, second in pairs])
    if is_list and len(items) > 1 and all(map(_is_inequality, itertools.chain(*combined))):
        pieces = _pieces_of_alternatives(tuple(combined))
        # No number fulfills all inequalities, so the comma means "or".
        if pieces is not None and not pieces[1]:
            return list(itertools.chain.from_iterable(items))
    return combined


def _is_inequality(relation: Node) -> bool:
    return relation.kind == "relation" and relation.name in "<>≤≥"


def _solutions_in_order(items: list[list[Conjunction]], is_list: bool) -> list[Conjunction] | None:
    """Returns the solutions that a list of equations gives one after the other.

    In a list of values, x = 2, 2, 3, a repeated value is a repeated solution.
    """
    num_values = sum(len(item[0]) for item in items if len(item) == 1)
    solutions: list[Conjunction] = []
    names: dict[Node, Node] = {}
    current: list[Node] = []
    for item in items:
        if len(item) != 1:
            return None
        for relation in item[0]:
            pair = assignment(relation)
            if pair is None:
                return None
            # Another value for a known name starts the next solution.
            is_repeated = is_list and len(names) == 1 < num_values
            if pair[0] in names and (is_repeated or names[pair[0]] != pair[1]):
                solutions.append(tuple(current))
                names, current = {}, []
            names[pair[0]] = pair[1]
            current.append(relation)
    return [*solutions, tuple(current)]


# Equations


def is_name(node: Node) -> bool:
    """Returns whether a tree is a name: x, f(x), |AB|, A:B, (p, q) or a fraction of names.

    Numbers, sums and powers are not names.
    """
    if node.kind == "symbol":
        return node.name not in CONSTANTS
    if node.kind == "apply" or (node.kind == "integral" and len(node.parts) == 2):
        return True
    if node.kind == "text":
        return True
    if node.kind == "degree":  # E°, a standard potential
        return node.parts[0].kind == "symbol"
    if node.kind == "log":
        return is_name(node.parts[0])
    if node.kind in (
        "multiply",
        "divide",
        "ratio",
        "tuple",
        "abs",
        "conjugate",
        "re",
        "im",
        *FUNCTIONS,
    ):
        return all(map(is_name, node.parts))
    return False


def assignment(relation: Node) -> tuple[Node, Node] | None:
    """Returns the name and the value of x = 3, or x = 6/2 = 3. None for other relations.

    A relation between different numbers, such as x = 2 = 3, gives no value. Neither does x = x + 1.
    """
    if relation.kind != "relation" or not set(relation.name) <= {"=", "≈"}:
        return None
    sides = relation.parts
    if relation.parts[-1].kind == "modulo":
        return None
    # If all sides are names, the first is the name, and the others are its values.
    values = [side for side in sides if not is_name(side)] or list(sides[1:])
    names = [side for side in sides if side not in values]
    if not names:
        return None
    names_in_values = frozenset[str]().union(*map(symbol_names, values))
    for name in names:
        # x = x + 1 gives no value.
        if name.kind == "symbol" and name.name in names_in_values:
            return None
    common = common_value(relation, tuple(values))
    return None if common is None else (names[0], common)


def settled(node: Node) -> Node:
    """Returns the value of an equation without names, 3/4 = 0.75; other trees unchanged."""
    if node.kind != "relation" or not set(node.name) <= {"=", "≈"}:
        return node
    if any(map(is_name, node.parts)) or node.parts[-1].kind == "modulo":
        return node
    return common_value(node, node.parts) or node


def common_value(relation: Node, sides: tuple[Node, ...]) -> Node | None:
    """Returns the common value of all sides, as a literal if possible; None if they differ.

    After ≈, a decimal must be the first side rounded, or cut off, at the decimal's last place.
    """
    # `equivalence` imports this module.
    from jzero.answers.equivalence import equal, is_literal_quantity

    if "≈" in relation.name:
        exact, *others = sides
        return exact if all(_is_rounded(side, exact) for side in others) else None
    if not all(equal(side, sides[0], False) for side in sides[1:]):
        return None
    literals = [side for side in sides if is_literal_quantity(side)]
    return (literals or sides)[0]


def _is_rounded(rounded: Node, exact: Node) -> bool:
    number, gold = (value(split_unit(side)[0]) for side in (rounded, exact))
    if number is None or gold is None or not (is_real(number) and is_real(gold)):
        return False
    if near(number, gold):
        return True
    inside = split_unit(rounded)[0]
    written = inside.parts[0] if inside.kind == "negative" else inside
    if written.kind != "number" or not is_exact(number):
        return False
    # A whole number is rounded to units.
    place = written.decimal_place or Fraction(1)
    size, gold_size = MP.convert(abs(number)), MP.convert(abs(gold))
    is_cut_off = gold_size > size
    distance = abs(MP.convert(gold) - MP.convert(number))
    difference = distance / MP.convert(place)
    # A decimal may also be cut off, 3.14 for 3.149, and is then up to a whole place too small. A
    # whole number must be rounded: 3 is not 3.9.
    return bool(difference <= (1 if is_cut_off and written.decimal_place else 0.5))


def solutions(node: Node) -> tuple[Solution, ...] | None:
    """Returns the solutions of a statement, None if it also has other relations."""
    conjunctions = alternatives(node)
    if conjunctions is None:
        return None
    result = []
    for conjunction in conjunctions:
        solution: Solution = {}
        for relation in conjunction:
            pair = assignment(relation)
            if pair is None:
                return None
            solution[pair[0]] = pair[1]
        # x = 2 or x = 2 is one solution.
        if node.kind != "or" or solution not in result:
            result.append(solution)
    return tuple(result)


def with_points(node: Node) -> Node:
    """Returns (x,y) = (1,2) or (x,y) = (3,4) for (x,y) ∈ {(1,2), (3,4)}; other trees unchanged."""
    if node.kind != "relation" or node.name != "∈":
        return node
    names, points = node.parts
    are_points = points.kind == "set" and all(part.kind == "tuple" for part in points.parts)
    if names.kind != "tuple" or not are_points or not _are_names(names.parts) or not points.parts:
        return node
    equations = tuple(Node("relation", (names, point), name="=") for point in points.parts)
    return equations[0] if len(equations) == 1 else Node("or", equations)


def with_each_name(node: Node) -> Node:
    """Returns x = 1, y = 1 for x = y = 1; other trees unchanged."""
    if node.kind != "relation" or set(node.name) != {"="} or len(node.parts) < 3:
        return node
    *names, last = node.parts
    if len({*names}) < len(names) or not all(name.kind == "symbol" for name in names):
        return node
    if not _are_names(tuple(names)) or is_name(last):
        return node
    return Node("list", tuple(Node("relation", (name, last), name="=") for name in names))


# Sets of real numbers


class RealSet(NamedTuple):
    """The real numbers that a name can be."""

    name: Node | None  # None if the answer has no name
    pieces: Pieces
    domain: str = ""  # ℤ or ℕ if only whole numbers count


def of_whole_numbers(numbers: RealSet) -> RealSet:
    """Returns the whole numbers of 1 ≤ n ≤ 5, whose name is an index; other sets unchanged."""
    name = numbers.name
    if numbers.domain or name is None or name.kind != "symbol" or not is_index(name.name):
        return numbers
    ends = itertools.chain.from_iterable(numbers.pieces)
    if not all(MP.isfinite(place.number) for place in ends):
        return numbers
    return _whole_numbers(name, numbers.pieces, "ℤ") or numbers


@functools.lru_cache(1024)
def real_set(node: Node) -> RealSet | None:
    """Returns the set of numbers that a statement, an interval or a formula of sets describes."""
    if not is_statement(node):
        is_without = node.kind == "setminus" and node.parts[0] == Node("domain", name="ℤ")
        if is_without:
            node = node._replace(parts=(REAL_LINE, *node.parts[1:]))
        if node.kind == "intersection" and node.parts[-1].name in ("ℤ", "ℕ"):
            pieces = pieces_of(node._replace(parts=(REAL_LINE, *node.parts[:-1])))
            return None if pieces is None else _whole_numbers(None, pieces, node.parts[-1].name)
        pieces = pieces_of(node)
        if pieces is not None and is_without:
            return _whole_numbers(None, pieces, "ℤ")
        return None if pieces is None else RealSet(None, pieces)
    conjunctions = alternatives(node)
    if conjunctions is None:
        return None
    solved = _pieces_of_alternatives(conjunctions)
    if solved is None:
        return None
    name, pieces, domain = solved
    if domain:
        return _whole_numbers(name, pieces, domain)
    return RealSet(name, pieces)


def _whole_numbers(name: Node | None, pieces: Pieces, domain: str) -> RealSet | None:
    """Returns the whole numbers in a set: 1, 2 and 3 for 0 < x < 4."""
    members: list[Node] = []
    for low, high in pieces:
        # A half-line has infinitely many members, so only its ends are rounded.
        if not (MP.isfinite(low.number) and MP.isfinite(high.number)):
            return RealSet(name, tuple(map(_rounded_inwards, pieces)), domain)
        if high.number - low.number > MAX_MEMBERS:
            return None
        for number in range(int(MP.floor(low.number)), int(MP.ceil(high.number)) + 1):
            above = number > low.number or (low.is_closed and number == low.number)
            below = number < high.number or (high.is_closed and number == high.number)
            if above and below and (domain == "ℤ" or number >= 0):
                members.append(Node("number", value=Fraction(number)))
    if len(members) > MAX_MEMBERS:
        return None
    points = pieces_of(Node("set", tuple(members)))
    return None if points is None else RealSet(name, points)


def _rounded_inwards(piece: Piece) -> Piece:
    low, high = piece
    if MP.isfinite(low.number):
        number = MP.ceil(low.number)
        if number == low.number and not low.is_closed:
            number += 1
        low = End(number, None, True)
    if MP.isfinite(high.number):
        number = MP.floor(high.number)
        if number == high.number and not high.is_closed:
            number -= 1
        high = End(number, None, True)
    return Piece(low, high)


def _pieces_of_alternatives(
    conjunctions: tuple[Conjunction, ...],
) -> tuple[Node, Pieces, str] | None:
    name = _common_name(tuple(itertools.chain(*conjunctions)))
    if name is None:
        return None
    pieces: list = []
    domains = set()
    for conjunction in conjunctions:
        sets = []
        domain = ""
        for relation in conjunction:
            # x ∈ ℤ restricts the numbers that the other relations allow.
            if relation.name == "∈" and relation.parts[1].kind == "domain":
                if relation.parts[0] != name or relation.parts[1].name not in "ℤℕ":
                    return None
                domain = relation.parts[1].name
                continue
            solved = _solved(relation, name)
            if solved is None:
                return None
            sets.append(solved)
        domains.add(domain)
        pieces += intersection(sets) if sets else ALL_REALS
    if len(domains) != 1:
        return None
    return name, union(pieces), domains.pop()


def _common_name(relations: tuple[Node, ...]) -> Node | None:
    """Returns the only name of some relations, None if they have several."""
    if not relations or any(relation.kind != "relation" for relation in relations):
        return None
    names = frozenset[str]().union(*map(symbol_names, relations))
    if len(names) == 1:
        # The brackets mark an unknown function: in f(2) > 3 the name is the whole application,
        # which the loop below finds.
        (only,) = names
        # |z| < 2 is no set of real numbers z.
        if not only.endswith("()") and not only.startswith(COMPLEX):
            return symbol(only)
    for side in relations[0].parts:
        if is_name(side) and all(side in relation.parts for relation in relations):
            return side
    return None


def _solved(relation: Node, name: Node) -> Pieces | None:
    """Returns the numbers for which a relation holds, None if it is not linear in the name."""
    if len(relation.parts) != 2:
        return None
    operator, (left, right) = relation.name, relation.parts
    if operator == "∈":
        return pieces_of(right) if left == name else None
    if operator not in "<>≤≥=≠":
        return None
    # Puts the name on the left side.
    if left != name and right == name:
        left, right, operator = right, left, operator.translate(_MIRRORED)
    if left == name and not mentions(right, name):
        place = end(right, is_closed=True)
        return None if place is None else _half_line(operator, place)
    # Puts the absolute value on the left side.
    if left.kind != "abs" and right.kind == "abs":
        left, right, operator = right, left, operator.translate(_MIRRORED)
    if left.kind == "abs" and not mentions(right, name):
        return _solved_absolute_value(operator, left.parts[0], right, name)
    return _solved_linear(operator, Node("add", (left, negative(right))), name)


def _half_line(operator: str, place: End) -> Pieces | None:
    if not MP.isfinite(place.number):
        # x < ∞ holds for all real numbers. x = ∞ and x > ∞ have no real solution and are no
        # answer.
        return ALL_REALS if operator in "<>≠" else None
    is_closed = operator in "≤≥"
    if operator in "<≤":
        return interval(LOWEST, place._replace(is_closed=is_closed))
    if operator in ">≥":
        return interval(place._replace(is_closed=is_closed), HIGHEST)
    point = interval(place, place)
    return point if operator == "=" else complement(point)


def _solved_absolute_value(operator: str, inside: Node, bound: Node, name: Node) -> Pieces | None:
    number = value(bound)
    if symbol_names(bound) or number is None or not is_real(number):
        return None
    if number < 0:
        # An absolute value is never negative.
        return () if operator in "<≤=" else ALL_REALS
    # |a| < b means a < b and a > -b.
    mirrored = operator.translate(_MIRRORED)
    upper = Node("relation", (inside, bound), name=operator)
    lower = Node("relation", (inside, negative(bound)), name=mirrored)
    pair = (_solved(upper, name), _solved(lower, name))
    sets = [pieces for pieces in pair if pieces is not None]
    if len(sets) < 2:
        return None
    # |a| < b and |a| ≠ b need both relations; |a| > b and |a| = b need only one.
    if operator in "<≤≠":
        return intersection(sets)
    return union(list(itertools.chain.from_iterable(sets)))


def _solved_linear(operator: str, difference: Node, name: Node) -> Pieces | None:
    formula = replaced(difference, name, _UNKNOWN)
    if symbol_names(formula) != {_UNKNOWN.name}:
        return None
    line = _line(formula, _UNKNOWN.name)
    if line is None:
        return None
    at_zero, slope = line
    # The name cancels: only the rounding error of the samples is left.
    if abs(MP.convert(slope)) < NEGLIGIBLE:
        return None
    root = -at_zero / slope
    node = Node("number", value=root) if is_exact(root) else None
    # Division by a negative slope reverses the inequality.
    if slope < 0:
        operator = operator.translate(_MIRRORED)
    return _half_line(operator, End(MP.convert(root), node, True))


# Congruences


class Residues(NamedTuple):
    """The whole numbers that fulfill congruences."""

    name: Node | None
    modulus: int
    members: frozenset[int]


def residues(node: Node, modulus_of_other: int = 1) -> Residues | None:
    """Returns the residues that a statement allows, modulo all moduli in it and another one."""
    if node.kind == "modulo" or (node.kind == "congruence" and node.parts[0].kind != "relation"):
        return _residues_of_values(node, modulus_of_other)
    progression = _residues_of_progression(node) or _residues_of_progressions(node)
    if progression is not None:
        return progression
    conjunctions = alternatives(_with_common_modulus(node))
    if not conjunctions:
        return None
    atoms = tuple(itertools.chain(*conjunctions))
    moduli = [_modulus(atom) for atom in atoms]
    whole_moduli = [modulus for modulus in moduli if modulus is not None]
    if len(whole_moduli) < len(moduli):
        return None
    modulus = math.lcm(modulus_of_other, *whole_moduli)
    names = frozenset[str]().union(*map(symbol_names, atoms))
    if modulus > MAX_MODULUS or modulus * len(atoms) > MAX_EVALUATIONS or len(names) != 1:
        return None
    (name,) = names
    members = set()
    # Tries all residues.
    for number in range(modulus):
        place = Place(0, ((name, Fraction(number)),))
        if any(all(_is_congruent(atom, place) for atom in atoms) for atoms in conjunctions):
            members.add(number)
    return Residues(symbol(name), modulus, frozenset(members))


def _residues_of_progression(node: Node) -> Residues | None:
    """Returns the residues of x = 5 + 7k, k ∈ ℤ."""
    inside, parameters = integer_parameters(node)
    if not parameters and inside.kind == "relation":
        parameters = _undeclared_parameter(inside)
    if not parameters and inside.kind in ("multiply", "add"):
        inside, parameters = _with_parameter(inside)
    if parameters and not is_statement(inside):
        progression_solutions: tuple[Solution, ...] | None = ({_UNKNOWN: inside},)
    else:
        progression_solutions = solutions(inside) if parameters else None
    # Several solutions, or several parameters, are no single progression.
    if (
        progression_solutions is None
        or len(progression_solutions) != 1
        or len(progression_solutions[0]) != 1
        or len(parameters) != 1
    ):
        return None
    ((name, formula),) = progression_solutions[0].items()
    (parameter,) = parameters
    start_and_step = _start_and_step(formula, parameter)
    if start_and_step is None or not is_exact(*start_and_step):
        return None
    start, step = start_and_step
    if start.denominator != 1 or step.denominator != 1 or abs(step) > MAX_MODULUS:
        return None
    modulus = int(abs(step))
    member = int(start) % modulus
    return Residues(None if name == _UNKNOWN else name, modulus, frozenset((member,)))


def _residues_of_progressions(node: Node) -> Residues | None:
    """Returns the residues of n = 4k or n = 4k + 1, and of n = 6k ± 1."""
    node, parameters = integer_parameters(node)
    if node.kind not in ("or", "list") or len(parameters) > 1:
        return None
    each = [_residues_of_progression(part) for part in node.parts]
    progressions = [one for one in each if one is not None and one.name is not None]
    names = {one.name for one in progressions}
    if len(progressions) < len(node.parts) or len(names) != 1:
        return None
    modulus = math.lcm(*(one.modulus for one in progressions))
    if modulus > MAX_MODULUS:
        return None
    members: set[int] = set()
    for one in progressions:
        for member in one.members:
            members |= {*range(member, modulus, one.modulus)}
    return Residues(progressions[0].name, modulus, frozenset(members))


def _undeclared_parameter(relation: Node) -> frozenset[str]:
    """Returns k of x = 5k + 2, which an answer to a congruence need not declare."""
    if relation.name != "=" or relation.parts[0].kind != "symbol":
        return frozenset()
    names = symbol_names(relation.parts[1])
    is_parameter = (
        len(names) == 1 and names != {relation.parts[0].name} and all(map(is_index, names))
    )
    return names if is_parameter else frozenset()


def _with_parameter(node: Node) -> tuple[Node, frozenset[str]]:
    r"""Returns 2k + 1 for 2\\mathbb Z + 1, with the name of its parameter."""
    parameter = symbol("k of Z")
    replacement = replaced(node, Node("domain", name="ℤ"), parameter)
    return replacement, frozenset((parameter.name,) if replacement != node else ())


def _with_common_modulus(node: Node) -> Node:
    """Returns n ≡ 1, 3 (mod 8) with the modulus at each item."""
    if node.kind not in ("list", "or") or node.parts[-1].kind != "congruence":
        return node
    *items, last = node.parts
    if any(item.kind == "congruence" for item in items):
        return node  # a system: all congruences must hold
    inside, modulus = last.parts
    try:
        completed = _completed((*items, inside))
    except Refused:  # 5, n ≡ 1 (mod 3): no congruence of one name
        return node
    congruences = []
    for item in completed:
        is_complete = item.kind == "congruence"
        congruences.append(item if is_complete else Node("congruence", (item, modulus)))
    return Node("or", tuple(congruences))


def _residues_of_values(node: Node, modulus_of_other: int) -> Residues | None:
    inside = node.parts[0]
    number, value_modulus = value(inside), _modulus(node)
    if value_modulus is None or number is None or not is_exact(number) or symbol_names(inside):
        return None
    if number.denominator != 1:
        return None
    modulus = math.lcm(value_modulus, modulus_of_other)
    if modulus > MAX_MODULUS:
        return None
    return Residues(
        None, modulus, frozenset(range(int(number) % value_modulus, modulus, value_modulus))
    )


def _modulus(atom: Node) -> int | None:
    if atom.kind == "relation" and atom.name == "=" and atom.parts[1].kind == "modulo":
        node = atom.parts[1].parts[1]
    elif atom.kind in ("congruence", "modulo"):
        node = atom.parts[1]
    else:
        return None
    number = None if symbol_names(node) else value(node)
    if number is None or not is_exact(number) or number.denominator != 1:
        return None
    return int(number) if 0 < number <= MAX_MODULUS else None


def _is_congruent(atom: Node, place: Place) -> bool:
    if atom.kind == "relation":
        left, (right, modulus) = atom.parts[0], atom.parts[1].parts
    else:
        (left, right), modulus = atom.parts[0].parts, atom.parts[1]
    difference = value(Node("add", (left, negative(right))), place)
    divisor = value(modulus)
    if difference is None or not is_exact(difference) or not divisor:
        return False
    return (difference / divisor).denominator == 1


# Families of solutions


def integer_parameters(node: Node) -> tuple[Node, frozenset[str]]:
    """Returns a statement without its k ∈ ℤ, and the symbols that it declares as whole numbers."""
    if node.kind == "or":
        inside = [integer_parameters(part) for part in node.parts]
        same = {parameters for _, parameters in inside}
        if len(same) != 1 or not inside[0][1]:
            return node, frozenset()
        return node._replace(parts=tuple(part for part, _ in inside)), inside[0][1]
    if node.kind not in ("and", "list"):
        return node, frozenset()
    names = set()
    remaining = []
    for part in _flat(node):
        is_domain = part.kind == "relation" and part.name == "∈" and part.parts[1].kind == "domain"
        if is_domain and part.parts[1].name == "ℤ" and part.parts[0].kind == "symbol":
            names.add(part.parts[0].name)
        else:
            remaining.append(part)
    # No declaration k ∈ ℤ, or nothing else.
    if not names or not remaining:
        return node, frozenset()
    inside = remaining[0] if len(remaining) == 1 else node._replace(parts=tuple(remaining))
    parameter_solutions = solutions(inside) if is_statement(inside) else ({_UNKNOWN: inside},)
    if parameter_solutions is None:
        return node, frozenset()
    values = [number for solution in parameter_solutions for number in solution.values()]
    in_values = frozenset[str]().union(*map(symbol_names, values))
    # The declared symbols must occur in the values: otherwise they are the names themselves.
    return (inside, frozenset(names)) if names <= in_values else (node, frozenset())


def same_family(formula: Node, name: str, gold: Node, gold_name: str) -> bool:
    """Returns whether a + kd takes the same values as b + ne, for whole k and n."""
    first, other = _start_and_step(formula, name), _start_and_step(gold, gold_name)
    if first is None or other is None:
        return False
    # The direction of a family does not count, because the parameter takes negative values, too.
    (start, step), (gold_start, gold_step) = first, other
    if not near(abs(step), abs(gold_step)):
        return False
    # The starts must differ by a whole number of steps.
    shift = (MP.convert(start) - MP.convert(gold_start)) / MP.convert(step)
    return bool(abs(shift - MP.nint(shift)) < NEGLIGIBLE)


def _start_and_step(formula: Node, name: str) -> tuple[Value, Value] | None:
    line = _line(formula, name) if symbol_names(formula) == {name} else None
    return line if line is not None and line[1] else None


def _line(formula: Node, name: str) -> tuple[Value, Value] | None:
    """Returns the value at 0 and the slope of a formula that is linear in a symbol, None if it is
    not.
    """
    samples = []
    for number in (0, 1, 2, -7):
        sample = value(formula, Place(0, ((name, Fraction(number)),)))
        if sample is None or not is_real(sample):
            return None
        samples.append(sample)
    # Two points define the line; the other two check that the formula is linear.
    at_zero, at_one, at_two, far = samples
    slope = at_one - at_zero
    is_linear = near(at_two - at_one, slope) and near(at_zero - 7 * slope, far)
    return (at_zero, slope) if is_linear else None
