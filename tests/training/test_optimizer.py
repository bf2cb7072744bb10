"""The schedules of the learning rate, and the optimizer's rule by itself."""

import math
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import reference
import tiny

from jzero.config import Config, OptimizerConfig, list_settings, put_value, validate
from jzero.config.schedules import Share, Steps
from jzero.config.schema import LARGEST_B1_IN_16_BITS, LARGEST_B2_IN_16_BITS
from jzero.errors import UserError
from jzero.fields import fields_of, part_name
from jzero.model import qwen
from jzero.model.huggingface import parse_config
from jzero.model.huggingface.tensors import checkpoint_tensors, flatten
from jzero.sharding.mesh import train_mesh
from jzero.training.optimizer import (
    SCHEDULES,
    SHAPES,
    decayed_parameters,
    learning_rate,
    optimizer,
)
from jzero.types import State


def rate(step: int, total_steps: int = 100, **settings: object) -> float:
    """Returns the learning rate of a step where optimizer.lr is 2."""
    return learning_rate(settings_of(lr=2.0, **settings), step, total_steps)


def settings_of(**values: object) -> OptimizerConfig:
    """Returns the settings with these values; numbers of the schedule are beside its name."""
    settings = Config()
    for name in sorted(values, key=lambda name: name != "schedule"):
        owner = "optimizer" if name in fields_of(OptimizerConfig) else "optimizer.schedule"
        put_value(settings, f"{owner}.{name}", values[name])
    return settings.optimizer


def steps_of(warmup: int) -> Steps | None:
    """Returns a warm-up of so many steps."""
    return Steps(warmup) if warmup else None


# -- the learning rate -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 50, 99])
def test_the_rate_is_constant_by_default(step: int) -> None:
    assert rate(step) == 2.0


@pytest.mark.parametrize("settings", [{"warmup": Steps(4)}, {"warmup": Share(0.04)}], ids=str)
def test_the_rate_rises_linearly_over_the_warm_up(settings: dict[str, float]) -> None:
    rates = [rate(step, **settings) for step in range(6)]

    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55), ("polynomial", 0.325)]
)
def test_the_rate_falls_to_its_least_value_in_the_step_after_the_last(
    schedule: str, middle: float
) -> None:
    settings = {"schedule": schedule, "min_lr_ratio": 0.1, "warmup": Steps(10)}

    rates = [rate(step, **settings) for step in range(100)]

    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2 * middle)
    assert all(earlier > later for earlier, later in pairwise(rates[10:]))
    assert rates[99] > 0.2
    assert rate(100, **settings) == pytest.approx(0.2)
    assert rate(1000, **settings) == pytest.approx(0.2)


def test_the_shortest_runs_have_a_rate() -> None:
    assert rate(0, total_steps=1) == 2.0
    assert np.isfinite(rate(0, total_steps=0, warmup=Steps(3), schedule="cosine"))


# The rates over the peak that jzero's own formulas gave before Optax had the schedules, in a run of
# 100 optimizer steps: the settings, then the rates of STEPS.
STEPS = (0, 2, 3, 10, 30, 55, 99, 100)
# fmt: off
TABLE = {
    "constant": ({"warmup": Share(0.03)}, (
        0.3333333333333333, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0,
    )),
    "linear": ({"warmup": Share(0.03)}, (
        0.3333333333333333, 1.0, 1.0, 0.9350515463917526,
        0.7494845360824742, 0.5175257731958763, 0.10927835051546389, 0.1,
    )),
    "polynomial": ({"warmup": Share(0.03)}, (
        0.3333333333333333, 1.0, 1.0, 0.874790094590286,
        0.5687001806780743, 0.2936975236475715, 0.10009565309809756, 0.1,
    )),
    "cosine": ({"warmup": Steps(5), "min_lr_ratio": 0.0}, (
        0.2, 0.6, 0.8, 0.9931806517013612,
        0.8386407858128706, 0.4587103272638339, 0.0002733713295369755, 0.0,
    )),
}
# fmt: on


@pytest.mark.parametrize("schedule", TABLE)
def test_the_schedules_of_optax_give_the_rates_of_the_formulas_before_them(schedule: str) -> None:
    settings, expected = TABLE[schedule]

    rates = [rate(step, schedule=schedule, **settings) / 2 for step in STEPS]

    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)


def wsd(done: float, last: float, min_ratio: float, shape: str) -> float:
    """Returns the share of the peak in the last `last` share of the steps after the warm-up."""
    if done <= 1 - last:
        return 1.0
    x = min((done - (1 - last)) / last, 1.0)
    left = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "sqrt": 1 - math.sqrt(x)}
    return min_ratio + (1 - min_ratio) * left[shape]


