"""Every algorithm against tests/reference.py, which is loops in float64: losses, per-token gradients, advantages."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from jzero import algorithms, config
from jzero.algorithms import ADVANTAGES, CORRECTIONS, PRESETS, WEIGHTS, Algorithm, Episodes
from jzero.distributed import collectives
from jzero.distributed.mesh import train_mesh
from jzero.training import learner
from jzero.training.credit import make_episodes, spread_over_tokens, token_weights
from jzero.training.step import (
    Minibatch,
    Trainer,
    make_minibatches,
    make_trainer,
    score_minibatches,
)
from jzero.types import Rollout, State

PROMPTS, GROUP, MAX_NEW = 8, 4, 12
PACKINGS = {
    "plain": (0, 18),
    "own slot": (1, 18),
    "four slots": (4, 54),
}  # train.packs_per_row, tokens of the longest row
ROWS = (1, 2, 4)  # of a microbatch, a device


pytestmark = pytest.mark.usefixtures("quick_compilation")


# -- the loss of packed batches, by given log-probs ------------------------------------------------------------------


@dataclass
class Given:
    """What models would have said: one f32[T] a rollout each, of every token, sampled or not."""

    rollouts: list[Rollout]
    now: list[np.ndarray]  # the policy's log-probs
    old: list[np.ndarray]
    ref: list[np.ndarray]
    entropy: list[np.ndarray]
    old_values: list[np.ndarray]
    values: list[np.ndarray]


def given_of(rollouts: list[Rollout], seed: int) -> Given:
    """Log-probs around the sampler's. Rollouts differ in how far the policy has moved, from hardly (where GSPO clips)
    to far (where dual clip does)."""
    rng = np.random.default_rng(seed)
    single = lambda arrays: [np.asarray(x, np.float32) for x in arrays]
    noise = lambda scales: [
        rng.normal(0, s, len(r.tokens)) for r, s in zip(rollouts, scales, strict=True)
    ]
    add = lambda xs, ys: single(x + y for x, y in zip(xs, ys, strict=True))
    same, some = [0.2] * len(rollouts), lambda *scales: rng.choice(scales, len(rollouts))
    sampler = [np.where(r.sampled, r.logps, rng.normal(-4, 1, len(r.tokens))) for r in rollouts]
    old = add(sampler, noise(some(0.01, 0.1, 0.3)))
    now = add(old, noise(some(2e-4, 0.03, 0.3, 0.6)))
    entropy, old_values = single(map(np.abs, noise(same))), single(noise([1.0] * len(rollouts)))
    return Given(
        rollouts, now, old, add(old, noise(same)), entropy, old_values, add(old_values, noise(same))
    )


def small_trainer(
    algorithm: Algorithm,
    packing: str = "plain",
    rows: int = 4,
    devices: int = 1,
    minibatches: int = 1,
    group=GROUP,
) -> Trainer:
    row_slots, tokens = PACKINGS[packing]
    sizes = {"pack_buckets": 2, "packs_per_row": row_slots, "microbatch_tokens": tokens * rows * devices}
    values = reference.settings(
        rollout={
            "num_prompts": PROMPTS * GROUP // group,
            "group_size": max(group, 2),
            "max_new_tokens": MAX_NEW,
        },
        train=sizes
        | {"minibatches": minibatches, "epochs": 2},  # a second epoch needs the old log-probs
    )
    values.algorithm, values.rollout.group_size = algorithm, group
    config.validate(values)
    mesh = train_mesh(devices, 1, 1, jax.devices()[:devices])
    critic = reference.MODEL if algorithms.needs_critic(algorithm) else None
    return make_trainer(values, reference.MODEL, critic, mesh)


def scored_parts(trainer: Trainer, data: Given) -> list[Minibatch]:
    """Parts as `learn.optimize` makes them, of models that say what is given."""
    parts = make_minibatches(trainer, data.rollouts, 1)

    def score(params, batches, counts, layouts):
        [part] = [part for part in parts if part.batches is batches]
        return [
            collectives.put_global(p.fill([params[i] for i in part.chosen]), trainer.policy.rows)
            for p in part.packed
        ]

    trainer.policy.score = score
    if algorithms.needs_reference(trainer.config.algorithm):
        trainer.reference = data.ref
    if trainer.critic is not None:
        trainer.critic.score = score
    state = State(data.old, None, None, State(data.old_values, None, None))
    score_minibatches(trainer, state, parts, data.rollouts)
    return parts


@cache
def program(head: learner.Head, layouts: tuple, mesh):
    """(loss of all microbatches, its derivative by the head's first output), as `Learner._update` sums them."""

    def one(first, rest, batch, layout):
        first, rest, batch = jax.tree.map(lambda x: x[:, layout.prefix :], (first, rest, batch))
        trained = batch.weights > 0
        total = learner.sequence_total(batch.segments, trained, layout)
        return jnp.where(
            trained, head.loss((first, *rest), batch, total, jnp.bool_(False))[0], 0
        ).sum()

    def local(outputs, batches):
        each = zip(outputs, batches, layouts, strict=True)
        run = lambda x, layout: jax.value_and_grad(one)(*x, layout)
        done = [
            lax.map(partial(run, layout=layout), (first, rest, batch))
            for (first, *rest), batch, layout in each
        ]
        return lax.psum(sum(losses.sum() for losses, _ in done), "data"), [
            gradients for _, gradients in done
        ]

    rows = P(None, "data")
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows), out_specs=(P(), rows), check_vma=False
        )
    )


