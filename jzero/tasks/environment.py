"""The task `environment`: episodes in an environment of the user's, with state of its own.

    task.name=environment task.environment=module:Class      or FILE.py:Class, openenv:URL, or
                                                             verifiers:ENV

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
import contextlib
import functools
import inspect
import json
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.tasks import openenv, problem_sets, verifiers
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
Result = tuple[Prompt | None, float | dict[str, float], bool]


class Environment(Protocol):
    """What a class of the user's has. Both methods may be async; `close` may be there, too.

    An instance that has an attribute `tools` after `reset`, the schemas of tools that it answers
    the calls of itself, has them shown in the prompt.
    """

    def reset(self, row: dict[str, JsonValue], seed: int) -> Prompt | Awaitable[Prompt]:
        """Begins an episode, and returns the first observation: text, or chat messages."""
        ...

    def step(self, response: str) -> Result | Awaitable[Result]:
        """Takes a response of the policy."""
        ...


class Step(NamedTuple):
    """What an environment says to a response."""

    reply: Prompt | None  # None: the episode is over
    reward: Reward
    is_correct: bool


# Instances. What is done with one is a generator: it yields what a method of the user's returned,
# and is sent the value once that has been awaited. So grader processes, which await outside of an
# event loop, and `asyncio_environments`, which awaits in one, do the same.

T = TypeVar("T")
Calls = Generator[object, object, T]


@dataclass
class Instance:
    """An environment in the middle of an episode."""

    environment: Environment
    responses: list[str] = field(default_factory=list)  # that it has seen
    is_over: bool = False  # no step follows


Instances = OrderedDict[str, Instance]  # by episode; the oldest first
_INSTANCES: Instances = OrderedDict()  # of this grader process


def step(
    name: str,
    episode: str,
    gold: JsonValue,
    earlier: Turns,
    response: str,
    *,
    is_last: bool = False,
) -> Step:
    """Makes the calls of `step_calls` in this process."""
    return run_calls(
        step_calls(name, _INSTANCES, episode, gold, earlier, response, is_last, MAX_INSTANCES)
    )


def instance_of(episode: str) -> Environment:
    """Returns the instance of an episode that this process has just stepped."""
    return _INSTANCES[episode].environment


def end(episode: str) -> None:
    """Closes the instance of an episode of this process if the episode is over."""
    run_calls(end_calls(_INSTANCES, episode))


def step_calls(
    name: str,
    instances: Instances,
    episode: str,
    gold: JsonValue,
    earlier: Turns,
    response: str,
    is_last: bool,
    max_instances: int,
) -> Calls[Step]:
    """Returns what the environment `name` says to the response of an episode.

    The instance stays in `instances`, also where the episode is over: then `end_calls` is to
    follow. An instance that fails is closed and forgotten.

    Args:
        name: "module:Class", "FILE.py:Class" or "openenv:URL".
        instances: the environments of the episodes that are running.
        episode: names the episode, and no other that is running.
        gold: of the problem: the row, the seed, and the first observation.
        earlier: the turns before, whose grades have the replies that were given.
        response: the response of this turn.
        is_last: no turn may follow, whatever the environment says.
        max_instances: if there are more, the oldest are closed.

    Raises:
        TypeError, ValueError: a method returned something else than it should, or something else
            than the first time.
        Exception: whatever the user's class raises.
    """
    instance = instances.pop(episode, None)
    said_before = [text for text, _ in earlier]
    if instance is None or instance.responses != said_before or not earlier:
        if instance is not None:
            yield from _close(instance)
        instance = yield from _rebuild(name, gold, earlier)
    try:
        result = yield from _step(instance, response)
    except Exception:
        yield from _close_quietly(instance)
        raise
    if is_last:
        result = result._replace(reply=None)
    instance.is_over = result.reply is None
    instances[episode] = instance
    if len(instances) > max_instances:
        _, oldest = instances.popitem(last=False)
        yield from _close(oldest)
    return result


def end_calls(instances: Instances, episode: str) -> Calls[None]:
    """Closes the instance of an episode, and forgets it, if the episode is over."""
    instance = instances.get(episode)
    if instance is not None and instance.is_over:
        del instances[episode]
        yield from _close(instance)


def reset_calls(name: str, gold: JsonValue) -> Calls[Grade]:
    """Resets an environment for a prompt; the reply is a `Beginning`, as JSON."""
    instance = Instance(_make(name))
    try:
        observation = yield from _reset(instance.environment, gold["row"], gold["seed"])
        tools = _tools_of(instance.environment)
    except Exception:
        yield from _close_quietly(instance)
        raise
    yield from _close(instance)
    return Grade(0.0, False, "", reply=json.dumps(Beginning(observation, tools)))


class Beginning(NamedTuple):
    """What a reset gives to a prompt."""

    observation: Prompt
    tools: list[JsonValue]


def _tools_of(environment: Environment) -> list[JsonValue]:
    """Returns the schemas of the tools that an environment answers the calls of itself."""
    tools = getattr(environment, "tools", None) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(f"tools is {tools!r:.80}: it has to be a list of schemas")
    return tools


def close_calls(instances: Instances) -> Calls[None]:
    """Closes all instances, whatever their episodes are at."""
    while instances:
        _, instance = instances.popitem()
        yield from _close_quietly(instance)


def _make(name: str) -> Environment:
    return cast(Environment, classes.adapt(_find_class(name)()))


def _rebuild(name: str, gold: JsonValue, earlier: Turns) -> Calls[Instance]:
    """Returns an instance that has been reset and has seen the responses of the turns before."""
    instance = Instance(_make(name))
    try:
        yield from _replay(instance, gold, earlier)
    except Exception:
        yield from _close_quietly(instance)
        raise
    return instance


def _replay(instance: Instance, gold: JsonValue, earlier: Turns) -> Calls[None]:
    observation = yield from _reset(instance.environment, gold["row"], gold["seed"])
    if observation != gold["observation"]:
        raise ValueError(
            f"reset has to be a function of row and seed: it said {observation!r:.80}, and before "
            f"{gold['observation']!r:.80}"
        )
    for response, grade in earlier:
        result = yield from _step(instance, response)
        if grade is not None and result.reply != grade.reply:
            raise ValueError(
                "an episode that is built again has to go the same way: step said "
                f"{result.reply!r:.80}, and before {grade.reply!r:.80}"
            )


def _reset(environment: Environment, row: JsonValue, seed: int) -> Calls[Prompt]:
    observation = yield environment.reset(row, seed)
    if not _is_prompt(observation):
        raise TypeError(f"reset returned {observation!r:.80}: it has to be text or chat messages")
    return cast(Prompt, observation)


def _is_prompt(value: object) -> bool:
    """Returns whether a value is text or chat messages."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(problem_sets.is_message, value))


