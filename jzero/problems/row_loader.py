"""The common loader of data-set rows: selects the rows to train on and the held-out rows.

    selection = selection_of(task)                    # the settings that select the rows
    dataset = open_train(selection, source)           # the selected rows of one set
    sets = load_sets(selection, read, notes_on)       # the rows of all sets, as the task reads them

`problem_sets` loads a source and reads its columns. Each task provides a function that reads the
rows of a split. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from jzero.errors import UserError
from jzero.files import split_commas
from jzero.problems import overlap, problem_sets
from jzero.problems.problem_sets import Source

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig


class Asked(Protocol):
    """A row of a task, with a question."""

    @property
    def question(self) -> str: ...


RowType = TypeVar("RowType", bound=Asked)


class Selection(NamedTuple):
    """The settings that select rows."""

    data: str  # sources, separated by commas
    eval_data: str = ""
    train_split: str = ""  # "": train, or the only split
    eval_split: str = ""  # "": test
    max_train: int = 0  # rows of each set; 0 for all
    level_min: int = 0  # 0 for no bound
    level_max: int = 0
    train_setting: str = "task.train_split"  # for error messages
    eval_setting: str = "task.eval_split"

    @property
    def sources(self) -> list[str]:
        return split_commas(self.data)


class Sets(NamedTuple, Generic[RowType]):
    """The rows of a task."""

    train: list[list[RowType]]  # the rows to train on, one list for each set
    held_out: list[RowType]
    notes: list[str]  # lines about loaded and dropped rows


# read(dataset, source, is_held_out) returns the task's row for each row of a split, or None for a
# row that the task cannot use.
Read = Callable[["datasets.Dataset", Source, bool], Sequence[RowType | None]]


class Loaded(NamedTuple, Generic[RowType]):
    """The rows of one set that were selected for training."""

    source: str
    dataset: datasets.Dataset
    usable: list[RowType]
    train: list[RowType]  # the usable rows that are not held out


NotesOn = Callable[[Loaded[RowType]], list[str]]


def selection_of(task: TaskConfig) -> Selection:
    """Returns the settings of a task that select rows."""
    return Selection(
        data=task.data or problem_sets.DEFAULT_SETS.get(task.name, ""),
        eval_data=task.eval_data,
        train_split=task.train_split,
        eval_split=task.eval_split,
        max_train=task.max_train,
        level_min=task.level_min,
        level_max=task.level_max,
    )


# -- One set ---------------------------------------------------------------------------------------


def open_train(selection: Selection, source: str) -> datasets.Dataset:
    """Returns the first `max_train` rows with selected levels in the training split of a set.

    Raises:
        UserError: the set cannot be loaded, or lacks the split or a column of levels.
    """
    dataset = choose_split(source, selection.train_split, "train", selection.train_setting)
    lowest, highest = selection.level_min, selection.level_max
    dataset = problem_sets.select_levels(dataset, lowest, highest, source)
    if 0 < selection.max_train < len(dataset):
        dataset = dataset.select(range(selection.max_train))
    return dataset


def open_held_out(selection: Selection, source: str) -> datasets.Dataset:
    """Returns the held-out split of a set.

    Raises:
        UserError: the set cannot be loaded, or lacks the split.
    """
    return choose_split(source, selection.eval_split, "test", selection.eval_setting)


def choose_split(source: str, wanted: str, usual: str, setting: str) -> datasets.Dataset:
    """Returns the split `wanted` of a source. If that is "": the split `usual`, or the only split.

    `setting` is the name of the setting with the value `wanted`, for error messages.

    Raises:
        UserError: the source has no such split.
    """
    if not wanted:
        return problem_sets.load_split(source, usual)
    splits = problem_sets.load(source)
    if wanted not in splits:
        raise UserError(
            f"{setting}={wanted}: data {source} has the splits {', '.join(splits)}: {wanted} is "
            "not among them"
        )
    return splits[wanted]


# -- Held-out rows ---------------------------------------------------------------------------------


def held_out_sources(selection: Selection) -> list[str]:
    """Returns the sources of held-out rows: `eval_data`, or the sets that have the held-out split.

    Raises:
        UserError: no set has the split `eval_split`, or the run trains on that split.
    """
    if selection.eval_data:
        return [selection.eval_data]
    wanted, setting = selection.eval_split, selection.eval_setting
    if wanted and wanted == (selection.train_split or "train"):
        raise UserError(f"{setting}={wanted} is the split that is trained on: name another")
    name = wanted or "test"
    sources = selection.sources
    # A run may train on the split test, which is then not held out.
    found = [
        source
        for source in sources
        if name != selection.train_split and name in problem_sets.load(source)
    ]
    if wanted and not found:
        splits = [
            f"{source} has the splits {', '.join(problem_sets.load(source))}" for source in sources
        ]
        raise UserError(f"{setting}={wanted}: {'; '.join(splits)}")
    return found


def notes_on_unused_splits(selection: Selection) -> list[str]:
    """Returns a line for each set with splits that are neither trained on nor held out."""
    notes = []
    for source in selection.sources:
        splits = problem_sets.load(source)
        others = [name for name in splits if name != (selection.train_split or "train")]
        if len(splits) > 1 and others:
            notes.append(
                f"{source}: nothing is held out; its split {', '.join(others)} is held out if "
                f"{selection.eval_setting} names it"
            )
    return notes


def draw_held_out(count: int, num_rows: int) -> list[int]:
    """Returns the indices of at most `count` held-out rows, which are the same in every run."""
    rng = random.Random(problem_sets.EVAL_SEED)
    return sorted(rng.sample(range(num_rows), min(count, num_rows)))


# -- All sets --------------------------------------------------------------------------------------


def load_sets(
    selection: Selection, read: Read[RowType], notes_on: NotesOn[RowType]
) -> Sets[RowType]:
    """Loads the sets of a task, and removes held-out questions from the training rows.

    `eval_data` may name the columns of its set: "FILE:problem=COLUMN:answer=COLUMN".

    Raises:
        UserError: a set cannot be loaded, or has no rows left to train on.
    """
    held_out: list[RowType] = []
    sources_held_out = held_out_sources(selection)
    for text in sources_held_out:
        source = problem_sets.parse_source(text)
        rows = read(open_held_out(selection, source.data), source, True)
        held_out += [row for row in rows if row is not None]
    # Digests ignore case, white space and punctuation, in which copies of a question often differ.
    digests = {overlap.digest(row.question) for row in held_out}

    train: list[list[RowType]] = []
    notes = [] if sources_held_out else notes_on_unused_splits(selection)
    for name in selection.sources:
        dataset = open_train(selection, name)
        rows = read(dataset, Source(name), False)
        usable = [row for row in rows if row is not None]
        trainable = [row for row in usable if overlap.digest(row.question) not in digests]
        if usable and not trainable:
            held_out_name = selection.eval_data or f"its split {selection.eval_split or 'test'}"
            raise UserError(
                f"task.data={name}: all of its {len(usable)} problems are held out, as they are "
                f"also in {held_out_name}: give another task.eval_data"
            )
        if not trainable:
            raise UserError(
                f"task.data={name}: none of {len(dataset)} rows is left to train on: give a set "
                "with others, or widen task.level_min..level_max"
            )
        notes += notes_on(Loaded(name, dataset, usable, trainable))
        train.append(trainable)
    return Sets(train, held_out, notes)


def notes_on_dropped(loaded: Loaded[RowType], reason: str) -> list[str]:
    """Returns lines with the numbers of dropped and remaining rows of a set.

    `reason` explains why rows are unusable.
    """
    notes = []
    if unusable := len(loaded.dataset) - len(loaded.usable):
        notes.append(f"{loaded.source}: {unusable} problems dropped, {reason}")
    if held_out := len(loaded.usable) - len(loaded.train):
        notes.append(f"{loaded.source}: {held_out} problems dropped, they are held out")
    notes.append(f"{loaded.source}: {len(loaded.train)} problems")
    return notes
