r"""Unicode characters of mathematics, converted to LaTeX: x² is x^2, and ½ is \frac{1}{2}.

Most characters are read from Unicode's own tables: a mathematical italic x is an x, a superscript
is an exponent, a vulgar fraction is a fraction, any space is a space, and a character that only
controls the direction or the joining of text is removed. `_OPERATORS` has all others.

Digits of non-ASCII scripts, except full-width and mathematical ones, are left unchanged, and no
answer is read from them.
"""

import re
import unicodedata

from jzero.answers.vocabulary import inverted

FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒⅟↉"

# Characters without a decomposition in Unicode, or with one that has another meaning here.
_OPERATORS = {
    **inverted(
        {
            "-": "− ‐ ‑ ‒ – ﹣ － ˗ ➖ ⁃",
            "+": "➕",
            r"\times ": "× ✕ ✖ ⨯",
            r"\cdot ": "· ⋅ ∙ ‧ • ・ ･ ⁢",
            "*": "∗ ⁎ ∗ ✱ ﹡ ＊",
            "/": "÷ ∕ ➗ ⧸ ╱",
            r"\setminus ": "∖ ⧵ ﹨",
            r"\le ": "≤ ≦ ⩽ ≲",
            r"\ge ": "≥ ≧ ⩾ ≳",
            r"\ne ": "≠",
            r"\approx ": "≈ ≒ ≃",
            r"\equiv ": "≡",
            r"\sim ": "∼",
            "|": "∣ ǀ ❘ ｜",
            r"\|": "∥ ‖ ǁ",
            r"\angle ": "∠ ∡ ⦟",
            r"\triangle ": "△ ▵",
            r"\Delta ": "∆",
            r"\square ": "□",
            "°": "º ˚ ⚬",
            "'": "′ ’ ‘ ʹ ʼ ‛ ´",
            '"': "“ ” „ ‟ « » 「 」 『 』 ＂ 〝 〞",
            "<": "‹",
            ">": "›",
            r"\infty ": "∞ ♾",
            r"\in ": "∈ ∊",
            r"\notin ": "∉",
            r"\cup ": "∪ ⋃",
            r"\cap ": "∩ ⋂",
            r"\emptyset ": "∅ ⌀ ⦰",
            r"\subset ": "⊂",
            r"\subseteq ": "⊆ ⫅",
            r"\supset ": "⊃",
            r"\supseteq ": "⊇",
            r"\pm ": "±",
            r"\mp ": "∓",
            r"\langle ": "⟨ 〈 〈 ❬",
            r"\rangle ": "⟩ 〉 〉 ❭",
            r"\sum ": "∑ Σ",
            r"\prod ": "∏",
            r"\int ": "∫",
            r"\partial ": "∂",
            r"\nabla ": "∇",
            r"\forall ": "∀",
            r"\exists ": "∃",
            r"\land ": "∧ ⋀",
            r"\lor ": "∨ ⋁",
            r"\lnot ": "¬",
            r"\to ": "→ ⟶",
            r"\Rightarrow ": "⇒ ⟹",
            r"\Leftrightarrow ": "⇔ ⟺",
            r"\mapsto ": "↦",
            r"\therefore ": "∴",
            r"\because ": "∵",
            r"\ldots ": "… ⋯ ⋰ ⋱ ⋮",
            r"\parallel ": "⫽",
            r"\perp ": "⊥ ⟂",
            r"\cong ": "≅",
            r"\oplus ": "⊕",
            r"\otimes ": "⊗",
            r"\sqrt ": "√",
            r"\ell ": "ℓ",
            r"\hbar ": "ℏ",
            r"\imath ": "ı",
            ",": "， 、 ､ ، ﹐ ︐ ︑ ⁣",
            ";": "； ؛ ﹔",
            ":": "： ﹕ ∶ ꞉",
            ".": "。 ｡ ． ۔ ﹒ । ॥ ։ ።",
            "?": "？ ؟",
            "!": "！",
            "%": "％ ﹪ ٪",
            r"\lfloor ": "⌊",
            r"\rfloor ": "⌋",
            r"\lceil ": "⌈",
            r"\rceil ": "⌉",
            r"\qed ": "∎ ■ ▪",
            r"\checkmark ": "✓ ✔ ✅ ☑",
        }
    ),
    "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]",
    "″": "''",
    "‴": "'''",
    "⁄": "/",
    "ℝ": r"\mathbb{R}",
    "µ": r"\mu ",
    "Ω": r"\Omega ",
    "⅟": "1/",
    "\u2061": " ",  # function application
    "\u2064": "+",  # invisible plus, of a mixed number
    "ϵ": r"\epsilon ",
    "ϑ": r"\theta ",
    "ϕ": r"\phi ",
    "ϖ": r"\pi ",
    "ϱ": r"\rho ",
}
del _OPERATORS["Σ"]  # the Greek letter
# Greek letters that look like Latin ones have no command, and become Latin letters.
_GREEK_NAMES = {
    "LAMDA": "lambda",
    "FINAL SIGMA": "sigma",
    "OMICRON": "o",
}
_LATIN_LOOKALIKES = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX", strict=True))
_LOWER_GREEK_ONLY = frozenset("ΥϒΥ")
# The styles of mathematical letters that are distinct symbols.
_STYLES = {
    "DOUBLE-STRUCK": r"\mathbb",
    "SCRIPT": r"\mathcal",
    "BOLD SCRIPT": r"\mathcal",
    "FRAKTUR": r"\mathfrak",
    "BOLD FRAKTUR": r"\mathfrak",
    "BLACK-LETTER": r"\mathfrak",
}
_STYLE = re.compile(
    "(?:MATHEMATICAL )?(DOUBLE-STRUCK|BOLD SCRIPT|SCRIPT|BOLD FRAKTUR|FRAKTUR|BLACK-LETTER) "
    "(?:CAPITAL|SMALL) [A-Z]"
)
_GREEK_LETTER = re.compile("GREEK (CAPITAL|SMALL) LETTER ([A-Z ]+)")
# Compatibility characters that end with the power of a unit: ㎡.
_POWER_OF_UNIT = re.compile("(?<=[a-z])[23]")
_RECURRING = {
    "\u0305": r"\overline",
    "\u0304": r"\overline",
    "\u0307": r"\dot",
}
_RECURRING_DIGITS = re.compile("((?:[0-9][\u0304\u0305])+|(?:[0-9]\u0307))")


