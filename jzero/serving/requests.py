"""Requests of OpenAI's API: their fields, their validation, and the conversion to sequences."""

import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, model_validator
from starlette.exceptions import HTTPException

from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter
from jzero.decoder.engine import Engine
from jzero.decoder.sampling import Filters
from jzero.decoder.score_program import MAX_ALTERNATIVES
from jzero.decoder.sequence import Sequence
from jzero.errors import UserError, shown
from jzero.model import chat_template, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.serving.limits import Limits
from jzero.serving.scored import ReplyOptions
from jzero.serving.tools import CallReader, EarlierCalls, Tools, ToolSpec, check_template
from jzero.types import JsonValue

MAX_CHOICES = 128  # per prompt
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000  # of one stop string
MAX_CONTENT_PARTS = 256  # of a message
MAX_OBJECT_FIELDS = 16  # of a message, of stream_options and of chat_template_kwargs
MAX_STOP_TOKENS = 64
MAX_OPTION_CHARACTERS = 1000  # of a value in chat_template_kwargs
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; a chat uses all remaining tokens

# Options that are accepted with any value, because they only label the request.
LABELS = ("user", "metadata", "store")

# Options that are accepted only with a value that changes nothing, or with the server's setting.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    # The prompt and the text as this server makes them.
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "priority": (0,),
}

NO_OPTION = "this server does not support the option in requests: omit it"
PENALTY = "this server samples without penalties, as training does, and counts no tokens: omit it"
# Why an option is refused, and what to do instead.
REASONS = {
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "repetition_penalty": PENALTY,
    "response_format": (
        "this server cannot force a format: ask for JSON in a message, and check the answer"
    ),
    "logit_bias": "this server does not change logits: omit it",
    "ignore_eos": (
        "the decoder always stops at the model's end tokens: omit it, and send "
        "stop_token_ids for further ones"
    ),
    "min_tokens": "the decoder always stops at the model's end tokens: omit it",
    "continue_final_message": (
        "a chat asks for a new message: send the text so far as the prompt of a completion"
    ),
    "add_generation_prompt": "a chat asks for a new message: omit it",
    "skip_special_tokens": (
        "texts end before the token that ended them: omit it, and read the tokens with "
        "return_token_ids"
    ),
}

# The levels of OpenAI's reasoning_effort. "medium" is the default of all models.
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
# Variables that the server gives to chat templates, and arguments of the function that fills them.
TEMPLATE_VARIABLES = {
    *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    "messages",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "raise_exception",
    chat_template.DATE_FUNCTION,
}
THINKING = "enable_thinking"  # the variable of Qwen3 and its kin

Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def join_text_parts(content: object) -> object:
    """Returns the text of a message whose content is a list of parts. Raises UserError."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content[: MAX_CONTENT_PARTS + 1]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise UserError(f"content part {shown(kind)}: this server reads only parts of text")
        texts.append(text)
    if len(texts) > MAX_CONTENT_PARTS:
        raise UserError(f"content has {len(content)} parts: send at most {MAX_CONTENT_PARTS}")
    return "\n".join(texts)  # as vLLM does


def without_nulls(message: object) -> object:
    """Returns a message without the fields that a client has set to null."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


class ChatMessage(BaseModel, strict=True, extra="forbid"):
    """A message of a chat."""

    role: Text
    content: Annotated[str, BeforeValidator(join_text_parts)] = ""
    tool_calls: EarlierCalls = []  # of the assistant
    tool_call_id: Text | None = None  # of a tool's answer
    name: Text | None = None  # of the tool, or of a participant
    # Of the assistant, as OpenAI's API, vLLM and other servers return them.
    reasoning_content: str = ""
    reasoning: str = ""
    refusal: str = ""
    annotations: list[object] = []

    @model_validator(mode="after")
    def check_fields(self) -> "ChatMessage":
        """Raises ValueError if a message is empty, or has a field of another role."""
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "refusal", "annotations"):
                if getattr(self, name):
                    raise ValueError(f"only the assistant has {name}")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("tool_call_id is a field of messages with the role tool")
        # A tool may return nothing, and an answer may be empty.
        if not (self.content or self.role in ("assistant", "tool")):
            raise ValueError("the content is missing or empty")
        if self.annotations:
            raise ValueError("annotations: this server does not read citations: omit them")
        return self

    @property
    def num_characters(self) -> int:
        functions = [call.function for call in self.tool_calls]
        texts = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        return sum(map(len, texts)) + sum(len(item.arguments) for item in functions)

    def to_template(self) -> dict[str, object]:
        """Returns the message as chat templates take it. Raises UserError for a wrong call."""
        # Instead of an answer, OpenAI's models may give a reason to refuse.
        content = self.content or self.refusal
        message: dict[str, object] = {"role": self.role, "content": content}
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": call.function.to_template()}
                for call in self.tool_calls
            ]
        named = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in named.items() if value is not None}


