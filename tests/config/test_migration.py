"""docs/start.md: each jzero command has the settings that the table below it says."""

import re
import shlex
from pathlib import Path

import pytest
from settings_by_name import ROOT, shown_value
from start_page import REWARDS, SYSTEMS, section

from jzero import config, main
from jzero.rewards import rewards
from jzero.tasks import check_task_settings


def built(system: str) -> config.Config:
    """Returns the config of the jzero command of a section."""
    [command] = re.findall(r"```sh\n(.*?)```", section(system), re.DOTALL)
    program, *arguments = shlex.split(command.replace("\\\n", " "))[2:]
    assert program == "jzero.main"
    return main.parse(
        [argument.replace("configs/", f"{ROOT}/configs/") for argument in arguments]
    ).settings


def rows(system: str) -> list[tuple[str, str]]:
    """Returns the settings of the table of a section, as names and values."""
    table = re.findall(r"^\| .*? \| (.*?) \| .*?\|$", section(system), re.MULTILINE)
    cells = [cell for cell in table if "`" in cell]
    found = re.findall(r"`([a-z_0-9.]+)=([^`]*)`", " ".join(cells))
    assert len(found) >= len(cells), "each row names a setting and its value"
    return found


def is_equal(value: object, text: str) -> bool:
    """Returns whether a setting has the value that the page shows."""
    if isinstance(value, tuple):
        items = text.split(",")
        return len(items) == len(value) and all(map(is_equal, value, items))
    return value == float(text) if isinstance(value, float) else str(value) == text


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_command_has_the_settings_of_its_table(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    settings = built(system)
    config.validate(settings)
    check_task_settings(settings.task, settings.rollout.max_turns)
    rewards.check_rewards(settings.task.reward)
    listed = rows(system)
    assert len(listed) > 10
    wrong = [
        f"{name}={shown_value(settings, name)}, and {text} on the page"
        for name, text in listed
        if not is_equal(shown_value(settings, name), text)
    ]
    assert not wrong


def test_the_page_has_sections() -> None:
    assert {"TRL", "open-r1", "oat", "AReaL", "verl"} <= set(SYSTEMS)
