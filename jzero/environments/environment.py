"""The task `environment`: multi-turn episodes in a user-defined, stateful environment.

    task.name=environment task.environment=module:Class      or FILE.py:Class, openenv:URL, or
                                                             verifiers:ENV

The class implements `Environment`; docs/environments.md describes its arguments and return values.
Every episode has a separate instance, which is constructed without arguments in a grader process
and stays in that process. `reset` must be deterministic in `row` and `seed`: one reset produces the
prompt of a group, and every episode of the group starts with another reset.

If the grader process of an episode has ended, or the run has resumed from a checkpoint, the episode
is rebuilt: a new instance is reset and steps through the previous responses. The rebuilt instance
must return the same replies; any difference raises an error, so that no episode changes silently.
Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import atexit
import copy
import functools
import inspect
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from jzero.environments import episodes, openenv, verifiers
from jzero.environments.episodes import Calls, Episodes, closed_on_error, run_calls
from jzero.environments.tools import classes
from jzero.errors import UserError, quoted
from jzero.problems import bounds, problem_sets, row_loader
from jzero.problems.prompts import ENVIRONMENT_TEMPLATES, find_template
from jzero.problems.row_loader import Selection
from jzero.rewards.user_functions import Reward, find_function, read_result
from jzero.types import Grade, JsonValue, Problem, Prompt, Turns
from jzero.workers.pool import Pool

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "environment"  # the task's name
CORRECT = "correct"  # the reward part that marks the episode as solved
# Per grader process. The oldest instances are closed, and rebuilt if their episodes continue.
MAX_INSTANCES = 4096
RESETTER = "jzero.environments.environment:reset_for_prompt"

# The return value of `step`: the reply, the reward or its named parts, and whether the episode is
# over.
Result = tuple[Prompt | None, float | dict[str, float], bool]


class Environment(Protocol):
    """The interface of a user-defined environment. Methods may be async, and `close` is optional.

    If the instance has an attribute `tools` after `reset`, the prompt quotes it. `tools` is a list
    of tool schemas; the environment itself answers the calls of these tools.
    """

    def reset(self, row: dict[str, JsonValue], seed: int) -> Prompt | Awaitable[Prompt]:
        """Starts an episode and returns the first observation: text, or chat messages."""
        ...

    def step(self, response: str) -> Result | Awaitable[Result]:
        """Applies a response of the policy and returns (reply, reward, done)."""
        ...


class Step(NamedTuple):
    """The environment's result for one response."""

    reply: Prompt | None  # None: the episode is over
    reward: Reward
    is_correct: bool


# Instances.


