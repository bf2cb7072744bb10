"""The supervised fine-tuning loop, on conversations or on prompts with completions.

    examples -> packed rows -> update -> evaluate -> checkpoint

An evaluation computes the loss of held-out examples and, if `eval.suites` names suites, the
accuracy of the model's responses to their problems, as in RL.

The loop runs instead of RL if sft is set, for example with `python -m jzero.main
--config=configs/sft.py --workdir=runs/sft --config.sft.data=rows.jsonl`.

Packing, the update program and the optimizer are shared with RL (`training.supervised`), and so are
workdir, checkpoints and exports. A run that is killed resumes to the same numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import jax

from jzero import terminal
from jzero.blueprint import Blueprint
from jzero.clock import Clock
from jzero.config import Config, Rows, Sft
from jzero.errors import UserError
from jzero.files import JsonObject, read_text
from jzero.hosts import interrupt, processes
from jzero.model import end_tokens, qwen
from jzero.model.base_model import BaseModel
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.planning.disk import require_disk
from jzero.problems import problem_sets, row_loader
from jzero.problems.row_loader import Selection
from jzero.rollout.evaluation import encode_suites, evaluate, evaluation_metrics
from jzero.rollout.sampler import EncodedProblem, Sampler, Sampling, make_sampler
from jzero.run.budget import TimeBudget
from jzero.run.metrics import nonfinite
from jzero.run.samples import write_responses
from jzero.run.session import RunSession
from jzero.service.weights import load_base, load_given_adapter, load_model
from jzero.setup import ResolvedRun, resolve
from jzero.tasks import TASKS, draws_examples
from jzero.training.draft_head import head_metrics
from jzero.training.examples import TURNS, Example, ExampleRow, encode_row
from jzero.training.frozen_base import name_base
from jzero.training.heads import Stats, expert_metrics
from jzero.training.optimizer import learning_rate
from jzero.training.packing import PackedBatch
from jzero.training.supervised import SupervisedTrainer
from jzero.training.trainer import Trainer
from jzero.workers.pool import Pool

# The possible columns of an example. A data set is read with the first entry that it has.
EXAMPLE_COLUMNS = (
    ["messages"],
    ["prompt", "completion"],
    ["conversations"],
    ["text"],
    *map(list, TURNS),
)


@dataclass(frozen=True)
class SftData:
    """The rows of a run, as text."""

    rows: problem_sets.Stream[ExampleRow]  # endless and shuffled
    num_examples: int  # rows of one epoch
    # The last step of an epoch is shorter. Weights mix sets whose epochs end at different steps.
    epoch_end: problem_sets.PassEnd
    held_out: list[ExampleRow]


class Suites(NamedTuple):
    """The suites of eval.suites, with the sampler that answers their problems."""

    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # the trainer's parameters -> the sampler's
    problems: dict[str, list[EncodedProblem]]


class HeldOut(NamedTuple):
    """The data on which a run is evaluated. Either may be missing."""

    packed: PackedBatch | None  # held-out examples
    suites: Suites | None


def train(config: Config, workdir: Path) -> JsonObject:
    """Runs `config` in `workdir`, or resumes the existing run; returns the summary."""
    # ----------------------------------------------------------------------------------------------
    # Set-up
    budget = TimeBudget(config.train.minutes)
    resolved, data = set_up(config, workdir)
    config, base, blueprint = resolved.config, resolved.base, resolved.blueprint
    sft, clock = settings_of(config), Clock()
    # An epoch has as many rows as all data sets together.
    last_step = problem_sets.num_steps(
        sft.epochs, sft.batch_size, data.num_examples, data.epoch_end
    )

    require_disk(config, base.model, workdir)
    trainer = trainer_of(blueprint)
    learner = trainer.learner

    with (
        # Only the responses to suites are graded.
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
                planned_bytes=resolved.planned_bytes,
                steps_of_pass=problem_sets.steps_of_pass(
                    sft.batch_size, data.num_examples, data.epoch_end
                ),
            )
        ) as session,
    ):
        processes.print_once(
            f"{data.num_examples} examples, {len(data.held_out)} held out; "
            f"{last_step} steps of {sft.batch_size}"
        )
        held_out = data.held_out[: config.eval.problems]
        test_examples = encode_rows(base.tokenizer, held_out, sft)
        test = HeldOut(
            packed=trainer.pack(test_examples) if test_examples else None,
            suites=make_suites(config, base, blueprint, pool),
        )

        if session.resume_step is None:
            with terminal.phase("load the model"):
                params = load_model(session.weights, blueprint, learner, config.train.seed)
            session.record.base = name_base(session.weights)
            given = load_given_adapter(blueprint)
            state = learner.start_on(params, config.train.seed, given)
            evaluate_model(trainer, session, test, "before", learner.weights(state))
        else:
            with terminal.phase("restore the checkpoint"):
                state = session.restore(learner.abstract_state())
                frozen = load_base(session.weights, blueprint, session.record.base)
                state = replace(state, base=frozen)

        # ------------------------------------------------------------------------------------------
        # The loop
        try:
            progress = session.progress("SFT")
            for step in progress:
                # -- Examples -> packed rows.
                with clock("pack"):
                    indices = problem_sets.rows_of_step(
                        step, sft.batch_size, data.num_examples, data.epoch_end
                    )
                    rows = [data.rows[index] for index in indices]
                    examples = encode_rows(base.tokenizer, rows, sft)
                    # The few rows at the end of an epoch may all be too long: they change nothing.
                    if not examples and (len(rows) == sft.batch_size or step == 1):
                        raise UserError(
                            f"step {step}: every example is longer than "
                            f"sft.pack_length={sft.pack_length} tokens; raise it, or set "
                            "sft.long_examples=cut"
                        )
                    packed = trainer.pack(examples) if examples else None

                # -- Update. Reading the stats waits for the device. Schedules count optimizer steps
                # from 0.
                lr = learning_rate(config.optimizer, step - 1, last_step)
                metrics: dict[str, float] = {}
                if packed is not None:
                    with clock("update"):
                        state, stats = trainer.step(state, packed, lr)
                        metrics = update_metrics(stats)
                    metrics["update/padding"] = 1 - packed.num_inputs / packed.computed_inputs
                # Before the checkpoint, because a state that is not finite stays so.
                if wrong := nonfinite(metrics):
                    raise UserError(
                        f"step {step}: {', '.join(wrong)} not finite, with optimizer.lr="
                        f"{config.optimizer.lr}: start again in another --workdir, with a lower one"
                    )
                metrics |= {
                    "optimizer/lr": lr,
                    "sft/epoch": (indices[-1] + 1) / data.num_examples,
                    "sft/dropped": len(rows) - len(examples),
                }
                metrics |= progress.step_metrics()
                if packed is not None:
                    # `step_metrics` has added the seconds.
                    metrics["update/tokens_per_second"] = packed.num_inputs / metrics["time/update"]

                # -- Evaluate.
                if name := session.schedule.evaluation_after(step):
                    metrics |= evaluate_model(trainer, session, test, name, learner.weights(state))

                # -- Write metrics; checkpoint and export if they are due.
                session.end_step(step, metrics, state)
                # A stop is obeyed only here, after the step is recorded: no update is lost.
                stop.raise_if_stopped_anywhere()
                session.raise_if_time_is_over()
        except interrupt.Interrupted as reason:
            processes.print_everywhere(
                f"{reason}: stopped after step {session.record.step}; the same command resumes"
            )
        return session.finish(state, stop.raise_if_stopped_anywhere)


# -- data ------------------------------------------------------------------------------------------


def set_up(config: Config, workdir: Path) -> tuple[ResolvedRun, SftData]:
    """Returns a run with its chat template on the tokenizer, and its data.

    Raises UserError if the run cannot start.
    """
    resolved = resolve(config, workdir, read_data=read_data)
    assert isinstance(resolved.data, SftData), f"{resolved.data=}"
    set_chat_template(resolved.base.tokenizer, settings_of(config).chat_template)
    return resolved, resolved.data


def trainer_of(blueprint: Blueprint[Trainer | SupervisedTrainer]) -> SupervisedTrainer:
    """Returns what trains in a run of fine-tuning."""
    assert isinstance(blueprint.learners, SupervisedTrainer), f"{blueprint.learners=}"
    return blueprint.learners


def settings_of(config: Config) -> Sft:
    """Returns the settings of supervised fine-tuning, of a run that has them."""
    assert config.sft is not None, f"{config.sft=}"
    return config.sft


def read_data(config: Config) -> SftData:
    """Reads the data sets of sft.data, and held-out rows from sft.eval_data or their splits."""
    sft = settings_of(config)
    selection = selection_of(sft)
    sources = selection.train
    if not all(source.path for source in sources) or not sources:
        raise UserError(f"sft.data={sft.data} names no set: give one, or several with commas")
    sets = [read_rows(source, config, is_held_out=False) for source in sources]
    for source, found in zip(sources, sets, strict=True):
        check_system_prompt(source.path, found, sft.system_prompt)
    held_out: list[ExampleRow] = []
    for source in find_held_out_sources(selection):
        held_out += read_rows(source, config, is_held_out=True)
    rows = problem_sets.stream(sets, selection.weights, config.train.seed)
    epoch_end = "complete" if selection.weights else "short"
    return SftData(rows, sum(map(len, sets)), epoch_end, held_out)


def selection_of(sft: Sft) -> Selection:
    """Returns the settings that choose the rows of fine-tuning."""
    return Selection(sft.data, sft.eval_data, "sft")


def check_system_prompt(source: str, rows: Sequence[ExampleRow], system_prompt: str) -> None:
    """Raises UserError if there is a system prompt, but the rows are text instead of messages."""
    is_text = bool(len(rows)) and isinstance(rows[0].get("prompt", rows[0].get("text")), str)
    if system_prompt and is_text:
        raise UserError(
            f"sft.system_prompt={system_prompt!r:.60} is for messages, and sft.data={source} has "
            "prompts of text: write it into them, or set sft.system_prompt="
        )


def find_held_out_sources(selection: Selection) -> list[Rows]:
    """Returns the sources of held-out rows. A task draws as many rows as are asked for.

    Raises UserError if no data set has the held-out split of sft.eval_data.
    """
    if any(rows.path for rows in selection.held_out):
        return row_loader.held_out_sources(selection)
    # Held-out rows of a task are examples with another seed.
    sets = tuple(rows for rows in selection.train if not draws_examples(rows.path))
    without_tasks = selection._replace(train=sets)
    held_out = [rows for rows in selection.train if draws_examples(rows.path)]
    if sets:
        held_out += row_loader.held_out_sources(without_tasks)
    if not held_out:
        for note in row_loader.notes_on_unused_splits(without_tasks):
            processes.print_once(note)
    paths = [rows.path for rows in selection.train]
    return sorted(held_out, key=lambda rows: paths.index(rows.path))


def read_rows(source: Rows, config: Config, *, is_held_out: bool) -> Sequence[ExampleRow]:
    """Returns the rows of a set to train on, or its held-out rows.

    If `source` is a task, they are warm-start examples. Rows that lack a value, such as a
    completion that no server gave, are left out.

    Raises UserError if the data set has none of EXAMPLE_COLUMNS.
    """
    if draws_examples(source.path):
        return draw_task_rows(source.path, config, is_held_out=is_held_out)
    usual, setting = ("test", "sft.eval_data") if is_held_out else ("train", "sft.data")
    dataset = row_loader.open_rows(source, usual, setting)
    for columns in EXAMPLE_COLUMNS:
        if set(columns) <= set(dataset.column_names):
            examples = dataset.select_columns(columns)
            if any(examples.data.column(name).null_count for name in columns):
                # An example with a missing value cannot be trained on.
                complete = [i for i, row in enumerate(examples) if None not in dict(row).values()]
                count = len(examples) - len(complete)
                processes.print_once(
                    f"{source.path}: {count} rows without {columns[-1]} are left out"
                )
                examples = examples.select(complete)
            # A Dataset indexes and iterates as a sequence of rows, but does not declare it.
            return cast(Sequence[ExampleRow], examples)
    raise UserError(
        f"sft.data={source.path} has columns {', '.join(dataset.column_names)}: "
        "it needs messages, prompt and completion, problem and solution, question and answer, "
        "conversations, or text"
    )


def draw_task_rows(task_name: str, config: Config, *, is_held_out: bool) -> list[ExampleRow]:
    """Returns warm-start examples of a task. The held-out ones have a seed of their own.

    Raises UserError if warm_start does not give their number.
    """
    make_example = TASKS[task_name].warm_start
    assert make_example is not None, f"{task_name=}"
    warm = config.warm_start
    if warm is None:
        raise UserError(
            f"sft.data={task_name} draws warm_start.steps * warm_start.batch_size examples: set "
            "warm_start.steps"
        )
    if is_held_out:
        seed, count = config.train.seed + 1, config.eval.problems
    else:
        seed, count = config.train.seed, warm.steps * warm.batch_size

    rows: list[ExampleRow] = []
    for index in range(count):
        prompt, completion = make_example(config.task, seed, index, warm.tries)
        rows.append({"prompt": prompt, "completion": completion})
    return rows


def set_chat_template(tok: PreTrainedTokenizerFast, path: str) -> None:
    """Sets the tokenizer's chat template to the file `path`, unless `path` is empty.

    With a template, the tokenizer's end-of-sequence token becomes the token that ends a turn.
    Exports of the run contain both.
    """
    if path:
        if not Path(path).is_file():
            raise UserError(
                f"sft.chat_template={path} is not a file: give one with a chat template in Jinja"
            )
        tok.chat_template = read_text(path, name=f"sft.chat_template={path}")
    if tok.chat_template:
        tok.eos_token = end_tokens.end_of_turn(tok)


def encode_rows(
    tok: PreTrainedTokenizerFast,
    rows: Sequence[ExampleRow],
    sft: Sft,
) -> list[Example]:
    """Encodes rows, without examples that have no trained token.

    An example that is longer than a packed row is left out or truncated, depending on
    `sft.long_examples`.
    """
    examples = [encode_row(tok, row, sft.loss, sft.system_prompt) for row in rows]
    if sft.long_examples == "cut":
        examples = [example.first(sft.pack_length) for example in examples]
    return [
        example
        for example in examples
        if len(example.tokens) <= sft.pack_length and any(example.trained)
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
    return metrics | expert_metrics([sums]) | head_metrics([sums])


def make_suites(
    config: Config, base: BaseModel, blueprint: Blueprint[object], pool: Pool
) -> Suites | None:
    """Returns the suites of eval.suites with a sampler for them; None without suites."""
    if blueprint.engine is None:
        return None
    sampler = make_sampler(blueprint.engine, base, config.task, pool)
    problems = encode_suites(sampler, config.task, config.eval, config.train.seed)
    return Suites(sampler, blueprint.publisher(), problems)


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
            policy = Sampling(sampler, publish(params))
            evaluated = evaluate(policy, problems, config.eval, config.rollout.temperature)
            policy.close()
            metrics |= evaluation_metrics(evaluated)
            if config.eval.save_responses:
                write_responses(session.workdir / "evaluations" / name, evaluated)
    if metrics:
        session.record_evaluation(name, metrics)
    return metrics
