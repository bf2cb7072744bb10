"""The value of the formula that a question asks for: "a+b=17" is 17 if it asks for a+b."""

import functools
import re

from jzero.answers.latex_lexer import simplified_text, tokenize

_MARKED = re.compile(
    r"\$\$(.{1,200}?)\$\$|\$([^$]{1,200})\$|\\\[(.{1,200}?)\\\]|\\\((.{1,200}?)\\\)"
)
_RELATION = re.compile(r"[=<>≤≥≠≈]|\\(?:leq?|geq?|neq?|approx|equiv|in)(?![A-Za-z])")
MAX_FORMULAS = 40


def value_of_asked(answer: str, question: str) -> str:
    """Returns 17 for "a+b=17" if a+b is a formula of the question, otherwise ""."""
    if "=" not in answer or not question:
        return ""
    left, _, right = simplified_text(answer).partition("=")
    if _RELATION.search(left) or _RELATION.search(right) or not right.strip():
        return ""
    tokens = tuple(tokenize(left))
    # A name, such as x, has its value without any question.
    is_formula = len(tokens) > 2 and any(token.isalpha() for token in tokens)
    return right.strip() if is_formula and tokens in _formulas(question) else ""


@functools.lru_cache(1024)
def _formulas(question: str) -> frozenset[tuple[str, ...]]:
    """Returns the tokens of the formulas of a question that are no relations."""
    texts = [text for match in _MARKED.findall(question) for text in match if text]
    formulas = [text.strip(" .,;:?!") for text in texts[:MAX_FORMULAS]]
    return frozenset(tuple(tokenize(text)) for text in formulas if not _RELATION.search(text))
