"""Attention of a decode step on backends that rotate, write and attend in one kernel.

`programs.decode_step` uses it if the backend has `Backend.decode`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jzero.errors import UserError
from jzero.model.layers import Attend, rotary
from jzero.rollout.decode_state import DecodeState, LayerCarry
from jzero.rollout.pages import SCRATCH_PAGE
from jzero.rollout.program_settings import ProgramSettings

# (function, in_specs, out_specs) -> the function, mapped over "tensor".
Split = Callable[[ProgramSettings, Callable, tuple, object], Callable]


def fused_attend(
    settings: ProgramSettings,
    state: DecodeState[jax.Array],
    table: Int[Array, "slots pages_per_slot"],
    shared_pages: Int[Array, " blocks"],
    split: Split,
) -> Attend:
    """Returns the attention of one decode step.

    split: maps a kernel over the devices of a shard, each with its own heads.

    Raises UserError for a model that rotates only a part of each head.
    """
    if settings.model.partial_rotary_factor != 1:
        raise UserError(
            "model.attention=tpu_fused rotates whole heads, and "
            f"{settings.model.model_type} a part of each: leave model.attention out"
        )
    decode = settings.attention.decode
    assert decode is not None
    # Computed once, because these values are the same in every layer.
    lengths = jnp.where(state.active, state.positions + 1, 1)
    table = jnp.where(state.active[:, None], table, SCRATCH_PAGE)
    shared_pages, owners = shared_pages_and_owners(shared_pages, state.active)
    cos, sin = full_rotary(settings, state.positions)

    pool_spec = P(settings.kv_axis)
    heads_spec = P(None, settings.kv_axis)
    pools_specs = (pool_spec, pool_spec)
    decode = split(
        settings,
        decode,
        (*[heads_spec] * 3, P(), P(), *pools_specs, *[P()] * 5),
        (heads_spec, *pools_specs),
    )

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: LayerCarry
    ) -> tuple[jax.Array, LayerCarry]:
        first_page = layer * settings.pages_per_shard
        pools = carry.k, carry.v
        out, k_pool, v_pool = decode(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            cos,
            sin,
            *pools,
            table,
            lengths,
            first_page,
            shared_pages,
            owners,
        )
        return out[:, None].astype(q.dtype), carry._replace(k=k_pool, v=v_pool)

    return attend


def shared_pages_and_owners(
    shared_pages: Int[Array, " blocks"], active: Bool[Array, " slots"]
) -> tuple[Int[Array, " blocks"], Int[Array, " blocks"]]:
    """Returns the number of pages that each block's slots share, and its first active slot.

    Slots are numbered within the shard. A block without active slots shares nothing.
    """
    # Slots end in the middle of a call, each at its own step. The kernel reads the pages of a block
    # through the row of its owner, so the owner must be a slot that has not ended.
    is_active = active.reshape(len(shared_pages), -1)
    slots_per_block = is_active.shape[1]
    first_slots = jnp.arange(len(shared_pages), dtype=jnp.int32) * slots_per_block
    owners = first_slots + jnp.argmax(is_active, axis=1).astype(jnp.int32)
    return jnp.where(is_active.any(axis=1), shared_pages, 0), owners


def full_rotary(
    settings: ProgramSettings, positions: Int[Array, " slots"]
) -> tuple[Float[Array, "slots D"], Float[Array, "slots D"]]:
    """Returns cosines and sines for both halves of a head, as `backend.Decode` requires."""
    rope = rotary(settings.model, positions[:, None])
    cos, sin = rope.cos[:, 0, 0], rope.sin[:, 0, 0]
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
