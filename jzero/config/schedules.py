"""Learning rate schedules: the parts of the settings `optimizer.warmup` and `optimizer.schedule`.

`training.optimizer` computes the learning rate of a step from them.
"""

from dataclasses import dataclass

from jzero.setting import setting

MIN_LR_RATIO = "Final learning rate as a share of lr."


FROM_ZERO = (
    "The first step of the warm-up has the learning rate 0, as in transformers. False: it has lr / "
    "steps of the warm-up, because a rate of 0 would waste the step."
)


# -- the warm-up -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """The learning rate rises linearly over a number of optimizer steps."""

    number: int = setting(10, "Optimizer steps.", at_least=1)
    from_zero: bool = setting(False, FROM_ZERO)


@dataclass(frozen=True)
class Share:
    """The learning rate rises linearly over a share of the run's optimizer steps, rounded up."""

    ratio: float = setting(0.03, "Share of the optimizer steps.", above=0, at_most=1)
    from_zero: bool = setting(False, FROM_ZERO)


Warmup = Steps | Share

# -- after the warm-up -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """The learning rate stays at lr."""


@dataclass(frozen=True)
class Linear:
    """The learning rate falls linearly."""

    min_lr_ratio: float = setting(0.1, MIN_LR_RATIO, at_most=1)


@dataclass(frozen=True)
class Polynomial:
    """The learning rate falls as a power of the remaining share of the run."""

    power: float = setting(2.0, "Exponent.")
    min_lr_ratio: float = setting(0.1, MIN_LR_RATIO, at_most=1)


@dataclass(frozen=True)
class Cosine:
    """The learning rate falls along half a period of a cosine."""

    min_lr_ratio: float = setting(0.1, MIN_LR_RATIO, at_most=1)


@dataclass(frozen=True)
class WSD:
    """The learning rate is constant and decays only at the end (warm-up, stable, decay)."""

    decay_ratio: float = setting(
        0.1,
        "Share of the run's optimizer steps, at its end, in which the learning rate decays.",
        at_most=1,
    )
    # The shapes of transformers' get_wsd_schedule, whose default is also the cosine.
    shape: str = setting(
        "cosine",
        "Shape of the decay: linear, cosine, or sqrt (1 - sqrt of the finished share).",
        choices=("cosine", "linear", "sqrt"),
    )
    min_lr_ratio: float = setting(0.1, MIN_LR_RATIO, at_most=1)


@dataclass(frozen=True)
class InverseSqrt:
    """The learning rate falls as 1 / sqrt(step), whatever the length of the run."""

    # The formula and the defaults of transformers' get_inverse_sqrt_schedule.
    timescale: int = setting(
        0,
        "The steps t in lr sqrt(t / (t + steps after the warm-up)). 0: the steps of the warm-up, "
        "or 10,000 without a warm-up.",
    )
    min_lr_ratio: float = setting(
        0.1, "Lower bound of the learning rate as a share of lr.", at_most=1
    )


@dataclass(frozen=True)
class CosineRestarts:
    """A cosine schedule that starts again at lr in every cycle."""

    cycles: int = setting(1, "Number of cycles.", at_least=1)
    min_lr_ratio: float = setting(0.1, MIN_LR_RATIO, at_most=1)


Schedule = Constant | Linear | Polynomial | Cosine | WSD | InverseSqrt | CosineRestarts
