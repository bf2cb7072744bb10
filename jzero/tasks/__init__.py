"""What can be trained on: tasks, their data, prompts and rewards. Imports no jax."""

from jzero.tasks.task import TASKS, Task, of
