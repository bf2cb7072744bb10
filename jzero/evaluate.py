"""`python -m jzero.evaluate --model DIR [--adapter DIR] (--suite aime24,mine=FILE | --loglikelihood FILE) [--out DIR] [--config.X.Y=Z ...]`

Evaluates a model on one or more suites. Writes every problem's responses to
OUT/<suite>-<kind>.jsonl and the metrics to OUT/summary.json, and prints a table. By default each
problem gets one greedy response, as in the tables that model cards publish. --config.eval.samples=K
adds K responses at --config.rollout.temperature or, if it is set, --config.eval.temperature, and
with them avg@K, pass@k and maj@K. --adapter is an adapter of the model in PEFT's format.

With --loglikelihood nothing is sampled: the answer to a question is the choice that the model finds
most probable. FILE has a JSON object a line: {"question": "...", "choices": ["...", "..."],
"answer": 0}, where the answer is the index of the right choice.
"""  # noqa: E501 (the first line is the usage that --help prints)

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from jzero import cli, config
from jzero.distributed import peers, processes
from jzero.distributed.mesh import adapter_shardings, configured_mesh, param_shardings
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import adapters, huggingface, peft, qwen
from jzero.rollout import multiple_choice
from jzero.rollout.evaluation import accuracy_metrics, evaluate, evaluation_kinds
from jzero.rollout.multiple_choice import LikelihoodSummary
from jzero.rollout.sampler import EncodedProblem, Sampler, make_sampler
from jzero.run.base_model import check_context, read_base_model, with_given_adapter
from jzero.run.environment import versions
from jzero.run.samples import write_responses
from jzero.setup import with_stop_strings
from jzero.tasks import math_problems, suites
from jzero.training.frozen import load_base


class SuiteSummary(TypedDict):
    """What summary.json holds of one suite."""

    problems: int  # that were evaluated
    dropped: int  # whose prompt is longer than rollout.max_prompt_tokens
    kinds: dict[str, dict[str, float]]  # "greedy" or "avg@K" -> metrics by name


