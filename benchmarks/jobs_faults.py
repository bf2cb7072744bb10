"""Separate jobs under faults: a run that is disturbed all the time equals one that is not.

    python benchmarks/jobs_faults.py [--faults 200] [--seconds 420] [--samplers 2] [--steps 20]

Trains a tiny recipe with rollout.placement=jobs, once undisturbed, then again and again with random
faults until there were as many as --faults, or the time is over. Half of the runs use a directory
as their store, the others a bucket whose connection can be cut. Each run has to end by itself with
the metrics, the weights and the log of the undisturbed one, bit for bit, and no step may wait for
longer than one lease and the start of a sampler. Prints the faults of each kind, and fails at the
first difference.

Faults: kill -9, SIGSTOP and SIGTERM of samplers; kill -9 of the trainer; samplers whose clock is
wrong, and samplers that return garbage; truncated snapshots and manifests, and older ones in their
place; torn and foreign results; leases that vanish, so that two samplers answer one request; a full
disk, and a cut connection.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from soak_hosts import SETTINGS

from jzero.files import read_jsonl

if TYPE_CHECKING:
    from jzero.jobs.requests import Result

ROOT = Path(__file__).resolve().parents[1]
LEASE_SECONDS = 8.0
START_SECONDS = 60.0  # for a sampler to start on a busy machine
RUN_SECONDS = 400.0  # for a disturbed run
MARKS = "JZERO_FAULTS"  # environment variable: the folder with the marks of faults
FULL, CUT = "full", "cut"  # marks
SKEW_SECONDS = 7200.0


# -- what the processes of a run do otherwise ------------------------------------------------------


def raise_at_mark() -> None:
    """Raises the error of a full disk or of a cut connection while there is a mark."""
    marks = Path(os.environ[MARKS])
    if (marks / FULL).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if (marks / CUT).exists():
        raise ConnectionError("the connection was cut")


class CutFileSystem(LocalFileSystem):
    """A bucket on the local disk: objects are written at once, and the connection can be cut."""

    protocol = "cut"
    local_file = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("cut://").strip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        raise_at_mark()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent.parent, delete=False) as file:
            file.write(value)
        try:
            if mode == "create":
                os.link(file.name, target)
                return
            Path(file.name).replace(target)
        finally:
            Path(file.name).unlink(missing_ok=True)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        raise_at_mark()
        return Path(path).read_bytes()[start:end]


def disturb_stores() -> None:
    """Makes the stores of this process fail while there is a mark."""
    from jzero.jobs.store import FolderStore

    fsspec.register_implementation("cut", CutFileSystem)
    temporary = FolderStore.temporary

    @contextmanager
    def failing_temporary(self: FolderStore, name: str) -> Iterator[Path]:
        raise_at_mark()
        with temporary(self, name) as path:
            yield path

    FolderStore.temporary = failing_temporary


def return_garbage() -> None:
    """Makes this sampler spoil its results: each time in another way."""
    from jzero.jobs.progress import Progress

    honest = Progress.result

    def spoil(self: Progress, sampler: str, seconds: float = 0.0) -> Result:
        result = honest(self, sampler, seconds)
        first = result.rollouts[0]
        match random.randrange(4):
            case 0:
                tokens = first.tokens.replaced(logps=first.tokens.logps * np.nan)
            case 1:
                tokens = first.tokens.replaced(ids=first.tokens.ids + 10**6)
            case 2:
                tokens = first.tokens.first(3)
            case _:
                tokens = first.tokens.replaced(versions=first.tokens.versions + 1)
        return replace(result, rollouts=[replace(first, tokens=tokens), *result.rollouts[1:]])

    Progress.result = spoil


def skew_clock() -> None:
    """Moves the clock of this process by hours."""
    clock, monotonic_start = time.time, time.monotonic()
    seconds = random.choice([-SKEW_SECONDS, SKEW_SECONDS])
    # It also runs at another speed.
    time.time = lambda: clock() + seconds + 0.5 * (time.monotonic() - monotonic_start)


DISTURBANCES: dict[str, Callable[[], None]] = {
    "honest": lambda: None,
    "garbage": return_garbage,
    "skewed": skew_clock,
}


def run_process(kind: str, arguments: list[str]) -> None:
    """Runs the trainer or a sampler in this process."""
    disturb_stores()
    if kind == "trainer":
        from jzero import main

        main.run_arguments(arguments)
        return
    DISTURBANCES[kind]()
    from jzero import sample

    sys.argv = ["jzero.sample", *arguments]
    sample.main()


# -- one run ---------------------------------------------------------------------------------------


@dataclass
class DisturbedRun:
    """A trainer and its samplers."""

    folder: Path
    is_bucket: bool
    steps: int
    num_samplers: int
    faults: Counter[str] = field(default_factory=Counter)
    samplers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    trainer: subprocess.Popen[bytes] | None = None
    num_started: int = 0

    @property
    def store(self) -> Path:
        """The directory of the store."""
        return self.folder / "store"

    @property
    def workdir(self) -> Path:
        """The workdir of the trainer."""
        return self.folder / "run"

    @property
    def address(self) -> str:
        """The store as the processes open it."""
        return f"cut:/{self.store}" if self.is_bucket else str(self.store)

    def start(self, kind: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Starts a process of the run."""
        self.num_started += 1
        (self.folder / "marks").mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            MARKS: str(self.folder / "marks"),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "programs"),
        }
        log = self.folder / f"{self.num_started:03d}-{kind}.log"
        with log.open("wb") as file:
            command = [sys.executable, __file__, "--process", kind, *arguments]
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    def start_trainer(self) -> None:
        """Starts the trainer, or starts it again."""
        jobs = f"jobs(store='{self.address}',lease_seconds={LEASE_SECONDS},snapshot_every=4"
        changes = SETTINGS | {
            "train.steps": self.steps,
            "train.checkpoint_every": 3,
            "eval.problems": 0,
            "eval.every": 0,
            "rollout.placement": f"{jobs},groups_per_request=1,keep_snapshots=0)",
            "task.grade_workers": 1,
        }
        flags = [f"--config.{name}={value}" for name, value in changes.items()]
        recipe = f"--config={ROOT}/configs/countdown.py:tiny"
        self.trainer = self.start("trainer", [recipe, f"--workdir={self.workdir}", *flags])

    def start_sampler(self, kind: str = "honest") -> None:
        """Starts a sampler."""
        self.samplers.append(self.start(kind, ["--join", self.address, "--name", kind]))

    def keep_going(self) -> None:
        """Starts processes in place of those that a fault has ended."""
        assert self.trainer is not None
        # 2 is the status of an error that the user has to repair.
        assert self.trainer.poll() != 2, f"{self.folder}: see the log of the last trainer"
        if self.trainer.poll() not in (None, 0):
            self.start_trainer()
        self.samplers = [sampler for sampler in self.samplers if sampler.poll() is None]
        while len(self.samplers) < self.num_samplers:
            self.start_sampler()

    def is_finished(self) -> bool:
        """Whether the trainer has ended with all of its steps."""
        assert self.trainer is not None
        return self.trainer.poll() == 0

    def end(self) -> None:
        """Ends all processes."""
        for process in [*self.samplers, self.trainer]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def files(self, folder: str) -> list[Path]:
        """Returns the files in a folder of the store."""
        return sorted((self.store / folder).glob("[!.]*"))

    # -- results -----------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, object]]:
        """Returns the metrics without those of clocks and of faults."""
        rows = read_jsonl(self.workdir / "metrics.jsonl")
        return [{name: row[name] for name in row if not is_timed(name)} for row in rows]

    def weights(self) -> bytes:
        """Returns the bytes of the export."""
        return max(self.workdir.glob("export-*/model.safetensors")).read_bytes()

    def longest_wait(self) -> float:
        """Returns the most seconds that a step waited for its rollouts."""
        rows = read_jsonl(self.workdir / "metrics.jsonl")
        return max(row["jobs/wait_seconds"] for row in rows)


