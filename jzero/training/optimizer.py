"""AdamW as a chain of Optax transformations, and its learning rate schedules.

The learning rate is not part of the chain. The host computes the rate for every optimizer step and
passes it to `Learner.update`, so one compiled program serves the whole schedule.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jzero.config import OptimizerConfig, schedules
from jzero.model import mtp, qwen


def optimizer(settings: OptimizerConfig) -> optax.GradientTransformation:
    """Returns clipping by global norm and AdamW (arXiv:1711.05101) without its learning rate."""
    clip = optax.identity()
    if settings.clip_norm:
        clip = clip_by_norms(settings.clip_norm)
    decay = optax.identity()
    if settings.weight_decay:
        decay = optax.add_decayed_weights(settings.weight_decay, decayed_parameters)
    # Clipping comes first: the moments see the clipped gradient. Decay comes last, so that it is
    # not divided by the second moment (AdamW).
    return optax.chain(clip, _adam(settings), decay)


def _adam(settings: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Adam, whose moments are kept in `mu_dtype` and `nu_dtype` and computed in fp32."""
    float32 = jnp.dtype(jnp.float32)
    mu_dtype, nu_dtype = jnp.dtype(settings.mu_dtype), jnp.dtype(settings.nu_dtype)
    adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps, mu_dtype=float32)
    if mu_dtype == nu_dtype == float32:
        return adam

    # optax would multiply a moment of 16 bits by its decay in 16 bits, which rounds both: a step
    # would be biased by several percent. Here a moment is rounded once, when it is stored.
    def cast(state: optax.OptState, mu: jnp.dtype, nu: jnp.dtype) -> optax.ScaleByAdamState:
        assert isinstance(state, optax.ScaleByAdamState)
        mu_tree, nu_tree = optax.tree.cast(state.mu, mu), optax.tree.cast(state.nu, nu)
        return state._replace(mu=mu_tree, nu=nu_tree)

    def init(params: optax.Params) -> optax.OptState:
        return cast(adam.init(params), mu_dtype, nu_dtype)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        step, state = adam.update(updates, cast(state, float32, float32), params)
        return step, cast(state, mu_dtype, nu_dtype)

    return optax.GradientTransformation(init, update)


def clip_by_norms(clip_norm: float) -> optax.GradientTransformation:
    """Returns clipping by global norm, separately for a head for drafts (`draft_head.py`).

    The gradient of the policy is the same whether the head is trained along or not.
    """
    clip = optax.clip_by_global_norm(clip_norm)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        gradient = cast(qwen.Params, updates)
        clipped, state = clip.update(without_draft_head(gradient), state)
        if mtp.NAME in gradient:
            head, _ = clip.update({mtp.NAME: gradient[mtp.NAME]}, state)
            clipped = cast(qwen.Params, clipped) | cast(qwen.Params, head)
        return clipped, state

    return optax.GradientTransformation(clip.init, update)


def without_draft_head(gradient: qwen.Params) -> qwen.Params:
    """Returns a gradient without that of the head for drafts."""
    return {name: leaves for name, leaves in gradient.items() if name != mtp.NAME}


def decayed_parameters(params: qwen.Params) -> qwen.Params:
    """Returns a tree of booleans: True for weight matrices, which decay, else False."""

    # The name decides instead of the number of axes, because the bias of q is [H, D].
    def decays(path: jax.tree_util.KeyPath, _leaf: jax.Array) -> bool:
        name = path[-1].key
        return not name.endswith(("bias", "norm", "decay"))

    return jax.tree.map_with_path(decays, params)


# Learning rate schedules.


class Decay(NamedTuple):
    """The parameters of a schedule, for the optimizer steps after the warm-up."""

    lr: float  # the peak, at the end of the warm-up
    last_lr: float  # in the step after the last step
    steps: int  # steps after the warm-up, at least 1
    total_steps: int  # optimizer steps of the run
    warmup: int  # steps of the warm-up


def _constant(decay: Decay, part: schedules.Constant) -> optax.Schedule:
    return optax.constant_schedule(decay.lr)


def _linear(decay: Decay, part: schedules.Linear) -> optax.Schedule:
    return _linear_fall(decay)


def _linear_fall(decay: Decay) -> optax.Schedule:
    return optax.linear_schedule(decay.lr, decay.last_lr, decay.steps)


def _polynomial(decay: Decay, part: schedules.Polynomial) -> optax.Schedule:
    return optax.polynomial_schedule(decay.lr, decay.last_lr, part.power, decay.steps)


def _cosine(decay: Decay, part: schedules.Cosine) -> optax.Schedule:
    return _cosine_fall(decay)


def _cosine_fall(decay: Decay) -> optax.Schedule:
    last_share = decay.last_lr / decay.lr if decay.lr else 0.0
    return optax.cosine_decay_schedule(decay.lr, decay.steps, alpha=last_share)


