"""Many adapters in one batch, against one adapter at a time."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine
from test_engine import PROMPTS, TEMPERATURE

from jzero.config import AdapterConfig, RolloutConfig
from jzero.decoder import adapter_bank
from jzero.decoder.adapter_bank import BASE_MODEL, AdapterBank, HeldAdapter
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import Groups, Sequence
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.sharding.mesh import adapter_shardings, make_mesh, train_mesh
from jzero.sharding.publish import publisher
from jzero.training.frozen import freeze

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = test_engine.CONFIGS["qwen2"]
ADAPTERS = {
    "three": AdapterConfig(rank=3, alpha=8.0),
    "six": AdapterConfig(rank=6, alpha=9.0),
    "other six": AdapterConfig(rank=6, alpha=4.0),
    "attention": AdapterConfig(rank=12, alpha=20.0, targets=("q", "v", "o")),
    "words": AdapterConfig(rank=5, alpha=9.0, targets=("down", "lm_head")),
}
REQUESTS = Samples(is_trained=False, has_choices=True)
MAX_NEW = 12


@cache
def engine_in(
    dtype: str = "float32", is_exact: bool = False, shape: tuple[int, int] = (1, 1)
) -> Engine:
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = make_mesh(devices, {"slots": shape[0], "tensor": shape[1]})
    settings = RolloutConfig(**test_engine.SMALL | {"kv_dtype": dtype, "num_slots": 12})
    kernels = "exact" if is_exact else ""
    return Engine(MODEL, settings, mesh, test_engine.STOP_IDS, dtype, kernels, exact=is_exact)


@cache
def adapter(name: str, seed: int = 0) -> qwen.Params:
    """Returns an adapter whose factors are all random."""
    rng = np.random.default_rng([len(name), seed])
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape), jnp.float32),
        adapters.abstract(MODEL, ADAPTERS[name]),
    )


@cache
def base_of(engine: Engine, has_int8_base: bool = False) -> qwen.Params:
    """Returns the decoder's weights of the frozen base."""
    train = train_mesh(1, 1, 1, jax.devices()[:1])
    params = jax.tree.map(jnp.array, test_engine.host_params("qwen2"))
    frozen = freeze(params, MODEL, train, str(engine.dtype), has_int8_base)
    return publisher(MODEL, train, engine.mesh, str(engine.dtype))(frozen)


def bank_of(engine: Engine, base: qwen.Params, slots: int = 2, **options: object) -> AdapterBank:
    is_exact = engine.program_settings.arithmetic.is_exact
    return AdapterBank(
        MODEL, base, engine.mesh, engine.dtype, most_slots=slots, exact=is_exact, **options
    )


def full_bank(engine: Engine, base: qwen.Params) -> tuple[AdapterBank, dict[str, HeldAdapter]]:
    """Returns a bank, and the base and all adapters, which are held."""
    bank = bank_of(engine, base, slots=3)
    held = {"base": BASE_MODEL}
    for name, settings in ADAPTERS.items():
        assert bank.add(name, settings, adapter(name))
        slot = bank.hold(name)
        assert slot is not None
        held[name] = slot
    return bank, held


def make_groups(held: dict[str, HeldAdapter]) -> Groups:
    """Returns two samples of every prompt for every adapter. All adapters have the same noise."""
    groups: Groups = []
    for chosen in held.values():
        for number, prompt in enumerate(PROMPTS):
            group = []
            for sample in range(2):
                sequence = Sequence(
                    prompt_id=number,
                    sample_index=sample,
                    request_id=2 * number + sample,
                    prompt_tokens=prompt,
                    length_limit=len(prompt) + MAX_NEW,
                    adapter=chosen,
                )
                group.append(sequence)
            groups.append(group)
    return groups


Answers = dict[tuple[int, int], Sequence]


