"""The shared parts of the parser: its tokens, binding strengths of operators, and limits."""

import enum
import functools
from string import digits
from typing import NamedTuple

from jzero.answers.expressions import Node, Refused
from jzero.answers.names import NAMED

# Limits: a hostile answer must cost a bounded time, and no recursion may reach Python's limit.
MAX_TOKENS = 300
MAX_DEPTH = 60

END = ""  # the token after the last one
DIGITS = tuple(digits)
NAMED_FUNCTION = "function"  # the kind of a word before a bracket, as in \\text{Var}(X)
OPENING_BRACKETS = ("(", "[", "{", "\\{", "\\cases", "\\begin", "\\vmatrix")
CLOSING_BRACKETS = (")", "]", "}", "\\}", "\\endcases", "\\end", "\\endvmatrix", END)
# Words that are operators before a symbol, as in Re z. Their values are unknown.
OPERATORS = frozenset('"' + name for name in ("Re", "Im", "arg", "Arg", "tr", "rank", "ord"))


@functools.lru_cache(4096)
def kind_of(token: str) -> str:
    if token in OPERATORS:
        return NAMED_FUNCTION
    if token.startswith(NAMED):
        return NAMED
    return token[0] if token[:1] in ('"', *DIGITS) else token


class Binding(enum.IntEnum):
    """Binding strengths of operators, from the loosest to the tightest."""

    CONDITION = 0
    ROWS = 1
    ROW = 2
    IMPLICATION = 3
    OR = 4
    LIST = 5  # a comma, or "and"
    CONGRUENCE = 6
    RELATION = 7
    UNIT = 8
    RATIO = 9
    UNION = 10
    SUM = 11
    PRODUCT = 12
    APPLY = 13  # the argument of a function without brackets
    POSTFIX = 14
    POWER = 15
    ATOM = 16


class Reading(NamedTuple):
    """Settings that decide between two meanings of one spelling."""

    # Letters that are functions: with them, f(x) is an application, and not a product.
    functions: frozenset[str] = frozenset()
    has_euler_number: bool = True  # 2e-3 is 2·e - 3
    # Multipliers that the question counts: after "how many dozen", "3 dozen" is 3.
    counted: frozenset[str] = frozenset()
    # Letters that are symbols of units outside of \\text: 5 km is a length, and not 5·k·m.
    units: frozenset[str] = frozenset()
    # Letters that are products even inside of \\text, because the gold has them as products.
    products: frozenset[str] = frozenset()
    has_index_i: bool = False  # i is an index, and not the imaginary unit
    # Letters whose products have an order: vectors, with or without an arrow, and matrices.
    vectors: frozenset[str] = frozenset()
    matrices: frozenset[str] = frozenset()
    complex_letters: frozenset[str] = frozenset()  # all others are real


DEFAULT_READING = Reading()


class Reader:
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
        """Returns the next token's key in the grammar: all numbers share one key, and so do all
        words.
        """
        token = self.tokens[self.position]
        kind = kind_of(token)
        # A word before a bracket is a function: Var(X).
        opening = ("(", "\\{") if token == '"span' else ("(",)
        if kind == '"' and len(token) > 2 and self.tokens[self.position + 1] in opening:
            return NAMED_FUNCTION
        return kind

    def accept(self, *tokens: str) -> str:
        """Reads the next token if it is one of `tokens`, and returns it; otherwise returns ""."""
        token = self.tokens[self.position]
        if token not in tokens:
            return ""
        self.position += 1
        return token

    def require(self, *tokens: str) -> str:
        """Reads the next token, which must be one of `tokens`.

        Raises:
            Refused: The next token is another one.
        """
        token = self.accept(*tokens)
        if not token:
            raise Refused(f"{self.next_token!r} in place of {tokens[0]!r}")
        return token

    def closing_position(self) -> int:
        """Returns the index of the bracket that closes the one that was just read."""
        depth = 1
        for index in range(self.position, len(self.tokens)):
            token = self.tokens[index]
            depth += (token in OPENING_BRACKETS) - (token in CLOSING_BRACKETS)
            if depth == 0:
                return index
        raise Refused("an open bracket")

    def expression(self, binding: Binding = Binding.ROWS) -> Node:
        """Reads a value, up to the first operator that binds less tightly than `binding`.

        `latex_parser.Parser` implements this with the tables of operators.
        """
        raise NotImplementedError
