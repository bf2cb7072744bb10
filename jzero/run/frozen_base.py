"""The frozen base of a run that trains an adapter: where its weights lie, and which they are.

A checkpoint of such a run holds the adapter alone. It names the directory of the base and the hash
of the weights there, and a run goes on with the same weights only.

The base is the directory that model.path names. Where the run's own first steps made the weights,
because they are random or the warm start trained them, they are stored once in `<workdir>/base`, in
Hugging Face's format and in the type that the run computes with. That is before they are quantized
(`model.base=int8`): weights in 8 bits are on devices alone, and follow from those of the directory.

The hash is the SHA-256 of the bytes of all *.safetensors files, in the order of their names.
"""

import hashlib
import shutil
from pathlib import Path

from jzero.config import Config
from jzero.distributed import collectives, processes
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import huggingface, qwen
from jzero.run.base_model import BaseModel
from jzero.training.learner import Learner

FOLDER = "base"  # of the workdir
SHOWN_DIGITS = 12  # of a hash in a message


def is_warm_started(config: Config) -> bool:
    """Returns whether the run trains the whole model before its adapter."""
    return bool(config.warm_start.steps) and not config.sft.data


def is_in_workdir(config: Config) -> bool:
    """Returns whether the weights of the base are in no directory but the workdir."""
    return not config.model.path or is_warm_started(config)


def base_directory(config: Config, base: BaseModel, workdir: Path) -> Path:
    """Returns the directory with the weights of the base."""
    if is_in_workdir(config):
        return workdir / FOLDER
    assert base.directory is not None, f"{config.model.path=}"
    return base.directory


def load_model(config: Config, base: BaseModel, workdir: Path, policy: Learner) -> qwen.Params:
    """Returns the model that a run starts from, which is frozen if nothing changes it any more.

    Every process calls this function.
    """
    if not config.model.adapter.rank or is_warm_started(config):
        return policy.load_params(base.directory, config.train.seed)
    if base.directory is None:
        return freeze_model(config, workdir, policy, policy.init_params(config.train.seed))
    return policy.load_base(base.directory)


def freeze_model(
    config: Config, workdir: Path, policy: Learner, params: qwen.Params
) -> qwen.Params:
    """Returns the model that the run's first steps made as the base of an adapter.

    `params` are consumed. They are stored in the workdir first, as they are nowhere else. A run
    without an adapter freezes nothing. Every process calls this function.
    """
    if not config.model.adapter.rank:
        return params
    directory = workdir / FOLDER
    if processes.is_first_process():  # of a run that was killed before its first checkpoint
        shutil.rmtree(directory, ignore_errors=True)
    huggingface.save(directory, policy.model, params, dtype=config.model.dtype, hf_config_extra={})
    return policy.freeze(params)


def name_base(config: Config, base: BaseModel, workdir: Path) -> JsonObject:
    """Returns how a checkpoint names the base; {} for a run that trains the whole model.

    Every process calls this function.
    """
    if not config.model.adapter.rank:
        return {}
    return describe_base(config, base_directory(config, base, workdir))


def load_base(
    config: Config, base: BaseModel, workdir: Path, policy: Learner, expected: JsonObject
) -> qwen.Params:
    """Returns the frozen base of a run that resumes; {} for a run that trains the whole model.

    `expected` is what its checkpoint says of the base. Raises UserError, before weights are loaded,
    if the base is another one.
    """
    if not config.model.adapter.rank:
        return {}
    directory = base_directory(config, base, workdir)
    check_base(config, directory, expected)
    return policy.load_base(directory)


def check_base(config: Config, directory: Path, expected: JsonObject) -> None:
    """Raises UserError unless the weights in `directory` are those that a checkpoint names."""
    found = describe_base(config, directory)
    if found != expected:
        raise UserError(
            f"{directory} holds other weights (SHA-256 {shown_hash(found)}) than the base of this "
            f"adapter, {expected.get('name')} ({shown_hash(expected)}): bring that base back, or "
            "use another workdir"
        )


def describe_base(config: Config, directory: Path) -> JsonObject:
    """Returns the name and the hash of the base. Every process calls this function."""
    digest = hash_of_weights(directory) if processes.is_first_process() else None
    [digest, *_] = collectives.gather_json(digest)
    return {"name": FOLDER if is_in_workdir(config) else config.model.path, "sha256": digest}


def shown_hash(description: JsonObject) -> str:
    return str(description.get("sha256"))[:SHOWN_DIGITS]


def hash_of_weights(directory: Path) -> str:
    """Returns the SHA-256 of the weights in a model directory; of nothing if there are none."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
