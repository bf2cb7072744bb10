"""benchmarks/hub_life.py: its quick form prints counts that are as expected."""

import subprocess
import sys

from runs import ROOT


def test_the_hub_gets_what_is_expected() -> None:
    command = [sys.executable, "benchmarks/hub_life.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all counts are as expected"
    assert any(line.split()[:5] == ["new", "model,", "private", "2", "2"] for line in lines)
