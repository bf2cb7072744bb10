"""Reads a data set for `jzero train`: which columns it has, and which texts are in them."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jzero.config import TaskConfig
from jzero.config.data_sources import Rows, read_source
from jzero.environments import environment_task
from jzero.errors import UserError
from jzero.json_values import as_object
from jzero.problems import overlap, problem_sets, row_loader
from jzero.programming import code_tests
from jzero.tasks import code
from jzero.types import JsonValue, Prompt

if TYPE_CHECKING:
    import datasets

SAMPLED_ROWS = 2000  # rows whose lengths are measured
SAMPLED_TESTS = 16  # rows whose tests are read
SAMPLED_EPISODES = 32  # episodes whose first observation is measured
SOLUTION_COLUMNS = ("solution", "completion", "response", "rationale", "reasoning")
# Names that many sets have besides those of `problem_sets.COLUMN_NAMES`.
MORE_ANSWERS = (
    "gold",
    "target",
    "label",
    "solution",
    "ground_truth",
    "expected_answer",
    "solutions",
)
COMPLETION = "completion"  # TRL's column of responses, which may be messages
NO_ANSWER_STATED = (
    'the last messages of the assistant state no final answer (after ####, in a box, or as "the '
    'answer is 7")'
)
_BOX_AFTER_TEXT = re.compile(r"\s*[^\\\s$].*\\boxed", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(\.\d+)?%?")
HELD_OUT_SHARE = 10  # one row in this many is held out


@dataclass(frozen=True)
class Data:
    """What `jzero train` needs to know about a data set."""

    rows: Rows  # the source, with its columns
    columns: tuple[str, ...]
    num_rows: int  # the rows that the source selects
    has_test_split: bool
    problem_reason: str
    answer_reason: str
    has_messages: bool  # the column of problems holds lists of messages
    solutions: list[str]  # worked solutions of the sampled rows; empty without such a column
    has_only_numbers: bool  # every answer is a number
    tests_column: str = ""  # tests of programming problems; "": none that can be run
    sample: "datasets.Dataset | None" = None  # at most SAMPLED_ROWS rows; None: an environment
    observations: Sequence[Prompt] = ()  # prompts of the first episodes of an environment
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


@dataclass(frozen=True)
class HeldOut:
    """Rows of the training set that are evaluated and not trained on."""

    path: str  # of the file that has them
    rows: list[dict[str, JsonValue]]


def read_data(text: str, task: TaskConfig) -> Data:
    """Reads the columns and the texts of a data set.

    text: a data source, as in task.data.
    task: the columns and the rows of its data, which may have no path, take precedence over those
        of the source and the usual names.

    Raises UserError if the set cannot be read or has no column of problems. The message names the
    columns.
    """
    rows = read_source("--data", text)
    if task.data:
        rows = with_fields_of(rows, task.data[0])
    source = rows.path
    dataset = row_loader.open_rows(rows, "train", "--data")
    if not len(dataset):
        raise UserError(f"data {source} has no rows")
    columns = tuple(dataset.column_names)
    sample = dataset.select(range(min(SAMPLED_ROWS, len(dataset))))
    tests_column = "" if rows.answer else _tests_column(sample, columns)
    names = problem_sets.COLUMN_NAMES["problem"]
    if tests_column:
        names = tuple(dict.fromkeys((*names, *code.PROBLEM_COLUMNS)))
    problem_column, problem_reason = _find(sample, source, "problem", rows.problem, names)
    if not problem_column:
        raise UserError(
            f"data {source} has the columns {', '.join(columns)}, and none of "
            f"{', '.join(names)}: name the column of questions with "
            f"--data \"rows('{source}',problem='COLUMN')\""
        )
    problems = problem_sets.column_values(sample, problem_column)
    # Arrow gives a column one type, so any value tells it.
    has_messages = any(isinstance(problem, list) for problem in problems)
    if has_messages:
        problem_sets.read_prompts(sample, problem_column, source)  # called for its errors
    else:
        problem_sets.as_questions(problems, problem_column, source)
    answer_column, answer_reason = "", ""
    if not tests_column:
        answer_column, answer_reason = _find_answers(sample, rows, problem_column)
    answers = _answers(sample, answer_column)
    return Data(
        rows=replace(rows, problem=problem_column, answer=answer_column),
        columns=columns,
        num_rows=len(dataset),
        has_test_split=row_loader.has_test_split(rows),
        problem_reason=problem_reason,
        answer_reason=answer_reason,
        has_messages=has_messages,
        solutions=_solutions(sample, problem_column, answer_column),
        has_only_numbers=bool(answers) and all(map(is_number, answers)),
        tests_column=tests_column,
        sample=sample,
    )


def with_fields_of(rows: Rows, given: Rows) -> Rows:
    """Returns a source with the fields of another one, except for its path and its defaults."""
    changes = {field.name: getattr(given, field.name) for field in fields(given)}
    changes = {
        name: value
        for name, value in changes.items()
        if name != "path" and value != getattr(Rows(), name)
    }
    return replace(rows, **changes)


def _tests_column(sample: "datasets.Dataset", columns: Sequence[str]) -> str:
    """Returns the column with tests that can be run; "" without one."""
    column = code_tests.column_of_tests(columns)
    if not column:
        return ""
    rows = sample.select(range(min(SAMPLED_TESTS, len(sample))))
    # Columns of other sets have the same names, and no test in a layout that is known.
    has_tests = any(code_tests.read_tests(as_object(row)) for row in rows)
    return column if has_tests else ""


def read_environment(text: str, task: TaskConfig, seed: int) -> Data:
    """Resets an environment for some rows, to learn its prompts.

    text: a data source, whose rows `reset` gets; "" if it needs none.
    task: names the environment and the template of its prompts.

    Raises UserError if the set cannot be read, or the environment does not begin.
    """
    rows = read_source("--data", text) if text else Rows()
    environment_task.check(task)
    task = replace(task, data=text)
    count = environment_task.num_train_problems(task)
    sampled = SAMPLED_EPISODES if count is None else min(count, SAMPLED_EPISODES)
    problems = environment_task.train_problems(task, seed, 0, sampled)
    return Data(
        rows=rows,
        columns=(),
        num_rows=count or 0,
        has_test_split=bool(text) and row_loader.has_test_split(rows),
        problem_reason="`reset` gets each row",
        answer_reason="",
        has_messages=True,  # the template is applied
        solutions=[],
        has_only_numbers=False,
        observations=[problem.prompt for problem in problems],
        tools=tuple(as_object(tool) for tool in problems[0].tools or ()),
    )


def _find(
    sample: "datasets.Dataset",
    source: str,
    kind: str,
    wanted: str,
    names: Sequence[str],
) -> tuple[str, str]:
    """Returns a column and the reason for it; "" if the set has no column of this kind.

    Raises UserError if the set lacks the column `wanted`.
    """
    columns = ", ".join(sample.column_names)
    if wanted:
        if not problem_sets.has_column(sample, wanted):
            raise UserError(f"{kind}={wanted}: data {source} has the columns {columns}")
        return wanted, "from the command line"
    for name in names:
        if problem_sets.has_column(sample, name):
            return name, f"the set has a column of this name, among {columns}"
    return "", f"no column of {columns} has a usual name"


def _find_answers(sample: "datasets.Dataset", rows: Rows, problem_column: str) -> tuple[str, str]:
    """Returns the column of answers and the reason for it; "" if the set has none."""
    usual = (*problem_sets.COLUMN_NAMES["answer"], *MORE_ANSWERS)
    # Not every conversation ends with an answer.
    names = [name for name in usual if not _has_conversations(sample, name)]
    column, reason = _find(sample, rows.path, "answer", rows.answer, names)
    if column:
        return column, reason
    for name in (problem_column, COMPLETION, *usual):
        references = _references(sample, name)
        stated = [problem_sets.stated_answer(text) for text in references]
        if 2 * sum(answer is not None for answer in stated) > len(sample):
            return name, "the last message of each conversation is the reference answer"
        if references:
            reason = NO_ANSWER_STATED
    return "", reason


def _has_conversations(sample: "datasets.Dataset", column: str) -> bool:
    """Returns whether a set has a column of conversations of this name."""
    if not problem_sets.has_column(sample, column):
        return False
    return any(map(problem_sets.is_conversation, problem_sets.column_values(sample, column)))


def _references(sample: "datasets.Dataset", column: str) -> list[str]:
    """Returns the reference answers in a column of conversations; [] in other columns."""
    if not problem_sets.has_column(sample, column):
        return []
    values = problem_sets.column_values(sample, column)
    references = map(problem_sets.reference_of, values)
    return [text for text in references if text is not None]


def _answers(sample: "datasets.Dataset", column: str) -> list[JsonValue]:
    """Returns the answers of the sampled rows that have one."""
    if not column:
        return []
    answers = map(problem_sets.final_answer, problem_sets.column_values(sample, column))
    return [answer for answer in answers if answer is not None]


def is_number(answer: JsonValue) -> bool:
    """Returns whether an answer is a number, or text that is one, such as "$1,200"."""
    # A bool is an int in Python.
    if isinstance(answer, bool):
        return False
    if isinstance(answer, str):
        return _NUMBER.fullmatch(answer.strip()) is not None
    return isinstance(answer, int | float)


def _solutions(sample: "datasets.Dataset", problem_column: str, answer_column: str) -> list[str]:
    """Returns the worked solutions: a column of them, reference answers of conversations, or
    answers that end after #### (GSM8K) or in a box (NuminaMath).
    """
    for name in (*SOLUTION_COLUMNS, problem_column, answer_column):
        if not name or not problem_sets.has_column(sample, name):
            continue
        if references := _references(sample, name):
            return references
        values = problem_sets.column_values(sample, name)
        texts = [text for text in values if isinstance(text, str)]
        is_worked = name in SOLUTION_COLUMNS and name != answer_column
        if name == answer_column:
            is_worked = any("####" in text or _BOX_AFTER_TEXT.match(text) for text in texts)
        if texts and is_worked:
            return texts
    return []


def held_out_rows(data: Data, most: int) -> list[dict[str, JsonValue]]:
    """Returns rows to hold out: a tenth of the set, at most `most`; the same in every run.

    The run drops training rows with the question of a held-out row, so only the first row of each
    question is held out, and at least one question is left. A set with one question has no held-out
    rows.
    """
    dataset = row_loader.open_rows(data.rows, "train", "--data")
    candidates = list(range(len(dataset)))
    if data.problem_column:
        prompt_column = data.problem_column if data.has_messages else ""
        asked = problem_sets.read_rows_without_answers(
            dataset, data.problem_column, data.source, prompt_column
        )
        first = {}
        for number, row in enumerate(asked):
            first.setdefault(overlap.digest(row.question), number)
        candidates = list(first.values())
    count = min(most, max(1, len(dataset) // HELD_OUT_SHARE), len(candidates) - 1)
    rng = random.Random(problem_sets.EVAL_SEED)
    # Random rows, because many sets are sorted by source or by difficulty.
    indices = sorted(rng.sample(candidates, count))
    return problem_sets.read_readable_columns(dataset.select(indices))


def absolute_source(source: str) -> str:
    """Returns a local file or directory with its absolute path, and other sources as they are."""
    rows = read_source("--data", source)
    path = Path(rows.path).expanduser()
    return str(replace(rows, path=str(path.resolve()))) if path.exists() else source
