"""Whether two parsed answers are the same answer.

`equal` compares units first (`quantities`), then statements by their solutions (`statements`), and
lists, sets, matrices and ratios by their structure, down to the formulas in them, which `formulas`
compares.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from jzero.answers.curves import is_same_curve, is_scaled
from jzero.answers.dates import same_date
from jzero.answers.evaluation import Value, is_real, region, symbol_names, value
from jzero.answers.expressions import (
    INFINITY,
    MAX_PARTS,
    Node,
    mentions,
    negative,
    split_unit,
    symbol,
)
from jzero.answers.formulas import LENIENT, Rules, is_literal, same_formula
from jzero.answers.groups import invariants, is_group, same_small_group
from jzero.answers.intervals import Pieces, same_number
from jzero.answers.latex_blocks import is_statement
from jzero.answers.linear import matrix_rank
from jzero.answers.matrices import identity_scale, identity_size, rows_of, scaled_identity
from jzero.answers.noncommuting import is_noncommuting, same_ordered
from jzero.answers.same_quantity import has_quantity, same_quantity, without_unit_of_letters
from jzero.answers.sampling import is_index
from jzero.answers.statements import (
    Conjunction,
    Residues,
    Solution,
    alternatives,
    assignment,
    integer_parameters,
    is_name,
    of_whole_numbers,
    real_set,
    residues,
    same_family,
    settled,
    solutions,
    with_each_name,
    with_points,
)
from jzero.answers.units import folded
from jzero.answers.vocabulary import words

__all__ = ["LENIENT", "Rules", "equal"]

T = TypeVar("T")


def equal(prediction: Node, gold: Node, rules: Rules | bool) -> bool:
    """Returns whether a prediction is the same answer as the gold.

    A unit may be missing on either side, but two units must be the same. True and False are short
    for `Rules(strict=True)` and `Rules(strict=False)`.
    """
    if isinstance(rules, bool):
        rules = Rules(strict=rules)
    # Equal trees are one answer under all rules, even where nothing can be evaluated.
    return prediction == gold or _equal(prediction, gold, rules)


@functools.lru_cache(4096)
def _equal(prediction: Node, gold: Node, rules: Rules) -> bool:
    if _same_congruence(prediction, gold):
        return True
    if is_statement(prediction) or is_statement(gold):
        return _same_statement(prediction, gold, rules)
    if is_literal(gold) and prediction.kind == "divide":
        prediction = without_unit_of_letters(prediction)
    if has_quantity(prediction) or has_quantity(gold):
        return same_quantity(prediction, gold, rules, equal)
    # A shortcut: two numbers have neither structure nor matrix.
    if not prediction.parts and not gold.parts and prediction.kind == gold.kind == "number":
        return same_formula(prediction, gold, rules.strict)
    if is_group(prediction) or is_group(gold):
        group = invariants(gold)
        return group is not None and group == invariants(prediction)
    truth_values = _truth_values(gold), _truth_values(prediction)
    if None not in truth_values:
        return truth_values[0] == truth_values[1]
    lists = _in_square_brackets(prediction, gold)
    if lists is not None:
        return _all_equal(*lists, rules)
    # A structure in either answer decides; only two plain formulas are compared by value.
    for kind, compare in _STRUCTURES.items():
        if kind in (prediction.kind, gold.kind):
            return compare(prediction, gold, rules)
    if _has_matrix(prediction) and _has_matrix(gold):
        return _same_matrix(prediction, gold, rules)
    if prediction.kind == gold.kind == "apply" and prediction.name == gold.name == "span":
        return _same_span(prediction.parts, gold.parts)
    if prediction.kind == gold.kind == "symbol" and gold.name.startswith("triangle "):
        return sorted(prediction.name) == sorted(gold.name)
    if prediction.kind == gold.kind == "symbol" and same_small_group(prediction, gold):
        return True
    if is_noncommuting(prediction) or is_noncommuting(gold):
        return same_ordered(prediction, gold)
    return same_formula(prediction, gold, rules.strict)


def is_literal_quantity(node: Node) -> bool:
    return is_literal(split_unit(node)[0])


# Structures


def _in_square_brackets(
    prediction: Node, gold: Node
) -> tuple[tuple[Node, ...], tuple[Node, ...]] | None:
    """Returns the members of a list of Python, [1, 2, 3], and of 1, 2, 3; None for others."""
    if {prediction.kind, gold.kind} != {"tuple", "list"}:
        return None
    brackets = prediction if prediction.kind == "tuple" else gold
    is_list = brackets.name == "[]" and len(brackets.parts) > 2
    return (prediction.parts, gold.parts) if is_list else None


def _same_parts(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares part by part. Kinds, brackets and operators must be the same."""
    if prediction.kind != gold.kind or prediction.name != gold.name:
        return False
    return _all_equal(prediction.parts, gold.parts, rules)


