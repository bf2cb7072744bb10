"""AdamW as a chain of Optax transformations, and its learning rate schedules.

The learning rate is not part of the chain. The host computes the rate for every optimizer step and
passes it to `Learner.update`, so one compiled program serves the whole schedule.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jzero.config import OptimizerConfig, schedules
from jzero.model import adapters, mtp, qwen
from jzero.types import State


class DataOptimizer(NamedTuple):
    """An optimizer whose numbers are data, so that no value of them compiles anything."""

    init: Callable[[qwen.Params], optax.OptState]
    # (state, gradient, numbers, type of the computation) -> the next state, and scalars
    step: Callable[[State, qwen.Params, jax.Array, DTypeLike], tuple[State, dict[str, jax.Array]]]


class AdamW(NamedTuple):
    """The numbers of one step of `adamw_of_numbers` (arXiv:1711.05101). clip_norm=0: no clip."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_norm: float = 0.0


class Moments(NamedTuple):
    """The state of `adamw_of_numbers`: trees like the parameters."""

    mu: qwen.Params
    nu: qwen.Params


def adamw_of_numbers() -> DataOptimizer:
    """Returns AdamW whose numbers, an `AdamW` as f32[6], come with each step. Moments are fp32."""
    return DataOptimizer(init_moments, adamw_step)


def init_moments(params: qwen.Params) -> Moments:
    """Returns moments of 0."""

    def zeros() -> qwen.Params:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

    return Moments(zeros(), zeros())


def adamw_step(
    state: State,
    gradient: qwen.Params,
    numbers: Float[Array, "6"],
    dtype: DTypeLike,
) -> tuple[State, dict[str, jax.Array]]:
    """Makes one step of AdamW in fp32. All parameters decay.

    Decoupled decay: p - lr * (m_hat / (sqrt(v_hat) + eps) + decay * p).

    Returns the next state, `grad_norm` before clipping and `update_norm`, the norm of the change.
    If the parameters in `dtype`, a moment or a norm is not finite, the state stays as it is, and
    one of the norms is not finite.
    """
    lr, beta1, beta2, eps, decay, clip = numbers
    norm = optax.tree.norm(gradient)
    # `where` instead of a Python branch, because the numbers are data of the program.
    is_clipped = (clip > 0) & (norm > clip)
    factor = jnp.where(is_clipped, clip / norm, 1.0)
    gradient = jax.tree.map(lambda g: g * factor, gradient)

    # The bias corrections count from 1: at step 0 they would divide by 0.
    step = state.step + 1
    moments = cast(Moments, state.opt_state)
    mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments.mu, gradient)
    nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments.nu, gradient)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step

    def change(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        adam = m / correction1 / (jnp.sqrt(v / correction2) + eps)
        return -lr * (adam + decay * p)

    changes = jax.tree.map(change, state.params, mu, nu)
    params = jax.tree.map(jnp.add, state.params, changes)
    norms = {"grad_norm": norm, "update_norm": optax.tree.norm(changes)}

    in_dtype = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    is_finite = adapters.all_finite((in_dtype, mu, nu, norms))
    next_state = replace(state, params=params, opt_state=Moments(mu, nu), step=step)
    kept = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), next_state, state)
    return kept, norms | {"update_norm": jnp.where(is_finite, norms["update_norm"], jnp.nan)}


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
