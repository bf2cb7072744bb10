"""LaTeX or plain text of an answer -> tokens -> a tree of tuples, within limits. Evaluates nothing.

Nodes: (num, Fraction, place of its last decimal or 0) (sym, name) (text, words) (inf,) (add, ...) (mul, ...)
(div, a, b) (neg, a) (pow, a, b) (mixed, a, b) (root, degree, a) (log, x, base) and other functions by name,
(unit, a, name) (deg, a, "degree") (ratio, ...) (list, ...) (set, ...) (union, ...) (tuple, brackets, ...)
(matrix, (rows, (row, ...), ...)) (rel, operators, ...). Plus-minus makes two items of one."""

import functools
import re
import tomllib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from string import ascii_letters
from typing import Any, NoReturn

TOKENS, DEPTH, ITEMS, EXPONENT = 300, 60, 40, 1000

Node = Any  # a tuple, hashable; its kind comes first


def refuse(why: str) -> NoReturn:
    raise ValueError(why)


WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
SPELLINGS, UNITS, KINDS = (
    {word: one for one, words in WORDS[table].items() for word in words.split()}
    for table in ("spellings", "units", "brackets")
)
DROPPED, FUNCTIONS, GREEK, HEDGES = (
    WORDS[words].split() for words in ("dropped", "functions", "greek", "hedges")
)
# Tokens: numbers "1.5" and "0.¯6", letters "x", words '"meters', commands "\frac", single characters
UNIT_WORDS, BARE = (
    {*WORDS["measures"].split(), *UNITS, *UNITS.values()},
    {*WORDS["bare"].split(), *FUNCTIONS},
)
LEXER = re.compile(
    r"""(?P<space>[\s~]+|\\[,!;:>\s()\[\]]|\ban\s+(?=[a-z]{4}))
    |\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|operatorname)\s*\{(?P<text>[^{}]*)\}
    |(?P<grouped>[0-9]{1,3}(?:(?:,|\{,\}|\\,|[ ]|,\s*\\!\s*|\\!\s*,\s*|\\[ ])[0-9]{3}(?![0-9]))+(?:\.[0-9]+)?)
    |(?P<number>[0-9]*\.[0-9]*¯[0-9]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?:[0-9]+|[-+][0-9]{2,}))?)
    |\\(?P<command>[a-zA-Z]+) |(?P<run>(?:[A-Za-z]\.){2,}|[A-Za-z]+)
    |(?P<other>\{[,:]\}|\\\\|\\[{}%&|$]|\*\*|<=|>=|!=|!!|.)""",
    re.VERBOSE | re.DOTALL,
)


def lex(match: re.Match[str], prose: bool = False) -> list[str]:
    """The tokens of one match; letters in prose are words."""
    kind, before = match.lastgroup or "", match.string[: match.start()]
    piece: str = match[kind]
    if kind == "command" or (piece in BARE and not prose):
        return [] if piece in DROPPED else [SPELLINGS.get(piece, "\\" + piece)]
    if kind == "text":
        return [token for inside in LEXER.finditer(piece) for token in lex(inside, True)]
    if kind == "run" and piece not in ("and", "or"):
        apart = not before or before[-1] in " \n"
        known = len(piece) > 1 and piece.removesuffix("s") in UNIT_WORDS
        word = prose or known or (apart and len(piece) > 3) or (piece.isupper() and len(piece) > 2)
        return ['"' + piece.replace(".", "")] if word else list(piece)
    if kind == "grouped":
        opened, closed = (len(re.findall(some, before)) for some in (r"[(\[]|\\\{", r"[)\]]|\\\}"))
        if opened > closed and not set(piece) & set("\\{"):
            return re.findall(r"[0-9.]+|,", piece)  # (1,200) is a pair
        return [re.sub(r"[^0-9.]", "", piece)]
    return [] if kind == "space" or (prose and piece == ".") else [SPELLINGS.get(piece, piece)]


def number(token: str) -> Node:
    written, _, repeated = token.lower().partition("¯")
    mantissa, exponent, *_ = f"{written}e0".split("e")
    decimals = len(mantissa.partition(".")[2])
    place = Fraction(10) ** (
        int(exponent) - decimals if abs(int(exponent)) <= EXPONENT else refuse("too large")
    )
    value = Fraction(written) + (
        place * Fraction(int(repeated), 10 ** len(repeated) - 1) if repeated else 0
    )
    return ("num", value, place if decimals and not repeated else 0)


# The grammar: what a token does before a value is a line of PREFIX, and after one a line of INFIX
LIST, ROWS, ROW, RELATION, UNIT, RATIO, UNION, SUM, PRODUCT, APPLY, POSTFIX, POWER, ATOM = range(
    13
)  # binding power
LETTERS = ('"', *ascii_letters)
RELATIONS = "=<>≤≥≠≈"
REAL = ("tuple", "()", ("neg", ("inf",)), ("inf",))


