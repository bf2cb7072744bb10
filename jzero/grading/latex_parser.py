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

from jzero.grading.applications import argument_start
from jzero.grading.expressions import (
    EMPTY_SET,
    INFINITY,
    REAL_LINE,
    TWO,
    Node,
    Refused,
    has_unit,
    joined,
    mentions,
    negative,
    symbol,
)
from jzero.grading.latex_lexer import tokenize, with_euler_number
from jzero.grading.units import MULTIPLIERS, POWERS, REFUSED_WORDS, UNITS, singular, unit_name
from jzero.grading.vocabulary import BRACKETS, CURRENCIES, FUNCTIONS, GREEK, OPAQUE_FUNCTIONS

# Limits: a hostile answer must cost a bounded time, and no recursion may reach Python's limit.
MAX_TOKENS = 300
MAX_DEPTH = 60
MAX_EXPONENT = 1000  # of 1e1000
MAX_UNIT_WORDS = 6

END = ""  # the token after the last
DIGITS = tuple(digits)
LETTERS = ('"', *ascii_letters)  # first characters of words and symbols
RELATIONS = "=<>≤≥≠≈"
NAMED_FUNCTION = "function"  # the kind of a word before a bracket, as in \\text{Var}(X)
GIVEN = "given"  # the token of a bar that was found to stand for "given"
OPENING_BRACKETS = ("(", "[", "{", "\\{")
CLOSING_BRACKETS = (")", "]", "}", "\\}", END)
UNIT_TOKENS = ('"', "%", "/", "^", *CURRENCIES)  # the kinds of tokens in the words of a unit


class Binding(enum.IntEnum):
    """How tightly an operator binds, from the loosest to the tightest."""

    CONDITION = -1
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


class Reading(NamedTuple):
    """What decides between two meanings of one spelling."""

    # Letters that are functions: f(x) is an application then, and not a product.
    functions: frozenset[str] = frozenset()
    has_euler_number: bool = True  # 2e-3 is 2·e - 3
    # Multipliers that the question counts: after "how many dozen", "3 dozen" is 3.
    counted: frozenset[str] = frozenset()


DEFAULT_READING = Reading()


