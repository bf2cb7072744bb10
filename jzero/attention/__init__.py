"""Attention behind one interface: `packed` for training, scoring and prefill, `paged` for decoding. XLA (xla.py) is the
definition; programs take a `Backend`, chosen once from their mesh."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.attention.xla import decode_kv, encode_kv, kv_storage, packed, paged, write

__all__ = ["decode_kv", "encode_kv", "kv_storage", "packed", "paged", "write"]


class Backend(NamedTuple):
    packed: Callable[..., jax.Array]  # (q, k, v, segments, layout)
    paged: Callable[..., jax.Array]  # (q, k_pool, v_pool, table, lengths, shared, KV heads)
    pool_rows: Callable[
        [int, int], tuple[int, int]
    ]  # (K, D) of a device -> (rows, width) of a token in its pools


MODULES = {
    "tpu": "tpu",
    "gpu": "gpu",
    "cuda": "gpu",
}  # platform of a mesh's devices -> its kernels; xla for any other


def choose(name: str, mesh: Mesh) -> Backend:
    """By the devices the programs are for, which need not be attached. name: config.Model.attention."""
    assert name in ("", "xla"), f"{name=}"
    name = name or MODULES.get(mesh.devices.flat[0].platform, "xla")
    kernels = importlib.import_module(f"jzero.attention.{name}")
    return Backend(kernels.packed, kernels.paged, kernels.pool_rows)


def split_over_mesh(
    packed: Callable, tensor: int, rows: tuple[str, ...] = (), mesh: Mesh | None = None
) -> Callable:
    """`packed` by shard_map, as nothing can split a kernel by itself: rows over the mesh axes `rows`, heads over tensor
    (KV heads that do not divide are repeated; query heads that do not are not split). mesh: None inside another."""

    def run(q, k, v, segments, layout):
        H, K = q.shape[2], k.shape[2]
        heads = "tensor" if H % tensor == 0 else None
        if heads:
            k, v = (jnp.repeat(x, math.lcm(K, tensor) // K, axis=2) for x in (k, v))
        spec = P(rows or None, None, heads)
        return jax.shard_map(
            partial(packed, layout=layout),
            mesh=mesh,
            in_specs=(spec, spec, spec, P(rows or None)),
            out_specs=spec,
            axis_names={*rows, "tensor"},
            check_vma=False,
        )(q, k, v, segments)

    return run
