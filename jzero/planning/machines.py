"""What the sizing chooses for known models on usual machines: `jzero.plan --table`.

Every run trains the same batch of problems. The method is the first of METHODS that fits: the whole
model, an adapter, or an adapter on a base in int8. Sizes are chosen by `planning.sizing`, and the
checkpoints by `planning.disk`, as for a run that starts on the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jzero.config import Config
from jzero.errors import UserError
from jzero.planning.chips import GIB, DescribedDevice, described_devices
from jzero.planning.disk import GB, disk_need, smaller_on_disk
from jzero.planning.fitting import PROCESS_BYTES, Fit, fit, saved_bytes, shrink_pool
from jzero.planning.largest import METHODS, memory_of
from jzero.planning.models import architecture, hub_id_of
from jzero.planning.sizing import choose_sizes

PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 512, 1024
SMALLEST_SHARE = 1 / 4  # of the KV cache, as for a run (`fitting`)


@dataclass(frozen=True)
class Machine:
    """A machine with equal devices of one host."""

    devices: tuple[DescribedDevice, ...]
    device_bytes: float  # that a program may use on each device
    disk_gb: float  # usual size of the disk with the workdir


def _accelerators(topology: str, disk_gb: float) -> Machine:
    devices = tuple(described_devices(topology))
    return Machine(devices, memory_of(devices[0]), disk_gb)


def _laptop(memory_gib: float, disk_gb: float) -> Machine:
    # The system and other programs take a quarter.
    usable = 0.75 * memory_gib * GIB - PROCESS_BYTES
    return Machine((DescribedDevice(0, 0, "cpu", "cpu"),), usable, disk_gb)


def _t4(disk_gb: float) -> Machine:
    device = DescribedDevice(0, 0, "gpu", "Tesla T4")
    return Machine((device,), memory_of(device), disk_gb)


# 100 GB is the default boot disk of a TPU machine; a T4 stands for a notebook with 20 GB.
MACHINES = {
    "v5e-1": _accelerators("v5e:1x1", 100),
    "v5e-8": _accelerators("v5e:2x4", 100),
    "v6e-1": _accelerators("v6e:1x1", 100),
    "v6e-8": _accelerators("v6e:2x4", 100),
    "H100": _accelerators("h100:1", 200),
    "L4": _accelerators("l4:1", 100),
    "T4": _t4(20),
    "24 GB laptop": _laptop(24, 100),
    "8 GB laptop": _laptop(8, 50),
}

PAIRS = (
    ("v5e-1", "Qwen2.5-0.5B"),
    ("v5e-1", "Qwen2.5-1.5B"),
    ("v5e-1", "Qwen3-4B"),
    ("v5e-8", "Qwen2.5-1.5B"),
    ("v5e-8", "Qwen2.5-3B"),
    ("v5e-8", "Qwen2.5-7B"),
    ("v6e-1", "Qwen2.5-1.5B"),
    ("v6e-1", "Qwen3-8B"),
    ("v6e-8", "Qwen2.5-7B"),
    ("v6e-8", "Qwen3-8B"),
    ("H100", "Qwen2.5-1.5B"),
    ("H100", "Qwen2.5-3B"),
    ("H100", "Qwen2.5-7B"),
    ("L4", "Qwen2.5-0.5B"),
    ("L4", "Qwen3-4B"),
    ("T4", "Qwen2.5-0.5B"),
    ("T4", "Qwen2.5-1.5B"),
    ("24 GB laptop", "Qwen2.5-0.5B"),
    ("24 GB laptop", "Qwen2.5-1.5B"),
    ("8 GB laptop", "Qwen2.5-0.5B"),
)


@dataclass(frozen=True)
class Choice:
    """What the sizing chooses for a model on a machine; `config` is None if nothing fits."""

    machine: str
    model: str
    method: str = ""
    config: Config | None = None
    memory: tuple[float, float] = (0.0, 0.0)  # needed and available bytes of a device
    disk: tuple[float, float] = (0.0, 0.0)  # needed and available bytes


def choose(machine_name: str, model_name: str) -> Choice:
    """Returns what the sizing chooses for a known model on a machine of MACHINES."""
    machine, path = MACHINES[machine_name], hub_id_of(model_name)
    model = architecture(path)
    for method, change in METHODS.items():
        settings = change(_settings(path, machine))
        try:
            sized = choose_sizes(settings, machine.devices, machine.device_bytes)
            verdict = _fit(sized, machine)
        except UserError:  # for example, heads that the mesh cannot split
            continue
        if not verdict.fits:
            continue
        config = sized
        available = machine.disk_gb * GB
        if not disk_need(config, model, Path()).fits:
            smaller = smaller_on_disk(config, model, available)
            if smaller is None:
                continue
            config = smaller
        need = disk_need(config, model, Path()).needed
        return Choice(
            machine_name,
            model_name,
            method,
            config,
            (verdict.needed, verdict.available),
            (need, available),
        )
    return Choice(machine_name, model_name)


def _settings(path: str, machine: Machine) -> Config:
    """Returns the settings of every run of the table, with sizes that are left open."""
    config = Config(name="table")
    rollout = replace(
        config.rollout,
        num_prompts=PROMPTS,
        group_size=GROUP,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=RESPONSE_TOKENS,
        num_slots=0,
    )
    return replace(
        config,
        model=replace(config.model, path=path),
        rollout=rollout,
        # One response in a row is the smallest row, which fits the most machines.
        train=replace(config.train, microbatch_tokens=0, packs_per_row=1),
        memory=replace(config.memory, disk_gb=machine.disk_gb),
    )


def _fit(config: Config, machine: Machine) -> Fit:
    """Returns how a run fits the memory, with the KV cache that a run would choose."""
    available = machine.device_bytes
    if machine.devices[0].platform == "cpu":
        # On CPUs a checkpoint is copied in memory while it is written.
        available -= saved_bytes(fit(config, machine.devices, available).run)
    fitting = shrink_pool(config, machine.devices, available, SMALLEST_SHARE)
    return fit(fitting, machine.devices, available)


def format_table(pairs: Sequence[tuple[str, str]] = PAIRS) -> str:
    """Returns the table with one line for each pair of a machine and a model."""
    lines = [
        f"{PROMPTS} prompts x {GROUP} responses, {PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens; "
        "GiB on each device and GB of disk, by arithmetic",
        f"{'machine':<14}{'model':<14}{'method':<21}{'microbatch':>10}{'slots':>7}"
        f"{'memory':>16}{'disk':>14}  checkpoints",
    ]
    for machine, model in pairs:
        choice = choose(machine, model)
        if choice.config is None:
            lines.append(f"{machine:<14}{model:<14}does not fit")
            continue
        train, rollout = choice.config.train, choice.config.rollout
        memory = f"{choice.memory[0] / GIB:.1f} of {choice.memory[1] / GIB:.1f}"
        disk = f"{choice.disk[0] / GB:.0f} of {choice.disk[1] / GB:.0f}"
        kept = f"{train.save}, {train.keep_checkpoints} kept"
        lines.append(
            f"{machine:<14}{model:<14}{choice.method:<21}{train.microbatch_tokens:>10}"
            f"{rollout.num_slots:>7}{memory:>16}{disk:>14}  {kept}"
        )
    return "\n".join(lines)
