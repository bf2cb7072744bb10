"""Problem data sets: loads them, reads their rows, and mixes them with a seed.

A source is a value of `task.data`: a local file or directory, or a data set on the Hugging Face
hub. `load_split` returns one split of a source, `read_rows` returns the questions and answers of a
split, and `stream` returns an endless shuffled sequence of rows.

Grader processes load this module. It imports no jax, and imports `datasets` and `grain` inside
functions, because both are slow to import.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import difflib
import functools
import json
import logging
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from jzero.answers import extract
from jzero.errors import UserError, quoted
from jzero.files import split_revision
from jzero.problems import arrow_files, bounds, csv_files, hub_sets, json_files
from jzero.types import JsonValue, Problem, Prompt

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

RowType = TypeVar("RowType")

EVAL_SEED = 20250124  # not the run's seed: runs are compared on the same held-out problems

# The data sets of tasks that have published ones, used if `task.data` is empty.
DEFAULT_SETS = {
    "gsm8k": "main@openai/gsm8k",  # 7,473 train rows
    "math": "RLAIF/math",  # 12,000 train rows: MATH without the problems of MATH-500
    "math_multiturn": "RLAIF/math",
}

# Column names in published data sets. The first name that a data set has is used. Dots lead into a
# structure: verl has the answers in {"reward_model": {"ground_truth": ...}}.
COLUMN_NAMES = {
    "problem": (
        "problem",
        "question",
        "prompt",
        "Problem",
        "Question",
        "input",
        "messages",
        "context_messages",
    ),
    "answer": (
        "answer",
        "final_answer",
        "gt_answer",
        "Answer",
        "reward_model.ground_truth",
        "messages",
    ),
    "level": ("level", "difficulty", "Level"),
}
ASSISTANT = "assistant"  # role of the messages that a model writes
MAX_SHORT_ANSWER = 40  # characters of a message that is an answer as a whole

MAX_QUESTION = 4 << 20  # characters
MAX_ANSWER = 1 << 16  # characters of a final answer

FILE_TYPES = (
    ".json",
    ".jsonl",
    ".parquet",
    ".arrow",
    ".csv",
    ".json.gz",
    ".jsonl.gz",
    ".csv.gz",
)
# Files that `save_to_disk` adds to the data of a Dataset or DatasetDict.
SAVED_TO_DISK = ("state.json", "dataset_dict.json")


def is_held_out(question: str) -> bool:
    """Returns whether a drawn question is asked in evaluations only: an eighth of all are."""
    return zlib.crc32(question.encode()) % 8 == 0


class Place(NamedTuple):
    """A row of a data set."""

    data: str  # path or hub id of the set
    number: int  # in the split of the set, from 0


def placed(problem: Problem, place: Place | None) -> Problem:
    """Returns a problem with the row that it is, None for a problem that no data set has."""
    if place is None:
        return problem
    return replace(problem, data=place.data, data_row=place.number)


class Row(NamedTuple):
    """A question with its answer: text, a number, or a list of accepted answers.

    `prompt` is set if the data set contains complete prompts (task.template=column:NAME).
    """

    question: str
    answer: JsonValue
    prompt: Prompt | None = None
    columns: dict[str, JsonValue] | None = None  # all columns, if a reward reads them
    place: Place | None = None


class AskedRow(NamedTuple):
    """A row of a data set as a problem. The id of the problem is still empty."""

    question: str  # as in the data set, without a template
    problem: Problem
    place: Place | None = None


class Stream(Protocol[RowType]):
    """An endless sequence of rows, a grain.MapDataset: `stream[i]` depends only on i.

    A MapDataset is read by index and keeps no position. A checkpoint therefore needs only the step
    number, on any number of hosts. A grain.DatasetIterator would have additional state to save.
    """

    def __getitem__(self, index: int, /) -> RowType: ...

    def batch(
        self, batch_size: int, *, batch_fn: Callable[[Sequence[Any]], list[Any]]
    ) -> Stream[list[RowType]]: ...


class _Drawn(Generic[RowType]):
    """A grain data source that computes each row from its index."""

    def __init__(self, draw: Callable[[int], RowType]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        # Grain needs a length, and the sequence is endless.
        return sys.maxsize

    def __getitem__(self, index: int) -> RowType:
        return self._draw(index)


# Loading.


@functools.cache
def load(source: str) -> Mapping[str, datasets.Dataset]:
    """Returns the splits of a source by name. A single file has one split, "train".

    A source is one of these:

    - a json, jsonl, csv, parquet or arrow file; json, jsonl and csv may be packed with gzip
    - a directory of such files, one for each split (train.jsonl, test.jsonl, ...)
    - a directory written by `save_to_disk`
    - a hub id, "owner/name" or "config@owner/name", optionally followed by "#revision": a branch,
      tag or commit

    Raises:
        UserError: the source cannot be loaded.
    """
    try:
        return _load(source)
    except UserError:
        raise
    except Exception as error:
        # The network or a file is at fault, and datasets raises many types of exceptions for them.
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data {source} cannot be loaded ({type(error).__name__}: {reason}): give a json, "
            "jsonl, csv, parquet or arrow file, a directory of train and test files or of "
            "save_to_disk, or a hub id (config@id#revision) in reach"
        ) from None


class _Files(Mapping[str, "datasets.Dataset"]):
    """The splits of a directory of files. Each file is read on the first access to its split."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._splits: dict[str, datasets.Dataset] = {}

    def __getitem__(self, name: str) -> datasets.Dataset:
        path = self._files[name]
        if name not in self._splits:
            try:
                self._splits[name] = _read_file(path)
            except UserError:
                raise
            except Exception as error:
                # datasets raises many types of exceptions for damaged files.
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"data {path} cannot be loaded ({type(error).__name__}: {reason})"
                ) from None
        return self._splits[name]

    def __contains__(self, name: object) -> bool:
        # Without this method a Mapping would read the file to find out.
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _load(source: str) -> Mapping[str, datasets.Dataset]:
    import datasets

    path = Path(source)
    if path.is_dir():
        found = [file for file in sorted(path.iterdir()) if file_type(file)]
        files = {split_of(file): file for file in found}
        # `save_to_disk` writes files of these types too: its own loader reads them.
        if files and not any((path / name).exists() for name in SAVED_TO_DISK):
            if len(files) < len(found):
                stems = [split_of(file) for file in found]
                twice = next(stem for stem in stems if stems.count(stem) > 1)
                raise UserError(f"data {source} has two files of the split {twice}: remove one")
            return _Files(files)
        return _as_splits(datasets.load_from_disk(source))
    if path.exists() and file_type(path):
        return {"train": _read_file(path)}

    name, revision = split_revision(source)
    config_name, _, repository = name.rpartition("@")
    # Report a missing file as such, instead of looking for its path on the hub.
    is_path = repository.count("/") > 1 or repository.startswith(".")
    if path.is_file():
        raise UserError(
            f"data {source} ends in {path.suffix or 'no suffix'}: convert it to one of "
            f"{', '.join(FILE_TYPES)}, such as a JSON object with its columns on each line"
        )
    if path.exists() or file_type(path) or is_path:
        raise FileNotFoundError(f"no such directory, or file ending in {', '.join(FILE_TYPES)}")
    return _as_splits(hub_sets.load_from_hub(repository, config_name or None, revision))


