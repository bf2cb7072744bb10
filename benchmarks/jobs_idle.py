"""How long samplers of separate jobs have no work: `python benchmarks/jobs_idle.py --out DIR`.

    python benchmarks/jobs_idle.py --out runs/idle --recipe configs/sums.py:smollm2-135m \\
        --samplers 1 2 3 -- --config.model.path=DIRECTORY --config.train.steps=8

Runs a recipe with rollout.placement=jobs, once with each number of samplers, all on this machine,
and prints a row for each run. Programs compile in the first SKIPPED_STEPS steps, which no column
counts:

    step s       seconds of a step, by the clock
    update s     processor seconds of the trainer between two publications
    publish s    processor seconds of a publication: the copy to the host, the difference to the
                 version before, its compression
    MB           bytes of a difference, in the median
    decode s     processor seconds of a step's rollouts, of all samplers together
    read s       processor seconds of reading a version, of one sampler
    idle         share of the time in which a sampler has no request, by the clock
    computed     the same if every process had a machine like this core, from processor seconds:
                 1 - (read + decode / samplers) / max(update + publish, read + decode / samplers)

Processes that share cores slow each other down: then `idle` is lower than on machines of their own,
and only `computed` compares numbers of samplers. It takes for granted that requests divide evenly
among samplers, that transfers are free, and that max_staleness is at least 1.

A run that is finished is not repeated. Settings after -- go to every run.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from job_processes import run_with_samplers

from jzero.files import JsonObject, read_jsonl

SKIPPED_STEPS = 2
HEADINGS = (
    "samplers",
    "step s",
    "update s",
    "publish s",
    "MB",
    "decode s",
    "read s",
    "idle",
    "computed",
)


# -- what the processes of a run note down ---------------------------------------------------------


class Notes:
    """A file with a line for each thing that a process did."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")  # of an earlier run
        self.path = path

    @contextmanager
    def note(self, kind: str, **values: float) -> Iterator[JsonObject]:
        """Notes the start and the end of a block by the clock, and its processor seconds."""
        row: JsonObject = {"kind": kind, "start": time.time(), **values}
        processor_start = time.process_time()
        yield row
        row["end"] = time.time()
        row["processor_start"] = processor_start
        row["processor_end"] = time.process_time()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def run_trainer(notes: Notes, arguments: list[str]) -> None:
    """Trains, and notes every publication and every wait for the rollouts of a step."""
    from jzero import main
    from jzero.decoder.sequence import DecodeCounters
    from jzero.hosts import interrupt
    from jzero.jobs.snapshots import Publisher, Tensors
    from jzero.jobs.stream import JobStream
    from jzero.types import Params, Rollout

    collect, publish = JobStream.collect, Publisher.publish

    def noting_collect(
        self: JobStream,
        weights: Params,
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> tuple[list[Rollout], DecodeCounters]:
        with notes.note("collect", version=version):
            return collect(self, weights, version, check_stop)

    def noting_publish(self: Publisher, version: int, tensors: Tensors) -> str:
        with notes.note("publish", version=version) as row:
            identity = publish(self, version, tensors)
            row["bytes"] = self.bytes_written
            row["is_full"] = self.manifests[version].previous is None
        return identity

    JobStream.collect = noting_collect
    Publisher.publish = noting_publish
    main.run_arguments(arguments)


def run_sampler(notes: Notes, arguments: list[str]) -> None:
    """Samples, and notes every request and every version that it reads."""
    import jax

    from jzero import sample
    from jzero.jobs.requests import Request
    from jzero.types import Params

    work_on, load = sample.Worker.work_on, sample.Weights.load

    def noting_work(self: sample.Worker, request: Request) -> bool:
        with notes.note("request", step=request.step):
            return work_on(self, request)

    def noting_load(self: sample.Weights, version: int, identity: str) -> Params:
        # Most requests find the weights of the request before them.
        if identity == self._identity:
            return load(self, version, identity)
        with notes.note("read", version=version):
            # Otherwise a part of the work would count as decoding.
            return jax.block_until_ready(load(self, version, identity))

    sample.Worker.work_on = noting_work
    sample.Weights.load = noting_load
    sys.argv = ["jzero.sample", *arguments]
    sample.main()


# -- the figures of a run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Noted:
    """A line of the notes."""

    kind: str
    version: int  # or the step of a request
    start: float  # seconds since 1970
    end: float
    processor_start: float  # seconds of the process
    processor_end: float
    bytes: int = 0
    is_full: bool = False

    @classmethod
    def read(cls, path: Path) -> "list[Noted]":
        """Returns the lines of a file."""
        rows = []
        for row in read_jsonl(path):
            step = row.pop("step", None)
            rows.append(cls(**row if step is None else {**row, "version": step}))
        return rows

    @property
    def processor(self) -> float:
        """Processor seconds."""
        return self.processor_end - self.processor_start


@dataclass(frozen=True)
class Figures:
    """The columns of the table. Seconds are those of a step, or of a version."""

    num_samplers: int
    step: float
    update: float
    publish: float
    bytes: float
    decode: float
    read: float
    idle: float

    @property
    def computed_idle(self) -> float:
        """The idle share of a sampler if every process had a machine of its own."""
        busy = self.read + self.decode / self.num_samplers
        return 1 - busy / max(self.update + self.publish, busy)

    def row(self) -> str:
        """The row of the table."""
        cells = [str(self.num_samplers)]
        cells += [f"{value:.1f}" for value in (self.step, self.update, self.publish)]
        cells += [f"{self.bytes / 1e6:.1f}", f"{self.decode:.1f}", f"{self.read:.2f}"]
        cells += [f"{self.idle:.0%}", f"{self.computed_idle:.0%}"]
        return f"| {' | '.join(cells)} |"


def figures(trainer: list[Noted], samplers: list[list[Noted]]) -> Figures:
    """Returns the figures of a run after its first SKIPPED_STEPS steps."""
    collected = [noted for noted in trainer if noted.kind == "collect"]
    published = {noted.version: noted for noted in trainer if noted.kind == "publish"}
    # A step trains between two collections.
    collected = collected[SKIPPED_STEPS:]
    assert len(collected) > 1, f"train for more than {SKIPPED_STEPS + 1} steps"
    window = Window(collected[0].end, collected[-1].end)
    updates = [
        after.processor_start - before.processor_end
        for before, after in itertools.pairwise(collected)
    ]
    # A collection copies the weights to the host, publishes them, and waits for rollouts.
    publications = [
        published[noted.version].processor_end - noted.processor_start for noted in collected
    ]
    differences = [
        published[noted.version].bytes
        for noted in collected
        if not published[noted.version].is_full
    ]

    requests = [row for notes in samplers for row in notes if row.kind == "request"]
    reads = [row for notes in samplers for row in notes if row.kind == "read"]
    read_seconds = [row.processor for row in reads if window.has_end_of(row)]
    request_seconds = [row.processor for row in requests if window.has_end_of(row)]
    busy = sum(window.overlap(row) for row in requests)
    return Figures(
        num_samplers=len(samplers),
        step=window.seconds / len(updates),
        update=statistics.mean(updates),
        publish=statistics.mean(publications),
        bytes=statistics.median(differences),
        # A request includes the reading of the weights that it names.
        decode=(sum(request_seconds) - sum(read_seconds)) / len(updates),
        read=statistics.mean(read_seconds),
        idle=1 - busy / (window.seconds * len(samplers)),
    )


@dataclass(frozen=True)
class Window:
    """The time that the figures are of, in seconds since 1970."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.end - self.start

    def has_end_of(self, noted: Noted) -> bool:
        """Whether something ended in the window."""
        return self.start <= noted.end < self.end

    def overlap(self, noted: Noted) -> float:
        """Returns the seconds in the window that something took."""
        return max(0.0, min(noted.end, self.end) - max(noted.start, self.start))


# -- the command -----------------------------------------------------------------------------------


def run(recipe: str, folder: Path, num_samplers: int, flags: list[str]) -> Figures:
    """Runs a recipe with samplers, unless it has been run, and returns its figures."""
    store, workdir, programs = folder / "store", folder / "run", folder.parent / "programs"
    settings = [
        "--config.rollout.placement=jobs",
        f"--config.rollout.placement.store={store}",
        "--config.rollout.placement.keep_snapshots=0",
        *flags,
    ]
    trainer = [f"--config={recipe}", f"--workdir={workdir}", *settings]
    sampler = [f"--join={store}", f"--programs={programs}"]
    if not (workdir / "summary.json").exists():
        run_with_samplers(
            process("trainer", folder / "trainer.jsonl", trainer),
            [
                process("sampler", folder / f"sampler-{number}.jsonl", sampler)
                for number in range(num_samplers)
            ],
            folder,
        )
    trainer_notes = Noted.read(folder / "trainer.jsonl")
    return figures(
        trainer_notes,
        [Noted.read(folder / f"sampler-{number}.jsonl") for number in range(num_samplers)],
    )


def process(kind: str, notes: Path, arguments: list[str]) -> list[str]:
    """Returns the command of a process that takes notes."""
    return [sys.executable, __file__, "--process", kind, str(notes), *arguments]


def run_process(kind: str, notes: Path, arguments: list[str]) -> None:
    """Runs a process of `process`."""
    functions = {"trainer": run_trainer, "sampler": run_sampler}
    functions[kind](Notes(notes), arguments)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the directory of all runs")
    parser.add_argument("--recipe", required=True, help="FILE.py:PRESET of all runs")
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("settings", nargs="*", help="settings of all runs, after --")
    options = parser.parse_args()
    out = options.out.absolute()
    rows = []
    for num_samplers in options.samplers:
        folder = out / f"samplers-{num_samplers}"
        rows.append(run(options.recipe, folder, num_samplers, options.settings).row())
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *rows, sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
