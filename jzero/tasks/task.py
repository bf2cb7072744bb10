"""What can be trained on: a module of functions and a line in TASKS, or a module's own `TASK`. Imports no jax."""

import importlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from jzero.errors import UserError
from jzero.tasks import countdown, math_problems, problem_sets
from jzero.types import Grade, Problem


class Task(NamedTuple):
    """The functions of a task; the first argument (the last, of `grade`) is `config.Task`."""

    train_problems: Callable[[Any, int, int, int], list[Problem]]  # (task, seed, step, count)
    eval_problems: Callable[
        [Any, int], list[Problem]
    ]  # (task, count): held out, the same in every run
    grade: Callable[[str, Any, Any], Grade]  # (response, problem.gold, task)
    templates: Collection[str]  # values of task.template
    # (task, seed, index, tries) -> prompt, response
    warm_start: Callable[[Any, int, int, float], tuple[str, str]] | None = None
    warm_start_tokens: Callable[[Any, float], int] = lambda task, tries: (
        0
    )  # upper bound on such a response
    notes: Callable[[Any], list[str]] = lambda task: []  # what was loaded and dropped, in words
    # (gold, (response, Grade) of every turn so far, task) -> what the environment says to the last; None: it is over
    reply: Callable[[Any, list[tuple[str, Grade]], Any], str | None] | None = None

    @property
    def replies(self) -> Mapping[str, str | None]:
        """template -> what is between two responses, {} the reply; None: what the tokenizer's chat template has."""
        return {
            name: problem_sets.TEXTS["replies"].get(name) for name in self.templates if self.reply
        }


def feedback(gold: Any, turns: list[tuple[str, Grade]], task: Any) -> str:
    """Whether the answer was right, in the configured words."""
    return task.feedback_right if turns[-1][1].correct else task.feedback_wrong


def of(module: Any, *examples: Any, **more: Any) -> Task:
    """A task of a module that names its functions as they are here. examples: of the warm start, and their length."""
    return Task(
        module.train_problems,
        module.eval_problems,
        module.grade,
        module.TEMPLATES,
        *examples,
        **more,
    )


MATH = of(math_problems, notes=lambda task: math_problems.sets(task).notes)


class Tasks(dict[str, Task]):
    """By name; another name is a module's, of whose it is the `TASK`."""

    def __missing__(self, name: str) -> Task:
        try:
            self[name] = importlib.import_module(name).TASK
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"task.name={name!r} is not one of {', '.join(self)}, nor a module: {error}"
            ) from error
        return self[name]


TASKS = Tasks(
    countdown=of(countdown, countdown.example, countdown.max_tokens, reply=feedback),
    gsm8k=MATH._replace(grade=partial(math_problems.grade, marked=True)),
    math=MATH,
    math_multiturn=MATH._replace(reply=feedback),
)
