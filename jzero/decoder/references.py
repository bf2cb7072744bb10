"""The other responses in which rollout.draft=group and history look for drafts."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int32

from jzero.config import drafts
from jzero.decoder.drafter import joined
from jzero.decoder.sequence import Groups, Sequence

# The earlier responses to the problem of a sequence, the latest last.
PastResponses = Callable[[Sequence], Iterable[Int32[np.ndarray, " tokens"]]]

# Groups that are kept before finished ones are dropped: servers and asynchronous runs never end.
MOST_GROUPS = 1024


class References:
    """The responses of a run in which its sequences find drafts."""

    def __init__(self, draft: drafts.Draft | None, past_responses: PastResponses | None) -> None:
        self.draft = draft
        self.past_responses = past_responses
        self.groups: dict[int, list[Sequence]] = {}  # by prompt

    def add(self, groups: Groups) -> None:
        """Adds groups whose sequences will decode."""
        if not isinstance(self.draft, drafts.Group):
            return
        if len(self.groups) > MOST_GROUPS:
            self.groups = {
                prompt: group
                for prompt, group in self.groups.items()
                if not all(sequence.is_finished for sequence in group)
            }
        for group in groups:
            for sequence in group:
                self.groups.setdefault(sequence.prompt_id, []).append(sequence)

    def clear(self) -> None:
        """Drops all groups."""
        self.groups.clear()

    def of(self, sequence: Sequence) -> Int32[np.ndarray, " tokens"] | None:
        """Returns the references of a sequence for `Placement.references`; None: it has none."""
        match self.draft:
            case drafts.Group():
                group = self.groups.get(sequence.prompt_id, [])
                texts = [responses_of(other) for other in group if other is not sequence]
                return joined(texts, self.draft.reach)
            case drafts.History() if self.past_responses is not None:
                return joined(self.past_responses(sequence), self.draft.reach)
        return None


class History:
    """The latest responses to every problem, for rollout.draft=history."""

    def __init__(self, draft: drafts.Draft | None, most_responses: int) -> None:
        """most_responses: of each problem, every turn of an episode counted."""
        self.is_used = isinstance(draft, drafts.History)
        self.most_responses = most_responses
        self.responses: dict[tuple[str, str], deque[Int32[np.ndarray, " tokens"]]] = {}

    def of(self, problem: tuple[str, str]) -> Iterable[Int32[np.ndarray, " tokens"]]:
        """Returns the responses to a problem (task, id), the latest last."""
        return self.responses.get(problem, ())

    def add(self, problem: tuple[str, str], sequence: Sequence) -> None:
        """Adds the response of a turn that has ended."""
        if self.is_used:
            empty: deque[Int32[np.ndarray, " tokens"]] = deque(maxlen=self.most_responses)
            response = sequence.tokens.ids[sequence.turn_start :]
            self.responses.setdefault(problem, empty).append(response.copy())


def responses_of(sequence: Sequence) -> Int32[np.ndarray, " tokens"]:
    """Returns the tokens after the prompt."""
    return sequence.tokens.ids[len(sequence.prompt_tokens) :]
