"""Plays hostile environments and rewards, and counts what became of them.

    python tests/attacks/hostile_episodes.py              # the pool, in both modes, and whole runs
    python tests/attacks/hostile_episodes.py --no-runs    # without whole runs of a tiny model
    python tests/attacks/hostile_episodes.py --only SystemExit --only daemon

Each kind of hostile_environment.py is an episode between honest ones: in grader processes, in the
event loop, and as a reward function. A kind is fine if it is played or fails as it should, with one
line as its reason, while the honest episodes are played. The table counts what is not fine:

    tracebacks   exceptions that left the pool, or that a process printed
    hangs        episodes without a grade after the time limit
    silent       kinds that were played although they should fail, or ended without a line
    wrong        other reasons than expected, honest episodes that failed, replies that JSON changes
    left         processes that outlive the process that played

The whole runs print the most memory that the main process had, with replies of 50 MB in a third of
the episodes and with replies of one letter. The command exits with status 1 unless all counts are
0. It caps the memory of what it starts. A kind that would stop or end the run in the event loop
has a process of its own there: the process has to end with a line.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jzero.config import RewardConfig, TaskConfig, turns
from jzero.errors import UserError
from jzero.rollout.turns import make_request
from jzero.types import Grade, JsonValue, Problem
from jzero.workers.pool import Pool

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
FILE = FOLDER / "hostile_environment.py"
sys.path.insert(0, str(FOLDER))

import hostile_environment as hostile  # noqa: E402  # pyright: ignore[reportMissingImports]

TOKEN = "JZERO_ATTACK"  # a variable that everything that is started here inherits
SECONDS = 2.0  # of one call
# Kinds whose effect depends on the process, so that they may fail when they are built again.
UNSTEADY = ("parent", "closed streams", "no ", "thread", "event loop", "task")
ADDRESS_SPACE = 12 << 30  # of a process that plays in the event loop, which loads JAX
LIMIT = 420.0  # seconds for a process that plays many kinds
LIMIT_OF_ONE = 60.0
COUNTS = ("tracebacks", "hangs", "silent", "wrong", "left")


@dataclass
class Table:
    """What was played, and the names of what was not fine."""

    what: str
    num_played: int = 0
    seconds: float = 0.0
    bad: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in COUNTS})

    def show(self) -> None:
        counts = "  ".join(f"{name} {len(kinds)}" for name, kinds in self.bad.items())
        print(f"{self.what:<28} kinds {self.num_played:>3}  {counts}  {self.seconds:.0f} s")
        for name, kinds in self.bad.items():
            for kind in kinds:
                print(f"    {name}: {kind}")
        sys.stdout.flush()

    @property
    def is_fine(self) -> bool:
        return self.num_played > 0 and not any(self.bad.values())


# In the process that plays.


class Way(NamedTuple):
    """A way to play the kinds."""

    mode: str  # task.environment_mode
    environment: str
    functions: tuple[str, ...]


WAYS = {
    "processes": Way("processes", f"{FILE}:Hostile", ("accuracy",)),
    "asyncio": Way("asyncio", f"{FILE}:AsyncHostile", ("accuracy",)),
    "rewards": Way("processes", f"{FILE}:Quiet", ("accuracy", f"{FILE}:hostile_reward")),
}


class QuietPool(Pool):
    """A pool that shows no tracebacks of user-defined code: all that are printed are jzero's."""

    def show_note(self, function: str, kind: str, text: str) -> None:
        self.longest_note = max(getattr(self, "longest_note", 0), len(text))


def settings(way: Way) -> TaskConfig:
    return TaskConfig(
        name="environment",
        template="plain",
        turn_reward=turns.Score(),
        environment=way.environment,
        environment_mode=way.mode,
        reward=RewardConfig(functions=way.functions, seconds=SECONDS, memory_gib=1.0),
    )


