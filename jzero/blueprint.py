"""What a run, a command or a server has on its devices, before any weight is read.

    blueprint = describe(spec, models, topology)

A `Spec` names what a program needs: the model's settings, a mesh, a decoder, learners, and the
critic, teacher and reference policy of a run, which are specs as well. `describe` makes the meshes,
one decoder and the learners. Their arrays are abstract: nothing is compiled, no weight is read,
and the devices need not be attached. The planner computes the memory of a blueprint, and chooses
sizes with which it fits; `jzero.service.weights` loads weights into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

from jzero import algorithms, config
from jzero.algorithms import Algorithm
from jzero.config import (
    AdapterConfig,
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    teachers,
)
from jzero.decoder.engine import Engine
from jzero.decoder.program_settings import repeats_heads
from jzero.distillation.in_process import TeacherSettings
from jzero.errors import UserError
from jzero.model import adapters, peft, qwen
from jzero.model.architecture import track_sizes
from jzero.model.base_model import BaseModel
from jzero.sharding.mesh import (
    Device,
    adapter_shardings,
    configured_mesh,
    decode_mesh,
    hosts_of,
    mesh_of_decoders,
    param_shardings,
    split_devices,
    with_devices,
)
from jzero.sharding.publish import publisher
from jzero.sharding.side_by_side import weight_layout
from jzero.tokens import recorded_tracks
from jzero.training.frozen import abstract_base
from jzero.training.supervised import SupervisedTrainer
from jzero.training.trainer import Trainer, make_trainer

# What trains: a Trainer, a SupervisedTrainer, a learner that accumulates gradients; None: nothing.
Trains = TypeVar("Trains", covariant=True)

DEFAULT_SLOTS = 256  # with rollout.num_slots=0, where any number of sequences may come


class Models(NamedTuple):
    """The architectures of a blueprint."""

    policy: qwen.QwenConfig
    critic: qwen.QwenConfig | None = None
    teacher: qwen.QwenConfig | None = None  # of teacher=model
    teacher_adapter: AdapterConfig = AdapterConfig()  # rank and targets of teacher.adapter
    # Tokens that end a slot of the decoder. A plan needs only their number: it shapes the program.
    stop_tokens: tuple[int, ...] = (0, 1)


def models_of(base: BaseModel, others: Models | None = None) -> Models:
    """Returns the architectures of a model that has been found.

    others: the architectures of critic and teacher; None: there are none.
    """
    others = others or Models(base.model)
    return others._replace(policy=base.model, stop_tokens=base.stop_tokens)


def models_of_run(
    settings: Config, policy: qwen.QwenConfig, read: Callable[[str, str], qwen.QwenConfig]
) -> Models:
    """Returns the architectures of the policy of a run, and of its critic and its teacher.

    read: returns the architecture of a model, by the name of a setting and its value: a directory
        or hub id. The planner knows some architectures without their files.
    """
    critic = teacher = None
    teacher_adapter = AdapterConfig()
    if algorithms.needs_critic(settings.algorithm):
        # Without critic.path, the critic starts from a copy of the policy.
        path = settings.critic.path
        critic = read("critic.path", path) if path else policy
    teaching = teacher_settings(settings)
    if teaching is not None and isinstance(teaching.choice, teachers.Model):
        choice = teaching.choice
        teacher = read("teacher.path", choice.path or settings.model.path)
        if choice.adapter:
            teacher_adapter = peft.read_settings(peft.resolve(choice.adapter), teacher)
    return Models(policy, critic, teacher, teacher_adapter)


@dataclass(frozen=True)
class Sampling:
    """What a decoder has to hold: its lengths, its slots, its pages and what it records."""

    rollout: RolloutConfig
    longest_evaluation: int  # tokens of the longest episode of an evaluation
    kept: int  # recorded tokens that the sampler's filters keep; 0: not recorded


@dataclass(frozen=True)
class Spec(Generic[Trains]):
    """What a run, a command or a server has to have on its devices."""

    compute: ModelConfig
    mesh: MeshConfig
    sampling: Sampling | None  # None: nothing is sampled
    learners: Callable[[Models, Mesh], Trains]  # makes what trains; compiles nothing
    decode_devices: int = 0  # of each host, which only decode (rollout.placement=apart)
    hosts_per_decoder: int = 1
    # Type of the parameters. The frozen base of an adapter has compute.dtype.
    dtype: str = "float32"
    # It shares the policy's frozen base, and has only an adapter of its own.
    shares_base: bool = False
    # Other models on the training mesh. They neither sample nor have learners of their own: the
    # critic's learner belongs to the Trainer, and a teacher is scored by a learner of its caller.
    critic: "Spec[None] | None" = None
    teacher: "Spec[None] | None" = None  # None as well if the teacher is the policy or a server
    reference: "Spec[None] | None" = None


def _same_devices(devices: Sequence[Device]) -> Sequence[Device]:
    return devices


@dataclass(frozen=True)
class Topology:
    """Devices of all hosts, attached or described."""

    devices: Sequence[Device]
    process: int  # the host whose decoder is described
    # Returns the devices of one of several decoders. A planner compiles it on a smaller slice.
    place_decoder: Callable[[Sequence[Device]], Sequence[Device]] = _same_devices


def attached_topology() -> Topology:
    """Returns the attached devices of all hosts. Starts JAX's backend."""
    return Topology(jax.devices(), jax.process_index())


