"""`jzero evaluate --model DIR [--adapter DIR | --adapter NAME=DIR ...] (--suite aime24,mine=FILE | --loglikelihood FILE) [--out DIR] [--config.X.Y=Z ...]`
`jzero evaluate RUN [--suite aime24,mine=FILE] [--out DIR] [--config.X.Y=Z ...]`

Evaluates a model on one or more suites. RUN is the workdir of a run: its newest export is evaluated
with the prompts, lengths and graders of the run, by default on the held-out problems of the run. Writes every problem's responses to
OUT/<suite>-<kind>.jsonl and the metrics to OUT/summary.json, and prints a table. By default each
problem gets one greedy response, as in the tables of model cards. --config.eval.samples=K adds K
responses at --config.rollout.temperature or, if it is set, --config.eval.temperature, and reports
avg@K, pass@k and maj@K. --adapter is an adapter of the model in PEFT's format. With --adapter
NAME=DIR, once for every adapter, one process evaluates them all on one base that it loads once, and
writes the files of each to OUT/NAME.

With --loglikelihood nothing is sampled: the model's answer to a question is the choice that it
finds most probable. FILE has one JSON object per line: {"question": "...", "choices": ["...",
"..."], "answer": 0}, where the answer is the index of the right choice.
"""  # noqa: E501 (the first line is the usage that --help prints)

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from jzero import cli, command_flags, config, terminal
from jzero.answers import published
from jzero.config.data_sources import split_sources
from jzero.errors import UserError
from jzero.hosts import peers, processes
from jzero.model import adapters, huggingface, qwen
from jzero.planning.host_memory import (
    check_host_memory,
    graders_part,
    parts_of_engine,
    rollouts_part,
)
from jzero.rewards import rewards
from jzero.rollout import multiple_choice
from jzero.rollout.evaluation import evaluate, evaluation_kinds, print_left_out
from jzero.rollout.multiple_choice import LikelihoodSummary
from jzero.rollout.sampler import EncodedProblem, Sampler, Sampling
from jzero.run.accuracy import accuracy_text, percent
from jzero.run.environment import versions
from jzero.run.finished import FoundModel, find_model, read_adapter_flags
from jzero.run.samples import write_responses
from jzero.service.decoders import load, load_with_adapters
from jzero.setup import with_stop_strings
from jzero.tasks import evaluated_task, find_task, math_problems, mixed, suites
from jzero.tasks.votes import MATHEMATICS
from jzero.types import Problem
from jzero.workers.pool import Pool


class SuiteSummary(TypedDict):
    """The fields of summary.json for one suite."""

    problems: int  # evaluated problems
    dropped: int  # problems with a prompt longer than rollout.max_prompt_tokens
    graded_by: str  # "task.verifier=fast", or the grader of a suite without a verifier
    kinds: dict[str, dict[str, float]]  # "greedy" or "avg@K" -> metrics by name


def defaults(model: str = "") -> config.Config:
    """Returns the default settings: one greedy response of at most 3,000 tokens.

    These are the settings of published tables. `model` is the directory or hub id of a model. For a
    model with fewer positions the lengths are shorter, and a line reports them.
    """
    # 3,000 tokens, and below the template qwen_math, are the settings of understand-r1-zero
    # (docs/start.md).
    max_prompt_tokens, max_new_tokens = 2048, 3000
    positions = huggingface.read_positions(model) if model else None
    # The prompt length gives way first, down to a quarter of the positions.
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


HELD_OUT = "held-out"  # the name of the held-out problems of a run


class Command(NamedTuple):
    """The parsed command line: suites, or files of questions for --loglikelihood."""

    suites: list[str]  # as the user gave them; empty for the held-out problems of a run
    out: Path  # the directory to write to
    settings: config.Config
    questions: list[Path]
    adapters: dict[str, str]  # by name: several adapters to evaluate one after the other