def differentiate(
    trainer: Trainer, learner: learner.Learner, part: Minibatch, *outputs: list[np.ndarray]
):
    """Loss of an optimizer step and its derivative by the head's first output, an array a rollout of the part; 0 in
    every cell that holds no token of a rollout."""
    mine = [[x[i] for i in part.chosen] for x in outputs]
    filled = list(
        zip(
            *([collectives.put_global(p.fill(x), learner.rows) for p in part.packed] for x in mine),
            strict=True,
        )
    )
    loss, gradients = program(learner.head, tuple(trainer.layouts), learner.mesh)(
        filled, list(part.batches)
    )
    slopes = [np.zeros(len(x)) for x in mine[0]]
    for p, gradient in zip(part.packed, gradients, strict=True):
        p.read(gradient, slopes)
    assert sum(np.count_nonzero(g) for g in gradients) == sum(map(np.count_nonzero, slopes))
    return float(loss), slopes


def assert_equal(loss, slopes, want_loss, want) -> None:
    """Within float32, of the largest slope; zero where it should be, exactly."""
    got, want = np.concatenate(slopes), np.concatenate(want)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    np.testing.assert_array_equal(got == 0, want == 0)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6, atol=1e-6 * np.abs(want).sum())


# -- conformance -----------------------------------------------------------------------------------------------------