@dataclass(frozen=True)
class Blueprint(Generic[Trains]):
    """The meshes, the decoder and the learners of a spec on some devices, without any array."""

    spec: Spec[Trains]
    models: Models
    mesh: Mesh  # of training, and of weights as they are loaded
    decoder_mesh: Mesh
    num_decoders: int
    engine: Engine | None  # of one decoder; None if nothing is sampled
    learners: Trains
    critic: "Blueprint[None] | None" = None
    teacher: "Blueprint[None] | None" = None
    reference: "Blueprint[None] | None" = None

    @property
    def decoder(self) -> Engine:
        """The decoder of a blueprint that samples."""
        assert self.engine is not None, "the blueprint samples nothing"
        return self.engine

    @property
    def sampling(self) -> Sampling:
        """What the decoder has to hold."""
        assert self.spec.sampling is not None, "the blueprint samples nothing"
        return self.spec.sampling

    def with_rollout(self, rollout: RolloutConfig) -> "Blueprint[Trains]":
        """Returns the blueprint with a decoder of other sizes."""
        sampling = replace(self.sampling, rollout=rollout)
        spec = replace(self.spec, sampling=sampling)
        engine = _make_engine(spec, sampling, self.models, self.decoder_mesh, self.num_decoders)
        return replace(self, spec=spec, engine=engine)

    # -- arrays, as `jzero.service.weights` loads them ---------------------------------------------

    def without_adapter(self) -> "Blueprint[Trains]":
        """Returns the blueprint of the full model, for example of a warm start."""
        compute = replace(self.spec.compute, adapter=AdapterConfig(), base="native")
        return replace(self, spec=replace(self.spec, compute=compute))

    def abstract_model(self) -> qwen.Params:
        """Returns the arrays of the full model, or of the frozen base under its adapter."""
        compute, model = self.spec.compute, self.models.policy
        if compute.adapter.rank:
            return abstract_base(model, self.mesh, compute.dtype, compute.is_base_quantized)

        def place(
            path: tuple, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
        ) -> jax.ShapeDtypeStruct:
            return leaf.update(dtype=qwen.dtype_of(path, self.spec.dtype), sharding=sharding)

        shardings = param_shardings(model, self.mesh)
        return jax.tree.map_with_path(place, qwen.abstract(model), shardings)

    def abstract_adapter(self) -> qwen.Params:
        """Returns the arrays of the adapter, in fp32. The blueprint has one."""
        adapter, model = self.spec.compute.adapter, self.models.policy
        assert adapter.rank, "the blueprint has no adapter"

        def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return leaf.update(sharding=sharding)

        shardings = adapter_shardings(model, adapter, self.mesh)
        return jax.tree.map(place, adapters.abstract(model, adapter), shardings)

    def abstract_weights(self) -> qwen.Params:
        """Returns the arrays of the model, with its adapter joined if it has one."""
        adapter = self.spec.compute.adapter
        if not adapter.rank:
            return self.abstract_model()
        return adapters.join(self.abstract_model(), self.abstract_adapter(), adapter.scale)

    def own_arrays(self) -> qwen.Params:
        """Returns the arrays that the model does not share with the policy."""
        return self.abstract_adapter() if self.spec.shares_base else self.abstract_weights()

    def publisher(self) -> Callable[[qwen.Params], qwen.Params]:
        """Returns the function that converts the trainer's weights for the decoder."""
        compute, model = self.spec.compute, self.models.policy
        return publisher(
            model,
            self.mesh,
            self.decoder_mesh,
            compute.dtype,
            compute.adapter,
            self.sampling.rollout.weights,
            weight_layout(model, compute, self.decoder_mesh),
        )


