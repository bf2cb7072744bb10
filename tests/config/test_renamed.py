"""Old names of settings and classes are refused with their new names, wherever they are read."""

import json
from pathlib import Path

import pytest

from jzero import cli, config
from jzero.config import renamed
from jzero.errors import UserError
from jzero.run.workdir import check_workdir

NAMES = {setting.name for setting in config.list_settings(config.Config())}


def test_old_names_are_gone_and_new_names_exist() -> None:
    assert not NAMES & renamed.RENAMED_SETTINGS.keys()
    assert set(renamed.RENAMED_SETTINGS.values()) <= NAMES
    assert not vars(config).keys() & renamed.RENAMED_NAMES.keys()
    assert set(renamed.RENAMED_NAMES.values()) <= vars(config).keys()


@pytest.mark.parametrize("name", renamed.RENAMED_SETTINGS)
def test_a_flag_with_an_old_name_is_told_the_new_one(
    name, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.check_setting_names([f"--config.{name}=4"])

    message = f"--config.{name}=4: {name} is now {renamed.RENAMED_SETTINGS[name]}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", renamed.RENAMED_NAMES)
def test_a_recipe_that_imports_an_old_name_is_told_the_new_one(name) -> None:
    with pytest.raises(
        UserError, match=f"{name} is now jzero.config.{renamed.RENAMED_NAMES[name]}"
    ):
        getattr(config, name)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rolout'"):
        config.Rolout  # noqa: B018


def test_a_workdir_of_an_older_jzero_is_refused_with_all_new_names(tmp_path: Path) -> None:
    current = config.to_json(config.Config())
    old = json.loads(current)
    old["rollout"]["prompts"] = old["rollout"].pop("num_prompts")
    old["train"]["tokens"] = old["train"].pop("microbatch_tokens")
    (tmp_path / "config.json").write_text(json.dumps(old))

    with pytest.raises(UserError) as caught:
        check_workdir(tmp_path, current)

    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert "rollout.prompts is now rollout.num_prompts" in message
    assert "train.tokens is now train.microbatch_tokens" in message
