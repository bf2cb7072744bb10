"""Whether two quantities are the same: numbers with units, percentages, angles and times of day.

A unit may be missing on either side. Two units must be the same, unless the rules allow conversion.
"""

from collections.abc import Callable
from fractions import Fraction

from jzero.answers.evaluation import Value, is_exact, is_real, symbol_names, value
from jzero.answers.expressions import Node, mentions, split_unit, symbol
from jzero.answers.formulas import Rules, is_literal
from jzero.answers.quantities import (
    factor_between,
    is_product_of_symbols,
    is_scaled_by_ten,
    kelvin,
    measure,
    measure_the_same,
    named_unit,
    same_unit,
    unit_of_powers,
)

MINUTES_OF_DAY = 24 * 60


def has_quantity(node: Node) -> bool:
    return node.kind in ("unit", "degree", "compound") or is_time(node)


def same_quantity(
    prediction: Node,
    gold: Node,
    rules: Rules,
    equal: Callable[[Node, Node, Rules], bool],
) -> bool:
    """Compares two answers of which at least one has a unit. `equal` compares their numbers."""
    if is_time(prediction) or is_time(gold):
        return _same_time(prediction, gold)
    if "compound" in (prediction.kind, gold.kind):
        return _same_compound(prediction, gold, rules)
    inside, unit = split_unit(prediction)
    gold_inside, gold_unit = split_unit(gold)
    # 5·m is 5 meters if the gold is in meters. In the gold, letters are a product, unless they
    # are a quotient, as in m/s.
    if gold_unit and not unit:
        inside, unit = _with_unit_of_letters(inside, gold_unit)
        if not unit and without_unit_of_letters(inside) is not inside:
            return False  # the letters of 9.8 m/s^2 are another unit
    elif unit and not gold_unit and gold_inside.kind == "divide":
        gold_inside, gold_unit = _with_unit_of_letters(gold_inside, unit)
    if _leaves_rate_out(unit, gold_unit) or _leaves_rate_out(gold_unit, unit):
        return equal(inside, gold_inside, rules)
    if unit and gold_unit and not same_unit(unit, gold_unit):
        may_convert = rules.converts_units or _differ_by_prefix(
            inside, unit, gold_inside, gold_unit
        )
        return may_convert and _same_after_conversion(inside, unit, gold_inside, gold_unit)
    # The name of a base starts with "_": 101_2 is not 101, but 15_{10} is 15.
    if unit.startswith("_") and not gold_unit and unit != _BASE_TEN:
        return False
    if _same_percentage(inside, unit, gold_inside, gold_unit):
        return True
    if unit == "percent" and not gold_unit and _is_share(gold_inside):
        return False
    if unit != gold_unit and "degree" in (unit, gold_unit) and mentions(inside, symbol("pi")):
        return False  # a number with pi and without a unit is in radians, not in degrees
    return equal(inside, gold_inside, rules)


def _leaves_rate_out(unit: str, rate: str) -> bool:
    """Returns whether a rate of money or percent has another unit only in its "per hour"."""
    amount, _, per = rate.partition(" ")
    names = per.split()
    if unit not in _AMOUNTS or amount != unit or len(names) != 2 or names[1] != "-1":
        return False
    return measure_the_same(names[0], "second") or measure(names[0]) is None


_AMOUNTS = ("dollar", "euro", "cent", "rupee", "sterling", "yen", "yuan", "percent")
_BASE_TEN = f"_{Node('number', value=Fraction(10))!r}"


