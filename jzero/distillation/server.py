"""A teacher on an OpenAI-compatible server: sends token ids and receives their log-probs.

    client = ScoringClient(config.teacher)
    logps = client.score_all([token_ids, ...])      # f32[T] for each list of T ids

Every request is a `POST <url>/completions` with token ids as prompt, so that client and server use
the same tokens. There are two forms (`teacher.request`):

    echo             OpenAI: echo=true, logprobs=1. The reply's choices[0].logprobs.token_logprobs
                     begins with the log-probs of the prompt.
    prompt_logprobs  vLLM: prompt_logprobs=0. The reply's choices[0].prompt_logprobs has
                     {"<id>": {"logprob": ...}} for every token.

Both request one token after the prompt (max_tokens=1), because some servers do not support 0. This
token is ignored. `jzero.http` bounds and retries the requests. Only numbers, the texts of tokens
and the names of models are read from a reply.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from jzero import http, json_values
from jzero.config import teachers
from jzero.distillation.prompts import TeacherPrompts
from jzero.errors import UserError, shown
from jzero.files import JsonObject
from jzero.hosts import collectives
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.training.step import Minibatch
from jzero.training.teacher import TeacherScores
from jzero.types import JsonValue, Rollout, State

MAX_BYTES_PER_TOKEN = 512  # in a reply; a token's text, log-probs and rank take 100 to 250
# Servers return -9999 for the log of 0. Below this limit fp32 sums of losses and of their squares
# can overflow. No softmax of fp32 logits comes close to the limit.
LOWEST_LOGP = -1e4
HIGHEST_LOGP = 1e-3  # rounding can put the log of a probability of 1 slightly above 0
NUM_PROBES = 32  # number of token ids to compare as texts before the first step

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """A server's log-probs for a prompt."""

    logps: np.ndarray  # f32[T] log-probability of every token; 0 for the first, which has none
    texts: list[str]  # the texts of the tokens in the server's reply; "" if missing


# -- the client ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringClient:
    """Requests the log-probs of token ids from a server."""

    settings: teachers.Server

    @cached_property
    def _client(self) -> http.Client:
        """The HTTP client. Raises UserError if teacher.key_variable is not in the environment."""
        name = self.settings.key_variable
        if name and not os.environ.get(name):
            raise UserError(
                f"teacher.key_variable={name} is not set in the environment: export {name}, or set "
                "teacher.key_variable="
            )
        return http.Client(
            "teacher.url",
            self.settings.url,
            seconds=self.settings.seconds,
            retries=self.settings.retries,
            key=os.environ.get(name, "") if name else "",
            key_variable=name,
        )

    @cached_property
    def model(self) -> str:
        """The name of the model: teacher.model, or the name of the server's only model."""
        # Without teacher.model the server must have exactly one model.
        if self.settings.model:
            return self.settings.model
        names = self._ask("models", None, read_model_names, http.MAX_REPLY_BYTES)
        if len(names) != 1:
            raise UserError(
                f"teacher.url={self.settings.url} has the models "
                f"{shown(', '.join(names) or '(none)')}: set teacher.model to one of them"
            )
        return names[0]

    def score_all(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns f32[T] for each prompt: the log-prob of every token, 0 for the first.

        Raises UserError if the server rejects a prompt, or if all tries of a request fail.
        """
        if not prompts:
            return []
        _ = self.model  # cached here, so that the threads do not request it
        executor = ThreadPoolExecutor(self.settings.concurrency)
        try:
            return [scored.logps for scored in executor.map(self.score, prompts)]
        except BaseException:
            # The run ends without waiting for requests in flight or their retries.
            self.__dict__.pop("_client").close()
            raise
        finally:
            executor.shutdown(cancel_futures=True)

    def score(self, tokens: Sequence[int]) -> Scored:
        """Returns the server's log-probs for one prompt. Raises UserError as `score_all` does."""
        # JSON takes Python integers, not NumPy's.
        ids = [int(token) for token in tokens]
        if len(ids) < 2:  # the first token has no log-prob
            return Scored(np.zeros(len(ids), np.float32), [""] * len(ids))
        body: JsonObject = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            # In case the server applies a temperature to the prompt's log-probs.
            "temperature": 1.0,
        }
        if self.settings.request == "echo":
            body |= {"echo": True, "logprobs": 1}
            read_choice = read_echo
        else:
            body |= {"prompt_logprobs": 0}
            read_choice = read_prompt_logprobs

        def read(reply: JsonValue) -> Scored:
            return read_choice(json_values.member(reply, ("choices", 0), dict), ids)

        # 1 MiB for the parts of the reply that do not depend on the number of tokens.
        return self._ask("completions", body, read, (1 << 20) + MAX_BYTES_PER_TOKEN * len(ids))

    def _ask(
        self,
        path: str,
        body: JsonObject | None,
        read: Callable[[JsonValue], T],
        max_bytes: int,
    ) -> T:
        """Sends a request and reads the reply. Every failure raises a UserError with advice."""
        try:
            return self._client.ask(path, body, read, max_bytes=max_bytes)
        except http.Refused as error:
            raise UserError(
                f"{error}: see the settings teacher.url, teacher.model, teacher.request and "
                "teacher.key_variable"
            ) from None
        except http.WrongReply as error:
            raise UserError(
                f"{error}: give the address of an OpenAI-compatible API, which usually ends with "
                "/v1, and a request form that the server supports (it is "
                f"teacher.request={self.settings.request})"
            ) from None
        except http.RemoteError as error:
            raise UserError(
                f"{error}: check that the server runs; the same command continues from the last "
                "checkpoint"
            ) from None