def _step(instance: Instance, response: str) -> Calls[Step]:
    result = yield instance.environment.step(response)
    instance.responses.append(response)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise TypeError(f"step returned {result!r:.80}: it has to be (reply, reward, done)")
    reply, reward, is_done = result
    if not isinstance(is_done, bool):
        raise TypeError(f"step returned {is_done!r:.80} as done: it has to be True or False")
    if not is_done and not _is_prompt(reply):
        raise TypeError(
            f"the reply is {reply!r:.80}: it has to be text or chat messages, unless the episode "
            "is over"
        )
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


def _close(instance: Instance) -> Calls[None]:
    """Calls the method `close` of an environment that has one."""
    close = getattr(instance.environment, "close", None)
    if close is not None:
        yield close()


def _close_quietly(instance: Instance) -> Calls[None]:
    """Closes an environment that has failed: what failed first is the error to tell."""
    with contextlib.suppress(Exception):
        yield from _close(instance)


def run_calls(calls: Calls[T]) -> T:
    """Makes calls one after the other, and waits for each in the event loop of this process."""
    try:
        returned = next(calls)
        while True:
            try:
                value = _awaited(returned)
            except Exception as error:
                returned = calls.throw(error)
            else:
                returned = calls.send(value)
    except StopIteration as end:
        return end.value


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


def mode(task: TaskConfig) -> str:
    """Returns where the instances live: in grader "processes", or in one event loop, "asyncio"."""
    if task.environment_mode != "auto":
        return task.environment_mode
    waits = task.environment.startswith((openenv.PREFIX, verifiers.PREFIX))
    return "asyncio" if waits else "processes"


def _find_class(name: str) -> Callable[[], Environment]:
    """Returns what makes the instances of `task.environment=name`.

    Raises:
        Exception: whatever the import of the user's module raises, or TypeError for no function.
    """
    if name.startswith(openenv.PREFIX):
        return functools.partial(openenv.OpenEnv, name.removeprefix(openenv.PREFIX))
    if name.startswith(verifiers.PREFIX):
        return functools.partial(verifiers.VerifiersEpisode, name.removeprefix(verifiers.PREFIX))
    return cast(Callable[[], Environment], find_function(name))


def check(task: TaskConfig) -> None:
    """Raises UserError if there is no such class, or it lacks a method."""
    if not task.environment:
        raise UserError(
            "task.name=environment needs task.environment=module:Class or FILE.py:Class"
        )
    if task.environment.startswith((openenv.PREFIX, verifiers.PREFIX)):
        _check_foreign(task)
        return
    try:
        environment = find_function(task.environment)
    except Exception as error:  # the module is the user's: its import may raise anything
        raise UserError(
            f"task.environment={task.environment} is no module:Class or FILE.py:Class "
            f"({type(error).__name__}: {error})"
        ) from None
    if mode(task) == "asyncio" and task.tools.names:
        raise UserError(
            f"task.environment_mode=asyncio: {task.environment} is awaited in the run's own "
            "process, and task.tools.names run in grader processes. Leave one of them out"
        )
    if classes.is_tool_class(task.environment):
        if mode(task) == "asyncio":
            raise UserError(
                f"task.environment_mode=asyncio: the methods of {task.environment} are tools, "
                "which run in grader processes. Leave the mode out"
            )
        return
    for method in ("reset", "step"):
        function = getattr(environment, method, None)
        if not callable(function):
            raise UserError(
                f"task.environment={task.environment} has no method {method}: an environment has "
                "reset(row, seed) and step(response)"
            )
        if mode(task) == "asyncio" and not inspect.iscoroutinefunction(function):
            raise UserError(
                f"task.environment_mode=asyncio: {task.environment} has a method {method} that "
                "would hold up all other episodes: write `async def`, or set "
                "task.environment_mode=processes"
            )


