"""Says before a run what it needs: memory, disk, hours and dollars.

    this run needs 11.2 of 15.8 GiB memory, 38.2 of 96.0 GB disk, about 3.1 hours (and $9.30 ...)

The hours follow from the roofline of the devices. A CPU is in no table: its speed is measured, or
recorded for a machine that is not attached. After its third step a run announces its hours again,
from the clock (`hours_by_clock`).
"""

from collections.abc import Sequence

from jzero.config import MemoryConfig
from jzero.planning.chips import CHIPS, GIB, Chip
from jzero.planning.cpu_rates import cpu_chip
from jzero.planning.disk import GB, DiskNeed
from jzero.planning.fitting import PROCESS_BYTES, attached_bytes, attached_devices, is_cpu
from jzero.planning.host_memory import free_bytes
from jzero.planning.planned_run import PlannedRun
from jzero.planning.roofline import roofline

ROOFLINE_SHARE = 0.4  # of the roofline's speed that a step reaches: a typical value, no measurement
# Of the measured speed of a CPU. Responses of full length are counted, and most are shorter: a step
# of configs/sums.py:smollm2-135m takes 29 s by this count at 1e11 FLOPs a second, and took 12 s on
# two idle cores (lab/speed.md).
CPU_SHARE = 1.0
SECONDS_OF_HOUR = 3600.0


def announcement(
    memory: MemoryConfig,
    disk: DiskNeed,
    planned_bytes: float | None,
    hours: float | None,
    price: float,
) -> str:
    """Returns the line that a run prints before it starts.

    planned_bytes: the planner's estimate for a device; None if it is unknown, or if
    memory.check=False.
    hours: of the run's steps (`planned_hours`); None if only the clock can tell (`hours_by_clock`).
    price: dollars an hour; 0 if unknown.
    """
    needs = []
    if planned_bytes is not None:
        available, number = attached_bytes(memory), len(attached_devices())
        free = " free" if available is None else ""
        if available is None:
            # CPU devices share the memory of the machine.
            planned_bytes = number * planned_bytes + PROCESS_BYTES
            available, number = free_bytes(), 1
        devices = f" on each of {number} devices" if number > 1 else ""
        size = f"{planned_bytes / GIB:.1f} of {available / GIB:.1f} GiB"
        needs.append(f"{size}{free} memory{devices}")
    needs.append(f"at most {disk.needed / GB:.1f} of {disk.available / GB:.1f} GB disk")
    if hours is not None:
        needs.append(f"{time_and_cost(hours, price)} by estimate")
    return f"this run needs {', '.join(needs)}"


def planned_hours(run: PlannedRun | None, steps: int, chip: Chip | None = None) -> float | None:
    """Returns the hours of a run's steps by arithmetic; None without a plan on known devices.

    steps: of the run; 0 if they are not known yet.
    chip: the recorded limits of a device that is in no table and not attached.
    """
    if run is None or not steps:
        return None
    share = ROOFLINE_SHARE
    if is_cpu(run.devices):
        chip = chip or cpu_chip(len(run.devices) // run.num_hosts)
        share = CPU_SHARE
    elif chip is None and run.devices[0].device_kind not in CHIPS:
        return None
    seconds = sum(cost.seconds for cost in roofline(run, chip).values()) / share
    return steps * seconds / SECONDS_OF_HOUR


def typical_seconds(steps: Sequence[float]) -> float:
    """Returns the mean seconds of the first steps of a process, without its very first one.

    steps: the seconds of each step, without those of compilation. The first step also loads and
    allocates, and responses differ in length from step to step.
    """
    later = steps[1:] or steps
    return sum(later) / len(later)


def hours_by_clock(hours: float, price: float, step: int) -> str:
    """Returns the line that corrects the announced hours after some steps."""
    return f"after {step} steps: {time_and_cost(hours, price)} in all, by the clock"


def time_and_cost(hours: float, price: float) -> str:
    """Returns "about 3.1 hours ($9.30 at $3 an hour)"; without the dollars if `price` is 0."""
    minutes = max(1, round(60 * hours))
    time = f"about {hours:.1f} hours" if hours >= 1 else f"about {minutes} minutes"
    if minutes == 1:
        time = "about a minute"
    return f"{time} (${price * hours:.2f} at ${price:g} an hour)" if price else time
