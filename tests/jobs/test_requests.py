"""Requests and results: what names them, and which results a trainer refuses."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jzero.files import JsonObject
from jzero.jobs.requests import (
    ANY_VERSION,
    BadResultError,
    Limits,
    Request,
    Result,
    check_result,
    request_of,
    seal,
    unseal,
)
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn

VOCAB = 50
LIMITS = Limits(vocab_size=VOCAB, max_turns=2, longest_continuation=8, tracks=())
PROMPTS = ((1, 2, 3), (4, 5))
VERSION = 7


def request(**changes: object) -> Request:
    values: JsonObject = {
        "run": "r",
        "step": 9,
        "number": 1,
        "seed": 3,
        "first_prompt": 4,
        "group_size": 2,
        "temperature": 1.0,
        "version": VERSION,
        "snapshot": "hash",
        "problems": tuple(Problem(f"p{i}", "guess", "prompt", [1, {"a": 2}]) for i in range(2)),
        "prompts": PROMPTS,
    }
    return Request(**values | changes)


def rollout(prompt: tuple[int, ...], sample_index: int) -> Rollout:
    rng = np.random.default_rng(sample_index)
    tokens = Tokens(prompt)
    logps = -rng.random(4).astype(np.float32)
    tokens.append(rng.integers(0, VOCAB, 4), sampled=True, logps=logps, versions=VERSION)
    start = len(prompt)
    turn = Turn(start, start + 4, "text", "stop", Grade(0.5, True, "correct", seconds=0.1))
    return Rollout(Problem("x", "guess", "", None), sample_index, tokens, (turn,))


def result(**changes: object) -> Result:
    rollouts = [rollout(prompt, index) for prompt in PROMPTS for index in range(2)]
    values: JsonObject = {
        "request": request().id,
        "version": VERSION,
        "snapshot": "hash",
        "sampler": "s",
        "rollouts": rollouts,
        "counters": {"decoded_tokens": 16},
        "grading": {"graded": 4},
    }
    return Result(**values | changes)


def test_a_request_survives_its_file_and_is_named_by_it() -> None:
    assert Request.parse(request().to_json()) == request()
    assert Request.parse(request().to_json()).id == request().id
    for changes in ({"seed": 4}, {"snapshot": "other"}, {"prompts": ((1, 2, 4), (4, 5))}):
        assert request(**changes).id != request().id


def test_requests_are_named_in_the_order_of_their_steps() -> None:
    ids = [request(step=step, number=n).id for step in (1, 9, 10, 200) for n in (0, 1, 11)]
    assert ids == sorted(ids)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"problems": 1}', b"\xff\xff"])
def test_a_damaged_request_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        Request.parse(data)


def test_a_result_survives_its_file() -> None:
    parsed = Result.parse(result().to_bytes())
    assert parsed.digest == result().digest
    assert request_of(parsed.name) == request().id
    checked = check_result(request(), parsed, LIMITS)
    assert [item.problem.id for item in checked] == ["p0", "p0", "p1", "p1"]
    assert checked[0].problem.gold == [1, {"a": 2}]
    for ours, theirs in zip(checked, result().rollouts, strict=True):
        for name, values in theirs.tokens.to_dict().items():
            assert ours.tokens[name].tobytes() == values.tobytes()
        assert ours.turns == theirs.turns


def test_equal_answers_have_one_name_whoever_gave_them() -> None:
    """Neither the sampler nor the time that a grader took belongs to the answer."""
    slow = Grade(0.5, True, "correct", seconds=9.0)
    rollouts = [
        replace(item, turns=(replace(item.turns[0], grade=slow),)) for item in result().rollouts
    ]
    assert result(sampler="t", rollouts=rollouts).name == result().name
    assert change_tokens(logps=lambda values: values * 2).name != result().name


def change_tokens(**tracks: Callable[[np.ndarray], np.ndarray]) -> Result:
    """Returns a result in which tracks of the last rollout's response are changed."""
    *others, last = result().rollouts
    start = len(PROMPTS[-1])
    changed = {}
    for name, change in tracks.items():
        values = last.tokens[name].copy()
        values[start:] = change(values[start:])
        changed[name] = values
    return result(rollouts=[*others, replace(last, tokens=last.tokens.replaced(**changed))])