# -- replies ---------------------------------------------------------------------------------------


def read_model_names(reply: JsonValue) -> list[str]:
    """Returns the names in a list of models. Raises ValueError if the reply is malformed."""
    models = json_values.member(reply, ("data",), list)
    return [json_values.member(model, ("id",), str) for model in models]


def read_echo(choice: JsonObject, tokens: Sequence[int]) -> Scored:
    """Reads OpenAI's `logprobs` of an echoed prompt. Raises ValueError if they are missing.

    Log-probs of sampled tokens after the prompt are left out.
    """
    logprobs = json_values.optional_member(choice, ("logprobs",), dict, {})
    values = json_values.optional_member(logprobs, ("token_logprobs",), list, [])
    # There can be more values than tokens: some servers always sample tokens after the prompt.
    if len(values) < len(tokens):
        raise ValueError(f"{len(values)} log-probs of {len(tokens)} tokens")
    texts = json_values.optional_member(logprobs, ("tokens",), list, [])
    if len(texts) < len(tokens):
        texts = [""] * len(tokens)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("logprobs.tokens has a value that is not text")
    return Scored(to_logps(values[: len(tokens)]), texts[: len(tokens)])


def read_prompt_logprobs(choice: JsonObject, tokens: Sequence[int]) -> Scored:
    """Reads vLLM's `prompt_logprobs`. Raises ValueError if a token of the prompt has none."""
    entries = json_values.optional_member(choice, ("prompt_logprobs",), list, [])
    if len(entries) != len(tokens):
        raise ValueError(f"{len(entries)} log-probs of {len(tokens)} tokens")
    # The first token has no log-prob.
    values: list[JsonValue] = [None]
    texts = [""]
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        scored = entry.get(str(token)) if isinstance(entry, dict) else None
        if not isinstance(scored, dict):
            raise ValueError(f"none of token {token}")
        values.append(scored.get("logprob"))
        texts.append(json_values.optional_member(scored, ("decoded_token",), str, ""))
    return Scored(to_logps(values), texts)


