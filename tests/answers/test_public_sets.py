r"""Attacks that need no author: golds against golds, and formulas of questions as answers.

The rows of public sets are cross-graded in samples; `--thorough` takes all of them.
"""

import json
import random
import re
from pathlib import Path

import pytest

from jzero.answers.echo import _MARKED_FORMULA
from jzero.answers.equivalence import equal
from jzero.answers.latex_parser import parse
from jzero.answers.verdict import grade

SETS = ("math/math12k_train", "math/math500", "eval/aime24", "eval/aime25", "eval/amc")
SETS += ("eval/olympiadbench",)
WRAPPINGS = ("{}", "({})", r"\left({}\right)", r"1\cdot({})", r"\frac{{{}}}{{1}}", "-(-({}))")
NO_FACTORS = ("text", "unit", "list", "relation", "tuple", "degree", "set", "union", "setminus")
SHARE_PAID = 16 / 420  # of the questions with a formula that equals the gold


def rows(shared: Path, names: tuple[str, ...] = SETS) -> list[dict[str, object]]:
    lines = []
    for name in names:
        lines += (shared / f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def golds(shared: Path) -> list[str]:
    found = set()
    for row in rows(shared):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        found |= {str(answer).strip("$ ") for answer in answers}
    # Numbers are compared as numbers.
    return sorted(
        gold for gold in found if 0 < len(gold) < 200 and not re.fullmatch("[-.0-9]+", gold)
    )


def formulas(question: str) -> set[str]:
    texts = (text for match in _MARKED_FORMULA.findall(question) for text in match if text)
    return {text.strip().rstrip(".,;") for text in texts}


@pytest.mark.parametrize("count", [1_200, 176_000])
def test_golds_are_credited_for_each_other_only_where_they_have_one_value(shared, count) -> None:
    rng = random.Random(count)
    all_golds = golds(shared)
    credited = []
    for _ in range(count):
        answer, gold = rng.sample(all_golds, 2)
        if grade(answer, gold, template="answer").correct:
            credited.append((answer, gold))
    # Equal golds are rare: 10 pairs of 100,000.
    assert len(credited) <= 3 + count / 5_000, credited


@pytest.mark.parametrize("count", [400, 20_000])
def test_formulas_of_a_question_are_not_paid_in_any_wrapping(shared, count) -> None:
    questions = rows(shared, SETS[:2])[:count]
    num_equal = 0
    paid = dict.fromkeys(WRAPPINGS, 0)
    for row in questions:
        question, gold = str(row["problem"]), str(row["answer"])
        for formula in formulas(question):
            if formula == gold or not re.search(r"[\\+*/^=(-]", formula):
                continue
            if not grade(formula, gold, template="answer").correct:
                continue
            num_equal += 1
            for wrapping in WRAPPINGS:
                answer = wrapping.format(formula)
                paid[wrapping] += grade(answer, gold, template="answer", question=question).correct
    assert num_equal >= count / 80
    assert max(paid.values()) <= max(3, SHARE_PAID * num_equal), paid


@pytest.mark.parametrize("count", [400, 20_000])
def test_a_gold_in_brackets_and_times_one_is_the_gold(shared, count) -> None:
    refused = []
    num_graded = 0
    for row in rows(shared, SETS[:2])[:count]:
        gold = str(row["answer"])
        tree = parse(gold)
        if tree is None or tree.kind in NO_FACTORS or "," in gold:  # (1,200) is a pair
            continue
        num_graded += 1
        answer = f"({gold})"
        question = str(row["problem"])
        if not grade(answer, gold, template="answer", question=question).correct:
            refused.append((answer, gold))
        once = parse(rf"1\cdot({gold})")
        if once is not None and not equal(once, tree, False):
            refused.append((rf"1\cdot({gold})", gold))
    assert len(refused) <= num_graded / 100, refused
