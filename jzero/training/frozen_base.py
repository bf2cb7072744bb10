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
from dataclasses import dataclass
from pathlib import Path

from jzero.config import ModelConfig
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.hosts import collectives, processes
from jzero.model import huggingface, qwen
from jzero.model.base_model import BaseModel
from jzero.model.hub import is_on_hub
from jzero.training.learner import Learner

FOLDER = "base"  # in the workdir
SHOWN_DIGITS = 12  # of a hash in messages


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from, and the directory that has them."""

    model: ModelConfig
    base: BaseModel
    workdir: Path
    is_warm_started: bool  # the run trains the full model before its adapter

    @property
    def is_in_workdir(self) -> bool:
        """Whether the workdir stores the base, because no other directory has its weights."""
        return not self.model.path or self.is_warm_started

    @property
    def directory(self) -> Path:
        """The directory with the weights of the base."""
        if self.is_in_workdir:
            return self.workdir / FOLDER
        assert self.base.directory is not None, f"{self.model.path=}"
        return self.base.directory

    @property
    def name(self) -> str:
        """The name of the base for adapter_config.json: a hub id, or a directory."""
        # PEFT and vLLM download the base by this name.
        if is_on_hub(self.model.path) and not self.is_in_workdir:
            return self.model.path
        return str(self.directory.absolute())


def freeze_model(weights: InitialWeights, policy: Learner, params: qwen.Params) -> qwen.Params:
    """Freezes the model that the run's first steps made, as the base of an adapter.

    `params` are consumed. They are stored in the workdir first, because no other copy exists.
    Without an adapter, `params` are returned unchanged. Every process calls this function.
    """
    if not weights.model.adapter.rank:
        return params
    directory = weights.workdir / FOLDER
    if processes.is_first_process():  # left by a run killed before its first checkpoint
        shutil.rmtree(directory, ignore_errors=True)
    huggingface.save(directory, policy.model, params, dtype=weights.model.dtype, hf_config_extra={})
    return policy.freeze(params)


def name_base(weights: InitialWeights) -> JsonObject:
    """Returns the entry for the base in a checkpoint; {} for a run that trains the full model.

    Every process calls this function.
    """
    return describe_base(weights) if weights.model.adapter.rank else {}


def check_base(weights: InitialWeights, expected: JsonObject) -> None:
    """Raises UserError unless the weights of the base are those that a checkpoint names."""
    actual = describe_base(weights)
    if actual != expected:
        raise UserError(
            f"{weights.directory} holds other weights (SHA-256 {shown_hash(actual)}) than the base "
            f"of this adapter, {expected.get('name')} ({shown_hash(expected)}): bring that base "
            "back, or use another workdir"
        )


def describe_base(weights: InitialWeights) -> JsonObject:
    """Returns the name and the hash of the base. Every process calls this function."""
    # Hashing reads all weights, so only the first process does it.
    digest = hash_weights(weights.directory) if processes.is_first_process() else None
    [digest, *_] = collectives.gather_json(digest)
    name = FOLDER if weights.is_in_workdir else weights.model.path
    return {"name": name, "sha256": digest}


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
