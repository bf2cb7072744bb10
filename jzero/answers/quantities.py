"""Units of measure: their spellings, dimensions and sizes.

The name of a unit consists of the names of its factors in order, each followed by its power unless
that is 1: "foot 2", "meter second -2". Symbols are case-sensitive: mW is a milliwatt, and MW a
megawatt. Words are not.
"""

import functools
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from jzero.answers.vocabulary import words


class Measure(NamedTuple):
    """The size of a unit in base units, and the powers of the base units."""

    size: Fraction
    dimension: tuple[tuple[str, int], ...]


# Each unit is defined by earlier ones, with its symbols and other spellings.
#
# name: (symbols; words; size; definition)
# The gram is a base unit instead of the kilogram, so that prefixes apply to all units in one way.
# Currencies and temperatures are bases of their own, because no constant factor converts them. A
# becquerel is one per second, too, but not a hertz.
_BASE_UNITS = {
    "meter": ("m", "metre"),
    "gram": ("g gm", "gramme"),
    "second": ("s sec", "sec"),
    "ampere": ("A", "amp"),
    "kelvin": ("K", ""),
    "mole": ("mol", ""),
    "candela": ("cd", ""),
    "radian": ("rad", ""),
    "byte": ("B", ""),
    "dollar": ("\\$ USD US\\$", "buck"),
    "euro": ("EUR €", ""),
    "yen": ("JPY ¥", ""),
    "rupee": ("INR ₹", ""),
    "sterling": ("GBP £", ""),
    "percent": ("%", "pct percentage"),
    "celsius": ("", ""),
    "becquerel": ("Bq", ""),
    "fahrenheit": ("", ""),
    "yuan": ("RMB CNY", ""),
    "ruble": ("RUB ₽", ""),
    "decibel": ("dB", ""),
    "debye": ("D", ""),
    "revolution": ("rev", ""),
    "part": ("", ""),
}
_DERIVED_UNITS = {
    "minute": ("min", "", 60, "second"),
    "hour": ("h hr", "hr", 3600, "second"),
    "day": ("d", "", 86400, "second"),
    "week": ("wk", "", 604800, "second"),
    "hertz": ("Hz", "", 1, "second -1"),
    "newton": ("N", "", 1000, "gram meter second -2"),
    "joule": ("J", "", 1000, "gram meter 2 second -2"),
    "watt": ("W", "", 1000, "gram meter 2 second -3"),
    "pascal": ("Pa", "", 1000, "gram meter -1 second -2"),
    "coulomb": ("C", "", 1, "ampere second"),
    "volt": ("V", "", 1000, "gram meter 2 second -3 ampere -1"),
    "ohm": ("Ω Omega", "", 1000, "gram meter 2 second -3 ampere -2"),
    "farad": ("F", "", "1/1000", "gram -1 meter -2 second 4 ampere 2"),
    "tesla": ("T", "", 1000, "gram second -2 ampere -1"),
    "gauss": ("G", "", "1/10", "gram second -2 ampere -1"),
    "weber": ("Wb", "", 1000, "gram meter 2 second -2 ampere -1"),
    "henry": ("H", "", 1000, "gram meter 2 second -2 ampere -2"),
    "siemens": ("S", "", "1/1000", "gram -1 meter -2 second 3 ampere 2"),
    "liter": ("L l", "litre", "1/1000", "meter 3"),
    "molar": ("M", "", 1000, "mole meter -3"),
    "bar": ("bar", "", 10**8, "gram meter -1 second -2"),
    "atmosphere": ("atm", "", 101325000, "gram meter -1 second -2"),
    "torr": ("torr Torr mmHg", "", "101325000/760", "gram meter -1 second -2"),
    "electronvolt": ("eV", "", "1602176634/10000000000000000000000000", "gram meter 2 second -2"),
    # The thermochemical calorie.
    "calorie": ("cal", "", 4184, "gram meter 2 second -2"),
    "watthour": ("Wh", "watt-hour", 3600000, "gram meter 2 second -2"),
    "ton": ("t", "tonne", 10**6, "gram"),
    "hectare": ("ha", "", 10000, "meter 2"),
    "angstrom": ("Å", "ångström", "1/10000000000", "meter"),
    "astronomical": ("AU au", "", 149597870700, "meter"),
    "lightyear": ("ly", "light-year", 9460730472580800, "meter"),
    "slug": ("", "", "1459390294/100000", "gram"),
    "dyne": ("dyn", "", 1, "gram meter second -2"),
    "erg": ("", "", "1/10000", "gram meter 2 second -2"),
    "dalton": ("amu u Da", "", "166053906660/100000000000000000000000000000000000", "gram"),
    "rpm": ("rpm", "", "1/60", "revolution second -1"),
    "horsepower": ("hp", "", 745700, "gram meter 2 second -3"),
    "psi": ("psi", "", "6894757", "gram meter -1 second -2"),
    "ppm": ("ppm", "", "1/1000000", "part"),
    "ppb": ("ppb", "", "1/1000000000", "part"),
    "inch": ("in", "inche", "254/10000", "meter"),
    "foot": ("ft", "feet", "3048/10000", "meter"),
    "yard": ("yd", "", "9144/10000", "meter"),
    "mile": ("mi", "", "1609344/1000", "meter"),
    "ounce": ("oz", "", "28349523125/1000000000", "gram"),
    # Measures of the United States where they differ from the imperial ones.
    "pound": ("lb lbs", "", "45359237/100000", "gram"),
    "acre": ("", "", "40468564224/10000000", "meter 2"),
    "gallon": ("gal", "", "3785411784/1000000000000", "meter 3"),
    "quart": ("qt", "", "946352946/1000000000000", "meter 3"),
    "pint": ("pt", "", "473176473/1000000000000", "meter 3"),
    # An arc, and not a part of a radian: sizes are rational, and π is not.
    "degree": ("deg", "", 1, "arc"),
    "arcminute": ("", "", "1/60", "arc"),
    "cent": ("¢", "", "1/100", "dollar"),
    "bit": ("bit", "", "1/8", "byte"),
}
# Abbreviations of compound units.
_COMPOUND_SYMBOLS = {
    "mph": "hour -1 mile",
    "kph": "hour -1 kilometer",
    "kmh": "hour -1 kilometer",
    "kmph": "hour -1 kilometer",
    "mpg": "gallon -1 mile",
    "cc": "centimeter 3",
    "kPA": "kilopascal",
    "KPA": "kilopascal",
    # Products without a sign. In capitals or small letters they would be other units.
    "Nm": "meter newton",
    "kNm": "kilonewton meter",
    "Ns": "newton second",
    "Js": "joule second",
    "Pas": "pascal second",
    "Vs": "second volt",
    "As": "ampere second",
    "Ah": "ampere hour",
    "mAh": "hour milliampere",
    "Ws": "second watt",
}
PREFIXES = {
    "kilo": ("k", 3),
    "mega": ("M", 6),
    "giga": ("G", 9),
    "tera": ("T", 12),
    "peta": ("P", 15),
    "deca": ("da", 1),
    "hecto": ("h", 2),
    "deci": ("d", -1),
    "centi": ("c", -2),
    "milli": ("m", -3),
    "micro": ("μ µ u", -6),
    "nano": ("n", -9),
    "pico": ("p", -12),
    "femto": ("f", -15),
}
_WITH_PREFIX = words(
    """meter gram second ampere mole byte bit hertz newton joule watt pascal coulomb volt ohm farad
    tesla gauss weber henry siemens becquerel liter molar bar electronvolt calorie watthour ton
    kelvin"""
)
# Symbols that usually have another meaning: p.m. is a time.
_NOT_SYMBOLS = words("am pm as at")
_SPECIAL_WORDS = {"kilo": "kilogram", "kg's": "kilogram", "micron": "micrometer"}


