r"""Parses an answer in LaTeX or plain text to a tree of `expressions.Node`. Nothing is evaluated.

This is an operator-precedence parser. What a token does at the start of a value is a line of
PREFIX, and what it does after a value is a line of INFIX, beside its binding strength. Two values
side by side are multiplied. Text that the grammar does not know, or that is beyond a limit, has no
tree.
"""

import enum
import functools
from collections.abc import Callable
from fractions import Fraction
from string import ascii_letters, digits
from typing import NamedTuple

from jzero.grading.expressions import (
    EMPTY_SET,
    INFINITY,
    REAL_LINE,
    TWO,
    Node,
    Refused,
    joined,
    negative,
    symbol,
)
from jzero.grading.latex_lexer import tokenize
from jzero.grading.vocabulary import BRACKETS, FUNCTIONS, GREEK, HEDGES, UNITS

# Limits: a hostile answer must cost a bounded time, and no recursion may reach Python's limit.
MAX_TOKENS = 300
MAX_DEPTH = 60
MAX_EXPONENT = 1000  # of 1e1000
MAX_UNIT_WORDS = 6

END = ""  # the token after the last
DIGITS = tuple(digits)
LETTERS = ('"', *ascii_letters)  # first characters of words and symbols
RELATIONS = "=<>≤≥≠≈"


class Binding(enum.IntEnum):
    """How tightly an operator binds, from the loosest to the tightest."""

    LIST = 0
    ROWS = 1
    ROW = 2
    RELATION = 3
    UNIT = 4
    RATIO = 5
    UNION = 6
    SUM = 7
    PRODUCT = 8
    APPLY = 9  # the argument of a function without brackets
    POSTFIX = 10
    POWER = 11
    ATOM = 12


