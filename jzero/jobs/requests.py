"""Requests for rollouts and their results, as files of a store.

A request is a bundle of prompts that one sampler decodes by itself. All that its rollouts depend
on is in its file: the prompts, the weights, and the key of the noise. The id of a request contains
a hash of the file, so a result names exactly one question.

The name of a result contains the digest of its rollouts. Two samplers that answer the same request
write the same file.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize

from jzero.config import Jobs
from jzero.decoder.engine import Engine
from jzero.decoder.serialization import restore_all, to_plain
from jzero.errors import reason_of
from jzero.files import JsonObject
from jzero.tokens import BASIC_TRACKS, TRACKS, Tokens, TrackShapes
from jzero.types import Grade, Problem, Rollout, Turn

REQUESTS = "requests"
RESULTS = "results"
DIGEST_DIGITS = 16  # in names
HEX_DIGITS = 64  # of a SHA-256
ANY_VERSION = -1  # the newest weights when the sampler takes the request
LARGEST_LOGP = 1e-3  # rounding may leave a log-prob above 0

WeightsId = tuple[int, str]  # a policy version and the identity of its snapshot


class BadResultError(Exception):
    """A result, or a part of one, that fails validation."""


def seal(values: JsonObject) -> bytes:
    """Returns the content of a file: the SHA-256 of the rest, then MessagePack."""
    body = msgpack_serialize(to_plain(values))
    return hashlib.sha256(body).hexdigest().encode() + body


def unseal(data: bytes) -> JsonObject:
    """Reads the content of a file. Raises BadResultError if it is damaged."""
    checksum, body = data[:HEX_DIGITS], data[HEX_DIGITS:]
    if checksum != hashlib.sha256(body).hexdigest().encode():
        raise BadResultError("the file is torn")
    try:
        values = msgpack_restore(body)
    except Exception as error:  # any bytes may have the right checksum
        raise BadResultError(f"the file cannot be read ({reason_of(error)})") from None
    if not isinstance(values, dict):
        raise BadResultError("the file cannot be read (no fields)")
    return values


def weights_ids(rows: Sequence[Sequence[object]]) -> tuple[WeightsId, ...]:
    """Returns pairs that MessagePack or JSON returned as lists."""
    return tuple(cast(WeightsId, (version, snapshot)) for version, snapshot in rows)


@dataclass(frozen=True)
class Request:
    """A bundle of prompts to sample."""

    run: str
    step: int  # of the problems; with `seed` the key of the noise
    number: int  # among the requests of the step
    seed: int
    first_prompt: int  # index of the first prompt among those of the step
    group_size: int
    temperature: float
    version: int  # of the weights, or ANY_VERSION
    snapshot: str  # the identity of the weights; "" with ANY_VERSION
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]  # the token ids of each problem's prompt

    @cached_property
    def id(self) -> str:
        """The name of the request, in the order in which requests are needed."""
        return f"{self.step:08d}-{self.number:04d}-{hashlib.sha256(self.to_json()).hexdigest()}"

    def to_json(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> "Request":
        """Reads the content of the file. Raises ValueError if it is damaged."""
        try:
            values = json.loads(data)
            problems = tuple(Problem(**row) for row in values["problems"])
            prompts = tuple(tuple(map(int, prompt)) for prompt in values["prompts"])
            return cls(**values | {"problems": problems, "prompts": prompts})
        except (KeyError, TypeError) as error:
            raise ValueError(f"the request is damaged ({reason_of(error)})") from None


@dataclass(frozen=True)
class Result:
    """The rollouts of a request, and where they come from."""

    request: str  # its id
    version: int  # of the weights that sampled the oldest token
    snapshot: str  # the identity of these weights
    sampler: str
    rollouts: list[Rollout]
    counters: dict[str, float] = field(default_factory=dict)  # of `DecodeCounters`
    grading: dict[str, int] = field(default_factory=dict)  # of `Pool.counters`
    # The weights that sampled other tokens, in the order of their versions.
    later_weights: tuple[WeightsId, ...] = ()
    continued_tokens: int = 0  # that another sampler had sampled, and handed back
    seconds: float = 0.0  # for which the sampler worked on the request

    @property
    def weights(self) -> tuple[WeightsId, ...]:
        """All weights that sampled tokens, the oldest first."""
        return ((self.version, self.snapshot), *self.later_weights)

    @property
    def is_repeatable(self) -> bool:
        """Whether another sampler with the same weights gives the same rollouts.

        When weights were switched depends on the clock, and a sampler that continues rollouts
        computes keys and values in one prefill, which rounds otherwise than decoding does.
        """
        return not self.later_weights and not self.continued_tokens

    @property
    def digest(self) -> str:
        """A hash of all that training reads of the rollouts. Seconds are left out."""
        parts = []
        for rollout in self.rollouts:
            for name, values in sorted(rollout.tokens.to_dict().items()):
                tensor_hash = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
                parts.append([name, list(values.shape), tensor_hash])
            for turn in rollout.turns:
                grade = None if turn.grade is None else asdict(timeless(turn.grade))
                parts.append([turn.start, turn.end, turn.text, turn.finish_reason, grade])
        values = [self.request, self.version, self.snapshot, parts]
        if self.later_weights:
            values.append([list(weights) for weights in self.later_weights])
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name of the file in the folder of results."""
        return f"{self.request}-{self.digest[:DIGEST_DIGITS]}"

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        # The trainer has the problems.
        rows = [replace(rollout, problem=NO_PROBLEM) for rollout in self.rollouts]
        return seal(vars(self) | {"rollouts": rows})

    @classmethod
    def parse(cls, data: bytes) -> "Result":
        """Reads the content of the file. Raises BadResultError if it is damaged."""
        values = unseal(data)
        try:
            rollouts = restore_all(Rollout, values["rollouts"])
            # MessagePack returns tuples as lists.
            rollouts = [replace(rollout, turns=tuple(rollout.turns)) for rollout in rollouts]
            return cls(
                request=values["request"],
                version=values["version"],
                snapshot=values["snapshot"],
                sampler=values["sampler"],
                rollouts=rollouts,
                counters=values["counters"],
                grading=values["grading"],
                # Files of earlier versions lack the following.
                later_weights=weights_ids(values.get("later_weights", ())),
                continued_tokens=values.get("continued_tokens", 0),
                seconds=values.get("seconds", 0.0),
            )
        except Exception as error:  # any bytes may have the right checksum
            raise BadResultError(f"the file cannot be read ({reason_of(error)})") from None


