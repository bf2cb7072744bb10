"""Tasks: problems, their data sets and prompts, grading of responses, rewards, evaluation suites.

`find_task(config.task.name)` returns the functions of a task. Nothing here imports jax, because
grader processes import this package.
"""

from jzero.problems.options import read_options
from jzero.problems.prompts import PromptTemplate
from jzero.tasks.task import (
    TASKS,
    Task,
    check_task_options,
    check_task_settings,
    draws_examples,
    find_task,
    stop_strings,
    task_metrics,
)
