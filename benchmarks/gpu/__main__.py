"""Measures one stage on this machine's GPUs, and prints JSON lines.

    python -m benchmarks.gpu STAGE [--seconds 570] [--out DIR] [--tiny] [--list]

| stage   | what it measures                                                                     |
|---------|--------------------------------------------------------------------------------------|
| tests   | `pytest -m gpu`: kernels, engine and update against the definition                   |
| decode  | tokens a second of decoding, and the share of the memory bandwidth, 0.5B to 7B       |
| update  | tokens a second of the update, and the share of the bf16 peak, 0.5B to 7B            |
| recipe  | the countdown recipe: tiny to its end                                                |
| profile | which operations the time of decoding and of the update goes to                      |

A stage is a list of jobs, in the order of their worth. Each is a process of its own. A job that no
longer fits into --seconds is left out, and a line says so. Every line of the output is a JSON
object; DIR/STAGE.jsonl keeps the lines, and DIR/STAGE.log keeps everything that the jobs printed.

--tiny rehearses a stage anywhere, a CPU included, with a model of a few thousand parameters. Run
the command in the root of a clone, where jzero is installed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.running import run_stage
from benchmarks.gpu.stages import STAGES, jobs_of


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--seconds", type=float, default=570, help="of all jobs together")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where lines are kept")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on any machine")
    parser.add_argument(
        "--list", action="store_true", help="print the jobs instead of running them"
    )
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        jobs = jobs_of(args.stage, Path(scratch), args.tiny)
        if args.list:
            for job in jobs:
                print(json.dumps(job._asdict()))
            return
        failures = run_stage(args.stage, jobs, args.seconds, args.out, args.tiny)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
