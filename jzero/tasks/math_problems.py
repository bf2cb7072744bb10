"""Questions with an answer: the tasks gsm8k, math and math_multiturn, and other sets of questions.

A set is any source of rows with a question and an answer (`task.data`, see `problem_sets`). Rows
that are held out, or whose answer the grader does not understand, are dropped and counted.
Responses are graded by `jzero.grading.verdict`. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, NamedTuple

from jzero.errors import UserError
from jzero.grading import extract, verdict
from jzero.tasks import overlap, problem_sets, rewards
from jzero.tasks.problem_sets import Row
from jzero.tasks.prompts import (
    BOXED,
    DEFAULT_MATH_TEMPLATE,
    MATH_TEMPLATES,
    PromptTemplate,
    find_template,
    is_file_or_column,
    is_own_template,
)
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig


# Prompts.


def math_template(name: str) -> PromptTemplate:
    """Returns the template in which questions are asked where `task.template=name`.

    This is the default template of questions where `name` is a template of another task: a suite of
    questions can be evaluated while the task is countdown.
    """
    if name in MATH_TEMPLATES or is_own_template(name):
        return find_template(name, MATH_TEMPLATES)
    return MATH_TEMPLATES[DEFAULT_MATH_TEMPLATE]


def to_problem(
    task: TaskConfig, task_name: str, id: str, row: Row, instruction: str = BOXED
) -> Problem:
    """Returns the problem of a row; its gold is {"answer", "question"}.

    `task_name` becomes `problem.task`, the task that grades the responses. `instruction` is what
    the templates tell the policy to do.
    """
    template = math_template(task.template)
    if template.column and row.prompt is not None:
        prompt = row.prompt
    else:
        values = {"question": row.problem, "instruction": instruction}
        # A file says for itself what to do: only the templates of jzero have an instruction.
        system_prompt = task.system_prompt or ("" if template.path else instruction)
        prompt = template.render(values, system_prompt=system_prompt)
    gold = {"answer": row.answer, "question": row.problem}
    return Problem(id, task_name, prompt, gold, row.columns)


# Data.


class QuestionSets(NamedTuple):
    """The data of a task."""

    train: list[list[Row]]  # what is left to train on, one list for every set of `task.data`
    held_out: list[Row]
    notes: list[str]  # what was loaded and what was dropped


def load_sets(task: TaskConfig) -> QuestionSets:
    """Loads the sets of `task.data`, or of the task's name where that is empty.

    Raises:
        UserError: a set cannot be loaded, holds the test questions of GSM8K, or has nothing left to
            train on.
    """
    # Only these settings matter to the data, and all of them can be keys of the cache.
    return _load_sets(
        data=task.data or problem_sets.DEFAULT_SETS[task.name],
        eval_data=task.eval_data,
        train_split=task.train_split,
        eval_split=task.eval_split,
        problem_column=task.problem_column,
        answer_column=task.answer_column,
        max_train=task.max_train,
        level_min=task.level_min,
        level_max=task.level_max,
        verifier=task.verifier,
        prompt_column=math_template(task.template).column,
        with_columns=rewards.need_columns(task.reward),
    )


@functools.cache
def _load_sets(
    *,
    data: str,
    eval_data: str,
    train_split: str,
    eval_split: str,
    problem_column: str,
    answer_column: str,
    max_train: int,
    level_min: int,
    level_max: int,
    verifier: str,
    prompt_column: str = "",
    with_columns: bool = False,
) -> QuestionSets:
    sources = [source.strip() for source in data.split(",") if source.strip()]
    if eval_data:
        held_out_sources = [eval_data]
    else:
        held_out_sources = problem_sets.held_out_sources(
            sources, eval_split, train_split, "task.eval_split"
        )

    held_out: list[Row] = []
    for source in held_out_sources:
        dataset = problem_sets.choose_split(source, eval_split, "test", "task.eval_split")
        held_out += problem_sets.read_rows(
            dataset,
            problem_column,
            answer_column,
            source,
            prompt_column,
            with_columns=with_columns,
        )
    held_out_digests = {overlap.digest(row.problem) for row in held_out}

    train: list[list[Row]] = []
    notes: list[str] = []
    if not held_out_sources:
        notes = problem_sets.unused_splits_notes(sources, train_split, "task.eval_split")
    for source in sources:
        dataset = problem_sets.choose_split(source, train_split, "train", "task.train_split")
        dataset = problem_sets.select_levels(dataset, level_min, level_max, source)
        if 0 < max_train < len(dataset):
            dataset = dataset.select(range(max_train))
        rows = problem_sets.read_rows(
            dataset,
            problem_column,
            answer_column,
            source,
            prompt_column,
            with_columns=with_columns,
        )
        if overlap.has_gsm8k_test_questions([row.problem for row in rows]):
            raise UserError(
                f"task.data={source} holds GSM8K's test questions among its {len(rows)} rows: "
                f"train on the 7,473 of its train split, {problem_sets.DEFAULT_SETS['gsm8k']}"
            )

        trainable = [row for row in rows if overlap.digest(row.problem) not in held_out_digests]
        gradable = [row for row in trainable if grades_itself(row.answer, verifier)]
        if len(trainable) < len(rows):
            count = len(rows) - len(trainable)
            notes.append(f"{source}: {count} problems dropped, they are held out")
        if len(gradable) < len(trainable):
            count = len(trainable) - len(gradable)
            reason = "their answer does not grade 1 against itself"
            notes.append(f"{source}: {count} problems dropped, {reason}")
        if not gradable:
            raise UserError(
                f"task.data={source}: none of {len(rows)} problems of these levels is left to "
                "train on"
            )
        notes.append(f"{source}: {len(gradable)} problems")
        train.append(gradable)
    return QuestionSets(train, held_out, notes)


def grades_itself(answer: JsonValue, verifier: str) -> bool:
    """Returns whether a response that gives the gold answer is graded as right.

    No response could be right where the grader does not understand the gold answer. Of a list of
    answers, of which any will do, one that is understood is enough.
    """
    golds = answer if isinstance(answer, list) else [answer]
    grades = (
        verdict.grade(f"\\boxed{{{gold}}}", answer, template="boxed", verifier=verifier)
        for gold in golds
    )
    return any(grade.correct for grade in grades)


def notes(task: TaskConfig) -> list[str]:
    """Returns lines that say how many problems each set has, and how many were dropped and why."""
    return load_sets(task).notes


# Problems to generate responses to.

UNGRADED = "jzero.tasks.math_problems:leave_ungraded"
NOT_GRADED = "not graded"  # the reason of such a grade


def split_problems(task: TaskConfig, split: str, *, with_gold: bool) -> list[Problem]:
    """Returns a problem for each row of a split of `task.data`, in the order of the rows.

    Without gold answers the set needs no column of answers, and responses are not graded. With
    them, rows whose answer does not grade 1 against itself are left out.

    Raises:
        UserError: a set cannot be loaded, or does not have the split or the columns.
    """
    prompt_column = math_template(task.template).column
    data = task.data or problem_sets.DEFAULT_SETS[task.name]
    problems = []
    for source in [source.strip() for source in data.split(",") if source.strip()]:
        dataset = problem_sets.choose_split(source, split, "train", "--split")
        dataset = problem_sets.select_levels(dataset, task.level_min, task.level_max, source)
        if with_gold:
            rows = problem_sets.read_rows(
                dataset,
                task.problem_column,
                task.answer_column,
                source,
                prompt_column,
                with_columns=rewards.need_columns(task.reward),
            )
            rows = [row for row in rows if grades_itself(row.answer, task.verifier)]
        else:
            rows = problem_sets.read_rows_without_answers(
                dataset, task.problem_column, source, prompt_column
            )
        for row in rows:
            grader = task.name if with_gold else UNGRADED
            id = f"{task.name}/{split}/{len(problems)}"
            problems.append(to_problem(task, grader, id, row))
    return problems


def leave_ungraded(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a grade that says nothing, for responses to problems without a gold answer."""
    return Grade(0.0, False, NOT_GRADED)


