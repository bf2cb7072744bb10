"""Whole runs of `python -m jzero.main` as processes, and a stand-in for servers they talk to."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ["-m", "jzero.main"]
STEPS = 14

# A run that takes a second once its programs are compiled. Its warm start makes rewards differ, and
# its evaluations take half of the time, so that signals of a test arrive during them, too.
SETTINGS = f"""
model.arch.num_hidden_layers=2 model.arch.hidden_size=32 model.arch.intermediate_size=64
model.arch.num_attention_heads=2 model.arch.num_key_value_heads=1 model.arch.head_dim=16
task.numbers_min=2 task.numbers_max=2 task.value_max=9 task.format_score=0.3
rollout.num_prompts=4 rollout.group_size=4 rollout.max_prompt_tokens=16
rollout.max_new_tokens=24 rollout.num_slots=32 rollout.page_size=8
warm_start.steps=60 warm_start.lr=2e-2 warm_start.batch_size=8 warm_start.tries=1
train.microbatch_tokens=256 train.steps={STEPS} train.checkpoint_every=4 train.logged_rollouts=2
optimizer.lr=1e-3
eval.problems=16 eval.samples=2 eval.every=2
"""
RUN = [
    f"--config={ROOT}/configs/countdown.py:tiny",
    *(f"--config.{setting}" for setting in SETTINGS.split()),
]


def launch(environment: dict[str, str], workdir: Path, *changes: str) -> subprocess.Popen:
    """Starts the run `RUN` in `workdir`; `changes` are further arguments."""
    return subprocess.Popen(
        [sys.executable, *PROGRAM, *RUN, f"--workdir={workdir}", *changes],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0, seconds: int = 300) -> tuple[str, str]:
    """Waits for a process and checks its exit status; returns its stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, err[-3000:]
    return out, err


def rows(path: Path) -> list[dict]:
    """Reads the complete lines of a file of JSON lines, which may not exist yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def timeless(path: Path) -> list[dict]:
    """Reads metrics without those of the clock, of compilations and of the process's memory."""

    def is_timed(name: str) -> bool:
        groups = ("time/", "compile/", "memory/")
        return name.startswith(groups) or name.endswith("tokens_per_second")

    kept = []
    for row in rows(path):
        kept.append({name: value for name, value in row.items() if not is_timed(name)})
    return kept


def wait_for(process: subprocess.Popen, path: Path, count: int) -> None:
    """Waits until a file that `process` writes has `count` complete lines."""
    while len(rows(path)) < count:
        if process.poll() is not None:
            pytest.fail(f"ended before line {count}: {process.communicate()}")
        time.sleep(0.005)


class Stand(ThreadingHTTPServer):
    """A stand-in for a server, which serves on a free port in a thread while it is entered."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