NO_PROBLEM = Problem("", "", "", None)


def timeless(grade: Grade) -> Grade:
    """Returns a grade without its seconds, which differ between equal answers."""
    return replace(grade, seconds=0.0, tool_seconds=0.0)


def request_of(result_name: str) -> str:
    """Returns the id of the request that the file of a result belongs to."""
    return result_name.rpartition("-")[0]


@dataclass(frozen=True)
class Limits:
    """What every rollout of a run keeps to."""

    vocab_size: int
    max_turns: int
    longest_continuation: int  # tokens after a prompt
    tracks: TrackShapes  # the optional tracks that are recorded
    switch: str = "requests"  # rollout.placement.switch

    @classmethod
    def of(cls, engine: Engine, placement: Jobs) -> "Limits":
        """Returns the limits of the rollouts of an engine."""
        return cls(
            vocab_size=engine.model.vocab_size,
            max_turns=engine.settings.max_turns,
            longest_continuation=engine.settings.longest_continuation,
            tracks=engine.program_settings.tracks,
            switch=placement.switch,
        )


def check_result(request: Request, result: Result, limits: Limits) -> list[Rollout]:
    """Returns the rollouts of a result, in order, with the problems of the request.

    Raises BadResultError unless every value is one that a sampler of this run can have sampled.
    Whether it did sample it, `python -m jzero.replay` finds out.
    """
    # Any process that can write to the store may have written the file.
    check_types(result)
    if result.request != request.id:
        raise BadResultError("it answers another request")
    if request.version not in (ANY_VERSION, result.version):
        raise BadResultError(f"it has weights of version {result.version}")
    if request.snapshot not in ("", result.snapshot):
        raise BadResultError("it has other weights")
    check_weights(result.weights, limits)
    # Rollouts of one version may differ in their last bits if another sampler continued them.
    if request.version != ANY_VERSION and not result.is_repeatable:
        raise BadResultError("it has rollouts that no other sampler can repeat")
    # Advantages are relative to the group, so a result has complete groups.
    expected = len(request.problems) * request.group_size
    if len(result.rollouts) != expected:
        raise BadResultError(f"it has {len(result.rollouts)} rollouts instead of {expected}")
    versions = [version for version, _ in result.weights]
    checked = []
    for number, rollout in enumerate(result.rollouts):
        index, sample_index = divmod(number, request.group_size)
        try:
            if rollout.sample_index != sample_index:
                raise BadResultError("the samples are in another order")
            check_tokens(rollout.tokens, request.prompts[index], versions, limits)
            check_turns(rollout, len(request.prompts[index]), limits)
        except BadResultError as error:
            raise BadResultError(f"rollout {number}: {error}") from None
        except Exception as error:  # fields of any type
            raise BadResultError(f"rollout {number}: {reason_of(error)}") from None
        checked.append(replace(rollout, problem=request.problems[index]))
    return checked


def check_types(result: Result) -> None:
    """Raises BadResultError unless the fields of a file have their types."""
    texts = (result.request, result.snapshot, result.sampler)
    if not all(isinstance(text, str) for text in texts) or type(result.version) is not int:
        raise BadResultError("a field has the wrong type")
    check_weights_types(result.later_weights)
    for counters in (result.counters, result.grading):
        if not isinstance(counters, dict) or not all(map(is_number, counters.values())):
            raise BadResultError("its counters are no numbers")
    if type(result.continued_tokens) is not int or not is_number(result.seconds):
        raise BadResultError("its counters are no numbers")


