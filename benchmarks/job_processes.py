"""The processes of a run with rollout.placement=jobs on one machine, for benchmarks."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS_TO_END = 60.0  # for a sampler after the last step


class SamplerError(Exception):
    """A sampler ended with an error while its run needed it."""


def run_with_samplers(
    trainer: Sequence[str],
    samplers: Sequence[Sequence[str]],
    logs: Path,
) -> None:
    """Runs the commands of a trainer and of its samplers until all of them have ended.

    `logs` is the folder for the output of the samplers, sampler-0.log and so on.

    Raises:
        subprocess.CalledProcessError: The trainer failed.
        SamplerError: A sampler failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    training = subprocess.Popen(trainer, cwd=ROOT)
    try:
        for number, command in enumerate(samplers):
            with (logs / f"sampler-{number}.log").open("wb") as file:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
                )
        while training.poll() is None:
            check(processes, logs)
            time.sleep(0.1)
        if training.returncode:
            raise subprocess.CalledProcessError(training.returncode, trainer)
        # They read in the store that the run has ended.
        for process in processes:
            process.wait(SECONDS_TO_END)
        check(processes, logs)
    finally:
        for process in [training, *processes]:
            if process.poll() is None:
                process.kill()
                process.wait()


def check(samplers: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Raises SamplerError if a sampler has failed: the trainer would wait forever."""
    for number, process in enumerate(samplers):
        if process.poll() not in (None, 0):
            raise SamplerError(f"sampler {number} failed: see {logs}/sampler-{number}.log")


def sampler_command(store: Path) -> list[str]:
    """Returns the command of a sampler of the run with this store."""
    programs = store.with_name("programs")  # the samplers compile the same ones
    return [sys.executable, "-m", "jzero.sample", f"--join={store}", f"--programs={programs}"]
