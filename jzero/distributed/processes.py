"""The processes of a run, one for each host: how they join, and which of them writes and prints.

JAX connects the processes through a coordinator. What they tell each other beside collectives is in
`peers.py`. Alone, without a coordinator, every function here returns at once.
"""

import os
import threading
from pathlib import Path

import jax
from tqdm import tqdm

from jzero.distributed import peers, slurm
from jzero.distributed.peers import has_peers
from jzero.errors import UserError
from jzero.files import write_atomic


def join_processes(coordinator: str | None, num_processes: int | None, index: int | None) -> None:
    """Connects this process to the others of the run. Must be called before any device is used.

    `coordinator` is "HOST:PORT" of process 0. Without arguments JAX takes all three from the
    environment of a Cloud TPU, SLURM or Open MPI, and a process that finds none of these runs
    alone. Raises UserError if only some arguments are given, or if the other processes cannot be
    reached.
    """
    arguments = (coordinator, num_processes, index)
    is_given = [argument is not None for argument in arguments]
    if any(is_given) and not all(is_given):
        raise UserError(
            "give --coordinator HOST:PORT, --num_processes and --process_id together, "
            "or none of them"
        )
    if not any(is_given) and (member := slurm.membership(os.environ)):
        if member.num_processes == 1:
            return
        arguments = member
    # What is known is not asked for: under SLURM, JAX would take all GPUs but one from the process.
    detection = None if arguments[0] is None else "deactivate"
    # JAX's service would take SIGTERM away from `interrupt.StopSignal`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # JAX's own heartbeat is the last resort: `watch_peers` is faster and names the lost host.
        jax.distributed.initialize(
            *arguments,
            cluster_detection_method=detection,
            heartbeat_timeout_seconds=3 * peers.PATIENCE,
        )
    except ValueError as error:
        is_alone = "coordinator_address should be defined" in str(error)
        if any(is_given) or not is_alone:
            raise UserError(f"this process cannot join the others: {error}") from error
        return
    if has_peers():
        # CPU devices run small programs in the thread that dispatches them and others in a pool:
        # with asynchronous dispatch, hosts would begin their collectives in different orders.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        peers.end_on_signals()
        threading.Thread(target=peers.watch_peers, daemon=True).start()


def is_first_process() -> bool:
    """Whether this is process 0, which writes all files and prints.

    Touches no device if the process is alone. Commands ask before they use devices, because the
    processes of the graders start first.
    """
    return not has_peers() or jax.process_index() == 0


def print_once(text: str) -> None:
    """Prints a line on the first host's terminal, above progress bars."""
    if is_first_process():
        tqdm.write(text)


def write_once(path: Path, text: str) -> None:
    """Writes a file from the first host, atomically: it has all of `text` or does not exist."""
    if is_first_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
