"""Every setting of a run: its type, default, meaning and allowed values.

A recipe in `configs/` fills a `Config`, the command line overrides single settings with
`--config.section.field=value`, and `jzero.config.validate` refuses impossible values. Fields have
only the types that such a flag can parse: bool, int, float, str and tuples of str or float.

Two conventions hold for all settings. A number may not be negative unless its line says
`at_least=None`. The value 0 of a number, or "" of a name, turns the thing off unless its
description says otherwise.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from jzero import algorithms
from jzero.setting import Rules, rules_of, setting

DTYPES = ("bfloat16", "float32")


@dataclass
class ArchitectureConfig:
    """The architecture of a model that starts from random weights, in the words of Hugging Face.

    It is read only when `model.path` is empty. The defaults make a model of 1M parameters.
    """

    model_type: str = setting(
        "qwen2",
        "Model family, an entry of jzero.model.families.FAMILIES. qwen2 has biases on q, k and v; "
        "qwen3 normalizes q and k instead; llama and mistral do neither; qwen3_5_text mixes gated "
        "delta nets with attention; qwen3_moe is qwen3 with experts, and qwen3_5_moe_text is "
        "qwen3_5_text with experts.",
    )
    hidden_size: int = setting(128, "Width of the residual stream.", at_least=1)
    intermediate_size: int = setting(512, "Width of the MLP's hidden layer.", at_least=1)
    num_hidden_layers: int = setting(4, "Number of layers.", at_least=1)
    num_attention_heads: int = setting(4, "Number of query heads.", at_least=1)
    num_key_value_heads: int = setting(
        2, "Number of key and value heads. It divides num_attention_heads.", at_least=1
    )
    head_dim: int = setting(32, "Width of one head. It is even.", at_least=1)
    tie_word_embeddings: bool = setting(True, "Uses the embedding matrix as output matrix too.")
    rope_theta: float = setting(10000.0, "Base of the rotary position embedding.")
    rms_norm_eps: float = setting(1e-6, "Epsilon of the RMS norms.")
    full_attention_interval: int = setting(
        4,
        "Layers of qwen3_5_text from one attention to the next; the others are gated delta nets.",
        at_least=2,
    )
    partial_rotary_factor: float = setting(
        0.25, "Share of a head that RoPE rotates in qwen3_5_text.", above=0, at_most=1
    )
    linear_num_key_heads: int = setting(
        4, "Heads of queries and keys of a gated delta net (qwen3_5_text).", at_least=1
    )
    linear_num_value_heads: int = setting(
        4, "Value heads of a gated delta net: a multiple of linear_num_key_heads.", at_least=1
    )
    linear_key_head_dim: int = setting(
        32, "Width of a query and of a key of a gated delta net.", at_least=1
    )
    linear_value_head_dim: int = setting(
        32, "Width of a value head of a gated delta net.", at_least=1
    )
    linear_conv_kernel_dim: int = setting(
        4, "Tokens that the causal convolution of a gated delta net sees.", at_least=2
    )
    num_experts: int = setting(
        0,
        "Experts of a layer, of a family that has them (qwen3_moe, qwen3_5_moe_text). 0: one dense "
        "MLP.",
    )
    num_experts_per_tok: int = setting(0, "Experts that every token goes to.")
    moe_intermediate_size: int = setting(0, "Width of the hidden layer of one expert.")
    norm_topk_prob: bool = setting(
        False, "Divides the router's weights of a token's experts by their sum."
    )
    shared_expert_intermediate_size: int = setting(
        0, "Width of the MLP beside the experts that every token goes to, of qwen3_5_moe_text."
    )


@dataclass
class AdapterConfig:
    """A low-rank adapter (LoRA) that is trained in place of the model, whose weights are frozen."""

    rank: int = setting(
        0,
        "Rank of the adapter on every linear layer, such as 32. 0: no adapter, the whole model is "
        "trained.",
    )
    alpha: float = setting(
        32.0,
        "The adapter's output is multiplied by alpha / rank. With one alpha the best learning rate "
        "hardly depends on the rank.",
        above=0,
    )
    targets: tuple[str, ...] = setting(
        (),
        "Linear layers that have an adapter, such as q,k,v,o,gate,up,down. Empty or all: every "
        "linear layer of the model's family.",
    )
    init: str = setting(
        "uniform",
        "How the first factor A is drawn. uniform: between -1/sqrt(inputs) and 1/sqrt(inputs). The "
        "second factor B starts at 0.",
        choices=("uniform",),
    )

    path: str = setting(
        "",
        "Directory or hub id of an adapter in PEFT's format that training goes on from. It gives "
        "rank, alpha and targets. Empty: a new adapter.",
    )

    @property
    def scale(self) -> float:
        """Returns what the adapter's output is multiplied by; 0 without an adapter."""
        return self.alpha / self.rank if self.rank else 0.0


