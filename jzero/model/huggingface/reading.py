"""Reads a Hugging Face checkpoint: config.json, and safetensors in one file or in several."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open

from jzero.config.checks import positions_of, read_cached_config
from jzero.errors import UserError, reason_of
from jzero.files import is_hub_id
from jzero.hosts import collectives
from jzero.model import hub
from jzero.model.architecture import Params, QwenConfig, kept_dtype
from jzero.model.directory import AGAIN, file_in, read_json
from jzero.model.families import window_of
from jzero.model.huggingface.config_json import parse_config
from jzero.model.huggingface.headers import HeaderEntry, check_type, name_some
from jzero.model.huggingface.names import HEAD, model_tensors, notice
from jzero.model.huggingface.tensors import (
    Tensor,
    checkpoint_tensors,
    flatten,
    is_skipped,
    unflatten,
)
from jzero.model.rope_entries import ignored_entries

DOWNLOADS = ("*.json", "*.safetensors", "*.txt", "*.jinja")  # config, weights, tokenizer
PART_NUMBERS = 1 << 22  # of a tensor that are converted at a time
ROWS = 4096  # rows of the head and the embedding that are compared at a time


class Rows(Protocol):
    """A tensor in an open file, for reading ranges of rows."""

    def __getitem__(self, rows: slice) -> np.ndarray: ...


class TensorFile(Protocol):
    """An open safetensors file."""

    def get_tensor(self, name: str) -> np.ndarray: ...

    def get_slice(self, name: str) -> Rows: ...


def resolve(path: str | Path, patterns: Sequence[str] = DOWNLOADS) -> Path:
    """Returns a local directory: `path` itself, or the local copy of the hub id `path`.

    Files of a hub id ("Qwen/Qwen2.5-0.5B") that match one of the `patterns` are downloaded if there
    is no local copy yet. Raises UserError if `path` is neither a directory nor the id of a model
    that can be downloaded.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise UserError(
            f"{path} is a file: give the directory that holds config.json and *.safetensors"
        )
    if not is_hub_id(str(path)):
        raise UserError(
            f"no such directory: {path} (and it is not a hub id such as Qwen/Qwen2.5-0.5B)"
        )
    try:
        return hub.download(str(path), patterns)
    except OSError as error:
        raise UserError(
            f"no such directory, and the hub is unreachable or has no such model: {path} "
            f"({error}). Download the model where there is a network and give its directory"
        ) from error


def load_config(path: str | Path) -> tuple[QwenConfig, dict[str, Any]]:
    """Returns the model's config, and the complete config.json with all other entries.

    Raises UserError if the file is missing, is not JSON, or describes an unsupported model.
    """
    directory = Path(path)
    file = file_in(directory, "config.json")
    adapter = file_in(directory, "adapter_config.json")
    # PEFT directories with and without a base model get different advice.
    if adapter is not None and file is None:
        raise UserError(
            f"{path} holds an adapter and no model: give its base as the model, and this directory "
            "as model.adapter.path or --adapter"
        )
    if adapter is not None:
        raise UserError(
            f"{adapter} is of an adapter, which is not read with the model: merge it into the "
            "weights, or give it as model.adapter.path in a separate directory"
        )
    if is_workdir(directory):
        exports = sorted(directory.glob("export-*"), key=lambda export: export.stat().st_mtime)
        advice = f"give its newest export, {exports[-1]}" if exports else "export it first, with "
        if not exports:
            advice += f"python -m jzero.export --workdir {path} --out DIR"
        raise UserError(f"{path} is the workdir of a run, and no model: {advice}")
    if file is None:
        raise UserError(f"no config.json in {path}: it is not a Hugging Face model directory")
    hf_config = read_json(file)
    config = parse_config(hf_config, file)
    for entry in ignored_entries(hf_config):
        notice(f"{file}: {entry} has no effect, as in transformers")
    return config, hf_config


def is_workdir(directory: Path) -> bool:
    """Returns whether a run of jzero wrote the directory: its config.json is no model's."""
    return (directory / "versions.json").is_file() and (directory / "config.json").is_file()


def read_positions(path: str) -> int | None:
    """Returns the maximum sequence length of a model in a directory or on the hub.

    Only config.json is downloaded. None: the file has no such entry, or the model cannot be reached
    (`resolve` reports that).
    """
    if not Path(path).expanduser().is_dir() and is_hub_id(path):
        try:
            hub.download(path, ("config.json",))  # into the cache that read_cached_config reads
        except OSError:
            return None
    hf_config = read_cached_config(path)
    # The shorter of the trained context and the attention window.
    limits = (positions_of(hf_config), window_of(hf_config))
    return min((limit for limit in limits if limit is not None), default=None)


