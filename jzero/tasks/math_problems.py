"""Questions with an answer: the tasks gsm8k, math and math_multiturn, and other question sets.

A question set is any source of rows with a question and an answer (`task.data`, `problem_sets`).
Rows are dropped and counted if they are held out or if the grader does not understand their answer.
`jzero.answers.verdict` grades the responses. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from jzero.answers import extract, verdict
from jzero.answers.published import VERIFIERS
from jzero.answers.published.packages import has_formula
from jzero.config.data_sources import Rows
from jzero.errors import UserError
from jzero.fields import (
    record,
)
from jzero.json_values import as_object, as_text
from jzero.problems import overlap, problem_sets, row_loader
from jzero.problems.options import read_options
from jzero.problems.problem_sets import AskedRow, Row
from jzero.problems.prompts import (
    BOXED,
    DEFAULT_MATH_TEMPLATE,
    MATH_TEMPLATES,
    PromptTemplate,
    find_template,
    is_file_or_column,
    is_own_template,
)
from jzero.problems.row_loader import Loaded, Selection, Sets
from jzero.rewards import rewards
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig


@record
class Options:
    """The options of tasks of mathematics, `task.options=name=value`."""

    answer_mark: Literal[
        "", "boxed", "think_boxed", "r1", "gsm8k", "number", "final_answer", "stated", "answer"
    ] = ""
    """How a response marks its answer, a key of jzero.answers.extract.TEMPLATES. Empty: as
    task.template asks for; the last box if the template is a file or a column."""
    units: Literal["exact", "convert"] = "exact"
    """Unit of a quantity. exact: the unit of the gold answer is required. convert: other units of
    the same dimension are converted, such as 100 cm for 1 m."""


def options_of(task: TaskConfig) -> Options:
    """Returns the options; the defaults for a suite of questions in a run of another task."""
    return read_options(Options, task.options)


OPEN = "open"  # the task of questions without answers: only user-defined rewards score responses

# Prompts.


def math_template(name: str) -> PromptTemplate:
    """Returns the template of questions for `task.template=name`.

    If `name` is a template of another task, this is the default template of questions.
    """
    # A suite of questions can be evaluated while the task is countdown.
    if name in MATH_TEMPLATES or is_own_template(name):
        return find_template(name, MATH_TEMPLATES)
    return MATH_TEMPLATES[DEFAULT_MATH_TEMPLATE]


def to_problem(
    task: TaskConfig,
    task_name: str,
    id: str,
    row: Row,
    instruction: str = BOXED,
) -> Problem:
    """Returns the problem of a row. Its gold is {"answer", "question"}.

    `task_name` becomes `problem.task`, the task that grades the responses. `instruction` is the
    instruction to the policy in jzero's templates.
    """
    template = math_template(task.template)
    inserted = ""
    if template.column and row.prompt is not None:
        prompt = row.prompt
    else:
        values = {"question": row.question, "instruction": instruction}
        # A template file contains its instruction, so the system prompt does not repeat it.
        system_prompt = task.system_prompt or ("" if template.path else instruction)
        prompt = template.render(values, system_prompt=system_prompt)
        inserted = "" if template.chat else row.question
    gold = {"answer": row.answer, "question": row.question}
    problem = Problem(id, task_name, prompt, gold, row.columns, inserted=inserted)
    return problem_sets.placed(problem, row.place)


# Data.


class Reading(NamedTuple):
    """The settings for reading the rows of a data set."""

    prompt_column: str
    verifier: str
    with_columns: bool
    with_readable_columns: bool  # the columns that JSON can represent
    has_answers: bool = True  # False: task.name=open


def reading_of(task: TaskConfig, keep_columns: bool = False) -> Reading:
    """Returns the settings of a task for reading rows.

    With `keep_columns` training rows have all columns that JSON can represent, even if no reward
    reads them.
    """
    return Reading(
        prompt_column=math_template(task.template).column,
        verifier=task.verifier,
        with_columns=rewards.need_columns(task.reward),
        with_readable_columns=keep_columns,
        has_answers=task.name != OPEN,
    )


def load_sets(task: TaskConfig, keep_columns: bool = False) -> Sets[Row]:
    """Loads the data sets of `task.data`; if that is empty, the default set of the task.

    Raises:
        UserError: a data set cannot be loaded, contains the test questions of GSM8K, or has no rows
            left to train on.
    """
    return _load_sets(row_loader.selection_of(task), reading_of(task, keep_columns))


# The rows depend only on the settings in these two arguments, which can be keys of a cache.
@functools.cache
def _load_sets(selection: Selection, reading: Reading) -> Sets[Row]:
    without_answer: Counter[str] = Counter()  # rows of each source

    def notes_on(loaded: Loaded[Row]) -> list[str]:
        reason = "no answer that grades 1 against itself"
        notes = row_loader.notes_on_dropped(loaded, reason, without_answer[loaded.source])
        golds = [row.answer for row in loaded.train]
        return [*notes, *notes_on_unread_golds(loaded.source, golds, reading.verifier)]

    read = functools.partial(_read, reading, without_answer)
    return row_loader.load_sets(selection, read, notes_on)


def _read(
    reading: Reading,
    without_answer: Counter[str],
    dataset: datasets.Dataset,
    source: Rows,
    is_held_out: bool,
) -> Sequence[Row | None]:
    """Returns a Row for each row of a split, None for a row that cannot be trained on."""
    # Held-out rows are never dropped. They have columns only if a reward reads them.
    if is_held_out:
        return _read_rows(reading._replace(with_readable_columns=False), dataset, source)
    rows = _read_rows(reading, dataset, source)
    # Copies of GSM8K on the hub have test questions in their train split: see `overlap`.
    if overlap.has_gsm8k_test_questions([row.question for row in rows]):
        raise UserError(
            f"task.data={source.path} holds GSM8K's test questions among its {len(rows)} rows: "
            f"train on the 7,473 of its train split, {problem_sets.DEFAULT_SETS['gsm8k']}"
        )
    if not reading.has_answers:
        return rows
    usable = [row if grades_itself(row.answer, reading.verifier) else None for row in rows]
    without_answer[source.path] = sum(
        kept is None and row.answer in (None, "", [])
        for row, kept in zip(rows, usable, strict=True)
    )
    return usable


def _read_rows(reading: Reading, dataset: datasets.Dataset, source: Rows) -> list[Row]:
    if not reading.has_answers:
        rows = problem_sets.read_rows_without_answers(
            dataset, source.problem, source.path, reading.prompt_column
        )
        columns = problem_sets.read_readable_columns(dataset)
        references: Sequence[str | None] = [None] * len(rows)
        # Nothing compares with a reference answer, but a reward may read it in `gold`.
        if reading.prompt_column:
            values = problem_sets.column_values(dataset, reading.prompt_column)
            references = [problem_sets.reference_of(value) for value in values]
        return [
            row._replace(answer=reference, columns=own)
            for row, reference, own in zip(rows, references, columns, strict=True)
        ]
    return problem_sets.read_rows(
        dataset,
        source.problem,
        source.answer,
        source.path,
        reading.prompt_column,
        with_columns=reading.with_columns,
        with_readable_columns=reading.with_readable_columns,
    )


def read_set(
    task: TaskConfig,
    dataset: datasets.Dataset,
    source: Rows,
    is_held_out: bool,
) -> list[AskedRow | None]:
    """Returns the rows of a mixed data set that name this task, None for unusable rows.

    A training row is usable if its level is selected and its answer grades 1 against itself.
    `source` names the columns and the levels.

    Raises:
        UserError: a column is missing or has values of another type, or the rows are GSM8K's test
            questions.
    """
    rows = _read(reading_of(task), Counter(), dataset, source, is_held_out)
    usable = set(range(len(rows)))
    if not is_held_out:
        usable = set(
            problem_sets.rows_of_levels(dataset, source.level_min, source.level_max, source.path)
        )
    return [
        AskedRow(row.question, to_problem(task, task.name, "", row))
        if row is not None and i in usable
        else None
        for i, row in enumerate(rows)
    ]


def grades_itself(answer: JsonValue, verifier: str) -> bool:
    """Returns whether the grader accepts the gold answer as a response.

    If the grader does not understand the gold answer, no response can be right. In a list of
    accepted answers, one answer that the grader understands is enough.
    """
    # A published verifier keeps all rows, as its original does.
    if verifier in VERIFIERS:
        return True
    golds = answer if isinstance(answer, list) else [answer]
    grades = (verdict.grade(f"\\boxed{{{gold}}}", answer, template="boxed") for gold in golds)
    return any(grade.correct for grade in grades)


def notes_on_unread_golds(source: str, golds: Sequence[JsonValue], verifier: str) -> list[str]:
    """Returns a line about golds for which task.verifier=open_r1 pays every response.

    Raises:
        UserError: it does so for all of them, so that nothing would be learned.
    """
    if verifier != "open_r1":
        return []
    unread = sum(not has_formula(gold) for gold in golds)
    if not unread:
        return []
    line = f"{unread:,} of {len(golds):,} golds have no LaTeX: open_r1 pays 1 to every response"
    if unread == len(golds):
        raise UserError(
            f"task.data={source}: {line}; write them as $72$, or set "
            "task.verifier=open_r1_1416fa0, which reads plain numbers"
        )
    return [f"{source}: {line} to them"]


def notes(task: TaskConfig) -> list[str]:
    """Returns lines with the numbers of used and dropped problems of each set, with reasons."""
    return load_sets(task).notes


# Problems to generate responses to.

UNGRADED = "jzero.tasks.math_problems:leave_ungraded"
SPLIT_SETTING = "--split, task.data"  # in messages
NOT_GRADED = "not graded"  # the reason of such a grade


def split_problems(task: TaskConfig, split: str, *, with_gold: bool) -> list[Problem]:
    """Returns a problem for each row of a split of `task.data`, in the order of the rows.

    With `with_gold`, rows are omitted if their answer does not grade 1 against itself. Without it,
    responses are not graded and the data set needs no column of answers.

    Raises:
        UserError: a data set cannot be loaded, or lacks the split or a column.
    """
    reading = reading_of(task, keep_columns=True)
    problems = []
    for source in row_loader.selection_of(task).train:
        source = replace(source, split=split, limit=0)
        dataset = row_loader.open_rows(source, split, SPLIT_SETTING)
        if with_gold:
            rows = _read_rows(reading, dataset, source)
        else:
            rows = problem_sets.read_rows_without_answers(
                dataset, source.problem, source.path, reading.prompt_column
            )
            columns = problem_sets.read_readable_columns(dataset)
            answers = _known_answers(dataset, source.answer)
            rows = [
                row._replace(answer=answer, columns=values)
                for row, answer, values in zip(rows, answers, columns, strict=True)
            ]
        for row in row_loader.placed_rows(rows, source, split, SPLIT_SETTING):
            if row is None or (with_gold and not grades_itself(row.answer, task.verifier)):
                continue
            grader = task.name if with_gold else UNGRADED
            id = f"{task.name}/{split}/{len(problems)}"
            problems.append(to_problem(task, grader, id, row))
    return problems


def _known_answers(dataset: datasets.Dataset, wanted: str) -> list[JsonValue]:
    """Returns the gold answer of each ungraded row, None for a row without one.

    wanted: the column of answers; "" for the usual names, of which each row has the first that is
        not empty.
    """
    answers: list[JsonValue] = [None] * len(dataset)
    for name in [wanted] if wanted else problem_sets.COLUMN_NAMES["answer"]:
        if not problem_sets.has_column(dataset, name):
            continue
        values = problem_sets.column_values(dataset, name)
        for number, value in enumerate(values):
            if answers[number] is None and value is not None:
                answers[number] = problem_sets.final_answer(value)
    return answers


def leave_ungraded(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a grade without a verdict, for responses to problems without a gold answer."""
    return Grade(0.0, False, NOT_GRADED)


