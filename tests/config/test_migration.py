"""docs/start.md: each jzero command has the settings that the table below it says."""

import re
import shlex
from pathlib import Path

import pytest
from settings_by_name import ROOT, shown_value

from jzero import config, main
from jzero.rewards import rewards
from jzero.tasks import check_task_settings

PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
SYSTEMS = (
    "TRL",
    "open-r1",
    "open-r1: supervised fine-tuning",
    "oat",
    "oat: PPO on GSM8K",
    "oat: GRPO on Countdown",
    "AReaL",
    "AReaL: the agent of several turns",
    "verl",
)
# Functions with the names of the page.
REWARDS = """
def accuracy_reward(completions, solution, **kwargs):
    return [0.0 for _ in completions]


def len_reward(completions, solution, **kwargs):
    return [0.0 for _ in completions]
"""


def section(system: str) -> str:
    _, _, rest = PAGE.partition(f"\n### From {system}\n")
    return rest.partition("\n### ")[0]


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


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
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


def test_the_page_has_a_section_for_each_system() -> None:
    assert tuple(re.findall(r"^### From (.*)$", PAGE, re.MULTILINE)) == SYSTEMS
