"""Every setting of a run: its type, default, meaning and allowed values.

A recipe in `configs/` fills a `Config`, the command line overrides single settings with
`--config.section.field=value`. A value of the wrong type or out of its bounds is refused when it is
assigned (`jzero.fields`); what must fit together is checked by `jzero.config.validate`.

The value 0 of a number, or "" of a name, turns its feature off unless the description states
another meaning. Memory limits counts further than the bounds here (`planning.host_memory`,
`planning.fitting`).
"""

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import field
from typing import Literal, NamedTuple, get_args

from pydantic.fields import FieldInfo

from jzero import algorithms
from jzero.config import drafts, schedules, teachers, turns
from jzero.config.data_sources import Sources, as_sources
from jzero.config.placement import Apart, Jobs, Together
from jzero.config.teachers import LONGEST_LIMIT, MOST_REQUESTS, MOST_RETRIES
from jzero.errors import UserError
from jzero.fields import (
    LARGEST_INT,
    SECTION_NAMES,
    Field,
    NameAndValue,
    NonEmptyText,
    Text,
    fields_of,
    part,
    parts_of,
    section,
    section_of,
    written,
)

EIGHT_BITS = ("int8", "fp8")  # the keys of numerics.eight_bits.FORMATS
Dtype = Literal["bfloat16", "float32"]
# bfloat16 rounds by up to 0.2 %. When the gradients vanish, a step changes a second moment by a
# share of 1 - b2: with a b2 near 1, rounding would hold the moment where it is.
LARGEST_B2_IN_16_BITS = 0.98
# A first moment that approaches the mean of the gradients stops when a step changes it by less than
# its rounding: up to 4 % before the mean with a b1 of 0.9, 8 % with 0.95, and 39 % with 0.99.
LARGEST_B1_IN_16_BITS = 0.95
LARGEST_GIB = 2.0**20  # the operating system accepts memory limits below 2^63 bytes
MOST_PROCESSES = 1024
MOST_AGENT_REQUESTS = 4096  # the noise of a sequence is keyed by episode and number
PACK_LENGTHS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")  # values of train.pack that list numbers
# "fast" is jzero's grader. The others are the keys of jzero.answers.published.VERIFIERS.
Verifier = Literal[
    "fast",
    "last_number",
    "oat_fast",
    "oat_full",
    "oat_r1",
    "oat_r1_full",
    "oat_countdown",
    "open_r1",
    "open_r1_1416fa0",
    "math_verify",
    "sympy",
]
VERIFIERS: tuple[str, ...] = get_args(Verifier)


@section
class AdapterConfig:
    """A low-rank adapter (LoRA), which is trained while the model's weights are frozen."""

    rank: int = 0
    """Rank of the LoRA adapter on every linear layer, such as 32. 0: no adapter, the whole model is
    trained."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by alpha / rank. With a constant alpha the best learning
    rate hardly depends on the rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that have an adapter, such as q,k,v,o,gate,up,down. Empty or all: every linear
    layer of the model's family. lm_head adds the output layer: all,lm_head."""
    path: str = ""
    """Directory or hub id of an initial adapter in PEFT's format. It determines rank, alpha and
    targets. Empty: a new adapter."""
    dropout: float = Field(default=0.0, lt=1)
    """Dropout on the adapter's inputs, as in PEFT, in updates only. For supervised fine-tuning; in
    RL it adds noise to the ratio: with several optimizer steps per batch, the old log-probs are
    computed without dropout; with one, by the update itself, with dropout."""

    @property
    def scale(self) -> float:
        """Returns the factor alpha / rank of the adapter's output; 0 without an adapter."""
        # As in PEFT without rsLoRA.
        return self.alpha / self.rank if self.rank else 0.0