@dataclass
class Instance:
    """An environment in the middle of an episode (`episodes.Episode`)."""

    environment: Environment
    most_bytes: int  # limit on an observation or a reply
    responses: list[str] = field(default_factory=list)  # the responses that it has received
    is_over: bool = False  # True after the last step

    def reset(self, gold: JsonValue) -> Calls[Prompt]:
        """Starts an episode and returns the first observation."""
        # The environment may change its row, and in an event loop the group shares one row object.
        row = copy.deepcopy(gold["row"])
        returned = yield self.environment.reset(row, gold["seed"])
        observation = bounds.read_prompt(returned, self.most_bytes, "the observation of reset")
        if observation is None:
            raise TypeError(
                f"reset returned {quoted(returned)}: it has to be text or chat messages"
            )
        return observation

    def replay(self, gold: JsonValue, earlier: Turns) -> Calls[Instance]:
        """Resets the environment, steps through the earlier turns, and returns the instance.

        Raises:
            ValueError: the observation or a reply differs from the original episode.
        """
        observation = yield from self.reset(gold)
        if observation != gold["observation"]:
            raise ValueError(
                f"reset has to be a function of row and seed: it said {quoted(observation)}, "
                f"and before {quoted(gold['observation'])}"
            )
        for response, grade in earlier:
            result = yield from self.step(response)
            if grade is not None:
                episodes.check_same("step", result.reply, grade.reply)
        return self

    def step(self, response: str) -> Calls[Step]:
        """Sends a response to the environment and returns the validated result.

        Raises:
            TypeError: the result is not (reply, reward, done), or one of the three has a wrong
                type.
            ValueError: the reply or the reward is out of bounds.
            Exception: any exception of the user-defined method.
        """
        result = yield self.environment.step(response)
        self.responses.append(response)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise TypeError(f"step returned {quoted(result)}: it has to be (reply, reward, done)")
        returned, reward, is_done = result
        if not isinstance(is_done, bool):
            raise TypeError(f"step returned {quoted(is_done)} as done: it has to be True or False")
        # The reply of a finished episode is ignored.
        reply = None
        if not is_done:
            reply = bounds.read_prompt(returned, self.most_bytes, "the reply")
            if reply is None:
                raise TypeError(
                    f"the reply is {quoted(returned)}: it has to be text or chat messages, unless "
                    "the episode is over"
                )
        # The part "correct" is a verdict and does not count towards the reward. Without the part,
        # a positive reward means that the episode is solved.
        is_correct = None
        if isinstance(reward, dict) and CORRECT in reward:
            is_correct = bool(reward[CORRECT])
            reward = {name: part for name, part in reward.items() if name != CORRECT} or 0.0
        read = read_result(reward)
        return Step(reply, read, read.value > 0 if is_correct is None else is_correct)

    def tools(self) -> list[JsonValue]:
        """Returns the schemas of the tools that the environment itself answers."""
        tools = getattr(self.environment, "tools", None) or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise TypeError(f"tools is {quoted(tools)}: it has to be a list of schemas")
        return bounds.read_json(tools, self.most_bytes, "the attribute tools")

    def close(self) -> Calls[None]:
        """Calls the environment's `close` method, if it has one."""
        close = getattr(self.environment, "close", None)
        if close is not None:
            yield close()


_INSTANCES: Episodes[Instance] = Episodes(MAX_INSTANCES)  # running in this grader process


def step(
    name: str,
    episode: str,
    gold: JsonValue,
    earlier: Turns,
    response: str,
    *,
    is_last: bool = False,
    most_bytes: int = bounds.MAX_REPLY_BYTES,
) -> Step:
    """Runs `step_calls` to completion in this grader process."""
    return run_calls(
        step_calls(name, _INSTANCES, episode, gold, earlier, response, is_last, most_bytes)
    )


def instance_of(episode: str) -> Environment:
    """Returns the environment of an episode that has just taken a step in this process."""
    instance = _INSTANCES.get(episode)
    assert instance is not None, f"{episode=}"
    return instance.environment


def end(episode: str) -> None:
    """Closes this process's instance of an episode if the episode is over."""
    run_calls(end_calls(_INSTANCES, episode))


def step_calls(
    name: str,
    instances: Episodes[Instance],
    episode: str,
    gold: JsonValue,
    earlier: Turns,
    response: str,
    is_last: bool,
    most_bytes: int,
) -> Calls[Step]:
    """Takes one step of an episode in the environment `name` and returns its result.

    The instance stays in `instances` even if the episode is over, because rewards may still read
    it; `end_calls` then closes it. An instance that fails is closed and removed.

    Args:
        name: "module:Class", "FILE.py:Class" or "openenv:URL".
        instances: the environments of the running episodes.
        episode: a name that is unique among the running episodes.
        gold: the problem's gold: the row, the seed, and the first observation.
        earlier: the earlier turns; their grades hold the replies that the policy received.
        response: the response of this turn.
        is_last: ends the episode after this turn, even if the environment would continue it.
        most_bytes: the limit on an observation or a reply.

    Raises:
        TypeError, ValueError: a method returned an invalid value, or a rebuilt episode returned
            another value than the original.
        Exception: any exception of the user-defined class.
    """

    def build() -> Calls[Instance]:
        instance = _make(name, most_bytes)
        return closed_on_error(instance, instance.replay(gold, earlier))

    def take(instance: Instance) -> Calls[Step]:
        result = yield from instance.step(response)
        # No reply ends the episode.
        if is_last:
            result = result._replace(reply=None)
        instance.is_over = result.reply is None
        return result

    responses = [text for text, _ in earlier]
    return instances.step(episode, responses, build, take)


