"""The benchmark of products with the weights of experts runs, at a small size."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_a_line_for_every_product() -> None:
    small = ["--rows=64", "--experts=4", "--inputs=16", "--outputs=16", "--repeat=1"]
    command = [sys.executable, "benchmarks/experts.py", *small]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    rows = [line.split("|")[1].strip() for line in ran.stdout.splitlines() if line[0] == "|"]
    assert rows == ["product", "---", "dense", "ragged", "blocks"]
