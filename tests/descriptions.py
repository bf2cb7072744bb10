"""A flat description of an algorithm: one name or number for each of its choices.

tests/reference.py computes losses from a `Description`, and tests/config/loss_descriptions.json has
the descriptions of all presets and recipes, written down when an `Algorithm` was flat itself.
"""

import dataclasses
from dataclasses import dataclass

from jzero import config
from jzero.algorithms import Algorithm
from jzero.fields import class_of_part, part_name


@dataclass(frozen=True)
class Description:
    """The choices of an algorithm. A number that the chosen part does not have has its default."""

    name: str = "grpo"
    truncated: str = "grade"
    truncated_score: float = 0.0
    truncated_penalty: float = 0.0
    overlong_share: float = 0.0
    dynamic_sampling_rounds: int = 0
    kl_reward: float = 0.0
    advantage: str = "group_mean_std"
    std_eps: float = 1e-6
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = False
    weight: str = "sequence_mean"
    length_norm: int = 0
    old_policy: str = "trainer"
    ratio: str = "token"
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    vespo_k_positive: float = 2.0
    vespo_lambda_positive: float = 3.0
    vespo_k_negative: float = 3.0
    vespo_lambda_negative: float = 2.0
    off_policy_bound: float = 0.0
    top_entropy: float = 1.0
    correction: str = ""
    correction_low: float = 0.0
    correction_high: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_max: float = 0.0
    kl_weight: str = ""
    reference_every: int = 0
    entropy_coef: float = 0.0
    ratio_penalty: float = 0.0
    environment_coef: float = 0.0
    rl_coef: float = 1.0
    ce_coef: float = 0.0
    ce_weight: str = ""
    ce_tokens: str = "trained"
    teacher_coef: float = 0.0
    teacher_max: float = 0.0
    value_clip: float = 0.2
    value_coef: float = 1.0


# Where the numbers of a description are in an `Algorithm`.
PLACES = {
    "truncated_score": "truncated.score",
    "std_eps": "advantage.eps",
    "gamma": "advantage.gamma",
    "lam": "advantage.lam",
    "value_clip": "advantage.value_clip",
    "value_coef": "advantage.value_coef",
    "length_norm": "weight.length",
    "clip_low": "surrogate.low",
    "clip_high": "surrogate.high",
    "dual_clip": "surrogate.dual",
    "sapo_tau_positive": "surrogate.tau_positive",
    "sapo_tau_negative": "surrogate.tau_negative",
    "vespo_k_positive": "surrogate.k_positive",
    "vespo_lambda_positive": "surrogate.lambda_positive",
    "vespo_k_negative": "surrogate.k_negative",
    "vespo_lambda_negative": "surrogate.lambda_negative",
    "correction_low": "correction.low",
    "correction_high": "correction.high",
    "kl_coef": "kl.coef",
    "kl_estimator": "kl.estimator",
    "kl_max": "kl.bound",
    "kl_weight": "kl.weight",
    "ce_coef": "cross_entropy.coef",
    "ce_weight": "cross_entropy.weight",
    "ce_tokens": "cross_entropy.tokens",
    "teacher_coef": "distillation.coef",
    "teacher_max": "distillation.bound",
}
NAMES = ("truncated", "advantage", "weight", "surrogate", "correction", "kl_weight", "ce_weight")


def describe(algorithm: Algorithm | Description) -> Description:
    """Returns the description of an algorithm."""
    if isinstance(algorithm, Description):
        return algorithm
    values: dict[str, object] = {}
    for field in dataclasses.fields(Description):
        value: object = algorithm
        for attribute in PLACES.get(field.name, field.name).split("."):
            value = getattr(value, attribute, field.default)
        if field.name in NAMES and not isinstance(value, str):
            name = part_name(class_of_part(value))
            # An empty name stood for the default, and for "as the other weight".
            is_empty = name == "auto" or (name == "none" and field.name.endswith("_weight"))
            value = "" if is_empty else name
        values[field.name] = value
    return Description(**values)  # pyright: ignore[reportArgumentType]


def change(algorithm: Algorithm, **changes: object) -> Algorithm:
    """Returns an algorithm with some values of its description changed."""
    settings = config.Config(algorithm=dataclasses.replace(algorithm))
    for name in sorted(changes, key=lambda name: PLACES.get(name, "").count(".")):
        config.put_value(settings, f"algorithm.{PLACES.get(name, name)}", changes[name])
    return settings.algorithm


def change_advantage(algorithm: Algorithm, **numbers: float) -> Algorithm:
    """Returns an algorithm with those numbers changed that its advantage has, such as gamma."""
    fields = {name: value for name, value in numbers.items() if hasattr(algorithm.advantage, name)}
    return change(algorithm, **fields)


def algorithm_of(**changes: object) -> Algorithm:
    """Returns GRPO with some values of its description changed."""
    return change(Algorithm(), **changes)