def file_type(path: Path) -> str:
    """Returns the end of a file's name that is in FILE_TYPES; "" for other files."""
    return next((end for end in FILE_TYPES if path.name.endswith(end)), "")


def split_of(path: Path) -> str:
    """Returns the split that a file of a directory has: its name without its type."""
    return path.name.removesuffix(file_type(path))


def _as_splits(loaded: object) -> dict[str, datasets.Dataset]:
    """Returns a Dataset, or a dict of Datasets, as a dict of splits."""
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    assert isinstance(loaded, dict), f"{type(loaded)=}"
    return {str(name): dataset for name, dataset in loaded.items()}


def _read_file(path: Path) -> datasets.Dataset:
    import datasets
    import pyarrow

    json_files.check_is_file(path)
    if path.suffix == ".parquet":
        arrow_files.check_parquet(path)
        with _without_log("datasets"):
            return datasets.Dataset.from_parquet(str(path))
    if path.suffix == ".arrow":
        arrow_files.check_arrow(path)
        return datasets.Dataset.from_file(str(path))
    if file_type(path) in (".csv", ".csv.gz"):
        return datasets.Dataset.from_dict(csv_files.read_columns(path))
    columns = json_files.read_columns(path, COLUMN_NAMES["problem"])
    try:
        return datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowException, TypeError, OverflowError, ValueError):
        # Arrow's message has no row number. Find the row, for an error that names it.
        json_files.find_misfit(path, columns, _fits_arrow)


