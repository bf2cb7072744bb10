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
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero.errors import UserError, reason_of, shown
from jzero.model import hub
from jzero.model.control_tokens import Quoted, control_tokens, text_encoder
from jzero.model.directory import check_inside, file_in, read_json, read_text
from jzero.model.template_memory import template_memory
from jzero.model.time_limit import within_seconds
from jzero.types import JsonValue

FILES = ("*.json", "*.txt", "*.jinja")  # files to download from the hub: no weights
CONFIG = "config.json"
GENERATION = "generation_config.json"
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
MORE_TEMPLATES = "additional_chat_templates"  # folder with named chat templates
LARGE_FILES = {"tokenizer.json", "vocab.json", "merges.txt"}
MAX_TEMPLATE = 1 << 18  # characters of a chat template; the longest known ones have 20,000
TEMPLATE_SECONDS = 10.0  # for rendering one prompt
TEMPLATE_BYTES = 512 << 20  # of the texts that rendering one prompt builds
MAX_BYTES = 128 << 20  # limit for vocabulary files; the largest known ones have 35 MB

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]
Tool = Mapping[str, object]  # {"type": "function", "function": {...}}

THOUGHTS = ("reasoning_content", "reasoning")  # fields of a message with the thoughts of a model
NO_OPTIONS: Mapping[str, JsonValue] = MappingProxyType({})
NOTHING_QUOTED = Quoted()
DATE_FUNCTION = "strftime_now"  # in chat templates; returns the current time
DATE_DIRECTIVES = "aAwdbBmyYHIMSfpjUWcxXeFT"  # of this function
_PROMPT_DATES: WeakKeyDictionary[PreTrainedTokenizerFast, datetime.date] = WeakKeyDictionary()


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


class Chat(NamedTuple):
    """A chat as text that has not been encoded yet."""

    pieces: tuple[str, ...]  # encoded one after the other, as in training
    quoted: Quoted  # control tokens in the messages, which are text

    @property
    def text(self) -> str:
        """The text of the chat, in which characters stand for quoted control tokens."""
        return "".join(self.pieces)


def render(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    generate: bool = True,
    tools: Sequence[Tool] = (),
    options: Mapping[str, JsonValue] = NO_OPTIONS,
) -> str:
    """Returns a prompt as text: text unchanged, messages through the tokenizer's chat template.

    generate: the text ends with the start of the assistant's next message.
    tools: the tool schemas that the template shows.
    options: further variables of the template, such as enable_thinking.
    Raises UserError if the prompt is messages and the tokenizer has no chat template, or one that
    leaves out what the user writes, is too long, takes too long or raises.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise UserError(
            "the prompt is messages, and this tokenizer has no chat template: "
            "choose a task.template of plain text, or a model with a chat template"
        )
    check_template(tokenizer)
    try:
        text = _apply_template(tokenizer, prompt, generate, tools, options)
        has_question = shows_questions(tokenizer, str(tokenizer.chat_template))
    except Exception as error:  # a template is foreign, and may raise anything
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path} does not take these "
            f"messages ({type(error).__name__}: {reason_of(error)}): change them or the template"
        ) from None
    if not has_question:
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path} leaves out the text of "
            "the user, it may require content as a list of parts: fix it, or choose a "
            "task.template of plain text"
        )
    return text


def _apply_template(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    generate: bool = True,
    tools: Sequence[Tool] = (),
    options: Mapping[str, JsonValue] = NO_OPTIONS,
) -> str:
    """Returns messages as text. Raises what the chat template raises."""
    schemas = [dict(tool) for tool in tools] or None
    template = tokenizer.get_chat_template(None, schemas)
    if DATE_FUNCTION in template:
        template = _with_date(template, prompt_date(tokenizer))
    # The types of its further arguments are those of a template's variables.
    apply = cast(Callable[..., object], tokenizer.apply_chat_template)

    def render() -> object:
        with template_memory(TEMPLATE_BYTES):
            return apply(
                [dict(message) for message in messages],
                tokenize=False,
                chat_template=template,
                add_generation_prompt=generate,
                tools=schemas,
                **options,
            )

    return str(within_seconds(TEMPLATE_SECONDS, render))


def check_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises UserError if a chat template is too long: compiling it would take the memory."""
    template = tokenizer.chat_template
    # A tokenizer may have several templates, by name.
    templates = template.values() if isinstance(template, dict) else [template]
    if any(len(str(text)) > MAX_TEMPLATE for text in templates):
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path} has more than "
            f"{MAX_TEMPLATE:,} characters: choose another tokenizer or task.template"
        )


def _with_date(template: str, date: datetime.date) -> str:
    """Returns a chat template with `date` in place of the current time.

    A run has one date, also when it resumes on another day.
    """
    # transformers passes no functions to a template, so the template defines this one.
    midnight = datetime.datetime.combine(date, datetime.time())
    formatted = "format"
    for directive in DATE_DIRECTIVES:
        formatted += f" | replace('%{directive}', '{midnight.strftime('%' + directive)}')"
    # Jinja drops the newline after a block, so the text of the template begins as before.
    return f"{{% macro {DATE_FUNCTION}(format) %}}{{{{ {formatted} }}}}{{% endmacro %}}\n{template}"


