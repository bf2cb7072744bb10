"""Whether a run fits the memory of its devices, and what to change where it does not.

    check_memory(settings)      of a run that is about to start, on the attached devices
    refuse_what_is_too_large    the same as a function of settings, devices and bytes
    choose_fitting_preset       the preset of a recipe: the largest that fits, where none is named

Nothing is compiled or downloaded. The CPU has no limit, unless memory.device_gib sets one.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import jax

from jzero import config
from jzero.config import Config
from jzero.distributed import processes
from jzero.distributed.context import heads_to_share
from jzero.distributed.mesh import context_shards, row_shards
from jzero.errors import UserError
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.chips import CHIPS, GIB, DescribedDevice
from jzero.planning.memory import DEFAULT_GPU_SHARE, STATE, row_tokens
from jzero.planning.models import is_known
from jzero.planning.planned_run import PlannedRun, build

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the share of a GPU that JAX takes
SHORTEST_RESPONSE = 256  # tokens: no advice makes responses shorter than this


# -- the attached devices --------------------------------------------------------------------------


def attached_devices() -> list[DescribedDevice]:
    """Returns descriptions of all devices of the run."""
    return [
        DescribedDevice(device.id, device.process_index, device.platform, device.device_kind)
        for device in jax.devices()
    ]


def attached_bytes(settings: config.MemoryConfig) -> float | None:
    """Returns the bytes that a program may take of each attached device; None if nothing is known.

    memory.device_gib comes first, then what the device itself reports, then the table of chips.
    """
    if settings.device_gib:
        return settings.device_gib * GIB
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return float(limit) if limit else usable_bytes(device.device_kind, device.platform)


def usable_bytes(device_kind: str, platform: str) -> float | None:
    """Returns the bytes that a program may take of a device of this kind; None if it is not known.

    JAX leaves a part of a GPU to others, as the environment says.
    """
    if device_kind not in CHIPS:
        return None
    share = 1.0 if platform == "tpu" else float(os.environ.get(FRACTION, DEFAULT_GPU_SHARE))
    return share * CHIPS[device_kind].hbm_bytes


# -- the verdict -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What a run needs of a device, and what there is."""

    run: PlannedRun
    phases: dict[str, float]  # bytes on a device at the peak of every phase
    available: float  # bytes on a device

    @property
    def needed(self) -> float:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def excess(self) -> dict[str, float]:
        """The bytes that are missing in every phase that does not fit."""
        return {
            name: size - self.available
            for name, size in self.phases.items()
            if size > self.available
        }


def fit(settings: Config, devices: Sequence[DescribedDevice], available: float) -> Fit:
    """Compares what `settings` need on `devices` with the bytes that each of them has.

    Raises:
        UserError: The settings do not fit together, or the model is not known.
    """
    run = build(settings, devices)
    return Fit(run, totals(bytes_of_phases(run)), available)


def check_memory(settings: Config) -> float | None:
    """Raises UserError if the run cannot fit the attached devices, before anything is downloaded.

    Returns the bytes that it needs of each device. Returns None where nothing is checked, and says
    so if that is because an accelerator or a model is in no table.
    """
    available = attached_bytes(settings.memory)
    is_cpu = jax.default_backend() == "cpu"
    if not settings.memory.check or (is_cpu and available is None):
        return None
    reason = ""
    if available is None:
        kind = jax.devices()[0].device_kind
        reason = f"{kind} is in no table and reports none: set memory.device_gib"
    elif settings.model.path and not is_known(settings.model.path):
        reason = f"model.path={settings.model.path} is neither a directory nor a known model"
    elif settings.teacher.path and not is_known(settings.teacher.path):
        reason = f"teacher.path={settings.teacher.path} is neither a directory nor a known model"
    elif settings.mesh.decode_devices:
        reason = f"mesh.decode_devices={settings.mesh.decode_devices} splits the devices"
    if reason or available is None:
        processes.print_once(f"memory is not checked: {reason}")
        return None
    # An adapter that training goes on from has been read: its rank and targets are settings now.
    adapter = replace(settings.model.adapter, path="")
    settings = replace(settings, model=replace(settings.model, adapter=adapter))
    return refuse_what_is_too_large(settings, attached_devices(), available)


def refuse_what_is_too_large(
    settings: Config, devices: Sequence[DescribedDevice], available: float
) -> float:
    """Returns the bytes that a run needs of each device.

    Raises UserError if they are more than `available`. The message names settings with which the
    run fits.
    """
    verdict = fit(settings, devices, available)
    if verdict.fits:
        return verdict.needed
    phase = max(verdict.phases, key=verdict.phases.__getitem__)
    kind = devices[0].device_kind
    changed = with_remedies(settings, devices, available)
    raise UserError(
        f"{settings.name} needs {verdict.needed / GIB:.1f} GiB on each of {len(devices)} {kind} "
        f"({phase}), and there are {available / GIB:.1f} GiB: {_advice(verdict, settings, changed)}"
        "; --config.memory.check=False starts it nevertheless"
    )


