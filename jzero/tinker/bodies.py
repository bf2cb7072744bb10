"""The JSON bodies of the Tinker API. Unknown fields are ignored; a wrong type is status 422."""

import re
from typing import Annotated, Literal

# Pydantic cannot read the recursive type `jzero.types.JsonValue`, and has its own.
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

# Names are parts of paths in the store: no slash, and no leading dot.
NAME = r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,127}"
# The id of a session (a UUID) and a model's number: the SDK builds this id itself.
RUN = r"[0-9a-f\-]{36}:train:[0-9]{1,9}"
KINDS = ("weights", "sampler_weights", "external_weights")
RUN_ID = re.compile(RUN)
PATH = re.compile(rf"tinker://(?P<run>{RUN})/(?P<kind>{'|'.join(KINDS)})/(?P<name>{NAME})")

Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
SequenceNumber = Annotated[int, Field(ge=0, lt=2**63)]
Metadata = dict[str, JsonValue]
Part = Literal["mlp", "attn", "unembed"]  # of a model, as lora_config divides it


class Body(BaseModel):
    """A body of which only the known fields are read."""

    # Newer SDKs send more fields. Without strict, pydantic would accept texts as numbers.
    model_config = ConfigDict(extra="ignore", strict=True)


class CreateSession(Body):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""


class SessionId(Body):
    """A body with only the id of a session."""

    session_id: str


class LoraConfig(Body):
    """The adapter of a model. The three targets are trained by default."""

    rank: Annotated[int, Field(ge=1)]
    seed: int | None = None
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

    type: str = "adamw"


class CreateModel(Body):
    """POST create_model."""

    session_id: str
    model_seq_id: Annotated[int, Field(ge=0, lt=10**9)]
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class ModelId(Body):
    """A body with only the id of a model."""

    model_id: str


class AdamParams(Body):
    """The settings of one AdamW step."""

    # The SDK's defaults, for clients that leave fields out.
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """POST optim_step."""

    model_id: str
    seq_id: SequenceNumber
    adam_params: AdamParams | None = None
    optimizer_params: Metadata | None = None


class SaveWeights(Body):
    """POST save_weights and save_weights_external."""

    model_id: str
    seq_id: SequenceNumber
    path: Name
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Body):
    """POST save_weights_for_sampler: with a path, or an ephemeral snapshot of a new sampler."""

    model_id: str
    seq_id: SequenceNumber
    path: Name | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=10**9)] | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: Metadata | None = None


class LoadWeights(Body):
    """POST load_weights: into an existing model, or as a new model of a session."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: SequenceNumber | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=10**9)] | None = None
    user_metadata: Metadata | None = None


class CreateSampler(Body):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=10**9)]
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(Body):
    """A part of a prompt. Only text is served."""

    type: str = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = []


class Prompt(Body):
    """A prompt in parts."""

    chunks: list[PromptChunk]


class SamplingParams(Body):
    """How to sample. stop=None is the tokenizer's end token, and [] is not even that."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TensorBody(Body):
    """A tensor in JSON: dense, or a matrix in CSR."""

    data: list[int] | list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body):
    """POST asample."""

    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_session_id: str
    # Samples have no order. Copies of a sampling client in several processes number their samples
    # from different multiples of 1e9.
    seq_id: SequenceNumber = 0
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None


class RetrieveFuture(Body):
    """POST retrieve_future."""

    request_id: str


class TinkerPath(Body):
    """POST weights_info."""

    tinker_path: str


class Lifetime(Body):
    """PUT .../ttl. None keeps the checkpoint for ever."""

    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
