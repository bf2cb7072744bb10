"""Converts a sequence to a choice in OpenAI's format, complete or as the chunks of a stream."""

from collections.abc import Sequence as SequenceOf

from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import Sequence
from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.serving.scored import LogprobWriter, ReplyOptions, ScoredToken, scored_tokens
from jzero.serving.worker import Progress

Choice = dict[str, object]  # a JSON value
INCOMPLETE = "\ufffd"  # the tokenizer's output for an incomplete character


class ChoiceWriter:
    """Writes the chunks of one choice.

    A chunk cannot be taken back once it is sent. It therefore ends before a character with missing
    bytes, and before text that may become part of a stop string.
    """

    def __init__(
        self,
        options: ReplyOptions,
        sequence: Sequence,
        text_tokenizer: PreTrainedTokenizerFast,
        stop_strings: SequenceOf[str],
    ) -> None:
        """`stop_strings` are the server's; `sequence` has the stop strings of the request."""
        self.options = options
        self.sequence = sequence
        self.tokenizer = text_tokenizer
        self.logprob_writer = LogprobWriter(text_tokenizer)
        self.num_read = 0  # tokens of the sequence that `text` covers
        self.text = ""
        self.num_sent = 0  # characters
        self.has_written = False
        self.prompt_text = ""
        if options.echoes:
            ids = sequence.prompt_tokens.tolist()
            self.prompt_text = text_tokenizer.backend_tokenizer.decode(
                ids, skip_special_tokens=False
            )
        longest_stop = max(map(len, (*sequence.stop_strings, *stop_strings)), default=1)
        self.num_held_back = longest_stop - 1  # number of characters that may begin a stop string

    def write(
        self,
        progress: Progress,
        prompt_scores: SequenceOf[Scoring] = (),
        sample_scores: SequenceOf[Scoring] = (),
    ) -> Choice | None:
        """Returns the next chunk, or None if nothing can be sent yet.

        The final text is `sequence.turn_text`, which ends before the stop string.

        Args:
            prompt_scores: scores of the prompt, if the options request them.
            sample_scores: scores of the sampled tokens of this choice, if the options request them.
        """
        # The decoding thread may append tokens meanwhile: read only the reported ones.
        span = self.new_span(progress.num_tokens)
        new_ids = self.sequence.tokens.ids[span].tolist()
        new_text = tokenizer.decode(self.tokenizer, new_ids)
        # A real U+FFFD in the text only delays a chunk until the next token.
        is_complete = bool(new_text) and not new_text.endswith(INCOMPLETE)
        if not progress.finish_reason and not is_complete:
            return None

        text_offset = len(self.prompt_text) + len(self.text)
        self.text += new_text
        # At the end all text may be sent, and the calls in it are complete.
        calls: list[dict[str, object]] = []
        finish_reason = progress.finish_reason
        reader = self.options.calls
        if finish_reason:
            safe_text = self.sequence.turn_text
            if reader is not None:
                safe_text, calls = reader.split(safe_text)
            if calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        else:
            # Hold back the last characters: the next tokens may turn them into a stop string, or
            # into a call.
            safe_end = len(self.text) - self.num_held_back
            if reader is not None:
                safe_end = min(safe_end, reader.content_end(self.text))
            safe_text = self.text[: max(self.num_sent, safe_end)]

        is_first = not self.has_written
        self.has_written = True
        choice: Choice = {
            "index": self.sequence.sample_index,
            "finish_reason": finish_reason or None,
            "logprobs": None,
        }
        # Log-probabilities cover all new tokens, even if some of their text is held back.
        if self.options.wants_logprobs:
            tokens = self.new_tokens(progress.num_tokens, sample_scores)
            # The echoed prompt comes before the first chunk.
            if self.options.echoes and is_first:
                tokens = [*prompt_tokens(self.sequence, prompt_scores), *tokens]
                text_offset = 0
            choice["logprobs"] = self.write_logprobs(tokens, text_offset)
        if self.options.returns_token_ids:
            choice["token_ids"] = new_ids
            if is_first and not self.options.is_chat:
                choice["prompt_token_ids"] = self.sequence.prompt_tokens.tolist()
        if self.options.prompt_alternatives is not None and not self.options.is_chat:
            choice["prompt_logprobs"] = self.write_prompt_logprobs(prompt_scores)
        # Only the first chunk repeats the prompt's text.
        text = safe_text[self.num_sent :]
        choice |= self.write_body(self.prompt_text + text if is_first else text, is_first, calls)
        self.num_read = progress.num_tokens
        self.num_sent = len(safe_text)
        return choice

    @property
    def num_prompt(self) -> int:
        return len(self.sequence.prompt_tokens)

    def write_body(self, text: str, is_first: bool, calls: list[dict[str, object]]) -> Choice:
        """Returns the field that holds the text. Only the first message of a chat has a role."""
        if not self.options.is_chat:
            return {"text": text}
        message: dict[str, object] = {"role": "assistant"} if is_first else {}
        # In OpenAI's API a message of calls without words has no content.
        message["content"] = text or None if calls else text
        if not self.options.is_streamed:
            return {"message": message | ({"tool_calls": calls} if calls else {})}
        if calls:
            indexed = [{"index": index, **call} for index, call in enumerate(calls)]
            message["tool_calls"] = indexed
        return {"delta": message}

    def new_span(self, num_tokens: int) -> slice:
        """Returns the places of the tokens after the last chunk, up to `num_tokens` new tokens."""
        return slice(self.num_prompt + self.num_read, self.num_prompt + num_tokens)

    def new_tokens(self, num_tokens: int, sample_scores: SequenceOf[Scoring]) -> list[ScoredToken]:
        """Returns the tokens after the last chunk, with the log-probs recorded while sampling."""
        span = self.new_span(num_tokens)
        tokens = self.sequence.tokens
        sampled = zip(tokens.ids[span].tolist(), tokens.logps[span].tolist(), strict=True)
        if self.options.scores_samples:
            scored = scored_tokens(sample_scores, span.start, span.stop)
            return [
                ScoredToken(token, logp, item.rank, item.alternatives)
                for (token, logp), item in zip(sampled, scored, strict=True)
            ]
        # The most probable token is the one that greedy decoding chose, so no scoring is needed.
        if self.options.is_greedy:
            return [ScoredToken(token, logp, 1, ((token, logp),)) for token, logp in sampled]
        return [ScoredToken(token, logp) for token, logp in sampled]

    def write_logprobs(self, tokens: list[ScoredToken], text_offset: int) -> Choice:
        """Returns the log-probabilities of tokens. The first token begins at `text_offset`."""
        if self.options.is_chat:
            return self.logprob_writer.chat(tokens, self.options.num_alternatives)
        return self.logprob_writer.completion(tokens, self.options.num_alternatives, text_offset)

    def write_prompt_logprobs(self, prompt_scores: SequenceOf[Scoring]) -> list[Choice | None]:
        """Returns vLLM's `prompt_logprobs`."""
        assert self.options.prompt_alternatives is not None, f"{self.options=}"
        tokens = prompt_tokens(self.sequence, prompt_scores)
        return self.logprob_writer.prompt(tokens, self.options.prompt_alternatives)


def prompt_tokens(sequence: Sequence, prompt_scores: SequenceOf[Scoring]) -> list[ScoredToken]:
    """Returns the tokens of the prompt with their scores. The first token has no score."""
    first = ScoredToken(int(sequence.prompt_tokens[0]), None)
    return [first, *scored_tokens(prompt_scores, 1, len(sequence.prompt_tokens))]
