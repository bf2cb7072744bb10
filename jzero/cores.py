"""How many processor cores this process may use."""

import os


def num_cores() -> int:
    """Returns the cores that this process may run on.

    `taskset`, a container or a scheduler may leave it fewer cores than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity
