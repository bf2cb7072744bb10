"""The task `environment`: episodes in an environment of the user's, with state of its own.

    task.name=environment task.environment=module:Class      or FILE.py:Class

The class has the methods of `Environment`; docs/environments.md says what their values mean. Every
episode has an instance of its own, which is made without arguments in a grader process and stays
there. `reset` has to be a function of `row` and `seed`: the prompt of a group comes from one reset,
and every episode of the group begins with another.

An episode whose process ended, or which goes on after a checkpoint, is built again: a new instance
is reset and gets the responses so far. An instance that then says something else than before is an
error and not a quiet change of the episode. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import json
import random
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.tasks import problem_sets
from jzero.tasks.prompts import ENVIRONMENT_TEMPLATES, find_template
from jzero.tasks.tools import classes
from jzero.tasks.user_functions import Reward, find_function, read_result
from jzero.types import Grade, JsonValue, Problem, Prompt

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "environment"  # of the task
CORRECT = "correct"  # a part of a step's reward that says whether the episode is solved
MAX_INSTANCES = 4096  # in one process; the oldest are left, and built again if they go on
RESETTER = "jzero.tasks.environment:reset_for_prompt"

Turns = Sequence[tuple[str, Grade | None]]  # the response and the grade of each turn


# What `step` returns: the reply, the reward or its named parts, and whether the episode is over.
Result = tuple[str | None, float | dict[str, float], bool]


class Environment(Protocol):
    """What a class of the user's has. Both methods may be async; `close` may be there, too."""

    def reset(self, row: dict[str, JsonValue], seed: int) -> Prompt | Awaitable[Prompt]:
        """Begins an episode, and returns the first observation: text, or chat messages."""
        ...

    def step(self, response: str) -> Result | Awaitable[Result]:
        """Takes a response of the policy."""
        ...


class Step(NamedTuple):
    """What an environment says to a response."""

    reply: str | None  # None: the episode is over
    reward: Reward
    is_correct: bool


# Instances, in a grader process.


@dataclass
class _Instance:
    """An environment in the middle of an episode."""

    environment: Environment
    responses: list[str] = field(default_factory=list)  # that it has seen


_INSTANCES: OrderedDict[str, _Instance] = OrderedDict()  # by episode; the oldest first


def step(
    name: str,
    episode: str,
    gold: JsonValue,
    earlier: Turns,
    response: str,
    *,
    is_last: bool = False,
) -> Step:
    """Returns what the environment `name` says to the response of an episode.

    Args:
        name: "module:Class" or "FILE.py:Class".
        episode: names the episode, and no other that is running.
        gold: of the problem: the row, the seed, and the first observation.
        earlier: the turns before, whose grades have the replies that were given.
        response: the response of this turn.
        is_last: no turn may follow, whatever the environment says.

    Raises:
        TypeError, ValueError: a method returned something else than it should, or something else
            than the first time.
        Exception: whatever the user's class raises.
    """
    instance = _INSTANCES.pop(episode, None)
    said_before = [text for text, _ in earlier]
    if instance is None or instance.responses != said_before or not earlier:
        _end(instance)
        instance = _rebuild(name, gold, earlier)
    result = _step(instance, response)
    if result.reply is None or is_last:
        _end(instance)
        return result._replace(reply=None)
    _INSTANCES[episode] = instance
    if len(_INSTANCES) > MAX_INSTANCES:
        _, oldest = _INSTANCES.popitem(last=False)
        _end(oldest)
    return result


def _make(name: str) -> Environment:
    return cast(Environment, classes.adapt(find_function(name)()))


def _rebuild(name: str, gold: JsonValue, earlier: Turns) -> _Instance:
    """Returns an instance that has been reset and has seen the responses of the turns before."""
    instance = _Instance(_make(name))
    observation = _reset(instance.environment, gold["row"], gold["seed"])
    if observation != gold["observation"]:
        raise ValueError(
            f"reset has to be a function of row and seed: it said {observation!r:.80}, and before "
            f"{gold['observation']!r:.80}"
        )
    for response, grade in earlier:
        result = _step(instance, response)
        if grade is not None and result.reply != grade.reply:
            raise ValueError(
                "an episode that is built again has to go the same way: step said "
                f"{result.reply!r:.80}, and before {grade.reply!r:.80}"
            )
    return instance


def _reset(environment: Environment, row: JsonValue, seed: int) -> Prompt:
    observation = _awaited(environment.reset(row, seed))
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list) and observation and all(map(_is_message, observation)):
        return cast(Prompt, observation)
    raise TypeError(f"reset returned {observation!r:.80}: it has to be text or chat messages")


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _step(instance: _Instance, response: str) -> Step:
    result = _awaited(instance.environment.step(response))
    instance.responses.append(response)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise TypeError(f"step returned {result!r:.80}: it has to be (reply, reward, done)")
    reply, reward, is_done = result
    if not isinstance(is_done, bool):
        raise TypeError(f"step returned {is_done!r:.80} as done: it has to be True or False")
    if not is_done and not isinstance(reply, str):
        raise TypeError(f"the reply is {reply!r:.80}: it has to be text unless the episode is over")
    is_correct = None
    if isinstance(reward, dict) and CORRECT in reward:
        is_correct = bool(reward[CORRECT])
        reward = {name: part for name, part in reward.items() if name != CORRECT} or 0.0
    read = read_result(reward)
    return Step(
        None if is_done else reply,
        read,
        read.value > 0 if is_correct is None else is_correct,
    )


def _end(instance: _Instance | None) -> None:
    """Calls the method `close` of an environment that has one."""
    close = getattr(instance and instance.environment, "close", None)
    if close is not None:
        _awaited(close())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process. An instance may keep connections of this loop."""
    return asyncio.new_event_loop()


def _awaited(result: object) -> object:
    if not inspect.isawaitable(result):
        return result
    return _loop().run_until_complete(_wait_for(result))


async def _wait_for(result: Awaitable[object]) -> object:
    return await result


# The task.


def episode_values(problem: Problem, sample_index: int, earlier: Turns) -> dict[str, JsonValue]:
    """Returns what a grader process needs for a turn of an episode, besides the response."""
    if problem.task != NAME:
        return {}
    turns = [(text, vars(grade) if grade else None) for text, grade in earlier]
    return {"episode": f"{problem.id}/{sample_index}", "turns": turns}


def check(task: TaskConfig) -> None:
    """Raises UserError if there is no such class, or it lacks a method."""
    if not task.environment:
        raise UserError(
            "task.name=environment needs task.environment=module:Class or FILE.py:Class"
        )
    try:
        environment = find_function(task.environment)
    except Exception as error:  # the module is the user's: its import may raise anything
        raise UserError(
            f"task.environment={task.environment} is no module:Class or FILE.py:Class "
            f"({type(error).__name__}: {error})"
        ) from None
    if classes.is_tool_class(task.environment):
        return
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UserError(
                f"task.environment={task.environment} has no method {method}: an environment has "
                "reset(row, seed) and step(response)"
            )


def reset_for_prompt(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Resets an environment in a grader process; the reply is the observation, as JSON."""
    instance = _Instance(_make(task.environment))
    observation = _reset(instance.environment, gold["row"], gold["seed"])
    _end(instance)
    return Grade(0.0, False, "", reply=json.dumps(observation))


@functools.cache
def _resetters(workers: int) -> Pool:
    """Returns processes that reset environments for prompts, until this process ends."""
    pool = Pool(workers)
    atexit.register(pool.close)
    return pool


