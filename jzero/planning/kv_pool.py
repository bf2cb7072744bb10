"""Sizes the KV cache: as many pages as fit into the free memory.

The cache never needs more pages than all slots at full length. Most sequences are shorter, and the
scheduler preempts the youngest sequence when pages run out. Fewer pages therefore only slow down
decoding once many sequences are long: the tokens are the same.

    CPU           a share of the free memory when the run starts (CPU_SHARE)
    accelerators  the memory that the plan leaves on a device while responses are sampled; a run
                  with less than SMALLEST_SHARE of the full size is rejected

rollout.num_pages overrides the number of pages. A resumed run keeps its original size
(`run.kv_pool`), because a preempted sequence continues from a prefill, and the keys and values of a
prefill may differ from decoding in the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jzero import terminal
from jzero.blueprint import Blueprint, Trains
from jzero.config import MemoryConfig, ModelConfig, RolloutConfig
from jzero.decoder.engine import Engine
from jzero.errors import UserError
from jzero.hosts import collectives, processes
from jzero.hosts.platform import platform_of
from jzero.model.architecture import SLIDING
from jzero.numerics.sizes import divide_up
from jzero.planning import host_memory
from jzero.planning.arithmetic import sampling_bytes
from jzero.planning.chips import GIB
from jzero.planning.fitting import attached_bytes
from jzero.planning.planned_run import pages_that_fit, pool_bytes
from jzero.sharding.mesh import num_decoders

CPU_SHARE = 1 / 8  # of the free memory: trainer, graders and other programs also need memory


@dataclass(frozen=True)
class Room:
    """The bytes available for the KV cache of one device, and the reason."""

    bytes: float
    reason: str  # "an eighth of the 20.1 GiB that are free"
    most_bytes: float  # the limit for rollout.num_pages


def with_pages(
    blueprint: Blueprint[Trains], room: Room | None, recorded_pages: int = 0, longest: int = 0
) -> Blueprint[Trains]:
    """Returns a blueprint whose decoder has the KV cache pages that fit. See `size_pool`."""
    rollout = blueprint.sampling.rollout
    return blueprint.with_rollout(
        size_pool(rollout, blueprint.decoder, room, recorded_pages, longest)
    )


def size_pool(
    rollout: RolloutConfig,
    engine: Engine,
    room: Room | None,
    recorded_pages: int = 0,
    longest: int = 0,
) -> RolloutConfig:
    """Returns the rollout settings with the final rollout.num_pages, and prints a line about them.

    Every process has to call this function: all hosts use the size of the host with the least
    memory.

    Args:
        engine: the decoder with the pages that `rollout` requests. It has no device state.
        room: `room_in_run` or `room_of_decoder`.
        recorded_pages: the pages per shard with which the run started; 0 for a new run.
        longest: the most tokens that a sequence can have, where its prompt is known; 0: unknown.

    Raises:
        UserError: rollout.num_pages, or one sequence of full length, does not fit.
    """
    pages, reason = choose_pages(rollout, engine, room, longest)
    # A resumed run has its original size, unless its settings ask for less.
    if recorded_pages:
        full = engine.pages_per_shard - 1
        pages, reason = min(full, recorded_pages), "the size that the run began with"
    # All hosts use the size of the host with the least memory.
    pages = min(collectives.gather_json(pages))
    processes.print_once(terminal.wrapped(describe(engine, pages, reason, longest)))
    return replace(rollout, num_pages=_all_pages(engine, pages))


def choose_pages(
    rollout: RolloutConfig, engine: Engine, room: Room | None, longest: int = 0
) -> tuple[int, str]:
    """Returns the pages for the sequences of each shard, and the reason for their number.

    It takes the same arguments as `size_pool`, and raises the same errors.
    """
    full = engine.pages_per_shard - 1  # one page is for idle slots
    if room is None:
        pages, reason = full, "the memory of a device is not known"
    elif rollout.num_pages:
        # An explicit rollout.num_pages is used as it is, or rejected.
        if pool_bytes(engine, full) > room.most_bytes:
            raise UserError(
                f"rollout.num_pages={rollout.num_pages} takes "
                f"{pool_bytes(engine, full) / GIB:.1f} GiB on a device, and there are "
                f"{room.most_bytes / GIB:.1f} GiB: set it to at most "
                f"{_all_pages(engine, pages_that_fit(engine, room.most_bytes))}, or to 0"
            )
        pages, reason = full, "rollout.num_pages"
    else:
        # As many pages as fit, but at least enough for one sequence of full length.
        pages = min(full, max(pages_that_fit(engine, room.bytes), engine.pages_per_slot))
        reason = room.reason
        if longest:
            # One sequence of full length has to fit nevertheless.
            needed = engine.slots_per_shard * divide_up(longest, engine.settings.page_size)
            pages = min(pages, max(needed, engine.pages_per_slot))
        if pool_bytes(engine, pages) > room.most_bytes:
            raise UserError(
                f"rollout.max_new_tokens={rollout.max_new_tokens}: the KV cache of one "
                f"sequence of {engine.max_sequence_tokens} tokens takes "
                f"{pool_bytes(engine, pages) / GIB:.1f} GiB on a device, and there are "
                f"{room.most_bytes / GIB:.1f} GiB: lower it"
            )
    return pages, reason


def with_full_pool(blueprint: Blueprint[Trains]) -> Blueprint[Trains]:
    """Returns a blueprint with pages for every slot at full length: nothing is preempted.

    Its rollout.num_pages is 0 so far.
    """
    rollout, engine = blueprint.sampling.rollout, blueprint.decoder
    assert not rollout.num_pages, f"{rollout.num_pages=}"
    num_pages = _all_pages(engine, engine.pages_per_shard - 1)
    return blueprint.with_rollout(replace(rollout, num_pages=num_pages))


def _all_pages(engine: Engine, pages: int) -> int:
    """Returns the rollout.num_pages that gives every shard of every decoder this many pages."""
    return max(0, pages) * engine.num_shards * num_decoders(engine.mesh)


def describe(engine: Engine, pages: int, reason: str, longest: int = 0) -> str:
    """Returns a line with the size of the KV cache, its capacity, and the reason for its size.

    longest: as in `size_pool`.
    """
    shards = engine.num_shards
    page_size = engine.settings.page_size
    tokens = pages * page_size * shards
    pages_per_slot = divide_up(longest, page_size) if longest else engine.pages_per_slot
    sequences = min(pages // pages_per_slot, engine.slots_per_shard) * shards
    slots = engine.slots_per_shard * shards
    is_full = pages >= engine.slots_per_shard * pages_per_slot
    holds = f"all {slots}" if is_full else f"{sequences} of {slots}"
    why = f" ({reason}; rollout.num_pages sets it)"
    if reason == "rollout.num_pages":
        why = f" (rollout.num_pages={engine.settings.num_pages})"
    if is_full and not engine.settings.num_pages:
        # The full size needs no explanation.
        why = ", the longest that there are" if longest else ""
    devices = f"each of {shards} devices" if shards > 1 else "the device"
    if engine.program_settings.tensor > 1:
        devices = f"each of {engine.mesh.size} devices"
    return (
        f"KV cache: {_size(pool_bytes(engine, pages))} on {devices}, {tokens} tokens, "
        f"{holds} slots at {longest or engine.max_sequence_tokens} tokens{why}"
        f"{_describe_rings(engine, pages)}"
    )


def _size(size: float) -> str:
    """Returns bytes as "1.50 GiB", or as "3.1 MiB" where that would be 0.00 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _describe_rings(engine: Engine, pages: int) -> str:
    """Returns what layers with a sliding window keep; "" for a model without windows."""
    model = engine.model
    if not model.sliding_window:
        return ""
    num_layers = f"{len(model.layers_of(SLIDING))} of {len(model.attention_layers)} layers"
    rings = engine.rings_of(pages + 1)
    if rings is None:
        return f"; {num_layers} have a window of {model.sliding_window} tokens, and keep all tokens"
    tokens = rings.pages * engine.settings.page_size
    return f"; {num_layers} keep only the newest {tokens} tokens of each slot"


