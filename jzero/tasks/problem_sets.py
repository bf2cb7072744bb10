"""Published sets of problems: loads them, reads their rows, and mixes them by a seed.

A source is what `task.data` names: a local file or directory, or a set on the Hugging Face hub.
`load_split` returns one of its splits, `read_rows` the questions and answers of a split, `stream`
an endless shuffled sequence of rows. Imports no jax, and `datasets` and `grain`, which are slow to
import, only where they are used: grader processes load this module.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from jzero.errors import UserError, shown
from jzero.types import JsonValue, Prompt

if TYPE_CHECKING:
    import datasets

RowType = TypeVar("RowType")
RowType_co = TypeVar("RowType_co", covariant=True)

EVAL_SEED = 20250124  # not the run's seed: runs are compared on the same held-out problems

# What `task.data=""` means for the tasks that have published sets.
DEFAULT_SETS = {
    "gsm8k": "main@openai/gsm8k",  # 7,473 train rows
    "math": "RLAIF/math",  # 12,000 train rows: MATH without the problems of MATH-500
    "math_multiturn": "RLAIF/math",
}

# The names that columns have in published sets. The first that a set has is used.
COLUMN_NAMES = {
    "problem": ("problem", "question", "prompt", "Problem", "Question", "input"),
    "answer": ("answer", "final_answer", "gt_answer", "Answer"),
    "level": ("level", "difficulty", "Level"),
}

FILE_TYPES = (".json", ".jsonl", ".parquet", ".arrow")
# Files that `save_to_disk` writes beside the data of a Dataset, or of a dict of them.
SAVED_TO_DISK = ("state.json", "dataset_dict.json")


class Row(NamedTuple):
    """A question with its answer: text, a number, or a list of answers any of which is right.

    `prompt` is the prompt of a set that has prompts of its own (task.template=column:NAME).
    """

    problem: str
    answer: JsonValue
    prompt: Prompt | None = None
    columns: dict[str, JsonValue] | None = None  # all of the row, where a reward asks for them


class Stream(Protocol[RowType_co]):
    """An endless sequence of rows: `stream[i]` is a function of i alone."""

    def __getitem__(self, index: int, /) -> RowType_co: ...


# Loading.


@functools.cache
def load(source: str) -> Mapping[str, datasets.Dataset]:
    """Returns the splits of a source by their names; a single file is the split "train".

    A source is a json, jsonl, parquet or arrow file, a directory of such files, each of which is a
    split (train.jsonl, test.jsonl, ...), a directory that `save_to_disk` wrote, or a hub id
    ("owner/name" or "config@owner/name").

    Raises:
        UserError: the source cannot be loaded.
    """
    try:
        return _load(source)
    except Exception as error:  # the network or a foreign file: datasets raises whatever it met
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data {source} cannot be loaded ({type(error).__name__}: {reason}): give a json, "
            "jsonl, parquet or arrow file, a directory of train and test files or of save_to_disk, "
            "or a hub id (config@id) in reach"
        ) from None


class _Files(Mapping[str, "datasets.Dataset"]):
    """The splits of a directory of files. A file is read when its split is first asked for."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._splits: dict[str, datasets.Dataset] = {}

    def __getitem__(self, name: str) -> datasets.Dataset:
        path = self._files[name]
        if name not in self._splits:
            try:
                self._splits[name] = _read_file(path)
            except Exception as error:  # a foreign file: datasets raises whatever it met
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"data {path} cannot be loaded ({type(error).__name__}: {reason})"
                ) from None
        return self._splits[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _load(source: str) -> Mapping[str, datasets.Dataset]:
    import datasets

    path = Path(source)
    if path.is_dir():
        files = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in FILE_TYPES}
        if files and not any((path / name).exists() for name in SAVED_TO_DISK):
            return _Files(files)
        return _as_splits(datasets.load_from_disk(source))
    if path.exists() and path.suffix in FILE_TYPES:
        return {"train": _read_file(path)}

    config_name, _, repository = source.rpartition("@")
    is_path = repository.count("/") > 1 or repository.startswith(".")
    if path.exists() or path.suffix in FILE_TYPES or is_path:
        raise FileNotFoundError(f"no such directory, or file ending in {', '.join(FILE_TYPES)}")
    return _as_splits(datasets.load_dataset(repository, config_name or None))


