"""Plans the server's process: what is on a device, the sizes that fit, and its compiled programs.

    python -m jzero.tinker --model Qwen3-4B --plan v5e:1x1 --config.model.base=int8 --max-rank 32

One process trains and samples, so a device holds everything at the same time: the frozen base, the
states of the resident adapters, the bank of snapshots, the KV cache, and the work of the program
that runs. `choose_sizes` divides the memory by arithmetic, with the functions that size training
runs (`planning.kv_pool`, `planning.remedies`), at the start of a server as well. A plan then
compiles every program of the largest shapes, for devices that need not be attached.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jzero import config, terminal
from jzero.blueprint import (
    Blueprint,
    Models,
    Spec,
    Topology,
    describe,
    sampling_of,
    without_training,
)
from jzero.config import AdapterConfig
from jzero.decoder.abstract_calls import abstract_calls, score_calls
from jzero.decoder.adapter_bank import abstract_bank, can_hold
from jzero.decoder.engine import Engine
from jzero.decoder.inbox import REQUESTS
from jzero.decoder.prefill import prefill_shapes
from jzero.decoder.score_program import MAX_ALTERNATIVES
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.planning.arithmetic import adapter_update_bytes, sampling_work_bytes
from jzero.planning.chips import CHIPS, GIB
from jzero.planning.compiling import (
    Measurement,
    Program,
    compile_only_devices,
    device_bytes,
    measure,
)
from jzero.planning.fitting import Fit, apply_remedies, usable_bytes
from jzero.planning.kv_pool import Room, choose_pages
from jzero.planning.models import architecture
from jzero.planning.planned_run import pool_bytes, prefix_bytes
from jzero.planning.remedies import SMALLER_MICROBATCHES, UPDATE
from jzero.planning.report import program_lines
from jzero.sharding.mesh import Device, row_shards
from jzero.sharding.publish import abstract_decoder_weights, has_decoder_layout
from jzero.tinker import datums
from jzero.tinker.losses import loss_of
from jzero.tinker.tenants import ALPHA
from jzero.training.learner import Learner, token_learner
from jzero.training.optimizer import AdamW
from jzero.types import Batch, Params, RowLayout, State

POOL_SHARE = 0.5  # of the memory that is left: the KV cache; the rest is for longer microbatches
CPU_MICROBATCH_TOKENS = 4096  # on a CPU, where the memory of a device is not known
MOST_MICROBATCH_TOKENS = 16_384  # of one device: larger ones are not faster
PLANNED = "the plan of the server; python -m jzero.tinker --plan prints it"
MICROBATCHES = 8  # of the call that is planned


@dataclass(frozen=True)
class Residents:
    """How many adapters are on a device, and the largest of them."""

    states: int  # with their optimizer states
    snapshots: int  # in the bank
    max_rank: int


@dataclass(frozen=True)
class Sizes:
    """The sizes that fit a device."""

    num_pages: int  # of the KV cache, of all devices
    microbatch_tokens: int  # of all devices that split the rows


@dataclass(frozen=True)
class Parts:
    """What the server has on its devices, as abstract arrays."""

    engine: Engine
    learner: Learner
    base: Params
    weights: Params  # the decoder's weights of the base
    bank: Params  # the decoder's weights with the factors of all snapshots
    state: State
    shares_base: bool  # whether the decoder reads the trainer's arrays

    @property
    def state_bytes(self) -> float:
        """The bytes on a device of a training state and its gradient."""
        return device_bytes(self.state) + device_bytes(self.state.params)

    def fixed_bytes(self, residents: Residents) -> dict[str, float]:
        """Returns the bytes on a device of everything but the KV cache, by name."""
        snapshots = device_bytes(self.bank) - device_bytes(self.weights)
        sizes = {
            "frozen base": device_bytes(self.base),
            f"{residents.states} training states": residents.states * self.state_bytes,
            f"bank of {residents.snapshots} snapshots": snapshots,
            "prefixes": prefix_bytes(self.engine),
        }
        if not self.shares_base:
            sizes["decoder's copy of the base"] = device_bytes(self.weights)
        return sizes


Server = Blueprint[Learner]


def spec_of_server(settings: config.Config, residents: Residents) -> Spec[Learner]:
    """Returns what a server has on its devices, with adapters of the largest rank on all layers."""

    adapter = AdapterConfig(rank=residents.max_rank, alpha=ALPHA)

    def learner(models: Models, mesh: Mesh) -> Learner:
        largest = replace(adapter, targets=tuple(adapters.adaptable(models.policy)))
        return token_learner(models.policy, replace(settings.model, adapter=largest), mesh)

    spec = Spec(
        replace(settings.model, adapter=adapter),
        settings.mesh,
        sampling_of(settings.rollout, settings.algorithm, settings.eval),
        learner,
        hosts_per_decoder=settings.rollout.hosts_per_decoder,
    )
    return without_training(spec)


def describe_server(
    settings: config.Config, model: qwen.QwenConfig, devices: Topology, residents: Residents
) -> Server:
    """Returns the blueprint of a server on some devices."""
    # Samples end at the stops of their requests, which the host checks: no token ends a slot.
    models = Models(model, stop_tokens=())
    return describe(spec_of_server(settings, residents), models, devices)


def parts_of(server: Server, residents: Residents) -> Parts:
    """Returns what a server has on its devices."""
    learner, engine, model = server.learners, server.decoder, server.models.policy
    compute, adapter = server.spec.compute, learner.adapter
    base = learner.abstract_base()
    weights = abstract_decoder_weights(model, engine.mesh, compute.dtype, compute.base)
    bank = weights
    if can_hold(model, weights, compute.exact):
        bank = abstract_bank(
            model, weights, adapter, residents.snapshots, engine.mesh, engine.dtype, compute.exact
        )
    shares_base = has_decoder_layout(model, base, server.mesh)
    return Parts(engine, learner, base, weights, bank, learner.abstract_state(), shares_base)


# -- sizes that fit --------------------------------------------------------------------------------


def choose_sizes(
    settings: config.Config, parts: Parts, residents: Residents, available: float
) -> Sizes:
    """Returns the sizes with which the process fits `available` bytes on each device.

    rollout.num_pages and train.microbatch_tokens take precedence. Raises UserError if a device does
    not even hold one sequence and one row.
    """
    engine, learner = parts.engine, parts.learner
    shards = row_shards(learner.mesh)
    longest = engine.max_sequence_tokens
    fixed = sum(parts.fixed_bytes(residents).values())
    least_work = work_bytes(parts, longest)
    least = pool_bytes(engine, engine.pages_per_slot)
    room = available - fixed - least_work
    if room < least:
        raise UserError(
            f"the server needs {(fixed + least_work + least) / GIB:.1f} GiB on a device, which has "
            f"{available / GIB:.1f}: lower --context, --max-rank, --resident or "
            "--resident-snapshots, set --config.model.base=int8, or split the base with "
            "--config.mesh.tensor"
        )
    pages, _ = choose_pages(settings.rollout, engine, Room(POOL_SHARE * room, PLANNED, room))
    num_pages = pages * engine.num_shards
    if settings.train.microbatch_tokens:
        return Sizes(num_pages, settings.train.microbatch_tokens)

    def fit(changed: config.Config) -> Fit[TrainedRows]:
        tokens = changed.train.microbatch_tokens
        rows = TrainedRows(longest * shards, tokens)
        needed = fixed + pool_bytes(engine, pages) + work_bytes(parts, tokens // shards)
        return Fit(changed, rows, {UPDATE: needed}, available)

    # The longest row times a power of two.
    rows = max(1, MOST_MICROBATCH_TOKENS // longest)
    most = longest * (1 << (rows.bit_length() - 1)) * shards
    largest = replace(settings, train=replace(settings.train, microbatch_tokens=most))
    fitting = apply_remedies(fit(largest), fit, [SMALLER_MICROBATCHES])
    return Sizes(num_pages, fitting.settings.train.microbatch_tokens)


@dataclass(frozen=True)
class TrainedRows:
    """The microbatches of a server, which have rows of one length (`remedies.PackedRows`)."""

    row_tokens: int
    microbatch_tokens: int


def work_bytes(parts: Parts, tokens: int) -> float:
    """Returns the bytes that the program with the most work takes, for microbatches of `tokens`."""
    sampling = sampling_work_bytes(parts.engine, parts.learner)
    return max(sampling, adapter_update_bytes(parts.learner, tokens))


# -- the plan --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The memory of a server on one device, with its programs compiled."""

    title: str
    available: float  # bytes
    sizes: Sizes
    parts: dict[str, float]  # bytes that stay allocated
    programs: dict[str, Measurement]

    @property
    def work(self) -> float:
        """The most that a program adds to its arguments, which are among the parts."""
        return max(one.peak_bytes - one.argument_bytes for one in self.programs.values())

    @property
    def needed(self) -> float:
        return sum(self.parts.values()) + self.work

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def make_plan(
    settings: config.Config, residents: Residents, topology: str, cache: Path | None
) -> Plan:
    """Compiles the server's programs for a topology such as "v5e:1x1".

    cache: a directory with earlier measurements of programs.
    Raises UserError if the model or the topology is unknown, or the server cannot fit.
    """
    devices = compile_only_devices(topology)
    return plan_on(settings, residents, devices, topology, cache)


