"""Measures jzero on a real model beside transformers and TRL: seconds, processor seconds, memory.

    pip install -e '.[peer]'
    python benchmarks/real.py MODEL_DIR --data DIR [--only sums --only serve] [--peer PYTHON]

DIR holds GSM8K's train.jsonl and test.jsonl; the model has a chat format, and is small enough for
this machine. --peer is an interpreter with PyTorch, transformers and TRL, by default this one;
`--peer none` measures jzero alone. The rows of the table:

    evaluate   greedy answers of at most 128 tokens to 64 questions of GSM8K, a whole process
               each: `jzero evaluate`, and `generate` of transformers in batches of 32
    gsm8k      an RL step of 4 questions with 8 answers of at most 64 tokens, whose reward is the
               parity of their length
    sums       an RL step of configs/sums.py: 16 problems with 16 answers of at most 8 tokens
    lora       the same with an adapter
    serve      tokens a second of `jzero.serve` for 1 and for 16 requests at a time, after as many
               others, which compile

A step is the median of those after the first; TRL does the same steps (`trl_grpo.py`). Memory is
the peak of the main process. Shares of the peak are of the machine's own product of two matrices,
measured at the start, and count the products of the update's tokens forward and backward. Run it
on a machine that does nothing else, and compare only within one run.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jzero.planning.models import architecture
from jzero.planning.roofline import FORWARD_AND_BACKWARD, matmul_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS, NEW_TOKENS, BATCH = 64, 128, 32  # of an evaluation
SERVED_TOKENS = 64
LIMIT_SECONDS = 1800.0  # of a process
POLL_SECONDS = 0.05
GIBIBYTE = 2**30


@dataclass
class Process:
    """What a process took."""

    seconds: float
    processor_seconds: float
    peak_gib: float
    output: str


@dataclass
class Step:
    """A step of a run, with the median of each figure."""

    seconds: float
    processor_seconds: float
    peak_gib: float
    first_seconds: float
    gemm_share: float | None = None
    padding: float | None = None


def machine_peaks(size: int = 4096, repeat: int = 5) -> tuple[float, float]:
    """Returns the FLOP/s of a product in fp32 and the bytes/s of a copy, the best of `repeat`."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    source = np.ones(1 << 26, np.float32)
    target = np.empty_like(source)

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    product = best(lambda: np.matmul(left, right))
    copy = best(lambda: np.copyto(target, source))
    return 2 * size**3 / product, 2 * source.nbytes / copy


# Processes ----------------------------------------------------------------------------------------


