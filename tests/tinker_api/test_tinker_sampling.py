"""Sampling of many snapshots in one batch, without a server: exact, so alone means the same bytes.

The server's tests have two slots of the bank for each shape (`tinker_client.LIMITS`).
"""

import contextlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
from tinker_client import LIMITS, load_service

from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.tinker.sampling import BASE, Request, Sampling
from jzero.tinker.service import Service
from jzero.tinker.tenants import Shape

PROMPT = (72, 101, 108, 108, 111)
SMALL = Shape(4, ("q", "k", "v", "o", "gate", "up", "down", "lm_head"))
LARGE = Shape(12, ("q", "v", "down"))

Answers = dict[str, bytes | BaseException]


@pytest.fixture(scope="module")
def service(model: str, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A service whose thread does not run: the tests call its sampling."""
    return load_service(model, tmp_path_factory.mktemp("quiet"))


@pytest.fixture
def sampling(service: Service) -> Sampling:
    """Sampling without any snapshot."""
    for key in list(service.sampling.snapshots.by_key):
        service.sampling.snapshots.drop(key)
    return service.sampling


def random_adapter(model: qwen.QwenConfig, shape: Shape, seed: int) -> qwen.Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.device_put((0.3 * rng.standard_normal(leaf.shape)).astype(np.float32)),
        adapters.abstract(model, shape.settings),
    )


def take(sampling: Sampling, key: str, shape: Shape, seed: int) -> None:
    adapter = random_adapter(sampling.snapshots.model, shape, seed)
    sampling.snapshots.take(key, shape, adapter)


def ask(sampling: Sampling, answers: Answers, key: str, name: str = "", **changes: object) -> None:
    """Queues a request for a snapshot. Its answer comes under `name`, by default the key."""
    fields: dict = {
        "snapshot": key,
        "prompt": PROMPT,
        "num_samples": 2,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "stop_ids": (),
        "stop_strings": (),
        "noise": (3, 4),
        "has_prompt_logprobs": True,
        "topk_prompt": 2,
        "topk_sampled": 1,
        "owner_session": "s",
    }

    def done(result: bytes | BaseException) -> None:
        assert (name or key) not in answers, "a request is answered once"
        answers[name or key] = result

    sampling.queue(Request(**fields | changes, done=done))


def live_adapters(sampling: Sampling) -> set[int]:
    return {live.adapter.number for live in sampling.live.values()}


def num_holders(sampling: Sampling) -> int:
    bank = sampling.snapshots.bank
    assert bank is not None
    occupants = [one for group in bank.groups for one in group.occupants]
    return sum(one.num_holders for one in occupants if one is not None)


def test_snapshots_of_several_tenants_and_the_base_are_one_batch(sampling) -> None:
    take(sampling, "a", SMALL, 1)
    take(sampling, "b", LARGE, 2)
    take(sampling, "c", SMALL, 3)
    choices = {"a": {}, "b": {"top_k": 3}, "c": {"top_p": 0.5, "temperature": 0.7}, BASE: {}}
    alone: Answers = {}
    for key, changes in choices.items():
        ask(sampling, alone, key, **changes)
        sampling.sample(lambda: None)
    together: Answers = {}
    for key, changes in choices.items():
        ask(sampling, together, key, **changes)
    most_live = 0

    def watch() -> None:
        nonlocal most_live
        most_live = max(most_live, len(live_adapters(sampling)))

    sampling.sample(watch)

    assert most_live == 4
    assert together == alone
    assert len({*together.values()}) == 4
    assert num_holders(sampling) == 0


def test_more_snapshots_than_slots_take_turns(sampling) -> None:
    keys = [f"k{number}" for number in range(LIMITS.resident_snapshots + 3)]
    alone: Answers = {}
    for number, key in enumerate(keys):
        take(sampling, key, SMALL, number)
        ask(sampling, alone, key)
        sampling.sample(lambda: None)
    together: Answers = {}
    for key in keys:
        ask(sampling, together, key)

    while sampling.waiting:
        sampling.sample(lambda: None)

    # The first ones were on the host meanwhile.
    assert together == alone
    assert len({*together.values()}) == len(keys)
    assert num_holders(sampling) == 0


def test_snapshots_that_come_and_go_do_not_change_those_that_are_sampled(sampling) -> None:
    take(sampling, "a", SMALL, 1)
    alone: Answers = {}
    ask(sampling, alone, "a")
    sampling.sample(lambda: None)
    calls = 0
    together: Answers = {}

    def train() -> None:
        """Each call takes a newer snapshot of a tenant, and drops the one before it."""
        nonlocal calls
        calls += 1
        take(sampling, f"new{calls}", SMALL, 10 + calls)
        if calls == 3:
            assert live_adapters(sampling)
            ask(sampling, together, "new3")
            # The request goes on with the weights that it holds.
            sampling.snapshots.drop("a")
        if calls > 4:
            sampling.snapshots.drop(f"new{calls - 1}")

    ask(sampling, together, "a")
    sampling.sample(train)

    assert calls > 4
    assert together["a"] == alone["a"] != together["new3"]
    assert num_holders(sampling) == 0
    gone: Answers = {}
    ask(sampling, gone, "a")
    sampling.sample(lambda: None)
    assert isinstance(gone["a"], UserError)


def test_equal_prompts_of_one_snapshot_share_a_prefill_and_those_of_others_do_not(sampling) -> None:
    take(sampling, "a", SMALL, 1)
    take(sampling, "b", SMALL, 2)

    def prefills_of(keys: list[str]) -> int:
        before = sampling.prefills
        for number, key in enumerate(keys):
            ask(sampling, {}, key, str(number))
        sampling.sample(lambda: None)
        return sampling.prefills - before

    assert prefills_of(["a", "a", "a"]) == 1
    assert prefills_of(["a", "b", "a", BASE]) == 3


def test_a_failed_run_frees_the_bank(sampling, monkeypatch) -> None:
    take(sampling, "a", SMALL, 1)
    answers: Answers = {}
    ask(sampling, answers, "a")

    def fail(*_: object) -> Callable:
        raise RuntimeError("no device")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(sampling.engine, "generate", fail)
        sampling.sample(lambda: None)

    assert isinstance(answers["a"], RuntimeError)
    assert num_holders(sampling) == 0
    again: Answers = {}
    ask(sampling, again, "a")
    sampling.sample(lambda: None)
    assert isinstance(again["a"], bytes)


def test_a_call_that_fails_for_one_request_fails_no_other(sampling, monkeypatch) -> None:
    """Requests that were live are decoded again, one by one, with the same results."""
    take(sampling, "a", SMALL, 1)
    expected: Answers = {}
    for name, noise in (("first", (1, 2)), ("second", (3, 4))):
        ask(sampling, expected, "a", name, noise=noise, owner="ann")
    sampling.sample(lambda: None)
    answers: Answers = {}
    ask(sampling, answers, "a", "first", noise=(1, 2), owner="ann")
    # A number that no field of a body allows, and that does not fit the program.
    ask(sampling, answers, BASE, "bad", top_k=10**30, owner="bob")
    ask(sampling, answers, "a", "second", noise=(3, 4), owner="ann")

    for _ in range(8):
        if sampling.waiting:
            with contextlib.suppress(OverflowError):
                sampling.sample(lambda: None)

    assert isinstance(answers.pop("bad"), OverflowError)
    assert answers == expected
    assert num_holders(sampling) == 0 and not sampling.waiting


def test_a_request_of_an_ended_session_is_answered_if_a_call_fails(sampling) -> None:
    """Some of its samples have begun, and the other requests that were live are repeated."""
    slots = sampling.engine.max_concurrent_decodes
    answers: Answers = {}
    for name in ("first", "second"):
        ask(sampling, answers, BASE, name, owner="ann")
    many = {"num_samples": slots, "noise": tuple(range(slots))}
    ask(sampling, answers, BASE, "bob", owner="bob", owner_session="bob", **many)
    calls = 0

    def end_session_and_fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            assert "bob" in {live.request.owner for live in sampling.live.values()}
            sampling.cancel("bob")
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError):
        sampling.sample(end_session_and_fail)
    while sampling.waiting:
        sampling.sample(lambda: None)

    assert isinstance(answers["bob"], RuntimeError)
    assert isinstance(answers["first"], bytes) and isinstance(answers["second"], bytes)
    assert num_holders(sampling) == 0 and not sampling.live


def test_a_request_that_does_not_fit_32_bits_is_refused(sampling) -> None:
    for change in ({"top_k": 2**31}, {"stop_ids": (2**40,)}, {"noise": (2**31, 1)}):
        ask(sampling, {}, BASE, "x", **change)
        with pytest.raises(UserError, match="32 bits"):
            sampling.check(sampling.waiting.pop().request)


def test_a_checkpoint_that_cannot_be_read_fails_its_request_only(sampling) -> None:
    def damaged() -> tuple[Shape, qwen.Params]:
        raise KeyError("layers.q.a")

    sampling.snapshots.readers["damaged"] = damaged
    answers: Answers = {}
    ask(sampling, answers, BASE)
    ask(sampling, answers, "damaged")
    sampling.sample(lambda: None)
    assert isinstance(answers["damaged"], KeyError) and isinstance(answers[BASE], bytes)


def test_one_owner_leaves_slots_and_turns_to_another(sampling) -> None:
    """Long samples of one key wait when another key asks, and have the same results."""
    slots = sampling.engine.max_concurrent_decodes
    alone: Answers = {}
    ask(sampling, alone, BASE, "long", num_samples=slots + 8, noise=tuple(range(slots + 8)))
    sampling.sample(lambda: None)
    answers: Answers = {}
    ask(sampling, answers, BASE, "ann 0", owner="ann")
    sampling.sample(lambda: None)
    most_of_bob = calls = 0

    def watch() -> None:
        nonlocal most_of_bob, calls
        calls += 1
        owners = [live.request.owner for live in sampling.live.values()]
        most_of_bob = max(most_of_bob, owners.count("bob"))
        if calls == 3:
            ask(sampling, answers, BASE, "ann 1", owner="ann")
        if calls == 4:
            assert owners.count("ann"), "ann's samples began at the next call"

    noise = tuple(range(slots + 8))
    ask(sampling, answers, BASE, "bob", owner="bob", num_samples=slots + 8, noise=noise)
    sampling.sample(watch)

    assert calls > 4 and most_of_bob == slots - slots // 4
    assert answers["bob"] == alone["long"] and answers["ann 1"] == answers["ann 0"]


def test_equal_prompts_of_two_owners_share_no_prefill(sampling) -> None:
    """The time of a sample must not tell one key which prompts another key has sent."""
    before = sampling.prefills
    for number, owner in enumerate(("ann", "ann", "bob")):
        ask(sampling, {}, BASE, str(number), owner=owner)
    sampling.sample(lambda: None)
    assert sampling.prefills - before == 2


def test_an_adapter_that_is_not_finite_is_no_snapshot(sampling) -> None:
    adapter = random_adapter(sampling.snapshots.model, SMALL, 1)
    adapter["layers"]["q"]["b"] = adapter["layers"]["q"]["b"].at[0, 0, 0].set(np.inf)
    with pytest.raises(UserError, match="not finite in float32"):
        sampling.snapshots.take("bad", SMALL, adapter)
    assert "bad" not in sampling.snapshots.by_key
