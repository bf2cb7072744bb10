"""Context parallelism: devices that share the tokens of a row compute what one device computes.

Meshes are (data, fsdp, tensor, context). What experts and adapters compute on such meshes is in
test_expert_training.py and test_adapter_training.py, beside their other meshes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import test_learner
from test_hybrid_training import HYBRID

from jzero.errors import UserError
from jzero.model import qwen
from jzero.sharding.context import to_parts, to_rows
from jzero.sharding.mesh import train_mesh
from jzero.training.heads import Stats
from jzero.training.trainer import Trainer, abstract_batches

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Of the four query heads of reference.MODEL every device has one on the first and the last mesh;
# the two KV heads are repeated on the first.
MESHES = [(1, 2, 1, 4), (2, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2)]


def trainer_on(
    sizes: Sequence[int],
    packing: str = "two slots",
    model: qwen.QwenConfig = reference.MODEL,
    compute: dict[str, object] | None = None,
) -> Trainer:
    """Returns a trainer without Adam."""
    settings = reference.settings(train=test_learner.PACKINGS[packing], model=compute or {})
    trainer = test_learner.trainer_on(settings, tuple(sizes), model)
    trainer.policy.optimizer = optax.identity()
    return trainer


def gradient_on(
    sizes: Sequence[int],
    packing: str = "two slots",
    model: qwen.QwenConfig = reference.MODEL,
    compute: dict[str, object] | None = None,
) -> tuple[qwen.Params, Stats]:
    trainer = trainer_on(sizes, packing, model, compute)
    minibatch = test_learner.packed_minibatch(trainer)
    return test_learner.gradient_of(trainer, minibatch, reference.random_params(model))


def assert_same_step(found: tuple[qwen.Params, Stats], expected: tuple[qwen.Params, Stats]) -> None:
    (gradient, stats), (expected_gradient, expected_stats) = found, expected
    reference.assert_same_gradient(gradient, expected_gradient, 2e-5)
    assert stats.keys() == expected_stats.keys()
    for name, value in expected_stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("packing", ["two slots", "own slot", "plain"])
def test_gradient_is_that_of_each_sequence_alone(packing: str, sizes: tuple[int, ...]) -> None:
    """Some of the rows, of 18 and 30 tokens, end in padding on the last device."""
    trainer = test_learner.gradient_trainer(packing, sizes)

    gradient, stats = test_learner.gradient_of(trainer, test_learner.packed_minibatch(trainer))

    slow_loss, slow_gradient = test_learner.slow_step()
    reference.assert_same_gradient(gradient, slow_gradient)
    reference.assert_same_loss(stats["loss"], slow_loss)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 4), (1, 2, 2, 2)], ids=str)
def test_score_is_that_of_each_sequence_alone(sizes: tuple[int, ...]) -> None:
    scores = test_learner.scores_of_rollouts(test_learner.gradient_trainer("two slots", sizes))

    test_learner.assert_scores_are_those_of_each_sequence_alone(scores)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputed_layers_and_chunks_of_logits(remat: str) -> None:
    """64 words are split over all devices, and logits are computed 16 tokens at a time."""
    model = replace(reference.MODEL, vocab_size=64)
    compute: dict[str, object] = {"remat": remat, "logit_chunk": 16}

    found = gradient_on((1, 2, 2, 2), "two slots", model, compute)

    assert_same_step(found, gradient_on((1, 1, 1), "two slots", model, compute))


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2), (1, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("packing", ["two slots", "plain"])
def test_gated_delta_nets_share_heads(packing: str, sizes: tuple[int, ...]) -> None:
    found = gradient_on(sizes, packing, HYBRID)

    assert_same_step(found, gradient_on((1, 1, 1), packing, HYBRID))


@pytest.mark.parametrize("tokens", [16, 17])
def test_parts_join_to_the_same_rows(tokens: int) -> None:
    mesh = train_mesh(1, 2, 1, jax.devices()[:8], context=4)
    rows = jnp.arange(4 * tokens * 3).reshape(4, tokens, 3)

    parts = jax.jit(to_parts, static_argnums=1)(rows, mesh)

    part = -(-tokens // 4)
    assert parts.shape == (16, part, 3)
    # The first device of the second context has the first parts of rows 2 and 3.
    own = next(
        shard for shard in parts.addressable_shards if shard.device == mesh.devices[0, 1, 0, 0]
    )
    np.testing.assert_array_equal(own.data, rows[2:, :part])
    np.testing.assert_array_equal(
        jax.jit(to_rows, static_argnums=(1, 2))(parts, mesh, tokens), rows
    )


def test_no_device_gathers_the_hidden_states() -> None:
    """The update's program exchanges heads for tokens; it gathers weights and single numbers."""
    trainer = trainer_on((1, 1, 1, 4), "own slot")
    batches = abstract_batches(trainer)
    function, arguments = trainer.policy.programs(batches, trainer.layouts)["update"]

    text = function.lower(*arguments).compile().as_text()

    assert text is not None
    assert " all-to-all(" in text
    assert num_gathered(" = f32[8,2]{1,0} all-gather(f32[2,2]") == [16]  # the pattern still fits
    weights = jax.tree.leaves(qwen.abstract(reference.MODEL))
    of_weights = {leaf.size for leaf in weights} | {leaf.size // len(leaf) for leaf in weights}
    others = set(num_gathered(text)) - of_weights
    num_tokens = trainer.rows[0] * trainer.layouts[0].tokens
    assert max(others, default=0) < num_tokens * reference.MODEL.hidden_size


def num_gathered(text: str) -> list[int]:
    """Returns how many numbers each all-gather of a compiled program returns."""
    shapes = re.findall(r" = \w+\[([\d,]*)\]\S* all-gather\(", text)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (reference.MODEL, (1, 1, 1, 8), "mesh.context=8 does not divide the model's 4 query heads"),
        (
            reference.MODEL,
            (1, 1, 2, 4),
            "mesh.context=4 does not divide the model's 2 query heads on each of mesh.tensor=2",
        ),
        (
            HYBRID,
            (1, 2, 1, 4),
            "mesh.context=4 does not divide the model's 2 key heads of a gated delta net",
        ),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    model: qwen.QwenConfig, sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        trainer_on(sizes, model=model)
