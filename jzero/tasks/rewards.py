"""Rewards beside a task's own score, with the values of open-r1. A score is their weighted sum; None is not applicable.
Those that look at lengths or at a whole batch are computed where that is collected, the others in the pool's worker."""

import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jzero.errors import UserError
from jzero.types import Grade

if TYPE_CHECKING:
    from jzero import config

TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
FORMAT = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
STEPS = 3  # for the whole reward


def repetition_penalty(response: str, settings: "config.RewardConfig") -> float:
    """(1 - distinct / all) * repetition_max over the n-grams of lower-case words."""
    words, n = response.lower().split(), settings.repetition_ngram
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return (1 - len(set(grams)) / len(grams)) * settings.repetition_max if grams else 0.0


RESPONSE: dict[str, Callable[[str, Any], float]] = {  # of one: (response, settings)
    # 1 for a thought and an answer in their tags, each on lines of their own, every tag once
    "format": lambda text, _: float(
        all(text.count(tag.strip()) == 1 for tag in TAGS) and bool(FORMAT.match(text))
    ),
    # a quarter for each of the four tags that is there exactly once
    "tag_count": lambda text, _: sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS),
    # min(1, steps / 3); a numbered step counts at the very start of the response only, as in open-r1
    "reasoning_steps": lambda text, _: min(1.0, len(STEP.findall(text)) / STEPS),
    "repetition_penalty": repetition_penalty,
}


# A batch: (correct bool[N], lengths i[N], settings) -> f[N]


def length(correct: np.ndarray, lengths: np.ndarray, settings: "config.RewardConfig") -> np.ndarray:
    """λ = 1/2 - (length - min) / (max - min) over the batch; min(0, λ) where wrong (Kimi 1.5, arXiv:2501.12599)."""
    low, high = lengths.min(), lengths.max()
    lam = 0.5 - (lengths - low) / (high - low) if low < high else 0.0
    return np.where(correct, lam, np.minimum(0.0, lam))


def cosine(correct: np.ndarray, lengths: np.ndarray, settings: "config.RewardConfig") -> np.ndarray:
    """Half a cosine of the length, flat after cosine_length: short is worth more where right, less where wrong."""
    share = (1 + np.cos(np.pi * np.minimum(lengths / settings.cosine_length, 1.0))) / 2
    short = np.where(correct, settings.cosine_right_short, settings.cosine_wrong_short)
    long = np.where(correct, settings.cosine_right_long, settings.cosine_wrong_long)
    return long + (short - long) * share


def soft_overlong(
    correct: np.ndarray, lengths: np.ndarray, settings: "config.RewardConfig"
) -> np.ndarray:
    """0 up to overlong_length - overlong_cache, falling to -1 at overlong_length (DAPO, arXiv:2503.14476, eq. 13)."""
    over = lengths - (settings.overlong_length - settings.overlong_cache)
    falling = -np.clip(over / max(settings.overlong_cache, 1), 0.0, 1.0)
    return np.where(lengths > settings.overlong_length, -1.0, falling)


BATCH = {"length": length, "cosine": cosine, "soft_overlong": soft_overlong}
NAMES = ("accuracy", *RESPONSE, *BATCH)  # accuracy is the score of the task's own grader


def check(settings: "config.RewardConfig") -> None:
    """Refuse names that mean nothing and weights that fit nothing."""
    for name in set(settings.functions) - set(NAMES):
        try:
            if not callable(pkgutil.resolve_name(name)):
                raise TypeError("no function")
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            known = (
                f"{', '.join(NAMES)} or a module:function ({error}); give the flag once for each"
            )
            raise UserError(f"task.reward.functions: {name!r} is not one of {known}") from None
    count, weights = len(settings.functions), settings.weights
    if weights and (
        len(weights) != count or not all(isinstance(weight, int | float) for weight in weights)
    ):
        raise UserError(
            f"task.reward.{weights=} must be a number for each of {count} functions, or none for 1"
        )


def of_response(response: str, gold: Any, task: "config.TaskConfig", grade: Grade) -> Grade:
    """The grade with the parts that this response alone decides."""
    functions = (
        task.reward.functions if hasattr(task, "reward") else ()
    )  # python -m jzero.grade has none
    values = {name: RESPONSE[name](response, task.reward) for name in functions if name in RESPONSE}
    values |= {
        name: pkgutil.resolve_name(name)(response, gold, task)
        for name in functions
        if name not in NAMES
    }
    return replace(
        grade, parts={name: float(value) for name, value in values.items() if value is not None}
    )


def of_batch(
    grades: list[Grade], characters: list[int], tokens: list[int], settings: "config.RewardConfig"
) -> list[Grade]:
    """The grades of a batch with all their parts, and their weighted sum as the score."""
    if tuple(settings.functions) == ("accuracy",) and not settings.weights:
        return grades
    correct = np.array([grade.correct for grade in grades], bool)
    weights = dict(
        zip(settings.functions, settings.weights or (1.0,) * len(settings.functions), strict=True)
    )
    lengths = dict.fromkeys(BATCH, tokens if settings.unit == "tokens" else characters) | {
        "soft_overlong": tokens
    }
    of = lambda name: BATCH[name](correct, np.asarray(lengths[name], float), settings)
    batch = {name: of(name) for name in weights if name in BATCH and grades}
    out = []
    for i, grade in enumerate(grades):
        found = (
            {"accuracy": grade.score}
            | grade.parts
            | {name: float(values[i]) for name, values in batch.items()}
        )
        parts = {name: found[name] for name in weights if name in found}
        out.append(
            replace(
                grade,
                score=sum(weights[name] * value for name, value in parts.items()),
                parts=parts,
            )
        )
    return out
