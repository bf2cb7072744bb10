"""Interrupts runs at random moments, resumes them, and compares them with runs left in peace.

    python tests/attacks/kills.py --count 50 --seed 1

Each mode of training (`MODES`) makes one run that nothing interrupts. Then runs with the same
settings are interrupted in all ways (`KINDS`) at moments of chance: while they start, compile, warm
start, sample, update, evaluate and save. After each interruption the same command resumes. At its
end every run has to have the metrics (all but times), samples and export of the undisturbed one, to
the bit. What a run of the mode split samples depends on the clock, with and without interruptions:
it has to have the same steps, each once, with the same names of metrics, as many samples, tokens
that are no older than allowed, and the same files of its export.

The table has a row for each mode and kind:

    interrupted  interruptions that met a living process
    resumed      of these, after which the same command started the run again, or it continued
    equal        of these, in runs that ended equal to the undisturbed one
    lost         of these, after which the run could not continue, or ended differently
    silent       of these, after which no line came within the limit, or no process ended
    tracebacks   of these, after which a process printed a traceback or a native stack
    seconds      from the interruption to the line that tells of it: median and most

The status is 1 unless none is lost, none is silent, none has a traceback and all are equal. A
disk is filled where this process may mount a file system in memory (root on Linux); elsewhere the
kind "full" limits the size of the run's files instead.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8

# A run that takes seconds once its programs are compiled.
SETTINGS: dict[str, object] = {
    "model.arch.num_hidden_layers": 2,
    "model.arch.hidden_size": 32,
    "model.arch.intermediate_size": 64,
    "model.arch.num_attention_heads": 2,
    "model.arch.num_key_value_heads": 1,
    "model.arch.head_dim": 16,
    "task.options": ("numbers_min=2", "numbers_max=2", "value_max=9", "format_score=0.3"),
    "task.grade_workers": 1,
    "rollout.num_prompts": 4,
    "rollout.group_size": 4,
    "rollout.max_prompt_tokens": 16,
    "rollout.max_new_tokens": 24,
    "rollout.num_slots": 16,
    "rollout.page_size": 8,
    "warm_start.steps": 40,
    "warm_start.lr": 2e-2,
    "warm_start.batch_size": 8,
    "warm_start.tries": 1,
    "train.microbatch_tokens": 256,
    "train.steps": STEPS,
    "train.checkpoint_every": 2,
    "train.logged_rollouts": 16,
    "optimizer.lr": 1e-3,
    "eval.problems": 8,
    "eval.samples": 1,
    "eval.every": 4,
}
LORA: dict[str, object] = {"model.adapter.rank": 4}
ASYNC: dict[str, object] = {"rollout.placement.max_staleness": 1}
HOSTS: dict[str, object] = {"mesh.data": 1, "mesh.fsdp": 2}
# The examples of the warm start are the data: one of the batches in each step.
SFT_SETTINGS: dict[str, object] = {
    "sft.data": "countdown",
    "sft.batch_size": 8,
    "sft.pack_length": 128,
    "warm_start.steps": STEPS,
    "train.steps": 200,  # the default, which SFT does not read
}
PPO = "ppo"  # a preset of the recipe, with a critic
SFT = "sft"
TWO = "hosts"  # the mode of two processes

MODES: dict[str, dict[str, object]] = {
    "synchronous": {},
    "lora": LORA,
    "int8": LORA | {"model.base": "int8"},
    "async": ASYNC,
    "offload": {"optimizer.offload": True},
    "split": {"rollout.placement": "apart"},
    "exact": {"model.exact": True, "rollout.kv_dtype": "float32"},
    PPO: {},
    SFT: SFT_SETTINGS,
    TWO: LORA | HOSTS,
}

RECIPES = {PPO: "countdown.py:tiny,ppo", SFT: "sft.py:tiny"}  # others: countdown.py:tiny

BY_THE_CLOCK = {"split"}  # modes in which no two runs are equal to the bit

# What is done to a process, and how often of 10.
KINDS = {"kill": 3, "term": 2, "int": 1, "stop": 2, "stop+kill": 1, "full": 1}
STOP_SECONDS = 12.0  # for which a process is stopped: longer than until the others say so
LIMITS = {
    "kill": 20.0,
    "term": 120.0,
    "int": 120.0,
    "stop": 120.0,
    "stop+kill": 40.0,
    "full": 120.0,
}
SILENCE = 20.0  # --silence_seconds of two hosts
DISK = 64 << 20  # bytes of the file system of a mode's runs
TIMED = ("time/", "compile/", "memory/")
CHANCE = {"rollout/slot_utilization", "rollout/tokens_per_second", "update/tokens_per_second"}
TRACES = ("Traceback (most recent", "stack trace", "*** SIG", "terminate called")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


@dataclass
class Process:
    """A process of a run, and the lines that it has printed, with their times."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def lines_after(self, moment: float) -> list[tuple[float, str]]:
        return [(at, line) for at, line in list(self.lines) if at >= moment]


