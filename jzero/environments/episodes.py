"""The store of running episodes: an episode's state stays in the process that runs the episode.

    episodes = Episodes(max_episodes=4096)
    result = run_calls(episodes.step(name, responses, build, take))
    run_calls(episodes.end(name))

A grader process has a store for environments and a store for tools, and an event loop has a store
for environments (`asyncio_environments`). An episode that is missing from the store is rebuilt: its
process has ended, or the run has resumed from a checkpoint.

Code that calls user-defined methods is a generator: it yields the return value of a method and is
sent the awaited value. Grader processes, which await outside of an event loop, and
`asyncio_environments`, which awaits inside an event loop, therefore run the same code. In a grader
process no event loop may run during a call, because a synchronous method may start an event loop
itself, for example with `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from jzero.errors import quoted
from jzero.rewards.user_functions import wait_for
from jzero.types import JsonValue, Problem, Turns

T = TypeVar("T")
Calls = Generator[object, object, T]


class Episode(Protocol):
    """The state of an episode, such as an environment or an interpreter."""

    responses: list[str]  # the responses that it has received

    def close(self) -> Calls[None]:
        """Releases the state of the episode."""
        ...


EpisodeType = TypeVar("EpisodeType", bound=Episode)


class _Kept(NamedTuple, Generic[EpisodeType]):
    episode: EpisodeType
    last_used: float  # by time.monotonic


class Episodes(Generic[EpisodeType]):
    """The running episodes of a process or an event loop by name, least recently used first."""

    def __init__(self, max_episodes: int, idle_seconds: float = math.inf) -> None:
        """Makes an empty store.

        The store closes the least recently used episodes above `max_episodes`, and episodes that
        are unused for `idle_seconds`. A closed episode is rebuilt if it continues.
        """
        self._max_episodes = max_episodes
        self._idle_seconds = idle_seconds
        self._kept: OrderedDict[str, _Kept[EpisodeType]] = OrderedDict()

    def get(self, name: str) -> EpisodeType | None:
        """Returns an episode, None if it is not in the store."""
        kept = self._kept.get(name)
        return kept.episode if kept is not None else None

    def step(
        self,
        name: str,
        responses: Sequence[str],
        build: Callable[[], Calls[EpisodeType]],
        take: Callable[[EpisodeType], Calls[T]],
    ) -> Calls[T]:
        """Takes a step of an episode. The episode stays in the store until `end` or an error.

        Args:
            name: unique among the running episodes.
            responses: the responses that the episode has received before this step.
            build: makes an episode that has received `responses`.
            take: takes the step.

        Raises:
            Exception: any exception of `build` or `take`. The episode is closed and removed.
        """
        yield from self._close_oldest(time.monotonic() - self._idle_seconds)
        # Reuse the episode only if it has received exactly the earlier responses. The first step
        # always builds a new episode. The episode is out of the store during the step: it returns
        # to the end of the order, and stays out if the step fails.
        kept = self._kept.pop(name, None)
        if kept is not None and responses and kept.episode.responses == list(responses):
            episode = kept.episode
        else:
            if kept is not None:
                yield from close_quietly(kept.episode)
            episode = yield from build()
        result = yield from closed_on_error(episode, take(episode))
        self._kept[name] = _Kept(episode, time.monotonic())
        yield from self._close_oldest()
        return result

    def end(self, name: str) -> Calls[None]:
        """Closes an episode and removes it from the store, if it is in the store."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            yield from kept.episode.close()

    def close(self) -> Calls[None]:
        """Closes all episodes."""
        while self._kept:
            _, kept = self._kept.popitem()
            yield from close_quietly(kept.episode)

    def _close_oldest(self, used_before: float = -math.inf) -> Calls[None]:
        """Closes the episodes above the maximum number, or last used before `used_before`."""
        while self._kept:
            # The first episode is the least recently used: if it stays, all others stay.
            name, kept = next(iter(self._kept.items()))
            if kept.last_used >= used_before and len(self._kept) <= self._max_episodes:
                return
            del self._kept[name]
            # The error of another episode must not fail the current step.
            yield from close_quietly(kept.episode)


def close_quietly(episode: Episode) -> Calls[None]:
    """Closes an episode and ignores errors."""
    with contextlib.suppress(Exception):
        yield from episode.close()


def closed_on_error(episode: Episode, calls: Calls[T]) -> Calls[T]:
    """Runs calls of an episode and closes the episode if they fail.

    Raises the first error; an error of closing is ignored.
    """
    try:
        return (yield from calls)
    except Exception:
        yield from close_quietly(episode)
        raise


def check_same(who: str, reply: JsonValue, earlier_reply: JsonValue) -> None:
    """Raises ValueError if the reply of a rebuilt episode differs from the original reply."""
    if reply != earlier_reply:
        raise ValueError(
            f"an episode that is built again has to go the same way: {who} said {quoted(reply)}, "
            f"and before {quoted(earlier_reply)}"
        )


def values_for_worker(problem: Problem, sample_index: int, earlier: Turns) -> dict[str, JsonValue]:
    """Returns the values besides the response that a grader process needs for a turn."""
    turns = [(text, vars(grade) if grade else None) for text, grade in earlier]
    return {"episode": f"{problem.id}/{sample_index}", "turns": turns}


# -- Calls in a process ----------------------------------------------------------------------------


def run_calls(calls: Calls[T]) -> T:
    """Runs calls one after the other and waits for each in the event loop of this process."""
    try:
        returned = next(calls)
        while True:
            try:
                value = _awaited(returned)
            except Exception as error:
                # The calls may clean up after the error, as `closed_on_error` does.
                returned = calls.throw(error)
            else:
                returned = calls.send(value)
    except StopIteration as end:
        return end.value


@functools.cache
def process_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process.

    All calls share one loop, because an instance may keep connections that belong to the loop.
    """
    return asyncio.new_event_loop()


def _awaited(result: object) -> object:
    if not inspect.isawaitable(result):
        return result
    return process_loop().run_until_complete(wait_for(result))
