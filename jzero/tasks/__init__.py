"""What can be trained on. A new task is a module of functions and a line in TASKS. Imports no jax: graders load it."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from jzero.tasks import countdown, math, warm_start
from jzero.types import Grade, Problem


class Task(NamedTuple):
    """The functions of a task; the first argument (the last, of `grade`) is `config.Task`."""

    train_problems: Callable[[Any, int, int, int], list[Problem]]  # (task, seed, step, count)
    eval_problems: Callable[[Any, int], list[Problem]]  # (task, count): held out, the same in every run
    grade: Callable[[str, Any, Any], Grade]  # (response, problem.gold, task)
    templates: Collection[str]  # values of task.template
    warm_start: Callable[[Any, int, int, float], tuple[str, str]] | None = None  # (task, seed, index, tries)
    warm_start_tokens: Callable[[Any, float], int] = lambda task, tries: 0  # upper bound on such a response
    notes: Callable[[Any], list[str]] = lambda task: []  # what was loaded and dropped, in words


MATH = Task(
    math.train_problems, math.eval_problems, math.grade, math.TEMPLATES, notes=lambda task: math.sets(task).notes
)
TASKS = {
    "countdown": Task(
        countdown.train_problems,
        countdown.eval_problems,
        countdown.grade,
        countdown.TEMPLATES,
        warm_start.example,  # -> prompt, response
        warm_start.max_tokens,
    ),
    "gsm8k": MATH._replace(grade=partial(math.grade, marked=True)),
    "math": MATH,
}