def plan_on(
    settings: config.Config,
    residents: Residents,
    devices: Sequence[Device],
    topology: str,
    cache: Path | None,
) -> Plan:
    """Returns the plan for some devices. See `make_plan`."""
    model = architecture(settings.model.path)
    kind, platform = devices[0].device_kind, devices[0].platform
    available = usable_bytes(kind, platform)
    if available is None:
        raise UserError(f"the memory of {kind} is not known: plan for {', '.join(CHIPS)}")
    server = describe_server(
        settings, model, Topology(devices, devices[0].process_index), residents
    )
    sizes = choose_sizes(settings, parts_of(server, residents), residents, available)
    server = server.with_rollout(replace(settings.rollout, num_pages=sizes.num_pages))
    parts, mesh = parts_of(server, residents), server.mesh

    examples = abstract_rows(parts, sizes)
    programs = server_programs(parts, examples)
    measured = {}
    with terminal.phase("compile", total=len(programs), unit="programs") as phase:
        for name, program in programs.items():
            terminal.set_note(name)
            measured[name] = measure(program, topology, cache)
            phase.advance()
    terminal.set_note("")
    allocated = parts.fixed_bytes(residents) | {
        "KV cache": device_bytes(parts.engine.abstract_state()),
        "examples of a call": device_bytes(examples),
    }
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    title = f"{settings.model.path} on {topology}: {mesh.size} x {kind} ({shape})"
    return Plan(title, available, sizes, allocated, measured)


