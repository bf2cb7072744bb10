"""The protobuf messages: bytes of the SDK's own, tensors, and whatever a hostile client sends."""

import gzip
import json
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker_sdk import sdk_pythons

from jzero.tinker import wire
from jzero.tinker.http import BodyError, decompress

# Written by the SDK's own classes (0.38.0), deterministically serialized.
REQUEST = bytes.fromhex(
    "0a016d10011a540a0c0a0a0a08010000000200000012280a0d7461726765745f746f6b656e7312170a1002000000"
    "0000000003000000000000001802220102121a0a0777656967687473120f0a08000000000000803f180122010222"
    "0d63726f73735f656e74726f7079"
)
RESPONSE = bytes.fromhex(
    "0a1e0801120c0000000001000000020000001a0c000080bf000000c0000040c012080000c07f000080bf"
)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def test_a_request_of_the_sdk_is_decoded_and_encoded() -> None:
    message = wire.decode("ForwardBackwardRequest", REQUEST)

    assert wire.encode("ForwardBackwardRequest", message) == REQUEST
    assert (message["model_id"], message["seq_id"]) == ("m", 1)
    assert message["loss_fn"] == "cross_entropy"
    (datum,) = message["data"]
    (chunk,) = datum["model_input"]
    np.testing.assert_array_equal(
        wire.integers("tokens", chunk["encoded_text"]["tokens"]), np.array([1, 2])
    )
    inputs = datum["loss_fn_inputs"]
    np.testing.assert_array_equal(wire.dense("t", inputs["target_tokens"]), np.array([2, 3]))
    np.testing.assert_array_equal(wire.dense("w", inputs["weights"]), np.array([0, 1], np.float32))


def test_a_response_has_the_bytes_of_the_sdk() -> None:
    sequence: wire.Message = {
        "stop_reason": wire.LENGTH,
        "tokens": np.array([0, 1, 2], "<i4").tobytes(),
        "logprobs": floats(-1, -2, -3),
    }
    message: wire.Message = {"sequences": [sequence], "prompt_logprobs": floats(np.nan, -1)}

    assert wire.encode("SampleResponse", message) == RESPONSE
    assert wire.decode("SampleResponse", RESPONSE) == message


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_are_groups_of_seven_bits(number: int) -> None:
    encoded = wire.varint(number)

    groups = [byte & 0x7F for byte in encoded]
    assert sum(group << (7 * place) for place, group in enumerate(groups)) == number % 2**64
    assert [byte >= 0x80 for byte in encoded] == [True] * (len(encoded) - 1) + [False]
    decoded, end = wire.read_varint(memoryview(encoded), 0)
    assert (wire.signed(decoded), end) == (number, len(encoded))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = wire.decode("ForwardBackwardRequest", data)
    except wire.WireError:
        return
    # What was understood survives a second passage.
    encoded = wire.encode("ForwardBackwardRequest", message)
    assert wire.decode("ForwardBackwardRequest", encoded).keys() == message.keys()


@pytest.mark.parametrize("length", range(1, len(REQUEST)))
def test_a_truncated_request_never_decodes_to_the_whole(length: int) -> None:
    whole = wire.decode("ForwardBackwardRequest", REQUEST)
    try:
        part = wire.decode("ForwardBackwardRequest", REQUEST[:length])
    except wire.WireError:
        return
    assert part != whole


def test_nesting_is_bounded() -> None:
    deep = b""
    for _ in range(100):
        deep = wire.length_delimited(3, wire.length_delimited(1, deep))
    wire.decode("ForwardBackwardRequest", deep)  # unknown depths are skipped, not followed


def test_a_sparse_tensor_is_the_dense_one() -> None:
    dense = np.array([[0, 2, 0], [0, 0, 0], [-1, 0, 5]], np.float32)
    rows, columns = np.nonzero(dense)
    tensor: wire.Message = {
        "sparse_csr": {
            "values": dense[rows, columns].tobytes(),
            "crow_indices": np.array([0, 1, 1, 3], "<i8").tobytes(),
            "col_indices": columns.astype("<i8").tobytes(),
        },
        "dtype": wire.FLOAT32,
        "shape": [3, 3],
    }
    np.testing.assert_array_equal(wire.dense("x", tensor), dense)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ({"dtype": 4, "shape": [1], "dense": b"xx"}, "dtype 4"),
        ({"dtype": 1, "shape": [3], "dense": b"1234"}, "do not fill"),
        ({"dtype": 1, "shape": [-1], "dense": b""}, "shape"),
        ({"dtype": 1, "shape": [2**40, 2**40], "dense": b""}, "shape"),
        ({"dtype": 1, "shape": [2], "sparse_csr": {}}, "2 axes"),
        (
            {
                "dtype": 1,
                "shape": [1, 2],
                "sparse_csr": {
                    "values": floats(1),
                    "crow_indices": np.array([0, 1], "<i8").tobytes(),
                    "col_indices": np.array([7], "<i8").tobytes(),
                },
            },
            "indices",
        ),
        ({"dtype": 1, "shape": [1, 2], "sparse_csr": {"crow_indices": b"x"}}, "are not an array"),
    ],
)
def test_a_wrong_tensor_is_refused(tensor: wire.Message, reason: str) -> None:
    with pytest.raises(wire.WireError, match=reason):
        wire.dense("x", tensor)


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_of_the_sdk_have_the_same_bytes_here(seed: int) -> None:
    for python in sdk_pythons():
        command = [python, Path(__file__).parent / "sdk_messages.py", str(seed)]
        written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in written.splitlines():
            name, data = json.loads(line)["name"], bytes.fromhex(json.loads(line)["hex"])
            assert wire.encode(name, wire.decode(name, data)) == data, line


# -- compressed bodies -----------------------------------------------------------------------------


def test_gzip_is_decompressed() -> None:
    assert decompress(gzip.compress(b"hello"), "gzip", 5) == b"hello"
    assert decompress(b"hello", "identity", 5) == b"hello"


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (gzip.compress(bytes(10**7)), "gzip", 413),
        (gzip.compress(b"hello")[:-6], "gzip", 400),
        (zlib.compress(b"hello"), "gzip", 400),
        (b"hello", "br", 415),
    ],
    # A header of gzip has the time of day, and workers of the suite must agree on the ids.
    ids=["bomb", "cut off", "zlib", "br"],
)
def test_bombs_and_broken_bodies_are_refused(data: bytes, encoding: str, status: int) -> None:
    with pytest.raises(BodyError) as error:
        decompress(data, encoding, 10**6)
    assert error.value.status == status


def test_zstd_is_decompressed_and_bounded() -> None:
    zstandard = pytest.importorskip("zstandard")
    compress = zstandard.ZstdCompressor().compress

    assert decompress(compress(b"hello"), "zstd", 5) == b"hello"
    with pytest.raises(BodyError) as error:
        decompress(compress(bytes(10**7)), "zstd", 10**6)
    assert error.value.status == 413
