"""The RL loop: problems -> rollouts -> grades -> advantages and weights -> batches -> update. One step is a function of
(config, seed, step, State): a run that is killed and started again ends in the same numbers."""

import base64
import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero import algorithms, config
from jzero.config import to_json, validate
from jzero.distributed import collectives, interrupt, processes
from jzero.distributed.mesh import param_shardings, split_devices, train_mesh
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import huggingface, qwen
from jzero.rollout.async_stream import RolloutStream, ThreadedStream
from jzero.rollout.evaluation import evaluate
from jzero.rollout.sampler import EncodedProblem, Sampler, make_sampler
from jzero.rollout.sequence import DecodeCounters
from jzero.run import trajectories
from jzero.run.base_model import BaseModel, load_params, read_base_model
from jzero.run.clock import Clock
from jzero.run.session import RunSession
from jzero.run.workdir import check_workdir
from jzero.sft import warm_start
from jzero.tasks import check_task_settings, find_task, rewards, suites
from jzero.training.step import Trainer, make_trainer, update_on_rollouts
from jzero.types import Problem, Rollout, State, grade_of

ALARM = 1e-3  # share of gradings that may fail unsaid
ROUNDS = 10**6  # steps apart in the stream of problems: where dynamic sampling takes new ones


@dataclass
class Run:
    """What a step uses and does not change."""

    config: config.Config
    trainer: Trainer
    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]
    stream: RolloutStream | None  # of asynchronous rollouts
    base: BaseModel

    @property
    def clock(self) -> Clock:
        return self.trainer.clock


def train(config: config.Config, workdir: Path) -> dict[str, Any]:
    """Run or resume `config` in `workdir`; returns what summary.json holds."""
    check(config, workdir)
    with (
        Pool(config.task.grade_workers) as pool,
        interrupt.StopSignal() as stop,
        contextlib.ExitStack() as ends,
    ):
        run = build(config, pool)
        if run.stream:
            ends.callback(run.stream.halt)
        held_out = evaluation_problems(run)

        def stream_states() -> list[str]:
            """Returns the unfinished rollouts of every process, as base64."""
            if run.stream is None:
                return []
            gathered = collectives.gather_bytes(run.stream.state())
            return [base64.b64encode(data).decode() for data in gathered]

        session = RunSession(
            config, workdir, run.base, run.clock, config.train.steps, stream_states
        )
        ends.enter_context(contextlib.closing(session))
        state: State | None = None

        def assess(name: str, params: qwen.Params) -> dict[str, float]:
            if not held_out:
                return {}
            if run.stream:
                run.stream.halt()
            # An update is in the state before its metrics are written: from there to the end of its step no stop.
            check_stop = stop.raise_if_stopped_here if state is None else interrupt.never_stop
            with run.clock("eval"):
                settings = config.eval, config.rollout.temperature
                values = evaluate(
                    run.sampler, run.publish(params), held_out, *settings, check_stop=check_stop
                )
            session.record_evaluation(name, values)
            return values

        try:
            if session.resume_step is None:
                params = load_params(run.base, run.trainer.policy, config.train.seed)
                assess("before", params)
                if config.warm_start.steps:
                    with run.clock("warm_start"):
                        params = warm_start(
                            run.trainer.policy,
                            config,
                            run.base.tokenizer,
                            params,
                            stop.raise_if_stopped_anywhere,
                        )
                    assess("after_warm_start", params)
                state = initial_state(run, params)
                session.save(state)
                del params
            else:
                state = session.restore(abstract_state(run))
                if run.stream:
                    streams = session.record.streams
                    if len(streams) != jax.process_count():
                        raise UserError(
                            f"with rollout.max_staleness > 0 a run of {len(streams)} processes resumes with as many"
                        )
                    run.stream.restore(base64.b64decode(streams[jax.process_index()]))
            refer = lambda step, params: reference(
                run, workdir, step, params, min(session.checkpoints.steps(), default=0)
            )
            if algorithms.needs_reference(config.algorithm):
                run.trainer.reference = refer(session.record.step, state.params)
            progress = session.progress("RL")
            for step in progress:
                state, values, rollouts = rl_step(
                    run, state, step, workdir, stop.raise_if_stopped_here
                )
                values |= progress.step_metrics()
                for phase, name in (("rollout", "sample"), ("update", "update")):
                    values[f"{phase}/tokens_per_second"] = (
                        values[f"{phase}/tokens"] / values[f"time/{name}"]
                    )
                if label := session.schedule.evaluation_after(step):
                    values |= assess(label, state.params)
                if run.trainer.reference is not None and refreshed(config.algorithm, step) == step:
                    run.trainer.reference = refer(step, state.params)
                session.writer.write_samples(
                    step,
                    [sample_row(rollout) for rollout in rollouts[: config.train.logged_rollouts]],
                )
                if config.rollout.max_turns > 1 and processes.is_first_process():
                    trajectories.write_trajectories(
                        workdir, rollouts[: config.train.logged_rollouts]
                    )
                session.end_step(step, values, state)
                stop.raise_if_stopped_anywhere()
        except interrupt.Interrupted as reason:
            processes.print_once(
                f"{reason}: stopped after step {session.record.step}; the same command resumes"
            )
        return session.finish(state)


