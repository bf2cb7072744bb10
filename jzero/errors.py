"""The exception for user mistakes, and helpers that quote foreign values in error messages."""

import reprlib
from collections.abc import Iterable, Iterator

LONGEST_TEXT = 80  # characters of a value that an error message quotes

_REPR = reprlib.Repr()
_REPR.maxstring = LONGEST_TEXT
_REPR.maxother = LONGEST_TEXT


class UserError(ValueError):
    """A mistake in a setting, a file or a command that the user can fix.

    The message names the setting or file, and states what is wrong and how to fix it. Commands
    print the message as one line and exit with status 2. Every other exception is a fault of jzero
    or of a library and keeps its traceback.
    """


def slips(given: str, names: Iterable[str]) -> list[str]:
    """Returns the names that differ from a given one by one slip of the hand.

    A slip drops, adds or replaces a letter, or swaps two neighbors.
    """
    return [name for name in names if _is_slip(given, name)]


def _is_slip(given: str, name: str) -> bool:
    if abs(len(given) - len(name)) > 1:
        return False
    start = _common_letters(given, name)
    given, name = given[start:], name[start:]
    end = _common_letters(given[::-1], name[::-1])
    given, name = given[: len(given) - end], name[: len(name) - end]
    is_swapped = len(given) == len(name) == 2 and given == name[::-1]
    return is_swapped or max(len(given), len(name)) == 1


def _common_letters(one: str, other: str) -> int:
    """Returns the number of letters that two texts have in common from the beginning."""
    pairs = list(zip(one, other, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def shown(value: object) -> str:
    """Returns a value from a foreign file for an error message: short, and on one line.

    A plain word is returned unchanged. Everything else, such as text with a line break, is returned
    as its truncated `repr`.
    """
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_TEXT:
        return value
    return _REPR.repr(value)


def quoted(value: object) -> str:
    """Returns the truncated `repr` of a value from user-defined code, on one line.

    The cost is bounded for a value of any size.
    """
    # `reprlib` limits each item of a container; the slice limits all of them together.
    return " ".join(_REPR.repr(value).split())[: 2 * LONGEST_TEXT]


def counted(count: float, noun: str) -> str:
    """Returns a number of things for a message: "1 problem", "7,473 problems"."""
    return f"{count:,.0f} {noun}{'s' * (count != 1)}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and then its causes, each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # causes can form a cycle
        seen.add(id(cause))
        yield cause
        # anyio raises a group if it tried several addresses of a host.
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__


def reason_of(error: BaseException) -> str:
    """Returns the first line of a library's error, truncated, or the name of its type."""
    lines = str(error).strip().splitlines()
    return shown(lines[0][:LONGEST_TEXT]) if lines else type(error).__name__
