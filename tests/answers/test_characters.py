"""Unicode characters: whole blocks, with the names of Unicode's own database as the oracle."""

import unicodedata

import pytest

from jzero.answers.characters import written_out
from jzero.answers.verdict import grade

DIGIT_NAMES = ["ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"]
STYLES = {"DOUBLE-STRUCK": r"\mathbb", "SCRIPT": r"\mathcal", "FRAKTUR": r"\mathfrak"}


def named(first: int, last: int, *parts: str) -> list[tuple[str, list[str]]]:
    """Returns characters of a block whose names have all `parts`, with the words of the name."""
    found = []
    for code_point in range(first, last + 1):
        words = unicodedata.name(chr(code_point), "").split()
        if all(part in words for part in parts):
            found.append((chr(code_point), words))
    return found


def test_mathematical_letters_are_letters_in_a_style() -> None:
    letters = named(0x1D400, 0x1D6A3, "MATHEMATICAL")

    assert len(letters) > 600
    for character, words in letters:
        if words[-1] not in [chr(code) for code in range(ord("A"), ord("Z") + 1)]:
            continue
        letter = words[-1] if "CAPITAL" in words else words[-1].lower()
        commands = [command for style, command in STYLES.items() if style in words]
        expected = f"{commands[0]}{{{letter}}}" if commands else letter
        assert written_out(character) == expected, words


def test_mathematical_greek_letters_are_commands() -> None:
    for character, words in named(0x1D6A8, 0x1D7C9, "MATHEMATICAL", "SMALL"):
        name = words[-1].lower().replace("lamda", "lambda")
        if "SYMBOL" in words or "FINAL" in words or name in ("omicron", "epsilon"):
            continue
        assert written_out(character).strip() == f"\\{name}", words


@pytest.mark.parametrize(
    ("first", "last", "part"),
    [(0x1D7CE, 0x1D7FF, "MATHEMATICAL"), (0xFF10, 0xFF19, "FULLWIDTH")],
)
def test_digits_in_a_style_are_digits(first, last, part) -> None:
    characters = named(first, last, part, "DIGIT")
    assert len(characters) >= 10
    for character, words in characters:
        assert written_out(character) == str(DIGIT_NAMES.index(words[-1]))


@pytest.mark.parametrize(
    ("first", "last", "part", "operator"),
    [
        (0x2070, 0x209C, "SUPERSCRIPT", "^"),
        (0x00B2, 0x00B9, "SUPERSCRIPT", "^"),
        (0x2070, 0x209C, "SUBSCRIPT", "_"),
    ],
)
def test_raised_and_lowered_digits_are_scripts(first, last, part, operator) -> None:
    for character, words in named(first, last, part):
        if words[-1] in DIGIT_NAMES:
            assert written_out(f"x{character}") == f"x{operator}{DIGIT_NAMES.index(words[-1])}"


def test_vulgar_fractions_have_the_value_of_the_character() -> None:
    fractions = named(0x00BC, 0x00BE, "VULGAR") + named(0x2150, 0x215E, "VULGAR")

    assert len(fractions) == 18
    for character, _ in fractions:
        value = unicodedata.numeric(character)
        assert grade(character, f"{value!r}", template="answer").correct or value % 0.125


def test_full_width_ascii_is_ascii() -> None:
    for code_point in range(0x21, 0x7F):
        character, wide = chr(code_point), chr(code_point + 0xFEE0)
        if character not in "-*~\\`^'\"":  # these have other full-width forms, or are no answers
            assert written_out(wide).strip() == character
            assert unicodedata.name(wide) == f"FULLWIDTH {unicodedata.name(character)}"


def test_spaces_and_invisible_characters_do_not_count() -> None:
    for code_point in range(0x110000):
        character = chr(code_point)
        category = unicodedata.category(character)
        if category == "Zs":
            assert written_out(character) == " ", hex(code_point)
        elif category == "Cf" and not 0x2061 <= code_point <= 0x2064:
            assert written_out(character) == "", hex(code_point)


