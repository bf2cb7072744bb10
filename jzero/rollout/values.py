"""What the engine and its driver hand each other. C decode steps a call, n prompts and G samples a prefill."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax


class Prefix(NamedTuple):
    """Prefilled prompts: KV of every prompt token, and each sample's first token. Rows are split over slot shards.
    Holds arrays, or their shardings or specs."""

    k: Any  # [L, n, T, K, D]
    v: Any
    tokens: Any  # i32[n, G]
    logps: Any  # f32[n, G]


class ResultTokens(NamedTuple):
    """What one call sampled: slot s emitted tokens[s, :counts[s]]. On the device, then on the host."""

    tokens: Any  # i32[slots, C]
    logps: Any  # f32[slots, C] fp32, at the sampling temperature, over the full vocabulary
    counts: Any  # i32[slots]

    def copy_to_host_async(self) -> None:
        for x in self:
            x.copy_to_host_async()

    def convert_to_numpy(self) -> "ResultTokens":
        return jax.device_get(self)


@dataclass
class Placement:
    """One sample of a prefix, put into a slot, and how far it is there."""

    slot: int  # over all shards
    row: int  # of the prefix
    sample: int
    length: int  # tokens the prefix holds for it
    limit: int  # tokens at which it ends
    request: int  # names its noise
    group: Any  # samples of one group share the full pages of
    shared: int  # their first so many tokens
    reached: int = 0  # tokens whose KV dispatched calls may write
    paused: bool = False  # it keeps its pages and does not decode
    resumed: tuple[int, int, int] = (0, 0, 0)  # of the next call: the next input, its position, limit; 0: as it was
    given: list[int] = field(default_factory=list)  # tokens that its next steps take instead of sampling
