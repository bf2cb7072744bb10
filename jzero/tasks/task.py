"""The interface of a task, and the table of tasks. `task.name` is a key of TASKS or a module.

A task makes problems, grades responses to them and, in episodes of several turns, replies to
responses. To add a task to jzero, write a module with these functions and add a line to TASKS. A
task outside of jzero needs no line: `task.name=my_package.my_task` names an importable module that
has a `Task` called TASK. docs/extend.md shows an example.

Grader processes import this module and the task's. They start quickly because tasks import no jax.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jzero.config import turns
from jzero.environments import agent_task, agents, environment, environment_task
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import UserError
from jzero.problems.options import check_options
from jzero.problems.prompts import (
    ARITHMETIC_TEMPLATES,
    CODE_TEMPLATES,
    COUNTDOWN_TEMPLATES,
    ENVIRONMENT_TEMPLATES,
    GUESS_TEMPLATES,
    MATH_TEMPLATES,
    REVERSE_TEXT_TEMPLATES,
    SUMS_TEMPLATES,
    PromptTemplate,
    find_template,
    is_own_template,
)
from jzero.programming import code_rewards
from jzero.tasks import (
    arithmetic,
    code,
    code_toy,
    countdown,
    countdown_warm_start,
    guess,
    math_problems,
    mixed,
    reverse_text,
    sums,
)
from jzero.types import Grade, JsonValue, Problem, Prompt, Rollout, grade_of

if TYPE_CHECKING:
    from jzero.config import TaskConfig


def _no_notes(task: TaskConfig) -> list[str]:
    return []


def _no_tokens(task: TaskConfig, tries: float) -> int:
    return 0


def _no_count(task: TaskConfig) -> int | None:
    return None


def _no_check(task: TaskConfig) -> None:
    pass


def _no_metrics(task: TaskConfig, grades: Sequence[Grade]) -> dict[str, float]:
    return {}


class Task(NamedTuple):
    """The functions of a task. All of them are pure: the same arguments give the same result.

    `task` is always the section `task` of the config, with the settings that all tasks share. A
    task with further settings defines them in the dataclass `options`.
    """

    train_problems: Callable[[TaskConfig, int, int, int], list[Problem]]
    """train_problems(task, seed, step, count) returns the `count` problems of step `step`.

    A resumed run starts calling this function at a later step, so the problems must not depend on
    earlier calls."""

    eval_problems: Callable[[TaskConfig, int], list[Problem]]
    """eval_problems(task, count) returns at most `count` held-out problems, the same in every run.
    """

    grade: Callable[[str, JsonValue, TaskConfig], Grade]
    """grade(response, gold, task) returns the grade of a response; `gold` is `problem.gold`.

    This function runs in a grader process, which ends a call that takes more than
    `task.grade_seconds`. The response is untrusted text of the policy: never evaluate it."""

    templates: Mapping[str, PromptTemplate]
    """The prompt templates by name, a value of `task.template`."""

    warm_start: Callable[[TaskConfig, int, int, float], tuple[str, str]] | None = None
    """warm_start(task, seed, index, tries) returns the prompt and the response of a supervised
    example, for `warm_start`. `tries` is `warm_start.tries`."""

    warm_start_tokens: Callable[[TaskConfig, float], int] = _no_tokens
    """warm_start_tokens(task, tries) returns an upper bound on the tokens of such a response."""

    notes: Callable[[TaskConfig], list[str]] = _no_notes
    """notes(task) returns log lines on the data that was loaded and dropped."""

    num_train_problems: Callable[[TaskConfig], int | None] = _no_count
    """num_train_problems(task) returns the number of training problems, one epoch of
    `train.prompt_epochs`; None for a task that generates problems without end."""

    reply: Callable[[JsonValue, list[tuple[str, Grade]], TaskConfig], Prompt | None] | None = None
    """reply(gold, turns, task) returns the environment's reply, None to end the episode.

    `turns` holds the response and the grade of every turn so far. The function runs in a grader
    process, after `grade`. A task without `reply` has single-turn episodes."""

    options: type | None = None
    """A record (`fields.record`) of further settings of the task. The task's functions read them
    with `read_options(options, task.options)`."""

    check: Callable[[TaskConfig], None] = _no_check
    """check(task) raises UserError if the task cannot work with these settings on this machine."""

    metrics: Callable[[TaskConfig, Sequence[Grade]], dict[str, float]] = _no_metrics
    """metrics(task, grades) returns additional metrics of the grades of a step."""

    prompt_values: tuple[str, ...] = ()
    """The names that a prompt template of the task may use. A template file is checked against
    them before the run begins or, if the tuple is empty, when the first prompt is made."""

    def find_template(self, name: str) -> PromptTemplate:
        """Returns the template of `task.template=name`; raises UserError if there is none."""
        return find_template(name, self.templates)


def feedback(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> str:
    """Returns `task.feedback.right` or `task.feedback.wrong`. The reply of several tasks."""
    _, last_grade = turns[-1]
    return task.feedback.right if last_grade.correct else task.feedback.wrong


_MATH = Task(
    train_problems=math_problems.train_problems,
    eval_problems=math_problems.eval_problems,
    grade=math_problems.grade,
    templates=MATH_TEMPLATES,
    notes=math_problems.notes,
    num_train_problems=math_problems.num_train_problems,
    options=math_problems.Options,
    prompt_values=("question", "instruction"),
)

TASKS: dict[str, Task] = {
    "countdown": Task(
        train_problems=countdown.train_problems,
        eval_problems=countdown.eval_problems,
        grade=countdown.grade,
        templates=COUNTDOWN_TEMPLATES,
        warm_start=countdown_warm_start.example,
        warm_start_tokens=countdown_warm_start.max_tokens,
        num_train_problems=countdown.num_train_problems,
        reply=feedback,
        options=countdown.Options,
        check=countdown.check,
        prompt_values=countdown.PROMPT_VALUES,
    ),
    "gsm8k": _MATH._replace(grade=math_problems.grade_gsm8k),
    "math": _MATH,
    "math_multiturn": _MATH._replace(reply=feedback),
    math_problems.OPEN: _MATH._replace(
        grade=math_problems.leave_ungraded, check=math_problems.check_open
    ),
    "code": Task(
        train_problems=code.train_problems,
        eval_problems=code.eval_problems,
        grade=code.grade,
        templates=CODE_TEMPLATES,
        warm_start=code_toy.example,
        warm_start_tokens=code_toy.max_tokens,
        notes=code.notes,
        num_train_problems=code.num_train_problems,
        reply=code.reply,
        options=code_rewards.Options,
        check=code.check,
        metrics=code.metrics,
        prompt_values=("question", "instruction"),
    ),
    "guess": Task(
        train_problems=guess.train_problems,
        eval_problems=guess.eval_problems,
        grade=guess.grade,
        templates=GUESS_TEMPLATES,
        options=guess.Options,
        warm_start=guess.example,
        warm_start_tokens=guess.max_tokens,
        reply=guess.reply,
        prompt_values=("largest",),
    ),
    arithmetic.NAME: Task(
        train_problems=arithmetic.train_problems,
        eval_problems=arithmetic.eval_problems,
        grade=arithmetic.grade,
        templates=ARITHMETIC_TEMPLATES,
        warm_start=arithmetic.example,
        warm_start_tokens=arithmetic.max_tokens,
        prompt_values=("question",),
    ),
    sums.NAME: Task(
        train_problems=sums.train_problems,
        eval_problems=sums.eval_problems,
        grade=sums.grade,
        templates=SUMS_TEMPLATES,
        warm_start=sums.example,
        warm_start_tokens=sums.max_tokens,
        options=sums.Options,
        prompt_values=("examples", "question"),
    ),
    reverse_text.NAME: Task(
        train_problems=reverse_text.train_problems,
        eval_problems=reverse_text.eval_problems,
        grade=reverse_text.grade,
        templates=REVERSE_TEXT_TEMPLATES,
        warm_start=reverse_text.example,
        warm_start_tokens=reverse_text.max_tokens,
        options=reverse_text.Options,
        check=reverse_text.check,
        prompt_values=("text",),
    ),
    mixed.NAME: Task(
        train_problems=mixed.train_problems,
        eval_problems=mixed.eval_problems,
        grade=mixed.grade,
        templates={**CODE_TEMPLATES, **MATH_TEMPLATES},
        notes=mixed.notes,
        num_train_problems=mixed.num_train_problems,
        options=mixed.Options,
        check=mixed.check,
        prompt_values=("question", "instruction"),
    ),
    environment.NAME: Task(
        train_problems=environment_task.train_problems,
        eval_problems=environment_task.eval_problems,
        grade=environment_task.grade,
        templates=ENVIRONMENT_TEMPLATES,
        num_train_problems=environment_task.num_train_problems,
        reply=environment_task.reply,
        check=environment_task.check,
        prompt_values=("observation",),
    ),
    agents.NAME: Task(
        train_problems=agent_task.train_problems,
        eval_problems=agent_task.eval_problems,
        grade=agent_task.grade,
        templates=ENVIRONMENT_TEMPLATES,
        num_train_problems=environment_task.num_train_problems,
        reply=agent_task.reply,
        check=agent_task.check,
        prompt_values=("observation",),
    ),
}


def draws_examples(source: str) -> bool:
    """Returns whether a source is a task with warm-start examples, not a data set."""
    return source in TASKS and TASKS[source].warm_start is not None


def find_task(name: str) -> Task:
    """Returns the task of `task.name=name`: an entry of TASKS, or the TASK of the module `name`.

    Raises:
        UserError: `name` is not in TASKS, and no module of this name has a TASK.
    """
    if name in TASKS:
        return TASKS[name]
    known = f"task.name={name!r} is not one of {', '.join(TASKS)}"
    try:
        task = importlib.import_module(name).TASK
    # ValueError: the name is empty.
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{known}, nor a module with a TASK: {error}") from error
    if not isinstance(task, Task):
        raise UserError(f"{known}, and {name}.TASK is not a Task but {task!r}")
    return task


def check_task_settings(task: TaskConfig, max_turns: int) -> None:
    """Checks the task, its template, its options, and that they fit the number of turns.

    Args:
        task: the section `task` of the config.
        max_turns: `rollout.max_turns`.

    Raises:
        UserError: there is no such task, template or option, a setting has no effect, or the task
            has no replies and `max_turns` is above 1.
    """
    # The rows of a mixed data set name their tasks, each with its own settings.
    if task.name == mixed.NAME:
        _check_row_tasks(task, max_turns)
        return
    found = find_task(task.name)
    template = found.find_template(task.template)
    if found.prompt_values:
        template.check(found.prompt_values)
    _check_questions(task, found, template)
    if task.system_prompt and not template.chat:
        raise UserError(
            f"task.system_prompt={task.system_prompt!r} is not used by task.template="
            f"{task.template}: set task.template=chat, or task.system_prompt="
        )
    check_task_options(task)
    found.check(task)
    # Settings of environments.
    if task.environment and task.name != environment.NAME:
        raise UserError(
            f"task.environment={task.environment} is not used by task.name={task.name}: set "
            f"task.name={environment.NAME}, or task.environment="
        )
    if task.agent and task.name != agents.NAME:
        raise UserError(
            f"task.agent={task.agent} is not used by task.name={task.name}: set "
            f"task.name={agents.NAME}, or task.agent="
        )
    own_reward = f"task.environment={task.environment}" if task.environment else ""
    own_reward = f"task.agent={task.agent}" if task.agent else own_reward
    if own_reward and max_turns > 1 and not isinstance(task.turn_reward, turns.Score):
        raise UserError(
            f"task.turn_reward=success replaces the rewards of {own_reward}: set "
            "task.turn_reward=score"
        )
    # Several turns need replies, from tools or from the task.
    if tool_episodes.has_tools(task):
        _check_tools(task, template, max_turns)
    elif max_turns > 1 and not _has_replies(found, template):
        known = [
            f"{name} ({', '.join(entry.templates)})" for name, entry in TASKS.items() if entry.reply
        ]
        raise UserError(
            f"rollout.max_turns={max_turns}: task.name={task.name} has no replies in template "
            f"{task.template}; set rollout.max_turns=1, or choose from {', '.join(known)}"
        )


def check_task_options(task: TaskConfig) -> None:
    """Raises UserError if there is no such task, or for an option that the task does not have."""
    found = find_task(task.name)
    if task.name == mixed.NAME:
        mixed.check(task)
    elif found.options is not None:
        check_options(found.options, task.options)
    elif task.options:
        raise UserError(
            f"task.options={','.join(task.options)}: task.name={task.name} has no options: remove "
            "them"
        )


def _check_row_tasks(task: TaskConfig, max_turns: int) -> None:
    """Checks the settings of every task that rows of a mixed data set may name."""
    mixed.check(task)
    if not task.data:
        raise UserError(f"task.name={mixed.NAME} has no data of its own: set task.data")
    for name, own in mixed.all_settings(task).items():
        try:
            check_task_settings(own, max_turns)
        except UserError as error:
            raise UserError(
                f"{error} (of the rows of {name}; task.options={name}.SETTING=VALUE is for these "
                "rows only)"
            ) from None


def _check_questions(task: TaskConfig, found: Task, template: PromptTemplate) -> None:
    """Raises UserError for settings of question data sets if the task has no such data set."""
    # A task from outside of jzero may read any data set.
    has_questions = found.templates is MATH_TEMPLATES or task.name not in TASKS
    has_sets = has_questions or found.templates is CODE_TEMPLATES
    if template.column and not has_sets:
        raise UserError(
            f"task.template={task.template}: task.name={task.name} makes its own prompts; choose "
            f"from {', '.join(found.templates)}, or a file"
        )


def stop_strings(task: TaskConfig) -> tuple[str, ...]:
    """Returns the template's stop strings, which apply if `rollout.stop` is empty.

    Raises:
        UserError: the tasks of a mixed set have templates with different stop strings.
    """
    found = {}
    for name, own in mixed.all_settings(task).items():
        found[name] = find_task(own.name).find_template(own.template).stop
    # The decoder has one list of stop strings for all rows of a step.
    if len(set(found.values())) > 1:
        stops = "; ".join(f"{name}: {', '.join(stop) or 'none'}" for name, stop in found.items())
        raise UserError(
            f"rollout.stop= leaves the end of a response to the templates, which differ ({stops}): "
            "set rollout.stop, or templates with the same end"
        )
    return next(iter(found.values()))


def task_metrics(task: TaskConfig, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the additional metrics of the tasks (`Task.metrics`) for the rollouts of a step."""
    metrics: dict[str, float] = {}
    for name, own in mixed.all_settings(task).items():
        grades = [grade_of(rollout) for rollout in rollouts if rollout.problem.row_task == name]
        if grades:
            metrics |= find_task(own.name).metrics(own, grades)
    return metrics