def check_task(config: config.Config) -> None:
    """Of settings and names alone."""
    validate(config)
    check_task_settings(config.task, config.rollout.max_turns)
    rewards.check_rewards(config.task.reward)


def check(config: config.Config, workdir: Path) -> None:
    """Refuse what cannot run, before anything is downloaded, compiled or written."""
    check_task(config)
    for spec in suites.split_commas(*config.eval.suites):
        suites.parse_suite(spec)
    longest = find_task(config.task.name).warm_start_tokens(config.task, config.warm_start.tries)
    if config.warm_start.steps and longest > config.rollout.max_new_tokens:
        what = f"a warm-start example may have {longest} tokens, rollout.max_new_tokens={config.rollout.max_new_tokens}"
        raise UserError(f"{what}: raise it to {longest}, or set warm_start.steps=0")
    check_workdir(workdir, to_json(config))


def build(config: config.Config, pool: Pool) -> Run:
    """Model, tokenizer, meshes and programs of a run; nothing is compiled or loaded yet."""
    base = read_base_model(config.model)
    architecture = base.model
    critic = None
    if algorithms.needs_critic(config.algorithm):
        critic = (
            huggingface.load_config(huggingface.resolve(config.critic.path))[0]
            if config.critic.path
            else architecture
        )
        if critic.vocab_size != architecture.vocab_size:
            what = f"critic.path={config.critic.path} has a vocabulary of {critic.vocab_size}, the policy one of"
            raise UserError(
                f"{what} {architecture.vocab_size}: give a model with the policy's tokenizer"
            )
    devices, _ = split_devices(config.mesh.decode_devices)
    mesh = train_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    for heads in {each.num_key_value_heads for each in (architecture, critic) if each}:
        if heads % mesh.shape["tensor"]:
            what = f"mesh.tensor={mesh.shape['tensor']} does not divide the model's {heads} key-value heads"
            raise UserError(f"{what}; set it to one of their divisors")
    sampler, publish = make_sampler(config, base, mesh, pool)
    trainer = make_trainer(config, architecture, critic, mesh)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    devices = f"{mesh.devices.size} {mesh.devices.flat[0].device_kind} devices ({axes})"
    processes.print_once(
        f"{architecture.model_type} of {qwen.num_params(architecture) / 1e6:.1f}M parameters on {devices}"
    )
    stream = (
        (ThreadedStream if config.mesh.decode_devices else RolloutStream)(sampler, config)
        if config.rollout.max_staleness
        else None
    )
    return Run(config, trainer, sampler, publish, stream, base)


def evaluation_problems(run: Run) -> dict[str, list[EncodedProblem]]:
    """Held-out problems of the task, under "", and of eval.suites, as far as prompts fit. Says what was dropped."""
    config = run.config
    for note in find_task(config.task.name).notes(config.task):
        processes.print_once(note)
    every = {"": find_task(config.task.name).eval_problems(config.task, config.eval.problems)}
    every |= dict(
        suites.load_suite(spec, config.task, config.eval.limit, config.train.seed)
        for spec in suites.split_commas(*config.eval.suites)
    )
    fit = {
        name: run.sampler.encode_problems(each, name or "held out") for name, each in every.items()
    }
    return {name: each for name, each in fit.items() if each}