def change_turn(**changes: object) -> Result:
    *others, last = result().rollouts
    return result(rollouts=[*others, replace(last, turns=(replace(last.turns[0], **changes),))])


def change_last(**changes: object) -> Result:
    *others, last = result().rollouts
    return result(rollouts=[*others, replace(last, **changes)])


# What a type checker would not let pass.
WRONG_VERDICT: JsonObject = {"correct": "yes", "reason": "x"}
WRONG_REASON: JsonObject = {"reason": 3}

BAD = {
    "a field has the wrong type": result(version="7"),
    "a grade has no reason": change_turn(grade=Grade(1.0, True, **WRONG_REASON)),
    "answers another request": result(request="x"),
    "weights of version 8": result(version=8),
    "has other weights": result(snapshot="other"),
    "3 rollouts instead of 4": result(rollouts=result().rollouts[:3]),
    "counters are not numbers": result(counters={"decoded_tokens": float("nan")}),
    "samples are in another order": result(rollouts=result().rollouts[::-1]),
    "not in the vocabulary": change_tokens(ids=lambda ids: ids + VOCAB),
    "not finite": change_tokens(logps=lambda logps: logps * np.nan),
    "above 0": change_tokens(logps=lambda logps: -logps),
    "not sampled has a log-prob": change_tokens(sampled=lambda s: np.array([True, *~s[1:]])),
    "its response is not": change_tokens(sampled=lambda sampled: ~sampled),
    "other versions": change_tokens(versions=lambda versions: versions + 1),
    "another prompt": change_last(tokens=rollout((4, 6), 1).tokens),
    "has 11 tokens": change_last(
        tokens=Tokens.concatenate([rollout(PROMPTS[1], 1).tokens, rollout((4,), 0).tokens])
    ),
    "has the tracks": change_last(
        tokens=rollout(PROMPTS[1], 1).tokens.replaced(kept=np.zeros((6, 2), np.int32))
    ),
    "0 turns": change_last(turns=()),
    "3 turns": change_last(turns=rollout(PROMPTS[1], 1).turns * 3),
    "a turn is out of place": change_turn(end=7),
    "a turn has no end": change_turn(finish_reason=""),
    "a turn is not graded": change_turn(grade=None),
    "a grade is not finite": change_turn(grade=Grade(float("inf"), True, "correct")),
    "a grade has no verdict": change_turn(grade=Grade(1.0, **WRONG_VERDICT)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_no_sampler_can_have_sampled_is_refused(message: str) -> None:
    parsed = Result.parse(BAD[message].to_bytes())
    with pytest.raises(BadResultError, match=message):
        check_result(request(), parsed, LIMITS)


def with_kept(last: int) -> Result:
    """Returns a result whose sampled tokens were among 3 kept ones, the last of them `last`."""
    with_track = []
    for item in result().rollouts:
        kept = np.full((len(item.tokens), 3), -1, np.int32)
        sampled = item.tokens.sampled
        kept[sampled, 0], kept[sampled, 2] = item.tokens.ids[sampled], last
        with_track.append(replace(item, tokens=item.tokens.replaced(kept=kept)))
    return result(rollouts=with_track)


def test_an_optional_track_has_the_shape_of_the_run() -> None:
    limits = replace(LIMITS, tracks=(("kept", (3,)),))
    parsed = Result.parse(with_kept(7).to_bytes())
    assert len(check_result(request(), parsed, limits)) == 4
    with pytest.raises(BadResultError, match="kept has the shape"):
        check_result(request(), parsed, replace(LIMITS, tracks=(("kept", (4,)),)))
    with pytest.raises(BadResultError, match="has the tracks"):
        check_result(request(), Result.parse(result().to_bytes()), limits)
    with pytest.raises(BadResultError, match="kept token is not in the vocabulary"):
        check_result(request(), Result.parse(with_kept(VOCAB).to_bytes()), limits)


def test_a_sampled_token_is_among_the_kept_ones() -> None:
    """Its probability over the kept tokens would be 0, and the loss not finite."""
    item = with_kept(7).rollouts[0]
    kept = np.full((len(item.tokens), 3), -1, np.int32)
    bad = replace(item, tokens=item.tokens.replaced(kept=kept))
    with pytest.raises(BadResultError, match="not among the kept"):
        check_result(
            request(),
            result(rollouts=[bad, *with_kept(7).rollouts[1:]]),
            replace(LIMITS, tracks=(("kept", (3,)),)),
        )


def test_any_version_is_allowed_where_the_request_names_none() -> None:
    question = request(version=ANY_VERSION, snapshot="")
    answered = result(request=question.id)
    assert len(check_result(question, answered, LIMITS)) == 4


MIXED = replace(LIMITS, switch="tokens")
LATER: JsonObject = {"later_weights": ((VERSION + 1, "next"),)}


def mixed_result(versions: list[int], **changes: object) -> tuple[Request, Result]:
    """Returns a result whose last response has these versions."""
    question = request(version=ANY_VERSION, snapshot="")
    tokens = change_tokens(versions=lambda _: np.array(versions)).rollouts
    return question, result(request=question.id, rollouts=tokens, **LATER | changes)


def test_tokens_of_several_versions_are_allowed_where_samplers_switch() -> None:
    question, answered = mixed_result([VERSION, VERSION, VERSION + 1, VERSION + 1])
    parsed = Result.parse(answered.to_bytes())
    assert parsed.weights == ((VERSION, "hash"), (VERSION + 1, "next"))
    assert parsed.digest == answered.digest
    assert len(check_result(question, parsed, MIXED)) == 4
    other = replace(answered, later_weights=((VERSION + 1, "other"),))
    assert other.name != answered.name


BAD_MIXED = {
    "older weights than the one before": mixed_result([VERSION, VERSION + 1] * 2),
    "tokens have other versions": mixed_result([VERSION] * 3 + [VERSION + 2]),
    "versions are not in order": mixed_result([VERSION] * 4, later_weights=((VERSION, "hash"),)),
    "a field has the wrong type": mixed_result([VERSION] * 4, later_weights=(("8", "next"),)),
    "counters are not numbers": mixed_result([VERSION] * 4, continued_tokens="3"),
    "no other sampler can repeat": (request(), result(**LATER)),
}


@pytest.mark.parametrize("message", BAD_MIXED)
def test_versions_that_no_sampler_can_have_used_are_refused(message: str) -> None:
    question, answered = BAD_MIXED[message]
    with pytest.raises(BadResultError, match=message):
        check_result(question, Result.parse(answered.to_bytes()), MIXED)


def test_versions_follow_the_setting() -> None:
    question, answered = mixed_result([VERSION, VERSION, VERSION + 1, VERSION + 1])
    with pytest.raises(BadResultError, match="weights of several versions"):
        check_result(question, answered, LIMITS)
    with pytest.raises(BadResultError, match="a turn has weights of several versions"):
        check_result(question, answered, replace(LIMITS, switch="turns"))


def test_a_result_of_fixed_weights_is_sampled_by_one_sampler() -> None:
    """Another sampler would have rounded otherwise."""
    with pytest.raises(BadResultError, match="no other sampler can repeat"):
        check_result(request(), result(continued_tokens=3), LIMITS)
    question = request(version=ANY_VERSION, snapshot="")
    assert check_result(question, result(request=question.id, continued_tokens=3), LIMITS)


def test_a_result_of_an_earlier_version_can_be_read() -> None:
    """Logged rollouts outlive a new field."""
    values = unseal(result().to_bytes())
    for name in ("later_weights", "continued_tokens", "seconds"):
        del values[name]
    parsed = Result.parse(seal(values))
    assert parsed.digest == result().digest
    assert parsed.is_repeatable


def test_bytes_that_are_no_result_are_refused() -> None:
    data = result().to_bytes()
    for damaged in (b"", data[:-1], data[64:], data[:64], data[:-1] + b"x"):
        with pytest.raises(BadResultError, match="torn"):
            Result.parse(damaged)


def test_another_message_with_the_right_checksum_is_refused() -> None:
    import hashlib

    for body in (b"", b"\x00", json.dumps({"rollouts": 1}).encode(), b"\x81\xa8rollouts\x01"):
        with pytest.raises(BadResultError, match="cannot be read"):
            Result.parse(hashlib.sha256(body).hexdigest().encode() + body)
