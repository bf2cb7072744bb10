"""The agent of docs/agents.md: the commands of the page, with fewer steps."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from runs import ROOT, read_jsonl

PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")


def test_the_agent_of_the_page_learns_from_the_commands_of_the_page(
    environment: dict[str, str], tmp_path: Path
) -> None:
    [(name, source)] = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(source, encoding="utf-8")
    mark = "<!-- tested: tests/environments/test_agents_page.py -->"
    [block] = re.findall(re.escape(mark) + r"\n```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = block.replace("\\\n", " ").strip().splitlines()
    small = "--config.rollout.num_prompts=8 --config.train.minibatches=1 --config.eval.problems=8"
    further = [
        f"{small} --config.warm_start.steps=40",
        f"{small} --config.train.steps=2 --config.train.logged_rollouts=16",
    ]
    for command, settings in zip(commands, further, strict=True):
        python, *arguments = shlex.split(f"{command} {settings}")
        assert python == "python"
        arguments = [word.replace("configs/", f"{ROOT}/configs/") for word in arguments]
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    rows = read_jsonl(tmp_path / "runs/agent/metrics.jsonl")
    steps = [row for row in rows if "agent/responses" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["agent/branches"] == 64 and row["agent/repeated_tokens"] == 0
        assert 64 <= row["agent/responses"] <= 3 * 64
    samples = read_jsonl(tmp_path / "runs/agent/samples.jsonl")
    assert all(json.loads(row["prompt"])["seed"] for row in samples)
    assert {"correct", "ended"} >= {row["reason"] for row in samples}
