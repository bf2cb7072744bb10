"""The command blocks of README.md, docs/ and lab/: each one is run here, or says why it is not.

An HTML comment above a block states how the block is tested:

    runs            run here as it stands
    small           run here; each training command gets the settings of the tests' small runs
    tiny model      run here with a tiny model instead of one of the hub
    slow            run here as it stands, in minutes
    test command    the command that .ci/run executes
    tested: FILE    run by that test file
    needs: REASON   not run: it needs hardware, a server or a download
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
from runs import ROOT, RUN

from docs import reference
from jzero.algorithms import PRESETS, Algorithm
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import RATIOS
from jzero.config import Config, list_settings, split_flags
from jzero.errors import UserError
from jzero.fields import fields_of, part_name, parts_of
from jzero.run.workdir import MAY_CHANGE
from jzero.tasks.task import find_task

BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?```sh\n(.*?)```", re.DOTALL)
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "lab").glob("*.md")),
]
STOPPED_BY_TERM = 143  # the exit status of a shell whose last command killed its server


class Block(NamedTuple):
    """A command block of a page."""

    page: Path
    mark: str  # the comment above it
    text: str  # its commands


def find_blocks() -> list[Block]:
    """Returns the command blocks of all pages."""
    blocks = []
    for page in PAGES:
        for mark, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            blocks.append(Block(page, mark, text))
    return blocks


def block_name(block: Block) -> str:
    """Returns a readable test id: the page and the start of the first command."""
    first_line = next(line for line in block.text.splitlines() if line)
    return f"{block.page.stem}-{first_line[:40]}"


BLOCKS = find_blocks()


def marked(mark: str) -> list[Block]:
    """Returns the blocks whose comment is `mark`."""
    return [block for block in BLOCKS if block.mark == mark]


def page_name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("block", BLOCKS, ids=block_name)
def test_every_block_says_how_it_is_tested(block: Block) -> None:
    kind, _, rest = block.mark.partition(": ")

    assert kind in (
        "runs",
        "small",
        "tiny model",
        "slow",
        "test command",
        "needs",
        "tested",
    ), block.text
    if kind == "needs":
        assert rest, "the reason is missing"
    if kind == "tested":
        assert (ROOT / rest).exists()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))

    for target in targets:
        is_address = "://" in target
        assert is_address or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_headings_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))

    for target, anchor in links:
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("block", BLOCKS, ids=block_name)
def test_every_setting_of_a_block_exists(block: Block) -> None:
    given = [f"{flag}=1" for flag in re.findall(r"--config\.[a-z_.0-9]+", block.text)]
    split_flags(given)  # raises an error at the first name that does not exist


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def without_installations(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("pip install"))


def run(text: str, environment: dict[str, str], directory: Path) -> str:
    """Runs the commands of a block in `directory`, without its installations; returns stdout."""
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    text = without_installations(text).replace("8000", str(free_port()))

    # The command `jzero` of the clone, which need not be installed.
    script = directory / "bin" / "jzero"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m jzero "$@"\n')
    script.chmod(0o755)
    folders = [str(script.parent), str(Path(sys.executable).parent), environment["PATH"]]
    path = os.pathsep.join(folders)
    environment = environment | {"PYTHONPATH": str(ROOT), "PATH": path}
    command = ["bash", "-em", "-c", text]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, STOPPED_BY_TERM), f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("block", marked("runs"), ids=block_name)
def test_it_runs(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    run(block.text, environment, tmp_path)


@pytest.mark.parametrize("block", marked("small"), ids=block_name)
def test_it_runs_small(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    settings_of_tests = RUN[1:]  # the first flag is the recipe, which the page gives itself
    changes = ["train.steps=2", "warm_start.steps=2", "eval.every=0"]
    flags = [*settings_of_tests, *(f"--config.{change}" for change in changes)]
    flags += ["--workdir", "runs/small"]

    lines = []
    for line in block.text.splitlines():
        is_training = "jzero.main" in line
        lines.append(f"{line} {shlex.join(flags)}" if is_training else line)
    run("\n".join(lines), environment, tmp_path)

    assert list(tmp_path.glob("runs/*/summary.json"))


HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL_SIZES = {"rollout.max_new_tokens": 8, "rollout.num_prompts": 2, "rollout.group_size": 2}


@pytest.mark.parametrize("block", marked("tiny model"), ids=block_name)
def test_it_runs_with_a_tiny_model(
    block: Block, environment: dict[str, str], tmp_path: Path
) -> None:
    tiny.save_byte_model(tmp_path / "tiny")
    flags = " ".join(f"--config.{name}={value}" for name, value in SMALL_SIZES.items())
    lines = [
        f"{line} {flags}" if line.startswith("jzero train") else line
        for line in block.text.replace(HUB_MODEL, "tiny").splitlines()
    ]

    out = run("\n".join(lines), environment, tmp_path)

    assert list(tmp_path.glob("runs/*/summary.json"))
    assert "no difference is shown: " in out  # of so few problems


@pytest.mark.parametrize("block", marked("slow"), ids=block_name)
def test_it_runs_for_minutes(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    if ".venv" in block.text:
        clone = tmp_path / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["bash", "-ec", block.text], cwd=clone, check=True)
        return
    out = run(block.text, environment, tmp_path)

    # The block of the whole workflow ends with the answer of a server.
    if "jzero.serve" in block.text:
        assert '"completion_tokens": ' in out
        assert '"finish_reason": "' in out
        assert (tmp_path / "runs/sft/report.html").stat().st_size > 50_000


# Claims of the pages that are compared with the code.


def docs_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_settings_that_may_change_in_a_resumed_run_are_listed() -> None:
    words = " ".join(docs_page("start.md").split())
    _, _, rest = words.partition("Only `train.steps`")
    listed, end, _ = ("`train.steps`" + rest).partition("may change.")
    assert end

    names = set(re.findall(r"`([a-z_]+\.[a-z_*]+)`", listed))

    changeable = {
        "train.wandb_*" if name.startswith("train.wandb_") else name
        for name in MAY_CHANGE
        if not name.startswith(("hub.", "memory."))
    }
    assert names == changeable
    # The arguments of a part may change with it.
    settings = {item.name for item in list_settings(Config()) if not item.part}
    assert {name for name in settings if name.startswith(("hub.", "memory."))} <= set(MAY_CHANGE)


def test_the_example_of_an_error_is_what_the_error_says() -> None:
    with pytest.raises(UserError) as error:
        find_task("chess")

    assert f"\nerror: {error.value}\n" in docs_page("troubleshooting.md")


def test_the_reference_is_what_the_code_defines() -> None:
    for name, text in reference.pages().items():
        page = (reference.PAGES / name).read_text(encoding="utf-8")
        assert page == text, f"docs/reference/{name}: run python docs/reference.py"
    page = reference.TROUBLESHOOTING.read_text(encoding="utf-8")
    assert page == reference.troubleshooting_page(), "run python docs/reference.py"


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_recipe_has_a_tiny_preset(recipe: Path) -> None:
    assert "\ndef tiny() -> Config:" in recipe.read_text(encoding="utf-8")


def test_the_folders_of_architecture_md_are_those_of_the_package() -> None:
    folders = set(re.findall(r"^\| `([a-z]+)/`", docs_page("architecture.md"), re.MULTILINE))

    packages = {path.parent.name for path in (ROOT / "jzero").glob("*/__init__.py")}
    assert folders == packages - {"serving"}  # a command, and no part of a step


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described(name: str) -> None:
    assert re.search(rf"^\| (`\w+`, )?`{name}`", docs_page("algorithms.md"), re.MULTILINE)


PARTS = {
    name: [part_name(part) for part in parts_of(field)]
    for name, field in fields_of(Algorithm).items()
    if parts_of(field)
}


@pytest.mark.parametrize(
    "names", [*PARTS.values(), list(RATIOS), list(KL_ESTIMATORS)], ids=" ".join
)
def test_every_part_of_an_algorithm_is_described(names: list[str]) -> None:
    missing = [name for name in names if f"`{name}`" not in docs_page("algorithms.md")]
    assert not missing
