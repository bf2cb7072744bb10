"""Drafts for the decoder: the parts of the setting `rollout.draft`.

A draft is a guess of the next tokens of a sequence. One pass of the model computes all of them, and
keeps those that the noise of their positions picks anyway (`decoder.draft_program`).
"""

from jzero.fields import Field, part

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


@part
class Lookup:
    """The settings of every kind of draft."""

    tokens: int = Field(default=4, ge=1, le=MOST_TOKENS)
    """Most tokens of a draft (k). A pass computes 1 + k tokens of every sequence, or 1 + k/2 or 1 +
    k/4 where shorter drafts gain more."""
    match: int = Field(default=8, ge=1, le=MOST_MATCH)
    """Most tokens that are compared to find a draft: the draft follows the place where the most of
    the last tokens have occurred before."""
    cost: float = 0.0
    """Time of a pass with drafts of k tokens, in passes without; shorter drafts cost less in
    proportion. Drafts are tried where they are expected to gain more. 0: measured when decoding
    starts; another value makes runs independent of clocks."""


@part
class Ngram(Lookup):
    """Drafts from the prompt and the earlier tokens of the sequence itself."""


@part
class Group(Lookup):
    """Drafts from the sequence itself and the other responses to its prompt."""

    reach: int = Field(default=4096, ge=1)
    """Tokens of other responses that are searched besides the sequence itself."""


@part
class History(Lookup):
    """Drafts from the sequence itself and the latest finished responses to its problem."""

    reach: int = Field(default=4096, ge=1)
    """Tokens of other responses that are searched besides the sequence itself."""


@part
class Mtp:
    """Drafts from Qwen3.5's own head for multi-token prediction (MTP), which is trained along."""

    tokens: int = Field(default=4, ge=1, le=MOST_TOKENS)
    """Most tokens of a draft (k). A pass computes 1 + k tokens of every sequence, or 1 + k/2 or 1 +
    k/4 where shorter drafts gain more."""
    cost: float = 0.0
    """Time of a pass with drafts of k tokens, in passes without; shorter drafts cost less in
    proportion. Drafts are tried where they are expected to gain more. 0: measured when decoding
    starts; another value makes runs independent of clocks."""
    weight: float = 0.1
    """Weight of the head's cross-entropy on the sampled tokens. Its gradient reaches only the head.
    0: the head stays as it is."""


Draft = Ngram | Group | History | Mtp
