"""The order of commands, promises, sessions and keys, without a device."""

import asyncio
import itertools
import time

import pytest

from jzero.errors import UserError
from jzero.tinker.commands import Command, CommandLog, Failure, Future, Futures, TooBusyError
from jzero.tinker.sessions import Keys, Sessions, read_keys


def command(started: list[int], number: int) -> Command:
    return Command(Future(str(number), "me"), lambda: started.append(number))


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3, 4])))
def test_commands_start_in_order_whatever_the_order_of_arrival(order) -> None:
    log, started = CommandLog(10), []
    for number in order:
        log.add(number, command(started, number))
    assert started == [1, 2, 3, 4]


def test_the_first_chunk_may_come_last() -> None:
    log, started = CommandLog(10), []
    for number in (2, 3, 4):
        log.add(number, command(started, number))
    assert started == []
    log.add(1, command(started, 1))
    assert started == [1, 2, 3, 4]


def test_a_repeated_command_has_the_first_promise() -> None:
    log, started = CommandLog(10), []
    first = command(started, 1)
    log.add(1, first)
    assert log.promised(1) is first.future
    assert started == [1]


def test_a_refused_command_uses_its_number() -> None:
    log, started = CommandLog(10), []
    log.add(1, command(started, 1))
    log.consume(3)  # refused before the second has come
    log.add(4, command(started, 4))
    assert started == [1]
    log.add(2, command(started, 2))
    assert started == [1, 2, 4]
    with pytest.raises(UserError, match="expects 5"):
        log.check(3)


def test_the_window_is_bounded() -> None:
    log, started = CommandLog(3), []
    with pytest.raises(TooBusyError):
        log.check(4)
    for number in (1, 2, 3):
        log.check(number)
        log.add(number, command(started, number))
    with pytest.raises(TooBusyError):
        log.check(4)


def test_a_hole_is_given_up_and_what_waits_for_it_fails() -> None:
    log, started = CommandLog(10), []
    log.add(1, command(started, 1))
    late = command(started, 3)
    log.add(3, late)
    assert log.fail_after_hole(60) == []
    time.sleep(0.02)
    assert log.fail_after_hole(0.01) == [late.future]
    log.add(4, command(started, 4))
    assert started == [1, 4], "the command after a hole must not run, the next one must"


# -- promises --------------------------------------------------------------------------------------


def test_a_poll_waits_for_the_result() -> None:
    async def poll() -> None:
        futures = Futures(10, 10**6, 60)
        future = futures.new("me")
        assert await futures.wait(future, 0.01) is None
        asyncio.get_running_loop().call_later(0.02, futures.finish, future, b"done")
        assert await futures.wait(future, 10) == b"done"
        assert await futures.wait(future, 10) == b"done", "the answer to a poll may be lost"
        futures.finish(future, Failure("later"))
        assert await futures.wait(future, 10) == b"done", "a result never changes"

    asyncio.run(poll())


def test_promises_are_bounded_in_number_and_bytes() -> None:
    futures = Futures(3, 1000, 60)
    pending = [futures.new("me") for _ in range(3)]
    with pytest.raises(TooBusyError):
        futures.new("me")
    futures.finish(pending[0], b"x" * 600)
    futures.new("me")  # takes the place of the oldest result
    assert pending[0].request_id not in futures.by_id
    futures.finish(pending[1], b"x" * 600)
    futures.finish(pending[2], b"x" * 600)
    assert futures.num_bytes <= 1000 and pending[1].request_id not in futures.by_id


def test_old_results_are_dropped_and_pending_promises_are_not() -> None:
    futures = Futures(10, 1000, 0.01)
    done, pending = futures.new("me"), futures.new("me")
    futures.finish(done, b"x")
    time.sleep(0.02)
    futures.expire()
    assert list(futures.by_id) == [pending.request_id] and futures.num_bytes == 0


# -- sessions and keys -----------------------------------------------------------------------------


def test_a_session_belongs_to_its_key_and_ends_without_heartbeats() -> None:
    sessions = Sessions(1, 0.01)
    session = sessions.create("me", None)
    assert sessions.find("me", session.session_id) is session
    assert sessions.find("you", session.session_id) is None
    with pytest.raises(TooBusyError, match="--max-sessions"):
        sessions.create("you", None)
    time.sleep(0.02)
    assert sessions.expired() == [session]


def test_keys_name_their_owners(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the lab\nann tml-a\nbob tml-b\n")
    keys = read_keys(str(file))
    assert (keys.owner_of("tml-a"), keys.owner_of("tml-b")) == ("ann", "bob")
    assert keys.owner_of("tml-c") is None and keys.owner_of("") is None
    assert Keys({}).owner_of("tml-anything") == "local"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ann\n", "line 1"),
        ("ann sk-a\n", "begins with tml-"),
        ("ann tml-a\nbob tml-a\n", "line 2"),
        ("# nobody\n", "no key"),
    ],
)
def test_a_wrong_file_of_keys_is_one_line(tmp_path, text, reason) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UserError, match=reason):
        read_keys(str(file))
    with pytest.raises(UserError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))
