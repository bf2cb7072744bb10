"""Requests for rollouts and their results, as files of a store.

A request is a bundle of prompts that one sampler decodes by itself. All that its rollouts depend
on is in its file: the prompts, the weights, and the key of the noise. The id of a request contains
a hash of the file, so a result names exactly one question.

The name of a result contains the digest of its rollouts. Two samplers that answer the same request
write the same file. `jzero.jobs.checks` decides whether a trainer accepts a result.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np

from jzero import json_values
from jzero.decoder.serialization import restore_all, with_tuples
from jzero.errors import reason_of
from jzero.jobs.checks import (
    MAX_NUMBER,
    MAX_SECONDS,
    FileLimits,
    Limits,
    WeightsId,
    check_counters,
    check_tokens,
    check_turns,
    check_weights,
    check_weights_types,
    file_limits,
    weights_ids,
)
from jzero.jobs.sealed import MAX_ITEMS, BadResultError, seal, unseal
from jzero.rollout.sampler import with_turn_grades
from jzero.types import Grade, Problem, Rollout

REQUESTS = "requests"
RESULTS = "results"
DIGEST_DIGITS = 16  # in names
ANY_VERSION = -1  # the newest weights when the sampler takes the request
MAX_NAME_BYTES = 200  # of a sampler, which names files
MAX_TEMPERATURE = 1e6
# The ids that `Request.id` makes: they name files.
REQUEST_ID = re.compile(r"[0-9]{8,10}-[0-9]{4,10}-[0-9a-f]{64}")


def is_name(text: object) -> bool:
    """Returns whether a text can be the name of a sampler, which is a file name."""
    if not isinstance(text, str) or not text.isprintable() or "/" in text:
        return False
    # File systems limit the bytes of a name. A name from a dot on is hidden.
    return 0 < len(text.encode()) <= MAX_NAME_BYTES and text[0] != "."


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
            values = json_values.as_object(json_values.parse(data.decode(), allows_nan=True))
            rows = json_values.as_list(values["problems"], "problems")
            problems = tuple(json_values.from_fields(Problem, row) for row in rows)
            prompts = []
            for row in json_values.as_list(values["prompts"], "prompts"):
                tokens = json_values.as_list(row, "a prompt")
                prompts.append(tuple(_number(token, "a token") for token in tokens))
            fields = {**values, "problems": problems, "prompts": tuple(prompts)}
            request = json_values.from_fields(cls, fields)
            request.check()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the request is damaged ({reason_of(error)})") from None
        return request

    def file_limits(self, limits: Limits) -> FileLimits:
        """Returns the bounds of the file of a result."""
        return file_limits([len(prompt) for prompt in self.prompts], self.group_size, limits)

    def check(self) -> None:
        """Raises ValueError unless a trainer can have made this request."""
        for name in ("step", "number", "first_prompt"):
            _number(getattr(self, name), name)
        json_values.bounded_int(self.group_size, 1, MAX_NUMBER, "group_size")
        json_values.bounded_int(self.version, ANY_VERSION, MAX_NUMBER, "version")
        json_values.bounded_int(self.seed, -(2**63), 2**63, "seed")
        json_values.bounded_number(self.temperature, 0.0, MAX_TEMPERATURE, "temperature")
        for name in ("run", "snapshot"):
            json_values.bounded_text(getattr(self, name), MAX_NAME_BYTES, name)
        if len(self.problems) != len(self.prompts):
            raise ValueError(f"{len(self.problems)} problems have {len(self.prompts)} prompts")
        for problem in self.problems:
            for name in ("id", "task", "row_task"):
                json_values.as_text(getattr(problem, name), f"{name} of a problem")


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
        computes keys and values in one prefill, which rounds differently from decoding.
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
    def parse(cls, data: bytes, most_items: int = MAX_ITEMS) -> "Result":
        """Reads the content of the file, which has at most `most_items` items.

        Raises BadResultError if the file is damaged.
        """
        values = unseal(data, most_items)
        try:
            rollouts = restore_all(Rollout, values["rollouts"])
            rollouts = [with_tuples(rollout) for rollout in rollouts]
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
            refusal = BadResultError(f"the file cannot be read ({reason_of(error)})")
            refusal.sampler = values.get("sampler", "")
            raise refusal from None


NO_PROBLEM = Problem("", "", "", None)


def timeless(grade: Grade) -> Grade:
    """Returns a grade without its seconds, which differ between equal answers."""
    return replace(grade, seconds=0.0, tool_seconds=0.0)


def request_of(result_name: str) -> str:
    """Returns the id of the request that the file of a result belongs to."""
    return result_name.rpartition("-")[0]


def is_request_id(text: object) -> bool:
    """Returns whether a text can be the id of a request, which is a file name."""
    return isinstance(text, str) and REQUEST_ID.fullmatch(text) is not None


def _number(value: object, name: str) -> int:
    return json_values.bounded_int(value, 0, MAX_NUMBER, name)


# -- What a trainer accepts ------------------------------------------------------------------------


def check_result(request: Request, result: Result, limits: Limits) -> list[Rollout]:
    """Returns the rollouts of a result, in order, with the problems of the request.

    Raises BadResultError unless every value is one that a sampler of this run can have sampled.
    Whether a grade is right, `jzero.jobs.regrading` finds out, and whether the tokens were sampled,
    `python -m jzero.replay`.
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
            if type(rollout.sample_index) is not int or rollout.sample_index != sample_index:
                raise BadResultError("the samples are in another order")
            prompt = request.prompts[index]
            check_tokens(rollout.tokens, prompt, versions, limits)
            grades = check_turns(rollout.turns, rollout.tokens, len(prompt), limits)
            checked.append(check_rollout(rollout, grades, request.problems[index]))
        except BadResultError as error:
            raise BadResultError(f"rollout {number}: {error}") from None
        except Exception as error:  # fields of any type
            raise BadResultError(f"rollout {number}: {reason_of(error)}") from None
    num_sampled = sum(int(rollout.tokens.sampled.sum()) for rollout in checked)
    if not 0 <= result.continued_tokens <= num_sampled:
        raise BadResultError("it continues more tokens than it has")
    num_tokens = sum(map(len, request.prompts)) * request.group_size
    num_tokens += expected * limits.longest_continuation
    num_turns = expected * limits.max_turns
    check_counters(result.counters, result.grading, num_tokens, num_turns, limits)
    return checked


