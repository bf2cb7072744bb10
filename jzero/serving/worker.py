"""The decoding thread: decodes the sequences of all requests together, in one endless run."""

import queue
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jzero.decoder.driver import Decoder, Phase, Source
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.serving.scored import ReplyOptions, scoring_of

# Requests choose their own filters, and calls are shorter while an answer is streamed.
REQUESTS = Samples(is_trained=False, has_choices=True)
STREAM_SECONDS = 0.05  # target for the time between two events of a stream
STEP_SECONDS_WEIGHT = 0.1  # weight of a slower call in the average


class StepClock:
    """Estimates the seconds of a decode step.

    The estimate follows a faster call at once and a slower call slowly, because a prefill or a
    compilation in between makes a call look slow.
    """

    def __init__(self) -> None:
        self.step_seconds = float("inf")  # before the first call

    def add(self, num_steps: float, seconds: float) -> None:
        """Adds a call of `num_steps` steps."""
        latest = seconds / num_steps
        slower = self.step_seconds + STEP_SECONDS_WEIGHT * (latest - self.step_seconds)
        self.step_seconds = latest if latest < self.step_seconds else slower

    def steps_within(self, seconds: float, most_steps: int) -> int:
        """Returns how many steps take `seconds`, from 1 to `most_steps`."""
        return max(1, min(most_steps, int(seconds / self.step_seconds)))


@dataclass(frozen=True)
class Progress:
    """A progress report: the listener may read the first `num_tokens` tokens of the sequence."""

    sample_index: int
    num_tokens: int
    finish_reason: str  # "" while the sequence is decoded


