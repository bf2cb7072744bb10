"""Samples logged rollouts again, and compares the bytes of tokens and log-probs.

    python -m jzero.replay RUN [--step N] [--requests K] [--config.model.path=DIR ...]

RUN is the workdir of a run with rollout.placement=jobs. Every request of its log names the weights,
the prompts and the seed, so its rollouts can be made again from the snapshots in the store, as long
as rollout.placement.keep_snapshots keeps them. A difference means that the rollouts were not
sampled as the log says: by other weights, by other hardware, or by a sampler with a fault. The exit
status is 1 if there is one.

With rollout.placement.schedule=arrival, some requests cannot be sampled again: those with several
versions of the weights, and those that a second sampler has continued. The command names them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jzero import cli, terminal
from jzero.config import Config, Jobs
from jzero.errors import UserError
from jzero.files import JsonObject, read_jsonl, read_text
from jzero.jobs.requests import BadResultError, Request, Result
from jzero.jobs.snapshots import SnapshotError
from jzero.jobs.store import open_store
from jzero.jobs.stream import LOG, RUN, read_run, request_file, result_file
from jzero.jobs.weights import Weights
from jzero.rollout.sampler import Sampler
from jzero.sample import answer, build, local_settings
from jzero.types import Rollout
from jzero.workers.pool import Pool

NAME = "replay"  # as the sampler of a result


@dataclass(frozen=True)
class Logged:
    """A line of the log with its request and its result."""

    row: JsonObject
    request: Request
    result: Result


def read_log(run: Path, step: int | None, most: int) -> list[Logged]:
    """Returns the newest logged requests whose rollouts the run has kept.

    step: only of this step.
    most: at most this many; 0: all.

    Raises UserError if there are none, or a file is damaged.
    """
    rows = [row for row in read_jsonl(run / LOG) if step is None or row["step"] == step]
    logged = []
    # From the newest, whose snapshots are most likely to exist still.
    for row in reversed(rows):
        result, request = result_file(run, row["request"]), request_file(run, row["request"])
        if not (result.exists() and request.exists()) or (most and len(logged) == most):
            continue
        try:
            parsed = Request.parse(request.read_bytes()), Result.parse(result.read_bytes())
        except (BadResultError, ValueError) as error:
            raise UserError(f"{result} is damaged ({error}): leave its step out") from None
        logged.append(Logged(row, *parsed))
    if not logged:
        where = "" if step is None else f" of step {step}"
        raise UserError(
            f"{run} has kept no rollouts{where}: give the workdir of a run with "
            "rollout.placement=jobs, and a step that rollout.placement.keep_snapshots covers"
        )
    return logged[::-1]


def difference(logged: Rollout, again: Rollout) -> str:
    """Returns where two rollouts differ, "" if all bytes of their tracks are equal."""
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


def replay(item: Logged, sampler: Sampler, weights: Weights) -> list[str]:
    """Samples a request again, and returns the differences of its rollouts.

    Raises SnapshotError if its weights are gone.
    """
    row, request = item.row, item.request
    # The log has the digest of what was trained on; the file may have changed since.
    if item.result.digest != row["digest"]:
        return ["its file holds other rollouts than the log says"]
    identity = row["version"], row["snapshot"]
    again = answer(sampler, weights.load(*identity), request, identity, NAME)
    differences = []
    for number, (old, new) in enumerate(zip(item.result.rollouts, again.rollouts, strict=True)):
        if found := difference(old, new):
            differences.append(f"rollout {number}: {found}")
    return differences


def obstacle(result: Result) -> str:
    """Returns why the rollouts of a result cannot be sampled again, "" if they can."""
    if result.later_weights:
        versions = ", ".join(str(version) for version, _ in result.weights)
        return f"several versions sampled it ({versions}), switched at a time that is not logged"
    if result.continued_tokens:
        return "a second sampler continued it, with a prefill that rounds otherwise"
    return ""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of the command, and the flags of settings."""
    parser = cli.make_parser("jzero.replay", __doc__)
    parser.add_argument("run", metavar="RUN", help="workdir of a run", type=Path)
    parser.add_argument("--step", type=int, help="only the rollouts of this step")
    parser.add_argument(
        "--requests", type=int, default=0, help="only this many of the newest requests (0: all)"
    )
    return parser.parse_known_args(arguments)


def read_settings(run: Path, flags: list[str]) -> tuple[Config, Jobs]:
    """Returns the settings of a run, with the changes of this machine."""
    path = run / "config.json"
    if not path.exists():
        raise UserError(f"{run} is not the workdir of a run: give one")
    settings = local_settings(read_text(path), flags, str(path))
    if not isinstance(settings.rollout.placement, Jobs):
        raise UserError(f"{run}: only rollouts of rollout.placement=jobs are logged with seeds")
    return settings, settings.rollout.placement


def main() -> None:
    """Runs the command."""
    options, flags = parse(cli.start_jax(sys.argv[1:]))
    with cli.user_errors():
        settings, placement = read_settings(options.run, flags)
        log = read_log(options.run, options.step, options.requests)
        store = open_store(placement.store)
        run, _ = read_run(store.read(RUN), store.address)
        num_tokens, num_different, num_gone, num_mixed = 0, 0, 0, 0
        with Pool(settings.task.grade_workers) as pool:
            sampler, weights = build(settings, run, store, pool)
            # By version, so that every snapshot is read once.
            for item in sorted(log, key=lambda logged: logged.row["version"]):
                name = f"step {item.row['step']}, request {item.request.number}"
                if reason := obstacle(item.result):
                    terminal.say(f"{name}: {reason}")
                    num_mixed += 1
                    continue
                try:
                    differences = replay(item, sampler, weights)
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
    main()