@dataclass
class ModelConfig:
    """The policy's model and how it is computed."""

    path: str = setting(
        "",
        "Directory or hub id with config.json and safetensors. "
        "Empty: random weights of model.arch.",
    )
    tokenizer: str = setting(
        "",
        "Directory or hub id of the tokenizer. Empty: model.path or, if that is empty too, "
        "jzero's own character tokenizer for countdown.",
    )
    arch: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    max_position_embeddings: int = setting(
        0,
        "Most tokens of a sequence that the model is meant for; longer runs are refused. 0: what "
        "its config.json says, and 32768 for a model from random weights.",
    )
    dtype: str = setting(
        "bfloat16",
        "Type of the computation, and of weights that an adapter keeps frozen. Weights that are "
        "trained are always float32.",
        choices=DTYPES,
    )
    remat: str = setting(
        "full",
        "What the backward pass recomputes: nothing, all but matrix products, or whole layers.",
        choices=("none", "dots", "full"),
    )
    logit_chunk: int = setting(
        2048,
        "Tokens whose logits [tokens, vocabulary] exist on a device at the same time.",
        at_least=1,
    )
    attention: str = setting(
        "",
        "Attention kernels, an entry of jzero.attention.BACKENDS. Empty: those of the platform. "
        "xla: plain XLA everywhere. tpu_fused: on TPUs, one kernel rotates, writes and attends in "
        "decoding.",
    )
    base: str = setting(
        "native",
        "How the linear layers that an adapter keeps frozen are held. native: in model.dtype. "
        "int8: in 8 bits with one scale for each output channel, in sampling, scoring and update "
        "alike.",
        choices=("native", "int8"),
    )
    exact: bool = setting(
        False,
        "The sampler and the trainer compute the same log-probabilities to the last bit. The "
        "ratio is exactly 1 before the first optimizer step, old log-probabilities are not "
        "computed again, and the run fails at the first log-probability that differs "
        "(docs/exact.md).",
    )
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def is_base_quantized(self) -> bool:
        """Returns whether the linear layers of a frozen base are in 8 bits."""
        return self.base == "int8"

    @property
    def kernels(self) -> str:
        """Returns the entry of jzero.attention.BACKENDS that computes attention."""
        return "exact" if self.exact else self.attention


@dataclass
class JudgeConfig:
    """The judge: a model behind an OpenAI-compatible API, for the reward judge."""

    url: str = setting("", "Address of the judge's API, such as http://localhost:8000/v1.")
    model: str = setting("", "Name of the judge's model at the server.")
    template: str = setting(
        "",
        "File with the rubric, the message to the judge, with {prompt}, {response}, {gold}, "
        "{conversation}, {gold.FIELD} and {row.COLUMN} where these go. Empty: a rubric of jzero's "
        "own.",
    )
    pattern: str = setting(
        r"(?i)score\W*([0-9]+(?:\.[0-9]+)?)",
        "Regular expression whose one group is the score in the judge's reply. The last match "
        "counts.",
    )
    scale: float = setting(
        10.0, "The highest score; the lowest is 0. The reward is the score / scale.", above=0
    )
    temperature: float = setting(0.0, "Temperature of the judge's reply.")
    max_tokens: int = setting(1024, "Most tokens of the judge's reply.", at_least=1)
    concurrency: int = setting(16, "Requests of a host that wait at the same time.", at_least=1)
    retries: int = setting(
        4,
        "Times that a request is sent again, after 1/2, 1, 2, 4, ... seconds, if the server fails "
        "or, at a temperature above 0, its reply has no score.",
    )
    key_variable: str = setting(
        "",
        "Environment variable that holds the server's API key, such as OPENAI_API_KEY. Empty: no "
        "key is sent.",
    )


