"""The hosts of one decoder agree between two device calls. Here each host is a thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import numpy as np
import pytest

from jzero.decoder.driver import Source
from jzero.decoder.lockstep import Gather, Lockstep, News
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Reply, Sequence
from jzero.hosts import interrupt

HOSTS = 3
Result = TypeVar("Result")


def gathers() -> list[Gather]:
    """Returns the `Gather` of every host."""
    barrier = threading.Barrier(HOSTS, timeout=10)
    told: list[News | None] = [None] * HOSTS

    def gather_of(host: int) -> Gather:
        def gather(news: News) -> list[News]:
            told[host] = news
            barrier.wait()
            everything = [one for one in told if one is not None]
            barrier.wait()
            return everything

        return gather

    return [gather_of(host) for host in range(HOSTS)]


class Grading(Source):
    """Grades the turns of the prompt with the number of its host, as soon as someone waits."""

    has_replies = True

    def __init__(self, host: int) -> None:
        self.host = host
        self.in_grading: list[Sequence] = []
        self.is_stopping = False

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        if sequence.prompt_id == self.host:
            self.in_grading.append(sequence)
        if self.is_stopping:
            raise interrupt.Interrupted(f"SIGTERM on host {self.host}")

    def replies(self, wait: bool) -> list[Reply]:
        if not wait:
            return []
        graded, self.in_grading = self.in_grading, []
        return [(sequence, [sequence.prompt_id, 7]) for sequence in graded]


def on_all_hosts(call: Callable[[Lockstep, Grading], Result]) -> list[Result]:
    """Returns what `call` returns on every host."""
    sources = [Grading(host) for host in range(HOSTS)]
    sides = [Lockstep(*one) for one in zip(sources, gathers(), strict=True)]
    with ThreadPoolExecutor(HOSTS) as threads:
        return [*threads.map(call, sides, sources)]


def end_turns(side: Lockstep) -> None:
    """Ends a turn of every prompt. Every host has its own objects for the same sequences."""
    for prompt_id in range(HOSTS):
        sequence = Sequence(prompt_id, 0, prompt_id, np.arange(3, dtype=np.int32), 9)
        side.turn_ended(cast(Scheduler, None), sequence)


def test_all_hosts_get_the_replies_of_each_in_one_order() -> None:
    def replies(side: Lockstep, source: Grading) -> list[object]:
        end_turns(side)
        assert [sequence.prompt_id for sequence in source.in_grading] == [source.host]
        side.receive()
        assert side.replies(wait=False) == []
        got = side.replies(wait=True)
        assert not side.in_grading
        return [(sequence.prompt_id, tokens) for sequence, tokens in got]

    assert on_all_hosts(replies) == [[(host, [host, 7]) for host in range(HOSTS)]] * HOSTS


def test_a_host_that_stops_stops_all_when_they_agree() -> None:
    def stop(side: Lockstep, source: Grading) -> str:
        source.is_stopping = source.host == 1
        end_turns(side)  # does not raise: the other hosts would wait for this one
        with pytest.raises(interrupt.Interrupted) as raised:
            side.receive()
        return str(raised.value)

    assert on_all_hosts(stop) == ["SIGTERM on host 1"] * HOSTS


def test_the_clock_is_that_of_the_first_host() -> None:
    def read(side: Lockstep, source: Grading) -> float:
        side.receive()
        return side.read_clock()

    clocks = on_all_hosts(read)
    assert clocks[0] > 0 and len(set(clocks)) == 1