BOUNDS = {"correction_low": 0.8, "correction_high": 1.25}
CASES: dict[str, tuple[str, dict]] = {name: (name, {}) for name in PRESETS} | {
    "k1 in the reward, leave one out": ("rloo", {"kl_reward": 0.05}),
    "k1 in the reward, return to go": ("reinforce_pp", {"kl_reward": 0.05}),
    "k2": ("reinforce_pp_baseline", {"kl_coef": 0.05}),
    "k2 with a bound and its own weight": (
        "grpo",
        {"kl_estimator": "k2", "kl_coef": 0.1, "kl_max": 0.02, "kl_weight": "sequence_sum"},
    ),
    "k3 with a bound": ("dr_grpo", {"kl_coef": 0.1, "kl_max": 0.02}),
    "dual clip": ("grpo", {"dual_clip": 1.5}),
    "dual clip of sequences": ("gspo", {"dual_clip": 1.2}),
    "entropy": ("dapo", {"entropy_coef": 0.01}),
    "truncated: fixed": ("grpo", {"truncated": "fixed", "truncated_score": -0.5}),
    "truncated: mask": ("grpo", {"truncated": "mask"}),
    "truncated: mask, sequences": (
        "gspo",
        {"truncated": "mask", "kl_coef": 0.01, **BOUNDS, "correction": "geometric"},
    ),
    "truncated: mask, token mean": ("cispo", {"truncated": "mask"}),
    "truncated: penalty": ("dr_grpo", {"truncated_penalty": 0.3, "overlong_share": 0.5}),
    "length_norm": ("dr_grpo", {"length_norm": 5}),
    "std of the batch": ("grpo", {"advantage": "group_mean_batch_std", "std_eps": 1e-4}),
    "gamma and lambda": ("ppo", {"gamma": 0.9, "lam": 0.7, "whiten": False}),
    "gamma": ("reinforce_pp", {"gamma": 0.9}),
    "clipped sequences of cispo": (
        "cispo",
        {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.02},
    ),
    **{f"correction: {name}": ("grpo", {"correction": name, **BOUNDS}) for name in CORRECTIONS},
    **{f"weight: {name}": ("grpo", {"weight": name}) for name in WEIGHTS},
    **{
        f"alone: {name}": (name, {"kl_reward": 0.01})
        for name in ("reinforce_pp", "ppo", "decoupled_ppo")
    },
}
CASES["correction: geometric"][1].update(correction_low=0.95, correction_high=1.05)


def combinations() -> list[tuple[str, str, int, int]]:
    """All 18 for some presets; for the others three, which hold every packing, every split and both device counts; one
    for each change."""
    out = []
    for k, case in enumerate(CASES):
        if case in ("grpo", "gspo", "ppo"):
            out += [
                (case, packing, rows, devices)
                for packing in PACKINGS
                for rows in ROWS
                for devices in (1, 8)
            ]
            continue
        each = [
            (case, packing, ROWS[(p + k) % 3], (1, 8)[(p + k) % 2])
            for p, packing in enumerate(PACKINGS)
        ]
        out += each if case in PRESETS else [each[k % 3]]
    return out


@pytest.mark.parametrize(("case", "packing", "rows", "devices"), combinations())
def test_loss_and_per_token_gradient(case, packing, rows, devices):
    preset, changes = CASES[case]
    algorithm = PRESETS[preset](**changes)
    group, minibatches = (
        1 if case.startswith("alone") else GROUP,
        2 if case.startswith("weight") else 1,
    )
    trainer = small_trainer(algorithm, packing, rows, devices, minibatches, group)
    cut = 0
    for seed in range(2):
        data = given_of(reference.random_rollouts(seed, PROMPTS, GROUP, max_new=MAX_NEW), seed)
        parts = scored_parts(trainer, data)
        assert len(parts) == minibatches
        assert rows * devices > 1 or all(max(p.count for p in part.packed) > 2 for part in parts)
        for part in parts:
            loss, slopes = differentiate(trainer, trainer.policy, part, data.now, data.entropy)
            want_loss, want = reference.policy_loss(
                *(
                    data.rollouts,
                    data.now,
                    data.old,
                    data.ref,
                    algorithm,
                    group,
                    MAX_NEW,
                    part.chosen,
                ),
                entropy=data.entropy,
                values=data.old_values,
            )
            assert_equal(loss, slopes, want_loss, [want[i] for i in part.chosen])
            mine = [data.rollouts[i] for i in part.chosen]
            assert not any(x[~r.sampled].any() for x, r in zip(slopes, mine, strict=True))
            cut += sum(r.finish_reason == "length" for r in mine)
    assert cut > 3