def _fits_arrow(values: list[JsonValue]) -> bool:
    """Returns whether Arrow can store the values in one column."""
    import datasets
    import pyarrow

    try:
        datasets.Dataset.from_dict({"column": values})
    except (pyarrow.ArrowException, TypeError, OverflowError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Silences the log of a library that both logs and raises its errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_split(source: str, *names: str) -> datasets.Dataset:
    """Returns the first split in `names` that the source has, or the source's only split.

    Raises:
        UserError: the source has several splits, none of them in `names`.
    """
    splits = load(source)
    for name in names:
        if name in splits:
            return splits[name]
    if len(splits) > 1:
        raise UserError(
            f"data {source} has splits {', '.join(splits)}: {names[0]} is not among them, name one "
            f"as in rows('{source}',split='{next(iter(splits))}')"
        )
    return next(iter(splits.values()))


# Rows.


def find_column(dataset: datasets.Dataset, kind: str, source: str, wanted: str = "") -> str:
    """Returns the name of a column: `wanted`, or the first name in COLUMN_NAMES[kind].

    Raises:
        UserError: the data set has no such column.
    """
    names = [wanted] if wanted else COLUMN_NAMES[kind]
    for name in names:
        if has_column(dataset, name):
            return name
    columns = ", ".join(sorted(dataset.column_names))
    if wanted:
        similar = difflib.get_close_matches(wanted, dataset.column_names, 1)
        advice = f"did you mean {similar[0]}?" if similar else "name one of them"
        raise UserError(f"{kind}={wanted}: {source} has the columns {columns}: {advice}")
    if kind == "level":
        advice = "leave level_min and level_max out of its rows(...)"
    else:
        advice = f"name one, as in rows('{source}',{kind}='COLUMN')"
    raise UserError(f"data {source} has columns {columns}: {advice}")


def has_column(dataset: datasets.Dataset, name: str) -> bool:
    """Returns whether a data set has a column; dots lead into a structure."""
    if name in dataset.column_names:
        return True
    features: object = dataset.features
    for part in name.split("."):
        if not isinstance(features, Mapping) or part not in features:
            return False
        features = features[part]
    return True


def column_values(dataset: datasets.Dataset, name: str) -> list[JsonValue]:
    """Returns the values of a column; dots lead into a structure. The data set has the column."""
    if name in dataset.column_names:
        return list(dataset[name][:])
    first, *fields = name.split(".")
    values = list(dataset[first][:])
    for field in fields:
        values = [value.get(field) if isinstance(value, dict) else None for value in values]
    return values


def read_questions(dataset: datasets.Dataset, source: str, problem_column: str = "") -> list[str]:
    """Returns the questions of a data set without their answers."""
    column = find_column(dataset, "problem", source, problem_column)
    return as_questions(dataset[column], column, source)


def read_rows(
    dataset: datasets.Dataset,
    problem_column: str,
    answer_column: str,
    source: str,
    prompt_column: str = "",
    *,
    with_columns: bool = False,
    with_readable_columns: bool = False,
) -> list[Row]:
    """Returns the questions and answers of a data set.

    Args:
        dataset: the rows.
        problem_column: the column of questions; "" selects a usual name.
        answer_column: the column of answers; "" selects a usual name. Dots select a nested value.
            In a column of messages the answer is that of the last message (`final_answer`).
        source: the source of the data set, for error messages.
        prompt_column: a column of complete prompts, or "". If the data set has prompts but no
            column of questions, the question is the text of the prompt.
        with_columns: whether `Row.columns` has all columns.
        with_readable_columns: whether `Row.columns` has the columns that JSON can represent.

    Raises:
        UserError: a column is missing, or has values of another type.
    """
    # `Row.columns` keeps nested columns as they are, so it is read before `flatten`.
    if with_columns:
        columns = read_columns(dataset, source)
    elif with_readable_columns:
        columns = read_readable_columns(dataset)
    else:
        columns = [None] * len(dataset)
    rows = read_rows_without_answers(dataset, problem_column, source, prompt_column)
    answer_name = find_column(dataset, "answer", source, answer_column)
    answers = []
    for number, answer in enumerate(column_values(dataset, answer_name)):
        place = f"task.data={source} row {number}: the column {answer_name}"
        answers.append(_read_answer(answer, place))
    return [
        Row(row.question, answer, row.prompt, values)
        for row, answer, values in zip(rows, answers, columns, strict=True)
    ]


def _read_answer(answer: JsonValue, place: str) -> JsonValue:
    """Returns the final answer of a row: text, a number, a list of these, or None for no answer.

    Raises:
        UserError: the value has another type, is too long, or is a list with a missing answer.
    """
    if isinstance(answer, list) and any(isinstance(item, list) for item in answer):
        raise UserError(f"{place} holds {quoted(answer)}: a list of answers holds no lists")
    final = final_answer(answer)
    items = final if isinstance(final, list) else [final]
    read = [_read_one_answer(item, place) for item in items if item is not None]
    if len(read) < len(items) and isinstance(final, list):
        raise UserError(f"{place} holds {quoted(answer)}: no answer of a list may be missing")
    if isinstance(final, list):
        return read
    return read[0] if read else None


def _read_one_answer(answer: object, place: str) -> JsonValue:
    if isinstance(answer, bool | decimal.Decimal):
        return str(answer)
    if isinstance(answer, float) and not math.isfinite(answer):
        raise UserError(f"{place} holds {answer}: an answer is text or a finite number")
    if not isinstance(answer, str | int | float):
        raise UserError(
            f"{place} holds {quoted(answer)}: an answer is text, a number, or a list of these any "
            "of which is right"
        )
    if isinstance(answer, str) and len(answer) > MAX_ANSWER:
        raise UserError(
            f"{place} holds {len(answer):,} characters: an answer has {MAX_ANSWER:,} at most"
        )
    return answer


def read_columns(dataset: datasets.Dataset, source: str) -> list[dict[str, JsonValue]]:
    """Returns all columns of each row by name.

    Raises:
        UserError: JSON cannot represent a value, such as an image or a date.
    """
    rows = [dict(row) for row in dataset]
    for number, row in enumerate(rows):
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise UserError(
                    f"data {source} row {number}: the column {name} holds {quoted(value)}, which "
                    "is not a value of JSON: a reward that asks for row needs a set without that "
                    "column"
                ) from None
    return rows


def read_readable_columns(dataset: datasets.Dataset) -> list[dict[str, JsonValue]]:
    """Returns the columns of each row that JSON can represent, by name.

    Dates and decimals become text, and numbers that are not finite become null. Columns of bytes,
    images and other objects are omitted.
    """
    rows: list[dict[str, JsonValue]] = [{} for _ in range(len(dataset))]
    for name in dataset.column_names:
        # Images, audio and video, which would be decoded when they are read.
        if hasattr(dataset.features[name], "decode_example"):
            continue
        try:
            values = [_as_json(value) for value in dataset[name]]
        except TypeError:
            continue
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _as_json(value: object) -> JsonValue:
    """Converts a value of a column to JSON. Raises TypeError if JSON cannot represent it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    raise TypeError(type(value).__name__)


def read_rows_without_answers(
    dataset: datasets.Dataset, problem_column: str, source: str, prompt_column: str = ""
) -> list[Row]:
    """Returns the questions and prompts of a data set as `read_rows` does. Answers are None."""
    if prompt_column:
        prompts = read_prompts(dataset, prompt_column, source)
        questions = _questions_of_prompts(dataset, prompts, problem_column, prompt_column, source)
        return [
            Row(question, None, prompt) for question, prompt in zip(questions, prompts, strict=True)
        ]
    problem_name = find_column(dataset, "problem", source, problem_column)
    questions = as_questions(dataset[problem_name][:], problem_name, source)
    return [Row(question, None) for question in questions]


def read_prompts(dataset: datasets.Dataset, column: str, source: str) -> list[Prompt]:
    """Returns the unchanged prompts of a column: text, or messages with role and content.

    A last message of the assistant is the reference answer (`reference_of`), and no part of the
    prompt.

    Raises:
        UserError: the data set has no such column, or a value is no prompt or too long.
    """
    if column not in dataset.column_names:
        raise UserError(
            f"data {source} has columns {', '.join(sorted(dataset.column_names))}: "
            f"task.template=column:{column} takes prompts from a column {column}, choose another "
            "template or another set"
        )
    prompts: list[Prompt] = []
    for number, value in enumerate(dataset[column][:]):
        messages = value if isinstance(value, list) else []
        if len(str(value)) > MAX_QUESTION:
            raise UserError(
                f"data {source} row {number}: the column {column} holds a prompt of more than "
                f"{MAX_QUESTION:,} characters: leave the row out"
            )
        if isinstance(value, str) and value:
            prompts.append(value)
        elif is_conversation(messages) and (asked := without_reference(messages)):
            # Arrow gives all messages of a column the same keys. Missing values are None.
            prompts.append([_without_missing(message) for message in asked])
        else:
            raise UserError(
                f"data {source} row {number}: the column {column} holds {value!r:.80}, and neither "
                "text nor messages with role and content: task.template=column:NAME needs prompts"
            )
    return prompts


def is_conversation(value: object) -> bool:
    """Returns whether a value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(map(bounds.is_message, value))


def reference_of(value: object) -> str | None:
    """Returns the reference answer of a conversation: its last message, if the assistant wrote it.

    Returns None without such a message, and for other values.
    """
    if not is_conversation(value):
        return None
    last = cast(list[dict[str, str]], value)[-1]
    return last["content"] if last["role"] == ASSISTANT else None


def without_reference(messages: Sequence[dict[str, str]]) -> Sequence[dict[str, str]]:
    """Returns a conversation without its reference answer (`reference_of`)."""
    return messages if reference_of(messages) is None else messages[:-1]


def _without_missing(message: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in message.items() if value is not None}


def _questions_of_prompts(
    dataset: datasets.Dataset,
    prompts: Sequence[Prompt],
    problem_column: str,
    prompt_column: str,
    source: str,
) -> list[str]:
    """Returns the question of each row of a data set with complete prompts (see `read_rows`)."""
    if problem_column and problem_column != prompt_column:
        name = find_column(dataset, "problem", source, problem_column)
        return as_questions(dataset[name][:], name, source)
    # The column of prompts may have a usual name of questions, and others may have no text.
    for name in COLUMN_NAMES["problem"]:
        if name != prompt_column and name in dataset.column_names:
            values = dataset[name][:]
            if all(isinstance(value, str) for value in values):
                return values
    return [_words_of(prompt) for prompt in prompts]


def _words_of(prompt: Prompt) -> str:
    """Returns a text prompt, or the content of the last user message in a list of messages.

    Without a user message it returns the content of the last message.
    """
    if isinstance(prompt, str):
        return prompt
    user_texts = [message["content"] for message in prompt if message["role"] == "user"]
    return user_texts[-1] if user_texts else prompt[-1]["content"]


def as_questions(values: Sequence[JsonValue], column: str, source: str) -> list[str]:
    """Returns the values of a column of questions, all of which must be text.

    Raises:
        UserError: a value is too long or no text. Some data sets have lists of messages there.
    """
    questions = []
    for number, value in enumerate(values):
        if not isinstance(value, str):
            kind = "a list of messages" if isinstance(value, list) else f"{value!r:.80}"
            raise UserError(
                f"task.data={source} row {number}: the column {column} holds {kind}, and no text: "
                f"name a column that holds the question, rows('{source}',problem='COLUMN'), and "
                "choose the text around it with task.template, or take prompts unchanged from a "
                f"column with task.template=column:{column}"
            )
        if len(value) > MAX_QUESTION:
            raise UserError(
                f"task.data={source} row {number}: the column {column} holds {len(value):,} "
                f"characters: a question has {MAX_QUESTION:,} at most, leave the row out"
            )
        questions.append(value)
    return questions


def final_answer(answer: JsonValue) -> JsonValue:
    """Returns the text after #### in a worked solution of GSM8K's format.

    A list of one answer counts as that answer. A list of messages has the answer that its last
    message states (`stated_answer`), or None. Returns other answers unchanged.
    """
    if is_conversation(answer):
        return stated_answer(reference_of(answer) or "")
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, str) and "####" in answer:
        return answer.rpartition("####")[2].strip()
    return answer