def _check_tools(task: TaskConfig, template: PromptTemplate, max_turns: int) -> None:
    """Raises UserError if the settings rule out episodes with tools."""
    what = f"task.tools.names={','.join(task.tools.names)}"
    if not task.tools.names:
        what = f"task.environment={task.environment}, whose methods are tools,"
    tool_episodes.check(task)
    if max_turns < 2:
        raise UserError(f"{what} needs a turn after each call: set rollout.max_turns to 2 or more")
    if not isinstance(task.turn_reward, turns.Score):
        raise UserError(
            f"task.turn_reward=success would punish each turn of {what} that calls a "
            "tool: set task.turn_reward=score"
        )
    if not template.chat and template.reply is None:
        raise UserError(f"task.template={task.template} cannot show {what}: set task.template=chat")
    # The text of plain, for models from scratch, or of a user's template may list the tools itself.
    shows_tools = template.chat or task.template == "plain" or is_own_template(task.template)
    if not shows_tools:
        raise UserError(
            f"{what} is not shown by template {task.template}, which is text: set "
            "task.template=chat"
        )


def _has_replies(task: Task, template: PromptTemplate) -> bool:
    """Returns whether an episode can continue after a response."""
    # The tokenizer's chat template formats the replies of both.
    is_chat = template.chat or bool(template.column)
    return task.reply is not None and (is_chat or template.reply is not None)
