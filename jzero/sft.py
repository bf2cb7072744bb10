"""Supervised steps on (prompt, response) pairs: the same packing, update and optimizer as RL.

With an advantage of 1 and the ratio at its on-policy value, the policy gradient is that of the log-likelihood."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from jzero import config, hosts, tokenizer, update
from jzero.algorithms import grpo
from jzero.batch import Item, pack
from jzero.model import qwen
from jzero.tasks import TASKS
from jzero.types import Layout


def warm_start(
    policy: update.Learner,
    settings: config.Config,
    tok: tokenizer.PreTrainedTokenizerFast,
    params: qwen.Params,
    interrupted: Callable[[], None],
) -> qwen.Params:
    """`warm_start.steps` supervised steps on the task's own examples; every step draws new ones."""
    warm, rollout = settings.warm_start, settings.rollout
    example = TASKS[settings.task.name].warm_start
    if example is None:
        raise ValueError(f"task.name={settings.task.name} has no warm-start examples; set warm_start.steps=0")
    optimizer = replace(settings.optimizer, lr=warm.lr, warmup_steps=warm.warmup_steps, schedule="cosine")
    objective = replace(settings, algorithm=grpo(name="sft"), rollout=replace(rollout, temperature=1.0))
    learner = update.policy(policy.model, objective, policy.mesh)
    layout = Layout(0, 1, rollout.total)
    shards = policy.mesh.shape["data"] * policy.mesh.shape["fsdp"]
    rows = max(1, settings.train.tokens // (layout.tokens * shards)) * shards
    state = learner.start(params)
    for step in (progress := tqdm(range(warm.steps), desc="warm start", mininterval=1, disable=not hosts.first())):
        interrupted()
        first = step * warm.batch
        pairs = [example(settings.task, settings.train.seed, first + i, warm.tries) for i in range(warm.batch)]
        [packed] = pack([to_items(pairs, tok, layout.tokens)], [layout], [rows], [0])
        batch = replace(packed.batch, advantages=np.ones_like(packed.batch.weights))
        lr = update.learning_rate(optimizer, step, warm.steps)
        state, stats = learner.update(state, *learner.put([replace(packed, batch=batch)]), [layout], lr)
        if step % 20 == 0:
            progress.set_postfix(nll=f"{float(stats['nll']) / float(stats['tokens']):.3f}", refresh=False)
    return state.params


def to_items(pairs: list[tuple[str, str]], tok: tokenizer.PreTrainedTokenizerFast, longest: int) -> list[Item]:
    """Pairs as items of weight 1 / all response tokens; the response ends with the end-of-sequence token."""
    encode = tokenizer.encode
    encoded = [(encode(tok, prompt), [*encode(tok, response), tok.eos_token_id]) for prompt, response in pairs]
    too_long = max(len(prompt + response) for prompt, response in encoded)
    if too_long > longest:
        raise ValueError(f"a warm-start example has {too_long} tokens, rollout.max_prompt + max_new is {longest}")
    weight = 1.0 / sum(len(response) for _, response in encoded)
    return [
        Item(
            tokens=np.array(prompt + response, np.int32),
            prompt=len(prompt),
            weights=np.repeat(np.array([0, weight], np.float32), [len(prompt), len(response)]),
            logps=np.zeros(len(prompt + response), np.float32),
        )
        for prompt, response in encoded
    ]