def _with_unit_of_letters(node: Node, unit: str) -> tuple[Node, str]:
    """Returns 5 and "meter" for 5·m if the other answer is in meters.

    If the letters are not that unit, returns the tree unchanged, without a unit.
    """
    powers = _powers_of_letters(node)
    if powers is None:
        return node, ""
    number, letters = powers
    names: dict[str, int] = {}
    for letter, power in letters:
        name = named_unit(letter)
        if name:
            names[name] = names.get(name, 0) + power
    # The letters may also spell one unit: k·m is a kilometer.
    is_spelled_out = all(power == 1 for _, power in letters)
    is_unit = len(names) > 0 and all(named_unit(letter) for letter, _ in letters)
    if is_unit and same_unit(unit_of_powers(names), unit):
        return number, unit
    if is_spelled_out and is_product_of_symbols((letter for letter, _ in letters), unit):
        return number, unit
    spelled = named_unit("".join(letter for letter, _ in letters))
    if is_spelled_out and letters[0][0] == "μ" and is_scaled_by_ten(spelled, unit):
        return number, spelled
    return node, ""


def _powers_of_letters(node: Node) -> tuple[Node, list[tuple[str, int]]] | None:
    """Returns a number and the powers of the letters after it; None for other products."""
    if node.kind == "divide":
        above = _powers_of_letters(node.parts[0])
        # Units in the denominator have negative powers.
        # The factor 1 turns a single letter in the denominator into a product.
        below = _powers_of_letters(Node("multiply", (_ONE, node.parts[1])))
        if above is None or below is None:
            return None
        inverted = [(letter, -power) for letter, power in below[1]]
        return above[0], above[1] + inverted
    if node.kind != "multiply":
        return None
    number, *factors = node.parts
    if symbol_names(number):
        return None
    letters = []
    for factor in factors:
        parts = factor.parts if factor.kind == "multiply" else (factor,)
        for part in parts:
            base, exponent = part.parts if part.kind == "power" else (part, _ONE)
            power = None if symbol_names(exponent) else value(exponent)
            if base.kind != "symbol" or power is None or not is_exact(power):
                return None
            if power.denominator != 1:
                return None
            letter = base.name.removeprefix("\\")
            letters.append(("μ" if letter == "mu" else letter, int(power)))
    return number, letters


_ONE = Node("number", value=Fraction(1))
_LEAST_OF_DECIMALS = Fraction(1, 100)  # smaller numbers count as written with a power of ten


def without_unit_of_letters(node: Node) -> Node:
    """Returns 9.8 for 9.8 m/s^2, whose letters can only be a unit; other trees unchanged."""
    powers = _powers_of_letters(node) if node.kind == "divide" else None
    if powers is None or len(powers[1]) < 2:
        return node
    number, letters = powers
    return number if all(named_unit(letter) for letter, _ in letters) else node


def _differ_by_prefix(inside: Node, unit: str, gold_inside: Node, gold_unit: str) -> bool:
    r"""Returns whether the power of ten of a number is the prefix of the other unit.

    5\times10^{-6} C is 5 μC, and 1.5\times10^{-10} m is 1.5 Å. Without a power of ten, 1 m and 100
    cm are answers in different units.
    """
    has_power = any(map(_has_power_of_ten, (inside, gold_inside)))
    return has_power and is_scaled_by_ten(unit, gold_unit)


def _has_power_of_ten(node: Node) -> bool:
    inside = node.parts[0] if node.kind == "negative" else node
    if inside.kind == "number":  # 5e-6
        return 0 < abs(inside.value) < _LEAST_OF_DECIMALS
    power = inside.parts[-1] if inside.kind == "multiply" else inside
    return power.kind == "power" and value(power.parts[0]) == 10


def _same_after_conversion(inside: Node, unit: str, gold_inside: Node, gold_unit: str) -> bool:
    if not is_literal(inside):
        return False
    number, gold_number = value(inside), value(gold_inside)
    if number is None or gold_number is None or not is_exact(number, gold_number):
        return False
    temperatures = kelvin(number, unit), kelvin(gold_number, gold_unit)
    if None not in temperatures:
        return temperatures[0] == temperatures[1]
    factor = factor_between(unit, gold_unit)
    return factor is not None and number * factor == gold_number