def _decomposition(character: str) -> tuple[str, str]:
    """Returns Unicode's decomposition of a character: a kind such as "<super>", and a text."""
    kind, *code_points = unicodedata.decomposition(character).split() or [""]
    if not kind.startswith("<"):
        return "", ""
    characters = [chr(int(code_point, 16)) for code_point in code_points]
    return kind, "".join(characters)


def _greek(character: str) -> str:
    """Returns the command of a Greek letter, "" for any other character."""
    match = _GREEK_LETTER.fullmatch(unicodedata.name(character, ""))
    if character in _LATIN_LOOKALIKES:
        return _LATIN_LOOKALIKES[character]
    if match is None:
        return ""
    name = _GREEK_NAMES.get(match[2], match[2].lower())
    if " " in name or character in _LOWER_GREEK_ONLY:
        return ""
    if name == "o":
        return name
    return f"\\{name.capitalize() if match[1] == 'CAPITAL' else name} "


def written_out_character(character: str) -> str:
    """Returns LaTeX or ASCII for a character, or the character itself if it has no equivalent."""
    if character in _OPERATORS:
        return _OPERATORS[character]
    category = unicodedata.category(character)
    if category == "Cf" or "\ufe00" <= character <= "\ufe0f":  # direction marks, variations
        return ""
    if category in ("Zs", "Zl", "Zp"):
        return " " if category == "Zs" else "\n"
    # A styled letter is another symbol than the plain letter: ℱ is not F.
    style = _STYLE.fullmatch(unicodedata.name(character, ""))
    kind, plain = _decomposition(character)
    if style and plain:
        return f"{_STYLES[style[1]]}{{{plain}}}"
    if kind == "<fraction>":
        numerator, _, denominator = plain.partition("⁄")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    if kind == "<super>" and len(plain) == 1:
        return f"^{{{_plain(plain)}}}"
    if kind == "<sub>" and len(plain) == 1:
        return f"_{{{_plain(plain)}}}"
    if kind == "<square>":
        return _POWER_OF_UNIT.sub(r"^\g<0>", _plain(plain))
    if kind == "<circle>":  # a choice, ⓑ
        return f"({_plain(plain)})"
    if kind in ("<font>", "<wide>", "<narrow>", "<small>", "<compat>", "<noBreak>"):
        return _plain(plain)
    singleton = unicodedata.normalize("NFC", character)  # the ohm sign is an omega
    if singleton != character and len(singleton) == 1:
        return written_out_character(singleton)
    return _greek(character) or character


