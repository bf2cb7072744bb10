"""Protobuf messages of the Tinker API, and their tensors as NumPy arrays.

    request = decode("ForwardBackwardRequest", body)      # {"model_id": "...", "data": [...], ...}
    body = encode("SampleResponse", {"sequences": [...]})

A message is a dict from field names to values; fields with their default value are absent. The
SDK's package is `tinker_public` (proto3). No .proto file is published: the numbers below are those
of the SDK's descriptors, and tests compare the bytes with the SDK's. Arrays of numbers are `bytes`
fields with little-endian values, so a message of 5 MB has only thousands of fields, and decoding
them in Python takes milliseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Shaped

from jzero.errors import shown

# A decoded field: a scalar, bytes, a message, a list of them, or a map with text keys.
Value: TypeAlias = "int | float | bool | str | bytes | Message | list[Value]"
Message: TypeAlias = dict[str, Value]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
LONGEST_VARINT = 10  # bytes
MAX_DEPTH = 8  # the deepest message has 5 levels

FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
MAX_ELEMENTS = 1 << 26  # of one dense tensor, so that a sparse one of few bytes stays small
MAX_AXES = 8  # of a shape; 2 are served
MAX_FIELDS = 1 << 16  # of a message and the messages in it, with the integers of packed fields

STOP, LENGTH = 0, 1  # SampledSequence.stop_reason


class WireError(ValueError):
    """The bytes are not a message of the API. The client gets status 400."""


class Field(NamedTuple):
    """A field of a message: its number, its name, and its kind.

    kind: int, bool, text, bytes, double, or the name of a message.
    form: "one", "optional" (presence is kept), "many" (repeated), or "map" (keys are text).
    """

    number: int
    name: str
    kind: str
    form: str = "one"


MESSAGES: Mapping[str, tuple[Field, ...]] = {
    "SparseCsr": (
        Field(1, "values", "bytes"),
        Field(2, "crow_indices", "bytes"),
        Field(3, "col_indices", "bytes"),
    ),
    "Tensor": (
        Field(1, "dense", "bytes", "optional"),
        Field(2, "sparse_csr", "SparseCsr", "optional"),
        Field(3, "dtype", "int"),
        Field(4, "shape", "int", "many"),
    ),
    "TopkLogprobs": (
        Field(1, "token_ids", "bytes"),
        Field(2, "logprobs", "bytes"),
        Field(3, "k", "int"),
        Field(4, "length", "int"),
    ),
    "SampledSequence": (
        Field(1, "stop_reason", "int"),
        Field(2, "tokens", "bytes"),
        Field(3, "logprobs", "bytes", "optional"),
        Field(4, "topk_sampled_logprobs", "TopkLogprobs", "optional"),
    ),
    "SampleResponse": (
        Field(1, "sequences", "SampledSequence", "many"),
        Field(2, "prompt_logprobs", "bytes", "optional"),
        Field(3, "topk_prompt_logprobs", "TopkLogprobs", "optional"),
        Field(4, "prompt_cache_hit_tokens", "int"),
        Field(5, "target_prompt_logprobs", "Tensor", "optional"),
        Field(6, "prompt_alt_tokens", "PromptAltTokens", "optional"),
    ),
    "PromptAltTokens": (
        Field(1, "tokens", "Tensor"),
        Field(2, "logprobs", "Tensor"),
    ),
    "BatchedTensor": (
        Field(1, "data", "bytes"),
        Field(2, "offsets", "bytes"),
        Field(3, "dtype", "int"),
        Field(4, "trailing_shape", "int", "many"),
    ),
    "ArrayRecord": (
        Field(1, "type_tag", "text"),
        Field(2, "fields", "BatchedTensor", "map"),
        Field(3, "num_datums", "int"),
    ),
    "ForwardBackwardOutput": (
        Field(1, "loss_fn_output_type", "text"),
        Field(2, "loss_fn_outputs", "ArrayRecord", "many"),
        Field(3, "metrics", "double", "map"),
    ),
    "LossConfigValue": (
        Field(1, "number", "double", "optional"),
        Field(2, "text", "text", "optional"),
    ),
    "EncodedTextChunk": (Field(1, "tokens", "bytes"),),
    "OpaqueChunk": (),
    "Chunk": (
        Field(1, "encoded_text", "EncodedTextChunk", "optional"),
        Field(2, "image", "OpaqueChunk", "optional"),
        Field(3, "dmel", "OpaqueChunk", "optional"),
    ),
    "Datum": (
        Field(1, "model_input", "Chunk", "many"),
        Field(2, "loss_fn_inputs", "Tensor", "map"),
    ),
    "ForwardBackwardRequest": (
        Field(1, "model_id", "text"),
        Field(2, "seq_id", "int"),
        Field(3, "data", "Datum", "many"),
        Field(4, "loss_fn", "text"),
        Field(5, "loss_fn_config", "double", "map"),
        Field(6, "forward_only", "bool"),
        Field(7, "loss_fn_config_v2", "LossConfigValue", "map"),
    ),
}
WIRE_TYPES = {"int": VARINT, "bool": VARINT, "double": FIXED64}  # all other kinds: BYTES
DEFAULTS: Mapping[str, Value] = {
    "int": 0,
    "bool": False,
    "text": "",
    "bytes": b"",
    "double": 0.0,
}


def map_entry(field: Field) -> tuple[Field, Field]:
    """Returns the fields of an entry of a map."""
    return Field(1, "key", "text"), Field(2, "value", field.kind)


# -- decoding --------------------------------------------------------------------------------------


class Budget:
    """What decoding may still cost: every field is a few microseconds of Python."""

    def __init__(self, most_fields: int, most: Mapping[str, int]) -> None:
        """most: of the repeated fields with a limit, by name."""
        self.most_fields = most_fields
        self.num_fields = 0
        self.most = most

    def spend(self) -> None:
        """Counts a field. Raises WireError if there are too many."""
        self.num_fields += 1
        if self.num_fields > self.most_fields:
            raise WireError(f"the message has more than {self.most_fields} fields")

    def check_count(self, name: str, count: int) -> None:
        """Raises WireError if a repeated field has more values than its limit."""
        if name in self.most and count > self.most[name]:
            raise WireError(f"the field {name} has more than {self.most[name]} values")


def decode(
    name: str, data: bytes, most_fields: int = MAX_FIELDS, most: Mapping[str, int] | None = None
) -> Message:
    """Returns the message `name` that `data` encodes. Unknown fields are skipped.

    most_fields: of the message and those in it. most: values of repeated fields, by name.
    Raises WireError if the bytes are truncated, have a field of another type, are nested too
    deeply, or have too many fields; decoding ends at the first field too many.
    """
    message: Message = {}
    decode_into(message, name, data, most_fields, most)
    return message


def decode_into(
    message: Message,
    name: str,
    data: bytes,
    most_fields: int = MAX_FIELDS,
    most: Mapping[str, int] | None = None,
) -> None:
    """Decodes as `decode` into an empty message, which has the fields before an error."""
    decode_fields(message, MESSAGES[name], memoryview(data), 0, Budget(most_fields, most or {}))


def decode_fields(
    message: Message, fields: tuple[Field, ...], data: memoryview, depth: int, budget: Budget
) -> None:
    """Adds the fields of one message to `message`."""
    if depth > MAX_DEPTH:
        raise WireError("the message is nested too deeply")
    by_number = {field.number: field for field in fields}
    for number, wire_type, raw in raw_fields(data):
        budget.spend()
        field = by_number.get(number)
        # Newer SDKs may send fields that this table lacks. proto3 parsers skip them.
        if field is None:
            continue
        if field.form == "many" and field.kind == "int" and wire_type == BYTES:
            # Repeated integers are packed, but a parser must accept both forms.
            assert isinstance(raw, memoryview)
            append(message, field.name, *packed_integers(raw, budget))
            continue
        # The entries of a map are messages, whatever their values are.
        expected = BYTES if field.form == "map" else WIRE_TYPES.get(field.kind, BYTES)
        if wire_type != expected:
            raise WireError(f"the field {field.name} has wire type {wire_type}")
        if field.form == "map":
            assert isinstance(raw, memoryview)
            entry: Message = {}
            decode_fields(entry, map_entry(field), raw, depth + 1, budget)
            items = message.setdefault(field.name, {})
            assert isinstance(items, dict)
            key = entry.get("key", "")
            assert isinstance(key, str)
            items[key] = entry.get("value", DEFAULTS.get(field.kind, {}))
        elif field.form == "many":
            append(message, field.name, decode_value(field, raw, depth, budget))
            items = message[field.name]
            assert isinstance(items, list)
            budget.check_count(field.name, len(items))
        else:
            message[field.name] = decode_value(field, raw, depth, budget)


def append(message: Message, name: str, *values: Value) -> None:
    """Adds values to a repeated field."""
    items = message.setdefault(name, [])
    assert isinstance(items, list)
    items.extend(values)


def decode_value(field: Field, raw: int | memoryview, depth: int, budget: Budget) -> Value:
    """Returns one value of a field from its varint or its bytes."""
    if isinstance(raw, int):
        return bool(raw) if field.kind == "bool" else signed(raw)
    match field.kind:
        case "double":
            return float(struct.unpack("<d", raw)[0])
        case "bytes":
            return bytes(raw)
        case "text":
            try:
                return str(raw, "utf-8")
            except UnicodeDecodeError:
                raise WireError(f"the field {field.name} is not UTF-8") from None
        case name:
            message: Message = {}
            decode_fields(message, MESSAGES[name], raw, depth + 1, budget)
            return message


def signed(number: int) -> int:
    """Returns a varint as an int64: negative numbers are sent as their two's complement."""
    return number - (1 << 64) if number >= 1 << 63 else number


