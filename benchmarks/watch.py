"""Measures the live page on a run with many rollouts.

    python benchmarks/watch.py [--rollouts 100000] [--steps 2000] [--folder DIR]

The script writes a workdir with that many rollouts of 1,000 characters and 64 tokens, starts
`python -m jzero.watch` on it, and asks as the page does. It prints the size of the files, and:

    start      seconds from the start of the command until it listens
    state      seconds of the first reply with all curves
    last step  seconds until the index and the rows of the last step are there
    index      seconds until all rollouts are indexed
    search     seconds of a search over all rollouts that finds nothing
    memory     peak resident memory of the server, in MiB

With Chromium installed, `page` is the seconds from opening the page until rollouts are drawn.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from real import peak_gib

ROOT = Path(__file__).resolve().parents[1]
NUM_METRICS = 45


def write_workdir(workdir: Path, num_rollouts: int, num_steps: int) -> None:
    """Writes metrics.jsonl, samples.jsonl and config.json of a run."""
    chance = random.Random(0)
    letters = "".join(chance.choices("abcdefgh 123+-=", k=2000))
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps({"train": {"steps": num_steps}}))
    with (workdir / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row: dict[str, float] = {
                f"group{i % 6}/{i}": chance.random() for i in range(NUM_METRICS)
            }
            row |= {"reward/mean": chance.random(), "time/step": 10.0, "rollout/tokens": 1000.0}
            file.write(json.dumps({"step": step} | row) + "\n")
    with (workdir / "samples.jsonl").open("w") as file:
        for number in range(num_rollouts):
            begin = chance.randrange(1000)
            text, score = letters[begin : begin + 1000], float(chance.random() < 0.3)
            sample: dict[str, object] = {
                "step": 1 + number * num_steps // num_rollouts,
                "id": f"train/{number // 8 % 5000}",
                "sample": number % 8,
                "prompt": [{"role": "user", "content": letters[begin : begin + 100]}],
                "response": text,
                "gold": "7",
                "score": score,
                "advantage": score - 0.3,
                "reason": "correct" if score else "wrong value",
                "tokens": 64,
                "finish": "stop",
                "correct": bool(score),
                "rewards": {"accuracy": score, "format": 1.0},
                "group": 0,
                "token_texts": [text[i : i + 15] for i in range(0, 960, 15)],
                "logps": [round(-chance.random(), 3) for _ in range(64)],
                "ages": 0,
                "token_advantages": score - 0.3,
            }
            file.write(json.dumps(sample) + "\n")


def measure_page(url: str) -> float | None:
    """Returns the seconds until a browser has drawn rollouts; None without a browser."""
    sys.path.insert(0, str(ROOT / "tests" / "commands"))
    import pytest
    from browser import open_browser  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with open_browser(Path(folder) / "profile") as tab:
                start = time.monotonic()
                tab.open(url)
                tab.wait_for("document.querySelectorAll('article').length > 0")
                return time.monotonic() - start
        except pytest.skip.Exception:
            return None


def measure(workdir: Path, *, has_browser: bool) -> None:
    """Starts the server, asks it as the page does, and prints the table."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "jzero.watch", str(workdir), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        times = {"start": time.monotonic() - begin}
        page = measure_page(url) if has_browser else None
        if page is not None:
            times["page"] = page
        start = time.monotonic()
        httpx.get(f"{url}state", timeout=60).raise_for_status()
        times["state"] = time.monotonic() - start
        start, cursor, texts, generation, is_done = time.monotonic(), 0, 0, "", False
        while not is_done:
            query = {"run": 0, "generation": generation, "cursor": cursor, "texts": texts}
            reply = httpx.get(f"{url}index", params=query, timeout=60).json()
            generation, cursor, is_done = reply["generation"], reply["cursor"], reply["done"]
            texts += len(reply["texts"])
            if reply["blocks"] and "last step" not in times:
                lines = ",".join(str(reply["total"] - i) for i in range(1, 17))
                httpx.get(f"{url}rows", params={"run": 0, "lines": lines}, timeout=60)
                times["last step"] = time.monotonic() - start
            if not reply["blocks"]:
                time.sleep(0.05)
        times["index"] = time.monotonic() - begin - times["start"]
        start = time.monotonic()
        found = httpx.get(f"{url}search", params={"run": 0, "text": "zebra"}, timeout=60).json()
        times["search"] = time.monotonic() - start
        for name, seconds in times.items():
            print(f"{name:10}{seconds:8.2f} s")
        print(f"searched {found['searched']} of {found['total']} rollouts")
        print(f"memory    {1024 * peak_gib(server.pid):8.0f} MiB")
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the workdir stays; a temporary one")
    parser.add_argument("--no-browser", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        workdir = (args.folder or Path(temporary)) / "run"
        write_workdir(workdir, args.rollouts, args.steps)
        size = sum(file.stat().st_size for file in workdir.iterdir()) / 2**20
        print(f"{args.rollouts} rollouts, {args.steps} steps, {size:.0f} MiB")
        measure(workdir, has_browser=not args.no_browser)


if __name__ == "__main__":
    main()
