r"""Spellings of numbers: thousands separators, decimal commas, recurring decimals.

`plain_numerals` converts the unambiguous forms to digits with a decimal point. A recurring part
follows a bar, so that 0.1\overline{6} is 0.1¯6. `other_reading` returns the possible number of an
ambiguous form, which counts only if the other answer is that number.

| form                                  | number                                       |
|---------------------------------------|----------------------------------------------|
| 1,234,567.5 and 1{,}234               | 1234567.5; in open brackets (1,200) is a pair |
| 1 234 567, 3.141 592 65, 1'234        | 1234567, 3.14159265, 1234                    |
| 1.234.567,8                           | 1234567.8: two points group thousands        |
| 3{,}14 and 1 234{,}5                  | 3.14, 1234.5: LaTeX's decimal comma          |
| 0.\overline{37}, 0.\bar3, 0.(37)      | 37/99 and so on                              |
| 0.\dot1 4285\dot7, 0.333...           | 1/7, 1/3                                     |
| 1.5 x 10^3                            | 1500                                         |
| 1.234,50 and 1 234,5 and 12,34,567    | ambiguous: 1234.5, 1234567, or lists         |
| 3,14                                  | a list, but 3.14 if the gold is a decimal    |
| 1.234                                 | 1.234, and never 1234                        |
"""

import re

# A number must not start inside of another one, or inside of an exponent.
_START = r"(?<![0-9.^_])"
_END = r"(?![0-9])"

_GROUPED = re.compile(
    rf"""{_START}(?P<whole>
        # 1,234,567.5 and 1{{,}}234. After or before a group of other lengths it is a list.
        (?<![0-9],)[0-9]{{1,3}}(?:(?:,|\{{,\}})[0-9]{{3}}{_END})+(?!,[0-9])(?:\.[0-9]+)?
        # 1'234'567
        |[0-9]{{1,3}}(?:'[0-9]{{3}}{_END})+(?:\.[0-9]+)?
        # 1 234 567, with LaTeX's decimal comma or a decimal point
        |[0-9]{{1,3}}(?:[ ][0-9]{{3}}{_END})+
            (?:\{{,\}}(?:[0-9]{{1,2}}|[0-9]{{4,}}){_END}|\.[0-9]+{_END})?
        # 1.234.567,8
        |[0-9]{{1,3}}(?:\.[0-9]{{3}}{_END}){{2,}}(?:(?:,|\{{,\}})[0-9]+{_END})?
        # 3{{,}}14, but not 3{{,}}142, which groups thousands
        |[0-9]+\{{,\}}(?:[0-9]{{1,2}}|[0-9]{{4,}}){_END}
        # 3.141 592 65
        |[0-9]+\.[0-9]{{3}}(?:[ ][0-9]{{3}}{_END})*[ ][0-9]{{1,3}}{_END}
    )(?![0-9])""",
    re.VERBOSE,
)
_DECIMALS = re.compile(r",(?:[0-9]{1,2}|[0-9]{4,})(?![0-9])")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?:\.[0-9]+)?")
_OPENING_OR_CLOSING = re.compile(r"\\[{}]|[()\[\]]")

_OVERLINED = re.compile(
    r"(\.[0-9]*)(?:\\overline\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))"
    r"|\\bar\s*(?:\{\s*([0-9]+)\s*\}|([0-9])(?![0-9])))"
    r"(?:\s*\\ldots|\.{3})?"
)
_DOTTED = re.compile(
    r"(\.[0-9]*)\\dot\s*(?:\{([0-9])\}|([0-9]))(?:\s*([0-9]*)\s*\\dot\s*(?:\{([0-9])\}|([0-9])))?"
)
_IN_BRACKETS = re.compile(
    r"(?<![0-9.])([0-9]*\.[0-9]*)\(([0-9]+)\)(?=\s*(?:$|[,;)\]}=<>%]|\\[%}\]]|\\text|\\le|\\ge))"
)
_WITH_DOTS = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)\s*(?:\\ldots(?![A-Za-z])|\.{3})\s*")
_TIMES_X = re.compile(r"(?<=[0-9.])\s*[xX]\s*(?=10\s*\^)")

