"""A store like a bucket at its worst: answers are lost, come late, or come twice."""

import random
from collections import Counter

from jzero.jobs.store import Store, StoreError

FAULTS = ("lost", "late", "doubled", "stale")
SHARE = 0.15  # of the calls
STALE_CALLS = 6  # for which a reader may see an older content
# The clock has no older content that anybody waits for.
NEVER_STALE = ("clock/",)


class FaultyStore:
    """Wraps a store. Errors are OSErrors, which `RetryingStore` repeats.

    lost: the operation is done, and its answer is an error. late: the same content is written once
    more, some calls later. doubled: the operation is done twice. stale: a reader sees the content
    from before the last write.
    """

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.address = store.address
        self.poll_seconds = 0.001
        self.rng = rng
        self.num_faults = Counter(dict.fromkeys(FAULTS, 0))
        self.late: list[tuple[int, str, bytes]] = []  # call number, name, content
        self.older: dict[str, tuple[int, bytes | None]] = {}  # until a call, the content before
        self.num_calls = 0

    def _fault(self, *kinds: str) -> str:
        """Returns the fault of this call, "" for most calls."""
        self.num_calls += 1
        due = [item for item in self.late if item[0] <= self.num_calls]
        self.late = [item for item in self.late if item[0] > self.num_calls]
        for _, name, data in due:
            # A write that was on its way for long: only results and leases are written by many.
            self.store.write(name, data)
        if self.rng.random() >= SHARE:
            return ""
        fault = self.rng.choice(kinds)
        self.num_faults[fault] += 1
        return fault

    def _lose(self, fault: str) -> None:
        if fault == "lost":
            raise StoreError("the answer is lost")

    def _remember(self, name: str) -> None:
        try:
            content: bytes | None = self.store.read(name)
        except FileNotFoundError:
            content = None
        self.older[name] = self.num_calls + STALE_CALLS, content

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        fault = self._fault("lost", "stale")
        self._lose(fault)
        until, content = self.older.get(name, (0, None))
        if fault == "stale" and self.num_calls < until and not name.startswith(NEVER_STALE):
            if content is None:
                raise FileNotFoundError(name)
            return content
        return self.store.read(name, most_bytes)

    def write(self, name: str, data: bytes) -> None:
        fault = self._fault("lost", "late", "doubled")
        self._remember(name)
        self.store.write(name, data)
        if fault == "doubled":
            self.store.write(name, data)
        if fault == "late" and name.startswith(("results/", "leases/", "requests/")):
            self.late.append((self.num_calls + self.rng.randint(1, 20), name, data))
        self._lose(fault)

    def create(self, name: str, data: bytes) -> bool:
        fault = self._fault("lost", "doubled")
        created = self.store.create(name, data)
        if fault == "doubled":
            created = self.store.create(name, data)
        self._lose(fault)
        return created

    def names(self, folder: str) -> list[str]:
        self._lose(self._fault("lost"))
        return self.store.names(folder)

    def delete(self, name: str) -> None:
        fault = self._fault("lost", "doubled")
        self.store.delete(name)
        if fault == "doubled":
            self.store.delete(name)
        self._lose(fault)

    def modified(self, name: str) -> float:
        self._lose(self._fault("lost"))
        return self.store.modified(name)

    def now(self, who: str) -> float:
        self._lose(self._fault("lost"))
        return self.store.now(who)
