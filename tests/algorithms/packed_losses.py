"""What the tests of losses share: an optimizer step whose models are replaced by given numbers.

The tests compare the loss of packed batches, and its derivative by the log-prob of every token,
with definitions that loop over tokens. No model is needed for that: `ModelOutputs` holds what
models would have returned, `packed_minibatches` packs it as training does, and `loss_and_slopes`
runs the loss over the packed rows as the jitted update does.
"""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero import algorithms, config
from jzero.algorithms import Algorithm
from jzero.hosts import collectives
from jzero.sharding.mesh import train_mesh
from jzero.training.heads import Head, make_sequence_sum, tokens_with_loss
from jzero.training.learner import Learner
from jzero.training.step import Minibatch, make_minibatches, score_and_credit
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Batch, Rollout, RowLayout, State

NUM_PROMPTS = 8
GROUP_SIZE = 4
MAX_NEW_TOKENS = 12

# Name -> train.packs_per_row, and the tokens of the longest row.
PACKINGS = {"plain": (0, 18), "one pack": (1, 18), "four packs": (4, 54)}


@dataclass
class ModelOutputs:
    """What models would have returned: for each rollout f32[T], over all tokens of the rollout."""

    rollouts: list[Rollout]
    logps: list[np.ndarray]
    old_logps: list[np.ndarray]
    ref_logps: list[np.ndarray]
    entropy: list[np.ndarray]
    old_values: list[np.ndarray]
    values: list[np.ndarray]
    teacher_logps: list[np.ndarray]


def random_outputs(seed: int, max_new_tokens: int = MAX_NEW_TOKENS) -> ModelOutputs:
    """Returns random rollouts with outputs around the sampler's log-probs.

    Rollouts differ in how far the policy has moved: from hardly (where GSPO clips) to far (where
    dual clip does).
    """
    rollouts = reference.random_rollouts(seed, NUM_PROMPTS, GROUP_SIZE, max_new=max_new_tokens)
    rng = np.random.default_rng(seed)
    lengths = [len(rollout.tokens) for rollout in rollouts]

    def noise(*scales: float) -> list[np.ndarray]:
        chosen = rng.choice(scales, len(lengths)) if len(scales) > 1 else scales * len(lengths)
        pairs = zip(chosen, lengths, strict=True)
        return [rng.normal(0, scale, length) for scale, length in pairs]

    def add(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(x + y, np.float32) for x, y in zip(left, right, strict=True)]

    sampler_logps = [
        np.where(
            rollout.tokens.sampled, rollout.tokens.logps, rng.normal(-4, 1, len(rollout.tokens))
        )
        for rollout in rollouts
    ]
    old_logps = add(sampler_logps, noise(0.01, 0.1, 0.3))
    old_values = [np.asarray(x, np.float32) for x in noise(1.0)]
    return ModelOutputs(
        rollouts=rollouts,
        logps=add(old_logps, noise(2e-4, 0.03, 0.3, 0.6)),
        old_logps=old_logps,
        ref_logps=add(old_logps, noise(0.2)),
        entropy=[np.abs(x).astype(np.float32) for x in noise(0.2)],
        old_values=old_values,
        values=add(old_values, noise(0.2)),
        teacher_logps=add(old_logps, noise(0.5)),
    )


def small_trainer(
    algorithm: Algorithm,
    packing: str = "plain",
    rows: int = 4,
    devices: int = 1,
    minibatches: int = 1,
    group_size: int = GROUP_SIZE,
    pack: str = "auto",
) -> Trainer:
    """Returns a trainer of the rollouts of `random_outputs`.

    A microbatch has `rows` rows of the longest layout on each device.
    """
    packs_per_row, row_tokens = PACKINGS[packing]
    settings = reference.settings(
        rollout={
            "num_prompts": NUM_PROMPTS * GROUP_SIZE // group_size,
            "group_size": max(group_size, 2),  # the default algorithm has a group baseline
            "max_new_tokens": MAX_NEW_TOKENS,
        },
        train={
            "pack": pack,
            "packs_per_row": packs_per_row,
            "microbatch_tokens": row_tokens * rows * devices,
            "minibatches": minibatches,
            "epochs": 2,  # a second epoch needs the old log-probs
        },
    )
    settings.algorithm = algorithm
    settings.rollout.group_size = group_size
    reference.allow_replies(settings)
    reference.name_teacher(settings)
    config.validate(settings)
    mesh = train_mesh(devices, 1, 1, jax.devices()[:devices])
    critic = reference.MODEL if algorithms.needs_critic(algorithm) else None
    return make_trainer(settings, reference.MODEL, critic, mesh)


