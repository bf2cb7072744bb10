"""Checks whether a run fits the memory of its devices, and finds settings with which it does.

    check_memory(settings)      for a run that is about to start, on the attached devices
    require_fit(...)            the same check as a function of settings, devices and bytes
    shrink_pool(...)            fewer KV cache pages, if the full KV cache does not fit

Nothing is compiled, and at most the config.json of a model is downloaded. CPU devices share the
memory of the machine, unless memory.device_gib sets a limit.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Never, TypeVar

import jax

from jzero import config
from jzero.config import Config, teachers
from jzero.errors import UserError
from jzero.hosts import processes
from jzero.hosts.platform import has_default_cpu_devices, is_cpu_chosen
from jzero.model import huggingface, qwen
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.chips import CHIPS, GIB, DescribedDevice
from jzero.planning.host_memory import free_bytes, total_bytes
from jzero.planning.memory import DEFAULT_GPU_SHARE, STATE
from jzero.planning.models import is_known
from jzero.planning.planned_run import PlannedRun, build, pages_that_fit
from jzero.planning.remedies import REMEDIES, Remedy
from jzero.sharding.mesh import Device, slice_of

GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the share of a GPU that JAX takes
SMALLEST_SHARE = 1 / 4  # of the KV cache of an accelerator: with less, decoding would crawl
SMALLEST_CPU_SHARE = 0.0  # on a CPU, room for one sequence is enough
PROCESS_BYTES = 1.0 * GIB  # of Python, JAX, compiled programs and graders, besides arrays


# -- the attached devices --------------------------------------------------------------------------

# From this size on, one CPU device with all cores is faster than two devices with a core each, and
# has one copy of the decoder's weights instead of two. Measured at 1M, where two devices are
# faster, and at 135M, where the update takes 0.7 times as long on one.
PARAMS_FOR_ONE_CPU_DEVICE = 32_000_000


def set_cpu_devices(path: str) -> None:
    """Makes all cores one device, if JAX runs on a CPU and the model at `path` is large.

    Does nothing once JAX has started, or if JAX_NUM_CPU_DEVICES gives another number. Only
    config.json of the model is read.
    """
    if not (path and is_cpu_chosen() and has_default_cpu_devices()):
        return
    with contextlib.suppress(UserError):  # the command itself reports a model that is not there
        if params_of_model(path) >= PARAMS_FOR_ONE_CPU_DEVICE:
            with contextlib.suppress(RuntimeError):  # JAX has started
                jax.config.update("jax_num_cpu_devices", 1)


@functools.cache
def params_of_model(path: str) -> int:
    """Returns the number of parameters of a model, by its config.json.

    A command asks at every place that may be the first to start JAX; a hub answers once.
    """
    model, _ = huggingface.load_config(huggingface.resolve(path, ("config.json",)))
    return qwen.num_params(model)


def attached_devices() -> list[DescribedDevice]:
    """Returns descriptions of all devices of the run."""
    return [
        DescribedDevice(
            device.id, device.process_index, device.platform, device.device_kind, slice_of(device)
        )
        for device in jax.devices()
    ]


def attached_bytes(settings: config.MemoryConfig) -> float | None:
    """Returns the bytes that a program may use on each attached device; None if they are unknown.

    memory.device_gib takes precedence, then the limit that the device reports, then the table of
    chips.
    """
    if settings.device_gib:
        return settings.device_gib * GIB
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return float(limit) if limit else usable_bytes(device.device_kind, device.platform)


def usable_bytes(device_kind: str, platform: str) -> float | None:
    """Returns the bytes that a program may use on a device of this kind; None for an unknown kind.

    On a GPU, JAX allocates only the share in XLA_PYTHON_CLIENT_MEM_FRACTION.
    """
    if device_kind not in CHIPS:
        return None
    share = 1.0
    if platform != "tpu":
        share = float(os.environ.get(GPU_SHARE_VARIABLE, DEFAULT_GPU_SHARE))
    return share * CHIPS[device_kind].hbm_bytes


# -- the verdict -----------------------------------------------------------------------------------


# What is described: a PlannedRun, or another program that trains, such as a Tinker server.
Described = TypeVar("Described")


@dataclass(frozen=True)
class Fit(Generic[Described]):
    """The bytes that a run needs on a device, and the bytes that the device has."""

    settings: Config  # of the run
    run: Described
    phases: dict[str, float]  # bytes on a device at the peak of every phase
    available: float  # bytes on a device
    remedies: tuple[Remedy[Never], ...] = ()  # that `shrink` has applied

    @property
    def needed(self) -> float:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def excess(self) -> dict[str, float]:
        """The missing bytes of every phase that does not fit."""
        return {
            name: size - self.available
            for name, size in self.phases.items()
            if size > self.available
        }


def fit(settings: Config, devices: Sequence[DescribedDevice], available: float) -> Fit[PlannedRun]:
    """Compares the bytes that `settings` need on `devices` with the bytes that each device has.

    Raises:
        UserError: The settings do not fit together, or the model is unknown.
    """
    run = build(settings, devices)
    return Fit(settings, run, totals(bytes_of_phases(run)), available)


def is_cpu(devices: Sequence[Device]) -> bool:
    """Returns whether devices are CPU devices, which share the memory of a machine."""
    return devices[0].platform == "cpu"


def room_for_arrays(run: PlannedRun, available: float) -> float:
    """Returns the bytes that are left on a device while, on CPUs, a checkpoint is being written."""
    return available - saved_bytes(run) if is_cpu(run.devices) else available


def fit_run(
    settings: Config, devices: Sequence[DescribedDevice], available: float
) -> Fit[PlannedRun]:
    """Returns how a run fits its devices, with the KV cache that it would choose.

    The bytes of each phase include, on CPUs, the copy of a checkpoint while it is being written.
    Raises UserError as `fit`.
    """
    settings = without_adapter_path(settings)
    room = room_for_arrays(build(settings, devices), available)
    # On CPUs the KV cache only has to hold one sequence.
    share = SMALLEST_CPU_SHARE if is_cpu(devices) else SMALLEST_SHARE
    smaller = shrink_pool(settings, devices, room, share)
    verdict = fit(smaller, devices, available)
    phases = {name: size + available - room for name, size in verdict.phases.items()}
    return replace(verdict, phases=phases)


def check_memory(settings: Config) -> float | None:
    """Raises UserError if the run cannot fit the attached devices, before anything is downloaded.

    Returns the bytes that the run needs on each device. Returns None if the check is off or cannot
    be made. An unknown accelerator or model is reported in a printed line.
    """
    if not settings.memory.check:
        return None
    available = attached_bytes(settings.memory)
    # Without memory.device_gib, CPU devices are limited only by the memory of the machine.
    if available is None and jax.default_backend() == "cpu":
        return _check_cpu_memory(settings)
    reason = reason_not_planned(settings)
    if available is None:
        kind = jax.devices()[0].device_kind
        reason = f"{kind} is in no table and reports none: set memory.device_gib"
    if reason or available is None:
        processes.print_once(f"memory is not checked: {reason}")
        return None
    return require_fit(without_adapter_path(settings), attached_devices(), available)


def reason_not_planned(settings: Config) -> str:
    """Returns why a run cannot be planned on the attached devices, or ""."""
    if settings.model.path and not is_known(settings.model.path):
        return f"model.path={settings.model.path} is neither a directory nor a known model"
    teacher = settings.teacher
    if isinstance(teacher, teachers.Model) and teacher.path and not is_known(teacher.path):
        return f"teacher.path={teacher.path} is neither a directory nor a known model"
    # The planner assumes that the same devices train and decode.
    if isinstance(settings.rollout.placement, config.Apart):
        return "rollout.placement=apart splits the devices"
    return ""


def attached_run(settings: Config) -> PlannedRun | None:
    """Returns the plan of a run on the attached devices; None for an accelerator in no table.

    None as well if the run cannot be planned: the run itself reports its mistakes.
    """
    devices = attached_devices()
    is_known_device = is_cpu(devices) or devices[0].device_kind in CHIPS
    if not is_known_device or reason_not_planned(settings):
        return None
    try:
        return build(without_adapter_path(settings), devices)
    except UserError:  # for example, suites in fine-tuning
        return None


def without_adapter_path(settings: Config) -> Config:
    """Returns the settings without the path of an initial adapter.

    The adapter has been read already: its rank and targets are in the settings.
    """
    adapter = replace(settings.model.adapter, path="")
    return replace(settings, model=replace(settings.model, adapter=adapter))


def cpu_bytes(memory: float | None = None) -> float:
    """Returns the bytes that a program may use on each CPU device.

    memory: bytes of the machine; None: the free bytes of this machine. CPU devices share them
    evenly, after what the process needs besides its arrays.
    """
    memory = free_bytes() if memory is None else memory
    return max(0.0, memory - PROCESS_BYTES) / len(jax.local_devices())


def _check_cpu_memory(settings: Config) -> float | None:
    """Raises UserError if a run needs more memory than this machine has.

    Returns the bytes that the run needs on each CPU device; None if they are unknown.
    """
    if reason_not_planned(settings):
        return None
    devices = attached_devices()
    settings = without_adapter_path(settings)
    available = cpu_bytes(total_bytes())
    verdict = fit_run(settings, devices, available)
    if verdict.fits:
        return verdict.needed
    room = room_for_arrays(verdict.run, available)
    return require_fit(settings, devices, room) + available - room


def saved_bytes(run: PlannedRun) -> float:
    """Returns the bytes on a device of the arrays that a checkpoint holds.

    On CPUs a second copy of them exists while a checkpoint is being written.
    """
    parts = ["weights", "critic weights"]
    if run.workload.saves_moments:
        parts += ["optimizer", "critic optimizer"]
    return sum(run.parts.get(part, 0.0) for part in parts)


def shrink_pool(
    settings: Config,
    devices: Sequence[DescribedDevice],
    available: float,
    smallest_share: float = SMALLEST_SHARE,
) -> Config:
    """Returns settings with as many KV cache pages as fit, if only the KV cache is too large.

    Returns `settings` itself if it fits, if rollout.num_pages is set, if a phase other than
    sampling does not fit, or if less than `smallest_share` of the cache would remain.
    """
    verdict = fit(settings, devices, available)
    run = verdict.run
    if settings.rollout.num_pages or verdict.excess.keys() != {"rollout"}:
        return settings
    engine, pool = run.engine, run.parts["KV pool"]
    kept_share = 1 - verdict.excess["rollout"] / pool
    # One page absorbs the rounding.
    pages = pages_that_fit(engine, kept_share * pool) - 1
    if kept_share < smallest_share or pages < engine.pages_per_slot:
        return settings
    num_pages = pages * engine.num_shards * run.num_decoders
    return replace(settings, rollout=replace(settings.rollout, num_pages=num_pages))


def fitting_pages(settings: Config) -> int | None:
    """Returns the rollout.num_pages with which a run fits the attached devices; 0 for all pages.

    None if the memory of a device is unknown, or the run cannot be planned.
    """
    available = attached_bytes(settings.memory)
    if available is None or reason_not_planned(settings):
        return None
    fitting = shrink_pool(without_adapter_path(settings), attached_devices(), available)
    return fitting.rollout.num_pages


def require_fit(settings: Config, devices: Sequence[DescribedDevice], available: float) -> float:
    """Returns the bytes that a run needs on each device.

    Raises UserError if they exceed `available`. The message names settings with which the run fits.
    """
    verdict = fit(settings, devices, available)
    if verdict.fits:
        return verdict.needed
    # A smaller KV cache is no mistake of the user: `kv_pool.size_pool` chooses it without a
    # setting.
    smaller = shrink_pool(settings, devices, available)
    if smaller is not settings:
        return fit(smaller, devices, available).needed
    phase = max(verdict.phases, key=verdict.phases.__getitem__)
    kind = devices[0].device_kind
    changed = with_remedies(settings, devices, available)
    raise UserError(
        f"{settings.name} needs {verdict.needed / GIB:.1f} GiB on each of {len(devices)} {kind} "
        f"({phase}), and there are {available / GIB:.1f} GiB: {_advice(verdict, settings, changed)}"
        "; --config.memory.check=False starts it nevertheless"
    )


def _advice(verdict: Fit[PlannedRun], settings: Config, changed: Fit[PlannedRun] | None) -> str:
    if changed is not None:
        costs = "; ".join(remedy.costs for remedy in dict.fromkeys(changed.remedies))
        return f"it fits with {' '.join(setting_flags(settings, changed.settings))} ({costs})"
    state = sum(verdict.run.parts.get(part, 0) for part in STATE)
    return (
        "no train.microbatch_tokens, rollout.num_slots, rollout.max_new_tokens, mesh or "
        f"model.adapter.rank makes it fit (weights and optimizer alone take {state / GIB:.1f} GiB "
        "as it is): use a smaller model or more devices"
    )


def setting_flags(original: Config, changed: Config) -> list[str]:
    """Returns the flags that turn the config `original` into `changed`."""
    original_values = {setting.name: setting.value for setting in config.list_settings(original)}
    return [
        f"--config.{setting.name}={setting.value}"
        for setting in config.list_settings(changed)
        if not setting.part and original_values[setting.name] != setting.value
    ]


# -- settings with which a run fits ----------------------------------------------------------------


def with_remedies(
    settings: Config,
    devices: Sequence[DescribedDevice],
    available: float,
    remedies: Sequence[Remedy[PlannedRun]] = REMEDIES,
) -> Fit[PlannedRun] | None:
    """Returns how settings fit with as few changes as possible; None if no remedy suffices."""
    verdict = shrink(settings, devices, available, remedies)
    return verdict if verdict.fits else None


def shrink(
    settings: Config,
    devices: Sequence[DescribedDevice],
    available: float,
    remedies: Sequence[Remedy[PlannedRun]],
) -> Fit[PlannedRun]:
    """Returns how settings fit after the remedies that they need, or after all that help.

    Raises UserError as `fit`, for the settings themselves.
    """

    def refit(changed: Config) -> Fit[PlannedRun]:
        return fit(changed, devices, available)

    return apply_remedies(refit(settings), refit, remedies)


def apply_remedies(
    verdict: Fit[Described],
    refit: Callable[[Config], Fit[Described]],
    remedies: Sequence[Remedy[Described]],
) -> Fit[Described]:
    """Returns how a program fits after the remedies that it needs, or after all that help.

    This is the only search for sizes that fit: of training runs, presets, plans and servers.

    verdict: how the program fits with its settings.
    refit: returns how it fits with other settings, or raises UserError if they conflict.
    """
    while verdict.excess:
        improved = _improve(verdict, refit, remedies)
        if improved is None:
            break
        verdict = improved
    return verdict


def _improve(
    verdict: Fit[Described],
    refit: Callable[[Config], Fit[Described]],
    remedies: Sequence[Remedy[Described]],
) -> Fit[Described] | None:
    """Returns the fit with the first remedy that saves memory in a phase that does not fit."""
    # Greedy: the phase with the largest excess gets its cheapest remedy first.
    for phase in sorted(verdict.excess, key=verdict.excess.__getitem__, reverse=True):
        for remedy in remedies:
            if phase not in remedy.phases:
                continue
            changed = remedy.change(verdict.settings, verdict.run)
            if changed is None:
                continue
            try:
                improved = refit(changed)
            except UserError:  # the remedy conflicts with other settings
                continue
            # A remedy that saves nothing in this phase would only slow down the run, and the loop
            # might not end.
            if improved.phases[phase] < verdict.phases[phase]:
                return replace(improved, remedies=(*verdict.remedies, remedy))
    return None


# -- presets ---------------------------------------------------------------------------------------


def largest_that_fits(
    make: Callable[[str], Config],
    largest_first: Sequence[str],
    devices: Sequence[DescribedDevice],
    available: float | None,
) -> tuple[str, str]:
    """Returns the first preset that fits `available` bytes of each device, and the reason.

    `make` returns the config of a preset. The preset is tiny if none fits, or if the memory is
    unknown.
    """
    kind = devices[0].device_kind
    if available is None:
        return "tiny", f"because the memory of {kind} is not known"
    memory = f"{available / GIB:.1f} GiB on each of {len(devices)} {kind}"
    # The presets are ordered, so the first one that fits is the largest.
    for preset in largest_first:
        try:
            verdict = fit(make(preset), devices, available)
        except UserError:  # for example, a microbatch smaller than one row on each device
            continue
        if verdict.fits:
            return preset, f"the largest that fits: it needs {verdict.needed / GIB:.1f} of {memory}"
    smallest = largest_first[-1]
    return "tiny", f"because {smallest} does not fit {memory}; with other settings it may"