def initial_state(run: Run, params: qwen.Params) -> State:
    """Fresh optimizers around the params and, where there is one, the critic's: critic.path's or these, a new head."""
    policy, critic = run.trainer.policy, run.trainer.critic
    state = policy.start(params)
    if critic is None:
        return state
    backbone = params
    if path := run.config.critic.path:
        model = replace(critic.model, value_head=False)
        backbone = huggingface.load(
            huggingface.resolve(path), model, param_shardings(model, critic.mesh)
        )
    copy = lambda x, place: jax.jit(jnp.copy, out_shardings=place)(x)  # both states are donated
    names = ("embed", "layers", "norm")
    values = {name: jax.tree.map(copy, backbone[name], critic.shardings[name]) for name in names}
    head = lambda: qwen.init(critic.model, jax.random.key(run.config.train.seed))["value"]
    values["value"] = jax.jit(head, out_shardings=critic.shardings["value"])()
    return replace(state, critic=critic.start(values))


def abstract_state(run: Run) -> State:
    """Shapes and shardings, for restoring a checkpoint into."""
    critic = run.trainer.critic
    return replace(
        run.trainer.policy.abstract_state(), critic=critic.abstract_state() if critic else None
    )


def rl_step(
    run: Run,
    state: State,
    step: int,
    workdir: Path,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
) -> tuple[State, dict[str, float], list[Rollout]]:
    """One batch of rollouts and the optimizer steps on it."""
    with run.clock("publish"):
        weights = jax.block_until_ready(run.publish(state.params))
    rollouts, values = collect(run, weights, step, check_stop)
    values["publish/bytes"] = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights)
    )  # of a device
    del weights
    state, update_values, batches, rollouts = update_on_rollouts(run.trainer, state, rollouts, step)
    values |= update_values
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        path = workdir / f"nonfinite_step_{step}.npz"
        arrays = [
            (i, name, x)
            for i, batch in enumerate(batches)
            for name, x in vars(batch).items()
            if x is not None
        ]
        fetched: dict[str, Any] = {
            f"{name}_{i}": collectives.fetch_global(x) for i, name, x in arrays
        }
        if processes.is_first_process():
            np.savez(path, **fetched)
        raise FloatingPointError(
            f"step {step}: {', '.join(bad)} not finite; its batch is in {path}"
        )
    return state, values, rollouts


