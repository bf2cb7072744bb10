"""Converts rollouts to JSON rows: samples.jsonl, trajectories/, evaluations and the terminal.

A row of samples.jsonl describes a rollout in words, and its first MAX_TOKENS tokens in columns:

    "group": 3                          # the rollouts of a step with this number share a problem
    "token_texts": ["The", " sum", ...] # texts of the tokens after the prompt, in order
    "logps": [-0.013, null, ...]        # log-prob under the sampler; null: not sampled
    "ages": 0 or [0, 1, ...]            # policy versions between sampling and training
    "token_advantages": 0.5 or [...]    # one number where all sampled tokens have the same
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from jzero.files import JsonObject
from jzero.hosts import processes
from jzero.model.tokenizer import decode
from jzero.rollout.evaluation import Evaluated
from jzero.terminal import WIDTH, columns, escaped
from jzero.types import JsonValue, Problem, Rollout, Turn, grade_of

MAX_TOKENS = 2048  # of a rollout whose log-probs are written
TOKEN_COLUMNS = ("token_texts", "logps", "ages", "token_advantages")
MAX_TOKENS_OF_CHARACTER = 8  # tokens that may share one character; more are invalid bytes
REPLACEMENT = "\ufffd"  # how a decoder shows an incomplete character

# Of a sampled answer on the terminal.
MARK = "  | "
PROMPT_LINES = 2
ANSWER_LINES = 8
SHOWN_CHARACTERS = 2000  # at most, of the start and of the end of a text


def sample_row(rollout: Rollout) -> JsonObject:
    """Returns a graded rollout as a row of plain JSON values.

    `response` is the last response. `turns` holds all turns of a multi-turn rollout. `rewards`
    holds the values of reward functions, if there are others than `accuracy`. If a user-defined
    function failed on the rollout, `score` is null and `failed` is set. `task` is the row's task
    with `task.name=mixed`.
    """
    problem, grade = rollout.problem, grade_of(rollout)
    row: JsonObject = {
        "id": problem.id,
        **place_of(problem),
        "sample": rollout.sample_index,
        "prompt": problem.prompt,
        "response": rollout.text,
        "gold": problem.gold,
        "score": grade.known_score,
        "advantage": rollout.advantage,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish_reason,
        "correct": grade.correct,
    }
    if grade.parts:
        row["rewards"] = grade.parts
    if problem.row_task:
        row["task"] = problem.row_task
    if grade.failed:
        row["failed"] = True
    if len(rollout.turns) > 1:
        # `response` is sufficient for a single turn.
        row["turns"] = [turn_row(turn) for turn in rollout.turns]
    return row


def place_of(problem: Problem) -> JsonObject:
    """Returns the columns `data` and `row`, the row of a data set that a problem is; {} for none.

    `row` counts from 0 in the split of the set, and `data` is the path or hub id of the set.
    """
    if problem.data_row is None:
        return {}
    return {"data": problem.data, "row": problem.data_row}


def logged_rows(
    rollouts: Sequence[Rollout],
    group_size: int,
    step: int,
    tokenizer: PreTrainedTokenizerFast,
) -> list[JsonObject]:
    """Returns the rows of samples.jsonl for the first rollouts of a step.

    `rollouts` start with complete groups of `group_size` rollouts, in order.
    """
    rows = []
    for index, rollout in enumerate(rollouts):
        tokens = token_columns(rollout, step, tokenizer)
        rows.append(sample_row(rollout) | {"group": index // group_size} | tokens)
    return rows


def token_columns(
    rollout: Rollout,
    step: int,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, JsonValue]:
    """Returns the columns of the first MAX_TOKENS tokens after the prompt, for step `step`."""
    shown = slice(rollout.prompt_length, rollout.prompt_length + MAX_TOKENS)
    tokens = rollout.tokens
    sampled = tokens.sampled[shown]
    logps: list[float | None] = []
    for logp, is_sampled in zip(tokens.logps[shown].tolist(), sampled, strict=True):
        # Three digits suffice for reading, and these columns are most of a row.
        logps.append(round(logp, 3) if is_sampled else None)
    columns: dict[str, JsonValue] = {
        "token_texts": token_texts(tokenizer, tokens.ids[shown].tolist()),
        "logps": logps,
        # The policy of step s has the version s - 1.
        "ages": _one_or_all(step - 1 - tokens.versions[shown], sampled),
    }
    if rollout.advantages is not None:
        advantages = np.round(rollout.advantages[shown].astype(float), 4)
        columns["token_advantages"] = _one_or_all(advantages, sampled)
    return columns


def _one_or_all(values: np.ndarray, sampled: np.ndarray) -> float | list[float]:
    """Returns the value that all sampled tokens share, or else the values of all tokens.

    Tokens that were not sampled have 0.
    """
    distinct = np.unique(values[sampled])
    # With one turn and one policy version the columns are constant, and the row is much shorter.
    if len(distinct) == 1:
        return distinct[0].item()
    return np.where(sampled, values, 0).tolist()


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; "" for a token that only continues a character.

    The first token of a character that several tokens encode has the text of all of them.
    """
    texts: list[str] = []
    pending: list[int] = []  # tokens of a character that is not complete yet
    for token in ids:
        pending.append(token)
        text = decode(tokenizer, pending)
        # A token may end within a character of several bytes, and only a later one completes it.
        is_complete = not text.endswith(REPLACEMENT) or len(pending) >= MAX_TOKENS_OF_CHARACTER
        if is_complete:
            texts += [text] + [""] * (len(pending) - 1)
            pending = []
    if pending:
        texts += [decode(tokenizer, pending)] + [""] * (len(pending) - 1)
    return texts


