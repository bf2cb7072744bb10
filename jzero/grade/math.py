"""Verdicts for mathematical answers: correct only if the one final answer is the gold, and not the question again."""

import functools
from typing import Any, NamedTuple

from jzero.grade.equal import equal
from jzero.grade.extract import LONGEST, extract, unboxed
from jzero.grade.parse import Node, Refused, parse, tokens
from jzero.types import Grade

PROMPT = 20_000  # characters of a prompt that are searched for the answer
VERIFIERS = ("fast", "math_verify")


class Answer(NamedTuple):
    tokens: list[str]
    node: Node | None  # None if it does not parse
    text: str


def read(text: str) -> Answer:
    found: list[str] = []
    try:
        found = tokens(text)
        return Answer(found, parse(found), text)
    except Refused:
        return Answer(found, None, text)


@functools.lru_cache(8192)
def read_gold(text: str) -> Answer:
    return read((unboxed(text) or "").strip()[:LONGEST])


@functools.lru_cache(256)
def prompt_tokens(prompt: str) -> str:
    try:
        return spelled(tokens(prompt[:PROMPT]))
    except Refused:
        return ""


def spelled(found: list[str]) -> str:
    return f" {' '.join(token for token in found if token not in '{}')} "


def echoes(answer: Answer, prompt: str) -> bool:
    """The answer stands in the question and is more than a number or a name."""
    return bool(answer.node and answer.node[0] not in ("num", "sym", "text")) and spelled(
        answer.tokens
    ) in prompt_tokens(prompt)


def judge(answer: Answer, gold: Answer, prompt: str, strict: bool) -> str:
    if answer.text == gold.text or (answer.tokens and answer.tokens == gold.tokens):
        return "correct"
    if answer.node is None:
        return "unparsed"
    if gold.node is None:
        return "wrong value"
    if not equal(answer.node, gold.node, strict):
        return "wrong value"
    return "echo" if prompt and answer.node != gold.node and echoes(answer, prompt) else "correct"


def grade(
    response: str, gold: Any, *, template: str, prompt: str = "", verifier: str = "fast", mode: str = "response"
) -> Grade:
    text = extract(response, "answer" if mode == "answer" else template)
    if text is None:
        return Grade(0.0, False, "no answer")
    answer = read(text)
    reason = "no gold"
    for one in gold if isinstance(gold, list) else [gold]:
        if one is not None and str(one).strip():
            reason = judge(answer, read_gold(str(one)), prompt, verifier == "fast")
            if reason == "correct":
                break
    return Grade(float(reason == "correct"), reason == "correct", reason)
