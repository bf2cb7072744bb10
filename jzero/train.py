"""The RL loop: problems -> rollouts -> grades -> advantages and weights -> batches -> update, and what surrounds it.

The only file that sees the whole Config. One step is a pure function of (config, seed, step, State), so a run that is
killed anywhere and started again with the same command ends in the same numbers."""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jzero import algorithms, checkpoint, config, evaluate, metrics, sharding, tokenizer
from jzero.batch import Item, layouts, pack
from jzero.config import to_json, validate
from jzero.evaluate import Sampler, grade_of
from jzero.grade.pool import Pool
from jzero.model import hf, qwen
from jzero.rollout.engine import Engine
from jzero.sft import warm_start
from jzero.tasks import TASKS
from jzero.tasks.countdown import TEMPLATES
from jzero.types import Layout, Rollout, State
from jzero.update import Policy, learning_rate, with_logps


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, raised where the state is whole."""


@dataclass
class Run:
    """What a step uses and does not change."""

    config: config.Config
    policy: Policy
    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]
    layouts: list[Layout]
    rows: list[int]  # of a microbatch, by layout
    microbatches: list[int]  # of a step at most, by layout
    directory: Path | None  # of the model to load; None: random init
    hf_config: dict[str, Any]  # its config.json
    reference: qwen.Params | None = None
    clock: metrics.Clock = field(default_factory=metrics.Clock)


def train(config: config.Config, workdir: Path) -> dict[str, Any]:
    """Run or resume `config` in `workdir`; returns what summary.json holds."""
    started = time.time()
    check(config, workdir)
    with Pool(config.task.grade_workers) as pool, interruptible() as interrupted:
        run = build(config, pool)
        problems = TASKS[config.task.name].eval_problems(config.task, config.eval.problems)
        problems = evaluate.fitting(problems, run.sampler.tokenizer, config.rollout.max_prompt)
        checkpoint.check_workdir(workdir, to_json(config))  # the first thing written: what is refused leaves nothing
        metrics.write_atomic(workdir / "versions.json", json.dumps(metrics.versions(), indent=1))
        saved = checkpoint.Checkpoints(workdir, config.train.keep_checkpoints)
        latest = saved.latest()
        writer = metrics.Writer(workdir, latest)
        host: dict[str, Any] = {"step": 0, "eval": {}, "seconds": 0.0, "seconds_by_phase": {}}
        state: State | None = None

        def assess(name: str, params: qwen.Params) -> dict[str, float]:
            if not problems:
                return {}
            # An update is in the state before its metrics are written: from there to the end of its step no stop.
            run.sampler.on_finish = interrupted if state is None else lambda: None
            with run.clock("eval"):
                weights = run.publish(params)
                values = evaluate.evaluate(run.sampler, weights, problems, config.eval, config.rollout.temperature)
            run.sampler.on_finish = interrupted
            host["eval"][name] = values
            tqdm.write(f"eval {name}: " + "  ".join(f"{k} {v:.3f}" for k, v in values.items()))
            return values

        def spent() -> dict[str, Any]:
            """Time of this run so far, earlier sessions included."""
            totals = run.clock.totals
            names = host["seconds_by_phase"] | totals
            phases = {name: host["seconds_by_phase"].get(name, 0.0) + totals.get(name, 0.0) for name in names}
            return {"seconds": host["seconds"] + time.time() - started, "seconds_by_phase": phases}

        def save(state: State, wait: bool) -> None:
            with run.clock("checkpoint"):
                saved.save(host["step"], state, host | spent(), wait=wait)

        try:
            if latest is None:
                params = initial_params(run)
                assess("before", params)
                if config.warm_start.steps:
                    with run.clock("warm_start"):
                        params = warm_start(run.policy, config, run.sampler.tokenizer, params, interrupted)
                    assess("after_warm_start", params)
                state = run.policy.start(params)
                save(state, wait=True)
                del params
            else:
                state, host = saved.restore(latest, run.policy.abstract_state())
                tqdm.write(f"resumed {workdir} at step {latest}")
            if config.algorithm.kl_coef:
                run.reference = reference(run, workdir, state.params, fresh=host["step"] == 0)
            first, steps = host["step"] + 1, config.train.steps
            for step in tqdm(range(first, steps + 1), initial=first - 1, total=steps, desc="RL", mininterval=1):
                run.clock.pop()
                begin = time.perf_counter()
                state, values, rollouts = rl_step(run, state, step, workdir)
                values |= run.clock.pop() | {"time/step": time.perf_counter() - begin}
                values |= rates(values)
                host["step"] = step
                if step == steps or (config.eval.every and step % config.eval.every == 0):
                    values |= assess("after" if step == steps else f"step_{step}", state.params)
                writer.write(step, values)
                writer.samples(step, [sample_row(rollout) for rollout in rollouts[: config.train.samples]])
                tqdm.write(metrics.line(step, steps, values))
                if step == steps or step % config.train.checkpoint_every == 0:
                    save(state, wait=False)
                interrupted()
        except Interrupted as reason:
            tqdm.write(f"{reason}: stopped after step {host['step']}; the same command resumes")
        export = None
        if state is not None:
            save(state, wait=True)
            if host["step"] >= config.train.steps:
                with run.clock("export"):
                    export = export_policy(run, state.params, workdir / f"export-{host['step']}")
        saved.close()
        writer.close()
        return summarize(config, workdir, host | spent(), export)


def check(config: config.Config, workdir: Path) -> None:
    """Refuse what cannot run, before anything is downloaded, compiled or written."""
    validate(config)
    for name, value, table in (("name", config.task.name, TASKS), ("template", config.task.template, TEMPLATES)):
        if value not in table:
            raise ValueError(f"task.{name}={value!r} is not one of {', '.join(table)}")
    longest = TASKS[config.task.name].warm_start_tokens(config.task, config.warm_start.tries)
    if config.warm_start.steps and longest > config.rollout.max_new:
        raise ValueError(
            f"a warm-start example may have {longest} tokens, rollout.max_new={config.rollout.max_new}: raise it to "
            f"{longest}, or set warm_start.steps=0"
        )
    there = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"workdir {workdir}: {there} is not a directory that can be written to")
    if (workdir / "config.json").exists():
        checkpoint.check_workdir(workdir, to_json(config))


def build(config: config.Config, pool: Pool) -> Run:
    """Model, tokenizer, meshes and programs of a run; nothing is compiled or loaded yet."""
    model = config.model
    directory = hf.resolve(model.path) if model.path else None
    architecture, hf_config = hf.load_config(directory) if directory else (None, {})
    tok = tokenizer.load(model.tokenizer or (str(directory) if directory else ""))
    if architecture is None:
        architecture = qwen.QwenConfig(vocab_size=len(tok), **vars(model.arch))
    mesh = sharding.train_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    if architecture.num_key_value_heads % mesh.shape["tensor"]:
        heads = f"the model's {architecture.num_key_value_heads} key-value heads"
        raise ValueError(f"mesh.tensor={mesh.shape['tensor']} does not divide {heads}; set it to one of their divisors")
    decode_mesh = sharding.decode_mesh(mesh)
    policy = Policy(architecture, config, mesh)
    stops = tokenizer.eos_ids(tok, str(directory) if directory else "")
    engine = Engine(architecture, config.rollout, decode_mesh, stops, model.dtype)
    train = config.train
    shapes = layouts(config.rollout.max_prompt, train.slot or config.rollout.max_new, train.buckets, train.row_slots)
    rows = [microbatch_rows(config, mesh, layout) for layout in shapes]
    groups = config.rollout.prompts // train.minibatches
    most = [groups * -(-config.rollout.group // layout.slots) for layout in shapes]  # rows: a slot for every rollout
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    devices = f"{mesh.devices.size} {mesh.devices.flat[0].device_kind} devices ({axes})"
    tqdm.write(f"{architecture.model_type} of {qwen.num_params(architecture) / 1e6:.1f}M parameters on {devices}")
    return Run(
        config=config,
        policy=policy,
        sampler=Sampler(engine, tok, pool, config.task),
        publish=sharding.publisher(architecture, mesh, decode_mesh, model.dtype),
        layouts=shapes,
        rows=rows,
        microbatches=[-(-m // r) for m, r in zip(most, rows, strict=True)],
        directory=directory,
        hf_config=hf_config,
    )


def initial_params(run: Run) -> qwen.Params:
    policy = run.policy
    if run.directory is None:
        return policy.init_params(run.config.train.seed)
    return hf.load(run.directory, policy.model, policy.shardings)


def microbatch_rows(config: config.Config, mesh, layout) -> int:
    """Rows of a microbatch: as many as train.tokens hold, a multiple of the devices that split rows."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.train.tokens // (layout.tokens * shards) * shards
    if rows == 0:
        raise ValueError(
            f"train.tokens={config.train.tokens} holds less than one row of {layout.tokens} tokens on each of {shards} "
            f"devices; set it to at least {layout.tokens * shards}, or lower train.row_slots"
        )
    return rows


def rl_step(run: Run, state: State, step: int, workdir: Path) -> tuple[State, dict[str, float], list[Rollout]]:
    """One batch of rollouts and the optimizer steps on it."""
    config, clock, sampler = run.config, run.clock, run.sampler
    group = config.rollout.group
    problems = TASKS[config.task.name].train_problems(config.task, config.train.seed, step, config.rollout.prompts)
    kept = evaluate.fitting(problems, sampler.tokenizer, config.rollout.max_prompt)
    if not kept:
        raise ValueError(f"step {step}: every prompt is longer than rollout.max_prompt={config.rollout.max_prompt}")
    with clock("publish"):
        weights = run.publish(state.params)
    grading = dict(sampler.pool.counters)
    with clock("sample"):
        rollouts, counters = sampler.rollouts(
            weights, kept, group, config.rollout.temperature, key=(config.train.seed, step), version=step - 1
        )
    del weights
    with clock("grade"):  # what did not overlap with decoding
        rollouts = sampler.graded(rollouts, group)
    values = rollout_metrics(rollouts, group)
    values["rollout/dropped_prompts"] = len(problems) - len(kept)
    values["rollout/preempted"] = counters.preempted
    values["rollout/slot_use"] = counters.tokens / max(counters.slot_steps, 1)
    counts = {f"grade/{name}": count - grading[name] for name, count in sampler.pool.counters.items()}
    values |= {name: count for name, count in counts.items() if name != "grade/graded"}
    state, update_values, batches = optimize(run, state, rollouts, step)
    values |= update_values
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        path = workdir / f"nonfinite_step_{step}.npz"
        np.savez(path, **{f"{name}_{i}": x for i, batch in enumerate(batches) for name, x in vars(batch).items()})
        raise FloatingPointError(f"step {step}: {', '.join(bad)} not finite; its batch is in {path}")
    return state, values, rollouts


def optimize(run: Run, state: State, rollouts: list[Rollout], step: int):
    """`epochs` passes over the rollouts, in `minibatches` optimizer steps each -> state, metrics, host batches."""
    config, clock, policy = run.config, run.clock, run.policy
    train, algorithm, group = config.train, config.algorithm, config.rollout.group
    scores = np.array([score_of(rollout, algorithm) for rollout in rollouts], np.float32).reshape(-1, group)
    advantages = algorithms.ADVANTAGES[algorithm.advantage].compute(scores, algorithm)
    with clock("pack"):
        parts, real, paid = [], 0, 0
        order = np.arange(len(scores))
        if train.minibatches > 1:
            order = np.random.default_rng((train.seed, step)).permutation(order)
        for chosen in np.array_split(order, train.minibatches):
            groups = [rollouts[p * group : (p + 1) * group] for p in chosen]
            packed = pack(items(groups, advantages[chosen], config), run.layouts, run.rows, run.microbatches)
            parts.append((packed, *policy.put(packed)))
            real += sum(p.real for p in packed)
            paid += sum(p.count * rows * p.layout.tokens for p, rows in zip(packed, run.rows, strict=True))
    with clock("score"):
        for i, (packed, batches, counts) in enumerate(parts):
            if not policy.on_policy:
                batches = with_logps(batches, "old_logps", policy.score(state.params, batches, counts, run.layouts))
            if run.reference is not None:
                batches = with_logps(batches, "ref_logps", policy.score(run.reference, batches, counts, run.layouts))
            parts[i] = packed, batches, counts
        jax.block_until_ready([batches for _, batches, _ in parts])
    with clock("update"):
        lr = learning_rate(config.optimizer, step - 1, train.steps)
        stats = []
        for _ in range(train.epochs):
            for _, batches, counts in parts:
                state, sums = policy.update(state, batches, counts, run.layouts, lr)
                stats.append(sums)
        stats = [{name: float(x) for name, x in sums.items()} for sums in jax.device_get(stats)]
    values = update_metrics(stats) | {"optimizer/lr": lr, "update/tokens": real, "update/padding": 1 - real / paid}
    return state, values, [p.batch for packed, _, _ in parts for p in packed]


def items(groups: list[list[Rollout]], advantages: np.ndarray, config: config.Config) -> list[list[Item]]:
    """Rollouts of one optimizer step with their advantages and their tokens' weights."""
    masked = config.algorithm.truncated == "mask"
    count = lambda rollout: 0 if masked and rollout.finish == "length" else int(rollout.sampled.sum())
    counts = np.array([count(rollout) for group in groups for rollout in group], np.float64)
    weights = algorithms.WEIGHTS[config.algorithm.weight](counts, config.rollout.max_new) * (counts > 0)
    weights = weights.reshape(advantages.shape)
    return [
        [Item.of(rollout, advantages[p, g], weights[p, g]) for g, rollout in enumerate(group)]
        for p, group in enumerate(groups)
    ]


def score_of(rollout: Rollout, algorithm: algorithms.Algorithm) -> float:
    cut = algorithm.truncated == "zero" and rollout.finish == "length"
    return 0.0 if cut else grade_of(rollout).score


# -- metrics ---------------------------------------------------------------------------------------------------


