"""GSM8K: grade-school word problems whose answer is a number, 7,473 to train on and 1,319 held out.

    python -m jzero.main --config configs/gsm8k.py:tiny              # random weights, on a laptop
    python -m jzero.main --config configs/gsm8k.py:qwen2.5-1.5b      # GRPO on a base model
    python -m jzero.main --config configs/gsm8k.py:rho-1b-ppo        # oat's PPO, as published
    python -m jzero.main --config configs/gsm8k.py:qwen2.5-1.5b-ppo  # the same on another model
    python -m jzero.main --config configs/gsm8k.py:tiny,dapo         # a preset, another algorithm
    python -m jzero.main --config configs/gsm8k.py:smollm2-135m --config.model.path=DIR  # on a CPU
    python -m jzero.main --config configs/gsm8k.py:qwen2.5-0.5b-cpu-lora                 # on a CPU

Presets: tiny, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b; rho-1b-ppo, the PPO of oat's
documentation, and the last four with -ppo, that PPO on another model. qwen3-8b-lora-int8,
qwen3-4b-lora and qwen3-1.7b-lora train an adapter on one device; -int8 has the frozen model in 8
bits. gemma-3-1b, gemma-3-1b-lora and gemma-3-270m are base models with the template r1, whose
license has to be accepted on the hub. Three are for a CPU: qwen2.5-0.5b-cpu trains the instruct
model, qwen2.5-0.5b-cpu-lora an adapter of it, and smollm2-135m, whose DIR is the export of
configs/sft.py:smollm2-135m, because the published model solves nearly no problem. tiny learns
nothing: it shows that all parts fit.

Data and models come from the hub, or from --config.task.data=DIRECTORY (with train.jsonl and
test.jsonl) and --config.model.path=DIRECTORY. tiny takes its tokenizer from the hub, or from
--config.model.tokenizer=DIRECTORY.
Hardware: one accelerator host; for 3b it has 80 GiB. Those with -lora need one chip of 16 GB. tiny
needs a CPU and seconds for a step.
Published for rho-1b-ppo: the run raised the test accuracy of its model, a supervised Llama of 1B,
from 40.6 % to 55.7 % in 6 hours on 8 A100. That is no figure for the models of other presets.

docs/reference/published-runs.md has every setting of the published command next to that of
rho-1b-ppo. What differs:

- (first token): the chat template decides whether a prompt begins with <s>. The published sampler
  put one before every prompt.
- top_p: 1 in training instead of 0.9. The ratio is to the sampler, which has to bound the tokens
  it keeps: rollout.top_k=512 rollout.top_p=0.9 is nearly as published.
- (greedy evaluation): greedy decoding is measured besides the 16 samples.
- (metrics of an evaluation): the share of scores above 1/2 is the accuracy, and lengths are in
  tokens.
"""

from jzero import algorithms
from jzero.algorithms.presets import oat_ppo
from jzero.config import (
    ADAPTER_RANK,
    GEMMA3_HUB_IDS,
    QWEN3_ADAPTER_HUB_IDS,
    QWEN25_HUB_IDS,
    QWEN_LARGEST_FIRST,
    Config,
    Critic,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    Rows,
    TaskConfig,
    TrainConfig,
    has_adapter,
    schedules,
    tiny_model_of_qwen_tokens,
    with_adapter,
)
from jzero.planning.presets import choose_fitting_preset

RHO_PPO = "rho-1b-ppo"
PPO_HUB_IDS = {RHO_PPO: "lkevinzc/rho-1b-sft-GSM8K"} | {
    f"{name}-ppo": hub_id for name, hub_id in QWEN25_HUB_IDS.items()
}
SMOLLM2 = "smollm2-135m"
# For two CPU cores.
CPU_HUB_IDS = {
    SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-0.5b-cpu": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-0.5b-cpu-lora": "Qwen/Qwen2.5-0.5B-Instruct",
}
HUB = QWEN25_HUB_IDS | PPO_HUB_IDS | QWEN3_ADAPTER_HUB_IDS | GEMMA3_HUB_IDS | CPU_HUB_IDS
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = QWEN_LARGEST_FIRST


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, pretrained, HUB, LARGEST_FIRST)


def pretrained(preset: str) -> Config:
    return on_cpu(preset) if preset in CPU_HUB_IDS else qwen(preset)


