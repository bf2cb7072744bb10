"""Machines: the devices of a run, and the memory and disk that it has there.

    MACHINES["v5e-8"]                       usual machines, which need not be attached
    verdict = plan_on(settings, machine)    whether a run fits memory and disk, by arithmetic

`jzero.sizing` chooses settings for a machine. `jzero plan --config RECIPE --machine NAME` prints
the verdict on a recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero.config import Config
from jzero.cores import num_cores
from jzero.errors import UserError
from jzero.planning.announcement import planned_hours, time_and_cost
from jzero.planning.chips import GIB, Chip, DescribedDevice, described_devices
from jzero.planning.disk import GB, DiskNeed, parts_of_workdir
from jzero.planning.fitting import PROCESS_BYTES, Fit, fit_run, is_cpu
from jzero.planning.largest import memory_of
from jzero.planning.models import run_title
from jzero.planning.planned_run import PlannedRun, architectures

LAPTOP_SHARE = 0.75  # of a laptop's memory: the system and other programs take the rest
# FLOPs (fp32) and bytes a second of all cores of a usual laptop, for an estimate of hours.
LAPTOP_FLOPS, LAPTOP_BANDWIDTH = 3e11, 5e10


@dataclass(frozen=True)
class Machine:
    """Equal devices, and the room that a run has."""

    devices: Sequence[DescribedDevice]
    device_bytes: float | None  # that arrays may take on each device; None if unknown
    disk_bytes: float  # that the workdir may have
    chip: Chip | None = None  # recorded limits of each device, of a CPU that is not attached

    @property
    def is_cpu(self) -> bool:
        return is_cpu(self.devices)

    def __str__(self) -> str:
        kind = f"{len(self.devices)} {self.devices[0].device_kind}"
        if self.device_bytes is None:
            return kind
        if self.is_cpu:
            free = f"{self.shown_bytes(self.device_bytes) / GIB:.1f} GiB free"
            return f"CPU, {free}" if self.chip else f"{num_cores()} CPU cores, {free}"
        return f"{kind}, {self.device_bytes / GIB:.1f} GiB each"

    def shown_bytes(self, size: float) -> float:
        """Returns the bytes to print for `size` bytes of arrays on each device.

        CPU devices share a memory, in which the process takes room besides its arrays.
        """
        return size * len(self.devices) + PROCESS_BYTES if self.is_cpu else size

    @property
    def memory_name(self) -> str:
        return "memory" if self.is_cpu else "memory of each device"


def _accelerators(topology: str, disk_gb: float) -> Machine:
    devices = tuple(described_devices(topology))
    return Machine(devices, memory_of(devices[0]), disk_gb * GB)


def _laptop(memory_gib: float, disk_gb: float) -> Machine:
    # The command line sets up two CPU devices.
    devices = tuple(DescribedDevice(number, 0, "cpu", "cpu") for number in range(2))
    arrays = LAPTOP_SHARE * memory_gib * GIB - PROCESS_BYTES
    chip = Chip(0, LAPTOP_FLOPS / len(devices), LAPTOP_BANDWIDTH / len(devices))
    return Machine(devices, arrays / len(devices), disk_gb * GB, chip)


def _t4(disk_gb: float) -> Machine:
    device = DescribedDevice(0, 0, "gpu", "Tesla T4")
    return Machine((device,), memory_of(device), disk_gb * GB)


# 100 GB is the default boot disk of a TPU machine; a T4 stands for a notebook with 20 GB.
MACHINES = {
    "v5e-1": _accelerators("v5e:1x1", 100),
    "v5e-8": _accelerators("v5e:2x4", 100),
    "v6e-1": _accelerators("v6e:1x1", 100),
    "v6e-8": _accelerators("v6e:2x4", 100),
    "H100": _accelerators("h100:1", 200),
    "L4": _accelerators("l4:1", 100),
    "T4": _t4(20),
    "laptop-24gb": _laptop(24, 100),
    "laptop-8gb": _laptop(8, 50),
}


# The shapes of Google Cloud's slices of v5e and v6e, by their number of chips.
CLOUD_SHAPES = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
CLOUD_TYPES = {"v5litepod": "v5e", "v5e": "v5e", "v6e": "v6e"}  # accelerator type -> family
CLOUD_DISK_GB = 100  # the default boot disk of a TPU machine


def find_machine(name: str) -> Machine:
    """Returns a machine of MACHINES by its name, in any case, or a slice of Google Cloud.

    A slice is named by its accelerator type, such as v5litepod-16 or v6e-32.

    Raises UserError if there is none.
    """
    for known, machine in MACHINES.items():
        if known.lower() == name.lower():
            return machine
    kind, _, number = name.lower().partition("-")
    shape = CLOUD_SHAPES.get(int(number)) if number.isdecimal() else None
    if kind in CLOUD_TYPES and shape:
        return _accelerators(f"{CLOUD_TYPES[kind]}:{shape}", CLOUD_DISK_GB)
    raise UserError(
        f"--machine={name}: there are {', '.join(MACHINES)}, and slices of Cloud TPUs by their "
        "accelerator type, such as v5litepod-16; or give --topology"
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits the memory and the disk of a machine, by arithmetic."""

    machine: Machine
    memory: Fit[PlannedRun] | None  # None if the memory of the devices is unknown
    disk: DiskNeed
    hours: float | None = None  # of the run's steps, by estimate; None if nothing is known
    price: float = 0.0  # dollars an hour; 0 if unknown

    @property
    def fits(self) -> bool:
        return self.disk.fits and (self.memory is None or self.memory.fits)

    def __str__(self) -> str:
        """Returns the line that commands print."""
        room = f"about {self.disk.needed / GB:.1f} of {self.disk.available / GB:.1f} GB of disk"
        if self.hours is not None:
            room += f", and {time_and_cost(self.hours, self.price)} by estimate"
        if self.memory is None:
            return f"needs {room}"
        machine = self.machine
        needed, available = (
            machine.shown_bytes(size) / GIB for size in (self.memory.needed, self.memory.available)
        )
        memory = f"about {needed:.1f} of {available:.1f} GiB of {machine.memory_name}"
        joint = ", " if self.hours is not None else ", and "
        return f"needs {memory}{joint}{room}"


