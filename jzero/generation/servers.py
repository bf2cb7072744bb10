"""One server with the OpenAI API: its requests, and the parsing of its replies."""

import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import pydantic

from jzero import http
from jzero.config import Config
from jzero.files import JsonObject
from jzero.types import JsonValue, Problem, Turn

MAX_BYTES_PER_TOKEN = 64  # of a reply: more than any token takes as JSON text
MAX_TOKENS = 10**9  # maximum number of tokens that a reply may report
# Invalid replies to one request, such as truncated ones, before the request fails
WRONG_REPLIES = 3
ALIVE_SECONDS = 10.0  # time limit for a server to list its models

# Statuses that concern the server, the key or the model, and not the prompt. All others below 500
# that are not transient concern the prompt: it is too long, the server's template rejects one of
# its messages, or a filter of the server rejects it.
STATUSES_OF_SERVER = (0, 401, 402, 403, 404, 405, 407)

# Settings that are sent only if the user has set them, by their name in the API.
SAMPLING = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
}


# -- Replies ---------------------------------------------------------------------------------------


class Form(pydantic.BaseModel, strict=True):
    """A part of a reply, with strictly typed fields. Other fields are ignored."""


class Message(Form):
    """A message of the assistant. Servers with a reasoning parser send the reasoning separately."""

    content: str | None  # null: no text outside of the reasoning
    reasoning_content: str | None = None  # DeepSeek, SGLang, vLLM
    reasoning: str | None = None  # later versions of vLLM, OpenRouter


class Choice(Form):
    """One response: `text` of a completion, `message` of a chat completion."""

    text: str | None = None
    message: Message | None = None
    finish_reason: str | None = pydantic.Field(None, max_length=64)
    stop_reason: pydantic.JsonValue = None  # vLLM: the stop string that it removed from the text


class Usage(Form):
    completion_tokens: int = pydantic.Field(0, ge=0, le=MAX_TOKENS)


class Answer(Form):
    """The parts of a server's reply that jzero reads."""

    choices: list[Choice] = pydantic.Field(min_length=1)
    usage: Usage | None = None


def read_answer(reply: JsonValue) -> Answer:
    """Returns the validated parts of a reply. Raises ValueError if its format is wrong."""
    try:
        return Answer.model_validate(reply)
    except pydantic.ValidationError as error:
        # Report only the first error: a reply may have many.
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise ValueError(f"{where}: {first['msg']}") from None


def read_completion(reply: JsonValue) -> Answer:
    """Returns a completion. Raises ValueError if it has no text."""
    answer = read_answer(reply)
    if answer.choices[0].text is None:
        raise ValueError("choices.0.text: Field required")
    return answer


def read_chat(reply: JsonValue) -> Answer:
    """Returns a chat completion. Raises ValueError if it has no message."""
    answer = read_answer(reply)
    if answer.choices[0].message is None:
        raise ValueError("choices.0.message: Field required")
    return answer


def with_thoughts(reasoning: str | None, content: str, is_cut: bool) -> str:
    """Returns a response as the model wrote it, with its reasoning in <think> tags."""
    # <think> tags are the format of the data sets that models are trained on.
    if not reasoning:
        return content
    thoughts = "<think>\n" + reasoning.strip("\n")
    # Reasoning that the token limit has cut off has no end tag.
    if not content and is_cut:
        return thoughts
    return f"{thoughts}\n</think>\n\n{content.lstrip()}"


def is_about_prompt(refusal: http.Refused) -> bool:
    """Returns whether a server refused the prompt, and may accept a different one."""
    # A redirect concerns the address of the server.
    is_redirect = 300 <= refusal.status < 400
    return not is_redirect and refusal.status not in STATUSES_OF_SERVER


# -- The server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerOptions:
    """The options that all servers share."""

    model: str  # the name that the servers use
    seconds: float  # time limit of one exchange
    retries: int
    is_greedy: bool = False
    given: Collection[str] = ()  # names of the settings that the user has set


