"""Attacks every setting of the command line with hostile values, one setting at a time.

    python tests/attacks/hostile_settings.py                     # every value, up to the model
    python tests/attacks/hostile_settings.py --runs 160          # and 160 whole tiny runs
    python tests/attacks/hostile_settings.py --only rollout. --verbose
    python tests/attacks/hostile_settings.py --recipe sft --sample 300    # some, on another recipe

The settings are read from the schema, so that a new setting is attacked as soon as it exists. A
value is a flag of `jzero.main` on a tiny run in which its setting has an effect. It goes through
the command's own code: flags, checks, the arithmetic of the memory, the model, the trainer, the
decoder and the problems, up to the first program. A sample of the accepted values then makes whole
runs (--runs).

The table has the number of values by what came of them:

    refused     one line with `error: `, and status 2
    accepted    the run can start; a whole run ends with status 0 and finite metrics
    busy        a whole run that works and prints, and is not over at its limit
    traceback   any other exception, or more than one line, or metrics that are not finite
    hang        no end within the limit, or the process was killed, as for memory
    silent      an accepted value that is not the one in the run's settings, or a whole run that
                is not over at its limit and has printed nothing for SILENT_SECONDS

The exit status is 1 unless the last three are 0.
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from jzero import config

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
CASE_SECONDS = 20.0  # of one value up to the model
RUN_SECONDS = 150.0  # of a whole run
SILENT_SECONDS = 75.0  # without a word
START_SECONDS = 120.0  # of a process that checks values
WORKER_BYTES = 3 * GIB  # address space that checking may take beyond that of JAX
RUN_BYTES = 9 * GIB  # address space of a whole run
BAD = ("traceback", "hang", "silent")
KINDS = ("refused", "accepted", "busy", *BAD)

# A run that takes seconds. `attack_flags` adds to it what a setting needs to have an effect.
TINY = """
task.grade_workers=1 rollout.num_prompts=2 rollout.group_size=4 rollout.max_new_tokens=24
rollout.num_slots=8 rollout.page_size=8 warm_start.steps=1 warm_start.lr=2e-2
warm_start.batch_size=4 warm_start.tries=1 train.microbatch_tokens=256 train.steps=1
train.checkpoint_every=1 train.logged_rollouts=2 optimizer.lr=1e-3 eval.problems=2 eval.samples=1
eval.every=0
"""
TWO_NUMBERS = (
    "task.options=numbers_min=2 task.options=numbers_max=2 task.options=value_max=9 "
    "rollout.max_prompt_tokens=16"
)
# The recipes, with the settings that make their preset `tiny` a run of seconds, after TINY.
RECIPES = {
    "countdown": TWO_NUMBERS,
    "sft": f"{TWO_NUMBERS} sft.batch_size=4 sft.pack_length=64 train.steps=200",
    "guess": "task.options=value_max=3 rollout.max_prompt_tokens=16 rollout.max_episode_tokens=0 "
    "train.microbatch_tokens=2048",
    "calculator": "rollout.max_prompt_tokens=64 rollout.max_new_tokens=80 "
    "train.microbatch_tokens=2048 rollout.max_episode_tokens=0",
    "sums": "rollout.max_prompt_tokens=64 train.microbatch_tokens=1024",
    "code": "rollout.max_prompt_tokens=256 rollout.max_new_tokens=64 train.microbatch_tokens=2048",
}

ARCHITECTURE = {
    "num_hidden_layers": "1",
    "hidden_size": "16",
    "intermediate_size": "32",
    "num_attention_heads": "2",
    "num_key_value_heads": "1",
    "head_dim": "8",
}
# The entries of an architecture that an entry with a prefix needs to have an effect.
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": "4",
    "num_experts_per_tok": "2",
    "moe_intermediate_size": "16",
}
DELTA_NETS = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": "2",
    "full_attention_interval": "2",
}
ENTRIES = {
    "num_experts": EXPERTS,
    "moe_": EXPERTS,
    "norm_topk": EXPERTS,
    "linear_": DELTA_NETS,
    "full_attention_interval": DELTA_NETS,
    "partial_rotary_factor": DELTA_NETS,
}
ENTRY = "model.arch."  # begins the name of a case that is an entry of model.arch

# What the settings with a prefix need to have an effect; the longest prefix counts.
TEACHER_SERVER = "teacher=server teacher.url=http://localhost:9/v1 algorithm.distillation.coef=1"
CONTEXTS = {
    "model.adapter.": "model.adapter.rank=2",
    "model.base": "model.adapter.rank=2",
    "task.tools.": "task.tools.names=calculator rollout.max_turns=2 task.turn_reward=score",
    "task.turn_": "rollout.max_turns=2",
    "task.feedback": "rollout.max_turns=2",
    "task.stop_on_success": "rollout.max_turns=2",
    "rollout.max_reply_tokens": "rollout.max_turns=2",
    "rollout.placement.max_running_groups": "rollout.placement.max_staleness=1",
    "algorithm.kl.": "algorithm.kl.coef=0.1",
    "algorithm.reference_every": "algorithm.kl.coef=0.1",
    "algorithm.environment_coef": "rollout.max_turns=2",
    "critic.": "algorithm.advantage=gae",
    "teacher.url": "teacher=server algorithm.distillation.coef=1",
    "teacher.prompt": "teacher=policy algorithm.distillation.coef=1",
    "teacher.concurrency": TEACHER_SERVER,
    "teacher.seconds": TEACHER_SERVER,
    "teacher.retries": TEACHER_SERVER,
    "teacher.key_variable": TEACHER_SERVER,
    "task.reward.judge.": "task.reward.functions=judge "
    "task.reward.judge.url=http://localhost:9/v1 task.reward.judge.model=m",
    "task.reward.judge.url": "task.reward.functions=judge task.reward.judge.model=m",
    "train.prompt_epochs": "task.name=calculator",
    "sft.": "sft.data=countdown sft.batch_size=4 sft.pack_length=64",
}

# By the type of a setting: what a flag may say.
HOSTILE = {
    bool: ("maybe", "2", ""),
    int: ("-1", "0", "1", "1000000", "2147483647", "1000000000000", "9999999999999999999999", "x"),
    float: ("-1", "0", "nan", "inf", "1e39", "1e300", "-1e300", "1e-320", "x"),
    str: ("nonsense", "/nonexistent/x", "\udcff\u202e", "a" * 5000, "a" * 300, "\n", ",", ""),
    object: ("nonsense", "clip(", "clip(low=-1)", "none", "", "a" * 5000),
    tuple: ("x", "", "-1", "nan", "1e400", "(1,'a')", "(('a',),)", "a" * 5000, "1e300,0"),
}


@dataclass(frozen=True)
class Case:
    """A setting and what a flag says of it."""

    name: str
    value: str
    recipe: str = "countdown"

    @property
    def flags(self) -> list[str]:
        """Returns the arguments of `jzero.main`, without a workdir."""
        prefixes = [prefix for prefix in CONTEXTS if self.name.startswith(prefix)]
        context = CONTEXTS[max(prefixes, key=len)] if prefixes else ""
        # Arguments of a part would choose the part again.
        run = f"{TINY} {RECIPES[self.recipe]}".split()
        tiny = [flag for flag in run if not flag.startswith(f"{self.name}.")]
        settings = [*tiny, f"model.arch={self.architecture}", *context.split()]
        if not self.name.startswith(ENTRY):
            settings.append(f"{self.name}={self.value}")
        config = f"--config={ROOT / 'configs' / self.recipe}.py:tiny"
        return [config, *(f"--config.{setting}" for setting in settings)]

    @property
    def architecture(self) -> str:
        """Returns the value of model.arch: a tiny model in which the setting has an effect."""
        entries = dict(ARCHITECTURE)
        if self.name == "rollout.routing_replay":
            entries |= EXPERTS
        if self.name.startswith(ENTRY):
            entry = self.name.removeprefix(ENTRY)
            for prefix, needed in ENTRIES.items():
                entries |= needed if entry.startswith(prefix) else {}
            entries[entry] = self.value
        arguments = ",".join(f"{name}={value}" for name, value in entries.items())
        return f"tiny-qwen2({arguments})"

    def __str__(self) -> str:
        return f"{self.name}={self.value[:40]!r}"


@dataclass(frozen=True)
class Outcome:
    """What came of a value: a key of the table, and the last line that was printed."""

    kind: str
    line: str = ""


def all_cases(recipe: str = "countdown") -> list[Case]:
    """Returns every setting of the schema with the hostile values of its type."""
    from jzero import config
    from jzero.config.architecture import Architecture
    from jzero.config.schema import walk
    from jzero.fields import kind_of

    settings = [
        *config.list_settings(config.Config()),
        *walk(Architecture(), "model.arch."),
        *walk(config.JudgeServer(), "task.reward.judge."),
        *walk(config.WarmStart(), "warm_start."),
        *walk(config.Sft(), "sft."),
        *walk(config.Checkpoint(), "train.resume_from."),
    ]
    cases = []
    for setting in settings:
        values = list(HOSTILE[kind_of(setting.field)])
        if isinstance(setting.value, bool):
            values.append(str(not setting.value))
        cases += [Case(setting.name, value, recipe) for value in values]
    return cases


# -- One value, in this process --------------------------------------------------------------------


def check_value(case: Case, workdir: Path) -> Outcome:
    """Takes a value through the command, up to its first program."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            settings = start_run(case.flags, workdir)
    except SystemExit as exit:
        return outcome_of_exit(exit.code, errors.getvalue())
    except Exception as error:
        return Outcome("traceback", "".join(traceback.format_exception(error))[-1500:])
    return check_taken(case, settings)


