"""Supervised examples: text or chat messages -> token ids, and which of them are trained on.

The tokens of a conversation are those that decoding would have produced: each response is encoded
by itself. If the whole text were encoded at once, tokens could reach across the border between a
prompt and its response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast

# One message of a chat: "role" and "content".
Message = Mapping[str, str]
# A row of a data set: {"messages": [...]} or {"prompt": ..., "completion": ...}.
ExampleRow = Mapping[str, str | list[Message]]


@dataclass(frozen=True)
class Example:
    """A sequence of tokens, and for each of them whether it is trained on."""

    tokens: list[int]
    trained: list[bool]

    @property
    def num_trained(self) -> int:
        """Number of tokens that are trained on."""
        return sum(self.trained)


def encode_completion(
    tok: PreTrainedTokenizerFast,
    prompt: str,
    completion: str,
) -> Example:
    """Encodes a prompt and its completion. The completion and the end-of-sequence token that is put
    after it are trained on.
    """
    before = tokenizer.prompt_ids(tok, prompt)
    previous = before[-1] if before else None
    after = [*tokenizer.continuation_ids(tok, completion, previous), tok.eos_token_id]
    return Example(before + after, [False] * len(before) + [True] * len(after))


def encode_conversation(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    first_trained: int,
    keep_end: bool = False,
) -> Example:
    """Encodes messages with the tokenizer's chat template.

    The assistant's messages from index `first_trained` on are trained on, end of turn included.
    What the template puts after the last of them is left out, as nothing in it is trained on,
    unless `keep_end` is true.

    Raises UserError if a message holds the text that ends turns, or if the template renders earlier
    turns differently once later ones follow.
    """
    text = tokenizer.render(tok, messages, generate=False)
    end_of_turn = tokenizer.end_of_turn(tok)
    if any(end_of_turn in str(message["content"]) for message in messages):
        raise UserError(
            f"a message of sft.data holds {end_of_turn}, which ends turns in this chat template: "
            "remove it"
        )

    tokens: list[int] = []
    trained: list[bool] = []

    def append(piece: str, is_trained: bool) -> None:
        if tokens:
            ids = tokenizer.continuation_ids(tok, piece, tokens[-1])
        else:
            ids = tokenizer.encode(tok, piece)
        tokens.extend(ids)
        trained.extend([is_trained] * len(ids))

    position = 0  # characters of `text` that are encoded
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_trained:
            continue
        before = tokenizer.render(tok, messages[:index])
        if not text.startswith(before):
            raise UserError(
                "the chat template writes earlier turns anew when later ones come: "
                "set sft.chat_template"
            )
        start = len(before)
        stop = text.index(end_of_turn, start) + len(end_of_turn)
        append(text[position:start], is_trained=False)
        append(text[start:stop], is_trained=True)
        position = stop
    if keep_end and position < len(text):
        append(text[position:], is_trained=False)
    return Example(tokens, trained)


def encode_row(
    tok: PreTrainedTokenizerFast, row: ExampleRow, loss: str, system_prompt: str = ""
) -> Example:
    """Encodes a row with messages, or with a prompt and a completion (both text or both messages).

    `loss` is sft.loss: "assistant" trains on what the assistant says, "all" on every token of the
    text but the first, which nothing predicts. `system_prompt` is sft.system_prompt: it comes
    before messages that do not begin with a system prompt of their own.
    """
    keep_end = loss == "all"
    if "messages" in row:
        messages = add_system_prompt(messages_of(row, "messages"), system_prompt)
        example = encode_conversation(tok, messages, first_trained=0, keep_end=keep_end)
    elif isinstance(row["prompt"], str):
        example = encode_completion(tok, row["prompt"], str(row["completion"]))
    else:
        prompt = add_system_prompt(messages_of(row, "prompt"), system_prompt)
        messages = [*prompt, *messages_of(row, "completion")]
        example = encode_conversation(tok, messages, len(prompt), keep_end)

    if loss == "assistant":
        return example
    return Example(example.tokens, [False] + [True] * (len(example.tokens) - 1))


def add_system_prompt(messages: list[Message], system_prompt: str) -> list[Message]:
    """Returns the messages behind a system prompt: their own, or `system_prompt` unless empty."""
    has_own = bool(messages) and messages[0]["role"] == "system"
    if has_own or not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def messages_of(row: ExampleRow, column: str) -> list[Message]:
    """Returns a column that must hold messages."""
    messages = row[column]
    if isinstance(messages, str):
        raise UserError(f"column {column} of sft.data holds text where messages are expected")
    return messages
