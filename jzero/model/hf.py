"""Hugging Face checkpoints <-> params: config.json and safetensors, one file or shards, without torch.

`NAMES` is the one table between our names and theirs, read both ways. A torch Linear weight is [out, in]; ours is
[*in, *out] with the heads kept apart, so a tensor is transposed and reshaped on its way, and layers are stacked."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jzero import hosts, hub
from jzero.model.qwen import Params, QwenConfig, abstract

# Ours -> (theirs, how many of our leading axes are the input of a Linear; 0: no Linear, flattened; None: as it is).
NAMES: dict[str, tuple[str, int | None]] = {
    "embed": ("model.embed_tokens.weight", None),
    "norm": ("model.norm.weight", None),
    "lm_head": ("lm_head.weight", 1),
    "layers.attn_norm": ("model.layers.{}.input_layernorm.weight", None),
    "layers.q": ("model.layers.{}.self_attn.q_proj.weight", 1),
    "layers.k": ("model.layers.{}.self_attn.k_proj.weight", 1),
    "layers.v": ("model.layers.{}.self_attn.v_proj.weight", 1),
    "layers.o": ("model.layers.{}.self_attn.o_proj.weight", 2),
    "layers.q_bias": ("model.layers.{}.self_attn.q_proj.bias", 0),
    "layers.k_bias": ("model.layers.{}.self_attn.k_proj.bias", 0),
    "layers.v_bias": ("model.layers.{}.self_attn.v_proj.bias", 0),
    "layers.q_norm": ("model.layers.{}.self_attn.q_norm.weight", None),
    "layers.k_norm": ("model.layers.{}.self_attn.k_norm.weight", None),
    "layers.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", None),
    "layers.gate": ("model.layers.{}.mlp.gate_proj.weight", 1),
    "layers.up": ("model.layers.{}.mlp.up_proj.weight", 1),
    "layers.down": ("model.layers.{}.mlp.down_proj.weight", 1),
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
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


def tensors(config: QwenConfig) -> dict[str, list[Tensor]]:
    """Our leaf ("embed", "layers.q", ...) -> its tensors in a checkpoint, one per layer."""

    def of_leaf(leaf: str, shape: tuple[int, ...]) -> list[Tensor]:
        name, inputs = NAMES[leaf]
        stacked = leaf.startswith("layers.")
        ours = shape[1:] if stacked else shape
        hf_shape = ours
        if inputs is not None:
            out = math.prod(ours[inputs:])
            hf_shape = (out, math.prod(ours[:inputs])) if inputs else (out,)
        indices = range(shape[0]) if stacked else [None]
        return [Tensor(name.format(i), i, ours, hf_shape, bool(inputs)) for i in indices]

    return {leaf: of_leaf(leaf, x.shape) for leaf, x in flatten(abstract(config)).items()}


def flatten(params: Params) -> dict[str, Any]:
    layers = {f"layers.{name}": leaf for name, leaf in params["layers"].items()}
    return {name: leaf for name, leaf in params.items() if name != "layers"} | layers


def unflatten(leaves: dict[str, Any]) -> Params:
    layers = {name.removeprefix("layers."): leaf for name, leaf in leaves.items() if name.startswith("layers.")}
    return {name: leaf for name, leaf in leaves.items() if not name.startswith("layers.")} | {"layers": layers}


def resolve(path: str | Path) -> Path:
    """A local directory, or the local copy of a hub id ("Qwen/Qwen2.5-0.5B"), downloaded when it is not there yet."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ValueError(f"{path} is a file: give the directory that holds config.json and *.safetensors")
    if str(path).count("/") != 1 or str(path)[0] in "./~":
        raise ValueError(f"no such directory: {path} (and it is not a hub id such as Qwen/Qwen2.5-0.5B)")
    try:
        return hub.download(str(path), DOWNLOADS)
    except OSError as error:
        raise ValueError(
            f"no such directory, and the hub is unreachable or has no such model: {path} ({error}). "
            "Download the model where there is a network and give its directory"
        ) from error


