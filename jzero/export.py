"""`python -m jzero.export --workdir W --out DIR [--step N] [--adapter] [--push-to-hub USER/NAME [--revision BRANCH] [--public]]`

Exports a checkpoint of a run as a directory that `transformers` loads, with a model card. An
adapter is merged into its base in fp32 and rounded once. With --adapter only the adapter is
written, as a directory that `peft`, vLLM and SGLang load together with the base. The command needs
no accelerator, and it may read the workdir while the run continues.
"""  # noqa: E501 (the first line is the usage that --help prints)

import os
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import jax

from jzero import cli, command_flags, config, setup, terminal
from jzero.blueprint import describe_on_one_device
from jzero.errors import UserError
from jzero.files import read_text
from jzero.model import adapters, hub, peft, qwen
from jzero.model.base_model import BaseModel, read_base_model
from jzero.model.hub import is_on_hub
from jzero.run import buckets, history
from jzero.run.checkpoint import Checkpoints
from jzero.run.export_model import export_adapter, export_model
from jzero.run.model_card import CardOptions, make_card
from jzero.run.record import base_of, evaluations_of
from jzero.service.weights import load
from jzero.training.frozen_base import check_base

# The files of an export.
EXPORTED = (
    "*.safetensors",
    "*.jinja",
    "README.md",
    peft.CONFIG,
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    history.FILE,
    "vocab.json",
)


@dataclass(frozen=True)
class Options:
    """The flags of the command."""

    workdir: Path
    out: Path
    step: int | None = None  # None: the latest checkpoint
    dtype: str = "float32"
    license: str = ""  # empty: hub.card.license of the run
    adapter: bool = False  # write only the adapter, not the merged model
    force: bool = False
    push_to_hub: str | None = None  # "user/name" of a model on the hub
    revision: str | None = None  # branch of that model
    public: bool = False  # whether a model that the push creates is public
    tags: tuple[str, ...] = ()
    language: tuple[str, ...] = ()