def _tables() -> tuple[dict[str, str], dict[str, str], dict[str, Measure]]:
    """Returns {symbol: unit}, {word: unit} and {unit: its measure}, with all prefixes."""
    symbols: dict[str, str] = {}
    spellings: dict[str, str] = dict(_SPECIAL_WORDS)
    measures: dict[str, Measure] = {"arc": Measure(Fraction(1), (("arc", 1),))}
    unit_symbols: dict[str, list[str]] = {}

    def add(name: str, symbol_text: str, word_text: str, measure: Measure) -> None:
        measures[name] = measure
        unit_symbols[name] = symbol_text.split()
        symbols.update(dict.fromkeys(symbol_text.split(), name))
        spellings.update(dict.fromkeys([name, *word_text.split()], name))

    for name, (spelled_symbols, spelled_words) in _BASE_UNITS.items():
        add(name, spelled_symbols, spelled_words, Measure(Fraction(1), ((name, 1),)))
    for name, (spelled_symbols, spelled_words, size, definition) in _DERIVED_UNITS.items():
        measure = _product(measures, powers_of_unit(definition))
        add(
            name,
            spelled_symbols,
            spelled_words,
            Measure(measure.size * Fraction(size), measure.dimension),
        )
    for prefix, (spelled_symbols, exponent) in PREFIXES.items():
        for name in _WITH_PREFIX:
            size, dimension = measures[name]
            prefixed = prefix + name
            measures[prefixed] = Measure(size * Fraction(10) ** exponent, dimension)
            spellings[prefixed] = prefixed
            # The spellings kilometre and millilitre.
            if name in ("meter", "liter"):
                spellings[prefix + name[:-2] + "re"] = prefixed
            for symbol in unit_symbols[name]:
                for prefix_symbol in spelled_symbols.split():
                    # A unit's own symbol wins over a prefixed one: ft is the foot, not the
                    # femtoton.
                    symbols.setdefault(prefix_symbol + symbol, prefixed)
    for symbol in _NOT_SYMBOLS:
        symbols.pop(symbol, None)
    return symbols, spellings, measures


def powers_of_unit(name: str) -> dict[str, int]:
    """Returns {factor: power} of the name of a unit."""
    powers: dict[str, int] = {}
    last = ""
    for word in name.split():
        if word.lstrip("-").isdigit() and last:
            powers[last] = int(word)
        else:
            last = word
            powers[last] = 1
    return powers


