"""The bounds of a sampler's rollouts: their size before they are parsed, and then every value.

A sampler is any process that can write to the store, so nothing in its files is taken on trust.
`jzero.jobs.requests.check_result` checks a result with these functions,
`jzero.jobs.progress.Progress.take_over` what a sampler hands over. `jzero.jobs.regrading` checks
whether grades are right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from jzero import json_values
from jzero.config import Jobs
from jzero.decoder.sequence import DecodeCounters
from jzero.decoder.stop_strings import graded_text
from jzero.environments import environment
from jzero.jobs.sealed import BadResultError
from jzero.problems import bounds
from jzero.rollout.sampler import Sampler
from jzero.rollout.turns import longest_token
from jzero.tasks import mixed
from jzero.tokens import BASIC_TRACKS, TRACKS, Tokens, TrackShapes
from jzero.types import Grade, Turn
from jzero.workers.pool import COUNTERS

WeightsId = tuple[int, str]  # a policy version and the identity of its snapshot

MAX_NUMBER = 2**31 - 1  # of versions, steps, prompts and tokens
MAX_IDENTITY = 64  # digits of a snapshot's SHA-256
LARGEST_LOGP = 1e-3  # rounding may leave a log-prob above 0
SMALLEST_LOGP = -1e4
MAX_FUNCTION_NAME = 1000  # characters of the reward function that failed
MAX_SECONDS = 1e9
# A counter counts tokens or gradings of one request. Preemption, new weights and handing over make
# a sampler do its work again, but never this often.
MAX_REPETITIONS = 1000
# Bytes and items of a file besides tokens, texts, replies and named rewards.
FILE_BYTES, FILE_ITEMS = 4096, 256
ROLLOUT_BYTES, ROLLOUT_ITEMS = 2048, 96
TURN_BYTES, TURN_ITEMS = 8192, 64
ITEMS_PER_MESSAGE = 8  # of an environment's reply

TEXT_BYTES_PER_CHARACTER = 4  # of UTF-8, at most


@dataclass(frozen=True)
class TurnEnds:
    """How the turns of a run end, and which text of them is graded."""

    decode: Callable[[list[int]], str]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    keep_stop: bool  # whether the graded text contains the stop string
    max_new_tokens: int


@dataclass(frozen=True)
class Limits:
    """What every rollout of a run keeps to."""

    vocab_size: int
    max_turns: int
    longest_continuation: int  # tokens after a prompt
    tracks: TrackShapes  # the optional tracks that are recorded
    switch: str = "requests"  # rollout.placement.switch
    num_experts: int = 0
    num_slots: int = 1024  # of the decoder
    bytes_per_token: int = 1024  # of text, at most
    reply_bytes: int = bounds.MAX_REPLY_BYTES  # task.max_reply_bytes
    functions: tuple[str, ...] = ()  # whose names begin the names of rewards
    turn_ends: TurnEnds | None = None  # None: not checked

    @classmethod
    def of(cls, sampler: Sampler, placement: Jobs) -> "Limits":
        """Returns the limits of the rollouts of a sampler."""
        engine, task = sampler.engine, sampler.task
        functions = [environment.NAME]
        for settings in mixed.all_settings(task).values():
            functions += settings.reward.functions
        ends = TurnEnds(
            decode=sampler.text_of,
            stop_ids=frozenset(engine.stop_ids),
            stop_strings=tuple(engine.settings.stop),
            keep_stop=engine.settings.keep_stop,
            max_new_tokens=engine.settings.max_new_tokens,
        )
        return cls(
            vocab_size=engine.model.vocab_size,
            max_turns=engine.settings.max_turns,
            longest_continuation=engine.settings.longest_continuation,
            tracks=engine.program_settings.tracks,
            switch=placement.switch,
            num_experts=engine.model.num_experts,
            num_slots=engine.max_concurrent_decodes,
            bytes_per_token=TEXT_BYTES_PER_CHARACTER * longest_token(sampler.tokenizer),
            reply_bytes=bounds.reply_bytes(task),
            functions=tuple(dict.fromkeys(functions)),
            turn_ends=ends,
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of all tracks of one token."""
        shapes = dict.fromkeys(BASIC_TRACKS, ()) | dict(self.tracks)
        return sum(
            np.dtype(TRACKS[name].dtype).itemsize * int(np.prod(shape, dtype=np.int64))
            for name, shape in shapes.items()
        )

    @property
    def most_parts(self) -> int:
        """The number of named rewards of a turn."""
        return (bounds.MAX_PARTS + 1) * (len(self.functions) + 1)

    @property
    def most_part_bytes(self) -> int:
        """The bytes of the name of a reward: a function, and the name of its part."""
        longest = max((len(name.encode()) for name in self.functions), default=0)
        return longest + TEXT_BYTES_PER_CHARACTER * bounds.MAX_NAME


