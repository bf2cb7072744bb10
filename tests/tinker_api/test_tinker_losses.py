"""Every loss against float64: its terms as a Python loop, its gradient through a naive model."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import torch

from jzero.clock import compilation_counter
from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters
from jzero.sharding.mesh import train_mesh
from jzero.tinker import datums, losses, wire
from jzero.tinker.datums import Datum, FwdBwd
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.tenants import add_gradient, forward
from jzero.training.learner import token_learner
from jzero.training.optimizer import AdamW
from jzero.types import Batch, Params, State

ADAPTER = AdapterConfig(rank=3, alpha=32.0, targets=("all", "lm_head"))
LENGTHS = (5, 17, 9, 30, 1)
ROW_LENGTHS = (32,)
LOW, HIGH, BETA = 0.7, 1.4, 0.3
BOUNDS = {"low": LOW, "high": HIGH}


class Tenant(NamedTuple):
    """An adapter and its gradient since the last step."""

    state: State
    gradient: Params

    @property
    def params(self) -> Params:
        return self.state.params


class Tiny:
    """A frozen base of random weights, and the programs that train adapters on it."""

    def __init__(self, logit_chunk: int = 10**6) -> None:
        compute = replace(reference.settings().model, adapter=ADAPTER, logit_chunk=logit_chunk)
        mesh = train_mesh(1, 1, 1, jax.devices()[:1])
        self.learner = token_learner(reference.MODEL, compute, mesh)
        self.base = reference.random_params()
        self.frozen = self.learner.freeze(jax.tree.map(jnp.array, self.base))

    def begin(self, seed: int = 0) -> Tenant:
        """Returns an adapter whose B is not 0, so that every factor has a gradient."""
        state = self.learner.start(self.learner.init_adapter(seed))
        noise = np.random.default_rng(seed)
        factors = {
            name: {"a": leaf["a"], "b": jnp.array(noise.normal(0, 0.1, leaf["b"].shape), "float32")}
            for name, leaf in adapters.factors_of(state.params).items()
        }
        params = jax.device_put(adapters.tree_of(factors), self.learner.shardings)
        state = replace(state, params=params)
        return Tenant(state, self.learner.zero_gradient())

    def pack(self, data: list[Datum], loss: str = "cross_entropy") -> datums.Packed:
        kind = losses.KINDS.index(loss)
        call = FwdBwd("m", 1, kind, BETA, is_forward_only=False, data=data)
        return datums.pack(call, ROW_LENGTHS, microbatch_tokens=64, shards=1)

    def gradient(
        self, tenant: Tenant, packed: datums.Packed, loss: str, beta: float = BETA
    ) -> tuple[Tenant, np.ndarray, np.ndarray]:
        """Returns the adapter with the gradient added, the loss terms and the log-probs."""
        kind = losses.loss_of(losses.KINDS.index(loss), beta)
        gradient, terms, logps = add_gradient(
            self.learner, tenant.state, self.frozen, packed, kind, tenant.gradient
        )
        return tenant._replace(gradient=gradient), terms, logps

    def forward(self, tenant: Tenant, packed: datums.Packed, loss: str) -> tuple:
        """Returns the loss terms and the log-probs."""
        kind = losses.loss_of(losses.KINDS.index(loss), BETA)
        return forward(self.learner, tenant.state, self.frozen, packed, kind)

    def add(self, tenant: Tenant, data: list[Datum], loss: str) -> tuple[Tenant, float]:
        tenant, terms, _ = self.gradient(tenant, self.pack(data, loss), loss)
        return tenant, float(terms.sum(dtype=np.float64))

    def step(self, tenant: Tenant, settings: AdamW) -> tuple[Tenant, dict[str, float]]:
        """Returns the adapter after a step, and the norms."""
        state, norms = self.learner.step(tenant.state, tenant.gradient, settings)
        norms = {name: float(value) for name, value in norms.items()}
        return Tenant(state, self.learner.zero_gradient()), norms


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


def random_data(num_targets: int = 1, seed: int = 0) -> list[Datum]:
    """Returns data with negative weights, advantages of 0, and ratios on both sides of the clip."""
    rng = np.random.default_rng(seed)
    data = []
    for length in LENGTHS:
        advantages = rng.normal(0, 1, length) * (rng.random(length) < 0.8)
        data.append(
            Datum(
                tokens=rng.integers(0, reference.VOCAB, length).astype(np.int32),
                targets=rng.integers(0, reference.VOCAB, (length, num_targets)),
                weights=rng.normal(0, 1, (length, num_targets)).astype(np.float32),
                logprobs=rng.normal(-4.2, 0.6, length).astype(np.float32),
                advantages=advantages.astype(np.float32),
                low=np.full(length, LOW, np.float32),
                high=np.full(length, HIGH, np.float32),
                is_matrix=num_targets > 1,
            )
        )
    return data


def term(loss: str, logp: np.ndarray, datum: Datum, t: int) -> tuple[float, np.ndarray]:
    """Returns the loss term of one position and its slope by the log-probs of its targets."""
    A, old, p = float(datum.advantages[t]), float(datum.logprobs[t]), float(logp[0])
    ratio = math.exp(p - old)
    clipped = min(max(ratio, LOW), HIGH)
    if loss == "cross_entropy":
        weights = datum.weights[t].astype(np.float64)
        return -float(weights @ logp), -weights
    if loss == "importance_sampling":
        return -ratio * A, np.array([-ratio * A])
    if loss == "ppo":
        is_inside = ratio * A <= clipped * A
        return -min(ratio * A, clipped * A), np.array([-ratio * A if is_inside else 0.0])
    if loss == "cispo":
        return -clipped * A * p, np.array([-clipped * A])
    assert loss == "dro"
    return -(A * p - BETA / 2 * (p - old) ** 2), np.array([-(A - BETA * (p - old))])


def with_adapter(base: dict, adapter: dict) -> dict:
    """Returns W + alpha / R * A B in float64."""
    layers = dict(base["layers"])
    for name, leaf in adapter["layers"].items():
        weight, a, b = layers[name], leaf["a"], leaf["b"]
        change = jnp.einsum("lir,lro->lio", a.reshape(len(a), -1, 3), b.reshape(len(b), 3, -1))
        layers[name] = weight + ADAPTER.alpha / 3 * change.reshape(weight.shape)
    return base | {"layers": layers}


def logits_of(base: dict, adapter: dict, tokens: np.ndarray) -> jax.Array:
    """Returns the logits in float64. The adapter does not change the embedding."""
    hidden = reference.hidden(reference.MODEL, with_adapter(base, adapter), tokens)
    head = adapter["lm_head"]
    return hidden @ (base["embed"].T + ADAPTER.alpha / 3 * head["a"] @ head["b"])


def naive(
    tiny: Tiny, state: Tenant, data: list[Datum], loss: str
) -> tuple[float, dict, list[np.ndarray]]:
    """Returns the loss, its gradient by the adapter, and the log-probs, all in float64."""
    tokens = reference.padded([datum.tokens for datum in data])
    targets = np.zeros((*tokens.shape, data[0].targets.shape[1]), np.int32)
    for row, datum in enumerate(data):
        targets[row, : len(datum.tokens)] = datum.targets
    base = reference.doubles(tiny.base)
    with jax.enable_x64(True):

        def logps_of(adapter: dict) -> jax.Array:
            logits = logits_of(base, adapter, tokens)
            return jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)

        adapter = jax.tree.map(jnp.asarray, reference.doubles(state.params))
        logps, backward = jax.vjp(jax.jit(logps_of), adapter)
        logps = np.asarray(logps)
        slopes, total = np.zeros(targets.shape), 0.0
        for row, datum in enumerate(data):
            for t in range(len(datum.tokens)):
                value, slope = term(loss, logps[row, t], datum, t)
                total += value
                slopes[row, t] = slope
        (gradient,) = backward(jnp.asarray(slopes))
        rows = [logps[row, : len(datum.tokens)] for row, datum in enumerate(data)]
        return total, jax.device_get(gradient), rows


CASES = [(loss, 1) for loss in losses.KINDS] + [("cross_entropy", 3)]


@pytest.mark.parametrize(("loss", "num_targets"), CASES)
def test_the_loss_and_its_gradient_are_those_of_float64(tiny, loss, num_targets) -> None:
    data, state = random_data(num_targets), tiny.begin()

    found, total = tiny.add(state, data, loss)

    wanted_total, wanted, _ = naive(tiny, state, data, loss)
    assert total == pytest.approx(wanted_total, rel=2e-6, abs=2e-5)
    reference.assert_same_gradient(found.gradient, wanted, 2e-5)


@pytest.mark.parametrize("num_targets", [1, 3])
def test_chunks_of_logits_have_the_same_gradient(num_targets) -> None:
    tiny = Tiny(logit_chunk=16)
    data, state = random_data(num_targets), tiny.begin()

    found, total = tiny.add(state, data, "cross_entropy")

    wanted_total, wanted, _ = naive(tiny, state, data, "cross_entropy")
    assert total == pytest.approx(wanted_total, rel=2e-6, abs=2e-5)
    reference.assert_same_gradient(found.gradient, wanted, 2e-5)
    assert np.linalg.norm(wanted["lm_head"]["a"]) > 0.1


def test_log_probs_come_back_in_the_order_and_shape_of_the_data(tiny) -> None:
    data, state = random_data(3), tiny.begin()
    packed = tiny.pack(data)
    _, rows = tiny.forward(state, packed, "cross_entropy")
    _, _, wanted = naive(tiny, state, data, "cross_entropy")
    for found, expected in zip(packed.from_rows(rows), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_several_calls_accumulate_to_one(tiny) -> None:
    data, state = random_data(), tiny.begin()
    whole, _ = tiny.add(state, data, "ppo")
    parts = state
    for datum in data:
        parts, _ = tiny.add(parts, [datum], "ppo")
    reference.assert_same_gradient(parts.gradient, whole.gradient, 1e-5)


# -- shared prefixes -------------------------------------------------------------------------------

SHARED_ROWS = (128, 256)


def random_groups(seed: int = 0) -> list[Datum]:
    """Returns samples of two prompts as RL sends them, and a datum that is alone.

    The prompts have 41 and 50 tokens, so that data share 40 and 49 inputs: the last one predicts
    the first token of each sample.
    """
    rng = np.random.default_rng(seed)
    data = []
    for prompt_length, lengths in ((41, (3, 7, 20)), (50, (11, 4)), (1, (30,))):
        prompt = rng.integers(0, reference.VOCAB, prompt_length)
        for length in lengths:
            ids = np.concatenate([prompt, rng.integers(0, reference.VOCAB, length)])
            is_sampled = np.arange(1, len(ids)) >= prompt_length
            advantages = np.where(is_sampled, rng.normal(0, 1, len(ids) - 1), 0)
            fields = {name: np.full(len(ids) - 1, value) for name, value in BOUNDS.items()}
            data.append(
                Datum(
                    tokens=ids[:-1].astype(np.int32),
                    targets=np.where(is_sampled, ids[1:], 0)[:, None],
                    weights=is_sampled[:, None].astype(np.float32),
                    logprobs=np.where(is_sampled, -4.2, 0).astype(np.float32),
                    advantages=advantages.astype(np.float32),
                    is_matrix=False,
                    num_without_loss=prompt_length - 1,
                    **fields,
                )
            )
    return data


def pack_rows(data: list[Datum], lengths: tuple[int, ...], loss: str = "ppo") -> datums.Packed:
    kind = losses.KINDS.index(loss)
    call = FwdBwd("m", 1, kind, BETA, is_forward_only=False, data=data)
    return datums.pack(call, lengths, microbatch_tokens=512, shards=1)


def without_sharing(data: list[Datum]) -> list[Datum]:
    return [replace(datum, num_without_loss=0) for datum in data]


@pytest.mark.parametrize("loss", losses.KINDS)
def test_a_shared_prefix_has_the_same_log_probs_and_gradient_with_fewer_tokens(tiny, loss) -> None:
    data, state = random_groups(), tiny.begin()
    shared = pack_rows(data, SHARED_ROWS, loss)
    plain = pack_rows(without_sharing(data), SHARED_ROWS, loss)
    assert plain.layout.prefix == 0 and shared.layout.prefix == 64
    assert [place.shared for place in shared.places[:5]] == [40, 40, 40, 49, 49]

    results = []
    for packed in (shared, plain):
        gradient, terms, logps = tiny.gradient(state, packed, loss)
        scored_terms, scored = tiny.forward(state, packed, loss)
        np.testing.assert_allclose(scored_terms, terms, atol=2e-5)
        results.append((gradient.gradient, terms.sum(), packed.from_rows(logps)))
        for left, right in zip(packed.from_rows(scored), packed.from_rows(logps), strict=True):
            np.testing.assert_allclose(left, right, atol=2e-5)

    (found, total, logps), (wanted, wanted_total, wanted_logps) = results
    assert total == pytest.approx(wanted_total, rel=1e-5)
    reference.assert_same_gradient(found, wanted, 2e-5)
    for left, right, datum in zip(logps, wanted_logps, data, strict=True):
        assert left.shape == (len(datum.tokens),)
        np.testing.assert_allclose(left, right, atol=2e-5)


def test_a_group_of_samples_computes_its_prompt_once() -> None:
    """Eight samples of 64 tokens with a prompt of 64: rows of one prefix and eight slots."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 99, (4, 64))
    data = []
    for prompt in prompts:
        for _ in range(8):
            ids = np.concatenate([prompt, rng.integers(0, 99, 64)])
            numbers = {name: np.full(127, value, np.float32) for name, value in BOUNDS.items()}
            flat = {name: np.ones(127, np.float32) for name in ("logprobs", "advantages")}
            data.append(
                Datum(
                    tokens=ids[:-1],
                    targets=ids[1:, None],
                    weights=np.ones((127, 1), np.float32),
                    is_matrix=False,
                    num_without_loss=63,
                    **numbers,
                    **flat,
                )
            )
    shared = pack_rows(data, (256, 512, 1024))
    assert tuple(shared.layout) == (64, 8, 64)
    assert shared.batch.tokens.size == 4 * 576
    assert pack_rows(without_sharing(data), (256, 512, 1024)).batch.tokens.size >= 32 * 127