def parse(arguments: Sequence[str]) -> Command:
    """Parses the command line. Raises UserError, or exits, if it has a mistake."""
    parser = command_flags.evaluate(__doc__)
    given, config_flags = parser.parse_known_args(arguments)
    if bool(given.run) == bool(given.model):
        parser.error("give one model: jzero evaluate RUN, or jzero evaluate --model DIR_OR_ID")
    if given.run:
        return command_on_run(given, config_flags)
    if not (given.suite or given.loglikelihood):
        parser.error("--model needs the problems: give --suite NAME or --loglikelihood FILE")
    settings = cli.parse_settings(defaults(given.model), config_flags)
    settings.model.path = given.model
    named = read_adapter_flags(given.adapter)
    settings.model.adapter.path = named.pop("", "") or settings.model.adapter.path
    if named and settings.model.adapter.path:
        raise UserError(
            f"model.adapter.path={settings.model.adapter.path}: remove it, or --adapter"
        )
    # With task.name=mixed each row names its task, so there is no single template with stop
    # strings.
    template = None
    if settings.task.name == mixed.NAME:
        mixed.check(settings.task)
    else:
        template = math_problems.math_template(settings.task.template)
    settings = with_stop_strings(settings, template)
    questions = [Path(path) for path in given.loglikelihood]
    suite_names = split_sources(given.suite)
    if named and questions:
        raise UserError("--loglikelihood: give one adapter, as --adapter DIR")
    return Command(suite_names, out_directory(given.out), settings, questions, named)


def command_on_run(given: argparse.Namespace, config_flags: Sequence[str]) -> Command:
    """Returns the command on RUN. Raises UserError, or exits, if it has a mistake."""
    if given.adapter or given.loglikelihood:
        raise UserError(
            f"{given.run}: --adapter and --loglikelihood are for a model: give --model instead of "
            "RUN"
        )
    found = find_model(given.run)
    if found.settings is None:
        raise UserError(
            f"{given.run} is not the workdir of a run: give one, or --model {given.run} with "
            "--suite NAME"
        )
    settings = cli.parse_settings(settings_of_run(found, found.settings), config_flags)
    return Command(split_sources(given.suite), out_directory(given.out), settings, [], {})


def settings_of_run(found: FoundModel, settings: config.Config) -> config.Config:
    """Returns settings that evaluate a model as a run evaluates its policy."""
    return found.with_model(with_stop_strings(settings))


