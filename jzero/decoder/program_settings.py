"""The compile-time constants of the decoder's programs, derived from the config and the mesh."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jzero import attention
from jzero.config import RolloutConfig
from jzero.decoder import drafts, sampling
from jzero.decoder.rings import Rings
from jzero.errors import UserError
from jzero.model import experts, qwen
from jzero.model.arithmetic import PLAIN, Arithmetic
from jzero.model.arithmetic import choose as choose_arithmetic
from jzero.tokens import TRACKS, Measure, TrackShapes

# On these TPUs the on-chip memory (VMEM) does not hold the logits of all slots, so XLA keeps them
# in HBM. The logits are therefore computed for one part of the vocabulary after the other. On GPUs
# every part would be one more copy, and with tensor > 1 a device has few columns anyway.
KINDS_WITH_SMALL_VMEM = ("TPU v5", "TPU7x")  # v5p reports "TPU v5"


@dataclass(frozen=True)
class ProgramSettings:
    """All constants that the programs are compiled with."""

    model: qwen.QwenConfig
    dtype: jnp.dtype  # of weights and activations
    attention: attention.Backend
    kv_storage: DTypeLike  # element type of the pools
    kv_heads: int  # in prefixes and pools: the model's, or one for each device of a shard
    kv_axis: str | None  # the mesh axis that KV heads are split over; None: replicated
    logits_axis: str  # the mesh axis that logits are split over while sampling; "": none
    vocabulary_parts: tuple[slice, ...]  # logits are computed for one part after the other
    filters: sampling.Filters
    # Whether every slot has its own filters, and a call its own number of steps, as data
    # (`decode_state.Choices`). `filters` is then not used.
    has_choices: bool
    stop_ids: tuple[int, ...]  # tokens that end a response
    max_turns: int
    slots_per_shard: int
    # Of a layer that keeps all pages, including the scratch page.
    pages_per_shard: int
    page_size: int  # tokens
    decode_steps: int  # steps of one call of `generate`
    tensor: int  # devices that share a shard
    experts: experts.Placement  # how the devices of a shard share the experts of an MoE model
    tracks: TrackShapes = ()  # the optional tracks to return for every token
    arithmetic: Arithmetic = PLAIN
    sample: Callable[..., tuple[jax.Array, jax.Array]] = sampling.sample  # or `sample_exactly`
    drafting: drafts.Drafting | None = None  # the numbers of rollout.draft
    rings: Rings | None = None  # of layers with a sliding window; None: they keep all pages

    @property
    def drafts_by_head(self) -> bool:
        """Whether drafts come from the model's own head (rollout.draft=mtp)."""
        return self.drafting is not None and self.drafting.by_head

    def records(self, name: str) -> bool:
        """Returns whether the programs return a track."""
        return name in dict(self.tracks)

    @property
    def remembers_routes(self) -> bool:
        """Whether the programs return the MoE routes of the input of every token."""
        return self.records("routes")

    @property
    def sampled_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one token's value of every returned track that is not of inputs."""
        optional = {name: size for name, size in self.tracks if not TRACKS[name].is_of_input}
        return {"ids": (), "logps": ()} | optional

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one input's value of every returned track of inputs."""
        return {name: size for name, size in self.tracks if TRACKS[name].is_of_input}

    @property
    def measures(self) -> dict[str, Measure]:
        """The tracks that are functions of the logits."""
        return {name: m for name, _ in self.tracks if (m := TRACKS[name].measure) is not None}