@section
class ModelConfig:
    """The policy's model and how it is computed."""

    path: str = ""
    """Directory or hub id of a model with config.json and safetensors. A branch, tag or commit
    follows a hub id: USER/NAME#REVISION. Empty: random weights with the architecture in model.arch.
    """
    tokenizer: str = ""
    """Directory or hub id of the tokenizer. Empty: model.path or, if that is empty too, jzero's
    character tokenizer for countdown."""
    prompt_date: str = ""
    """Date that chat templates write into prompts, such as 2026-12-31. Empty: the date of the first
    start of a run, which config.json keeps for resuming, evaluating and serving it; without a run,
    the current date."""
    arch: str = "tiny-qwen2"
    """Architecture of a model with random weights, if model.path is empty: a name of
    jzero.config.architecture.TINY_MODELS, whose entries can be changed as in
    tiny-qwen2(hidden_size=64,num_hidden_layers=2), or the path of a config.json. The vocabulary is
    the tokenizer's."""
    max_position_embeddings: int = 0
    """Maximum context length in tokens. Runs with longer sequences are refused. 0: the value in the
    model's config.json, or 32768 for a model with random weights."""
    dtype: Dtype = "bfloat16"
    """Type of the computation, and of weights that are frozen under an adapter. Trained weights are
    always float32."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass recomputes: nothing (none), all but matrix products (dots), or whole
    layers (full)."""
    logit_chunk: int = Field(default=2048, ge=1)
    """Number of tokens whose logits [tokens, vocabulary] are in a device's memory at the same time.
    """
    attention: str = ""
    """Attention kernels, a key of jzero.attention.BACKENDS. Empty: the default of the platform.
    xla: plain XLA, on every platform. tpu_fused: on TPUs, one fused decoding kernel applies RoPE,
    writes the KV cache and attends."""
    base: Literal["native", "int8"] = "native"
    """Precision of the linear layers that are frozen under an adapter. native: model.dtype. int8:
    int8 with one scale for each output channel, in sampling, scoring and the update."""
    exact: bool = False
    """The sampler and the trainer compute bitwise identical log-probs. The ratio is exactly 1
    before the first optimizer step, old log-probs are not recomputed, and the run fails at the
    first log-prob that differs (docs/models.md)."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def is_base_quantized(self) -> bool:
        """Returns whether the linear layers of a frozen base are in int8."""
        return self.base == "int8"


@part
class JudgeServer:
    """A judge behind an OpenAI-compatible API. One request may take task.reward.seconds."""

    url: str = ""
    """Address of the judge's API, such as http://localhost:8000/v1."""
    model: str = ""
    """Name of the judge's model on the server."""
    template: str = ""
    """File with the rubric, which is the message to the judge. Placeholders are {prompt},
    {response}, {gold}, {conversation}, {gold.FIELD} and {row.COLUMN}. Empty: jzero's default
    rubric."""
    pattern: Text = r"(?i)score\W*([0-9]+(?:\.[0-9]+)?)"
    """Regular expression that finds the score in the judge's reply. Its one group is the score, and
    the last match counts."""
    scale: float = Field(default=10.0, gt=0)
    """Highest score; the lowest is 0. The reward is score / scale."""
    temperature: float = 0.0
    """Sampling temperature of the judge. 0: greedy decoding."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of the judge's reply."""
    concurrency: int = Field(default=16, ge=1, le=MOST_REQUESTS)
    """Maximum open requests of a host."""
    retries: int = Field(default=4, le=MOST_RETRIES)
    """Maximum retries of a request, after about 1, 2, ... seconds, if the server fails or, at a
    temperature above 0, if its reply has no score. 0: no retries."""
    key_variable: str = ""
    """Environment variable with the server's API key, such as OPENAI_API_KEY. Empty: no key is
    sent."""


@section
class RewardConfig:
    """Rewards. The score of a response is their weighted sum. The default numbers are open-r1's."""

    functions: tuple[str, ...] = ("accuracy",)
    """Reward functions to sum: names in jzero.rewards.rewards.NAMES, or user-defined functions,
    module:function or FILE.py:function. The parameters of a function are named response, gold,
    task, prompt, messages, row, turns or environment; or responses, golds, prompts, conversations,
    rows and episodes for lists of all responses of a batch; or as in TRL. FILE.py:factory(x=1)
    calls a factory, and cosine(length=2000) changes an argument of a built-in function."""
    batch: Literal["step", "group"] = "step"
    """The responses that a batched reward function gets in one call: all responses of a step, or
    the group of one problem. Groups are scored in parallel, and a failed call leaves only its group
    without a score."""
    weights: tuple[float, ...] = ()
    """Weight of each function. Empty: all weights are 1."""
    seconds: float = Field(default=60.0, gt=0, le=LONGEST_LIMIT)
    """Maximum wall-clock seconds of one call of a user-defined function, and of one request to the
    judge. The first call in a process includes the import of the function's module."""
    memory_gib: float = Field(default=16.0, le=LARGEST_GIB)
    """Maximum memory in GiB of a grader process during a call of a user-defined function. It limits
    the address space of the process, and the memory of the process together with all processes that
    the function starts. 0: no limit."""
    judge: JudgeServer | None = None
    """The model that the reward judge asks, as in judge_server(url='http://...',model='m'). none:
    the reward judge is not used."""
    unit: Literal["characters", "tokens"] = "characters"
    """Unit of lengths in the rewards length and cosine."""


@part
class SandboxLimits:
    """The limits of one run of a program."""

    seconds: float = Field(default=5.0, gt=0, le=LONGEST_LIMIT)
    """Maximum CPU seconds of one run of a program. The limit of wall-clock time is three times as
    long."""
    memory_gib: float = Field(default=1.0, gt=0, le=LARGEST_GIB)
    """Maximum address space of a program in GiB."""
    output_mib: float = Field(default=1.0, gt=0, le=LARGEST_GIB)
    """Maximum output of a program in MiB, stdout and stderr together."""


@part
class Local(SandboxLimits):
    """Programs run on this machine."""

    level: Literal["auto", "namespaces", "landlock", "seccomp", "none"] = "auto"
    """Isolation of programs. auto: the stronger of namespaces and landlock that the machine
    supports; without either the run is refused. seccomp and none isolate less and are never chosen
    automatically (docs/environments.md)."""
    packages: tuple[str, ...] = ()
    """Modules that programs may import besides the standard library, such as numpy. They are
    imported once, before the first program. Empty: only the standard library."""


@part
class Remote(SandboxLimits):
    """A server runs the programs."""

    url: str = ""
    """Address of the server, such as http://localhost:2000."""
    protocol: Literal["piston", "sandbox_fusion", "e2b"] = "piston"
    """API of the server: piston, sandbox_fusion, or e2b, the API of open-r1's router."""


