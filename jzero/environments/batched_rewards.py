"""User-defined reward functions that are called once per batch, with lists.

    def diversity(responses, golds): ...      returns one reward for each response
    def reward(completions, **kwargs): ...    TRL's form: one reward for each episode

A function is batched if its parameters have names of `user_functions.PLURALS`, or if it has TRL's
form (`trl_rewards`). A batch is all responses of a step, or with task.reward.batch=group all
responses to one problem (`split`). In jzero's form the lists have an entry for each turn of each
episode of the batch, in order, and cover all hosts. In TRL's form the lists have an entry for each
episode, and the reward goes to the last turn of the episode. A call runs in a grader process of one
host, within task.reward.seconds and task.reward.memory_gib. Several calls run in parallel in the
available grader processes.

If the function fails, every response of the batch stays without a score. If one reward is not a
finite number, only its response stays without a score.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jzero.environments import environment
from jzero.environments.tools import classes
from jzero.errors import quoted
from jzero.json_values import as_list, as_number, as_object, from_fields, to_integer
from jzero.problems import bounds
from jzero.rewards import rewards, trl_rewards, user_functions
from jzero.rewards.trl_rewards import TrainerState
from jzero.types import Grade, JsonValue, Problem, Rollout, grade_of
from jzero.workers.pool import CallError, Pool

if TYPE_CHECKING:
    from jzero.config import TaskConfig

CALLER = "jzero.environments.batched_rewards:call_in_worker"
MOST_CALLS = 64  # calls that may wait at the same time
_NO_STATE = TrainerState()


@dataclass(frozen=True)
class Episode:
    """The parts of an episode that reward functions may read."""

    problem: Problem
    turns: Sequence[tuple[str, Grade]]  # the text and the grade of each turn
    # All tokens after the prompt, None if the tokens are unavailable.
    completion_ids: list[int] | None = None


def to_episode(rollout: Rollout, *, with_tokens: bool) -> Episode:
    """Converts a rollout with graded turns to an episode."""
    turns = [(turn.text, grade_of(turn)) for turn in rollout.turns]
    # Token ids are large as JSON, so they are sent only if a function asks for them.
    tokens = rollout.tokens.ids[rollout.prompt_length :].tolist() if with_tokens else None
    return Episode(rollout.problem, turns, tokens)


def split(
    rollouts: Sequence[Rollout],
    group_size: int,
    batch: str,
    groups_per_step: int,
) -> list[list[Rollout]]:
    """Splits rollouts into batches of complete groups, in order.

    Args:
        rollouts: groups of `group_size` consecutive rollouts of one problem.
        group_size: at least 1.
        batch: `task.reward.batch`. With "group" each group is a batch.
        groups_per_step: the maximum number of groups per batch if `batch` is "step".
    """
    groups = 1 if batch == "group" else max(groups_per_step, 1)
    size = group_size * groups
    return [list(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]


def call_all(
    pool: Pool,
    task: TaskConfig,
    batches: Sequence[Sequence[Episode]],
    state: TrainerState = _NO_STATE,
) -> list[dict[str, JsonValue]]:
    """Calls the batched functions and returns a dict from function to result, in JSON, per batch.

    The result of a function is the reason why it failed, or a dict from the number of each turn to
    [value, parts], to null, or to the reason why the turn has no reward.
    """
    calls = list(itertools.product(range(len(batches)), rewards.batched(task.reward)))

    def call(number: int, name: str) -> JsonValue:
        lists = _lists(name, batches[number], state)
        try:
            return pool.call(CALLER, name, lists, task=task, user_code=name)
        except CallError as error:
            # A failed call costs its batch the reward, not the run.
            return str(error)

    # The threads only wait for grader processes.
    results: list[dict[str, JsonValue]] = [{} for _ in batches]
    with ThreadPoolExecutor(min(MOST_CALLS, max(len(calls), 1))) as threads:
        returned = list(threads.map(call, *zip(*calls, strict=True))) if calls else []
    for (number, name), result in zip(calls, returned, strict=True):
        results[number][name] = result
    return results


def add(grades: Sequence[Grade], results: Mapping[str, JsonValue]) -> list[Grade]:
    """Adds the rewards that `call_all` returned for one batch to the grades of its turns."""
    done = list(grades)
    for name, result in results.items():
        for i, grade in enumerate(done):
            # A text is the error of the whole call.
            reward = result if isinstance(result, str) else as_object(result)[str(i)]
            if isinstance(reward, str):
                # The first failure of a grade is reported.
                if not grade.failed:
                    done[i] = replace(
                        grade,
                        reason=reward[: bounds.MAX_REASON],
                        failed=True,
                        failed_function=name,
                        reply=None,
                    )
            elif reward is not None:
                value, parts = as_list(reward)
                named = {name: as_number(value)}
                for part, number in as_object(parts).items():
                    named[f"{name}.{part}"] = as_number(number)
                done[i] = replace(grade, parts=grade.parts | named)
    return done


def decided_by_rewards(problem: Problem, task: TaskConfig) -> bool:
    """Returns whether the rewards decide if an episode is correct, because it has no grader.

    True for environments that have tools as methods, such as TRL's classes.
    """
    return problem.task == environment.NAME and classes.is_tool_class(task.environment)


def with_verdict(grade: Grade, task: TaskConfig) -> Grade:
    """Returns the grade, marked as correct if the sum of its rewards is above 0."""
    values = [grade.parts.get(function, 0.0) for function in task.reward.functions]
    return replace(grade, correct=sum(values) > 0)


def _lists(name: str, episodes: Sequence[Episode], state: TrainerState) -> dict[str, JsonValue]:
    """Returns the lists that a function takes, with each grade as a dict of its fields."""
    if user_functions.is_of_trl(name):
        return _lists_of_trl(episodes, state)
    asked = user_functions.asked_in_lists(name)
    entries: list[dict[str, JsonValue]] = []
    for episode in episodes:
        turns = episode.turns
        for count, (text, _) in enumerate(turns):
            # An entry describes the episode up to and including its turn.
            values = user_functions.episode_values(episode.problem, text, turns[:count], asked)
            if "turns" in values:
                values["turns"] = [(said, vars(grade)) for said, grade in turns[: count + 1]]
            entries.append(values | {"response": text, "gold": episode.problem.gold})
    parameters = user_functions.parameter_names(name) or ()
    plurals = user_functions.PLURALS
    return {
        parameter: [entry[plurals[parameter]] for entry in entries]
        for parameter in parameters
        if parameter in plurals
    }


def _lists_of_trl(episodes: Sequence[Episode], state: TrainerState) -> dict[str, JsonValue]:
    """Returns the lists for a function of TRL's form.

    "places" holds the number of the last turn of each episode.
    """
    conversations = [
        user_functions.conversation(
            episode.problem.prompt, episode.turns[-1][0], episode.turns[:-1]
        )
        for episode in episodes
    ]
    lists = trl_rewards.lists_of(
        [episode.problem for episode in episodes],
        conversations,
        [episode.completion_ids for episode in episodes],
        state,
    )
    ends = itertools.accumulate(len(episode.turns) for episode in episodes)
    return lists | {"places": [end - 1 for end in ends]}


# In a grader process.


def call_in_worker(
    task: TaskConfig,
    name: str,
    lists: Mapping[str, list[JsonValue]],
) -> dict[str, JsonValue]:
    """Calls a function and returns a dict from the number of a turn to its reward (`_read`).

    Raises:
        TypeError: the function did not return one reward for each response.
        Exception: any exception of the function.
    """
    if user_functions.is_of_trl(name):
        return _call_of_trl(name, lists)
    values: dict[str, object] = {"task": task, **lists}
    if "episodes" in lists:
        values["episodes"] = [
            [(text, from_fields(Grade, fields)) for text, fields in map(as_list, as_list(turns))]
            for turns in lists["episodes"]
        ]
    # All lists have the same length: one entry for each turn.
    count = len(next(iter(lists.values())))
    entries = _entries(user_functions.invoke(name, values), count)
    return {str(i): _read(name, i, reward) for i, reward in enumerate(entries)}


def _call_of_trl(name: str, lists: Mapping[str, list[JsonValue]]) -> dict[str, JsonValue]:
    """Calls a function of TRL's form. Each episode's reward goes to the episode's last turn."""
    places = [to_integer(place) for place in lists["places"]]
    logs = trl_rewards.Logs()
    function = user_functions.find_function(name)
    entries = _entries(function(**trl_rewards.arguments(function, lists, logs)), len(places))
    # Earlier turns have no reward.
    read_rewards: dict[str, JsonValue] = dict.fromkeys(map(str, range(places[-1] + 1)))
    for i, (place, reward) in enumerate(zip(places, entries, strict=True)):
        read = _read(name, i, reward)
        if isinstance(read, list):
            value, named = read
            read = [value, as_object(named) | logs.metrics]
        read_rewards[str(place)] = read
    return read_rewards


def _entries(returned: object, count: int) -> list[object]:
    """Returns the entries of a function's return value, which has to be a list of `count` rewards.

    Raises:
        TypeError: the value is not a list, or has another length.
        Exception: any exception of an async function.
    """
    if inspect.isawaitable(returned):
        returned = asyncio.run(user_functions.wait_for(returned))
    # Text and dicts have a length, but are not lists of rewards.
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise TypeError(
            f"returned {quoted(returned)}: it has to return a list with {count} rewards"
        )
    # An object with a length may still iterate forever.
    given: list[object] = list(itertools.islice(returned, count + 1))  # type: ignore[call-overload]
    if len(given) != count:
        raise TypeError(f"returned {len(returned)} rewards for {count} responses")  # type: ignore[arg-type]
    return given


def _read(name: str, i: int, reward: object) -> JsonValue:
    """Returns [value, parts], None for no reward, or the reason why there is none."""
    if reward is None:
        return None
    try:
        return list(bounds.read_reward(reward))
    except (TypeError, ValueError) as error:
        return bounds.one_line(f"error: {name}: {type(error).__name__}: entry {i} {error}")