def _as_splits(loaded: object) -> dict[str, datasets.Dataset]:
    """Returns what `datasets` loaded, a Dataset or a dict of them, as a dict."""
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    assert isinstance(loaded, dict), f"{type(loaded)=}"
    return {str(name): dataset for name, dataset in loaded.items()}


def _read_file(path: Path) -> datasets.Dataset:
    import datasets

    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    if path.suffix == ".arrow":
        return datasets.Dataset.from_file(str(path))
    return _read_json(path)


def load_split(source: str, *names: str) -> datasets.Dataset:
    """Returns the first of the splits `names` that the source has, or its only split.

    Raises:
        UserError: the source has several splits, and none of `names`.
    """
    splits = load(source)
    for name in names:
        if name in splits:
            return splits[name]
    if len(splits) > 1:
        raise UserError(
            f"data {source} has splits {', '.join(splits)}: {names[0]} is not among them, name one "
            "with task.train_split, task.eval_split, sft.train_split or sft.eval_split"
        )
    return next(iter(splits.values()))


def choose_split(source: str, wanted: str, usual: str, setting: str) -> datasets.Dataset:
    """Returns the split `wanted` of a source or, if that is "", the split `usual` or the only one.

    `setting` is the name of the setting that has the value `wanted`.

    Raises:
        UserError: the source has no such split.
    """
    if not wanted:
        return load_split(source, usual)
    splits = load(source)
    if wanted not in splits:
        raise UserError(
            f"{setting}={wanted}: data {source} has the splits {', '.join(splits)}: {wanted} is "
            "not among them"
        )
    return splits[wanted]


def held_out_sources(
    sources: Sequence[str], wanted: str, train_split: str, setting: str
) -> list[str]:
    """Returns the sources that have held-out rows: the split `wanted`, or "test" if that is "".

    `train_split` is the split that is trained on. `setting` is the name of the setting that has the
    value `wanted`.

    Raises:
        UserError: no source has the split `wanted`, or it is the one that is trained on.
    """
    if wanted and wanted == (train_split or "train"):
        raise UserError(f"{setting}={wanted} is the split that is trained on: name another")
    name = wanted or "test"
    found = [source for source in sources if name != train_split and name in load(source)]
    if wanted and not found:
        splits = [f"{source} has the splits {', '.join(load(source))}" for source in sources]
        raise UserError(f"{setting}={wanted}: {'; '.join(splits)}")
    return found


def unused_splits_notes(sources: Sequence[str], train_split: str, setting: str) -> list[str]:
    """Returns a line for each source that has further splits, none of which is held out."""
    notes = []
    for source in sources:
        others = [name for name in load(source) if name != (train_split or "train")]
        if len(load(source)) > 1 and others:
            notes.append(
                f"{source}: nothing is held out; its split {', '.join(others)} is held out if "
                f"{setting} names it"
            )
    return notes


def _read_json(path: Path) -> datasets.Dataset:
    """Reads a file of JSON lines, or of one JSON array.

    `Dataset.from_json` would parse answers such as "[0, 1)" and "0.50" as JSON of their own. Here a
    value keeps its text. A column has one type: lists of text where some of its values are lists,
    text where its values are of several types.
    """
    import datasets

    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        table = json.loads(text)
    else:
        # Not splitlines(), which also splits at separators that JSON allows inside of strings.
        table = [json.loads(line) for line in text.split("\n") if line.strip()]
    # A dict keeps the order in which the names first appear.
    names = dict.fromkeys(name for row in table for name in row)
    columns = {name: _one_type([row.get(name) for row in table]) for name in names}
    return datasets.Dataset.from_dict(columns)