def _problems(
    task: TaskConfig, split: str, seed: int, rows: Sequence[tuple[int, JsonValue]]
) -> list[Problem]:
    """Returns a problem for each pair of an index and a row."""
    template = find_template(task.template, ENVIRONMENT_TEMPLATES)
    pool = _resetters(task.grade_workers)
    starts: dict[int, dict[str, JsonValue]] = {}
    for index, row in rows:
        rng = random.Random(f"environment/{split}/{seed}/{index}")
        starts[index] = {"row": row, "seed": rng.getrandbits(31)}
        pool.submit(index, RESETTER, "", starts[index], task)
    problems = []
    grades = dict(pool.drain())
    for index, start in starts.items():
        grade = grades[index]
        if grade.reply is None:
            raise UserError(
                f"task.environment={task.environment}: reset(row, seed={start['seed']}) failed "
                f"({grade.reason}): mend it"
            )
        observation = json.loads(grade.reply)
        prompt = observation
        if isinstance(observation, str):
            prompt = template.render({"observation": observation}, task.system_prompt)
        elif not template.chat:
            raise UserError(
                f"task.environment={task.environment}: reset returned messages, and task.template="
                f"{task.template} is plain text: set task.template=chat, or return text"
            )
        gold = start | {"observation": observation}
        problems.append(Problem(f"{NAME}/{split}/{index}", NAME, prompt, gold, start["row"]))
    return problems


@functools.cache
def _sets(
    data: str, split: str, usual: str, setting: str, max_rows: int, level_min: int, level_max: int
) -> list[list[dict[str, JsonValue]]]:
    """Returns the rows of a split of each set in `data`, with all columns."""
    sets = []
    for source in [source.strip() for source in data.split(",") if source.strip()]:
        dataset = problem_sets.choose_split(source, split, usual, setting)
        dataset = problem_sets.select_levels(dataset, level_min, level_max, source)
        if 0 < max_rows < len(dataset):
            dataset = dataset.select(range(max_rows))
        sets.append(problem_sets.read_columns(dataset, source))
    return sets


def _train_sets(task: TaskConfig) -> list[list[dict[str, JsonValue]]]:
    return _sets(
        data=task.data,
        split=task.train_split,
        usual="train",
        setting="task.train_split",
        max_rows=task.max_train,
        level_min=task.level_min,
        level_max=task.level_max,
    )


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step. Without `task.data` the row of each is empty."""
    indices = range(step * count, (step + 1) * count)
    if not task.data:
        return _problems(task, "train", seed, [(index, {}) for index in indices])
    rows = problem_sets.stream(_train_sets(task), task.weights, seed)
    return _problems(task, "train", seed, [(index, rows[index]) for index in indices])


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run.

    They are the first rows of `task.eval_data` or of the split `task.eval_split`. Without
    `task.data` they differ from the problems of training in their seeds; with it and neither there
    are none.
    """
    seed = problem_sets.EVAL_SEED
    if not task.data:
        return _problems(task, "eval", seed, [(index, {}) for index in range(count)])
    if not task.eval_data and not task.eval_split:
        return []
    sets = _sets(
        data=task.eval_data or task.data,
        split=task.eval_split,
        usual="test",
        setting="task.eval_split",
        max_rows=0,
        level_min=0,
        level_max=0,
    )
    rows = [row for rows_of_set in sets for row in rows_of_set]
    return _problems(task, "eval", seed, list(enumerate(rows))[:count])


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of rows to train on, None for problems without end."""
    return sum(map(len, _train_sets(task))) if task.data else None


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the first response of an episode: the worker calls `step`, which knows the others."""
    return to_grade(step(task.environment, "", gold, (), response, is_last=True))


def to_grade(result: Step) -> Grade:
    """Returns a step's reward as a grade. Its named parts are metrics, as environment.<part>."""
    parts = {f"{NAME}.{name}": value for name, value in result.reward.parts.items()}
    reason = "correct" if result.is_correct else "stepped"
    return Grade(result.reward.value, result.is_correct, reason, parts=parts, reply=result.reply)


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> str | None:
    """Returns the reply that `step` gave together with its reward."""
    _, last_grade = turns[-1]
    return last_grade.reply
