"""jzero in Python: `jzero.train(...)` and `jzero.evaluate(...)`.

    import jzero

    def reward(response, gold):
        return float(gold["answer"] in response)

    run = jzero.train(model="Qwen/Qwen2.5-0.5B-Instruct", data="problems.jsonl", reward=reward)
    print(run.model, jzero.evaluate(run.workdir))

Both functions do what the commands `jzero train` and `jzero evaluate` do, in this process. Mistakes
raise `jzero.errors.UserError`. The first call sets up the devices of the process.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jzero import cli
from jzero.commands.evaluate import (
    SuiteSummary,
    check,
    defaults,
    held_out_problems,
    load_suites,
    run_on,
    settings_of_run,
)
from jzero.config import Config, put_value, validate
from jzero.config.data_sources import split_sources
from jzero.config.flags import check_name
from jzero.errors import UserError
from jzero.files import JsonObject, write_atomic
from jzero.main import default_workdir, start
from jzero.run import buckets
from jzero.run.finished import find_model
from jzero.sizing import recipe
from jzero.sizing.command import prepare, run_name
from jzero.sizing.flags import Request, Wishes
from jzero.sizing.reward_source import RewardFunction, names_of_rewards
from jzero.types import JsonValue

Rows = Sequence[Mapping[str, JsonValue]]
Reward = str | RewardFunction
Settings = Mapping[str, object]  # {"train.steps": 50}
ROWS_FILE = "data.jsonl"  # in the workdir


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    workdir: Path
    recipe: Path  # python -m jzero.main --config RECIPE is the same run
    model: Path | None  # the trained model; None for a run that was stopped
    summary: JsonObject = field(repr=False)  # as in summary.json


def train(
    model: str | Path = "",
    data: str | Path | Rows | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    reward_weights: Sequence[float] = (),
    algorithm: str = "",
    environment: str = "",
    eval_data: str | Path = "",
    lora: bool = False,
    minutes: float = 0.0,
    workdir: str | Path | None = None,
    settings: Settings | None = None,
) -> Run:
    """Trains a model by reinforcement learning, and returns the run.

    Lengths, batch, decoder, learning rate and checkpoints are chosen from the model, the data and
    the machine. The choices are printed with their reasons, and written to WORKDIR/recipe.py.
    `train(workdir=...)` continues a run that was stopped.

    Args:
        model: directory or hub id of a model. It is needed for a new run.
        data: file, directory or hub id of the problems, or a list of rows.
        reward: a function of `response`, `gold` and `task`, a function for TRL's GRPOTrainer, or
            "FILE.py:function"; or a list of these, which are added. None: the grader compares
            answers, or runs programs with the tests of the data.
        reward_weights: a weight for each reward; (): 1 for all.
        algorithm: name of a preset, such as "dr_grpo". "": GRPO.
        environment: "FILE.py:Class", an environment to train in. `data` then has the rows of its
            episodes, or is None.
        eval_data: held-out problems. "": the split test of `data`, or a tenth of its rows, at most
            256 (CPU: 32).
        lora: trains a LoRA adapter instead of the whole model.
        minutes: ends the run before so many minutes, with a checkpoint. 0: no limit.
        workdir: directory of the run, or an address such as gs://bucket/run, whose local directory
            is then in the result. None: runs/MODEL-DATA-TIME.
        settings: further settings by name, such as {"train.steps": 50}. They take precedence over
            the choices.

    Raises:
        UserError: an argument is wrong, or the run does not fit the machine.
    """
    set_up_devices()
    values = dict(settings or {})
    check_names(values)
    continues = workdir is not None and not model
    if data is None and not environment and not continues:
        raise UserError("give data=, the problems to train on, or environment='FILE.py:Class'")
    source = "" if data is None else str(data) if isinstance(data, str | Path) else "rows"
    directory = Path(workdir) if workdir is not None else None
    if directory is None:
        wishes = Wishes(
            model=str(model), data=source, environment=environment, lora=lora, algorithm=algorithm
        )
        directory = default_workdir(run_name(wishes))

    def apply(config: Config) -> Config:
        return with_values(config, values)

    with buckets.open_workdir(directory) as directory:
        if data is not None and not isinstance(data, str | Path):
            # The recipe names this file, so that a resumed run has the same rows.
            source = str(write_rows(data, directory))
        names = names_of_rewards(list_of_rewards(reward), directory)
        wishes = Wishes(
            model=str(model),
            data=source,
            rewards=names,
            reward_weights=tuple(reward_weights),
            algorithm=algorithm,
            environment=environment,
            eval_data=str(eval_data),
            lora=lora,
            minutes=minutes,
        )
        request = Request(wishes, directory, frozenset(values), apply)
        chosen = prepare(request, directory)
        summary = start(chosen, directory)
    exported = summary["export"]
    return Run(
        workdir=directory,
        recipe=directory / recipe.FILE,
        model=None if exported is None else Path(exported),
        summary=summary,
    )


def evaluate(
    run: str | Path,
    *,
    suite: str = "",
    out: str | Path | None = None,
    settings: Settings | None = None,
) -> dict[str, SuiteSummary]:
    """Evaluates the newest model of a run, or any model, and returns the results by problem set.

    `evaluate(workdir)["held-out"]["kinds"]["greedy"]["accuracy"]` is the share of held-out problems
    that the model answers correctly with greedy decoding.

    Args:
        run: workdir of a run, whose prompts, lengths and grader are used; or, with `suite`, the
            directory or hub id of a model.
        suite: comma-separated suites, or name=FILE. "": the held-out problems of the run.
        out: directory for all responses. None: runs/eval-TIME.
        settings: settings that replace those of the run, such as {"eval.samples": 4}.

    Raises:
        UserError: an argument is wrong, or there is nothing to evaluate.
    """
    set_up_devices()
    found = find_model(str(run))
    if found.settings is not None:
        config = settings_of_run(found, found.settings)
    elif suite:
        config = found.with_model(defaults(found.path))
    else:
        raise UserError(f"{run} is not the workdir of a run: give suite=, such as mine=FILE")
    values = dict(settings or {})
    check_names(values)
    config = with_values(config, values)
    check(config)
    specs = split_sources(suite)
    problem_sets = load_suites(specs, config) if specs else held_out_problems(config)
    directory = Path(out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
    return run_on(problem_sets, directory, config)


def list_of_rewards(reward: Reward | Sequence[Reward] | None) -> list[Reward]:
    """Returns the rewards of the argument `reward` of `train`."""
    if reward is None:
        return []
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        return [reward]
    return list(reward)


def set_up_devices() -> None:
    """Sets up the devices of this process, unless it has used them already."""
    # JAX refuses to change the number of CPU devices after their first use.
    with contextlib.suppress(RuntimeError):
        cli.start_jax([])


def write_rows(rows: Rows, directory: Path) -> Path:
    """Writes rows to a file in `directory` and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ROWS_FILE
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"data: a row is not an object of JSON values ({error})") from None
    if not lines:
        raise UserError("data has no rows")
    write_atomic(path, "".join(lines))
    return path


def check_names(values: Settings) -> None:
    """Raises UserError if a name is not a setting."""
    for name in values:
        check_name(name, f"settings={name}")


def with_values(config: Config, values: Settings) -> Config:
    """Returns the config with these values, in place. Raises UserError for a wrong value."""
    # Parts before their arguments, in any order of the names.
    for name in sorted(values, key=lambda name: name.count(".")):
        put_value(config, name, values[name])
    validate(config)
    return config
