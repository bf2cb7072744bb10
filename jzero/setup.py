"""What a run of RL is made of, built before its first step.

    check(config, workdir)   refuses settings that cannot work
    build(config, pool)      model, tokenizer, meshes, sampler and trainer
    initial_state(...)       fresh optimizers around the first parameters

`check` downloads, compiles and writes nothing. `build` may download a model, and compiles nothing:
programs are compiled when they are first called.
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jzero import algorithms
from jzero.config import Config, ModelConfig, to_json, validate
from jzero.distributed import collectives, processes
from jzero.distributed.mesh import configured_mesh, param_shardings, split_devices
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import adapters, huggingface, qwen
from jzero.planning.fitting import check_memory
from jzero.rollout.async_stream import RolloutStream, ThreadedStream
from jzero.rollout.evaluation import encode_suites
from jzero.rollout.sampler import EncodedProblem, Sampler, make_sampler
from jzero.run.base_model import BaseModel, check_context, read_base_model
from jzero.run.clock import Clock
from jzero.run.resume import steps_to_discard
from jzero.run.workdir import check_workdir
from jzero.tasks import check_task_settings, find_task, rewards, suites
from jzero.tasks.prompts import PromptTemplate
from jzero.tasks.tools import episodes as tool_episodes
from jzero.training.learner import Learner
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import State


@dataclass(frozen=True)
class Run:
    """What a step uses and does not change."""

    config: Config
    base: BaseModel  # the model that the run starts from
    trainer: Trainer
    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # the trainer's parameters -> the sampler's
    stream: RolloutStream | None  # None if rollout.max_staleness=0: every step samples its own

    @property
    def clock(self) -> Clock:
        """Seconds of each phase of the run."""
        return self.trainer.clock


# -- checks ----------------------------------------------------------------------------------------


def check_task(config: Config) -> None:
    """Raises UserError if the settings, the task, its template or its rewards cannot work."""
    validate(config, is_training=True)
    check_task_settings(config.task, config.rollout.max_turns)
    rewards.check_rewards(config.task.reward)


def check(config: Config, workdir: Path) -> float | None:
    """Raises UserError if the run cannot work. Nothing is downloaded, compiled or written.

    Returns the bytes that the run needs of each device, None where that is not known.
    """
    check_task(config)
    suites.check_suites(config.eval.suites)
    if config.warm_start.steps:
        check_warm_start(config)
    check_workdir(workdir, to_json(config))
    steps_to_discard(workdir, config.train)
    return check_memory(config)


def check_warm_start(config: Config) -> None:
    """Raises UserError if a warm-start example may be longer than a response."""
    task = find_task(config.task.name)
    longest = task.warm_start_tokens(config.task, config.warm_start.tries)
    if longest > config.rollout.max_new_tokens:
        raise UserError(
            f"a warm-start example may have {longest} tokens, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: raise it to {longest}, "
            "or set warm_start.steps=0"
        )


# -- settings that are computed --------------------------------------------------------------------


def with_stop_strings(config: Config, template: PromptTemplate | None = None) -> Config:
    """Returns the config with the stop strings of its template, if it names none of its own.

    `template` is the one that prompts are made with, None for that of the task.
    """
    if template is None:
        template = find_task(config.task.name).find_template(config.task.template)
    if config.rollout.stop or not template.stop:
        return config
    return replace(config, rollout=replace(config.rollout, stop=template.stop))


def with_steps(config: Config) -> Config:
    """Returns the config with the RL steps that train.prompt_epochs passes over the problems take.

    Loads the problems. Of that number and train.steps, the smaller counts.

    Raises:
        UserError: the task makes its problems without end.
    """
    train, num_prompts = config.train, config.rollout.num_prompts
    if not train.prompt_epochs:
        return config
    num_problems = find_task(config.task.name).num_train_problems(config.task)
    if num_problems is None:
        raise UserError(
            f"train.prompt_epochs={train.prompt_epochs:g}: the problems of task.name="
            f"{config.task.name} have no end without task.data; set train.prompt_epochs=0 and "
            "train.steps"
        )
    steps = max(1, int(train.prompt_epochs * num_problems / num_prompts))
    processes.print_once(
        f"train.prompt_epochs={train.prompt_epochs:g}: {num_problems} problems, {num_prompts} in a "
        f"step, take {steps} steps"
    )
    if 0 < train.steps < steps:
        processes.print_once(f"train.steps={train.steps} ends the run before that")
        return config
    return replace(config, train=replace(train, steps=steps))


# -- building --------------------------------------------------------------------------------------


def build(config: Config, pool: Pool, base: BaseModel | None = None) -> Run:
    """Returns the parts of a run. Reads the tokenizer and the model's shape, but no weights.

    base: what `read_base_model` returns for the config, if the caller has it already.
    """
    base = base or read_base_model(config.model)
    check_context(config, base)
    critic = read_critic(config, base.model)
    devices, _ = split_devices(config.mesh.decode_devices)
    mesh = configured_mesh(config.mesh, devices)
    check_tensor_axis(mesh, base.model)
    if critic is not None:
        check_tensor_axis(mesh, critic)

    sampler, publish = make_sampler(config, base, mesh, pool)
    trainer = make_trainer(config, base.model, critic, mesh)
    stream = make_stream(config, sampler)
    processes.print_once(describe(base.model, config.model, mesh))
    return Run(config, base, trainer, sampler, publish, stream)


def read_critic(config: Config, policy: qwen.QwenConfig) -> qwen.QwenConfig | None:
    """Returns the shape of the critic's backbone, or None if the algorithm needs no critic."""
    if not algorithms.needs_critic(config.algorithm):
        return None
    if not config.critic.path:
        return policy
    critic, _ = huggingface.load_config(huggingface.resolve(config.critic.path))
    if critic.vocab_size != policy.vocab_size:
        raise UserError(
            f"critic.path={config.critic.path} has a vocabulary of {critic.vocab_size}, the policy "
            f"one of {policy.vocab_size}: give a model with the policy's tokenizer"
        )
    return critic


