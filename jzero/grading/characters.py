r"""Unicode characters of mathematics, written out in LaTeX: x² is x^2, and ½ is \frac{1}{2}."""

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿˣ", "0123456789+-=()nx", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₓ", "0123456789+-=()nx", strict=True))
FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_FULL_WIDTH = dict(zip("（）［］｛｝，；：．＝＋－＜＞％", "()[]{},;:.=+-<>%", strict=True))
_GREEK = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "zeta": "ζ",
    "eta": "η",
    "iota": "ι",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "nu": "ν",
    "xi": "ξ",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "phi": "φ",
    "chi": "χ",
    "psi": "ψ",
    "omega": "ω",
    "Gamma": "Γ",
    "Delta": "Δ",
    "Theta": "Θ",
    "Lambda": "Λ",
    "Sigma": "Σ",
    "Phi": "Φ",
    "Psi": "Ψ",
    "Omega": "Ω",
}


def _written_fraction(character: str) -> str:
    # Unicode says that ½ is 1⁄2, with a slash of its own.
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


_CHARACTERS = str.maketrans(
    {
        **{character: _written_fraction(character) for character in FRACTIONS},
        **{character: rf"\{name} " for name, character in _GREEK.items()},
        **_FULL_WIDTH,
        "⁄": "/",
        "∛": r"\sqrt[3]",
        "∜": r"\sqrt[4]",
    }
)
_SMALL_FRACTION = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]+)[⁄/]([₀₁₂₃₄₅₆₇₈₉]+)")
_RUN_ABOVE = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_RUN_BELOW = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")


def _above(match: re.Match[str]) -> str:
    return _script("^", match[0], _SUPERSCRIPTS)


def _below(match: re.Match[str]) -> str:
    return _script("_", match[0], _SUBSCRIPTS)


def _script(operator: str, run: str, table: dict[str, str]) -> str:
    written = "".join(table[character] for character in run)
    # Braces would end a \text{...} around a unit such as m².
    return operator + (written if len(written) == 1 else f"{{{written}}}")


def _small_fraction(match: re.Match[str]) -> str:
    numerator = "".join(_SUPERSCRIPTS[character] for character in match[1])
    denominator = "".join(_SUBSCRIPTS[character] for character in match[2])
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def written_out(text: str) -> str:
    """Returns `text` with LaTeX or ASCII for the characters of this module.

    Digits of other scripts stay as they are, and no answer is read from them.
    """
    if text.isascii():
        return text
    text = _SMALL_FRACTION.sub(_small_fraction, text)
    text = _RUN_ABOVE.sub(_above, text)
    text = _RUN_BELOW.sub(_below, text)
    return text.translate(_CHARACTERS)
