"""Numbers in the forms in which people write them, and forms that are none."""

import pytest

from jzero.answers.numerals import other_reading, plain_numerals


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1,234,567.5", "1234567.5"),
        ("1{,}234", "1234"),
        ("(1,200)", "(1,200)"),
        ("(1{,}200)", "(1200)"),
        ("[1 200, 3]", "[1200, 3]"),
        ("1 234 567", "1234567"),
        ("3.141 592 65", "3.14159265"),
        ("1'234'567", "1234567"),
        ("1.234.567", "1234567"),
        ("1.234.567,89", "1234567.89"),
        ("3{,}14", "3.14"),
        ("1 234{,}5", "1234.5"),
        (r"0.\overline{37}", "0.¯37"),
        (r"0.1\bar{6}", "0.1¯6"),
        ("0.1(6)", "0.1¯6"),
        ("0.(37)", "0.¯37"),
        (r"0.\dot{1}4285\dot{7}", "0.¯142857"),
        ("0.333...", "0.¯3"),
        (r"0.1666\ldots", "0.1¯6"),
        ("3.14159...", "3.14159"),
        ("1.5 x 10^3", r"1.5\times 10^3"),
    ],
)
def test_a_form_of_one_meaning_becomes_digits(text, plain) -> None:
    assert plain_numerals(text) == plain


@pytest.mark.parametrize(
    "text",
    [
        "1,00",
        "1,2,3",
        "1,0000",
        "1.234",
        "1,2,345",
        "12,34",
        "1 2345",
        "1.2.3",
        "x^2 345",
        "0.5(3)+1",
        "0.5(3)(4)",
        "f(1.5)(2)x",
        "3 x 4",
        "192.168.1.1",
    ],
)
def test_any_other_form_stays_as_it_is(text) -> None:
    assert plain_numerals(text) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.234,50", "1234.50"),
        ("1 234,5", "1234.5"),
        ("-12,34,567", "-1234567"),
        ("1,5", ""),
        ("1.234", ""),
        ("1.234,567", ""),
        ("1,2,3", ""),
        ("0.234,50", ""),
    ],
)
def test_an_ambiguous_form_has_another_reading(text, number) -> None:
    assert other_reading(text) == number
