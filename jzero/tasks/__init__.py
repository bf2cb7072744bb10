"""What can be trained on. A new task is a module of functions and a line in TASKS. Imports no jax: graders load it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jzero.tasks import countdown, warm_start
from jzero.types import Grade, Problem


class Task(NamedTuple):
    """The functions of a task; the first argument (the last, of `grade`) is `config.Task`."""

    train_problems: Callable[[Any, int, int, int], list[Problem]]  # (task, seed, step, count)
    eval_problems: Callable[[Any, int], list[Problem]]  # (task, count): held out, the same in every run
    grade: Callable[[str, Any, Any], Grade]  # (response, problem.gold, task)
    warm_start: Callable[[Any, int, int, float], tuple[str, str]] | None  # (task, seed, index, tries): prompt, response
    warm_start_tokens: Callable[[Any, float], int] = lambda task, tries: 0  # upper bound on such a response


TASKS = {
    "countdown": Task(
        countdown.train_problems, countdown.eval_problems, countdown.grade, warm_start.example, warm_start.max_tokens
    ),
}