Message = Annotated[ChatMessage, BeforeValidator(without_nulls)]

# Stop at the first error: reporting the errors of a long list takes far longer than the list
# itself.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True)]
Messages = Annotated[list[Message], Field(fail_fast=True)]
AlternativesCount = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
StopTokens = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)]
OptionText = Annotated[str, Field(max_length=MAX_OPTION_CHARACTERS)]
OptionNumber = Annotated[float, Field(allow_inf_nan=False)]
OptionInteger = Annotated[int, Field(gt=-(2**31), lt=2**31)]
TemplateOptions = dict[str, bool | OptionInteger | OptionNumber | OptionText]

JSON_OBJECT = TypeAdapter(dict[str, object])


class CompletionRequest(BaseModel, strict=True, extra="allow"):
    """The body of a completion or chat request. `model_extra` has all other options."""

    model: str
    prompt: Text | Texts | TokenIds | TokenLists = []
    messages: Messages = []
    tools: Tools = []
    tool_choice: str | dict[str, object] = "auto"
    parallel_tool_calls: bool = True
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)  # choices per prompt
    best_of: Count | None = None
    # 0 only if log-probabilities of the prompt are requested
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # the newer name of max_tokens
    temperature: float = Field(default=1.0, ge=0, le=2)
    # Filters. Without a value the server's setting holds.
    top_p: Share | None = None  # 0: only the most probable tokens
    top_k: TopK | None = None  # 0, and -1 as in vLLM: all tokens
    min_p: Share | None = None
    stop: StopString | StopStrings = []
    stop_token_ids: StopTokens = []  # vLLM's
    seed: Seed | None = None
    # In a completion, the number of alternatives. In a chat, a boolean; top_logprobs has the
    # number.
    logprobs: bool | Count = False
    top_logprobs: AlternativesCount = 0
    echo: bool | Literal[0, 1] = False
    prompt_logprobs: AlternativesCount | None = None  # vLLM's
    return_token_ids: bool = False  # vLLM's
    chat_template_kwargs: TemplateOptions = {}  # vLLM's: variables of the chat template
    reasoning_effort: EFFORTS | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}

    @property
    def stop_strings(self) -> list[str]:
        """Returns `stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def shown_tools(self) -> list[ToolSpec]:
        """Returns the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def prompts(self) -> list[str | TokenIds]:
        """Returns the prompts of a completion, as text or as tokens."""
        prompt = self.prompt
        # The four forms of OpenAI's `prompt`: a text, texts, tokens, or lists of tokens.
        if isinstance(prompt, str):
            return [prompt]
        texts = [item for item in prompt if isinstance(item, str)]
        token_lists = [item for item in prompt if isinstance(item, list)]
        if texts or token_lists:
            return [*texts, *token_lists]
        return [[item for item in prompt if isinstance(item, int)]]

    def filters(self, defaults: Filters) -> Filters:
        """Returns the request's filters. Values that it does not set come from `defaults`."""
        top_k, top_p, min_p = defaults
        if self.top_k is not None:
            top_k = max(self.top_k, 0)
        if self.top_p is not None:
            top_p = self.top_p
        if self.min_p is not None:
            min_p = self.min_p
        return Filters(top_k, top_p, min_p)

    def count_sequences(self, is_chat: bool) -> int:
        """Returns the number of sequences that the request needs: `n` for each prompt."""
        num_prompts = 1 if is_chat else len(self.prompts)
        return num_prompts * self.n

    def reply_options(self, is_chat: bool) -> ReplyOptions:
        """Returns the form of the reply."""
        return ReplyOptions(
            is_chat=is_chat,
            is_streamed=self.stream,
            # logprobs=0 also requests log-probabilities: of the tokens, without alternatives.
            wants_logprobs=self.logprobs is not False,
            wants_usage=self.stream_options.get("include_usage", False),
            num_choices=self.n,
            model=self.model,
            is_greedy=self.temperature == 0,
            num_alternatives=self.top_logprobs if is_chat else int(self.logprobs),
            echoes=bool(self.echo),
            prompt_alternatives=self.prompt_logprobs,
            returns_token_ids=self.return_token_ids,
            samples=self.max_new_tokens != 0,
        )

    @property
    def max_new_tokens(self) -> int | None:
        """Returns the maximum number of tokens after a prompt, or None if none is given."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def always() -> bool:
    """The default `is_wanted` of `make_sequences`."""
    return True


class RequestReader:
    """Reads requests for a model and its adapters, makes sequences of them, numbers the prompts.

    `read` checks sizes before it validates fields, and `make_sequences` before it tokenizes text.
    Both may run in any thread.
    """

    def __init__(
        self,
        model_name: str,
        engine: Engine,
        text_tokenizer: PreTrainedTokenizerFast,
        max_sequences: int,
        max_logprobs: int = Limits.max_request_logprobs,
        adapters: Mapping[str, HeldAdapter] = MappingProxyType({}),
        *,
        keeps_control_tokens: bool = False,
    ) -> None:
        """Makes a reader.

        Args:
            max_sequences: maximum number of sequences of one request.
            max_logprobs: maximum number of log-probabilities of the prompt and of alternatives in
                one reply.
            adapters: of the engine's bank, by the names that requests give.
            keeps_control_tokens: task.control_tokens (`chat_template.render_chat`).
        """
        self.model_name = model_name
        self.models = {model_name: BASE_MODEL} | dict(adapters)
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.max_sequences = max_sequences
        self.max_logprobs = max_logprobs
        self.keeps_control_tokens = keeps_control_tokens
        self.prompt_numbers: Iterator[int] = itertools.count()
        # A token has at most as many characters as its vocabulary entry.
        self.longest_token = max(map(len, text_tokenizer.get_vocab()))

    # -- reading -----------------------------------------------------------------------------------

    def read(self, body: bytes, is_chat: bool) -> CompletionRequest:
        """Reads a JSON body. A field with the value null counts as missing.

        Raises pydantic.ValidationError, which is a ValueError, if the body is not a request. Raises
        HTTPException 404 if the request names another model. Raises UserError if it requests an
        unsupported option, or exceeds a limit.
        """
        fields = JSON_OBJECT.validate_json(body)
        # Clients send null for options that they do not set.
        stated = {name: value for name, value in fields.items() if value is not None}
        self.check_sizes(stated)
        request = CompletionRequest.model_validate(stated)
        self.check_options(request, is_chat)

        count = request.count_sequences(is_chat)
        if count > self.max_sequences:
            raise UserError(
                f"the request has {count // request.n} prompts and n={request.n}: "
                f"{count} sequences, and a request may have {self.max_sequences}. Send several "
                "requests, or start the server with a larger --max-request-sequences"
            )
        # Reject texts by their length first: tokenizing megabytes takes seconds.
        if is_chat:
            self.check_characters(0, sum(item.num_characters for item in request.messages))
        else:
            for index, prompt in enumerate(request.prompts):
                if isinstance(prompt, str):
                    self.check_characters(index, len(prompt))
        return request

    def check_sizes(self, fields: dict[str, object]) -> None:
        """Rejects lists and objects that are too long."""
        # Runs before the elements are validated, which takes long for a hostile request.
        longest = max(self.engine.max_sequence_tokens, self.max_sequences)
        for name in ("prompt", "messages"):
            items = fields.get(name)
            if not isinstance(items, list):
                continue
            if len(items) > longest:
                raise UserError(
                    f"{name} has {len(items)} elements: a request may have {self.max_sequences} "
                    f"prompts (--max-request-sequences) and {self.engine.max_sequence_tokens} "
                    "tokens or messages a prompt (--config.rollout.max_episode_tokens)"
                )
            for index, item in enumerate(items):
                if isinstance(item, list) and len(item) > self.engine.max_sequence_tokens:
                    raise UserError(
                        f"{name} {index} has {len(item)} tokens: there is room for "
                        f"{self.engine.max_sequence_tokens} in all "
                        "(--config.rollout.max_episode_tokens)"
                    )
                if isinstance(item, dict) and len(item) > MAX_OBJECT_FIELDS:
                    raise UserError(
                        f"{name} {index} has {len(item)} fields: send only role and content"
                    )
        for name in ("stream_options", "chat_template_kwargs"):
            options = fields.get(name)
            if isinstance(options, dict) and len(options) > MAX_OBJECT_FIELDS:
                raise UserError(
                    f"{name} has {len(options)} fields: send at most {MAX_OBJECT_FIELDS}"
                )

    def check_options(self, request: CompletionRequest, is_chat: bool) -> None:
        """Rejects options that the server would otherwise have to ignore."""
        settings = self.engine.settings
        for name, value in (request.model_extra or {}).items():
            # A client may repeat the server's setting, since this changes nothing.
            server_value = getattr(settings, name, None)
            if name not in LABELS and value not in (*NEUTRAL_VALUES.get(name, ()), server_value):
                raise UserError(f"{name}={shown(value)}: {REASONS.get(name, NO_OPTION)}")
        if request.model not in self.models:
            message = f"there is no model {request.model}, only {', '.join(self.models)}"
            raise HTTPException(404, message)
        # The server returns all of its samples, and cannot choose the best of more.
        if request.best_of not in (None, request.n):
            raise UserError(
                f"best_of={request.best_of}: the server returns every choice that it samples. Ask "
                f"for n={request.best_of} and choose among them by their logprobs"
            )
        if request.tools:
            self.check_tools(request, is_chat)
        elif request.tool_choice not in ("none", "auto"):
            raise UserError(f"tool_choice={shown(request.tool_choice)}: the request has no tools")
        for token in request.stop_token_ids:
            if token >= self.engine.model.vocab_size:
                raise UserError(
                    f"stop_token_ids has {token}, which is not in the vocabulary: tokens are from "
                    f"0 to {self.engine.model.vocab_size - 1}"
                )
        if not is_chat and (request.chat_template_kwargs or request.reasoning_effort):
            raise UserError(
                "chat_template_kwargs and reasoning_effort are options of chats: send messages"
            )
        self.check_logprobs(request, is_chat)

    def check_tools(self, request: CompletionRequest, is_chat: bool) -> None:
        """Rejects what cannot be had of tools."""
        if not is_chat:
            raise UserError("tools: they are an option of chats, send messages")
        if request.tool_choice not in ("none", "auto"):
            raise UserError(
                f"tool_choice={shown(request.tool_choice)}: this server cannot force a call, the "
                "model decides: omit it, or send none"
            )
        if not request.parallel_tool_calls:
            raise UserError(
                "parallel_tool_calls=False: the model decides how many calls an answer has: omit "
                "it, and use the first"
            )

    def check_logprobs(self, request: CompletionRequest, is_chat: bool) -> None:
        """Rejects invalid combinations of echo, log-probabilities, streams and lengths."""
        if not 0 <= request.logprobs <= MAX_ALTERNATIVES:
            raise UserError(
                f"logprobs={request.logprobs}: there are 0 to {MAX_ALTERNATIVES} alternatives"
            )
        options = request.reply_options(is_chat)
        if is_chat and request.echo:
            raise UserError("echo: a chat does not repeat its messages: omit it")
        if request.top_logprobs and not is_chat:
            raise UserError(
                f"top_logprobs={request.top_logprobs} is an option of chats: give the number as "
                "logprobs"
            )
        if request.top_logprobs and not request.logprobs:
            raise UserError(f"top_logprobs={request.top_logprobs}: set logprobs=true as well")
        if options.is_streamed and options.scores_prompt:
            raise UserError(
                "stream: log-probabilities of the prompt are computed once the answer has ended. "
                "Omit stream, or prompt_logprobs and echo with logprobs"
            )
        if not options.samples and not (options.echoes or options.scores_prompt):
            raise UserError(
                "max_tokens=0: the answer would be empty. Ask for a token, or for the prompt's "
                "tokens with echo or prompt_logprobs"
            )
        if not options.samples and (request.n > 1 or request.stream):
            raise UserError("max_tokens=0: nothing is sampled: omit n and stream")

    def check_characters(self, index: int, num_characters: int) -> None:
        """Rejects a text that exceeds the context even if all of its tokens are long."""
        tokens = self.engine.max_sequence_tokens
        if num_characters > tokens * self.longest_token:
            raise UserError(
                f"prompt {index} has {num_characters} characters: there is room for {tokens} "
                "tokens in all (--config.rollout.max_episode_tokens), and no token has more than "
                f"{self.longest_token} characters"
            )

    def reply_options(self, request: CompletionRequest, is_chat: bool) -> ReplyOptions:
        """Returns the form of the reply, and how the calls in it are read."""
        options = request.reply_options(is_chat)
        if not request.shown_tools:
            return options
        reader = CallReader.of(request.shown_tools, str(self.tokenizer.chat_template))
        return replace(options, calls=reader)

    # -- sequences ---------------------------------------------------------------------------------

    def make_sequences(
        self,
        request: CompletionRequest,
        is_chat: bool,
        is_wanted: Callable[[], bool] = always,
    ) -> list[Sequence]:
        """Returns one sequence for each choice, `request.n` for each prompt.

        Raises UserError if a prompt does not fit. `is_wanted()` is called before each prompt is
        tokenized; once it returns false, no further sequences are made.
        """
        sequences: list[Sequence] = []
        filters = request.filters(self.engine.filters)
        options = request.reply_options(is_chat)
        num_logprobs = 0
        # A chat is one prompt; a completion request may have several.
        prompts = [self.render(request)] if is_chat else request.prompts
        for index, prompt in enumerate(prompts):
            if not is_wanted():
                break
            ids = self.token_ids(prompt)
            prompt_number = next(self.prompt_numbers)
            num_new = self.count_new_tokens(request, is_chat, len(ids))
            self.check_prompt(index, ids, num_new, options.samples)
            # Check inside the loop: stop before further prompts are tokenized.
            num_logprobs += options.count_logprobs(len(ids), num_new)
            self.check_count(num_logprobs)
            prompt_tokens = np.array(ids, np.int32)
            # All choices share the prompt number, and so one prefill.
            for choice in range(request.n):
                sample_index = index * request.n + choice
                sequence = Sequence(
                    prompt_id=prompt_number,
                    sample_index=sample_index,
                    request_id=noise_number(request.seed, prompt_number, choice),
                    prompt_tokens=prompt_tokens,
                    length_limit=len(ids) + num_new,
                    temperature=request.temperature,
                    stop_strings=request.stop_strings,
                    stop_ids=tuple(request.stop_token_ids),
                    filters=filters,
                    adapter=self.models[request.model],
                )
                sequences.append(sequence)
        return sequences

    def token_ids(self, prompt: chat_template.Chat | str | TokenIds) -> TokenIds:
        """Returns the token ids of a prompt."""
        if isinstance(prompt, chat_template.Chat):
            # A chat template writes the first tokens (such as BOS) itself.
            if len(prompt.pieces) > 1 or prompt.quoted.texts:
                return tokenizer.encode_chat(self.tokenizer, prompt)
            return tokenizer.encode_releasing_gil(self.tokenizer, prompt.text)
        if isinstance(prompt, str):
            ids = tokenizer.encode_releasing_gil(self.tokenizer, prompt)
            return tokenizer.with_first_tokens(self.tokenizer, ids)
        return prompt

    def render(self, request: CompletionRequest) -> chat_template.Chat:
        """Returns the prompt of a chat. Raises UserError if a tool is not in it."""
        # The calls in a message are objects, which templates read and no type of a prompt has.
        messages = cast(
            list[chat_template.Message], [message.to_template() for message in request.messages]
        )
        schemas = [tool.to_schema() for tool in request.shown_tools]
        options = self.template_options(request)
        chat = chat_template.render_chat(
            self.tokenizer,
            messages,
            schemas,
            options,
            keeps_thoughts=self.engine.settings.thoughts == "keep",
            keeps_control_tokens=self.keeps_control_tokens,
        )
        self.check_characters(0, len(chat.text))
        if schemas:
            without = chat_template.render(self.tokenizer, messages, options=options)
            is_shown = (
                chat_template.render(self.tokenizer, messages, True, schemas, options) != without
            )
            check_template(str(self.tokenizer.chat_template), shows_tools=is_shown)
        return chat

    def template_options(self, request: CompletionRequest) -> dict[str, JsonValue]:
        """Returns the variables that a request gives to the chat template.

        Raises UserError for a variable that would have no effect.
        """
        template = str(self.tokenizer.chat_template)
        options: dict[str, JsonValue] = {}
        for name, value in request.chat_template_kwargs.items():
            if name in TEMPLATE_VARIABLES:
                raise UserError(f"chat_template_kwargs.{name}: the server sets it: omit it")
            if reads_variable(template, name):
                options[name] = value
            elif not (name == THINKING and value is ("think" in template)):
                # A model that never thinks needs no variable to switch thoughts off.
                raise UserError(
                    f"chat_template_kwargs.{name}: the chat template of this model does not read "
                    "it: omit it"
                )
        effort = request.reasoning_effort
        if effort is None:
            return options
        if reads_variable(template, "reasoning_effort"):
            options.setdefault("reasoning_effort", effort)
        elif effort == "none" and reads_variable(template, THINKING):
            options.setdefault(THINKING, False)
        elif effort != "medium" and not (effort == "none" and "think" not in template):
            raise UserError(
                f"reasoning_effort={effort}: the chat template of this model has no levels of "
                "thinking: omit it"
            )
        return options

    def count_new_tokens(self, request: CompletionRequest, is_chat: bool, num_prompt: int) -> int:
        """Returns the maximum number of tokens after a prompt of `num_prompt` tokens."""
        if request.max_new_tokens is not None:
            return request.max_new_tokens
        room = self.engine.max_sequence_tokens - num_prompt
        return room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)

    def check_count(self, num_logprobs: int) -> None:
        """Rejects a request if its prompts so far have too many log-probabilities."""
        if num_logprobs > self.max_logprobs:
            raise UserError(
                f"the reply would have more than {self.max_logprobs} log-probabilities of the "
                "prompt and of alternatives (tokens times 1 + alternatives): send several "
                "requests, or start the server with a larger --max-request-logprobs"
            )

    def check_prompt(self, index: int, ids: TokenIds, num_new: int, samples: bool) -> None:
        """Raises UserError unless the tokens exist and the sequence fits the engine."""
        longest = self.engine.max_sequence_tokens
        if not ids:
            raise UserError(f"prompt {index} is empty: send at least one token")
        if min(ids) < 0 or max(ids) >= self.engine.model.vocab_size:
            raise UserError(
                f"prompt {index} has a token that is not in the vocabulary: "
                f"tokens are from 0 to {self.engine.model.vocab_size - 1}"
            )
        least = 1 if samples else 0
        if not least <= num_new <= longest - len(ids):
            raise UserError(
                f"prompt {index} has {len(ids)} tokens and asks for {max(num_new, least)} more: "
                f"there is room for {longest} in all (--config.rollout.max_episode_tokens)"
            )


def reads_variable(template: str, name: str) -> bool:
    """Returns whether a chat template contains the name of a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def noise_number(seed: int | None, prompt_number: int, choice: int) -> int:
    """Returns the number that keys the noise of a choice, below 2**31.

    The same `seed` gives the same numbers in every request. As in vLLM, choice i of seed s has the
    same noise as a single choice with seed s + i. Numbers with a seed are in the upper half.
    Numbers without a seed are in the lower half, and repeat only after 2**30 have been used.
    """
    if seed is not None:
        return 2**30 + zlib.crc32(f"{seed + choice}/0".encode()) % 2**30
    return (prompt_number * MAX_CHOICES + choice) % 2**30
