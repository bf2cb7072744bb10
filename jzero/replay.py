"""Samples logged rollouts again, and compares tokens, log-probs, texts and grades.

    python -m jzero.replay RUN [--step N] [--requests K] [--config.model.path=DIR ...]

RUN is the workdir of a run with rollout.placement=jobs. Every request of its log names the weights,
the prompts and the seed, so its rollouts can be made again from the snapshots in the store, as long
as rollout.placement.keep_snapshots keeps them. A difference means that the rollouts were not
sampled as the log says: by other weights, by other hardware, or by a sampler with a fault. Grades
are compared if they are functions of the responses: those of a model or of an environment are not,
and the command names the reason. The exit status is 1 if there is a difference.

With rollout.placement.schedule=arrival, some requests cannot be sampled again: those with several
versions of the weights, and those that a second sampler has continued. The command names them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jzero import cli, command_flags, terminal
from jzero.config import Config, Jobs
from jzero.errors import UserError, shown
from jzero.files import JsonObject, read_bytes, read_text
from jzero.jobs.regrading import grade_difference, is_failure, obstacle_of
from jzero.jobs.requests import Request, Result, check_types
from jzero.jobs.sealed import BadResultError
from jzero.jobs.snapshots import SnapshotError
from jzero.jobs.store import open_store
from jzero.jobs.stream import RUN, read_log, read_run, request_file, result_file
from jzero.jobs.weights import Weights
from jzero.rollout.sampler import Sampler
from jzero.sample import answer, build, local_settings
from jzero.tokens import Tokens
from jzero.types import Grade, Rollout, Turn, grade_of
from jzero.workers.pool import Pool

NAME = "replay"  # as the sampler of a result
MAX_RESULT_BYTES = 1 << 30


@dataclass(frozen=True)
class Logged:
    """A line of the log with its request and its result."""

    row: JsonObject
    request: Request
    result: Result


def read_requests(run: Path, step: int | None, most: int) -> list[Logged]:
    """Returns the newest logged requests whose rollouts the run has kept.

    step: only of this step.
    most: at most this many; 0: all.

    Raises UserError if there are none, or a file is damaged.
    """
    rows = [row for row in read_log(run) if step is None or row["step"] == step]
    logged = []
    # From the newest, whose snapshots are most likely to exist still.
    for row in reversed(rows):
        result, request = result_file(run, row["request"]), request_file(run, row["request"])
        if not (result.exists() and request.exists()) or (most and len(logged) == most):
            continue
        try:
            asked = Request.parse(read_bytes(request))
            answered = Result.parse(read_bytes(result, MAX_RESULT_BYTES))
            check_answers(asked, answered, row)
        except (BadResultError, ValueError) as error:
            raise UserError(f"{result} is damaged ({error}): choose another --step") from None
        logged.append(Logged(row, asked, answered))
    if not logged:
        where = "" if step is None else f" of step {step}"
        raise UserError(
            f"{run} has kept no rollouts{where}: give the workdir of a run with "
            "rollout.placement=jobs, and a step that rollout.placement.keep_snapshots covers"
        )
    return logged[::-1]


def check_answers(request: Request, result: Result, row: JsonObject) -> None:
    """Raises BadResultError unless the files of a line of the log are those of its request."""
    if request.id != row["request"] or result.request != row["request"]:
        raise BadResultError("it belongs to another request")
    check_types(result)
    if len(result.rollouts) != len(request.problems) * request.group_size:
        raise BadResultError(f"it has {len(result.rollouts)} rollouts")
    for rollout in result.rollouts:
        if not isinstance(rollout.tokens, Tokens) or not all(
            isinstance(turn, Turn) and isinstance(turn.grade, Grade) for turn in rollout.turns
        ):
            raise BadResultError("a rollout has no tokens or no grade")


def difference(logged: Rollout, again: Rollout, obstacle: str = "") -> str:
    """Returns where two rollouts differ.

    Returns "" if all bytes of their tracks, their turns and their grades are equal.

    obstacle: why grades are not compared; "" if they are.
    """
    return difference_of_tokens(logged, again) or difference_of_turns(logged, again, obstacle)


def difference_of_turns(logged: Rollout, again: Rollout, obstacle: str) -> str:
    """Returns how the turns of two rollouts with the same tokens differ, "" if they do not."""
    if len(logged.turns) != len(again.turns):
        return f"{len(logged.turns)} turns were logged, and {len(again.turns)} are sampled now"
    for number, (old, new) in enumerate(zip(logged.turns, again.turns, strict=True)):
        for name in ("start", "end", "text", "finish_reason"):
            theirs, ours = getattr(old, name), getattr(new, name)
            if theirs != ours:
                return f"{name} of turn {number} was {shown(theirs)}, and is {shown(ours)} now"
        grades = grade_of(old), grade_of(new)
        # A machine may have been too busy for the limits of a grader.
        if obstacle or any(map(is_failure, grades)):
            continue
        if found := grade_difference(*grades):
            return f"turn {number}: {found}"
    return ""


def difference_of_tokens(logged: Rollout, again: Rollout) -> str:
    """Returns where the tracks of two rollouts differ, "" if all of their bytes are equal."""
    ours, theirs = again.tokens.to_dict(), logged.tokens.to_dict()
    if set(ours) != set(theirs):
        return "other tracks"
    for name, values in theirs.items():
        if len(values) != len(ours[name]):
            return f"{len(values)} tokens were logged, and {len(ours[name])} are sampled now"
        # The bytes, because a difference in the last bit counts.
        same = np.array(
            [a.tobytes() == b.tobytes() for a, b in zip(values, ours[name], strict=True)]
        )
        if not same.all():
            place = int(np.argmin(same))
            return f"{name}[{place}] was {values[place]}, and is {ours[name][place]} now"
    return ""


def replay(
    item: Logged, sampler: Sampler, weights: Weights, reported: set[str] | None = None
) -> list[str]:
    """Samples a request again, and returns the differences of its rollouts.

    reported: why grades are not compared, as far as a line has been printed.

    Raises SnapshotError if its weights are gone.
    """
    row, request = item.row, item.request
    reported = set() if reported is None else reported
    # The log has the digest of what was trained on; the file may have changed since.
    if item.result.digest != row["digest"]:
        return ["its file does not hold the logged rollouts"]
    identity = row["version"], row["snapshot"]
    again = answer(sampler, weights.load(*identity), request, identity, NAME)
    differences = []
    for number, (old, new) in enumerate(zip(item.result.rollouts, again.rollouts, strict=True)):
        obstacle = obstacle_of(new.problem, sampler)
        if obstacle and obstacle not in reported:
            reported.add(obstacle)
            terminal.say(f"grades are not compared, because {obstacle}")
        if found := difference(old, new, obstacle):
            differences.append(f"rollout {number}: {found}")
    return differences


def obstacle_to_sampling(result: Result) -> str:
    """Returns why the rollouts of a result cannot be sampled again, "" if they can."""
    if result.later_weights:
        versions = ", ".join(str(version) for version, _ in result.weights)
        return f"several versions sampled it ({versions}), switched at a time that is not logged"
    if result.continued_tokens:
        return "a second sampler continued it, with a prefill that rounds differently"
    return ""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of the command, and the flags of settings."""
    parser = command_flags.replay(__doc__)
    return parser.parse_known_args(arguments)


