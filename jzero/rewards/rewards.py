"""Rewards: the score of a response is a weighted sum of `task.reward.functions`.

There are six kinds of functions:

- "accuracy" is the score of the task's own grader.
- Functions in RESPONSE_REWARDS read one response. They run in the grader process.
- Functions in PROBLEM_REWARDS read one response and its problem, for example a program and its
  tests. They run in the grader process.
- Functions in BATCH_REWARDS read the lengths of responses, or compare the responses of a batch.
  They run where the grades of a batch are collected.
- "judge" is a model that is queried over the network (`jzero.workers.judge`).
- "module:function" and "FILE.py:function" are user-defined functions. The grader process calls
  them with the values that their parameters name (`user_functions`). Functions with parameters for
  lists are called once for all responses of a step (`batched_rewards`), or once for each problem if
  task.reward.batch=group.

Keyword arguments follow the name of a function, as in cosine(length=2000).

To add a function to jzero, write it here and add a line to one of the three tables. Names, formulas
and defaults follow open-r1 (github.com/huggingface/open-r1, rewards.py).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Real

from jzero.errors import UserError
from jzero.fields import LARGEST_FLOAT
from jzero.problems import bounds
from jzero.problems.bounds import Reward
from jzero.programming import code_rewards
from jzero.rewards import user_functions
from jzero.sandbox.client import SandboxError
from jzero.types import Grade, JsonValue
from jzero.workers import judge
from jzero.workers.judge import JUDGE

if TYPE_CHECKING:
    from jzero.config import RewardConfig, TaskConfig

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_FORMAT = re.compile(
    r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE
)
_INLINE_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_INLINE_FORMAT = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
# Parts of open-r1's formats: the tags between the thoughts and the answer, and the last tag.
_LINES_BETWEEN = re.compile(r"\n</think>\n<answer>\n")
_LAST_LINE = re.compile(r"\n</answer>$", re.MULTILINE)
_INLINE_BETWEEN = re.compile(r"</think>\s*<answer>")
_INLINE_LAST = re.compile(r"</answer>$", re.MULTILINE)
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_STEPS_FOR_FULL_REWARD = 3


# Rewards of one response: (response, **arguments) -> reward.


def open_r1_format(response: str) -> float:
    r"""Returns 1 if thoughts and an answer are in their tags, with each tag on its own line.

    Ignores further tags, and text after the answer's last line. Equivalent to a match of
    `^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$` with DOTALL and MULTILINE, but in linear
    time. Source: open-r1, format_reward since February 2025.
    """
    return _has_form(response, "<think>\n", _LINES_BETWEEN, _LAST_LINE)


def open_r1_format_inline(response: str) -> float:
    r"""Returns 1 if thoughts and an answer are in their tags, with any line breaks.

    Equivalent to a match of `^<think>.*?</think>\s*<answer>.*?</answer>$` with DOTALL and
    MULTILINE, but in linear time. Source: open-r1, format_reward at e4ac3ae.
    """
    return _has_form(response, "<think>", _INLINE_BETWEEN, _INLINE_LAST)


def _has_form(response: str, opening: str, between: re.Pattern, last: re.Pattern) -> float:
    """Returns 1 if `opening`, `between` and `last` follow each other, with any text in the gaps."""
    if not response.startswith(opening):
        return 0.0
    # The first match of `between` leaves the most text for `last`, so trying others is useless.
    middle = between.search(response, len(opening))
    return float(middle is not None and last.search(response, middle.end()) is not None)


def format_reward(response: str) -> float:
    """Returns 1 if thoughts and an answer are in their tags, each tag once and on its own line.

    This is stricter than open-r1's format (`open_r1_format`), which accepts a second answer.
    """
    has_each_tag_once = all(response.count(tag.strip()) == 1 for tag in _TAGS)
    return float(has_each_tag_once and _FORMAT.match(response) is not None)


def tag_count(response: str) -> float:
    """Returns 1/4 for each of the four tags that the response contains exactly once.

    Source: open-r1, tag_count_reward.
    """
    return sum(response.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def format_inline(response: str) -> float:
    """Returns 1 if thoughts and an answer are in their tags, each tag once, on one or more lines.

    "<think>2 + 2 = 4</think> <answer>4</answer>" has this format; `format_reward` rejects it.
    """
    has_each_tag_once = all(response.count(tag) == 1 for tag in _INLINE_TAGS)
    return float(has_each_tag_once and _INLINE_FORMAT.fullmatch(response) is not None)


def tag_count_inline(response: str) -> float:
    """Returns 1/4 for each of the four tags that occurs exactly once, with any line breaks."""
    return sum(response.count(tag) == 1 for tag in _INLINE_TAGS) / len(_INLINE_TAGS)


def reasoning_steps(response: str) -> float:
    """Returns min(1, steps / 3), where words such as "First," and bullets count as steps.

    As in open-r1's reasoning_steps_reward, a numbered step "1." counts only at the very start of
    the response: the pattern has no MULTILINE flag.
    """
    return min(1.0, len(_STEP.findall(response)) / _STEPS_FOR_FULL_REWARD)


def repetition_penalty(response: str, *, ngram: int = 3, most: float = -1.0) -> float:
    """Returns (1 - distinct / all) * most over the n-grams of lower-case words.

    Source: open-r1, get_repetition_penalty_reward, after appendix C.2 of Yeo et al. 2025
    (arXiv:2502.03373).
    """
    words = response.lower().split()
    ngrams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    # A response with fewer words than an n-gram repeats nothing.
    if not ngrams:
        return 0.0
    return (1 - len(set(ngrams)) / len(ngrams)) * most


ResponseReward = Callable[..., float]

RESPONSE_REWARDS: dict[str, ResponseReward] = {
    "open_r1_format": open_r1_format,
    "open_r1_format_inline": open_r1_format_inline,
    "format": format_reward,
    "tag_count": tag_count,
    "format_inline": format_inline,
    "tag_count_inline": tag_count_inline,
    "reasoning_steps": reasoning_steps,
    "repetition_penalty": repetition_penalty,
}


# Rewards of one response and its problem: (response, gold, task) -> reward, or None if the reward
# does not apply to the problem.

ProblemReward = Callable[[str, JsonValue, "TaskConfig"], float | None]

PROBLEM_REWARDS: dict[str, ProblemReward] = {
    "code": code_rewards.code_reward,
    "binary_code": code_rewards.binary_code_reward,
    "code_format": code_rewards.code_format_reward,
}


# These apply to no problem without tests.
REWARDS_OF_TESTS = ("code", "binary_code")


# Rewards of a batch of N responses: (correct, lengths, **arguments) -> rewards.


def length(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
) -> Float[np.ndarray, " N"]:
    """Returns λ = 1/2 - (length - min) / (max - min), or min(0, λ) for wrong responses.

    min and max are over the batch. If all lengths are equal, all rewards are 0. Source: Kimi k1.5
    (arXiv:2501.12599, section 2.3.3).
    """
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return np.zeros(len(lengths))
    lam = 0.5 - (lengths - shortest) / (longest - shortest)
    return np.where(correct, lam, np.minimum(0.0, lam))


def cosine(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    *,
    length: int = 1000,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
) -> Float[np.ndarray, " N"]:
    """Interpolates from the short to the long reward along half a cosine period of the length.

    The reward is constant from `length` on. By default, short responses earn more than long ones if
    they are right, and less if they are wrong. Source: Yeo et al. 2025 (arXiv:2502.03373).
    """
    progress = np.minimum(lengths / length, 1.0)
    share_of_short = (1 + np.cos(np.pi * progress)) / 2
    short = np.where(correct, right_short, wrong_short)
    long = np.where(correct, right_long, wrong_long)
    return long + (short - long) * share_of_short


def open_r1_cosine(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    *,
    length: int = 1000,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
) -> Float[np.ndarray, " N"]:
    """Returns `cosine` without its constant end: beyond `length` the cosine rises again.

    A response of length 2 * `length` earns as much as an empty one. Source: open-r1,
    get_cosine_scaled_reward, with lengths in characters. If open-r1 cannot parse the gold answer,
    it returns 1; here the grader's verdict decides.
    """
    share_of_short = (1 + np.cos(np.pi * lengths / length)) / 2
    short = np.where(correct, right_short, wrong_short)
    long = np.where(correct, right_long, wrong_long)
    return long + (short - long) * share_of_short


def soft_overlong(
    correct: Bool[np.ndarray, " N"],
    lengths: Real[np.ndarray, " N"],
    *,
    length: int = 16384,
    cache: int = 4096,
) -> Float[np.ndarray, " N"]:
    """Returns 0 up to a length of `length` - `cache`, and falls linearly to -1 at `length`.

    The reward stays -1 beyond `length`. Lengths are in tokens. Source: DAPO (arXiv:2503.14476,
    eq. 13).
    """
    excess = lengths - (length - cache)
    # With cache=0 the reward steps from 0 to -1 at `length`: the last line handles that case.
    falling = -np.clip(excess / max(cache, 1), 0.0, 1.0)
    return np.where(lengths > length, -1.0, falling)


BatchReward = Callable[..., np.ndarray]

BATCH_REWARDS: dict[str, BatchReward] = {
    "length": length,
    "cosine": cosine,
    "open_r1_cosine": open_r1_cosine,
    "soft_overlong": soft_overlong,
}
# Rewards that compare a response with the other responses of its batch.
_COMPARING = ("length",)
# Rewards that measure lengths in tokens for every `task.reward.unit`.
_ALWAYS_IN_TOKENS = ("soft_overlong",)
# Rewards that read whether a response is correct.
_READ_VERDICTS = ("accuracy", "length", "cosine", "open_r1_cosine")

NAMES = ("accuracy", *RESPONSE_REWARDS, *PROBLEM_REWARDS, *BATCH_REWARDS, JUDGE)
DEFAULT = ("accuracy",)  # task.reward.functions: the grader's score is the score
LEAST_ARGUMENTS = {"length": 1, "ngram": 1, "cache": 0}  # others have no lower bound
MOST_ARGUMENTS = {"most": 0}  # a penalty pays nothing for repetition; others have no upper bound


class BuiltIn(NamedTuple):
    """A built-in function, one of NAMES, with its arguments from task.reward.functions."""

    name: str
    arguments: dict[str, float]


@functools.cache
def find_built_in(function: str) -> BuiltIn | None:
    """Parses a built-in function such as "cosine(length=2000)"; None for a user-defined function.

    Raises:
        UserError: the function has no such argument, or a value is no number within its bounds.
    """
    name, bracket, rest = function.partition("(")
    if name not in NAMES:
        return None
    if not bracket:
        return BuiltIn(name, {})
    where = f"task.reward.functions={function}"
    if not rest.endswith(")"):
        raise UserError(f"{where}: close the bracket")
    positional, named = user_functions.read_arguments(function, rest[:-1])
    built_in = {**RESPONSE_REWARDS, **BATCH_REWARDS}.get(name)
    defaults = getattr(built_in, "__kwdefaults__", None) or {}
    if positional or not named.keys() <= defaults.keys():
        known = ", ".join(defaults) or "none"
        raise UserError(f"{where}: the arguments of {name} are {known}, each as NAME=NUMBER")
    arguments: dict[str, float] = {}
    for argument, value in named.items():
        # The type of the default is the type of the argument.
        is_whole = isinstance(defaults[argument], int)
        least = LEAST_ARGUMENTS.get(argument, -LARGEST_FLOAT)
        most = MOST_ARGUMENTS.get(argument, LARGEST_FLOAT)
        # bool is a subclass of int, and True is not a number here.
        if (
            isinstance(value, bool)
            or not isinstance(value, int if is_whole else int | float)
            or not least <= value <= most
        ):
            kind = "a whole number" if is_whole else "a number"
            raise UserError(f"{where}: {argument} must be {kind} between {least:g} and {most:g}")
        arguments[argument] = value
    return BuiltIn(name, arguments)


# The settings.


def check_rewards(settings: RewardConfig) -> None:
    """Checks the functions, the weights and the judge.

    Raises:
        UserError: a name is no function or occurs twice, the weights do not fit the functions, or
            the judge is misconfigured or unused.
    """
    for name, count in Counter(settings.functions).items():
        if not name.isprintable():  # it names a metric
            raise UserError(
                f"task.reward.functions: {name!r} has characters that are not printable"
            )
        if find_built_in(name) is None:
            check_function(name)
        if count > 1:
            raise UserError(
                f"task.reward.functions names {name} {count} times: name it once, and give it a "
                "weight in task.reward.weights"
            )
    if JUDGE in settings.functions:
        judge.check_judge(settings.judge)
    elif settings.judge is not None:
        raise UserError(
            f"task.reward.judge.url={settings.judge.url} is not used: add judge to "
            "task.reward.functions, or set task.reward.judge=none"
        )
    weights, count = settings.weights, len(settings.functions)
    are_numbers = all(isinstance(weight, int | float) for weight in weights)
    if weights and (len(weights) != count or not are_numbers):
        raise UserError(
            f"task.reward.{weights=} must be a number for each of {count} functions, or none for 1"
        )


def check_function(name: str) -> None:
    """Raises UserError if there is no user-defined function `name`, or it cannot be called."""
    try:
        user_functions.parameter_names(name)
    except UserError:
        raise
    except Exception as error:  # the import of a user-defined module may raise anything
        reason = user_functions.reason_of_import(name, error)
        place = user_functions.split_name(name)
        if file := user_functions.file_of_module(place.module):
            meant = place._replace(module=file)
            raise UserError(
                f"task.reward.functions={name}: {place.module} is a file, not a module that can be "
                f"imported here: write {meant}"
            ) from None
        # A name with a colon and without a comma is no misspelled name of the tables.
        if ":" in name and "," not in name:
            raise UserError(
                f"task.reward.functions={name}: no such module:function or FILE.py:function "
                f"({reason})"
            ) from None
        raise UserError(
            f"task.reward.functions: {name!r} is not one of {', '.join(NAMES)} or a "
            f"module:function or FILE.py:function ({reason}); give the flag once for each"
        ) from None


def reading_verdicts(settings: RewardConfig) -> list[str]:
    """Returns the functions that read the verdict of the task's grader."""
    built_in = {name: find_built_in(name) for name in settings.functions}
    return [name for name, item in built_in.items() if item and item.name in _READ_VERDICTS]