def rollout_metrics(rollouts: list[Rollout], group: int) -> dict[str, float]:
    grades = [grade_of(rollout) for rollout in rollouts]
    scores = np.array([grade.score for grade in grades]).reshape(-1, group)
    lengths = np.array([rollout.response_length for rollout in rollouts])
    return {
        "reward/mean": float(scores.mean()),
        "reward/accuracy": float(np.mean([grade.correct for grade in grades])),
        "reward/zero_variance_groups": float(algorithms.uniform(scores).mean()),
        "rollout/length": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([rollout.finish == "length" for rollout in rollouts])),
        "rollout/tokens": float(lengths.sum()),
    }


def update_metrics(stats: list[dict[str, float]]) -> dict[str, float]:
    """Means over trained tokens of all optimizer steps of the step; the mismatch is the first's, before any update."""
    tokens = max(sum(s["tokens"] for s in stats), 1.0)
    mean = lambda name: sum(s[name] for s in stats) / tokens
    values = {
        "policy/entropy": mean("entropy"),
        "policy/clip_fraction": mean("clip_fraction"),
        "policy/mismatch": stats[0]["mismatch"] / max(stats[0]["tokens"], 1.0),
        "optimizer/loss": float(np.mean([s["loss"] for s in stats])),
        "optimizer/grad_norm": float(np.mean([s["grad_norm"] for s in stats])),
    }
    return values | ({"policy/kl": mean("kl")} if "kl" in stats[0] else {})


def rates(values: dict[str, float]) -> dict[str, float]:
    """Tokens a second of each phase."""
    return {
        "rollout/tokens_per_second": values["rollout/tokens"] / values["time/sample"],
        "update/tokens_per_second": values["update/tokens"] / values["time/update"],
    }


def sample_row(rollout: Rollout) -> dict[str, Any]:
    grade = grade_of(rollout)
    return {
        "id": rollout.problem.id,
        "sample": rollout.sample,
        "prompt": rollout.problem.prompt,
        "response": rollout.text,
        "gold": rollout.problem.gold,
        "score": grade.score,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish,
    }


# -- the run's surroundings --------------------------------------------------------------------------------------


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yields a function that raises Interrupted once Ctrl-C or SIGTERM came. A second one stops at once."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def handle(number, _frame):
        received.append(number)
        for each in signals:
            signal.signal(each, signal.default_int_handler)
        print(f"{signal.Signals(number).name}: saving a checkpoint; again to stop at once", file=sys.stderr, flush=True)

    def check() -> None:
        if received:
            raise Interrupted(signal.Signals(received[0]).name)

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reference(run: Run, workdir: Path, params: qwen.Params, fresh: bool) -> qwen.Params:
    """The policy RL started from, kept sharded beside it; on disk for resuming."""
    directory = workdir / "reference"
    if fresh and not directory.exists():  # a kill may have come between checkpoint 0 and this
        hf.save(directory, run.policy.model, params, dtype="float32", hf_config_extra={})
    return hf.load(directory, run.policy.model, run.policy.shardings)


def export_policy(run: Run, params: qwen.Params, directory: Path) -> str:
    """A directory that `transformers` loads. One that is whole is this step's, and stays."""
    if not (directory / "generation_config.json").exists():  # the last to be written
        shutil.rmtree(directory, ignore_errors=True)
        tok = run.sampler.tokenizer
        stops = list(run.sampler.engine.stop_ids)
        extra = {"max_position_embeddings": run.sampler.engine.max_total} | run.hf_config | {"eos_token_id": stops[0]}
        hf.save(directory, run.policy.model, params, dtype=run.config.model.dtype, hf_config_extra=extra)
        tok.save_pretrained(str(directory))
        generation = {"eos_token_id": stops, "temperature": run.config.rollout.temperature, "do_sample": True}
        metrics.write_atomic(directory / "generation_config.json", json.dumps(generation, indent=1))
    return str(directory)


def summarize(config: config.Config, workdir: Path, host: dict[str, Any], export: str | None) -> dict[str, Any]:
    """Write and return summary.json; scripts rely on its keys."""
    names = ("before", "after_warm_start", "after")
    pick = lambda metric: {name: host["eval"].get(name, {}).get(metric) for name in names}
    summary = {
        "config": json.loads(to_json(config)),
        "steps": host["step"],
        "seconds": host["seconds"],
        "seconds_by_phase": host["seconds_by_phase"],
        "peak_rss_bytes": metrics.peak_rss_bytes(),
        "eval": {config.task.name: pick("eval/accuracy")},
        "eval_greedy": {config.task.name: pick("eval_greedy/accuracy")},
        "eval_all": host["eval"],
        "export": export,
        "versions": metrics.versions(),
    }
    metrics.write_atomic(workdir / "summary.json", json.dumps(summary, indent=1))
    return summary
