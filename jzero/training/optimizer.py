"""Moved from jzero.update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero import config


def optimizer(settings: config.OptimizerConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is an argument of `update`. Only matrices decay: a bias is [H, D], too."""
    decayed = lambda params: jax.tree.map_with_path(
        lambda path, _: not path[-1].key.endswith(("bias", "norm")), params
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity(),
        optax.scale_by_adam(
            settings.b1, settings.b2, settings.eps, mu_dtype=jnp.dtype(settings.mu_dtype)
        ),
        optax.add_decayed_weights(settings.weight_decay, decayed)
        if settings.weight_decay
        else optax.identity(),
    )


def learning_rate(settings: config.OptimizerConfig, step: int, steps: int) -> float:
    """Of optimizer step 0 <= step < steps: linear warm-up, then constant or a decay to min_lr_ratio after the last."""
    warmup = settings.warmup_steps or int(np.ceil(settings.warmup_ratio * steps))
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "polynomial": (1 - done) ** settings.power,
        "cosine": (1 + np.cos(np.pi * done)) / 2,
    }[settings.schedule]
    return float(settings.lr * warm * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left))