def plan_on(settings: Config, machine: Machine) -> Verdict:
    """Returns how a run fits a machine, and how long it takes there.

    memory.disk_gb and memory.device_gib take precedence over the machine's memory and disk. The
    hours are for train.steps, which is unknown if passes over the data give it.

    Raises UserError if the settings do not fit together, or the model is unknown.
    """
    available = machine.device_bytes
    if settings.memory.device_gib:
        available = settings.memory.device_gib * GIB
    memory = None if available is None else fit_run(settings, machine.devices, available)
    model = architectures(settings).policy
    disk = settings.memory.disk_gb * GB or machine.disk_bytes
    train = settings.train
    steps = 0 if train.prompt_epochs or settings.sft else train.steps
    run = memory.run if memory is not None else None
    return Verdict(
        machine=machine,
        memory=memory,
        disk=DiskNeed(parts_of_workdir(settings, model), disk),
        hours=planned_hours(run, steps, machine.chip),
        price=train.price,
    )


def format_verdict(settings: Config, name: str, verdict: Verdict) -> str:
    """Returns the phases, the parts of the workdir, and the verdict, in plain text."""
    title = run_title(settings.name, settings.model.path)
    lines = [f"{title} on {name}, by arithmetic: {verdict.machine}", ""]
    if verdict.memory is not None:
        lines.append(f"{'phase':<28}GiB on each of {len(verdict.machine.devices)} devices")
        for phase, size in verdict.memory.phases.items():
            missing = "" if size <= verdict.memory.available else "  DOES NOT FIT"
            lines.append(f"{phase:<24}{size / GIB:7.2f}{missing}")
        lines.append("")
    lines.append(f"{'workdir':<29}GB")
    lines += [f"{part:<24}{size / GB:7.2f}" for part, size in verdict.disk.parts.items()]
    if not verdict.disk.fits:
        lines.append("the workdir DOES NOT FIT")
    return "\n".join([*lines, "", str(verdict), "fits" if verdict.fits else "does not fit"])
