"""What hosts tell each other: shares of the work, gathered values, arrays spread over hosts.

Every host runs the same program. A collective (a global jitted program, or a gather below) waits
until all hosts have dispatched it, so all hosts must call these functions in the same order: a host
that skips one, or swaps two, leaves everybody waiting forever. Nothing that differs between hosts
may decide whether one of them is called. Alone, without other hosts, everything here is immediate.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import PyTree

from jzero.distributed.peers import has_peers
from jzero.errors import UserError
from jzero.types import JsonValue


def local_share(count: int) -> slice:
    """Returns which of `count` items this host works on: neighbors, shared as evenly as can be."""
    index = jax.process_index()
    num_processes = jax.process_count()
    return slice(count * index // num_processes, count * (index + 1) // num_processes)


def gather_bytes(data: bytes) -> list[bytes]:
    """Returns the bytes that every host gave, in the order of hosts. A collective."""
    if not has_peers():
        return [data]
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).ravel()
    # Hosts must give arrays of one shape. A power of two, so that few gathering programs are
    # compiled.
    longest = int(sizes.max())
    padded = np.zeros(1 << longest.bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_json(value: JsonValue) -> list[JsonValue]:
    """Returns the JSON value that every host gave, in the order of hosts. A collective."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode())]


def check_shared(path: Path) -> None:
    """Raises UserError unless every host sees the file that the first host wrote. A collective."""
    gather_json("written")  # nobody looks before the first host has written
    if not all(gather_json(path.exists())):
        raise UserError(
            f"{path.parent} is not the same directory on every host: "
            "give --workdir on shared storage"
        )


def sum_over_hosts(counts: Mapping[str, float]) -> dict[str, float]:
    """Returns each count's sum over hosts, which must give the same names. A collective."""
    counts_of_hosts = gather_json(dict(counts))
    return {name: sum(counts[name] for counts in counts_of_hosts) for name in counts}


def put_global(x: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """Puts an array that every host has on all hosts' devices: each host puts its own shards.

    The copy is meant, so a transfer guard that forbids implicit transfers does not forbid it. JAX
    takes what `jax.make_array_from_callback` copies for an implicit transfer.
    """
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])


def fetch_global(x: jax.Array) -> np.ndarray:
    """Returns a whole array on every host. A collective if its shards are spread over hosts."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    return multihost_utils.process_allgather(x, tiled=True)


def start_fetch(arrays: PyTree) -> None:
    """Starts the copy of a tree of arrays to this host, and waits for nothing. Not a collective.

    The copy is meant, so a transfer guard that forbids implicit transfers does not forbid it. JAX
    0.12 takes the copy of several arrays that `jax.copy_to_host_async` starts for an implicit
    transfer; `jax.device_get`, which reads the arrays later, is an explicit one.
    """
    with jax.transfer_guard_device_to_host("allow"):
        jax.copy_to_host_async(arrays)