def out_directory(given: str | None) -> Path:
    """Returns the directory of --out, by default one with the time in its name."""
    return Path(given or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")


def held_out_problems(settings: config.Config) -> dict[str, list[Problem]]:
    """Returns the held-out problems of a run, at most eval.problems, under the name HELD_OUT.

    Raises UserError if the run has none.
    """
    task = find_task(settings.task.name)
    problems = task.eval_problems(settings.task, settings.eval.problems)
    if not problems:
        raise UserError(
            f"eval.problems={settings.eval.problems}: the run has no held-out problems: give "
            "--suite NAME=FILE"
        )
    return {HELD_OUT: problems}


def check_responses(settings: config.Config, name: str, num_problems: int) -> None:
    """Raises UserError if the host lacks memory for the graders and all responses to a suite."""
    counts = {
        f"problems of {name}": num_problems,
        "eval.samples": settings.eval.samples + settings.eval.greedy,
    }
    longest = settings.eval.longest_episode(settings.rollout)
    kept = config.num_kept(settings.algorithm, settings.rollout)
    responses = rollouts_part(counts, longest, f"the responses to {name}", kept)
    parts = [graders_part(settings.task), responses, *parts_of_engine(settings.rollout)]
    check_host_memory(settings, parts)


def run(specs: list[str], out: Path, settings: config.Config) -> dict[str, SuiteSummary]:
    """Evaluates suites, writes the files in `out`, and returns each suite's summary by its name.

    Raises UserError, before the model is loaded, if a suite is given twice or there is nothing to
    sample.
    """
    check(settings)
    return run_on(load_suites(specs, settings), out, settings)


def check(settings: config.Config) -> None:
    """Raises UserError if settings cannot be evaluated. Nothing is loaded."""
    config.validate(settings)
    published.load(settings.task.verifier)
    evaluated_task.check_verifiers(settings.eval)
    rewards.check_rewards(settings.task.reward)
    if not evaluation_kinds(settings.eval, settings.rollout.temperature):
        raise UserError("nothing is sampled: set eval.samples or eval.greedy")


def load_suites(specs: list[str], settings: config.Config) -> dict[str, list[Problem]]:
    """Returns the problems of suites by name. Raises UserError if a suite is given twice."""
    seed = settings.train.seed
    # A suite that is given twice is one entry.
    problem_sets = dict(
        suites.load_suite(spec, settings.task, settings.eval.limit, seed) for spec in specs
    )
    if not problem_sets or len(problem_sets) < len(specs):
        raise UserError(f"--suite {','.join(specs)}: give every suite once")
    return problem_sets


def run_on(
    problem_sets: Mapping[str, list[Problem]], out: Path, settings: config.Config
) -> dict[str, SuiteSummary]:
    """Evaluates problem sets by name, writes the files in `out`, and returns their summaries.

    Raises UserError if the host lacks memory, or all prompts of a set are too long.
    """
    # Host memory is checked before the model is loaded.
    for name, problems in problem_sets.items():
        check_responses(settings, name, len(problems))
    with Pool(settings.task.grade_workers) as pool:
        sampler, params = load(settings, pool, problems=flat(problem_sets))
        return run_with(sampler, params, problem_sets, out, settings)


def flat(problem_sets: Mapping[str, list[Problem]]) -> list[Problem]:
    return [problem for problems in problem_sets.values() for problem in problems]


def run_adapters(
    specs: list[str], named: Mapping[str, str], out: Path, settings: config.Config
) -> dict[str, dict[str, SuiteSummary]]:
    """Evaluates several adapters of one model on suites. The base is loaded once.

    named: the directory or hub id of every adapter. Writes the files of an adapter in `out`/name,
    and returns the summaries by the names of adapter and suite.
    """
    check(settings)
    problem_sets = load_suites(specs, settings)
    for name, problems in problem_sets.items():
        check_responses(settings, name, len(problems))
    summaries = {}
    with Pool(settings.task.grade_workers) as pool:
        loaded = load_with_adapters(settings, named, pool, flat(problem_sets))
        for adapter in loaded.adapters:
            params = adapters.join(loaded.base, adapter.factors, adapter.settings.scale)
            model = replace(settings.model, adapter=adapter.settings)
            summaries[adapter.name] = run_with(
                loaded.sampler,
                params,
                problem_sets,
                out / adapter.name,
                replace(settings, model=model),
            )
    return summaries


def run_with(
    sampler: Sampler,
    params: qwen.Params,
    problem_sets: Mapping[str, list[Problem]],
    out: Path,
    settings: config.Config,
) -> dict[str, SuiteSummary]:
    """Evaluates decoder weights on problem sets, and writes the files in `out`. See `run_on`."""
    summary: dict[str, SuiteSummary] = {}
    for name, problems in problem_sets.items():
        if settings.eval.rewards:
            print_left_out(name, problems, settings.task)
        fitting = sampler.encode_problems(problems, name)
        if not fitting:
            raise UserError(
                f"rollout.max_prompt_tokens={settings.rollout.max_prompt_tokens}: all prompts "
                f"of suite {name} are longer; raise it"
            )
        summary[name] = SuiteSummary(
            problems=len(fitting),
            dropped=len(problems) - len(fitting),
            graded_by=name_graders(problems, settings),
            kinds=evaluate_suite(sampler, params, name, fitting, out, settings),
        )
    write_summary(out, settings, {"suites": summary})
    return summary


def name_graders(problems: Sequence[Problem], settings: config.Config) -> str:
    """Returns the names of the graders of problems: the task's verifier, or other graders."""
    task = evaluated_task.settings_for(settings.task, settings.eval, problems)
    names = set()
    for problem in problems:
        verifier = mixed.settings_of(task, problem).verifier
        is_question = problem.task in MATHEMATICS
        names.add(f"task.verifier={verifier}" if is_question else problem.task)
    return ", ".join(sorted(names))


def write_summary(out: Path, settings: config.Config, results: dict[str, object]) -> None:
    """Writes OUT/summary.json: the results, the settings and the versions."""
    report = {"config": json.loads(config.to_json(settings)), **results, "versions": versions()}
    processes.write_once(out / "summary.json", json.dumps(report, indent=1))


def run_loglikelihood(
    paths: list[Path], out: Path, settings: config.Config
) -> dict[str, LikelihoodSummary]:
    """Answers files of questions by log-likelihood, and returns each file's summary by name.

    Writes its files in `out`. Raises UserError, before the model is loaded, if a file has a mistake
    or two files have the same name.
    """
    config.validate(settings)
    # Results are named after the file without its folder, so two files may collide.
    questions_by_file = {path.stem: multiple_choice.read_questions(path) for path in paths}
    if len(questions_by_file) < len(paths):
        raise UserError(
            "--loglikelihood: two files have the same name, and so would their results: rename one"
        )
    summary: dict[str, LikelihoodSummary] = {}
    # Nothing is graded, so the pool needs no workers.
    with Pool(0) as pool:
        sampler, params = load(settings, pool)
        for name, problems in questions_by_file.items():
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
        num_problems = values["problems"]
        by_sum = accuracy_text(values["accuracy"], num_problems, values["stderr"])
        per_character = accuracy_text(
            values["accuracy_per_character"], num_problems, values["stderr_per_character"]
        )
        lines.append(f"{name:16}{num_problems:9d}{by_sum:>14}{per_character:>16}")
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
        Sampling(sampler, params),
        {name: problems},
        settings.eval,
        settings.rollout.temperature,
        key=(settings.train.seed, 0),
    )
    write_responses(out, evaluated)
    return {evaluation.label: evaluation.metrics for evaluation in evaluated}


