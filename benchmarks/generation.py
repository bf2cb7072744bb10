"""Generation against servers that refuse, stall, cut replies and send thoughts, killed and resumed.

    python benchmarks/generation.py            # 600 problems with 2 samples, a row each
    python benchmarks/generation.py --group    # the same with a row for each problem
    python benchmarks/generation.py --quick    # 60 problems

`python -m jzero.generate` asks two stand-in servers (`stand_in_server.py`). One of them is gone
after a while, the command is killed twice with SIGKILL, and the file's last line is torn each time.
Then the same command runs to its end, once more on the complete file, and with --retry-errors on
servers that answer everything. The script prints these counts:

    rows           responses in the file when the command had ended
    answered       of these, responses with the right text, thoughts and columns
    refused        of these, errors with the refusal of the server
    unanswered     of these, errors of requests that no try has answered
    retried        requests beyond the first for a response, after failures and after kills
    asked again    requests for responses that were in the file when the command started
    duplicates     responses that are in the file twice
    missing        responses that are not in the file
    wrong          responses that are not what they must be
    out of order   rows of the complete file that are not in the order of the problems
    rerun          requests of the command on the complete file
    left           errors that are left after --retry-errors

It exits with 1 unless the counts from "asked again" on are 0, and the first four are exact.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stand_in_server import REFUSALS, StandIn, answer_to, is_answered, kind_of

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 2.0  # seconds of a request
STALL = 3.0
LONGEST = 300.0  # seconds of a command
SHOULD_BE_0 = ("asked_again", "duplicates", "missing", "wrong", "out_of_order", "rerun", "left")


@dataclass
class Counts:
    """What a generation has come to, as the module's docstring says."""

    rows: int = 0
    answered: int = 0
    refused: int = 0
    unanswered: int = 0
    retried: int = 0
    asked_again: int = 0
    duplicates: int = 0
    missing: int = 0
    wrong: int = 0
    out_of_order: int = 0
    rerun: int = 0
    left: int = 0


def write_problems(path: Path, count: int) -> None:
    """Writes problems with further columns, one of which has a name of the rows' own."""
    with path.open("w") as file:
        for i in range(count):
            row = {
                "problem": f"{i}+{i}=",
                "answer": str(2 * i),
                "id": f"uuid-{i}",
                "meta": {"n": i},
            }
            file.write(json.dumps(row) + "\n")


def command(data: Path, out: Path, urls: Sequence[str], samples: int, *more: str) -> list[str]:
    """Returns the command of a generation."""
    return [
        sys.executable,
        "-m",
        "jzero.generate",
        "--model-name=m",
        f"--base-url={','.join(urls)}",
        f"--data={data}",
        "--split=train",
        f"--out={out}",
        f"--n={samples}",
        f"--timeout={TIMEOUT}",
        "--retries=2",
        "--config.task.template=chat",
        "--config.task.grade_workers=1",
        "--config.rollout.num_slots=8",
        *more,
    ]


# -- Reading the file ------------------------------------------------------------------------------


def flat_rows(out: Path) -> list[dict]:
    """Returns the complete rows of a file, a grouped one as rows of single responses."""
    rows = []
    for line in out.read_text().split("\n")[:-1]:
        row = json.loads(line)
        if "completions" not in row:
            rows.append(row)
            continue
        for sample_index, completion in enumerate(row["completions"]):
            flat = {"sample": sample_index, "completion": completion}
            for name in ("error", "reasoning_content", "finish", "correct"):
                flat[name] = row[name][sample_index]
            rows.append(row | flat)
    return rows


def number_of(row: dict) -> int:
    """Returns the number of a row's problem."""
    return row["meta"]["n"]


def judge(row: dict, seeds: dict[tuple[int, int], int], counts: Counts) -> None:
    """Counts one row as what it is.

    `seeds` has the seed of each (number, sample), from which the server's answer follows.
    """
    number = number_of(row)
    gold = {"answer": str(2 * number), "question": f"{number}+{number}="}
    has_columns = (
        row["problem"] == gold["question"]
        and row["source_id"] == f"uuid-{number}"
        and row["answer"] == gold["answer"]
        and json.loads(row["gold"]) == gold
        and row["model_name"] == "m"
    )
    kind = kind_of(number)
    if not has_columns:
        counts.wrong += 1
    elif not is_answered(number):
        status = REFUSALS.get(kind)
        expected = f"status {status}" if status else "has not answered in 3 tries"
        is_right = expected in row["error"] and row["completion"] is None
        is_right &= "127.0.0.1" not in row["error"]
        counts.wrong += not is_right
        counts.refused += is_right and status is not None
        counts.unanswered += is_right and status is None
    else:
        content, reasoning, finish = answer_to(number, seeds[number, row["sample"]])
        text = content or ""
        if reasoning is not None:
            text = f"<think>\n{reasoning}" + (f"\n</think>\n\n{content}" if content else "")
        is_right = (
            row["error"] is None
            and row["completion"] == [{"role": "assistant", "content": text}]
            and row["reasoning_content"] == reasoning
            and row["finish"] == finish
            and row["correct"] == (f"boxed{{{2 * number}}}" in text)
        )
        counts.answered += is_right
        counts.wrong += not is_right