def run(options: Options) -> str:
    """Exports a checkpoint. Returns the directory, or the address on the hub after a push."""
    check(options)
    options = replace(options, workdir=Path(buckets.fetch_run(options.workdir, leave_out=())))
    settings, checkpoints = open_workdir(options.workdir)
    steps = checkpoints.steps()
    if not steps or options.step not in (None, *steps):
        raise UserError(
            f"--step={options.step}: {options.workdir} has checkpoints of steps {steps}"
        )
    step = steps[-1] if options.step is None else options.step
    base = read_base_model(settings.model, settings.rollout.draft)
    # Check the flags against the run before the parameters are read.
    base_name = check_adapter(options, settings, base) if options.adapter else ""
    if settings.model.adapter.rank and not options.adapter:
        adapters.check_merge(base.model, adapters.targets(base.model, settings.model.adapter))
    # Without Adam's moments, which are twice as large as the parameters.
    items, record = checkpoints.read_items(step, {"params": trained_params(settings, base)})
    try:
        evaluations = evaluations_of(record)
        expected_base = base_of(record)
    except ValueError as error:
        raise checkpoints.damaged(step, error) from None
    # An adapter is only valid with the weights that it was trained on.
    if settings.model.adapter.rank:
        check_base(setup.initial_weights(settings, base, options.workdir), expected_base)

    # The export is written under a temporary name and renamed once it is complete.
    # Next to `out`, because a rename cannot cross file systems.
    unfinished = options.out.with_name(f".{options.out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    stages = history.history_of(settings, step, base.directory)
    if options.adapter:
        adapter = settings.model.adapter
        export_adapter(unfinished, base, adapter, items["params"], base_name, options.dtype, stages)
    else:
        params = merged_params(settings, base, options.workdir, items["params"])
        export_model(unfinished, base, settings.rollout, params, options.dtype, stages)
    card = make_card(settings, step, evaluations, base, card_options(options, settings))
    card.save(unfinished / "README.md")
    # With --force, `out` may hold an earlier export.
    shutil.rmtree(options.out, ignore_errors=True)
    os.replace(unfinished, options.out)

    if options.push_to_hub:
        return push(options, options.push_to_hub)
    return str(options.out)


def push(options: Options, name: str) -> str:
    """Uploads the export to the model `name` on the hub. Returns its address there.

    Raises a one-line UserError if the upload fails or is refused.
    """
    target = hub.Target(name, options.revision or "", is_private=not options.public)
    try:
        return hub.push(options.out, target, options.force)
    except hub.PublicRepository:
        raise UserError(
            f"--push-to-hub {name} is public: give --public to publish the model there, or another "
            "name"
        ) from None
    except hub.BranchExists:
        raise UserError(
            f"--revision={options.revision} exists in {name}: give another, or --force to push to "
            "it"
        ) from None
    except (OSError, hub.Refused) as error:
        raise UserError(
            f"--push-to-hub {name}: {error}. {options.out} is complete: upload it with `hf upload`"
        ) from error


def card_options(options: Options, settings: config.Config) -> CardOptions:
    """Returns the card's options, from the flags and the run's hub settings."""
    entries = settings.hub.card
    return CardOptions(
        workdir=options.workdir,
        dtype=options.dtype,
        license=options.license or entries.license,
        adapter=options.adapter,
        tags=(*entries.tags, *options.tags),
        language=options.language or entries.language,
    )


def trained_params(settings: config.Config, base: BaseModel) -> qwen.Params:
    """Returns the shapes of the parameters in the run's checkpoints: the model, or an adapter."""
    adapter = settings.model.adapter
    return adapters.abstract(base.model, adapter) if adapter.rank else qwen.abstract(base.model)


def merged_params(
    settings: config.Config,
    base: BaseModel,
    workdir: Path,
    trained: qwen.Params,
) -> qwen.Params:
    """Returns the parameters of the complete model: `trained`, or the base with this adapter."""
    adapter = settings.model.adapter
    if not adapter.rank:
        return trained
    # The base gets the dtype of the run's computation, so that the export equals the trained model.
    directory = setup.initial_weights(settings, base, workdir).directory
    frozen = load(describe_on_one_device(base.model, settings.model.dtype), directory)
    return adapters.join(frozen, trained, adapter.scale)


def check_adapter(options: Options, settings: config.Config, base: BaseModel) -> str:
    """Returns the name of the base for adapter_config.json: a hub id, or a directory.

    Raises UserError if the run has no adapter, or if a push would publish an adapter whose base is
    not on the hub.
    """
    if not settings.model.adapter.rank:
        raise UserError(
            f"--adapter: the run in {options.workdir} trains the whole model: remove --adapter"
        )
    name = setup.initial_weights(settings, base, options.workdir).name
    if options.push_to_hub and not is_on_hub(name):
        raise UserError(
            f"--adapter: the base is the directory {name}, which is not on the hub: remove "
            "--adapter and push the merged model, or remove --push-to-hub"
        )
    return name


def check(options: Options) -> None:
    """Raises UserError for flags that exclude each other, or that would overwrite other files."""
    if options.out.exists():
        if not options.force:
            raise UserError(
                f"--out {options.out} exists: give another, "
                "or --force to replace the earlier export"
            )
        # --force must not delete a directory that the user named by mistake.
        foreign = foreign_files(options.out)
        if foreign:
            raise UserError(
                f"--out {options.out} holds {foreign[0]}, which no export writes: give another "
                "directory, --force replaces nothing but an earlier export"
            )
    if options.public and not options.push_to_hub:
        raise UserError("--public is about a model on the hub: give --push-to-hub, too")
    if options.revision and not options.push_to_hub:
        raise UserError(
            f"--revision={options.revision} is a branch on the hub: give --push-to-hub, too"
        )


def foreign_files(directory: Path) -> list[str]:
    """Returns the names in `directory` that no export writes; for a file, the name of the file."""
    # An export has only files, so a workdir with its folders is never mistaken for an export.
    if not directory.is_dir():
        return [directory.name]
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if not is_exported(directory / name)]


def is_exported(path: Path) -> bool:
    """Returns whether a file has a name that an export writes: weights, JSON, tokenizer, card."""
    return path.is_file() and any(fnmatch(path.name, pattern) for pattern in EXPORTED)


def open_workdir(workdir: Path) -> tuple[config.Config, Checkpoints]:
    """Returns the settings and the checkpoints of a run, for reading."""
    try:
        path = workdir / "config.json"
        settings = config.from_json(read_text(path), str(path))
        return settings, Checkpoints(workdir, keep=None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--workdir {workdir} has no run of this version of jzero: {error}"
        ) from None


# -- The command -----------------------------------------------------------------------------------


def main() -> None:
    args = command_flags.export(__doc__).parse_args()
    options = Options(
        workdir=args.workdir,
        out=args.out,
        step=args.step,
        dtype=args.dtype,
        adapter=args.adapter,
        license=args.license,
        force=args.force,
        push_to_hub=args.push_to_hub,
        revision=args.revision,
        public=args.public,
        tags=tuple(args.tag),
        language=tuple(args.language),
    )
    # An export needs no accelerator, and must not claim one while a run uses it.
    jax.config.update("jax_platforms", "cpu")
    with cli.user_errors():
        terminal.write(run(options))


if __name__ == "__main__":
    terminal.run_command(main)
