"""One driver of the decoder: it makes, drives and cancels every scheduler of the product.

    decoder = Decoder(engine, text_of)
    counters = decoder.run(phase, source)

A `Phase` is what all sequences of a run share. A `Source` decides which sequences join it, and
hears when their turns end. The sources are

- `Batch`: given groups, for a model in a script and for a chat;
- `rollout.sampler.GradedBatch`: the groups of a step, an evaluation or a job's request, graded
  while others decode; `rollout.async_stream` adds groups by their staleness;
- `inbox.Inbox`: requests that arrive from other threads, of `serving.worker` and
  `tinker.sampling`;
- `lockstep.Lockstep`: any of them, on a decoder of several hosts.

A training step, an evaluation and a version of asynchronous RL are short phases, because weights
and KV leave the devices before an update. A server is one long phase.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int32

from jzero.decoder.engine import ROLLOUTS, Engine, Samples
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Reply, Sequence
from jzero.hosts import collectives
from jzero.model import qwen


@dataclass(frozen=True)
class Phase:
    """What the sequences of a run of the decoder share."""

    params: qwen.Params  # the decoder's weights
    key: tuple[int, int]  # the noise is a function of it, Sequence.request_id and the position
    group_size: int = 0  # the most sequences of a group, with which a prefill is compiled; 0: any
    temperature: float = 1.0  # of sequences without one of their own
    version: int = 0  # policy version of `params`, which sampled tokens record
    samples: Samples = ROLLOUTS


class Source:
    """Decides what a decoder decodes. It is called in the decoding thread, between device calls.

    A subclass overrides what it needs: this class admits nothing.
    """

    has_replies: bool = False  # whether turns get replies (see `replies`)

    def begin(self, run: Scheduler) -> None:
        """Is called once, before anything is admitted."""

    def receive(self) -> None:
        """Takes what has arrived at this host. Called before `admit`.

        On several hosts `admit` follows once they have agreed (see `lockstep`).
        """

    def admit(self, run: Scheduler) -> Groups | None:
        """Returns further groups to decode. None ends the run, and leaves what is unfinished.

        Called before every device call, also to report progress. It may block if nothing is
        decoded. The run also ends if there is nothing to decode, to score or to wait for.
        """
        return []

    def drains(self) -> bool:
        """Whether no further turn begins. The run then ends with the turns that have begun."""
        return False

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """Takes a sequence whose turn has ended."""

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the replies that have arrived to turns that ended (see `Scheduler.run`)."""
        raise NotImplementedError

    def past_responses(self, sequence: Sequence) -> Iterable[Int32[np.ndarray, " tokens"]]:
        """Returns the responses of earlier runs to the prompt of a sequence, for drafts."""
        return ()


class Batch(Source):
    """Given groups, which are decoded to their ends."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._has_begun = False

    def admit(self, run: Scheduler) -> Groups | None:
        """See `Source.admit`. All groups enter together, in their order."""
        if (more := self.more()) is None:
            return None
        first = [] if self._has_begun else self.groups
        self._has_begun = True
        return [*first, *more]

    def more(self) -> Groups | None:
        """Returns further groups, as `admit` does."""
        return []


@dataclass(frozen=True)
class Decoder:
    """An engine, and the tokenizer whose tokens it samples."""

    engine: Engine
    text_of: Callable[[list[int]], str]

    def run(self, phase: Phase, source: Source) -> DecodeCounters:
        """Decodes what `source` admits until it ends, and returns the counts of this run.

        The engine is free afterwards, also after an exception.
        """
        scheduler = Scheduler(
            self.engine, phase.params, self.text_of, phase.samples, source.past_responses
        )

        def admit_more() -> Groups | None:
            source.receive()
            return source.admit(scheduler)

        try:
            source.begin(scheduler)
            for sequence in scheduler.run(
                [],
                phase.group_size,
                phase.temperature,
                make_seed(self.engine, phase.key),
                version=phase.version,
                poll_replies=source.replies if source.has_replies else None,
                admit_more=admit_more,
                drain=source.drains,
            ):
                source.turn_ended(scheduler, sequence)
        finally:
            # Frees the pages of sequences that are unfinished.
            scheduler.cancel()
        return scheduler.counters


@jax.jit
def _fold_key(words: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(words[0]), words[1])


def make_seed(engine: Engine, key: tuple[int, int]) -> jax.Array:
    """Returns the random key of two integers, replicated over the engine's devices."""
    replicated = NamedSharding(engine.mesh, P())
    return _fold_key(collectives.put(np.array(key, np.uint32), replicated))