STARTED: list[Process] = []  # all processes of this session, so that none outlives it


@dataclass
class Interruption:
    """What was done to a run, and what came of it."""

    mode: str
    kind: str
    seconds: float | None = None  # until a line told of it; None: none was due
    is_silent: bool = False
    has_traceback: bool = False
    is_resumed: bool = False
    is_equal: bool = False
    note: str = ""


@dataclass(frozen=True)
class Place:
    """Where the runs of a session lie, and how they are started."""

    folder: Path
    disk: Path  # of the runs that are interrupted
    can_fill: bool  # whether `disk` is a file system of its own


# -- Runs ------------------------------------------------------------------------------------------


def command(
    mode: str, workdir: Path, checkout: Path = ROOT, renamed: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the command of a run in a checkout of jzero.

    renamed: the names that settings have in that checkout, by their names in this one.
    """
    recipe = f"{checkout}/configs/{RECIPES.get(mode, 'countdown.py:tiny')}"
    flags = []
    for name, value in (SETTINGS | MODES[mode]).items():
        entries = value if isinstance(value, tuple) else (value,)  # a flag is repeated
        for entry in entries:
            flags.append(f"--config.{(renamed or {}).get(name, name)}={entry}")
    return [
        sys.executable,
        "-m",
        "jzero.main",
        f"--config={recipe}",
        f"--workdir={workdir}",
        "--unfinished_status=75",
        "--config.memory.check=False",  # the small disk has to fill while a run writes
        *flags,
    ]


def start(
    mode: str,
    workdir: Path,
    place: Place,
    checkout: Path = ROOT,
    renamed: Mapping[str, str] | None = None,
) -> list[Process]:
    """Starts the processes of a run: two in the mode `hosts`, and one in the others.

    The arguments are those of `command`.
    """
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # compiles three times as fast
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1" if mode == TWO else "2",
        "JAX_COMPILATION_CACHE_DIR": str(place.folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": " ".join(flags),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(checkout),
    }
    arguments = [command(mode, workdir, checkout, renamed)]
    if mode == TWO:
        joining = [
            f"--coordinator=127.0.0.1:{free_port()}",
            "--num_processes=2",
            "--join_seconds=60",
            f"--silence_seconds={SILENCE:g}",
        ]
        arguments = [[*arguments[0], *joining, f"--process_id={index}"] for index in range(2)]
    return [launch(argument, environment, checkout) for argument in arguments]


def launch(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
) -> Process:
    popen = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    process = Process(popen)
    STARTED.append(process)

    def read(pipe: Iterator[str]) -> None:
        for text in pipe:
            if line := text.strip():
                process.lines.append((time.monotonic(), line))

    for pipe in (popen.stdout, popen.stderr):
        assert pipe is not None
        process.readers.append(threading.Thread(target=read, args=(pipe,), daemon=True))
        process.readers[-1].start()
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait(processes: Sequence[Process], seconds: float) -> list[int | None]:
    """Returns the statuses of processes; None, and kills it, for one that does not end in time."""
    deadline = time.monotonic() + seconds
    statuses: list[int | None] = []
    for process in processes:
        try:
            status = process.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        statuses.append(status)
    for process in processes:
        end(process)
    return statuses


def end(process: Process) -> None:
    """Kills a process, if it lives, and reads the rest of what it printed."""
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive:
            os.killpg(process.process.pid, signal.SIGKILL)
    process.process.wait()
    for reader in process.readers:
        reader.join(5.0)


def last_words(processes: Sequence[Process]) -> str:
    """Returns the last lines that processes printed."""
    words = []
    for process in processes:
        words.append(" | ".join(line[-200:] for _, line in process.lines[-3:]))
    return " || ".join(words)


# -- Interruptions ---------------------------------------------------------------------------------


def interrupt(
    mode: str, kind: str, processes: Sequence[Process], place: Place, generator: random.Random
) -> Interruption:
    """Interrupts a run, and waits until it has told of it: by a line, or by its end."""
    result = Interruption(mode, kind)
    victim = generator.choice(processes)
    others = [process for process in processes if process is not victim]
    moment = time.monotonic()
    if kind in SIGNALS:
        victim.process.send_signal(SIGNALS[kind])
    elif kind == "full":
        fill(place, processes)
    else:
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(STOP_SECONDS)
        victim.process.send_signal(signal.SIGCONT if kind == "stop" else signal.SIGKILL)

    if kind == "stop":  # the run continues, and its hosts have said for which of them they wait
        told = [
            first_line(other, moment, ("has not answered", "waiting for"))
            for other in others
            if has_joined(other)
        ]
        result.is_silent = any(at is None for at in told) and all(x.is_alive for x in processes)
        result.seconds = max((at - moment for at in told if at is not None), default=None)
        return result

    statuses = wait(processes, LIMITS[kind])
    result.is_silent = None in statuses
    tellers = others if kind in ("kill", "stop+kill") else processes
    told = []
    for process in tellers:
        if process.process.returncode == 0:  # it was over
            continue
        words = ("error: ", "saving a checkpoint", "stopped after step", "eval after", "gone")
        at = first_line(process, moment, words)
        told.append(at)
    if kind == "term" or kind == "int":  # a signal before the command has begun ends Python itself
        told = [at for at, x in zip(told, tellers, strict=False) if at or x.process.returncode >= 0]
    if any(at is None for at in told):
        result.is_silent = True
    result.seconds = max((at - moment for at in told if at is not None), default=None)
    lines = [line for process in processes for _, line in process.lines_after(moment)]
    result.has_traceback = any(trace in line for line in lines for trace in TRACES)
    if result.is_silent or result.has_traceback:
        result.note = f"statuses {statuses}: {last_words(processes)}"
        print("\n".join(lines[-40:]), file=sys.stderr)
    return result


def has_joined(process: Process) -> bool:
    """Returns whether a process waits for the others of its run, and not for its own start."""
    return any("workdir " in line or "[Gloo]" in line for _, line in process.lines)


def first_line(process: Process, moment: float, words: Sequence[str]) -> float | None:
    """Returns when a process printed a line with one of the words after a moment, or None."""
    for at, line in process.lines_after(moment):
        if any(word in line for word in words):
            return at
    return None


def fill(place: Place, processes: Sequence[Process]) -> None:
    """Leaves no room on the disk of the runs."""
    if place.can_fill:
        with contextlib.suppress(OSError), (place.disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return
    for process in processes:
        limits = (2048, resource.RLIM_INFINITY)
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, limits)


def interrupt_runs(
    mode: str,
    kinds: Sequence[str],
    place: Place,
    want: Mapping[str, str],
    seconds: float,
    generator: random.Random,
) -> Iterator[Interruption]:
    """Interrupts runs of a mode in these ways, one after another, until none is left.

    A run that ends by itself is compared, and another one is started. `seconds` is what a run takes
    with compiled programs.
    """
    left = list(kinds)
    number = 0
    while left:
        number += 1
        workdir = place.disk / f"{mode}-{number}"
        done: list[Interruption] = []
        processes = start(mode, workdir, place)
        while left:
            wait_for_moment(processes, workdir, seconds, generator)
            if not all(process.is_alive for process in processes):
                break
            result = interrupt(mode, left.pop(0), processes, place, generator)
            done.append(result)
            (place.disk / "filler").unlink(missing_ok=True)
            if not any(process.is_alive for process in processes):
                processes = start(mode, workdir, place)
        statuses = wait(processes, 600)
        if set(statuses) == {75}:  # the last interruption was a signal that saved a checkpoint
            processes = start(mode, workdir, place)
            statuses = wait(processes, 600)
        difference = "" if set(statuses) == {0} else f"{statuses}: {last_words(processes)}"
        difference = difference or compare(want, results(mode, workdir))
        for result in done:
            result.is_resumed = set(statuses) == {0}
            result.is_equal = not difference
            result.note = result.note or difference
            yield result
        shutil.rmtree(workdir, ignore_errors=True)


def wait_for_moment(
    processes: Sequence[Process], workdir: Path, seconds: float, generator: random.Random
) -> None:
    """Waits for a moment of chance: during the start of a run in a third of all cases."""
    if generator.random() < 1 / 3:
        pause(processes, generator.uniform(0.0, 0.6 * seconds))
        return
    count = len(read_rows(workdir / "metrics.jsonl"))
    deadline = time.monotonic() + 300
    while len(read_rows(workdir / "metrics.jsonl")) <= count and time.monotonic() < deadline:
        if not all(process.is_alive for process in processes):
            return
        time.sleep(0.01)
    pause(processes, generator.uniform(0.0, 0.2 * seconds))


def pause(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and all(process.is_alive for process in processes):
        time.sleep(0.01)


# -- Results ---------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the complete lines of a file that may not exist, or be written at this moment."""
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines if line]
    return []


