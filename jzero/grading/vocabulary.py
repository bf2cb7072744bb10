r"""The words of mathematical answers: how LaTeX and English spell what the grammar knows.

`latex_lexer` brings every spelling of a token to one, `latex_parser` reads the names of functions,
Greek letters, units and brackets.
"""


def _inverted(table: dict[str, str]) -> dict[str, str]:
    """Returns {spelling: token} from {token: "its other spellings, between spaces"}."""
    result = {}
    for token, spellings in table.items():
        for spelling in spellings.split():
            result[spelling] = token
    return result


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Commands that only set type. They are dropped.
TYPESETTING = _words(
    """left right displaystyle quad qquad big Big bigl bigr
    mathbf mathit bm boldsymbol mathsf boxed rm bf it vec"""
)

FUNCTIONS = _words("sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log")

# Commands that are names of symbols.
GREEK = _words(
    """pi alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho
    sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega
    ell angle triangle"""
)

# Commands that may stand without their backslash.
COMMANDS_WITHOUT_BACKSLASH = FUNCTIONS | _words("sqrt pi ln arcsin arccos arctan")

# Every spelling of a token, with the token. Commands are without their backslash.
TOKENS = _inverted(
    {
        "\\frac": "dfrac tfrac cfrac",
        "\\binom": "dbinom tbinom",
        "\\emptyset": "varnothing ∅",
        "\\real": "R ℝ",
        "\\pi": "π",
        "\\theta": "θ",
        "\\sqrt": "√",
        "\\infty": "∞",
        "\\{": "lbrace",
        "\\}": "rbrace",
        "*": "times cdot ast × · ⋅",
        "/": "div ÷",
        "-": "− – ‐",
        "±": "pm",
        "∓": "mp",
        "∪": "cup",
        "∈": "in",
        ":": "colon {:}",
        ",": "{,} and or",
        "≤": "le leq leqslant <=",
        "≥": "ge geq geqslant >=",
        "<": "lt",
        ">": "gt",
        "≠": "ne neq !=",
        "≈": "approx",
        "⌊": "lfloor",
        "⌋": "rfloor",
        "⌈": "lceil",
        "⌉": "rceil",
        "|": "lvert rvert vert mid \\|",
        "(": "langle lparen ⟨",
        ")": "rangle rparen ⟩",
        "%": "\\% percent",
        "^": "**",
        "°": "circ degree",
        "\\log": "ln",
        "\\asin": "arcsin",
        "\\acos": "arccos",
        "\\atan": "arctan",
    }
)

# Every spelling of a unit, in the singular, with the unit's own name.
UNITS = _inverted(
    {
        "percent": "% pct percentage",
        "foot": "ft feet",
        "inch": "inche in",  # "inches" without its s
        "centimeter": "cm",
        "meter": "m",
        "kilometer": "km",
        "gram": "g gm",
        "kilogram": "kg",
        "pound": "lb",
        "second": "s sec",
        "minute": "min",
        "hour": "h hr",
        "dollar": "usd",
        "2": "square sq",  # square feet are feet to the power of 2
        "3": "cubic",
        "/": "per",
        "doesnotexist": "dne undefined",  # no unit, but an answer that has several spellings, too
    }
)

# Letters that are one word, although other runs of letters are products of symbols.
UNIT_WORDS = _words("mm mg oz mph day mile cent unit degree").union(UNITS, UNITS.values())

# Words after a number that are no unit: who writes them hedges, or gives two answers.
HEDGES = _words(
    """or and not if is it are was maybe perhaps but either neither otherwise both no wrong
    incorrect false answer then to than mod else possibly also unless when where"""
)

# An opening and a closing bracket, with the kind of node that they make.
BRACKETS = _inverted(
    {
        "tuple": "() (] [) []",
        "set": "{} \\{\\}",
        "abs": "|\\|",
        "floor": "⌊⌋",
        "ceil": "⌈⌉",
        "matrix": "\\begin\\end",
    }
)
