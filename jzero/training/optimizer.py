"""AdamW as a chain of Optax transformations, and the schedules of its learning rate.

The learning rate is not part of the chain. The host computes it for every optimizer step and passes
it to `Learner.update`, so one compiled program serves the whole schedule.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.config import OptimizerConfig
from jzero.model import qwen


def optimizer(settings: OptimizerConfig) -> optax.GradientTransformation:
    """Returns AdamW (arXiv:1711.05101) without its learning rate, after clipping by global norm."""
    clip = optax.identity()
    if settings.clip_norm:
        clip = optax.clip_by_global_norm(settings.clip_norm)
    adam = optax.scale_by_adam(
        settings.b1,
        settings.b2,
        settings.eps,
        mu_dtype=jnp.dtype(settings.mu_dtype),
    )
    decay = optax.identity()
    if settings.weight_decay:
        decay = optax.add_decayed_weights(settings.weight_decay, decayed_parameters)
    return optax.chain(clip, adam, decay)


def decayed_parameters(params: qwen.Params) -> qwen.Params:
    """Returns a tree of booleans: True for matrices, which decay, False for biases and norms.

    The name decides and not the number of axes: a bias of q is [H, D].
    """

    def decays(path: jax.tree_util.KeyPath, _leaf: jax.Array) -> bool:
        name = path[-1].key
        return not name.endswith(("bias", "norm"))

    return jax.tree.map_with_path(decays, params)


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step 0 <= step < total_steps.

    The rate rises linearly over the warm-up. Then it is constant, or falls so that it would reach
    min_lr_ratio * lr in the step after the last.
    """
    warmup = settings.warmup_steps or int(np.ceil(settings.warmup_ratio * total_steps))
    warmup_factor = 1.0
    if warmup:
        warmup_factor = min(1.0, (step + 1) / warmup)

    # The share of the steps after the warm-up that is done. A run may have no such steps.
    steps_after_warmup = max(1, total_steps - warmup)
    done = min(1.0, max(0, step - warmup) / steps_after_warmup)
    remaining = {
        "constant": 1.0,
        "linear": 1 - done,
        "polynomial": (1 - done) ** settings.power,
        "cosine": (1 + np.cos(np.pi * done)) / 2,
    }
    decay_factor = (
        settings.min_lr_ratio + (1 - settings.min_lr_ratio) * remaining[settings.schedule]
    )
    return float(settings.lr * warmup_factor * decay_factor)
