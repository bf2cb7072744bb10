"""The words of mathematical answers: the LaTeX and English spellings that the grammar knows.

`latex_lexer` reduces all spellings of a token to one. `latex_parser` reads the names of functions,
Greek letters and brackets. The words of units are in `units`.
"""


def inverted(table: dict[str, str]) -> dict[str, str]:
    """Returns {spelling: token} from {token: "its other spellings, between spaces"}."""
    result = {}
    for token, spellings in table.items():
        for spelling in spellings.split():
            result[spelling] = token
    return result


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Commands that only control typesetting. They are dropped.
TYPESETTING = words(
    """left right middle displaystyle quad qquad big Big bigg Bigg bigl bigr biggl biggr Bigl Bigr
    mathit mathsf boxed rm bf it"""
)

FUNCTIONS = words(
    """sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch
    asinh acosh atanh acoth asech acsch exp log lg sgn cis"""
)

# Kinds of nodes that bind a symbol: their parts are a formula, the symbol and the limits.
BINDERS = frozenset(("sum", "product", "integral", "limit"))

# Commands that are functions with values unknown to the grader: they are only compared.
OPAQUE_FUNCTIONS = words("gcd lcm max min det deg dim Pr")

# Signs of money, which stand before or after an amount.
CURRENCIES = frozenset(("\\$", "€", "£", "¥", "₹", "¢"))

# Commands that are names of symbols.
GREEK = words(
    """pi alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho
    sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega
    ell hbar angle triangle"""
)

# Commands that may be written without their backslash.
COMMANDS_WITHOUT_BACKSLASH = (
    FUNCTIONS | words("sqrt pi ln arcsin arccos arctan arccot arsinh arcosh artanh tg ctg")
) - {"sgn"}

# Every spelling of a token, with the token. Commands are without their backslash.
TOKENS = inverted(
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
        "*": "cdot ast · ⋅",
        "×": "times",
        "∘": "circ",
        "⊕": "oplus",
        "≅": "cong",
        "∼": "sim",
        "⊥": "perp",
        "∥": "parallel",
        "/": "div ÷",
        "-": "− – ‐",
        "±": "pm",
        "∓": "mp",
        "∪": "cup",
        "∩": "cap",
        "∈": "in",
        ":": "colon {:}",
        ",": "{,}",
        "∧": "wedge land",
        "∨": "vee lor",
        "¬": "neg lnot",
        "→": "to rightarrow implies Rightarrow longrightarrow Longrightarrow ⇒",
        "↔": "iff leftrightarrow Leftrightarrow longleftrightarrow ⇔",
        "∖": "setminus smallsetminus backslash",
        "≡": "equiv",
        '"Re': "Re",
        "T": "top intercal",
        '"Im': "Im",
        "\\prod": "∏",
        "\\sum": "∑",
        "\\int": "∫",
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
        "€": "euro texteuro",
        "£": "pounds textsterling",
        "¥": "yen textyen",
        "'": "prime ′",
        "^": "**",
        "°": "degree",
        "\\log": "ln",
        "\\asin": "arcsin",
        "\\acos": "arccos",
        "\\atan": "arctan arctg",
        "\\acot": "arccot arcctg",
        "\\asec": "arcsec",
        "\\acsc": "arccsc",
        "\\asinh": "arcsinh arsinh",
        "\\acosh": "arccosh arcosh",
        "\\atanh": "arctanh artanh",
        "\\tan": "tg",
        "\\cot": "ctg cotg",
        "\\sgn": "sign",
        "\\hbar": "hslash ħ ℏ",
    }
)

# An opening and a closing bracket, with the kind of their node.
BRACKETS = inverted(
    {
        "tuple": "() (] [) []",
        "set": "{} \\{\\}",
        "abs": "|\\|",
        "floor": "⌊⌋",
        "ceil": "⌈⌉",
        "matrix": "\\begin\\end",
    }
)