def make_program_settings(
    *,
    model: qwen.QwenConfig,
    settings: RolloutConfig,
    mesh: Mesh,
    stop_ids: tuple[int, ...],
    dtype: jnp.dtype,
    attention_name: str,
    slots_per_shard: int,
    pages_per_shard: int,
    rings: Rings | None,
    exact: bool = False,
    tracks: TrackShapes = (),
) -> ProgramSettings:
    """Chooses kernels, and splits heads and logits over `mesh`. See `Engine` for arguments."""
    device = mesh.devices.flat[0]
    tensor = mesh.shape["tensor"]
    filters = sampling.Filters(settings.top_k, settings.top_p, settings.min_p)
    may_split = may_split_logits(filters, tracks, exact)
    logits_axis, vocabulary_parts = split_logits(may_split, model.vocab_size, mesh)

    # With fewer KV heads than devices, several devices store the same head.
    kv_heads = model.num_key_value_heads
    if repeats_heads(model, tensor):
        kv_heads = tensor

    backend = attention.choose(
        attention_name,
        mesh,
        exact=exact,
        window=model.sliding_window,
        soft_cap=model.attn_logit_softcapping,
    )
    if settings.quantizes_kv and not backend.reads_8_bits:
        raise UserError(
            f"rollout.kv_dtype={settings.kv_dtype}: the attention kernels of platform "
            f"{device.platform} do not support an 8-bit KV cache; set rollout.kv_dtype=bfloat16, "
            "or model.attention=xla, or on TPUs model.attention=tpu_fused"
        )

    if settings.draft is not None:
        drafts.check(backend)

    return ProgramSettings(
        model=model,
        dtype=dtype,
        attention=backend,
        kv_storage=attention.kv_storage(settings.kv_dtype, device.platform),
        kv_heads=kv_heads,
        kv_axis="tensor" if kv_heads % tensor == 0 else None,
        logits_axis=logits_axis,
        vocabulary_parts=vocabulary_parts,
        filters=filters,
        has_choices=False,
        stop_ids=tuple(stop_ids),
        max_turns=settings.max_turns,
        slots_per_shard=slots_per_shard,
        pages_per_shard=pages_per_shard,
        page_size=settings.page_size,
        decode_steps=settings.decode_steps,
        tensor=tensor,
        experts=experts.decoding_placement(mesh),
        tracks=tracks,
        arithmetic=choose_arithmetic(exact, mesh),
        sample=sampling.sample_exactly if exact else sampling.sample,
        drafting=drafts.numbers_of(settings.draft),
        rings=rings,
    )


def repeats_heads(model: qwen.QwenConfig, tensor: int) -> bool:
    """Returns whether each of `tensor` devices has one of fewer KV heads, with its query heads."""
    heads = model.num_key_value_heads
    return heads < tensor and tensor % heads == 0 and model.num_attention_heads % tensor == 0


def with_choices(program_settings: ProgramSettings, mesh: Mesh) -> ProgramSettings:
    """Returns the program settings of the same decoder with filters as data."""
    axis, parts = split_logits(False, program_settings.model.vocab_size, mesh)
    return replace(program_settings, has_choices=True, logits_axis=axis, vocabulary_parts=parts)


def may_split_logits(filters: sampling.Filters, tracks: TrackShapes, exact: bool) -> bool:
    """Returns whether the logits of a slot may be on several devices, or in several parts."""
    # A filter needs all logits of a slot, and so does the softmax of model.exact.
    is_measured = any(TRACKS[name].measure is not None for name, _ in tracks)
    return filters.allow_all and not exact and not is_measured


def split_logits(may_split: bool, vocab_size: int, mesh: Mesh) -> tuple[str, tuple[slice, ...]]:
    """Returns the mesh axis that logits are split over, and the parts of the vocabulary."""
    tensor = mesh.shape["tensor"]
    splits_logits = may_split and tensor > 1 and vocab_size % tensor == 0
    has_small_vmem = mesh.devices.flat[0].device_kind in KINDS_WITH_SMALL_VMEM
    makes_parts = may_split and tensor == 1 and has_small_vmem
    part_size = sampling.PART if makes_parts else vocab_size
    part_starts = range(0, vocab_size, part_size)
    part_ends = [min(start + part_size, vocab_size) for start in part_starts]
    return "tensor" if splits_logits else "", tuple(map(slice, part_starts, part_ends))


def with_filters(
    program_settings: ProgramSettings,
    filters: sampling.Filters,
    mesh: Mesh,
) -> ProgramSettings:
    """Returns the program settings of the same decoder with other filters."""
    # The decoder's state does not depend on the filters, so both programs can work on one state.
    exact = program_settings.arithmetic.is_exact
    may_split = may_split_logits(filters, program_settings.tracks, exact)
    axis, parts = split_logits(may_split, program_settings.model.vocab_size, mesh)
    return replace(program_settings, filters=filters, logits_axis=axis, vocabulary_parts=parts)
