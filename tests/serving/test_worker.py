"""The sequences that wait for a slot: how many there may be, and what becomes of them."""

import itertools

import numpy as np
import pytest
from servers import NUM_SLOTS

from jzero.decoder.sequence import Sequence
from jzero.serving.limits import Limits
from jzero.serving.worker import DecodingWorker, Progress, Submission

NUMBERS = itertools.count()
LIMITS = Limits(max_waiting_sequences=2 * NUM_SLOTS, max_request_sequences=NUM_SLOTS)


@pytest.fixture
def worker(alone) -> DecodingWorker:
    """A worker whose thread is this one."""
    worker = alone.new_worker(LIMITS)
    worker.begin(alone.new_scheduler())
    return worker


def submission_to(
    worker: DecodingWorker, count: int, reports: list[Progress], is_streamed: bool = False
) -> Submission:
    """Returns a submission with room for its sequences, which `reports` gets reports of."""
    # A prompt has another number in every request.
    sequences = [
        Sequence(next(NUMBERS), i, i, np.arange(1, 4, dtype=np.int32), length_limit=20)
        for i in range(count)
    ]
    assert worker.reserve(count)
    return Submission(sequences, reports.append, is_streamed)


def submit(worker: DecodingWorker, count: int, is_streamed: bool = False) -> list[Progress]:
    """Submits sequences. Returns the list that gets their reports."""
    reports: list[Progress] = []
    worker.submit(submission_to(worker, count, reports, is_streamed))
    return reports


def submission_of(worker: DecodingWorker, index: int) -> Submission:
    """Returns the submission of a waiting sequence."""
    return worker.waiting[index].submission


def test_no_more_can_be_reserved_than_may_wait_and_decode(worker) -> None:
    assert worker.reserve(3 * NUM_SLOTS - 1)
    assert not worker.reserve(2)
    assert worker.reserve(1)
    assert not worker.reserve(1)
    worker.release(2)
    assert worker.reserve(2)


def test_the_scheduler_gets_no_more_than_its_slots_in_the_order_of_submissions(worker) -> None:
    submit(worker, NUM_SLOTS - 1)
    submit(worker, 4)
    [*first, last] = [sequence for [sequence] in worker.admit(worker.run)]
    assert [sequence.sample_index for sequence in first] == list(range(NUM_SLOTS - 1))
    assert last.sample_index == 0
    assert worker.admit(worker.run) == []

    worker.turn_ended(worker.run, first[3])
    worker.turn_ended(worker.run, first[5])
    assert [group[0].sample_index for group in worker.admit(worker.run)] == [1, 2]
    assert len(worker.live) == NUM_SLOTS and len(worker.waiting) == 1


def test_what_waits_for_a_client_that_left_is_dropped_and_its_room_is_free(worker) -> None:
    submit(worker, NUM_SLOTS)
    worker.admit(worker.run)
    for _ in range(2):
        submit(worker, NUM_SLOTS)
    worker.admit(worker.run)
    assert not worker.reserve(1)

    leaving, staying = submission_of(worker, 0), submission_of(worker, -1)
    leaving.cancel()
    assert worker.admit(worker.run) == []
    assert {choices.submission for choices in worker.waiting} == {staying}
    assert worker.reserve(NUM_SLOTS)
    assert not worker.reserve(1)


def test_what_left_before_the_worker_looked_is_never_decoded(worker) -> None:
    submit(worker, NUM_SLOTS)
    admitted = worker.admit(worker.run)
    submission = submission_to(worker, 3, [])
    worker.submit(submission)
    submission.cancel()
    worker.turn_ended(worker.run, admitted[0][0])
    assert worker.admit(worker.run) == []
    assert worker.num_reserved == NUM_SLOTS - 1


def test_a_stream_hears_of_new_tokens_only(worker) -> None:
    """A report of every sequence for every call was 80,000 queue entries a call."""
    reports = submit(worker, NUM_SLOTS + 4, is_streamed=True)
    live = [sequence for [sequence] in worker.admit(worker.run)]
    for _ in range(3):
        worker.admit(worker.run)
    assert reports == []

    live[2].tokens.append([5, 6])
    for _ in range(3):
        worker.admit(worker.run)
    assert reports == [Progress(2, 2, "")]


def test_nobody_hears_of_a_cancelled_submission(worker) -> None:
    reports = submit(worker, 2, is_streamed=True)
    [[first], [second]] = worker.admit(worker.run)
    submission = worker.live[first].submission
    submission.cancel()
    first.tokens.append([5])
    second.finish_reason = "length"
    worker.submit(Submission([], reports.append, False))
    worker.admit(worker.run)
    worker.turn_ended(worker.run, second)
    assert reports == []