# What a name says of an operator, and how LaTeX writes it.
OPERATORS = {
    "MINUS SIGN": "-",
    "MULTIPLICATION SIGN": r"\times",
    "DIVISION SIGN": "/",
    "DOT OPERATOR": r"\cdot",
    "ASTERISK OPERATOR": "*",
    "DIVISION SLASH": "/",
    "SET MINUS": r"\setminus",
    "LESS-THAN OR EQUAL TO": r"\le",
    "LESS-THAN OR SLANTED EQUAL TO": r"\le",
    "GREATER-THAN OR EQUAL TO": r"\ge",
    "GREATER-THAN OR SLANTED EQUAL TO": r"\ge",
    "NOT EQUAL TO": r"\ne",
    "ALMOST EQUAL TO": r"\approx",
    "IDENTICAL TO": r"\equiv",
    "DIVIDES": "|",
    "ANGLE": r"\angle",
    "WHITE UP-POINTING TRIANGLE": r"\triangle",
    "DEGREE SIGN": "°",
    "PRIME": "'",
    "SQUARE ROOT": r"\sqrt",
    "CUBE ROOT": r"\sqrt[3]",
    "INFINITY": r"\infty",
    "ELEMENT OF": r"\in",
    "UNION": r"\cup",
    "INTERSECTION": r"\cap",
    "EMPTY SET": r"\emptyset",
    "SUBSET OF": r"\subset",
    "PLUS-MINUS SIGN": r"\pm",
    "N-ARY SUMMATION": r"\sum",
    "N-ARY PRODUCT": r"\prod",
    "INTEGRAL": r"\int",
    "LOGICAL AND": r"\land",
    "LOGICAL OR": r"\lor",
    "NOT SIGN": r"\lnot",
    "RIGHTWARDS ARROW": r"\to",
    "RIGHTWARDS DOUBLE ARROW": r"\Rightarrow",
    "THEREFORE": r"\therefore",
    "HORIZONTAL ELLIPSIS": r"\ldots",
    "DOUBLE-STRUCK CAPITAL R": r"\mathbb{R}",
    "DOUBLE-STRUCK CAPITAL Z": r"\mathbb{Z}",
    "DOUBLE-STRUCK CAPITAL N": r"\mathbb{N}",
    "DOUBLE-STRUCK CAPITAL C": r"\mathbb{C}",
    "DOUBLE-STRUCK CAPITAL Q": r"\mathbb{Q}",
    "IDEOGRAPHIC FULL STOP": ".",
    "IDEOGRAPHIC COMMA": ",",
    "ARABIC COMMA": ",",
    "ARABIC FULL STOP": ".",
    "LEFT DOUBLE QUOTATION MARK": '"',
    "OHM SIGN": r"\Omega",
    "MICRO SIGN": r"\mu",
    "GREEK SMALL LETTER PI": r"\pi",
    "GREEK SMALL LETTER LAMDA": r"\lambda",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name) -> None:
    assert written_out(unicodedata.lookup(name)).strip() == OPERATORS[name]


def test_digits_of_other_scripts_are_no_digits() -> None:
    for zero in ("\u0660", "\u06f0", "\u0966", "\u09e6"):
        eighteen = chr(ord(zero) + 1) + chr(ord(zero) + 8)
        assert not grade(eighteen, "18", template="answer").correct


def test_every_character_has_a_verdict() -> None:
    for code_point in (*range(0x80, 0x3400), *range(0xF900, 0x10000), *range(0x1D400, 0x1D800)):
        if not 0xD800 <= code_point < 0xE000:
            character = chr(code_point)
            if written_out(character).strip():  # what is nothing leaves the 5
                assert not grade(f"5{character}3", "7", template="answer").correct


def test_full_stops_of_any_script_may_end_an_answer() -> None:
    stops = [
        character
        for character in map(chr, range(0x80, 0x3100))
        if any(
            word in unicodedata.name(character, "")
            for word in (
                "FULL STOP",
                "DANDA",
                "IDEOGRAPHIC COMMA",
                "ARABIC COMMA",
                "PUNCTUATION MARK",
            )
        )
        and unicodedata.category(character) == "Po"
    ]
    assert len(stops) > 8
    for stop in stops:
        assert grade(f"12{stop}", "12", template="answer").correct, unicodedata.name(stop)
        assert not grade(f"12{stop}", "13", template="answer").correct