@pytest.mark.parametrize(
    ("packing", "rows", "devices"), [("plain", 2, 8), ("own slot", 4, 1), ("four slots", 1, 8)]
)
@pytest.mark.parametrize("changes", [{}, {"value_clip": 0.0, "value_coef": 0.5, "gamma": 0.9}])
def test_value_loss_and_per_token_gradient(changes, packing, rows, devices):
    algorithm = PRESETS["ppo"](**changes)
    trainer = small_trainer(algorithm, packing, rows, devices)
    data = given_of(reference.random_rollouts(3, PROMPTS, GROUP, max_new=MAX_NEW), 3)
    [part] = scored_parts(trainer, data)
    loss, slopes = differentiate(trainer, trainer.critic, part, data.values)
    weights = reference.token_weights(data.rollouts, algorithm, MAX_NEW)
    rest = data.old, data.ref, algorithm, GROUP, MAX_NEW, data.old_values
    _, targets = reference.advantages_of(data.rollouts, *rest)
    want_loss, want = 0.0, [np.zeros(len(x)) for x in data.values]
    for i, weight in enumerate(weights):
        for t in np.flatnonzero(weight):
            each, slope = reference.value_loss(
                *(float(x[i][t]) for x in (data.values, data.old_values, targets)), algorithm
            )
            want_loss, want[i][t] = want_loss + weight[t] * each, weight[t] * slope
    assert_equal(loss, slopes, want_loss, [want[i] for i in part.chosen])
    clipped = sum(
        (x[r.sampled] == 0).sum()
        for x, r in zip(slopes, [data.rollouts[i] for i in part.chosen], strict=True)
    )
    assert (clipped > 0) == (algorithm.value_clip > 0)


def test_a_step_of_masked_rollouts_alone_has_no_weight():
    cut = lambda rollout: replace(rollout, turns=(replace(rollout.turns[0], finish_reason="length"),))
    rollouts = [cut(rollout) for rollout in reference.random_rollouts(0, PROMPTS, GROUP)]
    for name in WEIGHTS:
        masked = reference.settings(algorithm={"truncated": "mask"})
        weights = token_weights(rollouts, list(range(len(rollouts))), name, masked)
        assert all(np.isfinite(w).all() and not w.any() for w in weights.values())


# -- the first minibatch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_the_first_minibatch_has_a_ratio_of_exactly_one(preset):
    """Whatever the old log-probs are, bit for bit; not so in the next."""
    trainer = small_trainer(PRESETS[preset](), "four slots", 2)
    policy, params = trainer.policy, reference.random_params()
    rollouts = reference.random_rollouts(0, PROMPTS, GROUP)
    [part] = make_minibatches(trainer, rollouts, 1)
    rng = np.random.default_rng(0)
    noise = lambda scale: [rng.normal(0, scale, len(r.tokens)).astype(np.float32) for r in rollouts]
    part.fill(policy, "advantages", noise(1.0))

    def run(fresh):
        part.fill(policy, "old_logps", noise(100.0))
        start = policy.start(reference.placed(policy, params))
        state, stats = policy.update(start, part.batches, part.counts, trainer.layouts, 1e-2, fresh)
        return jax.device_get((state.params, stats))

    (first, stats), (again, _), (_, later) = run(True), run(True), run(False)
    assert stats["ratio_shift"] == 0 and stats["clip_fraction"] == 0 and stats["grad_norm"] > 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert later["ratio_shift"] > 0 and later["clip_fraction"] > 0


# -- advantages ------------------------------------------------------------------------------------------------------