def _same_compound(prediction: Node, gold: Node, rules: Rules) -> bool:
    """Compares 6 ft 2 in with a compound of the same units or, with conversion, of any units."""
    quantities, gold_quantities = _quantities(prediction), _quantities(gold)
    units = sorted(unit for _, unit in quantities)
    if units != sorted(unit for _, unit in gold_quantities) and not rules.converts_units:
        return False
    # Totals in the smallest unit of the prediction. Both may name their units in any order.
    smallest = quantities[-1][1]
    totals = _total(quantities, smallest), _total(gold_quantities, smallest)
    return totals[0] is not None and totals[0] == totals[1]


def _quantities(node: Node) -> list[tuple[Node, str]]:
    parts = node.parts if node.kind == "compound" else (node,)
    return [split_unit(part) for part in parts]


def _total(quantities: list[tuple[Node, str]], unit: str) -> Fraction | None:
    total = Fraction(0)
    for inside, quantity_unit in quantities:
        number, factor = value(inside), factor_between(quantity_unit, unit)
        if number is None or factor is None or not is_exact(number) or not is_literal(inside):
            return None
        total += number * factor
    return total


def _same_percentage(inside: Node, unit: str, gold_inside: Node, gold_unit: str) -> bool:
    """Returns whether one answer is a percentage, and the other is the share of 1: 35% is 0.35."""
    if (unit == "percent") == (gold_unit == "percent") or not is_literal(inside):
        return False
    share = _share(inside, unit)
    return share is not None and is_exact(share) and share == _share(gold_inside, gold_unit)


def _share(inside: Node, unit: str) -> Value | None:
    number = value(inside)
    if number is None or unit != "percent":
        return number
    return number / 100


def _is_share(gold: Node) -> bool:
    """Returns whether a gold without a percent sign is a share of 1: 0.5% is not 0.5.

    A gold of 1 or more may answer "what percent": then the sign can be left out.
    """
    number = None if symbol_names(gold) else value(gold)
    return number is not None and is_real(number) and 0 < abs(number) < 1


# Times of day


def is_time(node: Node) -> bool:
    is_word = node.kind == "text" and node.name in ("noon", "midnight")
    return is_word or (node.kind == "unit" and node.name in ("am", "pm", "noon", "midnight"))


def _same_time(prediction: Node, gold: Node) -> bool:
    """Compares minutes since midnight. Without a.m. or p.m., 3:00 may be either of the two."""
    times, gold_times = _times_of_day(prediction), _times_of_day(gold)
    return bool(times) and bool(gold_times) and bool(times & gold_times)


def _times_of_day(node: Node) -> frozenset[Fraction]:
    """Returns the possible times of an answer, in minutes; empty if it is not a time."""
    if node.kind == "text":
        return frozenset((Fraction(12 * 60 if node.name == "noon" else 0),))
    half = node.name if is_time(node) else ""
    inside = split_unit(node)[0]
    parts = inside.parts if inside.kind == "ratio" else (inside,)
    numbers = [part.value for part in parts if part.kind == "number"]
    is_complete = len(numbers) == len(parts) and len(numbers) <= 3
    if not is_complete or (len(parts) == 1 and not half):
        return frozenset()
    hours, *smaller = numbers
    if hours.denominator != 1 or not all(0 <= part < 60 for part in smaller):
        return frozenset()
    minutes = Fraction(0)
    # The minutes, and the seconds as parts of a minute.
    for index, part in enumerate(smaller):
        minutes += part / Fraction(60) ** index
    if half in ("noon", "midnight"):
        half = "pm" if half == "noon" else "am"
    if half:
        if not 1 <= hours <= 12:
            return frozenset()
        # 12 a.m. is midnight, and 12 p.m. noon.
        start = Fraction(hours % 12 * 60 + (12 * 60 if half == "pm" else 0))
        return frozenset((start + minutes,))
    if not 0 <= hours <= 24:
        return frozenset()
    time = Fraction(hours * 60 + minutes)
    # Without a.m. or p.m., the time may be in either half of the day.
    if 1 <= hours < 12:
        return frozenset((time, time + MINUTES_OF_DAY // 2))
    # Without a half of the day, 12:00 is noon or midnight.
    return frozenset((time, time - 12 * 60) if hours == 12 else (time,))
