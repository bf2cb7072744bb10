"""The cookbook's recipe math_rl with env=arithmetic, through jzero.main with equal settings.

    python -m jzero.main --config benchmarks/tinker/arithmetic.py --config.model.path=MODEL

MODEL is a chat model whose turns stand between <|im_start|> and <|im_end|>. `cookbook.py` makes the
cookbook's runs, and `beside_main.py` prints the curves of both.
"""

from jzero.algorithms import Algorithm, Clip, GroupMean, SequenceSum
from jzero.config import (
    AdapterConfig,
    Config,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)

GROUPS, GROUP_SIZE = 4, 8
PROMPT, RESPONSE = 40, 6  # tokens
# `importance_sampling` is -r A, summed over all tokens, and the cookbook's advantage is the reward
# minus the mean of its group. The ratio is to the sampler's log-probs, and nothing is clipped.
IMPORTANCE_SAMPLING = Algorithm(
    name="importance_sampling",
    truncated_penalty=0.1,
    advantage=GroupMean(),
    weight=SequenceSum(),
    old_policy="sampler",
    surrogate=Clip(low=1.0, high=1e6),
    correction=None,
)


def get_config(preset: str = "") -> Config:
    """Returns the settings of the recipe. There are no presets."""
    assert not preset, f"{preset=}"
    return Config(
        name="cookbook-arithmetic",
        model=ModelConfig(
            dtype="float32",
            remat="none",
            exact=True,
            adapter=AdapterConfig(rank=8, alpha=32.0),
        ),
        task=TaskConfig(name="benchmarks.tinker.arithmetic_task", template="chat"),
        rollout=RolloutConfig(
            num_prompts=GROUPS,
            group_size=GROUP_SIZE,
            max_prompt_tokens=PROMPT,
            max_new_tokens=RESPONSE,
            page_size=16,
            decode_steps=4,
            kv_dtype="float32",
        ),
        algorithm=IMPORTANCE_SAMPLING,
        optimizer=OptimizerConfig(
            lr=3e-4,
            b1=0.9,
            b2=0.95,
            # SequenceSum divides the sum by the number of responses, which Tinker does not. Adam
            # undoes that if its epsilon is divided, too.
            eps=1e-8 / (GROUPS * GROUP_SIZE),
            weight_decay=0.0,
            clip_norm=0.0,
        ),
        train=TrainConfig(
            steps=8,
            microbatch_tokens=GROUPS * (PROMPT + GROUP_SIZE * RESPONSE),
            pack="longest",
            packs_per_row=GROUP_SIZE,
            checkpoint_every=0,
        ),
        eval=EvalConfig(problems=0, every=0),
    )