def random_episodes(seed: int) -> Episodes:
    """Groups of 1 to 7 in random order; some are of equal returns, one of 0.1, which has no exact mean."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(8), [1, 1, 2, 3, 5, 7, 6, 3]))
    mask = np.arange(9) < rng.integers(1, 10, len(group))[:, None]
    last = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    scores = np.where(
        group == 6, 0.1, np.where(group == 7, 1.0, rng.choice([0.0, 0.1, 1.0], len(group)))
    )
    return Episodes(last * scores[:, None], rng.normal(size=mask.shape) * mask, mask, group)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_unequal_groups(name, whiten, dense):
    """dense: a reward for every token."""
    algorithm = Algorithm(advantage=name, whiten=whiten, gamma=0.95, lam=0.8)
    for seed in range(5):
        episodes = random_episodes(seed)
        if dense:
            noise = np.random.default_rng(seed).normal(size=episodes.mask.shape) * episodes.mask
            episodes = episodes._replace(rewards=episodes.rewards + noise)
        rows = lambda x, mask=episodes.mask: [
            row[real].tolist() for row, real in zip(x, mask, strict=True)
        ]
        want = reference.advantages(
            rows(episodes.rewards), rows(episodes.values), episodes.group.tolist(), algorithm
        )
        got = algorithms.compute_advantages(episodes, algorithm)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == np.float64 and not mine[~episodes.mask].any()
            np.testing.assert_allclose(
                mine[episodes.mask], np.concatenate(theirs), rtol=1e-9, atol=1e-9
            )
        if not (whiten or dense) and ADVANTAGES[name].min_group_size > 1:
            alone = np.bincount(episodes.group)[episodes.group] == 1
            assert not got[0][alone | (episodes.group >= 6)].any()  # exactly
            for number in range(8):  # one of each rollout: what a group gains it loses
                np.testing.assert_allclose(got[0][episodes.group == number, 0].sum(), 0, atol=1e-12)


@given(st.integers(2, 64), st.floats(-100, 100))
@settings(deadline=None)
def test_a_uniform_group_has_no_advantage(group, score):
    rewards = np.full((2 * group, 1), score)
    rewards[group] += 1
    episodes = Episodes(rewards, 0 * rewards, np.ones_like(rewards, bool), np.repeat([0, 1], group))
    for name in (name for name, advantage in ADVANTAGES.items() if advantage.min_group_size > 1):
        A, _ = algorithms.compute_advantages(episodes, Algorithm(advantage=name))
        assert not A[:group].any() and A[group] > 0


def with_environment(rollout: Rollout, rng) -> tuple[Rollout, np.ndarray]:
    """The same rollout with 1 to 4 tokens of an environment after some of its sampled ones; and where its own are."""
    first = rollout.prompt_length + 1
    after = np.repeat(
        np.arange(first, len(rollout.tokens) + 1),
        rng.integers(0, 5, len(rollout.tokens) + 1 - first),
    )
    add = lambda x, value: np.insert(x, after, value)
    own = ~add(np.zeros(len(rollout.tokens), bool), True)
    fields = {"tokens": 7, "sampled": False, "logps": 0.0, "versions": -1}
    turns = (replace(rollout.turns[0], end=len(own)),)
    return replace(
        rollout, turns=turns, **{name: add(getattr(rollout, name), x) for name, x in fields.items()}
    ), own


@pytest.mark.parametrize("preset", PRESETS)
def test_tokens_of_the_environment_leave_advantages_unchanged(preset):
    """To the bit."""
    rng = np.random.default_rng(5)
    trainer = small_trainer(PRESETS[preset](kl_reward=0.1, gamma=0.9, lam=0.8))
    data = given_of(reference.random_rollouts(5, PROMPTS, GROUP), 5)
    penalties = [0.1 * (old - ref) for old, ref in zip(data.old, data.ref, strict=True)]
    longer, own = zip(*(with_environment(r, rng) for r in data.rollouts), strict=True)
    assert sum(len(r.tokens) for r in longer) > 1.3 * sum(len(r.tokens) for r in data.rollouts)

    def widened(arrays):
        out = [rng.normal(size=len(r.tokens)).astype(np.float32) for r in longer]
        for wide, mine, x in zip(out, own, arrays, strict=True):
            wide[mine] = x
        return out

    def result(rollouts, penalties, values):
        episodes = make_episodes(rollouts, trainer.config, penalties, values)
        return [
            spread_over_tokens(x, rollouts)
            for x in algorithms.compute_advantages(episodes, trainer.config.algorithm)
        ]

    short = result(data.rollouts, penalties, data.old_values)
    long = result(longer, widened(penalties), widened(data.old_values))
    for mine, theirs in zip(short, long, strict=True):
        for x, y, kept in zip(mine, theirs, own, strict=True):
            np.testing.assert_array_equal(x, y[kept])
            assert not y[~kept].any()


# -- closed forms and limits -----------------------------------------------------------------------------------------


def test_estimators_of_the_kl_against_its_closed_form():
    """E[k1] = E[k3] = KL, and the expected gradient of k2 is the KL's."""
    with jax.enable_x64(True):
        z, ref = np.random.default_rng(0).normal(size=(2, 50))
        logp, logref = (lambda z: jax.nn.log_softmax(z)), jax.nn.log_softmax(ref)
        closed = lambda z: (jnp.exp(logp(z)) * (logp(z) - logref)).sum()
        expected = lambda z, estimate: (
            lax.stop_gradient(jnp.exp(logp(z))) * estimate(logp(z), logref)
        ).sum()
        np.testing.assert_allclose(expected(z, algorithms.k3), closed(z), rtol=1e-12)
        np.testing.assert_allclose(expected(z, lambda x, y: x - y), closed(z), rtol=1e-12)
        np.testing.assert_allclose(
            jax.grad(expected)(z, algorithms.KL_ESTIMATORS["k2"]), jax.grad(closed)(z), rtol=1e-9, atol=1e-12
        )
        x, y = logp(z), logref
        np.testing.assert_allclose(algorithms.KL_ESTIMATORS["k2"](x, y), (x - y) ** 2 / 2, rtol=1e-12)
        np.testing.assert_allclose(algorithms.k3(x, y), np.exp(y - x) - (y - x) - 1, rtol=1e-9)


