"""The sequences of a request on a sampler, and the file in which it hands them to another sampler.

A sampler that is told to stop writes the sequences that have tokens to `partials/<request>`, with
the weights that sampled them. The sampler that takes the request next continues them, if they pass
validation. Only with rollout.placement.schedule=arrival: the second sampler computes keys and
values in one prefill, which rounds differently from decoding.

An episode whose last turn had no grade yet is graded again. If its environment has a state, the
environment is reset and steps through the earlier responses, as after a checkpoint.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from jzero.decoder.sequence import DecodeCounters, Groups, Sequence, make_groups
from jzero.decoder.serialization import restore_all
from jzero.errors import reason_of
from jzero.jobs.checks import (
    Limits,
    WeightsId,
    check_ended_turns,
    check_grade,
    check_one_version,
    check_tokens,
    check_weights,
    check_weights_types,
    weights_ids,
)
from jzero.jobs.requests import Request, Result
from jzero.jobs.sealed import BadResultError, seal, unseal
from jzero.jobs.snapshots import Reader, SnapshotError
from jzero.rollout.sampler import to_rollout
from jzero.tokens import Tokens

PARTIALS = "partials"  # folder of the store
# Of the tokens in a file: seconds to write, because a spot machine has 15 to 25.
MOST_BYTES = 32 << 20
# What is taken from the sequences in a file. The request decides everything else.
CARRIED_TYPES: dict[str, type] = {
    "tokens": Tokens,
    "turns": list,
    "turn_start": int,
    "turn_text": str,
    "finish_reason": str,
    "is_finished": bool,
    "length_limit": int,
}


@dataclass
class Progress:
    """The sequences of a request, from their first token to the result."""

    request: Request
    groups: Groups  # the sequences of every prompt, in order
    weights: list[WeightsId]  # that the sequences have had, the present ones last
    continued_tokens: int = 0  # that another sampler had sampled
    counters: DecodeCounters = field(default_factory=DecodeCounters)
    grading: dict[str, int] = field(default_factory=dict)  # of `Pool.counters`

    @classmethod
    def begin(cls, request: Request, max_new_tokens: int, weights: WeightsId) -> "Progress":
        """Returns sequences without tokens."""
        groups = make_groups(
            [np.array(prompt, np.int32) for prompt in request.prompts],
            request.group_size,
            max_new_tokens,
            first_prompt=request.first_prompt,
        )
        return cls(request, groups, [weights])

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, in order."""
        return [sequence for group in self.groups for sequence in group]

    @property
    def in_grading(self) -> list[Sequence]:
        """The sequences whose last turn has no grade."""
        return [s for s in self.sequences if s.turns and s.turns[-1].grade is None]

    @property
    def is_done(self) -> bool:
        """Whether all sequences are finished and graded."""
        return all(sequence.is_finished for sequence in self.sequences) and not self.in_grading

    @property
    def used_weights(self) -> tuple[WeightsId, ...]:
        """The weights that sampled at least one token, the oldest first."""
        return weights_of(self.sequences, self.weights)

    def restart(self, max_new_tokens: int) -> None:
        """Drops all tokens. The present weights sample the request from its beginning."""
        fresh = Progress.begin(self.request, max_new_tokens, self.weights[-1])
        self.groups, self.weights, self.continued_tokens = fresh.groups, fresh.weights, 0

    def result(self, sampler: str, seconds: float = 0.0) -> Result:
        """Returns the result of sequences that are done."""
        problems = self.request.problems
        first, *later = self.used_weights
        return Result(
            request=self.request.id,
            version=first[0],
            snapshot=first[1],
            sampler=sampler,
            rollouts=[to_rollout(problems[s.prompt_id], s) for s in self.sequences],
            counters=dict(vars(self.counters)),
            grading=self.grading,
            later_weights=tuple(later),
            continued_tokens=self.continued_tokens,
            seconds=seconds,
        )

    # -- handing over ------------------------------------------------------------------------------

    def to_bytes(self) -> bytes | None:
        """Returns the content of a file for the next sampler; None if there are no tokens."""
        kept: list[Sequence] = []
        num_bytes = 0
        # The longest first: they are the most work.
        for sequence in sorted(self.sequences, key=lambda s: -s.num_new):
            num_bytes += sum(values.nbytes for values in sequence.tokens.to_dict().values())
            if not sequence.num_new or num_bytes > MOST_BYTES:
                break
            kept.append(sequence)
        if not kept:
            return None
        weights = weights_of(kept, self.weights)
        return seal({"request": self.request.id, "weights": weights, "sequences": kept})

    def take_over(
        self, data: bytes, limits: Limits, reader: Reader, newest: int, max_staleness: int
    ) -> None:
        """Continues the sequences in a file, with the weights that they had last.

        Raises BadResultError for a file that is damaged or of other prompts, and for weights that
        are unknown to `reader` or too old if `newest` is the newest version.
        """
        values = unseal(data, self.request.file_limits(limits).most_items)
        if values.get("request") != self.request.id:
            raise BadResultError("they belong to another request")
        try:
            weights = weights_ids(values["weights"])
            stored = restore_all(Sequence, values["sequences"])
        except Exception as error:  # any bytes may have the right checksum
            raise BadResultError(f"the file cannot be read ({reason_of(error)})") from None
        check_weights_types(weights)
        check_weights(weights, limits)
        check_usable(weights, reader, newest, max_staleness)
        versions = [version for version, _ in weights]
        fresh = {(s.prompt_id, s.sample_index): s for s in self.sequences}
        continued: dict[tuple[int, int], Sequence] = {}
        for number, sequence in enumerate(stored):
            try:
                key = sequence.prompt_id, sequence.sample_index
                check_sequence(sequence, fresh[key], versions, limits)
                carried = {name: getattr(sequence, name) for name in CARRIED_TYPES}
                continued[key] = replace(fresh[key], **carried)
            except BadResultError as error:
                raise BadResultError(f"sequence {number}: {error}") from None
            except Exception as error:  # fields of any type
                raise BadResultError(f"sequence {number}: {reason_of(error)}") from None
        if not continued:
            raise BadResultError("there are no sequences")
        for group in self.groups:
            group[:] = [continued.get((s.prompt_id, s.sample_index), s) for s in group]
        self.weights = list(weights)
        self.continued_tokens = sum(int(s.tokens.sampled.sum()) for s in continued.values())