def collect(
    run: Run, weights: qwen.Params, step: int, check_stop: interrupt.StopCheck
) -> tuple[list[Rollout], dict[str, float]]:
    """Graded rollouts of the step's problems, and metrics of all that were sampled. Up to algorithm.dynamic_sampling_rounds
    times uniform groups make way for those of new problems (DAPO's dynamic sampling), or stay."""
    config, sampler = run.config, run.sampler
    group, prompts, heat = (
        config.rollout.group_size,
        config.rollout.num_prompts,
        config.rollout.temperature,
    )
    before = dict(sampler.pool.counters)
    uniform = lambda rollouts: len({grade_of(rollout).score for rollout in rollouts}) == 1
    groups: list[list[Rollout]] = []
    totals = DecodeCounters()
    for round in range(config.algorithm.dynamic_sampling_rounds + 1):
        with run.clock("sample"):
            if run.stream:
                rollouts, counters = run.stream.collect(weights, step - 1, check_stop)
            else:
                key = config.train.seed, step + round * ROUNDS
                problems = find_task(config.task.name).train_problems(config.task, *key, prompts)
                fit = sampler.encode_problems(problems)
                if not fit:
                    longest = config.rollout.max_prompt_tokens
                    raise UserError(
                        f"step {step}: every prompt is longer than rollout.max_prompt_tokens={longest}"
                    )
                rollouts, counters = sampler.sample_rollouts(
                    weights, fit, group, heat, key, version=step - 1, check_stop=check_stop
                )
        totals.add(counters)
        run.clock.move(
            counters.grading_seconds, "sample", "grade"
        )  # what did not overlap with decoding
        with run.clock("grade"):
            rollouts = sampler.gather_rollouts(rollouts)
        groups += [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
        if sum(not uniform(each) for each in groups) >= prompts:
            break
    every = [rollout for each in groups for rollout in each]
    values = rollout_metrics(every, group)
    if run.stream:
        values |= run.stream.metrics(every, step - 1, totals)
    values["rollout/dropped_prompts"] = (round + 1) * prompts - len(groups)
    graded = {
        f"grade/{name}": count - before[name] for name, count in sampler.pool.counters.items()
    }
    counts = collectives.sum_over_hosts(vars(totals) | graded)
    values["rollout/preempted"] = counts["preempted"]
    values["rollout/slot_utilization"] = counts["decoded_tokens"] / max(counts["slot_steps"], 1)
    if (failed := counts["grade/timeouts"] + counts["grade/killed"]) > ALARM * len(every):
        processes.print_once(
            f"step {step}: {failed} of {len(every)} gradings ran out of time or killed their worker; scored 0"
        )
    values |= {name: counts[name] for name in graded if name != "grade/graded"}
    if config.algorithm.dynamic_sampling_rounds:
        values["rollout/rounds"] = round + 1
        groups = sorted(groups, key=uniform)[:prompts]  # stable: those that differ first
    return [rollout for each in groups for rollout in each], values


def rollout_metrics(rollouts: list[Rollout], group: int) -> dict[str, float]:
    grades = [grade_of(rollout) for rollout in rollouts]
    scores = np.array([grade.score for grade in grades]).reshape(-1, group)
    lengths = np.array([rollout.response_length for rollout in rollouts])
    parts = dict.fromkeys(name for grade in grades for name in grade.parts)
    parts.pop("accuracy", None)  # the metric of that name counts what is right
    part = lambda name: np.mean([grade.parts[name] for grade in grades if name in grade.parts])
    values = {f"reward/{name.replace(':', '.')}": float(part(name)) for name in parts} | {
        "reward/mean": float(scores.mean()),
        "reward/accuracy": float(np.mean([grade.correct for grade in grades])),
        "reward/zero_variance_groups": float((scores.max(axis=1) == scores.min(axis=1)).mean()),
        "rollout/length": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": float(
            np.mean([rollout.finish_reason == "length" for rollout in rollouts])
        ),
        "rollout/tokens": float(lengths.sum()),
    }
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        values["turns/sampled_tokens"] = float(
            sum(rollout.sampled.sum() for rollout in rollouts)
        )  # tokens without replies
        values["turns/mean"] = float(np.mean([len(rollout.turns) for rollout in rollouts]))
        values["turns/first_try"] = float(
            np.mean([grade_of(rollout.turns[0]).correct for rollout in rollouts])
        )
    return values


def sample_row(rollout: Rollout) -> dict[str, Any]:
    problem, grade = rollout.problem, grade_of(rollout)
    row = {
        "id": problem.id,
        "sample": rollout.sample_index,
        "prompt": problem.prompt,
        "response": rollout.text,
    }
    row |= {
        "gold": problem.gold,
        "score": grade.score,
        "advantage": rollout.advantage,
        "reason": grade.reason,
    }
    return row | {"tokens": rollout.response_length, "finish": rollout.finish_reason}


def refreshed(algorithm: algorithms.Algorithm, step: int) -> int:
    """The RL step after which the policy became the reference that holds after `step`."""
    return step - step % algorithm.reference_every if algorithm.reference_every else 0


def reference(run: Run, workdir: Path, step: int, params: qwen.Params, oldest: int) -> qwen.Params:
    """The reference policy after `step`, sharded as the policy; on disk for resuming from checkpoint `oldest` on."""
    policy, algorithm = run.trainer.policy, run.config.algorithm
    made = refreshed(algorithm, step)
    directory = workdir / "reference" / str(made)
    if (
        made == step and not collectives.gather_json(directory.exists())[0]
    ):  # it does where a kill came before the checkpoint
        huggingface.save(directory, policy.model, params, dtype="float32", hf_config_extra={})
    for other in directory.parent.iterdir() if processes.is_first_process() else ():
        if other.name.isdigit() and int(other.name) < refreshed(algorithm, oldest):
            shutil.rmtree(other)
    return huggingface.load(directory, policy.model, policy.shardings)
