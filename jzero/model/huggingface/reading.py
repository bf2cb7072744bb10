"""Reads a Hugging Face checkpoint: config.json, and safetensors in one file or in several."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from jzero.config.checks import read_positions as read_cached_positions
from jzero.distributed import collectives
from jzero.errors import UserError
from jzero.model import hub
from jzero.model.architecture import Params, QwenConfig
from jzero.model.huggingface.config_json import parse_config
from jzero.model.huggingface.tensors import Tensor, checkpoint_tensors, flatten, unflatten

DOWNLOADS = ("*.json", "*.safetensors", "*.txt", "*.jinja")  # config, weights, tokenizer


class TensorFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> np.ndarray: ...


def resolve(path: str | Path) -> Path:
    """Returns a local directory: `path` itself, or the local copy of the hub id that `path` is.

    A hub id ("Qwen/Qwen2.5-0.5B") is downloaded where there is no local copy yet. Raises UserError
    where `path` is neither a directory nor the id of a model that can be downloaded.
    """
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
            f"no such directory, and the hub is unreachable or has no such model: {path} "
            f"({error}). Download the model where there is a network and give its directory"
        ) from error


def load_config(path: str | Path) -> tuple[QwenConfig, dict[str, Any]]:
    """Returns the model's config, and all of config.json for the entries that are not the model's.

    Raises UserError where the file is missing, is not JSON, or describes an unsupported model.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"no config.json in {path}: it is not a Hugging Face model directory")
    try:
        hf_config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    return parse_config(hf_config), hf_config


def read_positions(path: str) -> int | None:
    """Returns max_position_embeddings of a model in a directory or on the hub, before it is loaded.

    Only config.json is downloaded. None: the file does not say, or the model cannot be reached,
    which `resolve` reports.
    """
    is_on_hub = path.count("/") == 1 and path[0] not in "./~"
    if not Path(path).expanduser().is_dir() and is_on_hub:
        try:
            hub.download(path, ("config.json",))  # into the cache, where the config looks
        except OSError:
            return None
    return read_cached_positions(path)


def load(path: str | Path, config: QwenConfig, sharding: Params | None = None) -> Params:
    """Returns the fp32 parameters of a checkpoint.

    sharding: a tree like the parameters with the sharding of every leaf; None: the default device.
    Only one parameter at a time is in the host's memory. Raises UserError where the checkpoint is
    incomplete or does not hold the model of `config`.
    """
    path = Path(path)
    files = tensor_files(path)
    tensors = checkpoint_tensors(config)
    check_names(path, config, files.keys(), tensors)

    handles = {file: open_file(file) for file in set(files.values())}
    shardings = flatten(sharding) if sharding is not None else {}
    params = {}
    for leaf, layers in tensors.items():
        host = np.empty((len(layers), *layers[0].shape), np.float32)
        for slot, tensor in zip(host, layers, strict=True):
            slot[...] = read_tensor(path, handles[files[tensor.name]], tensor)
        if layers[0].layer is None:
            host = host[0]
        if leaf in shardings:
            params[leaf] = collectives.put_global(host, shardings[leaf])
        else:
            # The host array's memory must not become the parameter's: it belongs to NumPy.
            params[leaf] = jax.device_put(host, may_alias=False)
    return unflatten(params)


def tensor_files(path: Path) -> dict[str, Path]:
    """Returns the file of every tensor in a checkpoint, by the tensor's name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {name: path / file for name, file in weight_map.items()}
        absent = {file.name for file in files.values() if not file.is_file()}
        if absent:
            raise UserError(
                f"{path} lacks {name_some(absent)} named in {index.name}: "
                "the download is incomplete"
            )
        return files
    single = path / "model.safetensors"
    if not single.is_file():
        raise UserError(
            f"no model.safetensors in {path}: convert the checkpoint with save_pretrained"
        )
    return dict.fromkeys(open_file(single).keys(), single)


def check_names(
    path: Path,
    config: QwenConfig,
    names: Collection[str],
    tensors: dict[str, list[Tensor]],
) -> None:
    """Raises UserError unless the checkpoint holds exactly the tensors of the model."""
    expected = {tensor.name for layers in tensors.values() for tensor in layers}
    # Some checkpoints of tied models repeat the embedding as the head.
    redundant = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = expected - set(names)
    if missing:
        raise UserError(f"{path} lacks {name_some(missing)}: config.json describes another model")
    unexpected = set(names) - expected - redundant
    if unexpected:
        raise UserError(
            f"{path} holds unexpected {name_some(unexpected)}: config.json describes another model"
        )


def read_tensor(path: Path, file: TensorFile, tensor: Tensor) -> np.ndarray:
    """Returns a tensor in our shape, in the checkpoint's dtype."""
    stored = file.get_tensor(tensor.name)
    if stored.shape != tensor.stored_shape:
        raise UserError(
            f"{path}: {tensor.name} is {stored.shape}, config.json says {tensor.stored_shape}"
        )
    return tensor.to_ours(stored)


def open_file(file: Path) -> TensorFile:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def name_some(names: set[str]) -> str:
    """Lists the first three names and counts the others."""
    listed = ", ".join(sorted(names)[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
