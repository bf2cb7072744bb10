"""The thread that decodes: the sequences of all requests together, in one endless run."""

import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Submission:
    """The sequences of one request, and who wants to hear of them."""

    sequences: list[Sequence]
    listener: Callable[[Progress], None]  # called in the worker's thread
    is_streamed: bool  # the listener hears of every call, and not only of the end

    def report(self, sequence: Sequence) -> None:
        """Tells the listener how far a sequence is."""
        progress = Progress(sequence.sample_index, len(sequence.tokens), sequence.finish_reason)
        self.listener(progress)


class DecodingWorker:
    """Decodes what is submitted. New sequences join before the next call of the device."""

    def __init__(self, engine: Engine, text_tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.inbox: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        self.live: dict[Sequence, Submission] = {}  # sequences that are not finished

    def submit(self, submission: Submission) -> None:
        """Takes sequences. Any thread may call this."""
        self.inbox.put(submission)

    def decode_text(self, ids: list[int]) -> str:
        """Returns the text of token ids."""
        return tokenizer.decode(self.tokenizer, ids)

    def run(self, params: qwen.Params, seed: jax.Array) -> None:
        """Decodes until an error. The end of this thread is the end of the process."""
        scheduler = Scheduler(self.engine, params, self.decode_text)
        try:
            for sequence in scheduler.run([], 1, 1.0, seed, admit_more=self.admit_more):
                self.live.pop(sequence).report(sequence)
        finally:
            signal.raise_signal(signal.SIGINT)

    def admit_more(self) -> Groups:
        """Reports progress, and returns what was submitted since; see `Scheduler.run`.

        Blocks while there is nothing to decode.
        """
        for sequence, submission in self.live.items():
            if submission.is_streamed:
                submission.report(sequence)
        groups: Groups = []
        while not self.live or not self.inbox.empty():
            submission = self.inbox.get()
            for sequence in submission.sequences:
                self.live[sequence] = submission
                groups.append([sequence])
        return groups
