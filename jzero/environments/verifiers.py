"""Runs installed environments of the package verifiers.

    task.name=verifiers:ENV        ENV is the name of a taskset, as in `vf-eval ENV`, or a file of
                                   verifiers' settings, FILE.toml

A verifiers environment runs a program, its harness, for each episode. The program sends chat
requests. verifiers intercepts and records the requests and forwards them to an endpoint, which is
jzero's `chat_endpoint`: a request is the observation, the policy's response is the answer, and the
rewards of the recorded trace belong to the last turn. An episode is one conversation of one policy.

Written for verifiers 0.4.0. The package is optional: it is imported only for such an environment.
None of its code runs in grader processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import logging
import tomllib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jzero.environments.chat_endpoint import (
    MODEL,
    ChatEndpoint,
    Conversation,
    Message,
    Request,
    assistant_message,
    new_messages,
)
from jzero.errors import UserError
from jzero.files import read_text
from jzero.types import JsonValue

if TYPE_CHECKING:
    import verifiers.v1 as vf

PREFIX = "verifiers:"
HELD_OUT = 10  # every tenth task is held out for evaluation
# The client's settings name a variable with an API key. The variable need not exist: the endpoint
# checks no key.
KEY_VARIABLE = "JZERO_ENDPOINT_KEY"

# The result of an episode: the parts of its reward, and its metrics.
Parts = dict[str, float]


class EpisodeError(RuntimeError):
    """An episode that verifiers could not run to its end."""


class VerifiersEpisode:
    """An episode of a verifiers environment, with the methods of a user-defined class."""

    def __init__(self, name: str) -> None:
        self.tools: list[JsonValue] = []  # the schemas that the first request shows
        self._name = name
        self._conversation: Conversation[Parts] | None = None
        self._request = Request([], [])

    async def reset(self, row: dict[str, JsonValue], seed: int) -> list[Message]:
        """Starts the program of a task, and returns the messages of its first request."""
        host = await find_host(self._name)
        self._conversation = host.begin(row)
        request = await self._conversation.next()
        if not isinstance(request, Request):
            raise EpisodeError(f"the episode ended before it asked for a response, with {request}")
        self._request = request
        self.tools = request.tools
        return request.messages

    async def step(self, response: str) -> tuple[list[Message] | None, Parts, bool]:
        """Answers the program's request, and waits for the next request or the program's end."""
        assert self._conversation is not None, "reset begins the conversation"
        message = assistant_message(response, self.tools)
        self._conversation.answer(message)
        request = await self._conversation.next()
        if not isinstance(request, Request):
            return None, request, True
        messages = new_messages(self._request, message, request)
        self._request = request
        # verifiers scores the complete trace, so only the last turn has a reward.
        return messages, {"score": 0.0}, False

    async def close(self) -> None:
        """Ends the program, if it has not ended."""
        if self._conversation is not None:
            await self._conversation.stop()
            self._conversation = None


class Host:
    """The servers that all episodes of an environment share in an event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The event loop cancels this task when it ends.
        self._serving = asyncio.ensure_future(self._serve())

    async def wait_until_ready(self) -> None:
        """Returns once episodes can begin.

        Raises:
            Exception: any exception from loading the environment.
        """
        await asyncio.wait([self._ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    def begin(self, row: dict[str, JsonValue]) -> Conversation[Parts]:
        """Starts an episode of the task whose data is `row`."""
        conversation: Conversation[Parts] = Conversation()
        conversation.start(self._run(conversation, row))
        return conversation

    async def _serve(self) -> None:
        # This logger warns about every program that is stopped while it waits for a response, which
        # is normal: it happens after the reset for a prompt.
        logging.getLogger("verifiers.v1.interception").setLevel(logging.ERROR)
        # Loading imports packages and may download data, and other episodes run in this loop.
        self._environment = await asyncio.to_thread(load_environment, self._name)
        self._endpoint = ChatEndpoint()
        with contextlib.closing(self._endpoint):
            async with self._environment.serving():
                self._ready.set_result(None)
                await asyncio.Event().wait()  # until it is cancelled

    async def _run(self, conversation: Conversation[Parts], row: dict[str, JsonValue]) -> Parts:
        """Runs an episode, and returns the parts of its reward."""
        import verifiers.v1 as vf

        environment = self._environment
        task_type = type(environment.taskset).task_type()
        data = task_type.data_type().model_validate(row)
        task = task_type(data, environment.config.taskset.task)
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var=KEY_VARIABLE)
        sessions: list[str] = []

        # verifiers calls this with each new trace; the endpoint finds the conversation by its id.
        def register(trace: vf.Trace) -> None:
            sessions.append(trace.id)
            self._endpoint.responders[trace.id] = conversation

        try:
            context = vf.ModelContext(model=MODEL, client=client)
            episode = await environment.run_episode(task, context, on_trace=register)
        finally:
            # The dictionary would otherwise keep every conversation of the run.
            for session in sessions:
                self._endpoint.responders.pop(session, None)
        return parts_of(episode)


# Hosts by event loop and by the name of the environment.
_HOSTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Host]] = (
    weakref.WeakKeyDictionary()
)


