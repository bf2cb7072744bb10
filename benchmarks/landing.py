"""Checks that a commit may land: a newcomer's first command, memory, kills, and older checkpoints.

    python -m benchmarks.landing [OLD] [--whole] [--only GUARD ...] [--without GUARD ...]

compares HEAD, in a fresh clone, with the merge base of HEAD and OLD, which is main by default. On
main itself OLD is the commit before: HEAD~1. Prints a line for each guard, and its figure:

    first command   The first command of README.md, in the clone and a new venv: its installation,
                    and then a training of 2 steps. With --whole the training is the command as it
                    stands, and its accuracies have to be those that README.md states.
    plan v5e-1 ...  The programs of a small run are compiled for one v5e, eight v5e and one H100.
                    Their bytes may differ by 1 % from benchmarks/plan_bytes.json
                    (`python benchmarks/plan.py --record` writes it). A program that was compiled on
                    this machine before is not compiled again.
    kill ...        Runs of HEAD are killed at a random step: synchronous, asynchronous with
                    max_staleness=1, PPO with a critic, SFT. The same command continues them. Their
                    metrics, samples and export have to be those of runs that nobody killed.
    older ...       The same four runs start with the code of OLD, and are killed at a random step.
                    A copy of each workdir is continued by HEAD, and has to end with the numbers
                    and the export of the original, which OLD continues.

If HEAD cannot continue a run of OLD, or continues it with other numbers, a commit between the two
has to give the reason in a line of its message:

    Older-runs: REASON

HEAD then has to refuse the older run with a message that names a setting, or to continue it.

The exit status is 1 unless all guards hold. --without leaves one out, for example where the
compiler of the H100 is missing. `--renamed OLD=NEW` translates a setting for OLD, as in
same_numbers.py. --seed chooses the steps at which runs are killed. The guards run two at a time.

Processor seconds, on a busy AMD EPYC: a plan takes 30 to 95 if its programs changed, the two guards
of a kind of run 50 (SFT) to 75 (synchronous), of which compilation is the largest part.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import plan
from tests.attacks import kills

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"synchronous": "synchronous", "asynchronous": "async", "PPO": "ppo", "SFT": "sft"}
REASON = "Older-runs"  # the trailer of a commit whose code cannot continue an older run
# A setting in the message of a refusal: "(optimizer.eps: 1e-8 -> 2e-8", or "optimizer.eps=1:".
NAMED_SETTING = re.compile(r"(?:\(|; |--config\.|error: )([a-z_]+(?:\.[a-z_0-9]+)+)(?:: |=)")
RUN_SECONDS = 1500.0  # for one process, also on a machine that is busy with other work
FIRST_SECONDS = 7200.0
SHORT_TRAINING = """
--config.train.steps=2 --config.warm_start.steps=20 --config.eval.problems=16 --config.eval.every=0
"""
STANDARD_ERROR = 3.7  # points, of an accuracy of README's first command


@dataclass(frozen=True)
class Result:
    """What a guard found."""

    figure: str
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class Landing:
    """What the guards are given.

    Attributes:
        old: a checkout of the commit that the landing starts from.
        new: a clone of the commit that lands.
        folder: for the runs and their compiled programs.
        reason: why an older run cannot be continued, by the messages of commits; "" if it can.
        renamed: names of settings in `old`, by their names in `new`.
        seed: chooses the moments of kills.
        is_whole: whether README's first command runs to its end.
    """

    old: Path
    new: Path
    folder: Path
    reason: str
    renamed: Mapping[str, str]
    seed: int
    is_whole: bool


# -- README's first command ------------------------------------------------------------------------


def first_command(readme: str) -> tuple[str, str, list[int]]:
    """Returns the installation and the training of README's first block, and their accuracies.

    The accuracies, in percent, are those that the paragraph after the block states: before the
    training, after the warm start, and after reinforcement learning.
    """
    block = re.search(r"```sh\n(.*) && (jzero train .*)\n```\n\n((?:.+\n)+)", readme)
    assert block, "README.md has no block with an installation && jzero train"
    installation, training, paragraph = block.groups()
    return installation, training, [int(text) for text in re.findall(r"(\d+) %", paragraph)]


def outside_of_venv(folder: Path) -> dict[str, str]:
    """Returns the environment of a newcomer: no venv, no settings of JAX, nothing in caches."""
    left_out = ("JAX_", "XLA_", "PYTHON", "VIRTUAL_ENV", "HF_")
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(left_out):
            environment[name] = value
    venv = str(Path(sys.prefix) / "bin")
    folders = [part for part in environment["PATH"].split(os.pathsep) if part != venv]
    return environment | {"PATH": os.pathsep.join(folders), "XDG_CACHE_HOME": str(folder)}


def check_first_command(landing: Landing) -> Result:
    readme = (landing.new / "README.md").read_text(encoding="utf-8")
    installation, training, accuracies = first_command(readme)
    environment = outside_of_venv(landing.folder / "cache")
    if not landing.is_whole:
        training += f" {' '.join(SHORT_TRAINING.split())}"
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles faster
    seconds = []
    output = ""
    for text in (installation, f". .venv/bin/activate && {training}"):
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=landing.new,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FIRST_SECONDS,
        )
        seconds.append(time.monotonic() - start)
        output = done.stdout + done.stderr
        if done.returncode:
            last_lines = " | ".join(output.strip().splitlines()[-3:])
            return Result("", [f"{text}: exit status {done.returncode}: {last_lines}"])
    figure = f"installed in {seconds[0]:.0f} s, trained in {seconds[1]:.0f} s"
    failures = check_output(output)
    if not list(landing.new.glob("runs/*/summary.json")):
        failures.append("runs/*/summary.json is missing")
    if landing.is_whole:
        reached = evaluated_accuracies(output)
        figure += f", accuracies {reached}, README {accuracies}"
        failures += compare_accuracies(reached, accuracies)
    return Result(figure, failures)


def check_output(output: str) -> list[str]:
    """Returns a line for everything in an output that a newcomer would stumble over."""
    failures = []
    for line in output.splitlines():
        if line.startswith("Traceback ") or re.search(r"\b[A-Z]\w*Warning\b", line):
            failures.append(f"it printed: {line}")
    return failures


def evaluated_accuracies(output: str) -> list[float]:
    """Returns the accuracies in percent that a run printed, in their order, without greedy ones."""
    accuracies = []
    for text in re.findall(r"^eval [a-z ]+: accuracy (\S+) (?=of|±)", output, re.MULTILINE):
        accuracies.append(float(text))
    return accuracies


def compare_accuracies(reached: Sequence[float], stated: Sequence[int]) -> list[str]:
    """Returns a line for every accuracy that is not the stated one, within 3 standard errors.

    They are accuracies of two runs on other processors, so that both have an error.
    """
    if len(reached) != len(stated):
        return [f"accuracies {reached} were printed, and README.md states {stated}"]
    failures = []
    for one, other in zip(reached, stated, strict=True):
        if abs(one - other) > 3 * 2**0.5 * STANDARD_ERROR:
            failures.append(f"an accuracy of {one} %, and README.md states {other} %")
    return failures


# -- Plans -----------------------------------------------------------------------------------------


def check_plan(cell: str, landing: Landing) -> Result:
    check = plan.check_cell(cell, landing.new)
    most = max((value for value in check.values.values()), default=0)
    figure = f"{len(check.values)} figures, at most {most / 2**20:,.0f} MiB" if most else ""
    return Result(figure, check.failures)


# -- Runs that are killed --------------------------------------------------------------------------


class RunFailed(Exception):
    """A run ended otherwise than it should. The text is a line for the table."""


def place_of(landing: Landing) -> kills.Place:
    """Returns where runs lie. Programs that are equal in both checkouts are compiled once."""
    return kills.Place(landing.folder, landing.folder, can_fill=False)


def finish(landing: Landing, mode: str, workdir: Path, checkout: Path) -> list[str]:
    """Runs or continues a run to its end; returns the lines that it printed.

    Raises:
        RunFailed: It ended with another status than 0.
    """
    renamed = landing.renamed if checkout == landing.old else {}
    processes = kills.start(mode, workdir, place_of(landing), checkout, renamed)
    [status] = kills.wait(processes, RUN_SECONDS)
    lines = [line for _, line in processes[0].lines]
    if status != 0:
        # The message of a mistake, or whatever was printed last.
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        raise RunFailed(f"status {status}: {' '.join(errors)}")
    return lines


def kill_at_a_step(
    landing: Landing, mode: str, workdir: Path, checkout: Path, chance: random.Random
) -> int:
    """Starts a run, and kills it at a random moment after a random step, when it has a checkpoint.

    Returns the last step that it has logged.

    Raises:
        RunFailed: It ended before.
    """
    step = chance.randint(3, kills.STEPS - 2)  # the first checkpoint is that of step 2
    renamed = landing.renamed if checkout == landing.old else {}
    processes = kills.start(mode, workdir, place_of(landing), checkout, renamed)
    deadline = time.monotonic() + RUN_SECONDS
    while not has_reached(workdir, step):
        if not processes[0].is_alive or time.monotonic() > deadline:
            kills.end(processes[0])
            words = kills.last_words(processes)
            raise RunFailed(f"it ended before step {step}: {words}")
        time.sleep(0.005)
    kills.pause(processes, chance.uniform(0.0, 0.1))
    kills.end(processes[0])
    rows = kills.read_rows(workdir / "metrics.jsonl")
    if len(rows) >= kills.STEPS:
        raise RunFailed(f"it had ended before it could be killed at step {step}")
    return len(rows)


def has_reached(workdir: Path, step: int) -> bool:
    """Returns whether a run has logged a step, and has a checkpoint of a step.

    Checkpoint 0 is written after the warm start, and holds no moments of the training.
    """
    rows = kills.read_rows(workdir / "metrics.jsonl")
    names = [path.name for path in workdir.glob("checkpoints/*")]
    return len(rows) >= step and any(name.isdigit() and name != "0" for name in names)


def resumed_step(lines: Sequence[str]) -> int:
    """Returns the step of the checkpoint that a run started from, by the lines it printed.

    Raises:
        RunFailed: It started from none.
    """
    if found := re.search(r"\bresumed \S+ at step (\d+)", " ".join(lines)):
        return int(found[1])
    raise RunFailed("it started anew instead of continuing from its checkpoint")


def check_kill(kind: str, landing: Landing) -> Result:
    mode = KINDS[kind]
    chance = random.Random(f"{landing.seed} kill {kind}")
    undisturbed, killed = (landing.folder / f"{mode}-{name}" for name in ("whole", "killed"))
    try:
        finish(landing, mode, undisturbed, landing.new)
        step = kill_at_a_step(landing, mode, killed, landing.new, chance)
        start = resumed_step(finish(landing, mode, killed, landing.new))
    except RunFailed as failure:
        return Result("", [str(failure)])
    want = kills.results(mode, undisturbed)
    difference = kills.compare(want, kills.results(mode, killed))
    figure = f"killed after step {step}, resumed from {start}, {len(want)} lines and files"
    return Result(figure, [difference] if difference else [])


def check_older(kind: str, landing: Landing) -> Result:
    mode = KINDS[kind]
    chance = random.Random(f"{landing.seed} older {kind}")
    # Both continue in the same path: it is in files of the run.
    workdir, copy = landing.folder / f"{mode}-older", landing.folder / f"{mode}-older-copy"
    try:
        step = kill_at_a_step(landing, mode, workdir, landing.old, chance)
        shutil.copytree(workdir, copy, symlinks=True)
        resumed_step(finish(landing, mode, workdir, landing.old))
    except RunFailed as failure:
        return Result("", [f"with the code of OLD: {failure}"])
    want = kills.results(mode, workdir)
    shutil.rmtree(workdir)
    copy.rename(workdir)
    figure = f"killed after step {step}"
    try:
        start = resumed_step(finish(landing, mode, workdir, landing.new))
    except RunFailed as failure:
        return judge_refusal(figure, str(failure), landing.reason)
    figure += f", resumed from {start}, {len(want)} lines and files"
    difference = kills.compare(want, kills.results(mode, workdir))
    if difference and landing.reason:
        return Result(f"{figure}; other numbers, as a commit says: {landing.reason}")
    unsaid = f"{difference}; give the reason in a commit: {REASON}: ..."
    return Result(figure, [unsaid] if difference else [])


def judge_refusal(figure: str, failure: str, reason: str) -> Result:
    """Returns the result of a run that HEAD does not continue: a refusal names a setting."""
    named = sorted(set(NAMED_SETTING.findall(failure)))
    if not failure.startswith("status 2: error: ") or not named:
        return Result(figure, [f"no refusal that names a setting: {failure}"])
    if not reason:
        return Result(figure, [f"{failure}; give the reason in a commit: {REASON}: ..."])
    return Result(f"{figure}; refused for {', '.join(named)}, as a commit says: {reason}")


# -- The command -----------------------------------------------------------------------------------


Guard = Callable[[Landing], Result]


def guards() -> dict[str, Guard]:
    """Returns all guards by their names. The longest come first, so that none is left at last."""
    found: dict[str, Guard] = {"first command": check_first_command}
    for kind in KINDS:
        found[f"kill {kind}"] = partial(check_kill, kind)
        found[f"older {kind}"] = partial(check_older, kind)
    for cell in plan.CHECKED:
        found[f"plan {cell}"] = partial(check_plan, cell)
    return found


def git(*arguments: str) -> str:
    """Returns what a command of git prints in this checkout; its message ends this command."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def old_commit(name: str) -> str:
    """Returns the commit that a landing starts from: the merge base, or the commit before HEAD."""
    base = git("merge-base", name, "HEAD")
    return base if base != git("rev-parse", "HEAD") else git("rev-parse", "HEAD~1")