def restarts(done: float, cycles: int, min_ratio: float) -> float:
    x = done * cycles - math.floor(done * cycles) if done < 1 else 1.0
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * x)) / 2


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("warmup", "ratio"), [(0, 0.0), (20, 0.1)])
def test_wsd_is_constant_and_falls_in_its_last_steps(shape: str, warmup: int, ratio: float) -> None:
    settings = {"decay_ratio": 0.25, "shape": shape, "min_lr_ratio": ratio}
    steps = range(warmup, 110)
    n = 100 - warmup

    rates = [rate(step, schedule="wsd", warmup=steps_of(warmup), **settings) / 2 for step in steps]

    expected = [wsd((step - warmup) / n, 25 / n, ratio, shape) for step in steps]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)
    assert rates[75 - warmup] == 1.0 > rates[76 - warmup]


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_cosine_restarts_begin_again_at_the_peak(ratio: float) -> None:
    settings = {"cycles": 4, "min_lr_ratio": ratio, "warmup": Steps(20)}
    steps = range(20, 110)

    rates = [rate(step, schedule="cosine_restarts", **settings) / 2 for step in steps]

    expected = [restarts((step - 20) / 80, 4, ratio) for step in steps]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)
    assert [step for step, value in zip(steps, rates, strict=True) if value == 1] == [
        20,
        40,
        60,
        80,
    ]


@pytest.mark.parametrize(
    ("warmup", "settings", "timescale"),
    [(25, {}, 25), (0, {}, 10_000), (25, {"timescale": 7}, 7)],
    ids=str,
)
def test_inverse_sqrt_falls_without_an_end(
    warmup: int, settings: dict[str, int], timescale: int
) -> None:
    settings = settings | {"warmup": steps_of(warmup), "min_lr_ratio": 0.25}
    steps = range(warmup, 300)

    rates = [rate(step, schedule="inverse_sqrt", **settings) / 2 for step in steps]

    expected = [max(math.sqrt(timescale / (timescale + step - warmup)), 0.25) for step in steps]
    np.testing.assert_allclose(rates, expected, rtol=1e-12)


# transformers' name and arguments of a schedule of 100 steps, and jzero's settings of the same.
THEIRS = [
    ("linear", {}, {"schedule": "linear"}),
    ("cosine", {}, {"schedule": "cosine"}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"schedule": "cosine", "min_lr_ratio": 0.2}),
    (
        "cosine_with_restarts",
        {"num_cycles": 3},
        {"schedule": "cosine_restarts", "cycles": 3},
    ),
    ("inverse_sqrt", {}, {"schedule": "inverse_sqrt"}),
    ("inverse_sqrt", {"timescale": 30}, {"schedule": "inverse_sqrt", "timescale": 30}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 30, "decay_type": "linear", "min_lr_ratio": 0.1},
        {"schedule": "wsd", "decay_ratio": 0.3, "shape": "linear", "min_lr_ratio": 0.1},
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 30, "decay_type": "cosine"},
        {"schedule": "wsd", "decay_ratio": 0.3, "shape": "cosine"},
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 30, "decay_type": "1-sqrt"},
        {"schedule": "wsd", "decay_ratio": 0.3, "shape": "sqrt"},
    ),
]


