"""Episodes with tools, in a grader process: executes the calls of each response.

A task has such episodes if `task.tools.names` is set, or if its environment class has methods as
tools (`classes`). If a response calls tools, their results are the reply. A response without calls
is an answer: it ends the episode, or the task replies to it.

An episode keeps its objects, such as an interpreter, in one process until it ends. An episode
without room for another turn is not ended explicitly: its objects are closed after IDLE_SECONDS,
when another episode takes a step. An episode that continues in another process, or after a
checkpoint, repeats its earlier calls, which must return the same results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jzero.environments.environment import (
    Episodes,
    check_same,
    closed_on_error,
    outside_of_loop,
    run,
)
from jzero.environments.tools import classes, parsing
from jzero.environments.tools.calling import Message, ToolUse, answer_calls
from jzero.environments.tools.schemas import Schema
from jzero.environments.tools.toolbox import (
    INTERPRETER,
    Toolbox,
    check_names,
    make_toolbox,
    tool_schemas,
)
from jzero.json_values import member
from jzero.problems import bounds
from jzero.programming import code_runs
from jzero.types import Turns
from jzero.workers.pipe import TurnRequest

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_EPISODES = 4096  # in one process; the oldest are closed, and rebuilt if they continue
IDLE_SECONDS = 600.0
# Share of `task.reward.seconds`, the time limit of a turn, that tool calls may take.
_SHARE_OF_TURN = 0.8


class ToolTurn(NamedTuple):
    """The results of the tool calls of a response."""

    messages: list[Message]  # the answers; empty for a response without calls
    use: ToolUse
    environment: object  # the instance of an environment class, None if there is no class


@dataclass
class ToolEpisode:
    """The tools of an episode, and its instance of an environment class (`episodes.Episode`)."""

    toolbox: Toolbox
    environment: object
    responses: list[str] = field(default_factory=list)  # the responses so far

    async def replay(self, earlier: Turns, task: TaskConfig) -> None:
        """Repeats the calls of the earlier turns.

        Raises:
            ValueError: the tools return other results than the first time.
        """
        num_earlier = 0
        for response, grade in earlier:
            # Functions have no state, so there is no need to call them again.
            has_state = self.environment is not None or bool(self.toolbox.objects)
            if grade is None or not grade.tool_calls or not has_state:
                self.responses.append(response)
                continue
            turn = await self.step(response, num_earlier, task)
            check_same("the tools", turn.messages, grade.reply)
            num_earlier += grade.tool_calls

    async def step(self, response: str, num_earlier: int, task: TaskConfig) -> ToolTurn:
        """Executes the calls of a response. `num_earlier` calls were made in earlier turns."""
        parameters = {name: tool.parameters for name, tool in self.toolbox.tools.items()}
        syntax = task.tools.syntax or parsing.JSON
        calls = parsing.parse_calls(response, syntax, parameters)
        messages, use = [], ToolUse(0, 0, 0.0)
        if calls:
            seconds = task.reward.seconds * _SHARE_OF_TURN
            messages, use = await answer_calls(
                calls, self.toolbox, task.tools, num_earlier, seconds
            )
        # After the calls: if one raises, the episode has not taken the response.
        self.responses.append(response)
        return ToolTurn(messages, use, self.environment)

    async def close(self) -> None:
        """Closes the tools, such as an interpreter, and the instance of the environment class."""
        with outside_of_loop():
            self.toolbox.close()
            classes.end(self.environment)


_EPISODES: Episodes[ToolEpisode] = Episodes(MAX_EPISODES, IDLE_SECONDS)


def has_tools(task: TaskConfig) -> bool:
    """Returns whether the policy may call tools."""
    return bool(task.tools.names) or classes.is_tool_class(task.environment)


def schemas(task: TaskConfig) -> list[Schema]:
    """Returns the schemas of the tools, for the argument `tools` of a chat template."""
    return tool_schemas(task, classes.tool_class(task.environment))


def check(task: TaskConfig) -> None:
    """Raises UserError if a tool does not exist, has no schema, or cannot work here."""
    check_names(task)
    schemas(task)


def notes(task: TaskConfig) -> list[str]:
    """Returns log lines with the names of the tools and the sandbox of the interpreter."""
    if not has_tools(task):
        return []
    names = [member(schema, ("function", "name"), str) for schema in schemas(task)]
    lines = [f"tools: {', '.join(names)} (at most {task.tools.max_calls} calls of an episode)"]
    return [*lines, code_runs.describe(task)] if INTERPRETER in task.tools.names else lines


def metrics(task: TaskConfig) -> dict[str, float]:
    """Returns the metric sandbox/level if the policy can call the interpreter."""
    if INTERPRETER not in task.tools.names:
        return {}
    return {"sandbox/level": float(code_runs.level_number(task))}


def step(request: TurnRequest) -> ToolTurn:
    """Executes the calls of a response in its episode. `end` closes the episode.

    Raises:
        ValueError: the tools of a rebuilt episode return other results than before.
        SandboxError: the sandbox failed, which is not the policy's fault.
        Exception: any exception of a user-defined class in its constructor or `reset`.
    """
    task = request.task
    num_earlier = sum(grade.tool_calls for _, grade in request.earlier if grade is not None)

    async def build() -> ToolEpisode:
        with outside_of_loop():
            owner = classes.begin(task.environment, request.gold, bounds.reply_bytes(task))
            episode = ToolEpisode(make_toolbox(task, owner), owner)
        async with closed_on_error(episode):
            await episode.replay(request.earlier, task)
        return episode

    async def take(episode: ToolEpisode) -> ToolTurn:
        return await episode.step(request.response, num_earlier, task)

    responses = [text for text, _ in request.earlier]
    turn = run(_EPISODES.step(request.episode, responses, build, take))
    # task.tools.max_output limits one answer. The reply limit applies to all answers together.
    bounds.read_json(turn.messages, bounds.reply_bytes(task), "what the tools answer")
    return turn


def end(name: str) -> None:
    """Closes the objects of an episode, such as its interpreter."""
    run(_EPISODES.end(name))
