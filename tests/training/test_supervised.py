"""Supervised steps: the mean negative log-likelihood of packed examples, and the warm start."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import reference
from tiny import policy_learner, supervised_trainer

from jzero.algorithms import grpo
from jzero.config import Config, schedules
from jzero.model import qwen, tokenizer
from jzero.setup import warm_started
from jzero.sharding.mesh import train_mesh
from jzero.tasks import TASKS
from jzero.training.examples import Example, encode_completion
from jzero.training.learner import Learner
from jzero.training.optimizer import learning_rate
from jzero.training.packing import PackedBatch

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = tokenizer.countdown()
MODEL = replace(reference.MODEL, vocab_size=len(TOKENIZER))


# -- packed examples -------------------------------------------------------------------------------


def random_examples() -> list[Example]:
    """Returns examples of which some tokens are trained: never the first, always the last."""
    rng = np.random.default_rng(0)
    examples = []
    for length in (4, 9, 31, 2, 17, 8, 5, 12):
        middle = (rng.random(length - 2) < 0.6).tolist()
        tokens = rng.integers(0, len(TOKENIZER), length).tolist()
        examples.append(Example(tokens, [False, *middle, True]))
    return examples


@pytest.mark.parametrize("num_devices", [1, 4])
def test_packed_losses_are_those_of_examples_alone(num_devices: int) -> None:
    """The losses of single tokens and their mean. Packed examples do not see each other."""
    mesh = train_mesh(num_devices, 1, 1, jax.devices()[:num_devices])
    config = reference.settings(train={"microbatch_tokens": 64 * num_devices})
    trainer = supervised_trainer(MODEL, mesh, config, row_tokens=32)
    learner = trainer.learner
    params = reference.random_params(MODEL)
    examples = random_examples()
    packed = trainer.pack(examples)
    assert packed.batch.segments.max() > 1  # some examples share a row

    on_mesh = reference.placed(learner, params)
    [logp_rows] = learner.score(on_mesh, *learner.put([packed]), [trainer.layout])
    with jax.transfer_guard("disallow"):  # of implicit transfers
        loss = trainer.loss(on_mesh, packed)

    logps = [np.zeros(len(example.tokens), np.float32) for example in examples]
    packed.from_rows(np.asarray(logp_rows), logps)
    expected, _ = reference.naive(params, examples, temperature=1.0, model=MODEL)
    sum_of_losses = 0.0
    for example, got, want in zip(examples, logps, expected, strict=True):
        np.testing.assert_allclose(got[1:], want[1:], atol=1e-5)
        sum_of_losses -= want[np.array(example.trained)].sum()
    num_trained = sum(example.num_trained for example in examples)
    assert loss == pytest.approx(sum_of_losses / num_trained, abs=1e-5)


def test_the_cross_entropy_has_the_gradient_of_a_surrogate_with_advantage_1() -> None:
    """Fine-tuning was a policy gradient before it was a part of the loss.

    The two are other programs to XLA, whose sums may differ in the last digits.
    """
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    trainer = supervised_trainer(MODEL, mesh, reference.settings(), row_tokens=32)
    # Supervised steps have temperature 1.
    settings = reference.settings(algorithm=vars(grpo()), rollout={"temperature": 1.0})
    surrogate = policy_learner(MODEL, settings, mesh)
    packed = trainer.pack(random_examples())
    ones = np.ones_like(packed.batch.weights)
    with_advantages = replace(packed, batch=replace(packed.batch, advantages=ones))

    def updated(learner: Learner, packed: PackedBatch) -> dict[str, np.ndarray]:
        state = learner.start(reference.placed(learner, reference.random_params(MODEL)))
        batches, counts = learner.put([packed])
        state, stats = learner.update(state, batches, counts, [trainer.layout], 1e-2)
        return jax.device_get((state.params, stats["grad_norm"], stats["nll"]))

    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
        updated(trainer.learner, packed),
        updated(surrogate, with_advantages),
    )


def test_fine_tuning_has_no_correction_for_stale_samples() -> None:
    """Examples have no log-probs of a sampler that a correction could divide by."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])

    def gradient_norm(max_staleness: int) -> float:
        config = reference.settings(rollout={"placement.max_staleness": max_staleness})
        trainer = supervised_trainer(MODEL, mesh, config, row_tokens=32)
        learner = trainer.learner
        state = learner.start(reference.placed(learner, reference.random_params(MODEL)))
        _, stats = trainer.step(state, trainer.pack(random_examples()), 0.0)
        return float(stats["grad_norm"])

    assert gradient_norm(max_staleness=1) == gradient_norm(max_staleness=0) > 0


