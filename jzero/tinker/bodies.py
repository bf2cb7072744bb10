"""The JSON bodies of the Tinker API. Unknown fields are ignored.

Every number has bounds, which the device's types hold: a value of another type or out of its bounds
is status 422. Texts and lists have a largest length.
"""

import json
import re
from typing import Annotated, Literal

# Pydantic cannot read the recursive type `jzero.types.JsonValue`, and has its own.
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
)

MAX_METADATA_BYTES = 4096  # of user_metadata as JSON: the server keeps it
MAX_TEXT = 1024  # characters of an id, a path or a name
MAX_STOPS = 64  # stop strings or tokens of a request
MAX_STOP_CHARACTERS = 1024
MAX_TTL = 100 * 365 * 86400  # seconds; a later expiry is a date that ISO 8601 may not write
MAX_AXES = 8  # of a tensor's shape; 2 are served

# Names are parts of paths in the store: no slash, and no leading dot.
NAME = r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}"
# The id of a session (a UUID) and a model's number: the SDK builds this id itself.
RUN = r"[0-9a-f\-]{36}:train:[0-9]{1,9}"
KINDS = ("weights", "sampler_weights", "external_weights")
RUN_ID = re.compile(RUN)
PATH = re.compile(rf"tinker://(?P<run>{RUN})/(?P<kind>{'|'.join(KINDS)})/(?P<name>{NAME})")


def check_metadata(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns metadata. Raises ValueError if they are too large to keep."""
    size = len(json.dumps(metadata))
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{size} bytes as JSON: send at most {MAX_METADATA_BYTES}")
    return metadata


Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
SequenceNumber = Annotated[int, Field(ge=0, lt=2**63)]
ModelNumber = Annotated[int, Field(ge=0, lt=10**9)]  # of a model or a sampler within its session
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**31)]
Lifespan = Annotated[int, Field(ge=1, le=MAX_TTL)]  # seconds
Metadata = Annotated[dict[str, JsonValue], AfterValidator(check_metadata)]
# Lists stop at the first error: a report of every wrong entry takes far longer than the list.
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Floats = Annotated[list[float], Field(fail_fast=True)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=MAX_STOPS)]
StopTokens = Annotated[list[Token], Field(fail_fast=True, max_length=MAX_STOPS)]
Part = Literal["mlp", "attn", "unembed"]  # of a model, as lora_config divides it


class Body(BaseModel):
    """A body of which only the known fields are read."""

    # Newer SDKs send more fields. Without strict, pydantic would accept texts as numbers.
    model_config = ConfigDict(extra="ignore", strict=True)


class CreateSession(Body):
    """POST create_session."""

    user_metadata: Metadata | None = None


class SessionId(Body):
    """A body with only the id of a session."""

    session_id: Text


class LoraConfig(Body):
    """The adapter of a model. The three targets are trained by default."""

    rank: PositiveCount
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def parts(self) -> set[Part]:
        """Returns the parts of the model that have an adapter."""
        is_trained: dict[Part, bool] = {
            "mlp": self.train_mlp,
            "attn": self.train_attn,
            "unembed": self.train_unembed,
        }
        return {part for part in is_trained if is_trained[part]}


class OptimizerConfig(Body):
    """The kind of the optimizer."""

    type: Text = "adamw"


class CreateModel(Body):
    """POST create_model."""

    session_id: Text
    model_seq_id: ModelNumber
    base_model: Text
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class ModelId(Body):
    """A body with only the id of a model."""

    model_id: Text


class AdamParams(Body):
    """The settings of one AdamW step.

    The bounds only exclude what no run uses. A step within them may still overflow, and is then
    refused by itself (`tenants.optim_step`).
    """

    # The SDK's defaults, for clients that leave fields out.
    learning_rate: Annotated[float, Field(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1e3)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0


class OptimStep(Body):
    """POST optim_step."""

    model_id: Text
    seq_id: SequenceNumber
    adam_params: AdamParams | None = None
    optimizer_params: Metadata | None = None


class SaveWeights(Body):
    """POST save_weights and save_weights_external."""

    model_id: Text
    seq_id: SequenceNumber
    path: Name
    ttl_seconds: Lifespan | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Body):
    """POST save_weights_for_sampler: with a path, or an ephemeral snapshot of a new sampler."""

    model_id: Text
    seq_id: SequenceNumber
    path: Name | None = None
    sampling_session_seq_id: ModelNumber | None = None
    ttl_seconds: Lifespan | None = None
    user_metadata: Metadata | None = None


class LoadWeights(Body):
    """POST load_weights: into an existing model, or as a new model of a session."""

    path: Text
    optimizer: bool = False
    model_id: Text | None = None
    seq_id: SequenceNumber | None = None
    session_id: Text | None = None
    model_seq_id: ModelNumber | None = None
    user_metadata: Metadata | None = None


class CreateSampler(Body):
    """POST create_sampling_session."""

    session_id: Text
    sampling_session_seq_id: ModelNumber
    base_model: Text | None = None
    model_path: Text | None = None


class PromptChunk(Body):
    """A part of a prompt. Only text is served."""

    type: Text = "encoded_text"
    tokens: Tokens = []


class Prompt(Body):
    """A prompt in parts."""

    chunks: Annotated[list[PromptChunk], Field(fail_fast=True)]


class SamplingParams(Body):
    """How to sample. stop=None is the tokenizer's end token, and [] is not even that."""

    max_tokens: PositiveCount | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | StopTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TensorBody(Body):
    """A tensor in JSON: dense, or a matrix in CSR."""

    data: Integers | Floats
    dtype: Text
    shape: Annotated[list[Count], Field(max_length=MAX_AXES)] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class Sample(Body):
    """POST asample."""

    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: PositiveCount = 1
    sampling_session_id: Text
    # Samples have no order. Copies of a sampling client in several processes number their samples
    # from different multiples of 1e9.
    seq_id: SequenceNumber = 0
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: PositiveCount | None = None


class RetrieveFuture(Body):
    """POST retrieve_future."""

    request_id: Text


class TinkerPath(Body):
    """POST weights_info."""

    tinker_path: Text


class Lifetime(Body):
    """PUT .../ttl. None keeps the checkpoint for ever."""

    ttl_seconds: Lifespan | None = None
