"""Damaged data files and hostile environments: nothing crashes, hangs or is silent."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jzero.workers import keeper
from tests.attacks.conftest import Tries

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = Path(__file__).resolve().parent
TRIES = re.compile(r"(?:files|kinds) +(\d+)")  # in what a command prints


def run(tries: Tries, script: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, str(ATTACKS / script), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    tries.count(Path(script).stem, sum(map(int, TRIES.findall(process.stdout))))
    return process.stdout


def test_some_damaged_data_files_are_refused_or_read_rightly(tries: Tries) -> None:
    out = run(tries, "data_files.py", "--no-runs", "--every", "6")
    assert "tracebacks 0  hangs 0  silent 0  wrong 0" in out


def test_all_damaged_data_files_are_refused_or_read_rightly(tries: Tries) -> None:
    out = run(tries, "data_files.py", "--no-runs")
    assert "tracebacks 0  hangs 0  silent 0  wrong 0" in out


QUICK = (
    "reply of 50 MB",
    "pair of surrogates",
    "minus 1e308",
    "part with a line break",
    "KeyboardInterrupt",
    "CancelledError",
    "GeneratorExit",
    "daemon",
    "patched json",
    "patched builtins",
    "changed row",
)


@pytest.mark.skipif(not keeper.IS_LINUX, reason="it looks for processes in /proc")
@pytest.mark.parametrize("way", ["processes", "asyncio", "rewards"])
def test_some_hostile_environments_cost_their_own_episodes_only(way: str, tries: Tries) -> None:
    kinds = [f"--only={kind}" for kind in QUICK]
    assert "tracebacks 0  hangs 0  silent 0  wrong 0  left 0" in run(
        tries, "hostile_episodes.py", "--no-runs", f"--way={way}", *kinds
    )