def describe(spec: Spec[Trains], models: Models, topology: Topology) -> Blueprint[Trains]:
    """Returns the blueprint of a spec on some devices. Reads and compiles nothing.

    Raises UserError if the mesh does not fit the devices or the model, or if a setting needs what
    the model does not have.
    """
    training, decoding = split_devices(spec.decode_devices, topology.devices, topology.process)
    mesh = configured_mesh(spec.mesh, training, spec.hosts_per_decoder)
    for model in filter(None, (models.policy, models.critic)):
        check_tensor_axis(mesh, model)
    if spec.decode_devices:
        decoder_mesh = mesh_of_decoders(decoding, mesh.shape["tensor"])
    else:
        decoder_mesh = decode_mesh(mesh, topology.process)
    num_hosts = len({device.process_index for device in topology.devices})
    num_decoders = num_hosts // len(hosts_of(decoder_mesh))
    if num_decoders > 1:
        places = topology.place_decoder(list(decoder_mesh.devices.flat))
        decoder_mesh = with_devices(decoder_mesh, places)
    engine = None
    if spec.sampling is not None:
        engine = _make_engine(spec, spec.sampling, models, decoder_mesh, num_decoders)
    learners = spec.learners(models, mesh)
    blueprint = Blueprint(spec, models, mesh, decoder_mesh, num_decoders, engine, learners)
    return replace(
        blueprint,
        critic=_describe_part(spec.critic, models.critic, blueprint),
        teacher=describe_teacher(spec.teacher, models, blueprint),
        reference=_describe_part(spec.reference, models.policy, blueprint),
    )


def _describe_part(
    spec: Spec[None] | None, model: qwen.QwenConfig | None, run: Blueprint[object]
) -> Blueprint[None] | None:
    """Returns the blueprint of another model on the training mesh of a run."""
    if spec is None:
        return None
    assert model is not None, "a spec needs the architecture of its model"
    return Blueprint(spec, Models(model), run.mesh, run.decoder_mesh, run.num_decoders, None, None)


def describe_teacher(
    spec: Spec[None] | None, models: Models, run: Blueprint[object]
) -> Blueprint[None] | None:
    """Returns the blueprint of a teacher on the training mesh of a run; None: it has no arrays."""
    if spec is not None:
        compute = replace(spec.compute, adapter=models.teacher_adapter)
        spec = replace(spec, compute=compute)
    return _describe_part(spec, models.teacher, run)


def describe_on_one_device(model: qwen.QwenConfig, dtype: str = "float32") -> Blueprint[None]:
    """Returns the blueprint of a model on the first device, where nothing samples or trains.

    dtype: type of the parameters.
    """
    spec = Spec(ModelConfig(), MeshConfig(fsdp=1), None, no_learners, dtype=dtype)
    return describe(
        spec, Models(model), Topology(jax.devices()[:1], jax.devices()[0].process_index)
    )