class Parser:
    """Reads `tokens` from left to right. `position` is the index of the next token."""

    def __init__(self, tokens: list[str]) -> None:
        if len(tokens) > MAX_TOKENS:
            raise Refused("too many tokens")
        self.tokens = [*tokens, END]
        self.position = 0
        self.depth = 0

    @property
    def next_token(self) -> str:
        return self.tokens[self.position]

    @property
    def last_token(self) -> str:
        """The token that was read last."""
        return self.tokens[self.position - 1]

    def next_kind(self) -> str:
        """Returns the key of the next token in PREFIX and INFIX: numbers and words share one."""
        token = self.tokens[self.position]
        return token[0] if token[:1] in ('"', *DIGITS) else token

    def accept(self, *wanted: str) -> str:
        """Reads the next token if it is one of `wanted`, and returns it; else returns ""."""
        token = self.tokens[self.position]
        if token not in wanted:
            return ""
        self.position += 1
        return token

    def expression(self, binding: Binding = Binding.LIST) -> Node:
        """Reads a value, up to the first operator that binds less tightly than `binding`."""
        self.depth += 1
        node = self.words() if binding <= Binding.UNIT else None
        if node is None:
            if self.depth >= MAX_DEPTH:
                raise Refused("too deep")
            prefix = PREFIX.get(self.next_kind())
            if prefix is None:
                raise Refused(f"{self.next_token!r} begins no value")
            self.position += 1
            node = prefix(self, binding)
        while (infix := INFIX.get(self.next_kind())) and infix.binding >= binding:
            self.position += 1
            node = infix.read(self, node)
        self.depth -= 1
        return node

    def words(self) -> Node | None:
        """Reads words that are all of an item; reads nothing, and returns None, where they are not.

        Articles do not count: "an ellipse" is "ellipse".
        """
        start = self.position
        while self.next_kind() in LETTERS:
            self.position += 1
        words = [token.lstrip('"').lower() for token in self.tokens[start : self.position]]
        following = INFIX.get(self.next_kind())
        item_ends = following is None or following.binding <= Binding.RELATION
        if item_ends and any(len(word) > 1 for word in words):
            text = "".join(word for word in words if word not in ("a", "an", "the"))
            return (
                REAL_LINE if text == "allrealnumbers" else Node("text", name=UNITS.get(text, text))
            )
        self.position = start
        return None

    # What begins a value: each of these functions has just read its token.

    def number(self, _: Binding) -> Node:
        return number(self.last_token)

    def letter(self, _: Binding) -> Node:
        return symbol(self.last_token)

    def constant(self, _: Binding) -> Node:
        return CONSTANTS[self.last_token]

    def word(self, _: Binding) -> Node:
        r"""Reads a symbol that is written as a word: \text{A}."""
        name = self.last_token[1:]
        if len(name) != 1:
            raise Refused("a word in a formula")
        return symbol(name)

    def group(self, _: Binding) -> Node:
        """Reads what is between two brackets."""
        opening = self.last_token
        if opening == "|" and "|" in self.tokens[self.position :]:
            # A bar opens and closes. The next bar becomes a closing one, or it would open a group.
            self.tokens[self.tokens.index("|", self.position)] = "\\|"
        if opening == "\\{" and self.accept("\\}"):
            return EMPTY_SET
        inside = self.expression()
        brackets = opening + self.next_token
        if brackets not in BRACKETS:
            raise Refused(f"{brackets!r} is no pair of brackets")
        self.position += 1
        kind = BRACKETS[brackets]
        items = inside.parts if inside.kind == "list" else (inside,)
        if len(items) == 1 and (brackets in ("{}", "()") or inside.kind == "matrix"):
            return inside
        return Node(kind, items, name=brackets if kind == "tuple" else "")

    def function(self, _: Binding) -> Node:
        r"""Reads sin x, sin^2 x, sin^{-1} x, log_b x.

        Without brackets the argument is the product that follows: \sin 2x is sin(2x).
        """
        name = self.last_token[1:]
        base = ()
        if name == "log" and self.accept("_"):
            base = (self.expression(Binding.ATOM),)
        exponent = self.expression(Binding.POWER) if self.accept("^") else None
        if exponent == MINUS_ONE and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        in_brackets = self.next_token in ("(", "{")
        argument = self.expression(Binding.ATOM if in_brackets else Binding.APPLY)
        node = Node(name, (argument, *base))
        return node if exponent is None else Node("power", (node, exponent))

    def fraction(self, _: Binding) -> Node:
        above = self.expression(Binding.ATOM)
        below = self.expression(Binding.ATOM)
        return Node("divide", (above, below))

    def binomial(self, _: Binding) -> Node:
        above = self.expression(Binding.ATOM)
        below = self.expression(Binding.ATOM)
        return Node("binomial", (above, below))

    def root(self, _: Binding) -> Node:
        degree = TWO
        if self.accept("["):
            degree = self.group(Binding.ATOM).parts[-1]
        return Node("root", (degree, self.expression(Binding.ATOM)))

    def dollars(self, binding: Binding) -> Node:
        amount = self.expression(max(binding, Binding.PRODUCT))
        return Node("unit", (amount,), name="dollar")

    def plus(self, binding: Binding) -> Node:
        if binding >= Binding.ATOM:
            raise Refused("a sign in front of an argument, as in x^-2")
        return self.expression(max(binding, Binding.PRODUCT))

    def minus(self, binding: Binding) -> Node:
        return negative(self.plus(binding))

    def leading_sign(self, binding: Binding) -> Node:
        """Drops a relation or comma that nothing is in front of: "= 5" is 5."""
        if binding > Binding.UNIT:
            raise Refused("an operator without a left side")
        return self.expression(Binding.UNIT)

    # What follows a value: each of these functions has just read its token.

    def factor(self, left: Node) -> Node:
        """Reads a factor that no sign is in front of.

        An integer right before a proper fraction makes a mixed number. Two numbers side by side
        mean nothing.
        """
        before, token = self.tokens[self.position - 2 : self.position]
        self.position -= 1
        right = self.expression(Binding.POSTFIX)
        if before.isdigit() and left.kind == "number" and token != "(":
            if right.kind == "number" and self.accept("/"):
                right = Node("divide", (right, self.expression(Binding.POSTFIX)))
            if _is_proper_fraction(right):
                return Node("mixed", (left, right))
        is_power_of_number = right.kind == "power" and not before[0].isdigit()
        if token[0].isdigit() and before != ")" and not is_power_of_number:
            raise Refused("two numbers side by side")
        return joined("multiply", left, right)

    def divide(self, left: Node) -> Node:
        return Node("divide", (left, self.expression(Binding.POSTFIX)))

    def subtract(self, left: Node) -> Node:
        return joined("add", left, negative(self.expression(Binding.PRODUCT)))

    def choose(self, left: Node) -> Node:
        return Node("binomial", (left, self.expression(Binding.SUM)))

    def power(self, left: Node) -> Node:
        return Node("power", (left, self.expression(Binding.POWER)))

    def factorial(self, left: Node) -> Node:
        if left.kind in ("factorial", "degree"):
            raise Refused("a tower of postfix operators")
        return Node("factorial", (left,))

    def degree(self, left: Node) -> Node:
        if left.kind == "degree":
            raise Refused("a tower of postfix operators")
        return Node("degree", (left,), name="degree")

    def subscript(self, left: Node) -> Node:
        """Reads x_{12}, which is a name, or 101_2, a number in another base."""
        name = f"_{self.expression(Binding.ATOM)!r}"
        if left.kind == "number":
            return Node("unit", (left,), name=name)
        if left.kind == "symbol":
            return symbol(left.name + name)
        raise Refused("a subscript of what is no name")

    def unit(self, left: Node) -> Node:
        """Reads the words after a value, with / and powers among them.

        Spellings become one, and the words are sorted: "square feet" and "ft^2" are "foot 2".
        """
        names: list[str] = []
        self.position -= 1
        while self.next_token[:1] in ('"', "%", "/", "^"):
            token = self.next_token
            self.position += 1
            name = self.unit_power() if token == "^" else token.lstrip('"').lower()
            if name in HEDGES or len(names) >= MAX_UNIT_WORDS:
                raise Refused("prose")
            name = name.removesuffix("s") if len(name) > 2 else name
            names.append(UNITS.get(name, name))
        return Node("unit", (left,), name=" ".join(sorted(names, key=str.isdigit)))

    def unit_power(self) -> str:
        power = self.expression(Binding.ATOM)
        if power.kind != "number":
            raise Refused("prose")
        return str(power.value)

    def relation(self, left: Node) -> Node:
        """Reads a chain of relations. One that begins with > or ≥ is turned around."""
        operators = self.last_token
        sides = [left, self.expression(Binding.UNIT)]
        while operator := self.accept(*RELATIONS):
            operators += operator
            sides.append(self.expression(Binding.UNIT))
        if operators[0] in ">≥":
            operators = operators[::-1].translate(str.maketrans("<>≤≥", "><≥≤"))
            sides = sides[::-1]
        return Node("relation", tuple(sides), name=operators)

    def membership(self, left: Node) -> Node:
        """Reads x ∈ [0, 1), which is the interval."""
        if left.kind != "symbol":
            raise Refused("a condition")
        return self.expression(Binding.UNIT)