@section
class ToolsConfig:
    """Tools that the policy may call in an episode (docs/environments.md)."""

    names: tuple[str, ...] = ()
    """Tools of the policy: calculator, python, search(corpus='FILE',results=3), or user-defined
    tools: module:function, FILE.py:function, or a class, of which each episode creates an instance.
    Empty: no tools."""
    syntax: Literal["", "json", "xml"] = ""
    """Syntax of tool calls: json as in Qwen2.5 and Qwen3, or xml as in Qwen3-Coder and Qwen3.5.
    Empty: the syntax of the tokenizer's chat template, json without a template."""
    max_calls: int = Field(default=16, ge=1)
    """Maximum calls in an episode. Further calls get an error as their result."""
    max_output: int = Field(default=4000, ge=1)
    """Maximum characters of the result of a call. The middle of a longer result is cut out."""
    seconds: float = Field(default=10.0, gt=0, le=LONGEST_LIMIT)
    """Maximum seconds of one call. A longer call gets an error as its result. All calls of a
    response together may take most of task.reward.seconds."""


@section
class TaskConfig:
    """The problems, their prompts, and how responses are graded."""

    name: str = "countdown"
    """Name of the task: a key of jzero.tasks.TASKS, or a module with a Task called TASK.
    verifiers:ENV is short for task.name=environment task.environment=verifiers:ENV."""
    environment: str = ""
    """Environment of task.name=environment: a user-defined class, module:Class or FILE.py:Class,
    with the methods reset(row, seed) and step(response); openenv:URL, an OpenEnv server; or
    verifiers:ENV, an installed environment of the package verifiers or a file of its settings.
    Calls have the limits task.reward.seconds and task.reward.memory_gib. Empty: none."""
    environment_mode: Literal["auto", "processes", "asyncio"] = "auto"
    """Where instances of task.environment live. processes: in the grader processes, which execute
    one step at a time and can be killed. asyncio: in an event loop of the run, which awaits
    thousands of steps at once; the methods must be async. auto: asyncio for openenv:URL and
    verifiers:ENV, and processes for all others."""

    # Agents: programs that speak OpenAI's API (docs/agents.md).
    agent: str = ""
    """Agent of task.name=agent: a function agent(problem, base_url, api_key, model), as
    module:function or FILE.py:function, which returns the reward of its episode, a number or a dict
    of named parts; or command:PROGRAM ARGUMENTS, a program in any language. A coroutine runs in the
    event loop of the run, everything else in a process of its own. Empty: none."""
    agent_credit: Literal["tree", "last", "branch"] = "tree"
    """Which sequences of an agent's episode learn from which reward, if its requests form several
    sequences. tree: all, from the reward of the episode. last: only the one with the latest
    response. branch: each from its own reward, which the agent returns under completions."""
    agent_seconds: float = Field(default=600.0, gt=0, le=LONGEST_LIMIT)
    """Maximum seconds of an agent. An episode beyond fails: it has no score."""
    agent_requests: int = Field(default=256, ge=1, le=MOST_AGENT_REQUESTS)
    """Maximum responses that an agent may request. Further requests are answered with an error."""
    agent_processes: int = Field(default=32, ge=1, le=MOST_PROCESSES)
    """Maximum number of agents that run in processes at the same time. Others wait."""

    # Data sets.
    data: Sources = written(default=Sources(), converter=as_sources)
    """Data sets, separated by commas: hub id, config@id, local file or directory; or rows(...),
    which also chooses columns and rows: rows('FILE',split='hard',limit=1000). Empty: the default
    set of the task (countdown generates its problems)."""
    eval_data: Sources = written(default=Sources(), converter=as_sources)
    """Held-out data sets, in the notation of task.data. rows(split='validation') is that split of
    task.data. Empty: the split test of task.data, if there is one."""
    drop_last: bool = False
    """Drops the last problems of a pass that are too few for a step. False: problems of the next
    pass complete the step."""

    # Prompts and the grading of answers.
    template: str = "r1"
    """Prompt template. Countdown: r1, qwen_chat, plain. Mathematics: qwen_math, r1, no,
    r1_distill_qwen, r1_distill_tags, qwen3, chat. Code: chat, qwen3, r1_distill_qwen, plain. Also:
    a file in plain text or Jinja; chat:FILE, a file with the user message of a chat; column:NAME,
    prompts in a column of the data set."""
    system_prompt: Text = ""
    """System prompt of the templates chat and chat:FILE. Empty: the instruction of qwen_math for
    chat, and no system prompt for chat:FILE. none: no system prompt."""
    verifier: Verifier = "fast"
    """Grader of answers: jzero's (fast), or a verifier that reproduces the rewards of a published
    run with its original answer extraction: oat's (oat_fast, oat_full, oat_r1, oat_r1_full;
    last_number for GSM8K, oat_countdown for Countdown), open-r1's (open_r1 at e4ac3ae,
    open_r1_1416fa0 at the commit of its recipes), the package math-verify (math_verify), PRM800K's
    two stages (sympy)."""
    options: tuple[NameAndValue, ...] = ()
    """Settings that only this task has, as name=value, with one flag for each, such as value_max=15
    of countdown (docs/data-and-rewards.md). They replace those of the recipe."""

    control_tokens: bool = False
    """Encodes control tokens of the tokenizer, such as <|im_end|>, in the messages of a question, a
    tool or an environment as tokens. False: as text, which cannot begin a turn. Prompts of
    column:NAME keep their control tokens."""

    # Episodes of several turns.
    stop_on_success: bool = True
    """Ends an episode of several turns at a correct answer."""
    turn_reward: turns.Success | turns.Score = turns.Success()
    """Reward of a turn of an episode of several turns."""
    turn_discount: float = 1.0
    """Discount factor of the next turn's return in the return of a turn."""
    feedback: turns.Feedback = turns.Feedback()
    """Replies of tasks that tell the policy only whether its answer is correct."""

    # Limits of grader processes, and of programs.
    sandbox: Local | Remote = Local()
    """The sandbox that runs programs of responses, with the limits of one run."""
    grade_seconds: float = Field(default=5.0, gt=0, le=LONGEST_LIMIT)
    """Maximum seconds of one grading. A longer grading is killed with its process and scores 0.
    User-defined reward functions have the limit task.reward.seconds instead."""
    grade_workers: int = Field(default=2, ge=1, le=MOST_PROCESSES)
    """Number of grader processes."""
    max_failed_share: float = Field(default=0.5, le=1)
    """Maximum share of a step's gradings that may raise an error, time out or kill their process.
    Above this share the run stops. Responses with a failed user-defined function are not trained
    on; responses with a failure of jzero's grader score 0."""
    max_reply_bytes: int = Field(default=262_144, ge=1, le=8_388_608)
    """Maximum bytes, in UTF-8, of an observation, of a reply, or of all tool results for a
    response. An episode above this limit fails before tokenization."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)


@section
class RolloutConfig:
    """Sampling: the number and length of responses, their distribution, and the decoder."""

    # Number and length of rollouts.
    num_prompts: int = Field(default=128, ge=1)
    """Number of prompts in a step (P)."""
    group_size: int = Field(default=8, ge=1)
    """Number of rollouts of each prompt (G)."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of a prompt. Problems with longer prompts are dropped."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of a response."""
    max_turns: int = Field(default=1, ge=1)
    """Maximum responses in an episode, for tasks that reply to a response."""
    max_reply_tokens: int = 64
    """Tokens reserved for each reply if max_episode_tokens is 0."""
    max_episode_tokens: int = 0
    """Maximum tokens of an episode, including its prompt and replies. 0: room for max_turns
    responses and the replies between them."""

    placement: Together | Apart | Jobs = Together()
    """Where rollouts are sampled, and how old they may be when they are trained on."""

    hosts_per_decoder: int = Field(default=1, ge=1)
    """Number of neighboring hosts that decode together, for models that one host cannot hold.
    mesh.tensor is then the number of all their devices. 1: every host decodes by itself."""

    thoughts: Literal["keep", "drop"] = "keep"
    """Whether prompts of several messages show earlier responses as they were sampled (keep), or as
    the chat template writes them, which often drops the thoughts of earlier turns (drop). An
    episode of several turns only appends tokens and requires keep."""

    # The sampling distribution, and the end of a response.
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_k: int = 0
    """Samples only from the k most likely tokens. 0: from all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples only from the most likely tokens with this total probability. 1: from all tokens."""
    min_p: float = Field(default=0.0, lt=1)
    """Drops tokens below this share of the most likely token's probability. 0: drops none."""
    stop: tuple[NonEmptyText, ...] = ()
    """Strings that end a response, in addition to the tokenizer's end-of-sequence tokens. Empty:
    the stop strings of task.template, such as </answer> for r1 in mathematics."""
    keep_stop: bool = True
    """Keeps the stop string in the response."""

    # The decoder and its KV cache.
    num_slots: int = 256
    """Number of sequences decoded at the same time (S). A training run has no more than its steps
    and evaluations have sequences. 0: as many of those as fit into memory."""
    page_size: int = Field(default=64, ge=1)
    """Tokens per page of the KV cache."""
    num_pages: int = 0
    """Number of pages in the KV cache. 0: enough for every slot at full length, or as many as fit
    into free memory."""
    prefix_cache: Literal["auto", "on", "off"] = "auto"
    """Starts sequences from the KV of earlier ones with the same beginning and weights, if the rest
    is at most half of their tokens. The cache has only pages that no sequence needs. auto: not for
    rollouts to train on, whose last bits would depend on others. In runs of models with sliding
    windows auto is off, and layers with a window keep only its tokens; with on they keep all.
    Always off with model.exact, in models with delta nets, and for rollouts with routing_replay."""
    decode_steps: int = Field(default=32, ge=1)
    """Tokens decoded for each slot in one call of the device."""
    weights: Literal["native", "int8", "fp8"] = "native"
    """Precision of the decoder's copy of the trained weights. native: model.dtype. int8 and fp8
    (float8_e4m3fn): the linear layers in 8 bits with one scale for each output channel, quantized
    again whenever the decoder gets new weights."""
    kv_dtype: Literal["bfloat16", "float32", "int8", "fp8"] = "bfloat16"
    """Type of the KV cache. int8 and fp8 (float8_e4m3fn): one scale for each head of each token;
    only on CPUs, and with model.attention=xla or tpu_fused."""
    draft: drafts.Draft | None = None
    """Speculative decoding: several tokens of a sequence in one pass. The tokens are the same as
    without."""
    routing_replay: bool = False
    """Router replay for MoE models: the update routes every token to the experts that the sampler
    chose. False: the router chooses again."""

    @property
    def max_staleness(self) -> int:
        """Returns how many policy versions old a rollout may be; 0 in a synchronous run."""
        return self.placement.max_staleness

    @property
    def max_running_groups(self) -> int:
        """Returns how many groups an asynchronous run samples at the same time; 0: the default."""
        # Separate jobs take requests, and have no groups that run in this process.
        return 0 if isinstance(self.placement, Jobs) else self.placement.max_running_groups

    @property
    def decode_devices(self) -> int:
        """Returns the devices of each host that only sample; 0 if all devices do both."""
        return self.placement.devices if isinstance(self.placement, Apart) else 0

    @property
    def quantizes_weights(self) -> bool:
        """Returns whether only the decoder's linear layers are in 8 bits, not the trainer's."""
        return self.weights in EIGHT_BITS

    @property
    def quantizes_kv(self) -> bool:
        """Returns whether the KV cache is in 8 bits."""
        return self.kv_dtype in EIGHT_BITS

    @property
    def longest_episode(self) -> int:
        """Returns the tokens of the longest episode, its prompt included."""
        if self.max_episode_tokens:
            return self.max_episode_tokens
        responses = self.max_turns * self.max_new_tokens
        replies = (self.max_turns - 1) * self.max_reply_tokens
        return self.max_prompt_tokens + responses + replies

    @property
    def longest_continuation(self) -> int:
        """Returns the tokens of the longest episode without its prompt."""
        return self.longest_episode - self.max_prompt_tokens