def _product(measures: Mapping[str, Measure], powers: Mapping[str, int]) -> Measure:
    size, dimension = Fraction(1), dict[str, int]()
    for name, power in powers.items():
        factor = measures[name]
        size *= factor.size**power
        for base, exponent in factor.dimension:
            dimension[base] = dimension.get(base, 0) + exponent * power
    # Bases that cancel are left out, so that equal dimensions are equal tuples.
    remaining = sorted(item for item in dimension.items() if item[1])
    return Measure(size, tuple(remaining))


_SYMBOLS, _WORDS, _MEASURES = _tables()
UNIT_NAMES = frozenset(_MEASURES)
# KM and Ft are not symbols, but can have no other meaning. Nm and S can.
_SYMBOLS_IN_ANY_CASE = words(
    """cm mm km kg ft lb lbs oz gm hr sec min mol atm gal psi rpm ppm ppb deg rad bar torr cal kcal
    yd hp"""
)
# Runs of letters that are units even outside of \\text. Other symbols, such as dt, may be products
# there.
LETTERS_OF_UNITS = words(
    """cm mm km kg mg ml mL ft lb lbs oz gm mph kph kmh cc hr sec min Hz kHz MHz GHz kPa MPa kJ kW
    kWh MW GW eV keV MeV GeV mol mmol atm kN kV mV mW mA kcal mpg gal USD EUR Wh nm rad in"""
)


def named_unit(word: str) -> str:
    """Returns the name of a unit from its symbol or a word in the singular, "" for other words."""
    if word in _COMPOUND_SYMBOLS:
        return _COMPOUND_SYMBOLS[word]
    if word in _SYMBOLS:
        return _SYMBOLS[word]
    lower = word.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    return _SYMBOLS[lower] if lower in _SYMBOLS_IN_ANY_CASE else ""


def unit_of_powers(powers: Mapping[str, int]) -> str:
    """Returns the name of a product of units; a compound factor, such as mph, is split."""
    factors: dict[str, int] = {}
    for name, power in powers.items():
        for factor, factor_power in powers_of_unit(name).items():
            factors[factor] = factors.get(factor, 0) + factor_power * power
    # "5 degrees Celsius" is 5 Celsius.
    if factors.keys() & {"celsius", "fahrenheit"}:
        factors.pop("degree", None)
    names = []
    for factor in sorted(factors):
        power = factors[factor]
        if power:
            names.append(factor if power == 1 else f"{factor} {power}")
    return " ".join(names)


@functools.lru_cache(1024)
def measure(name: str) -> Measure | None:
    """Returns the measure of a unit, None if one of its factors is not a unit: 5 apples."""
    powers = powers_of_unit(name)
    if not powers or any(factor not in _MEASURES for factor in powers):
        return None
    return _product(_MEASURES, powers)


def measure_the_same(first: str, second: str) -> bool:
    """Returns whether two units have the same dimension."""
    one, other = measure(first), measure(second)
    return one is not None and other is not None and one.dimension == other.dimension


def same_unit(first: str, second: str) -> bool:
    """Returns whether two names denote the same unit: N is kg·m/s², and L is dm³."""
    if first == second or {first, second} == {"pound", "sterling"}:  # £5 are 5 pounds
        return True
    one, other = measure(first), measure(second)
    return one is not None and one == other


def factor_between(unit: str, other: str) -> Fraction | None:
    """Returns the number of `other` units in one `unit`; None if their dimensions differ.

    Degrees of temperature have no factor, because their zeros differ.
    """
    one, second = measure(unit), measure(other)
    if one is None or second is None or one.dimension != second.dimension:
        return None
    return one.size / second.size


def is_scaled_by_ten(unit: str, other: str) -> bool:
    """Returns whether a power of ten leads from one unit to the other, as from mC to C."""
    factor = factor_between(unit, other)
    if factor is None:
        return False
    digits = f"{factor.numerator}{factor.denominator}"
    return set(digits) == {"1", "0"} and digits.count("1") == 2


def kelvin(number: Fraction, unit: str) -> Fraction | None:
    """Returns a temperature in kelvin, None if the unit does not measure temperature."""
    if unit == "kelvin":
        return number
    if unit == "celsius":
        return number + Fraction(27315, 100)
    if unit == "fahrenheit":
        return (number - 32) * Fraction(5, 9) + Fraction(27315, 100)
    return None


def is_product_of_symbols(letters: Iterable[str], unit: str) -> bool:
    """Returns whether single letters, such as k and m, spell a unit or the symbols of its factors.

    This decides whether 5 km, which may be 5·k·m, has the unit of the other answer.
    """
    letters = list(letters)
    if same_unit(named_unit("".join(letters)), unit):
        return True
    powers: dict[str, int] = {}
    for letter in letters:
        name = named_unit(letter)
        if not name:
            return False
        powers[name] = powers.get(name, 0) + 1
    return same_unit(unit_of_powers(powers), unit)
