"""Prints the last steps of a run as JSON lines: python -m benchmarks.gpu.metrics WORKDIR"""

import json
import sys
from pathlib import Path

from jzero.files import read_jsonl

KEPT = ("reward/", "time/", "policy/mismatch", "rollout/tokens", "update/tokens", "memory/")
LAST_STEPS = 3


def main() -> None:
    rows = read_jsonl(Path(sys.argv[1]) / "metrics.jsonl")
    for row in rows[-LAST_STEPS:]:
        kept = {name: value for name, value in row.items() if name.startswith(KEPT)}
        print(json.dumps({"step": row["step"], **kept}))


if __name__ == "__main__":
    main()