@section
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    # The learning rate.
    lr: float = 1e-6
    """Peak learning rate."""
    schedule: schedules.Schedule = schedules.Constant()
    """Learning rate after the warm-up."""
    warmup: schedules.Warmup | None = None
    """Warm-up: optimizer steps in which the learning rate rises from 0 to lr."""

    # AdamW.
    b1: float = Field(default=0.9, lt=1)
    """Decay of Adam's first moment."""
    b2: float = Field(default=0.95, lt=1)
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Epsilon of Adam."""
    weight_decay: float = 0.0
    """Weight decay, applied only to matrices. 0: none."""
    clip_norm: float = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    mu_dtype: Dtype = "float32"
    """Type of Adam's first moment. bfloat16 saves 2 of 12 bytes per parameter, and requires a b1 of
    at most 0.95."""
    nu_dtype: Dtype = "float32"
    """Type of Adam's second moment. bfloat16 saves 2 of 12 bytes per parameter, and requires a b2
    of at most 0.98."""
    offload: bool = False
    """Keeps Adam's moments in host memory while responses are sampled and scored. They are on the
    devices only during updates, and every step moves them there and back."""
    skip_norm: float = 0.0
    """Skips optimizer steps with a larger gradient norm. 0: no step is skipped."""


@part
class Critic:
    """The critic of algorithms that need one, such as ppo.

    It is the policy's backbone with a scalar head. Its optimizer differs from the policy's only in
    `lr`.
    """

    path: str = ""
    """Directory or hub id of the initial weights. Empty: the initial weights of the policy."""
    warmup_steps: int = 0
    """RL steps at the start that train only the critic. 0: none."""
    lr: float = 1e-5
    """Peak learning rate of the critic."""


@part
class WarmStart:
    """Supervised steps before RL, for models that start from random weights."""

    steps: int = Field(default=1000, ge=1)
    """Number of supervised steps."""
    batch_size: int = Field(default=128, ge=1)
    """Examples per step."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises. 0: no warm-up."""
    tries: float = Field(default=2.0, ge=1)
    """Average number of random attempts, right or wrong, in an example. After each attempt the
    example gives up with probability 1 / tries."""


