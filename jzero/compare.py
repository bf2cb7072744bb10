"""Compares two models on the same problems: `jzero compare BASE RUN`.

    jzero compare BASE RUN [--suite NAME=FILE] [--out DIR] [--show N] [--config.section.field=value ...]

BASE and RUN are workdirs of runs, directories of models or hub ids, and at least one is the workdir
of a run. Both models get the prompts, the lengths and the grader of RUN (or of BASE, if RUN is no
run), by default on the held-out problems of the run, answered greedily. --config.eval.samples=K
--config.eval.greedy=False compares K samples of each problem instead.

Prints both accuracies, and their difference with a 95 % interval (bootstrap over problems, paired)
and the p-value of McNemar's exact test, which asks whether as many problems were gained as lost.
If fewer than six problems are gained or lost, it says instead that they show no difference. A run
with rewards of its own has its scores in the next line. Then it lists the problems that only one of
the two solves. All responses are in OUT.
"""  # noqa: E501 (the usage that --help prints)

import gc
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jzero import cli, command_flags, config, terminal
from jzero.commands.evaluate import (
    HELD_OUT,
    check,
    held_out_problems,
    load_suites,
    run_on,
    settings_of_run,
)
from jzero.config.data_sources import split_sources
from jzero.errors import UserError
from jzero.files import JsonObject, read_jsonl
from jzero.hosts import peers, processes
from jzero.run.accuracy import accuracy_text, percent, points
from jzero.run.finished import FoundModel, find_model
from jzero.tasks.math_problems import OPEN
from jzero.types import Problem

RESAMPLES = 10_000
NUMBERS_AT_A_TIME = 1 << 20  # drawn numbers of the bootstrap
FEWEST_FLIPS = 6  # with fewer, McNemar's test never gets below p = 0.05
LONGEST_SHOWN = 200  # characters of a question or of the end of a response


@dataclass(frozen=True)
class Difference:
    """The accuracies or scores of two models on the same problems."""

    base: float
    run: float
    low: float  # of the 95 % interval of run - base
    high: float
    p_value: float | None  # of McNemar's exact test; None with several samples of a problem
    flips: int | None = None  # problems that were gained or lost; None as for p_value

    @property
    def gain(self) -> float:
        return self.run - self.base


