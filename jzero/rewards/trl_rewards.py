"""Runs unmodified TRL reward functions: they take lists of all completions, and return a list.

    def reward(completions, answer, **kwargs) -> list[float]: ...
    async def reward(prompts, completions, completion_ids, trainer_state, **kwargs): ...
    def reward(environments, **kwargs) -> list[float]: ...

A function has TRL's form if a parameter has a name in NAMES, or if it takes `**kwargs` and no
parameter has one of jzero's names. Its lists have one entry for each episode of a batch
(`task.reward.batch`): `prompts`, `completions`, `completion_ids`, and each column of the rows.
If the prompt is a list of messages, so are the entries of `prompts` and `completions`.

A function with the parameter `environments` is called once per episode, with lists of length one,
because an instance never leaves the process that plays its episode. The run logs this at its start.

Written for TRL 1.16. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from jzero import terminal
from jzero.errors import quoted
from jzero.json_values import as_list, as_messages, as_object, as_prompt, from_fields
from jzero.problems import bounds
from jzero.types import JsonValue, Problem, Prompt

ENVIRONMENTS = "environments"
# Arguments that TRL's trainer passes besides the columns of the rows.
FROM_TRAINER = ("trainer_state", "log_extra", "log_metric")
NAMES = ("prompts", "completions", "completion_ids", ENVIRONMENTS, *FROM_TRAINER)
# Columns that TRL does not pass, because the lists in NAMES replace them.
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# The values of `user_functions.episode_values` that a function needs if it is called per episode.
ASKED = ("prompt", "messages", "row")
# The lists that a function needs if it is called with a whole batch.
ASKED_IN_LISTS = ("prompts", "conversations", "rows")


@dataclass(frozen=True)
class TrainerState:
    """The argument `trainer_state`: a subset of the fields of transformers' `TrainerState`.

    `global_step` is 0 before the first step and in commands that do not train.
    """

    global_step: int = 0  # finished RL steps
    max_steps: int = 0  # RL steps of the run; 0 outside of a run
    epoch: float | None = 0.0  # passes over the problems; None if the problems have no end


@dataclass
class Logs:
    """The metrics that a function logs with `log_metric`; `log_extra` is not supported."""

    metrics: dict[str, float] = field(default_factory=dict)

    def log_metric(self, name: str, value: object) -> None:
        """Records a number as the metric reward/<function>.<name>."""
        self.metrics |= bounds.read_parts({name: value})

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Prints that the column is dropped: samples.jsonl has no additional columns."""
        terminal.say(
            f"log_extra({column!r}): samples.jsonl has no such columns; the values are left out"
        )


def has_form(signature: inspect.Signature) -> bool:
    """Returns whether a parameter has a name in NAMES."""
    return not set(NAMES).isdisjoint(signature.parameters)


def needs_instances(signature: inspect.Signature) -> bool:
    """Returns whether a function is called per episode, in the process of the environment."""
    return ENVIRONMENTS in signature.parameters


def takes_all(signature: inspect.Signature) -> bool:
    """Returns whether a function has a parameter like `**kwargs`."""
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )


def required_columns(signature: inspect.Signature) -> list[str]:
    """Returns the required parameters that only a column of the row can fill."""
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in NAMES
    ]


def completion(prompt: Prompt, conversation: Sequence[dict[str, str]]) -> JsonValue:
    """Returns the completion of an episode: messages, or text if the prompt is text.

    `conversation` is the whole episode as chat messages, the prompt included. The text of several
    turns includes the replies between them, without the tokens of a chat template.
    """
    # A text prompt is the single message at the start of the conversation.
    if isinstance(prompt, str):
        return "".join(message["content"] for message in conversation[1:])
    return list(conversation[len(prompt) :])


def columns_of(rows: Sequence[Mapping[str, JsonValue] | None]) -> dict[str, list[JsonValue]]:
    """Returns each column of the rows as a list, with None for rows that lack the column.

    Rows of several data sets may have different columns, as in `datasets.concatenate_datasets`.
    """
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row or {})
    return {
        name: [(row or {}).get(name) for row in rows] for name in names if name not in NOT_COLUMNS
    }


