"""Every knob of a run, with its default and meaning; recipes in `configs/` fill these. Fields take the types that
`--config.section.field=value` can parse. 0 (or "") turns a number (or a name) off."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import jax

from jzero import algorithms


@dataclass
class ArchitectureConfig:
    """A Hugging Face config.json in miniature, read only when `model.path` is empty (random init)."""

    model_type: str = "qwen2"  # qwen2 (biased q,k,v) | qwen3 (qk-norm, no bias)
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


@dataclass
class ModelConfig:
    path: str = (
        ""  # local directory or hub id with config.json and safetensors; "" = random init of `arch`
    )
    tokenizer: str = (
        ""  # directory or hub id; "" = model.path, or jzero's own countdown tokenizer without one
    )
    arch: ArchitectureConfig = field(default_factory=ArchitectureConfig)
    dtype: str = "bfloat16"  # compute: bfloat16 | float32. Master weights are always float32
    remat: str = "full"  # recompute in the backward pass: none | dots | full
    logit_chunk: int = 2048  # tokens whose [chunk, V] logits exist at a time
    attention: str = ""  # "" = the kernels of the platform | xla


@dataclass
class RewardConfig:
    """What a score is the weighted sum of. The numbers are open-r1's."""

    functions: tuple[str, ...] = (
        "accuracy",
    )  # tasks.rewards.NAMES, or module:function of (response, gold, task)
    weights: tuple[float, ...] = ()  # one each; () = all 1
    unit: str = "characters"  # of lengths in length and cosine: characters | tokens
    repetition_ngram: int = 3  # words
    repetition_max: float = -1.0  # repetition_penalty of a response that only repeats itself
    cosine_length: int = 1000  # units from the short value to the long one
    cosine_right_short: float = 1.0
    cosine_right_long: float = 0.5
    cosine_wrong_short: float = -1.0
    cosine_wrong_long: float = -0.5
    overlong_length: int = 16384  # tokens from which soft_overlong is -1
    overlong_cache: int = 4096  # tokens before it over which it falls


@dataclass
class TaskConfig:
    name: str = "countdown"  # key of tasks.TASKS, or a module with a TASK
    data: str = ""  # hub id, config@id, local file or directory; several with commas; "" = countdown: procedural
    weights: tuple[float, ...] = ()  # shares of the sets of `data`; () = as if they were one
    eval_data: str = ""  # held-out set; "" = the test split of `data`
    problem_column: str = ""  # "" = the first there is of tasks/published.toml
    answer_column: str = ""  # "" = the same
    level_min: int = 0  # of a set with levels; 0 = all
    level_max: int = 0
    template: str = (
        "r1"  # of TEMPLATES of the task's module: tasks.countdown (r1 qwen_chat plain) or math
    )
    system_prompt: str = ""  # system prompt of template chat; "" = that of qwen_math
    verifier: str = "fast"  # of math answers: fast | math_verify
    options: tuple[str, ...] = ()  # "name=value" settings of the task's own, a flag for each
    numbers_min: int = 3  # procedural: how many numbers
    numbers_max: int = 4
    value_max: int = 99  # procedural: numbers are 1..value_max
    target_max: int = 99  # procedural: targets are 1..target_max
    format_score: float = 0.1  # a well-formed but wrong equation
    stop_on_success: bool = True  # a right answer ends an episode of several turns
    turn_reward: str = (
        "success"  # of a turn: success = ((right - 1/2) * 2 - reward_bias) * reward_scaling | score
    )
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    turn_discount: float = 1.0  # of the later turns' rewards in a turn's return
    feedback_right: str = "Yes, that is the right answer."
    feedback_wrong: str = (
        "No, that is not the right answer. Look for the mistake and try once more."
    )
    grade_seconds: float = (
        5.0  # wall limit of one grading, then the worker is killed and the score is 0
    )
    grade_workers: int = 2  # processes
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass
class RolloutConfig:
    num_prompts: int = 128  # P: prompts a step
    group_size: int = 8  # G: rollouts a prompt
    max_prompt_tokens: int = 256  # tokens; longer prompts are dropped
    max_new_tokens: int = 1024  # tokens of a response
    max_turns: int = 1  # responses of an episode at most, where the task replies to them
    max_reply_tokens: int = 64  # tokens of a reply that max_episode_tokens=0 allows for
    max_episode_tokens: int = (
        0  # tokens of an episode, prompt and replies included; 0 = room for every turn
    )
    max_staleness: int = 0  # policy versions that a rollout may be old when it is trained on; 0 = every step waits for its own
    max_running_groups: int = 0  # groups that are sampled at once where max_staleness > 0; 0 = (max_staleness + 1) num_prompts
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # stop strings, besides the tokenizer's end-of-sequence ids
    keep_stop: bool = True  # the stop string stays in the response
    num_slots: int = 256  # S: sequences decoded at once
    page_size: int = 64  # tokens a KV page
    num_pages: int = 0  # KV pages in all; 0 = enough for every slot at full length
    decode_steps: int = 32  # decode steps a device call
    kv_dtype: str = "bfloat16"  # bfloat16 | float32

    @property
    def longest_episode(self) -> int:
        """Tokens of the longest episode."""
        every_turn = (
            self.max_turns * self.max_new_tokens + (self.max_turns - 1) * self.max_reply_tokens
        )
        return self.max_episode_tokens or self.max_prompt_tokens + every_turn

    @property
    def longest_continuation(self) -> int:
        """Of those, all after the prompt."""
        return self.longest_episode - self.max_prompt_tokens


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    schedule: str = (
        "constant"  # constant | linear | polynomial | cosine (to min_lr_ratio * lr over the run)
    )
    warmup_steps: int = 0  # optimizer steps
    warmup_ratio: float = 0.0  # or a share of the run's
    min_lr_ratio: float = 0.1
    power: float = 2.0  # of the polynomial
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # matrices only
    clip_norm: float = 1.0  # global gradient norm; 0 = off
    mu_dtype: str = (
        "float32"  # of Adam's first moment: float32 | bfloat16 (2 of 12 bytes a parameter less)
    )
    skip_norm: float = 0.0  # a step whose gradient norm is larger changes nothing; 0 = off