def load_config(path: str | Path) -> tuple[QwenConfig, dict[str, Any]]:
    """The model's config and the whole config.json, for the entries that are not the model's (token ids, ...)."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"no config.json in {path}: it is not a Hugging Face model directory")
    try:
        hf = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return QwenConfig.from_hf(hf), hf


def tensor_files(path: Path) -> dict[str, Path]:
    """Name of every tensor in a checkpoint -> the file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise ValueError(f"{path} lacks {summary(absent)} named in {index.name}: the download is incomplete")
        return files
    single = path / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"no model.safetensors in {path}: convert the checkpoint with save_pretrained")
    with open_file(single) as file:
        return dict.fromkeys(file.keys(), single)


def open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def summary(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load(path: str | Path, config: QwenConfig, sharding: Params | None = None) -> Params:
    """fp32 params of a checkpoint, tensor by tensor; `sharding` is a tree like params of where each leaf goes."""
    path = Path(path)
    files, leaves = tensor_files(path), tensors(config)
    expected = {tensor.name for group in leaves.values() for tensor in group}
    redundant = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := expected - files.keys():
        raise ValueError(f"{path} lacks {summary(missing)}: config.json describes another model")
    if unexpected := files.keys() - expected - redundant:
        raise ValueError(f"{path} holds unexpected {summary(unexpected)}: config.json describes another model")

    handles = {file: open_file(file) for file in set(files.values())}
    shardings = flatten(sharding) if sharding is not None else {}
    params = {}
    for leaf, group in leaves.items():
        stacked = group[0].layer is not None
        host = np.empty((len(group), *group[0].shape), np.float32)
        for slot, tensor in zip(host, group, strict=True):
            value = handles[files[tensor.name]].get_tensor(tensor.name)
            if value.shape != tensor.hf_shape:
                raise ValueError(f"{path}: {tensor.name} is {value.shape}, config.json says {tensor.hf_shape}")
            slot[...] = tensor.ours(value)
        host = host if stacked else host[0]
        params[leaf] = hosts.put(host, shardings[leaf]) if leaf in shardings else jax.device_put(host, may_alias=False)
    return unflatten(params)


def shards(leaves: dict[str, list[Tensor]], itemsize: int, max_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Cut the tensors, leaf after leaf, into runs of at most `max_bytes` (or one tensor)."""
    runs, size = [[]], 0
    for leaf, group in leaves.items():
        for tensor in group:
            nbytes = math.prod(tensor.shape) * itemsize
            if runs[-1] and size + nbytes > max_bytes:
                runs.append([])
                size = 0
            runs[-1].append((leaf, tensor))
            size += nbytes
    return runs


def save(
    path: str | Path,
    config: QwenConfig,
    params: Params,
    *,
    dtype: str,
    hf_config_extra: dict[str, Any],
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write what `transformers` loads: config.json and safetensors in `dtype`. `path` appears when it is whole. Every
    host calls it; the first writes.

    `hf_config_extra` are entries of config.json beside the model's own: eos_token_id, max_position_embeddings, ..."""
    path = Path(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    if not hosts.first():
        for leaf in tensors(config):  # the first host cannot fetch alone
            hosts.fetch(flatten(params)[leaf])
        hosts.agree("written")
        return
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty directory: remove it or choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        write_weights(partial, config, params, dtype, max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(config.to_hf(dtype, hf_config_extra), indent=2) + "\n")
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial)
        raise
    hosts.agree("written")


def write_weights(path: Path, config: QwenConfig, params: Params, dtype: str, max_shard_bytes: int) -> None:
    kind, values = np.dtype(DTYPES[dtype]), flatten(params)
    runs = shards(tensors(config), kind.itemsize, max_shard_bytes)
    name, host, weight_map, total = "", np.empty(0), {}, 0
    for number, run in enumerate(runs, 1):
        file = f"model-{number:05}-of-{len(runs):05}.safetensors" if len(runs) > 1 else "model.safetensors"
        block = {}
        for leaf, tensor in run:
            if leaf != name:  # tensors of a leaf are consecutive: each leaf is fetched once
                name, host = leaf, hosts.fetch(values[leaf]).astype(kind)
            block[tensor.name] = tensor.theirs(host if tensor.layer is None else host[tensor.layer])
        save_file(block, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(block, file)
        total += sum(x.nbytes for x in block.values())
    if len(runs) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
