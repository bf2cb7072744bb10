"""Plans the disk of a run: the bytes that it writes to its workdir, and whether there is room.

    check_disk(config, workdir)        raises UserError, with settings that fit, before a run starts
    parts_of_workdir(config, model)    meaning -> bytes at the peak

Weights and moments are counted exactly, as they are before compression. Texts are bounds: every
response counts at its maximum length. Nothing is written here. The cache of downloaded models is
not in the workdir and is not counted.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jzero import algorithms
from jzero.config import (
    MOST_WAITING_PUSHES,
    AdapterConfig,
    Config,
    EvalConfig,
    EveryCheckpoint,
    HubConfig,
    MemoryConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.model.qwen import QwenConfig
from jzero.planning.fitting import reason_not_planned, setting_flags
from jzero.planning.planned_run import architectures

GB = 1e9  # bytes: disks are sold, and quotas are set, in powers of ten
FP32 = 4  # bytes
BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2}

TEXT_BYTES = 6  # of a sampled token in a JSON file: few tokens have more characters
ROW_BYTES = 2_000  # of a row of a JSON file, without its response
METRICS_BYTES = 20_000  # of a step, in metrics.jsonl and for TensorBoard
FIXED_BYTES = 100e6  # compiled programs, the tokenizer of an export, logs


@dataclass(frozen=True)
class DiskNeed:
    """The bytes that a run needs in its workdir, and the bytes that it may use there."""

    parts: dict[str, float]  # meaning -> bytes at the peak
    available: float  # including the bytes that the workdir already has

    @property
    def needed(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


# -- what a run writes -----------------------------------------------------------------------------


def checkpoint_bytes(config: Config, model: QwenConfig) -> float:
    """Returns the bytes of one checkpoint: parameters in fp32, and Adam's moments if saved."""
    trained = _trained_parameters(config.model.adapter, model)
    if algorithms.needs_critic(config.algorithm) and config.sft is None:
        trained *= 2  # the critic's backbone, or its adapter, is as large as the policy's
    moments = 0
    if config.train.save == "full":
        settings = config.optimizer
        moments = BYTES_OF_DTYPE[settings.mu_dtype] + BYTES_OF_DTYPE[settings.nu_dtype]
    return trained * (FP32 + moments)


def export_bytes(config: Config, model: QwenConfig) -> float:
    """Returns the bytes of one export: a complete model, or an adapter."""
    number = qwen.num_params(model)
    if not exports_models(config.model, config.train, config.hub):
        number = _trained_parameters(config.model.adapter, model)
    return number * BYTES_OF_DTYPE[config.model.dtype]


def exports_models(model: ModelConfig, train: TrainConfig, hub: HubConfig) -> bool:
    """Returns whether exports are complete models, and not adapters."""
    is_asked_for = train.export_merged or hub.push is not None
    return not model.adapter.rank or is_asked_for


def _trained_parameters(adapter: AdapterConfig, model: QwenConfig) -> int:
    if adapter.rank:
        return adapters.num_params(model, adapter)
    return qwen.num_params(model)


def most_checkpoints(config: Config) -> int:
    """Returns the largest number of checkpoints that are on the disk at the same time.

    A new checkpoint is complete before an old one is removed.
    """
    train = config.train
    if train.checkpoint_every < 0:
        return 1  # of a run that is stopped before its end
    written = 2  # before the first step, and after the last
    if train.checkpoint_every:
        written += max(0, train.steps - 1) // train.checkpoint_every
    if config.sft is not None:  # the number of steps follows from the data
        written = max(written, train.keep_checkpoints + 1)
    return min(written, train.keep_checkpoints + 1) if train.keep_checkpoints else written


def most_exports(config: Config) -> int:
    """Returns the largest number of exports that are on the disk at the same time."""
    train, hub = config.train, config.hub
    number = 1
    if train.export_every:
        number += max(0, train.steps - 1) // train.export_every
    if isinstance(hub.push, EveryCheckpoint):
        # Exports that wait for their push, and the one in transfer.
        number += MOST_WAITING_PUSHES + 1
    return number


def parts_of_workdir(config: Config, model: QwenConfig) -> dict[str, float]:
    """Returns the bytes that a run of `model` has in its workdir at most, by their meaning."""
    parts = {
        f"{most_checkpoints(config)} checkpoints": most_checkpoints(config)
        * checkpoint_bytes(config, model),
        f"{most_exports(config)} exports": most_exports(config) * export_bytes(config, model),
    }
    compute_bytes = BYTES_OF_DTYPE[config.model.dtype]
    # An adapter's base that no other directory has is stored once.
    if config.model.adapter.rank and (not config.model.path or config.is_warm_started):
        parts["the base"] = qwen.num_params(model) * compute_bytes
    if algorithms.needs_reference(config.algorithm) and config.algorithm.reference_every:
        # A second reference is written before the first is removed.
        parts["2 references"] = 2 * _trained_parameters(config.model.adapter, model) * FP32
    if config.sft is None:
        rollout, train = config.rollout, config.train
        parts["rollouts"] = _rollout_bytes(rollout, train)
        parts["evaluations"] = _evaluation_bytes(
            config.eval, rollout, train.steps, config.is_warm_started
        )
    parts["metrics and programs"] = config.train.steps * METRICS_BYTES + FIXED_BYTES
    return {name: size for name, size in parts.items() if size}


