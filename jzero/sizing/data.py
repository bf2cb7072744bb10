"""Reads a data set for `jzero train`: which columns it has, and which texts are in them."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jzero.config import TaskConfig
from jzero.config.data_sources import Rows, read_source, read_sources
from jzero.environments import environment_task
from jzero.errors import UserError
from jzero.json_values import as_object
from jzero.problems import problem_sets
from jzero.types import JsonValue, Prompt

if TYPE_CHECKING:
    import datasets

SAMPLED_ROWS = 2000  # rows whose lengths are measured
SAMPLED_EPISODES = 32  # episodes whose first observation is measured
SOLUTION_COLUMNS = ("solution", "completion", "response", "rationale", "reasoning")
# Names that many sets have besides those of `problem_sets.COLUMN_NAMES`.
MORE_ANSWERS = ("gold", "target", "label", "solution")
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(\.\d+)?%?")
HELD_OUT_SHARE = 10  # one row in this many is held out


@dataclass(frozen=True)
class Data:
    """What `jzero train` needs to know about a data set."""

    rows: Rows  # the source, with its columns
    columns: tuple[str, ...]
    num_rows: int
    split: str  # the split to train on
    has_test_split: bool
    problem_reason: str
    answer_reason: str
    has_messages: bool  # the column of problems holds lists of messages
    prompts: list[Prompt]  # of at most SAMPLED_ROWS rows, as they are in the set
    solutions: list[str]  # worked solutions of these rows; empty without such a column
    has_only_numbers: bool  # every answer is a number
    tools: tuple[dict[str, JsonValue], ...] = ()  # schemas that the prompts show, of an environment

    @property
    def is_endless(self) -> bool:
        """Whether there are no rows: an environment makes its episodes from seeds."""
        return not self.num_rows

    @property
    def size(self) -> str:
        """Returns the size of the set, to print."""
        return "episodes without end" if self.is_endless else f"{self.num_rows:,} rows"

    @property
    def source(self) -> str:
        """Returns the path of the set."""
        return self.rows.path

    @property
    def problem_column(self) -> str:
        """Returns the column of problems."""
        return self.rows.problem

    @property
    def answer_column(self) -> str:
        """Returns the column of answers, "" if the set has none."""
        return self.rows.answer


def read_data(text: str, task: TaskConfig) -> Data:
    """Reads the columns and the texts of a data set.

    text: a data source, as in task.data.
    task: the columns and the split of its data, which may have no path, take precedence over the
        usual names.

    Raises UserError if the set cannot be read or has no column of problems. The message names the
    columns.
    """
    rows = read_source("--data", text)
    if given := read_sources("task.data", task.data):
        rows = replace(
            given[0],
            path=rows.path,
            split=given[0].split or rows.split,
            problem=given[0].problem or rows.problem,
            answer=given[0].answer or rows.answer,
        )
    source = rows.path
    splits = problem_sets.load(source)
    split = rows.split or ("train" if "train" in splits else next(iter(splits)))
    if split not in splits:
        raise UserError(f"--data {rows}: data {source} has the splits {', '.join(splits)}")
    dataset = splits[split]
    if not len(dataset):
        raise UserError(f"data {source} has no rows")
    columns = tuple(dataset.column_names)
    problem_column, problem_reason = _find(
        source, columns, "problem", rows.problem, problem_sets.COLUMN_NAMES["problem"]
    )
    if not problem_column:
        raise UserError(
            f"data {source} has the columns {', '.join(columns)}, and none of "
            f"{', '.join(problem_sets.COLUMN_NAMES['problem'])}: name the column of questions with "
            f"--data \"rows('{source}',problem='COLUMN')\""
        )
    names = (*problem_sets.COLUMN_NAMES["answer"], *MORE_ANSWERS)
    answer_column, answer_reason = _find(source, columns, "answer", rows.answer, names)

    sample = dataset.select(range(min(SAMPLED_ROWS, len(dataset))))
    prompts = list(sample[problem_column])
    # Arrow gives a column one type, so the first row tells it.
    has_messages = isinstance(prompts[0], list)
    if not has_messages:
        # Called for its errors.
        problem_sets.as_questions(prompts, problem_column, source)
    answers = _answers(sample, answer_column)
    return Data(
        rows=replace(rows, problem=problem_column, answer=answer_column),
        columns=columns,
        num_rows=len(dataset),
        split=split,
        has_test_split="test" in splits and split != "test",
        problem_reason=problem_reason,
        answer_reason=answer_reason,
        has_messages=has_messages,
        prompts=prompts,
        solutions=_solutions(sample, columns, answer_column),
        has_only_numbers=bool(answers) and all(map(is_number, answers)),
    )


def read_environment(text: str, task: TaskConfig, seed: int) -> Data:
    """Resets an environment for some rows, to learn its prompts.

    text: a data source, whose rows `reset` gets; "" if it needs none.
    task: names the environment and the template of its prompts.

    Raises UserError if the set cannot be read, or the environment does not begin.
    """
    rows = read_source("--data", text) if text else Rows()
    environment_task.check(task)
    task = replace(task, data=text)
    splits = problem_sets.load(rows.path) if text else {}
    split = rows.split or ("train" if "train" in splits else next(iter(splits), ""))
    count = environment_task.num_train_problems(task)
    sampled = SAMPLED_EPISODES if count is None else min(count, SAMPLED_EPISODES)
    problems = environment_task.train_problems(task, seed, 0, sampled)
    return Data(
        rows=rows,
        columns=(),
        num_rows=count or 0,
        split=split,
        has_test_split="test" in splits and split != "test",
        problem_reason="`reset` gets each row",
        answer_reason="",
        has_messages=True,  # the template is applied
        prompts=[problem.prompt for problem in problems],
        solutions=[],
        has_only_numbers=False,
        tools=tuple(as_object(tool) for tool in problems[0].tools or ()),
    )


def _find(
    source: str,
    columns: Sequence[str],
    kind: str,
    wanted: str,
    names: Sequence[str],
) -> tuple[str, str]:
    """Returns a column and the reason for it; "" if the set has no column of this kind.

    Raises UserError if the set lacks the column `wanted`.
    """
    if wanted:
        # Dots select a nested value.
        if wanted.partition(".")[0] not in columns:
            raise UserError(f"{kind}={wanted}: data {source} has the columns {', '.join(columns)}")
        return wanted, "from the command line"
    for name in names:
        if name in columns:
            return name, f"the set has a column of this name, among {', '.join(columns)}"
    return "", f"no column of {', '.join(columns)} has a usual name"


def _answers(sample: "datasets.Dataset", column: str) -> list[JsonValue]:
    if not column or "." in column:  # a nested column is read by the task
        return []
    return [problem_sets.final_answer(answer) for answer in sample[column]]


def is_number(answer: JsonValue) -> bool:
    """Returns whether an answer is a number, or text that is one, such as "$1,200"."""
    # A bool is an int in Python.
    if isinstance(answer, bool):
        return False
    if isinstance(answer, str):
        return _NUMBER.fullmatch(answer.strip()) is not None
    return isinstance(answer, int | float)


def _solutions(sample: "datasets.Dataset", columns: Sequence[str], answer_column: str) -> list[str]:
    """Returns the worked solutions: a column of them, or answers in GSM8K's format."""
    for name in (*SOLUTION_COLUMNS, answer_column):
        if name not in columns:
            continue
        texts = [text for text in sample[name] if isinstance(text, str)]
        is_worked = name != answer_column or any("####" in text for text in texts)
        if texts and is_worked:
            return texts
    return []


def held_out_rows(data: Data, most: int) -> list[dict[str, JsonValue]]:
    """Returns rows to hold out: a tenth of the set, at most `most`; the same in every run."""
    dataset = problem_sets.load(data.source)[data.split]
    count = min(most, max(1, data.num_rows // HELD_OUT_SHARE))
    rng = random.Random(problem_sets.EVAL_SEED)
    # Random rows, because many sets are sorted by source or by difficulty.
    indices = sorted(rng.sample(range(data.num_rows), count))
    return problem_sets.read_readable_columns(dataset.select(indices))


def absolute_source(source: str) -> str:
    """Returns a local file or directory with its absolute path, and other sources as they are."""
    rows = read_source("--data", source)
    path = Path(rows.path).expanduser()
    return str(replace(rows, path=str(path.resolve()))) if path.exists() else source
