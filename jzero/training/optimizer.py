"""AdamW as a chain of Optax transformations, and the schedules of its learning rate.

The learning rate is not part of the chain. The host computes it for every optimizer step and passes
it to `Learner.update`, so one compiled program serves the whole schedule.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

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
    """Returns a tree of booleans: True for matrices, which decay, and False for the rest.

    The name decides and not the number of axes: a bias of q is [H, D].
    """

    def decays(path: jax.tree_util.KeyPath, _leaf: jax.Array) -> bool:
        name = path[-1].key
        return not name.endswith(("bias", "norm", "decay"))

    return jax.tree.map_with_path(decays, params)


# Schedules of the learning rate.


class Decay(NamedTuple):
    """What a schedule needs to know of the optimizer steps after the warm-up."""

    lr: float  # before the first of them
    last_lr: float  # in the step after the last of them
    power: float  # of the polynomial
    steps: int  # at least 1


def _constant(decay: Decay) -> optax.Schedule:
    return optax.constant_schedule(decay.lr)


def _linear(decay: Decay) -> optax.Schedule:
    return optax.linear_schedule(decay.lr, decay.last_lr, decay.steps)


def _polynomial(decay: Decay) -> optax.Schedule:
    return optax.polynomial_schedule(decay.lr, decay.last_lr, decay.power, decay.steps)


def _cosine(decay: Decay) -> optax.Schedule:
    last_share = decay.last_lr / decay.lr if decay.lr else 0.0
    return optax.cosine_decay_schedule(decay.lr, decay.steps, alpha=last_share)


SCHEDULES: dict[str, Callable[[Decay], optax.Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
}


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step 0 <= step < total_steps.

    The rate rises linearly over the warm-up. Then it is constant, or falls so that it would reach
    min_lr_ratio * lr in the step after the last. The schedules are those of Optax.
    """
    warmup = settings.warmup_steps or int(np.ceil(settings.warmup_ratio * total_steps))
    decay = Decay(
        lr=settings.lr,
        last_lr=settings.min_lr_ratio * settings.lr,
        power=settings.power,
        steps=max(1, total_steps - warmup),  # a run may have no steps after the warm-up
    )
    # In 64 bits the form of a formula leaves no trace in a rate of 32 bits. TPUs have no cosine of
    # 64 bits.
    with jax.enable_x64(jax.default_backend() != "tpu"):
        schedule = _compiled_schedule(settings.schedule, decay, warmup)
        return float(jax.device_get(schedule(jax.device_put(np.asarray(step)))))


@functools.cache
def _compiled_schedule(name: str, decay: Decay, warmup: int) -> optax.Schedule:
    """Returns the warm-up and the schedule of that name after it, as one program."""
    schedule = SCHEDULES[name](decay)
    if warmup:
        schedule = optax.join_schedules([_rise(decay.lr, warmup), schedule], [warmup])
    return jax.jit(schedule)


def _rise(lr: float, warmup: int) -> optax.Schedule:
    """Returns the warm-up. Its first step has the rate lr / warmup: a rate of 0 would waste it."""
    from_zero = optax.linear_schedule(0.0, lr, warmup)

    def schedule(step: ArrayLike) -> ArrayLike:
        return from_zero(jnp.asarray(step) + 1)

    return schedule
