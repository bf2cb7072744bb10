"""A sequence: one sample of one prompt on its way from the queue to a finished rollout.

The scheduler appends to sequences in place. This module also has the types of the scheduler's two
callbacks, and its counters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from jzero.config import RolloutConfig
from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter
from jzero.decoder.sampling import Filters
from jzero.tokens import Tokens
from jzero.types import Turn

Groups = list[list["Sequence"]]  # the sequences of one inner list have the same tokens so far
AdmitMore = Callable[[], Groups | None]  # see Scheduler.run
Reply = tuple[
    "Sequence", list[int] | None
]  # the tokens before the next turn; None: no turn follows
PollReplies = Callable[[bool], list[Reply]]  # see Scheduler.run


# By identity: two samples of a prompt may be equal, and arrays have no single truth value.
@dataclass(eq=False)
class Sequence:
    """One sample: its tokens so far, and the state that the scheduler needs to continue it."""

    prompt_id: int  # sequences with the same prompt_id and weights share the prompt's KV pages
    sample_index: int  # index in the group of its prompt
    request_id: int  # keys the noise, a function of (seed, request_id, position)
    prompt_tokens: Int32[np.ndarray, " tokens"]
    length_limit: int  # tokens, prompt included, at which the current turn ends
    # The prompt, then all responses and replies.
    tokens: Tokens = field(default_factory=Tokens)
    turn_start: int = 0  # index in `tokens` of the current turn's first token
    turn_text: str = ""  # the text of the turn that ended last
    finish_reason: str = ""  # of the current turn: "" while it runs, then "stop" or "length"
    turns: list[Turn] = field(default_factory=list)  # the turns that ended
    is_finished: bool = False  # no further turn
    admission_number: int = 0  # counts placements into slots; the largest number is preempted first
    temperature: float | None = None  # None: the temperature of the run
    turn_tokens: int | None = None  # the longest next turn; None: rollout.max_new_tokens
    stop_strings: list[str] = field(default_factory=list)  # end a turn, besides rollout.stop
    filters: Filters | None = None  # of a request to a server; None: those of the settings
    stop_ids: tuple[int, ...] = ()  # end a turn, besides those of the engine
    adapter: HeldAdapter = BASE_MODEL  # its weights, if the engine's have an adapter bank
    owner: str = ""  # keys and values are shared among sequences of one owner only
    cached_tokens: int = 0  # of the prompt, whose KV was in the prefix cache

    def __post_init__(self) -> None:
        if not len(self.tokens):
            self.tokens.append(self.prompt_tokens)
            self.turn_start = len(self.prompt_tokens)

    def __len__(self) -> int:
        """Returns the number of tokens, prompt included."""
        return len(self.tokens)

    @property
    def num_new(self) -> int:
        """Returns the number of tokens after the prompt."""
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def new_tokens(self) -> list[int]:
        """Returns the ids of all tokens after the prompt, including replies."""
        return self.tokens.ids[len(self.prompt_tokens) :].tolist()

    @property
    def new_logps(self) -> list[float]:
        """Returns the log-probabilities of `new_tokens`; 0 in replies."""
        return self.tokens.logps[len(self.prompt_tokens) :].tolist()

    @property
    def is_in_turn(self) -> bool:
        """Whether the current turn has tokens and has not ended."""
        return len(self) > self.turn_start and not self.finish_reason

    def temperature_or(self, default: float) -> float:
        """Returns the sampling temperature of this sequence, or `default` if it has none."""
        return default if self.temperature is None else self.temperature

    def longest_length(self, settings: RolloutConfig) -> int:
        """Returns the maximum number of tokens of the episode."""
        # An episode with a short prompt may not continue for longer than one with the longest
        # prompt, because a row in training has room for `longest_continuation` tokens after the
        # prompt.
        return len(self.prompt_tokens) + settings.longest_continuation


@dataclass(eq=False)
class EpisodeGroup:
    """The episodes of one problem in an asynchronous run, from admission to training."""

    problem_number: int  # index among the problems of all steps and hosts
    version: int  # policy version when the group was admitted
    sequences: list[Sequence]

    @property
    def is_finished(self) -> bool:
        """Whether every episode had its last turn. Grades of last turns may be missing."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_graded(self) -> bool:
        """Whether every episode is finished and its last turn is graded."""
        return self.is_finished and all(sequence.turns[-1].grade for sequence in self.sequences)


