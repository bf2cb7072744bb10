"""Several hosts, one program: joining, what hosts tell each other, and how all of them stop at the same place.

Global programs are dispatched by every host in the same order; rollouts are local, and hosts meet in `gather`. Process
0 writes and speaks. Alone everything here is immediate."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jzero.distributed.processes import has_peers
from jzero.errors import UserError


def local_share(count: int) -> slice:
    """Which of `count` problems this host decodes: neighbours, as even as can be."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def gather_bytes(data: bytes) -> list[bytes]:
    """What every host gave, in their order."""
    if not has_peers():
        return [data]
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).ravel()
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # few shapes, few programs
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [
        row[:size].tobytes()
        for row, size in zip(multihost_utils.process_allgather(padded), sizes, strict=True)
    ]


def gather_json(value: Any) -> list[Any]:
    """JSON values of all hosts."""
    return [json.loads(each) for each in gather_bytes(json.dumps(value).encode())]


def check_shared(path: Path) -> None:
    """Raises ValueError unless every host sees a file that the first one wrote."""
    gather_json("written")
    if not all(gather_json(path.exists())):
        raise UserError(
            f"{path.parent} is not the same directory on every host: give --workdir on shared storage"
        )


def sum_over_hosts(counts: Mapping[str, float]) -> dict[str, float]:
    """The sum over hosts of each."""
    every = gather_json(counts)
    return {name: sum(each[name] for each in every) for name in counts}


def put_global(x: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """An array that every host has, on the devices of all of them; each puts the shards it holds."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])


def fetch_global(x: jax.Array) -> np.ndarray:
    """The other way: all of an array whose shards are spread over hosts. Every host gets it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    return multihost_utils.process_allgather(x, tiled=True)
