"""The benchmark of memory by phase prints a row for every model, slice, method and length."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_it_says_what_fits_and_what_does_not() -> None:
    command = [sys.executable, "benchmarks/memory.py", "--models", "Qwen3-0.6B", "Qwen3-8B"]
    command += ["--topologies", "v5e:1x1", "--methods", "lora", "--tokens", "1024"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    _, _, small, large = [line.split("|") for line in ran.stdout.splitlines()]
    assert [cell.strip() for cell in small[1:5]] == [
        "Qwen3-0.6B", "v5e:1x1", "lora, rank 32", "1,024",
    ]  # fmt: skip
    assert small[9].strip() == "yes"
    assert large[9].strip() == "no"
    assert max(map(float, large[5:8])) > float(large[8])