# -- the warm start --------------------------------------------------------------------------------

STEPS = 3
BATCH_SIZE = 5


def warm_start_settings() -> Config:
    """Returns settings with several microbatches in a step.

    The temperature, the minibatches and the learning rate are those of RL: the warm start must not
    use them.
    """
    return reference.settings(
        task={"template": "plain", "options": ("numbers_min=2", "numbers_max=2", "value_max=9")},
        rollout={"max_prompt_tokens": 12, "max_new_tokens": 24, "temperature": 0.5},
        train={"microbatch_tokens": 72, "minibatches": 2},
        optimizer={"lr": 1e3, "eps": 1e-4, "weight_decay": 0.1},
        warm_start={
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            "lr": 0.02,
            "warmup_steps": 2,
            "tries": 1,
        },
    )


def policy_on_one_device(config: Config) -> Learner:
    return policy_learner(MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))


def gradient_of_step(params: qwen.Params, config: Config, step: int) -> qwen.Params:
    """Returns the gradient of the mean loss of a step's trained tokens, in float64."""
    make_example = TASKS["countdown"].warm_start
    assert make_example is not None
    examples = []
    for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE):
        prompt, completion = make_example(config.task, 0, index, 1)
        examples.append(encode_completion(TOKENIZER, prompt, completion))
    num_trained = sum(example.num_trained for example in examples)
    slopes = [-np.array(example.trained, np.float64) / num_trained for example in examples]
    return reference.naive_gradient(params, examples, slopes, temperature=1.0, model=MODEL)


def test_the_warm_start_is_adamw_on_the_mean_negative_log_likelihood() -> None:
    config = warm_start_settings()
    policy = policy_on_one_device(config)
    params = reference.random_params(MODEL)
    times_stop_was_checked = 0

    def check_stop() -> None:
        nonlocal times_stop_was_checked
        times_stop_was_checked += 1

    on_mesh = reference.placed(policy, params)
    with jax.transfer_guard("disallow"):  # of implicit transfers
        warmed = warm_started(config, policy, TOKENIZER, on_mesh, check_stop)

    schedule = replace(
        config.optimizer, lr=0.02, warmup=schedules.Steps(2), schedule=schedules.Cosine()
    )
    rates = [learning_rate(schedule, step, STEPS) for step in range(STEPS)]
    gradients = [partial(gradient_of_step, config=config, step=step) for step in range(STEPS)]
    expected = reference.adamw(params, gradients, config.optimizer, rates)

    def change(after: qwen.Params) -> qwen.Params:
        return jax.tree.map(lambda x, start: np.asarray(x) - np.asarray(start), after, params)

    # The changes are compared: the parameters themselves hardly move.
    assert reference.difference(change(warmed), change(expected)) < 1e-4
    assert times_stop_was_checked == STEPS


def interrupt() -> None:
    raise KeyboardInterrupt


def test_the_warm_start_can_be_interrupted() -> None:
    config = warm_start_settings()
    policy = policy_on_one_device(config)
    params = reference.placed(policy, reference.random_params(MODEL))

    with pytest.raises(KeyboardInterrupt):
        warm_started(config, policy, TOKENIZER, params, interrupt)


def test_a_task_without_examples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = warm_start_settings()
    policy = policy_on_one_device(config)
    without_examples = TASKS["countdown"]._replace(warm_start=None)
    monkeypatch.setitem(TASKS, "countdown", without_examples)

    message = "task.name=countdown has no warm-start examples; set warm_start=none"
    with pytest.raises(ValueError, match=message):
        warm_started(config, policy, TOKENIZER, {}, interrupt)