def _advice(verdict: Fit, settings: Config, changed: Config | None) -> str:
    if changed is not None:
        return f"it fits with {' '.join(setting_flags(settings, changed))}"
    state = sum(verdict.run.parts.get(part, 0) for part in STATE)
    return (
        "no train.microbatch_tokens, rollout.num_slots, rollout.max_new_tokens, mesh or "
        f"model.adapter.rank makes it fit (weights and optimizer alone take {state / GIB:.1f} GiB "
        "as it is): use a smaller model or more devices"
    )


def setting_flags(before: Config, after: Config) -> list[str]:
    """Returns the flags that turn one config into another."""
    old = {setting.name: setting.value for setting in config.list_settings(before)}
    return [
        f"--config.{setting.name}={setting.value}"
        for setting in config.list_settings(after)
        if old[setting.name] != setting.value
    ]


# -- what to change --------------------------------------------------------------------------------

# A remedy returns a config that takes less, or None where it has nothing left to change.
Remedy = Callable[[Config, PlannedRun], Config | None]


def recompute_layers(settings: Config, run: PlannedRun) -> Config | None:
    """Keeps the inputs of layers alone for the backward pass."""
    if settings.model.remat == "full":
        return None
    return replace(settings, model=replace(settings.model, remat="full"))


def smaller_microbatches(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the rows of a microbatch, down to one on each device."""
    least = row_tokens(run)
    fewer = settings.train.microbatch_tokens // least // 2 * least
    return _with_train(settings, microbatch_tokens=fewer) if fewer else None


def shorter_rows(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the packs of a row, and with them the smallest microbatch there can be."""
    train = settings.train
    if train.packs_per_row < 2 or settings.sft.data:
        return None
    packs = train.packs_per_row // 2
    pack = longest_pack(settings)
    tokens = row_shards(run.mesh) * (settings.rollout.max_prompt_tokens + packs * pack)
    return _with_train(settings, packs_per_row=packs, microbatch_tokens=tokens)


def longest_pack(settings: Config) -> int:
    """Returns the tokens of the longest pack."""
    train = settings.train
    if train.pack_lengths:
        return train.pack_lengths[0]
    return train.pack_length or settings.rollout.longest_continuation


def fewer_slots(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the sequences that are decoded at the same time, or else the pages."""
    rollout, engine = settings.rollout, run.sampling
    if engine is None:
        return None
    if rollout.num_pages:
        pages = rollout.num_pages // 2
        enough = engine.num_shards * run.num_hosts * engine.pages_per_slot
        return _with_rollout(settings, num_pages=pages) if pages >= enough else None
    if engine.slots_per_shard < 2:
        return None
    return _with_rollout(settings, num_slots=rollout.num_slots // 2)


def train_an_adapter(settings: Config, run: PlannedRun) -> Config | None:
    """Freezes the model and trains an adapter on it, with the learning rate of an adapter."""
    if settings.model.adapter.rank:
        return None
    adapter = replace(settings.model.adapter, rank=config.ADAPTER_RANK)
    lr = config.ADAPTER_LR_FACTOR * settings.optimizer.lr
    return replace(
        settings,
        model=replace(settings.model, adapter=adapter),
        optimizer=replace(settings.optimizer, lr=float(f"{lr:g}")),
    )


def quantize_base(settings: Config, run: PlannedRun) -> Config | None:
    """Holds the linear layers under an adapter in 8 bits."""
    if not settings.model.adapter.rank or settings.model.is_base_quantized:
        return None
    return replace(settings, model=replace(settings.model, base="int8"))


def offload_optimizer(settings: Config, run: PlannedRun) -> Config | None:
    """Keeps Adam's moments on the hosts while responses are sampled and scored."""
    if settings.optimizer.offload or settings.sft.data:
        return None
    return replace(settings, optimizer=replace(settings.optimizer, offload=True))


def shorter_responses(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the responses, and the rows that hold them."""
    rollout = settings.rollout
    tokens = rollout.max_new_tokens // 2
    if settings.sft.data or rollout.max_episode_tokens or tokens < SHORTEST_RESPONSE:
        return None
    shorter = _with_rollout(settings, max_new_tokens=tokens)
    if settings.train.pack_length:
        shorter = _with_train(shorter, pack_length=settings.train.pack_length // 2)
    if settings.train.pack_lengths:
        halves = tuple(length // 2 for length in settings.train.pack_lengths)
        shorter = replace(shorter, train=replace(shorter.train, pack_lengths=halves))
    rows = settings.train.microbatch_tokens // row_tokens(run)
    packs = max(1, settings.train.packs_per_row)
    pack = longest_pack(shorter)
    row = rollout.max_prompt_tokens + packs * pack
    return _with_train(shorter, microbatch_tokens=rows * row_shards(run.mesh) * row)


def split_state(settings: Config, run: PlannedRun) -> Config | None:
    """Splits the weights over all devices instead of copying them."""
    if run.mesh.shape["data"] == 1:
        return None
    return replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1))


def split_layers(settings: Config, run: PlannedRun) -> Config | None:
    """Doubles the devices that share the heads of a layer, and the pages of a sequence."""
    tensor = 2 * run.mesh.shape["tensor"]
    if run.trainer.policy.model.num_key_value_heads % tensor:
        return None
    if run.mesh.size // run.num_hosts % tensor or run.mesh.shape["fsdp"] % 2:
        return None
    # The other sizes follow: half as many devices hold rows of their own.
    return replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1, tensor=tensor))


def split_rows(settings: Config, run: PlannedRun) -> Config | None:
    """Doubles the devices that share the tokens of a row, and halves the rows of a microbatch."""
    mesh, model = run.mesh, run.trainer.policy.model
    context = 2 * context_shards(mesh)
    shared = heads_to_share(model, mesh.shape["tensor"]).values()
    if settings.model.exact or mesh.shape["fsdp"] % 2 or any(heads % context for heads in shared):
        return None
    changed = replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1, context=context))
    return _with_train(changed, microbatch_tokens=settings.train.microbatch_tokens // 2)


# By phase, those first that cost least.
REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "publish": (split_state, split_layers, offload_optimizer, train_an_adapter, quantize_base),
    "rollout": (
        fewer_slots,
        split_state,
        split_layers,
        offload_optimizer,
        train_an_adapter,
        quantize_base,
        shorter_responses,
    ),
    "score": (
        smaller_microbatches,
        split_state,
        shorter_rows,
        split_layers,
        offload_optimizer,
        train_an_adapter,
        quantize_base,
        split_rows,
        shorter_responses,
    ),
    "update": (
        recompute_layers,
        smaller_microbatches,
        split_state,
        shorter_rows,
        split_layers,
        train_an_adapter,
        quantize_base,
        split_rows,
        shorter_responses,
    ),
}


def with_remedies(
    settings: Config, devices: Sequence[DescribedDevice], available: float
) -> Config | None:
    """Returns settings that fit, changed no more than it takes; None if no remedy suffices."""
    verdict = fit(settings, devices, available)
    while verdict.excess:
        phase = max(verdict.excess, key=verdict.excess.__getitem__)
        improved = _improve(settings, devices, verdict, phase)
        if improved is None:
            return None
        settings, verdict = improved
    return settings


def _improve(
    settings: Config, devices: Sequence[DescribedDevice], verdict: Fit, phase: str
) -> tuple[Config, Fit] | None:
    """Returns the settings of the first remedy that saves something in `phase`."""
    for remedy in REMEDIES[phase]:
        changed = remedy(settings, verdict.run)
        if changed is None:
            continue
        try:
            better = fit(changed, devices, verdict.available)
        except UserError:  # the remedy does not go with the other settings
            continue
        if better.phases[phase] < verdict.phases[phase]:
            return changed, better
    return None


def _with_train(settings: Config, **changes: int) -> Config:
    return replace(settings, train=replace(settings.train, **changes))


def _with_rollout(settings: Config, **changes: int) -> Config:
    return replace(settings, rollout=replace(settings.rollout, **changes))


# -- presets ---------------------------------------------------------------------------------------


def choose_fitting_preset(
    argument: str,
    tiny: Callable[[], Config],
    make: Callable[[str], Config],
    hub: Collection[str],
    largest_first: Sequence[str],
) -> Config:
    """Returns the config of `argument`, as `config.choose_preset` does.

    Without a preset it is the first of `largest_first` that fits the attached accelerator, and tiny
    where there is none or nothing fits. A line says what was chosen and why.
    """
    preset, separator, algorithm = argument.partition(",")
    if preset or jax.default_backend() == "cpu":
        return config.choose_preset(argument, tiny, make, hub, largest_first[0])
    available = attached_bytes(config.MemoryConfig())
    preset, reason = largest_that_fits(make, largest_first, attached_devices(), available)
    print(f"no preset given: using {preset}, {reason}", flush=True)
    return config.choose_preset(preset + separator + algorithm, tiny, make, hub, preset)


def largest_that_fits(
    make: Callable[[str], Config],
    largest_first: Sequence[str],
    devices: Sequence[DescribedDevice],
    available: float | None,
) -> tuple[str, str]:
    """Returns the first preset that fits `available` bytes of each device, and the reason.

    `make` returns the config of a preset. The preset is tiny if none fits, or if the memory is not
    known.
    """
    kind = devices[0].device_kind
    if available is None:
        return "tiny", f"because the memory of {kind} is not known"
    there = f"{available / GIB:.1f} GiB on each of {len(devices)} {kind}"
    for preset in largest_first:
        try:
            verdict = fit(make(preset), devices, available)
        except UserError:  # such as fewer tokens in a microbatch than one row on each device
            continue
        if verdict.fits:
            return preset, f"the largest that fits: it needs {verdict.needed / GIB:.1f} of {there}"
    smallest = largest_first[-1]
    return "tiny", f"because {smallest} does not fit {there}; with other settings it may"
