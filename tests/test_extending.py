"""docs/extend.md: the code of the page is written to files and run, so that the page stays true.

A comment `<!-- file: NAME -->` above a Python block gives the file that the block is.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"(?:<!-- file: (\S+) -->\n)?```python\n(.*?)```", re.DOTALL)
DIFF = re.compile(r"<!-- diff -->\n```diff\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"<!-- tested: tests/test_extending\.py -->\n```sh\n(.*?)```", re.DOTALL)


def run_command(command: str, folder: Path, environment: dict[str, str]) -> None:
    """Runs a command of the page in a folder."""
    program, *arguments = command.split()
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Returns a folder with the files of the page, in which its first command has run."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in PYTHON.findall(PAGE):
        (folder / name).write_text(text, encoding="utf-8")
    first, _ = commands_of_the_page()
    run_command(first, folder, environment | {"PYTHONPATH": str(ROOT)})
    return folder


def commands_of_the_page() -> list[str]:
    """Returns the commands that use what the page defines."""
    [commands] = COMMANDS.findall(PAGE)
    return commands.splitlines()


def read_episodes(run: Path) -> list[dict[str, Any]]:
    """Returns the logged episodes of a run, of all of its steps."""
    episodes = []
    for file in sorted(run.glob("trajectories/*/*.jsonl")):
        episodes += read_jsonl(file)
    return episodes


def test_every_python_block_of_the_page_is_a_file() -> None:
    names = [name for name, _ in PYTHON.findall(PAGE)]

    assert all(names), "a block has no comment with the name of its file"
    assert len(set(names)) == len(names)
    assert len(names) == 10


def test_a_run_uses_the_reward_of_the_page_and_trains(folder: Path) -> None:
    rows = read_jsonl(folder / "runs/game/metrics.jsonl")

    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["reward/my_rewards.single_letter"] <= 1
    assert max(row["optimizer/grad_norm"] for row in rows) > 0


def test_a_run_calls_the_callback_of_the_page(folder: Path) -> None:
    lines = (folder / "runs/game/rewards.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]


def test_a_run_uses_the_algorithm_the_track_the_kernel_and_the_options_of_the_page(
    folder: Path,
) -> None:
    settings = json.loads((folder / "runs/game/config.json").read_text())
    assert settings["algorithm"]["name"] == "clip_higher"
    assert settings["algorithm"]["advantage"] == {"kind": "sign_by_entropy"}
    assert settings["model"]["attention"] == "my_kernel"
    assert settings["task"]["options"] == ["letters=3", "near=0.1"]


def test_episodes_have_the_prompt_and_the_replies_of_the_page(folder: Path) -> None:
    episodes = read_episodes(folder / "runs/game")

    assert {episode["prompt"] for episode in episodes} == {"find a..c\n"}
    text = json.dumps(episodes)
    assert "earlier" in text
    assert "later" in text
    assert max(len(episode["turns"]) for episode in episodes) == 3


def test_an_option_on_the_command_line_reaches_the_task(
    folder: Path, environment: dict[str, str]
) -> None:
    _, second = commands_of_the_page()
    run_command(second, folder, environment | {"PYTHONPATH": str(ROOT)})

    episodes = read_episodes(folder / "runs/six")

    assert {episode["prompt"] for episode in episodes} == {"find a..f\n"}


def test_the_exported_model_is_of_the_new_family(folder: Path) -> None:
    newest = max((folder / "runs/game").glob("export-*/config.json"))

    exported = json.loads(newest.read_text())

    assert exported["model_type"] == "my_qwen"
    assert exported["architectures"] == ["MyQwenForCausalLM"]


# -- The diffs of the page -------------------------------------------------------------------------


def apply(diff: str, checkout: Path) -> None:
    """Applies a unified diff whose context is unique in its files."""
    for part in diff.split("--- a/")[1:]:
        name, _, hunks = part.partition("\n")
        path = checkout / name
        for hunk in hunks.split("@@\n")[1:]:
            lines = re.sub("\n(@@ [^\n]*)$", "\n", hunk).splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
            after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
            text = path.read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{name}:\n{before}"
            path.write_text(text.replace(before, after), encoding="utf-8")


DEFINED = """
import sys
import jzero.config
sys.path.insert(0, sys.argv[1])
import reference
assert "| `policy/ratio_max` |  | Largest ratio of a trained token. |" in reference.metrics_page()
assert "at which the gradient is 0" in reference.settings_page()
"""


def test_the_diffs_of_the_page_add_a_metric_and_a_loss(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shutil.copytree(ROOT / "jzero", tmp_path / "jzero")
    for name, text in PYTHON.findall(PAGE):
        (tmp_path / name).write_text(text, encoding="utf-8")
    diffs = DIFF.findall(PAGE)
    assert len(diffs) == 2
    for diff in diffs:
        apply(diff, tmp_path)
    changed = environment | {"PYTHONPATH": str(tmp_path)}
    first, _ = commands_of_the_page()

    run_command(
        f"{first} --config.algorithm.surrogate=spo --config.train.steps=1", tmp_path, changed
    )

    [row] = read_jsonl(tmp_path / "runs/game/metrics.jsonl")
    assert row["policy/ratio_max"] == 1  # of the only optimizer step of the rollouts
    assert row["optimizer/grad_norm"] > 0
    settings = json.loads((tmp_path / "runs/game/config.json").read_text())
    assert settings["algorithm"]["surrogate"] == {"kind": "spo", "bound": 0.2}
    pages = [sys.executable, "-c", DEFINED, str(ROOT / "docs")]
    done = subprocess.run(pages, cwd=tmp_path, env=changed)
    assert done.returncode == 0


# -- A setting -------------------------------------------------------------------------------------

# The one place that a new setting needs: its field, with a bound and its help.
NEW_SETTING = '''
    new_number: int = Field(default=3, ge=1, le=9)
    """What the new setting does."""
'''
WITH_SETTING = """
import linecache
import sys
from importlib.machinery import SourceFileLoader