def read_settings(run: Path, flags: list[str]) -> tuple[Config, Jobs]:
    """Returns the settings of a run, with the changes of this machine."""
    path = run / "config.json"
    if not path.exists():
        raise UserError(f"{run} is not the workdir of a run: it has no config.json")
    settings = local_settings(read_text(path), flags, str(path))
    if not isinstance(settings.rollout.placement, Jobs):
        raise UserError(f"{run}: only rollouts of rollout.placement=jobs are logged with seeds")
    return settings, settings.rollout.placement


def main() -> None:
    """Runs the command."""
    options, flags = parse(cli.start_jax(sys.argv[1:]))
    with cli.user_errors():
        settings, placement = read_settings(options.run, flags)
        log = read_requests(options.run, options.step, options.requests)
        store = open_store(placement.store)
        run, _ = read_run(store.read(RUN), store.address)
        num_tokens, num_different, num_gone, num_mixed = 0, 0, 0, 0
        reported: set[str] = set()
        with Pool(settings.task.grade_workers) as pool:
            sampler, weights = build(settings, run, store, pool)
            # By version, so that every snapshot is read once.
            for item in sorted(log, key=lambda logged: logged.row["version"]):
                name = f"step {item.row['step']}, request {item.request.number}"
                if reason := obstacle_to_sampling(item.result):
                    terminal.say(f"{name}: {reason}")
                    num_mixed += 1
                    continue
                try:
                    differences = replay(item, sampler, weights, reported)
                except SnapshotError as error:
                    terminal.say(f"{name}: {error}")
                    num_gone += 1
                    continue
                num_tokens += sum(rollout.response_length for rollout in item.result.rollouts)
                num_different += bool(differences)
                for found in differences:
                    terminal.say(f"{name}, of {item.row['sampler']}: {found}")
    terminal.say(
        f"{len(log) - num_gone - num_mixed} requests sampled again, {num_tokens} tokens: "
        f"{num_different} requests differ; {num_gone} have no snapshot any more, and {num_mixed} "
        "cannot be sampled again"
    )
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    terminal.run_command(main)
