"""What a client gets to see of one sequence: a choice in OpenAI's shape, at once or in pieces."""

import itertools
from collections.abc import Sequence as SequenceOf

from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.sequence import Sequence
from jzero.serving.requests import ReplyOptions
from jzero.serving.worker import Progress

Choice = dict[str, object]  # a JSON value
INCOMPLETE = "\ufffd"  # how the tokenizer shows the bytes of a character that is not complete


class ChoiceWriter:
    """Writes the pieces of one choice.

    What was sent is never taken back, so a piece ends before a character whose bytes are not all
    there, and before text that the next tokens may turn into a stop string.
    """

    def __init__(
        self,
        options: ReplyOptions,
        sequence: Sequence,
        text_tokenizer: PreTrainedTokenizerFast,
        stop_strings: SequenceOf[str],
    ) -> None:
        """`stop_strings` are the server's; the request's own are in `sequence`."""
        self.options = options
        self.sequence = sequence
        self.tokenizer = text_tokenizer
        self.num_read = 0  # tokens of the sequence that `text` has
        self.text = ""
        self.num_sent = 0  # characters
        longest_stop = max(map(len, (*sequence.stop_strings, *stop_strings)), default=1)
        self.num_held_back = longest_stop - 1  # characters that may begin a stop string

    def write(self, progress: Progress) -> Choice | None:
        """Returns what is new, or None if nothing can be sent yet.

        At the end the text is the sequence's own, which ends before the stop string.
        """
        new_ids = self.sequence.tokens[self.num_read : progress.num_tokens]
        new_text = tokenizer.decode(self.tokenizer, new_ids)
        is_complete = bool(new_text) and not new_text.endswith(INCOMPLETE)
        if not progress.finish_reason and not is_complete:
            return None

        text_offset = len(self.text)
        self.text += new_text
        if progress.finish_reason:
            safe_text = self.sequence.turn_text
        else:
            safe_end = max(self.num_sent, len(self.text) - self.num_held_back)
            safe_text = self.text[:safe_end]

        choice: Choice = {
            "index": self.sequence.sample_index,
            "finish_reason": progress.finish_reason or None,
            "logprobs": None,
        }
        if self.options.wants_logprobs:
            logps = self.sequence.logps[self.num_read : progress.num_tokens]
            choice["logprobs"] = self.write_logprobs(new_ids, logps, text_offset)
        choice |= self.write_body(safe_text[self.num_sent :], is_first=self.num_read == 0)
        self.num_read = progress.num_tokens
        self.num_sent = len(safe_text)
        return choice

    def write_body(self, text: str, is_first: bool) -> Choice:
        """Returns the field that holds the text. Only the first message of a chat has a role."""
        if not self.options.is_chat:
            return {"text": text}
        role = {"role": "assistant"} if is_first else {}
        name = "delta" if self.options.is_streamed else "message"
        return {name: role | {"content": text}}

    def write_logprobs(self, ids: list[int], logps: list[float], text_offset: int) -> Choice:
        """Returns the log-probabilities of tokens, the first of which begins at `text_offset`."""
        pieces = [
            self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
            for token in ids
        ]
        pairs = list(zip(pieces, logps, strict=True))
        if self.options.is_chat:
            content = [
                {"token": piece, "logprob": logp, "bytes": None, "top_logprobs": []}
                for piece, logp in pairs
            ]
            return {"content": content, "refusal": None}
        lengths = [len(piece) for piece in pieces[:-1]]
        return {
            "tokens": pieces,
            "token_logprobs": logps,
            "text_offset": list(itertools.accumulate(lengths, initial=text_offset)),
            "top_logprobs": [{piece: logp} for piece, logp in pairs],
        }
