"""Runs a request of `jzero train`: reads model and data, chooses settings, writes the recipe."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jzero import cli, config, terminal
from jzero import main as jzero_main
from jzero.config import Config
from jzero.config.data_sources import read_source
from jzero.errors import UserError
from jzero.hosts import peers, processes
from jzero.model import adapters
from jzero.model.hub import public_name
from jzero.planning.chips import GIB
from jzero.planning.disk import GB
from jzero.planning.machines import Machine, find_machine, plan_on
from jzero.problems import problem_sets
from jzero.rewards import rewards, user_functions
from jzero.run import buckets
from jzero.run.workdir import check_directory
from jzero.sizing import choices, recipe
from jzero.sizing.choices import Model, Sheet
from jzero.sizing.data import (
    Data,
    HeldOut,
    absolute_source,
    held_out_rows,
    read_data,
    read_environment,
)
from jzero.sizing.flags import HELD_OUT, Request, Wishes, check_wishes, shown_weights
from jzero.tasks.problem_checks import check_problems

HELD_OUT_FILE = "held_out.jsonl"  # in the workdir


def run(request: Request, command: str) -> None:
    """Runs the request of a command line."""
    with cli.user_errors():
        peers.check_same_start({"the command": command})
        workdir = request.workdir
        if workdir is None:
            name = run_name(with_absolute_paths(request.wishes))
            workdir = jzero_main.default_workdir(name)
        with buckets.open_workdir(workdir) as directory:
            settings = prepare(request, directory)
            if not request.is_dry:
                jzero_main.start(settings, directory)


def prepare(request: Request, workdir: Path) -> Config:
    """Chooses the settings of a run, prints them, and writes its recipe.

    In a workdir that has a recipe already, the run continues with that recipe. Raises UserError for
    a mistake, and for a run that cannot start.
    """
    wishes = with_absolute_paths(request.wishes)
    # The files of the choices are written before the run checks its workdir.
    check_directory(workdir)
    if (workdir / recipe.FILE).exists():
        return resume(request, wishes, workdir)
    if not wishes.model and workdir.exists():
        raise UserError(
            f"--workdir={workdir} has no {recipe.FILE} of jzero train: continue its run with the "
            "command that started it, or give --model and --data for a new run"
        )
    check_wishes(wishes)
    settings = request.apply(choices.with_algorithm(Config(name=run_name(wishes)), wishes))
    given = request.given
    if wishes.rewards:
        # Before the data and the model are read, which may take minutes of downloads.
        rewards.check_rewards(
            config.RewardConfig(functions=wishes.rewards, weights=wishes.reward_weights)
        )
    if wishes.environment:
        model = choices.read_model(config_of_model(settings, wishes))
        machine = machine_of(request, settings, workdir)
        # The template of the prompts is known before the prompts.
        sheet = Sheet(settings, given)
        choices.choose_environment(sheet, wishes, model, machine)
        data = read_environment(wishes.data, settings.task, settings.train.seed)
    else:
        with terminal.phase("read the data", has_bar=False):
            data = read_data(wishes.data, settings.task)
        model = choices.read_model(config_of_model(settings, wishes))
        machine = machine_of(request, settings, workdir)

    held_out = None
    has_held_out = wishes.eval_data or data.has_test_split or "task.eval_data" in given
    if data.source and not has_held_out:
        rows = held_out_rows(data, HELD_OUT[machine.is_cpu])
        if rows:  # a set with only one question has none
            held_out = HeldOut(str((workdir / HELD_OUT_FILE).absolute()), rows)
    sheet = choices.choose(wishes, settings, given, data, model, machine, held_out)
    with held_out_file(held_out):
        check_choices(sheet.settings, model)
        check_start(sheet.settings, model, request, workdir)
    processes.print_once(describe(sheet, data, model, machine, with_needs=request.is_dry))

    path = workdir / recipe.FILE
    source = wishes.environment.rpartition(":")[2] or public_name(path_of(wishes.data))
    title = f"{public_name(wishes.model)} on {source}."
    processes.write_once(path, recipe.recipe_source(sheet.settings, sheet.choices, title, path))
    processes.print_once(f"recipe {path}")
    return sheet.settings


@contextlib.contextmanager
def held_out_file(held_out: HeldOut | None) -> Iterator[None]:
    """Writes the held-out rows, and deletes the file if the block raises: no run reads it then."""
    if held_out is None:
        yield
        return
    path = Path(held_out.path)
    is_new = not path.parent.exists()
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in held_out.rows]
    processes.write_once(path, "".join(lines))
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # another process has removed it, or uses it
                path.parent.rmdir()
        raise


def check_start(settings: Config, model: Model | None, request: Request, workdir: Path) -> None:
    """Raises UserError if a run with these settings cannot start, by the checks of the run itself.

    A dry run makes all of them. Before other runs, those of the model's parts are left to the run.

    model: the model, if only the files that describe it were downloaded.
    """
    # Not at the top: these imports take time, and mistakes in the flags are reported before.
    from jzero.loops.rl import check_start as check_run
    from jzero.setup import check_task
    from jzero.setup import prepare as prepare_run

    # A machine that is not attached has other devices, whose memory the choices fit.
    if request.machine:
        check_task(settings)
        check_problems(settings.task, settings.train.seed, settings.rollout.num_prompts)
        return
    if model is not None:
        settings = choices.planned_settings(settings, str(model.directory))
    if request.is_dry:
        check_run(settings, workdir)
    else:
        prepare_run(settings, workdir)


def check_choices(settings: Config, model: Model) -> None:
    """Raises UserError for settings that cannot work, before they are written to a recipe."""
    config.validate(settings, is_training=True)
    if settings.model.adapter.rank:
        adapters.check(model.architecture, settings.model.adapter)
    mistakes = list(config.context_mistakes(settings, model.positions))
    if mistakes:
        raise UserError("; ".join(mistakes))


def machine_of(request: Request, settings: Config, workdir: Path) -> Machine:
    """Returns the machine to choose for. Raises UserError if there is none of this name."""
    if not request.machine:
        return choices.this_machine(settings, workdir)
    machine, memory = find_machine(request.machine), settings.memory
    return replace(
        machine,
        device_bytes=memory.device_gib * GIB or machine.device_bytes,
        disk_bytes=memory.disk_gb * GB or machine.disk_bytes,
    )


def resume(request: Request, wishes: Wishes, workdir: Path) -> Config:
    """Returns the settings of the recipe in a workdir, with the flags of the command.

    Raises UserError if the recipe is for another model or other data.
    """
    path = workdir / recipe.FILE
    settings = jzero_main.parse([f"--config={path}"]).settings
    for name, before, wished in recorded_wishes(settings, wishes):
        if before != wished:
            raise UserError(
                f"{name}={wished}: {path} is a run with {before or '(none)'}: continue it with "
                f"--workdir={workdir} as the only flag, or choose another --workdir for a new run"
            )
    settings = request.apply(settings)
    # The limit belongs to the process, not to the run: a resumed process gets its own.
    settings.train.minutes = wishes.minutes or settings.train.minutes
    processes.print_once(f"continues with {path}, which is not chosen again")
    if request.is_dry:
        check_start(settings, None, request, workdir)
    return settings


def recorded_wishes(settings: Config, wishes: Wishes) -> Iterator[tuple[str, str, str]]:
    """Yields the flags of a command that continues a run, with their values in its recipe and now.

    A flag that is left out has no value in the command, and is not yielded.
    """
    task = settings.task
    functions = tuple(task.reward.functions)
    if task.environment:  # the environment's own reward comes first
        functions = functions[1:]
    if wishes.model:
        yield "--model", settings.model.path, wishes.model
    if wishes.data:
        yield "--data", task.data[0].path if task.data else "", path_of(wishes.data)
    if wishes.environment:
        yield "--environment", task.environment, wishes.environment
    if wishes.eval_data:
        yield "--eval", str(task.eval_data), wishes.eval_data
    if wishes.rewards:
        yield "--reward", ",".join(functions), ",".join(wishes.rewards)
    if wishes.reward_weights:
        weights = tuple(task.reward.weights)[-len(wishes.reward_weights) :]
        yield "--reward-weights", shown_weights(weights), shown_weights(wishes.reward_weights)
    if wishes.algorithm:
        yield "--algorithm", settings.algorithm.name, wishes.algorithm
    if wishes.lora:
        yield "--lora", "True" if settings.model.adapter.rank else "False", "True"


def path_of(source: str) -> str:
    """Returns the path of a data source; "" for none."""
    if not source:
        return ""
    return read_source("--data", source).path


def config_of_model(settings: Config, wishes: Wishes) -> Config:
    """Returns the settings with the model of the command."""
    settings.model.path = wishes.model
    return settings


def with_absolute_paths(wishes: Wishes) -> Wishes:
    """Returns the wishes with absolute paths, so that the recipe runs in any directory."""
    return replace(
        wishes,
        model=absolute_source(wishes.model) if wishes.model else "",
        data=absolute_source(wishes.data) if wishes.data else "",
        rewards=tuple(map(with_absolute_file, wishes.rewards)),
        environment=with_absolute_file(wishes.environment),
        eval_data=absolute_source(wishes.eval_data) if wishes.eval_data else "",
    )


def with_absolute_file(name: str) -> str:
    """Returns "FILE.py:NAME" with an absolute path, and other names as they are.

    "my:NAME" is the file my.py of the current directory, unless there is a module my.
    """
    place = user_functions.split_name(name)
    file = place.module
    if not file.endswith(".py"):
        file = user_functions.file_of_module(file) or ""
    if not file:
        return name
    return str(place._replace(module=str(Path(file).expanduser().resolve())))


def run_name(wishes: Wishes) -> str:
    """Returns the name of a run: MODEL-DATA or MODEL-ENVIRONMENT, with -lora for an adapter, and
    the algorithm that was asked for.
    """
    source = wishes.environment.rpartition(":")[2] if wishes.environment else path_of(wishes.data)
    file = Path(source.partition("#")[0])
    end = problem_sets.file_type(file) or file.suffix
    parts = [Path(wishes.model).name, file.name.removesuffix(end)]
    if wishes.lora:
        parts.append("lora")
    if wishes.algorithm:
        parts.append(wishes.algorithm)
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-.")


def describe(sheet: Sheet, data: Data, model: Model, machine: Machine, *, with_needs: bool) -> str:
    """Returns the table of choices, below a line on the model, the data and the machine.

    with_needs: adds the memory, the disk and the hours. A run that starts prints them itself.
    """
    settings = sheet.settings
    given = sorted(sheet.given)
    lines = [
        f"{settings.name}: {model.num_params / 1e6:.1f}M parameters, {data.size}, {machine}",
        "",
        recipe.table(settings, sheet.choices, given),
    ]
    if with_needs:
        planned = choices.planned_settings(settings, str(model.directory))
        lines += ["", *terminal.wrap(str(plan_on(planned, machine)), terminal.width(), "  ")]
    return "\n".join(lines)