def complete(
    engine: Engine, params: qwen.Params, held: dict[str, HeldAdapter]
) -> dict[str, Answers]:
    """Decodes the prompts with every adapter, all in one run."""
    groups = make_groups(held)
    scheduler = Scheduler(engine, params, test_engine.text_of, REQUESTS)
    seed = test_engine.seed_on(engine)
    with jax.transfer_guard("disallow"):
        list(scheduler.run(groups, 2, TEMPERATURE, seed))
    test_engine.assert_empty(engine)
    answers: dict[str, Answers] = {}
    for index, name in enumerate(held):
        of_adapter = groups[index * len(PROMPTS) : (index + 1) * len(PROMPTS)]
        sequences = [sequence for group in of_adapter for sequence in group]
        answers[name] = test_engine.by_key(sequences)
    return answers


def alone(engine: Engine, base: qwen.Params, name: str) -> Answers:
    """Decodes the prompts with one adapter, without a bank."""
    params = base
    if name != "base":
        factors = jax.tree.map(lambda x: x.astype(engine.dtype), adapter(name))
        factors = jax.device_put(factors, adapter_shardings(MODEL, ADAPTERS[name], engine.mesh))
        params = adapters.join(base, factors, ADAPTERS[name].scale)
    return complete(engine, params, {name: BASE_MODEL})[name]


@pytest.mark.parametrize(
    ("has_int8_base", "shape"),
    [
        (False, (1, 1)),
        (True, (1, 1)),
        (False, (2, 2)),
    ],
)
def test_a_batch_of_many_adapters_samples_as_each_alone(has_int8_base, shape) -> None:
    engine = engine_in(shape=shape)
    base = base_of(engine, has_int8_base)
    bank, held = full_bank(engine, base)

    together = complete(engine, bank.params, held)

    for name, answers in together.items():
        # Factors of several ranks are one product, which some processors round otherwise.
        test_engine.assert_same(answers, alone(engine, base, name), atol=3e-5)
    tokens = [[one.new_tokens for one in answers.values()] for answers in together.values()]
    assert len({str(one) for one in tokens}) == len(tokens), "the adapters make no difference"


def test_devices_that_split_the_logits_sample_as_one_with_an_output_adapter() -> None:
    found = {}
    for shape in ((1, 1), (1, 2)):
        engine = engine_in(shape=shape)
        assert bool(engine.program_settings.logits_axis) == (shape[1] > 1)
        factors = jax.device_put(
            adapter("words"), adapter_shardings(MODEL, ADAPTERS["words"], engine.mesh)
        )
        params = adapters.join(base_of(engine), factors, ADAPTERS["words"].scale)
        scheduler = Scheduler(engine, params, test_engine.text_of)
        groups = make_groups({"words": BASE_MODEL})
        list(scheduler.run(groups, 2, TEMPERATURE, test_engine.seed_on(engine)))
        found[shape] = test_engine.by_key([one for group in groups for one in group])

    test_engine.assert_same(found[1, 2], found[1, 1])


def scores(engine: Engine, params: qwen.Params, held: list[HeldAdapter]) -> list[np.ndarray]:
    """Returns the log-probs of the end of one text with every adapter, all in one run."""
    text = np.concatenate(PROMPTS[:2])
    scorings = [Scoring(text, first=len(text) - 4, adapter=one) for one in held]
    score_all(engine, params, scorings)
    return [scoring.scores.logps for scoring in scorings]


def test_equal_tokens_of_other_weights_are_not_scored_with_their_keys_and_values() -> None:
    engine = engine_in()
    base = base_of(engine)
    bank, held = full_bank(engine, base)

    together = scores(engine, bank.params, [*held.values()])

    for name, logps in zip(held, together, strict=True):
        [expected] = scores(engine, bank.params, [held[name]])
        np.testing.assert_allclose(logps, expected, atol=1e-5, err_msg=name)


def test_samples_of_one_prompt_share_pages_only_with_the_same_weights() -> None:
    engine = engine_in()
    bank, held = full_bank(engine, base_of(engine))
    # All sequences have one prompt_id, as requests of several clients may have.
    names = ["six", "other six", "base"]
    groups = make_groups({name: held[name] for name in names})
    for sequence in (one for group in groups for one in group):
        sequence.prompt_id = 0
    scheduler = Scheduler(engine, bank.params, test_engine.text_of, REQUESTS)

    first_of_each = groups[:: len(PROMPTS)]
    list(scheduler.run(first_of_each, 2, TEMPERATURE, test_engine.seed_on(engine)))

    for name, group in zip(names, first_of_each, strict=True):
        expected = alone(engine, base_of(engine), name)
        assert [one.new_tokens for one in group] == [
            expected[0, sample].new_tokens for sample in range(2)
        ]


