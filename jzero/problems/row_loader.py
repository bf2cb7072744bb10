"""The common loader of data-set rows: selects the rows to train on and the held-out rows.

    selection = selection_of(task)                    # the sources of a task
    dataset = open_rows(rows, "train", "task.data")   # the selected rows of one source
    sets = load_sets(selection, read, notes_on)       # the rows of all sets, as the task reads them

`problem_sets` loads a source and reads its columns. Each task provides a function that reads the
rows of a split. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

from jzero.config.data_sources import Rows, Sources
from jzero.errors import UserError, counted
from jzero.problems import overlap, problem_sets
from jzero.problems.problem_sets import Place

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig


class Asked(Protocol):
    """A row of a task, with a question. A NamedTuple, with `place: Place | None`."""

    @property
    def question(self) -> str: ...
    def _replace(self, **changes: object) -> Self: ...


RowType = TypeVar("RowType", bound=Asked)


class Selection(NamedTuple):
    """The sources of a run."""

    train: tuple[Rows, ...]
    held_out: tuple[Rows, ...] = ()  # (): the split test of the sources to train on
    section: str = "task"  # the section of their settings, for error messages

    @property
    def weights(self) -> tuple[float, ...]:
        """Returns the share of each source to train on, () if they are treated as one."""
        weights = tuple(rows.weight for rows in self.train)
        return weights if any(weights) else ()


class Sets(NamedTuple, Generic[RowType]):
    """The rows of a task."""

    train: list[list[RowType]]  # the rows to train on, one list for each set
    held_out: list[RowType]
    notes: list[str]  # lines about loaded and dropped rows


# read(dataset, rows, is_held_out) returns the task's row for each row of a source, or None for a
# row that the task cannot use.
Read = Callable[["datasets.Dataset", Rows, bool], Sequence[RowType | None]]


class Loaded(NamedTuple, Generic[RowType]):
    """The rows of one set that were selected for training."""

    source: str
    dataset: datasets.Dataset
    usable: list[RowType]
    train: list[RowType]  # the usable rows that are not held out


NotesOn = Callable[[Loaded[RowType]], list[str]]


def selection_of(task: TaskConfig) -> Selection:
    """Returns the sources of a task. Sources without a path have the default set of the task.

    Raises:
        UserError: a source has no path, and the task no default set; or there is no source.
    """
    default = problem_sets.DEFAULT_SETS.get(task.name, "")
    train = task.data or Sources.from_text(default)
    if any(not rows.path for rows in train) and not default:
        raise UserError(
            f"task.data={task.data} names no set, and task.name={task.name} has no set of its own: "
            "write rows('FILE',...)"
        )
    train = tuple(replace(rows, path=rows.path or default) for rows in train)
    return Selection(train, task.eval_data)


# -- One set ---------------------------------------------------------------------------------------


def open_rows(rows: Rows, usual_split: str, setting: str) -> datasets.Dataset:
    """Returns the first rows with the selected levels in the split of a source.

    Args:
        rows: the source.
        usual_split: the split of a source that names none, if the set has several.
        setting: the setting with the source, for error messages.

    Raises:
        UserError: the set cannot be loaded, or lacks the split or a column of levels.
    """
    dataset = choose_split(rows, usual_split, setting)
    dataset = problem_sets.select_levels(dataset, rows.level_min, rows.level_max, rows.path)
    if 0 < rows.limit < len(dataset):
        dataset = dataset.select(range(rows.limit))
    return dataset


def row_numbers(rows: Rows, usual_split: str, setting: str) -> Sequence[int]:
    """Returns the numbers, in the split of a source, of the rows that `open_rows` returns."""
    dataset = choose_split(rows, usual_split, setting)
    numbers = problem_sets.rows_of_levels(dataset, rows.level_min, rows.level_max, rows.path)
    return numbers[: rows.limit] if rows.limit else numbers


def placed_rows(
    read_rows: Sequence[RowType | None], rows: Rows, usual_split: str, setting: str
) -> list[RowType | None]:
    """Returns what was read from the rows of a source, with the place of each row.

    read_rows: a value for each row of `open_rows`, None for an unusable row.
    """
    numbers = row_numbers(rows, usual_split, setting)
    return [
        row if row is None else row._replace(place=Place(rows.path, number))
        for row, number in zip(read_rows, numbers, strict=True)
    ]


def choose_split(rows: Rows, usual: str, setting: str) -> datasets.Dataset:
    """Returns the split of a source. If it names none: the split `usual`, or the only split.

    `setting` is the name of the setting with the source, for error messages.

    Raises:
        UserError: the set has no such split.
    """
    if not rows.split:
        return problem_sets.load_split(rows.path, usual)
    splits = problem_sets.load(rows.path)
    if rows.split not in splits:
        raise UserError(
            f"{setting}={rows}: data {rows.path} has the splits {', '.join(splits)}: {rows.split} "
            "is not among them"
        )
    return splits[rows.split]


def has_test_split(rows: Rows) -> bool:
    """Returns whether a source has the held-out split of `held_out_sources` by itself."""
    splits = problem_sets.load(rows.path)
    # The only split of a set is trained on, whatever its name.
    return "test" in splits and len(splits) > 1 and rows.split != "test"


# -- Held-out rows ---------------------------------------------------------------------------------


def held_out_sources(selection: Selection) -> list[Rows]:
    """Returns the sources of held-out rows: those of the selection, or the splits test of its sets.

    A held-out source without a path stands for each set to train on that has its split. Columns
    that a source does not name are those of the first set to train on.

    Raises:
        UserError: no set has the split, or the run trains on that split.
    """
    columns = selection.train[0] if selection.train else Rows()
    sources = []
    for rows in selection.held_out or (Rows(),):
        named = replace(
            rows, problem=rows.problem or columns.problem, answer=rows.answer or columns.answer
        )
        sources += [named] if rows.path else held_out_splits(selection, rows)
    return sources


def held_out_splits(selection: Selection, wanted: Rows) -> list[Rows]:
    """Returns the sets to train on, with the held-out split that the source `wanted` names.

    Raises:
        UserError: no set has the split, or the run trains on that split.
    """
    name = wanted.split or "test"
    setting = f"{selection.section}.eval_data={wanted}"
    if wanted.split and all(name == (rows.split or "train") for rows in selection.train):
        raise UserError(f"{setting}: {name} is the split that is trained on: name another")
    # A run may train on the split test, which is then not held out.
    found = [
        replace(
            wanted,
            path=rows.path,
            split=name,
            problem=wanted.problem or rows.problem,
            answer=wanted.answer or rows.answer,
        )
        for rows in selection.train
        if name != (rows.split or "train") and name in problem_sets.load(rows.path)
    ]
    if wanted.split and not found:
        splits = [
            f"{rows.path} has the splits {', '.join(problem_sets.load(rows.path))}"
            for rows in selection.train
        ]
        raise UserError(f"{setting}: {'; '.join(splits)}")
    return found


def notes_on_unused_splits(selection: Selection) -> list[str]:
    """Returns a line for each set with splits that are neither trained on nor held out."""
    notes = []
    for rows in selection.train:
        splits = problem_sets.load(rows.path)
        others = [name for name in splits if name != (rows.split or "train")]
        if len(splits) > 1 and others:
            notes.append(
                f"{rows.path}: nothing is held out; its split {', '.join(others)} is held out with "
                f"{selection.section}.eval_data=rows(split='{others[0]}')"
            )
    return notes


def draw_held_out(count: int, num_rows: int) -> list[int]:
    """Returns the indices of at most `count` held-out rows, which are the same in every run."""
    rng = random.Random(problem_sets.EVAL_SEED)
    return sorted(rng.sample(range(num_rows), min(count, num_rows)))


# -- All sets --------------------------------------------------------------------------------------


def load_sets(
    selection: Selection,
    read: Read[RowType],
    notes_on: NotesOn[RowType],
) -> Sets[RowType]:
    """Loads the sets of a task, and removes held-out questions from the training rows.

    Raises:
        UserError: a set cannot be loaded, or has no rows left to train on.
    """
    # Held-out rows first: the training rows must not contain their questions.
    held_out: list[RowType] = []
    sources_held_out = held_out_sources(selection)
    for source in sources_held_out:
        rows = read(open_rows(source, "test", "task.eval_data"), source, True)
        rows = placed_rows(rows, source, "test", "task.eval_data")
        held_out += [row for row in rows if row is not None]
    # Digests ignore case, white space and punctuation, in which copies of a question often differ.
    digests = {overlap.digest(row.question) for row in held_out}

    train: list[list[RowType]] = []
    notes = [] if sources_held_out else notes_on_unused_splits(selection)
    for source in selection.train:
        dataset = open_rows(source, "train", "task.data")
        rows = placed_rows(read(dataset, source, False), source, "train", "task.data")
        usable = [row for row in rows if row is not None]
        trainable = [row for row in usable if overlap.digest(row.question) not in digests]
        if usable and not trainable:
            where = ", ".join(
                f"the split {rows.split} of {rows.path}" if rows.split else rows.path
                for rows in sources_held_out
            )
            raise UserError(
                f"task.data={source}: all of its {len(usable)} problems are held out, as they are "
                f"also in {where}: give another task.eval_data"
            )
        if not trainable:
            raise UserError(
                f"task.data={source}: none of {len(dataset)} rows is left to train on: give a set "
                "with others, or widen its level_min..level_max"
            )
        notes += notes_on(Loaded(source.path, dataset, usable, trainable))
        train.append(trainable)
    return Sets(train, held_out, notes)


def notes_on_dropped(loaded: Loaded[RowType], reason: str, without_answer: int = 0) -> list[str]:
    """Returns lines with the numbers of dropped and remaining rows of a set.

    `reason` is what unusable rows lack that have an answer, or need none. `without_answer` of
    the unusable rows have none.
    """
    notes = []
    if without_answer:
        notes.append(f"{loaded.source}: {counted(without_answer, 'problem')} dropped: no answer")
    if unusable := len(loaded.dataset) - len(loaded.usable) - without_answer:
        notes.append(f"{loaded.source}: {counted(unusable, 'problem')} dropped: {reason}")
    if held_out := len(loaded.usable) - len(loaded.train):
        notes.append(f"{loaded.source}: {counted(held_out, 'problem')} dropped: held out")
    notes.append(f"{loaded.source}: {counted(len(loaded.train), 'problem')}")
    return notes
