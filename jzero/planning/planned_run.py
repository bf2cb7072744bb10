"""Builds a run on described devices: its trainer, its engine, and every program that it compiles.

`build` uses the run's own code, so the plan covers exactly the programs that will run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero import algorithms, config
from jzero.attention import QuantizedPool
from jzero.blueprint import (
    Blueprint,
    Models,
    Topology,
    describe,
    models_of_run,
    spec_of_run,
    teacher_settings,
    with_needed_slots,
)
from jzero.config import teachers
from jzero.decoder.abstract_calls import abstract_calls, score_calls
from jzero.decoder.engine import Engine
from jzero.decoder.prefill import prefill_shape, prefill_shapes
from jzero.decoder.score_program import MAX_ALTERNATIVES
from jzero.distillation.build import scoring_learner
from jzero.distillation.in_process import TeacherSettings, own_row_shapes
from jzero.errors import UserError
from jzero.model import adapters, mtp, tokenizer
from jzero.model.architecture import ATTENTION
from jzero.model.new_model import check_experts, new_model
from jzero.numerics.sizes import power_of_two
from jzero.planning.chips import CHIPS, Chip, DescribedDevice, smaller_slice
from jzero.planning.compiling import Program, compile_only_devices, device_bytes
from jzero.planning.models import architecture
from jzero.sharding.mesh import Device, adapter_shardings, hosts_of, row_shards
from jzero.sharding.publish import (
    abstract_decoder_weights,
    gather_adapter_program,
    gather_program,
    has_decoder_layout,
)
from jzero.sharding.side_by_side import weight_layout
from jzero.training.credit import CreditSettings
from jzero.training.heads import Objective
from jzero.training.learner import Learner
from jzero.training.supervised import SupervisedTrainer
from jzero.training.trainer import (
    RowShapes,
    Trainer,
    UpdateSettings,
    abstract_batches,
    abstract_scored,
)
from jzero.types import Batch, Params


@dataclass(frozen=True)
class PlannedTeacher:
    """A teacher on the training mesh: the learner that scores, and the rows that it scores."""

    learner: Learner
    weights: Params  # abstract
    shapes: RowShapes
    # Abstract rows with the teacher's own prompts; empty if it reads the rows of the update.
    own_rows: tuple[Batch[jax.ShapeDtypeStruct], ...] = ()


@dataclass(frozen=True)
class Workload:
    """The sizes of a run's step, from its settings, and the bytes that a checkpoint holds."""

    num_prompts: int
    group_size: int
    prompt_tokens: int  # of the longest prompt
    response_tokens: int  # of the longest response, with the replies of its turns
    num_examples: int  # of a step of supervised fine-tuning; 0 for RL
    microbatch_tokens: int  # 0: the rows of a step
    packs_per_row: int
    num_slots: int  # of all hosts
    num_pages: int  # of all hosts; 0: enough for every slot
    saves_moments: bool  # in checkpoints

    @property
    def is_fine_tuning(self) -> bool:
        return self.num_examples > 0