def table(summary: Mapping[str, SuiteSummary]) -> str:
    """Returns a line for each suite and kind, and the average accuracy of each kind."""
    lines = [
        f"{'suite':16}{'problems':>9}  {'kind':9}{'accuracy':>14}"
        f"{'pass@k':>8}{'maj@k':>8}{'tokens':>8}"
    ]
    for name, suite in summary.items():
        for kind, metrics in suite["kinds"].items():
            accuracy = accuracy_text(metrics["accuracy"], suite["problems"], metrics.get("stderr"))
            pass_at_most = _last_percentage(metrics, "pass@")
            majority = _last_percentage(metrics, "maj@")
            lines.append(
                f"{name:16}{suite['problems']:9d}  {kind:9}{accuracy:>14}"
                f"{pass_at_most:>8}{majority:>8}{metrics['length']:8.0f}"
            )
            for metric, value in metrics.items():
                if metric.startswith("accuracy/"):  # over the rows that name one task
                    part = f"{name}/{metric.partition('/')[2]}"
                    lines.append(f"{part:27}{kind:9}{percent(value):>14}")

    # All suites have the same kinds of evaluation.
    first_suite = next(iter(summary.values()))
    for kind in first_suite["kinds"]:
        accuracies = [suite["kinds"][kind]["accuracy"] for suite in summary.values()]
        # The average of one suite is its accuracy.
        if len(accuracies) > 1:
            average = percent(float(np.mean(accuracies)))
            lines.append(f"{'average':27}{kind:9}{average:>14}")
    lines += further_lines(summary)
    suites_by_grader: dict[str, list[str]] = {}
    for name, suite in summary.items():
        suites_by_grader.setdefault(suite["graded_by"], []).append(name)
    for grader, names in suites_by_grader.items():
        lines.append(f"{', '.join(names)}: graded by {grader}")
    return "\n".join(lines)


def further_lines(summary: Mapping[str, SuiteSummary]) -> list[str]:
    """Returns a line for the score, each reward function, and each verifier of eval.verifiers."""
    lines = []
    for name, suite in summary.items():
        for kind, metrics in suite["kinds"].items():
            if "score" in metrics and any(metric.startswith("reward/") for metric in metrics):
                lines.append(f"{name} {kind}: score {metrics['score']:.4g}")
            for metric, value in metrics.items():
                if metric.startswith("accuracy_by/"):
                    verifier = metric.removeprefix("accuracy_by/")
                    lines.append(f"{name} {kind}: {percent(value)} by {verifier}")
                elif metric.startswith("reward/"):
                    lines.append(f"{name} {kind}: {metric} {value:.4g}")
    return lines


def _last_percentage(metrics: Mapping[str, float], prefix: str) -> str:
    """Returns the metric with prefix `prefix` and the largest k, or ""."""
    values = [value for name, value in metrics.items() if name.startswith(prefix)]
    # `accuracy_metrics` adds them in ascending order of k.
    return percent(values[-1]) if values else ""


@terminal.keep_stdout_for_answers()
def main() -> None:
    """Runs the command."""
    arguments = cli.start_jax(sys.argv[1:])
    with cli.user_errors():
        # All hosts must run the same command: they decode shares of the same problems.
        peers.check_same_start({"the command": " ".join(arguments)})
        command = parse(arguments)
        if command.questions:
            likelihoods = run_loglikelihood(command.questions, command.out, command.settings)
            text = likelihood_table(likelihoods)
        elif command.adapters:
            summaries = run_adapters(
                command.suites, command.adapters, command.out, command.settings
            )
            tables = (f"{name}:\n{table(summary)}" for name, summary in summaries.items())
            text = "\n\n".join(tables)
        elif command.suites:
            text = table(run(command.suites, command.out, command.settings))
        else:
            check(command.settings)
            problem_sets = held_out_problems(command.settings)
            text = table(run_on(problem_sets, command.out, command.settings))
        processes.write_result_once(text)
        processes.print_once(f"written to {command.out}")


if __name__ == "__main__":
    terminal.run_command(main)