def check_taken(case: Case, settings: "config.Config") -> Outcome:
    """Returns "accepted" if a run's settings have the value of the flag, and else "silent"."""
    from jzero import config
    from jzero.fields import help_of, kind_of, show_part

    found = [item for item in config.list_settings(settings) if item.name == case.name]
    if not found:  # an entry of model.arch
        return Outcome("accepted")
    setting, value = found[0], found[0].value
    help_text = help_of(setting.field)
    is_taken = {
        bool: lambda: str(value) == case.value or case.value == "",
        # A size of 0 is replaced by what fits, if its help says what 0 means.
        int: lambda: value == int(case.value) or (not int(case.value) and "0:" in help_text),
        float: lambda: value == float(case.value),
        str: lambda: str(value) == case.value,
        # A flag without a value empties the tuple.
        object: lambda: show_part(value).startswith(case.value),
        tuple: lambda: any(cast(tuple, value)) == bool(case.value.strip("()")),
    }
    if is_taken[kind_of(setting.field)]():
        return Outcome("accepted")
    return Outcome("silent", f"{case.name} is {str(value)[:80]!r}")


def outcome_of_exit(code: object, errors: str) -> Outcome:
    """Returns what came of a process that ended: its status, and what it wrote to stderr."""
    lines = [line for line in errors.replace("\r", "\n").split("\n") if line.strip()]
    last = lines[-1] if lines else ""
    if code == 0:
        return Outcome("accepted")
    if code == 2 and len(lines) == 1 and last.startswith("error: "):
        return Outcome("refused", last)
    return Outcome("traceback", f"status {code}: {errors[-1500:]}")


