"""What the stages run: the benchmarks beside this folder, at shapes of an NVIDIA GPU or tiny."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.running import Job
from benchmarks.gpu.tiny_model import write_tiny_model

TINY_MODEL = ("--dtype=float32", "--repeat=1")
TINY_DECODE = (*TINY_MODEL, "--slots", "4", "--prompt=16", "--new=80")
TINY_UPDATE = (*TINY_MODEL, "--sequences=16", "--prompt=16", "--new=48")
# From large to small in worth: model, sequences at once.
DECODE = (
    ("Qwen2.5-3B", ("64", "256", "512")),
    ("Qwen2.5-7B", ("64", "256")),
    ("Qwen2.5-1.5B", ("64", "256", "1024")),
    ("Qwen2.5-0.5B", ("64", "256", "1024")),
)
# Model, rows in a microbatch, remat.
UPDATE = (
    ("Qwen2.5-3B", 4, "dots"),
    ("Qwen2.5-1.5B", 8, "dots"),
    ("Qwen2.5-0.5B", 8, "dots"),
    ("Qwen2.5-3B", 4, "full"),
    ("Qwen2.5-1.5B", 8, "full"),
    ("Qwen2.5-7B", 2, "full"),
)
# Rows of a product of Qwen3-30B-A3B's experts: those of 2,048 tokens.
EXPERTS = ("--rows=16384", "--experts=128", "--inputs=2048", "--outputs=768", "--dtype=bfloat16")
EXPERTS_TINY = ("--rows=64", "--experts=4", "--inputs=16", "--outputs=16", "--repeat=1")


def benchmark(name: str, *arguments: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py", *arguments]


def tests(scratch: Path, is_tiny: bool) -> list[Job]:
    mark = ["-k", "cpu and packed"] if is_tiny else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-s", *mark, "tests/device"]
    shape = EXPERTS_TINY if is_tiny else EXPERTS
    return [Job("tests", 480, command), Job("experts", 80, benchmark("experts", *shape))]


def decode(scratch: Path, is_tiny: bool) -> list[Job]:
    if is_tiny:
        model = write_tiny_model(scratch / "tiny")
        return [Job("decode tiny", 120, benchmark("decode", f"--model={model}", *TINY_DECODE))]
    return [
        Job(f"decode {model}", 180, benchmark("decode", f"--model={model}", "--slots", *slots))
        for model, slots in DECODE
    ]


def update(scratch: Path, is_tiny: bool) -> list[Job]:
    if is_tiny:
        model = write_tiny_model(scratch / "tiny")
        return [Job("update tiny", 120, benchmark("update", f"--model={model}", *TINY_UPDATE))]
    jobs = []
    for model, rows, remat in UPDATE:
        arguments = (f"--model={model}", f"--rows={rows}", f"--remat={remat}", "--repeat=2")
        jobs.append(Job(f"update {model} {remat}", 150, benchmark("update", *arguments)))
    return jobs


def recipe(scratch: Path, is_tiny: bool) -> list[Job]:
    changes = {
        "warm_start.steps": 2,
        "train.steps": 1,
        "rollout.num_prompts": 4,
        "rollout.group_size": 4,
        "rollout.num_slots": 16,
        "eval.problems": 0,
        "eval.every": 0,
    }
    flags = [f"--config.{name}={value}" for name, value in changes.items()] if is_tiny else []
    workdir = scratch / "countdown"
    train = [sys.executable, "-m", "jzero.main", "--config=configs/countdown.py:tiny", *flags]
    show = [sys.executable, "-m", "benchmarks.gpu.metrics", str(workdir)]
    return [Job("countdown", 540, [*train, f"--workdir={workdir}"]), Job("metrics", 20, show)]


def profile(scratch: Path, is_tiny: bool) -> list[Job]:
    traced = [sys.executable, "-m", "benchmarks.gpu.profile"]
    if is_tiny:
        model = write_tiny_model(scratch / "tiny")
        command = [*traced, "decode", f"--model={model}", *TINY_DECODE]
        return [Job("profile decode tiny", 120, command)]
    of_decode = ["--slots", "256", "--new=128"]
    of_update = ["--sequences=16", "--rows=4"]
    return [
        Job("profile decode 3B", 180, [*traced, "decode", "--model=Qwen2.5-3B", *of_decode]),
        Job("profile update 3B", 180, [*traced, "update", "--model=Qwen2.5-3B", *of_update]),
        Job("profile decode 0.5B", 120, [*traced, "decode", "--model=Qwen2.5-0.5B", *of_decode]),
    ]


STAGES: dict[str, Callable[[Path, bool], list[Job]]] = {
    "tests": tests,
    "decode": decode,
    "update": update,
    "recipe": recipe,
    "profile": profile,
}


def jobs_of(stage: str, scratch: Path, is_tiny: bool) -> list[Job]:
    """Returns the jobs of a stage, in their order. They keep their files in `scratch`."""
    return STAGES[stage](scratch, is_tiny)
