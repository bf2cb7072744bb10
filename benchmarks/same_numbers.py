"""Compares the numbers of tiny runs in two checkouts, and prints a table.

    python benchmarks/same_numbers.py OLD NEW [--short] [--only CASE] [--renamed OLD=NEW]
    python benchmarks/same_numbers.py --faults [NEW] [--only FAULT]

OLD and NEW are checkouts of jzero, such as a worktree of the last release and this one. Each case
(`same_numbers_cases.py`) is a run of a few steps of a recipe, in both checkouts, with the same
Python and the same packages. After a refactoring every line of `metrics.jsonl` and `samples.jsonl`,
every evaluation, every response of evaluations and every exported weight has to be equal, except
for times, rates, and the memory of the process. In addition, what a case is there for has to happen
in it: a case fails if, for example, no sequence was preempted in the case about preemption.

A case in both checkouts takes about 0.6 minutes of a processor (2026-11-29, beside much other
work): the 23 cases 14, the 7 cases of `--short` 4, and `--faults` 5. Two cases run at the same
time. The last line of the output has the minutes of the call.

A case gives its settings by the names of the new checkout. `--renamed` translates one of them for
the old checkout, for example `--renamed rollout.num_slots=rollout.slots`; the flag may be repeated.

A line of the table is a case:

    steps      lines of metrics.jsonl
    numbers    metrics that were compared, those of evaluations included
    differ     metrics with another value
    missing    metrics that only one of the checkouts has
    samples    logged and evaluated responses that were compared, and in parentheses those that
               differ
    weights    exported files of weights, and in parentheses those that differ

The exit status is 1 unless all are equal and all events happened.

`--faults` shows what the comparison sees. It copies NEW (this checkout by default), plants one of
the faults of `same_numbers_faults.py` in the copy, and compares the case that the fault names. The
exit status is 1 unless every fault is seen.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from same_numbers_cases import CASES, TINKER, Case, folder_of, read_lines
from same_numbers_faults import FAULTS, plant
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jzero.files import JsonObject

ROOT = Path(__file__).resolve().parents[1]
SCRIPTED_LOOP = Path(__file__).parent / "tinker" / "scripted_loop.py"
LIMIT_SECONDS = 900.0
POLL_SECONDS = 0.1
TIMED = ("time/", "compile/", "memory/")
TIMED_ENDS = ("tokens_per_second", "seconds")
TIMED_NAMES = ("jobs/given_again",)
# Slots wait for replies for as long as these take.
TIMED_WITH_TURNS = ("rollout/slot_utilization",)
NUM_ROWS = 24

# -- What differs ----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What differs between the files of two runs."""

    steps: int = 0
    numbers: int = 0
    differ: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    samples: int = 0
    other_samples: int = 0
    weights: int = 0
    other_weights: int = 0
    failure: str = ""

    @property
    def has_differences(self) -> bool:
        return bool(self.differ or self.missing or self.other_samples or self.other_weights)

    @property
    def is_equal(self) -> bool:
        is_empty = not self.numbers or not (self.samples or self.weights)
        return not (self.has_differences or self.failure or is_empty)

    def add_numbers(self, place: str, before: JsonObject, after: JsonObject) -> None:
        """Compares two groups of metrics."""
        has_turns = "turns/mean" in before
        for name in sorted({*before, *after}):
            if is_timed(name) or (has_turns and name in TIMED_WITH_TURNS):
                continue
            if name not in before or name not in after:
                self.missing.add(name)
                continue
            self.numbers += 1
            if before[name] != after[name]:
                self.differ.append(f"{place}, {name}: {before[name]} and {after[name]}")

    def add_samples(self, old: Path, new: Path) -> None:
        """Compares two files of JSON lines with a response or a problem in each line."""
        old_lines, new_lines = read_lines(old), read_lines(new)
        self.samples += max(len(old_lines), len(new_lines))
        self.other_samples += abs(len(old_lines) - len(new_lines))
        for before, after in zip(old_lines, new_lines, strict=False):
            # A newer checkout may describe a rollout by more keys.
            self.other_samples += any(
                key not in after or after[key] != value for key, value in before.items()
            )

    def show(self, name: str, seconds: float) -> None:
        samples = f"{self.samples} ({self.other_samples})"
        weights = f"{self.weights} ({self.other_weights})"
        lines = [
            f"{name:16}{self.steps:>6}{self.numbers:>9}{len(self.differ):>8}"
            f"{len(self.missing):>9}{samples:>12}{weights:>9}{seconds:>7.0f} s"
        ]
        if self.failure:
            lines.append(f"    {self.failure}")
        lines += [f"    {difference[:200]}" for difference in self.differ[:5]]
        if self.missing:
            lines.append(f"    only in one: {', '.join(sorted(self.missing)[:8])}")
        print("\n".join(lines), flush=True)


