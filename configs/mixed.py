"""Mathematics and programming in one run: each row of the data names its task, as AReaL's rows do.

    python -m jzero.main --config configs/mixed.py:tiny --config.task.data=rows.jsonl
    python -m jzero.main --config configs/mixed.py:areal-async-qwen3-1.7b --config.task.data=FILE
    python -m jzero.main --config configs/mixed.py:areal-agent-qwen3-1.7b --config.task.data=FILE

Presets: tiny, areal-async-qwen3-1.7b, areal-agent-qwen3-1.7b. All of them want --config.task.data,
a file of rows with a column `task`. docs/data-and-rewards.md shows two rows, and says which tasks
there are.

areal-async-qwen3-1.7b has the values of AReaL's examples/run_async_ppo.sh and, for what that leaves
out, of its training/configs/async-ppo.yaml: asynchronous rollouts that are at most 4 versions old
(AReaL's eta), 16 groups at a time, and PPO's decoupled loss without a critic. Its data is
data/boba_106k_0319.jsonl of inclusionAI/AReaL-RL-Data on the hub: rows with `prompt`, which is
taken as it is, `task`, and `solutions` or `input_output`.

areal-agent-qwen3-1.7b has AReaL's multi-turn agent on top of that: five turns of 1,024 tokens,
also after a right answer, and a sequence for each turn. Programs get the same replies as answers.
tiny learns nothing: it shows that all parts fit.

Differences from AReaL (docs/reference/published-runs.md has every setting of the asynchronous
example):

- (verifier): answers are compared by jzero's grader, and programs run in its sandbox. AReaL also
  takes a block of code that is not marked as Python, and leaves out blocks of less than 20
  characters.
- (tests of a program): 15 tests with the longest inputs.
  --config.task.options=code.options=max_tests=0 takes all of them.
- (reward of a response): a right one is worth 1 and a wrong one 0 in areal-async-qwen3-1.7b, where
  AReaL has 5 and -5: rewards are whitened over the whole batch.
- ppo.early_stop_imp_ratio: a minibatch whose mean ratio is above 5 is trained on; AReaL leaves it
  out.
- Replies: the environment says the same in other words. --config.task.feedback.right=...,
  --config.task.feedback.wrong=... and --config.task.options=code.options=feedback=words take those
  of the original; the reply to a program is words already.
- Batch of the agent: AReaL names none. It is that of areal-async-qwen3-1.7b.

Hardware: tiny needs two CPU cores. The others need one node of 8 GPUs of 80 GiB.
Published: no result that these presets could be held against.
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
    Together,
    TrainConfig,
    schedules,
    tiny_model,
)
from jzero.planning.presets import choose_fitting_preset

HUB = {
    "areal-async-qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "areal-agent-qwen3-1.7b": "Qwen/Qwen3-1.7B",
}
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("areal-async-qwen3-1.7b",)


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, on_hub, HUB, LARGEST_FIRST)


def on_hub(preset: str) -> Config:
    """Returns the config of a preset for a model on the hub."""
    return agent(preset) if preset.startswith("areal-agent") else asynchronous(preset)


def asynchronous(preset: str) -> Config:
    """AReaL's example of asynchronous PPO: one turn, rollouts of at most 4 versions ago."""
    return Config(
        name=f"mixed-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(
            name="mixed",
            template="column:prompt",
            options=(f"math.data={Rows(answer='solutions')}", "code.options=reward=all"),
            grade_workers=16,
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=8,
            max_prompt_tokens=1024,
            max_new_tokens=4096,
            placement=Together(max_staleness=4, max_running_groups=16),
        ),
        # Nothing bounds the weights of AReaL's example: no token has a ratio of 10,000.
        algorithm=decoupled_ppo(correction=algorithms.TokenTruncate(high=1e4)),
        optimizer=OptimizerConfig(
            lr=2e-5, warmup=schedules.Share(0.001), b2=0.95, eps=1e-5, weight_decay=0.05
        ),
        train=TrainConfig(
            steps=0,
            prompt_epochs=5.0,
            minibatches=4,
            seed=1,
            # A row on each of 8 devices: a prompt and 2 packs.
            microbatch_tokens=8 * (1024 + 2 * 4096),
            packs_per_row=2,
        ),
        eval=EvalConfig(problems=0, samples=0),
    )


def agent(preset: str) -> Config:
    """AReaL's multi-turn agent on rows of mathematics and of code."""
    config = asynchronous(preset)
    config.task.options = (*config.task.options, "code.options=feedback=words")
    config.task.stop_on_success = False
    config.rollout.max_new_tokens = 1024
    config.rollout.max_turns = 5
    config.train.sequence_per_turn = True
    config.train.all_trajectories = True
    # A row on each of 8 devices: a prompt and 2 packs of five responses and four replies.
    config.train.microbatch_tokens = 8 * (1024 + 2 * config.rollout.longest_continuation)
    return config


def tiny() -> Config:
    """A model from nothing with jzero's own tokenizer, two turns for each row."""
    return Config(
        name="mixed-tiny",
        model=tiny_model(),
        task=TaskConfig(name="mixed", options=("math.template=no", "code.template=plain")),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=64,
            max_new_tokens=16,
            max_turns=2,
            max_reply_tokens=256,
            num_slots=16,
            page_size=32,
            decode_steps=8,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=5, microbatch_tokens=4096, pack="longest", packs_per_row=4),
        eval=EvalConfig(problems=8, samples=2),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
