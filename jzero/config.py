"""Every knob of a run, with its default and meaning; recipes in `configs/` fill these. Fields take the types that
`--config.section.field=value` can parse. 0 (or "") turns a number (or a name) off."""

import dataclasses
import importlib.util
import json
import math
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jzero import algorithms


@dataclass
class Arch:
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
class Model:
    path: str = ""  # local directory or hub id with config.json and safetensors; "" = random init of `arch`
    tokenizer: str = ""  # directory or hub id; "" = model.path, or jzero's own countdown tokenizer without one
    arch: Arch = field(default_factory=Arch)
    dtype: str = "bfloat16"  # compute: bfloat16 | float32. Master weights are always float32
    remat: str = "full"  # recompute in the backward pass: none | dots | full
    logit_chunk: int = 2048  # tokens whose [chunk, V] logits exist at a time
    attention: str = ""  # "" = the kernels of the platform | xla


@dataclass
class Reward:
    """What a score is the weighted sum of. The numbers are open-r1's."""

    functions: tuple[str, ...] = ("accuracy",)  # tasks.rewards.NAMES, or module:function of (response, gold, task)
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
class Task:
    name: str = "countdown"  # key of tasks.TASKS, or a module with a TASK
    data: str = ""  # hub id, config@id, local file or directory; several with commas; "" = countdown: procedural
    weights: tuple[float, ...] = ()  # shares of the sets of `data`; () = as if they were one
    eval_data: str = ""  # held-out set; "" = the test split of `data`
    problem_column: str = ""  # "" = the first there is of tasks/published.toml
    answer_column: str = ""  # "" = the same
    level_min: int = 0  # of a set with levels; 0 = all
    level_max: int = 0
    template: str = "r1"  # of TEMPLATES of the task's module: tasks.countdown (r1 qwen_chat plain) or math
    system: str = ""  # system prompt of template chat; "" = that of qwen_math
    verifier: str = "fast"  # of math answers: fast | math_verify
    numbers_min: int = 3  # procedural: how many numbers
    numbers_max: int = 4
    value_max: int = 99  # procedural: numbers are 1..value_max
    target_max: int = 99  # procedural: targets are 1..target_max
    format_score: float = 0.1  # a well-formed but wrong equation
    stop_on_success: bool = True  # a right answer ends an episode of several turns
    turn_reward: str = "success"  # of a turn: success = ((right - 1/2) * 2 - reward_bias) * reward_scaling | score
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    turn_discount: float = 1.0  # of the later turns' rewards in a turn's return
    feedback_right: str = "Yes, that is the right answer."
    feedback_wrong: str = "No, that is not the right answer. Look for the mistake and try once more."
    grade_seconds: float = 5.0  # wall limit of one grading, then the worker is killed and the score is 0
    grade_workers: int = 2  # processes
    reward: Reward = field(default_factory=Reward)


@dataclass
class Rollout:
    prompts: int = 128  # P: prompts a step
    group: int = 8  # G: rollouts a prompt
    max_prompt: int = 256  # tokens; longer prompts are dropped
    max_new: int = 1024  # tokens of a response
    turns: int = 1  # responses of an episode at most, where the task replies to them
    max_reply: int = 64  # tokens of a reply that max_total=0 allows for
    max_total: int = 0  # tokens of an episode, prompt and replies included; 0 = room for every turn
    eta: int = 0  # policy versions that a rollout may be old when it is trained on; 0 = every step waits for its own
    max_running: int = 0  # groups that are sampled at once where eta > 0; 0 = (eta + 1) prompts
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # stop strings, besides the tokenizer's end-of-sequence ids
    keep_stop: bool = True  # the stop string stays in the response
    slots: int = 256  # S: sequences decoded at once
    page: int = 64  # tokens a KV page
    pages: int = 0  # KV pages in all; 0 = enough for every slot at full length
    chunk: int = 32  # decode steps a device call
    kv_dtype: str = "bfloat16"  # bfloat16 | float32

    @property
    def total(self) -> int:
        """Tokens of the longest episode."""
        every_turn = self.turns * self.max_new + (self.turns - 1) * self.max_reply
        return self.max_total or self.max_prompt + every_turn

    @property
    def longest(self) -> int:
        """Of those, all after the prompt."""
        return self.total - self.max_prompt


@dataclass
class Optimizer:
    lr: float = 1e-6
    schedule: str = "constant"  # constant | linear | polynomial | cosine (to min_lr_ratio * lr over the run)
    warmup_steps: int = 0  # optimizer steps
    warmup_ratio: float = 0.0  # or a share of the run's
    min_lr_ratio: float = 0.1
    power: float = 2.0  # of the polynomial
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0  # matrices only
    clip_norm: float = 1.0  # global gradient norm; 0 = off
    mu_dtype: str = "float32"  # of Adam's first moment: float32 | bfloat16 (2 of 12 bytes a parameter less)
    skip_norm: float = 0.0  # a step whose gradient norm is larger changes nothing; 0 = off


