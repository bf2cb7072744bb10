"""Competition mathematics with a second try: the environment says whether an answer is right.

    python -m jzero.main --config configs/math_multiturn.py:tiny  # random weights, on a laptop
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-7b
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-1.5b,grpo

    python -m jzero.main --config configs/math_multiturn.py:areal-qwen2.5-1.5b-instruct

Presets: tiny, qwen2.5-math-1.5b, qwen2.5-math-7b, areal-qwen2.5-1.5b-instruct. Data and hardware
are those of configs/math.py. tiny learns nothing: it shows that all parts fit.

After a wrong answer the environment asks for another one. areal-qwen2.5-1.5b-instruct has the
defaults of AReaL's multi-turn agent: five turns of 1,024 tokens, also after a right answer, a
sequence for each turn, rewards of 1 and -1 without a discount, and PPO's loss with the rewards to
go whitened over the whole batch. The other presets have two turns. These settings change single
parts:

- train.sequence_per_turn=True trains on one sequence for each turn, as AReaL does; the default is
  one sequence for the episode.
- task.feedback.wrong=... changes what the environment says after a wrong answer.
- task.stop_on_success=False continues after a right answer.
- train.all_trajectories=True writes every episode to WORKDIR/trajectories, as AReaL's monitor does,
  with the versions of the policy that sampled each turn. areal-* has it.

configs/mixed.py has AReaL's agent on rows of mathematics and of code, with its asynchrony.

docs/reference/published-runs.md has every setting of AReaL's agent next to that of
areal-qwen2.5-1.5b-instruct. AReaL published no command with that agent. What differs from it and
from the defaults:

- dataset.path: MATH, levels 3 to 5. --config.task.data=FILE takes the published file.
- (prompt): the model's chat template. The published file has whole prompts in its column prompt,
  which --config.task.template=column:prompt takes as they are.
- (feedback): the same in other words. task.feedback.right and task.feedback.wrong take others.
- (tokens before a feedback): the feedback is a further message of the conversation. The agent adds
  a newline and renders the chat template anew, with its own system prompt.
- (verifier): jzero's grader.
- (evaluation): five suites every 16 steps.
- ppo.behav_imp_weight_cap: 5, as in the paper; none by default.
- ppo.early_stop_imp_ratio: no update is left out. By default one is whose ratios are above 5.
- dataset.train_bs_n_seqs, group_size, ppo.ppo_n_minibatches, actor.optimizer.lr,
  actor.optimizer.weight_decay, actor.optimizer.eps, actor.optimizer.warmup_steps_proportion: as in
  configs/math.py.
- max_head_offpolicyness: 0. rollout.placement.max_staleness=4 is asynchronous, as in AReaL's
  quick start.

The suites are answered in a single turn, so that the results compare with other runs.
"""

from jzero import algorithms
from jzero.algorithms.presets import decoupled_ppo
from jzero.config import (
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    Rows,
    TaskConfig,
    TrainConfig,
    tiny_model_of_qwen_tokens,
)
from jzero.planning.presets import choose_fitting_preset

HUB = {
    "qwen2.5-math-1.5b": "Qwen/Qwen2.5-Math-1.5B",
    "qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B",
    "areal-qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
}
SUITES = ("aime24", "amc", "math500", "minerva", "olympiad_bench")
HARDER = str(Rows(level_min=3, level_max=5))  # of MATH, the default set of the task
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("qwen2.5-math-7b", "qwen2.5-math-1.5b")


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, on_hub, HUB, LARGEST_FIRST)


def on_hub(preset: str) -> Config:
    """Returns the config of a preset for a model on the hub."""
    return areal(preset) if preset.startswith("areal-") else qwen(preset)


def qwen(preset: str) -> Config:
    """Two responses of 1,500 tokens and a reply: they fit into the models' 4,096 positions."""
    return Config(
        name=f"math-multiturn-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(
            name="math_multiturn",
            template="qwen_math",
            data=HARDER,
            turn_discount=0.9,
        ),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=8,
            max_prompt_tokens=1024,
            max_new_tokens=1500,
            max_turns=2,
            max_reply_tokens=64,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=300,
            minibatches=8,
            # A row on each of 8 devices: a prompt and 4 packs of two responses and a reply.
            microbatch_tokens=8 * (1024 + 4 * 3064),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=0, samples=0, every=16, suites=SUITES),
    )


def areal(preset: str) -> Config:
    """Five turns without an early stop, one sequence for each turn: AReaL's multi-turn agent."""
    config = qwen(preset)
    config.task.template = "chat"
    config.task.system_prompt = "none"
    config.task.stop_on_success = False
    config.task.turn_discount = 1.0
    config.rollout.max_new_tokens = 1024
    config.rollout.max_turns = 5
    config.algorithm = decoupled_ppo()
    config.train.sequence_per_turn = True
    config.train.all_trajectories = True
    # A row on each of 8 devices: a prompt and 2 packs of five responses and four replies.
    config.train.packs_per_row = 2
    config.train.microbatch_tokens = 8 * (1024 + 2 * config.rollout.longest_continuation)
    return config


def tiny() -> Config:
    """Random weights with the real vocabulary, on the problems of MATH. No answer is right."""
    return Config(
        name="math-multiturn-tiny",
        model=tiny_model_of_qwen_tokens(),
        task=TaskConfig(name="math_multiturn", template="qwen_math", data=HARDER),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=256,
            max_new_tokens=16,
            max_turns=2,
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
