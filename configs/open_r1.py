"""open-r1's GRPO recipes for mathematics: accuracy and the form of the response are rewarded.

    python -m jzero.main --config configs/open_r1.py:tiny                   # on a laptop
    python -m jzero.main --config configs/open_r1.py:qwen2.5-1.5b-instruct
    python -m jzero.main --config configs/open_r1.py:r1-distill-qwen-1.5b
    python -m jzero.main --config configs/open_r1.py:simple-rl-qwen2.5-math-7b

Presets: tiny, qwen2.5-1.5b-instruct, r1-distill-qwen-1.5b. They have the values of the files
config_demo.yaml in the recipes Qwen2.5-1.5B-Instruct and DeepSeek-R1-Distill-Qwen-1.5B of
github.com/huggingface/open-r1, and the loss of TRL 0.18, which that repository uses: GRPO with
a mean over tokens and 0.04 times the KL. tiny learns nothing: it shows that all parts fit.

Of February 2025 (e4ac3ae): numina-qwen2.5-1.5b-instruct, numina-r1-distill-qwen-7b,
simple-rl-qwen2.5-math-7b. They have the values of config_demo.yaml in the recipes
Qwen2.5-1.5B-Instruct and DeepSeek-R1-Distill-Qwen-7B, of config_simple_rl.yaml in Qwen2.5-Math-7B,
and the loss of TRL of that day: GRPO with a mean over each response's tokens, and 0.04 times the
KL. They train for one pass over NuminaMath-TIR, in groups of 2, and over MATH, in groups of 7.

Hardware: one node of 8 GPUs of 80 GiB. A step of 32 prompts with 16 responses is one optimizer
step, and 2,929 steps are one epoch of OpenR1-Math-220k.

docs/reference/published-runs.md has every setting of the published recipes next to those of the
presets. What differs:

- system_prompt: it asks for the same form in other words. For the published words set
  --config.task.system_prompt="$(cat FILE)", and --config.task.template=FILE for
  r1-distill-qwen-1.5b. `python benchmarks/published/prompts.py` writes these files from a copy of
  open-r1, and says whether a file is the published one (docs/reference/published-runs.md).
- (gold that math-verify does not read): it pays 0 to every response. The recipe's commit has no
  reward for it; in a group, both give no advantage. Suites are graded by jzero's grader
  (eval.verifier).
- (prompts above max_prompt_length): a prompt of more than 512 tokens is dropped, where the original
  cuts off its beginning.
- (loss_type): the mean over tokens is over the step, and over a microbatch there.
- (first token in the sampler) of r1-distill-qwen-1.5b: TRL sends text to vLLM, whose tokenizer adds
  its own first token to that of the template.
- do_eval: false there. These presets measure math500 and aime24 greedily before and after the run.
- (chat_template) of numina-r1-distill-qwen-7b: the model's of February 2025. The later one begins
  the thoughts in the prompt, where the reward for the form does not look for them, so the preset
  has the text of the earlier one.

The verifiers open_r1 and open_r1_1416fa0 need math-verify: pip install -e '.[verify]'.

The recipe for code is configs/code.py:qwen2.5-1.5b-instruct. Published: no result.
"""

from jzero.algorithms.algorithm import KL, GroupMeanStd
from jzero.algorithms.presets import grpo, trl_018
from jzero.config import (
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    Rows,
    TaskConfig,
    TrainConfig,
    schedules,
    tiny_model_of_qwen_tokens,
)
from jzero.planning.presets import choose_fitting_preset
from jzero.problems.prompts import TAGS_ON_LINES

HUB = {
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "numina-qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "numina-r1-distill-qwen-7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "simple-rl-qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B",
}
REWARDS = ("accuracy", "open_r1_format", "tag_count")
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("qwen2.5-1.5b-instruct",)


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, on_hub, HUB, LARGEST_FIRST)


def on_hub(preset: str) -> Config:
    """Returns the config of a preset for a model on the hub."""
    if preset == "r1-distill-qwen-1.5b":
        return distilled(preset)
    if preset == "simple-rl-qwen2.5-math-7b":
        return simple_rl(preset)
    return numina(preset) if preset.startswith("numina-") else instruct(preset)