def stated_answer(message: str) -> str | None:
    """Returns the final answer in a reference answer, None if there is none.

    It is the text after ####, in the last box or after "the answer is"; or the whole message if it
    is one short line.
    """
    if "####" in message:
        return message.rpartition("####")[2].strip() or None
    if stated := extract.extract_answer(message, "stated"):
        return stated
    text = message.rpartition("</think>")[2].strip()
    is_short = len(text) <= MAX_SHORT_ANSWER and "\n" not in text
    return text if text and is_short else None


def select_levels(
    dataset: datasets.Dataset, lowest: int, highest: int, source: str
) -> datasets.Dataset:
    """Returns the rows with a level in lowest..highest. A level is, for example, "Level 3" or 3.0.

    A bound of 0 is no bound. Without bounds the data set needs no column of levels.
    """
    if not lowest and not highest:
        return dataset
    return dataset.select(rows_of_levels(dataset, lowest, highest, source))


def rows_of_levels(dataset: datasets.Dataset, lowest: int, highest: int, source: str) -> list[int]:
    """Returns the indices of the rows that `select_levels` selects."""
    if not lowest and not highest:
        return list(range(len(dataset)))
    column = find_column(dataset, "level", source)
    numbers = []
    for number, text in enumerate(dataset[column]):
        # A text without a number counts as level 0.
        found = re.search(r"\d+\.?\d*", str(text))
        level = float(found[0]) if found else 0.0
        if lowest <= level and (not highest or level <= highest):
            numbers.append(number)
    return numbers