# The functions of the tasks.


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step.

    Every set is shuffled anew in every epoch. Several sets are mixed by `task.weights`.
    """
    rows = problem_sets.stream(load_sets(task).train, task.weights, seed)
    indices = range(step * count, (step + 1) * count)
    return [to_problem(task, task.name, f"{task.name}/train/{i}", rows[i]) for i in indices]


def num_train_problems(task: TaskConfig) -> int:
    """Returns the number of problems to train on, over all sets."""
    return sum(len(rows) for rows in load_sets(task).train)


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run."""
    rows = load_sets(task).held_out
    rng = random.Random(problem_sets.EVAL_SEED)
    indices = sorted(rng.sample(range(len(rows)), min(count, len(rows))))
    return [to_problem(task, task.name, f"{task.name}/eval/{i}", rows[i]) for i in indices]


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the answer that a response marks as `task.answer_mark` or the template says."""
    return _grade_marked(response, gold, task, task.answer_mark or _answer_mark(task.template))


def grade_gsm8k(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades as `grade` does, and takes an answer after #### as well.

    GSM8K's own solutions end with "#### 42", and models that have seen them answer so whatever the
    template asks for.
    """
    mark = "gsm8k" if "####" in response else _answer_mark(task.template)
    mark = task.answer_mark or mark
    return _grade_marked(response, gold, task, mark)


def _answer_mark(template: str) -> str:
    """Returns the key of `extract.TEMPLATES` for responses to a prompt template of that name."""
    # `python -m jzero.grade` passes such a key as the template.
    if template not in MATH_TEMPLATES and template in extract.TEMPLATES:
        return template
    # A grader process that starts late must not depend on a file that may be gone by then.
    if is_file_or_column(template):
        return PromptTemplate(prompt="").answer_mark
    return math_template(template).answer_mark


def _grade_marked(response: str, gold: JsonValue, task: TaskConfig, mark: str) -> Grade:
    return verdict.grade(
        response,
        gold["answer"],
        template=mark,
        question=gold["question"],
        verifier=task.verifier,
    )
