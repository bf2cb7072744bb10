"""Requests of clients that are decoded together: they join at the next call of the device.

An `Inbox` is the source (`decoder.driver`) of a server: the one with OpenAI's API and the one with
Tinker's. It has the requests that wait, the sequences that are decoded and those that are scored,
shares room and slots among the owners of the requests, and lets equal prompts share one prefill. A
`Request` knows how its client is answered.

    inbox.reserve(count, owner)      # any thread: whether there is room for further samples
    inbox.post(call)                 # any thread: runs `call` in the decoding thread
    request.cancel()                 # any thread: what has not begun never does

Everything else runs in the decoding thread.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from jzero.decoder.driver import Source
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import Groups, Sequence

# Requests choose their own filters. Filters are data, so that all are decoded together.
REQUESTS = Samples(is_trained=False, has_choices=True)
ACTIVE_SECONDS = 600.0  # after an owner's last request, for which slots are left to her


class Request(ABC):
    """A request: its samples begin when there are slots, and it hears of their ends."""

    owner: str = ""  # whose request it is: owners share the slots
    has_begun: bool = False
    is_cancelled: bool = False
    sequences: list[Sequence]  # all that have begun; there may be others

    def cancel(self) -> None:
        """Ends the request early. Any thread may call this.

        Samples that wait are dropped (`Inbox.drop_cancelled`), and those that are decoded end with
        the next call. Finished ones are not affected.
        """
        self.is_cancelled = True
        # The scheduler ends a sequence that has reached its limit.
        for sequence in self.sequences:
            sequence.length_limit = 0

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """The samples that have not begun. 0 from the start: the request is only scored."""

    @property
    @abstractmethod
    def prefill(self) -> Hashable:
        """Samples that begin together and have equal values here share one prefill."""

    def begin(self) -> bool:
        """Prepares the first samples. Returns False if there is no room for the request yet.

        An exception fails this request, and no other.
        """
        return True

    @abstractmethod
    def begin_samples(self, count: int) -> list[Sequence]:
        """Returns the next `count` sequences."""

    @abstractmethod
    def sample_ended(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended."""

    @abstractmethod
    def scoring_ended(self, scoring: Scoring) -> None:
        """Takes scores for which the request has asked."""

    @abstractmethod
    def dropped(self) -> None:
        """Is called if samples that wait are dropped, because the request was cancelled."""

    @abstractmethod
    def scoring_dropped(self, scoring: Scoring) -> None:
        """Takes scores for which a cancelled request has asked, and which will not be computed."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Answers the request with an error."""


Item = TypeVar("Item", bound=Request)


