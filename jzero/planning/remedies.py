"""What makes a run smaller: one ordered table, which recipes, `jzero train`, `jzero plan` and the
Tinker server read.

A remedy changes settings so that a run needs less memory in some of its phases, and costs
something: speed, or another training. `fitting.shrink` takes the cheapest first, until the run
fits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from jzero import config
from jzero.config import Config
from jzero.planning.planned_run import PlannedRun
from jzero.sharding.context import heads_to_share
from jzero.sharding.mesh import context_shards, row_shards

SHORTEST_RESPONSE = 256  # tokens: advice never makes responses shorter than this

# Phases of a step, as the planner counts them.
PUBLISH, ROLLOUT, SCORE, UPDATE = "publish", "rollout", "score", "update"


class PackedRows(Protocol):
    """The part of a described run, or of a server that trains, that sizes its microbatches."""

    @property
    def row_tokens(self) -> int:
        """Tokens of the smallest microbatch, over all devices."""
        ...

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of the longest microbatch, over all devices."""
        ...


# What is described: a PlannedRun, or another program that trains, such as a Tinker server.
Described = TypeVar("Described", contravariant=True)


@dataclass(frozen=True)
class Remedy(Generic[Described]):
    """A change of settings that saves memory."""

    # Returns changed settings, or None if there is nothing left to change.
    change: Callable[[Config, Described], Config | None]
    settings: tuple[str, ...]  # that it changes
    costs: str
    phases: tuple[str, ...]  # in which it saves memory


def engine_slots(run: PlannedRun) -> int:
    """Returns the sequences that all hosts decode at the same time."""
    return run.engine.max_concurrent_decodes * run.num_decoders


def recompute_layers(settings: Config, run: PlannedRun) -> Config | None:
    """Saves only the inputs of layers for the backward pass."""
    if settings.model.remat == "full":
        return None
    return replace(settings, model=replace(settings.model, remat="full"))


def smaller_microbatches(settings: Config, run: PackedRows) -> Config | None:
    """Halves the rows of a microbatch, down to one on each device."""
    least = run.row_tokens
    fewer = run.microbatch_tokens // least // 2 * least
    return _with_train(settings, microbatch_tokens=fewer) if fewer else None


def shorter_rows(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the packs of a row, which also halves the smallest possible microbatch."""
    train = settings.train
    if min(train.packs_per_row, run.trainer.layouts[0].slots) < 2 or settings.sft is not None:
        return None
    packs = min(train.packs_per_row, run.trainer.layouts[0].slots) // 2
    pack = longest_pack(settings)
    tokens = row_shards(run.mesh) * (settings.rollout.max_prompt_tokens + packs * pack)
    return _with_train(settings, packs_per_row=packs, microbatch_tokens=tokens)


def longest_pack(settings: Config) -> int:
    """Returns the tokens of the longest pack."""
    lengths = settings.train.pack_lengths
    return lengths[0] if lengths else settings.rollout.longest_continuation


def fewer_slots(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the slots, or the pages if rollout.num_pages is set."""
    rollout, engine = settings.rollout, run.sampling
    if engine is None:
        return None
    if rollout.num_pages:
        # Every shard needs at least the pages of one full sequence.
        pages = rollout.num_pages // 2
        enough = engine.num_shards * run.num_decoders * engine.pages_per_slot
        return _with_rollout(settings, num_pages=pages) if pages >= enough else None
    if engine.slots_per_shard < 2:
        return None
    num_slots = min(rollout.num_slots or engine_slots(run), engine_slots(run))
    return _with_rollout(settings, num_slots=num_slots // 2)


def train_an_adapter(settings: Config, run: PlannedRun) -> Config | None:
    """Freezes the model and trains an adapter on it, with an adapter's learning rate."""
    if settings.model.adapter.rank:
        return None
    adapter = replace(settings.model.adapter, rank=config.ADAPTER_RANK)
    # Formatting with :g removes floating-point noise from the flag that is printed.
    lr = config.ADAPTER_LR_FACTOR * settings.optimizer.lr
    return replace(
        settings,
        model=replace(settings.model, adapter=adapter),
        optimizer=replace(settings.optimizer, lr=float(f"{lr:g}")),
    )


def quantize_base(settings: Config, run: PlannedRun) -> Config | None:
    """Quantizes the linear layers of an adapter's base to int8."""
    if not settings.model.adapter.rank or settings.model.is_base_quantized:
        return None
    return replace(settings, model=replace(settings.model, base="int8"))


def offload_optimizer(settings: Config, run: PlannedRun) -> Config | None:
    """Keeps Adam's moments on the hosts while responses are sampled and scored."""
    # Fine-tuning has no phase in which the moments could be away.
    if settings.optimizer.offload or settings.sft is not None:
        return None
    return replace(settings, optimizer=replace(settings.optimizer, offload=True))


def shorter_responses(settings: Config, run: PlannedRun) -> Config | None:
    """Halves the longest response, and shortens the packed rows to match."""
    rollout = settings.rollout
    tokens = rollout.max_new_tokens // 2
    # With max_episode_tokens the length of an episode does not depend on the length of a response.
    if settings.sft is not None or rollout.max_episode_tokens or tokens < SHORTEST_RESPONSE:
        return None
    shorter = _with_rollout(settings, max_new_tokens=tokens)
    if lengths := settings.train.pack_lengths:
        halves = ",".join(str(length // 2) for length in lengths)
        shorter = replace(shorter, train=replace(shorter.train, pack=halves))
    # A microbatch keeps its number of rows, which become shorter.
    rows = run.microbatch_tokens // run.row_tokens
    packs = max(1, settings.train.packs_per_row)
    pack = longest_pack(shorter)
    row = rollout.max_prompt_tokens + packs * pack
    return _with_train(shorter, microbatch_tokens=rows * row_shards(run.mesh) * row)


def split_state(settings: Config, run: PlannedRun) -> Config | None:
    """Shards the weights over all devices (fsdp) instead of replicating them over "data"."""
    if run.mesh.shape["data"] == 1:
        return None
    return replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1))


def split_layers(settings: Config, run: PlannedRun) -> Config | None:
    """Doubles tensor parallelism, which splits heads and KV cache pages over twice the devices."""
    tensor = 2 * run.mesh.shape["tensor"]
    if run.trainer.policy.model.num_key_value_heads % tensor:
        return None
    # The devices of a decoder are used in groups of `tensor`.
    if run.mesh.size // run.num_decoders % tensor or run.mesh.shape["fsdp"] % 2:
        return None
    # fsdp=-1 takes what the other axes leave: half as many devices get separate rows.
    return replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1, tensor=tensor))


