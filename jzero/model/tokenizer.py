"""Tokenizers: the tokenizer of a model, and jzero's character tokenizer for countdown.

    tok = tokenizer.load("Qwen/Qwen2.5-0.5B")         # a directory or a hub id; "" is countdown's
    ids = tokenizer.prompt_ids(tok, messages)
    text = tokenizer.decode(tok, ids)

The countdown tokenizer has 112 tokens: every printable ASCII character, the newline, and the words
of the plain template. It has the format of a Qwen2 tokenizer without merges, because
`AutoTokenizer` loads any tokenizer next to a Qwen2 config.json as such. `AutoTokenizer` itself is
not used here: it imports torch.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero.errors import UserError, reason_of
from jzero.model import chat_template, hub
from jzero.model.chat_template import Chat, Message, Prompt, Tool
from jzero.model.control_tokens import Quoted, control_tokens, text_encoder
from jzero.model.directory import check_inside, file_in, read_json, read_text

FILES = ("*.json", "*.txt", "*.jinja")  # files to download from the hub: no weights
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
MORE_TEMPLATES = "additional_chat_templates"  # folder with named chat templates
LARGE_FILES = {"tokenizer.json", "vocab.json", "merges.txt"}
MAX_BYTES = 128 << 20  # limit for vocabulary files; the largest known ones have 35 MB

NOTHING_QUOTED = Quoted()


# -- loading ---------------------------------------------------------------------------------------


def countdown() -> PreTrainedTokenizerFast:
    """Returns the countdown tokenizer, which drops characters outside of its alphabet."""
    return PreTrainedTokenizerFast.from_pretrained(Path(__file__).with_name("countdown_tokenizer"))


def load(path: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a local directory or a hub id; "" is the countdown tokenizer.

    Raises UserError if there are no tokenizer files or they cannot be loaded; the message names the
    damaged file.
    """
    if not path:
        return countdown()
    try:
        directory = Path(path) if os.path.isdir(path) else hub.download(path, FILES)
        # Check the files before the tokenizer library sees them.
        names = check_files(directory)
        if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
            raise FileNotFoundError(explain_missing_tokenizer(directory))
    except OSError as error:
        raise UserError(
            f"no tokenizer in model.tokenizer={path} ({reason_of(error)}): give a directory with "
            "tokenizer.json or vocab.json and merges.txt, a hub id that can be reached, or "
            '"" for the countdown tokenizer'
        ) from None
    try:
        # Without tokenizer.json, vocab.json and merges.txt are read as a Qwen2 tokenizer.
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


def explain_missing_tokenizer(directory: Path) -> str:
    """Returns the reason why a directory has no readable tokenizer."""
    if (directory / "tokenizer.model").exists():
        return "tokenizer.model is not supported: save it as tokenizer.json with AutoTokenizer"
    return "no tokenizer files"


def check_files(directory: Path) -> set[str]:
    """Returns the names of the tokenizer's files in a model directory.

    Raises UserError for a link that leads out of the directory, and for a file that is not a JSON
    object or text as expected.
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
    """Returns the file that keeps a tokenizer from loading.

    The vocabulary is loaded by itself first. If that works, the settings file is the damaged one.
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


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    tools: Sequence[Tool] = (),
    *,
    keeps_thoughts: bool = True,
    keeps_control_tokens: bool = False,
    inserted: str = "",
) -> list[int]:
    """Returns the token ids of a prompt, with the same special tokens as in `transformers`.

    Text starts with the tokenizer's first special tokens, such as Llama's beginning of text; they
    are not added twice if the text already contains them. Messages get exactly the tokens that
    their chat template writes. The chat template shows the `tools`; a text prompt has to describe
    its tools itself. For `keeps_thoughts` and `keeps_control_tokens` see
    `chat_template.render_chat`. A text has the control tokens that its author wrote; only those in
    its part `inserted` are text.

    Raises UserError if the chat template leaves the tools out.
    """
    if isinstance(prompt, str):
        quoted = Quoted()
        if inserted and not keeps_control_tokens:
            as_text = quoted.quote(inserted, control_tokens(tokenizer))
            if quoted.texts:
                prompt = prompt.replace(inserted, as_text)
        return with_first_tokens(tokenizer, encode_quoted(tokenizer, prompt, quoted))
    chat = chat_template.render_chat(
        tokenizer,
        prompt,
        tools,
        keeps_thoughts=keeps_thoughts,
        keeps_control_tokens=keeps_control_tokens,
    )
    for tool in tools:
        # A template that ignores tools renders without an error, so look for the names in the text.
        function = cast(Mapping[str, object], tool["function"])
        if str(function["name"]) not in chat.text:
            raise UserError(
                f"the chat template of the tokenizer {tokenizer.name_or_path} does not show tools: "
                "choose a model whose template does, or set task.tools.names="
            )
    return encode_chat(tokenizer, chat)