class Server:
    """A server and its status. Any thread may call `ask`; `jzero.generation.sharing` counts.

    The client repeats a request `retries` times, after growing pauses, on status 408, 409, 425, 429
    and 5xx, on a timeout, and on a lost connection.
    """

    def __init__(self, url: str, options: ServerOptions, settings: Config) -> None:
        """Makes the clients without connecting. Raises UserError if `url` is not an address."""
        self.label = f"--base-url {url}"
        self.options = options
        self.settings = settings
        self._client = self._make_client(url, options.seconds, options.retries)
        # A client without retries and with a short time limit: it only tests whether the server is
        # alive.
        self._lister = self._make_client(url, ALIVE_SECONDS, retries=0)
        self.num_asked = 0  # requests in flight
        self.failures = 0  # since the last answer
        self.last_failure = 0.0  # of time.monotonic
        self.rests = 0  # since the last answer
        self.rests_until = 0.0  # of time.monotonic

    def _make_client(self, url: str, seconds: float, retries: int) -> http.Client:
        return http.Client(
            "--base-url",
            url,
            label=self.label,
            seconds=seconds,
            retries=retries,
            key=os.environ.get("OPENAI_API_KEY", ""),
            key_variable="OPENAI_API_KEY",
            max_bytes=(1 << 20) + MAX_BYTES_PER_TOKEN * self.settings.rollout.max_new_tokens,
        )

    def close(self) -> None:
        """Cancels the requests in flight."""
        self._client.close()
        self._lister.close()

    @property
    def is_resting(self) -> bool:
        """Whether the server has failed and currently gets no requests."""
        return time.monotonic() < self.rests_until

    def is_alive(self) -> bool:
        """Returns whether the server lists its models, or replies that it has no list."""
        try:
            self._lister.ask("models", None, read=bool)
        except http.Refused as refusal:
            return refusal.status > 0
        except http.WrongReply:
            return True
        except http.RemoteError:
            return False
        return True

    def ask(self, problem: Problem, sample_index: int) -> tuple[Turn, str | None]:
        """Returns a response as a turn without a grade, and its reasoning if sent separately.

        Raises http.RemoteError.
        """
        answer = self._ask(problem, sample_index)
        choice = answer.choices[0]
        reasoning = None
        if choice.message is not None:
            reasoning = choice.message.reasoning_content or choice.message.reasoning
            content = choice.message.content or ""
        else:
            content = choice.text or ""
        # With keep_stop the stop string belongs to the text; vLLM reports the one that it removed.
        if isinstance(choice.stop_reason, str) and self.settings.rollout.keep_stop:
            content += choice.stop_reason
        finish = choice.finish_reason or "stop"
        num_tokens = answer.usage.completion_tokens if answer.usage else 0
        text = with_thoughts(reasoning, content, finish == "length")
        return Turn(0, num_tokens, text, finish), reasoning

    def _ask(self, problem: Problem, sample_index: int) -> Answer:
        is_chat = not isinstance(problem.prompt, str)
        path = "chat/completions" if is_chat else "completions"
        read: Callable[[JsonValue], Answer] = read_chat if is_chat else read_completion
        body = self.body(problem, sample_index)
        # Another try may succeed after an invalid reply. The last one raises.
        for _ in range(WRONG_REPLIES - 1):
            try:
                return self._client.ask(path, body, read)
            except http.WrongReply:
                continue
        return self._client.ask(path, body, read)

    def body(self, problem: Problem, sample_index: int) -> JsonObject:
        """Returns the body of a request. The server's defaults apply to missing fields."""
        rollout = self.settings.rollout
        # The same command sends the same seed for a response, also after a restart.
        noise = f"{self.settings.train.seed}/{problem.id}/{sample_index}"
        body: JsonObject = {
            "model": self.options.model,
            "max_tokens": rollout.max_new_tokens,
            "seed": zlib.crc32(noise.encode()) >> 1,  # servers require a signed 32-bit integer
            **dict(self._sampling()),
        }
        if rollout.stop:
            body["stop"] = list(rollout.stop)
        is_chat = not isinstance(problem.prompt, str)
        body["messages" if is_chat else "prompt"] = problem.prompt
        return body

    def _sampling(self) -> Iterator[tuple[str, float]]:
        for name, setting in SAMPLING.items():
            if name == "temperature" and self.options.is_greedy:
                yield name, 0.0
            elif setting in self.options.given:
                yield name, getattr(self.settings.rollout, setting.removeprefix("rollout."))
