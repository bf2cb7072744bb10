"""Bounds the memory of a chat template: `{{ 'a' * 99999 * 99999 }}` would allocate 10 GB.

    with template_memory(512 << 20):
        text = tokenizer.apply_chat_template(messages, tokenize=False)   # jinja2.SecurityError

One call of C code, such as the multiplication of a text, cannot be interrupted. So everything that
builds a text or a list in a template is checked before it runs: operators, methods, filters, and
the joining of the output. `template_memory` counts the bytes of all results of one rendering.

transformers compiles templates in an environment of its own. Importing this module makes
`BoundedEnvironment` the class of that environment. Without `template_memory` it has no bounds.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import types
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from typing import Literal

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

MAX_NUMBER_BITS = 1 << 16  # of an integer that a template computes
MAX_DIGITS = 400  # of |round
COMPILE_BYTES = 1 << 20  # that jinja2 may compute in advance from the constants of a template
BYTES_OF_PIECE = 58  # of a short text
GROWTH = 8  # times; escaping and other codes make a text at most this much longer

# Their number or text is how much they add.
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "to_bytes"}
# They make an object of each part of a text.
SPLITTING = {"split", "rsplit", "splitlines", "list", "slice", "sort", "unique", "groupby"}
# They may add an argument at every place of a text.
INSERTING = {"translate", "urlize", "wordwrap", "xmlattr"}
# They read containers without writing them as text.
READING = {"attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"}
READING |= {"last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"}
READING |= {"reverse", "select", "selectattr", "slice", "sort", "sum", "unique", "append", "get"}
READING |= {"index", "keys", "values", "copy"}

_NUMBER = re.compile(r"\d+")
_WIDTH_FROM_ARGUMENT = re.compile(r"%(\([^)]*\))?[-#0 +.\d]*\*")  # %*d
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")  # {:{width}}


Kind = Literal["method", "filter"]


class _Budget(threading.local):
    """The bytes that the rendering of this thread may still build; None: without a bound."""

    remaining: int | None = None
    total: int = 0


_BUDGET = _Budget()


@contextlib.contextmanager
def template_memory(num_bytes: int) -> Iterator[None]:
    """Bounds the bytes that chat templates build in this thread, within the block.

    A template that would build more raises jinja2.SecurityError before it allocates them.
    """
    earlier = _BUDGET.remaining, _BUDGET.total
    _BUDGET.remaining = _BUDGET.total = num_bytes
    try:
        yield
    finally:
        _BUDGET.remaining, _BUDGET.total = earlier


def _check(num_bytes: int) -> None:
    """Raises SecurityError if the rendering may not build so many further bytes."""
    if _BUDGET.remaining is not None and num_bytes > _BUDGET.remaining:
        raise SecurityError(f"it builds texts of more than {_BUDGET.total >> 20} MiB")


def _take(num_bytes: int) -> None:
    """Counts bytes that the rendering has built."""
    if _BUDGET.remaining is not None:
        _check(num_bytes)
        _BUDGET.remaining -= num_bytes


# -- Sizes -----------------------------------------------------------------------------------------


def _parts(value: object) -> Iterable[object] | None:
    """Returns the values that a container writes when it becomes text, None for other values."""
    if isinstance(value, Namespace):
        value = vars(value).get("_Namespace__attrs", {})
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, ItemsView | KeysView | ValuesView | list | tuple | set | frozenset):
        return value
    return None


def _written(value: object, seen: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Returns the bytes of a value as text, and how deep its containers are nested.

    A value may have the same list many times, so that its text is longer than its memory. `seen`
    has the sizes of earlier lists.
    """
    if isinstance(value, str | bytes | bytearray):
        return sys.getsizeof(value), 0
    parts = _parts(value)
    if parts is None:
        return BYTES_OF_PIECE, 0
    if id(value) not in seen:
        seen[id(value)] = (2, 0)  # of a list that has itself
        size, depth = 2, 0
        for part in parts:
            part_size, part_depth = _written(part, seen)
            size, depth = size + part_size + 4, max(depth, part_depth)
        seen[id(value)] = (size, depth + 1)
    return seen[id(value)]