def make_groups(
    prompts: list[Int32[np.ndarray, " tokens"]],
    group_size: int,
    max_new_tokens: int,
    first_prompt: int = 0,
) -> Groups:
    """Returns `group_size` sequences without tokens for each prompt.

    Their noise is keyed by their index: (first_prompt + index of the prompt) * group_size + index
    of the sample. A host that decodes prompts from `first_prompt` on therefore draws the same noise
    for them as a single host would.
    """
    groups: Groups = []
    for prompt_id, prompt in enumerate(prompts):
        prompt_tokens = np.asarray(prompt, np.int32)
        first_request = (first_prompt + prompt_id) * group_size
        groups.append(
            [
                Sequence(
                    prompt_id=prompt_id,
                    sample_index=sample_index,
                    request_id=first_request + sample_index,
                    prompt_tokens=prompt_tokens,
                    length_limit=len(prompt_tokens) + max_new_tokens,
                )
                for sample_index in range(group_size)
            ]
        )
    return groups


def groups_to_decode(groups: Groups) -> Groups:
    """Returns the unfinished sequences of groups: first the started ones, each a group of one."""
    # One prefill of the prompt serves all sequences without tokens, so they stay in their group. A
    # sequence with tokens needs its own prefill.
    started: Groups = []
    not_started: Groups = []
    for group in groups:
        unfinished = [sequence for sequence in group if not sequence.is_finished]
        started += [[sequence] for sequence in unfinished if sequence.num_new]
        without_tokens = [sequence for sequence in unfinished if not sequence.num_new]
        if without_tokens:
            not_started.append(without_tokens)
    return started + not_started


def admit_none() -> Groups:
    """The `AdmitMore` of a run that starts with all of its sequences."""
    return []


def never_drain() -> bool:
    """The `drain` of a run that ends with all of its sequences."""
    return False


@dataclass
class DecodeCounters:
    """Counts the work of a scheduler run. Every field may be summed over runs and hosts."""

    grading_seconds: float = 0.0  # spent waiting for grades with nothing to decode
    prefills: int = 0  # prefilled prompts, one for all samples of a group
    prefill_tokens: int = 0  # prefilled tokens without padding
    cached_tokens: int = 0  # tokens not prefilled, because the prefix cache had their KV
    decoded_tokens: int = 0  # tokens that decode calls emitted
    wasted_tokens: int = 0  # tokens decoded after the end of their sequence
    slot_steps: int = 0  # computed slots times steps, including idle slots
    decode_calls: int = 0
    draft_passes: int = 0  # with rollout.draft: passes of the model, counted for every active slot
    drafted_tokens: int = 0  # tokens of drafts that passes have checked
    accepted_tokens: int = 0  # of these, the ones that were sampled
    preempted: int = 0  # sequences that lost their slot because their shard ran out of pages
    score_calls: int = 0
    scored_tokens: int = 0  # tokens of given sequences that were computed to score them
    shared_tokens: int = 0  # tokens not computed, because shared pages already held them
    # Of agents (`rollout.agents`).
    agent_responses: int = 0  # responses that agents have received
    agent_branches: int = 0  # sequences of their trees
    agent_refused: int = 0  # requests that were answered with an error
    agent_unread_tokens: int = 0  # sampled, and not trained: no agent has received them
    agent_repeated_tokens: int = 0  # sampled tokens that several sequences train

    def add(self, other: "DecodeCounters") -> None:
        """Adds the counts of `other` to these."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
