"""Advice on names that are not settings: the names of other packages, and close misspellings."""

import difflib
from collections.abc import Sequence

# Name in TRL, verl, OpenRLHF or transformers, without its section -> setting.
OTHER_NAMES = {
    # TRL's GRPOConfig and transformers' TrainingArguments.
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_norm",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "beta": "algorithm.kl.coef",
    "epsilon": "algorithm.surrogate.low",
    "epsilon_high": "algorithm.surrogate.high",
    "max_steps": "train.steps",
    "num_train_epochs": "train.prompt_epochs",
    "num_iterations": "train.epochs",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "eval.every",
    "report_to": "train.trackers",
    "per_device_train_batch_size": "train.microbatch_tokens",
    "gradient_accumulation_steps": "train.microbatch_tokens",
    "generation_batch_size": "rollout.num_prompts",
    "reward_weights": "task.reward.weights",
    "reward_funcs": "task.reward.functions",
    "model_name_or_path": "model.path",
    "dataset_name": "task.data",
    "train_dataset": "task.data",
    "eval_dataset": "task.eval_data",
    "lora_r": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_target_modules": "model.adapter.targets",
    "gradient_checkpointing": "model.remat",
    "output_dir": "--workdir",
    "hub_model_id": "hub.push.repo",
    "push_to_hub": "hub.push",
    # verl and OpenRLHF.
    "n_samples_per_prompt": "rollout.group_size",
    "train_batch_size": "rollout.num_prompts",
    "rollout_batch_size": "rollout.num_prompts",
    "ppo_mini_batch_size": "train.minibatches",
    "ppo_micro_batch_size_per_gpu": "train.microbatch_tokens",
    "ppo_max_token_len_per_gpu": "train.microbatch_tokens",
    "ppo_epochs": "train.epochs",
    "max_response_length": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "prompt_max_len": "rollout.max_prompt_tokens",
    "tensor_model_parallel_size": "mesh.tensor",
    "ulysses_sequence_parallel_size": "mesh.context",
    "gpu_memory_utilization": "rollout.num_pages",
    "max_num_seqs": "rollout.num_slots",
    "total_epochs": "train.prompt_epochs",
    "total_training_steps": "train.steps",
    "save_freq": "train.checkpoint_every",
    "test_freq": "eval.every",
    "train_files": "task.data",
    "val_files": "task.eval_data",
    "lora_rank": "model.adapter.rank",
    "lora_dropout": "model.adapter.dropout",
    "actor_learning_rate": "optimizer.lr",
    "default_local_dir": "--workdir",
    "project_name": "train.trackers",
    "base_output_directory": "--workdir",  # MaxText's
    # open-r1.
    "benchmarks": "eval.suites",
    "hub_model_revision": "hub.push.revision",
    "push_to_hub_revision": "hub.push.revision",
    "hub_private_repo": "hub.push.private",
    "log_completions": "train.logged_rollouts",
    "max_seq_length": "sft.pack_length",
    # oat.
    "pretrain": "model.path",
    "prompt_data": "task.data",
    "prompt_template": "task.template",
    "oracle": "task.verifier",
    "num_prompt_epoch": "train.prompt_epochs",
    "num_samples": "rollout.group_size",
    "num_ppo_epochs": "train.epochs",
    "prompt_max_length": "rollout.max_prompt_tokens",
    "generate_max_length": "rollout.max_new_tokens",
    "critic_type": "algorithm.advantage",
    "critic_learning_rate": "critic.lr",
    "lr_scheduler": "optimizer.schedule",
    # AReaL.
    "answer_save_path": "train.trajectories",
    "max_head_offpolicyness": "rollout.placement.max_staleness",
}

# Names that no single setting replaces, and what to do instead.
EXPLAINED = {
    "hub_strategy": "hub.push=every_checkpoint pushes each checkpoint, and hub.push=end the last "
    "model; train.checkpoint_every and train.checkpoint_epochs choose the checkpoints",
    "save_strategy": "train.checkpoint_every counts steps, train.checkpoint_epochs passes over the "
    "data",
    "overwrite_hub_revision": "a push always adds a commit to the branch hub.push.revision",
    "wandb_project": "set train.trackers=wandb(project=NAME)",
    "wandb_entity": "set the environment variable WANDB_ENTITY, and train.trackers=wandb",
    "wandb_run_group": "set the environment variable WANDB_RUN_GROUP, and train.trackers=wandb",
    "use_peft": "model.adapter.rank=32 trains an adapter",
    "load_in_4bit": "4-bit weights are not supported: model.base=int8 holds the frozen base of an "
    "adapter as int8, a quarter of float32",
    "load_in_8bit": "model.base=int8 holds the frozen base of an adapter as int8",
    "sync_params_every": "the sampler gets the weights after every RL step: N times as many "
    "rollout.num_prompts, in N times as many train.minibatches, are N optimizer steps between them",
    "input_key": "task.data.problem=COLUMN names the column",
    "output_key": "task.data.answer=COLUMN names the column",
    "eval_input_key": "task.eval_data=rows(FILE, problem=COLUMN) names the column",
    "eval_output_key": "task.eval_data=rows(FILE, answer=COLUMN) names the column",
    "max_step_adjustment": "the schedule of the learning rate counts optimizer steps by itself",
    "critic_max_step_adjustment": "the schedule of the learning rate counts optimizer steps by "
    "itself",
    "oracle_type": "task.verifier chooses the grader, and task.reward.functions the rewards",
    "dataset_config": "write the configuration before the id, as in task.data=all@USER/NAME",
    "packing": "examples of fine-tuning are always packed, and do not see each other",
}

MOST_SUGGESTIONS = 3
LEAST_RATIO = 0.6  # of difflib: names that are less similar are not suggested


def other_name(name: str) -> str:
    """Returns the setting, or the flag, that other packages call `name`; "" if none does."""
    return OTHER_NAMES.get(name.rpartition(".")[2], "")


def closest_settings(name: str, settings: Sequence[str]) -> list[str]:
    """Returns the settings with the most similar names, the most similar first.

    The last part of a name counts as much as the whole, so that `rollout.group_sise`,
    `train.group_size` and `group_size` all find `rollout.group_size`.
    """

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    def similarity(setting: str) -> float:
        last = ratio(name.rpartition(".")[2], setting.rpartition(".")[2])
        return (ratio(name, setting) + last) / 2

    similarities = {setting: similarity(setting) for setting in settings}
    best = sorted(settings, key=similarities.__getitem__, reverse=True)[:MOST_SUGGESTIONS]
    # A much better match needs no alternatives.
    return [
        setting
        for setting in best
        if similarities[setting] >= max(LEAST_RATIO, similarities[best[0]] - 0.15)
    ]


def advise(name: str, settings: Sequence[str]) -> str:
    """Returns what to write in place of `name`: "did you mean rollout.group_size?"."""
    if reason := EXPLAINED.get(name.rpartition(".")[2], ""):
        return reason
    # Before similar names: TRL's eval_steps looks more like eval.suites than like eval.every, and
    # learning_rate like no setting.
    if setting := other_name(name):
        return f"it is {setting} here"
    parent = name.rpartition(".")[0]
    if parent in settings:  # a part of a setting that has none
        return f"did you mean {parent}?"
    similar = ", ".join(closest_settings(name, settings))
    return f"did you mean {similar}?" if similar else "--help lists them"