@dataclass(eq=False)
class Submission:
    """The sequences of one request, and the listener of their progress."""

    sequences: list[Sequence]
    listener: Callable[[Progress], None]  # called in the worker's thread
    is_streamed: bool  # report after every call, not only at the end
    options: ReplyOptions | None = None  # None: no scoring
    is_cancelled: bool = False  # the client has disconnected
    # By sample_index: tokens reported to the listener.
    num_reported: dict[int, int] = field(default_factory=dict)
    # By sample_index: the complete scorings of its tokens, in their order. The reported tokens have
    # their scores, if the options request them.
    scored: dict[int, list[Scoring]] = field(default_factory=lambda: defaultdict(list))

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. If not, the sequences are only scored."""
        return self.options is None or self.options.samples

    def cancel(self) -> None:
        """Cancels the sequences: waiting ones are dropped, running ones end with the next call.

        Any thread may call this. Finished sequences are not affected.
        """
        self.is_cancelled = True
        # The scheduler ends a sequence that has reached its limit.
        for sequence in self.sequences:
            sequence.length_limit = 0

    def report(self, sequence: Sequence) -> None:
        """Reports the progress of a sequence, if there is any since the last report."""
        num_tokens = self.count_ready(sequence)
        is_news = num_tokens > self.num_reported.get(sequence.sample_index, 0)
        # The last report is of all tokens.
        finish_reason = sequence.finish_reason if num_tokens == sequence.num_new else ""
        if self.is_cancelled or not (is_news or finish_reason):
            return
        self.num_reported[sequence.sample_index] = num_tokens
        self.listener(Progress(sequence.sample_index, num_tokens, finish_reason))

    def count_ready(self, sequence: Sequence) -> int:
        """Returns the number of sampled tokens that may be reported: those with their scores."""
        if self.options is None or not self.options.scores_samples:
            return sequence.num_new
        scored = self.scored[sequence.sample_index]
        return len(scored[-1].tokens) - len(sequence.prompt_tokens) if scored else 0


class DecodingWorker(Source):
    """Decodes submitted sequences (continuous batching): they join before the next device call.

    Sequences wait here, in the order of their submissions, until a slot is free, and can be dropped
    meanwhile. A sequence enters the scheduler with the other choices of its prompt, which share its
    prefill. A sequence to score enters the scheduler's scorer once it has ended, or immediately if
    no token is sampled. The tokens of a stream enter it as they are sampled, all that are new
    whenever the scores of those before them are complete.
    """

    def __init__(
        self, engine: Engine, text_tokenizer: PreTrainedTokenizerFast, max_waiting: int
    ) -> None:
        """`max_waiting` is the maximum number of sequences that wait for a slot."""
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.num_slots = engine.max_concurrent_decodes
        self.inbox: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self.waiting: deque[tuple[Sequence, Submission]] = deque()
        self.live: dict[Sequence, Submission] = {}  # sequences in the scheduler
        self.scoring: dict[Scoring, tuple[Sequence, Submission]] = {}  # in the scorer
        self.in_scorer: set[Sequence] = set()  # the sequences of `scoring`
        self.scheduler: Scheduler | None = None  # of the running thread
        # Keep enough sequences in the scorer to fill its rows, and leave the others here, where
        # they can be dropped.
        self.most_scoring = max(self.num_slots, engine.scoring_rows * engine.num_shards)
        self.clock = StepClock()
        self.last_admission = (0.0, 0)  # monotonic time, and `DecodeCounters.slot_steps` by then
        self.has_ended = False  # the thread has ended: no sequence will be decoded any more

        # Reservations cover sequences in slots and waiting ones.
        self.most_reserved = self.num_slots + max_waiting
        self.num_reserved = 0  # reserved sequences that are neither finished nor dropped
        self.lock = threading.Lock()  # guards num_reserved

    # -- any thread --------------------------------------------------------------------------------

    def reserve(self, count: int) -> bool:
        """Reserves room for sequences that will be submitted. Returns whether there was room.

        `submit` takes over the reservation of its sequences; `release` returns any other.
        """
        with self.lock:
            if self.num_reserved + count > self.most_reserved:
                return False
            self.num_reserved += count
            return True

    def release(self, count: int) -> None:
        """Releases reserved room."""
        with self.lock:
            self.num_reserved -= count

    def submit(self, submission: Submission) -> None:
        """Queues sequences that have a reservation. The decoding thread takes them."""
        self.inbox.put(submission)

    # -- the thread that decodes -------------------------------------------------------------------

    def decode_text(self, ids: list[int]) -> str:
        """Returns the text of token ids."""
        return tokenizer.decode(self.tokenizer, ids)

    def run(self, params: qwen.Params, key: tuple[int, int]) -> None:
        """Decodes until an error. The end of this thread ends the process."""
        phase = Phase(params, key, samples=REQUESTS)
        try:
            Decoder(self.engine, self.decode_text).run(phase, self)
        finally:
            # The main thread runs the server; the signal ends it.
            self.has_ended = True
            signal.raise_signal(signal.SIGINT)

    @property
    def counters(self) -> DecodeCounters:
        """Returns the counters of prefilled, decoded and scored tokens since the thread started."""
        return self.scheduler.counters if self.scheduler else DecodeCounters()

    def begin(self, run: Scheduler) -> None:
        """See `Source.begin`."""
        self.scheduler = run

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """See `Source.turn_ended`."""
        self.finish(sequence)

    def admit(self, run: Scheduler) -> Groups:
        """See `Source.admit`."""
        return self.admit_more()

    def finish(self, sequence: Sequence) -> None:
        """Scores or reports a sequence that the scheduler has finished."""
        self.score_or_report(sequence, self.live.pop(sequence))

    def score_or_report(self, sequence: Sequence, submission: Submission) -> None:
        """Submits the new tokens of a sequence to the scorer, and reports those that need no score.

        Releases the reservation of a sequence that has ended and needs no more scores.
        """
        if sequence in self.in_scorer:
            return  # its next tokens follow once it is back
        scoring = None
        if submission.options is not None and not submission.is_cancelled:
            scored = submission.scored[sequence.sample_index]
            scoring = scoring_of(submission.options, sequence, scored)
        if scoring is not None:
            assert self.scheduler is not None, "nothing is scored before the thread has begun"
            self.scoring[scoring] = sequence, submission
            self.in_scorer.add(sequence)
            self.scheduler.scorer.submit(scoring)
        elif sequence not in self.live:
            self.release(1)
        if scoring is None or submission.is_streamed:
            submission.report(sequence)

    def report_scored(self) -> None:
        """Reports the tokens with complete scores, and submits those after them to the scorer."""
        if self.scheduler is None:
            return
        for scoring in self.scheduler.scorer.take_finished():
            sequence, submission = self.scoring.pop(scoring)
            self.in_scorer.remove(sequence)
            submission.scored[sequence.sample_index].append(scoring)
            self.score_or_report(sequence, submission)

    def admit_more(self) -> Groups:
        """Reports progress, and returns as many sequences as there are free slots.

        Blocks while there is nothing to decode. See `Source.admit`.
        """
        self.time_calls()
        self.report_scored()
        # Only streams get intermediate reports; other replies are written at the end.
        for sequence, submission in self.live.items():
            if submission.is_streamed:
                self.score_or_report(sequence, submission)

        while True:
            self.take_submissions()
            groups = self.admit_waiting()
            # All may be empty after a scoring request for a prompt of one token, which has no
            # score.
            if groups or self.live or self.scoring:
                self.choose_call_steps()
                return groups

    def time_calls(self) -> None:
        """Measures the calls that the scheduler has read since `choose_call_steps`."""
        started, slot_steps = self.last_admission
        num_steps = (self.counters.slot_steps - slot_steps) / self.num_slots
        if num_steps:
            self.clock.add(num_steps, time.monotonic() - started)

    def choose_call_steps(self) -> None:
        """Sets the steps of the next call: as few as make a stream smooth."""
        # Fewer steps per call cost the host more time, so only streams get them.
        num_steps = self.engine.settings.decode_steps
        if any(submission.is_streamed for submission in self.live.values()):
            num_steps = self.clock.steps_within(STREAM_SECONDS, num_steps)
        self.engine.call_steps = num_steps
        self.last_admission = time.monotonic(), self.counters.slot_steps

    def take_submissions(self) -> None:
        """Moves submissions to the waiting sequences. Blocks while there is no work at all."""
        self.drop_cancelled()
        while not self.inbox.empty() or not (self.live or self.scoring or self.waiting):
            submission = self.inbox.get()
            self.waiting.extend((sequence, submission) for sequence in submission.sequences)
            self.drop_cancelled()

    def admit_waiting(self) -> Groups:
        """Returns the waiting groups that fit into free slots, and submits score-only sequences."""
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
                # No token is sampled, as with max_tokens=0 in OpenAI's API.
                sequence.finish_reason = "length"
                self.score_or_report(sequence, submission)
        return groups

    def take_choices(self) -> list[Sequence]:
        """Removes and returns the first waiting sequence and the other choices of its prompt."""
        # All choices of a prompt enter the scheduler together, so that one prefill serves them.
        prompt = self.waiting[0][0].prompt_id
        group: list[Sequence] = []
        # The choices of a prompt are adjacent, because they were submitted together.
        while self.waiting and self.waiting[0][0].prompt_id == prompt:
            sequence, submission = self.waiting.popleft()
            self.live[sequence] = submission
            group.append(sequence)
        return group

    def drop_cancelled(self) -> None:
        """Drops the waiting sequences of disconnected clients, both to sample and to score."""
        remaining = deque(pair for pair in self.waiting if not pair[1].is_cancelled)
        self.release(len(self.waiting) - len(remaining))
        self.waiting = remaining
        if self.scheduler is None:
            return
        unwanted = [scoring for scoring, pair in self.scoring.items() if pair[1].is_cancelled]
        for scoring in self.scheduler.scorer.drop(unwanted):
            sequence, _ = self.scoring.pop(scoring)
            self.in_scorer.remove(sequence)
            # A sequence that is still decoded is released at its end.
            if sequence not in self.live:
                self.release(1)
