"""The order in which requests of an `Inbox` begin, without a device."""

from collections.abc import Hashable
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

    def fail(self, error: BaseException) -> None:
        raise error


def test_no_request_of_an_owner_overtakes_an_earlier_one() -> None:
    engine = SimpleNamespace(max_concurrent_decodes=1, scoring_rows=1, num_shards=1)
    inbox: Inbox[Asked] = Inbox(cast(Engine, engine))
    inbox.live = {cast(Sequence, object()): Asked("ann", True)}  # no slot is free
    waits, behind, other = Asked("ann", True), Asked("ann", False), Asked("bob", False)
    inbox.waiting.extend([waits, behind, other])

    assert inbox.admit_waiting() == []

    assert [*inbox.waiting] == [waits, behind]
    assert [one.has_begun for one in (waits, behind, other)] == [False, False, True]
