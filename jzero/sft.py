"""The loop of supervised fine-tuning, on conversations or on prompts with completions.

    examples -> packed rows -> update -> evaluate -> checkpoint

An evaluation is the loss of held-out examples and, where `eval.suites` names some, the accuracy of
the model's own responses to their problems, as in RL.

It runs instead of RL if sft.data is set, for example with
`python -m jzero.main --config=configs/sft.py --workdir=runs/sft --config.sft.data=rows.jsonl`.

Packing, the update program and the optimizer are those of RL (`training.supervised`), and so are
workdir, checkpoints and exports. A run that is killed resumes to the same numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import jax
from jax.sharding import Mesh

from jzero.config import Config, to_json, validate
from jzero.distributed import interrupt, processes
from jzero.distributed.mesh import configured_mesh
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.grading.pool import Pool
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.planning.fitting import check_memory
from jzero.rollout.evaluation import encode_suites, evaluate, evaluation_metrics
from jzero.rollout.sampler import EncodedProblem, Sampler, make_sampler
from jzero.run.base_model import BaseModel, check_context, read_base_model, with_given_adapter
from jzero.run.budget import TimeBudget
from jzero.run.clock import Clock
from jzero.run.frozen_base import load_base, load_model, name_base
from jzero.run.resume import steps_to_discard
from jzero.run.samples import write_responses
from jzero.run.session import RunSession
from jzero.run.workdir import check_workdir
from jzero.tasks import TASKS, draws_examples, problem_sets, suites
from jzero.training.examples import Example, ExampleRow, encode_row
from jzero.training.expert_load import expert_metrics
from jzero.training.heads import Stats
from jzero.training.optimizer import learning_rate
from jzero.training.packing import PackedBatch
from jzero.training.supervised import SupervisedTrainer


@dataclass(frozen=True)
class SftData:
    """The rows of a run, as text."""

    rows: problem_sets.Stream[
        ExampleRow
    ]  # endless and shuffled; step s takes rows (s - 1) * batch_size on
    num_examples: int  # rows of one epoch
    held_out: list[ExampleRow]


class Suites(NamedTuple):
    """The suites of eval.suites, and what answers their problems."""

    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # the trainer's parameters -> the sampler's
    problems: dict[str, list[EncodedProblem]]


class HeldOut(NamedTuple):
    """What a run is evaluated on. Either may be missing."""

    packed: PackedBatch | None  # held-out examples
    suites: Suites | None


def train(config: Config, workdir: Path) -> JsonObject:
    """Runs `config` in `workdir`, or resumes the run that is there. Returns summary.json."""
    # ----------------------------------------------------------------------------------------------
    # Set-up
    budget = TimeBudget(config.train.minutes)
    config = with_given_adapter(config)
    validate(config)
    suites.check_suites(config.eval.suites)
    check_workdir(workdir, to_json(config))
    steps_to_discard(workdir, config.train)
    planned_bytes = check_memory(config)
    sft, clock = config.sft, Clock()
    data = read_data(config)
    last_step = max(1, int(sft.epochs * data.num_examples) // sft.batch_size)

    base = read_base_model(config.model)
    check_context(config, base)
    set_chat_template(base.tokenizer, sft.chat_template)
    mesh = configured_mesh(config.mesh)
    trainer = SupervisedTrainer(base.model, mesh, config, sft.pack_length)
    learner = trainer.learner

    with (
        Pool(config.task.grade_workers if config.eval.suites else 0) as pool,
        interrupt.StopSignal(config.train.preemption_notice) as stop,
        closing(
            RunSession(
                config,
                workdir,
                base,
                clock,
                last_step,
                budget=budget,
                planned_bytes=planned_bytes,
            )
        ) as session,
    ):
        processes.print_once(
            f"{data.num_examples} examples, {len(data.held_out)} held out; "
            f"{last_step} steps of {sft.batch_size}"
        )
        test_examples = encode_rows(base.tokenizer, data.held_out[: config.eval.problems], config)
        test = HeldOut(
            packed=trainer.pack(test_examples) if test_examples else None,
            suites=make_suites(config, base, mesh, pool),
        )

        if session.resume_step is None:
            params = load_model(config, base, workdir, learner)
            session.record.base = name_base(config, base, workdir)
            state = learner.start_on(params, config.train.seed)
            evaluate_model(trainer, session, test, "before", learner.weights(state))
        else:
            state = session.restore(learner.abstract_state())
            frozen = load_base(config, base, workdir, learner, session.record.base)
            state = replace(state, base=frozen)

        # ------------------------------------------------------------------------------------------
        # The loop
        try:
            progress = session.progress("SFT")
            for step in progress:
                # -- Examples -> packed rows.
                with clock("pack"):
                    indices = range((step - 1) * sft.batch_size, step * sft.batch_size)
                    rows = [data.rows[index] for index in indices]
                    examples = encode_rows(base.tokenizer, rows, config)
                    if not examples:
                        raise UserError(
                            f"step {step}: every example is longer than "
                            f"sft.pack_length={sft.pack_length} tokens; raise it"
                        )
                    packed = trainer.pack(examples)

                # -- Update. Reading the stats waits for the device.
                lr = learning_rate(config.optimizer, step - 1, last_step)
                with clock("update"):
                    state, stats = trainer.step(state, packed, lr)
                    metrics = update_metrics(stats)
                metrics |= {
                    "optimizer/lr": lr,
                    "sft/epoch": step * sft.batch_size / data.num_examples,
                    "sft/dropped": sft.batch_size - len(examples),
                    "update/padding": 1 - packed.num_inputs / packed.computed_inputs,
                }
                metrics |= progress.step_metrics()
                metrics["update/tokens_per_second"] = packed.num_inputs / metrics["time/update"]

                # -- Evaluate.
                if name := session.schedule.evaluation_after(step):
                    metrics |= evaluate_model(trainer, session, test, name, learner.weights(state))

                # -- Write metrics; checkpoint and export if they are due.
                session.end_step(step, metrics, state)
                stop.raise_if_stopped_anywhere()
                session.raise_if_time_is_over()
        except interrupt.Interrupted as reason:
            processes.print_once(
                f"{reason}: stopped after step {session.record.step}; the same command resumes"
            )
        return session.finish(state)


# -- data ------------------------------------------------------------------------------------------


def read_data(config: Config) -> SftData:
    """Reads the sets of sft.data, and held-out rows: sft.eval_data or splits of the sets."""
    sft = config.sft
    sources = suites.split_commas(sft.data)
    sets = [read_rows(source, "train", config) for source in sources]
    for source, found in zip(sources, sets, strict=True):
        check_system_prompt(source, found, sft.system_prompt)
    held_out: list[ExampleRow] = []
    for source in find_held_out_sources(config, sources):
        held_out += read_rows(source, "test", config)
    rows = problem_sets.stream(sets, sft.weights, config.train.seed)
    return SftData(rows, sum(map(len, sets)), held_out)


def check_system_prompt(source: str, rows: Sequence[ExampleRow], system_prompt: str) -> None:
    """Raises UserError if there is a system prompt, and the rows are text instead of messages."""
    if system_prompt and len(rows) and isinstance(rows[0].get("prompt"), str):
        raise UserError(
            f"sft.system_prompt={system_prompt!r:.60} is for messages, and sft.data={source} has "
            "prompts of text: write it into them, or set sft.system_prompt="
        )


def find_held_out_sources(config: Config, sources: Sequence[str]) -> list[str]:
    """Returns the sources of held-out rows. A task draws as many rows as are asked for.

    Raises UserError if no set has the split sft.eval_split.
    """
    sft = config.sft
    if sft.eval_data:
        return [sft.eval_data]
    tasks = [source for source in sources if draws_examples(source)]
    sets = [source for source in sources if source not in tasks]
    found = tasks
    if sets:
        found = tasks + problem_sets.held_out_sources(
            sets, sft.eval_split, sft.train_split, "sft.eval_split"
        )
    if not found:
        notes = problem_sets.unused_splits_notes(sets, sft.train_split, "sft.eval_split")
        for note in notes:
            processes.print_once(note)
    return [source for source in sources if source in found]


def read_rows(source: str, part: str, config: Config) -> Sequence[ExampleRow]:
    """Returns a split of a set, or warm-start examples if `source` is a task.

    `part` is "train" for the rows to train on, and "test" for held-out rows.

    Raises UserError if the set has neither messages nor prompts with completions.
    """
    if draws_examples(source):
        return draw_task_rows(source, part, config)
    setting = "train_split" if part == "train" else "eval_split"
    wanted = getattr(config.sft, setting)
    dataset = problem_sets.choose_split(source, wanted, part, f"sft.{setting}")
    for columns in (["messages"], ["prompt", "completion"]):
        if set(columns) <= set(dataset.column_names):
            # A Dataset indexes and iterates as a sequence of rows, but does not declare it.
            return cast(Sequence[ExampleRow], dataset.select_columns(columns))
    raise UserError(
        f"sft.data={source} has columns {', '.join(dataset.column_names)}: "
        "it needs messages, or prompt and completion"
    )


def draw_task_rows(task_name: str, part: str, config: Config) -> list[ExampleRow]:
    """Returns warm-start examples of a task. The held-out ones have a seed of their own."""
    make_example = TASKS[task_name].warm_start
    assert make_example is not None, f"{task_name=}"
    warm = config.warm_start
    if part == "train":
        seed, count = config.train.seed, warm.steps * warm.batch_size
    else:
        seed, count = config.train.seed + 1, config.eval.problems

    rows: list[ExampleRow] = []
    for index in range(count):
        prompt, completion = make_example(config.task, seed, index, warm.tries)
        rows.append({"prompt": prompt, "completion": completion})
    return rows


def set_chat_template(tok: PreTrainedTokenizerFast, path: str) -> None:
    """Gives the tokenizer the template in the file `path`, unless it is empty.

    With a template, the tokenizer's end of sequence becomes the token that ends a turn. Exports of
    the run have both.
    """
    if path:
        if not Path(path).is_file():
            raise UserError(
                f"sft.chat_template={path} is no file: give one with a chat template in Jinja"
            )
        tok.chat_template = Path(path).read_text(encoding="utf-8")
    if tok.chat_template:
        tok.eos_token = tokenizer.end_of_turn(tok)


def encode_rows(
    tok: PreTrainedTokenizerFast, rows: Sequence[ExampleRow], config: Config
) -> list[Example]:
    """Encodes rows. Examples that are longer than a packed row, or train nothing, are left out."""
    sft = config.sft
    examples = [encode_row(tok, row, sft.loss, sft.system_prompt) for row in rows]
    return [
        example
        for example in examples
        if len(example.tokens) <= config.sft.pack_length and any(example.trained)
    ]


# -- metrics ---------------------------------------------------------------------------------------


def update_metrics(stats: Stats) -> dict[str, float]:
    """Returns the metrics of one optimizer step from the sums that the update returns."""
    sums = jax.device_get(stats)
    metrics = {
        "sft/loss": float(sums["nll"]) / float(sums["tokens"]),
        "sft/tokens": float(sums["tokens"]),
        "optimizer/grad_norm": float(sums["grad_norm"]),
        "optimizer/skipped": float(sums["skipped"]),
    }
    return metrics | expert_metrics([sums])


def make_suites(config: Config, base: BaseModel, mesh: Mesh, pool: Pool) -> Suites | None:
    """Returns the suites of eval.suites with a sampler for them, None where there are none."""
    if not config.eval.suites:
        return None
    sampler, publish = make_sampler(config, base, mesh, pool)
    return Suites(sampler, publish, encode_suites(sampler, config))


def evaluate_model(
    trainer: SupervisedTrainer,
    session: RunSession,
    test: HeldOut,
    name: str,
    params: qwen.Params,
) -> dict[str, float]:
    """Computes the loss of the held-out examples, and the accuracies of the suites.

    Records them under `name`.
    """
    metrics: dict[str, float] = {}
    config = session.config
    with session.clock("eval"):
        if test.packed is not None:
            metrics["eval/loss"] = trainer.loss(params, test.packed)
        if test.suites is not None:
            sampler, publish, problems = test.suites
            evaluated = evaluate(
                sampler, publish(params), problems, config.eval, config.rollout.temperature
            )
            metrics |= evaluation_metrics(evaluated)
            if config.eval.save_responses:
                write_responses(session.workdir / "evaluations" / name, evaluated)
    if metrics:
        session.record_evaluation(name, metrics)
    return metrics
