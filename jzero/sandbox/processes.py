"""Processes of the sandbox's server: their time, and their end.

Runs inside of the sandbox, and imports the standard library alone.
"""

import os
import signal
import time

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of <linux/posix-timers.h>


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a child, over all its threads. Raises OSError after its end."""
    clock = (~pid << 3) | _PROCESS_CLOCK  # make_process_cpuclock of the kernel
    return time.clock_gettime(clock)


def forget_ended_children() -> None:
    """Collects the children that have ended, so that none stays behind as a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def end_descendants() -> None:
    """Kills what a program of the level none has left behind, wherever it went."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path, encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
