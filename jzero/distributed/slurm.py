"""The processes of a SLURM step that has one task a node: how they find each other.

JAX finds the processes of a step itself, but gives each of them one GPU alone: that of the task's
number on its node. With one task a node it would leave the other GPUs of every node idle. Steps
with several tasks a node, one for each GPU, are left to JAX.

https://slurm.schedmd.com/srun.html lists the variables that `srun` sets.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

FIRST_PORT = 61440  # of 4096; jobs that share a node hardly have the same one
NUM_PORTS = 4096


class Membership(NamedTuple):
    """Which process of a run this one is."""

    coordinator: str  # "HOST:PORT" of process 0
    num_processes: int
    process_id: int


def first_host(node_list: str) -> str:
    """Returns the first node of a list as SLURM writes it: node[007-010,12],other is node007."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", node_list)
    assert match is not None, f"{node_list=}"
    return match[1] + (match[2] or "")


def membership(environment: Mapping[str, str]) -> Membership | None:
    """Returns this process's place in its SLURM step, or None outside of a step.

    None also where a node has several tasks.
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
    if num_nodes != num_tasks:
        return None
    port = environment.get("JAX_COORDINATOR_PORT") or FIRST_PORT + int(job) % NUM_PORTS
    return Membership(f"{first_host(node_list)}:{port}", int(num_tasks), int(process_id))
