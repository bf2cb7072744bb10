"""Builds all parts of a run before its first step.

    resolve(config, workdir)   final settings, the initial model, and what the devices hold
    build(resolved, pool)      sampler and trainer of an RL run
    initial_state(...)         new optimizer states for the initial parameters
    first_state(run)           the same, with the initial parameters: for loops without a workdir

Settings are resolved once: `resolve` makes all checks, fills in every setting that depends on the
machine, on the model or on the run in the workdir, and returns settings that cannot be changed any
more. It may download a model, but compiles and writes nothing. Programs are compiled when they are
first called.
"""

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jzero import algorithms, terminal
from jzero.answers import published
from jzero.blueprint import (
    Blueprint,
    Models,
    attached_topology,
    describe,
    models_of,
    models_of_run,
    spec_of_run,
)
from jzero.clock import Clock
from jzero.config import (
    AdapterConfig,
    Config,
    Jobs,
    ModelConfig,
    WarmStart,
    to_json,
    turns,
    validate,
)
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import UserError
from jzero.fields import frozen, part_name
from jzero.hosts import collectives, peers, processes
from jzero.hosts.interrupt import StopCheck, never_stop
from jzero.jobs.stream import STREAMS, JobSettings, JobStream
from jzero.model import adapters, chat_template, huggingface, qwen
from jzero.model.base_model import BaseModel, read_base_model
from jzero.model.families import window_of
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.planning.disk import check_disk, exports_models
from jzero.planning.fitting import check_memory, fitting_pages, set_cpu_devices
from jzero.planning.host_memory import check_host_memory, parts_of_run
from jzero.planning.kv_pool import room_in_run, with_pages
from jzero.planning.sizing import recorded_settings, sizes_line, with_sizes, with_sizes_of
from jzero.problems import problem_sets
from jzero.problems.prompts import PromptTemplate
from jzero.rewards import rewards
from jzero.rollout.async_stream import (
    RolloutStream,
    Stream,
    ThreadedStream,
    TrainingProblems,
)
from jzero.rollout.collect import Collection
from jzero.rollout.evaluation import encode_suites, print_left_out
from jzero.rollout.sampler import EncodedProblem, Sampler, Sampling, make_sampler
from jzero.run import kv_pool
from jzero.run.callbacks import check_callbacks
from jzero.run.doctor import stop_names
from jzero.run.hub_pushes import check_token
from jzero.run.memory import return_freed_memory
from jzero.run.resume import steps_to_discard
from jzero.run.trackers import check_trackers
from jzero.run.workdir import check_workdir
from jzero.service.resolve import check_context, with_given_adapter
from jzero.service.weights import load_critic, load_full, load_given_adapter
from jzero.tasks import (
    check_task_settings,
    evaluated_task,
    find_task,
    mixed,
    stop_strings,
    suites,
)
from jzero.tasks.problem_checks import check_problems
from jzero.training.examples import Example, encode_completion
from jzero.training.frozen_base import InitialWeights
from jzero.training.learner import Learner
from jzero.training.supervised import SupervisedTrainer
from jzero.training.trainer import Trainer
from jzero.training.warm_start import warm_start
from jzero.types import State
from jzero.workers.pool import Pool

# The rows that a step of the warm start may have. With more rows in a microbatch, the numbers of
# earlier runs would change in their last bits.
WARM_START_ROWS = 128


