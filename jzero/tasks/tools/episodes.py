"""Episodes with tools, in a grader process: the calls of each response, and what they came to.

A task with `task.tools.names` and an environment class whose methods are tools (`classes`) have
such episodes. A response that calls tools is answered by them. One that calls none is the answer
that ends the episode, or that the task goes on from.

An episode has its own objects, such as an interpreter, in the process that it stays with. They end
with the episode. What is left of an episode that had no room for another turn ends after
IDLE_SECONDS, once another episode takes a step. An episode that goes on in another process, or
after a checkpoint, makes its earlier calls again: they have to be answered in the same way.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jzero.tasks import code_runs
from jzero.tasks.tools import classes, parsing
from jzero.tasks.tools.calling import Message, ToolUse, answer_calls
from jzero.tasks.tools.schemas import Schema
from jzero.tasks.tools.toolbox import (
    INTERPRETER,
    Toolbox,
    check_names,
    make_toolbox,
    tool_schemas,
)
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_EPISODES = 4096  # in one process; the oldest are ended, and built again if they go on
IDLE_SECONDS = 600.0
# Of `task.reward.seconds`, which a whole turn may take, what the calls may take.
_SHARE_OF_TURN = 0.8

Turns = Sequence[tuple[str, Grade | None]]  # the response and the grade of each turn


class ToolTurn(NamedTuple):
    """What the calls of a response came to."""

    messages: list[Message]  # the answers; empty for a response that calls nothing
    use: ToolUse
    environment: object  # the instance of an environment class, None without one


@dataclass
class _Episode:
    """The tools of an episode, and its instance of an environment class."""

    toolbox: Toolbox
    environment: object
    responses: list[str] = field(default_factory=list)  # that have been answered
    last_used: float = field(default_factory=time.monotonic)


_EPISODES: OrderedDict[str, _Episode] = OrderedDict()  # by name; the oldest first


def has_tools(task: TaskConfig) -> bool:
    """Returns whether the policy may call tools."""
    # `python -m jzero.grade` has settings without tools.
    names = getattr(getattr(task, "tools", None), "names", ())
    return bool(names) or classes.is_tool_class(getattr(task, "environment", ""))


def schemas(task: TaskConfig) -> list[Schema]:
    """Returns what a prompt shows of the tools, as the argument `tools` of a chat template."""
    return tool_schemas(task, classes.tool_class(task.environment))


def check(task: TaskConfig) -> None:
    """Raises UserError if a tool does not exist, has no schema, or cannot work here."""
    check_names(task)
    schemas(task)


def notes(task: TaskConfig) -> list[str]:
    """Returns lines that say which tools there are, and where the interpreter runs."""
    if not has_tools(task):
        return []
    names = [schema["function"]["name"] for schema in schemas(task)]
    lines = [f"tools: {', '.join(names)} (at most {task.tools.max_calls} calls of an episode)"]
    return [*lines, code_runs.describe(task)] if INTERPRETER in task.tools.names else lines


def metrics(task: TaskConfig) -> dict[str, float]:
    """Returns the protection from the interpreter's code, if there is one."""
    if INTERPRETER not in task.tools.names:
        return {}
    return {"sandbox/level": float(code_runs.level_number(task))}


def episode_values(
    problem: Problem, sample_index: int, earlier: Turns, task: TaskConfig
) -> dict[str, JsonValue]:
    """Returns what a grader process needs for a turn with tools, besides the response."""
    # A suite may ask problems of another task, which has no tools.
    if problem.task != task.name or not has_tools(task):
        return {}
    turns = [(text, vars(grade) if grade else None) for text, grade in earlier]
    return {"episode": f"{problem.id}/{sample_index}", "turns": turns, "has_tools": True}


def step(name: str, gold: JsonValue, earlier: Turns, response: str, task: TaskConfig) -> ToolTurn:
    """Makes the calls of a response, in the episode `name`, which `end` ends.

    Args:
        gold: of the problem. That of an environment has the row.
        earlier: the turns before, whose grades have the answers that were given.

    Raises:
        ValueError: an episode that is built again does not go the same way.
        SandboxError: nothing is known about a call, for no fault of the policy.
        Exception: whatever a class of the user's raises when it is made or reset.
    """
    _end_idle()
    episode = _EPISODES.pop(name, None)
    called_before = [text for text, grade in earlier if grade is not None and grade.tool_calls]
    if episode is None or episode.responses != called_before:
        _close(episode)
        episode = _rebuild(gold, earlier, task)
    _EPISODES[name] = episode
    episode.last_used = time.monotonic()
    num_earlier = sum(grade.tool_calls for _, grade in earlier if grade is not None)
    messages, use = _call(episode, response, num_earlier, task)
    return ToolTurn(messages, use, episode.environment)


def end(name: str) -> None:
    """Ends what an episode has, such as its interpreter."""
    _close(_EPISODES.pop(name, None))


def _rebuild(gold: JsonValue, earlier: Turns, task: TaskConfig) -> _Episode:
    """Returns an episode that has made the calls of the turns before."""
    environment = classes.begin(task.environment, gold)
    episode = _Episode(make_toolbox(task, environment), environment)
    num_earlier = 0
    for response, grade in earlier:
        if grade is None or not grade.tool_calls:
            continue
        # Functions have no state, so that they need not be called again.
        if environment is None and not episode.toolbox.objects:
            episode.responses.append(response)
            continue
        messages, _ = _call(episode, response, num_earlier, task)
        if messages != grade.reply:
            _close(episode)
            raise ValueError(
                "an episode that is built again has to go the same way: the tools said "
                f"{messages!s:.80}, and before {grade.reply!s:.80}"
            )
        num_earlier += grade.tool_calls
    return episode


def _call(
    episode: _Episode, response: str, num_earlier: int, task: TaskConfig
) -> tuple[list[Message], ToolUse]:
    parameters = {name: tool.parameters for name, tool in episode.toolbox.tools.items()}
    syntax = task.tools.syntax or parsing.JSON
    calls = parsing.parse_calls(response, syntax, parameters)
    if not calls:
        return [], ToolUse(0, 0, 0.0)
    seconds = task.reward.seconds * _SHARE_OF_TURN
    messages, use = answer_calls(calls, episode.toolbox, task.tools, num_earlier, seconds)
    episode.responses.append(response)
    return messages, use


def _close(episode: _Episode | None) -> None:
    if episode is not None:
        episode.toolbox.close()
        classes.end(episode.environment)


def _end_idle() -> None:
    """Ends the oldest episodes, if nothing has been heard of them for long, or they are many."""
    oldest_use = time.monotonic() - IDLE_SECONDS
    while _EPISODES:
        name, episode = next(iter(_EPISODES.items()))
        if episode.last_used > oldest_use and len(_EPISODES) < MAX_EPISODES:
            return
        end(name)