def _sqrt_fall(decay: Decay) -> optax.Schedule:
    """Decays as 1 - sqrt(done) (Hägele et al. 2024, arXiv:2405.18392)."""

    def schedule(step: ArrayLike) -> ArrayLike:
        done = jnp.minimum(jnp.asarray(step) / decay.steps, 1.0)
        return decay.last_lr + (decay.lr - decay.last_lr) * (1 - jnp.sqrt(done))

    return schedule


SHAPES: dict[str, Callable[[Decay], optax.Schedule]] = {
    "cosine": _cosine_fall,
    "linear": _linear_fall,
    "sqrt": _sqrt_fall,
}


def _wsd(decay: Decay, part: schedules.WSD) -> optax.Schedule:
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395): constant until the last steps."""
    last_steps = min(decay.steps, int(np.ceil(part.decay_ratio * decay.total_steps)))
    if not last_steps:
        return optax.constant_schedule(decay.lr)
    fall = SHAPES[part.shape](decay._replace(steps=last_steps))
    stable = optax.constant_schedule(decay.lr)
    return optax.join_schedules([stable, fall], [decay.steps - last_steps])


def _inverse_sqrt(decay: Decay, part: schedules.InverseSqrt) -> optax.Schedule:
    """Decays as 1 / sqrt(step) with the last rate as lower bound."""
    timescale = part.timescale or decay.warmup or 10_000

    def schedule(step: ArrayLike) -> ArrayLike:
        share = jnp.sqrt(timescale / (timescale + jnp.asarray(step)))
        return jnp.maximum(decay.lr * share, decay.last_lr)

    return schedule


def _cosine_restarts(decay: Decay, part: schedules.CosineRestarts) -> optax.Schedule:
    """Cosines of equal length, each from the peak to the last rate (arXiv:1608.03983)."""

    def schedule(step: ArrayLike) -> ArrayLike:
        done = jnp.asarray(step) / decay.steps
        done_of_cycle = jnp.where(done < 1, (part.cycles * done) % 1, 1.0)
        share = 0.5 * (1 + jnp.cos(jnp.pi * done_of_cycle))
        return decay.last_lr + (decay.lr - decay.last_lr) * share

    return schedule


# The arguments of a function are Decay and the part, with its numbers.
SCHEDULES: dict[type, Callable[..., optax.Schedule]] = {
    schedules.Constant: _constant,
    schedules.Linear: _linear,
    schedules.Polynomial: _polynomial,
    schedules.Cosine: _cosine,
    schedules.WSD: _wsd,
    schedules.InverseSqrt: _inverse_sqrt,
    schedules.CosineRestarts: _cosine_restarts,
}


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step 0 <= step < total_steps.

    The rate rises linearly during the warm-up. Then it is constant, or decays such that it would
    reach min_lr_ratio * lr in the step after the last step. inverse_sqrt does not depend on the
    last step.
    """
    warmup = warmup_steps(settings.warmup, total_steps)
    steps = max(1, total_steps - warmup)  # a run can end within the warm-up
    # A constant rate has no last rate.
    min_lr_ratio = getattr(settings.schedule, "min_lr_ratio", 1.0)
    # The last rate is reached in the step after the last, so the last step still has a higher rate.
    decay = Decay(
        lr=settings.lr,
        last_lr=min_lr_ratio * settings.lr,
        steps=steps,
        total_steps=total_steps,
        warmup=warmup,
    )
    # In fp64 the rounding errors of different formulas for a schedule vanish in the fp32 rate. TPUs
    # have no fp64 cosine.
    with jax.enable_x64(jax.default_backend() != "tpu"):
        first = 0 if settings.warmup is not None and settings.warmup.from_zero else 1
        schedule = _compiled_schedule(settings.schedule, decay, first)
        return float(jax.device_get(schedule(jax.device_put(np.asarray(step)))))


def warmup_steps(warmup: schedules.Warmup | None, total_steps: int) -> int:
    """Returns the optimizer steps of the warm-up of a run of `total_steps`."""
    match warmup:
        case schedules.Steps():
            return warmup.number
        case schedules.Share():
            return int(np.ceil(warmup.ratio * total_steps))
    return 0


@functools.cache
def _compiled_schedule(part: schedules.Schedule, decay: Decay, first: int) -> optax.Schedule:
    """Returns the warm-up followed by a schedule, as one program.

    The rate of the warm-up's first step is lr * first / warmup.
    """
    schedule = SCHEDULES[type(part)](decay, part)
    if decay.warmup:
        rise = _rise(decay.lr, decay.warmup, first)
        schedule = optax.join_schedules([rise, schedule], [decay.warmup])
    return jax.jit(schedule)


def _rise(lr: float, warmup: int, first: int) -> optax.Schedule:
    """Returns the warm-up: step i has the rate lr * (i + first) / warmup."""
    from_zero = optax.linear_schedule(0.0, lr, warmup)

    def schedule(step: ArrayLike) -> ArrayLike:
        return from_zero(jnp.asarray(step) + first)

    return schedule