def reason_between(old: str) -> str:
    """Returns the reasons that commits since `old` give for not continuing older runs."""
    key = f"--format=%(trailers:key={REASON},valueonly,separator=%x20)"
    lines = git("log", key, f"{old}..HEAD").splitlines()
    return "; ".join(line.strip() for line in lines if line.strip())


@contextlib.contextmanager
def checkouts(old: str, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yields clones of the commit `old` and of HEAD."""
    clones = folder / "old", folder / "new"
    for clone, commit in zip(clones, (old, git("rev-parse", "HEAD")), strict=True):
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=clone, check=True)
    try:
        yield clones
    finally:
        for process in kills.STARTED:
            kills.end(process)


def timed(name: str, guard: Guard, landing: Landing) -> tuple[Result, float]:
    """Returns what a guard found, and its seconds. Prints a line on stderr when it starts."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    result = guard(landing)
    return result, time.monotonic() - start


def print_line(name: str, result: Result, seconds: float) -> None:
    verdict = "fails" if result.failures else "holds"
    print(f"{name:18}{verdict:7}{seconds:>6.0f} s  {result.figure}", flush=True)
    for failure in result.failures:
        print(f"    {failure}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(guards())
    parser.add_argument("old", nargs="?", default="main", help="a commit or branch; main")
    parser.add_argument("--whole", action="store_true", help="README's first command to its end")
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--without", action="append", choices=names, default=[])
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kills")
    args = parser.parse_args()
    if changed := git("status", "--porcelain"):
        sys.exit(f"error: commit first, the guards check HEAD:\n{changed}")

    renamed = {}
    for pair in args.renamed:
        old_name, _, new_name = pair.partition("=")
        renamed[new_name] = old_name
    chosen = [name for name in args.only or names if name not in args.without]
    old = old_commit(args.old)
    print(f"{git('rev-parse', '--short', old)} -> {git('rev-parse', '--short', 'HEAD')}", end="")
    print(f", --seed {args.seed}", flush=True)
    start = time.monotonic()
    is_good = True
    with tempfile.TemporaryDirectory() as temporary, checkouts(old, Path(temporary)) as clones:
        reason = reason_between(old)
        landing = Landing(*clones, Path(temporary), reason, renamed, args.seed, args.whole)
        with ThreadPoolExecutor(max_workers=2) as executor:
            futures: dict[str, Future[tuple[Result, float]]] = {}
            for name in chosen:
                futures[name] = executor.submit(timed, name, guards()[name], landing)
            for name, future in futures.items():
                result, seconds = future.result()
                print_line(name, result, seconds)
                is_good &= not result.failures
    for name in args.without:
        print(f"{name:18}left out by --without")
    verdict = "all guards hold" if is_good else "a guard fails"
    print(f"{verdict}, {(time.monotonic() - start) / 60:.1f} minutes")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