@part
class Sft:
    """The run does supervised fine-tuning instead of RL (configs/sft.py)."""

    data: Sources = written(default=Sources(), converter=as_sources)
    """Data sets, in the notation of task.data, with a column messages, columns prompt and
    completion, a column conversations or text, or columns problem and solution, or question and
    answer; or the name of a task, for its warm-start examples: warm_start.steps *
    warm_start.batch_size of them."""
    eval_data: Sources = written(default=Sources(), converter=as_sources)
    """Held-out data sets, in the notation of task.data. rows(split='validation') is that split of
    sft.data. Empty: the split test of sft.data, if there is one."""
    chat_template: str = ""
    """File with a Jinja chat template. Empty: the tokenizer's template."""
    system_prompt: Text = ""
    """System prompt for conversations without one. Empty: none is added."""
    loss: Literal["assistant", "all"] = "assistant"
    """Tokens to train on: those of the assistant or the completion (assistant), or all tokens
    (all)."""
    epochs: float = 1.0
    """Number of passes over the data. 0.1: a tenth of it."""
    batch_size: int = Field(default=128, ge=1)
    """Examples per step."""
    pack_length: int = Field(default=4096, ge=1)
    """Tokens per packed row."""
    long_examples: Literal["drop", "cut"] = "drop"
    """Treatment of examples with more than pack_length tokens: they are left out (drop), or their
    end is cut off (cut, as in TRL)."""


