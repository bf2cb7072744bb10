"""Leases: which sampler works on which request, and until when.

A lease is a file with the name of its sampler. It ends `seconds` after its last change, by the
clock of the store, and the sampler renews it as long as it makes progress. Leases save work and
decide nothing: if two samplers answer a request, their answers are equal.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jzero.jobs.store import Store, read_note

FOLDER = "leases"
RENEWALS = 3  # of a lease in its time
# A sampler that has had a request for longer than both is slow.
SLOW_LEASES = 3  # lease times
SLOW_FACTOR = 3  # times the median of the answered requests
NUM_ANSWERS = 50  # in the median, the last ones


@dataclass
class Leases:
    """The leases of a store, as one sampler or the trainer sees them."""

    store: Store
    holder: str  # a name that no other process uses
    seconds: float
    _renewed: dict[str, float] = field(default_factory=dict)  # by request: time.monotonic()

    def take(self, request: str, now: float | None = None) -> bool:
        """Returns whether this process got the lease of a request.

        now: the clock of the store, which is read if it is not given.
        """
        name = f"{FOLDER}/{request}"
        if self.store.create(name, self.holder.encode()):
            self._renewed[request] = time.monotonic()
            return True
        # A connection that was cut after the lease was written made the store try again.
        if self.holder_of(request) == self.holder:
            self._renewed[request] = time.monotonic()
            return True
        if not self.is_expired(request, self.store.now(self.holder) if now is None else now):
            return False
        # Two samplers may both take an expired lease. Then both do the same work.
        self.store.delete(name)
        if not self.store.create(name, self.holder.encode()):
            return False
        self._renewed[request] = time.monotonic()
        return True

    def is_expired(self, request: str, now: float) -> bool:
        """Returns whether no sampler has a valid lease of a request at `now`."""
        try:
            return self.store.modified(f"{FOLDER}/{request}") + self.seconds < now
        except FileNotFoundError:
            return True

    def holder_of(self, request: str) -> str | None:
        """Returns the sampler with the lease of a request, valid or not; None without a lease."""
        data = read_note(self.store, f"{FOLDER}/{request}")
        return None if data is None else data.decode(errors="replace")

    def renew(self, request: str) -> None:
        """Extends this process's lease if a part of its time is over.

        Does nothing if another sampler has taken the lease.
        """
        if time.monotonic() - self._renewed[request] < self.seconds / RENEWALS:
            return
        self._renewed[request] = time.monotonic()
        if self.holder_of(request) == self.holder:
            self.store.write(f"{FOLDER}/{request}", self.holder.encode())

    def give_back(self, request: str) -> None:
        """Ends this process's lease, so that another sampler can take the request at once."""
        self._renewed.pop(request, None)
        if self.holder_of(request) == self.holder:
            self.store.delete(f"{FOLDER}/{request}")


@dataclass
class SlowLeases:
    """Finds the samplers that renew their lease of a request for much longer than others need.

    The trainer looks while it waits. Time counts from its first look at a lease.
    """

    leases: Leases
    _since: dict[str, tuple[str, float]] = field(default_factory=dict)  # holder, time.monotonic()
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_ANSWERS))
    _last_look: float = 0.0  # time.monotonic()

    def count_answer(self, seconds: float) -> None:
        """Counts the seconds that a sampler worked on a request that it has answered."""
        self._seconds.append(seconds)

    @property
    def holders(self) -> dict[str, str]:
        """The samplers that had the leases of requests at the last look."""
        return {request: holder for request, (holder, _) in self._since.items()}

    @property
    def limit(self) -> float:
        """The seconds after which a sampler is slow."""
        median = statistics.median(self._seconds) if self._seconds else 0.0
        return max(SLOW_LEASES * self.leases.seconds, SLOW_FACTOR * median)

    def find(self, requests: Iterable[str]) -> list[tuple[str, str, float]]:
        """Returns the slow ones of some requests, each with its sampler and its seconds.

        Looks a few times in the time of a lease, and returns nothing in between.
        """
        now = time.monotonic()
        # In a bucket every look is a paid request.
        if now - self._last_look < self.leases.seconds / RENEWALS:
            return []
        self._last_look = now
        since: dict[str, tuple[str, float]] = {}
        slow: list[tuple[str, str, float]] = []
        for request in requests:
            holder = self.leases.holder_of(request)
            if holder is None:
                continue
            known_holder, start = self._since.get(request, (holder, now))
            # Another sampler has its own time.
            since[request] = holder, start if known_holder == holder else now
            seconds = now - since[request][1]
            if seconds > self.limit:
                slow.append((request, holder, seconds))
        self._since = since
        return slow
