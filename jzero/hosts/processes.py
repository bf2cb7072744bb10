"""The processes of a run, one per host: joining them, and writing and printing from the first one.

The processes meet at the coordinator's port (`rendezvous.py`), where JAX's coordinator listens
afterwards. `peers.py` watches their signs of life. In a run with one process, without a
coordinator, every function here returns at once.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src.clusters import ClusterEnv  # JAX detects a cluster only while it connects

from jzero import terminal
from jzero.errors import UserError, reason_of
from jzero.files import is_full_disk, write_atomic
from jzero.hosts import peers, rendezvous, slurm
from jzero.hosts.peers import has_peers
from jzero.hosts.relay import start_relay
from jzero.hosts.waits import JOIN_SECONDS, SILENCE_SECONDS

SHUTDOWN_SECONDS = 60  # a finished process waits this long for the others
MAX_SECONDS = 7 * 24 * 3600  # upper bound of both flags


class Membership(NamedTuple):
    """The place of this process in a run."""

    coordinator: str  # "HOST:PORT" of process 0
    num_processes: int
    process_id: int
    local_devices: Sequence[int] | None = None  # this process's devices; None: all of the host


def join_processes(
    coordinator: str | None,
    num_processes: int | None,
    index: int | None,
    join_seconds: float = JOIN_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> None:
    """Connects this process to the others of the run. Must be called before any device is used.

    `coordinator` is "HOST:PORT" of process 0. Without arguments, JAX reads all three from the
    environment of a Cloud TPU, SLURM or Open MPI; a process without such an environment runs by
    itself. The others have `join_seconds` to join, and a line reports the wait. A process that then
    sends nothing for `silence_seconds` counts as lost.

    Raises UserError if only some arguments are given, or if the other processes cannot be reached.
    """
    arguments = (coordinator, num_processes, index)
    is_given = [argument is not None for argument in arguments]
    if any(is_given) and not all(is_given):
        raise UserError(
            "give --coordinator HOST:PORT, --num_processes and --process_id together, "
            "or none of them"
        )
    for name, seconds in (("join_seconds", join_seconds), ("silence_seconds", silence_seconds)):
        if not 0 < seconds <= MAX_SECONDS:
            raise UserError(f"--{name}={seconds:g} must be between 0 and {MAX_SECONDS} seconds")
    if coordinator is not None and num_processes is not None and index is not None:
        member = Membership(coordinator, num_processes, index)
    else:
        member = _detect_membership(join_seconds)
    if member is None:
        return
    # A cluster job with a single process has no other process to connect to.
    if member.num_processes == 1 and not any(is_given):
        return
    _connect(member, join_seconds, silence_seconds)


def _detect_membership(join_seconds: float) -> Membership | None:
    """Returns the place of this process from the environment, or None without other processes."""
    if slurm_member := slurm.membership(os.environ):
        # JAX would leave the process with only one GPU.
        return Membership(
            slurm_member.coordinator, slurm_member.num_processes, slurm_member.process_id
        )
    try:
        coordinator, num_processes, index, devices = (
            ClusterEnv.auto_detect_unset_distributed_params(
                os.environ.get("JAX_COORDINATOR_ADDRESS"),
                None,
                None,
                None,
                None,
                int(join_seconds),
            )
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"this process cannot join the others: {reason_of(error)}") from error
    if coordinator is None or num_processes is None or index is None:
        return None
    return Membership(coordinator, num_processes, index, devices)


def _connect(member: Membership, join_seconds: float, silence_seconds: float) -> None:
    """Meets the other processes, and starts JAX's own connections."""
    peers.end_on_signals()
    connections = rendezvous.meet(
        member.coordinator, member.num_processes, member.process_id, join_seconds
    )
    if connections:
        peers.start_watching(member.process_id, member.num_processes, connections, silence_seconds)
        # CPU devices run small programs in the dispatching thread and others in a pool. With
        # asynchronous dispatch, hosts would start their collectives in different orders.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    # JAX's service would take SIGTERM away from `interrupt.StopSignal`.
    jax.config.update("jax_enable_preemption_service", False)
    coordinator = member.coordinator
    if member.process_id:
        terminal.mute()
        # JAX would abort this process with a native stack trace when process 0 ends.
        host, port = rendezvous.split_address(member.coordinator)
        coordinator = f"127.0.0.1:{start_relay(host, port)}"
    try:
        # JAX's own heartbeat is the fallback: `watch_peers` is faster and names the lost host.
        jax.distributed.initialize(
            coordinator,
            member.num_processes,
            member.process_id,
            member.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(join_seconds),
            heartbeat_timeout_seconds=math.ceil(3 * silence_seconds),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"this process cannot join the others: {reason_of(error)}") from error


def is_first_process() -> bool:
    """Returns whether this is process 0, which writes all files and prints.

    Touches no device in a run with one process. Commands call this function before they use
    devices, because the grader processes start first.
    """
    return not has_peers() or jax.process_index() == 0


def print_once(text: str, style: str = "") -> None:
    """Prints a notice on the first host's terminal, above progress bars.

    `style` is one of rich's, such as "bold". A log has none.
    """
    if is_first_process():
        terminal.say(text, style)


def write_result_once(text: str) -> None:
    """Prints the result of a command on the first host's stdout, where `print_once` has notices."""
    if is_first_process():
        terminal.write(text)


def print_everywhere(text: str) -> None:
    """Prints a notice on the terminals of all hosts: to stderr on all except the first."""
    if is_first_process():
        terminal.say(text)
    else:
        terminal.write(text, sys.stderr)


def write_once(path: Path, text: str) -> None:
    """Writes a file from the first host, atomically: it has all of `text` or does not exist.

    Raises UserError if the folder cannot be created.
    """
    if is_first_process():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if is_full_disk(error):
                raise
            raise UserError(
                f"{path.parent} cannot be created: {error.strerror}: give another directory"
            ) from None
        write_atomic(path, text)
