"""Sequences that add nothing to the gradient are left out of the update, exactly.

tests/algorithms/test_losses.py checks with every preset that the slopes of what is left out are 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from descriptions import change

from jzero.algorithms import PRESETS, Clip
from jzero.algorithms.ratios import bounded_exp
from jzero.algorithms.surrogates import SURROGATES, Surrogate
from jzero.config import Config
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.credit import can_have_gradient, training_sequences
from jzero.training.step import (
    divide_groups,
    make_minibatch,
    make_minibatches,
    run_optimizer_steps,
    score_and_credit,
    update_on_rollouts,
)
from jzero.training.trainer import Trainer, credit_settings, make_trainer
from jzero.types import Grade, Rollout, State, Turn

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUP_SIZE = 4


def finished(rollout: Rollout) -> Rollout:
    """Returns the rollout as one that ended before the limit of its length."""
    [turn] = rollout.turns
    return replace(rollout, turns=(replace(turn, finish_reason="stop"),))


def with_score(rollout: Rollout, score: float) -> Rollout:
    [turn] = rollout.turns
    grade = Grade(score, False, "")
    return replace(rollout, grade=grade, turns=(replace(turn, grade=grade),))


def failed(rollout: Rollout) -> Rollout:
    return replace(rollout, grade=Grade(0.0, False, "", failed=True))


def truncated(rollout: Rollout) -> Rollout:
    [turn] = rollout.turns
    return replace(rollout, turns=(replace(turn, finish_reason="length"),))


# Four groups, the first of which has one score. No response is so long that it is penalized.
ROLLOUTS = [finished(r) for r in reference.random_rollouts(0, 4, GROUP_SIZE, max_new=9)]
FIRST_GROUP = set(range(GROUP_SIZE))
ALL_EQUAL = [with_score(rollout, 0.5) for rollout in ROLLOUTS]

# Presets that leave a group of one score out. The loss of the others has another term, their
# advantages have a critic, or whitening moves an advantage of 0. Of `echo` the sequences with a
# reply are computed.
LEAVE_OUT = (
    "grpo",
    "dr_grpo",
    "grpo_no_std",
    "grpo_no_length",
    "dapo",
    "rloo",
    "gspo",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "icepop",
    "geometric_rejection",
    "sapo",
    "luspo",
    "vespo",
    "maxrl",
    "gdpo",
    "drgrpo_paper",
    "drgrpo_release",
    "oat_head",
    "trl_head",
)


def config_of(preset: str, train: dict[str, object] | None = None, **changes: object) -> Config:
    return reference.settings(
        algorithm=vars(change(PRESETS[preset](), **changes)), train=train or {}
    )


def left_out(rollouts: Sequence[Rollout], config: Config) -> set[int]:
    """Returns the indices of the sequences of the rollouts that are left out."""
    sequences, sources = training_sequences(rollouts, config.train.sequence_per_turn)
    return set(
        np.flatnonzero(
            ~can_have_gradient(rollouts, sequences, sources, credit_settings(config))
        ).tolist()
    )


# -- which sequences -------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_group_of_one_score_is_left_out_where_nothing_else_gives_it_a_gradient(
    preset: str,
) -> None:
    config = config_of(preset)

    expected = FIRST_GROUP if preset in LEAVE_OUT else set()
    if preset == "echo":
        expected = {
            i for i in FIRST_GROUP if ROLLOUTS[i].tokens.sampled[ROLLOUTS[i].prompt_length :].all()
        }
        assert 0 < len(expected) < len(FIRST_GROUP)
    assert left_out(ROLLOUTS, config) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.01},
        {"kl_reward": 0.01},
        {"entropy_coef": 0.01},
        {"entropy_coef": -0.01},
        {"ce_coef": 0.01},
        {"teacher_coef": 0.01},
    ],
    ids=str,
)
def test_a_kl_and_other_terms_of_the_loss_leave_nothing_out(changes: dict[str, float]) -> None:
    assert left_out(ROLLOUTS, config_of("grpo", **changes)) == set()


def test_a_single_rollout_of_average_score_is_left_out() -> None:
    scores = [0.0, 0.5, 0.5, 1.0]
    group = [with_score(r, score) for r, score in zip(ROLLOUTS[:4], scores, strict=True)]

    assert left_out([*group, *ROLLOUTS[4:]], config_of("dr_grpo")) == {1, 2}


def test_a_surrogate_that_does_not_scale_with_the_advantage_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of("grpo")
    monkeypatch.setitem(SURROGATES, Clip, Surrogate(SURROGATES[Clip].compute))

    assert left_out(ROLLOUTS, config) == set()


@pytest.mark.parametrize("changes", [{}, {"kl_reward": 0.01}, {"kl_coef": 0.01}], ids=str)
@pytest.mark.parametrize("preset", ["grpo", "reinforce_pp", "ppo"])
def test_a_rollout_without_a_score_is_left_out_by_every_algorithm(
    preset: str, changes: dict[str, float]
) -> None:
    rollouts = [*ROLLOUTS[:-1], failed(ROLLOUTS[-1])]
    last = len(ROLLOUTS) - 1

    left = left_out(rollouts, config_of(preset, **changes))

    assert left == ({last} | FIRST_GROUP if preset == "grpo" and not changes else {last})


@pytest.mark.parametrize(
    ("preset", "changes", "is_left_out"),
    [
        ("reinforce_pp", {}, True),
        ("grpo", {"kl_coef": 0.01}, True),
        # Its log-probs are in the reward, and so in the baseline of its group.
        ("grpo", {"kl_reward": 0.01}, False),
        # Its values are in the mean that whitening subtracts.
        ("ppo", {}, False),
    ],
    ids=str,
)
def test_a_response_that_is_not_trained_is_left_out_where_no_advantage_reads_its_scores(
    preset: str, changes: dict[str, float], is_left_out: bool
) -> None:
    rollouts = [*ROLLOUTS[:-1], truncated(ROLLOUTS[-1])]
    config = config_of(preset, truncated="mask", **changes)

    assert left_out(rollouts, config) == ({len(ROLLOUTS) - 1} if is_left_out else set())


def episode(scores: Sequence[float]) -> Rollout:
    """Returns an episode of one token for each turn, with a reply of one token after each."""
    turns = []
    for number, score in enumerate(scores):
        start = 2 + 2 * number
        turns.append(Turn(start, start + 1, "", "stop", Grade(score, False, "")))
    num_tokens = 2 + 2 * len(scores)
    sampled = np.zeros(num_tokens, bool)
    sampled[2::2] = True
    return replace(
        ROLLOUTS[0],
        tokens=Tokens(
            np.arange(num_tokens, dtype=np.int32),
            sampled=sampled,
            logps=np.zeros(num_tokens, np.float32),
            versions=np.zeros(num_tokens, np.int32),
        ),
        turns=tuple(turns),
    )


def test_a_turn_is_left_out_and_the_other_turn_of_its_episode_is_not() -> None:
    # The second turns are right or wrong, and all first turns have the same return.
    group = [episode([1.0, 0.0]), episode([0.0, 1.0])] * 2
    by_turn, whole = (
        reference.settings(
            rollout={"max_turns": 2, "max_reply_tokens": 1},
            train={"sequence_per_turn": is_by_turn},
        )
        for is_by_turn in (True, False)
    )

    assert left_out(group, by_turn) == {0, 2, 4, 6}
    assert left_out(group, whole) == set()


# -- surrogates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [part for part, surrogate in SURROGATES.items() if surrogate.scales_with_advantage]
)
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_a_surrogate_that_scales_with_the_advantage_is_0_where_the_advantage_is_0(
    part: type, dual_clip: float
) -> None:
    numbers = Clip(dual=dual_clip) if part is Clip else part()
    old_logps = jnp.linspace(-30, 30, 121)[None]

    def loss(logps: jax.Array) -> jax.Array:
        ratio = bounded_exp(logps - old_logps)
        term, _ = SURROGATES[part].compute(logps, ratio, jnp.zeros_like(logps), numbers)
        return term.sum()

    value, slopes = jax.value_and_grad(loss)(jnp.full_like(old_logps, -1.0))

    assert value == 0
    assert not slopes.any()


# -- the update ------------------------------------------------------------------------------------

# The sampler's log-probs of random rollouts are far from the trainer's: these bounds reject none.
WIDE_BOUNDS = {"geometric_rejection": {"correction_low": 0.01, "correction_high": 100.0}}


@cache
def adam_trainer(preset: str) -> Trainer:
    """Returns a trainer of two minibatches and two epochs, in small microbatches.

    Compiling its programs takes most of the time of this file, so the tests share one preset.
    """
    train = {"minibatches": 2, "epochs": 2, "packs_per_row": 2, "microbatch_tokens": 60}
    config = config_of(preset, train, **WIDE_BOUNDS.get(preset, {}))
    config.optimizer = replace(config.optimizer, lr=0.05, eps=1e-3, warmup=None)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    return make_trainer(config, reference.MODEL, None, mesh)


def first_state(trainer: Trainer) -> State:
    params = reference.placed(trainer.policy, reference.random_params())
    return trainer.policy.start(params)


def update_on_all(
    trainer: Trainer, state: State, rollouts: list[Rollout], step: int
) -> tuple[State, dict[str, float]]:
    """Does what `update_on_rollouts` does, and leaves nothing out."""
    minibatches = [
        make_minibatch(trainer, rollouts, groups)
        for groups in divide_groups(
            trainer.updates, trainer.credit.group_size, range(len(rollouts)), step
        )
    ]
    score_and_credit(trainer, state, minibatches, rollouts)
    return run_optimizer_steps(trainer, state, minibatches, step)


@pytest.mark.parametrize("preset", LEAVE_OUT)
def test_an_update_without_the_left_out_is_the_update_on_all(preset: str) -> None:
    trainer = adam_trainer(preset)

    result = update_on_rollouts(trainer, first_state(trainer), ROLLOUTS, 1)
    state, metrics = update_on_all(trainer, first_state(trainer), ROLLOUTS, 1)

    assert result.metrics["update/left_out"] == 1 / 4
    start = reference.random_params()
    change, change_on_all = (
        jax.tree.map(np.subtract, jax.device_get(params), start)
        for params in (result.state.params, state.params)
    )
    assert reference.difference(change, change_on_all) < 1e-4
    for name in ("optimizer/loss", "optimizer/grad_norm"):
        assert result.metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7)


def test_a_step_without_a_gradient_goes_on_by_the_momentum_of_the_last_one() -> None:
    trainer = adam_trainer("gspo")

    def state_after_a_step() -> State:
        return update_on_rollouts(trainer, first_state(trainer), ROLLOUTS, 1).state

    before = jax.device_get(state_after_a_step().params)
    result = update_on_rollouts(trainer, state_after_a_step(), ALL_EQUAL, 2)
    state, _ = update_on_all(trainer, state_after_a_step(), ALL_EQUAL, 2)

    assert jax.tree.all(jax.tree.map(np.array_equal, result.state, state))
    assert not np.array_equal(result.state.params["embed"], before["embed"])
    assert int(result.state.step) == 8  # 2 steps of 2 epochs of 2 minibatches
    metrics = result.metrics
    assert metrics["update/left_out"] == 1
    assert metrics["update/tokens"] == metrics["update/padding"] == 0
    assert metrics["optimizer/grad_norm"] == metrics["optimizer/loss"] == 0
    assert "policy/entropy" not in metrics
    assert "policy/mismatch" not in metrics


def test_a_step_without_a_gradient_computes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither scores nor an update: only the optimizer's step on a gradient of 0."""
    trainer = adam_trainer("gspo")
    state = first_state(trainer)

    def refuse(*arguments: object) -> None:
        raise AssertionError("a program of the model ran")

    for name in ("update_program", "score_program", "entropy_program"):
        monkeypatch.setitem(trainer.policy.__dict__, name, refuse)
    result = update_on_rollouts(trainer, state, ALL_EQUAL, 1)

    assert result.metrics["update/left_out"] == 1
    # Without moments of earlier steps, and without weight decay, nothing moves.
    start = reference.placed(trainer.policy, reference.random_params())
    assert jax.tree.all(jax.tree.map(np.array_equal, result.state.params, start))


def test_what_is_left_out_keeps_its_advantage_and_its_share_of_the_weights() -> None:
    trainer = adam_trainer("gspo")
    in_both = make_minibatches(trainer, ROLLOUTS, 1)
    credit = score_and_credit(trainer, first_state(trainer), in_both, ROLLOUTS, reference=None)
    rollouts = credit.rollouts

    assert sorted(i for part in in_both for i in part.members) == list(range(len(ROLLOUTS)))
    for part in in_both:
        assert len(part.members) == 8
        total = sum(float(np.asarray(batch.weights).sum()) for batch in part.batches)
        # Every sequence has 1/8 of the weights of its minibatch, also one that is left out.
        assert total == pytest.approx(len(part.chosen) / 8)
    assert [rollout.advantage for rollout in rollouts[:GROUP_SIZE]] == [0.0] * GROUP_SIZE
    assert any(rollout.advantage for rollout in rollouts[GROUP_SIZE:])
