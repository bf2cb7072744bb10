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
from jzero.rollout.engine import SCORING_ROWS, Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.scoring import Scoring
from jzero.rollout.sequence import DecodeCounters, Groups, Sequence
from jzero.serving.scored import ReplyOptions, scoring_of


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
    options: ReplyOptions | None = None  # None: nothing is scored
    is_cancelled: bool = False  # nobody wants to hear of them any more
    # By sample_index: how many tokens the listener has heard of.
    num_reported: dict[int, int] = field(default_factory=dict)
    # By sample_index: the scores that the listener finds once it hears of the end.
    scored: dict[int, Scoring] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. If not, the sequences are only scored."""
        return self.options is None or self.options.samples

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

    The scheduler gets a sequence only when one of its slots is free, and with it the other choices
    of its prompt, which share its prefill. Until then the sequence waits here, in the order of
    submissions, and can be dropped. A sequence of which something is scored goes to the scheduler's
    scorer once it has ended, or at once if nothing is sampled.
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
        self.scoring: dict[Scoring, tuple[Sequence, Submission]] = {}  # those of the scorer
        self.scheduler: Scheduler | None = None  # of the running thread
        self.most_scoring = max(self.num_slots, SCORING_ROWS * engine.num_shards)
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
        self.scheduler = Scheduler(self.engine, params, self.decode_text)
        try:
            for sequence in self.scheduler.run([], 0, 1.0, seed, admit_more=self.admit_more):
                self.finish(sequence)
        finally:
            self.has_ended = True
            signal.raise_signal(signal.SIGINT)

    @property
    def counters(self) -> DecodeCounters:
        """Returns what was prefilled, decoded and scored since the thread began."""
        return self.scheduler.counters if self.scheduler else DecodeCounters()

    def finish(self, sequence: Sequence) -> None:
        """Has a sequence scored that the scheduler has finished, or reports it."""
        self.score_or_report(sequence, self.live.pop(sequence))

    def score_or_report(self, sequence: Sequence, submission: Submission) -> None:
        """Gives a sequence that has ended to the scorer, or reports it if nothing is scored."""
        scoring = None
        if submission.options is not None and not submission.is_cancelled:
            scoring = scoring_of(submission.options, sequence)
        if scoring is None:
            self.release(1)
            submission.report(sequence)
            return
        assert self.scheduler is not None, "nothing is scored before the thread has begun"
        self.scoring[scoring] = sequence, submission
        self.scheduler.scorer.submit(scoring)

    def report_scored(self) -> None:
        """Reports the sequences whose scores have come."""
        if self.scheduler is None:
            return
        for scoring in self.scheduler.scorer.take_finished():
            sequence, submission = self.scoring.pop(scoring)
            submission.scored[sequence.sample_index] = scoring
            self.release(1)
            submission.report(sequence)

    def admit_more(self) -> Groups:
        """Reports progress, and returns as many sequences as there are free slots.

        Blocks while there is nothing to decode. See `Scheduler.run`.
        """
        self.report_scored()
        for sequence, submission in self.live.items():
            if submission.is_streamed:
                submission.report(sequence)

        while True:
            self.take_submissions()
            groups = self.admit_waiting()
            # Nothing is left to do for a prompt of one token whose score was asked for.
            if groups or self.live or self.scoring:
                return groups

    def take_submissions(self) -> None:
        """Moves what was submitted to the waiting sequences. Blocks while there are none."""
        self.drop_cancelled()
        while not self.inbox.empty() or not (self.live or self.scoring or self.waiting):
            submission = self.inbox.get()
            self.waiting.extend((sequence, submission) for sequence in submission.sequences)
            self.drop_cancelled()

    def admit_waiting(self) -> Groups:
        """Returns the waiting groups for which slots are free, and submits what is only scored."""
        groups: Groups = []
        while self.waiting:
            sequence, submission = self.waiting[0]
            if submission.samples:
                if len(self.live) >= self.num_slots:
                    break
                groups.append(self.take_choices())
            else:
                if len(self.scoring) >= self.most_scoring:
                    break
                self.waiting.popleft()
                sequence.finish_reason = "length"
                self.score_or_report(sequence, submission)
        return groups

    def take_choices(self) -> list[Sequence]:
        """Takes the first waiting sequence and the other choices of its prompt."""
        prompt = self.waiting[0][0].prompt_id
        group: list[Sequence] = []
        while self.waiting and self.waiting[0][0].prompt_id == prompt:
            sequence, submission = self.waiting.popleft()
            self.live[sequence] = submission
            group.append(sequence)
        return group

    def drop_cancelled(self) -> None:
        """Drops the waiting sequences whose client has left, to be sampled or to be scored."""
        wanted = deque(pair for pair in self.waiting if not pair[1].is_cancelled)
        self.release(len(self.waiting) - len(wanted))
        self.waiting = wanted
        if self.scheduler is None:
            return
        unwanted = [scoring for scoring, pair in self.scoring.items() if pair[1].is_cancelled]
        for scoring in self.scheduler.scorer.drop(unwanted):
            del self.scoring[scoring]
            self.release(1)
