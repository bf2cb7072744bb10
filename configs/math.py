"""Competition mathematics with Dr. GRPO (arXiv:2503.20783): Oat-Zero as published, and other runs.

    python -m jzero.main --config configs/math.py:tiny           # random weights, on a laptop
    python -m jzero.main --config configs/math.py:oat-zero-1.5b  # the published run
    python -m jzero.main --config configs/math.py:qwen2.5-math-1.5b,grpo

Presets: tiny, qwen2.5-math-1.5b, qwen2.5-math-7b and the published runs oat-zero-1.5b,
oat-zero-1.5b-r1, oat-zero-3b (a Llama, with the template r1), oat-zero-7b, oat-zero-7b-r1;
qwen3-8b-lora-int8, qwen3-4b-lora and qwen3-1.7b-lora train an adapter on one device of 16 GB; -int8
has the frozen model in 8 bits. gemma-3-1b, gemma-3-1b-lora and gemma-3-270m are base models with
the template r1, whose license has to be accepted on the hub. tiny learns nothing: it shows that all
parts fit.
qwen2.5-math-* train both models for 300 steps on the levels 3 to 5 of MATH.

Data and models come from the hub, or from --config.task.data=FILE and
--config.model.path=DIRECTORY. tiny takes its tokenizer from the hub, or from
--config.model.tokenizer=DIRECTORY. --config.eval.suites=... takes name=FILE, too.
The presets oat-zero-* are graded as published and need packages: pip install -e '.[verify]'.
Hardware: 8 accelerators of 80 GiB for 7b. The paper's run took 27 hours on 8 A100 of 40 GiB.
Published for oat-zero-1.5b, oat-zero-3b and oat-zero-7b, greedy with 3,000 new tokens, in percent:

        AIME24   AMC  MATH500  Minerva  Olympiad  average
    1.5b  20.0  53.0     74.2     25.7      37.6     42.1
    3b     6.7  18.1     50.0     14.3      14.7     20.7
    7b    43.3  62.7     80.0     30.1      41.0     51.4

The average is the target, since AIME24 has only 30 problems.

docs/reference/published-runs.md has every setting of the published commands next to ours. What
differs:

- prompt_data of 7b: the published math_lvl3to5_8k is a directory of the authors' repository.
  Without it these presets train on the levels 3 to 5 of MATH without MATH-500;
  --config.task.data=.../datasets/train/math_lvl3to5_8k takes the published set.
- prompt_template of the presets with r1: the template asks for the same in other words.
  --config.task.template=FILE takes the published words from a file, which
  `python benchmarks/published/prompts.py` writes from a copy of the authors' repository and checks.
- (divisor of a response's sum): 3,000 as in the paper. The released code of March 21, 2025 divides
  by 1, which is the algorithm drgrpo_release, after a comma: oat-zero-1.5b,drgrpo_release.
- (verifier of the published figures): evaluate_model.py has the full verifier, whatever the run
  had: evaluate with --config.task.verifier=oat_full, or oat_r1_full after r1.
- (metrics of an evaluation): docs/reference/metrics.md has the names of jzero's.
"""

from dataclasses import replace

from jzero import algorithms
from jzero.algorithms.presets import drgrpo_paper
from jzero.config import (
    GEMMA3_HUB_IDS,
    QWEN3_ADAPTER_HUB_IDS,
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
    has_adapter,
    tiny_model_of_qwen_tokens,
    with_adapter,
)
from jzero.config.schema import Verifier
from jzero.planning.presets import choose_fitting_preset

HUB = {
    "qwen2.5-math-1.5b": "Qwen/Qwen2.5-Math-1.5B",
    "qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B",
    "oat-zero-1.5b": "Qwen/Qwen2.5-Math-1.5B",
    "oat-zero-1.5b-r1": "Qwen/Qwen2.5-Math-1.5B",
    "oat-zero-3b": "lkevinzc/Llama-3.2-3B-NuminaQA",
    "oat-zero-7b": "Qwen/Qwen2.5-Math-7B",
    "oat-zero-7b-r1": "Qwen/Qwen2.5-Math-7B",
} | QWEN3_ADAPTER_HUB_IDS
HUB |= GEMMA3_HUB_IDS
SUITES = ("aime24", "amc", "math500", "minerva", "olympiad_bench")
HARDER = str(Rows(level_min=3, level_max=5))  # of MATH, the default set of the task
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("qwen2.5-math-7b", "qwen2.5-math-1.5b", "qwen3-4b-lora", "qwen3-1.7b-lora")


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, qwen, HUB, LARGEST_FIRST)


def qwen(preset: str) -> Config:
    """Dr. GRPO with 8 optimizer steps in an RL step, no KL, five suites every 16 steps."""
    config = Config(
        name=f"math-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="math", template="qwen_math", data=HARDER),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=8,
            max_prompt_tokens=1024,
            max_new_tokens=3000,
        ),
        algorithm=drgrpo_paper(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=300,
            minibatches=8,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (1024 + 4 * 3000),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=0, samples=0, every=16, suites=SUITES),
    )
    if preset in GEMMA3_HUB_IDS:
        config.task.template = "r1"
    if has_adapter(preset):
        config.train.minibatches = 2  # of 64 responses each
        config = with_adapter(config, preset)
        if config.model.is_base_quantized:
            config.rollout.num_slots = 2  # of long responses 16 GiB hold no more beside 8B
        return config
    return as_published(config, preset) if preset.startswith("oat-zero") else config


def as_published(config: Config, preset: str) -> Config:
    """Changes a config to a run of understand-r1-zero and returns it."""
    is_small = preset.startswith(("oat-zero-1.5b", "oat-zero-3b"))
    template = "r1" if preset == "oat-zero-3b" or preset.endswith("-r1") else "qwen_math"
    rows = Rows("lkevinzc/math-12k", problem="problem", answer="answer")
    if not is_small:
        rows = replace(rows, path="RLAIF/math", level_min=3, level_max=5)
    task = TaskConfig(
        name="math",
        data=str(rows),
        template=template,
        verifier=published_verifier(template, is_small),
        grade_seconds=1.0,
    )
    task.drop_last = True
    config.task = task
    if template == "r1":
        config.rollout.stop = ("</answer>",)
    config.train.steps = 0  # as many as 20 passes over the problems take
    config.train.prompt_epochs = 20.0
    config.eval.save_responses = True
    return config


def published_verifier(template: str, is_fast: bool) -> Verifier:
    """Returns the verifier of a run by its template and its verifier_version."""
    if template == "r1":
        return "oat_r1" if is_fast else "oat_r1_full"
    return "oat_fast" if is_fast else "oat_full"


def tiny() -> Config:
    """Random weights with the real vocabulary, on the problems of MATH."""
    return Config(
        name="math-tiny",
        model=tiny_model_of_qwen_tokens(),
        task=TaskConfig(
            name="math",
            template="qwen_math",
            data=HARDER,
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
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=5, microbatch_tokens=4096, pack="longest", packs_per_row=4),
        eval=EvalConfig(problems=0, samples=2, suites=("math500",), limit=16),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
