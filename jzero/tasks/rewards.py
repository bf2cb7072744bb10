"""Rewards: a score is the weighted sum of the functions that `task.reward.functions` names.

There are six kinds of function:
- "accuracy" is the score of the task's own grader.
- The functions of RESPONSE_REWARDS look at one response. They run in the grader process.
- The functions of PROBLEM_REWARDS look at one response and its problem, such as a program and its
  tests. They run in the grader process.
- The functions of BATCH_REWARDS look at lengths, or compare the responses of a batch. They run
  where the grades of a batch are collected.
- "judge" is a model that is asked over the network (`jzero.grading.judge`).
- "module:function" and "FILE.py:function" are functions of the user's, called in the grader process
  with what their parameters ask for (`user_functions`). Those that ask for lists are called once
  for all responses of a step (`batched_rewards`).

To add a function to jzero, write it here and add a line to one of the three tables. Names, formulas
and defaults are those of open-r1 (github.com/huggingface/open-r1, rewards.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Real

from jzero.errors import UserError
from jzero.grading import judge
from jzero.grading.judge import JUDGE
from jzero.sandbox.client import SandboxError
from jzero.tasks import code, user_functions
from jzero.tasks.user_functions import Reward
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import RewardConfig, TaskConfig

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_FORMAT = re.compile(
    r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE
)
_INLINE_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_INLINE_FORMAT = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_STEPS_FOR_FULL_REWARD = 3


# Rewards of one response: (response, settings) -> reward.


def format_reward(response: str, settings: RewardConfig) -> float:
    """Returns 1 for thoughts and an answer in their tags, each tag once and on a line of its own.

    Source: open-r1, format_reward.
    """
    has_each_tag_once = all(response.count(tag.strip()) == 1 for tag in _TAGS)
    return float(has_each_tag_once and _FORMAT.match(response) is not None)


def tag_count(response: str, settings: RewardConfig) -> float:
    """Returns a quarter for each of the four tags that the response has exactly once.

    Source: open-r1, tag_count_reward.
    """
    return sum(response.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def format_inline(response: str, settings: RewardConfig) -> float:
    """Returns 1 for thoughts and an answer in their tags, each tag once, on one line or on several.

    "<think>2 + 2 = 4</think> <answer>4</answer>" has this form, and `format_reward` refuses it.
    Source: the format that open-r1's first system prompt asked for.
    """
    has_each_tag_once = all(response.count(tag) == 1 for tag in _INLINE_TAGS)
    return float(has_each_tag_once and _INLINE_FORMAT.fullmatch(response) is not None)


def tag_count_inline(response: str, settings: RewardConfig) -> float:
    """Returns a quarter for each of the four tags that the response has exactly once, anywhere."""
    return sum(response.count(tag) == 1 for tag in _INLINE_TAGS) / len(_INLINE_TAGS)


def reasoning_steps(response: str, settings: RewardConfig) -> float:
    """Returns min(1, steps / 3), where words such as "First," and bullets count as steps.

    As in open-r1's reasoning_steps_reward, a numbered step "1." counts at the very start of the
    response only: the pattern has no MULTILINE flag.
    """
    return min(1.0, len(_STEP.findall(response)) / _STEPS_FOR_FULL_REWARD)


def repetition_penalty(response: str, settings: RewardConfig) -> float:
    """Returns (1 - distinct / all) * repetition_max over the n-grams of lower-case words.

    Source: open-r1, get_repetition_penalty_reward, after appendix C.2 of Yeo et al. 2025
    (arXiv:2502.03373).
    """
    words = response.lower().split()
    n = settings.repetition_ngram
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not ngrams:
        return 0.0
    return (1 - len(set(ngrams)) / len(ngrams)) * settings.repetition_max


ResponseReward = Callable[[str, "RewardConfig"], float]

RESPONSE_REWARDS: dict[str, ResponseReward] = {
    "format": format_reward,
    "tag_count": tag_count,
    "format_inline": format_inline,
    "tag_count_inline": tag_count_inline,
    "reasoning_steps": reasoning_steps,
    "repetition_penalty": repetition_penalty,
}


# Rewards of one response and its problem: (response, gold, task) -> reward, or None where the
# reward does not apply to the problem.

ProblemReward = Callable[[str, JsonValue, "TaskConfig"], float | None]

PROBLEM_REWARDS: dict[str, ProblemReward] = {
    "code": code.code_reward,
    "binary_code": code.binary_code_reward,
    "code_format": code.code_format_reward,
}


# Rewards of a batch of N responses: (correct, lengths, settings) -> rewards.


def length(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    settings: RewardConfig,
) -> Float[np.ndarray, " N"]:
    """Returns λ = 1/2 - (length - min) / (max - min) over the batch; min(0, λ) where it is wrong.

    All rewards are 0 where all lengths are equal. Source: Kimi k1.5 (arXiv:2501.12599, section
    2.3.3).
    """
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return np.zeros(len(lengths))
    lam = 0.5 - (lengths - shortest) / (longest - shortest)
    return np.where(correct, lam, np.minimum(0.0, lam))


def cosine(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    settings: RewardConfig,
) -> Float[np.ndarray, " N"]:
    """Returns half a period of a cosine of the length, constant from `cosine_length` on.

    With the defaults a short response is worth more than a long one where it is right, and less
    where it is wrong. Source: Yeo et al. 2025 (arXiv:2502.03373).
    """
    progress = np.minimum(lengths / settings.cosine_length, 1.0)
    share_of_short = (1 + np.cos(np.pi * progress)) / 2
    short = np.where(correct, settings.cosine_right_short, settings.cosine_wrong_short)
    long = np.where(correct, settings.cosine_right_long, settings.cosine_wrong_long)
    return long + (short - long) * share_of_short


def soft_overlong(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    settings: RewardConfig,
) -> Float[np.ndarray, " N"]:
    """Returns 0 up to a length of overlong_length - overlong_cache, falling to -1 after it.

    The reward is -1 from `overlong_length` on. Lengths are in tokens. Source: DAPO
    (arXiv:2503.14476, eq. 13).
    """
    excess = lengths - (settings.overlong_length - settings.overlong_cache)
    # A cache of 0 tokens is a step from 0 to -1, which the last line makes.
    falling = -np.clip(excess / max(settings.overlong_cache, 1), 0.0, 1.0)
    return np.where(lengths > settings.overlong_length, -1.0, falling)


BatchReward = Callable[[np.ndarray, np.ndarray, "RewardConfig"], np.ndarray]

BATCH_REWARDS: dict[str, BatchReward] = {
    "length": length,
    "cosine": cosine,
    "soft_overlong": soft_overlong,
}
# These count tokens, whatever `task.reward.unit` says.
_ALWAYS_IN_TOKENS = ("soft_overlong",)

NAMES = ("accuracy", *RESPONSE_REWARDS, *PROBLEM_REWARDS, *BATCH_REWARDS, JUDGE)


# The sum.


def check_rewards(settings: RewardConfig) -> None:
    """Checks that every name is a function and that there is a weight for each.

    Raises:
        UserError: a name is no function or is named twice, or the weights do not fit the
            functions.
    """
    for name, count in Counter(settings.functions).items():
        if name not in NAMES:
            check_function(name)
        if count > 1:
            raise UserError(
                f"task.reward.functions names {name} {count} times: name it once, and give it a "
                "weight in task.reward.weights"
            )
    if JUDGE in settings.functions:
        judge.check_judge(settings.judge)
    elif settings.judge.url:
        raise UserError(
            f"task.reward.judge.url={settings.judge.url} is not used: add judge to "
            "task.reward.functions, or leave the url empty"
        )
    weights, count = settings.weights, len(settings.functions)
    are_numbers = all(isinstance(weight, int | float) for weight in weights)
    if weights and (len(weights) != count or not are_numbers):
        raise UserError(
            f"task.reward.{weights=} must be a number for each of {count} functions, or none for 1"
        )


def check_function(name: str) -> None:
    """Raises UserError if there is no function of the user's `name`, or it cannot be called."""
    try:
        user_functions.parameter_names(name)
    except UserError:
        raise
    except Exception as error:  # the module is the user's: its import may raise anything
        raise UserError(
            f"task.reward.functions: {name!r} is not one of {', '.join(NAMES)} or a "
            f"module:function or FILE.py:function ({type(error).__name__}: {error}); give the flag "
            "once for each"
        ) from None