def is_timed(name: str) -> bool:
    """Returns whether a metric depends on clocks or on faults."""
    groups = ("time/", "compile/", "memory/", "jobs/")
    return name.startswith(groups) or name.endswith(("tokens_per_second", "/seconds"))


# -- faults ----------------------------------------------------------------------------------------


def kill_sampler(run: DisturbedRun) -> bool:
    random.choice(run.samplers).kill()
    return True


def stop_sampler(run: DisturbedRun) -> bool:
    """A sampler that stands still for longer than its lease, and then answers."""
    sampler = random.choice(run.samplers)
    sampler.send_signal(signal.SIGSTOP)
    # Another process would block here: this one continues it.
    script = "import os, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), 18)"
    subprocess.Popen(
        [sys.executable, "-c", script, str(sampler.pid), str(1.2 * LEASE_SECONDS)],
        stderr=subprocess.DEVNULL,
    )
    return True


def terminate_sampler(run: DisturbedRun) -> bool:
    random.choice(run.samplers).terminate()
    return True


def kill_trainer(run: DisturbedRun) -> bool:
    assert run.trainer is not None
    if not (run.workdir / "checkpoints").is_dir():
        return False
    run.trainer.kill()
    run.trainer.wait()
    return True


def send_garbage(run: DisturbedRun) -> bool:
    if len(run.samplers) > run.num_samplers:
        return False
    run.start_sampler("garbage")
    return True


def skew_sampler(run: DisturbedRun) -> bool:
    if len(run.samplers) > run.num_samplers:
        return False
    run.start_sampler("skewed")
    return True