HEADING = (
    f"{'case':16}{'steps':>6}{'numbers':>9}{'differ':>8}{'missing':>9}{'samples':>12}{'weights':>9}"
)


def is_timed(name: str) -> bool:
    """Returns whether a metric depends on the clock, on caches or on the memory of the process."""
    return name.startswith(TIMED) or name.endswith(TIMED_ENDS) or name in TIMED_NAMES


def read_evaluations(workdir: Path) -> dict[str, JsonObject]:
    """Returns the metrics of the evaluations before and after a run, by when they were made."""
    path = workdir / "summary.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8")).get("eval_all", {})


def digests(workdir: Path) -> dict[str, str]:
    """Returns the digest of every exported file of weights, by its path."""
    paths = sorted(workdir.glob("export-*/**/*.safetensors"))
    return {
        str(path.relative_to(workdir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def files_of_samples(*workdirs: Path) -> list[str]:
    """Returns the paths of the files of responses that a run has, relative to its workdir."""
    paths = {"samples.jsonl"}
    for workdir in workdirs:
        for path in (workdir / "evaluations").rglob("*.jsonl"):
            paths.add(str(path.relative_to(workdir)))
    return sorted(paths)


def compare(old: Path, new: Path) -> Comparison:
    """Compares the metrics, the responses and the exported weights of two runs."""
    comparison = Comparison()
    old_metrics, new_metrics = (read_lines(run / "metrics.jsonl") for run in (old, new))
    if len(old_metrics) != len(new_metrics):
        comparison.failure = f"{len(old_metrics)} and {len(new_metrics)} lines of metrics.jsonl"
    comparison.steps = len(new_metrics)
    for number, (before, after) in enumerate(zip(old_metrics, new_metrics, strict=False)):
        comparison.add_numbers(f"line {number}", before, after)
    old_evaluations, new_evaluations = read_evaluations(old), read_evaluations(new)
    for when in sorted({*old_evaluations, *new_evaluations}):
        comparison.add_numbers(
            f"evaluation {when}", old_evaluations.get(when, {}), new_evaluations.get(when, {})
        )
    for path in files_of_samples(old, new):
        comparison.add_samples(old / path, new / path)
    old_weights, new_weights = digests(old), digests(new)
    names = {*old_weights, *new_weights}
    comparison.weights = len(names)
    comparison.other_weights = sum(old_weights.get(n) != new_weights.get(n) for n in names)
    return comparison


# -- One run ---------------------------------------------------------------------------------------


def flags_of(settings: str, renamed: dict[str, str]) -> list[str]:
    """Returns settings as flags, with other names where `renamed` has them.

    Words that begin with a dash are flags already.
    """
    flags = []
    for setting in settings.split():
        name, _, value = setting.partition("=")
        flag = f"--config.{renamed.get(name, name)}={value}"
        flags.append(setting if setting.startswith("-") else flag)
    return flags


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def commands(case: Case, checkout: Path, workdir: Path, flags: Sequence[str]) -> list[list[str]]:
    """Returns the commands of the processes of a run. The first one writes the workdir."""
    if case.recipe == TINKER:
        return [[sys.executable, str(SCRIPTED_LOOP), f"--workdir={workdir}", *flags]]
    config = f"--config={checkout}/configs/{case.recipe}"
    command = [sys.executable, "-m", "jzero.main", config, f"--workdir={workdir}", *flags]
    sampler = [sys.executable, "-m", "jzero.sample", f"--join={store_of(workdir)}"]
    if case.num_processes == 1:
        return [command, *[sampler] * case.num_samplers]
    hosts = [f"--coordinator=localhost:{free_port()}", f"--num_processes={case.num_processes}"]
    return [[*command, *hosts, f"--process_id={i}"] for i in range(case.num_processes)]


def store_of(workdir: Path) -> Path:
    """Returns the store of the separate sampler jobs of a run."""
    return workdir.with_name(f"{workdir.name}-store")


def environment_of(checkout: Path, programs: Path, is_optimized: bool) -> dict[str, str]:
    """Returns the environment variables of a run.

    programs: directory of compiled programs. JAX finds a program there by its content.
    """
    xla_flags = os.environ.get("XLA_FLAGS", "")
    if not is_optimized:
        xla_flags += " --xla_backend_optimization_level=0"
        # The older way of generating code compiles three times as fast (tests/conftest.py).
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            xla_flags += " --xla_cpu_use_fusion_emitters=false"
    return os.environ | {
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": xla_flags.strip(),
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HUB_OFFLINE": "1",
    }


def run(case: Case, checkout: Path, workdir: Path, flags: Sequence[str], programs: Path) -> str:
    """Runs a case; returns why it failed, or an empty string."""
    environment = environment_of(checkout, programs, case.is_optimized)
    logs: list[Path] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands(case, checkout, workdir, flags)):
            logs.append(workdir.with_name(f"{workdir.name}.{number}.log"))
            with logs[-1].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=workdir.parent,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        index = wait_for_all(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if index is None:
        return ""
    text = logs[index].read_text(encoding="utf-8")
    last = text.strip().splitlines()[-1:] or ["nothing was printed"]
    return f"{checkout.name} failed, {logs[index].name}: {last[0]}"


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all processes have ended. Returns the index of one that failed, or None.

    A process that still runs after LIMIT_SECONDS has failed.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        statuses = [process.poll() for process in processes]
        for index, status in enumerate(statuses):
            if status or (status is None and time.monotonic() > deadline):
                return index
        if None not in statuses:
            return None
        time.sleep(POLL_SECONDS)


def write_rows(path: Path, numbers: range) -> None:
    """Writes sums as problems of mathematics, in JSON lines."""
    rows = []
    for number in numbers:
        question, answer = f"What is {number} + {3 * number + 1}?", str(4 * number + 1)
        rows.append({"problem": question, "answer": answer, "level": 3})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer whose tokens are bytes, and returns its directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({token: index for index, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    directory = folder / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Runs:
    """The runs of one checkout."""

    checkout: Path
    folder: Path  # of the workdirs
    files: Path  # of the rows and the tokenizer
    renamed: dict[str, str] = field(default_factory=dict)

    def workdir(self, name: str) -> Path:
        return self.folder / folder_of(name)

    def run(self, name: str, programs: Path) -> str:
        """Runs a case. Returns why it failed or which event did not happen, or an empty string."""
        case = CASES[name]
        workdir = self.workdir(name)
        workdir.parent.mkdir(parents=True, exist_ok=True)
        for left in (workdir, store_of(workdir)):  # of an earlier call with the same --folder
            shutil.rmtree(left, ignore_errors=True)
        settings = case.settings
        for place, value in self.values(case).items():
            settings = settings.replace(f"{{{place}}}", value)
        flags = flags_of(settings, self.renamed)
        if reason := run(case, self.checkout, workdir, flags, programs):
            return reason
        for event in case.events:
            if event.measure(workdir) <= 0:
                return f"{self.checkout.name}: this did not happen: {event.name}"
        return ""

    def values(self, case: Case) -> dict[str, str]:
        """Returns the text for each place in braces of the settings of a case."""
        values = {
            "rows": str(self.files / "rows.jsonl"),
            "held_out": str(self.files / "held_out.jsonl"),
            "tokenizer": str(self.files / "tokenizer"),
        }
        for name, other in CASES.items():
            if other is case:
                values["store"] = str(store_of(self.workdir(name)))
        exports = self.workdir(case.needs).glob("export-*") if case.needs else ()
        for export in exports:
            values["export"] = str(export)
        return values


# -- All runs --------------------------------------------------------------------------------------


def with_needs(names: Sequence[str]) -> list[str]:
    """Returns cases and the cases that they need, in the order of the table."""
    needed = {*names, *(CASES[name].needs for name in names)}
    return [name for name in CASES if name in needed]


def at_once(names: Sequence[str], number: int, work: Callable[[str, int], None]) -> None:
    """Calls `work(name, thread)` for every case, in `number` threads.

    The first thread takes cases from the front and the others from the back, so that neighbors in
    the table, whose programs are alike, are compiled by the same thread. A case begins after the
    case that it needs.
    """
    waiting = deque(names)
    done = {name: threading.Event() for name in names}
    lock = threading.Lock()
    errors: list[Exception] = []

    def loop(thread: int) -> None:
        while True:
            with lock:
                if not waiting or errors:
                    return
                name = waiting.pop() if thread else waiting.popleft()
            try:
                if needed := CASES[name].needs:
                    done[needed].wait()
                work(name, thread)
            except Exception as error:  # re-raised below, in the main thread
                errors.append(error)
            finally:
                done[name].set()

    threads = [threading.Thread(target=loop, args=(thread,)) for thread in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def compare_checkouts(
    old: Runs, new: Runs, names: Sequence[str], folder: Path, number: int
) -> bool:
    """Runs cases in both checkouts and prints a line for each; returns whether all are equal."""
    print(HEADING)
    are_equal: list[bool] = []

    def work(name: str, thread: int) -> None:
        start = time.monotonic()
        # JAX does not write its files atomically, so that no two processes share a directory.
        programs = folder / f"programs-{thread}"
        failure = old.run(name, programs) or new.run(name, programs)
        comparison = compare(old.workdir(name), new.workdir(name))
        comparison.failure = failure or comparison.failure
        comparison.show(name, time.monotonic() - start)
        are_equal.append(comparison.is_equal)

    at_once(names, number, work)
    return all(are_equal)


def show_faults(clean: Runs, names: Sequence[str], folder: Path, number: int) -> bool:
    """Plants faults in copies of a checkout, and prints which of them are seen.

    Returns whether all of them are.
    """
    faults = {name: FAULTS[name] for name in names}
    cases = with_needs([fault.case for fault in faults.values()])
    are_seen: list[bool] = []
    counts = f"{'differ':>8}{'samples':>9}{'weights':>9}"
    print(f"{'fault':26}{'case':16}{'seen':5}{counts}  first difference")

    def work(name: str, thread: int) -> None:
        programs = folder / f"programs-{thread}"
        if failure := clean.run(name, programs):
            raise RuntimeError(f"case {name} without a fault: {failure}")
        for title, fault in faults.items():
            if fault.case != name:
                continue
            copy = folder / "faults" / title.replace(" ", "-")
            shutil.rmtree(copy, ignore_errors=True)
            for part in ("jzero", "configs"):
                shutil.copytree(clean.checkout / part, copy / part)
            plant(fault, copy)
            faulty = Runs(copy, folder / "faulty" / copy.name, clean.files)
            if needed := CASES[name].needs:
                # The fault is in this case only, and not in the one whose model it takes.
                faulty.folder.mkdir(parents=True, exist_ok=True)
                if not faulty.workdir(needed).exists():
                    faulty.workdir(needed).symlink_to(clean.workdir(needed))
            failure = faulty.run(name, programs)
            comparison = compare(clean.workdir(name), faulty.workdir(name))
            # A run that ends before its first step would differ in everything.
            are_seen.append(comparison.has_differences and comparison.numbers > 0)
            seen = "yes" if are_seen[-1] else "no"
            counts = f"{len(comparison.differ):>8}{comparison.other_samples:>9}"
            counts += f"{comparison.other_weights:>9}"
            first = next(iter([*comparison.differ, failure]))
            print(f"{title:26}{name:16}{seen:5}{counts}  {first[:100]}", flush=True)

    at_once(cases, number, work)
    return all(are_seen) and len(are_seen) == len(faults)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--short", action="store_true", help="the cases for every landing")
    parser.add_argument(
        "--faults", action="store_true", help="plant faults, and show which are seen"
    )
    parser.add_argument("--only", action="append", help="a case or a fault; may be repeated")
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary one")
    parser.add_argument("--at-once", type=int, default=2, help="cases at the same time (default 2)")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args(arguments)
    known = FAULTS if args.faults else CASES
    for name in args.only or ():
        if name not in known:
            parser.error(f"--only={name}: is not one of {', '.join(known)}")
    if len(args.checkouts) != 2 and not (args.faults and len(args.checkouts) < 2):
        parser.error("give two checkouts, or --faults and at most one")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    renamed = {}
    for pair in args.renamed:
        old_name, _, new_name = pair.partition("=")
        renamed[new_name] = old_name
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder / "rows.jsonl", range(NUM_ROWS))
        write_rows(folder / "held_out.jsonl", range(NUM_ROWS, 2 * NUM_ROWS))
        write_tokenizer(folder)
        if args.faults:
            checkout = args.checkouts[0] if args.checkouts else ROOT
            clean = Runs(checkout.resolve(), folder / "clean", folder)
            is_good = show_faults(clean, args.only or list(FAULTS), folder, args.at_once)
        else:
            old, new = (path.resolve() for path in args.checkouts)
            names = args.only or [n for n, c in CASES.items() if c.is_short or not args.short]
            is_good = compare_checkouts(
                Runs(old, folder / "old", folder, renamed),
                Runs(new, folder / "new", folder),
                with_needs(names),
                folder,
                args.at_once,
            )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_minutes = (used.ru_utime + used.ru_stime) / 60
    print(f"{(time.monotonic() - start) / 60:.1f} minutes, {processor_minutes:.1f} of a processor")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
