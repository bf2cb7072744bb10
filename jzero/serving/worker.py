"""The decoding thread: decodes the sequences of all requests together, in one endless run."""

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import groupby

from jzero.decoder.driver import Decoder, Phase
from jzero.decoder.engine import Engine
from jzero.decoder.inbox import REQUESTS, Inbox, Request
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.serving.scored import ReplyOptions, scoring_of

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
    choices: list["Choices"] = field(default_factory=list)  # once it is submitted
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
        """Cancels the requests of the submission. Any thread may call this."""
        self.is_cancelled = True
        for choices in self.choices:
            choices.cancel()

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


class Choices(Request):
    """The choices of one prompt of a submission."""

    def __init__(
        self, worker: "DecodingWorker", submission: Submission, sequences: list[Sequence]
    ) -> None:
        self.worker = worker
        self.submission = submission
        self.sequences = sequences
        self.is_cancelled = submission.is_cancelled
        self.num_begun = 0
        self.scored: dict[Scoring, Sequence] = {}  # what the scorer has

    @property
    def num_waiting(self) -> int:
        """See `Request.num_waiting`."""
        return len(self.sequences) - self.num_begun if self.submission.samples else 0

    @property
    def prefill(self) -> Hashable:
        """All choices of a prompt share its prefill."""
        return self.sequences[0].prompt_id

    def begin(self) -> bool:
        """See `Request.begin`. Sequences of which no token is sampled enter the scorer."""
        if not self.submission.samples:
            self.num_begun = len(self.sequences)
            for sequence in self.sequences:
                # As with max_tokens=0 in OpenAI's API.
                sequence.finish_reason = "length"
                self.score_or_report(sequence)
        return True

    def begin_samples(self, count: int) -> list[Sequence]:
        """See `Request.begin_samples`."""
        first = self.num_begun
        self.num_begun += count
        return self.sequences[first : self.num_begun]

    def sample_ended(self, sequence: Sequence) -> None:
        """Scores or reports a sequence that the scheduler has finished."""
        self.score_or_report(sequence)

    def scoring_ended(self, scoring: Scoring) -> None:
        """Reports the tokens with complete scores, and submits those after them to the scorer."""
        sequence = self.scored.pop(scoring)
        self.submission.scored[sequence.sample_index].append(scoring)
        self.score_or_report(sequence)

    def dropped(self) -> None:
        """Releases the sequences that have not begun."""
        self.worker.release(len(self.sequences) - self.num_begun)

    def scoring_dropped(self, scoring: Scoring) -> None:
        """Forgets a sequence that the scorer has dropped."""
        # A sequence that is still decoded is released at its end.
        if self.scored.pop(scoring) not in self.worker.live:
            self.worker.release(1)

    def score_or_report(self, sequence: Sequence) -> None:
        """Submits the new tokens of a sequence to the scorer, and reports those that need no score.

        Releases the reservation of a sequence that has ended and needs no more scores.
        """
        submission, worker = self.submission, self.worker
        if sequence in self.scored.values():
            return  # its next tokens follow once it is back
        scoring = None
        if submission.options is not None and not submission.is_cancelled:
            scored = submission.scored[sequence.sample_index]
            scoring = scoring_of(submission.options, sequence, scored)
        if scoring is not None:
            self.scored[scoring] = sequence
            worker.score(self, scoring)
        elif sequence not in worker.live:
            worker.release(1)
        if scoring is None or submission.is_streamed:
            submission.report(sequence)

    def fail(self, error: BaseException) -> None:
        """See `Request.fail`: nothing of such a request can fail by itself."""
        raise error


class DecodingWorker(Inbox[Choices]):
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
        # Reservations cover sequences in slots and waiting ones.
        super().__init__(engine, engine.max_concurrent_decodes + max_waiting)
        self.tokenizer = text_tokenizer
        self.step_clock = StepClock()
        self.last_admission = (0.0, 0)  # monotonic time, and `DecodeCounters.slot_steps` by then
        self.has_ended = False  # the thread has ended: no sequence will be decoded any more

    # -- any thread --------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Queues sequences that have a reservation. The decoding thread takes them."""
        # The choices of a prompt are adjacent, because they were submitted together.
        for _, choices in groupby(submission.sequences, lambda sequence: sequence.prompt_id):
            submission.choices.append(Choices(self, submission, list(choices)))
        self.post(lambda: self.waiting.extend(submission.choices))

    @property
    def counters(self) -> DecodeCounters:
        """Returns the counters of prefilled, decoded and scored tokens since the thread started."""
        return self.scheduler.counters if self.scheduler else DecodeCounters()

    # -- the thread that decodes -------------------------------------------------------------------

    def decode_text(self, ids: list[int]) -> str:
        """Returns the text of token ids."""
        return tokenizer.decode(self.tokenizer, ids)

    def serve(self, params: qwen.Params, key: tuple[int, int]) -> None:
        """Decodes until an error. The end of this thread ends the process."""
        phase = Phase(params, key, samples=REQUESTS)
        try:
            Decoder(self.engine, self.decode_text).run(phase, self)
        finally:
            # The main thread runs the server; the signal ends it.
            self.has_ended = True
            signal.raise_signal(signal.SIGINT)

    def admit(self, run: Scheduler) -> Groups:
        """Reports progress, and returns as many sequences as there are free slots.

        Blocks while there is nothing to decode. See `Source.admit`.
        """
        self.time_calls()
        self.take_scored()
        # Only streams get intermediate reports; other replies are written at the end.
        for sequence, choices in self.live.items():
            if choices.submission.is_streamed:
                choices.score_or_report(sequence)

        while True:
            self.run_posted(must_wait=self.is_idle)
            self.drop_cancelled()
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
            self.step_clock.add(num_steps, time.monotonic() - started)

    def choose_call_steps(self) -> None:
        """Sets the steps of the next call: as few as make a stream smooth."""
        # Fewer steps per call cost the host more time, so only streams get them.
        num_steps = self.engine.settings.decode_steps
        if any(choices.submission.is_streamed for choices in self.live.values()):
            num_steps = self.step_clock.steps_within(STREAM_SECONDS, num_steps)
        self.engine.call_steps = num_steps
        self.last_admission = time.monotonic(), self.counters.slot_steps
