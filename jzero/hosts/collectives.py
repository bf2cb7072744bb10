"""Communication between hosts: shares of the work, gathered values, arrays spread over hosts.

Every host runs the same program. A collective (a global jitted program, or a gather below) waits
until all hosts have dispatched it, so all hosts must call these functions in the same order: if a
host skips one, or swaps two, all hosts wait forever. A value that differs between hosts must not
decide whether a collective is called. In a run with one host, every function returns immediately.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import PyTree

from jzero.errors import UserError
from jzero.hosts.peers import PEERS, has_peers
from jzero.types import JsonValue

# In the coordinator's key-value store: the values of every `Exchange`, by their number and host.
EXCHANGE_FOLDER = "jzero/exchange"
EXCHANGE_SECONDS = 7 * 24 * 3600
_EXCHANGES = itertools.count()


def local_share(count: int) -> slice:
    """Returns this host's share of `count` items: a contiguous slice, as even as possible."""
    return share_of(count, jax.process_index())


def share_of(count: int, index: int) -> slice:
    """Returns the share of `count` items of the host with this index. See `local_share`."""
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


class Exchange:
    """Gathers JSON values from some of the hosts, without their devices.

    `gather_json` runs a program on the devices, after all programs that were dispatched before.
    Here the values go through JAX's key-value store, so that devices may be busy meanwhile. All of
    the hosts must call `gather` equally often.
    """

    def __init__(self, hosts: Sequence[int]) -> None:
        """`hosts` are indices of processes, among them this one.

        All of the hosts make their exchanges in the same order.
        """
        self.hosts = list(hosts)
        self._folder = f"{EXCHANGE_FOLDER}/{next(_EXCHANGES)}/{self.hosts[0]}"
        self._num_gathered = 0

    def gather(self, value: JsonT) -> list[JsonT]:
        """Returns the values of all of the hosts, in their order."""
        client, here = PEERS.client, jax.process_index()
        number = self._num_gathered
        client.key_value_set(f"{self._folder}/{number}/{here}", json.dumps(value))
        values = []
        for host in self.hosts:
            # Another host may wait for a grade or compile for a long time. If it ends, `peers`
            # ends this process, too.
            text = client.blocking_key_value_get(
                f"{self._folder}/{number}/{host}", EXCHANGE_SECONDS * 1000
            )
            values.append(json.loads(text))
        # A host that gave this value has read all earlier ones.
        if number:
            client.key_value_delete(f"{self._folder}/{number - 1}/{here}")
        self._num_gathered += 1
        return values


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


def put(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts an array onto the devices of a sharding. All of its hosts have the array."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # `jax.device_put` would first compare the arrays of all hosts of the run, in a collective.
    return put_global(x, sharding)


def place(x: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts an array of devices or of every host onto the devices of a sharding.

    A collective if `x` is spread over hosts.
    """
    return put(x, sharding) if isinstance(x, np.ndarray) else jax.device_put(x, sharding)


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
