"""Template files: `task.template=FILE` is a prompt template in plain text or in Jinja.

A file with the suffix .jinja, .jinja2 or .j2 is a Jinja template, with `{{ question }}` in the
place of the question. Every other file is plain text with `{question}`. Braces in plain text that
do not hold the name of a value stay as they are, so that a prompt may contain `\\boxed{}`.
`prompts.find_template` makes a `PromptTemplate` of a file.

Jinja runs in its sandbox, without access to files. Imports no jax: grader processes load this
module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jzero.errors import UserError
from jzero.files import read_text

if TYPE_CHECKING:
    import jinja2

JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")
SUFFIXES = (".txt", ".md", *JINJA_SUFFIXES)

# Values that a file may omit, because its text can contain the instruction itself.
OPTIONAL_VALUES = ("instruction",)

_NAME_IN_BRACES = re.compile(r"\{([A-Za-z_]+)\}")


def is_template_file(name: str) -> bool:
    """Returns whether a template's name is a path: it has a slash or a suffix of SUFFIXES."""
    return "/" in name or name.endswith(SUFFIXES)


def is_jinja(path: str) -> bool:
    return path.endswith(JINJA_SUFFIXES)


@functools.cache
def read_template_file(path: str) -> str:
    """Returns the text of a template file, without the newline that ends its last line.

    A prompt that has to end with a newline needs an empty line at the end of its file. A run reads
    the file once.

    Raises:
        UserError: the file does not exist, or it is not text in UTF-8.
    """
    try:
        text = read_text(path, name=f"task.template={path}")
    except OSError as error:
        raise UserError(
            f"task.template={path}: {error.strerror}; give a file that holds the prompt"
        ) from None
    # Editors end every file with a newline, and most prompts end without one.
    return text.removesuffix("\n")


@functools.cache
def check_template_file(path: str, names: tuple[str, ...]) -> None:
    """Checks that a template file can be read, and that it contains the question.

    Args:
        path: the file.
        names: the values of the task's prompts, such as ("question", "instruction").

    Raises:
        UserError: the file cannot be read, is not a valid Jinja template, uses a name that the task
            has no value for, or does not contain the question.
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
        # Plain text may contain other names in braces, which stay as they are.
        used = set(_NAME_IN_BRACES.findall(text))
    needed = [name for name in names if name not in OPTIONAL_VALUES]
    found = used & set(needed)
    # A question may consist of parts, such as countdown's numbers and target. One part is not
    # enough.
    is_asked = "question" in found or len(found) > 1 or (found and "question" not in needed)
    if not is_asked:
        form = "{{{{ {} }}}}" if is_jinja(path) else "{{{}}}"
        question, *parts = [form.format(name) for name in needed]
        wanted = f"{question}, or its parts {', '.join(parts)}," if parts else question
        raise UserError(
            f"task.template={path} does not hold the question: write {wanted} where it goes"
        )


def fill_text(text: str, values: Mapping[str, object]) -> str:
    """Replaces the names in braces by their values, and leaves all other braces unchanged."""

    def value_of(match: re.Match[str]) -> str:
        return str(values[match[1]]) if match[1] in values else match[0]

    return _NAME_IN_BRACES.sub(value_of, text)


def fill_jinja(path: str, text: str, values: Mapping[str, object]) -> str:
    """Renders a Jinja template with the values.

    Raises:
        UserError: the template is invalid, or it fails with these values.
    """
    template = _compile_jinja(path, text)
    try:
        return template.render(values)
    except Exception as error:  # a template may raise any exception
        raise _jinja_fault(path, error) from None


def _jinja_fault(path: str, error: Exception) -> UserError:
    """Returns the error of a template in one line, with the line number if Jinja reports it."""
    line = getattr(error, "lineno", None)
    where = f" line {line}" if line else ""
    reason = " ".join(str(error).split())[:200]
    return UserError(f"task.template={path}{where}: {type(error).__name__}: {reason}")


@functools.cache
def _environment() -> jinja2.Environment:
    # Not imported at the top: grader processes load this module and never render a template.
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A name without a value raises an error. Jinja's default would render it as empty text.
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


@functools.cache
def _compile_jinja(path: str, text: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(text)
    except jinja2.TemplateError as error:
        raise _jinja_fault(path, error) from None


def _jinja_names(path: str, text: str) -> set[str]:
    """Returns the names that a Jinja template needs values for."""
    from jinja2 import meta

    _compile_jinja(path, text)  # raises the error of an invalid template
    return meta.find_undeclared_variables(_environment().parse(text))