def room_in_run(
    memory: MemoryConfig,
    engine: Engine,
    fitting_pages: Callable[[], int | None],
) -> Room | None:
    """Returns the room for the KV cache of a training run; None if the device memory is unknown.

    fitting_pages: the rollout.num_pages with which the planned run fits (`fitting.fitting_pages`).
    """
    available = attached_bytes(memory)
    if _shares_host_memory(engine, available):
        return _room_on_host()
    num_pages = fitting_pages()
    if available is None or num_pages is None:
        return None
    # The plan covers sampling and training together.
    shards = engine.num_shards * num_decoders(engine.mesh)
    pages = divide_up(num_pages, shards) or engine.pages_per_shard - 1
    return _planned_room(pool_bytes(engine, pages), available)


def room_of_decoder(memory: MemoryConfig, engine: Engine, compute: ModelConfig) -> Room | None:
    """Returns the room for the KV cache of a command that does not train; None if unknown."""
    available = attached_bytes(memory)
    if _shares_host_memory(engine, available):
        return _room_on_host()
    if available is None:
        return None
    # The weights and the temporaries of sampling are the only other arrays.
    return _planned_room(available - sampling_bytes(compute, engine), available)


def _shares_host_memory(engine: Engine, available: float | None) -> bool:
    return available is None and platform_of(engine.mesh) == "cpu"


def _room_on_host() -> Room:
    # CPU devices share the free memory of the host.
    devices = len(jax.local_devices())
    free = host_memory.free_bytes()
    reason = f"{CPU_SHARE:g} of the {free / GIB:.1f} GiB that are free"
    return Room(CPU_SHARE * free / devices, reason, host_memory.total_bytes() / devices)


def _planned_room(size: float, available: float) -> Room:
    return Room(size, f"the plan leaves {size / GIB:.1f} of {available / GIB:.1f} GiB", size)
