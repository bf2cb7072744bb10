"""The warm start: supervised steps on examples of the task, before RL.

A model with random weights never answers correctly, and RL learns nothing from rewards that are all
equal. The examples have the format that the task's grader expects, but their answers are often
wrong (warm_start.tries).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax

from jzero import terminal
from jzero.config import OptimizerConfig, WarmStart, schedules
from jzero.errors import UserError
from jzero.hosts.interrupt import StopCheck
from jzero.model import qwen
from jzero.training.examples import Example
from jzero.training.optimizer import learning_rate
from jzero.training.supervised import SupervisedTrainer


def warm_start(
    trainer: SupervisedTrainer,
    settings: WarmStart,
    optimizer: OptimizerConfig,
    make_example: Callable[[int], Example],
    params: qwen.Params,
    check_stop: StopCheck,
) -> qwen.Params:
    """Returns `params` after warm_start.steps supervised steps. `params` are donated.

    trainer: of the full model, even if RL trains an adapter.
    optimizer: of the RL run; the warm start has its own learning rate.
    make_example: returns the example with a number; every step draws new ones.
    check_stop: called before each step.

    Raises UserError if the loss is not finite.
    """
    # The rate falls to the same share of its peak as the rate of RL.
    share = getattr(optimizer.schedule, "min_lr_ratio", 0.1)
    own_optimizer = replace(
        optimizer,
        lr=settings.lr,
        warmup=schedules.Steps(settings.warmup_steps) if settings.warmup_steps else None,
        schedule=schedules.Cosine(min_lr_ratio=share),
    )
    state = trainer.learner.start(params)
    with terminal.phase("warm start", total=settings.steps) as phase:
        for step in range(settings.steps):
            check_stop()
            first = step * settings.batch_size
            examples = [make_example(first + index) for index in range(settings.batch_size)]
            lr = learning_rate(own_optimizer, step, settings.steps)
            state, stats = trainer.step(state, trainer.pack(examples), lr)

            # Reading a number waits for the device, so only every 20th loss is read. This suffices
            # to find a loss that is not finite: it stays so, and the last step is always read.
            if step % 20 == 0 or step + 1 == settings.steps:
                sums = jax.device_get(stats)
                nll = float(sums["nll"]) / float(sums["tokens"])
                if not math.isfinite(nll):
                    raise UserError(
                        f"warm_start.lr={settings.lr}: the loss of warm-start step {step + 1} is "
                        "not finite; lower warm_start.lr or optimizer.weight_decay="
                        f"{optimizer.weight_decay}"
                    )
            phase.advance()
    return state.params
