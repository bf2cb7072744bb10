"""Ordered commands of a model, and the futures of their results. Everything runs in the event loop.

A client numbers the commands of a model from 1 and sends them without waiting: they may arrive in
any order, twice (a lost answer), or never (a refused call consumes its number). `CommandLog` passes
them on in order, each once. A command's answer is a promise, `{request_id}`; the client polls
`Futures` for the result. A result stays until its time is over, because the answer to a poll may be
lost, too.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from jzero.errors import UserError
from jzero.types import JsonValue

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


class TooBusyError(Exception):
    """The server holds as much as its limits allow: the client has to ask again later."""


@dataclass(frozen=True)
class Failure:
    """An error as the result of a future. The client raises it, and can continue."""

    message: str
    category: str = "server"  # "user", "server" or "unknown"

    @property
    def body(self) -> dict[str, JsonValue]:
        """Returns the JSON answer, which has status 200."""
        return {"error": self.message, "category": self.category}


def failure_of(error: BaseException) -> Failure:
    """Returns an exception as a result. Only the user's mistakes show their message in full."""
    if isinstance(error, UserError):
        return Failure(str(error), "user")
    return Failure(f"the server failed ({type(error).__name__}): see its log", "server")


Result = bytes | dict[str, JsonValue] | Failure


@dataclass(eq=False)
class Future:
    """The result of a request, once there is one."""

    request_id: str
    owner: str  # the name of the key that may read it
    created: float = field(default_factory=time.monotonic)
    result: Result | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    # Called in the event loop when there is a result.
    when_done: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Returns the bytes that the result takes, roughly."""
        # JSON results have only a few short fields.
        return len(self.result) if isinstance(self.result, bytes) else 256


@dataclass(eq=False)
class Ledger:
    """The promises of one owner."""

    by_id: dict[str, Future] = field(default_factory=dict)  # in the order of their creation
    num_bytes: int = 0  # of the results


class Futures:
    """All promises of the server, bounded for every owner in number and bytes, and in time."""

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        """most, most_bytes: of each owner."""
        self.most = most
        self.most_bytes = most_bytes
        self.seconds = seconds
        self.by_id: dict[str, Future] = {}  # in the order of their creation
        self.ledgers: dict[str, Ledger] = {}  # by owner

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all results."""
        return sum(ledger.num_bytes for ledger in self.ledgers.values())

    def new(self, owner: str, prefix: str = "") -> Future:
        """Returns a new promise. Raises TooBusyError if the owner has too many pending ones."""
        self.expire()
        ledger = self.ledgers.setdefault(owner, Ledger())
        if len(ledger.by_id) >= self.most and not self.drop_oldest_done(ledger):
            raise TooBusyError(f"{self.most} requests of this key are pending: --max-futures")
        future = Future(prefix + uuid.uuid4().hex, owner)
        self.by_id[future.request_id] = ledger.by_id[future.request_id] = future
        return future

    def finish(self, future: Future, result: Result) -> None:
        """Sets the result, and wakes the polls that wait for it."""
        if future.result is not None:
            return
        future.result = result
        future.is_done.set()
        if future.when_done is not None:
            future.when_done()
        if future.request_id not in self.by_id:
            return
        ledger = self.ledgers[future.owner]
        ledger.num_bytes += future.size
        # The new result is kept even if it exceeds the limit: its client has not read it yet.
        while ledger.num_bytes > self.most_bytes and self.drop_oldest_done(ledger, keep=future):
            pass

    def expire(self) -> None:
        """Drops the results that are too old."""
        horizon = time.monotonic() - self.seconds
        old = []
        for future in self.by_id.values():
            # In order of creation, so all later promises are younger.
            if future.created > horizon:
                break
            if future.result is not None:
                old.append(future)
        for future in old:
            self.drop(future)

    def drop_oldest_done(self, ledger: Ledger, keep: Future | None = None) -> bool:
        """Drops the oldest result of an owner. Returns whether there was one."""
        for future in ledger.by_id.values():
            if future.result is not None and future is not keep:
                self.drop(future)
                return True
        return False

    def drop(self, future: Future) -> None:
        """Forgets a promise, and frees the memory of its result."""
        del self.by_id[future.request_id]
        ledger = self.ledgers[future.owner]
        del ledger.by_id[future.request_id]
        if future.result is not None:
            ledger.num_bytes -= future.size
            # The logs of commands and of samples still have the promise, to know its number.
            future.result = b""
        if not ledger.by_id:
            del self.ledgers[future.owner]

    async def wait(self, future: Future, seconds: float) -> Result | None:
        """Returns the result, or None if there is none after `seconds`."""
        if future.result is None:
            try:
                await asyncio.wait_for(future.is_done.wait(), seconds)
            except TimeoutError:
                return None
        return future.result


@dataclass(eq=False)
class Command:
    """One numbered command of a model."""

    future: Future
    start: Callable[[], None]  # hands the command to the worker
    arrived: float = field(default_factory=time.monotonic)


class CommandLog:
    """The commands of one model, started in the order of their numbers, each once."""

    def __init__(self, most_pending: int) -> None:
        self.most_pending = most_pending
        self.next_number = 1
        self.waiting: dict[int, Command] = {}  # commands with a hole before them
        self.consumed: set[int] = set()  # numbers of refused calls that are still to come
        self.futures: dict[int, Future] = {}  # by number: the promise of each command

    def promised(self, number: int) -> Future | None:
        """Returns the promise of a command that arrived before, or None."""
        return self.futures.get(number)

    def check(self, number: int) -> None:
        """Raises UserError or TooBusyError for a number that cannot be taken."""
        if number < self.next_number:
            raise UserError(f"seq_id={number}: the model expects {self.next_number} or more")
        pending = sum(future.result is None for future in self.futures.values())
        if number >= self.next_number + self.most_pending or pending >= self.most_pending:
            raise TooBusyError(f"{pending} commands of the model are pending")

    def add(self, number: int, command: Command) -> None:
        """Starts a command, or keeps it until those before it have arrived."""
        self.futures[number] = command.future
        self.waiting[number] = command
        self.advance()

    def consume(self, number: int) -> None:
        """Counts the number of a refused call as done, so that the commands after it start."""
        # No honest client is further ahead than the window.
        if self.next_number <= number < self.next_number + self.most_pending:
            self.consumed.add(number)
            self.advance()

    def advance(self) -> None:
        """Starts every command whose turn has come."""
        while True:
            if self.next_number in self.consumed:
                self.consumed.remove(self.next_number)
            elif self.next_number in self.waiting:
                self.waiting.pop(self.next_number).start()
            else:
                break
            self.next_number += 1
        # A client repeats a command within minutes, and by then has not sent thousands more.
        for number in [n for n in self.futures if n < self.next_number - 4 * self.most_pending]:
            del self.futures[number]

    def fail_after_hole(self, seconds: float) -> list[Future]:
        """Gives up a hole that is older than `seconds`.

        Returns the promises of the commands that waited for it, and fail: a command whose
        predecessor is lost, such as a step without its gradient, must not run.
        """
        horizon = time.monotonic() - seconds
        if not any(command.arrived < horizon for command in self.waiting.values()):
            return []
        failed = [self.waiting[number].future for number in sorted(self.waiting)]
        # The client has sent all these numbers, so its next command has a higher one.
        self.next_number = max([*self.waiting, *self.consumed]) + 1
        self.waiting.clear()
        self.consumed.clear()
        return failed
