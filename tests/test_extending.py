"""docs/extending.md: the code of the page is written to files and run, so that the page stays true.

A comment `<!-- file: NAME -->` above a Python block gives the file that the block is.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"(?:<!-- file: (\S+) -->\n)?```python\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"<!-- tested: tests/test_extending\.py -->\n```sh\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Returns a folder with the files of the page, in which the commands of the page have run."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in PYTHON.findall(PAGE):
        (folder / name).write_text(text, encoding="utf-8")
    [commands] = COMMANDS.findall(PAGE)
    for command in commands.splitlines():
        program, *arguments = command.split()
        assert program == "python"
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return folder


def read_metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_episodes(run: Path) -> list[dict]:
    files = sorted(run.glob("trajectories/*/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_python_block_of_the_page_is_a_file():
    names = [name for name, _ in PYTHON.findall(PAGE)]

    assert all(names) and len(set(names)) == len(names) == 8


def test_a_run_uses_everything_on_the_page(folder):
    rows = read_metrics(folder / "runs/game")

    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["reward/my_rewards.single_letter"] <= 1 for row in rows)
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
    settings = json.loads((folder / "runs/game/config.json").read_text())
    assert settings["algorithm"]["name"] == "clip_higher"
    assert settings["algorithm"]["advantage"] == "sign"
    assert settings["model"]["attention"] == "my_kernel"
    assert settings["task"]["options"] == ["letters=3", "near=0.1"]


def test_episodes_have_the_prompt_and_the_replies_of_the_page(folder):
    episodes = read_episodes(folder / "runs/game")

    assert {episode["prompt"] for episode in episodes} == {"find a..c\n"}
    text = json.dumps(episodes)
    assert "earlier" in text and "later" in text
    assert max(len(episode["turns"]) for episode in episodes) == 3


def test_an_option_on_the_command_line_reaches_the_task(folder):
    episodes = read_episodes(folder / "runs/six")

    assert {episode["prompt"] for episode in episodes} == {"find a..f\n"}


def test_the_exported_model_is_of_the_new_family(folder):
    [config] = sorted((folder / "runs/game").glob("export-*/config.json"))[-1:]

    exported = json.loads(config.read_text())

    assert exported["model_type"] == "my_qwen"
    assert exported["architectures"] == ["MyQwenForCausalLM"]
