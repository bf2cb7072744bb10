"""Filters of single requests, and the steps of a call while an answer is streamed."""

from dataclasses import replace

import numpy as np
import pytest
from servers import Alone

from jzero.decoder.engine import Samples
from jzero.decoder.inbox import REQUESTS
from jzero.decoder.sampling import Filters
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Groups, Sequence
from jzero.serving.limits import Limits
from jzero.serving.requests import CompletionRequest
from jzero.serving.worker import Choices, StepClock, Submission

TEMPERATURE = 1.5
CHOICES = [
    None,
    Filters(top_k=3),
    None,
    Filters(top_p=0.4),
    Filters(min_p=0.5),
    Filters(top_k=8, top_p=0.7, min_p=0.1),
]


def make_groups(choices: list[Filters | None]) -> Groups:
    """Returns one sequence for each choice. Its noise depends on its place only."""
    prompt = np.arange(1, 6, dtype=np.int32)
    return [
        [Sequence(i, 0, i, prompt, length_limit=30, filters=filters)]
        for i, filters in enumerate(choices)
    ]


def decode(alone: Alone, groups: Groups, samples: Samples, call_steps: int = 0) -> list[list[int]]:
    """Returns the new tokens of every sequence."""
    engine = alone.engine
    scheduler = Scheduler(engine, alone.params, lambda ids: "", samples)
    engine.call_steps = call_steps or engine.settings.decode_steps
    try:
        list(scheduler.run(groups, 1, TEMPERATURE, alone.seed))
    finally:
        engine.call_steps = engine.settings.decode_steps
    return [group[0].new_tokens for group in groups]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> list[list[int]]:
    """The tokens of every choice, from an engine whose settings have its filters."""
    tokens = []
    settings, programs = alone.engine.program_settings, alone.engine._programs
    for i, filters in enumerate(CHOICES):
        if filters is not None:
            alone.engine.program_settings = replace(settings, filters=filters)
        alone.engine._programs = {}
        groups = make_groups([None] * len(CHOICES))
        tokens.append(decode(alone, groups, Samples())[i])
        alone.engine.program_settings = settings
    alone.engine._programs = programs
    return tokens


@pytest.mark.parametrize("call_steps", [0, 1, 3])
def test_requests_decode_as_with_a_server_of_their_filters(alone, expected, call_steps) -> None:
    """Requests without filters have the tokens of training's program."""
    assert decode(alone, make_groups(CHOICES), REQUESTS, call_steps) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_one_program_serves_all_values(alone) -> None:
    decode(alone, make_groups(CHOICES), REQUESTS)
    programs = alone.engine.programs(REQUESTS)
    sizes = programs.generate._cache_size(), programs.prefill._cache_size()
    decode(alone, make_groups([Filters(top_k=2), Filters(top_p=0.1)] * 3), REQUESTS, 2)
    assert (programs.generate._cache_size(), programs.prefill._cache_size()) == sizes


def test_calls_are_short_only_while_an_answer_is_streamed(alone) -> None:
    worker = alone.new_worker(Limits())
    most_steps = alone.engine.settings.decode_steps
    try:
        for is_streamed, step_seconds, want in (
            (False, 1.0, most_steps),
            (True, float("inf"), 1),
            (True, 0.02, 2),
            (True, 1e-6, most_steps),
        ):
            worker.step_clock.step_seconds = step_seconds
            [[sequence]] = make_groups([None])
            submission = Submission([sequence], print, is_streamed)
            worker.live = {sequence: Choices(worker, submission, [sequence])}
            worker.choose_call_steps()
            assert alone.engine.call_steps == want
    finally:
        alone.engine.call_steps = most_steps


def test_a_compilation_hardly_moves_the_estimate_of_a_step() -> None:
    clock = StepClock()
    clock.add(1, 60.0)
    clock.add(4, 0.08)
    assert clock.step_seconds == pytest.approx(0.02)
    clock.add(4, 0.16)
    assert 0.02 < clock.step_seconds < 0.023


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 0.9, 0.1)),
        ({"top_k": 0}, (0, 0.9, 0.1)),
        ({"top_k": -1}, (0, 0.9, 0.1)),
        ({"top_k": 7}, (7, 0.9, 0.1)),
        ({"top_p": 1.0}, (5, 1.0, 0.1)),
        ({"min_p": 0.0}, (5, 0.9, 0.0)),
    ],
)
def test_a_request_switches_a_filter_of_the_server_off(given: dict, expected: tuple) -> None:
    request = CompletionRequest(model="m", prompt="a", **given)
    assert request.filters(Filters(5, 0.9, 0.1)) == Filters(*expected)
