"""Where the rollouts of a run are sampled: the parts of the setting `rollout.placement`."""

from dataclasses import dataclass

from jzero.setting import setting

MAX_STALENESS = (
    "Maximum number of policy versions between sampling a rollout and training on it (AReaL's eta)."
)


@dataclass(frozen=True)
class Placement:
    """The settings of every placement."""

    max_staleness: int = setting(
        0, f"{MAX_STALENESS} 0: every step trains on rollouts of the current policy."
    )
    max_running_groups: int = setting(
        0,
        "Maximum groups sampled at the same time if max_staleness is above 0. 0: (max_staleness "
        "+ 1) * num_prompts.",
    )


@dataclass(frozen=True)
class Together(Placement):
    """All devices alternate between sampling and training."""


@dataclass(frozen=True)
class Apart(Placement):
    """Some devices of each host sample while the others train."""

    # Without staleness the two groups of devices would take turns, each idle while the other works.
    max_staleness: int = setting(1, MAX_STALENESS, at_least=1)
    devices: int = setting(1, "Devices of each host that sample, the last ones.", at_least=1)