def test_a_snapshot_does_not_change_when_its_source_does() -> None:
    engine = engine_in()
    bank = bank_of(engine, base_of(engine))
    source = jax.tree.map(jnp.copy, adapter("six"))
    bank.add("six", ADAPTERS["six"], source)
    held = bank.hold("six")
    assert held is not None
    before = complete(engine, bank.params, {"six": held})["six"]

    bank.add("later", ADAPTERS["six"], adapter("six", seed=1))
    jax.tree.map(lambda leaf: leaf.delete(), source)

    test_engine.assert_same(complete(engine, bank.params, {"six": held})["six"], before)


def test_held_adapters_stay_and_the_least_recently_used_other_one_leaves() -> None:
    engine = engine_in()
    evicted: dict[str, qwen.Params] = {}
    bank = bank_of(engine, base_of(engine), on_evict=evicted.__setitem__)
    settings = ADAPTERS["three"]
    bank.add("a", settings, adapter("three", 1))
    bank.add("b", settings, adapter("three", 2))
    a = bank.hold("a")
    assert a is not None

    assert bank.add("c", settings, adapter("three", 3))
    c = bank.hold("c")
    assert c is not None

    # b has left as it was, without padding, and c is another adapter in its slot.
    assert list(evicted) == ["b"] and bank.hold("b") is None
    jax.tree.map(np.testing.assert_array_equal, evicted["b"], adapter("three", 2))
    assert c.slot != a.slot and c.number > a.number
    # Both slots are held: nothing can be added until a sequence ends.
    assert not bank.add("d", settings, adapter("three", 4))
    bank.release(a)
    assert bank.add("d", settings, adapter("three", 4))
    assert list(evicted) == ["b", "a"]


def test_a_forgotten_adapter_serves_the_sequences_that_hold_it() -> None:
    engine = engine_in()
    bank = bank_of(engine, base_of(engine), slots=1)
    bank.add("six", ADAPTERS["six"], adapter("six"))
    held = bank.hold("six")
    assert held is not None
    before = complete(engine, bank.params, {"six": held})["six"]

    bank.forget("six")

    assert bank.hold("six") is None
    assert not bank.add("other six", ADAPTERS["other six"], adapter("other six"))
    test_engine.assert_same(complete(engine, bank.params, {"six": held})["six"], before)
    bank.release(held)
    assert bank.add("other six", ADAPTERS["other six"], adapter("other six"))


def test_a_group_gets_more_slots_only_when_all_are_held() -> None:
    engine = engine_in()
    bank = bank_of(engine, base_of(engine), slots=5)
    settings = ADAPTERS["three"]

    def add(number: int) -> HeldAdapter:
        assert bank.add(str(number), settings, adapter("three", number))
        held = bank.hold(str(number))
        assert held is not None
        return held

    # A run of one client: every snapshot is released before the next one is sampled.
    for number in range(4):
        bank.release(add(number))
    sizes = [len(bank.groups[0].occupants)]
    held = {}
    for number in range(10, 15):
        held[number] = add(number)
        sizes.append(len(bank.groups[0].occupants))

    assert sizes == [2, 2, 2, 4, 4, 5]
    assert len({one.slot for one in held.values()}) == 5
    assert not bank.add("15", settings, adapter("three", 15))
    for number in held:
        expected = adapter("three", number)
        jax.tree.map(np.testing.assert_array_equal, bank.read(str(number)), expected)


def test_many_shapes_take_turns_in_few_groups() -> None:
    engine = engine_in()
    evicted: list[str] = []
    bank = bank_of(engine, base_of(engine), on_evict=lambda key, _: evicted.append(key))
    shapes = [("q",), ("k",), ("v",), ("o",), ("gate",)]
    for targets in shapes:
        settings = AdapterConfig(rank=4, targets=targets)
        factors = adapters.init(MODEL, settings, jax.random.key(0))
        assert bank.add(targets[0], settings, factors)

    assert len(bank.groups) == 4 and evicted == ["q"]
    held = [bank.hold(targets[0]) for targets in shapes[1:]]
    assert len({one.slot for one in held if one is not None}) == 4
    settings = AdapterConfig(rank=4, targets=("up",))
    assert not bank.add("up", settings, adapters.init(MODEL, settings, jax.random.key(0)))


