"""Settings and classes that had another name in an older jzero.

An old name never works silently: whoever uses one is told the new name. The command line, the
recipes (by importing from `jzero.config`) and the config.json of a workdir are checked.
"""

from collections.abc import Iterable

from jzero.errors import UserError

# Old dotted name -> new dotted name.
RENAMED_SETTINGS: dict[str, str] = {
    "algorithm.dynamic_rounds": "algorithm.dynamic_sampling_rounds",
    "algorithm.kl": "algorithm.kl_estimator",
    "algorithm.old": "algorithm.old_policy",
    "algorithm.overlong": "algorithm.overlong_share",
    "critic.warmup": "critic.warmup_steps",
    "mesh.decode": "mesh.decode_devices",
    "rollout.chunk": "rollout.decode_steps",
    "rollout.eta": "rollout.max_staleness",
    "rollout.group": "rollout.group_size",
    "rollout.max_new": "rollout.max_new_tokens",
    "rollout.max_prompt": "rollout.max_prompt_tokens",
    "rollout.max_reply": "rollout.max_reply_tokens",
    "rollout.max_running": "rollout.max_running_groups",
    "rollout.max_total": "rollout.max_episode_tokens",
    "rollout.page": "rollout.page_size",
    "rollout.pages": "rollout.num_pages",
    "rollout.prompts": "rollout.num_prompts",
    "rollout.slots": "rollout.num_slots",
    "rollout.turns": "rollout.max_turns",
    "sft.batch": "sft.batch_size",
    "sft.length": "sft.pack_length",
    "sft.template": "sft.chat_template",
    "task.system": "task.system_prompt",
    "train.buckets": "train.pack_buckets",
    "train.row_slots": "train.packs_per_row",
    "train.samples": "train.logged_rollouts",
    "train.slot": "train.pack_length",
    "train.tokens": "train.microbatch_tokens",
    "train.turn_rows": "train.sequence_per_turn",
    "train.wandb": "train.wandb_project",
    "warm_start.batch": "warm_start.batch_size",
}

# Names that `jzero.config` had -> names that it has.
RENAMED_NAMES: dict[str, str] = {
    "Arch": "ArchitectureConfig",
    "Critic": "CriticConfig",
    "Eval": "EvalConfig",
    "Mesh": "MeshConfig",
    "Model": "ModelConfig",
    "Optimizer": "OptimizerConfig",
    "QWEN25": "QWEN25_HUB_IDS",
    "Reward": "RewardConfig",
    "Rollout": "RolloutConfig",
    "Sft": "SftConfig",
    "Task": "TaskConfig",
    "Train": "TrainConfig",
    "WarmStart": "WarmStartConfig",
    "choose": "choose_preset",
    "flat": "flatten",
}


def new_names(settings: Iterable[str]) -> str:
    """Returns "rollout.prompts is now rollout.num_prompts, ..." for the old names among `settings`.

    `settings` are dotted names. The result is empty if none of them is old.
    """
    old = sorted(set(settings) & RENAMED_SETTINGS.keys())
    return ", ".join(f"{name} is now {RENAMED_SETTINGS[name]}" for name in old)


def check_renamed(settings: Iterable[str], source: str) -> None:
    """Raises a UserError if a file, called `source` in the message, uses old names of settings."""
    if message := new_names(settings):
        raise UserError(
            f"{source} has settings of an older jzero: {message}. Rename them in the file, "
            "or use another one"
        )
