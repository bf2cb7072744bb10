"""Communication between hosts: shares of the work, gathered values, arrays spread over hosts.

Every host runs the same program. A collective (a global jitted program, or a gather below) waits
until all hosts have dispatched it, so all hosts must call these functions in the same order: if a
host skips one, or swaps two, all hosts wait forever. A value that differs between hosts must not
decide whether a collective is called. In a run with one host, every function returns immediately.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import PyTree

from jzero.errors import UserError
from jzero.hosts.peers import has_peers
from jzero.types import JsonValue


def local_share(count: int) -> slice:
    """Returns this host's share of `count` items: a contiguous slice, as even as possible."""
    index = jax.process_index()
    num_processes = jax.process_count()
    # The shares of two hosts differ by at most one item.
    return slice(count * index // num_processes, count * (index + 1) // num_processes)


JsonT = TypeVar("JsonT", bound=JsonValue)


def gather_bytes(data: bytes) -> list[bytes]:
    """Returns the bytes of every host, in the order of hosts. A collective."""
    if not has_peers():
        return [data]
    size = np.array([len(data)], np.int32)
    sizes = multihost_utils.process_allgather(size).ravel()
    # All hosts must pass arrays of the same shape. Rounding up to a power of two limits the number
    # of gathering programs that are compiled.
    longest = int(sizes.max())
    padded = np.zeros(1 << longest.bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_json(value: JsonT) -> list[JsonT]:
    """Returns the JSON value of every host, in the order of hosts. A collective.

    The hosts pass values of one type. A tuple comes back as a list.
    """
    # JSON, because bytes from another host must not be unpickled.
    texts = gather_bytes(json.dumps(value).encode())
    return [json.loads(text) for text in texts]


def check_shared(path: Path) -> None:
    """Raises UserError unless every host sees the file that the first host wrote. A collective."""
    gather_json("written")  # a barrier: every host looks after the first host has written
    if not all(gather_json(path.exists())):
        raise UserError(
            f"{path.parent} is not the same directory on every host: "
            "give --workdir on shared storage"
        )


def sum_over_hosts(counts: Mapping[str, float]) -> dict[str, float]:
    """Returns the sum of each count over hosts, which must pass the same names. A collective."""
    counts_of_hosts = gather_json(dict(counts))
    totals = {}
    for name in counts:
        totals[name] = sum(counts_of_host[name] for counts_of_host in counts_of_hosts)
    return totals


def put_global(x: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """Puts an array that every host has onto all hosts' devices: each host puts its own shards."""
    # The copy is intended. JAX treats the copies of `jax.make_array_from_callback` as implicit
    # transfers, which a transfer guard may forbid.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])


def fetch_global(x: jax.Array) -> np.ndarray:
    """Returns the full array on every host. A collective if its shards are spread over hosts."""
    # This host already holds every value, so no other host is needed.
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    return multihost_utils.process_allgather(x, tiled=True)


def start_fetch(arrays: PyTree) -> None:
    """Starts to copy a tree of arrays to this host, without waiting. Not a collective."""
    # The copy is intended. JAX 0.12 treats the copy of several arrays that `jax.copy_to_host_async`
    # starts as an implicit transfer, which a transfer guard may forbid. `jax.device_get`, which
    # reads the arrays later, is an explicit transfer.
    with jax.transfer_guard_device_to_host("allow"):
        jax.copy_to_host_async(arrays)
