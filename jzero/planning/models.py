"""The architectures of models that can be planned without a download.

known_models.json has the entries of each model's config.json that are not the default of its
family, by hub id, one family after the other.
"""

from pathlib import Path

from jzero.errors import UserError
from jzero.files import parse_json, read_text, split_revision
from jzero.json_values import as_object
from jzero.model import huggingface
from jzero.model.hub import public_name
from jzero.model.qwen import QwenConfig

_FILE = Path(__file__).with_name("known_models.json")


def read_known_models() -> dict[str, QwenConfig]:
    """Returns the architectures of known_models.json, by hub id."""
    return {
        hub_id: huggingface.parse_config(as_object(entries), hub_id)
        for hub_id, entries in as_object(parse_json(read_text(_FILE), _FILE)).items()
    }


KNOWN_MODELS = read_known_models()


def short_names() -> list[str]:
    """Returns the names of the known models without their organization: "Qwen2.5-3B"."""
    return [hub_id.split("/")[1] for hub_id in KNOWN_MODELS]


def run_title(name: str, path: str) -> str:
    """Returns the name of a run with its model, which a flag may have replaced.

    path: its model.path; "" for a model from scratch.
    """
    return f"{name}: {public_name(path) if path else 'a model from scratch'}"


def hub_id_of(name: str) -> str:
    """Returns the hub id of a known model, such as "qwen2.5-3b", "Qwen2.5-3B" or "Qwen/Qwen2.5-3B".

    Raises:
        UserError: No known model has this name.
    """
    name, _ = split_revision(name)
    for hub_id in KNOWN_MODELS:
        if name.lower() in (hub_id.lower(), hub_id.split("/")[1].lower()):
            return hub_id
    raise UserError(f"no known model {name!r}; there are {', '.join(short_names())}")


def is_known(path: str) -> bool:
    """Returns whether `architecture` accepts the path: a local directory, or a known model."""
    names = {name.lower() for hub_id in KNOWN_MODELS for name in (hub_id, hub_id.split("/")[1])}
    name, _ = split_revision(path)
    return Path(path).expanduser().is_dir() or name.lower() in names


def architecture(path: str) -> QwenConfig:
    """Returns the architecture of a local model directory, or of a known model.

    Raises:
        UserError: The directory has no supported config.json, or the model is unknown.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        model, _ = huggingface.load_config(directory)
        return model
    return KNOWN_MODELS[hub_id_of(path)]
