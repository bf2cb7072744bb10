"""Says before a run what it needs: memory, disk, hours and dollars.

    this run needs 11.2 of 15.8 GiB memory, 38.2 of 96.0 GB disk, about 3.1 hours (and $9.30 ...)

The hours follow from the roofline of the devices; no roofline is known for CPUs. After its third
step a run announces its hours again, from the clock (`hours_by_clock`).
"""

from collections.abc import Sequence

from jzero.config import MemoryConfig
from jzero.planning.chips import GIB
from jzero.planning.disk import GB, DiskNeed
from jzero.planning.fitting import PROCESS_BYTES, attached_bytes, attached_devices
from jzero.planning.host_memory import total_bytes
from jzero.planning.planned_run import PlannedRun
from jzero.planning.roofline import roofline

ROOFLINE_SHARE = 0.4  # of the roofline's speed that a step reaches: a typical value, no measurement
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
        if available is None:
            # CPU devices share the memory of the machine.
            planned_bytes = number * planned_bytes + PROCESS_BYTES
            available, number = total_bytes(), 1
        devices = f" on each of {number} devices" if number > 1 else ""
        needs.append(f"{planned_bytes / GIB:.1f} of {available / GIB:.1f} GiB memory{devices}")
    needs.append(f"at most {disk.needed / GB:.1f} of {disk.available / GB:.1f} GB disk")
    if hours is not None:
        needs.append(_time(hours, price))
    return f"this run needs {', '.join(needs)}"


def planned_hours(run: PlannedRun | None, steps: int) -> float | None:
    """Returns the hours of a run's steps by arithmetic; None without a plan on known devices."""
    if run is None:
        return None
    seconds = sum(cost.seconds for cost in roofline(run).values()) / ROOFLINE_SHARE
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
    return f"after {step} steps: {_time(hours, price)} in all, by the clock"


def _time(hours: float, price: float) -> str:
    time = f"about {hours:.1f} hours" if hours >= 1 else f"about {60 * hours:.0f} minutes"
    return f"{time} (${price * hours:.2f} at ${price:g} an hour)" if price else time
