"""The RL training loop.

    problems -> rollouts -> credit -> update -> evaluate -> checkpoint

Run it with `python -m jzero.main --config=configs/countdown.py --workdir=runs/countdown`.

A step is a function of (config, seed, step, State), and a checkpoint holds the State. Therefore a
run that is killed at any time and restarted with the same command ends with the same numbers.

On several hosts, every process runs this loop. Each host samples its share of the problems, and all
hosts train on all rollouts. A value that differs between hosts must not decide on a branch around a
program of the full mesh.
"""

import contextlib
from pathlib import Path

import jax

from jzero import terminal
from jzero.blueprint import teacher_settings
from jzero.config import Config, Jobs
from jzero.distillation.build import check_teacher, make_teacher
from jzero.errors import UserError
from jzero.files import JsonObject, split_commas
from jzero.hosts import interrupt, peers, processes
from jzero.jobs import store_server
from jzero.model import qwen
from jzero.planning.announcement import announcement, planned_hours
from jzero.planning.disk import DiskNeed, require_disk
from jzero.planning.fitting import attached_run
from jzero.problems import problem_sets
from jzero.rollout.collect import collect_rollouts, trainer_state
from jzero.rollout.evaluation import evaluate, evaluation_metrics
from jzero.rollout.sampler import EncodedProblem
from jzero.run import kv_pool
from jzero.run.budget import TimeBudget
from jzero.run.memory import return_freed_memory
from jzero.run.metrics import nonfinite
from jzero.run.samples import logged_rows, write_responses
from jzero.run.session import RunSession
from jzero.run.trajectories import write_trajectories
from jzero.service.weights import load_base, load_model, load_reference, load_teacher
from jzero.setup import (
    ResolvedRun,
    Run,
    abstract_state,
    build,
    evaluation_problems,
    initial_state,
    resolve,
    restore_stream,
    stream_states,
    warm_started,
    with_base,
)
from jzero.sharding.publish import published_bytes
from jzero.training.frozen_base import freeze_model, name_base
from jzero.training.offload import at_rest
from jzero.training.reference import reference_step
from jzero.training.step import UpdateResult, save_batches, update_on_rollouts
from jzero.types import Rollout, State
from jzero.workers.pool import Pool

# Name of an evaluation -> its problems. "" is the task's own held-out set.
HeldOut = dict[str, list[EncodedProblem]]


def judge_cache(workdir: Path) -> Path:
    """Returns the file that caches the judge's answers on this host (task.reward.judge)."""
    # Hosts may share the workdir, and two processes must not append to one file.
    host = f"-{peers.PEERS.process_id}" if peers.has_peers() else ""
    return workdir / f"judge{host}.jsonl"


def train(config: Config, workdir: Path) -> JsonObject:
    """Runs `config` in `workdir`, or resumes the existing run; returns the summary."""
    budget = TimeBudget(config.train.minutes)
    resolved = resolve(config, workdir)
    config, planned_bytes = resolved.config, resolved.planned_bytes
    with (
        Pool(config.task.grade_workers, judge_cache(workdir)) as pool,
        interrupt.StopSignal(config.train.preemption_notice) as stop,
        contextlib.ExitStack() as cleanup,
    ):
        # ------------------------------------------------------------------------------------------
        # Set-up
        run, disk = set_up(resolved, workdir, pool)
        hours = planned_hours(attached_run(config), config.train.steps)
        needs = announcement(config.memory, disk, planned_bytes, hours, config.train.price)
        processes.print_once(terminal.wrapped(needs))
        teaching = teacher_settings(config)
        if run.stream is not None:
            cleanup.callback(run.stream.halt)
        placement = config.rollout.placement
        if isinstance(placement, Jobs) and placement.serve:
            names = split_commas(placement.allowed_hosts)
            cleanup.enter_context(
                store_server.serve(placement.serve, placement.store, workdir, names)
            )
        held_out = evaluation_problems(run)
        session = RunSession(
            config,
            workdir,
            run.base,
            run.clock,
            config.train.steps,
            lambda: stream_states(run),
            budget,
            planned_bytes,
            steps_of_pass(config, run.collection.problems.number),
        )
        cleanup.enter_context(contextlib.closing(session))
        # Without the scratch page, which the engine adds itself.
        kv_pool.write_pages(workdir, run.sampler.engine.pages_per_shard - 1)

        state: State | None = None
        try:
            if session.resume_step is None:
                state = start_state(run, session, held_out, stop)
            else:
                with terminal.phase("restore the checkpoint"):
                    state = session.restore(abstract_state(run))
                    base = load_base(session.weights, run.blueprint, session.record.base)
                    state = at_rest(run.trainer, with_base(state, base))
                    restore_stream(run, session.record.streams)
            reference = None
            arrays = load_teacher(teaching, run.blueprint.teacher)
            teacher = make_teacher(teaching, run.base, run.trainer, arrays)
            if run.blueprint.reference is not None:
                reference = current_reference(run, session, session.record.step, state)

            # --------------------------------------------------------------------------------------
            # The loop
            progress = session.progress("RL")
            for step in progress:
                # -- Problems -> rollouts: sample and grade.
                weights = run.trainer.policy.weights(state)
                rollouts, metrics = sample_rollouts(run, weights, step, stop.raise_if_stopped_here)

                # -- Credit and update: advantages, token weights, optimizer steps.
                result = update_on_rollouts(run.trainer, state, rollouts, step, reference, teacher)
                state = result.state
                metrics |= result.metrics
                check_finite(metrics, result, config.optimizer.lr, step, workdir)
                metrics |= progress.step_metrics()
                metrics |= speed_metrics(metrics)

                # -- Evaluate. The state already includes the step's update, but the step's metrics
                # are not written yet. A stop in between would save the state without the metrics,
                # so evaluation is not interrupted.
                if name := session.schedule.evaluation_after(step):
                    weights = run.trainer.policy.weights(state)
                    metrics |= evaluate_policy(
                        run, session, held_out, name, weights, interrupt.never_stop, step
                    )

                # -- The policy becomes its own reference every algorithm.reference_every steps.
                if reference is not None and reference_step(config.algorithm, step) == step:
                    reference = current_reference(run, session, step, state)

                # -- Write metrics and samples; checkpoint and export if they are due.
                with terminal.phase("write"):
                    log_rollouts(run, session, result.rollouts, step)
                    session.end_step(step, metrics, state)
                stop.raise_if_stopped_anywhere()
                session.raise_if_time_is_over()
        except interrupt.Interrupted as reason:
            processes.print_everywhere(
                f"{reason}: stopped after step {session.record.step}; the same command resumes"
            )
        return session.finish(state, stop.raise_if_stopped_anywhere)


def set_up(resolved: ResolvedRun, workdir: Path, pool: Pool) -> tuple[Run, DiskNeed]:
    """Returns the parts of a run, and the disk that it needs.

    Raises UserError if the run cannot start.
    """
    run = build(resolved, pool, workdir)
    disk = require_disk(run.config, run.base.model, workdir)
    check_teacher(teacher_settings(run.config), run.base, run.trainer.policy.mesh)
    return run, disk


def check_start(config: Config, workdir: Path) -> None:
    """Raises UserError if a run cannot start: makes all checks before the first step.

    Writes nothing, compiles nothing, and reads no weights.
    """
    resolved = resolve(config, workdir)
    with Pool(0) as pool:
        run, _ = set_up(resolved, workdir, pool)
        evaluation_problems(run)


def steps_of_pass(config: Config, num_problems: int | None) -> float | None:
    """Returns the number of RL steps of a pass; None for problems without an end."""
    if num_problems is None:
        return None
    pass_end = problem_sets.pass_end_of(config.task)
    return problem_sets.steps_of_pass(config.rollout.num_prompts, num_problems, pass_end)


def start_state(
    run: Run,
    session: RunSession,
    held_out: HeldOut,
    stop: interrupt.StopSignal,
) -> State:
    """Returns the State before the first RL step, evaluated and saved as a checkpoint."""
    config, policy = run.config, run.trainer.policy
    check_stop = stop.raise_if_stopped_here

    def check_stop_in_warm_start() -> None:
        stop.raise_if_stopped_anywhere()
        session.budget.raise_if_over_in_warm_start()

    # An adapter's base is frozen as soon as no later step changes it: here without a warm start,
    # otherwise after it.
    with terminal.phase("load the model"):
        params = load_model(session.weights, run.blueprint, policy, config.train.seed)
    evaluate_policy(run, session, held_out, "before", params, check_stop)
    if config.warm_start is not None:
        with run.clock("warm_start"):
            params = warm_started(
                config, policy, run.base.tokenizer, params, check_stop_in_warm_start
            )
            params = freeze_model(session.weights, policy, params)
        evaluate_policy(run, session, held_out, "after_warm_start", params, check_stop)
    session.record.base = name_base(session.weights)
    state = at_rest(run.trainer, initial_state(run, params))
    if session.schedule.checkpoint_is_due(0):
        session.save(state)
    return state


def sample_rollouts(
    run: Run,
    params: qwen.Params,
    step: int,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
) -> tuple[list[Rollout], dict[str, float]]:
    """Publishes the model's parameters to the samplers; returns graded rollouts and metrics.

    The decoder's copy of the trained weights is freed when this function returns, before the update
    needs the memory.
    """
    with run.clock("publish"):
        # Separate jobs get a snapshot of the trainer's weights, which the stream writes.
        weights = params if run.has_jobs else jax.block_until_ready(run.publish(params))
    rollouts, metrics = collect_rollouts(
        run.sampler, run.stream, run.collection, weights, step, run.clock, check_stop
    )
    if not run.has_jobs:
        metrics["publish/bytes"] = published_bytes(weights)
    del weights
    return_freed_memory()  # before the update, which needs the most
    return rollouts, metrics


def check_finite(
    metrics: dict[str, float],
    result: UpdateResult,
    lr: float,
    step: int,
    workdir: Path,
) -> None:
    """Raises UserError if a metric is not finite, after saving the batches of the step."""
    if names := nonfinite(metrics):
        path = workdir / f"nonfinite_step_{step}.npz"
        save_batches(path, result.batches)
        raise UserError(
            f"step {step}: {', '.join(names)} not finite, with optimizer.lr={lr}; "
            f"its batch is in {path}: start again in another --workdir, with a lower optimizer.lr, "
            "or smaller rewards and factors of the loss"
        )


def speed_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the tokens per second of sampling and of the optimizer steps."""
    # Environment replies do not count, because the sampler does not generate them.
    sampled_tokens = metrics.get("turns/sampled_tokens", metrics["rollout/tokens"])
    return {
        "rollout/tokens_per_second": sampled_tokens / metrics["time/sample"],
        "update/tokens_per_second": metrics["update/tokens"] / metrics["time/update"],
    }


def evaluate_policy(
    run: Run,
    session: RunSession,
    held_out: HeldOut,
    name: str,
    params: qwen.Params,
    check_stop: interrupt.StopCheck,
    steps_done: int = 0,
) -> dict[str, float]:
    """Evaluates the policy on the held-out problems, and records the metrics under `name`."""
    if not held_out:
        return {}
    if run.stream is not None:
        # Evaluation uses the same decoder as the asynchronous stream.
        run.stream.halt()
    with run.clock("eval"), run.sampling(params, steps_done) as policy:
        evaluated = evaluate(
            policy,
            held_out,
            run.config.eval,
            run.config.rollout.temperature,
            check_stop,
            state=trainer_state(run.collection.problems, run.collection.steps, steps_done),
        )
        metrics = evaluation_metrics(evaluated)
    if run.config.eval.save_responses:
        write_responses(session.workdir / "evaluations" / name, evaluated)
    session.record_evaluation(name, metrics)
    return metrics


def current_reference(run: Run, session: RunSession, step: int, state: State) -> qwen.Params:
    """Returns the reference policy that applies after `step`. See `training.reference`."""
    oldest_checkpoint = min(session.checkpoints.steps(), default=0)
    assert run.blueprint.reference is not None, "the run has no reference policy"
    return load_reference(
        run.blueprint.reference,
        run.trainer.policy,
        session.workdir,
        run.config.algorithm,
        step,
        state,
        oldest_checkpoint,
    )


def log_rollouts(run: Run, session: RunSession, rollouts: list[Rollout], step: int) -> None:
    """Writes the first train.logged_rollouts rollouts of a step.

    Multi-turn episodes also go to trajectories/. With train.all_trajectories, all of them do.
    """
    logged = rollouts[: run.config.train.logged_rollouts]
    group_size = run.config.rollout.group_size
    session.write_samples(step, logged_rows(logged, group_size, step, run.base.tokenizer))
    if run.config.rollout.max_turns > 1 and processes.is_first_process():
        settings = run.config.train
        episodes = rollouts if settings.all_trajectories else logged
        folder = Path(settings.trajectories or session.workdir / "trajectories")
        write_trajectories(folder, episodes, settings.trajectory_lines)
