"""Writes a checkpoint that `transformers` loads: config.json and safetensors files up to 5 GB."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.numpy import save_file

from jzero.errors import UserError
from jzero.files import naming_full_disk
from jzero.hosts import collectives, processes
from jzero.model import adapters
from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import HuggingFaceConfig, family_of
from jzero.model.huggingface.config_json import config_json
from jzero.model.huggingface.headers import HeaderEntry
from jzero.model.huggingface.names import model_tensors
from jzero.model.huggingface.tensors import Tensor, checkpoint_tensors, flatten, is_skipped
from jzero.model.linear import AdaptedWeight, LinearWeight
from jzero.model.quantized import QuantizedWeight, dequantize

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ReadParameter = Callable[[str], np.ndarray]  # by name ("layers.q"), as `reading.reader` returns it
MAX_FILE_BYTES = 5 * 10**9  # the limit of transformers; a larger tensor gets a separate file


class Part(NamedTuple):
    """The part of a tensor in the checkpoint that comes from one parameter; usually all of it."""

    leaf: str  # the name of the parameter
    tensor: Tensor


class KeptTensors:
    """The tensors that an export copies from the checkpoint that the model came from.

    skipped: the tensors that jzero does not read.
    stored: all tensors of the checkpoint, if the family skips tensors, has fp32 parameters
        (`exact_names`) or has two forms of checkpoints; else empty.
    """

    def __init__(self, original: Path | None, config: QwenConfig) -> None:
        family = family_of(config.model_type)
        self.exact_names = family.exact_names
        self.stored: Mapping[str, HeaderEntry] = {}
        if original is not None and (family.skipped or family.exact_names or family.other_tensors):
            self.stored = model_tensors(original, config)
        self.skipped = {
            name: entry for name, entry in self.stored.items() if is_skipped(config, name)
        }

    def read(self, name: str) -> np.ndarray:
        """Returns a skipped tensor in its stored type."""
        entry = self.skipped[name]
        with safe_open(entry.file, framework="np") as file:
            return file.get_tensor(entry.name)

    def dtype_of(self, name: str, leaf: str, dtype: str) -> str:
        """Returns the type of a tensor: `dtype`, or fp32 where bf16 would change the model.

        A tensor of `Family.exact_names` is fp32 unless the original checkpoint has it in another
        type.
        """
        if leaf.removeprefix("layers.") not in self.exact_names:
            return dtype
        entry = self.stored.get(name)
        return dtype if entry is not None and entry.dtype != "F32" else "float32"


def save(
    path: str | Path,
    config: QwenConfig,
    params: Params,
    *,
    dtype: str,
    hf_config_extra: HuggingFaceConfig,
    max_shard_bytes: int = MAX_FILE_BYTES,
    read_original: ReadParameter | None = None,
    original: Path | None = None,
) -> None:
    """Writes config.json and the parameters in `dtype` to the directory `path`.

    Weights with an adapter are merged in fp32 and rounded once, one parameter at a time. An int8
    weight is replaced by the result of `read_original` for the name of the parameter, if given, or
    else by the dequantized weight.

    Every host calls this function, because sharded parameters are gathered from all hosts; the
    first host writes. The directory appears under its name only when it is complete.
    hf_config_extra: entries of config.json besides the model's, such as eos_token_id.
    original: the directory of the checkpoint that the model came from. Its tensors that jzero does
        not read, such as a vision tower, are copied unchanged.
    max_shard_bytes: above this size the tensors are split over several files with an index.
    Raises UserError if `dtype` is unknown or `path` exists and is not an empty directory.
    """
    check_dtype(dtype)
    with new_directory(path) as directory:
        kept = KeptTensors(original, config)
        write_weights(directory, config, params, dtype, max_shard_bytes, read_original, kept)
        entries = config_json(config, dtype, hf_config_extra)
        processes.write_once(directory / "config.json", json.dumps(entries, indent=2) + "\n")


def check_dtype(dtype: str) -> np.dtype:
    """Returns the type of this name. Raises UserError if tensors are not written in it."""
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[dtype])


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Yields a temporary directory, which is renamed to `path` when the block is done.

    Every host enters the block; only the first host's directory is kept. Raises UserError if `path`
    exists and is not an empty directory.
    """
    path = Path(path)
    if processes.is_first_process() and path.exists() and (path.is_file() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty directory: remove it or choose another")

    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        unfinished = Path(temporary) / path.name
        unfinished.mkdir()
        yield unfinished
        if processes.is_first_process():
            os.replace(unfinished, path)
    # A barrier: no host continues, perhaps to read the directory, before the directory exists.
    collectives.gather_json("written")


def write_weights(
    path: Path,
    config: QwenConfig,
    params: Params,
    dtype: str,
    max_shard_bytes: int,
    read_original: ReadParameter | None = None,
    kept: KeptTensors | None = None,
) -> None:
    """Writes safetensors files of at most `max_shard_bytes`, and an index if there are several."""
    check_dtype(dtype)
    leaves = flatten(adapters.with_merged_output(config, params))
    kept = kept or KeptTensors(None, config)
    tensors: dict[str, list[Part]] = {}  # by name in the checkpoint
    for leaf, layers in checkpoint_tensors(config, kept.stored).items():
        for tensor in layers:
            tensors.setdefault(tensor.name, []).append(Part(leaf, tensor))

    # Parameters that share a tensor are of one kind, so the first one determines the tensor's type.
    stored_dtypes = {
        name: np.dtype(DTYPES[kept.dtype_of(name, parts[0].leaf, dtype)])
        for name, parts in tensors.items()
    }
    # Copied tensors are part of the plan, because they count toward the size of a file.
    everything: dict[str, list[Part] | HeaderEntry] = {**tensors, **kept.skipped}

    def stored_bytes(entry: list[Part] | HeaderEntry) -> int:
        if isinstance(entry, HeaderEntry):
            return entry.end - entry.begin
        tensor = entry[0].tensor
        return math.prod(tensor.stored_shape) * stored_dtypes[tensor.name].itemsize

    linear_layers = adapters.linear_layers(config)

    # The tensors of a parameter are consecutive, so a cache of one fetches each parameter about
    # once. Parameters that share a tensor need one entry each.
    @lru_cache(max(len(parts) for parts in tensors.values()))
    def fetch(leaf: str) -> np.ndarray:
        target = linear_layers.get(leaf.removeprefix("layers."))
        num_stacked = len(target.stacked) if target else 0
        return fetch_weight(leaves[leaf], leaf, num_stacked, read_original)

    plan = split_state_dict_into_shards_factory(
        everything,
        get_storage_size=stored_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        block = {}
        for name in names:
            if name in kept.skipped:
                block[name] = kept.read(name)
                continue
            stored = []
            for leaf, tensor in tensors[name]:
                host = fetch(leaf)  # a collective: every host has to call it
                ours = tensor.of(host).astype(stored_dtypes[name])
                stored.append(tensor.to_stored(ours))
            # Parameters that share a tensor [experts, outputs, inputs] each hold some of its
            # outputs.
            is_shared = len(stored) > 1
            block[name] = np.concatenate(stored, axis=1) if is_shared else stored[0]
        if processes.is_first_process():
            write_tensors(path / file, block)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        processes.write_once(path / "model.safetensors.index.json", text)


def fetch_weight(
    weight: LinearWeight,
    leaf: str,
    num_stacked: int,
    read_original: ReadParameter | None,
) -> np.ndarray:
    """Returns a parameter on the host, merged with its adapter. Every host calls this function.

    num_stacked: number of leading axes of a linear layer's weight before its inputs.
    """
    if isinstance(weight, AdaptedWeight):
        # The base may be int8, and then comes from the original checkpoint.
        frozen = fetch_weight(weight.weight, leaf, num_stacked, read_original)
        factors = jax.tree.map(collectives.fetch_global, replace(weight, weight=()))
        return np.asarray(replace(factors, weight=frozen).merged(num_stacked))
    if isinstance(weight, QuantizedWeight):
        if read_original is not None:
            return read_original(leaf)
        return np.asarray(dequantize(jax.tree.map(collectives.fetch_global, weight), np.float32))
    assert isinstance(weight, jax.Array), f"{leaf}: {type(weight)}"
    # An array keeps its copy on the host. Of this one, which shares the memory of `weight` on the
    # devices, the copy is freed with the parameter.
    shards = [shard.data for shard in weight.addressable_shards]
    alias = jax.make_array_from_single_device_arrays(weight.shape, weight.sharding, shards)
    return collectives.fetch_global(alias)


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions that the umask gives to new files."""
    # safetensors creates files that only their owner may read.
    file.touch()
    permissions = file.stat().st_mode
    with naming_full_disk(file, sum(tensor.nbytes for tensor in tensors.values())):
        save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(permissions)
