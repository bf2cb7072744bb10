"""Whether the letter before a bracket is a function: f(x) is an application, a(b+c) is a product.

LaTeX writes both in the same way. A letter is a function if, in the gold and in the answer, it
occurs only before brackets, and if there is evidence: it is a letter that conventionally names
functions, or one of its brackets contains a single name or number, as in P(A), a list, as in
T(m,n), or a formula of sets. Products are not written in this way.

The values of such a function are unknown, except that equal arguments have equal values.
"""

import functools
from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

from jzero.answers.latex_lexer import tokenize
from jzero.answers.vocabulary import GREEK

CONVENTIONAL = frozenset(("f", "g", "F", "G", "\\Gamma", "\\zeta"))
_NAMES = frozenset(ascii_letters) | {f"\\{name}" for name in GREEK}
_OF_LINES = frozenset(("t", "s", "\\lambda", "\\mu"))  # (1,0)+t(1,2) is a product
_CONSTANTS = frozenset(("e", "i", "\\pi"))
_OPENING = frozenset(("(", "[", "{", "\\{"))
_SET_OPERATORS = frozenset(("∪", "∩", "∖"))
_RELATIONS = frozenset("=<>≤≥")
_CLOSING = frozenset((")", "]", "}", "\\}"))


def _name(token: str) -> str:
    r"""Returns the name that a token writes, "" for other tokens. \text{P} is P."""
    name = token.removeprefix('"')
    return name if name in _NAMES and name not in _CONSTANTS else ""


def _closing(tokens: Sequence[str], opening: int) -> int:
    """Returns the index of the bracket that closes `opening`, len(tokens) if it stays open."""
    depth = 0
    for index in range(opening, len(tokens)):
        if tokens[index] in _OPENING:
            depth += 1
        elif tokens[index] in _CLOSING:
            depth -= 1
            if depth == 0:
                return index
    return len(tokens)


def argument_start(tokens: Sequence[str], position: int, name: str) -> int:
    """Returns the index of the bracket of an application of `name`, -1 if it is not applied.

    `position` is the index after the name. Primes and subscripts may follow the name, as in f'(x)
    and f_1(x), and powers after a name that is conventional for functions, as in f^{-1}(x).
    """
    # x^2(y) is a product, and f^2(x) an application.
    operators = "'_^" if name in CONVENTIONAL else "'_"
    # The token at the end is empty, and "" is in every text.
    while position < len(tokens) and tokens[position] and tokens[position] in operators:
        is_prime = tokens[position] == "'"
        position += 1
        if not is_prime and position < len(tokens):
            has_braces = tokens[position] == "{"
            position = (_closing(tokens, position) if has_braces else position) + 1
    if position >= len(tokens) or tokens[position] != "(":
        return -1
    end = _closing(tokens, position)
    return position if end < len(tokens) and tokens[end] == ")" else -1


class Uses(NamedTuple):
    """The positions of the letters in a text."""

    before_brackets: frozenset[str]
    elsewhere: frozenset[str]
    evident: frozenset[str]  # letters with evidence that they are functions


@functools.lru_cache(4096)
def uses(text: str) -> Uses:
    tokens = tokenize(text)
    before_brackets, elsewhere, evident = set(), set(), set()
    for index, token in enumerate(tokens):
        name = _name(token)
        if not name:
            continue
        # In (f∘g)(x), f and g are functions.
        if "∘" in tokens[max(0, index - 1) : index + 2]:
            before_brackets.add(name)
            evident.add(name)
            continue
        start = argument_start(tokens, index + 1, name)
        if start < 0:
            elsewhere.add(name)
            continue
        before_brackets.add(name)
        argument = tokens[start + 1 : _closing(tokens, start)]
        # Evidence that the brackets hold an argument, and not a factor.
        is_set = not _SET_OPERATORS.isdisjoint(argument)
        is_list = _is_list(argument) and name not in _OF_LINES
        is_event = name == "P" and not _RELATIONS.isdisjoint(argument)  # P(X > 2)
        if name in CONVENTIONAL or len(argument) == 1 or is_list or is_set or is_event:
            evident.add(name)
    return Uses(frozenset(before_brackets), frozenset(elsewhere), frozenset(evident))


def _is_list(tokens: Sequence[str]) -> bool:
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if token == "," and depth == 0:
            return True
    return False


def function_names(answer: str, gold: str) -> frozenset[str]:
    """Returns the letters that are functions in both texts. If they differ, the gold decides.

    If the gold has no brackets after a letter, that letter is a factor in the answer, too; if the
    gold evidently applies it, a product with the letter is another answer.
    """
    if "(" not in answer and "(" not in gold:
        return frozenset()
    # In the golds of MATH and OlympiadBench every letter that is a factor also occurs without
    # brackets, and these rules find all 22 functions (lab/log.md, 2026-11-22).
    answer_uses, gold_uses = uses(answer), uses(gold)
    likely = answer_uses.evident - answer_uses.elsewhere
    in_gold = gold_uses.before_brackets - gold_uses.elsewhere
    only_in_answer = answer_uses.before_brackets - gold_uses.before_brackets - gold_uses.elsewhere
    return (in_gold & (gold_uses.evident | likely)) | (only_in_answer & likely)