def arguments(
    function: Callable[..., object],
    values: Mapping[str, JsonValue],
    logs: Logs,
) -> dict[str, object]:
    """Returns the keyword arguments of a call with the lists of a batch.

    Args:
        function: has TRL's form.
        values: `prompts`, `completions`, `completion_ids` if they are known, `rows`, and
            `trainer_state` as a dict.
        logs: receives the metrics that the function logs.

    Raises:
        TypeError: a required parameter of the function has no value.
    """
    rows = [None if row is None else as_object(row) for row in as_list(values["rows"], "rows")]
    known: dict[str, object] = dict(columns_of(rows))
    for name in ("prompts", "completions", "completion_ids"):
        if name in values:
            known[name] = values[name]
    known |= _from_trainer(from_fields(TrainerState, values["trainer_state"]), logs)
    return _chosen(function, known)


def call_for_episode(
    function: Callable[..., object],
    values: Mapping[str, object],
) -> tuple[object, Logs]:
    """Calls a function for one episode, with lists of length one.

    Args:
        function: has the parameter `environments`.
        values: `prompt`, `messages`, `row`, `response`, and `environments` if there is one.

    Returns:
        The result, an awaitable if the function is async and else a list for `only_entry`, and the
        logged metrics.

    Raises:
        TypeError: a required parameter of the function has no value.
        Exception: any exception of the function.
    """
    row = None if values["row"] is None else as_object(values["row"], "row")
    prompt = as_prompt(values["prompt"])
    messages = as_messages(values["messages"])
    logs = Logs()
    known: dict[str, object] = dict(columns_of([row]))
    known["prompts"] = [prompt]
    known["completions"] = [completion(prompt, messages)]
    if ENVIRONMENTS in values:
        known[ENVIRONMENTS] = list(values[ENVIRONMENTS])  # type: ignore[call-overload]
    known |= _from_trainer(TrainerState(), logs)
    del known["trainer_state"]  # the process that plays an episode does not know the step
    return function(**_chosen(function, known)), logs


def only_entry(result: object) -> object:
    """Returns the reward in a list of length one.

    Raises:
        TypeError: `result` is something else.
    """
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise TypeError(f"returned {quoted(result)}: it has to be a list with one number")
    return result[0]


def lists_of(
    problems: Sequence[Problem],
    conversations: Sequence[Sequence[dict[str, str]]],
    completion_ids: Sequence[list[int] | None],
    state: TrainerState,
) -> dict[str, JsonValue]:
    """Returns the argument `values` of `arguments` as JSON, for N episodes."""
    pairs = zip(problems, conversations, strict=True)
    lists: dict[str, JsonValue] = {
        "prompts": [problem.prompt for problem in problems],
        "completions": [completion(problem.prompt, messages) for problem, messages in pairs],
        "rows": [problem.row for problem in problems],
        "trainer_state": asdict(state),
    }
    # Token ids are passed for all episodes or for none.
    if all(ids is not None for ids in completion_ids):
        lists["completion_ids"] = list(completion_ids)
    return lists


def _from_trainer(state: TrainerState, logs: Logs) -> dict[str, object]:
    return {"trainer_state": state, "log_extra": logs.log_extra, "log_metric": logs.log_metric}


def _chosen(function: Callable[..., object], known: Mapping[str, object]) -> dict[str, object]:
    """Returns the values that a function has parameters for; all of them if it takes `**kwargs`."""
    signature = inspect.signature(function)
    # Name a missing value here: Python's own TypeError would not list the known names.
    for parameter in signature.parameters.values():
        is_collection = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_required = parameter.default is parameter.empty and not is_collection
        if is_required and parameter.name not in known:
            raise TypeError(
                f"asks for {parameter.name}, which is neither a column of the row nor one of "
                f"{', '.join(NAMES)} that is known here"
            )
    if takes_all(signature):
        return dict(known)
    return {name: known[name] for name in signature.parameters if name in known}