@dataclass
class CriticConfig:
    """Of an algorithm whose advantage needs one (ppo): the policy's backbone with a scalar head."""

    path: str = ""  # directory or hub id to start from; "" = the policy's first weights
    warmup_steps: int = 0  # RL steps that train the critic alone
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class WarmStartConfig:
    """Supervised steps before RL, for models that start from nothing."""

    steps: int = 0
    batch_size: int = 128  # examples a step
    lr: float = 1e-3
    warmup_steps: int = 20
    tries: float = 2.0  # random tries in an example on average, right or wrong; it gives up with probability 1/tries


@dataclass
class SftConfig:
    """Supervised fine-tuning; where there is data for it there is no RL (configs/sft.py)."""

    data: str = ""  # as task.data, sets with messages or with prompt and completion; or a task: its warm-start examples
    weights: tuple[float, ...] = ()  # shares of the sets of `data`; () = as if they were one
    eval_data: str = ""  # held-out set; "" = the test splits of `data`
    chat_template: str = ""  # file of a chat template (Jinja) in place of the tokenizer's
    loss: str = "assistant"  # trained on: what the assistant says, or the completion | all
    epochs: float = 1.0
    batch_size: int = 128  # examples a step
    pack_length: int = 4096  # tokens of a packed row; longer examples are dropped


@dataclass
class TrainConfig:
    steps: int = 200  # RL steps: rollouts, then `minibatches * epochs` optimizer steps
    minibatches: int = (
        1  # optimizer steps an epoch; > 1 recomputes the old log-probs once and clips
    )
    epochs: int = 1  # passes over a step's rollouts
    microbatch_tokens: int = 16384  # tokens of one microbatch, over all devices
    pack_length: int = (
        0  # length of a packed slot; 0 = all that may follow a prompt. Nothing may be longer
    )
    pack_buckets: int = 2  # slot lengths: slot, slot/2, slot/4, ...
    packs_per_row: int = (
        8  # slots of a row, which share its prompt; 0 = every sequence carries its own prompt
    )
    sequence_per_turn: bool = (
        False  # a sequence a turn (history and response) instead of one an episode: AReaL's agent
    )
    seed: int = 0
    checkpoint_every: int = 20
    export_every: int = (
        0  # RL steps between exports, each to export-<step>, besides the one at the end; 0 = none
    )
    keep_checkpoints: int = 2
    logged_rollouts: int = 8  # rollouts a step written to samples.jsonl
    wandb_project: str = ""  # project of Weights & Biases to write metrics to as well; "" = none


@dataclass
class EvalConfig:
    problems: int = 512  # held-out problems
    samples: int = 4  # avg@k at the sampling temperature; 0 = greedy alone
    every: int = 0  # RL steps between evaluations besides before and after; 0 = never
    greedy: bool = True  # greedy accuracy beside it
    suites: tuple[
        str, ...
    ] = ()  # keys of tasks.suites.SUITES, or name=path of a local set, evaluated as well
    limit: int = 0  # problems of a suite; 0 = all


@dataclass
class MeshConfig:
    """Training mesh. One of them may be -1: what is left of the devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    decode_devices: int = 0  # devices of each host that decode while the others train, where rollout.max_staleness > 0; 0 = all do both


@dataclass
class Config:
    name: str = ""  # preset, for the log
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: algorithms.Algorithm = field(default_factory=algorithms.grpo)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in leaves}


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)