@part
class Checkpoint:
    """An earlier checkpoint of the run. The steps after it are abandoned."""

    # A flag that sets only discard_later must not go back to the first step.
    step: int = Field(default=-1, ge=-1)
    """Step of the checkpoint, which has to be given."""
    discard_later: bool = False
    """Deletes the checkpoints, exports and metrics of later steps from the workdir. False: a run
    with later steps is refused."""


@section
class TrainConfig:
    """The training loop: steps, minibatches, packing, checkpoints, and logs.

    A row of a microbatch contains a prompt followed by `packs_per_row` packs. A pack has one of the
    lengths in `pack`, in tokens, and contains one or more responses to the prompt.
    """

    steps: int = 200
    """Number of RL steps. Each samples rollouts, then makes minibatches * epochs optimizer steps.
    With prompt_epochs this is the maximum number, and 0 is not a limit."""
    prompt_epochs: float = 0.0
    """Number of passes over the training problems. The number of RL steps is then problems *
    prompt_epochs / rollout.num_prompts, rounded up so that the last step has the last problems. 0:
    train.steps decides."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per epoch. With more than 1 the old log-probs are computed once, before the
    first."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """Number of passes over the rollouts of a step."""
    microbatch_tokens: int = 0
    """Tokens per microbatch, over all devices. A microbatch never has more rows than a step. 0: as
    many as fit into memory."""
    pack: str = "auto"
    """Lengths of packs in tokens. auto: the longest possible continuation of a prompt, and half of
    it; longest: only the former, which compiles one program less. Or numbers in descending order,
    such as 1024,320, of which the first has room for any response: python -m jzero.plan --packs
    WORKDIR chooses them from the responses of a run."""
    packs_per_row: int = 8
    """Packs in a row that share its prompt (prefix sharing). 0: every sequence has its own copy of
    the prompt."""
    sequence_per_turn: bool = False
    """Trains on one sequence for each turn (history and response) instead of one for each episode,
    as AReaL's agent does."""

    # The end of a process, checkpoints and exports.
    minutes: float = 0.0
    """Time limit of this process in minutes, such as the limit of a notebook. The run ends before
    the limit, with a checkpoint from which the same command continues. 0: no limit."""
    preemption_notice: Literal["auto", "gce", "none"] = "auto"
    """Where preemption notices of spot machines come from. At a notice the run saves a checkpoint
    and ends, as at SIGTERM. gce: the metadata server of Google Compute Engine. auto: the same, only
    on machines of Compute Engine. none: no source."""
    seed: int = Field(default=0, le=2**32 - 1)
    """Random seed of the whole run."""  # JAX's keys take 32 bits
    checkpoint_every: int = Field(default=20, ge=-1)
    """RL steps between checkpoints. 0: only those before the first and after the last step. -1:
    none, unless the run is stopped before its end; a killed run starts over."""
    checkpoint_epochs: float = 0.0
    """Passes over the training data between checkpoints, in addition to checkpoint_every: 1 saves
    after the last step of each pass. 0: only checkpoint_every."""
    export_every: int = 0
    """RL steps between exports to export-<step>, in addition to the export at the end. 0: only the
    export at the end."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep. 0: all."""
    save: Literal["full", "no_optimizer", "adapter"] = "full"
    """Content of checkpoints. full: the trained parameters and Adam's moments, from which a run
    resumes to the same numbers. no_optimizer: only the parameters, a third of the bytes; a resumed
    run starts Adam's moments at 0. adapter: the same, for a run with an adapter."""
    export_merged: bool = False
    """Exports of a run with an adapter are complete models, with the adapter merged into the base.
    False: exports are the adapter in PEFT's format. hub.push always exports models."""
    price: float = 0.0
    """Price of the machine in dollars an hour, for the announced cost of the run; --price is short
    for it. 0: the cost is not announced."""

    # Logs.
    logged_rollouts: int = 8
    """Number of rollouts per step that are written to samples.jsonl. 0: none."""
    all_trajectories: bool = False
    """Writes all episodes of several turns to trajectories/, not only logged_rollouts per step."""

    trajectories: str = ""
    """Directory for episodes of several turns. Empty: trajectories in the workdir."""
    trajectory_lines: Literal["episode", "turn"] = "episode"
    """Content of a line of a trajectory's .jsonl file: an episode with its turns, or a turn, as in
    the files of AReaL's answer_save_path."""

    callbacks: tuple[str, ...] = ()
    """User-defined functions, FILE.py:function or module:function, that are called after each step,
    evaluation and checkpoint and at the end of a process, with the parameters event, step, metrics
    and workdir (docs/extend.md)."""
    stop_on: str = ""
    """Remarks about a run that does not learn which end it, separated by commas, such as
    one_score,nothing_trained. docs/troubleshooting.md has their names. Empty: none."""

    # Resuming from an earlier checkpoint.
    resume_from: Checkpoint | None = None
    """Checkpoint to continue from, if the workdir has a run, as in train.resume_from.step=40. none:
    the newest checkpoint."""

    trackers: tuple[str, ...] = ()
    """Experiment trackers that also get metrics, sampled completions, config and summary, each in a
    process that cannot stop the run: wandb(project=NAME), trackio(project=NAME, space=USER/NAME),
    tensorboard, mlflow(project=NAME, uri=URI), or a class of yours, FILE.py:Class or module:Class.
    completions=False keeps the completions here. Empty: only the files of the workdir."""

    @property
    def pack_lengths(self) -> tuple[int, ...]:
        """Returns the lengths in `pack`, () if `pack` is auto or longest.

        Raises UserError for any other text.
        """
        if self.pack in ("auto", "longest"):
            return ()
        if not PACK_LENGTHS.fullmatch(self.pack):
            raise UserError(
                f"train.pack={self.pack} is not auto, longest or lengths in tokens: give lengths "
                "as in train.pack=1024,320"
            )
        return tuple(map(int, self.pack.split(",")))