# The loader: grain shuffles, repeats, mixes and batches.


def drawn(draw: Callable[[int], RowType]) -> Stream[RowType]:
    """Returns the endless sequence of rows draw(0), draw(1), ..."""
    import grain  # imports jax, and grader processes load this module

    return cast(Stream[RowType], grain.MapDataset.source(_Drawn(draw)))


# What a step does where a pass over the rows ends: rows of the next pass complete the step, the
# last rows are dropped if they do not fill a step, or the last step of the pass is shorter.
PassEnd = Literal["complete", "drop", "short"]


def rows_of_step(step: int, count: int, num_rows: int, pass_end: PassEnd) -> range:
    """Returns the indices in `stream` of the rows of a step.

    A pass has `num_rows` indices, and a step `count` of them. Steps count from 1, and step 1 begins
    the first pass. Step 0 has the rows of step 1: callers outside of training ask for it.
    """
    step_index = max(step - 1, 0)
    if pass_end == "complete":
        return range(step_index * count, (step_index + 1) * count)
    passes, step_of_pass = divmod(step_index, int(steps_of_pass(count, num_rows, pass_end)))
    first = passes * num_rows + step_of_pass * count
    return range(first, min(first + count, (passes + 1) * num_rows))


def num_steps(passes: float, count: int, num_rows: int, pass_end: PassEnd) -> int:
    """Returns the number of steps that see the rows of `passes` passes, at least 1."""
    steps = passes * steps_of_pass(count, num_rows, pass_end)
    # 0.1 * 30 is slightly more than 3.
    return max(1, math.ceil(steps - 1e-9))


