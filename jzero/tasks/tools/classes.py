"""Environment classes whose public methods are tools: those of TRL's `environment_factory`.

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

Such a class has no method `step`. It is made without arguments for each episode. `reset` gets the
columns of the row by name, and returns text or None. The prompt is the column `prompt`, to whose
last message the text is added; without that column the text is the prompt. Rewards come from
`task.reward.functions`, which get the instances as `environments` (`trl_rewards`).
"""

from __future__ import annotations

import functools
import inspect

from jzero.errors import UserError
from jzero.tasks.tools.toolbox import public_methods
from jzero.tasks.user_functions import find_function
from jzero.types import JsonValue, Prompt

PROMPT = "prompt"  # the column


@functools.cache
def tool_class(name: str) -> type | None:
    """Returns the class "module:Class" if its methods are tools, None for everything else.

    Such a class has no method `step`, but others beside `reset`.
    """
    if not name:
        return None
    try:
        found = find_function(name)
    except Exception:  # the import of the user's module; `environment.check` says what is wrong
        return None
    if not inspect.isclass(found) or not callable(getattr(found, "reset", None)):
        return None
    if hasattr(found, "step") or not public_methods(found):
        return None
    return found


def is_tool_class(name: str) -> bool:
    """Returns whether `task.environment=name` is a class whose methods are tools."""
    return tool_class(name) is not None


class Resetting:
    """An instance of such a class as `jzero.tasks.environment` resets it for a prompt."""

    def __init__(self, instance: object) -> None:
        self._instance = instance

    def reset(self, row: dict[str, JsonValue], seed: int) -> Prompt:
        """Returns the prompt of an episode; it is no function of `seed`, unless the row has one."""
        return first_prompt(row, self._instance.reset(**row))  # type: ignore[attr-defined]

    def step(self, response: str) -> tuple[None, float, bool]:
        """Ends the episode: responses go to `episodes.step` instead."""
        return None, 0.0, True

    def close(self) -> None:
        """Ends the instance."""
        end(self._instance)


def adapt(instance: object) -> object:
    """Returns an environment with a method `step` as it is, and others as `Resetting`."""
    return instance if hasattr(instance, "step") else Resetting(instance)


def first_prompt(row: dict[str, JsonValue], observation: object) -> Prompt:
    """Returns what the policy reads first.

    Raises:
        TypeError: `reset` returned something else than text or None.
        UserError: there is neither a column nor an observation.
    """
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"reset returned {observation!r:.80}: it has to be text or None")
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
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + observation}]


def begin(name: str, gold: JsonValue) -> object:
    """Returns an instance of the class that has been reset with the row; None for another class.

    Raises:
        ValueError: `reset` says something else than before.
    """
    kind = tool_class(name)
    if kind is None:
        return None
    instance = kind()
    prompt = first_prompt(gold["row"], instance.reset(**gold["row"]))
    if prompt != gold["observation"]:
        raise ValueError(
            f"reset has to be a function of the row: it said {prompt!r:.80}, and before "
            f"{gold['observation']!r:.80}"
        )
    return instance


def end(instance: object) -> None:
    """Calls the method `close` of an instance that has one."""
    close = getattr(instance, "close", None)
    if close is not None:
        close()
