"""The warm start: AdamW on the mean negative log-likelihood of the responses, and nothing else."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import slow

from jzero import sft, tokenizer, update
from jzero.sharding import train_mesh
from jzero.tasks import TASKS
from jzero.update import learning_rate

TOKENIZER = tokenizer.countdown()
MODEL = replace(slow.MODEL, vocab_size=len(TOKENIZER))


def test_to_items():
    pairs = [("3 7=4\n", "7-3=4 yes\n<answer>7-3</answer>"), ("1 1=2\n", "<answer>1+1</answer>")]
    items = sft.to_items(pairs, TOKENIZER, 40)
    for item, (prompt, response) in zip(items, pairs, strict=True):
        assert tokenizer.decode(TOKENIZER, item.tokens[: item.prompt]) == prompt
        assert tokenizer.decode(TOKENIZER, item.tokens[item.prompt :]) == response
        assert item.tokens[-1] == TOKENIZER.eos_token_id
        assert (item.weights > 0).tolist() == [i >= item.prompt for i in range(len(item.tokens))]
        assert len(item.logps) == len(item.tokens)
    assert sum(item.weights.sum() for item in items) == pytest.approx(1)
    assert len({w for item in items for w in item.weights.tolist()}) == 2  # 0, and the same for every token


def test_an_example_longer_than_a_sequence_may_be_is_refused():
    with pytest.raises(ValueError, match=r"a warm-start example has 17 tokens, rollout.max_prompt \+ max_new is 16"):
        sft.to_items([("1 1=2\n", "x" * 10)], TOKENIZER, 16)


def settings(**warm_start):
    return slow.settings(
        task={"template": "plain", "numbers_min": 2, "numbers_max": 2, "value_max": 9},
        rollout={"max_prompt": 12, "max_new": 24, "temperature": 0.5},  # the temperature is RL's: not used here
        train={"tokens": 72, "minibatches": 2},  # several microbatches; the minibatches are RL's
        optimizer={"lr": 1e3, "eps": 1e-4, "weight_decay": 0.1},
        warm_start={"steps": 3, "batch": 5, "lr": 0.02, "warmup_steps": 2, "tries": 1} | warm_start,
    )


def test_warm_start_is_adamw_on_the_mean_nll():
    config = settings()
    policy = update.policy(MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))
    start = slow.random_params(MODEL)
    steps = []
    got = sft.warm_start(policy, config, TOKENIZER, slow.placed(policy, start), lambda: steps.append(None))
    assert len(steps) == 3

    def gradient(params, step):
        pairs = [TASKS["countdown"].warm_start(config.task, 0, step * 5 + i, 1) for i in range(5)]
        items = sft.to_items(pairs, TOKENIZER, 36)
        trained = [item.weights > 0 for item in items]
        slopes = [-1.0 * mine / sum(map(np.sum, trained)) for mine in trained]
        return slow.naive_gradient(params, items, slopes, 1.0, MODEL)

    schedule = replace(config.optimizer, lr=0.02, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(schedule, step, 3) for step in range(3)]
    gradients = [lambda params, step=step: gradient(params, step) for step in range(3)]
    want = slow.adamw(start, gradients, config.optimizer, rates)
    moved = lambda params: jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, start)
    assert slow.difference(moved(got), moved(want)) < 1e-4


def test_interruption_and_missing_examples(monkeypatch):
    config = settings()
    policy = update.policy(MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sft.warm_start(policy, config, TOKENIZER, slow.placed(policy, slow.random_params(MODEL)), stop)
    monkeypatch.setitem(TASKS, "countdown", TASKS["countdown"]._replace(warm_start=None))
    with pytest.raises(ValueError, match="task.name=countdown has no warm-start examples; set warm_start.steps=0"):
        sft.warm_start(policy, config, TOKENIZER, {}, stop)
