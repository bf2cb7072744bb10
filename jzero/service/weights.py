"""Reads the weights of described models onto their devices: no other code of jzero does.

    params = load(blueprint, directory)               a full model, or the frozen base of an adapter
    factors = load_adapter(blueprint, adapter, ...)   an adapter on it

A blueprint (`jzero.blueprint`) has the shapes, types and shardings of the arrays, so a plan counts
what is loaded here. The functions below the first section load what a training run starts from: its
model, its initial adapter, its critic, its teacher and its reference policy.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jzero.algorithms import Algorithm
from jzero.blueprint import Blueprint
from jzero.config import AdapterConfig, teachers
from jzero.distillation.build import teacher_directory
from jzero.distillation.in_process import TeacherArrays, TeacherSettings
from jzero.files import JsonObject
from jzero.model import huggingface, peft, qwen
from jzero.sharding.mesh import adapter_shardings, param_shardings
from jzero.training import reference
from jzero.training.frozen import freeze, put_quantized
from jzero.training.frozen_base import InitialWeights, check_base, freeze_model
from jzero.training.learner import Learner
from jzero.types import State


def load(blueprint: Blueprint[object], directory: Path) -> qwen.Params:
    """Returns the model in a Hugging Face directory, as the arrays that a blueprint describes.

    With an adapter (`Blueprint.spec.compute`) they are its frozen base, by model.base and
    model.dtype, and otherwise the full model. Raises UserError if the files do not hold the model.
    """
    compute, model, mesh = blueprint.spec.compute, blueprint.models.policy, blueprint.mesh
    if not compute.adapter.rank:
        shardings = param_shardings(model, mesh)
        return huggingface.load(directory, model, shardings, blueprint.spec.dtype)
    # Parameters are read in the base's dtype: fp32 parameters would need more memory than the base.
    dtype = compute.dtype
    if compute.is_base_quantized:
        read = reader(directory, model, dtype)
        names = huggingface.flatten(qwen.abstract(model))
        return put_quantized(((name, read(name)) for name in names), model, mesh, dtype)
    params = huggingface.load(directory, model, param_shardings(model, mesh), dtype)
    return freeze(params, model, mesh, dtype)


def load_adapter(
    blueprint: Blueprint[object],
    adapter: AdapterConfig,
    directory: Path,
    base: Path | None = None,
    dtype: str = "float32",
) -> qwen.Params:
    """Returns the factors of the adapter in a directory, on the mesh of a blueprint.

    adapter: its settings, which have to be those of the files (`peft.read_settings`).
    base: directory of the base model; None: see `peft.load`.
    dtype: type of the factors.
    Raises UserError if the files do not hold such an adapter of the blueprint's model.
    """
    model = blueprint.models.policy
    shardings = adapter_shardings(model, adapter, blueprint.mesh)
    return peft.load(directory, model, adapter, shardings, dtype, base)


def reader(directory: Path, model: qwen.QwenConfig, dtype: str) -> Callable[[str], np.ndarray]:
    """Returns a function that reads a parameter of a model to the host, by its name."""
    return huggingface.reader(directory, model, dtype)


# -- what a training run starts from ---------------------------------------------------------------


def load_model(
    weights: InitialWeights, blueprint: Blueprint[object], policy: Learner, seed: int
) -> qwen.Params:
    """Returns the model that a run starts from, frozen if no later step changes it.

    policy: the blueprint's learner of the policy, which draws random parameters.
    seed: of random parameters. Every process calls this function.
    """
    directory = weights.base.directory
    # The warm start still trains the full model; `freeze_model` freezes it afterwards.
    if not weights.model.adapter.rank or weights.is_warm_started:
        return load_full(blueprint, policy, directory, seed)
    if directory is None:
        return freeze_model(weights, policy, policy.init_params(seed))
    return load(blueprint, directory)


def load_full(
    blueprint: Blueprint[object], policy: Learner, directory: Path | None, seed: int
) -> qwen.Params:
    """Returns the fp32 parameters of the full model; random ones if `directory` is None."""
    if directory is None:
        return policy.init_params(seed)
    return load(blueprint.without_adapter(), directory)


def load_base(
    weights: InitialWeights, blueprint: Blueprint[object], expected: JsonObject
) -> qwen.Params:
    """Returns the frozen base of a resumed run; {} for a run that trains the full model.

    `expected` is the entry for the base in the checkpoint. Raises UserError, before weights are
    loaded, if the base is a different one.
    """
    if not weights.model.adapter.rank:
        return {}
    check_base(weights, expected)
    return load(blueprint, weights.directory)


def load_given_adapter(blueprint: Blueprint[object]) -> qwen.Params | None:
    """Returns the adapter that a run starts from (model.adapter.path); None for a new one."""
    adapter = blueprint.spec.compute.adapter
    if not adapter.path:
        return None
    return load_adapter(blueprint, adapter, peft.resolve(adapter.path))


def load_critic(
    blueprint: Blueprint[object], critic: Learner, path: str, params: qwen.Params, seed: int
) -> qwen.Params:
    """Returns the initial parameters of a critic that is a full model, with a new value head.

    blueprint: of a run with a critic.
    path: the model of its backbone (critic.path); empty: a copy of the policy's `params`.
    """
    backbone = params
    if path:
        assert blueprint.critic is not None, "the run has no critic"
        # The files of a language model have no value head, and neither has the blueprint's model.
        backbone = load(blueprint.critic, huggingface.resolve(path))

    # Updates donate the states of the policy and the critic, so the two must not share an array.
    def copy(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.jit(jnp.copy, out_shardings=sharding)(array)

    values = {
        name: jax.tree.map(copy, backbone[name], critic.shardings[name])
        for name in ("embed", "layers", "norm")
    }

    def init_head() -> jax.Array:
        return qwen.init(critic.model, jax.random.key(seed))["value"]

    # Under jit XLA drops the random parameters that are not returned, so only the head is computed.
    values["value"] = jax.jit(init_head, out_shardings=critic.shardings["value"])()
    return values


def load_teacher(
    teaching: TeacherSettings | None, teacher: Blueprint[object] | None
) -> TeacherArrays | None:
    """Returns the arrays of the teacher of a run; None if it has none on the mesh.

    teacher: its blueprint, as `Blueprint.teacher`. Raises UserError if they cannot be read.
    """
    if teaching is None or teacher is None:
        return None
    choice = teaching.choice
    assert isinstance(choice, teachers.Model), f"{choice=}"
    model, adapter = teacher.models.policy, teacher.spec.compute.adapter
    factors = None
    if choice.adapter:
        factors = load_adapter(teacher, adapter, peft.resolve(choice.adapter))
    base = None
    if not teacher.spec.shares_base:
        base = load(teacher, teacher_directory(teaching.policy, choice))
    return TeacherArrays(model, base, factors, adapter.scale)


def load_reference(
    blueprint: Blueprint[object],
    policy: Learner,
    workdir: Path,
    algorithm: Algorithm,
    step: int,
    state: State,
    oldest_checkpoint: int,
) -> qwen.Params:
    """Returns the reference policy after RL step `step`: a full model with the policy's sharding.

    blueprint: of the reference, as `Blueprint.reference`.
    policy: the learner of the policy, whose State after this step is `state`. If its parameters
        become the reference, they are saved first (`training.reference`).
    """
    directory = reference.save_reference(workdir, policy, algorithm, step, state, oldest_checkpoint)
    if directory is None:
        return state.base
    if state.base:
        return policy.whole(state.base, reference.load_adapter(directory, policy.shardings))
    return load(blueprint, directory)