@dataclass
class RewardConfig:
    """The rewards whose weighted sum is a response's score. The default numbers are open-r1's."""

    functions: tuple[str, ...] = setting(
        ("accuracy",),
        "Rewards to sum: names of jzero.tasks.rewards.NAMES, or functions of your own, "
        "module:function or FILE.py:function, whose parameters are named response, gold, task, "
        "prompt, messages, row, turns or environment; or responses, golds, prompts, conversations, "
        "rows and episodes for lists of all responses of a step.",
    )
    weights: tuple[float, ...] = setting((), "One weight for each function. Empty: all are 1.")
    seconds: float = setting(
        60.0,
        "Wall-clock seconds that one call of a function of your own may take, and one request to "
        "the judge. The first call of a process includes the import of its module.",
        above=0,
    )
    memory_gib: float = setting(
        16.0,
        "Address space in GiB that a grader process may have while it calls a function of your "
        "own. 0: no limit.",
    )
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    unit: str = setting(
        "characters",
        "Unit of lengths in the rewards length and cosine.",
        choices=("characters", "tokens"),
    )
    repetition_ngram: int = setting(
        3, "Words in the n-grams that repetition_penalty counts.", at_least=1
    )
    repetition_max: float = setting(
        -1.0, "repetition_penalty of a response that only repeats itself.", at_least=None
    )
    cosine_length: int = setting(
        1000, "Length at which cosine reaches its long values.", at_least=1
    )
    cosine_right_short: float = setting(
        1.0, "cosine of a right response of length 0.", at_least=None
    )
    cosine_right_long: float = setting(
        0.5, "cosine of a right response of cosine_length or more.", at_least=None
    )
    cosine_wrong_short: float = setting(
        -1.0, "cosine of a wrong response of length 0.", at_least=None
    )
    cosine_wrong_long: float = setting(
        -0.5, "cosine of a wrong response of cosine_length or more.", at_least=None
    )
    overlong_length: int = setting(16384, "Tokens from which soft_overlong is -1.", at_least=1)
    overlong_cache: int = setting(
        4096, "Tokens before overlong_length over which soft_overlong falls from 0 to -1."
    )


@dataclass
class SandboxConfig:
    """Where the programs of responses run, and what one run of a program may take."""

    level: str = setting(
        "auto",
        "Protection from programs. auto: the best of namespaces and landlock, and no run where the "
        "machine has neither. seccomp and none protect less, and only a config that names them "
        "gets them (docs/sandbox.md).",
        choices=("auto", "namespaces", "landlock", "seccomp", "none"),
    )
    seconds: float = setting(
        5.0,
        "Seconds of CPU time that one run of a program may take. Three times as much wall time.",
        above=0,
    )
    memory_gib: float = setting(1.0, "Address space of a program in GiB.", above=0)
    output_mib: float = setting(
        1.0, "MiB that a program may write to its output and errors together.", above=0
    )
    packages: tuple[str, ...] = setting(
        (),
        "Modules such as numpy that programs may import beside the standard library. They are "
        "imported once, before the first program.",
    )
    url: str = setting(
        "", "A server that runs the programs in place of this machine. Empty: this machine."
    )
    protocol: str = setting(
        "piston",
        "What task.sandbox.url speaks: piston, sandbox_fusion, or e2b, which is open-r1's router.",
        choices=("piston", "sandbox_fusion", "e2b"),
    )


@dataclass
class ToolsConfig:
    """Tools that the policy may call in an episode (docs/environments.md)."""

    names: tuple[str, ...] = setting(
        (),
        "Tools: calculator, python, search, and of your own module:function, FILE.py:function or a "
        "class, of which each episode has an instance. Empty: none.",
    )
    syntax: str = setting(
        "",
        "How calls are written: json as Qwen2.5 and Qwen3 do, or xml as Qwen3-Coder and Qwen3.5 "
        "do. Empty: as the tokenizer's chat template says, json without one.",
        choices=("", "json", "xml"),
    )
    max_calls: int = setting(
        16, "Most calls of an episode. Further calls are answered with an error.", at_least=1
    )
    max_output: int = setting(
        4000, "Most characters of a call's result. A longer result loses its middle.", at_least=1
    )
    seconds: float = setting(
        10.0,
        "Seconds that one call may take. A call that takes longer is answered with an error. All "
        "calls of a response together may take most of task.reward.seconds.",
        above=0,
    )
    corpus: str = setting(
        "",
        "What the tool search looks in: a file .jsonl with a column text, a text file with a "
        "passage a line, or a directory of text files.",
    )
    search_results: int = setting(3, "Passages that a search returns.", at_least=1)