def test_positions_with_a_loss_or_other_targets_are_not_shared() -> None:
    first, second = random_groups()[:2]
    assert datums.num_shareable(first, second) == 40
    targets = second.targets.copy()
    targets[10] = 1
    assert datums.num_shareable(first, replace(second, targets=targets)) == 10
    assert datums.num_shareable(first, replace(second, num_without_loss=7)) == 7
    apart = [replace(datum, num_without_loss=31) for datum in random_groups()[:5]]
    assert pack_rows(apart, SHARED_ROWS).layout.prefix == 0, "31 tokens are too few"


def test_the_sum_is_not_a_mean(tiny) -> None:
    state, data = tiny.begin(), random_data()
    once, first = tiny.add(state, data, "importance_sampling")
    twice, second = tiny.add(state, [*data, *data], "importance_sampling")
    assert second == pytest.approx(2 * first, rel=1e-5)
    doubled = jax.tree.map(lambda x: 2 * x, once.gradient)
    reference.assert_same_gradient(twice.gradient, doubled, 1e-5)


SETTINGS = [
    AdamW(1e-2),
    AdamW(1e-2, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1),
    AdamW(3e-3, weight_decay=0.3, clip_norm=0.5),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_are_those_of_torch(tiny, settings) -> None:
    """Five steps with AdamW of torch, the third without any gradient since the second."""
    state = tiny.begin()
    leaves = [
        torch.nn.Parameter(torch.tensor(np.asarray(leaf, np.float64)))
        for leaf in jax.tree.leaves(state.params)
    ]
    adam = torch.optim.AdamW(
        leaves,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for number in range(5):
        if number != 2:
            state, _ = tiny.add(state, random_data(seed=number), "cross_entropy")
        gradient = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.gradient)]
        norm = math.sqrt(sum((leaf**2).sum() for leaf in gradient))
        factor = 1.0
        if settings.clip_norm and norm > settings.clip_norm:
            factor = settings.clip_norm / norm
        for leaf, values in zip(leaves, gradient, strict=True):
            leaf.grad = torch.tensor(factor * values)
        adam.step()

        state, norms = tiny.step(state, settings)

        assert norms["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for found, wanted in zip(jax.tree.leaves(state.params), leaves, strict=True):
            np.testing.assert_allclose(found, wanted.detach().numpy(), atol=2e-6 * (number + 1))
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.gradient))