# Exports that wait for their push. With more, the oldest is given up, so that exports do not fill
# the disk while the hub is down.
MOST_WAITING_PUSHES = 2


@part
class Push:
    """The settings of every push to the hub.

    Pushes run in the background: a hub that fails, hangs or refuses never stops the run.
    """

    repo: str = ""
    """USER/NAME of the model on the hub. It is created if it does not exist."""
    private: bool = True
    """Creates a private model, and refuses to push to a public one. False: creates a public model.
    """
    revision: str = "main"
    """Branch of the final model. The checkpoint of step N is pushed to the branch REVISION-step-N.
    """
    overwrite: bool = False
    """Replaces existing branches that this run did not create. main is always replaced."""
    on_push: str = ""
    """Command to run after each push, without a shell, such as "sbatch eval.slurm {repo} {revision}
    {step}". Its output is in hub/on_push-<step>.log. Empty: no command."""
    minutes: float = Field(default=30.0, gt=0, le=10_080)
    """Time limit in minutes of one attempt of a push, and of the wait of a finished run for its
    pushes and their commands. Running the same command again makes up for missing pushes."""
    retries: int = Field(default=3, le=100)
    """Maximum retries of a failed push, after 5, 10, 20, ... seconds. 0: no retries."""


@part
class End(Push):
    """The final model is pushed."""


@part
class EveryCheckpoint(Push):
    """The model of every step of train.checkpoint_every is pushed, and the final model."""


@part
class Card:
    """The entries of model cards that a run cannot know."""

    tags: tuple[str, ...] = ()
    """Tags of the model card, besides the tags of the recipe."""
    language: tuple[str, ...] = ()
    """Languages of the model card, such as en."""
    license: str = "unknown"
    """License of the model card as the hub names it, such as apache-2.0."""


@section
class HubConfig:
    """Pushes to the Hugging Face hub, and the model card of exports."""

    push: End | EveryCheckpoint | None = None
    """Models to push to the hub during the run and after the last step, as in
    end(repo='USER/NAME')."""
    card: Card = Card()
    """Entries of the model card of every export."""


@section
class EvalConfig:
    """Evaluation on held-out problems, during a run and by `jzero evaluate`."""

    problems: int = 512
    """Number of held-out problems of the task. 0: none."""
    samples: int = 4
    """Samples of each problem (avg@k). 0: only greedy decoding."""
    temperature: float = 0.0
    """Sampling temperature of eval.samples. 0: rollout.temperature."""
    top_p: float = Field(default=0.0, le=1)
    """The top_p of eval.samples. 0: rollout.top_p."""
    max_new_tokens: int = 0
    """Maximum tokens of a response in an evaluation. 0: rollout.max_new_tokens."""
    every: int = 0
    """RL steps between evaluations, in addition to those before and after the run. 0: no
    evaluations in between."""
    greedy: bool = True
    """Also measures the accuracy of greedy decoding."""

    # Test sets and graders.
    suites: tuple[str, ...] = ()
    """Additional test sets: keys of jzero.tasks.suites.SUITES, or NAME=FILE or NAME=rows(...), a
    data set in the notation of task.data."""
    limit: int = 0
    """Maximum problems of a suite. 0: all."""
    verifier: Literal["", Verifier] = ""
    """Grader of evaluations: a value of task.verifier. Empty: task.verifier. Sets with problems
    that the verifier does not grade are graded by jzero (fast)."""
    verifiers: tuple[str, ...] = ()
    """Additional verifiers, values of task.verifier. Their accuracies are reported as
    accuracy_by/<verifier>."""
    rewards: bool = True
    """Calls task.reward.functions on the responses of evaluations, and reports their means and the
    mean score. False: evaluations call only the task's grader. A function that requires a column is
    not called on a set without the column."""
    save_responses: bool = True
    """Writes every response of evaluations during training to
    evaluations/<step>/<suite>-<kind>.jsonl in the workdir."""

    def longest_episode(self, rollout: RolloutConfig) -> int:
        """Returns the tokens of the longest episode of an evaluation, its prompt included."""
        max_new_tokens = self.max_new_tokens or rollout.max_new_tokens
        return dataclasses.replace(rollout, max_new_tokens=max_new_tokens).longest_episode


