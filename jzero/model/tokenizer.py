"""Tokenizers: a model's own, and jzero's character tokenizer for countdown.

    tok = tokenizer.load("Qwen/Qwen2.5-0.5B")         # a directory or a hub id; "" is countdown's
    ids = tokenizer.encode(tok, tokenizer.render(tok, messages))
    text = tokenizer.decode(tok, ids)

The countdown tokenizer has 112 tokens: every printable ASCII character, the newline, and the words
of the plain template. It has the shape of a Qwen2 tokenizer without merges, which is what
`AutoTokenizer` makes of any tokenizer beside a Qwen2 config.json. `AutoTokenizer` itself is not
used here: it imports torch.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero.errors import UserError
from jzero.model import hub

FILES = ("*.json", "*.txt", "*.jinja")  # of a model on the hub, without its weights

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]


# -- loading ---------------------------------------------------------------------------------------


def countdown() -> PreTrainedTokenizerFast:
    """Returns the countdown tokenizer. It drops characters outside of its alphabet."""
    return PreTrainedTokenizerFast.from_pretrained(Path(__file__).with_name("countdown_tokenizer"))


def load(path: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a local directory or a hub id; "" is the countdown tokenizer.

    Raises UserError where there is none that can be loaded.
    """
    if not path:
        return countdown()
    try:
        directory = path if os.path.isdir(path) else hub.download(path, FILES)
        files = os.listdir(directory)
        if "tokenizer.json" in files:
            return PreTrainedTokenizerFast.from_pretrained(directory)
        if "vocab.json" in files and "merges.txt" in files:
            return Qwen2Tokenizer.from_pretrained(directory)
        raise FileNotFoundError("no tokenizer files")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"no tokenizer in model.tokenizer={path} ({reason}): give a directory with "
            "tokenizer.json or vocab.json and merges.txt, a hub id that can be reached, or "
            '"" for the countdown tokenizer'
        ) from None


# -- text to tokens and back -----------------------------------------------------------------------


def render(tokenizer: PreTrainedTokenizerFast, prompt: Prompt, generate: bool = True) -> str:
    """Returns a prompt as text: text as it is, messages through the tokenizer's chat template.

    generate: the text ends with the beginning of the assistant's next message.
    Raises UserError where the prompt is messages and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "the prompt is messages, and this tokenizer has no chat template: "
            "choose a task.template of plain text, or a model with a chat template"
        )
    messages = [dict(message) for message in prompt]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    return str(text)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the token ids of a text. No special token is added."""
    # Ten times as fast as calling the tokenizer itself.
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def encode_beside_others(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns what `encode` does, and lets the other threads of the process run meanwhile."""
    # The library holds Python's lock while it encodes one text, and not while it encodes a batch.
    [encoding] = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """Returns the exact text of token ids, without end-of-sequence and padding tokens."""
    skipped = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    kept = [int(token) for token in ids if token not in skipped]
    return tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)


# -- the ends of responses -------------------------------------------------------------------------


@functools.cache
def reply_tokens(
    tokenizer: PreTrainedTokenizerFast, reply: str, plain_template: str | None
) -> list[int]:
    """Returns the tokens between a response and the next one, which hold the environment's reply.

    plain_template: the text between the two, with "{}" in place of the reply. None: the text that
    the tokenizer's chat template writes between two messages of the assistant.
    """
    if plain_template is not None:
        return encode(tokenizer, plain_template.replace("{}", reply))
    response = "response-of-the-assistant"
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": response},
        {"role": "user", "content": reply},
    ]
    _, _, after = render(tokenizer, messages).partition(response)
    return encode(tokenizer, after)


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the text of the token that ends the assistant's messages in the chat template."""
    first = reply_tokens(tokenizer, "reply", None)[:1]
    return tokenizer.backend_tokenizer.decode(first, skip_special_tokens=False)


def eos_ids(tokenizer: PreTrainedTokenizerFast, directory: str = "") -> tuple[int, ...]:
    """Returns every token that ends a response, the tokenizer's own first.

    The others are those of generation_config.json in the model's `directory`. Raises UserError
    where there is none.
    """
    own = tokenizer.eos_token_id
    assert own is None or isinstance(own, int), f"{own=}"
    ids: list[int | None] = [own]
    path = Path(directory, "generation_config.json")
    if directory and path.exists():
        named = json.loads(path.read_bytes()).get("eos_token_id")
        ids += named if isinstance(named, list) else [named]
    unique = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not unique:
        raise UserError(
            f"neither the tokenizer nor {path} names an end of sequence: name one there, "
            "or set rollout.stop"
        )
    return unique
