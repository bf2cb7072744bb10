"""The order in which requests of an `Inbox` begin, without a device."""

from collections.abc import Hashable
from functools import partial
from types import SimpleNamespace
from typing import cast

from jzero.decoder.engine import Engine
from jzero.decoder.inbox import Inbox, Request
from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import Sequence


class Asked(Request):
    """A request for one sample, or for scores alone."""

    def __init__(self, owner: str, is_sampled: bool) -> None:
        self.owner = owner
        self.is_sampled = is_sampled
        self.sequences = []
        self.was_dropped = False

    @property
    def num_waiting(self) -> int:
        return int(self.is_sampled)

    @property
    def prefill(self) -> Hashable:
        return self

    def begin_samples(self, count: int) -> list[Sequence]:
        return []

    def sample_ended(self, sequence: Sequence) -> None: ...

    def scoring_ended(self, scoring: Scoring) -> None: ...

    def dropped(self) -> None:
        self.was_dropped = True

    def scoring_dropped(self, scoring: Scoring) -> None: ...

    def fail(self, error: BaseException) -> None:
        raise error


def make_inbox(most_reserved: int = 8) -> Inbox[Asked]:
    engine = SimpleNamespace(max_concurrent_decodes=1, scoring_rows=1, num_shards=1)
    return Inbox(cast(Engine, engine), most_reserved)


def test_no_request_of_an_owner_overtakes_an_earlier_one() -> None:
    inbox = make_inbox()
    inbox.live = {cast(Sequence, object()): Asked("ann", True)}  # no slot is free
    waits, behind, other = Asked("ann", True), Asked("ann", False), Asked("bob", False)
    inbox.waiting.extend([waits, behind, other])

    assert inbox.admit_waiting() == []

    assert [*inbox.waiting] == [waits, behind]
    assert [one.has_begun for one in (waits, behind, other)] == [False, False, True]


def test_room_is_reserved_for_each_owner() -> None:
    inbox = make_inbox(most_reserved=3)
    assert inbox.reserve(2, "ann") and not inbox.reserve(2, "ann")
    assert inbox.reserve(3, "bob"), "what one owner has reserved leaves the room of another"
    assert inbox.num_reserved == 5
    inbox.release(1, "ann")
    assert inbox.reserve(2, "ann") and not inbox.reserve(1, "bob")


def test_cancelled_requests_are_dropped_and_the_others_keep_their_order() -> None:
    inbox = make_inbox()
    requests = [Asked("ann", True) for _ in range(4)]
    for request in requests:
        inbox.post(partial(inbox.waiting.append, request))
    inbox.run_posted(must_wait=True)
    assert [*inbox.waiting] == requests and not inbox.is_idle

    for request in requests[::2]:
        request.cancel()
    inbox.drop_cancelled()

    assert [*inbox.waiting] == requests[1::2]
    assert [request.was_dropped for request in requests] == [True, False, True, False]