class Parser:
    """Reads `tokens` from left to right. `position` is the index of the next token."""

    def __init__(self, tokens: list[str], reading: Reading) -> None:
        if len(tokens) > MAX_TOKENS:
            raise Refused("too many tokens")
        self.tokens = [*tokens, END]
        self.reading = reading
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
        if token[:1] == '"' and len(token) > 2 and self.tokens[self.position + 1] == "(":
            return NAMED_FUNCTION
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

    def name(self, _: Binding) -> Node:
        r"""Reads a symbol, or the application of a letter that is a function.

        The symbol may be written as a word, \text{A}.
        """
        token = self.last_token.removeprefix('"')
        start = -1
        if token in self.reading.functions:
            start = argument_start(self.tokens, self.position, token)
        if start < 0:
            return CONSTANTS[token] if token in CONSTANTS else symbol(token)
        decorations = [token for token in self.tokens[self.position : start] if token not in "{}"]
        self.position = start
        return self.application(token + "".join(decorations))

    def word(self, binding: Binding) -> Node:
        r"""Reads a symbol that is written as a word, \text{A}."""
        if len(self.last_token) != 2:
            raise Refused("a word in a formula")
        return self.name(binding)

    def named_function(self, _: Binding) -> Node:
        r"""Reads \text{Var}(X) or \gcd(m, n)."""
        return self.application(self.last_token[1:])

    def application(self, name: str) -> Node:
        """Reads the arguments of a function. Nothing is known of its values."""
        if not self.accept("("):
            raise Refused(f"no bracket after {name}")
        self.mark_condition()
        argument = self.group(Binding.ATOM)
        is_list = argument.kind == "tuple" and argument.name == "()"
        return Node("apply", argument.parts if is_list else (argument,), name=name)

    def mark_condition(self) -> None:
        r"""Marks the bar or colon that stands for "given" in a group that has just been opened.

        This is the first bar if the number of bars is odd: P(A|B), \{x | |x| < 2\}. A colon does so
        in \{x : x > 2\}. That x is real, x ∈ ℝ, is dropped.
        """
        start = self.position
        depth, bars, colons, has_relation = 0, [], [], False
        for index in range(start, len(self.tokens)):
            token = self.tokens[index]
            depth += (token in OPENING_BRACKETS) - (token in CLOSING_BRACKETS)
            if depth < 0:
                break
            if depth == 0 and token == "|":
                bars.append(index)
            elif depth == 0 and token == ":":
                colons.append(index)
            has_relation = has_relation or (token in RELATIONS and token != END)
        in_braces = self.last_token == "\\{"
        if len(bars) % 2 == 1:
            mark = bars[0]
        elif in_braces and colons and has_relation:
            mark = colons[0]
        else:
            return
        self.tokens[mark] = GIVEN
        if self.tokens[start + 1 : mark] == ["∈", "\\real"]:
            del self.tokens[start + 1 : mark]

    def group(self, _: Binding) -> Node:
        """Reads what is between two brackets."""
        opening = self.last_token
        if opening == "|" and "|" in self.tokens[self.position :]:
            # A bar opens and closes. The next bar becomes a closing one, or it would open a group.
            self.tokens[self.tokens.index("|", self.position)] = "\\|"
        if opening == "\\{" and self.accept("\\}"):
            return EMPTY_SET
        if opening == "\\{":
            self.mark_condition()
        inside = self.expression(Binding.CONDITION)
        brackets = opening + self.next_token
        if brackets not in BRACKETS:
            raise Refused(f"{brackets!r} is no pair of brackets")
        self.position += 1
        kind = BRACKETS[brackets]
        if inside.kind == "given" and kind == "set":
            return _condition_of_set(inside)
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

    def money(self, binding: Binding) -> Node:
        name = UNITS[self.last_token]
        amount = self.expression(max(binding, Binding.PRODUCT))
        return Node("unit", (amount,), name=name)

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
        if token[0].isdigit() and not _may_precede_number(left, before, right):
            raise Refused("two numbers side by side")
        return joined("multiply", left, right)

    def divide(self, left: Node) -> Node:
        return Node("divide", (left, self.expression(Binding.POSTFIX)))

    def subtract(self, left: Node) -> Node:
        return joined("add", left, negative(self.expression(Binding.PRODUCT)))

    def ratio(self, left: Node) -> Node:
        """Reads a side of 3:2, or of the time 4:05."""
        right = self.expression(Binding.UNION)
        written = self.last_token
        is_time = right.kind == "number" and written.isdigit() and written[0] == "0" != written
        is_time = is_time or (left.kind == "ratio" and left.name == "time")
        return joined("ratio", left, right)._replace(name="time" if is_time else "")

    def condition(self, left: Node) -> Node:
        if left.kind == "given":
            raise Refused("two conditions")
        return Node("given", (left, self.expression(Binding.LIST)))

    def prime(self, left: Node) -> Node:
        if left.kind != "symbol":
            raise Refused("a prime after what is no name")
        return symbol(left.name + "'")

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
        Numerals multiply the value: "2 thirds" is 2/3, and "5 million dollars" are 5,000,000.
        """
        names: list[str] = []
        num_words = 0
        self.position -= 1
        while self.next_kind() in UNIT_TOKENS or (
            self.last_token == "/" and self.next_token in UNITS  # the letter of km/h
        ):
            token = self.next_token
            self.position += 1
            num_words += 1
            word = token.lstrip('"').lower()
            noun = singular(word)
            if word in REFUSED_WORDS or num_words > MAX_UNIT_WORDS:
                raise Refused("prose")
            if token == "^":
                names.append(self.unit_power())
            elif word in POWERS and names:
                names.append(str(POWERS[word]))
            elif word in POWERS:
                left = _raised(left, POWERS[word])
            elif noun in MULTIPLIERS and noun not in self.reading.counted:
                if names:
                    raise Refused("a numeral after a unit")
                left = _scaled(left, noun)
            else:
                names.append(unit_name(word))
        if not names:
            return left
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


def _raised(node: Node, exponent: int) -> Node:
    """Returns 3^2 for "3 squared"."""
    if node.kind not in ("number", "symbol"):
        raise Refused("a power of what is no number")
    return Node("power", (node, number(str(exponent))))


def _scaled(node: Node, numeral: str) -> Node:
    """Returns the value of "5 million"; in "$5 million" the numeral goes inside the unit."""
    if has_unit(node):
        return node._replace(parts=(_scaled(node.parts[0], numeral),))
    return Node("scaled", (node, Node("number", value=MULTIPLIERS[numeral])))


def _condition_of_set(given: Node) -> Node:
    """Returns the condition x > 2 of {x | x > 2}, which is compared as any other relation is."""
    head, condition = given.parts
    names = head.parts if head.kind == "tuple" else (head,)
    if condition.kind == "list":  # in which "x is real" says nothing
        relations = tuple(part for part in condition.parts if part != REAL_LINE)
    else:
        relations = (condition,)
    for name in names:
        if name.kind != "symbol" or not mentions(condition, name):
            raise Refused("a condition on another name")
    if any(relation.kind != "relation" for relation in relations):
        raise Refused("a condition that is no relation")
    return relations[0] if len(relations) == 1 else condition


def _may_precede_number(left: Node, before: str, right: Node) -> bool:
    """Returns whether a number or its power, `right`, may be a factor after `left`.

    `before` is the last token of `left`. In x^2 2^n the digit before the factor is an exponent.
    """
    last = left.parts[-1] if left.kind == "multiply" else left
    if before == ")" or (before == "}" and last.kind == "power"):
        return True
    is_number = before[0].isdigit() and last.kind not in ("power", "symbol")
    return right.kind == "power" and not is_number


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
_OPAQUE_COMMANDS = [f"\\{name}" for name in OPAQUE_FUNCTIONS]

PREFIX: dict[str, Callable[[Parser, Binding], Node]] = {
    **dict.fromkeys(DIGITS, Parser.number),
    **dict.fromkeys(ascii_letters, Parser.name),
    '"': Parser.word,
    **dict.fromkeys(CONSTANTS, Parser.name),
    **dict.fromkeys(("(", "[", "{", "\\{", "|", "⌊", "⌈", "\\begin"), Parser.group),
    **dict.fromkeys(_FUNCTION_COMMANDS, Parser.function),
    **dict.fromkeys((*_OPAQUE_COMMANDS, NAMED_FUNCTION), Parser.named_function),
    "\\frac": Parser.fraction,
    "\\binom": Parser.binomial,
    "\\sqrt": Parser.root,
    **dict.fromkeys(CURRENCIES, Parser.money),
    "-": Parser.minus,
    "+": Parser.plus,
    **dict.fromkeys("=≈,;", Parser.leading_sign),
}

# Later lines replace earlier ones: "-" begins a value, but after a value it subtracts.
INFIX: dict[str, Infix] = {
    **dict.fromkeys(PREFIX, Infix(Binding.APPLY, Parser.factor)),
    # A bracket or function ends the argument of a function before it: \sin x (y) is sin(x) y.
    **dict.fromkeys(
        ("(", NAMED_FUNCTION, *_FUNCTION_COMMANDS), Infix(Binding.PRODUCT, Parser.factor)
    ),
    **dict.fromkeys(('"', "%", *CURRENCIES), Infix(Binding.UNIT, Parser.unit)),
    **dict.fromkeys(",;", _joining("list", Binding.LIST, Binding.RELATION)),
    "\\\\": _joining("rows", Binding.ROWS, Binding.ROW),
    "&": _joining("row", Binding.ROW, Binding.RELATION),
    **dict.fromkeys(RELATIONS, Infix(Binding.RELATION, Parser.relation)),
    "∈": Infix(Binding.RELATION, Parser.membership),
    ":": Infix(Binding.RATIO, Parser.ratio),
    GIVEN: Infix(Binding.CONDITION, Parser.condition),
    "'": Infix(Binding.POSTFIX, Parser.prime),
    "∪": _joining("union", Binding.UNION, Binding.SUM),
    "∩": _joining("intersection", Binding.UNION, Binding.SUM),
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


def _parse_tokens(tokens: list[str], reading: Reading) -> Node:
    """Returns the tree of all tokens. Plus-minus makes two items of one: 1±2 is the list 3, -1."""
    if "±" in tokens or "∓" in tokens:
        return _parse_both_signs(tokens, reading)
    parser = Parser(tokens, reading)
    node = parser.expression()
    if parser.next_token != END:
        raise Refused("something is left over")
    return node


def _parse_both_signs(tokens: list[str], reading: Reading) -> Node:
    items: dict[Node, None] = {}  # a set that keeps the order
    kind = ""
    for signs in ("+-", "-+"):
        table = str.maketrans("±∓", signs)
        node = _parse_tokens([token.translate(table) for token in tokens], reading)
        kind = kind or ("set" if node.kind == "set" else "list")
        items |= dict.fromkeys(node.parts if node.kind == kind else (node,))
    return Node(kind, tuple(items))


@functools.lru_cache(4096)
def parse(text: str, reading: Reading = DEFAULT_READING) -> Node | None:
    """Returns the tree of `text`, None if the grammar or its limits refuse it."""
    tokens = tokenize(text)
    if reading.has_euler_number:
        tokens = with_euler_number(tokens)
    try:
        return _parse_tokens(tokens, reading)
    except Refused:
        return None