def submit(pool: Pool, task: TaskConfig, key: str, earlier: list[tuple[str, Grade | None]]) -> None:
    """Submits a turn of the episode of a kind; a key such as "honest 3" is of no kind."""
    row: dict[str, JsonValue] = {"kind": key}
    gold = {"row": row, "seed": 0, "observation": hostile.OBSERVATION}
    problem = Problem(key, "environment", hostile.OBSERVATION, gold, row)
    pool.step(key, make_request(problem, 0, "a response", earlier, task, is_last=False))


def poll(pool: Pool, count: int, limit: float) -> dict[str, Grade]:
    """Returns the grades that come within a limit."""
    grades: dict[str, Grade] = {}
    deadline = time.monotonic() + limit
    while len(grades) < count and time.monotonic() < deadline:
        for key, grade in pool.poll():
            grades[str(key)] = grade
        time.sleep(0.01)
    return grades


def play(way: Way, kinds: Sequence[str]) -> None:
    """Plays kinds between honest episodes, and prints a line of JSON for each grade."""
    task = settings(way)
    honest = [f"honest {number}" for number in range(len(kinds) + 1)]
    workers = 2 if way.mode == "processes" else 0
    with QuietPool(workers, max_processes=100) as pool:
        submit(pool, task, honest[0], [])
        for kind, key in zip(kinds, honest[1:], strict=True):
            submit(pool, task, kind, [])
            submit(pool, task, key, [])
        grades = poll(pool, 2 * len(kinds) + 1, LIMIT if len(kinds) > 1 else LIMIT_OF_ONE)
    for key, grade in grades.items():
        print(json.dumps({"key": key, "grade": vars(grade)}))
    # Episodes that are built again, in other processes, have to be the same to the letter.
    if len(kinds) > 1:
        played = [
            kind
            for kind in kinds
            if kind in grades
            and not grades[kind].failed
            and not any(word in kind for word in UNSTEADY)
        ]
        with QuietPool(workers) as pool:
            for kind in played:
                submit(pool, task, kind, [("a response", grades[kind])])
            again = poll(pool, len(played), LIMIT)
        for kind in played:
            reason = again[kind].reason if kind in again else "no grade"
            if kind not in again or again[kind].failed:
                print(json.dumps({"again": kind, "reason": reason}))
    sys.stdout.flush()


# In the process that counts.


def processes_with(token: str) -> list[int]:
    """Returns the processes that inherited a token, and have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{TOKEN}={token}".encode() in environment.split(b"\0") and state != "Z":
            found.append(int(folder.name))
    return found


def left_behind(token: str, seconds: float = 10.0) -> list[int]:
    """Returns the processes that are left of an ended process after some seconds; ends them."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    return left


class Ended(NamedTuple):
    status: int | None  # None: it hung
    out: str
    errors: str
    left: list[int]
    peak_bytes: int


def run(arguments: Sequence[str], limit: float, memory: int, **variables: str) -> Ended:
    """Runs a Python program with a cap on its address space, and looks for what it leaves."""
    token = uuid.uuid4().hex
    environment = os.environ | {TOKEN: token, "JAX_PLATFORMS": "cpu"} | variables

    def cap() -> None:
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            preexec_fn=cap,
            start_new_session=True,
        )
        deadline = time.monotonic() + limit
        ended = (0, 0, None)
        while not ended[0] and time.monotonic() < deadline:
            ended = os.wait4(process.pid, os.WNOHANG)
            time.sleep(0.02)
        status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
        if status is None:
            process.kill()
            ended = os.wait4(process.pid, 0)
        process.returncode = status or 0
        left = left_behind(token)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    assert ended[2] is not None
    return Ended(status, texts[0], texts[1], left, ended[2].ru_maxrss << 10)


def count_tracebacks(errors: str) -> int:
    """Counts the tracebacks that are no note about user-defined code, which is shown once."""
    return errors.count("Traceback (most") - errors.count("(shown once):\nTraceback (most")


