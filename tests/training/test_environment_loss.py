"""ECHO: the cross-entropy on what an environment replies, in the gradient of a real step."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import reference

from jzero.algorithms import PRESETS
from jzero.config import schedules
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.credit import environment_weights, training_sequences
from jzero.training.step import update_on_rollouts
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Grade, Rollout, Turn

pytestmark = pytest.mark.usefixtures("quick_compilation")

FAR = 1e3
ROLLOUTS = reference.random_rollouts(2, 4, 4)


def echo_trainer(packs_per_row: int, devices: int) -> Trainer:
    """Returns a trainer whose update takes the bare gradient as the step."""
    settings = reference.settings(
        algorithm=vars(PRESETS["echo"]()),
        train={"packs_per_row": packs_per_row, "microbatch_tokens": 128 * devices},
    )
    mesh = train_mesh(devices, 1, 1, jax.devices()[:devices])
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    trainer.policy.optimizer = optax.identity()
    return trainer


@pytest.mark.parametrize(("packs_per_row", "devices"), [(2, 1), (0, 2)])
def test_the_gradient_of_a_step_has_the_cross_entropy_of_the_replies(
    packs_per_row: int, devices: int
) -> None:
    trainer = echo_trainer(packs_per_row, devices)
    optimizer = replace(trainer.updates.policy, lr=FAR, schedule=schedules.Constant(), warmup=None)
    trainer = replace(trainer, updates=replace(trainer.updates, policy=optimizer))
    params = reference.random_params()
    state = trainer.policy.start(reference.placed(trainer.policy, params))

    result = update_on_rollouts(trainer, state, ROLLOUTS, step=1)

    gradient = jax.tree.map(
        lambda before, after: (np.asarray(before) - np.asarray(after)) / FAR,
        params,
        jax.device_get(result.state.params),
    )
    logps, _ = reference.naive(params, ROLLOUTS, trainer.objective.temperature)
    _, slopes = reference.policy_loss(
        ROLLOUTS, logps, logps, logps, trainer.algorithm, 4, trainer.credit.max_new_tokens
    )
    expected = reference.naive_gradient(params, ROLLOUTS, slopes, trainer.objective.temperature)
    assert reference.difference(gradient, expected) < 1e-4
    replies = [
        -logps[i][t]
        for i, rollout in enumerate(ROLLOUTS)
        for t in range(rollout.prompt_length, len(rollout.tokens))
        if not rollout.tokens.sampled[t]
    ]
    assert result.metrics["policy/environment_nll"] == pytest.approx(np.mean(replies), rel=1e-5)


def three_turns() -> Rollout:
    """Returns a prompt of 2 tokens, and turns of 2 tokens with replies of 1 and 3 between them."""
    grade = Grade(1.0, True, "")
    starts = [2, 5, 10]
    sampled = np.zeros(12, bool)
    for start in starts:
        sampled[start : start + 2] = True
    return replace(
        ROLLOUTS[0],
        tokens=Tokens(
            np.arange(12, dtype=np.int32),
            sampled=sampled,
            logps=np.zeros(12, np.float32),
            versions=np.where(sampled, 0, -1),
        ),
        turns=tuple(Turn(start, start + 2, "", "stop", grade) for start in starts),
        grade=grade,
    )


@pytest.mark.parametrize("sequence_per_turn", [False, True])
def test_every_token_of_a_reply_counts_once(sequence_per_turn: bool) -> None:
    settings = reference.settings(
        algorithm=vars(PRESETS["echo"]()), train={"sequence_per_turn": sequence_per_turn}
    )
    sequences, _ = training_sequences([three_turns()], settings.train.sequence_per_turn)

    weights = environment_weights(
        sequences, range(len(sequences)), settings.train.sequence_per_turn
    )

    counts = np.zeros(12)
    for values in weights.values():
        counts[: len(values)] += values
    expected = np.zeros(12)
    expected[[4, 7, 8, 9]] = 1 / 4
    np.testing.assert_allclose(counts, expected, rtol=1e-6)


def test_a_rollout_without_a_score_trains_on_no_reply() -> None:
    failed = replace(three_turns(), grade=Grade(0.0, False, "", failed=True))
    settings = reference.settings(algorithm=vars(PRESETS["echo"]()))

    weights = environment_weights([failed, three_turns()], [0, 1], settings.train.sequence_per_turn)

    assert not weights[0].any()
    assert weights[1].sum() == pytest.approx(1.0)