@dataclass(frozen=True)
class Run:
    """The parts of an RL run that its steps use and do not change."""

    config: Config
    base: BaseModel  # the initial model
    trainer: Trainer  # the learners of the blueprint
    blueprint: Blueprint[Trainer | SupervisedTrainer]
    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # the trainer's parameters -> the sampler's
    stream: Stream | None  # None if every step samples its rollouts itself

    @property
    def collection(self) -> Collection:
        """The settings that collect the rollouts of a step."""
        config = self.config
        problems = training_problems(config)
        return Collection(problems, config.rollout, config.algorithm, config.train.steps)

    @contextlib.contextmanager
    def sampling(self, params: qwen.Params, version: int) -> Iterator[Sampling]:
        """Publishes the trainer's `params` to the decoder for the duration of a `with` block.

            with run.sampling(params, version) as sampler:
                rollouts = sampler.rollouts(problems, key=(seed, step))

        The decoder's weights are freed at the end, because an update needs the memory.

        version: of `params`, which sampled tokens record.
        """
        sampling = Sampling(self.sampler, self.publish(params), version)
        try:
            yield sampling
        finally:
            sampling.close()
            return_freed_memory()

    @property
    def has_jobs(self) -> bool:
        """Whether separate jobs sample the rollouts of training steps."""
        return isinstance(self.config.rollout.placement, Jobs)

    @property
    def clock(self) -> Clock:
        """Seconds of each phase of the run."""
        return self.trainer.clock


# -- checks ----------------------------------------------------------------------------------------


def check_task(config: Config) -> None:
    """Raises UserError if the settings, the task, its template or its rewards cannot work."""
    validate(config, is_training=True)
    check_task_settings(config.task, config.rollout.max_turns)
    # A mixed task has separate settings for every kind of row.
    for name, task in mixed.all_settings(config.task).items():
        # Raises UserError if a package of the verifier is missing.
        published.load(task.verifier)
        rewards.check_rewards(task.reward)
        advantage = part_name(type(config.algorithm.advantage))
        if algorithms.needs_parts(config.algorithm) and task.reward != config.task.reward:
            raise UserError(
                f"task.options={name}.reward...: algorithm.advantage={advantage} "
                "reads the same rewards of every row, set task.reward"
            )


def check(config: Config, workdir: Path) -> float | None:
    """Raises UserError if a run of RL or of fine-tuning cannot work.

    Nothing is downloaded, compiled or written. Returns the bytes that the run needs on each device,
    or None if they are unknown.
    """
    if config.sft is None:
        check_task(config)
        evaluated_task.check_verifiers(config.eval)
        stop_names(config.train.stop_on)
        if config.warm_start is not None:
            check_warm_start(config, config.warm_start)
    else:
        validate(config)
    suites.check_suites(config.eval.suites)
    # Here and not when they are first used, which may be hours later.
    check_token(config.hub.push)
    check_trackers(config.train.trackers)
    check_callbacks(config.train.callbacks)
    check_workdir(workdir, to_json(config))
    # Called for its errors: the session removes the steps.
    steps_to_discard(workdir, config.train)
    check_host_memory(config, parts_of_run(config))
    check_disk(config, workdir)
    return check_memory(config)


def check_warm_start(config: Config, warm: WarmStart) -> None:
    """Raises UserError if a warm-start example may be longer than a response."""
    task = find_task(config.task.name)
    longest = task.warm_start_tokens(config.task, warm.tries)
    if longest > config.rollout.max_new_tokens:
        raise UserError(
            f"a warm-start example may have {longest} tokens, "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}: raise it to {longest}, "
            "or set warm_start=none"
        )


# -- resolved settings -----------------------------------------------------------------------------


class ResolvedRun(NamedTuple):
    """A run before its first program: its final settings, and what it has on its devices."""

    config: Config  # frozen
    base: BaseModel  # the initial model
    blueprint: Blueprint[Trainer | SupervisedTrainer]
    planned_bytes: float | None = None  # on each device, by the planner; None if they are unknown
    data: object = None  # the result of `read_data`


class PreparedRun(NamedTuple):
    """A run before its model is read."""

    config: Config  # without the settings that depend on the model's files
    planned_bytes: float | None = None
    data: object = None


