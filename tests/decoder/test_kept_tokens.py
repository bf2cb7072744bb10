"""With filters, ratios to the sampler are over the tokens that the sampler's filters kept."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import sampler_and_publish, tiny_settings

from jzero import config
from jzero.decoder.engine import Samples
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.model import logprobs, qwen
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler
from jzero.sharding.mesh import train_mesh
from jzero.tasks import guess
from jzero.training.step import UpdateResult, update_on_rollouts
from jzero.training.trainer import abstract_batches, make_trainer
from jzero.types import Rollout
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOP_K = 6


def filtered_settings(packs_per_row: int = 1) -> config.Config:
    """Returns settings of episodes of two turns whose update has several optimizer steps.

    The entropy bonus makes every sequence part of the update, whatever its score.
    """
    return tiny_settings(
        rollout={
            "num_prompts": 2,
            "group_size": 4,
            "max_turns": 2,
            "top_k": TOP_K,
            "top_p": 0.9,
            "kv_dtype": "float32",
        },
        algorithm={"correction": "token_truncate", "entropy_coef": 1e-3},
        train={"packs_per_row": packs_per_row, "epochs": 2, "microbatch_tokens": 512},
    )


def rollouts_of(settings: config.Config) -> tuple[list[Rollout], list[Rollout]]:
    """Returns graded rollouts of a random model, and rollouts that are not trained on."""
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    with Pool(1) as pool:
        sampler, publish = sampler_and_publish(settings, base, mesh, pool)
        weights = publish(make_trainer(settings, base.model, None, mesh).policy.init_params(0))
        problems = sampler.encode_problems(guess.train_problems(settings.task, 0, 1, 2))

        def sample(sampler: Sampler, is_trained: bool) -> list[Rollout]:
            rollouts, _ = sampler.sample_rollouts(
                weights,
                problems,
                group_size=4,
                temperature=1.0,
                key=(0, 0),
                version=0,
                samples=Samples(is_trained=is_trained),
            )
            return sampler.gather_rollouts(rollouts, 4)

        return sample(sampler, True), sample(sampler, False)


def without(rollout: Rollout, track: str) -> Rollout:
    return replace(rollout, tokens=rollout.tokens.without(track))


def updated(settings: config.Config, rollouts: list[Rollout]) -> UpdateResult:
    """Returns what a step of training makes of the rollouts, with the same random model."""
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    trainer = make_trainer(settings, base.model, None, mesh)
    state = trainer.policy.start(trainer.policy.init_params(0))
    result = update_on_rollouts(trainer, state, rollouts, step=1)

    def shapes(batches: object) -> object:
        return jax.tree.map(lambda x: (x.shape, x.dtype), batches)

    assert shapes(tuple(result.batches)) == shapes(abstract_batches(trainer))
    return result


def test_sampler_and_trainer_have_the_same_probabilities_over_the_kept_tokens() -> None:
    settings = filtered_settings()
    rollouts, not_trained = rollouts_of(settings)

    result = updated(settings, rollouts)

    assert any(len(rollout.turns) > 1 for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.tokens["kept"].shape == (len(rollout.tokens), TOP_K)
        is_kept = (rollout.tokens["kept"] == rollout.tokens.ids[:, None]).any(axis=1)
        np.testing.assert_array_equal(is_kept, rollout.tokens.sampled)
        assert (rollout.tokens["kept"][~rollout.tokens.sampled] == -1).all()
    assert result.metrics["policy/mismatch_max"] < 1e-4
    assert result.metrics["policy/correction"] == pytest.approx(1.0, abs=1e-3)

    # Over the full vocabulary the same tokens are less probable, by the mass that was kept.
    unfiltered = updated(settings, [without(rollout, "kept") for rollout in rollouts])
    assert unfiltered.metrics["policy/mismatch"] > 0.5

    # What is not trained on is the same text, without the tokens that were kept.
    assert all(rollout.tokens.get("kept") is None for rollout in not_trained)
    assert [r.tokens.ids.tolist() for r in not_trained] == [r.tokens.ids.tolist() for r in rollouts]

    [restored, *_] = rollouts_from_bytes([rollouts_to_bytes(rollouts)])
    np.testing.assert_array_equal(restored.tokens["kept"], rollouts[0].tokens["kept"])


def test_in_plain_rows_it_is_the_same_step() -> None:
    settings = filtered_settings()
    rollouts, _ = rollouts_of(settings)

    packed = updated(settings, rollouts)
    plain = updated(filtered_settings(packs_per_row=0), rollouts)

    grad_norm = packed.metrics["optimizer/grad_norm"]
    assert grad_norm > 0
    assert plain.metrics["optimizer/grad_norm"] == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.parametrize("chunk", [10**6, 8])
def test_log_probs_and_slopes_over_kept_tokens_are_those_of_the_definition(chunk: int) -> None:
    rng = np.random.default_rng(0)
    B, T, K, E, V = 2, 6, 4, 8, 20
    model = qwen.QwenConfig("qwen2", V, E, 24, 1, 2, 1, 4, True, 10000.0, 1e-6)
    hidden = rng.normal(size=(B, T, E))
    embed = rng.normal(size=(V, E))
    kept = np.stack([[rng.permutation(V)[:K] for _ in range(T)] for _ in range(B)])
    kept[:, :, 2:] = np.where(rng.random((B, T, K - 2)) < 0.5, -1, kept[:, :, 2:])
    targets = kept[:, :, 0].copy()
    kept[0, 1] = -1  # nothing is remembered: all tokens count
    slopes = rng.normal(size=(B, T))

    def weighted_sum(hidden: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        outputs = logprobs.token_logps(
            model,
            {"embed": embed.astype(np.float32)},
            hidden,
            targets,
            temperature=0.7,
            chunk=chunk,
            dtype="float32",
            kept=kept,
        )
        return (outputs[0] * slopes).sum(), outputs

    (_, (logps, _, full_logps)), gradient = jax.value_and_grad(weighted_sum, has_aux=True)(
        hidden.astype(np.float32)
    )

    for b, t in np.ndindex(B, T):
        logits = embed @ hidden[b, t] / 0.7
        among = kept[b, t][kept[b, t] >= 0] if (kept[b, t] >= 0).any() else np.arange(V)
        probs = np.exp(logits[among]) / np.exp(logits[among]).sum()
        target = targets[b, t]
        logz = np.log(np.exp(logits[among]).sum())
        assert logps[b, t] == pytest.approx(logits[target] - logz, abs=1e-5)
        full = logits[target] - np.log(np.exp(logits).sum())
        assert full_logps[b, t] == pytest.approx(full, abs=1e-5)
        expected = slopes[b, t] * (embed[target] - probs @ embed[among]) / 0.7
        np.testing.assert_allclose(gradient[b, t], expected, rtol=1e-4, atol=1e-5)