def number(token: str) -> Node:
    """Returns the node of a number: 12, 0.25, 1.5e-10, or 0.1¯6 for 0.1666...

    Raises:
        Refused: The exponent is beyond MAX_EXPONENT, or the token has no digits, or too many.
    """
    written, _, repeated = token.lower().partition("¯")
    mantissa, exponent, *_ = f"{written}e0".split("e")
    num_decimals = len(mantissa.partition(".")[2])
    try:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise Refused("too large")
        value = Fraction(written)
        place = Fraction(10) ** (int(exponent) - num_decimals)
        if repeated:
            value += place * Fraction(int(repeated), 10 ** len(repeated) - 1)
    except ValueError as error:  # ".¯6" has no digits in front; int() takes 4,300 digits at most
        raise Refused(str(error)) from None
    is_decimal = num_decimals > 0 and not repeated
    return Node("number", value=value, decimal_place=place if is_decimal else 0)


def _is_proper_fraction(node: Node) -> bool:
    if node.kind != "divide":
        return False
    above, below = node.parts
    return above.kind == below.kind == "number" and above.value < below.value


class Infix(NamedTuple):
    """An operator after a value: how tightly it binds, and what reads it, given the value."""

    binding: Binding
    read: Callable[[Parser, Node], Node]


def _joining(kind: str, binding: Binding, right: Binding) -> Infix:
    """Returns an operator that joins any number of values under one node."""

    def read(parser: Parser, left: Node) -> Node:
        return joined(kind, left, parser.expression(right))

    return Infix(binding, read)