def resolve(
    config: Config,
    workdir: Path | None = None,
    base: BaseModel | None = None,
    read_data: Callable[[Config], object] | None = None,
) -> ResolvedRun:
    """Returns a run with its final settings, and prints its sizes. `config` itself stays as it is.

    The checks come before the model is downloaded. Reads the tokenizer and the model's config, but
    no weights. Every process calls this function.

    Args:
        config: the settings of a recipe and its flags.
        workdir: of the run, which may be resumed: it keeps its sizes, its date and its pages. None:
            for loops and benchmarks without a workdir, which have no checks of files, data and
            memory.
        base: the result of `read_base_model` for the config, if the caller already has it.
        read_data: reads the data of the run, before the model is downloaded; only with a workdir.

    Raises UserError if the run cannot work.
    """
    if workdir is None:
        prepared, recorded_pages = PreparedRun(with_computed_settings(config)), 0
    else:
        prepared, recorded_pages = prepare(config, workdir, read_data), kv_pool.read_pages(workdir)
    config = prepared.config
    with terminal.phase("set up", has_bar=False):
        base = base or read_base_model(config.model, config.rollout.draft)
        config = frozen(with_prompt_date(with_sizes_of(config, base.directory), base))
        check_context(config, base)
        if config.model.adapter.rank and exports_models(config.model, config.train, config.hub):
            adapters.check_merge(base.model, adapters.targets(base.model, config.model.adapter))
        blueprint = blueprint_of(config, base, recorded_pages)
    processes.print_once(sizes_line(config, blueprint.engine))
    return ResolvedRun(config, base, blueprint, prepared.planned_bytes, prepared.data)


def prepare(
    config: Config, workdir: Path, read_data: Callable[[Config], object] | None = None
) -> PreparedRun:
    """Makes all checks of a run that need no model, and fills in the settings that need none.

    This is the first half of `resolve`, with its arguments and errors. `jzero train` calls it
    before it writes a recipe. Nothing is downloaded but data, and nothing compiled or written.
    """
    config = with_computed_settings(config, workdir)
    with terminal.phase("check the memory"):
        planned_bytes = check(config, workdir)
    data = None
    if read_data is not None:
        with terminal.phase("read the data", has_bar=False):
            data = read_data(config)
    if config.sft is None:
        check_problems(config.task, config.train.seed, config.rollout.num_prompts)
        config = with_steps(config)
    return PreparedRun(config, planned_bytes, data)


def with_computed_settings(config: Config, workdir: Path | None = None) -> Config:
    """Returns the config with the settings that follow from others or from the devices.

    They are the stop strings of the template, the rank and targets of an initial adapter, and the
    sizes that are 0. `resolve` fills in the others.

    workdir: of a run that may be resumed; it keeps its sizes and its date.
    Raises UserError if the settings do not fit together.
    """
    set_cpu_devices(config.model.path)
    # Fine-tuning reads conversations, which have no template of a task.
    if config.sft is None:
        config = with_stop_strings(config)
    if workdir is not None:
        config = with_recorded_date(config, workdir)
    return with_sizes(with_given_adapter(config), workdir)


def with_stop_strings(config: Config, template: PromptTemplate | None = None) -> Config:
    """Returns the config with the stop strings of its template, unless rollout.stop is set.

    template: the template of the prompts; None: the template of the task.
    """
    if config.rollout.stop:
        return config
    stop = stop_strings(config.task) if template is None else template.stop
    return replace(config, rollout=replace(config.rollout, stop=stop)) if stop else config


def with_recorded_date(config: Config, workdir: Path) -> Config:
    """Returns the config with the date of the prompts of the run in `workdir`, if there is one."""
    if config.model.prompt_date:
        return config
    date = str(recorded_settings(workdir).get("model.prompt_date", ""))
    return replace(config, model=replace(config.model, prompt_date=date))


