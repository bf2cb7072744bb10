"""Data sources: the rows of data sets that `task.data`, `sft.data` and others name.

    gsm8k.jsonl                                         all rows of a file, directory or hub id
    rows('openai/gsm8k',split='train',limit=500)        the first 500 rows of a split
    rows('a.jsonl',weight=3),rows('b.jsonl',weight=1)   three rows of a.jsonl for each of b.jsonl

A source is a plain path or `rows(...)`, whose arguments are the fields of `Rows`; its first
argument may be the path without a name. Several sources are separated by commas. A setting with
sources is a `Sources`, which is read from such a text when it is assigned. Imports no jax.
"""

import re
from dataclasses import replace
from typing import Self

from jzero.errors import UserError, shown
from jzero.fields import Written, build, fields_of, record
from jzero.notation import read_values


@record
class Rows:
    """Rows of one data set."""

    path: str = ""
    """File (json, jsonl or csv, also as .gz; parquet or arrow), directory, hub id, or config@id;
    #REVISION may follow a hub id. Empty: the default set of the task or, for held-out rows, each
    set of task.data (sft.data)."""
    split: str = ""
    """Split, such as train_hard. Empty: train, or test for held-out rows; or the only split."""
    problem: str = ""
    """Column with the problem. Empty: the first of the usual names that the set has."""
    answer: str = ""
    """Column with the answer; dots lead into a structure: reward_model.ground_truth. Empty: the
    first of the usual names that the set has."""
    limit: int = 0
    """Maximum number of rows, taken from the beginning. 0: all rows."""
    level_min: int = 0
    """Lowest level of difficulty, for sets with levels. 0: no limit."""
    level_max: int = 0
    """Highest level of difficulty, for sets with levels. 0: no limit."""
    weight: float = 0.0
    """Share of the set among all sets, relative to their weights. 0 for all sets: they are treated
    as one."""

    def __str__(self) -> str:
        """Returns the source as a setting names it."""
        changed = {
            name: getattr(self, name)
            for name, field in fields_of(Rows).items()
            if getattr(self, name) != field.default
        }
        # A path that a reader would split or take for a notation has to be quoted in rows(...).
        is_plain_path = not re.search(r"^\s*rows\(|[,()]|:(problem|answer)=|^\s|\s$", self.path)
        if set(changed) == {"path"} and is_plain_path:
            return self.path
        path = [repr(changed.pop("path"))] if self.path else []
        named = [f"{name}={value!r}" for name, value in changed.items()]
        return f"rows({','.join([*path, *named])})"


class Sources(tuple[Rows, ...], Written):
    """The data sets of a setting; () if it names none."""

    __slots__ = ()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Returns the sources that a text names, such as "a.jsonl,b.jsonl"; () for "".

        Raises:
            UserError: a source cannot be read, or has a number out of bounds. The message is the
                rest of one that begins with the setting.
        """
        items = split_sources(text)
        if text.strip() and not items:
            raise UserError("names no set: give a file, a directory or a hub id")
        return cls(_read_item(item, of_several=len(items) > 1) for item in items)

    def check(self) -> None:
        """Raises UserError if only some sources have weights, or the levels exclude all rows."""
        weights = [source.weight for source in self]
        # A set without a weight would never be drawn, and few users mean that by leaving it out.
        if any(weights) and not all(weights):
            raise UserError(": some of the sets have a weight: give each of them one, or none")
        for source in self:
            if 0 < source.level_max < source.level_min:
                raise UserError(
                    f": level_min={source.level_min} is above level_max={source.level_max}: no row "
                    "has such a level; raise level_max"
                )

    def __str__(self) -> str:
        """Returns the sources as one setting names them."""
        return ",".join(map(str, self))

    __repr__ = Written.__repr__


def as_sources(value: str | Sources) -> Sources:
    """Returns the sources of a text, or sources themselves."""
    return Sources.from_text(value) if isinstance(value, str) else value


# Either rows(...), in which brackets and commas may stand in quotes, or all up to the next comma.
# NAME= may stand before rows(...): a suite.
_SOURCE = re.compile(
    r"""\s*((?:[^,()='"]+=)?\s*rows\((?:[^()'"]|'[^']*'|"[^"]*")*\)[^,]*|[^,]*)(?:,|$)"""
)
# An earlier notation: FILE:problem=COLUMN:answer=COLUMN.
_COLUMN = re.compile(r"(.*):(problem|answer)=([^:]+)", re.DOTALL)


def split_sources(*lists: str) -> list[str]:
    """Returns the items of lists that are separated by commas outside of rows(...)."""
    items = [item.strip() for text in lists for item in _SOURCE.findall(text)]
    return [item for item in items if item]


def read_source(name: str, text: str) -> Rows:
    """Returns one source.

    name: the flag or setting that has the text, for error messages.

    Raises:
        UserError: it cannot be read, or has a number out of bounds.
    """
    try:
        rows = _read_item(text.strip())
        Sources((rows,)).check()
    except UserError as error:
        raise UserError(_joined(f"{name}={shown(text.strip())}", str(error))) from None
    return rows


def _read_item(text: str, *, of_several: bool = False) -> Rows:
    """Returns one source of a text. Raises UserError with the rest of a message."""
    try:
        return _read_rows(text) if text.startswith("rows(") else _read_path(text)
    except UserError as error:
        if not of_several:
            raise
        raise UserError(f": {_joined(shown(text), str(error))}") from None


def _joined(start: str, rest: str) -> str:
    """Returns a message from its start, such as task.data=a.jsonl, and its rest."""
    return f"{start}{'' if rest.startswith(':') else ' '}{rest}"


def _read_rows(text: str) -> Rows:
    """Returns the source of a text such as rows('a.jsonl',limit=100)."""
    if not text.endswith(")"):
        raise UserError(": close the bracket, and put a comma before the next set")
    arguments = text[len("rows(") : -1]
    if re.match(r"[^,='\"]+(,|$)", arguments):  # a path without quotes
        arguments = f"path={arguments}"
    quoted_path = re.match(r"\s*('[^']*'|\"[^\"]*\")\s*(,|$)", arguments)
    if quoted_path:
        arguments = f"path={arguments}"
    try:
        return build(Rows, read_values(Rows, arguments))
    except UserError as error:
        raise UserError(f": {error}. Write it as rows('FILE',split='train',limit=100)") from None


def _read_path(text: str) -> Rows:
    """Returns the source of a plain path, after which the earlier notation may name columns."""
    rows = Rows()
    path = text
    # Each match removes the last column name. Any colons that remain belong to the path.
    while found := _COLUMN.fullmatch(path):
        path, kind, column = found.groups()
        if getattr(rows, kind):
            raise UserError(f"names the column {kind} twice: name it once")
        rows = replace(rows, **{kind: column.strip()})
    if rows != Rows() and not path.strip():
        raise UserError("names columns and no set: write it before them")
    return replace(rows, path=path.strip())