def users_functions(settings: RewardConfig) -> list[str]:
    """Returns the names of user-defined functions in `task.reward.functions`."""
    return [name for name in settings.functions if find_built_in(name) is None]


def asking_for_environment(settings: RewardConfig) -> list[str]:
    """Returns the user-defined functions with a parameter for the environment's instance."""
    return [
        name
        for name in users_functions(settings)
        if user_functions.ENVIRONMENT in (user_functions.parameter_names(name) or ())
    ]


def notes(settings: RewardConfig) -> list[str]:
    """Returns a line for each function of TRL's form that is called separately for each episode."""
    return [
        f"{name} asks for environments: it is called for each episode by itself, in lists of one"
        for name in users_functions(settings)
        if user_functions.is_of_each_episode(name)
    ]


def batched(settings: RewardConfig) -> list[str]:
    """Returns the user-defined functions that take the lists of a batch."""
    return [name for name in users_functions(settings) if user_functions.is_batched(name)]


def compare_responses(settings: RewardConfig) -> bool:
    """Returns whether the reward of a response may depend on the other responses."""
    built_in = [find_built_in(name) for name in settings.functions]
    return bool(batched(settings)) or any(item and item.name in _COMPARING for item in built_in)


def need_tokens(settings: RewardConfig) -> bool:
    """Returns whether a user-defined function may read the token ids of responses."""
    return any(user_functions.is_of_trl(name) for name in users_functions(settings))