def _one_type(values: list[JsonValue]) -> list[JsonValue]:
    """Returns the values of a column as one type: see `_read_json`."""
    types = {type(value) for value in values if value is not None}
    if len(types) <= 1 or types == {int, float}:
        return values
    lists = [value if isinstance(value, list) else [value] for value in values]
    texts = [[str(item) for item in items if item is not None] for items in lists]
    if list in types:
        return texts
    return [items[0] if items else None for items in texts]


# Rows.


def find_column(dataset: datasets.Dataset, kind: str, source: str, wanted: str = "") -> str:
    """Returns the name of a column: `wanted`, or the first that is known for its kind.

    `kind` is a key of COLUMN_NAMES.

    Raises:
        UserError: the set has no such column.
    """
    names = [wanted] if wanted else COLUMN_NAMES[kind]
    for name in names:
        if name in dataset.column_names:
            return name
    columns = ", ".join(sorted(dataset.column_names))
    if kind == "level":
        advice = "task.level_min=0 task.level_max=0"
    else:
        advice = f"task.{kind}_column"
    raise UserError(f"task.data={source} has columns {columns}: set {advice}")


def read_questions(dataset: datasets.Dataset, source: str) -> list[str]:
    """Returns the questions of a set, without their answers."""
    column = find_column(dataset, "problem", source)
    return as_questions(dataset[column], column, source)


def read_rows(
    dataset: datasets.Dataset,
    problem_column: str,
    answer_column: str,
    source: str,
    prompt_column: str = "",
    *,
    with_columns: bool = False,
) -> list[Row]:
    """Returns the questions and answers of a set; "" stands for the columns' usual names.

    Rows have a prompt where `prompt_column` names the column that holds it. The question of such a
    row is then in the column of questions or, if the set has none, the prompt's own words.
    `with_columns` keeps all columns of every row beside these.

    Raises:
        UserError: the set does not have the columns, or they hold something else.
    """
    columns = read_columns(dataset, source) if with_columns else [None] * len(dataset)
    if "." in answer_column:
        dataset = dataset.flatten()  # {"reward_model": {"ground_truth": 1}}, the layout of verl
    rows = read_rows_without_answers(dataset, problem_column, source, prompt_column)
    answer_name = find_column(dataset, "answer", source, answer_column)
    answers = [final_answer(answer) for answer in dataset[answer_name][:]]
    return [
        Row(row.problem, answer, row.prompt, values)
        for row, answer, values in zip(rows, answers, columns, strict=True)
    ]


def read_columns(dataset: datasets.Dataset, source: str) -> list[dict[str, JsonValue]]:
    """Returns all columns of each row, by their names.

    Raises:
        UserError: a column holds what JSON has no value for, such as images or dates.
    """
    rows = [dict(row) for row in dataset]
    for number, row in enumerate(rows):
        for name, value in row.items():
            try:
                json.dumps(value)
            except TypeError:
                raise UserError(
                    f"data {source} row {number}: the column {name} holds {shown(value)}, which is "
                    "no value of JSON: a reward that asks for row needs a set without that column"
                ) from None
    return rows


def read_rows_without_answers(
    dataset: datasets.Dataset, problem_column: str, source: str, prompt_column: str = ""
) -> list[Row]:
    """Returns the questions and prompts of a set as `read_rows` does. The answers are None."""
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
    """Returns the prompts in a column, unchanged: each is text, or messages with role and content.

    Raises:
        UserError: the set has no such column, or a value is neither.
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
        if isinstance(value, str) and value:
            prompts.append(value)
        elif messages and all(is_message(message) for message in messages):
            # A column has the same keys in every row: those that a message does not have are None.
            prompts.append([_without_missing(message) for message in messages])
        else:
            raise UserError(
                f"data {source} row {number}: the column {column} holds {value!r:.80}, and neither "
                "text nor messages with role and content: task.template=column:NAME needs prompts"
            )
    return prompts


def is_message(value: object) -> bool:
    """Returns whether a value is a chat message: a dict with a role and with content, both text."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _without_missing(message: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {key: value for key, value in message.items() if value is not None}


