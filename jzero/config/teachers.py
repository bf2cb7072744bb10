"""Teachers of on-policy distillation: the parts of the setting `teacher` (docs/algorithms.md).

A teacher scores the tokens that the policy has sampled, for algorithms with `distillation.coef`.
"""

from typing import Literal

from jzero.fields import Field, Text, part

LONGEST_LIMIT = 604_800.0  # seconds: no limit is longer than a week
MOST_REQUESTS = 4096  # open requests of a host; each has a thread
MOST_RETRIES = 100


@part
class Teacher:
    """The settings of every teacher."""

    prompt: Text = ""
    """Prompt of the teacher instead of the policy's: text, or a text file, with the placeholders
    {prompt} and {gold}, or the fields of a gold answer. In a chat it replaces the last message.
    Empty: the policy's prompt."""
    max_prompt_tokens: int = 0
    """Maximum tokens of the filled-in prompt. For a longer prompt the teacher adds nothing to the
    advantages. 0: twice rollout.max_prompt_tokens."""


@part
class Model(Teacher):
    """Another model, an adapter, or both."""

    path: str = ""
    """Directory or hub id of a model with the policy's tokenizer. Empty with adapter: model.path.
    """
    adapter: str = ""
    """Directory or hub id of an adapter on the teacher's model, in PEFT's format. Empty: none."""


@part
class Policy(Teacher):
    """The policy before each step's update, with another prompt."""


@part
class Reference(Teacher):
    """The reference policy (algorithm.reference_every), perhaps with another prompt."""


@part
class Server(Teacher):
    """A model on a server with an OpenAI-compatible API."""

    url: str = ""
    """Address of the server's API, such as http://localhost:8000/v1."""
    model: str = ""
    """Name of the model on the server. Empty: the only model of the server."""
    request: Literal["echo", "prompt_logprobs"] = "echo"
    """How log-probs are requested. echo: OpenAI's echo=true with logprobs=1. prompt_logprobs:
    vLLM's field prompt_logprobs."""
    concurrency: int = Field(default=16, ge=1, le=MOST_REQUESTS)
    """Maximum open requests of a host."""
    seconds: float = Field(default=120.0, gt=0, le=LONGEST_LIMIT)
    """Maximum seconds of one whole exchange, from connecting to the end of the reply."""
    retries: int = Field(default=4, le=MOST_RETRIES)
    """Maximum retries of a request, after about 1, 2, ... seconds, if the server fails. 0: no
    retries."""
    key_variable: str = ""
    """Environment variable with the server's API key, such as OPENAI_API_KEY. Empty: no key is
    sent."""