def check_weights_types(weights: tuple[WeightsId, ...]) -> None:
    """Raises BadResultError unless weights are named by a version and an identity."""
    for version, snapshot in weights:
        if type(version) is not int or not isinstance(snapshot, str):
            raise BadResultError("a field has the wrong type")


def check_weights(weights: tuple[WeightsId, ...], limits: Limits) -> None:
    """Raises BadResultError unless one sampler of the run can have used all of these weights."""
    versions = [version for version, _ in weights]
    if versions != sorted(set(versions)):
        raise BadResultError("its versions are not in order")
    if len(versions) > 1 and limits.switch == "requests":
        raise BadResultError("it has weights of several versions")


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def check_name(result: Result, name: str) -> None:
    """Raises BadResultError unless the file of a result is named after its rollouts."""
    try:
        actual = result.name
    except Exception as error:  # values of any type, which have no JSON
        raise BadResultError(reason_of(error)) from None
    if actual != name:
        raise BadResultError("its name is of other rollouts")


def check_tokens(
    tokens: Tokens, prompt: Sequence[int], versions: Sequence[int], limits: Limits
) -> None:
    """Raises BadResultError unless the tokens are a prompt and what these versions sampled."""
    tracks = tokens.to_dict()
    optional = {name: shape for name, shape in limits.tracks if name not in BASIC_TRACKS}
    if set(tracks) != {*BASIC_TRACKS, *optional}:
        raise BadResultError(f"it has the tracks {', '.join(sorted(tracks))}")
    for name, values in tracks.items():
        shape = (len(tokens), *optional.get(name, ()))
        if values.shape != shape or values.dtype != TRACKS[name].dtype:
            raise BadResultError(f"{name} has the shape {values.shape} and type {values.dtype}")
    start = len(prompt)
    # The trainer has the prompt itself, so any other one is a fault of the sampler.
    if tokens.ids[:start].tolist() != list(prompt):
        raise BadResultError("it has another prompt")
    if not start < len(tokens) <= start + limits.longest_continuation:
        raise BadResultError(f"it has {len(tokens)} tokens")
    if tokens.ids.min() < 0 or tokens.ids.max() >= limits.vocab_size:
        raise BadResultError("a token id is not in the vocabulary")
    sampled = tokens.sampled
    if sampled[:start].any() or not sampled[start]:
        raise BadResultError("its prompt is sampled, or its response is not")
    if not np.isfinite(tokens.logps).all() or (tokens.logps > LARGEST_LOGP).any():
        raise BadResultError("a log-prob is not finite, or above 0")
    # Every sampler of jzero writes 0 there, so another program made this file.
    if tokens.logps[~sampled].any():
        raise BadResultError("a token that was not sampled has a log-prob")
    sampled_by = tokens.versions[sampled]
    if not np.isin(sampled_by, versions).all() or (tokens.versions[~sampled] != -1).any():
        raise BadResultError("its tokens have other versions")
    if (np.diff(sampled_by) < 0).any():
        raise BadResultError("a token has older weights than the one before")


def check_turns(rollout: Rollout, prompt_length: int, limits: Limits) -> None:
    """Raises BadResultError unless the turns are graded responses within the tokens."""
    turns = rollout.turns
    if not turns:
        raise BadResultError("it has 0 turns")
    check_ended_turns(turns, rollout.tokens, prompt_length, limits)
    for turn in turns:
        check_grade(turn)


def check_ended_turns(
    turns: Sequence[Turn], tokens: Tokens, prompt_length: int, limits: Limits
) -> None:
    """Raises BadResultError unless the turns are responses within the tokens, in order."""
    if len(turns) > limits.max_turns or (turns and turns[0].start != prompt_length):
        raise BadResultError(f"it has {len(turns)} turns")
    end = prompt_length
    for turn in turns:
        if not end <= turn.start <= turn.end <= len(tokens):
            raise BadResultError("a turn is out of place")
        end = turn.end
        if turn.finish_reason not in ("stop", "length") or not isinstance(turn.text, str):
            raise BadResultError("a turn has no end")
        if limits.switch == "turns":
            check_one_version(tokens.part(turn.start, turn.end))


def check_one_version(turn: Tokens) -> None:
    """Raises BadResultError unless one version sampled a turn."""
    if len(np.unique(turn.versions[turn.sampled])) > 1:
        raise BadResultError("a turn has weights of several versions")


def check_grade(turn: Turn) -> None:
    """Raises BadResultError unless a turn has a grade with a finite score."""
    grade = cast(Grade | None, turn.grade)
    if grade is None:
        raise BadResultError("a turn is not graded")
    numbers = [grade.score, grade.seconds, grade.tool_seconds, *grade.parts.values()]
    numbers += [grade.tool_calls, grade.failed_tool_calls]
    if not all(map(is_number, numbers)):
        raise BadResultError("a grade is not finite")
    if not isinstance(grade.correct, bool) or not isinstance(grade.failed, bool):
        raise BadResultError("a grade has no verdict")
    names = [grade.reason, grade.failed_function, *grade.parts]
    if not all(isinstance(name, str) for name in names):
        raise BadResultError("a grade has no reason")
