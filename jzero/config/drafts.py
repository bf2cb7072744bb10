"""Drafts for the decoder: the parts of the setting `rollout.draft`.

A draft is a guess of the next tokens of a sequence. One pass of the model computes all of them, and
keeps those that the noise of their positions picks anyway (`decoder.draft_program`).
"""

from dataclasses import dataclass

from jzero.setting import setting

MOST_TOKENS = 16
MOST_MATCH = 8
TOKENS = (
    "Most tokens of a draft (k). A pass computes 1 + k tokens of every sequence, or 1 + k/2 or "
    "1 + k/4 where shorter drafts gain more."
)
MATCH = (
    "Most tokens that are compared to find a draft: the draft follows the place where the most of "
    "the last tokens have occurred before."
)
COST = (
    "Time of a pass with drafts of k tokens, in passes without; shorter drafts cost less in "
    "proportion. Drafts are tried where they are expected to gain more. 0: measured when decoding "
    "starts; another value makes runs independent of clocks."
)
WEIGHT = (
    "Weight of the head's cross-entropy on the sampled tokens. Its gradient reaches only the head. "
    "0: the head stays as it is."
)
REACH = "Tokens of other responses that are searched besides the sequence itself."


@dataclass(frozen=True)
class Lookup:
    """The settings of every kind of draft."""

    tokens: int = setting(4, TOKENS, at_least=1, at_most=MOST_TOKENS)
    match: int = setting(8, MATCH, at_least=1, at_most=MOST_MATCH)
    cost: float = setting(0.0, COST)


@dataclass(frozen=True)
class Ngram(Lookup):
    """Drafts from the prompt and the earlier tokens of the sequence itself."""


@dataclass(frozen=True)
class Group(Lookup):
    """Drafts from the sequence itself and the other responses to its prompt."""

    reach: int = setting(4096, REACH, at_least=1)


@dataclass(frozen=True)
class History(Lookup):
    """Drafts from the sequence itself and the latest finished responses to its problem."""

    reach: int = setting(4096, REACH, at_least=1)


@dataclass(frozen=True)
class Mtp:
    """Drafts from Qwen3.5's own head for multi-token prediction (MTP), which is trained along."""

    tokens: int = setting(4, TOKENS, at_least=1, at_most=MOST_TOKENS)
    cost: float = setting(0.0, COST)
    weight: float = setting(0.1, WEIGHT, at_least=0)


Draft = Ngram | Group | History | Mtp
