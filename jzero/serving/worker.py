"""The thread that decodes: the sequences of all requests together, in one endless run."""

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.engine import Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import Groups, Sequence


@dataclass(frozen=True)
class Progress:
    """How far a sequence is. The listener reads its first `num_tokens` tokens."""

    sample_index: int
    num_tokens: int
    finish_reason: str  # "" while it runs


@dataclass(eq=False)
class Submission:
    """The sequences of one request, and who wants to hear of them."""

    sequences: list[Sequence]
    listener: Callable[[Progress], None]  # called in the worker's thread
    is_streamed: bool  # the listener hears of every call, and not only of the end
    is_cancelled: bool = False  # nobody wants to hear of them any more
    # By sample_index: how many tokens the listener has heard of.
    num_reported: dict[int, int] = field(default_factory=dict)

    def cancel(self) -> None:
        """Gives up the sequences: those that wait are dropped, the others end with the next call.

        Any thread may call this. Does nothing to sequences that are finished.
        """
        self.is_cancelled = True
        for sequence in self.sequences:
            sequence.length_limit = 0

    def report(self, sequence: Sequence) -> None:
        """Tells the listener how far a sequence is, if there is news of it."""
        num_tokens = len(sequence.tokens)
        is_news = num_tokens > self.num_reported.get(sequence.sample_index, 0)
        if self.is_cancelled or not (is_news or sequence.finish_reason):
            return
        self.num_reported[sequence.sample_index] = num_tokens
        self.listener(Progress(sequence.sample_index, num_tokens, sequence.finish_reason))


class DecodingWorker:
    """Decodes what is submitted. New sequences join before the next call of the device.

    The scheduler gets a sequence only when one of its slots is free. Until then the sequence waits
    here, in the order of submissions, and can be dropped.
    """

    def __init__(
        self, engine: Engine, text_tokenizer: PreTrainedTokenizerFast, max_waiting: int
    ) -> None:
        """`max_waiting` is the number of sequences that may wait for a slot."""
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.num_slots = engine.max_concurrent_decodes
        self.inbox: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self.waiting: deque[tuple[Sequence, Submission]] = deque()
        self.live: dict[Sequence, Submission] = {}  # sequences that the scheduler has
        self.has_ended = False  # the thread has: nothing will be decoded any more

        self.most_reserved = self.num_slots + max_waiting
        self.num_reserved = 0  # sequences that were reserved and are neither finished nor dropped
        self.lock = threading.Lock()  # of num_reserved

    # -- any thread --------------------------------------------------------------------------------

    def reserve(self, count: int) -> bool:
        """Reserves room for sequences that will be submitted. Returns whether there was room.

        `submit` takes over the reservation of its sequences; `release` gives up the others.
        """
        with self.lock:
            if self.num_reserved + count > self.most_reserved:
                return False
            self.num_reserved += count
            return True

    def release(self, count: int) -> None:
        """Gives back reserved room."""
        with self.lock:
            self.num_reserved -= count

    def submit(self, submission: Submission) -> None:
        """Takes sequences for which there is a reservation."""
        self.inbox.put(submission)

    # -- the thread that decodes -------------------------------------------------------------------

    def decode_text(self, ids: list[int]) -> str:
        """Returns the text of token ids."""
        return tokenizer.decode(self.tokenizer, ids)

    def run(self, params: qwen.Params, seed: jax.Array) -> None:
        """Decodes until an error. The end of this thread is the end of the process."""
        scheduler = Scheduler(self.engine, params, self.decode_text)
        try:
            for sequence in scheduler.run([], 1, 1.0, seed, admit_more=self.admit_more):
                self.finish(sequence)
        finally:
            self.has_ended = True
            signal.raise_signal(signal.SIGINT)

    def finish(self, sequence: Sequence) -> None:
        """Reports a sequence that the scheduler has finished."""
        submission = self.live.pop(sequence)
        self.release(1)
        submission.report(sequence)

    def admit_more(self) -> Groups:
        """Reports progress, and returns as many sequences as there are free slots.

        Blocks while there is nothing to decode. See `Scheduler.run`.
        """
        for sequence, submission in self.live.items():
            if submission.is_streamed:
                submission.report(sequence)

        self.drop_cancelled()
        while not self.inbox.empty() or not (self.live or self.waiting):
            submission = self.inbox.get()
            self.waiting.extend((sequence, submission) for sequence in submission.sequences)
            self.drop_cancelled()

        groups: Groups = []
        while self.waiting and len(self.live) < self.num_slots:
            sequence, submission = self.waiting.popleft()
            self.live[sequence] = submission
            groups.append([sequence])
        return groups

    def drop_cancelled(self) -> None:
        """Drops the waiting sequences whose client has left."""
        wanted = deque(pair for pair in self.waiting if not pair[1].is_cancelled)
        self.release(len(self.waiting) - len(wanted))
        self.waiting = wanted