def instruct(preset: str) -> Config:
    """Qwen2.5-1.5B-Instruct: 1,024 new tokens, a cosine from 2e-5 to 0."""
    return Config(
        name=f"open-r1-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(
            name="math",
            data=str(Rows("open-r1/OpenR1-Math-220k", problem="problem", answer="solution")),
            template="chat",
            system_prompt=TAGS_ON_LINES,
            # Only for the suites: the verifier finds answers by itself.
            options=("answer_mark=final_answer",),
            verifier="open_r1_1416fa0",
            reward=RewardConfig(functions=REWARDS, weights=(1.0, 1.0, 1.0)),
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=16,
            max_prompt_tokens=512,
            max_new_tokens=1024,
        ),
        algorithm=trl_018(),
        optimizer=OptimizerConfig(
            lr=2e-5,
            schedule=schedules.Cosine(min_lr_ratio=0.0),
            warmup=schedules.Share(0.1, from_zero=True),
            b2=0.999,
        ),
        train=TrainConfig(
            steps=2929,
            seed=42,
            # A row on each of 8 devices: a prompt and 8 packs.
            microbatch_tokens=8 * (512 + 8 * 1024),
            packs_per_row=8,
        ),
        eval=EvalConfig(problems=0, samples=0, suites=("math500", "aime24"), verifier="fast"),
    )


def distilled(preset: str) -> Config:
    """DeepSeek-R1-Distill-Qwen-1.5B: 2,048 new tokens at temperature 0.7, from 1e-6 to a tenth.

    The template does not open the thoughts, so that the policy can earn the reward for their tags.
    """
    config = instruct(preset)
    config.task.template = "r1_distill_tags"
    config.task.system_prompt = ""
    config.rollout.max_new_tokens = 2048
    config.rollout.temperature = 0.7
    config.optimizer.lr = 1e-6
    config.optimizer.schedule = schedules.Cosine(min_lr_ratio=0.1)
    config.train.microbatch_tokens = 8 * (512 + 4 * 2048)
    config.train.packs_per_row = 4
    return config


def numina(preset: str) -> Config:
    """A pass over NuminaMath-TIR in pairs of responses, with the rewards of February 2025."""
    config = instruct(preset)
    data = Rows("AI-MO/NuminaMath-TIR", problem="problem", answer="solution")
    config.task.data = str(data)
    config.task.verifier = "open_r1"
    config.task.reward = RewardConfig(
        functions=("accuracy", "open_r1_format_inline"), weights=(1.0, 1.0)
    )
    if preset == "numina-r1-distill-qwen-7b":
        config.task.template = "r1_distill_tags"
        config.task.system_prompt = ""
    config.rollout.num_prompts = 112
    config.rollout.group_size = 2
    config.rollout.temperature = 0.9
    config.algorithm = grpo(advantage=GroupMeanStd(1e-4), kl=KL(coef=0.04))
    config.train.steps = 0  # as many as a pass over the problems takes
    config.train.prompt_epochs = 1.0
    config.train.microbatch_tokens = 8 * (512 + 2 * 1024)
    config.train.packs_per_row = 2
    # The test split, sampled as in training.
    config.eval = EvalConfig(problems=10000, samples=2, greedy=False, every=100)
    return config


def simple_rl(preset: str) -> Config:
    """Qwen2.5-Math-7B: a pass over MATH in groups of 7."""
    config = numina(preset)
    data = Rows("DigitalLearningGmbH/MATH-lighteval", problem="problem", answer="solution")
    config.task.data = str(data)
    config.rollout.num_prompts = 16
    config.rollout.group_size = 7
    config.optimizer.lr = 3e-6
    config.train.microbatch_tokens = 8 * (512 + 7 * 1024)
    config.train.packs_per_row = 7
    config.eval.samples = 7
    return config


def tiny() -> Config:
    """Random weights with the real vocabulary. The tokenizer and the problems are on the hub."""
    config = instruct("qwen2.5-1.5b-instruct")
    config.name = "open-r1-tiny"
    config.model = tiny_model_of_qwen_tokens()
    config.rollout = RolloutConfig(
        num_prompts=4,
        group_size=4,
        max_prompt_tokens=512,
        max_new_tokens=16,
        num_slots=16,
        page_size=32,
        decode_steps=8,
    )
    config.train = TrainConfig(steps=5, microbatch_tokens=4096, pack="longest", packs_per_row=4)
    config.eval = EvalConfig(problems=0, samples=2, suites=("math500",), limit=16, verifier="fast")
    config.mesh = MeshConfig(data=-1, fsdp=1)
    return config