def abstract_rows(parts: Parts, sizes: Sizes) -> Batch[jax.ShapeDtypeStruct]:
    """Returns the examples of a call whose rows have the full length."""
    learner = parts.learner
    shards = row_shards(learner.mesh)
    width = parts.engine.max_sequence_tokens
    rows = shards * max(1, sizes.microbatch_tokens // (width * shards))
    shape = (MICROBATCHES, min(rows, datums.ROWS_MOST * shards), width)

    def of(dtype: type, *trailing: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *trailing), dtype, sharding=learner.row_sharding)

    ints, floats = of(np.int32), of(np.float32)
    return Batch(
        tokens=ints,
        targets=of(np.int32, 1),
        segments=ints,
        positions=ints,
        weights=of(np.float32, 1),
        sampler_logps=floats,
        advantages=floats,
        ratio_low=floats,
        ratio_high=floats,
    )


def server_programs(parts: Parts, rows: Batch[jax.ShapeDtypeStruct]) -> dict[str, Program]:
    """Returns the server's programs in their largest shapes, by name."""
    engine, learner = parts.engine, parts.learner
    # A smaller shape of a program needs less memory.
    largest_prefill = max(prefill_shapes(engine), key=math.prod)
    programs: dict[str, Program] = {}
    programs |= abstract_calls(engine, parts.bank, [largest_prefill], REQUESTS)
    programs |= score_calls(engine, parts.bank, MAX_ALTERNATIVES)

    def number(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=learner.replicated)

    def abstract(value: np.generic) -> jax.ShapeDtypeStruct:
        return number(value.dtype.type)

    state = parts.state
    gradient = state.params  # its shapes are those of the adapter
    loss = jax.tree.map(abstract, loss_of(0, 0.0))
    layouts = (RowLayout(0, 1, engine.max_sequence_tokens),)
    programs["forward_backward"] = (
        learner.keeping_gradient_program,
        (
            replace(state, opt_state=()),
            (rows,),
            number(np.int32, 1),
            number(np.bool_),
            parts.base,
            gradient,
            loss,
            layouts,
        ),
    )
    settings = number(np.float32, len(AdamW._fields))
    programs["optim_step"] = learner.step_program, (state, gradient, settings)
    return programs


def format_plan(plan: Plan) -> str:
    """Returns the plan as tables in plain text."""
    return "\n".join(plan_lines(plan))


def plan_lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.title}, {plan.available / GIB:.2f} GiB each"
    yield ""
    yield "on a device                         GiB"
    for name, size in plan.parts.items():
        yield f"{name:<30}{size / GIB:9.3f}"
    yield f"{'work of the largest program':<30}{plan.work / GIB:9.3f}"
    share = 100 * plan.needed / plan.available
    yield f"{'in all':<30}{plan.needed / GIB:9.3f}{share:8.0f}%"
    yield ""
    yield from program_lines(plan.programs, width=29)
    yield ""
    yield (
        f"rollout.num_pages={plan.sizes.num_pages} "
        f"train.microbatch_tokens={plan.sizes.microbatch_tokens}"
    )
    yield "fits" if plan.fits else "does not fit"
