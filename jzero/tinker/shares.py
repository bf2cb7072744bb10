"""The share of every limit that one key has, so that no client can block or evict another.

    shares = Shares(limits)
    shares.num_owners = 2                       # names in the file of keys
    shares.of("max_sessions")                   # 32 of 64
    waiting = Counts("samples wait", "max_waiting_sequences", shares)
    waiting.take("ann", 8)                      # TooBusyError beyond ann's share
    snapshots = Recent()
    snapshots.use("ann", key, value)            # ann's oldest ones leave beyond her share

Shares are equal and fixed: what a client may hold does not depend on what others hold. Without keys
all clients are one owner, whose share is the whole limit.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from jzero.servers.limits import flag_name
from jzero.tinker.commands import TooBusyError
from jzero.tinker.limits import TinkerLimits

Item = TypeVar("Item")


def share_of(limit: int, num_owners: int) -> int:
    """Returns the share of one owner: at least 1, even if there are more owners than that."""
    return max(1, limit // num_owners)


class Shares:
    """The share of one owner of every limit."""

    def __init__(self, limits: TinkerLimits) -> None:
        self.limits = limits
        self.num_owners = 1

    def of(self, limit: str) -> int:
        """Returns the share of a limit, by the name of its field."""
        return share_of(getattr(self.limits, limit), self.num_owners)

    def refusal(self, what: str, flag: str, share: int) -> TooBusyError:
        """Returns the error for an owner that has its whole share, such as 32 open sessions."""
        of_key = f", the share of one of {self.num_owners} keys" if self.num_owners > 1 else ""
        return TooBusyError(f"{share} {what}{of_key}: {flag} allows more")


class Counts:
    """How much each owner holds of a limit, such as samples that wait."""

    def __init__(self, what: str, limit: str, shares: Shares) -> None:
        """what: for the message, such as "samples wait". limit: a field of TinkerLimits."""
        self.what = what
        self.limit = limit
        self.shares = shares
        self.by_owner: Counter[str] = Counter()

    def check(self, owner: str, count: int) -> None:
        """Raises TooBusyError if `count` more would exceed the share of `owner`."""
        share = self.shares.of(self.limit)
        if self.by_owner[owner] + count > share:
            raise self.shares.refusal(self.what, flag_name(self.limit), share)

    def take(self, owner: str, count: int = 1) -> None:
        """Adds to what an owner holds. Raises TooBusyError beyond its share."""
        self.check(owner, count)
        self.by_owner[owner] += count

    def give_back(self, owner: str, count: int = 1) -> None:
        """Subtracts from what an owner holds."""
        self.by_owner[owner] -= count
        if not self.by_owner[owner]:
            del self.by_owner[owner]

    @contextlib.contextmanager
    def held(self, owner: str, count: int = 1) -> Iterator[None]:
        """Holds `count` for the duration of the block. Raises TooBusyError beyond the share."""
        self.take(owner, count)
        try:
            yield
        finally:
            self.give_back(owner, count)


class Recent(Generic[Item]):
    """Items of every owner by key, the least recently used first."""

    def __init__(self) -> None:
        self.by_owner: dict[str, OrderedDict[str, Item]] = {}

    def use(self, owner: str, key: str, item: Item) -> None:
        """Adds an item, or marks it as used."""
        items = self.by_owner.setdefault(owner, OrderedDict())
        items[key] = item
        items.move_to_end(key)

    def has(self, owner: str, key: str) -> bool:
        """Returns whether an owner has an item."""
        return key in self.by_owner.get(owner, {})

    def take_oldest(self, owner: str, most: int) -> list[tuple[str, Item]]:
        """Removes and returns the owner's least recently used items beyond `most`."""
        items = self.by_owner.get(owner, OrderedDict())
        return [items.popitem(last=False) for _ in range(len(items) - most)]

    def drop(self, owner: str, key: str) -> None:
        """Removes an item, if it is there."""
        items = self.by_owner.get(owner, OrderedDict())
        items.pop(key, None)
        if not items:
            self.by_owner.pop(owner, None)
