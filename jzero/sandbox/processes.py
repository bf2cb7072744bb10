"""CPU time and end of the processes below the sandbox's server.

Runs inside of the sandbox, and imports only the standard library.
"""

import os
import signal
import time

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of <linux/posix-timers.h>


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a child, over all its threads. Raises OSError after its end."""
    clock = (~pid << 3) | _PROCESS_CLOCK  # make_process_cpuclock of the kernel
    return time.clock_gettime(clock)


def end_descendants() -> None:
    """Kills all processes that a program of the level none did not end."""
    path = f"/proc/self/task/{os.getpid()}/children"
    # The children of a killed process become children of this one, so look again.
    while True:
        with open(path, encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
