"""Attention behind one interface, with a backend for each kind of device.

    backend = attention.choose(config.model.attention, mesh)
    out = backend.packed(q, k, v, segments, layout)

`backend.py` defines what a backend's functions compute, `xla.py` is the definition that the kernels
of `tpu.py` and `gpu.py` are tested against, and `pools.py` stores keys and values. Programs choose
their backend once, by the devices of their mesh, and never branch on it. A backend of your own is
one more entry of the table, and `model.attention=mine` chooses it:

    attention.BACKENDS["mine"] = lambda: attention.Backend(packed, paged, pool_rows, write)

A backend may have one more function, which rotates, writes and attends in one call of a decode step
(`backend.Decode`); decoding then calls it instead of `write` and `paged`.
"""

import importlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.attention.backend import Backend, Packed
from jzero.attention.pools import (
    Pool,
    QuantizedPool,
    as_stored,
    decode_kv,
    encode_kv,
    kv_storage,
    scales_shape,
    write,
)
from jzero.errors import UserError
from jzero.types import RowLayout


def shipped(module: str) -> Callable[[], Backend]:
    """Returns a function that imports the kernels of a module of this package when it is called."""

    def load() -> Backend:
        kernels = importlib.import_module(f"jzero.attention.{module}")
        reads_int8 = module == "xla"
        return Backend(
            kernels.packed, kernels.paged, kernels.pool_rows, write, reads_int8=reads_int8
        )

    return load


def tpu_with_fused_decoding() -> Backend:
    """Returns the TPU's kernels, and the one that does all of a decode step's attention."""
    from jzero.attention import tpu_decode

    return shipped("tpu")()._replace(decode=tpu_decode.decode, reads_int8=True)


# The values of model.attention. An entry is a function that returns the backend, so that Pallas and
# its kernels are imported only where they run.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "xla": shipped("xla"),
    "tpu": shipped("tpu"),
    "gpu": shipped("gpu"),
    "exact": shipped("exact"),
    "tpu_fused": tpu_with_fused_decoding,
}

# The backend of each platform, where model.attention is empty. Every other platform has "xla".
# Devices that are described and not attached call CUDA "cuda".
PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
# The platform's default of backends that run on it alone.
SAME_PLATFORM = {"tpu": "tpu", "gpu": "gpu", "tpu_fused": "tpu"}


def choose(name: str, mesh: Mesh) -> Backend:
    """Returns the backend called `name`; "" is the one of the mesh's platform.

    The devices of the mesh need not be attached: `jzero.plan` compiles for described ones. Raises
    UserError where no backend has this name, and where its kernels are for another platform.
    """
    platform = mesh.devices.flat[0].platform
    default = PLATFORMS.get(platform, "xla")
    if not name:
        return BACKENDS[default]()
    if name not in BACKENDS:
        raise UserError(
            f"model.attention={name!r} is not one of {', '.join(BACKENDS)}: "
            'choose one of these, or "" for the kernels of the platform'
        )
    if SAME_PLATFORM.get(name, default) != default:
        raise UserError(
            f"model.attention={name} does not run on a device of platform {platform}: "
            'set model.attention=xla, or "" for the kernels of the platform'
        )
    return BACKENDS[name]()


def split_over_mesh(
    kernel: Packed,
    tensor: int,
    rows: tuple[str, ...] = (),
    mesh: Mesh | None = None,
    parts: tuple[str, ...] = (),
) -> Packed:
    """Returns packed attention by `kernel` under shard_map: XLA cannot split a kernel by itself.

    Rows are split over the mesh axes `rows`, heads over the axis "tensor" of size `tensor`. KV
    heads that do not divide by `tensor` are repeated until they do; query heads that do not divide
    are not split. mesh: None inside another shard_map, which has the mesh already.
    parts: mesh axes that split q, k and v further, but not `segments`: `kernel` is called with a
        part of the tokens of its rows, and has to fetch the others (`distributed.context`).
    """

    def packed(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, layout: RowLayout
    ) -> jax.Array:
        H, K = q.shape[2], k.shape[2]
        heads = "tensor" if H % tensor == 0 else None
        if heads:
            repeats = math.lcm(K, tensor) // K
            k = jnp.repeat(k, repeats, axis=2)
            v = jnp.repeat(v, repeats, axis=2)

        def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
            return kernel(q, k, v, segments, layout)

        spec = P((*rows, *parts) or None, None, heads)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(spec, spec, spec, P(rows or None)),
            out_specs=spec,
            axis_names={*rows, *parts, "tensor"},
            check_vma=False,
        )(q, k, v, segments)

    return packed
