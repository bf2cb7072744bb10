"""Multiple choice by log-likelihood: the model's answer is the choice that it finds most probable.

Input: a JSONL file of questions, each with its choices and the index of the right one. Output: the
accuracy of the choice with the largest sum of log-probabilities, and of the choice with the largest
sum per character. These are lm-eval's `acc` and `acc_norm` of a task of output_type
multiple_choice, with the question as its doc_to_text. Nothing is sampled.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from jaxtyping import Int32

from jzero.decoder.scoring import Scoring, score_all
from jzero.errors import UserError
from jzero.files import parse_json, read_text
from jzero.hosts import collectives
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.evaluation import standard_error
from jzero.rollout.sampler import Sampler


@dataclass(frozen=True)
class MultipleChoice:
    """A question with a list of possible answers."""

    question: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


@dataclass(frozen=True)
class AnsweredChoice:
    """A question with the log-likelihoods of its choices."""

    problem: MultipleChoice
    sums: tuple[float, ...]  # the log-likelihood of each choice
    per_character: tuple[float, ...]  # the log-likelihoods divided by the characters of the choices

    @property
    def is_correct(self) -> bool:
        """Whether the right choice has the largest log-likelihood."""
        return int(np.argmax(self.sums)) == self.problem.answer

    @property
    def is_correct_per_character(self) -> bool:
        """Whether the right choice has the largest log-likelihood per character."""
        return int(np.argmax(self.per_character)) == self.problem.answer


class LikelihoodSummary(TypedDict):
    """The fields of summary.json for one file of questions."""

    problems: int  # evaluated questions
    dropped: int  # questions longer than the model's context
    accuracy: float  # by the sum
    stderr: float | None  # None for one question
    accuracy_per_character: float
    stderr_per_character: float | None


def read_questions(path: Path) -> list[MultipleChoice]:
    """Reads a JSONL file of objects with `question`, `choices` and `answer`.

    `answer` is the 0-based index of the right choice. Raises UserError, with the line, if the file
    has no questions or an incomplete one.
    """
    try:
        text = read_text(path, name=f"--loglikelihood {path}")
    except OSError as error:
        raise UserError(f"--loglikelihood {path}: cannot read the file ({error})") from None
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            problems.append(read_question(parse_json(line, path, number), f"{path} line {number}"))
    if not problems:
        raise UserError(f"--loglikelihood {path}: the file has no questions")
    return problems


def read_question(row: dict[str, object], place: str) -> MultipleChoice:
    """Returns the question of one line. `place` names the line in errors."""
    question, choices, answer = (row.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(question, str) or not question.strip():
        raise UserError(f'{place}: "question" has to be a text that is not empty')
    texts = choices if isinstance(choices, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f'{place}: "choices" has to be a list of two texts or more, none empty')
    # In Python, JSON's true is an int.
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise UserError(
            f'{place}: "answer" has to be the index of the right choice, from 0 to {len(texts) - 1}'
        )
    return MultipleChoice(question, tuple(texts), answer)


def encode_choice(
    text_tokenizer: PreTrainedTokenizerFast,
    question: str,
    choice: str,
) -> tuple[Int32[np.ndarray, " tokens"], int]:
    """Returns the tokens of a question and a choice, and the number of the question's tokens."""
    # As in lm-eval, a space joins question and choice, and counts as part of the choice; so do
    # spaces at the end of the question. Both are encoded as one text.
    stripped = question.rstrip()
    tokens = tokenizer.encode(text_tokenizer, f"{question} {choice}")
    # A token may span the space before a short choice: the choice must keep at least one token.
    num_question = min(len(tokenizer.encode(text_tokenizer, stripped)), len(tokens) - 1)
    return np.array(tokens, np.int32), num_question


def answer_questions(
    sampler: Sampler,
    params: qwen.Params,
    problems: list[MultipleChoice],
) -> tuple[list[AnsweredChoice], int]:
    """Scores every choice of every question in this host's share, and gathers all answers.

    Returns the answered questions in order, and the number of dropped questions: one of their
    choices exceeds the context. All hosts must call this function together.
    """
    longest = sampler.engine.max_sequence_tokens
    # The hosts of a decoder score their shares together, and each returns its own.
    own = collectives.local_share(len(problems))
    decoded = sampler.decoded_share(len(problems))
    num_dropped = 0
    scorings_to_run: list[Scoring] = []
    scored_problems: list[tuple[MultipleChoice, list[Scoring]]] = []
    for number in range(decoded.start, decoded.stop):
        problem = problems[number]
        is_own = own.start <= number < own.stop
        encoded = [
            encode_choice(sampler.tokenizer, problem.question, choice) for choice in problem.choices
        ]
        if max(len(tokens) for tokens, _ in encoded) > longest:
            num_dropped += is_own
            continue
        # Score only the tokens of the choice, given the question.
        scorings = [Scoring(tokens, first=num_question) for tokens, num_question in encoded]
        scorings_to_run += scorings
        if is_own:
            scored_problems.append((problem, scorings))
    score_all(sampler.engine, params, scorings_to_run)
    answered = [answer_question(problem, scorings) for problem, scorings in scored_problems]
    # Hosts exchange JSON: the shares differ in size.
    share = {
        "answered": [asdict(item) for item in answered],
        "dropped": num_dropped,
    }
    gathered = [json.loads(data) for data in collectives.gather_bytes(json.dumps(share).encode())]
    all_answered = [from_json(item) for part in gathered for item in part["answered"]]
    return all_answered, sum(part["dropped"] for part in gathered)


def answer_question(problem: MultipleChoice, scorings: list[Scoring]) -> AnsweredChoice:
    """Sums the scores of every choice, in float64."""
    sums = [float(scoring.scores.logps.sum(dtype=np.float64)) for scoring in scorings]
    per_character = [
        # Characters as lm-eval counts them: without the space before the choice.
        value / len(choice)
        for value, choice in zip(sums, problem.choices, strict=True)
    ]
    return AnsweredChoice(problem, tuple(sums), tuple(per_character))


def from_json(item: dict) -> AnsweredChoice:
    """Returns the answered question that `asdict` converted to `item`."""
    problem = item["problem"]
    return AnsweredChoice(
        MultipleChoice(problem["question"], tuple(problem["choices"]), problem["answer"]),
        tuple(item["sums"]),
        tuple(item["per_character"]),
    )


def summarize(answered: list[AnsweredChoice], dropped: int) -> LikelihoodSummary:
    """Returns the accuracies and their standard errors."""
    by_sum = np.array([item.is_correct for item in answered], np.float64)
    per_character = np.array([item.is_correct_per_character for item in answered], np.float64)
    return LikelihoodSummary(
        problems=len(answered),
        dropped=dropped,
        accuracy=float(by_sum.mean()),
        stderr=standard_error(by_sum),
        accuracy_per_character=float(per_character.mean()),
        stderr_per_character=standard_error(per_character),
    )


def rows(answered: list[AnsweredChoice]) -> str:
    """Returns one JSON line per question."""
    lines = [
        json.dumps(
            {
                "question": item.problem.question,
                "choices": item.problem.choices,
                "answer": item.problem.answer,
                "loglikelihoods": item.sums,
                "loglikelihoods_per_character": item.per_character,
                "correct": item.is_correct,
                "correct_per_character": item.is_correct_per_character,
            }
        )
        for item in answered
    ]
    return "".join(f"{line}\n" for line in lines)