def test_a_failed_call_leaves_the_gradient_as_it_was(tiny) -> None:
    state, _ = tiny.add(tiny.begin(), random_data(), "ppo")
    packed = tiny.pack(random_data())
    wrong = replace(packed, batch=replace(packed.batch, weights=packed.batch.weights[..., 0]))
    with pytest.raises((TypeError, ValueError, IndexError)):
        tiny.gradient(state, wrong, "cross_entropy")
    again, _ = tiny.add(state, random_data(), "ppo")  # nothing was donated
    doubled = jax.tree.map(lambda x: 2 * x, state.gradient)
    reference.assert_same_gradient(again.gradient, doubled, 1e-5)


def random_call(rng: np.random.Generator) -> tuple[list[Datum], str, float, AdamW]:
    """Returns data with bounds, a loss, its beta, and the numbers of a step, all at random."""
    low, high, beta = rng.uniform(0.1, 0.9), rng.uniform(1.1, 3), rng.uniform(0, 2)
    data = [
        replace(datum, low=np.full_like(datum.low, low), high=np.full_like(datum.high, high))
        for datum in random_data(seed=int(rng.integers(100)))
    ]
    numbers = AdamW(
        learning_rate=rng.uniform(1e-5, 1e-3),
        beta1=rng.uniform(0.5, 0.95),
        beta2=rng.uniform(0.9, 0.999),
        eps=10 ** rng.uniform(-12, -6),
        weight_decay=rng.choice([0.0, 0.1]),
        clip_norm=rng.choice([0.0, 1.0]),
    )
    return data, str(rng.choice(losses.KINDS)), beta, numbers


