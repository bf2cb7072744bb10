"""Where the rollouts of a run are sampled: the parts of the setting `rollout.placement`."""

from typing import Literal

from jzero.fields import Field, part

MAX_STALENESS = (
    "Maximum number of policy versions between sampling a rollout and training on it (AReaL's eta)."
)

# A day: a lease outlives its sampler, and a longer one would hold up the run for longer.
LONGEST_LEASE = 86_400.0  # seconds


@part
class Placement:
    """The settings of every placement."""

    max_staleness: int = 0
    """Maximum number of policy versions between sampling a rollout and training on it (AReaL's
    eta). 0: every step trains on rollouts of the current policy."""
    max_running_groups: int = 0
    """Maximum groups sampled at the same time if max_staleness is above 0. 0: (max_staleness + 1) *
    num_prompts."""


@part
class Together(Placement):
    """All devices alternate between sampling and training."""


@part
class Apart(Placement):
    """Some devices of each host sample while the others train."""

    # Without staleness the two groups of devices would take turns, each idle while the other works.
    max_staleness: int = Field(default=1, ge=1)
    """Maximum number of policy versions between sampling a rollout and training on it (AReaL's
    eta)."""
    devices: int = Field(default=1, ge=1)
    """Devices of each host that sample, the last ones."""


@part
class Jobs:
    """Sampler processes that run `python -m jzero.sample --join STORE` on any machines."""

    max_staleness: int = 1
    """Maximum number of policy versions between sampling a rollout and training on it (AReaL's
    eta). 0: samplers wait for every update."""
    store: str = ""
    """Directory on a file system that the trainer and all samplers share, or the URL of a bucket,
    such as gs://bucket/run. Only this run may use it."""
    serve: str = ""
    """Address HOST:PORT at which the trainer serves a store that is a directory over HTTP, to
    samplers that cannot see it: --join http://HOST:PORT. Empty: samplers see the store."""
    allowed_hosts: str = ""
    """Further host names, separated by commas, by which samplers may address the trainer with
    `serve`. HOST, the machine's hostname and IP addresses are always allowed."""
    schedule: Literal["fixed", "arrival"] = "fixed"
    """Which rollouts a step trains on. fixed: a function of the seed, the step and max_staleness;
    the run ends with the same numbers whichever samplers come and go. arrival: the first ones that
    are ready and not too old."""
    switch: Literal["requests", "turns", "tokens"] = "requests"
    """When a sampler takes newer weights. requests: with its next request. turns: with
    schedule=arrival also within a request, once all turns that have begun are over. tokens: with
    schedule=arrival between two decode calls, with a prefill of all tokens so far."""
    lease_seconds: float = Field(default=60.0, gt=0, le=LONGEST_LEASE)
    """Seconds without a sign of life after which a request is given to another sampler."""
    groups_per_request: int = 0
    """Number of prompts in a request, which one sampler decodes by itself. 0: as many as fill
    rollout.num_slots."""
    snapshot_every: int = Field(default=10, ge=1)
    """Policy versions between two full snapshots of the weights. The versions in between are stored
    as compressed differences. 1: every snapshot is full."""
    regrade_share: float = Field(default=1 / 16, le=1)
    """Share of the rollouts that the trainer regrades, chosen at random with a key that samplers do
    not have. A result whose grades differ is rejected. Grades of a model or an environment are not
    recomputed. 0: samplers' grades are trusted."""
    keep_snapshots: int = 2
    """Number of full snapshots that are kept, with the differences and the rollouts after them, for
    `python -m jzero.replay`. 0: all."""
