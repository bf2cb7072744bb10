"""The one exception that means: the user asked for something that cannot be done."""


class UserError(ValueError):
    """A mistake in a setting, a file or a command that the user can mend.

    The message names the setting or file, says what is wrong, and says what to do. Commands print
    it as one line and exit with status 2. Every other exception is a fault of jzero or of a library
    and keeps its traceback.
    """
