"""Finds the processes of a SLURM step that has one task per node.

JAX detects SLURM steps itself, but gives each process only one GPU: the GPU with the number of the
task on its node. With one task per node, the other GPUs of every node would be idle. JAX handles
steps with several tasks per node, one for each GPU.

https://slurm.schedmd.com/srun.html lists the variables that `srun` sets.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

FIRST_PORT = 61440  # of 4096 ports; two jobs on one node rarely get the same port
NUM_PORTS = 4096


class Membership(NamedTuple):
    """The place of this process in a run."""

    coordinator: str  # "HOST:PORT" of process 0
    num_processes: int
    process_id: int


def first_host(node_list: str) -> str:
    """Returns the first node of a SLURM node list: node007 for node[007-010,12],other."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", node_list)
    assert match is not None, f"{node_list=}"
    return match[1] + (match[2] or "")


def membership(environment: Mapping[str, str]) -> Membership | None:
    """Returns this process's place in its SLURM step, or None outside of a step.

    Also returns None if a node has several tasks.
    """
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_NUM_NODES",
        "SLURM_NTASKS",
        "SLURM_PROCID",
    )
    if not all(name in environment for name in names):
        return None
    job, node_list, num_nodes, num_tasks, process_id = (environment[name] for name in names)
    # JAX handles steps with several tasks per node.
    if num_nodes != num_tasks:
        return None
    # All processes compute the same port from the number of their job.
    port = environment.get("JAX_COORDINATOR_PORT") or FIRST_PORT + int(job) % NUM_PORTS
    return Membership(f"{first_host(node_list)}:{port}", int(num_tasks), int(process_id))