def _foreign_name(task: TaskConfig) -> str:
    """Returns what stands behind the prefix of an environment of OpenEnv or verifiers."""
    _, _, name = task.environment.partition(":")
    return name


def _check_foreign(task: TaskConfig) -> None:
    """Raises UserError if there is no such environment of OpenEnv or verifiers."""
    if mode(task) != "asyncio":
        raise UserError(
            f"task.environment={task.environment} waits for others: set task.environment_mode=auto"
        )
    if task.environment.startswith(openenv.PREFIX):
        openenv.check_url(_foreign_name(task))
        return
    if task.data:
        raise UserError(
            f"task.data={task.data}: {task.environment} has tasks of its own, set task.data="
        )
    verifiers.check(_foreign_name(task))


def reset_for_prompt(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Resets an environment in a grader process; the reply is a `Beginning`, as JSON."""
    return run_calls(reset_calls(task.environment, gold))


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
    # It imports this module.
    from jzero.tasks import asyncio_environments

    # A reset is no response, which a judge could read.
    unrewarded = replace(task, reward=replace(task.reward, functions=()))
    pool = _resetters(0 if mode(task) == "asyncio" else task.grade_workers)
    starts: dict[int, dict[str, JsonValue]] = {}
    for index, row in rows:
        rng = random.Random(f"environment/{split}/{seed}/{index}")
        starts[index] = {"row": row, "seed": rng.getrandbits(31)}
        stepping = None
        if mode(task) == "asyncio":
            stepping = asyncio_environments.resetting(pool, starts[index], task)
        pool.submit(index, RESETTER, "", starts[index], unrewarded, stepping=stepping)
    problems = []
    grades = dict(pool.drain())
    for index, start in starts.items():
        grade = grades[index]
        if grade.reply is None:
            raise UserError(
                f"task.environment={task.environment}: reset(row, seed={start['seed']}) failed "
                f"({grade.reason}): mend it"
            )
        assert isinstance(grade.reply, str), "a reset returns JSON"
        observation, tools = Beginning(*json.loads(grade.reply))
        prompt = observation
        if isinstance(observation, str):
            prompt = template.render({"observation": observation}, task.system_prompt)
        elif not template.chat:
            raise UserError(
                f"task.environment={task.environment}: reset returned messages, and task.template="
                f"{task.template} is plain text: set task.template=chat, or return text"
            )
        gold = start | {"observation": observation}
        name = f"{NAME}/{split}/{index}"
        problems.append(Problem(name, NAME, prompt, gold, start["row"], tools or None))
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


def _train_sets(task: TaskConfig) -> list[list[dict[str, JsonValue]]] | None:
    """Returns the rows to train on, by set; None where there are none, or no end of them."""
    if task.environment.startswith(verifiers.PREFIX):
        rows = verifiers.train_rows(_foreign_name(task))
        return None if rows is None else [rows]
    if not task.data:
        return None
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
    sets = _train_sets(task)
    if sets is not None:
        rows = problem_sets.stream(sets, task.weights if task.data else (), seed)
        chosen = [rows[index] for index in indices]
    elif task.environment.startswith(verifiers.PREFIX):
        chosen = verifiers.endless_train_rows(_foreign_name(task), indices)
    else:
        chosen = [{} for _ in indices]
    return _problems(task, "train", seed, list(zip(indices, chosen, strict=True)))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run.

    They are the first rows of `task.eval_data` or of the split `task.eval_split`. Without
    `task.data` they differ from the problems of training in their seeds; with it and neither there
    are none. Of verifiers' tasks every tenth is held out.
    """
    seed = problem_sets.EVAL_SEED
    if task.environment.startswith(verifiers.PREFIX):
        held_out = verifiers.eval_rows(_foreign_name(task), count)
        return _problems(task, "eval", seed, list(enumerate(held_out)))
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
    sets = _train_sets(task)
    return None if sets is None else sum(map(len, sets))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the first response of an episode: the worker calls `step`, which knows the others."""
    result = step(task.environment, "", gold, (), response, is_last=True)
    end("")
    return to_grade(result)


def to_grade(result: Step) -> Grade:
    """Returns a step's reward as a grade. Its named parts are metrics, as environment.<part>."""
    parts = {f"{NAME}.{name}": value for name, value in result.reward.parts.items()}
    reason = "correct" if result.is_correct else "stepped"
    return Grade(result.reward.value, result.is_correct, reason, parts=parts, reply=result.reply)


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> Prompt | None:
    """Returns the reply that `step` gave together with its reward."""
    _, last_grade = turns[-1]
    return last_grade.reply