@pytest.mark.parametrize(("name", "arguments", "settings"), THEIRS, ids=str)
@pytest.mark.parametrize("warmup", [0, 12])
def test_schedules_are_those_of_transformers(
    name: str, arguments: dict[str, object], settings: dict[str, object], warmup: int
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = get_scheduler(name, theirs, warmup, 100, scheduler_specific_kwargs=arguments)
    expected = []
    for _ in range(100):
        expected.append(schedule.get_last_lr()[0])
        theirs.step()
        schedule.step()

    settings = {"min_lr_ratio": 0.0} | settings
    # The warm-up of their warmup_stable_decay begins at the last rate of its decay.
    first = warmup if name == "warmup_stable_decay" else 0
    steps = [*range(first, 12), *range(12, 100, 7), 99]
    settings["warmup"] = Steps(warmup, from_zero=True) if warmup else None
    rates = [rate(step, **settings) for step in steps]

    np.testing.assert_allclose(rates, [expected[step] for step in steps], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_warm_up_from_zero_wastes_its_first_step(schedule: str) -> None:
    rates = [rate(step, warmup=Steps(4, from_zero=True), schedule=schedule) for step in range(5)]
    assert rates == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_every_schedule_has_a_choice() -> None:
    names = {part_name(part) for part in SCHEDULES}
    assert names == TABLE.keys() | {"wsd", "inverse_sqrt", "cosine_restarts"}
    assert set(SHAPES) == {"linear", "cosine", "sqrt"}
    [parts] = [item.parts for item in list_settings(Config()) if item.name == "optimizer.schedule"]
    assert parts == list(SCHEDULES)


def test_the_polynomial_of_hugging_face_ends_at_a_tenth_of_a_millionth() -> None:
    """transformers: (lr - end) (1 - done)^power + end with power 1 and end 1e-7."""
    settings = settings_of(
        lr=1e-6, schedule="polynomial", power=1.0, min_lr_ratio=0.1, warmup=Share(0.03)
    )
    warmup, total = 30, 1000

    rates = [learning_rate(settings, step, total) for step in range(warmup, total + 1)]

    remaining = np.linspace(1, 0, total - warmup + 1)
    np.testing.assert_allclose(rates, (1e-6 - 1e-7) * remaining + 1e-7, rtol=1e-12)


# -- the rule --------------------------------------------------------------------------------------


def first_step(
    settings: OptimizerConfig, gradient: qwen.Params, params: qwen.Params
) -> qwen.Params:
    """Returns what the first optimizer step subtracts, but for the learning rate."""
    rule = optimizer(settings)
    step, _ = rule.update(gradient, rule.init(params), params)
    return step


DENSE = replace(reference.MODEL, tie_word_embeddings=False)
DECAYING = {
    "qwen2": DENSE,
    "qwen3": replace(DENSE, model_type="qwen3"),
    "qwen3_moe": replace(reference.MOE, model_type="qwen3_moe"),
    "qwen3_5_text": parse_config({**tiny.HYBRID_ENTRIES, "model_type": "qwen3_5_text"}),
}


@pytest.mark.parametrize("model_type", DECAYING)
def test_a_weight_decays_unless_its_tensor_in_a_checkpoint_is_a_vector(model_type: str) -> None:
    """As in most trainers of transformers' models: no norm, bias or decay rate of a head."""
    model = DECAYING[model_type]
    tensors = checkpoint_tensors(model)

    decays = flatten(decayed_parameters(qwen.abstract(model)))

    assert decays.keys() == tensors.keys()
    for name, [tensor, *_] in tensors.items():
        assert decays[name] == (len(tensor.stored_shape) > 1), name
    assert {*decays.values()} == {False, True}


def test_weight_decay_subtracts_its_share_of_a_matrix() -> None:
    params = {"q": np.full((2, 2), 3.0, np.float32), "attn_norm": np.ones(2, np.float32)}
    zero_gradient = jax.tree.map(np.zeros_like, params)

    step = first_step(OptimizerConfig(weight_decay=0.5), zero_gradient, params)

    np.testing.assert_array_equal(step["q"], np.full((2, 2), 1.5))
    np.testing.assert_array_equal(step["attn_norm"], np.zeros(2))


@pytest.mark.parametrize("wrong", [1e6, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("skip_norm", [0.0, 10.0])
def test_only_skip_norm_keeps_a_wild_gradient_out_of_weights_and_moments(
    wrong: float, skip_norm: float
) -> None:
    settings = reference.settings(optimizer={"skip_norm": skip_norm})
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    policy = tiny.policy_learner(reference.MODEL, settings, mesh)
    params = {"embed": np.ones(3, np.float32), "norm": np.ones(2, np.float32)}
    state = State(params, policy.optimizer.init(params), np.int32(4))

    for number in (0.5, wrong):
        gradient = {
            "embed": np.array([0.5, number, 0.5], np.float32),
            "norm": np.zeros(2, np.float32),
        }
        next_state, stats = policy._descend(state, gradient, np.float32(0.1))

        is_skipped = skip_norm > 0 and number != 0.5
        assert stats["skipped"] == is_skipped
        same = jax.tree.map(np.array_equal, next_state, state)
        assert all(jax.tree.leaves(same)) == is_skipped


@pytest.mark.parametrize(("clip_norm", "largest"), [(0.0, 1e3), (1.0, 0.5)])
def test_clip_norm_of_zero_means_no_clipping(clip_norm: float, largest: float) -> None:
    params = {"q": np.ones(4, np.float32)}
    gradient = {"q": np.full(4, 1e3, np.float32)}
    # With an eps this large Adam divides every gradient by eps, so its step is linear.
    settings = OptimizerConfig(clip_norm=clip_norm, b1=0.0, eps=1e9)

    step = first_step(settings, gradient, params)

    np.testing.assert_allclose(np.asarray(step["q"]) * 1e9, largest, rtol=1e-5)


def num_bytes(state: optax.OptState) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("moment", ["mu_dtype", "nu_dtype"])
def test_a_moment_of_16_bits_takes_half_the_memory_and_steps_nearly_the_same(moment: str) -> None:
    params = reference.random_params()
    in_32_bits = optimizer(OptimizerConfig(clip_norm=0))
    in_16_bits = optimizer(OptimizerConfig(clip_norm=0, **{moment: "bfloat16"}))
    state_32 = in_32_bits.init(params)
    state_16 = in_16_bits.init(params)
    # The other moment, half of the state, stays in 32 bits.
    assert num_bytes(state_16) == pytest.approx(3 / 4 * num_bytes(state_32), rel=1e-3)

    update_32 = jax.jit(in_32_bits.update)
    update_16 = jax.jit(in_16_bits.update)
    for number in range(3):
        gradient = reference.random_params(scale=0.1 * (number - 0.7))
        step_32, state_32 = update_32(gradient, state_32, params)
        step_16, state_16 = update_16(gradient, state_16, params)

    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02),
        step_16,
        step_32,
    )


def first_moment_steps(b1: float, gradients: np.ndarray) -> np.ndarray:
    """Returns the last step of Adam whose first moment is stored in bf16, in a loop of NumPy."""
    mu, nu = np.zeros(gradients.shape[1], np.float32), np.zeros(gradients.shape[1])
    for gradient in gradients:
        exact = np.float32(b1) * mu + np.float32(1 - b1) * gradient
        mu = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
        nu = 0.95 * nu + (1 - 0.95) * gradient.astype(np.float64) ** 2
    steps = len(gradients)
    return exact / (1 - b1**steps) / np.sqrt(nu / (1 - 0.95**steps))


@pytest.mark.parametrize("b1", [0.5, 0.9, LARGEST_B1_IN_16_BITS])
@pytest.mark.parametrize("is_constant", [True, False])
def test_a_first_moment_of_16_bits_is_rounded_only_when_it_is_stored(
    b1: float, is_constant: bool
) -> None:
    settings = OptimizerConfig(b1=b1, b2=0.95, eps=1e-12, clip_norm=0, mu_dtype="bfloat16")
    gradients = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    if is_constant:
        gradients = np.broadcast_to(np.abs(gradients[:1]), gradients.shape)
    adam = optimizer(settings)
    state, update = adam.init({"q": np.zeros(64, np.float32)}), jax.jit(adam.update)
    moments = [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.shape == (64,)]
    assert moments == [jnp.bfloat16, jnp.float32]

    for gradient in gradients:
        step, state = update({"q": gradient}, state, {"q": np.zeros(64, np.float32)})

    # 2^-8 of the largest: a sum in another order may round to the neighbor.
    wanted = first_moment_steps(b1, gradients)
    np.testing.assert_allclose(step["q"], wanted, atol=0.004 * np.abs(wanted).max())
    assert np.linalg.norm(step["q"] - wanted) < 1e-3 * np.linalg.norm(wanted)
    if is_constant:
        np.testing.assert_allclose(step["q"], 1, atol=2**-8 / (1 - b1))


def test_a_first_moment_of_16_bits_needs_a_small_b1() -> None:
    settings = OptimizerConfig(b1=0.99, mu_dtype="bfloat16")
    with pytest.raises(UserError, match=r"optimizer.mu_dtype=bfloat16 .* optimizer.b1=0.99"):
        validate(replace(Config(), optimizer=settings))


def test_a_second_moment_of_16_bits_follows_gradients_that_vanish() -> None:
    """A thousand steps as a loop of NumPy in fp64; the gradients become 100 times smaller."""
    settings = OptimizerConfig(nu_dtype="bfloat16", b2=LARGEST_B2_IN_16_BITS, clip_norm=0)
    adam = optimizer(settings)
    rng = np.random.default_rng(0)
    params = {"q": np.zeros(64, np.float32)}
    state, update = adam.init(params), jax.jit(adam.update)
    mu, nu = np.zeros(64), np.zeros(64)
    for number in range(1, 1001):
        gradient = rng.normal(size=64) * (1.0 if number <= 500 else 0.01)
        step, state = update({"q": gradient.astype(np.float32)}, state, params)
        mu = settings.b1 * mu + (1 - settings.b1) * gradient
        nu = settings.b2 * nu + (1 - settings.b2) * gradient**2
    mean, variance = mu / (1 - settings.b1**number), nu / (1 - settings.b2**number)
    want = mean / (np.sqrt(variance) + settings.eps)
    np.testing.assert_allclose(step["q"], want, rtol=0.05)