def test_adapters_of_experts_are_refused() -> None:
    model = test_engine.CONFIGS["qwen3_moe"]
    engine = test_engine.make("qwen3_moe")
    base = test_engine.params_on(engine)
    bank = AdapterBank(model, base, engine.mesh, engine.dtype, most_slots=1)
    with pytest.raises(UserError, match="experts"):
        bank.shape_of(AdapterConfig(rank=4))
    assert bank.shape_of(AdapterConfig(rank=4, targets=("q", "o"))).rank == 8


# -- values that are not finite --------------------------------------------------------------------


def spoiled(name: str, factor: str, value: float) -> qwen.Params:
    """Returns an adapter with one value in the factor "a" or "b" of one layer."""
    tree = jax.tree.map(np.array, adapter(name))
    layers = tree.get("layers", {})
    next(iter(layers.values()))[factor].flat[0] = value
    return tree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_is_not_finite_in_the_type_of_the_decoder_is_refused(dtype) -> None:
    engine = engine_in(dtype)
    bank = bank_of(engine, base_of(engine))
    bank.add("six", ADAPTERS["six"], adapter("six"))
    before = jax.tree.map(np.array, bank.groups[0].factors)
    # 3.4e38 is finite in float32, and infinite in bfloat16.
    values = [np.nan, np.inf, -np.inf, *([3.4e38] if dtype == "bfloat16" else [])]

    for factor in ("a", "b"):
        for value in values:
            with pytest.raises(UserError, match=f"not finite in {dtype}"):
                bank.add("bad", ADAPTERS["six"], spoiled("six", factor, value))

    after = jax.tree.map(np.array, bank.groups[0].factors)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert bank.add("other six", ADAPTERS["other six"], adapter("other six")), "the slot is free"


def test_a_slot_that_its_adapter_leaves_has_zeros() -> None:
    engine = engine_in()
    bank = bank_of(engine, base_of(engine))
    for name in ("six", "other six"):
        bank.add(name, ADAPTERS[name], adapter(name))
    held = bank.hold("other six")
    assert held is not None

    bank.forget("six")
    bank.forget("other six")

    def largest(slot: int) -> float:
        slots = jax.tree.leaves(adapter_bank.read_slot(bank.groups[0].factors, jnp.int32(slot)))
        return max(float(jnp.abs(leaf).max()) for leaf in slots)

    assert largest(0) == 0
    assert largest(1) > 0, "a sequence still decodes with it"
    bank.release(held)
    assert bank.params is not None
    assert largest(1) == 0


@pytest.mark.parametrize("name", ["six", "words"])
def test_a_huge_adapter_changes_no_other_row_and_no_later_one(name) -> None:
    """Its own rows overflow to NaN, also in pages that others get afterwards."""
    engine = engine_in()
    base = base_of(engine)
    expected = alone(engine, base, "base")
    bank = bank_of(engine, base)
    huge = jax.tree.map(lambda leaf: leaf * 1e30, adapter(name))
    assert bank.add("huge", ADAPTERS[name], huge)
    held = bank.hold("huge")
    assert held is not None

    mixed = complete(engine, bank.params, {"huge": held, "base": BASE_MODEL})
    after = complete(engine, bank.params, {"base": BASE_MODEL})

    overflowed = mixed["huge"].values()
    assert any(not np.isfinite(one.new_logps).all() for one in overflowed)
    test_engine.assert_same(mixed["base"], expected)
    test_engine.assert_same(after["base"], expected)
    text = np.concatenate(PROMPTS[:2])
    scorings = [Scoring(text, first=2, adapter=one) for one in (held, BASE_MODEL, held)]
    score_all(engine, bank.params, scorings)
    assert np.isfinite(scorings[1].scores.logps).all()
