"""Environment classes with public methods as tools, as in TRL's `environment_factory`.

    task.name=environment task.environment=FILE.py:Class

    class Counter:
        def reset(self, **row):
            self.count = 0

        def add(self, step: int) -> int:
            \"\"\"Adds to the counter.

            Args:
                step: How much.
            \"\"\"
            self.count += step
            return self.count

Such a class has no method `step`. Each episode creates an instance without arguments. `reset` gets
the columns of the row by name, and returns text or None. The text is appended to the last message
of the column `prompt`; without that column the text is the prompt. Rewards come from
`task.reward.functions`, which get the instances as `environments` (`trl_rewards`).
"""

from __future__ import annotations

import copy
import functools
import inspect

from jzero.environments.tools.toolbox import public_methods
from jzero.errors import UserError, quoted
from jzero.json_values import as_list, as_object, as_text
from jzero.problems import bounds
from jzero.rewards.user_functions import find_function
from jzero.types import JsonValue, Prompt

PROMPT = "prompt"  # the column


@functools.cache
def tool_class(name: str) -> type | None:
    """Returns the class "module:Class" if its methods are tools, None for everything else.

    Such a class has a method `reset`, no method `step`, and at least one other public method.
    """
    if not name:
        return None
    try:
        found = find_function(name)
    except Exception:  # any error of the user's module; `environment_task.check` reports it
        return None
    # A class with `step` is an environment that takes responses itself.
    if not inspect.isclass(found) or not callable(getattr(found, "reset", None)):
        return None
    if hasattr(found, "step") or not public_methods(found):
        return None
    return found


@functools.cache
def is_tool_class(name: str) -> bool:
    """Returns whether `task.environment=name` is a class with methods as tools."""
    return tool_class(name) is not None


class Resetting:
    """Gives an instance the methods of a user-defined environment, to reset it for a prompt."""

    def __init__(self, instance: object) -> None:
        self._instance = instance

    def reset(self, row: dict[str, JsonValue], seed: int) -> Prompt:
        """Returns the prompt of an episode. `seed` is not used: `reset` gets only the row."""
        return first_prompt(row, self._instance.reset(**row))  # type: ignore[attr-defined]

    def step(self, response: str) -> tuple[None, float, bool]:
        """Ends the episode. Responses to tool episodes are handled by `episodes.step` instead."""
        return None, 0.0, True

    def close(self) -> None:
        """Calls the method `close` of the instance, if there is one."""
        end(self._instance)


def adapt(instance: object) -> object:
    """Wraps an instance without a method `step` in `Resetting`."""
    return instance if hasattr(instance, "step") else Resetting(instance)


def first_prompt(row: dict[str, JsonValue], observation: object) -> JsonValue:
    """Returns the prompt of an episode from the column `prompt` and the observation of `reset`.

    Raises:
        TypeError: `reset` returned something other than text or None.
        UserError: both the column and the observation are missing.
    """
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"reset returned {quoted(observation)}: it has to be text or None")
    prompt = row.get(PROMPT)
    if prompt is None:
        if not observation:
            raise UserError(
                f"reset returned nothing, and the row has no column {PROMPT}: one of them has to "
                "say what the policy reads first"
            )
        return observation
    if not observation:
        return prompt
    if isinstance(prompt, str):
        return prompt + observation
    *before, last = map(as_object, as_list(prompt, PROMPT))
    # As TRL does, without a separator.
    return [*before, {**last, "content": as_text(last["content"]) + observation}]


def begin(name: str, gold: JsonValue, most_bytes: int) -> object:
    """Creates an instance of a tool class and resets it with the row; None for another class.

    Raises:
        ValueError: `reset` returned another prompt than in the first reset with this row.
    """
    kind = tool_class(name)
    if kind is None:
        return None
    # The prompt was made by another instance in a first reset. This instance must agree with it.
    # `reset` gets a copy, because it may change the row.
    instance = kind()
    first = as_object(gold, "gold")
    row = as_object(first["row"], "row")
    returned = first_prompt(row, instance.reset(**copy.deepcopy(row)))
    prompt = bounds.read_prompt(returned, most_bytes, "the prompt of reset")
    if prompt != first["observation"]:
        raise ValueError(
            f"reset has to be a function of the row: it said {quoted(prompt)}, and before "
            f"{quoted(first['observation'])}"
        )
    return instance


def end(instance: object) -> None:
    """Calls the method `close` of an instance, if there is one."""
    close = getattr(instance, "close", None)
    if close is not None:
        close()