def check_tensor_axis(mesh: Mesh, model: qwen.QwenConfig) -> None:
    """Raises UserError if the tensor axis of the mesh cannot split the heads of a model."""
    tensor, heads = mesh.shape["tensor"], model.num_key_value_heads
    if heads % tensor:
        raise UserError(
            f"mesh.tensor={tensor} does not divide the model's {heads} key-value heads; "
            "set it to one of their divisors"
        )


def make_stream(config: Config, sampler: Sampler) -> RolloutStream | None:
    """Returns the stream of asynchronous rollouts, or None in a synchronous run."""
    if config.rollout.max_staleness == 0:
        return None
    if config.mesh.decode_devices:
        return ThreadedStream(sampler, config)
    return RolloutStream(sampler, config)


def describe(model: qwen.QwenConfig, settings: ModelConfig, mesh: Mesh) -> str:
    """Returns a line on the model and the devices."""
    millions = qwen.num_params(model) / 1e6
    trained, adapter = "", settings.adapter
    if adapter.rank:
        frozen = "frozen in 8 bits" if settings.is_base_quantized else "frozen"
        trained_millions = adapters.num_params(model, adapter) / 1e6
        trained = f", {frozen} under {trained_millions:.1f}M of an adapter of rank {adapter.rank},"
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    return (
        f"{model.model_type} of {millions:.1f}M parameters{trained} on {mesh.devices.size} {kind} "
        f"devices ({axes})"
    )


def evaluation_problems(run: Run) -> dict[str, list[EncodedProblem]]:
    """Returns the problems of each evaluation whose prompts are short enough, tokenized.

    The task's held-out problems have the name "", suites of eval.suites have their own. Prints what
    was dropped, and the task's notes on its data.
    """
    config = run.config
    task = find_task(config.task.name)
    for note in [*task.notes(config.task), *tool_episodes.notes(config.task)]:
        processes.print_once(note)

    held_out = task.eval_problems(config.task, config.eval.problems)
    encoded = run.sampler.encode_problems(held_out, "held out")
    own = {"": encoded} if encoded else {}
    return own | encode_suites(run.sampler, config)


# -- state -----------------------------------------------------------------------------------------


def initial_state(run: Run, params: qwen.Params) -> State:
    """Returns a State with fresh optimizers around the policy's `params` and the critic's own.

    With an adapter `params` are the frozen base, which policy and critic share.
    """
    seed = run.config.train.seed
    state = run.trainer.policy.start_on(params, seed)
    critic = run.trainer.critic
    if critic is None:
        return state
    if run.config.model.adapter.rank:
        return replace(state, critic=critic.start_on(params, seed))
    return replace(state, critic=critic.start(initial_critic_params(run, critic, params)))


def initial_critic_params(run: Run, critic: Learner, params: qwen.Params) -> qwen.Params:
    """Returns the critic's parameters: the backbone of critic.path, or else a copy of the policy's,
    with a new value head.
    """
    backbone = params
    if path := run.config.critic.path:
        model = replace(critic.model, value_head=False)
        shardings = param_shardings(model, critic.mesh)
        backbone = huggingface.load(huggingface.resolve(path), model, shardings)

    # Updates donate the states of policy and critic, so the two must not share an array.
    def copy(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.jit(jnp.copy, out_shardings=sharding)(array)

    values = {
        name: jax.tree.map(copy, backbone[name], critic.shardings[name])
        for name in ("embed", "layers", "norm")
    }

    def init_head() -> jax.Array:
        return qwen.init(critic.model, jax.random.key(run.config.train.seed))["value"]

    values["value"] = jax.jit(init_head, out_shardings=critic.shardings["value"])()
    return values


def with_base(state: State, base: qwen.Params) -> State:
    """Returns a State whose adapters are on `base`, as a checkpoint does not hold it."""
    critic = replace(state.critic, base=base) if state.critic else None
    return replace(state, base=base, critic=critic)


def abstract_state(run: Run) -> State:
    """Returns the shapes and shardings of a State, as restoring a checkpoint needs them."""
    policy, critic = run.trainer.policy, run.trainer.critic
    critic_state = critic.abstract_state() if critic else None
    return replace(policy.abstract_state(), critic=critic_state)


# -- unfinished rollouts ---------------------------------------------------------------------------


def stream_states(run: Run) -> list[str]:
    """Returns the unfinished rollouts of every process, as base64. Every process has to call it."""
    if run.stream is None:
        return []
    gathered = collectives.gather_bytes(run.stream.state())
    return [base64.b64encode(data).decode() for data in gathered]


def restore_stream(run: Run, states: list[str]) -> None:
    """Gives this process the unfinished rollouts that it had when `stream_states` was called.

    Raises UserError if the number of processes has changed.
    """
    if run.stream is None:
        return
    if len(states) != jax.process_count():
        raise UserError(
            f"with rollout.max_staleness > 0 a run of {len(states)} processes resumes with as many"
        )
    run.stream.restore(base64.b64decode(states[jax.process_index()]))
