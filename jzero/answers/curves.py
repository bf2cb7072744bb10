"""Whether two equations or inequalities have the same solutions, by their two differences of sides.

x + y < 1 and 2x + 2y - 2 < 0 have proportional differences; xy = 1 and y = 1/x have differences
with the same zeros.
"""

from fractions import Fraction

from jzero.answers.evaluation import MP, NEGLIGIBLE, Place, Value, is_real, symbol_names, value
from jzero.answers.expressions import Node
from jzero.answers.formulas import agree, sample_points
from jzero.answers.sampling import BASIC_POINTS


def is_scaled(operator: str, difference: Node, gold_difference: Node) -> bool:
    """Returns whether one difference is a constant multiple of the other.

    An inequality is reversed if its sides are multiplied by a negative number.
    """
    if symbol_names(difference) != symbol_names(gold_difference):
        return False
    quotient = Node("divide", (difference, gold_difference))
    scales = []
    for point in sample_points(difference, gold_difference):
        scale = value(quotient, point)
        if scale is not None and scales and not agree(scales[0], scale, point):
            return False
        if scale is not None:
            scales.append(scale)
    # One point shows no proportion.
    if len(scales) < 2 or not scales[0]:
        return False
    return operator in ("=", "≠") or scales[0].real > 0


def is_same_curve(difference: Node, gold_difference: Node) -> bool:
    """Returns whether two differences are zero at the same points: xy - 1 and y - 1/x.

    If one of them is linear or quadratic in a symbol, it is solved at sampled values of the other
    symbols, and its real zeros must be zeros of the other difference; and the other way around.
    """
    names = symbol_names(gold_difference)
    if len(names) < 2 or symbol_names(difference) != names:
        return False
    # A place cannot fix the value of an unknown function.
    if any(name.endswith("()") for name in names):
        return False
    both = ((difference, gold_difference), (gold_difference, difference))
    return all(_zeros_are_zeros(first, second, sorted(names)) for first, second in both)


def _zeros_are_zeros(first: Node, second: Node, names: list[str]) -> bool:
    for name in names:
        num_zeros = 0
        for point in BASIC_POINTS:
            zeros = _zeros(first, name, point)
            if zeros is None:
                break
            # The zeros of one formula must be zeros of the other one.
            for zero in zeros:
                residual = value(second, Place(point, ((name, zero),)))
                # The zero is rounded, and the other formula may enlarge its error.
                if residual is None or abs(residual) > NEGLIGIBLE:
                    return False
                num_zeros += 1
        else:
            # Formulas without real zeros at these points, such as x^2 + y^2 + 1, show nothing.
            if num_zeros >= 4:
                return True
    return False


def _zeros(formula: Node, name: str, point: int) -> list[Value] | None:
    """Returns the real zeros in one symbol, None if the formula is not of degree 1 or 2 in it."""
    samples = []
    for number in (0, 1, 2, 3, -5):
        sample = value(formula, Place(point, ((name, Fraction(number)),)))
        if sample is None or not is_real(sample):
            return None
        samples.append(MP.convert(sample))
    constant, at_one, at_two, *checks = samples
    quadratic = (at_two - 2 * at_one + constant) / 2
    linear = at_one - constant - quadratic
    small = MP.mpf(10) ** -90 * (1 + max(map(abs, samples)))
    # Three samples define the parabola; the other two check that the formula is one.
    for number, sample in zip((3, -5), checks, strict=True):
        # At -5 the error of the quadratic coefficient counts 25 times.
        if abs(quadratic * number**2 + linear * number + constant - sample) > 100 * small:
            return None
    if abs(quadratic) > small:
        discriminant = linear**2 - 4 * quadratic * constant
        if discriminant < 0:
            return []
        root = MP.sqrt(discriminant)
        larger = (-linear + root) / (2 * quadratic)
        smaller = (-linear - root) / (2 * quadratic)
        return [larger, smaller]
    return [-constant / linear] if abs(linear) > small else None