def results(mode: str, workdir: Path) -> dict[str, str]:
    """Returns what a finished run is compared by: its steps, samples and export, as texts."""
    if mode in BY_THE_CLOCK:
        return shape_of_results(workdir)
    found = {}
    for number, row in enumerate(read_rows(workdir / "metrics.jsonl")):
        kept = {}
        for name, value in row.items():
            if not name.startswith(TIMED) and name not in CHANCE:
                kept[name] = value
        found[f"metrics {number}"] = json.dumps(kept, sort_keys=True)
    for path in (workdir / "samples.jsonl", *sorted(workdir.glob("export-*/*"))):
        digest = "none"
        if path.is_file():
            # An adapter names its base, and the card its run: both may lie in the workdir.
            content = path.read_bytes().replace(str(workdir).encode(), b"WORKDIR")
            digest = hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(workdir))] = digest
    return found


def shape_of_results(workdir: Path) -> dict[str, str]:
    """Returns what two runs have in common whose tokens depend on the clock."""
    rows = read_rows(workdir / "metrics.jsonl")
    samples = Counter(sample["step"] for sample in read_rows(workdir / "samples.jsonl"))
    found = {
        "steps": str([row["step"] for row in rows]),
        "samples of each step": str(sorted(samples.items())),
        "oldest tokens are allowed": str(all(row["async/staleness"] <= 1 for row in rows)),
        "export": str(sorted(path.name for path in workdir.glob("export-*/*"))),
    }
    for row in rows:
        found[f"names of step {row['step']}"] = str(sorted(row))
    return found