def turn_row(turn: Turn) -> JsonObject:
    """Returns a graded turn: its response, and the environment's reply."""
    grade = grade_of(turn)
    row: JsonObject = {
        "response": turn.text,
        "score": grade.known_score,
        "reason": grade.reason,
        "tokens": turn.end - turn.start,
        "reply": grade.reply,
    }
    if grade.parts:
        row["rewards"] = grade.parts
    if grade.tool_calls:
        row["tools"] = {
            "calls": grade.tool_calls,
            "failed": grade.failed_tool_calls,
            "seconds": round(grade.tool_seconds, 3),
        }
    return row


def write_responses(directory: Path, evaluated: Sequence[Evaluated]) -> None:
    """Writes all responses of evaluations: one file per problem set and kind.

    Each file has one line per problem, and is called <problem set>-<kind>.jsonl. The file for the
    task's own problems is problems-<kind>.jsonl.
    """
    for evaluation in evaluated:
        rows = problem_rows(
            evaluation.rollouts, evaluation.num_samples, has_scores=evaluation.has_all_rewards
        )
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        name = f"{evaluation.name or 'problems'}-{evaluation.label}.jsonl"
        processes.write_once(directory / name, "".join(lines))


def problem_rows(
    rollouts: list[Rollout], num_samples: int, *, has_scores: bool = True
) -> list[JsonObject]:
    """Returns a row for each problem of an evaluation, with all of its `num_samples` responses.

    has_scores: whether all reward functions were called, so that the mean score is one of training.
    """
    rows: list[JsonObject] = []
    for start in range(0, len(rollouts), num_samples):
        # The responses to one problem are neighbors.
        problem_rollouts = rollouts[start : start + num_samples]
        problem = problem_rollouts[0].problem
        row: JsonObject = {
            "id": problem.id,
            **place_of(problem),
            "prompt": problem.prompt,
            "gold": problem.gold,
            "accuracy": float(np.mean([grade_of(rollout).correct for rollout in problem_rollouts])),
            "samples": [response_row(rollout) for rollout in problem_rollouts],
        }
        scores = [
            grade_of(rollout).score for rollout in problem_rollouts if not grade_of(rollout).failed
        ]
        if has_scores and scores:
            row["score"] = float(np.mean(scores))
        if problem.row_task:
            row["task"] = problem.row_task
        rows.append(row)
    return rows


def response_row(rollout: Rollout) -> JsonObject:
    """Returns one graded response of an evaluation."""
    grade = grade_of(rollout)
    row: JsonObject = {
        "response": rollout.text,
        "correct": grade.correct,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish_reason,
    }
    if grade.parts:
        row["rewards"] = grade.parts
    return row


def sample_lines(step: int, row: JsonObject) -> list[str]:
    """Returns a logged rollout for the terminal: escaped, within WIDTH, and of a bounded length.

    Shows the end of the prompt, and the start and the end of the response.
    """
    score = "none" if row["score"] is None else f"{row['score']:.3f}"
    details = f"score {score}, {row['tokens']:,} tokens, {row['finish']}"
    # The name of the file or of the task may be long; the number at the end of the id is not.
    title = f"sample of step {step}, problem "
    room = WIDTH - 4 - len(details) - len(title)
    heading = f"{title}{_end_of(escaped(str(row['id'])), room)}"
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = prompt[-1].get("content") if prompt else ""
    # The content of a message may be a list of parts.
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    text = text.strip()
    question = _wrapped(text[-SHOWN_CHARACTERS:])
    if len(question) > PROMPT_LINES or len(text) > SHOWN_CHARACTERS:
        narrower = _wrapped(text[-SHOWN_CHARACTERS:], WIDTH - len(MARK) - len("..."))
        first, *others = narrower[-PROMPT_LINES:]
        question = [f"...{first}", *others]
    response = row["response"]
    if len(response) > 2 * SHOWN_CHARACTERS:
        response = f"{response[:SHOWN_CHARACTERS]}\n...\n{response[-SHOWN_CHARACTERS:]}"
    answer = _wrapped(response)
    if len(answer) > ANSWER_LINES:
        half = ANSWER_LINES // 2
        # The end has the answer, so the middle is left out.
        answer = [*answer[:half], "...", *answer[-half + 1 :]]
    return [
        f"  {heading}: {details}",
        *(f"{MARK}{line}".rstrip() for line in [*question, "", *answer]),
    ]


def _end_of(line: str, width: int) -> str:
    """Returns an escaped line, or "..." and its end if it has more than `width` columns."""
    if columns(line) <= width and len(line) <= 2 * width:
        return line
    end = line[-2 * width :]
    while end and columns(f"...{end}") > width:
        end = end[1:]
    return f"...{end}"


def _wrapped(text: str, width: int = WIDTH - len(MARK)) -> list[str]:
    """Returns escaped lines of at most `width` columns. Blank lines are left out."""
    lines = []
    for line in text.split("\n"):
        part, used = "", 0
        for char in escaped(line.rstrip()):
            # Combining characters have no width, but are bounded, too.
            used += max(columns(char), 0)
            if used > width or len(part) >= 2 * width:
                lines.append(part)
                part, used = "", columns(char)
            part += char
        if part.strip():
            lines.append(part)
    return lines