def packed_minibatches(trainer: Trainer, outputs: ModelOutputs) -> list[Minibatch]:
    """Returns the scored minibatches of a step, of models that return the given outputs."""
    minibatches = make_minibatches(trainer, outputs.rollouts, 1)

    def score(
        given: list[np.ndarray],
        batches: tuple[Batch, ...],
        counts: jax.Array,
        layouts: list[RowLayout],
    ) -> list[jax.Array]:
        """Stands in for `Learner.score`: the parameters are the outputs of all rollouts."""
        [minibatch] = [each for each in minibatches if each.batches is batches]
        chosen = [given[i] for i in minibatch.chosen]
        return [
            collectives.put_global(packed.to_rows(chosen), trainer.policy.row_sharding)
            for packed in minibatch.packed
        ]

    def entropies(
        params: object,
        batches: tuple[Batch, ...],
        counts: jax.Array,
        layouts: list[RowLayout],
    ) -> list[jax.Array]:
        return score(outputs.entropy, batches, counts, layouts)

    trainer.policy.score = score
    trainer.policy.entropies = entropies
    needs_reference = algorithms.needs_reference(trainer.algorithm)
    ref_logps = outputs.ref_logps if needs_reference else None
    if trainer.critic is not None:
        trainer.critic.score = score
    state = State(outputs.old_logps, None, None, State(outputs.old_values, None, None))
    teacher = reference.GivenTeacher(outputs.teacher_logps)
    score_and_credit(trainer, state, minibatches, outputs.rollouts, ref_logps, teacher)
    return minibatches


@cache
def loss_program(head: Head, layouts: tuple[RowLayout, ...], mesh: Mesh):
    """Returns a jitted function (head outputs, batches) -> (loss, its derivative by output 0).

    The loss is summed over microbatches, layouts and devices as `Learner.update` sums it.
    """

    def microbatch_loss(first, other_outputs, batch: Batch, layout: RowLayout) -> jax.Array:
        first, other_outputs, batch = jax.tree.map(
            lambda x: x[:, layout.prefix :], (first, other_outputs, batch)
        )
        is_trained = batch.weights > 0
        sequence_sum = make_sequence_sum(batch.segments, is_trained, layout)
        outputs = (first, *other_outputs)
        terms, _ = head.loss(outputs, batch, sequence_sum, jnp.bool_(False))
        return jnp.where(tokens_with_loss(batch), terms, 0).sum()

    def layout_loss(outputs, batch: Batch, layout: RowLayout) -> tuple[jax.Array, jax.Array]:
        first, *other_outputs = outputs
        run = jax.value_and_grad(partial(microbatch_loss, layout=layout))
        losses, slopes = lax.map(lambda x: run(*x), (first, other_outputs, batch))
        return losses.sum(), slopes

    def device_loss(outputs, batches: list[Batch]) -> tuple[jax.Array, list[jax.Array]]:
        results = [
            layout_loss(*arguments) for arguments in zip(outputs, batches, layouts, strict=True)
        ]
        losses, slopes = zip(*results, strict=True)
        return lax.psum(sum(losses), "data"), list(slopes)

    rows = P(None, "data")
    return jax.jit(
        jax.shard_map(
            device_loss,
            mesh=mesh,
            in_specs=(rows, rows),
            out_specs=(P(), rows),
            check_vma=False,
        )
    )


def loss_and_slopes(
    trainer: Trainer,
    model: Learner,
    minibatch: Minibatch,
    *outputs: list[np.ndarray],
) -> tuple[float, list[np.ndarray]]:
    """Returns the loss of an optimizer step, and its derivative by the head's first output.

    `model` is the trainer's policy or critic, and `outputs` are what its head would return. The
    slopes are an array for each rollout of the minibatch, over the rollout's tokens. Asserts that
    the derivative is 0 in every cell that holds no token of a rollout.
    """
    chosen = [[output[i] for i in minibatch.chosen] for output in outputs]
    packed_outputs = [
        tuple(
            collectives.put_global(packed.to_rows(arrays), model.row_sharding) for arrays in chosen
        )
        for packed in minibatch.packed
    ]
    program = loss_program(model.head, tuple(trainer.layouts), model.mesh)
    loss, gradients = program(packed_outputs, list(minibatch.batches))

    slopes = [np.zeros(len(array)) for array in chosen[0]]
    for packed, gradient in zip(minibatch.packed, gradients, strict=True):
        packed.from_rows(gradient, slopes)
    nonzero_cells = sum(np.count_nonzero(gradient) for gradient in gradients)
    assert nonzero_cells == sum(np.count_nonzero(slope) for slope in slopes)
    return float(loss), slopes


def assert_same_loss(
    loss: float,
    slopes: list[np.ndarray],
    expected_loss: float,
    expected_slopes: list[np.ndarray],
) -> None:
    """Asserts equality within float32, relative to the largest slope. Zeros must be exact."""
    flat, expected = np.concatenate(slopes), np.concatenate(expected_slopes)
    np.testing.assert_allclose(flat, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(flat == 0, expected == 0)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6, atol=1e-6 * np.abs(expected).sum())