@dataclass
class TaskConfig:
    """The problems, their prompts, and how responses are graded."""

    name: str = setting(
        "countdown",
        "Task: a key of jzero.tasks.TASKS, or a module that has a TASK. verifiers:ENV stands for "
        "task.name=environment task.environment=verifiers:ENV.",
    )
    environment: str = setting(
        "",
        "An environment of your own for task.name=environment: module:Class or FILE.py:Class, with "
        "the methods reset(row, seed) and step(response). Its calls have the limits "
        "task.reward.seconds and task.reward.memory_gib. Or openenv:URL, a server of OpenEnv, or "
        "verifiers:ENV, an installed environment of the package verifiers or a file of its "
        "settings.",
    )
    environment_mode: str = setting(
        "auto",
        "Where instances of task.environment live. processes: in the grader processes, which take "
        "one step at a time and can be killed. asyncio: in an event loop of the run, which awaits "
        "thousands of steps at once; its methods have to be async. auto: asyncio for openenv:URL "
        "and verifiers:ENV, and processes for all others.",
        choices=("auto", "processes", "asyncio"),
    )
    data: str = setting(
        "",
        "Data set: hub id, config@id, local file or directory; several are separated by commas. "
        "Empty: the task's own (countdown makes its problems).",
    )
    weights: tuple[float, ...] = setting(
        (), "Share of each set of task.data. Empty: the sets are treated as one."
    )
    eval_data: str = setting("", "Held-out data set. Empty: a split of task.data.")
    train_split: str = setting(
        "", "Split of task.data to train on, such as train_hard. Empty: train, or the only one."
    )
    eval_split: str = setting(
        "", "Split that is held out, such as validation. Empty: test, where there is one."
    )
    problem_column: str = setting(
        "", "Column with the problem. Empty: the first of the usual names that the set has."
    )
    answer_column: str = setting(
        "", "Column with the answer. Empty: the first of the usual names that the set has."
    )
    max_train: int = setting(
        0, "Trains on the first rows of each set only, at most this many. 0: on all."
    )
    level_min: int = setting(0, "Lowest level, for sets that have levels. 0: no limit.")
    level_max: int = setting(0, "Highest level, for sets that have levels. 0: no limit.")
    template: str = setting(
        "r1",
        "Prompt template, one of the task's TEMPLATES. Countdown: r1, qwen_chat, plain. "
        "Mathematics: qwen_math, r1, no, r1_distill_qwen, r1_distill_tags, qwen3, chat. "
        "Code: chat, qwen3, r1_distill_qwen, plain. Or a file "
        "in plain text or Jinja, chat:FILE for a user's message, column:NAME for prompts in the "
        "data set.",
    )
    answer_mark: str = setting(
        "",
        "Mathematics: how a response marks its answer, a key of jzero.grading.extract.TEMPLATES. "
        "Empty: as task.template asks for; the last box where the template is a file or a column.",
        choices=("", "boxed", "think_boxed", "r1", "gsm8k", "number", "final_answer", "answer"),
    )
    system_prompt: str = setting(
        "",
        "System prompt of the template chat, empty for the instruction of qwen_math; "
        "and of chat:FILE, empty for none.",
    )
    verifier: str = setting(
        "fast",
        "How mathematical answers are compared: by jzero (fast), by the package math-verify, or as "
        "oat compares GSM8K's: last_number takes the last number of the response, wherever it is, "
        "and compares it as text.",
        choices=("fast", "math_verify", "last_number"),
    )
    options: tuple[str, ...] = setting(
        (), "Settings of a task's own, as name=value, with one flag for each."
    )
    numbers_min: int = setting(3, "Countdown: fewest numbers of a problem.")
    numbers_max: int = setting(4, "Countdown: most numbers of a problem.")
    value_max: int = setting(99, "Countdown, guess: the largest number. The smallest is 1.")
    target_max: int = setting(99, "Countdown: targets are between 1 and this.")
    format_score: float = setting(
        0.1, "Countdown: score of a well-formed but wrong equation.", at_least=None
    )
    malformed_score: float = setting(
        0.0,
        "Countdown: score of an answer in its tags that is no equation. oat: 0.1.",
        at_least=None,
    )
    stop_on_success: bool = setting(True, "A right answer ends an episode of several turns.")
    turn_reward: str = setting(
        "success",
        "Reward of a turn: ((right - 1/2) * 2 - reward_bias) * reward_scaling, "
        "or the grader's score.",
        choices=("success", "score"),
    )
    reward_bias: float = setting(
        0.0, "Subtracted from the reward of a turn before scaling.", at_least=None
    )
    reward_scaling: float = setting(1.0, "Factor of the reward of a turn.")
    turn_discount: float = setting(
        1.0, "Discount of the next turn's return in the return of a turn."
    )
    feedback_right: str = setting(
        "Yes, that is the right answer.", "What the environment replies to a right answer."
    )
    feedback_wrong: str = setting(
        "No, that is not the right answer. Look for the mistake and try once more.",
        "What the environment replies to a wrong answer.",
    )
    grade_seconds: float = setting(
        5.0,
        "Seconds that one grading may take. Then its worker is killed and the score is 0. Reward "
        "functions of your own have task.reward.seconds instead.",
        above=0,
    )
    grade_workers: int = setting(2, "Processes that grade.", at_least=1)
    max_failed_share: float = setting(
        0.5,
        "Share of a step's gradings that may raise an error, time out or kill their worker. Beyond "
        "it the run stops. Responses on which a function of your own failed are not trained on; "
        "those on which jzero's own grader failed score 0.",
        at_most=1,
    )
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)


