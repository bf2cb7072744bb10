"""The help on sections and settings, and the command that counts them."""

import subprocess
import sys

import pytest

from jzero import cli, config
from jzero.config import describe
from jzero.errors import UserError

SECTIONS = list(config.list_sections(config.Config()))
SCREEN_LINES, SCREEN_COLUMNS = 55, 100


@pytest.mark.parametrize("section", SECTIONS)
def test_the_help_on_a_section_fits_a_screen_and_names_every_setting(section: str) -> None:
    lines = describe.describe(section).splitlines()

    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    names = {line.split("=")[0].split(".")[0].strip() for line in lines if line.startswith("  ")}
    prefix = f"{section}." if section else ""
    for setting in config.list_settings(config.Config()):
        if setting.name.startswith(prefix):
            assert setting.name.removeprefix(prefix).split(".")[0] in names, setting.name


def test_the_help_on_a_setting_has_its_default_bounds_and_choices() -> None:
    assert describe.describe("optimizer.b1").splitlines() == [
        "--config.optimizer.b1=0.9",
        "    Decay of Adam's first moment. (at least 0, below 1)",
    ]
    assert describe.describe("--config.model.dtype").endswith("One of: bfloat16, float32.")


def test_a_name_that_is_none_is_refused_with_close_ones() -> None:
    with pytest.raises(UserError, match=r"--help rolout: no such section .* are rollout"):
        describe.describe("rolout")


def test_the_table_counts_every_setting_once() -> None:
    counts = {}
    for line in describe.count_table().splitlines()[1:]:
        number, _, section = line.split()
        counts[section] = int(number)
    # An argument of a part is not a setting of its own.
    settings = [item for item in config.list_settings(config.Config()) if not item.part]
    assert counts["all"] == len(settings)
    at_the_top = [number for section, number in counts.items() if "." not in section]
    without_section = [item for item in settings if "." not in item.name]
    assert sum(at_the_top) == 2 * len(settings) - len(without_section)  # `all`, and the sections


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--help"], ""),
        (["--config=a.py", "-h"], ""),
        (["--help", "rollout"], "rollout"),
        (["--help=rollout.stop", "--workdir=x"], "rollout.stop"),
        (["--help", "--workdir", "x"], ""),
        (["--config=a.py", "--helpful"], None),
    ],
)
def test_help_is_asked_for_with_or_without_a_name(arguments: list[str], name: str | None) -> None:
    assert cli.asked_help(arguments) == name


def test_the_command_counts_and_describes() -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "jzero.config", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run() == (0, describe.count_table() + "\n", "")
    assert run("mesh") == (0, describe.describe("mesh") + "\n", "")
    code, _, errors = run("mash")
    assert code == 2 and errors.startswith("error: --help mash: no such section or setting")
