"""Attention kernels with one interface and a backend for each kind of device.

    backend = attention.choose(config.model.attention, mesh)
    out = backend.packed(q, k, v, segments, layout)

`backend.py` defines the interface, `xla.py` is the reference implementation that the kernels of
`tpu.py` and `gpu.py` are tested against, and `pools.py` stores the KV cache. A program chooses its
backend once, by the devices of its mesh, and never branches on it. To add a backend, add an entry
to the table and choose it with `model.attention=mine`:

    attention.BACKENDS["mine"] = lambda: attention.Backend(packed, paged, pool_rows, write)

A backend can also have a fused decode function, which rotates, writes and attends in one call
(`backend.Decode`). Decoding then calls this function instead of `write` and `paged`.
"""

import functools
import importlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.attention.backend import Backend, Packed, Window, given
from jzero.attention.pools import (
    Pool,
    QuantizedPool,
    as_stored,
    decode_kv,
    encode_kv,
    kv_storage,
    number_of,
    scales_shape,
    write,
)
from jzero.errors import UserError
from jzero.hosts.platform import platform_of
from jzero.types import RowLayout


def shipped(module: str) -> Callable[[], Backend]:
    """Returns a function that imports the kernels of a module of this package lazily."""

    def load() -> Backend:
        kernels = importlib.import_module(f"jzero.attention.{module}")
        is_reference = module == "xla"
        return Backend(
            kernels.packed,
            kernels.paged,
            kernels.pool_rows,
            write,
            reads_8_bits=is_reference,
            has_windows=True,
            has_soft_cap=True,
            needs_width=module in ("tpu", "gpu"),
        )

    return load


def tpu_with_fused_decoding() -> Backend:
    """Returns the TPU's kernels with the fused kernel for a decode step."""
    from jzero.attention import tpu_decode

    backend = shipped("tpu")()
    return backend._replace(
        decode=tpu_decode.decode, reads_8_bits=True, has_windows=False, has_soft_cap=False
    )


# The values of model.attention. An entry is a function that returns the backend, so that Pallas and
# its kernels are imported only where they run.
BACKENDS: dict[str, Callable[[], Backend]] = {
    "xla": shipped("xla"),
    "tpu": shipped("tpu"),
    "gpu": shipped("gpu"),
    "exact": shipped("exact"),
    "tpu_fused": tpu_with_fused_decoding,
}

# The default backend of each platform (model.attention=""). CPUs use "xla".
PLATFORMS = {"tpu": "tpu", "gpu": "gpu"}
# For backends that run on only one platform: the platform's entry in PLATFORMS.
SAME_PLATFORM = {"tpu": "tpu", "gpu": "gpu", "tpu_fused": "tpu"}


def choose(
    name: str, mesh: Mesh, *, exact: bool = False, window: int = 0, soft_cap: float = 0.0
) -> Backend:
    """Returns the backend called `name`, or the default of the mesh's platform if `name` is "".

    exact: `config.model.exact`, which has a backend of its own, whatever `name` is.
    window: the tokens of the model's sliding windows; 0 for a model without windows.
    soft_cap: the bound of the model's scores (`xla.soft_capped`); 0 for a model without one.

    The devices of the mesh need not be attached: `jzero.plan` compiles for described devices.
    Raises UserError if `name` is unknown, if its kernels are for another platform, or if the model
    needs sliding windows or bounded scores and the kernels have none.
    """
    # By the mesh, and not by `lax.platform_dependent` inside of the programs: that traces every
    # branch, so that tiny CPU shapes would have to pass the checks of all kernels.
    platform = platform_of(mesh)
    name = "exact" if exact else name
    default = PLATFORMS.get(platform, "xla")
    _check_name(name, platform, default)
    backend = BACKENDS[name or default]()
    missing = "sliding windows" if window and not backend.has_windows else ""
    if soft_cap and not backend.has_soft_cap:
        missing = missing or "bounded scores"
    if missing:
        raise UserError(
            f"the attention kernels of model.attention={name or default} have no {missing}, "
            "which this model needs: leave model.attention out, or set model.attention=xla"
        )
    settings: dict[str, float] = {}
    if window and backend.needs_width:
        settings["width"] = window
    if soft_cap:
        settings["soft_cap"] = soft_cap
    return compiled_for(backend, **settings) if settings else backend


@functools.cache
def compiled_for(backend: Backend, **settings: float) -> Backend:
    """Returns a backend whose kernels are compiled for these settings of a model.

    width: tokens of a sliding window. soft_cap: the bound of scores.
    """
    # Cached, because programs are compiled again for another backend, and partials are not equal.
    packed: Callable[..., jax.Array] = backend.packed
    paged: Callable[..., jax.Array] = backend.paged
    return backend._replace(
        packed=functools.partial(packed, **settings), paged=functools.partial(paged, **settings)
    )


def _check_name(name: str, platform: str, default: str) -> None:
    if name and name not in BACKENDS:
        raise UserError(
            f"model.attention={name!r} is not one of {', '.join(BACKENDS)}: "
            'choose one of these, or "" for the kernels of the platform'
        )
    if name and SAME_PLATFORM.get(name, default) != default:
        raise UserError(
            f"model.attention={name} does not run on a device of platform {platform}: "
            'set model.attention=xla, or "" for the kernels of the platform'
        )


def split_over_mesh(
    kernel: Packed,
    tensor: int,
    rows: tuple[str, ...] = (),
    mesh: Mesh | None = None,
    parts: tuple[str, ...] = (),
) -> Packed:
    """Wraps `kernel` in shard_map, because XLA cannot partition a kernel by itself.

    Rows are split over the mesh axes `rows`, heads over the axis "tensor" of size `tensor`. KV
    heads are repeated until their number is divisible by `tensor`. If the number of query heads is
    not divisible by `tensor`, heads are not split.

    mesh: None inside another shard_map, which provides the mesh.
    parts: mesh axes that split q, k and v further, but not `segments` (context parallelism):
        `kernel` gets a part of the tokens of its rows and fetches the other tokens
        (`sharding.context`).
    """

    def packed(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array,
        layout: RowLayout,
        window: Window | None = None,
    ) -> jax.Array:
        H, K = q.shape[2], k.shape[2]
        heads = "tensor" if H % tensor == 0 else None
        if heads:
            # Every device needs the KV heads of its query heads.
            repeats = math.lcm(K, tensor) // K
            k = jnp.repeat(k, repeats, axis=2)
            v = jnp.repeat(v, repeats, axis=2)

        def on_device(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segments: jax.Array,
            *window: jax.Array,
        ) -> jax.Array:
            in_rows = Window(*window) if window else None
            return kernel(q, k, v, segments, layout, *given(in_rows))

        spec = P((*rows, *parts) or None, None, heads)
        row_spec = P(rows or None)
        window_arrays = () if window is None else tuple(window)
        window_specs = (P(), row_spec)[: len(window_arrays)]
        # All axes of the mesh, also one of slices, which the specs do not name.
        axes = {*rows, *parts, "tensor"} if mesh is None else set(mesh.axis_names)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(spec, spec, spec, row_spec, *window_specs),
            out_specs=spec,
            axis_names=axes,
            check_vma=False,
        )(q, k, v, segments, *window_arrays)

    return packed
