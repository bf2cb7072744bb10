"""A teacher behind an OpenAI-compatible API: token ids out, log-probs of the same tokens back.

    client = ScoringClient(config.teacher)
    logps = client.score_all([token_ids, ...])      # f32[T] for each list of T ids

Every request is a `POST <url>/completions` whose prompt is token ids, so that both sides mean the
same tokens. There are two forms (`teacher.request`):

    echo             OpenAI: echo=true, logprobs=1. The reply's choices[0].logprobs.token_logprobs
                     begins with those of the prompt.
    prompt_logprobs  vLLM: prompt_logprobs=0. The reply's choices[0].prompt_logprobs has
                     {"<id>": {"logprob": ...}} for every token.

Both ask for one token behind the prompt (max_tokens=1), since not every server makes none. It is
not read.
A failure of the server or of the network is tried again; a refusal is not. What a server says is
data: only numbers and the texts of tokens are read from it.
"""

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jzero.config import TeacherConfig
from jzero.distillation.prompts import TeacherPrompts
from jzero.distributed import collectives
from jzero.errors import UserError, reason_of, shown
from jzero.files import JsonObject
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.training.step import Minibatch
from jzero.training.teacher import TeacherScores
from jzero.types import JsonValue, Rollout, State

# Statuses of a server that is busy or has failed, and may not fail the next time.
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
MAX_REPLY_BYTES = 256 << 20
MAX_ERROR_BYTES = 300  # of what a server says of a refusal
LONGEST_WAIT = 60.0  # seconds between two tries
NUM_PROBES = 32  # token ids whose texts are compared before the first step
BEARER = "Bearer"


class TransientError(Exception):
    """The server or the network failed, and the same request may succeed later."""


@dataclass(frozen=True)
class Scored:
    """What a server says of a prompt."""

    logps: np.ndarray  # f32[T] log-probability of every token; 0 for the first, which has none
    texts: list[str]  # of the tokens, as the server shows them; "" where it does not