def first_traceback(errors: str) -> str:
    """Returns what a process printed around its first traceback that is no note."""
    for found in re.finditer("Traceback .most", errors):
        if not errors[: found.start()].endswith("(shown once):\n"):
            return errors[max(found.start() - 200, 0) : found.start() + 2000]
    return errors[-1000:]


def read_lines(out: str) -> Iterator[dict[str, Any]]:
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                yield found


def judge(kind: str, grade: dict[str, Any], table: Table) -> None:
    """Compares a grade with what has to become of its kind."""
    reason, failed = grade["reason"], grade["failed"]
    expected = hostile.KINDS[kind].reason
    if not failed and expected and not expected.startswith("|"):
        table.bad["silent"].append(kind)
    elif failed and not re.match(expected.removeprefix("|") or "$", reason):
        table.bad["wrong"].append(f"{kind}: {reason}")
    elif failed and (not reason.isprintable() or len(reason) > 200 or not reason):
        table.bad["wrong"].append(f"{kind}: {reason!r} is not a line")


def judge_many(way: str, kinds: Sequence[str]) -> Table:
    """Plays many kinds in one process."""
    table = Table(f"{way}, one pool", len(kinds))
    start = time.monotonic()
    memory = 0 if WAYS[way].mode == "processes" else ADDRESS_SPACE
    ended = run([__file__, "--play", way, *kinds], 3 * LIMIT, memory)
    table.seconds = time.monotonic() - start
    grades = {}
    for line in read_lines(ended.out):
        if "key" in line:
            grades[line["key"]] = line["grade"]
        if "again" in line:
            table.bad["wrong"].append(f"{line['again']}, built again: {line['reason']}")
    for kind in kinds:
        if kind in grades:
            judge(kind, grades[kind], table)
        else:
            table.bad["hangs"].append(kind)
    for key, grade in grades.items():
        if key.startswith("honest") and (grade["failed"] or grade["score"] != 0.5):
            table.bad["wrong"].append(f"{key}: {grade['reason']}")
    if count_tracebacks(ended.errors) or ended.status != 0:
        where = first_traceback(ended.errors)
        table.bad["tracebacks"].append(f"status {ended.status}: {where}")
    table.bad["left"] += map(str, ended.left)
    return table


def judge_violent(kinds: Sequence[str]) -> Table:
    """Plays kinds in the event loop that may end its process, each in one of its own."""
    table = Table("asyncio, a process each", len(kinds))
    start = time.monotonic()
    for kind in kinds:
        ended = run([__file__, "--play", "asyncio", kind], 2 * LIMIT_OF_ONE, ADDRESS_SPACE)
        has_grade = any(line.get("key") == kind for line in read_lines(ended.out))
        if ended.status is None:
            table.bad["hangs"].append(kind)
        elif count_tracebacks(ended.errors):
            table.bad["tracebacks"].append(f"{kind}: {ended.errors[-1000:]}")
        elif not has_grade and not ended.errors.strip():
            table.bad["silent"].append(kind)
        if ended.left:
            table.bad["left"].append(f"{kind}: {ended.left}")
    table.seconds = time.monotonic() - start
    return table


# Whole runs.

RUN_SETTINGS = """
warm_start=none task.name=environment task.turn_reward=score task.reward.seconds=2
task.reward.memory_gib=1 task.max_failed_share=1 task.grade_workers=2
rollout.num_prompts=8 rollout.group_size=4 rollout.max_turns=3 rollout.max_reply_tokens=32
rollout.max_episode_tokens=0 train.steps=3 train.microbatch_tokens=2400
eval.every=0 eval.samples=0 eval.greedy=False
"""


def run_main(environment: str, workdir: Path, **variables: str) -> Ended:
    flags = [f"--config.{setting}" for setting in RUN_SETTINGS.split()]
    return run(
        [
            "-m",
            "jzero.main",
            f"--config={ROOT}/configs/guess.py:tiny",
            f"--workdir={workdir}",
            *flags,
            "--config.task.options=",  # of guess
            f"--config.task.environment={FILE}:{environment}",
        ],
        LIMIT,
        0,
        **variables,
    )