_BOTH_SEPARATORS = re.compile(
    r"[1-9][0-9]{0,2}(?:\.[0-9]{3}|(?: [0-9]{3})+),(?:[0-9]{1,2}|[0-9]{4,})"
)
_SUFFIX = r"(?:\s*\\?%|\s*[€£¥]|\s*\\text\{[^{}]*\})?"
_DECIMAL_COMMA = re.compile(rf"[-+]?[0-9]+,(?:[0-9]{{1,2}}|[0-9]{{4,}}){_SUFFIX}")
_DECIMAL = re.compile(rf"[-+]?[0-9]*\.[0-9]+{_SUFFIX}")
# Values as Python prints them.
_QUALIFIER = re.compile(
    r"(?<![A-Za-z\\.])(?:np|numpy|math|cmath|sympy|sp|fractions|decimal)\.(?=[A-Za-z])"
)
_FRACTION_OF_PYTHON = re.compile(
    r"(?<![A-Za-z\\])(?:Fraction|Rational)\(\s*(-?[0-9]+)\s*,\s*([0-9]+)\s*\)"
)
_NUMBER_OF_PYTHON = re.compile(
    r"(?<![A-Za-z\\])(?:Decimal|Integer|Float|float(?:16|32|64)?|int(?:32|64)?)"
    r"\(\s*['\"]?(-?[0-9.]+(?:e[-+]?[0-9]+)?)['\"]?\s*\)"
)
_UNDERSCORES = re.compile(r"(?<![\w}])[0-9]{1,3}(?:_[0-9]{3}){2,}(?![0-9_{])")
_COMPLEX_OF_PYTHON = re.compile(r"\A\s*(\(?-?[0-9.]+[-+][0-9.]+)j(\)?)\s*\Z")
_INFINITE = re.compile(r"\A\s*(-?)(?:inf|Infinity|oo)\s*\Z")
_INDIAN = re.compile(r"[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?")


# Values that sympy prints: oo, floor(n/2), sqrt(3)*I/2.
_CALLS_OF_PYTHON = [
    (re.compile(pattern), notation)
    for pattern, notation in (
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty"),
        (r"(?<![A-Za-z\\])floor\(([^()]*)\)", r"\\lfloor \1\\rfloor "),
        (r"(?<![A-Za-z\\])ceil(?:ing)?\(([^()]*)\)", r"\\lceil \1\\rceil "),
        (r"(?<![A-Za-z\\])[Aa]bs\(([^()]*)\)", r"|\1|"),
        (r"(?<![A-Za-z\\])binomial\(([^(),]*),([^(),]*)\)", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])factorial\(([^(),]*)\)", r"(\1)!"),
        (r"(?<=\*)I(?![A-Za-z0-9_^])|(?<![A-Za-z\\])I(?=\*)", "i"),
    )
]


def without_python(text: str) -> str:
    """Returns the notation of values that Python prints: Fraction(1, 3), np.float64(0.5)."""
    text = _QUALIFIER.sub("", text)
    text = _FRACTION_OF_PYTHON.sub(r"\\frac{\1}{\2}", text)
    text = _NUMBER_OF_PYTHON.sub(r"\1", text)
    if "(" in text or "*" in text or "oo" in text:
        for pattern, notation in _CALLS_OF_PYTHON:
            text = pattern.sub(notation, text)
    text = _UNDERSCORES.sub(lambda number: number[0].replace("_", ""), text)
    text = _COMPLEX_OF_PYTHON.sub(r"\1i\2", text)
    return _INFINITE.sub(r"\1\\infty", text)


