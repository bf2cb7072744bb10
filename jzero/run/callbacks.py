"""Calls user-defined functions at the events of a run: `train.callbacks`.

    def notify(event, step, metrics, workdir):
        if event == "evaluation":
            print(step, metrics["eval/accuracy"])

    python -m jzero.main ... --config.train.callbacks=my.py:notify

A function declares only the parameters that it needs:

    event     "step", "evaluation", "checkpoint" or "end"
    step      the RL step, or the step of fine-tuning
    metrics   of the step or the evaluation; the path of the checkpoint; the summary at the end
    workdir   a pathlib.Path

Functions are called on the first process, after the files of the event are written. They get
copies, so they cannot change a number of the run. The run waits for them. A function that raises is
reported once for each event, and the run continues.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jzero.errors import UserError
from jzero.hosts import processes
from jzero.rewards import user_functions
from jzero.types import JsonValue

EVENTS = ("step", "evaluation", "checkpoint", "end")
PARAMETERS = ("event", "step", "metrics", "workdir")


def check_callbacks(names: Sequence[str]) -> None:
    """Raises UserError if a function of train.callbacks does not exist or cannot be called."""
    for name in names:
        _parameters_of(name, _find(name))


class Callbacks:
    """The functions of train.callbacks of one run."""

    def __init__(self, names: Sequence[str], workdir: Path) -> None:
        self._workdir = workdir
        self._functions = {name: _find(name) for name in names}
        self._parameters = {
            name: _parameters_of(name, function) for name, function in self._functions.items()
        }
        self._reported: set[tuple[str, str]] = set()

    def call(self, event: str, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Calls every function with a copy of `metrics`."""
        assert event in EVENTS, f"{event=}"
        if not processes.is_first_process():
            return
        for name, function in self._functions.items():
            values = {
                "event": event,
                "step": step,
                "metrics": copy.deepcopy(dict(metrics)),
                "workdir": self._workdir,
            }
            chosen = {key: values[key] for key in self._parameters[name]}
            try:
                function(**chosen)
            except Exception as error:  # user-defined code may raise anything
                self._report(name, event, step, error)

    def _report(self, name: str, event: str, step: int, error: Exception) -> None:
        if (name, event) in self._reported:
            return
        self._reported.add((name, event))
        processes.print_once(
            f"step {step}: train.callbacks={name} failed at the event {event}: "
            f"{type(error).__name__}: {error}. The run continues; later failures of this kind are "
            "not shown"
        )


def _find(name: str) -> Callable[..., object]:
    try:
        return user_functions.find_function(name)
    except Exception as error:  # the import of a user-defined module may raise anything
        reason = user_functions.reason_of_import(name, error)
        raise UserError(
            f"train.callbacks={name}: no such module:function or FILE.py:function ({reason})"
        ) from None


def _parameters_of(name: str, function: Callable[..., object]) -> list[str]:
    """Returns the PARAMETERS that a function takes. Raises UserError if it requires others."""
    chosen = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return list(PARAMETERS)
        if parameter.name in PARAMETERS:
            chosen.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise UserError(
                f"train.callbacks={name}: unknown parameter {parameter.name}; a callback may take "
                f"{', '.join(PARAMETERS)}"
            )
    return chosen