def with_steps(config: Config) -> Config:
    """Returns the config with train.steps computed from train.prompt_epochs.

    Loads the problems. If train.steps is also set, the smaller number applies.

    Raises:
        UserError: the task generates an endless stream of problems.
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
    pass_end = problem_sets.pass_end_of(config.task)
    steps = problem_sets.num_steps(train.prompt_epochs, num_prompts, num_problems, pass_end)
    processes.print_once(
        f"train.prompt_epochs={train.prompt_epochs:g}: {num_problems} problems, {num_prompts} in a "
        f"step, take {steps} steps"
    )
    if 0 < train.steps < steps:
        processes.print_once(f"train.steps={train.steps} ends the run before that")
        return config
    return replace(config, train=replace(train, steps=steps))


def with_prompt_date(config: Config, base: BaseModel) -> Config:
    """Returns the config with the current date, if the chat template writes it into prompts.

    All prompts of the run have this date, also when it resumes on another day. Every process calls
    this function.
    """
    if config.model.prompt_date or not chat_template.writes_date(base.tokenizer):
        return config
    # Hosts may start before and after midnight.
    date = str(collectives.gather_json(str(chat_template.prompt_date(base.tokenizer)))[0])
    chat_template.set_prompt_date(base.tokenizer, date)
    return replace(config, model=replace(config.model, prompt_date=date))


# -- building --------------------------------------------------------------------------------------


def build(resolved: ResolvedRun, pool: Pool, workdir: Path | None = None) -> Run:
    """Returns the parts of an RL run. Reads no weights, and compiles nothing.

    workdir: of a run whose rollouts are sampled by separate jobs.
    """
    config, base, blueprint = resolved.config, resolved.base, resolved.blueprint
    trainer = blueprint.learners
    assert isinstance(trainer, Trainer), f"{config.sft=}"
    sampler = make_sampler(blueprint.decoder, base, config.task, pool)
    stream = make_stream(config, sampler, base, workdir)
    processes.print_once(describe_model(base.model, config.model, blueprint.mesh))
    return Run(config, base, trainer, blueprint, sampler, blueprint.publisher(), stream)


def blueprint_of(
    config: Config, base: BaseModel, recorded_pages: int = 0
) -> Blueprint[Trainer | SupervisedTrainer]:
    """Returns what a training run has on the attached devices, with pages that fit into memory.

    recorded_pages: the number of KV cache pages that the run started with; 0 for a new run. Raises
    UserError if the settings do not fit the model or the devices.
    """
    models = models_of(base, read_others(config, base.model))
    blueprint = describe(spec_of_run(config), models, attached_topology())
    if blueprint.engine is None:
        return blueprint
    planned = config
    if base.directory:  # the model is downloaded now, and the planner reads directories
        planned = replace(config, model=replace(config.model, path=str(base.directory)))
    room = room_in_run(config.memory, blueprint.engine, lambda: fitting_pages(planned))
    return with_pages(blueprint, room, recorded_pages)


def read_others(config: Config, policy: qwen.QwenConfig) -> Models:
    """Returns the architectures of the critic and the teacher of a run. Reads no weights.

    Raises UserError if one of them cannot be read, or if the critic does not fit the policy.
    """

    def read(setting: str, path: str) -> qwen.QwenConfig:
        try:
            directory = huggingface.resolve(path)
        except UserError as error:
            raise UserError(f"{setting}={path}: {error}") from None
        model, hf_config = huggingface.load_config(directory)
        if setting == "critic.path":
            check_critic(config, policy, model, window_of(hf_config))
        return model

    return models_of_run(config, policy, read)


def check_critic(
    config: Config, policy: qwen.QwenConfig, critic: qwen.QwenConfig, window: int | None
) -> None:
    """Raises UserError if the critic at critic.path, with a sliding window, cannot be used."""
    longest = config.rollout.longest_episode
    if window is not None and longest > window:
        raise UserError(
            f"critic.path={config.critic.path} has sliding_window={window}, and jzero attends to "
            f"all tokens: sequences have up to {longest} tokens, give another critic"
        )
    # The critic reads the token ids of the policy.
    if critic.vocab_size != policy.vocab_size:
        raise UserError(
            f"critic.path={config.critic.path} has a vocabulary of {critic.vocab_size}, the policy "
            f"one of {policy.vocab_size}: give a model with the policy's tokenizer"
        )


def make_stream(
    config: Config,
    sampler: Sampler,
    base: BaseModel,
    workdir: Path | None,
) -> Stream | None:
    """Returns the stream of rollouts, or None in a synchronous run."""
    if isinstance(config.rollout.placement, Jobs):
        return make_job_stream(config, config.rollout.placement, sampler, base, workdir)
    if config.rollout.max_staleness == 0:
        return None
    problems = training_problems(config)
    if config.rollout.decode_devices:
        return ThreadedStream(sampler, problems, config.rollout)
    return RolloutStream(sampler, problems, config.rollout)


def make_job_stream(
    config: Config,
    placement: Jobs,
    sampler: Sampler,
    base: BaseModel,
    workdir: Path | None,
) -> JobStream:
    """Returns the stream of rollouts that separate jobs sample."""
    assert workdir is not None, "separate jobs keep their results in the workdir"
    if peers.has_peers():
        raise UserError(
            "rollout.placement=jobs: the trainer has one process: remove --num_processes, or "
            "set rollout.placement=together"
        )
    # 8-bit weights are rounded from the trainer's fp32.
    dtype = "float32" if config.rollout.quantizes_weights else config.model.dtype
    settings = JobSettings(
        config_json=to_json(config),
        workdir=workdir,
        dtype=dtype,
        steps=config.train.steps,
        base=base.directory if config.model.adapter.rank else None,
    )
    stream = STREAMS[placement.schedule]
    return stream(sampler, training_problems(config), config.rollout, placement, settings)


def training_problems(config: Config) -> TrainingProblems:
    """Returns the source of the problems that a run trains on."""
    return TrainingProblems(config.task, config.train.seed, config.rollout.num_prompts)


def describe_model(model: qwen.QwenConfig, settings: ModelConfig, mesh: Mesh) -> str:
    """Returns a one-line summary of the model and the devices."""
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


def notes_on_unpaid_rewards(config: Config) -> list[str]:
    """Returns a line about reward functions that task.turn_reward=success leaves out."""
    functions = [name for name in config.task.reward.functions if name != "accuracy"]
    pays_verdicts = isinstance(config.task.turn_reward, turns.Success)
    if not functions or not pays_verdicts or config.rollout.max_turns == 1:
        return []
    return [
        "task.turn_reward=success pays the verdict of each turn, and no function: "
        f"{', '.join(functions)} of task.reward.functions is only measured; set "
        "task.turn_reward=score to pay it"
    ]


def evaluation_problems(run: Run) -> dict[str, list[EncodedProblem]]:
    """Returns the tokenized problems of each evaluation, without prompts that are too long.

    The key of the task's held-out problems is "", the keys of eval.suites are the suites' names.
    Prints the dropped problems and the task's notes on its data.
    """
    config = run.config
    task = find_task(config.task.name)
    notes = [*task.notes(config.task), *tool_episodes.notes(config.task)]
    notes += [*rewards.notes(config.task.reward), *notes_on_unpaid_rewards(config)]
    for note in notes:
        processes.print_once(note)

    held_out = task.eval_problems(config.task, config.eval.problems)
    if config.eval.rewards:
        print_left_out("held out", held_out, config.task)
    encoded = run.sampler.encode_problems(held_out, "held out")
    # Without held-out problems there is no evaluation with the name "".
    problems = {"": encoded} if encoded else {}
    return problems | encode_suites(run.sampler, config.task, config.eval, config.train.seed)


# -- state -----------------------------------------------------------------------------------------


def initial_weights(config: Config, base: BaseModel, workdir: Path) -> InitialWeights:
    """Returns the weights that a run starts from."""
    return InitialWeights(config.model, base, workdir, config.is_warm_started)


def warm_started(
    config: Config,
    policy: Learner,
    tok: PreTrainedTokenizerFast,
    params: qwen.Params,
    check_stop: StopCheck,
) -> qwen.Params:
    """Returns `params` after the supervised steps of the warm start. `params` are donated.

    The steps train the full model, even if RL trains an adapter. `check_stop` is called before each
    step. Raises UserError if the task has no warm-start examples, or if the loss is not finite.
    """
    warm, seed = config.warm_start, config.train.seed
    assert warm is not None, "the run has no warm start"
    draw = find_task(config.task.name).warm_start
    if draw is None:
        raise UserError(
            f"task.name={config.task.name} has no warm-start examples; set warm_start=none"
        )

    def make_example(index: int) -> Example:
        prompt, completion = draw(config.task, seed, index, warm.tries)
        return encode_completion(tok, prompt, completion)

    trainer = SupervisedTrainer(
        policy.model,
        policy.mesh,
        # Without an adapter and an int8 base the trainer trains the full model.
        replace(config.model, adapter=AdapterConfig(), base="native"),
        config.optimizer,
        config.train,
        row_tokens=config.rollout.longest_episode,
        most_rows=WARM_START_ROWS,
        draft=config.rollout.draft,
    )
    return warm_start(trainer, warm, config.optimizer, make_example, params, check_stop)


def first_state(run: Run) -> State:
    """Returns the State before the first step of a new run: fp32 parameters, optimizer moments.

    Loads the model, or draws random parameters, and makes the warm start. With model.adapter the
    State trains an adapter on the frozen model. Writes no files. Raises UserError if an example of
    the warm start may be longer than a response.
    """
    config, policy = run.config, run.trainer.policy
    if config.warm_start is not None:
        check_warm_start(config, config.warm_start)
    params = load_full(run.blueprint, policy, run.base.directory, config.train.seed)
    if config.warm_start is not None:
        params = warm_started(config, policy, run.base.tokenizer, params, never_stop)
    return initial_state(run, policy.freeze(params))


def initial_state(run: Run, params: qwen.Params) -> State:
    """Returns a State with new optimizer states for the policy's `params` and for the critic.

    With an adapter, `params` are the frozen base, which policy and critic share.
    """
    seed = run.config.train.seed
    given = load_given_adapter(run.blueprint)
    state = run.trainer.policy.start_on(params, seed, given)
    critic = run.trainer.critic
    if critic is None:
        return state
    # The adapter of the critic is on the same frozen base as the adapter of the policy.
    if run.config.model.adapter.rank:
        return replace(state, critic=critic.start_on(params, seed))
    path = run.config.critic.path
    values = load_critic(run.blueprint, critic, path, params, seed)
    return replace(state, critic=critic.start(values))


def with_base(state: State, base: qwen.Params) -> State:
    """Returns a State with the base of its adapters, which a checkpoint does not store."""
    critic = replace(state.critic, base=base) if state.critic else None
    return replace(state, base=base, critic=critic)


def abstract_state(run: Run) -> State:
    """Returns the shapes and shardings of a State, for restoring a checkpoint."""
    policy, critic = run.trainer.policy, run.trainer.critic
    critic_state = critic.abstract_state() if critic else None
    return replace(policy.abstract_state(), critic=critic_state)


# -- unfinished rollouts ---------------------------------------------------------------------------


def stream_states(run: Run) -> list[str]:
    """Returns the unfinished rollouts of every process, as base64. Every process has to call it."""
    if run.stream is None:
        return []
    gathered = collectives.gather_bytes(run.stream.state())
    # As text, because the record of a checkpoint is JSON.
    return [base64.b64encode(data).decode() for data in gathered]


def restore_stream(run: Run, states: list[str]) -> None:
    """Restores this process's unfinished rollouts from the result of `stream_states`.

    Raises UserError if the number of processes has changed.
    """
    if run.stream is None:
        return
    if len(states) != jax.process_count():
        raise UserError(
            f"with rollout.placement.max_staleness > 0 a run of {len(states)} processes resumes "
            "with as many"
        )
    run.stream.restore(base64.b64decode(states[jax.process_index()]))