def check_tensor_axis(mesh: Mesh, model: qwen.QwenConfig) -> None:
    """Raises UserError if the tensor axis of the mesh cannot split the heads of a model."""
    tensor, heads = mesh.shape["tensor"], model.num_key_value_heads
    if heads % tensor and not repeats_heads(model, tensor):
        raise UserError(
            f"mesh.tensor={tensor} does not divide the model's {heads} key-value heads; "
            "set it to one of their divisors, or to a multiple of them that divides its "
            f"{model.num_attention_heads} query heads"
        )


def _make_engine(
    spec: Spec[object], sampling: Sampling, models: Models, mesh: Mesh, number: int
) -> Engine:
    """Returns one of `number` decoders, without device state."""
    compute, rollout = spec.compute, sampling.rollout
    return Engine(
        models.policy,
        per_decoder_settings(rollout, number),
        mesh,
        models.stop_tokens,
        compute.dtype,
        compute.attention,
        longest_evaluation=sampling.longest_evaluation,
        exact=compute.exact,
        tracks=recorded_tracks(track_sizes(models.policy, sampling.kept, rollout.routing_replay)),
    )


def per_decoder_settings(rollout: RolloutConfig, number: int) -> RolloutConfig:
    """Returns the share of one of `number` decoders of rollout.num_slots and num_pages.

    A command without a training run has DEFAULT_SLOTS with rollout.num_slots=0.
    """
    return replace(
        rollout,
        # Rounded up, so that no decoder has 0.
        num_slots=-(-(rollout.num_slots or DEFAULT_SLOTS) // number),
        num_pages=-(-rollout.num_pages // number),
    )


# -- specs of a config -----------------------------------------------------------------------------


def spec_of_run(settings: Config) -> Spec[Trainer | SupervisedTrainer]:
    """Returns what a training run has on its devices: of RL, or of supervised fine-tuning.

    Fine-tuning samples only if it evaluates suites (eval.suites).
    """
    rollout = with_needed_slots(settings.rollout, settings.eval, settings.sft is not None)
    sampling = None
    if settings.sft is None or settings.eval.suites:
        sampling = sampling_of(rollout, settings.algorithm, settings.eval)
    learners = _rl_learners if settings.sft is None else _fine_tuning_learners
    spec = Spec(
        settings.model,
        settings.mesh,
        sampling,
        partial(learners, settings),
        settings.rollout.decode_devices,
        settings.rollout.hosts_per_decoder,
    )
    if settings.sft is not None:
        return spec
    return replace(
        spec,
        critic=spec_of_critic(settings.model, settings.mesh, settings.algorithm),
        teacher=spec_of_teacher(teacher_settings(settings), settings.mesh),
        reference=spec_of_reference(
            settings.model, settings.mesh, settings.algorithm, settings.teacher
        ),
    )


# A part of a run has an adapter exactly if its frozen base is the policy's, or if it is a teacher
# with an adapter of its own.


def spec_of_critic(
    compute: ModelConfig, mesh: MeshConfig, algorithm: Algorithm
) -> Spec[None] | None:
    """Returns the critic of a run: a model, or a new adapter on the policy's frozen base."""
    if not algorithms.needs_critic(algorithm):
        return None
    return Spec(compute, mesh, None, no_learners, shares_base=bool(compute.adapter.rank))


def spec_of_reference(
    compute: ModelConfig,
    mesh: MeshConfig,
    algorithm: Algorithm,
    teacher: teachers.Teacher | None,
) -> Spec[None] | None:
    """Returns the reference policy of a run, for its KL term or as its teacher."""
    if not (algorithms.needs_reference(algorithm) or isinstance(teacher, teachers.Reference)):
        return None
    return Spec(compute, mesh, None, no_learners, shares_base=bool(compute.adapter.rank))


def teacher_settings(settings: Config) -> TeacherSettings | None:
    """Returns the settings of a run's teacher, or None if the algorithm uses no teacher."""
    if settings.teacher is None or not algorithms.needs_teacher(settings.algorithm):
        return None
    # A warm start trains the full model before the adapter, so the base is not the model at
    # model.path.
    is_base_frozen = bool(settings.model.adapter.rank) and settings.warm_start is None
    return TeacherSettings(
        settings.teacher, settings.model, settings.rollout, settings.train, is_base_frozen
    )


def spec_of_teacher(teaching: TeacherSettings | None, mesh: MeshConfig) -> Spec[None] | None:
    """Returns the teacher of a run if it is a model (teacher=model) with arrays on the mesh.

    `describe` gives it the adapter of its architectures (`Models.teacher_adapter`).
    """
    if teaching is None or not isinstance(teaching.choice, teachers.Model):
        return None
    compute = replace(teaching.policy, base="native", adapter=AdapterConfig())
    return Spec(
        compute, mesh, None, no_learners, dtype=compute.dtype, shares_base=teaching.shares_base
    )


def _rl_learners(settings: Config, models: Models, mesh: Mesh) -> Trainer:
    return make_trainer(settings, models.policy, models.critic, mesh)


def _fine_tuning_learners(settings: Config, models: Models, mesh: Mesh) -> SupervisedTrainer:
    assert settings.sft is not None, "the run has no fine-tuning"
    return SupervisedTrainer(
        models.policy,
        mesh,
        settings.model,
        settings.optimizer,
        settings.train,
        settings.sft.pack_length,
        settings.sft.batch_size,
        settings.rollout.draft,
    )


def spec_of_decoder(
    compute: ModelConfig,
    mesh: MeshConfig,
    rollout: RolloutConfig,
    algorithm: Algorithm,
    evaluation: EvalConfig,
) -> Spec[None]:
    """Returns what a program that only samples has on its devices."""
    return Spec(
        compute,
        mesh,
        sampling_of(rollout, algorithm, evaluation),
        no_learners,
        rollout.decode_devices,
        rollout.hosts_per_decoder,
    )


def no_learners(models: Models, mesh: Mesh) -> None:
    """Makes what trains, for a spec that trains nothing."""


def sampling_of(rollout: RolloutConfig, algorithm: Algorithm, evaluation: EvalConfig) -> Sampling:
    """Returns what the decoder of a run has to hold, from the sections that it depends on."""
    longest = evaluation.longest_episode(rollout)
    return Sampling(rollout, longest, config.num_kept(algorithm, rollout))


def without_training(spec: Spec[Trains]) -> Spec[Trains]:
    """Returns the spec of a program whose samples are not trained on: prefix_cache=auto is on.

    Layers with a sliding window keep all tokens then, because a cached prefix needs them.
    """
    sampling = spec.sampling
    if sampling is None or sampling.rollout.prefix_cache != "auto":
        return spec
    rollout = replace(sampling.rollout, prefix_cache="on")
    return replace(spec, sampling=replace(sampling, rollout=rollout))


def most_sequences(
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    is_fine_tuning: bool,
) -> int:
    """Returns how many sequences a training run can decode at the same time, over all hosts.

    Suites (eval.suites) have any number of problems, and count as rollout.num_slots.
    """
    groups = rollout.num_prompts
    if rollout.max_staleness:
        groups = rollout.max_running_groups or (rollout.max_staleness + 1) * rollout.num_prompts
    sequences = 0 if is_fine_tuning else groups * rollout.group_size
    if evaluation.suites:
        sequences = max(sequences, rollout.num_slots or DEFAULT_SLOTS)
    if is_fine_tuning:
        return max(sequences, 1)
    # The two kinds of an evaluation are sampled one after the other, so the larger counts.
    return max(sequences, evaluation.problems * max(evaluation.samples, evaluation.greedy))


def with_needed_slots(
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    is_fine_tuning: bool = False,
) -> RolloutConfig:
    """Returns the settings of a training run without slots that no sequence would ever use.

    With rollout.num_slots=0 every sequence has a slot.
    """
    most = most_sequences(rollout, evaluation, is_fine_tuning)
    return replace(rollout, num_slots=min(rollout.num_slots or most, most))
