"""Data sources: the rows of data sets that `task.data`, `sft.data` and others name.

    gsm8k.jsonl                                         all rows of a file, directory or hub id
    rows('openai/gsm8k',split='train',limit=500)        the first 500 rows of a split
    rows('a.jsonl',weight=3),rows('b.jsonl',weight=1)   three rows of a.jsonl for each of b.jsonl

A source is a plain path or `rows(...)`, whose arguments are the fields of `Rows`; its first
argument may be the path without a name. Several sources are separated by commas. Imports no jax.
"""

import functools
import re
from dataclasses import replace

from jzero.errors import UserError, shown
from jzero.fields import build, fields_of, record
from jzero.notation import read_values

# The settings that name data sources.
DATA_SETTINGS = ("task.data", "task.eval_data", "sft.data", "sft.eval_data")


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


def show_sources(sources: tuple[Rows, ...]) -> str:
    """Returns sources as one setting names them."""
    return ",".join(map(str, sources))


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


@functools.cache
def read_sources(name: str, text: str) -> tuple[Rows, ...]:
    """Returns the sources that a setting names; () for "".

    name: the setting, such as task.data, for error messages.

    Raises:
        UserError: a source cannot be read, has a number out of bounds, or only some have weights.
    """
    sources = tuple(read_source(name, item) for item in split_sources(text))
    weights = [source.weight for source in sources]
    # A set without a weight would never be drawn, and few users mean that by leaving it out.
    if any(weights) and not all(weights):
        raise UserError(
            f"{name}={shown(text)}: some of the sets have a weight: give each of them one, or none"
        )
    return sources


def read_source(name: str, text: str) -> Rows:
    """Returns one source.

    Raises:
        UserError: it cannot be read, or has a number out of bounds.
    """
    text = text.strip()
    if not text.startswith("rows("):
        return _read_path(name, text)
    where = f"{name}={shown(text)}"
    if not text.endswith(")"):
        raise UserError(f"{where}: close the bracket, and put a comma before the next set")
    arguments = text[len("rows(") : -1]
    if re.match(r"[^,='\"]+(,|$)", arguments):  # a path without quotes
        arguments = f"path={arguments}"
    quoted_path = re.match(r"\s*('[^']*'|\"[^\"]*\")\s*(,|$)", arguments)
    if quoted_path:
        arguments = f"path={arguments}"
    try:
        rows = build(Rows, read_values(Rows, arguments))
    except UserError as error:
        raise UserError(
            f"{where}: {error}. Write it as rows('FILE',split='train',limit=100)"
        ) from None
    if 0 < rows.level_max < rows.level_min:
        raise UserError(
            f"{where}: level_min={rows.level_min} is above level_max={rows.level_max}: no row has "
            "such a level; raise level_max"
        )
    return rows


def _read_path(name: str, text: str) -> Rows:
    """Returns the source of a plain path, after which the earlier notation may name columns."""
    rows = Rows()
    path = text
    # Each match removes the last column name. Any colons that remain belong to the path.
    while found := _COLUMN.fullmatch(path):
        path, kind, column = found.groups()
        if getattr(rows, kind):
            raise UserError(f"{name}={shown(text)} names the column {kind} twice: name it once")
        rows = replace(rows, **{kind: column.strip()})
    if rows != Rows() and not path.strip():
        raise UserError(f"{name}={shown(text)} names columns and no set: write it before them")
    return replace(rows, path=path.strip())
