"""Messages from process 0 to the others: their bytes, and connections that close."""

import socket

import jax.numpy as jnp
import numpy as np
import pytest

from jzero.hosts.broadcast import SIZES, Receiver, Sender, StreamEndedError, from_bytes, to_bytes


def round_trip(message: dict) -> dict:
    data = to_bytes(message)
    text_size, values_size = SIZES.unpack(data[: SIZES.size])
    text, values = data[SIZES.size :][:text_size], data[SIZES.size + text_size :]
    assert len(values) == values_size
    return from_bytes(text, values)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.array(3.5, jnp.bfloat16),
        np.array([True, False]),
        np.zeros((0, 4), np.int64),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_arrays_arrive_with_their_bits(array: np.ndarray) -> None:
    message = {"a": {"b": [array, 1]}, "c": np.int32([7])}
    got = round_trip(message)
    assert got["a"]["b"][0].dtype == array.dtype
    np.testing.assert_array_equal(got["a"]["b"][0], array, strict=True)
    assert got["a"]["b"][0].tobytes() == array.tobytes()
    np.testing.assert_array_equal(got["c"], [7])


def test_other_values_arrive_as_json() -> None:
    message = {"text": "ü\n", "number": 0.1, "none": None, "list": (1, [True]), "object": {}}
    assert round_trip(message) == message | {"list": [1, [True]]}


def test_messages_arrive_in_order_until_an_end_closes() -> None:
    near, far = socket.socketpair()
    sender, receiver = Sender([near]), Receiver(far)
    for number in range(3):
        sender.publish({"number": number, "values": np.full(number, number)})
    for number in range(3):
        message = receiver.receive()
        assert message["number"] == number
        np.testing.assert_array_equal(message["values"], [number] * number)

    near.sendall(to_bytes({"torn": 1})[:-2])
    near.close()

    with pytest.raises(StreamEndedError, match="process 0 has closed"):
        receiver.receive()
    receiver.close()


def test_a_message_to_a_host_that_has_gone_fails() -> None:
    near, far = socket.socketpair()
    far.close()
    with pytest.raises(StreamEndedError, match="another host"):
        Sender([near]).publish({"a": 1})
    near.close()


def test_the_sender_closes_after_the_receiver() -> None:
    near, far = socket.socketpair()
    sender, receiver = Sender([near]), Receiver(far)
    sender.publish({"do": "end"})
    assert receiver.receive() == {"do": "end"}
    receiver.close()
    sender.close()
    assert near.fileno() == -1
