"""Requests of OpenAI's API: their fields, what is refused, and the sequences that they ask for."""

import itertools
import zlib
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter
from starlette.exceptions import HTTPException

from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.engine import Engine
from jzero.rollout.sequence import Sequence

MAX_CHOICES = 128  # of a prompt
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default; a chat takes what there is room for

# Options that are accepted with any value, because they are notes of the client to itself.
LABELS = ("user", "metadata", "store")

# Options that are accepted only with the value that changes nothing, or with the server's own.
NEUTRAL_VALUES: dict[str, object] = {
    "top_p": 1,
    "suffix": "",
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
    "top_k": 0,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "echo": 0,
}

Text = Annotated[str, Field(min_length=1)]
Message = Annotated[dict[Literal["role", "content"], Text], Field(min_length=2)]
TokenIds = list[int]


class CompletionRequest(BaseModel, strict=True, extra="allow"):
    """The body of a completion or of a chat. Other options are in `model_extra`."""

    model: str
    prompt: Text | list[Text] | TokenIds | list[TokenIds] = []
    messages: list[Message] = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)  # choices of each prompt
    max_tokens: int = Field(0, ge=1)  # 0, which no request can say: the default
    max_completion_tokens: int = Field(0, ge=1)  # the newer name of max_tokens
    temperature: float = Field(1.0, ge=0, le=2)
    stop: Text | list[Text] = []
    seed: int | None = None
    logprobs: bool | Literal[0, 1] = False  # of a completion a number, of a chat a boolean
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}

    @property
    def wants_logprobs(self) -> bool:
        """Returns whether log-probabilities were asked for. 0 asks for those of the tokens."""
        return self.logprobs is not False

    @property
    def stop_strings(self) -> list[str]:
        """Returns `stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


def parse_request(body: bytes) -> CompletionRequest:
    """Reads a JSON body. A field that is null is as one that is not there.

    Raises pydantic.ValidationError, which is a ValueError.
    """
    fields = TypeAdapter(dict[str, object]).validate_json(body)
    stated = {name: value for name, value in fields.items() if value is not None}
    return CompletionRequest.model_validate(stated)


class RequestReader:
    """Makes sequences of requests for one model, and numbers the prompts."""

    def __init__(
        self, model_name: str, engine: Engine, text_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.model_name = model_name
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.prompt_numbers: Iterator[int] = itertools.count()

    def make_sequences(self, request: CompletionRequest, is_chat: bool) -> list[Sequence]:
        """Returns one sequence for each choice, `request.n` for each prompt.

        Raises HTTPException 404 if the request names another model. Raises UserError if it asks for
        something that the server does not do, or if a prompt does not fit.
        """
        self.check_options(request, is_chat)
        sequences: list[Sequence] = []
        for index, prompt in enumerate(self.split_prompts(request, is_chat)):
            is_text = isinstance(prompt, str)
            ids = tokenizer.encode(self.tokenizer, prompt) if is_text else prompt
            prompt_number = next(self.prompt_numbers)
            num_new = self.count_new_tokens(request, is_chat, len(ids))
            self.check_prompt(index, ids, num_new)
            for choice in range(request.n):
                sample_index = index * request.n + choice
                sequence = Sequence(
                    prompt_id=prompt_number,
                    sample_index=sample_index,
                    request_id=noise_number(request.seed, sample_index, prompt_number, choice),
                    prompt_tokens=np.array(ids, np.int32),
                    length_limit=len(ids) + num_new,
                    temperature=request.temperature,
                    stop_strings=request.stop_strings,
                )
                sequences.append(sequence)
        return sequences

    def check_options(self, request: CompletionRequest, is_chat: bool) -> None:
        """Refuses what the server would otherwise have to ignore."""
        settings = self.engine.settings
        for name, value in (request.model_extra or {}).items():
            own_value = getattr(settings, name, None)
            if name not in LABELS and value not in (NEUTRAL_VALUES.get(name), own_value):
                raise UserError(
                    f"{name}={value}: this server does not take the option from a request, leave "
                    "it out. Filters are set at its start, as --config.rollout.top_p=0.9."
                )
        if request.model != self.model_name:
            message = f"there is no model {request.model}, only {self.model_name}"
            raise HTTPException(404, message)
        if request.logprobs == 1 and request.temperature and not is_chat:
            raise UserError(
                "logprobs=1: the server knows the most probable token only with temperature=0. "
                "Ask for logprobs=0, which returns the sampled tokens."
            )

    def split_prompts(self, request: CompletionRequest, is_chat: bool) -> list[str | TokenIds]:
        """Returns the prompts of a request, as text or as tokens."""
        if is_chat:
            messages = [
                {"role": message["role"], "content": message["content"]}
                for message in request.messages
            ]
            return [tokenizer.render(self.tokenizer, messages)]
        prompt = request.prompt
        if isinstance(prompt, str):
            return [prompt]
        texts = [item for item in prompt if isinstance(item, str)]
        token_lists = [item for item in prompt if isinstance(item, list)]
        if texts or token_lists:
            return [*texts, *token_lists]
        return [[item for item in prompt if isinstance(item, int)]]

    def count_new_tokens(self, request: CompletionRequest, is_chat: bool, num_prompt: int) -> int:
        """Returns how many tokens may follow a prompt of `num_prompt` tokens."""
        room = self.engine.max_sequence_tokens - num_prompt
        default = room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
        return request.max_completion_tokens or request.max_tokens or default

    def check_prompt(self, index: int, ids: TokenIds, num_new: int) -> None:
        """Raises UserError unless the tokens exist and the sequence fits the engine."""
        longest = self.engine.max_sequence_tokens
        if not ids:
            raise UserError(f"prompt {index} is empty: send at least one token")
        if min(ids) < 0 or max(ids) >= self.engine.model.vocab_size:
            raise UserError(
                f"prompt {index} has a token that is not in the vocabulary: "
                f"tokens are from 0 to {self.engine.model.vocab_size - 1}"
            )
        if not 0 < num_new <= longest - len(ids):
            raise UserError(
                f"prompt {index} has {len(ids)} tokens and asks for {max(num_new, 1)} more: "
                f"there is room for {longest} in all (--config.rollout.max_episode_tokens)"
            )


def noise_number(seed: int | None, sample_index: int, prompt_number: int, choice: int) -> int:
    """Returns the number that keys the noise of a choice, below 2**31.

    The same `seed` gives the same numbers in every request. They are in the upper half. Without a
    seed the numbers are in the lower half, and no other prompt gets them before 2**30 are used up.
    """
    if seed is not None:
        return 2**30 + zlib.crc32(f"{seed}/{sample_index}".encode()) % 2**30
    return (prompt_number * MAX_CHOICES + choice) % 2**30