@dataclass
class RolloutConfig:
    """How responses are sampled: how many, how long, from which distribution, and the engine."""

    num_prompts: int = setting(128, "Prompts in a step (P).", at_least=1)
    group_size: int = setting(8, "Rollouts of each prompt (G).", at_least=1)
    max_prompt_tokens: int = setting(
        256, "Most tokens of a prompt. Problems with a longer one are dropped.", at_least=1
    )
    max_new_tokens: int = setting(1024, "Most tokens of a response.", at_least=1)
    max_turns: int = setting(
        1, "Most responses of an episode, for tasks that reply to a response.", at_least=1
    )
    max_reply_tokens: int = setting(
        64, "Tokens of a reply that max_episode_tokens=0 leaves room for."
    )
    max_episode_tokens: int = setting(
        0, "Most tokens of an episode with its prompt and replies. 0: room for every turn."
    )
    max_staleness: int = setting(
        0,
        "Most policy versions between sampling a rollout and training on it (AReaL's eta). "
        "0: every step trains on rollouts of the current policy.",
    )
    max_running_groups: int = setting(
        0,
        "Most groups sampled at the same time when max_staleness is above 0. "
        "0: (max_staleness + 1) * num_prompts.",
    )
    temperature: float = setting(1.0, "Sampling temperature.")
    top_k: int = setting(0, "Samples from the k most likely tokens only. 0: from all.")
    top_p: float = setting(1.0, "Samples from the likeliest tokens of this total probability.")
    min_p: float = setting(
        0.0, "Drops tokens below this share of the likeliest token's probability."
    )
    stop: tuple[str, ...] = setting(
        (),
        "Strings that end a response, besides the tokenizer's end-of-sequence tokens. "
        "Empty: those of task.template, such as </answer> of r1 for mathematics.",
    )
    keep_stop: bool = setting(True, "Keeps the stop string in the response.")
    num_slots: int = setting(256, "Sequences decoded at the same time (S).", at_least=1)
    page_size: int = setting(64, "Tokens in a page of the KV cache.", at_least=1)
    num_pages: int = setting(
        0, "Pages of the KV cache in all. 0: enough for every slot at full length."
    )
    decode_steps: int = setting(
        32, "Tokens decoded for each slot in one call of the device.", at_least=1
    )
    weights: str = setting(
        "native",
        "How the decoder holds its copy of the trained model. native: in model.dtype. int8: the "
        "linear layers in 8 bits with one scale for each output channel, rounded anew in every "
        "publication.",
        choices=("native", "int8"),
    )
    kv_dtype: str = setting(
        "bfloat16",
        "Type of the KV cache. int8: 8 bits with one scale for each head of each token, on CPUs "
        "and with model.attention=xla or tpu_fused.",
        choices=(*DTYPES, "int8"),
    )
    routing_replay: bool = setting(
        False,
        "Of a model with experts: the update sends every token to the experts that it went to in "
        "the sampler. Else the router chooses anew.",
    )

    @property
    def quantizes_weights(self) -> bool:
        """Returns whether the decoder's linear layers are in 8 bits where the trainer's are not."""
        return self.weights == "int8"

    @property
    def longest_episode(self) -> int:
        """Returns the number of tokens of the longest episode, its prompt included."""
        if self.max_episode_tokens:
            return self.max_episode_tokens
        responses = self.max_turns * self.max_new_tokens
        replies = (self.max_turns - 1) * self.max_reply_tokens
        return self.max_prompt_tokens + responses + replies

    @property
    def longest_continuation(self) -> int:
        """Returns how many tokens of the longest episode may follow the prompt."""
        return self.longest_episode - self.max_prompt_tokens


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    lr: float = setting(1e-6, "Peak learning rate.")
    schedule: str = setting(
        "constant",
        "Learning rate after the warmup. All but constant end at min_lr_ratio * lr.",
        choices=("constant", "linear", "polynomial", "cosine"),
    )
    warmup_steps: int = setting(
        0, "Optimizer steps over which the learning rate rises linearly from 0."
    )
    warmup_ratio: float = setting(
        0.0, "The same as a share of the run's optimizer steps, if warmup_steps is 0.", at_most=1
    )
    min_lr_ratio: float = setting(0.1, "Last learning rate as a share of the peak.", at_most=1)
    power: float = setting(2.0, "Exponent of the polynomial schedule.")
    b1: float = setting(0.9, "Decay of Adam's first moment.", below=1)
    b2: float = setting(0.95, "Decay of Adam's second moment.", below=1)
    eps: float = setting(1e-8, "Epsilon of Adam.")
    weight_decay: float = setting(0.0, "Weight decay. It applies to matrices only.")
    clip_norm: float = setting(1.0, "Bound of the global gradient norm. 0: no clipping.")
    mu_dtype: str = setting(
        "float32",
        "Type of Adam's first moment. bfloat16 saves 2 of 12 bytes a parameter.",
        choices=DTYPES,
    )
    offload: bool = setting(
        False,
        "Keeps Adam's moments in the host's memory while responses are sampled and scored, so that "
        "they are on the devices in updates alone. Every step moves them there and back.",
    )
    skip_norm: float = setting(
        0.0, "A step with a larger gradient norm changes nothing. 0: no step is skipped."
    )


