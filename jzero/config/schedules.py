"""Learning rate schedules: the parts of the settings `optimizer.warmup` and `optimizer.schedule`.

`training.optimizer` computes the learning rate of a step from them.
"""

from typing import Literal

from jzero.fields import Field, part

# -- the warm-up -----------------------------------------------------------------------------------


@part
class Steps:
    """The learning rate rises linearly over a number of optimizer steps."""

    number: int = Field(default=10, ge=1)
    """Optimizer steps."""
    from_zero: bool = False
    """The first step of the warm-up has the learning rate 0, as in transformers. False: it has lr /
    steps of the warm-up, because a rate of 0 would waste the step."""


@part
class Share:
    """The learning rate rises linearly over a share of the run's optimizer steps, rounded up."""

    ratio: float = Field(default=0.03, gt=0, le=1)
    """Share of the optimizer steps."""
    from_zero: bool = False
    """The first step of the warm-up has the learning rate 0, as in transformers. False: it has lr /
    steps of the warm-up, because a rate of 0 would waste the step."""


Warmup = Steps | Share

# -- after the warm-up -----------------------------------------------------------------------------


@part
class Constant:
    """The learning rate stays at lr."""


@part
class Linear:
    """The learning rate falls linearly."""

    min_lr_ratio: float = Field(default=0.1, le=1)
    """Final learning rate as a share of lr."""


@part
class Polynomial:
    """The learning rate falls as a power of the remaining share of the run."""

    power: float = 2.0
    """Exponent."""
    min_lr_ratio: float = Field(default=0.1, le=1)
    """Final learning rate as a share of lr."""


@part
class Cosine:
    """The learning rate falls along half a period of a cosine."""

    min_lr_ratio: float = Field(default=0.1, le=1)
    """Final learning rate as a share of lr."""


@part
class WSD:
    """The learning rate is constant and decays only at the end (warm-up, stable, decay)."""

    decay_ratio: float = Field(default=0.1, le=1)
    """Share of the run's optimizer steps, at its end, in which the learning rate decays."""
    # The shapes of transformers' get_wsd_schedule, whose default is also the cosine.
    shape: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay: linear, cosine, or sqrt (1 - sqrt of the finished share)."""
    min_lr_ratio: float = Field(default=0.1, le=1)
    """Final learning rate as a share of lr."""


@part
class InverseSqrt:
    """The learning rate falls as 1 / sqrt(step), whatever the length of the run."""

    # The formula and the defaults of transformers' get_inverse_sqrt_schedule.
    timescale: int = 0
    """The steps t in lr sqrt(t / (t + steps after the warm-up)). 0: the steps of the warm-up, or
    10,000 without a warm-up."""
    min_lr_ratio: float = Field(default=0.1, le=1)
    """Lower bound of the learning rate as a share of lr."""


@part
class CosineRestarts:
    """A cosine schedule that starts again at lr in every cycle."""

    cycles: int = Field(default=1, ge=1)
    """Number of cycles."""
    min_lr_ratio: float = Field(default=0.1, le=1)
    """Final learning rate as a share of lr."""


Schedule = Constant | Linear | Polynomial | Cosine | WSD | InverseSqrt | CosineRestarts