# The functions of the tasks.


def check_open(task: TaskConfig) -> None:
    """Raises UserError if nothing scores the responses of the task OPEN."""
    unusable = rewards.reading_verdicts(task.reward)
    if unusable or not task.reward.functions:
        raise UserError(
            f"task.reward.functions={','.join(unusable)} needs correct answers, and "
            f"task.name={OPEN} has questions without answers: set "
            "task.reward.functions=FILE.py:function, or task.name=math with a column of answers"
        )


def train_problems(
    task: TaskConfig,
    seed: int,
    step: int,
    count: int,
    keep_columns: bool = False,
) -> list[Problem]:
    """Returns the problems of one step.

    Each data set is reshuffled in each of its epochs. Several sets are mixed by their weights.
    With `keep_columns` problems have the columns of their rows.
    """
    weights = row_loader.selection_of(task).weights
    rows = problem_sets.stream(load_sets(task, keep_columns).train, weights, seed)
    indices = problem_sets.step_indices(step, count, num_train_problems(task), task, weights)
    return [to_problem(task, task.name, f"{task.name}/train/{i}", rows[i]) for i in indices]


def num_train_problems(task: TaskConfig) -> int:
    """Returns the number of training problems in all data sets."""
    return sum(len(rows) for rows in load_sets(task).train)


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run."""
    rows = load_sets(task).held_out
    places = row_loader.draw_held_out(count, len(rows))
    return [to_problem(task, task.name, f"{task.name}/eval/{i}", rows[i]) for i in places]


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the answer of a response, marked according to `answer_mark` or the template."""
    mark = options_of(task).answer_mark or _answer_mark(task.template)
    return _grade_marked(response, gold, task, mark)


