"""Compares the numbers of tiny runs in two checkouts, and prints a table.

    python benchmarks/same_numbers.py OLD NEW [--only CASE] [--folder DIR] [--renamed OLD=NEW]

OLD and NEW are checkouts of jzero, such as a worktree of the last release and this one. Each case
is a run of a few steps of a recipe, in both checkouts, with the same Python and the same packages.
After a refactoring every line of `metrics.jsonl` and `samples.jsonl` has to be equal, except for
times, rates, and the memory of the process.

A case gives its settings by the names of the new checkout. `--renamed` translates one of them for
the old checkout, for example `--renamed rollout.num_slots=rollout.slots`; the flag may be repeated.

A line of the table is a case:

    steps      lines of metrics.jsonl
    numbers    metrics that were compared
    differ     metrics with another value
    missing    metrics that only one of the checkouts has
    samples    lines of samples.jsonl that were compared, and in parentheses those that differ

The exit status is 1 unless all are equal.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jzero.files import JsonObject

LIMIT_SECONDS = 900.0
TIMED = ("time/", "compile/", "memory/")
TIMED_ENDS = ("tokens_per_second", "/seconds")

ARCH = (
    "tiny-qwen2(num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=16)"
)
MODEL = f"model.arch={ARCH} "
RUN = """
rollout.num_prompts=4 rollout.group_size=4 rollout.num_slots=32 rollout.page_size=8
warm_start.lr=2e-2 warm_start.batch_size=8 warm_start.tries=1 warm_start.steps=40
train.steps=3 train.logged_rollouts=4 optimizer.lr=1e-3
eval.problems=16 eval.samples=2 eval.every=2
"""
COUNTDOWN = """
task.options=numbers_min=2 task.options=numbers_max=2 task.options=value_max=9
task.options=target_max=60 task.options=format_score=0.3
rollout.max_prompt_tokens=16 rollout.max_new_tokens=24 train.microbatch_tokens=256
"""
STALE = "rollout.placement.max_staleness=1"
# Exact mode wants a KV cache that rounds nothing.
EXACT = "model.exact=True rollout.kv_dtype=float32"
# A run of its own that keeps the model of the preset and its lengths. The slots are set, because
# two checkouts may choose other numbers, and arrays of another shape are summed in another order.
OWN_MODEL = """
rollout.num_prompts=4 rollout.group_size=4 rollout.num_slots=16
warm_start.steps=20 warm_start.tries=1 train.steps=3
train.logged_rollouts=4 eval.problems=16 eval.every=0
"""
MATH = """
train.steps=2 rollout.num_prompts=2 rollout.num_slots=16 eval.every=0 eval.suites=
task.data.level_min=1 task.data.level_max=5
"""
NUM_ROWS = 24


@dataclass(frozen=True)
class Case:
    """A recipe, and the settings that make it small."""

    recipe: str
    settings: str
    num_processes: int = 1
    teacher: str = ""  # the case whose exported model is the teacher
    # A file of sums and a tokenizer of bytes, instead of a data set and a tokenizer of the hub.
    needs_rows: bool = False


CASES = {
    "countdown": Case("countdown.py:tiny", MODEL + RUN + COUNTDOWN),
    "experts": Case("countdown.py:tiny-moe", OWN_MODEL),
    "hybrid": Case("countdown.py:tiny-hybrid", OWN_MODEL),
    "code": Case("code.py:tiny", OWN_MODEL),
    "calculator": Case("calculator.py:tiny", OWN_MODEL),
    "guess": Case("guess.py:tiny", OWN_MODEL),
    "math with turns": Case("math_multiturn.py:tiny", MATH, needs_rows=True),
    "distill": Case("distill.py:tiny", OWN_MODEL, teacher="countdown"),
    "asynchronous": Case("countdown.py:tiny", MODEL + RUN + COUNTDOWN + STALE),
    "two hosts": Case("countdown.py:tiny", MODEL + RUN + COUNTDOWN, num_processes=2),
    "exact": Case("countdown.py:tiny", MODEL + RUN + COUNTDOWN + EXACT),
    "exact, experts": Case("countdown.py:tiny-moe", OWN_MODEL + EXACT),
}


@dataclass
class Comparison:
    """What differs between the files of two runs."""

    steps: int = 0
    numbers: int = 0
    differ: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    samples: int = 0
    other_samples: int = 0
    failure: str = ""

    @property
    def is_equal(self) -> bool:
        is_same = not (self.differ or self.missing or self.other_samples or self.failure)
        return is_same and self.numbers > 0 and self.samples > 0

    def show(self, name: str, seconds: float) -> None:
        samples = f"{self.samples} ({self.other_samples})"
        print(
            f"{name:20}{self.steps:>6}{self.numbers:>9}{len(self.differ):>8}"
            f"{len(self.missing):>9}{samples:>12}{seconds:>8.0f} s",
            flush=True,
        )
        if self.failure:
            print(f"    {self.failure}")
        for difference in self.differ[:5]:
            print(f"    {difference}")
        if self.missing:
            print(f"    only in one: {', '.join(sorted(self.missing)[:8])}")


def is_timed(name: str) -> bool:
    """Returns whether a metric depends on the clock, on caches or on the memory of the process."""
    return name.startswith(TIMED) or name.endswith(TIMED_ENDS)


def read_lines(path: Path) -> list[JsonObject]:
    """Returns the objects of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare(old: Path, new: Path) -> Comparison:
    """Compares the metrics and the samples of two runs."""
    comparison = Comparison()
    old_metrics, new_metrics = (read_lines(run / "metrics.jsonl") for run in (old, new))
    if len(old_metrics) != len(new_metrics):
        comparison.failure = f"{len(old_metrics)} and {len(new_metrics)} lines of metrics.jsonl"
    comparison.steps = len(new_metrics)
    for number, (before, after) in enumerate(zip(old_metrics, new_metrics, strict=False)):
        names = {name for name in {*before, *after} if not is_timed(name)}
        for name in sorted(names):
            if name not in before or name not in after:
                comparison.missing.add(name)
                continue
            comparison.numbers += 1
            if before[name] != after[name]:
                line = f"line {number}, {name}: {before[name]} and {after[name]}"
                comparison.differ.append(line)

    old_samples, new_samples = (read_lines(run / "samples.jsonl") for run in (old, new))
    comparison.samples = max(len(old_samples), len(new_samples))
    comparison.other_samples = abs(len(old_samples) - len(new_samples))
    for before, after in zip(old_samples, new_samples, strict=False):
        # A newer checkout may describe a rollout by more keys.
        comparison.other_samples += any(
            key not in after or after[key] != value for key, value in before.items()
        )
    return comparison