def users_functions(settings: RewardConfig) -> list[str]:
    """Returns the names in `task.reward.functions` that are functions of the user's."""
    return [name for name in settings.functions if name not in NAMES]


def asking_for_environment(settings: RewardConfig) -> list[str]:
    """Returns the functions of the user's that ask for the instance of the environment."""
    return [
        name
        for name in users_functions(settings)
        if user_functions.ENVIRONMENT in (user_functions.parameter_names(name) or ())
    ]


def batched(settings: RewardConfig) -> list[str]:
    """Returns the functions of the user's that are called once for all responses of a step."""
    return [name for name in users_functions(settings) if user_functions.is_batched(name)]


def need_worker(settings: RewardConfig, called: Sequence[str]) -> bool:
    """Returns whether a grader process has rewards to add; `called` are functions that it has not.

    Those of a batch, and the judge's, are added elsewhere.
    """
    elsewhere = {"accuracy", *BATCH_REWARDS, JUDGE, *batched(settings), *called}
    return any(name not in elsewhere for name in settings.functions)


def need_columns(settings: RewardConfig) -> bool:
    """Returns whether a reward asks for the columns of the data set; raises as `asked_for`."""
    if "row" in asked_for(settings):
        return True
    return any("row" in user_functions.asked_in_lists(name) for name in batched(settings))