class Parser:
    """Operator precedence: `at` moves over `tokens`, which ends in ""."""

    def __init__(self, found: list[str]):
        self.tokens = [*found, ""] if len(found) <= TOKENS else refuse("too many tokens")
        self.at = self.depth = 0

    def accept(self, *wanted: str) -> str:
        token = self.tokens[self.at]
        self.at += token in wanted
        return token if token in wanted else ""

    def kind(self) -> str:
        """The next token's line in the tables."""
        token = self.tokens[self.at]
        return token[0] if token[:1] in ('"', *"0123456789") else token

    def expression(self, power: int = LIST) -> Node:
        """What follows, up to the first operator that binds less tightly than `power`."""
        self.depth += 1
        node = self.text() if power <= UNIT else None
        if not node:
            kind = self.kind() if self.depth < DEPTH else refuse("too deep")
            self.at += 1
            node = PREFIX[kind](self, power) if kind in PREFIX else refuse(kind)
        while (operator := INFIX.get(self.kind(), END))[0] >= power:
            self.at += 1
            node = operator[1](self, node)
        self.depth -= 1
        return node

    def text(self) -> Node | None:
        """Words that are all of an item."""
        start = self.at
        while self.kind() in LETTERS:
            self.at += 1
        found = [token.lstrip('"').lower() for token in self.tokens[start : self.at]]
        if any(len(word) > 1 for word in found) and INFIX.get(self.kind(), END)[0] <= RELATION:
            words = "".join(word for word in found if word not in ("a", "an", "the"))
            return REAL if words == "allrealnumbers" else ("text", UNITS.get(words, words))
        self.at = start

    def factor(self, left: Node) -> Node:
        """A factor without a sign before it; a whole number right before a proper fraction is a mixed number."""
        before, token = self.tokens[self.at - 2 : self.at]
        self.at -= 1
        right = self.expression(POSTFIX)
        if before.isdigit() and left[0] == "num" and token != "(":
            if right[0] == "num" and self.accept("/"):
                right = ("div", right, self.expression(POSTFIX))
            if (
                right[0] == "div"
                and right[1][0] == right[2][0] == "num"
                and right[1][1] < right[2][1]
            ):
                return ("mixed", left, right)
        if token[0].isdigit() and before != ")" and (right[0] != "pow" or before[0].isdigit()):
            refuse("two numbers")
        return joined("mul", left, right)

    def unit(self, left: Node) -> Node:
        """Words after a value, / and powers among them, in one spelling: "foot 2"."""
        found: list[str] = []
        self.at -= 1
        while (token := self.tokens[self.at])[:1] in ('"', "%", "/", "^"):
            self.at += 1
            power = self.expression(ATOM) if token == "^" else ("", token.lstrip('"').lower())
            if power[0] not in ("", "num") or (name := str(power[1])) in HEDGES or len(found) > 5:
                refuse("prose")
            name = name.removesuffix("s") if len(name) > 2 else name
            found.append(UNITS.get(name, name))
        return ("unit", left, " ".join(sorted(found, key=str.isdigit)))

    def subscript(self, left: Node) -> Node:
        """x_{12} is a name, 101_2 a number in another base."""
        name = f"_{self.expression(ATOM)}"
        return {"num": ("unit", left, name), "sym": ("sym", f"{left[-1]}{name}")}.get(
            left[0]
        ) or refuse("a subscript")

    def group(self, _: int = 0) -> Node:
        opening = self.tokens[self.at - 1]
        if opening == "|" and "|" in self.tokens[self.at :]:
            self.tokens[self.tokens.index("|", self.at)] = "\\|"
        node = ("list",) if opening + self.tokens[self.at] == "\\{\\}" else self.expression()
        kind = KINDS.get(brackets := opening + self.tokens[self.at]) or refuse("no end of a group")
        self.at += 1
        items = node[1:] if node[0] == "list" else (node,)
        if len(items) == 1 and (brackets in ("{}", "()") or node[0] == "matrix"):
            return node
        return (kind, brackets, *items) if kind == "tuple" else (kind, *items)

    def function(self, _: int) -> Node:
        """sin x, sin^2 x, sin^{-1} x, log_b x; without brackets the argument is the product that follows."""
        name = self.tokens[self.at - 1][1:]
        base = (self.expression(ATOM),) if name == "log" and self.accept("_") else ()
        exponent = self.expression(POWER) if self.accept("^") else None
        if exponent == ("neg", number("1")) and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        node = (name, self.expression(ATOM if self.tokens[self.at] in ("(", "{") else APPLY), *base)
        return ("pow", node, exponent) if exponent else node

    def relation(self, left: Node) -> Node:
        """A chain; > is < from the other end."""
        operators, sides = self.tokens[self.at - 1], [left, self.expression(UNIT)]
        while operator := self.accept(*RELATIONS):
            operators += operator
            sides.append(self.expression(UNIT))
        if operators[0] in ">≥":
            operators, sides = operators[::-1].translate(str.maketrans("<>≤≥", "><≥≤")), sides[::-1]
        return ("rel", operators, *sides)


def joined(kind: str, left: Node, right: Node) -> Node:
    parts = left[1:] if left[0] == kind else (left,)
    return (kind, *parts, right) if len(parts) < ITEMS else refuse("too many parts")