def _all_equal(parts: Sequence[Node], gold_parts: Sequence[Node], rules: Rules) -> bool:
    if len(parts) != len(gold_parts):
        return False
    pairs = zip(parts, gold_parts, strict=True)
    return all(equal(part, gold_part, rules) for part, gold_part in pairs)


def _same_tuple(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares coordinates. With three or more, the kind of brackets does not count."""
    # {(1, 2)} is the solution (1, 2).
    prediction, gold = _only_point(prediction), _only_point(gold)
    if _has_matrix(prediction) and _has_matrix(gold) and prediction.kind != gold.kind:
        return _same_matrix(prediction, gold, rules)
    is_vector = prediction.kind == gold.kind and len(gold.parts) > 2
    brackets = {prediction.name, gold.name}
    # (1, 2, 3) and [1, 2, 3] are the same vector; [0, 1) is another interval than (0, 1).
    if is_vector and brackets <= {"()", "[]"}:
        return _all_equal(prediction.parts, gold.parts, rules)
    return _same_parts(prediction, gold, rules)


def _only_point(node: Node) -> Node:
    is_point = node.kind == "set" and len(node.parts) == 1 and node.parts[0].name == "()"
    return node.parts[0] if is_point else node


def _same_members(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares as multisets if the gold is a list that repeats a member, otherwise as sets."""
    if prediction.kind == gold.kind == "list" and rules.is_ordered:
        return _same_parts(prediction, gold, rules)
    prediction, gold = _without_ellipsis(prediction), _without_ellipsis(gold)
    # The ellipsis of 1, 2, ..., 9 stands for members in order, so the order counts.
    if "ldots" in (part.name for node in (prediction, gold) for part in node.parts):
        return _same_parts(prediction, gold, rules)
    members, gold_members = _members(prediction), _members(gold)
    # A prediction may repeat one solution of a list, unless the gold itself does.
    distinct = _without_repetitions(gold_members)
    if gold.kind != "list" or len(distinct) == len(gold_members):
        members, gold_members = _without_repetitions(members), distinct
    if len(members) != len(gold_members):
        return False
    for member in members:
        count = sum(_same_member(member, other, rules) for other in gold_members)
        # Each member must occur as often among the gold's members as among its own.
        if count == 0 or count != sum(_same_member(member, other, LENIENT) for other in members):
            return False
    return True


def _without_ellipsis(node: Node) -> Node:
    """Returns 1, 2, 3, 4 for 1, ..., 4, and 1, 2, ..., n for 1, 2, 3, ..., n."""
    names = [part.name for part in node.parts]
    if names.count("ldots") == 1 and names[-1] == "ldots" and len(names) > 3:
        return _shortened(node)
    if names.count("ldots") != 1 or names[-1] == "ldots" or names[0] == "ldots":
        return node
    index = names.index("ldots")
    first, last = node.parts[0], node.parts[-1]
    numbers = [part.value for part in node.parts[:index] if part.kind == "number"]
    # Only numbers stand before the ellipsis, and one member after it.
    if len(numbers) < index or index + 2 < len(node.parts):
        return node
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    is_even = all(b - a == step for a, b in itertools.pairwise(numbers))
    if not step or not is_even:
        return node

    is_long = last.kind == "number" and abs(last.value - first.value) >= MAX_PARTS * abs(step)
    if last.kind != "number" or is_long:
        second = first._replace(value=first.value + step)
        return node._replace(parts=(first, second, symbol("ldots"), last))
    num_steps = Fraction(last.value - first.value) / step
    if num_steps.denominator != 1 or not 0 < num_steps < MAX_PARTS:
        return node
    values = [first.value + step * number for number in range(int(num_steps) + 1)]
    return node._replace(parts=tuple(Node("number", value=number) for number in values))


def _shortened(node: Node) -> Node:
    """Returns {2, 4, 6, ...} for {2, 4, 6, 8, ...}; other trees unchanged."""
    *members, dots = node.parts
    parts = [part.parts[0] if part.kind == "negative" else part for part in members]
    if not all(part.kind == "number" for part in parts):
        return node
    values = [part.value for part in parts]
    is_even = len({b - a for a, b in itertools.pairwise(values)}) == 1
    return node._replace(parts=(*members[:3], dots)) if is_even else node


def _same_member(member: Node, other: Node, rules: Rules) -> bool:
    # The set {1} is the answer 1, but as a member it is another object.
    return (member.kind == "set") == (other.kind == "set") and equal(member, other, rules)


def _truth_values(node: Node) -> tuple[str, ...] | None:
    """Returns the truth values of a list in order, also of the word TFT; None for other trees."""
    if node.kind not in ("list", "tuple", "text", "symbol"):
        return None
    names = [part.name for part in node.parts] if node.parts else [node.name]
    if node.kind == "text" and set(node.name) <= {"t", "f"}:  # TFT, in lower case
        names = list(node.name.upper())
    values = tuple(_TRUTH_VALUES.get(name, "") for name in names)
    return values if all(values) else None


def _same_sets(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares sets of numbers: (0, 2) ∪ (1, 3) is (0, 3); or sets of letters: A ∩ B is B ∩ A."""
    numbers, gold_numbers = real_set(prediction), real_set(gold)
    if numbers is not None and gold_numbers is not None:
        return _same_pieces(numbers.pieces, gold_numbers.pieces, rules)
    members, gold_members = region(prediction), region(gold)
    if members is not None and gold_members is not None:
        return members == gold_members
    # The sets have neither numbers nor letters only: compares their structure.
    if prediction.kind == gold.kind and gold.kind != "union":
        return _same_parts(prediction, gold, rules)
    if {prediction.kind, gold.kind} <= {"union", "list"}:
        return _same_members(prediction, gold, rules)
    return False


def _same_pieces(pieces: Pieces, gold_pieces: Pieces, rules: Rules) -> bool:
    if len(pieces) != len(gold_pieces):
        return False
    for piece, gold_piece in zip(pieces, gold_pieces, strict=True):
        for end, gold_end in zip(piece, gold_piece, strict=True):
            if end.is_closed != gold_end.is_closed:
                return False
            if end.node is None or gold_end.node is None:
                if not same_number(end.number, gold_end.number):
                    return False
            elif not equal(end.node, gold_end.node, rules):
                return False
    return True


def _same_ratio(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares the proportions of two ratios, and the parts of two times: 2:15 is not 4:30."""
    if prediction.kind != gold.kind:
        has_time = "time" in (prediction.name, gold.name)
        return not has_time and same_formula(prediction, gold, rules.strict)
    sides, gold_sides = prediction.parts, gold.parts
    if len(sides) != len(gold_sides):
        return False
    is_time = "time" in (prediction.name, gold.name)
    if is_time or (_may_be_time(prediction) and _may_be_time(gold)):
        return _all_equal(sides, gold_sides, rules)
    # A side that is still to be computed is not an answer if the gold's sides are written out.
    if rules.strict and all(map(is_literal, gold_sides)) and not all(map(is_literal, sides)):
        return False
    return _are_proportional(sides, gold_sides)


def _may_be_time(ratio: Node) -> bool:
    """Returns whether a ratio can be read as hours, minutes of two digits, and seconds."""
    hours, *smaller = ratio.parts
    is_written = all(map(_is_whole_number, ratio.parts))
    # Three smaller parts would be more than hours, minutes and seconds.
    if not is_written or len(smaller) > 2:
        return False
    has_minutes = ratio.name == "time" or all(part.value >= 10 for part in smaller)
    return has_minutes and hours.value <= 24 and all(part.value < 60 for part in smaller)


def _is_whole_number(node: Node) -> bool:
    return node.kind == "number" and node.value.denominator == 1


def _are_proportional(sides: tuple[Node, ...], gold_sides: tuple[Node, ...]) -> bool:
    """Returns whether two lists of sides are proportional, with zeros at the same places."""
    pivots = [index for index, side in enumerate(gold_sides) if value(side)]
    # A ratio with only one non-zero side would be proportional to all such ratios.
    if len(pivots) < 2:
        return _all_equal(sides, gold_sides, LENIENT)
    pivot = pivots[0]
    # Cross-multiplication with a zero pivot would make everything proportional.
    if not value(sides[pivot]):
        return False
    for side, gold_side in zip(sides, gold_sides, strict=True):
        product = Node("multiply", (side, gold_sides[pivot]))
        gold_product = Node("multiply", (gold_side, sides[pivot]))
        if not equal(product, gold_product, LENIENT):
            return False
    return True


def _members(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind in ("list", "set", "union") else (node,)


def _without_repetitions(members: tuple[Node, ...]) -> tuple[Node, ...]:
    distinct = []
    for index, member in enumerate(members):
        if not any(_same_member(member, earlier, LENIENT) for earlier in members[:index]):
            distinct.append(member)
    return tuple(distinct)


def _same_dates(prediction: Node, gold: Node, rules: Rules) -> bool:
    return prediction.kind == gold.kind and same_date(prediction.name, gold.name)


def _same_text(prediction: Node, gold: Node, rules: Rules) -> bool:
    letters, gold_letters = _letters(prediction), _letters(gold)
    if {letters, gold_letters} == {"infinitelymany", "inf"}:  # how many solutions
        return True
    if "neither" in (letters, gold_letters):  # neither even nor odd
        return letters.startswith("neither") and gold_letters.startswith("neither")
    return letters != "" and letters == gold_letters


def _letters(node: Node) -> str:
    """Returns the letters of words or symbols, "" for any other tree.

    A word can be read as a product of symbols: "A B C" is ABC.
    """
    if node.kind == "multiply":
        letters = [_letters(part) for part in node.parts]
        return folded("".join(letters)) if all(letters) else ""
    return node.name if node.kind in ("text", "symbol", "infinity") else ""


# Matrices


def _has_matrix(node: Node) -> bool:
    return rows_of(node) is not None


def _same_matrix(prediction: Node, gold: Node, rules: Rules) -> bool:
    rows, gold_rows = rows_of(prediction), rows_of(gold)
    # 2I has the size of the other matrix.
    scale, gold_scale = identity_scale(prediction), identity_scale(gold)
    sizes = {size for size in (identity_size(prediction), identity_size(gold)) if size}
    if not sizes <= {len(entries) for entries in (rows, gold_rows) if entries is not None}:
        return False
    if rows is None and scale is not None and gold_rows is not None:
        rows = scaled_identity(scale, len(gold_rows))
    elif gold_rows is None and gold_scale is not None and rows is not None:
        gold_rows = scaled_identity(gold_scale, len(rows))
    if rows is None or gold_rows is None or len(rows) != len(gold_rows):
        return _same_parts(prediction, gold, rules)
    pairs = zip(rows, gold_rows, strict=True)
    return all(_all_equal(row, gold_row, rules) for row, gold_row in pairs)


def _same_span(vectors: Sequence[Node], gold_vectors: Sequence[Node]) -> bool:
    """Returns whether vectors of numbers span the same space."""
    spans = []
    for parts in (vectors, gold_vectors):
        span = [_numbers(part) for part in parts]
        if None in span:
            return False
        spans.append(span)
    sizes = {len(vector) for span in spans for vector in span}
    if len(sizes) != 1:
        return False
    rank = matrix_rank(spans[1])
    return matrix_rank(spans[0]) == rank == matrix_rank([*spans[0], *spans[1]])


def _numbers(node: Node) -> list[Value] | None:
    rows = rows_of(node)
    if rows is None or symbol_names(node):
        return None
    numbers = [value(entry) for entry in itertools.chain(*rows)]
    return None if any(number is None or not is_real(number) for number in numbers) else numbers


# Statements


def _without_name(node: Node, other: Node) -> Node:
    """Returns S_3 for G ≅ S_3, and N(0, 1) for X ∼ N(0, 1), if the other answer has no name."""
    if node.kind == "relation" and node.name == "=" and not is_statement(other):
        names, vector = node.parts[0], node.parts[-1]
        rows = rows_of(names) if names.kind == "matrix" else None
        # A^{-1} is a name, if its value is a matrix.
        if _is_inverse(names) and vector.kind != "symbol" and rows_of(vector) is not None:
            return vector
        # The column of x and y is named, not given.
        if rows is not None and all(len(row) == 1 and is_name(row[0]) for row in rows):
            return vector
    if node.kind != "relation" or node.name not in ("≅", "∼") or is_statement(other):
        return node
    # Triangles and segments have a space in their names.
    first = node.parts[0]
    return node.parts[1] if first.kind == "symbol" and " " not in first.name else node


def _is_inverse(node: Node) -> bool:
    if node.kind != "power":
        return False
    base, exponent = node.parts
    is_minus_one = exponent.kind == "negative" and exponent.parts[0].value == 1
    return is_minus_one and base.kind == "symbol"


def _without_holes(node: Node, other: Node) -> Node:
    r"""Returns a formula without a restriction: \frac1x for \frac1x, x ≠ 0; a_n = 2^n, n ≥ 1.

    Single points and the start of a sequence do not count, unless both answers name some.
    """
    if node.kind not in ("list", "and") or any(_is_hole(part) for part in other.parts):
        return node
    formulas = [part for part in node.parts if not _is_hole(part)]
    if len(formulas) != 1 or len(formulas) == len(node.parts):
        return node
    formula = formulas[0]
    if formula.kind == "relation" and formula.name == "=":
        name, formula = formula.parts[0], formula.parts[-1]
        # x = 2k\pi, k ≥ 0 has other values than x = 2k\pi.
        has_index = name.kind in ("apply", "multiply") or "_" in name.name
        if not has_index and not all(part.name == "≠" for part in node.parts[1:]):
            return node
    if is_statement(formula):
        return node
    restricted = [_restricted_name(part) for part in node.parts if _is_hole(part)]
    return formulas[0] if symbol_names(formula) >= {*restricted} else node


def _is_hole(node: Node) -> bool:
    """Returns whether a relation is x ≠ a, or n ≥ 1 for an index."""
    if node.kind != "relation" or len(node.parts) != 2:
        return False
    if node.name == "≠":
        return node.parts[0].kind == "symbol"
    low, name = node.parts
    is_start = node.name == "≤" and low.kind == "number" and low.value <= 2
    return is_start and name.kind == "symbol" and is_index(name.name)


def _restricted_name(hole: Node) -> str:
    return hole.parts[0 if hole.name == "≠" else 1].name


def _same_statement(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares the statements of two answers about their names.

    If only one of them has names, its values are compared with the other: x = 3 with 3, and 0 < x <
    1 with (0, 1).
    """
    prediction, gold = _without_name(prediction, gold), _without_name(gold, prediction)
    prediction, gold = _without_holes(prediction, gold), _without_holes(gold, prediction)
    if not is_statement(prediction) and not is_statement(gold):
        return equal(prediction, gold, rules)
    prediction, gold = with_points(prediction), with_points(gold)
    named = with_each_name(prediction), with_each_name(gold)
    if named != (prediction, gold) and gold.kind != "number":
        return _same_statement(*named, rules)
    # Solutions such as x = kπ, k ∈ ℤ, are compared as families.
    prediction, parameters = integer_parameters(settled(prediction))
    gold, gold_parameters = integer_parameters(settled(gold))
    if (parameters or gold_parameters) and _same_families(
        prediction, parameters, gold, gold_parameters, rules
    ):
        return True
    if parameters != gold_parameters and gold_parameters:
        return False
    if not is_statement(prediction) and not is_statement(gold):
        return equal(prediction, gold, rules)
    predicted_solutions = solutions(prediction) if is_statement(prediction) else None
    gold_solutions = solutions(gold) if is_statement(gold) else None
    # One side without names is compared with the values of the other; two statements are compared
    # name by name. Statements without solutions fall through to relations and sets.
    if not is_statement(prediction):
        if gold_solutions is not None:
            return _same_values(gold_solutions, prediction, rules, is_gold=True)
    elif not is_statement(gold):
        if predicted_solutions is not None:
            if gold.kind == "list":
                predicted_solutions = _without_indices(predicted_solutions)
            return _same_values(predicted_solutions, gold, rules, is_gold=False)
    elif predicted_solutions is not None and gold_solutions is not None:
        if _same_solutions(predicted_solutions, gold_solutions, rules):
            return True
        # x_1 = 3, x_2 = 2 are the two values of x = 2, 3.
        values, gold_values = map(_without_indices, (predicted_solutions, gold_solutions))
        if (values is predicted_solutions) != (gold_values is gold_solutions):
            return _same_solutions(values, gold_values, rules)
        # The multiplicities of the gold count.
        if len(_without_repeated(gold_solutions)) < len(gold_solutions):
            return False
    return _same_relations(prediction, gold, rules)


def _same_relations(prediction: Node, gold: Node, rules: Rules) -> bool:
    numbers, gold_numbers = real_set(prediction), real_set(gold)
    if numbers is not None and gold_numbers is not None:
        names_differ = numbers.name != gold_numbers.name and None not in (
            numbers.name,
            gold_numbers.name,
        )
        if names_differ or numbers.domain != gold_numbers.domain:
            return False
        # An index is a whole number: 1 ≤ n ≤ 5 are five numbers.
        if _are_points(numbers.pieces) != _are_points(gold_numbers.pieces):
            numbers, gold_numbers = map(of_whole_numbers, (numbers, gold_numbers))
        # The gold gives values, so an equation that is still to be solved is no answer.
        if rules.strict and _has_equation_to_solve(prediction) and solutions(gold) is not None:
            return False
        return _same_pieces(numbers.pieces, gold_numbers.pieces, rules)
    if is_statement(prediction) != is_statement(gold):
        interval, gold_interval = _symbolic_interval(prediction), _symbolic_interval(gold)
        are_intervals = not is_statement(interval) and not is_statement(gold_interval)
        return are_intervals and equal(interval, gold_interval, rules)
    conjunctions, gold_conjunctions = alternatives(prediction), alternatives(gold)
    if conjunctions is None or gold_conjunctions is None:
        return _same_parts(prediction, gold, rules)
    return _matches(conjunctions, gold_conjunctions, _same_conjunction)


def _are_points(pieces: Pieces) -> bool:
    return all(low.number == high.number for low, high in pieces)


def _has_equation_to_solve(statement: Node) -> bool:
    """Returns whether a statement has an equation that is not solved for a name, such as 2x = 6."""
    relations = itertools.chain(*(alternatives(statement) or ()))
    return any(part.name == "=" and assignment(part) is None for part in relations)


def _matches(items: Sequence[T], gold_items: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Returns whether items and gold items can be paired, each with an equal one."""
    if len(items) != len(gold_items):
        return False
    unmatched = list(gold_items)
    for item in items:
        # The first match is as good as any other, because equality is transitive: no
        # backtracking.
        index = next((index for index, other in enumerate(unmatched) if same(item, other)), None)
        if index is None:
            return False
        del unmatched[index]
    return True


# Solutions


def _same_solutions(
    predicted: tuple[Solution, ...],
    gold: tuple[Solution, ...],
    rules: Rules,
) -> bool:
    # A prediction may repeat a solution, unless the gold itself does.
    distinct = _without_repeated(gold)
    if len(distinct) == len(gold):
        predicted = _without_repeated(predicted)

    def same(solution: Solution, gold_solution: Solution) -> bool:
        if len(solution) != len(gold_solution):
            return False
        for name, number in gold_solution.items():
            matches = (key for key in solution if key == name or equal(key, name, rules))
            match = next(matches, None)
            if match is None or not equal(solution[match], number, rules):
                return False
        return True

    return _matches(predicted, gold, same)


def _without_repeated(given_solutions: tuple[Solution, ...]) -> tuple[Solution, ...]:
    distinct: list[Solution] = []
    for solution in given_solutions:
        if solution not in distinct:
            distinct.append(solution)
    return tuple(distinct)


def _without_indices(given_solutions: tuple[Solution, ...]) -> tuple[Solution, ...]:
    """Returns x = 3, x = 2 for x_1 = 3, x_2 = 2; other solutions unchanged."""
    if len(given_solutions) != 1 or len(given_solutions[0]) < 2:
        return given_solutions
    (solution,) = given_solutions
    bases = {name.name.partition("_")[0] for name in solution}
    are_indexed = all(name.kind == "symbol" and "_" in name.name for name in solution)
    if len(bases) != 1 or not are_indexed:
        return given_solutions
    name = symbol(bases.pop())
    return tuple({name: number} for number in solution.values())


def _same_values(
    named_solutions: tuple[Solution, ...],
    other: Node,
    rules: Rules,
    is_gold: bool,
) -> bool:
    """Compares solutions with an answer without names; `is_gold` is true if the solutions are the
    gold.

    The values of several names have the order of the names: x=3, y=4 is the tuple (3, 4) and the
    list 3, 4, but not 4, 3, and not a set.
    """
    names = list(named_solutions[0])
    if any(list(solution) != names for solution in named_solutions):
        return False
    if len(names) == 1:
        values = tuple(solution[names[0]] for solution in named_solutions)
        node = values[0] if len(values) == 1 else Node("list", values)
        return equal(other, node, rules) if is_gold else equal(node, other, rules)
    # Several names: each solution is a tuple.
    tuples = [_coordinates(solution, other) for solution in named_solutions]
    if len(tuples) > 1:
        node = Node("list", tuple(tuples))
    else:
        node = tuples[0]
        # The list 3, 4 in the order of the names is the same as the tuple (3, 4).
        if other.kind == "list":
            other = other._replace(kind="tuple", name="()")
    return equal(other, node, rules) if is_gold else equal(node, other, rules)


def _coordinates(solution: Solution, other: Node) -> Node:
    """Returns (1, 2) for x = 1, y = 2, and also for y = 2, x = 1 if the other answer is a point."""
    names = list(solution)
    if other.kind == "tuple" and {name.name for name in names} in ({*"xy"}, {*"xyz"}):
        names.sort(key=lambda name: name.name)
    return Node("tuple", tuple(solution[name] for name in names), name="()")


def _same_families(
    prediction: Node,
    parameters: frozenset[str],
    gold: Node,
    gold_parameters: frozenset[str],
    rules: Rules,
) -> bool:
    """Compares solutions that contain a whole number: x = π/4 + kπ, k ∈ ℤ."""
    formulas, gold_formulas = _formulas(prediction), _formulas(gold)
    if not formulas or not gold_formulas:
        return False
    names = {name for name, _ in (*formulas, *gold_formulas) if name is not None}
    # The families must be about the same name.
    if len(names) > 1:
        return False

    def same(formula: Node, gold_formula: Node) -> bool:
        formula_names, gold_names = symbol_names(formula), symbol_names(gold_formula)
        if not formula_names and not gold_names:
            return equal(formula, gold_formula, rules)
        if len(formula_names) != 1 or len(gold_names) != 1:
            return False
        (name,), (gold_name,) = formula_names, gold_names
        # k ∈ ℤ may be declared in one of the answers only.
        are_parameters = (not parameters or name in parameters) and (
            not gold_parameters or gold_name in gold_parameters
        )
        # Declared parameters may be renamed: kπ, k ∈ ℤ, is nπ, n ∈ ℤ. An undeclared symbol may be
        # a given quantity, so its name counts.
        is_same_name = name == gold_name or (parameters and gold_parameters)
        if not are_parameters or not is_same_name:
            return False
        return same_family(formula, name, gold_formula, gold_name)

    items = [formula for _, formula in formulas]
    gold_items = [formula for _, formula in gold_formulas]
    return _matches(items, gold_items, same)


def _formulas(node: Node) -> list[tuple[Node | None, Node]]:
    if not is_statement(node):
        parts = node.parts if node.kind in ("list", "set") else (node,)
        return [(None, part) for part in parts]
    given_solutions = solutions(node)
    if given_solutions is None or any(len(solution) != 1 for solution in given_solutions):
        return []
    return [next(iter(solution.items())) for solution in given_solutions]


# Relations


def _same_conjunction(relations: Conjunction, gold: Conjunction) -> bool:
    return _matches(relations, gold, _same_relation)


def _same_relation(relation: Node, gold: Node) -> bool:
    """Compares side by side. All terms may also be moved to one side and scaled."""
    if relation.kind != gold.kind or relation.kind != "relation":
        return relation.kind == gold.kind and _same_parts(relation, gold, LENIENT)
    relation, gold = _from_left_to_right(relation), _from_left_to_right(gold)
    operator = relation.name
    if operator != gold.name:
        return False
    if operator in ("≅", "∼") and relation.parts[0].name.startswith("triangle "):
        return _same_correspondence(relation, gold)
    if _all_equal(relation.parts, gold.parts, LENIENT):
        return True
    # The sides of an equation may be exchanged.
    if operator in ("=", "≠", "≅", "∼", "⊥", "∥") and _all_equal(
        relation.parts[::-1], gold.parts, LENIENT
    ):
        return True
    # Chains and memberships have no difference of two sides.
    if len(operator) > 1 or operator not in "=≠<≤":
        return False
    difference, gold_difference = _left_minus_right(relation), _left_minus_right(gold)
    if is_scaled(operator, difference, gold_difference):
        return True
    return operator in "=≠" and is_same_curve(difference, gold_difference)


def _same_correspondence(relation: Node, gold: Node) -> bool:
    """Returns whether two relations of triangles pair the same vertices: ABC ≅ DEF, BCA ≅ EFD."""
    pairs = []
    for sides in (relation.parts, gold.parts):
        names = [side.name for side in sides]
        if len(names) != 2 or not all(name.startswith("triangle ") for name in names):
            return False
        first, second = (name.removeprefix("triangle ") for name in names)
        if len(first) != len(second):
            return False
        pairs.append(set(zip(first, second, strict=True)))
    # The triangles of one relation may be exchanged.
    return pairs[1] in (pairs[0], {(second, first) for first, second in pairs[0]})


def _from_left_to_right(relation: Node) -> Node:
    if relation.name not in (">", "≥"):
        return relation
    return Node("relation", relation.parts[::-1], name="<" if relation.name == ">" else "≤")


def _left_minus_right(relation: Node) -> Node:
    left, right = relation.parts
    return Node("add", (left, negative(right)))


def _symbolic_interval(node: Node) -> Node:
    """Returns the interval [a, b) for a ≤ x < b, and (a, infinity) for a < x; other trees
    unchanged.
    """
    if node.kind != "relation":
        return node
    operators, sides = node.name, node.parts
    if operators == "∈" and sides[0].kind == "symbol":
        return sides[1]
    if len(sides) == 2:
        # x < b is the interval from minus infinity to b.
        if is_name(sides[0]):
            operators, sides = "<" + operators, (negative(INFINITY), *sides)
        else:
            operators, sides = operators + "<", (*sides, INFINITY)
    if not set(operators) <= {"<", "≤"}:
        return node
    if not is_name(sides[1]) or mentions(sides[0], sides[1]) or mentions(sides[2], sides[1]):
        return node
    opening = "[" if operators[0] == "≤" else "("
    closing = "]" if operators[1] == "≤" else ")"
    return Node("tuple", (sides[0], sides[2]), name=opening + closing)


def _same_congruence(prediction: Node, gold: Node) -> bool:
    if not _has_congruence(gold) and not _has_congruence(prediction):
        return False
    if gold.kind == "number" and prediction.kind in ("modulo", "congruence"):
        remainder, modulus = prediction.parts  # 3 (mod 7) is 3
        is_reduced = remainder.kind == modulus.kind == "number" and remainder.value < modulus.value
        return is_reduced and 0 <= remainder.value == gold.value
    expected = residues(gold)
    predicted = None if expected is None else residues(prediction)
    if predicted is None or expected is None or predicted.modulus == 1:
        return False
    names_differ = predicted.name != expected.name and None not in (predicted.name, expected.name)
    return not names_differ and _period(predicted) == _period(expected)


@functools.lru_cache(4096)
def _has_congruence(node: Node) -> bool:
    is_progression = node.kind == "multiply" and node.parts[-1] == Node("domain", name="ℤ")
    is_congruence = node.kind in ("congruence", "modulo") or is_progression
    return is_congruence or any(map(_has_congruence, node.parts))


def _period(solved: Residues) -> tuple[int, frozenset[int]]:
    """Returns the smallest modulus that describes the residues, and the residues modulo it."""
    # From the smallest divisor on: 1, 3 (mod 4) is first recognized as 1 (mod 2).
    for divisor in range(1, solved.modulus + 1):
        if solved.modulus % divisor:
            continue
        reduced = frozenset(member % divisor for member in solved.members)
        if len(reduced) * (solved.modulus // divisor) == len(solved.members):
            return divisor, reduced
    return solved.modulus, solved.members


_TRUTH_VALUES = {"T": "true", "F": "false"} | {word: word for word in words("true false yes no")}
_SETS = ("union", "intersection", "setminus", "complement")
_PROPOSITIONS = ("and", "or", "not", "implies", "equivalent")
# The first of these kinds that either answer has decides how both are compared.
_STRUCTURES: dict[str, Callable[[Node, Node, Rules], bool]] = {
    "date": _same_dates,
    "text": _same_text,
    "matrix": _same_matrix,
    "rows": _same_parts,
    "row": _same_parts,
    "ratio": _same_ratio,
    **dict.fromkeys((*_SETS, *_PROPOSITIONS), _same_sets),
    "tuple": _same_tuple,
    "list": _same_members,
    "set": _same_members,
    "domain": _same_parts,
    "cartesian": _same_parts,
    "compose": _same_parts,
}