def start_run(flags: Sequence[str], workdir: Path) -> "config.Config":
    """Does what `jzero.main` does before its first program, in its order; returns the settings."""
    from jzero import cli, main
    from jzero.loops import sft
    from jzero.loops.rl import set_up
    from jzero.setup import evaluation_problems, resolve
    from jzero.workers.pool import Pool

    settings = main.parse([*flags, f"--workdir={workdir}"]).settings
    with cli.user_errors():
        if settings.sft is not None:
            resolved, _ = sft.set_up(settings, workdir)
            return resolved.config
        resolved = resolve(settings, workdir)
        with Pool(0) as pool:
            run, _ = set_up(resolved, workdir, pool)
            evaluation_problems(run)
    return resolved.config


def work() -> None:
    """Checks the values that arrive as JSON lines, and answers each with a line."""
    from jzero import cli

    sys.path.insert(0, str(ROOT))
    cli.start_jax([])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with tempfile.TemporaryDirectory() as folder:
        check_value(Case("name", "warm"), Path(folder) / "warm")  # imports everything
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + WORKER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print("ready", file=answers, flush=True)
        for number, line in enumerate(sys.stdin):
            outcome = check_value(Case(*json.loads(line)), Path(folder) / str(number))
            print(json.dumps([outcome.kind, outcome.line]), file=answers, flush=True)


# -- All values, in processes that may be killed ---------------------------------------------------


class Worker:
    """A process that checks values, and is replaced when it hangs or dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def check(self, case: Case) -> Outcome:
        """Returns what comes of a value, within CASE_SECONDS."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([case.name, case.value, case.recipe]) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is missing, too
        began = time.monotonic()
        answer = self._read(CASE_SECONDS)
        if answer:
            return Outcome(*json.loads(answer))
        status = self.close()
        seconds = time.monotonic() - began
        return Outcome("hang", f"no answer after {seconds:.0f} s, status {status}")

    def close(self) -> int | None:
        """Ends the process. Returns its status if it had ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return None
        status = process.poll()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return status

    def _start(self) -> subprocess.Popen:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert self._read(START_SECONDS).strip() == "ready", "the process did not start"
        return self._process

    def _read(self, seconds: float) -> str:
        """Returns the next line of the process, or "" if it ends or takes too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(seconds) else ""


