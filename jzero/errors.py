"""The one exception that means: the user asked for something that cannot be done."""

import reprlib

LONGEST_TEXT = 80  # characters of a value that an error message quotes

_REPR = reprlib.Repr()
_REPR.maxstring = LONGEST_TEXT
_REPR.maxother = LONGEST_TEXT


class UserError(ValueError):
    """A mistake in a setting, a file or a command that the user can mend.

    The message names the setting or file, says what is wrong, and says what to do. Commands print
    it as one line and exit with status 2. Every other exception is a fault of jzero or of a library
    and keeps its traceback.
    """


def shown(value: object) -> str:
    """Returns a value from a foreign file as an error message quotes it: short, and in one line.

    A plain word stays as it is. Everything else, such as text with a line break, is shown as Python
    writes it, and cut.
    """
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_TEXT:
        return value
    return _REPR.repr(value)


def reason_of(error: BaseException) -> str:
    """Returns the first line of a library's error, cut, or the name of its type."""
    lines = str(error).strip().splitlines()
    return shown(lines[0][:LONGEST_TEXT]) if lines else type(error).__name__