MINUS_ONE = negative(number("1"))
CONSTANTS = {
    "\\infty": INFINITY,
    "\\emptyset": EMPTY_SET,
    "\\real": REAL_LINE,
    **{f"\\{name}": symbol(name) for name in GREEK},
}
_FUNCTION_COMMANDS = [f"\\{name}" for name in FUNCTIONS]

PREFIX: dict[str, Callable[[Parser, Binding], Node]] = {
    **dict.fromkeys(DIGITS, Parser.number),
    **dict.fromkeys(ascii_letters, Parser.letter),
    '"': Parser.word,
    **dict.fromkeys(CONSTANTS, Parser.constant),
    **dict.fromkeys(("(", "[", "{", "\\{", "|", "⌊", "⌈", "\\begin"), Parser.group),
    **dict.fromkeys(_FUNCTION_COMMANDS, Parser.function),
    "\\frac": Parser.fraction,
    "\\binom": Parser.binomial,
    "\\sqrt": Parser.root,
    "\\$": Parser.dollars,
    "-": Parser.minus,
    "+": Parser.plus,
    **dict.fromkeys("=≈,;", Parser.leading_sign),
}

# Later lines replace earlier ones: "-" begins a value, but after a value it subtracts.
INFIX: dict[str, Infix] = {
    **dict.fromkeys(PREFIX, Infix(Binding.APPLY, Parser.factor)),
    # A bracket or function ends the argument of a function before it: \sin x (y) is sin(x) y.
    **dict.fromkeys(("(", *_FUNCTION_COMMANDS), Infix(Binding.PRODUCT, Parser.factor)),
    **dict.fromkeys(('"', "%"), Infix(Binding.UNIT, Parser.unit)),
    **dict.fromkeys(",;", _joining("list", Binding.LIST, Binding.RELATION)),
    "\\\\": _joining("rows", Binding.ROWS, Binding.ROW),
    "&": _joining("row", Binding.ROW, Binding.RELATION),
    **dict.fromkeys(RELATIONS, Infix(Binding.RELATION, Parser.relation)),
    "∈": Infix(Binding.RELATION, Parser.membership),
    ":": _joining("ratio", Binding.RATIO, Binding.UNION),
    "∪": _joining("union", Binding.UNION, Binding.SUM),
    "+": _joining("add", Binding.SUM, Binding.PRODUCT),
    "-": Infix(Binding.SUM, Parser.subtract),
    "\\choose": Infix(Binding.SUM, Parser.choose),
    "*": _joining("multiply", Binding.PRODUCT, Binding.POSTFIX),
    "/": Infix(Binding.PRODUCT, Parser.divide),
    "^": Infix(Binding.POWER, Parser.power),
    "_": Infix(Binding.POSTFIX, Parser.subscript),
    "!": Infix(Binding.POSTFIX, Parser.factorial),
    "°": Infix(Binding.POSTFIX, Parser.degree),
}


def _parse_tokens(tokens: list[str]) -> Node:
    """Returns the tree of all tokens. Plus-minus makes two items of one: 1±2 is the list 3, -1."""
    if "±" in tokens or "∓" in tokens:
        return _parse_both_signs(tokens)
    parser = Parser(tokens)
    node = parser.expression()
    if parser.next_token != END:
        raise Refused("something is left over")
    return node


def _parse_both_signs(tokens: list[str]) -> Node:
    items: dict[Node, None] = {}  # a set that keeps the order
    kind = ""
    for signs in ("+-", "-+"):
        table = str.maketrans("±∓", signs)
        node = _parse_tokens([token.translate(table) for token in tokens])
        kind = kind or ("set" if node.kind == "set" else "list")
        items |= dict.fromkeys(node.parts if node.kind == kind else (node,))
    return Node(kind, tuple(items))


@functools.lru_cache(4096)
def parse(text: str) -> Node | None:
    """Returns the tree of `text`, None if the grammar or its limits refuse it."""
    try:
        return _parse_tokens(tokenize(text))
    except Refused:
        return None
