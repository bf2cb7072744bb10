"""Decoders of several hosts: between two device calls their hosts agree, and then decide alike.

    decoder.run(phase, Lockstep(source, gather))

All hosts of a decoder run the same scheduler over the same sequences, and dispatch the same
programs in the same order. So a source has to return the same on all of them. What only one host
can know is its `News`: the replies to the turns that it has graded, a reason to stop, and its
clock. A `Lockstep` gathers the news before every device call, and all hosts take the same from it.

`Gather` is how news travel. The hosts of a training run grade all their turns, and exchange values
(`gather_over`). In a Tinker server only process 0 has news: the requests of clients and training
calls, which it publishes as they begin, and its clock, which it publishes last (`tinker.devices`).
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jzero.decoder.driver import Source
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Groups, Reply, Sequence
from jzero.hosts import collectives, interrupt


class News(NamedTuple):
    """What a host tells the other hosts of its decoder. It can be written as JSON."""

    clock: float  # `time.monotonic` of the host
    stop: str  # why all hosts have to stop; "" if they do not
    # Replies that arrived at the host: `Sequence.prompt_id`, `Sequence.sample_index`, and tokens.
    replies: list[tuple[int, int, list[int] | None]]


# Takes the news of this host, and returns those of all hosts that have any, in one order. All hosts
# of a decoder call it together.
Gather = Callable[[News], list[News]]


def gather_over(exchange: collectives.Exchange) -> Gather:
    """Returns a `Gather` for hosts that all have news."""

    def gather(news: News) -> list[News]:
        return [News(*values) for values in exchange.gather((news.clock, news.stop, news.replies))]

    return gather


class Lockstep(Source):
    """A source whose replies, reasons to stop and clock are the same on all hosts of a decoder.

    The source itself replies only to the turns that its host has graded. If one of the hosts stops,
    all of them raise Interrupted.
    """

    def __init__(self, source: Source, gather: Gather) -> None:
        self.source = source
        self.gather = gather
        self.has_replies = source.has_replies
        self.clock = 0.0  # of the first host, when the hosts agreed last
        self.seconds_waited = 0.0  # for replies, with nothing to decode
        self.stop = ""  # why this host has to stop
        # By prompt_id and sample_index: the turns without a reply, of all hosts.
        self.in_grading: dict[tuple[int, int], Sequence] = {}
        self.arrived: list[Reply] = []  # replies that the scheduler does not have yet

    def read_clock(self) -> float:
        """Returns the seconds of a clock that is the same on all hosts."""
        return self.clock

    def begin(self, run: Scheduler) -> None:
        """See `Source.begin`."""
        self.source.begin(run)

    def receive(self) -> None:
        """See `Source.receive`. The hosts agree."""
        self.agree(wait=False)

    def admit(self, run: Scheduler) -> Groups | None:
        """See `Source.admit`."""
        return self.source.admit(run)

    def drains(self) -> bool:
        """See `Source.drains`."""
        return self.source.drains()

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """See `Source.turn_ended`."""
        if self.has_replies:
            self.in_grading[sequence.prompt_id, sequence.sample_index] = sequence
        try:
            self.source.turn_ended(run, sequence)
        except interrupt.Interrupted as error:
            # The others would wait for this host: all stop when they agree.
            self.stop = str(error)

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the replies that have arrived at any host (see `Source.replies`)."""
        if wait and not self.arrived:
            start = time.perf_counter()
            self.agree(wait=True)
            self.seconds_waited += time.perf_counter() - start
        arrived, self.arrived = self.arrived, []
        return arrived

    def past_responses(self, sequence: Sequence) -> Iterable[Int32[np.ndarray, " tokens"]]:
        """See `Source.past_responses`."""
        return self.source.past_responses(sequence)

    def agree(self, wait: bool) -> None:
        """Takes the news of all hosts.

        wait: a host that grades turns waits until one of them has its reply.
        """
        gathered = self.gather(self.news(wait))
        self.clock = gathered[0].clock
        for news in gathered:
            if news.stop:
                raise interrupt.Interrupted(news.stop)
        for news in gathered:
            for prompt_id, sample_index, tokens in news.replies:
                self.arrived.append((self.in_grading.pop((prompt_id, sample_index)), tokens))

    def news(self, wait: bool) -> News:
        """Returns the news of this host."""
        replies: list[Reply] = []
        try:
            self.source.receive()
            if self.has_replies and not self.stop:
                replies = self.source.replies(wait)
        except interrupt.Interrupted as error:
            self.stop = str(error)
        return News(
            time.monotonic(),
            self.stop,
            [(sequence.prompt_id, sequence.sample_index, tokens) for sequence, tokens in replies],
        )