@dataclass
class Critic:
    """Of an algorithm whose advantage needs one (ppo): the policy's backbone with a scalar head."""

    path: str = ""  # directory or hub id to start from; "" = the policy's first weights
    warmup: int = 0  # RL steps that train the critic alone
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))


@dataclass
class WarmStart:
    """Supervised steps before RL, for models that start from nothing."""

    steps: int = 0
    batch: int = 128  # examples a step
    lr: float = 1e-3
    warmup_steps: int = 20
    tries: float = 2.0  # random tries in an example on average, right or wrong; it gives up with probability 1/tries


@dataclass
class Sft:
    """Supervised fine-tuning; where there is data for it there is no RL (configs/sft.py)."""

    data: str = ""  # as task.data, sets with messages or with prompt and completion; or a task: its warm-start examples
    weights: tuple[float, ...] = ()  # shares of the sets of `data`; () = as if they were one
    eval_data: str = ""  # held-out set; "" = the test splits of `data`
    template: str = ""  # file of a chat template (Jinja) in place of the tokenizer's
    loss: str = "assistant"  # trained on: what the assistant says, or the completion | all
    epochs: float = 1.0
    batch: int = 128  # examples a step
    length: int = 4096  # tokens of a packed row; longer examples are dropped


@dataclass
class Train:
    steps: int = 200  # RL steps: rollouts, then `minibatches * epochs` optimizer steps
    minibatches: int = 1  # optimizer steps an epoch; > 1 recomputes the old log-probs once and clips
    epochs: int = 1  # passes over a step's rollouts
    tokens: int = 16384  # tokens of one microbatch, over all devices
    slot: int = 0  # length of a packed slot; 0 = all that may follow a prompt. Nothing may be longer
    buckets: int = 2  # slot lengths: slot, slot/2, slot/4, ...
    row_slots: int = 8  # slots of a row, which share its prompt; 0 = every sequence carries its own prompt
    turn_rows: bool = False  # a sequence a turn (history and response) instead of one an episode: AReaL's agent
    seed: int = 0
    checkpoint_every: int = 20
    export_every: int = 0  # RL steps between exports, each to export-<step>, besides the one at the end; 0 = none
    keep_checkpoints: int = 2
    samples: int = 8  # rollouts a step written to samples.jsonl
    wandb: str = ""  # project of Weights & Biases to write metrics to as well; "" = none


@dataclass
class Eval:
    problems: int = 512  # held-out problems
    samples: int = 4  # avg@k at the sampling temperature; 0 = greedy alone
    every: int = 0  # RL steps between evaluations besides before and after; 0 = never
    greedy: bool = True  # greedy accuracy beside it
    suites: tuple[str, ...] = ()  # keys of tasks.suites.SUITES, or name=path of a local set, evaluated as well
    limit: int = 0  # problems of a suite; 0 = all


@dataclass
class Mesh:
    """Training mesh. One of them may be -1: what is left of the devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    decode: int = 0  # devices of each host that decode while the others train, where rollout.eta > 0; 0 = all do both


@dataclass
class Config:
    name: str = ""  # preset, for the log
    model: Model = field(default_factory=Model)
    task: Task = field(default_factory=Task)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: algorithms.Algorithm = field(default_factory=algorithms.grpo)
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic: Critic = field(default_factory=Critic)
    warm_start: WarmStart = field(default_factory=WarmStart)
    sft: Sft = field(default_factory=Sft)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    mesh: Mesh = field(default_factory=Mesh)


QWEN25 = {f"qwen2.5-{size}": f"Qwen/Qwen2.5-{size.upper()}" for size in ("0.5b", "1.5b", "3b", "7b")}  # preset: hub id


def choose(
    argument: str, tiny: Callable[[], Config], qwen: Callable[[str], Config], hub: Collection[str], accelerator: str
) -> Config:
    """Of "preset", "preset,algorithm" or "": `accelerator` where one is attached, else tiny; `hub`: qwen's."""
    preset, _, algorithm = argument.partition(",")
    if not preset:
        platform = jax.default_backend()
        preset = "tiny" if platform == "cpu" else accelerator
        print(f"no preset given and platform {platform} attached: using {preset}", flush=True)
    if preset not in ("tiny", *hub):
        raise ValueError(f"no preset {preset!r} in this recipe; there are {', '.join(('tiny', *hub))}")
    config = tiny() if preset == "tiny" else qwen(preset)
    if algorithm:
        if algorithm not in algorithms.PRESETS:
            raise ValueError(f"no algorithm {algorithm!r}; there are {', '.join(algorithms.PRESETS)}")
        config.algorithm = algorithms.PRESETS[algorithm]()
        config.name += f"-{algorithm}"
    return config


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in leaves}


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1)


