"""What process 0 of several hosts sends to the others, without other processes."""

import socket
from collections.abc import Iterator
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from tinker_client import CONTEXT, LIMITS

from benchmarks.tinker.scripted_loop import datum, tensor
from jzero.decoder.lockstep import News
from jzero.errors import UserError
from jzero.hosts.broadcast import SIZES, Message, Receiver, Sender, from_bytes, to_bytes
from jzero.tinker import datums, devices
from jzero.tinker.bodies import TensorBody
from jzero.tinker.devices import Devices
from jzero.tinker.prompt_targets import read_targets
from jzero.tinker.sampling import Request
from jzero.tinker.service import Service
from jzero.tinker.tenants import Checkpoint, Shape


def sent(message: Message) -> dict:
    """Returns a message as it arrives."""
    data = to_bytes(message)
    text_size, _ = SIZES.unpack(data[: SIZES.size])
    return from_bytes(data[SIZES.size :][:text_size], data[SIZES.size + text_size :])


REQUEST = Request(
    snapshot="s:sample:1",
    prompt=(1, 2),
    num_samples=2,
    max_tokens=3,
    temperature=0.1,
    top_k=4,
    top_p=0.3,
    stop_ids=(7,),
    stop_strings=("é\n",),
    noise=(5, 6),
    has_prompt_logprobs=True,
    topk_prompt=1,
    topk_sampled=2,
    owner_session="s",
    done=print,
)


def test_a_request_arrives_whole() -> None:
    got = devices.request_of(sent(devices.request_message(REQUEST)))
    assert vars(replace(got, done=print)) == vars(REQUEST)
    hash(tuple(vars(got).values()))  # its fields are keys of groups


@pytest.mark.parametrize(
    "csr", [{}, {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [1, 0]}]
)
def test_named_tokens_of_a_request_arrive_whole(csr: dict) -> None:
    body = TensorBody(data=[5, 6] if csr else [-1, 5, 6, -1], dtype="int64", shape=[2, 2], **csr)
    named = read_targets(body, prompt_length=3, vocabulary=9, most=2)
    arrived = devices.request_of(sent(devices.request_message(replace(REQUEST, targets=named))))
    hash(arrived)
    got = arrived.targets
    assert got is not None and (got.shape, got.first) == (named.shape, named.first)
    np.testing.assert_array_equal(got.given(1), [[5], [6]])
    logps = np.array([[-1.0], [-2.0]], np.float32)
    assert got.answer(1, logps) == named.answer(1, logps)


def test_a_training_call_arrives_whole() -> None:
    ratio = {"logprobs": tensor([-1.0, 0.1]), "advantages": tensor([0.5, -0.25])}
    message = {
        "model_id": "s:train:0",
        "seq_id": 3,
        "data": [datum([1, 2, 3], **ratio), datum([4, 5, 6], **ratio)],
        "loss_fn": "ppo",
    }
    call = datums.read_batch(message, vocabulary=99, longest=CONTEXT, limits=LIMITS)
    arrived = sent(asdict(call))
    got = datums.FwdBwd(**arrived | {"data": [datums.Datum(**one) for one in arrived["data"]]})
    packed = [datums.pack(one, datums.row_lengths(CONTEXT), 64, 1) for one in (call, got)]
    jax.tree.map(np.testing.assert_array_equal, packed[0].batch, packed[1].batch)
    assert replace(got, data=[]) == replace(call, data=[])


@pytest.mark.parametrize("moments", [None, {"mu.layers.q.a": np.full((2, 3), 0.1, np.float32)}])
def test_a_checkpoint_arrives_whole(moments: dict | None) -> None:
    params = {"layers": {"q": {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3)}}}
    checkpoint = Checkpoint(Shape(4, ("q", "v")), 2**32 - 1, 5, params, moments)
    got = devices.checkpoint_of(sent(devices.checkpoint_message(checkpoint)))
    assert (got.shape, got.seed, got.step) == (checkpoint.shape, 2**32 - 1, 5)
    jax.tree.map(np.testing.assert_array_equal, got.params, params)
    jax.tree.map(np.testing.assert_array_equal, got.moments, moments)


@pytest.fixture
def ends(service: Service) -> Iterator[tuple[Devices, Devices]]:
    """The same state, as process 0 and as another process see it."""
    sampling = service.sampling
    gather, share = sampling.gather, sampling.snapshots.share
    near, far = socket.socketpair()
    with near, far:
        yield tuple(
            Devices(service.tenants, sampling, stream) for stream in (Sender([near]), Receiver(far))
        )
    sampling.gather, sampling.snapshots.share = gather, share


def test_results_of_process_0_and_its_errors_are_shared(ends) -> None:
    first, second = ends

    def fail() -> Message:
        raise OSError("no such file")

    def fail_here() -> Message:
        raise AssertionError("only process 0 computes")

    assert first.share(lambda: {"a": np.arange(3)})["a"][2] == 2
    np.testing.assert_array_equal(second.share(fail_here)["a"], [0, 1, 2])
    with pytest.raises(UserError, match="no such file"):
        first.share(fail)
    with pytest.raises(UserError, match="no such file"):
        second.share(fail_here)


def test_a_host_in_another_state_stops_at_the_next_call(ends) -> None:
    first, second = ends
    news = News(clock=1.0, stop="", replies=[])
    assert first.gather(news) == second.gather(news._replace(clock=2.0)) == [news]
    first.gather(news)
    second.sampling.num_prompts += 1
    with pytest.raises(AssertionError, match="out of step"):
        second.follow_to_tick()
    second.sampling.num_prompts -= 1
