"""Hugging Face checkpoints <-> params: config.json and safetensors, one file or shards, without torch.

hf.json is the one table between our names and theirs, read both ways. A torch Linear weight is [out, in]; ours is
[*in, *out] with the heads kept apart, so a tensor is transposed and reshaped on its way, and layers are stacked."""

import json
import math
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jzero.distributed import collectives, processes
from jzero.errors import UserError
from jzero.model import hub
from jzero.model.qwen import Params, QwenConfig, abstract

# Ours -> [theirs, how many of our leading axes are the input of a Linear; 0: no Linear, flattened; null: as it is].
NAMES: dict[str, tuple[str, int | None]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
SHARD = 5 * 10**9  # bytes of a file at most, but for a single tensor
DOWNLOADS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # config, weights, tokenizer


class Tensor(NamedTuple):
    """One tensor of a checkpoint: where it is in `params` and which shape it has on each side."""

    name: str  # theirs
    layer: int | None  # index into our stacked leaf
    shape: tuple[int, ...]  # ours, without [L]
    hf_shape: tuple[int, ...]
    linear: bool  # theirs is [out, in]

    def ours(self, x: np.ndarray) -> np.ndarray:
        return (x.T if self.linear else x).reshape(self.shape)

    def theirs(self, x: np.ndarray) -> np.ndarray:
        x = x.reshape(self.hf_shape[::-1]).T if self.linear else x.reshape(self.hf_shape)
        return np.ascontiguousarray(x)


# params <-> {"embed": leaf, "layers.q": leaf, ...}
flatten: Callable[[Params], dict[str, Any]] = partial(traverse_util.flatten_dict, sep=".")
unflatten: Callable[[dict[str, Any]], Params] = partial(traverse_util.unflatten_dict, sep=".")


def tensors(config: QwenConfig) -> dict[str, list[Tensor]]:
    """Our leaf ("embed", "layers.q", ...) -> its tensors in a checkpoint, one per layer."""
    found = {}
    for leaf, x in flatten(abstract(config)).items():
        name, inputs = NAMES[leaf]
        layers, shape = (
            (range(x.shape[0]), x.shape[1:]) if leaf.startswith("layers.") else ([None], x.shape)
        )
        linear = math.prod(shape[inputs:]), math.prod(shape[:inputs])  # out, in
        hf_shape = {None: shape, 0: linear[:1]}.get(inputs, linear)
        found[leaf] = [Tensor(name.format(i), i, shape, hf_shape, bool(inputs)) for i in layers]
    return found


def resolve(path: str | Path) -> Path:
    """A local directory, or the local copy of a hub id ("Qwen/Qwen2.5-0.5B"), downloaded when it is not there yet."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise UserError(
            f"{path} is a file: give the directory that holds config.json and *.safetensors"
        )
    if str(path).count("/") != 1 or str(path)[0] in "./~":
        raise UserError(
            f"no such directory: {path} (and it is not a hub id such as Qwen/Qwen2.5-0.5B)"
        )
    try:
        return hub.download(str(path), DOWNLOADS)
    except OSError as error:
        raise UserError(
            f"no such directory, and the hub is unreachable or has no such model: {path} ({error}). "
            "Download the model where there is a network and give its directory"
        ) from error


def load_config(path: str | Path) -> tuple[QwenConfig, dict[str, Any]]:
    """The model's config and the whole config.json, for the entries that are not the model's (token ids, ...)."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"no config.json in {path}: it is not a Hugging Face model directory")
    try:
        hf = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    return QwenConfig.from_hf(hf), hf


def tensor_files(path: Path) -> dict[str, Path]:
    """Name of every tensor in a checkpoint -> the file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = {
            name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()
        }
        if absent := {file.name for file in files.values() if not file.is_file()}:
            raise UserError(
                f"{path} lacks {summary(absent)} named in {index.name}: the download is incomplete"
            )
        return files
    single = path / "model.safetensors"
    if not single.is_file():
        raise UserError(
            f"no model.safetensors in {path}: convert the checkpoint with save_pretrained"
        )
    with open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def summary(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load(path: str | Path, config: QwenConfig, sharding: Params | None = None) -> Params:
    """fp32 params of a checkpoint, tensor by tensor; `sharding` is a tree like params of where each leaf goes."""
    path = Path(path)
    files, leaves = tensor_files(path), tensors(config)
    expected = {tensor.name for group in leaves.values() for tensor in group}
    redundant = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := expected - files.keys():
        raise UserError(f"{path} lacks {summary(missing)}: config.json describes another model")
    if unexpected := files.keys() - expected - redundant:
        raise UserError(
            f"{path} holds unexpected {summary(unexpected)}: config.json describes another model"
        )

    handles = {file: open_file(file) for file in set(files.values())}
    shardings = flatten(sharding) if sharding is not None else {}
    params = {}
    for leaf, group in leaves.items():
        host = np.empty((len(group), *group[0].shape), np.float32)
        for slot, tensor in zip(host, group, strict=True):
            value = handles[files[tensor.name]].get_tensor(tensor.name)
            if value.shape != tensor.hf_shape:
                raise UserError(
                    f"{path}: {tensor.name} is {value.shape}, config.json says {tensor.hf_shape}"
                )
            slot[...] = tensor.ours(value)
        host = host[0] if group[0].layer is None else host
        params[leaf] = (
            collectives.put_global(host, shardings[leaf])
            if leaf in shardings
            else jax.device_put(host, may_alias=False)
        )
    return unflatten(params)


def save(
    path: str | Path,
    config: QwenConfig,
    params: Params,
    *,
    dtype: str,
    hf_config_extra: dict,
    max_shard_bytes=SHARD,
) -> None:
    """Write what `transformers` loads: config.json and safetensors in `dtype`. `path` appears when it is whole. Every
    host calls it; the first writes.

    `hf_config_extra` are entries of config.json beside the model's own: eos_token_id, max_position_embeddings, ..."""
    path = Path(path)
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    if processes.is_first_process() and path.exists() and (path.is_file() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty directory: remove it or choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        whole = Path(beside) / path.name
        whole.mkdir()
        write_weights(whole, config, params, dtype, max_shard_bytes)
        processes.write_once(
            whole / "config.json", json.dumps(config.to_hf(dtype, hf_config_extra), indent=2) + "\n"
        )
        if processes.is_first_process():
            os.replace(whole, path)
    collectives.gather_json("written")


def write_weights(
    path: Path, config: QwenConfig, params: Params, dtype: str, max_shard_bytes: int
) -> None:
    """In files of at most that size (or one tensor), and their index where there are several."""
    kind, values = np.dtype(DTYPES[dtype]), flatten(params)
    every = {
        tensor.name: (leaf, tensor) for leaf, group in tensors(config).items() for tensor in group
    }
    files = split_state_dict_into_shards_factory(
        every,
        get_storage_size=lambda entry: math.prod(entry[1].shape) * kind.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    fetch = lru_cache(1)(
        lambda leaf: collectives.fetch_global(values[leaf]).astype(kind)
    )  # tensors of a leaf are consecutive
    for file, names in files.filename_to_tensors.items():
        block = {}
        for leaf, tensor in (every[name] for name in names):  # on every host: they fetch together
            host = fetch(leaf)
            block[tensor.name] = tensor.theirs(host if tensor.layer is None else host[tensor.layer])
        if processes.is_first_process():
            save_file(block, path / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        processes.write_once(
            path / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n"
        )
