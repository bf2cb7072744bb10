"""The benchmark of memory by phase prints a row for every model, slice, method and length."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_update_of_shared_rows_is_compiled() -> None:
    pytest.importorskip("libtpu")
    command = [sys.executable, "benchmarks/long_rows.py", "--model", "Qwen2.5-0.5B"]
    command += ["--topology", "v5e:2x2", "--tokens", "512", "--context", "2"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    line = ran.stdout.splitlines()[-1]
    assert line.startswith("Qwen2.5-0.5B v5e:2x2 512 tokens, context 2: update ")
    compiled, counted = map(float, re.findall(r"([\d.]+) (?:GiB compiled|by arithmetic)", line))
    assert 0 < compiled < 1.2 * counted < 16
    assert " 0 all-to-all" not in line


def test_weights_are_gathered_before_they_are_multiplied_by() -> None:
    """XLA:TPU would multiply by parts of 3B's weights, with 170 permutations between them."""
    pytest.importorskip("libtpu")
    command = [sys.executable, "benchmarks/long_rows.py", "--model", "Qwen2.5-3B"]
    command += ["--topology", "v5e:2x4", "--tokens", "1024"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    found = re.search(r"(\d+) collective-permute", ran.stdout)
    assert found is not None
    assert int(found[1]) < 20
