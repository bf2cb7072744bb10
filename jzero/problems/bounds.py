"""Validates the return values of user-defined code: text, chat messages, rewards and their names.

Environments, tools, reward functions and graders are user-defined and may return anything. These
functions check each value where it enters: in the grader process, before text is tokenized. They
return new values that survive a round trip through JSON, or raise TypeError or ValueError with a
message of one line.

Text is normalized here, and only here: a pair of surrogates becomes the character that it encodes,
and a lone surrogate becomes U+FFFD. A reply is therefore equal to itself after a round trip through
JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from jzero.errors import quoted
from jzero.json_values import as_prompt
from jzero.types import Grade, JsonValue, Prompt

Key = TypeVar("Key")

# The limit for settings without `task.max_reply_bytes`, as in `python -m jzero.grade`.
MAX_REPLY_BYTES = 1 << 18
# A reward lies between -MAX_REWARD and MAX_REWARD. The sum of the squared rewards of a step is then
# finite in float32, the dtype of advantages and metrics.
MAX_REWARD = 1e9
MAX_PARTS = 64  # named parts per reward
MAX_MESSAGES = 1024  # per reply
MAX_NAME = 100  # characters in the name of a part
MAX_DEPTH = 16  # levels of nested lists and dicts in messages and schemas
MAX_REASON = 200  # characters
MAX_MESSAGE = 200  # characters in the message of an exception
_MAX_TYPE_NAME = 80  # characters in the name of an exception's type


def reply_bytes(task: object) -> int:
    """Returns `task.max_reply_bytes`."""
    return getattr(task, "max_reply_bytes", MAX_REPLY_BYTES)


# Text.


def normalize(text: str) -> str:
    """Returns text that can be encoded in UTF-8: see the module's docstring."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str.__str__(text)  # turns an instance of a subclass of str into a plain str


def one_line(text: str, longest: int = MAX_REASON) -> str:
    """Returns text cut to `longest` characters, with spaces for characters such as line breaks."""
    if len(text) <= longest and text.isprintable():
        return text
    # The first cut bounds the work. It keeps more than `longest` characters, because joining white
    # space shortens the text.
    printable = [char if char.isprintable() else " " for char in text[: 4 * longest]]
    return " ".join("".join(printable).split())[:longest]


def describe(error: BaseException) -> str:
    """Returns the type and the message of an error in one line."""
    try:
        message = one_line(str(error)[: 4 * MAX_MESSAGE], MAX_MESSAGE)
    except BaseException:  # the error's own __str__ may raise anything
        message = ""
    return f"{type_name(error)}: {message}" if message else type_name(error)


def type_name(error: BaseException) -> str:
    """Returns the name of an error's type, cut to a maximum length."""
    return one_line(type(error).__name__, _MAX_TYPE_NAME)


def check_bytes(count: int, most: int, what: str) -> None:
    """Raises ValueError if a text of `count` bytes is longer than task.max_reply_bytes=`most`."""
    if count > most:
        raise ValueError(
            f"{what} has {count:,} bytes or more, and task.max_reply_bytes is {most:,}: shorten it"
        )


def read_text(text: str, most_bytes: int, what: str) -> str:
    """Returns normalized text.

    Raises:
        ValueError: the text has more than `most_bytes` in UTF-8. `what` names the text.
    """
    # Check a lower bound of the size before `normalize` and `encode` copy the text.
    check_bytes(len(text), most_bytes, what)
    text = normalize(text)
    check_bytes(len(text.encode()), most_bytes, what)
    return text


def read_prompt(value: object, most_bytes: int, what: str) -> Prompt | None:
    """Returns text or chat messages, None for any other value.

    Raises:
        TypeError, ValueError: the messages are too long, nested too deeply, or not JSON. `what`
            names the value.
    """
    if isinstance(value, str):
        return read_text(value, most_bytes, what)
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"{what} has {len(value):,} messages, more than {MAX_MESSAGES:,}")
    if not isinstance(value, list) or not value or not all(map(is_message, value)):
        return None
    return as_prompt(read_json(value, most_bytes, what), what)