def _plain(text: str) -> str:
    return "".join(map(_ascii_or_written_out, text))


def _ascii_or_written_out(character: str) -> str:
    return character if character.isascii() else written_out_character(character)


# Punctuation that has a meaning at the end of an answer.
_MEANINGFUL_ENDS = frozenset("‰‱′″‴…％﹪٪！＂＇")


class _Table(dict[int, str]):
    """A table for str.translate that converts a character when it first occurs."""

    def __missing__(self, code_point: int) -> str:
        written = _ascii_or_written_out(chr(code_point))
        self[code_point] = written
        return written


_CHARACTERS = _Table()
# Runs of scripts make one exponent: x¹⁰ is x^{10}.
_RUN_OF_SCRIPTS = re.compile(r"(?:\^\{[^{}]\}){2,}|(?:_\{[^{}]\}){2,}")
_ONE_SCRIPT = re.compile(r"([_^])\{([^{}])\}(?![0-9.])")
_SMALL_FRACTION = re.compile(r"\^(?:\{([0-9]+)\}|([0-9]))/_(?:\{([0-9]+)\}|([0-9]))")


def _script(match: re.Match[str]) -> str:
    run = match[0]
    # Each script of the run has four characters, as in ^{1}.
    return f"{run[0]}{{{run[2::4]}}}"


def _small_fraction(match: re.Match[str]) -> str:
    numerator, denominator = match[1] or match[2], match[3] or match[4]
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _recurring(match: re.Match[str]) -> str:
    run = match[0]
    # A combining mark follows each digit.
    return f"{_RECURRING[run[1]]}{{{run[::2]}}}"


def without_last_punctuation(text: str) -> str:
    """Returns `text` without full stops and other punctuation of any script at its end."""
    end = len(text)
    while end and not text[end - 1].isascii() and text[end - 1] not in _MEANINGFUL_ENDS:
        if unicodedata.category(text[end - 1]) not in ("Po", "Zs", "Cf"):
            break
        end -= 1
    return text[:end]


def written_out(text: str) -> str:
    """Returns `text` with its non-ASCII characters as LaTeX or ASCII."""
    if text.isascii():
        return text
    # After normalization, digits with a bar or dot are still two characters, and "=" with a stroke
    # is "≠".
    text = unicodedata.normalize("NFC", text)
    text = _RECURRING_DIGITS.sub(_recurring, text)
    text = text.translate(_CHARACTERS)
    text = _RUN_OF_SCRIPTS.sub(_script, text)
    # Braces would end a \text{...} around a unit such as m².
    text = _ONE_SCRIPT.sub(r"\1\2", text)
    return _SMALL_FRACTION.sub(_small_fraction, text)
