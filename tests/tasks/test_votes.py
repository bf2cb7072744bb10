"""maj@k: answers that the grader finds equal are one vote, right or wrong, in bounded time."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.answers.extract import LONGEST_ANSWER
from jzero.answers.same_answer import same_answer
from jzero.config import TaskConfig
from jzero.rollout.evaluation import majority_vote
from jzero.tasks import suites
from jzero.tasks.votes import count_as_one, vote, votes_of_all
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn
from jzero.workers.pool import Pool

# What a response votes for


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{ \\frac{1}{2} } done", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "2"),
        ("<think>\\boxed{1}</think> it is 3 or 4,000.", "4,000"),
        ("<answer>1\n + 2</answer>", "1 + 2"),
        ("\\boxed{\\pi r}", "\\pi r"),
        ("nothing", ""),
    ],
)
def test_the_vote_of_a_response_is_its_answer(text: str, answer: str) -> None:
    assert vote(text) == answer


def test_the_vote_on_a_multiple_choice_question_is_the_letter() -> None:
    assert vote("Of 3 choices the first fails.\nAnswer: C", suites.MULTIPLE_CHOICE) == "C"
    assert vote("I give up at 3.", suites.MULTIPLE_CHOICE) == ""


# Which answers are one vote

ONE_VOTE = [
    ["2", "2.0", "2.00", "+2", "\\text{2}"],
    ["\\frac12", "\\dfrac{1}{2}", "0.5", "1/2", "\\frac{2}{4}"],
    ["1,000", "1000", "1000.0", "10^3", "1{,}000"],
    ["x+1", "1+x", "1 + x"],
    ["\\sqrt{8}", "2\\sqrt{2}"],
    ["(1, 2)", "(1,2)", "( 1 , 2.0 )"],
]


@pytest.mark.parametrize("answers", ONE_VOTE, ids=lambda answers: answers[0])
def test_ways_of_writing_one_answer_are_one_vote(answers: list[str]) -> None:
    for pair in itertools.permutations(answers, 2):
        assert len(set(count_as_one(pair, same_answer))) == 1, pair


def test_different_answers_are_different_votes() -> None:
    answers = [ways[0] for ways in ONE_VOTE] + ["3", "-2", "0.51", "1001", "x+2"]

    assert len(set(count_as_one(answers, same_answer))) == len(answers)


def test_the_majority_is_of_values_and_not_of_texts() -> None:
    """With votes as texts, 1 would be one of three answers with one vote each: a chance of 1/3."""
    votes = count_as_one(["2", "2.0", "1"], same_answer)

    assert majority_vote(votes, [False, False, True]) == 0.0


def brute_force(answers: Sequence[str], is_same) -> list[str]:
    """Returns the votes by the documented rule, with every comparison made.

    `is_same` is over texts that are not empty. Answers are taken by frequency, then by text.
    """
    result = {"": ""}
    while len(result) < len({*answers, ""}):
        left = [answer for answer in answers if answer not in result]
        most = max(left.count(answer) for answer in left)
        answer = min(answer for answer in left if left.count(answer) == most)
        firsts = [key for key, first in result.items() if key and key == first]
        same = [first for first in firsts if is_same(answer, first)]
        result[answer] = same[0] if same else answer
    return [result[answer] for answer in answers]


WRITTEN = ["1/2", "1/3", "2/4", "2/6", "3/9", "-1/2", "5/7", ""]


@given(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=9))
def test_votes_are_those_of_brute_force(answers: list[str]) -> None:
    def by_value(first: str, second: str) -> bool:
        return Fraction(first) == Fraction(second)

    def graded(first: str, second: str) -> Grade:
        return Grade(0.0, by_value(first, second), "wrong value")

    votes = count_as_one(answers, graded)

    assert votes == brute_force(answers, by_value)
    assert count_as_one(answers, same_answer) == votes  # the grader's equivalence is that of values


@given(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=9), st.randoms())
def test_votes_do_not_depend_on_the_order_of_the_responses(
    answers: list[str], rng: random.Random
) -> None:
    places = list(range(len(answers)))
    rng.shuffle(places)

    votes = count_as_one(answers, same_answer)

    shuffled = count_as_one([answers[place] for place in places], same_answer)
    assert shuffled == [votes[place] for place in places]


@given(st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=8), st.integers(0, 99))
def test_a_relation_that_is_not_transitive_makes_stars_and_no_chains(
    answers: list[str], seed: int
) -> None:
    pairs = random.Random(seed)
    related = {
        frozenset(pair)
        for pair in itertools.combinations(sorted(set(answers)), 2)
        if pairs.random() < 0.4
    }

    def compare(first: str, second: str) -> Grade:
        return Grade(0.0, frozenset((first, second)) in related, "wrong value")

    votes = count_as_one(answers, compare)

    assert votes == brute_force(answers, lambda a, b: a == b or frozenset((a, b)) in related)


numbers = st.integers(-(10**7), 10**7)


@given(numbers, numbers, st.booleans())
def test_numerals_are_decided_as_the_grader_decides_them(
    first: int, second: int, are_near: bool
) -> None:
    """Numerals are not compared, because their text says enough. The grader must agree."""
    second = first + second % 2 if are_near else second
    ways = [f"{second}", f"{second:,}", f"{second}.0", f"{second:,}.00"]

    for way in ways:
        is_same = len(set(count_as_one([str(first), way], no_comparison))) == 1
        assert is_same == (first == second)
        assert same_answer(str(first), way).correct == is_same


def no_comparison(first: str, second: str) -> Grade:
    raise AssertionError(f"{first} and {second} were compared")


# Bounds


class Counted:
    """A comparison that counts its calls by their answers, and ends without a verdict for some."""

    def __init__(self, ends: str = "", reason: str = "timeout") -> None:
        self.calls = Counter[tuple[str, str]]()
        self.ends, self.reason = ends, reason

    def __call__(self, first: str, second: str) -> Grade:
        self.calls[first, second] += 1
        has_no_verdict = self.ends and self.ends in first + second
        return Grade(0.0, False, self.reason if has_no_verdict else "wrong value")


def test_k_answers_need_at_most_k_probes_and_a_comparison_of_each_pair() -> None:
    compare = Counted()

    votes = count_as_one([f"x_{i}" for i in range(20)], compare)

    assert len(set(votes)) == 20
    assert max(compare.calls.values()) == 1
    assert compare.calls.total() <= 20 + 20 * 19 // 2


@pytest.mark.parametrize("reason", ["timeout", "killed", "unparsed", "error: MemoryError"])
def test_an_answer_without_a_verdict_is_compared_no_more(reason: str) -> None:
    compare = Counted("bad", reason)

    count_as_one([f"x_{i}" for i in range(20)] + ["bad_1", "bad_2"], compare)

    bad = {pair: n for pair, n in compare.calls.items() if "bad" in pair[0] + pair[1]}
    assert sum(bad.values()) <= 2 * (1 + 2)


def test_an_answer_that_is_too_long_is_compared_with_none() -> None:
    long = "1" * (LONGEST_ANSWER + 1)

    assert count_as_one([long, "1", long], no_comparison) == [long, "1", long]


# In grader processes


def rollouts_of(kind: str, answers: Sequence[str]) -> list[Rollout]:
    """Returns a rollout of each answer to one problem, whose tokens do not matter."""
    problem = Problem("p", kind, "q", {"answer": "7", "question": ""})
    rollouts = []
    for i, answer in enumerate(answers):
        grade = Grade(0.0, False, "wrong value")
        turns = (Turn(1, 2, f"so \\boxed{{{answer}}}", "stop", grade),)
        rollouts.append(Rollout(problem, i, Tokens([0, 0]), turns, grade))
    return rollouts


def test_answers_of_mathematics_are_compared_in_grader_processes() -> None:
    task = TaskConfig(grade_workers=1)
    same = [way for answers in ONE_VOTE[:3] for way in answers[:3]]
    problems = [rollouts_of("math", same), rollouts_of("countdown", ["1+2", "2+1", "1 + 2"])]

    with Pool(1) as pool:
        votes = votes_of_all(problems, pool, task)
        graded = pool.counters["graded"]

    assert [len(set(of_problem)) for of_problem in votes] == [3, 2]
    assert votes[1] == ["1+2", "2+1", "1+2"]  # equations have no equivalence but their text
    assert graded == 0  # comparisons are no graded responses
