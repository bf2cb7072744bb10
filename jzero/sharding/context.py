"""Context parallelism (Ulysses): several devices share the tokens of every row of an update.

Without it, a row, for example of 32,768 tokens, is the smallest unit that a device can hold. With
mesh.context = c, every row is cut into c parts of neighboring tokens, one for each of c devices.
All of a layer except its attention treats every token independently, so there the parts act as
separate rows. Attention needs full sequences, but treats every head independently. So the devices
exchange data before attention: each device sends most heads of its tokens and receives the other
tokens of its heads. After attention they exchange back (Jacobs et al. 2023, arXiv:2309.14509). Each
device sends (c - 1) / c of its queries, keys, values and outputs, for any row length.

    parts = to_parts(x, mesh)          # [B, T, ...] -> [B * c, part, ...]
    x = to_rows(parts, mesh, T)        # back

The parts of one device are neighbors: if a device has b rows, the b first parts of these rows come
first, on the first device of its context, then the b second parts.

Dimension letters: B rows of a microbatch   T tokens of a row   c devices that share a row
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jzero.attention.backend import Packed, Window, given
from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.delta_net import DeltaInputs, recur_packed
from jzero.sharding.mesh import (
    ROW_AXES,
    context_shards,
    row_shards_of_slice,
    token_axes,
)
from jzero.types import RowLayout


def check_context_axis(mesh: Mesh, model: QwenConfig) -> None:
    """Raises UserError if the devices that share a row cannot share its heads evenly."""
    context, tensor = context_shards(mesh), mesh.shape["tensor"]
    for kind, heads in heads_to_share(model, tensor).items():
        if heads % context:
            per_device = f" on each of mesh.tensor={tensor} devices" if tensor > 1 else ""
            raise UserError(
                f"mesh.context={context} does not divide the model's {heads} {kind}{per_device}; "
                "set it to one of their divisors"
            )


def heads_to_share(model: QwenConfig, tensor: int) -> dict[str, int]:
    """Returns the heads on a device that context parallelism has to split evenly, by kind.

    tensor: the devices that split the query heads.
    """
    heads = {"query heads": model.num_attention_heads // tensor}
    if model.delta_net is not None:
        heads["key heads of a gated delta net"] = model.delta_net.num_key_heads
    return heads


# -- rows and their parts --------------------------------------------------------------------------


def to_parts(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Cuts rows [B, T, ...] into parts [B * c, part, ...]. The last part is padded with zeros.

    Afterwards every device holds only its own parts.
    """
    context, shards = context_shards(mesh), row_shards_of_slice(mesh)
    B, T, *trailing = x.shape
    missing = -T % context
    padding = [(0, 0), (0, missing)] + [(0, 0)] * len(trailing)
    # [shards, b, c, part] -> [shards, c, b, part]: the parts of one device become neighbors.
    parts = jnp.pad(x, padding).reshape(shards, B // shards, context, -1, *trailing)
    parts = parts.swapaxes(1, 2).reshape(B * context, -1, *trailing)
    return lax.with_sharding_constraint(parts, NamedSharding(mesh, P(token_axes(mesh))))


def to_rows(parts: jax.Array, mesh: Mesh, tokens: int) -> jax.Array:
    """Joins parts [B * c, part, ...] to rows [B, tokens, ...], replicated over the c devices."""
    context, shards = context_shards(mesh), row_shards_of_slice(mesh)
    num_parts, part, *trailing = parts.shape
    B = num_parts // context
    rows = parts.reshape(shards, context, B // shards, part, *trailing).swapaxes(1, 2)
    rows = rows.reshape(B, context * part, *trailing)[:, :tokens]
    return lax.with_sharding_constraint(rows, NamedSharding(mesh, P(ROW_AXES)))


# -- the exchange ----------------------------------------------------------------------------------
# These functions run per device, under shard_map.


def tokens_for_heads(x: jax.Array, tokens: int) -> jax.Array:
    """Sends heads and receives tokens: [b, part, heads, D] -> [b, tokens, heads / c, D]."""
    rows = lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)
    return rows[:, :tokens]


def heads_for_tokens(x: jax.Array, part: int, context: int) -> jax.Array:
    """Sends tokens and receives heads: [b, tokens, heads / c, D] -> [b, part, heads, D]."""
    missing = context * part - x.shape[1]
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
    return lax.all_to_all(jnp.pad(x, padding), "context", split_axis=1, concat_axis=2, tiled=True)


def attend_to_all_tokens(kernel: Packed, context: int) -> Packed:
    """Returns packed attention over parts of rows, from a `kernel` for full rows.

    q, k and v are [b, part, heads, D]; `segments`, the layout and the window describe full rows.
    """

    def packed(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Int[Array, "b T"],
        layout: RowLayout,
        window: Window | None = None,
    ) -> jax.Array:
        part, K = k.shape[1:3]
        # KV heads are repeated until every device has at least one.
        repeats = math.lcm(K, context) // K
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        q, k, v = (tokens_for_heads(x, layout.tokens) for x in (q, k, v))
        out = kernel(q, k, v, segments, layout, *given(window))
        return heads_for_tokens(out, part, context)

    return packed


def recur_over_all_tokens(
    inputs: DeltaInputs,
    segments: Int[Array, "B T"],
    layout: RowLayout,
    mesh: Mesh,
) -> jax.Array:
    """Computes gated delta nets for parts of rows: each device handles some heads of full rows.

    The inputs are parts [B * c, part, ...], and `segments` describes full rows. The result is
    [B * c, part, H, V].
    """
    context, sizes = context_shards(mesh), inputs.sizes
    # After the exchange, each device has 1 / c of the heads.
    local_sizes = replace(
        sizes,
        num_key_heads=sizes.num_key_heads // context,
        num_value_heads=sizes.num_value_heads // context,
    )

    # Channels are the heads of q, k and v in a row. The exchange needs separate heads.
    def in_heads(channels: jax.Array) -> list[jax.Array]:
        """[..., C] -> q and k [..., G, K] and v [..., H, V]"""
        keys = sizes.num_key_heads * sizes.key_dim
        kinds = jnp.split(channels, (keys, 2 * keys), axis=-1)
        dims = (sizes.key_dim, sizes.key_dim, sizes.value_dim)
        return [
            kind.reshape(*kind.shape[:-1], -1, dim) for kind, dim in zip(kinds, dims, strict=True)
        ]

    def in_channels(heads: list[jax.Array]) -> jax.Array:
        return jnp.concatenate([x.reshape(*x.shape[:-2], -1) for x in heads], axis=-1)

    def local_heads(x: jax.Array) -> jax.Array:
        """[W, heads, D] -> [W, heads / c, D]"""
        number = x.shape[1] // context
        return lax.dynamic_slice_in_dim(x, lax.axis_index("context") * number, number, axis=1)

    def on_device(
        channels: jax.Array,
        kernel: jax.Array,
        log_decay: jax.Array,
        strength: jax.Array,
        segments: jax.Array,
    ) -> jax.Array:
        # The kernel is replicated, so each device takes the part for its heads. All other inputs
        # are exchanged.
        T = layout.tokens
        parts = [tokens_for_heads(x, T) for x in in_heads(channels)]
        local_channels = in_channels(parts)
        taps = [local_heads(x) for x in in_heads(kernel.T)]
        local = DeltaInputs(
            channels=local_channels,
            kernel=in_channels(taps).T,
            log_decay=tokens_for_heads(log_decay, T),
            strength=tokens_for_heads(strength, T),
            sizes=local_sizes,
        )
        out = recur_packed(local, segments, layout)
        return heads_for_tokens(out, channels.shape[1], context)

    parts_spec, rows_spec = P(token_axes(mesh)), P(ROW_AXES)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(parts_spec, P(), parts_spec, parts_spec, rows_spec),
        out_specs=parts_spec,
        check_vma=False,
    )(inputs.channels, inputs.kernel, inputs.log_decay, inputs.strength, segments)