async def find_host(name: str) -> Host:
    """Returns the host of an environment in this event loop."""
    hosts = _HOSTS.setdefault(asyncio.get_running_loop(), {})
    if name not in hosts:
        hosts[name] = Host(name)
    await hosts[name].wait_until_ready()
    return hosts[name]


def parts_of(episode: vf.Episode) -> Parts:
    """Returns the reward of an episode as `score`, followed by verifiers' rewards and metrics.

    Raises:
        EpisodeError: the episode failed, or the number of trainable agents is not 1.
    """
    # An episode with errors has no reward to train on.
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or errors:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EpisodeError(said or "the episode is not ok, and has no error")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise EpisodeError(
            f"{len(traces)} agents of the environment are trained: jzero trains one conversation"
        )
    [trace] = traces
    parts = {"score": float(trace.reward)}
    for name, reward in trace.rewards.items():
        if reward is not None:
            parts[name] = float(reward.value)
    for name, value in trace.metrics.items():
        if value is not None:
            parts[name] = float(value)
    return parts


# Loading.


def load_environment(name: str) -> vf.Env:
    """Loads the verifiers environment of a name or of a settings file."""
    from verifiers.v1.utils.loaders import load_environment

    return load_environment(read_settings(name))


def read_settings(name: str) -> vf.EnvConfig:
    """Returns verifiers' settings of an environment.

    A file contains all settings, in a table [env] or at its top level. A name gets the taskset's
    default harness in a local subprocess. If the default is bash, the harness "null" is used
    instead, which chats and calls the task's tools.

    Raises:
        UserError: there is no such file or taskset, or a setting is wrong.
    """
    from verifiers.v1.utils.loaders import default_harness_id, resolve_env_config

    what = f"task.environment={PREFIX}{name}"
    try:
        if name.endswith(".toml"):
            settings = tomllib.loads(read_text(name))
            settings = settings.get("env", settings)
        else:
            harness = default_harness_id(name)
            agent = {
                "harness": {"id": "null" if harness == "bash" else harness},
                "runtime": {"type": "subprocess"},
            }
            settings = {"taskset": {"id": name}, "agent": agent}
        resolved = resolve_env_config(settings)
    except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
        raise UserError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    refuse_unsafe_harnesses(resolved, what)
    return resolved


def refuse_unsafe_harnesses(settings: vf.EnvConfig, what: str) -> None:
    """Raises UserError if a harness would run the policy's code on this machine unprotected."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import harness_class

    harnesses = settings.agent_harnesses()
    for role, agent in agent_config_fields(settings).items():
        harness = harnesses[role].id
        if harness_class(harness).EXECUTES_CODE and agent.runtime.type == "subprocess":
            raise UserError(
                f"{what}: the harness {harness} of {role} would run the policy's commands on this "
                "machine; name a file whose [env." + role + ".runtime] has type docker, podman or "
                "apptainer, or choose the harness null"
            )


def check(name: str) -> None:
    """Raises UserError if the package is not installed, or if it cannot load the environment."""
    if importlib.util.find_spec("verifiers") is None:
        raise UserError(
            f"task.environment={PREFIX}{name} needs the package verifiers, which is not installed: "
            "pip install verifiers uv"
        )
    read_settings(name)


class Rows:
    """The rows of the tasks of a taskset, read on demand."""

    def __init__(self, name: str) -> None:
        from verifiers.v1.utils.loaders import load_taskset

        taskset = load_taskset(read_settings(name).taskset)
        self.is_endless = not taskset.bounded
        self._read: list[dict[str, JsonValue]] = []
        self._rest: Iterator[Any] = iter(taskset)

    def first(self, count: int | None) -> list[dict[str, JsonValue]]:
        """Returns the rows of the first `count` tasks, of all tasks if None."""
        wanted = None if count is None else max(count - len(self._read), 0)
        for task in itertools.islice(self._rest, wanted):
            self._read.append(task.data.model_dump(mode="json", exclude_none=True))
        return self._read[:count]


@functools.cache
def rows_of(name: str) -> Rows:
    """Returns the rows of an environment, cached in this process."""
    return Rows(name)


@functools.cache
def train_rows(name: str) -> list[dict[str, JsonValue]] | None:
    """Returns the training rows, None if the taskset has no end."""
    rows = rows_of(name)
    if rows.is_endless:
        return None
    return [row for index, row in enumerate(rows.first(None)) if not is_held_out(index)]


def endless_train_rows(name: str, indices: range) -> list[dict[str, JsonValue]]:
    """Returns the training rows with these indices, for a taskset without end."""
    # Skip the held-out tasks, one of every HELD_OUT.
    places = [index + index // (HELD_OUT - 1) for index in indices]
    rows = rows_of(name).first(places[-1] + 1)
    return [rows[place] for place in places]


def eval_rows(name: str, count: int) -> list[dict[str, JsonValue]]:
    """Returns at most `count` held-out rows."""
    rows = rows_of(name).first(count * HELD_OUT)
    return [row for index, row in enumerate(rows) if is_held_out(index)][:count]


def is_held_out(index: int) -> bool:
    """Returns whether the task with this index is for evaluation."""
    return index % HELD_OUT == HELD_OUT - 1