def encode_chat(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> list[int]:
    """Returns the token ids of a chat."""
    first, *following = chat.pieces
    ids = encode_quoted(tokenizer, first, chat.quoted)
    for piece in following:
        ids = [*ids, *continuation_ids(tokenizer, piece, quoted=chat.quoted)]
    return ids


def with_first_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """Returns the ids with the tokenizer's first special tokens added, unless they are present."""
    first = first_tokens(tokenizer)
    return ids if tuple(ids[: len(first)]) == first else [*first, *ids]


@functools.cache
def first_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Returns the special tokens that the tokenizer puts before a text. Qwen has none."""
    encoding = tokenizer.backend_tokenizer.encode("0", add_special_tokens=True)
    # The 0 ends the search if every token is special.
    is_special = [*encoding.special_tokens_mask, 0]
    return tuple(encoding.ids[: is_special.index(0)])


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the token ids of a text. No special token is added."""
    with naming_failure(tokenizer):
        # Ten times as fast as calling the tokenizer itself.
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def encode_quoted(tokenizer: PreTrainedTokenizerFast, text: str, quoted: Quoted) -> list[int]:
    """Returns the token ids of a text. Quoted control tokens in it are ordinary text."""
    if quoted.is_in(text):
        return text_encoder(tokenizer).encode(text, quoted)
    return encode(tokenizer, text)


def encode_releasing_gil(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the same as `encode`, but lets other threads of the process run meanwhile."""
    with naming_failure(tokenizer):
        # The library releases the GIL only while it encodes a batch, not for a single text.
        [encoding] = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids


@contextlib.contextmanager
def naming_failure(tokenizer: PreTrainedTokenizerFast) -> Iterator[None]:
    """Turns a failure of the tokenizer's library into a UserError.

    A regular expression of a tokenizer.json may backtrack until the library gives up, with a panic
    of Rust, which is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} fails on this text ({reason_of(error)}): "
            "choose another model.tokenizer"
        ) from None


def continuation_ids(
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    previous: int | None = None,
    quoted: Quoted = NOTHING_QUOTED,
) -> list[int]:
    """Returns the token ids of a text that follows another text, whose last id is `previous`."""
    if not adds_leading_space(tokenizer):
        return encode_quoted(tokenizer, text, quoted)
    # SentencePiece tokenizers, such as Llama 2's, put a space before every text that they encode,
    # and some of them after every special token. A continuation must not have it, so the text is
    # encoded after a border whose ids are then removed.
    specials = tokenizer.added_tokens_decoder
    borders = [str(specials[previous])] if previous in specials else ["\n", "0"]
    for border in borders:
        border_ids = encode(tokenizer, border)
        ids = encode_quoted(tokenizer, border + text, quoted)
        if ids[: len(border_ids)] == border_ids:
            return ids[len(border_ids) :]
    return encode_quoted(tokenizer, text, quoted)  # the text merges with every border


@functools.cache
def adds_leading_space(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Returns whether encoding adds a space before a text, as SentencePiece tokenizers do."""
    return tokenizer.backend_tokenizer.encode("0", add_special_tokens=False).tokens[0][:1] == "▁"


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """Returns the exact text of token ids, without end-of-sequence and padding tokens."""
    # Only these two are removed: all other special tokens are part of the text.
    skipped = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    kept = [int(token) for token in ids if token not in skipped]
    return tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)


# -- between two responses -------------------------------------------------------------------------


@functools.cache
def reply_tokens(
    tokenizer: PreTrainedTokenizerFast,
    reply: str,
    plain_template: str | None,
    keeps_control_tokens: bool = False,
) -> list[int]:
    """Returns the tokens between a response and the next one, which hold the environment's reply.

    plain_template: the text between the two responses, with "{}" for the reply. None: the text that
    the chat template writes between two messages of the assistant.
    keeps_control_tokens: as in `chat_template.render_chat`.
    """
    replies = [{"role": "user", "content": reply}]
    return message_tokens(tokenizer, replies, plain_template, keeps_control_tokens)


def message_tokens(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    plain_template: str | None,
    keeps_control_tokens: bool = False,
) -> list[int]:
    """Returns the tokens between a response and the next one, which hold messages.

    messages: the answers of tools, with the role tool, or messages of an environment.
    plain_template: as in `reply_tokens`; "{}" stands for the messages, separated by newlines.
    keeps_control_tokens: as in `chat_template.render_chat`.
    """
    quoted = Quoted()
    if not keeps_control_tokens:
        messages = [chat_template.quote(tokenizer, message, quoted) for message in messages]
    if plain_template is not None:
        text = "\n".join(message["content"] for message in messages)
        return continuation_ids(tokenizer, plain_template.replace("{}", text), quoted=quoted)
    response = "response-of-the-assistant"
    dialogue = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": response},
        *messages,
    ]
    # Render a dialogue with a known response; everything after that text is the template's.
    _, separator, suffix = chat_template.render(tokenizer, dialogue).partition(response)
    if not separator:
        raise chat_template.leaves_out_responses(tokenizer)
    return continuation_ids(tokenizer, suffix, quoted=quoted)


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the number of embeddings that a tokenizer needs: its largest token id + 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