def load(
    path: str | Path,
    config: QwenConfig,
    sharding: Params | None = None,
    dtype: str = "float32",
) -> Params:
    """Returns the parameters of a checkpoint.

    sharding: a tree like the parameters with the sharding of every leaf; None: the default device.
    dtype: type of the parameters.
    Only one parameter at a time is in host memory, and no parameter before the headers of all files
    are checked. Raises UserError if the checkpoint is incomplete or damaged, if it does not hold
    the model of `config`, or if a tensor is not finite.
    """
    stored, tensors = check_checkpoint(Path(path), config)
    shardings = flatten(sharding) if sharding is not None else {}
    return unflatten(read_parameters(stored, tensors, shardings, dtype))


def reader(path: str | Path, config: QwenConfig, dtype: str) -> Callable[[str], np.ndarray]:
    """Returns a function from the name of a parameter ("layers.q") to its values on the host.

    The values have the type `dtype`. The headers of all files are checked immediately. Raises
    UserError as `load` does.
    """
    stored, tensors = check_checkpoint(Path(path), config)
    handles = open_files(stored)

    def read(leaf: str) -> np.ndarray:
        return read_parameter(stored, handles, tensors[leaf], kept_dtype(leaf, dtype))

    return read


def check_checkpoint(
    path: Path,
    config: QwenConfig,
) -> tuple[Mapping[str, HeaderEntry], Mapping[str, list[Tensor]]]:
    """Returns the headers of a checkpoint's tensors, and the tensors of every parameter.

    Raises UserError if the checkpoint does not match the model of `config`.
    """
    stored = model_tensors(path, config)
    tensors = checkpoint_tensors(config, stored)
    check_tensors(path, config, stored, tensors)
    if config.tie_word_embeddings and HEAD in stored:
        check_head(stored[HEAD], stored[tensors["embed"][0].name])
    return stored, tensors


def read_parameters(
    stored: Mapping[str, HeaderEntry],
    tensors: Mapping[str, list[Tensor]],
    shardings: Mapping[str, Sharding],
    dtype: str,
) -> dict[str, jax.Array]:
    """Returns the parameters of `tensors`, whose headers `stored` are checked already.

    A parameter without an entry in `shardings` is put on the default device. Only one parameter at
    a time is in host memory. Raises UserError if a tensor is not finite.
    """
    handles = open_files(stored)
    params = {}
    for leaf, layers in tensors.items():
        host = read_parameter(stored, handles, layers, kept_dtype(leaf, dtype))
        if leaf in shardings:
            params[leaf] = collectives.put_global(host, shardings[leaf])
        else:
            # The parameter must not alias the host array, whose memory belongs to NumPy.
            params[leaf] = jax.device_put(host, may_alias=False)
    return params


def read_parameter(
    stored: Mapping[str, HeaderEntry],
    handles: Mapping[Path, TensorFile],
    layers: Sequence[Tensor],
    dtype: str,
) -> np.ndarray:
    """Returns the values of one parameter, with its layers and experts stacked.

    handles: the open files of all tensors.
    Raises UserError if a value is not finite in `dtype`.
    """
    # One tensor at a time is read and copied into the stacked array, a part at a time: besides this
    # array, a large embedding takes no memory.
    host = np.empty((len(layers), *layers[0].shape), jnp.dtype(dtype))
    for slot, tensor in zip(host, layers, strict=True):
        entry = stored[tensor.name]
        for start, part in parts_of_tensor(handles[entry.file], entry, tensor):
            part = part.astype(np.float32, copy=False)
            check_finite(part, entry)
            stored_part = slot[start : start + len(part)]
            # A number near the largest of float32 is infinite in bfloat16.
            with np.errstate(over="ignore"):
                stored_part[...] = part
            if host.dtype != np.float32:
                check_finite(stored_part.astype(np.float32), entry, host.dtype.name)
    if layers[0].layer is None:
        return host[0]
    if layers[0].expert is None:
        return host
    # One tensor per expert and layer: [L * X, ...] becomes [L, X, ...].
    num_layers = len({tensor.layer for tensor in layers})
    return host.reshape(num_layers, -1, *layers[0].shape)


