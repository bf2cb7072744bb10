"""Reward functions of TRL, unmodified: they take lists, and return a list.

    def reward(completions, answer, **kwargs) -> list[float]: ...
    def reward(environments, **kwargs) -> list[float]: ...

A function that asks for one of BATCHED is one of TRL's. It is called with one episode at a time, in
lists of one: `prompts`, `completions`, `environments`, and each column of the row. Prompts and
completions are lists of messages where the prompt is. Imports no jax: grader processes load this
module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from jzero.types import JsonValue

BATCHED = ("prompts", "completions", "environments")
# What `user_functions.episode_values` sends for it.
ASKED = ("prompt", "messages", "row")


def is_batched(signature: inspect.Signature) -> bool:
    """Returns whether a function takes lists, as TRL's do."""
    return not set(BATCHED).isdisjoint(signature.parameters)


def call(function: Callable[..., object], values: Mapping[str, object]) -> object:
    """Returns what a function of TRL's says of one episode.

    Args:
        function: takes lists.
        values: `prompt`, `messages`, `row`, `response`, and `environments` if there is one.

    Raises:
        TypeError: the function has a parameter that there is no value for, or does not return a
            list of one.
        Exception: whatever the function raises.
    """
    known = _lists(values)
    arguments = {}
    takes_all = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.name in known:
            arguments[parameter.name] = known[parameter.name]
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"asks for {parameter.name}, which is neither a column of the row nor one of "
                f"{', '.join(BATCHED)} that is known here"
            )
    result = function(**(known if takes_all else arguments))
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise TypeError(f"returned {result!r:.80}: it has to be a list with one number")
    return result[0]


def _lists(values: Mapping[str, object]) -> dict[str, list[object]]:
    row: JsonValue = values["row"]
    known = {name: [value] for name, value in (row or {}).items()}
    prompt: JsonValue = values["prompt"]
    messages: JsonValue = values["messages"]
    known["prompts"] = [prompt]
    if isinstance(prompt, str):
        known["completions"] = [values["response"]]
    else:
        known["completions"] = [messages[len(prompt) :]]
    if "environments" in values:
        known["environments"] = list(values["environments"])  # type: ignore[call-overload]
    return known
