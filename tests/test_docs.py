"""The commands of README.md and docs/: each block of them is run here, as it stands or smaller, or says why it is not.

A comment above a block says which: `runs`, `small` (runs with settings of the tests' runs added), `slow` (as it stands,
with --slow), `needs: ...` (not here), `tested: FILE` (by that file)."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, RUN

BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?```sh\n(.*?)```", re.DOTALL)
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOUND = [
    (file, *match) for file in FILES for match in BLOCK.findall(file.read_text(encoding="utf-8"))
]
name = lambda block: f"{block[0].stem}-{next(line for line in block[2].splitlines() if line)[:40]}"


@pytest.mark.parametrize("block", FOUND, ids=name)
def test_every_block_says_how_it_is_tested(block):
    _, mark, text = block
    kind, _, rest = mark.partition(": ")
    assert (
        kind in ("runs", "small", "slow", "test command")
        or (kind == "needs" and rest)
        or kind == "tested"
    ), text
    assert kind != "tested" or (ROOT / rest).exists()


def run(text: str, environment, directory: Path) -> str:
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        text = text.replace("8000", str(free.getsockname()[1]))
    text = "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("pip install")
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment = environment | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["bash", "-em", "-c", text], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 143), f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("block", [block for block in FOUND if block[1] == "runs"], ids=name)
def test_it_runs(block, environment, tmp_path):
    if "jzero.serve" in block[2]:
        pytest.importorskip("uvicorn", reason="needs the extra serve")
    out = run(block[2], environment, tmp_path)
    if "jzero.serve" in block[2]:  # the whole workflow: what its last command answered
        assert '"completion_tokens": ' in out and '"finish_reason": "' in out
        assert (tmp_path / "runs/sft/report.html").stat().st_size > 50_000


@pytest.mark.parametrize("block", [block for block in FOUND if block[1] == "small"], ids=name)
def test_it_runs_small(block, environment, tmp_path):
    small = [
        *RUN[1:],
        "--config.train.steps=2",
        "--config.warm_start.steps=2",
        "--config.eval.every=0",
    ]
    grow = lambda line: (
        " ".join([line, *small, "--workdir", "runs/small"]) if "jzero.main" in line else line
    )
    run("\n".join(map(grow, block[2].splitlines())), environment, tmp_path)
    assert list(tmp_path.glob("runs/*/summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in FOUND if block[1] == "slow"], ids=name)
def test_it_runs_for_minutes(block, environment, tmp_path):
    if ".venv" in block[2]:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
        subprocess.run(["bash", "-ec", block[2]], cwd=tmp_path / "clone", check=True)
    else:
        run(block[2], environment, tmp_path)