def defaults(model: str = "") -> config.Config:
    """Returns the settings of published tables: one greedy response of at most 3,000 tokens.

    `model` is the directory or hub id of a model. For one with fewer positions the lengths are
    shorter: prompts give way first, down to a quarter of the positions. A line says so.
    """
    max_prompt_tokens, max_new_tokens = 2048, 3000
    positions = huggingface.read_positions(model) if model else None
    if positions is not None and max_prompt_tokens + max_new_tokens > positions:
        max_prompt_tokens = min(
            max_prompt_tokens, max(positions - max_new_tokens, positions // 4, 1)
        )
        max_new_tokens = max(1, min(max_new_tokens, positions - max_prompt_tokens))
        processes.print_once(
            f"{model} has {positions} positions: the default lengths are "
            f"rollout.max_prompt_tokens={max_prompt_tokens} "
            f"rollout.max_new_tokens={max_new_tokens}"
        )
    return config.Config(
        task=config.TaskConfig(template="qwen_math"),
        rollout=config.RolloutConfig(
            max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, num_slots=64
        ),
        eval=config.EvalConfig(samples=0),
    )


class Command(NamedTuple):
    """What a command asks for: suites, or files of questions for --loglikelihood."""

    suites: list[str]  # as they were given
    out: Path  # the directory to write to
    settings: config.Config
    questions: list[Path]


def parse(arguments: Sequence[str]) -> Command:
    """Reads the command line. Raises UserError, or ends the command, where it has a mistake."""
    parser = cli.make_parser("jzero.evaluate", __doc__)
    parser.add_argument(
        "--model", required=True, help="directory or hub id of a model, as a run exports it"
    )
    parser.add_argument(
        "--adapter", default="", help="directory or hub id of an adapter of the model, as PEFT's"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--suite", default="", help=f"comma-separated: {', '.join(suites.SUITES)}, or name=FILE"
    )
    asked.add_argument(
        "--loglikelihood",
        metavar="FILE",
        action="append",
        default=[],
        help="multiple choice by log-likelihood: a JSONL file of questions; may be given again",
    )
    parser.add_argument("--out", help="directory to write to; default runs/eval-<date>-<time>")
    given, rest = parser.parse_known_args(arguments)
    settings = cli.parse_settings(defaults(given.model), rest)
    settings.model.path = given.model
    settings.model.adapter.path = given.adapter or settings.model.adapter.path
    settings = with_stop_strings(settings, math_problems.math_template(settings.task.template))
    out = Path(given.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
    questions = [Path(path) for path in given.loglikelihood]
    return Command(suites.split_commas(given.suite), out, settings, questions)


def load(settings: config.Config, pool: Pool) -> tuple[Sampler, qwen.Params]:
    """Returns a sampler for the model at `settings.model.path`, and the weights it samples from.

    With an adapter at `settings.model.adapter.path` the weights are a base with an adapter.
    """
    if settings.model.adapter.rank and not settings.model.adapter.path:
        raise UserError(
            f"model.adapter.rank={settings.model.adapter.rank} is of training, and nothing is "
            "trained here: leave it out; what a run exports has its adapter merged, and --adapter "
            "takes one that is not"
        )
    if settings.model.is_base_quantized and not settings.model.adapter.path:
        raise UserError(
            f"model.base={settings.model.base} is of the frozen model under an adapter: give "
            "--adapter, or leave it out"
        )
    settings = with_given_adapter(settings)
    base = read_base_model(settings.model)
    check_context(settings, base)
    assert base.directory, "settings.model.path is empty"
    mesh = configured_mesh(settings.mesh)
    sampler, publish = make_sampler(settings, base, mesh, pool)
    adapter = settings.model.adapter
    if not adapter.rank:
        params = huggingface.load(base.directory, base.model, param_shardings(base.model, mesh))
        return sampler, publish(params)
    # As in training: the decoder multiplies by a frozen base and by the factors of the adapter.
    frozen = load_base(base.directory, base.model, mesh, settings.model)
    factors = peft.load(
        peft.resolve(adapter.path),
        base.model,
        adapter,
        adapter_shardings(base.model, adapter, mesh),
    )
    return sampler, publish(adapters.join(frozen, factors, adapter.scale))


def run(specs: list[str], out: Path, settings: config.Config) -> dict[str, SuiteSummary]:
    """Evaluates suites, writes the files in `out`, and returns each suite's summary by its name.

    Raises UserError, before the model is loaded, if a suite is given twice or there is nothing to
    sample.
    """
    config.validate(settings)
    seed = settings.train.seed
    problem_sets = dict(
        suites.load_suite(spec, settings.task, settings.eval.limit, seed) for spec in specs
    )
    kinds = evaluation_kinds(settings.eval, settings.rollout.temperature)
    if not problem_sets or len(problem_sets) < len(specs) or not kinds:
        raise UserError(
            f"--suite {','.join(specs)}: give every suite once, and set eval.samples or eval.greedy"
        )

    summary: dict[str, SuiteSummary] = {}
    with Pool(settings.task.grade_workers) as pool:
        sampler, params = load(settings, pool)
        for name, problems in problem_sets.items():
            fitting = sampler.encode_problems(problems, name)
            if not fitting:
                raise UserError(
                    f"rollout.max_prompt_tokens={settings.rollout.max_prompt_tokens}: all prompts "
                    f"of suite {name} are longer; raise it"
                )
            summary[name] = SuiteSummary(
                problems=len(fitting),
                dropped=len(problems) - len(fitting),
                kinds=evaluate_suite(sampler, params, name, fitting, out, settings),
            )
    write_summary(out, settings, {"suites": summary})
    return summary


def write_summary(out: Path, settings: config.Config, results: dict[str, object]) -> None:
    """Writes OUT/summary.json: the results, and how they came about."""
    report = {"config": json.loads(config.to_json(settings)), **results, "versions": versions()}
    processes.write_once(out / "summary.json", json.dumps(report, indent=1))


def run_loglikelihood(
    paths: list[Path], out: Path, settings: config.Config
) -> dict[str, LikelihoodSummary]:
    """Answers files of questions by log-likelihood, writes the files in `out`, and returns each
    file's summary by its name.

    Raises UserError, before the model is loaded, if a file has a mistake or two have one name.
    """
    config.validate(settings)
    problems_of = {path.stem: multiple_choice.read_questions(path) for path in paths}
    if len(problems_of) < len(paths):
        raise UserError(
            "--loglikelihood: two files have the same name, and so would their results: rename one"
        )
    summary: dict[str, LikelihoodSummary] = {}
    with Pool(0) as pool:
        sampler, params = load(settings, pool)
        for name, problems in problems_of.items():
            limit = settings.eval.limit or len(problems)
            answered, dropped = multiple_choice.answer_questions(sampler, params, problems[:limit])
            longest = sampler.engine.max_sequence_tokens
            if not answered:
                raise UserError(
                    f"all questions of {name} are longer than {longest} tokens: raise "
                    "rollout.max_prompt_tokens"
                )
            if dropped:
                processes.print_once(
                    f"{name}: {dropped} of {len(answered) + dropped} questions dropped, longer "
                    f"than {longest} tokens with a choice"
                )
            summary[name] = multiple_choice.summarize(answered, dropped)
            rows = multiple_choice.rows(answered)
            processes.write_once(out / f"{name}-loglikelihood.jsonl", rows)
    write_summary(out, settings, {"loglikelihood": summary})
    return summary


def likelihood_table(summary: Mapping[str, LikelihoodSummary]) -> str:
    """Returns a line for each file of questions."""
    lines = [f"{'questions':16}{'problems':>9}{'accuracy':>14}{'per character':>16}"]
    for name, values in summary.items():
        by_sum = f"{100 * values['accuracy']:.1f} ± {100 * values['stderr']:.1f}"
        per_character = (
            f"{100 * values['accuracy_per_character']:.1f} ± "
            f"{100 * values['stderr_per_character']:.1f}"
        )
        lines.append(f"{name:16}{values['problems']:9d}{by_sum:>14}{per_character:>16}")
    return "\n".join(lines)


def evaluate_suite(
    sampler: Sampler,
    params: qwen.Params,
    name: str,
    problems: list[EncodedProblem],
    out: Path,
    settings: config.Config,
) -> dict[str, dict[str, float]]:
    """Samples one suite, writes `out`/`name`-<kind>.jsonl, and returns the metrics by kind."""
    evaluated = evaluate(
        sampler,
        params,
        {name: problems},
        settings.eval,
        settings.rollout.temperature,
        key=(settings.train.seed, 0),
    )
    write_responses(out, evaluated)
    return {
        evaluation.label: accuracy_metrics(evaluation.rollouts, evaluation.num_samples)
        for evaluation in evaluated
    }


def table(summary: Mapping[str, SuiteSummary]) -> str:
    """Returns a line for each suite and kind, and the average accuracy of each kind."""
    lines = [
        f"{'suite':16}{'problems':>9}  {'kind':9}{'accuracy':>14}"
        f"{'pass@k':>8}{'maj@k':>8}{'tokens':>8}"
    ]
    for name, suite in summary.items():
        for kind, metrics in suite["kinds"].items():
            accuracy = f"{100 * metrics['accuracy']:.1f} ± {100 * metrics['stderr']:.1f}"
            pass_at_most = _last_percentage(metrics, "pass@")
            majority = _last_percentage(metrics, "maj@")
            lines.append(
                f"{name:16}{suite['problems']:9d}  {kind:9}{accuracy:>14}"
                f"{pass_at_most:>8}{majority:>8}{metrics['length']:8.0f}"
            )

    first_suite = next(iter(summary.values()))
    for kind in first_suite["kinds"]:
        accuracies = [suite["kinds"][kind]["accuracy"] for suite in summary.values()]
        lines.append(f"{'average':27}{kind:9}{100 * float(np.mean(accuracies)):14.1f}")
    return "\n".join(lines)


def _last_percentage(metrics: Mapping[str, float], prefix: str) -> str:
    """Returns the last metric whose name starts with `prefix`, that of the largest k, or ""."""
    values = [value for name, value in metrics.items() if name.startswith(prefix)]
    return f"{100 * values[-1]:.1f}" if values else ""


def main() -> None:
    """Runs the command."""
    arguments = cli.start_jax(sys.argv[1:])
    with cli.user_errors():
        peers.check_same_start({"the command": " ".join(arguments)})
        command = parse(arguments)
        if command.questions:
            likelihoods = run_loglikelihood(command.questions, command.out, command.settings)
            text = likelihood_table(likelihoods)
        else:
            text = table(run(command.suites, command.out, command.settings))
        processes.print_once(text)
        processes.print_once(f"written to {command.out}")


if __name__ == "__main__":
    main()
