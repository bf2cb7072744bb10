"""The contents of safetensors files, read from their headers before any tensor is read.

A safetensors file is the length of its header (8 bytes), the header as JSON, and the bytes of the
tensors: {"name": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}, ...}. A checkpoint in
several files has an index that maps every tensor to its file.
"""

import math
from pathlib import Path
from typing import NamedTuple

from jzero import json_values
from jzero.errors import UserError, reason_of, shown
from jzero.files import JsonObject, open_file
from jzero.model.directory import AGAIN, MAX_JSON_BYTES, file_in, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH_BYTES = 8  # the start of a file: the length of its header
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # types that fp32 represents exactly


class HeaderEntry(NamedTuple):
    """The description of a tensor in a header."""

    file: Path
    dtype: str  # as safetensors calls it: "F32", "BF16", "I8", ...
    shape: tuple[int, ...]
    begin: int  # the range of its bytes, counted from the end of the header
    end: int
    name: str  # in the file


class StoredTensors(NamedTuple):
    """The tensors of a checkpoint."""

    by_name: dict[str, HeaderEntry]
    unlisted: frozenset[str] = frozenset()  # names that the files have and their index lacks


def stored_tensors(directory: Path) -> StoredTensors:
    """Returns every tensor of a checkpoint by its name.

    Raises UserError if a file is missing or damaged, if a file name leads out of the directory, if
    a file lacks a tensor of the index, or if two files have one tensor.
    """
    index = file_in(directory, INDEX)
    single = file_in(directory, SINGLE)
    # With both, it would be unclear which tensors are the model's.
    if index and single:
        raise UserError(
            f"{directory} holds both {SINGLE} and {INDEX}, which may be two different models "
            f"(transformers reads only {SINGLE}): remove the one that is not the model's"
        )
    if single:
        return StoredTensors(read_header(single))
    if not index:
        raise UserError(f"no {SINGLE} in {directory}: convert the checkpoint with save_pretrained")

    files = read_index(index)
    tensors: dict[str, HeaderEntry] = {}
    for file in sorted(set(files.values())):
        header = read_header(file)
        named = {name for name, indexed_file in files.items() if indexed_file == file}
        if absent := named - header.keys():
            raise UserError(f"{file} lacks {name_some(absent)}, which {INDEX} names: {AGAIN}")
        # Which of the two would be the model's?
        extra = header.keys() - named
        if twice := extra & (files.keys() | tensors.keys()):
            raise UserError(
                f"{file} holds {name_some(twice)}, as another file of {INDEX} does: {AGAIN}"
            )
        tensors |= header
    return StoredTensors(tensors, frozenset(tensors.keys() - files.keys()))


def read_index(index: Path) -> dict[str, Path]:
    """Returns the file of every tensor that the index of a checkpoint names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map from tensors to files: {AGAIN}")
    paths: dict[str, Path | None] = {}
    for name in weight_map.values():
        if not isinstance(name, str):
            raise UserError(f"{index} has {shown(name)} instead of a file name: {AGAIN}")
        try:
            paths[name] = paths.get(name) or file_in(index.parent, name)
        except UserError as error:
            raise UserError(f"{index.name}: {error}") from None
    absent = {name for name, path in paths.items() if path is None}
    if absent:
        raise UserError(
            f"{index.parent} lacks {name_some(absent)} named in {index.name}: "
            "the download is incomplete"
        )
    files = {name: path for name, path in paths.items() if path is not None}
    return {tensor: files[name] for tensor, name in weight_map.items()}


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """Returns the tensors of one file. Raises UserError unless they cover the file exactly."""
    entries, data_bytes = read_header_json(file)
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        tensors[name] = parse_entry(file, name, entry)

    # Every byte has to belong to exactly one tensor: no gaps, no overlaps, no missing bytes.
    position = 0
    # By (begin, end), so that an empty tensor comes before the one that begins at the same byte.
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if tensor.begin != position or tensor.end > data_bytes:
            raise UserError(
                f"{file} is damaged: {shown(name)} has the bytes {tensor.begin} to {tensor.end} "
                f"of {data_bytes}, after {position} of the tensors before it: {AGAIN}"
            )
        position = tensor.end
    if position != data_bytes:
        raise UserError(
            f"{file} is damaged: its tensors have {position} bytes, the file has {data_bytes}: "
            f"{AGAIN}"
        )
    return tensors


def read_header_json(file: Path) -> tuple[JsonObject, int]:
    """Returns the header of a file, and the number of bytes after it."""
    try:
        size = file.stat().st_size
        with open_file(file) as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            # A damaged length must not make `read` allocate gigabytes.
            if length > min(size - LENGTH_BYTES, MAX_JSON_BYTES):
                raise UserError(
                    f"{file} is damaged: its header has {length} bytes, the file {size}: {AGAIN}"
                )
            header = json_values.parse(opened.read(length).decode())
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({reason_of(error)}): {AGAIN}") from None
    if not isinstance(header, dict):
        raise UserError(f"{file} is damaged: its header is not a JSON object: {AGAIN}")
    return header, size - LENGTH_BYTES - length


def parse_entry(file: Path, name: str, entry: object) -> HeaderEntry:
    """Returns the tensor that an entry of a header describes."""
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape, span = sizes(fields.get("shape")), sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or span is None or len(span) != 2:
        raise UserError(f"{file} is damaged: the entry of {shown(name)} in its header: {AGAIN}")
    return HeaderEntry(file, dtype, shape, begin=span[0], end=span[1], name=name)


def sizes(values: object) -> tuple[int, ...] | None:
    """Returns a list of non-negative integers as a tuple, or None for anything else."""
    # `type(value) is int` also excludes booleans.
    if not isinstance(values, list):
        return None
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        return None
    return tuple(values)


def check_type(name: str, tensor: HeaderEntry) -> None:
    """Raises UserError unless fp32 represents the tensor's type exactly and its size is right."""
    if tensor.dtype not in ITEM_BYTES:
        raise UserError(
            f"{tensor.file}: {shown(name)} is {shown(tensor.dtype)}, only "
            f"{', '.join(ITEM_BYTES)} are read: give the checkpoint in one of these types"
        )
    expected = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    if tensor.end - tensor.begin != expected:
        raise UserError(
            f"{tensor.file} is damaged: {shown(name)} is {tensor.dtype} {tensor.shape}, and has "
            f"{tensor.end - tensor.begin} bytes instead of {expected}: {AGAIN}"
        )


def name_some(names: set[str]) -> str:
    """Lists the first three names and counts the others."""
    listed = ", ".join(shown(name) for name in sorted(names)[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