def _questions_of_prompts(
    dataset: datasets.Dataset,
    prompts: Sequence[Prompt],
    problem_column: str,
    prompt_column: str,
    source: str,
) -> list[str]:
    """Returns the question of each row of a set with prompts of its own: see `read_rows`."""
    if problem_column and problem_column != prompt_column:
        name = find_column(dataset, "problem", source, problem_column)
        return as_questions(dataset[name][:], name, source)
    for name in COLUMN_NAMES["problem"]:
        if name != prompt_column and name in dataset.column_names:
            values = dataset[name][:]
            if all(isinstance(value, str) for value in values):
                return values
    return [_words_of(prompt) for prompt in prompts]


def _words_of(prompt: Prompt) -> str:
    """Returns a prompt of text as it is, and the last message of the user of any other."""
    if isinstance(prompt, str):
        return prompt
    of_user = [message["content"] for message in prompt if message["role"] == "user"]
    return of_user[-1] if of_user else prompt[-1]["content"]


def as_questions(values: Sequence[JsonValue], column: str, source: str) -> list[str]:
    """Returns the values of the column of questions, each of which has to be text.

    Raises:
        UserError: a value is something else, such as the list of messages that some sets have.
    """
    for number, value in enumerate(values):
        if not isinstance(value, str):
            kind = "a list of messages" if isinstance(value, list) else f"{value!r:.80}"
            raise UserError(
                f"task.data={source} row {number}: the column {column} holds {kind}, and no text: "
                "name a column that holds the question with task.problem_column, and choose the "
                f"text around it with task.template, or take prompts unchanged from a column with "
                f"task.template=column:{column}"
            )
    return list(values)


def final_answer(answer: JsonValue) -> JsonValue:
    """Returns the answer at the end of a worked solution in GSM8K's form, after ####.

    Other answers stay as they are, and a list of one answer is that answer.
    """
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, str) and "####" in answer:
        return answer.rpartition("####")[2].strip()
    return answer


def select_levels(
    dataset: datasets.Dataset, lowest: int, highest: int, source: str
) -> datasets.Dataset:
    """Returns the rows whose level, such as "Level 3", 3 or 3.0, is in lowest..highest.

    A bound of 0 is no bound. Without bounds the set needs no column of levels.
    """
    if not lowest and not highest:
        return dataset
    column = find_column(dataset, "level", source)
    indices = []
    for i, text in enumerate(dataset[column]):
        found = re.search(r"\d+\.?\d*", str(text))
        level = float(found[0]) if found else 0.0
        if lowest <= level and (not highest or level <= highest):
            indices.append(i)
    return dataset.select(indices)


# Mixing.


def stream(
    sets: Sequence[Sequence[RowType]], weights: Sequence[float], seed: int
) -> Stream[RowType]:
    """Returns an endless shuffled sequence of rows, a function of its arguments alone.

    Every set is shuffled anew in every epoch of its own. `weights` are the shares of the sets in
    the sequence. Without weights the sets are shuffled together, as if they were one.

    Raises:
        UserError: the weights are not one positive number for each set.
    """
    import grain  # it imports jax, and grader processes load this module

    if weights:
        are_positive = all(isinstance(item, int | float) and item > 0 for item in weights)
        if len(weights) != len(sets) or not are_positive:
            raise UserError(
                f"{weights=} must be a positive number for each of the {len(sets)} sets"
            )
    elif len(sets) > 1:
        sets = [[row for rows in sets for row in rows]]

    shuffled = [
        grain.MapDataset.source(rows).seed(seed + i).shuffle().repeat()
        for i, rows in enumerate(sets)
    ]
    mixed = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)
    # Grain's type allows rows that a filter removed, None; there is no filter here.
    return cast(Stream[RowType], mixed)