def test_the_penalty_in_the_reward_is_k1_of_every_sampled_token():
    trainer = small_trainer(PRESETS["reinforce_pp"](kl_reward=0.5))
    data = given_of(reference.random_rollouts(1, PROMPTS, GROUP), 1)
    penalties = [0.5 * (old - ref) for old, ref in zip(data.old, data.ref, strict=True)]
    episodes = make_episodes(data.rollouts, trainer.config, penalties, data.old_values)
    for i, rollout in enumerate(data.rollouts):
        want = -0.5 * (data.old[i] - data.ref[i])[rollout.sampled].astype(np.float64)
        want[-1] += rollout.grade.score
        np.testing.assert_allclose(episodes.rewards[i][episodes.mask[i]], want, rtol=1e-6)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_far_from_the_old_and_the_reference_policy_everything_is_finite(log_ratio):
    total = lambda x: x
    for name in algorithms.RATIOS:
        value, slope = jax.value_and_grad(lambda x, f=algorithms.RATIOS[name]: f(x, total))(
            log_ratio
        )
        assert np.isfinite(value) and np.isfinite(slope)
    for name in CORRECTIONS:
        assert np.isfinite(CORRECTIONS[name](jnp.float32(log_ratio), total, Algorithm()))
    for name in algorithms.KL_ESTIMATORS:
        value, slope = jax.value_and_grad(lambda x, f=algorithms.KL_ESTIMATORS[name]: f(x, jnp.float32(0)))(
            log_ratio
        )
        assert np.isfinite(value) and np.isfinite(slope) and (log_ratio or value == slope == 0)


def test_presets_are_what_they_are_named_after():
    assert all(make().name == name for name, make in PRESETS.items())
    fields = lambda name: {
        key: value for key, value in vars(PRESETS[name]()).items() if key != "name"
    }
    differ = lambda a, b: {
        key: value for key, value in fields(b).items() if value != fields(a)[key]
    }
    assert differ("grpo", "dr_grpo") == {"advantage": "group_mean", "weight": "constant"}
    assert differ("grpo", "grpo_no_std") | differ("grpo", "grpo_no_length") == differ(
        "grpo", "dr_grpo"
    )
    assert differ("grpo", "gspo") == {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    assert PRESETS["dapo"]().clip_high == 0.28 and PRESETS["grpo"](clip_high=0.3).clip_high == 0.3
    assert [name for name, make in PRESETS.items() if algorithms.needs_critic(make())] == [
        "ppo",
        "oat_ppo",
    ]