BOUNDS = tomllib.loads(Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8"))
LEAST = dict.fromkeys(BOUNDS["at_least_1"], 1.0) | dict.fromkeys(BOUNDS["any"], -math.inf)  # of every other 0
CHOICES = BOUNDS["choices"] | {f"algorithm.{name}": choices for name, choices in algorithms.CHOICES.items()}


def validate(config: Config) -> None:
    """Raise one ValueError with every impossible setting, its value and what to do. Compiles nothing."""
    values = flat(dataclasses.asdict(config))
    wrong, small = [], []
    for name, value in values.items():
        choices = CHOICES.get(name.removeprefix("critic."), (value,))
        if value not in choices:
            wrong.append(f"{name}={value!r} is not one of {', '.join(choices)}")
        if isinstance(value, int | float) and value < LEAST.get(name, 0):
            small.append(f"{name}={value} must be at least {LEAST.get(name, 0):g}")
    if wrong := [*wrong, *(small or combinations(config))]:  # which divide by some of them
        raise ValueError("; ".join(wrong))


def combinations(config: Config) -> Iterator[str]:
    model, rollout, train = config.model, config.rollout, config.train
    if model.arch.num_attention_heads % model.arch.num_key_value_heads:
        yield f"{model.arch.num_key_value_heads=} does not divide {model.arch.num_attention_heads=}"
    if model.arch.head_dim % 2:
        yield f"{model.arch.head_dim=} must be even: RoPE turns pairs"
    if config.task.verifier == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield "task.verifier=math_verify needs the package: pip install math-verify"
    if train.wandb and importlib.util.find_spec("wandb") is None:
        yield f"train.wandb={train.wandb} needs the package: pip install wandb"
    if rollout.temperature <= 0:
        yield f"{rollout.temperature=} must be positive: RL needs samples that differ"
    if not 0 < rollout.top_p <= 1:
        yield f"{rollout.top_p=} must be in (0, 1]"
    if not 0 <= rollout.min_p < 1:
        yield f"{rollout.min_p=} must be in [0, 1)"
    yield from impossible_algorithm(config)
    if 0 < rollout.max_total < rollout.max_prompt + rollout.max_new:
        least = f"a prompt and a response, {rollout.max_prompt + rollout.max_new}"
        yield f"{rollout.max_total=} is shorter than {least}: raise it, or set it to 0"
    if 0 < train.slot < rollout.longest:
        yield f"{train.slot=} is shorter than what may follow a prompt: set it to {rollout.longest} or 0"
    slot = train.slot or rollout.longest
    if not slot >> (train.buckets - 1):
        yield f"{train.buckets=} halves a slot of {slot} tokens to nothing: at most {slot.bit_length()}"
    if rollout.prompts % train.minibatches:
        yield f"{train.minibatches=} does not divide {rollout.prompts=}"
    if rollout.eta and config.algorithm.dynamic_rounds:
        yield f"{rollout.eta=} takes groups as they come: set algorithm.dynamic_rounds=0, or rollout.eta=0"
    if config.mesh.decode and not rollout.eta:
        yield f"mesh.decode={config.mesh.decode} would wait for every update: set rollout.eta=1, or mesh.decode=0"
    if not all(isinstance(stop, str) and stop for stop in rollout.stop):
        yield f"{rollout.stop=} must hold non-empty strings"
    if config.eval.every and config.eval.problems < 1 and not config.eval.suites:
        yield f"eval.every={config.eval.every} needs eval.problems of at least 1, or eval.suites"


def impossible_algorithm(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, algorithms.resolved(config.algorithm, config.rollout.eta)
    advantage = algorithms.ADVANTAGES.get(algorithm.advantage)
    if advantage and rollout.group < advantage.group_min:
        yield f"{rollout.group=}: the {algorithm.advantage} baseline needs a group of at least {advantage.group_min}"
    filtered = rollout.top_k or rollout.top_p < 1 or rollout.min_p
    behaviour = "algorithm.correction" if algorithm.correction else "algorithm.old=sampler"
    if filtered and (algorithm.correction or algorithm.old == "sampler"):
        yield (
            f"{behaviour} divides by the sampler's probabilities, which are over the full vocabulary: set "
            "rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    if algorithm.correction and algorithm.old == "sampler":
        yield f"algorithm.correction={algorithm.correction} is always 1 with algorithm.old=sampler: turn one off"
    if algorithm.correction_low > algorithm.correction_high:
        yield f"{algorithm.correction_low=} is above {algorithm.correction_high=}"
    if 0 < algorithm.dual_clip <= 1 + algorithm.clip_high:
        yield f"{algorithm.dual_clip=} must be above 1 + clip_high={1 + algorithm.clip_high}, or 0"
    if algorithm.overlong > 1:
        yield f"{algorithm.overlong=} is a share of rollout.max_new: at most 1"