class Inbox(Source, Generic[Item]):
    """The requests that wait, and the sequences of those that have begun."""

    def __init__(self, engine: Engine, most_reserved: int) -> None:
        """most_reserved: the most samples of one owner that are neither finished nor dropped."""
        self.most_reserved = most_reserved
        self.lock = threading.Lock()  # guards `reserved`
        self.reserved: Counter[str] = Counter()  # by owner
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.engine = engine
        self.num_slots = engine.max_concurrent_decodes
        self.waiting: deque[Item] = deque()  # those with samples that have not begun
        self.live: dict[Sequence, Item] = {}  # in the scheduler
        self.scoring: dict[Scoring, Item] = {}  # in the scorer
        # Enough sequences to fill the rows of the scorer. The others of requests that are only
        # scored wait here, where they can be dropped.
        self.most_scoring = max(self.num_slots, engine.scoring_rows * engine.num_shards)
        self.last_seen: dict[str, float] = {}  # by owner: when a request waited, by `clock`
        self.clock: Callable[[], float] = time.monotonic  # of several hosts, the same on all
        self.scheduler: Scheduler | None = None  # of the latest run

    # -- any thread --------------------------------------------------------------------------------

    def reserve(self, count: int, owner: str = "") -> bool:
        """Reserves room for samples of a request to come. Returns whether there was room."""
        with self.lock:
            if self.reserved[owner] + count > self.most_reserved:
                return False
            self.reserved[owner] += count
            return True

    def release(self, count: int, owner: str = "") -> None:
        """Releases reserved room."""
        with self.lock:
            self.reserved[owner] -= count
            if not self.reserved[owner]:
                del self.reserved[owner]

    @property
    def num_reserved(self) -> int:
        """The reserved samples of all owners."""
        with self.lock:
            return self.reserved.total()

    def post(self, call: Callable[[], None]) -> None:
        """Runs a call in the decoding thread, before the next call of the device."""
        self.posted.put(call)

    # -- the decoding thread -----------------------------------------------------------------------

    def run_posted(self, must_wait: bool) -> None:
        """Runs what was posted. If `must_wait`, blocks until something is."""
        while must_wait or not self.posted.empty():
            self.posted.get()()
            must_wait = False

    def drop_cancelled(self) -> None:
        """Drops what has not begun of cancelled requests, both samples and scores."""
        waiting, self.waiting = self.waiting, deque()
        for item in waiting:
            if item.is_cancelled:
                item.dropped()
            else:
                self.waiting.append(item)
        unwanted = [scoring for scoring, item in self.scoring.items() if item.is_cancelled]
        if unwanted:
            for scoring in self.run.scorer.drop(unwanted):
                self.scoring.pop(scoring).scoring_dropped(scoring)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not (self.live or self.scoring or self.waiting)

    @property
    def run(self) -> Scheduler:
        """The current run of the scheduler."""
        assert self.scheduler is not None, "the decoder has not begun"
        return self.scheduler

    def begin(self, run: Scheduler) -> None:
        """See `Source.begin`."""
        self.scheduler = run

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """See `Source.turn_ended`."""
        self.live.pop(sequence).sample_ended(sequence)

    # -- from waiting to live ----------------------------------------------------------------------

    def admit_waiting(self, items: Iterable[Item] | None = None) -> Groups:
        """Returns the groups of requests that begin now, of `items` (by default all that wait).

        The owner with the fewest live samples is next, and her requests begin in their order. See
        `room_of`.
        """
        self.note_owners()
        groups: dict[Hashable, list[Sequence]] = {}
        num_live = Counter(item.owner for item in self.live.values())
        queues: dict[str, deque[Item]] = {}
        for item in self.waiting if items is None else items:
            queues.setdefault(item.owner, deque()).append(item)
        gone: set[Item] = set()
        while queues:
            owner = min(queues, key=num_live.__getitem__)
            item = queues[owner].popleft()
            if not queues[owner]:
                del queues[owner]
            is_sampled = item.num_waiting > 0
            count = self.room_of(item, num_live[owner]) if is_sampled else 0
            has_room = count > 0 if is_sampled else len(self.scoring) < self.most_scoring
            if not has_room:
                # None of her later requests overtakes this one.
                queues.pop(owner, None)
                continue
            try:
                item.has_begun = item.has_begun or item.begin()
            except Exception as error:
                # A damaged checkpoint, for example: the requests of others do not need it.
                gone.add(item)
                item.fail(error)
                continue
            if not item.has_begun:
                # Later requests wait as well, or the first one might never have room.
                break
            if is_sampled:
                self.place(item, count, groups)
                num_live[owner] += count
            if not item.num_waiting:
                gone.add(item)
        if gone:
            self.waiting = deque(item for item in self.waiting if item not in gone)
        return list(groups.values())

    def room_of(self, item: Item, num_live: int) -> int:
        """Returns how many samples of a waiting request may begin now.

        With one owner, a request begins whole as soon as there is a free slot. Its samples without
        a slot wait in the scheduler, and share the prefill.

        If another owner has sent a request lately, an owner leaves a quarter of the slots free for
        others, and requests begin as far as there are slots. Otherwise one client's long samples
        could occupy all slots and the queue of the scheduler.

        num_live: live samples of the request's owner.
        """
        free = self.num_slots - len(self.live)
        horizon = self.clock() - ACTIVE_SECONDS
        has_others = any(
            owner != item.owner and seen > horizon for owner, seen in self.last_seen.items()
        )
        if not has_others:
            return item.num_waiting if free > 0 else 0
        share = max(1, self.num_slots - max(1, self.num_slots // 4))
        return max(0, min(item.num_waiting, free, share - num_live))

    def note_owners(self) -> None:
        """Remembers whose requests wait, for `room_of`."""
        now = self.clock()
        for item in self.waiting:
            self.last_seen[item.owner] = now

    def place(self, item: Item, count: int, groups: dict[Hashable, list[Sequence]]) -> None:
        """Adds the next samples of a request to the groups of the scheduler."""
        group = groups.setdefault(item.prefill, [])
        for sequence in item.begin_samples(count):
            # The scheduler shares the pages of a prompt among sequences with equal prompt_id.
            if group:
                sequence.prompt_id = group[0].prompt_id
            group.append(sequence)
            self.live[sequence] = item

    # -- scoring -----------------------------------------------------------------------------------

    def score(self, item: Item, scoring: Scoring) -> None:
        """Submits a sequence of a request to the scorer."""
        self.scoring[scoring] = item
        self.run.scorer.submit(scoring)

    def take_scored(self) -> None:
        """Hands the finished scores to their requests."""
        for scoring in self.run.scorer.take_finished():
            self.scoring.pop(scoring).scoring_ended(scoring)