def check_rollout(rollout: Rollout, grades: list[Grade], problem: Problem) -> Rollout:
    """Returns a rollout of a problem, with the grades of its turns and what follows from them.

    Raises BadResultError if its file says otherwise.
    """
    graded = with_turn_grades(replace(rollout, problem=problem), grades)
    # Samplers leave these to the trainer.
    if rollout.grade is not None and rollout.grade != graded.grade:
        raise BadResultError("its grade is not that of its turns")
    if rollout.advantages is not None or rollout.advantage != 0.0:
        raise BadResultError("it has an advantage, which the trainer computes")
    return graded


def check_types(result: Result) -> None:
    """Raises BadResultError unless the fields of a file have their types."""
    if not isinstance(result.request, str):
        raise BadResultError("a field has the wrong type")
    if not is_name(result.sampler):
        raise BadResultError("its sampler has a name that no sampler has")
    check_weights_types(result.weights)
    numbers = [result.seconds, result.continued_tokens]
    for counters in (result.counters, result.grading):
        if not isinstance(counters, dict) or not all(isinstance(name, str) for name in counters):
            raise BadResultError("its counters are not numbers")
        numbers += counters.values()
    are_numbers = all(map(json_values.is_finite_number, numbers))
    if not are_numbers or type(result.continued_tokens) is not int:
        raise BadResultError("its counters are not numbers")
    if not 0 <= result.seconds <= MAX_SECONDS:
        raise BadResultError(f"it took {result.seconds:g} seconds")


def check_name(result: Result, name: str) -> None:
    """Raises BadResultError unless the file of a result is named after its rollouts."""
    try:
        actual = result.name
    except Exception as error:  # values of any type, which have no JSON
        raise BadResultError(reason_of(error)) from None
    if actual != name:
        raise BadResultError("its name is of other rollouts")