def test_fifty_settings_of_losses_and_steps_compile_nothing_after_the_first(tiny) -> None:
    rng = np.random.default_rng(0)
    tenant = tiny.begin()

    def call() -> None:
        nonlocal tenant
        data, loss, beta, numbers = random_call(rng)
        packed = tiny.pack(data, loss)
        tenant, _, _ = tiny.gradient(tenant, packed, loss, beta)
        tiny.forward(tenant, packed, loss)
        tenant, norms = tiny.step(tenant, numbers)
        assert norms["update_norm"] > 0

    call()
    counter = compilation_counter()
    counter.pop()
    for _ in range(50):
        call()

    assert counter.pop()["compile/programs"] == 0


def test_adapters_of_one_seed_are_equal(tiny) -> None:
    learner = tiny.learner
    reference.assert_equal(learner.init_adapter(7), learner.init_adapter(7))
    # No adapter but the first one of a shape compiles anything.
    assert learner._adapter_program._cache_size() == 1
    assert adapters.num_params(reference.MODEL, ADAPTER) > 0


# -- what is refused -------------------------------------------------------------------------------


def tensor(values: object, dtype: str) -> wire.Message:
    array = np.asarray(values, dtype)
    code = {"<f4": wire.FLOAT32, "<i8": wire.INT64}[dtype]
    return {"dense": array.tobytes(), "dtype": code, "shape": [*array.shape]}


