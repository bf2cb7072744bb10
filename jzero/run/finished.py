"""Finds the model and the settings of a run that has finished: `jzero evaluate RUN`.

found = find_model("runs/mine")              # the workdir of a run: its newest export
found = find_model("Qwen/Qwen2.5-0.5B")      # a directory or a hub id: a model without a run
adapters = read_adapter_flags(["math=runs/a", "code=runs/b"])  # of one model, by name
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from jzero import config
from jzero.config import Config
from jzero.errors import UserError
from jzero.files import parse_json, read_text
from jzero.model import peft
from jzero.run import buckets

EXPORT = "export-"  # the beginning of the name of an export in a workdir


@dataclass(frozen=True)
class FoundModel:
    """A model to load, and the settings of the run that trained it."""

    name: str  # as the user wrote it
    path: str  # directory or hub id of the model
    adapter: str = ""  # directory of an adapter of the model; "": none
    settings: Config | None = None  # None: no run is known

    def with_model(self, settings: Config) -> Config:
        """Returns settings that load this model, on all devices of this machine."""
        # An exported model has its adapter merged, and the size of the KV cache is that of the
        # machine.
        adapter = config.AdapterConfig(path=self.adapter)
        model = replace(
            settings.model,
            path=self.path,
            tokenizer="",
            adapter=adapter,
            base=settings.model.base if self.adapter else "native",
        )
        rollout = replace(
            settings.rollout, num_pages=0, placement=config.Together(), routing_replay=False
        )
        return replace(settings, model=model, rollout=rollout, mesh=config.MeshConfig())


def find_model(name: str) -> FoundModel:
    """Returns the model of a run, or the model in a directory or on the hub.

    Raises UserError if a run has no export, or its files cannot be read.
    """
    workdir = Path(buckets.fetch_run(name)).expanduser()
    settings = run_settings(workdir)
    if settings is None:
        return FoundModel(name, name)
    exports = {
        int(path.name.removeprefix(EXPORT)): path
        for path in workdir.glob(f"{EXPORT}*")
        if path.name.removeprefix(EXPORT).isdigit()
    }
    if not exports:
        raise UserError(
            f"{name} is a run without an exported model: let it finish, or write one with `jzero "
            f"export --workdir {name} --out {workdir / (EXPORT + '0')}`"
        )
    newest = exports[max(exports)]
    # An adapter is loaded on the model that the run has started from.
    if (newest / peft.CONFIG).exists():
        return FoundModel(name, settings.model.path, str(newest), settings)
    return FoundModel(name, str(newest), "", settings)


ADAPTER_NAME = re.compile(r"[\w.-]+")  # also the name of a directory


def read_adapter_flags(flags: list[str]) -> dict[str, str]:
    """Returns the directory or hub id of every adapter that --adapter gives, by name.

    A flag is NAME=DIR, or DIR, which has the name "" and must be the only one. Raises UserError for
    other names, and if a name is given twice.
    """
    by_name: dict[str, str] = {}
    for flag in filter(None, flags):
        name, equals, path = flag.partition("=")
        # A directory may have a = in its path.
        if not equals or "/" in name:
            name, path = "", flag
        elif not ADAPTER_NAME.fullmatch(name) or name.strip(".") == "" or not path:
            raise UserError(
                f"--adapter {flag}: give NAME=DIR, with a NAME of letters, digits, - and _"
            )
        if name in by_name:
            which = f"the name {name} twice" if name else "several adapters without a name"
            raise UserError(f"--adapter {flag}: {which}: give every adapter as NAME=DIR")
        by_name[name] = path
    if "" in by_name and len(by_name) > 1:
        raise UserError(f"--adapter {by_name['']}: several adapters need names: give NAME=DIR")
    return by_name


def run_settings(workdir: Path) -> Config | None:
    """Returns the settings of the run in a workdir; None if the directory is not a workdir.

    Raises UserError if its config.json cannot be read.
    """
    path = workdir / "config.json"
    if not path.is_file():
        return None
    text = read_text(path)
    # The config.json of a model has no such section.
    if "rollout" not in parse_json(text, path):
        return None
    return config.from_json(text, str(path))
