"""Tokenizers: a model's own, and jzero's character tokenizer for countdown.

    tok = tokenizer.load("Qwen/Qwen2.5-0.5B")         # a directory or a hub id; "" is countdown's
    ids = tokenizer.prompt_ids(tok, messages)
    text = tokenizer.decode(tok, ids)

The countdown tokenizer has 112 tokens: every printable ASCII character, the newline, and the words
of the plain template. It has the shape of a Qwen2 tokenizer without merges, which is what
`AutoTokenizer` makes of any tokenizer beside a Qwen2 config.json. `AutoTokenizer` itself is not
used here: it imports torch.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero.errors import UserError, reason_of, shown
from jzero.model import hub
from jzero.model.directory import check_inside, file_in, read_json, read_text

FILES = ("*.json", "*.txt", "*.jinja")  # of a model on the hub, without its weights
GENERATION = "generation_config.json"
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
MORE_TEMPLATES = "additional_chat_templates"  # a folder of chat templates with names
LARGE_FILES = {"tokenizer.json", "vocab.json", "merges.txt"}
MAX_BYTES = 128 << 20  # of a file with a vocabulary; the largest ones have 35 MB

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]
Tool = Mapping[str, object]  # {"type": "function", "function": {...}}


# -- loading ---------------------------------------------------------------------------------------


def countdown() -> PreTrainedTokenizerFast:
    """Returns the countdown tokenizer. It drops characters outside of its alphabet."""
    return PreTrainedTokenizerFast.from_pretrained(Path(__file__).with_name("countdown_tokenizer"))


def load(path: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a local directory or a hub id; "" is the countdown tokenizer.

    Raises UserError where there is none that can be loaded, with the file that is damaged.
    """
    if not path:
        return countdown()
    try:
        directory = Path(path) if os.path.isdir(path) else hub.download(path, FILES)
        names = check_files(directory)
        if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
            raise FileNotFoundError(absence_of_files(directory))
    except OSError as error:
        raise UserError(
            f"no tokenizer in model.tokenizer={path} ({reason_of(error)}): give a directory with "
            "tokenizer.json or vocab.json and merges.txt, a hub id that can be reached, or "
            '"" for the countdown tokenizer'
        ) from None
    try:
        if "tokenizer.json" in names:
            return PreTrainedTokenizerFast.from_pretrained(directory)
        return Qwen2Tokenizer.from_pretrained(directory)
    except BaseException as error:  # a panic of the Rust library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        culprit = damaged_file(directory, names)
        raise UserError(
            f"{culprit} makes no tokenizer ({reason_of(error)}): download it again, or give "
            "model.tokenizer another directory"
        ) from None


def absence_of_files(directory: Path) -> str:
    """Returns why a directory has no tokenizer that can be read."""
    if (directory / "tokenizer.model").exists():
        return "tokenizer.model alone is not read: AutoTokenizer saves it as tokenizer.json"
    return "no tokenizer files"


def check_files(directory: Path) -> set[str]:
    """Returns the names of the tokenizer's files in a model directory.

    Raises UserError for a link that leads out of it, and for a file that is not the JSON object or
    the text that it should be.
    """
    names = set()
    for name in sorted(os.listdir(directory)):
        if name in SETTINGS or name in LARGE_FILES or name.endswith(".jinja"):
            path = file_in(directory, name)
            assert path is not None, f"{name=}"
            names.add(name)
            if name in SETTINGS:
                read_json(path)
            else:
                read_text(path, MAX_BYTES)
    if os.path.lexists(directory / MORE_TEMPLATES):
        check_inside(directory / MORE_TEMPLATES, directory)
        for path in (directory / MORE_TEMPLATES).glob("*"):
            check_inside(path, directory)
    return names


def damaged_file(directory: Path, names: set[str]) -> Path:
    """Returns the file to blame for a tokenizer that cannot be made.

    The vocabulary is tried by itself. If it is whole, the settings around it are not.
    """
    vocabulary = directory / ("tokenizer.json" if "tokenizer.json" in names else "vocab.json")
    try:
        if vocabulary.name == "tokenizer.json":
            Tokenizer.from_file(str(vocabulary))
        else:
            BPE.from_file(str(vocabulary), str(directory / "merges.txt"))
    except BaseException as error:  # a panic of the Rust library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return vocabulary
    settings = "tokenizer_config.json"
    return directory / settings if settings in names else vocabulary


# -- text to tokens and back -----------------------------------------------------------------------