def parts_of_tensor(
    handle: TensorFile,
    entry: HeaderEntry,
    tensor: Tensor,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields parts of a tensor in the shape of our parameter, with the first row of each.

    Raises UserError if the file is damaged.
    """
    step = max(1, PART_NUMBERS // max(1, math.prod(tensor.shape[1:])))
    starts = range(0, tensor.shape[0], step)
    if tensor.is_stored_as_ours:
        rows = handle.get_slice(entry.name)
        for start in starts:
            with damaged_file(entry.file):
                part = rows[start : min(start + step, tensor.shape[0])]
            yield start, part
        return
    values = tensor.to_ours(read_tensor(handle, entry))
    for start in starts:
        yield start, values[start : start + step]


def check_tensors(
    path: Path,
    config: QwenConfig,
    stored: Mapping[str, HeaderEntry],
    tensors: Mapping[str, list[Tensor]],
) -> None:
    """Raises UserError unless the checkpoint holds exactly the tensors of the model."""
    all_tensors = itertools.chain.from_iterable(tensors.values())
    expected = {tensor.name: tensor for tensor in all_tensors}
    embedding = tensors["embed"][0].name
    # Some checkpoints of tied models repeat the embedding as the head.
    redundant = {HEAD} if config.tie_word_embeddings else set()
    missing = expected.keys() - stored.keys()
    if missing:
        raise UserError(f"{path} lacks {name_some(missing)}: config.json describes another model")
    # Tensors of parts that jzero does not compute, such as a vision tower, may be there.
    skipped = {name for name in stored if is_skipped(config, name)}
    unexpected = stored.keys() - expected.keys() - redundant - skipped
    if unexpected:
        raise UserError(
            f"{path} holds unexpected {name_some(unexpected)}: config.json describes another model"
        )
    for name, entry in stored.items():
        if name in skipped:
            continue
        expected_shape = expected[name if name in expected else embedding].stored_shape
        if entry.shape != expected_shape:
            raise UserError(
                f"{entry.file}: {name} has shape {entry.shape}, and config.json describes "
                f"{expected_shape}: the two files belong to different models"
            )
        check_type(name, entry)


def check_head(head: HeaderEntry, embedding: HeaderEntry) -> None:
    """Raises UserError if a tied model's checkpoint has a head that differs from its embedding."""
    # `transformers` does not tie the two if they differ.
    if not have_equal_values(head, embedding):
        raise UserError(
            f"{head.file}: {head.name} differs from {embedding.name}, and config.json has "
            "tie_word_embeddings=true: set it to false, or remove the tensor"
        )


def have_equal_values(first: HeaderEntry, second: HeaderEntry) -> bool:
    """Returns whether two tensors of one shape have the same values."""
    # They are compared a few rows at a time to save memory.
    first_rows, second_rows = (open_file(x.file).get_slice(x.name) for x in (first, second))
    for start in range(0, first.shape[0], ROWS):
        part = slice(start, min(start + ROWS, first.shape[0]))
        if not np.array_equal(first_rows[part], second_rows[part]):
            return False
    return True


def read_tensor(handle: TensorFile, entry: HeaderEntry) -> np.ndarray:
    """Returns a tensor as it is stored."""
    with damaged_file(entry.file):
        return handle.get_tensor(entry.name)


@contextmanager
def damaged_file(file: Path) -> Iterator[None]:
    """Raises UserError if reading the file fails."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({reason_of(error)}): {AGAIN}") from error


def check_finite(array: np.ndarray, entry: HeaderEntry, dtype: str = "") -> None:
    """Raises UserError if an array holds NaN or infinity. Copies nothing.

    dtype: the type in which the file's values are not finite, for the message.
    """
    # The minimum and the maximum are NaN if any number is.
    if not np.isfinite(array.min()) or not np.isfinite(array.max()):
        in_dtype = f" in {dtype}" if dtype else ""
        raise UserError(
            f"{entry.file}: {entry.name} holds NaN or infinite numbers{in_dtype}: the weights "
            "come from a failed run, or are damaged"
        )


def open_files(stored: Mapping[str, HeaderEntry]) -> dict[Path, TensorFile]:
    """Returns the open files of all tensors."""
    files = {tensor.file for tensor in stored.values()}
    return {file: open_file(file) for file in files}


def open_file(file: Path) -> TensorFile:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged ({reason_of(error)}): {AGAIN}") from error