def asked_for(settings: RewardConfig) -> frozenset[str]:
    """Returns which values of an episode the rewards ask for, of `user_functions.FROM_EPISODE`.

    Raises:
        UserError: a function of the user's cannot be found or called.
    """
    names = users_functions(settings)
    for name in names:
        check_function(name)
    asked = user_functions.asked_for(names)
    return asked | judge.asked_for(settings.judge) if JUDGE in settings.functions else asked


def episode_values(
    problem: Problem, response: str, earlier: user_functions.Turns, settings: RewardConfig
) -> dict[str, JsonValue]:
    """Returns what the rewards ask for of an episode, beside the response and the gold.

    The arguments are those of `user_functions.episode_values`.
    """
    return user_functions.episode_values(problem, response, earlier, asked_for(settings))


# The user's function `name`, called for one response: (name, response, gold, task) -> reward.
CallFunction = Callable[[str, str, JsonValue, "TaskConfig"], Reward | None]


def call_function(name: str, response: str, gold: JsonValue, task: TaskConfig) -> Reward | None:
    """Calls a function of the user's that asks for nothing of the episode.

    Raises:
        UserError: there is no such function.
        Exception: whatever `user_functions.call_function` raises.
    """
    check_function(name)
    values = {"response": response, "gold": gold, "task": task}
    return user_functions.call_function(name, values)


def add_response_rewards(
    grade: Grade,
    response: str,
    gold: JsonValue,
    task: TaskConfig,
    call: CallFunction = call_function,
) -> Grade:
    """Returns the grade with the rewards that this response alone decides as its `parts`.

    `call` calls a function of the user's; a grader process limits what such a call may take.
    """
    # `python -m jzero.grade` computes scores alone: its settings have no section `reward`.
    settings = getattr(task, "reward", None)
    if settings is None:
        return grade
    parts = {}
    for name in settings.functions:
        if name in RESPONSE_REWARDS:
            parts[name] = float(RESPONSE_REWARDS[name](response, settings))
        elif name in PROBLEM_REWARDS:
            try:
                reward = PROBLEM_REWARDS[name](response, gold, task)
            except SandboxError as error:
                return replace(grade, reason=f"error: {error}", failed=True)
            if reward is not None:
                parts[name] = reward
        elif name not in NAMES and not _is_batched(name):
            result = call(name, response, gold, task)
            if result is not None:
                parts[name] = result.value
                parts |= {f"{name}.{part}": value for part, value in result.parts.items()}
    return replace(grade, parts=parts)


def _is_batched(name: str) -> bool:
    """Returns whether a function is batched; one that cannot be found fails where it is called."""
    try:
        return user_functions.is_batched(name)
    except Exception:
        return False


def add_batch_rewards(
    grades: Sequence[Grade],
    characters: Sequence[int],
    tokens: Sequence[int],
    settings: RewardConfig,
) -> list[Grade]:
    """Returns the grades of N responses with all parts, and their weighted sum as the score.

    Args:
        grades: N grades from `add_response_rewards`.
        characters: the lengths of the N responses in characters.
        tokens: their lengths in tokens.
        settings: the section `task.reward` of the config.
    """
    if tuple(settings.functions) == ("accuracy",) and not settings.weights:
        return list(grades)
    weights = dict.fromkeys(settings.functions, 1.0)
    if settings.weights:
        weights = dict(zip(settings.functions, settings.weights, strict=True))

    batch_rewards = _batch_rewards(grades, characters, tokens, settings)
    done = []
    for i, grade in enumerate(grades):
        known = {"accuracy": grade.score, **grade.parts}
        known |= {name: float(rewards[i]) for name, rewards in batch_rewards.items()}
        # In the order of the functions, in which the sum is rounded. A function that does not apply
        # to a response adds nothing to its score.
        parts = {name: known[name] for name in weights if name in known}
        score = sum(weights[name] * part for name, part in parts.items())
        # The named parts of a function's result are metrics alone: its reward has them already.
        for name, part in grade.parts.items():
            parts.setdefault(name, part)
        if grade.failed:  # a part is missing, and without it the sum is no score
            score = 0.0
        done.append(replace(grade, score=score, parts=parts))
    return done


def _batch_rewards(
    grades: Sequence[Grade],
    characters: Sequence[int],
    tokens: Sequence[int],
    settings: RewardConfig,
) -> dict[str, np.ndarray]:
    """Returns the rewards f64[N] of every function of BATCH_REWARDS that the settings name."""
    if not grades:
        return {}
    correct = np.array([grade.correct for grade in grades], bool)
    rewards = {}
    for name in settings.functions:
        if name in BATCH_REWARDS:
            in_tokens = settings.unit == "tokens" or name in _ALWAYS_IN_TOKENS
            lengths = np.asarray(tokens if in_tokens else characters, float)
            rewards[name] = BATCH_REWARDS[name](correct, lengths, settings)
    return rewards