@dataclass
class CriticConfig:
    """The critic of algorithms that need one, such as ppo.

    It is the policy's backbone with a scalar head.
    """

    path: str = setting(
        "", "Directory or hub id to start from. Empty: the weights that the policy starts from."
    )
    warmup_steps: int = setting(0, "RL steps at the start that train the critic alone.")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class TeacherConfig:
    """The teacher of on-policy distillation, for algorithms with a teacher_coef.

    It scores the tokens that the policy has sampled. docs/distillation.md says more.
    """

    kind: str = setting(
        "",
        "Who the teacher is. Empty: there is none. model: the model at path, the adapter at "
        "adapter, or both. policy: the policy itself before each step's update, behind prompt. "
        "reference: the same with the reference policy (algorithm.reference_every). server: an "
        "OpenAI-compatible server at url.",
        choices=("", "model", "policy", "reference", "server"),
    )
    path: str = setting(
        "",
        "Directory or hub id of the teacher, a model with the policy's tokenizer. Empty with "
        "adapter: model.path.",
    )
    adapter: str = setting(
        "", "Directory or hub id of an adapter in PEFT's format on that model. Empty: none."
    )
    prompt: str = setting(
        "",
        "Prompt that the teacher reads in place of the policy's: text, or a file of text, with "
        "{prompt} and {gold}, or the fields of a gold answer, where they go. Of a chat it replaces "
        "the last message. Empty: the teacher reads the policy's prompt.",
    )
    max_prompt_tokens: int = setting(
        0,
        "Most tokens of prompt once it is filled in; where it is longer, the teacher adds nothing "
        "to the advantages. 0: twice rollout.max_prompt_tokens.",
    )
    url: str = setting(
        "", "Address of the server's API, such as http://localhost:8000/v1, for kind=server."
    )
    model: str = setting(
        "", "Name of the model at the server. Empty: the only one that the server has."
    )
    request: str = setting(
        "echo",
        "How the server is asked. echo: OpenAI's echo=true with logprobs=1. prompt_logprobs: "
        "vLLM's field of that name.",
        choices=("echo", "prompt_logprobs"),
    )
    concurrency: int = setting(
        16, "Requests of a host that the server has at the same time.", at_least=1
    )
    seconds: float = setting(120.0, "Seconds that the server may take for one reply.", above=0)
    retries: int = setting(
        4, "Times that a request is sent again, after 1, 2, 4, ... seconds, if the server fails."
    )
    key_variable: str = setting(
        "",
        "Environment variable that holds the server's API key, such as OPENAI_API_KEY. Empty: no "
        "key is sent.",
    )


@dataclass
class WarmStartConfig:
    """Supervised steps before RL, for models that start from random weights."""

    steps: int = setting(0, "Supervised steps.")
    batch_size: int = setting(128, "Examples in a step.", at_least=1)
    lr: float = setting(1e-3, "Peak learning rate.")
    warmup_steps: int = setting(20, "Steps over which the learning rate rises.")
    tries: float = setting(
        2.0,
        "Average number of random tries in an example, right or wrong. "
        "The example gives up after each try with probability 1 / tries.",
        at_least=1,
    )


