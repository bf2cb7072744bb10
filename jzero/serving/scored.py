"""Log-probabilities of the prompt, and alternatives of tokens: requests to the scorer, and formats.

`scoring_of` selects the tokens to score: those of a choice that has ended, or the latest ones of a
choice that is streamed. The reply has the scores in OpenAI's format (`logprobs`) or in vLLM's
(`prompt_logprobs`).
"""

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import Sequence
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.serving.tools import CallReader

Json = dict[str, object]


@dataclass(frozen=True)
class ReplyOptions:
    """The options of a request that determine the form of its reply."""

    is_chat: bool
    is_streamed: bool
    wants_logprobs: bool
    wants_usage: bool  # in a stream; other replies always include it
    num_choices: int  # per prompt
    model: str  # the name in the request
    is_greedy: bool = False
    num_alternatives: int = 0  # number of most probable tokens for each token of `logprobs`
    echoes: bool = False  # the text and the `logprobs` start with the prompt
    prompt_alternatives: int | None = None  # number in `prompt_logprobs`; None: the reply has none
    returns_token_ids: bool = False
    samples: bool = True  # false if no token follows the prompt
    calls: CallReader | None = None  # reads tool calls; None without tools

    @property
    def scores_prompt(self) -> bool:
        """Whether the reply has log-probabilities of the prompt's tokens."""
        return self.prompt_alternatives is not None or (self.echoes and self.wants_logprobs)

    @property
    def scores_samples(self) -> bool:
        """Whether the reply needs alternatives beyond those that sampling records."""
        # Greedy decoding records the most probable token: the sampled one.
        num_recorded = 1 if self.is_greedy else 0
        return self.samples and self.wants_logprobs and self.num_alternatives > num_recorded

    @property
    def is_scored(self) -> bool:
        """Whether the engine scores any token for the reply."""
        return self.scores_prompt or self.scores_samples

    def count_logprobs(self, num_prompt: int, num_new: int) -> int:
        """Counts the log-probs that scoring adds for one prompt and its choices."""
        count = 0
        if self.prompt_alternatives is not None:
            count += num_prompt * (1 + self.prompt_alternatives)
        tokens = num_new if self.scores_samples else 0
        tokens += num_prompt if self.echoes and self.wants_logprobs else 0
        return count + self.num_choices * tokens * (1 + self.num_alternatives)


def scoring_of(
    options: ReplyOptions, sequence: Sequence, scored: SequenceOf[Scoring] = ()
) -> Scoring | None:
    """Returns the scoring of a choice's tokens after those of `scored`, or None if there are none.

    A streamed choice has several scorings, each from where the one before it ends.
    """
    # The tokens of the prompt are scored at temperature 1, and only once for all choices of the
    # prompt: with the first choice.
    num_prompt = len(sequence.prompt_tokens)
    is_first_choice = sequence.sample_index % options.num_choices == 0
    # The first token of a sequence has no score.
    first = 1 if options.scores_prompt and is_first_choice else num_prompt
    if scored:
        first = len(scored[-1].tokens)
    end = len(sequence) if options.scores_samples else num_prompt
    if first >= end:
        return None
    return Scoring(
        tokens=sequence.tokens.ids[:end],
        first=first,
        alternatives=max(options.num_alternatives, options.prompt_alternatives or 0),
        # Greedy sequences have temperature 0, at which there are no log-probabilities.
        temperature=sequence.temperature or 1.0,
        temperature_from=num_prompt,
        adapter=sequence.adapter,
    )


@dataclass(frozen=True)
class ScoredToken:
    """A token in the form that a reply needs."""

    token: int
    logp: float | None  # None: the first token of a prompt has no score
    rank: int = 0  # 1 for the most probable token; 0: unknown
    alternatives: tuple[tuple[int, float], ...] = ()  # tokens and log-probs, best first


def scored_tokens(scorings: SequenceOf[Scoring], start: int, end: int) -> list[ScoredToken]:
    """Returns the tokens start..end of a sequence with their scores.

    scorings: of the sequence, in the order of their tokens.
    """
    tokens = []
    for scoring in scorings:
        scores = scoring.scores
        for position in range(max(start, scoring.first), min(end, len(scoring.tokens))):
            i = position - scoring.first
            pairs = zip(scores.top_tokens[i].tolist(), scores.top_logps[i].tolist(), strict=True)
            tokens.append(
                ScoredToken(
                    token=int(scoring.tokens[position]),
                    logp=float(scores.logps[i]),
                    rank=int(scores.ranks[i]),
                    alternatives=tuple(pairs),
                )
            )
    assert len(tokens) == end - start, f"{len(tokens)=} of {start}..{end} were scored"
    return tokens


class LogprobWriter:
    """Writes scored tokens in OpenAI's and vLLM's formats."""

    def __init__(self, text_tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = text_tokenizer

    def piece(self, token: int) -> str:
        """Returns the text of one token, including special tokens."""
        return self.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)

    def completion(
        self, tokens: SequenceOf[ScoredToken], num_alternatives: int, text_offset: int
    ) -> Json:
        """Returns `logprobs` of a completion. The first token begins at `text_offset`."""
        pieces = [self.piece(item.token) for item in tokens]
        lengths = [len(piece) for piece in pieces[:-1]]
        offsets = list(itertools.accumulate(lengths, initial=text_offset)) if pieces else []
        return {
            "tokens": pieces,
            "token_logprobs": [item.logp for item in tokens],
            "text_offset": offsets,
            "top_logprobs": [self.by_piece(item, num_alternatives) for item in tokens],
        }

    def by_piece(self, item: ScoredToken, num_alternatives: int) -> dict[str, float] | None:
        """Returns the log-probabilities of a token and its alternatives, keyed by text."""
        if item.logp is None:
            return None
        # Several tokens may have the same text: the most probable one counts.
        # The token itself is always included, even if it is not among the most probable ones.
        pairs = [*item.alternatives[:num_alternatives], (item.token, item.logp)]
        by_piece: dict[str, float] = {}
        for token, logp in pairs:
            piece = self.piece(token)
            by_piece[piece] = max(logp, by_piece.get(piece, logp))
        return by_piece

    def chat(self, tokens: SequenceOf[ScoredToken], num_alternatives: int) -> Json:
        """Returns `logprobs` of a chat's choice."""
        content = [
            self.chat_token(item.token, item.logp)
            | {
                "top_logprobs": [
                    self.chat_token(token, logp)
                    for token, logp in item.alternatives[:num_alternatives]
                ]
            }
            for item in tokens
        ]
        return {"content": content, "refusal": None}

    def chat_token(self, token: int, logp: float | None) -> Json:
        """Returns one token of a chat's `logprobs`."""
        return {"token": self.piece(token), "logprob": logp, "bytes": None}

    def prompt(self, tokens: SequenceOf[ScoredToken], num_alternatives: int) -> list[Json | None]:
        """Returns vLLM's `prompt_logprobs`: for each token, its id and its alternatives by id."""
        return [self.by_token_id(item, num_alternatives) for item in tokens]

    def by_token_id(self, item: ScoredToken, num_alternatives: int) -> Json | None:
        """Returns a token and its alternatives by their ids, or None for the first token."""
        if item.logp is None:
            return None
        alternatives = item.alternatives[:num_alternatives]
        # The token itself comes first and may repeat as an alternative, which the dict then joins.
        ranked = [(item.token, item.logp, item.rank)]
        ranked += [(token, logp, rank) for rank, (token, logp) in enumerate(alternatives, start=1)]
        return {
            str(token): {"logprob": logp, "rank": rank, "decoded_token": self.piece(token)}
            for token, logp, rank in ranked
        }