def flags_of(settings: str, renamed: dict[str, str]) -> list[str]:
    """Returns settings as flags, with other names where `renamed` has them."""
    flags = []
    for setting in settings.split():
        name, _, value = setting.partition("=")
        flags.append(f"--config.{renamed.get(name, name)}={value}")
    return flags


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def commands(
    case: Case, checkout: Path, workdir: Path, flags: Sequence[str]
) -> Iterator[list[str]]:
    """Yields the command of each process of a run."""
    config = f"--config={checkout}/configs/{case.recipe}"
    command = [sys.executable, "-m", "jzero.main", config, f"--workdir={workdir}", *flags]
    if case.num_processes == 1:
        yield command
        return
    hosts = [f"--coordinator=localhost:{free_port()}", f"--num_processes={case.num_processes}"]
    for index in range(case.num_processes):
        yield [*command, *hosts, f"--process_id={index}"]


def run(case: Case, checkout: Path, workdir: Path, flags: Sequence[str]) -> str:
    """Runs a case; returns why it failed, or an empty string."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        # Programs that are equal in both checkouts are compiled once, and without optimizations.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parents[1] / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "HF_HUB_OFFLINE": "1",
    }
    processes = []
    for command in commands(case, checkout, workdir, flags):
        log = (workdir.parent / f"{workdir.name}.{len(processes)}.log").open("w")
        processes.append(
            subprocess.Popen(
                command, cwd=workdir.parent, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        )
    deadline = time.monotonic() + LIMIT_SECONDS
    reason = ""
    for index, process in enumerate(processes):
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status and not reason:
            text = (workdir.parent / f"{workdir.name}.{index}.log").read_text(encoding="utf-8")
            last = text.strip().splitlines()[-1:] or ["nothing was printed"]
            reason = f"{checkout.name} ended with status {status}: {last[0]}"
    return reason


def write_rows(folder: Path) -> Path:
    """Writes problems of mathematics, and returns their file."""
    rows = []
    for number in range(NUM_ROWS):
        question, answer = f"What is {number} + {3 * number + 1}?", str(4 * number + 1)
        rows.append({"problem": question, "answer": answer, "level": 3})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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


def compare_case(
    name: str, checkouts: tuple[Path, Path], folder: Path, renamed: dict[str, str]
) -> Comparison:
    """Runs a case in both checkouts, and compares the files."""
    case = CASES[name]
    runs = []
    for label, checkout in zip(("old", "new"), checkouts, strict=True):
        workdir = folder / label / name.replace(" ", "-").replace(",", "")
        workdir.parent.mkdir(parents=True, exist_ok=True)
        flags = flags_of(case.settings, renamed if label == "old" else {})
        if case.teacher:
            [teacher] = (folder / label / case.teacher).glob("export-*")
            flags.append(f"--config.teacher.path={teacher}")
        if case.needs_rows:
            flags.append(f"--config.task.data={write_rows(folder)}")
            flags.append(f"--config.model.tokenizer={write_tokenizer(folder)}")
        reason = run(case, checkout, workdir, flags)
        if reason:
            return Comparison(failure=reason)
        runs.append(workdir)
    return compare(*runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", action="append", choices=list(CASES), help="may be repeated")
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary one")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    args = parser.parse_args()

    renamed = {}
    for pair in args.renamed:
        old_name, _, new_name = pair.partition("=")
        renamed[new_name] = old_name
    checkouts = args.old.resolve(), args.new.resolve()
    only = set(args.only or CASES)
    only |= {CASES[name].teacher for name in only}  # a teacher is the model of another case
    names = [name for name in CASES if name in only]
    print(f"{'case':20}{'steps':>6}{'numbers':>9}{'differ':>8}{'missing':>9}{'samples':>12}")
    is_equal = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        for name in names:
            start = time.monotonic()
            comparison = compare_case(name, checkouts, folder, renamed)
            comparison.show(name, time.monotonic() - start)
            is_equal &= comparison.is_equal
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