@dataclass(frozen=True)
class FileLimits:
    """The bounds of a file, which hold before it is parsed."""

    most_bytes: int
    most_items: int  # of MessagePack


def file_limits(prompt_lengths: Sequence[int], group_size: int, limits: Limits) -> FileLimits:
    """Returns the bounds of the file with the rollouts of a request.

    prompt_lengths: the tokens of each prompt.
    """
    num_rollouts = len(prompt_lengths) * group_size
    continued = num_rollouts * limits.longest_continuation
    num_tokens = continued + group_size * sum(prompt_lengths)
    num_turns = num_rollouts * limits.max_turns
    part_bytes = limits.most_parts * (limits.most_part_bytes + 16)
    num_bytes = FILE_BYTES + num_rollouts * ROLLOUT_BYTES
    num_bytes += num_tokens * limits.token_bytes
    num_bytes += continued * limits.bytes_per_token
    num_bytes += num_turns * (TURN_BYTES + limits.reply_bytes + part_bytes)
    num_items = FILE_ITEMS + num_rollouts * ROLLOUT_ITEMS
    num_items += num_turns * (TURN_ITEMS + 2 * limits.most_parts)
    if limits.max_turns > 1:
        # Messages that fit into the episode take a token or more; the last ones need not fit.
        num_items += ITEMS_PER_MESSAGE * (continued + num_rollouts * bounds.MAX_MESSAGES)
    return FileLimits(num_bytes, num_items)


# -- Weights ---------------------------------------------------------------------------------------


def weights_ids(rows: Sequence[Sequence[object]]) -> tuple[WeightsId, ...]:
    """Returns pairs that MessagePack or JSON returned as lists."""
    return tuple(cast(WeightsId, (version, snapshot)) for version, snapshot in rows)


def check_weights_types(weights: tuple[WeightsId, ...]) -> None:
    """Raises BadResultError unless weights are named by a version and an identity."""
    for version, snapshot in weights:
        if type(version) is not int or not isinstance(snapshot, str):
            raise BadResultError("a field has the wrong type")
        if not 0 <= version <= MAX_NUMBER or len(snapshot) > MAX_IDENTITY:
            raise BadResultError("no weights have this version or identity")


def check_weights(weights: tuple[WeightsId, ...], limits: Limits) -> None:
    """Raises BadResultError unless one sampler of the run can have used all of these weights."""
    versions = [version for version, _ in weights]
    if versions != sorted(set(versions)):
        raise BadResultError("its versions are not in order")
    if len(versions) > 1 and limits.switch == "requests":
        raise BadResultError("it has weights of several versions")


# -- Tokens ----------------------------------------------------------------------------------------


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
    if (tokens.logps < SMALLEST_LOGP).any():
        raise BadResultError(f"a log-prob is below {SMALLEST_LOGP:g}")
    # Every sampler of jzero writes 0 there, so another program made this file.
    if tokens.logps[~sampled].any():
        raise BadResultError("a token that was not sampled has a log-prob")
    sampled_by = tokens.versions[sampled]
    if not np.isin(sampled_by, versions).all() or (tokens.versions[~sampled] != -1).any():
        raise BadResultError("its tokens have other versions")
    if (np.diff(sampled_by) < 0).any():
        raise BadResultError("a token has older weights than the one before")
    check_optional_tracks(tokens, limits)