@section
class MeshConfig:
    """The training mesh. One axis may be -1, which stands for all remaining devices."""

    data: int = Field(default=1, ge=-LARGEST_INT)
    """Number of devices with copies of the parameters (data parallelism)."""
    fsdp: int = Field(default=-1, ge=-LARGEST_INT)
    """Number of devices that the parameters are sharded over (FSDP)."""
    tensor: int = Field(default=1, ge=-LARGEST_INT)
    """Number of devices that heads and MLPs are sharded over (tensor parallelism)."""
    context: int = Field(default=1, ge=-LARGEST_INT)
    """Number of devices that share the tokens of a row in the update (context parallelism), for
    long responses. It divides the query heads of a device."""
    slices: int = Field(default=1, ge=1)
    """Number of slices that train together, each with a copy of the parameters (data parallelism
    over the data-center network). The other sizes are those of one slice."""


@section
class MemoryConfig:
    """The memory check before a run, and the memory of a device."""

    check: bool = True
    """Refuses a run that needs more memory than its devices or its host have, by the planner's
    estimate, before anything is downloaded."""
    device_gib: float = 0.0
    """Memory of a device in GiB. 0: the memory that the device reports; CPU devices share the
    memory of the machine."""
    disk_gb: float = 0.0
    """Disk for the workdir in GB, such as a notebook's quota. 0: the free space of its file system.
    """


@section
class Config:
    """All settings of a run."""

    name: str = ""
    """Name of the preset, which appears in the log and in the name of the workdir."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: algorithms.Algorithm = field(default_factory=algorithms.grpo)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: Critic = Critic()
    """Critic, for an algorithm that needs one, such as ppo."""
    teacher: teachers.Model | teachers.Policy | teachers.Reference | teachers.Server | None = None
    """Teacher of on-policy distillation, for an algorithm with distillation.coef."""
    warm_start: WarmStart | None = None
    """Supervised steps before RL, on examples of the task, as in warm_start(steps=1000)."""
    sft: Sft | None = None
    """Supervised fine-tuning, as in sft(data='rows.jsonl'). none: the run does RL."""
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    @property
    def is_warm_started(self) -> bool:
        """Returns whether a warm start trains the full model before RL."""
        # Fine-tuning reads `warm_start` only to draw the examples of a task.
        return self.warm_start is not None and self.sft is None

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """Returns the critic's optimizer: the policy's, with the learning rate `critic.lr`."""
        return dataclasses.replace(self.optimizer, lr=self.critic.lr)


class Setting(NamedTuple):
    """One setting of a config with its dotted name, such as "rollout.group_size".

    An argument of a part has a `Setting` of its own, after the setting of the part: its name is
    "algorithm.surrogate.low", and `part` is "algorithm.surrogate".
    """

    name: str
    value: object
    field: FieldInfo
    part: str = ""  # name of the setting whose value has this argument; "" for other settings

    @property
    def default(self) -> object:
        """The default of the schema."""
        return self.field.default

    @property
    def parts(self) -> list[type | None]:
        """The classes of the parts that the setting may have; [] for any other setting."""
        return parts_of(self.field)


def list_settings(config: Config) -> list[Setting]:
    """Returns every setting of a config in the order of the schema, arguments of parts included."""
    return list(walk(config, ""))


def walk(section: object, prefix: str, part: str = "") -> Iterator[Setting]:
    """Yields the settings of a section or part; their names begin with `prefix`.

    part: dotted name of the setting, if `section` is a part.
    """
    for field_name, item in fields_of(type(section)).items():
        name, value = prefix + field_name, getattr(section, field_name)
        if section_of(item) is not None:
            yield from walk(value, f"{name}.")
            continue
        yield Setting(name, value, item, part)
        if value is not None and parts_of(item):
            yield from walk(value, f"{name}.", name)


def list_sections(config: Config) -> dict[str, object]:
    """Returns every section of a config by its dotted name; "" is the whole config."""
    return dict(_walk_sections(config, ""))


def _walk_sections(section: object, name: str) -> Iterator[tuple[str, object]]:
    yield name, section
    for field_name, item in fields_of(type(section)).items():
        if section_of(item) is not None:
            # The name of the config itself is "".
            inner_name = f"{name}.{field_name}".removeprefix(".")
            yield from _walk_sections(getattr(section, field_name), inner_name)


for _name, _section in list_sections(Config()).items():
    SECTION_NAMES[type(_section)] = _name


@functools.cache
def known_names() -> dict[str, tuple[FieldInfo, ...]]:
    """Returns the fields of every setting, and of every argument that a part may have, by name.

    Several parts of a setting may have an argument of the same name.
    """
    names: dict[str, tuple[FieldInfo, ...]] = {}
    for item in list_settings(Config()):
        if not item.part:
            names[item.name] = (item.field,)
            _add_arguments(names, item.name, item.field)
    return names


def _add_arguments(names: dict[str, tuple[FieldInfo, ...]], name: str, field: FieldInfo) -> None:
    for kind in parts_of(field):
        for argument, inner in fields_of(kind).items() if kind else ():
            full_name = f"{name}.{argument}"
            names[full_name] = (*names.get(full_name, ()), inner)
            _add_arguments(names, full_name, inner)