# -- the client ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringClient:
    """Asks a server for the log-probs of token ids."""

    settings: TeacherConfig

    @cached_property
    def key(self) -> str:
        """The API key; "" for none. Raises UserError if its variable is not set."""
        name = self.settings.key_variable
        if name and not os.environ.get(name):
            raise UserError(
                f"teacher.key_variable={name} is not set in the environment: export {name}, or set "
                "teacher.key_variable="
            )
        return os.environ.get(name, "") if name else ""

    @cached_property
    def model(self) -> str:
        """The name of the model: teacher.model, or that of the only model that the server has."""
        if self.settings.model:
            return self.settings.model
        listed = self._ask("models", None).get("data")
        models = listed if isinstance(listed, list) else []
        names = [str(entry.get("id")) for entry in models if isinstance(entry, dict)]
        if len(names) != 1:
            raise UserError(
                f"teacher.url={self.settings.url} has the models {', '.join(names) or '(none)'}: "
                "set teacher.model to one of them"
            )
        return names[0]

    def score_all(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns f32[T] for each prompt: the log-prob of every token, 0 for the first.

        Raises UserError if the server refuses a prompt, or fails after all tries.
        """
        if not prompts:
            return []
        _ = self.model, self.key  # asked once, and not by every thread
        executor = ThreadPoolExecutor(self.settings.concurrency)
        try:
            return [scored.logps for scored in executor.map(self.score, prompts)]
        finally:
            # After a failure, requests that have not been sent are not sent any more.
            executor.shutdown(cancel_futures=True)

    def score(self, tokens: Sequence[int]) -> Scored:
        """Returns what the server says of one prompt. Raises UserError as `score_all` does."""
        ids = [int(token) for token in tokens]
        if len(ids) < 2:  # nothing predicts a first token
            return Scored(np.zeros(len(ids), np.float32), [""] * len(ids))
        body: JsonObject = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
        }
        if self.settings.request == "echo":
            body |= {"echo": True, "logprobs": 1}
            read = read_echo
        else:
            body |= {"prompt_logprobs": 0}
            read = read_prompt_logprobs
        reply = self._ask("completions", body)
        try:
            return read(first_choice(reply), ids)
        except ValueError as error:
            raise UserError(
                f"teacher.url={self.settings.url} answers teacher.request={self.settings.request} "
                f"without log-probs of the prompt ({error}): set teacher.request to what the "
                "server has, or use another server"
            ) from None

    def _ask(self, path: str, body: JsonObject | None) -> JsonObject:
        """Sends a request, again after a failure; returns the JSON object of the reply."""
        tries = self.settings.retries + 1
        reason = ""
        for number in range(tries):
            try:
                return self._ask_once(path, body)
            except TransientError as error:
                reason = str(error)
            if number + 1 < tries:
                time.sleep(min(2.0**number, LONGEST_WAIT))
        raise UserError(
            f"teacher.url={self.settings.url} has not answered in {tries} tries ({reason}): see "
            "that the server runs; the same command goes on from the last checkpoint"
        )

    def _ask_once(self, path: str, body: JsonObject | None) -> JsonObject:
        url = f"{self.settings.url.rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"{BEARER} {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.settings.seconds) as reply:
                content = reply.read(MAX_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                reason = f"status {error.code}: {in_one_line(error.read(MAX_ERROR_BYTES))}"
            if error.code in TRANSIENT:
                raise TransientError(reason) from None
            raise UserError(
                f"teacher.url={self.settings.url} refuses a request ({reason}): see the settings "
                "teacher.model, teacher.request and teacher.key_variable"
            ) from None
        except (OSError, http.client.HTTPException) as error:  # no connection, or too slow
            raise TransientError(reason_of(error)) from None
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UserError(
                f"teacher.url={self.settings.url} answers with no JSON object: it is no "
                "OpenAI-compatible API; give its address, which mostly ends with /v1"
            )
        return value


def in_one_line(content: bytes) -> str:
    """Returns the text of a server as an error message quotes it."""
    text = " ".join(content.decode(errors="replace").split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# -- replies ---------------------------------------------------------------------------------------


def first_choice(reply: JsonObject) -> JsonObject:
    """Returns the first choice of a completion. Raises ValueError where there is none."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("no choices")
    return choices[0]


def read_echo(choice: JsonObject, tokens: Sequence[int]) -> Scored:
    """Reads OpenAI's `logprobs` of an echoed prompt. Raises ValueError if they are not there.

    Numbers of tokens behind the prompt, which some servers make in any case, are left out.
    """
    found = choice.get("logprobs")
    logprobs = found if isinstance(found, dict) else {}
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or len(values) < len(tokens):
        count = len(values) if isinstance(values, list) else 0
        raise ValueError(f"{count} log-probs of {len(tokens)} tokens")
    texts = logprobs.get("tokens")
    known = texts if isinstance(texts, list) and len(texts) >= len(tokens) else [""] * len(tokens)
    return Scored(to_logps(values[: len(tokens)]), [str(text) for text in known[: len(tokens)]])


def read_prompt_logprobs(choice: JsonObject, tokens: Sequence[int]) -> Scored:
    """Reads vLLM's `prompt_logprobs`. Raises ValueError if a token of the prompt has none."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        found = len(entries) if isinstance(entries, list) else 0
        raise ValueError(f"{found} log-probs of {len(tokens)} tokens")
    values: list[JsonValue] = [None]
    texts = [""]
    for entry, token in zip(entries[1:], tokens[1:], strict=True):
        found = entry.get(str(token)) if isinstance(entry, dict) else None
        if not isinstance(found, dict):
            raise ValueError(f"none of token {token}")
        values.append(found.get("logprob"))
        texts.append(str(found.get("decoded_token") or ""))
    return Scored(to_logps(values), texts)


def to_logps(values: Sequence[JsonValue]) -> np.ndarray:
    """Returns f32[T] of T log-probs, of which the first is not read.

    Raises ValueError if one of the others is no finite number of at most 0.
    """
    logps = np.zeros(len(values), np.float32)
    for place, value in enumerate(values[1:], start=1):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A rounding error may leave the log of a probability of 1 slightly above 0.
        if not is_number or not math.isfinite(value) or value > 1e-3:
            raise ValueError(f"log-prob {shown(value)} of token {place}")
        logps[place] = value
    return logps


# -- the teacher -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerTeacher:
    """A teacher that is asked over the network."""

    client: ScoringClient
    prompts: TeacherPrompts | None = None  # None: it reads the policy's prompts

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence[Minibatch],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Returns the log-probs of the sampled tokens of all packed sequences.

        Every process asks for its share of them.
        """
        logps = [np.zeros(len(sequence.tokens), np.float32) for sequence in sequences]
        is_scored = np.zeros(len(sequences), bool)
        asked: list[int] = []
        texts: list[np.ndarray] = []
        for index in sorted(index for minibatch in minibatches for index in minibatch.chosen):
            text = self._text_of(sequences[index])
            if text is not None:
                asked.append(index)
                texts.append(text)
        for index, values in zip(asked, score_together(self.client, texts), strict=True):
            num_continued = sequences[index].response_length
            logps[index][-num_continued:] = values[-num_continued:]
            is_scored[index] = True
        return TeacherScores(logps, is_scored)

    def _text_of(self, sequence: Rollout) -> np.ndarray | None:
        """Returns the token ids that the teacher reads; None if its prompt is too long."""
        if self.prompts is None:
            return sequence.tokens
        found = self.prompts.sequence_of(sequence)
        return None if found is None else found[0]


def score_together(client: ScoringClient, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns f32[T] for each text; every process asks for its share, and gets all of them.

    Raises UserError on all processes if the server failed on one of them.
    """
    share = collectives.local_share(len(texts))
    mine: list[np.ndarray] = []
    failure = ""
    try:
        mine = client.score_all([text.tolist() for text in texts[share]])
    except UserError as error:
        failure = str(error)
    failures = [reason for reason in collectives.gather_json(failure) if reason]
    if failures:
        raise UserError(failures[0])
    data = np.concatenate([np.zeros(0, np.float32), *mine]).tobytes()
    values = np.concatenate(
        [np.frombuffer(part, np.float32) for part in collectives.gather_bytes(data)]
    )
    ends = np.cumsum([len(text) for text in texts])
    return np.split(values, ends[:-1]) if len(texts) else []


def check_tokens(client: ScoringClient, tok: PreTrainedTokenizerFast) -> None:
    """Raises UserError if the server's tokens are others than the policy's.

    Asks for one prompt of ids from the whole vocabulary, and compares the texts that the reply
    shows with the texts that the policy's tokenizer has. Where the reply shows none, nothing is
    compared. Every process calls this function.
    """
    count = tokenizer.num_ids(tok)
    ids = [count * number // NUM_PROBES for number in range(min(NUM_PROBES, count))]
    scored = client.score(ids)
    differing = []
    compared = 0
    for token, text in zip(ids, scored.texts, strict=True):
        own = tokenizer.decode(tok, [token])
        # Parts of a character, and tokens that one of the two does not show, say nothing.
        if text and own and own.isascii() and own.isprintable():
            compared += 1
            if text != own:
                differing.append(f"{token} is {shown(own)} here and {shown(text)} there")
    # Servers show single tokens in other ways, such as their bytes; another vocabulary is another
    # one throughout.
    if compared and len(differing) > compared / 2:
        raise UserError(
            f"teacher.url={client.settings.url} has another vocabulary than the policy (token "
            f"{differing[0]}): a teacher needs the policy's tokenizer"
        )