def end_calls(instances: Episodes[Instance], episode: str) -> Calls[None]:
    """Closes and removes the instance of an episode if the episode is over."""
    instance = instances.get(episode)
    if instance is not None and instance.is_over:
        yield from instances.end(episode)


def reset_calls(name: str, gold: JsonValue, most_bytes: int) -> Calls[Grade]:
    """Resets an environment to obtain a prompt; the grade's reply is a `Beginning` in JSON."""
    instance = _make(name, most_bytes)

    def begin() -> Calls[Beginning]:
        observation = yield from instance.reset(gold)
        return Beginning(observation, instance.tools())

    beginning = yield from closed_on_error(instance, begin())
    # Only the prompt is needed here: every episode of the group resets another instance.
    yield from instance.close()
    return Grade(0.0, False, "", reply=json.dumps(beginning))


class Beginning(NamedTuple):
    """The result of a reset: the first observation, and the schemas of the environment's tools."""

    observation: Prompt
    tools: list[JsonValue]


def _make(name: str, most_bytes: int) -> Instance:
    environment = cast(Environment, classes.adapt(_find_class(name)()))
    return Instance(environment, most_bytes)


# The task.


def episode_values(problem: Problem, sample_index: int, earlier: Turns) -> dict[str, JsonValue]:
    """Returns the values besides the response that a grader process needs for a turn."""
    if problem.task != NAME:
        return {}
    return episodes.values_for_worker(problem, sample_index, earlier)


def mode(task: TaskConfig) -> str:
    """Returns where the instances live: in grader "processes", or in one event loop, "asyncio"."""
    if task.environment_mode != "auto":
        return task.environment_mode
    # OpenEnv waits for a server, and programs of verifiers wait for the policy.
    waits = task.environment.startswith((openenv.PREFIX, verifiers.PREFIX))
    return "asyncio" if waits else "processes"


def _find_class(name: str) -> Callable[[], Environment]:
    """Returns the constructor of `task.environment=name`.

    Raises:
        Exception: any exception from importing the user-defined module, or TypeError if the name is
            not callable.
    """
    if name.startswith(openenv.PREFIX):
        return functools.partial(openenv.OpenEnv, name.removeprefix(openenv.PREFIX))
    if name.startswith(verifiers.PREFIX):
        return functools.partial(verifiers.VerifiersEpisode, name.removeprefix(verifiers.PREFIX))
    return cast(Callable[[], Environment], find_function(name))


def check(task: TaskConfig) -> None:
    """Raises UserError if the class does not exist or lacks a method."""
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
    """Returns the name after the prefix "openenv:" or "verifiers:"."""
    _, _, name = task.environment.partition(":")
    return name


def _check_foreign(task: TaskConfig) -> None:
    """Raises UserError if the settings of an OpenEnv or verifiers environment are wrong."""
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
    """Resets an environment in a grader process; the grade's reply is a `Beginning` in JSON."""
    return run_calls(reset_calls(task.environment, gold, bounds.reply_bytes(task)))


@functools.cache
def _resetters(workers: int) -> Pool:
    """Returns the pool that resets environments for prompts. It lives until this process ends."""
    pool = Pool(workers)
    atexit.register(pool.close)
    return pool


