"""Template files: `task.template=FILE` is a prompt as it was published, in plain text or in Jinja.

A file whose name ends in .jinja, .jinja2 or .j2 is a template of Jinja, with `{{ question }}` where
the question goes. Every other file is plain text with `{question}`, and all braces that are not a
value's name stay as they are, so that a prompt may hold `\\boxed{}`. `prompts.find_template` makes
a `PromptTemplate` of a file.

Jinja runs in its sandbox, without access to files. Imports no jax: grader processes load this
module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jzero.errors import UserError

if TYPE_CHECKING:
    import jinja2

JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")
SUFFIXES = (".txt", ".md", *JINJA_SUFFIXES)

# The values of a task that a file does not need: it says for itself what to do.
OPTIONAL_VALUES = ("instruction",)

_NAME_IN_BRACES = re.compile(r"\{([A-Za-z_]+)\}")


def is_template_file(name: str) -> bool:
    """Returns whether a template's name is a path: it has a slash or an ending of SUFFIXES."""
    return "/" in name or name.endswith(SUFFIXES)


def is_jinja(path: str) -> bool:
    return path.endswith(JINJA_SUFFIXES)


@functools.cache
def read_template_file(path: str) -> str:
    """Returns the text of a template file, without the newline that ends its last line.

    Editors put that newline at the end of every file, and most prompts end without one. A prompt
    that has to end with a newline has an empty line at the end of its file. A run reads the file
    once.

    Raises:
        UserError: there is no such file, or it is not text in UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"task.template={path}: {error.strerror}; give a file that holds the prompt"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"task.template={path} is not text in UTF-8: {error.reason}") from None
    return text.removesuffix("\n")


@functools.cache
def check_template_file(path: str, names: tuple[str, ...]) -> None:
    """Checks that a template file can be read, and that it holds a value of the task.

    Args:
        path: the file.
        names: the values of the task's prompts, such as ("question", "instruction").

    Raises:
        UserError: the file cannot be read, is no valid template of Jinja, has a name in it that
            the task does not have, or does not hold the question.
    """
    text = read_template_file(path)
    if is_jinja(path):
        used = _jinja_names(path, text)
        if unknown := sorted(used - set(names)):
            raise UserError(
                f"task.template={path} has the name {unknown[0]}, and this task has "
                f"{', '.join(names)}: rename it in the file"
            )
    else:
        used = set(_NAME_IN_BRACES.findall(text))
    needed = [name for name in names if name not in OPTIONAL_VALUES]
    found = used & set(needed)
    # A question may be asked in parts, as countdown's numbers and target. One part is not enough.
    is_asked = "question" in found or len(found) > 1 or (found and "question" not in needed)
    if not is_asked:
        form = "{{{{ {} }}}}" if is_jinja(path) else "{{{}}}"
        question, *parts = [form.format(name) for name in needed]
        wanted = f"{question}, or its parts {', '.join(parts)}," if parts else question
        raise UserError(
            f"task.template={path} does not hold the question: write {wanted} where it goes"
        )


def fill_text(text: str, values: Mapping[str, object]) -> str:
    """Returns plain text with the values in place of their names in braces, all else unchanged."""

    def value_of(match: re.Match[str]) -> str:
        return str(values[match[1]]) if match[1] in values else match[0]

    return _NAME_IN_BRACES.sub(value_of, text)


def fill_jinja(path: str, text: str, values: Mapping[str, object]) -> str:
    """Returns a template of Jinja, rendered with the values.

    Raises:
        UserError: the template is invalid, or it fails with these values.
    """
    template = _compile_jinja(path, text)
    try:
        return template.render(values)
    except Exception as error:  # a template may do anything that the sandbox allows
        raise _jinja_fault(path, error) from None


def _jinja_fault(path: str, error: Exception) -> UserError:
    """Returns the error of a template in one line, with the line of the file where it is known."""
    line = getattr(error, "lineno", None)
    where = f" line {line}" if line else ""
    reason = " ".join(str(error).split())[:200]
    return UserError(f"task.template={path}{where}: {type(error).__name__}: {reason}")


@functools.cache
def _environment() -> jinja2.Environment:
    # Not at the top: grader processes load this module and render nothing.
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A name without a value is an error, and no empty text.
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


@functools.cache
def _compile_jinja(path: str, text: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(text)
    except jinja2.TemplateError as error:
        raise _jinja_fault(path, error) from None


def _jinja_names(path: str, text: str) -> set[str]:
    """Returns the names that a template of Jinja takes from outside."""
    from jinja2 import meta

    _compile_jinja(path, text)  # raises the error of an invalid template
    return meta.find_undeclared_variables(_environment().parse(text))