def plain_numerals(text: str) -> str:
    """Returns `text` with all numbers in digits with a decimal point."""
    if not any(character.isdigit() for character in text):
        return text
    if "." in text:
        text = _recurring(text)
    text = _TIMES_X.sub(r"\\times ", text)
    pieces = []
    depth = position = 0
    for match in _GROUPED.finditer(text):
        between = text[position : match.start()]
        depth += _change_of_depth(between)
        numeral = match["whole"]
        # 1 234,5 is a number or a list: `other_reading` decides.
        is_ambiguous = depth <= 0 and " " in numeral and _DECIMALS.match(text, match.end())
        written = numeral if is_ambiguous else _ungrouped(numeral, in_brackets=depth > 0)
        pieces += [between, written]
        position = match.end()
    return "".join([*pieces, text[position:]]) if pieces else text


def _change_of_depth(text: str) -> int:
    change = 0
    for bracket in _OPENING_OR_CLOSING.findall(text):
        change += 1 if bracket in ("(", "[", "\\{") else -1
    return change


def _ungrouped(numeral: str, in_brackets: bool) -> str:
    if _THOUSANDS.fullmatch(numeral):
        # In brackets, 1,200 is a pair; 1{,}200 is always a number.
        return numeral if in_brackets and "{" not in numeral else re.sub("[,{}]", "", numeral)
    if in_brackets and "," in numeral and "{" not in numeral:
        return numeral
    has_comma = "," in numeral
    digits = re.sub(r"[ '{}]", "", numeral)
    if has_comma:
        return digits.replace(".", "").replace(",", ".")
    # Several points group thousands; a single point is the decimal point.
    return digits.replace(".", "") if digits.count(".") > 1 else digits


def _recurring(text: str) -> str:
    if "\\" in text:
        text = _OVERLINED.sub(_with_bar, text)
        text = _DOTTED.sub(_with_bar, text)
    if "(" in text:
        text = _IN_BRACKETS.sub(r"\1¯\2", text)
    if "..." in text or "\\ldots" in text:
        text = _WITH_DOTS.sub(_repeated, text)
    return text


def _with_bar(match: re.Match[str]) -> str:
    nonrecurring, *digits = match.groups()
    return f"{nonrecurring}¯{''.join(filter(None, digits))}"


def _repeated(match: re.Match[str]) -> str:
    """Returns 0.¯3 for 0.333..., and the digits unchanged if none repeat often enough.

    One or two digits must be written three times, more digits twice.
    """
    integer_part, decimals = match[1] or "0", match[2]
    # From the shortest period on: 0.333333 repeats 3, and not 33.
    for length in range(1, len(decimals) // 2 + 1):
        times = 3 if length <= 2 else 2
        period = decimals[-length:]
        if decimals.endswith(period * times):
            start = len(decimals)
            while start >= length and decimals[start - length : start] == period:
                start -= length
            return f"{integer_part}.{decimals[:start]}¯{period}"
    return f"{integer_part}.{decimals}"


def with_decimal_point(text: str, gold: str) -> str:
    """Returns 3.14 for "3,14" if the gold is a decimal number, otherwise "".

    If the gold is a list, or a whole number, "3,14" is a list.
    """
    text = text.strip()
    is_one_decimal = _DECIMAL.fullmatch(gold.strip()) is not None
    return text.replace(",", ".") if is_one_decimal and _DECIMAL_COMMA.fullmatch(text) else ""


def other_reading(text: str) -> str:
    """Returns the other possible number of an ambiguous `text`, "" if it is not ambiguous."""
    text = text.strip()
    sign = text[:1] if text[:1] in ("-", "+") else ""
    numeral = text[len(sign) :].strip()
    if _BOTH_SEPARATORS.fullmatch(numeral):
        return sign + re.sub("[ .]", "", numeral).replace(",", ".")
    if _INDIAN.fullmatch(numeral):
        return sign + numeral.replace(",", "")
    return ""