def grade_gsm8k(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades like `grade`, but also accepts an answer after ####."""
    mark = _answer_mark(task.template)
    # GSM8K's solutions end with "#### 42". Models that have seen them use this form even if the
    # template asks for another. A box that the template asks for decides over such a line.
    has_box = mark == "boxed" and extract.extract_answer(response, mark) is not None
    if "####" in response and not has_box:
        mark = "gsm8k"
    mark = options_of(task).answer_mark or mark
    return _grade_marked(response, gold, task, mark)


def _answer_mark(template: str) -> str:
    """Returns the key of `extract.TEMPLATES` for responses to the prompt template `template`."""
    # `python -m jzero.grade` passes such a key as the template.
    if template not in MATH_TEMPLATES and template in extract.TEMPLATES:
        return template
    # A grader process that starts late must not depend on a file that may be gone by then.
    if is_file_or_column(template):
        return PromptTemplate(prompt="").answer_mark
    return math_template(template).answer_mark


def _grade_marked(response: str, gold: JsonValue, task: TaskConfig, mark: str) -> Grade:
    reference = as_object(gold, "gold")
    if task.verifier in VERIFIERS:
        # A published verifier extracts the answer itself and ignores the template's answer mark.
        return VERIFIERS[task.verifier].grade(response, reference["answer"])
    return verdict.grade(
        response,
        reference["answer"],
        template=mark,
        question=as_text(reference["question"], "question"),
        units=options_of(task).units,
    )