def render(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    generate: bool = True,
    tools: Sequence[Tool] = (),
) -> str:
    """Returns a prompt as text: text as it is, messages through the tokenizer's chat template.

    generate: the text ends with the beginning of the assistant's next message.
    tools: the schemas of the tools that the template shows.
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
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generate,
            tools=[dict(tool) for tool in tools] or None,
        )
    except Exception as error:  # a template is foreign, and may raise anything
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path} does not take these "
            f"messages ({type(error).__name__}: {reason_of(error)}): change them or the template"
        ) from None
    return str(text)


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast, prompt: Prompt, tools: Sequence[Tool] = ()
) -> list[int]:
    """Returns the token ids of a prompt, with the special tokens that `transformers` gives it.

    Text begins with the tokenizer's own first token, such as Llama's beginning of text; it has one
    even if the text spells it already. Messages have what their chat template writes, and no more.
    The template shows the `tools`; text has to say itself which there are.

    Raises UserError where the chat template leaves the tools out.
    """
    text = render(tokenizer, prompt, tools=tools)
    if isinstance(prompt, str):
        return with_first_tokens(tokenizer, encode(tokenizer, text))
    for tool in tools:
        function = cast(Mapping[str, object], tool["function"])
        if str(function["name"]) not in text:
            raise UserError(
                f"the chat template of the tokenizer {tokenizer.name_or_path} does not show tools: "
                "choose a model whose template does, or set task.tools.names="
            )
    return encode(tokenizer, text)


def with_first_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """Returns the ids of a text behind the tokenizer's first tokens, unless they are there."""
    first = first_tokens(tokenizer)
    return ids if tuple(ids[: len(first)]) == first else [*first, *ids]


@functools.cache
def first_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Returns the special tokens that a tokenizer itself puts before a text: of Qwen's none."""
    encoding = tokenizer.backend_tokenizer.encode("0", add_special_tokens=True)
    is_special = [*encoding.special_tokens_mask, 0]
    return tuple(encoding.ids[: is_special.index(0)])


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the token ids of a text. No special token is added."""
    # Ten times as fast as calling the tokenizer itself.
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def encode_beside_others(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns what `encode` does, and lets the other threads of the process run meanwhile."""
    # The library holds Python's lock while it encodes one text, and not while it encodes a batch.
    [encoding] = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids


def continuation_ids(
    tokenizer: PreTrainedTokenizerFast, text: str, previous: int | None = None
) -> list[int]:
    """Returns the token ids of a text that comes after another one, whose last id is `previous`.

    SentencePiece tokenizers, as that of Llama 2, put a space before every text that they encode,
    and some of them after every special token. Before another continuation it would be one too
    many.
    """
    if not puts_a_space_first(tokenizer):
        return encode(tokenizer, text)
    specials = tokenizer.added_tokens_decoder
    borders = [str(specials[previous])] if previous in specials else ["\n", "0"]
    for border in borders:
        before = encode(tokenizer, border)
        ids = encode(tokenizer, border + text)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return encode(tokenizer, text)  # the text merges with whatever is before it


@functools.cache
def puts_a_space_first(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Says whether a text gets a space before it when it is encoded, as SentencePiece writes it."""
    return tokenizer.backend_tokenizer.encode("0", add_special_tokens=False).tokens[0][:1] == "▁"


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
        return continuation_ids(tokenizer, plain_template.replace("{}", reply))
    return _tokens_after_response(tokenizer, [{"role": "user", "content": reply}])


def message_tokens(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], plain_template: str | None
) -> list[int]:
    """Returns the tokens between a response and the next one, which hold the answers of tools.

    messages: of the role tool.
    plain_template: as in `reply_tokens`; the answers are in it on lines of their own.
    """
    if plain_template is not None:
        text = "\n".join(message["content"] for message in messages)
        return continuation_ids(tokenizer, plain_template.replace("{}", text))
    return _tokens_after_response(tokenizer, messages)


def _tokens_after_response(
    tokenizer: PreTrainedTokenizerFast, replies: Sequence[Message]
) -> list[int]:
    """Returns what the chat template writes between a response and the next one."""
    response = "response-of-the-assistant"
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": response},
        *replies,
    ]
    _, found, after = render(tokenizer, messages).partition(response)
    if not found:
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path} leaves out what the "
            "assistant says: mend it, or choose a task.template of plain text"
        )
    return continuation_ids(tokenizer, after)


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
    if directory:
        ids += generation_eos_ids(Path(directory))
    unique = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not unique:
        raise UserError(
            f"neither the tokenizer nor {Path(directory, GENERATION)} names an end of sequence: "
            "name one there, or set rollout.stop"
        )
    return unique


def generation_eos_ids(directory: Path) -> list[int]:
    """Returns the ends of sequence that generation_config.json in a model's directory names."""
    path = file_in(directory, GENERATION)
    if path is None:
        return []
    named = read_json(path).get("eos_token_id")
    if named is None:
        return []
    ids = named if isinstance(named, list) else [named]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(
            f"{path}: eos_token_id={shown(named)} is no token id and no list of token ids: mend it"
        )
    return ids


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the number of embeddings that a tokenizer needs: its largest token id, and one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