def request(loss: str = "cross_entropy", **changes: wire.Value) -> wire.Message:
    """Returns a request of one datum; `changes` are of its loss_fn_inputs, None to leave out."""
    inputs: dict[str, wire.Value | None] = {"target_tokens": tensor([1, 2], "<i8")}
    if loss != "cross_entropy":
        inputs |= {"logprobs": tensor([0, 0], "<f4"), "advantages": tensor([0, 0], "<f4")}
    inputs |= changes
    sent = {name: value for name, value in inputs.items() if value is not None}
    tokens = np.array([1, 2], "<i4").tobytes()
    datum = {"model_input": [{"encoded_text": {"tokens": tokens}}], "loss_fn_inputs": sent}
    return {"model_id": "m", "seq_id": 1, "data": [datum], "loss_fn": loss}


def read(message: wire.Message) -> datums.FwdBwd:
    return datums.read_batch(message, vocabulary=10, longest=4, limits=TinkerLimits())


def test_a_request_is_read_with_its_defaults() -> None:
    (datum,) = read(request()).data
    np.testing.assert_array_equal(datum.weights, [[1], [1]])
    call = read(request("ppo") | {"loss_fn_config": {"clip_high_threshold": 1.3}})
    np.testing.assert_allclose(call.data[0].high, 1.3)
    np.testing.assert_allclose(call.data[0].low, losses.DEFAULT_LOW)
    assert read(request("dro") | {"loss_fn_config": {"beta": 0.5}}).beta == 0.5


