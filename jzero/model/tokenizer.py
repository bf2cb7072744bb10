"""Tokenizers: a model's own through `transformers`, and jzero's for countdown: every printable ASCII character, the
newline and the words of the plain template, in the shape of a Qwen2 tokenizer without merges, which `AutoTokenizer`
makes of whatever lies beside a Qwen2 config.json. It is not used here: it imports torch."""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero.errors import UserError
from jzero.model import hub

FILES = ("*.json", "*.txt", "*.jinja")  # of a model on the hub, without its weights


def countdown() -> PreTrainedTokenizerFast:
    """112 tokens; characters outside printable ASCII and the newline are dropped."""
    return PreTrainedTokenizerFast.from_pretrained(Path(__file__).with_name("countdown_tokenizer"))


def load(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local directory or a hub id; "" is the countdown tokenizer."""
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
            f"no tokenizer in model.tokenizer={path} ({reason}): give a directory with tokenizer.json or "
            'vocab.json and merges.txt, a hub id that can be reached, or "" for the countdown tokenizer'
        ) from None


def render(tokenizer: PreTrainedTokenizerFast, prompt: Any, generate: bool = True) -> str:
    """Text, or messages through the chat template; generate: with the beginning of the assistant's next one."""
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "the prompt is messages, and this tokenizer has no chat template: choose another template"
        )
    return str(
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=generate)
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of the text alone: no special token is added."""
    return tokenizer.backend_tokenizer.encode(
        text, add_special_tokens=False
    ).ids  # ten times as fast as calling it


@functools.cache
def suffix(tokenizer: PreTrainedTokenizerFast, reply: str, plain: str | None) -> list[int]:
    """Tokens between a response and the next: `plain`, the reply at its {}, or what the chat template writes there."""
    if plain is not None:
        return encode(tokenizer, plain.replace("{}", reply))
    response = "response-of-the-assistant"
    roles = ("user", "question"), ("assistant", response), ("user", reply)
    text = render(tokenizer, [{"role": role, "content": content} for role, content in roles])
    return encode(tokenizer, text.partition(response)[2])


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of the token that the chat template ends the assistant's messages with."""
    return tokenizer.backend_tokenizer.decode(
        suffix(tokenizer, "reply", None)[:1], skip_special_tokens=False
    )


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The exact text, less end-of-sequence and padding."""
    skipped = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return tokenizer.backend_tokenizer.decode(
        [int(i) for i in ids if i not in skipped], skip_special_tokens=False
    )


def eos_ids(tokenizer: PreTrainedTokenizerFast, directory: str = "") -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's and those of the directory's generation_config.json."""
    path = Path(directory, "generation_config.json")
    more = json.loads(path.read_bytes()).get("eos_token_id") if directory and path.exists() else []
    every = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    ids = tuple(dict.fromkeys(number for number in every if number is not None))
    if not ids:
        raise UserError(
            f"neither the tokenizer nor {path} names an end of sequence: set one, or use rollout.stop"
        )
    return ids