@dataclass
class SftConfig:
    """Supervised fine-tuning. A run with `sft.data` does this instead of RL (configs/sft.py)."""

    data: str = setting(
        "",
        "Sets with a column messages, or prompt and completion, written as in task.data; "
        "or the name of a task, for its warm-start examples.",
    )
    weights: tuple[float, ...] = setting(
        (), "Share of each set of sft.data. Empty: the sets are treated as one."
    )
    eval_data: str = setting("", "Held-out data set. Empty: splits of sft.data.")
    train_split: str = setting(
        "", "Split of sft.data to train on, such as train_hard. Empty: train, or the only one."
    )
    eval_split: str = setting(
        "", "Split that is held out, such as validation. Empty: test, where there is one."
    )
    chat_template: str = setting(
        "", "File with a Jinja chat template. Empty: the tokenizer's own template."
    )
    system_prompt: str = setting(
        "",
        "System prompt of conversations that have none of their own. Empty: they stay as they are.",
    )
    loss: str = setting(
        "assistant",
        "Tokens to train on: the assistant's (or the completion's), or all.",
        choices=("assistant", "all"),
    )
    epochs: float = setting(1.0, "Passes over the data.")
    batch_size: int = setting(128, "Examples in a step.", at_least=1)
    pack_length: int = setting(
        4096, "Tokens in a packed row. Longer examples are dropped.", at_least=1
    )


@dataclass
class TrainConfig:
    """The training loop: steps, minibatches, packing, and what is written to disk.

    A row of a microbatch holds a prompt and behind it `packs_per_row` packs. A pack is a stretch of
    at most `pack_length` tokens, filled with one or more responses to that prompt.
    """

    steps: int = setting(
        200,
        "RL steps. Each samples rollouts, then makes minibatches * epochs optimizer steps. With "
        "prompt_epochs these are the most there may be, and 0 is no limit.",
    )
    prompt_epochs: float = setting(
        0.0,
        "Passes over the training problems, from which the number of RL steps is computed: "
        "problems * prompt_epochs / rollout.num_prompts. 0: train.steps alone says it.",
    )
    minibatches: int = setting(
        1,
        "Optimizer steps in an epoch. With more than 1 the old log-probs are computed once, "
        "before the first.",
        at_least=1,
    )
    epochs: int = setting(1, "Passes over the rollouts of a step.", at_least=1)
    microbatch_tokens: int = setting(16384, "Tokens in a microbatch, over all devices.", at_least=1)
    pack_length: int = setting(
        0,
        "Tokens in a pack. 0: as many as may follow a prompt. Every response must fit into a pack.",
    )
    pack_buckets: int = setting(
        2, "Number of pack lengths: pack_length, half of it, a quarter, ...", at_least=1
    )
    pack_lengths: tuple[int, ...] = setting(
        (),
        "Tokens of the packs of each kind of row, the longest first, in place of pack_length and "
        "pack_buckets. python -m jzero.pack_lengths chooses them from the responses of a run.",
    )
    packs_per_row: int = setting(
        8, "Packs in a row that share its prompt. 0: every sequence carries its own prompt."
    )
    sequence_per_turn: bool = setting(
        False,
        "Trains on one sequence for each turn (history and response) instead of one for the "
        "episode, as AReaL's agent does.",
    )
    minutes: float = setting(
        0.0,
        "Minutes that this process may take, such as those of a notebook. The run ends before they "
        "are over, with a checkpoint from which the same command goes on. 0: no limit.",
    )
    preemption_notice: str = setting(
        "auto",
        "Whom the run asks whether its spot machine is about to be taken away. At a notice it "
        "saves a checkpoint and ends, as at SIGTERM. gce: the metadata server of Google Compute "
        "Engine; auto: that server, on such a machine alone.",
        choices=("auto", "gce", "none"),
    )
    seed: int = setting(0, "Seed of the whole run.", at_most=2**32 - 1)  # JAX's keys take 32 bits
    checkpoint_every: int = setting(20, "RL steps between checkpoints.", at_least=1)
    export_every: int = setting(
        0, "RL steps between exports to export-<step>, besides the one at the end. 0: none."
    )
    keep_checkpoints: int = setting(2, "Newest checkpoints that are kept.")
    logged_rollouts: int = setting(8, "Rollouts of each step that are written to samples.jsonl.")
    all_trajectories: bool = setting(
        False,
        "Writes every episode of several turns to trajectories/, and not logged_rollouts of a "
        "step alone.",
    )
    resume_from: int = setting(
        -1,
        "Step of the checkpoint to go on from, where the workdir has a run. -1: the newest.",
        at_least=-1,
    )
    discard_later_steps: bool = setting(
        False,
        "Lets resume_from remove the checkpoints, exports and metrics of later steps from the "
        "workdir. Without it such a run is refused.",
    )
    wandb_project: str = setting(
        "", "Project of Weights & Biases that gets the metrics too. Empty: none."
    )
    wandb_entity: str = setting(
        "", "User or team that owns wandb_project. Empty: the default of the W&B account."
    )
    wandb_group: str = setting("", "Group of the run in wandb_project. Empty: none.")
    wandb_name: str = setting(
        "", "Name of the run in wandb_project. Empty: the name of the workdir."
    )