def _problems(
    task: TaskConfig, split: str, seed: int, rows: Sequence[tuple[int, JsonValue]]
) -> list[Problem]:
    """Returns a problem for each pair of an index and a row."""
    template = find_template(task.template, ENVIRONMENT_TEMPLATES)
    # Imported here because asyncio_environments imports this module.
    from jzero.environments import asyncio_environments

    # Disable the rewards: a reset has no response that a reward function or a judge could read.
    unrewarded = replace(task, reward=replace(task.reward, functions=()))
    pool = _resetters(0 if mode(task) == "asyncio" else task.grade_workers)
    # Submit all resets first, so that they run in parallel.
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
        # The observation is part of the gold: every episode's reset is compared with it.
        gold = start | {"observation": observation}
        name = f"{NAME}/{split}/{index}"
        problems.append(Problem(name, NAME, prompt, gold, start["row"], tools or None))
    return problems


@functools.cache
def _read_sets(selection: Selection, *, is_held_out: bool) -> list[list[dict[str, JsonValue]]]:
    """Returns the selected rows of each data set, with all columns."""
    usual, setting = ("test", "task.eval_data") if is_held_out else ("train", "task.data")
    sources = row_loader.held_out_sources(selection) if is_held_out else selection.train
    return [
        problem_sets.read_columns(row_loader.open_rows(rows, usual, setting), rows.path)
        for rows in sources
    ]


def _train_sets(task: TaskConfig) -> list[list[dict[str, JsonValue]]] | None:
    """Returns the training rows of each data set, None without a finite data set."""
    if task.environment.startswith(verifiers.PREFIX):
        rows = verifiers.train_rows(_foreign_name(task))
        return None if rows is None else [rows]
    if not task.data:
        return None
    return _read_sets(row_loader.selection_of(task), is_held_out=False)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step. Without `task.data` every row is empty."""
    indices = range(step * count, (step + 1) * count)
    sets = _train_sets(task)
    if sets is not None:
        weights = row_loader.selection_of(task).weights
        rows = problem_sets.stream(sets, weights, seed)
        indices = problem_sets.step_indices(step, count, sum(map(len, sets)), task, weights)
        chosen = [rows[index] for index in indices]
    elif task.environment.startswith(verifiers.PREFIX):
        chosen = verifiers.endless_train_rows(_foreign_name(task), indices)
    else:
        chosen = [{} for _ in indices]
    return _problems(task, "train", seed, list(zip(indices, chosen, strict=True)))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run.

    The problems are the first rows of `task.eval_data`. Without `task.data` they differ from the
    training problems in their seeds. With `task.data`, but without `task.eval_data`, there are no
    held-out problems. For verifiers every tenth task is held out.
    """
    seed = problem_sets.EVAL_SEED
    if task.environment.startswith(verifiers.PREFIX):
        held_out = verifiers.eval_rows(_foreign_name(task), count)
        return _problems(task, "eval", seed, list(enumerate(held_out)))
    if not task.data:
        return _problems(task, "eval", seed, [(index, {}) for index in range(count)])
    if not task.eval_data:
        return []
    sets = _read_sets(row_loader.selection_of(task), is_held_out=True)
    rows = [row for rows_of_set in sets for row in rows_of_set]
    return _problems(task, "eval", seed, list(enumerate(rows))[:count])


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of training rows, None for an endless stream of problems."""
    sets = _train_sets(task)
    return None if sets is None else sum(map(len, sets))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades a response as the only turn of an episode.

    For episodes with several turns the worker calls `step` with the earlier turns instead.
    """
    result = step(task.environment, "", gold, (), response, is_last=True)
    end("")
    return to_grade(result)


def to_grade(result: Step) -> Grade:
    """Returns a step's reward as a grade. Its named parts become metrics environment.<part>."""
    parts = {f"{NAME}.{name}": value for name, value in result.reward.parts.items()}
    reason = "correct" if result.is_correct else "stepped"
    return Grade(result.reward.value, result.is_correct, reason, parts=parts, reply=result.reply)


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> Prompt | None:
    """Returns the reply that `step` returned with its reward."""
    _, last_grade = turns[-1]
    return last_grade.reply