def need_worker(settings: RewardConfig, called: Sequence[str]) -> bool:
    """Returns whether a grader process has rewards to add.

    `called` are the functions that have been called already, in the event loop.
    """
    # The judge and the rewards of a batch do not run in grader processes either.
    elsewhere = {"accuracy", *BATCH_REWARDS, JUDGE, *batched(settings), *called}
    for function in settings.functions:
        built_in = find_built_in(function)
        if (built_in.name if built_in else function) not in elsewhere:
            return True
    return False


def need_columns(settings: RewardConfig) -> bool:
    """Returns whether a reward reads the columns of the data set. Raises as `asked_for` does."""
    if "row" in asked_for(settings):
        return True
    return any("row" in user_functions.asked_in_lists(name) for name in batched(settings))


def asked_for(settings: RewardConfig) -> frozenset[str]:
    """Returns the names in `user_functions.FROM_EPISODE` of the values that the rewards read.

    Raises:
        UserError: a user-defined function cannot be found or called.
    """
    names = users_functions(settings)
    for name in names:
        check_function(name)
    asked = user_functions.asked_for(names)
    if JUDGE not in settings.functions or settings.judge is None:
        return asked
    return asked | judge.asked_for(settings.judge)


# The weighted sum.


# Calls a user-defined function for one response: (name, response, gold, task) -> reward.
CallFunction = Callable[[str, str, JsonValue, "TaskConfig"], Reward | None]