def on_cpu(preset: str) -> Config:
    """8 problems x 8 answers a step, in full precision, for two CPU cores."""
    config = Config(
        name=f"gsm8k-{preset}",
        model=ModelConfig(path=HUB[preset], dtype="float32", remat="none"),
        task=TaskConfig(name="gsm8k", template="qwen_math"),
        rollout=RolloutConfig(
            num_prompts=8,
            group_size=8,
            max_prompt_tokens=256,
            max_new_tokens=256,
            num_slots=64,
            page_size=16,
            decode_steps=16,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=2e-6),
        train=TrainConfig(
            steps=100,
            # One group of 8 answers, or several of short ones.
            microbatch_tokens=256 + 4 * 256,
            packs_per_row=4,
            checkpoint_every=5,  # a step takes minutes
        ),
        eval=EvalConfig(problems=1319, samples=0, every=50),
    )
    if preset == SMOLLM2:
        # Asked as in the examples of configs/sft.py:smollm2-135m, which have no instruction.
        config.task.template, config.task.system_prompt = "chat", "none"
        config.rollout.max_new_tokens = 192
        config.train.microbatch_tokens = 256 + 4 * 192
        config.optimizer.lr = 1e-5
        config.train.checkpoint_every = 20
    if has_adapter(preset):
        config.model.adapter.rank = ADAPTER_RANK
        config.optimizer.lr = 1e-4
    return config


def qwen(preset: str) -> Config:
    """GRPO with 1,024 new tokens. The whole test split is evaluated greedily."""
    config = Config(
        name=f"gsm8k-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="gsm8k", template="qwen_math"),
        rollout=RolloutConfig(
            num_prompts=64,
            group_size=8,
            max_prompt_tokens=512,
            max_new_tokens=1024,
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        critic=Critic(lr=1e-5),
        train=TrainConfig(
            steps=700,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (512 + 4 * 1024),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=1319, samples=0, every=50),
    )
    if preset in GEMMA3_HUB_IDS:
        config.task.template = "r1"
    if has_adapter(preset):
        return with_adapter(config, preset)
    if preset == RHO_PPO:
        return as_published(with_oat_ppo(config))
    return with_oat_ppo(config) if preset.endswith("-ppo") else config


def with_oat_ppo(config: Config) -> Config:
    """Changes a config to oat's PPO and returns it.

    The learning rates of policy and critic fall linearly to 1e-7, as Hugging Face's polynomial
    schedule does. The test split is evaluated with 16 samples of each problem.
    """
    config.algorithm = oat_ppo()
    config.task.verifier = "last_number"
    config.rollout.temperature = 1.2
    config.train.minibatches = 8
    config.train.epochs = 2
    config.train.steps = 0  # as many as 6 passes over the problems take
    config.train.prompt_epochs = 6.0
    config.critic = Critic(lr=1e-6)
    config.optimizer.lr = 1e-6
    config.optimizer.schedule = schedules.Polynomial(power=1.0, min_lr_ratio=0.1)
    config.optimizer.warmup = schedules.Share(0.03, from_zero=True)
    config.eval.samples = 16
    config.eval.temperature = 0.35
    config.eval.top_p = 0.9
    return config


def as_published(config: Config) -> Config:
    """Changes a config with oat's PPO to the prompts and the data of the published run."""
    config.task.template = "chat"  # the model's own
    config.task.system_prompt = "none"
    config.rollout.stop = ("\n\nQuestion", "\n\nProblem")
    config.rollout.keep_stop = False
    config.task.data = str(Rows("lkevinzc/gsm8k", problem="question", answer="final_answer"))
    config.task.drop_last = True
    config.rollout.max_prompt_tokens = 1000
    config.train.microbatch_tokens = 8 * (1000 + 4 * 1024)
    return config


def tiny() -> Config:
    """Random weights with the real vocabulary: most of the parameters are the embedding."""
    return Config(
        name="gsm8k-tiny",
        model=tiny_model_of_qwen_tokens(),
        task=TaskConfig(
            name="gsm8k",
            template="qwen_math",
            # No answer of a random model is right, so only the lengths of its responses differ.
            reward=RewardConfig(functions=("accuracy", "length")),
        ),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=256,
            max_new_tokens=16,
            num_slots=16,
            page_size=32,
            decode_steps=8,
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=5, microbatch_tokens=4096, pack="longest", packs_per_row=4),
        eval=EvalConfig(problems=16, samples=2),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