def paired_difference(
    base: Float[np.ndarray, " problems"],
    run: Float[np.ndarray, " problems"],
    seed: int = 0,
) -> Difference:
    """Compares the shares of right samples of each problem, or their scores.

    The interval is the percentile bootstrap over problems: each of RESAMPLES resamples draws
    problems with replacement, and takes both models' results of a problem together.
    """
    assert base.shape == run.shape, f"{base.shape=} {run.shape=}"
    gains = run - base
    rng = np.random.default_rng(seed)
    # Drawing gains draws both results of a problem together. Independent resamples of the two
    # models would ignore that both find the same problems hard, and give a wider interval.
    # Some resamples at a time: all of them would take a gigabyte for 6,000 problems.
    means = []
    while len(means) < RESAMPLES:
        count = min(RESAMPLES - len(means), max(1, NUMBERS_AT_A_TIME // len(gains)))
        drawn = rng.integers(0, len(gains), (count, len(gains)))
        means.extend(gains[drawn].mean(axis=1).tolist())
    low, high = np.quantile(means, (0.025, 0.975))
    # McNemar's test counts problems that are solved or not. A share of several samples is neither.
    is_binary = bool(np.isin(np.concatenate([base, run]), (0.0, 1.0)).all())
    gained, lost = int((gains > 0).sum()), int((gains < 0).sum())
    return Difference(
        base=float(base.mean()),
        run=float(run.mean()),
        low=float(low),
        high=float(high),
        p_value=mcnemar(gained, lost) if is_binary else None,
        flips=gained + lost if is_binary else None,
    )


def mcnemar(gained: int, lost: int) -> float:
    """Returns the two-sided p-value of McNemar's exact test (McNemar 1947).

    If nothing has changed, a problem that only one model solves is equally likely to be gained or
    lost: the smaller count is binomial with probability 1/2.
    """
    number = gained + lost
    # Exact integers: the normal approximation is wrong for the few flips of a small test set.
    tail = sum(math.comb(number, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**number)


@dataclass(frozen=True)
class Command:
    """The parsed command line."""

    base: FoundModel
    run: FoundModel
    settings: config.Config  # without a model
    suites: list[str]
    out: Path
    shown: int


def parse(arguments: Sequence[str]) -> Command:
    """Parses the command line. Raises UserError, or exits, if it has a mistake."""
    parser = command_flags.compare(__doc__)
    args, config_flags = parser.parse_known_args(arguments)
    base, run = find_model(args.base), find_model(args.run)
    # The settings of RUN take precedence: its prompts are the ones it was trained with.
    trained = next((found for found in (run, base) if found.settings is not None), None)
    if trained is None or trained.settings is None:
        raise UserError(
            f"neither {args.base} nor {args.run} is the workdir of a run, which has the prompts "
            "and the grader: give one"
        )
    settings = settings_of_run(trained, trained.settings)
    # One kind of evaluation: the pairs are its problems.
    evaluation = replace(settings.eval, samples=0, greedy=True, verifiers=())
    settings = cli.parse_settings(replace(settings, eval=evaluation), config_flags)
    out = Path(args.out or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    return Command(base, run, settings, split_sources(args.suite), out, args.show)


def compare(command: Command) -> str:
    """Evaluates both models, writes compare.json in the directory of --out; returns the text."""
    settings = command.settings
    check(settings)
    problem_sets = held_out_problems(settings)
    if command.suites:
        problem_sets = load_suites(command.suites, settings)
    results = {}
    for role, found in (("base", command.base), ("run", command.run)):
        processes.print_once(f"{role}: {found.name}")
        results[role] = evaluate_model(found, problem_sets, command.out / role, settings)
        gc.collect()  # the weights of the first model, before the second is loaded
    lines = []
    report: JsonObject = {"base": command.base.name, "run": command.run.name, "sets": {}}
    for file in sorted(results["base"].keys() & results["run"].keys()):
        pairs = paired_rows(results["base"][file], results["run"][file])
        base, run = (np.array([row["accuracy"] for row in side]) for side in pairs)
        difference = paired_difference(base, run, settings.train.seed)
        # Without answers the accuracy is always 0.
        has_answers = settings.task.name != OPEN or not file.startswith(f"{HELD_OUT}-")
        report["sets"][file] = vars(difference) | {"problems": len(base), "gain": difference.gain}
        if has_answers:
            lines += describe(file, difference, len(base))
        if (scores := scores_of(*pairs)) is not None:
            difference = paired_difference(*scores, settings.train.seed)
            report["sets"][file]["score"] = vars(difference) | {"gain": difference.gain}
            lines += describe_scores(file, difference, len(base))
        if has_answers:
            lines += flips(*pairs, command.shown)
    processes.write_once(command.out / "compare.json", json.dumps(report, indent=1))
    processes.print_once(f"written to {command.out}")
    return "\n".join(lines)


def evaluate_model(
    found: FoundModel,
    problem_sets: Mapping[str, list[Problem]],
    out: Path,
    settings: config.Config,
) -> dict[str, list[JsonObject]]:
    """Returns the rows of every file of responses that an evaluation writes, by name."""
    run_on(problem_sets, out, found.with_model(settings))
    return {path.stem: read_jsonl(path) for path in sorted(out.glob("*.jsonl"))}


def paired_rows(
    base: Sequence[JsonObject],
    run: Sequence[JsonObject],
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Returns the rows of the problems that both models answered, in the same order.

    Tokenizers differ, so a prompt may be too long for one of the two.
    """
    by_id = {row["id"]: row for row in run}
    kept = [row for row in base if row["id"] in by_id]
    if not kept:
        raise UserError("the two models have answered no problem in common: their prompts differ")
    return kept, [by_id[row["id"]] for row in kept]


def describe(name: str, difference: Difference, count: int) -> list[str]:
    """Returns lines with the accuracies of a problem set, and their difference."""
    # Without standard errors: they would not be those of the paired difference.
    shares = [difference.base, difference.run]
    accuracies = [accuracy_text(share, count) for share in shares]
    if difference.flips is None or any(text.endswith("%") for text in accuracies):
        accuracies = [percent(difference.base), f"{percent(difference.run)} of {count:,}"]
    lines = [f"{name}: {' -> '.join(accuracies)} problems, {points(difference.gain)}"]
    if difference.flips is not None and difference.flips < FEWEST_FLIPS:
        flipped = f"{difference.flips} problem{'s' * (difference.flips != 1)}"
        lines.append(
            f"  no difference is shown: {flipped} gained or lost, and a test needs {FEWEST_FLIPS}"
        )
        return lines
    text = f"  95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f} points"
    if difference.p_value is not None:
        text += f", McNemar p = {difference.p_value:.3g}"
    return [*lines, text]


def scores_of(
    base: Sequence[JsonObject],
    run: Sequence[JsonObject],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the scores of both models by problem; None if they only repeat the accuracies."""
    if not all("score" in row for row in (*base, *run)):
        return None
    has_rewards = any("rewards" in sample for row in (*base, *run) for sample in row["samples"])
    if not has_rewards and all(row["score"] == row["accuracy"] for row in (*base, *run)):
        return None
    return (
        np.array([row["score"] for row in base]),
        np.array([row["score"] for row in run]),
    )


def describe_scores(name: str, difference: Difference, count: int) -> list[str]:
    """Returns lines with the mean scores of a problem set, and their difference."""
    lines = [
        f"{name}: score {difference.base:.3f} -> {difference.run:.3f} of {count:,} problems, "
        f"{difference.gain:+.3f}"
    ]
    if count >= FEWEST_FLIPS:
        lines.append(f"  95 % interval {difference.low:+.3f} to {difference.high:+.3f}")
    return lines


def flips(base: Sequence[JsonObject], run: Sequence[JsonObject], shown: int) -> list[str]:
    """Returns lines on the problems that got better and those that got worse."""
    pairs = list(zip(base, run, strict=True))
    better = [pair for pair in pairs if pair[1]["accuracy"] > pair[0]["accuracy"]]
    worse = [pair for pair in pairs if pair[1]["accuracy"] < pair[0]["accuracy"]]
    lines = []
    for title, changed in (("gained", better), ("lost", worse)):
        lines.append(f"{title}: {len(changed)}")
        for old, new in changed[:shown]:
            lines.append(f"  {old['id']}: {question_of(old)}")
            lines.append(f"    gold {shortened(str(gold_of(old)))}")
            lines.append(f"    base {ending(old)}")
            lines.append(f"    run  {ending(new)}")
        if len(changed) > shown:
            lines.append(f"  and {len(changed) - shown} more (--show)")
    return lines


def question_of(row: JsonObject) -> str:
    """Returns the question of a row of responses, on one line."""
    prompt = row["prompt"]
    return shortened(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def gold_of(row: JsonObject) -> object:
    gold = row["gold"]
    return gold.get("answer", gold) if isinstance(gold, dict) else gold


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ..."


def ending(row: JsonObject) -> str:
    """Returns the end of the first response of a row, which has the answer, on one line."""
    text = " ".join(row["samples"][0]["response"].split())
    return text if len(text) <= LONGEST_SHOWN else f"... {text[-LONGEST_SHOWN:]}"


@terminal.keep_stdout_for_answers()
def main() -> None:
    """Runs the command."""
    arguments = cli.start_jax(sys.argv[1:])
    with cli.user_errors():
        peers.check_same_start({"the command": " ".join(arguments)})
        processes.write_result_once(compare(parse(arguments)))


if __name__ == "__main__":
    terminal.run_command(main)
