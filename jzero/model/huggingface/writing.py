"""Writes a checkpoint that `transformers` loads: config.json and safetensors in files of 5 GB."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import ml_dtypes
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from jzero.distributed import collectives, processes
from jzero.errors import UserError
from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import HuggingFaceConfig
from jzero.model.huggingface.config_json import config_json
from jzero.model.huggingface.tensors import Tensor, checkpoint_tensors, flatten
from jzero.model.linear import AdaptedWeight, LinearWeight
from jzero.model.quantized import QuantizedWeight, dequantize

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ReadParameter = Callable[[str], np.ndarray]  # by name ("layers.q"), as `reading.reader` returns it
MAX_FILE_BYTES = 5 * 10**9  # transformers' own limit; a single larger tensor has a file of its own


def save(
    path: str | Path,
    config: QwenConfig,
    params: Params,
    *,
    dtype: str,
    hf_config_extra: HuggingFaceConfig,
    max_shard_bytes: int = MAX_FILE_BYTES,
    read_original: ReadParameter | None = None,
) -> None:
    """Writes config.json and the parameters in `dtype` to the directory `path`.

    Weights with an adapter are merged in fp32 and rounded once, one parameter at a time. In place
    of a weight in 8 bits stands the one that `read_original` returns for the name of the parameter,
    or else the dequantized one.

    Every host calls this function, as sharded parameters are gathered from all of them; the first
    host writes. The directory appears under its name only when it is complete.
    hf_config_extra: entries of config.json beside the model's own, such as eos_token_id.
    max_shard_bytes: the size from which the tensors are split over several files and an index.
    Raises UserError where `dtype` is unknown or `path` exists and is not an empty directory.
    """
    check_dtype(dtype)
    with new_directory(path) as directory:
        write_weights(directory, config, params, dtype, max_shard_bytes, read_original)
        entries = config_json(config, dtype, hf_config_extra)
        processes.write_once(directory / "config.json", json.dumps(entries, indent=2) + "\n")


def check_dtype(dtype: str) -> np.dtype:
    """Returns the type of this name. Raises UserError if tensors are not written in it."""
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(DTYPES[dtype])


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Gives a directory to write, which gets the name `path` when the block is done.

    Every host enters the block; the first one writes, and the directory is its own. Raises
    UserError where `path` exists and is not an empty directory.
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
    # No host goes on, perhaps to read the directory, before it is there.
    collectives.gather_json("written")


def write_weights(
    path: Path,
    config: QwenConfig,
    params: Params,
    dtype: str,
    max_shard_bytes: int,
    read_original: ReadParameter | None = None,
) -> None:
    """Writes safetensors files of at most `max_shard_bytes`, and an index if there are several."""
    stored_dtype = check_dtype(dtype)
    leaves = flatten(params)
    tensors: dict[str, tuple[str, Tensor]] = {}  # name in the checkpoint -> parameter, tensor
    for leaf, layers in checkpoint_tensors(config).items():
        for tensor in layers:
            tensors[tensor.name] = leaf, tensor

    def stored_bytes(entry: tuple[str, Tensor]) -> int:
        return math.prod(entry[1].shape) * stored_dtype.itemsize

    # The tensors of a parameter follow each other, so each parameter is fetched about once.
    @lru_cache(1)
    def fetch(leaf: str) -> np.ndarray:
        host = fetch_weight(leaves[leaf], leaf, read_original)
        return host.astype(stored_dtype)

    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=stored_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        block = {}
        for name in names:
            leaf, tensor = tensors[name]
            host = fetch(leaf)  # every host takes part, although only the first one writes
            block[name] = tensor.to_stored(tensor.of(host))
        if processes.is_first_process():
            write_tensors(path / file, block)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        processes.write_once(path / "model.safetensors.index.json", text)


def fetch_weight(
    weight: LinearWeight, leaf: str, read_original: ReadParameter | None
) -> np.ndarray:
    """Returns a parameter on the host, merged with its adapter. Every host calls this function."""
    if isinstance(weight, AdaptedWeight):
        frozen = fetch_weight(weight.weight, leaf, read_original)
        factors = jax.tree.map(collectives.fetch_global, replace(weight, weight=()))
        return np.asarray(replace(factors, weight=frozen).merged())
    if isinstance(weight, QuantizedWeight):
        if read_original is not None:
            return read_original(leaf)
        return np.asarray(dequantize(jax.tree.map(collectives.fetch_global, weight), np.float32))
    return collectives.fetch_global(weight)


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file with the permissions that the umask gives to every new file.

    The library makes a file that only its owner may read.
    """
    file.touch()
    permissions = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(permissions)