def test_dro_has_its_penalty_on_sampled_tokens_without_an_advantage_and_not_on_prompts() -> None:
    old = tensor([0, -0.5], "<f4")  # a token of the prompt, and a sampled one
    (datum,) = read(request("dro", logprobs=old)).data

    assert datum.weights.tolist() == [[0], [1]]
    assert datum.num_without_loss == 1
    (of_ppo,) = read(request("ppo", logprobs=old)).data
    assert of_ppo.num_without_loss == 2

    columns = [jnp.asarray(column)[None] for column in (datum.advantages, datum.logprobs)]
    zeros = jnp.zeros((1, 2))
    batch = Batch(
        tokens=zeros,  # not read, as the next three
        targets=zeros,
        segments=zeros,
        positions=zeros,
        weights=jnp.asarray(datum.weights)[None],
        sampler_logps=columns[1],
        advantages=columns[0],
        ratio_low=zeros,
        ratio_high=zeros,
    )
    logps = jnp.array([[[-2.0], [-1.5]]])
    loss = losses.loss_of(losses.KINDS.index("dro"), 0.3)
    terms, _ = loss((logps,), batch, None, True)
    np.testing.assert_allclose(terms, [[0, 0.3 / 2 * 1.0**2]], rtol=1e-6)


def changed(change: Callable[[wire.Message], None], loss: str = "ppo") -> wire.Message:
    message = request(loss)
    change(message)
    return message


REFUSED = [
    (request() | {"loss_fn": "stable_reinforce"}, "not published: set loss_fn=importance_sampling"),
    (request() | {"loss_fn": "gspo"}, "sequence_ratio_mask"),
    (request() | {"loss_fn": "nonsense"}, "choose one of"),
    (request() | {"loss_fn_config": {"beta": 1.0}}, "loss_fn_config.beta is not served"),
    (request("dro") | {"loss_fn_config": {"beta": math.nan}}, "beta=nan: send a number"),
    (request() | {"data": []}, "0 datums"),
    (request(target_tokens=None), "target_tokens is missing"),
    (request(target_tokens=tensor([1], "<i8")), "shape"),
    (request(target_tokens=tensor([1, 10], "<i8")), "outside of 0 to 9"),
    (request(target_tokens=tensor([1, -1], "<i8")), "outside of 0 to 9"),
    (request("ppo", target_tokens=tensor([[1], [2]], "<i8")), "several targets"),
    (request(weights=tensor([1, math.inf], "<f4")), "not finite"),
    (request(weights=tensor([1, 2], "<i8")), "float32"),
    (request(mask=tensor([1, 2], "<f4")), "mask is not an input"),
    (request("ppo", logprobs=None), "needs loss_fn_inputs.logprobs"),
    (changed(lambda m: m["data"][0].update(model_input=[{"image": {}}])), "no images"),
    (changed(lambda m: m["data"][0].update(model_input=[])), "datum 0 has 0 tokens"),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_is_not_served_is_refused_by_name(message, reason) -> None:
    with pytest.raises((UserError, wire.WireError), match=reason):
        read(message)


def test_a_datum_that_is_too_long_is_refused() -> None:
    message = request(target_tokens=tensor([1] * 5, "<i8"))
    tokens = np.array([1] * 5, "<i4").tobytes()
    message["data"][0]["model_input"] = [{"encoded_text": {"tokens": tokens}}]
    with pytest.raises(UserError, match="has 5 tokens: send 1 to 4"):
        read(message)