def start(command: list[str], log: Path) -> subprocess.Popen:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen, log: Path, started: float) -> Process:
    """Waits for a process. A failure ends this script with the last lines of its output."""
    timer = threading.Timer(LIMIT_SECONDS, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        last = "\n".join(output.splitlines()[-5:])
        sys.exit(f"error: {process.args} ended with {process.returncode}:\n{last}")
    processor = usage.ru_utime + usage.ru_stime
    return Process(seconds, processor, usage.ru_maxrss * 1024 / GIBIBYTE, output)


def run(command: list[str], log: Path) -> Process:
    started = time.perf_counter()
    return finish(start(command, log), log, started)


def processor_seconds(pid: int) -> float:
    """Returns the processor seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# RL steps -----------------------------------------------------------------------------------------


def jzero_steps(flags: list[str], workdir: Path, model: str, peak: float) -> Step:
    """Runs `jzero.main` and returns the median step after the first."""
    log = workdir.with_suffix(".log")
    command = [sys.executable, "-m", "jzero.main", f"--workdir={workdir}", *flags]
    started = time.perf_counter()
    process = start(command, log)
    metrics, marks = workdir / "metrics.jsonl", [0.0]

    def watch() -> None:
        """Notes the processor seconds at the end of each step."""
        while process.returncode is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            while len(marks) <= lines:
                marks.append(processor_seconds(process.pid))
            time.sleep(POLL_SECONDS)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    whole = finish(process, log, started)
    watcher.join()
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [(row, marks[i + 1] - marks[i]) for i, row in enumerate(rows) if "time/update" in row]
    later = steps[1:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row, _ in later)

    config = architecture(model)
    head = 2 * config.vocab_size * config.hidden_size
    shares = []
    for row, _ in later:
        trained = row["rollout/tokens"] * (1 - row["update/left_out"])
        body = (matmul_flops_per_token(config) - head) * row["update/tokens"]
        flops = FORWARD_AND_BACKWARD * (body + head * trained)
        shares.append(flops / row["time/update"] / peak)
    return Step(
        median("time/step"),
        statistics.median(processor for _, processor in later),
        whole.peak_gib,
        steps[0][0]["time/step"],
        statistics.median(shares),
        median("update/padding"),
    )


def trl_steps(peer: str, model: str, flags: list[str], log: Path) -> Step:
    command = [peer, str(ROOT / "benchmarks/trl_grpo.py"), model, "--cpu", *flags]
    row = json.loads(run(command, log).output.splitlines()[-1])
    names = ("median_step_s", "median_step_processor_s", "peak_gib", "first_step_s")
    return Step(*(row[name] for name in names))


def steps_of(kind: str, args: argparse.Namespace, folder: Path, peak: float) -> None:
    """Prints the rows of an RL step."""
    count = args.steps
    quiet = ["--config.eval.problems=0", "--config.eval.every=0"]
    quiet += [f"--config.train.steps={count}", f"--config.train.checkpoint_every={10 * count}"]
    if kind == "gsm8k":
        flags = ["--config=configs/gsm8k.py:smollm2-135m", f"--config.task.data={args.data}"]
        flags += ["--config.rollout.num_prompts=4", "--config.rollout.group_size=8"]
        flags += ["--config.rollout.max_new_tokens=64", "--config.train.packs_per_row=8"]
        flags += [f"--config.train.microbatch_tokens={256 + 8 * 64}"]  # a group
        # The model solves next to nothing, and groups of equal scores would be left out.
        flags.append(f"--config.task.reward.functions={ROOT / 'benchmarks/trl_grpo.py'}:odd_length")
        peer_flags = ["--task=gsm8k", f"--data={args.data}", "--problems=4", "--answers=8"]
        peer_flags += ["--longest=64", "--odd"]
    else:
        suffix = "-lora" if kind == "lora" else ""
        flags = [f"--config=configs/sums.py:smollm2-135m{suffix}"]
        peer_flags = ["--parts=4"]  # all at once take 20 GiB
    flags += [f"--config.model.path={args.model}", *quiet]
    step = jzero_steps(flags, folder / kind, args.model, peak)
    show_step(f"{kind}, jzero", step)
    if args.peer != "none" and kind != "lora":
        peer_flags.append(f"--steps={count}")
        theirs = trl_steps(args.peer, args.model, peer_flags, folder / f"{kind}-trl.log")
        show_step(f"{kind}, TRL", theirs, step)


def show_step(name: str, step: Step, ours: Step | None = None) -> None:
    show(name, step.seconds, step.processor_seconds, step.peak_gib, ours and ours.seconds)
    note = f"first step {step.first_seconds:.1f} s"
    if step.gemm_share is not None:
        note += f", update at {step.gemm_share:.0%} of the peak, padding {step.padding:.0%}"
    print(f"    {note}", flush=True)


def show(
    name: str, seconds: float, processor: float, peak_gib: float, ours: float | None = None
) -> None:
    ratio = f"{seconds / ours:.2f}" if ours else ""
    print(f"{name:24}{seconds:>9.2f}{processor:>11.1f}{peak_gib:>10.2f}{ratio:>9}", flush=True)


# Evaluation ---------------------------------------------------------------------------------------


def generate_with_transformers(model_dir: str, questions: Path) -> None:
    """Answers the questions greedily, in batches. The process of the peer."""
    # Not for jzero itself: PyTorch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lines = questions.read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["problem"]}] for line in lines]
    num_tokens = 0
    begin = time.perf_counter()
    for first in range(0, len(chats), BATCH):
        tokens = tokenizer.apply_chat_template(
            chats[first : first + BATCH],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            answers = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers = answers[:, tokens["input_ids"].shape[1] :]
        num_tokens += int((answers != tokenizer.pad_token_id).sum())
    print(f"{num_tokens} tokens, {time.perf_counter() - begin:.2f} s")


def evaluations(args: argparse.Namespace, folder: Path) -> None:
    """Prints the rows of an evaluation: whole processes, so with imports and compilation."""
    questions = folder / "questions.jsonl"
    lines = Path(args.data, "test.jsonl").read_text(encoding="utf-8").splitlines()
    questions.write_text("".join(line + "\n" for line in lines[:QUESTIONS]), encoding="utf-8")
    command = [sys.executable, "-m", "jzero", "evaluate", f"--model={args.model}"]
    command += [f"--suite=gsm8k={questions}", f"--out={folder / 'evaluation'}"]
    command += ["--config.task.template=chat", "--config.model.dtype=float32"]
    command += [f"--config.rollout.max_new_tokens={NEW_TOKENS}"]
    ours = run(command, folder / "evaluate.log")
    show("evaluate, jzero", ours.seconds, ours.processor_seconds, ours.peak_gib)
    again = run([*command, f"--out={folder / 'again'}"], folder / "again.log")
    show("  with compiled programs", again.seconds, again.processor_seconds, again.peak_gib)
    if args.peer != "none":
        command = [args.peer, __file__, args.model, f"--data={args.data}", f"--child={questions}"]
        theirs = run(command, folder / "generate.log")
        show(
            "evaluate, transformers",
            theirs.seconds,
            theirs.processor_seconds,
            theirs.peak_gib,
            ours.seconds,
        )
        print(f"    in generate: {theirs.output.splitlines()[-1]}", flush=True)


# Serving ------------------------------------------------------------------------------------------


def serving(args: argparse.Namespace, folder: Path) -> None:
    """Prints the tokens a second of the server, and its peak memory."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = folder / "serve.log"
    command = [sys.executable, "-m", "jzero.serve", f"--model={args.model}", f"--port={port}"]
    command.append("--served-model-name=model")
    started = time.perf_counter()
    process = start([*command, "--config.model.dtype=float32"], log)
    address = f"http://127.0.0.1:{port}"
    lines = Path(args.data, "test.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["problem"] for line in lines[:64]]

    def answer(question: str) -> int:
        """Returns the number of tokens of an answer."""
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": SERVED_TOKENS,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as reply:
            return json.loads(reply.read(1 << 20))["usage"]["completion_tokens"]

    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read(1 << 16)
                break
            except OSError:
                is_late = time.perf_counter() - started > LIMIT_SECONDS
                if process.poll() is not None or is_late:
                    sys.exit(f"error: the server did not start: {log.read_text()[-500:]}")
                time.sleep(0.2)
        idle = resident_gib(process.pid)
        ready = time.perf_counter() - started
        for concurrent, count in ((1, 4), (16, 32)):
            with ThreadPoolExecutor(concurrent) as threads:  # compiles
                list(threads.map(answer, questions[-count:]))
            before, begin = processor_seconds(process.pid), time.perf_counter()
            with ThreadPoolExecutor(concurrent) as threads:
                num_tokens = sum(threads.map(answer, questions[:count]))
            seconds = time.perf_counter() - begin
            processor = processor_seconds(process.pid) - before
            show(f"serve, {concurrent} at a time", seconds, processor, peak_gib(process.pid))
            print(f"    {num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s", flush=True)
        print(f"    ready after {ready:.1f} s, idle {idle:.2f} GiB", flush=True)
    finally:
        process.terminate()
        process.wait(60)


def status_gib(pid: int, name: str) -> float:
    """Returns a line of /proc/PID/status that is in kB."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert match, f"{name=} {text=}"
    return int(match[1]) * 1024 / GIBIBYTE


def resident_gib(pid: int) -> float:
    return status_gib(pid, "VmRSS")


def peak_gib(pid: int) -> float:
    return status_gib(pid, "VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("evaluate", "gsm8k", "sums", "lora", "serve")
    parser.add_argument("model", help="directory of a model with a chat format")
    parser.add_argument("--data", required=True, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--only", action="append", choices=kinds, help="may be repeated")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peer", default=sys.executable, help="an interpreter, or none")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        generate_with_transformers(args.model, args.child)
        return

    flops, copied = machine_peaks()
    print(f"{os.cpu_count()} processors, a product {flops / 1e9:.0f} GFLOP/s, ", end="")
    print(f"a copy {copied / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'seconds':>9}{'processor':>11}{'peak GiB':>10}{'ratio':>9}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Of this run alone: the first process compiles its programs.
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for kind in args.only or kinds:
            if kind == "evaluate":
                evaluations(args, folder)
            elif kind == "serve":
                serving(args, folder)
            else:
                steps_of(kind, args, folder, flops)


if __name__ == "__main__":
    main()