def truncate_snapshot(run: DisturbedRun) -> bool:
    """Cuts a file of the newest two versions: a manifest or a tensor."""
    files = [path for path in run.files("snapshots") if path.name != "newest"][-30:]
    if not files:
        return False
    path = random.choice(files)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, random.randrange(path.stat().st_size + 1))
    return True


def bring_older_snapshot(run: DisturbedRun) -> bool:
    manifests = [path for path in run.files("snapshots") if path.suffix == ".json"]
    if len(manifests) < 2:
        return False
    shutil.copy(manifests[-2], manifests[-1])
    return True


def write_torn_result(run: DisturbedRun) -> bool:
    requests = run.files("requests")
    if not requests:
        return False
    (run.store / "results").mkdir(exist_ok=True)
    name = f"{random.choice(requests).name}-{random.randrange(16**16):016x}"
    (run.store / "results" / name).write_bytes(random.randbytes(random.randrange(3000)))
    return True


def lose_lease(run: DisturbedRun) -> bool:
    """Two samplers work on the same request."""
    leases = run.files("leases")
    if not leases:
        return False
    random.choice(leases).unlink(missing_ok=True)
    return True


def mark(run: DisturbedRun, name: str, seconds: float) -> bool:
    path = run.folder / "marks" / name
    path.touch()
    time.sleep(seconds)
    path.unlink()
    return True


def fill_disk(run: DisturbedRun) -> bool:
    return mark(run, FULL, random.uniform(0.2, 2))


def cut_connection(run: DisturbedRun) -> bool:
    return run.is_bucket and mark(run, CUT, random.uniform(0.2, 2))


# Each fault with its weight: those that start a process take seconds of the processor.
FAULTS: dict[Callable[[DisturbedRun], bool], float] = {
    kill_sampler: 1,
    stop_sampler: 1,
    terminate_sampler: 1,
    kill_trainer: 0.5,
    send_garbage: 0.7,
    skew_sampler: 0.7,
    truncate_snapshot: 3,
    bring_older_snapshot: 2,
    write_torn_result: 3,
    lose_lease: 3,
    fill_disk: 2,
    cut_connection: 3,
}


def run_undisturbed(folder: Path, steps: int, num_samplers: int) -> DisturbedRun:
    """Returns a finished run without faults."""
    run = DisturbedRun(folder, False, steps, num_samplers)
    run.start_trainer()
    deadline = time.monotonic() + RUN_SECONDS
    try:
        while not run.is_finished():
            assert time.monotonic() < deadline, f"{folder}: no end"
            run.keep_going()
            time.sleep(0.2)
    finally:
        run.end()
    return run


def run_disturbed(run: DisturbedRun, pause: float, most: int) -> None:
    """Runs to the end, with a fault after every pause. Raises AssertionError without an end."""
    run.start_trainer()
    deadline = time.monotonic() + RUN_SECONDS
    try:
        next_fault = time.monotonic()
        while not run.is_finished():
            assert time.monotonic() < deadline, f"{run.folder}: no end after {dict(run.faults)}"
            run.keep_going()
            time.sleep(0.05)
            # Faults begin once the store is in use.
            if time.monotonic() < next_fault or not run.files("snapshots"):
                continue
            if run.faults.total() < most:
                fault = random.choices(list(FAULTS), list(FAULTS.values()))[0]
                if fault(run):
                    run.faults[fault.__name__] += 1
                    next_fault = time.monotonic() + random.uniform(0, 2 * pause)
    finally:
        run.end()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keeps all files there")
    options = parser.parse_args()
    random.seed(options.seed)
    folder = options.keep or Path(tempfile.mkdtemp())
    started = time.monotonic()

    expected = run_undisturbed(folder / "undisturbed", options.steps, options.samplers)
    print(f"undisturbed: {options.steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    total: Counter[str] = Counter()
    number, longest = 0, 0.0
    while total.total() < options.faults and time.monotonic() - started < options.seconds:
        number += 1
        run_started = time.monotonic()
        run = DisturbedRun(
            folder / f"run-{number}", number % 2 == 0, options.steps, options.samplers
        )
        run_disturbed(run, options.pause, options.faults - total.total())
        assert run.metrics() == expected.metrics(), f"{run.folder}: other metrics"
        assert run.weights() == expected.weights(), f"{run.folder}: other weights"
        total += run.faults
        longest = max(longest, run.longest_wait())
        seconds = time.monotonic() - run_started
        print(
            f"run {number} ({'bucket' if run.is_bucket else 'folder'}): equal after "
            f"{run.faults.total()} faults in {seconds:.0f} s, at most {run.longest_wait():.1f} s "
            "of waiting in a step",
            flush=True,
        )
        assert run.longest_wait() < LEASE_SECONDS + START_SECONDS, f"{run.folder}: a stall"
    print(json.dumps(dict(total), indent=1))
    print(f"{total.total()} faults in {number} runs, all equal; longest wait {longest:.1f} s")
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2], sys.argv[3:])
    else:
        main()
