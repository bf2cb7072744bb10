"""Moved from jzero.rollout.sample."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jzero.config import RolloutConfig as Settings
from jzero.types import Turn

Groups = list[list["Sequence"]]
More = Callable[[], Groups | None]  # see Driver.run, of both
Replies = Callable[[bool], list[tuple["Sequence", list[int] | None]]]
NO_REPLIES: Replies = lambda wait: []


@dataclass(eq=False)
class Sequence:
    """A sample on its way: what it has, and where it is."""

    prompt: int  # a number of the prompt, whose pages are shared
    sample: int
    request: int
    context: np.ndarray  # i32[...] the prompt
    limit: int  # tokens, with the prompt, at which the turn ends
    tokens: list[int] = field(default_factory=list)  # after the prompt, with the replies
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the policy, as in Rollout
    start: int = 0  # of tokens, where the turn's begin
    text: str = ""  # of the turn
    finish: str = ""  # "" while it runs, then "stop" or "length"
    turns: list[Turn] = field(default_factory=list)  # that ended
    over: bool = False  # no turn follows
    born: int = 0  # admission order; the youngest is preempted
    temperature: float | None = None  # of its own
    stop: list[str] = field(default_factory=list)  # strings that end it, besides the settings'

    def __len__(self) -> int:
        return len(self.context) + len(self.tokens)

    def full(self) -> np.ndarray:
        return np.concatenate([self.context, np.array(self.tokens, np.int32)])

    def room(self, settings: Settings) -> int:
        """Tokens that the episode may have: after a short prompt no more than after a long one, as in training."""
        return len(self.context) + settings.longest_continuation


def make_groups(prompts: list[np.ndarray], group: int, max_new: int, first: int = 0) -> Groups:
    """`group` samples of each prompt i32[...]; noise is keyed by their place, (first + prompt) * group + sample."""
    context = [np.asarray(prompt, np.int32) for prompt in prompts]
    make = lambda i, j: Sequence(
        i, j, (first + i) * group + j, context[i], len(context[i]) + max_new
    )
    return [[make(i, j) for j in range(group)] for i in range(len(prompts))]


@dataclass
class DecodeCounters:
    grading: float = 0.0  # seconds waited for grades, with nothing to decode
    prefill_tokens: int = 0  # real tokens prefilled
    tokens: int = 0  # decoded
    wasted: int = 0  # of those, after the end of their sequence
    slot_steps: int = 0  # slots x steps computed for them
    calls: int = 0
    preempted: int = 0

    def add(self, other: "DecodeCounters") -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