def count_rows(out: Path, problems: int, samples: int, seeds: dict) -> Counts:
    """Returns the counts of a file that is complete."""
    rows = flat_rows(out)
    keys = [(number_of(row), row["sample"]) for row in rows]
    counts = Counts(rows=len(rows), duplicates=len(keys) - len(set(keys)))
    counts.missing = len({(i, k) for i in range(problems) for k in range(samples)} - set(keys))
    counts.out_of_order = sum(key != wanted for key, wanted in zip(keys, sorted(keys), strict=True))
    for row in rows:
        judge(row, seeds, counts)
    return counts


def seeds_of(problems: int, samples: int) -> dict[tuple[int, int], int]:
    """Returns the seed that the command sends for each (number, sample)."""
    import zlib

    return {
        (i, k): zlib.crc32(f"0/math/train/{i}/{k}".encode()) >> 1
        for i in range(problems)
        for k in range(samples)
    }


# -- The attack ------------------------------------------------------------------------------------


def run_until(argv: Sequence[str], out: Path, count: int | None) -> None:
    """Runs the command to its end, or kills it once the file has `count` lines.

    Raises RuntimeError if it fails or takes too long.
    """
    deadline = time.monotonic() + LONGEST
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while count is not None and process.poll() is None:
            if out.exists() and out.read_bytes().count(b"\n") >= count:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {count} rows within {LONGEST:g} s")
            time.sleep(0.01)
        printed, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1.0))
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {printed[-2000:]}")


def tear(out: Path) -> None:
    """Cuts the last complete line of a file in half, as a kill while it is written does."""
    content = out.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    out.write_bytes(content[: (last + len(content)) // 2])


def attack(folder: Path, problems: int, samples: int, is_grouped: bool) -> Counts:
    """Kills and resumes a generation, and returns what it has come to."""
    data, out = folder / "data.jsonl", folder / "out.jsonl"
    write_problems(data, problems)
    seeds = seeds_of(problems, samples)
    keys = {(number, seed): (number, sample) for (number, sample), seed in seeds.items()}
    more = ["--group"] if is_grouped else []
    lines = problems if is_grouped else problems * samples
    requests = asked_again = 0
    asked: set = set()

    for count in (lines // 4, lines // 2, None):
        there = set()
        if out.exists():
            tear(out)
            there = {(number_of(row), row["sample"]) for row in flat_rows(out)}
        with StandIn(STALL) as steady, StandIn(STALL) as dying:
            dying.dies_after = lines // 8
            run_until(command(data, out, [steady.url, dying.url], samples, *more), out, count)
            logs = (steady.log, dying.log)
        requests += sum(sum(log.values()) for log in logs)
        asked |= {key for log in logs for key in log}
        asked_again += sum(keys[key] in there for log in logs for key in log)

    counts = count_rows(out, problems, samples, seeds)
    counts.retried, counts.asked_again = requests - len(asked), asked_again
    with StandIn(STALL, heals=True) as healed:
        run_until(command(data, out, [healed.url], samples, *more), out, None)
        counts.rerun = sum(healed.log.values())
        run_until(command(data, out, [healed.url], samples, *more, "--retry-errors"), out, None)
    rows = flat_rows(out)
    counts.left = sum(row["error"] is not None for row in rows) + abs(len(rows) - counts.rows)
    return counts


def failures(counts: Counts, problems: int, samples: int) -> list[str]:
    """Returns what is wrong with the counts."""
    kinds = [kind_of(i) for i in range(problems)]
    num_refused = samples * sum(kind in REFUSALS for kind in kinds)
    num_answered = samples * sum(is_answered(i) for i in range(problems))
    expected = {
        "rows": samples * problems,
        "answered": num_answered,
        "refused": num_refused,
        "unanswered": samples * problems - num_answered - num_refused,
    } | dict.fromkeys(SHOULD_BE_0, 0)
    values = asdict(counts)
    wrong = [f"{name} is not {value}" for name, value in expected.items() if values[name] != value]
    if not counts.retried:
        wrong.append("nothing was retried")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 problems")
    parser.add_argument("--group", action="store_true", help="one row for each problem")
    args = parser.parse_args()
    problems, samples = (60, 2) if args.quick else (600, 2)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = attack(Path(folder), problems, samples, args.group)
    for name, value in asdict(counts).items():
        print(f"{name.replace('_', ' '):14} {value:6,}")
    print(f"{'seconds':14} {time.monotonic() - began:6.0f}")
    wrong = failures(counts, problems, samples)
    if wrong:
        print(f"FAILED: {'; '.join(wrong)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