def packed_integers(data: memoryview, budget: Budget) -> list[int]:
    """Returns the integers of a packed repeated field."""
    integers, position = [], 0
    while position < len(data):
        budget.spend()
        number, position = read_varint(data, position)
        integers.append(signed(number))
    return integers


def raw_fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yields the number, the wire type and the raw value of every field."""
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value, position = read_varint(data, position)
            yield number, wire_type, value
            continue
        if wire_type == BYTES:
            length, position = read_varint(data, position)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise WireError(f"wire type {wire_type} is not used in proto3")
        if length > len(data) - position:
            raise WireError("the message is truncated")
        yield number, wire_type, data[position : position + length]
        position += length


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the varint at `position`, below 2**64, and the position after it."""
    number = 0
    for index, byte in enumerate(data[position : position + LONGEST_VARINT]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            # Ten bytes carry 70 bits. Protobuf parsers drop those above 64.
            return number & ((1 << 64) - 1), position + index + 1
    raise WireError("the message is truncated, or a number is too long")


# -- encoding --------------------------------------------------------------------------------------


def encode(name: str, message: Message) -> bytes:
    """Returns the bytes of a message: fields in the order of their numbers, maps sorted by key."""
    return encode_fields(MESSAGES[name], message)


def encode_fields(fields: tuple[Field, ...], message: Message) -> bytes:
    """Returns the bytes of one message. Fields with their default are left out, as in proto3."""
    parts = []
    for field in fields:
        if field.name not in message:
            continue
        value = message[field.name]
        if field.form == "map":
            assert isinstance(value, dict)
            for key in sorted(value):
                entry = {"key": key, "value": value[key]}
                parts.append(length_delimited(field.number, encode_entry(field, entry)))
        elif field.form == "many":
            assert isinstance(value, list)
            if field.kind == "int":
                packed = b"".join(varint(number) for number in value if isinstance(number, int))
                # proto3 packs repeated integers, and leaves out an empty list.
                parts.append(length_delimited(field.number, packed) if packed else b"")
            else:
                parts.extend(encode_value(field, item) for item in value)
        elif field.form == "optional" or value != DEFAULTS.get(field.kind):
            parts.append(encode_value(field, value))
    return b"".join(parts)


def encode_entry(field: Field, entry: Message) -> bytes:
    """Returns the bytes of an entry of a map: key and value are sent even if they are defaults."""
    key, value = map_entry(field)
    return encode_value(key, entry["key"]) + encode_value(value, entry["value"])


def encode_value(field: Field, value: Value) -> bytes:
    """Returns the tag and the value of a field."""
    match value:
        case bool() | int():
            return varint(field.number << 3 | VARINT) + varint(int(value))
        case float():
            return varint(field.number << 3 | FIXED64) + struct.pack("<d", value)
        case str():
            return length_delimited(field.number, value.encode())
        case bytes():
            return length_delimited(field.number, value)
        case dict():
            return length_delimited(field.number, encode(field.kind, value))
    raise AssertionError(f"{field=} {type(value)=}")


def length_delimited(number: int, data: bytes) -> bytes:
    """Returns a field of bytes with its tag and its length."""
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Returns an int64 as a varint."""
    # A negative number is sent as its two's complement, in ten bytes.
    number &= (1 << 64) - 1
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


# -- arrays ----------------------------------------------------------------------------------------


def integers(name: str, data: Value | None) -> Shaped[np.ndarray, " n"]:
    """Returns a `bytes` field of int32 as an array."""
    raw = b"" if data is None else data
    assert isinstance(raw, bytes)
    if len(raw) % 4:
        raise WireError(f"{name}: {len(raw)} bytes are not an array of int32")
    return np.frombuffer(raw, "<i4")


def dense(name: str, tensor: Message, most: int = MAX_ELEMENTS) -> Shaped[np.ndarray, ...]:
    """Returns a Tensor as an array of its dtype and shape; cells that CSR leaves out are 0.

    most: elements.

    Raises WireError if the data do not fit the shape, or for another dtype than float32, int64 and
    int32.
    """
    code = tensor.get("dtype", 0)
    if code not in DTYPES:
        raise WireError(f"{name}: dtype {code} is not served: send float32, int64 or int32")
    assert isinstance(code, int)
    dtype = DTYPES[code]
    lengths = tensor.get("shape", [])
    assert isinstance(lengths, list)
    shape = tuple(length for length in lengths if isinstance(length, int))
    # Checked before anything is allocated: a sparse tensor of a few bytes may claim any shape. Each
    # length as well: the product of [0, 2**62] is 0.
    elements = 1
    for length in shape:
        elements *= length
        if not 0 <= length <= most or elements > most or len(shape) > MAX_AXES:
            raise WireError(f"{name}: the shape {shown(shape)} is not served")
    sparse = tensor.get("sparse_csr")
    if isinstance(sparse, dict):
        return from_csr(name, sparse, dtype, shape)
    data = tensor.get("dense", b"")
    assert isinstance(data, bytes)
    if len(data) != elements * dtype.itemsize:
        raise WireError(f"{name}: {len(data)} bytes do not fill the shape {shape} of {dtype.name}")
    return np.frombuffer(data, dtype).reshape(shape)


def from_csr(
    name: str, sparse: Message, dtype: np.dtype, shape: tuple[int, ...]
) -> Shaped[np.ndarray, "rows columns"]:
    """Returns a matrix in CSR as a dense array."""
    if len(shape) != 2:
        raise WireError(f"{name}: a sparse tensor has 2 axes, not {len(shape)}")
    values = np.frombuffer(whole(name, sparse.get("values", b""), dtype.itemsize), dtype)
    starts = np.frombuffer(whole(name, sparse.get("crow_indices", b""), 8), "<i8")
    columns = np.frombuffer(whole(name, sparse.get("col_indices", b""), 8), "<i8")
    if not is_csr(starts, columns, len(values), (shape[0], shape[1])):
        raise WireError(f"{name}: the indices of the sparse tensor do not fit the shape {shape}")
    # The SDK converts targets and weights [N, K] to CSR, each with its own pattern. Cells that a
    # pattern leaves out were 0.
    matrix = np.zeros(shape, dtype)
    matrix[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return matrix


def is_csr(
    starts: Shaped[np.ndarray, " n"],
    columns: Shaped[np.ndarray, " n"],
    num_values: int,
    shape: tuple[int, int],
) -> bool:
    """Returns whether the indices of a matrix in CSR fit its shape and its values."""
    return bool(
        len(starts) == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == num_values == len(columns)
        and (np.diff(starts) >= 0).all()
        and ((columns >= 0) & (columns < shape[1])).all()
    )


def tensor(array: Shaped[np.ndarray, ...]) -> Message:
    """Returns an array of float32 or integers as a dense Tensor."""
    dtype = FLOAT32 if array.dtype.kind == "f" else INT64
    data = array.astype(DTYPES[dtype]).tobytes()
    return {"dense": data, "dtype": dtype, "shape": [*array.shape]}


def whole(name: str, data: Value, size: int) -> bytes:
    """Returns `data` if it has complete elements of `size` bytes. Raises WireError otherwise."""
    assert isinstance(data, bytes)
    if len(data) % size:
        raise WireError(f"{name}: {len(data)} bytes are not an array of {size} bytes an element")
    return data


def ragged(rows: list[np.ndarray], trailing_shape: tuple[int, ...] = ()) -> Message:
    """Returns a BatchedTensor of float32 rows, each [length, *trailing_shape]."""
    arrays = [np.ascontiguousarray(row, "<f4") for row in rows]
    # Offsets count bytes, not elements, and include the end of the last row.
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
    tensor: Message = {
        "data": b"".join(array.tobytes() for array in arrays),
        "offsets": offsets.tobytes(),
        "dtype": FLOAT32,
    }
    if trailing_shape:
        tensor["trailing_shape"] = [*trailing_shape]
    return tensor