def steps_of_pass(count: int, num_rows: int, pass_end: PassEnd) -> float:
    """Returns the number of steps of a pass. It has a fraction if steps cross the end of passes."""
    if pass_end == "complete":
        return num_rows / count
    return num_rows // count if pass_end == "drop" else -(-num_rows // count)


def pass_end_of(task: TaskConfig) -> PassEnd:
    """Returns what the steps of RL do at the end of a pass."""
    return "drop" if task.drop_last else "complete"


def step_indices(
    step: int, count: int, num_rows: int, task: TaskConfig, weights: Sequence[float] = ()
) -> range:
    """Returns the indices in `stream` of the `count` rows of a step of RL.

    With `task.drop_last` each pass over the `num_rows` rows starts with a new step, and the last
    rows of a pass are skipped if they do not fill a step. `weights` are the arguments of `stream`.

    Raises:
        UserError: the rows do not fill one step, or weights mix passes of different lengths.
    """
    if task.drop_last and weights:
        raise UserError(
            "task.drop_last=True counts passes over all sets, and weights mix passes of different "
            "lengths: leave weight out of task.data, or set task.drop_last=False"
        )
    if task.drop_last and num_rows < count:
        raise UserError(
            f"task.drop_last=True: {num_rows} problems do not fill a step of "
            f"rollout.num_prompts={count}; lower it, or set task.drop_last=False"
        )
    return rows_of_step(step, count, num_rows, pass_end_of(task))


def stream(
    sets: Sequence[Sequence[RowType]], weights: Sequence[float], seed: int
) -> Stream[RowType]:
    """Returns an endless shuffled sequence of rows, which depends only on the arguments.

    Each set is reshuffled in each of its epochs. `weights` are the shares of the sets in the
    sequence. Without weights the sets are shuffled together, like a single set.
    """
    import grain  # imports jax, and grader processes load this module

    assert not weights or len(weights) == len(sets), f"{weights=} {len(sets)=}"
    if not weights and len(sets) > 1:
        sets = [[row for rows in sets for row in rows]]

    shuffled = [
        # Different seeds, because sets of equal length would otherwise get the same order.
        grain.MapDataset.source(rows).seed(seed + i).shuffle().repeat()
        for i, rows in enumerate(sets)
    ]
    mixed = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)
    # Grain's type includes None for rows that a filter removes. There is no filter here.
    return cast(Stream[RowType], mixed)