def compare(want: Mapping[str, str], got: Mapping[str, str]) -> str:
    """Returns the first difference between two runs, or "" if there is none."""
    for name in sorted({*want, *got}):
        if want.get(name) == got.get(name):
            continue
        if not name.startswith("metrics ") or name not in want or name not in got:
            return f"{name} differs"
        one, other = json.loads(want[name]), json.loads(got[name])
        names = [x for x in sorted({*one, *other}) if one.get(x) != other.get(x)]
        values = [f"{x} {one.get(x)} -> {other.get(x)}" for x in names[:3]]
        return f"{name} differs: {', '.join(values)}"
    return ""


def print_table(interruptions: Sequence[Interruption]) -> bool:
    """Prints the table; returns whether all runs held."""
    header = (
        "| mode | kind | interrupted | resumed | equal | lost | silent | tracebacks | seconds |"
    )
    print(header)
    print("|" + "---|" * 9)
    groups: dict[tuple[str, str], list[Interruption]] = {}
    for result in interruptions:
        groups.setdefault((result.mode, result.kind), []).append(result)
    rows = [(*key, groups[key]) for key in groups]
    for mode, kind, group in [*rows, ("all", "", list(interruptions))]:
        seconds = [result.seconds for result in group if result.seconds is not None]
        shown = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        counts = [
            len(group),
            sum(result.is_resumed for result in group),
            sum(result.is_equal for result in group),
            sum(not (result.is_resumed and result.is_equal) for result in group),
            sum(result.is_silent for result in group),
            sum(result.has_traceback for result in group),
        ]
        print(f"| {mode} | {kind} | {' | '.join(map(str, counts))} | {shown} |", flush=True)
    return all(
        result.is_equal and not result.is_silent and not result.has_traceback
        for result in interruptions
    )