def written_size(*values: object) -> int:
    """Returns the bytes of values as text."""
    return sum(_written(value, {})[0] for value in values)


def _largest(values: Iterable[object]) -> int:
    """Returns the largest of numbers and of the lengths of texts."""
    largest = 0
    for value in values:
        if isinstance(value, int):
            largest = max(largest, abs(value))
        elif isinstance(value, str | bytes):
            largest = max(largest, len(value))
    return largest


def _check_format(text: str, values: Sequence[object], has_braces: bool) -> None:
    """Checks `text % values`, or `text.format(*values)`."""
    plain = text.replace("{{", "")
    if _NESTED_FIELD.search(plain) if has_braces else _WIDTH_FROM_ARGUMENT.search(text):
        raise SecurityError("a width of a format is an argument: write it into the format")
    if any(len(number) > 9 for number in _NUMBER.findall(text)):
        raise SecurityError("a width of a format is too long")
    width = max(map(int, _NUMBER.findall(text)), default=0)
    num_fields = text.count("{" if has_braces else "%")
    _check(GROWTH * (len(text) + num_fields * (width + written_size(*values))))


def _check_product(left: object, right: object) -> None:
    for repeated, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(repeated, str | bytes | list | tuple | bytearray):
            _check(sys.getsizeof(repeated) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(bits: int) -> None:
    if _BUDGET.remaining is not None and bits > MAX_NUMBER_BITS:
        raise SecurityError(f"it computes a number of more than {MAX_NUMBER_BITS} bits")


# -- Operators, methods and filters ----------------------------------------------------------------


def _check_operator(operator: str, left: object, right: object) -> None:
    if operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "+":
        _check(2 * (sys.getsizeof(left) + sys.getsizeof(right)))
    elif operator == "%" and isinstance(left, str | bytes | bytearray):
        text = left if isinstance(left, str) else left.decode("latin-1")
        _check_format(text, [right], has_braces=False)


def _check_function(name: str, value: object, others: Sequence[object]) -> None:
    """Checks a method or a filter of `value` with further arguments."""
    if name == "round" and _largest(others) > MAX_DIGITS:
        raise SecurityError(f"|round has more than {MAX_DIGITS} digits")
    if name == "sum" and not all(isinstance(other, int | float | str | None) for other in others):
        raise SecurityError("|sum adds numbers only")
    if name not in READING:
        _check(GROWTH * written_size(value, *others))
    text = value if isinstance(value, str | bytes | bytearray) else b""
    if name in PADDING:
        num_places = 1
        if name == "indent":
            num_places += str(value).count("\n")
        if name == "expandtabs":
            num_places += text.count("\t" if isinstance(text, str) else b"\t")  # type: ignore[arg-type]
        _check(GROWTH * num_places * _largest(others))
    elif name in SPLITTING:
        _check(BYTES_OF_PIECE * len(text))
    elif name in INSERTING:
        _check(written_size(value) * written_size(*others))
    elif name == "replace" and len(others) > 1:
        old, new = str(others[0]), str(others[1])
        _check(4 * str(value).count(old) * len(new))
    elif name == "tojson":
        size, depth = _written(value, {})
        _check(size * (1 + depth * _largest(others)) + size * written_size(*others))


def _check_join(
    kind: Kind,
    values: Sequence[object],
    options: Mapping[str, object],
) -> list[object]:
    """Checks `separator.join(parts)`, or `parts | join(separator)`.

    Returns the values with the parts as a list, because an iterator can only be read once.
    """
    values = list(values)
    place = 0 if kind == "filter" else 1
    if len(values) <= place or not isinstance(values[place], Iterable):
        return values  # the function itself raises
    parts = values[place] = list(values[place])  # type: ignore[call-overload]
    separator = values[0]
    if kind == "filter":
        separator = values[1] if len(values) > 1 else options.get("d", "")
    num_bytes = sum(4 * written_size(part) for part in parts)
    _check(num_bytes + 4 * len(parts) * len(str(separator)))
    return values


def _run_function(
    name: str,
    kind: Kind,
    run: Callable[..., object],
    values: Sequence[object],
    options: Mapping[str, object],
) -> object:
    """Returns run(values), where values[0] is the text of the method or of the filter."""
    if _BUDGET.remaining is None:
        return run(*values, **options)
    others = [*values[1:], *options.values()]
    if name == "join":
        values = _check_join(kind, values, options)
    elif name == "format" and isinstance(values[0], str):
        _check_format(values[0], others, has_braces=kind == "method")
    else:
        _check_function(name, values[0] if values else "", others)
    result = run(*values, **options)
    if isinstance(result, str | bytes | bytearray | list | tuple | dict | int):
        num_bytes = sys.getsizeof(result)
        if name in SPLITTING and isinstance(result, list):
            num_bytes += BYTES_OF_PIECE * len(result)
        _take(num_bytes)
    return result


class _Filters(dict[str, Callable[..., object]]):
    """The filters of an environment, each with its check.

    transformers adds a filter after the environment is created.
    """

    def __setitem__(self, name: str, function: Callable[..., object]) -> None:
        # jinja2 passes such a filter the context, the environment or its settings first.
        num_first = 1 if hasattr(function, "jinja_pass_arg") else 0

        def checked(*values: object, **options: object) -> object:
            run = functools.partial(function, *values[:num_first])
            return _run_function(name, "filter", run, values[num_first:], options)

        # Builtin functions, such as len and abs, are filters, too.
        super().__setitem__(name, functools.update_wrapper(checked, function))


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes the code of `a ~ b`, which jinja2 does not intercept."""
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with the bounds of `template_memory`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options, finalize=_finalize)  # type: ignore[arg-type]
        filters = _Filters()
        for name, function in self.filters.items():
            filters[name] = function
        self.filters = filters

    def from_string(self, *arguments: object, **options: object) -> jinja2.Template:
        if _BUDGET.remaining is None:
            return super().from_string(*arguments, **options)  # type: ignore[arg-type]
        with template_memory(COMPILE_BYTES):
            return super().from_string(*arguments, **options)  # type: ignore[arg-type]

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if _BUDGET.remaining is None:
            return super().call_binop(context, operator, left, right)
        _check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _take(sys.getsizeof(result))
        return result

    def call(
        __self,  # a template may pass an argument "self"
        __context: Context,
        __obj: object,
        *values: object,
        **options: object,
    ) -> object:
        run = functools.partial(super().call, __context, __obj)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        receiver = getattr(method, "__self__", None)
        if not isinstance(method, types.BuiltinMethodType) or receiver is None:
            return run(*values, **options)

        def without_receiver(_: object, *further: object, **named: object) -> object:
            return run(*further, **named)

        name = method.__name__
        if name == "format_map":
            name = "format"
        return _run_function(name, "method", without_receiver, (receiver, *values), options)

    def join_texts(self, parts: Sequence[object]) -> str:
        """Returns `a ~ b`."""
        return self.concat([str(_finalize(part)) for part in parts])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a template, of a macro or of a block."""
        if _BUDGET.remaining is None:
            return "".join(parts)
        texts = []
        num_bytes = 0
        for part in parts:
            texts.append(part)
            num_bytes += sys.getsizeof(part)
            _check(num_bytes)
        _check(4 * sum(map(len, texts)))
        text = "".join(texts)
        _take(sys.getsizeof(text))
        return text


def _finalize(value: object) -> object:
    """Checks a value that a template writes, before it becomes text."""
    if _BUDGET.remaining is not None:
        if isinstance(value, str):
            _take(8)  # in a list of the output
        else:
            _take(GROWTH * written_size(value) if _parts(value) is not None else BYTES_OF_PIECE)
    return value


chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]
