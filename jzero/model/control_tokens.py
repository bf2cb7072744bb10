"""Control tokens in texts that somebody else wrote: a question, a tool's result, a reply.

A tokenizer finds its control tokens, such as <|im_end|>, anywhere in a text. In the content of a
message they would end the turn, and let a document or a tool write a system prompt. So the content
is quoted before the chat template writes it:

    quoted = Quoted()
    messages = [quoted.quote(message, control_tokens(tok)) for message in messages]
    ids = text_encoder(tok).encode(template(messages), quoted)

`quote` replaces every control token in a content by a character of Unicode's private use area.
`encode` puts the text back, and encodes it with a copy of the tokenizer that knows the control
tokens by other, secret names: only those that the template wrote are tokens. A text without quoted
parts (`Quoted.is_in`) needs no such encoder.
"""

import functools
import json
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple, TypeVar, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from jzero.errors import UserError
from jzero.types import JsonValue

# The private use area of plane 15, where the characters for quoted texts are.
FIRST, LAST = 0xF0000, 0xFFFFD

Value = TypeVar("Value", bound=JsonValue)


@functools.cache
def control_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Returns the texts of the tokenizer's special tokens, the longest first.

    Added tokens that are not special, such as Qwen's <tool_call>, are parts of a text.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special and token.content}
    return tuple(sorted(texts, key=len, reverse=True))


@functools.lru_cache(64)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    # A private character of the content itself is quoted, too: it must not stand for another text.
    names = [*map(re.escape, texts), f"[{chr(FIRST)}-{chr(LAST)}]"]
    return re.compile("|".join(names))


class Quoted:
    """The texts that `quote` has replaced, by the characters that stand for them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._characters: dict[str, str] = {}

    def quote(self, value: Value, texts: tuple[str, ...]) -> Value:
        """Returns text, or lists and objects of texts, in which characters stand for `texts`."""
        if isinstance(value, str):
            return cast(Value, _pattern(texts).sub(self._character, value))
        if isinstance(value, Mapping):
            return cast(Value, {name: self.quote(item, texts) for name, item in value.items()})
        if isinstance(value, list):
            return cast(Value, [self.quote(item, texts) for item in value])
        return value

    def _character(self, match: re.Match[str]) -> str:
        text = match[0]
        if text not in self._characters:
            code = FIRST + len(self.texts)
            if code > LAST:
                raise UserError("a prompt has too many characters of the private use area")
            self._characters[text] = chr(code)
            self.texts[chr(code)] = text
        return self._characters[text]

    def is_in(self, text: str) -> bool:
        """Whether a text has quoted parts."""
        return any(character in text for character in self.texts)

    def restore(self, text: str) -> str:
        """Returns a text with the quoted texts in it."""
        return text.translate(str.maketrans(self.texts)) if self.texts else text


class TextEncoder(NamedTuple):
    """A copy of a tokenizer to which its control tokens are ordinary text."""

    tokenizer: Tokenizer
    names: dict[str, str]  # the control tokens -> their names in the copy
    ids: dict[int, int]  # ids of the copy -> ids of the tokenizer, where they differ

    def encode(self, text: str, quoted: Quoted) -> list[int]:
        """Returns the token ids of a text, in which only quoted control tokens are text."""
        tokens = _pattern(tuple(sorted(self.names, key=len, reverse=True)))
        renamed = tokens.sub(lambda match: self.names.get(match[0], match[0]), text)
        encoding = self.tokenizer.encode(quoted.restore(renamed), add_special_tokens=False)
        return [self.ids.get(token, token) for token in encoding.ids]


@functools.cache
def text_encoder(tokenizer: PreTrainedTokenizerFast) -> TextEncoder:
    """Returns the encoder for texts with quoted control tokens. Made when the first one comes."""
    # Nobody can guess the names, so no content contains them.
    secret = secrets.token_hex(8)
    names = {
        text: f"\U00100000{secret}{number}\U00100001"
        for number, text in enumerate(control_tokens(tokenizer))
    }
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    vocabulary = model["vocab"]
    # Otherwise a model of whole words, or a unigram model, would still find the token in a text.
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token for text, token in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    copy = Tokenizer.from_str(json.dumps(description))
    ids: dict[int, int] = {}
    for text, name in names.items():
        token, renamed = tokenizer.convert_tokens_to_ids(text), copy.token_to_id(name)
        assert isinstance(token, int) and renamed is not None, f"{text=}"
        if token != renamed:
            ids[renamed] = token
    return TextEncoder(copy, names, ids)