# -- The session -----------------------------------------------------------------------------------


@contextlib.contextmanager
def make_place(folder: Path) -> Iterator[Place]:
    """Mounts a small file system in memory for the runs, where this process may."""
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    can_mount = shutil.which("mount") is not None
    can_fill = can_mount and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield Place(folder, disk, can_fill)
    finally:
        for process in STARTED:
            end(process)
        if can_fill:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def plan(modes: Sequence[str], count: int, generator: random.Random) -> dict[str, list[str]]:
    """Returns the kinds of interruptions for each mode, in turn, so that all have as many."""
    kinds = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    chosen = [*KINDS, *generator.choices(kinds, k=max(0, count - len(KINDS)))][:count]
    generator.shuffle(chosen)
    kinds_by_mode: dict[str, list[str]] = {mode: [] for mode in modes}
    for number, kind in enumerate(chosen):
        kinds_by_mode[modes[number % len(modes)]].append(kind)
    return kinds_by_mode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="interruptions in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--kinds", default="", help=f"in this order, of {', '.join(KINDS)}")
    parser.add_argument("--folder", type=Path, help="kept, with its compiled programs")
    parser.add_argument(
        "--results", type=Path, help="JSON lines that several calls add to; the table has all"
    )
    args = parser.parse_args()
    modes = args.modes.split(",")
    generator = random.Random(args.seed)
    planned = plan(modes, args.count, generator)
    if args.kinds:
        planned = {mode: args.kinds.split(",") for mode in modes}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    interruptions: list[Interruption] = []
    if args.results:
        interruptions = [Interruption(**row) for row in read_rows(args.results)]
    with contextlib.ExitStack() as cleanup:
        temporary = cleanup.enter_context(tempfile.TemporaryDirectory())
        place = cleanup.enter_context(make_place(args.folder or Path(temporary)))
        for mode, kinds in planned.items():
            reference = place.folder / f"{mode}-undisturbed"
            shutil.rmtree(reference, ignore_errors=True)
            began = time.monotonic()
            processes = start(mode, reference, place)
            statuses = wait(processes, 900)
            if set(statuses) != {0}:
                sys.exit(f"{mode}: an undisturbed run ended {statuses}: {last_words(processes)}")
            seconds = min(time.monotonic() - began, 30.0)  # compilation is over
            want = results(mode, reference)
            print(f"{mode}: undisturbed, {time.monotonic() - began:.0f} s", file=sys.stderr)
            for result in interrupt_runs(mode, kinds, place, want, seconds, generator):
                interruptions.append(result)
                print(result, file=sys.stderr, flush=True)
                if args.results:
                    with args.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    sys.exit(0 if print_table(interruptions) else 1)


if __name__ == "__main__":
    main()