def check_run(name: str, ended: Ended, workdir: Path, table: Table) -> None:
    """Adds to a table what is wrong with a run that has ended."""
    table.num_played += 1
    lines = (workdir / "metrics.jsonl").read_text().splitlines() if ended.status == 0 else []
    if ended.status is None:
        table.bad["hangs"].append(name)
    elif count_tracebacks(ended.errors) or ended.status != 0 or len(lines) < 3:
        table.bad["tracebacks"].append(f"{name}: {ended.status} {ended.errors[-2000:]}")
    table.bad["left"] += [f"{name}: {pid}" for pid in ended.left]


def judge_runs() -> Table:
    """Trains a tiny model with hostile environments."""
    table = Table("whole runs")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "seen")
        seen.mkdir()
        ended = run_main("InRun", Path(folder, "kinds"), RUN_KINDS_SEEN=str(seen))
        check_run("kinds", ended, Path(folder, "kinds"), table)
        num_seen = len(list(seen.iterdir()))
        print(f"whole run: {num_seen} of {len(hostile.RUN_KINDS)} kinds were drawn")

        peaks = {}
        for name, variables in (("small", {"SMALL_REPLIES": "1"}), ("50 MB", {})):
            workdir = Path(folder, name.replace(" ", "_"))
            run_start = time.monotonic()
            ended = run_main("Replies", workdir, **variables)
            check_run(f"{name} replies", ended, workdir, table)
            peaks[name] = ended.peak_bytes
            seconds = time.monotonic() - run_start
            print(f"whole run, {name} replies: {ended.peak_bytes / 1e9:.2f} GB, {seconds:.0f} s")
        if peaks["50 MB"] > 1.25 * peaks["small"]:
            table.bad["wrong"].append("replies of 50 MB take memory of the run")
    table.seconds = time.monotonic() - start
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--play", nargs="+", metavar=("WAY", "KIND"), help="plays, and prints JSON")
    parser.add_argument("--only", action="append", help="one kind; with a flag for each")
    parser.add_argument("--way", help="processes, rewards or asyncio; all if it is left out")
    parser.add_argument("--no-runs", action="store_true", help="without whole runs")
    args = parser.parse_args()
    if args.play:
        way, *kinds = args.play
        try:
            play(WAYS[way], kinds)
        except UserError as error:
            sys.exit(f"error: {error}")
        return
    kinds = args.only or list(hostile.KINDS)
    tables = judge_pools(kinds, args.way)
    if not args.no_runs:
        tables.append(judge_runs())
    for table in tables:
        table.show()
    sys.exit(0 if all(table.is_fine for table in tables) else 1)


def judge_pools(kinds: Sequence[str], only: str | None = None) -> list[Table]:
    """Plays kinds in each way, or in one."""
    violent = [kind for kind in kinds if hostile.KINDS[kind].ends_process]
    mild = [kind for kind in kinds if kind not in violent]
    # What a reward function returns is no reply.
    as_rewards = [kind for kind in kinds if not is_about_replies(kind)]
    in_loop = [kind for kind in violent if kind not in hostile.NOT_IN_LOOP]
    tables = []
    if only in (None, "processes"):
        tables.append(judge_many("processes", kinds))
    if as_rewards and only in (None, "rewards"):
        tables.append(judge_many("rewards", as_rewards))
    if mild and only in (None, "asyncio"):
        tables.append(judge_many("asyncio", mild))
    if in_loop and only in (None, "asyncio"):
        tables.append(judge_violent(in_loop))
    return tables


def is_about_replies(kind: str) -> bool:
    names = list(hostile.KINDS)
    is_result = names.index("nothing") <= names.index(kind) <= names.index("generator")
    is_other = kind in ("three letters", "list as result", "dict") or "done" in kind
    is_reply = names.index(kind) < names.index("NaN") or kind == "reply changed later"
    return is_reply or is_result or is_other or kind in hostile.NOT_AS_REWARD


if __name__ == "__main__":
    main()