def split_rows(settings: Config, run: PlannedRun) -> Config | None:
    """Doubles context parallelism (Ulysses), and halves the rows of a microbatch."""
    mesh, model = run.mesh, run.trainer.policy.model
    context = 2 * context_shards(mesh)
    shared = heads_to_share(model, mesh.shape["tensor"]).values()
    if settings.model.exact or mesh.shape["fsdp"] % 2 or any(heads % context for heads in shared):
        return None
    # Devices of the context axis come out of fsdp, so half as many rows are computed at the same
    # time.
    changed = replace(settings, mesh=replace(settings.mesh, data=1, fsdp=-1, context=context))
    return _with_train(changed, microbatch_tokens=run.microbatch_tokens // 2)


def _with_train(settings: Config, **changes: int) -> Config:
    return replace(settings, train=replace(settings.train, **changes))


def _with_rollout(settings: Config, **changes: int) -> Config:
    return replace(settings, rollout=replace(settings.rollout, **changes))


# -- the table -------------------------------------------------------------------------------------

RECOMPUTE_LAYERS = Remedy(
    recompute_layers,
    ("model.remat",),
    "a second forward pass through each layer in the update",
    (UPDATE,),
)
FEWER_SLOTS = Remedy(
    fewer_slots,
    ("rollout.num_slots", "rollout.num_pages"),
    "more decode calls for the same responses",
    (ROLLOUT,),
)
SMALLER_MICROBATCHES = Remedy(
    smaller_microbatches,
    ("train.microbatch_tokens",),
    "smaller matrix products; other last bits of a sum",
    (SCORE, UPDATE),
)
SPLIT_STATE = Remedy(
    split_state,
    ("mesh.data", "mesh.fsdp"),
    "every layer's weights are gathered in every pass",
    (PUBLISH, ROLLOUT, SCORE, UPDATE),
)
SHORTER_ROWS = Remedy(
    shorter_rows,
    ("train.packs_per_row", "train.microbatch_tokens"),
    "prompts are computed more often: fewer responses share one",
    (SCORE, UPDATE),
)
SPLIT_LAYERS = Remedy(
    split_layers,
    ("mesh.tensor", "mesh.data", "mesh.fsdp"),
    "two exchanges between devices in every layer, also in decoding",
    (PUBLISH, ROLLOUT, SCORE, UPDATE),
)
OFFLOAD_OPTIMIZER = Remedy(
    offload_optimizer,
    ("optimizer.offload",),
    "the optimizer's state crosses to the host and back in every step",
    (PUBLISH, ROLLOUT, SCORE),
)
TRAIN_AN_ADAPTER = Remedy(
    train_an_adapter,
    ("model.adapter.rank", "optimizer.lr"),
    "another training: only an adapter learns",
    (PUBLISH, ROLLOUT, SCORE, UPDATE),
)
QUANTIZE_BASE = Remedy(
    quantize_base,
    ("model.base",),
    "rounded weights under the adapter",
    (PUBLISH, ROLLOUT, SCORE, UPDATE),
)
SPLIT_ROWS = Remedy(
    split_rows,
    ("mesh.context", "mesh.data", "mesh.fsdp", "train.microbatch_tokens"),
    "two exchanges of activations in every layer",
    (SCORE, UPDATE),
)
SHORTER_RESPONSES = Remedy(
    shorter_responses,
    ("rollout.max_new_tokens", "train.microbatch_tokens", "train.pack"),
    "another task: longer responses are cut",
    (ROLLOUT, SCORE, UPDATE),
)

# The cheapest first.
REMEDIES: tuple[Remedy[PlannedRun], ...] = (
    RECOMPUTE_LAYERS,
    FEWER_SLOTS,
    SMALLER_MICROBATCHES,
    SPLIT_STATE,
    SHORTER_ROWS,
    SPLIT_LAYERS,
    OFFLOAD_OPTIMIZER,
    TRAIN_AN_ADAPTER,
    QUANTIZE_BASE,
    SPLIT_ROWS,
    SHORTER_RESPONSES,
)