def _rollout_bytes(rollout: RolloutConfig, train: TrainConfig) -> float:
    """Returns the bytes of samples.jsonl and trajectories/."""
    num_rollouts = rollout.num_prompts * rollout.group_size
    logged = min(train.logged_rollouts, num_rollouts)
    written = logged
    if rollout.max_turns > 1:
        # A trajectory is written as text and as JSON lines.
        written += 2 * (num_rollouts if train.all_trajectories else logged)
    # An upper bound: every rollout has the maximum length.
    return train.steps * written * (ROW_BYTES + TEXT_BYTES * rollout.longest_episode)


def _evaluation_bytes(
    settings: EvalConfig,
    rollout: RolloutConfig,
    steps: int,
    is_warm_started: bool,
) -> float:
    """Returns the bytes of evaluations/, for the task's own problems."""
    if not settings.save_responses:
        return 0.0
    # Before and after the run, and after the warm start.
    evaluations = 2 + is_warm_started
    if settings.every:
        evaluations += max(0, steps - 1) // settings.every
    responses = settings.problems * (settings.samples + settings.greedy)
    longest = settings.longest_episode(rollout)
    return evaluations * responses * (ROW_BYTES + TEXT_BYTES * longest)


# -- the disk --------------------------------------------------------------------------------------


def available_bytes(memory: MemoryConfig, workdir: Path) -> float:
    """Returns the bytes that the run may have in `workdir`, which need not exist.

    They are memory.disk_gb, or the free bytes of the file system and what the workdir already has.
    """
    if memory.disk_gb:
        return memory.disk_gb * GB
    parents = (workdir.absolute(), *workdir.absolute().parents)
    existing = next(path for path in parents if path.exists())
    # A resumed run replaces its own files, so their room counts as available.
    return shutil.disk_usage(existing).free + used_bytes(workdir)


def used_bytes(workdir: Path) -> float:
    """Returns the bytes of all files in a directory; 0 if it does not exist."""
    total = 0
    for path in workdir.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except OSError:  # removed since: another process cleans up its checkpoints
            continue
    return float(total)


def disk_need(config: Config, model: QwenConfig, workdir: Path) -> DiskNeed:
    """Returns the bytes that a run of `model` needs in `workdir`, and the bytes that it may use."""
    return DiskNeed(parts_of_workdir(config, model), available_bytes(config.memory, workdir))


def check_disk(config: Config, workdir: Path) -> None:
    """Raises UserError if a run does not fit its disk, before anything is downloaded.

    A model that is neither a directory nor known is not checked here: `require_disk` checks it once
    its architecture is known.
    """
    if config.memory.check and not reason_not_planned(config):
        model = architectures(config).policy
        require_disk(config, model, workdir)


def require_disk(config: Config, model: QwenConfig, workdir: Path) -> DiskNeed:
    """Returns the need of a run that fits its disk.

    Raises UserError for a run that does not. The message names settings with which it fits.
    """
    need = disk_need(config, model, workdir)
    if need.fits or not config.memory.check:
        return need
    changed = smaller_on_disk(config, model, need.available)
    largest = sorted(need.parts, key=need.parts.__getitem__, reverse=True)[:2]
    parts = ", ".join(f"{name} {need.parts[name] / GB:.1f} GB" for name in largest)
    if changed is None:
        advice = "no setting makes it fit: use a larger disk, or a smaller model"
    else:
        advice = f"it fits with {' '.join(setting_flags(config, changed))}"
    raise UserError(
        f"{config.name or 'the run'} needs {need.needed / GB:.1f} GB of disk in {workdir} "
        f"({parts}), and there are {need.available / GB:.1f} GB: {advice}; or give another "
        "--workdir; --config.memory.check=False starts it nevertheless"
    )


# -- remedies --------------------------------------------------------------------------------------


def _with_train(config: Config, **changes: bool | int | str) -> Config:
    return replace(config, train=replace(config.train, **changes))


def keep_one_checkpoint(config: Config) -> Config:
    return _with_train(config, keep_checkpoints=1)


def log_some_trajectories(config: Config) -> Config:
    return _with_train(config, all_trajectories=False)


def export_at_the_end(config: Config) -> Config:
    return _with_train(config, export_every=0)


def export_adapters(config: Config) -> Config:
    return _with_train(config, export_merged=False)


def save_no_optimizer(config: Config) -> Config:
    if config.train.save != "full":
        return config
    return _with_train(config, save="adapter" if config.model.adapter.rank else "no_optimizer")


def save_at_the_end(config: Config) -> Config:
    return _with_train(config, checkpoint_every=-1) if config.train.checkpoint_every > 0 else config


# Cheapest first. The last ones lose what a killed run needs to resume.
DISK_REMEDIES: tuple[Callable[[Config], Config], ...] = (
    keep_one_checkpoint,
    log_some_trajectories,
    export_at_the_end,
    export_adapters,
    save_no_optimizer,
    save_at_the_end,
)


def smaller_on_disk(config: Config, model: QwenConfig, available: float) -> Config | None:
    """Returns the settings that fit `available` bytes with as few remedies as possible, or None."""
    for changed in _fewer_bytes(config):
        if sum(parts_of_workdir(changed, model).values()) <= available:
            return changed
    return None


def _fewer_bytes(config: Config) -> Iterator[Config]:
    """Yields the settings with each remedy, and then with more and more of them."""
    # One change is easier to accept than several, so that each remedy is tried by itself.
    for remedy in DISK_REMEDIES:
        yield remedy(config)
    for number in range(2, len(DISK_REMEDIES) + 1):
        changed = config
        for remedy in DISK_REMEDIES[:number]:
            changed = remedy(changed)
        yield changed