def check_usable(
    weights: tuple[WeightsId, ...], reader: Reader, newest: int, max_staleness: int
) -> None:
    """Raises BadResultError unless the trainer still accepts tokens of all weights.

    newest: the newest version that the trainer has published.
    """
    oldest = max(0, newest - max_staleness)
    for version, identity in weights:
        if not oldest <= version <= newest:
            raise BadResultError(f"version {version} is not one of {oldest} to {newest}")
        try:
            known = reader.manifest(version).identity
        except SnapshotError as error:
            raise BadResultError(str(error)) from None
        # A trainer that was killed may have made this version again, with other weights.
        if known != identity:
            raise BadResultError(f"version {version} has other weights")


def weights_of(sequences: list[Sequence], weights: list[WeightsId]) -> tuple[WeightsId, ...]:
    """Returns the weights that sampled at least one token of the sequences."""
    used = {int(v) for s in sequences for v in np.unique(s.tokens.versions[s.tokens.sampled])}
    return tuple(each for each in weights if each[0] in used)


def check_sequence(
    sequence: Sequence, fresh: Sequence, versions: list[int], limits: Limits
) -> None:
    """Raises BadResultError unless the scheduler can have left a sequence like this.

    fresh: the same sequence without tokens.
    """
    prompt_length = len(fresh.prompt_tokens)
    for name, kind in CARRIED_TYPES.items():
        if type(getattr(sequence, name)) is not kind:
            raise BadResultError(f"{name} has the wrong type")
    tokens, turns, start = sequence.tokens, sequence.turns, sequence.turn_start
    check_tokens(tokens, fresh.prompt_tokens.tolist(), versions, limits)
    check_ended_turns(turns, tokens, prompt_length, limits)
    for turn in turns:
        if turn is not turns[-1] or turn.grade is not None:
            check_grade(turn, limits)
    if turns and (sequence.is_finished or turns[-1].grade is None):
        last = turns[-1]
        ended = last.start, last.end, last.text, last.finish_reason
        if ended != (start, len(tokens), sequence.turn_text, sequence.finish_reason):
            raise BadResultError("its last turn is out of place")
        return
    # The current turn runs.
    if sequence.is_finished or sequence.finish_reason or len(turns) == limits.max_turns:
        raise BadResultError("its last turn is missing")
    earliest = turns[-1].end if turns else prompt_length
    latest = len(tokens) if turns else prompt_length
    if not earliest <= start <= latest or not tokens.sampled[start:].all():
        raise BadResultError("its current turn is out of place")
    if not len(tokens) < sequence.length_limit <= prompt_length + limits.longest_continuation:
        raise BadResultError("its current turn has no room")
    if sequence.turn_text != (turns[-1].text if turns else ""):
        raise BadResultError("its text is not that of its last turn")
    if limits.switch == "turns":
        # The last version will sample the rest of the turn.
        check_one_version(tokens.part(start, len(tokens)))
        if start < len(tokens) and tokens.versions[-1] != versions[-1]:
            raise BadResultError("its current turn has older weights")