def check_optional_tracks(tokens: Tokens, limits: Limits) -> None:
    """Raises BadResultError unless the model can repeat the choices that tracks record."""
    kept, routes = tokens.get("kept"), tokens.get("routes")
    if kept is not None:
        if (kept < -1).any() or (kept >= limits.vocab_size).any():
            raise BadResultError("a kept token is not in the vocabulary")
        # A token that its own filters dropped would have the probability 0.
        chosen = (kept == tokens.ids[:, None]).any(axis=1)
        if not chosen[tokens.sampled].all():
            raise BadResultError("a sampled token is not among the kept ones")
    if routes is not None and ((routes < -1).any() or (routes >= limits.num_experts).any()):
        raise BadResultError("a route leads to an expert that the model does not have")


# -- Turns -----------------------------------------------------------------------------------------


def check_turns(
    turns: Sequence[Turn], tokens: Tokens, prompt_length: int, limits: Limits
) -> list[Grade]:
    """Returns the grades of turns, which are responses within the tokens.

    Raises BadResultError for other turns, and for grades that no grader returns.
    """
    if not turns:
        raise BadResultError("it has 0 turns")
    check_ended_turns(turns, tokens, prompt_length, limits)
    if turns[-1].end != len(tokens):
        raise BadResultError("a turn is out of place")
    return [check_grade(turn, limits) for turn in turns]


def check_ended_turns(
    turns: Sequence[Turn], tokens: Tokens, prompt_length: int, limits: Limits
) -> None:
    """Raises BadResultError unless the turns are responses within the tokens, in order."""
    if len(turns) > limits.max_turns or (turns and turns[0].start != prompt_length):
        raise BadResultError(f"it has {len(turns)} turns")
    end = prompt_length
    for turn in turns:
        are_integers = type(turn.start) is int and type(turn.end) is int
        if not are_integers or not end <= turn.start <= turn.end <= len(tokens):
            raise BadResultError("a turn is out of place")
        if turn.start == turn.end or not tokens.sampled[turn.start : turn.end].all():
            raise BadResultError("a turn has tokens that were not sampled")
        if tokens.sampled[end : turn.start].any():
            raise BadResultError("a sampled token is in no turn")
        end = turn.end
        if turn.finish_reason not in ("stop", "length") or not isinstance(turn.text, str):
            raise BadResultError("a turn has no end")
        check_text(turn, tokens, prompt_length, limits)
        if limits.switch == "turns":
            check_one_version(tokens.part(turn.start, turn.end))


def check_text(turn: Turn, tokens: Tokens, prompt_length: int, limits: Limits) -> None:
    """Raises BadResultError unless a turn's text and end are those of its tokens."""
    num_tokens = turn.end - turn.start
    if len(turn.text.encode()) > num_tokens * limits.bytes_per_token:
        raise BadResultError(f"{num_tokens} tokens have a text of {len(turn.text):,} characters")
    ends = limits.turn_ends
    if ends is None:
        return
    ids = tokens.ids[turn.start : turn.end].tolist()
    text = ends.decode(ids)
    stopped = ids[-1] in ends.stop_ids or any(stop in text for stop in ends.stop_strings)
    # A turn is also cut where its episode is as long as a row of training.
    longest = min(turn.start + ends.max_new_tokens, prompt_length + limits.longest_continuation)
    can_end = stopped if turn.finish_reason == "stop" else turn.end == longest
    if not can_end:
        raise BadResultError(f"a turn cannot end with {turn.finish_reason}")
    expected = graded_text(
        ends.decode, ids, ends.stop_ids, ends.stop_strings, keep_stop=ends.keep_stop
    )
    if turn.text != expected:
        raise BadResultError("a text is not that of its tokens")


def check_one_version(turn: Tokens) -> None:
    """Raises BadResultError unless one version sampled a turn."""
    if len(np.unique(turn.versions[turn.sampled])) > 1:
        raise BadResultError("a turn has weights of several versions")


# -- Grades ----------------------------------------------------------------------------------------


