"""Teachers of on-policy distillation: the parts of the setting `teacher` (docs/algorithms.md).

A teacher scores the tokens that the policy has sampled, for algorithms with `distillation.coef`.
"""

from dataclasses import dataclass

from jzero.setting import setting

LONGEST_LIMIT = 604_800.0  # seconds: no limit is longer than a week
MOST_REQUESTS = 4096  # open requests of a host; each has a thread
MOST_RETRIES = 100


@dataclass(frozen=True)
class Teacher:
    """The settings of every teacher."""

    prompt: str = setting(
        "",
        "Prompt of the teacher instead of the policy's: text, or a text file, with the "
        "placeholders {prompt} and {gold}, or the fields of a gold answer. In a chat it "
        "replaces the last message. Empty: the policy's prompt.",
        is_text=True,
    )
    max_prompt_tokens: int = setting(
        0,
        "Maximum tokens of the filled-in prompt. For a longer prompt the teacher adds nothing "
        "to the advantages. 0: twice rollout.max_prompt_tokens.",
    )


@dataclass(frozen=True)
class Model(Teacher):
    """Another model, an adapter, or both."""

    path: str = setting(
        "",
        "Directory or hub id of a model with the policy's tokenizer. Empty with adapter: "
        "model.path.",
    )
    adapter: str = setting(
        "",
        "Directory or hub id of an adapter on the teacher's model, in PEFT's format. Empty: none.",
    )


@dataclass(frozen=True)
class Policy(Teacher):
    """The policy before each step's update, with another prompt."""


@dataclass(frozen=True)
class Reference(Teacher):
    """The reference policy (algorithm.reference_every), perhaps with another prompt."""


@dataclass(frozen=True)
class Server(Teacher):
    """A model on a server with an OpenAI-compatible API."""

    url: str = setting("", "Address of the server's API, such as http://localhost:8000/v1.")
    model: str = setting(
        "", "Name of the model on the server. Empty: the only model of the server."
    )
    request: str = setting(
        "echo",
        "How log-probs are requested. echo: OpenAI's echo=true with logprobs=1. prompt_logprobs: "
        "vLLM's field prompt_logprobs.",
        choices=("echo", "prompt_logprobs"),
    )
    concurrency: int = setting(
        16, "Maximum open requests of a host.", at_least=1, at_most=MOST_REQUESTS
    )
    seconds: float = setting(
        120.0,
        "Maximum seconds of one whole exchange, from connecting to the end of the reply.",
        above=0,
        at_most=LONGEST_LIMIT,
    )
    retries: int = setting(
        4,
        "Maximum retries of a request, after about 1, 2, ... seconds, if the server fails. 0: no "
        "retries.",
        at_most=MOST_RETRIES,
    )
    key_variable: str = setting(
        "",
        "Environment variable with the server's API key, such as OPENAI_API_KEY. Empty: no key "
        "is sent.",
    )
