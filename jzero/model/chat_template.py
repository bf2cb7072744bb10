"""Chat templates: messages as the text that a model was trained on.

    text = chat_template.render(tok, messages)
    chat = chat_template.render_chat(tok, messages)     # tokenizer.encode_chat(tok, chat): its ids

A template is a program from an untrusted file: its length, its time and its memory are bounded.
"""

import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast

from jzero.errors import UserError, reason_of
from jzero.model.control_tokens import Quoted, control_tokens
from jzero.model.template_memory import template_memory
from jzero.model.time_limit import within_seconds
from jzero.types import JsonValue

MAX_TEMPLATE = 1 << 18  # characters of a chat template; the longest known ones have 20,000
TEMPLATE_SECONDS = 10.0  # for rendering one prompt
TEMPLATE_BYTES = 512 << 20  # of the texts that rendering one prompt builds

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message]
Tool = Mapping[str, object]  # {"type": "function", "function": {...}}

THOUGHTS = ("reasoning_content", "reasoning")  # fields of a message with the thoughts of a model
NO_OPTIONS: Mapping[str, JsonValue] = MappingProxyType({})

DATE_FUNCTION = "strftime_now"  # in chat templates; returns the current time
DATE_DIRECTIVES = "aAwdbBmyYHIMSfpjUWcxXeFT"  # of this function
_PROMPT_DATES: WeakKeyDictionary[PreTrainedTokenizerFast, datetime.date] = WeakKeyDictionary()


# -- messages as text ------------------------------------------------------------------------------


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


def leaves_out_responses(tokenizer: PreTrainedTokenizerFast) -> UserError:
    """Returns the error of a chat template that does not show what the assistant wrote."""
    return UserError(
        f"the chat template of the tokenizer {tokenizer.name_or_path} leaves out the "
        "text of the assistant: fix it, or choose a task.template of plain text"
    )


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


# -- a history that only grows ---------------------------------------------------------------------


class Chat(NamedTuple):
    """A chat as text that has not been encoded yet."""

    pieces: tuple[str, ...]  # encoded one after the other, as in training
    quoted: Quoted  # control tokens in the messages, which are text

    @property
    def text(self) -> str:
        """The text of the chat, in which characters stand for quoted control tokens."""
        return "".join(self.pieces)


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
        messages = [quote(tokenizer, message, quoted) for message in messages]
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


def quote(
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


# -- the date in prompts ---------------------------------------------------------------------------


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