def is_message(value: object) -> bool:
    """Returns whether a value is a chat message: a dict with a role and with content, both text."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def read_json(value: object, most_bytes: int, what: str) -> JsonValue:
    """Returns a copy of a JSON value.

    Raises:
        TypeError, ValueError: JSON cannot represent the value, the value has more than `most_bytes`
            bytes, or lists and dicts nest more than MAX_DEPTH deep. `what` names the value.
    """
    return _JsonReader(most_bytes, what).read(value, 0)


class _JsonReader:
    """Copies a value and counts its bytes.

    The count and the limit on depth also stop a list that contains itself.
    """

    def __init__(self, most_bytes: int, what: str) -> None:
        self._most_bytes = most_bytes
        self._what = what
        self._bytes = 0

    def read(self, value: object, depth: int) -> JsonValue:
        if depth > MAX_DEPTH:
            raise ValueError(f"{self._what} has more than {MAX_DEPTH} lists and dicts in a row")
        self._add(2)  # the separator, such as a comma and a space
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._number(value)
        if isinstance(value, list | tuple):
            return [self.read(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return self._dict(value, depth)
        raise TypeError(f"{self._what} holds {quoted(value)}, which is not a value of JSON")

    def _add(self, count: int) -> None:
        self._bytes += count
        check_bytes(self._bytes, self._most_bytes, self._what)

    def _text(self, value: str) -> str:
        # Count a lower bound of the bytes before `normalize` copies the text.
        self._add(len(value))
        text = normalize(value)
        self._add(len(text.encode()) - len(value))
        return text

    def _number(self, value: int | float) -> int | float:
        # Turns instances of subclasses into plain numbers.
        number = float(value) if isinstance(value, float) else int(value)
        if isinstance(number, int) and number.bit_length() > 64:
            raise ValueError(f"{self._what} holds an integer of more than 64 bits")
        if not math.isfinite(number):
            raise ValueError(f"{self._what} holds {number}, which is not a value of JSON")
        return number

    def _dict(self, value: dict[object, object], depth: int) -> dict[str, JsonValue]:
        copied = {}
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"{self._what} holds a dict with the key {quoted(name)}: name a text"
                )
            copied[self._text(name)] = self.read(item, depth + 1)
        return copied


# Rewards.

# If a result has a part of this name, this part is the reward and the other parts are metrics.
SCORE = "score"


class Reward(NamedTuple):
    """The result of a function: the reward, and its named parts if the function returned a dict."""

    value: float
    parts: dict[str, float]


def read_reward(result: object) -> Reward:
    """Converts the result of a reward function or of an environment to a reward.

    A number is the reward. A dict holds named parts: the reward is the part "score" if there is
    one, else the sum of the parts.

    Raises:
        TypeError, ValueError: `result` is neither, or a number or a name is out of its bounds.
    """
    if not isinstance(result, Mapping):
        return Reward(read_number(result), {})
    parts = read_parts(result)
    if not parts:
        raise TypeError("returned an empty dict: a dict has the named parts of a reward")
    value = parts[SCORE] if SCORE in parts else read_number(sum(parts.values()))
    return Reward(value, parts)


def read_number(value: object) -> float:
    """Returns a reward as a float.

    Raises:
        TypeError, ValueError: the value is not a number, not finite, or its magnitude is above
            MAX_REWARD.
    """
    # float() would accept text such as "1.5".
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"returned {quoted(value)}: a reward is a number or None")
    try:
        number = float(value)  # type: ignore[arg-type]  # raises if `value` cannot be converted
    except OverflowError:
        raise ValueError(
            "returned an integer beyond all floats: a reward is a finite number"
        ) from None
    except (TypeError, ValueError):
        raise TypeError(f"returned {quoted(value)}: a reward is a number or None") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: a reward is a finite number or None")
    if abs(number) > MAX_REWARD:
        raise ValueError(
            f"returned {number:g}: a reward lies between {-MAX_REWARD:g} and {MAX_REWARD:g}"
        )
    return number


def read_parts(parts: Mapping[Key, object]) -> dict[str, float]:
    """Returns the named parts of a reward.

    Raises:
        TypeError, ValueError: a part is not a valid reward, a name is not a valid metric name, or
            there are more than MAX_PARTS parts.
    """
    # Reading one part more than allowed detects the excess and bounds the work.
    read: dict[str, float] = {}
    for key, value in itertools.islice(parts.items(), MAX_PARTS + 1):
        name = read_name(key)
        if name in read:
            raise ValueError(f"two parts of a reward have the name {name}")
        read[name] = read_number(value)
    if len(read) > MAX_PARTS:
        raise ValueError(f"a reward has more than {MAX_PARTS} named parts")
    return read


def read_name(key: object) -> str:
    """Returns the name of a reward part. The name becomes part of a metric's name.

    Raises:
        ValueError: the name is empty, longer than MAX_NAME, starts or ends with a space, or has an
            unprintable character.
    """
    name = str(key)
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"a part of a reward is called {quoted(name)}: a name has 1 to {MAX_NAME} printable "
            "characters"
        )
    return name


def read_grade(grade: Grade, most_bytes: int) -> Grade:
    """Validates all fields of a grade from a user-defined grader and returns the grade.

    Raises:
        TypeError, ValueError: a field is invalid or out of bounds.
    """
    reply = grade.reply
    if reply is not None:
        reply = read_prompt(reply, most_bytes, "the reply")
        if reply is None:
            raise TypeError(
                f"the reply is {quoted(grade.reply)}: it has to be text, chat messages or None"
            )
    return replace(
        grade,
        score=read_number(grade.score),
        correct=bool(grade.correct),
        reason=one_line(str(grade.reason)),
        seconds=read_number(grade.seconds),
        parts=read_parts(grade.parts) if grade.parts else {},
        reply=reply,
        failed=bool(grade.failed),
        tool_calls=int(read_number(grade.tool_calls)),
        failed_tool_calls=int(read_number(grade.failed_tool_calls)),
        tool_seconds=read_number(grade.tool_seconds),
    )
