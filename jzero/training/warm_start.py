"""The warm start: supervised steps on examples of the task, before RL.

A model with random weights never answers correctly, and RL learns nothing from rewards that are all
equal. The examples have the format that the task's grader expects, but their answers are often
wrong (warm_start.tries).
"""

import math
from dataclasses import replace

import jax

from jzero import terminal
from jzero.config import AdapterConfig, Config, schedules
from jzero.errors import UserError
from jzero.hosts.interrupt import StopCheck
from jzero.model import qwen
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.tasks import find_task
from jzero.training.examples import encode_completion
from jzero.training.learner import Learner
from jzero.training.optimizer import learning_rate
from jzero.training.supervised import SupervisedTrainer


def warm_start(
    policy: Learner,
    config: Config,
    tok: PreTrainedTokenizerFast,
    params: qwen.Params,
    check_stop: StopCheck,
) -> qwen.Params:
    """Returns `params` after warm_start.steps supervised steps. `params` are donated.

    The steps train the full model, even if RL trains an adapter. Every step draws new examples.
    `check_stop` is called before each step.

    Raises UserError if the task has no warm-start examples, or if the loss is not finite.
    """
    warm = config.warm_start
    make_example = find_task(config.task.name).warm_start
    if make_example is None:
        raise UserError(
            f"task.name={config.task.name} has no warm-start examples; set warm_start.steps=0"
        )
    # The rate falls to the same share of its peak as the rate of RL.
    share = getattr(config.optimizer.schedule, "min_lr_ratio", 0.1)
    optimizer = replace(
        config.optimizer,
        lr=warm.lr,
        warmup_steps=warm.warmup_steps,
        schedule=schedules.Cosine(min_lr_ratio=share),
    )
    # Without an adapter and an int8 base the trainer trains the full model.
    model = replace(config.model, adapter=AdapterConfig(), base="native")
    trainer = SupervisedTrainer(
        policy.model,
        policy.mesh,
        model,
        config.optimizer,
        config.train,
        row_tokens=config.rollout.longest_episode,
        most_rows=config.sft.batch_size,
    )

    state = trainer.learner.start(params)
    with terminal.phase("warm start", total=warm.steps) as phase:
        for step in range(warm.steps):
            check_stop()
            examples = []
            for index in range(step * warm.batch_size, (step + 1) * warm.batch_size):
                prompt, completion = make_example(config.task, config.train.seed, index, warm.tries)
                examples.append(encode_completion(tok, prompt, completion))
            lr = learning_rate(optimizer, step, warm.steps)
            state, stats = trainer.step(state, trainer.pack(examples), lr)

            # Reading a number waits for the device, so only every 20th loss is read. This suffices
            # to find a loss that is not finite: it stays so, and the last step is always read.
            if step % 20 == 0 or step + 1 == warm.steps:
                sums = jax.device_get(stats)
                nll = float(sums["nll"]) / float(sums["tokens"])
                if not math.isfinite(nll):
                    raise UserError(
                        f"warm_start.lr={warm.lr}: the loss of warm-start step {step + 1} is not "
                        "finite; lower warm_start.lr or optimizer.weight_decay="
                        f"{config.optimizer.weight_decay}"
                    )
            phase.advance()
    return state.params
