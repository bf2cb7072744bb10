"""The part `hosts` of soak.py: runs of two processes that are stopped and killed at random moments.

Both processes have one device, and each holds one half of the weights. After an interruption both
have to end by themselves, and the same command resumes. A run that was interrupted several times
has to end with the metrics, samples and weights of a run that was not.

No host is interrupted before both have joined. One that ends earlier is for the other like one that
was not started yet, and is waited for: for `--join_seconds`. `tests/attacks/kills.py` interrupts
hosts that early, too.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soak_outcomes import Outcome
from soak_serve import HOST, ROOT, free_port

STEPS = 12
INTERRUPTIONS = 10  # of one run, before it may end
SECONDS_TO_END = 120.0  # for which an interrupted run may go on: a killed host is noticed at once
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)

ARCH = (
    "tiny-qwen2(num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=16)"
)
OPTIONS = ["numbers_min=2", "numbers_max=2", "value_max=9", "target_max=60", "format_score=0.3"]
SETTINGS = {
    "model.arch": ARCH,
    "task.options": OPTIONS,
    "rollout.num_prompts": 4,
    "rollout.group_size": 4,
    "rollout.max_prompt_tokens": 16,
    "rollout.max_new_tokens": 24,
    "rollout.num_slots": 32,
    "rollout.page_size": 8,
    "warm_start.steps": 60,
    "warm_start.lr": 2e-2,
    "warm_start.batch_size": 8,
    "warm_start.tries": 1,
    "train.microbatch_tokens": 256,
    "train.steps": STEPS,
    "train.checkpoint_every": 2,
    "train.logged_rollouts": 2,
    "optimizer.lr": 1e-3,
    "eval.problems": 16,
    "eval.samples": 2,
    "eval.every": 3,
    "mesh.data": 1,
    "mesh.fsdp": 2,
}


@dataclass(frozen=True)
class Ended:
    """How the two processes of a run ended."""

    statuses: list[int | None]  # None: the process had not ended, and was killed
    errors: list[str]  # what they wrote to stderr


def attack(directory: Path, deadline: float) -> Iterator[Outcome]:
    """Interrupts runs until `deadline`, at least one of them, and yields what came of it."""
    start = time.monotonic()
    ended = wait(launch(directory, "whole"), SECONDS_TO_END * 5)
    if ended.statuses != [0, 0]:
        yield Outcome("a run that nothing interrupts", failure=last_words(ended))
        return
    # From here on the programs are compiled: half of that time is about what a run takes.
    usual_seconds = (time.monotonic() - start) / 2
    number = 0
    while number == 0 or time.monotonic() < deadline:
        number += 1
        yield from interrupt_one_run(directory, f"run{number}", usual_seconds)


def interrupt_one_run(directory: Path, name: str, usual_seconds: float) -> Iterator[Outcome]:
    """Interrupts a run several times at random moments, lets it end, and compares it."""
    for _ in range(INTERRUPTIONS):
        processes = launch(directory, name)
        time.sleep(random.random() * usual_seconds)
        wait_until_joined(processes, directory / name)
        host, number = random.randrange(2), random.choice(SIGNALS)
        was_over = processes[host].poll() is not None
        processes[host].send_signal(number)
        ended = wait(processes, SECONDS_TO_END)
        if not was_over:
            yield Outcome(f"{number.name} to host {host}", failure=mistake(ended, host, number))

    ended = wait(launch(directory, name), SECONDS_TO_END * 5)
    failure = "" if ended.statuses == [0, 0] else last_words(ended)
    yield Outcome(
        f"{INTERRUPTIONS} interruptions of a run of two hosts",
        failure=failure or difference(directory / "whole", directory / name),
    )


def launch(directory: Path, name: str) -> list[subprocess.Popen[str]]:
    """Starts both processes of a run in `directory/name`."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(directory / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "jzero.main", f"--config={ROOT}/configs/countdown.py:tiny"]
    command += [f"--config.{setting}={value}" for setting, value in SETTINGS.items()]
    command += [f"--workdir={directory / name}", "--num_processes=2"]
    command += [f"--coordinator={HOST}:{free_port()}"]
    return [
        subprocess.Popen(
            [*command, f"--process_id={index}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def wait_until_joined(processes: list[subprocess.Popen[str]], workdir: Path) -> None:
    """Waits until a run holds the lock of its workdir, which it takes once its hosts have joined.

    Returns at once if a process has ended.
    """
    lock = workdir / "lock"
    while all(process.poll() is None for process in processes):
        text = lock.read_text(encoding="utf-8") if lock.exists() else ""
        if f'"pid": {processes[0].pid}}}' in text:
            return
        time.sleep(0.1)


def wait(processes: list[subprocess.Popen[str]], seconds: float) -> Ended:
    """Waits for both processes, and kills what has not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    statuses: list[int | None] = []
    errors = []
    for process in processes:
        try:
            _, stderr = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            statuses.append(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            _, stderr = process.communicate()
            statuses.append(None)
        errors.append(stderr)
    return Ended(statuses, errors)


def last_words(ended: Ended) -> str:
    """Returns the status of each host and the end of what it wrote to stderr."""
    words = []
    for index, (status, stderr) in enumerate(zip(ended.statuses, ended.errors, strict=True)):
        words.append(f"host {index} ended with status {status}: {stderr[-500:]}")
    return "\n".join(words)


def mistake(ended: Ended, host: int, number: signal.Signals) -> str:
    """Returns what was wrong with the end of a run that got a signal, "" if nothing was."""
    if None in ended.statuses:
        return f"host {ended.statuses.index(None)} had not ended after {SECONDS_TO_END:.0f} s"
    for index, (status, stderr) in enumerate(zip(ended.statuses, ended.errors, strict=True)):
        if "Traceback" in stderr or "stack trace" in stderr:
            return f"a traceback on host {index}: {stderr.strip().splitlines()[-1][:200]}"
        # Before Python has begun to listen, the signal ends its own process at once.
        if status not in (0, 1, -number):
            return f"host {index} ended with status {status}"
    return ""


def difference(expected: Path, got: Path) -> str:
    """Returns how the results of two runs differ, "" if they do not."""
    if metrics(expected) != metrics(got):
        return "the metrics differ"
    for name in ("samples.jsonl", f"export-{STEPS}/model.safetensors"):
        if (expected / name).read_bytes() != (got / name).read_bytes():
            return f"{name} differs"
    return ""


def metrics(workdir: Path) -> list[dict[str, float]]:
    """Returns the metrics of a run that do not depend on the clock."""
    lines = []
    for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        lines.append({name: value for name, value in values.items() if not is_timed(name)})
    return lines


def is_timed(name: str) -> bool:
    """Says whether a metric depends on the clock, or on what the process did before."""
    if name.startswith(("time/", "compile/", "memory/")) or name.endswith("tokens_per_second"):
        return True
    return name == "rollout/slot_utilization"  # hosts wait for each other