def negative(node: Node) -> Node:
    return (node[0], negative(node[1]), node[2]) if node[0] in ("unit", "deg") else ("neg", node)


def flat(kind: str, power: int, right: int) -> tuple[int, Callable[[Parser, Node], Node]]:
    return power, lambda parser, left: joined(kind, left, parser.expression(right))


NAMED = {"\\infty": ("inf",), "\\emptyset": ("set",), "\\real": REAL} | {
    f"\\{name}": ("sym", name) for name in GREEK
}
CALLS = [f"\\{name}" for name in FUNCTIONS]
END = (-1, Parser.factor)
PREFIX: dict[str, Callable[[Parser, int], Node]] = {
    **dict.fromkeys("0123456789", lambda p, _: number(p.tokens[p.at - 1])),
    **dict.fromkeys(ascii_letters, lambda p, _: ("sym", p.tokens[p.at - 1])),
    '"': lambda p, _: (
        ("sym", p.tokens[p.at - 1][1:]) if len(p.tokens[p.at - 1]) == 2 else refuse("a word")
    ),
    **{token: lambda *_, node=node: node for token, node in NAMED.items()},
    **dict.fromkeys(("(", "[", "{", "\\{", "|", "⌊", "⌈", "\\begin"), Parser.group),
    **dict.fromkeys(CALLS, Parser.function),
    "\\frac": lambda p, _: ("div", p.expression(ATOM), p.expression(ATOM)),
    "\\binom": lambda p, _: ("binomial", p.expression(ATOM), p.expression(ATOM)),
    "\\sqrt": lambda p, _: (
        "root",
        p.group()[-1] if p.accept("[") else number("2"),
        p.expression(ATOM),
    ),
    "\\$": lambda p, power: ("unit", p.expression(max(power, PRODUCT)), "dollar"),
    "-": lambda p, power: negative(PREFIX["+"](p, power)),
    "+": lambda p, power: (
        p.expression(max(power, PRODUCT)) if power < ATOM else refuse("an argument")
    ),
    **dict.fromkeys(
        "=≈,;", lambda p, power: p.expression(UNIT) if power <= UNIT else refuse("sign")
    ),
}
INFIX: dict[str, tuple[int, Callable[[Parser, Node], Node]]] = {
    **dict.fromkeys(PREFIX, (APPLY, Parser.factor)),
    **dict.fromkeys(
        ("(", *CALLS), (PRODUCT, Parser.factor)
    ),  # no part of the argument of a function before them
    **dict.fromkeys(('"', "%"), (UNIT, Parser.unit)),
    **dict.fromkeys(",;", flat("list", LIST, RELATION)),
    "\\\\": flat("rows", ROWS, ROW),
    "&": flat("row", ROW, RELATION),
    **dict.fromkeys(RELATIONS, (RELATION, Parser.relation)),
    "∈": (
        RELATION,
        lambda p, left: p.expression(UNIT) if left[0] == "sym" else refuse("a condition"),
    ),
    ":": flat("ratio", RATIO, UNION),
    "∪": flat("union", UNION, SUM),
    "+": flat("add", SUM, PRODUCT),
    "-": (SUM, lambda p, left: joined("add", left, negative(p.expression(PRODUCT)))),
    "\\choose": (SUM, lambda p, left: ("binomial", left, p.expression(SUM))),
    "*": flat("mul", PRODUCT, POSTFIX),
    "/": (PRODUCT, lambda p, left: ("div", left, p.expression(POSTFIX))),
    "^": (POWER, lambda p, left: ("pow", left, p.expression(POWER))),
    "_": (POSTFIX, Parser.subscript),
    "!": (
        POSTFIX,
        lambda _, left: (
            ("factorial", left) if left[0] not in ("factorial", "deg") else refuse("a tower")
        ),
    ),
    "°": (
        POSTFIX,
        lambda _, left: ("deg", left, "degree") if left[0] != "deg" else refuse("a tower"),
    ),
}


def parse(found: list[str]) -> Node:
    if {"±", "∓"} & set(found):
        both = [
            parse([token.translate(str.maketrans("±∓", signs)) for token in found])
            for signs in ("+-", "-+")
        ]
        kind = "set" if both[0][0] == "set" else "list"
        return (
            kind,
            *dict.fromkeys(
                item for node in both for item in (node[1:] if node[0] == kind else (node,))
            ),
        )
    parser = Parser(found)
    node = parser.expression()
    return node if not parser.tokens[parser.at] else refuse("something is left over")


@functools.lru_cache(4096)
def read(text: str) -> tuple[list[str], Node | None]:
    """Tokens and, if the grammar knows them and they are within its limits, their tree."""
    text = text if "\\begin" in text else text.replace("\\\\", "\\")  # escaped twice
    for pattern, by in WORDS["rewrites"]:
        text = re.sub(pattern, by, text)
    found = [token for match in LEXER.finditer(text.rstrip(" \n.,;\\")) for token in lex(match)]
    try:
        return found, parse(found)
    except ValueError:
        return found, None