def workload(settings: config.Config) -> Workload:
    """Returns the sizes of a step of a training run."""
    rollout = with_needed_slots(settings.rollout, settings.eval, settings.sft is not None)
    return Workload(
        num_prompts=rollout.num_prompts,
        group_size=rollout.group_size,
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.longest_continuation,
        num_examples=settings.sft.batch_size if settings.sft else 0,
        microbatch_tokens=settings.train.microbatch_tokens,
        packs_per_row=settings.train.packs_per_row,
        num_slots=rollout.num_slots,
        num_pages=rollout.num_pages,
        saves_moments=settings.train.save == "full",
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run on its devices, before anything is compiled."""

    workload: Workload
    trainer: Trainer
    sampling: Engine | None  # one decoder; None for fine-tuning without suites
    num_decoders: int
    programs: dict[str, Program]
    parts: dict[str, float]  # bytes on a device that stay allocated between programs
    num_scoring_passes: int  # forward passes over the batch before the first optimizer step
    teacher: PlannedTeacher | None = None  # None without a teacher on the training mesh
    given_chip: Chip | None = None  # the limits of a device that is in no table, such as a CPU

    @property
    def engine(self) -> Engine:
        """The engine of a run that samples."""
        assert self.sampling is not None, "the run samples nothing"
        return self.sampling

    @property
    def mesh(self) -> Mesh:
        return self.trainer.policy.mesh

    @property
    def row_tokens(self) -> int:
        """The tokens of the smallest microbatch: one row of the longest layout per device."""
        return self.trainer.layouts[0].tokens * row_shards(self.mesh)

    @property
    def microbatch_tokens(self) -> int:
        """The tokens of the longest microbatch, over all devices."""
        return self.trainer.rows[0] * self.trainer.layouts[0].tokens

    @property
    def devices(self) -> list[Device]:
        return list(self.mesh.devices.flat)

    @property
    def num_hosts(self) -> int:
        return len(hosts_of(self.mesh))

    @property
    def chip(self) -> Chip:
        return self.given_chip or CHIPS[self.devices[0].device_kind]


def build(settings: config.Config, devices: Sequence[Device]) -> PlannedRun:
    """Plans a run as `setup.resolve` sets it up, with known architectures instead of checkpoints.

    Raises:
        UserError: The settings do not fit together, or do not fit the devices.
    """
    config.validate(settings)
    if settings.model.adapter.path:
        raise UserError(
            f"model.adapter.path={settings.model.adapter.path}: the planner reads no adapters; "
            "give model.adapter.rank and model.adapter.targets instead"
        )
    topology = Topology(devices, devices[0].process_index, _smaller_slice)
    # The planner assumes that the same devices train and decode.
    spec = replace(spec_of_run(settings), decode_devices=0)
    blueprint = describe(spec, architectures(settings), topology)
    if settings.sft is not None:
        return _build_fine_tuning(settings, settings.sft, blueprint)

    trainer, engine = blueprint.learners, blueprint.decoder
    assert isinstance(trainer, Trainer), f"{settings.sft=}"
    batches = abstract_batches(trainer)
    needs_old = trainer.needs_old_logps
    needs_reference = algorithms.needs_reference(settings.algorithm)

    learner_programs = trainer.policy.programs(batches, trainer.layouts)
    batch_arguments = learner_programs["update"][1][1]
    # The policy's score program computes only old log-probs and the reference's log-probs.
    if not needs_old and not needs_reference:
        del learner_programs["score"]
    sampling_programs, sampling_parts = _sampling(engine, trainer.policy)
    programs = sampling_programs | learner_programs
    # All minibatches of a step are on the device at the same time.
    parts = {
        **_state_parts(trainer.policy),
        **sampling_parts,
        "batches": device_bytes(batch_arguments) * settings.train.minibatches,
    }
    # The frozen base serves as the reference of an adapter, until a later adapter replaces it
    # (algorithm.reference_every).
    is_frozen_base = settings.model.adapter.rank and not settings.algorithm.reference_every
    if blueprint.reference is not None and not is_frozen_base:
        parts["reference"] = device_bytes(blueprint.reference.own_arrays())
    if trainer.critic:
        for name, program in trainer.critic.programs(batches, trainer.layouts).items():
            programs[f"critic-{name}"] = program
        critic_state = trainer.critic.abstract_state()
        parts["critic weights"] = device_bytes(critic_state.params)
        parts["critic optimizer"] = device_bytes(critic_state.opt_state)

    teaching = teacher_settings(settings)
    teacher = _teacher(teaching, trainer, blueprint) if teaching else None
    if teacher is not None:
        programs["teacher-score"] = _scoring_program(teacher)
    # Policy and reference are already counted. Another model adds its weights.
    if blueprint.teacher is not None:
        parts["teacher"] = device_bytes(blueprint.teacher.own_arrays())

    has_critic = trainer.critic is not None
    num_scoring_passes = needs_old + needs_reference + has_critic + (teacher is not None)
    return PlannedRun(
        workload(settings),
        trainer,
        engine,
        blueprint.num_decoders,
        programs,
        parts,
        num_scoring_passes,
        teacher,
    )


def _teacher(
    settings: TeacherSettings, trainer: Trainer, run: Blueprint[Trainer | SupervisedTrainer]
) -> PlannedTeacher | None:
    """Returns the teacher as `distillation.build` makes it; None if none is on the mesh."""
    choice, policy = settings.choice, trainer.policy
    if isinstance(choice, teachers.Server):
        return None
    shapes, own_rows = own_row_shapes(settings, policy.mesh), ()
    if shapes is None:
        shapes = RowShapes(trainer.layouts, trainer.rows, trainer.microbatches)
    else:
        own_rows = abstract_scored(shapes, policy.row_sharding)
    # Policy and reference have the same shapes, which are sufficient for a plan.
    is_reference = isinstance(choice, teachers.Reference)
    if isinstance(choice, teachers.Policy) or (is_reference and not policy.adapter.rank):
        weights = policy.whole(policy.abstract_base(), policy.abstract_state().params)
        return PlannedTeacher(policy, weights, shapes, own_rows)
    # The reference of an adapter is its base without the adapter.
    if isinstance(choice, teachers.Reference):
        return PlannedTeacher(policy, policy.abstract_base(), shapes, own_rows)

    assert run.teacher is not None, f"{choice=}"
    learner = scoring_learner(run.teacher.models.policy, trainer)
    return PlannedTeacher(learner, run.teacher.abstract_weights(), shapes, own_rows)


def _scoring_program(teacher: PlannedTeacher) -> Program:
    """Returns the program with which a teacher scores a minibatch."""
    learner = teacher.learner
    batches = abstract_scored(teacher.shapes, learner.row_sharding)
    counts = jax.ShapeDtypeStruct((len(batches),), np.int32, sharding=learner.replicated)
    arguments = (teacher.weights, batches, counts, tuple(teacher.shapes.layouts))
    return learner.score_program, arguments


def with_scores(run: PlannedRun) -> PlannedRun:
    """Returns a run whose engine also scores given tokens, with the maximum number of alternatives.

    Raises UserError if the run samples nothing and so has no engine.
    """
    if run.sampling is None:
        raise UserError("--score: the run samples nothing and has no engine, remove it")
    _, (decoder_weights, *_) = run.programs["generate"]
    assert isinstance(decoder_weights, dict), f"{type(decoder_weights)=}"
    calls = score_calls(run.engine, decoder_weights, MAX_ALTERNATIVES)
    return replace(run, programs={**run.programs, **calls})


def _state_parts(policy: Learner) -> dict[str, float]:
    """Returns the bytes on a device of the policy's State, split into trained and frozen arrays."""
    state = policy.abstract_state()
    parts = {"weights": device_bytes(state.params), "optimizer": device_bytes(state.opt_state)}
    if policy.adapter.rank:
        parts["frozen base"] = device_bytes(policy.abstract_base())
    return parts


def _sampling(engine: Engine, policy: Learner) -> tuple[dict[str, Program], dict[str, float]]:
    """Returns the sampling programs, and the bytes on a device of the arrays that they need."""
    if policy.adapter.rank:
        publish_programs, decoder_weights, copied = _adapter_publishing(engine, policy)
    else:
        publish_programs, decoder_weights, copied = _publishing(engine, policy)
    programs = publish_programs | abstract_calls(engine, decoder_weights, prefill_shapes(engine))
    parts = {
        "decoder weights": device_bytes(copied),
        "KV pool": device_bytes(engine.abstract_state()),
        "prefixes": prefix_bytes(engine),
    }
    return programs, parts


def _publishing(engine: Engine, policy: Learner) -> tuple[dict[str, Program], Params, Params]:
    """Returns the program that publishes a model, the decoder's weights, and the copied weights.

    The third value holds the weights that are not the trainer's own arrays: here, all of them.
    """
    model, precision = policy.model, engine.settings.weights
    layout = weight_layout(model, policy.compute, engine.mesh)
    publish = gather_program(model, policy.mesh, engine.dtype, precision, layout=layout)
    params = policy.abstract_state().params
    decoder_weights = abstract_decoder_weights(model, engine.mesh, engine.dtype, precision, layout)
    return {"publish": (publish, (params,))}, decoder_weights, decoder_weights


def _adapter_publishing(
    engine: Engine,
    policy: Learner,
) -> tuple[dict[str, Program], Params, Params]:
    """Returns the same as `_publishing`, for an adapter on a frozen base."""
    model, mesh, adapter = policy.model, policy.mesh, policy.adapter
    params, base = policy.abstract_state().params, policy.abstract_base()
    publish = gather_adapter_program(model, adapter, mesh, engine.dtype)
    programs: dict[str, Program] = {"publish": (publish, (params,))}

    def place(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return array.update(dtype=engine.dtype, sharding=sharding)

    decoder_adapter = jax.tree.map(place, params, adapter_shardings(model, adapter, engine.mesh))
    precision = policy.compute.base
    decoder_base = abstract_decoder_weights(model, engine.mesh, engine.dtype, precision)
    decoder_weights = adapters.join(decoder_base, decoder_adapter, adapter.scale)
    # With the same sharding on both meshes, the decoder reads the trainer's base without a copy.
    if has_decoder_layout(model, base, mesh):
        return programs, decoder_weights, decoder_adapter
    programs["publish base"] = (
        gather_program(
            model, mesh, engine.dtype, precision, is_quantized_base=policy.compute.is_base_quantized
        ),
        (base,),
    )
    return programs, decoder_weights, decoder_weights


def _build_fine_tuning(
    settings: config.Config, sft: config.Sft, blueprint: Blueprint[Trainer | SupervisedTrainer]
) -> PlannedRun:
    """Plans a supervised fine-tuning run as `sft.train` sets it up.

    The batch is the largest possible: every example fills a row. Nothing is sampled unless
    `eval.suites` names suites.
    """
    supervised, engine = blueprint.learners, blueprint.engine
    assert isinstance(supervised, SupervisedTrainer), f"{settings.sft=}"
    num_rows = -(-sft.batch_size // supervised.rows)
    trainer = supervised_trainer(supervised, power_of_two(num_rows))
    learner_programs = trainer.policy.programs(abstract_batches(trainer), trainer.layouts)
    programs: dict[str, Program] = {**learner_programs}
    parts = _state_parts(trainer.policy)
    if engine is not None:
        sampling_programs, sampling_parts = _sampling(engine, trainer.policy)
        programs = sampling_programs | programs
        parts |= sampling_parts
    parts["batches"] = device_bytes(learner_programs["update"][1][1])
    return PlannedRun(
        workload(settings),
        trainer,
        engine,
        blueprint.num_decoders,
        programs,
        parts,
        num_scoring_passes=0,
    )


def supervised_trainer(supervised: SupervisedTrainer, microbatches: int) -> Trainer:
    """Returns the trainer of a step of fine-tuning: one optimizer step on one minibatch."""
    learner = supervised.learner
    algorithm = algorithms.supervised()
    return Trainer(
        credit=CreditSettings(algorithm, group_size=1, max_turns=1, max_new_tokens=1),
        updates=UpdateSettings(policy=learner.settings, critic=learner.settings),
        objective=Objective(algorithm),
        policy=learner,
        critic=None,
        layouts=[supervised.layout],
        rows=[supervised.rows],
        microbatches=[microbatches],
    )


def architectures(settings: config.Config) -> Models:
    """Returns the architectures of the policy, and of the critic and the teacher of its run."""
    if settings.model.path:
        model = architecture(settings.model.path)
    else:
        vocab_size = tokenizer.num_ids(tokenizer.load(settings.model.tokenizer))
        model = new_model(vocab_size, settings.model.arch)
    check_experts(model)
    models = models_of_run(settings, model, lambda _, path: architecture(path))
    return models._replace(policy=mtp.with_head(model, settings.rollout.draft))


def _smaller_slice(devices: Sequence[Device]) -> Sequence[Device]:
    """Returns the devices of the smallest slice with as many, for one of several decoders.

    XLA cannot compile a program with collectives for a part of a slice.
    """
    first = devices[0]
    if isinstance(first, DescribedDevice):
        return devices
    return compile_only_devices(smaller_slice(first.device_kind, len(devices)))


def kv_bytes_per_token(engine: Engine) -> float:
    """Returns the bytes that the keys and values of one token take on a device, in all layers."""
    state = engine.abstract_state()
    return device_bytes((state.k_pool, state.v_pool)) / tokens_in_pool(engine)


def tokens_in_pool(engine: Engine) -> float:
    """Returns how many tokens of all layers take as many pages as the pool of a shard has."""
    pages = engine.pool_pages(engine.pages_per_shard) * engine.settings.page_size
    return pages / engine.model.num_cached_layers


def pool_bytes(engine: Engine, pages: int) -> float:
    """Returns the bytes on a device of a KV cache with `pages` pages for sequences in each shard.

    Layers with a sliding window may have fewer pages (`decoder.rings`).
    """
    layers = engine.model.num_cached_layers
    page_of_layer = kv_bytes_per_token(engine) * engine.settings.page_size / layers
    return engine.pool_pages(pages + 1) * page_of_layer


def pages_that_fit(engine: Engine, room: float) -> int:
    """Returns the largest `pages` with which `pool_bytes` are at most `room`.

    Negative if not even the page for idle slots fits.
    """
    page_bytes = kv_bytes_per_token(engine) * engine.settings.page_size  # of all layers
    if engine.full_rings is not None:
        # The size of the rings is fixed, so more pages fit in the other layers.
        num_layers = len(engine.model.attention_layers)
        num_full = len(engine.model.layers_of(ATTENTION))
        layer_bytes = page_bytes / num_layers
        ring_bytes = (num_layers - num_full) * engine.full_rings.pages_of_layer * layer_bytes
        pages = int((room - ring_bytes) / (num_full * layer_bytes)) - 1
        if engine.rings_of(pages + 1) is not None:
            return pages
    return int(room / page_bytes) - 1


def prefix_bytes_per_token(engine: Engine) -> float:
    """Returns the bytes of one token's keys and values as a prefill returns them.

    Only the KV cache can have 8 bits: a prefill returns keys and values in the engine's dtype.
    """
    state = engine.abstract_state()
    if not isinstance(state.k_pool, QuantizedPool):
        return kv_bytes_per_token(engine)
    numbers = device_bytes((state.k_pool.values, state.v_pool.values))
    return numbers * engine.dtype.itemsize / tokens_in_pool(engine)


def prefix_bytes(engine: Engine) -> float:
    """Returns the bytes on a device of the prefilled prompts that wait for their slots."""
    # A group shares its prompt, so full slots have this many prompts.
    num_prompts = -(-engine.slots_per_shard // engine.settings.group_size)
    width, _ = prefill_shape(engine, engine.settings.max_prompt_tokens)
    states = device_bytes(engine.abstract_slot_state(num_prompts))
    return num_prompts * width * prefix_bytes_per_token(engine) + states