def check_grade(turn: Turn, limits: Limits) -> Grade:
    """Returns the grade of a turn, with its texts cut to one line.

    Raises BadResultError if it has no grade, or one that no grader returns.
    """
    grade = turn.grade
    if not isinstance(grade, Grade):
        raise BadResultError("a turn is not graded")
    if not isinstance(grade.parts, dict):
        raise BadResultError("a grade has no named rewards")
    numbers = [grade.score, grade.seconds, grade.tool_seconds, *grade.parts.values()]
    numbers += [grade.tool_calls, grade.failed_tool_calls]
    if not all(map(json_values.is_finite_number, numbers)):
        raise BadResultError("a grade is not finite")
    if not isinstance(grade.correct, bool) or not isinstance(grade.failed, bool):
        raise BadResultError("a grade has no verdict")
    names = [grade.reason, grade.failed_function, *grade.parts]
    if not all(isinstance(name, str) for name in names):
        raise BadResultError("a grade has no reason")
    try:
        read = bounds.read_grade(replace(grade, parts={}), limits.reply_bytes)
        parts = read_parts(grade.parts, limits)
    except (TypeError, ValueError) as error:
        raise BadResultError(f"a grade: {error}") from None
    if min(grade.seconds, grade.tool_seconds) < 0:
        raise BadResultError("a grade took less than 0 seconds")
    # A response calls a tool with one token or more.
    calls = grade.tool_calls, grade.failed_tool_calls
    if not all(type(count) is int for count in calls) or not (
        0 <= grade.failed_tool_calls <= grade.tool_calls <= turn.end - turn.start
    ):
        raise BadResultError("a grade has another number of tool calls than its response")
    function = bounds.one_line(grade.failed_function, MAX_FUNCTION_NAME)
    return replace(read, parts=parts, failed_function=function)


def read_parts(parts: Mapping[str, object], limits: Limits) -> dict[str, float]:
    """Returns named rewards: "function", "function.part", or a part of an environment.

    Raises TypeError or ValueError for numbers and names that no reward has.
    """
    if len(parts) > limits.most_parts:
        raise ValueError(f"a response has more than {limits.most_parts} named rewards")
    read: dict[str, float] = {}
    for name, value in parts.items():
        if name not in limits.functions:
            # The names of functions are settings, and may be longer than the names of parts.
            functions = [f for f in limits.functions if name.startswith(f"{f}.")]
            longest = max(functions, key=len, default="")
            bounds.read_name(name[len(longest) + 1 :] if longest else name)
        read[name] = bounds.read_number(value)
    return read


# -- Counters --------------------------------------------------------------------------------------


def check_counters(
    counters: Mapping[str, float],
    grading: Mapping[str, int],
    num_tokens: int,
    num_turns: int,
    limits: Limits,
) -> None:
    """Raises BadResultError unless counters can belong to a request.

    Args:
        counters: of `DecodeCounters`.
        grading: of `Pool.counters`.
        num_tokens: of all rollouts of the request, at most.
        num_turns: of all rollouts of the request, at most.
        limits: of the run.
    """
    most = MAX_REPETITIONS * num_tokens * limits.num_slots
    for name, count in counters.items():
        if name not in vars(DecodeCounters()):
            raise BadResultError("a counter has an unknown name")
        if name == "grading_seconds":
            if not 0 <= count <= MAX_SECONDS:
                raise BadResultError(f"{name} is {count:g}")
        elif type(count) is not int or not 0 <= count <= most:
            raise BadResultError(f"the counter {name} is not a number from 0 to {most}")
    used = counters.get("draft_passes") or counters.get("decoded_tokens", 0)
    pairs = [
        (used, "slot_steps"),
        (counters.get("wasted_tokens", 0), "decoded_tokens"),
        (counters.get("accepted_tokens", 0), "drafted_tokens"),
    ]
    for part, whole in pairs:
        if whole in counters and part > counters[whole]:
            raise BadResultError(f"the counter {whole} is smaller than a part of it")
    most = MAX_REPETITIONS * num_turns
    for name, count in grading.items():
        if name not in COUNTERS:
            raise BadResultError("a counter of gradings has an unknown name")
        if type(count) is not int or not 0 <= count <= most:
            raise BadResultError(f"the counter {name} is not a number from 0 to {most}")


def decode_counters(counters: Mapping[str, float]) -> DecodeCounters:
    """Returns the counters of a result. Counters that are not complete count nothing.

    Shares such as rollout/slot_utilization have a sense only if both of their counters are known.
    """
    counted = DecodeCounters()
    if counters.keys() == vars(counted).keys():
        for name, number in counters.items():
            setattr(counted, name, number)
    return counted
