"""Runs RL with model.exact in all the ways that must not differ in any bit, and prints a table.

    python benchmarks/exact_matrix.py --steps 50 [--out DIR] [--only TEXT,...] [--model DIR]
        [--config.section.field=value ...]

Each case is a run of configs/countdown.py:tiny-long in a process of its own: Qwen2 and Qwen3, fp32
and bf16, on one device in two splits into microbatches, on 8 fake devices (data 8), and on 8 of
which two share a model (data 4, tensor 2). In every case the samples of a group share their prompt,
in the decoder's pages and in the trainer's rows, and there are too few pages for all slots, so that
sequences are preempted and prefilled again. One more case runs without model.exact: it says which
accuracy to expect. `--only` chooses the cases whose name holds every TEXT.

Every case starts from a short warm start of its own, after which it solves next to nothing. With
--model all start from that model, which makes their accuracies comparable. Cases of another
architecture are then left out.

The runs, their metrics and their output stay in DIR, and a run that is there goes on where it
stopped. A line of the table is a case:

    compared    log-probs of the first minibatches that were compared with the sampler's, of all
                steps. A run with model.exact ends at the first step in which one differs.
    differ      those that had other bits
    ratio       the smallest and the largest that a ratio of a first minibatch can have been:
                exp(-x) and exp(x), where x is the largest difference of log-probs
    score       the longest time/score of a step in seconds: 0 where old log-probs need no forward
                pass
    preempted   sequences that were preempted
    accuracy    of the rollouts of the last ten steps
    minutes     of the run in all, with compilations

The exit status is 1 if a run ended before its last step. The message is then under the table.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jzero.files import JsonObject

ROOT = Path(__file__).resolve().parents[1]
HEADING = (
    f"{'case':46}{'steps':>6}{'compared':>10}{'differ':>9}{'ratio':>24}{'score':>7}"
    f"{'preempted':>11}{'accuracy':>10}{'minutes':>9}"
)
LAYOUTS = {
    "1 device, microbatches of 4096": {"mesh.data": 1, "train.microbatch_tokens": 4096},
    "1 device, microbatches of 1024": {"mesh.data": 1, "train.microbatch_tokens": 1024},
    "8 devices": {"mesh.data": 8, "train.microbatch_tokens": 4096},
    "8 devices, tensor 2": {
        "mesh.data": 4,
        "mesh.tensor": 2,
        "train.microbatch_tokens": 4096,
    },
    "not exact, 1 device": {
        "mesh.data": 1,
        "train.microbatch_tokens": 4096,
        "model.exact": False,
    },
}
WARM_START_STEPS = 60
LAST_STEPS = 10  # of which the accuracy is the mean
SETTINGS = {
    "model.exact": True,
    "rollout.num_prompts": 16,
    "rollout.num_slots": 64,
    # A sequence may have 192 tokens: 8 pages of 24 or more for 8 slots, on each of 8 devices.
    "rollout.page_size": 16,
    "rollout.num_pages": 256,
    # With an entropy bonus no response is left out, whatever its score.
    "algorithm.entropy_coef": 1e-6,
    # With this few prompts a step, the recipe's rate would in the end unlearn what was learnt.
    "optimizer.lr": 1e-4,
    "train.minibatches": 2,
    "train.checkpoint_every": 25,
    "eval.every": 0,
    "eval.problems": 32,
    "eval.samples": 1,
    "mesh.fsdp": 1,
}
# As `training.exactness.describe` says it.
DIFFERENCE = re.compile(r"(\d+) of (\d+) differ, by at most ([\d.e+-]+)\.")


@dataclass(frozen=True)
class Case:
    """A run of the matrix."""

    model_type: str
    dtype: str
    layout: str  # a key of LAYOUTS

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.dtype}, {self.layout}"

    @property
    def devices(self) -> int:
        """How many devices the run needs."""
        return 8 if self.layout.startswith("8") else 1

    @property
    def is_exact(self) -> bool:
        """Whether the run has model.exact."""
        return bool((SETTINGS | LAYOUTS[self.layout])["model.exact"])

    def flags(self) -> list[str]:
        """Returns the settings of the run, as arguments of `jzero.main`."""
        settings = SETTINGS | LAYOUTS[self.layout]
        settings |= {
            "model.arch": f"tiny-qwen2(model_type={self.model_type})",
            "model.dtype": self.dtype,
            "rollout.kv_dtype": self.dtype,
        }
        recipe = f"--config={ROOT / 'configs/countdown.py'}:tiny-long"
        return [recipe, *(f"--config.{name}={value}" for name, value in settings.items())]


@dataclass(frozen=True)
class Result:
    """What a line of the table says of a run."""

    steps: int
    compared: int
    differ: int
    largest: float  # difference of two log-probs
    score: float  # seconds
    preempted: int
    accuracy: float
    message: str = ""  # of a run that ended before its last step


def cases(only: str, model_types: Sequence[str] = ("qwen2", "qwen3")) -> Iterator[Case]:
    """Yields the cases whose name holds every text of `only`, which commas separate."""
    for model_type in model_types:
        for dtype in ("float32", "bfloat16"):
            for layout in LAYOUTS:
                case = Case(model_type, dtype, layout)
                if all(text.strip() in case.name for text in only.split(",")):
                    yield case


def run_case(case: Case, directory: Path, arguments: list[str]) -> int:
    """Runs a case, with its output in a file of `directory`. Returns the exit status."""
    command = [sys.executable, "-m", "jzero.main", *case.flags(), *arguments]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(case.devices),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "output.txt").open("w") as output:
        return subprocess.run(
            [*command, f"--workdir={directory / 'run'}"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode


def read_result(rows: list[JsonObject], output: str, is_done: bool) -> Result:
    """Returns the result of a run from the rows of its metrics and from what it printed."""
    compared, differ, largest, message = 0, 0, 0.0, ""
    steps = [row for row in rows if "policy/mismatch_tokens" in row]
    for row in steps:
        compared += int(row.get("policy/exact_tokens", 0))
        differ += int(row["policy/mismatch_tokens"])
        largest = max(largest, float(row["policy/mismatch_max"]))
    if not is_done:
        lines = output.strip().splitlines() or ["the run printed nothing"]
        message = lines[-1]
        found = DIFFERENCE.search(output)
        if found:
            compared += int(found[2])
            differ += int(found[1])
            largest = max(largest, float(found[3]))
            message = next(line for line in lines if DIFFERENCE.search(line))
    last = steps[-LAST_STEPS:]
    return Result(
        steps=len(steps),
        compared=compared,
        differ=differ,
        largest=largest,
        score=max((float(row.get("time/score", 0.0)) for row in steps), default=0.0),
        preempted=sum(int(row.get("rollout/preempted", 0)) for row in steps),
        accuracy=statistics.fmean(row["reward/accuracy"] for row in last) if last else math.nan,
        message=message,
    )


def format_result(case: Case, result: Result, minutes: float) -> str:
    """Returns a line of the table."""
    ratio = f"{math.exp(-result.largest):.8g} .. {math.exp(result.largest):.8g}"
    return (
        f"{case.name:46}{result.steps:6}{result.compared:10,}{result.differ:9,}{ratio:>24}"
        f"{result.score:7.2f}{result.preempted:11}{result.accuracy:10.3f}{minutes:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "benchmarks/exact_matrix.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of RL in every case")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/exact"), help="directory of the runs"
    )
    parser.add_argument("--only", default="", help="texts that the name of a case must hold")
    parser.add_argument("--model", type=Path, help="directory of a model that cases start from")
    args, rest = parser.parse_known_args()
    if args.model:
        model_type = json.loads((args.model / "config.json").read_text())["model_type"]
        chosen = list(cases(args.only, [model_type]))
        start = [f"--config.model.path={args.model}", "--config.warm_start=none"]
    else:
        chosen = list(cases(args.only))
        start = [f"--config.warm_start.steps={WARM_START_STEPS}"]
    if not chosen:
        parser.error(f"--only={args.only}: no case has these texts in its name")

    rest = [f"--config.train.steps={args.steps}", *start, *rest]
    messages = []
    print(HEADING)
    for case in chosen:
        directory = args.out / re.sub(r"[ ,]+", "-", case.name)
        started = time.monotonic()
        status = run_case(case, directory, rest)
        minutes = (time.monotonic() - started) / 60
        metrics = directory / "run/metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        output = (directory / "output.txt").read_text()
        result = read_result([json.loads(line) for line in lines], output, status == 0)
        print(format_result(case, result, minutes), flush=True)
        if result.message:
            messages.append(f"{case.name}: {result.message}")
    print("\n".join(messages))
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