@dataclass
class EvalConfig:
    """Evaluation on held-out problems, during a run and by `jzero.evaluate`."""

    problems: int = setting(512, "Held-out problems of the task.")
    samples: int = setting(4, "Samples of each problem (avg@k). 0: greedy decoding alone.")
    temperature: float = setting(
        0.0, "Sampling temperature of eval.samples. 0: rollout.temperature."
    )
    top_p: float = setting(0.0, "The same for top_p. 0: rollout.top_p.", at_most=1)
    max_new_tokens: int = setting(
        0, "Most tokens of a response in an evaluation. 0: rollout.max_new_tokens."
    )
    every: int = setting(
        0, "RL steps between evaluations, besides those before and after the run. 0: none."
    )
    greedy: bool = setting(True, "Measures the accuracy of greedy decoding too.")
    suites: tuple[str, ...] = setting(
        (),
        "Further test sets: keys of jzero.tasks.suites.SUITES, or name=path of a local set.",
    )
    limit: int = setting(0, "Most problems of a suite. 0: all.")
    save_responses: bool = setting(
        True,
        "Writes every response of an evaluation in training to "
        "evaluations/<step>/<suite>-<kind>.jsonl of the workdir.",
    )

    def longest_episode(self, rollout: RolloutConfig) -> int:
        """Returns the number of tokens of the longest episode of an evaluation, with its prompt."""
        max_new_tokens = self.max_new_tokens or rollout.max_new_tokens
        return dataclasses.replace(rollout, max_new_tokens=max_new_tokens).longest_episode


@dataclass
class MeshConfig:
    """The training mesh. One axis may be -1 and then takes the devices that are left."""

    data: int = setting(1, "Devices that hold copies of the parameters.", at_least=None)
    fsdp: int = setting(-1, "Devices that the parameters are split over.", at_least=None)
    tensor: int = setting(1, "Devices that heads and MLP are split over.", at_least=None)
    context: int = setting(
        1,
        "Devices that share the tokens of a row of the update: for long responses. It divides the "
        "query heads of a device.",
        at_least=None,
    )
    decode_devices: int = setting(
        0,
        "Devices of each host that decode while the others train; needs rollout.max_staleness "
        "above 0. 0: all devices do both in turn.",
    )


@dataclass
class MemoryConfig:
    """What a run may take of its devices' memory, and when it is refused or stopped."""

    check: bool = setting(
        True,
        "Refuses a run that needs more memory than its devices have, by the planner's arithmetic, "
        "before anything is downloaded.",
    )
    device_gib: float = setting(
        0.0,
        "Memory of a device in GiB. 0: what the device reports, and no limit on a CPU.",
    )
    max_growth: float = setting(
        0.2,
        "Share by which the arrays on a device may be more than after the second step. A run that "
        "is above it, and grows in each of growth_steps steps, stops with a checkpoint. 0: it may "
        "grow. A growth of less than 16 MiB is always allowed.",
    )
    growth_steps: int = setting(
        5, "Steps in a row in which the arrays grow before max_growth stops the run.", at_least=1
    )


@dataclass
class Config:
    """All settings of a run."""

    name: str = setting("", "Name of the preset. It appears in the log and names the workdir.")
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: algorithms.Algorithm = field(default_factory=algorithms.grpo)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


@dataclass(frozen=True)
class Setting:
    """One setting of a config: its dotted name ("rollout.group_size"), its value and its rules."""

    name: str
    value: object
    rules: Rules


def list_settings(config: Config) -> list[Setting]:
    """Returns every setting of a config in the order of the schema."""
    return list(walk(config, ""))


def walk(part: object, prefix: str) -> Iterator[Setting]:
    """Yields the settings of a config or section; their names begin with `prefix`."""
    assert dataclasses.is_dataclass(part), f"{part=}"
    for item in dataclasses.fields(part):
        name = prefix + item.name
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{name}.")
        else:
            yield Setting(name, value, with_table_keys(name, rules_of(item)))


def with_table_keys(name: str, rules: Rules) -> Rules:
    """Adds to the choices of an algorithm's part the keys of the table that the part comes from."""
    table = algorithms.TABLES.get(name.removeprefix("algorithm."))
    if table is None or not name.startswith("algorithm."):
        return rules
    return dataclasses.replace(rules, choices=(*rules.choices, *table))