read = SourceFileLoader.get_data


def get_data(self, path):
    data = read(self, path)
    if path.endswith("jzero/config/schema.py"):
        start = b"class EvalConfig:"
        assert data.count(start) == 1
        head, tail = data.split(start)
        first = tail.index(b"    problems: int")
        data = head + start + tail[:first] + FIELD.encode().lstrip(b"\\n") + tail[first:]
        # pydantic reads the help of a field from the source.
        lines = data.decode().splitlines(keepends=True)
        linecache.cache[path] = (len(data), None, lines, path)
    return data


SourceFileLoader.get_data = get_data
sys.path.insert(0, "docs")
"""
USES_OF_A_SETTING = """
import contextlib
import io
import reference
from jzero import config, main
from jzero.config.describe import describe

name, recipe = "eval.new_number", "--config=configs/countdown.py:tiny"
assert main.parse([recipe]).settings.eval.new_number == 3
settings = main.parse([recipe, f"--config.{name}=5"]).settings
assert settings.eval.new_number == 5
assert config.from_json(config.to_json(settings), "config.json") == settings
assert "What the new setting does." in describe(name) and "at most 9" in describe(name)
assert "new_number" in reference.settings_page()
mistakes = {
    f"--config.{name}=10": "eval.new_number=10 must be at most 9",
    f"--config.{name}=x": "eval.new_number=x must be a whole number",
    "--config.eval.new_numbr=5": "did you mean eval.new_number?",
    "--new_number=5": "write --config.eval.new_number=5",
}
for flag, message in mistakes.items():
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main.parse([recipe, flag])
    assert message in said.getvalue(), said.getvalue()
"""


def test_a_setting_is_added_in_one_place(tmp_path: Path, environment: dict[str, str]) -> None:
    script = f"FIELD = {NEW_SETTING!r}\n{WITH_SETTING}{USES_OF_A_SETTING}"
    done = subprocess.run(
        [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", script],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