def call_function(name: str, response: str, gold: JsonValue, task: TaskConfig) -> Reward | None:
    """Calls a user-defined function that needs no values of the episode.

    Raises:
        UserError: there is no such function.
        Exception: any exception of `user_functions.call_function`.
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
    """Returns the grade with all rewards in `parts` that do not depend on other responses.

    `call` calls a user-defined function. Grader processes pass one with time and memory limits.
    """
    settings = task.reward
    parts = {}
    for name in settings.functions:
        built_in = find_built_in(name)
        if built_in and built_in.name in RESPONSE_REWARDS:
            reward = RESPONSE_REWARDS[built_in.name](response, **built_in.arguments)
            parts[name] = float(reward)
        elif name in PROBLEM_REWARDS:
            try:
                reward = PROBLEM_REWARDS[name](response, gold, task)
            except SandboxError as error:
                # The sandbox failed, not the response: the response gets no score.
                return replace(grade, reason=f"error: {error}", failed=True)
            if reward is not None:
                parts[name] = reward
        elif built_in is None and not _is_batched(name):
            result = call(name, response, gold, task)
            if result is not None:
                parts[name] = result.value
                parts |= {f"{name}.{part}": value for part, value in result.parts.items()}
    return replace(grade, parts=parts)


def _is_batched(name: str) -> bool:
    try:
        return user_functions.is_batched(name)
    except Exception:
        # A function that cannot be found fails later, when it is called.
        return False


def add_batch_rewards(
    grades: Sequence[Grade],
    characters: Sequence[int],
    tokens: Sequence[int],
    settings: RewardConfig,
) -> list[Grade]:
    """Returns the grades of N responses with all parts, and with their weighted sum as the score.

    Args:
        grades: N grades from `add_response_rewards`.
        characters: the lengths of the N responses in characters.
        tokens: the lengths of the N responses in tokens.
        settings: the section `task.reward` of the config.
    """
    # With the default settings the score is the grader's score, and needs no parts.
    if tuple(settings.functions) == DEFAULT and not settings.weights:
        return list(grades)
    weights = dict.fromkeys(settings.functions, 1.0)
    if settings.weights:
        weights = dict(zip(settings.functions, settings.weights, strict=True))

    batch_rewards = _batch_rewards(grades, characters, tokens, settings)
    done = []
    for i, grade in enumerate(grades):
        known = {"accuracy": grade.score, **grade.parts}
        known |= {name: float(rewards[i]) for name, rewards in batch_rewards.items()}
        # The order of the functions decides how the sum is rounded. A function that does not apply
        # to a response adds nothing to its score.
        parts = {name: known[name] for name in weights if name in known}
        score = sum(weights[name] * part for name, part in parts.items())
        # The named parts of a function's result are only metrics: its reward contains them already.
        for name, part in grade.parts.items():
            parts.setdefault(name, part)
        # A part of a failed grade is missing, so the sum is no score.
        if grade.failed:
            score = 0.0
        # NaN fails this comparison too.
        if not abs(score) <= bounds.MAX_REWARD:
            reason = f"error: the score {score:g} is beyond {bounds.MAX_REWARD:g}"
            grade, score = replace(grade, reason=reason, failed=True, reply=None), 0.0
        done.append(replace(grade, score=score, parts=parts))
    return done


def _batch_rewards(
    grades: Sequence[Grade],
    characters: Sequence[int],
    tokens: Sequence[int],
    settings: RewardConfig,
) -> dict[str, np.ndarray]:
    """Returns the rewards f64[N] of each function of BATCH_REWARDS in the settings."""
    if not grades:
        return {}
    correct = np.array([grade.correct for grade in grades], bool)
    rewards = {}
    for name in settings.functions:
        built_in = find_built_in(name)
        if built_in and built_in.name in BATCH_REWARDS:
            in_tokens = settings.unit == "tokens" or built_in.name in _ALWAYS_IN_TOKENS
            lengths = np.asarray(tokens if in_tokens else characters, float)
            rewards[name] = BATCH_REWARDS[built_in.name](correct, lengths, **built_in.arguments)
    return rewards
