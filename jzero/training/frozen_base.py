"""The frozen base of a run that trains an adapter: the location and the hash of its weights.

A checkpoint of such a run holds only the adapter. The checkpoint names the directory of the base
and the hash of its weights, and a run resumes only with the same weights.

The base is the directory that model.path names. If the run's first steps made the weights, because
they are random or the warm start trained them, they are stored once in `<workdir>/base`, in Hugging
Face format and in the compute dtype. This happens before quantization (`model.base=int8`): int8
weights exist only on devices, and follow from the stored ones.

The hash is the SHA-256 of the bytes of all *.safetensors files, in the order of their names.
"""

import hashlib
import shutil
from pathlib import Path

from jzero.config import Config
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.hosts import collectives, processes
from jzero.model import huggingface, qwen
from jzero.model.base_model import BaseModel
from jzero.model.hub import is_on_hub
from jzero.training.learner import Learner

FOLDER = "base"  # in the workdir
SHOWN_DIGITS = 12  # of a hash in messages


def is_warm_started(config: Config) -> bool:
    """Returns whether the run trains the full model before its adapter."""
    return bool(config.warm_start.steps) and not config.sft.data


def is_in_workdir(config: Config) -> bool:
    """Returns whether the workdir stores the base, because no other directory has its weights."""
    return not config.model.path or is_warm_started(config)


def base_directory(config: Config, base: BaseModel, workdir: Path) -> Path:
    """Returns the directory with the weights of the base."""
    if is_in_workdir(config):
        return workdir / FOLDER
    assert base.directory is not None, f"{config.model.path=}"
    return base.directory


def name_of_base(config: Config, base: BaseModel, workdir: Path) -> str:
    """Returns the name of the base for adapter_config.json: a hub id, or a directory."""
    # PEFT and vLLM download the base by this name.
    if is_on_hub(config.model.path) and not is_in_workdir(config):
        return config.model.path
    return str(base_directory(config, base, workdir).absolute())


def load_model(config: Config, base: BaseModel, workdir: Path, policy: Learner) -> qwen.Params:
    """Returns the model that a run starts from, frozen if no later step changes it.

    Every process calls this function.
    """
    # The warm start still trains the full model; `freeze_model` freezes it afterwards.
    if not config.model.adapter.rank or is_warm_started(config):
        return policy.load_params(base.directory, config.train.seed)
    if base.directory is None:
        return freeze_model(config, workdir, policy, policy.init_params(config.train.seed))
    return policy.load_base(base.directory)


def freeze_model(
    config: Config, workdir: Path, policy: Learner, params: qwen.Params
) -> qwen.Params:
    """Freezes the model that the run's first steps made, as the base of an adapter.

    `params` are consumed. They are stored in the workdir first, because no other copy exists.
    Without an adapter, `params` are returned unchanged. Every process calls this function.
    """
    if not config.model.adapter.rank:
        return params
    directory = workdir / FOLDER
    if processes.is_first_process():  # left by a run killed before its first checkpoint
        shutil.rmtree(directory, ignore_errors=True)
    huggingface.save(directory, policy.model, params, dtype=config.model.dtype, hf_config_extra={})
    return policy.freeze(params)


def name_base(config: Config, base: BaseModel, workdir: Path) -> JsonObject:
    """Returns the entry for the base in a checkpoint; {} for a run that trains the full model.

    Every process calls this function.
    """
    if not config.model.adapter.rank:
        return {}
    return describe_base(config, base_directory(config, base, workdir))


def load_base(
    config: Config, base: BaseModel, workdir: Path, policy: Learner, expected: JsonObject
) -> qwen.Params:
    """Returns the frozen base of a resumed run; {} for a run that trains the full model.

    `expected` is the entry for the base in the checkpoint. Raises UserError, before weights are
    loaded, if the base is a different one.
    """
    if not config.model.adapter.rank:
        return {}
    directory = base_directory(config, base, workdir)
    check_base(config, directory, expected)
    return policy.load_base(directory)


def check_base(config: Config, directory: Path, expected: JsonObject) -> None:
    """Raises UserError unless the weights in `directory` are the base that a checkpoint names."""
    actual = describe_base(config, directory)
    if actual != expected:
        raise UserError(
            f"{directory} holds other weights (SHA-256 {shown_hash(actual)}) than the base of this "
            f"adapter, {expected.get('name')} ({shown_hash(expected)}): bring that base back, or "
            "use another workdir"
        )


def describe_base(config: Config, directory: Path) -> JsonObject:
    """Returns the name and the hash of the base. Every process calls this function."""
    # Hashing reads all weights, so only the first process does it.
    digest = hash_weights(directory) if processes.is_first_process() else None
    [digest, *_] = collectives.gather_json(digest)
    return {"name": FOLDER if is_in_workdir(config) else config.model.path, "sha256": digest}


def shown_hash(description: JsonObject) -> str:
    return str(description.get("sha256"))[:SHOWN_DIGITS]


def hash_weights(directory: Path) -> str:
    """Returns the SHA-256 of the weight files in a model directory; of b"" without such files."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
