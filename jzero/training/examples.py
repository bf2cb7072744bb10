"""Supervised examples: text or chat messages -> token ids and a mask of the trained tokens.

Each response of a conversation is encoded separately, so that the tokens are the same as in
decoding. If the whole text were encoded at once, a token could span the boundary between a prompt
and its response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jzero.errors import UserError, quoted
from jzero.model import chat_template, end_tokens, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast

# One message of a chat: "role" and "content".
Message = Mapping[str, str]
# A row of a data set: {"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...},
# {"conversations": [...]} with ShareGPT messages ("from" and "value"), or two columns of TURNS.
ExampleRow = Mapping[str, str | list[Message]]
# Columns of a problem and its worked solution, which become the turns of a chat.
TURNS = (("problem", "solution"), ("question", "answer"))

# The roles of the speakers in ShareGPT conversations.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Example:
    """A sequence of tokens, and for each token whether it is trained."""

    tokens: list[int]
    trained: list[bool]

    @property
    def num_trained(self) -> int:
        """The number of trained tokens."""
        return sum(self.trained)

    def first(self, count: int) -> "Example":
        """Returns the example's first `count` tokens."""
        return Example(self.tokens[:count], self.trained[:count])


def encode_completion(
    tok: PreTrainedTokenizerFast,
    prompt: str,
    completion: str,
) -> Example:
    """Encodes a prompt and its completion, followed by the end-of-sequence token.

    The completion and the end-of-sequence token are trained.
    """
    prompt_tokens = tokenizer.prompt_ids(tok, prompt)
    previous = prompt_tokens[-1] if prompt_tokens else None
    completion_tokens = [*tokenizer.continuation_ids(tok, completion, previous), tok.eos_token_id]
    return Example(
        prompt_tokens + completion_tokens,
        [False] * len(prompt_tokens) + [True] * len(completion_tokens),
    )


def encode_text(tok: PreTrainedTokenizerFast, text: str) -> Example:
    """Encodes plain text, as in continued pretraining.

    All tokens are trained except the first, which no input predicts. The end-of-sequence token
    follows the text, unless the text ends with it.
    """
    tokens = tokenizer.prompt_ids(tok, text)
    if not tokens or tokens[-1] != tok.eos_token_id:
        tokens = [*tokens, tok.eos_token_id]
    return Example(tokens, [False] + [True] * (len(tokens) - 1))


def encode_conversation(
    tok: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    first_trained: int,
    keep_end: bool = False,
) -> Example:
    """Encodes messages with the tokenizer's chat template.

    The assistant's messages from index `first_trained` on are trained, including the end of turn.
    The template's text after the last trained message is kept only with `keep_end`, because none of
    it is trained.

    Raises UserError if a message contains the end-of-turn text, or if the template renders earlier
    turns differently when later turns follow.
    """
    text = chat_template.render(tok, messages, generate=False)
    end_of_turn = end_tokens.end_of_turn(tok)
    # The search for the end of a response below would stop inside of the message.
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

    position = 0  # number of encoded characters of `text`
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < first_trained:
            continue
        # The response starts after the text that decoding would have as its prompt.
        rendered_prompt = chat_template.render(tok, messages[:index])
        if not text.startswith(rendered_prompt):
            raise UserError(
                "the chat template renders earlier turns differently when later turns follow: "
                "set sft.chat_template"
            )
        # The text since the previous response is not trained. The response is trained up to and
        # including its end of turn.
        start = len(rendered_prompt)
        stop = text.index(end_of_turn, start) + len(end_of_turn)
        append(text[position:start], is_trained=False)
        append(text[start:stop], is_trained=True)
        position = stop
    if keep_end and position < len(text):
        append(text[position:], is_trained=False)
    return Example(tokens, trained)


def encode_row(
    tok: PreTrainedTokenizerFast,
    row: ExampleRow,
    loss: str,
    system_prompt: str = "",
) -> Example:
    """Encodes a row with messages, a conversation, text, or a prompt and a completion.

    A prompt and its completion are both text or both messages. A problem and its solution (TURNS)
    are messages of the user and of the assistant. `loss` is sft.loss: "assistant"
    trains the assistant's messages, "all" trains all tokens except the first, which no input
    predicts. A row of text has no assistant, so "all" applies to it. `system_prompt` is
    sft.system_prompt: it is inserted before messages that have no system prompt.
    """
    if "text" in row:
        return encode_text(tok, str(row["text"]))
    keep_end = loss == "all"
    if "prompt" not in row:
        if "messages" in row:
            messages = messages_of(row, "messages")
        elif "conversations" in row:
            messages = [to_message(message) for message in messages_of(row, "conversations")]
        else:
            messages = turns_of(row)
        messages = add_system_prompt(messages, system_prompt)
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


def turns_of(row: ExampleRow) -> list[Message]:
    """Returns a problem and its solution as messages of a chat."""
    [(problem, solution)] = [names for names in TURNS if set(names) <= set(row)]
    return [
        {"role": "user", "content": str(row[problem])},
        {"role": "assistant", "content": str(row[solution])},
    ]


def to_message(message: Message) -> Message:
    """Converts a ShareGPT message ("from", "value") to a message with "role" and "content".

    Messages with "role" and "content" are returned unchanged. Raises UserError for a speaker that
    is not in ROLES.
    """
    if "role" in message and "content" in message:
        return message
    speaker = message.get("from")
    if speaker not in ROLES or not isinstance(message.get("value"), str):
        raise UserError(
            f"column conversations of sft.data holds {quoted(message)}: a message has a value and "
            f"is from one of {', '.join(ROLES)}"
        )
    return {"role": ROLES[speaker], "content": message["value"]}


def add_system_prompt(messages: list[Message], system_prompt: str) -> list[Message]:
    """Inserts `system_prompt`, if not empty, before messages that have no system prompt."""
    has_system_prompt = bool(messages) and messages[0]["role"] == "system"
    if has_system_prompt or not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def messages_of(row: ExampleRow, column: str) -> list[Message]:
    """Returns the messages in a column. Raises UserError if the column holds text."""
    messages = row[column]
    if isinstance(messages, str):
        raise UserError(f"column {column} of sft.data holds text where messages are expected")
    return messages