def to_logps(values: Sequence[JsonValue]) -> np.ndarray:
    """Converts T log-probs to f32[T]. The first one is ignored.

    Raises ValueError if another one is not a number from LOWEST_LOGP to HIGHEST_LOGP.
    """
    logps = np.zeros(len(values), np.float32)
    for place, value in enumerate(values[1:], start=1):
        logps[place] = json_values.bounded_number(
            value, LOWEST_LOGP, HIGHEST_LOGP, f"log-prob of token {place}"
        )
    return logps


# -- the teacher -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerTeacher:
    """A teacher on a server."""

    client: ScoringClient
    prompts: TeacherPrompts | None = None  # None: the teacher reads the policy's prompts

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence[Minibatch],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Returns the log-probs of the sampled tokens of all packed sequences.

        Every process requests its share of the sequences.
        """
        logps = [np.zeros(len(sequence.tokens), np.float32) for sequence in sequences]
        is_scored = np.zeros(len(sequences), bool)
        indices: list[int] = []
        texts: list[np.ndarray] = []
        # In one order on all hosts, because each requests a share of this list.
        for index in sorted(index for minibatch in minibatches for index in minibatch.chosen):
            text = self._text_of(sequences[index])
            if text is not None:
                indices.append(index)
                texts.append(text)
        for index, values in zip(indices, score_together(self.client, texts), strict=True):
            # After either prompt the tokens are the same, so their log-probs align at the end.
            num_continued = sequences[index].response_length
            logps[index][-num_continued:] = values[-num_continued:]
            is_scored[index] = True
        return TeacherScores(logps, is_scored)

    def _text_of(self, sequence: Rollout) -> np.ndarray | None:
        """Returns the token ids that the teacher reads, or None if its prompt is too long."""
        if self.prompts is None:
            return sequence.tokens.ids
        prompted = self.prompts.sequence_of(sequence)
        return None if prompted is None else prompted[0]


def score_together(client: ScoringClient, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns f32[T] for each text. Every process requests its share and returns all of them.

    Raises UserError on all processes if a request of any process failed.
    """
    share = collectives.local_share(len(texts))
    local: list[np.ndarray] = []
    failure = ""
    try:
        local = client.score_all([text.tolist() for text in texts[share]])
    except UserError as error:
        failure = str(error)
    # All processes take part in the gather, also after a failure. Otherwise the others would wait.
    failures = [reason for reason in collectives.gather_json(failure) if reason]
    if failures:
        raise UserError(failures[0])
    data = np.concatenate([np.zeros(0, np.float32), *local]).tobytes()
    values = np.concatenate(
        [np.frombuffer(part, np.float32) for part in collectives.gather_bytes(data)]
    )
    ends = np.cumsum([len(text) for text in texts])
    return np.split(values, ends[:-1]) if len(texts) else []


def check_tokens(client: ScoringClient, tok: PreTrainedTokenizerFast) -> None:
    """Raises UserError if the server's tokens differ from the policy's.

    Scores one prompt of ids from the whole vocabulary, and compares the tokens' texts in the reply
    with the texts of the policy's tokenizer. The check passes if the reply has no texts. Every
    process must call this function.
    """
    # Token ids at equal distances over the vocabulary.
    count = tokenizer.num_ids(tok)
    ids = [count * number // NUM_PROBES for number in range(min(NUM_PROBES, count))]
    scored = client.score(ids)
    differing = []
    compared = 0
    for token, server_text in zip(ids, scored.texts, strict=True):
        policy_text = tokenizer.decode(tok, [token])
        # Skip tokens that are parts of a character or have no text on one of the two sides.
        if server_text and policy_text and policy_text.isascii() and policy_text.isprintable():
            compared += 1
            if server_text != policy_text:
                differing.append(
                    f"{token} is {shown(policy_text)} here and {shown(server_text)} there"
                )
    # Servers can represent some tokens in another way, for example by their bytes, but another
    # vocabulary differs in most tokens.
    if compared and len(differing) > compared / 2:
        raise UserError(
            f"teacher.url={client.settings.url} has another vocabulary than the policy (token "
            f"{differing[0]}): a teacher needs the policy's tokenizer"
        )