def environment() -> dict[str, str]:
    """Returns the environment of the processes: one CPU device, and no network."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }


def check_all(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Yields what comes of every value, up to the first program."""
    with contextlib.closing(Worker()) as worker:
        for case in cases:
            yield case, worker.check(case)


# -- Whole runs ------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Limits the address space of a process that is about to start a run."""
    resource.setrlimit(resource.RLIMIT_AS, (RUN_BYTES, RUN_BYTES))


def run_whole(case: Case, folder: Path, seconds: float = RUN_SECONDS) -> Outcome:
    """Runs `jzero.main` with a value, and returns what came of it."""
    workdir, log = folder / "run", folder / "log.txt"
    programs = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jzero.main", *case.flags, f"--workdir={workdir}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | programs,
            cwd=ROOT,
            preexec_fn=limit_memory,
            start_new_session=True,
        )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        silence = time.time() - log.stat().st_mtime
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kind = "busy" if silence < SILENT_SECONDS else "silent"
        return Outcome(kind, f"not over after {seconds:.0f} s, silent for {silence:.0f} s")
    printed = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in printed.replace("\r", "\n").split("\n") if line.strip()]
    last = lines[-1] if lines else ""
    if status == 2 and last.startswith("error: ") and "Traceback" not in printed:
        return Outcome("refused", last)
    if status != 0:
        return Outcome("hang" if status < 0 else "traceback", f"status {status}: {printed[-1500:]}")
    return check_metrics(workdir / "metrics.jsonl")


def check_metrics(path: Path) -> Outcome:
    """Returns "accepted" if all metrics of a run are finite."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wrong = {name for row in rows for name, value in row.items() if not is_finite(value)}
    if wrong:
        return Outcome("traceback", f"not finite: {', '.join(sorted(wrong))}")
    return Outcome("accepted")


def is_finite(value: object) -> bool:
    """Returns whether a value of a row is no number, or a finite one."""
    return not isinstance(value, float) or math.isfinite(value)


def run_sample(cases: Sequence[Case], number: int, seed: int) -> Iterator[tuple[Case, Outcome]]:
    """Yields what comes of whole runs of so many of the cases."""
    chosen = random.Random(seed).sample(list(cases), min(number, len(cases)))
    with tempfile.TemporaryDirectory() as name:
        for index, case in enumerate(chosen):
            folder = Path(name) / str(index)
            folder.mkdir()
            yield case, run_whole(case, folder)
            shutil.rmtree(folder)


# -- The table -------------------------------------------------------------------------------------


def print_table(title: str, counts: Counter[str]) -> None:
    """Prints the number of values by what came of them."""
    numbers = "  ".join(f"{kind} {counts[kind]}" for kind in KINDS if kind in counts or kind in BAD)
    print(f"{title}: {counts.total()} values  {numbers}", flush=True)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="settings whose name begins so")
    parser.add_argument("--recipe", default="countdown", choices=RECIPES, help="whose run it is")
    parser.add_argument("--sample", type=int, default=0, help="number of values; 0: all")
    parser.add_argument("--verbose", action="store_true", help="print every value")
    parser.add_argument("--runs", type=int, default=0, help="whole runs of accepted values")
    parser.add_argument("--seed", type=int, default=0, help="of --sample and the whole runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    cases = [case for case in all_cases(options.recipe) if case.name.startswith(options.only)]
    if options.sample:
        chosen = random.Random(options.seed).sample(range(len(cases)), options.sample)
        cases = [cases[index] for index in sorted(chosen)]
    settings = {case.name for case in cases}
    accepted: list[Case] = []
    is_bad = False
    stages = {f"{len(settings)} settings, up to the model": check_all(cases)}
    if options.runs:
        stages["whole runs"] = run_sample(accepted, options.runs, options.seed)
    for title, outcomes in stages.items():
        counts: Counter[str] = Counter()
        for case, outcome in outcomes:
            counts[outcome.kind] += 1
            if outcome.kind == "accepted" and title != "whole runs":
                accepted.append(case)
            if options.verbose or outcome.kind in BAD:
                print(f"{outcome.kind:10}{case}: {outcome.line}", flush=True)
        print_table(title, counts)
        is_bad = is_bad or any(counts[kind] for kind in BAD)
    sys.exit(1 if is_bad else 0)


if __name__ == "__main__":
    main()