@functools.lru_cache(16)
def shows_questions(tokenizer: PreTrainedTokenizerFast, template: str) -> bool:
    """Returns whether the tokenizer's chat template writes the text of the user's messages.

    template: the chat template, because it may be replaced.
    """
    question = "question-of-the-user"
    try:
        text = _apply_template(tokenizer, [{"role": "user", "content": question}])
    except TimeoutError:
        raise
    except Exception:  # the template may require further messages
        return True
    return question in text


def prompt_date(tokenizer: PreTrainedTokenizerFast) -> datetime.date:
    """Returns the date that chat templates write: `set_prompt_date`'s, or the current date."""
    return _PROMPT_DATES.get(tokenizer) or datetime.date.today()


def set_prompt_date(tokenizer: PreTrainedTokenizerFast, date: str) -> None:
    """Sets the date that chat templates write, such as 2026-12-31. "": the current date."""
    _PROMPT_DATES.pop(tokenizer, None)
    if date:
        _PROMPT_DATES[tokenizer] = datetime.date.fromisoformat(date)


def writes_date(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Returns whether the chat template writes the current date."""
    return DATE_FUNCTION in str(tokenizer.chat_template)


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
    its tools itself. For `keeps_thoughts` and `keeps_control_tokens` see `render_chat`. A text has
    the control tokens that its author wrote; only those in its part `inserted` are text.

    Raises UserError if the chat template leaves the tools out.
    """
    if isinstance(prompt, str):
        quoted = Quoted()
        if inserted and not keeps_control_tokens:
            as_text = quoted.quote(inserted, control_tokens(tokenizer))
            if quoted.texts:
                prompt = prompt.replace(inserted, as_text)
        return with_first_tokens(tokenizer, encode_quoted(tokenizer, prompt, quoted))
    chat = render_chat(
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


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    options: Mapping[str, JsonValue] = NO_OPTIONS,
    *,
    keeps_thoughts: bool = True,
    keeps_control_tokens: bool = False,
) -> Chat:
    """Returns a chat that asks for the assistant's next message.

    Args:
        keeps_thoughts: earlier messages of the assistant are shown as they were sampled. Templates
            of models that think often drop the thoughts of earlier turns, but a policy is trained
            on a history that only grows.
        keeps_control_tokens: control tokens in the messages, such as <|im_end|>, are tokens. False:
            they are text, so that a message cannot begin a turn.
        tools, options: as in `render`.
    """
    quoted = Quoted()
    if not keeps_control_tokens:
        messages = [_quote(tokenizer, message, quoted) for message in messages]
    text = render(tokenizer, messages, tools=tools, options=options)
    changed: list[int] = []
    if keeps_thoughts:
        changed = [i for i, message in enumerate(messages) if _is_changed(message, text)]
    if not changed:
        return Chat((text,), quoted)

    # Render the chat with marks in place of these messages, and put the messages there. The text
    # before each of them is the prompt that the policy had.
    mark = next(chr(code) for code in range(0x100002, 0x10FFFD) if chr(code) not in text)
    marked = [dict(message) for message in messages]
    for i in changed:
        marked[i] = {name: value for name, value in marked[i].items() if name not in THOUGHTS}
        marked[i]["content"] = f"{mark}{i}{mark}"
    pieces: list[str] = []
    text = render(tokenizer, marked, tools=tools, options=options)
    for i in reversed(changed):
        _, separator, following = text.partition(marked[i]["content"])
        if not separator:
            raise leaves_out_responses(tokenizer)
        text = render(tokenizer, marked[:i], tools=tools, options=options)
        pieces[:0] = [_response_of(messages[i], text), following]
    return Chat((text, *pieces), quoted)


def _quote(
    tokenizer: PreTrainedTokenizerFast,
    message: Message,
    quoted: Quoted,
) -> Message:
    """Returns a message whose control tokens are quoted."""
    # The assistant may have sampled control tokens, such as those of a call, but none of a turn.
    texts = control_tokens(tokenizer)
    if message.get("role") == "assistant":
        texts = turn_tokens(tokenizer, str(tokenizer.chat_template))
    return {
        name: value if name == "role" else quoted.quote(value, texts)
        for name, value in message.items()
    }


def _is_changed(message: Message, text: str) -> bool:
    """Returns whether a chat's text lacks a part of the assistant's message."""
    parts = [message.get(name) for name in ("content", *THOUGHTS)]
    return message.get("role") == "assistant" and any(part and part not in text for part in parts)


def _response_of(message: Message, prompt: str) -> str:
    """Returns the text of the assistant's response to a prompt."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name)), "").strip("\n")
    if not thoughts:
        return message["content"]
    # The form of Qwen3 and DeepSeek-R1. Some templates open the thoughts in the prompt.
    opening = "" if prompt.rstrip().endswith("<think>") else "<think>\n"
    return f"{opening}{thoughts}\n</think>\n\n{message['content']}"


@functools.lru_cache(16)
def turn_tokens(tokenizer: PreTrainedTokenizerFast, template: str) -> tuple[str, ...]:
    """Returns the control tokens that the tokenizer's chat template writes around messages.

    template: the chat template, because it may be replaced.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text = _apply_template(tokenizer, [*messages, *messages])
    except Exception:  # the template takes other messages only
        return control_tokens(tokenizer)
    return tuple(token for token in control_tokens(tokenizer) if token in text)


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


# -- the ends of responses -------------------------------------------------------------------------


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
    keeps_control_tokens: as in `render_chat`.
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
    keeps_control_tokens: as in `render_chat`.
    """
    quoted = Quoted()
    if not keeps_control_tokens:
        messages = [_quote(tokenizer, message, quoted) for message in messages]
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
    _, separator, suffix = render(tokenizer, dialogue).partition(response)
    if not separator:
        raise leaves_out_responses(tokenizer)
    return continuation_ids(tokenizer, suffix, quoted=quoted)


def leaves_out_responses(tokenizer: PreTrainedTokenizerFast) -> UserError:
    """Returns the error of a chat template that does not show what the assistant wrote."""
    return UserError(
        f"the chat template of the tokenizer {tokenizer.name_or_path} leaves out the "
        "text of the assistant: fix it, or choose a task.template of plain text"
    )


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the text of the token that ends the assistant's messages in the chat template."""
    # The first token after a response is the one that ends it.
    first = reply_tokens(tokenizer, "reply", None)[:1]
    return tokenizer.backend_tokenizer.decode(first, skip_special_tokens=False)


def missing_stop(
    tokenizer: PreTrainedTokenizerFast,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> str:
    """Returns a warning if the chat template's end of turn ends no response, and "" otherwise.

    stop_ids, stop_strings: end a response. A policy that writes the end of its turn then continues
    with a turn of the user, which it invents.
    """
    if not tokenizer.chat_template:
        return ""
    try:
        [token, *_] = reply_tokens(tokenizer, "reply", None)
    except UserError:
        return ""  # the template does not take a second turn
    if token in stop_ids or token not in tokenizer.added_tokens_decoder:
        return ""
    text = end_of_turn(tokenizer)
    if any(stop in text for stop in stop_strings):
        return ""
    return (
        f"warning: the chat template ends the assistant's turn with {text}, and the model's files "
        f"do not name it as an end token: set rollout.stop={text}, or add {token} to eos_token_id "
        f"in {GENERATION}"
    )


def eos_ids(tokenizer: PreTrainedTokenizerFast, directory: str = "") -> tuple[int, ...]:
    """Returns every token that ends a response, first the EOS token of the tokenizer itself.

    The other tokens are from the files in the model's `directory` (`named_eos_ids`). Raises
    UserError if there are none at all.
    """
    tokenizer_eos = tokenizer.eos_token_id
    assert tokenizer_eos is None or isinstance(tokenizer_eos, int), f"{tokenizer_eos=}"
    # The order matters: the tokenizer's own token comes first, and duplicates are dropped.
    ids: list[int | None] = [tokenizer_eos]
    if directory:
        _, named = named_eos_ids(Path(directory))
        ids += named
    unique = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not unique:
        raise UserError(
            f"neither the tokenizer nor {Path(directory, GENERATION)} nor {CONFIG} has an end of "
            "sequence: add eos_token_id there"
        )
    return unique


def named_eos_ids(directory: Path) -> tuple[str, list[int]]:
    """Returns the end-of-sequence ids of a model directory, and the name of their file.

    As in `transformers`, config.json counts if generation_config.json does not name any; the entry
    of the model itself precedes the entry of its text_config.
    """
    for name in (GENERATION, CONFIG):
        path = file_in(directory, name)
        if path is not None and (ids := eos_ids_in(read_json(path), path)):
            return name, ids
    return CONFIG, []


def eos_ids_in(entries: Mapping[str, JsonValue], source: Path | str) -> list[int]:
    """Returns the ids of `eos_token_id` in the entries of a file, [] without them.

    Raises UserError if they are not token ids; the message names the `source`.
    """
    named = entries.get("eos_token_id")
    text_config = entries.get("text_config")
    if named is None and isinstance(text_config, dict):
        named = text_config.get("eos_token_id")
    if named is None:
        return []
    given = named if isinstance(named, list) else [named]
    ids = [token for token in given if type(token) is int and token >= 0]
    if len(ids) < len(given):
        raise UserError(
            f"{source}: eos_token_id={shown(named)} is neither a token id nor a list of token ids: "
            "fix it"
        )
    return ids


def num_ids(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the number of embeddings that a tokenizer needs: its largest token id + 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
