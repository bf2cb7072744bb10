"""The names that SLURM gives the processes of a step, and what JAX makes of them."""

import json
import os
import socket
import subprocess
import sys

import pytest
from runs import ROOT

from jzero.hosts.slurm import Membership, first_host, membership

STEP = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("node_list", "expected"),
    [
        ("node1", "node1"),
        ("node1,host2", "node1"),
        ("node[001-015],host2", "node001"),
        ("rack-2-node[007,009-015]", "rack-2-node007"),
        ("node[3]", "node3"),
    ],
)
def test_the_first_host_of_a_list(node_list: str, expected: str) -> None:
    assert first_host(node_list) == expected


def test_a_step_of_one_task_a_node() -> None:
    assert membership(STEP) == Membership("gpu03:61441", 2, 1)
    assert membership(STEP | {"JAX_COORDINATOR_PORT": "99"}) == Membership("gpu03:99", 2, 1)


def test_other_steps_are_left_to_jax() -> None:
    assert membership(STEP | {"SLURM_NTASKS": "16"}) is None
    for name in STEP.keys() - {"SLURM_LOCALID"}:
        assert membership({key: value for key, value in STEP.items() if key != name}) is None


# Joins, and prints which process this is, and which GPUs JAX would leave it.
PROBE = """
import json, sys
from jzero import cli
cli.start_jax(sys.argv[1:])
import jax
visible = jax.config.values["jax_cuda_visible_devices"]
print(json.dumps([jax.process_index(), jax.process_count(), visible]))
"""


def probe(environment: dict[str, str], *arguments: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_step_of_one_task_keeps_all_gpus() -> None:
    alone = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    assert probe(STEP | alone) == [0, 1, "all"]


def test_flags_keep_all_gpus_under_slurm() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = (f"--coordinator=localhost:{port}", "--num_processes=1", "--process_id=0")
    assert probe(STEP, *flags) == [0, 1, "all"]
